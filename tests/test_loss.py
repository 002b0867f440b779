"""Advantages, weights and the loss, each against a slow and obvious second way."""
import contextlib
import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model

import data.arithmetic as task
import grpo
from data import UserError
from grpo import Agent, Batch, Config, bounded, policy_loss, sample, token_weights
from model import ScalarHead, token_logps
from run import caches, passes, pretrained
from run.passes import last_tokens, split_rows
from test_oracle import on_ranks

CFG = Config()


def group_advantages(rewards, group, scale):
    """Advantage of each row (B,) for rewards (B,) at the ends of rows of 1 to 3 tokens; dead (P,)."""
    B = len(rewards)
    mask = torch.arange(5).expand(B, -1) < 2 + torch.arange(B)[:, None] % 3
    mask[:, 0] = False
    ends = last_tokens(mask)
    reward, zero = torch.where(ends, rewards[:, None], 0), torch.zeros(B, 5)
    adv, returns, dead = grpo.advantages(reward, ends, mask, zero, None,
                                         Config(group=group, adv_scale=scale))
    assert returns is None and torch.equal(adv, torch.where(mask, adv[:, 1:2], 0))  # one for all tokens
    return adv[:, 1], dead


def advantages(rewards, adv_scale="group"):
    return group_advantages(torch.tensor(rewards), len(rewards), adv_scale)[0].tolist()


def update(model, opt, batch, cfg, source):
    ref = None if batch.ref_logp is None else model
    return grpo.update(Agent(cfg, None, None, model, ref=ref, opt=opt, beta=cfg.beta), batch, source)


def adam(model, lr):
    return grpo.new_optimizer(Agent(Config(lr=lr), None, None, model))


def loss_of(logp, old_logp, ref_logp, adv, mask, weight, n_tokens, cfg, beta):
    """`policy_loss` of a Batch of these tensors."""
    batch = Batch(None, mask, None, None, None, old_logp=old_logp, ref_logp=ref_logp, adv=adv)
    return policy_loss(logp, batch, weight, n_tokens, cfg, beta)


# ---------------------------------------------------------------------------------- advantages

def test_worked_numbers_of_the_documents():
    """"What is 2 + 3?" with rewards 1, 0, 2; and 13 x 17 with rewards 1, 0, 1."""
    assert advantages([1.0, 0.0, 2.0], "none") == [0, -1, 1]
    assert advantages([1.0, 0.0, 2.0]) == pytest.approx([0, -math.sqrt(1.5), math.sqrt(1.5)])
    assert advantages([1.0, 0.0, 1.0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(2), math.sqrt(0.5)])


