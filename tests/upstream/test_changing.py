"""docs/changing.md: every diff is applied to a copy of the code and run, as are the tests with it; the script is run."""
import importlib
import inspect
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, flags, records
from safetensors.torch import load
from torch.testing import assert_close

import grpo as unchanged
from run import checkpoint, dist

PAGE = (ROOT / "docs" / "changing.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.M | re.S)
(OWN, ANNEALED, TOP_K, OPTIMIZER, SCHEDULE, MEDIAN, STATE, CUT_KL, ENTROPY, WITHOUT_CACHE, WITH_CACHE, PARAMETER, LORA,
 BOARD) = DIFFS
CODE = ("grpo.py", "model.py", "reward.py", "data/*.py", "run/*.py", "run/page/*", "experiments/variants/*.py")
SMALL = dict(difficulty=1, n_layer=1, n_embd=64, warm_steps=80, warm_lr=5e-3, prompts=8,
             group=8, max_new=12, minibatches=1, lr=1e-3)


def copy(folder, *diffs, above=""):
    """The code in a new folder, a text above every file, with diffs applied as git does it outside
    of any repository."""
    folder.mkdir(parents=True)
    for path in (path for pattern in CODE for path in ROOT.glob(pattern)):
        to = folder / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(above + path.read_text())
    return apply(folder, *diffs)


def apply(folder, *diffs):
    for diff in diffs:
        subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, check=True,
                       env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    return folder


def run(grpo, out, **settings):
    """A run on the command line, in this process: its metrics, a dict for each step."""
    warm = dict(warm_steps=0) if "init" in settings else {}
    grpo.main(flags({**SMALL, **warm, **settings, "out": out}))
    return metrics(out)


def metrics(out):
    return records(out / "metrics.jsonl")


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A model after its warm start, with which most runs here begin."""
    folder = tmp_path_factory.mktemp("warm")
    run(unchanged, folder, steps=0)
    return folder


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A function that imports `grpo` from a copy of the code to which diffs were applied, or from the test's own folder
    `code`. At the end of a test every module is again what it was."""
    def of_code():
        return [n for n in sys.modules if re.match(r"(grpo|model|reward|data|run)(\.|$)", n)]

    def imported(*diffs):
        folder = tmp_path / "code"
        monkeypatch.syspath_prepend(folder if folder.exists() else copy(folder, *diffs))
        grpo = importlib.import_module("grpo")
        assert Path(grpo.__file__).parent == tmp_path / "code"
        return grpo
    before = {name: sys.modules.pop(name) for name in of_code()}
    yield imported
    for name in of_code():
        del sys.modules[name]
    sys.modules.update(before)


# ------------------------------------------------------------------------------------ the recipes

def test_diffs_find_lines_that_moved(tmp_path):
    for i, diff in enumerate(DIFFS):
        before = [WITHOUT_CACHE] if diff is WITH_CACHE else []
        copy(tmp_path / str(i), *before, diff, above="#\n#\n")
    for path in copy(tmp_path / "all", *DIFFS, above="#\n#\n").rglob("*.py"):
        compile(path.read_text(), path, "exec")


def test_diffs_apply_in_any_order(tmp_path):
    """With the same result."""
    def texts(folder):
        return {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
    others = [diff for diff in DIFFS if diff not in (WITHOUT_CACHE, WITH_CACHE)]
    whole = texts(copy(tmp_path / "all", *DIFFS))
    assert texts(copy(tmp_path / "back", *reversed(others), WITHOUT_CACHE, WITH_CACHE)) == whole


# The rooms of tests/ that are run after a change of a file: those in which it is used most.
ROOMS = {"grpo.py": "advantages config layout loss reward train variants warm_start",
         "model.py": "caches layout model passes sampling", "data/": "config layout task_errors tasks",
         "experiments/variants/": "layout variants", "run/": "checkpoint files layout train"}
RECIPES = dict(own=[OWN], annealed=[ANNEALED], top_k=[TOP_K], optimizer=[OPTIMIZER], schedule=[SCHEDULE], median=[MEDIAN],
               state=[STATE], cut_kl=[CUT_KL], entropy=[ENTROPY], window=[WITHOUT_CACHE, WITH_CACHE], parameter=[PARAMETER],
               lora=[LORA], board=[BOARD])


def fork(folder, *diffs):
    """All files in a new folder, with diffs applied."""
    left = shutil.ignore_patterns(".*", "__pycache__", "out", "extra", "upstream")
    return apply(shutil.copytree(ROOT, folder, ignore=left), *diffs)


def assert_green(folder, files, tests):
    """The quick tests of the rooms of some files pass, and the slow ones of what is new, or all but
    one, as `tests` says."""
    rooms = [rooms.split() for start, rooms in ROOMS.items() if any(file.startswith(start) for file in files)]
    paths = [f"tests/test_{room}.py" for room in sorted({*sum(rooms, [])})]
    done = subprocess.run([sys.executable, "-m", "pytest", "-qx", f"--basetemp={folder}/tmp", "-k", tests, *paths],
                          cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(folder.parent)})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    shutil.rmtree(folder)               # 13 MB


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_leaves_the_tests_green(name, tmp_path):
    """Alone, with what the page says of it."""
    diffs, tests = RECIPES[name], f"quick or test_each_runs_for_two_steps and {name}"
    files = re.findall(r"^\+\+\+ b/(\S+)", "".join(diffs), re.M)
    folder = fork(tmp_path / "code", *diffs)
    if name == "window":
        tests = "quick and not " + re.search(r"`(test_\w+)` needs the window too", PAGE)[1]
    if name == "parameter":
        room, new, old = re.search(r"`(tests/test_passes.py)` needs a bound of (\S+) in place of (\S+)\.\n", PAGE).groups()
        (folder / room).write_text((folder / room).read_text().replace(old, new))
    if name == "board":
        (tmp_path / "wandb.py").write_text("class init:\n    def __init__(*_, **more): pass\n    log = __init__\n")
        (folder / "requirements.txt").open("a").write("wandb\n")
    assert_green(folder, files, tests)


def test_what_nobody_expected_leaves_the_tests_green(tmp_path):
    """An algorithm in a file, without settings, that ignores one; and a new setting."""
    folder, file = fork(tmp_path / "code"), "experiments/variants/unexpected.py"
    (folder / file).write_text("import grpo\nfrom grpo import rollout as sampled, surrogate as clipped\n\n"
                               "SETTINGS = {}\nFIXED = ['reward']\n\n\n"
                               "def rollout(*given):\n    return sampled(*given)\n\n\n"
                               "def surrogate(*given):\n    return clipped(*given)\n\n\n"
                               "grpo.rollout, grpo.surrogate = rollout, surrogate\n")
    text = (folder / "grpo.py").read_text()
    line = re.search(r"^    lr: .*\n", text, re.M)[0]
    (folder / "grpo.py").write_text(text.replace(line, f"{line}    patience: float = 0.5       # of those who wait\n"))
    assert_green(folder, ["grpo.py", "run/checkpoint.py", file], "quick or unexpected or patience")


def test_the_table_counts_the_lines_of_its_recipes():
    """As many as the section has in its diffs, its block of Python, or the file to which it leads."""
    sections = dict(re.findall(r"^## (.*)\n((?s:.*?))(?=^## |\Z)", PAGE, re.M))
    names = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-"): text for title, text in sections.items()}
    rows = re.findall(r"^\| .* \| (\d+) \| \[.*?\]\((\S+?)\) \| `\S+` \|$", PAGE, re.M)
    assert len(rows) >= 20
    for n, link in rows:
        where, _, anchor = link.partition("#")
        if where.endswith(".py"):
            found = (ROOT / "docs" / where).read_text().splitlines()
        elif where:
            continue
        elif name := {"a-teacher": "distillation", "an-algorithm-in-a-file": "cispo"}.get(anchor):
            found = (ROOT / "experiments" / "variants" / f"{name}.py").read_text().splitlines()
        elif diffs := re.findall(r"^```diff\n(.*?)^```", names[anchor], re.M | re.S):
            found = re.findall(r"^\+(?!\+\+ )", "".join(diffs), re.M)
        else:
            block = re.search(r"^```python\n(.*?)^```", names[anchor], re.M | re.S)
            found = block[1].splitlines() if block else range(int(n))
        assert len(found) == int(n), link
    assert len(re.findall(r"^\+(?!\+\+ )", LORA, re.M)) <= 45


def test_the_algorithm_in_a_file_is_that_file():
    """And the functions of the table are replaced by those that it names, with the same arguments."""
    shown = re.search(r"^```python\n(import grpo\n\nSETTINGS.*?)^```", PAGE, re.M | re.S)[1]
    assert (ROOT / "experiments" / "variants" / "cispo.py").read_text().endswith(shown)
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| .* \| (.*) \|$", PAGE, re.M)
    assert len(rows) == 10
    shown = re.search(r'^```python\n("""Branching.*?)^```', PAGE, re.M | re.S)[1]
    assert (ROOT / "experiments" / "variants" / "tree.py").read_text() == shown
    for name, arguments, names in rows:
        assert [*inspect.signature(getattr(unchanged, name)).parameters] == arguments.split(", ")
        for variant in re.findall(r"`(\w+)`", names):
            assert f"\ndef {name}(" in (ROOT / "experiments" / "variants" / f"{variant}.py").read_text()


def test_the_entropy_bonus_is_the_entropys(changed, warm, tmp_path):
    grpo, V = changed(ENTROPY), 11
    shape = grpo.model.GPTConfig(vocab_size=V, n_layer=1, n_head=2, n_kv_head=1, n_embd=8,
                                 n_inner=16, block_size=8)
    gpt = grpo.model.GPT(shape, torch.Generator().manual_seed(0))
    with torch.no_grad():
        gpt.embed_tokens.weight.mul_(4)                     # far from uniform
    ids = torch.tensor([[1, 2, 3, token] for token in range(V)])        # every next token once
    mask = torch.tensor([False] * 3 + [True]).repeat(V, 1)

    def gradient(x):
        return torch.cat([g.flatten() for g in torch.autograd.grad(x, [*gpt.parameters()],
                                                                   retain_graph=True)])
    logp, _ = grpo.passes.token_logps(gpt, ids, mask, 1.5)
    exact = -(logp[:, 3].exp() * logp[:, 3]).sum()          # by enumeration
    cfg = grpo.make_config(entropy_coef=0.5, temperature=1.5, kl="none", warm_steps=0)
    batch = grpo.Batch(ids, mask, None, logp.detach(), None, adv=torch.zeros(V, 4))
    loss, stats, _ = grpo.total_loss(grpo.Agent(cfg, None, None, gpt), batch, mask / V, V)
    assert_close(loss, -0.5 * exact)
    assert_close(gradient(loss), -0.5 * gradient(exact))
    assert_close(stats["entropy"], exact)
    sampled = gradient((logp.exp().detach() * -logp).sum())             # of the mean of -log pi
    assert sampled.abs().max() < 1e-6 and gradient(exact).abs().max() > 0.01

    without, bonus = (run(grpo, tmp_path / str(coef), init=warm, steps=4, entropy_coef=coef)[1:]
                      for coef in (1e-12, 2))               # with 0 the estimate is logged
    assert without[0]["entropy"] == bonus[0]["entropy"]                 # the same first rollout
    assert bonus[3]["entropy"] > max(without[3]["entropy"], bonus[0]["entropy"]) + 0.1


def test_beta_rises_and_a_resumed_run_goes_on(changed, warm, tmp_path, monkeypatch):
    grpo, rise, used = changed(SCHEDULE), dict(init=warm, beta=0.3, beta_steps=3), []
    loss = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *given: used.append(given[-1]) or loss(*given))
    run(grpo, tmp_path / "rise", **rise, steps=2)
    grpo.main(flags(dict(steps=4, out=tmp_path / "rise")) + ["--resume"])
    steps = metrics(tmp_path / "rise")[1:]
    assert [m["beta"] for m in steps] == pytest.approx([0.1, 0.2, 0.3, 0.3])
    assert [*dict.fromkeys(used)] == pytest.approx([0.1, 0.2, 0.3])
    for m in steps[1:]:     # on-policy the advantages sum to 0; what is left weighs short rows more
        assert m["kl"] > 1e-3 and m["loss"] == pytest.approx(m["beta"] * m["kl"], rel=0.3)
    assert {m["beta"] for m in run(grpo, tmp_path / "off", init=warm, steps=2)[1:]} == {0.04}


