"""Rewards of steps, and reward models: choices, labels, fits, replay."""
import math
import random
from types import SimpleNamespace

import conftest
import pytest
import torch
from conftest import tiny_model

import data
import data.arithmetic as task
import reward
from data import UserError, check_steps
from data.tokenizer import Encoding, byte_encoding, step_tokens
from grpo import Batch, Config, group_scores
from model import ScalarHead
from reward import choices, learned, quality, refit, reward_loss, rollout_labels, scores
from run import dist, passes, report

WORK = "\n47*50=2000+350=2350\n47*8=320+56=376\n2350+376=2600+126=2726"


def batch_of(texts, prompt="47*58=", end=True):
    """A Batch of completions of one prompt, as the sampler would leave it."""
    rows = [(prompt.encode(), [*text.encode(), *[256] * end]) for text in texts]
    return conftest.batch_of_rows(rows, finished=torch.full((len(rows),), end))


PROBLEM = task.Problem("47*58=", "2726")


def agent_of(task=None, **settings):
    """An Agent that judges bytes."""
    return conftest.agent_of(Config(**settings), task)


def scored(task, batch, problems=(PROBLEM,)):
    """The Batch with its texts and components."""
    reward.score_by_rule(agent_of(task), problems, batch)
    return batch


def rewards_of(texts, supervision, end=True):
    batch, agent = batch_of(texts, end=end), agent_of(task, supervision=supervision)
    reward.score_by_rule(agent, [PROBLEM], batch)
    assert batch.texts == texts and batch.problems == [PROBLEM] * len(texts)
    reward.fill_in_rewards(agent, batch)
    return (batch.reward, batch.ends), batch


# ------------------------------------------------------------------------------ rewards of steps

def test_outcome_reward_is_at_the_last_token():
    (r, ends), batch = rewards_of([WORK, "~3000", "2726"], "outcome")
    assert r.sum(1).tolist() == [2, 0, 1] and ends.sum(1).tolist() == [1, 1, 1]
    assert batch.ids[ends].tolist() == [256] * 3 and r[~ends].abs().sum() == 0


def test_process_rewards_are_at_the_ends_of_the_steps():
    """A newline closes a step, and the last step ends at the end token: else stopping would get no
    advantage at all."""
    wrong = WORK.replace("320+56=376", "320+56=386")
    (r, ends), batch = rewards_of([WORK, wrong, "~3000", ""], "process")
    assert [batch.ids[i][ends[i]].tolist() for i in range(4)] == [[10, 10, 256]] * 2 + [[256]] * 2
    assert [r[i][ends[i]].tolist() for i in range(4)] == [[1, 1, 1], [1, 0, 0], [0], [0]]


class Odd:
    """A truth that says it is one, as numpy's bool does, but is no number."""
    def __eq__(self, other):
        return other == 1
    __hash__ = None


@pytest.mark.parametrize("found, fault", [
    (None, "must be a list of (end, truth), not None"), (True, "must be a list of (end, truth), not True"),
    ({3: True}, "must be a list of (end, truth), not {3: True}"),
    ([3], "must be pairs (end, truth), not 3"), ([True, False], "must be pairs (end, truth), not True"),
    ([(3, True, 1)], "must be pairs (end, truth), not (3, True, 1)"),
    *(([(end, True)], f"must have integer ends that never decrease, up to the length of the text: here from 1 to 5, not {end}")
      for end in (0, -1, 6, 3.0, True, None)),
    ([(3, True), (2, True)], "must have integer ends that never decrease, up to the length of the text: here from 3 to 5, not 2"),
    *(([(2, True), (3, truth)], f"must each be True or False, not {truth!r}") for truth in (0.5, 2, None, "1", [1], torch.ones(2)))])
def test_steps_of_another_form_are_refused(found, fault):
    """Instead of a traceback, or of silent training on it."""
    odd = SimpleNamespace(reward=task.reward, steps=lambda problem, text: found)
    batch = scored(odd, batch_of(["~3000"]))
    with pytest.raises(UserError) as e:
        reward.of_rule(agent_of(odd, supervision="process"), batch)
    assert str(e.value) == f"the steps of the prompt '47*58=' {fault}"


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "gsm8k"])
def test_a_completion_without_text_is_one_false_step(name):
    """It ended at once: a run once ended there."""
    steps = SimpleNamespace(reward=lambda problem, text: {"correct": 1.0}, steps=data.load_task(name).steps)
    batch = scored(steps, batch_of([""]))
    r, ends = reward.of_steps(steps, byte_encoding(), batch)
    assert ends.sum() == 1 and batch.ids[ends].tolist() == [256] and r.sum() == 0


