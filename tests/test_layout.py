"""What may import what, what no file holds, and how long files and functions are."""
import ast
import re
import sys

import pytest
from conftest import ROOT

PACKAGES = {"torch", "tiktoken", "numpy", "safetensors", "jinja2"}       # torch requires jinja2
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py"), *(ROOT / "run").glob("*.py")]}
LEVELS = ["data", "model", "run", "reward", "grpo"]         # an import runs down
TASKS = [name for name, path in SOURCES.items() if name.startswith("data.") and "\nDEFAULTS = " in path.read_text()]


def level(name):
    """The level of a module; a file of a fork's own, beside grpo.py, is on top."""
    first = name.split(".")[0]
    return LEVELS.index(first) if first in LEVELS else len(LEVELS)


def imports(name):
    """Every module that a file imports, anywhere in it: those of the project as rooms, such as
    `run.folder`, the others by their first name."""
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            rooms = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [room if room in SOURCES else node.module for room in rooms]
        else:
            continue
        yield from (x if x in SOURCES else x.split(".")[0] for x in found)


@pytest.mark.parametrize("name", SOURCES)
def test_an_import_runs_down(name):
    for other in imports(name):
        if other in SOURCES:
            assert level(other) <= level(name), f"{name} imports {other}: imports run down, {' < '.join(LEVELS)}"


def test_no_import_cycles():
    below = {name: {x for x in imports(name) if x in SOURCES and x != name} for name in SOURCES}
    done = set()
    while ready := {name for name in below if name not in done and below[name] <= done | {"data", "run"}}:
        done |= ready
    assert done == set(below), f"import cycle among {sorted(set(below) - done)}"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_imports_data_and_answers_only(name):
    used = {x for x in imports(name) if x in SOURCES}
    assert used <= {"data", "data.answers"}, f"{name} is a task: it may import data and data.answers only"


@pytest.mark.parametrize("name", SOURCES)
def test_run_time_packages_are_the_five(name):
    """pytest, the fifth, is for the tests; jinja2 comes with torch. Nothing in data/ needs torch."""
    others = {x for x in imports(name) if x not in SOURCES} - set(sys.stdlib_module_names)
    assert others <= PACKAGES, f"{name} imports {others - PACKAGES}: add them to PACKAGES in tests/test_layout.py and to requirements.txt"
    if name.startswith("data"):
        assert others <= ({"jinja2"} if name == "data.chat" else {"tiktoken"})


def test_grpo_names_the_module_of_what_it_uses():
    """It imports modules of the project, and no names out of them."""
    for node in ast.walk(ast.parse(SOURCES["grpo"].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("data", "run", "model", "reward"):
            assert all(f"{node.module}.{alias.name}" in SOURCES for alias in node.names)


def test_modules_hold_only_what_they_say():
    text = {name: path.read_text() for name, path in SOURCES.items()}
    for word in ("import json", "open(", "read_text", "safetensors", "config.json"):
        assert word not in text["model"] and word not in text["grpo"], f"{word} belongs in run/"
    assert "import re\n" not in text["reward"] and "import re\n" not in text["grpo"]
    assert not re.search(r"sample\(|advantage|reward", text["run.pretrained"])


def functions():
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{name}.{node.name}", node


def test_functions_stay_short_and_say_what_they_do():
    """`forward` and the methods that Python calls need no docstring; a property of a line neither."""
    for name, node in functions():
        lines = node.end_lineno - node.lineno + 1
        assert lines <= 45, f"{name} has {lines} lines: split it, or raise the bound in tests/test_layout.py"
        said = ast.get_docstring(node) or node.name == "forward" or node.name.startswith("__")
        assert said or lines <= 3, f"{name} needs a docstring"


def test_no_line_is_too_wide():
    for name, path in SOURCES.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{name}:{number} has {len(line)} characters, at most 100"


def test_nothing_evaluates_or_unpickles():
    files = [*SOURCES.values(), *(ROOT / "experiments").rglob("*.py")]
    assert len(files) >= 40
    for path in files:
        assert not re.search(r"(?<![\w.])eval\(|torch\.load|pickle|exec\(|builtins|__import__",
                             path.read_text()), path