def test_the_learning_rate_rises_and_falls(changed, warm, tmp_path, monkeypatch):
    """To its setting in two steps, then by a fifth of it in each; a resumed run goes on."""
    grpo, rates = changed(SCHEDULE), []
    update = grpo.update
    monkeypatch.setattr(grpo, "update", lambda agent, *more: rates.append(agent.opt.param_groups[0]["lr"]) or update(agent, *more))
    run(grpo, tmp_path / "out", init=warm, lr_warmup=2, lr=1e-3, steps=5)
    assert rates == pytest.approx([5e-4, 8e-4, 6e-4, 4e-4, 2e-4])
    run(grpo, tmp_path / "half", init=warm, lr_warmup=2, lr=1e-3, steps=2)
    grpo.main(flags(dict(steps=5, out=tmp_path / "half")) + ["--resume"])
    assert rates[-3:] == pytest.approx([6e-4, 4e-4, 2e-4])
    run(grpo, tmp_path / "off", init=warm, steps=2)
    assert rates[-2:] == [1e-3] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_is_changed_in_one_path_is_caught(changed, tmp_path, capsys, dtype):
    """In bfloat16 by the mean of the gaps: the largest is within rounding."""
    with pytest.raises(SystemExit) as stop:
        run(changed(WITHOUT_CACHE), tmp_path / "out", warm_steps=20, steps=1, dtype=dtype)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and "warm start 20/20" in out and "step 1" not in out
    assert err.startswith("error: sampler and trainer disagree: their log-probabilities are up to ")
    if dtype == "float32":
        said = " ".join(re.search(r"^```\n(error: .*?)^```", PAGE, re.M | re.S)[1].split())
        assert re.sub(r"[\d.]+", "", err.strip()) == re.sub(r"[\d.]+", "", said)


