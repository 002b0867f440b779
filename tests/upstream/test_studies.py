"""The studies of experiments/studies/studies.py: rows, critics, values of lines, statistics, tables."""
import dataclasses
import json
import random
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, agent_of, batch_of, batch_of_rows, records, tiny_model

sys.path.insert(0, str(ROOT / "experiments" / "studies"))
import careful  # noqa: E402
import critics  # noqa: E402
import grid  # noqa: E402
import grpo  # noqa: E402
import mines  # noqa: E402
import reward  # noqa: E402
import runs  # noqa: E402
import slips  # noqa: E402
import studies  # noqa: E402
from data import load_task  # noqa: E402
from data.tokenizer import byte_encoding  # noqa: E402
from experiments.models import filters  # noqa: E402
from run import config, passes, warm_start  # noqa: E402

SMALL = ("--difficulty 1 --max_new 25 --n_embd 32 --n_layer 1 --warm_steps 20 --steps 2 --prompts 4 --group 2 "
         "--held_out 4 --samples 8 --eval_every 1 --seed 1").split()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Tasks are paths from there; what a patch changes is put back."""
    monkeypatch.chdir(ROOT)
    for module, name in ((grpo, "refit_reward_model"), (grpo, "train_step"), (grpo, "rollout"), (grpo, "sample"), (grpo, "advantages"),
                         (grpo, "new_agent"), (critics, "fit"), (reward, "refit"), (reward, "of_rule"), (config, "algorithm"), (reward, "CHOICES"),
                         (reward, "FIT_STEPS"), (grpo, "VALUE_COEF"), (warm_start, "WARM_BATCH")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(passes, "MISMATCH", dict(passes.MISMATCH))


@pytest.mark.parametrize("study", studies.STUDIES)
def test_the_rows_of_a_study_can_run_and_differ(study):
    found = {row: runs.read(studies.flags_of(row)) for row in studies.rows_of(study)}
    assert len({json.dumps([vars(cfg), patches]) for cfg, patches in found.values()}) == len(found) > 1
    for cfg, patches in found.values():
        assert cfg.prompts * cfg.group == 256
        if "mines" in cfg.task:
            assert cfg.max_new == 4 * 3 * 2 ** cfg.task_args["difficulty"] + 1 and cfg.steps * cfg.iterations in (100, 200, 300)
        assert all(patch.split("=")[0] in {*runs.PATCHES, *runs.CONSTANTS} for patch in patches)
        assert "critic_fit" not in str(patches) or cfg.critic == "separate"


@pytest.mark.parametrize("flags", [[], "--baseline value --critic separate --patch critic_fit=3 --lam 1".split(),
                                   "--baseline none --patch vine=2 --patch wrong=0".split(), "--baseline none --patch drawn=once".split(),
                                   "--algo dapo --patch sampler=bfloat16".split()], ids=str)
def test_a_run_and_what_is_kept_of_it(flags, tmp_path, monkeypatch):
    """All of a run's child, but that it is a process of its own and evaluates on all held-out problems."""
    real = runs.preflight.problems_of
    monkeypatch.setattr(runs.preflight, "problems_of", lambda cfg, task: (real(cfg, task)[0], real(cfg, task)[1][:4]))
    runs.child([*studies.SETTING, *SMALL, *flags, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "result.json").read_text())
    run = studies.summary(result)
    metrics = records(tmp_path / "metrics.jsonl")
    assert [p["pass@1"] for p in run["points"]] == [m["pass@1"] for m in metrics if "pass@1" in m][:1] * (len(run["points"]) - 2) + [
        m["pass@1"] for m in metrics[1:]]
    own = [(m["length"] * 8) for m in metrics[1:]]
    assert run["tokens"] == pytest.approx(sum(own)) if not flags or "drawn=once" in flags else run["tokens"] >= sum(own) if "dapo" in flags else run["tokens"] > sum(own)
    assert (run["label tokens"] > 0) == ("critic_fit=3" in flags) == (len(run["points"]) == 4)
    assert len(result["steps"].get("explained_variance", [])) == (2 if "value" in flags or "vine=2" in flags else 0) and 0 <= run["pass@1 at 0.5"] <= 1
    assert run["before"]["entropy"] == pytest.approx(metrics[1]["entropy"]) and run["before"]["greedy"] >= 0


