"""The task, its rewards and steps; the evaluator against hostile text; the tokenizer."""
import functools
import itertools
import json
import os
import random
import re
import time
import unicodedata
from collections import Counter
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CHAT, ROOT, agent_of, batch_of_rows, chat_folder, fault

import data
import data.arithmetic as task
import data.countdown as countdown
import data.gsm8k as gsm8k
import data.sums as sums
import grpo
import reward
from data import UserError, chat, load_task, turns
from data.answers import evaluate, one_number, steps, tagged
from data.arithmetic import Problem
from data.bpe import DIGITS_SPLIT, GPT2_SPLIT, read_bpe
from data.tokenizer import Encoding, byte_encoding, composed, decode, load_encoding, opening, split_at, step_tokens
from data.tokenizer import ends_by_name, stop_tokens, used_stops
from run import config, files, pretrained
from run.report import majority_at, pass_at

calculator = load_task(str(ROOT / "experiments" / "models" / "calculator.py"))
P = Problem("47*58=", "2726")
WORK = "\n47*50=2000+350=2350\n47*8=320+56=376\n2350+376=2600+126=2726"


@pytest.mark.parametrize("difficulty", [1, 2])
def test_held_out_problems_never_occur_in_training(difficulty):
    train, held_out = task.problems(difficulty)
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


@pytest.mark.slow
def test_perfect_demonstrations_earn_everything_and_people_slip(monkeypatch):
    rng = random.Random(0)
    sampled = [task.demonstration(P, rng) for _ in range(2000)]
    bare = [d for d in sampled if "\n" not in d]
    shown = [d for d in sampled if "\n" in d]
    assert len(bare) / 2000 == pytest.approx(task.GUESS, abs=0.05) and set(bare) == {"~3000"}
    assert 0.9 < sum(task.reward(P, d)["working"] for d in shown) / len(shown) < 1
    monkeypatch.setattr(task, "GUESS", 0)
    monkeypatch.setattr(task, "SLIP", 0)
    problems = [p for difficulty in (1, 2) for p in rng.sample(task.problems(difficulty)[0], 50)]
    factors = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(50)]
    for p in problems + [Problem(f"{a}*{b}=", str(a * b)) for a, b in factors]:
        assert task.reward(p, task.demonstration(p, rng)) == {"correct": 1, "working": 1}


@pytest.mark.parametrize("prompt, working", [
    ("47*58=", WORK), ("5*8=", "\n5*8=40"), ("40*58=", "\n40*50=2000\n40*8=320\n2000+320=2300+20=2320"),
    ("508*30=", "\n508*30=15000+240=15240"),
    ("12*345=", "\n12*300=3000+600=3600\n12*40=400+80=480\n12*5=50+10=60\n3600+480+60=4000+140=4140")])
def test_working_is_written_in_full(prompt, working, monkeypatch):
    monkeypatch.setattr(task, "GUESS", 0)
    monkeypatch.setattr(task, "SLIP", 0)
    assert task.demonstration(Problem(prompt, ""), random) == working


def test_guesses_round_to_the_first_digit_and_slips_change_one():
    assert [task.rounded(n) for n in (4, 5, 44, 45, 99, 549, 550, 949, 950)] == [0, 10, 40, 50, 100, 500, 600, 900, 1000]
    slips = {task.miswritten(305, random.Random(i)) for i in range(2000)}
    assert slips == {*range(5, 1000, 100), *range(305, 400, 10), *range(300, 310)} - {305}


@pytest.mark.slow
def test_the_problems_are_the_same_on_every_machine():
    """By their first ones; results would otherwise not compare."""
    first = {d: [side[0].prompt for side in task.problems(d)] for d in (1, 2)}
    assert first == {1: ["5*5=", "2*2="], 2: ["52*94=", "27*30="]}
    found = countdown.problems(difficulty=3)
    assert [(side[0].numbers, side[0].target, side[0].solution) for side in found] == [
        ((2, 8, 11), 30, found[0][0].solution), ((2, 8, 71), 65, "(2+71)-8")]


def test_steps_end_with_the_token_that_closes_them():
    steps = task.steps(P, WORK)
    assert [WORK[a:b] for a, b in zip([0] + [e for e, _ in steps], [e for e, _ in steps])] == [
        "\n47*50=2000+350=2350\n", "47*8=320+56=376\n", "2350+376=2600+126=2726"]
    assert [truth for _, truth in steps] == [True] * 3
    wrong = WORK.replace("56=376", "56=386").replace("+376=2600+126=2726", "+386=2600+136=2736")
    assert [truth for _, truth in task.steps(P, wrong)] == [True, False, False]     # built on sand
    assert task.steps(P, "~2726") == [(5, True)] and task.steps(P, "2725") == [(4, False)]
    assert task.steps(P, "") == []
    assert task.steps(P, "2725\n47*50=2350") == [(5, False), (15, True)]    # a guess, then work


def test_what_only_repeats_is_no_step():
    """Thirty lines `13=13` once earned thirty rewards. What is false stays false, however often."""
    p = Problem("13*12=", "156")
    honest = "\n13*10=130\n13*2=26\n130+26=156"
    assert task.steps(p, "\n13=13" * 30) == []
    assert task.steps(p, "\n13=13=10+3\n13=9+4") == []         # a number taken apart, in any way
    again = honest + "\n130+26=156" * 30 + "\n26+130=156\n26+0130=156=156\n156=156"
    assert task.steps(p, again) == task.steps(p, honest)[:2] + [(len(honest) + 1, True)]
    assert task.reward(p, again) == {"correct": 1, "working": 1}
    assert [truth for _, truth in task.steps(p, "\n13=14" * 3)] == [False] * 3
    assert [truth for _, truth in task.steps(p, honest)] == [True] * 3
    assert task.steps(p, "\n13*2=26\n13*2=26\n13*10=130") == [(9, True), (26, True)]
    assert task.steps(p, "\n\n13*2=26\n\n13*10=130") == [(10, True), (20, True)]    # nor is nothing


def test_answer():
    assert [task.answer(t) for t in ("221", "~221", WORK, "1=2=3", "", "x", "\n", "4*")] == [
        "221", "221", "2726", "3", "", "", "", ""]


def score(task, problems, texts, finished):
    """The components of the rule reward as lists, of the same number of completions of each problem."""
    batch = batch_of_rows([(b"", text.encode()) for text in texts], finished=torch.tensor(finished))
    reward.score_by_rule(agent_of(grpo.Config(), task), problems, batch)
    assert batch.texts == texts and len(batch.problems) == len(texts)
    return {name: x.tolist() for name, x in batch.components.items()}


