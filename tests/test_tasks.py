"""The tasks, their rewards and steps; the evaluator; free text; tokenizers; chat templates."""
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
from conftest import CHAT, ROOT, agent_of, batch_of_rows, chat_folder, fault, tiny_model

import data.arithmetic as task
import data.countdown as countdown
import data.gsm8k as gsm8k
import experiments.models.sums_task as sums
import grpo
import reward
from data import UserError, chat, load_task, turns
from data.answers import evaluate, one_number, steps, tagged
from data.arithmetic import Problem
from data.tokenizer import (GPT2_SPLIT, Encoding, byte_encoding, decode, load_encoding, opening,
                            pieces, read_bpe, split_at, step_tokens, stop_tokens)
from run import files, pretrained, setup
from run.report import majority_at, pass_at

calculator = load_task(str(ROOT / "experiments" / "models" / "calculator.py"))
P, Q, TWO = Problem("47*58=", "2726"), Problem("13*12=", "156"), Problem("2*3=", "6")
WORK = "\n47*50=2000+350=2350\n47*8=320+56=376\n2350+376=2600+126=2726"
HONEST = "\n13*10=130\n13*2=26\n130+26=156"
FIVE, MAKE = gsm8k.Problem("", "5", ""), countdown.Problem("", (3, 7, 25), 46, "")
SUM = sums.Problem("What is 7 + 12?", "19", "")


def texts_of(row):
    """The texts of a row of a table; as in answers.txt, `⏎` is a new line."""
    return row.replace("⏎", "\n").split("|")


def marks(found):
    """Steps as a text: where they end, and whether they are true."""
    return " ".join(f"{end}{'-+'[truth]}" for end, truth in found)


def answered(x):
    return f"<think></think>\n<answer>{x}</answer>"


# -------------------------------------------------------------------------------- arithmetic

@pytest.mark.parametrize("difficulty, total, held, first", [
    (1, 64, 5, ["5*5=", "2*2="]), (2, 8100, 500, ["52*94=", "27*30="])])
def test_problems_of_arithmetic(difficulty, total, held, first):
    """The same on every machine; 58*47 beside 47*58 would be a leak."""
    train, held_out = sides = task.problems(difficulty)
    pairs = [{frozenset(map(int, p.prompt[:-1].split("*"))) for p in side} for side in sides]
    assert not pairs[0] & pairs[1] and [side[0].prompt for side in sides] == first
    assert len(held_out) == held and len({*train, *held_out}) == len(train) + held == total
    for p in train[:200]:
        a, b = map(int, p.prompt[:-1].split("*"))
        assert int(p.answer) == a * b


@pytest.mark.parametrize("problem, correct, working, texts", [
    (P, 0, 0, "|2725|~~2726|02726|２７２６|" + WORK.replace("2726", "2727")),
    (P, 1, 0, "2726|~2726|2726 |3" + WORK + "|" + WORK.replace("56=376", "57=376")),
    (P, 1, 0, "⏎47*58=2726|⏎58*47=2726|⏎2726=2726|⏎2725+1=2726|⏎47/(47/47/58)=2726"),
    (P, 1, 0, "⏎47*50=2350⏎9**9**9=1⏎2350+376=2726|⏎+=+⏎47*50=2350⏎47*8=376⏎2350+376=2726"),
    (P, 1, 1, WORK + "|" + WORK + "⏎|⏎58*40=2320⏎58*7=406⏎2320+406=2726"),
    (Q, 1, 1, HONEST + "⏎130+26=156" * 30 + "⏎26+130=156⏎26+0130=156=156⏎156=156"),
    (TWO, 1, 1, "⏎2*3=5+1=6|⏎2*3=6=6"), (TWO, 0, 0, "⏎2*3=6+1=7"),
    (TWO, 1, 0, "⏎2*4=5+1=6|⏎2*3=5+2=6|⏎2*3=7=6|⏎2*3=4+2=8-1=6")])
def test_rewards_of_arithmetic(problem, correct, working, texts):
    """The problem again, numbers from nowhere and what is no equation are no working."""
    for text in texts_of(texts):
        assert task.reward(problem, text) == {"correct": correct, "working": working}, text


@pytest.mark.parametrize("problem, text, found", [
    (P, WORK, "21+ 37+ 59+"), (P, "~2726", "5+"), (P, "2725", "4-"), (P, "", ""),
    (P, WORK.replace("56=376", "56=386").replace("+376=2600", "+386=2600"), "21+ 37- 59-"),
    (P, "2725\n47*50=2350", "5- 15+"), (TWO, "\n2*3=6+1=7", "10-"),
    (Q, "\n13=13" * 30, ""), (Q, "\n13=13=10+3\n13=9+4", ""),       # a number taken apart
    (Q, HONEST + "\n130+26=156" * 30, "11+ 19+ 30+"),
    (Q, HONEST + "\n26+130=156\n26+0130=156=156\n156=156", "11+ 19+ 30+"),
    (Q, "\n13=14" * 3, "7- 13- 18-"), (Q, "\n\n13*2=26\n\n13*2=26\n13*10=130", "10+ 28+")])
def test_steps_of_arithmetic(problem, text, found):
    """They end with their newline. `13=13`, thirty times, once earned thirty rewards."""
    assert marks(task.steps(problem, text)) == found


def test_demonstrations_of_arithmetic(monkeypatch):
    """Half are guesses, the others show the work; without slips they earn everything."""
    rng = random.Random(0)
    shown = [task.demonstration(P, rng) for _ in range(2000)]
    bare = [text for text in shown if "\n" not in text]
    assert len(bare) / 2000 == pytest.approx(task.GUESS, abs=0.05) and {*bare} == {"~3000"}
    right = [task.reward(P, text)["working"] for text in shown if "\n" in text]
    assert 0.9 < sum(right) / len(right) < 1
    rounded = {4: 0, 5: 10, 45: 50, 99: 100, 549: 500, 550: 600, 949: 900, 950: 1000}
    assert {n: task.rounded(n) for n in rounded} == rounded
    slips = {task.miswritten(305, rng) for _ in range(999)}
    assert slips == {*range(5, 1000, 100), *range(305, 400, 10), *range(300, 310)} - {305}
    monkeypatch.setattr(task, "GUESS", 0)
    monkeypatch.setattr(task, "SLIP", 0)
    for most in (10, 100, 1000) * 40:
        a, b = rng.randrange(2, most), rng.randrange(2, 1000)
        p = Problem(f"{a}*{b}=", str(a * b))
        assert task.reward(p, task.demonstration(p, rng)) == {"correct": 1, "working": 1}
    for prompt, working in (
            ("47*58=", WORK), ("5*8=", "\n5*8=40"), ("508*30=", "\n508*30=15000+240=15240"),
            ("40*58=", "\n40*50=2000\n40*8=320\n2000+320=2300+20=2320")):
        assert task.demonstration(Problem(prompt, ""), rng) == working


def test_answers_of_arithmetic():
    texts = ("221", "~221", WORK, "1=2=3", "", "x", "\n", "4*", "9" * 31)
    assert [*map(task.answer, texts)] == ["221", "221", "2726", "3", "", "", "", "", ""]


# ----------------------------------------------------------------------------- files of tasks

