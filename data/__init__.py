"""Tasks (one file each), the helpers they share (`answers`), tokenizers and UserError. No torch."""
import importlib
import importlib.util
import json
import math
import numbers
import sys
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix: `grpo.py` prints it as one line and exits with code 2."""


LARGEST = 2 ** 28       # bytes of a file that is read whole


def regular(path):
    """A path; raises UserError if it leads to something other than a file: to open a pipe would
    wait for ever."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file")
    return path


def read_bytes(path):
    """The content of a regular file; raises UserError for one of more than LARGEST bytes."""
    size = regular(path).stat().st_size
    if size > LARGEST:
        raise UserError(f"{path} is too large: {size:,} bytes, of at most {LARGEST:,}")
    return Path(path).read_bytes()


def read_json(text, source):
    """The dict in JSON text or bytes; raises UserError, which names `source`, for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:       # RecursionError: nested too deeply
        raise UserError(f"{source} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise UserError(f"{source} must hold a JSON object, not a {type(value).__name__}")
    return value


def task_file(name):
    """The path of a task: data/<name>.py, or `name` itself if it is a path."""
    return Path(__file__).parent / f"{name}.py" if name.isidentifier() else Path(name)


def import_file(path, name):
    """Executes a .py file as the module `name`; raises UserError if there is none, or if it is not
    valid Python."""
    if not path.is_file():
        raise UserError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        raise not_python(path, e) from e
    return module


def not_python(path, e):
    """The UserError for a SyntaxError in the file at `path`, or in one that it imports."""
    return UserError(f"{e.filename or path}, line {e.lineno}: {e.msg}")


def load_task(name):
    """The module of a task: data/<name>.py, or the file at a path that ends in .py. Raises
    UserError if there is none, or if it lacks DEFAULTS, `problems`, `answer`, or a reward."""
    if not isinstance(name, str) or "\0" in name:
        raise UserError(f"no task {name!r}: give a task's name or the path of a .py file")
    here, path = Path(__file__).parent, task_file(name)
    if not name.endswith(".py") and not (name.isidentifier() and path.is_file()):
        known = sorted(p.stem for p in here.glob("*.py") if "\nDEFAULTS = " in p.read_text())
        raise UserError(f"no task {name!r}: choose {', '.join(known)} or the path of a .py file")
    if path.parent == here:
        try:
            task = importlib.import_module(f"data.{path.stem}")
        except SyntaxError as e:
            raise not_python(path, e) from e
    else:
        task = import_file(path, f"task_{path.stem}")
    if not isinstance(getattr(task, "DEFAULTS", None), dict):
        raise UserError(f"{path} is not a task: it needs a dict named DEFAULTS")
    for function in ("problems", "rewards" if hasattr(task, "rewards") else "reward", "answer"):
        require(task, function, "every task needs one")
    return task


# The statistics of metrics.jsonl. A reward component cannot have one of these names.
STATISTICS = frozenset(
    "step seconds reward rule_reward accuracy length finished dead_groups loss kl entropy "
    "clip_share value_loss explained_variance grad_norm mismatch beta rollout_tok_s update_tok_s "
    "rm_accuracy rm_error greedy turns".split())


def rewards_of(task, problems, completions, tokens):
    """The components of the reward of each completion: `task.reward` judges one at a time;
    `task.rewards`, if a task has it, judges all at once, those of a problem one after another, and
    is also given their numbers of tokens. Raises UserError unless each has the same ones."""
    if hasattr(task, "rewards"):
        rows = task.rewards(problems, completions, tokens)
        if not isinstance(rows, list) or len(rows) != len(problems):
            raise UserError(f"rewards must return a list of {len(problems)} dicts, one for each "
                            f"completion, not {rows!r:.200}")
    else:
        rows = [task.reward(*given) for given in zip(problems, completions)]
    for problem, row in zip(problems, rows):
        check_components(problem, row)
        if row.keys() != rows[0].keys():
            raise UserError(f"the reward of the prompt {problem.prompt!r} has the components "
                            f"{', '.join(row)}: use the same ones for every prompt")
    return rows


def check_components(problem, parts):
    """Raise UserError unless the components of a reward are a dict of finite numbers that includes
    `correct` and uses no name of a statistic."""
    prompt = f"the prompt {problem.prompt!r}"
    if not isinstance(parts, dict) or "correct" not in parts:
        raise UserError(f"the reward of {prompt} must be a dict with 'correct', not {parts!r}")
    for name, x in parts.items():
        if name in STATISTICS:
            raise UserError(f"rename the reward component {name!r}: it is the name of a statistic")
        if not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise UserError(f"the reward {name!r} of {prompt} is {x!r}, not a finite number")


def check_steps(problem, completion, found, least=1):
    """Raise UserError unless the steps of a completion are a list of (end, truth), with ends from
    `least` to its length that never decrease."""
    steps = f"the steps of the prompt {problem.prompt!r}"
    if not isinstance(found, list):
        raise UserError(f"{steps} must be a list of (end, truth), not {found!r}")
    for step in found:
        if not isinstance(step, (tuple, list)) or len(step) != 2:
            raise UserError(f"{steps} must be pairs (end, truth), not {step!r}")
        end, truth = step
        whole = isinstance(end, numbers.Integral) and not isinstance(end, bool)
        if not whole or not least <= end <= len(completion):
            raise UserError(f"{steps} must have integer ends that never decrease, up to the length "
                            f"of the text: here from {least} to {len(completion)}, not {end!r}")
        if hasattr(truth, "__len__") or truth not in (0, 1):        # an array has a length
            raise UserError(f"{steps} must each be True or False, not {truth!r}")
        least = end


def require(task, function, why):
    """Raise UserError if a task lacks a function; `why` tells the user what needs it."""
    if not callable(getattr(task, function, None)):
        name = getattr(task, "__file__", "the task")
        raise UserError(f"{name} has no function {function}: {why}")
