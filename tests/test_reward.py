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
from data import UserError
from data.tokenizer import Encoding, byte_encoding, step_tokens
from grpo import Config, group_scores
from model import ScalarHead
from reward import choices, learned, quality, refit, reward_loss, rollout_labels, scores
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
    reward.score_by_rule(agent_of(task), problems, batch)
    return batch


def at_ends(batch, x):
    """What each row has at the ends of its steps."""
    return [row[on].tolist() for row, on in zip(x, batch.ends)]


# ------------------------------------------------------------------------------ rewards of steps

STEPS = {WORK: [1, 1, 1], WORK.replace("56=376", "56=386"): [1, 0, 0], "~3000": [0],
         "\n47*50=2350\n47*8=376": [1, 0]}      # true steps, without an answer


@pytest.mark.parametrize("supervision, end, wanted", [
    ("outcome", True, {WORK: [2], "~3000": [0], "2726": [1], "": [0]}),
    ("process", True, STEPS | {"": [0]}),       # stopping gets an advantage, too
    ("outcome", False, {WORK: [-1.5]}),
    ("process", False, {WORK: [1, 1, -1.5]})])
def test_rewards_are_at_the_ends_of_steps(supervision, end, wanted, monkeypatch):
    """A newline closes a step; the last one ends at the last token."""
    monkeypatch.setattr(reward, "TRUNCATED_REWARD", -1.5)
    batch, agent = batch_of([*wanted], end=end), agent_of(task, supervision=supervision)
    reward.score_by_rule(agent, [PROBLEM], batch)
    assert batch.texts == [*wanted] and batch.problems == [PROBLEM] * len(wanted)
    reward.fill_in_rewards(agent, batch)
    assert at_ends(batch, batch.reward) == [*wanted.values()]
    assert not batch.reward[~batch.ends].any()
    last = 256 if end else ord("6")
    assert at_ends(batch, batch.ids) == [[10] * (len(r) - 1) + [last] for r in wanted.values()]
    if not end:                             # a learned reward may be worse than the limit
        batch.reward = -2.0 * batch.ends
        assert at_ends(batch, reward.cap_truncated(batch))[0][-1] == -2


FINE = [(1, 1.0), [3, False], (torch.tensor([3]).numpy()[0], True), (5, 0)]     # numpy's, and lists


@pytest.mark.parametrize("found, fault", [
    (FINE, ""), ([], ""), (None, "list of"), ({3: True}, "list of"), ([3], "pairs"),
    ([(3, True, 1)], "pairs"), *(([(end, True)], "from 1 to 5") for end in (0, 6, 3.0, True)),
    ([(3, True), (2, True)], "from 3 to 5, not 2"),
    *(([(2, True), (3, truth)], "True or False") for truth in (0.5, 2, None, torch.ones(2)))])
def test_steps_of_another_form_are_refused(found, fault):
    """Instead of a traceback, or of silent training on it."""
    odd = SimpleNamespace(reward=task.reward, steps=lambda problem, text: found)
    batch, agent = scored(odd, batch_of(["~3000"])), agent_of(odd, supervision="process")
    if fault:
        with pytest.raises(UserError, match=f"^the steps of the prompt '47\\*58=' must.*{fault}"):
            reward.of_rule(agent, batch)
    else:
        assert reward.of_rule(agent, batch)[1].sum() == max(1, len({end for end, _ in found}))


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "gsm8k"])
def test_a_completion_without_text_is_one_false_step(name):
    right = lambda problem, text: {"correct": 1.0}
    steps = SimpleNamespace(reward=right, steps=data.load_task(name).steps)
    batch = scored(steps, batch_of([""]))
    r, ends = reward.of_steps(steps, byte_encoding(), batch)
    assert ends.sum() == 1 and batch.ids[ends].tolist() == [256] and not r.any()


