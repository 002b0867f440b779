"""A dataclass as a command line: each field is a flag, and its trailing comment the flag's help."""
import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import io
import math
import sys
import textwrap
import tokenize
from functools import partial
from pathlib import Path
from typing import get_args

from data import UserError, load_task, regular
from run import show

MODES = dict(resume=dict(action="store_true", help="continue the run in --out"),
             eval_only=dict(action="store_true", help="evaluate the model in --init, or in --out"),
             ask=dict(metavar="QUESTION", help="print the answer of the model in --init or --out"),
             report=dict(metavar="FOLDER", nargs="+", help="compare these runs: on one page, "
                         "comparison.html in the first folder, or in --out"))
# Names of our settings in TRL and in verl, and what to say of settings that we do not have.
ALIASES = dict(
    learning_rate="lr", num_generations="group", epsilon="clip_low", epsilon_high="clip_high",
    max_completion_length="max_new", max_new_tokens="max_new", num_iterations="epochs",
    loss_type="loss_mean", scale_rewards="adv_scale", importance_sampling_level="ratio",
    max_steps="steps", save_steps="save_every", eval_steps="eval_every", max_grad_norm="grad_clip",
    gradient_checkpointing="recompute", model="init", model_name_or_path="init", output_dir="out",
    steps_per_generation="minibatches", gae_lambda="lam",
    n="group", train_batch_size="prompts", max_response_length="max_new", path="init",
    adv_estimator="baseline", norm_adv_by_std_in_grpo="adv_scale", kl_coef="beta",
    kl_loss_coef="beta", kl_loss_type="estimator", use_kl_loss="kl", use_kl_in_reward="kl",
    clip_ratio="clip_low", clip_ratio_low="clip_low", clip_ratio_high="clip_high",
    loss_agg_mode="loss_mean", ppo_epochs="epochs", total_training_steps="steps",
    save_freq="save_every", test_freq="eval_every", default_local_dir="out",
    ppo_max_token_len_per_gpu="micro_tokens", ppo_micro_batch_size_per_gpu="micro_tokens")
NOTES = dict(gradient_accumulation_steps="a lower --micro_tokens accumulates more",
             ppo_mini_batch_size="--minibatches is their number in a rollout",
             functions="--algo FILE sets it")
HELP = {}           # for each dataclass a list of (title, {field: text})

def read_help(config):
    """Reads the help of a dataclass from its source, once, at import: the comment at the end of a
    field's definition is its help, a comment on its own line the title of the fields that follow.
    Raises TypeError for a field without a comment."""
    names = [f.name for f in dataclasses.fields(config)]
    groups, statement = [("settings", {})], []
    source = textwrap.dedent(inspect.getsource(config))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not statement:
            if token.start[1] == 4:                     # in the class body, not in a method
                groups.append((token.string[1:].strip(), {}))
        elif token.type == tokenize.NEWLINE:
            name, text = statement[0], statement[-1]
            if name.start[1] == 4 and name.string in names and text.type == tokenize.COMMENT:
                groups[-1][1][name.string] = text.string[1:].strip()
            statement = []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
    helped = {name for _, fields in groups for name, text in fields.items() if text}
    for name in names:
        if name not in helped:
            raise TypeError(f"{__name__}.{name} has no help: write it at the end of its "
                            f"line, as in `{name}: int = 4    # width of the MLP`")
    HELP[config] = groups

def read(config, algos, about, argv):
    """Parses a command line into two dicts: the flags that were given (--algo, or a field of the
    dataclass `config`, but not `functions`), and all of MODES, of which at most one is set."""
    parser = argparse.ArgumentParser(
        usage="python grpo.py [--flag value ...]", description=about, allow_abbrev=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=100,
                                max_help_position=36))
    modes = parser.add_argument_group("instead of a new run").add_mutually_exclusive_group()
    for name, options in MODES.items():
        modes.add_argument(f"--{name}", **options)
    add(parser, "algo", str, (), "grpo", f"algorithm: {', '.join(algos)}, or a .py file: "
        "settings, which other flags override, and functions")
    fields = {f.name: f for f in dataclasses.fields(config) if f.name != "functions"}
    for title, helps in HELP[config]:
        group = parser.add_argument_group(title)
        for name in [name for name in helps if name in fields]:
            choices = get_args(fields[name].type)
            kind = str if choices else fields[name].type
            add(group, name, kind, choices, fields[name].default, helps[name])

    def error(message):
        """Replaces argparse's own, which exits."""
        raise UserError(f"{message}; see --help")
    parser.error = error
    def print_help():
        """The same for --help, as the output may be a closed pipe; with the defaults of --task."""
        asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        asked.add_argument("--task", nargs="?", default=fields["task"].default)
        task = asked.parse_known_args(argv)[0].task
        own = ", ".join(f"{name} {x}" for name, x in load_task(task).DEFAULTS.items())
        parser.epilog = textwrap.fill(f"Defaults are in brackets; --task {task} has its own: {own}",
                                      100, break_on_hyphens=False)
        show.print0(parser.format_help())
    parser.print_help = print_help
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name, equals, value = unknown[0].partition("=")
        if equals and name in fields:                                       # `lr=1e-4`
            raise UserError(f"unrecognized argument: {unknown[0]}: did you mean '--{unknown[0]}'?")
        if equals or name.startswith("-"):
            value = value or "".join(unknown[1:2])
            refuse_unknown(name.lstrip("-"), [*fields, *MODES, "algo"], value, algos)
        error(f"unrecognized argument: {unknown[0]}")
    given = vars(given)
    return given, {name: given.pop(name) for name in MODES}

