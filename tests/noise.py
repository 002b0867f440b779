"""The kernels of another machine, which round otherwise: `python -m pytest --noise SEED`. A matrix
product, forward and backward, is multiplied by 1 - 2^-23, 1 or 1 + 2^-23 (2^-52 in float64), as a
function of its shape, the element and the seed alone: a run and its resumed twin still agree."""
import zlib

import torch
import torch.nn.functional as F

OFF = []            # -1, 0 and 1 by chance: a product reads them from a place that its shape gives


class Rounded(torch.autograd.Function):
    """A product off by a last bit, whose gradient is off by one before the backward products."""

    @staticmethod
    def forward(ctx, x):
        return rounded(x)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient)


def rounded(x):
    start = zlib.crc32(repr(x.shape).encode()) % 2 ** 22
    off = OFF[0][start:start + x.numel()].view(x.shape)
    return x * (1 + torch.finfo(x.dtype).eps * off.to(x.dtype))


def wrapped(product):
    def noisy(*args, **named):
        x = product(*args, **named)
        exact = x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64)
        return x if exact or type(x) is not torch.Tensor else Rounded.apply(x)
    return noisy


def install(seed):
    """From now on, in this process and those that it forks."""
    generator = torch.Generator().manual_seed(seed)
    OFF[:] = [torch.randint(-1, 2, (2 ** 25,), dtype=torch.int8, generator=generator)]
    for owner, names in ((F, "linear scaled_dot_product_attention"), (torch.Tensor, "__matmul__"),
                         (torch, "matmul bmm einsum")):
        for name in names.split():
            setattr(owner, name, wrapped(getattr(owner, name)))
