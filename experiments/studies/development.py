"""The slips task for choosing settings: its held-out problems are taken from the training problems.

    python grpo.py --task experiments/studies/development.py

The held-out problems of the task itself are then unseen when they measure the result.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import arithmetic  # noqa: E402
from experiments.studies.slips import DEFAULTS, answer, demonstration, reward, steps  # noqa: E402, F401


def problems(cfg):
    """Training and development problems; a*b and b*a are on the same side of the split."""
    rest = arithmetic.problems(cfg)[0]
    cut = min(arithmetic.HELD_OUT, len(rest) // 8)
    cut += sorted(rest[cut - 1].prompt[:-1].split("*")) == sorted(rest[cut].prompt[:-1].split("*"))
    return rest[cut:], rest[:cut]