NEXT = torch.nextafter(torch.tensor([1e6, -3.3]), torch.tensor(0.0)).tolist()


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("rewards", [
    *([x] * 64 for x in (0.1, 1e6 + 0.1, 0.0, -3.3)), [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
    [1e6, NEXT[0], NEXT[0], 1e6], [-3.3, NEXT[1], NEXT[1], -3.3],
    [0.3 - 0.05 * 6, 0, 0, 0]], ids=lambda rewards: str(rewards[:4]))       # 5.6e-17: a sum that cancels
def test_rewards_equal_up_to_rounding_give_exactly_zero(rewards, scale):
    """64 rewards of 0.1 have a float32 std of 7.5e-9: over an eps of 1e-8 that made |A| = 0.43."""
    a, dead = group_advantages(torch.tensor(rewards), len(rewards), scale)
    assert a.tolist() == [0.0] * len(rewards) and dead.tolist() == [True]


@pytest.mark.parametrize("scale", ["none", "group"])
def test_a_group_is_dead_or_not_whatever_those_beside_it_are(scale):
    """The second one's rewards differ by rounding: exactly 0."""
    r = torch.tensor([0.0, 1.0, 0.3, 0.3, 2.0, 0.0])
    r[3] = torch.nextafter(r[3], torch.tensor(1.0))
    a, dead = group_advantages(r, 2, scale)
    assert r[2] != r[3] and dead.tolist() == [False, True, False]
    assert (a == 0).tolist() == [False, False, True, True, False, False]


# ------------------------------------------------------------------------------------- weights

MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


def test_weights_of_long_and_short_rows():
    """sequence: the token of the short row counts twice; token, constant: all alike."""
    w = token_weights(MASK, "sequence", 3, 6, 8)
    assert w[0, 1] == pytest.approx(1 / 6) and w[1, 1] == pytest.approx(1 / 12) and w[2].sum() == 0
    assert token_weights(MASK, "token", 3, 6, 8)[MASK].tolist() == pytest.approx([1 / 6] * 6)
    assert token_weights(MASK, "constant", 3, 6, 8)[MASK].tolist() == pytest.approx([1 / 24] * 6)
    assert all(token_weights(MASK, m, 3, 6, 8)[~MASK].sum() == 0 for m in ("sequence", "token", "constant"))


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
def test_nothing_sampled_is_no_loss(mean):
    """As an update calls it, which never counts fewer tokens than 1."""
    none = torch.zeros(2, 4, dtype=torch.bool)
    w = token_weights(none, mean, 2, 1, 8)
    x = torch.zeros(2, 4, requires_grad=True)
    loss, _ = loss_of(x, x.detach(), x.detach(), x.detach(), none, w, 1, CFG, 0.04)
    loss.backward()
    assert loss.item() == 0 and x.grad.abs().sum() == 0


def test_a_row_without_tokens_leaves_the_ratios_of_the_others_alone():
    """Beside a row with two; as a mean over nothing its ratio once would have been no number."""
    logp = torch.zeros(2, 3, requires_grad=True)
    on = torch.tensor([[False, True, True], [False, False, False]])
    loss, stats = loss_of(logp, torch.zeros(2, 3), None, torch.ones(2, 3), on, on / 2, 2,
                              Config(ratio="sequence", kl="none"), 0.0)
    loss.backward()
    assert loss.item() == -1 and logp.grad.tolist() == [[0, -0.5, -0.5], [0, 0, 0]]
    assert stats["clip_share"] == 0


# ---------------------------------------------------------------------------------------- loss

@pytest.mark.parametrize("ratio, adv, loss, grad, clipped", [
    (3.0, 1, -1.2, 0, 1),           # the documents' "rug": 0.3 / 0.1 = 3, clipped to 1.2
    (3.0, -1, 3.0, 3.0, 0),         # ... but not where the larger ratio makes it worse
    (0.5, 1, -0.5, -0.5, 0),
    (0.5, -1, 0.8, 0, 1),
    (1.1, 1, -1.1, -1.1, 0),
    (0.9, -1, 0.9, 0.9, 0)])
def test_four_quadrants_of_the_clip(ratio, adv, loss, grad, clipped):
    """Of a single token of weight 1."""
    logp = torch.tensor([[math.log(ratio)]], requires_grad=True)
    zero, on = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    got, stats = loss_of(logp, zero, None, zero + adv, on, zero + 1, 1, CFG, 0.0)
    got.backward()
    assert (got.item(), logp.grad.item()) == pytest.approx((loss, grad)) and stats["clip_share"] == clipped


@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_a_ratio_at_the_bound_is_not_clipped(adv):
    """As in every first optimizer step if the bound is 0 wide: a share of 1 would be read as an alarm."""
    zero, on = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    cfg = Config(clip_low=0.0, clip_high=0.0)
    assert loss_of(zero, zero, None, zero + adv, on, zero + 1, 1, cfg, 0.0)[1]["clip_share"] == 0


def test_k3_equals_its_formula_and_loses_no_digits():
    """As (exp(r) - 1) - r in float32 it is 3.3 times too large at r = 1e-4, and can be negative."""
    def k3(r):
        zero = torch.zeros_like(r)
        stats = loss_of(zero, zero, r, zero, torch.ones_like(r).bool(), torch.eye(1), 1, CFG, 0.04)[1]
        return stats["kl"].item()
    for r in (-3.0, -0.5, 0.5, 3.0):
        assert k3(torch.tensor([[r]])) == pytest.approx(math.exp(r) - 1 - r, rel=1e-5)
    assert k3(torch.tensor([[1e-4]])) == pytest.approx(5e-9, rel=0.01)
    near = torch.linspace(-1e-2, 1e-2, 501)                 # each alone: a sum could hide a negative
    assert all(k3(r.view(1, 1)) >= 0 for r in near)


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_huge_gaps_keep_the_gradient_finite(gap, adv):
    """exp overflows; once the loss was finite, and the gradient NaN through the branch not taken."""
    for place in (0, 1):                                    # a kept column, and a masked one
        logp = torch.zeros(1, 2, requires_grad=True)
        far = torch.zeros(1, 2)
        far[0, place] = gap
        mask = torch.tensor([[True, False]])
        loss, _ = loss_of(logp, far, far, torch.full((1, 2), adv), mask, mask.float(), 1, CFG,
                              0.04)
        loss.backward()
        assert loss.isfinite() and logp.grad.isfinite().all() and logp.grad[0, 1] == 0


def test_bounded_keeps_value_below_and_gradient_above():
    x = torch.tensor([-300.0, -3.0, 3.0, 300.0], requires_grad=True)
    y = bounded(x)
    y.sum().backward()
    assert y.tolist() == [-20, -3, 3, 20] and x.grad.tolist() == [1] * 4


def test_numbers_outside_the_mask_change_nothing():
    g = torch.Generator().manual_seed(1)
    tensors = [torch.randn(3, 5, generator=g) for _ in range(4)]
    w = token_weights(MASK, "sequence", 3, 6, 8)
    def run(dirty):
        logp, old, ref, adv = (torch.where(MASK, x, 7.0) if dirty else x for x in tensors)
        logp = logp.clone().requires_grad_()
        loss, stats = loss_of(logp, old, ref, adv, MASK, w, 6, CFG, 0.04)
        loss.backward()
        return [loss.detach(), logp.grad, *stats.values()]
    for clean, dirty in zip(run(False), run(True)):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("kv_cache", ["plain", "shared"])
@pytest.mark.parametrize("given", [
    {}, dict(supervision="process", adv_scale="batch"), dict(baseline="value", kl="reward", adv_scale="batch"),
    dict(baseline="group+value", critic="separate", kl="reward", supervision="process")], ids=str)
def test_a_rollout_is_0_wherever_nothing_was_sampled(given, kv_cache, cfg, encoding):
    """So that nothing there reaches the loss, which takes all columns as they are: no infinity, no number at all."""
    encoding.stop, policy = set(range(0, 257, 13)), tiny_model()
    policy.kv_cache = kv_cache
    agent = grpo.new_agent(dataclasses.replace(cfg, epochs=2, **given), task, encoding, policy)
    if agent.critic is not None:
        torch.nn.init.normal_(agent.critic.head.weight)
        torch.nn.init.ones_(agent.critic.head.bias)
    batch, _ = grpo.rollout(agent, task.problems(1)[0][:2], random.Random(0))
    found = vars(batch) | dict(logp_again=grpo.total_loss(agent, batch, batch.mask / 1, 1)[2],
                               plain=token_logps(policy, batch.ids, batch.mask, 1.0)[0])
    names = {"logp", "old_logp", "ref_logp", "adv", "reward", "logp_again", "plain"}
    names |= {"value", "returns"} if agent.critic is not None else set()
    assert not batch.mask.all() and len({*batch.mask.sum(1).tolist()}) > 1
    for name in names:
        assert found[name].isfinite().all() and (found[name][~batch.mask] == 0).all(), name
        assert name in ("adv", "reward") or found[name][batch.mask].any(), name
    assert not (batch.ends & ~batch.mask).any()
    for name in ("logp", "logp_again"):
        torch.testing.assert_close(found[name], found["plain"], rtol=0, atol=5e-5)


# -------------------------------------------------------------------------------------- update

def a_rollout(model, cfg, length=12):
    """A Batch as `rollout` makes it, ragged, with random rewards and an older policy as reference."""
    g = torch.Generator().manual_seed(3)
    prompts = [[49, 50, 61], [51, 61]][:cfg.prompts]
    u = torch.rand(cfg.prompts * cfg.group, length, generator=g, dtype=torch.float64)
    b = sample(model, prompts, cfg.group, [length] * len(prompts), cfg.temperature, set(range(0, 257, 13)), u)
    b.adv = torch.where(b.mask, torch.randn(len(b.ids), 1, generator=g), 0)
    b.old_logp = b.logp
    b.ref_logp = torch.where(b.mask, b.logp + 0.3 * torch.randn(b.logp.shape, generator=g), 0)
    return b


@pytest.fixture(autouse=True)
def unbounded(monkeypatch):
    """No gradient is clipped."""
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)


