"""The ground floor: a file for each task, what tasks share (`answers`) and tokenizers. No torch."""
import importlib
import importlib.util
import sys
from pathlib import Path


class Fault(Exception):
    """Something the user can mend: `grpo.py` prints it as one line and exits with code 2."""


def load_task(name):
    """The module of a task: data/<name>.py, or the file at a path that ends in .py. Raises Fault if
    there is none, or if it lacks what every task has: DEFAULTS, problems, reward, answer."""
    here, path = Path(__file__).parent, Path(name)
    if path.suffix != ".py":
        path = here / f"{name}.py"
    if not path.is_file():
        known = sorted(p.stem for p in here.glob("*.py") if "\nDEFAULTS = " in p.read_text())
        raise Fault(f"no task {name!r}: there are {', '.join(known)}, or give the path of a file")
    if path.parent == here:
        task = importlib.import_module(f"data.{path.stem}")
    else:
        spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
        task = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(task)
    if not isinstance(getattr(task, "DEFAULTS", None), dict):
        raise Fault(f"{path} is not a task: it has no DEFAULTS, a dict")
    for function in ("problems", "reward", "answer"):
        require(task, function, "every task has one")
    return task


def require(task, function, why):
    """Raise Fault if a task lacks a function."""
    if not callable(getattr(task, function, None)):
        name = getattr(task, "__file__", "the task")
        raise Fault(f"{name} has no function {function}: {why}")
