"""The tasks, one file each: pure Python, without torch."""
import importlib
from pathlib import Path

from data.run import Fault

FUNCTIONS = ("problems", "demonstration", "reward", "answer", "steps")


def load_task(name):
    """The module data/<name>.py; raises Fault if there is none, or it is not a task."""
    here = Path(__file__).parent
    others = ("__init__", "answers", "run", "start", "tokenizer")
    tasks = sorted(p.stem for p in here.glob("*.py") if p.stem not in others)
    if name not in tasks:
        raise Fault(f"unknown task {name!r}; there are: {', '.join(tasks)}")
    task = importlib.import_module(f"data.{name}")
    missing = [f for f in FUNCTIONS if not callable(getattr(task, f, None))]
    missing += [] if isinstance(getattr(task, "DEFAULTS", None), dict) else ["DEFAULTS"]
    if missing:
        raise Fault(f"data/{name}.py is not a task: it has no {', '.join(missing)}")
    return task
