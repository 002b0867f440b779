"""docs/changing.md: every diff is applied to a copy of the code and run, as are the tests with it;
what the page shows in Python is run."""
import importlib
import inspect
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, flags, records
from safetensors.torch import load
from test_caches import uniform
from torch.testing import assert_close

import grpo as unchanged
from run import checkpoint, signals

PAGE = (ROOT / "docs" / "changing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
(SCHEDULE, ENTROPY, WITHOUT_CACHE, WITH_CACHE,
 BOARD) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)
TOP_K, LORA = ((ROOT / "docs" / f"{name}.diff").read_text() for name in ("top_k", "lora"))
RECIPES = dict(top_k=[TOP_K], schedule=[SCHEDULE], entropy=[ENTROPY],
               window=[WITHOUT_CACHE, WITH_CACHE], lora=[LORA], board=[BOARD])
DIFFS = sum(RECIPES.values(), [])
LEFT = shutil.ignore_patterns(".*", "__pycache__", "out", "extra", "upstream")
SMALL = dict(init="", difficulty=1, n_layer=1, n_embd=64, warm_steps=80, warm_lr=5e-3, prompts=8,
             group=8, max_new=12, minibatches=1, lr=1e-3)


def copy(folder, *changes):
    """All files in a new folder, with changes: diffs, or a file, a text that it has once, and
    another one."""
    return apply(shutil.copytree(ROOT, folder, ignore=LEFT), *changes)


def apply(folder, *changes):
    for change in changes:
        if isinstance(change, str):         # outside of any repository
            subprocess.run(["git", "apply", "-"], input=change, cwd=folder, text=True, check=True,
                           env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)})
        else:
            file, old, new = change
            text = (folder / file).read_text()
            assert text.count(old) == 1, old
            (folder / file).write_text(text.replace(old, new))
    return folder


def block(part):
    """The page's one block of Python with this in it."""
    [code] = [code for code in BLOCKS if part in code]
    return code


def algorithm(folder, code):
    """The path of a file with one of the page's functions, and with what it leaves out."""
    if "SETTINGS" not in code:
        name = re.search(r"^def (\w+)", code, re.M)[1]
        code = (f"import grpo\nSETTINGS = {{}}\nfrom grpo import kl_estimate as uncut\n{code}\n"
                f"grpo.{name} = {name}")
    (folder / "mine.py").write_text(code)
    return str(folder / "mine.py")


def gradient(x, parameters):
    found = torch.autograd.grad(x.sum(), [*parameters], retain_graph=True)
    return torch.cat([g.flatten() for g in found])


def run(grpo, out, **settings):
    """A run on the command line: its metrics, a dict for each step."""
    warm = dict(warm_steps=0) if "init" in settings else {}
    grpo.main(flags({**SMALL, **warm, **settings, "out": out}))
    return records(out / "metrics.jsonl")