def test_tasks_that_are_none(monkeypatch, tmp_path):
    """A file in data/, a path without its suffix, which is not executed, a task that lacks one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    up = os.path.relpath(tmp_path / "reverse", Path(task.__file__).parent)
    for name in ("reverse", str(tmp_path / "reverse"), up, "./reverse", "", "a b", "a\0.py", 7,
                 "data.arithmetic", "tokenizer", "__init__", "../grpo", "nowhere/mine.py", "."):
        with pytest.raises(UserError, match="no task|no file|not a task"):
            load_task(name)
    assert not (tmp_path / "ran").exists()
    for name, why in (("reverse", "did you mean ./reverse.py"),
                      ("chess", "choose arithmetic, countdown, gsm8k, guess or")):
        with pytest.raises(UserError, match=why):
            load_task(name)
    for function in ("reward", "answer", "problems"):
        with monkeypatch.context() as patch:
            patch.delattr(task, function)
            with pytest.raises(UserError, match=f"has no function {function}"):
                load_task("arithmetic")


def test_a_task_may_lie_anywhere(tmp_path):
    """Two files of one name are two tasks."""
    code = "DEFAULTS = {}\ndef problems(): return [], []\ndef reward(p, text): return {}\n"
    for answer in "12":
        path = tmp_path / answer / "mine.py"
        path.parent.mkdir()
        path.write_text(code + f"def answer(text): return {answer!r}\n")
        assert load_task(str(path)).answer("") == answer


# ------------------------------------------------------------------------- the safe evaluator

def test_what_is_evaluated():
    values = {"2+3*4": 14, "(2+3)*4": 20, "-3+5": 2, "2--3": 5, "7/2": Fraction(7, 2), "8-3-2": 3,
              " 1 + 1 ": 2, "10/2/5": 1, "0012": 12, ".5": Fraction(1, 2), "1.25": Fraction(5, 4),
              "-(1+2)*3": -9, "11" + "+1" * 99: 110, "8/(1/2)": 16, "9" * 15: 10 ** 15 - 1}
    assert {text: evaluate(text) for text in values} == values


@pytest.mark.parametrize("text", [
    *texts_of("| |95**87**76|2^9|1/0|1/(2-2)|(1|1)|()|1+|*1|1 2|abs(1)|__import__('os')|1e9|1.5.2"),
    *texts_of("1 .5|.|٣+٤|１＋１|²|1_000|0x10|1⏎+1|lambda:0|\0"), "111" + "+1" * 99, "9" * 16,
    "(" * 5000 + "1" + ")" * 5000, "9" * 100_000, "*".join(["9" * 15] * 5000)])
def test_hostile_text_is_none_and_quick(text):
    """`95**87**76` passes the character filters of two popular repositories, and hangs them."""
    began = time.process_time()
    assert evaluate(text) is None
    assert time.process_time() - began < 1


# ----------------------------------------------------------------------- answers in free text

@pytest.mark.parametrize("value, texts", [
    (5, "5 points|5 millionaires|5 is my answer|５|10/3 ≈ 5|USD5|Rs.5|5€|adds up to 5|5 千克|...5"),
    (5, r"10/3 \approx 5|5~\text{km}|(12 - 2) x 0.5 = 5|20% of 25 = 5|5 m/s²|10 ÷ 2 = 5"),
    (5, "0.005 grand|0.05 hundred|0.000005 million|0.000000005B|0.0000005 crore|the answer is: 5"),
    (5, "2 eggs * $2.50/egg = $5|5 کتاب\u200cها"), (-5, "-5|−5|EUR -5|$ -5|-$5|$-5"),
    (18, "18.0"), (1080, r"$1,080.|$\boxed{1{,}080}$"), (42, r"\boxed{ 42 }"), (70, "70%"),
    (12, "12 eggs.|3 x 4 = 12|012"), (1000, "1e3|1 000"), (60, "5 dozen eggs"), (5000, "5k"),
    (3.5, "3.50"), (0.5, r".5|$.50|1 / 2|\frac{1}{2}|\frac12"), (1.75, "1¾"),
    (2.5, r"2 and 1/2|2 \tfrac{1}{2}"), (7, "7 " + "a" * 198), (None, "7 " + "a" * 199),
    (None, "|none|10-3|٣|17 or 18|10^2|1,2345|3:18|--5|5 quarters|M$5|-$-5|-x = 5|1...000|."),
    (None, "1⏎000|.5.00|12345678901234518|$|18 (rounded from 17.6)|5–18|5 minus one|5 and a half"),
    (None, "5 squared|5 miles in one hour|5 thirty|5٥|5²|0,005|000,018|5⏎0|5" + " a" * 100)])
def test_one_number(value, texts):
    """A part of a text once passed for the answer: 18 of `17 or 18`, 5 of `.5` and `5 million`."""
    for text in texts_of(texts):
        assert one_number(text) == value, text


@pytest.mark.parametrize("form, words", [
    ("{} 5", "not|never|none|cannot|wrong|false|mistaken|doubt|instead|unless|almost|isn’t|than"),
    ("{} 5", "over|at least|up to|plus|times|divided by|point|half|third of|double|twice|two"),
    ("{} 5", "square of|square root of|maximum of|min|twenty|hundred"),
    ("5 {}", "or so|nicht|не|不|錯|!= x|minus|multiplied|squared|cubed|halved|twice|times itself"),
    ("5 {}", "halves|thirds|tenths|and an eighth|at most|π|x|and k|hundreds|million billion|ninety"),
    ("5 {}", "is low|was it|would do|seems low|mille|mln"),
    ("5{}", r"st|nd|th|ish|万|億|만|천|千| тыс. | लाख|/x?| -|--a| - x|^2|*|* x|\%x")])
def test_each_word_makes_it_no_number(form, words):
    for word in words.split("|"):
        assert one_number(form.format(word)) is None, word


def test_answers_are_judged_as_by_hand():
    """At most 2 % of each half may be misjudged; none is."""
    lines = (ROOT / "tests" / "answers.txt").read_text("utf-8").splitlines()
    rows = [line.split(" ", 2) for line in lines if line[:1] not in ("", "#")]
    assert Counter(right for right, _, _ in rows) == {"yes": 102, "no": 102}
    for right, gold, text in rows:
        problem = gsm8k.Problem("", str(Fraction(gold)), "")
        judged = gsm8k.reward(problem, answered(text.replace("⏎", "\n")))["correct"]
        assert judged == (right == "yes"), (right, gold, text)


@pytest.mark.parametrize("form, reads", [
    ("<answer>{}</answer>", 1), ("<answer>{}", 0), ("{}</answer>", 0), ("</answer>{}<answer>", 0),
    ("{}", 0), ("<answer><answer>{}</answer>", 1), ("a<answer>{}</answer>b<answer>", 1),
    ("<answer>{}</answer></answer>", 1), ("<answer>0</answer><answer>{}</answer>", 1),
    ("<answer>{}</answer><answer>0", 1), ("<Answer>{}</Answer>", 0),
    ("<answer>\n {} \n</answer>\n", 1)])
def test_an_answer_is_between_the_last_tags(form, reads):
    """The format is rewarded where an answer is read, right or wrong."""
    for module, problem, right in ((countdown, MAKE, "3*7+25"), (gsm8k, FIVE, "5")):
        assert tagged(form.format(right)) == (right if reads else None)
        for text, correct in ((right, reads), ("1", 0)):
            parts = module.reward(problem, form.format(text))
            assert parts == {"correct": correct, "format": 0.1 * reads}


@pytest.mark.parametrize("truth, lines", [
    ("+", "48/2 = 24 clips.|So 12 x $0.25 = $3.00|1,000 + 80 = 1080.|2 + 2 = 4 and 4 * 2 = 8"),
    ("+", "20 − 13 = 7|.5*4=2|10/3 = 3.33|1/4=0.3|1/4=0.2|0.265*1=0.3|1/8=0.12"),
    ("-", "0.353*1=0.3|0.136*1=0.13|2.608*5=13|1/3=0|48/2 = 25 clips.|3 × 4 = 13|3x4=13"),
    ("-", "20–13 = 6|$2 + $3 = $6|2 + 2 = 4 and 4 * 2 = 9|1+1=2, 2+2=5|10/3 = 3.34"),
    ("", "she had 3 left|x = 5|237 potatoes - 60 = 177 cucumbers|Half of 48 = 24|2/3 of 9 = 6"),
    ("", "20% of 50 = 10|1=1||3 times 4 = 12|in all: -3+4 = 7|910" + "+0" * 99 + "=11"),
    ("", "1+1=2" + "0" * 300)])
def test_lines_with_equations_are_steps(truth, lines):
    """What cannot be checked is no step. An equation is read whole; decimals may be rounded."""
    for line in lines.split("|"):
        n = len(line) + 1
        assert marks(steps(None, line + "\nend")) == (f"{n}{truth} " * bool(truth) + f"{n + 3}+")


@pytest.mark.parametrize("text, found", [
    ("1+1=2\nb\n2+2=4\nd", "6+ 14+ 15+"), ("", ""), ("a", "1+"), ("1+1=3\n\n", "7-"),
    ("1+1=2\n" * 30 + "done", "6+ 184+"), ("Mon: 2*3=6\nTue: 2*3=6", "11+ 21+"),
    ("1+1=2\n1 + 1 = 2\n1+1=3\n1+1=3\n", "6+ 22- 28-")])
def test_steps_of_free_text(text, found):
    """A line that was there is none."""
    assert marks(steps(None, text)) == found


def test_no_more_is_read_of_a_text_than_a_working_has():
    many = [f"{n}+1={n + 1}" for n in range(5000)]
    assert len(steps(None, "\n".join(many))) == 201 and len(steps(None, " ".join(many))) == 1
    lines = [f"{'7+' * n}7={7 * n + 7}" for n in range(1, 251)]
    found = task.steps(P, "\n" + "\n".join(lines))
    assert [truth for _, truth in found] == [True] * 200 + [False] * 50


TASKS = [(task, P), (countdown, MAKE), (gsm8k, FIVE), (sums, SUM)]


@pytest.mark.parametrize("head, piece, tail", [
    ("<answer>-", " ", "!</answer>"), ("<answer>$", " ", "!</answer>"), ("", "<answer>", ""),
    ("", "=", ""), ("", "1+=", ""), ("", "1+1=2\n", ""), ("", "(", "=1"), ("1=", "1+" * 99, "1="),
    ("1=", "1" * 199 + "y=", ""), ("", "47=47\n", ""), ("1", ",000", ""), ("", "-", "y"),
    ("", "9", ""), ("", "- ", "5"), ("1", " ", "-5"), ("", "1.1.", "")])
def test_hostile_texts_take_linear_time(head, piece, tail):
    """`<answer>-`, 800 spaces and `!` took a second. Quadratic time is 16 times as long."""
    def took(n):
        text = around.format(head + piece * (n // len(piece)) + tail)
        began = time.process_time()
        module.reward(problem, text), module.answer(text), module.steps(problem, text)
        return time.process_time() - began
    for (module, problem), around in itertools.product(TASKS, ("{}", "\n{}", answered("{}"))):
        assert any(took(10_000) < 9 * took(2_500) + 1e-3 for _ in range(4))


def test_numbers_too_long_for_python():
    """int() of more than 4,300 digits raises, and a sampled text must not end a run."""
    for n in ("9" * 5000, "1" + ",000" * 1500, "1." + "0" * 5000, "." + "1" * 5000):
        for text in (n, f"\n{n}=1", f"\n47*{n}={n}", f"\n1+1={n}=", answered(f"3+{n}")):
            for module, problem in TASKS:
                assert module.reward(problem, text)["correct"] == 0
                assert module.steps(problem, text) and module.answer(text) is not None


def test_no_pattern_has_a_possessive_group():
    """Python before 3.11.5, which Debian 12 has, matches one wrongly."""
    for path in (ROOT / "data").glob("*.py"):
        assert not re.search(r"\)[+*?]\+", path.read_text()), path.name


# ------------------------------------------------------------------------------- gsm8k

def rows_in(folder, *rows):
    """The path of a file of these questions and answers, with blank lines."""
    path = folder / "rows.jsonl"
    lines = [json.dumps({"question": q, "answer": a}) + "\n \n" for q, a in rows]
    path.write_text("\ufeff\n" + "".join(lines))
    return str(path)


def test_gsm8k(tmp_path, encoding):
    path = rows_in(tmp_path, (" Two and 2?\n", " 2+2 = <<2+2=4>>4 \n#### 4"),
                   ("Many?" + " word" * 300, "It is.\n#### 1,080"))
    train, test = gsm8k.problems(path, path)
    assert train == test and [p.answer for p in train] == ["4", "1080"]
    assert train[0].prompt == gsm8k.PROMPT.format("Two and 2?")
    assert train[0].solution == "2+2 = <<2+2=4>>4"
    for p in train:
        shown = gsm8k.demonstration(p, random)
        assert gsm8k.reward(p, shown) == {"correct": 1.0, "format": 0.1} and "<<" not in shown
        assert all(truth for _, truth in gsm8k.steps(p, shown))
    assert gsm8k.answer(answered("$1,080.00")) == "1080" and gsm8k.answer("none") == ""
    began, many = time.process_time(), gsm8k.Problem("", "4", "2+2 = <<2+2=4>>4" + "<<" * 20_000)
    assert gsm8k.demonstration(many, random).startswith("<think>\n2+2 = 4<<<<")
    assert time.process_time() - began < 0.2
    assert gsm8k.problems("", path, 1505) == ([], test)          # an evaluation needs only --test
    assert gsm8k.problems(path, path, 1504) == (train[:1], test[:1])
    longest = setup.longest_of(encoding, train)
    with pytest.raises(UserError, match=f"a prompt of {len(train[1].prompt)} tokens and --max_new 8"):
        pretrained.check_context(tiny_model(block_size=512), grpo.Config(max_new=8), longest)


GOOD = b'{"question": "q", "answer": "#### 1"}'


@pytest.mark.parametrize("why, lines", [
    ("RecursionError", [b"[" * 100_000]), ("not an object", [b"[]", b"7"]),
    ("UnicodeDecodeError", [b"\xef\xbb", b'{"question": "\xff"}', GOOD.decode().encode("utf-16")]),
    ("Unterminated string", [b'{"question": "q']),
    ("'question' must be a string", [b'{"question": 1, "answer": "#### 1"}', b"{}"]),
    ("'answer' must be a string", [b'{"question": "q"}', b'{"question": "q", "answer": 1}']),
    ("4300 digits", [b'{"question": "q", "answer": ' + b"9" * 5000 + b"}"]),
    ("#### n", [GOOD.replace(b"1", x) for x in (b"9" * 5000, b"1 or 2", b"many")]),
    ("#### n", [GOOD.replace(b"#", b"")]), ("surrogates", [GOOD.replace(b'q"', b'\\ud800"')])])
def test_a_bad_line_of_a_file_is_named(tmp_path, why, lines):
    path = tmp_path / "rows.jsonl"
    for line in lines:
        path.write_bytes(GOOD + b"\n \n" + line + b"\n" + GOOD)
        with pytest.raises(UserError, match=rf"--train .*rows.jsonl, line 3: .*{why}") as e:
            gsm8k.problems(str(path))
        assert "\n" not in str(e.value) and len(str(e.value)) < 500
    for given, why in ((rows_in(tmp_path), "is empty"), (str(tmp_path / "none"), "No such file"),
                       ("", "needs --test FILE")):
        with pytest.raises(UserError, match=why):
            gsm8k.problems(given)


# ------------------------------------------------------------------------------- countdown

@pytest.mark.slow
def test_countdown():
    """All different, with a solution, after up to three others that have the values they say."""
    train, held_out = sides = countdown.problems(3)
    assert len(held_out) == 500 and len(train) > 1000
    assert [(side[0].numbers, side[0].target) for side in sides] == [((2, 8, 11), 30),
                                                                     ((2, 8, 71), 65)]
    keys = [(p.numbers, p.target) for p in train + held_out]
    assert len({*keys}) == len(keys) and all(len(p.numbers) == 3 for p in train)
    assert {n for p in train for n in p.numbers} == {*range(1, 100)}
    assert {p.target for p in train} == {*range(10, 100)}
    tried = set()
    for p in train[:200]:
        *shown, target = map(int, re.findall(r"[0-9]+", p.prompt.partition(".")[0]))
        assert sorted(shown) == sorted(p.numbers) and target == p.target
        said = countdown.demonstration(p, random)
        assert countdown.reward(p, said) == {"correct": 1.0, "format": 0.1}
        assert all(truth for _, truth in countdown.steps(p, said))
        assert said.endswith(f"\n</think>\n<answer>{p.solution}</answer>")
        *misses, last = [line.split("=") for line in said.splitlines()[1:-2]]
        assert last == [p.solution, str(p.target)] and len({x for x, _ in misses}) == len(misses)
        for text, value in misses:
            assert evaluate(text) == evaluate(value) != p.target
            assert sorted(map(int, re.findall(r"\d+", text))) == sorted(p.numbers)
        tried.add(len(misses))
    assert tried == {0, 1, 2, 3}


def test_difficulties(monkeypatch):
    monkeypatch.setattr(countdown, "DRAWS", 20)
    assert countdown.problems(2) and countdown.problems(6)
    for module, n in ((countdown, 1), (countdown, 7), (sums, 0), (sums, 5), (task, 0), (task, 4)):
        with pytest.raises(UserError, match=f"--difficulty {n}: .* takes "):
            module.problems(n)


@pytest.mark.parametrize("numbers, target, correct, texts", [
    ((3, 7, 25), 46, 1, "25+3*7| 3 * 7 + 25 |(3*7)+25"),
    ((3, 7, 25), 46, 0, "46|25+3*7+0|25+21|25+3*7=46|3*7+25*1|2 5+3*7|2⏎5+3*7|25+3*7*7/7|3+7+25"),
    ((3, 7, 25), 46, 0, "25**1+3*7|"), ((3, 4, 25), 13, 0, "3.25*4"),
    ((3, 4, 25), 59, 0, "0000000034+25|34+25"), ((3, 4, 25), 37, 1, "3*4+25"),
    ((3, 4, 25), 37, 0, "3*4+025|3.0*4+25"), ((1, 5, 15), 15, 0, "15"),
    ((3, 5), 15, 0, "３*5|3*٥|3*5 or 5*3|3*5</answer><answer>8")])
def test_countdown_wants_each_number_once(numbers, target, correct, texts):
    """`0000000034` was 3 and 4 to the check of the numbers, and 34 to the evaluator."""
    for text in texts_of(texts):
        parts = countdown.reward(countdown.Problem("", numbers, target, ""), answered(text))
        assert parts == {"correct": correct, "format": 0.1}, text


# ---------------------------------------------------------------------- sums, the calculator

@pytest.mark.parametrize("difficulty, n, most, first, last, results", [
    (1, 480, 20, "What is 9 + 12?", "What is 6 + 15?", (0, 40)),
    (3, 8936, 99, "What is 99 + 68 + 40?", "What is 8 + 48 + 69?", (0, 288)),
    (4, 3645, 50, "There are 30 marbles in one box and 34 in another. How many marbles is that?",
     "Clara has 19 stamps and gets 32 more. How many stamps does Clara have now?", (0, 100))])
def test_problems_of_sums(difficulty, n, most, first, last, results):
    """Right, the same every time; held-out numbers are in no training problem."""
    train, held_out = sides = sums.problems(difficulty)
    assert (len(train), len(held_out)) == (n, 128) and sums.problems(difficulty) == sides
    assert (train[0].prompt, held_out[-1].prompt) == (first, last)
    totals = [int(p.answer) for p in train]
    assert (min(totals), max(totals)) == results
    numbers = [{tuple(sorted(map(int, re.findall("[0-9]+", p.solution.split("=")[0]))))
                for p in side} for side in sides]
    assert not numbers[0] & numbers[1]
    assert {*itertools.chain(*numbers[0], *numbers[1])} == {*range(1, most + 1)}
    for p in train + held_out:
        text, total = p.solution.split(" = ")
        assert total == p.answer and evaluate(text) == int(total)
        assert Counter(re.findall("[0-9]+", p.prompt)) == Counter(re.findall("[0-9]+", text))
        assert difficulty == 4 or p.prompt == f"What is {text}?"
    said = sums.demonstration(p, None)
    assert sums.reward(p, said) == {"correct": 1, "near": 0.2}
    assert sums.steps(p, said) == [(len(said), True)]


@pytest.mark.parametrize("said, near, texts", [
    ("19", 0.2, "19|7 + 12 = 19.|It is 19, of course.|019|19.0|7,19|The answer is...19|5–19"),
    ("19", 0.2, "-> 19|---⏎19|…19"), ("18", 0.1, "18"), ("20", 0.1, "19⏎⏎So 20"),
    ("1234", 0.2 / 1216, "1,234"), ("37/2", 0.4 / 3, "18.5"), ("19/100", 0.2 / 19.81, "is .19"),
    ("", 0, "|none|١٩|" + "9" * 16), ("-5", 0.008, "-5|= -5|(-5)|−5"),
    ("5", 0.2 / 15, "12-5|12 - 5|(9) - 5|covid-5|12 minus 5|$12 - $5|12% - 5|12 – 5"),
    ("-19", 0.2 / 39, "- 19|– 19|−\u200919|3 - 22 = - 19|- \\$19|-**19**|Minus 19|x⏎- 19")])
def test_the_last_number_counts(said, near, texts):
    """A minus sign too, if it is no subtraction or hyphen; the more the nearer it is."""
    for text in texts_of(texts):
        assert sums.answer(text) == said, text
        parts = sums.reward(SUM, text)
        assert parts == {"correct": said == "19", "near": pytest.approx(near, rel=1e-12)}


PRODUCT = calculator.Problem("What is 47 * 58?", "47 * 58", "2726")


@pytest.mark.parametrize("said, turn", [
    ("2726", "<tool>47*58</tool>"), ("2726", "I use <tool><tool> 47 * 58 </tool>."), (None, ""),
    ("2", "<tool>1+1</tool><tool>2+2</tool>"), (None, "tool>47*58</tool>"),
    *(("error", f"<tool>{x}") for x in ("</tool>", "1/0</tool>", "9**9**9</tool>", "47*58")),
    ("error", "<tool>" * 10 ** 5), ("error", "<tool>" + "1+" * 10 ** 5 + "1</tool>")])
def test_the_calculator_replies_to_calls(said, turn):
    began = time.process_time()
    assert calculator.reply(PRODUCT, ["<tool>1+1</tool>", "2", turn]) == said
    assert time.process_time() - began < 1


@pytest.mark.parametrize("correct, call, said", [
    (1, 0, "47 * 58 = 2726"), (0, 0, "2725"), (1, -0.1, "<tool>47*58</tool>|2726|2726"),
    (1, -0.2, "<tool>47</tool>|47|<tool>|error|So 2726."), (0, 0, "<tool>47*59</tool>|2773|2773"),
    (0, 0, "<tool>47*58</tool>|2726|I know."), (0, 0, "2726 <tool>"), (0, 0, "<tool>47*58</tool>")])
def test_only_the_last_turn_earns(correct, call, said):
    """Neither the reply nor a call is an answer."""
    parts = calculator.reward(PRODUCT, said.split("|"))
    assert parts == {"correct": correct, "call": pytest.approx(call)}


def test_demonstrations_call_for_products_as_often_as_for_sums():
    """And a third of their calls are wrong. Held-out numbers never occur in training."""
    train, held_out = calculator.problems()
    rng, numbers = random.Random(0), lambda p: tuple(sorted(p.expression.split()))
    tuned = calculator.problems(development=1)[1]
    assert not {*map(numbers, train)} & {*map(numbers, held_out + tuned)}
    assert not {*held_out} & {*tuned}
    for sign in "*+":
        own = [p for p in train if f" {sign} " in p.prompt]
        shown = [turns.demonstration(calculator, p, rng) for p in own]      # its replies are right
        right = [said[0] == f"<tool>{p.expression.replace(' ', '')}</tool>"
                 for p, said in zip(own, shown) if len(said) == 3]
        assert len(right) / len(own) == pytest.approx(0.5, abs=0.05)
        assert sum(right) / len(right) == pytest.approx(2 / 3, abs=0.05)


# ----------------------------------------------------------------------------- several answers

def test_pass_at_k_is_the_mean_over_all_sets():
    for right in ([0, 0, 1, 0, 1], [1, 1, 1], [0.0] * 4, [0.5, 0, 1, 0.25]):
        for k in range(1, len(right) + 1):
            best = [max(own) for own in itertools.combinations(right, k)]
            assert pass_at(k, right) == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("k, right, said, share", [
    (4, [1, 0, 0, 1], "abba", 1), (4, [0, 1, 1, 0], "abba", 0),         # as frequent: the first
    (2, [1, 1, 0, 0, 1], "aabba", 0.5),                         # sets side by side; the rest is out
    (3, [1, 0, 0], ["a", "", ""], 1), (3, [0, 0, 0], ["", "", ""], 0)])     # "" is no vote
def test_majority_of_k(k, right, said, share):
    assert majority_at(k, right, [*said]) == share


# ------------------------------------------------------------------------------- tokenizers

def test_bytes_survive(encoding):
    """Nothing is split, merged or normalised, and the end cannot be spelled."""
    rng, end = random.Random(0), "1*1=<|endoftext|>e\u0301"
    for raw in [end.encode(), *(rng.randbytes(rng.randrange(40)) for _ in range(200))]:
        text = raw.decode("utf-8", errors="replace")
        ids = encoding.encode_ordinary(text)
        assert ids == [*text.encode()] and encoding.decode(ids) == text == decode(encoding, ids)
        assert b"".join(map(encoding.decode_single_token_bytes, raw)) == raw
    assert encoding.eot_token == 256 and encoding.n_vocab == 257
    assert encoding.encode_prompt(" a ") == encoding.encode_reply(" a ") == [32, 97, 32]


def test_the_byte_tokenizers_files_are_for_others_too(encoding):
    hf, about = (json.loads(encoding.files[name])
                 for name in ("tokenizer.json", "tokenizer_config.json"))
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    assert hf["pre_tokenizer"] == hf["decoder"] == level and hf["normalizer"] is None
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    assert hf["added_tokens"] == [dict(id=256, content="<|endoftext|>", special=True, **off)]
    assert sorted(hf["model"].pop("vocab").values()) == [*range(256)]
    assert hf["model"] == dict(type="BPE", merges=[]) and about["eos_token"] == "<|endoftext|>"


def split(**pattern):
    return dict(type="Split", pattern=pattern, behavior="Isolated", invert=False)


def alone(pattern):
    return rf"(?m)(?:{pattern})|(?:(?!{pattern})[\s\S])+"


LETTERS, DOT = split(Regex="[a-z]+| "), split(String="a.")
EACH, TOGETHER = (dict(type="Digits", individual_digits=x) for x in (True, False))
LEVEL, PLAIN = dict(type="ByteLevel"), dict(type="ByteLevel", use_regex=False)


@pytest.mark.parametrize("parts, patterns", [
    ([LEVEL], [GPT2_SPLIT]), ([PLAIN], [r"[\s\S]+"]), ([EACH, PLAIN], [alone(r"\p{N}")]),
    ([TOGETHER, LEVEL], [alone(r"\p{N}+"), GPT2_SPLIT]),
    ([LETTERS, DOT, PLAIN], [alone("[a-z]+| "), alone(r"a\.")])])
def test_how_a_tokenizer_splits_a_text(encoding, parts, patterns):
    """By one pattern after another, as its file says."""
    hf = json.loads(encoding.files["tokenizer.json"])
    hf["pre_tokenizer"] = dict(type="Sequence", pretokenizers=parts)
    found = read_bpe(hf, {})
    assert [x.pattern for x in found["before"]] + [found["split"]] == patterns and not found["nfc"]
    for i in (2 ** 31, -1, 300.0, "7", 98):
        hf["model"]["vocab"]["a"] = i
        with pytest.raises(UserError, match="not all different integers"):
            read_bpe(hf, {})
    hf["model"]["vocab"]["a"] = 2 ** 31 - 1
    assert read_bpe(hf, {})["ranks"][b"a"] == 2 ** 31 - 1


def test_tokens_before_every_text():
    """Those of each post-processor."""
    one, two = (dict(SpecialToken=dict(id=name)) for name in ("<s>", "<t>"))
    text, known = dict(Sequence=dict(id="A")), {"<s>": 300, "<t>": 301}

    def opened(*singles, known=known):
        parts = [dict(type="TemplateProcessing", single=x) for x in singles]
        post = dict(type="Sequence", processors=[dict(type="ByteLevel"), *parts])
        return opening(dict(post_processor=post), known)
    assert opened([one, text], [two, text]) == "<s><t>" and opening({}, {}) == ""
    for single, names in (([one, text], {}), ([one, text, one], known)):
        with pytest.raises(UserError, match="after a text, or an unknown"):
            opened(single, known=names)


def test_the_longest_of_marks_is_found():
    for names in (["<a>", "<a>b"], ["<a>b", "<a>"]):
        assert split_at(names, "x<a>by<a>") == ["x", "<a>b", "y", "<a>", ""]


@pytest.mark.parametrize("piece", ["a", " ", "!", "\n ", "<", "é", "\ud800"])
def test_tokenizers_take_linear_time(encoding, piece):
    ranks = {bytes([i]): i for i in range(255)}
    lacking = Encoding("test", GPT2_SPLIT, ranks, {"<end>": 300}, [300], {})

    def took(n):
        began = time.process_time()
        ids = tokenizer.encode_ordinary(piece * (n // len(piece)))
        said = decode(tokenizer, ids)
        assert step_tokens(tokenizer, ids, [len(said)]) == [len(ids) - 1]
        return time.process_time() - began
    for tokenizer in (encoding, lacking):
        assert any(took(16_000) < 9 * took(4_000) + 1e-3 for _ in range(4))


# ------------------------------------------------------------------- tags that are tokens

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]
SAID = "<think>\n48+24=72\n</think>\n<tool_call>{}</tool_call><answer>72</answer>"


def rewritten(path, change):
    """Changes a JSON file."""
    hf = json.loads(path.read_text())
    change(hf)
    path.write_text(json.dumps(hf))


def tagged_encoding(folder, special, ends=(258,)):
    """A chat model's tokenizer with TAGS as tokens of their own, special ones or not."""
    path = chat_folder(folder) / "tokenizer.json"
    one = json.loads(path.read_text())["added_tokens"][0] | dict(special=special)
    more = [one | dict(id=259 + i, content=tag) for i, tag in enumerate(TAGS)]
    rewritten(path, lambda hf: hf["added_tokens"].extend(more))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_encoding(folder)


