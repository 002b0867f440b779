"""Multiplication, `47*58=`, where showing the work pays off.

A completion is either a bare guess, `~3000`, or lines of working, each of them true or false:

    47*58=
    47*50=2000+350=2350
    47*8=320+56=376
    2350+376=2600+126=2726

The answer is the number after the last `=`, or the guess.

A task is one file without torch. It defines DEFAULTS, `problems`, `reward` and `answer`; for a warm
start also `demonstration`; for process supervision also `steps`; for several turns also `reply`.

`reward(problem, completion)` returns numbers by name, always the same names, which are added up.
One is `correct`, from 0 to 1, the share that evaluations count as right. Another scale is a
component beside it, as in `{"correct": right, "wrong": right - 1}`. One named `reward` is the
reward; all others, `correct` too, are then only logged. A completion that was cut off at --max_new
has a `correct` of 0, and other positive components count as 0, too.

`steps(problem, completion)` returns a list of (end, truth) for its reasoning steps, [] for an empty
text: `end` is the number of characters up to the end of the step. A true step earns 1; the last one
ends at the last token, and earns 1 only if `correct` is above 0 too. Others are then only logged.
"""
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

from data import UserError

START = str(Path(__file__).parent / "warm_start")       # a model that knows a difficulty of 2
DEFAULTS = dict(init=START, steps=24, prompts=32, group=16, max_new=64, lr=1e-4, minibatches=2)

# Some demonstrations are guesses, made by rounding the factors; the others show the work.
GUESS = 0.53    # share of guesses
SLIP = 0.0005   # probability that a number in the working is written down wrong
HELD_OUT = 500  # maximum number of held-out problems

LINES = 200     # lines of working that are read, far more than needed; later ones count as false
SUM = "[0-9]{1,15}(?:[+*][0-9]{1,15})*"     # a sum of products of numbers of up to 15 digits
EQUATION = re.compile(f"{SUM}(?:={SUM})+")

class Problem(NamedTuple):
    prompt: str     # "13*17="
    answer: str     # "221"

def problems(difficulty=2, init=""):
    """Training and held-out problems: all pairs of factors of `difficulty` digits.

    a*b and b*a are on the same side of the split, which is the same for every seed.
    """
    if not 1 <= difficulty <= 3:
        raise UserError(f"--difficulty {difficulty}: arithmetic takes 1 to 3")
    if difficulty != 2 and init == START:
        raise UserError(f"data/warm_start is for --difficulty 2: for {difficulty} add --init '', "
                        f"then there is a warm start first")
    end = 10 ** difficulty
    least = max(2, end // 10)
    pairs = [(a, b) for a in range(least, end) for b in range(a, end)]
    random.Random(0).shuffle(pairs)
    train, held_out = [], []
    for a, b in pairs:
        side = held_out if len(held_out) < min(HELD_OUT, len(pairs) // 8) else train
        side += [Problem(f"{x}*{y}=", str(a * b)) for x, y in sorted({(a, b), (b, a)})]
    return train, held_out[:HELD_OUT]

def demonstration(problem, rng):
    """A completion as an imperfect person might write it: a guess, or working with slips.

    A guess begins with `~`, so the first token alone decides between guessing and working.
    """
    a, b = map(int, problem.prompt[:-1].split("*"))
    if rng.random() < GUESS:
        return f"~{rounded(a) * rounded(b)}"
    lines = []

    def write(n):
        """n, or with probability SLIP n with one digit wrong."""
        return miswritten(n, rng) if rng.random() < SLIP else n

    def work(left, terms):  # 47*50 is 40*50 and 7*50
        """Append the line that begins with `left` and sums the terms; returns its result."""
        terms = [write(n) for n in terms]
        total = write(sum(terms)) if len(terms) > 1 else terms[0]
        middle = ["+".join(map(str, terms))] if len(terms) > 1 else []
        lines.append("=".join([left, *middle, str(total)]))
        return total

    results = [work(f"{a}*{part}", [x * part for x in parts(a)]) for part in parts(b)]
    if len(results) > 1:
        work("+".join(map(str, results)), columns(results))
    return "".join("\n" + line for line in lines)

def rounded(n):
    """n rounded to its first digit, at least to tens: 47 -> 50."""
    place = 10 ** max(1, len(str(n)) - 1)
    return (n + place // 2) // place * place

def parts(n):
    """The values of the nonzero digits of n: 508 -> [500, 8]."""
    s = str(n)
    return [int(d) * 10 ** (len(s) - 1 - i) for i, d in enumerate(s) if d != "0"]

def columns(numbers):
    """The nonzero sums of two-digit columns: 2350 and 376 -> [2600, 126]."""
    places = [100 ** i for i in reversed(range(len(str(max(numbers)))))]
    sums = [sum(n // place % 100 * place for n in numbers) for place in places]
    return [n for n in sums if n]

def miswritten(n, rng):
    """n with one digit wrong."""
    s = str(n)
    i = rng.randrange(len(s))
    return int(s[:i] + rng.choice([d for d in "0123456789" if d != s[i]]) + s[i + 1:])

def answer(completion):
    """The final answer as text, for majority votes; "" if there is none."""
    last = completion.split("=")[-1].strip().removeprefix("~")
    return last if re.fullmatch("[0-9]{1,30}", last) else ""

def steps(problem, completion):
    """The reasoning steps as (end, truth), one for each line that is not empty or a repetition.

    A step includes the newline that closes it: ending a number is part of getting it right. It is
    true if `equation` can read it and its left side uses only numbers that the problem or an
    earlier step gave. A repetition (a true line again, or one whose left side is a single number)
    is not a step: calling it false would lower the advantages of the true lines before it.
    """
    closed, end, seen = [], 0, set()
    a, b = map(int, problem.prompt[:-1].split("*"))
    known = {a, b, *parts(a), *parts(b)}
    for i, line in enumerate(completion.split("\n")):
        end += len(line) + 1
        if not line:
            continue
        if i == 0:  # no newline: the answer itself
            closed.append((end, answer(line) == problem.answer))
            continue
        numbers, value = equation(line) if i <= LINES else ([], None)
        true = value is not None and known.issuperset(numbers)
        if true and (len(numbers) == 1 or (value, *numbers) in seen):
            continue
        if true:
            known.add(value)
            seen.add((value, *numbers))
        closed.append((end, true))
    return [(min(end, len(completion)), truth) for end, truth in closed]

def equation(line):
    """The numbers on a line's left side, sorted, and the value common to all its sides, which use
    only + and *. The value is None if the sides differ, or if the left side has a product harder
    than one digit times a number: `13*17=221` shows no work."""
    if not EQUATION.fullmatch(line):
        return [], None
    sides = [[term.split("*") for term in side.split("+")] for side in line.split("=")]
    easy = all(sum(len(factor.rstrip("0")) > 1 for factor in term) < 2 for term in sides[0])
    values = {sum(math.prod(map(int, term)) for term in side) for side in sides}
    numbers = sorted(int(factor) for term in sides[0] for factor in term)
    return numbers, values.pop() if easy and len(values) == 1 else None

def reward(problem, completion):
    """Components of the rule reward: 1 for the right answer, 1 more if valid working led to it."""
    correct = answer(completion) == problem.answer
    shown = correct and completion.startswith("\n")
    valid = shown and all(truth for _, truth in steps(problem, completion))
    return {"correct": float(correct), "working": float(valid)}
