"""The copy to sample from, and the scripts that compare speeds."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model

import grpo
from data import arithmetic
from data.tokenizer import byte_encoding
from grpo import Agent, new_agent
from run import checkpoint, pretrained
from run.pretrained import to_device

@pytest.fixture
def experiments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)


def folder_of(model, where, stop=256):
    pretrained.config_json(model)["eos_token_id"] = stop
    pretrained.save(model, where, byte_encoding().files)
    return where


def test_the_copy_to_sample_from_is_the_policy_of_now(tmp_path, monkeypatch):
    """After an update, and after a resume, it has the weights of the policy, rounded."""
    start, out = folder_of(tiny_model(), tmp_path / "start", [*range(0, 257, 3)]), tmp_path / "run"
    cfg = grpo.make_config(task="arithmetic", difficulty=1, init=str(start), warm_steps=0, device="cpu", dtype="bfloat16",
                           prompts=2, group=8, max_new=6, held_out=2, samples=1, lr=0.01, steps=2, out=str(out))
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {"correct": float(len(text) > 2)})
    first, agent = dict(tiny_model().named_parameters()), grpo.train(cfg)
    again = new_agent(cfg, None, None, to_device(tiny_model(), cfg), checkpoint.load(out, grpo.Config)[1])
    for made in (agent, again):
        copied = dict(made.sampler.named_parameters())
        for name, p in made.policy.named_parameters():
            assert torch.equal(copied[name], p.to(copied[name].dtype)) and not torch.equal(p, first[name])


def test_the_floor_counts_what_must_be_done(experiments, monkeypatch, tmp_path):
    """Two prompts of 2 and 1 tokens, two rows each, in two ways: one by one, and by hand."""
    from experiments.cost import speed
    monkeypatch.setattr(speed, "matrix_rate", lambda *_: 1e6)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1e30)
    ids = torch.tensor([[1, 2, 5, 6, 0], [1, 2, 5, 7, 8], [3, 4, 0, 0, 0], [3, 9, 9, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]).bool()
    agent = Agent(grpo.Config(device="cpu", dtype="float32", micro_tokens=1000), None, None, tiny_model())
    batch = grpo.Batch(ids, mask, None, None, None, adv=mask.float())
    linear = sum(m.weight.numel() for m in agent.policy.layers.modules() if isinstance(m, torch.nn.Linear))
    head = agent.policy.embed_tokens.weight.numel()
    read = {(1,), (1, 2), (1, 2, 5), (1, 2, 5, 7), (3,), (3, 9)}        # the beginnings after which one is sampled, or less
    sampled = {(1, 2), (1, 2, 5), (1, 2, 5, 7), (3,), (3, 9)}
    found = speed.floors(agent, batch)
    operations = 2 * (linear * len(read) + head * len(sampled))
    assert found["least rollout"] == pytest.approx(operations / 1e6) and found["least update"] == pytest.approx(3 * operations / 1e6)
    agent.ref = agent.policy
    assert speed.floors(agent, batch)["least rollout"] == pytest.approx(2 * operations / 1e6)
    agent.ref, batch.adv = None, batch.adv * torch.tensor([1.0, 1, 0, 0])[:, None]      # a group that is dead
    assert speed.floors(agent, batch)["least update"] == pytest.approx(6 * (4 * linear + 3 * head) / 1e6)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1.0)                             # decoding waits for memory
    c = agent.policy.cfg
    slots = 2 * c.n_layer * c.n_kv_head * c.head_size * sum(len(x) - 1 for x in sampled)
    assert speed.floors(agent, batch)["least rollout"] == pytest.approx(4 * (3 * (linear + head) + slots))


def test_speeds_are_medians_and_a_table(experiments, monkeypatch, tmp_path, capsys):
    """Of this code alone: TRL is no part of the suite."""
    from experiments.cost import speed
    start = folder_of(tiny_model(), tmp_path / "start")
    monkeypatch.setitem(speed.SIZES, "tiny", dict(
        task="arithmetic", difficulty=1, init=str(start), prompts=2, group=2, max_new=6))
    monkeypatch.setattr(speed, "matrix_rate", lambda *_: 1e9)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(speed.subprocess, "check_output", lambda *_, **__: f"{2 ** 30}\n")
    monkeypatch.setitem(speed.SAME, "device", "cpu")
    found = speed.study("tiny", ["ours", "ours bfloat16"], 3)
    for x in found.values():
        assert x["seconds"] > x["floors"]["rollout"] + x["floors"]["update"] > 0 and x["peak"] == 2 ** 30
    first, second = speed.rows({"sizes": {"tiny": found}})
    assert first.startswith("| tiny, ours | ") and second.endswith(" 1.00 |")


@pytest.mark.slow
def test_all_that_is_asked_of_a_gpu_goes_through(tmp_path):
    """Tiny, on the CPU: so that it works the first time where there is a GPU."""
    command = [sys.executable, *"experiments/cost/gpu.py decode update --device cpu --tiny --out".split()]
    subprocess.run([*command, tmp_path / "gpu.json"], cwd=ROOT, check=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert "error" not in json.dumps(found) and {"date", "commit"} <= found["about"].keys()
    for tokens in (40, 60):
        check = found[f"graph and plain cache, {tokens} tokens"]
        assert check["rows that differ"] == 0 and check["max dlogp"] < 1e-5
    for way in ("8 rows, static", "8 rows, shared", "8 rows, plain", "4 rows, static"):
        assert found[f"0.5B, {way}"]["ms"] > 0
    assert found["0.5B, 8 rows, static"]["drawing us"] > 0
    assert 0 < found["micro_tokens 256, 1024 logits"]["share"] < 1
