"""The life of a run, as a user leads it: begun, stopped, continued, evaluated, overwritten, copied; and what each flag does
when a run goes on."""
import contextlib
import dataclasses
import fcntl
import json
import platform
import shutil
import sys
from typing import get_args

import pytest
import torch
from conftest import fault, records
from safetensors.torch import load
from test_report import shown_data

import grpo
from data import UserError
from grpo import Config, main
from run import checkpoint, config, files, report, setup

# Completions of 1 to 4 letters; the reward is for an `a` less a price for length, so it is negative and positive.
TASK = """
from types import SimpleNamespace as Problem
DEFAULTS = dict(steps=2, prompts=3, group=4, max_new=5)
def problems(difficulty=2):
    words = [c + d + "=" for c in "abcdef" for d in "abcdef"]
    return [Problem(prompt=word) for word in words[6:]], [Problem(prompt=word) for word in words[:6]]
def demonstration(problem, rng):
    return "".join(rng.choices("abc", k=rng.randint(1, 4)))
def reward(problem, text):
    return {"correct": float("a" in text), "price": -0.3 * len(text)}
def answer(text):
    return text[:1]
"""
SMALL = ("--n_layer 1 --n_embd 16 --warm_steps 12 --warm_lr 1e-2 --lr 5e-3 --samples 2 "
         "--device cpu --no-compile").split()
CLOCKS = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}


def metrics(where):
    lines = records(where / "metrics.jsonl")
    return [{name: x for name, x in line.items() if name not in CLOCKS} for line in lines]


def evaluated(where):
    """The steps with an evaluation."""
    return [m["step"] for m in metrics(where) if "greedy" in m]


class Killed(BaseException):
    """As if by SIGKILL: nothing is saved."""


@pytest.fixture
def run(tmp_path):
    """A function that runs a command in a folder, with the task of this file; its steps are saved in `saved`. With
    kill_at, it ends when that step is to be logged, as if it had been killed."""
    (tmp_path / "letters.py").write_text(TASK)
    task = ["--task", str(tmp_path / "letters.py")]

    def command(out, *args, kill_at=None):
        command.saved, real, append = [], checkpoint.save, files.append
        def save(agent, step, *stats):
            command.saved.append(step)
            real(agent, step, *stats)
        def killed(path, record):
            if path.name == "metrics.jsonl" and record["step"] == kill_at:
                raise Killed
            append(path, record)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "save", save)
            patch.setattr(files, "append", killed)
            given = [] if "--resume" in args else SMALL
            try:
                main([*task, *given, *map(str, args), "--out", str(tmp_path / out)])
            except Killed:
                files.LOCK.close()
        return tmp_path / out
    return command


# ----------------------------------------------------------------------- what a flag does at a resume

# All others must be what they are in the run. With several iterations, `steps` is that of each and must be too.
MAY_CHANGE = {"out": "the run stays where it is", "steps": "the run goes on to it", "eval_every": "from now on",
              "save_every": "from now on", "held_out": "only measures", "samples": "only measures",
              **dict.fromkeys(["micro_tokens", "recompute", "device", "dtype", "compile", "cache", "shard"], "the machine's")}
