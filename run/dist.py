"""Device, dtype and compilation, ranks, random streams, signals."""
import contextlib
import ctypes
import os
import random
import signal
import sys

import numpy as np
import torch
from torch import distributed

from data import UserError
from model import Block, GPT
from run import caches

# ------------------------------------------------------------------------------------- the device

def resolve(cfg):
    """(device, dtype name, whether to compile); auto in cfg means the best available."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    kind = next(d for d in there if there[d]) if cfg.device == "auto" else cfg.device
    if not there[kind]:
        raise UserError(f"--device {kind} is not available on this machine")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    dtype = ("bfloat16" if kind == "cuda" else "float32") if cfg.dtype == "auto" else cfg.dtype
    return device, dtype, cfg.compile

def has_static_cache(cfg):
    """Whether sampling uses static shapes: by default on cuda, as CUDA graphs need them."""
    if cfg.cache == "auto":
        return resolve(cfg)[0].type == "cuda"
    return cfg.cache == "static"

def double(device):
    """float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

def compile_all(cfg, *modules):
    """Compiles each layer of the modules that are not None, and what is made of logits, if cfg says
    so. All layers of all modules share their graphs: for prompts, for one token, for training
    with a gradient and without. The graphs count against one recompile limit, 8 by default."""
    if resolve(cfg)[2]:
        torch._dynamo.config.recompile_limit = 64
        torch.fx.experimental._config.use_duck_shape = False    # sizes may be equal by chance
        for module in filter(None, modules):
            for layer in module.modules():
                if isinstance(layer, Block):
                    layer.compile(dynamic=True)
                if isinstance(layer, GPT):
                    layer.probs = torch.compile(layer.probs, dynamic=True)
                    layer.logps = torch.compile(layer.logps, dynamic=True)

def prepare():
    """Makes stdout replace characters that the terminal cannot show, and glibc keep freed memory:
    page faults on returned memory would cost a twentieth of a training step on a CPU. Turns off
    cuDNN's attention, which prepares each new shape for up to 0.4 s; most batches are a new one."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if hasattr(sys.stdout, "reconfigure"):      # a notebook's has no such method
        sys.stdout.reconfigure(errors="replace")
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2 ** 31 - 1)       # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)           # M_MMAP_THRESHOLD, at its largest

# -------------------------------------------------------------------------------------- the ranks

def start_ranks(device):
    """Joins the other processes, if torchrun started this one."""
    if "RANK" in os.environ and not distributed.is_initialized():
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(f"RANK is set but {name} is not: launch with torchrun, or unset "
                                f"RANK")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except (ValueError, RuntimeError) as e:
            raise UserError(f"cannot join the other ranks: {str(e).splitlines()[0]}") from e

def world():
    """(rank, number of ranks); (0, 1) without torchrun."""
    if distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1

def local_share(items):
    """This rank's share of a sequence that every rank has: every n-th item, for n ranks."""
    rank, ranks = world()
    return items[rank::ranks]

def all_reduce(x, op=distributed.ReduceOp.SUM):
    """A tensor summed (or reduced by `op`) over all ranks, on their common device."""
    if distributed.is_initialized():
        x = x.to(common_device(), copy=True)
        distributed.all_reduce(x, op)
    return x

def common_device():
    """The device on which a tensor must be to be reduced over the ranks."""
    cuda = distributed.is_initialized() and distributed.get_backend() == "nccl"
    return torch.device("cuda" if cuda else "cpu")

def mean_and_std(x):
    """Mean and std of x (n,) over all ranks, without Bessel's correction."""
    n = all_reduce(torch.tensor(float(len(x)), device=x.device)).clamp(min=1)
    mean = all_reduce(x.sum()) / n
    return mean, (all_reduce((x - mean).square().sum()) / n).sqrt()

def means(stats):
    """The mean of each tensor in a dict, over its elements and all ranks."""
    parts = torch.stack([x.float().mean() for x in stats.values()])
    return dict(zip(stats, (all_reduce(parts) / world()[1]).tolist()))

def wait_for_all():
    """A distributed.barrier: no rank writes before all have finished reading."""
    if distributed.is_initialized():       # nccl needs to know the device
        nccl = common_device().type == "cuda"
        distributed.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)

def exit_with(code):
    """Exits with a code; returns if the code is 0 and there are no ranks."""
    if distributed.is_initialized() and code != 2:     # gloo's threads can abort a normal exit
        wait_for_all()
        os._exit(code)          # all output has been flushed
    if code:
        sys.exit(code)

# ----------------------------------------------------------------------------------- random streams

def rng(cfg, purpose, at=0):
    """A random stream for a purpose and step. It follows from the seed, so no state is saved."""
    return random.Random(f"{cfg.seed}/{purpose}/{at}")

def generator(cfg, purpose):
    """The same for torch, to initialise the weights of a new model."""
    return torch.Generator().manual_seed(rng(cfg, purpose).getrandbits(63))

def uniform(rng, *shape):
    """float64 uniforms in [0, 1) from a random stream, the same on every machine."""
    return torch.from_numpy(np.random.default_rng(rng.getrandbits(64)).random(shape))

# --------------------------------------------------------------------------------------- signals

class Stopped(Exception):
    """Signal `number` asked the run to stop; all results are saved, and `command` continues the
    run."""
    number, command = 0, ""