def test_a_budget_of_0_is_that_of_a_cpu():
    """Rows of 100 tokens, 20 to a micro-batch."""
    ids, mask = torch.randint(0, 256, (45, 100)), torch.ones(45, 100, dtype=torch.bool)
    for budget, sizes in ((0, [20, 20, 5]), (2048, [20, 20, 5]), (1, [1] * 45)):
        assert [len(rows) for rows, _ in split_rows(ids, mask, budget)] == sizes


@pytest.mark.parametrize("dead, mean", [(range(4), "sequence"), (range(8), "token"), ([0, 1, 2, 5, 7], "constant")])
def test_rows_without_an_advantage_are_left_out(mean, dead, monkeypatch):
    """Where there is no KL and no critic: the same update as with them in it, also if no row is left."""
    cfg = Config(prompts=2, group=4, max_new=12, loss_mean=mean, kl="watch", minibatches=2)
    seen, real, after = [], passes.token_logps, []
    monkeypatch.setattr(passes, "token_logps",
                        lambda model, ids, *x, **more: (seen.append(len(ids)), real(model, ids, *x, **more))[1])
    for watched in (True, False):
        model = tiny_model()
        b = a_rollout(model, cfg)
        b.adv[list(dead)] = 0
        b.ref_logp = b.ref_logp if watched else None
        stats = update(model, torch.optim.SGD(model.parameters(), 1.0), b, cfg, random.Random(0))
        after.append((torch.cat([p.detach().flatten() for p in model.parameters()]), sum(seen), stats))
        seen.clear()
    (whole, rows, watched), (less, left, stats) = after
    assert rows == 8 and left == 8 - len(dead) + 2      # two of them to see that they have no loss
    torch.testing.assert_close(less, whole, rtol=0, atol=1e-6)
    assert {n: x for n, x in watched.items() if n not in ("kl", "mismatch")} == pytest.approx(
        {n: x for n, x in stats.items() if n != "mismatch"}, abs=1e-6)


