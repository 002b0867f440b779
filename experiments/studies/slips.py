"""The arithmetic task with careless demonstrations: three in a hundred of their numbers are wrong.

    python grpo.py --task experiments/studies/slips.py

A policy that imitates them can learn to work instead of guessing, and then has much more to learn:
each number of its working is right in 97 cases of 100, and all of them must be. In the plain task
that first choice is nearly everything. Only the right answer is rewarded: a reward for valid
working would turn outcome supervision into process supervision.
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import arithmetic  # noqa: E402
from data.arithmetic import answer, problems, steps  # noqa: E402, F401

DEFAULTS = arithmetic.DEFAULTS | dict(max_new=80)       # wrong numbers may be longer
SLIP = 0.03


def demonstration(problem, rng):
    """A guess, or working with slips."""
    with mock.patch.object(arithmetic, "SLIP", SLIP):
        return arithmetic.demonstration(problem, rng)


def reward(problem, completion):
    """1 for the right answer."""
    return {"correct": arithmetic.reward(problem, completion)["correct"]}
