"""What may import what, and what no file holds. The style of this repository is checked in upstream/test_style.py."""
import ast
import re
import sys

import pytest
from conftest import ROOT

LEVELS = ["data", "model", "run", "reward", "grpo"]         # an import runs down
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py"), *(ROOT / "run").glob("*.py")]
           if path.parent != ROOT or path.stem in LEVELS}
BESIDE = {path.stem for path in ROOT.glob("*.py")} - {*LEVELS}      # of one's own: tasks, scripts, notebooks
TASKS = [name for name, path in SOURCES.items() if name.startswith("data.") and "\nDEFAULTS = " in path.read_text()]


def level(name):
    """The level of a module; a file of one's own, beside grpo.py, is on top."""
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
        if other in SOURCES or other in BESIDE:
            assert level(other) <= level(name), f"{name} imports {other}: imports run down, {' < '.join(LEVELS)}"


def test_no_import_cycles():
    below = {name: {x for x in imports(name) if x in SOURCES and x != name} for name in SOURCES}
    done = set()
    while ready := {name for name in below if name not in done and below[name] <= done | {"data", "run"}}:
        done |= ready
    assert done == set(below), f"import cycle among {sorted(set(below) - done)}"


def test_the_table_of_run_names_files_that_are_there():
    """Each once; a file of one's own need not be in it."""
    table = re.findall(r"^    (\w+) +\w", (ROOT / "run" / "__init__.py").read_text(), re.M)
    assert len(table) == len({*table}) == 9 and {f"run.{name}" for name in table} <= SOURCES.keys()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_imports_data_and_answers_only(name):
    used = {x for x in imports(name) if x in SOURCES}
    assert used <= {"data", "data.answers"}, f"{name} is a task: it may import data and data.answers only"


@pytest.mark.parametrize("name", SOURCES)
def test_run_time_packages_are_required(name):
    """jinja2 comes with torch, regex with tiktoken. A file of one's own, beside grpo.py, may import anything."""
    required = set(re.findall(r"^([\w-]+)", (ROOT / "requirements.txt").read_text(), re.M)) | {"jinja2", "regex"}
    others = {x for x in imports(name) if x not in SOURCES and x not in BESIDE} - set(sys.stdlib_module_names)
    assert others <= required, f"{name} imports {others - required}: add them to requirements.txt"
    assert "torch" not in others or not name.startswith("data"), f"{name} imports torch: data/ is without it"


def test_nothing_evaluates_or_unpickles():
    files = [*SOURCES.values(), *(ROOT / "experiments").rglob("*.py")]
    assert len(files) >= 40
    for path in files:
        assert not re.search(r"(?<![\w.])eval\(|torch\.load|pickle|exec\(|builtins|__import__",
                             path.read_text()), path