def test_score_pairs_each_completion_with_its_prompt():
    """Elsewhere the completions of one prompt were scored against another's answer."""
    toy = SimpleNamespace(reward=lambda p, text: {"correct": float(p.answer == text), "place": float(p.answer)})
    parts = score(toy, [Problem(str(i), str(i)) for i in range(4)], [str(i // 2) for i in range(8)], [True] * 8)
    assert parts == {"correct": [1.0] * 8, "place": [0, 0, 1, 1, 2, 2, 3, 3]}


def test_tasks_that_are_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").touch()
    with pytest.raises(UserError, match="no task 'reverse': did you mean ./reverse.py\\?$"):
        load_task("reverse")
    with pytest.raises(UserError, match="no task 'chess': choose arithmetic, countdown, gsm8k, guess, sums or"):
        load_task("chess")
    for name in ("tokenizer", "__init__", "answers", "../grpo", "nowhere/mine.py", "."):
        with pytest.raises(UserError):
            load_task(name)
    monkeypatch.delattr(task, "reward")
    with pytest.raises(UserError, match="arithmetic.py has no function reward"):
        load_task("arithmetic")


def test_a_path_without_its_suffix_is_no_name(tmp_path):
    """A stranger's folder could name one: it was executed, and only then found to be no task."""
    (tmp_path / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    up = os.path.relpath(tmp_path / "x", Path(task.__file__).parent)
    for name in (str(tmp_path / "x"), up, "", "./x", "a b", "data.arithmetic"):
        with pytest.raises(UserError, match="no task"):
            load_task(name)
    assert not (tmp_path / "ran").exists()


def test_a_task_may_lie_anywhere(tmp_path):
    for folder, answer in (("a", "1"), ("b", "2")):         # two files of one name are two tasks
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text("DEFAULTS = {}\ndef problems(): return [], []\ndef reward(p, text): return {}\n"
                        f"def answer(text): return {answer!r}\n")
        assert load_task(str(path)).answer("") == answer


# ------------------------------------------------------------------------- the safe evaluator

@pytest.mark.parametrize("text, value", [
    ("2+3*4", 14), ("(2+3)*4", 20), ("-3+5", 2), ("2--3", 5), ("7/2", Fraction(7, 2)), (" 1 + 1 ", 2),
    ("10/2/5", 1), ("0012", 12), ("8-3-2", 3)])
def test_evaluates(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", [
    "", " ", "95**87**76", "2^9", "1/0", "1/(2-2)", "(" * 5000 + "1" + ")" * 5000, "9" * 16, "9" * 100_000,
    "*".join(["9" * 15] * 5000), "(1", "1)", "()", "1+", "*1", "1 2", "abs(1)", "__import__('os')",
    "1e9", "1.5.2", "1 .5", ".", "٣+٤", "１＋１", "²", "1_000", "0x10", "1\n+1", "lambda:0", "\x00"])
def test_hostile_text_is_none_and_quick(text):
    """`95**87**76` passes the character filters of two popular repositories, and hangs them."""
    began = time.perf_counter()
    assert evaluate(text) is None
    assert time.perf_counter() - began < 1


def test_agrees_with_python_on_random_expressions():
    """The value is worked out beside the text: without brackets a product binds its last term."""
    rng = random.Random(0)
    for _ in range(500):
        text, head, last = (str(n := rng.randrange(100)), 0, n)         # the value is head + last
        for _ in range(rng.randrange(6)):
            sign, n = rng.choice("+-*/"), rng.randrange(1, 100)
            if rng.random() < 0.5:
                text, head, last = f"({text})", 0, head + last
            text += f"{sign}{n}"
            if sign in "+-":
                head, last = head + last, n if sign == "+" else -n
            else:
                last = last * n if sign == "*" else Fraction(last) / n
        assert evaluate(text) == head + last, text


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


def test_the_byte_tokenizers_files_are_for_others_too(encoding):
    """Ids are bytes: nothing is split, merged, stripped or normalised."""
    hf, about = (json.loads(encoding.files[name]) for name in ("tokenizer.json", "tokenizer_config.json"))
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    assert hf["pre_tokenizer"] == hf["decoder"] == level and hf["normalizer"] is None
    assert hf["added_tokens"] == [dict(id=256, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False,
                                       normalized=False, special=True)]
    assert sorted(hf["model"]["vocab"].values()) == [*range(256)] and hf["model"]["merges"] == []
    assert about["eos_token"] == "<|endoftext|>" and hf["model"]["type"] == "BPE"
    assert encoding.encode_ordinary("e\u0301") == [*"e\u0301".encode()]


SPLIT = dict(type="Split", pattern=dict(Regex="[a-z]+| "), behavior="Isolated", invert=False)


ALONE = r"(?m)(?:[a-z]+| )|(?:(?![a-z]+| )[\s\S])+"
DIGITS = [dict(type="Digits", individual_digits=x) for x in (True, False)]
PLAIN = dict(type="ByteLevel", use_regex=False)


@pytest.mark.parametrize("parts, patterns", [
    ([dict(type="ByteLevel")], [GPT2_SPLIT]), ([PLAIN], [r"[\s\S]+"]),
    ([DIGITS[0], dict(type="ByteLevel")], [DIGITS_SPLIT]), ([SPLIT, PLAIN], [ALONE]),
    ([DIGITS[0], PLAIN], [r"(?m)(?:\p{N})|(?:(?!\p{N})[\s\S])+"]),
    ([DIGITS[1], dict(type="ByteLevel")], [r"(?m)(?:\p{N}+)|(?:(?!\p{N}+)[\s\S])+", GPT2_SPLIT]),
    ([SPLIT, SPLIT | dict(pattern=dict(String="a.")), PLAIN], [ALONE, r"(?m)(?:a\.)|(?:(?!a\.)[\s\S])+"]),
    ([SPLIT, dict(type="ByteLevel")], [ALONE, GPT2_SPLIT])])
def test_how_a_tokenizer_splits_a_text(encoding, parts, patterns):
    """By one pattern after another, as its file says."""
    hf = json.loads(encoding.files["tokenizer.json"])
    hf["pre_tokenizer"] = dict(type="Sequence", pretokenizers=parts)
    found = read_bpe(hf, {})
    assert [x.pattern for x in found["before"]] + [found["split"]] == patterns and not found["nfc"]


def test_ids_that_a_tokenizer_may_have(encoding):
    for i in (2 ** 31, -1, 300.0, "7"):
        hf = json.loads(encoding.files["tokenizer.json"])
        hf["model"]["vocab"]["a"] = i
        with pytest.raises(UserError, match="not all integers"):
            read_bpe(hf, {})
    hf["model"]["vocab"]["a"] = 2 ** 31 - 1
    assert read_bpe(hf, {})["ranks"][b"a"] == 2 ** 31 - 1


def test_tokens_before_every_text():
    """Those of the post-processor, also if they are all the special tokens there are."""
    one, text = dict(SpecialToken=dict(id="<s>")), dict(Sequence=dict(id="A"))
    post = dict(type="Sequence", processors=[dict(type="ByteLevel"), dict(type="TemplateProcessing", single=[one, text])])
    assert opening(dict(post_processor=post), {"<s>": 300}) == "<s>" and opening({}, {}) == ""
    post["processors"].append(dict(type="TemplateProcessing", single=[dict(SpecialToken=dict(id="<t>")), text]))
    assert opening(dict(post_processor=post), {"<s>": 300, "<t>": 301}) == "<s><t>"         # of each of them
    for single, known in (([one, text], {}), ([one, text, one], {"<s>": 300})):
        with pytest.raises(UserError, match="a token after a text, or an unknown token"):
            opening(dict(post_processor=dict(type="TemplateProcessing", single=single)), known)


def test_the_longest_of_marks_is_found():
    for marks in (["<a>", "<a>b"], ["<a>b", "<a>"]):
        assert split_at(marks, "x<a>by<a>") == ["x", "<a>b", "y", "<a>", ""]


def encoding_of(ranks, nfc):
    return Encoding("test", GPT2_SPLIT, ranks, {"<end>": 300}, [300], {}, nfc=nfc)


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["a", " ", "!", "\n ", "<", "\u00e9", "\u0301\u0316", "a\u0301\u0316", "\u0344\u0316", "\u0f73", "\ud800"])
def test_tokenizers_take_linear_time(encoding, piece):
    """NFC alone took 8 seconds for 100,000 accents in a row. For 4 times the text quadratic time is 16 times as long."""
    ranks = {bytes([i]): i for i in range(256)}
    lacking = {b: i for b, i in ranks.items() if b != b"\xff"}

    def took(tokenizer, n):
        began = time.process_time()
        ids = tokenizer.encode_ordinary(piece * (n // len(piece)))
        said = decode(tokenizer, ids)
        assert step_tokens(tokenizer, ids, [len(said)]) == [len(ids) - 1]
        return time.process_time() - began
    for tokenizer in (encoding, encoding_of(ranks, True), encoding_of(lacking, False)):
        assert any(took(tokenizer, 32_000) < 9 * took(tokenizer, 8_000) for _ in range(4))


def test_nfc_is_unicodes():
    rng, letters = random.Random(0), [chr(c) for c in range(0x1200)] + [*"ao\uac00"] * 100
    letters = [c for c in letters if c in "ao\uac00" or unicodedata.combining(c) or unicodedata.decomposition(c)]
    for _ in range(5000):
        text = "".join(rng.choices(letters, k=rng.randrange(12)))
        assert composed(text) == unicodedata.normalize("NFC", text)


def test_the_end_token_cannot_be_spelled(encoding):
    assert 256 not in encoding.encode_ordinary("1*1=<|endoftext|>")


# --------------------------------------------------------------------- tasks in natural language

def answered(x, thought=""):
    return f"<think>{thought}</think>\n<answer>{x}</answer>"


@pytest.mark.parametrize("text, number", [
    ("18", 18), ("$1,080.", 1080), ("-5", -5), ("\u22125", -5), ("1,234,567 dollars", 1234567),
    ("3.50", Fraction(7, 2)), (r"\boxed{42}", 42), (r"$\boxed{1{,}080}$", 1080), (r"\boxed{ 42 }", 42), ("70%", 70), ("18.0", 18),
    ("$-3", -3), ("-$3", -3), ("12 eggs.", 12), (".5", Fraction(1, 2)), ("$.50", Fraction(1, 2)), ("007", 7),
    ("5 points", 5), ("5 m", 5), ("1 canteen", 1), ("5 millionaires", 5), ("1/2", Fraction(1, 2)), (r"\frac{1}{2}", Fraction(1, 2)),
    ("3 x 4 = 12", 12), ("1e3", 1000), ("1 000", 1000), ("\uff15", 5), ("5 million", 5_000_000), ("5Million dollars", 5_000_000),
    ("5k", 5000), ("5 M", 5_000_000), ("5 dozen eggs", 60)])
def test_one_number(text, number):
    assert one_number(text) == number


@pytest.mark.parametrize("text", [
    "", "none", "10-3", "\u0663", "17 or 18", "10^2", "1,2345", "3:18", "--5", "5 quarters", "M$5", "-$-5", "+$-5", "-x = 5", "1...000", "1\n000", ".5.00",
    "3.3333333333333335", "12345678901234518", ".", "$", "18 (rounded from 17.6)", "5\u201318",
    "5 minus one", "5 plus", "5 and a half", "5 hundredths",
    "5 squared", "5 miles in one hour", "5 thirty", "5\u0665", "5\u00b2", "0,005", "000,018", "5\n0", "5" + " a" * 100])
def test_other_texts_are_no_number(text):
    """A part of a text once passed for the answer: 18 of `17 or 18`, 5 of `.5` and of `5 million`."""
    assert one_number(text) is None


JUDGED = [line.split(" ", 2) for line in (ROOT / "tests" / "answers.txt").read_text("utf-8").splitlines() if line[:1] not in ("", "#")]


def test_answers_are_judged_as_by_hand():
    """204 texts, half of them right. At most 2 % of each half may be misjudged; none is."""
    assert Counter(right for right, _, _ in JUDGED) == {"yes": 102, "no": 102}
    assert len({(gold, text) for _, gold, text in JUDGED}) == 204
    for right, gold, text in JUDGED:
        problem = gsm8k.Problem("", str(Fraction(gold)), "")
        judged = gsm8k.reward(problem, answered(text.replace("\u23ce", "\n")))["correct"]
        assert judged == (right == "yes"), (right, gold, text)


@pytest.mark.parametrize("form, given", [
    ("{} 5", "no|not|never|none|neither|cannot|wrong|incorrect|false|error|mistaken|doubt|instead|except|but|unless|almost|nearly|isn\u2019t"),
    ("{} 5", "than|over|under|above|below|at least|at most|up to|plus|times|divided by|point|half|third of|quarter of|double|twice|triple"),
    ("{} 5", "square of|square root of|maximum of|minimum|max|min|twenty|hundred|sixteen|two"),
    ("5 {}", "or so|nicht|\u043d\u0435|\u4e0d|\u9519|\u932f|!= x|minus|plus|multiplied|divided|squared|cubed|doubled|tripled|halved|twice|times itself"),
    ("5 {}", "half|halves|thirds|quarters|fifths|sixths|eighths|tenths|hundredths|and a|and an eighth|at least|at most|pi|\u03c0|x|y|z|n|and k"),
    ("5 {}", "hundreds|thousands|trillion|million billion|one|ninety|is low|was it|would do|must be more|seems low|mil|mille|mio|mln"),
    ("5{}", "st|nd|rd|th|ish|\u4e07|\u842c|\u5104|\u4ebf|\u767e|\ub9cc|\uc5b5|\ucc9c|\u5343| \u0442\u044b\u0441. |\u043c\u0438\u043b\u043b\u0438\u043e\u043d| \u0932\u093e\u0916|/x?| -|--a| - x|^2|*|* x|\\%x")])
def test_each_word_makes_it_no_number(form, given):
    assert [one_number(form.format(word)) for word in given.split("|")] == [None] * len(given.split("|"))


@pytest.mark.parametrize("text", [
    r"10/3 \approx 5", "10/3 \u2248 5", r"5~\text{km}", "(12 - 2) x 0.5 = 5", "20% of 25 = 5", "5 m/s\u00b2", "10 \u00f7 2 = 5", "...5", "USD5", "Rs.5", "EUR -5", "adds up to 5",
    "5 is correct", "5 is my answer", "5 is right", "5 \u5343\u514b", "5 \u5343\u7c73", "5 people, I think", "$ -5", "0.005 thousand", "0.05 hundred",
    "0.005 grand", "0.000005 million", "0.000000005 bn", "0.000000005 billion", "0.000000005B", "0.0000005 crore", "10 / 2 = 5", "the answer is: 5", "50% * 10 = 5",
    "2 eggs * $2.50/egg = $5", "5 \u06a9\u062a\u0627\u0628\u200c\u0647\u0627", "5\u20ac"])
def test_what_a_number_may_wear(text):
    assert abs(one_number(text)) == 5


def test_other_fractions():
    assert [one_number(x) for x in ("1 / 2", r"\frac12", "\u00bc", "1\u00be", "2 and 1/2", r"2 \tfrac{1}{2}")] == [
        Fraction(1, 2), Fraction(1, 2), Fraction(1, 4), Fraction(7, 4), Fraction(5, 2), Fraction(5, 2)]


def test_the_last_answer_in_tags_counts():
    assert tagged("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert tagged("<answer>1") is None and tagged("1</answer>") is None
    assert tagged("<answer><answer>3</answer>") == "3" and tagged("<answer></answer>") == ""


def test_lines_with_equations_are_steps():
    """What cannot be checked is no step: filler earns nothing."""
    true = ["48/2 = 24 clips.", "So 12 x $0.25 = $3.00", "1,000 + 80 = 1080.", "2 + 2 = 4 and 4 * 2 = 8",
            "20 \u2212 13 = 7", ".5*4=2", "10/3 = 3.33", "2*3-1 = 5"]
    false = ["48/2 = 25 clips.", "3 \u00d7 4 = 13", "3x4=13", "20 \u2212 13 = 6", "20\u201313 = 6", "$2 + $3 = $6", "9-4 = 3", "2 + 2 = 4 and 4 * 2 = 9", "12 x 2 = 25 pages", "1+1=2, 2+2=5", "10/3 = 3.34"]
    free = ["she had 3 left", "x = 5", "237 potatoes - 60 = 177 cucumbers", "Half of 48 = 24", "2/3 of 9 = 6",
            "20% of 50 = 10", "1=1", "", "3 times 4 = 12", "foo = bar", "in all: -3+4 = 7"]
    for line in free:
        assert steps(None, line + "\n1+1=2") == [(len(line) + 6, True)]
    found = steps(None, "\n".join(true + false))
    assert [truth for _, truth in found] == [True] * len(true) + [False] * len(false)
    assert steps(None, "1+1=2\nb\n2+2=4\nd") == [(6, True), (14, True), (15, True)]
    assert steps(None, "") == []
    assert steps(None, "a") == [(1, True)] and steps(None, "1+1=3\n\n") == [(7, False)]


@pytest.mark.parametrize("line, true", [
    ("1/4=0.3", True), ("1/4=0.2", True), ("0.254*1=0.3", True), ("0.265*1=0.3", True), ("0.353*1=0.3", False),
    ("1/8=0.12", True), ("1/8=0.13", True), ("0.136*1=0.13", False), ("2.608*5=13", False), ("1/3=0", False)])
def test_a_number_with_decimals_may_be_rounded(line, true):
    """By half a unit of its last place at most; a whole one may not."""
    assert steps(None, line) == [(len(line), true)]


def test_expressions_and_numbers_have_200_characters_at_most():
    assert evaluate("11" + "+1" * 99) == 110 and evaluate("111" + "+1" * 99) is None
    assert one_number("7 " + "a" * 198) == 7 and one_number("7 " + "a" * 199) is None


def test_a_line_that_was_there_is_no_step():
    text = "1+1=2\n" * 30
    assert steps(None, text + "done") == [(6, True), (len(text) + 4, True)]
    assert [truth for _, truth in steps(None, "1+1=2\n1 + 1 = 2\n1+1=3\n1+1=3\n")] == [True, False, False]
    assert len(steps(None, "Mon: 2*3=6\nTue: 2*3=6")) == 2                 # another line, another step


def test_an_equation_is_read_whole():
    """Of a long side the last 200 characters were once taken: 10+0+0... of 910+0+0..."""
    assert steps(None, "910" + "+0" * 99 + "=11\nso") == [(207, True)]
    assert steps(None, "1+1=2" + "0" * 300 + "\nso") == [(308, True)]


def test_no_more_is_read_of_a_text_than_a_working_has():
    sums = [f"{n}+1={n + 1}" for n in range(5000)]
    assert len(steps(None, "\n".join(sums))) == 201 and len(steps(None, " ".join(sums))) == 1
    found = task.steps(P, "\n" + "\n".join(f"{'7+' * n}7={7 * n + 7}" for n in range(1, 251)))
    assert [truth for _, truth in found] == [True] * 200 + [False] * 50


CASES = [(task, P), (countdown, countdown.Problem("", (3, 7, 25), 46, "")), (gsm8k, gsm8k.Problem("", "5", "")),
         (sums, sums.Problem("", "5", ""))]
RUNS = [lambda n: "<answer>-" + " " * n + "!</answer>", lambda n: "<answer>$" + " " * n + "!</answer>", lambda n: "<answer>" * (n // 8),
        lambda n: "=" * n, lambda n: "1+=" * (n // 3), lambda n: "1=1\n" * (n // 4), lambda n: "1+1=2\n" * (n // 6),
        lambda n: "(" * n + "=1", lambda n: "1=" + ("1+" * 99 + "1=") * (n // 200), lambda n: "x\n" * (n // 2),
        lambda n: "1=" + ("1" * 199 + "y=") * (n // 200), lambda n: "47=47\n" * (n // 6), lambda n: "1" + ",000" * (n // 4),
        lambda n: "-" * n + "y", lambda n: "$" * n, lambda n: "9" * n, lambda n: "- " * (n // 2) + "5", lambda n: "1 " * (n // 2),
        lambda n: "1" + " " * n + "-5", lambda n: "1.1." * (n // 4), lambda n: ",111" * (n // 4)]


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_hostile_texts_take_linear_time(run):
    """`<answer>-`, 800 spaces and `!` took a second, cubic in the spaces. For 4 times the text that is 64 times as long, and
    quadratic time 16 times."""
    def took(n):
        began = time.process_time()
        text = around.format(run(n))
        module.reward(problem, text), module.answer(text), module.steps(problem, text)
        return time.process_time() - began
    for module, problem in CASES:
        for around in ("{}", "\n{}", "<answer>{}</answer>"):
            assert any(took(10_000) < 9 * took(2_500) + 1e-3 for _ in range(4))


def test_numbers_too_long_for_python():
    """int() of more than 4,300 digits raises, and a sampled text must not end a run."""
    for n in ("9" * 5000, "1" + ",000" * 1500, "1." + "0" * 5000, "." + "1" * 5000):
        for text in (n, f"\n{n}=1", f"\n47*{n}={n}", f"\n1+1={n}=", answered(n), answered(f"3+{n}"), f"\n={n}"):
            for module, problem in CASES:
                assert module.reward(problem, text)["correct"] == 0 and module.steps(problem, text)
                module.answer(text)


def test_no_pattern_has_a_possessive_group():
    """Python before 3.11.5, which Debian 12 has, matches one wrongly: `3*8=2=` was an equation, and `It is 19` had no number."""
    for path in (ROOT / "data").glob("*.py"):
        assert not re.search(r"\)[+*?]\+", path.read_text()), path.name


def gsm8k_files(folder, rows=(("Two and 2?", "2+2 = <<2+2=4>>4\n#### 4"), ("Many?", "It is.\n#### 1,080"))):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    return dict(train=str(path), test=str(path))


def test_gsm8k(tmp_path):
    train, test = gsm8k.problems(**gsm8k_files(tmp_path))
    assert train == test and [p.answer for p in train] == ["4", "1080"]
    spaced = gsm8k.problem_of({"question": " How many?\n", "answer": " 1+1=2 \n#### 2"})
    assert spaced.prompt == gsm8k.PROMPT.format("How many?") and spaced.solution == "1+1=2"
    assert "Two and 2?" in train[0].prompt and train[0].solution == "2+2 = <<2+2=4>>4"
    for p in train:
        shown = gsm8k.demonstration(p, random)
        assert gsm8k.reward(p, shown) == {"correct": 1.0, "format": 0.1} and "<<" not in shown
        assert all(truth for _, truth in gsm8k.steps(p, shown))
        wrong = p.answer[:-1] + str((int(p.answer[-1]) + 1) % 10)
        assert gsm8k.reward(p, answered(wrong)) == {"correct": 0.0, "format": 0.1}
        assert gsm8k.reward(p, p.answer) == {"correct": 0.0, "format": 0.0}
    assert gsm8k.answer(answered("$1,080.00")) == "1080" == train[1].answer
    assert gsm8k.answer("none") == gsm8k.answer(answered("none")) == ""


@pytest.mark.parametrize("rows, why", [
    ([("q", "no mark")], "line 1"), ([("q", "#### 1 or 2")], "line 1"), ([("q", "#### many")], "line 1"), ([], "is empty")])
def test_gsm8k_files_that_are_not_as_published(tmp_path, rows, why):
    with pytest.raises(UserError, match=why):
        gsm8k.problems(**gsm8k_files(tmp_path, rows))
    (tmp_path / "binary").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(UserError, match="binary"):
        gsm8k.problems(str(tmp_path / "binary"))
    with pytest.raises(UserError, match="needs --test FILE"):
        gsm8k.problems()
    with pytest.raises(UserError, match="No such file"):
        gsm8k.problems(str(tmp_path / "none"))


GOOD = b'{"question": "q", "answer": "#### 1"}'


@pytest.mark.parametrize("line, why", [
    (b"[" * 100_000, "RecursionError"), (b'{"question": ' * 100_000, "RecursionError"),
    (b"[]", "not an object"), (b"7", "not an object"), (b"\xef\xbb", "UnicodeDecodeError"), (b'{"question": "q', "not JSON: Unterminated string starting at, column 14"),
    (b'{"question": 1, "answer": "#### 1"}', "'question' must be a string"), (b'{"question": "q", "answer": 1}', "'answer' must be a string"),
    (b'{"question": "q"}', "'answer' must be a string"), (b'{"question": null, "answer": "#### 1"}', "'question' must be a string"),
    (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "4300 digits"),
    (b'{"question": "q", "answer": "#### ' + b"9" * 5000 + b'"}', "#### n"),
    (b'{"question": "q", "answer": "#### 1' + b",000" * 1500 + b'"}', "#### n"),
    (b'{"question": "\\ud800", "answer": "#### 1"}', "surrogates"), (b'{"question": "q", "answer": "\\udfff #### 1"}', "surrogates"),
    (b'{"question": "\xff", "answer": "#### 1"}', "UnicodeDecodeError"),
    (GOOD.decode().encode("utf-16"), "UnicodeDecodeError")], ids=range(17))
def test_a_bad_line_of_a_file_is_named(tmp_path, line, why):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError, match=rf"--train .*rows.jsonl, line 2: .*{why}") as e:
        gsm8k.problems(str(path))
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_marks_are_taken_out_in_linear_time():
    began = time.process_time()
    shown = gsm8k.demonstration(gsm8k.Problem("", "4", "2+2 = <<2+2=4>>4" + "<<" * 20_000), random)
    assert shown.startswith("<think>\n2+2 = 4<<<<") and time.process_time() - began < 0.1


@functools.cache
def countdown_problems(difficulty):
    return countdown.problems(difficulty)


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", [2, 4])
def test_countdown(difficulty):
    train, held_out = countdown_problems(difficulty)
    assert len(held_out) == 500 and len(train) > 1000
    keys = [(p.numbers, p.target) for p in train + held_out]
    assert len(set(keys)) == len(keys) and all(len(p.numbers) == difficulty for p in train)
    used, targets = {n for p in train for n in p.numbers}, {p.target for p in train}
    assert used == {*range(1, 100)} and targets == {*range(10, 100)}
    for p in train[:100]:
        *shown, target = map(int, re.findall(r"[0-9]+", p.prompt.partition(".")[0]))
        assert sorted(shown) == sorted(p.numbers) and target == p.target
        assert countdown.reward(p, countdown.demonstration(p, random)) == {"correct": 1.0, "format": 0.1}
        assert all(truth for _, truth in countdown.steps(p, countdown.demonstration(p, random)))


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", [2, 4])
def test_countdown_shows_what_was_tried(difficulty):
    """Up to three other expressions of the same numbers, all different, each with the value that it has; then a solution."""
    tried = []
    for p in countdown_problems(difficulty)[0][:200]:
        shown = countdown.demonstration(p, random).splitlines()
        assert shown[0] == "<think>" and shown[-2:] == ["</think>", f"<answer>{p.solution}</answer>"]
        *misses, last = [line.split("=") for line in shown[1:-2]]
        assert last == [p.solution, str(p.target)] and len(misses) == len({text for text, _ in misses}) <= 3
        for text, value in misses:
            assert countdown.evaluate(text) == countdown.evaluate(value) != p.target
            assert sorted(map(int, re.findall(r"\d+", text))) == sorted(p.numbers)
        tried.append(len(misses))
    assert {*tried} == {0, 1, 2, 3}


def test_countdown_has_2_to_6_numbers(monkeypatch):
    monkeypatch.setattr(countdown, "DRAWS", 20)
    for difficulty in (2, 6):
        countdown.problems(difficulty)
    for difficulty in (1, 7):
        with pytest.raises(UserError, match="countdown takes 2 to 6 numbers"):
            countdown.problems(difficulty)


@pytest.mark.parametrize("text, correct", [
    ("25+3*7", 1), (" 3 * 7 + 25 ", 1), ("(3*7)+25", 1), ("46", 0), ("25+3*7+0", 0), ("25+21", 0),
    ("25+3*7=46", 0), ("3*7+25*1", 0), ("2 5+3*7", 0), ("2\n5+3*7", 0), ("25+3*7*7/7", 0), ("3+7+25", 0), ("25**1+3*7", 0), ("", 0)])
def test_countdown_wants_each_number_once(text, correct):
    """3.25*4 would be made of 3, 4 and 25."""
    dotted = countdown.Problem("", (3, 4, 25), 13, "")
    assert countdown.reward(dotted, answered("3.25*4"))["correct"] == 0
    p = countdown.Problem("", (3, 7, 25), 46, "")
    assert countdown.reward(p, answered(text)) == {"correct": correct, "format": 0.1}


@pytest.mark.parametrize("numbers, target, text", [
    ((3, 4, 25), 59, "0000000034+25"), ((3, 4, 25), 59, "34+25"), ((3, 4, 25), 37, "3*4+025"), ((3, 4, 25), 37, "03*4+25"),
    ((3, 4, 25), 37, "3.0*4+25"), ((3, 5), 15, "3*5.0"), ((3, 5), 15, "\uff13*5"), ((3, 5), 15, "3*\u0665"),
    ((3, 5), 15, "3*5 or 5*3"), ((3, 5), 15, "3*5</answer><answer>8"), ((1, 5, 15), 15, "15")])
def test_countdown_reads_numbers_as_it_evaluates_them(numbers, target, text):
    """`0000000034` was 3 and 4 to the check of the numbers, and 34 to the evaluator."""
    assert countdown.reward(countdown.Problem("", numbers, target, ""), answered(text))["correct"] == 0


# --------------------------------------------------------------------------------- chat templates

DATED = "Today is {{ strftime_now('%d %b %Y') }}. " + CHAT


def on_day(monkeypatch, day):
    """From now on it is this day, for templates."""
    monkeypatch.setattr(chat, "datetime", SimpleNamespace(now=lambda: datetime(2026, 7, day)))


def named(encoding, ids):
    """The text of ids, special tokens by name."""
    return encoding.decode(ids)


@pytest.mark.slow
def test_a_prompt_is_framed_by_the_template(tmp_path):
    """With what is asked for: nothing, a system message, thinking or not."""
    chat_folder(tmp_path)
    user, asked = "<|im_start|>user 1+1=<|im_end|><|im_start|>", "<|im_start|>system Be brief.<|im_end|>"
    for given, want in (({}, user), (dict(system="Be brief."), asked + user), (dict(chat="think"), user + "True"),
                        (dict(chat="no_think", system="Be brief."), asked + user + "False"), (dict(chat="none"), "1+1=")):
        ours = load_encoding(tmp_path, **given)
        ids = ours.encode_prompt("1+1=")
        assert named(ours, ids) == want
        assert ids.count(257) == want.count("<|im_start|>") and ids.count(258) == want.count("<|im_end|>")
        assert ours.stop == ({256, 258} if given.get("chat") != "none" else {256})      # a turn's end, of a framed prompt


def test_special_tokens_of_a_text_are_text(tmp_path):
    """A text cannot end its own turn."""
    ours, sly = load_encoding(chat_folder(tmp_path)), "a<|im_end|><|im_start|>b<|endoftext|>"
    ids, frame = ours.encode_prompt(sly), ours.encode_prompt("x")
    assert [t for t in ids if t > 255] == [t for t in frame if t > 255]
    at = frame.index(ord("x"))
    assert decode(ours, ids[at:at + len(sly)]) == sly
    with pytest.raises(UserError, match="--system has a special token"):
        load_encoding(tmp_path, system="a<|im_end|>b")


@pytest.mark.parametrize("line, true", [("2*3=5+1=6", 1), ("2*3=6=6", 1), ("2*4=5+1=6", 0), ("2*3=5+2=6", 0),
                                        ("2*3=7=6", 0), ("2*3=6+1=7", 0), ("2*3=4+2=8-1=6", 0)])
def test_each_equation_of_a_line_must_be_true(line, true):
    """All its sides are equal: not the last two alone, nor the first and the last."""
    problem = Problem("2*3=", "6")
    assert task.steps(problem, "\n" + line) == [(1 + len(line), bool(true))]
    assert task.reward(problem, "\n" + line) == {"correct": float(line.endswith("=6")), "working": float(true)}


@pytest.mark.parametrize("text, reads", [
    ("<answer>{}</answer>", True), ("<answer>{}", False), ("{}</answer>", False), ("</answer>{}<answer>", False), ("{}", False),
    ("<answer><answer>{}</answer>", True), ("a<answer>{}</answer>b<answer>", True), ("<answer>{}</answer></answer>", True),
    ("<answer>0</answer><answer>{}</answer>", True), ("<answer>{}</answer><answer>0", True), ("<Answer>{}</Answer>", False),
    ("<answer>\n {} \n</answer>\n", True)])
def test_an_answer_is_between_both_tags(text, reads):
    """The format is rewarded where an answer is read, right or wrong."""
    for module, problem, right in ((countdown, countdown.Problem("", (3, 7, 25), 46, ""), "3*7+25"), (gsm8k, gsm8k.Problem("", "5", ""), "5")):
        assert module.reward(problem, text.format(right)) == {"correct": float(reads), "format": 0.1 * reads}
        assert module.reward(problem, text.format("1")) == {"correct": 0.0, "format": 0.1 * reads}


TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]
SAID = "<think>\n48+24=72\n</think>\n<tool_call>{}</tool_call><answer>72</answer>"


def tagged_encoding(folder, special, ends=()):
    """A chat model's tokenizer with TAGS as tokens of their own, special ones or not; of these, `ends` are stop tokens."""
    chat_folder(folder)
    path = folder / "tokenizer.json"
    hf = json.loads(path.read_text())
    hf["added_tokens"] += [hf["added_tokens"][0] | dict(id=259 + i, content=tag, special=special) for i, tag in enumerate(TAGS)]
    path.write_text(json.dumps(hf))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, *(259 + TAGS.index(tag) for tag in ends)]}))
    return load_encoding(folder)


@pytest.mark.parametrize("special", [True, False])
def test_a_reward_sees_tags_that_are_tokens_and_not_the_end(special, tmp_path):
    """Whether a recipe adds them as special tokens or not, and however the policy says them: as tokens or in letters."""
    encoding = tagged_encoding(tmp_path, special)
    as_tokens = encoding.encode_demonstration(SAID)
    in_letters = [*SAID.encode(), 258]
    assert {259, 260, 261, 262, 263, 264, 258} < {*as_tokens} and as_tokens[-1] == 258 and max(in_letters[:-1]) < 256
    for ids in (as_tokens, in_letters, as_tokens[:3] + in_letters[len("<think>\n4"):], as_tokens[:-1]):
        assert decode(encoding, ids) == SAID == "".join(grpo.report.pieces(encoding, ids))
        batch = batch_of_rows([([1], ids)])
        agent = agent_of(grpo.Config(), gsm8k, encoding=encoding)
        reward.score_by_rule(agent, [gsm8k.Problem("", "72", "")], batch)
        assert batch.texts == [SAID] and {name: x.item() for name, x in batch.components.items()} == {
            "correct": 1.0, "format": pytest.approx(0.1)}
    assert decode(encoding, [257, 65, 258]) == "<|im_start|>A"        # what the policy should not say is seen


@pytest.mark.parametrize("special", [True, False])
def test_a_reply_sees_a_tool_call(special, tmp_path):
    seen, encoding = [], tagged_encoding(tmp_path, special)
    episodes = turns.Episodes(lambda problem, said: seen.append([*said]) or "24", encoding, 8, [None], [1])
    call = encoding.encode_demonstration("<think>\nhm</think><tool_call>48/2</tool_call>")
    assert episodes(0, [1, *call], 1000) and seen == [["<think>\nhm</think><tool_call>48/2</tool_call>"]]


@pytest.mark.parametrize("named", ["eos_token", "the chat template"])
def test_the_end_is_not_said_even_if_it_is_no_special_token(named, tmp_path):
    """Some files call it an added token like any other; a right answer before it is a right answer."""
    chat_folder(tmp_path)
    path, about = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    hf, settings = json.loads(path.read_text()), json.loads(about.read_text())
    hf["added_tokens"] = [token | {"special": token["id"] == 257} for token in hf["added_tokens"]]
    path.write_text(json.dumps(hf))
    if named == "eos_token":
        del settings["chat_template"]
    else:
        settings["eos_token"] = "<|im_end|>"
    about.write_text(json.dumps(settings))
    encoding = load_encoding(tmp_path)
    assert encoding.plain == ["<|endoftext|>", "<|im_end|>"] and encoding.end == (256 if named == "eos_token" else 258)
    for end in encoding.stop:
        assert decode(encoding, [*b"4888", end]) == "4888"


def test_a_tag_that_ends_a_completion_is_said(tmp_path):
    """If it is an added token that is not special; a special one is an end like any other."""
    ids = [262 if tag == "</answer>" else ord(tag) for tag in (*"<answer>72", "</answer>")]
    for special, text in ((False, "<answer>72</answer>"), (True, "<answer>72")):
        (tmp_path / str(special)).mkdir()
        encoding = tagged_encoding(tmp_path / str(special), special, ends=["</answer>"])
        assert 262 in encoding.stop and decode(encoding, ids) == text and decode(encoding, [65, 258]) == "A"


@pytest.mark.parametrize("template, given, says", [
    ("{{ messages[0].content }}{{ messages[0].content }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].role }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content.title() }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content | replace('<', '') }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content | upper }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content | tojson }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content | e }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content | replace('\n', ' ') }}", {}, "must insert the prompt once, unchanged"),
    ("{{ messages[0].content.strip('\n') }}", {}, "must insert the prompt once, unchanged"),
    ("{{ raise_exception('No\nbody.') }}", {}, "chat template fails: TemplateError.*No.*body."),
    ("{% for x in %}", {}, "chat template fails: TemplateSyntaxError"),
    ("{{ messages[7].content }}", {}, "chat template fails: UndefinedError"),
    ("{{ 1 / 0 }}", {}, "chat template fails: ZeroDivisionError"),
    ("{{ 'a' + 1 }}", {}, "chat template fails: TypeError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {}, "chat template fails: RecursionError"),
    ("{{ messages.append(1) }}", {}, "chat template fails: SecurityError"),
    ("{{ strftime_now.__self__.year }}" + CHAT, {}, "chat template fails: SecurityError"),
    ("{{ messages[-1].content }}", dict(system="Be brief."), "chat template ignores it"),
    ("{{ messages[-1].content }}", dict(chat="no_think"), "--chat no_think: its chat template has no enable_thinking"),
    (CHAT, dict(chat="none", system="Be brief."), "need a chat template"),
    (None, dict(chat="think"), "need a chat template"), (None, dict(system="Be brief."), "need a chat template"),
    (7, {}, "is not a string"), ([dict(name="rag", template=CHAT)], {}, "several and no default")])
def test_a_template_that_cannot_be_used_is_a_fault(template, given, says, tmp_path):
    """Without a template, or with --chat none, nothing is lost."""
    where = str(chat_folder(tmp_path, template))
    with pytest.raises(UserError, match=f"(?s){says}"):
        load_encoding(where, **given)
    assert load_encoding(where, "none").encode_prompt("a") == [ord("a")]


def test_a_fault_of_a_template_is_one_line(tmp_path, capsys):
    where = chat_folder(tmp_path, "{{ raise_exception('No\nbody.') }}")
    assert "body." in fault(capsys, "--ask", "1*1=", "--max_new", 2, "--init", where)


@pytest.mark.slow
@pytest.mark.parametrize("template, says", [
    ("{{ 9 ** (9 ** 9) }}", "longer than 1 s"), ("{% for x in range(9999) %}" * 3 + "{% endfor %}" * 3, "longer than 1 s"),
    ("{{ [messages] * 10 ** 8 }}", "fails: MemoryError"), ("{{ messages | tojson(indent=10 ** 9) }}", "fails: MemoryError"),
    ("{% set a = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = a.x + a.x %}{% endfor %}", "fails: MemoryError"),
    ("{{ 'a' * 200000 }}" + CHAT, "adds 200,")])
def test_a_template_has_limits(template, says, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1 if "longer" in says else 30)
    began = time.monotonic()
    with pytest.raises(UserError, match=says):
        load_encoding(chat_folder(tmp_path, template))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("stderr, why", [("", "it takes more than 1,073,741,824 bytes"), ("a\nb\nMemoryError\n", "MemoryError")])
def test_a_template_whose_process_ends_is_a_fault(stderr, why, monkeypatch):
    """Killed, or with an error that it did not write down."""
    monkeypatch.setattr(chat.subprocess, "run", lambda *given, **more: SimpleNamespace(returncode=1, stderr=stderr, stdout=""))
    with pytest.raises(UserError, match=f"^its chat template fails: {why}; use --chat none"):
        chat.frame_of(CHAT, {}, {})


def test_a_template_writes_json_as_it_is(tmp_path):
    """As in transformers: Jinja's own would escape it for HTML."""
    assert load_encoding(chat_folder(tmp_path, "{{ '<\u00e9&>' | tojson }} " + CHAT)).frame.before.startswith('"<\u00e9&>" ')


def test_without_a_template_blanks_are_kept():
    assert chat.Frame().strips is False and byte_encoding().encode_prompt(" a ") == [32, 97, 32]


@pytest.mark.slow
def test_what_a_templates_tokens_must_be(tmp_path):
    """A token that takes the blanks beside it is refused wherever the template says it, as Phi-4's;
    what only begins the next turn ends none."""
    chat_folder(tmp_path, "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
                          "{% if add_generation_prompt %}<|im_end|>{% endif %}")
    assert load_encoding(tmp_path).stop == {256}
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in whole["added_tokens"][1:]:
        changed = [t | {"lstrip": t == token} for t in whole["added_tokens"]]
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"added_tokens": changed}))
        with pytest.raises(UserError, match=f"{re.escape(token['content'])}' has lstrip"):
            load_encoding(tmp_path)
        assert load_encoding(tmp_path, "none").encode_prompt("a") == [97]


@pytest.mark.slow
def test_what_the_tokens_of_a_reply_must_be(tmp_path):
    """Also those that are in no prompt: what ends a turn, and what a tool has around its text."""
    folder = chat_folder(tmp_path, "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
                                   "{% if m.role == 'tool' %}<|im_start|>{% endif %}{% endfor %} says: ")
    frame = load_encoding(folder).frame
    assert (frame.before, frame.after, frame.end) == ("", " says: ", "<|im_end|>")
    assert (frame.reply_before, frame.reply_after) == ("", "<|im_start|> says: ")
    whole = json.loads((folder / "tokenizer.json").read_text())
    for token in whole["added_tokens"][1:]:
        changed = [t | {"rstrip": t == token} for t in whole["added_tokens"]]
        (folder / "tokenizer.json").write_text(json.dumps(whole | {"added_tokens": changed}))
        with pytest.raises(UserError, match=f"{re.escape(token['content'])}' has rstrip"):
            load_encoding(folder)


def of_tool(text, than=CHAT):
    """CHAT, with this instead of a message of the tool, and `than` instead of any other."""
    return than.replace("{% for m in messages %}", "{% for m in messages %}{% if m.role == 'tool' %}" + text + "{% else %}").replace(
        "{% endfor %}", "{% endif %}{% endfor %}")


TOOL = "<|im_start|>tool {{ m.content }}<|im_end|>"


@pytest.mark.parametrize("template, role", [
    (CHAT, "user"), ("{# 'tool' #}" + CHAT, "tool"), ('{# "tool" #}' + CHAT, "tool"), ("{# tools #}" + CHAT, "user"),
    (of_tool(TOOL), "tool"), (of_tool(TOOL.replace("<|im_end|>", "{% if loop.last %}<|im_end|>{% endif %}")), "tool"),
    (of_tool(""), "user"), (of_tool(TOOL + "{{ m.content }}"), "user"), (of_tool("{{ raise_exception('a call is missing') }}"), "user"),
    (of_tool(TOOL.replace("m.content", "m.content | tojson")), "user"),
    (of_tool(TOOL.replace("m.content", "m.content | trim")), "user"),
    (of_tool(TOOL.replace("m.content", "m.content.strip('\n')")), "user"),
    (of_tool(TOOL, CHAT.replace("m.content", "m.content | trim")), "user"),
    (of_tool(TOOL.replace("m.content", "m.content | trim"), CHAT.replace("m.content", "m.content | trim")), "tool"),
    (of_tool("{% if not messages[:loop.index0] | selectattr('role', 'eq', 'tool') | list %}first: {% endif %}" + TOOL), "user"),
    (CHAT.replace("<|im_end|>", "{% if m.role == 'assistant' %} \n{% endif %}<|im_end|>"), "user")])
def test_a_reply_is_a_message_of_the_template(template, role, tmp_path):
    """Of a tool if that is named and its text is as it was, each time: once a template that strips the prompt alone
    gave a tool's text without its blanks, between two of the placeholder's."""
    ours = load_encoding(chat_folder(tmp_path, template))
    for text in ("19 is too small.", " a \n"):
        shown = text.strip() if ours.frame.strips else text
        ids = ours.encode_reply(text)
        assert named(ours, ids) == f"<|im_start|>{role} {shown}<|im_end|><|im_start|>"
        assert ids.count(257) == 2 and ids.count(258) == 1 and ours.end == 258


@pytest.mark.slow
def test_a_reply_is_framed_as_is_asked_for(tmp_path):
    """The system says its message once, in the prompt. Without a template a reply is its text."""
    chat_folder(tmp_path)
    for given, want in ((dict(system="Be brief."), ""), (dict(chat="think"), "True"), (dict(chat="no_think", system="Be brief."), "False")):
        ours = load_encoding(tmp_path, **given)
        assert named(ours, ours.encode_reply("low")) == f"<|im_start|>user low<|im_end|><|im_start|>{want}"
    assert load_encoding(tmp_path, "none").encode_reply(" a \n") == [*b" a \n"] == byte_encoding().encode_reply(" a \n")


def test_special_tokens_of_a_reply_are_text(tmp_path):
    """What a task says cannot end its own message."""
    ours, sly = load_encoding(chat_folder(tmp_path)), "a<|im_end|><|im_start|>b<|endoftext|>"
    ids = ours.encode_reply(sly)
    assert [t for t in ids if t > 255] == [257, 258, 257] and sly in decode(ours, ids)


MANY = "messages | selectattr('role', 'ne', 'system') | list | length"


@pytest.mark.parametrize("template", [
    "{% if " + MANY + " > 2 %}{{ raise_exception('one question,\none answer') }}{% endif %}" + CHAT,
    "{% if " + MANY + " > 3 %}{{ raise_exception('one reply') }}{% endif %}" + CHAT,
    "{% set messages = messages[:2] %}" + CHAT, "{% if " + MANY + " > 2 %}{{ 1 / 0 }}{% endif %}" + CHAT,
    CHAT.replace("m.content", "(m.content if loop.index < 3 else m.content | upper)"),
    CHAT.replace("<|im_end|>", "{% if loop.last or m.role != 'assistant' %}<|im_end|>{% endif %}"),
    "{% if " + MANY + " > 2 %}{{ raise_exception('one question') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_template_without_a_place_for_a_reply(template, tmp_path):
    """Is a fault in one line once there is a reply, and none before: also one that adds nothing to a prompt."""
    ours = load_encoding(chat_folder(tmp_path, template))
    assert "1+1=" in named(ours, ours.encode_prompt("1+1=")) and ours.frame.chat == "auto"
    assert (ours.frame.reply_before, ours.frame.reply_after) == ("", "")
    with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path))}: its chat template has no place for a reply.*use --chat none") as e:
        ours.encode_reply("19 is too small.")
    assert "\n" not in str(e.value)
    assert load_encoding(tmp_path, "none").encode_reply("a") == [97]


def test_a_frame_of_before_there_were_replies(tmp_path):
    """A run's own still frames its prompts, and cannot frame a reply."""
    new = load_encoding(chat_folder(tmp_path))
    old = json.loads(new.files["chat_frame.json"]) | {"before": "<|im_start|>on an older day "}
    del old["reply_before"], old["reply_after"]
    (tmp_path / "chat_frame.json").write_text(json.dumps(old))
    ours = load_encoding(tmp_path)
    assert named(ours, ours.encode_prompt("1+1=")) == "<|im_start|>on an older day 1+1=<|im_end|><|im_start|>" and ours.stop == new.stop
    with pytest.raises(UserError, match="or chat_frame.json is older than replies: delete it to have it rebuilt"):
        ours.encode_reply("a")
    (tmp_path / "chat_frame.json").unlink()
    assert load_encoding(tmp_path).frame == new.frame and new.frame.reply_after


RUN = ("--difficulty 1 --prompts 2 --group 2 --max_new 3 --lr 1e-2 --save_every 1 --steps 2").split()


@pytest.mark.slow
def test_a_run_keeps_its_frame_on_another_day(tmp_path, capsys, monkeypatch):
    """Resumed, asked, and as the start of another run; a run of its own begins with its own day."""
    init = str(chat_folder(tmp_path / "m", DATED))
    monkeypatch.setattr(grpo, "evaluate", lambda agent, problems: {"greedy": 0.0})
    def run(out, *args):
        """What a command says."""
        try:
            grpo.main([*args, "--out", str(tmp_path / out)])
        finally:
            files.LOCK.close()
        return capsys.readouterr().out

    on_day(monkeypatch, 1)
    said = run("whole", *RUN, "--init", init, "--system", "Be brief.")
    line = next(x for x in said.splitlines() if x.startswith("prompts are sent as "))
    assert line.endswith("user {}<|im_end|><|im_start|>' (its chat template)")
    assert "'Today is 01 Jul 2026. <|im_start|>system Be brief.<|im_end|>" in line
    real = grpo.checkpoint.save

    def killed(agent, step, *given):
        """The process ends after it has saved step 1."""
        real(agent, step, *given)
        if step == 1:
            raise KeyboardInterrupt
    monkeypatch.setattr(grpo.checkpoint, "save", killed)
    with pytest.raises(SystemExit):
        run("cut", *RUN, "--init", init, "--system", "Be brief.")
    monkeypatch.setattr(grpo.checkpoint, "save", real)
    on_day(monkeypatch, 2)
    assert line in run("cut", "--resume")
    for name in ("model.safetensors", "chat_frame.json", "samples.jsonl", "tokenizer_config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert line in run("next", *RUN, "--steps", "0", "--init", str(tmp_path / "cut"))
    whole = load_encoding(tmp_path / "whole").encode_prompt("1*1=")
    for where in ("whole", "cut", "next"):
        cfg = grpo.make_config(**config.read(grpo.Config, "", ["--ask", "1*1=", "--out", str(tmp_path / where)])[1])
        assert pretrained.encoding_of(cfg, tmp_path / where).encode_prompt("1*1=") == whole
    other = load_encoding(tmp_path / "cut", "no_think").frame       # what else is asked for is made now
    assert other.before == "Today is 02 Jul 2026. <|im_start|>system Be brief.<|im_end|><|im_start|>user "
    assert "(--chat none)" in run("bare", *RUN, "--steps", "0", "--init", init, "--chat", "none")
    assert "(--chat none)" in run("bare 2", *RUN, "--steps", "0", "--init", str(tmp_path / "bare"))
    (tmp_path / "cut" / "chat_frame.json").write_text('{"before": 1}')
    with pytest.raises(UserError, match="cut: its chat_frame.json has a value of the wrong type"):
        load_encoding(tmp_path / "cut")


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_goes_on(tmp_path, capsys, monkeypatch):
    """Its folder has no tokenizer yet, and --init's has one; it could not be resumed."""
    def killed(agent, problems):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "evaluate", killed)
        with pytest.raises(SystemExit):
            grpo.main([*RUN, "--init", str(chat_folder(tmp_path / "m")), "--out", str(tmp_path / "x")])
    files.LOCK.close()
    assert not (tmp_path / "x" / "tokenizer.json").exists()
    grpo.main(["--resume", "--out", str(tmp_path / "x")])
    assert "step 2/2" in capsys.readouterr().out


def test_a_new_model_has_no_chat_template(tmp_path, capsys):
    for flag, value in (("--system", "Be brief."), ("--chat", "no_think")):
        assert "a new model has none" in fault(capsys, *RUN, flag, value, "--out", tmp_path / "x")
        assert not (tmp_path / "x").exists()
    init = str(chat_folder(tmp_path / "m", None))
    grpo.main([*RUN, "--steps", "0", "--init", init, "--out", str(tmp_path / "y")])
    assert "prompts are sent as '{}' (no chat template)\n" in capsys.readouterr().out
    assert not (tmp_path / "y" / "chat_frame.json").exists()


@pytest.mark.slow
def test_how_prompts_are_sent_is_told_wherever_the_model_lies(tmp_path, capsys, monkeypatch):
    """Beside the task's file too; not of the warm start that comes with the code."""
    chat_folder(tmp_path / "m")
    (tmp_path / "mine.py").write_text(Path(task.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    grpo.main([*RUN, "--steps", "0", "--task", "./mine.py", "--init", "./m", "--out", "x"])
    assert "(its chat template)\n" in capsys.readouterr().out
    grpo.main(["--steps", "0", "--held_out", "1", "--samples", "1", "--out", "y"])
    assert "prompts are sent as" not in capsys.readouterr().out


def test_an_error_of_syntax_is_told_by_its_place(tmp_path, monkeypatch):
    """In data/ too, and in what a task imports."""
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "whole.py").write_text("import broken\n")
    monkeypatch.setattr(data, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(data, "__path__", [str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken", str(tmp_path / "broken.py"), "whole"):
        with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path))}/broken.py, line 1: '\\(' was never closed$"):
            load_task(name)


@pytest.mark.slow
def test_a_run_keeps_whether_its_model_thinks(tmp_path):
    """As long as nothing else is asked for; a run without a template may get one."""
    grpo.main([*RUN, "--steps", "0", "--init", str(chat_folder(tmp_path / "m")), "--chat", "think", "--out", str(tmp_path / "x")])
    for chat, want in (("auto", "True"), ("think", "True"), ("no_think", "False")):
        ours = load_encoding(tmp_path / "x", chat)
        assert named(ours, ours.encode_prompt("1")).endswith(f"<|im_start|>{want}") and ours.frame.chat == chat.replace("auto", "think")
    grpo.main([*RUN, "--steps", "0", "--init", str(tmp_path / "x"), "--chat", "none", "--out", str(tmp_path / "y")])
    assert load_encoding(tmp_path / "y").encode_prompt("1") == [ord("1")]
    assert load_encoding(tmp_path / "y", "think").frame.after == load_encoding(tmp_path / "x").frame.after


# -------------------------------------------------------------------------------------------- sums

@pytest.mark.parametrize("difficulty", [1, 2, 3, 4])
def test_sums_are_right_and_held_out_numbers_never_occur_in_training(difficulty):
    """The numbers of a held-out problem are in no training problem, in whatever order or story."""
    train, held_out = sums.problems(difficulty)
    numbers = [{tuple(sorted(map(int, re.findall("[0-9]+", p.solution.split("=")[0])))) for p in part}
               for part in (train, held_out)]
    assert len(held_out) == sums.HELD_OUT and len(train) > 450 and not numbers[0] & numbers[1]
    assert len({p.prompt for p in train}) > 0.9 * len(train)
    most = {1: 20, 2: 99, 3: 99, 4: 50}[difficulty]
    assert {x for own in numbers[0] | numbers[1] for x in own} <= set(range(1, most + 1))
    for p in train + held_out:
        text, total = p.solution.split(" = ")
        assert total == p.answer and evaluate(text) == int(total) >= 0
        assert Counter(re.findall("[0-9]+", p.prompt)) == Counter(re.findall("[0-9]+", text))
        assert difficulty == 4 or p.prompt == f"What is {text}?"
    for p in train[:100]:
        said = sums.demonstration(p, None)
        assert sums.reward(p, said) == {"correct": 1, "near": 0.2}
        assert sums.steps(p, said) == [(len(said), True)]
    assert sums.problems(difficulty) == (train, held_out)


@pytest.mark.parametrize("difficulty, n, first, last, sums_of", [
    (1, 480, "What is 9 + 12?", "What is 6 + 15?", "0 40"), (2, 12066, "What is 29 + 35?", "What is 58 + 18?", "0 198"),
    (3, 8936, "What is 99 + 68 + 40?", "What is 8 + 48 + 69?", "0 288"),
    (4, 3645, "There are 30 marbles in one box and 34 in another. How many marbles is that?",
     "Clara has 19 stamps and gets 32 more. How many stamps does Clara have now?", "0 100")])
def test_the_problems_of_sums_stay_what_they_are(difficulty, n, first, last, sums_of):
    """Results on the 128 held-out ones can be compared only as long as they are the same."""
    train, held_out = sums.problems(difficulty)
    assert (len(train), train[0].prompt, held_out[-1].prompt) == (n, first, last) and len(held_out) == 128
    results = [int(p.answer) for p in train]
    assert f"{min(results)} {max(results)}" == sums_of
    assert difficulty != 3 or any(p.solution.count("+") == 1 and p.answer == "0" for p in train)


def test_sums_have_four_difficulties():
    with pytest.raises(UserError, match="sums takes 1 to 4"):
        sums.problems(5)


@pytest.mark.parametrize("text, said", [
    ("19", "19"), ("7 + 12 = 19.", "19"), ("It is 19, of course.", "19"), ("19 apples", "19"), ("019", "19"),
    ("1,234", "1234"), ("1,2345", "2345"), ("3.5", "7/2"), ("19.0", "19"), ("19.", "19"), (".19", "19/100"), ("1.2.5", "1/2"), ("7,19", "19"), ("", ""), ("none", ""),
    ("-5", "-5"), ("is -5", "-5"), ("= -5", "-5"), ("(-5)", "-5"), ("\u22125", "-5"),     # a minus sign ...
    ("- 19", "-19"), ("\u201319", "-19"), ("\u2013 19", "-19"), ("\u2212\u200919", "-19"), ("\uff0d19", "-19"), ("3 - 22 = - 19", "-19"),
    ("-$19", "-19"), ("- \\$19", "-19"), ("-**19**", "-19"), ("Minus 19", "-19"), ("negative 19", "-19"), ("-(19)", "-19"), ("x\n- 19", "-19"),
    ("12-5", "5"), ("12 - 5", "5"), ("(9) - 5", "5"), ("covid-5", "5"), ("12 minus 5", "5"), ("$12 - $5", "5"),  # ... and what is none
    ("12% - 5", "5"), ("12 \u2013 5", "5"), ("5\u201319", "19"), ("-> 19", "19"), ("---\n19", "19"),
    ("The answer is...19", "19"), ("..19", "19"), ("\u202619", "19"), ("is .19", "19/100"), ("-...19", "19"),
    ("9" * 15, "9" * 15), ("9" * 16, ""), ("\u0661\u0669", ""), ("19\n\nSo 20", "20")])
def test_the_last_number_counts(text, said):
    assert sums.answer(text) == said
    parts = sums.reward(sums.Problem("What is 7 + 12?", "19", ""), text)
    assert [*parts] == ["correct", "near"] and parts["correct"] == (said == "19") and (parts["near"] > 0) == (said != "")


@pytest.mark.parametrize("text, near", [("19", 0.2), ("18", 0.1), ("20", 0.1), ("22", 0.05), ("14", 0.2 / 6), ("-5", 0.008),
                                        ("18.5", 0.4 / 3), ("", 0), ("nineteen", 0), ("9" * 16, 0)])
def test_a_number_counts_the_more_the_nearer_it_is(text, near):
    parts = sums.reward(sums.Problem("What is 7 + 12?", "19", ""), text)
    assert type(parts["near"]) is float and parts["near"] == pytest.approx(near, rel=1e-12)


# -------------------------------------------------------------------------------------- calculator

PRODUCT = calculator.Problem("What is 47 * 58?", "47 * 58", "2726")


@pytest.mark.parametrize("turn, said", [
    ("<tool>47*58</tool>", "2726"), ("I use <tool> 47 * 58 </tool>.", "2726"), ("<tool>1/8</tool>", "1/8"),
    ("<tool>1+1</tool><tool>2+2</tool>", "2"), ("2726", None), ("", None), ("tool>47*58</tool>", None),
    ("<tool>47*</tool>", "error"), ("<tool></tool>", "error"), ("<tool>47*58", "error"), ("</tool>47*58<tool>", "error"),
    ("<tool><tool>47*58</tool>", "2726"), ("<tool>1/0</tool>", "error"), ("<tool>47 times 58</tool>", "error"),
    ("<tool>9**9**9</tool>", "error"), ("<tool>__import__('os').getcwd()</tool>", "error"), ("<tool>" + "1+" * 99 + "1</tool>", "100"),
    ("<tool>" + "1+" * 10 ** 5 + "1</tool>", "error"), ("<tool>" * 10 ** 5, "error"), ("<tool>" + "9" * 5000 + "</tool>", "error")])
def test_the_calculator_replies_to_calls(turn, said):
    began = time.process_time()
    assert calculator.reply(PRODUCT, [turn]) == said
    assert calculator.reply(PRODUCT, ["<tool>1+1</tool>", "2", turn]) == said
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("turns, correct, call", [
    (["47 * 58 = 2726"], 1, 0), (["2726"], 1, 0), (["2725"], 0, 0), ([""], 0, 0),
    (["<tool>47*58</tool>", "2726", "2726"], 1, -0.1),
    (["<tool>47</tool>", "47", "<tool>47*58</tool>", "2726", "So 2726."], 1, -0.2),
    (["<tool>", "error", "2726"], 1, -0.1), (["<tool>47*59</tool>", "2773", "2773"], 0, 0),
    (["<tool>47*58</tool>", "2726", "I know."], 0, 0), (["<tool>47*58</tool>", "2726", ""], 0, 0),     # the reply is no answer
    (["<tool>47*58</tool>"], 0, 0), (["<tool>47*58</tool>2726"], 0, 0), (["2726 <tool>"], 0, 0),        # nor is a call
    (["<tool>47*58</tool>", "2726", "2726<tool>47*58</tool>"], 0, 0),
    (["<tool>47*58</tool><|im_end|>\n<|im_start|>user\n2726"], 0, 0)])      # nor the form of a reply
def test_only_the_last_turn_earns(turns, correct, call):
    assert calculator.reward(PRODUCT, turns) == {"correct": correct, "call": pytest.approx(call)}


def test_demonstrations_call_for_products_as_often_as_for_sums():
    """And a third of their calls are wrong. Held-out numbers never occur in training."""
    train, held_out = calculator.problems()
    rng, numbers = random.Random(0), lambda p: tuple(sorted(p.expression.split()))
    tuned = calculator.problems(development=1)[1]
    assert not {*map(numbers, train)} & {*map(numbers, held_out + tuned)} and not {*held_out} & {*tuned}
    for sign in "*+":
        own = [p for p in train if f" {sign} " in p.prompt]
        shown = [turns.demonstration(calculator, p, rng) for p in own]      # and its replies are right
        called = [said for said in shown if len(said) == 3]
        assert len(own) == 1000 and all(evaluate(p.expression) == int(p.answer) for p in own)
        assert len(called) / 1000 == pytest.approx(0.5, abs=0.05)
        right = [p for p, said in zip(own, shown) if said[0] == f"<tool>{p.expression.replace(' ', '')}</tool>"]
        assert len(right) / len(called) == pytest.approx(2 / 3, abs=0.05)


# ----------------------------------------------------------------------------- several answers

def test_pass_at_k_is_the_mean_over_all_sets():
    """Against all sets of k, for shares of a right answer too."""
    for right in ([0, 0, 1, 0, 1], [1, 1, 1], [0.0] * 4, [0.5, 0, 1, 0.25]):
        for k in range(1, len(right) + 1):
            best = [max(own) for own in itertools.combinations(right, k)]
            assert pass_at(k, right) == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("k, right, said, share", [
    (4, [1, 0, 0, 1], "abba", 1), (4, [0, 1, 1, 0], "abba", 0),         # as frequent: the first
    (2, [1, 0, 0, 1], "abba", 0.5), (2, [1, 1, 0, 0, 1], "aabba", 0.5),     # sets side by side; the rest is out
    (3, [1, 0, 0], ["a", "", ""], 1), (3, [0, 0, 0], ["", "", ""], 0),      # "" is no vote
    (2, [0, 0, 0, 1], "aaab", 0), (3, [0, 1, 1, 0, 0, 1], ["b", "a", "a", "", "b", "a"], 0.5)])
def test_majority_of_k(k, right, said, share):
    assert majority_at(k, right, list(said)) == share


# ------------------------------------------------------------------------- what ends a completion

@pytest.mark.parametrize("ends, said", [(["x", -1], "'x'"), ([-1, "y"], "-1"), ([2, 1.5], "1.5"), ([True], "True")])
def test_what_ends_a_completion_is_an_id(ends, said):
    """The first that is none is named."""
    with pytest.raises(UserError, match=f"^eos_token_id {said} is not a token id$"):
        stop_tokens([], [{"eos_token_id": ends}])


def test_the_end_of_a_turn_comes_first_of_what_ends_a_completion():
    special = {"<end>": 7, "<eos>": 8}
    assert ends_by_name({"eos_token": "<eos>"}, special, "<end>") == [7, 8]
    assert stop_tokens([7, 8], [{"eos_token_id": [9, 7]}, {"eos_token_id": 5}]) == [7, 8, 9, 7, 5]
    assert ends_by_name({"eos_token": {"content": "<eos>"}}, special, "") == ends_by_name({"eos_token": "<eos>"}, special, "<no>") == [8]
    with pytest.raises(UserError, match="no file names a stop token"):
        stop_tokens(ends_by_name({}, special, ""), [{}])


WORDS = {2: b'"', 5: b"\n", 6: b"\xe6\xbc"}
AN_END = dict(special={"<eos>": 8, "</answer>": 9}, words=WORDS)
QUOTE = """eos_token_id 2 of config.json is the ordinary token '"': completions end with '<eos>' instead"""


@pytest.mark.parametrize("generation, config, used, notes", [
    (None, 2, [8], [QUOTE]), (2, 2, [8], [QUOTE]),              # LlamaConfig's default, alone and as saved with it
    ([2], 2, [8, 2], []), ([5, 2], 2, [8, 5, 2], []), (None, [2, 5], [8, 2, 5], []),       # a list
    (5, 2, [8, 5], [QUOTE]), (5, None, [8, 5], []), (None, 9, [8, 9], []), (9, 9, [8, 9], []), (None, 8, [8], []),
    (50256, 50256, [8], ["eos_token_id 50256 of config.json is no token: completions end with '<eos>' instead"]),
    (None, [8, 7], [8], ["eos_token_id 7 of config.json is no token: completions end with '<eos>' instead"]),
    ([7], 6, [8], ["eos_token_id 7 of generation_config.json is no token: completions end with '<eos>' instead",
                   "eos_token_id 6 of config.json is the ordinary token '\ufffd': completions end with '<eos>' instead"])])
def test_a_default_that_nobody_chose_ends_nothing(generation, config, used, notes):
    """A quotation mark once ended completions, and vanished from their texts."""
    files = [dict(eos_token_id=x) for x in (generation, config)]
    stop = stop_tokens(ends_by_name({"eos_token": "<eos>"}, AN_END["special"], ""), files)
    found, said = used_stops(stop, *files, **AN_END)
    assert list(dict.fromkeys(found)) == used and said == notes


def test_an_ordinary_token_ends_completions_if_nothing_else_does():
    """With a note; an id of no token would never end one."""
    found, [said] = used_stops([2, 7], {}, {"eos_token_id": 2}, **AN_END)
    assert found == [2] and said == """no file names an end but eos_token_id 2: completions end with the ordinary token '"'"""
    assert used_stops([5, 2], {"eos_token_id": 5}, {"eos_token_id": 2}, **AN_END)[0] == [5]
    with pytest.raises(UserError, match="^eos_token_id 7 is no token of its tokenizer, and no file names another end: "):
        used_stops([7], {}, {"eos_token_id": 7}, **AN_END)


def test_variables_of_a_template_are_the_tokens_alone(tmp_path):
    """No other text of the tokenizer's settings, and no token that is null."""
    chat_folder(tmp_path, "{{ tokenizer_class }}{{ pad_token }}{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))
    assert load_encoding(tmp_path).frame.before == "<|endoftext|>"


def test_a_damaged_map_of_special_tokens_is_named(tmp_path):
    chat_folder(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(UserError, match="special_tokens_map.json is not JSON"):
        load_encoding(tmp_path)