def test_a_critic_that_is_fitted_first_learns_the_returns(monkeypatch):
    """Prompts whose completions are right and others whose are wrong: it tells them apart before the first step."""
    task = SimpleNamespace(reward=lambda problem, text: {"correct": float(problem.prompt < "m")})
    problems = [SimpleNamespace(prompt=c + d) for c in "abcdefnopqrs" for d in "xyz"]
    cfg = grpo.make_config(task="arithmetic", max_new=4, prompts=2, group=2, baseline="value", critic="separate", kl="none", device="cpu")
    agent = grpo.new_agent(cfg, task, byte_encoding(), tiny_model())
    monkeypatch.setattr(grpo, "train_step", lambda agent, problems, step: {"made": step})
    monkeypatch.setattr(critics, "RATE", 3e-3)

    def all_finished(agent, problems, batch, episodes, real=reward.score_by_rule):
        """What is cut off would earn nothing."""
        batch.finished = torch.ones_like(batch.finished)
        real(agent, problems, batch, episodes)
    monkeypatch.setattr(reward, "score_by_rule", all_finished)
    runs.patch_critic_fit("60")
    assert grpo.train_step(agent, problems, 1) == {"made": 1}
    batch = grpo.generate(agent, problems, 1, random.Random(0))
    value = grpo.logps(agent.policy, batch, cfg, agent.critic)[1]
    of_row = (value * batch.mask).sum(1) / batch.mask.sum(1)
    right = torch.tensor([p.prompt < "m" for p in problems])
    assert (of_row[right] - 1).abs().max() < 0.3 and of_row[~right].abs().max() < 0.3
    before = [p.clone() for p in agent.critic.parameters()]
    assert grpo.train_step(agent, problems, 2) == {"made": 2}           # only before the first
    assert all(torch.equal(p, q) for p, q in zip(agent.critic.parameters(), before))


def test_a_critic_learns_returns_relative_to_the_groups():
    cfg = grpo.make_config(task="experiments/studies/mines.py", baseline="group+value", max_new=9, group=2, prompts=2, device="cpu")
    agent = grpo.new_agent(cfg, mines, byte_encoding(), tiny_model())
    problems = mines.problems(1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mines, "reward", lambda problem, text: {"correct": float(sum(map(ord, text)) % 2)})
        batch, returns = critics.completed(agent, problems, 3, 4, random.Random(0))
        wide, plain = critics.completed(dataclasses.replace(agent, cfg=dataclasses.replace(cfg, baseline="value")), problems, 3, 4, random.Random(0))
    outcome = batch.reward.sum(1).view(3, 4)
    assert torch.equal(returns[:, 0].view(3, 4), outcome - outcome.mean(1, keepdim=True)) and torch.equal(wide.ids, batch.ids)
    assert torch.equal(plain[:, 0], batch.reward.sum(1)) and returns.shape == batch.mask.shape


def test_values_of_lines_by_hand(monkeypatch):
    """Two completions of two lines and one of a single line; how often a continuation is right is told beforehand."""
    texts, share = ["R21\nR31", "D12\nU11", "R21"], {(0, 0): 0.5, (1, 0): 0.25}
    problem = mines.Problem("11>31:", (1, 1), (3, 1), frozenset())
    batch = batch_of_rows([(b"11>31:", [*text.encode(), 256]) for text in texts], problems=[problem] * 3, texts=texts,
                          components={"correct": torch.tensor([1.0, 0.0, 0.0])})
    batch.reward = torch.where(batch.ends, torch.tensor([[1.0], [0.0], [0.0]]), 0)
    kept = batch.reward.clone(), batch.ends.clone()

    def labels(agent, completions, lines, group, at, tries):
        """The shares, at the ends of the lines but the last."""
        found = lines.reward.clone()
        for row, ends in enumerate(lines.ends):
            for line, end in enumerate(ends.nonzero()[:-1, 0].tolist()):
                found[row, end] = share[row, line]
        return found
    monkeypatch.setattr(reward, "rollout_labels", labels)
    agent = agent_of(grpo.make_config(task="arithmetic", group=3), mines)
    value, advantage = critics.line_values(agent, batch, random.Random(0), 4)
    # Rows begin at the mean of the two others: 0, 0.5, 0.5. A line is its characters and the newline; the last one, the end.
    want = [([0.0] * 4 + [0.5] * 4, [0.5] * 4 + [0.5] * 4), ([0.5] * 4 + [0.25] * 4, [-0.25] * 4 + [-0.25] * 4), ([0.5] * 4, [-0.5] * 4)]
    for row, (values, credits) in enumerate(want):
        assert value[row, 6:6 + len(values)].tolist() == values and advantage[row, 6:6 + len(values)].tolist() == credits
    assert value[~batch.mask].abs().sum() == advantage[~batch.mask].abs().sum() == 0
    assert torch.equal(batch.reward, kept[0]) and torch.equal(batch.ends, kept[1])


