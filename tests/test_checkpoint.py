"""The life of a run: begun, stopped, killed, continued, evaluated, replaced, copied."""
import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import shutil
import signal
import sys
from typing import get_args

import pytest
import torch
from conftest import LETTERS, ROOT, Killed, agent_of, contents, fault, metrics, same
from safetensors.torch import load
from test_report import shown_data

import grpo
from data import UserError
from grpo import Config, main
from run import checkpoint, config, files, report

TASK = LETTERS + """
DEFAULTS = dict(steps=2, prompts=3, group=4, max_new=6)
made = problems()
def problems(difficulty=2, train='', more=''):
    return made
"""
SMALL = "--n_layer 1 --n_embd 16 --warm_steps 12 --warm_lr 1e-2 --lr 5e-3 --samples 2".split()


def steps(where):
    return [m["step"] for m in metrics(where)]


def evaluated(where):
    return [m["step"] for m in metrics(where) if "greedy" in m]


def weights(where):
    return dict(sorted(load((where / "model.safetensors").read_bytes()).items()))


def bytes_of(folder, *names):
    return [(folder / name).read_bytes() for name in names]


def saved_at(where):
    return checkpoint.load(where, Config)[1].step


@pytest.fixture
def task(tmp_path):
    (tmp_path / "letters.py").write_text(TASK)
    return tmp_path / "letters.py"


@pytest.fixture
def run(tmp_path, task):
    """A function that runs a command in a folder, with the task of this file, to its end or a
    Killed."""
    def command(out, *args):
        given = [] if "--resume" in args else SMALL
        with contextlib.suppress(Killed):
            main(["--task", str(task), *given, *map(str, args), "--out", str(tmp_path / out)])
        files.LOCK.close()
        return tmp_path / out
    return command


@contextlib.contextmanager
def killed_before(path, n=1):
    """A context in which the process ends when it begins to write a file for the n-th time."""
    real, seen = files.replacing, []

    def replacing(given):
        seen.append(given)
        if given == path and seen.count(path) == n:
            raise Killed
        return real(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "replacing", replacing)
        yield


# ---------- what a flag does at a resume

