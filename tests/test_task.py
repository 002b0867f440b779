"""The task, its rewards and steps; the evaluator against hostile text; the tokenizer."""
import random
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest

import data.arithmetic as task
from data import load_task
from data.arithmetic import Problem
from data.run import Fault
from reward import evaluate, score

P = Problem("47*58=", "2726")
WORK = "\n47*50=2000+350=2350\n47*8=320+56=376\n2350+376=2600+126=2726"


@pytest.mark.parametrize("difficulty", [1, 2])
def test_held_out_problems_never_occur_in_training(difficulty):
    train, held_out = task.problems(SimpleNamespace(difficulty=difficulty))
    pair = lambda p: frozenset(map(int, p.prompt[:-1].split("*")))
    assert not {pair(p) for p in train} & {pair(p) for p in held_out}       # 58*47 would be a leak
    assert len(held_out) == (500 if difficulty == 2 else 5)
    assert len(set(train + held_out)) == len(train) + len(held_out) == (8100 if difficulty == 2 else 64)
    for p in train[:200]:
        a, b = map(int, p.prompt[:-1].split("*"))
        assert int(p.answer) == a * b


@pytest.mark.parametrize("completion, correct, working", [
    ("2726", 1, 0), ("~2726", 1, 0), ("2725", 0, 0), ("~~2726", 0, 0), ("", 0, 0), ("02726", 0, 0), ("2726 ", 1, 0), ("２７２６", 0, 0),
    (WORK, 1, 1),
    (WORK.replace("56=376", "57=376"), 1, 0),               # right, but a step is false
    (WORK.replace("2726", "2727"), 0, 0),
    ("\n47*58=2726", 1, 0), ("\n58*47=2726", 1, 0),         # the problem again is no work
    ("\n2726=2726", 1, 0), ("\n2725+1=2726", 1, 0),         # numbers from nowhere
    ("\n47*50=2350\n47*8=376\n2350+376=2726", 1, 1),
    ("\n58*40=2320\n58*7=406\n2320+406=2726", 1, 1),
    ("3" + WORK, 1, 0), (WORK + "\n", 1, 1),
    ("\n47*50=2350\n9**9**9=1\n2350+376=2726", 1, 0),
    ("\n47/(47/47/58)=2726", 1, 0), ("\n+=+\n47*50=2350\n47*8=376\n2350+376=2726", 1, 0)])
def test_reward_is_0_1_or_2(completion, correct, working):
    assert task.reward(P, completion) == {"correct": correct, "working": working}


def test_perfect_demonstrations_earn_everything_and_people_slip(monkeypatch):
    rng = random.Random(0)
    sampled = [task.demonstration(P, rng) for _ in range(2000)]
    bare = [d for d in sampled if "\n" not in d]
    shown = [d for d in sampled if "\n" in d]
    assert len(bare) / 2000 == pytest.approx(task.GUESS, abs=0.05) and set(bare) == {"~3000"}
    assert 0.9 < sum(task.reward(P, d)["working"] for d in shown) / len(shown) < 1
    monkeypatch.setattr(task, "GUESS", 0)
    monkeypatch.setattr(task, "SLIP", 0)
    for difficulty in (1, 2, 3):
        for p in rng.sample(task.problems(SimpleNamespace(difficulty=difficulty))[0], 50):
            assert task.reward(p, task.demonstration(p, rng)) == {"correct": 1, "working": 1}


def test_steps_end_with_the_token_that_closes_them():
    steps = task.steps(P, WORK)
    assert [WORK[a:b] for a, b in zip([0] + [e for e, _ in steps], [e for e, _ in steps])] == [
        "\n47*50=2000+350=2350\n", "47*8=320+56=376\n", "2350+376=2600+126=2726"]
    assert [truth for _, truth in steps] == [True] * 3
    wrong = WORK.replace("56=376", "56=386").replace("+376=2600+126=2726", "+386=2600+136=2736")
    assert [truth for _, truth in task.steps(P, wrong)] == [True, False, False]     # built on sand
    assert task.steps(P, "~2726") == [(5, True)] and task.steps(P, "2725") == [(4, False)]
    assert task.steps(P, "") == []


