"""Tasks, the evaluator, free text, tokenizers, chat templates."""
import itertools
import json
import os
import random
import re
import time
from collections import Counter
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import CHAT, ROOT, agent_of, batch_of_rows, chat_folder, rewrite

import data.arithmetic as task
import data.countdown as countdown
import data.gsm8k as gsm8k
import experiments.models.sums_task as sums
import grpo
import reward
from data import UserError, chat, load_task, turns
from data.answers import evaluate, one_number, steps
from data.arithmetic import Problem
from data.tokenizer import byte_encoding, decode, load_encoding, opening, pieces, split_at
from data.tokenizer import stop_tokens
from run import pretrained, report
from run.report import majority_at, pass_at

P, Q, TWO = (Problem(f"{a}*{b}=", str(a * b)) for a, b in ((47, 58), (13, 12), (2, 3)))
WORK = "\n47*50=2000+350=2350\n47*8=320+56=376\n2350+376=2600+126=2726"
HONEST = "\n13*10=130\n13*2=26\n130+26=156"
FIVE, MAKE = gsm8k.Problem("", "5", ""), countdown.Problem("", (3, 7, 25), 46)
SUMS_TO_5 = countdown.Problem("", (2, 3), 5)
SUM = sums.Problem("7 + 12", "19", "")


def marks(found):
    """Steps as a text: ends and truths."""
    return " ".join(f"{end}{'-+'[truth]}" for end, truth in found)


def answered(x):
    return f"<think></think>\n<answer>{x}</answer>"


# ---------- arithmetic

@pytest.mark.parametrize("difficulty, total, held, first", [
    (1, 64, 5, ["5*5=", "2*2="]), (2, 8100, 500, ["52*94=", "27*30="])])
def test_problems_of_arithmetic(difficulty, total, held, first):
    """58*47 beside 47*58 would be a leak."""
    train, held_out = sides = task.problems(difficulty)
    pairs = [{frozenset(p.prompt[:-1].split("*")) for p in side} for side in sides]
    assert not pairs[0] & pairs[1] and [side[0].prompt for side in sides] == first
    assert len(held_out) == held and len({*train, *held_out}) == len(train) + held == total
    assert all(evaluate(p.prompt[:-1]) == int(p.answer) for p in train)


@pytest.mark.parametrize("problem, correct, working, texts", [
    (P, 0, 0, "|2725|~~2726|02726|２７２６|" + WORK.replace("2726", "2727")),
    (P, 1, 0, "2726|~2726|2726 |3" + WORK + "|" + WORK.replace("56=376", "57=376")),
    (P, 1, 0, "\n47*58=2726|\n2726=2726|\n2725+1=2726|\n47*50=2350\n9**9**9=1\n2350+376=2726"),
    (P, 1, 1, WORK + "|" + WORK + "\n|\n58*40=2320\n58*7=406\n2320+406=2726"),
    (Q, 1, 1, HONEST + "\n130+26=156" * 30 + "\n26+130=156\n26+0130=156=156\n156=156"),
    (TWO, 1, 1, "\n2*3=5+1=6|\n2*3=6=6"), (TWO, 0, 0, "\n2*3=6+1=7"),
    (TWO, 1, 0, "\n2*4=5+1=6|\n2*3=5+2=6|\n2*3=7=6")])
def test_rewards_of_arithmetic(problem, correct, working, texts):
    for text in texts.split("|"):
        found = task.reward(problem, text)
        assert (found["correct"], found["working"]) == (correct, working), text


@pytest.mark.parametrize("problem, text, found", [
    (P, WORK, "21+ 37+ 59+"), (P, "~2726", "5+"), (P, "", ""), (P, "02726", "5-"),
    (P, WORK.replace("56=376", "56=386").replace("+376=2600", "+386=2600"), "21+ 37- 59-"),
    (P, "2725\n47*50=2350", "5- 15+"), (P, "\n5*5=25\n25+47=72", "8- 16-"),
    (Q, "\n13=13=10+3\n13=9+4", ""),
    (Q, HONEST + "\n26+0130=156=156\n156=156", "11+ 19+ 30+"),
    (Q, "\n13=14" * 3, "7- 13- 18-"), (Q, "\n\n13*2=26\n\n13*2=26\n13*10=130", "10+ 28+")])
def test_steps_of_arithmetic(problem, text, found):
    """`13=13`, thirty times, once earned thirty rewards."""
    assert marks(task.steps(problem, text)) == found


