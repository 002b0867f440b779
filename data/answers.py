"""What tasks share: the safe evaluator, answers in tags, numbers, equations in a text, votes.

Text that a model wrote never reaches Python's `eval`, and nothing here takes more than linear time.
"""
import math
import re
from collections import Counter
from fractions import Fraction

LONGEST = 200       # characters of an expression: bounds the time, the depth and the result
EQUATIONS = 200     # signs `=` of a text that are looked at: bounds the time of its steps
NUMERAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15}")    # ASCII digits alone
APART = re.compile(r"[0-9.] +[0-9.]|[0-9]{16}|\.[0-9]*\.")              # what is no one number
TOKEN = re.compile(NUMERAL.pattern + "|[-+*/()]")
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}              # how tightly
ARITHMETIC = "-0123456789.()*/+ "                       # what expressions are made of
# Possessive (`*+`): two optional runs of spaces that try every split would take cubic time.
NUMBER = re.compile(r"([-\u2212]?) *+[$\u20ac\u00a3]? *+([-\u2212]?)(?=\.?[0-9])"
                    r"((?:[1-9][0-9]{0,2}(?:,[0-9]{3})++|[0-9]{0,15}+)(?:\.[0-9]{1,15}+)?+)"
                    r"(?:%| *+([A-Za-z][A-Za-z ]*+))?+\.?")
# In a unit's place, words that make another number of it: `5 million`, `5k`, `5 minus one`.
NO_UNIT = re.compile(r"\b(?:[kKMB]|(?i:bn|mn|(?:m|b|tr|quadr)illions?|thousands?|hundreds?|"
                     r"dozens?|half|halves|thirds|fourths|fifths|sixths|eighths|tenths|hundredths|"
                     r"pi|minus|plus|divided|multiplied|squared|cubed|doubled|tripled|halved|twice|"
                     r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|"
                     r"forty|(?:thir|four|fif|six|seven|eigh|nine)(?:teen|ty)|and an?))\b")
SIGNS = str.maketrans({"x": "*", "\u00d7": "*", "\u2212": "-", "\u2013": "-", "$": None})

# --------------------------------------------------------------------------------- the evaluator

def evaluate(text):
    """Exact value of an arithmetic expression as a Fraction, or None for anything else.

    Takes integers and decimals of up to 15 digits, + - * /, unary minus, parentheses and spaces, in
    at most 200 characters: no names, no powers, nothing that can run long.
    """
    if len(text) > LONGEST or APART.search(text):
        return None
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        return None
    tokens = ["", *reversed(tokens)]                    # the next is the last, "" is the end
    try:
        n, d = take(tokens)
    except (ValueError, ZeroDivisionError):
        return None
    return Fraction(n, d) if tokens == [""] else None


def take(tokens, least=0):
    """Take an expression off the tokens, up to an operator that binds no tighter than `least`:
    numerator and denominator, as they come (Fractions are reduced at each step, and slow)."""
    token, minus = tokens.pop(), 1
    while token == "-":
        token, minus = tokens.pop(), -minus
    if token == "(":
        n, d = take(tokens)
        if tokens.pop() != ")":
            raise ValueError("an open parenthesis")
    else:
        whole, _, decimals = token.partition(".")
        n, d = int(whole + decimals), 10 ** len(decimals)       # ValueError if it is no numeral
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
    """What stands between the last <answer> and </answer>, or None."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start:text.find("</answer>", start)].strip()


def one_number(text):
    r"""The number that a text is, a Fraction, or None: with a sign, commas, decimals, a currency,
    a unit, a period at the end, in \boxed{}. A text that holds other numbers too is none."""
    text = text.strip().replace("{,}", ",")
    boxed = re.fullmatch(r"\$?\\boxed\{([^{}]*)\}\.?\$?", text)
    found = NUMBER.fullmatch(boxed[1].strip() if boxed else text)
    if not found or len(text) > LONGEST or found[1] and found[2] or NO_UNIT.search(found[4] or ""):
        return None
    number = Fraction(found[3].replace(",", ""))
    return -number if found[1] or found[2] else number


def steps(problem, completion):
    """The reasoning steps of free text, (end, truth): each line with an equation that can be
    checked, `expression = number`, true if all these are; and the last line, whatever it says. A
    number with decimals may be rounded. A true line that was there before is no step."""
    text, found, end, said = completion.rstrip(), [], 0, set()
    plain = re.sub("(?<=[0-9]),(?=[0-9]{3})", "", text.translate(SIGNS))
    plain = "=".join(plain.split("=")[:EQUATIONS + 1])
    for line, written in zip(plain.split("\n"), text.split("\n")):
        end += len(written) + 1
        if "=" not in line:
            continue
        sides, words = line.split("="), line.replace(" ", "")
        truths = {equal(left, right) for left, right in zip(sides, sides[1:])} - {None}
        if truths and (False in truths or words not in said):
            found.append((end, False not in truths))
            said.add(words)
    if not found or found[-1][0] < len(text):
        found.append((end, True))
    return found[:-1] + [(len(completion), found[-1][1])]


def equal(left, right):
    """Whether the expression that `left` ends with is the number that `right` begins with; None
    where this cannot be said."""
    left = left[len(left.rstrip(ARITHMETIC)):].strip()
    right = right[:len(right) - len(right.lstrip(ARITHMETIC))].strip().rstrip(". ")
    if left.startswith("-") or not re.search("[0-9)] *[-+*/]", left):
        return None
    a, b = evaluate(left), evaluate(right)
    if a is None or b is None:
        return None
    decimals = len(right.partition(".")[2]) if re.fullmatch(r"-?[0-9]*\.[0-9]+", right) else 0
    return abs(a - b) <= Fraction(1, 2 * 10 ** decimals) if decimals else a == b

# -------------------------------------------------------------------- several answers to a problem

def shares(right, answers):
    """pass@k and maj@k by name, for k = 1, 2, 4, ... up to all samples of a problem: which of them
    are `right`, and their `answers`. maj@1 would be pass@1."""
    n = len(right)
    ks = [1 << i for i in range(n.bit_length()) if 1 << i < n] + [n]
    return {f"pass@{k}": pass_at(k, right) for k in ks} | {
        f"maj@{k}": majority_at(k, right, answers) for k in ks if k > 1}


def pass_at(k, right):
    """The expected best of k of these samples, drawn without return (unbiased: 2107.03374)."""
    best = sum(math.comb(i, k - 1) * x for i, x in enumerate(sorted(right)))
    return best / math.comb(len(right), k)


def majority_at(k, right, answers):
    """The share of sets of k samples, side by side, whose most frequent answer is right; of several
    as frequent the first counts, and "" is no vote."""
    sets, solved = range(0, len(right) - k + 1, k), 0.0
    for i in sets:
        own = answers[i:i + k]
        votes = Counter(answer for answer in own if answer).most_common(1)
        solved += right[i + own.index(votes[0][0])] if votes else 0.0
    return solved / len(sets)
