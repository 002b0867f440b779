"""README and docs: links, flags, commands, quotes, tables, tasks."""
import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT, agent_of, metrics, tiny_model

import grpo
from data import arithmetic, gsm8k, guess, load_task
from data.tokenizer import byte_encoding
from model import ScalarHead
from run import config, pretrained, report, setup

README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
OWN_TASK = re.search(r"```python\n(.*?)```", README, re.S)[1]
OWN_TOOL = re.search(r"```python\n(import random.*?)```", DOCS["turns.md"], re.S)[1]
OWN_DATA = re.search(r"```python\n(.*?)```", DOCS["data.md"], re.S)[1]
FLAGS = {f.name for f in dataclasses.fields(grpo.Config)} | {*config.MODES, "help"}
OTHERS = {*("difficulty train test longest letters file exclude readme nproc_per_node seeds "
            "check trl tiny turns who ignore gpu index patch extra upstream dist local oneline "
            "no rows").split()}


def test_the_readme_is_short_and_has_its_two_commands():
    for command in ("python grpo.py --task arithmetic", "python -m pytest"):
        assert f"\npip install -r requirements.txt && {command}\n" in README
    lines = [line for line in README.splitlines() if not line.startswith("![")]
    assert len(lines) < 90 and all(len(line) <= 124 for line in lines)


def test_the_versions_of_the_packages():
    least, pin = (re.search(r"^torch[>=]=([\d.]+)$", (ROOT / file).read_text(), re.M)[1]
                  for file in ("requirements.txt", "tests/pins.txt"))
    assert f"`pip install torch=={pin} --index-url" in README
    assert f"torch {least} or newer" in README.replace("\n", " ")


def test_the_warm_start_in_data():
    """It is small, and says what the README shows."""
    where = Path(arithmetic.START)
    assert sum(path.stat().st_size for path in where.iterdir()) <= 8e6
    cfg = grpo.make_config(dtype="float32")
    agent = grpo.Agent(cfg, *setup.trained_model(cfg))
    assert f"# before RL\n{setup.ask(agent, '47*58=', grpo.sample)}\n$" in README


def test_the_published_defaults():
    """DeepSeekMath 4.2; PPO (1707.06347); TRL; GSPO 5.1."""
    cfg, constants = grpo.Config(), (grpo.GAMMA, grpo.VALUE_COEF, grpo.VALUE_CLIP, grpo.GRAD_CLIP)
    assert (cfg.prompts, cfg.group, cfg.max_new, cfg.lr, cfg.beta) == (16, 64, 1024, 1e-6, 0.04)
    assert (cfg.epochs, cfg.minibatches, cfg.temperature, gsm8k.DEFAULTS["lr"]) == (1, 1, 1, 2e-6)
    assert (cfg.max_turns, cfg.save_every, cfg.samples, cfg.eval_every) == (8, 10, 8, 0)
    assert (cfg.clip_low, cfg.clip_high, cfg.lam, constants) == (0.2, 0.2, 0.95, (1, 0.1, 0.2, 1))
    assert [grpo.ALGOS["gspo"][name] for name in ("clip_low", "clip_high")] == [3e-4, 4e-4]
    rloo = grpo.make_config(algo="rloo")
    assert (rloo.kl, rloo.estimator, rloo.loss_mean) == ("reward", "k1", "constant")
    assert (guess.DEFAULTS["lr"], guess.DEFAULTS["kl"]) == (3e-4, "none")       # by trials


def test_the_epsilon_of_adam():
    for critic, eps in ((None, 1e-8), (ScalarHead(32), 1e-5)):
        opt = grpo.new_optimizer(agent_of(grpo.Config(), critic=critic))
        assert opt.param_groups[0]["eps"] == eps


@pytest.mark.parametrize("name", DOCS)
def test_every_flag_exists(name):
    found = set(re.findall(r"(?<![\w-])--(\w+)", DOCS[name]))
    if name == "changing.md":                                       # those that recipes add
        diffs = [DOCS[name], *(path.read_text() for path in (ROOT / "docs").glob("*.diff"))]
        found -= set(re.findall(r"^\+    (\w+): .* = ", "".join(diffs), re.M))
    assert found <= FLAGS | OTHERS


@pytest.mark.parametrize("name", DOCS)
def test_every_link_leads_somewhere(name):
    where = (ROOT if name == "README.md" else ROOT / "docs")
    for path in re.findall(r"`(\w+/[\w/]+\.py)`", DOCS[name]):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)]+)\)", DOCS[name]):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            text = (where / file).read_bytes() if file else DOCS[name].encode()
            titles = re.findall(r"^#+ (.*)$", text.decode(errors="ignore").lower(), re.M)
            anchors = [re.sub(r"[^\w-]", "", title.replace(" ", "-")) for title in titles]
            assert not anchor or anchor in anchors, link


