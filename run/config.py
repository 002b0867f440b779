"""Settings: a dataclass as a command line, and algorithms that are files."""
import argparse
import difflib
import functools
import inspect
import math
import os
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

from data import UserError, call, file_of, import_file, load_task
from run import files
from run.terminal import print0

# ------------------------------------------------------------- the command line

MODES = dict(resume=dict(action="store_true", help="continue the run in --out"),
             eval_only=dict(action="store_true", help="evaluate the model in --init, or in --out"),
             ask=dict(metavar="QUESTION", help="print the answer of the model in --init or --out"),
             report=dict(metavar="FOLDER", nargs="+", type=os.path.expanduser,
                         help="these runs on one page, comparison.html in the first folder, "
                              "or in --out"))
TABLE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"     # with names of TRL, verl
# A comment after a field is its help; a comment on a line of its own is the heading of the next.
COMMENT = re.compile(r"^    (?:(\w+)\s*:[^#\n]*)?#\s*(.*)$", re.M)

def sections(config):
    """The help of a dataclass's fields by heading, from its source; under "" those without any."""
    found, heading = {"": {f.name: "" for f in fields(config)}}, ""
    for name, text in COMMENT.findall(inspect.getsource(config)):
        if name in found[""]:
            del found[""][name]
            found.setdefault(heading, {})[name] = text
        elif not name:
            heading = text
    return {heading: helps for heading, helps in found.items() if helps}

class Parser(argparse.ArgumentParser):
    """argparse, but an error is a UserError."""

    def error(self, message):
        raise UserError(f"{message}; see --help")

def read(config, about, argv):
    """A command line as MODES, of which at most one is set, and a dict of the settings."""
    form = functools.partial(argparse.RawDescriptionHelpFormatter, width=100, max_help_position=36)
    parser = Parser(usage="python grpo.py [--flag value ...]", description=about, add_help=False,
                    formatter_class=form, allow_abbrev=False)
    modes = parser.add_argument_group("instead of a new run").add_mutually_exclusive_group()
    for name, options in MODES.items():
        modes.add_argument(f"--{name}", **options)
    known = {f.name: f for f in fields(config)}
    for heading, helps in sections(config).items():
        group = parser.add_argument_group(heading or "more")
        for name, text in helps.items():
            if known[name].type is not dict:
                add_flag(group, name, known[name].type, known[name].default, text)
    found = task_of(parser.parse_known_args(argv)[0])
    task_name = found or config.task
    task = load_task(task_name)
    group = parser.add_argument_group(f"--task {task_name}", inspect.getdoc(task.problems))
    own = own_settings(task, config)
    for name, default in own.items():
        add_flag(group, name, type(default), default, "")
    parser.add_argument("-h", "--help", action="help", help="print this")
    defaults = ", ".join(f"{name} {x}" for name, x in task.DEFAULTS.items())
    epilog = f"Defaults in brackets yield to those of --algo and --task {task_name}: {defaults}"
    parser.epilog = textwrap.fill(epilog, 100, break_on_hyphens=False)

    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = {*known, *own, *MODES} - {"task_args"}      # it has no flag: its parts have
        raise no_setting(unknown[0].partition("=")[0], names, unknown[0])
    given = vars(given) | ({"task": found} if found else {})
    mode = SimpleNamespace(**{name: given.pop(name) for name in MODES})
    return mode, given

def task_of(flags):
    """The task that flags name, or that of the run they use, unless it is a file; or None."""
    given, is_asked = vars(flags), flags.eval_only or flags.ask is not None
    folder = is_asked and given.get("init") or (is_asked or flags.resume) and given.get("out")
    if given.get("task") or not folder:
        return given.get("task")
    found = files.about(folder).get("config", {}).get("task")
    return None if str(found).endswith(".py") else found

def add_flag(group, name, kind, default, text):
    """Adds a flag of a type, or with choices; for a bool --name and --no-name."""
    shown = "" if default == "" else f" [{default}]"
    options = dict(default=argparse.SUPPRESS, help=text.replace("%", "%%") + shown)
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_args(kind):
        options |= dict(choices=get_args(kind), metavar="{" + ",".join(get_args(kind)) + "}")
    else:
        convert = os.path.expanduser if kind is str else kind
        options |= dict(type=convert, metavar=kind.__name__.upper())
    group.add_argument(f"--{name}", **options)

