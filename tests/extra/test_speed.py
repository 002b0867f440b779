"""The copy to sample from, and that the script for a GPU works the first time there is one."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model

import grpo
from data import arithmetic
from data.tokenizer import byte_encoding
from run import checkpoint, pretrained


def test_the_copy_to_sample_from_is_the_policy_of_now(tmp_path, monkeypatch):
    """After an update, and after a resume, it has the weights of the policy, rounded."""
    model, start = tiny_model(), tmp_path / "start"
    first = dict(model.named_parameters())
    pretrained.config_json(model)["eos_token_id"] = [*range(0, 257, 3)]
    pretrained.save(model, start, byte_encoding().files)
    cfg = grpo.make_config(task="arithmetic", difficulty=1, init=str(start), device="cpu",
                           dtype="bfloat16", prompts=2, group=8, max_new=6, held_out=2, samples=1,
                           lr=0.01, steps=2, out=str(tmp_path / "run"))
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {"correct": len(text) > 2})
    agent, saved = grpo.train(cfg), checkpoint.load(tmp_path / "run", grpo.Config)[1]
    again = grpo.new_agent(cfg, None, None, pretrained.to_device(tiny_model(), cfg), saved)
    for made in (agent, again):
        copied = dict(made.sampler.named_parameters())
        for name, p in made.policy.named_parameters():
            assert torch.equal(copied[name], p.to(copied[name].dtype))
            assert not torch.equal(p, first[name])


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
