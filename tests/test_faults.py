"""What a task returns wrongly is one line; an exception in a person's code is a traceback."""
import fcntl
import itertools
import json
import multiprocessing
import signal
import sys
import time
import traceback
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import agent_of, batch_of_rows, fault, metrics

import data
import grpo
import reward
from data import UserError
from run import checkpoint, dist, files, setup, signals

P = SimpleNamespace(prompt="1+1=")
TOP = '''
import os, math
from types import SimpleNamespace as P
DEFAULTS = dict(steps=3, prompts=2, group=2, max_new=4, n_layer=1, n_embd=32, warm_steps=2,
                held_out=2, samples=1, save_every=1)
MADE = [P(prompt=f"{i}?") for i in range(9)]
MADE[0].prompt *= 9
CALLS = []
'''
# A task's functions, and what they return.
FUNCTIONS = {"problems()": "MADE[2:], MADE[:2]", "answer(said)": "''", "steps(problem, said)": "[]",
             "demonstration(problem, rng)": "'ab'", "reward(problem, said)": "{'correct': 0.0}",
             "rewards(problems, said, tokens, finished)": "", "reply(problem, said)": ""}


def task(folder, **code):
    """The path of a task, in whose functions some code comes first."""
    text = TOP
    for head, value in FUNCTIONS.items():
        first = code.get(head.partition("(")[0], "pass" if value else "")
        if first:
            text += f"def {head}:\n    {first}\n    return {value}\n"
    (folder / "t.py").write_text(text + code.get("more", ""))
    return folder / "t.py"


# ---------- what a task returns

OF_REWARD = "the reward of the prompt '2?'"
DICT, SHARE, NUMBER = "a dict with 'correct'", "from 0 (wrong) to 1 (right)", "be a bool, int or"
NUMBERS = ("1e39", "-1e39", "10 ** 400", "1.0000001e15", "math.inf", "math.nan", "'1'", "P")
NAMES = ("pass@1", "pass", "maj", "x@y", "turns", "greedy", "reward_seconds", "step", 1)


@pytest.mark.parametrize("function, returned, says", [
    ("problems", ["None", "MADE", "(MADE, MADE, MADE)", "None, MADE", "MADE, 7"], "two lists"),
    ("problems", ["[P(prompt=7)], MADE", "MADE, [{'prompt': 'x'}]", "MADE, [P()]"], "an object"),
    ("problems", ["[], MADE"], "no training problems"), ("problems", ["MADE, []"], "no held-out"),
    ("reward", ["None", "1.0", "{'size': 1}", "[('correct', 1)]", "(x for x in ())"],
     f"{OF_REWARD} must be {DICT}"),
    ("reward", [f"{{'correct': {x}}}" for x in (2, -1, 1.001, -0.001, 1e15)], SHARE),
    ("reward", ["{'correct': 1, 'x': %s}" % x for x in NUMBERS], f"'x' in {OF_REWARD}"),
    ("reward", ["{'correct': math.nan}", "{'correct': 'yes'}"], NUMBER),
    ("reward", ["{'correct': 1, %r: 0.9}" % x for x in NAMES], "have a name that no stat"),
    ("rewards", ["None", "[]", "({'correct': 1},) * 2", "[{'correct': 1}]"], "a list of 2 dicts"),
    ("rewards", ["[None] * 2", "[1, 2]"], DICT),
    ("answer", ["None", "7.5", "['7']"], "function answer"),
    ("demonstration", ["None", "['a']"], "the demonstration of the prompt '2?' must be a string"),
    ("reply", ["7", "['a']", "0.5"], "the reply to the prompt '2?' must be a string or None"),
    ("steps", ["None", "((1, True),)"], "must be a list of (end, truth)"),
    ("steps", ["[(len(said), 1)]"], "integer ends that never decrease, here from 1 to 0"),
    ("steps", ["[1]", "[(1, True, 2)]"], "must be pairs (end, truth)"),
    ("steps", [f"[({x}, 1)]" for x in ("True", "1.0", "0", "3", "None")], "here from 1 to 2"),
    ("steps", ["[(2, 1), (1, 1)]"], "integer ends that never decrease, here from 2 to 2"),
    ("steps", [f"[(1, {x})]" for x in ("2", "0.5", "None", "[1]")], "be True or False")])
