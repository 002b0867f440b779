"""A CUDA device that a test pretends to have, on a build of PyTorch without one.

    with pretend.cuda() as device:              # device("cuda", 0); `--device cuda` runs
        with pretend.counted() as seen:
            ...
    assert seen.waits == {"nonzero": 2}

A Pretended tensor says that it is on the device, and holds one on the CPU, on which each operation
is computed. What CUDA refuses raises: tensors on two devices, a generator of the CPU. Waits of the
host for the device, copies to it and launches of kernels are counted. A CUDA graph records
operations, and `replay` computes them, as one launch; a wait while it records raises. In `nccl()`,
processes reduce tensors on such devices, and none on the CPU.
"""
import contextlib
import ctypes
import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
import torch.nn.functional as F
import torch.utils._foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


# -------- the tensor

class Pretended(torch.Tensor):
    """A tensor on a CUDA device, as far as Python can tell; C++ is told that it is on XLA: of a
    CUDA tensor autograd wants the current stream, which a build without CUDA does not have."""

    @staticmethod
    def __new__(cls, held, index):
        self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype,
            device=torch.device("xla", index),
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA))
        self.held, self.index = held, index
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def set_data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.held = other.held

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda, is_xla = property(lambda self: True), property(lambda self: False)
    data = property(torch.Tensor.data.__get__, set_data)

    def __setitem__(self, key, value):      # a number is taken from the CPU
        if isinstance(value, (int, float)):
            value = torch.tensor(value, dtype=self.dtype)
        torch.Tensor.__setitem__(self, key, value)

    def tolist(self):
        return self.cpu().tolist()


def inside(x):
    """A CUDA device by the name that it has in C++; anything else unchanged."""
    device = torch.device(x) if isinstance(x, str) and x.startswith("cuda") else x
    if not isinstance(device, torch.device) or device.type != "cuda":
        return x
    return torch.device("xla", index_of(device))


def index_of(device):
    return torch.cuda.current_device() if device.index is None else device.index


# -------- what is counted

COUNTING = []       # a namespace for each `counted` that is open


@contextlib.contextmanager
def counted():
    """Counts by operation: `waits` of the host for the device, `copies` to it, for which
    the host waits too, and `launches`, the operations on the device that are not views."""
    seen = SimpleNamespace(waits=Counter(), copies=Counter(), launches=Counter())
    COUNTING.append(seen)
    try:
        yield seen
    finally:
        COUNTING.pop()          # contexts nest


def count(kind, name):
    if RECORDING:
        if kind != "launches":
            raise RuntimeError(f"operation not permitted when stream is capturing ({name})")
        return                  # its graph is launched later
    for seen in COUNTING:
        getattr(seen, kind)[name] += 1


# -------- CUDA's rules

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Beside what is pointwise, these take a number from the CPU.
NUMBERS = {"fill_", "masked_fill", "masked_fill_"}
# Beside what depends on data, these make the host wait; beside views, these launch nothing.
WAITS = {"equal", "masked_scatter_backward"}
DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
             "_unsafe_view", "_local_scalar_dense"}


@functools.cache
def described(func):
    """What is known of an operation; `returned`: which of its results are arguments."""
    def writes(x):
        return x.alias_info is not None and x.alias_info.is_write

    name = func._schema.name.split("::")[1]
    returns = func._schema.returns
    is_view = any(r.alias_info and not writes(r) for r in returns)
    return SimpleNamespace(
        name=name, returned=[*map(writes, returns)],
        written=[(i, a.name) for i, a in enumerate(func._schema.arguments) if writes(a)],
        takes_numbers=name in NUMBERS or torch.Tag.pointwise in func.tags,
        waits=name in WAITS or bool(DEPENDS & set(func.tags)),
        launches=not is_view and name not in NO_KERNEL)


def is_cpu(x):
    return isinstance(x, torch.Tensor) and type(x) is not Pretended


def refuse(func, op, args, written, tensors):
    """Raises for tensors on two devices, but for numbers and indices on the CPU."""
    cpu = [t for t in tensors if is_cpu(t)]
    numbers, allowed = cpu, op.takes_numbers and not any(map(is_cpu, written))
    if op.name in INDEXING:
        numbers, allowed = [t for t in args[2:3] if is_cpu(t)], not is_cpu(args[0])
    allowed = allowed and all(t.dim() == 0 for t in numbers)
    if not allowed or len({t.device for t in tensors}) > 1 + bool(cpu):
        found = [(str(t.device), *t.shape) for t in tensors]
        raise RuntimeError(f"expected all tensors to be on the same device: {found} in {func}")