# All others must be what they are in the run; with several iterations, `steps` too.
MAY_CHANGE = {"out", "steps", "eval_every", "save_every", "held_out", "samples", "micro_tokens",
              "recompute", "device", "dtype", "compile", "cache", "shared_prefixes"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs of one and of two iterations, after 2 steps."""
    top = tmp_path_factory.mktemp("begun")
    flags = "--init= --difficulty 1 --prompts 2 --group 2 --max_new 12 --steps 2".split()
    for name, iterations in (("one", "1"), ("two", "2")):
        own = "--held_out", "2", "--iterations", iterations, "--out", str(top / name)
        main([*SMALL, *flags, *own])
    return top


def another(cfg, field):
    """A value that a setting of the run does not have."""
    value = getattr(cfg, field.name)
    if choices := get_args(field.type):
        return next(x for x in choices if x != value)
    if field.name == "task_args":
        return {"difficulty": 3}
    if field.type is bool:
        return not value
    return value + ("x" if field.type is str else 3)


@pytest.mark.parametrize("iterations", ["one", "two"])
def test_what_a_flag_does_when_a_run_goes_on(iterations, begun):
    folder = begun / iterations
    cfg = checkpoint.load(folder, Config)[0]
    may_change = MAY_CHANGE - {"steps"} if iterations == "two" else MAY_CHANGE
    for field in dataclasses.fields(Config):
        name, new = field.name, another(cfg, field)
        same = checkpoint.resume(folder, Config, {name: getattr(cfg, name)})[0]
        assert getattr(same, name) == getattr(cfg, name) != new
        if name in may_change:
            found = checkpoint.resume(folder, Config, {name: new})[0]
            want = cfg if name == "out" else dataclasses.replace(cfg, **{name: new})
            assert found == want, name
            continue
        with pytest.raises(UserError, match=f"has --{name} .*, not ") as e:
            checkpoint.resume(folder, Config, {name: new})
        assert f"may change only {', '.join(sorted(may_change))}, and the path" in str(e.value)


def config_of(*argv):
    mode, given = config.read(Config, "", [*map(str, argv)])
    given, saved = checkpoint.settings(mode, given, Config)
    return grpo.make_config(**given), saved


def test_no_flag_takes_the_place_of_the_runs_own(begun, tmp_path, capsys):
    """The defaults of the command line are not flags; to evaluate or ask, those given count."""
    out = begun / "one"
    cfg, saved = config_of("--resume", "--out", out)
    assert cfg == checkpoint.load(out, Config)[0] and saved.step == 2
    for argv in (["--eval_only", "--out", out], ["--ask", "1*2=", "--init", out],
                 ["--eval_only", "--out", out, "--task", ROOT / "data" / "arithmetic.py"]):
        found, none = config_of(*argv, "--samples", 1)
        assert none is None
        its = dict(out=cfg.out, init=cfg.init, task=cfg.task, samples=2)
        assert dataclasses.replace(found, **its) == cfg
        assert found.init == str(out)
    for algo, used in (("cispo", "cispo"), ("mine.py", "grpo")):        # whose file is not given
        (other := tmp_path / algo).mkdir()
        (other / "run.json").write_text(json.dumps({"config": {"algo": algo}}))
        assert config_of("--ask=x", "--init", other)[0].algo == used
    assert "note: without the run's --algo mine.py, " in capsys.readouterr().out
    assert "already at step 2" in fault(capsys, "--resume", "--out", out, "--steps", 1)
    config_of("--ask=x", "--init", out, "--task", "guess", "--out=x")
    assert "note: nothing is written to --out\n" in capsys.readouterr().out
    assert "the prompt is empty" in fault(capsys, "--ask=", "--out", out)
    assert f"no run in {tmp_path}" in fault(capsys, "--resume", "--out", tmp_path)


# ---------- exact resume

def two_groups(params, lr):
    """Matrices with one rate, the rest with another, as for Muon beside Adam."""
    flat = [p for p in params if p.dim() < 2]
    groups = [dict(params=[p for p in params if p.dim() > 1]), dict(params=flat, lr=10 * lr)]
    return torch.optim.SGD(groups, lr, momentum=0.9)


OPTIMIZERS = {
    "SGD": torch.optim.SGD, "Adafactor": torch.optim.Adafactor, "two groups": two_groups,
    "amsgrad": lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True, fused=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_any_optimizer(name, run, begun, monkeypatch):
    """Weights, its own state, and rates that halve are those of a run that did not stop."""
    def new_optimizer(agent):
        return OPTIMIZERS[name]([*agent.policy.parameters()], agent.cfg.lr)

    def update(agent, *given):
        rates.append([group["lr"] for group in agent.opt.param_groups])
        found = real(agent, *given)
        agent.opt.param_groups[0]["lr"] *= 0.7          # in place
        return found
    rates, real = [], grpo.update
    monkeypatch.setattr(grpo, "new_optimizer", new_optimizer)
    monkeypatch.setattr(grpo, "update", update)
    start = ["--init", begun / "one" / "warm_start", "--held_out", 1,
             "--half_life", int(name != "amsgrad")]
    whole = run("whole", *start, "--steps", 3, "--save_every", 2)       # also looks at step 2
    half = run("half", *start, "--steps", 1)

    run("half", "--resume", "--steps", 3)
    one, other = (checkpoint.load(where, Config)[1].tensors for where in (whole, half))
    assert same(one, other)
    began, ended = weights(begun / "one" / "warm_start"), weights(whole)
    assert all(not torch.equal(began[n], ended[n]) for n in began)
    assert any(n.startswith("opt.") for n in one) is (name != "SGD")
    assert rates[:3] == rates[3:]
    if name == "two groups":
        assert rates[:3] == [pytest.approx([5e-3 * x, 5e-2 * x]) for x in (1, 0.5, 0.25)]


def test_an_algorithms_own_state_is_of_tensors():
    """Which go on in a resumed run; test_variants.py has some of each type."""
    agent = agent_of(Config(), state={"mean": 0.5})
    with pytest.raises(UserError, match=r"agent.state\['mean'\] must be a tensor, not 0.5"):
        checkpoint.end_step(agent, 1, {})


MORE = ("--iterations 2 --steps 2 --eval_every 1 --save_every 1 --beta 0.1 --half_life 3 "
        "--samples 1").split()


@pytest.fixture(scope="module")
def whole(large_epsilons, tmp_path_factory):
    where = tmp_path_factory.mktemp("whole")
    (where / "letters.py").write_text(TASK)
    main(["--task", str(where / "letters.py"), *SMALL, *MORE, "--out", str(where / "run")])
    return where / "run"


@pytest.mark.slow
@pytest.mark.parametrize("how, n, left", [
    ("model.safetensors", 1, -1), ("checkpoint.safetensors", 5, 2), ("model.safetensors", 5, 3),
    ("SIGTERM", 1, 0), ("SIGTERM", 4, 3)])
def test_a_run_goes_on_as_if_nothing_had_stopped_it(how, n, left, whole, run, task, capsys,
                                                    monkeypatch):
    """A kill before a file is written for the n-th time, a signal in the n-th evaluation; the
    second of two iterations begins with a new reference, which stays."""
    out, real, seen = task.parent / "run", report.evaluate, []

    def evaluate(agent, problems, generate):
        seen.append(problems)
        if len(seen) == n:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(agent, problems, generate)
    if how == "SIGTERM":
        monkeypatch.setattr(report, "evaluate", evaluate)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            run("run", *MORE)
        said = capsys.readouterr().out
        assert f"stopped after step {left};" in said and "then 4 steps of RL" in said
    with killed_before(out / how, n):
        how == "SIGTERM" or run("run", *MORE)
    assert saved_at(out) == left
    if left > 0:
        again = ["--task", task, *SMALL, *MORE, "--out", out]
        assert f"run stopped at step {left}" in fault(capsys, *again)
    run("run", "--resume")
    assert "\nstep 4/4  " in capsys.readouterr().out
    assert metrics(out) == metrics(whole) and steps(out) == [0, 1, 2, 3, 4]
    names = "model.safetensors", "samples.jsonl", "best/model.safetensors"
    assert bytes_of(out, *names) == bytes_of(whole, *names)
    shown, = shown_data(out / "report.html")            # no step twice, and none of before alone
    assert [m["step"] for m in shown["metrics"]] == steps(out) and len(shown["samples"]) == 8


@pytest.mark.slow
def test_evaluations_are_as_they_were_or_as_they_are_to_be(run, capsys):
    """Of one completion per prompt, nothing is said of groups."""
    alone = ["--algo", "reinforce", "--group", 1, "--held_out", 1]
    out = run("run", "--steps", 2, "--eval_every", 2, *alone)
    run("run", "--resume", "--steps", 5)
    assert evaluated(out) == [0, 2, 4, 5]
    run("run", "--resume", "--steps", 7, "--eval_every", 1)
    run("run", "--resume", "--steps", 9)            # what was changed is the run's own now
    run("run", "--resume", "--steps", 9)
    assert evaluated(out) == [0, 2, 4, 5, 6, 7, 8, 9]
    said, last = capsys.readouterr().out, metrics(out)[-1]
    assert f"\nstep 9  held out: greedy {last['greedy']:.1%}  pass@1 {last['pass@1']:.1%}" in said
    assert "dead_groups" not in last and "dead_groups" not in said


# ---------- the files that a run names

@pytest.mark.slow
def test_the_problems_and_the_task_are_those_of_the_beginning(run, task, tmp_path, capsys):
    """A file that was moved has its name."""
    rows, other, moved = tmp_path / "rows", tmp_path / "x" / "rows", tmp_path / "elsewhere.py"
    rows.write_text("1,2")
    other.parent.mkdir()
    out = run("run", "--steps", 0, "--train", rows, "--difficulty", 1)
    resume = ["--resume", "--task", task, "--steps", 1, "--out", out]
    assert f"has --train {rows}, not" in fault(capsys, *resume, "--train", task)
    assert "has --more , not" in fault(capsys, *resume, "--more", other)
    rows.rename(other)
    run("run", "--resume", "--steps", 1, "--train", other)
    run("run", "--resume", "--steps", 2)            # it is known from now on
    assert checkpoint.load(out, Config)[0].task_args["train"] == str(other)

    task.write_text(TASK.replace("difficulty", "level"))
    cfg, _ = config_of("--eval_only", "--task", task, "--init", out)
    assert cfg.task_args == dict(level=2, train=str(other), more="")
    assert "there is no setting difficulty" in fault(capsys, *resume, "--steps", 2)
    task.write_text(TASK)
    task.rename(moved)
    resume = ["--resume", "--steps", 3, "--out", out, "--task"]
    assert f"has --task {task}, not" in fault(capsys, *resume, moved)
    moved = moved.rename(tmp_path / "x" / task.name)
    main([*map(str, resume), str(moved)])
    assert steps(out) == [0, 1, 2, 3] and checkpoint.load(out, Config)[0].task == str(moved)


# ---------- the best policy so far

BEST = ("model.safetensors", "run.json", "best.json")


@pytest.fixture
def scored(monkeypatch):
    """The pass@1 of each step's evaluation, to be filled, and the policy that it was of."""
    shares, policies, step, real = {}, {}, [0], grpo.train_step

    def train_step(agent, problems, at):
        step[0] = at
        return real(agent, problems, at)

    def evaluate(agent, problems, generate):
        held = agent.policy.named_parameters()
        policies[step[0]] = {f"model.{n}": p.detach().clone() for n, p in held}
        return {"greedy": 0.0, "pass@1": shares[step[0]]}
    monkeypatch.setattr(grpo, "train_step", train_step)
    monkeypatch.setattr(report, "evaluate", evaluate)
    return shares, policies


def best_step(out):
    return json.loads((out / "best" / "best.json").read_text())["step"]


@pytest.mark.slow
def test_the_best_policy_is_kept(run, scored, task, capsys):
    """The first with the highest pass@1."""
    shares, policies = scored
    shares.update({0: 0.1, 1: 0.3, 2: 0.3, 3: 0.2, 4: 0.4, 5: 0.35})
    out = run("run", "--steps", 1, "--eval_every", 1)
    assert f"{out}/best" in capsys.readouterr().out
    before = bytes_of(out / "best", *BEST)
    run("run", "--resume", "--steps", 3)
    assert best_step(out) == 1 and bytes_of(out / "best", *BEST) == before
    run("run", "--resume", "--steps", 5)
    held = weights(out / "best")
    assert best_step(out) == 4 and all(torch.equal(x, policies[4][n]) for n, x in held.items())
    assert not torch.equal(held["model.norm.weight"], policies[5]["model.norm.weight"])
    assert bytes_of(out, "run.json") == bytes_of(out / "best", "run.json")
    cfg, _ = config_of("--eval_only", "--init", out / "best", "--task", task)
    assert (cfg.max_new, cfg.group) == (6, 4)               # those of the run
    again = run("again", "--init", out / "best", "--warm_steps", 0, "--steps", 0)
    assert not (again / "best").exists()


@pytest.mark.slow
def test_a_kill_while_the_best_policy_is_written(run, scored, tmp_path):
    """Whatever is there by then, the step is made again, and best/ has its policy."""
    scored[0].update({0: 0.1, 1: 0.3, 2: 0.4, 3: 0.2})
    begun, names = run("begun", "--steps", 1, "--eval_every", 1), (BEST[0], BEST[2])
    for name in (None, *BEST):
        out = shutil.copytree(begun, tmp_path / f"before {name}")
        if name:
            with killed_before(out / "best" / name):
                run(out.name, "--resume", "--steps", 3)
            assert steps(out)[-1] == 1                                  # it was killed in step 2
        run(out.name, "--resume", "--steps", 3)
        about = files.about(out / "best")["config"]
        assert best_step(out) == 2 and about["steps"] == 3
        assert bytes_of(out / "best", *names) == bytes_of(tmp_path / "before None/best", *names)


# ---------- a folder

@pytest.mark.slow
def test_no_finished_run_is_lost(run, capsys, monkeypatch, tmp_path):
    """Each is renamed, whole, and can be gone on with. A link to the folder of runs stays one."""
    kept, real = [], report.evaluate

    def evaluate(agent, problems, generate):
        with open(agent.cfg.folder / files.MARK) as f, pytest.raises(BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return real(agent, problems, generate)
    monkeypatch.setattr(report, "evaluate", evaluate)
    (tmp_path / "run.0.1").symlink_to("gone")
    (tmp_path / "link").symlink_to("run.0")
    for lr in (1, 2, 3):
        run("link", "--steps", 1, "--lr", lr / 1000, "--eval_every", 1)
        out = tmp_path / "run.0"
        (out / "notes.md").write_text("mine")
        kept.append(contents(out))
        said = capsys.readouterr().out
        assert (out / "warm_start").exists()
    assert said.count(f"earlier run in {out} was moved to {out}.3\n") == 1
    for whole, folder in zip(kept, (out.with_name("run.0.2"), out.with_name("run.0.3"))):
        assert contents(folder) == whole and saved_at(folder) == 1 and (folder / "best").exists()
    assert (tmp_path / "link").is_symlink()
    run("link", "--steps", 0, "--warm_steps", 13)
    assert contents(out.with_name("run.0.4")) == kept[2]        # though it needed another start


@pytest.mark.slow
def test_a_kill_while_a_run_is_renamed(run, monkeypatch):
    """Before its folder is, or while its warm start is copied: nothing is lost, and a new run
    begins, with the same start."""
    out = run("run", "--steps", 1)
    first, real = contents(out), shutil.copytree

    def killed(*given):
        raise Killed

    def half(source, target):
        real(source, target)
        os.truncate(target / "model.safetensors", 100)
        raise Killed
    previous = out.with_name("run.1")
    for module, name, kill, left in ((os, "rename", killed, out),
                                     (shutil, "copytree", half, previous)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, kill)
            run("run", "--steps", 1)
        assert contents(left) == first
    run("run", "--steps", 1)
    assert contents(previous) == first
    assert bytes_of(out, "model.safetensors") == bytes_of(previous, "model.safetensors")


@pytest.mark.parametrize("names", [
    "best/x", "run.json", ".hidden", "checkpoint.safetensors model.safetensors"])
def test_a_folder_of_something_else_is_refused_and_untouched(names, tmp_path, task, capsys):
    out = tmp_path / "out"
    for name in names.split():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('{"config": {"task": "mine"}}')
    before = contents(tmp_path)
    said = fault(capsys, "--task", task, *SMALL, "--out", out)
    assert "holds files that are not of a run" in said
    assert contents(tmp_path) == before and not (out / files.MARK).exists()


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_save_begins_anew(run, tmp_path):
    """Without what it left; run.json says what made the new one."""
    with killed_before(tmp_path / "run" / "model.safetensors"):
        out = run("run", "--steps", 1, "--eval_every", 1)
    assert (out / "best").exists() and evaluated(out) == [0]
    run("run", "--steps", 0)
    cfg, saved = checkpoint.load(out, Config)
    checkpoint.write_checkpoint(dataclasses.replace(cfg, steps=2), saved)   # stopped at 0
    run("run", "--steps", 0)
    assert evaluated(out) == [0] and not (out / "best").exists()
    about = files.about(out)
    assert about["config"]["steps"] == 0 and about["data"]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    assert about["command"] == sys.argv and about["versions"] == versions


@pytest.mark.slow
def test_a_warm_start_is_kept(run):
    """As a model for --init, before the first step, which is saved once there was one."""
    out = run("run", "--steps", 0)
    assert {*contents(out / "warm_start")} >= {"tokenizer.json", "config.json"}
    kept, init = weights(out / "warm_start"), ["--init", out / "warm_start", "--warm_steps", 0]
    for folder, saved in ((out, 0), (run("again", *init, "--steps", 0), 0)):
        assert all(torch.equal(x, kept[n]) for n, x in weights(folder).items())
        assert saved_at(folder) == saved
    assert not (run("none", "--steps", 0, "--warm_steps", 0) / "warm_start").exists()


@pytest.mark.slow
def test_a_copy_goes_on_alone(begun, tmp_path, monkeypatch):
    """A folder that was copied or moved is a run of its own, though its settings name the first."""
    before, copy = contents(begun / "one"), tmp_path / "out" / "arithmetic"
    shutil.copytree(begun / "one", copy)
    monkeypatch.chdir(tmp_path)
    main(["--resume", "--steps", "3"])
    assert contents(begun / "one") == before and steps(copy) == [0, 1, 2, 3]
