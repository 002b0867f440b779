"""What goes wrong in a task's own code or files: a line says where, and the run's folder and numbers stay sound."""
import fcntl
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from test_reward import WORK, agent_of, batch_of, scored

import data
import grpo
import reward
from data import UserError, gsm8k
from run import dist, files, pretrained, report, setup

P = SimpleNamespace(prompt="1+1=")
TASK = '''
import os
from types import SimpleNamespace as Problem
DEFAULTS = dict(steps=2, prompts=2, group=4, max_new=4, n_layer=1, n_embd=32, warm_steps=2, held_out=2, samples=2, save_every=1)

def problems():
    made = [Problem(prompt=f"{i}+1=", answer=str(i + 1)) for i in range(12)]
    {problems}
    return made[4:], made[:4]

def demonstration(problem, rng):
    {demonstration}
    return problem.answer

def answer(completion):
    {answer}
    return completion

def steps(problem, completion):
    {steps}
    return []

def reward(problem, completion):
    {reward}
    return {"correct": float(completion == problem.answer), "size": len(completion) / 10}
'''
PLACES = ("problems", "demonstration", "answer", "steps", "reward")


def write(folder, name="toy.py", top="", **code):
    """A task with some code in its functions; returns the path, and the line of the code."""
    text = top + TASK
    for place in PLACES:
        text = text.replace(f"{{{place}}}", code.get(place, "pass"))
    (folder / name).write_text(text)
    return folder / name


def line_of(path, code):
    return 1 + path.read_text().splitlines().index(f"    {code}")


def run(capsys, *given, code=0):
    """The command line: what it printed, and its error if its exit code is 2."""
    capsys.readouterr()
    try:
        grpo.main([*map(str, given)])
        found = 0
    except SystemExit as e:
        found = e.code
    said = capsys.readouterr()
    assert found == code, said
    return said.err if code else said.out


def lines(path):
    """The records of a log, which must be strict JSON."""
    refuse = lambda name: pytest.fail(f"{name} is not JSON")   # noqa: E731
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# -------------------------------------------------------------------------- numbers that cannot be held

@pytest.mark.parametrize("x, said", [
    (1e39, "1e+39"), (-1e39, "-1e+39"), (math.exp(100), "2.6881171418161356e+43"), (3e38, "3e+38"), (1e20, "1e+20"),
    (10 ** 400, "1000"), (-10 ** 5000, "a int of more digits than can be written"), (Fraction(10) ** 400, "Fraction(1000"),
    (1.0000001e15, "1000000100000000.0"), (math.inf, "inf"), (math.nan, "nan")], ids=range(11))
def test_a_reward_that_float32_cannot_hold_is_refused(x, said):
    """One of exp(100) was once infinite, then 0: the best completions earned the least."""
    with pytest.raises(UserError) as e:
        data.check_components(P, {"correct": 1.0, "more": x})
    assert str(e.value).startswith(f"the reward 'more' of the prompt '1+1=' is {said}")
    assert str(e.value).endswith(", not a finite number from -1e+15 to 1e+15") and len(str(e.value)) < 300


def test_the_largest_rewards_are_learned_from():
    """Their sums, and the squares in a std, are finite, and the best has the highest advantage, even in float32."""
    parts = iter([0.0, 1e15, 5e14, -1e15])
    toy = SimpleNamespace(reward=lambda p, text: {"correct": 0.0, "more": (x := next(parts)), "again": x})
    batch = scored(toy, batch_of(["a", "b", "c", "d"]))
    r, ends = reward.of_outcomes(batch)
    assert r.sum(1).tolist() == pytest.approx([0, 2e15, 1e15, -2e15])
    adv, dead = grpo.group_scores(r, ends, grpo.Config(group=4))
    assert adv.sum(1).argsort().tolist() == [3, 0, 2, 1] and adv.isfinite().all() and not dead.any()
    assert r.square().sum().isfinite()


def test_logs_are_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    files.append(path, {"step": 1, "loss": math.nan, "kl": -math.inf, "x": [[0.5, math.inf], (1, True, None, "NaN")]})
    assert lines(path) == [{"step": 1, "loss": None, "kl": None, "x": [[0.5, None], [1, True, None, "NaN"]]}]
    found = report.page([{"about": {"config": {"threshold": math.nan}}}])
    assert '"threshold":null' in found


# ---------------------------------------------------------------------------------- what `correct` is

@pytest.mark.parametrize("x", [2, -1, 1.001, -0.001, 1e15])
def test_correct_is_a_share(x):
    with pytest.raises(UserError) as e:
        data.check_components(P, {"correct": x, "more": 0})
    assert str(e.value) == (
        f"the reward 'correct' of the prompt '1+1=' is {x}, not a number from 0 (wrong) to 1 (right). Put another scale into a "
        f"component beside it, as in {{'correct': 0, 'wrong': -1}}")