def add(group, name, kind, choices, default, text):
    """Adds a flag to a group; the help shows its choices and its default."""
    shown = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
    text = text.replace("%", "%%") + (f" [{default}]" if default != "" else "")
    group.add_argument(f"--{name}", type=kind, metavar=shown, default=argparse.SUPPRESS, help=text)

def refuse_unknown(name, names, value="", algos=(), where=""):
    """Raises UserError for an unknown name with a value, and suggests the one of `names` probably
    meant, or one of `algos`."""
    plain = name.rpartition(".")[2].replace("-", "_")       # verl's have dots
    near = [ALIASES[plain]] if plain in ALIASES else difflib.get_close_matches(plain, names, 1)
    hint = f": did you mean {near[0]!r}?" if near else "; see --help"
    if value in algos:                                      # TRL's --loss_type dr_grpo
        hint = f": did you mean '--algo {value}'?"
    elif plain in NOTES:
        hint = f": {NOTES[plain]}"
    raise UserError(f"there is no setting {name!r}{where}{hint}")

def build(config, implied, given):
    """The dataclass `config`, built from the fields `implied` (by the task, for one) and `given`,
    but not `algo`, which chose some of them; raises UserError for unknown names."""
    names = [f.name for f in dataclasses.fields(config)]
    chosen = {name: x for name, x in (implied | given).items() if name != "algo"}
    for name in chosen:
        if name not in names:
            refuse_unknown(name, names, where="" if name in given else
                           " (in the task's DEFAULTS, or the algorithm's SETTINGS)")
    return config(**chosen)

def choose(name, value, choices):
    """The value of a setting; raises UserError if it is not one of its choices."""
    if value not in tuple(choices):         # tuple: an unhashable value from a file is no key
        raise UserError(f"--{name} must be one of {', '.join(choices)}, got {value!r}")
    return value

def validate(cfg, least, most):
    """Raises UserError for a field of a dataclass that is not one of its choices, has the wrong
    type, is not finite, or is out of bounds: below least[name] (by default 1 for an integer whose
    default is not 0, else 0) or above most[name]."""
    for f in dataclasses.fields(cfg):
        value, choices = getattr(cfg, f.name), get_args(f.type)
        low = least.get(f.name, int(f.type is int and f.default != 0))
        high = most.get(f.name, 2 ** 63 if f.type is int else math.inf)
        kinds = (int, float) if f.type is float else f.type
        if choices:
            choose(f.name, value, choices)
        elif not isinstance(value, kinds) or isinstance(value, bool) or "\0" in str(value):
            article = "an" if f.type is int else "a"
            raise UserError(f"--{f.name} must be {article} {f.type.__name__}, got {value!r}")
        if f.type in (int, float) and not (low <= value and value != math.inf):
            raise UserError(f"--{f.name} must be at least {low}, got {value}")
        if f.type in (int, float) and value > high:
            raise UserError(f"--{f.name} must be at most {high}, got {value}")


HERE = Path(__file__).parent.parent / "experiments" / "variants"
LOADED = {}             # modules, by path and content
REPLACED = {}           # functions of grpo.py that were replaced, by name
TOO_EARLY = {"make_config", "read_command", "main", "train"}     # cannot be replaced

def file_of(name):
    """The file of an algorithm, or None: experiments/variants/<name>.py, or `name` itself if it is
    a path that ends in .py."""
    path = HERE / f"{name}.py" if name.isidentifier() else Path(name)
    return path if name.endswith(".py") or path.is_file() and name.isidentifier() else None

def names(algos):
    """The names of all algorithms: rows of `algos`, and files."""
    return [*algos, *sorted(path.stem for path in HERE.glob("*.py"))]