def test_demonstrations_of_arithmetic(monkeypatch):
    rng = random.Random(0)
    shown = [task.demonstration(P, rng) for _ in range(2000)]
    right = [task.reward(P, text)["working"] for text in shown if text != "~3000"]
    assert len(right) / 2000 == pytest.approx(1 - task.GUESS, abs=0.05)
    assert 0.9 < sum(right) / len(right) < 1
    slips = {task.miswritten(305, rng) for _ in range(999)}
    assert slips == {*range(5, 1000, 100), *range(305, 400, 10), *range(300, 310)} - {305}
    assert [*map(task.rounded, (4, 549, 550, 950))] == [0, 500, 600, 1000]
    monkeypatch.setattr(task, "GUESS", 0)
    monkeypatch.setattr(task, "SLIP", 0)
    for a, b in [(508, 30), *((rng.randrange(2, 999), rng.randrange(2, 99)) for _ in range(99))]:
        p = Problem(f"{a}*{b}=", str(a * b))
        assert task.reward(p, task.demonstration(p, rng))["working"] == 1
    assert task.demonstration(P, rng) == WORK


# ---------- files of tasks

def test_tasks_that_are_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").write_text("open('ran', 'w')")
    up = os.path.relpath(tmp_path / "reverse", Path(task.__file__).parent)
    for name in ("reverse", str(tmp_path / "reverse"), up, "./reverse", "", "a\0.py", 7, "chess",
                 "data.arithmetic", "tokenizer", "__init__", "../grpo", "nowhere/mine.py", "."):
        with pytest.raises(UserError, match="no task|no file|not a task"):
            load_task(name)
    assert not (tmp_path / "ran").exists()
    for folder in "xy":
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(f"DEFAULTS = {{}}\nproblems = reward = answer = {folder!r}.count\n")
        assert load_task(str(path)).answer(folder) == 1
    for lacks in ("problems", "answer", "reward"):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=f"function {lacks}"):
            patch.delattr(task, lacks)
            load_task("arithmetic")
    with monkeypatch.context() as patch:
        patch.delattr(task, "reward")
        patch.setattr(task, "rewards", print, raising=False)    # which takes its place
        load_task("arithmetic")


# ---------- the safe evaluator

def test_what_is_evaluated():
    values = {"2+3*4": 14, "(2+3)*4": 20, "-3+5": 2, "2--3": 5, "2---5": -3, "7/2": 3.5,
              "8-3-2": 3, "0012": 12, " 1 + 1 ": 2, "10/2/5": 1, "1.25*.5": 0.625,
              "-(1+2)*3": -9, "8/(1/2)": 16, "11" + "+1" * 99: 110, "1/3": Fraction(1, 3),
              "9" * 15: 10 ** 15 - 1}
    assert {text: evaluate(text) for text in values} == values


@pytest.mark.parametrize("text", [
    *" |95**87**76|2^9|1/0|1/(2-2)|(1|1)|1+|*1|1 2|__import__('os')|1e9|1.5.2|1 .5|.".split("|"),
    *"٣+٤|²|1_000|0x10|1\n+1".split("|"), "111" + "+1" * 99, "9" * 16, "9" * 100_000,
    "(" * 5000 + "1" + ")" * 5000, "*".join(["9" * 15] * 5000)])
def test_hostile_text_is_none_and_quick(text):
    """`95**87**76` passes the filters of two popular repositories, and hangs them."""
    began = time.process_time()
    assert evaluate(text) is None
    assert time.process_time() - began < 1


# ---------- answers in free text

def test_answers_are_judged_as_by_hand():
    lines = (ROOT / "tests" / "answers.txt").read_text("utf-8").splitlines()
    rows = [line.split(" ", 2) for line in lines if line[:1] not in ("", "#")]
    rows = [(*row, text.replace("⏎", "\n")) for *row, texts in rows for text in texts.split("|")]
    assert Counter(right for right, *_ in rows) == {"yes": 100, "none": 81, "no": 66}
    for right, gold, text in rows:
        judged = one_number(text)
        assert (judged == Fraction(gold)) == (right == "yes"), (right, gold, text)
        assert right != "none" or judged is None, text


@pytest.mark.parametrize("form, reads", [
    ("<answer>{}", 0), ("{}</answer>", 0), ("</answer>{}<answer>", 0), ("<Answer>{}</Answer>", 0),
    ("<answer><answer>{}</answer>", 1), ("<answer>\n {} \n</answer></answer>\n", 1),
    ("<answer>0</answer><answer>{}</answer><answer>0", 1)])
def test_an_answer_is_between_the_last_tags(form, reads):
    for text, right in (("3*7+25", 1), ("3*7", 0)):
        parts = countdown.reward(MAKE, form.format(text))
        assert parts == {"correct": reads * right, "format": 0.1 * reads}


@pytest.mark.parametrize("text, strict, lenient", [
    (r"\boxed{5}", 1, 1), (r"\(2+3=\boxed{ 5 }\). So.", 1, 1), (r"\boxed{7}, no: \boxed{5}", 1, 1),
    (r"\boxed{\text{5 clips}}", 1, 1), (r"\boxed{\text{\textbf{5}}}", 1, 1), ("2+3=5", 0, 1),
    (r"\boxed{\frac{10}{2}} = 5", 0, 1), ("$1, $5.00.", 0, 1), (r"\boxed{5", 0, 1),
    (r"\boxed{5} of 6", 1, 0), (r"\boxed{}, 4", 0, 0), (r"\boxed{-5}", 0, 0), ("1.2.5", 0, 0),
    ("1,005", 0, 0), ("five", 0, 0), ("", 0, 0)])