def test_the_share_of_variance_that_values_explain():
    got = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert runs.explained(got, got) == 1 and runs.explained(got, got * 0 + 0.3) == pytest.approx(0, abs=1e-6)
    assert runs.explained(got, 0.5 * got) == pytest.approx(0.75) and runs.explained(got * 0, got) is None


def test_wrong_completions_may_cost_something(monkeypatch):
    ends = torch.tensor([[False, True, True], [False, False, True]])
    monkeypatch.setattr(reward, "of_rule", lambda *given: (torch.tensor([[0.0, 1, 0], [0, 0, 1]]), ends))
    runs.patch_wrong("-1")
    found, same = reward.of_rule(None, None)
    assert found.tolist() == [[0, 1, -1], [0, 0, 1]] and same is ends


@pytest.mark.parametrize("share", ["0", "0.3", "1"])
def test_labels_of_steps_may_be_wrong(share, monkeypatch):
    """That share of them, and nothing where no step ends."""
    ends, seen = torch.arange(20) % 4 == torch.zeros(400, 1), []
    truth = torch.where(ends & (torch.arange(400) % 2 == 0)[:, None], 1.0, 0.0)
    monkeypatch.setattr(reward, "refit", lambda agent, batches, held_out, rng: seen.extend(batches) or held_out)
    runs.patch_label_noise(share)
    made = [batch_of(ends[half], reward=truth[half], ends=ends[half]) for half in (slice(200), slice(200, 400))]
    assert reward.refit(agent_of(grpo.make_config(supervision="process")), made, 7, random.Random(0)) == 7
    label = torch.cat([batch.reward for batch in seen])
    assert ((label == 0) | (label == 1)).all() and (label[~ends] == 0).all()
    for side in (0, 1):
        wrong = (label != truth)[ends & (truth == side)].float().mean().item()
        assert wrong == pytest.approx(float(share), abs=0.05 * (share == "0.3"))


def test_true_moves_alone_may_count():
    """In the rule's rewards of a run; over a mine and back is as good as any."""
    task, seen = load_task("experiments/studies/mines.py"), []
    grpo.new_agent = lambda cfg, task: seen.append(task)
    runs.patch_format("moves")
    grpo.new_agent(None, task)
    problem = mines.Problem("11>31:", (1, 1), (3, 1), frozenset({(2, 1)}))
    assert [good for _, good in task.steps(problem, "R21\nL11\nR22")] == [True, True, False]
    assert [good for _, good in mines.steps(problem, "R21\nL11\nR22")] == [False, False, False] and seen == [task]


def test_values_of_lines_take_the_place_of_advantages(monkeypatch):
    made = batch_of(torch.ones(2, 2).bool(), reward=torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    monkeypatch.setattr(grpo, "rollout", lambda *given: (made, {"reward": 0.5}))
    monkeypatch.setattr(critics, "line_values", lambda agent, batch, rng, tries: (torch.tensor([[0.5, 1.0], [0.5, 0.0]]), torch.full((2, 2), tries)))
    runs.patch_vine("7")
    batch, stats = grpo.rollout(None, None, None)
    assert batch.adv.unique().tolist() == [7] and batch.value is None
    assert stats == {"reward": 0.5, "explained_variance": pytest.approx(1 - (0.5 ** 2 * 2 / 3) / (1 / 3))}


def test_what_is_drawn_once_is_the_first_policys(monkeypatch):
    """And its ratios are those of the policy that learns, so that sampler and trainer agree."""
    asked = []

    def rollout(agent, problems, rng):
        asked.append(agent.policy)
        return batch_of(torch.ones(1, 1).bool(), logp="sampled", old_logp="sampled"), {"reward": 0.5}
    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(runs.pretrained, "frozen", lambda policy: f"copy of {policy}")
    monkeypatch.setattr(grpo, "logps", lambda policy, batch, cfg: (f"{policy}'s", None))
    runs.patch_drawn("once")
    for policy in ("first", "second"):
        batch, stats = grpo.rollout(agent_of(grpo.make_config(), policy=policy), None, None)
        assert asked.pop() == "copy of first" and batch.logp == batch.old_logp == f"{policy}'s" and stats == {"reward": 0.5}


def test_a_sampler_may_be_rounded(monkeypatch):
    """It samples; the old log-probabilities are the policy's own."""
    policy, asked = tiny_model(), []

    def rollout(agent, problems, rng):
        asked.append(agent.policy)
        return batch_of(torch.ones(1, 1).bool(), logp="sampled", old_logp="sampled"), {}
    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "logps", lambda policy, batch, cfg: (policy, None))
    monkeypatch.setattr(runs.passes, "MISMATCH", dict(runs.passes.MISMATCH))
    runs.patch_sampler("bfloat16")
    batch, _ = grpo.rollout(agent_of(grpo.make_config(), policy=policy), None, None)
    pairs = [*zip(asked[0].parameters(), policy.parameters())]
    assert all(torch.equal(a, b.bfloat16().float()) for a, b in pairs) and not all(torch.equal(a, b) for a, b in pairs)
    assert batch.old_logp is policy and batch.logp == "sampled" and runs.passes.MISMATCH[None] == runs.passes.MISMATCH[torch.bfloat16]


