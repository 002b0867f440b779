"""What the rule rewards share: a safe evaluator for arithmetic. Model text never sees `eval`."""
import math
import numbers
import re
from fractions import Fraction

from model import Fault

TOKEN = re.compile(r"[0-9]{1,15}|[-+*/()]")     # ASCII digits only: int() would take others too
LONGEST = 200                                   # characters; bounds the time, the depth, the result


def evaluate(text):
    """Exact value of an arithmetic expression as a Fraction, or None for anything else.

    Takes integers of up to 15 digits, + - * /, unary minus, parentheses and spaces, in at most 200
    characters: no names, no powers, nothing that can run long.
    """
    squeezed = text.replace(" ", "")
    tokens = TOKEN.findall(squeezed) if len(text) <= LONGEST else []
    if not tokens or "".join(tokens) != squeezed or re.search(r"[0-9] +[0-9]|[0-9]{16}", text):
        return None
    tokens.append("")                           # the end
    at = 0

    def take():
        nonlocal at
        at += 1
        return tokens[at - 1]

    def sum_():
        value = product()
        while tokens[at] in ("+", "-"):
            value = value + product() if take() == "+" else value - product()
        return value

    def product():
        value = atom()
        while tokens[at] in ("*", "/"):
            value = value * atom() if take() == "*" else value / atom()
        return value

    def atom():
        token = take()
        if token == "-":
            return -atom()
        if token == "(":
            value = sum_()
            if take() != ")":
                raise SyntaxError
            return value
        if not token.isdigit():
            raise SyntaxError
        return Fraction(int(token))

    try:
        value = sum_()
    except (SyntaxError, ZeroDivisionError):
        return None
    return value if tokens[at] == "" else None


def score(task, problems, texts, finished):
    """The components of the rule reward by name, a list of floats each; the reward is their sum.

    A completion that did not finish gave no answer: 0. Raises Fault for what is not a number.
    """
    parts = [task.reward(problem, text) for problem, text in zip(problems, texts)]
    for problem, part in zip(problems, parts):
        for name, x in part.items():
            if not isinstance(x, numbers.Real) or not math.isfinite(x):
                raise Fault(f"the reward {name!r} of the prompt {problem.prompt!r} is {x!r}, not a "
                            f"finite number")
    return {name: [float(part[name]) if done else 0.0 for part, done in zip(parts, finished)]
            for name in parts[0]}
