"""Tasks (one file each), the helpers they share (`answers`), tokenizers and UserError. No torch."""
import contextlib
import copy
import importlib
import importlib.util
import json
import numbers
import sys
import time
import traceback
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix: `grpo.py` prints it as one line and exits with code 2."""


class Ended(SystemExit):
    """A second signal ends the process; an `exit()` in a task's code does not."""


LARGEST = 2 ** 28       # bytes of a file that is read whole
POINTER = b"version https://git-lfs.github.com/spec/v1\n"


def regular(path):
    """A path; raises UserError if it leads to something other than a file, as to open a pipe would
    wait for ever, or to what a clone without Git LFS has in place of a large file."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file")
    if path.exists():
        with open(path, "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise UserError(f"{path} is a Git LFS pointer, not the file itself: fetch the file "
                                f"with `git lfs pull`")
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


# -------------------------------------------------------------------------------- a user's own code

EXECUTED = set()        # the files that `import_file` has executed


def call(function, what, *given, **named):
    """What a function of a task returns. If it changes the working directory, that is put back: a
    run's paths may be relative. Raises UserError, with the place, for an exception in it."""
    try:
        with contextlib.chdir("."):
            return function(*given, **named)
    except (UserError, Ended):
        raise
    except (Exception, SystemExit) as e:
        raise UserError(f"{place(e)}{what} fails: {in_words(e)}") from e


def place(e):
    """Where a function of `call` has failed: the file in which it is, and the line there."""
    frames = raised_in(e)
    if not frames:                      # a function that is not written in Python
        return ""
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{own[-1].filename}, line {own[-1].lineno}: "


def in_words(e):
    """An exception, and where it was raised if that is in another file than its `place`."""
    said = f"{type(e).__name__}: {e}"[:300].rstrip(": ")
    frames = raised_in(e)
    if frames and frames[-1].filename != frames[0].filename:
        said += f" (raised in {frames[-1].filename}, line {frames[-1].lineno})"
    return said


def raised_in(e):
    """The frames from a function of `call` down to where an exception was raised in it, without
    those of an import."""
    others = (call.__code__.co_filename, importlib.__file__)
    frames = traceback.extract_tb(e.__traceback__)
    return [frame for frame in frames if frame.filename not in others
            and not frame.filename.startswith("<frozen importlib")]


def is_executed(e):
    """Whether an exception comes from a file that `import_file` has executed."""
    frames = traceback.extract_tb(e.__traceback__)
    return any(frame.filename in EXECUTED for frame in frames)


def import_file(path, name):
    """Executes a .py file as the module `name`; raises UserError if there is none, or if it is not
    valid Python."""
    if not path.is_file():
        raise UserError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    EXECUTED.add(module.__file__)
    python(path, spec.loader.exec_module, module)
    return module


def python(path, load, *given):
    """What `load` gives; raises UserError for a SyntaxError in the file at `path`, or in one that
    it imports."""
    try:
        return load(*given)
    except SyntaxError as e:
        raise UserError(f"{e.filename or path}, line {e.lineno}: {e.msg}") from e

# ---------------------------------------------------------------------------------------- the tasks


def load_task(name):
    """The module of a task: data/<name>.py, or the file at a path that ends in .py. Raises
    UserError if there is none, or if it lacks DEFAULTS, `problems`, `answer`, or a reward."""
    if not isinstance(name, str) or "\0" in name:
        raise UserError(f"no task {name!r}: give a task's name or the path of a .py file")
    here, path = Path(__file__).parent, task_file(name)
    if not name.endswith(".py") and not (name.isidentifier() and path.is_file()):
        known = sorted(p.stem for p in here.glob("*.py") if "\nDEFAULTS = " in p.read_text())
        hint = f"choose {', '.join(known)} or the path of a .py file"
        if Path(f"{name}.py").is_file():
            hint = f"did you mean ./{name}.py?"
        raise UserError(f"no task {name!r}: {hint}")
    if path.parent == here:
        name = f"data.{path.stem}"
        task = call(python, "the import", path, importlib.import_module, name)
    else:
        task = call(import_file, "the import", path, f"task_{path.stem}")
    if not isinstance(getattr(task, "DEFAULTS", None), dict):
        raise UserError(f"{path} is not a task: it needs a dict named DEFAULTS")
    for function in ("problems", "rewards" if hasattr(task, "rewards") else "reward", "answer"):
        require(task, function, "every task needs one")
    return task