# --------------------------------------------------------------------------------- numbers and tables

def test_p_values_and_their_correction():
    """Of three numbers in closed form; at the quantiles of a table; Holm's by hand."""
    x = [-0.1, 0.3, 0.2]
    t = statistics.mean(x) / statistics.stdev(x) * 3 ** 0.5
    assert studies.p_value(x) == studies.p_value([-n for n in x]) == pytest.approx(1 - t / (2 + t * t) ** 0.5, abs=1e-6)
    for n, quantile in runs.STUDENT.items():
        x = [(-1) ** i + (i == n - 1 and n % 2) for i in range(n)]          # with mean 0, then moved
        x = [a - statistics.mean(x) for a in x]
        assert studies.p_value([a + quantile * statistics.stdev(x) / n ** 0.5 for a in x]) == pytest.approx(0.05, abs=1e-4), n
    assert studies.p_value([2.0, 2.0]) == 1 and studies.p_value([1.0, -1.0, 0.5, -0.5]) == pytest.approx(1)
    assert studies.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02]) and studies.holm([0.9, 0.8]) == [1, 1]


def run_of(x, y=None):
    point = {"step": 4, "tokens": 5e6, "seconds": 30.0, "pass@1": x}
    return {"greedy": x + 0.1 if y is None else y, "pass@1": x, "pass@8": 0.9, "maj@8": 0.5, "pass@1 at 0.5": 0.7, "entropy": 0.1, "explained_variance": None,
            "tokens": 5e6, "seconds": 30.0, "points": [point], "before": {"greedy": 0.05, "pass@1": 0.04, "entropy": 0.3}}


def test_means_of_parts():
    assert studies.means([1, 2, None, 4, None, None, 7], 2) == [1.5, 4.0, None, 7.0] and studies.means([], 2) == []


def test_forms_of_the_kl_are_compared_at_equal_kl(monkeypatch):
    """By hand: at a KL of 0.3 the base is half-way between the start and its row of 0.6, at 0.8 between that and no KL."""
    run = lambda kl, x: {"kl": kl, "greedy": x, "before": {"greedy": 0.2}}          # noqa: E731
    monkeypatch.setitem(studies.STUDIES, "kl", {"task": {"no KL": "a", "reward, k1, 1": "b", "loss, k3, 1": "c", "loss, k3, 2": "d"}})
    found = {"runs": {"a": {"1": run(1.0, 0.8), "2": run(1.0, 0.8)}, "b": {"1": run(0.6, 0.6), "2": run(0.6, 0.6)},
                      "c": {"1": run(0.3, 0.5), "2": run(0.8, 0.7)}, "d": {"2": run(3.0, 0.7), "3": run(1, 1)}}}
    gaps = studies.at_equal_kl(found, "task", "greedy")
    assert gaps.keys() == {"loss, k3, 1"}         # the other's KL is beyond the row without one
    assert gaps["loss, k3, 1"] == pytest.approx([10, 0])


