"""Whole runs: learning, a kill at any moment, faults, what is written."""
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TIMES, Forked, batch_of, fault, metrics, records

import grpo
from data import arithmetic
from grpo import Config, main
from run import checkpoint, files, report

SMALL = ("--init= --difficulty 1 --n_layer 1 --n_embd 64 --warm_steps 80 --warm_lr 5e-3 "
         "--prompts 4 --group 8 --max_new 12 --samples 12 --save_every 2 --lr 1e-3 "
         "--beta 0.005").split()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 6 steps in this process, which the others are compared with."""
    where = tmp_path_factory.mktemp("unbroken")
    main([*SMALL, "--steps", "6", "--out", str(where)])
    assert all(m["grad_norm"] > 1e-3 and m["dead_groups"] < 1 for m in metrics(where)[1:])
    return where


@torch.no_grad()        # a task's code may have switched them off
def trained(where, reward, **changes):
    """The metrics of the steps of a run with a reward, on prompts of one byte."""
    problems = [arithmetic.Problem(c, c) for c in "abcdefgh"]
    task = SimpleNamespace(
        DEFAULTS={}, problems=lambda: (problems, problems[:2]), answer=lambda text: text,
        reward=lambda problem, text: {"correct": float(reward(text))},
        demonstration=lambda problem, r: "ab"[r.randrange(2)] * r.randrange(1, 6))
    given = dict(n_layer=1, n_embd=32, warm_lr=5e-3, prompts=8, group=8, max_new=8, lr=6e-3,
                 steps=12, warm_steps=0)
    grpo.train(Config(out=str(where), **given | changes), task)
    return metrics(where)[1:]


@pytest.mark.slow
def test_learns_what_is_rewarded_and_to_stop(tmp_path):
    """With the end token outside the mask completions could not become shorter."""
    where = tmp_path / "demonstrated"
    trained(where, lambda text: 0, steps=0, warm_steps=60)
    m = trained(tmp_path / "b", lambda text: {*text} == {"b"}, beta=0.0, init=str(where))
    assert m[0]["reward"] < 0.5
    assert sum(line["reward"] for line in m[-3:]) / 3 > m[0]["reward"] + 0.3
    m = trained(tmp_path / "short", lambda text: len(text) <= 1, init=str(where))
    assert m[0]["length"] > 2.5 and m[-1]["length"] < 2.2 and m[-1]["finished"] > 0.9


# ---------- the same run, whatever happens

@pytest.mark.slow
def test_killed_at_any_moment(unbroken, tmp_path):
    """When it prints a certain line."""
    out = tmp_path / "run"
    for stage in ("warm start", "step 2/6", "step 4/6"):
        args = [*SMALL, "--steps", "6"] if stage == "warm start" else ["--resume"]
        (where := tmp_path / stage.replace("/", " of ")).mkdir()
        os.mkfifo(where / "stdout")
        process = Forked(where, main, [*args, "--out", str(out)])
        with open(where / "stdout") as lines:
            if any(stage in line for line in lines):
                process.kill()
        assert process.join() == -signal.SIGKILL, (where / "stderr").read_text()
    main(["--resume", "--out", str(out)])
    for name in ("model.safetensors", "samples.jsonl"):
        assert (out / name).read_bytes() == (unbroken / name).read_bytes()
    assert metrics(out) == metrics(unbroken)


def test_the_run_folder(unbroken):
    names = ("model.safetensors config.json checkpoint.safetensors run.json metrics.jsonl "
             "samples.jsonl report.html warm_start tokenizer.json tokenizer_config.json").split()
    names.append(files.MARK)
    assert {p.name for p in unbroken.iterdir()} == {*names}
    first, step, *_, last = records(unbroken / "metrics.jsonl")
    assert step.keys() >= TIMES | {"working"}
    measured = {"held_out", "greedy", *(f"pass@{k}" for k in (1, 2, 4, 8, 12)),
                *(f"maj@{k}" for k in (2, 4, 8, 12))}
    assert first.keys() == {"step"} | measured and measured < last.keys()


def test_an_unfinished_completion_has_no_vote():
    """Its answer is right by the text, but earned nothing: it once stood for all 8."""
    right = torch.arange(8) > 0
    batch = batch_of(torch.ones(8, 1).bool(), finished=right, texts=["a"] * 8,
                     components={"correct": right.float()})
    found = report.solved(SimpleNamespace(answer=str), [batch], [batch], 8)
    assert found["maj@8"] == 1 / 8 and found["pass@1"] == 7 / 8 / 8
    batch.components["correct"] *= 0.5                      # a share counts as one
    assert report.solved(SimpleNamespace(answer=str), [batch], [batch], 8)["greedy"] == 7 / 16
    batch.components |= {"reward": right.float(), "lenient": 1 - right.float()}     # only logged
    more = report.solved(SimpleNamespace(answer=str), [batch], [batch], 4)
    assert more["lenient@1"] == 1 / 4 / 8 and "reward@1" not in more


def test_resume_needs_nothing_but_the_checkpoint(unbroken, tmp_path):
    """Neither the folder of --init nor the kept warm start; a log that is gone begins anew."""
    shutil.copy(unbroken / "checkpoint.safetensors", tmp_path)
    main(["--resume", "--steps", "7", "--out", str(tmp_path)])
    assert [m["step"] for m in metrics(tmp_path)] == [7]
    assert not (tmp_path / "warm_start").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["task", "algo"])
def test_a_strangers_folder_runs_no_code(name, unbroken, tmp_path, capsys):
    """A file that its settings name is executed only if a flag names it too."""
    folder, ran, file = tmp_path / "run", tmp_path / "ran", tmp_path / "file.py"
    shutil.copytree(unbroken, folder)
    rest = Path(arithmetic.__file__).read_text() if name == "task" else "SETTINGS = {}\n"
    file.write_text(f"open({str(ran)!r}, 'w').close()\n" + rest)
    about = json.loads((folder / "run.json").read_text())
    about["config"] |= {name: str(file), "out": str(folder)}
    (folder / "run.json").write_text(json.dumps(about))
    state = checkpoint.load(folder, Config)[1]
    checkpoint.write_checkpoint(Config(**about["config"]), state)
    for mode in (["--resume", "--out"], ["--eval_only", "--init"], ["--ask", "1*1=", "--out"]):
        if name == "task" or "--resume" in mode:
            assert "to allow it to be executed" in fault(capsys, *mode, folder)
        else:
            main([*mode, str(folder)])
        assert not ran.exists()
    main(["--resume", "--out", str(folder), f"--{name}", str(file)])
    assert ran.exists()
