"""From rewards to advantages: scores, GAE, whitening, estimators of the KL, the critic's loss."""
import math
import statistics

import torch
from conftest import shared_logps, tiny_model
from pytest import approx, mark
from torch.testing import assert_close

import grpo
from grpo import Config, advantages, gae, kl_estimate, value_loss, whiten
from model import ScalarHead
from run import passes

# Rows of 1, 3, 5 and 2 sampled tokens after prompts of 2, 1, 1 and 3.
MASK = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1],
                     [0, 0, 0, 1, 1, 0]]).bool()
HOLES = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]).bool()
ZERO = torch.zeros(4, 6)


@mark.parametrize("mask", [MASK, HOLES], ids=["padding", "replies"])
@mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae_is_its_formula_and_sees_no_padding(gamma, lam, mask):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}; credit crosses a reply, whatever is there."""
    reward, value = torch.randn(2, *mask.shape)
    want = torch.zeros_like(reward)
    for i, on in enumerate(mask):
        r, v = reward[i][on].tolist(), value[i][on].tolist() + [0.0]
        delta = [x + gamma * v[t + 1] - v[t] for t, x in enumerate(r)]
        want[i][on] = torch.tensor([sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:]))
                                    for t in range(len(r))])
    assert_close(gae(reward, value, mask, gamma, lam), want)


def test_returns_do_not_depend_on_whitening():
    """With gamma = lambda = 1 and no value, A is R at each sampled token, 0 elsewhere."""
    last = passes.last_tokens(MASK)
    reward, value = last * torch.tensor([[3.0], [-1.0], [2.0], [0.5]]), MASK * torch.randn(4, 6)
    given = dict(group=2, baseline="value", lam=1.0)
    groups = torch.arange(4) // 2
    plain, white = (advantages(reward, last, groups, MASK, ZERO, value,
                               Config(adv_scale=scale, **given)) for scale in ("none", "batch"))
    assert torch.equal(plain[1], white[1])
    assert_close(white[0], whiten(plain[0], MASK))
    assert_close(plain[1] * MASK, MASK * reward.sum(1, keepdim=True))
    assert_close((plain[1] - value) * MASK, plain[0])


@mark.parametrize("x", [
    1e4 + torch.rand(5000), 1e-4 * torch.rand(5000), torch.tensor([1.0, -1.0])])
def test_whitening_is_over_the_sampled_tokens_alone(x):
    """Sums in float32 would be off by a thousandth."""
    mask = torch.arange(len(x) + 1) < len(x)
    got, own = whiten(torch.cat([x, torch.tensor([math.nan])]), mask), x.double()
    want = ((own - own.mean()) / own.std(correction=0)).float()
    assert_close(got[:-1], want, rtol=0, atol=1e-6)
    assert got[-1] == 0


@mark.parametrize("x, z", [
    ([], 0), ([0.1], 0), ([0.1] * 3, 0), ([0.0] * 3, 0), ([1e4, 1e4 + 8e-3], 0),
    ([1e4, 1e4 + 8e-2], 1), ([0.0, 1e-6], 0), ([0.0, 4e-6], 1)])
def test_whitening_of_what_differs_by_rounding_alone_is_zero(x, z):
    """A millionth of the mean, or of 1, is the least that counts."""
    white = whiten(torch.tensor(x + [7.0]), torch.arange(len(x) + 1) < len(x))
    assert white.abs().tolist() == approx([z] * len(x) + [0], rel=0.05, abs=0)


# ---------- groups, baselines

def outcome(rewards, **given):
    """The advantage of each row, the same at all of its tokens; and which groups are dead."""
    B = len(rewards)
    mask = torch.arange(5).expand(B, -1) < 2 + torch.arange(B)[:, None] % 3
    mask[:, 0] = False
    ends, zero = passes.last_tokens(mask), torch.zeros(B, 5)
    r, groups = ends * torch.tensor(rewards)[:, None], torch.arange(B) // given.pop("group", B)
    adv, returns, dead = advantages(r, ends, groups, mask, zero, None, Config(**given))
    assert returns is None and torch.equal(adv, mask * adv[:, 1:2])
    return adv[:, 1].tolist(), dead.tolist()


R, ROOT = [1.0, 0.0, 2.0, 5.0], math.sqrt(1.5)


@mark.parametrize("rewards, given, wanted", [
    ([1.0, 0.0, 2.0], dict(adv_scale="none"), [0, -1, 1]),          # the documents' numbers
    ([1.0, 0.0, 2.0], {}, [0, -ROOT, ROOT]),
    (R, dict(baseline="none", adv_scale="none"), R),
    (R, dict(baseline="leave-one-out", adv_scale="none"), [-4 / 3, -8 / 3, 0, 4]),
    (R, dict(baseline="none"), [x / math.sqrt(3.5) for x in R]),
    ([2.0] * 4, dict(baseline="none"), [2.0] * 4),      # a dead group is not divided
    ([1e-6, 2e-6], {}, [0, 0]),                         # rounding of numbers near 1
    ([0.1] * 4, dict(baseline="leave-one-out"), [0] * 4)])
def test_baselines_by_hand(rewards, given, wanted):
    assert outcome(rewards, **given)[0] == approx(wanted, abs=1e-7)


def test_scores_of_large_rewards_keep_their_digits():
    rewards = [1e4 + i / 16 for i in (0, 1, 3, 7, 8)]       # in float32 exactly
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert outcome(rewards)[0] == approx([(x - mean) / std for x in rewards], rel=1e-5)


def test_equal_sums_of_unequal_steps_are_not_a_dead_group():
    """Scores are over three steps; a token has the sum of those from it on."""
    ends, zero = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]]) > 0, torch.zeros(2, 4)
    reward = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    cfg, x = Config(supervision="process"), math.sqrt(0.5)
    adv, _, dead = advantages(reward, ends, torch.zeros(2).long(), zero == 0, zero, None, cfg)
    assert dead.tolist() == [False]
    assert adv.flatten().tolist() == approx([-x, -x, -2 * x, -2 * x, x, x, x, x])


@mark.parametrize("given", [
    {}, dict(baseline="leave-one-out", adv_scale="none"), dict(baseline="none")], ids=str)
def test_groups_may_differ_in_size_and_lie_anywhere(given):
    """Each has the scores that it has alone; one that is not compared, too, and one of no rows."""
    groups, cfg = torch.tensor([1, 0, 2, 0, 1, 0, 1, 0]), Config(supervision="process", **given)
    ends = torch.rand(8, 6) < 0.5
    ends[:, 5] = True
    r = torch.where(ends, torch.randn(8, 6).round(decimals=1), 0)
    found, dead = grpo.scores_of_rows(r, ends, groups, cfg)
    for g in range(3):
        rows = groups == g
        alone, is_dead = grpo.group_scores(r[None, rows], ends[None, rows], cfg)
        assert_close(found[rows], alone[0])
        assert dead[g] == is_dead[0] and found.isfinite().all()
    none = grpo.scores_of_rows(r[:0], ends[:0], groups[:0], cfg)
    assert [*map(len, none)] == [0, 0]


# ---------- KL and critic

DIRECTIONS = {"k1": None, "k2": "reverse", "k3": "forward", "ratio*k3": "reverse"}


@mark.parametrize("estimator", DIRECTIONS)
def test_gradients_of_the_estimators_by_enumeration(estimator):
    """On-policy, in the loss and in the reward, where only k1 has the gradient of the KL."""
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref, logp = torch.randn(6, dtype=torch.float64).log_softmax(-1), x.log_softmax(-1)
    old = logp.detach()

    def grad(value):
        return torch.autograd.grad(value, x, retain_graph=True)[0]
    exact = {"reverse": (logp.exp() * (logp - ref)).sum(),
             "forward": (ref.exp() * (ref - logp)).sum(), None: 0 * x.sum()}
    mean = (old.exp() * kl_estimate(logp, ref, estimator, (logp - old).exp())).sum()
    want = grad(exact[DIRECTIONS[estimator]])
    assert_close(grad(mean), want, rtol=1e-9, atol=1e-12)
    if estimator != "k2":                       # the others are unbiased, too
        assert mean.item() == approx(exact["reverse"].item())
    rewarded = (old.exp() * kl_estimate(old, ref, estimator) * logp).sum()
    is_gradient = torch.allclose(grad(rewarded), grad(exact["reverse"]), 1e-9, 1e-12)
    assert is_gradient is (estimator == "k1")


@mark.parametrize("value, loss, grad", [
    (0.1, 0.9 ** 2, -0.9), (1.0, 0.8 ** 2, 0), (-0.5, 1.5 ** 2, -1.5)])
def test_value_loss_by_hand(value, loss, grad):
    """Half the worse of two squared errors, its own and that of the value kept within 0.2 of the
    old, 0; the second token does not count."""
    value = torch.tensor([[value, 5.0]], requires_grad=True)
    found = value_loss(value, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
    found.backward()
    assert found.item() == approx(loss / 2)
    assert value.grad.tolist() == [[approx(grad), 0]]


@mark.parametrize("separate", [False, True])
def test_a_value_does_not_know_its_token(separate):
    """Change token t, and only later columns may move."""
    model, ids = tiny_model(), torch.randint(0, 255, (1, 10))
    critic = ScalarHead(32, tiny_model(1) if separate else None, 1.0)
    mask = torch.arange(10)[None] >= 3
    _, value = shared_logps(model, ids, mask, 1.0, critic)
    assert not value[~mask].any() and value[mask].all()
    for t in range(3, 10):
        other = ids.clone()
        other[0, t] += 1
        moved = (shared_logps(model, other, mask, 1.0, critic)[1] != value)[0]
        assert not moved[:t + 1].any() and moved[t + 1:].all()