def test_a_table_compares_rows_seed_by_seed(monkeypatch):
    monkeypatch.setitem(studies.STUDIES, "toy", {"one": {"base": "", "other": "--lr 1"}, "two": {"base again": "", "third": "--lr 2"}})
    found = {"runs": {"": {"1": run_of(0.2), "2": run_of(0.3), "3": run_of(0.1)},
                      "--lr 1": {"1": run_of(0.4), "2": run_of(0.51), "3": run_of(0.29)}, "--lr 2": {"2": run_of(0.35)}}}
    got = studies.compared("toy", found, "pass@1")
    assert [*got] == [("one", "other")] and got["one", "other"][:3] == pytest.approx((20.0, *runs.interval([20.0, 21.0, 19.0])))
    table = [*studies.lines("toy", found)]
    assert len({line.count("|") for line in table}) == 1
    assert table[3] == "| before RL | 3 | 5.0% |  | 4.0% |  |  |  | 0.300 |  |  |  |"
    assert table[4].startswith("| base | 3 | 30.0% |  | 20.0% |  | 70.0% | 90.0% | 0.100 |  | 5.00 | 30 |")
    assert table[5].startswith("| other | 3 | 50.0% | **+20.0 (+17.5 to +22.5)** | 40.0% | **+20.0 (+17.5 to +22.5)** |")
    assert table[9].startswith("| third | 1 | 45.0% |  | 35.0% |  |") and table[6].startswith("| *two* |")


def test_a_rung_of_the_ladder_is_compared_with_the_one_below(monkeypatch):
    rungs = dict(zip("abc", ("", "--lr 1", "--lr 2")))
    monkeypatch.setitem(studies.STUDIES, "toy", {"the ladder": rungs, "others": rungs})
    found = {"runs": {flags: {"1": run_of(x), "2": run_of(x)} for flags, x in zip(rungs.values(), (0.1, 0.3, 0.4))}}
    assert studies.of_part("toy", found, "the ladder", "pass@1") == {"b": pytest.approx([20, 20]), "c": pytest.approx([10, 10])}
    assert studies.of_part("toy", found, "others", "pass@1") == {"b": pytest.approx([20, 20]), "c": pytest.approx([30, 30])}


def test_a_run_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(studies, "HERE", tmp_path)
    (tmp_path / "answers").mkdir()
    monkeypatch.setitem(studies.STUDIES, "toy", {"one": {"base": "", "other": "--lr 1"}, "two": {"base again": ""}})
    monkeypatch.setattr(studies, "summary", lambda result: dict(result))
    monkeypatch.setattr(studies.results, "about", lambda: {"commit": "abc"})

    def run(flags, seed, out):
        """Makes a note."""
        made.append((flags[len(studies.SETTING):], seed))
        if seed == 3:
            raise RuntimeError("failed")
        return run_of(seed / 10)
    monkeypatch.setattr(runs, "run", run)
    studies.make("toy", [1, 2], tmp_path)
    assert sorted(made) == [([], 1), ([], 2), (["--lr", "1"], 1), (["--lr", "1"], 2)]
    made.clear()
    found = studies.make("toy", [1, 2, 3], tmp_path)
    assert sorted(made) == [([], 3), (["--lr", "1"], 3)] and found == studies.load("toy")
    assert {flags: [*of] for flags, of in found["runs"].items()} == {"": ["1", "2"], "--lr 1": ["1", "2"]}
    assert found["runs"][""]["1"]["about"]["commit"] == "abc"
    made.clear()
    studies.make("toy", [4], tmp_path, ["two"])
    assert made == [([], 4)]

    def beside(flags, seed, out):
        """Another command writes what it has made, while this one runs."""
        other = studies.load("toy")
        other["runs"].setdefault("--lr 1", {})["6"] = run_of(0.6)
        studies.write("toy", other)
        return run_of(0.5)
    monkeypatch.setattr(runs, "run", beside)
    studies.make("toy", [5], tmp_path, ["two"])
    assert {"5", "4"} < studies.load("toy")["runs"][""].keys() and "6" in studies.load("toy")["runs"]["--lr 1"]
    monkeypatch.setattr(studies, "SETTING", ["--lr", "9"])
    with pytest.raises(SystemExit, match="another setting"):
        studies.make("toy", [1], tmp_path)