def test_an_answer_is_in_the_last_box(text, strict, lenient):
    """A right number outside of it is only logged."""
    parts = gsm8k.reward(FIVE, text)
    assert parts == {"reward": strict, "correct": strict, "lenient": lenient}
    assert (gsm8k.answer(text) == "5") == strict


@pytest.mark.parametrize("truth, lines", [
    ("+", "1: 48/2 = 24 clips.|12 x $0.25 = $3.00|3x4=12|1,000+80=1080.|2 + 2 = 4 and 4 * 2 = 8"),
    ("+", "20 − 13 = 7|10/3 = 3.33|1/4=0.3|1/4=0.2|1-5/3 = -0.67"), ("-", "3 × 4 = 13|1+1=3+0=3"),
    ("-", "2 + 2 = 4 and 4 * 2 = 9"),
    ("-", "0.353*1=0.3|0.136*1=0.13|2.608*5=13|1/3=0|48/2 = 25 clips.|20–13 = 6|10/3 = 3.34"),
    ("", "x = 5|237 potatoes - 60 = 177 cucumbers|Half of 48 = 24|2/3 of 9 = 6|1=1||in: -3+4 = 7"),
    ("", "910" + "+0" * 99 + "=11|1+1=2" + "0" * 300),
    ("", r"2 \times 3 - 1 = 5|10^2 - 5 = 95|sqrt(16) + 2 = 6|half of 20 + 5 = 15|2x - 4 = 10"),
    ("", "1/4 = 25%|twice 5 + 3 = 13|3:00 + 2 = 5:00|1 + 1/2 = 1½")])
def test_lines_with_equations_are_steps(truth, lines):
    """What cannot be checked is no step. An equation is read whole; decimals may be rounded."""
    for line in lines.split("|"):
        n = len(line) + 1
        assert marks(steps(None, line + "\nend")) == (f"{n}{truth} " * bool(truth) + f"{n + 3}+")


@pytest.mark.parametrize("text, found", [
    ("1+1=2\nb\n2+2=4\nd", "6+ 14+ 15+"), ("", ""), ("1+1=3\n\n", "7-"),
    ("1+1=2\n" * 30 + "done", "6+ 184+"), ("Mon: 2*3=6\nTue: 2*3=6", "11+ 21+"),
    ("1+1=2\n1 + 1 = 2\n1+1=3\n1+1=3\n", "6+ 22- 28-")])
def test_a_line_that_was_there_is_no_step(text, found):
    assert marks(steps(None, text)) == found


def test_no_more_is_read_of_a_text_than_a_working_has():
    many = [f"{n}+1={n + 1}" for n in range(5000)]
    assert len(steps(None, "\n".join(many))) == 201
    found = task.steps(P, "\n" + "\n".join(f"{'7+' * n}7={7 * n + 7}" for n in range(1, 251)))
    assert [truth for _, truth in found] == [True] * 200 + [False] * 50


TASKS = [(task, P), (countdown, MAKE), (gsm8k, FIVE), (sums, SUM)]


@pytest.mark.parametrize("head, piece, tail", [
    ("<answer>-", " ", "!</answer>"), ("", "<answer>", ""), ("", "=", ""), ("", "1+=", ""),
    ("", r"\boxed{", ""), ("", "1.,", "x"),
    ("", "1+1=2\n", ""), ("1=", "1+" * 99, "1="), ("1=", "1" * 199 + "y=", ""),
    ("1", ",000", ""), ("", "9", ""), ("", "- ", "5"), ("1", " ", "-5")])
