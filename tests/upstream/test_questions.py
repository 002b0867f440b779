"""The studies of experiments/studies/questions.py: their rows, what they measure, and what they change."""
import copy
import dataclasses
import json
import math
import random
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "studies"))
import bias  # noqa: E402
import data  # noqa: E402
import figure7  # noqa: E402
import grpo  # noqa: E402
import questions  # noqa: E402
import reward  # noqa: E402
import runs  # noqa: E402
import studies  # noqa: E402
import variance  # noqa: E402
from data import arithmetic  # noqa: E402
from run.models import ScalarHead  # noqa: E402

TINY = ("--task experiments/studies/slips.py --difficulty 1 --n_embd 32 --n_head 4 --n_layer 1 --warm_steps 20 --warm_batch 8 --steps 2 "
        "--prompts 4 --group 2 --max_new 24 --held_out 4 --samples 2 --eval_every 1 --seed 1").split()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Tasks are paths from there; what a patch changes is put back."""
    monkeypatch.chdir(ROOT)
    for module, name in ((reward, "replay"), (grpo, "begin_iteration"), (grpo, "sample"), (grpo, "advantages"), (grpo.shard, "copy_weights"),
                         (reward, "fit"), (reward, "of_steps"), (grpo, "train_step"), (grpo, "rollout"), (grpo.agents, "new_agent"), (grpo.variants, "install")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(reward.rollout_labels, "__defaults__", reward.rollout_labels.__defaults__)


@pytest.mark.parametrize("question", questions.QUESTIONS)
def test_the_rows_of_a_question_can_run_and_differ(question):
    found = [runs.read([*questions.SETTING, *row.split()]) for row in questions.QUESTIONS[question].values()]
    assert len({json.dumps([vars(cfg), patches]) for cfg, patches in found}) == len(found) > 1
    for cfg, patches in found:
        assert max(cfg.prompts, cfg.fit_prompts) < 7000         # problems of two digits that are left to train on
        assert all(patch.split("=")[0] in runs.PATCHES for patch in patches)


def test_what_rows_are_compared_with_is_there():
    assert all(name in questions.QUESTIONS[question] for question, names in questions.BASES.items() for name in names)


def test_group_sizes_have_the_same_number_of_completions():
    for name, row in questions.QUESTIONS["1"].items():
        cfg, _ = runs.read([*questions.SETTING, *row.split()])
        assert cfg.prompts * cfg.group * cfg.steps == 80 * 256 and cfg.steps // cfg.eval_every in (8, 10), name


def test_a_run_is_kept_by_its_settings_however_they_are_spelled(tmp_path, monkeypatch):
    made = []

    def child(flags, folder):
        """Writes what `run` waits for."""
        made.append(folder.name)
        (folder / "warm_start").mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps({"made": made, "sources": runs.sources()}))
    monkeypatch.setattr(runs, "start_child", child)
    for flags in (["--beta", "0.04"], ["--algo", "grpo"], ["--beta", "0.1"], ["--beta", "0.04", "--patch", "tries=2"]):
        runs.run([*TINY, *flags], 1, tmp_path)
    assert len(made) == 4 and made[0].startswith("warm-")           # one warm start, three runs
    runs.run(TINY, 2, tmp_path)
    assert len(made) == 6
    monkeypatch.setattr(runs, "start_child", lambda *_: pytest.fail("it is there"))
    assert [found["made"] for found in runs.run_all([(TINY, 2), (TINY, 1)], tmp_path)] == [made, made[:2]]
    with pytest.raises(pytest.fail.Exception, match="it is there"):
        monkeypatch.setattr(runs, "sources", lambda: "other code")          # what that made is made anew
        runs.run(TINY, 2, tmp_path)


def test_a_run_that_fails_is_left_out(tmp_path, monkeypatch, capsys):
    def child(flags, folder):
        raise RuntimeError("failed, see there")
    monkeypatch.setattr(runs, "start_child", child)
    assert runs.run_all([(TINY, 1)], tmp_path) == [None] and "seed 1: failed, see there" in capsys.readouterr().out


def test_what_a_run_measures(tmp_path):
    """A whole one, as it is in its own process."""
    runs.child([*TINY, "--reward", "model", "--supervision", "process", "--fit_prompts", "10", "--labels", "rollouts", "--patch", "tries=2",
                "--out", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
    assert [p["step"] for p in found["points"]] == [0, 0, 1, 2] and len(found["steps"]["length"]) == 2
    tokens, seconds = ([p[x] for p in found["points"]] for x in ("tokens", "seconds"))
    assert tokens[:2] == [0, found["label tokens"]] and tokens[3] == pytest.approx(tokens[1] + 8 * sum(found["steps"]["length"]))
    assert 0 == seconds[0] < seconds[1] < seconds[2] < seconds[3]
    assert found["label tokens"] > 0 and found["peak"] > 1e8 and "--patch" in found["flags"]
    assert {*runs.MEASURED} < {*found["final"]} and found["quality"].keys() == {"start", "end"}
    assert abs(found["kl"]) < 1 and not (tmp_path / "checkpoint.safetensors").exists()
    row = questions.summary(found)
    assert runs.area(row) == runs.area(found) and row["calibration end"] == found["quality"]["end"]["calibration"] and row["points"] == found["points"]
    assert row["length early"] is None and row["length late"] == pytest.approx(found["steps"]["length"][1], rel=1e-3)
    assert row["rm_accuracy all"] == pytest.approx(found["steps"]["rm_accuracy"][0], rel=1e-3)


@pytest.mark.parametrize("row, kept", (
    ("--reward model --fit_prompts 10 --iterations 2 --patch refit=never", 3 + 1),
    ("--reward model --fit_prompts 10 --iterations 2 --patch history=0.5 --patch reference=kept --patch passes=2", 3 + 2),
    ("--algo ppo --critic separate --patch critic_lr=10", 3)))
def test_a_run_with_patches_goes_through(row, kept, tmp_path):
    runs.child([*TINY, *row.split(), "--steps", "1" if "iterations" in row else "2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "result.json").read_text())
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
    task, seed, found = figure7.shares(short_run, 4, 4)
    assert (task, seed) == ("short", 1) and found.keys() == {"before", "after"} and found["before"] != found["after"]
    assert all(found[when].keys() == {"greedy", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"} for when in found)
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
    for more in ([], ["--temperature", "0.5"], ["--temperature", "0.7"]):           # an odd number of plots
        monkeypatch.setattr(sys, "argv", ["figure7.py", str(short_run), "--out", str(tmp_path), *more])
        figure7.main()
    made = json.loads((tmp_path / "figure7.json").read_text())
    assert [*made["rows"]] == ["run None", "run 0.5", "run 0.7"] and made["command"]["run 0.5"].endswith("--temperature 0.5")


def test_the_noise_of_baselines(short_run, tmp_path, monkeypatch):
    """Of the first and the last policy of a run, each in a process of its own, measured once."""
    asked = []

    def child(command, **_):
        asked.append(command[4])
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["variance.py", *map(str, command[2:])])
            variance.main()
    monkeypatch.setattr(variance, "SIZE", dict(prompts=4, group=16))
    monkeypatch.setattr(variance, "fitted_critic", lambda agent, *_: (0.5, ScalarHead(32, copy.deepcopy(agent.policy))))
    monkeypatch.setattr(variance.subprocess, "run", child)
    monkeypatch.setattr(variance.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(runs, "run_all", lambda jobs, out: [{"flags": ["--out", str(short_run)]} for _ in jobs])
    for rollouts in ("2", "3", "3"):
        monkeypatch.setattr(sys, "argv", ["variance.py", "--seeds", "1", "--rollouts", rollouts, "--out", str(tmp_path)])
        variance.main()
    assert asked == ["start", "end"] * 2            # the third time they are there
    made = json.loads((tmp_path / "variance.json").read_text())
    before, after = (made["policies"][name]["1"] for name in ("start", "end"))
    assert before != after and after[variance.TRUE]["cosine"] == pytest.approx(1) != after["none"]["cosine"]
    assert before["critic"]["explained"] == 0.5 and before["group"]["explained"] is None
    assert after["group"]["noise"] != after["group, all tokens alike"]["noise"]         # the lengths differ
    table = [*variance.lines(made)]
    assert len(table) == 2 + len(variance.BASELINES) and len({line.count("|") for line in table}) == 1


def test_noise_adds_nothing_to_a_product_of_means():
    """Gradients that are nothing but noise, the same under two baselines."""
    made = [*torch.randn(400, 50, generator=torch.Generator().manual_seed(0))]
    of_all, of_halves = torch.stack(made).mean(0), variance.halves(made)
    assert of_all @ of_all > 0.08 and abs(variance.product(of_halves, of_halves)) < 0.08
    assert variance.product(variance.halves([torch.tensor([x]) for x in (1.0, 2.0, 3.0, 5.0)]),
                            variance.halves([torch.tensor([x]) for x in (0.0, 1.0, 0.0, 3.0)])) == (2 * 2 + 3.5 * 0) / 2


def points(*levels):
    return {"points": [{"step": 10 * i, "tokens": 100.0 * i * i, "seconds": 1.0 * i, "pass@1": x} for i, x in enumerate(levels)]}


def test_areas_and_how_far_a_level_is():
    run = points(0.2, 0.4, 0.4, 0.8)
    assert runs.area(run) == pytest.approx((0.3 + 0.4 + 0.6) / 3)
    assert runs.until(run, 0.3, "step") == pytest.approx(5) and runs.until(run, 0.7, "tokens") == pytest.approx(400 + 0.75 * 500)
    assert runs.until(run, 0.1, "step") == 0 and runs.until(run, 0.9, "step") is None


def result_of(*levels):
    """What `runs.run` gives, as far as a table needs it."""
    final = dict.fromkeys(runs.MEASURED, levels[-1]) | {"greedy": levels[-1] / 2}
    return points(*levels) | {"final": final, "kl": 1.5, "peak": 2 ** 30, "label tokens": 0,
                              "steps": {"length": [30.0, 40.0, 50.0, 60.0], "accuracy": [0.1, None, 0.2, 0.3], "reward": [0.1] * 4, "explained_variance": [-0.1, 0, 0.1, 0.5]}}


def test_the_table_and_the_figure_of_a_question(tmp_path, monkeypatch):
    """A row that failed is left out; differences are those of the same seeds."""
    ends = {"": (0.8, 0.6), "--algo ppo": (0.9, 0.81), "--algo a2c": None, "--algo rloo": (0.8, 0.7)}
    monkeypatch.setitem(questions.QUESTIONS, "1", {"16 of 16": "", "PPO": "--algo ppo", "critic": "--algo a2c", "RLOO": "--algo rloo"})
    monkeypatch.setitem(questions.BASES, "1", ("PPO",))

    def made(jobs, out):
        """The end of a run by its flags and its seed."""
        rows = [(ends[" ".join(flags[len(questions.SETTING):])], seed) for flags, seed in jobs]
        return [found and result_of(0.2, found[seed - 1]) for found, seed in rows]
    monkeypatch.setattr(runs, "run_all", made)
    found = questions.answer("1", (1, 2), tmp_path)
    assert [*found["rows"]] == ["16 of 16", "PPO", "RLOO"] and found["flags"]["critic"] == "--algo a2c"
    head, rule, before, first, second, third = questions.lines("1", found)
    assert head.count("|") == rule.count("|") == before.count("|") == first.count("|") == second.count("|") == third.count("|")
    assert before.startswith("| before RL | 20.0% (20.0% to 20.0%) | |")
    assert "| steps to 68% / 77% |" in head                 # 80 % and 90 % of 85 %
    assert first.startswith("| 16 of 16 (base) | 70.0% (60.0% to 80.0%) |  | 45.0% |  | 35.0% |  | never / never | never / never |")
    assert second.startswith("| PPO (base) | 85.5% (81.0% to 90.0%) | +15.5 (-54.4 to +85.4) | 52.8% | +7.8 (-27.2 to +42.7) "
                             "| 42.8% | +7.8 (-27.2 to +42.7) | 7 / 9 |")
    assert third.startswith("| RLOO | 75.0% (70.0% to 80.0%) | **-10.5 (-16.9 to -4.1)** |")       # to PPO
    assert second.endswith("| 1.50 | 60 | 1.00 |  | -0.10 | 0.50 |")
    found["rows"]["RLOO"]["1"]["kl"] = None         # half of them are too few for a median
    assert [*questions.lines("1", found)][5].endswith("|  | 60 | 1.00 |  | -0.10 | 0.50 |")
    found["rows"]["RLOO"]["1"]["kl"] = 1.5
    monkeypatch.setattr(questions, "AT_ONCE", ("1",))
    head, _, _, first, *_ = questions.lines("1", found)
    assert "steps to" not in head and head.count("|") == first.count("|") and "| 35.0% |  | 70.0% | 70.0% |" in first
    questions.write(found, tmp_path / "1.json")
    assert json.loads((tmp_path / "1.json").read_text()) == found
    assert [len(x) for x in questions.sixteenths(list(range(40)))] == [2, 3] * 8 and questions.mean([1, None, 2.00001]) == 1.5


def test_a_difference_is_bold_where_its_interval_leaves_0_out():
    base = {"1": {"pass@1": 0.0}, "2": {"pass@1": 0.0}, "3": {"pass@1": 0.0}}
    for ends, bold in (((0.1, 0.12, 0.14), True), ((-0.1, -0.11, -0.1), True), ((0.1, 0.2, 0.4), False), ((0.1, 0.1, -0.1), False)):
        row = {seed: {"pass@1": x} for seed, x in zip(base, ends)}
        assert questions.apart(row, base, questions.last).startswith("**") == bold
    assert questions.apart({"2": {"pass@1": 0.1}}, base, questions.last) == "+10.0"        # of one there is no interval


@pytest.mark.parametrize("question", questions.QUESTIONS)
def test_each_question_has_a_figure(question, tmp_path):
    pytest.importorskip("matplotlib")
    run = questions.summary(result_of(0.2, 0.5) | {"quality": {"start": {"auc": 0.7, "calibration": 0.1}}})
    found = {"rows": {name: {"1": run, "2": run} for name in questions.QUESTIONS[question]}}
    questions.draw(question, found, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 5000
    for _, names, *_ in questions.PANELS[question]:
        assert names is None or questions.among(found["rows"], *names)


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
    monkeypatch.setattr(grpo, "begin_iteration", lambda agent, problems, iteration: asked.append(iteration))
    monkeypatch.setattr(grpo.shard, "copy_weights", lambda *given: asked.append(given))
    runs.patch_refit("never")
    agent = grpo.agents.Agent(None, None, None, "policy", ref="ref")
    grpo.begin_iteration(agent, [], 0)
    grpo.begin_iteration(agent, [], 1)
    assert asked == [35, 0, ("ref", "policy")]
    runs.patch_reference("kept")
    grpo.begin_iteration(agent, [], 2)
    assert len(asked) == 3
    monkeypatch.setattr(reward, "fit", lambda reward_model, data, K: asked.append((data["ids"].tolist(), K)))
    runs.patch_passes("3")
    reward.fit(None, {"ids": torch.tensor([[1], [2]])}, 1)
    assert asked[3] == ([[1], [2]] * 3, 1)


@pytest.mark.parametrize("critic", ("shared", "separate"))
def test_a_critic_can_learn_at_a_rate_of_its_own(critic, tmp_path):
    cfg, patches = runs.read([*TINY, "--algo", "ppo", "--critic", critic, "--lr", "0.001", "--patch", "critic_lr=10"])
    runs.patch_critic_lr("10")
    task = data.load_task(cfg.task)
    cfg, encoding, policy, *_ = grpo.agents.begin(dataclasses.replace(cfg, out=str(tmp_path)), task, None)
    agent = grpo.agents.new_agent(cfg, task, encoding, policy)
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
    cfg, _ = runs.read([*TINY, "--reward", "model", "--adv_scale", "none", "--fit_prompts", "10", "--choices", "2", "--iterations", "2",
                        "--steps", "1", "--out", str(tmp_path)])
    drawn, inside, sample = [], [], grpo.sample
    real = {name: getattr(grpo, name) for name in ("begin_iteration", "train_step")}

    def counting(*given):
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
    tokens = {name: sum(n for where, n in drawn if where == name) for name in ("begin_iteration", "train_step", "evaluation")}
    assert watch.tokens == tokens["begin_iteration"] + tokens["train_step"] and tokens["evaluation"] > 0
    assert watch.label_tokens == tokens["begin_iteration"] and [step for step, *_ in watch.spent] == [0, 1, 1, 2]
    assert watch.spent == sorted(watch.spent) and watch.spent[-1][1] == watch.tokens


def test_the_quality_of_a_reward_of_steps(monkeypatch):
    """By hand, over lines of working alone: the second row is a guess."""
    truth = torch.tensor([[1.0, 0, 1, 0, 1], [0, 0, 0, 0, 1]])
    score = torch.tensor([[2.0, -1, 0.5, 1, -2], [0, 0, 0, 0, 9]])
    ends = torch.tensor([[True] * 5, [False] * 4 + [True]])
    batch = grpo.Batch(None, None, None, None, None, texts=["\n1", "~1"])
    monkeypatch.setattr(runs, "completions", lambda *_: batch)
    monkeypatch.setattr(reward, "of_steps", lambda *_: (truth, ends))
    monkeypatch.setattr(reward, "scores", lambda *_: score)
    found = runs.quality(grpo.agents.Agent(grpo.make_config(supervision="process"), None, None, None), None, [])
    p = [1 / (1 + math.exp(-x)) for x in score[0].tolist()]
    gap = [abs(p[0] - 1), abs(p[1] - 0), abs(p[2] - 1), abs(p[3] - 0), abs(p[4] - 1)]
    assert found["auc"] == pytest.approx(3 / 6) and found["calibration"] == pytest.approx(sum(gap) / 5)
    assert found["steps"] == 5 and found["true"] == pytest.approx(0.6)
    of_outcomes = grpo.agents.Agent(grpo.make_config(), None, None, None)
    found = runs.quality(of_outcomes, None, [])         # the guess counts, too
    assert found == {"auc": pytest.approx(5 / 8), "true": pytest.approx(4 / 6), "steps": 6}
    truth.fill_(1)
    assert runs.quality(of_outcomes, None, [])["auc"] is None


def test_careless_people_slip():
    task = data.load_task("experiments/studies/slips.py")
    cfg = grpo.make_config(task="experiments/studies/slips.py")
    source, problem = random.Random(0), arithmetic.Problem("47*58=", "2726")
    shown = [x for x in (task.demonstration(problem, source) for _ in range(4000)) if x.startswith("\n")]
    right = sum(task.reward(problem, x)["correct"] for x in shown) / len(shown)
    assert right == pytest.approx(0.97 ** 9, abs=0.03) and arithmetic.SLIP == 0.0005       # 9 numbers are written
    assert task.problems(cfg) == arithmetic.problems(cfg) and task.reward(problem, shown[0]).keys() == {"correct"}


def test_development_problems_are_cut_from_the_training_ones():
    cfg = grpo.make_config(task="experiments/studies/development.py")
    train, held_out = data.load_task(cfg.task).problems(cfg)
    rest, never = arithmetic.problems(cfg)
    pairs = [{frozenset(p.prompt[:-1].split("*")) for p in part} for part in (train, held_out, never)]
    assert len(train) + len(held_out) == len(rest) and len(held_out) == 500
    assert not pairs[0] & pairs[1] and not (pairs[0] | pairs[1]) & pairs[2]


def test_only_k1_in_the_reward_has_the_exact_gradient():
    found = bias.errors(0.5, seed=0)
    assert found["reward, k1"]["error"] < 1e-5 and found["loss, k1"] == {"error": pytest.approx(1, abs=1e-5), "cosine": 0}
    assert all(x["error"] > 0.05 for form, x in found.items() if form != "reward, k1")


# ------------------------------------------------------------------------------- what the docs say of them

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("questions", "derivation")}
SECTIONS = {title.replace("Question ", "").replace("Figure ", "figure").replace("The ", ""): text for title, text in
            re.findall(r"^## (Question \d|Figure \d|The ladder)(.*?)(?=^## |\Z)", PAGES["questions"], re.M | re.S)}
MORE = {"2": ("bias", bias.lines), "6": ("variance", variance.lines)}       # what else a section has a table of
NUMBER = r"[0-9]+\.[0-9]+"


def kept(name):
    return json.loads((ROOT / "experiments" / "studies" / "answers" / f"{name}.json").read_text())


def tables(name):
    """Of a section: its command, and the tables that it has a figure of, by result."""
    if name == "figure7":
        return "python experiments/studies/figure7.py", {name: [*figure7.rows(kept(name)["rows"])]}
    names = questions.among(questions.QUESTIONS, name, f"{name}b")
    return f"python experiments/studies/questions.py {' '.join(names)} --readme`", {its: [*questions.lines(its, kept(its))] for its in names}


def told(question):
    """The rows whose pass@1 at the end differs significantly from that of the base above them."""
    rows = (line.split(" | ") for line in questions.lines(question, kept(question)))
    return {cells[0][2:].removesuffix(" (base)") for cells in rows if any(cell.startswith("**") for cell in cells[2:3])}


def gap(question, row, base, of=questions.last):
    """The mean of a paired difference, in points, and whether it differs significantly from 0."""
    rows = kept(question)["rows"]
    text = questions.apart(rows[row], rows[base], of)
    return float(text.strip("*").split(" ")[0]), "**" in text


def up(question, row, base, of=questions.last):
    """A row is significantly above another."""
    points, told_apart = gap(question, row, base, of)
    return told_apart and points > 0


def equal(question, row, base, of=questions.last):
    """A row does not differ significantly from another."""
    return not gap(question, row, base, of)[1]


def middle(question, row, of):
    """The median over the seeds."""
    return statistics.median(of(run) if callable(of) else run[of] for run in kept(question)["rows"][row].values())


@pytest.mark.parametrize("name", SECTIONS)
def test_an_answer_says_what_was_measured(name):
    """Its table is that of the results, and so is each number with a point in its text."""
    text, (command, own) = SECTIONS[name], tables(name)
    assert f"`{command}" in text and all(f"](../experiments/studies/answers/{its}.png)" in text for its in own)
    if name in MORE:
        file, lines = MORE[name]
        own[file] = [*lines(kept(file))]
    assert all("\n".join(rows) in text for rows in own.values())
    table = [line for rows in own.values() for line in rows]
    prose = "".join(line for line in text.splitlines() if not line.startswith("|"))
    assert not set(re.findall(NUMBER, prose)) - set(re.findall(NUMBER, "".join(table)))
    asked = {row for its in own for row in questions.QUESTIONS.get(its, ())}
    assert {line.split(" | ")[0][2:].removesuffix(" (base)") for line in table if line.startswith("| ")} >= asked      # none is left out


def test_with_a_rule_rows_differ_in_how_sure_they_are():
    """But for the second rung of the ladder, all that are told of are equally good in greedy answers."""
    page = " ".join(PAGES["questions"].split())
    ends = {(name, row): (middle(name, row, "greedy"), middle(name, row, "pass@1")) for name in ("1", "2", "6", "figure5", "ladder")
            for row in kept(name)["rows"]}
    assert {row for name in ("1", "2", "6", "figure5", "ladder") for row in kept(name)["rows"] if middle(name, row, "maj@8") < 0.91} == {
        "loss, k3, 1.0", "loss, k2, 1.0", "loss, ratio*k3, 1.0", "reward, k1, 1.0"} and "which falls below 91 % only with a KL of beta 1.0" in page
    odd = ends.pop(("ladder", [*kept("ladder")["rows"]][1]))
    assert odd[0] < 0.92 and "except in one row of the ladder" in page
    answers, samples = ([f"{100 * end(x):.0f}" for end in (min, max)] for x in zip(*ends.values()))
    assert "Final pass@1 ranges from {} to {} %, greedy accuracy only from {} to {} %".format(*samples, *answers) in page


def test_the_ladder_rises_from_the_critic_on():
    rows = kept("ladder")["rows"]
    ends = [middle("ladder", row, questions.last) for row in rows]
    assert ends[1:] == sorted(ends[1:]) and max(ends) == ends[0] and min(ends) == ends[1]
    for page in (" ".join(page.split()) for page in PAGES.values()):
        assert "each step ends higher than the one before it" in page and "raw reward ends highest" in page
    assert [up("ladder", row, base) for base, row in zip([*rows][1:], [*rows][2:])] == [True, False, True, True]
    assert "Three of the four increases are significant" in " ".join(SECTIONS["ladder"].split())


def test_the_right_answers_alone_end_highest():
    rows, page = kept("figure5")["rows"], " ".join(SECTIONS["figure5"].split())
    level = 0.9 * questions.best({"rows": rows})
    alone, group = (float(questions.reached(rows[name], level, "step", ".0f")) for name in ("right answers alone", "GRPO, outcomes"))
    assert alone / group == pytest.approx(0.5, abs=0.05) and "needs half of GRPO's steps to reach 81%" in page
    ends = {name: middle("figure5", name, questions.last) for name in rows}
    cost = {name: ends["right answers alone"] - ends[f"right answers alone, {name}"] for name in ("KL", "each alike", "clip", "but GRPO's loss")}
    together = cost.pop("but GRPO's loss")
    assert max(cost["each alike"], cost["clip"]) < cost["KL"] and "Of these three the KL costs most" in page
    assert sum(cost.values()) < together and "more than the sum of their costs" in page
    assert equal("figure5", "right answers alone, KL", "GRPO, outcomes")
    assert all(equal("figure5", name, "GRPO, outcomes", questions.greedy) for name in rows) and "in greedy answers no row differs significantly from GRPO" in page


def change(task, share):
    """What RL adds to a share of figure 7, in points, seed by seed."""
    return [100 * (run["after"][share] - run["before"][share]) for run in kept("figure7")["rows"][task].values()]


def test_rl_raises_votes_and_what_one_of_64_can_do_is_open():
    seeds, page = kept("figure7")["rows"], " ".join(SECTIONS["figure7"].split())
    assert {task: len(its) for task, its in seeds.items()} == {"arithmetic": 5, "slips": 5, "sums": 3, "sums at 0.7": 3}
    assert all(min(change(task, "maj@64")) > 0 for task in seeds) and "maj@64 rises in every seed" in page
    for run in seeds["arithmetic"].values():
        assert run["before"]["pass@64"] == run["after"]["pass@64"] == 1
        assert run["before"]["maj@64"] < run["before"]["pass@1"] < 0.5 and "Before RL more votes are worse" in page
        assert run["after"]["maj@64"] >= run["after"]["pass@1"] > 0.95
    votes = change("slips", "maj@64")
    assert f"maj@64 rises by {min(votes):.0f} to {max(votes):.0f} points" in page
    for share, told in (("maj@64", "its 95 % interval, {:+.0f} to {:+.0f}, includes 0"), ("pass@64", "as does that of pass@64, {:+.0f} to {:+.0f}.")):
        low, high = runs.interval(change("slips", share))
        assert low < 0 < high and told.format(low, high) in page
    assert all(runs.interval(change("slips", share))[0] > 0 for share in ("pass@8", "pass@16")) and "pass@8 and pass@16 rise significantly" in page
    able = {seed: run["before"]["pass@64"] > 0.9 for seed, run in seeds["slips"].items()}
    assert list(able.values()).count(True) == 2 and "Two seeds begin above 90 % in pass@64" in page
    assert all(run["after"]["pass@1"] > 0.5 if able[seed] else run["after"]["pass@1"] < 0.25 for seed, run in seeds["slips"].items())
    others = [points for points, well in zip(change("slips", "pass@64"), able.values()) if not well]
    assert "changes by {:+.0f}, {:+.0f} and {:+.0f} points".format(*others) in page
    for task, told in (("sums", "On sums pass@64 rises by {:.0f} to {:.0f} points"), ("sums at 0.7", "to 95.0%, by {:.0f} to {:.0f}.")):
        more = change(task, "pass@64")
        assert runs.interval(more)[0] > 0 and told.format(min(more), max(more)) in page
    begun = [run["curve"]["length"][0] for run in json.loads((ROOT / "experiments" / "models" / "sums.json").read_text())["runs"].values()]
    assert f"at first for {statistics.median(begun):.0f} of the {data.load_task('sums').DEFAULTS['max_new']} tokens" in page


def test_small_groups_do_and_ppo_is_behind_with_large_ones():
    page = " ".join(SECTIONS["1"].split())
    assert not {"2 of 128", "8 of 32", "PPO, fast critic, lambda 1", "PPO, fast critic, 2 of 128", "PPO, fast critic, 2 of 16"} & told("1")
    assert {"PPO, shared critic", "PPO, own critic", "PPO, fast critic"} < told("1")
    assert "groups of 2 and 8 do not differ significantly from groups of 16" in page and "With 2 of 128 and 2 of 16 its final pass@1 does not differ significantly from GRPO's" in page
    areas = [middle("1", f"{G} of 16", runs.area) for G in (4, 8, 16, 32, 64)]
    assert areas == sorted(areas, reverse=True) and "the area grows as groups shrink from 64 to 4" in page
    ends = {row: middle("1", row, questions.last) for row in kept("1")["rows"]}
    assert sorted(ends, key=ends.get)[1] == "64 of 16" and sorted(ends, key=ends.get)[0] == "PPO, shared critic"
    assert up("1", "PPO, fast critic, lambda 1", "PPO, fast critic", runs.area) and "the row learns faster" in page
    assert equal("1", "PPO, fast critic, lambda 1", "PPO, fast critic") and "nor, at the end, from the row above it" in page
    assert up("1", "2 of 16", "PPO, fast critic, 2 of 16", runs.area) and "with 2 of 16 it learns a little more slowly" in page
    assert all(equal("1", "16 of 2", "2 of 16", of) for of in (questions.last, runs.area))
    known = {row: [middle("1", row, f"explained_variance {when}") for when in ("early", "late")] for row in kept("1")["rows"] if "PPO" in row}
    assert f"{max(map(max, known.values())):.2f}" == "0.02" and "it explains at most 0.02" in page
    assert max(known["PPO, shared critic"]) < 0 and "less than nothing if it is a head on the policy's trunk" in page
    assert middle("1", "2 of 128", "dead_groups all") == pytest.approx(0.75, abs=0.03) and "three quarters of the groups of two are dead" in page


def test_k3_in_the_loss_costs_most():
    page = " ".join(SECTIONS["2"].split())

    def kl(run):
        """`gap` gives differences of it in hundredths of a nat."""
        return run["kl"]
    assert gap("2", "loss, k3, 0.04", "no KL") == (-2.5, True) and equal("2", "loss, k3, 0.04", "no KL", kl)
    exact = ("loss, k2", "loss, ratio*k3", "reward, k1")
    for form in exact:
        assert up("2", "no KL", f"{form}, 0.04", kl), "nearer to the start"
        for beta in (0.04, 0.2, 1.0):
            points, told_apart = gap("2", f"{form}, {beta}", f"loss, k3, {beta}")
            assert told_apart and points > (10 if beta == 0.2 else 0) and "with a beta of 0.2 by more than ten points" in page
            assert all(abs(gap("2", f"{form}, {beta}", f"{other}, {beta}")[0]) < 1 for other in exact if other != form)
    for name in ("loss, k1, 0.04", "reward, k1, 0.04"):
        assert equal("2", name, "no KL")
    assert middle("2", "loss, k3, 0.2", "length late") < middle("2", "loss, k2, 0.2", "length late") - 3 and "of k3 are shorter" in page
    assert equal("2", "reward, k3, 1.0", "no KL", kl) and gap("2", "reward, k3, 1.0", "no KL") == (-3.8, True)
    assert up("2", "no KL", "reward, k2, 1.0", kl) and gap("2", "reward, k2, 1.0", "no KL") == (-2.7, True)
    assert all(equal("2", f"loss, k3, {beta}", "no KL", questions.greedy) for beta in (0.04, 0.2))
    assert gap("2", "loss, k3, 1.0", "no KL", questions.greedy) == (1.4, True) and "it is ahead by 1.4" in page
    assert gap("figure5", "GRPO, outcomes, no KL", "GRPO, outcomes") == (1.8, True) and "With the group's std, as in the paper, k3 costs a little less" in page
    forms = kept("bias")["forms"]
    assert all(0.3 < x["error"] < 0.71 for x in forms["loss, k3"].values()) and "off by a third to two thirds" in page
    assert all(x["error"] > 0.46 for form in ("reward, k2", "reward, k3") for x in forms[form].values())


def at(run, step):
    """pass@1 of a run on the 100 problems of the evaluations, the first time that it was measured at a step."""
    return next(p["pass@1"] for p in run["points"] if p["step"] == step)


def at_step(question, row, step):
    """The median of that."""
    return middle(question, row, lambda run: at(run, step))


def test_steps_teach_more_and_learned_ones_last_longer():
    page = " ".join(SECTIONS["3"].split())
    assert gap("3", "rule, steps", "rule, outcomes") == (1.1, True) and equal("3", "rule, steps, no KL", "rule, outcomes, no KL")
    assert gap("3b", "rule, steps", "rule, outcomes") == (1.6, True) and gap("3b", "rule, steps", "rule, outcomes", runs.area) == (1.6, True)
    assert [f"{middle('3b', f'rule, {kind}', 'length late'):.0f} {middle('3b', f'rule, {kind}', 'kl'):.2f}" for kind in ("steps", "outcomes")] == ["110 1.60", "86 0.84"]
    assert all(equal(name, f"rule, steps{end}", f"rule, outcomes{end}", questions.greedy) for name, end in (("3", ""), ("3", ", no KL"), ("3b", "")))
    for row in (row for row in kept("3")["rows"] if row.startswith("model")):
        tenth = at_step("3", row, 10)
        assert tenth == pytest.approx(0.6, abs=0.03) and max(at_step("3", row, step) for step in range(20, 90, 10)) < tenth + 0.03, row
        earned = [statistics.median(run["curve"]["reward"][part] for run in kept("3")["rows"][row].values()) for part in (3, 15)]
        if at_step("3", row, 80) < tenth - 0.1:
            assert earned[1] > earned[0], row
    assert up("3", "model, steps, one pass", "model, outcomes, one pass", runs.area) and equal("3", "model, steps, one pass", "model, outcomes, one pass")
    falls = {passes: [at(run, 80) < at(run, 10) for run in kept("3")["rows"][f"model, steps{passes}"].values()] for passes in ("", ", one pass")}
    assert all(falls[""]) and sum(falls[", one pass"]) < 4 and "lose a little after four passes and hold their level after one" in page
    assert f"With three digits it ends at {statistics.median(run['curve']['reward'][15] for run in kept('3b')['rows']['model, outcomes'].values()):.0f}," in page
    assert at_step("3b", "model, outcomes", 80) == 0 and "although no answer is right any more" in page
    assert abs(middle("3b", "model, steps", questions.last) - at_step("3b", "model, steps", 0)) < 0.01 and "steps at 5.7%, about where they began" in page


def test_many_problems_do_whatever_labels_them():
    rows, page = kept("4")["rows"], " ".join(SECTIONS["4"].split())
    quarter = "16 rollouts of a quarter"
    assert all(middle("4", name, "auc start") < middle("4", "truth of a quarter", "auc start") for name in rows if "rollout" in name)
    assert told("4") == {quarter, f"{quarter}, 16 passes"} and equal("4", f"{quarter}, 16 passes", quarter)
    ends = [middle("4", name, questions.last) for name in rows if "quarter" not in name]
    assert f"end at {100 * min(ends):.0f} to {100 * max(ends):.0f} %, and none differs significantly from the truth" in page
    assert equal("4", "16 rollouts", "1 rollout")
    assert up("4", "truth of a quarter", quarter) and all(up("4", name, "truth of a quarter") for name in ("1 rollout", "16 rollouts"))
    assert "The truth of a quarter ends above 16 rollouts of it, but below 1 and 16 rollouts of all" in page
    tokens, auc, error = ({name: middle("4", name, key) for name in rows} for key in ("label tokens", "auc start", "calibration start"))
    assert tokens["16 rollouts"] / tokens["1 rollout"] == pytest.approx(8, abs=0.3) and "for an eighth of the tokens" in page
    assert tokens[quarter] / tokens["1 rollout"] == pytest.approx(2, abs=0.1) and "cost twice the tokens of one" in page
    assert all(at_step("4", name, 80) <= at_step("4", name, 10) for name in rows) and "From then on no row improves" in page
    by_rollouts = [name for name in rows if "rollout" in name and "quarter" not in name]
    for x, text in ((auc, "with rollouts {:.2f} to {:.2f}, and its calibration"), (error, "with rollouts {:.2f} to {:.2f}. But")):
        assert text.format(*(extreme(x[name] for name in by_rollouts) for extreme in (min, max))) in page
    assert [f"{x[name]:.2f}" for x in (auc, error) for name in ("truth, 10 % wrong", "truth, 30 % wrong")] == ["0.71", "0.66", "0.05", "0.19"]


def test_a_refit_helps_and_a_reset_of_the_reference_takes_that_back():
    page = " ".join(SECTIONS["5"].split())
    assert told("5b") == {"1 iteration, four times the labels", "2, reference kept"}
    assert "Four iterations as in the paper do not differ significantly from one, nor, in pass@1, do *no history* and *half history*" in page
    assert gap("5b", "2, no history", "2 iterations", questions.greedy) == (-3.9, True)
    assert up("5b", "2, reference kept", "1 iteration") and "also above one iteration" in page
    assert gap("5b", "2, reward kept", "1 iteration", runs.area) == (-3.2, True)
    assert equal("5b", "2, reference kept", "1 iteration, twice the labels") and equal("5b", "1 iteration, twice the labels", "1 iteration")
    assert "it differs significantly neither from one nor from two with the reference kept" in page
    labels, held = (middle("5b", row, "label tokens") for row in ("1 iteration, twice the labels", "2, reference kept"))
    assert labels < 0.75 * held and "which cost fewer tokens than two iterations" in page


def test_rewards_of_outcomes_do_not_last():
    rows, page, falls = kept("5")["rows"], " ".join(SECTIONS["5"].split()), []
    for name, row in rows.items():
        assert at_step("5", name, 10) == pytest.approx(0.6, abs=0.03), name
        assert statistics.median(run["auc end"] for run in row.values()) < 0.55, name
        falls += [questions.last(run) < at(run, 10) for run in row.values()]
    assert f"gets about 60 % right; then {sum(falls)} of {len(falls)} runs fall" in page and "no better than a coin" in page
    assert told("5") == {"4 iterations", "2, reward kept"}


def test_iterations_do_not_help_and_labels_at_the_start_do():
    """Of an iteration its last point: the refit's own comes after it."""
    page = " ".join(SECTIONS["figure6"].split())
    assert told("figure6") == {"1 iteration, three times the labels"}
    assert all(up("figure6", "1 iteration, three times the labels", name) for name in ("1 iteration", "2 iterations", "3 iterations"))
    assert "and also above two and three" in page
    ends = [at_step("figure6", "3 iterations", step) for step in (30, 60, 90)]
    assert "at {:.0f}, {:.0f} and {:.0f} %".format(*(100 * end for end in ends)) in page


