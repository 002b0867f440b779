"""Tasks (one file each), the helpers they share (`answers`), tokenizers and UserError. No torch."""
import contextlib
import copy
import importlib.util
import json
import math
import numbers
import re
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

class UserError(Exception):
    """An error that the user can fix: `grpo.py` prints it as one line and exits with code 2."""

class Ended(SystemExit):
    """A second signal ends the process; an `exit()` in a task's code does not."""

def fetched(path):
    """A path; UserError for a pointer of Git LFS, which stands for a file."""
    if Path(path).is_file():
        with open(path, "rb") as file:
            if file.read(40).startswith(b"version https://git-lfs.github.com/spec/"):
                raise UserError(f"{path} is a Git LFS pointer: fetch the file with `git lfs pull`")
    return Path(path)

def read_json(text, source):
    """The dict in JSON text or bytes from `source`; UserError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:  # RecursionError: nested too deeply
        raise UserError(f"{source} is not JSON: {e}") from e
    need(isinstance(value, dict), source, "hold a JSON object", value)
    return value

def read_lines(path, problem_of):
    """`problem_of` of the JSON in each line of a file that is not blank; UserError if it fails."""
    if not path:
        raise UserError("no file is named: --test FILE and, to train, --train FILE")
    found, n = [], 0
    try:
        with open(fetched(path), "rb") as file:
            for n, line in enumerate(file, 1):
                if text := line.decode("utf-8-sig").strip():
                    found.append(problem_of(json.loads(text)))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{path}, line {n}: {e.__class__.__name__}: {e}; lines must be JSON "
                        "objects, as of pandas.read_parquet(FILE).to_json(NEW, "
                        "orient='records', lines=True)") from e
    return found

def strict(x):
    """A value for JSON, which has no NaN and no infinities: None takes their place."""
    if isinstance(x, dict):
        return {name: strict(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return [strict(part) for part in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x

HIDDEN = re.compile("[\0-\x08\v-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

def printable(text):
    """A text with visible HIDDEN characters, which change a terminal, or the order of a text."""
    return HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)

# ------------------------------------------------------------ a user's own code

EXECUTED = set()        # the files that `import_file` has executed

def call(function, what, *given, **named):
    """What a function of a task returns; an exception says that `what` failed."""
    try:
        return function(*given, **named)
    except (UserError, Ended):
        raise
    except SystemExit as e:  # it would end the run without a word
        raise RuntimeError(f"{what} calls exit()") from e
    except Exception as e:
        said = given[:2][-1] if given else None  # a completion, turns, all completions
        e.add_note(f"{what} raised this" + f", given {said!r:.200}" * isinstance(said, str | list))
        raise

def is_executed(e):
    """Whether an exception comes from a file that `import_file` has executed."""
    frames = traceback.extract_tb(e.__traceback__)
    return any(frame.filename in EXECUTED for frame in frames)

def import_file(path, name=""):
    """Executes a .py file as the module `name`, or its own; UserError if there is none."""
    if not path.is_file():
        raise UserError(f"no file {path}")
    path = path.absolute()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules beside it
    if not name:  # by which a process pool imports it, unless another has it
        name = f"task_{path.stem}"
        with contextlib.suppress(AttributeError, ImportError, ValueError):
            if importlib.util.find_spec(path.stem).origin == str(path):
                name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    EXECUTED.add(module.__file__)
    call(spec.loader.exec_module, f"the import of {path}", module)
    return module

# -------------------------------------------------------------------- the tasks

def file_of(name, folder):
    """The path of a .py file: `name` itself, or <name>.py in a folder; None if it is neither."""
    if name.endswith(".py"):
        return Path(name).expanduser()
    path = folder / f"{name}.py"
    return path if name.isidentifier() and path.is_file() else None

def load_task(name):
    """The module of a task: data/<name>.py, or a path that ends in .py, with all it must have."""
    here = Path(__file__).parent
    path = file_of(str(name), here)
    if path is None:
        known = sorted(p.stem for p in here.glob("*.py") if "\nDEFAULTS = " in p.read_text("utf-8"))
        raise UserError(f"no task {name!r}: choose {', '.join(known)} or the path of a .py file")
    if path.parent == here:
        EXECUTED.add(str(path))
        task = call(importlib.import_module, f"the import of {path}", f"data.{path.stem}")
    else:
        task = import_file(path)
    if not isinstance(getattr(task, "DEFAULTS", None), dict):
        raise UserError(f"{path} is not a task: it needs a dict named DEFAULTS")
    for function in ("problems", "rewards" if hasattr(task, "rewards") else "reward", "answer"):
        require(task, function, "every task needs one")
    return task

def require(task, function, why):
    """UserError if a task lacks a function; `why` says what needs it."""
    if not callable(getattr(task, function, None)):
        name = getattr(task, "__file__", "the task")
        raise UserError(f"{name} has no function {function}: {why}")

# ---------------------------------------------------------- what a task returns

# In metrics.jsonl; no reward component may have these names.
STATISTICS = frozenset(
    "step seconds reward rule_reward accuracy length finished dead_groups loss kl entropy "
    "clip_share value_loss explained_variance grad_norm mismatch beta lr "
    "rollout_tok_s update_tok_s reward_seconds rm_accuracy held_out greedy turns pass maj".split())
SPENT = [0.0]           # seconds in the functions reward, rewards and steps of tasks

@contextlib.contextmanager
def timed():
    """A context whose seconds are added to SPENT."""
    began = time.perf_counter()
    yield
    SPENT[0] += time.perf_counter() - began

def of(problem):
    """A problem in a message."""
    return f"the prompt {problem.prompt!r:.200}"

def shown(x, depth=2):
    """What a value shows of itself, alike in every process: sets in order, no addresses."""
    if depth and type(x).__repr__ in (object.__repr__, SimpleNamespace.__repr__):
        x, depth = getattr(x, "__dict__", {}), depth - 1
    if not isinstance(x, dict | list | tuple | set | frozenset):
        return re.sub(" at 0x[0-9a-f]+", "", repr(x))
    parts = [shown(part, depth) for part in (x.items() if isinstance(x, dict) else x)]
    return f"[{', '.join(sorted(parts) if isinstance(x, set | frozenset) else parts)}]"

def need(holds, what, must, found):
    """UserError unless what a task's function gave is what it must be."""
    if not holds:
        raise UserError(f"{what} must {must}, not {found!r:.200}")