ASKED = []      # signals received; the current step is finished and saved first

def ask_to_stop(number, frame):
    """Signal handler: records the first signal, exits at the second."""
    if ASKED:
        sys.exit(128 + number)
    ASKED.append(number)

@contextlib.contextmanager
def stoppable(command=""):
    """A context in which Ctrl-C and SIGTERM only ask the run to stop; `command` continues the run.
    Raises UserError if another rank has ended."""
    before = {number: signal.signal(number, ask_to_stop)
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped as when:
        when.number, when.command = stop_asked(), command
        raise
    except RuntimeError as e:           # gloo's errors have no type of their own
        if isinstance(e, distributed.DistError) or "gloo" in str(e):
            raise UserError("another rank has ended; continue from the last checkpoint with "
                            "--resume") from e
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ASKED.clear()

def stop_asked():
    """The number of a signal that any rank received; 0 if none did."""
    number = torch.tensor(max(ASKED, default=0), device=common_device())
    return all_reduce(number, distributed.ReduceOp.MAX).item()


def is_on(cfg):
    """Whether models are sharded: --shard, and more than one rank."""
    return cfg.shard and world()[1] > 1

def shard_module(cfg, module):
    """Shards a module in place, if sharding is on: layer by layer, then the rest, except frozen
    parameters of a trained module (a reward model's norm)."""
    if is_on(cfg):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh(resolve(cfg)[0].type, (world()[1],))
        trained = any(p.requires_grad for p in module.parameters())
        ignored = {p for p in module.parameters() if trained and not p.requires_grad}
        blocks = [block for block in module.modules() if isinstance(block, Block)]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
        for part in [*blocks, module]:
            part.set_gradient_divide_factor(1.0)        # a sum: the loss is weighted over all ranks
            part.set_force_sum_reduction_for_comms(True)
    return module

def is_sharded(x):
    """Whether a tensor or a module is sharded: a DTensor, an FSDPModule."""
    return hasattr(x, "reshard" if isinstance(x, torch.nn.Module) else "full_tensor")

def parameters(module):
    """The parameters by name; of a sharded module, this rank's shards."""
    if is_sharded(module):
        module.reshard()
    return dict(module.named_parameters())

def full(x):
    """A sharded tensor gathered from all ranks; any other tensor unchanged."""
    return x.full_tensor() if is_sharded(x) else x

def for_the_first_rank(x):
    """A sharded tensor, gathered to the first rank's CPU; any other tensor unchanged."""
    if not is_sharded(x):
        return x
    gathered = full(x)                          # a collective, called on every rank
    return gathered.cpu() if world()[0] == 0 else x

def summed(grad):
    """A gradient summed over the ranks; FSDP2 has already summed a sharded one."""
    return grad if is_sharded(grad) else all_reduce(grad)

def like(p, x):
    """A copy of tensor x placed like parameter p: on the same device, with the same sharding."""
    x = x.to(p.device, copy=True)
    if not is_sharded(p) or x.shape != p.shape:         # Adam's step count is a scalar
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)

def check_alike(tensors):
    """Raises UserError if tensors that are not sharded differ between the ranks."""
    if world()[1] == 1:
        return
    total = 0
    for x in tensors.values():          # a checksum that depends on the order of the tensors
        bits = x.new_zeros(0) if is_sharded(x) else x.contiguous().flatten()
        total = (3 * total + bits.view(torch.uint8).sum(dtype=torch.int64).item()) % 2 ** 60
    total = torch.tensor(total, device=common_device())
    if all_reduce(total, distributed.ReduceOp.MIN) != all_reduce(total, distributed.ReduceOp.MAX):
        raise UserError("the ranks no longer hold the same weights; continue from the last "
                        "checkpoint with --resume")

@torch.no_grad()
def copy_weights(copied, policy):
    """Copies the policy's current weights and buffers into a frozen copy. The copy's head may be
    untied where the policy's is tied (`pretrained.frozen`); any other difference in names or shapes
    raises UserError."""
    source = parameters(policy) | dict(policy.named_buffers())
    target = parameters(copied) | dict(copied.named_buffers())
    if policy.cfg.tied and "lm_head.weight" in target:
        source["lm_head.weight"] = source["embed_tokens.weight"]
    if unmatched := sorted(source.keys() ^ target.keys()):
        where = "policy" if unmatched[0] in source else "frozen copy of the policy"
        raise UserError(f"cannot copy the policy: only the {where} has {unmatched[0]}")
    for name, p in target.items():
        x = source[name] if is_sharded(p) else full(source[name])
        if p.numel() == 0:                              # freed by `release`
            p.data = p.data.new_empty(x.shape)
        if p.shape != x.shape:
            raise UserError(f"cannot copy the policy: {name} has the shape {tuple(x.shape)}, and "
                            f"{tuple(p.shape)} in its frozen copy")
        p.copy_(x)

def release(agent):
    """Frees the unsharded copy of a sharded policy, whose memory the update needs."""
    if is_sharded(agent.policy):
        caches.forget(agent.sampler)
        for p in agent.sampler.parameters():
            p.data = p.data.new_empty(0)

def refresh(agent):
    """Copies the policy's current weights into the sampler, if there is one."""
    if agent.sampler is not agent.policy:
        copy_weights(agent.sampler, agent.policy)
