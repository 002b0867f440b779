"""Whole runs: learning, a kill at any moment, faults, what is written."""
import json
import os
import re
import shutil
import signal
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Forked, agent_of, batch_of, fault, records

import data
import data.arithmetic as arithmetic
import grpo
from grpo import Config, evaluate, main
from run import checkpoint, dist, files, passes, show

# A few seconds: 1-digit problems, a small model, a short warm start.
SMALL = ("--difficulty 1 --n_layer 1 --n_embd 64 --warm_steps 80 --warm_lr 5e-3 --prompts 4 "
         "--group 8 --max_new 12 --save_every 2 --lr 1e-3 --beta 0.005").split()


def metrics(where, timed=False):
    lines = records(Path(where) / "metrics.jsonl")
    clocks = set() if timed else {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 6 steps in this process, which the others are compared with."""
    where = tmp_path_factory.mktemp("unbroken")
    main([*SMALL, "--steps", "6", "--out", str(where)])
    assert all(m["grad_norm"] > 1e-3 and m["dead_groups"] < 1 for m in metrics(where)[1:])
    return where


def weights(where):
    return (Path(where) / "model.safetensors").read_bytes()


def saved(where):
    return checkpoint.load(Path(where), Config)[1]


def copy_warm_start(source, target):
    shutil.copytree(source / "warm_start", target / "warm_start")


# ------------------------------------------------------------------------------------ learning

def toy(reward):
    """A task of one-byte prompts, without a warm start's help."""
    problems = [arithmetic.Problem(c, c) for c in "abcdefgh"]
    return SimpleNamespace(DEFAULTS={}, problems=lambda: (problems, problems[:2]), reward=reward,
                           demonstration=lambda p, r: "ab"[r.randrange(2)] * r.randrange(1, 6),
                           answer=lambda text: text, steps=lambda p, text: [])


def trained(tmp_path, reward, **changes):
    """The metrics of the steps of a run with a reward."""
    cfg = Config(out=str(tmp_path), **dict(n_layer=1, n_embd=32, warm_lr=5e-3, prompts=8, group=8, max_new=8, lr=6e-3, steps=12,
                                           warm_steps=0) | changes)
    grpo.train(cfg, toy(reward))
    return metrics(tmp_path)[1:]


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory):
    """A model that has seen demonstrations of all that `toy` says."""
    where = tmp_path_factory.mktemp("demonstrated")
    trained(where, lambda p, text: {"correct": 0.0}, steps=0, warm_steps=60)
    return str(where)


def only_b(text):
    return float(bool(text) and set(text) == {"b"})


@pytest.mark.slow
def test_learns_what_is_rewarded(demonstrated, tmp_path):
    """Tiny and end to end: completions of nothing but `b` are to replace the others."""
    m = trained(tmp_path, lambda p, text: {"correct": only_b(text)}, beta=0.0, init=demonstrated)
    late = sum(line["reward"] for line in m[-3:]) / 3
    assert m[0]["reward"] < 0.5 and late > m[0]["reward"] + 0.3


@pytest.mark.slow
def test_learns_nothing_from_shuffled_rewards(demonstrated, tmp_path):
    """The same settings, random rewards: on the mean of three seeds no gain."""
    gains = []
    for seed in (1, 2, 3):
        truth, r = [], dist.rng(Config(seed=seed), "shuffled")

        def reward(p, text):
            truth.append(only_b(text))
            return {"correct": float(r.random() < 0.5)}
        trained(tmp_path / str(seed), reward, beta=0.0, seed=seed, init=demonstrated)
        gains.append(sum(truth[-192:]) / 192 - sum(truth[:192]) / 192)
    assert sum(gains) / 3 < 0.15, gains


@pytest.mark.slow
def test_learns_to_stop(demonstrated, tmp_path):
    """Only stopping pays. With the end token outside the mask this could not be learned."""
    m = trained(tmp_path, lambda p, text: {"correct": float(len(text) <= 1)}, init=demonstrated)
    assert m[0]["length"] > 2.5 and m[-1]["length"] < 2.2 and m[-1]["finished"] > 0.9


def test_a_reward_that_never_varies_is_said(tmp_path, capsys):
    m = trained(tmp_path, lambda p, text: {"correct": 0.0}, steps=4, warm_steps=5)
    assert m[-1]["dead_groups"] == 1
    assert capsys.readouterr().out.count("warning: for 3 steps in a row all rewards") == 1


# --------------------------------------------------------------- the same run, whatever happens

