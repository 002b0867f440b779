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
    """Words as they are, numbers up to what another machine rounds otherwise."""
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
            numbers, shown = ([*map(float, NUMBER.findall(x))] for x in (found, shown))
            assert numbers == pytest.approx(shown, abs=0.02)
    finally:
        vars(printed).update(before)