def near(name, names, cutoff):
    """Which of the names are probably meant: those of the same letters, or the closest one."""
    return [x for x in names if sorted(x) == sorted(name)] or difflib.get_close_matches(
        name, names, 1, cutoff)

def no_setting(name, names, shown=None):
    """The UserError for a name that is none of `names`, with the one probably meant."""
    name = name.lstrip("-")
    meant = near(name.replace("-", "_"), names, 0.81)
    hint = f"did you mean --{meant[0]}?" if meant else "see --help"
    table = TABLE.read_text("utf-8") if TABLE.exists() else ""
    for theirs, ours in reversed(re.findall(r"^\| (.*) \| (.*) \|$", table, re.M)):
        if f"`{name}`" in theirs:       # of several rows the first counts
            hint = f"here it is {ours.replace('`', '')}"
    return UserError(f"there is no setting {shown or name}: {hint}")

# ------------------------------------------------------------------- the values

def folder_of(settings):
    """The folder of a run: --out or, without one, out/<task>."""
    return Path(settings.get("out") or f"out/{Path(settings['task']).stem}")

def own_settings(task, config):
    """A task's own settings with defaults: parameters of its `problems` that are not the run's."""
    own = inspect.signature(task.problems).parameters.values()
    own = [p for p in own if p.name not in {"cfg", *(f.name for f in fields(config))}]
    for p in own:
        if type(p.default) not in (bool, int, float, str) or p.name in {"help", *MODES}:
            raise UserError(f"the parameter {p.name} of the task's problems() needs a default, a "
                            f"number or a text, and a name of its own")
    return {p.name: p.default for p in own}

def problems_of(task, cfg):
    names = inspect.signature(task.problems).parameters
    known = vars(cfg) | cfg.task_args | {"cfg": cfg}
    given = {name: known[name] for name in names if name in known}
    try:
        return call(task.problems, "the function problems", **given)
    except OSError as e:
        raise UserError(f"the task's problems cannot be read: {e}") from e

def check(cfg, least, most):
    """UserError for a field of a wrong type or choice, below least[name], or above most[name]."""
    for f in fields(cfg):
        low = least.get(f.name, int(f.type is int and f.default != 0))  # 1 or 0
        check_value(f.name, f.type, getattr(cfg, f.name), low, most.get(f.name, 2 ** 63))

def check_value(name, kind, value, low=-math.inf, high=math.inf):
    """UserError unless a setting's value is of a type, and within bounds."""
    wanted = ""
    kinds = (int, float) if kind is float else kind
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            wanted = f"one of {', '.join(get_args(kind))}"
    elif not isinstance(value, kinds) or isinstance(value, bool) is not (kind is bool):
        wanted = f"of the type {kind.__name__}"
    elif kind in (int, float) and not low <= value <= high:
        wanted = f"at most {high}" if value > high else f"at least {low}"
    if wanted:
        raise UserError(f"--{name} must be {wanted}, got {value!r:.100}")

def make(kind, rows, grpo, given):
    """The dataclass `kind` as in grpo.make_config."""
    task_args = given.pop("task_args", {})
    given = task_args | given  # a task's own settings count as flags, too
    task = load_task(given.get("task", kind.task))
    settings = algorithm((task.DEFAULTS | given).get("algo", kind.algo), rows, grpo)
    # Later lines override earlier ones. `implied` looks at those that override it, too.
    chosen = {f.name: f.default for f in fields(kind)}
    chosen |= task.DEFAULTS
    chosen |= implied(chosen | settings | given)
    chosen |= settings | given
    chosen = {n: os.path.expanduser(x) if isinstance(x, str) else x for n, x in chosen.items()}
    own, names = own_settings(task, kind), [f.name for f in fields(kind)]
    for name in chosen.keys() - {*names, *own}:
        raise no_setting(name, [*names, *own])
    args = {name: chosen.pop(name, default) for name, default in own.items()}
    for name, x in args.items():
        check_value(name, type(own[name]), x)
    return kind(**chosen | {"task_args": args})