def test_the_median_is_a_baseline(changed, warm, tmp_path):
    """Of the rewards of a group, the lower of the two in the middle; outcome and process."""
    grpo = changed(MEDIAN)
    cfg = grpo.make_config(baseline="median", adv_scale="none", group=4)
    reward, ends = torch.tensor([[1.0], [0], [3], [4]]), torch.ones(4, 1, dtype=torch.bool)
    score, _ = grpo.group_scores(reward, ends, cfg)
    assert score[:, 0].tolist() == [0, -1, 2, 3]
    steps = run(grpo, tmp_path / "out", init=warm, baseline="median", steps=1)[1:]
    assert steps[0]["grad_norm"] > 0


def test_a_moving_average_is_a_baseline_and_survives_a_resume(changed, warm, tmp_path):
    grpo, ema = changed(STATE), dict(init=warm, ema_decay=0.9, baseline="none", adv_scale="none", save_every=1)
    whole = run(grpo, tmp_path / "whole", **ema, steps=4)[1:]
    run(grpo, tmp_path / "half", **ema, steps=2)
    grpo.main(flags(dict(steps=4, out=tmp_path / "half")) + ["--resume"])
    for name in ("reward", "reward_ema", "grad_norm"):
        assert [m[name] for m in metrics(tmp_path / "half")[1:]] == [m[name] for m in whole]
    average = [0]
    for m in whole:
        average.append(0.9 * average[-1] + 0.1 * m["reward"])
    assert [m["reward_ema"] for m in whole] == pytest.approx(average[1:]) and average[-1] > 0.05
    groups = records(tmp_path / "half" / "samples.jsonl")
    assert {g["step"] for g in groups} == {1, 2, 3, 4}
    for g in groups:                                        # of the steps before
        for reward, (first, *_) in zip(g["rewards"], g["advantages"]):
            assert first == pytest.approx(reward - average[g["step"] - 1], abs=1e-4)
    assert all("reward_ema" not in m for m in run(grpo, tmp_path / "without", init=warm, steps=1))


