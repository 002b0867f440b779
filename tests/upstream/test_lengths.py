"""What this repository promises of itself: files that can be read in an evening."""
import density
import pytest
from conftest import ROOT


@pytest.mark.parametrize("name, most", [
    ("experiments/smallest.py", 130), ("grpo.py", 690), ("model.py", 327), ("reward.py", 358), ("README.md", 90)])
def test_files_stay_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("name, most", [
    ("grpo.py", dict(characters=47, wide=0.15, nodes=6.58, modules=10, names=60)),
    ("model.py", dict(characters=48, wide=0.18, nodes=7.06)), ("reward.py", dict(characters=48, wide=0.18, nodes=7.68))])
def test_files_stay_light(name, most):
    """See density.py."""
    found = density.measure((ROOT / name).read_text())
    assert all(found[measure] <= limit for measure, limit in most.items()), found


TEXT = '''"""A docstring
of two lines."""
import torch
import reward
from run import dist, passes as p
from data import UserError      # of data/__init__.py

# a comment

def f(x):
    """A docstring."""
    y = reward.of(x) + dist.rank() + dist.rank() + p.a.b        # two modules' functions, one of them twice, and
    return y, UserError, x.dist
'''


def test_what_is_measured():
    """By hand: 4 imports, `def`, 2 lines; the last but one is wide."""
    code = [line for line in TEXT.splitlines() if line.strip().startswith(("import", "from", "def", "y =", "return"))]
    found = density.measure(TEXT)
    assert found["lines"] == len(code) == 7 and found["wide"] == pytest.approx(1 / 7)
    assert found["characters"] == pytest.approx(sum(len(line.strip()) for line in code) / 7)
    # Statements: 2 docstrings, 4 imports, def, =, return. Expressions: the 2 docstrings; y, 3 sums, 3 calls of 2 nodes and
    # a name, x, 3 for p.a.b; y, UserError, x.dist of 2 nodes, and their tuple.
    assert found["nodes"] == pytest.approx((9 + 2 + 1 + 3 + 3 * 3 + 1 + 3 + 5) / 7)
    assert (found["modules"], found["names"]) == (4, 4)         # reward.of, dist.rank, passes.a, UserError


def test_the_table(capsys):
    density.main([str(ROOT / "grpo.py")])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["lines", "characters", "wide", "nodes", "modules", "names"] and row.startswith("grpo.py ") and len(row.split()) == 7
