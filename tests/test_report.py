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
from conftest import ROOT, flags, tiny_model

import data
import grpo
from data import UserError
from data.tokenizer import byte_encoding, decode, pieces, step_tokens
from run import files, report, show

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


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    batch = SimpleNamespace(reward=torch.tensor([[1.], [1], [0], [2], [3], [1], [0], [0]]), ids=torch.zeros(8, 3))
    cfg = grpo.Config(group=2)
    assert report.widest(batch, 2) == slice(2, 4)          # of two equal ones the first
    at_random = {report.chosen(cfg, step, batch)["random"].start for step in range(40)}
    assert at_random == {0, 4, 6}
    assert report.chosen(cfg, 3, batch) == report.chosen(cfg, 3, batch)
    alone = SimpleNamespace(reward=batch.reward[:2], ids=batch.ids[:2])
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
    batch = SimpleNamespace(texts=["-"] * 8 + texts, problems=[SimpleNamespace(prompt="no")] * 8
                            + [SimpleNamespace(prompt="?")] * 8, reward=torch.cat([rewards, rewards])[:, None],
                            adv=(torch.cat([rewards, rewards]) - 1)[:, None].expand(16, 3), ids=torch.cat([ids, ids]),
                            mask=torch.cat([mask, mask]))
    monkeypatch.setenv("NO_COLOR", "1")
    show.group(batch, slice(8, 16), encoding)
    assert capsys.readouterr().out == ("    1x ?f   reward 3  advantage +2.00\n    1x ?cc   reward 2  advantage +1.00\n"
                                       "    1x ?d   reward 0.5  advantage -0.50\n    1x ?a   reward 0  advantage -1.00\n")
    show.group(batch, slice(8, 12), encoding)
    assert [line[4:9] for line in capsys.readouterr().out.splitlines()] == ["1x ?c", "2x ?b", "1x ?a"]
    batch.problems[10] = SimpleNamespace(prompt="a" * 20 + "b" * 41)
    show.group(batch, slice(10, 11), encoding)
    assert capsys.readouterr().out.startswith(f"    1x ... {'b' * 40}b   reward")
    batch.problems[10] = SimpleNamespace(prompt="?")
    batch.adv = torch.arange(48.0).view(16, 3)          # of a step, or of a critic: tokens differ
    show.group(batch, slice(10, 12), encoding)
    assert capsys.readouterr().out == ("    1x ?cc   reward 2  advantage of the first token +34.00\n"
                                       "    1x ?b   reward 1  advantage +31.00\n")


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
    show.step_line(100, 500, [stats])
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
    """By whole steps, the first and the last among them; a line that is being written is left out."""
    path, steps = tmp_path / "samples.jsonl", range(1, 101)
    for step in steps:
        for which in ("spread", "random"):
            files.append(path, {"step": step, "which": which, "text": "x" * 1000})
    size = path.stat().st_size
    assert report.thinned(path, size) == (lines(path), 100)
    with open(path, "a") as f:
        f.write('{"step": 101, "whi')
    for share in (0.99, 0.5, 0.1, 0.035):
        found, n = report.thinned(path, int(share * size))
        kept = sorted({x["step"] for x in found})
        gaps = {b - a for a, b in zip(kept, kept[1:])}
        assert n == 100 and kept[0] == 1 and kept[-1] == 100 and max(gaps) - min(gaps) <= 1
        assert share * 80 < len(kept) <= share * 100 and len(found) == 2 * len(kept)
    assert report.thinned(path, 10) == ([], 100) and report.thinned(tmp_path / "none", 10) == ([], 0)


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
    head, *said = capsys.readouterr().out.splitlines()
    assert head == f"the report is in {copies[0] / 'comparison.html'}"
    evaluated = [m for m in lines(made.folder / "metrics.jsonl") if "greedy" in m]
    assert said == [f"{where}  step {m['step']}  {show.percentages(m)}" for where in copies for m in (evaluated[0], evaluated[-1])]
    assert (copies[0] / "report.html").read_bytes() == before
    one, other = shown_data(copies[0] / "comparison.html")
    assert (one["name"], other["name"]) == ("a", "b") and one["metrics"] == lines(made.folder / "metrics.jsonl")
    assert one["samples"] == made.lines and one["steps"] == 4 and other["samples"] == []
    assert one["about"]["config"]["group"] == 4 and other["about"] == {}
    grpo.main(["--report", *map(str, copies), "--out", str(tmp_path / "new")])
    assert len(shown_data(tmp_path / "new" / "comparison.html")) == 2
    assert len(shown_data(copies[1] / "report.html")) == 1          # its own, as it was