def test_a_reward_that_changes_during_the_run(changed, warm, tmp_path):
    """Valid working earns 1, 3/4, 1/2, 1/4 in four steps; without the file always 1; a resumed run goes on."""
    grpo, given = changed(ANNEALED), dict(init=warm, save_every=1)

    def worths(out):
        groups = records(out / "samples.jsonl")
        return {(g["step"], x) for g in groups for x in g["parts"]["working"] if x > 0}
    plain = run(grpo, tmp_path / "plain", **given, steps=4)
    assert {x for _, x in worths(tmp_path / "plain")} == {1}
    whole = run(grpo, tmp_path / "whole", **given, algo="annealed", steps=4)
    found = worths(tmp_path / "whole")
    assert found and found <= {(1, 1), (2, 0.75), (3, 0.5), (4, 0.25)} and len(found) > 1
    assert [whole[1][name] == plain[1][name] for name in ("reward", "grad_norm")] == [True, True]
    for m in whole[1:]:
        assert m["reward"] == pytest.approx(m["accuracy"] + m["working"])
        assert m["working"] <= m["accuracy"] * (5 - m["step"]) / 4
    task = importlib.import_module("data.arithmetic")
    cfg, saved = grpo.checkpoint.resume(tmp_path / "whole", grpo.Config, {"steps": 6, "algo": "annealed"})
    assert task.WORKING == 0.25 and saved.step == 4
    grpo.train(cfg, saved=saved)
    assert task.WORKING == pytest.approx(1 / 6)


def test_a_curriculum_is_the_same(changed, warm, tmp_path, monkeypatch):
    """The page's line in that file: in the first step, answers of one digit."""
    line = re.search(r"`(return one_step\(.*?)`", " ".join(PAGE.split()))[1]
    folder = copy(tmp_path / "code", ANNEALED)
    file = folder / "experiments" / "variants" / "annealed.py"
    assert file.read_text().count("return one_step(agent, problems, step)") == 1
    file.write_text(file.read_text().replace("return one_step(agent, problems, step)", line))
    grpo, drawn = changed(), []
    rollout = grpo.rollout
    monkeypatch.setattr(grpo, "rollout", lambda agent, problems, rng: drawn.append(problems) or rollout(agent, problems, rng))
    run(grpo, tmp_path / "out", init=warm, algo="annealed", prompts=3, steps=2)
    assert {len(p.answer) for p in drawn[0]} == {1} and {len(p.answer) for p in drawn[1]} <= {1, 2} and len(drawn) == 2