def settings(name, algos, known):
    """The settings of an algorithm: a row of `algos`, or SETTINGS of its file, and with them the
    file's name as `functions`. `known`: the globals of grpo.py. Raises UserError if there is none
    of that name."""
    name = str(name)
    if name in algos:
        return algos[name] | {"functions": ""}
    if file_of(name):
        return loaded(name, known).SETTINGS | {"functions": name}
    if near := difflib.get_close_matches(name, names(algos), 1, 0.8):
        raise UserError(f"there is no --algo {name}: did you mean {near[0]!r}?")
    raise UserError(f"--algo must be one of {', '.join(names(algos))}, or the path of a .py file, "
                    f"got {name!r}")

def of_resume(name, algos, known):
    """The settings with which a resumed run must agree: those of a row, or only the file's name, as
    flags may have overridden a file's settings."""
    found = settings(name, algos, known)
    return {"functions": found["functions"]} if found["functions"] else found

def loaded(name, names):
    """The module of an algorithm's file, executed once. Raises UserError if there is none, if it
    has no dict SETTINGS, or if it has a function that grpo.py lacks, or one whose arguments differ,
    or a name of grpo.py that is no function, which would replace nothing; helpers begin with _."""
    path = file_of(name)
    if not path.is_file():
        raise UserError(f"no file {name}")
    key = name, regular(path).read_bytes()
    if key not in LOADED:
        sys.modules.setdefault("grpo", sys.modules[names["__name__"]])      # if it is __main__
        spec = importlib.util.spec_from_file_location(f"algo_{path.stem}", path)
        module, installed = importlib.util.module_from_spec(spec), {n: names[n] for n in REPLACED}
        sys.modules[spec.name] = module         # dataclasses look it up
        names.update(REPLACED)          # a file imports grpo.py's own functions
        try:
            spec.loader.exec_module(module)
            before = dict(names)
        except SyntaxError as e:
            raise UserError(f"{path}, line {e.lineno}: {e.msg}") from e
        finally:
            names.update(installed)
        if not isinstance(getattr(module, "SETTINGS", None), dict):
            raise UserError(f"{path} is not an algorithm: it needs a dict named SETTINGS")
        check_names(path, vars(module), before)
        LOADED[key] = module
    return LOADED[key]

def check_names(path, names, before):
    """Raises UserError if a global of an algorithm's file replaces nothing, or cannot: `names` are
    the file's, `before` grpo.py's own."""
    known, own = own_functions(before), own_functions(names)
    for name in own.keys() & TOO_EARLY:
        raise UserError(f"{path}: {name} runs before a file's functions are installed")
    for unknown in own.keys() - known.keys():
        raise UserError(f"{path}: grpo.py has no function {unknown} to replace; it has "
                        f"{', '.join(known)}")
    for name, function in own.items():
        given, wanted = arguments(function), arguments(known[name])
        if given != wanted and [x[0] for x in given] != ["*"]:
            raise UserError(f"{path}: the arguments of {name} are {', '.join(wanted)}, in this "
                            f"order, not {', '.join(given)}")
    for name, x in names.items():
        if name[0] != "_" and name not in own and before.get(name, x) is not x:
            raise UserError(f"{path}: {name} would not take the place of grpo.py's, as only "
                            f"functions that the file defines do; rename it")

def own_functions(names):
    """The public functions among the globals of a module that are its own, by name."""
    return {name: x for name, x in names.items()
            if inspect.isfunction(x) and x.__module__ == names["__name__"] and name[0] != "_"}

def arguments(function):
    """The names of a function's arguments, in their order; that of *args has its star."""
    parameters = inspect.signature(function).parameters.values()
    return ["*" * (p.kind == p.VAR_POSITIONAL) + p.name for p in parameters]

def check(cfg):
    """Raises UserError if the run would never call an installed `outcome_scores`."""
    called = cfg.supervision == "outcome" and cfg.baseline == cfg.adv_scale == "group"
    if "outcome_scores" in REPLACED and "advantages" not in REPLACED and not called:
        raise UserError(f"--algo {cfg.functions}: its outcome_scores is called only with "
                        f"--supervision outcome, --baseline group and --adv_scale group")

def install(name, names):
    """Puts the functions of an algorithm's file in the place of those of grpo.py, whose globals are
    `names`, and first puts back those that an earlier run replaced."""
    names.update(REPLACED)
    REPLACED.clear()
    if file_of(name):
        functions = own_functions(vars(loaded(name, names)))
        REPLACED.update({name: names[name] for name in functions})
        names.update(functions)