@pytest.mark.parametrize("n, told", [(0, []), (1, [0]), (2, [0, 1]), (4, [0, 3])])
def test_the_first_and_the_last_evaluation_are_told(n, told, tmp_path, capsys):
    found = [{"step": 2 * i, **({"greedy": i / 10} if i % 2 == 0 else {})} for i in range(2 * n)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in found))
    report.print_report([tmp_path], tmp_path / "a" / "new")
    head, *said = capsys.readouterr().out.splitlines()
    assert head == f"the report is in {tmp_path / 'a' / 'new' / 'report.html'}"
    assert said == [f"{tmp_path}  step {4 * i}  greedy {2 * i / 10:.1%}" for i in told]


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


def test_steps_are_spread_evenly():
    assert [report.spread([*range(10)], n) for n in (0, 1, 2, 3, 10)] == [[], [0], [0, 9], [0, 4, 9], [*range(10)]]


def test_each_run_has_its_share_of_the_bytes(made, tmp_path, monkeypatch):
    of_step = [sum(len(json.dumps(g)) + 1 for g in made.lines if g["step"] == step) for step in sorted({g["step"] for g in made.lines})]
    monkeypatch.setattr(report, "MOST", sum(of_step))
    for folders, whole in (([made.folder], True), ([made.folder] * 2, False)):
        for run in shown_data(report.write(folders, tmp_path)):
            assert (run["samples"] == made.lines) == whole and run["steps"] == len(of_step)


@pytest.mark.parametrize("damage, says", [
    (None, "no run in"), ("{\n", "is not JSON"), ('{"step": 1}\n\0\0\n', "is not JSON")])
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


# ------------------------------------------------------------------------------------- in a browser

FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --window-size=1280,900").split()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("there is no chromium with a chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def invented(steps, texts, rows=16, groups=("spread", "random")):
    """Records of samples.jsonl, by `texts(step, which, row)`; the rewards go down from row to row, but in each
    third step the group at random is dead."""
    for step in steps:
        for which in groups:
            own = [texts(step, which, i) for i in range(rows)]
            dead = which == "random" and step % 3 == 0
            numbers = {name: [[round(at + 0.01 * (t % 7), 4) for t in range(len(text) + 1)] for text in own]
                       for name, at in (("logp", -0.5), ("new_logp", -0.4), ("ref_logp", -0.6), ("entropy", 0.3))}
            yield {"step": step, "which": which, "prompt": f"{which} {step}=", "completions": own,
                   "finished": [i > 0 for i in range(rows)], "rewards": [0.0 if dead else float(rows - i) for i in range(rows)],
                   "parts": {"correct": [1.0] * rows}, "tokens": [[*text, ""] for text in own],
                   "advantages": [[0.0 if dead else 1.5 - i] * (len(text) + 1) for i, text in enumerate(own)],
                   **numbers, "ends": [[2, len(text)] for text in own], "step_rewards": [[0.25, 0.75 - i] for i in range(rows)]
                   if not dead else [[0.5, 0.5]] * rows}


def folder_of(where, records, steps=4, **config):
    """A run's folder with some records, and its page."""
    where.mkdir()
    (where / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    for step in range(steps + 1):
        files.append(where / "metrics.jsonl", {"step": step} | (dict(reward=step / steps, accuracy=0.5, kl=0.01,
                      entropy=1.0, length=9.0, dead_groups=0.1, style=0.2) if step else {}) | (
                      {"greedy": step / 10, "pass@4": 0.7, "maj@2": 0.2, "pass@8": 0.9} if step % 2 == 0 else {}))
    (where / "run.json").write_text(json.dumps(dict(config=config, command=["grpo.py"], versions={})))
    return report.write([where])


@pytest.fixture
def opened(browser):
    """A function that opens a page: nothing may be said on its console, and nothing asked of a network."""
    def open_page(path, width=1280, scheme="light"):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                dict(features=[dict(name="prefers-color-scheme", value=scheme)]))
        browser.get(path.as_uri())
        return browser
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    yield open_page
    asked = [x["params"]["request"]["url"] for x in (json.loads(x["message"])["message"] for x in
             browser.get_log("performance")) if x["method"] == "Network.requestWillBeSent"]
    assert asked and all(x.startswith("file:///") and x.endswith(("/report.html", "/comparison.html")) for x in asked)
    assert browser.get_log("browser") == []


