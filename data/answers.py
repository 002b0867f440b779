"""What tasks share: a safe evaluator, answers in tags, numbers, equations in a text.

Text from a model never reaches Python's `eval`, and nothing here takes more than linear time.
"""
import re
from fractions import Fraction

LONGEST = 200       # maximum length of an expression or number: bounds time, depth, result
EQUATIONS = 200     # `steps` reads at most this many `=` signs of a text: bounds its time
NUMERAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15}")    # ASCII digits only
APART = re.compile(r"[0-9.] +[0-9.]|[0-9]{16}|\.[0-9]*\.")              # not a single number
TOKEN = re.compile(NUMERAL.pattern + "|[-+*/()]")
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}              # precedence
ARITHMETIC = "-0123456789.()*/+ "                       # the characters of expressions
# Possessive (`*+`): with backtracking, two optional runs of spaces would take cubic time. A group
# must not be possessive: Python before 3.11.5 matches it wrongly.
NUMBER = re.compile(r"([-\u2212]?) *+[$\u20ac\u00a3]? *+([-\u2212]?)(?=\.?[0-9])"
                    r"((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]{0,15}+)(?:\.[0-9]{1,15}+)?)"
                    r"(?:%| *+([A-Za-z][A-Za-z ]*+))?\.?")
# Words after a number that are not a unit but change its value: `5 million`, `5k`, `5 minus one`.
NO_UNIT = re.compile(r"\b(?:[kKMB]|(?i:bn|mn|(?:m|b|tr|quadr)illions?|thousands?|hundreds?|"
                     r"dozens?|half|halves|thirds|fourths|fifths|sixths|eighths|tenths|hundredths|"
                     r"pi|minus|plus|divided|multiplied|squared|cubed|doubled|tripled|halved|twice|"
                     r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|"
                     r"forty|(?:thir|four|fif|six|seven|eigh|nine)(?:teen|ty)|and an?))\b")
SIGNS = str.maketrans({"x": "*", "\u00d7": "*", "\u2212": "-", "\u2013": "-", "$": None})

# --------------------------------------------------------------------------------- the evaluator

def evaluate(text):
    """Exact value of an arithmetic expression as a Fraction, or None for anything else.

    Accepts integers and decimals of up to 15 digits, + - * /, unary minus, parentheses and spaces,
    in at most 200 characters: no names, no powers, nothing that can take long.
    """
    if len(text) > LONGEST or APART.search(text):
        return None
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        return None
    tokens = ["", *reversed(tokens)]                    # a stack; "" marks the end
    try:
        n, d = take(tokens)
    except (ValueError, ZeroDivisionError):
        return None
    return Fraction(n, d) if tokens == [""] else None


def take(tokens, least=0):
    """Parse an expression off the stack, up to an operator whose precedence is at most `least`.
    Returns numerator and denominator, unreduced: Fractions reduce at each step, which is slow."""
    token, minus = tokens.pop(), 1
    while token == "-":
        token, minus = tokens.pop(), -minus
    if token == "(":
        n, d = take(tokens)
        if tokens.pop() != ")":
            raise ValueError("unclosed parenthesis")
    else:
        whole, _, decimals = token.partition(".")
        n, d = int(whole + decimals), 10 ** len(decimals)       # ValueError if not a numeral
    n = minus * n
    while BINDING.get(tokens[-1], 0) > least:
        sign = tokens.pop()
        m, e = take(tokens, BINDING[sign])
        if sign == "/" and m == 0:
            raise ZeroDivisionError
        if sign == "/":
            m, e = e, m
        elif sign == "-":
            m = -m
        n, d = n * m if sign in "*/" else n * e + m * d, d * e
    return n, d

# -------------------------------------------------------------------------- answers in free text

def tagged(text):
    """The text between the last <answer> and </answer>, stripped, or None."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start:text.find("</answer>", start)].strip()


def one_number(text):
    r"""The value of a text that is one number, as a Fraction, or None. It may have a sign, commas,
    decimals, a currency, a unit and a final period, and be in \boxed{}."""
    text = text.strip().replace("{,}", ",")
    boxed = re.fullmatch(r"\$?\\boxed\{([^{}]*)\}\.?\$?", text)
    match = NUMBER.fullmatch(boxed[1].strip() if boxed else text)
    if not match or len(text) > LONGEST or match[1] and match[2] or NO_UNIT.search(match[4] or ""):
        return None
    number = Fraction(match[3].replace(",", ""))
    return -number if match[1] or match[2] else number


def steps(problem, completion):
    """The reasoning steps of free text as (end, truth), `end` in characters: each line with a
    checkable equation `expression = number`, true if all its equations are; and the last line in
    any case; none if there is no text. Decimals may be rounded. A true line that repeats an earlier
    one is not a step."""
    text, closed, end, seen = completion.rstrip(), [], 0, set()
    plain = re.sub("(?<=[0-9]),(?=[0-9]{3})", "", text.translate(SIGNS))
    plain = "=".join(plain.split("=")[:EQUATIONS + 1])
    for line, written in zip(plain.split("\n"), text.split("\n")):
        end += len(written) + 1
        if "=" not in line:
            continue
        sides, words = line.split("="), line.replace(" ", "")
        truths = {equal(left, right) for left, right in zip(sides, sides[1:])} - {None}
        if truths and (False in truths or words not in seen):
            closed.append((end, False not in truths))
            seen.add(words)
    if not closed or closed[-1][0] < len(text):
        closed.append((end, True))
    return closed[:-1] + [(len(completion), closed[-1][1])] if completion else []


def equal(left, right):
    """Whether the expression at the end of `left` equals the number at the start of `right`; None
    if that cannot be checked."""
    left = left[len(left.rstrip(ARITHMETIC)):].strip()
    right = right[:len(right) - len(right.lstrip(ARITHMETIC))].strip().rstrip(". ")
    if left.startswith("-") or not re.search("[0-9)] *[-+*/]", left):
        return None
    a, b = evaluate(left), evaluate(right)
    if a is None or b is None:
        return None
    decimals = len(right.partition(".")[2]) if re.fullmatch(r"-?[0-9]*\.[0-9]+", right) else 0
    return abs(a - b) <= Fraction(1, 2 * 10 ** decimals) if decimals else a == b
