"""experiments/smallest.py, GRPO on a whiteboard, gives the weights that grpo.py gives."""
import shutil
import sys

import pytest
from conftest import ROOT

import grpo
from data import arithmetic
from run import setup

sys.path.insert(0, str(ROOT / "experiments"))
import smallest  # noqa: E402


@pytest.mark.slow
def test_two_steps_give_the_weights_of_grpo(tmp_path, monkeypatch):
    """In float64: at first Adam moves each weight by its gradient's sign, which is rounding where
    it is almost 0. Some completions are cut off at 48 tokens, and some ratios are clipped."""
    def reward(*given, real=arithmetic.reward):
        return {name: x for name, x in real(*given).items() if name in ("correct", "working")}
    monkeypatch.setattr(arithmetic, "reward", reward)       # a fork's may have more
    start = shutil.copytree(ROOT / "data" / "warm_start", tmp_path / "start",
                            ignore=lambda *_: ["warm_start.json"])
    before = dict(smallest.load(start).named_parameters())
    policy = smallest.load(start).double()
    smallest.train(policy, arithmetic.problems()[0], steps=2, P=4, G=8, N=48, lr=3e-4)
    own = dict(policy.named_parameters())

    cfg = grpo.make_config(task="arithmetic", init=str(start), out=str(tmp_path / "run"),
                           dtype="float32", steps=2, prompts=4, group=8, max_new=48,
                           lr=3e-4, beta=0.04)
    cfg, task, encoding, policy, problems, _ = setup.begin(cfg, None, None)
    agent = grpo.new_agent(cfg, task, encoding, policy.double())
    agent.opt.param_groups[0]["eps"] = 1e-8
    stats = [grpo.train_step(agent, problems, step)[1] for step in (1, 2)]
    assert all(x["dead_groups"] < 1 and x["finished"] < 1 for x in stats)
    assert stats[1]["clip_share"] > 0
    theirs = dict(policy.named_parameters())
    assert own.keys() == theirs.keys()
    for name, p in own.items():
        assert (p - theirs[name]).abs().max() < 1e-6 < 1e-4 < (p - before[name]).abs().max(), name
