"""An algorithm in a file of its own: settings, and functions that take the place of grpo.py's."""
import difflib
import importlib.util
import inspect
import sys
from pathlib import Path

from data import UserError, regular

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