SETTLED = "setTimeout(arguments[0], 100)"       # what the browser does after an event is done
LOADED = """                                    // when the load event was done, in milliseconds; 0 before it is
const ended = () => performance.getEntriesByType('navigation')[0].loadEventEnd;
const wait = () => ended() ? arguments[0](ended()) : setTimeout(wait, 20);
wait()"""


def find(browser, css):
    return browser.find_elements("css selector", css)


def text_of(browser, css):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", css)


def choose(browser, name, value):
    """Set a control, as a person does."""
    browser.execute_script("const x = document.getElementById(arguments[0]); x.value = arguments[1];"
                           "x.dispatchEvent(new Event('input')); x.dispatchEvent(new Event('change'))", name, value)


def test_a_large_run_loads_in_two_seconds(opened, tmp_path):
    """200 steps, 2 groups, 16 completions of 50 tokens; the last step is shown."""
    path = folder_of(tmp_path / "run", [], 200)
    two = [json.dumps(x) for x in invented([1], lambda *at: "47*50=2000\n" * 4 + "12345")]
    (path.parent / "samples.jsonl").write_text("".join(
        line.replace(" 1, ", f" {step}, ", 1).replace(" 1=", f" {step}=") + "\n" for step in range(1, 201) for line in two))
    report.write([path.parent])
    assert path.stat().st_size > 10_000_000
    page = opened(path)
    assert 0 < page.execute_async_script(LOADED) < 2000
    assert text_of(page, "#at") == "200 (200 of 200)" and text_of(page, "pre.prompt") == "spread 200="
    assert len(find(page, ".card")) == 16 and len(find(page, ".tok")) == 16 * 50
    assert text_of(page, "#note") == ""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run of 4 steps, 3 rows a group."""
    records = invented(range(1, 5), lambda step, which, i: f"ab{step}\n{which}{i}", rows=3)
    return folder_of(tmp_path_factory.mktemp("page") / "small", records, group=3)


def test_the_slider_and_the_buttons_go_through_the_steps(opened, page):
    page = opened(page)
    step = find(page, "#step")[0]
    assert text_of(page, "pre.prompt") == "spread 4="
    step.send_keys("\ue012")                                # the left arrow
    assert text_of(page, "pre.prompt") == "spread 3=" and text_of(page, "#at") == "3 (3 of 4)"
    find(page, "#back")[0].click()
    assert text_of(page, "pre.prompt") == "spread 2="
    choose(page, "which", "random")
    assert text_of(page, "pre.prompt") == "random 2="
    find(page, "#on")[0].click()
    assert text_of(page, "pre.prompt") == "random 3=" and "a dead group" in text_of(page, "#group p")
    cards = [" ".join(card.text.split()) for card in find(page, ".card header")]
    assert cards[0].startswith("reward 0 correct 1 cut") and cards[1].startswith("reward 0 correct 1 finished")
    assert [x.text for x in find(page, ".card .text")] == [f"ab30.5↵\nrandom{i}(end)".replace("(end)", end) + "0.5"
            for i, end in enumerate(("·", "⟨end⟩", "⟨end⟩"))]


def test_replies_stand_between_the_tokens_and_are_none(opened, tmp_path):
    """Each before the token that was sampled next; a text is looked for in what the policy said."""
    one, = invented([1], lambda *at: "ab", rows=2, groups=("spread",))
    one |= {"completions": [["a", "<b>no</b>", "b"], ["ab"]], "replies": [[1], []]}
    page = opened(folder_of(tmp_path / "turns", [one], steps=1))
    assert [x.text for x in find(page, ".card .text")] == ["a<b>no</b>b·0.25", "ab⟨end⟩0.25"]
    assert [x.text for x in find(page, ".reply")] == ["<b>no</b>"] and len(find(page, ".tok")) == 6
    choose(page, "search", "no")
    assert find(page, ".card") == []
    choose(page, "search", "ab")
    assert len(find(page, ".card")) == 2 and [x.text for x in find(page, ".found")] == [*"abab"]


def rgba(page, token=0):
    """The background of a token: red, green, blue, alpha."""
    css = find(page, ".tok")[token].value_of_css_property("background-color")
    return [float(x) for x in re.findall(r"[\d.]+", css)]


def test_tokens_are_coloured_by_what_one_chooses(opened, page):
    """The first card has the advantage 1.5, the third -0.5; the scale goes to the ninth of ten values."""
    page, n = opened(page), 12
    high, low = rgba(page), rgba(page, 2 * n)
    assert high[2] > high[0] and low[0] > low[2] and high[3] == pytest.approx(3 * low[3], abs=0.02)
    assert text_of(page, "#legend").startswith("≤ -1.5≥ 1.5advantage: blue")
    seen = {tuple(high)}
    for name, at in (("log-ratio", 0.1), ("KL", None), ("entropy", 0.35), ("surprise", 0.5)):
        choose(page, "colour", name)
        seen.add(tuple(rgba(page)) + (name,))
        assert name in text_of(page, "#legend") and (at is None or f"≥ {at}" in text_of(page, "#legend"))
        assert rgba(page)[3] > 0.3
    choose(page, "colour", "entropy")
    assert rgba(page, 0)[3] < rgba(page, 6)[3]              # 0.30 and 0.36
    assert len(seen) == 5


def shown(x):
    """A number as the page writes it: four digits, integers in full."""
    if x is None or isinstance(x, str):
        return x or "–"
    if float(x).is_integer():
        return str(int(x))
    short = float(f"{x:.4g}")
    text = f"{short:.4g}" if abs(short) >= 1e-3 else f"{short:.3e}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text).replace("e-", "e-")


CARDS = """
return [...document.querySelectorAll(".card")].map(card => [
  [...card.querySelectorAll("header span")].map(x => x.textContent),
  [...card.querySelectorAll(".tok")].map(x => x.getAttribute("style"))])"""


def test_the_numbers_of_the_page_are_those_of_the_logs(opened, tmp_path):
    """Two runs with negative and tied values: the overview, the curves' last values, the order and the numbers of
    cards, colours of tokens, the scale, what is dead, and the filters, all computed anew from what was logged."""
    rng, folders = random.Random(0), []
    for name in ("a", "b"):
        records = list(invented(range(1, 5), lambda step, which, i: "".join(rng.choices("xyz\n", k=rng.randint(1, 6))), rows=5))
        for n, g in enumerate(records):
            sizes = [len(row) for row in g["tokens"]]
            g["rewards"] = [-0.5] * 5 if n % 3 == 2 else [round(rng.choice((-1.25, -0.5, 0.0, 2.0)), 4) for _ in range(5)]
            g["ends"], g["step_rewards"] = [[size - 1] for size in sizes], [[x] for x in g["rewards"]]
            g["parts"] = {"correct": [float(x > 0) for x in g["rewards"]], "price": [-0.0123 * size for size in sizes]}
            for key in ("advantages", "logp", "new_logp", "ref_logp", "entropy"):
                g[key] = [[round(rng.gauss(-0.2, 1), 4) for _ in range(size)] for size in sizes]
        where = tmp_path / name
        folder_of(where, records)
        (where / "metrics.jsonl").write_text("")
        for step in range(5):
            values = {"step": step, "greedy": round(rng.random(), 4), "pass@1": 0.25} | ({} if step == 0 else dict(
                reward=round(rng.gauss(-1, 1), 5), accuracy=rng.choice((0.0, 0.5)), length=step / 3, kl=-1e-4 * step, entropy=1.0))
            files.append(where / "metrics.jsonl", values)
        folders.append((where, records))
    page = opened(report.write([where for where, _ in folders]))
    for (where, _), row in zip(folders, find(page, "#overview tr")[1:]):
        logged = lines(where / "metrics.jsonl")
        pairs = [" → ".join(shown(m[key]) for m in (logged[1 if key in ("reward", "accuracy", "length") else 0], logged[-1]))
                 for key in ("reward", "accuracy", "length", "greedy", "pass@1")]
        assert [x.text for x in row.find_elements("css selector", "td")][2:] == ["4", *pairs]
    for chart in find(page, "#first .chart"):
        name, said = chart.get_attribute("data-name"), chart.find_element("css selector", ".lines").text
        for where, _ in folders:
            assert f"{where.name} {shown(lines(where / 'metrics.jsonl')[-1][name])}" in said, (name, said)
    for number, (where, records) in enumerate(folders):
        choose(page, "run", number)
        every = sorted(abs(x) for g in records for row in g["advantages"] for x in row)
        most = every[len(every) * 9 // 10]
        assert text_of(page, "#legend").startswith(f"≤ {shown(-most)}≥ {shown(most)}advantage")
        living = set()
        for g in records:
            choose(page, "step", g["step"] - 1)
            choose(page, "which", g["which"])
            assert text_of(page, "pre.prompt") == g["prompt"]
            dead = len({*g["rewards"]}) == 1
            living |= set() if dead else {g["step"]}
            about = text_of(page, "#group p")
            assert f"mean reward {shown(sum(g['rewards']) / 5)}" in about and ("a dead group" in about) is dead
            order = sorted(range(5), key=lambda i: -g["rewards"][i])        # ties in the order of the log
            for i, (head, styles) in zip(order, page.execute_script(CARDS), strict=True):
                assert head == [f"reward {shown(g['rewards'][i])}", f"correct {shown(g['parts']['correct'][i])}",
                                f"price {shown(g['parts']['price'][i])}", "finished" if g["finished"][i] else "cut",
                                f"{len(g['tokens'][i])} tokens"]
                for x, style in zip(g["advantages"][i], styles, strict=True):
                    share = re.search(r"var\((--\w+)\) / calc\(var\(--deep\) \* ([\d.]+)", style)
                    assert share[1] == ("--plus" if x > 0 else "--minus") and float(share[2]) == pytest.approx(
                        min(1, abs(x) / most), abs=6e-4)
        find(page, "#living")[0].click()
        assert text_of(page, "#at").endswith(f"of {len(living)})")
        find(page, "#living")[0].click()


def test_a_token_that_is_pointed_at_shows_its_numbers(opened, page):
    from selenium.webdriver import ActionChains
    page = opened(page)
    tip = find(page, "#tip")[0]
    assert not tip.is_displayed()
    page.execute_script("document.querySelector('.tok').scrollIntoView({block: 'center'})")
    page.execute_async_script(SETTLED)                      # a page that scrolls hides the numbers
    ActionChains(page).move_to_element(find(page, ".tok")[2]).perform()
    assert tip.is_displayed()
    rows = dict(row.text.split(" ", 1) for row in find(page, "#tip tr"))
    assert rows == {"token": '"4"', "place": "3 of 12", "advantage": "1.5", "log-ratio": "0.1", "KL": "0.004837",
                    "entropy": "0.32", "surprise": "0.48", "probability": "0.6188 → 0.6839"}
    ActionChains(page).move_to_element(find(page, "h2")[1]).perform()
    assert not tip.is_displayed()
    page.execute_script("document.querySelectorAll('.tok')[3].click()")     # a tap
    assert tip.is_displayed() and '"\\n"' in tip.text


def test_search_and_the_filter_of_dead_groups(opened, page):
    page = opened(page)
    find(page, "#search")[0].send_keys("B2\nSpread1")
    choose(page, "search", "spread1")
    assert len(find(page, ".card")) == 1 and text_of(page, "#at") == "4 (4 of 4)"
    assert "1 with “spread1”" in text_of(page, "#group p")
    assert "".join(x.text for x in find(page, ".tok.found")) == "spread1"
    choose(page, "search", "AB2")
    assert text_of(page, "#at") == "2 (1 of 1)" and len(find(page, ".card")) == 3
    choose(page, "search", "random 3=")                     # a prompt: all of its completions
    assert text_of(page, "pre.prompt") == "random 3=" and len(find(page, ".card")) == 3
    find(page, "#living")[0].click()
    assert text_of(page, "#note") == "No group matches." and not find(page, ".card")
    choose(page, "search", "")
    assert text_of(page, "pre.prompt") == "spread 4="
    choose(page, "search", "random")
    assert [choose(page, "step", i) or text_of(page, "pre.prompt") for i in range(3)] == ["random 1=", "random 2=", "random 4="]


def test_what_is_hostile_shows_as_text(opened, tmp_path):
    """Wherever it comes from: a folder's name, a completion, a prompt, a metric, a setting."""
    records = [x | dict(prompt=HOSTILE, parts={HOSTILE: [1.0, 2.0]}, ends=[[3], [3]], step_rewards=[[1], [1]])
               for x in invented([1], lambda *at: HOSTILE, rows=2)]
    where = tmp_path / '<img src=x onerror="hacked=1">'
    folder_of(where, records, task=HOSTILE)
    files.append(where / "metrics.jsonl", {"step": 5, HOSTILE: 1.0})
    page = opened(report.write([where]))
    page.execute_script("for (const x of document.querySelectorAll('details')) x.open = true")
    page.execute_async_script(SETTLED)
    assert text_of(page, "pre.prompt") == HOSTILE and text_of(page, "h1") == f"The run {where.name}"
    assert [x.get_attribute("textContent") for x in find(page, ".card .text")] == [
        HOSTILE + end for end in ("·", "⟨end⟩")]
    assert HOSTILE in [x.get_attribute("textContent") for x in find(page, ".chart h3")]
    assert json.dumps(HOSTILE, ensure_ascii=False) in text_of(page, "#settings")
    assert page.execute_script("return typeof hacked") == "undefined"
    assert not find(page, "img") and len(find(page, "script")) == 3