def resumed(grpo, out, **settings):
    """The metrics of a run of four steps. One that is stopped after two and continued has the same
    model."""
    whole = run(grpo, out / "whole", steps=4, save_every=1, **settings)[1:]
    run(grpo, out / "half", steps=2, save_every=1, **settings)
    algo = dict(algo=settings["algo"]) if "algo" in settings else {}
    grpo.main([*flags(dict(steps=4, out=out / "half") | algo), "--resume"])
    one, other = ((out / name / "model.safetensors").read_bytes() for name in ("whole", "half"))
    assert one == other
    return whole


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A model after its warm start, with which most runs here begin."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    run(unchanged, folder, steps=0)
    return folder


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A function that imports `grpo` from a copy of the code with changes. At the end of a test
    every module is again what it was."""
    def of_code():
        return [n for n in sys.modules if re.match(r"(grpo|model|reward|data|run)(\.|$)", n)]

    def imported(*changes):
        monkeypatch.syspath_prepend(copy(tmp_path / "code", *changes))
        return importlib.import_module("grpo")
    before = {name: sys.modules.pop(name) for name in of_code()}
    yield imported
    for name in of_code():
        del sys.modules[name]
    sys.modules.update(before)


# ---- diffs, and the tests

def test_diffs_find_lines_that_moved_and_apply_in_any_order(tmp_path):
    def applied(name, *diffs):
        """All files with two lines more at their top, and diffs applied."""
        for path in (folder := copy(tmp_path / name)).rglob("*.py"):
            path.write_text("#\n#\n" + path.read_text())
        files = apply(folder, *diffs).rglob("*.py")
        return {path.relative_to(folder): compile(path.read_text(), "", "exec") for path in files}
    for name, diffs in RECIPES.items():
        applied(name, *diffs)
    back = sum(reversed(RECIPES.values()), [])
    assert applied("all", *DIFFS) == applied("back", *back)


# The tests that are run after a change of a file: those that use it most.
ROOMS = {"grpo.py": "advantages config layout loss reward train variants start",
         "model.py": "caches layout model passes sampling", "experiments/": "layout variants",
         "data/": "config layout faults tasks", "run/": "checkpoint files layout train"}
UNEXPECTED = """--- /dev/null
+++ b/experiments/variants/unexpected.py
@@ -0,0 +1,5 @@
+import grpo
+from grpo import surrogate as clipped
+SETTINGS = {}
+FIXED = ['reward']
+grpo.surrogate = lambda *given: clipped(*given)
"""         # an algorithm without settings, that ignores one; and a new setting
PATIENCE = ("grpo.py", "    # prompts and", "    patience: float = 0.5   # new\n    # prompts and")
FORKS = RECIPES | {"unexpected": [UNEXPECTED, PATIENCE]}


@pytest.mark.parametrize("name", FORKS)
def test_a_recipe_leaves_the_tests_green(name, tmp_path):
    """The quick ones of some files, and the slow one of a new variant: alone, with what the page
    says of it."""
    changes, tests = FORKS[name], f"quick or test_each_runs_for_two_steps and {name}"
    if name == "window":
        tests = "quick and not " + re.search(r"`(test_\w+)` needs the window too", PAGE)[1]
    folder = copy(tmp_path / "code", *changes)
    if name == "board":
        (tmp_path / "wandb.py").write_text("from unittest.mock import Mock\ninit = Mock()\n")
        (folder / "requirements.txt").open("a").write("wandb\n")
    files = re.findall(r"\+\+\+ b/(\S+)|\('(\S+)'", f"{changes}")
    rooms = {room for start, rooms in ROOMS.items() for room in rooms.split()
             if any(file.startswith(start) for pair in files for file in pair)}
    paths = [path for room in sorted(rooms) for path in folder.glob(f"tests/test_{room}.py")]
    assert len(paths) >= 2
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", f"--basetemp={folder}/tmp", "-k", tests, *paths],
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    shutil.rmtree(folder)               # 13 MB


def test_another_clone_in_the_folder_is_left_alone(tmp_path):
    copy(copy(tmp_path / "code") / "another_one")
    said = subprocess.check_output([sys.executable, "-m", "pytest", "--collect-only", "-q"],
                                   cwd=tmp_path / "code", text=True)
    assert "tests/test_loss.py::" in said and "another_one" not in said


# ---- tasks, rewards, algorithms

def test_a_reward_that_compares_completions():
    exec(block("def rewards"), names := {})
    problem = SimpleNamespace(prompt="?", answer="1")
    found = names["rewards"]([problem] * 3, ["1", "1", "2"], [1] * 3, [True] * 3)
    assert found == [{"correct": 1, "rare": 0.05}] * 2 + [{"correct": 0, "rare": 0.1}]


def test_a_reward_that_changes_during_the_run(warm, tmp_path):
    """Valid working earns 1, 3/4, 1/2, 1/4 in four steps; without the file always 1."""
    line, found = re.search(r'`(batch.components\["working"\] .*?)`', PAGE)[1], {}
    own = "\n".join(("import grpo", "from grpo import collect as judged", "SETTINGS = {}",
                     "def collect(agent, *given):", "    batch = judged(agent, *given)",
                     f"    {line}", "    return batch", "grpo.collect = collect"))
    for algo in ("grpo", algorithm(tmp_path, own)):
        out = tmp_path / algo[-4:]
        run(unchanged, out, init=warm, save_every=1, steps=4, algo=algo)
        found[algo] = {(group["step"], x) for group in records(out / "samples.jsonl")
                       for x in group["parts"]["working"] if x > 0}
    always, annealed = found.values()
    assert {x for _, x in always} == {1} and len(annealed) > 1
    assert annealed <= {(1, 1), (2, 0.75), (3, 0.5), (4, 0.25)}


def test_a_curriculum_is_the_same(warm, tmp_path):
    """In the first step, answers of one digit."""
    line = re.search(r"`(return one_step\(.*?)`", " ".join(PAGE.split()))[1]
    algo = algorithm(tmp_path, "\n".join((
        "import grpo", "from grpo import train_step as one_step", "SETTINGS = {}",
        f"def train_step(agent, problems, step): {line}", "grpo.train_step = train_step")))
    run(unchanged, tmp_path / "out", init=warm, algo=algo, prompts=3, steps=1)
    for group in records(tmp_path / "out" / "samples.jsonl"):
        a, b = re.findall(r"\d", group["prompt"])
        assert int(a) * int(b) < 10


def test_the_algorithm_in_a_file_is_that_file():
    """And the functions of the table have these arguments, and are replaced where it says."""
    variants = ROOT / "experiments" / "variants"
    assert (variants / "cispo.py").read_text().endswith(block("def surrogate"))
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| .* \|(.*)\|$", PAGE, re.M)
    assert len(rows) == 14
    for name, arguments, files in rows:
        assert [*inspect.signature(getattr(unchanged, name)).parameters] == arguments.split(", ")
        for file in re.findall(r"`(\w+)`", files):
            assert f"\ndef {name}(" in (variants / f"{file}.py").read_text()


def test_a_kl_that_is_cut(tmp_path):
    """At 10, where it has no gradient; below it is k3."""
    unchanged.make_config(algo=algorithm(tmp_path, block("def kl_estimate")))
    gap = torch.tensor([-1.0, 2, 3, 30], requires_grad=True)        # log pi_ref - log pi
    kl = unchanged.kl_estimate(torch.zeros(4), gap, "k3")
    assert kl.tolist() == pytest.approx([math.exp(-1), math.exp(2) - 3, 10, 10])
    assert gradient(kl, [gap]).tolist() == pytest.approx([math.expm1(-1), math.expm1(2), 0, 0])


def test_a_moving_average_is_a_baseline_and_survives_a_resume(warm, tmp_path):
    """What is learned from is the reward less the average of earlier steps."""
    average, algo = 0, algorithm(tmp_path, block('agent.state["average"]'))
    for m in resumed(unchanged, tmp_path, init=warm, algo=algo):
        earned = m["accuracy"] + m["working"]
        assert m["reward"] == pytest.approx(earned - average, abs=1e-5)
        average = 0.9 * average + 0.1 * earned
    assert average > 0.05


def test_a_model_gives_the_reward_and_models_are_kept(changed, warm, tmp_path):
    """A score is the number of characters; a model is kept at each step."""
    keep, end, rooms = block("% 50"), "    checkpoint.end_step(agent", "passes, report"
    grpo = changed(("grpo.py", end, keep.replace("50", "1") + end),
                   ("grpo.py", rooms, f"pretrained, {rooms}"))
    judge = block("scorer(").replace("from transformers import", "#")
    algo = algorithm(tmp_path, re.sub(r"scorer = .*\ntokenizer = .*\n", """
