"""Atomic writes, the lock of a run's folder, its logs."""
import contextlib
import fcntl
import itertools
import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from data import UserError, read_json, strict
from run.terminal import print0

LOGS = ("metrics.jsonl", "samples.jsonl")
MARK = "grpo.lock"  # the file that a run locks; a folder with it is a run's
LOCK = contextlib.ExitStack()  # a context; at its end the file that `lock` opened is closed

os.register_at_fork(after_in_child=LOCK.close)      # a task's own process must not keep the lock

@contextlib.contextmanager
def replacing(path):
    """A context with a temporary file that replaces `path` at the end: a crash changes nothing."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.unlink(missing_ok=True)
        beside.touch()
        mode = beside.stat().st_mode
        yield beside
        beside.chmod(mode)  # safetensors lets only the owner read its files
        with open(beside, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as e:  # above all a full disk: free what was written
        beside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {e}") from e

def write_whole(path, content):
    """Writes text or bytes to a file atomically."""
    with replacing(path) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)

def write_tensors(path, tensors, metadata):
    """Writes a safetensors file atomically. One metadata key: several have no fixed order."""
    tensors = {n: x.cpu().contiguous() for n, x in tensors.items()}
    with replacing(path) as beside:
        save_file(tensors, beside, metadata)

def lock(folder):
    """Locks a run's folder until LOCK ends, or this process; UserError if another one holds it."""
    LOCK.close()
    file = LOCK.enter_context(open(folder / MARK, "a+"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.seek(0)
        raise UserError(f"another run, process {file.read()}, is active in {folder}: wait until "
                        f"it ends, or choose another --out") from e
    except OSError as e:
        print0(f"note: {folder} cannot be locked: {e}")
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()

def append(path, record):
    with open(path, "a") as f:
        f.write(json.dumps(strict(record), allow_nan=False) + "\n")

def keep_previous(folder):
    """Renames a finished run to name.1, name.2 ..."""
    names = (folder.with_name(f"{folder.name}.{n}") for n in itertools.count(1))
    previous = next(path for path in names if not os.path.lexists(path))
    os.rename(folder, previous)
    folder.mkdir()
    lock(folder)
    print0(f"the earlier run in {folder} was moved to {previous}")

def about(folder):
    """What run.json says of the run in a folder: `config`, `data` ...; {} if there is none."""
    path = Path(folder) / "run.json"
    return read_json(path.read_bytes(), path) if path.exists() else {}

def clear_up(folder):
    """Removes what interrupted saves have left: `replacing`'s files, and safetensors' own."""
    for place in (folder, folder / "best", folder / "warm_start"):
        for path in [*place.glob("*.safetensors.tmp"), *place.glob(".tmp??????")]:
            path.unlink()
