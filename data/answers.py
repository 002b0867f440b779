"""What tasks share: a safe evaluator, answers in tags, numbers, equations in a text. Text from a
model never reaches Python's `eval`, and nothing here takes more than linear time.
"""
import operator
import re
from fractions import Fraction

LONGEST = 200       # maximum length of an expression or number: bounds time, depth, result
EQUATIONS = 200     # `steps` reads at most this many `=` signs of a text: bounds its time
NUMERAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15}")    # ASCII digits only
TOKEN = re.compile(NUMERAL.pattern + "|[-+*/()]")
OPERATORS = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul),
             "/": (2, Fraction)}                        # precedence and what it does
ARITHMETIC = "-0123456789.()*/+ "                       # the characters of expressions
# What an answer may wear, and what is left of it.
ASCII = {0xff01 + i: 0x21 + i for i in range(94)}       # fullwidth forms
ASCII |= str.maketrans({"\u2013": "-", "\u2212": "-"})
DRESS = (
    (r"\{,\}|(?<=\d)\\,(?=\d{3})", ","),  # 1{,}080
    (r"\\d?frac\{(-?\d+)\}\{(\d+)\}", r" \1/\2"), (r"\^\{?\\circ\}?", "°"),
    (r"\\(?:boxed|text|math|bold|quad)[a-z]*|\\[ ,;:!()[\]]|[{}\\~*`$£€¥₹]|\b(?:USD|EUR)\b", " "),
    (r"\s+", " "))
# A unit, which is no scale: 72 clips, 18 m^2, 5 dollars per hour; but 2 million is no 2.
SCALES = "[a-z]*illions?|dozens?|hundreds?|thousands?|grand|lakhs?|crores?|mil|mln|bn"
NOUN = rf"(?:square |cubic )?(?!(?:{SCALES})\b)(?:[a-z]{{2,}}|(?-i:[ghms]))(?:\^?[23]|[²³])?"
UNIT = rf"(?:[%¢]|°C?|[ -]?{NOUN})?(?:(?:/| per ){NOUN})?"
NUMBER = re.compile(    # what follows the last `=`: a fraction, 2 1/2, 1,080 or 3.50, then a unit
    r"(?:.*[^!<>]=)? ?(-? ?(?=\.?\d)(?:(?:\d+ )?\d{1,15}/[1-9]\d{0,14}|"
    rf"(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|\d{{0,15}})(?:\.\d{{1,15}})?)) ?{UNIT}[. ]*",
    re.I | re.ASCII)
# Equations of more than numerals: LaTeX, 10^2 - 5, 2x - 4, half of 20.
OPAQUE = re.compile(r"[\\^√%½¼¾]|\d(?:(?!x\d)[a-z]|:\d)|([a-wyz]|(?<!\d)x)[\d(]|\b(of|twice)\b")
SIGNS = str.maketrans({"x": "*", "×": "*", "\u2212": "-", "\u2013": "-", "$": None})

# ---------------------------------------------------------------- the evaluator

def evaluate(text):
    """Exact value of an arithmetic expression as a Fraction, or None for anything else: numbers of
    up to 15 digits, + - * /, unary minus, parentheses and spaces, in at most 200 characters."""
    if len(text) > LONGEST:
        return None
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text.replace(" ", ""):
        return None
    tokens = ["", *reversed(tokens)]  # a stack; "" marks the end
    try:
        value = take(tokens)
    except (ValueError, ZeroDivisionError):
        return None
    return Fraction(value) if tokens == [""] else None

def take(tokens, least=0):
    """The value of the expression that is taken off the stack, up to an operator whose precedence
    is at most `least`: an int, which is faster, or a Fraction."""
    token, sign = tokens.pop(), 1
    while token == "-":
        token, sign = tokens.pop(), -sign
    if token == "(":
        value = take(tokens)
        if tokens.pop() != ")":
            raise ValueError("unclosed parenthesis")
    else:
        value = int(token) if token.isdigit() else Fraction(token)  # ValueError if not a numeral
    value *= sign
    while tokens[-1] in OPERATORS and OPERATORS[tokens[-1]][0] > least:
        precedence, operate = OPERATORS[tokens.pop()]
        value = operate(value, take(tokens, precedence))
    return value

# --------------------------------------------------------- answers in free text

def tagged(text):
    """The text between the last <answer> and </answer>, stripped, or None."""
    _, mark, found = text.rpartition("</answer>")[0].rpartition("<answer>")
    return found.partition("</answer>")[0].strip() if mark else None

def boxed(text):
    r"""What the last \boxed{} of a text holds, or None."""
    _, mark, after = text.rpartition(r"\boxed")
    found = re.match(r"{((?:[^{}]|{(?:[^{}]|{[^{}]*})*})*)}", after)
    return found[1] if mark and found else None

def last_number(text):
    """The value of the last numeral in a text, whatever is around it, as a Fraction, or None."""
    found = re.findall("-?[0-9][0-9.,]*", text)
    return evaluate(found[-1].replace(",", "").rstrip(".")) if found else None

def one_number(text):
    r"""The value of a text that is one number, in LaTeX or Markdown, with a currency and a unit, or
    an equation's, behind its last sign; None for anything else. A division without remainder, such
    as 144/2, is not yet a number."""
    if len(text) > LONGEST:
        return None
    text = text.translate(ASCII)
    for worn, plain in DRESS:
        text = re.sub(worn, plain, text)
    found = NUMBER.fullmatch(text)
    if not found:
        return None
    digits = found[1].replace(",", "").replace("- ", "-")
    value = sum(map(Fraction, digits.split()))
    return None if "/" in digits and value.denominator == 1 else value

def steps(problem, completion):
    """The reasoning steps of free text as (end, truth), `end` in characters: each line with a
    checkable equation `expression = number`, true if all of its are, unless it repeats an earlier
    true one; and the last line in any case. Decimals may be rounded."""
    text, closed, end, seen = completion.rstrip(), [], 0, set()
    plain = re.sub("(?<=[0-9]),(?=[0-9]{3})", "", text.translate(SIGNS))
    plain = "=".join(plain.split("=")[:EQUATIONS + 1])
    for line, written in zip(plain.split("\n"), text.split("\n")):
        end += len(written) + 1
        if "=" not in line or OPAQUE.search(written):
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
    """Whether the expression that ends `left` equals the number that begins `right`, if known."""
    left = left[len(left.rstrip(ARITHMETIC)):].strip()
    right = right[:len(right) - len(right.lstrip(ARITHMETIC))].strip().rstrip(". ")
    if left.startswith("-") or not re.search("[0-9)] *[-+*/]", left):
        return None
    a, b = evaluate(left), evaluate(right)
    if a is None or b is None:
        return None
    decimals = len(right.partition(".")[2]) if re.fullmatch(r"-?[0-9]*\.[0-9]+", right) else 0
    return abs(a - b) <= Fraction(1, 2 * 10 ** decimals) if decimals else a == b
