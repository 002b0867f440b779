"""The loss and the update, where test_oracle.py cannot look: extremes in float32, rows that are
left out, bfloat16, gaps between sampler and trainer, micro-batches."""
import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from test_oracle import on_ranks

import data.arithmetic as task
import grpo
from data import UserError
from grpo import Agent, Batch, Config, bounded, policy_loss, sample, token_weights
from model import ScalarHead, token_logps
from run import caches, passes, pretrained
from run.passes import last_tokens, split_rows

CFG = Config(prompts=2, group=4, max_new=12)
ONE = torch.ones(1, 1)


def with_(**changes):
    return dataclasses.replace(CFG, **changes)


def loss_of(logp, old_logp, ref_logp, adv, mask, weight, cfg=CFG):
    """`policy_loss` of a Batch of these tensors, as a mean over as many tokens as are sampled."""
    batch = Batch(None, mask, None, None, None, old_logp=old_logp, ref_logp=ref_logp, adv=adv)
    return policy_loss(logp, batch, weight, mask.sum().clamp(min=1), cfg, 0.04)


# ------------------------------------------------------------------------------ loss, weights

MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("mean, short, long", [
    ("sequence", 1 / 6, 1 / 12), ("token", 1 / 6, 1 / 6), ("constant", 1 / 24, 1 / 24)])
def test_weights_of_long_and_short_rows(mean, short, long):
    """Also beside a row without tokens; and if all are without, there is no loss."""
    w = token_weights(MASK, mean, 3, 6, 8)
    assert w[MASK].tolist() == pytest.approx([short] * 2 + [long] * 4) and not w[~MASK].any()
    none, x = MASK & False, torch.zeros(3, 5, requires_grad=True)
    loss, _ = loss_of(x, *[x.detach()] * 3, none, token_weights(none, mean, 3, 1, 8))
    loss.backward()
    assert loss.item() == 0 and not x.grad.any()


def test_a_row_without_tokens_leaves_the_ratios_of_the_others_alone():
    """As a mean over nothing its ratio once would have been no number."""
    logp, on = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3).bool()
    on[0, 1:] = True
    cfg = with_(ratio="sequence", kl="none")
    loss, stats = loss_of(logp, torch.zeros(2, 3), None, torch.ones(2, 3), on, on / 2, cfg)
    loss.backward()
    assert loss.item() == -1 and logp.grad.tolist() == [[0, -0.5, -0.5], [0, 0, 0]]
    assert stats["clip_share"] == 0


@pytest.mark.parametrize("ratio, adv, loss, grad, clipped, clip", [
    (3.0, 1, -1.2, 0, 1, 0.2),              # the documents' "rug": 0.3 / 0.1 = 3, clipped to 1.2
    (3.0, -1, 3.0, 3.0, 0, 0.2),            # but not where the larger ratio makes it worse
    (0.5, 1, -0.5, -0.5, 0, 0.2),
    (0.5, -1, 0.8, 0, 1, 0.2),
    (1.0, 1, -1.0, None, 0, 0.0),           # at the bound it is not clipped
    (1.0, -1, 1.0, None, 0, 0.0)])
def test_four_quadrants_of_the_clip(ratio, adv, loss, grad, clipped, clip):
    """Of a single token of weight 1."""
    logp, cfg = (math.log(ratio) * ONE).requires_grad_(), with_(clip_low=clip, clip_high=clip)
    got, stats = loss_of(logp, 0 * ONE, None, adv * ONE, ONE > 0, ONE, cfg)
    got.backward()
    assert got.item() == pytest.approx(loss) and stats["clip_share"] == clipped
    assert grad is None or logp.grad.item() == pytest.approx(grad)


