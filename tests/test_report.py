"""What a run shows: in the terminal, in samples.jsonl, recomputed by a second way, and on its page,
which extra/test_page.py reads in a browser."""
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace


import pytest
import torch
from conftest import LETTERS, ROOT, agent_of, batch_of, fault, flags, records, tiny_model

import data
import grpo
from data.tokenizer import byte_encoding, decode, pieces, step_tokens
from grpo import Config
from run import passes, report, terminal
from run.terminal import duration, progress

HOSTILE = ("</script><script>hacked=1</script><img src=x onerror=\"hacked=1\">"
           "&amp;\u2028\u2029{{DATA}}")
SMALL = dict(n_layer=1, n_embd=16, warm_steps=12, warm_lr=3e-2, prompts=3, group=4, max_new=8,
             minibatches=2, steps=5, lr=1e-2, save_every=2, dtype="float32",
             supervision="process", temperature=0.7)


def run(where, *mode, **settings):
    task = where.parent / "letters.py"
    task.write_text(LETTERS)
    grpo.main([*mode, *flags({"task": task, "out": where} | settings)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and of each step its batch and the policy after it."""
    where, seen, real = tmp_path_factory.mktemp("made") / "run", {}, grpo.train_step

    def train_step(agent, problems, step):
        batch, stats = real(agent, problems, step)
        seen[step] = batch, copy.deepcopy(agent.policy)
        return batch, stats
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(grpo, "train_step", train_step)
        run(where, **SMALL)
    return SimpleNamespace(folder=where, steps=seen, lines=records(where / "samples.jsonl"),
                           said=said.getvalue())


# -------- in the terminal

@pytest.mark.parametrize("is_terminal, environment, said", [
    (True, {}, "<32 a><31 b ⏎ ><90 c><90 d> <1 accuracy 0.500>\n<1 warning:> a warning: b\n"),
    (True, {"NO_COLOR": ""}, "ab ⏎ cd accuracy 0.500\nwarning: a warning: b\n"),
    (False, {}, "ab ⏎ cd accuracy 0.500\nwarning: a warning: b\n")])
def test_a_terminal_shows_the_sign_of_advantages_accuracy_and_warnings(
        is_terminal, environment, said, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(os, "environ", environment)
    found = "".join(map(report.coloured, ["a", "b\n", "c", "d"], [0.01, -1e-6, 0.0, -0.0]))
    terminal.print0(f"{found} accuracy 0.500", coloured=True)
    terminal.print0("warning: a warning: b")
    shown = capsys.readouterr().out
    assert re.sub(r"\x1b\[(\d+)m(.*?)\x1b\[0m", r"<\1 \2>", shown) == said


def test_the_last_lines_say_what_a_run_has_gained_and_how_to_ask(made, monkeypatch):
    first, *_, last = [m for m in records(made.folder / "metrics.jsonl") if "greedy" in m]
    gained, _, asked = made.said.splitlines()[-3:]
    numbers = [float(x) for x in re.findall(r"([\d.]+)%", gained)]
    want = [100 * m[x] for x in ("pass@1", "greedy") for m in (first, last)]
    assert numbers == pytest.approx(want, abs=0.051) and " in 5 steps, 0:0" in gained
    assert "; ask it: python grpo.py --task " in asked
    for script, want in (("../grpo.py", "../grpo.py"), ("/a b/grpo.py", "'/a b/grpo.py'"),
                         ("ipykernel_launcher.py", "grpo.py")):
        monkeypatch.setattr(sys, "argv", [script])
        assert terminal.command() == f"python {want}"


def test_a_model_cannot_change_the_terminal():
    """By the codes of its title, its colours, its cursor; a tab and a line break are text."""
    text = "a\x1b]0;b\x07\r\x9bc\td\x7f\u00e9"
    assert report.printable(text + "\n") == "a\\x1b]0;b\\x07\\r\\x9bc\td\\x7f\u00e9\n"
    assert report.printable("\u202eevil\u2066\u061c\u200f") == r"\u202eevil\u2066\u061c\u200f"
    assert report.coloured("\x1b[2J\n", 1.0) == "\\x1b[2J ⏎ "


def test_stdout_replaces_what_it_cannot_show(monkeypatch):
    written = io.BytesIO()
    for stdout in (io.StringIO(), io.TextIOWrapper(written, "ascii")):
        monkeypatch.setattr(sys, "stdout", stdout)
        with report.exit_code():
            print("3 ⏎", flush=True)
    assert written.getvalue() == b"3 ?\n"


# Rewards differ and rows end, all groups are dead, rows are cut off, both; K: at a high KL, too.
# L, E, F: at a low one. F: of a learned reward. The accuracies are about the least.
STEPS = dict(G=(0.99, 0.5), D=(1.0, 0.95), C=(0.5, 0.49), B=(1.0, 0.49), K=(1.0, 0.95),
             W=(1.0, 0.95))
ACCURACY = dict(K=0.24, L=0.24, E=0.151, F=0.149, H=0.149, W=1.0)
EQUAL, OVER, FELL = "All groups are dead", "No completion ends", "The policy has collapsed"


@pytest.mark.parametrize("steps, warned", [
    ("DDD", {3: EQUAL}), ("CCCCCCC", {3: OVER}), ("DCD", {}), ("DDGDD", {}),
    ("GDDDDGCCC", {4: EQUAL, 9: OVER}), ("BBB", {3: EQUAL + OVER}), ("GKKKK", {4: FELL}),
    ("KKK", {3: EQUAL}), ("GDKKGCCC", {8: OVER}), ("GKKDKKK", {4: EQUAL, 7: FELL}),
    ("GFFFF", {}), ("GEEEE", {}), ("GLLLL", {}), ("GHHKKK", {4: FELL}), ("WWW", {})])
def test_three_steps_without_anything_to_learn_are_told_once(steps, warned, capsys):
    """With headings of docs/troubleshooting.md; of a learned reward another line tells."""
    done, told = [], {}
    for n, step in enumerate(steps, 1):
        dead, finished = STEPS.get(step, (0.5, 1.0))
        done.append(dict(reward=0.5, dead_groups=dead, finished=finished, seconds=1.0, lr=0.01,
                         kl=1.1 if step == "K" else 0.9, accuracy=ACCURACY.get(step, 0.5)))
        done[-1] |= {"rule_reward": 1} if "F" in steps else {}
        report.step_line(n, len(steps), done)
        line, *warnings = capsys.readouterr().out.splitlines()
        if warnings:
            told[n] = "".join(re.findall('"(.+?)"', " ".join(warnings)))
        assert line.startswith(f"step {n}/{len(steps)}  reward 0.500")
        assert (f"finished {finished:.2f}" in line) == (finished < 0.9)
    assert told == warned
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert all(f"\n## {heading}\n" in page for heading in (EQUAL, OVER, FELL))


@pytest.mark.parametrize("earned, warned", [
    ([0.4, 0.5, 0.3, 0.4, 0.4, 0.4, 0.35] + [0.29] * 9, 13),
    ([0.06, 0.05, 0.06, 0.02, 0.01] + [0.0] * 9, 11), ([0.0] * 9, None)])
def test_a_fall_of_the_true_reward_is_warned_of(earned, warned, capsys):
    """Once: six times below each of the first six, or at 0."""
    stats = dict(reward=0, dead_groups=0, finished=1, seconds=1, lr=1, kl=0, accuracy=0.5)
    for n in range(1, len(earned) + 1):
        report.step_line(n, 99, [stats | dict(rule_reward=x) for x in earned[:n]])
    lines = capsys.readouterr().out.splitlines()
    assert f"  rule_reward {earned[0]:.3f}  " in lines[0]
    told = [i for i, line in enumerate(lines) if "rule_reward fell: --beta may" in line]
    assert told == [warned] * (warned is not None) and len(lines) == len(earned) + len(told)


@pytest.mark.parametrize("seconds, total, left", [
    ([60.0, 2.0, 2.0], 33, "1:00"), ([50.0] * 20 + [1.0] * 9, 89, "1:00"),
    ([1.0] * 5 + [3.0] * 4, 609, "10:00")])
def test_the_time_left_is_that_of_a_step_in_the_middle_of_the_last_nine(
        seconds, total, left, capsys):
    stats = dict(reward=1.234567, accuracy=0.98765, length=351.23, kl=0.0123, entropy=1.2345,
                 clip_share=0.1, dead_groups=0.4375, finished=1.0)
    n = len(seconds)
    report.step_line(n, total, [stats | dict(seconds=s) for s in seconds])
    assert capsys.readouterr().out == (
        f"step {n}/{total}  reward 1.235  accuracy 0.988  length 351.2  kl 0.012  entropy 1.234  "
        f"dead_groups 0.44  {seconds[-1]:.2f} s  left {left}\n")


def test_progress_is_told_at_most_every_ten_seconds(monkeypatch, capsys):
    """With the time left at the speed so far; or at once where it is asked for."""
    assert [*map(duration, (0, 59.9, 60, 3725))] == ["0:00", "0:59", "1:00", "1:02:05"]
    now = [100.0]
    monkeypatch.setattr(report.time, "time", lambda: now[0])
    told = progress("evaluation", 50)
    for done, now[0] in ((1, 105.0), (2, 110.0), (10, 110.5), (20, 120.0), (30, 131.0)):
        told(done)
    told(31, "loss 0.1  ", now=True)
    assert capsys.readouterr().out.splitlines() == [
        "evaluation 10/50  left 0:42", "evaluation 30/50  left 0:20",
        "evaluation 31/50  loss 0.1  left 0:19"]


def test_of_many_shares_the_first_and_the_last_are_shown():
    found = {f"{kind}@{k}": k / 100 for k in (1, 2, 16, 8) for kind in ("pass", "maj")}
    del found["maj@1"]
    said = report.percentages({"greedy": 0.5} | found | {"lenient@1": 0.6, "held_out": 70})
    assert said == ("greedy 50.0%  pass@1 1.0%  pass@16 16.0%  maj@16 16.0%  lenient@1 60.0%  "
                    "of 70 problems")


@pytest.mark.parametrize("settings, noted", [
    ({}, [f"--lr {Config.lr:g} is the paper's"]), (dict(lr=2 * Config.lr, baseline="none"), [])])
def test_the_header_says_with_what_a_run_works(settings, noted, capsys):
    cfg = Config(dtype="float32", **settings)
    report.header(cfg, byte_encoding(), torch.nn.Linear(999, 10), range(70), range(5))
    first, second, *notes = capsys.readouterr().out.splitlines()
    assert first == (f"0.01M parameters on cpu in float32; 70 problems, 5 held out; "
                     f"{cfg.prompts} x {cfg.group} rows a step, --lr {cfg.lr:g}")
    assert ("baseline none" in second) == ("baseline" in settings) and "group" not in second
    assert all(a in b for a, b in zip(noted, notes, strict=True))


GROUP = [("b", 1), ("a", 0), ("b", 1), ("cc", 2), ("b", 1), ("d", 0.5), ("e", 0.7), ("f", 3)]
LONG = "a" * 20 + "b" * 77


@pytest.mark.parametrize("rows, prompt, reward, said", [
    (slice(0, 8), "?", 1, ["?   (2 others between)", "1x f", "1x cc", "1x d", "1x a"]),
    (slice(0, 4), "?", 1, ["?", "1x cc", "2x b", "1x a"]),
    (slice(0, 4), "\n", 0.25, [" ⏎ ", "1x cc", "1x b", "1x b", "1x a"]),    # a row was cut off
    (slice(3, 4), LONG, 1, [f"{LONG[:60]} ... {LONG[-31:]}", "1x cc"])])
def test_a_group_is_shown_as_its_distinct_completions(
        rows, prompt, reward, said, capsys, monkeypatch):
    """At most four, the best and the worst, with how often each was sampled."""
    ids = torch.tensor([[63, *x.encode().ljust(2, b"\0")] for x, _ in GROUP])
    rewards = torch.tensor([[float(r)] for _, r in GROUP])
    flat = rewards[:, 0]
    batch = batch_of(ids > 63, ids=ids, reward=rewards.clone(), texts=[x for x, _ in GROUP],
                     adv=rewards + torch.tensor([0.0, -1.0, 1.0]),
                     problems=[SimpleNamespace(prompt=prompt)] * 8,
                     components={"correct": flat, "reward": flat, "own": flat / 4})
    batch.reward[2] = reward
    monkeypatch.setenv("NO_COLOR", "1")
    part = passes.select(batch, torch.arange(8)[rows], 3)
    report.print_group(part, byte_encoding())
    asked, *found = capsys.readouterr().out.splitlines()
    first = "+2.00" if "1x f" in said else "of the first token +1.00"
    most = rewards[rows].max()
    assert asked == "    " + said[0]
    assert found[0].endswith(f" {most:g} (correct {most:g}, own {most / 4:g})  advantage {first}")
    for line, begin in zip(found, said[1:], strict=True):
        assert line.startswith(f"      {begin}   reward ")


# -------- samples.jsonl

def rows_of(line, batch):
    """The rows of a batch that a line is about."""
    first = next(i for i, p in enumerate(batch.problems) if p.prompt == line["prompt"])
    return range(first, first + 4)


@pytest.mark.slow
def test_every_number_is_what_one_row_gives_in_float64(made):
    """The policy after the update, asked for the whole distribution, one row at a time."""
    several, moved = 0, 0.0
    for line in made.lines:
        batch, policy = made.steps[line["step"]]
        policy = policy.double().requires_grad_(False)
        rows = rows_of(line, batch)
        for name, x in batch.components.items():
            assert line["parts"][name] == pytest.approx(x[rows].tolist(), abs=1e-4)
        for n, i in enumerate(rows):
            on = batch.mask[i].nonzero()[:, 0]
            ids, sampled = batch.ids[i, :on[-1] + 1], batch.ids[i, on]
            logits = policy(ids[None])[0, on - 1].double() @ policy.embed_tokens.weight.T
            logp = (logits / 0.7).log_softmax(-1)
            ends = batch.ends[i, on]
            want = {"advantages": batch.adv[i, on], "logp": batch.logp[i, on],
                    "ref_logp": batch.ref_logp[i, on], "entropy": -(logp.exp() * logp).sum(-1),
                    "new_logp": logp.gather(1, sampled[:, None])[:, 0],
                    "step_rewards": batch.reward[i, on][ends]}
            for name, numbers in want.items():
                assert line[name][n] == pytest.approx(numbers.tolist(), abs=1e-4), name
                assert all(round(x, 4) == x for x in line[name][n])
            moved = max(moved, *(abs(a - b) for a, b in zip(line["new_logp"][n], line["logp"][n])))
            assert line["ends"][n] == ends.nonzero()[:, 0].tolist()
            assert line["rewards"][n] == pytest.approx(sum(line["step_rewards"][n]), abs=1e-3)
            assert line["finished"][n] == (ids[-1] == 256)
            assert line["completions"][n] == batch.texts[i] == "".join(line["tokens"][n])
            assert len(line["tokens"][n]) == len(on)
            several += ends.sum() > 1
    assert several > 5 and moved > 0.01
    assert any("" in row[:-1] for line in made.lines for row in line["tokens"])  # half a character
    batch.ends = ~batch.mask            # as in a beginning that was given
    batch.problems = [SimpleNamespace(prompt="?", answer=42)]
    batch.components["reward"] = batch.components["correct"]
    none = 0 * batch.logp
    found = report.record(agent_of(Config()), batch, none, none)
    assert found["parts"].keys() == batch.components.keys() - {"reward"}
    assert not any(found["step_rewards"]) and found["answer"] == "42" and "answer" not in line


def test_the_widest_group_is_chosen_and_another_at_random(made):
    """At the first step, every --save_every, and the last, where the first is printed, too."""
    parts = re.split(r"^step \d/", made.said, flags=re.M)[1:]
    assert [len(re.findall(r"^      \d+x ", x, re.M)) for x in parts] == [4, 4, 0, 4, 4]
    assert [(x["step"], x["which"]) for x in made.lines] == [
        (step, which) for step in (1, 2, 4, 5) for which in ("spread", "random")]
    rewards = torch.tensor([1., 1, 0, 2, 3, 1, 0, 0])[:, None]
    def chosen(rows):
        some = batch_of(torch.ones(rows, 1).bool(), reward=rewards[:rows],
                        problems=[*"aabbccdd"[:rows]])
        for step in range(40):
            yield {x: y.tolist() for x, y in report.chosen(Config(), step, some).items()}
    found = [*chosen(8)]
    assert all(x["spread"] == [2, 3] for x in found)                # of two equal ones the first
    assert {*map(str, (x["random"] for x in found))} == {"[0, 1]", "[4, 5]", "[6, 7]"}
    assert [*chosen(8)] == found and [*chosen(2)] == [{"spread": [0, 1]}] * 40


def test_no_more_logits_than_those_of_a_part(monkeypatch):
    """The numbers are the same."""
    policy, ids, most = tiny_model(), torch.randint(0, 256, (5, 20)), []
    batch = batch_of(torch.arange(20) >= torch.tensor([[3], [1], [9], [4], [2]]), ids=ids)
    head, whole = policy.head, passes.entropies(policy, batch, Config(temperature=1.3))
    monkeypatch.setattr(policy, "head", lambda x: (most.append(len(x)), head(x))[1])
    policy.most_logits = 16 * (3 * 257 + 100)
    parts = passes.entropies(policy, batch, Config(temperature=1.3))
    assert max(most) == 3 and whole[batch.mask].all() and not whole[~batch.mask].any()
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-4)


def test_pieces_join_to_the_text():
    """A character of several tokens is the last one's; half of one at the end is not lost."""
    encoding, source = byte_encoding(), random.Random(0)
    assert pieces(encoding, [*"a€b".encode(), 256]) == ["a", "", "", "€", "b", ""]
    assert pieces(encoding, [97, *"€".encode()[:2]]) == ["a", "", "\ufffd"]
    text = "aé€😀\n".encode()
    for n in range(300):
        ids = source.choices([*text, 0xC3, 0xFF], k=n % 12) + [256] * (n % 2)
        assert "".join(pieces(encoding, ids)) == decode(encoding, ids)
    assert step_tokens(encoding, [*text], [1, 2, 3, 4, 5]) == [0, 2, 5, 9, 10]


# -------- the page

DATA = r'<script id="data" type="application/json">(.*?)</script>'
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"     # 1.6.32, as it came


def shown_data(path):
    return json.loads(re.search(DATA, path.read_text())[1])


def test_what_others_wrote_is_escaped():
    """No text ends the element that it stands in; what JSON lacks is null."""
    written = [{HOSTILE: [HOSTILE, 1.5, "😀\0"], "list": [1, True, math.nan, -math.inf]}]
    text = re.search(DATA, report.page(written))[1]
    assert text.isascii() and "<" not in text
    assert json.loads(text) == [written[0] | {"list": [1, True, None, None]}]


def test_a_page_is_one_file_that_loads_nothing(made):
    text = (made.folder / "report.html").read_text()
    policy = re.search(r'(?s)Content-Security-Policy" content="(.*?)"', text)[1]
    assert policy.split() == ("default-src 'none'; base-uri 'none'; form-action 'none'; "
                              "script-src 'unsafe-inline'; style-src 'unsafe-inline'").split()
    assert not re.search(r"\b(src|href)=|@import|url\(", text.split('<script id="data"')[0])
    assert not re.search(r"\w+HTML|document\.write|eval", (report.PAGE / "page.js").read_text())
    plot = (report.PAGE / "uPlot.iife.min.js").read_bytes()
    assert hashlib.sha256(plot).hexdigest() == UPLOT and "Permission is hereby granted" in text


def test_samples_are_thinned_evenly(tmp_path):
    """By whole steps, the last among them; a line that is being written is left out."""
    (tmp_path / "metrics.jsonl").touch()
    assert report.run_of(tmp_path, 10)["samples"] == []
    log = [{"step": n // 2, "text": "x" * 1000} for n in range(2, 202)]
    whole = "".join(json.dumps(x) + "\n" for x in log)
    (tmp_path / "samples.jsonl").write_text(whole)
    assert report.run_of(tmp_path, len(whole))["samples"] == log
    (tmp_path / "samples.jsonl").write_text(whole + '{"step": 101, "whi')
    for share, kept in ((0.99, 50), (0.5, 34), (0.1, 10), (0.035, 4)):
        found = report.run_of(tmp_path, int(share * len(whole)))
        assert found["steps"] == 100 and found["samples"][-1]["step"] == 100
        assert len(found["samples"]) == 2 * kept


def test_runs_are_put_beside_one_another(made, tmp_path, capsys, monkeypatch):
    """In the first folder, or in --out's, with equal shares of the bytes; each keeps its page."""
    copies = [shutil.copytree(made.folder, tmp_path / name) for name in "ab"]
    for name in ("run.json", "samples.jsonl"):
        (copies[1] / name).unlink()
    grpo.main(["--report", *map(str, copies)])
    page = copies[0] / "comparison.html"
    assert capsys.readouterr().out == f"the report is in {page}\n"
    one, other = shown_data(page)
    assert (one["name"], other["name"], other["samples"], other["about"]) == ("a", "b", [], {})
    assert one["metrics"] == records(made.folder / "metrics.jsonl")
    assert one["samples"] == made.lines and one["about"]["config"]["group"] == 4
    monkeypatch.setattr(report, "MOST", (copies[0] / "samples.jsonl").stat().st_size)
    grpo.main(["--report", *map(str, copies), "--out", str(tmp_path / "new")])
    one, other = shown_data(tmp_path / "new" / "comparison.html")
    assert one["steps"] == 4 and 0 < len(one["samples"]) < 8
    assert shown_data(report.write(copies[:1], tmp_path))[0]["samples"] == made.lines
    assert len(shown_data(copies[0] / "report.html")) == 1


def test_a_page_takes_a_hundredth_of_the_time_of_a_run(monkeypatch):
    times, written = iter((10, 12, 209, 210, 211, 212, 214, 220, 222)), []
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(report, "write", written.append)
    monkeypatch.setattr(report, "DUE", {})
    for name in "aabaa":
        report.refresh(name, last=len(written) == 3)
    assert written == [["a"], ["b"], ["a"], ["a"]]


def test_a_page_that_cannot_be_written_is_one_line(made, tmp_path, capsys):
    """A run goes on without it."""
    (tmp_path / "file").touch()
    where = tmp_path / "file" / "x"
    err = fault(capsys, "--report", made.folder, "--out", where)
    assert "Not a directory" in err and str(where) in err
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "report.html").mkdir()
    report.refresh(tmp_path)
    said = capsys.readouterr().out
    assert said.startswith(f"note: no report: cannot write {tmp_path / 'report.html'}: ")


def test_a_damaged_line_is_left_out_with_a_note(tmp_path, capsys, monkeypatch):
    """Of each log; the other lines are shown. Wherever one stands, the folder names the run."""
    assert "no run in" in fault(capsys, "--report", tmp_path)
    for name in ("metrics", "samples"):
        lines = ['{"step": 1}', "\0", '{"step": 2, x}', "[" * 100_000, '{"step": 4}']
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + '\n{"step": 5}')
    monkeypatch.chdir(tmp_path)
    report.refresh(Path())
    said, (run,) = capsys.readouterr().out, shown_data(tmp_path / "report.html")
    assert (run["name"], run["path"]) == (tmp_path.name, ".")
    assert [x["step"] for x in run["metrics"] + run["samples"]] == [1, 4, 1, 4]
    for name in ("metrics", "samples"):
        assert all(f"note: {name}.jsonl, line {n}, " in said for n in (2, 3, 4))


def test_every_statistic_has_a_meaning():
    script = (report.PAGE / "page.js").read_text()
    meaning = re.search(r"const MEANING = \{(.*?)^\};", script, re.M | re.S)[1]
    names = set(re.findall(r"^  (\w+): \"", meaning, re.M))
    shown = data.STATISTICS - {"step", "held_out", "greedy", "pass", "maj"}
    assert names == shown, "MEANING in page.js, STATISTICS in data"
