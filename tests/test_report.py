"""What is written down of a rollout, recomputed by a second way, and the page that shows it, in a real browser
where there is one: chromium with its driver, and selenium."""
import copy
import hashlib
import json
import random
import re
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, batch_of, flags, tiny_model
from conftest import records as lines

import data
import grpo
from data import UserError
from data.tokenizer import byte_encoding, decode, pieces, step_tokens
from run import files, report

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=\"hacked=1\">&amp;\u2028\u2029{{DATA}}"
LETTERS = '''from types import SimpleNamespace
DEFAULTS = {}
def problems(difficulty=2):
    made = [SimpleNamespace(prompt=a + b + "=") for a in "abcd" for b in "efgh"]
    return made[2:], made[:2]
def demonstration(problem, rng):
    return "".join(rng.choices("ab\\u00e9", k=rng.randint(1, 3)))
def reward(problem, text):
    return {"correct": float("a" in text), "style": 0.25 * len(set(text))}
def steps(problem, text):
    return [(i + 1, x in "ab") for i, x in enumerate(text)]
def answer(text):
    return text
'''
TINY = dict(n_layer=1, n_embd=16, warm_steps=12, warm_lr=3e-2, prompts=3,
            group=4, max_new=8, minibatches=2, steps=5, lr=1e-2, save_every=2, device="cpu",
            dtype="float32", compile=False)