RANKS = {bytes([i]): i for i in range(256)} | {b"\n\xe4": 256, b"=2": 257}
LONGER = Encoding("t", r"[\s\S]+", RANKS, {"<end>": 300}, [300], {})
TEXT = "é=1\n二=2\n3"


@pytest.mark.parametrize("encoding, ids, tokens", [
    (byte_encoding(), [*TEXT.encode()], [4, 10, 11]),
    (LONGER, LONGER.encode_ordinary(TEXT), [4, 8, 9]),          # one has a newline and half of 二
    (byte_encoding(), [0xff, 10, 0xe4, 10, 65], [1, 3, 4])])    # no text
def test_step_tokens(encoding, ids, tokens):
    text = b"".join(map(encoding.decode_single_token_bytes, ids)).decode("utf-8", "replace")
    ends = [i + 1 for i, c in enumerate(text) if c == "\n"] + [len(text)]
    assert step_tokens(encoding, ids, ends) == tokens


# ------------------------------------------------------------------------------ rewards of a task

def test_components_that_cancel_add_up_to_0():
    """0.7 - 0.1 - 0.6 is -6e-8 in float32. A rest that is no rounding stays; so does their order."""
    texts = {"x": (0.7, -0.1, -0.6), "y": (0.0,) * 3, "z": (1.0, 0.0, -0.999), "w": (1e-7, 0.0, 0.0)}

    def rule(problem, text):
        parts = dict(zip(("correct", "a", "b"), texts[text]))
        return parts if text == "x" else dict(reversed(parts.items()))
    toy = SimpleNamespace(reward=rule)
    batch = scored(toy, batch_of([*texts]))
    total = reward.of_rule(agent_of(toy), batch)[0].sum(1)
    assert total[:2].tolist() == [0, 0]
    assert total[2:].tolist() == pytest.approx([1e-3, 1e-7], rel=1e-3)
    assert [*batch.components] == ["correct", "a", "b"]
    assert batch.components["b"].tolist() == pytest.approx([-0.6, 0, -0.999, 0])


def test_a_component_named_reward_is_the_reward_and_the_others_are_logged():
    """However small: 1e-9 and 3e-9 differ. A row that was cut off earns at most 0."""
    toy = SimpleNamespace(reward=lambda p, x: {"correct": 1.0, "reward": float(x), "style": 5.0})
    batch, agent = batch_of(["1e-9", "3e-9", "2", "-2"]), agent_of(toy, group=2, kl="none")
    batch.finished = torch.tensor([True, True, False, False])
    scored(toy, batch)
    reward.fill_in_rewards(agent, batch)
    assert batch.reward.sum(1).tolist() == pytest.approx([1e-9, 3e-9, 0, -2])
    batch.adv, dead = group_scores(batch.reward, batch.ends, agent.cfg)
    assert batch.adv[batch.ends].tolist() == pytest.approx([-1, 1, 1, -1]) and not dead.any()
    stats = report.statistics(batch, dead)
    assert stats["reward"] == pytest.approx(-0.5)
    assert stats["style"] == 2.5 and stats["accuracy"] == 0.5


def test_rewards_of_all_completions_at_once():
    """With their problems, in the order of the rows, and their numbers of tokens."""
    def rewards(problems, texts, tokens):
        assert (problems, tokens) == ([p, p, q, q], [2, 4, 3, 1])
        longest = max(texts, key=len)
        return [{"correct": float(text == longest), "n": n} for text, n in zip(texts, tokens)]
    p, q = (SimpleNamespace(prompt=x) for x in "pq")
    batch = scored(SimpleNamespace(rewards=rewards), batch_of(["a", "bcd", "ef", ""]), [p, q])
    assert batch.components["correct"].tolist() == [0, 1, 0, 0]
    assert batch.components["n"].tolist() == [2, 4, 3, 1]


