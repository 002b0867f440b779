"""Which warm start a run takes: the one kept in its folder, the shipped one, or a new one; and what it says."""
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model

from data.tokenizer import byte_encoding
from grpo import Config
from model import GPT
from run import pretrained, setup

CFG = Config(task="toy", max_new=8, warm_steps=3, n_embd=16, device="cpu", dtype="float32")
PROBLEMS = [SimpleNamespace(prompt=f"{i}=") for i in range(80)]
TOY = SimpleNamespace(demonstration=lambda p, rng: "abc")


@pytest.fixture(params=["kept", "shipped"])
def begin(request, tmp_path, monkeypatch, capsys):
    """The model that a run starts from, if a start of CFG is kept or shipped, and the lines that it prints."""
    monkeypatch.setattr(setup, "SHIPPED", tmp_path / "shipped")
    where = tmp_path / {"kept": "warm_start", "shipped": "shipped"}[request.param]
    pretrained.save(tiny_model(), where, byte_encoding().files)
    note = {"settings": setup.settings(CFG), "loss": setup.loss_on(where, TOY, PROBLEMS, byte_encoding())}
    (where / "warm_start.json").write_text(json.dumps(note))

    def begin(task=TOY, problems=PROBLEMS, **changes):
        cfg = dataclasses.replace(CFG, out=str(tmp_path))
        for name, x in changes.items():
            object.__setattr__(cfg, name, x)            # not checked
        model, cold = setup.starting_model(cfg, task, problems, 5, byte_encoding())
        assert cold is (model.cfg.n_embd != 32)         # tiny_model's; a new one is of CFG's width
        return "new" if cold else request.param, capsys.readouterr().out
    begin.where = where
    return begin


def test_a_start_of_the_same_settings_is_taken(begin):
    assert begin() == (begin.where.name.replace("warm_start", "kept"), f"starting from {begin.where}\n")
    assert begin(lr=1.0, algo="ppo", prompts=9, cache="plain")[0] != "new"        # RL's own
    assert begin(seed=9)[0] == ("shipped" if begin.where.name == "shipped" else "new")


@pytest.mark.parametrize("changes, says", [
    *(({name: x}, f"--{name} was ") for name, x in dict(chat="none", system="x", max_new=99, n_layer=9, warm_steps=9,
                                                        warm_lr=9.0, task_args={"difficulty": 1}).items() if name != "task_args"),
    (dict(task_args={"difficulty": 1}), "--difficulty was None, and is 1"),
    (dict(task=SimpleNamespace(demonstration=lambda p, rng: "abd")), "its loss is another"),
    (dict(problems=PROBLEMS[::-1]), "its loss is another")])
def test_a_start_that_a_run_would_not_make_is_made_anew(changes, says, begin):
    what, said = begin(**changes)
    assert what == "new" and says in said


@pytest.mark.parametrize("add, taken", [(1e-6, True), (torch.arange(32) / 100, False)])
def test_a_start_is_of_todays_model(add, taken, begin, monkeypatch):
    real = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *a, **b: real(self, *a, **b) + (add if self.cfg.n_embd == 32 else 0))
    assert (begin()[0] != "new") is taken


@pytest.mark.parametrize("text", ["", "[]", '{"loss": 0}'])
def test_a_note_that_is_none(text, begin):
    (begin.where / "warm_start.json").write_text(text)
    assert begin()[0] == "new"
