"""docs/one-step.md prints what it shows."""
import contextlib
import io
import re

import pytest
import torch
from conftest import ROOT

PAGE = (ROOT / "docs" / "one-step.md").read_text()
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def test_each_block_prints_what_stands_below_it():
    """Words as they are, numbers up to what another machine rounds otherwise; and the page is of this order."""
    blocks, shared = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.S), {}
    assert len(blocks) == PAGE.count("```python") == 7
    printed = torch._tensor_str.PRINT_OPTS
    before = vars(printed).copy()
    try:
        for code, shown in blocks:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(code, shared)
            found = said.getvalue()
            assert NUMBER.sub("#", found) == NUMBER.sub("#", shown)
            assert [*map(float, NUMBER.findall(found))] == pytest.approx([*map(float, NUMBER.findall(shown))], abs=0.02)
    finally:
        vars(printed).update(before)
    assert shared["batch"].finished.sum() == 3 and 0 < shared["is_clipped"].sum() < shared["batch"].mask.sum()
    assert all(c * x > 0 for c, x in zip(shared["change"], shared["adv"].sum(1)))       # as the page says of the update