NAMES = [f.name for f in dataclasses.fields(Config)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs of one and of two iterations, after 2 steps."""
    top = tmp_path_factory.mktemp("begun")
    for name, more in (("one", []), ("two", ["--iterations", "2"])):
        main([*SMALL, "--difficulty", "1", "--prompts", "2", "--group", "2", "--max_new", "12", "--steps", "2",
              *more, "--out", str(top / name)])
    return top


def another(cfg, name):
    """A value that a setting of the run does not have."""
    value, field = getattr(cfg, name), next(f for f in dataclasses.fields(Config) if f.name == name)
    if choices := get_args(field.type):
        return next(x for x in choices if x != value)
    if name == "task_args":
        return {"difficulty": 3}
    return {bool: lambda: not value, int: lambda: value + 3, float: lambda: value / 2 or 0.25, str: lambda: value + "x"}[field.type]()


@pytest.mark.slow
@pytest.mark.parametrize("iterations", ["one", "two"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_flag_does_when_a_run_goes_on(name, iterations, begun):
    cfg = checkpoint.load(begun / iterations, Config)[0]
    same, new = getattr(cfg, name), another(cfg, name)
    assert same != new and getattr(checkpoint.resume(begun / iterations, Config, {name: same})[0], name) == same
    if name == "out":
        assert checkpoint.resume(begun / iterations, Config, {name: new})[0].folder == begun / iterations
    elif name in MAY_CHANGE and (name, iterations) != ("steps", "two"):
        found = checkpoint.resume(begun / iterations, Config, {name: new})[0]
        assert found == dataclasses.replace(cfg, **{name: new})
    else:
        with pytest.raises(UserError, match=f"has --{name} .*, not ") as e:
            checkpoint.resume(begun / iterations, Config, {name: new})
        allowed = [x for x in sorted(MAY_CHANGE) if (x, iterations) != ("steps", "two")]
        assert f"may change only {', '.join(allowed)}, and the path of a file" in str(e.value)


@pytest.mark.slow
def test_what_the_machine_needs_changes_a_result_only_by_rounding(run):
    """Less memory, other caches, fewer held-out problems: the steps are those of a run that was not stopped."""
    whole = run("whole", "--steps", 4)
    part = run("part", "--steps", 2)
    run("part", "--resume", "--steps", 4, "--micro_tokens", 16, "--recompute", "--cache", "plain", "--held_out", 3, "--samples", 1)
    one, other = (load((out / "model.safetensors").read_bytes()) for out in (whole, part))
    began = load((whole / "warm_start" / "model.safetensors").read_bytes())
    moved = max((one[name] - began[name]).abs().max() for name in one)
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-2 * moved
    cfg = checkpoint.load(part, Config)[0]
    assert (cfg.micro_tokens, cfg.recompute, cfg.cache, cfg.held_out, cfg.samples) == (16, True, "plain", 3, 1)
    assert "pass@1" in metrics(part)[-1] and "pass@2" not in metrics(part)[-1]


def resumed(*flags):
    """The Config and the Checkpoint with which a command line goes on."""
    mode, given = config.read(Config, "", ["--resume", *map(str, flags)])
    assert mode.resume
    given, saved = checkpoint.settings(mode, given, Config)
    return grpo.make_config(**given), saved


def test_no_flag_takes_the_place_of_the_runs_own(begun, capsys):
    """The defaults of the command line are not flags: a run goes on with its own settings."""
    cfg, saved = resumed("--out", begun / "one")
    assert cfg == checkpoint.load(begun / "one", Config)[0] and saved.step == 2
    assert "has --group 2, not 16" in fault(capsys, "--resume", "--out", begun / "one", "--group", 16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["--resume"], ["--eval_only"], ["--ask", "1*2="]], ids=" ".join)
def test_no_config_but_that_of_the_folder_is_made(mode, begun, monkeypatch):
    """Once to evaluate or ask; to resume, also as the run has it, which the flags then change."""
    made, real = [], Config.__post_init__
    monkeypatch.setattr(Config, "__post_init__", lambda cfg: made.append(cfg) or real(cfg))
    monkeypatch.setattr(grpo, "train", lambda cfg, saved: None)
    main([*mode, "--out", str(begun / "one"), "--samples", "1"])
    assert len(made) == (3 if mode == ["--resume"] else 1) and made[-1].samples == 1
    assert all((cfg.prompts, cfg.group, cfg.max_new) == (2, 2, 12) for cfg in made)
    assert all(cfg.task_args == {"difficulty": 1} for cfg in made)


@pytest.mark.slow
def test_an_algorithms_own_state_goes_on(run, monkeypatch):
    """Each step has what the one before left, also in a resumed run, of any type and shape."""
    seen, real = [], grpo.train_step

    def train_step(agent, problems, step):
        seen.append({n: x.tolist() for n, x in agent.state.items()})
        agent.state = {"steps.done": torch.tensor(step), "rows": torch.arange(3)[:, None] < step}
        return real(agent, problems, step)
    monkeypatch.setattr(grpo, "train_step", train_step)
    run("run", "--steps", 1)
    run("run", "--resume", "--steps", 2)
    assert seen == [{}, {"steps.done": 1, "rows": [[True], [False], [False]]}]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["reinforce", "ppo", "remax"])
def test_algorithms_without_groups_need_one_completion_per_prompt(algo, run, monkeypatch, capsys):
    """It has no spread, so nothing may be divided by that, nor told of it."""
    batches, real = [], grpo.update
    monkeypatch.setattr(grpo, "update", lambda agent, batch, rng: batches.append(batch) or real(agent, batch, rng))
    out = run("run", "--algo", algo, "--group", 1, "--prompts", 6, "--steps", 4, "--warm_steps", 60)
    assert "dead_groups" not in metrics(out)[-1] and "all rewards of every group" not in capsys.readouterr().out
    assert len(batches) == 4 and all(len(batch.ids) == 6 for batch in batches)
    for batch in batches:
        total = batch.reward.sum(1, keepdim=True)
        assert len(set(total[:, 0].tolist())) > 1 and torch.isfinite(batch.adv).all()
        if algo == "reinforce":
            assert torch.equal(batch.adv, total * batch.mask)
        elif algo != "remax":           # whitened over the step's tokens
            adv = batch.adv[batch.mask]
            assert abs(adv.mean()) < 1e-5 and abs(adv.std(correction=0) - 1) < 1e-5
    one, other = (load((out / where / "model.safetensors").read_bytes()) for where in ("", "warm_start"))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def two_groups(params, lr):
    """Matrices with one rate, the rest with another, as for Muon beside Adam."""
    flat = [p for p in params if p.dim() < 2]
    return torch.optim.SGD([dict(params=[p for p in params if p.dim() > 1]), dict(params=flat, lr=10 * lr)], lr, momentum=0.9)


OPTIMIZERS = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr),
    "AdamW, amsgrad": lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True, fused=True),
    "Adafactor": lambda params, lr: torch.optim.Adafactor(params, lr), "two groups": two_groups}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_any_optimizer(name, run, monkeypatch):
    """Its own state decides what is kept: weights, state and rates are those of a run that did not stop."""
    def new_optimizer(agent):
        return OPTIMIZERS[name]([*agent.policy.parameters()], agent.cfg.lr)
    first = run("first", "--steps", 1)                      # its warm start is made by AdamW
    monkeypatch.setattr(grpo, "new_optimizer", new_optimizer)
    start = ["--init", first / "warm_start", "--warm_steps", 0, "--half_life", 1]
    whole, half = run("whole", *start, "--steps", 4), run("half", *start, "--steps", 2)
    run("half", "--resume", "--steps", 4)
    one, other = (checkpoint.load(where, Config)[1].tensors for where in (whole, half))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    begun = load((first / "warm_start" / "model.safetensors").read_bytes())
    ended = load((whole / "model.safetensors").read_bytes())
    assert any(not torch.equal(begun[n], ended[n]) for n in begun)
    assert any(n.startswith("opt.") for n in one) is (name != "SGD")


def test_every_groups_rate_halves(run, monkeypatch):
    rates, real = [], grpo.update

    def update(agent, *given):
        rates.append([group["lr"] for group in agent.opt.param_groups])
        return real(agent, *given)
    monkeypatch.setattr(grpo, "new_optimizer", lambda agent: two_groups([*agent.policy.parameters()], agent.cfg.lr))
    monkeypatch.setattr(grpo, "update", update)
    run("run", "--steps", 3, "--half_life", 1)
    assert rates == [pytest.approx([5e-3 * x, 5e-2 * x]) for x in (1, 0.5, 0.25)]


@pytest.mark.slow
def test_evaluations_and_saves_are_as_they_were_or_as_they_are_to_be(run):
    out = run("run", "--steps", 2, "--eval_every", 2, "--save_every", 2)
    assert evaluated(out) == [0, 2] and run.saved == [2]        # not before there is a step
    run("run", "--resume", "--steps", 5)
    assert evaluated(out) == [0, 2, 4, 5] and run.saved == [4, 5]
    run("run", "--resume", "--steps", 8, "--eval_every", 1, "--save_every", 3)
    assert evaluated(out) == [0, 2, 4, 5, 6, 7, 8] and run.saved == [6, 8]
    run("run", "--resume", "--steps", 9)            # what was changed is the run's own now
    assert evaluated(out)[-2:] == [8, 9] and checkpoint.load(out, Config)[0].save_every == 3


@pytest.mark.slow
def test_a_run_goes_on_with_its_task(run, capsys, monkeypatch, tmp_path):
    """A task in data/ needs no flag, a file must be named, and another task is refused."""
    out = run("run", "--steps", 1)
    assert "to allow it, add --task" in fault(capsys, "--resume", "--out", out)
    main([*SMALL, "--task", "guess", "--prompts", "2", "--group", "2", "--max_new", "16", "--steps", "1", "--held_out", "2",
          "--out", str(tmp_path / "guess")])
    assert resumed("--out", tmp_path / "guess")[0].task == "guess"
    assert "has --task guess, not arithmetic" in fault(capsys, "--resume", "--task", "arithmetic", "--out", tmp_path / "guess")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "test"])
def test_the_problems_are_those_of_the_beginning(name, tmp_path, capsys):
    """No other content, neither at the same path nor at another; a file that is touched or moved is the same."""
    rows = [json.dumps({"question": f"{i} and {i}?", "answer": f"#### {i + i}"}) + "\n" for i in range(12)]
    paths = {part: tmp_path / f"{part}.jsonl" for part in ("train", "test")}
    for path in paths.values():
        path.write_text("".join(rows))
    out, file, other = tmp_path / "run", paths[name], tmp_path / "other"
    main([*SMALL, "--task", "gsm8k", "--train", str(paths["train"]), "--test", str(paths["test"]), "--prompts", "2",
          "--group", "2", "--max_new", "4", "--warm_steps", "0", "--steps", "1", "--out", str(out)])
    other.write_text("".join(rows[:-1]))
    resume = ["--resume", "--steps", 2, "--out", out]               # the folder names the task
    assert f"has --{name} {file}, not {other}" in fault(capsys, *resume, f"--{name}", other)
    file.write_text("".join(rows[:-1]))
    assert f"{file} has changed since the run in" in fault(capsys, *resume)
    file.unlink()
    other.write_text("".join(rows))
    assert f"{file}, a file of the run in {out}, is gone: if it was moved, add --{name} FILE" in fault(capsys, *resume)
    main([*map(str, resume), f"--{name}", str(other)])
    assert metrics(out)[-1]["step"] == 2
    main(["--resume", "--steps", "3", "--out", str(out)])           # it is known from now on
    assert metrics(out)[-1]["step"] == 3 and checkpoint.load(out, Config)[0].task_args[name] == str(other)


@pytest.mark.slow
def test_an_evaluation_needs_only_the_files_that_it_reads(tmp_path, capsys):
    """Of a run whose files have been moved it is told where those are."""
    rows = "".join(json.dumps({"question": f"{i} and {i}?", "answer": f"#### {i + i}"}) + "\n" for i in range(12))
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for path in files:
        path.write_text(rows)
    main([*SMALL, "--task", "gsm8k", "--train", str(files[0]), "--test", str(files[1]), "--prompts", "2",
          "--group", "2", "--max_new", "4", "--warm_steps", "0", "--steps", "0", "--out", str(tmp_path / "run")])
    evaluate = ["--eval_only", "--init", str(tmp_path / "run")]
    files[0].unlink()
    main(evaluate)
    files[1].rename(tmp_path / "moved.jsonl")
    assert "gsm8k needs --test FILE" in fault(capsys, *evaluate)
    main([*evaluate, "--test", str(tmp_path / "moved.jsonl")])
    assert "greedy 0.0%" in capsys.readouterr().out


@pytest.mark.slow
def test_a_task_in_a_file_that_was_moved(run, tmp_path, capsys):
    out = run("run", "--steps", 1)
    moved, other = tmp_path / "elsewhere.py", tmp_path / "other.py"
    moved.write_text(TASK)
    other.write_text(TASK + "# another\n")
    (tmp_path / "letters.py").unlink()
    resume = ["--resume", "--steps", 2, "--out", out]
    assert f"to allow it, add --task {tmp_path / 'letters.py'}" in fault(capsys, *resume)
    assert f"has --task {tmp_path / 'letters.py'}, not {other}" in fault(capsys, *resume, "--task", other)
    main([*map(str, resume), "--task", str(moved)])
    assert metrics(out)[-1]["step"] == 2 and checkpoint.load(out, Config)[0].task == str(moved)
    main(["--ask", "ab=", "--init", str(out), "--task", str(moved)])


@pytest.mark.slow
def test_what_a_run_tells(run, capsys):
    """Each line that stands for a number in metrics.jsonl, in its place; the page at the end is of the whole run."""
    out = run("run", "--steps", 1, "--iterations", 2, "--eval_every", 1, "--reward", "model")
    said = [line for line in capsys.readouterr().out.splitlines()
            if not line.startswith((" ", "--reward model implies", "note", "memory", "warm start", "reward model 1/"))]
    results = metrics(out)

    def shares(m):
        return "  ".join(f"{name} {m[name]:.1%}" for name in ("greedy", "pass@1", "pass@2", "maj@2"))

    def told(m):
        return f"reward model  held out: accuracy {m['rm_accuracy']:.1%}  calibration error {m['rm_error']:.3f}"
    assert said[0] == "the warm start comes first, then 2 steps of RL"
    assert said[1].endswith(" on cpu in float32; 30 problems, 6 held out; 3 x 4 rows a step, --lr 0.005")
    assert said[2::3][:3] == [f"step {m['step']}  held out: {shares(m)}" for m in results]
    assert said[3::3][:2] == [told(m) for m in results[1:]]
    assert [line.split("  accuracy")[0] for line in said[4::3][:2]] == [f"step {m['step']}/2  reward {m['reward']:.3f}" for m in results[1:]]
    assert said[9] == f"curves, and completions token by token: {out / 'report.html'}" and "ask it: python grpo.py --task" in said[10] and len(said) == 11
    page = (out / "report.html").read_text()
    assert f'"rm_error":{results[-1]["rm_error"]}' in page


# ---------------------------------------------------------------------------------- several iterations

@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 3])
def test_iterations_go_on_where_they_were_and_nobody_overwrites_them(kill_at, run, capsys, tmp_path):
    """Two of two steps; the second begins with a new reference, which stays."""
    more = ["--iterations", 2, "--beta", 0.1, "--save_every", 1, "--half_life", 3]
    whole = run("whole", *more)
    out = run("cut", *more, kill_at=kill_at)
    if kill_at > 1:
        begin = ["--task", tmp_path / "letters.py", *SMALL, *more, "--out", out]
        assert f"{out} holds a run stopped at step {kill_at - 1}" in fault(capsys, *begin)
    assert "has --steps 2, not 3" in fault(capsys, "--resume", "--task", tmp_path / "letters.py", "--steps", 3, "--out", out)
    run("cut", "--resume")
    assert metrics(out) == metrics(whole) and [m["step"] for m in metrics(out)] == [0, 1, 2, 3, 4]
    for name in ("model.safetensors", "samples.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


# ------------------------------------------------------------------------------- the best policy so far

BEST = ("model.safetensors", "run.json", "best.json")


def bytes_in(folder):
    """The bytes of a run's files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in ("lock", "README.md")}


def bytes_of(folder, *names):
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.slow
def test_the_best_policy_is_kept(run, monkeypatch, capsys, tmp_path):
    """The one with the highest pass@1, the first of several, also over a resume; it can be evaluated and asked with the
    settings of the run, and a run can begin with it."""
    shares, seen, real = iter([0.1, 0.3, 0.3, 0.2, 0.4, 0.35]), {}, grpo.evaluate

    def evaluate(agent, problems):
        seen[len(seen)] = {n: p.detach().clone() for n, p in agent.policy.named_parameters()}
        return real(agent, problems) | {"pass@1": next(shares)}
    monkeypatch.setattr(grpo, "evaluate", evaluate)

    def kept(step):
        """Whether best/ has the policy of that evaluation."""
        held = load((out / "best" / "model.safetensors").read_bytes())
        note = json.loads((out / "best" / "best.json").read_text())
        return note["step"] == step and {"greedy", "pass@1"} <= {*note} and all(
            torch.equal(held[f"model.{n}"], p) for n, p in seen[step].items())
    out = run("run", "--steps", 1, "--eval_every", 1)
    before = bytes_of(out / "best", *BEST)
    run("run", "--resume", "--steps", 3)
    assert kept(1) and bytes_of(out / "best", *BEST) == before
    assert not torch.equal(seen[1]["embed_tokens.weight"], seen[3]["embed_tokens.weight"])
    run("run", "--resume", "--steps", 5)
    assert kept(4) and (out / "best" / "run.json").read_text() == (out / "run.json").read_text()
    monkeypatch.setattr(grpo, "evaluate", real)
    task, best = ["--task", str(tmp_path / "letters.py")], str(out / "best")
    capsys.readouterr()
    main([*task, "--eval_only", "--init", best])
    assert f"greedy {json.loads((out / 'best' / 'best.json').read_text())['greedy']:.1%}" in capsys.readouterr().out
    main([*task, "--ask", "ab=", "--init", best])
    assert len(capsys.readouterr().out) <= len("ab=") + 5 + 1       # --max_new of the run
    again = run("again", "--init", best, "--warm_steps", 0, "--steps", 1)
    assert not (again / "best").exists()                            # without --eval_every


@pytest.mark.slow
@pytest.mark.parametrize("change", ["--held_out", "--samples"])
def test_the_best_policy_is_that_of_one_measure(change, run, monkeypatch):
    """An evaluation on other problems, or of other samples, is no match for an earlier one: the search begins anew."""
    shares = iter([0.9, 0.2, 0.1, 0.3])
    monkeypatch.setattr(grpo, "evaluate", lambda agent, problems: {"greedy": 0.0, "pass@1": next(shares)})
    out = run("run", "--steps", 1, "--eval_every", 1)
    best = lambda: json.loads((out / "best" / "best.json").read_text())
    assert best() == {"step": 0, "greedy": 0.0, "pass@1": 0.9}
    run("run", "--resume", "--steps", 2, change, 1)
    assert best()["step"] == 2 and best()["pass@1"] == 0.1
    run("run", "--resume", "--steps", 3)
    assert best()["step"] == 3


# ------------------------------------------------------------------------ a kill between two writes

@pytest.fixture
def scored(monkeypatch):
    """A dict, to be filled, of the pass@1 of each step's evaluation."""
    shares, step, real = {}, [0], grpo.train_step

    def train_step(agent, problems, at):
        step[0] = at
        return real(agent, problems, at)
    monkeypatch.setattr(grpo, "train_step", train_step)
    monkeypatch.setattr(grpo, "evaluate", lambda agent, problems: {"greedy": 0.0, "pass@1": shares[step[0]]})
    return shares


@contextlib.contextmanager
def killed_before(path):
    """A context in which the process ends when it begins to write a file."""
    real = files.replacing

    @contextlib.contextmanager
    def replacing(given):
        if given == path:
            raise Killed
        with real(given) as beside:
            yield beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "replacing", replacing)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("samples", [2, 3])