def test_a_row_with_any_advantage_is_kept():
    """Under process supervision those of a row may cancel, or be 0 at its first token or its last. The first two rows learn."""
    cfg, model = Config(prompts=2, group=4, max_new=12, kl="none"), tiny_model()
    b = a_rollout(model, cfg)
    b.adv, b.ref_logp = torch.zeros_like(b.adv), None
    for row, at in (0, [0]), (1, [-1]), (4, [0, -1]), (6, [0, 1]):
        b.adv[row, b.mask[row].nonzero()[at, 0]] = torch.tensor([1.0, -1.0])[:len(at)]
    assert b.adv.count_nonzero(1).tolist() == [1, 1, 0, 0, 2, 0, 2, 0] and b.adv.sum(1).tolist() == [1, 1] + [0] * 6
    assert grpo.has_gradient(Agent(cfg, None, None, model), b).tolist() == b.adv.any(1).tolist()


def test_a_new_term_of_the_loss_cannot_lose_rows(monkeypatch):
    """A fork adds an entropy bonus to `total_loss`; rows without an advantage have one too: none is left out then."""
    cfg, real, after = Config(prompts=2, group=4, max_new=12, kl="none"), grpo.total_loss, []

    def with_bonus(agent, batch, weight, tokens):
        """The loss with log pi added."""
        loss, *rest = real(agent, batch, weight, tokens)
        logp, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
        return loss + 0.01 * (weight * logp).sum(), *rest
    monkeypatch.setattr(grpo, "total_loss", with_bonus)
    for everything in (False, True):
        model = tiny_model()
        b = a_rollout(model, cfg)
        b.adv[:4], b.ref_logp = 0, None
        if everything:
            monkeypatch.setattr(grpo, "has_gradient", lambda agent, batch: torch.ones(8, dtype=torch.bool))
        else:
            assert grpo.has_gradient(Agent(cfg, None, None, model), b).all()
        update(model, torch.optim.SGD(model.parameters(), 1.0), b, cfg, random.Random(0))
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*after)
    monkeypatch.undo()
    assert grpo.has_gradient(Agent(cfg, None, None, model), b).tolist() == [False] * 4 + [True] * 4


def test_a_step_is_without_dropout(monkeypatch, cfg, encoding):
    """A fork's: sampling, the passes of a rollout, and the update. In some of them alone, it would make ratios noise."""
    modes, real = [], passes.token_logps
    monkeypatch.setattr(passes, "token_logps",
                        lambda gpt, *x, **more: (modes.append(gpt.training), real(gpt, *x, **more))[1])
    cfg = dataclasses.replace(cfg, baseline="value", critic="separate", reward="model", kl="reward", adv_scale="none")
    agent = grpo.new_agent(cfg, task, encoding, tiny_model().train())
    grpo.train_step(agent, task.problems(1)[0][:2], 1)
    assert len(modes) > 2 and not any(modes)
    for module in (agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model):
        assert not any(part.training for part in module.modules())