@pytest.mark.parametrize("x", [0, 1, True, 0.5, Fraction(1, 3), 1 + 2e-16, -1e-17])
def test_shares_are_correct(x):
    data.check_components(P, {"correct": x, "more": -1e15})


@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_completion_that_is_cut_off_keeps_its_penalties(all_at_once):
    """It once earned 0, and a wrong one that ended -1; nor may it earn anything."""
    def judged(problem, text):
        return {"correct": float(text == "2"), "wrong": -float(text != "2"), "format": 0.2, "size": -len(text) / 100}
    toy = SimpleNamespace(reward=judged)
    if all_at_once:
        toy = SimpleNamespace(rewards=lambda problems, texts, tokens: [*map(judged, problems, texts)])
    batch = batch_of(["2", "3", "2", "3", "3333"])
    batch.finished = torch.tensor([True, True, False, False, False])
    scored(toy, batch)
    assert batch.components["correct"].tolist() == [1, 0, 0, 0, 0]
    assert batch.components["wrong"].tolist() == [0, -1, 0, -1, -1]
    assert batch.components["format"].tolist() == pytest.approx([0.2, 0.2, 0, 0, 0])
    reward.fill_in_rewards(agent_of(toy), batch)
    assert batch.reward.sum(1).tolist() == pytest.approx([1.19, -0.81, -0.01, -1.01, -1.04])


def test_what_is_never_negative_earns_nothing_if_cut_off():
    batch = batch_of([WORK, WORK])
    batch.finished = torch.tensor([True, False])
    scored(data.load_task("arithmetic"), batch)
    assert [x.tolist() for x in batch.components.values()] == [[1, 0], [1, 0]]
    assert not any(x.signbit().any() for x in batch.components.values())


# ---------------------------------------------------------------------------- errors of a task's own code

FAILS = {"raise TimeoutError('no answer')": "TimeoutError: no answer", "open('cases/17.json')":
         "FileNotFoundError: [Errno 2] No such file or directory: 'cases/17.json'", "{}['score']": "KeyError: 'score'",
         "raise RuntimeError('gloo: my own')": "RuntimeError: gloo: my own", "assert False": "AssertionError"}
WHAT = dict(problems="the function problems", demonstration="the demonstration of the prompt ", answer="the function answer",
            steps="the steps of the prompt ", reward="the reward of the prompt ")