def test_k3_equals_its_formula_and_loses_no_digits():
    """As (exp(r) - 1) - r in float32 it is 3.3 times too large at r = 1e-4, or negative."""
    def k3(r):
        _, stats = loss_of(0 * ONE, 0 * ONE, r * ONE, 0 * ONE, ONE > 0, ONE)
        return stats["kl"].item()
    for r in (-3.0, -0.5, 0.5, 3.0):
        assert k3(r) == pytest.approx(math.exp(r) - 1 - r, rel=1e-5)
    assert k3(1e-4) == pytest.approx(5e-9, rel=0.01)
    assert all(k3(r / 25000) >= 0 for r in range(-250, 251))


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("adv", [1.0, -1.0])
@pytest.mark.parametrize("place", [0, 1])
def test_huge_gaps_keep_the_gradient_finite(gap, adv, place):
    """exp overflows; at a kept column, and at a masked one."""
    logp, far = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2)
    far[0, place] = gap
    mask = torch.tensor([[True, False]])
    loss, _ = loss_of(logp, far, far, torch.full((1, 2), adv), mask, mask / 1)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all() and logp.grad[0, 1] == 0


def test_bounded_keeps_value_below_and_gradient_above():
    x = torch.tensor([-300.0, -3.0, 3.0, 300.0], requires_grad=True)
    bounded(x).sum().backward()
    assert bounded(x).tolist() == [-20, -3, 3, 20] and x.grad.tolist() == [1] * 4


@pytest.mark.parametrize("kv_cache", ["plain", "shared"])
@pytest.mark.parametrize("given", [
    {}, dict(baseline="value", kl="reward", adv_scale="batch"),
    dict(baseline="group+value", critic="separate", supervision="process")], ids=str)
def test_a_rollout_is_0_wherever_nothing_was_sampled(given, kv_cache, encoding):
    """So that nothing there reaches the loss, which takes all columns as they are."""
    encoding.stop, policy = set(range(0, 257, 13)), tiny_model()
    policy.kv_cache = kv_cache
    agent = grpo.new_agent(with_(epochs=2, **given), task, encoding, policy)
    if agent.critic is not None:
        torch.nn.init.normal_(agent.critic.head.weight)
        torch.nn.init.ones_(agent.critic.head.bias)
    batch, _ = grpo.rollout(agent, task.problems(1)[0][:2], random.Random(0))
    found = vars(batch) | dict(again=grpo.total_loss(agent, batch, batch.mask / 1, 1)[2],
                               plain=token_logps(policy, batch.ids, batch.mask, 1.0)[0])
    names = "logp old_logp ref_logp adv reward again plain".split()
    names += ["value", "returns"] if agent.critic is not None else []
    assert len({*batch.mask.sum(1).tolist()}) > 1 and not (batch.ends & ~batch.mask).any()
    for name in names:
        assert found[name].isfinite().all() and not found[name][~batch.mask].any(), name
        assert name in ("adv", "reward") or found[name].any(), name
    for name in ("logp", "again"):
        torch.testing.assert_close(found[name], found["plain"], rtol=0, atol=5e-5)


# ------------------------------------------------------------------------------------- update

def a_rollout(cfg=CFG, model=None):
    """A ragged Batch of the tiny model, with random advantages and another reference."""
    g, prompts = torch.Generator().manual_seed(3), [[49, 50, 61], [51, 61]]
    u = torch.rand(8, 12, generator=g, dtype=torch.float64)
    b = sample(model or tiny_model(), prompts, 4, [12] * 2, 1.0, set(range(0, 257, 13)), u)
    b.adv = torch.where(b.mask, torch.randn(8, 1, generator=g), 0)
    b.old_logp, noise = b.logp, torch.randn(b.logp.shape, generator=g)
    b.ref_logp = None if cfg.kl == "none" else torch.where(b.mask, b.logp + 0.3 * noise, 0)
    return b


def updated(batch, cfg=CFG, lr=1.0):
    """The statistics of an update by plain gradients, and by how much each weight moved."""
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    agent = Agent(cfg, None, None, model, ref=None if batch.ref_logp is None else model,
                  opt=torch.optim.SGD(model.parameters(), lr), beta=cfg.beta)
    stats = grpo.update(agent, batch, random.Random(0))
    moved = [(p - q).detach().flatten() for p, q in zip(model.parameters(), before)]
    return stats, torch.cat(moved)


@pytest.fixture(autouse=True)
def unbounded(monkeypatch):
    """No gradient is clipped."""
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)


@pytest.mark.parametrize("dead, mean", [
    (range(4), "sequence"), (range(8), "token"), ([0, 1, 2, 5, 7], "constant")])