@pytest.mark.parametrize("found, why", [
    ([{"correct": 1}], "list of 2 dicts"), (None, "list of 2 dicts"),
    ([{"correct": 1}, {"right": 1}], "'q' must be a dict with 'correct'"),
    ([{"correct": 1}, {"correct": 1, "x": 1}], "'q' must have the components correct, as"),
    ([{"correct": 1}, {"correct": math.nan}], "'q' must be a finite number")])
def test_rewards_of_another_form(found, why):
    problems = [SimpleNamespace(prompt=x) for x in "pq"]
    with pytest.raises(UserError, match=why):
        data.rewards_of(SimpleNamespace(rewards=lambda *given: found), problems, ["a", "b"], [2, 2])


@pytest.mark.parametrize("more", ["", "def reward(p, c): pass", "def rewards(p, c, n): pass"])
def test_a_task_needs_one_of_both(more, tmp_path):
    text = "DEFAULTS = {}\ndef problems(): pass\ndef answer(text): pass\n"
    (tmp_path / "toy.py").write_text(text + more)
    if more:
        assert data.load_task(str(tmp_path / "toy.py")).DEFAULTS == {}
    else:
        with pytest.raises(UserError, match="no function reward"):
            data.load_task(str(tmp_path / "toy.py"))


# ------------------------------------------------------------------------------- the reward model

def test_people_choose_any_of_the_best():
    """Wherever the completions end; nothing but the labels changes, and they only there."""
    ends = torch.zeros(9, 4, dtype=torch.bool)
    ends[range(9), [3, 1, 2, 3, 3, 0, 1, 2, 0]] = True
    label = torch.full((9, 4), 7.0)
    label[ends] = torch.tensor([0.0, 2, -1, 1, 0, 1, 3, 3, 3])
    rows = {"ids": torch.rand(9, 4), "ends": ends, "label": label}
    found, third = choices(rows, 3), pytest.approx(1 / 3)
    assert found["label"][ends].tolist() == [0, 1, 0, 0.5, 0, 0.5, *[third] * 3]
    assert torch.equal(found["label"][~ends], label[~ends]) and label[0, 3] == 0
    assert found["ids"] is rows["ids"] and found["ends"] is ends


def test_the_loss_of_an_identical_pair_is_ln_2():
    """And of a step of which nothing is known; sums of all."""
    zero, label = torch.zeros(4), torch.tensor([1.0, 0.0, 0.25, 0.75])
    assert reward_loss(zero, label, 2).item() == pytest.approx(2 * math.log(2))
    assert reward_loss(zero, label, 1).item() == pytest.approx(4 * math.log(2))


@pytest.mark.parametrize("chance, label, K, accuracy, error", [
    ([0.8, 0.8, 0.2, 0.2], [1, 1, 0, 1], 1, 0.75, 0.05),        # three of four are hit
    ([0.95, 0.85], [0, 1], 1, 0.5, 0.55),       # errors of other certainties do not cancel
    ([0.5] * 3, [0, 0.5, 1], 1, 2 / 3, 1 / 6),          # undecided is `bad`
    ([1.0, 0.95], [1, 1], 1, 1, 0.025),         # to be sure is of the last bin
    ([0.7, 0.3, 0.7, 0.3], [1, 0, 0, 1], 2, 0.5, 0.2),
    ([0.7, 0.3, 0.7, 0.3], [1, 0, 0.5, 0.5], 2, 1, 0.05)])      # one of two equals
def test_quality_by_hand(chance, label, K, accuracy, error):
    chance = torch.tensor(chance)
    score = chance.logit().clamp(max=99) if K == 1 else chance.log()
    label = torch.tensor(label, dtype=torch.float32)
    assert quality(score, label, K) == pytest.approx((accuracy, error))


def scorer_of():
    return ScalarHead(32, tiny_model(), 1 / math.sqrt(33), torch.Generator().manual_seed(0))


