"""The arithmetic task as careless people show it: three in a hundred of their numbers are written down wrong.

    python grpo.py --task experiments/slips.py

A policy that imitates them has a choice to learn, to work and not to guess, and after it much else: every
number of a working is right in 97 cases of 100, and all have to be. In the task itself that choice is nearly
all there is, so that every algorithm ends at the same place. The right answer alone counts: a reward for valid
working too would make outcomes out of steps.
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import arithmetic  # noqa: E402
from data.arithmetic import answer, problems, steps  # noqa: E402, F401

DEFAULTS = arithmetic.DEFAULTS | dict(max_new=80)       # a wrong number may be a longer one
SLIP = 0.03


def demonstration(problem, rng):
    """A guess, or working with slips."""
    with mock.patch.object(arithmetic, "SLIP", SLIP):
        return arithmetic.demonstration(problem, rng)


def reward(problem, completion):
    """1 for the right answer."""
    return {"correct": arithmetic.reward(problem, completion)["correct"]}
