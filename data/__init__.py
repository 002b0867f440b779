"""The ground floor: a file for each task, what tasks share (`answers`) and tokenizers. No torch."""
import importlib
import importlib.util
import json
import math
import numbers
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
    if not isinstance(name, str) or "\0" in name:
        raise Fault(f"no task {name!r}: it is the name of one, or the path of a file")
    here, path = Path(__file__).parent, Path(name)
    named = name.isidentifier()             # `../x` is no name, and no path that ends in .py either
    if named:
        path = here / f"{name}.py"
    if not (named or name.endswith(".py")) or not path.is_file():
        known = sorted(p.stem for p in here.glob("*.py") if "\nDEFAULTS = " in p.read_text())
        raise Fault(f"no task {name!r}: there are {', '.join(known)}, or give the path of a file")
    if path.parent == here:
        task = importlib.import_module(f"data.{path.stem}")
    else:
        spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
        task = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(task)
        except SyntaxError as e:
            raise Fault(f"{path}, line {e.lineno}: {e.msg}") from e
    if not isinstance(getattr(task, "DEFAULTS", None), dict):
        raise Fault(f"{path} is not a task: it has no DEFAULTS, a dict")
    for function in ("problems", "reward", "answer"):
        require(task, function, "every task has one")
    return task


# Names in metrics.jsonl that no component of a reward may bear.
STATISTICS = frozenset(
    "step seconds reward rule_reward accuracy length finished dead_groups loss kl entropy "
    "clip_share value_loss explained_variance grad_norm mismatch beta rollout_tok_s update_tok_s "
    "rm_accuracy rm_error greedy".split())


def check_parts(problem, parts):
    """Raise Fault unless the components of a reward are finite numbers by name, among them
    `correct`, and none with the name of a statistic."""
    where = f"the reward of the prompt {problem.prompt!r}"
    if not isinstance(parts, dict) or "correct" not in parts:
        raise Fault(f"{where} is {parts!r}: it must be a dict with 'correct' in it")
    for name, x in parts.items():
        if name in STATISTICS:
            raise Fault(f"a component of the reward is called {name!r}, as a statistic is")
        if not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise Fault(f"the reward {name!r} of the prompt {problem.prompt!r} is {x!r}, not a "
                        f"finite number")


def require(task, function, why):
    """Raise Fault if a task lacks a function."""
    if not callable(getattr(task, function, None)):
        name = getattr(task, "__file__", "the task")
        raise Fault(f"{name} has no function {function}: {why}")