@pytest.mark.parametrize("true", [True, 1, 1.0, Odd()])
def test_steps_may_be_any_truth_and_integer(true):
    """Such as numpy's; two steps may end at one character, and an empty list is one false step."""
    check_steps(task.Problem("1*1=", "1"), "12345", [(1, true), [3, False], (torch.tensor([3]).numpy()[0], 0), (5, true)])
    check_steps(task.Problem("1*1=", "1"), "", [])


def test_true_steps_to_a_wrong_answer_do_not_make_the_last_one_good():
    (r, ends), _ = rewards_of([WORK, "\n47*50=2350\n47*8=376"], "process")       # beside a right one
    assert [r[i][ends[i]].tolist() for i in range(2)] == [[1, 1, 1], [1, 0]]


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_the_reward_of_a_completion_that_did_not_end(supervision, monkeypatch):
    monkeypatch.setattr(reward, "TRUNCATED_REWARD", -1.5)
    (r, ends), batch = rewards_of([WORK], supervision, end=False)
    assert r[0][ends[0]].tolist() == ([1, 1, -1.5] if supervision == "process" else [-1.5])
    batch.reward = torch.where(ends, -2.0, 0)           # a learned reward may be worse than the limit
    assert reward.cap_truncated(batch)[0][ends[0]][-1] == -2


def test_step_tokens_of_bytes_and_of_longer_tokens():
    text = "é=1\n二=2\n3"
    ends = [text.index("\n") + 1, text.rindex("\n") + 1, len(text)]
    data = text.encode()
    assert step_tokens(byte_encoding(), list(data), ends) == [4, 10, 11]
    ranks = {bytes([i]): i for i in range(256)} | {b"\n\xe4": 256, b"=2": 257}
    longer = Encoding("t", r"[\s\S]+", ranks, {"<end>": 300}, [300], {})
    ids = longer.encode_ordinary(text)
    assert [longer.decode_single_token_bytes(t) for t in ids][3:5] == [b"1", b"\n\xe4"]
    assert step_tokens(longer, ids, ends) == [4, 8, 9]


def test_step_tokens_survive_bytes_that_are_no_text():
    ids = [0xff, 10, 0xe4, 10, 65]
    text = bytes(ids).decode("utf-8", "replace")
    ends = [i + 1 for i, c in enumerate(text) if c == "\n"] + [len(text)]
    assert step_tokens(byte_encoding(), ids, ends) == [1, 3, 4]


# ------------------------------------------------------------------------------------- the losses

def test_people_choose_any_of_the_best():
    """Wherever the completions end; nothing but the labels changes, and they only where a completion ends."""
    ends = torch.zeros(9, 4, dtype=torch.bool)
    ends[range(9), [3, 1, 2, 3, 3, 0, 1, 2, 0]] = True
    label = torch.full((9, 4), 7.0).masked_scatter(ends, torch.tensor([0.0, 2, -1, 1, 0, 1, 3, 3, 3]))
    rows = {"ids": torch.rand(9, 4), "ends": ends, "label": label}
    found = choices(rows, 3)
    assert found["label"][ends].view(3, 3).tolist() == [[0, 1, 0], [1 / 2, 0, 1 / 2], [pytest.approx(1 / 3)] * 3]
    assert torch.equal(found["label"][~ends], label[~ends]) and label[0, 3] == 0
    assert found["ids"] is rows["ids"] and found["ends"] is ends


