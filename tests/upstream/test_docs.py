"""The README and the docs: what they quote is there, what they claim was measured."""
import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, records

import data
import grpo
from data import arithmetic, gsm8k, load_task
from model import GPT, GPTConfig
from run import config, dist, preflight, pretrained, warm_start

README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
MEASURED = DOCS["measurements.md"]
OWN = {"difficulty", "train", "test", "longest", "letters"}         # of the tasks
FLAGS = {f.name for f in dataclasses.fields(grpo.Config)} | {*config.MODES, "help", *OWN}


def test_the_readme_is_short_and_has_its_two_commands():
    assert len(README.splitlines()) <= 90
    assert "\npip install -r requirements.txt && python grpo.py --task arithmetic\n" in README
    assert "\npip install -r requirements.txt && python -m pytest\n" in README
    assert all(len(line) <= 124 for line in README.splitlines() if not line.startswith("!["))


def test_the_versions_of_the_packages():
    """The README's torch is one of the pins, which are no older than what is required; both name the same packages."""
    required, pins = (dict(re.findall(rf"^([\w-]+){sign}([\d.]+)$", (ROOT / name).read_text(), re.M))
                      for sign, name in ((">=", "requirements.txt"), ("==", "tests/pins.txt")))
    assert [*required] == [*pins] and "torch" in pins

    def numbers(version):
        return [int(n) for n in version.split(".")]
    assert all(numbers(required[name]) <= numbers(pins[name]) for name in required)
    assert f"`pip install torch=={pins['torch']} --index-url" in README
    assert f"torch {required['torch']} or newer" in README.replace("\n", " ")


def test_the_measurements_are_short():
    """In words outside code, tables and what is folded."""
    text = re.sub(r"<details>.*?</details>|^```.*?^```|^(?:\||!\[).*?$", "", MEASURED, flags=re.M | re.S)
    assert len(text.split()) <= 2500


def test_the_steps_of_the_main_job():
    steps, group, prompts = (arithmetic.DEFAULTS[name] for name in ("steps", "group", "prompts"))
    said = f"Each of {steps} steps samples {group} completions for each of {prompts} problems"
    assert said in " ".join(README.split()) and f"# after {steps} steps\n" in README


def test_the_warm_start_in_data():
    """It is small, what today's code would start from, what its note says, and what the README shows."""
    where, cfg = warm_start.SHIPPED, grpo.make_config(device="cpu", dtype="float32", held_out=60, samples=4)
    assert sum(path.stat().st_size for path in where.iterdir()) <= 8e6 and cfg.init == str(where)
    task = data.load_task("arithmetic")
    assert warm_start.checked(cfg, task, task.problems(**cfg.task_args)[0]) == cfg
    note = warm_start.read_note(where)
    assert note["command"] == "python grpo.py --task arithmetic --warm_steps 1500 --steps 0" and note["settings"]["seed"] == 1
    assert note["evaluation"]["pass@1"] <= 0.5
    agent = grpo.Agent(cfg, task, *pretrained.trained_model(cfg))
    found = grpo.evaluate(agent, preflight.problems_of(cfg, task)[1])
    for name in ("greedy", "pass@1", "pass@4"):
        assert found[name] == pytest.approx(note["evaluation"][name], abs=0.15)
    said = grpo.ask(agent, "47*58=")
    assert f'$ python grpo.py --ask "47*58=" --init data/warm_start                # before RL\n{said}\n$' in README


@pytest.mark.parametrize("name", DOCS)
def test_every_flag_exists(name):
    scripts = {"readme", "nproc_per_node", "seeds", "rows", "check", "trl", "tiny", "untrained", "turns", "who", "ignore",
               "gpu", "index", "patch", "extra", "upstream", "dist", "local", "sample"}    # of experiments/, torchrun, pytest, pip
    if name == "changing.md":                                       # and those that recipes add
        scripts |= set(re.findall(r"^\+    (\w+): .* = ", DOCS[name], re.M))
    assert set(re.findall(r"(?<![\w-])--(\w+)", DOCS[name])) <= FLAGS | scripts


@pytest.mark.parametrize("name", DOCS)
def test_every_link_leads_somewhere(name):
    where = (ROOT if name == "README.md" else ROOT / "docs")
    for link in re.findall(r"\]\(([^)]+)\)", DOCS[name]):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            text = (where / file).read_bytes() if file else DOCS[name].encode()
            titles = re.findall(r"^#+ (.*)$", text.decode(errors="ignore"), re.M)
            assert not anchor or anchor in [t.lower().replace(" ", "-") for t in titles], link