def test_a_kill_while_the_best_policy_is_written(samples, run, scored, tmp_path):
    """Whatever is there by then, the step is made again, and best/ has its policy; also if from now on another measure
    counts, by which no policy is as good as by the old one."""
    scored.update({0: 0.1, 1: 0.5, 2: 0.6 if samples == 2 else 0.4, 3: 0.2})
    begun = run("begun", "--steps", 1, "--eval_every", 1)
    for name in (None, *BEST):
        out = tmp_path / f"before {name}"
        shutil.copytree(begun, out)
        before, goes_on = bytes_of(out / "best", *BEST), ["--resume", "--steps", 3, "--samples", samples]
        if name:
            with killed_before(out / "best" / name):
                run(out.name, *goes_on)
            assert metrics(out)[-1]["step"] == 1                                        # it was killed in step 2
            assert (bytes_of(out / "best", BEST[0]) == before[:1]) is (name == BEST[0])
        run(out.name, *goes_on)
        assert json.loads((out / "best" / "best.json").read_text())["step"] == 2
        about = files.about(out / "best")["config"]
        assert (about["steps"], about["samples"]) == (3, samples)
        whole = tmp_path / "before None" / "best"
        assert bytes_of(out / "best", BEST[0], BEST[2]) == bytes_of(whole, BEST[0], BEST[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.safetensors"])
def test_a_kill_while_the_last_step_is_saved(name, run):
    """The checkpoint comes last: the run is not complete without it, and writes all files again."""
    whole = run("whole", "--steps", 2)
    out = run("cut", "--steps", 2, "--save_every", 1, kill_at=2)
    with killed_before(out / name):
        run("cut", "--resume")
    assert metrics(out)[-1]["step"] == 2 and checkpoint.load(out, Config)[1].step == 1
    saved = bytes_of(out, "model.safetensors") == bytes_of(whole, "model.safetensors")
    assert saved is (name == "checkpoint.safetensors")
    run("cut", "--resume")
    assert metrics(out) == metrics(whole) and checkpoint.load(out, Config)[1].step == 2
    assert bytes_of(out, "model.safetensors", "samples.jsonl") == bytes_of(whole, "model.safetensors", "samples.jsonl")
    shown, = shown_data(out / "report.html")            # no step twice, and none of before alone
    assert [m["step"] for m in shown["metrics"]] == [0, 1, 2] and len(shown["samples"]) == 4


# ------------------------------------------------------------------------------------ after the run

@pytest.mark.slow
def test_a_run_from_a_model_is_evaluated_and_asked_with_its_own_weights(run, tmp_path, capsys):
    """Not with those of the model that it began with, wherever --init is in its settings."""
    start = run("start", "--steps", 0)
    out = run("run", "--init", start, "--warm_steps", 0, "--steps", 3, "--lr", 0.05)
    before, after = (load((where / "model.safetensors").read_bytes()) for where in (start, out))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    task, said = ["--task", str(tmp_path / "letters.py")], []
    for given in (["--out", out], ["--init", out], ["--init", start]):
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpo, "evaluate", lambda agent, held_out: found.append(agent) or {"greedy": 0.0})
            main([*task, "--eval_only", *map(str, given)])
        said.append({name: p.detach() for name, p in found[0].policy.named_parameters()})
    for held, weights in zip(said, (after, after, before)):
        assert all(torch.equal(p, weights[f"model.{name}"]) for name, p in held.items() if name != "lm_head.weight")


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [0, 1])
def test_a_run_that_was_killed_before_its_first_step_begins_anew(kill_at, run):
    """Without what it left; run.json says what made the new one."""
    out = run("run", "--steps", 3, "--eval_every", 1, kill_at=kill_at)
    assert (out / "best").exists()
    run("run", "--steps", 1)
    assert evaluated(out) == [0, 1] and not (out / "best").exists()
    about = json.loads((out / "run.json").read_text())
    assert about.pop("config")["steps"] == 1
    assert about.pop("data").keys() == {"task"}
    assert about == {"command": sys.argv, "versions": {"python": platform.python_version(), "torch": torch.__version__}}


