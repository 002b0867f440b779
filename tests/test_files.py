"""Files that are damaged, hostile or too large, folders that are shared or full: a line, and nothing
lost."""
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import grpo
from data import Fault
from grpo import Config, main
from run import files, folder, tensors

TINY = ("--difficulty 1 --n_layer 1 --n_embd 16 --n_head 2 --warm_steps 2 --prompts 2 --group 4 "
        "--max_new 12 --save_every 1").split()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of 2 steps, with a reward model, so that its checkpoint has all kinds of tensors."""
    where = tmp_path_factory.mktemp("done")
    main([*TINY, "--reward", "model", "--fit_prompts", "10", "--steps", "2", "--out", str(where)])
    return where


@pytest.fixture
def again(done, tmp_path):
    """A copy of it."""
    return shutil.copytree(done, tmp_path / "run")


def fault(capsys, *args):
    """The line with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(list(map(str, args)))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


# --------------------------------------------------------------------------------- the checkpoint

P = "policy.layers.0.mlp.up_proj.weight"
WRONG = {
    "a moment of another shape": (lambda t: t | {f"opt.exp_avg.{P}": torch.zeros(2, 3)}, "exp_avg"),
    "a moment of another dtype": (lambda t: t | {f"opt.exp_avg.{P}": t[P].double()}, "exp_avg"),
    "a moment that is missing": (lambda t: {n: x for n, x in t.items() if n != f"opt.step.{P}"}, "opt.step"),
    "no moments at all": (lambda t: {n: x for n, x in t.items() if n[:4] != "opt."}, "missing"),
    "a weight of another dtype": (lambda t: t | {P: t[P].bfloat16()}, P),
    "a tensor of no one": (lambda t: t | {"critic.head.bias": torch.zeros(1)}, "critic.head.bias"),
    "steps that differ": (lambda t: t | {f"opt.step.{P}": torch.tensor(7.0)}, "opt.step"),
    "a weight that is no number": (lambda t: t | {P: t[P] * float("nan")}, P),
    "a mean of squares below 0": (lambda t: t | {f"opt.exp_avg_sq.{P}": -torch.ones_like(t[P])}, P),
    "a token that is none": (lambda t: t | {"history.ids": t["history.ids"] + 257}, "history.ids"),
    "rows that make no sets": (lambda t: t | {n: x[1:] for n, x in t.items() if n[:7] == "history"},
                               "history.ids"),
    "rows of other lengths": (lambda t: t | {"history.mask": t["history.mask"][1:]}, "history.mask")}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_has_just_the_tensors_of_its_run(name, again, capsys):
    """Signed as it should be, but not what the run needs: Adam's fused kernel once wrote beyond a
    moment smaller than its parameter."""
    change, says = WRONG[name]
    cfg, checkpoint = folder.load(again, Config)
    folder.write_checkpoint(dataclasses.replace(cfg, out=str(again)),
                            dataclasses.replace(checkpoint, tensors=change(checkpoint.tensors)))
    assert says in fault(capsys, "--resume", "--steps", 3, "--out", again)


def test_a_flipped_bit_is_found(again):
    path = again / "checkpoint.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, 8 * header, 8 * header // 40), *range(8 * header, 8 * len(whole), len(whole) // 5)]
    for bit in places:
        bad = bytearray(whole)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(Fault, match="checkpoint.safetensors"):
            folder.load(again, Config)


def test_a_look_at_the_step_reads_no_tensors(again, monkeypatch):
    monkeypatch.setattr(folder, "sha256_of", lambda tensors: pytest.fail("read") if tensors else "")
    with pytest.raises(Fault, match="at step 2 already"):
        folder.resume(again, Config, {"steps": 1}, {"steps"})


def test_a_resumed_run_lets_go_of_the_file(again):
    cfg, checkpoint = folder.resume(again, Config, {"steps": 3}, {"steps"})
    kept = {x.untyped_storage().data_ptr() for x in checkpoint.tensors.values()}
    _, encoding, policy, *_ = grpo.start.begin(cfg, grpo.data.load_task(cfg.task), checkpoint)
    agent = grpo.new_agent(cfg, None, encoding, policy, checkpoint)
    state = tensors.training_state(agent)
    assert not checkpoint.tensors and not kept & {x.untyped_storage().data_ptr() for x in state.values()}
    files.unlock()