def test_curves_of_several_runs(opened, page, tmp_path):
    """Each in its colour, with the folder's name; what is not of first interest is folded away, and of
    pass@k and maj@k those between the least k and the largest are left out."""
    small = page.parent
    other = folder_of(tmp_path / "other", [], 8, group=5).parent
    page = opened(report.write([small, other], tmp_path))
    names = [x.text for x in find(page, "#first h3")]
    assert names == ["reward", "accuracy", "length", "kl", "entropy"] and not find(page, "#more .chart")
    find(page, "#more summary")[0].click()
    page.execute_async_script(SETTLED)
    assert [x.text for x in find(page, "#more h3")] == ["style", "dead_groups"]
    legend = [x.text for x in find(page, "#first .chart:nth-child(2) .lines > div")]
    assert legend == ["at the end: accuracy: small 0.5 other 0.5".replace(": accuracy", ":\naccuracy").replace("0.5 other", "0.5\nother")
                      .replace(": small", ":\nsmall"), *(x.replace(": ", ":\n", 1).replace(" other", "\nother") for x in (
                          "greedy: small 0.4 other 0.8", "pass@8: small 0.9 other 0.9"))]
    drawn = page.execute_script("""
        const c = document.querySelector("#first canvas"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        const seen = {};
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) seen[[d[i], d[i + 1], d[i + 2]]] = 1 + (seen[[d[i], d[i + 1], d[i + 2]]] || 0);
        return seen""")
    assert drawn.get("0,114,178", 0) > 50 and drawn.get("213,94,0", 0) > 50
    assert [x.text for x in find(page, "#overview td:first-child")] == ["small", "other"]
    find(page, "#settings summary")[0].click()
    assert find(page, "#settings tr.differs")[0].text.split() == ["group", "3", "5"]
    choose(page, "run", "1")
    assert text_of(page, "#note") == "No completions have been logged yet."