def test_a_result_is_of_the_code_that_makes_it(monkeypatch):
    """That of a variant, too: a result made by other code is not taken."""
    read, real = set(), runs.Path.read_text
    monkeypatch.setattr(runs.Path, "read_text", lambda path: read.add(path) or real(path))
    runs.sources()
    assert {ROOT / name for name in ("grpo.py", "model.py", "run/caches.py", "data/answers.py", "experiments/variants/cispo.py",
                                     "experiments/variants/dapo.py", "experiments/studies/mines.py", "experiments/studies/runs.py")} <= read


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(studies, "make", lambda *given: pytest.fail("a run was begun"))
    monkeypatch.setattr(sys, "argv", "studies.py critic --parts critics baseline".split())
    with pytest.raises(SystemExit) as stop:
        studies.main()
    assert stop.value.code == 2 and "critic has no part 'baseline'; it has 'baselines', 'critics'" in capsys.readouterr().err


def test_a_variant_has_its_rate_from_the_development_map():
    """The best of three in greedy accuracy; each variant is measured where it acts, on-policy or not."""
    known = {f"x --lr {lr}": {"101": {"greedy": greedy}} for lr, greedy in zip(studies.RATES, (0.5, 0.7, 0.6))}
    assert studies.best_rate("x", known) == studies.RATES[1]
    assert studies.best_rate("x", dict([*known.items()][:2])) == studies.best_rate("y", known) == studies.RATES[0] == "1e-4"
    measured = {row.split("--algo ")[1].split()[0] for rows in studies.REGIMES.values() for row in rows.values()}
    files = {path.stem for path in (ROOT / "experiments" / "variants").glob("*.py")}
    files -= {"adaptive_kl", "distillation"}    # of PPO and its KL in the reward; of a teacher
    files -= {"vineppo", "raft", "stale", "tree", "replay", "hints"}        # not measured, as docs/variants.md says
    assert files < measured and measured - files == {"grpo", "dr_grpo", "rloo", "gspo"}
    found = studies.load("variants_tuning")["runs"]
    rates = {studies.STUDIES["variants"][regime][name].removeprefix(f"{row} --lr "): studies.best_rate(row, found)
             for regime, rows in studies.REGIMES.items() for name, row in rows.items()}
    assert len(rates) > 1 and all(used == best for used, best in rates.items())


def test_walks_are_counted_where_they_pass(monkeypatch):
    """Each place once a walk, and none after a line that is no true move."""
    problem = mines.Problem("00>20:", (0, 0), (2, 0), frozenset({(0, 1)}))
    texts = ["R10\nR20", "R10\nL00\nR10\nR20", "D01\nR11\nR22"]
    monkeypatch.setattr(grpo, "generate", lambda agent, problems, each, rng: batch_of(
        torch.ones(3, 1).bool(), problems=problems * 3, texts=texts))
    found = grid.passed(agent_of(grpo.make_config(max_new=49)), [problem], 3)
    assert {(x, y): n for x, column in enumerate(found["passed"]) for y, n in enumerate(column) if n} == {
        (1, 0): 2, (2, 0): 2, (0, 0): 1, (0, 1): 1, (1, 1): 1}
    assert found["walks"] == 3 and found["right"] == pytest.approx(2 / 3)


def test_careful_demonstrations_have_slips_and_no_guesses():
    rng, problem = random.Random(0), careful.problems()[0][0]
    texts = [careful.demonstration(problem, rng) for _ in range(400)]
    right = sum(careful.reward(problem, text)["correct"] for text in texts) / 400
    assert not any(text.startswith("~") for text in texts) and 0.5 < right < 0.9
    assert any(slips.demonstration(problem, rng).startswith("~") for _ in range(20))        # which is as it was


@pytest.mark.parametrize("study", [name for name in studies.STUDIES if studies.answers(name).exists()])
def test_a_result_says_how_it_was_made(study):
    """And each run when and on which machine: a study may take several days."""
    found = studies.load(study)
    assert found["command"] == f"python experiments/studies/studies.py {study}" and found["setting"] == " ".join(studies.SETTING)
    assert found["runs"].keys() <= studies.rows_of(study).keys()
    for of_seeds in found["runs"].values():
        for run in of_seeds.values():
            assert run["about"].keys() >= {"date", "torch", "python", "cores", "machine", "commit"}


