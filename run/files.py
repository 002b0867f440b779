"""Files: written whole or not at all, and held by one process."""
import os
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from data import UserError

try:
    import fcntl
except ImportError:         # Windows has none: there nothing keeps two runs apart
    fcntl = None

def write_whole(path, content):
    """Write a file beside `path`, then rename it: a crash leaves the old file whole. content: text,
    bytes, or a function that writes a path."""
    beside = path.with_name(path.name + ".tmp")
    try:
        if callable(content):
            content(beside)
        else:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
        with open(beside, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as e:     # a full disk, above all: what was written must go
        beside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}") from e

def write_tensors(path, tensors, metadata):
    """A safetensors file, whole or not at all. One metadata key: the order of several is random."""
    tensors = {n: t.cpu().contiguous() for n, t in tensors.items()}
    write_whole(Path(path), partial(save_file, tensors, metadata=metadata))

LOCKS = []      # the file that this process holds, one at most: it makes one run at a time

def lock(path):
    """Hold the file at `path` until this process ends or calls `unlock`; raises UserError if
    another process holds it."""
    unlock()
    if fcntl:
        LOCKS.append(open(path, "ab"))
        try:
            fcntl.flock(LOCKS[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            unlock()
            raise UserError(f"another run is at work in {path.parent}: wait for its end, or choose "
                            f"another --out") from e

def unlock():
    """Let other processes hold the file that this one held."""
    while LOCKS:
        LOCKS.pop().close()
