"""The task of slips.py for choosing settings: what it holds out is cut from the training problems.

    python grpo.py --task experiments/development.py

The held-out problems of the task then measure what no choice has seen.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import arithmetic  # noqa: E402
from experiments.slips import DEFAULTS, answer, demonstration, reward, steps  # noqa: E402, F401


def problems(cfg):
    """Train and development problems; a*b and b*a stand on the same side."""
    rest = arithmetic.problems(cfg)[0]
    cut = min(arithmetic.HELD_OUT, len(rest) // 8)
    cut += sorted(rest[cut - 1].prompt[:-1].split("*")) == sorted(rest[cut].prompt[:-1].split("*"))
    return rest[cut:], rest[:cut]
