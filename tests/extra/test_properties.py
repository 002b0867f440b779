"""Properties on random inputs: `hypothesis` looks for what breaks them, the same at each run."""
from fractions import Fraction

import pytest
import torch

pytest.importorskip("hypothesis")
pytestmark = pytest.mark.slow
from hypothesis import given, settings, strategies as some  # noqa: E402

from data.answers import evaluate, one_number  # noqa: E402
from run.passes import split_rows  # noqa: E402

settings.register_profile(
    "here", deadline=None, derandomize=True, max_examples=200, database=None)
settings.load_profile("here")


@given(some.text(alphabet="0123456789.+-*/() =x$,\n", max_size=60))
def test_any_text_is_a_fraction_or_none(text):
    value = evaluate(text)
    if value is not None:
        assert isinstance(value, Fraction)
        assert evaluate(f"-({text})") == -value and evaluate(f" {text} ") == value


@given(some.integers(-10 ** 12, 10 ** 12), some.integers(0, 4), some.booleans(), some.booleans(),
       some.sampled_from(["", "$", "\u20ac", "$ "]),
       some.sampled_from(["", "%", " dollars", " eggs a day", "."]))
def test_a_number_survives_its_writing(n, places, commas, boxed, currency, unit):
    digits = f"{abs(n):0{places + 1}d}"
    whole, decimals = digits[:len(digits) - places], digits[len(digits) - places:]
    whole = f"{int(whole):,}" if commas else whole
    text = "-" * (n < 0) + currency + whole + "." * bool(places) + decimals + unit
    text = rf"\boxed{{{text}}}" if boxed else f" {text}\n"
    assert one_number(text) == Fraction(n, 10 ** places)


@given(some.lists(some.integers(1, 300), min_size=1, max_size=40), some.integers(1, 2000))
def test_micro_batches_hold_each_row_once(lengths, budget):
    seen, ids = [], torch.zeros(len(lengths), 300, dtype=torch.int64)
    mask = torch.arange(1, 301) == torch.tensor(lengths)[:, None]
    for rows, longest in split_rows(ids, mask, budget):
        assert longest == max(lengths[i] for i in rows)
        assert len(rows) * longest <= budget or len(rows) == 1
        seen += rows.tolist()
    assert sorted(seen) == [*range(len(lengths))]