def watch(op, args):
    """Counts an operation on the device, and what of it waits."""
    waits, copies = op.waits, 0
    if op.name in INDEXING:         # a mask waits for the number of its elements
        indices = [t for t in args[1] if t is not None]
        waits = any(t.dtype == torch.bool and not is_cpu(t) for t in indices)
        copies = sum(map(is_cpu, [*indices, *args[2:3]]))
    elif op.name == "where":
        copies = sum(map(is_cpu, args))
    for kind, n in (("waits", waits), ("copies", copies), ("launches", op.launches)):
        for _ in range(n):
            count(kind, op.name)


def watch_copy(op, args, kwargs, to_device):
    """Counts a copy: between the devices it waits, but from pinned memory, and to the CPU, if it is
    told not to."""
    source = args[op.name == "copy_"]
    non_blocking = kwargs.get("non_blocking", args[2:3] == (True,))
    if not is_cpu(source) and to_device:
        count("launches", op.name)
    elif not non_blocking or is_cpu(source) and not hasattr(source, "pinned"):
        count("copies" if is_cpu(source) else "waits", op.name)


# -------- computing

def compute(func, args, kwargs):
    """The result of any operation, on a device or not. Autograd and autocast are above this."""
    op = described(func)
    tensors = [t for x in (*args, *kwargs.values()) for t in tensors_in(x)]
    index = next((t.index for t in tensors if type(t) is Pretended), None)
    to_device = index is not None if op.name != "copy_" else type(args[0]) is Pretended
    if (asked := kwargs.get("device")) is not None:
        to_device = asked.type in ("xla", "cuda")
        index = index_of(asked) if to_device else index
        kwargs = kwargs | ({"device": torch.device("cpu")} if to_device else {})
    if index is None:
        return on_cpu(func, op, args, kwargs)
    if (generator := kwargs.get("generator")) is not None:
        raise RuntimeError(f"expected a generator on cuda, not {generator.device}")

    written = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.written]
    if op.name in ("copy_", "_to_copy"):
        watch_copy(op, args, kwargs, to_device)
    else:
        if any(type(t) is not Pretended or t.index != index for t in tensors):
            refuse(func, op, args, written, tensors)
        if COUNTING or RECORDING:
            watch(op, args)
    real = functools.partial(RECORDING[-1].record, func, op) if RECORDING else func
    found = real(*map(held, args), **{name: held(x) for name, x in kwargs.items()})
    if not any(op.returned):
        return wrapped(found, index) if to_device else found
    found = found if isinstance(found, tuple) else (found,)
    found = tuple(written.pop(0) if own else wrapped(x, index)
                  for own, x in zip(op.returned, found))
    return found if len(found) > 1 else found[0]


def on_cpu(func, op, args, kwargs):
    """The result of an operation on the CPU. Pinned memory is only marked."""
    if op.name == "is_pinned":
        return hasattr(args[0], "pinned")
    if op.name == "_pin_memory":
        pinned = args[0].clone()
        pinned.pinned = True
        return pinned
    return func(*args, **kwargs)


def held(x):
    """The tensors on the CPU behind an argument."""
    if type(x) is Pretended:
        return x.held
    return type(x)(map(held, x)) if isinstance(x, (list, tuple)) else x


def wrapped(x, index):
    """The tensors in a result, on a device."""
    if isinstance(x, torch.Tensor):
        return Pretended(x, index)
    return type(x)(wrapped(y, index) for y in x) if isinstance(x, (list, tuple)) else x


# -------- graphs

RECORDING = []      # the CUDAGraph that records, if one does


class CUDAGraph:
    """Operations on tensors that keep their addresses. `tape` has what launches."""

    def __init__(self):
        self.tape, self.made, self.before = [], [], {}

    def record(self, func, op, *args, **kwargs):
        """The result of an operation; notes what it writes and makes, as nothing is computed."""
        given = [t for x in (*args, *kwargs.values()) for t in tensors_in(x)]
        for i, name in op.written:
            for t in tensors_in(args[i] if i < len(args) else kwargs.get(name)):
                if not any(shared(t, x) for x in self.made):
                    storage = t.untyped_storage()
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        found = func(*args, **kwargs)
        self.made += [t for t in tensors_in(found) if not any(shared(t, x) for x in given)]
        if op.launches:
            self.tape.append((func, args, kwargs, found))
        return found

    def end(self):
        """What was written is as before, and what was made is garbage."""
        for storage, value in self.before.values():
            storage.copy_(value)
        for t in self.made:
            is_float = t.is_floating_point()
            t.fill_(float("nan") if is_float else t.dtype == torch.bool or 7777)
        self.made, self.before = [], {}

    def replay(self):
        count("launches", "replay")
        for func, args, kwargs, found in self.tape:
            again = tensors_in(func(*args, **kwargs))
            for old, new in zip(tensors_in(found), again, strict=True):
                if not shared(old, new):
                    old.copy_(new)