def test_a_critic_learns_from_rows_without_an_advantage():
    """And the KL of the loss from theirs."""
    cfg = Config(prompts=2, group=4, max_new=12, baseline="value", kl="none")
    model, critic = tiny_model(), ScalarHead(tiny_model().cfg.n_embd)
    b = a_rollout(model, cfg)
    b.adv, b.ref_logp, b.value = torch.zeros_like(b.adv), None, torch.zeros_like(b.adv)
    b.returns = torch.where(b.mask, 1.0, 0.0)
    b.returns[:2] = 0           # of rows whose loss happens to be 0, as those that are tried first
    params = [*model.parameters(), *critic.parameters()]
    agent = Agent(cfg, None, None, model, critic=critic, opt=torch.optim.SGD(params, 1.0))
    grpo.update(agent, b, random.Random(0))
    assert critic.head.bias.item() > 0.01
    b = a_rollout(tiny_model(), Config(prompts=2, group=4))
    model, b.adv = tiny_model(), torch.zeros_like(b.adv)
    before = model.embed_tokens.weight.detach().clone()
    update(model, torch.optim.SGD(model.parameters(), 1.0), b, Config(prompts=2, group=4), random.Random(0))
    assert (model.embed_tokens.weight - before).abs().max() > 1e-6


@pytest.mark.parametrize("row", [0, 5, 7])
def test_a_gap_in_any_micro_batch_is_found(row):
    """One token of one row, each row in a micro-batch of its own; and in the first minibatch only, as later ones have
    other weights."""
    cfg = Config(prompts=2, group=4, max_new=12, micro_tokens=1)
    model = tiny_model()
    b = a_rollout(model, cfg)
    first = int(b.mask[row].nonzero()[0])
    b.logp[row, first] += 6e-5
    stats = update(model, torch.optim.SGD(model.parameters(), 1e-9), b, cfg, random.Random(0))
    assert stats["mismatch"] == pytest.approx(6e-5, abs=1e-5)
    b.logp[row, first] += 1
    with pytest.raises(UserError, match="sampler and trainer disagree"):
        update(model, torch.optim.SGD(model.parameters(), 1e-9), b, cfg, random.Random(0))
    rows = next(grpo.minibatches(dataclasses.replace(cfg, minibatches=2), random.Random(0), 8))[0].tolist()
    two, opt = dataclasses.replace(cfg, minibatches=2), torch.optim.SGD(model.parameters(), 1e-9)
    if row in rows:
        with pytest.raises(UserError):
            update(model, opt, b, two, random.Random(0))
    else:
        assert update(model, opt, b, two, random.Random(0))["mismatch"] < 1e-5


@pytest.mark.parametrize("gap, disagree", [(9e-5, False), (1.5e-4, True)])
def test_the_mean_gap_is_over_the_rows_that_are_left(gap, disagree):
    """A gap that all tokens have is its own mean, though half of the rows are left out, which are as long."""
    cfg, model = Config(prompts=2, group=4, max_new=12, kl="none"), tiny_model()
    b = a_rollout(model, cfg)
    b.adv[::2], b.ref_logp, b.logp = 0, None, b.logp + gap * b.mask
    assert b.mask[1::2].sum() < 0.6 * b.mask.sum()
    assert grpo.has_gradient(Agent(cfg, None, None, model), b).tolist() == [False, True] * 4
    with pytest.raises(UserError, match="sampler and trainer disagree") if disagree else contextlib.nullcontext():
        update(model, torch.optim.SGD(model.parameters(), 1e-9), b, cfg, random.Random(0))


@pytest.mark.parametrize("reference", [False, True])
def test_without_old_log_probabilities_the_ratio_is_1(reference):
    """However far the sampler's are: with one update, nothing is clipped, and the gradient is that of the weights times the
    advantages, to the bit."""
    cfg, model = Config(prompts=2, group=4, clip_low=0.01, clip_high=0.01), tiny_model()
    b = a_rollout(model, cfg)
    b.old_logp, b.ref_logp = None, b.ref_logp if reference else None
    b.logp = b.logp - 3 * b.mask
    weight = token_weights(b.mask, "sequence", 8, b.mask.sum(), 12)
    agent, params = Agent(cfg, None, None, model, beta=0.1), list(model.parameters())
    loss, stats, logp = grpo.total_loss(agent, b, weight, b.mask.sum())
    assert stats["clip_share"] == 0 and b.old_logp is None
    again, _ = passes.token_logps(model, b.ids, b.mask, 1.0)
    want = weight * b.adv
    logp = logp.detach()
    if reference:                           # eq. 21
        want = want + 0.1 * weight * ((b.ref_logp - logp).exp() - 1) * b.mask
    for x, y in zip(torch.autograd.grad(loss, params), torch.autograd.grad(-(want * again).sum(), params)):
        torch.testing.assert_close(x, y, **dict(rtol=1e-4, atol=1e-6) if reference else dict(rtol=0, atol=0))