def test_rows_without_an_advantage_are_left_out(mean, dead, monkeypatch):
    """Without KL and critic: the same update as with them in it, also if no row is left."""
    seen, real, cfg = [], passes.token_logps, with_(loss_mean=mean, kl="watch", minibatches=2)
    monkeypatch.setattr(passes, "token_logps", lambda model, ids, *x, **more: (
        seen.append(len(ids)), real(model, ids, *x, **more))[1])
    b = a_rollout()
    b.adv[list(dead)] = 0
    watched, whole = updated(b, cfg)
    b.ref_logp = None
    stats, less = updated(b, cfg)
    assert sum(seen) == 8 + 8 - len(dead) + 2       # two of them to see that they have no loss
    torch.testing.assert_close(less, whole, rtol=0, atol=1e-6)
    del watched["kl"], watched["mismatch"], stats["mismatch"]
    assert watched == pytest.approx(stats, abs=1e-6)


def test_a_row_with_any_advantage_is_kept():
    """Those of a row may cancel, or be 0 at its first token or its last."""
    b = a_rollout(with_(kl="none"))
    b.adv = torch.zeros_like(b.adv)
    for row, at in (0, [0]), (1, [-1]), (4, [0, -1]), (6, [0, 1]):
        b.adv[row, b.mask[row].nonzero()[at, 0]] = torch.tensor([1.0, -1.0])[:len(at)]
    assert b.adv.count_nonzero(1).tolist() == [1, 1, 0, 0, 2, 0, 2, 0]
    assert grpo.has_gradient(Agent(CFG, None, None, tiny_model()), b).tolist() == [
        True, True, False, False, True, False, True, False]


def test_a_new_term_of_the_loss_cannot_lose_rows(monkeypatch):
    """A fork adds an entropy bonus; rows without an advantage have one too: none is left out."""
    b, real = a_rollout(with_(kl="none")), grpo.total_loss
    b.adv[:4] = 0

    def with_bonus(agent, batch, weight, tokens):
        loss, *rest = real(agent, batch, weight, tokens)
        logp, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
        return loss + 0.01 * (weight * logp).sum(), *rest
    monkeypatch.setattr(grpo, "total_loss", with_bonus)
    _, found = updated(b)
    monkeypatch.setattr(grpo, "has_gradient", lambda agent, batch: torch.ones(8).bool())
    assert torch.equal(found, updated(b)[1])
    monkeypatch.undo()
    assert not torch.allclose(found, updated(b)[1], atol=1e-4)


def test_a_step_is_without_dropout(encoding):
    """A fork's: in sampling, the passes of a rollout and the update it would make ratios noise."""
    cfg = with_(baseline="value", critic="separate", reward="model", kl="reward",
                adv_scale="none")
    agent = grpo.new_agent(cfg, task, encoding, tiny_model().train())
    models = agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model
    for step in (0, 1):
        assert not any(part.training for module in models for part in module.modules())
        grpo.train_step(agent, task.problems(1)[0][:2], 1)


@pytest.mark.parametrize("row", [0, 5, 7])
def test_a_gap_in_any_micro_batch_is_found(row):
    """One token of one row, each in a micro-batch of its own; in the first minibatch only."""
    b, cfg, two = a_rollout(), with_(micro_tokens=1), with_(micro_tokens=1, minibatches=2)
    first = int(b.mask[row].nonzero()[0])
    b.logp = b.logp.clone()
    b.logp[row, first] += 6e-5
    assert updated(b, cfg, 1e-9)[0]["mismatch"] == pytest.approx(6e-5, abs=1e-5)
    b.logp[row, first] += 1
    with pytest.raises(UserError, match="sampler and trainer disagree"):
        updated(b, cfg, 1e-9)
    if row in next(grpo.minibatches(two, random.Random(0), 8))[0].tolist():
        with pytest.raises(UserError):
            updated(b, two, 1e-9)
    else:
        assert updated(b, two, 1e-9)[0]["mismatch"] < 1e-5


