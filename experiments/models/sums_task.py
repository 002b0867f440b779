"""Sums asked in plain English, a first task for a small language model: `What is 7 + 12?`

--difficulty 1: two numbers up to 20; 2: two numbers of two digits; 3: three numbers up to 99;
4: word problems with two numbers up to 50. The answer is the last number in the completion.
"""
import random
import re
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import NamedTuple

from data import UserError
from data.answers import one_number, steps  # noqa: F401, re-exports steps

# For SmolLM2-135M-Instruct (experiments/models/from_pypi.py) on two CPU cores. Without a KL, dead
# groups cost no update, and k3's gradient at a rare token cannot dominate a step. At a constant
# learning rate of 3e-5 or 1e-5 accuracy stops rising at 75 %; at a falling rate it rises further
# (docs/measurements.md).
DEFAULTS = dict(steps=100, prompts=16, group=16, max_new=24, lr=3e-5, half_life=25,
                kl="none", micro_tokens=4096, save_every=25)

HELD_OUT = 128      # number of held-out problems
DRAWS = 5000        # number of triples to draw
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "toys")
STORIES = {
    "+": ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
          "There are {a} {things} in one box and {b} in another. How many {things} is that?",
          "{name} finds {a} {things} on Monday and {b} on Tuesday. How many {things} in all?"),
    "-": ("{name} has {a} {things} and gives {b} away. How many {things} are left?",
          "Of {a} {things}, {b} are broken. How many {things} are whole?",
          "{name} needs {a} {things} and has {b}. How many {things} are missing?")}
# Possessive (`++`): a run of digits is matched whole, so the time is linear. A group must not be
# possessive: Python before 3.11.5 matches it wrongly. The last dot of `...` is no decimal point.
LAST = re.compile(r"[0-9]++(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]++)?|(?<!\.)\.[0-9]++")
MINUS = ("-", "\u2212", "\u2013", "\uff0d", "minus", "negative")
BETWEEN = " \t\u00a0\u2009\u202f$\u20ac\u00a3*\\([{}"      # may stand between a sign and its number


class Problem(NamedTuple):
    prompt: str     # "What is 7 + 12?"
    answer: str     # "19"
    solution: str   # "7 + 12 = 19"


def problems(difficulty=1):
    """Training and held-out problems, the same for every seed. All problems with the same numbers
    are on the same side of the split, and no answer is negative."""
    if not 1 <= difficulty <= 4:
        raise UserError(f"--difficulty {difficulty}: sums takes 1 to 4")
    rng = random.Random(0)
    if difficulty == 3:
        triples = {tuple(sorted(rng.choices(range(1, 100), k=3))) for _ in range(DRAWS)}
        numbers = sorted(triples)
    else:
        least, most = {1: (1, 20), 2: (10, 99), 4: (1, 50)}[difficulty]
        numbers = list(combinations_with_replacement(range(least, most + 1), 2))
    rng.shuffle(numbers)
    train, held_out = [], []
    for own in numbers:
        made = list(with_numbers(own, difficulty, rng))
        side = held_out if len(held_out) < HELD_OUT else train
        side += made
    return train, held_out[:HELD_OUT]


def with_numbers(numbers, difficulty, rng):
    """Yield the problems made of some numbers, given in ascending order."""
    if difficulty == 3:
        a, b, c = rng.sample(numbers, 3)
        yield of_sum(f"{a} + {b} + {c}", a + b + c)
        if a + b >= c:
            yield of_sum(f"{a} + {b} - {c}", a + b - c)
        return
    a, b = numbers
    sums = [(x, "+", y, x + y) for x, y in sorted({(a, b), (b, a)})] + [(b, "-", a, b - a)]
    for x, sign, y, total in sums:
        if difficulty == 4:
            story = rng.choice(STORIES[sign]).format(a=x, b=y, name=rng.choice(NAMES),
                                                     things=rng.choice(THINGS))
            yield of_sum(f"{x} {sign} {y}", total, story)
        else:
            yield of_sum(f"{x} {sign} {y}", total)


def of_sum(text, total, story=""):
    """The problem that asks for a sum, directly or in a story."""
    return Problem(story or f"What is {text}?", str(total), f"{text} = {total}")


def demonstration(problem, rng):
    """The sum with its result."""
    return problem.solution


def answer(completion):
    """The last number in a completion as text; "" if there is none. A minus sign counts, spaced or
    not, unless it is a subtraction or a hyphen: `12 - 5` ends with 5, and so does `covid-5`."""
    *_, last = [None, *LAST.finditer(completion)]
    if last is None:
        return ""
    before = completion[:last.start()].rstrip(BETWEEN).lower()
    sign = next((sign for sign in MINUS if before.endswith(sign)), "")
    left = before.removesuffix(sign)
    hyphen = re.search(r"\w\Z", left)
    minuend = re.search(r"[0-9)]\Z", left.rstrip(BETWEEN + "%"))
    number = one_number("-" * bool(sign and not hyphen and not minuend) + last[0])
    return "" if number is None else str(number)


def reward(problem, completion):
    """1 for the right number, plus up to 0.2 for any number: the nearer to the right one, the more.
    So a group of wrong numbers still has a gradient, towards the nearer ones."""
    number = answer(completion)
    near = 0.2 / (1 + abs(Fraction(number) - int(problem.answer))) if number else 0.0
    return {"correct": float(number == problem.answer), "near": near}
