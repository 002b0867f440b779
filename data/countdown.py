"""Countdown: write an expression that uses each given number once and equals the target.

    Numbers 3, 7, 25: make 46   ->   25+3*7

Problems are generated, so that each has a solution. The reward is TinyZero's: 0.1 for an answer in
tags, 1 for a right one. Nothing is demonstrated: it needs a model, --init FOLDER.
"""
import random
from fractions import Fraction
from typing import NamedTuple

from data import UserError
from data.answers import NUMERAL, OPERATORS, evaluate, steps, tagged  # noqa: F401, for others

# For a model of 0.5 billion parameters on a 24 GB GPU.
DEFAULTS = dict(steps=500, prompts=16, group=16, max_new=384, lr=1e-6, minibatches=2,
                save_every=50)

DRAWS, HELD_OUT = 60000, 500
PROMPT = ("Use the numbers {} and the operations + - * /, each number exactly once, to make {}. "
          "Think between <think> and </think>, then give the expression between <answer> and "
          "</answer>, for example <answer>(1+2)/3</answer>.\n")

class Problem(NamedTuple):
    prompt: str
    numbers: tuple
    target: int

def problems(difficulty=3):
    """Training and held-out problems of `difficulty` numbers; the same for every seed."""
    if not 2 <= difficulty <= 6:
        raise UserError(f"--difficulty {difficulty}: countdown takes 2 to 6 numbers")
    rng, unique = random.Random(0), {}
    for _ in range(DRAWS):
        numbers = tuple(sorted(rng.randrange(1, 100) for _ in range(difficulty)))
        target = reached(numbers, rng)
        if target.denominator == 1 and 10 <= target <= 99 and (numbers, target) not in unique:
            shown = ", ".join(map(str, rng.sample(numbers, len(numbers))))
            unique[numbers, target] = Problem(PROMPT.format(shown, target), numbers, int(target))
    drawn = list(unique.values())
    return drawn[HELD_OUT:], drawn[:HELD_OUT]

def reached(numbers, rng):
    """The value of a random expression that uses each of the numbers once."""
    values = [*map(Fraction, numbers)]
    while len(values) > 1:
        a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
        _, operate = OPERATORS[rng.choice("+-*/" if b else "+-*")]
        values.append(operate(a, b))
    return values[0]

def answer(completion):
    """The expression in the last answer tags, or ""."""
    return tagged(completion) or ""

def reward(problem, completion):
    """1 for an expression that uses each number once and equals the target; 0.1 for the tags."""
    text = answer(completion)
    used = sorted(NUMERAL.findall(text))    # as `evaluate` reads them: neither 034 nor 3.25 passes
    correct = used == sorted(map(str, problem.numbers)) and evaluate(text) == problem.target
    return {"correct": float(correct), "format": 0.1 * (tagged(completion) is not None)}