def commands(name):
    """The commands of a page's plain blocks that start a script of the project."""
    for block in re.findall(r"^```\n(.*?)^```", DOCS[name], re.M | re.S):
        for line in block.splitlines():
            line = re.sub(r"^\$ |^pip install .* && |^for .*; do ", "", line.split("  #")[0])
            if line.startswith("python ") and "-m pytest" not in line:
                yield line.split("; done")[0].replace("$s", "1")


def test_every_command_is_understood(tmp_path, monkeypatch):
    """Its flags are read, and give a Config; nothing runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").write_text(own_task())
    (tmp_path / "lookup.py").write_text(own_tool())
    found = [shlex.split(line) for name in DOCS for line in commands(name)]
    assert len(found) >= 11
    for _, script, *args in found:
        if script == "grpo.py":
            mode, given = config.read(grpo.Config, "", args)
            given.pop("init", None) if mode.ask else None
            grpo.make_config(**given)
        else:
            assert (ROOT / script).exists()


def test_line_counts():
    sources = [ROOT / f"{name}.py" for name in ("grpo", "reward", "model")] + [
        *(ROOT / "run").glob("*.py"), *(ROOT / "data" / f"{n}.py" for n in ("__init__", "answers", "bpe", "chat", "tokenizer", "turns", "arithmetic"))]
    lines = [len(path.read_text().splitlines()) for path in sources]     # a fork may add a few
    one, all_of_it = re.search(r"lines to read \| (\d+) \(([\d,]+)\)", MEASURED).groups()
    assert abs(lines[0] - int(one)) <= 15 and f"- `grpo.py`, {one} lines" in README
    assert abs(sum(lines) - int(all_of_it.replace(",", ""))) <= 60
    assert abs(lines[2] - int(re.search(r"^- `model.py`, (\d+) lines", README, re.M)[1])) <= 15


def test_where_a_test_belongs():
    """docs/changing.md names tests that there are, and no file of tests/ is missing."""
    page = DOCS["changing.md"]
    rows = re.findall(r"^\| .* \| `((?:extra/)?test_\w+\.py)::(\w+)` \|$", page, re.M)
    assert len(rows) >= 20
    for where, test in rows:
        assert f"def {test}(" in (ROOT / "tests" / where).read_text(), test
    places = {*re.findall(r"`(test_\w+\.py)[`:]", page)}
    known = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    assert known - {"test_layout.py", "test_oracle.py"} == places


def test_the_map_quotes_each_function():
    """By function, not by line number: two lines more at the top of a file change nothing."""
    rows = re.findall(r"^\| .*? \| `([\w.]+)\.(\w+)` \| `(.+?)` \|", DOCS["map.md"], re.M)
    assert len(rows) >= 27 and len(rows) == DOCS["map.md"].count("\n|") - 2
    for module, function, line in rows:
        source = inspect.getsource(getattr(importlib.import_module(module), function))
        assert line.replace("\\|", "|") in source, f"{module}.{function}: {line}"


def test_messages_that_troubleshooting_quotes():
    text = DOCS["troubleshooting.md"]
    sources = "".join(path.read_text() for path in (ROOT / "run").glob("*.py"))
    for message in re.findall(r'^## "(.+)"$', text, re.M):
        assert message in sources
    for name in re.findall(r"`(dead_groups|grad_norm|kl|accuracy|finished|mismatch|clip_share|entropy)`", text):
        assert name in data.STATISTICS


# ---------------------------------------------------------------------------- the result files

@pytest.fixture
def results(monkeypatch):
    for folder in ("studies", "models", "cost", "robustness"):
        monkeypatch.syspath_prepend(str(ROOT / "experiments" / folder))
    return lambda name: json.loads((ROOT / "experiments" / f"{name}.json").read_text())


def test_the_five_seeds(results):
    import seeds
    table = results("studies/seeds")
    assert table["seeds"] == 5 and all(line in MEASURED for line in seeds.rows(table))
    before, after = (table["pass@1"][when]["median"] for when in ("before", "after"))
    assert f"[{before:.0%} of samples are right before RL, and {after:.0%} after]" in README
    assert table["pass@1"]["before"]["most"] < 0.5 and table["pass@1"]["after"]["least"] > 0.95
    assert f"was {table['mismatch']:.1e}".replace("e-0", "e-") in MEASURED.replace("\n", " ")


def test_three_seeds_in_bfloat16(results):
    table = results("studies/bfloat16/seeds")
    before, after = ("{median:.1%} ({least:.1%} to {most:.1%})".format(**table["pass@1"][when]) for when in ("before", "after"))
    assert table["seeds"] == 3 and f"| `--dtype bfloat16`, three seeds | {before} | {after} |" in MEASURED
    assert table["pass@1"]["after"]["least"] > 0.95 and table["greedy"]["after"]["least"] > 0.97


def test_the_table_of_sums(results):
    """And that all seeds of the real model reach what is claimed."""
    import sums
    table = results("models/sums")
    rows = list(sums.rows(table))
    assert all(row in MEASURED for row in rows)
    before, after = (statistics.median(run[when]["pass@1"] for run in table["runs"].values()) for when in ("before", "after"))
    assert f"from {before:.0%} to {after:.0%}." in README
    assert len(table["runs"]) == 3
    for run in table["runs"].values():
        assert run["before"]["pass@1"] < 0.05 and run["after"]["pass@1"] >= 0.75 and run["seconds"] < 30 * 60
        assert abs(run["greedy by transformers"] - run["after"]["greedy"]) < 1e-6
    kl = sorted(run["kl"] for run in table["runs"].values())
    assert f"is {kl[0]:.2f} to {kl[-1]:.2f} nats" in MEASURED.replace("\n", " ")


def test_the_table_of_countdown(results):
    """All seeds learn from a supervised start what the model could not begin with."""
    import countdown
    table = results("models/countdown")
    assert all(row in MEASURED for row in countdown.rows(table)) and len(table["runs"]) == 3
    assert table["untrained"]["pass@8"] == 0
    for run in table["runs"].values():
        assert run["after"]["pass@1"] - run["before"]["pass@1"] > 0.15 and len(run["curve"]["accuracy"]) == 24
        assert run["after"]["pass@8"] < run["before"]["pass@8"]


def test_the_table_of_gsm8k(results):
    import gsm8k as script
    table = results("models/gsm8k")
    assert all(row in MEASURED for row in script.table(table)) and table["1"]["steps"] == 202


def test_speeds_beside_trl(results):
    import speed
    found = results("cost/speed")
    assert all(row in MEASURED for row in speed.rows(found)) and set(found["sizes"]) == {"arithmetic-512", "arithmetic-64", "smollm2"}
    for size, who in found["sizes"].items():
        trl = min(who[name]["seconds"] for name in ("TRL", "TRL in parts") if name in who)
        assert who["ours"]["seconds"] < 0.5 * trl
        assert size != "arithmetic-512" or who["ours bfloat16"]["seconds"] < 0.4 * trl
    small = found["sizes"]["smollm2"]
    assert small["ours bfloat16"]["seconds"] / small["ours"]["seconds"] == pytest.approx(0.6, abs=0.05)
    ratios = [who["ours"]["seconds"] / min(who[name]["seconds"] for name in ("TRL", "TRL in parts") if name in who)
              for who in found["sizes"].values()]
    assert 1 / 5 <= min(ratios) < 1 / 4 and 0.3 < max(ratios) <= 0.35 and "a fifth to a third of TRL's time" in README
    half, whole = (found["sizes"]["arithmetic-512"][name]["floors"]["gflops"] for name in ("ours bfloat16", "ours"))
    assert f"products are {half / whole:.1f} times as fast" in MEASURED


def of_gsm8k(card, monkeypatch, **how):
    """The defaults of gsm8k in bfloat16, as on a GPU of so many bytes."""
    monkeypatch.setattr(preflight, "most_logits", lambda device: card // 128)
    return grpo.Config(**gsm8k.DEFAULTS, micro_tokens=2048, dtype="bfloat16", device="cpu", cache="static", warm_steps=0, **how)


def test_what_fits_on_a_gpu(monkeypatch):
    """Qwen2.5's shapes with the defaults of gsm8k and --micro_tokens 2048, on cards of 80 GB."""
    shapes = {"0.5": (24, 14, 2, 896, 4864), "1.5": (28, 12, 2, 1536, 8960), "3": (36, 16, 2, 2048, 11008),
              "7": (28, 28, 4, 3584, 18944)}
    needs = {}
    for name, shape in shapes.items():
        names = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_inner")
        with torch.device("meta"):
            gpt = GPT(GPTConfig(**dict(zip(names, shape)), vocab_size=151936 + 128 * (name == "7"), bias="qkv",
                                block_size=32768, tied=name != "7"))
        for ranks, how in ((1, {}), (1, dict(recompute=True)), (2, dict(shard=True)), (8, dict(shard=True))):
            monkeypatch.setattr(dist, "rank", lambda: 0)
            monkeypatch.setattr(dist, "ranks", lambda: ranks)
            cfg = of_gsm8k(80 * 10 ** 9, monkeypatch, **how)
            needs[name, ranks, *how] = preflight.memory(gpt, cfg, 300) / 1e9
        cells = [f"{x:.1f}" for (n, *_), x in needs.items() if n == name]
        assert f"| {name} billion | {' | '.join(cells)} |" in MEASURED
    assert needs["1.5", 1] < 80 < needs["3", 1] and needs["3", 1, "recompute"] < 80      # as the README says


