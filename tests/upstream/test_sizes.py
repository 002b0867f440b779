"""What this repository promises of itself: files read in an evening, and a small whole."""
import ast

import pytest
from conftest import ROOT

# A limit may be lowered.
LINES = {"own": 5_143, "run": 2_550, "data": 1_300}
CHARACTERS = {"own": 251_900, "tests": 539_400, "experiments": 175_000}
WORDS = 15_000

FILES = {"grpo.py": 620, "model.py": 330, "reward.py": 345, "experiments/smallest.py": 130,
         "README.md": 90}
# At nanoGPT's density: characters of a code line, those over 80 columns, nodes of the syntax tree.
DENSITY = {"grpo.py": (47, 0.15, 6.54), "model.py": (48, 0.18, 7.30), "reward.py": (48, 0.18, 7.70)}


def texts(*globs):
    return [path.read_text() for pattern in globs for path in sorted(ROOT.glob(pattern))]


ROOMS = {"own": texts("*.py", "run/**/*.py", "data/**/*.py"),
         **{name: texts(f"{name}/**/*.py") for name in ("run", "data", "tests", "experiments")}}


@pytest.mark.parametrize("room", LINES)
def test_lines(room):
    assert sum(text.count("\n") for text in ROOMS[room]) <= LINES[room]


@pytest.mark.parametrize("room", CHARACTERS)
def test_characters(room):
    assert sum(map(len, ROOMS[room])) <= CHARACTERS[room]


def test_words():
    assert sum(len(text.split()) for text in texts("README.md", "docs/*.md")) <= WORDS


def test_lines_are_not_wide():
    lines = [line for room in ROOMS.values() for text in room for line in text.splitlines()]
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("name", FILES)
def test_files_stay_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= FILES[name]


@pytest.mark.parametrize("name", DENSITY)
def test_files_stay_light(name):
    """A code line is one with more than blanks, a comment or a docstring."""
    text = (ROOT / name).read_text()
    tree, said = ast.parse(text), set()
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            said.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code = [line for n, line in enumerate(text.splitlines(), 1)
            if n not in said and line.strip() and not line.strip().startswith("#")]
    nodes = sum(isinstance(node, (ast.expr, ast.stmt)) for node in ast.walk(tree))
    found = [sum(len(line.strip()) for line in code) / len(code),
             sum(len(line) > 80 for line in code) / len(code), nodes / len(code)]
    assert all(x <= most for x, most in zip(found, DENSITY[name])), found
