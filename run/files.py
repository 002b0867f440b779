"""Atomic writes, and a lock that one process holds."""
import contextlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from data import UserError, regular
from run import dist, show

try:
    import fcntl
except ImportError:         # not on Windows: two runs in one folder are not prevented
    fcntl = None

UMASK = os.umask(0)     # which can only be read by setting it
os.umask(UMASK)

def write_whole(path, content):
    """Writes a temporary file next to `path`, then renames it: a crash leaves the old file intact.
    content: text, bytes, or a function that writes to a path."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.unlink(missing_ok=True)          # it may be a link, or a pipe
        if callable(content):
            content(beside)
            beside.chmod(0o666 & ~UMASK)        # safetensors lets only the owner read its files
        else:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
        with open(beside, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as e:     # above all a full disk: free what was written
        beside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}") from e

def write_tensors(path, tensors, metadata):
    """Writes a safetensors file atomically. One metadata key: several have no fixed order."""
    tensors = {n: t.cpu().contiguous() for n, t in tensors.items()}
    write_whole(Path(path), partial(save_file, tensors, metadata=metadata))

LOCKS = []      # the file it has locked, at most one

def lock(path):
    """Locks the file at `path` until this process ends or calls `unlock`; raises UserError if
    another process holds the lock."""
    unlock()
    if fcntl:
        LOCKS.append(open(regular(path), "ab"))
        try:
            fcntl.flock(LOCKS[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            unlock()
            raise UserError(f"another run is active in {path.parent}: wait until it ends, or "
                            f"choose another --out") from e

def unlock():
    """Releases the lock of this process."""
    while LOCKS:
        LOCKS.pop().close()


LOGS = ("metrics.jsonl", "samples.jsonl")

def log_metrics(folder, step, stats):
    """Adds a line to metrics.jsonl, on the first rank."""
    if dist.rank() == 0:
        append(folder / "metrics.jsonl", {"step": step, **stats})

def append(path, record):
    """Adds a line to a JSON lines file."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(record) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e

@contextlib.contextmanager
def unlocked():
    """A context that ends by releasing the folder's lock, which `checkpoint.claim` takes."""
    try:
        yield
    finally:
        unlock()

def keep_previous(folder):
    """Moves the finished run in `folder`, its best/, and any other files there, to previous/."""
    previous = folder / "previous"
    previous.mkdir(exist_ok=True)
    for path in [*folder.iterdir()]:
        if path.is_file() and path.name != "lock":
            os.replace(path, previous / path.name)
    shutil.rmtree(previous / "best", ignore_errors=True)
    if (folder / "best").is_dir():
        os.replace(folder / "best", previous / "best")
    show.print0(f"the finished run in {folder} was moved to {previous}")

def clear_up(folder):
    """Removes temporary files of interrupted saves, which are as large as the model: its own, and
    those with a random name that safetensors renames to them."""
    for place in (folder, folder / "warm_start"):
        for kind in ("*.json.tmp", "*.safetensors.tmp", "*.html.tmp", f".tmp{'[0-9A-Za-z]' * 6}"):
            for path in [*place.glob(kind)]:
                path.unlink()
