"""A dataclass as a command line: a field is a flag, the comment behind it the flag's help."""
import argparse
import dataclasses
import difflib
import inspect
import math
import re
from functools import partial
from typing import get_args

from data import Fault
from run import show

MODES = dict(resume=dict(action="store_true", help="Go on with the run in --out."),
             eval_only=dict(action="store_true", help="Only evaluate --init's model, or --out's."),
             ask=dict(metavar="QUESTION", help="Only let that model answer."),
             report=dict(metavar="FOLDER", nargs="+", help="Only put the curves and completions of "
                         "these runs on one page, report.html in the first one, or in --out's."))

def read(config, algos, about, argv):
    """A command line as two dicts: the flags that were given, and all of MODES, of which one at
    most is set. The flags are the fields of the dataclass `config`, and --algo, one of `algos`; the
    help is grouped as the dataclass is, by the comment lines between its fields."""
    parser = argparse.ArgumentParser(
        usage="python grpo.py [--flag value ...]", description=about, allow_abbrev=False,
        epilog="In brackets: the default; a task sets some of its own.",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=100,
                                max_help_position=36))
    modes = parser.add_argument_group("instead of a new run").add_mutually_exclusive_group()
    for name, options in MODES.items():
        modes.add_argument(f"--{name}", **options)
    add(parser, "algo", str, algos, "grpo", "Take this algorithm; other flags override its fields.")
    fields, group = {f.name: f for f in dataclasses.fields(config)}, parser
    for title, name, text in re.findall(r"^    # (.+)$|^    (\w+): [^#]+?  # (.*)$",
                                        inspect.getsource(config), re.M):
        if title:
            group = parser.add_argument_group(title)
        else:
            choices = get_args(fields[name].type)
            kind = str if choices else fields[name].type
            add(group, name, kind, choices, fields[name].default, text)

    def error(message):
        """What argparse calls instead of exiting itself."""
        raise Fault(f"{message}; --help lists the flags")
    parser.error = error
    def print_help():
        """The same for --help, which may go into a closed pipe."""
        show.print0(parser.format_help())
    parser.print_help = print_help
    given = vars(parser.parse_args(argv))
    choose("algo", given.get("algo", "grpo"), algos)
    return given, {name: given.pop(name) for name in MODES}

def add(group, name, kind, choices, default, text):
    """Add a flag to a group of the help, with its choices and its default."""
    shown = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
    text = text.replace("%", "%%") + (f" [{default}]" if default != "" else "")
    group.add_argument(f"--{name}", type=kind, metavar=shown, default=argparse.SUPPRESS, help=text)

def build(config, given):
    """A dataclass `config` of the fields that were `given`; raises Fault for a name that is none of
    its own, with the nearest one."""
    names = [f.name for f in dataclasses.fields(config)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise Fault(f"there is no setting {name!r}" + "".join(f"; is it {x!r}?" for x in near))
    return config(**given)

def choose(name, value, choices):
    """The value of a setting; raises Fault if it is none of its choices."""
    if value not in tuple(choices):         # a file's may be a list, which no dict can look up
        raise Fault(f"--{name} is one of {', '.join(choices)}, not {value!r}")
    return value

def check(cfg, least, most):
    """Raise Fault for a field of a dataclass that is none of its choices, of another type, or a
    number not finite, less than least[name] (without that an integer is at least 1, if its default
    is not 0, and another number 0) or more than most[name]."""
    for f in dataclasses.fields(cfg):
        value, choices = getattr(cfg, f.name), get_args(f.type)
        low = least.get(f.name, int(f.type is int and f.default != 0))
        kinds = (int, float) if f.type is float else f.type
        if choices:
            choose(f.name, value, choices)
        elif not isinstance(value, kinds) or isinstance(value, bool) or "\0" in str(value):
            raise Fault(f"--{f.name} is of the type {f.type.__name__}, not {value!r}")
        if f.type in (int, float) and not (low <= value and value != math.inf):
            raise Fault(f"--{f.name} is at least {low}, not {value}")
        high = most.get(f.name, 2 ** 63 if f.type is int else math.inf)
        if f.type in (int, float) and value > high:
            raise Fault(f"--{f.name} is at most {high}, not {value}")