@pytest.mark.parametrize("steps, made", [(0, False), (1, True)])
def test_a_warm_start_of_a_single_step_is_one(steps, made, run):
    assert (run("run", "--warm_steps", steps, "--steps", 0) / "warm_start" / "warm_start.json").exists() is made


@pytest.mark.slow
def test_a_run_holds_the_lock_of_its_folder(run, monkeypatch):
    """From before its first evaluation to its end; also one that takes the place of another, with which the lock is not moved."""
    held, real = [], grpo.evaluate

    def evaluate(agent, problems):
        with open(agent.cfg.folder / "lock") as f, pytest.raises(BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append((agent.cfg.folder / "lock").stat().st_ino)
        return real(agent, problems)
    monkeypatch.setattr(grpo, "evaluate", evaluate)
    out = run("run", "--steps", 1)
    first = metrics(out)
    run("run", "--steps", 1, "--seed", 7)
    assert len(held) == 4 and len({*held}) == 1
    with open(out / "lock") as f:                               # it is let go in the end
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert metrics(out / "previous") == first != metrics(out) and not (out / "previous" / "lock").exists()


@pytest.mark.slow
def test_no_finished_run_is_lost(run, capsys):
    """Each that gives way is kept in a folder of its own, with its best policy, and can be gone on with."""
    kept = []
    for seed in range(4):
        out = run("run", "--steps", 1, "--seed", seed, "--eval_every", 1)
        kept.append(metrics(out))
    folders = [out / "previous", out / "previous2", out / "previous3"]
    assert [metrics(folder) for folder in folders] == kept[:3] and kept[0] != kept[1] != kept[2] != kept[3] == metrics(out)
    assert [checkpoint.load(folder, Config)[1].step for folder in folders] == [1, 1, 1]
    assert all((folder / "best" / "model.safetensors").exists() for folder in folders)
    assert f"was moved to {folders[2]}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_moved_when_it_is_killed(run, capsys, tmp_path):
    """Before any of its files, or before their folder gets its name: the next run moves the rest, and nothing else."""
    begun = run("begun", "--steps", 1, "--eval_every", 1)
    (begun / "README.md").write_text("mine")                    # it may be anybody's folder
    files_of = bytes_in(begun)
    last = len(files_of) + 1                                    # after the files and best/
    for n in range(last + 1):
        out, moves, real = tmp_path / f"killed {n}", [], files.os.replace
        shutil.copytree(begun, out)

        def replace(*given):
            """The real one; the process ends before its n-th."""
            if len(moves) == n:
                raise Killed
            moves.append(given)
            real(*given)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(files.os, "replace", replace)
            files.keep_previous(out)
        if n:                           # nothing can be resumed, which would write among what is moved
            assert "no run in" in fault(capsys, "--resume", "--out", out, "--task", tmp_path / "letters.py", "--steps", 2)
        assert len(moves) == n and not (out / "previous").exists()
        if n == last:
            run(out.name, "--steps", 0)
        else:
            files.keep_previous(out)
        assert bytes_in(out / "previous") == files_of and (out / "README.md").read_text() == "mine"
        assert (out / "previous" / "best" / "best.json").exists() and not (out / "best").exists()
        assert not (out / files.MOVING).exists()


@pytest.mark.slow
def test_a_copy_goes_on_alone(run, tmp_path, monkeypatch):
    """A folder that was copied or moved is a run of its own, though its settings name the first one."""
    out, copy = run("run", "--steps", 2), tmp_path / "elsewhere" / "out" / "letters"
    shutil.copytree(out, copy)
    before = bytes_in(out)
    monkeypatch.chdir(tmp_path / "elsewhere")
    main(["--resume", "--steps", "3", "--task", str(tmp_path / "letters.py")])
    assert bytes_in(out) == before and json.loads((copy / "run.json").read_text())["config"]["out"] == "out/letters"
    run("run", "--resume", "--steps", 3)
    assert metrics(out) == metrics(copy)


# -------------------------------------------------------------------------------------- warm starts

def test_a_task_may_name_the_model_to_begin_with(run, tmp_path):
    """In its DEFAULTS, where a warm start is no longer what comes first; a flag goes before it."""
    start = run("start", "--steps", 0)
    (tmp_path / "letters.py").write_text(TASK + f"DEFAULTS['init'] = {str(start)!r}\n")
    cfg = grpo.make_config(task=str(tmp_path / "letters.py"))
    assert (cfg.init, cfg.warm_steps, cfg.warm_lr) == (str(start), 0, 2e-5)
    assert grpo.make_config(task=str(tmp_path / "letters.py"), init="").warm_steps == Config.warm_steps
    main(["--task", str(tmp_path / "letters.py"), "--steps", "1", "--samples", "2", "--device", "cpu", "--out",
          str(tmp_path / "run")])
    assert not (tmp_path / "run" / "warm_start").exists() and metrics(tmp_path / "run")[0] == metrics(start)[0]


@pytest.mark.slow
def test_a_start_is_kept_with_its_note_at_the_end(run, monkeypatch):
    """A run that is killed in between has no note, and its weights are not taken for a start."""
    class Stop(Exception):
        pass
    kept, real = [], files.replacing

    @contextlib.contextmanager
    def replacing(path):
        if path.parent.name == "warm_start":
            kept.append(path.name)
            if path.name == "warm_start.json" and kept.count(path.name) in (1, 3):
                raise Stop
        with real(path) as beside:
            yield beside
    monkeypatch.setattr(files, "replacing", replacing)
    with pytest.raises(Stop):
        run("run", "--steps", 0)
    files.LOCK.close()
    assert kept[-1] == "warm_start.json" and {"model.safetensors", "config.json", "tokenizer.json"} <= {*kept[:-1]}
    out = run("run", "--steps", 0)                  # makes a new one, and takes it the next time
    assert (out / "warm_start" / "warm_start.json").exists() and kept.count("model.safetensors") == 2
    run("run", "--steps", 1)
    assert kept.count("model.safetensors") == 2
    with pytest.raises(Stop):                       # another one, in its place: the old note is not the new weights'
        run("run", "--steps", 1, "--warm_steps", 13)
    files.LOCK.close()
    assert kept.count("model.safetensors") == 3 and not (out / "warm_start" / "warm_start.json").exists()


