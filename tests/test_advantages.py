"""From rewards to advantages: GAE, process supervision, baselines, KL in the reward, the critic."""
import math

import pytest
import torch
from conftest import tiny_model

from grpo import (ALGOS, Batch, Config, advantages, gae, kl_estimate, policy_loss,
                  token_weights, value_loss, whiten)
from model import ScalarHead
from run.passes import last_tokens, token_logps

G = torch.Generator().manual_seed(0)
# Rows of 1, 3, 5 and 2 sampled tokens after prompts of 2, 1, 1 and 3.
MASK = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]],
                    dtype=torch.bool)
LAST = torch.zeros(4, 6, dtype=torch.bool)
LAST[[0, 1, 2, 3], [2, 3, 5, 4]] = True
ZERO = torch.zeros(4, 6)


def random_values():
    return torch.where(MASK, torch.randn(4, 6, generator=G), 0)


# ---------------------------------------------------------------------------------------- GAE

def slow_gae(reward, value, mask, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, row by row, term by term."""
    out = torch.zeros_like(reward)
    for i, on in enumerate(mask):
        r, v = reward[i][on].tolist(), value[i][on].tolist() + [0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        out[i][on] = torch.tensor([sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:]))
                                   for t in range(len(r))])
    return out


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae_is_its_formula_and_sees_no_padding(gamma, lam):
    reward, value = random_values(), random_values()
    want = slow_gae(reward, value, MASK, gamma, lam)
    dirty = [torch.where(MASK, x, 7.0) for x in (reward, value)]
    torch.testing.assert_close(gae(reward, value, MASK, gamma, lam), want)
    torch.testing.assert_close(gae(*dirty, MASK, gamma, lam), want)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5)])
def test_gae_gives_credit_across_columns_that_no_policy_sampled(gamma, lam):
    """As if they were not there, whatever reward and value say of them: an environment may speak there."""
    holes = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0]]).bool()
    reward, value = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    adv = gae(reward, value, holes, gamma, lam)
    torch.testing.assert_close(adv, slow_gae(reward, value, holes, gamma, lam))
    once = torch.zeros(1, 5)
    once[0, 4] = 1.0                        # the reward comes after a hole, and all tokens earn it
    assert gae(once, torch.zeros(1, 5), torch.tensor([[True, True, False, True, True]]), 1.0, 1.0).tolist() == [[1, 1, 0, 1, 1]]


def test_without_a_critics_opinion_every_token_gets_the_reward():
    """gamma = lambda = 1, V = 0, beta = 0: A = R at each sampled token, 0 elsewhere, whatever the
    length. The reward on padding, or one column off, would show."""
    reward = torch.where(LAST, torch.tensor([3.0, -1.0, 2.0, 0.5])[:, None], 0)
    cfg = Config(group=2, baseline="value", adv_scale="none", lam=1.0)
    adv, returns, _ = advantages(reward, LAST, MASK, ZERO, ZERO, cfg)
    assert torch.equal(adv, torch.where(MASK, reward.sum(1, True), 0)) and torch.equal(adv, returns)


def test_returns_do_not_depend_on_whitening():
    reward, value = torch.where(LAST, 1.0, 0.0) * torch.arange(4)[:, None], random_values()
    plain, white = (advantages(reward, LAST, MASK, ZERO, value,
                               Config(group=2, baseline="value", adv_scale=s)) for s in ("none", "batch"))
    assert torch.equal(plain[1], white[1])
    torch.testing.assert_close(white[0], whiten(plain[0], MASK))
    torch.testing.assert_close(torch.where(MASK, plain[1] - value, 0), plain[0])


# ---------------------------------------------------------------------------------- whitening

def test_whitening_is_over_the_sampled_tokens_alone():
    x = random_values()
    got = whiten(torch.where(MASK, x, float("nan")), MASK)
    own = x[MASK].double()
    torch.testing.assert_close(got[MASK].double(), (own - own.mean()) / own.std(correction=0),
                               rtol=1e-5, atol=1e-6)
    assert got[~MASK].abs().sum() == 0


@pytest.mark.parametrize("n", [0, 1, 3])
def test_whitening_of_none_one_or_equal_numbers_is_zero(n):
    mask = torch.arange(6).expand(2, 6) < torch.tensor([[n], [0]])
    for x in (0.1, 0.0, -0.1):
        assert whiten(torch.full((2, 6), x), mask).abs().sum() == 0


def test_whitening_of_what_differs_by_rounding_alone_is_zero():
    """Or nearly so; a millionth of the mean is the least that counts."""
    mask, x = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[-1.0, 1.0, 1.0, -1.0]])
    assert whiten(1e4 + 4e-3 * x, mask).abs().sum() == 0
    torch.testing.assert_close(whiten(1e4 + 4e-2 * x, mask), x, rtol=0.05, atol=0)
    torch.testing.assert_close(whiten(1e-9 * x, mask), x)


def test_whitening_is_exact_for_numbers_far_from_0():
    """Sums in float32 would be off by a thousandth here."""
    x = 1e4 + torch.rand(1, 5000, generator=torch.Generator().manual_seed(0))
    own = x.double()
    torch.testing.assert_close(whiten(x, x > 0).double(), (own - own.mean()) / own.std(correction=0), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------- process supervision

STEPS = torch.zeros(4, 6, dtype=torch.bool)
STEPS[[0, 1, 1, 2, 2, 2, 3], [2, 1, 3, 2, 3, 5, 4]] = True


def test_process_advantages_are_those_of_section_413():
    """Standardised over all step rewards of the group; a token's is the sum over the steps that end
    at or after it. Row by row, as it is written."""
    reward = torch.where(STEPS, torch.rand(4, 6, generator=G), 0)
    adv, returns, dead = advantages(reward, STEPS, MASK, ZERO, None,
                                    Config(group=2, supervision="process"))
    for p in (0, 2):
        R = [reward[i, t].item() for i in (p, p + 1) for t in range(6) if STEPS[i, t]]
        mean = sum(R) / len(R)
        std = math.sqrt(sum((r - mean) ** 2 for r in R) / len(R))
        for i in (p, p + 1):
            for t in range(6):
                want = sum((reward[i, j].item() - mean) / std for j in range(t, 6) if STEPS[i, j])
                assert adv[i, t].item() == pytest.approx(want if MASK[i, t] else 0, abs=1e-5)
    assert returns is None and dead.tolist() == [False, False]


def test_equal_sums_of_unequal_steps_are_not_a_dead_group():
    """Each row has a true and a false step, in another order: in the second half of their tokens the credit differs."""
    ends = torch.tensor([[False, True, False, True]]).repeat(2, 1)
    reward, zero = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]), torch.zeros(2, 4)
    adv, _, dead = advantages(reward, ends, ends | True, zero, None, Config(group=2, supervision="process"))
    assert reward.sum(1).unique().numel() == 1 and dead.tolist() == [False]
    assert adv.tolist() == [[0, 0, -1, -1], [0, 0, 1, 1]]


def test_one_step_at_the_last_token_is_outcome_supervision():
    reward = torch.where(LAST, torch.tensor([1.0, 0.0, 2.0, 5.0])[:, None], 0)
    outcome, process = (advantages(reward, LAST, MASK, ZERO, None, Config(group=4, supervision=s))[0]
                        for s in ("outcome", "process"))
    assert torch.equal(outcome, process) and torch.equal(LAST, last_tokens(MASK))
    assert all(len(set(row[on].tolist())) == 1 for row, on in zip(outcome, MASK))


# ------------------------------------------------------------------------------------ baselines

def outcome(rewards, **fields):
    reward = torch.where(LAST, torch.tensor(rewards)[:, None], 0)
    adv, *_ = advantages(reward, LAST, MASK, fields.pop("penalty", ZERO), None,
                         Config(group=4, **fields))
    return [row[on][-1].item() for row, on in zip(adv, MASK)]


def test_baselines_by_hand():
    r = [1.0, 0.0, 2.0, 5.0]
    assert outcome(r, baseline="none", adv_scale="none") == r
    assert outcome(r, baseline="group", adv_scale="none") == [-1, -2, 0, 3]
    others = [x - (sum(r) - x) / 3 for x in r]
    assert outcome(r, baseline="leave-one-out", adv_scale="none") == pytest.approx(others)
    std = math.sqrt(14 / 4)
    assert outcome(r, baseline="none", adv_scale="group") == pytest.approx([x / std for x in r])
    assert sum(outcome(r, adv_scale="batch")[i] * n for i, n in enumerate((1, 3, 5, 2))) == pytest.approx(
        0, abs=1e-6)


@pytest.mark.parametrize("mean, gap, dead", [(1000.0, 2e-4, True), (1000.0, 1.0, False), (0.001, 1e-6, False)])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_rewards_are_equal_relative_to_their_size(mean, gap, dead, scale):
    """A gap of 2e-4 is rounding to rewards of 1000; one of 1e-6 is a difference to those of 0.001."""
    adv = outcome([mean + gap, mean, mean, mean], adv_scale=scale)
    assert (adv == [0.0] * 4) is dead


def test_a_dead_group_is_left_alone_without_a_centre():
    """The std of equal rewards is 0: a raw reward is not divided by it."""
    assert outcome([2.0] * 4, baseline="none", adv_scale="group") == [2.0] * 4
    assert outcome([0.1] * 4, baseline="leave-one-out", adv_scale="group") == pytest.approx([0] * 4, abs=1e-7)


# ------------------------------------------------------------------------------------ KL, ratio

@pytest.mark.parametrize("estimator, direction", [("k1", None), ("k2", "reverse"), ("k3", "forward"),
                                                  ("ratio*k3", "reverse")])
def test_gradients_of_the_estimators_by_enumeration(estimator, direction):
    """On-policy: E grad k1 = 0, k2 and ratio*k3 that of KL(pi || ref), k3 that of KL(ref || pi)."""
    x = torch.randn(6, dtype=torch.float64, generator=G, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64, generator=G).log_softmax(-1)
    logp = x.log_softmax(-1)
    old = logp.detach()
    mean = (old.exp() * kl_estimate(logp, ref, estimator, (logp - old).exp())).sum()
    got, = torch.autograd.grad(mean, x, retain_graph=True)
    exact = {"reverse": (logp.exp() * (logp - ref)).sum(), "forward": (ref.exp() * (ref - logp)).sum()}
    want = torch.zeros(6).double() if direction is None else torch.autograd.grad(exact[direction], x)[0]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    if estimator != "k2":                       # the others are unbiased, too
        assert mean.item() == pytest.approx(exact["reverse"].item())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "ratio*k3"])
def test_gradients_of_the_estimators_in_the_reward_by_enumeration(estimator):
    """On-policy: there E k grad log pi is the gradient of KL(pi || ref) for k1, and for no other."""
    x = torch.randn(6, dtype=torch.float64, generator=G, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64, generator=G).log_softmax(-1)
    logp = x.log_softmax(-1)
    old = logp.detach()
    got, = torch.autograd.grad((old.exp() * kl_estimate(old, ref, estimator) * logp).sum(), x, retain_graph=True)
    want, = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), x)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12) is (estimator == "k1")


def test_kl_in_the_reward_or_nowhere_is_not_in_the_loss():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old, ref, on = logp.detach(), torch.tensor([[-3.0, -0.5]]), torch.ones(1, 2, dtype=torch.bool)
    for kl, nothing in (("loss", False), ("reward", True), ("watch", True), ("none", True)):
        batch = Batch(None, on, None, None, None, old_logp=old, ref_logp=ref, adv=torch.zeros(1, 2))
        loss, stats = policy_loss(logp, batch, on / 2, 2, Config(kl=kl), 0.04)
        grad, = torch.autograd.grad(loss, logp)
        assert bool((grad == 0).all()) is nothing
        assert stats["kl"] > 0.5                # but always logged


# ---------------------------------------------------------------------------------------- critic

@pytest.mark.parametrize("algo", ["reinforce", "rloo", "dr_grpo"])
def test_the_gradient_of_the_expected_reward_favours_no_length(algo):
    """That of E[r(o)]: r times the gradient of log pi(o), the sum over all tokens of a row."""
    cfg = Config(**{**ALGOS[algo], "beta": 0.0})
    logp = torch.where(MASK, -1.0, 0).requires_grad_()
    weight = token_weights(MASK, cfg.loss_mean, 4, int(MASK.sum()), 8)
    batch = Batch(None, MASK, None, None, None, old_logp=logp.detach(), adv=torch.ones(4, 6))
    loss, _ = policy_loss(logp, batch, weight, 11, cfg, 0.0)
    loss.backward()
    assert logp.grad[MASK].tolist() == pytest.approx([-1 / (4 * 8)] * 11)


def test_value_loss_by_hand():
    """The worse of two squared errors: the value's own, and that of the value kept near the old."""
    one = lambda x: torch.tensor([[x]])
    loss = lambda v, old, ret: value_loss(one(v), one(old), one(ret), torch.ones(1, 1)).item()
    assert loss(0.1, 0.0, 1.0) == pytest.approx(0.5 * 0.9 ** 2)
    assert loss(1.0, 0.0, 1.0) == pytest.approx(0.5 * 0.8 ** 2)     # kept at 0.2
    assert loss(-0.5, 0.0, 1.0) == pytest.approx(0.5 * 1.5 ** 2)    # but not where that is better
    value = torch.tensor([[0.1, 5.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0]])             # the second token does not count
    loss = value_loss(value, torch.zeros(1, 2), torch.ones(1, 2), weight)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.9 ** 2) and value.grad.tolist() == [[pytest.approx(-0.9), 0]]


@pytest.mark.parametrize("separate", [False, True])
def test_a_value_does_not_know_its_token(separate):
    """V of the state before token t: change token t, and only later columns may move."""
    model = tiny_model()
    trunk = tiny_model(seed=1) if separate else None
    critic = ScalarHead(model.cfg.n_embd, trunk, 1.0, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 256, (1, 10), generator=G)
    mask = torch.arange(10)[None] >= 3
    _, value = token_logps(model, ids, mask, 1.0, critic)
    assert value[~mask].abs().sum() == 0 and (value[mask] != 0).all()
    for t in range(3, 10):
        other = ids.clone()
        other[0, t] = (ids[0, t] + 1) % 256
        moved = (token_logps(model, other, mask, 1.0, critic)[1] != value)[0]
        assert not moved[:t + 1].any() and moved[t + 1:].all()