def test_a_metric_is_described_as_what_it_is(opened, tmp_path):
    """A fork's own was once said to be a component of the reward."""
    records = [x | dict(parts={"correct": [1.0, 0.0], "style": [0.2, 0.2]}) for x in invented([1], lambda *at: "ab", rows=2)]
    where = folder_of(tmp_path / "run", records).parent
    files.append(where / "metrics.jsonl", {"step": 5, "odd": 1.0})
    page = opened(report.write([where]))
    find(page, "#more summary")[0].click()
    page.execute_async_script(SETTLED)
    assert {box.get_attribute("data-name"): box.find_element("css selector", ".about").text for box in find(page, "#more .chart")} == {
        "style": "a component of the rule's reward, mean over completions",
        "odd": "not described: MEANING in run/page/page.js lacks it",
        "dead_groups": "share of groups whose rewards are all equal; with a group baseline they teach nothing"}


def test_the_page_says_what_was_left_out(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST", 30_000)
    path = folder_of(tmp_path / "run", invented(range(1, 31), lambda *at: "abc", rows=2))
    page, kept = opened(path), len({x["step"] for x in shown_data(path)[0]["samples"]})
    assert 5 < kept < 30 and text_of(page, "#note").startswith(f"This page has {kept} of 30 logged steps")


def test_a_phone_and_the_dark(opened, page):
    page = opened(page, 375, "dark")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 375
    left = {round(card.rect["x"]) for card in find(page, ".card")}
    assert len(left) == 1                                   # one below the other
    back, text = ([float(x) for x in re.findall(r"[\d.]+", find(page, "body")[0].value_of_css_property(name))][:3]
                  for name in ("background-color", "color"))
    assert max(back) < 50 and min(text) > 200
