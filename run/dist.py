"""Ranks, sums over them, random streams."""
import math
import os
import random
import sys

import numpy as np
import torch
from torch import distributed

from data import UserError
from run.device import device_of, prepare

# -------------------------------------------------------------------- the ranks

def start(cfg):
    """Prepares this process, which joins the others, if torchrun started it."""
    prepare()
    device = device_of(cfg)
    if "RANK" not in os.environ or distributed.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")

def rank():
    """The number of this process; 0 without torchrun."""
    return distributed.get_rank() if distributed.is_initialized() else 0

def ranks():
    """The number of processes; 1 without torchrun."""
    return distributed.get_world_size() if distributed.is_initialized() else 1

def of_rank(items):
    """This rank's share of a sequence that all ranks have: every n-th item, for n ranks."""
    return items[rank()::ranks()]

def all_reduce(x, op=distributed.ReduceOp.SUM):
    """A tensor summed, or reduced by `op`, over all ranks."""
    if distributed.is_initialized():
        x = x.to("cuda" if distributed.get_backend() == "nccl" else "cpu", copy=True)
        distributed.all_reduce(x, op)
    return x

def largest(n):
    """The largest of an integer or a bool over all ranks, as an integer."""
    return all_reduce(torch.tensor(int(n)), distributed.ReduceOp.MAX).item()

def numbered(groups):
    """The numbers of this rank's rows, of numbered groups (B,), among those of all ranks, and how
    many there are. Groups belong to the ranks in turn."""
    gathered = gather(groups)
    number = torch.cat(gathered).argsort(stable=True).argsort()
    return number.split([*map(len, gathered)])[rank()], len(number)

def mean_and_std(x):
    """Mean and std of x (n,) over all ranks, without Bessel's correction."""
    n = all_reduce(torch.tensor(float(len(x)), device=x.device)).clamp(min=1)
    mean = all_reduce(x.sum()) / n
    variance = all_reduce((x - mean).square().sum()) / n
    return mean, variance.sqrt()

def gather(x):
    """What each rank has for x, any object, in a list."""
    if ranks() == 1:
        return [x]
    found = [None] * ranks()
    distributed.all_gather_object(found, x)
    return found

def sums(stats):
    """Each tensor () of a dict, summed over all ranks, as a number."""
    total = all_reduce(torch.stack([*stats.values()]))
    return dict(zip(stats, total.tolist()))

def means(stats):
    """The mean of each tensor of a dict, over all ranks, whose names must be the same."""
    names = sorted(stats)  # a rank's dicts may be in an order of their own
    if any(other != names for other in gather(names)):
        raise UserError("the rewards of other ranks have other components")
    total = torch.stack([stats[name].float().sum() for name in names])
    count = torch.tensor([stats[name].numel() for name in names]).to(total)
    total, count = all_reduce(torch.stack([total, count]))
    found = dict(zip(names, (total / count.clamp(min=1)).tolist()))
    return {name: found[name] for name in stats}

def wait_for_all():
    all_reduce(torch.zeros(())).item()

def exit_with(code):
    """Exits, or returns if the code is 0. Ranks wait for each other except after an error."""
    if distributed.is_initialized() and code != 2:
        wait_for_all()
        os._exit(code)  # gloo's threads can abort a normal exit
    if code:
        sys.exit(code)

# ------------------------------------------------------- the models of the ranks

def sync_sampler(agent):
    """Copies the policy's weights into the sampler, if that is another module."""
    if agent.sampler is not agent.policy:
        copy_weights(agent.sampler, agent.policy)

@torch.no_grad()
def copy_weights(copied, policy):
    """Copies the policy's weights and buffers into a frozen copy, whose head may be untied."""
    source = dict(policy.named_parameters()) | dict(policy.named_buffers())
    target = dict(copied.named_parameters()) | dict(copied.named_buffers())
    if policy.cfg.tied and "lm_head.weight" in target:
        source["lm_head.weight"] = source["embed_tokens.weight"]
    if differing := source.keys() ^ target.keys():
        raise UserError(f"cannot copy the policy: only one of the two has {min(differing)}")
    for name, p in target.items():
        p.copy_(source[name])

def trained(opt):
    """The parameters of an optimizer."""
    return [p for group in opt.param_groups for p in group["params"]]

def sum_gradients(params):
    """Sums gradients over the ranks; without rows a rank has none."""
    for p in params:
        p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)

def clip_gradients(params, most):
    """Clips the norm of all gradients to `most`; returns the old one, which must be finite."""
    norm = torch.nn.utils.clip_grad_norm_(params, most).item()
    if not math.isfinite(norm):
        raise UserError(f"the norm of the gradient is {norm}: see \"The gradient is not finite\" "
                        f"in docs/troubleshooting.md")
    return norm

def check_alike(tensors):
    """UserError if tensors differ between ranks."""
    if ranks() == 1:
        return
    sums = {name: (tuple(x.shape), x.contiguous().flatten().view(torch.uint8).sum().item())
            for name, x in tensors.items()}
    for other in gather(sums):
        if differing := {name for name, _ in other.items() ^ sums.items()}:
            raise UserError(f"the ranks no longer hold the same {min(differing)}; continue from "
                            f"the last checkpoint with --resume")

# --------------------------------------------------------------- random streams

def rng(cfg, purpose, at=0):
    """A random stream for a purpose and step: it follows from the seed, so no state is saved."""
    return random.Random(f"{cfg.seed}/{purpose}/{at}")

def generator(cfg, purpose):
    """The same for torch, to initialise the weights of a new model."""
    return torch.Generator().manual_seed(rng(cfg, purpose).getrandbits(63))

def uniform(rng, *shape):
    """float64 uniforms in [0, 1), the same on every machine."""
    return torch.from_numpy(np.random.default_rng(rng.getrandbits(64)).random(shape))

def uniform_here(rng, n, group, N):
    """`uniform` for the rows of this rank's n problems, (B, N), whatever the number of ranks."""
    return of_rank(uniform(rng, n * ranks(), group, N)).flatten(0, 1)