def test_every_command_is_understood(tmp_path, monkeypatch):
    """Those of plain blocks: flags are read, and give a Config; nothing runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").write_text(OWN_TASK)
    (tmp_path / "lookup.py").write_text(OWN_TOOL)
    (tmp_path / "mine.py").write_text(OWN_DATA)
    pages, found = "\n".join(DOCS.values()).replace("\\\n", ""), []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", pages, re.M | re.S):
        if not language:
            found += re.findall(r"^(?:\$ |pip .* && |for .*; do )?python ([\w/.]+\.py)(.*?)"
                                r"(?:; done)?(?:  +#.*)?$", block, re.M)
    assert len(found) >= 8
    for script, args in found:
        assert (ROOT / script).exists()
        if script == "grpo.py":
            mode, given = config.read(grpo.Config, "", shlex.split(args.replace("$s", "1")))
            given.pop("init", None) if mode.ask else None
            grpo.make_config(**given)


def test_line_counts():
    """A fork may add a few."""
    for name, lines in re.findall(r"`(\S+\.py)`, (\d+) lines", README):
        assert abs((ROOT / name).read_text().count("\n") - int(lines)) <= 15, name


def test_the_map_quotes_each_function():
    rows = re.findall(r"^\| .+ \| `([\w.]+)\.(\w+)`: `(.+)` \|$", DOCS["map.md"], re.M)
    assert len(rows) >= 27 and len(rows) == DOCS["map.md"].count("\n|") - 2
    for module, function, line in rows:
        source = inspect.getsource(getattr(importlib.import_module(module), function))
        assert line in source, f"{module}.{function}: {line}"


@pytest.mark.parametrize("folder, script", [
    ("cost", "beside_trl"), ("models", "sums"), ("models", "gsm8k"), ("cost", "speed")])
def test_a_table_is_that_of_its_result(folder, script, monkeypatch):
    """Each row, as the script would print it."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / folder))
    module, file = importlib.import_module(script), ROOT / "experiments" / folder / f"{script}.json"
    rows = [*module.rows(json.loads(file.read_text()))]
    assert rows and all(row in DOCS["measurements.md"] for row in rows)


def test_a_dry_run_of_the_study_on_gsm8k(tmp_path, monkeypatch):
    """A second run takes the first one's evaluation of the model as it is."""
    from experiments.models import gsm8k as study
    pretrained.save(tiny_model(block_size=512), tmp_path / "init", byte_encoding().files)
    rows = [json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(report, "evaluate", report.evaluate)
    files = [*[str(tmp_path / "rows.jsonl")] * 2, "--init", str(tmp_path / "init"), "--tiny"]
    runs = []
    for seed in "1", "2", "1":  # the last one has nothing left to do
        monkeypatch.setattr("sys.argv", ["gsm8k.py", *files, "--seed", seed])
        study.main()
        runs.append(study.of_run(*(tmp_path / "out" / f"gsm8k-tiny{x}" for x in (seed, "start"))))
    assert runs[0] == runs[2] and len(runs[0]["curve"]["seconds"]) == 2
    measured = [run["held out"]["sampled, finished"] for run in runs]
    assert measured[0]["before"] == measured[1]["before"] and runs[0]["problems"] == 4
    assert len([*study.rows(dict(enumerate(runs)))]) == 6
    runs[0]["curve"]["length"] = [1, 3]
    study.draw([axis := Mock()] * 3, {1: runs[0]})
    assert axis.plot.call_args[0][1] == [2]


def test_the_bugs_can_be_put_in(monkeypatch):
    """Each text of bugs.py is in its file, and what replaces it is Python."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "robustness"))
    bugs = [*importlib.import_module("bugs").bugs()]
    assert f"plants {len(bugs)} in copies" in DOCS["pitfalls.md"]
    for name, file, _, text, instead in bugs:
        source = (ROOT / file).read_text()
        assert text in source, f"update experiments/robustness/bugs.py: {name}"
        ast.parse(source.replace(text, instead, 1))


def test_the_tests_that_the_pitfalls_name():
    known = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", DOCS["pitfalls.md"])
    assert len(named) > 20 and [name for name in named if f"\ndef {name}(" not in known] == []


def test_the_tool_of_the_page(tmp_path):
    """Whoever looks up both letters is right, and a run looks up some."""
    (tmp_path / "lookup.py").write_text(OWN_TOOL)
    task = load_task(str(tmp_path / "lookup.py"))
    for problem in task.problems()[1]:
        a, b = (task.reply(problem, [f"?{key}"]) for key in problem.prompt[:-1])
        assert task.reward(problem, [a + b]) == {"correct": 1.0}
        assert task.reply(problem, [a + b]) is None
    small = "--n_layer 1 --warm_steps 80 --warm_lr 1e-2 --steps 1 --held_out 8 --samples 2".split()
    grpo.main(["--task", str(tmp_path / "lookup.py"), "--out", str(tmp_path / "out"), *small])
    assert metrics(tmp_path / "out")[-1]["turns"] > 1.3


def test_the_readmes_own_task_learns(tmp_path):
    """With a reward for the whole and with one for each step."""
    (tmp_path / "reverse.py").write_text(OWN_TASK)
    small = ("--n_layer 2 --n_embd 64 --letters 4 --warm_lr 5e-3 --steps 12 --lr 1e-3 "
             f"--held_out 100 --task {tmp_path / 'reverse.py'}").split()
    grpo.main([*small, "--warm_steps", "250", "--out", str(tmp_path / "outcome")])
    grpo.main([*small, *"--warm_steps 0 --supervision process --init".split(),
               str(tmp_path / "outcome" / "warm_start"), "--out", str(tmp_path / "process")])
    for out in ("outcome", "process"):
        first, *_, last = metrics(tmp_path / out)
        assert last["pass@1"] > first["pass@1"] + 0.05


def test_every_variant_has_a_row():
    """With its paper; and the commands that the page has can run."""
    variants, settings = DOCS["variants.md"].split("Others are settings")
    rows = re.findall(r"^\| (`\w+`.*?) \| .+ \|$", variants.split("## The formulas")[1], re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    files = (ROOT / "experiments" / "variants").glob("*.py")
    assert sorted(named) == sorted(path.stem for path in files)
    assert all(re.search(r"\d{4}\.\d{5}|20\d\d", row) for row in rows)
    found = re.findall(r"\| `(--.+?)` \|$", settings, re.M)
    assert len(found) >= 8
    for command in found:
        grpo.make_config(**config.read(grpo.Config, "", shlex.split(command))[1])
