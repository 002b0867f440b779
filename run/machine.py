"""The machine: device, dtype and compilation, the ranks, random streams, signals."""
import contextlib
import ctypes
import os
import random
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

from data import UserError
from model import Block

# ------------------------------------------------------------------------------------- the device

def resolve(cfg):
    """(device, dtype name, whether to compile): the best there is where cfg says auto."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    kind = next(d for d in there if there[d]) if cfg.device == "auto" else cfg.device
    if not there[kind]:
        raise UserError(f"--device {kind}: there is none here")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    dtype = ("bfloat16" if kind == "cuda" else "float32") if cfg.dtype == "auto" else cfg.dtype
    return device, dtype, kind == "cuda" if cfg.compile == "auto" else cfg.compile == "on"

def double(device):
    """float64, or the widest floats that a device has: mps has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

def compile_all(cfg, *modules):
    """torch.compile, if cfg says so, of each layer of the modules that are not None. Layers share
    their graphs (prompts, one token, training; a batch of one row), whichever module they are of.
    These count against one limit, by default 8."""
    if resolve(cfg)[2]:
        torch._dynamo.config.recompile_limit = 64
        torch.fx.experimental._config.use_duck_shape = False    # sizes that are equal by chance
        layers = [layer for module in filter(None, modules) for layer in module.modules()]
        for layer in layers:
            if isinstance(layer, Block):
                layer.compile(dynamic=True)

def prepare():
    """Let stdout replace what the terminal cannot show, and have glibc keep freed memory: handed
    back to the system, every activation faults in anew, on a CPU a twentieth of a training step."""
    if hasattr(sys.stdout, "reconfigure"):      # a notebook's has no such method
        sys.stdout.reconfigure(errors="replace")
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2 ** 31 - 1)       # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)           # M_MMAP_THRESHOLD, at its largest

# -------------------------------------------------------------------------------------- the ranks

def start_ranks(device):
    """Join the other processes, if torchrun started this one."""
    if "RANK" in os.environ and not dist.is_initialized():
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(f"RANK is set and {name} is not: let torchrun start ranks, or "
                                f"unset it")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except (ValueError, RuntimeError) as e:
            raise UserError(f"cannot join the other ranks: {str(e).splitlines()[0]}") from e

def world():
    """(rank, number of ranks) under torchrun; (0, 1) without."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def local_share(items):
    """This rank's share of a sequence that every rank holds: each in turn takes one."""
    rank, ranks = world()
    return items[rank::ranks]

def all_reduce(x, op=dist.ReduceOp.SUM):
    """Sum (or `op`) of a tensor over all ranks."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x, op)
    return x

def common_device():
    """Where a tensor must be that the ranks reduce."""
    cuda = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda" if cuda else "cpu")

def mean_and_std(x):
    """Of the numbers x (n,) of all ranks, without Bessel's correction."""
    n = all_reduce(torch.tensor(float(len(x)), device=x.device)).clamp(min=1)
    mean = all_reduce(x.sum()) / n
    return mean, (all_reduce((x - mean).square().sum()) / n).sqrt()

def means(stats):
    """The means of tensors by name, over their elements and all ranks."""
    parts = torch.stack([x.float().mean() for x in stats.values()])
    return dict(zip(stats, (all_reduce(parts) / world()[1]).tolist()))

def wait_for_all():
    """Go on when all ranks are here: what one of them writes next, no other is reading."""
    if dist.is_initialized():
        dist.barrier()

def exit_with(code):
    """End the process, if there is something to tell or there are ranks."""
    if dist.is_initialized() and code != 2:     # gloo's threads can abort an orderly exit
        wait_for_all()
        os._exit(code)          # what was printed is flushed
    if code:
        sys.exit(code)

# ----------------------------------------------------------------------------------- random streams

def rng(cfg, purpose, at=0):
    """A random stream for each purpose and step: it follows from the seed, so nothing is stored."""
    return random.Random(f"{cfg.seed}/{purpose}/{at}")

def generator(cfg, purpose):
    """The same for what torch draws: weights of a new model."""
    return torch.Generator().manual_seed(rng(cfg, purpose).getrandbits(63))

def uniform(rng, *shape):
    """Numbers in [0, 1) from a random stream, float64, the same on every machine."""
    return torch.from_numpy(np.random.default_rng(rng.getrandbits(64)).random(shape))

# --------------------------------------------------------------------------------------- signals

class Stopped(Exception):
    """A signal asked to stop, of this `number`; all that was made is saved, and `command` goes on
    from there."""
    number, command = 0, ""

ASKED = []      # signals that came: the step in progress is finished and saved first

def ask_to_stop(number, frame):
    """Remember a signal; obey a second one at once."""
    if ASKED:
        sys.exit(128 + number)
    ASKED.append(number)

@contextlib.contextmanager
def stoppable(command=""):
    """In this context Ctrl-C and SIGTERM ask to stop; after it they do what they did before. That
    another rank is no longer there raises UserError."""
    before = {number: signal.signal(number, ask_to_stop)
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped as when:
        when.number, when.command = stop_asked(), command
        raise
    except RuntimeError as e:           # gloo's has no type of its own
        if isinstance(e, dist.DistError) or "gloo" in str(e):
            raise UserError("another rank has ended; go on from the last checkpoint with "
                            "--resume") from e
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ASKED.clear()

def stop_asked():
    """The number of a signal that came to any rank; 0 without one."""
    number = torch.tensor(max(ASKED, default=0), device=common_device())
    return all_reduce(number, dist.ReduceOp.MAX).item()