def test_hostile_texts_take_linear_time(head, piece, tail):
    def took(n):
        text = around.format(head + piece * (n // len(piece)) + tail)
        began = time.process_time()
        module.reward(problem, text), module.answer(text), module.steps(problem, text)
        return time.process_time() - began
    wrapped = ("{}", "\n{}", answered("{}"), r"\boxed{{{}}}")
    for (module, problem), around in itertools.product(TASKS, wrapped):
        assert any(took(10_000) < 9 * took(2_500) + 1e-3 for _ in range(4))


def test_numbers_too_long_for_python():
    """int() of more than 4,300 digits raises, and a sampled text must not end a run."""
    for n in ("9" * 5000, "1" + ",000" * 1500, "1." + "0" * 5000):
        for text in (n, f"\n{n}=1", f"\n47*{n}={n}", f"\n1+1={n}=", answered(f"3+{n}")):
            for module, problem in TASKS:
                assert module.reward(problem, text)["correct"] == 0 and module.steps(problem, text)


# ---------- gsm8k

def rows_in(folder, *rows):
    path = folder / "rows.jsonl"
    lines = [json.dumps({"question": q, "answer": a}) + "\n \n" for q, a in rows]
    path.write_text("\ufeff\n" + "".join(lines))
    return str(path)


def test_gsm8k(tmp_path):
    path = rows_in(tmp_path, (" Two and 2?\n", " 1+1 = <<1+1=2>>2, 2+2 = <<2+2=4>>4 \n#### 4"),
                   ("Many?" + " word" * 300, "It is.\n#### 1,080"))
    train, test = gsm8k.problems(path, path)
    marked = gsm8k.problem_of(dict(question="q", answer="#### 1 is no answer\n#### 2"))
    assert (marked.solution, marked.answer) == ("#### 1 is no answer", "2")
    assert train == test and [p.answer for p in train] == ["4", "1080"]
    assert train[0].prompt == "Two and 2?" + gsm8k.prompt("") and r"\boxed{}" in train[0].prompt
    for p, working in zip(train, ("1+1 = 2, 2+2 = 4", "It is.")):
        shown = gsm8k.demonstration(p, random)
        assert shown == f"{working}\nThe answer is \\boxed{{{p.answer}}}."
        assert gsm8k.reward(p, shown)["reward"] == 1
    assert gsm8k.answer(r"\boxed{\$1{,}080.00}") == "1080" and gsm8k.answer("none") == ""
    assert gsm8k.problems("", path, 1505) == ([], test)
    assert gsm8k.problems(path, path, 1504) == (train[:1], test[:1])


GOOD = b'{"question": "q", "answer": "#### 1"}'


@pytest.mark.parametrize("why, lines", [
    ("RecursionError", [b"[" * 100_000]), ("must be JSON objects", [b"[]", b"7"]),
    ("UnicodeDecodeError", [b"\xef\xbb"]), ("Unterminated string", [b'{"question": "q']),
    ("KeyError", [b'{"answer": "#### 1"}', b"{}"]),
    ("AttributeError", [b'{"question": 1, "answer": "#### 1"}']),
    ("to_json", [b"PAR1\x15\x98"]),
    ("KeyError: 'answer'", [b'{"question": "q"}']), ("#### n", [GOOD.replace(b"#", b"")]),
    ("#### n", [GOOD.replace(b"1", x) for x in (b"9" * 5000, b"1 or 2")])])
def test_a_bad_line_of_a_file_is_named(tmp_path, why, lines):
    path = tmp_path / "rows.jsonl"
    for line in lines:
        path.write_bytes(GOOD + b"\n \n" + line + b"\n" + GOOD)
        with pytest.raises(UserError, match=rf"^.*rows.jsonl, line 3: .*{why}") as e:
            gsm8k.problems(str(path))
        assert len(str(e.value)) < 500
    with pytest.raises(UserError, match="no file is named: --test FILE"):
        gsm8k.problems()


# ---------- countdown

@pytest.mark.slow
def test_countdown():
    train, held_out = sides = countdown.problems(3)
    assert [(side[0].numbers, side[0].target) for side in sides] == [
        ((2, 8, 11), 30), ((2, 8, 71), 65)]
    keys = {(p.numbers, p.target) for p in train + held_out}
    assert len(keys) == len(train) + len(held_out) > 2000 and len(held_out) == 500
    assert {p.target for p in train} == {*range(10, 100)}
    for p in train[:200]:
        *shown, target = map(int, re.findall(r"[0-9]+", p.prompt.partition(".")[0]))
        assert sorted(shown) == [*p.numbers] and target == p.target and len(shown) == 3
        made = [form.format(*x) for form in ("{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})")
                for a, b, c in itertools.permutations(shown)
                for x in itertools.product([a], "+-*/", [b], "+-*/", [c])]
        assert target in map(evaluate, made)


@pytest.mark.parametrize("module, n", [
    (countdown, 1), (countdown, 7), (sums, 5), (task, 0), (task, 4)])
def test_difficulties(module, n):
    with pytest.raises(UserError, match=f"--difficulty {n}: .* takes "):
        module.problems(n)


@pytest.mark.parametrize("numbers, target, correct, texts", [
    ((3, 7, 25), 46, 1, "25+3*7|(3 * 7) + 25 "),
    ((3, 7, 25), 46, 0, "46|25+3*7+0|25+3*7=46|2 5+3*7|25+3*7*7/7|3+7+25|25**1+3*7|"),
    ((3, 4, 25), 13, 0, "3.25*4"), ((3, 4, 25), 59, 0, "0000000034+25|34+25"),
    ((3, 4, 25), 37, 0, "3*4+025|3.0*4+25"), ((3, 5), 15, 0, "３*5|3*5 or 5*3")])
def test_countdown_wants_each_number_once(numbers, target, correct, texts):
    for text in texts.split("|"):
        parts = countdown.reward(countdown.Problem("", numbers, target), answered(text))
        assert parts == {"correct": correct, "format": 0.1}, text


# ---------- sums

@pytest.mark.parametrize("difficulty, n, first", [
    (1, 480, "What is 9 + 12?"), (3, 8936, "What is 99 + 68 + 40?"),
    (4, 3645, "There are 30 marbles in one box and 34 in another. How many marbles is that?")])
def test_problems_of_sums(difficulty, n, first):
    train, held_out = sides = sums.problems(difficulty)
    assert (len(train), len(held_out), train[0].prompt) == (n, 128, first)
    numbers = [{tuple(sorted(re.findall("[0-9]+", p.prompt))) for p in side} for side in sides]
    assert not numbers[0] & numbers[1]
    for p in train[:999] + held_out:
        text, total = p.solution.split(" = ")
        assert total == p.answer == sums.answer(p.solution) and evaluate(text) == int(total) >= 0


@pytest.mark.parametrize("said, near, texts", [
    ("19", 0.2, "7 + 12 = 19.|019|19.0|7,19|It is...19|5–19|-> 19, of course"),
    ("20", 0.1, "19\n\nSo 20"), ("1234", 0.2 / 1216, "1,234"),
    ("", 0, "|none|١٩|" + "9" * 16), ("-5", 0.008, "(-5)|−5"),
    ("5", 0.2 / 15, "12 - 5|(9) - 5|covid-5|12 minus 5|$12 - $5|12% - 5|12 – 5"),
    ("-19", 0.2 / 39, "- 19|−\u200919|3 - 22 = - 19|- \\$19|-**19**|Minus 19|x\n- 19")])
def test_the_last_number_counts(said, near, texts):
    for text in texts.split("|"):
        parts = sums.reward(SUM, text)
        assert sums.answer(text) == said, text
        assert parts == {"correct": said == "19", "near": pytest.approx(near, rel=1e-12)}


def test_the_last_turn_with_a_calculator_earns():
    calculator = load_task(str(ROOT / "experiments" / "models" / "calculator.py"))
    problem, call = calculator.Problem("", "47 * 58", "2726"), "<tool>47*58</tool>"
    for said, reply, correct, cost in (
            (["2726"], None, 1, 0), ([call], "2726", 0, 0),
            ([call, "2726", "I know."], None, 0, 0), (["2726 <tool>"], "error", 0, 0),
            (["<tool>", "error", call, "2726", "2726"], None, 1, -0.2)):
        assert calculator.reply(problem, said) == reply
        assert calculator.reward(problem, said) == {"correct": correct, "call": cost}


# ---------- several answers

def test_pass_at_k_is_the_mean_over_all_sets():
    for right in ([0, 0, 1, 0, 1], [1, 1, 1], [0.5, 0, 1, 0.25]):
        for k in range(1, len(right) + 1):
            best = [max(own) for own in itertools.combinations(right, k)]
            assert pass_at(k, right) == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("k, right, said, share", [
    (4, [1, 0, 0, 1], "abba", 1), (4, [0, 1, 1, 0], "abba", 0),         # as frequent: the first
    (2, [1, 1, 0, 0, 1], "aabba", 0.5),                     # sets side by side; the rest is out
    (3, [1, 0, 0], ["a", "", ""], 1), (1, [0], [""], 0)])   # "" is no vote
def test_majority_of_k(k, right, said, share):
    assert majority_at(k, right, [*said]) == share


# ---------- tokenizers

def test_bytes_survive(encoding):
    rng, end = random.Random(0), "1*1=<|endoftext|>e\u0301"
    for raw in [end.encode(), *(rng.randbytes(rng.randrange(40)) for _ in range(200))]:
        text = raw.decode("utf-8", errors="replace")
        ids = encoding.encode_ordinary(text)
        assert ids == [*text.encode()] and encoding.decode(ids) == text == decode(encoding, ids)
        assert b"".join(map(encoding.decode_single_token_bytes, raw)) == raw
    assert encoding.encode_prompt(" a ") == encoding.encode_reply(" a ") == [32, 97, 32]
    assert encoding.token_bytes(300) == b""         # which a model with more ids may sample


def test_tokens_before_every_text():
    text, known = dict(Sequence=dict(id="A")), {"<s>": 300, "<t>": 301}
    parts = [dict(type="TemplateProcessing", single=[dict(SpecialToken=dict(id=name)), text])
             for name in known]
    post = dict(type="Sequence", processors=[dict(type="ByteLevel"), *parts])
    assert opening(dict(post_processor=post), known) == "<s><t>" and opening({}, {}) == ""


def test_the_longest_of_marks_is_found():
    assert split_at(["<a>", "<a>b"], "x<a>by<a>") == ["x", "<a>b", "y", "<a>", ""]


# ---------- tags that are tokens

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]
SAID = "<think>\n2+3=5\n</think>\n<tool_call>{}</tool_call><answer>2+3</answer>"


def tagged_encoding(folder, special, ends=(258,)):
    """A chat model's tokenizer with TAGS as tokens of their own, special ones or not."""
    path = chat_folder(folder) / "tokenizer.json"
    one = json.loads(path.read_text())["added_tokens"][0] | dict(special=special)
    more = [one | dict(id=259 + i, content=tag) for i, tag in enumerate(TAGS)]
    rewrite(path, lambda hf: hf["added_tokens"].extend(more))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_encoding(folder)


@pytest.mark.parametrize("special", [True, False])
def test_a_reward_sees_tags_that_are_tokens_and_not_the_end(special, tmp_path):
    encoding = tagged_encoding(tmp_path, special)
    as_tokens, in_letters = encoding.encode_demonstration(SAID), [*SAID.encode(), 258]
    assert {*range(258, 265)} < {*as_tokens}
    for ids in (as_tokens, in_letters, as_tokens[:3] + in_letters[9:], as_tokens[:-1]):
        assert decode(encoding, ids) == SAID == "".join(pieces(encoding, ids))
    batch = batch_of_rows([([1], as_tokens)])
    batch.problems, agent = [SUMS_TO_5], agent_of(grpo.Config(), countdown, encoding=encoding)
    batch.texts, batch.components = reward.by_rule(agent, batch)
    assert batch.texts == [SAID] and batch.components["correct"] == 1
    episodes = turns.Episodes(lambda *given: None, encoding, 8, [SimpleNamespace(prompt="")], [1])
    assert episodes(0, [1, *as_tokens], 99) and episodes.turns == [[SAID]]
    assert decode(encoding, [257, 65, 258]) == "<|im_start|>A"


@pytest.mark.parametrize("change, end", [
    (dict(chat_template=None), 256), (dict(eos_token="<|im_end|>"), 258)])
def test_the_end_is_not_said_even_if_it_is_no_special_token(change, end, tmp_path):
    chat_folder(tmp_path)
    rewrite(tmp_path / "tokenizer.json", lambda hf: [
        token.update(special=token["id"] == 257) for token in hf["added_tokens"]])
    rewrite(tmp_path / "tokenizer_config.json", lambda about: about.update(change))
    encoding = load_encoding(tmp_path)
    assert encoding.plain == ["<|endoftext|>", "<|im_end|>"] and encoding.end == end
    assert all(decode(encoding, [*b"4888", x]) == "4888" for x in encoding.stop)


@pytest.mark.parametrize("ends", [256, [256, 258]])
def test_a_saved_model_ends_where_it_has_learned_to(ends, tmp_path):
    """In other programs, too, if its file names another end alone."""
    encoding = tagged_encoding(tmp_path, True, ends)
    saved = json.loads(encoding.files["generation_config.json"])
    assert {258} < {*encoding.stop} == {*saved["eos_token_id"]}
    assert (saved["eos_token_id"] == ends) is (ends == [256, 258])
    (tmp_path / "generation_config.json").unlink()          # config.json alone names that one
    rewrite(tmp_path / "config.json", lambda hf: hf.update(eos_token_id=ends))
    saved = load_encoding(tmp_path).files.get("generation_config.json", b'{"eos_token_id": [258]}')
    assert 258 in json.loads(saved)["eos_token_id"]


@pytest.mark.parametrize("special, text", [(False, "<answer>72</answer>"), (True, "<answer>72")])
def test_a_tag_that_ends_a_completion_is_said(special, text, tmp_path):
    """Unless it is a special token."""
    encoding = tagged_encoding(tmp_path, special, ends=[258, 262])
    assert 262 in encoding.stop and decode(encoding, [*b"<answer>72", 262]) == text


@pytest.mark.parametrize("generation, config, used", [
    (None, 2, [8]), (2, 2, [8]),            # LlamaConfig's default, alone and as saved with it
    ([5, 2], 2, [8, 5, 2]), (None, [2, 5], [8, 2, 5]), (5, 2, [8, 5]), (None, 9, [8, 9]),
    (None, [8, 7], [8]), (["x", -1], 1.5, [8])])
def test_a_default_that_nobody_chose_ends_nothing(generation, config, used):
    """A quotation mark once ended completions, unless there was nothing else to end them."""
    def ends(*named, by=()):
        given = [dict(eos_token_id=x) for x in named]
        return [*dict.fromkeys(stop_tokens(by, *given, {"<eos>": 8, "</answer>": 9}, {2, 5, 6}))]
    assert ends(generation, config, by=[8]) == used and ends(None, 2) == [2]
    with pytest.raises(UserError, match="no file names a token"):
        ends(None, 7)


# ---------- chat templates

USER = "<|im_start|>user {}<|im_end|><|im_start|>"
ASKED, BRIEF = "<|im_start|>system Be brief.<|im_end|>", dict(system="Be brief.")


@pytest.mark.parametrize("given, before, after", [
    ({}, "", ""), (BRIEF, ASKED, ""), (dict(chat="think"), "", "True"),
    (dict(chat="no_think") | BRIEF, ASKED, "False")])
def test_prompts_and_replies_are_framed_as_is_asked_for(tmp_path, given, before, after):
    ours = load_encoding(chat_folder(tmp_path), **given)
    for ids, opened in ((ours.encode_prompt("1+1="), before), (ours.encode_reply("1+1="), "")):
        want = opened + USER.format("1+1=") + after
        assert ours.decode(ids) == want and ids.count(257) == want.count("<|im_start|>")
        assert ids.count(258) == want.count("<|im_end|>")
    assert ours.stop == {256, 258}
    assert load_encoding(tmp_path, "none").stop == {256}


def test_tokens_of_a_template_may_stand_in_an_older_file(tmp_path):
    folder = chat_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ eos_token }}" + CHAT)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert load_encoding(folder).frame.before == "<|im_end|><|im_start|>user "


