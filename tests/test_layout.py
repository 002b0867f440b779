"""The house: which room may use which, what none of them holds, and how long they are."""
import ast
import re
import sys

import pytest
from conftest import ROOT

# From the ground up: a room uses those before it.
FLOORS = ["data", "data.answers", "data.chat", "data.tokenizer", "model", "run.machine", "run.show", "run.flags",
          "run.files", "run.shard", "run.batches", "run.samples", "run.report", "run.tensors", "run.pretrained", "run.folder",
          "run.start", "reward", "grpo"]
TASKS = ["data.arithmetic", "data.countdown", "data.gsm8k", "data.sums"]
PACKAGES = {"torch", "tiktoken", "numpy", "safetensors", "jinja2"}       # torch requires jinja2
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
           for path in [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py"), *(ROOT / "run").glob("*.py")]}


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


def test_every_file_has_its_floor():
    assert sorted(SOURCES) == sorted([*FLOORS, *TASKS, "run"])


@pytest.mark.parametrize("name", FLOORS)
def test_an_import_runs_down(name):
    for other in imports(name):
        if other in SOURCES:
            assert FLOORS.index(other) < FLOORS.index(name), f"{name} imports {other}, which is above it"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_uses_the_ground_floor_alone(name):
    assert {x for x in imports(name) if x in SOURCES} <= {"data", "data.answers"}


@pytest.mark.parametrize("name", SOURCES)
def test_run_time_packages_are_the_five(name):
    """pytest, the fifth, is for the tests; jinja2 comes with torch. Nothing on the ground floor needs
    torch."""
    others = {x for x in imports(name) if x not in SOURCES} - set(sys.stdlib_module_names)
    assert others <= PACKAGES
    if name.startswith("data"):
        assert others <= ({"jinja2"} if name == "data.chat" else {"tiktoken"})


def test_grpo_names_the_room_of_what_it_uses():
    """It imports modules of the project, and no names out of them."""
    for node in ast.walk(ast.parse(SOURCES["grpo"].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("data", "run", "model", "reward"):
            assert all(f"{node.module}.{alias.name}" in SOURCES for alias in node.names)


def test_rooms_hold_only_what_they_say():
    text = {name: path.read_text() for name, path in SOURCES.items()}
    for word in ("json", "open(", "read_text", "safetensors", "config.json"):
        assert word not in text["model"] and word not in text["grpo"], word
    assert "import re\n" not in text["reward"] and "import re\n" not in text["grpo"]
    assert not re.search(r"sample\(|advantage|reward", text["run.pretrained"])
    printed = text["grpo"].replace('print(f"error: {e}", file=sys.stderr)', "")
    assert not re.search(r"(?<![\w.])print\(", printed)


@pytest.mark.parametrize("name, most", [("grpo", 630), ("model", 300), ("reward", 250)])
def test_files_stay_short(name, most):
    """They have 613, 298 and 200 lines: a fork may add a few before something has to move out."""
    assert len(SOURCES[name].read_text().splitlines()) <= most


def functions():
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{name}.{node.name}", node


def test_functions_stay_short_and_say_what_they_do():
    """`forward` and the methods that Python calls need no docstring; a property of a line neither."""
    for name, node in functions():
        lines = node.end_lineno - node.lineno + 1
        assert lines <= 45, f"{name} has {lines} lines"
        said = ast.get_docstring(node) or node.name == "forward" or node.name.startswith("__")
        assert said or lines <= 3, f"{name} has no docstring"


def test_no_line_is_too_wide():
    for name, path in SOURCES.items():
        assert max(map(len, path.read_text().splitlines())) <= 100, name


def test_nothing_evaluates_or_unpickles():
    files = [*SOURCES.values(), *(ROOT / "experiments").glob("*.py")]
    assert len(files) >= 22
    for path in files:
        assert not re.search(r"(?<![\w.])eval\(|torch\.load|pickle|exec\(|builtins|__import__",
                             path.read_text()), path
