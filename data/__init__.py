"""The ground floor: a file for each task, what tasks share (`answers`) and tokenizers. No torch."""
import importlib
import importlib.util
import json
import sys
from pathlib import Path


class Fault(Exception):
    """Something the user can mend: `grpo.py` prints it as one line and exits with code 2."""


def read_json(text, source):
    """The dict that a text, or bytes, of JSON holds; raises Fault, which names the source, for any
    other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:       # RecursionError: a thousand brackets
        raise Fault(f"{source} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise Fault(f"{source} holds no JSON object, but a {type(found).__name__}")
    return found


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
