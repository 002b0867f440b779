"""The README and the docs: links, flags, commands, quoted lines, tables of results, tasks."""
import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex

import pytest
from conftest import ROOT, records

import data
import grpo
from data import load_task
from run import config, pretrained, setup

README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
OWN = {"difficulty", "train", "test", "longest", "letters"}         # of the tasks
FLAGS = {f.name for f in dataclasses.fields(grpo.Config)} | {*config.MODES, "help", *OWN}


def test_the_readme_is_short_and_has_its_two_commands():
    assert len(README.splitlines()) <= 90
    assert "\npip install -r requirements.txt && python grpo.py --task arithmetic\n" in README
    assert "\npip install -r requirements.txt && python -m pytest\n" in README
    assert all(len(line) <= 124 for line in README.splitlines() if not line.startswith("!["))


def test_the_versions_of_the_packages():
    """The README's torch is one of the pins, which are no older than what is required."""
    def named(file, sign):
        return dict(re.findall(rf"^([\w-]+){sign}([\d.]+)$", (ROOT / file).read_text(), re.M))
    required, pins = named("requirements.txt", ">="), named("tests/pins.txt", "==")
    assert [*required] == [*pins] and "torch" in pins

    def numbers(version):
        return [int(n) for n in version.split(".")]
    assert all(numbers(required[name]) <= numbers(pins[name]) for name in required)
    assert f"`pip install torch=={pins['torch']} --index-url" in README
    assert f"torch {required['torch']} or newer" in README.replace("\n", " ")


def test_the_warm_start_in_data():
    """It is small, what today's code would start from, and as good as its note says."""
    where = setup.SHIPPED
    cfg = grpo.make_config(device="cpu", dtype="float32", held_out=60, samples=4)
    assert sum(path.stat().st_size for path in where.iterdir()) <= 8e6 and cfg.init == str(where)
    note, task = json.loads((where / "warm_start.json").read_text()), data.load_task("arithmetic")
    agent = grpo.Agent(cfg, task, *pretrained.trained_model(cfg))
    found = grpo.evaluate(agent, config.problems_of(task, cfg)[1][:60])
    for name in ("greedy", "pass@1", "pass@4"):
        assert found[name] == pytest.approx(note["evaluation"][name], abs=0.15)
    said = grpo.ask(agent, "47*58=")
    assert f"# before RL\n{said}\n$" in README


@pytest.mark.parametrize("name", DOCS)
def test_every_flag_exists(name):
    # of experiments/, torchrun, pytest, pip, git
    scripts = {*("readme nproc_per_node seeds check trl tiny turns who ignore gpu index patch extra "
                 "upstream dist local oneline").split()}
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
        for line in block.replace("\\\n", "").splitlines():
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
    for name, said in re.findall(r"^- `([\w/.]+\.py)`, (\d+) lines", README, re.M):
        lines = len((ROOT / name).read_text().splitlines())
        assert abs(lines - int(said)) <= 15, name               # a fork may add a few


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


@pytest.mark.parametrize("folder, script, result", [
    ("studies", "seeds", "seeds"), ("models", "sums", "sums"), ("models", "gsm8k", "gsm8k"),
    ("cost", "speed", "speed")])
def test_a_table_is_that_of_its_result(folder, script, result, monkeypatch):
    """Each row, as the script would print it."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / folder))
    module, file = importlib.import_module(script), ROOT / "experiments" / folder / f"{result}.json"
    rows = [*module.rows(json.loads(file.read_text()))]
    assert rows and all(row in DOCS["measurements.md"] for row in rows)


def test_the_bugs_can_be_put_in(monkeypatch):
    """Each text of robustness/bugs.py is in its file, and what replaces it is Python."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "robustness"))
    for name, file, _, text, instead in importlib.import_module("bugs").bugs():
        source = (ROOT / file).read_text()
        assert text in source, f"update experiments/robustness/bugs.py: {name}"
        ast.parse(source.replace(text, instead, 1))


# ------------------------------------------------------------------------------- tasks on a page

def own_task():
    return re.search(r"```python\n(.*?)```", README, re.S)[1]


def own_tool():
    return re.search(r"```python\n(import random.*?)```", DOCS["turns.md"], re.S)[1]


def test_the_tool_of_the_page(tmp_path):
    """docs/turns.md: whoever looks up both letters is right, and a run looks up some."""
    (tmp_path / "lookup.py").write_text(own_tool())
    task = load_task(str(tmp_path / "lookup.py"))
    for problem in task.problems()[1]:
        turns = []
        for key in problem.prompt[:-1]:
            turns += ["?" + key, task.reply(problem, [*turns, "?" + key])]
        turns.append("".join(turns[1::2]))
        assert task.reply(problem, turns) is None
        assert task.reward(problem, turns) == {"correct": 1.0}
    assert task.reply(problem, ["?z"]) == "unknown"
    small = "--n_layer 1 --warm_steps 80 --warm_lr 1e-2 --steps 1 --held_out 8 --samples 2".split()
    grpo.main(["--task", str(tmp_path / "lookup.py"), "--out", str(tmp_path / "out"), *small])
    lines = records(tmp_path / "out" / "metrics.jsonl")
    assert lines[-1]["turns"] > 1.3


def test_the_readmes_own_task_learns(tmp_path):
    """From one warm start, with a reward for the whole and with one for each step."""
    (tmp_path / "reverse.py").write_text(own_task())
    small = ("--n_layer 2 --n_embd 64 --letters 4 --warm_lr 5e-3 --steps 12 --lr 1e-3 "
             f"--held_out 100 --task {tmp_path / 'reverse.py'}").split()
    grpo.main([*small, "--warm_steps", "250", "--out", str(tmp_path / "outcome")])
    grpo.main([*small, *"--warm_steps 0 --supervision process --init".split(),
               str(tmp_path / "outcome" / "warm_start"), "--out", str(tmp_path / "process")])
    for supervision in ("outcome", "process"):
        lines = records(tmp_path / supervision / "metrics.jsonl")
        assert lines[-1]["pass@1"] > lines[0]["pass@1"] + 0.05


def test_every_variant_has_a_row():
    """With its paper; and the commands that the page has can run."""
    page = DOCS["variants.md"]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| .+ \|$", page.split("Others are settings")[0], re.M)
    named = [name for names, _ in rows for name in re.findall(r"`(\w+)`", names)]
    files = (ROOT / "experiments" / "variants").glob("*.py")
    assert sorted(named) == sorted(path.stem for path in files)
    assert all(re.search(r"\d{4}\.\d{5}|20\d\d|DAPO", paper) for _, paper in rows)
    rest = page.split("Others are settings")[1].split("Not here")[0]
    commands = re.findall(r"\| `(--.+?)` \|$", rest, re.M)
    assert len(commands) >= 8
    for command in commands:
        mode, given = config.read(grpo.Config, "", shlex.split(command))
        grpo.make_config(**given)
