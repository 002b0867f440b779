"""What only a GPU can show: `python -m pytest tests/extra/test_gpu.py --gpu`. It takes minutes. The
other tests never use a GPU; test_device.py pretends one."""
import math

import pytest
import torch
from conftest import metrics, same
from safetensors.torch import load_file
from test_device import ILLEGAL, prepared, run

import grpo

needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and --gpu")
pytestmark = [pytest.mark.slow, needs]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("name, dtype, compiled", [
    ("grpo", "float32", False), ("ppo, critic of its own", "bfloat16", False),
    ("grpo", "bfloat16", True), ("ppo, critic of its own", "float32", True)])
def test_two_steps(top, tmp_path, name, dtype, compiled):
    """Sampler and trainer agree, and each step has a finite gradient."""
    agent = run(top, name, device="cuda", dtype=dtype, compile=compiled, steps=2,
                out=str(tmp_path / "run"))
    for p in agent.policy.parameters():
        assert p.device == DEVICE and p.dtype == torch.float32 and p.isfinite().all()
    for m in metrics(tmp_path / "run")[1:]:
        assert m["mismatch"] < (1e-4 if dtype == "float32" else 0.2)
        assert 0 < m["grad_norm"] < math.inf


def test_a_step_in_float32_is_that_of_the_cpu(top, tmp_path):
    """Up to rounding: each sampled token too."""
    for device in ("cpu", "cuda"):
        run(top, "grpo", device=device, dtype="float32", out=str(tmp_path / device))
    for a, b in zip(metrics(tmp_path / "cpu"), metrics(tmp_path / "cuda"), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_a_repeated_and_a_resumed_run_have_the_same_weights(top, tmp_path):
    """Bit for bit, after four steps."""
    for name, steps in (("whole", 4), ("again", 4), ("halves", 2)):
        run(top, "grpo", device="cuda", steps=steps, out=str(tmp_path / name))
    grpo.main(["--resume", "--task", str(top / "letters.py"), "--steps", "4",
               "--out", str(tmp_path / "halves")])
    one, *others = (load_file(tmp_path / name / "model.safetensors")
                    for name in ("whole", "again", "halves"))
    assert len(one) > 5 and all(same(one, two) for two in others)


@pytest.mark.parametrize("name", ILLEGAL.keys() - {"Adam's steps", "two GPUs"})
def test_what_pretending_refuses_cuda_does(name):
    """But for where it is stricter, as CUDA does not look."""
    there, here = torch.ones(4, 3, device=DEVICE), torch.ones(4, 3)
    with pytest.raises((RuntimeError, TypeError)):
        ILLEGAL[name](there, here, torch.tensor([0, 1]))