@pytest.mark.parametrize("special", [True, False])
def test_a_reward_sees_tags_that_are_tokens_and_not_the_end(special, tmp_path):
    """However the policy says them: as tokens or in letters. A tool call too."""
    encoding = tagged_encoding(tmp_path, special)
    as_tokens, in_letters = encoding.encode_demonstration(SAID), [*SAID.encode(), 258]
    assert {*range(258, 265)} < {*as_tokens} and as_tokens[-1] == 258
    for ids in (as_tokens, in_letters, as_tokens[:3] + in_letters[9:], as_tokens[:-1]):
        assert decode(encoding, ids) == SAID == "".join(pieces(encoding, ids))
        batch = batch_of_rows([([1], ids)])
        agent = agent_of(grpo.Config(), gsm8k, encoding=encoding)
        reward.score_by_rule(agent, [gsm8k.Problem("", "72", "")], batch)
        parts = {name: x.item() for name, x in batch.components.items()}
        assert batch.texts == [SAID] and parts == pytest.approx({"correct": 1.0, "format": 0.1})
    assert decode(encoding, [257, 65, 258]) == "<|im_start|>A"      # what it should not say is seen
    seen, call = [], "<think>\nhm</think><tool_call>48/2</tool_call>"
    reply = lambda problem, said: seen.append([*said]) or "24"      # noqa: E731
    episodes = turns.Episodes(reply, encoding, 8, [None], [1])
    assert episodes(0, [1, *encoding.encode_demonstration(call)], 1000) and seen == [[call]]