@pytest.mark.parametrize("error", ["FileNotFoundError('prices')", "RuntimeError('gloo: my own')"])
def test_an_error_of_an_algorithm_is_a_traceback(error, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(f"import grpo\nSETTINGS = {{}}\ndef rollout(agent, problems, rng):\n    raise {error}\ngrpo.rollout = rollout\n")
    with pytest.raises(Exception) as e:
        grpo.main(["--task", str(write(tmp_path)), "--algo", str(path), "--out", str(tmp_path / "out")])
    assert repr(e.value) == error


def test_a_lost_rank_is_only_one_of_several(monkeypatch):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed"):
        with dist.stoppable():
            raise lost
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    with pytest.raises(UserError, match="another rank has ended"):
        with dist.stoppable():
            raise lost


@pytest.mark.slow
@pytest.mark.parametrize("found", [["7"], None, 7.5])
def test_an_answer_is_a_string(found, tmp_path, capsys):
    path = write(tmp_path, answer=f"return {found!r} if completion else ''")
    said = run(capsys, "--task", path, "--out", tmp_path / "out", "--warm_steps", 60, "--warm_lr", 1e-2, code=2)
    assert f"error: the function answer must return a string, or '' if there is none, not {found!r}, as for the completion '" in said
    said = run(capsys, "--task", write(tmp_path, answer=f"return {found!r}"), "--out", tmp_path / "first", code=2)
    assert said.endswith(f"not {found!r}, as for the completion ''\n") and not (tmp_path / "first").exists()


@pytest.mark.parametrize("name", ["pass@1", "pass@3", "maj@2", "maj@64", "x@y", "turns", "greedy", "reward_seconds", "step", 1])
def test_a_component_has_no_name_of_the_evaluations(name):
    with pytest.raises(UserError, match="component"):
        data.check_components(P, {"correct": 1.0, name: 0.9})


# --------------------------------------------------------------------------------------- its folder, its time

@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_reward_may_end_the_processes_that_it_forks(tmp_path):
    """Their SIGTERM is not a wish to stop the run, for which a pool would wait for ever; nor do they hold its lock."""
    files.lock(tmp_path / "lock")
    with dist.stoppable():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        other = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(
            signal.getsignal(signal.SIGINT) is not signal.SIG_IGN))
        other.start()
        other.join(10)
        assert other.exitcode == 0 and signal.getsignal(signal.SIGTERM) is dist.ask_to_stop
        files.LOCK.close()                  # as if the run had been killed, and its child lived on
        with open(tmp_path / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.terminate()
        child.join(10)
    assert child.exitcode == -signal.SIGTERM and not dist.ASKED


def test_a_task_may_change_what_it_is_given():
    """Neither the logs nor the next function sees it."""
    def rewards(problems, completions, tokens):
        found = [{"correct": float(text == "whole text")} for text in completions]
        for given in (problems, completions, tokens):
            given[:] = [None] * len(given)
        return found
    problems, texts, tokens = [P, P], ["whole text", "other"], [2, 1]
    assert data.rewards_of(SimpleNamespace(rewards=rewards), problems, texts, tokens) == [{"correct": 1.0}, {"correct": 0.0}]
    assert (problems, texts, tokens) == ([P, P], ["whole text", "other"], [2, 1])

    def pops(*given):
        given[-1].pop(0)
        return {"correct": 0.0} if len(given) == 2 else ""
    task = SimpleNamespace(reward=pops, answer=pops, steps=lambda problem, said: said.clear() or [], rewards=lambda p, c, t: [
        said.pop() and {"correct": 0.0} for said in c])
    turns = ["?a", "1", "end"]
    data.rewards_of(SimpleNamespace(reward=pops), [P], [turns], [3])
    data.rewards_of(SimpleNamespace(rewards=task.rewards), [P], [turns], [3])
    data.answer_of(task, turns)
    data.steps_of(task, P, turns)
    assert turns == ["?a", "1", "end"]


def test_a_reward_may_fill_one_dict_anew():
    """And is not that of the last completion for all of them."""
    found = {}

    def fill(problem, text):
        found["correct"] = float(text == "right")
        return found
    rows = data.rewards_of(SimpleNamespace(reward=fill), [P] * 3, ["right", "wrong", "wrong"], [1] * 3)
    assert rows == [{"correct": 1.0}, {"correct": 0.0}, {"correct": 0.0}]


def test_ranks_average_components_by_name(monkeypatch):
    """The same in any order; of other ones a line says so before anything is averaged."""
    sent, names = [], []
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    monkeypatch.setattr(dist, "gather", lambda x: names.append(x) or [x, x])
    monkeypatch.setattr(dist, "all_reduce", lambda x: sent.append(x) or 2 * x)
    one = dist.means({"b": torch.tensor([1.0, 3.0]), "a": torch.tensor([5.0])})
    other = dist.means({"a": torch.tensor([5.0]), "b": torch.tensor([1.0, 3.0])})
    assert one == other == {"a": 5.0, "b": 2.0} and [*one] == ["b", "a"]
    assert torch.equal(*sent) and names == [["a", "b"]] * 2
    for others in ([["a"], ["b"]], [["b"], ["a"]], [["a"], ["a", "b"]]):
        monkeypatch.setattr(dist, "gather", lambda x: others)
        with pytest.raises(UserError, match="the rewards of other ranks have other components"):
            dist.means({"a": torch.ones(1)})
    assert len(sent) == 2


@pytest.mark.parametrize("returned, says", [
    ("return made", "problems must return two lists"), ("return None", "problems must return two lists"),
    ("return made, made, made", "problems must return two lists"),
    ("made[5].prompt = [{'role': 'user', 'content': 'x'}]; return made[4:], made[:4]", r"a problem's prompt must be a text, not \[\{'role'"),
    ("made[2] = {'prompt': 'x'}; return made[4:], made[:4]", "a problem's prompt must be a text, not None")])
def test_problems_are_two_lists_of_texts(returned, says, tmp_path):
    task = data.load_task(str(write(tmp_path, problems=returned)))
    with pytest.raises(UserError, match=says):
        setup.problems_of(grpo.make_config(task=task.__file__), task)


@pytest.mark.parametrize("returned", ["return tuple(made[4:]), iter(made[:4])", "return [made[4:], made[:4]]"])
def test_problems_may_be_of_any_kind_of_list(returned, tmp_path):
    task = data.load_task(str(write(tmp_path, problems=returned)))
    train, held_out = setup.problems_of(grpo.make_config(task=task.__file__), task)
    assert (len(train), len(held_out)) == (8, 2)            # --held_out 2


@pytest.mark.slow
def test_the_time_of_the_reward_is_its_own(tmp_path, capsys):
    for name, code in (("fast", "pass"), ("slow", "import time; time.sleep(0.05)")):
        run(capsys, "--task", write(tmp_path, reward=code), "--out", tmp_path / name, "--eval_every", 1, "--samples", 4)
    fast, slow = (lines(tmp_path / name / "metrics.jsonl")[-1] for name in ("fast", "slow"))
    assert 0 < fast["reward_seconds"] < 0.4 <= slow["reward_seconds"] < slow["seconds"]         # not the evaluation's
    tokens = slow["length"] * 8
    spent = tokens / slow["rollout_tok_s"] + tokens / slow["update_tok_s"] + slow["reward_seconds"]
    assert spent == pytest.approx(slow["seconds"])


def test_the_time_of_steps_is_the_rewards_too():
    before = data.SPENT[0]
    data.steps_of(SimpleNamespace(steps=lambda problem, text: time.sleep(0.02)), P, "a")
    assert data.SPENT[0] - before >= 0.02


# ------------------------------------------------------------------------------------------------- files

GOOD = '{"question": "How many?", "answer": "#### 1"}\n'


@pytest.mark.parametrize("text, n", [
    (GOOD + "\n", 1), (GOOD + "  \t\r\n" + GOOD + "\n\n", 2), ("\n\n" + GOOD, 1), ("\ufeff\n" + GOOD, 1), (GOOD + "   ", 1)])
def test_blank_lines_are_skipped(text, n, tmp_path):
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    assert len(gsm8k.read(str(tmp_path / "rows.jsonl"), "test")) == n


@pytest.mark.parametrize("line, why", [("{", "not JSON: Expecting property name enclosed in double quotes, column 2"),
                                       ("[1]", "ValueError: not an object with a question and an answer")])
def test_an_error_names_its_line_after_blank_ones(line, why, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n \n{line}\n")
    with pytest.raises(UserError) as e:
        gsm8k.read(str(path), "test")
    assert str(e.value) == f"--test {path}, line 4: {why}"
    path.write_text("\n \n")
    with pytest.raises(UserError, match="is empty"):
        gsm8k.read(str(path), "test")


def test_logs_may_have_blank_lines(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n\n \n{"step": 2, "x": NaN}\n\n{"step": 3')
    assert report.thinned(path, 100) == ([{"step": 1}, {"step": 2, "x": None}], 2)
    for line, why in (('{"x": 1}', "does not begin with a step"), ('{"step": 2, "x}', "is not JSON: ")):
        path.write_text('{"step": 1}\n\n' + line + "\n")
        with pytest.raises(UserError, match=f"samples.jsonl, line 3, {why}"):
            report.thinned(path, 100)


def rows(path, *questions):
    path.write_text("".join(json.dumps({"question": q, "answer": "#### 1"}) + "\n" for q in questions))
    return path


def test_a_prompt_that_is_too_long_is_named_and_can_be_left_out(tmp_path, encoding):
    path = str(rows(tmp_path / "a.jsonl", "one", "word " * 300, "two"))
    problems, _ = gsm8k.problems(path, path)
    longest = setup.longest_of(encoding, problems)
    assert longest == len(problems[1].prompt)
    policy = tiny_model(block_size=512)
    with pytest.raises(UserError) as e:
        pretrained.check_context(policy, grpo.Config(max_new=8), longest)
    assert str(e.value) == (
        f"a prompt of {int(longest)} tokens and --max_new 8 do not fit the model's context of 512: the prompt "
        f"{('word ' * 40)!r}... (1,614 characters). See \"A prompt is too long\" in docs/troubleshooting.md")
    for n in (3, 1498):
        assert [p.prompt[:3] for part in gsm8k.problems(path, path, n) for p in part] == ["one", "two"] * 2
    assert gsm8k.problems(path, path, 1499)[0] == problems


def test_training_and_held_out_problems_that_are_the_same(tmp_path, capsys):
    cfg = SimpleNamespace(held_out=0, task_args={"train": str(rows(tmp_path / "a.jsonl", *"abcd")), "test": ""})
    for test, said in (("abcd", "4 of 4 held-out prompts are also training prompts, as if one file were both: e"),
                       ("xaby", "2 of 4 held-out prompts are also training prompts: e"), ("xyz", "")):
        cfg.task_args["test"] = str(rows(tmp_path / "b.jsonl", *test))
        setup.to_train_on(cfg, gsm8k)
        out = capsys.readouterr().out
        assert out == (said and f"note: {said}valuations will count what was learned by heart\n")
    cfg.task_args["train"] = ""
    with pytest.raises(UserError, match="^the task has no training problems, without --train$"):
        setup.to_train_on(cfg, gsm8k)


def test_an_evaluation_needs_no_training_file(tmp_path):
    """Nor does a question."""
    cfg = SimpleNamespace(held_out=0, max_new=8, task_args={"train": "", "test": str(rows(tmp_path / "b.jsonl", "a", "b"))})
    policy = tiny_model(block_size=512)
    encoding = data.tokenizer.byte_encoding()
    assert [p.answer for p in setup.held_out(cfg, gsm8k, encoding, policy)] == ["1", "1"]


