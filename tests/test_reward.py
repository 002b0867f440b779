"""Rewards of steps, and reward models: choices, labels, fits, replay."""
import dataclasses
import math
import random
from contextlib import nullcontext
from types import SimpleNamespace

import conftest
import torch
from conftest import tiny_model
from pytest import approx, mark, raises

import data
import data.arithmetic as task
import reward
from data import UserError
from data.tokenizer import Encoding, byte_encoding, step_tokens
from grpo import Config, scores_of_rows
from model import ScalarHead
from reward import choices, learned, quality, fit_and_measure, reward_loss, rollout_labels, scores
from run import dist, passes, report

WORK = "\n47*50=2000+350=2350\n47*8=320+56=376\n2350+376=2600+126=2726"
PROBLEM = task.Problem("47*58=", "2726")


def batch_of(texts, prompt="47*58=", end=True):
    """A Batch of completions of one prompt, as the sampler would leave it."""
    rows = [(prompt.encode(), [*text.encode(), *[256] * end]) for text in texts]
    return conftest.batch_of_rows(rows, finished=torch.full((len(rows),), end))


def agent_of(task=None, **settings):
    """An Agent that judges bytes."""
    return conftest.agent_of(Config(**settings), task)


def scored(task, batch, problems=(PROBLEM,)):
    """The Batch with its texts and components."""
    batch.problems = reward.repeated(problems, len(batch.ids) // len(problems))
    batch.texts, batch.components = reward.by_rule(agent_of(task), batch)
    return batch


def rewarded(agent, batch):
    """The rewards of a rollout, as in grpo.rollout, in the Batch."""
    batch.reward, batch.ends = reward.of_rule(agent, batch)
    batch.reward = reward.cap_truncated(batch)


def at_ends(batch, x):
    """What each row has at the ends of its steps."""
    return [row[on].tolist() for row, on in zip(x, batch.ends)]


# ---------- rewards of steps

STEPS = {WORK: [1, 1, 1], WORK.replace("56=376", "56=386"): [1, 0, 0], "~3000": [0], "": [0],
         "\n47*50=2350\n47*8=376": [1, 0]}      # true steps, without an answer


@mark.parametrize("supervision, end, wanted", [
    ("outcome", True, {x: [approx(sum(task.reward(PROBLEM, x).values()))]
                       for x in (WORK, "~3000", "2726", "")}),
    ("process", True, STEPS),                   # stopping gets an advantage, too
    ("outcome", False, {WORK: [-1.5]}),
    ("process", False, {WORK: [1, 1, -1.5]})])
def test_rewards_are_at_the_ends_of_steps(supervision, end, wanted, monkeypatch):
    """A newline closes a step; the last one ends at the last token."""
    monkeypatch.setattr(reward, "TRUNCATED_REWARD", -1.5)
    batch, agent = batch_of([*wanted], end=end), agent_of(task, supervision=supervision, group=1)
    rewarded(agent, scored(task, batch))
    assert batch.texts == [*wanted] and batch.problems == [PROBLEM] * len(wanted)
    assert at_ends(batch, batch.reward) == [*wanted.values()]
    assert not batch.reward[~batch.ends].any()
    last = 256 if end else ord("6")
    assert at_ends(batch, batch.ids) == [[10] * (len(r) - 1) + [last] for r in wanted.values()]
    if not end:                             # a learned reward may be worse than the limit
        batch.reward = -2.0 * batch.ends
        assert at_ends(batch, reward.cap_truncated(batch))[0][-1] == -2


def test_a_last_step_is_true_if_any_share_is_right():
    toy = SimpleNamespace(reward=lambda problem, text: {"correct": 0.25}, steps=task.steps)
    batch = scored(toy, batch_of([WORK]))
    found, ends = reward.of_steps(toy, byte_encoding(), batch)
    assert found[ends].tolist() == [1, 1, 1]


@mark.parametrize("found, n", [
    ([], 1), ([(1, 1.0), [3, False], (torch.tensor([3]).numpy()[0], True), (5, 0)], 3),
    ([(6, True)], 0)])
def test_steps_may_be_of_numpy_and_are_checked(found, n):
    odd = SimpleNamespace(reward=task.reward, steps=lambda problem, text: found)
    batch, agent = scored(odd, batch_of(["~3000"])), agent_of(odd, supervision="process")
    with nullcontext() if n else raises(UserError, match="from 1 to 5, not 6"):
        r, ends = reward.of_rule(agent, batch)
        assert r[ends].tolist() == [1, 0, 0][-n:]   # one of two at one token is false


@mark.parametrize("name", ["arithmetic", "countdown", "gsm8k"])
def test_a_completion_without_text_is_one_false_step(name):
    steps = data.load_task(name).steps
    toy = SimpleNamespace(reward=lambda problem, text: {"correct": 1.0}, steps=steps)
    batch = scored(toy, batch_of([""]))
    r, ends = reward.of_steps(toy, byte_encoding(), batch)
    assert batch.ids[ends].tolist() == [256] and not r.any()


RANKS = {bytes([i]): i for i in range(256)} | {b"\n\xe4": 256, b"=2": 257}
LONGER, TEXT = Encoding("t", r"[\s\S]+", RANKS, {"<end>": 300}, [300], {}), "é=1\n二=2\n3"


@mark.parametrize("encoding, ids, tokens", [
    (byte_encoding(), [*TEXT.encode()], [4, 10, 11]),
    (LONGER, LONGER.encode_ordinary(TEXT), [4, 8, 9]),          # one has a newline and half of 二
    (byte_encoding(), [0xff, 10, 0xe4, 10, 65], [1, 3, 4])])    # no text
def test_step_tokens(encoding, ids, tokens):
    text = b"".join(map(encoding.decode_single_token_bytes, ids)).decode("utf-8", "replace")
    ends = [i + 1 for i, c in enumerate(text) if c == "\n"] + [len(text)]
    assert step_tokens(encoding, ids, ends) == tokens


# ---------- rewards of a task

def test_components_add_up_in_any_order():
    """0.7 - 0.1 - 0.6 is -6e-8 in float32: no group differs by so little."""
    texts = dict(x=(0.7, -0.1, -0.6), y=(0.0,) * 3, z=(1.0, 0.0, -0.999), w=(1e-7, 0.0, 0.0))

    def rule(problem, text):
        parts = [*zip(("correct", "a", "b"), texts[text])]
        return dict(parts if text == "x" else reversed(parts))
    toy = SimpleNamespace(reward=rule)
    batch = scored(toy, batch_of([*texts]))
    total = reward.of_rule(agent_of(toy), batch)[0].sum(1).tolist()
    assert total == approx([0, 0, 1e-3, 1e-7], abs=1e-7)
    assert [*batch.components] == ["correct", "a", "b"]
    assert batch.components["b"].tolist() == approx([-0.6, 0, -0.999, 0])


def test_a_component_named_reward_is_the_reward():
    """Even if small: 1e-5 and 3e-5 differ. A row that was cut off earns at most 0."""
    toy = SimpleNamespace(reward=lambda p, x: {"correct": 1.0, "reward": float(x), "style": 5.0})
    batch, agent = batch_of(["1e-5", "3e-5", "2", "-2"]), agent_of(toy, group=2, kl="none")
    batch.finished = torch.tensor([True, True, False, False])
    rewarded(agent, scored(toy, batch))
    assert batch.reward.sum(1).tolist() == approx([1e-5, 3e-5, 0, -2])
    groups = torch.tensor([0, 0, 1, 1])
    batch.adv, dead = scores_of_rows(batch.reward, batch.ends, groups, agent.cfg)
    assert batch.adv[batch.ends].tolist() == approx([-1, 1, 1, -1]) and not dead.any()
    stats = report.statistics(batch, dead)
    assert stats["reward"] == approx(-0.5, abs=1e-4)
    assert stats["style"] == 2.5 and stats["accuracy"] == 0.5
    batch.problems = [*batch.problems[:3], []]          # equal, but not the same
    with raises(UserError, match="a group of one row"):
        reward.check_groups(batch, agent.cfg)


def test_rewards_of_all_completions_at_once():
    """With the numbers of the tokens that are judged."""
    def rewards(problems, texts, tokens, finished):
        assert (problems, tokens) == ([p, p, q, q], [2, 4, 3, 1])
        assert finished == [True, True, False, True]
        return [{"correct": float(text == max(texts, key=len))} for text in texts]
    p, q = (SimpleNamespace(prompt=x) for x in "pq")
    batch = batch_of(["a", "bcd", "ef", ""])
    batch.mask = batch.mask & (torch.arange(batch.ids.size(1)) > 7)     # two were given
    batch.finished[2] = False
    scored(SimpleNamespace(rewards=rewards), batch, [p, q])
    assert batch.components["correct"].tolist() == [0, 1, 0, 0]


# ---------- the reward model

def test_people_choose_any_of_the_best():
    ends = torch.zeros(9, 4, dtype=torch.bool)
    ends[range(9), [3, 1, 2, 3, 3, 0, 1, 2, 0]] = True
    label, third = torch.full((9, 4), 7.0), approx(1 / 3)
    label[ends] = torch.tensor([0.0, 2, -1, 1, 0, 1, 3, 3, 3])
    found = choices({"ends": ends, "label": label}, 3)
    assert found["label"][ends].tolist() == [0, 1, 0, 0.5, 0, 0.5, *[third] * 3]
    assert torch.equal(found["label"][~ends], label[~ends]) and label[0, 3] == 0
    assert found["ends"] is ends


@mark.parametrize("score, label, K, accuracy, chance", [
    ([9, 1, -1, -2], [1, 1, 0, 1], 1, 0.75, 0.75),      # three of four are hit, and are good
    ([0, 0, 0], [0, 0.5, 1], 1, 2 / 3, 2 / 3),          # undecided is `bad`
    ([2, 1, 2, 1], [1, 0, 0, 1], 2, 0.5, 0.5),
    ([1, 4, 3, 2], [0.5, 0.5, 1, 0], 2, 1, 0.5),        # of two equals none is better
    ([5, 5, 1], [0.5, 0.5, 0], 3, 1, 0.5),              # two are copies
    ([6, 3, 1, 3, 6, 1], [0.5, 0.5, 0, 1, 0, 0], 3, 0.5, 0.5)])
def test_quality_by_hand(score, label, K, accuracy, chance):
    score, label = torch.tensor([score, label], dtype=torch.float32)
    assert quality(score, label, K) == approx((accuracy, chance))
    assert math.isnan(quality(score[:2], torch.ones(2), 2)[0])


def scorer_of():
    return ScalarHead(32, tiny_model(), 1 / math.sqrt(33), torch.Generator().manual_seed(0))


def ended(texts, rewards):
    """A Batch with rewards at the last tokens."""
    batch = batch_of(texts)
    batch.ends = passes.last_tokens(batch.mask)
    batch.reward = batch.ends * torch.tensor(rewards, dtype=torch.float32)[:, None]
    return batch


@mark.parametrize("supervision", ["outcome", "process"])
def test_a_score_depends_on_neither_padding_nor_batch(supervision, monkeypatch):
    """It is where a row ends, normalised or as a probability; a row that was cut off gets less."""
    monkeypatch.setattr(reward, "TRUNCATED_REWARD", -9.0)
    s, batch = scorer_of(), ended(["~3000", "2726", WORK[:20]], [0] * 3)
    s.norm.data, cfg = torch.tensor([0.3, 1.7]), Config(supervision=supervision, micro_tokens=40)
    padding = ~batch.mask & (torch.arange(27) >= 6)
    batch.ids, wanted = torch.where(padding, 99, batch.ids), []
    for row, n in zip(batch.ids, (12, 11, 27)):
        raw = s(row[None, :n])[0, -1].item()
        wanted.append(1 / (1 + math.exp(-raw)) if supervision == "process" else (raw - 0.3) / 1.7)
    batch.reward = learned(s, batch, cfg)
    assert at_ends(batch, batch.reward) == [[approx(x, rel=1e-4)] for x in wanted]
    assert not batch.reward[~batch.ends].any()
    batch.finished[1] = False
    assert at_ends(batch, reward.cap_truncated(batch))[1] == [-9]


@mark.parametrize("supervision", ["outcome", "process"])
def test_equal_labels_teach_nothing(supervision, capsys, monkeypatch):
    """Before the first fit all rewards are 0; what an earlier fit learned is kept."""
    cfg = Config(supervision=supervision, prompts=8, group=4, reward="model", micro_tokens=400)
    agent = SimpleNamespace(cfg=cfg, history={}, reward_model=scorer_of())
    learn = preferences(20, 4)
    flat = dataclasses.replace(learn, reward=torch.where(learn.ends, 1.0, 0))
    before = [p.clone() for p in agent.reward_model.parameters()]
    assert fit_and_measure(agent, [flat], 2, random.Random(0)) == {}
    assert "all labels are equal" in capsys.readouterr().out
    assert all(map(torch.equal, before, agent.reward_model.parameters()))
    assert not learned(agent.reward_model, learn, cfg).any()
    agent.history = {}
    learn.reward = (learn.reward > 3) / 1
    measured = iter([(0.5, 0.5), (0.75, 0.5)])
    monkeypatch.setattr(reward, "quality", lambda *_: next(measured))
    assert fit_and_measure(agent, [learn], 2, random.Random(0)) == {"rm_accuracy": 0.5}
    assert "no better than chance" in capsys.readouterr().out
    assert learned(agent.reward_model, learn, cfg).any() and len(agent.history["ids"]) == 4 * 18
    found = fit_and_measure(agent, [flat], 2, random.Random(1))       # replayed ones differ
    said = capsys.readouterr().out
    assert found == {"rm_accuracy": 0.75} and "held out: accuracy 75.0%" in said
    assert "no better" not in said


def preferences(n, K):
    """Of n problems K completions each, whose rewards are their numbers of a."""
    r = random.Random(0)
    texts = ["".join(r.choice("ab") for _ in range(6)) for _ in range(n * K)]
    return ended(texts, [text.count("a") for text in texts])


def fitted(monkeypatch, model, batch, K, micro_tokens=0):
    """The loss terms of each step of a fit, and its rate."""
    def supervised_fit(name, module, losses, steps, lr):
        found.extend([[loss.item() for loss in losses(step)] for step in range(steps)])
        rates.append(lr)
    found, rates, cfg = [], [], Config(micro_tokens=micro_tokens)
    monkeypatch.setattr(passes, "supervised_fit", supervised_fit)
    reward.fit(model, reward.labelled(batch), K, cfg, random.Random(0))
    return found, rates[0]


@mark.parametrize("micro_tokens, tokens", [(1, 1), (0, 1024), (60, 30)])
def test_a_micro_batch_of_sets_has_their_share_of_the_tokens(micro_tokens, tokens, monkeypatch):
    sizes = []
    monkeypatch.setattr(ScalarHead, "forward", lambda self, ids, mask: (
        sizes.append(ids.shape), torch.zeros(ids.shape))[1])
    found, _ = fitted(monkeypatch, scorer_of(), preferences(400, 2), 2, micro_tokens)
    assert len(found) == 12 and sum(n for n, _ in sizes) == 800         # 66 or 68 rows a step
    assert all(n == 2 or n * width <= 2 * tokens for n, width in sizes)
    assert (max(n for n, _ in sizes) > 2) is (tokens > 1)
    assert (len(sizes) == 12) is (tokens > 1000)


@mark.parametrize("width, lr", [(4, 1e-3), (256, 1e-3), (257, 1e-3 * 256 / 257), (1024, 2.5e-4)])
def test_a_set_of_a_fit_is_as_long_as_its_longest_row(width, lr, monkeypatch):
    """Which may be any. Above 256 channels the rate is as 1 / width: muP, arXiv 2203.03466."""
    batch, s = ended(["a", "bbb", "ccccc", "d"], [1, 0, 0, 1]), scorer_of()
    s.head.in_features = width
    (found,), rate = fitted(monkeypatch, s, batch, 2, 1)        # each set by itself
    score = scores(s, batch.ids, batch.mask, Config())[batch.ends]
    want = reward_loss(score, batch.reward[batch.ends], 2).item() / 2
    assert sum(found) == approx(want, rel=1e-5) and len(found) == 2
    assert rate == approx(lr)


# ---------- rollout labels

def continued(agent, problems, tries, begun, said):
    """As grpo.generate, with texts that go on with `said(ids so far, number of the try)`."""
    prompts = [[*problem.prompt.encode()] for problem in problems]
    batch = conftest.batch_of_rows([
        (prompt + ids, [*said(ids, k).encode(), 256])
        for prompt, (ids, _) in zip(prompts, begun, strict=True) for k in range(tries)])
    batch.start, batch.judged = passes.behind_prompts(batch.mask, prompts, begun, tries)
    batch.problems = reward.repeated(problems, tries)
    batch.texts, batch.components = reward.by_rule(agent, batch)
    return batch


def test_rollout_labels_are_shares_of_what_comes_of_a_prefix(monkeypatch):
    """Judged whole, by the row's own problem, in parts of 128; a last step keeps its label. The
    random numbers are those of stream, prompt and place, whatever rank has the row."""
    def generate(agent, problems, tries, u, begun):
        """Of 4 tries as many are right as the length of a prefix modulo 5."""
        assert u.shape == (4 * len(begun), 150) and (0 <= u).all() and (u < 1).all()
        drawn.append(u)
        return continued(agent, problems, tries, begun, lambda ids, k: "yn"[k >= len(ids) % 5])

    def rule(problem, text):
        return {"correct": 0.5 * (text.strip(problem.prompt) == "y")}
    batch, drawn = batch_of(["a" * 100] * 2 + ["b" * 20] * 2), []
    both, batch.ends = [SimpleNamespace(prompt=x) for x in "ab"], batch.mask.clone()
    batch.problems = [both[0], both[0], both[1], both[1]]
    batch.mask = batch.mask & (torch.arange(batch.ids.size(1)) > 9)     # the beginning was given
    batch.ends[0, :50] = False                      # its first step is long
    batch.reward = 7.0 * batch.ends
    before, agent = batch.reward.clone(), agent_of(SimpleNamespace(reward=rule), max_new=150)
    label = rollout_labels(agent, generate, batch, 0)
    places = batch.ends & ~passes.last_tokens(batch.mask)
    share = (torch.arange(batch.ids.size(1)) - 5) % 5 / 8
    assert torch.equal(label, torch.where(places, share, before))
    assert torch.equal(batch.reward, before)
    assert [len(u) for u in drawn] == [4 * 128, 4 * (places.sum() - 128)]
    whole = torch.cat(drawn)[:, 0]
    assert len(whole.unique()) == 4 * places.sum()
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    monkeypatch.setattr(dist, "rank", lambda: 1)
    part = passes.select(batch, torch.tensor([2, 3]), batch.ids.size(1))
    for stream in (0, 1):
        rollout_labels(agent, generate, part, stream)
        u = drawn[-1][:, 0]
        assert (u == whole[-len(u):]).float().mean() == 1 - stream
    batch.ends = passes.last_tokens(batch.mask)     # steps of which nothing can go on
    assert torch.equal(rollout_labels(agent, None, batch, 0), before)


def test_a_text_is_what_the_policy_said():
    """Steps end where they end among its tokens; so does a text that goes on from a prefix."""
    def generate(agent, problems, tries, u, begun):
        return continued(agent, problems, tries, begun, lambda ids, k: "x")
    heard, judged, at = "\nhm?", [], 6 + 20
    batch = batch_of([WORK[:20] + heard + WORK[20:]])
    batch.mask[:, at:at + len(heard)] = False           # which is also what is judged
    assert scored(task, batch).texts == [WORK]
    batch.reward, batch.ends = reward.of_steps(task, byte_encoding(), batch)
    assert at_ends(batch, batch.ids) == [[10, 10, 256]] and batch.ends[0, at + len(heard)]
    assert at_ends(batch, batch.reward) == [[1, 1, 1]]
    toy = SimpleNamespace(reward=lambda problem, text: judged.append(text) or {"correct": 1.0})
    rollout_labels(agent_of(toy), generate, batch, 0, tries=1)
    assert judged == [WORK[:21] + "x", WORK[:37] + "x"]


def test_what_is_labelled_does_not_depend_on_the_number_of_ranks(monkeypatch):
    """Nor does its order, if one rank has a problem more."""
    def rows(*numbers):
        return {"ids": torch.tensor(numbers).repeat_interleave(reward.CHOICES)[:, None]}
    cfg, found = Config(prompts=4), []
    for ranks in (1, 2):
        monkeypatch.setattr(dist, "ranks", lambda: ranks)
        found.append(reward.problems_to_label(range(59), cfg, random.Random(0)))
    assert found[0] == found[1] and list(map(len, found[0])) == [5, 54]
    monkeypatch.setattr(dist, "gather", lambda mine: [mine, rows(1, 3)])
    ids = reward.of_all_ranks(rows(0, 2, 4))["ids"]
    assert ids[::reward.CHOICES, 0].tolist() == [0, 1, 2, 3, 4] and len(ids) == 20