def test_score_depends_on_neither_padding_nor_batch():
    s, batch, cfg = scorer_of(), batch_of(["~3000", "2726", WORK[:20]]), Config(micro_tokens=40)
    ids, mask = batch.ids, batch.mask
    whole = scores(s, ids, mask, cfg)
    for i, n in enumerate((12, 11, 27)):
        alone = scores(s, ids[i:i + 1, :n], mask[i:i + 1, :n], cfg)
        torch.testing.assert_close(whole[i, :n], alone[0], rtol=1e-5, atol=1e-5)
    padding = ~mask & (torch.arange(27) >= 6)
    dirty = scores(s, torch.where(padding, 99, ids), mask, cfg)
    torch.testing.assert_close(dirty[mask], whole[mask])


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_learned_reward_is_where_steps_end_and_a_cut_row_gets_its_own(supervision, monkeypatch):
    monkeypatch.setattr(reward, "TRUNCATED_REWARD", -3.0)
    s, batch = scorer_of(), batch_of(["~3000", "2726"])
    s.norm.data, batch.finished = torch.tensor([0.3, 1.7]), torch.tensor([True, False])
    batch.ends = passes.last_tokens(batch.mask)
    batch.reward = learned(s, batch, Config(supervision=supervision))
    r = reward.cap_truncated(batch)
    raw = scores(s, batch.ids, batch.mask, Config())[0, 11].item()
    want = 1 / (1 + math.exp(-raw)) if supervision == "process" else (raw - 0.3) / 1.7
    assert r[batch.ends].tolist() == [pytest.approx(want), -3] and not r[~batch.ends].any()


def preferences(n, K):
    """n problems with K completions each, labelled by their number of a."""
    r = random.Random(0)
    texts = ["".join(r.choice("ab") for _ in range(6)) for _ in range(n * K)]
    batch = batch_of(texts, prompt="?")
    batch.ends = passes.last_tokens(batch.mask)
    batch.reward = batch.ends * torch.tensor([[float(text.count("a"))] for text in texts])
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_a_reward_model_learns_what_people_prefer(supervision, capsys, monkeypatch):
    """But for those it is measured on; it is normalised on those it was fitted to."""
    monkeypatch.setattr(reward, "FIT_LR", 3e-3)
    monkeypatch.setattr(reward, "CHOICES", 2)
    batch, s, cfg = preferences(400, 2), scorer_of(), Config(supervision=supervision)
    if supervision == "process":
        batch.reward = (batch.reward > 3).float()
    agent = conftest.agent_of(cfg, reward_model=s, history={})
    measures = refit(agent, [batch], 40, random.Random(0))
    assert measures["rm_accuracy"] > 0.75 and measures["rm_error"] < 0.25
    assert f"held out: accuracy {measures['rm_accuracy']:.1%}" in capsys.readouterr().out
    assert len(agent.history["ids"]) == 720
    if supervision == "outcome":
        r = learned(s, batch, cfg)[80:][batch.ends[80:]]
        assert r.mean().item() == pytest.approx(0, abs=1e-4) and r.std().item() == pytest.approx(1, 1e-3)


def fitted(monkeypatch, model, rows, K, cfg=Config()):
    """The loss terms of each step of a fit that does nothing, and its rate."""
    def supervised_fit(name, module, losses, steps, lr):
        found.extend([[loss.item() for loss in losses(step)] for step in range(steps)])
        rates.append(lr)
    found, rates = [], []
    monkeypatch.setattr(passes, "supervised_fit", supervised_fit)
    reward.fit(model, rows, K, cfg, random.Random(0))
    return found, rates[0]