def test_the_mean_gap_is_over_the_rows_that_are_left():
    """A gap that all tokens have is its own mean, though half of the rows are left out."""
    b, cfg = a_rollout(with_(kl="none")), with_(kl="none")
    b.adv[::2], logp = 0, b.logp
    b.logp = logp + 9e-5 * b.mask
    updated(b, cfg)
    b.logp = logp + 1.5e-4 * b.mask
    with pytest.raises(UserError, match="sampler and trainer disagree"):
        updated(b, cfg)


@pytest.mark.parametrize("reference", [False, True])
def test_without_old_log_probabilities_the_ratio_is_1(reference):
    """Nothing is clipped, and the gradient is that of weights times advantages, to the bit."""
    cfg, model = with_(clip_low=0.01, clip_high=0.01), tiny_model()
    b = a_rollout(with_(kl="loss" if reference else "none"))
    b.old_logp, b.logp = None, b.logp - 3 * b.mask
    weight, params = token_weights(b.mask, "sequence", 8, b.mask.sum(), 12), [*model.parameters()]
    agent = Agent(cfg, None, None, model, beta=0.1)
    loss, stats, logp = grpo.total_loss(agent, b, weight, b.mask.sum())
    assert stats["clip_share"] == 0 and b.old_logp is None
    again, _ = passes.token_logps(model, b.ids, b.mask, 1.0)
    want, near = weight * b.adv, dict(rtol=0, atol=0)
    if reference:                           # eq. 21
        want = want + 0.1 * weight * ((b.ref_logp - logp.detach()).exp() - 1) * b.mask
        near = dict(rtol=1e-4, atol=1e-6)
    wanted = torch.autograd.grad(-(want * again).sum(), params)
    for x, y in zip(torch.autograd.grad(loss, params), wanted):
        torch.testing.assert_close(x, y, **near)


def rolled(agent, spread=3.5):
    """A rollout with advantages from -3.5 to 3.5, and its statistics."""
    batch, stats = grpo.rollout(agent, task.problems(1)[0][:2], random.Random(0))
    batch.adv = torch.where(batch.mask, torch.arange(8.0)[:, None] - spread, 0)
    return batch, stats


@pytest.mark.parametrize("updates", [dict(epochs=2), dict(minibatches=2), {}], ids=str)
def test_passes_of_a_step_in_bfloat16(updates, encoding):
    """The old log-probabilities are a pass's over the sampler's weights; none with one update."""
    cfg = with_(kl="none", lr=1e-2, dtype="bfloat16", device="cpu", **updates)
    agent = grpo.new_agent(cfg, task, encoding, pretrained.to_device(tiny_model(), cfg))
    batch, stats = rolled(agent)
    assert stats["entropy"] == pytest.approx(-batch.logp[batch.mask].mean().item())
    if updates:
        again, _ = grpo.logps(agent.sampler, batch, cfg)
        assert torch.equal(batch.old_logp, again) and not torch.equal(again, batch.logp)
    else:
        assert batch.old_logp is None
    told = grpo.update(agent, batch, random.Random(0))
    assert told["mismatch"] > 0 and (told["clip_share"] > 0) is bool(updates)


@pytest.mark.parametrize("critic", [None, "shared", "separate"])
def test_an_update_of_plain_rows_is_that_of_shared_ones(critic):
    """Up to rounding, in every weight."""
    given, after = {} if critic is None else dict(baseline="group+value", critic=critic), []
    for cache in ("plain", "shared"):
        cfg = with_(minibatches=2, micro_tokens=30, cache=cache, **given)
        policy, b, head = tiny_model(), a_rollout(), None
        if critic:
            head = ScalarHead(32, tiny_model(5) if critic == "separate" else None, std=0.1)
            torch.nn.init.constant_(head.head.weight, 0.1)
            b.value, b.returns = torch.zeros_like(b.adv), b.adv + 0.5 * b.mask
        agent = Agent(cfg, None, None, policy, ref=policy, critic=head, beta=0.1)
        params = [p for x in (policy, head) if x is not None for p in x.parameters()]
        params = [p for p in params if p.requires_grad]
        agent.opt, before = torch.optim.SGD(params, 0.1), [p.detach().clone() for p in params]
        grpo.update(agent, b, random.Random(0))
        after.append([p.detach() - q for p, q in zip(params, before)])
    assert any(not torch.equal(x, y) for x, y in zip(*after))           # two ways
    for x, y in zip(*after, strict=True):
        assert x.any() and (x - y).abs().max() < 1e-4 * x.abs().max() + 1e-7


