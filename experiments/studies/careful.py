"""The slips task without guesses: all demonstrations work, and three in a hundred of their numbers are wrong.

    python grpo.py --task experiments/studies/careful.py

A policy that imitates them has no bad habit to drop, only slips.
"""
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import arithmetic  # noqa: E402
from experiments.studies import slips  # noqa: E402
from experiments.studies.slips import DEFAULTS, answer, problems, reward, steps  # noqa: E402, F401


def demonstration(problem, rng):
    """Working with slips."""
    with mock.patch.object(arithmetic, "GUESS", 0):
        return slips.demonstration(problem, rng)
