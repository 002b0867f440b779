"""What may import what, and what no file holds."""
import ast
import re
import sys

import pytest
from conftest import ROOT

LEVELS = ["data", "model", "run", "reward", "grpo"]         # an import runs down
PATHS = [*ROOT.glob("data/*.py"), *ROOT.glob("run/*.py"), *map(ROOT.joinpath, (
    "model.py", "reward.py", "grpo.py"))]
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in PATHS}
TASKS = [name for name, path in SOURCES.items() if "\nDEFAULTS = " in path.read_text()]
# jinja2 comes with torch, regex with tiktoken.
REQUIRED = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.M)
KNOWN = {*REQUIRED, "jinja2", "regex", *sys.stdlib_module_names}


def imports(name):
    """Every module that a file imports, anywhere in it: those of the project in full, such as
    `run.files`, the others by their first name."""
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            rooms = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [room if room in SOURCES else node.module for room in rooms]
        yield from (x if x in SOURCES else x.split(".")[0] for x in found)


@pytest.mark.parametrize("name", SOURCES)
def test_an_import_runs_down(name):
    """To what is required; a task's to data and data.answers."""
    level = LEVELS.index(name.split(".")[0])
    allowed = {x for x in SOURCES if LEVELS.index(x.split(".")[0]) <= level}
    if name in TASKS:
        allowed = {"data", "data.answers"}
    above = {*imports(name)} - allowed - (KNOWN - {"torch"} if level == 0 else KNOWN)
    assert not above, f"{name} imports {above}: imports run down, {' < '.join(LEVELS)}, or to " \
                      "what requirements.txt names; data/ is without torch"


def test_nothing_evaluates_or_unpickles():
    files = [*PATHS, *(ROOT / "experiments").rglob("*.py")]
    assert len(files) >= 40
    wrong = r"(?<![\w.])eval\(|torch\.load|pickle|exec\(|builtins|__import__"
    assert not [path for path in files if re.search(wrong, path.read_text())]
