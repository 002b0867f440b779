"""Another machine's kernels round otherwise: with `--noise SEED` each matrix product, forward and
backward, is multiplied by 1 - 2^-23, 1 or 1 + 2^-23 (2^-52 in float64), by its shape, the element
and the seed alone: a run and its resumed twin agree."""
import zlib

import torch
import torch.nn.functional as F

OFF = []            # -1, 0 or 1: a product reads them from a place that its shape gives


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        start = zlib.crc32(repr(x.shape).encode()) % 2 ** 22
        off = OFF[0][start:start + x.numel()].view(x.shape)
        return x * (1 + torch.finfo(x.dtype).eps * off.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):        # which the products of the backward pass read
        return Rounded.forward(ctx, gradient)


def wrapped(product):
    def rounded(*args, **named):
        x = product(*args, **named)
        here = type(x) is torch.Tensor and x.device.type == "cpu"
        return Rounded.apply(x) if here and x.dtype in (torch.float32, torch.float64) else x
    return rounded


def install(seed):
    """From now on, in this process and those that it forks."""
    generator = torch.Generator().manual_seed(seed)
    OFF.append(torch.randint(-1, 2, (2 ** 25,), dtype=torch.int8, generator=generator))
    for owner, names in ((F, "linear scaled_dot_product_attention"), (torch.Tensor, "__matmul__"),
                         (torch, "matmul bmm einsum")):
        for name in names.split():
            setattr(owner, name, wrapped(getattr(owner, name)))