@pytest.mark.parametrize("micro_tokens, tokens", [(1, 1), (0, 1024), (40, 20)])
def test_a_micro_batch_of_sets_has_their_share_of_the_tokens(micro_tokens, tokens, monkeypatch):
    """Pairs of up to `tokens` each; one pair at a time if not even one fits."""
    sizes, rows = [], reward.labelled(preferences(400, 2))
    monkeypatch.setattr(ScalarHead, "forward", lambda self, ids, mask: (
        sizes.append(ids.shape), torch.zeros(ids.shape))[1])
    found, _ = fitted(monkeypatch, scorer_of(), rows, 2, Config(micro_tokens=micro_tokens))
    assert len(found) == 12 and sum(n for n, _ in sizes) == 800         # 66 or 68 rows a step
    assert all(n == 2 or n * width <= 2 * tokens for n, width in sizes)
    assert (max(n for n, _ in sizes) > 2) is (tokens > 1)
    assert (len(sizes) == 12) is (tokens > 1000)


def test_a_set_of_a_fit_is_as_long_as_its_longest_row(monkeypatch):
    """Which may be any of its rows: the reward is at the end of each."""
    batch, s, cfg = batch_of(["a", "bbb", "ccccc", "d"]), scorer_of(), Config(micro_tokens=1)
    batch.ends = passes.last_tokens(batch.mask)
    batch.reward = batch.ends * torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    (found,), _ = fitted(monkeypatch, s, reward.labelled(batch), 2, cfg)       # a set by itself
    score = scores(s, batch.ids, batch.mask, Config())[batch.ends]
    assert len(found) == 2
    want = reward_loss(score, batch.reward[batch.ends], 2).item() / 2
    assert sum(found) == pytest.approx(want, rel=1e-5)


def test_a_step_of_a_fit_has_a_set_at_least(monkeypatch):
    """With more than 64 choices too; a step without one would repeat the last one's momentum."""
    batch = preferences(3, 100)
    rows = reward.labelled(batch) | {"label": batch.ends / 100}
    found, _ = fitted(monkeypatch, scorer_of(), rows, 100)
    assert len(found) == 3 and min(map(sum, found)) > 0


@pytest.mark.parametrize("width, lr", [(256, 1e-3), (257, 1e-3 * 256 / 257), (1024, 2.5e-4)])
def test_the_rate_of_a_fit_falls_with_the_width(width, lr, monkeypatch):
    """Above 256 channels as 1 / width: muP, arXiv 2203.03466."""
    monkeypatch.setattr(ScalarHead, "forward", lambda self, ids, mask: torch.zeros(ids.shape))
    model = ScalarHead(width, SimpleNamespace(kv_cache="plain", device="cpu"))
    _, found = fitted(monkeypatch, model, reward.labelled(preferences(1, 2)), 2)
    assert found == pytest.approx(lr)


def test_sets_are_padded_and_no_more_are_replayed_than_there_are():
    a, b = ({"ids": torch.full((2, n), n)} for n in (3, 5))
    rows = [[3, 3, 3, 0, 0]] * 2, [[5] * 5] * 2
    assert passes.join([a, b])["ids"].tolist() == rows[0] + rows[1]
    assert passes.join([b, a])["ids"].tolist() == rows[1] + rows[0]
    replayed = reward.replay({"ids": torch.arange(12)}, 44, 4, random.Random(0))["ids"].view(-1, 4)
    assert sorted(replayed.tolist()) == torch.arange(12).view(-1, 4).tolist()


# ------------------------------------------------------------------------------- rollout labels

def continued(agent, problems, tries, begun, said):
    """A Batch of `tries` rows for each beginning of a completion, as grpo.completions makes it;
    they go on with `said(ids so far, number of the try)` and the end."""
    prompts = [[*problem.prompt.encode()] for problem in problems]
    batch = conftest.batch_of_rows([
        (prompt + ids, [*said(ids, k).encode(), 256])
        for prompt, (ids, _) in zip(prompts, begun, strict=True) for k in range(tries)])
    passes.begin_earlier(batch, prompts, begun, tries)
    reward.score_by_rule(agent, problems, batch)
    return batch