def test_a_setting_of_a_task_reaches_its_reward(changed, tmp_path):
    """As a flag; its default is what it was."""
    grpo = changed(OWN)
    task = importlib.import_module("data.sums")

    def near(cfg):
        problem = grpo.config.problems_of(task, cfg)[0][0]
        return task.reward(problem, str(int(problem.answer) + 1))["near"]
    assert near(grpo.make_config(task="sums")) == pytest.approx(0.1)
    mode, given = grpo.config.read(grpo.Config, "", ["--task", "sums", "--near", "0.5"])
    assert near(grpo.make_config(**given)) == pytest.approx(0.25)
    whole, none = (run(grpo, tmp_path / str(x), task="sums", near=x, warm_steps=40, max_new=16, steps=1, held_out=8, samples=1)[1]
                   for x in (1.0, 0.0))
    assert whole["near"] > 0 and none["near"] == 0


def test_another_optimizer_trains_and_is_resumed(changed, warm, tmp_path):
    """Of a matrix it holds a row and a column of numbers."""
    grpo, given = changed(OPTIMIZER), dict(init=warm, lr=1e-2, save_every=1)
    whole = run(grpo, tmp_path / "whole", **given, steps=4)
    run(grpo, tmp_path / "half", **given, steps=2)
    grpo.main(flags(dict(steps=4, out=tmp_path / "half")) + ["--resume"])
    one, other, first = (load((folder / "model.safetensors").read_bytes())
                         for folder in (tmp_path / "whole", tmp_path / "half", warm))
    assert all(torch.equal(x, other[name]) and not torch.equal(x, first[name]) for name, x in one.items())
    held = load((tmp_path / "whole" / "checkpoint.safetensors").read_bytes())
    state = {name: x for name, x in held.items() if name.startswith("opt.")}
    weights = sum(x.numel() for name, x in held.items() if name.startswith("policy."))
    assert {name.split(".")[1] for name in state} == {"step", "row_var", "col_var", "variance"}
    assert 0 < sum(x.numel() for x in state.values()) < weights / 10
    assert whole[-1]["reward"] > whole[1]["reward"]