@pytest.mark.parametrize("given", [
    dict(dtype="float32"), dict(dtype="bfloat16"), dict(dtype="float32", baseline="value"),
    dict(dtype="bfloat16", epochs=2)], ids=str)
def test_rows_of_another_policy_have_its_log_probabilities(given, monkeypatch, encoding):
    """Those are the old ones, and no mismatch, if a Batch says so: here 3 nats too small."""
    cfg = with_(kl="none", device="cpu", **given)
    agent = grpo.new_agent(cfg, task, encoding, pretrained.to_device(tiny_model(), cfg))
    off, own, known = torch.tensor([False, True, True, False] * 2), grpo.collect, True

    def collect(*x):
        batch = own(*x)
        batch.logp = batch.logp - 3 * (batch.mask & off[:, None])
        batch.on_policy = ~off if known else None
        return batch
    monkeypatch.setattr(grpo, "collect", collect)
    batch, _ = rolled(agent)
    again, _ = grpo.logps(agent.sampler, batch, cfg)
    present = again if cfg.dtype == "bfloat16" or cfg.baseline == "value" else batch.logp
    assert torch.equal(batch.old_logp, torch.where(off[:, None], batch.logp, present))
    assert not torch.equal(again, batch.logp)
    stats = grpo.update(agent, batch, random.Random(0))
    assert stats["mismatch"] < (0.5 if cfg.dtype == "bfloat16" else 1e-4)
    assert stats["clip_share"] > 0.1                    # ratios of e^3
    known = False
    with pytest.raises(UserError, match="in the Batch's on_policy"):
        grpo.update(agent, rolled(agent)[0], random.Random(0))


@pytest.mark.parametrize("n", [[0], [1], [7], [11], [4, 4], [8, 3], [0, 5], [0, 0]], ids=str)
def test_an_algorithm_may_leave_out_rows_or_add_some(n, monkeypatch):
    """In each epoch each row of a rank is in one minibatch, whose size is that of all ranks."""
    cfg = with_(epochs=2, minibatches=3)

    def split(rank):
        parts = grpo.minibatches(cfg, random.Random(5), n[rank])
        return [(rows.tolist(), size) for rows, size in parts]
    found = on_ranks(len(n), split, monkeypatch)
    assert all(len(of_rank) == 6 for of_rank in found)
    for rows, of_rank in zip(n, found):
        for epoch in (of_rank[:3], of_rank[3:]):
            assert sorted(sum((part for part, _ in epoch), [])) == list(range(rows))
    for parts in zip(*found):
        assert {size for _, size in parts} == {max(1, sum(len(rows) for rows, _ in parts))}
    if n == [4, 4]:                     # those of a single process
        alone = [rows.tolist() for rows, _ in grpo.minibatches(cfg, random.Random(5), 8)]
        assert alone == [sorted(a + [4 + i for i in b]) for (a, _), (b, _) in zip(*found)]


@pytest.mark.parametrize("n", [3, 7, 11])
def test_the_loss_of_fewer_or_more_rows_is_their_mean(n):
    """Of those that there are, and not of --prompts x --group."""
    cfg, model = with_(kl="none"), tiny_model()
    b = a_rollout(cfg)
    b = passes.joined([b, b], torch.arange(2, 2 + n))
    logp, _ = token_logps(model, b.ids, b.mask, 1.0)
    loss = -(b.adv * logp / b.mask.sum(1, keepdim=True)).sum() / n
    grads = torch.autograd.grad(loss, model.parameters())
    want = torch.cat([-x.flatten() for x in grads])
    torch.testing.assert_close(updated(b, cfg)[1], want, rtol=1e-3, atol=1e-5)


def test_nan_in_the_loss_stops_the_run():
    b, model = a_rollout(), tiny_model()
    b.adv[b.mask] = math.nan
    agent = Agent(CFG, None, None, model, opt=torch.optim.SGD(model.parameters(), 1.0))
    with pytest.raises(UserError, match="gradient"):
        grpo.update(agent, b, random.Random(0))
    assert all(map(torch.equal, model.parameters(), tiny_model().parameters()))


