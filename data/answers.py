"""What tasks in natural language share: answers in tags, numbers, equations in a text."""
import re
from fractions import Fraction

from reward import LONGEST, evaluate

NUMBER = re.compile(r"([-\u2212]?) *[$\u20ac\u00a3]? *([-\u2212]?)"
                    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{0,15})(?:\.[0-9]{1,15})?)"
                    r"(?:%| *[A-Za-z][A-Za-z ]*)?\.?")
SIGNS = str.maketrans({"x": "*", "\u00d7": "*", "\u2212": "-", "\u2013": "-", "$": None})


def tagged(text):
    """What stands between the last <answer> and </answer>, or None."""
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.S)
    return found[-1].strip() if found else None


def one_number(text):
    r"""The number that a text is, a Fraction, or None: with a sign, commas, decimals, a currency,
    a unit, a period at the end, in \boxed{}. A text that holds other numbers too is none."""
    text = text.strip().replace("{,}", ",")
    boxed = re.fullmatch(r"\$?\\boxed\{([^{}]*)\}\.?\$?", text)
    found = NUMBER.fullmatch(boxed[1].strip() if boxed else text)
    if not found or not found[3] or found[1] and found[2]:
        return None
    number = Fraction(found[3].replace(",", "").removesuffix("."))
    return -number if found[1] or found[2] else number


def steps(problem, completion):
    """The reasoning steps of free text, (end, truth): each line with an equation that can be
    checked, `expression = number`, true if all these are; and the last line, whatever it says. A
    number with decimals may be rounded."""
    text, found, end = completion, [], 0
    for line in text.rstrip().split("\n"):
        end += len(line) + 1
        sides = re.sub("(?<=[0-9]),(?=[0-9]{3})", "", line.translate(SIGNS)).split("=")
        truths = [equal(left[-LONGEST:], right[:LONGEST]) for left, right in zip(sides, sides[1:])]
        if checked := [x for x in truths if x is not None]:
            found.append((min(end, len(text)), all(checked)))
    if not found or found[-1][0] < len(text.rstrip()):
        found.append((len(text), True))
    return found[:-1] + [(len(text), found[-1][1])]


def equal(left, right):
    """Whether the expression that `left` ends with is the number that `right` begins with; None
    where this cannot be said."""
    left = re.search("[-0-9.()*/+ ]*$", left)[0].strip()
    right = re.match("[-0-9.()*/+ ]*", right)[0].rstrip(". ")
    a, b = evaluate(left) if re.search("[0-9)] *[-+*/]", left) else None, evaluate(right)
    if left.startswith("-") or a is None or b is None:
        return None
    decimals = len(right.partition(".")[2]) if re.fullmatch(r" *-?[0-9]*\.[0-9]+", right) else 0
    return abs(a - b) <= Fraction(1, 2 * 10 ** decimals) if decimals else a == b
