"""What the terminal shows: colours, warnings, the time left."""
import os
import re
import signal
import sys

import pytest
import torch
from conftest import ROOT

from data.tokenizer import byte_encoding
from grpo import Config
from run import dist, report


@pytest.fixture
def terminal(monkeypatch):
    """A function: stdout is a terminal, or not, and NO_COLOR is set, or not."""
    def on(is_terminal, no_color=False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", "")
    return on


def test_tokens_are_coloured_by_the_sign_of_their_advantage(terminal):
    """Green above 0, red below it, grey at it; in a terminal only, and not where NO_COLOR is set, to anything."""
    def coloured():
        return "".join(map(report.coloured, ["a", "b\n", "c", "d"], [0.01, -1e-6, 0.0, -0.0]))
    terminal(True)
    assert coloured() == "\x1b[32ma\x1b[0m\x1b[31mb ⏎ \x1b[0m\x1b[90mc\x1b[0m\x1b[90md\x1b[0m"
    for given in ((True, True), (False, False)):
        terminal(*given)
        assert coloured() == "ab ⏎ cd"


def test_a_model_cannot_change_the_terminal(terminal):
    """By the codes of its title, its colours, its cursor; a tab and a line break are text."""
    text = "a\x1b]0;b\x07\r\x9bc\td\x7f\u00e9"
    assert report.printable(text + "\n") == "a\\x1b]0;b\\x07\\x0d\\x9bc\td\\x7f\u00e9\n"
    terminal(False)
    assert report.coloured("\x1b[2J\n", 1.0) == "\\x1b[2J ⏎ "


GOOD, DEAD, CUT = (dict(reward=0.5, dead_groups=dead, finished=ended) for dead, ended in ((0.99, 0.5), (1.0, 0.95), (0.5, 0.49)))
EQUAL, OVER = "All groups are dead", "No completion ends"         # what docs/troubleshooting.md says on it


@pytest.mark.parametrize("steps, warned", [
    ([DEAD] * 3, {3: EQUAL}), ([CUT] * 3, {3: OVER}), ([DEAD, CUT, DEAD], {}), ([DEAD] * 7, {3: EQUAL}), ([CUT] * 7, {3: OVER}),
    ([DEAD] * 2 + [GOOD] + [DEAD] * 2, {}), ([GOOD] * 9, {}), ([GOOD] + [DEAD] * 4 + [GOOD] + [CUT] * 3, {4: EQUAL, 9: OVER}),
    ([DEAD | CUT | {"dead_groups": 1.0}] * 3, {3: EQUAL + OVER})])
def test_three_steps_without_anything_to_learn_are_told_once(steps, warned, capsys):
    done, told = [], {}
    for n, stats in enumerate(steps, 1):
        done.append(stats | dict(seconds=1.0))
        report.step_line(n, len(steps), done)
        line, *warnings = capsys.readouterr().out.splitlines()
        told |= {n: "".join(re.findall('"(.+?)"', " ".join(warnings)))} if warnings else {}
        assert line.startswith(f"step {n}/{len(steps)}  reward 0.500")
        assert (f"finished {stats['finished']:.2f}" in line) == (stats["finished"] < 0.9)       # while it is low
    assert told == warned
    assert all(f"\n## {heading}\n" in (ROOT / "docs" / "troubleshooting.md").read_text() for heading in (EQUAL, OVER))


@pytest.mark.parametrize("seconds, step, total, left", [
    ([2.0], 1, 31, "1:00"), ([60.0, 2.0, 2.0], 3, 33, "1:00"), ([50.0] * 20 + [1.0] * 9, 29, 89, "1:00"), ([9.0] * 4, 4, 4, "0:00"),
    ([1.0] * 5 + [3.0] * 4, 9, 609, "10:00")])
def test_the_time_left_is_that_of_a_step_in_the_middle_of_the_last_nine(seconds, step, total, left, capsys):
    report.step_line(step, total, [GOOD | dict(seconds=s) for s in seconds])
    assert capsys.readouterr().out.endswith(f"  {seconds[-1]:.2f} s  left {left}\n")


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.9, "0:59"), (60, "1:00"), (3725, "62:05")])
def test_seconds_as_minutes(seconds, text):
    assert dist.clock(seconds) == text


def test_progress_is_told_at_most_every_ten_seconds(monkeypatch, capsys):
    """With the time left at the speed so far; or at once where it is asked for."""
    now = [100.0]
    monkeypatch.setattr(report.time, "time", lambda: now[0])
    told = dist.progress("evaluation", 50)
    for done, at in ((1, 105.0), (2, 110.0), (10, 110.5), (20, 120.0), (30, 131.0)):
        now[0] = at
        told(done)
    told(31, "loss 0.1  ", now=True)
    assert capsys.readouterr().out.splitlines() == [
        "evaluation 10/50  left 0:42", "evaluation 30/50  left 0:20", "evaluation 31/50  loss 0.1  left 0:19"]


def test_of_many_shares_the_first_and_the_last_are_shown():
    """Those of the largest k, by its number."""
    found = {f"{kind}@{k}": k / 100 for k in (1, 2, 16, 8) for kind in ("pass", "maj")} | {"greedy": 0.5}
    assert report.percentages(found) == "greedy 50.0%  pass@1 1.0%  pass@16 16.0%  maj@16 16.0%"
    assert report.percentages({"pass@1": 0.25, "maj@1": 0.25}) == "pass@1 25.0%  maj@1 25.0%"


def test_a_rank_without_a_share_of_a_chunk_skips_it(monkeypatch):
    """The last one of seven items for three ranks; it would have nothing to sample from."""
    for rank, parts in enumerate((["abc", "def", "g"], ["abc", "def"], ["abc", "def"])):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        monkeypatch.setattr(dist, "ranks", lambda: 3)
        assert [*dist.chunks("labelling", "abcdefg", 3)] == parts


def test_parts_stop_when_they_are_asked_to():
    with pytest.raises(dist.Stopped, match="in the labelling, which will begin again"), dist.stoppable():
        for part in dist.chunks("labelling", "abcde", 2):
            assert part == "ab"
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("compile", [True, False])
def test_the_header_says_with_what_a_run_works(capsys, compile):
    cfg = Config(device="cpu", dtype="float32", compile=compile, lr=3e-5)
    report.header(cfg, byte_encoding(), torch.nn.Linear(999, 10), range(70), range(5))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0.01M parameters on cpu in float32; 70 problems, 5 held out; 16 x 64 rows a step, --lr 3e-05"
    assert ["compiling" in line for line in said[2:]] == [True] * compile


@pytest.mark.parametrize("settings, noted", [
    (dict(lr=1e-6), ["--lr 1e-06 is the paper's"]), (dict(lr=2e-6), []), (dict(lr=1e-4, baseline="none"), ["baseline none"]),
    (dict(lr=1e-4, baseline="value", adv_scale="none"), ["baseline value, adv_scale none"]), (dict(lr=1e-4), ["lr 0.0001"])])
def test_the_header_notes_what_a_newcomer_would_not_expect(settings, noted, capsys):
    cfg = Config(device="cpu", dtype="float32", **settings)
    report.header(cfg, byte_encoding(), torch.nn.Linear(999, 10), range(70), range(5))
    said = capsys.readouterr().out.splitlines()[1:]
    assert all(text in "\n".join(said) for text in noted) and len(said) == 1 + (settings["lr"] == 1e-6)
