"""What this repository promises of itself: files that can be read in an evening."""
import pytest
from conftest import ROOT


@pytest.mark.parametrize("name, most", [("grpo.py", 690), ("model.py", 305), ("reward.py", 290), ("README.md", 130)])
def test_files_stay_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most
