"""What tasks share: the safe evaluator, answers in tags, numbers, equations in a text.

Text that a model wrote never reaches Python's `eval`.
"""
import ast
import operator
import re
from fractions import Fraction

LONGEST = 200       # characters of an expression: bounds the time, the depth and the result
NUMERAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15}")    # ASCII digits alone
APART = re.compile(r"[0-9.] +[0-9.]|[0-9]{16}|\.[0-9]*\.")              # what is no one number
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.USub: operator.neg}
NUMBER = re.compile(r"([-\u2212]?) *[$\u20ac\u00a3]? *([-\u2212]?)"
                    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{0,15})(?:\.[0-9]{1,15})?)"
                    r"(?:%| *[A-Za-z][A-Za-z ]*)?\.?")
SIGNS = str.maketrans({"x": "*", "\u00d7": "*", "\u2212": "-", "\u2013": "-", "$": None})

# --------------------------------------------------------------------------------- the evaluator

def evaluate(text):
    """Exact value of an arithmetic expression as a Fraction, or None for anything else.

    Takes integers and decimals of up to 15 digits, + - * /, unary minus, parentheses and spaces, in
    at most 200 characters: no names, no powers, nothing that can run long.
    """
    if len(text) > LONGEST or APART.search(text):
        return None
    text, numbers = text.replace(" ", ""), []

    def index(found):
        """A numeral's place in `numbers`: Python would read 0.1 as a float, and refuse 007."""
        numbers.append(Fraction(found[0]))
        return str(len(numbers) - 1)
    indexed = NUMERAL.sub(index, text)
    if not re.fullmatch("[-+*/()0-9]+", indexed):
        return None
    try:
        return value_of(ast.parse(indexed, mode="eval").body, numbers)
    except (SyntaxError, ZeroDivisionError, KeyError):
        return None


def value_of(node, numbers):
    """The value of a node of the syntax tree, whose constants are indices into `numbers`; raises
    KeyError for a node that is no arithmetic."""
    if isinstance(node, ast.Constant):
        return numbers[node.value]
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](value_of(node.operand, numbers))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value_of(node.left, numbers), value_of(node.right, numbers))
    raise KeyError(type(node).__name__)

# -------------------------------------------------------------------------- answers in free text

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