def test_no_baseline_ends_highest():
    page = " ".join(SECTIONS["6"].split())
    for what in ("", ", 2 of 128"):
        for of in (questions.last, runs.area):
            assert up("6", f"none{what}", f"group{what}", of) and equal("6", f"group and critic{what}", f"group{what}", of)
        for name in ("critic", "group and critic"):
            assert up("6", f"group{what}", f"{name}, lambda 0.95{what}")
        assert equal("6", f"none{what}", f"group{what}", questions.greedy) and "though its greedy answers are no better" in page
        assert up("6", f"critic{what}", f"group{what}", runs.area) and "learns a little faster" in page
    assert equal("6", "critic", "group") and up("6", "critic, 2 of 128", "group, 2 of 128")
    assert "all four rows with a critic end lower" in page
    start, end = ([{row: found[row]["noise"] for row in found} for found in kept("variance")["policies"][name].values()] for name in ("start", "end"))
    of_five = [statistics.median(noise["none"] / noise["group"] for noise in of) for of in (start, end)]
    assert all(noise["none"] > noise["group"] for noise in start) and all(noise["none"] < noise["group"] for noise in end) and len(end) == 5
    assert of_five == [pytest.approx(2.2, abs=0.3), pytest.approx(0.5, abs=0.05)] and "the first policy's gradient has twice as much" in page
    assert sum(noise["none"] < 0.55 * noise["group"] for noise in end) == 4 and "about half in four of them" in page
    assert all(noise["none, all tokens alike"] < noise["group, all tokens alike"] for noise in start + end) and "less noise for all ten policies" in page
    assert all(min(noise, key=noise.get) == "critic, lambda 0.95" for noise in start) and "has the least noise" in page
    assert all(max(noise, key=noise.get) in ("critic, lambda 0.95", "group and critic, lambda 0.95") for noise in end)
    assert all(noise["none, all tokens alike"] < 0.7 * noise["group, divided by its std"] for noise in end) and "its last gradients have [less noise]" in " ".join(PAGES["questions"].split())
    slow = [middle("6", row, runs.area) for row in kept("6")["rows"] if "2 of" not in row]
    assert sorted(slow)[:2] == sorted(slow[-2:]) and "these rows learn slowest" in page