# ------------------------------------------------------------------------------- micro-batches

def split(ids, length, budget):
    """The micro-batches of rows of these lengths."""
    ids, length = torch.tensor(ids), torch.tensor(length)
    mask = torch.arange(1, ids.size(1) + 1) == length[:, None]
    return [(rows.tolist(), T) for rows, T in split_rows(ids, mask, budget)]


ALIKE = [[5, 1, 2], [3, 9, 9], [5, 1, 0], [3, 9, 1], [5, 1, 2], [3, 1, 1]]


@pytest.mark.parametrize("length, budget, parts", [
    ([3, 3, 2, 3, 3, 3], 100, [([5, 3, 1, 2, 0, 4], 3)]),       # those that begin alike together
    ([3, 3, 2, 3, 3, 3], 6, [([5, 3], 3), ([1, 2], 3), ([0, 4], 3)]),
    # A longer row makes those before it longer too, and the next chunk begins anew.
    ([1, 1, 1, 3, 1, 1], 4, [([5], 1), ([3], 3), ([1, 2, 0, 4], 1)]),
    ([1, 1, 1, 3, 1, 1], 1, [([i], 3 if i == 3 else 1) for i in (5, 3, 1, 2, 0, 4)])])
def test_rows_that_begin_alike_are_put_one_below_the_other(length, budget, parts):
    """Within the budget, or a single row that is longer."""
    assert split(ALIKE, length, budget) == parts


def test_a_budget_of_0_is_that_of_a_cpu():
    """Rows of 100 tokens, 20 to a micro-batch; and of no rows there is an empty one."""
    for budget in (0, 2048):
        found = split([[1] * 100] * 45, [100] * 45, budget)
        assert [len(rows) for rows, _ in found] == [20, 20, 5]
    none = torch.zeros(0, 50)
    assert [(rows.tolist(), T) for rows, T in split_rows(none, none > 0, 60)] == [([], 50)]


def test_a_micro_batch_has_its_rows_in_every_tensor():
    """Those (B,) too; here of some rows that are not the first, in the order of their ids."""
    ids = torch.tensor([[9, 1, 1, 1], [7, 1, 0, 0], [8, 1, 1, 0], [6, 1, 1, 1], [7, 1, 1, 0]])
    length, at = torch.tensor([4, 2, 3, 4, 3]), torch.arange(4)
    b = Batch(ids, (at > 0) & (at < length[:, None]), length < 4, torch.rand(5, 4), length - 1,
              problems=[*"abcde"], adv=torch.rand(5, 4))
    parts = list(passes.micro_batches(b, torch.tensor([1, 2, 4]), 6, None))
    for part, rows in zip(parts, ([1, 4], [2]), strict=True):
        for name in ("ids", "mask", "logp", "adv", "finished", "start"):
            x = getattr(b, name)[rows]
            assert torch.equal(getattr(part, name), x[:, :3] if x.dim() == 2 else x), name
        assert part.value is None and part.problems is None


def test_no_float64_where_there_is_none(monkeypatch):
    """mps has none: only `double` may ask for it."""
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **kwargs or {})
            assert getattr(out, "dtype", None) != torch.float64, f
            return out
    kinds = dict(float=lambda: torch.float32, double=lambda: torch.float64)
    found = [grpo.model.double(SimpleNamespace(device=torch.device(x), **kinds))
             for x in ("mps", "cpu")]
    assert found == [torch.float32, torch.float64]
    monkeypatch.setattr(grpo.model, "double", torch.Tensor.float)
    monkeypatch.setattr(caches, "double", torch.Tensor.float)
    cfg, model, u = with_(adv_scale="batch"), tiny_model(), torch.rand(8, 12)
    with Watch():
        b = sample(model, [[1, 2, 3], [4]], 4, [12, 12], 1.0, {256}, u)
        reward = torch.zeros_like(b.logp).masked_scatter(b.mask, u.flatten())
        zero, ends = 0 * reward, last_tokens(b.mask)
        b.adv, *_ = grpo.advantages(reward, ends, b.mask, zero, zero, cfg)
        b.old_logp = b.logp
        updated(b)
