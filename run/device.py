"""The device and dtype of a run, compilation, settings of torch."""
import contextlib
import ctypes
import os

import torch

from data import UserError
from model import Block, GPT

def device_of(cfg):
    """This rank's device; UserError if the machine has none such."""
    has = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    available = [kind for kind in has if has[kind]]
    kind = available[0] if cfg.device == "auto" else cfg.device
    if kind not in available:
        raise UserError(f"--device {kind} is not available on this machine")
    if kind == "cuda":
        return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(kind)

def dtype_of(cfg):
    """The dtype of matrix products by name; auto: bfloat16 on cuda."""
    if cfg.dtype != "auto":
        return cfg.dtype
    return "bfloat16" if device_of(cfg).type == "cuda" else "float32"

def has_static_cache(cfg):
    """Whether sampling uses static shapes; auto: on cuda, as CUDA graphs need them."""
    return cfg.cache == "static" or cfg.cache == "auto" and device_of(cfg).type == "cuda"

def compile_all(cfg, *modules):
    """Under --compile, compiles each layer of the modules, and functions of logits."""
    if not cfg.compile:
        return
    torch._dynamo.config.recompile_limit = 64  # for all layers together; 8 by default
    torch.fx.experimental._config.use_duck_shape = False    # sizes may be equal by chance
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, Block):
                layer.compile(dynamic=True)
            if isinstance(layer, GPT):
                layer.probs = torch.compile(layer.probs, dynamic=True)
                layer.logps = torch.compile(layer.logps, dynamic=True)

def prepare():
    """Settings of the process."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # 0.4 s per new shape, which most batches are
    # Freed blocks are kept: page faults took a third of an update of Qwen2.5-0.5B. But with 32 MB,
    # not 8, a run's peak grew to 20 GB, not 17.
    of_glibc("mallopt", -3, 2 ** 23)  # M_MMAP_THRESHOLD
    of_glibc("mallopt", -1, -1)       # M_TRIM_THRESHOLD: never

def of_glibc(function, *given):
    """Calls a function of the GNU C library, if there is one."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL("libc.so.6"), function)(*given)
