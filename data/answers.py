"""What tasks share: a safe evaluator, answers in tags, numbers, equations in a text.

Text from a model never reaches Python's `eval`, and nothing here takes more than linear time.
"""
import re
import unicodedata
from fractions import Fraction

LONGEST = 200       # maximum length of an expression or number: bounds time, depth, result
EQUATIONS = 200     # `steps` reads at most this many `=` signs of a text: bounds its time
NUMERAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15}")    # ASCII digits only
TOKEN = re.compile(NUMERAL.pattern + "|[-+*/()]")
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}              # precedence
ARITHMETIC = "-0123456789.()*/+ "                       # the characters of expressions
# What a number may wear, and what is left without it. Patterns may backtrack: no text beyond
# LONGEST is read.
ASCII = {0xff01 + i: 0x21 + i for i in range(94)}       # fullwidth forms
ASCII |= str.maketrans({"\u2013": "-", "\u2212": "-", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"})
PLAIN = [(re.compile(worn), plain) for worn, plain in (
    (r"[^\S\n]|\\[,;:! ()[\]]|\\q?quad\b|~(?=\\)", " "),  # all kinds of spaces, \( and \[
    (r"\\(?:text|math)[a-z]*|\\(?:left|right|mbox|underline)\b", " "), (r"\\([$%])", r"\1"),
    (r"\\(?:boxed|fbox)\b", "####"), (r"\\approx\b", "≈"), (r"\{,\}", ","),  # 1{,}080
    (r"\\[dt]?frac *(?:\{([0-9]+)\}|([0-9])) *(?:\{([0-9]+)\}|([0-9]))", r" \1\2/\3\4"),
    (r"(?<!\w)([*_`]{1,3})(?=\S)([^*_`]+)(?<=\S)\1(?!\w)", r"\2"),           # **72**
    (r"[✓✔✅]", " "), (r"\^\{?\\circ\}?|°", ""),
    (r"([mtds] ?\}?)(?:\^\{?[23]\}?|[²³])(?!\w)", r"\1"),                    # cm^2
    (r"\\(?:times|cdot)\b|×|(?<=[0-9)]) ?x ?(?=[0-9])", "*"),                # 3 x 4
    (r"(?<=[0-9]) ?[/÷] ?(?=[0-9])", "/"),
    (r"(?<=[0-9]) ?\* ?10\^\{?(-?[0-9]{1,2})\}?", r"e\1"),                   # 2 * 10^3
    (r"(?<=[0-9]) (?=[0-9]{3}(?![0-9/]))", ","),                             # 12 500
    (r"(?<![~0-9])~ ?(?=\S)", " "),  # about 72; but ~~72~~ is struck out
    (r"(?i)\b(?:minus|negative)\s+(?=\$?[0-9])", "-"), (r"\.\.+", "…"))]
# What precedes one of these is working: only what follows the last one counts.
MARK = re.compile(r"####|≈|(?i:\banswer(?: is:?|:))")
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10 ** 3, "grand": 10 ** 3, "lakh": 10 ** 5,
          "million": 10 ** 6, "crore": 10 ** 7, "bn": 10 ** 9, "billion": 10 ** 9}
WORDED = (r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|forty|"
          r"(?:thir|four|fif|six|seven|eigh|nine)(?:teen|ty)|[a-z]*illion|"
          rf"{'|'.join(SCALES)})(?:s|ths)?")
CURRENCY = r"(?:(?:[A-Z]{2}|[ACRS])?[$£¥₠-₿]{1,3}|[A-Z]{3}|Rs\.?)"
# One number, with its sign, currency and scale, between two texts without a digit.
NUMBER = re.compile(
    r"([^0-9]*?)(?<![A-Za-z_.$£¥₠-₿+*/^-])"
    rf"((?:-|\+(?! ))? *(?:{CURRENCY} *-?)?) *(?=\.?[0-9])"
    r"((?:[0-9]{1,15} +)?(?:and )?[0-9]{1,15}/[1-9][0-9]{0,14}|"  # 2 1/2
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]{0,15})(?:\.[0-9]{1,15})?(?:[eE]-?[0-9]{1,2})?)"
    rf"(?:[ -]?([kKMB]|(?i:{'|'.join(SCALES)}))\b)?([^0-9]*)")
