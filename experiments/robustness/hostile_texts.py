"""50,000 texts that try to cheat the rewards, or to hang them: `python experiments/robustness/hostile_texts.py`

The texts are completions edited at random. None may be `correct` if a slow, independent check finds it wrong. One
in fifty has 10,000 characters, and may take 10 ms at most. Otherwise the exit code is 1.
"""
import ast
import random
import re
import sys
import time
import timeit
import unicodedata
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from data import arithmetic, countdown, gsm8k  # noqa: E402

CASES = [(arithmetic, arithmetic.Problem("13*12=", "156"), "\n13*10=130\n13*2=26\n130+26=156"),
         (countdown, countdown.Problem("", (3, 4, 25), 13, ""), "<answer>(25-3*4)</answer>"),
         (countdown, countdown.Problem("", (3, 4, 25), 59, ""), "<answer>34+25</answer>"),  # right value, wrong numbers
         (sums, sums.Problem("", "1234", ""), "1,200 + 34 = 1,234."), (sums, sums.Problem("", "25", ""), "12+13=25"),
         (gsm8k, gsm8k.Problem("", "5", ""), "2+3=5\n<answer>$5.00</answer>"),
         (gsm8k, gsm8k.Problem("", "1080", ""), "<answer>1,080 dollars.</answer>")]
WORDS = {"million", "minus", "plus", "one", "half", "k", "M"}           # with one of these it is another number
PIECES = [*r"""0 1 2 3 4 5 6 10 12 13 25 00 00000000 4.0 .5 , ,000 . - -- + * / ** ^ ( ) = ~ $ % e3
 x dollars \boxed{ } {,} <answer> </answer> _ # 13=13 1/3+ .1+ 13*""".split(), *sorted(WORDS), " ",
          "  ", "\n", "\t", "\x00", "\u3000", "\u0665", "\uff15", "\u00b2", "\u2212", "\u00d7"]
SIGNS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.USub: "neg", ast.UAdd: "pos"}


def hostile(text, rng, length=0):
    """The text with up to four pieces inserted or removed, and a repeated run of pieces that brings it to
    `length`."""
    for _ in range(rng.randrange(5)):
        i = rng.randrange(len(text) + 1)
        text = text[:i] + rng.choice([*PIECES, ""]) + text[i + rng.choice((0, 0, 1, 2)):]
    run = "".join(rng.choice(PIECES) * rng.choice((1, 1, 48)) for _ in "abc") + rng.choice("1=\n")
    i, left = rng.randrange(len(text) + 1), max(0, length - len(text))
    return text[:i] + (run * (left // len(run) + 1))[:left] + text[i:]


def right(task, problem, text):
    """Whether a completion's answer is right, by an independent check; Python's own parser reads its
    expression."""
    if task is arithmetic:
        return text.split("=")[-1].strip() in (problem.answer, "~" + problem.answer)
    if task is sums:        # the last number; a comma before three digits belongs to it
        last = re.split(",(?![0-9]{3}(?![0-9]))", re.findall("[0-9.,]*[0-9]", text)[-1])[-1]
        return re.sub(r"^0+(?=\d)|\.0+$", "", last.replace(",", "")) == problem.answer
    said = re.findall("<answer>((?:(?!<answer>).)*?)</answer>", text, re.S)[-1].strip()
    if task is gsm8k:
        text = re.sub("(?<=[a-z])[\u00b2\u00b3]", "", said.split(r"\boxed{")[-1])
        text = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
        text = re.sub(r"[-/] ?(?=[A-Za-z])|[^-+*/.0-9=]|[.](?![0-9])", "", text)        # without its words and commas
        sides = [re.sub("(?<![0-9.])0+(?=[0-9])", "", side) for side in text.split("=") if side]
        return (all(value(side) == int(problem.answer) for side in sides)
                and any(re.fullmatch("[+]?[0-9.]+", side) for side in sides)
                and WORDS.isdisjoint(re.findall("[A-Za-z]+", said)))
    return (sorted(re.findall("[0-9.]+", said)) == sorted(map(str, problem.numbers))
            and value(said) == problem.target)


def value(text):
    """The exact value of an expression; None of what is none."""
    try:
        return exact(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def exact(node):
    """The exact value of an arithmetic syntax tree."""
    of = [exact(x) for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
    return getattr(Fraction, f"__{SIGNS[type(node.op)]}__")(*of) if of else Fraction(node.value)


def search(count, rng):
    """Of `count` texts the correct ones and the wrongly correct ones; and (seconds, function, text) of the
    slowest call."""
    correct, worst = [], (0, "", "")
    for i in range(count):
        task, problem, text = rng.choice(CASES)
        text = hostile(text, rng, 0 if i % 50 else 10_000)
        if task.reward(problem, text)["correct"]:
            correct.append((task, problem, text))
        for name in () if i % 50 else ("reward", "answer", "steps"):
            call, given = getattr(task, name), [problem, text][name == "answer":]
            timer = timeit.Timer(lambda: call(*given), timer=time.process_time)
            worst = max(worst, (min(timer.repeat(5, 1)), f"{task.__name__}.{name}", text))
    return correct, [x for x in correct if not right(*x)], worst


if __name__ == "__main__":
    correct, wrong, (taken, name, text) = search(50_000, random.Random(0))
    print(f"{len(correct)} scored correct, {len(wrong)} of them wrongly: {[x[2] for x in wrong[:5]]}")
    print(f"slowest at 10,000 characters: {name}, {1000 * taken:.2f} ms, of {text[:40]!r}")
    sys.exit(1 if wrong or taken > 0.01 else 0)
