"""What the rule rewards share: a safe evaluator for arithmetic. Model text is never given to `eval`."""
import re
from fractions import Fraction

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