def test_quality_by_hand():
    """Four steps of certainty 0.8, three of them hit: accuracy 0.75, 0.05 too sure. Choices: a
    favourite is right, another is one of two equals, and chosen half the time."""
    s = torch.tensor([0.8, 0.8, 0.2, 0.2]).logit()
    assert quality(s, torch.tensor([1.0, 1.0, 0.0, 1.0]), 1) == pytest.approx((0.75, 0.05))
    s = torch.tensor([0.7, 0.3, 0.7, 0.3]).log()
    assert quality(s, torch.tensor([1.0, 0, 0, 1]), 2) == pytest.approx((0.5, 0.2))
    assert quality(s, torch.tensor([1.0, 0, 0.5, 0.5]), 2) == pytest.approx((1.0, 0.05))


def test_quality_of_the_undecided():
    """Errors of other certainties do not cancel. A score of 0 and a label of one half say `bad`; to be
    sure of 1 is of the last bin."""
    s = torch.tensor([0.95, 0.85]).logit()
    assert quality(s, torch.tensor([0.0, 1.0]), 1) == pytest.approx((0.5, (0.95 + 0.15) / 2))
    assert quality(torch.zeros(3), torch.tensor([0.0, 0.5, 1.0]), 1) == pytest.approx((2 / 3, 1 / 6))
    assert quality(torch.tensor([99.0, 0.95]).logit().nan_to_num(99.0), torch.ones(2), 1) == pytest.approx((1, 0.025))


# ------------------------------------------------------------------------------- the reward model

def scorer_of(seed=0):
    s = ScalarHead(32, tiny_model(seed), 1 / math.sqrt(33), torch.Generator().manual_seed(seed))
    return s


def test_score_depends_on_neither_padding_nor_batch():
    s, batch = scorer_of(), batch_of(["~3000", "2726", WORK[:20]])
    cfg = Config(micro_tokens=40)
    whole = scores(s, batch.ids, batch.mask, cfg)
    for i in range(3):
        n = int(batch.mask[i].nonzero()[-1]) + 1
        alone = scores(s, batch.ids[i:i + 1, :n], batch.mask[i:i + 1, :n], cfg)
        torch.testing.assert_close(whole[i, :n], alone[0], rtol=1e-5, atol=1e-5)
    dirty = torch.where(torch.arange(batch.ids.size(1)) < 6, batch.ids, 99).where(~batch.mask, batch.ids)
    torch.testing.assert_close(scores(s, dirty, batch.mask, cfg)[batch.mask], whole[batch.mask])


def test_learned_reward_is_where_steps_end_and_a_cut_row_gets_its_own(monkeypatch):
    monkeypatch.setattr(reward, "TRUNCATED_REWARD", -3.0)
    s, batch = scorer_of(), batch_of(["~3000", "2726"])
    batch.finished = torch.tensor([True, False])
    for supervision in ("outcome", "process"):
        batch.ends = passes.last_tokens(batch.mask)
        batch.reward = learned(s, batch, Config(supervision=supervision))
        r = reward.cap_truncated(batch)
        raw = scores(s, batch.ids, batch.mask, Config())[0][batch.ends[0]]
        want = raw.sigmoid() if supervision == "process" else raw
        assert r[0][batch.ends[0]].item() == pytest.approx(want.item()) and r[~batch.ends].sum() == 0
        assert r[1][batch.ends[1]].item() == -3.0


def preferences(n, K, seed):
    """n problems with K completions each: the more a, the better."""
    r = random.Random(seed)
    texts = ["".join(r.choice("ab") for _ in range(6)) for _ in range(n * K)]
    batch = batch_of(texts, prompt="?")
    batch.ends = passes.last_tokens(batch.mask)
    a = [t.count("a") for t in texts]
    batch.reward = torch.where(batch.ends, torch.tensor(a)[:, None].float(), 0)
    return batch, a