def test_the_readme_names_three_answers():
    """The tests of their sections hold the rest of what it says."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    for question, row, base, found, says in (
            ("6", "none", "group", "**+3.5 ", "ends 3.5 points higher than with the group's mean, though its greedy answers are no better"),
            ("1", "2 of 128", "16 of 16", "+0.6 ", "groups of 2 do as well as groups of 16"),
            ("figure5", "GRPO, outcomes, no KL", "GRPO, outcomes", "**+1.8 ", "GRPO's KL (k3 in the loss) costs 1.8 points at the paper's beta"),
            ("2", "loss, k2, 0.04", "no KL", "**+1.0 ", "a KL with k2 costs none")):
        rows = kept(question)["rows"]
        assert questions.apart(rows[row], rows[base], questions.last).startswith(found) and says in readme
    rows = kept("6")["rows"]
    assert questions.apart(rows["none"], rows["group"], lambda run: run["greedy"]).startswith("-1.2 ")


def test_the_rates_are_those_that_end_highest():
    ends = {name: row["11"]["pass@1"] for name, row in kept("rates")["rows"].items()}
    best = {}
    for name in questions.FAMILIES:
        best.setdefault(max(("3e-5", "1e-4", "3e-4"), key=lambda lr: ends[f"{name}, {lr}"]), []).append(name)
    assert best.pop("3e-5") == ["2 of 16"] and best.pop("3e-4") == ["64 of 16"]
    assert len(best["1e-4"]) == 8 and "in all eight rows of 256 completions" in " ".join(PAGES["questions"].split())
    assert "--lr 1e-4 " in " ".join(questions.SETTING)


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "experiments" / "studies" / "answers").glob("*.json") if path.stem not in studies.STUDIES])
def test_a_result_is_of_all_rows_and_seeds(name):
    found = kept(name)
    assert found.keys() > {"command", "date", "torch", "python", "cores", "machine"}
    if name in questions.QUESTIONS:
        assert found["flags"] == questions.QUESTIONS[name] and found["setting"] == " ".join(questions.SETTING)
        seeds = [str(seed) for seed in questions.SEEDS.get(name, range(1, 6))]
        assert all([*found["rows"][row]] == seeds for row in questions.QUESTIONS[name])