@pytest.mark.parametrize("updates", [dict(epochs=2), dict(minibatches=2), {}])
def test_passes_of_a_step_in_bfloat16(updates, monkeypatch, cfg, encoding):
    """With one update none is made; with several one before the first, whose log-probabilities all of them have."""
    cfg, asked, given = dataclasses.replace(cfg, kl="none", lr=1e-2, dtype="bfloat16", device="cpu", **updates), [], []
    agent = grpo.new_agent(cfg, task, encoding, pretrained.to_device(tiny_model(), cfg))
    logps, loss = grpo.logps, grpo.policy_loss
    monkeypatch.setattr(grpo, "logps", lambda gpt, *more: (asked.append((gpt, len(given))), logps(gpt, *more))[1])
    monkeypatch.setattr(grpo, "policy_loss", lambda new, batch, *more: (
        given.append((new.detach(), batch.old_logp)), loss(new, batch, *more))[1])
    problems = task.problems(1)[0][:2]
    batch, stats = grpo.rollout(agent, problems, random.Random(0))
    fixed = batch.old_logp
    batch.adv = torch.where(batch.mask, torch.arange(8.0)[:, None] - 3.5, 0)
    told = grpo.update(agent, batch, random.Random(0))
    assert stats["entropy"] == pytest.approx(-batch.logp[batch.mask].mean().item())
    assert asked == ([(agent.sampler, 0)] if updates else []) and 0 < told["mismatch"]
    assert batch.old_logp is fixed and (fixed is not None) is bool(updates)
    if updates:
        rows = {tuple(row[on].tolist()) for row, on in zip(fixed, batch.mask)}      # given[0] is a look at dead rows
        seen = {tuple(x for x in row.tolist() if x != 0) for _, old in given[1:] for row in old}
        assert seen == rows and any((logp - old)[old != 0].abs().max() > 0.2 for logp, old in given[1:])
    else:
        assert all(old is None for _, old in given) and told["clip_share"] == 0


@pytest.mark.parametrize("critic", [None, "shared", "separate"])
def test_an_update_of_plain_rows_is_that_of_shared_ones(critic, monkeypatch):
    """Up to rounding, in every weight; by the plain pass of model.py, or by the one in which rows share their beginnings."""
    passed, after, given = [], {}, {} if critic is None else dict(baseline="group+value", critic=critic)
    for module in (grpo.model, passes):
        monkeypatch.setattr(module, "token_logps", lambda *x, real=module.token_logps, name=module.__name__, **more: (
            passed.append(name), real(*x, **more))[1])
    for cache in ("plain", "shared"):
        cfg = Config(prompts=2, group=4, max_new=12, minibatches=2, micro_tokens=30, cache=cache, **given)
        policy, b = tiny_model(), a_rollout(tiny_model(), cfg)
        critics = {None: None, "shared": ScalarHead(32, std=0.1), "separate": ScalarHead(32, tiny_model(5), std=0.1)}
        agent = Agent(cfg, None, None, policy, ref=policy, critic=critics[critic], beta=0.1)
        params = [p for x in (policy, agent.critic) if x is not None for p in x.parameters() if p.requires_grad]
        if critic:
            torch.nn.init.constant_(agent.critic.head.weight, 0.1)
            b.value, b.returns = torch.zeros_like(b.adv), b.adv + 0.5 * b.mask
        agent.opt, before = torch.optim.SGD(params, 0.1), [p.detach().clone() for p in params]
        passed.clear()
        grpo.update(agent, b, random.Random(0))
        assert {*passed} == {"model" if cache == "plain" else "run.passes"} and len(passed) > 2
        after[cache] = [p.detach() - q for p, q in zip(params, before)]
    for x, y in zip(*after.values(), strict=True):
        assert x.any() and (x - y).abs().max() < 1e-4 * x.abs().max() + 1e-7


@pytest.mark.parametrize("given", [dict(dtype="float32"), dict(dtype="bfloat16"), dict(dtype="float32", baseline="value"),
                                   dict(dtype="bfloat16", epochs=2)], ids=str)
