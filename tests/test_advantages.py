"""From rewards to advantages: scores, GAE, whitening, estimators of the KL, the critic's loss.
Whole steps of all settings are in test_oracle.py; here is what is rare, or worked by hand."""
import math

import pytest
import torch
from conftest import tiny_model

from grpo import Config, advantages, gae, kl_estimate, value_loss, whiten
from model import ScalarHead, token_logps
from run import passes

# Rows of 1, 3, 5 and 2 sampled tokens after prompts of 2, 1, 1 and 3.
MASK = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1],
                     [0, 0, 0, 1, 1, 0]]).bool()
LAST = passes.last_tokens(MASK)
ZERO = torch.zeros(4, 6)
EQUAL = torch.nextafter(torch.tensor([1e6, -3.3]), torch.tensor(0.0)).tolist()


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


HOLES = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]).bool()


@pytest.mark.parametrize("mask", [MASK, HOLES], ids=["padding", "replies"])
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae_is_its_formula_and_sees_no_padding(gamma, lam, mask):
    """Nor a reply, whatever reward and value say of it: credit crosses it."""
    reward, value = torch.randn(2, *mask.shape)
    want = slow_gae(reward, value, mask, gamma, lam)
    torch.testing.assert_close(gae(reward, value, mask, gamma, lam), want)


def test_returns_do_not_depend_on_whitening():
    reward, value = LAST * torch.arange(4.0)[:, None], MASK * torch.randn(4, 6)
    plain, white = (advantages(reward, LAST, MASK, ZERO, value, Config(
        group=2, baseline="value", adv_scale=scale)) for scale in ("none", "batch"))
    assert torch.equal(plain[1], white[1])
    torch.testing.assert_close(white[0], whiten(plain[0], MASK))
    torch.testing.assert_close((plain[1] - value) * MASK, plain[0])


# ---------------------------------------------------------------------------------- whitening

FAR = 1e4 + torch.rand(5000)            # sums in float32 would be off by a thousandth


@pytest.mark.parametrize("x", [FAR, 1e-9 * (FAR - 1e4), torch.tensor([1.0, -1.0])])
def test_whitening_is_over_the_sampled_tokens_alone(x):
    mask = torch.arange(len(x) + 1) < len(x)
    got = whiten(torch.cat([x, torch.tensor([math.nan])]), mask)
    own = x.double()
    want = ((own - own.mean()) / own.std(correction=0)).float()
    torch.testing.assert_close(got[:-1], want, rtol=0, atol=1e-6)
    assert got[-1] == 0


@pytest.mark.parametrize("x", [[], [0.1], [0.1] * 3, [0.0] * 3, [-0.1] * 3, [1e4, 1e4 + 8e-3]])
def test_whitening_of_what_differs_by_rounding_alone_is_zero(x):
    """A millionth of the mean is the least that counts."""
    mask = torch.arange(6) < len(x)
    assert not whiten(torch.tensor(x + [7.0] * (6 - len(x))), mask).any()
    apart = whiten(torch.tensor([1e4, 1e4 + 8e-2]), torch.ones(2).bool())
    torch.testing.assert_close(apart, torch.tensor([-1.0, 1.0]), rtol=0.05, atol=0)


# --------------------------------------------------------------------------- groups, baselines

def outcome(rewards, **given):
    """The advantage of each row, the same at all of its tokens; and which groups are dead."""
    B = len(rewards)
    mask = torch.arange(5).expand(B, -1) < 2 + torch.arange(B)[:, None] % 3
    mask[:, 0] = False
    ends, zero = passes.last_tokens(mask), torch.zeros(B, 5)
    r, cfg = ends * torch.tensor(rewards)[:, None], Config(**dict(group=B) | given)
    adv, returns, dead = advantages(r, ends, mask, zero, None, cfg)
    assert returns is None and torch.equal(adv, mask * adv[:, 1:2])
    return adv[:, 1].tolist(), dead.tolist()


R, ROOT = [1.0, 0.0, 2.0, 5.0], math.sqrt(1.5)


@pytest.mark.parametrize("rewards, given, wanted", [
    ([1.0, 0.0, 2.0], dict(adv_scale="none"), [0, -1, 1]),          # the documents' numbers
    ([1.0, 0.0, 2.0], {}, [0, -ROOT, ROOT]),
    ([1.0, 0.0, 1.0], {}, [math.sqrt(0.5), -math.sqrt(2), math.sqrt(0.5)]),
    (R, dict(baseline="none", adv_scale="none"), R),
    (R, dict(baseline="group", adv_scale="none"), [-1, -2, 0, 3]),
    (R, dict(baseline="leave-one-out", adv_scale="none"), [-4 / 3, -8 / 3, 0, 4]),
    (R, dict(baseline="none"), [x / math.sqrt(3.5) for x in R]),
    ([2.0] * 4, dict(baseline="none"), [2.0] * 4),      # a dead group is not divided
    ([0.1] * 4, dict(baseline="leave-one-out"), [0] * 4)])