def test_answer():
    assert [task.answer(t) for t in ("221", "~221", WORK, "1=2=3", "", "x", "\n", "4*")] == [
        "221", "221", "2726", "3", "", "", "", ""]


def test_score_pairs_each_completion_with_its_prompt():
    """Elsewhere the completions of one prompt were scored against another's answer."""
    toy = SimpleNamespace(reward=lambda p, text: {"correct": float(p.answer == text), "index": float(p.answer)})
    rows = [Problem(str(i), str(i)) for i in range(4) for _ in range(2)]
    parts = score(toy, rows, [str(i // 2) for i in range(8)], [True] * 8)
    assert parts == {"correct": [1.0] * 8, "index": [0, 0, 1, 1, 2, 2, 3, 3]}


@pytest.mark.parametrize("parts", [{"correct": 1.0, "more": 1.0}, {"right": 1.0}, {}])
def test_components_are_always_the_same(parts):
    """Of rows with other components than the first's, some were once dropped in silence."""
    toy = SimpleNamespace(reward=lambda p, text: parts if text == "b" else {"correct": 1.0})
    with pytest.raises(Fault, match="always be the same"):
        score(toy, [P, P], ["a", "b"], [True, True])


def test_an_unfinished_completion_earns_nothing():
    assert score(task, [P, P], [WORK, WORK], [True, False]) == {"correct": [1, 0], "working": [1, 0]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "1"])
def test_a_reward_that_is_no_number_names_its_prompt(bad):
    toy = SimpleNamespace(reward=lambda p, text: {"correct": bad if text == "b" else 1.0})
    with pytest.raises(Fault, match=r"'correct' of the prompt '47\*58='"):
        score(toy, [P, P], ["a", "b"], [True, True])


def test_tasks_that_are_none(monkeypatch):
    with pytest.raises(Fault, match="unknown task 'chess'; there are: arithmetic"):
        load_task("chess")
    for name in ("tokenizer", "__init__", "../grpo"):
        with pytest.raises(Fault):
            load_task(name)
    monkeypatch.delattr(task, "steps")
    with pytest.raises(Fault, match="no steps"):
        load_task("arithmetic")


# ------------------------------------------------------------------------- the safe evaluator

@pytest.mark.parametrize("text, value", [
    ("2+3*4", 14), ("(2+3)*4", 20), ("-3+5", 2), ("2--3", 5), ("7/2", Fraction(7, 2)), (" 1 + 1 ", 2),
    ("10/2/5", 1), ("0012", 12), ("8-3-2", 3)])
def test_evaluates(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", [
    "", " ", "95**87**76", "2^9", "1/0", "1/(2-2)", "(" * 5000 + "1" + ")" * 5000, "9" * 16, "9" * 100_000,
    "*".join(["9" * 15] * 5000), "(1", "1)", "()", "1+", "*1", "1 2", "abs(1)", "__import__('os')",
    "1e9", "1.5", "٣+٤", "１＋１", "²", "1_000", "0x10", "1\n+1", "lambda:0", "\x00"])
def test_hostile_text_is_none_and_quick(text):
    """`95**87**76` passes the character filters of two popular repositories, and hangs them."""
    began = time.perf_counter()
    assert evaluate(text) is None
    assert time.perf_counter() - began < 1


def test_agrees_with_python_on_random_expressions():
    rng = random.Random(0)
    for _ in range(500):
        text = str(rng.randrange(100))
        for _ in range(rng.randrange(6)):
            text = rng.choice(("({}){}{}", "{}{}{}")).format(text, rng.choice("+-*"), rng.randrange(100))
        assert evaluate(text) == eval(text)                 # our own text, not a model's


# ------------------------------------------------------------------------------- the tokenizer

def test_bytes_survive(encoding):
    rng = random.Random(0)
    for _ in range(200):
        raw = bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
        text = raw.decode("utf-8", errors="replace")
        ids = encoding.encode_ordinary(text)
        assert ids == list(text.encode()) and encoding.decode(ids) == text
        assert b"".join(encoding.decode_single_token_bytes(t) for t in raw) == raw
    assert encoding.eot_token == 256 and encoding.n_vocab == 257


def test_the_end_token_cannot_be_spelled(encoding):
    assert 256 not in encoding.encode_ordinary("1*1=<|endoftext|>")