def test_the_memory_of_half_a_billion(monkeypatch):
    """Qwen2.5-0.5B's shape with the defaults of gsm8k, --micro_tokens 2048 and prompts of 300 tokens, on a card of 24 GB."""
    model = pretrained.of_config(dict(
        model_type="qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, intermediate_size=4864, vocab_size=151936, rms_norm_eps=1e-6,
        max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=1e6, hidden_act="silu"))
    assert sum(p.numel() for p in model.parameters()) == 494_032_768
    cfg, N, V = of_gsm8k(24 * 10 ** 9, monkeypatch), 494_032_768, 151936
    rows, copied = cfg.prompts * cfg.group, 2 * N + 4 * V * 896
    want = {"weights, and the two moments of Adam": 12 * N, "reference": copied, "copy to sample from, in bfloat16 or with `--shard`": copied,
            "keys and values": rows * (300 + cfg.max_new) * 24 * 2 * 2 * 64 * 2, "update: gradients": 4 * N,
            "update: activations": 2048 * 24 * (28 * 896 + 8 * 4864), "update: logits": 12 * (24 * 10 ** 9 // 128),
            "or rollout: logits of a token": 24 * rows * V}
    for name, size in want.items():
        assert f"| {name} | {size / 1e9:.1f} |" in MEASURED, (name, size)
    need = sum(size for name, size in want.items() if not name.startswith("or "))
    assert need == preflight.memory(model, cfg, 300) < 0.8 * 24e9 and f"| together, with an update | {need / 1e9:.1f} |" in MEASURED


def test_memory_of_logits_and_of_ranks(results):
    memory = results("cost/memory")
    for dtype, most in (("float32", 0.7), ("bfloat16", 0.6)):
        share = memory[f"a rank, {dtype}"]["share"]
        assert share <= most and f"--shard`, {dtype} | 100% | {share:.0%} of the memory |" in MEASURED
    assert f"| {memory['whole'] / 1e9:.1f} GB | {memory['parts'] / 1e9:.1f} GB |" in MEASURED
    assert memory["share"] < 1 / 3


def test_all_bugs_put_in_were_caught(results):
    import bugs
    rows = (ROOT / "experiments" / "robustness" / "bugs.md").read_text().splitlines()
    rows = [row for row in rows if row.startswith("| ")][1:]
    assert [row.split(" | ")[0][2:] for row in rows] == [m[0] for m in bugs.BUGS]
    assert not any("**none**" in row for row in rows)
    for name, file, text, instead, _ in bugs.BUGS:
        source = (ROOT / file).read_text()
        assert text in source, f"update experiments/robustness/bugs.py: {name}: the quoted text is no longer in {file}"
        ast.parse(source.replace(text, instead, 1))     # else the bug would be caught by any test, or stop the script


def test_scripts_leave_the_readmes_results_alone(results, tmp_path):
    """Without --readme a study of one's own runs is written where one says."""
    before = {path: path.read_bytes() for path in (ROOT / "experiments").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    measured = {"greedy": 0.5, "pass@1": 0.4, "pass@8": 0.9, "maj@8": 0.5}
    run = [{"step": 0, **measured}, {"step": 1, "length": 3.0, "seconds": 1.0, "mismatch": 0.0, **measured}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run))
    subprocess.run([sys.executable, ROOT / "experiments" / "studies" / "seeds.py", tmp_path, "--out", tmp_path / "x"],
                   check=True, capture_output=True)
    assert json.loads((tmp_path / "x" / "seeds.json").read_text())["seeds"] == 1
    after = {path: path.read_bytes() for path in (ROOT / "experiments").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert before == after


# --------------------------------------------------------------------------- the help, the task

def test_the_help_is_grouped_and_whole(capsys):
    with pytest.raises(SystemExit) as e:
        grpo.main(["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0
    groups = [line[:-1] for line in out[out.index("\noptions:\n"):].splitlines() if re.fullmatch(r"\S.*:", line)]
    assert groups[0] == "options" and groups[1] == "instead of a new run"
    assert [g.split(":")[0].split(",")[0] for g in groups[2:]] == [
        "basics", "prompts and sampling", "evaluation and checkpoints", "reward", "advantage", "loss", "update", "new model and warm start",
        "machine", "--task arithmetic"]
    entries = dict(re.findall(r"^  --(\w+),? (.*?)(?=^  -|^\S|\Z)", out, re.M | re.S))
    assert "task_args" not in entries           # the flags of the task
    for f in [f for f in dataclasses.fields(grpo.Config) if f.name != "task_args"]:
        text = " ".join(entries[f.name].split())
        assert f.default == "" or text.endswith(f"[{f.default}]"), text         # the default
        assert re.search(r"[^.]( \[|$)", text) and len(text) > 8, text           # a phrase
        for choice in getattr(f.type, "__args__", ()):
            assert choice in text
    assert max(map(len, out.splitlines())) <= 100


def own_task():
    return re.search(r"```python\n(.*?)```", README, re.S)[1]


def own_tool():
    return re.search(r"```python\n(import random.*?)```", DOCS["turns.md"], re.S)[1]


def test_the_tool_of_the_page(tmp_path):
    """docs/turns.md: whoever looks up both letters is right, and a run looks up some. What is learned takes longer."""
    (tmp_path / "lookup.py").write_text(own_tool())
    task = load_task(str(tmp_path / "lookup.py"))
    for problem in task.problems()[1]:
        turns = []
        for key in problem.prompt[:-1]:
            turns += ["?" + key, task.reply(problem, [*turns, "?" + key])]
        turns.append("".join(turns[1::2]))
        assert task.reply(problem, turns) is None and task.reward(problem, turns) == {"correct": 1.0}
    assert task.reply(problem, ["?z"]) == "unknown"
    grpo.main(["--task", str(tmp_path / "lookup.py"), "--out", str(tmp_path / "out"), *"--n_layer 1 --warm_steps 80 "
               "--warm_lr 1e-2 --steps 1 --held_out 8 --samples 2".split()])
    lines = records(tmp_path / "out" / "metrics.jsonl")
    assert lines[-1]["turns"] > 1.3


def test_the_readmes_own_task_learns(tmp_path):
    """From one warm start, with a reward for the whole and with one for each step. The README's figures take longer."""
    (tmp_path / "reverse.py").write_text(own_task())
    small = ("--n_layer 2 --n_embd 64 --letters 4 --warm_lr 5e-3 --steps 12 --lr 1e-3 "
             f"--held_out 100 --task {tmp_path / 'reverse.py'}").split()
    grpo.main([*small, "--warm_steps", "250", "--out", str(tmp_path / "outcome")])
    grpo.main([*small, "--warm_steps", "0", "--init", str(tmp_path / "outcome" / "warm_start"), "--supervision", "process",
               "--out", str(tmp_path / "process")])
    for supervision in ("outcome", "process"):
        lines = records(tmp_path / supervision / "metrics.jsonl")
        assert lines[-1]["pass@1"] > lines[0]["pass@1"] + 0.05


def test_every_change_that_no_test_sees_has_a_reason():
    """And the numbers of the page are those in the docs."""
    page = (ROOT / "experiments" / "robustness" / "mutations.md").read_text()
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| `")]
    files, missed = ([row for row in rows if len(row) == n] for n in (5, 4))
    total = next(row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith("| all |"))
    changes, caught, same = map(int, total[1:4])
    assert [sum(int(row[i]) for row in files) for i in (1, 2, 3)] == [changes, caught, same]
    assert changes - caught == len(missed) == same and total[4] == "100.0%"
    assert all(len(row[3]) > 10 and not row[3].startswith("?") for row in missed)
    assert f"\n| {changes:,} | {caught:,} | {same} |\n" in MEASURED


def test_every_variant_has_a_row():
    """With its paper; and the commands that the page has can run."""
    page = DOCS["variants.md"]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| .+ \|$", page.split("Others are settings")[0], re.M)
    named = [name for names, _ in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(named) == sorted(path.stem for path in (ROOT / "experiments" / "variants").glob("*.py")) and len(named) == len({*named})
    assert all(re.search(r"\d{4}\.\d{5}|20\d\d|DAPO", paper) for _, paper in rows)
    commands = re.findall(r"\| `(--.+?)` \|$", page.split("Others are settings")[1].split("Not here")[0], re.M)
    assert len(commands) >= 8
    for command in commands:
        mode, given = config.read(grpo.Config, "", shlex.split(command))
        grpo.make_config(**given)
