"""The loss and the update: extremes in float32, rows that are left out, bfloat16, gaps between
sampler and trainer, micro-batches."""
import dataclasses
import math
import random
from types import SimpleNamespace

import torch
from conftest import shared_logps, tiny_model
from pytest import approx, fixture, mark, raises
from test_advantages import outcome
from test_oracle import on_ranks
from torch.testing import assert_close

import data.arithmetic as task
import grpo
from data import UserError
from grpo import Agent, Batch, Config, policy_loss, sample, token_weights
from model import token_logps
from run import caches, passes, pretrained
from run.passes import split_rows

CFG = Config(prompts=2, group=4, max_new=12)


def with_(**changes):
    return dataclasses.replace(CFG, **changes)


NEXT = torch.nextafter(torch.tensor([1e6, -3.3]), torch.tensor(0.0)).tolist()


@mark.parametrize("scale", ["none", "group"])
@mark.parametrize("rewards", [
    *([x] * 64 for x in (0.1, 1e6 + 0.1, 0.0, -3.3)), [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
    [1e6, NEXT[0], NEXT[0], 1e6], [-3.3, NEXT[1]], [1000 + 2e-4, 1000.0],
    [0.3 - 0.05 * 6, 0.0]], ids=lambda rewards: str(rewards[:4]))
def test_rewards_equal_up_to_rounding_give_exactly_zero(rewards, scale):
    """Not so those of a group beside them, though they are small."""
    n, by = len(rewards), 1 if scale == "group" else 1e-5
    assert outcome(rewards, adv_scale=scale) == ([0.0] * n, [True])
    adv, dead = outcome(rewards + [1e-5, 3e-5] * (n // 2), group=n, adv_scale=scale)
    assert adv[:n] == [0.0] * n and dead == [True, False]
    assert adv[n:] == approx([-by, by] * (n // 2), rel=1e-3)


# ---------- loss, weights

MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


def loss_of(logp, old_logp, ref_logp, adv, mask, weight, cfg=CFG):
    batch = Batch(None, mask, None, None, None, old_logp=old_logp, ref_logp=ref_logp, adv=adv)
    return policy_loss(logp, batch, weight, mask.sum().clamp(min=1), cfg, 0.04)


@mark.parametrize("ratio", ["token", "sequence"])
@mark.parametrize("mean, short, long", [
    ("sequence", 1 / 6, 1 / 12), ("token", 1 / 6, 1 / 6), ("constant", 1 / 24, 1 / 24)])
def test_weights_of_long_and_short_rows(mean, short, long, ratio):
    """Also beside a row without tokens; and if all are without, there is no loss."""
    for mask in (MASK, MASK & False):
        weight, one = token_weights(mask, mean, 3, 6, 8), torch.ones(3, 5)
        wanted = ([short] * 2 + [long] * 4)[:mask.sum()]
        assert weight[mask].tolist() == approx(wanted) and not weight[~mask].any()
        logp = torch.zeros(3, 5, requires_grad=True)
        loss, stats = loss_of(logp, 0 * one, None, one, mask, weight, with_(ratio=ratio))
        loss.backward()
        assert_close(logp.grad, -weight)
        assert loss.item() == approx(-sum(wanted)) and stats["clip_share"] == 0


@mark.parametrize("ratio, adv, loss, grad, clipped, clip", [
    (3.0, 1, -1.2, 0, 1, 0.2),              # the documents' "rug": 0.3 / 0.1 = 3, clipped to 1.2
    (3.0, -1, 3.0, 3.0, 0, 0.2),            # but not where the larger ratio makes it worse
    (0.5, 1, -0.5, -0.5, 0, 0.2),
    (0.5, -1, 0.8, 0, 1, 0.2),
    (1.0, 1, -1.0, None, 0, 0.0),           # at the bound it is not clipped
    (1.0, -1, 1.0, None, 0, 0.0)])
def test_four_quadrants_of_the_clip(ratio, adv, loss, grad, clipped, clip):
    """Of a token of weight 1, beside one without an advantage; numbers where nothing was sampled
    change nothing."""
    x, on = math.log(ratio), torch.tensor([[True, False, True]])
    logp, old, ref, adv = torch.tensor([[x, 7, 0], [0, 3, 0], [x, 9, 0], [adv, 5, 0]])[:, None]
    cfg = with_(clip_low=clip, clip_high=clip)
    got, stats = loss_of(logp.requires_grad_(), old, ref, adv, on, on / 1, cfg)
    got.backward()
    assert got.item() == approx(loss) and stats["clip_share"] == clipped / 2
    assert stats["kl"] == 0 and logp.grad[0, 1] == 0
    assert grad is None or logp.grad[0, 0].item() == approx(grad)


def test_k3_equals_its_formula_and_loses_no_digits():
    """As (exp(r) - 1) - r in float32 it is 3.3 times too large at r = 1e-4, or negative."""
    def k3(r):
        one = torch.ones(1, 1)
        return loss_of(0 * one, 0 * one, r * one, 0 * one, one > 0, one)[1]["kl"].item()
    for r in (-3.0, -0.5, 0.5, 3.0):
        assert k3(r) == approx(math.exp(r) - 1 - r, rel=1e-5)
    assert k3(1e-4) == approx(5e-9, rel=0.01)
    assert all(k3(r / 25000) >= 0 for r in range(-250, 251))


@mark.parametrize("gap", [200.0, -200.0])
@mark.parametrize("adv", [1.0, -1.0])
@mark.parametrize("place", [0, 1])
def test_huge_gaps_keep_the_gradient_finite(gap, adv, place):
    """exp overflows; at a kept column, and at a masked one."""
    logp, far = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2)
    far[0, place] = gap
    mask = torch.tensor([[True, False]])
    loss, _ = loss_of(logp, far, far, torch.full((1, 2), adv), mask, mask / 1)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all() and logp.grad[0, 1] == 0


@mark.parametrize("ratio", ["token", "sequence"])
def test_a_ratio_beyond_the_bounds_still_has_a_gradient(ratio):
    x = torch.tensor([[-30.0], [30.0]], requires_grad=True)
    grpo.importance_ratio(x, x.abs() > 0, with_(ratio=ratio)).sum().backward()
    assert_close(x.grad, torch.tensor([[-20.0], [20.0]]).exp())


@mark.parametrize("given", [
    {}, dict(baseline="value", kl="reward", adv_scale="batch", shared_prefixes=False),
    dict(baseline="group+value", critic="separate", supervision="process")], ids=str)
def test_a_rollout_is_0_wherever_nothing_was_sampled(given, encoding, monkeypatch):
    """So that nothing there reaches the loss, which takes all columns as they are."""
    monkeypatch.setattr(task, "reward", lambda problem, text: {"correct": len(text) % 2})
    encoding.stop = set(range(0, 257, 13))
    agent = grpo.new_agent(with_(epochs=2, **given), task, encoding, tiny_model())
    for p in agent.critic.head.parameters() if agent.critic else []:
        torch.nn.init.normal_(p)
    batch, _ = grpo.rollout(agent, task.problems(1)[0][:2], random.Random(0))
    batch.again = grpo.total_loss(agent, batch, batch.mask / 1, 1)[2]
    for name in "logp old_logp ref_logp again value returns adv reward".split():
        x = getattr(batch, name)
        if agent.critic is not None or name not in ("value", "returns"):
            assert x.isfinite().all() and not x[~batch.mask].any(), name
            assert x.any() or name == "reward", name
    assert len({*batch.mask.sum(1).tolist()}) > 1
    assert_close(batch.again, batch.logp, rtol=0, atol=1e-4)


# ---------- update

def a_rollout(**given):
    """A ragged Batch of the tiny model, with random advantages and another reference."""
    cfg, g = with_(**given), torch.Generator().manual_seed(3)
    u = torch.rand(8, 12, generator=g, dtype=torch.float64)
    b = sample(tiny_model(), [[49, 50, 61], [51, 61]], 4, [12] * 2, 1.0, set(range(0, 257, 13)), u)
    b.problems = [*"aaaabbbb"]
    b.adv = torch.where(b.mask, torch.randn(8, 1, generator=g), 0)
    b.old_logp, noise = b.logp, torch.randn(b.logp.shape, generator=g)
    b.ref_logp = None if cfg.kl == "none" else torch.where(b.mask, b.logp + 0.3 * noise, 0)
    return b, cfg


def agent_of(cfg, **parts):
    policy = tiny_model()
    return Agent(cfg, None, None, policy, ref=policy, beta=cfg.beta, **parts)


def updated(batch, cfg, lr=1.0, **parts):
    """The statistics of an update by plain gradients, and by how much each weight moved."""
    agent = agent_of(cfg, **parts)
    agent.ref = None if batch.ref_logp is None else agent.ref
    models = [x for x in (agent.policy, agent.critic) if x is not None]
    params = [p for x in models for p in x.parameters() if p.requires_grad]
    before, agent.opt = [p.detach().clone() for p in params], torch.optim.SGD(params, lr)
    given = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    stats = grpo.update(agent, batch, random.Random(0))
    assert all(torch.equal(x, getattr(batch, name)) for name, x in given.items())
    return stats, [p.detach() - q for p, q in zip(params, before)]


@fixture(autouse=True)
def unbounded(monkeypatch):
    """No gradient is clipped."""
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)


@mark.parametrize("dead, mean", [
    (range(4), "sequence"), (range(8), "token"), ([0, 1, 2, 5, 7], "constant")])
def test_rows_without_an_advantage_are_left_out(mean, dead, monkeypatch):
    """Without KL and critic: the same update as with them in it, also if no row is left."""
    def counted(gpt, batch, *given, own=grpo.token_logps):
        seen.append(len(batch.ids))
        return own(gpt, batch, *given)
    seen, (b, cfg) = [], a_rollout(loss_mean=mean, kl="watch", minibatches=2)
    monkeypatch.setattr(grpo, "token_logps", counted)
    b.adv[list(dead)] = 0
    watched, whole = updated(b, cfg)
    b.ref_logp = None
    stats, less = updated(b, cfg)
    assert sum(seen) == 8 + 8 - len(dead)
    assert_close(less, whole, rtol=1e-4, atol=1e-5)
    for name in {*stats} - {"mismatch"}:
        assert stats[name] == approx(watched[name], rel=1e-5, abs=1e-6), name


def test_a_row_with_any_advantage_is_kept():
    """Those of a row may cancel, or be 0 at its first token or its last; a KL or critic has all."""
    b, cfg = a_rollout(kl="none")
    b.adv, ones = torch.zeros_like(b.adv), torch.tensor([1.0, -1.0])
    for row, at in (0, [0]), (1, [-1]), (4, [0, -1]), (6, [0, 1]):
        b.adv[row, b.mask[row].nonzero()[at, 0]] = ones[:len(at)]
    assert b.adv.count_nonzero(1).tolist() == [1, 1, 0, 0, 2, 0, 2, 0]
    agent = agent_of(cfg)
    assert grpo.has_gradient(agent, b).all()
    agent.ref = None
    assert grpo.has_gradient(agent, b).nonzero()[:, 0].tolist() == [0, 1, 4, 6]
    agent.critic = "a model"
    assert grpo.has_gradient(agent, b).all()


@mark.parametrize("mean", ["sequence", "token"])
def test_a_minibatch_is_what_is_made_of_it(mean, monkeypatch):
    """Tokens may be left out, rows without an advantage may get one."""
    b, cfg = a_rollout(loss_mean=mean, kl="none")
    fewer = dataclasses.replace(b, mask=b.mask & (torch.arange(b.mask.size(1)) % 3 > 0))
    whole, wanted = updated(b, cfg)[1], updated(fewer, cfg)[1]
    monkeypatch.setattr(grpo, "minibatch", lambda agent, batch, rows: fewer)
    found = updated(dataclasses.replace(b, adv=torch.zeros_like(b.adv)), cfg)[1]
    assert all(map(torch.equal, found, wanted)) and not torch.equal(found[0], whole[0])


def test_a_surrogate_of_another_shape_is_refused(monkeypatch):
    b, cfg = a_rollout(kl="none")
    monkeypatch.setattr(grpo, "surrogate", lambda ratio, *_: (ratio.mean(), ratio > 9))
    with raises(AssertionError, match=r"surrogate must return tensors \(B, T\)"):
        updated(b, cfg)


@mark.parametrize("replaced", ["surrogate", "policy_loss", "total_loss"])
def test_a_new_term_of_the_loss_cannot_lose_rows(replaced, monkeypatch):
    """A file, or a notebook, adds one for some of the rows without an advantage."""
    (b, cfg), real = a_rollout(kl="none"), grpo.total_loss
    b.adv[:4] = 0

    def with_more(agent, batch, weight, tokens):
        loss, stats, logp = real(agent, batch, weight, tokens)
        return loss + 0.01 * (weight * logp * (batch.start == 2)[:, None])[2:].sum(), stats, logp
    with_more.__module__ = "grpo"       # as if it were its own
    monkeypatch.setattr(grpo, "total_loss", with_more)
    skipped, own = updated(b, cfg)[1], getattr(grpo, replaced)
    monkeypatch.setattr(grpo, replaced, lambda *given: own(*given))
    found = updated(b, cfg)[1]
    assert not any(torch.allclose(x, y, atol=1e-4) for x, y in zip(found, skipped))
    monkeypatch.setattr(grpo, "has_gradient", lambda agent, batch: torch.ones(8).bool())
    assert all(map(torch.equal, found, updated(b, cfg)[1]))


def test_a_step_is_without_dropout(encoding):
    """A fork's: it would make ratios noise."""
    cfg = with_(baseline="value", critic="separate", reward="model", kl="reward", adv_scale="none")
    agent = grpo.new_agent(cfg, task, encoding, tiny_model().train())
    models = agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model
    for step in (0, 1):
        assert not any(part.training for module in models for part in module.modules())
        grpo.train_step(agent, task.problems(1)[0][:2], 1)


@mark.parametrize("row", [0, 5, 7])
def test_a_gap_in_any_micro_batch_is_found(row):
    """In the first minibatch only, as later ones have other weights."""
    (b, cfg), two = a_rollout(micro_tokens=1), with_(micro_tokens=1, minibatches=2)
    first = b.mask[row].nonzero()[0, 0]
    b.logp = b.logp.clone()
    b.logp[row, first] += 6e-4
    assert updated(b, cfg, 1e-9)[0]["mismatch"] == approx(6e-4, abs=3e-5)
    b.logp[row, first] += 1
    rows, _ = next(grpo.minibatches(two, random.Random(0), b.groups))
    for given in [cfg] + [two] * (row in rows):
        with raises(UserError, match="sampler and trainer disagree: .* up to 1 apart"):
            updated(b, given, 1e-9)
    assert row in rows or updated(b, two, 1e-9)[0]["mismatch"] < 3e-5


def test_the_mean_gap_is_over_the_rows_that_are_left():
    b, cfg = a_rollout(kl="none")
    b.adv[::2], logp = 0, b.logp
    b.logp = logp + 9e-5 * b.mask
    updated(b, cfg)
    b.logp = logp + 1.5e-4 * b.mask
    with raises(UserError, match="sampler and trainer disagree"):
        updated(b, cfg)


@mark.parametrize("kl", ["loss", "none"])
def test_without_old_log_probabilities_the_ratio_is_1(kl):
    """The gradient is that of weights times advantages, to the bit."""
    b, cfg = a_rollout(kl=kl, clip_low=0.01, clip_high=0.01)
    agent, near = agent_of(cfg), dict(rtol=0, atol=0)
    b.old_logp, b.logp, params = None, b.logp - 3 * b.mask, [*agent.policy.parameters()]
    weight = token_weights(b.mask, "sequence", 8, b.mask.sum(), 12)
    loss, stats, logp = grpo.total_loss(agent, b, weight, b.mask.sum())
    assert stats["clip_share"] == 0 and b.old_logp is None
    again, _ = shared_logps(agent.policy, b.ids, b.mask, 1.0)
    want = weight * b.adv
    if kl == "loss":                        # eq. 21
        want = want + cfg.beta * weight * ((b.ref_logp - logp.detach()).exp() - 1) * b.mask
        near = dict(rtol=1e-4, atol=1e-6)
    wanted = torch.autograd.grad(-(want * again).sum(), params)
    assert_close(torch.autograd.grad(loss, params), wanted, **near)


@mark.parametrize("others", [False, True])
@mark.parametrize("given", [
    {}, dict(minibatches=2), dict(baseline="value"), dict(baseline="value", epochs=2),
    dict(kl="reward"), dict(kl="reward", minibatches=2), dict(dtype="bfloat16"),
    dict(dtype="bfloat16", epochs=2), dict(dtype="bfloat16", minibatches=2)], ids=str)
def test_the_old_log_probabilities(given, others, monkeypatch, encoding):
    """As sampled or, in bfloat16, with a critic or a KL in the reward, a pass's over the sampler's
    weights; none with one update. Sampled ones are 5e-5 too small; 3 those of others, which a
    Batch may keep. A KL that is 0 is no penalty, to the last bit."""
    def collect(*x, own=grpo.collect):
        batch = own(*x)
        batch.logp = batch.logp - 5e-5 * batch.mask
        if others:
            batch.on_policy, batch.logp = ~off, batch.logp - 3 * (batch.mask & off[:, None])
        return batch
    cfg = with_(**dict(kl="none", lr=1e-2, dtype="float32") | given)
    off = torch.arange(8) % 3 == 1
    agent = grpo.new_agent(cfg, task, encoding, pretrained.to_device(tiny_model(), cfg))
    if agent.sampler is not agent.policy:
        agent.sampler.norm.weight.data *= 1.01
    monkeypatch.setattr(grpo, "collect", collect)
    batch, _ = grpo.rollout(agent, task.problems(1)[0][:2], random.Random(0))
    if cfg.kl == "reward":
        parts = [getattr(batch, name) for name in ("reward", "ends", "groups", "mask")]
        assert torch.equal(batch.adv, grpo.advantages(*parts, 0 * batch.logp, None, cfg)[0])
    batch.adv = torch.where(batch.mask, torch.arange(8.0)[:, None] - 3.5, 0)
    present = batch.logp
    if {"baseline", "kl", "dtype"} & given.keys():
        present, _ = grpo.logps(agent.sampler, batch, cfg)
    if cfg.epochs * cfg.minibatches > 1 or others:
        want = torch.where(off[:, None] & others, batch.logp, present)
        assert torch.equal(batch.old_logp, want)
    else:
        assert batch.old_logp is None
    told = grpo.update(agent, batch, random.Random(0))
    assert 3e-5 < told["mismatch"] < (0.5 if cfg.dtype == "bfloat16" else 1e-4)
    assert told["clip_share"] > (0.1 if others else 0) or batch.old_logp is None
    if others:
        batch.on_policy = batch.on_policy | True
        with raises(UserError, match="sampler and trainer disagree"):
            grpo.update(agent, batch, random.Random(0))


@mark.parametrize("n", [[0], [1], [7], [11], [4, 4], [8, 3], [0, 5], [0, 0]], ids=str)
def test_an_algorithm_may_leave_out_rows_or_add_some(n, monkeypatch):
    """Each is once in an epoch; the size of a minibatch is that of all ranks."""
    def split(rows):
        groups = torch.arange(rows) // 4
        parts = grpo.minibatches(with_(epochs=2, minibatches=3), random.Random(5), groups)
        return [(rows.tolist(), size) for rows, size in parts]
    found = on_ranks(len(n), lambda rank: split(n[rank]), monkeypatch)
    for rows, of_rank in zip(n, found):
        for epoch in (of_rank[:3], of_rank[3:]):
            assert sorted(sum((part for part, _ in epoch), [])) == list(range(rows))
    sizes = [max(1, sum(len(part) for part, _ in parts)) for parts in zip(*found)]
    assert [[size for _, size in of_rank] for of_rank in found] == [sizes] * len(n)
    if n == [4, 4]:
        halves = [sorted(a + [4 + i for i in b]) for (a, _), (b, _) in zip(*found)]
        assert [rows for rows, _ in split(8)] == halves      # as in a single process


@mark.parametrize("n", [3, 7, 11])
def test_the_loss_of_fewer_or_more_rows_is_their_mean(n):
    """Of those that there are, and not of --prompts x --group."""
    (b, cfg), model = a_rollout(kl="none"), tiny_model()
    b = passes.joined([b, b], torch.arange(2, 2 + n))
    logp, _ = token_logps(model, b.ids, b.mask, 1.0)
    loss = -(b.adv * logp / b.mask.sum(1, keepdim=True)).sum() / n
    want = [-x for x in torch.autograd.grad(loss, model.parameters())]
    assert_close(updated(b, cfg)[1], want, rtol=1e-3, atol=1e-5)


def test_nan_in_the_loss_stops_the_run():
    (b, cfg), agent = a_rollout(), agent_of(CFG)
    b.adv[b.mask] = math.nan
    agent.opt = torch.optim.SGD(agent.policy.parameters(), 1.0)
    with raises(UserError, match="gradient"):
        grpo.update(agent, b, random.Random(0))
    assert all(map(torch.equal, agent.policy.parameters(), tiny_model().parameters()))


# ---------- micro-batches

ALIKE = [[5, 1, 2], [3, 9, 9], [5, 1, 0], [3, 9, 1], [5, 1, 2], [3, 1, 1]]


@mark.parametrize("ids, length, budget, parts", [
    (ALIKE, [3, 3, 2, 3, 3, 3], 100, [([5, 3, 1, 2, 0, 4], 3)]),
    (ALIKE, [3, 3, 2, 3, 3, 3], 6, [([5, 3], 3), ([1, 2], 3), ([0, 4], 3)]),
    (ALIKE, [1, 1, 1, 3, 1, 1], 4, [([5], 1), ([3], 3), ([1, 2, 0, 4], 1)]),
    (ALIKE, [1, 1, 1, 3, 1, 1], 1, [([i], 3 if i == 3 else 1) for i in (5, 3, 1, 2, 0, 4)]),
    ([[1] * 100] * 45, [100] * 45, 0, [([*range(i, min(45, i + 20))], 100) for i in (0, 20, 40)]),
    (torch.zeros(0, 50), [], 60, [([], 50)])], ids=lambda x: "")
def test_rows_are_split_within_the_budget(ids, length, budget, parts):
    ids, length = torch.as_tensor(ids), torch.tensor(length)
    mask = torch.arange(1, ids.size(1) + 1) == length[:, None]
    assert [(rows.tolist(), T) for rows, T in split_rows(ids, mask, budget)] == parts


def test_no_float64_where_there_is_none(monkeypatch):
    """mps has none: only `double` may ask for it."""
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **kwargs or {})
            assert getattr(out, "dtype", None) != torch.float64, f
            return out
    kinds = dict(float=lambda: 32, double=lambda: 64)
    for device, bits in (("mps", 32), ("cpu", 64)):
        assert grpo.model.double(SimpleNamespace(device=torch.device(device), **kinds)) == bits
    monkeypatch.setattr(grpo.model, "double", torch.Tensor.float)
    monkeypatch.setattr(caches, "double", torch.Tensor.float)
    model, u = tiny_model(), torch.rand(8, 12)
    with Watch():
        b = sample(model, [[1, 2, 3], [4]], 4, [12, 12], 1.0, {256}, u)
        b.problems = [*"aaaabbbb"]
        reward = torch.zeros_like(b.logp).masked_scatter(b.mask, u.flatten())
        groups = torch.arange(8) // 4
        given = reward, passes.last_tokens(b.mask), groups, b.mask, 0 * reward, 0 * reward
        b.adv, *_ = grpo.advantages(*given, with_(adv_scale="batch"))
        b.old_logp = b.logp
        updated(b, CFG)