# The statistics of metrics.jsonl. A reward component cannot have one of these names.
STATISTICS = frozenset(
    "step seconds reward rule_reward accuracy length finished dead_groups loss kl entropy "
    "clip_share value_loss explained_variance grad_norm mismatch beta rollout_tok_s update_tok_s "
    "reward_seconds rm_accuracy rm_error greedy turns".split())


LARGEST_REWARD = 1e15   # so that float32 holds sums of components, and their squares in a std
SPENT = [0.0]           # seconds in the functions reward, rewards and steps of tasks


@contextlib.contextmanager
def timed():
    """A context whose seconds are added to SPENT."""
    began = time.perf_counter()
    yield
    SPENT[0] += time.perf_counter() - began


def of(problem):
    """A problem in an error message: its prompt, of a long one the beginning and the length."""
    if problem is None:                 # a question from the keyboard
        return "a question"
    prompt = problem.prompt
    more = f"... ({len(prompt):,} characters)" if len(prompt) > 200 else ""
    return f"the prompt {prompt[:200]!r}{more}"


def own(completion):
    """A completion for a function of a task, which may change it: a text, or a copy of turns."""
    return copy.copy(completion)


def rewards_of(task, problems, completions, tokens):
    """The components of the reward of each completion: `task.reward` judges one at a time;
    `task.rewards`, if a task has it, judges all at once, those of a problem one after another, and
    is also given their numbers of tokens. Raises UserError unless each has the same ones."""
    with timed():
        if hasattr(task, "rewards"):
            rows = call(task.rewards, "the function rewards", [*problems],
                        [*map(own, completions)], [*tokens])
        else:
            rows = []
            for problem, completion in zip(problems, completions):
                row = call(task.reward, f"the reward of {of(problem)}", problem, own(completion))
                rows.append(copy.copy(row))     # it may be one dict that is filled anew
    if not isinstance(rows, list) or len(rows) != len(problems):
        raise UserError(f"rewards must return a list of {len(problems)} dicts, one for each "
                        f"completion, not {rows!r:.200}")
    for problem, row in zip(problems, rows):
        check_components(problem, row)
        if row.keys() != rows[0].keys():
            raise UserError(f"the reward of {of(problem)} has the components {', '.join(row)}: "
                            f"use the same ones for every prompt")
    return rows


def check_components(problem, parts):
    """Raise UserError unless the components of a reward are a dict of numbers that includes
    `correct`, a share, and uses no name of a statistic."""
    if not isinstance(parts, dict) or "correct" not in parts:
        raise UserError(f"the reward of {of(problem)} must be a dict with 'correct', not "
                        f"{parts!r:.200}")
    for name, x in parts.items():
        if not isinstance(name, str):
            raise UserError(f"the reward component {name!r} must have a string as its name")
        taken = name in STATISTICS and name != "reward"
        if taken or "@" in name:                        # an evaluation's have an @: pass@1
            raise UserError(f"rename the reward component {name!r}: it is the name of a statistic")
        if not isinstance(x, numbers.Real) or not abs(x) <= LARGEST_REWARD:
            raise UserError(f"the reward {name!r} of {of(problem)} is {written(x)}, not a finite "
                            f"number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
    x = parts["correct"]
    if not 0 <= round(float(x), 6) <= 1:                # up to rounding
        raise UserError(f"the reward 'correct' of {of(problem)} is {written(x)}, not a number from "
                        f"0 (wrong) to 1 (right). Put another scale into a component beside it, "
                        f"as in {{'correct': 0, 'wrong': -1}}")


def written(x):
    """A value in an error message, or the beginning of a long one."""
    try:
        text = repr(x)
        return text if len(text) <= 100 else f"{text[:100]}..."
    except ValueError:                  # Python writes no integer of more than 4,300 digits
        return f"a {type(x).__name__} of more digits than can be written"


def answer_of(task, completion):
    """The answer of a completion, for majority votes; raises UserError unless it is a string."""
    found = call(task.answer, "the function answer", own(completion))
    if not isinstance(found, str):
        raise UserError(f"the function answer must return a string, or '' if there is none, not "
                        f"{written(found)}, as for the completion {completion!r:.200}")
    return found


def steps_of(task, problem, completion):
    """The steps of a completion as (end, truth), not yet checked."""
    with timed():
        return call(task.steps, f"the steps of {of(problem)}", problem, own(completion))


def check_steps(problem, completion, found, least=1):
    """Raise UserError unless the steps of a completion are a list of (end, truth), with ends from
    `least` to its length that never decrease."""
    steps = f"the steps of {of(problem)}"
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
