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
# What a number may wear, and what is left of it. Patterns may backtrack: texts are short.
ASCII = {0xff01 + i: 0x21 + i for i in range(94)}       # fullwidth forms
ASCII |= str.maketrans({"\u2013": "-", "\u2212": "-", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"})
PLAIN = (
    (r"[^\S\n]|\\[, ;()[\]]|~(?=[\\a-z])|\\(?:text|math|bold|quad)[a-z]*|[✓✅]", " "),
    (r"°|\^\\circ|\\(?=[$%])", ""), (r"\{,\}", ","), (r"\.\.+", "…"),  # 1{,}080
    (r"\\d?frac(?:\{(-?\d+)\}|(\d))(?:\{(\d+)\}|(\d))", r" \1\2/\3\4"),
    (r"(?<!\w)([*`]+)(\S.*?)\1(?!\w)", r"\2"),  # **72**
    (r"([mts]\}?)(?:\^[23]|[²³])", r"\1"),  # cm^2
    (r"\\(?:times|cdot)|×|(?<=[\d)]) ?x ?(?=\d)", "*"),  # 3 x 4
    (r" ?(?:/|÷(?= ?\d)) ?", "/"), (r" ?\* ?10\^(\d)", r"e\1"),  # 2 * 10^3
    (r"(?<=\d) (?=\d{3})", ","),  # 12 500
    (r"~(?=[$\d])", " "),  # about 72; but ~~72~~ is struck out
    (r"(?i)(?:minus|negative)\s+(?=[$\d])", "-"))
# What precedes one of these is working: only what follows the last one counts.
MARK = re.compile(r"####|≈|\\(?:boxed|approx)|(?i:answer(?: is:?|:))")
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10 ** 3, "million": 10 ** 6, "billion": 10 ** 9}
CURRENCY = r"(?:(?:US|A)?[$£¥₠-₿]{1,2}|[A-Z]{3}|Rs\.) *"
# The text before a number, its sign and currency, the number, its scale, and the text after it.
# Only a space, a bracket, a quotation mark or a colon stands directly before it.
NUMBER = re.compile(
    r"""(.*?)(?<![^\s([{"'“:…])"""
    rf"(-? *(?:{CURRENCY})?|{CURRENCY}- *|\+)(?=\.?\d)"
    r"((?:\d+ +)?(?:and )?\d+/[1-9]\d*|"  # 2 1/2
    r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d{0,15})(?:\.\d{1,15})?(?:e\d{1,2})?)"
    rf"(?: ?([kKMB]|(?i:{'|'.join(SCALES)}))\b)?(.*)", re.ASCII | re.DOTALL)
# Letters and signs of words, km/h and 5-mile. What cannot be read might take a number back.
PROSE = re.compile(r"""(?:[a-zA-Zß-öø-ÿ\s.,:!'’"“”()[\]{}%$£¥¢₠-₿…]|/[a-z]|-[a-z]{2})*""")
# Words that take a number back or leave it open, wherever they are; and words that make it another
# number, if they are the last before it, or anywhere after it.
NOT = re.compile(r"(?i)\b(?:no|not|cannot|never|neither|wrong|incorrect|or|but|except|instead|"
                 r"almost|nearly)\b|n['’]t|!=")
OTHER = (r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]*illion|"
         r"(?:twen|thir|fou?r|fif|six|seven|eigh|nine)(?:teen|ty|th)|half|halve|third|quarter|"
         r"dozen|hundred|thousand|grand|lakh|crore|mil|mln|bn|twice|double|triple|plus|minus|"
         r"than|least|most)(?:d|s|ths)?")
BEFORE = re.compile(rf"(?i)\b(?:{OTHER}|over|under|above|below|up to|times|point|root|sqrt|log)"
                    r"(?: of)?\W*$|\w\($")
AFTER = re.compile(rf"(?i)\b(?:{OTHER}|negative|factorial|score|squared|cubed|and an?|[ap]m|pi|"
                   r"st|nd|rd|th|ish|teen|(?-i:[b-fi-kn-rt-zT]|MM)|"  # 3x, but 3 m
                   r"(?:is|was)(?! (?:the|correct)))\b|^!")
SCALES |= {"": 1, "k": 10 ** 3, "m": 10 ** 6, "b": 10 ** 9}
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
    r"""The value of a text that gives one number, in words, LaTeX or Markdown, with a currency and
    a unit, after its working and a mark such as \boxed, as a Fraction; or None. Of an equation it
    is the side that is a number, if each other one is words alone, or equal to it."""
    text = text.strip()
    if len(text) > LONGEST:
        return None
    text = text.translate(ASCII)
    for worn, plain in PLAIN:
        text = re.sub(worn, plain, text)
    *marked, last = MARK.split(text)
    if NOT.search(text) or re.search("[0-9]", "".join(marked[1:])):
        return None
    sides = last.split("=")
    said = [side for side in sides if number(side) is not None]
    same = (x == said[-1] or PROSE.fullmatch(x) or equal("0+" + arithmetic(x), arithmetic(said[-1]))
            for x in sides)
    return number(said[-1]) if said and all(same) else None

def number(text):
    """The value of a text with one number and words that do not change it, or None; a division
    without remainder, such as 144/2, is not yet a number."""
    match = NUMBER.fullmatch(text)
    if not match:
        return None
    before, sign, digits, scale, after = match.groups("")
    if BEFORE.search(before) or AFTER.search(after) or not PROSE.fullmatch(before + after):
        return None
    value = sum(map(Fraction, re.sub("and|,", "", digits).split()))
    if "/" in digits and value.denominator == 1:
        return None
    return value * SCALES[scale.lower()] * (-1 if "-" in sign else 1)

def arithmetic(text):
    """What is left of a text without its words."""
    text = text.replace("%", "/100").replace(" of ", "*")
    return re.sub(r"/ ?[^\W\d_]+|[^-+*/().0-9 ]", "", text)

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