def test_what_a_task_returns_wrongly_is_one_line(function, returned, says, tmp_path, capsys):
    out = tmp_path / "out"
    for value in returned:
        path = task(tmp_path, **{function: f"return {value}"})
        line = fault(capsys, "--task", path, "--supervision", "process", "--out", out)
        assert says in line and len(line) < 500, value
    assert not out.exists()


@pytest.mark.parametrize("x", [0, 1, True, 0.5, Fraction(1, 3), 1 + 2e-16, -1e-17])
def test_correct_is_a_share(x):
    parts, task = {"correct": x, "more": -1e15}, SimpleNamespace(reward=lambda *given: parts)
    assert data.rewards_of(task, [P], "a", [1], [True]) == [parts]


def test_a_completion_that_is_cut_off_keeps_its_penalties():
    """It once earned 0, and a wrong one that ended -1; nor may it earn anything."""
    def judge(problem, text):
        right = text == "2"
        return {"correct": float(right), "wrong": right - 1, "format": 0.2, "x": -len(text) / 100}
    rows = [(b"?", text) for text in (b"2", b"3", b"2", b"3", b"3333")]
    b = batch_of_rows(rows, finished=torch.tensor([True, True, False, False, False]))
    b.problems, agent = [P] * 5, agent_of(grpo.Config(group=1), SimpleNamespace(reward=judge))
    b.texts, b.components = reward.by_rule(agent, b)
    found = torch.stack([*b.components.values()], 1)
    torch.testing.assert_close(found, torch.tensor([
        [1, 0, 0.2, -0.01], [0, -1, 0.2, -0.01], [0, 0, 0, -0.01], [0, -1, 0, -0.01],
        [0, -1, 0, -0.04]]))
    torch.testing.assert_close(reward.of_rule(agent, b)[0].sum(1), found.sum(1))


def test_a_task_may_change_what_it_is_given():
    """And fill one dict anew: neither the logs nor the next function sees it."""
    def clears(*given):
        for x in given:
            if isinstance(x, list):
                x[:] = [None] * len(x)
        return {"correct": 0.0} if len(given) == 2 else ""

    def empties(problems, completions, tokens, finished):
        completions[0].clear()
        clears(problems, completions, tokens, finished)
        return [{"correct": 1.0}]
    problems, said, tokens, finished = [P], ["?a", "1", "end"], [3], [True]
    own = SimpleNamespace(reward=clears, answer=clears, steps=clears)
    for judge in own, SimpleNamespace(rewards=empties):
        data.rewards_of(judge, problems, [said], tokens, finished)
    data.answer_of(own, said)
    data.steps_of(own, P, said)
    assert (problems, said, tokens, finished) == ([P], ["?a", "1", "end"], [3], [True])
    one = {}
    judge = SimpleNamespace(reward=lambda p, text: one.update(correct=float(text == "a")) or one)
    rows = data.rewards_of(judge, [P] * 3, "aba", [1] * 3, [True] * 3)
    assert [row["correct"] for row in rows] == [1, 0, 1]


