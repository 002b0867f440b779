"""The script for a GPU works the first time there is one."""
import json
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_all_that_is_asked_of_a_gpu_goes_through(tmp_path):
    """Tiny, on the CPU."""
    command = "experiments/cost/gpu.py decode update --device cpu --tiny --out".split()
    subprocess.run([sys.executable, *command, tmp_path / "gpu.json"], cwd=ROOT, check=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert "error" not in json.dumps(found)
    for tokens in (40, 60):
        check = found[f"graph and plain cache, {tokens} tokens"]
        assert check["rows that differ"] == 0 and check["max dlogp"] < 1e-5
    assert found["0.5B, 8 rows, static"]["ms"] > 0
    assert 0 < found["micro_tokens 256, 1024 logits"]["share"] < 1
