"""The style of this repository's own files: packages, widths, docstrings, and what each module is for."""
import ast
import re
import sys

import pytest
from conftest import ROOT

TASKS = ("arithmetic", "countdown", "gsm8k", "sums")       # tasks of one's own may lie beside them
OWN = {str(path.relative_to(ROOT)): path.read_text() for path in
       [*(ROOT / f"{name}.py" for name in ("grpo", "model", "reward")), *(ROOT / "run").glob("*.py"),
        *(path for path in (ROOT / "data").glob("*.py")
          if path.stem in TASKS or "\nDEFAULTS = " not in path.read_text())]}
ROOMS = ("data", "model", "run", "reward", "grpo")


@pytest.mark.parametrize("name", OWN)
def test_packages_at_run_time(name):
    """jinja2 comes with torch, regex with tiktoken."""
    nodes = [*ast.walk(ast.parse(OWN[name]))]
    used = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    used |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    used = {x.split(".")[0] for x in used} - set(sys.stdlib_module_names) - set(ROOMS)
    in_data = {"jinja2"} if name == "data/chat.py" else {"regex", "tiktoken"}
    assert used <= (in_data if name.startswith("data/") else {"torch", "tiktoken", "numpy", "safetensors"})


def test_grpo_names_the_module_of_what_it_uses():
    """It imports modules of the project, and no names out of them."""
    for node in ast.walk(ast.parse(OWN["grpo.py"])):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ROOMS:
            assert all(f"{node.module.replace('.', '/')}/{alias.name}.py" in OWN for alias in node.names), node.lineno


def test_modules_hold_only_what_they_say():
    for word in ("import json", "open(", "read_text", "safetensors", "config.json"):
        assert word not in OWN["model.py"] and word not in OWN["grpo.py"], f"{word} belongs in run/"
    assert "import re\n" not in OWN["reward.py"] and "import re\n" not in OWN["grpo.py"]
    assert not re.search(r"sample\(|advantage|reward", OWN["run/pretrained.py"])


@pytest.mark.parametrize("name", OWN)
def test_functions_stay_short_and_say_what_they_do(name):
    """`forward` and the methods that Python calls need no docstring; what overrides a method that has one, and a
    property of a line, neither."""
    functions = [node for node in ast.walk(ast.parse(OWN[name])) if isinstance(node, ast.FunctionDef)]
    known = {node.name for node in functions if ast.get_docstring(node)} | {"forward"}
    for node in functions:
        lines = node.end_lineno - node.lineno + 1
        assert lines <= 45, f"{name}: {node.name} has {lines} lines: split it"
        said = ast.get_docstring(node) or node.name in known or node.name.startswith("__")
        assert said or lines <= 3, f"{name}: {node.name} needs a docstring"


@pytest.mark.parametrize("name", OWN)
def test_no_line_is_too_wide(name):
    for number, line in enumerate(OWN[name].splitlines(), 1):
        assert len(line) <= 100, f"{name}:{number} has {len(line)} characters, at most 100"