def test_sampling_from_the_most_likely_tokens(changed, warm, tmp_path):
    """Each token is one of the k, its log-probability that among them, in the sampler and in both forms of training, with its
    gradient; k of 1 is greedy."""
    grpo, k, t = changed(TOP_K), 3, 1.3
    policy = importlib.import_module("run.pretrained").load(warm).eval()
    prompts, N = [[52, 42, 55, 61], [57, 42, 56, 61]], 8
    u = torch.rand(2 * 6, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def sample(u, top_k):
        policy.top_k = top_k
        return grpo.sample(policy, prompts, 6, [N, N], t, [256], u)
    whole, greedy = sample(u, 0), sample(None, 0)
    assert torch.equal(sample(u, 1).ids, greedy.ids) and torch.equal(sample(u, 1000).ids, whole.ids)
    batch = sample(u, k)
    assert not torch.equal(batch.ids, whole.ids) and len({tuple(row) for row in batch.ids.tolist()}) > 2
    parts = []
    for row, on in zip(batch.ids, batch.mask):              # a token at a time, by the definition
        for i in on.nonzero()[:, 0].tolist():
            logits = policy.head(policy(row[None, :i])[0, -1]) / t
            most = logits.sort(descending=True).indices[:k].tolist()
            assert row[i].item() in most
            parts.append(logits[row[i]] - logits[most].logsumexp(0))
    want = torch.stack(parts)

    def gradient(x):
        return torch.cat([g.flatten() for g in torch.autograd.grad(x.sum(), [*policy.parameters()], retain_graph=True)])
    assert_close(batch.logp[batch.mask], want.detach(), atol=1e-5, rtol=1e-5)
    for form in (grpo.model.token_logps, grpo.passes.token_logps):
        logp, _ = form(policy, batch.ids, batch.mask, t)
        assert_close(logp[batch.mask], want, atol=1e-5, rtol=1e-5)
        assert_close(gradient(logp), gradient(want), atol=1e-4, rtol=1e-4)
    logits, last = torch.tensor([[3.0, 2, 1, 0], [0, 1, 2, 3]], requires_grad=True), torch.tensor([3, 3])
    policy.top_k = 2                                        # what an update has moved out of the k takes a place there
    assert (policy.truncated(logits, last) > -torch.inf).tolist() == [[True, False, False, True], [False, False, True, True]]
    policy.truncated(logits, last).log_softmax(-1)[:, 3].sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad[0, 1:3] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_the_most_likely_tokens(changed, warm, tmp_path, dtype):
    """With ratios other than 1 and a reference; an evaluation alone draws from them, too."""
    grpo, given = changed(TOP_K), dict(top_k=2, dtype=dtype, beta=0.1, epochs=2, minibatches=2)
    steps = run(grpo, tmp_path / "out", init=warm, **given, steps=3)
    plain = run(grpo, tmp_path / "plain", init=warm, dtype=dtype, steps=1)
    assert all(0 < m["grad_norm"] < 100 and math.isfinite(m["kl"]) for m in steps[1:])
    assert steps[1]["entropy"] < plain[1]["entropy"]
    assert dtype == "bfloat16" or all(m["mismatch"] < 1e-4 for m in steps[1:])
    cfg = grpo.make_config(**{**SMALL, "warm_steps": 0}, init=str(warm), out=str(tmp_path / "alone"), top_k=2, dtype=dtype)
    agent = grpo.Agent(cfg, *grpo.setup.trained_model(cfg))
    assert agent.policy.top_k == agent.sampler.top_k == 2


def test_the_students_of_a_teacher():
    """The page's table, and that students end where the teacher is."""
    found = json.loads((ROOT / "experiments" / "studies" / "distillation.json").read_text())

    def cell(algo, when):
        least, middle, most = sorted(run[when] for run in found[algo].values())
        return f"{middle:.1%} ({least:.1%} to {most:.1%})"
    for algo, name in (("grpo", "GRPO"), ("distillation", "distillation")):
        assert f"| {name} | {cell(algo, 'before')} | {cell(algo, 'after')} |\n" in PAGE
        assert {run["steps"] for run in found[algo].values()} == {24}
    assert f"The teacher has {found['teacher']:.1%}." in PAGE
    assert all(abs(run["after"] - found["teacher"]) < 0.01 for run in found["distillation"].values())


def test_a_kl_that_is_cut(changed, warm, tmp_path):
    """At 10, where it has no gradient; below it is k3."""
    grpo = changed(CUT_KL)
    grpo.make_config(algo="cut_kl")
    gap = torch.tensor([-30.0, -1, 0, 1, 2.4, 3, 30], dtype=torch.float64, requires_grad=True)     # log pi_ref - log pi
    kl = grpo.kl_estimate(torch.zeros(7), gap, "k3")
    want = [x.exp() - 1 - x for x in gap.detach().clamp(min=-20)]
    assert kl.tolist() == pytest.approx([min(x.item(), 10) for x in want])
    assert torch.autograd.grad(kl.sum(), gap)[0].tolist() == pytest.approx([
        0 if x > 10 else math.expm1(g) for x, g in zip(want, gap.tolist())])
    assert run(grpo, tmp_path / "out", init=warm, algo="cut_kl", beta=0.1, steps=2)[2]["kl"] > 0


def test_the_majority_is_the_reward(changed, warm, tmp_path):
    """Of the page's lines on TTRL: what is right is only logged."""
    code = re.search(r"^```python\n(def collect\(agent.*?)^```", PAGE, re.M | re.S)[1]
    (tmp_path / "ttrl.py").write_text(
        "from collections import Counter\nimport torch\nimport grpo\nfrom data import answer_of\nfrom grpo import collect as judged\n"
        f"SETTINGS = dict(kl='none')\n{code}\ngrpo.collect = collect\n")
    grpo = changed()
    run(grpo, tmp_path / "out", init=warm, algo=tmp_path / "ttrl.py", steps=1)
    for group in map(json.loads, (tmp_path / "out" / "samples.jsonl").read_text().splitlines()):
        answers = [grpo.report.answer_of(importlib.import_module("data.arithmetic"), text) for text in group["completions"]]
        most = max(map(answers.count, filter(None, answers)), default=0)
        won = [answer for answer, reward in zip(answers, group["rewards"]) if reward == 1]
        assert len({*won}) <= 1 and (not won or answers.count(won[0]) == most == len(won))
        assert {"correct", "reward"} <= group["parts"].keys()


def test_lora_trains_small_matrices_beside_the_weights(changed, warm, tmp_path):
    """The saved model is the weights and the products; a resumed run goes on; the reference is the first model."""
    grpo, lora = changed(LORA), dict(init=warm, lora_rank=3, lr=1e-2, beta=0.1, save_every=1, minibatches=2)
    steps = run(grpo, tmp_path / "whole", **lora, steps=3)
    run(grpo, tmp_path / "half", **lora, steps=2)
    grpo.main(flags(dict(steps=3, out=tmp_path / "half")) + ["--resume"])
    assert (tmp_path / "half" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    first, last = (load((where / "model.safetensors").read_bytes()) for where in (warm, tmp_path / "whole"))
    held = load((tmp_path / "whole" / "checkpoint.safetensors").read_bytes())
    assert first.keys() == last.keys() and not any(name.startswith("ref.") for name in held)
    trained = {name.removeprefix("opt.exp_avg.policy.") for name in held if name.startswith("opt.exp_avg.")}
    assert len(trained) == 2 * 7 and all(name.endswith(("lora_a", "lora_b")) for name in trained)
    for name, x in first.items():
        ours = name.removeprefix("model.")
        assert torch.equal(held[f"policy.{ours}"], x)
        if f"policy.{ours.removesuffix('weight')}lora_a" in held:
            a, b = (held[f"policy.{ours.removesuffix('weight')}lora_{which}"] for which in "ab")
            assert a.shape[0] == b.shape[1] == 3 and b.abs().min() > 0
            x = x + 2 * b @ a
        assert_close(last[name], x)
    assert [m["kl"] > 1e-6 for m in steps[1:]] == [True] * 3 and steps[1]["kl"] < steps[3]["kl"]
    from run import lora as adapters
    from run import pretrained
    trained, base = (pretrained.load(folder) for folder in (tmp_path / "whole", warm))
    ids = torch.arange(10)[None]
    before = base(ids)
    adapters.adapt(base, 3, torch.Generator().manual_seed(0))
    assert_close(base(ids), before)                             # B begins at 0
    for name, layer in base.named_modules():
        if type(layer) is adapters.Adapted:
            for which in ("lora_a", "lora_b"):
                getattr(layer, which).data.copy_(held[f"policy.{name}.{which}"])
    assert_close(base(ids), trained(ids), atol=1e-5, rtol=1e-4)
    first = adapters.base(base)
    assert_close(first(ids), before)
    assert {id(p) for p in first.parameters()} == {id(p) for p in base.parameters()}


def test_a_new_parameter_is_trained_resumed_and_started_from(changed, warm, tmp_path):
    """From a model that lacks it, and from a new one."""
    grpo = changed(PARAMETER)
    pretrained = importlib.import_module("run.pretrained")

    def hot(where):
        return pretrained.load(where).layers[0].self_attn.temperature
    grpo.main(flags({**SMALL, "warm_steps": 0, "init": warm, "steps": 0, "out": tmp_path / "begun"}))
    begun = hot(tmp_path / "begun")
    assert begun.shape == (2, 1) and (begun == 1).all()
    whole = run(grpo, tmp_path / "whole", init=warm, steps=4)[1:]
    assert all(m["mismatch"] < 1e-4 for m in whole) and (hot(tmp_path / "whole") != 1).all()
    run(grpo, tmp_path / "half", init=warm, steps=2)
    grpo.main(flags(dict(steps=4, out=tmp_path / "half")) + ["--resume"])
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "half" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    run(grpo, tmp_path / "new", steps=1)
    new = hot(tmp_path / "new")
    assert (new != 1).all() and (new - 1).abs().max() < 0.5


def test_the_three_ways_to_log(changed, warm, tmp_path):
    """The lines of the table, in a copy of the code: a mean over tokens, over rows, and a number."""
    of_loss, of_rollout, of_step = re.findall(r"\| `(stats\[.*?)` \|$", PAGE, re.M)
    folder = copy(tmp_path / "code")
    for file, line, before in (("grpo.py", of_loss, "    return loss, stats, logp\n"),
                               ("run/report.py", of_rollout, "    return dist.means(stats)\n"),
                               ("grpo.py", of_step, "    return batch, stats\n")):
        text = (folder / file).read_text()
        assert text.count(before) == 1
        (folder / file).write_text(text.replace(before, f"    {line}\n{before}"))
    for m in run(changed(), tmp_path / "out", init=warm, steps=2, epochs=2)[1:]:
        assert 0 < m["moved"] < 1 and 0 < m["long"] < 1 and m["lr"] == 1e-3


def test_dropout_is_on_in_the_warm_start_alone(changed, tmp_path):
    """The page's lines, in a copy of the code. The run goes through; the warm start is another one than without."""
    drop, seed = re.findall(r"`(F\.dropout\(.*?\)|torch\.manual_seed\(.*?\))`", PAGE)
    folder = copy(tmp_path / "code")
    for file, line, other in (("model.py", "        return x + self.mlp(self.post_attention_layernorm(x))\n",
                               f"        new = self.mlp(self.post_attention_layernorm(x))\n        return x + {drop}\n"),
                              ("run/setup.py", "    for step in range(steps):\n",
                               f"    for step in range(steps):\n        {seed}\n")):
        text = (folder / file).read_text()
        assert text.count(line) == 1
        (folder / file).write_text(text.replace(line, other))
    steps = run(changed(), tmp_path / "with", warm_steps=20, steps=1)
    assert len(steps) == 2 and steps[1]["mismatch"] < 1e-4
    run(sys.modules["grpo"], tmp_path / "again", warm_steps=20, steps=1)
    run(unchanged, tmp_path / "without", warm_steps=20, steps=1)
    one, same, other = ((tmp_path / x / "warm_start" / "model.safetensors").read_bytes()
                        for x in ("with", "again", "without"))
    assert one == same != other


def test_attention_that_is_changed_in_both_paths_runs(changed, tmp_path):
    grpo = changed(WITHOUT_CACHE, WITH_CACHE)
    steps = run(grpo, tmp_path / "out", warm_steps=20, steps=2)[1:]
    assert len(steps) == 2 and all(m["mismatch"] < 1e-4 for m in steps)
    shape = grpo.model.GPTConfig(n_layer=1, n_kv_head=1)
    gpt, W = grpo.model.GPT(shape, torch.Generator().manual_seed(0)), grpo.model.WINDOW
    ids = torch.arange(2 * W).repeat(2, 1)
    ids[1, 0] = 99
    a, b = (gpt(row[None])[0] for row in ids)        # each alone, so that both are rounded alike
    assert [*(a != b).any(-1)] == [True] * W + [False] * W      # column 0 is seen from W columns


@pytest.fixture
def board(monkeypatch):
    """A stand-in for the module wandb, and what it was told: its settings, then the metrics."""
    begun, logged = [], []

    def init(**settings):
        begun.append(settings)
        return SimpleNamespace(log=lambda stats, step: logged.append({"step": step, **stats}))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return begun, logged


def test_the_board_gets_the_metrics(changed, warm, tmp_path, board, monkeypatch):
    grpo, out, (begun, logged) = changed(BOARD), tmp_path / "out", board
    assert run(grpo, out, init=warm, steps=2) == logged and len(logged) == 3
    assert begun[0]["config"] == json.loads((out / "run.json").read_text())["config"]
    assert begun[0]["name"] == str(out) and begun[0]["mode"] is None
    monkeypatch.setattr(grpo.dist, "rank", lambda: 1)     # the second of two ranks, which writes nothing
    cfg = grpo.make_config(**{**SMALL, "warm_steps": 0}, init=str(warm), steps=1, out=str(out))
    grpo.train(cfg)
    assert begun[1]["mode"] == "disabled"


def test_all_changes_at_once(changed, warm, tmp_path, board):
    steps = run(changed(*DIFFS), tmp_path / "out", init=warm, algo="cispo", kl="loss", beta=0.2,
                beta_steps=2, entropy_coef=0.01, top_k=20, lora_rank=3, lr_warmup=1, epochs=2, steps=2)[1:]
    assert [m["beta"] for m in steps] == pytest.approx([0.1, 0.2]) and len(board[1]) == 3
    assert all(m["mismatch"] < 1e-4 and m["grad_norm"] > 0 for m in steps)


def test_the_script_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    *_, code, _ = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    Path("notebook.py").write_text(code)
    runpy.run_path("notebook.py")
    said = capsys.readouterr().out
    rows = re.findall(r"'\d\*\d=.*'  +reward (\S+)  advantage (\S+)$", said, re.M)
    reward, adv = torch.tensor([[float(x) for x in row] for row in rows]).T
    assert len(rows) == 8 and reward.max() > reward.min()
    assert_close(adv, (reward - reward.mean()) / reward.std(correction=0), atol=6e-4, rtol=0)
    assert "`make_config(algo=...)` on" in PAGE.partition(code)[2]
    off = float(re.search(r"^off -weight \* advantage by (\S+)$", said, re.M)[1])
    norm = float(re.search(r"norm of the gradient (\S+)$", said, re.M)[1])
    assert off < 1e-6 and norm > 0.01


def test_the_script_goes_on_after_an_interrupt(tmp_path, monkeypatch):
    """In one process, as in a notebook: it equals a run that was left alone."""
    monkeypatch.chdir(tmp_path)
    cfg = unchanged.make_config(**SMALL | dict(steps=4, held_out=4, samples=2, out="out/whole"))
    real = unchanged.train_step

    def interrupted(agent, problems, step):
        """Ctrl-C comes in the second step."""
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(agent, problems, step)

    monkeypatch.setattr(unchanged, "train_step", interrupted)
    with pytest.raises(dist.Stopped, match="after step 2"), checkpoint.running(cfg):
        unchanged.train(cfg)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    *_, code = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    Path("go_on.py").write_text(code)
    agent = runpy.run_path("go_on.py")["agent"]
    alone = unchanged.train(replace(cfg, out="out/alone", init="out/whole/warm_start", warm_steps=0))
    assert [m["step"] for m in map(json.loads, open("out/whole/metrics.jsonl"))] == [0, 1, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(agent.policy.parameters(), alone.policy.parameters(), strict=True))