SCALES |= {"": 1, "k": 10 ** 3, "m": 10 ** 6, "b": 10 ** 9}
# Words that take a number back or leave it open, wherever they are; and words that make it another
# number, if they are the last before it, or anywhere after it.
NOT = re.compile(r"(?i)\b(?:no|not|never|none|neither|cannot|wrong\w*|incorrect\w*|false|error|"
                 r"mistak\w*|doubt|or|instead|except|but|unless|almost|nearly|nicht|не)\b|"
                 r"n['’]t\b|[!<>]=|[不错錯]")
BEFORE = re.compile(rf"(?i)\b(?:{WORDED}|than|over|under|above|below|least|most|(?<!adds )up to|"
                    r"plus|times|divided by|point|half|third|quarter|double|twice|triple|square|"
                    r"root|sqrt|log|ln|sin|cos|tan|exp|max(?:imum)?|min(?:imum)?)"
                    r"(?: of)?\W*$|\w\($")
AFTER = re.compile(rf"(?i)\b(?:{WORDED}|minus|plus|multiplied|divided|squared|cubed|doubled|"
                   r"tripled|halved|factorial|twice|itself|half|halves|thirds|quarters|fifths|"
                   r"eighths|"
                   r"and an?|(?:more|less|fewer) than|negative|score|[ap]m|i|"
                   r"at least|at most|pi|π|[kxyzn]|st|nd|rd|th|ish|mil|mille|mio|mln|"
                   r"(?:is|was|would|must|seems)(?! (?:the|my|correct|right)))\b|"
                   r"^!|[万萬億亿百만억천]|千(?![克米])|тыс|лион|लाख")
SIGNS = str.maketrans({"x": "*", "\u00d7": "*", "\u2212": "-", "\u2013": "-", "$": None})

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
        n, d = take(tokens)
    except (ValueError, ZeroDivisionError):
        return None
    return Fraction(n, d) if tokens == [""] else None

def take(tokens, least=0):
    """Parses an expression off the stack, up to an operator whose precedence is at most `least`.
    Returns numerator and denominator: Fractions would reduce at each step, which is slow."""
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

# --------------------------------------------------------- answers in free text

def tagged(text):
    """The text between the last <answer> and </answer>, stripped, or None."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start:text.find("</answer>", start)].strip()

def one_number(text):
    r"""The value of a text that gives one number, in words, LaTeX or Markdown, with a currency and
    a unit, after its working and a mark such as \boxed, as a Fraction; or None. Of an equation it
    is the side that is a number, if each other one is words alone, or equal to it."""
    text = text.strip()
    if len(text) > LONGEST:
        return None
    text = text.translate(ASCII)
    for worn, plain in PLAIN:
        text = worn.sub(plain, text)
    *marked, last = MARK.split(text)
    if NOT.search(text) or re.search("[0-9]", "".join(marked[1:])):
        return None
    sides = last.split("=")
    said = [side for side in sides if number(side) is not None]
    same = (x == said[-1] or prose(x) or equal("0+" + arithmetic(x), arithmetic(said[-1]))
            for x in sides)
    return number(said[-1]) if said and all(same) else None

def number(text):
    """The value of a text with one number and words that do not change it, or None; a division
    without remainder, such as 144/2, is not yet a number."""
    match = NUMBER.fullmatch(text)
    if not match:
        return None
    before, sign, digits, scale, after = match.groups("")
    if BEFORE.search(before) or AFTER.search(after) or not prose(before + after):
        return None
    value = sum(map(Fraction, re.sub("and|,", "", digits).split()))
    if "/" in digits and value.denominator == 1 or len(re.findall("[-+]", sign)) > 1:
        return None
    return value * SCALES[scale.lower()] * (-1 if "-" in sign else 1)

def prose(text):
    """Whether a text has no digit, operator or symbol, but for currencies and as in km/h."""
    kinds = {unicodedata.category(c) for c in text if c != "\n"}
    plain = all(kind[0] in "LMZP" or kind in ("Sc", "Cf") for kind in kinds)
    return plain and not re.search(r"[*\\]|/(?! ?[^\W\d_])|-(?![^\W\d_])|-[a-z]\b", text)

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
