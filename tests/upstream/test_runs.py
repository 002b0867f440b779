"""Runs of the studies, experiments/studies/runs.py: what they measure and change; figure 7, and the gradients of the KL's forms."""
import dataclasses
import json
import math
import random
import statistics
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, agent_of, batch_of

sys.path.insert(0, str(ROOT / "experiments" / "studies"))
import bias  # noqa: E402
import critics  # noqa: E402
import data  # noqa: E402
import figure7  # noqa: E402
import grpo  # noqa: E402
import reward  # noqa: E402
import runs  # noqa: E402
import studies  # noqa: E402
from data import arithmetic  # noqa: E402
from run import checkpoint, config, dist, setup  # noqa: E402

TINY = ("--task experiments/studies/slips.py --difficulty 1 --n_embd 32 --n_layer 1 --warm_steps 80 --warm_lr 1e-2 --steps 2 "
        "--prompts 4 --group 2 --max_new 24 --held_out 4 --samples 2 --eval_every 1 --seed 1").split()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Tasks are paths from there; what a patch changes is put back."""
    monkeypatch.chdir(ROOT)
    for module, name in ((reward, "replay"), (reward, "refit"), (reward, "of_rule"), (dist, "copy_weights"), (critics, "fit"), (grpo, "sample"),
                         (grpo, "advantages"), (grpo, "train_step"), (grpo, "rollout"), (grpo, "new_agent"), (grpo, "refit_reward_model"),
                         (config, "algorithm"), (reward, "CHOICES"), (reward, "FIT_STEPS"), (grpo, "VALUE_COEF"), (warm_start, "WARM_BATCH")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(reward.rollout_labels, "__defaults__", reward.rollout_labels.__defaults__)


def test_a_run_is_kept_by_its_settings_however_they_are_spelled(tmp_path, monkeypatch):
    made = []

    def child(flags, folder):
        """Writes what `run` waits for."""
        made.append(folder.name)
        (folder / "warm_start").mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps({"made": made, "sources": runs.sources(), "start": 1, "start at 0.5": 2}))
    monkeypatch.setattr(runs, "start_child", child)
    for flags in (["--beta", "0.04"], ["--algo", "grpo"], ["--beta", "0.1"], ["--beta", "0.04", "--patch", "tries=2"]):
        runs.run([*TINY, *flags], 1, tmp_path)
    assert len(made) == 4 and made[0].startswith("warm-")           # one warm start, three runs
    assert json.loads((tmp_path / made[1] / "start.json").read_text()) == {"start": 1, "start at 0.5": 2}       # measured with the warm start
    runs.run(TINY, 2, tmp_path)
    assert len(made) == 6
    monkeypatch.setattr(runs, "start_child", lambda *_: pytest.fail("it is there"))
    assert [runs.run(TINY, seed, tmp_path)["made"] for seed in (2, 1)] == [made, made[:2]]
    with pytest.raises(pytest.fail.Exception, match="it is there"):
        monkeypatch.setattr(runs, "sources", lambda: "other code")          # what that made is made anew
        runs.run(TINY, 2, tmp_path)


def test_what_a_run_measures(tmp_path):
    """A whole one, as it is in its own process."""
    runs.child([*TINY, "--reward", "model", "--supervision", "process", "--labels", "rollouts", "--patch", "tries=2",
                "--out", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
    assert [p["step"] for p in found["points"]] == [0, 0, 1, 2] and len(found["steps"]["length"]) == 2
    tokens, seconds = ([p[x] for p in found["points"]] for x in ("tokens", "seconds"))
    assert tokens[:2] == [0, found["label tokens"]] and tokens[3] == pytest.approx(tokens[1] + 8 * sum(found["steps"]["length"]))
    assert 0 == seconds[0] < seconds[1] < seconds[2] < seconds[3]
    assert found["label tokens"] > 0 and "--patch" in found["flags"]
    assert {"greedy", "pass@1", "pass@8", "maj@8"} < {*found["final"]} and {"start", "start at 0.5"} < {*found} and found["quality"].keys() == {"start", "end"}
    assert abs(found["kl"]) < 1 and not (tmp_path / "checkpoint.safetensors").exists()
    row = studies.summary(found)
    assert row["quality"] == found["quality"] and row["points"] == found["points"] and row["length"] == pytest.approx(found["steps"]["length"][1], rel=1e-3)


@pytest.mark.parametrize("row, kept", (
    ("--reward model --iterations 2 --patch history=0.5 --patch reference=kept", 3 + 2),
    ("--algo ppo --critic separate --patch critic_lr=10", 3)))
def test_a_run_with_patches_goes_through(row, kept, tmp_path):
    (tmp_path / "start.json").write_text('{"start": {"greedy": 2.0}}')
    runs.child([*TINY, *row.split(), "--steps", "1" if "iterations" in row else "2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["start"] == {"greedy": 2.0} and "start at 0.5" not in found
    assert len(found["points"]) == kept and ("explained_variance" in found["steps"]) == ("ppo" in row)
    assert ("quality" in found) == ("model" in row)


@pytest.fixture
def short_run(tmp_path):
    """A folder of a run of two steps that rewards short completions, which are frequent before it."""
    (tmp_path / "short.py").write_text("from experiments.studies.slips import DEFAULTS, answer, demonstration, problems\n"
                                       "def reward(problem, completion):\n    return {'correct': len(completion) < 12}\n")
    grpo.main([*TINY, "--task", str(tmp_path / "short.py"), "--out", str(tmp_path / "run"), "--lr", "0.01", "--device", "cpu"])
    return tmp_path / "run"


def test_figure_7_is_of_a_run_before_and_after(short_run, tmp_path, monkeypatch):
    task, seed, found = figure7.shares(short_run, 4, 32)
    assert (task, seed) == ("short", 1) and found.keys() == {"before", "after"} and found["before"] != found["after"]
    ks = [2 ** i for i in range(6)]
    assert all(found[when].keys() == {"greedy", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks[1:])} for when in found)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "evaluate", lambda agent, problems: (Path(agent.cfg.init).name, len(problems), agent.cfg.samples))
        assert figure7.shares(short_run, 3, 7)[2] == {"before": ("warm_start", 3, 7), "after": ("run", 3, 7)}
        patch.setattr(grpo, "evaluate", lambda agent, problems: agent.cfg.temperature)
        assert figure7.shares(short_run, 3, 7) == ("short", 1, {"before": 1.0, "after": 1.0})
        assert figure7.shares(short_run, 3, 7, 0.5) == ("short at 0.5", 1, {"before": 0.5, "after": 0.5})
    rows = [*figure7.rows({"slips": {"1": {when: dict.fromkeys([f"{kind}@{K}" for kind in ("pass", "maj") for K in figure7.KS], x)
                                           for when, x in (("before", 0.25), ("after", 0.5))}}})]
    assert len(rows) == 6 and rows[2].startswith("| slips, pass@K, before | 25.0% |") and rows[5].count("50.0%") == len(figure7.KS)
    for bad in ((tmp_path / "no run",), (short_run, "--temperature", "0")):
        monkeypatch.setattr(sys, "argv", ["figure7.py", *map(str, bad), "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            figure7.main()
    alike = {when: dict.fromkeys(["greedy", *(f"{kind}@{K}" for kind in ("pass", "maj") for K in figure7.KS)], 0.5) for when in ("before", "after")}
    monkeypatch.setattr(figure7, "shares", lambda folder, problems, samples, temperature: (f"{folder.name} {temperature}", 1, alike))
    for more in ([], ["--temperature", "0.5"], ["--temperature", "0.7"]):
        monkeypatch.setattr(sys, "argv", ["figure7.py", str(short_run), "--out", str(tmp_path), *more])
        figure7.main()
    made = json.loads((tmp_path / "figure7.json").read_text())
    assert [*made["rows"]] == ["run None", "run 0.5", "run 0.7"] and made["command"]["run 0.5"].endswith("--temperature 0.5")


def test_the_interval_of_paired_differences():
    assert runs.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((1.0368, 4.9632), abs=1e-3)       # scipy.stats.t.interval
    assert runs.interval([2.0] * 5) == (2.0, 2.0)


def test_patches_change_what_they_say(monkeypatch):
    asked = []
    monkeypatch.setattr(reward, "replay", lambda history, rows, *more: asked.append(rows))
    runs.patch_history("0.5")
    reward.replay({}, 7, 4, None)
    runs.patch_tries("16")
    assert asked == [35] and reward.rollout_labels.__defaults__ == (16,)
    monkeypatch.setattr(dist, "copy_weights", lambda *given: asked.append(given))
    runs.patch_reference("kept")
    dist.copy_weights("ref", "policy")
    assert len(asked) == 1


@pytest.mark.parametrize("critic", ("shared", "separate"))
def test_a_critic_can_learn_at_a_rate_of_its_own(critic, tmp_path):
    cfg, patches = runs.read([*TINY, "--algo", "ppo", "--critic", critic, "--lr", "0.001", "--patch", "critic_lr=10"])
    runs.patch_critic_lr("10")
    task = data.load_task(cfg.task)
    cfg, task, encoding, policy, *_ = setup.begin(dataclasses.replace(cfg, out=str(tmp_path)), task, None)
    agent = grpo.new_agent(cfg, task, encoding, policy)
    ours, own = agent.opt.param_groups
    assert ours["lr"] == 0.001 and own["lr"] == 0.01 and own["betas"] == ours["betas"]
    assert [id(p) for p in ours["params"]] == [id(p) for p in policy.parameters() if p.requires_grad]
    assert [id(p) for p in own["params"]] == [id(p) for p in agent.critic.parameters() if p.requires_grad]


def test_what_a_critic_explains_is_measured_against_the_returns_themselves():
    """By hand: two rows of three tokens, the reward at their ends."""
    mask, value = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[0.5, 0.6, 0.7], [0.5, 0.4, 0.1]])
    score = torch.tensor([[0.0, 0, 1], [0, 0, 0]])
    watch = runs.Watch()
    cfg = grpo.make_config(algo="ppo", lam=0.5, group=2, adv_scale="none")
    given = score, score.new_tensor([[0, 0, 1], [0, 0, 1]]).bool(), mask, torch.zeros(2, 3), value, cfg
    assert all(torch.equal(a, b) for a, b in zip(grpo.advantages(*given), watch.advantages(*given)))
    to_come = [1, 1, 1, 0, 0, 0]
    left = statistics.variance(a - b for a, b in zip(to_come, value.flatten().tolist()))
    assert watch.known == [pytest.approx(1 - left / statistics.variance(to_come), rel=1e-4)]
    watch.measured_advantages(score * 0, *given[1:])
    assert watch.known[1] is None           # there is nothing to explain


def test_what_a_reward_model_costs_is_counted_where_it_is_fitted():
    results = {step: {"pass@1": x, "greedy": 2 * x} for step, x in ((0, 0.1), (2, 0.2), (4, 0.3))}
    metrics = [{"step": n, "length": 5.0} | results.get(n, {}) for n in range(5)]
    spent = [(0, 100, 3.0), (1, 110, 4.0), (2, 120, 5.0), (2, 170, 7.0), (3, 180, 8.0), (4, 190, 9.0)]
    found = runs.points_of(metrics, spent)
    assert [tuple(p.values())[:4] for p in found] == [(0, 0, 0.0, 0.1), (0, 100, 3.0, 0.1), (2, 120, 5.0, 0.2), (2, 170, 7.0, 0.2), (4, 190, 9.0, 0.3)]
    assert [p["greedy"] for p in found] == [0.2, 0.2, 0.4, 0.4, 0.6]
    free = [(0, 0, 0.5), (1, 10, 1.0), (2, 20, 2.0), (2, 20, 2.5), (3, 30, 3.0), (4, 40, 4.0)]     # an iteration that fits nothing
    assert [p["tokens"] for p in runs.points_of(metrics, free)] == [0, 20, 40]


def test_all_that_is_sampled_counts_but_for_evaluations(tmp_path):
    """By the masks of a run's samples: a fit's, a critic's, the rollouts'."""
    cfg, _ = runs.read([*TINY, "--reward", "model", "--adv_scale", "none", "--iterations", "2",
                        "--steps", "1", "--out", str(tmp_path)])
    drawn, inside, sample = [], [], grpo.sample
    real = {name: getattr(grpo, name) for name in ("refit_reward_model", "train_step")}

    def counting(*given, **named):
        """`sample`."""
        batch = sample(*given)
        drawn.append((inside[-1] if inside else "evaluation", int(batch.mask.sum())))
        return batch

    def within(name):
        """A function that says where it is."""
        def call(*given):
            inside.append(name)
            found = real[name](*given)
            inside.pop()
            return found
        return call
    grpo.sample = counting
    for name in real:
        setattr(grpo, name, within(name))
    watch = runs.Watch()
    grpo.train(cfg)
    tokens = {name: sum(n for where, n in drawn if where == name) for name in ("refit_reward_model", "train_step", "evaluation")}
    assert watch.tokens == tokens["refit_reward_model"] + tokens["train_step"] and tokens["evaluation"] > 0
    assert watch.label_tokens == tokens["refit_reward_model"] and [step for step, *_ in watch.spent] == [0, 1, 1, 2]
    assert watch.spent == sorted(watch.spent) and watch.spent[-1][1] == watch.tokens


def test_the_quality_of_a_reward_of_steps(monkeypatch):
    """By hand, over lines of working alone: the second row is a guess."""
    truth = torch.tensor([[1.0, 0, 1, 0, 1], [0, 0, 0, 0, 1]])
    score = torch.tensor([[2.0, -1, 0.5, 1, -2], [0, 0, 0, 0, 9]])
    ends = torch.tensor([[True] * 5, [False] * 4 + [True]])
    batch = batch_of(ends, texts=["\n1", "~1"])
    monkeypatch.setattr(runs, "completions", lambda *_: batch)
    monkeypatch.setattr(reward, "of_rule", lambda *_: (truth, ends))
    monkeypatch.setattr(reward, "scores", lambda *_: score)
    found = runs.quality(agent_of(grpo.make_config(supervision="process")), None, [])
    p = [1 / (1 + math.exp(-x)) for x in score[0].tolist()]
    gap = [abs(p[0] - 1), abs(p[1] - 0), abs(p[2] - 1), abs(p[3] - 0), abs(p[4] - 1)]
    assert found["auc"] == pytest.approx(3 / 6) and found["calibration"] == pytest.approx(sum(gap) / 5)
    assert found["steps"] == 5 and found["true"] == pytest.approx(0.6)
    of_outcomes = agent_of(grpo.make_config())
    found = runs.quality(of_outcomes, None, [])         # the guess counts, too
    assert found == {"auc": pytest.approx(5 / 8), "true": pytest.approx(4 / 6), "steps": 6}
    truth.fill_(1)
    assert runs.quality(of_outcomes, None, [])["auc"] is None


def test_careless_people_slip():
    task = data.load_task("experiments/studies/slips.py")
    source, problem = random.Random(0), arithmetic.Problem("47*58=", "2726")
    shown = [x for x in (task.demonstration(problem, source) for _ in range(4000)) if x.startswith("\n")]
    right = sum(task.reward(problem, x)["correct"] for x in shown) / len(shown)
    assert right == pytest.approx(0.97 ** 9, abs=0.03) and arithmetic.SLIP == 0.0005       # 9 numbers are written
    assert task.problems() == arithmetic.problems() and task.reward(problem, shown[0]).keys() == {"correct"}


def test_only_k1_in_the_reward_has_the_exact_gradient():
    found = bias.errors(0.5, seed=0)
    assert found["reward, k1"]["error"] < 1e-5 and found["loss, k1"] == {"error": pytest.approx(1, abs=1e-5), "cosine": 0}
    assert all(x["error"] > 0.05 for form, x in found.items() if form != "reward, k1")