def test_rows_of_another_policy_have_its_log_probabilities(given, monkeypatch, cfg, encoding):
    """Those noted with them are the old ones, and no mismatch, with one update of a rollout, too: by 3 nats too small here."""
    cfg = dataclasses.replace(cfg, kl="none", device="cpu", **given)
    agent = grpo.new_agent(cfg, task, encoding, pretrained.to_device(tiny_model(), cfg))
    off, own = torch.tensor([False, True, True, False] * 2), grpo.collect

    def collect(*x):
        batch = own(*x)
        batch.logp = batch.logp - 3 * (batch.mask & off[:, None])
        batch.on_policy = ~off if known else None
        return batch
    monkeypatch.setattr(grpo, "collect", collect)
    for known in (True, False):
        batch, _ = grpo.rollout(agent, task.problems(1)[0][:2], random.Random(0))
        batch.adv = torch.where(batch.mask, torch.arange(8.0)[:, None] - 3.5, 0)
        if known:
            again, _ = grpo.logps(agent.sampler, batch, cfg)
            assert torch.equal(batch.old_logp[off], batch.logp[off])
            present = again if given["dtype"] == "bfloat16" or "baseline" in given else batch.logp
            assert torch.equal(batch.old_logp[~off], present[~off]) and not torch.equal(again, batch.logp)
            stats = grpo.update(agent, batch, random.Random(0))
            assert stats["mismatch"] < (0.5 if given["dtype"] == "bfloat16" else 1e-4)
            assert stats["clip_share"] > 0.1                    # ratios of e^3
        else:
            with pytest.raises(UserError, match="False in the Batch's on_policy$"):
                grpo.update(agent, batch, random.Random(0))


@pytest.mark.parametrize("n", [[0], [1], [7], [11], [4, 4], [8, 3], [3, 8], [0, 5], [12, 0], [0, 0]], ids=str)
def test_an_algorithm_may_leave_out_rows_or_add_some(n, monkeypatch):
    """In each epoch each row of a rank is in one minibatch, whose number of rows is that of all ranks. Of ranks with as many
    rows as were sampled, they are those of a single process."""
    cfg, ranks = Config(prompts=2, group=4, epochs=2, minibatches=3), len(n)

    def split(rank):
        return [(rows.tolist(), size) for rows, size in grpo.minibatches(cfg, random.Random(5), n[rank])]
    found = on_ranks(ranks, split, monkeypatch)
    assert all(len(of_rank) == 6 for of_rank in found)
    for epoch in (slice(3), slice(3, 6)):
        for rows, of_rank in zip(n, found):
            assert sorted(sum((part for part, _ in of_rank[epoch]), [])) == list(range(rows))
    for parts in zip(*found):
        assert {size for _, size in parts} == {max(1, sum(len(rows) for rows, _ in parts))}
    if n == [4, 4]:
        alone = [rows.tolist() for rows, _ in grpo.minibatches(cfg, random.Random(5), 8)]
        assert alone == [sorted(a + [4 + i for i in b]) for (a, _), (b, _) in zip(*found)]


@pytest.mark.parametrize("n", [3, 7, 11])
def test_the_loss_of_fewer_or_more_rows_is_their_mean(n):
    """Of those that there are, and not of --prompts x --group."""
    cfg, model = Config(prompts=2, group=4, max_new=12, kl="none"), tiny_model()
    b = a_rollout(model, cfg)
    b = passes.joined([b, b], torch.arange(2, 2 + n))
    b.ref_logp, before = None, tiny_model()
    update(model, torch.optim.SGD(model.parameters(), 1.0), b, cfg, random.Random(0))
    logp, _ = token_logps(before, b.ids, b.mask, 1.0)
    loss = -(b.adv * logp / b.mask.sum(1, keepdim=True)).sum() / n
    for x, p, q in zip(torch.autograd.grad(loss, before.parameters()), before.parameters(), model.parameters()):
        torch.testing.assert_close(p - q, x, rtol=1e-3, atol=1e-5)


def test_every_parameter_moves_and_the_batch_does_not():
    model = tiny_model()
    cfg = Config(prompts=2, group=4, max_new=12, minibatches=2)
    b = a_rollout(model, cfg)
    kept = {name: getattr(b, name).clone() for name in ("ids", "mask", "logp", "ref_logp", "adv")}
    before = [p.detach().clone() for p in model.parameters()]
    update(model, adam(model, 1e-6), b, cfg, random.Random(0))
    assert all((x != p).any() for x, p in zip(before, model.parameters()))
    assert all(torch.equal(x, getattr(b, name)) for name, x in kept.items())