def test_a_process_that_is_no_fork_imports_a_task(tmp_path, monkeypatch):
    """By its file, unless the name is another module's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = task(tmp_path).rename(tmp_path / "judge.py")
    answer = data.load_task(str(path)).answer
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(answer, "x").get(300) == ""
    for name in ("a.b.py", "signal.py"):
        data.load_task(str(path := path.rename(tmp_path / name)))
    assert sys.modules["signal"] is signal


def test_the_time_of_rewards_and_steps_is_counted(monkeypatch):
    """By a clock that goes on by 1 whenever it is read."""
    def right(*given):
        return [{"correct": 1.0}] if len(given) == 4 else {"correct": 1.0}
    monkeypatch.setattr(data.time, "perf_counter", itertools.count().__next__)
    before = data.SPENT[0]
    data.rewards_of(SimpleNamespace(reward=right), [P], "a", [1], [True])
    data.rewards_of(SimpleNamespace(rewards=right), [P], "a", [1], [True])
    data.steps_of(SimpleNamespace(steps=right), P, "a")
    assert data.SPENT[0] - before == 3


# ---------- tracebacks

def raised(*args):
    with pytest.raises(BaseException) as e:
        grpo.main([*map(str, args)])
    return traceback.format_exception_only(e.value), e.value


@pytest.mark.parametrize("function, code, says", [
    ("problems", "1 / 0", "the function problems"), ("answer", "1 / 0", "the function answer"),
    ("steps", "1 / 0", "function steps, for the prompt '2?'"),
    ("rewards", "1 / 0", "function rewards"),
    ("demonstration", "1 / 0", "the demonstration of the prompt '2?'"),
    ("reply", "1 / 0", "the reply to the prompt '2?'"), ("reward", "1 / 0", OF_REWARD),
    ("reward", "open('/none/x')", OF_REWARD), ("reward", "import helper", OF_REWARD),
    ("reward", "raise RuntimeError('gloo: my own')", OF_REWARD),
    ("reward", "exit()", f"{OF_REWARD} calls exit()"),
    ("more", "1 / 0", "the import of "), ("more", "x = (", "the import of "),
    ("more", "exit()", "t.py calls exit()")])
def test_an_exception_of_a_task_is_a_traceback(function, code, says, tmp_path, monkeypatch):
    """Of where it was raised, which function, which prompt; an OSError too, elsewhere one line."""
    (tmp_path / "helper.py").write_text("open('/none/x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = task(tmp_path, **{function: code})
    lines, e = raised("--task", path, "--supervision", "process", "--out", tmp_path / "out")
    assert says in "".join(lines[-2:])
    assert type(e) not in (UserError, SystemExit) and not (tmp_path / "out").exists()
    assert ", given ''" in lines[-1] or (function, code) != ("reward", "1 / 0")
    assert ", given ['', " in lines[-1] or function != "rewards"
    if code == "1 / 0":
        last = traceback.extract_tb(e.__traceback__)[-1]
        assert (last.filename, last.line) == (str(path), code)


@pytest.mark.slow
@pytest.mark.parametrize("code, says", [
    ("1 / 0", "ZeroDivisionError"), ("return {'correct': 2}", SHARE)])
def test_a_run_that_fails_goes_on(code, says, tmp_path, capsys, monkeypatch):
    """From its last checkpoint, wherever the reward has gone."""
    monkeypatch.chdir(tmp_path)
    away = "os.makedirs('e', exist_ok=True); os.chdir('e')"
    task(tmp_path, reward=f"{away}; CALLS.append(0)\n    if len(CALLS) > 10: {code}")
    args = ["--task", "t.py", "--out", "o"]
    if says == SHARE:
        lines = [fault(capsys, *args)]
    else:
        lines, _ = raised(*args)
        assert lines[-1].endswith("; continue with: python grpo.py --resume --out o --task t.py\n")
    assert says in "".join(lines) and "the reward of the prompt" in "".join(lines)
    monkeypatch.chdir(tmp_path)
    task(tmp_path, reward=away)
    grpo.main(["--resume", *args])
    assert f"--init {tmp_path}/o --ask" in capsys.readouterr().out
    assert [x["step"] for x in metrics(tmp_path / "o")] == [0, 1, 2, 3]
    monkeypatch.chdir(tmp_path)
    grpo.main([*args[:2], *"--init o --steps 0 --out n".split()])
    monkeypatch.chdir(tmp_path)
    grpo.main(["--resume", *args])
    assert "note: the run is complete" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    task(tmp_path, problems="1 / 0")        # of a new run, not of the one that is there
    assert "continue with" not in "".join(raised(*args)[0])
    task(tmp_path, problems="open('/none/x')")
    assert "problems cannot be read: [Errno 2] No such" in fault(capsys, *args)


# ---------- problems, processes

@pytest.mark.parametrize("field", ["prompt", "answer"])
def test_other_problems_on_resume_are_noted(field, tmp_path, capsys):
    """Those that differ between calls; not fewer held-out ones, which is a setting."""
    path = task(tmp_path, problems=f"MADE[0].{field} = 'ab'[os.path.exists(__file__ + 'x')]")
    args = ["--task", str(path), "--out", str(tmp_path / "out"), "--warm_steps", "0"]

    def found(*more):
        """Whether they are noted; and what run.json has of them."""
        grpo.main([*args, *more])
        noted = "the problems are others than when" in capsys.readouterr().out
        return noted, files.about(tmp_path / "out")["data"]["problems of t {}"]
    noted, was = found("--steps", "0")
    assert not noted and found("--resume", "--held_out", "1") == (False, was)
    (tmp_path / "t.pyx").touch()
    new = ["--steps", "0", "--out", str(tmp_path / "new"), "--init", str(tmp_path / "out")]
    assert found("--eval_only")[0] and found(*new)[0]
    assert found("--resume") == (True, was)         # as it began


def test_problems_are_compared_with_those_of_the_same_task(tmp_path, capsys):
    """In the folder of a run and, as that of its warm start, in the one above."""
    was = {"config": {"task": "a/t.py"}, "data": {"problems of t {'n': 1}": "x"}}
    (tmp_path / "run.json").write_text(json.dumps(was))
    for task, n, which, noted in (
            ("t.py", 1, "y", 1), ("t.py", 2, "y", 0), ("u.py", 1, "y", 0), ("t.py", 1, "x", 0)):
        name, = setup.fingerprint(SimpleNamespace(task=f"x/{task}", task_args={"n": n}), [], [])
        checkpoint.compare(tmp_path / "warm_start", {name: which})
        assert capsys.readouterr().out.count("the problems are others") == noted


def test_ranks_must_have_the_same_problems(monkeypatch):
    cfg, one, two = grpo.Config(), *([SimpleNamespace(prompt=x) for x in y] for y in ("ab", "ba"))
    found = [str(setup.fingerprint(cfg, *x)) for x in ((one, two), (two, one), (one, one))]
    assert len({*found}) == 3
    monkeypatch.setattr(dist, "gather", lambda x: [x, "another"])
    with pytest.raises(UserError, match="the ranks have different problems"):
        setup.fingerprint(cfg, one, two)


def hides(x):
    """An object whose repr has its address."""
    made = type("Hides", (), {})()
    made.x = x
    return made


@pytest.mark.parametrize("one, same, other", [
    ("12", "12", "21"), ({0, 8}, {8, 0}, {0, 9}), ([{"a": {0, 8}}], [{"a": {8, 0}}], [{"b": {0}}]),
    (hides(hides(5)), hides(hides(5)), hides(hides(6))), ((1, 2), (1, 2), (2, 1)),
    (SimpleNamespace(y={0, 8}), SimpleNamespace(y={8, 0}), SimpleNamespace(y={0}))])
def test_a_problem_is_what_it_shows_of_itself(one, same, other):
    """Neither an address nor the order of a set, which differ between processes."""
    problems = [[SimpleNamespace(prompt="?", answer=x)] for x in (one, same, other)]
    first, second, third = (setup.fingerprint(grpo.Config(), x, []) for x in problems)
    assert first == second != third and "0x" not in data.shown([one, lambda: 0])


def test_a_problem_that_is_listed_twice_has_two_groups():
    """They go by objects."""
    two = SimpleNamespace(problems=lambda: ([P, P], [SimpleNamespace(prompt="b")]))
    (one, other), _ = setup.to_train_on(grpo.Config(), two)
    assert one is not other and vars(one) == vars(other)


def test_held_out_problems_that_are_trained_on_are_noted(capsys):
    """Of a game, with what it hides: here the digit."""
    game = dict(reply=print)
    for held_out, more, said in (("a7 b7", {}, "note: 2 of 2"), ("x7 b8 y7", {}, "note: 1 of 3"),
                                 ("x7 y7", {}, ""), ("a7", game, "note: 1 of 1"), ("a8", game, "")):
        parts = [[SimpleNamespace(prompt=x[0], hidden=x[1]) for x in words.split()]
                 for words in ("a7 b7", held_out)]
        setup.to_train_on(grpo.Config(), SimpleNamespace(problems=lambda: parts, **more))
        assert capsys.readouterr().out[:12] == said


def test_a_reward_may_end_the_processes_that_it_forks(tmp_path):
    """Their SIGTERM is not a wish to stop the run; nor do they hold its lock."""
    files.lock(tmp_path)
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def waits():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN        # Ctrl-C is the run's
        ready.set()
        time.sleep(60)
    with signals.stoppable():
        child = context.Process(target=waits)
        child.start()
        assert ready.wait(300)
        files.LOCK.close()                  # as if the run had been killed
        with open(tmp_path / files.MARK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.terminate()
        child.join(300)
    assert child.exitcode == -signal.SIGTERM and not signals.ASKED