def test_what_a_step_samples_anew_is_counted(tmp_path, monkeypatch):
    """All its rollouts, and not what an evaluation samples."""
    for name in ("rollout", "train_step"):              # which `child` replaces, for its whole process
        monkeypatch.setattr(grpo, name, getattr(grpo, name))
    filters.child(["--task", "experiments/studies/mines.py", "--algo", "dynamic_sampling", *SMALL, "--out", str(tmp_path)])
    config.algorithm("grpo", grpo.ALGOS, grpo)          # what dynamic_sampling replaced, before what `child` did
    metrics = records(tmp_path / "metrics.jsonl")
    assert {m["completions"] for m in metrics[1:]} <= {8, 16, 24} and metrics[1]["completions"] > 8
    assert json.loads((tmp_path / "about.json").read_text()).keys() >= {"date", "torch", "python", "cores", "machine"}
    first, second, third = filters.of_run(tmp_path)["points"]
    assert (first["completions"], first["seconds"], first["greedy"]) == (0, 0, metrics[0]["greedy"])
    assert third["completions"] == metrics[1]["completions"] + metrics[2]["completions"]
    assert second["tokens"] == metrics[1]["tokens"] == pytest.approx(metrics[1]["length"] * metrics[1]["completions"])
    assert third["seconds"] == pytest.approx(metrics[1]["seconds"] + metrics[2]["seconds"], abs=0.1)


def test_the_result_of_filters(tmp_path, monkeypatch, capsys):
    """Of the runs that have ended alone."""
    monkeypatch.setattr(filters, "folder", lambda row, seed: tmp_path / f"{row}{seed}")
    monkeypatch.setattr(filters, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["filters.py", "--readme"])
    first = dict.fromkeys((*filters.MEASURED, *filters.SPENT, *filters.CURVES), 0) | {"step": 0}
    for row in filters.ROWS:
        for seed in (2, 4, 5, 7):
            where = tmp_path / f"{row}{seed}"
            where.mkdir()
            step = first | {"step": 1, "completions": 8, "greedy": seed / 10}
            (where / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(step)}\n")
            if seed < 7:
                (where / "about.json").write_text('{"date": "today"}')
    filters.main()
    found = json.loads((tmp_path / "filters.json").read_text())
    assert found["date"] == "today" and found["command"].endswith("filters.py 2 4 5") and found["flags"].split()[:2] == ["--task", "sums"]
    assert found["runs"].keys() == filters.ROWS.keys() and [*found["runs"]["GRPO"]] == ["2", "4", "5"]
    assert found["runs"]["GRPO"]["4"]["points"][1]["greedy"] == 0.4 and "| GRPO | 40.0% (20.0% to 50.0%) |" in capsys.readouterr().out


def test_filters_are_compared_at_equal_cost():
    """Where a run has spent what the other spent in all; the last result of one that spent less."""
    def run(*points):
        names = ("completions", "seconds", "pass@1", "greedy")
        return {"points": [dict(zip(names, x)) for x in points], "curves": {"dead_groups": [0.5] * 20 + [0.25] * 10}}
    start, grpo_own = (0, 0, 0.1, 0.2), (100, 60, 0.5, 0.6)
    base = {"1": run(start, grpo_own), "2": run(start, (100, 60, 0.7, 0.6)), "3": run(start, grpo_own)}
    other = {"1": run(start, (50, 10, 0.3, 0.5), (150, 40, 0.7, 0.8)), "2": run(start, (300, 120, 0.7, 0.8)), "3": run(start, (150, 90, 0.7, 0.9))}
    found = {"GRPO": base, "other": other}
    assert filters.apart(found, "other") == pytest.approx([20, 0, 20]) and filters.apart(found, "GRPO", spent="seconds") == [0, 0, 0]
    assert filters.apart(found, "other", spent="completions") == pytest.approx([0, -40, 0])
    assert filters.apart(found, "other", spent="seconds") == pytest.approx([20, -30, 0])
    assert filters.apart(found, "other", of="greedy", spent="seconds") == pytest.approx([20, -10, 100 * (0.2 + 0.7 * 2 / 3 - 0.6)])
    *head, row = filters.lines(found)
    assert {line.count("|") for line in (*head, row)} == {9} and head[2].startswith("| before RL | 20.0% (20.0% to 20.0%) | 10.0% (")
    half = runs.STUDENT[3] * 20 / 3         # the standard error of 20, 0, 20
    assert row == (f"| other | 80.0% (80.0% to 90.0%) | 70.0% (70.0% to 70.0%) | +13.3 (−{half - 40 / 3:.1f} to +{half + 40 / 3:.1f}) "
                   f"| −13.3 (−{2 * half + 40 / 3:.1f} to +{2 * half - 40 / 3:.1f}) | 25% (25% to 25%) | 150 (150 to 300) | 1.5 (0.7 to 2.0) |")