def implied(chosen):
    """What some settings imply for others, unless an algorithm or a flag sets these, too."""
    others = {}
    if chosen["kl"] == "reward":
        others["estimator"] = "k1"      # as a reward only k1 gives the KL's gradient (eq. 2)
    if chosen["reward"] != "rule" or chosen["kl"] == "reward":
        # Of equally good completions the std is only noise: the reward model's, or the KL's.
        if chosen["adv_scale"] == "group":
            others["adv_scale"] = "none"
    if chosen["init"]:
        others["warm_steps"] = 0
        others["warm_lr"] = 2e-5        # lower, if --warm_steps adds a warm start
    return others

# --------------------------------------------------------------- the algorithms

VARIANTS = Path(__file__).parent.parent / "experiments" / "variants"
REPLACED = {}  # what the algorithm in use has replaced in grpo.py, by name
FIXED = {}     # the settings that it does not use, or not otherwise, and their values

def algorithm(algo, rows, grpo):
    """The settings of an algorithm: its row, or SETTINGS of its file, which is executed, and puts
    its functions in `grpo`, in place of an earlier file's."""
    vars(grpo).update(REPLACED)
    REPLACED.clear()
    FIXED.clear()
    algo = str(algo)
    if algo in rows:
        return rows[algo]
    path = file_of(algo, VARIANTS)
    if path is None:
        names = [*rows, *sorted(path.stem for path in VARIANTS.glob("*.py"))]
        meant = near(algo.lower(), names, 0.9)
        hint = f"there are {', '.join(names)}; docs/variants.md has others, which are settings"
        if meant and algo.isidentifier():
            hint = f"did you mean {meant[0]}?"
        raise UserError(f"there is no --algo {algo}: {hint}")
    sys.modules["grpo"] = grpo  # which may be __main__
    for name in [name for name in sys.modules if name.startswith("experiments.variants")]:
        del sys.modules[name]   # so that what they import runs again
    before = dict(vars(grpo))
    try:
        found = import_file(path, f"experiments.variants.{path.stem}")
    finally:
        new = vars(grpo).keys() - before.keys()
        for name in new:
            delattr(grpo, name)
        REPLACED.update({n: x for n, x in before.items() if getattr(grpo, n) is not x})
    if new:
        raise UserError(f"{path}: grpo.py has no {min(new)} to replace")
    if not isinstance(getattr(found, "SETTINGS", None), dict):
        raise UserError(f"{path} is not an algorithm: it needs a dict named SETTINGS")
    for module in [x for n, x in sys.modules.items() if n.startswith("experiments.variants.")]:
        known = vars(grpo.Config) | module.SETTINGS | found.SETTINGS
        for name in getattr(module, "FIXED", []):
            if name not in known:
                raise no_setting(name, known)
            FIXED[name] = known[name]
    return found.SETTINGS

def check_used(cfg, task):
    """UserError for what an algorithm would ignore; prints what it replaces, what is idle."""
    for name, x in FIXED.items():
        if getattr(cfg, name) != x:
            raise UserError(f"--algo {cfg.algo} does not take --{name} {getattr(cfg, name)}")
    of_tokens = cfg.supervision == "process" or "value" in cfg.baseline
    if cfg.ratio == "sequence" and of_tokens and "importance_ratio" not in REPLACED:
        raise UserError("--ratio sequence would give each token its row's mean advantage: take "
                        "--algo gspo_token")
    if file_of(cfg.algo, VARIANTS):
        print0(f"--algo {cfg.algo} replaces {', '.join(REPLACED) or 'nothing'} in grpo.py")
    uses = dict(beta=cfg.applies_kl, estimator=cfg.kl != "none", lam="value" in cfg.baseline,
                critic="value" in cfg.baseline, n_layer=not cfg.init, n_embd=not cfg.init,
                max_turns=hasattr(task, "reply"))
    defaults = vars(type(cfg)) | getattr(task, "DEFAULTS", {})
    idle = [f"--{name}" for name, used in uses.items()
            if not used and getattr(cfg, name) != defaults[name]]
    if idle:
        print0(f"note: without effect in this run: {', '.join(idle)}")