def test_score_pairs_each_completion_with_its_prompt():
    """Elsewhere the completions of one prompt were scored against another's answer."""
    toy = SimpleNamespace(reward=lambda p, text: {"correct": p.answer == text, "at": int(p.answer)})
    batch = batch_of_rows([(b"", str(i // 2).encode()) for i in range(8)])
    problems = [Problem(str(i), str(i)) for i in range(4)]
    reward.score_by_rule(agent_of(grpo.Config(), toy), problems, batch)
    assert batch.components["correct"].tolist() == [1] * 8
    assert batch.components["at"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("by", ["eos_token", "chat_template"])
def test_the_end_is_not_said_even_if_it_is_no_special_token(by, tmp_path):
    """Some files call it an added token like any other."""
    chat_folder(tmp_path)
    rewritten(tmp_path / "tokenizer.json", lambda hf: [
        token.update(special=token["id"] == 257) for token in hf["added_tokens"]])
    change = dict(chat_template=None) if by == "eos_token" else dict(eos_token="<|im_end|>")
    rewritten(tmp_path / "tokenizer_config.json", lambda about: about.update(change))
    encoding = load_encoding(tmp_path)
    assert encoding.plain == ["<|endoftext|>", "<|im_end|>"]
    assert encoding.end == (256 if by == "eos_token" else 258)
    for end in encoding.stop:
        assert decode(encoding, [*b"4888", end]) == "4888"


@pytest.mark.parametrize("special, text", [(False, "<answer>72</answer>"), (True, "<answer>72")])
def test_a_tag_that_ends_a_completion_is_said(special, text, tmp_path):
    """Unless it is a special token, an end like any other."""
    encoding = tagged_encoding(tmp_path, special, ends=[258, 262])
    assert 262 in encoding.stop and decode(encoding, [*b"<answer>72", 262]) == text
    assert decode(encoding, [65, 258]) == "A"


@pytest.mark.parametrize("generation, config, used", [
    (None, 2, [8]), (2, 2, [8]),            # LlamaConfig's default, alone and as saved with it
    ([2], 2, [8, 2]), ([5, 2], 2, [8, 5, 2]), (None, [2, 5], [8, 2, 5]),       # a list
    (5, 2, [8, 5]), (None, 9, [8, 9]), (9, 9, [8, 9]), (50256, 50256, [8]), (None, [8, 7], [8]),
    (["x", -1], 1.5, [8])])
def test_a_default_that_nobody_chose_ends_nothing(generation, config, used):
    """A quotation mark once ended completions, unless there was nothing else to end them."""
    words, special = {2, 5, 6}, {"<eos>": 8, "</answer>": 9}
    more = [dict(eos_token_id=x) for x in (generation, config)]
    assert [*dict.fromkeys(stop_tokens([8], *more, special, words))] == used
    assert stop_tokens([], {}, {"eos_token_id": 2}, special, words) == [2]
    with pytest.raises(UserError, match="no file names a token"):
        stop_tokens([], {}, {"eos_token_id": 7}, special, words)


# ------------------------------------------------------------------------------ chat templates

USER = "<|im_start|>user {}<|im_end|><|im_start|>"
ASKED, BRIEF = "<|im_start|>system Be brief.<|im_end|>", dict(system="Be brief.")


@pytest.mark.parametrize("given, before, after", [
    ({}, "", ""), (BRIEF, ASKED, ""), (dict(chat="think"), "", "True"),
    (dict(chat="no_think") | BRIEF, ASKED, "False"), (dict(chat="none"), "", "")])
def test_prompts_and_replies_are_framed_as_is_asked_for(tmp_path, given, before, after):
    """The system says its message once, in the prompt."""
    ours, bare = load_encoding(chat_folder(tmp_path), **given), given.get("chat") == "none"
    for ids, opened in ((ours.encode_prompt("1+1="), before), (ours.encode_reply("1+1="), "")):
        want = "1+1=" if bare else opened + USER.format("1+1=") + after
        assert ours.decode(ids) == want and ids.count(257) == want.count("<|im_start|>")
        assert ids.count(258) == want.count("<|im_end|>")
    assert ours.stop == ({256} if bare else {256, 258})         # a turn's end, of a framed prompt


def test_special_tokens_of_a_text_are_text(tmp_path):
    """A text cannot end its own turn, nor a reply its own message."""
    ours, sly = load_encoding(chat_folder(tmp_path)), "a<|im_end|><|im_start|>b<|endoftext|>"
    for encode in (ours.encode_prompt, ours.encode_reply):
        ids = encode(sly)
        assert [t for t in ids if t > 255] == [257, 258, 257] and sly in decode(ours, ids)
    with pytest.raises(UserError, match="--system has a special"):
        load_encoding(tmp_path, system="a<|im_end|>b")


@pytest.mark.parametrize("says, template, given", [
    *(("insert the prompt once", f"{{{{ messages[0].{x} }}}}", {}) for x in (
        "content }}{{ messages[0].content", "role", "content | replace('<', '')", "content | e",
        "content | tojson", "content | replace('\n', ' ')", "content.strip('\n')",
        "content | upper")),
    ("fails: TemplateError.*No.*body.", "{{ raise_exception('No\nbody.') }}", {}),
    ("fails: TemplateSyntaxError", "{% for x in %}", {}),
    ("fails: UndefinedError", "{{ messages[7].content }}", {}),
    ("fails: ZeroDivisionError", "{{ 1 / 0 }}", {}), ("fails: TypeError", "{{ 'a' + 1 }}", {}),
    ("fails: RecursionError", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {}),
    ("fails: SecurityError", "{{ messages.append(1) }}", {}),
    ("fails: SecurityError", "{{ strftime_now.__self__.year }}" + CHAT, {}),
    ("adds 200,", "{{ 'a' * 200000 }}" + CHAT, {}),
    ("template ignores it", "{{ messages[-1].content }}", BRIEF),
    ("has no enable_thinking", "{{ messages[-1].content }}", dict(chat="no_think")),
    ("need a chat template", CHAT, dict(chat="none") | BRIEF),
    ("need a chat template", None, dict(chat="think")), ("need a chat template", None, BRIEF),
    ("is not a string", 7, {}), ("several and no default", [dict(name="x", template=CHAT)], {})])
def test_a_template_that_cannot_be_used_is_a_fault(says, template, given, tmp_path):
    """Without a template, or with --chat none, nothing is lost."""
    where = str(chat_folder(tmp_path, template))
    with pytest.raises(UserError, match=f"(?s){says}"):
        load_encoding(where, **given)
    assert load_encoding(where, "none").encode_prompt("a") == [ord("a")]


def test_what_a_template_is_given(tmp_path):
    """JSON as it is, not escaped for HTML; tokens that are not null, and no other settings."""
    json_and_tokens = "{{ '<é&>' | tojson }}{{ tokenizer_class }}{{ pad_token }}{{ eos_token }}|"
    chat_folder(tmp_path, json_and_tokens + CHAT)
    path = tmp_path / "tokenizer_config.json"
    rewritten(path, lambda about: about.update(pad_token=None))
    assert load_encoding(tmp_path).frame.before.startswith('"<é&>"<|endoftext|>|')
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(UserError, match="special_tokens_map.json is not JSON"):
        load_encoding(tmp_path)


LOOP = "{% for m in messages %}"
BEGINS = LOOP + ("<|im_start|>{{ m.content }}{% endfor %}"
                 "{% if add_generation_prompt %}<|im_end|>{% endif %}")
OF_EACH = LOOP + ("{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
                  "{% if m.role == 'tool' %}<|im_start|>{% endif %}{% endfor %} says: ")


@pytest.mark.parametrize("template, stop, frame", [
    (BEGINS, {256}, ("<|im_start|>", "<|im_end|>", "")),
    (OF_EACH, {256, 258}, ("", " says: ", "<|im_end|>", "", "<|im_start|> says: "))])
def test_what_a_templates_tokens_must_be(template, stop, frame, tmp_path):
    """None may take the blanks beside it. What only begins the next turn ends none."""
    ours = load_encoding(chat_folder(tmp_path, template))
    x = ours.frame
    assert ours.stop == stop
    assert frame == (x.before, x.after, x.end, x.reply_before, x.reply_after)[:len(frame)]
    path = tmp_path / "tokenizer.json"
    whole = path.read_text()
    for i, key in itertools.product((1, 2), ("lstrip", "rstrip")):
        path.write_text(whole)
        rewritten(path, lambda hf: hf["added_tokens"][i].update({key: True}))
        with pytest.raises(UserError, match=f"im_.*has {key}"):
            load_encoding(tmp_path)
        assert load_encoding(tmp_path, "none").encode_prompt("a") == [97]


def of_tool(text, than=CHAT):
    """CHAT, with this instead of a message of the tool, and `than` instead of any other."""
    tool = LOOP + "{% if m.role == 'tool' %}" + text + "{% else %}"
    return than.replace(LOOP, tool).replace("{% endfor %}", "{% endif %}{% endfor %}")


def trimmed(template, by=" | trim"):
    return template.replace("m.content", "m.content" + by)


TOOL = "<|im_start|>tool {{ m.content }}<|im_end|>"
FIRST = ("{% if not messages[:loop.index0] | selectattr('role', 'eq', 'tool') | list %}"
         "first: {% endif %}")
LAST = TOOL.replace("<|im_end|>", "{% if loop.last %}<|im_end|>{% endif %}")
BLANKS = CHAT.replace("<|im_end|>", "{% if m.role == 'assistant' %} \n{% endif %}<|im_end|>")


@pytest.mark.parametrize("role, template", [
    ("user", CHAT), ("tool", "{# 'tool' #}" + CHAT), ("user", "{# tools #}" + CHAT),
    ("tool", of_tool(TOOL)), ("tool", of_tool(LAST)), ("user", of_tool("")), ("user", BLANKS),
    ("user", of_tool(TOOL + "{{ m.content }}")), ("user", of_tool(FIRST + TOOL)),
    ("user", of_tool("{{ raise_exception('a call is missing') }}")),
    *(("user", of_tool(trimmed(TOOL, by))) for by in (" | tojson", " | trim", ".strip('\n')")),
    ("user", of_tool(TOOL, trimmed(CHAT))), ("tool", of_tool(trimmed(TOOL), trimmed(CHAT)))])
def test_a_reply_is_a_message_of_the_template(role, template, tmp_path):
    """Of a tool if that is named and its text is as it was, each time."""
    ours = load_encoding(chat_folder(tmp_path, template))
    for text in ("19 is too small.", " a \n"):
        shown, ids = text.strip() if ours.frame.strips else text, ours.encode_reply(text)
        assert ours.decode(ids) == USER.format(shown).replace("user", role)
        assert ids.count(257) == 2 and ids.count(258) == 1 and ours.end == 258


MANY = "{% if messages | selectattr('role', 'ne', 'system') | list | length > "


@pytest.mark.parametrize("template", [
    MANY + "2 %}{{ raise_exception('one question,\none answer') }}{% endif %}" + CHAT,
    MANY + "3 %}{{ 1 / 0 }}{% endif %}" + CHAT, "{% set messages = messages[:2] %}" + CHAT,
    CHAT.replace("m.content", "(m.content if loop.index < 3 else m.content | upper)"),
    CHAT.replace("<|im_end|>", "{% if loop.last or m.role != 'assistant' %}<|im_end|>{% endif %}"),
    MANY + "2 %}{{ 1 / 0 }}{% endif %}" + LOOP + "{{ m.content }}{% endfor %}"])
def test_a_template_without_a_place_for_a_reply(template, tmp_path):
    """Is a fault in one line once there is a reply, and none before."""
    ours = load_encoding(chat_folder(tmp_path, template))
    assert "1+1=" in ours.decode(ours.encode_prompt("1+1=")) and ours.frame.chat == "auto"
    with pytest.raises(UserError, match="no place for a reply.*--chat none") as e:
        ours.encode_reply("19 is too small.")
    assert "\n" not in str(e.value) and str(e.value).startswith(f"{tmp_path}: ")
    assert load_encoding(tmp_path, "none").encode_reply("a") == [97]


def test_the_frame_that_a_run_has_left(tmp_path):
    """One of before there were replies still frames prompts; a damaged one is named."""
    new, path = load_encoding(chat_folder(tmp_path)), tmp_path / "chat_frame.json"
    old = json.loads(new.files[path.name]) | {"before": "<|im_start|>on an older day "}
    del old["reply_before"], old["reply_after"]
    path.write_text(json.dumps(old))
    ours = load_encoding(tmp_path)
    prompt = ours.encode_prompt("1+1=")
    assert ours.decode(prompt).startswith("<|im_start|>on an older day 1+1=<|im_end|>")
    assert prompt[0] == 257 and ours.stop == new.stop
    with pytest.raises(UserError, match="is older than replies"):
        ours.encode_reply("a")
    path.write_text('{"before": 1}')
    with pytest.raises(UserError, match="value of the wrong type"):
        load_encoding(tmp_path)


# ------------------------------------------------------------------- templates in whole runs

RUN = "--difficulty 1 --prompts 2 --group 2 --max_new 3 --lr 1e-2 --save_every 1 --steps".split()


def run(capsys, *args):
    """What a command says."""
    try:
        grpo.main([*map(str, args)])
    finally:
        files.LOCK.close()
    return capsys.readouterr().out


def killed_if(real, when):
    """`real`, but the process ends after the call of which this is true."""
    def call(*given):
        real(*given)
        if when(*given):
            raise KeyboardInterrupt
    return call


@pytest.mark.slow
def test_a_run_keeps_its_frame_on_another_day(tmp_path, capsys, monkeypatch):
    """Resumed, asked, and as the start of another run; a run of its own begins with its own day."""
    init = chat_folder(tmp_path / "m", "Today is {{ strftime_now('%d %b %Y') }}. " + CHAT)
    monkeypatch.setattr(grpo, "evaluate", lambda agent, problems: {"greedy": 0.0})
    whole, cut, after, bare = (tmp_path / name for name in ("whole", "cut", "next", "bare"))

    def on_day(day):
        now = datetime(2026, 7, day)
        monkeypatch.setattr(chat, "datetime", SimpleNamespace(now=lambda: now))
    on_day(1)
    said = run(capsys, *RUN, 2, "--init", init, "--system", "Be brief.", "--out", whole)
    line = next(x for x in said.splitlines() if x.startswith("prompts are sent as "))
    assert line.endswith("user {}<|im_end|><|im_start|>' (its chat template)")
    assert f"'Today is 01 Jul 2026. {ASKED}" in line
    dying = killed_if(grpo.checkpoint.save, lambda agent, step, *given: step == 1)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(grpo.checkpoint, "save", dying)
        run(capsys, *RUN, 2, "--init", init, "--system", "Be brief.", "--out", cut)
    on_day(2)
    assert line in run(capsys, "--resume", "--out", cut)
    for name in ("model.safetensors", "chat_frame.json", "samples.jsonl", "tokenizer_config.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    assert line in run(capsys, *RUN, 0, "--init", cut, "--out", after)
    assert len({load_encoding(x).frame for x in (whole, cut, after)}) == 1
    other = load_encoding(cut, "no_think").frame        # what else is asked for is made now
    assert other.before == f"Today is 02 Jul 2026. {ASKED}<|im_start|>user "
    said = run(capsys, *RUN, 0, "--init", init, "--chat", "none", "--out", bare)
    again = run(capsys, *RUN, 0, "--init", bare, "--out", tmp_path / "bare 2")
    assert "(--chat none)" in said and "(--chat none)" in again
    assert load_encoding(bare).encode_prompt("1") == [ord("1")]
    assert load_encoding(bare, "think").frame.after.endswith("True")


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_goes_on(tmp_path, capsys, monkeypatch):
    """Its folder has no tokenizer yet, and --init's has one. It keeps whether its model thinks."""
    out, init = tmp_path / "x", chat_folder(tmp_path / "m")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(grpo, "evaluate", killed_if(lambda *given: None, lambda *given: True))
        run(capsys, *RUN, 1, "--init", init, "--chat", "think", "--out", out)
    assert not (out / "tokenizer.json").exists()
    assert "step 1/1" in run(capsys, "--resume", "--out", out)
    for chosen, want in (("auto", "True"), ("think", "True"), ("no_think", "False")):
        frame = load_encoding(out, chosen).frame
        assert frame.after.endswith(f"<|im_start|>{want}")
        assert frame.chat == chosen.replace("auto", "think")


@pytest.mark.slow
def test_how_prompts_are_sent_is_told(tmp_path, capsys, monkeypatch):
    """Wherever the model lies; not of the warm start that comes with the code. A new model has no
    template."""
    for flag in (["--system", "Be brief."], ["--chat", "no_think"]):
        assert "a new model has none" in fault(capsys, *RUN, 2, *flag, "--out", tmp_path / "x")
        assert not (tmp_path / "x").exists()
    init = chat_folder(tmp_path / "n", None)
    said = run(capsys, *RUN, 0, "--init", init, "--out", tmp_path / "y")
    assert "prompts are sent as '{}' (no chat template)\n" in said
    assert not (tmp_path / "y" / "chat_frame.json").exists()
    chat_folder(tmp_path / "m")
    (tmp_path / "mine.py").write_text(Path(task.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    said = run(capsys, *RUN, 0, "--task", "./mine.py", "--init", "./m", "--out", "x")
    assert "(its chat template)\n" in said
    said = run(capsys, "--steps", 0, "--held_out", 1, "--samples", 1, "--out", "z")
    assert "prompts are sent as" not in said
