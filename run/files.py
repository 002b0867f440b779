"""Atomic writes, the lock of a run's folder, its logs."""
import contextlib
import json
import math
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from data import UserError, read_json, tokenizer
from run import show

try:
    import fcntl
except ImportError:         # not on Windows: two runs in one folder are not prevented
    fcntl = None

@contextlib.contextmanager
def replacing(path):
    """A context that yields the path of a temporary file, which in the end takes the place of
    `path`: a crash leaves the old file intact."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.unlink(missing_ok=True)
        beside.touch()
        mode = beside.stat().st_mode
        yield beside
        beside.chmod(mode)      # safetensors lets only the owner read its files
        with open(beside, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as e:     # above all a full disk: free what was written
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

# ----------------------------------------------------------------------------------- a run's folder

LOGS = ("metrics.jsonl", "samples.jsonl")
OTHERS = ("run.json", "config.json", "model.safetensors", "functions.py", "report.html", "best")
MOVING = "moving"       # the folder in which `keep_previous` collects a run
LOCK = contextlib.ExitStack()       # a context; at its end the file that `lock` opened is closed

if hasattr(os, "register_at_fork"):     # a process that a task's code forks must not keep the lock
    os.register_at_fork(after_in_child=LOCK.close)

def lock(path):
    """Locks a file until LOCK ends, or this process; raises UserError if another one holds it."""
    LOCK.close()
    file = LOCK.enter_context(open(path, "ab"))
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise UserError(f"another run is active in {path.parent}: wait until it ends, or choose "
                        f"another --out") from e

def append(path, record):
    """Adds a line to a JSON lines file."""
    line = json.dumps(strict(record), allow_nan=False)
    with open(path, "a") as f:
        f.write(line + "\n")

def strict(x):
    """A value for JSON, which has no NaN and no infinities: None takes their place."""
    if isinstance(x, dict):
        return {name: strict(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return [strict(part) for part in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x

def keep_previous(folder):
    """Moves the finished run in `folder`, but no file of the user's, to previous/, or previous2/,
    previous3/ ..., whichever is free. After a kill it can be called again: the checkpoint goes
    first, without which nothing can be resumed."""
    moving = folder / MOVING
    moving.mkdir(exist_ok=True)
    for name in ("checkpoint.safetensors", *LOGS, *OTHERS, *tokenizer.FILES, tokenizer.MORE):
        if (folder / name).exists() and not (moving / name).exists():
            os.replace(folder / name, moving / name)
    previous = folder / "previous"
    number = 1
    while os.path.lexists(previous):
        number += 1
        previous = folder / f"previous{number}"
    os.replace(moving, previous)
    show.print0(f"the finished run in {folder} was moved to {previous}")

def about(folder):
    """What run.json says of the run in a folder; empty if there is none."""
    path = Path(folder) / "run.json"
    if not path.exists():
        return {}
    found = read_json(path.read_bytes(), path)
    settings = found.get("config", {})
    parts = [settings, found.get("data", {})]
    if isinstance(settings, dict):
        parts.append(settings.get("task_args", {}))
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} is damaged: its config, data and task_args must be objects")
    return found

def clear_up(folder):
    """Removes what interrupted saves have left, files as large as the model: those of `replacing`,
    and those with a random name that safetensors renames to them."""
    for place in (folder, folder / "best", folder / "warm_start"):
        for kind in ("*.safetensors.tmp", ".tmp??????"):
            for path in [*place.glob(kind)]:
                path.unlink()