def fitted(model, batch, history, cfg, seed):
    """`refit` to the Batch, of whose problems a tenth is held out; the history and the metrics."""
    agent = conftest.agent_of(cfg, reward_model=model, history=history)
    measures = refit(agent, [batch], len(batch.ids) // reward.CHOICES // 10, random.Random(seed))
    return agent.history, measures


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_a_reward_model_learns_what_people_prefer(supervision, capsys, monkeypatch):
    monkeypatch.setattr(reward, "FIT_LR", 3e-3)
    monkeypatch.setattr(reward, "CHOICES", 2)
    cfg = Config(supervision=supervision)
    batch, a = preferences(400, 2, 0)
    good = torch.tensor(a, dtype=torch.float)
    good = good if supervision == "outcome" else (good > 3).float()
    batch.reward = torch.where(batch.ends, good[:, None], 0)
    s = scorer_of()
    history, measures = fitted(s, batch, {}, cfg, 0)
    assert measures["rm_accuracy"] > 0.75 and measures["rm_error"] < 0.25
    assert f"held out: accuracy {measures['rm_accuracy']:.1%}" in capsys.readouterr().out
    assert len(history["ids"]) == 720                       # but for those it was measured on
    if supervision == "outcome":                            # normalised on what it was fitted to
        r = learned(s, batch, cfg)[80:][batch.ends[80:]]
        assert r.mean().item() == pytest.approx(0, abs=1e-4) and r.std().item() == pytest.approx(1, 1e-3)


@pytest.mark.parametrize("micro_tokens, tokens", [(1, 1), (0, 1024), (40, 20)])
def test_a_micro_batch_of_sets_has_their_share_of_the_tokens(micro_tokens, tokens, monkeypatch):
    """Pairs of up to `tokens` each; one pair at a time if not even one fits. That once took 2,048."""
    batch, _ = preferences(400, 2, 0)
    data, s, sizes = reward.labelled(batch) | {"label": torch.rand(batch.ends.shape)}, scorer_of(), []
    monkeypatch.setattr(ScalarHead, "forward", lambda self, ids, mask: (sizes.append(ids.shape), torch.zeros(ids.shape))[1])
    monkeypatch.setattr(passes, "supervised_fit", lambda name, module, losses, n, lr: [*losses(0)])
    reward.fit(s, data, 2, Config(micro_tokens=micro_tokens), random.Random(0))
    assert sum(rows for rows, _ in sizes) == 68 and all(rows == 2 or rows * width <= 2 * tokens for rows, width in sizes)
    assert (max(rows for rows, _ in sizes) > 2) is (tokens > 1) and (len(sizes) == 1) is (tokens > 1000)


def test_a_set_of_a_fit_is_as_long_as_its_longest_row(monkeypatch):
    """Which may be any of its rows: the reward is at the end of each."""
    batch, s, seen = batch_of(["a", "bbb", "ccccc", "d"]), scorer_of(), []
    batch.ends = passes.last_tokens(batch.mask)
    batch.reward = torch.where(batch.ends, torch.tensor([[1.0], [0.0], [0.0], [1.0]]), 0)
    monkeypatch.setattr(passes, "supervised_fit", lambda name, module, losses, n, lr: seen.extend(losses(0)))
    reward.fit(s, reward.labelled(batch), 2, Config(micro_tokens=1), random.Random(0))         # each set by itself
    score = scores(s, batch.ids, batch.mask, Config())[batch.ends]
    assert len(seen) == 2 and batch.mask.sum(1).tolist() == [2, 4, 6, 2]
    assert sum(seen).item() == pytest.approx(reward_loss(score, batch.reward[batch.ends], 2).item() / 2, rel=1e-5)


def test_a_step_of_a_fit_has_a_set_at_least(monkeypatch):
    """With more than 64 choices too; a step without data would only repeat the last one's momentum."""
    batch, _ = preferences(3, 100, 0)
    seen = []
    monkeypatch.setattr(passes, "supervised_fit", lambda name, module, losses, n, *_: seen.extend(
        sum(loss.item() for loss in losses(step)) for step in range(n)))
    rows = reward.labelled(batch) | {"label": batch.ends.float() / 100}
    reward.fit(scorer_of(), rows, 100, Config(), random.Random(0))
    assert len(seen) == 3 and min(seen) > 0


def test_no_more_is_replayed_than_there_is():
    history = {"ids": torch.arange(12)}
    assert sorted(reward.replay(history, 44, 4, random.Random(0))["ids"].tolist()) == [*range(12)]


def continued(agent, problems, tries, begun, said):
    """A Batch of `tries` rows for each beginning of a completion, as grpo.completions makes it;
    they go on with `said(ids so far, number of the try)` and the end."""
    prompts = [[*problem.prompt.encode()] for problem in problems]
    batch = conftest.batch_of_rows([
        (prompt + ids, [*said(prompt + ids, k).encode(), 256])
        for prompt, (ids, _) in zip(prompts, begun, strict=True) for k in range(tries)])
    passes.begin_earlier(batch, prompts, begun, tries)
    reward.score_by_rule(agent, problems, batch)
    return batch


def test_what_goes_on_from_a_prefix_is_judged_by_its_own_problem():
    """Two problems, whose prefixes are continued in one go, each in several ways."""
    problems, judged = [SimpleNamespace(prompt=x) for x in ("p", "q")], []
    batch = batch_of(["ab", "cd"])
    batch.ends = batch.mask.clone()
    batch.reward, batch.problems = torch.zeros(batch.ids.shape), problems

    def completions(agent, problems, tries, u, begun):
        return continued(agent, problems, tries, begun, lambda prefix, k: "x")
    toy = SimpleNamespace(reward=lambda problem, text: judged.append((problem.prompt, text)) or {"correct": float(problem.prompt == "q")})
    label = rollout_labels(agent_of(toy, max_new=9), completions, batch, 1, 0, tries=3)
    assert judged == [(prompt, text) for prompt, texts in (("p", ("ax", "abx")), ("q", ("cx", "cdx"))) for text in texts for _ in range(3)]
    assert label[0].sum() == 0 and label[1][batch.ends[1]].tolist() == [1, 1, 0]


def test_sets_are_padded_on_the_right():
    a, b = ({"ids": torch.full((2, n), n), "ends": torch.ones(2, n, dtype=torch.bool)} for n in (3, 5))
    c = passes.join([a, b])
    assert c["ids"].tolist() == [[3, 3, 3, 0, 0]] * 2 + [[5] * 5] * 2
    assert passes.join([b, a])["ids"].tolist() == [[5] * 5] * 2 + [[3, 3, 3, 0, 0]] * 2
    assert c["ends"].sum().item() == 16


def test_rollout_labels_are_shares_of_what_comes_of_a_prefix():
    """The stub completes rightly as often as the prefix has lines; the last step keeps its truth."""
    (r, ends), batch = rewards_of([WORK, "~3000"], "process")
    batch.reward, batch.ends, before, asked = r, ends, r.clone(), []

    def completions(agent, problems, tries, u, begun):
        """Of 8 tries on a prefix the first k say `right`, k its equations so far."""
        assert u.shape == (2 * tries, 64) and (0 <= u).all() and (u < 1).all()
        assert problems == [PROBLEM] * 2 and all(all(said) for _, said in begun)
        asked.extend(bytes(ids).decode() for ids, _ in begun)
        return continued(agent, problems, tries, begun,
                         lambda p, k: "right" if k < bytes(p).count(b"=") else "wrong")

    def truth(problem, text):
        """Of the whole completion, what was there before with it."""
        return {"correct": float(text.startswith(WORK[:21]) and text.endswith("right"))}
    toy = SimpleNamespace(reward=truth)
    label = rollout_labels(agent_of(toy, max_new=64), completions, batch, 2, 0, tries=8)
    assert asked == [WORK[:21], WORK[:37]]
    assert label[0][ends[0]].tolist() == [3 / 8, 5 / 8, 1] and label[1].sum() == 0
    assert torch.equal(batch.reward, before)


def test_a_text_is_what_the_policy_said():
    """Without what an environment says in between; steps end where they end among these tokens, and a completion that
    goes on from a prefix has those of its tokens too that were there before."""
    heard, judged = "\nhm?", []
    batch = batch_of([WORK[:20] + heard + WORK[20:]])
    at = 6 + 20
    batch.mask[:, at:at + len(heard)] = False           # which is also what is judged
    assert scored(task, batch).texts == [WORK]
    r, ends = reward.of_steps(task, byte_encoding(), batch)
    places = ends[0].nonzero()[:, 0]
    assert [chr(x) for x in batch.ids[0, places[:2]]] == ["\n"] * 2 and places[0] == at + len(heard)
    assert r[0, places].tolist() == [1, 1, 1]

    def completions(agent, problems, tries, u, begun):
        return continued(agent, problems, tries, begun, lambda prefix, k: "x")
    toy = SimpleNamespace(reward=lambda problem, text: judged.append(text) or {"correct": 1.0})
    batch.reward, batch.ends = r, ends
    rollout_labels(agent_of(toy), completions, batch, 1, 0, tries=1)
    assert judged == [WORK[:21] + "x", WORK[:37] + "x"]


def test_components_that_cancel_add_up_to_0():
    """0.7 - 0.1 - 0.6 is -6e-8 in float32. A small rest that is no rounding stays, and so does a small reward beside large ones."""
    texts = {"x": (0.7, -0.1, -0.6), "y": (0.0, 0.0, 0.0), "z": (1.0, 0.0, -0.999), "w": (1e-7, 0.0, 0.0)}
    toy = SimpleNamespace(reward=lambda p, text: dict(zip(("correct", "a", "b"), texts[text])))
    total = reward.of_rule(agent_of(toy), scored(toy, batch_of([*texts])))[0].sum(1)
    assert total[:2].tolist() == [0, 0] and total[2:].tolist() == pytest.approx([1e-3, 1e-7], rel=1e-3)


def test_a_component_named_reward_is_the_reward_and_the_others_are_logged():
    """However small: 1e-9 and 3e-9 differ, and are learned from. A row that was cut off earns at
    most 0 of it, and keeps what is below."""
    toy = SimpleNamespace(reward=lambda p, x: {"correct": 1.0, "reward": float(x), "style": 5.0})
    batch, agent = batch_of(["1e-9", "3e-9", "2", "-2"]), agent_of(toy, group=2, kl="none")
    batch.finished = torch.tensor([True, True, False, False])
    scored(toy, batch)
    reward.fill_in_rewards(agent, batch)
    assert batch.reward.sum(1).tolist() == pytest.approx([1e-9, 3e-9, 0, -2])
    score, dead = group_scores(batch.reward, batch.ends, agent.cfg)
    assert score[batch.ends].tolist() == pytest.approx([-1, 1, 1, -1]) and not dead.any()
    batch.adv = score
    stats = report.statistics(batch, dead)
    assert stats["reward"] == pytest.approx(-0.5)
    assert stats["style"] == 2.5 and stats["accuracy"] == 0.5


def test_rollout_labels_do_not_depend_on_how_ranks_share_the_rows(monkeypatch):
    """The random numbers of a step are those of its prompt and place, and of the stream."""
    p, q = (SimpleNamespace(prompt=x) for x in "pq")
    batch, drawn = batch_of(["ab", "ab", "ab", "cd"]), []
    batch.problems, batch.ends = [p, p, q, q], batch.mask
    batch.reward = torch.zeros(batch.ids.shape)

    def labels(batch, stream=0):
        def completions(agent, problems, tries, u, begun):
            drawn.append(u)
            return SimpleNamespace(components={"correct": u[:, 0].float()})
        return rollout_labels(agent_of(), completions, batch, 2, stream)
    whole = labels(batch)
    assert len(whole[whole > 0].unique()) == 8
    assert len(drawn.pop().unique()) == 8 * 4 * Config.max_new
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    for rank, problem in enumerate((p, q)):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        rows = torch.arange(2 * rank, 2 * rank + 2)
        part = passes.select(batch, rows, batch.ids.size(1))
        part.problems = [problem] * 2
        assert torch.equal(labels(part), whole[rows])
    assert not (labels(batch, 1) == whole)[whole > 0].any()


def test_rollouts_without_a_place_to_go_on_from():
    """Completions of one step each: all labels are their own."""
    (r, ends), batch = rewards_of(["~3000", "~2726"], "process")
    batch.reward, batch.ends = r, ends
    assert torch.equal(rollout_labels(agent_of(), None, batch, 2, 0), r)


def test_components_stay_in_the_order_of_the_first_row():
    """Whatever the order in which the task names them later."""
    toy = SimpleNamespace(reward=lambda p, text: {"correct": 1.0, "a": 2.0} if text == "x" else {"a": 3.0, "correct": 0.0})
    batch = scored(toy, batch_of(["x", "y"]))
    assert [(name, x.tolist()) for name, x in batch.components.items()] == [("correct", [1, 0]), ("a", [2, 3])]


def test_labels_of_more_than_128_steps_are_those_of_each():
    """In two parts, with random numbers of their own."""
    batch, drawn = batch_of(["a" * 100, "b" * 120]), []
    batch.problems, batch.ends = [PROBLEM] * 2, batch.mask.clone()
    batch.ends[0, :50] = False                      # its first step is long
    batch.reward = torch.where(batch.ends, 7.0, 0)

    def completions(agent, problems, tries, u, begun):
        """Of 4 tries as many are right as the length of a prefix modulo 5."""
        assert tries == 4 and u.shape == (4 * len(begun), 150)
        drawn.append(u)
        return continued(agent, problems, tries, begun,
                         lambda prefix, k: "yn"[k >= len(prefix) % 5])
    toy = SimpleNamespace(reward=lambda problem, text: {"correct": float(text.endswith("y"))})
    label = rollout_labels(agent_of(toy, max_new=150), completions, batch, 2, 0)
    places = batch.ends & ~passes.last_tokens(batch.mask)
    share = (torch.arange(1, batch.ids.size(1) + 1) % 5 / 4).expand_as(label)
    assert torch.equal(label, torch.where(places, share, batch.reward))
    assert [len(u) for u in drawn] == [4 * 128, 4 * (places.sum() - 128)]
    assert torch.cat(drawn)[:, 0].unique().numel() == 4 * places.sum()


# ------------------------------------------------------------------------------ rewards of a whole rollout

def test_rewards_of_all_completions_at_once():
    """With their problems, in the order of the rows, and their numbers of tokens, the one that ends them included."""
    seen = []
    toy = SimpleNamespace(rewards=lambda problems, texts, tokens: seen.append((problems, texts, tokens)) or [
        {"correct": float(text == max(texts, key=len)), "n": n / 10} for text, n in zip(texts, tokens)])
    batch = batch_of(["a", "bcd", "ef", ""], end=True)
    p, q = (SimpleNamespace(prompt=x) for x in "pq")
    scored(toy, batch, [p, q])
    assert seen == [([p, p, q, q], ["a", "bcd", "ef", ""], [2, 4, 3, 1])]
    assert batch.components["correct"].tolist() == [0, 1, 0, 0] and batch.components["n"].tolist() == pytest.approx([0.2, 0.4, 0.3, 0.1])


@pytest.mark.parametrize("found, why", [
    ([{"correct": 1}], "rewards must return a list of 2 dicts, one for each completion, not"), (None, "must return a list of 2"),
    ([{"correct": 1}, {"right": 1}], "must be a dict with 'correct'"), ([{"correct": 1}, {"correct": 1, "x": 1}], "has the components correct, x"),
    ([{"correct": 1}, {"correct": float("nan")}], "not a finite number")])
def test_rewards_of_another_form(found, why):
    problems = [SimpleNamespace(prompt="p"), SimpleNamespace(prompt="q")]
    with pytest.raises(UserError, match=why):
        data.rewards_of(SimpleNamespace(rewards=lambda *given: found), problems, ["a", "b"], [2, 2])


def test_a_task_needs_one_of_both(tmp_path):
    text = "DEFAULTS = {}\ndef problems(): pass\ndef answer(text): pass\n"
    for more, fits in (("", False), ("def reward(p, c): pass\n", True), ("def rewards(p, c, n): pass\n", True)):
        (tmp_path / "toy.py").write_text(text + more)
        if fits:
            assert data.load_task(str(tmp_path / "toy.py")).DEFAULTS == {}
        else:
            with pytest.raises(UserError, match="has no function reward: every task needs one"):
                data.load_task(str(tmp_path / "toy.py"))


@pytest.mark.parametrize("width, lr", [(4, 1e-3), (256, 1e-3), (257, 1e-3 * 256 / 257), (1024, 2.5e-4)])
def test_the_rate_of_a_fit_falls_with_the_width(width, lr, monkeypatch):
    """Above 256 channels as 1 / width: muP, arXiv 2203.03466."""
    seen, mask = [], torch.ones(8, 3, dtype=torch.bool)
    monkeypatch.setattr(passes, "supervised_fit", lambda *given: seen.append(given[4]))
    reward.fit(ScalarHead(width), dict(ids=mask.long(), mask=mask, ends=mask), 2, Config(), random.Random(0))
    assert seen == [pytest.approx(lr)]