@contextlib.contextmanager
def graph(recorded, pool=None, stream=None, capture_error_mode="global"):
    """torch.cuda.graph: in this context operations are recorded."""
    RECORDING.append(recorded)
    try:
        yield
    finally:
        RECORDING.pop().end()


def tensors_in(x):
    parts = x if isinstance(x, (list, tuple)) else [x]
    return [t for t in parts if isinstance(t, torch.Tensor)]


def shared(x, y):
    """Whether two tensors have the same memory."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class Operations(TorchDispatchMode):
    """Sees operations that have no tensor to start from, too: zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
    """Attention on the device as one operation, the CPU's kernel, in autocast's dtype."""
    if is_cpu(q) or not q.numel():
        return torch._C._nn.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf"))
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v, attn_mask = (x if x is None else x.to(dtype) for x in (q, k, v, attn_mask))
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=attn_mask)[0]


# -------- the device

@contextlib.contextmanager
def guard():
    """Autograd looks in a table in C++ for the guard of a tensor's device; here it finds the CPU's,
    which knows no streams, where a build without XLA has none."""
    library = ctypes.CDLL(next((Path(torch.__file__).parent / "lib").glob("libc10.*")))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    table = (ctypes.c_void_p * 10).in_dll(library, name)
    before, table[9] = table[9], table[0]
    try:
        yield
    finally:
        table[9] = before


@contextlib.contextmanager
def cuda(index=0):
    """In this context PyTorch has CUDA devices; yields the one with this index."""
    current, tensor, to = [0], torch.tensor, torch.Tensor.to

    def new_tensor(*args, device=None, **kwargs):
        return tensor(*args, device=inside(device), **kwargs)

    def moved(self, *args, **kwargs):
        kwargs = {name: inside(x) for name, x in kwargs.items()}
        return to(self, *map(inside, args), **kwargs)

    def set_device(device):
        current[0] = torch.device(device).index

    def capturing(device=None):
        return bool(RECORDING)
    stands = {
        torch.cuda: dict(
            _lazy_init=lambda: None, is_available=lambda: True, CUDAGraph=CUDAGraph, graph=graph,
            current_device=lambda: current[0], set_device=set_device, graph_pool_handle=object,
            is_current_stream_capturing=capturing,
            synchronize=lambda device=None: count("waits", "synchronize"),
            is_bf16_supported=lambda *_: True,
            mem_get_info=lambda device=None: (6 * 10 ** 10, 8 * 10 ** 10),
            get_device_properties=lambda device: SimpleNamespace(total_memory=8 * 10 ** 10)),
        torch.accelerator: dict(
            current_stream=lambda device=None: SimpleNamespace(is_capturing=capturing)),
        torch.utils._foreach_utils: dict(
            _foreach_supported_types=[torch.Tensor, Pretended],
            _get_foreach_kernels_supported_devices=lambda: ["cuda", "xla"]),
        F: dict(scaled_dot_product_attention=attention), torch: dict(tensor=new_tensor),
        torch.Tensor: dict(to=moved)}
    with (pytest.MonkeyPatch.context() as patch, guard(),
          torch.autograd.set_multithreading_enabled(False)):
        for where, those in stands.items():
            for name, stand in those.items():
                patch.setattr(where, name, stand)
        # torch.tensor makes one on the CPU, and copies it
        torch._C._set_only_lift_cpu_tensors(True)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with Operations():
                yield torch.device("cuda", index)
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            torch.__future__.set_overwrite_module_params_on_conversion(False)


@contextlib.contextmanager
def nccl():
    """In this context the backend nccl is there: gloo, for tensors on the current device only."""
    start, reduce, gather = (distributed.init_process_group, distributed.all_reduce,
                             distributed.all_gather_object)

    def init_process_group(backend):
        assert backend == "nccl"
        start("gloo")

    def all_reduce(x, op=distributed.ReduceOp.SUM):
        if is_cpu(x) or x.index != torch.cuda.current_device():
            raise RuntimeError(f"No backend type associated with device type {x.device}")
        reduce(x.held, op)

    def all_gather_object(*given):
        count("waits", "all_gather_object")
        gather(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "get_backend", lambda: "nccl")
        for stand in (init_process_group, all_reduce, all_gather_object):
            patch.setattr(distributed, stand.__name__, stand)
        yield