def test_baselines_by_hand(rewards, given, wanted):
    assert outcome(rewards, **given)[0] == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("rewards", [
    *([x] * 64 for x in (0.1, 1e6 + 0.1, 0.0, -3.3)), [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
    [1e6, EQUAL[0], EQUAL[0], 1e6], [-3.3, EQUAL[1], EQUAL[1], -3.3],
    [1000 + 2e-4, 1000.0], [0.3 - 0.05 * 6, 0.0]], ids=lambda rewards: str(rewards[:4]))
def test_rewards_equal_up_to_rounding_give_exactly_zero(rewards, scale):
    """The last is a sum that cancels; a live group beside them changes nothing."""
    n = len(rewards)
    assert outcome(rewards, adv_scale=scale) == ([0.0] * n, [True])
    adv, dead = outcome(rewards + [0.0, 1.0] * (n // 2), group=n, adv_scale=scale)
    assert adv[:n] == [0.0] * n and all(adv[n:]) and dead == [True, False]


@pytest.mark.parametrize("mean, gap", [(1000.0, 1.0), (0.001, 1e-6)])
def test_rewards_are_equal_relative_to_their_size(mean, gap):
    assert all(outcome([mean + gap, mean, mean, mean])[0])


def test_equal_sums_of_unequal_steps_are_not_a_dead_group():
    """Each row has a true and a false step, in another order."""
    ends = torch.tensor([[False, True, False, True]]).repeat(2, 1)
    reward, zero = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]), torch.zeros(2, 4)
    cfg = Config(group=2, supervision="process")
    adv, _, dead = advantages(reward, ends, ends | True, zero, None, cfg)
    assert dead.tolist() == [False] and adv.tolist() == [[0, 0, -1, -1], [0, 0, 1, 1]]


# ------------------------------------------------------------------------------ KL and critic

DIRECTIONS = {"k1": None, "k2": "reverse", "k3": "forward", "ratio*k3": "reverse"}


@pytest.mark.parametrize("estimator", DIRECTIONS)
def test_gradients_of_the_estimators_by_enumeration(estimator):
    """On-policy, in the loss and in the reward, where only k1 has the gradient of the KL."""
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logp = x.log_softmax(-1)
    old = logp.detach()

    def grad(value):
        return torch.autograd.grad(value, x, retain_graph=True)[0]
    exact = {"reverse": (logp.exp() * (logp - ref)).sum(),
             "forward": (ref.exp() * (ref - logp)).sum(), None: 0 * x.sum()}
    mean = (old.exp() * kl_estimate(logp, ref, estimator, (logp - old).exp())).sum()
    want = grad(exact[DIRECTIONS[estimator]])
    torch.testing.assert_close(grad(mean), want, rtol=1e-9, atol=1e-12)
    if estimator != "k2":                       # the others are unbiased, too
        assert mean.item() == pytest.approx(exact["reverse"].item())
    rewarded = (old.exp() * kl_estimate(old, ref, estimator) * logp).sum()
    is_gradient = torch.allclose(grad(rewarded), grad(exact["reverse"]), 1e-9, 1e-12)
    assert is_gradient is (estimator == "k1")


@pytest.mark.parametrize("value, loss, grad", [
    (0.1, 0.9 ** 2, -0.9), (1.0, 0.8 ** 2, 0), (-0.5, 1.5 ** 2, -1.5)])
def test_value_loss_by_hand(value, loss, grad):
    """Half the worse of two squared errors, its own and that of the value kept within 0.2 of the
    old, 0; the second token does not count."""
    value = torch.tensor([[value, 5.0]], requires_grad=True)
    found = value_loss(value, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
    found.backward()
    assert found.item() == pytest.approx(loss / 2)
    assert value.grad.tolist() == [[pytest.approx(grad), 0]]


@pytest.mark.parametrize("forward", [token_logps, passes.token_logps])
@pytest.mark.parametrize("trunk", [None, tiny_model(seed=1)])
def test_a_value_does_not_know_its_token(trunk, forward):
    """Change token t, and only later columns may move."""
    model, ids = tiny_model(), torch.randint(0, 255, (1, 10))
    critic = ScalarHead(model.cfg.n_embd, trunk, 1.0, torch.Generator().manual_seed(0))
    mask = torch.arange(10)[None] >= 3
    _, value = forward(model, ids, mask, 1.0, critic)
    assert not value[~mask].any() and value[mask].all()
    for t in range(3, 10):
        other = ids.clone()
        other[0, t] += 1
        moved = (forward(model, other, mask, 1.0, critic)[1] != value)[0]
        assert not moved[:t + 1].any() and moved[t + 1:].all()