def rewards_of(task, problems, completions, tokens, finished):
    """The components of the reward of each completion, which must have the same ones. `task.reward`
    judges one; `task.rewards` all, those of a problem together, with their numbers of tokens, and
    whether they ended or were cut off."""
    completions = [*map(copy.copy, completions)]  # a task may change a list of turns
    with timed():
        if hasattr(task, "rewards"):
            rows = call(task.rewards, "the function rewards", [*problems], completions, [*tokens],
                        [*finished])
        else:
            rows = []
            for problem, completion in zip(problems, completions):
                row = call(task.reward, f"the reward of {of(problem)}", problem, completion)
                rows.append(dict(row) if isinstance(row, dict) else row)  # it may be filled anew
    need(isinstance(rows, list) and len(rows) == len(problems), "rewards",
         f"return a list of {len(problems)} dicts, one for each completion", rows)
    for problem, row in zip(problems, rows):
        check_components(problem, row)
        need(row.keys() == rows[0].keys(), f"the reward of {of(problem)}",
             f"have the components {', '.join(rows[0])}, as the others", [*row])
    return rows

def check_components(problem, parts):
    """UserError unless a reward is a dict of numbers with `correct`, a share."""
    what = f"the reward of {of(problem)}"
    need(isinstance(parts, dict) and "correct" in parts, what, "be a dict with 'correct'", parts)
    for name, x in parts.items():
        need(isinstance(name, str) and "@" not in name and name not in STATISTICS - {"reward"},
             f"a component of {what}", "have a name that no statistic has", name)
        # So that float32 holds sums of components, and their squares in a std.
        need(isinstance(x, numbers.Real) and abs(x) <= 1e15, f"{name!r} in {what}",
             "be a bool, int or float from -1e15 to 1e15", x)
    need(0 <= round(float(parts["correct"]), 6) <= 1, f"'correct' in {what}",
         "be from 0 (wrong) to 1 (right)", parts["correct"])

def answer_of(task, completion):
    """The answer of a completion, for votes; UserError unless it is a string."""
    found = call(task.answer, "the function answer", copy.copy(completion))
    need(isinstance(found, str), "the function answer", "return a string, or '' for none", found)
    return found

def steps_of(task, problem, completion):
    """The steps of a completion as (end, truth), not yet checked."""
    with timed():
        what = f"the function steps, for {of(problem)},"
        return call(task.steps, what, problem, copy.copy(completion))

def check_steps(problem, completion, found, least=1):
    """UserError unless steps are (end, truth), with ends from `least` on in order."""
    what = f"the steps of {of(problem)}"
    need(isinstance(found, list), what, "be a list of (end, truth)", found)
    for step in found:
        need(isinstance(step, tuple | list) and len(step) == 2, what, "be pairs (end, truth)", step)
        end, truth = step
        whole = isinstance(end, numbers.Integral) and not isinstance(end, bool)
        need(whole and least <= end <= len(completion), what, "have integer ends that never "
             f"decrease, here from {least} to {len(completion)}", end)
        is_truth = not hasattr(truth, "__len__") and truth in (0, 1)        # an array has a length
        need(is_truth, what, "each be True or False", truth)
        least = end