from types import SimpleNamespace
tokenizer = lambda texts, **given: dict(ids=torch.tensor([[len(text)] for text in texts]))
scorer = lambda ids: SimpleNamespace(logits=ids.float())
""", judge))
    run(grpo, tmp_path / "out", init=warm, algo=algo, steps=2)
    for group in records(tmp_path / "out" / "samples.jsonl"):
        scores = [len(group["prompt"] + x) for x in group["completions"]]
        assert any(group["finished"])
        assert group["rewards"] == [x * ended for x, ended in zip(scores, group["finished"])]
    one, two, end = ((tmp_path / "out" / part / "model.safetensors").read_bytes()
                     for part in ("step1", "step2", ""))
    assert one != two == end


# ---- optimizer, schedules, advantages

def test_another_optimizer_trains_and_is_resumed(changed, warm, tmp_path):
    line = re.search(r"`(return torch\.optim\..*?)`", PAGE)[1]
    old = re.search(r"return torch\.optim\.(?s:.*?True)\)", (ROOT / "grpo.py").read_text())[0]
    resumed(changed(("grpo.py", old, line)), tmp_path, init=warm, lr=1e-2)


def test_learning_rate_and_beta_follow_the_step(changed, warm, tmp_path, monkeypatch):
    line, before = re.search(r"^`(agent\.beta = .*?)`", PAGE, re.M)[1], "    if cfg.lr_warmup:\n"
    grpo, rates = changed(SCHEDULE, ("grpo.py", before, f"    {line}\n{before}")), []
    update = grpo.update
    monkeypatch.setattr(grpo, "update", lambda agent, *more: rates.append(
        agent.opt.param_groups[0]["lr"]) or update(agent, *more))
    steps = run(grpo, tmp_path / "out", init=warm, lr_warmup=2, lr=1e-3, beta=0.2, steps=5)[1:]
    assert rates == pytest.approx([5e-4, 8e-4, 6e-4, 4e-4, 2e-4])
    assert [m["beta"] for m in steps] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])


def test_the_entropy_bonus_is_the_entropys(changed):
    """By enumeration: the rows end in every next token once."""
    grpo, V = changed(ENTROPY), 11
    gpt = grpo.model.GPT(grpo.model.GPTConfig(V, 1, 2, 1, 8, 16, 8))
    with torch.no_grad():
        gpt.embed_tokens.weight.mul_(4)                     # far from uniform
    ids = torch.tensor([[1, 2, 3, token] for token in range(V)])
    mask = torch.tensor([False] * 3 + [True]).repeat(V, 1)
    logp, _ = grpo.model.token_logps(gpt, ids, mask, 1.5)
    exact = -(logp[:, 3].exp() * logp[:, 3]).sum()
    cfg = grpo.make_config(entropy_coef=0.5, temperature=1.5, kl="none", warm_steps=0)
    batch = grpo.Batch(ids, mask, None, logp.detach(), None, adv=torch.zeros(V, 4))
    loss, stats, _ = grpo.total_loss(grpo.Agent(cfg, None, None, gpt), batch, mask / V, V)
    assert_close(loss, -0.5 * exact)
    found, want = (gradient(x, gpt.parameters()) for x in (loss, exact))
    assert_close(found, -0.5 * want)
    assert want.abs().max() > 0.01 and stats["entropy"].item() == pytest.approx(exact.item())


def test_the_three_ways_to_log(changed, warm, tmp_path):
    """A mean over tokens, over rows, and a number."""
    lines = re.findall(r"\| `(stats\[.*?)` \|$", PAGE, re.M)
    ends = {"return loss, stats, logp\n": "grpo.py", "return dist.means(stats)\n": "run/report.py",
            "return batch, stats\n\ndef train(": "grpo.py"}
    grpo = changed(*[(file, f"    {end}", f"    {line}\n    {end}")
                     for line, (end, file) in zip(lines, ends.items(), strict=True)])
    m = run(grpo, tmp_path / "out", init=warm, steps=1, epochs=2)[1]
    assert 0 < m["moved"] < 1 and 0 < m["long"] < 1 and m["distinct"] == 8


# ---- the model

def test_attention_that_is_changed_in_one_path_is_caught(changed, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(changed(WITHOUT_CACHE), tmp_path / "out", warm_steps=20, steps=1)
    assert "sampler and trainer disagree" in capsys.readouterr().err


def test_sampling_from_the_most_likely_tokens(changed, warm, tmp_path):
    """Each is one of the k, its log-probability that among them, in both forms of training."""
    grpo, k, t = changed(TOP_K), 3, 1.3
    assert run(grpo, tmp_path / "out", init=warm, top_k=2, epochs=2, steps=2)[2]["mismatch"] < 1e-4
    policy = importlib.import_module("run.pretrained").load(warm).eval()
    policy.top_k, parts, prompts = k, [], [[52, 42, 55, 61], [57, 42, 56, 61]]
    batch = grpo.sample(policy, prompts, 6, [8, 8], t, [256], uniform(12, 8))
    for row, on in zip(batch.ids, batch.mask):              # a token at a time, by the definition
        for i in on.nonzero()[:, 0].tolist():
            logits = policy.head(policy(row[None, :i])[0, -1]) / t
            most = logits.sort(descending=True).indices[:k].tolist()
            assert row[i].item() in most
            parts.append(logits[row[i]] - logits[most].logsumexp(0))
    want = torch.stack(parts)
    assert_close(batch.logp[batch.mask], want.detach(), atol=1e-5, rtol=1e-5)
    rows, cfg = (batch.ids, batch.mask, t), grpo.make_config(temperature=t)
    for logp, _ in (grpo.model.token_logps(policy, *rows), grpo.token_logps(policy, batch, cfg)):
        logp = logp[batch.mask]
        assert_close(logp, want, atol=1e-5, rtol=1e-5)
    policy.top_k = 2            # what an update has moved out of the k takes a place there
    kept = policy.truncated(torch.tensor([[3.0, 2, 1, 0]]), torch.tensor([3])) > -torch.inf
    assert kept.tolist() == [[True, False, False, True]]


def test_lora_trains_small_matrices_beside_the_weights(changed, warm, tmp_path):
    """The saved model is the weights and the products; the reference is the first model."""
    grpo = changed(LORA)
    steps = resumed(grpo, tmp_path, init=warm, lora_rank=3, lr=1e-2, beta=0.1, minibatches=2)
    assert 1e-6 < steps[0]["kl"] < steps[3]["kl"]
    held = load((tmp_path / "whole" / "checkpoint.safetensors").read_bytes())
    trained = [name for name in held if name.startswith("opt.exp_avg.")]
    assert len(trained) == 2 * 7 and all(name.endswith(("lora_a", "lora_b")) for name in trained)
    assert not any(name.startswith("ref.") for name in held)
    from run import lora, pretrained            # those of the copy
    gpt, ids = pretrained.load(warm), torch.arange(10)[None]
    before = gpt(ids)
    lora.adapt(gpt, 3, torch.Generator())
    assert_close(gpt(ids), before)                          # B begins at 0
    gpt.load_state_dict({name: held[f"policy.{name}"] for name in gpt.state_dict()})
    assert_close(gpt(ids), pretrained.load(tmp_path / "whole")(ids), atol=1e-5, rtol=1e-4)
    assert_close(lora.base(gpt)(ids), before)


# ---- all at once, notebooks

def test_all_changes_at_once_and_what_is_logged(changed, warm, tmp_path, monkeypatch):
    """With a stand-in for wandb, which gets the metrics."""
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    steps = run(changed(*DIFFS), tmp_path / "out", init=warm, algo="cispo", kl="loss", lora_rank=3,
                entropy_coef=0.01, top_k=20, lr_warmup=1, epochs=2, steps=2)
    begun = wandb.init.call_args.kwargs
    calls = wandb.init.return_value.log.call_args_list
    assert [call.kwargs | call.args[0] for call in calls] == steps and len(steps) == 3
    assert all(m["mismatch"] < 1e-4 and m["grad_norm"] > 0 for m in steps[1:])
    assert begun["config"]["lora_rank"] == 3 and begun["mode"] is None


def test_the_script_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notebook.py").write_text(BLOCKS[-2])
    runpy.run_path("notebook.py")
    said = capsys.readouterr().out
    rows = re.findall(r"'\d\*\d=.*'  +reward (\S+)  advantage (\S+)$", said, re.M)
    reward, adv = torch.tensor([[float(x) for x in row] for row in rows]).T
    assert len(rows) == 8 and reward.max() > reward.min()
    assert_close(adv, (reward - reward.mean()) / reward.std(correction=0), atol=6e-4, rtol=0)
    assert float(re.search(r"off -weight \* advantage by (\S+)", said)[1]) < 1e-6


def test_the_script_goes_on_after_an_interrupt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = unchanged.make_config(**SMALL | dict(steps=4, held_out=4, samples=2, out="out/whole"))
    step = unchanged.train_step
    with monkeypatch.context() as patch:                    # Ctrl-C comes in the second step
        patch.setattr(unchanged, "train_step", lambda *given: (
            given[2] == 2 and os.kill(os.getpid(), signal.SIGINT), step(*given))[1])
        with pytest.raises(signals.Stopped, match="after step 2"), checkpoint.running(cfg):
            unchanged.train(cfg)
    Path("go_on.py").write_text(BLOCKS[-1])
    runpy.run_path("go_on.py")
    assert [m["step"] for m in records(Path("out/whole/metrics.jsonl"))] == [0, 1, 2, 3, 4]
