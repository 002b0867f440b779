"""Properties on random inputs: `hypothesis` looks for what breaks them, the same at each run."""
import re
import statistics
import unicodedata
from fractions import Fraction

import pytest
import torch

pytest.importorskip("hypothesis")
pytestmark = pytest.mark.slow
from hypothesis import assume, given, settings, strategies as some  # noqa: E402

import data.arithmetic as arithmetic  # noqa: E402
from data.answers import evaluate, one_number, steps  # noqa: E402
from data.tokenizer import byte_encoding, composed, decode, step_tokens  # noqa: E402
from grpo import Config, group_scores  # noqa: E402
from run.caches import by_16  # noqa: E402
from run.passes import split_rows  # noqa: E402

settings.register_profile("here", deadline=None, derandomize=True, max_examples=200, database=None)
settings.load_profile("here")

# ---------------------------------------------------------------------------------- expressions

NUMERALS = some.one_of(some.integers(0, 999).map(str), some.integers(0, 10 ** 15 - 1).map(str),
                       some.decimals(0, 999, places=3).map(lambda x: f"{x:.3f}"))


def value_of(tree):
    """The value of a nested tuple, worked out beside its text; None where it divides by zero."""
    if isinstance(tree, str):
        return Fraction(tree)
    sign, *parts = tree
    values = [value_of(part) for part in parts]
    if None in values or sign == "/" and values[1] == 0:
        return None
    if len(values) == 1:
        return -values[0]
    a, b = values
    return a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b


def text_of(tree, spaces):
    """The text of a tree, in parentheses wherever they are allowed."""
    if isinstance(tree, str):
        return tree
    sign, *parts = tree
    texts = [text_of(part, spaces) for part in parts]
    return f"({sign}{texts[0]})" if len(texts) == 1 else f"({texts[0]}{spaces}{sign}{spaces}{texts[1]})"


TREES = some.recursive(NUMERALS, lambda x: some.tuples(some.sampled_from("+-*/"), x, x)
                       | some.tuples(some.just("-"), x), max_leaves=8)


@given(TREES, some.sampled_from(["", " ", "  "]))
def test_the_evaluator_agrees_with_fractions(tree, spaces):
    text = text_of(tree, spaces)
    assume(len(text) <= 200)
    assert evaluate(text) == value_of(tree)


@given(some.lists(some.tuples(some.sampled_from("+-*/"), some.integers(0, 99)), min_size=1, max_size=12))
def test_without_parentheses_products_bind_and_the_left_goes_first(terms):
    """Folded by hand: a sum of products, each from the left."""
    text = "7" + "".join(f"{sign}{n}" for sign, n in terms)
    total, product = Fraction(0), Fraction(7)
    for sign, n in terms:
        if sign == "/" and n == 0:
            assert evaluate(text) is None
            return
        if sign in "+-":
            total, product = total + product, Fraction(n if sign == "+" else -n)
        else:
            product = product * n if sign == "*" else product / n
    assert evaluate(text) == total + product


@given(some.text(alphabet="0123456789.+-*/() =x$,\n", max_size=60))
def test_any_text_is_a_fraction_or_none(text):
    value = evaluate(text)
    assert value is None or isinstance(value, Fraction)
    if value is not None:
        assert evaluate(f"-({text})") == -value and evaluate(f" {text} ") == value

# -------------------------------------------------------------------------------------- numbers

@given(some.integers(-10 ** 12, 10 ** 12), some.integers(0, 4), some.booleans(), some.sampled_from(["", "$", "\u20ac", "$ "]),
       some.sampled_from(["", "%", " dollars", " eggs a day", "."]), some.booleans())
def test_a_number_survives_its_writing(n, places, commas, currency, unit, boxed):
    number = Fraction(n, 10 ** places)
    digits = f"{abs(n):0{places + 1}d}"
    whole, decimals = digits[:len(digits) - places], digits[len(digits) - places:]
    text = (f"{int(whole):,}" if commas else whole) + ("." + decimals if places else "")
    text = ("-" if n < 0 else "") + currency + text + unit
    text = rf"\boxed{{{text}}}" if boxed else f" {text}\n"
    assert one_number(text) == number


@given(some.text(max_size=40))
def test_a_text_that_is_a_number_has_one_run_of_digits(text):
    """Or it is an equation, a fraction or 1 000, or comes after its working."""
    if one_number(text) is not None and not re.search(r"[=/\u2248\u2044#]|[0-9]\s[0-9]{3}", text):
        assert len(re.findall(r"[0-9\uff10-\uff19][0-9,{}\uff10-\uff19]*(?:\.[0-9]+)?|\.[0-9]+|[\u00bc-\u00be]", text)) == 1

# ---------------------------------------------------------------------------------------- steps

LINES = some.lists(some.one_of(
    some.tuples(some.integers(0, 20), some.sampled_from("+*"), some.integers(0, 20), some.integers(0, 60)).map(
        lambda x: f"{x[0]}{x[1]}{x[2]}={x[3]}"),
    some.sampled_from(["", " ", "so", "13=13", "13*10=130", "13*2=26", "130+26=156", "156", "1,000+1 = 1001", "\u4e8c=", "$5"]),
    some.text(alphabet="0123456789+*= \t\u00e9", max_size=12)), max_size=9).map("\n".join)