def test_rollout_labels_are_shares_of_what_comes_of_a_prefix():
    """Judged whole, by the row's own problem, in parts of 128, with random numbers of their own;
    a last step keeps its label."""
    batch, drawn = batch_of(["a" * 100, "b" * 120]), []
    batch.problems, batch.ends = [SimpleNamespace(prompt=x) for x in "ab"], batch.mask.clone()
    batch.ends[0, :50] = False                      # its first step is long
    batch.reward = 7.0 * batch.ends
    before = batch.reward.clone()

    def completions(agent, problems, tries, u, begun):
        """Of 4 tries as many are right as the length of a prefix modulo 5."""
        assert tries == 4 and u.shape == (4 * len(begun), 150) and (0 <= u).all() and (u < 1).all()
        assert all(all(judged) for _, judged in begun)
        drawn.append(u)
        return continued(agent, problems, tries, begun, lambda ids, k: "yn"[k >= len(ids) % 5])

    def rule(problem, text):
        return {"correct": float(text[:-1].strip(problem.prompt) == "" and text.endswith("y"))}
    agent = agent_of(SimpleNamespace(reward=rule), max_new=150)
    label = rollout_labels(agent, completions, batch, 2, 0)
    places = batch.ends & ~passes.last_tokens(batch.mask)
    share = ((torch.arange(batch.ids.size(1)) - 5) % 5 / 4).expand_as(label)
    assert torch.equal(label, torch.where(places, share, before)) and torch.equal(batch.reward, before)
    assert [len(u) for u in drawn] == [4 * 128, 4 * (places.sum() - 128)]
    assert torch.cat(drawn)[:, 0].unique().numel() == 4 * places.sum()
    batch.ends = passes.last_tokens(batch.mask)     # steps of which nothing can go on
    assert torch.equal(rollout_labels(agent, None, batch, 2, 0), before)


def test_a_text_is_what_the_policy_said():
    """Steps end where they end among its tokens; a completion that goes on from a prefix has
    those of its tokens too that were there before."""
    heard, judged, at = "\nhm?", [], 6 + 20
    batch = batch_of([WORK[:20] + heard + WORK[20:]])
    batch.mask[:, at:at + len(heard)] = False           # which is also what is judged
    assert scored(task, batch).texts == [WORK]
    batch.reward, batch.ends = reward.of_steps(task, byte_encoding(), batch)
    places = batch.ends[0].nonzero()[:, 0]
    assert [chr(x) for x in batch.ids[0, places[:2]]] == ["\n"] * 2 and places[0] == at + len(heard)
    assert at_ends(batch, batch.reward) == [[1, 1, 1]]

    def completions(agent, problems, tries, u, begun):
        return continued(agent, problems, tries, begun, lambda ids, k: "x")
    toy = SimpleNamespace(reward=lambda problem, text: judged.append(text) or {"correct": 1.0})
    rollout_labels(agent_of(toy), completions, batch, 1, 0, tries=1)
    assert judged == [WORK[:21] + "x", WORK[:37] + "x"]


def test_rollout_labels_do_not_depend_on_how_ranks_share_the_rows(monkeypatch):
    """The random numbers of a step are those of its prompt and place, and of the stream."""
    batch, (p, q) = batch_of(["ab", "ab", "ab", "cd"]), (SimpleNamespace(prompt=x) for x in "pq")
    batch.problems, batch.ends, batch.reward = [p, p, q, q], batch.mask, 0.0 * batch.mask

    def labels(batch, stream=0):
        def completions(agent, problems, tries, u, begun):
            return SimpleNamespace(components={"correct": u[:, 0].float()})
        return rollout_labels(agent_of(), completions, batch, 2, stream)
    whole = labels(batch)
    assert len(whole[whole > 0].unique()) == 8
    assert not (labels(batch, 1) == whole)[whole > 0].any()
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    for rank, problem in enumerate((p, q)):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        rows = torch.arange(2 * rank, 2 * rank + 2)
        part = passes.select(batch, rows, batch.ids.size(1))
        part.problems = [problem] * 2
        assert torch.equal(labels(part), whole[rows])