def signalled(where, work, args, stage, number):
    """Calls `work(args)` in a process, which gets a signal when it prints a line with `stage`: its exit code, what it
    then printed, and its stderr."""
    where.mkdir()
    os.mkfifo(where / "stdout")
    process = Forked(where, work, [*map(str, args)])
    with open(where / "stdout") as lines:
        for line in lines:
            if stage in line:
                process.kill(number)
                break
        rest = lines.read()
    return process.join(), rest, (where / "stderr").read_text()


def dies_in_a_write(args):
    """The command line; SIGKILL comes with half of the second checkpoint written."""
    real, saved = files.save_file, []

    def save_file(tensors, path, metadata):
        """The real one."""
        real(tensors, path, metadata)
        saved.append("checkpoint" in str(path))
        if sum(saved) == 2:
            os.truncate(path, 999)
            os.kill(os.getpid(), signal.SIGKILL)
    files.save_file = save_file
    main(args)


@pytest.mark.slow
def test_killed_at_any_moment(unbroken, forked, tmp_path):
    """SIGKILL four times, the last within a write of the checkpoint; then resume to the end. The
    second finds only the checkpoint of step 0, when the optimizer has no state yet."""
    out = tmp_path / "run"
    for stage in ("warm start", "step 1/6", "step 3/6", "write"):
        flags = [*SMALL, "--steps", "6"] if stage == "warm start" else ["--resume"]
        work = dies_in_a_write if stage == "write" else main
        code, *said = signalled(tmp_path / stage.replace("/", " of "), work, [*flags, "--out", out], stage, signal.SIGKILL)
        assert code == -signal.SIGKILL, (stage, said)
    main(["--resume", "--out", str(out)])
    assert weights(out) == weights(unbroken)
    assert metrics(out) == metrics(unbroken)
    assert (out / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_says_how_to_resume(unbroken, forked, tmp_path, sig):
    out = tmp_path / "run"
    copy_warm_start(unbroken, out)
    code, said, err = signalled(tmp_path / "process", main, [*SMALL, "--steps", "500", "--out", out], "step 1/", sig)
    assert code == 128 + sig and err == ""
    last = said.splitlines()[-1]
    assert re.fullmatch(rf"stopped after step \d+; continue with: python grpo.py --resume --out {out}", last)
    assert saved(out).step == int(re.search(r"step (\d+)", last)[1]) == metrics(out)[-1]["step"]


# -------------------------------------------------------------------------------- what is written

def test_the_run_folder(unbroken):
    assert {p.name for p in unbroken.iterdir()} == {
        "model.safetensors", "config.json", "checkpoint.safetensors", "run.json", "metrics.jsonl",
        "samples.jsonl", "report.html", "warm_start", "tokenizer.json", "tokenizer_config.json", "lock"}
    lines = metrics(unbroken, timed=True)
    assert set(lines[1]) >= set("step seconds beta reward accuracy length kl entropy clip_share mismatch "
                                "grad_norm dead_groups finished reward_seconds rollout_tok_s update_tok_s loss working".split())
    measured = {"greedy", *(f"pass@{k}" for k in (1, 2, 4, 8)), *(f"maj@{k}" for k in (2, 4, 8))}
    assert set(lines[0]) == {"step"} | measured and measured < set(lines[-1])
    record = json.loads((unbroken / "samples.jsonl").read_text().splitlines()[0])
    assert len(record["completions"]) == len(record["rewards"]) == len(record["advantages"]) == 8
    assert json.loads((unbroken / "run.json").read_text())["config"]["group"] == 8


def test_trained_ids_are_the_sampled_ids(monkeypatch, tmp_path):
    """Text decoded and tokenised again is another sequence: here bytes that are no UTF-8."""
    seen = {}
    real_sample, real_update = grpo.sample, grpo.update
    def spy(*args, **named):
        seen["sampled"] = real_sample(*args, **named)
        return seen["sampled"]
    def check(agent, batch, *rest):
        assert batch.ids is seen["sampled"].ids and batch.mask is seen["sampled"].mask
        seen["bytes"] = seen.get("bytes", 0) + int((batch.ids[batch.mask] > 127).sum())
        return real_update(agent, batch, *rest)
    monkeypatch.setattr(grpo, "sample", spy)
    monkeypatch.setattr(grpo, "update", check)
    trained(tmp_path, lambda p, text: {"correct": float(len(text) % 2)}, steps=2, warm_steps=0)
    assert seen["bytes"] > 20


@pytest.mark.slow
def test_bfloat16_asks_the_trainer_for_old_logp(tmp_path, unbroken):
    """Sampler and trainer round differently: the first ratio is 1 all the same."""
    main([*SMALL, *"--steps 1 --minibatches 1 --dtype bfloat16 --held_out 1 --samples 1 --warm_steps 2".split(),
          "--init", str(unbroken / "warm_start"), "--out", str(tmp_path)])
    m = metrics(tmp_path)[1]
    assert 1e-4 < m["mismatch"] < passes.MISMATCH[torch.bfloat16][0] and m["clip_share"] == 0
    tensors = saved(tmp_path).tensors
    assert {t.dtype for n, t in tensors.items() if n[:4] != "ref."} == {torch.float32}  # master weights
    ref = {n for n, t in tensors.items() if n[:4] == "ref." and t.dtype == torch.bfloat16}
    assert ref == {n for n in tensors if n[:4] == "ref." and ("_proj." in n or "lm_head" in n)}


def test_an_unfinished_completion_has_no_vote(monkeypatch):
    """Its answer is right by the text, but earned nothing: it once stood for the 7 that finished."""
    problems = [arithmetic.Problem("x", "c"), arithmetic.Problem("y", "a")]

    def generate(agent, chunk, n, rng=None):
        """Of x all say b, of y all say a, but the first sample is cut off."""
        cut_off = [p.prompt == "y" and i == 0 and rng is not None for p in chunk for i in range(n)]
        said = [{"x": "b", "y": "a"}[p.prompt] for p in chunk for _ in range(n)]
        finished = ~torch.tensor(cut_off)
        correct = finished & torch.tensor([text == "a" for text in said])
        return batch_of(finished[:, None] | True, finished=finished, texts=said,
                        components={"correct": correct.float()})
    monkeypatch.setattr(grpo, "generate", generate)
    found = evaluate(agent_of(Config(), SimpleNamespace(answer=str)), problems)
    assert [*found] == ["greedy", "pass@1", "pass@2", "pass@4", "pass@8", "maj@2", "maj@4", "maj@8"]
    assert found["maj@8"] == 0.5 and found["pass@1"] == pytest.approx(7 / 16)


# ---------------------------------------------------------------------------------------- faults

@pytest.mark.slow
@pytest.mark.parametrize("args, says", [
    (["--grup", "4"], "--grup"),
    (["--top_k", "5"], "--top_k"),                  # would need a renormalised log-prob
    (["--group", "many"], "--group: invalid int value: 'many'"),
    (["--group", "0"], "--group must be at least 1, got 0"),
    (["--compile", "on"], "no argument on"),
    (["--group", "1"], "--group 1"),
    (["--prompts", "8000"], "7600 problems"),
    (["--task", "chess"], "chess"),
    (["--task", "./mine.py"], "mine.py"),
    (["--init", "nowhere"], "nowhere"),
    (["--ask", "1*1=", "--init", "nowhere"], "nowhere"),
    (["--ask", "1*1=", "--resume"], "--resume"),
    (["--difficulty", "4"], "1 to 3"),
    (["--algo", "trpo"], "trpo"),
    (["--resume", "--out", "nowhere"], "no run in nowhere"),
    (["--out", "file/in"], "file/in"),
    (["--device", "cuda"], "--device cuda")])
def test_bad_input_is_one_line_and_code_2(args, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert says in fault(capsys, *args)


def script(*args):
    """`python grpo.py`."""
    sys.argv = ["grpo.py", *args]
    runpy.run_path(str(ROOT / "grpo.py"), run_name="__main__")


def test_no_traceback_from_the_command_line(forked, tmp_path):
    code, out, err = forked(tmp_path, script, "--group", "0").end()
    assert (code, out) == (2, "") and err.count("\n") == 1


@pytest.mark.parametrize("n", [17, 10 ** 9])
def test_an_evaluation_that_does_not_fit(n, unbroken, tmp_path, capsys):
    """From a run's folder or the command line; refused before there is memory for it."""
    assert f"and --max_new {n} do not fit" in fault(capsys, "--eval_only", "--init", unbroken, "--max_new", n)
    shutil.copytree(unbroken, tmp_path / "run")
    text = (tmp_path / "run" / "run.json").read_text()
    (tmp_path / "run" / "run.json").write_text(text.replace('"max_new": 12', f'"max_new": {n}'))
    assert f"and --max_new {n} do not fit" in fault(capsys, "--eval_only", "--init", tmp_path / "run")


def test_an_evaluation_of_nothing(unbroken, tmp_path, capsys):
    path = tmp_path / "none.py"
    path.write_text(Path(arithmetic.__file__).read_text() + "\n_all = problems\ndef problems():\n    return _all()[0], []\n")
    said = fault(capsys, "--eval_only", "--init", unbroken, "--task", path)
    assert "the task has no held-out problems to evaluate on" in said


@pytest.mark.slow
def test_a_mistake_leaves_a_finished_run_alone(unbroken, tmp_path, capsys):
    """The folder is opened, and its logs emptied, only after the settings have proved possible."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--out", str(tmp_path)])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    capsys.readouterr()
    fault(capsys, *SMALL, "--prompts", 8000, "--out", tmp_path)
    fault(capsys, *SMALL, "--init", "nowhere", "--out", tmp_path)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert "already at step 1" in fault(capsys, "--resume", "--steps", 0, "--out", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")                 # by somebody; the rest is logged
    main(["--resume", "--steps", "2", "--out", str(tmp_path)])
    assert [m["step"] for m in metrics(tmp_path)] == [2]


def test_resume_needs_nothing_but_the_checkpoint(unbroken, tmp_path):
    """Neither the folder of --init nor the kept warm start; a log that is gone begins with what follows."""
    shutil.copy(unbroken / "checkpoint.safetensors", tmp_path)
    main(["--resume", "--steps", "7", "--out", str(tmp_path)])
    assert [m["step"] for m in metrics(tmp_path)] == [7] and not (tmp_path / "warm_start").exists()


# ---------------------------------------------------------------- notebooks, tasks of one's own, signals

def test_main_works_in_a_notebook(unbroken, monkeypatch, capsys):
    """Its stdout cannot be reconfigured, and its Ctrl-C is its own afterwards."""
    import io
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    main(["--resume", "--steps", "6", "--out", str(unbroken)])
    assert "the model is in" in out.getvalue() and signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_every_statistic_is_a_name_that_no_component_may_bear(tmp_path, unbroken):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--algo", "ppo", "--reward", "model", "--out",
          str(tmp_path)])
    names = set().union(*metrics(tmp_path, timed=True))
    names = {name for name in names if "@" not in name} - {"working"}
    assert not names - data.STATISTICS, f"add {names - data.STATISTICS} to STATISTICS in data/__init__.py"


@pytest.mark.slow
def test_a_task_is_a_file_anywhere(tmp_path, monkeypatch, capsys):
    """Its run is in out/<name>; the same warm start is taken up until its demonstrations change."""
    path = tmp_path / "letters.py"
    path.write_text(
        "from typing import NamedTuple\n"
        "DEFAULTS = dict(n_layer=1, n_embd=32, warm_steps=3, prompts=4, group=2, max_new=4,\n"
        "                steps=1)\n"
        "class Problem(NamedTuple):\n    prompt: str\n"
        "def problems(): return [Problem(c) for c in 'abcd'], [Problem('e')]\n"
        "def demonstration(problem, rng): return problem.prompt\n"
        "def reward(problem, text): return {'correct': float(text == problem.prompt)}\n"
        "def answer(text): return text\n")
    monkeypatch.chdir(tmp_path)
    for again, says in ((False, "warm start 3/3"), (True, "starting from"), (True, "starting from")):
        main(["--task", "./letters.py"])
        assert says in capsys.readouterr().out
    assert (tmp_path / "out" / "letters" / "model.safetensors").exists()
    path.write_text(path.read_text() + "# changed\n")
    main(["--task", "./letters.py"])
    assert "starting from" in capsys.readouterr().out
    path.write_text(path.read_text().replace("return problem.prompt\n", "return 2 * problem.prompt\n"))
    main(["--task", "./letters.py"])
    assert "is rebuilt: the demonstrations, their tokens, or --init's weights changed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["task", "algo"])
def test_a_strangers_folder_runs_no_code(name, unbroken, tmp_path, capsys):
    """Its settings may name a file, which is executed only if a flag names it too. Of the algorithm a question and an
    evaluation need nothing."""
    shutil.copytree(unbroken, tmp_path / "run")
    ran, file = tmp_path / "ran", tmp_path / "file.py"
    rest = Path(arithmetic.__file__).read_text() if name == "task" else "SETTINGS = {}\n"
    file.write_text(f"open({str(ran)!r}, 'w').close()\n" + rest)
    (tmp_path / "run" / "functions.py").write_text(file.read_text())
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["config"][name] = str(file)
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    _, state = checkpoint.load(tmp_path / "run", Config)
    checkpoint.write_checkpoint(Config(**about["config"] | {"out": str(tmp_path / "run")}), state)
    for mode in (["--resume", "--out"], ["--eval_only", "--init"], ["--ask", "1*1=", "--out"]):
        if name == "task" or "--resume" in mode:
            assert "which would be executed" in fault(capsys, *mode, tmp_path / "run")
        else:
            main([*mode, str(tmp_path / "run")])
        assert not ran.exists()
    main(["--eval_only", "--init", str(tmp_path / "run"), f"--{name}", str(file)])
    assert ran.exists()
    main(["--resume", "--out", str(tmp_path / "run"), f"--{name}", str(file)])
    assert show.resume_command(Config(**{name: str(file)}, out="x")).endswith(f"--out x --{name} {file}")


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 6])
def test_a_signal_in_an_evaluation_loses_nothing(unbroken, tmp_path, monkeypatch, capsys, at):
    """The evaluation is given up, the step it follows is kept, and the run ends as one left alone."""
    copy_warm_start(unbroken, tmp_path)
    real, step = grpo.evaluate, []

    def evaluate(agent, problems):
        """The real one; Ctrl-C comes to the first, or to the last."""
        step.append(6 * len(step))
        if step[-1] == at:
            os.kill(os.getpid(), signal.SIGINT)
        return real(agent, problems)
    monkeypatch.setattr(grpo, "evaluate", evaluate)
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--steps", "6", "--out", str(tmp_path)])
    assert ended.value.code == 130
    assert "stopped in the greedy evaluation, which will begin again; continue with" in capsys.readouterr().out
    assert [m["step"] for m in metrics(tmp_path)] == [*range(at)]
    assert saved(tmp_path).step == (6 if at else -1) and bool(saved(tmp_path).stats) == bool(at)
    main(["--resume", "--out", str(tmp_path)])
    assert metrics(tmp_path) == metrics(unbroken) and weights(tmp_path) == weights(unbroken)
    assert "is complete" not in capsys.readouterr().out and not saved(tmp_path).stats
    assert (tmp_path / "samples.jsonl").read_bytes() == (unbroken / "samples.jsonl").read_bytes()


def test_more_samples_of_fewer_problems(unbroken, capsys):
    main(["--eval_only", "--out", str(unbroken), "--samples", "5", "--held_out", "7"])
    said = dict(part.split(" ") for part in capsys.readouterr().out.strip().split("  "))
    assert [*said] == ["greedy", "pass@1", "pass@5", "maj@5"]
    assert all(abs(float(x[:-1]) / 100 * 35 - round(float(x[:-1]) / 100 * 35)) < 0.02 for x in said.values())


# -------------------------------------------------------------- a warm start from a checkpoint

@pytest.mark.slow
def test_a_checkpoint_starts_as_it_is_or_warm(unbroken, tmp_path, capsys):
    """Without --warm_steps its weights are the start; with it they are fitted, at another rate, and
    kept for the next run with the same settings and the same checkpoint."""
    base = tmp_path / "base"
    main([*SMALL, "--steps", "0", "--warm_steps", "3", "--held_out", "2", "--out", str(base)])
    args = ["--init", str(base), *SMALL[:2], *SMALL[-10:], "--steps", "0", "--held_out", "2"]
    main([*args, "--out", str(tmp_path / "as_it_is")])
    assert weights(tmp_path / "as_it_is") == weights(base) and not (tmp_path / "as_it_is/warm_start").exists()
    warm = [*args, "--warm_steps", "30", "--warm_lr", "2e-3", "--out", str(tmp_path / "warm")]
    capsys.readouterr()
    main(warm)
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"warm start \d+/30  loss ([\d.]+)", out)]
    assert f"starting from {base}" in out and losses[-1] < losses[0]
    assert weights(tmp_path / "warm") != weights(base)
    fitted = weights(tmp_path / "warm")
    main(warm)
    out = capsys.readouterr().out
    assert f"starting from {tmp_path / 'warm/warm_start'}" in out and "warm start 3/30" not in out
    assert weights(tmp_path / "warm") == fitted
    main([*SMALL, "--steps", "0", "--warm_steps", "4", "--held_out", "2", "--out", str(base)])
    main(warm)
    assert "is rebuilt: the demonstrations, their tokens, or --init's weights changed" in capsys.readouterr().out
    assert weights(tmp_path / "warm") != fitted