def test_special_tokens_of_a_text_are_text(tmp_path):
    ours, sly = load_encoding(chat_folder(tmp_path)), "a<|im_end|><|im_start|>b<|endoftext|>"
    for ids in (ours.encode_prompt(sly), ours.encode_reply(sly)):
        assert [t for t in ids if t > 255] == [257, 258, 257] and sly in decode(ours, ids)
    with pytest.raises(UserError, match="--system has a special"):
        load_encoding(tmp_path, system="a<|im_end|>b")


@pytest.mark.parametrize("says, template, given", [
    *(("insert the prompt once", f"{{{{ messages[0].{x} }}}}", {}) for x in (
        "content }}{{ messages[0].content", "role", "content | replace('<', '')",
        "content | tojson", "content | replace('\n', ' ')", "content.strip('\n')")),
    *((f"fails: {error}", template + CHAT, {}) for error, template in (
        ("TemplateError.*No.*body.", "{{ raise_exception('No\nbody.') }}"),
        ("TemplateSyntaxError", "{% for x in %}"), ("ZeroDivisionError", "{{ 1 / 0 }}"),
        ("RecursionError", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        ("SecurityError", "{{ messages.append(1) }}"),
        ("SecurityError", "{{ strftime_now.__self__.year }}"))),
    ("template ignores it", "{{ messages[-1].content }}", BRIEF),
    ("has no enable_thinking", "{{ messages[-1].content }}", dict(chat="no_think")),
    ("need a chat", CHAT, dict(chat="none") | BRIEF), ("need a chat", None, dict(chat="think")),
    ("is not a string", 7, {}), ("no default", [dict(name="x", template=CHAT)], {})])
def test_a_template_that_cannot_be_used_is_a_fault(says, template, given, tmp_path):
    where = chat_folder(tmp_path, template)
    with pytest.raises(UserError, match=f"(?s){says}"):
        load_encoding(where, **given)
    assert load_encoding(where, "none").encode_prompt("a") == [ord("a")]


def test_what_a_template_is_given(tmp_path):
    """JSON as it is, not escaped for HTML; tokens that are not null, and no other settings; no
    blanks before a block, nor the end of its line."""
    given = ("  {% if 1 %}\n{{ '<é&>' | tojson }}{% endif %}{{ tokenizer_class }}{{ pad_token }}"
             "{{ eos_token }}|")
    chat_folder(tmp_path, given + CHAT)
    rewrite(tmp_path / "tokenizer_config.json", lambda about: about.update(pad_token=None))
    assert load_encoding(tmp_path).frame.before.startswith('"<é&>"<|endoftext|>|')


LOOP = "{% for m in messages %}"
TOKENS = LOOP + ("{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
                 "{% if m.role == 'tool' %}<|im_start|>{% endif %}{% endfor %} says: ")
BEGINS = LOOP + ("{{ m.content }}{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|><|im_end|>{% endif %}")


@pytest.mark.parametrize("template, end, reply", [
    (BEGINS, "", "<|im_start|><|im_end|>"), (TOKENS, "<|im_end|>", "<|im_start|> says: ")])
def test_what_a_templates_tokens_must_be(template, end, reply, tmp_path):
    """None may take the blanks beside it. What only begins the next turn ends none."""
    ours = load_encoding(chat_folder(tmp_path, template))
    assert ours.stop == ({256, 258} if end else {256})
    assert (ours.frame.end, ours.frame.reply_before + ours.frame.reply_after) == (end, reply)
    for name, key in (("<|im_start|>", "lstrip"), ("<|im_end|>", "rstrip")):
        rewrite(tmp_path / "tokenizer.json", lambda hf: [
            token.update({"lstrip": False, key: token["content"] == name})
            for token in hf["added_tokens"]])
        with pytest.raises(UserError, match=f"im_.*has {key}"):
            load_encoding(tmp_path)
        assert load_encoding(tmp_path, "none").encode_prompt("a") == [97]


def of_tool(text, by="", than=CHAT):
    tool = LOOP + "{% if m.role == 'tool' %}" + trimmed(text, by) + "{% else %}"
    return than.replace(LOOP, tool).replace("{% endfor %}", "{% endif %}{% endfor %}")


def trimmed(template, by=" | trim"):
    return template.replace("m.content", "m.content" + by)


TOOL, TRIMMED = "<|im_start|>tool {{ m.content }}<|im_end|>", trimmed(CHAT)
LAST = "{% if loop.last %}<|im_end|>{% endif %}"
MANY = "{% if messages | selectattr('role', 'ne', 'system') | list | length > "


@pytest.mark.parametrize("role, template", [
    ("user", CHAT), ("tool", "{# 'tool' #}" + CHAT), ("user", "{# tools #}" + CHAT),
    ("tool", of_tool(TOOL)), ("tool", of_tool(TOOL.replace("<|im_end|>", LAST))),
    ("user", of_tool(TOOL + "{{ m.content }}")),
    ("user", of_tool("{{ raise_exception('no call') }}")),
    *(("user", of_tool(TOOL, by)) for by in (" | tojson", " | trim", ".strip('\n')")),
    ("user", of_tool(TOOL, "", TRIMMED)), ("tool", of_tool(TOOL, " | trim", TRIMMED)),
    ("", MANY + "2 %}{{ raise_exception('one question,\none answer') }}{% endif %}" + CHAT),
    ("", MANY + "3 %}{{ 1 / 0 }}{% endif %}" + CHAT), ("", CHAT.replace("<|im_end|>", LAST)),
    ("", CHAT.replace("m.content", "(m.content if loop.index < 3 else m.content | upper)"))])
def test_a_reply_is_a_message_of_the_template(role, template, tmp_path):
    """Of a tool if that is named and its text is as it was, each time; or there is no place."""
    ours = load_encoding(chat_folder(tmp_path, template))
    assert "1+1=" in ours.decode(ours.encode_prompt("1+1="))
    for text in ("19 is too small.", " a \n"):
        if not role:
            with pytest.raises(UserError, match="no place for a reply.*--chat none") as e:
                ours.encode_reply(text)
            assert "\n" not in str(e.value)
            continue
        shown, ids = text.strip() if ours.frame.strips else text, ours.encode_reply(text)
        assert ours.decode(ids) == USER.format(shown).replace("user", role)
        assert ids.count(257) == 2 and ids.count(258) == 1 and ours.end == 258


# ---------- templates in whole runs

RUN = "--init= --difficulty 1 --prompts 2 --group 2 --max_new 3 --save_every 1 --steps".split()


def run(capsys, *args):
    capsys.readouterr()
    grpo.main([*map(str, args)])
    return re.findall("prompts are sent as (.*)", capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_keeps_its_frame_on_another_day(tmp_path, capsys, monkeypatch):
    """Killed before its first checkpoint, resumed, and as the start of another run."""
    init = chat_folder(tmp_path / "m", "Today is {{ strftime_now('%d %b %Y') }}. " + CHAT)
    out, after, bare = (tmp_path / name for name in ("out", "after", "bare"))

    def on_day(day):
        now = datetime(2026, 7, day)
        monkeypatch.setattr(chat, "datetime", SimpleNamespace(now=lambda: now))
    on_day(1)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(report, "evaluate", None)
        run(capsys, *RUN, 1, "--init", init, "--system", "Be brief.", "--out", out)
    assert not (out / "tokenizer.json").exists()
    monkeypatch.setattr(report, "evaluate", lambda *given: {"greedy": 0.0})
    said = run(capsys, "--resume", "--out", out)
    frame = load_encoding(out).frame
    assert said == [f"'Today is 01 Jul 2026. {ASKED}{USER}'"]
    on_day(2)
    assert run(capsys, "--resume", "--steps", 2, "--out", out) == said
    assert run(capsys, *RUN, 0, "--init", out, "--out", after) == said
    assert load_encoding(out).frame == load_encoding(after).frame == frame
    brief = load_encoding(out, system="Be quick.").frame        # what else is asked for is made now
    assert brief.before.count("Be quick.") == 1 and "Be brief." not in brief.before
    other = load_encoding(out, "no_think").frame
    assert other.before == f"Today is 02 Jul 2026. {ASKED}<|im_start|>user "
    said = run(capsys, *RUN, 0, "--init", init, "--chat", "none", "--out", bare)
    assert said == run(capsys, *RUN, 0, "--init", bare, "--out", after) == []       # as it is
    assert load_encoding(bare, "think").frame.after.endswith("True")
    (out / "chat_frame.json").write_text('{"before": 1}')
    with pytest.raises(UserError, match="cannot read its tokenizer"):
        load_encoding(out)


def test_a_model_without_a_chat_template(tmp_path):
    encoding = load_encoding(chat_folder(tmp_path, None))
    assert encoding.frame == byte_encoding().frame and "chat_frame.json" not in encoding.files
    for given in (BRIEF, dict(chat="no_think")):
        with pytest.raises(UserError, match="a new model has none"):
            pretrained.encoding_of(grpo.Config(**given), "")