@given(LINES)
def test_steps_end_where_lines_do(text):
    """Each but the last with a newline, in order; of free text the last with the text."""
    working = arithmetic.steps(arithmetic.Problem("13*12=", "156"), text)
    for found in (steps(None, text), working):
        ends = [end for end, _ in found]
        assert ends == sorted(set(ends)) and all(text[end - 1] == "\n" for end in ends[:-1])
        assert all(0 < end <= len(text) for end in ends) or not text
        assert {type(truth) for _, truth in found} <= {bool}
    assert [end for end, _ in steps(None, text)[-1:]] == [len(text)] * bool(text)


@given(LINES)
def test_a_line_again_adds_no_true_step(text):
    problem = arithmetic.Problem("13*12=", "156")
    for line in text.split("\n")[1:]:
        once, twice = (sum(truth for _, truth in arithmetic.steps(problem, f"{text}\n" + f"{line}\n" * n)) for n in (1, 9))
        assert once == twice

# ------------------------------------------------------------------------------------ tokenizer

@given(some.text())
def test_texts_survive_the_bytes(text):
    encoding = byte_encoding()
    ids = encoding.encode_ordinary(text)
    assert decode(encoding, ids) == text and len(ids) == len(text.encode())
    if text:
        ends = list(range(1, len(text) + 1))
        assert step_tokens(encoding, ids, ends) == [len(text[:end].encode()) - 1 for end in ends]


@given(some.text(alphabet=some.characters(min_codepoint=0xC0, max_codepoint=0x36F)))
def test_nfc(text):
    assert composed(text) == unicodedata.normalize("NFC", text)

# -------------------------------------------------------------------------------------- batches

@given(some.lists(some.integers(1, 300), min_size=1, max_size=40), some.integers(1, 2000), some.integers(0, 99))
def test_micro_batches_hold_each_row_once(lengths, budget, seed):
    seen, ids = [], torch.randint(0, 2, (len(lengths), 5), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat((ids, torch.zeros(len(lengths), 295, dtype=torch.int64)), 1)
    mask = torch.arange(1, 301) == torch.tensor(lengths)[:, None]
    for rows, longest in split_rows(ids, mask, budget):
        sizes = [lengths[i] for i in rows]
        assert longest == max(sizes) and (len(rows) * longest <= budget or len(rows) == 1)
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


@given(some.integers(0, 10 ** 6))
def test_by_16(n):
    assert n <= by_16(n) < n + 16 and by_16(n) % 16 == 0

# --------------------------------------------------------------------------------------- groups

REWARDS = some.sampled_from([0.0, 0.1, 0.3, 1.0, 1.1, 2.0, -1.5, 100.0])


def scored(r, others, baseline, scale):
    """The scores of a group's rewards, by the statistics of Python's floats; `others` has for each
    of them the rewards of the other rows."""
    mean, std = statistics.fmean(r), statistics.pstdev(r)
    if len(set(r)) == 1:
        return [0.0 if baseline == "group" else None for _ in r]
    less = [{"group": mean, "none": 0, "leave-one-out": statistics.fmean(x)}[baseline] for x in others]
    return [(x - y) / (std if scale == "group" else 1) for x, y in zip(r, less)]


BASELINES, SCALES = some.sampled_from(["group", "leave-one-out", "none"]), some.sampled_from(["group", "none"])


@given(some.integers(2, 6).flatmap(lambda G: some.lists(some.lists(REWARDS, min_size=G, max_size=G), min_size=1, max_size=3)),
       BASELINES, SCALES)
def test_outcome_scores_are_those_of_python(groups, baseline, scale):
    reward = torch.tensor(groups).flatten()[:, None]
    cfg = Config(group=len(groups[0]), baseline=baseline, adv_scale=scale)
    score, dead = group_scores(reward, torch.ones_like(reward, dtype=torch.bool), cfg)
    assert dead.tolist() == [len(set(r)) == 1 for r in groups]
    for r, got in zip(groups, score.view(len(groups), -1).tolist()):
        others = [r[:i] + r[i + 1:] for i in range(len(r))]
        for x, want in zip(got, scored(r, others, baseline, scale)):
            assert want is None or x == pytest.approx(want, rel=1e-5, abs=1e-5)


@given(some.lists(some.lists(REWARDS, min_size=1, max_size=4), min_size=2, max_size=5), BASELINES, SCALES, some.randoms())
def test_process_scores_are_those_of_python(rows, baseline, scale, rng):
    """A group of rows with steps of their own number, at columns of their own."""
    reward, ends = torch.zeros(len(rows), 9), torch.zeros(len(rows), 9, dtype=torch.bool)
    places = [sorted(rng.sample(range(9), len(r))) for r in rows]
    for i, (r, at) in enumerate(zip(rows, places)):
        ends[i, at], reward[i, at] = True, torch.tensor(r)
    score, dead = group_scores(reward, ends, Config(group=len(rows), baseline=baseline, adv_scale=scale))
    flat = sum(rows, [])
    others = [sum(rows[:i] + rows[i + 1:], []) for i, r in enumerate(rows) for _ in r]
    assert dead.item() == (len(set(flat)) == 1) and (score[~ends] == 0).all()
    for x, want in zip(score[ends].tolist(), scored(flat, others, baseline, scale)):
        assert want is None or x == pytest.approx(want, rel=1e-5, abs=1e-5)