def test_nan_in_the_loss_stops_the_run():
    model = tiny_model()
    cfg = Config(prompts=2, group=4, max_new=12)
    b = a_rollout(model, cfg)
    b.adv[b.mask] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match="gradient"):
        update(model, adam(model, 1e-3), b, cfg, random.Random(0))
    assert all(torch.equal(x, p) for x, p in zip(before, model.parameters()))


def up_to(length, T):
    """Masks whose rows end after so many of T tokens, (B, T)."""
    return torch.arange(1, T + 1) == length[:, None]


def test_micro_batches_hold_every_row_once_within_the_budget():
    length = torch.tensor([3, 50, 7, 20, 21, 50, 4, 3, 30])
    ids = torch.randint(0, 9, (9, 50))
    chunks = list(split_rows(ids, up_to(length, 50), 60))
    assert sorted(torch.cat([rows for rows, _ in chunks]).tolist()) == list(range(9))
    for rows, T in chunks:
        assert T == length[rows].max()
        assert len(rows) * T <= 60 or len(rows) == 1
    assert len(chunks) < 8 and [(rows.tolist(), T) for rows, T in split_rows(ids[:0], ids[:0] > 0, 60)] == [([], 50)]


def test_a_micro_batch_has_its_rows_in_every_tensor():
    """Those (B,) too, which algorithms in files read; here of some rows that are not the first, in the order of their ids."""
    ids, at = torch.tensor([[9, 1, 1, 1], [7, 1, 0, 0], [8, 1, 1, 0], [6, 1, 1, 1], [7, 1, 1, 0]]), torch.arange(4)
    length = torch.tensor([4, 2, 3, 4, 3])
    b = Batch(ids, (at > 0) & (at < length[:, None]), length < 4, torch.rand(5, 4), length - 1, [*"abcde"], adv=torch.rand(5, 4))
    parts = list(passes.micro_batches(b, torch.tensor([1, 2, 4]), 6, None))
    for part, rows, T in zip(parts, ([1, 4], [2]), (3, 3), strict=True):
        for name in ("ids", "mask", "logp", "adv", "finished", "start"):
            x = getattr(b, name)[rows]
            assert torch.equal(getattr(part, name), x[:, :T] if x.dim() == 2 else x), name
        assert part.value is None and part.problems is None


def test_rows_that_begin_alike_are_put_one_below_the_other():
    ids = torch.tensor([[5, 1, 2], [3, 9, 9], [5, 1, 0], [3, 9, 1], [5, 1, 2], [3, 1, 1]])
    length = torch.tensor([3, 3, 2, 3, 3, 3])
    def parts(budget):
        return [(rows.tolist(), T) for rows, T in split_rows(ids, up_to(length, 3), budget)]
    assert parts(100) == [([5, 3, 1, 2, 0, 4], 3)]
    assert parts(6) == [([5, 3], 3), ([1, 2], 3), ([0, 4], 3)]
    # A longer row makes those before it longer too, and the next chunk begins anew.
    length = torch.tensor([1, 1, 1, 3, 1, 1])
    assert parts(4) == [([5], 1), ([3], 3), ([1, 2, 0, 4], 1)]


def test_no_float64_where_there_is_none(monkeypatch):
    """mps has none: only `double` may ask for it."""
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **kwargs or {})
            assert getattr(out, "dtype", None) != torch.float64, f
            return out
    of = dict(float=lambda: torch.float32, double=lambda: torch.float64)
    assert [grpo.model.double(SimpleNamespace(device=torch.device(x), **of)) for x in ("mps", "cpu")] == [
        torch.float32, torch.float64]
    monkeypatch.setattr(grpo.model, "double", torch.Tensor.float)
    monkeypatch.setattr(caches, "double", torch.Tensor.float)
    model, cfg = tiny_model(), Config(prompts=2, group=4, max_new=12)
    u = torch.rand(8, 12)
    with Watch():
        b = sample(model, [[1, 2, 3], [4]], 4, [12, 12], 1.0, {256}, u)
        reward = torch.zeros_like(b.logp).masked_scatter(b.mask, u.flatten())
        ends = last_tokens(b.mask)
        b.adv = grpo.advantages(reward, ends, b.mask, 0 * reward, 0 * reward,
                                dataclasses.replace(cfg, adv_scale="batch"))[0]
        b.old_logp = b.logp
        update(model, adam(model, 1e-3), b, cfg, random.Random(0))