def run(where, *mode, **settings):
    """A run on the command line."""
    given = {"task": where.parent / "letters.py", "out": where} | settings
    given["task"].write_text(LETTERS)
    grpo.main([*mode, *flags(given)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with process supervision at temperature 0.7, and of each step its batch and the policy after it."""
    where, seen = tmp_path_factory.mktemp("made") / "run", {}
    with pytest.MonkeyPatch.context() as patch:
        real = grpo.train_step

        def train_step(agent, problems, step):
            """Calls through."""
            batch, stats = real(agent, problems, step)
            seen[step] = batch, copy.deepcopy(agent.policy)
            return batch, stats
        patch.setattr(grpo, "train_step", train_step)
        run(where, **TINY, supervision="process", temperature=0.7)
    return SimpleNamespace(folder=where, steps=seen, lines=lines(where / "samples.jsonl"))


# --------------------------------------------------------------------------------- what is written

@pytest.mark.slow
def test_groups_are_written_at_the_first_step_every_other_and_the_last(made):
    assert [(x["step"], x["which"]) for x in made.lines] == [
        (step, which) for step in (1, 2, 4, 5) for which in ("spread", "random")]


def rows_of(line, batch):
    """The rows of a batch that a line is about."""
    first = next(i for i, p in enumerate(batch.problems) if p.prompt == line["prompt"])
    return range(first, first + 4)


def test_every_number_is_what_one_row_gives_in_float64(made):
    """The policy after the update, asked for the whole distribution at each token, one row at a time."""
    several, moved = 0, 0.0
    for line in made.lines:
        batch, policy = made.steps[line["step"]]
        policy = policy.double().requires_grad_(False)
        for n, i in enumerate(rows_of(line, batch)):
            columns = [t for t, on in enumerate(batch.mask[i].tolist()) if on]
            ids = batch.ids[i, :columns[-1] + 1]
            dist = (policy.embed_tokens.weight @ policy(ids[None])[0].double().T / 0.7).T.softmax(-1)      # (T, V)
            want = {"advantages": [batch.adv[i, t] for t in columns],
                    "logp": [batch.logp[i, t] for t in columns],
                    "ref_logp": [batch.ref_logp[i, t] for t in columns],
                    "new_logp": [dist[t - 1, ids[t]].log() for t in columns],
                    "entropy": [-(dist[t - 1] * dist[t - 1].log()).sum() for t in columns],
                    "step_rewards": [batch.reward[i, t] for t in columns if batch.ends[i, t]]}
            for name, numbers in want.items():
                assert line[name][n] == pytest.approx([float(x) for x in numbers], abs=1e-4), name
                assert all(round(x, 4) == x for x in line[name][n])
            moved = max(moved, *(abs(a - b) for a, b in zip(line["new_logp"][n], line["logp"][n])))
            assert line["ends"][n] == [j for j, t in enumerate(columns) if batch.ends[i, t]]
            assert line["rewards"][n] == pytest.approx(sum(line["step_rewards"][n]), abs=1e-3)
            assert line["finished"][n] == (ids[-1] == 256)
            assert line["completions"][n] == batch.texts[i] == "".join(line["tokens"][n])
            assert line["parts"] == {name: pytest.approx([float(x[r]) for r in rows_of(line, batch)], abs=1e-4)
                                     for name, x in batch.components.items()}
            assert len(line["tokens"][n]) == len(columns)
            several += len(line["ends"][n]) > 1
    assert several > 5 and moved > 0.01
    assert any("" in row[:-1] for line in made.lines for row in line["tokens"])     # half a character


def test_the_widest_group_is_chosen_and_another_at_random(made):
    for line in made.lines:
        rewards = made.steps[line["step"]][0].reward.sum(1).tolist()
        spreads = [statistics.pstdev(rewards[i:i + 4]) for i in range(0, 12, 4)]
        if line["which"] == "spread":
            assert statistics.pstdev(line["rewards"]) == pytest.approx(max(spreads), abs=1e-3)
            widest = line["prompt"]
        else:
            assert line["prompt"] != widest
    on, rewards = torch.ones(8, 1).bool(), torch.tensor([[1.], [1], [0], [2], [3], [1], [0], [0]])
    batch = batch_of(on, reward=rewards)
    cfg = grpo.Config(group=2)
    assert report.widest(batch, 2) == slice(2, 4)          # of two equal ones the first
    at_random = {report.chosen(cfg, step, batch)["random"].start for step in range(40)}
    assert at_random == {0, 4, 6}
    assert report.chosen(cfg, 3, batch) == report.chosen(cfg, 3, batch)
    alone = batch_of(on[:2], reward=rewards[:2])
    assert report.chosen(cfg, 1, alone) == {"spread": slice(0, 2)}


def test_no_more_logits_than_those_of_one_row(monkeypatch):
    """At most PART; in whatever parts, the numbers are the same."""
    policy, source = tiny_model(vocab_size=300, block_size=32), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (5, 20), generator=source)
    mask = torch.arange(20) >= torch.tensor([[3], [1], [9], [4], [2]])
    whole, most, head = report.as_it_is_now(policy, ids, mask, 1.3), [], policy.head
    monkeypatch.setattr(policy, "head", lambda x: most.append(x.numel() // x.size(-1)) or head(x))
    monkeypatch.setattr(report, "PART", 900)
    parts = report.as_it_is_now(policy, ids, mask, 1.3)
    assert max(most) == 3 and most.count(3) == 25
    for one, other in zip((x for kind in whole for x in kind), (x for kind in parts for x in kind), strict=True):
        assert one == pytest.approx(other, abs=1.1e-4)
    flat = report.as_it_is_now(policy, ids, mask, 1e6)[1]
    assert all(x == pytest.approx([torch.tensor(300.).log().item()] * len(x), abs=1e-3) for x in flat)


def test_pieces_join_to_the_text():
    """A character of several tokens is the last one's; half of one at the end is not lost."""
    encoding, source = byte_encoding(), random.Random(0)
    assert pieces(encoding, [*"a€b".encode(), 256]) == ["a", "", "", "€", "b", ""]
    assert pieces(encoding, [97, *"€".encode()[:2]]) == ["a", "", "\ufffd"] and pieces(encoding, []) == []
    text = "aé€😀\n"
    for _ in range(500):
        ids = source.choices([*text.encode(), 0xC3, 0xFF], k=source.randrange(1, 12)) + [256] * source.randrange(2)
        assert "".join(pieces(encoding, ids)) == decode(encoding, ids)
    ids = list(text.encode())
    assert step_tokens(encoding, ids, [1, 2, 3, 4, 5]) == [0, 2, 5, 9, 10]


@pytest.mark.slow
def test_looking_changes_no_step_and_no_resume(made, tmp_path, monkeypatch):
    """The same weights whatever is written down; the same bytes after a kill between two checkpoints."""
    settings = TINY | dict(supervision="process", temperature=0.7)
    run(tmp_path / "less", **settings | dict(save_every=1000))
    weights = [(x / "model.safetensors").read_bytes() for x in (made.folder, tmp_path / "less")]
    assert weights[0] == weights[1] and [x["step"] for x in lines(tmp_path / "less" / "samples.jsonl")] == [1, 1, 5, 5]
    real = report.log_step

    def log_step(agent, step, batch, done):
        """The end of a process that had just written down step 4."""
        real(agent, step, batch, done)
        if step == 4:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(report, "log_step", log_step)
        with pytest.raises(SystemExit):
            run(tmp_path / "cut", **settings)
    assert [x["step"] for x in lines(tmp_path / "cut" / "samples.jsonl")] == [1, 1, 2, 2, 4, 4]
    run(tmp_path / "cut", "--resume")
    for name in ("model.safetensors", "samples.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (made.folder / name).read_bytes()


def test_a_run_without_a_reference_has_no_log_probability_of_one(tmp_path):
    run(tmp_path / "run", **TINY | dict(steps=1, kl="none"))
    assert [x["ref_logp"] for x in lines(tmp_path / "run" / "samples.jsonl")] == [None, None]


# -------------------------------------------------------------------------------- in the terminal

def test_a_group_is_shown_as_its_distinct_completions(capsys, monkeypatch):
    """At most four, the best and the worst among them, with how often each was sampled."""
    texts, encoding = ["b", "a", "b", "cc", "b", "d", "e", "f"], byte_encoding()
    rewards = torch.tensor([1., 0, 1, 2, 1, 0.5, 0.7, 3])
    ids = torch.tensor([list(b"?") + list(x.encode().ljust(2, b"\0")) for x in texts])
    mask = torch.tensor([[False, True, len(x) > 1] for x in texts])
    ids, mask, rewards = (torch.cat([x, x]) for x in (ids, mask, rewards[:, None]))
    batch = batch_of(mask, ids=ids, reward=rewards, adv=(rewards - 1).expand(16, 3), texts=["-"] * 8 + texts,
                     problems=[SimpleNamespace(prompt=x) for x in "-" * 8 + "?" * 8])
    monkeypatch.setenv("NO_COLOR", "1")
    report.print_group(batch, slice(8, 16), encoding)
    assert capsys.readouterr().out == ("    1x ?f   reward 3  advantage +2.00\n    1x ?cc   reward 2  advantage +1.00\n"
                                       "    1x ?d   reward 0.5  advantage -0.50\n    1x ?a   reward 0  advantage -1.00\n")
    report.print_group(batch, slice(8, 12), encoding)
    assert [line[4:9] for line in capsys.readouterr().out.splitlines()] == ["1x ?c", "2x ?b", "1x ?a"]
    batch.reward[10] = 0.25             # as one of the two that was cut off, or by a learned reward
    report.print_group(batch, slice(8, 12), encoding)
    assert [line[4:9] for line in capsys.readouterr().out.splitlines()] == ["1x ?c", "1x ?b", "1x ?b", "1x ?a"]
    batch.reward[10] = 1
    batch.problems[10] = SimpleNamespace(prompt="a" * 20 + "b" * 41)
    report.print_group(batch, slice(10, 11), encoding)
    assert capsys.readouterr().out.startswith(f"    1x ... {'b' * 40}b   reward")
    batch.problems[10] = SimpleNamespace(prompt="?")
    batch.adv = torch.arange(48.0).view(16, 3)          # of a step, or of a critic: tokens differ
    report.print_group(batch, slice(10, 12), encoding)
    assert capsys.readouterr().out == ("    1x ?cc   reward 2  advantage of the first token +34.00\n"
                                       "    1x ?b   reward 1  advantage +31.00\n")


@pytest.mark.slow
def test_a_group_is_shown_once_at_the_first_step_and_at_checkpoints(tmp_path, capsys):
    for steps, at in ((1, ["1"]), (4, ["1", "3", "4"])):
        run(tmp_path / str(steps), **TINY | dict(save_every=3, steps=steps))
        groups = re.findall(r"^    (\d+)x |^step (\d+)", capsys.readouterr().out, re.M)
        counts, step = {}, None
        for n, began in groups:         # the completions that are shown after each step's line
            step = began or step
            counts[step] = counts.get(step, 0) + int(n or 0)
        assert {step: n for step, n in counts.items() if n} == dict.fromkeys(at, 4)


def test_a_step_is_a_line_of_120_columns_at_most(capsys):
    stats = dict(reward=1.234567, accuracy=0.98765, length=351.23, kl=0.0123, entropy=1.2345, clip_share=0.1,
                 dead_groups=0.4375, seconds=12.345, finished=1.0)
    report.step_line(100, 500, [stats])
    line, = capsys.readouterr().out.splitlines()
    assert len(line) <= 120 and line.startswith("step 100/500  reward 1.235  accuracy 0.988  length 351.2  kl 0.012  "
                                                "entropy 1.234  dead_groups 0.44  ")


# ----------------------------------------------------------------------------------------- the page

def test_what_others_wrote_is_escaped():
    """No text in it ends the element that it stands in, and what is read back is what was written."""
    written = [{HOSTILE: [HOSTILE, 1.5, None, "😀\0"], "list": [1, True]}]
    text = report.page(written)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text)[1]
    assert json.loads(data) == written
    assert data.isascii() and "<" not in data


def test_what_json_lacks_is_null(tmp_path):
    """A browser would read none of a page with a NaN."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": NaN, "y": [Infinity, -Infinity, 1e300]}\n')
    run, = shown_data(report.write([tmp_path]))
    assert run["metrics"] == [{"step": 1, "x": None, "y": [None, None, 1e300]}]


def content(text):
    """The elements of a page that a browser would run or style, and its policy."""
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    styles = re.findall(r"<style>(.*?)</style>", text, re.S)
    return scripts, styles, re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]


def test_a_page_is_one_file_that_loads_nothing(made):
    text = (made.folder / "report.html").read_text()
    scripts, styles, policy = content(text)
    assert policy == ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                      "base-uri 'none'; form-action 'none'")
    assert len(scripts) == 2 and len(styles) == 1 and text.count("<script") == 3
    assert not re.search(r"\b(src|href)=|@import|url\(", text.split('<script id="data"')[0])
    own = (ROOT / "run/page/page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|fetch|XMLHttp|import\(|setTimeout", own)
    assert "Permission is hereby granted" in text and "uPlot (v1.6.32)" in text
    plot = (ROOT / "run/page/uPlot.iife.min.js").read_bytes()
    assert hashlib.sha256(plot).hexdigest() == UPLOT        # as it came, 1.6.32


UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"


def test_samples_are_thinned_evenly(tmp_path):
    """By whole steps, the last among them; a line that is being written is left out."""
    path, steps = tmp_path / "samples.jsonl", range(1, 101)
    (tmp_path / "metrics.jsonl").touch()
    for step in steps:
        for which in ("spread", "random"):
            files.append(path, {"step": step, "which": which, "text": "x" * 1000})
    size = path.stat().st_size
    whole = report.run_of(tmp_path, size)
    assert whole["samples"] == lines(path) and whole["steps"] == 100
    with open(path, "a") as f:
        f.write('{"step": 101, "whi')
    for share, kept in ((0.99, 50), (0.5, 34), (0.1, 10), (0.035, 4)):
        found = report.run_of(tmp_path, int(share * size))
        assert found["steps"] == 100 and len(found["samples"]) == 2 * kept and found["samples"][-1]["step"] == 100
    (tmp_path / "samples.jsonl").unlink()
    assert report.run_of(tmp_path, 10)["samples"] == []


def shown_data(path):
    """What a page holds."""
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text())[1])


def test_runs_are_put_beside_one_another(made, tmp_path, capsys):
    """In the first folder, or in --out's; each run's share of the bytes is the same."""
    copies = [tmp_path / name for name in "ab"]
    for where in copies:
        shutil.copytree(made.folder, where)
    (copies[1] / "run.json").unlink()
    (copies[1] / "samples.jsonl").unlink()
    before = (copies[0] / "report.html").read_bytes()
    grpo.main(["--report", *map(str, copies)])
    [head] = capsys.readouterr().out.splitlines()
    assert head == f"the report is in {copies[0] / 'comparison.html'}"
    assert (copies[0] / "report.html").read_bytes() == before
    one, other = shown_data(copies[0] / "comparison.html")
    assert (one["name"], other["name"]) == ("a", "b") and one["metrics"] == lines(made.folder / "metrics.jsonl")
    assert one["samples"] == made.lines and one["steps"] == 4 and other["samples"] == []
    assert one["about"]["config"]["group"] == 4 and other["about"] == {}
    grpo.main(["--report", *map(str, copies), "--out", str(tmp_path / "new")])
    assert len(shown_data(tmp_path / "new" / "comparison.html")) == 2
    assert len(shown_data(copies[1] / "report.html")) == 1          # its own, as it was


def test_a_run_is_named_by_its_folder_wherever_one_stands(made, monkeypatch):
    """Also as `.`; it has each line of its log, in the same order."""
    monkeypatch.chdir(made.folder)
    run, = shown_data(report.write(["."], ".."))
    assert (run["name"], run["path"]) == ("run", ".") and run["metrics"] == lines(made.folder / "metrics.jsonl")
    assert [m["step"] for m in run["metrics"]] == [0, 1, 2, 3, 4, 5]


def test_of_a_long_run_there_is_each_line(tmp_path):
    log = [{"step": step, "reward": step / 7} for step in range(2500)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in log))
    assert shown_data(report.write([tmp_path]))[0]["metrics"] == log


def test_a_page_that_cannot_be_written_is_one_line(made, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as e:
        grpo.main(["--report", str(made.folder), "--out", str(tmp_path / "file" / "x")])
    err = capsys.readouterr().err
    assert e.value.code == 2 and "Not a directory" in err and str(tmp_path / "file" / "x") in err and err.count("\n") == 1


def test_a_run_goes_on_without_its_page(tmp_path, capsys):
    """Above all if someone else writes it just then."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "report.html").mkdir()
    report.refresh(tmp_path)
    assert capsys.readouterr().out.startswith(f"note: no report: cannot write {tmp_path / 'report.html'}: ")


def test_each_run_has_its_share_of_the_bytes(made, tmp_path, monkeypatch):
    of_step = [sum(len(json.dumps(g)) + 1 for g in made.lines if g["step"] == step) for step in sorted({g["step"] for g in made.lines})]
    monkeypatch.setattr(report, "MOST", sum(of_step))
    for folders, whole in (([made.folder], True), ([made.folder] * 2, False)):
        for run in shown_data(report.write(folders, tmp_path)):
            assert (run["samples"] == made.lines) == whole and run["steps"] == len(of_step)


@pytest.mark.parametrize("damage, says", [
    (None, "no run in"), ("{\n", "is damaged"), ('{"step": 1}\n\0\0\n', "is damaged")])
def test_a_folder_that_is_no_runs_is_one_line(damage, says, tmp_path, capsys):
    if damage:
        (tmp_path / "metrics.jsonl").write_text(damage)
    with pytest.raises(SystemExit) as e:
        grpo.main(["--report", str(tmp_path)])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and not out and err.startswith("error: ") and says in err and err.count("\n") == 1
    with pytest.raises(UserError):
        report.write([tmp_path])


def test_every_statistic_has_a_meaning():
    script = (ROOT / "run/page/page.js").read_text()
    meaning = re.search(r"const MEANING = \{(.*?)^\};", script, re.M | re.S)[1]
    assert set(re.findall(r"^  (\w+): \"", meaning, re.M)) == data.STATISTICS - {"step", "greedy"}, \
        "MEANING in run/page/page.js and STATISTICS in data/__init__.py must have the same names"
