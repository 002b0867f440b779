"""experiments/variants: each against its paper's formula, a token at a time in float64, on rows
of unequal length; what an algorithm's file may hold, and what becomes of it in a run."""
import copy
import itertools
import math
import random
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_oracle as letters
import torch
from conftest import ROOT, agent_of, batch_of, flags, records, tiny_model
from safetensors.torch import load_file

import grpo
from data import UserError, arithmetic
from data.tokenizer import byte_encoding
from model import token_logps
from run import checkpoint, config, dist, files, passes, pretrained, report, show

FILES = sorted(path.stem for path in (ROOT / "experiments" / "variants").glob("*.py"))
# What those of this repository replace; a file that is not here is only run.
REPLACED = dict(
    surrogate="cispo clip_cov dppo_kl dppo_tv dual_clip gmpo gpg kl_cov off_policy_mask raft sapo "
              "two_sided vespo",
    group_scores="beta_norm lite_ppo maxrl pass_at_k",
    advantages="dapo gpg opo soft_overlong",
    importance_ratio="gspo_token",
    rollout="dapo distillation dynamic_sampling gdpo mis remax soft_overlong tis vineppo",
    total_loss="entropy_tokens mis tis",
    token_weights="luspo",
    train_step="adaptive_kl dapo dynamic_sampling moving_reference periodic_reference",
    update="overlong_filter raft",
    collect="hints replay stale tree",
    has_gradient="entropy_tokens kl_cov overlong_filter",
    new_agent="distillation")
KNOWN = sorted({*" ".join(REPLACED.values()).split()})


def module_of(name):
    """The module of a file, whose functions are now those of grpo.py."""
    config.algorithm(name, grpo.ALGOS, grpo)
    return sys.modules[f"experiments.variants.{name}"]


def with_constants(monkeypatch, name, **constants):
    """From now on a file has other constants whenever it is loaded."""
    load = config.import_file

    def loaded(path, module_name):
        module = load(path, module_name)
        if path.stem == name:
            vars(module).update(constants)
        return module
    monkeypatch.setattr(config, "import_file", loaded)


# ----------------------------------------------------------------------------------- the loss

# Two groups of two rows. Ratios within all clips and beyond, with advantages of both signs.
LENGTHS, A = [3, 1, 4, 2], [1.3, -0.7, 0.4, -1.1]
OLD = [[-1.2, -0.3, -2.0], [-0.9], [-0.1, -3.0, -0.7, -1.6], [-2.2, -1.9]]
LOG_RATIO = [[0.02, 0.5, -0.6], [1.2], [-0.3, 1.6, -0.05, 0.45], [1.7, -0.5]]
GENTLE = [[1e-4, 2e-3, -5e-4], [9e-4], [3e-4, 1e-4, 2e-4, -1e-3], [-1e-3, -1e-3]]
WIDER = [[5 * x for x in row] for row in GENTLE]
ROUNDING = [[1e-6 * (-1) ** t for t in range(n)] for n in LENGTHS]
FALLING = [*LOG_RATIO[:3], [-0.9, -0.5]]            # the last row by 0.7 nats a token
SLIGHTLY = [*LOG_RATIO[:3], [-0.2, -0.2]]           # by 0.2, within the clip


@pytest.fixture
def double():
    """Numbers without a type have 64 bits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tensors(table):
    """Rows as (B, T) tensors behind prompts of two tokens, and their mask."""
    found, mask = torch.zeros(len(table), 6), torch.zeros(len(table), 6, dtype=torch.bool)
    for i, row in enumerate(table):
        found[i, 2:2 + len(row)] = torch.tensor(row)
        mask[i, 2:2 + len(row)] = True
    return found, mask


def of_code(name, log_ratio, **changes):
    """Loss, gradient and number of clipped tokens of a variant, by grpo.py."""
    cfg = grpo.make_config(**dict(algo=name, group=2, max_new=8) | changes)
    old, mask = tensors(OLD)
    logp = (old + tensors(log_ratio)[0]).requires_grad_(True)
    adv = torch.tensor(A)[:, None] * mask
    weight = grpo.token_weights(mask.double(), cfg.loss_mean, 4, 10, cfg.max_new)
    batch = grpo.Batch(None, mask, None, None, None, old_logp=old, adv=adv)
    loss, stats = grpo.policy_loss(logp, batch, weight, 10, cfg, 0.0)
    loss.backward()
    assert logp.grad[~mask].abs().sum() == 0
    gain, clipped = grpo.surrogate(logp, old, adv, mask, cfg)
    assert (gain[~mask] * weight[~mask] == 0).all() and not clipped[~mask].any()
    return loss.item(), logp.grad[mask].tolist(), round(stats["clip_share"].item() * 10)


def of_formula(terms, log_ratio, mean):
    """Minus the mean of the `terms(new, old, A)` of all rows, and its gradient. The mean: over
    rows of that over a row, over all tokens, or over rows of the sum."""
    leaves, total = [], 0
    for old, moved, a in zip(OLD, log_ratio, A):
        new = [torch.tensor(o + x, requires_grad=True) for o, x in zip(old, moved)]
        parts = {"sequence": 4 * len(new), "token": 10, "sum": 4}[mean]
        total = total - sum(terms(new, old, a)) / parts
        leaves += new
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.item(), [0.0 if g is None else g.item() for g in grads]


def check(name, terms, mean, clipped, log_ratio=LOG_RATIO, **changes):
    """Value, gradient and the number of clipped tokens."""
    value, grad, found = of_code(name, log_ratio, **changes)
    want, of_tokens = of_formula(terms, log_ratio, mean)
    assert value == pytest.approx(want, rel=1e-9) and found == clipped
    assert grad == pytest.approx(of_tokens, rel=1e-9, abs=1e-12)


def each(term):
    """The terms of a row whose tokens are alone: of ratio, new, old, advantage."""
    return lambda new, old, a: [term((n - o).exp(), n, o, a) for n, o in zip(new, old)]


def ppo(r, a, low=0.2, high=0.2):
    near = min(max(r, torch.tensor(1 - low)), torch.tensor(1 + high))
    return min(r * a, near * a)


def mean_log(new, old):
    return sum(n - o for n, o in zip(new, old)) / len(new)


def sapo(rise):
    def term(r, n, o, a):
        tau = rise if a > 0 else 1.05
        return 4 / tau / (1 + (-tau * (r - 1)).exp()) * a
    return each(term)


def bounded(bound):
    return each(lambda r, n, o, a: bound * a if a < 0 and r > bound else ppo(r, a))


def gmpo(new, old, a):
    logs = [n - o for n, o in zip(new, old)]
    near = [min(x, torch.tensor(0.4)) if a > 0 else max(x, torch.tensor(-0.4)) for x in logs]
    return [(sum(near) / len(near)).exp() * a] * len(new)


def luspo(new, old, a):
    return [ppo(mean_log(new, old).exp(), a, 2e-3, 2.5e-3)] * len(new)


def gspo_token(new, old, a):
    s = mean_log(new, old).exp().item()
    return [ppo(s * (n - n.item()).exp(), a, 3e-4, 4e-4) for n in new]


def vespo(new, old, a):
    w = math.exp(mean_log(new, old).item() * len(new))
    k, c = (2, 3) if a >= 0 else (3, 2)
    return [w ** k * math.exp(c * (1 - w)) * a * n for n in new]


def deepseek(new, old, a):
    out = a < 0 and mean_log(new, old) < -0.5
    return [0.0 * n if out else ppo((n - o).exp(), a) for n, o in zip(new, old)]


def dppo(distance, delta):
    def term(r, n, o, a):
        far = distance(min(math.exp(n.item()), 1 - 1e-6), math.exp(o)) > delta
        return 0.0 * n if (a > 0 and n > o or a < 0 and n < o) and far else r * a
    return each(term)


def total_variation(p, q):
    return abs(p - q)


def binary_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


ratio_times_a = each(lambda r, n, o, a: r * a)
FORMULAS = {
    "sapo": (sapo(1.0), "sequence", 0),
    "gmpo": (gmpo, "sequence", 4),
    "gpg": (each(lambda r, n, o, a: a * n), "token", 0),
    "remax": (ratio_times_a, "token", 0),
    "distillation": (ratio_times_a, "token", 0),
    "gspo_token": (gspo_token, "sequence", 5, GENTLE),
    "dual_clip": (bounded(3.0), "sequence", 6),
    "two_sided": (bounded(4.0), "sequence", 5),
    "dppo_tv": (dppo(total_variation, 0.15), "sequence", 2),
    "dppo_kl": (dppo(binary_kl, 0.05), "sequence", 2),
    "vespo": (vespo, "token", 0),
    "off_policy_mask": (deepseek, "sequence", 4),
    "off_policy_mask falling": (deepseek, "sequence", 5, FALLING),
    "off_policy_mask slightly": (deepseek, "sequence", 3, SLIGHTLY),
    "kl_cov of rounding": (ratio_times_a, "token", 1, ROUNDING)}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name, double):
    """Counts of clipped tokens are by hand."""
    check(name.split()[0], *FORMULAS[name])


def test_cispo(double):
    """Without a lower bound, and with one; padding is not clipped."""
    def terms(low):
        return each(lambda r, n, o, a: max(min(r.item(), 5.0), low) * a * n)
    check("cispo", terms(0), "token", 1)                                # e^1.7
    check("cispo", terms(0.7), "token", 3, clip_low=0.3)                # e^-0.6, e^-0.5, too
    assert clipped_at("cispo", [9, 9, 9], [6, 6, 6], [1, 1, 0], ratio="sequence") == [1, 1, 0]


def test_luspo(double):
    """A row beyond each bound; tokens of all rows weigh the same."""
    check("luspo", luspo, "sum", 5, WIDER)
    assert grpo.token_weights(torch.ones(1, 3), "sequence", 1, 3, 8).tolist() == [[1, 1, 1]]


def clipped_at(name, new, old, adv, **changes):
    """Which tokens of a row are clipped; those without an advantage are padding of `cispo`."""
    cfg = grpo.make_config(algo=name, **changes)
    new, old, adv = (torch.tensor([x], dtype=torch.float32) for x in (new, old, adv))
    mask = adv != 0 if name == "cispo" else torch.ones_like(adv).bool()
    return grpo.surrogate(new, old, adv, mask, cfg)[1][0].tolist()


def logs(*x):
    return [math.log(p) for p in x]


RARER = logs(1e-8, 5e-9, 1e-8), logs(1e-3, 0.5, 6e-3), [-1, -1, -1]
BACK = logs(*[0.5, 0.3] * 3), logs(*[0.3, 0.5] * 3), [-1, 1, 1, -1, 0, 0]


@pytest.mark.parametrize("name, row, clipped", [
    ("gmpo", ([0.1], [0], [0]), [0]),               # without an advantage there is no clip
    ("dual_clip", (logs(6), [0], [0]), [0]),
    ("two_sided", (logs(8), [0], [0]), [0]),
    ("dppo_tv", RARER, [0, 1, 0]),                  # the third: 0.006 apart, 0.074 nats
    ("dppo_kl", RARER, [0, 1, 1]),
    ("dppo_tv", BACK, [0, 0, 1, 1, 0, 0]),          # the first two want back
    ("dppo_kl", BACK, [0, 0, 1, 1, 0, 0]),
    ("dppo_tv", ([-200], [-150], [-1]), [0]),       # 0 in float32, and now less
    ("dppo_kl", ([-200], [-150], [-1]), [0])])
def test_clips_at_the_edge(name, row, clipped):
    assert clipped_at(name, *row) == clipped


def covariances():
    """Of each token: its advantage and log-probability less their means, multiplied."""
    adv = [a for a, n in zip(A, LENGTHS) for _ in range(n)]
    logp = [o + x for both in zip(OLD, LOG_RATIO) for o, x in zip(*both)]
    means = statistics.mean(adv), statistics.mean(logp)
    return [(a - means[0]) * (x - means[1]) for a, x in zip(adv, logp)]


def test_clip_cov(double, monkeypatch):
    """With a range that holds one token that PPO does not clip, and with one that holds none."""
    cov = covariances()
    far = [a > 0 and x > math.log(2) for a, row in zip(A, LOG_RATIO) for x in row]
    pick = max((i for i, on in enumerate(far) if not on), key=lambda i: cov[i])
    for low, high, held in ((cov[pick] - 1e-6, cov[pick] + 1e-6, pick), (100, 101, None)):
        with_constants(monkeypatch, "clip_cov", LOW=low, HIGH=high)
        place = itertools.count()
        terms = each(lambda r, n, o, a: 0 * r if next(place) == held else ppo(r, a, 1, 1))
        check("clip_cov", terms, "token", sum(far) + (held is not None))


def test_clip_cov_draws_a_share_of_all_tokens(monkeypatch):
    """Among those that PPO does not clip; the same ones again, whatever else has drawn."""
    with_constants(monkeypatch, "clip_cov", LOW=-100, HIGH=100, SHARE=0.3)
    cfg, (old, mask) = grpo.make_config(algo="clip_cov"), tensors(OLD)
    adv, first = torch.tensor(A)[:, None] * mask, []
    for far in (1, 4):
        moved, held = far * tensors(LOG_RATIO)[0], []
        clipped = (adv > 0) & (moved > math.log(2))
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            gain, found = grpo.surrogate(old + moved, old, adv, mask, cfg)
            held.append(found & (gain == 0) & mask)
            assert (found == clipped | held[-1]).all() and not (clipped & held[-1]).any()
        assert clipped.any() and held[0].sum() == 3             # of 10 tokens
        assert torch.equal(held[0], held[1]) and torch.equal(held[0], held[2])
        free = held[0][mask & ~clipped].tolist()
        first.append(free == sorted(free, reverse=True))
    assert first != [True, True]        # they are not just the first ones


@pytest.mark.parametrize("share, n", [(0.002, 1), (0.3, 3)])
def test_kl_cov(share, n, double, monkeypatch):
    with_constants(monkeypatch, "kl_cov", SHARE=share, COEFFICIENT=1.5)
    cov, place = covariances(), itertools.count()
    held = sorted(range(len(cov)), key=lambda i: -cov[i])[:n]
    check("kl_cov", each(lambda r, new, o, a: r * a - 1.5 * abs(new - o) * (next(place) in held)),
          "token", n)
    nothing = torch.zeros(0, 3)         # what a rank may have in an epoch's last micro-batch
    cfg = grpo.make_config(algo="kl_cov")
    assert grpo.surrogate(*[nothing] * 3, nothing.bool(), cfg)[0].shape == (0, 3)


def test_vespo_far_away():
    """Rows that have moved by more than float32 has."""
    old, mask = torch.full((2, 60), -30.0), torch.ones(2, 60, dtype=torch.bool)
    far = torch.tensor([[19.0], [-19.0]])
    cfg = grpo.make_config(algo="vespo")
    gain, _ = grpo.surrogate(old + far, old, mask.float(), mask, cfg)
    assert gain.isfinite().all() and gain.abs().max() < 1e-9


@pytest.mark.parametrize("name", "cispo clip_cov dppo_kl dual_clip gmpo gspo_token kl_cov luspo "
                                 "off_policy_mask sapo two_sided vespo".split())
def test_a_row_without_tokens_is_no_loss(name):
    """As `overlong_filter` leaves them where a file builds on it: no 0 / 0."""
    cfg, (old, mask) = grpo.make_config(algo=name, group=2, max_new=8), tensors(OLD)
    mask[1] = False
    adv, logp = torch.tensor(A)[:, None] * mask, ((old + 0.1) * mask).requires_grad_()
    gain, _ = grpo.surrogate(logp, old * mask, adv, mask, cfg)
    (gain * grpo.token_weights(mask.double(), cfg.loss_mean, 4, 9, 8)).sum().backward()
    assert gain.isfinite().all() and logp.grad.isfinite().all()
    assert not logp.grad[1].any() and logp.grad[3].any()


CONSTANTS = dict(
    clip_cov=dict(SHARE=2e-4, LOW=1, HIGH=5), kl_cov=dict(SHARE=2e-3, COEFFICIENT=1),
    soft_overlong=dict(BUFFER=0.2, FACTOR=0.5), moving_reference=dict(RATE=0.01),
    periodic_reference=dict(EVERY=25), pass_at_k=dict(K=4), dppo_tv=dict(DELTA=0.15),
    dppo_kl=dict(DELTA=0.05), entropy_tokens=dict(SHARE=0.2), dynamic_sampling=dict(TRIES=3))
SETTINGS = dict(
    dapo=dict(clip_high=0.28, loss_mean="token"), lite_ppo=dict(loss_mean="token"),
    entropy_tokens=dict(clip_high=0.28, loss_mean="token", micro_tokens=2048),
    off_policy_mask=dict(estimator="ratio*k3"), vineppo=dict(loss_mean="token"))
KL = dict(adaptive_kl="reward", moving_reference="loss", off_policy_mask="loss",
          periodic_reference="loss", two_sided="loss")


@pytest.mark.parametrize("name", KNOWN)
def test_constants_and_settings_of_the_papers(name):
    """Where no formula here sees them; a KL is only where the paper has one."""
    found = vars(module_of(name))
    assert found.items() >= CONSTANTS.get(name, {}).items()
    want = SETTINGS.get(name, {}) | dict(kl=KL.get(name, "none"))
    assert found["SETTINGS"].items() >= want.items()
    replaced = {function for function, names in REPLACED.items() if name in names.split()}
    assert {*config.REPLACED} == replaced           # one that is only defined would not be missed
    assert grpo.make_config(algo=name, task="sums").needs_reference is (name in KL)


# ------------------------------------------------------------------------------------- credit

def agent_for(name, **changes):
    """An Agent of groups of two, and the module."""
    cfg = grpo.make_config(algo=name, **dict(group=2) | changes)
    return agent_of(cfg), sys.modules[f"experiments.variants.{name}"]


def scores(name, rewards, group):
    """A variant's score of each completion, (B,), for rewards at the ends of rows of 1 to 3
    tokens; it is 0 elsewhere. And which groups are dead."""
    ends = torch.zeros(len(rewards), 5, dtype=torch.bool)
    ends[range(len(rewards)), [1 + i % 3 for i in range(len(rewards))]] = True
    r, cfg = ends * torch.tensor(rewards)[:, None], grpo.make_config(algo=name, group=group)
    score, dead = module_of(name).group_scores(r, ends, cfg)
    assert score.shape == ends.shape and (score[~ends] == 0).all()
    return score[ends].tolist(), dead.tolist()


@pytest.mark.parametrize("right", range(9))
def test_pass_at_k_is_the_z_score_over_all_subsets(right):
    """Of pass@4 over the 70 subsets of 4 of 8; a completion has the mean over its own."""
    rewards, subsets = [1.0] * right + [0.0] * (8 - right), [*itertools.combinations(range(8), 4)]
    value = [max(rewards[i] for i in subset) for subset in subsets]
    mean, std = statistics.mean(value), statistics.pstdev(value)
    score, dead = scores("pass_at_k", rewards, 8)
    for i in range(8):
        own = statistics.mean(v for v, subset in zip(value, subsets) if i in subset)
        assert score[i] == pytest.approx((own - mean) / std if std else 0, abs=1e-6)
    a_little = scores("pass_at_k", [x + 0.1 * (i % 2) for i, x in enumerate(rewards)], 8)
    assert dead == [std == 0] and a_little == (score, dead)         # makes none right


STD = statistics.pstdev([1, 0, 5, 1, 2, 2])


@pytest.mark.parametrize("name, group, rewards, wanted, dead", [
    ("maxrl", 4, [1, 0, 0, 0] + [0] * 4 + [1] * 4, [3, -1, -1, -1] + [0] * 8, [0, 1, 1]),
    ("lite_ppo", 2, [1, 0, 5, 1, 2, 2], [x / STD for x in (0.5, -0.5, 2, -2, 0, 0)], [0, 0, 1]),
    ("lite_ppo", 2, [1] * 4, [0] * 4, [1, 1])])
def test_scores_by_hand(name, group, rewards, wanted, dead):
    score, its_dead = scores(name, [float(x) for x in rewards], group)
    assert score == pytest.approx(wanted) and its_dead == dead


def density(q, x, y):
    """Of Beta(x, y)."""
    scale = math.gamma(x + y) / math.gamma(x) / math.gamma(y)
    return scale * q ** (x - 1) * (1 - q) ** (y - 1)


def test_beta_norm():
    """With moments by hand; means of groups at 0 and 1, or all near 0, have bounds."""
    rewards = [1.0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0]
    p = [0.75, 0.25, 0.5, 0.0]
    mean = statistics.mean(p)
    size = mean * (1 - mean) / statistics.pvariance(p) - 1
    a, b = mean * size, (1 - mean) * size
    score, dead = scores("beta_norm", rewards, 4)
    want = [(r - q) / density(q, 1 + a / 3, 1 + b / 3) if q else 0
            for r, q in zip(rewards, [q for q in p for _ in range(4)])]
    assert score == pytest.approx(want, rel=1e-5) and dead == [False, False, False, True]
    apart, _ = scores("beta_norm", [1.0, 1, 0, 0, 1, 0], 2)            # a + b is 0.5
    half = 0.5 / density(0.5, 1 + 0.25 / 3, 1 + 0.25 / 3)
    assert apart == pytest.approx([0] * 4 + [half, -half])
    near = [scores("beta_norm", [1.0, 0, 1, 0, x, 0], 2)[0][4] for x in (1e-3, 1e-5, 1e-7)]
    assert near[1] == pytest.approx(near[0] / 100, rel=0.1) and near[2] < near[1] / 90


@pytest.mark.parametrize("name, rewards, says", [
    ("beta_norm", [1.0, 2.0], "is 2.*0 to 1"), ("beta_norm", [-0.5, 1.0], "is -0.5.*0 to 1"),
    ("maxrl", [-1.0, 1.0], "is -1.*negative"), ("pass_at_k", [1.0, 1.0], "more than K, 4")])
def test_rewards_for_which_a_variant_is_not_meant(name, rewards, says):
    with pytest.raises(UserError, match=f"{name}: .*{says}"):
        scores(name, rewards, 2)


def rolled(reward, adv, components=None, finished=(True, True, True, False)):
    """A rollout of four rows, two groups."""
    mask = tensors(OLD)[1]
    last = mask & ~mask.roll(-1, 1)
    return batch_of(mask, finished=torch.tensor(finished), problems=[*"aabb"], texts=[*"wxyz"],
                    components=components or {}, adv=torch.tensor(adv)[:, None] * mask,
                    reward=torch.where(last, torch.tensor(reward)[:, None], 0))


def assert_advantages(batch, wanted, whitened=False):
    """One of each row or token, 0 elsewhere; or those less their mean, over their std."""
    tokens = sum(([x] * n if isinstance(x, (int, float)) else x
                  for x, n in zip(wanted, batch.mask.sum(1).tolist())), [])
    if whitened:
        mean, std = statistics.mean(tokens), statistics.pstdev(tokens)
        tokens = [(x - mean) / std for x in tokens]
    assert batch.adv[batch.mask].tolist() == pytest.approx(tokens)
    assert not batch.adv[~batch.mask].any()


def test_opo():
    """By hand: (3 * 1 + 1 * 0) / 4, and dead; with a penalty that all rows have alike."""
    batch = rolled([1.0, 0.0, 2.0, 2.0], [0.0] * 4)
    mask, cfg = batch.mask, grpo.make_config(algo="opo", group=2)
    penalty = 0.5 * mask / mask.sum(1, True)
    batch.adv, _, dead = grpo.advantages(batch.reward, batch.ends, mask, penalty, None, cfg)
    assert dead.tolist() == [False, True]
    assert_advantages(batch, [0.25, -0.75, 0, 0])


@pytest.mark.parametrize("rows, wanted", [(6, [1.5, -1.5, 0, 0, 0, 0]), (4, [1, -1, 0, 0])])
def test_gpg_makes_up_for_dead_groups(rows, wanted):
    """One of three, or of two, is live; where none is, nothing is multiplied."""
    cfg, mask = grpo.make_config(algo="gpg", group=2), torch.ones(rows, 2).bool()
    reward, zero = torch.zeros(rows, 2), torch.zeros(rows, 2)
    ends = torch.tensor([[False, True]] * rows)
    reward[0, 1] = 1
    adv, _, dead = grpo.advantages(reward, ends, mask, zero, None, cfg)
    assert dead.tolist() == [False] + [True] * (rows // 2 - 1)
    assert adv[:, 0].tolist() == wanted
    assert not grpo.advantages(zero, ends, mask, zero, None, cfg)[0].any()


def test_gdpo(monkeypatch):
    """Each part has a z-score of its own, which is 1 or -1 in a pair; their sum is whitened."""
    parts = {"correct": torch.tensor([1.0, 0, 1, 0]), "format": torch.tensor([9.0, 0, 1, 1])}
    (agent, module), batch = agent_for("gdpo"), rolled([1.0] * 4, [0.0] * 4, parts)
    monkeypatch.setattr(module, "of_the_sum", lambda *given: (batch, {"x": 1}))
    batch, stats = grpo.rollout(agent, [], None)
    assert_advantages(batch, [1 + 1, -1 - 1, 1 + 0, -1 + 0], whitened=True)
    assert stats == {"x": 1}
    with pytest.raises(UserError, match="not take --kl reward"):
        grpo.rollout(agent_for("gdpo", kl="reward")[0], [], None)


@pytest.mark.parametrize("ref, critic", [(None, None), ("a model", None), (None, "a model")])
def test_overlong_filter(ref, critic, monkeypatch):
    """A row that was cut off is in no loss, with a KL or a critic neither; logs have it."""
    (agent, module), seen = agent_for("overlong_filter"), []
    agent.ref, agent.critic, batch = ref, critic, rolled([1.0] * 4, [1.0, 0, 1, 1])
    monkeypatch.setattr(module, "of_all", lambda agent, batch, rng: seen.append(batch.mask))
    before = batch.mask.clone()
    grpo.update(agent, batch, None)
    assert torch.equal(seen[0][:3], before[:3]) and not seen[0][3].any()
    assert torch.equal(batch.mask, before)
    assert grpo.has_gradient(agent, batch).tolist() == [True, bool(ref or critic), True, False]


@pytest.mark.slow
def test_a_step_in_which_all_completions_are_cut_off(monkeypatch):
    """No row is left: no loss, no KL, no change."""
    agent, _ = of_letters("overlong_filter", kl="loss")
    before, generate = copy.deepcopy(agent.policy), grpo.generate

    def cut_off(*given):
        batch = generate(*given)
        return replace(batch, finished=batch.finished & False)
    monkeypatch.setattr(grpo, "generate", cut_off)
    _, stats = grpo.train_step(agent, letters.PROBLEMS, 1)
    assert [stats[name] for name in ("loss", "kl", "clip_share", "grad_norm")] == [0] * 4
    assert all(map(torch.equal, agent.policy.parameters(), before.parameters()))


@pytest.mark.parametrize("name, weight", [("tis", 2.0), ("mis", 0.0)])
def test_a_weight_that_overflows(name, weight, monkeypatch):
    module, batch = module_of(name), rolled([1.0] * 4, [1.0] * 4)
    batch.old_logp, batch.logp = torch.zeros(4, 6), torch.where(batch.mask, -900.0, 0)
    monkeypatch.setattr(module, "unweighted", lambda agent, batch, *more: batch.adv)
    assert torch.equal(grpo.total_loss(None, batch, None, None), batch.mask * weight)


def test_soft_overlong(monkeypatch):
    """Of at most 4 tokens with a buffer of 2: 1 of 2 too many costs a quarter."""
    with_constants(monkeypatch, "soft_overlong", BUFFER=0.5)
    agent, module = agent_for("soft_overlong", max_new=4, adv_scale="none")
    batch = rolled([1.0, 0.0, 1.0, 0.5], [0.0] * 4)
    given = batch.reward, batch.ends, batch.mask, 0 * batch.adv, None, agent.cfg
    batch.adv, *_ = grpo.advantages(*given)
    assert_advantages(batch, [0.375, -0.375, 0.0, 0.0])         # 0.75 and 0; 0.5 and 0.5
    of_task = batch, {"reward": 0.625, "length": 2.5}
    monkeypatch.setattr(module, "of_task", lambda *given: of_task)
    logged, stats = grpo.rollout(agent, [], None)
    assert logged.reward.sum(1).tolist() == [0.75, 0.0, 0.5, 0.5]
    assert stats == {"reward": 0.4375, "length": 2.5}


def test_dapo_punishes_each_rollout_of_a_step():
    """Those of dynamic sampling are punished one at a time: statistics are means over all."""
    module_of("dapo")
    of_step, of_one = (sys.modules[f"experiments.variants.{name}"]
                       for name in ("dynamic_sampling", "soft_overlong"))
    assert grpo.rollout is of_step.rollout and of_step.one_rollout is of_one.rollout
    assert grpo.advantages is of_one.advantages


def test_the_tokens_with_the_highest_entropy(monkeypatch):
    """Of a micro-batch, by the present policy's whole distribution, a row at a time."""
    cfg = grpo.make_config(algo="entropy_tokens", temperature=1.3)
    module, batch, chosen = module_of("entropy_tokens"), rolled([1.0] * 4, [1.0, 1, -1, 0]), []
    batch.ids = torch.randint(0, 200, (4, 6), generator=torch.Generator().manual_seed(0))
    before = batch.adv.clone()
    monkeypatch.setattr(module, "of_all_tokens", lambda agent, batch, *more: (batch.adv, *more))
    for policy in (tiny_model(0, 3.0), tiny_model(1, 3.0)):     # and after an update
        entropy = torch.full((4, 6), -1.0)
        for i, t in batch.mask.nonzero().tolist():
            h = policy(batch.ids[i, None, :t])[0, -1]
            p = (h @ policy.embed_tokens.weight.T / 1.3).softmax(-1)
            entropy[i, t] = -(p * p.log()).sum().item()
        kept = entropy >= entropy[batch.mask].sort().values[-2]         # 2 of 10
        adv, *more = grpo.total_loss(agent_of(cfg, policy=policy), batch, "weight", 10)
        assert torch.equal(adv, torch.where(kept, before, 0)) and more == ["weight", 10]
        assert torch.equal(batch.adv, before)
        chosen.append(kept)
    assert not torch.equal(*chosen)
    nothing = replace(batch, mask=batch.mask & False)
    assert grpo.total_loss(agent_of(cfg, policy=policy), nothing, 0, 0)[0] is batch.adv


@pytest.mark.parametrize("name", ["kl_cov", "entropy_tokens"])
def test_rows_without_an_advantage_count_in_a_share(name):
    """In a step's first update their loss is 0, and other algorithms leave them out."""
    cfg, policy = grpo.make_config(algo=name, group=2, epochs=2), tiny_model()
    batch, agent = rolled([1.0] * 4, [1.0, -1.0, 0.0, 0.0]), agent_of(cfg, policy=policy)
    batch.old_logp = token_logps(policy, batch.ids, batch.mask, 1.0)[0].detach()
    usual = passes.has_gradient(agent, batch, grpo.total_loss)
    assert usual.tolist() == [True, True, False, False]
    assert grpo.has_gradient(agent, batch).tolist() == [True] * 4


def test_remax(monkeypatch):
    """The baseline is the greedy completion's reward, with that of one that was cut off."""
    batch = rolled([1.0, 0.25, 0.5, 1.0], [1.0, 0.25, 0.4, 1.0])    # the third has a KL of 0.1

    def generate(agent, problems, group, rng=None):
        assert (problems, group, rng) == (["a", "b"], 1, None)
        parts = {"correct": torch.tensor([0.0, 1.0]), "format": torch.tensor([0.25, 1.0])}
        return batch_of(batch.mask[:2], finished=torch.tensor([True, False]), components=parts)
    agent, module = agent_for("remax")
    monkeypatch.setattr(module, "of_samples", lambda *given: (batch, {}))
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(grpo.reward, "TRUNCATED_REWARD", 0.5)
    got, _ = grpo.rollout(agent, ["a", "b"], random.Random(0))
    assert_advantages(got, [0.75, 0, -0.1, 0.5])


def test_distillation(start, tmp_path, monkeypatch):
    """An advantage is log pi_teacher - log pi_student, of whole rows a token at a time."""
    other = pretrained.load(start)
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight.mul_(3)
    pretrained.save(other, tmp_path, byte_encoding().files)
    with_constants(monkeypatch, "distillation", TEACHER=str(tmp_path))
    cfg = small(algo="distillation", init=start, temperature=1.3)
    agent = grpo.new_agent(cfg, arithmetic, *pretrained.trained_model(cfg))
    problems = arithmetic.problems(difficulty=1)[0][:3]
    batch, stats = grpo.rollout(agent, problems, random.Random(0))
    assert len({*batch.mask.sum(1).tolist()}) > 1
    assert "reward" in stats and "dead_groups" not in stats
    for i, t in batch.mask.nonzero().tolist():
        row, logp = batch.ids[i], []
        for gpt in (agent.policy, other):
            logits = gpt.head(gpt(row[None, :t])[0, -1]).double() / 1.3
            logp.append(logits.log_softmax(-1)[row[t]].item())
        assert batch.adv[i, t].item() == pytest.approx(logp[1] - logp[0], abs=2e-4)
    assert batch.adv.abs().max() > 0.1 and not batch.adv[~batch.mask].any()


@pytest.mark.parametrize("other", [dict(special={"<|end|>": 256}),
                                   dict(ranks={bytes([255 - i]): i for i in range(256)})])
def test_a_teacher_with_another_tokenizer_is_refused(other, start, monkeypatch):
    """Another special token, or another order."""
    with_constants(monkeypatch, "distillation", TEACHER=start)
    cfg, given = small(algo="distillation", init=start), dict(special={"<|endoftext|>": 256})
    given |= dict(ranks={bytes([i]): i for i in range(256)}) | other
    mine = type(byte_encoding())("mine", r"[\s\S]", stop=[256], files={}, **given)
    with pytest.raises(UserError, match=f"^{start}: .*tokenizer"):
        grpo.new_agent(cfg, arithmetic, mine, tiny_model())


# --------------------------------------------------------------------- sampling and references

LIVE = [[[1, 1]], [[1, 0], [0, 1]], [[0, 0], [1, 0], [0, 0]], [[0, 0]] * 3]


@pytest.mark.parametrize("live, ranks", [*((x, 1) for x in LIVE), ([[1, 1], [0, 1]], 2)])
def test_dynamic_sampling(live, ranks, monkeypatch):
    """Until two groups are live, three times at most; live ones first. Of two ranks each has
    two groups of its own; the other one needs two rollouts."""
    (agent, module), made = agent_for("dynamic_sampling"), []

    def one_rollout(agent, problems, rng):
        n, groups = len(made), live[len(made)]
        parts = {"correct": torch.tensor([float(groups[i // 2] * (i % 2)) for i in range(4)])}
        batch = rolled([1.0] * 4, [float(groups[i // 2]) for i in range(4)], parts)
        wide = passes.joined([batch, batch_of(torch.ones(1, 6 + n).bool(), components=parts)],
                             torch.arange(4))
        made.append((problems, replace(wide, texts=[f"{n}{i}" for i in range(4)])))
        return made[-1][1], {"reward": float(n)}

    def one_step(agent, problems, step):
        batch, stats = module.rollout(agent, [*"pqrs"[:2 * ranks]], random.Random(0))
        return batch, stats | {"rollout_tok_s": float(batch.mask.sum())}        # in a second
    monkeypatch.setattr(module, "one_rollout", one_rollout)
    monkeypatch.setattr(module, "one_step", one_step)
    monkeypatch.setattr(dist, "ranks", lambda: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda x: x + (ranks == 2 and len(made) < 2))
    batch, stats = module.train_step(agent, [*"pqrstuvwxyzaefgh"], 1)
    asked = sum((problems for problems, _ in made), [])
    assert len(made) == len(live) and len({*asked}) == len(asked) == 2 * ranks * len(live)
    groups = [(n, g) for n, found in enumerate(live) for g in range(2)]
    first = sorted(groups, key=lambda x: not live[x[0]][x[1]])[:2]
    assert batch.texts == [f"{n}{2 * g + i}" for n, g in first for i in range(2)]
    on = [made[n][1].mask[2 * g + i] for n, g in first for i in range(2)]
    assert [row.sum() for row in batch.mask] == [row.sum() for row in on]
    assert batch.adv.any(1).tolist() == [live[n][g] for n, g in first for _ in range(2)]
    sampled = sum(batch.mask.sum().item() for _, batch in made)         # in all rollouts
    assert ranks == 2 or stats["rollout_tok_s"] == pytest.approx(sampled)
    assert stats["reward"] == (len(live) - 1) / 2 and {*stats} == {"reward", "rollout_tok_s"}


def test_dynamic_sampling_ends_with_the_problems(monkeypatch):
    """Here five of the same text."""
    (agent, module), made = agent_for("dynamic_sampling"), []

    def one_rollout(agent, problems, rng):
        made.append([*map(id, problems)])
        return rolled([1.0] * 4, [0.0] * 4, {"correct": torch.ones(4)}), {}
    monkeypatch.setattr(module, "one_rollout", one_rollout)
    problems = [SimpleNamespace(prompt="2+2=") for _ in range(5)]
    agent.others = problems
    batch, _ = module.rollout(agent, problems[:2], random.Random(0))
    assert len(made) == 2 and {*made[1]} <= {*map(id, problems[2:])} and len(batch.ids) == 4


def test_dynamic_sampling_whitens_what_is_kept(monkeypatch):
    """The tokens that train have mean 0 and std 1, and dropped groups no part in it."""
    agent, module = of_letters("dynamic_sampling", adv_scale="batch", baseline="none", group=2)
    real, made = module.one_rollout, []
    monkeypatch.setattr(module, "one_rollout", lambda *given: made.append(1) or real(*given))
    batch, _ = grpo.train_step(agent, letters.PROBLEMS, 1)
    total = batch.reward.sum(1, keepdim=True).expand_as(batch.mask)[batch.mask]
    want = (total - total.mean()) / total.std(correction=0)
    torch.testing.assert_close(batch.adv[batch.mask], want, rtol=1e-5, atol=1e-5)
    assert len(made) > 1 and total.std() > 0


def test_a_moving_reference_in_bfloat16(monkeypatch):
    """Each tensor moves, by less than bfloat16 can tell; the head too, tied in the policy."""
    module, policy = module_of("moving_reference"), tiny_model(1).float()
    monkeypatch.setattr(module, "one_step", lambda *given: None)
    policy.amp = torch.bfloat16
    ref = pretrained.frozen(policy)
    before = {name: p.float().clone() for name, p in ref.named_parameters()}
    with torch.no_grad():
        for p in policy.parameters():
            p += 1e-4
    module.train_step(agent_of(grpo.make_config(), policy=policy, ref=ref), [], 1)
    new = dict(policy.named_parameters())
    for name, p in ref.named_parameters():
        want = before[name].lerp(new.get(name, new["embed_tokens.weight"]), 0.01)
        assert torch.equal(p, want) and not torch.equal(p, before[name])


# --------------------------------------------------------------------------------- in a run

TINY = dict(difficulty=1, n_layer=1, n_embd=32, warm_steps=25, warm_lr=1e-2, steps=2, prompts=3,
            group=4, max_new=16, samples=1, held_out=4, device="cpu", compile=False, lr=1e-3)


def small(**changes):
    """Settings of a run without a warm start."""
    return grpo.make_config(**TINY | dict(warm_steps=0) | changes)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model after its warm start."""
    where = tmp_path_factory.mktemp("start")
    grpo.train(small(warm_steps=25, steps=0, out=str(where / "run")))
    return str(where / "run" / "warm_start")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_each_runs_for_two_steps(name, start, tmp_path, monkeypatch):
    """With two updates of a rollout, in bfloat16; some completions are cut off."""
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {
        "correct": float(sum(map(ord, text)) % 2),
        "size": 0.0 if name == "beta_norm" else len(text) / 50})
    with_constants(monkeypatch, "pass_at_k", K=2)         # of 4
    with_constants(monkeypatch, "distillation", TEACHER=start)
    config.algorithm("grpo", grpo.ALGOS, grpo)
    before, module = vars(grpo).copy(), module_of(name)
    given = dict(algo=name, init=start, epochs=2, minibatches=2, max_new=9, dtype="bfloat16",
                 out=str(tmp_path))
    cfg = small(**given)
    grpo.train(cfg)
    assert {x for x in before if vars(grpo)[x] is not before[x]} == {*config.REPLACED}
    first, *metrics = records(tmp_path / "metrics.jsonl")
    assert len(metrics) == 2 and all(0 < m["finished"] < 1 for m in metrics)
    assert all(math.isfinite(x) for m in metrics for x in m.values())
    assert metrics[0]["grad_norm"] > 0
    assert (tmp_path / "functions.py").read_text() == config.file_of(name).read_text()
    assert (module.SETTINGS | given).items() <= vars(cfg).items()
    config.algorithm("grpo", grpo.ALGOS, grpo)
    assert vars(grpo) == before


OTHERS = dict(baseline="leave-one-out", adv_scale="batch", loss_mean="constant", clip_low=0.125,
              clip_high=0.125, ratio="sequence", supervision="process", reward="model",
              kl="watch", micro_tokens=1000)
CLIP = "clip_low clip_high"
IGNORED = dict(
    opo="baseline adv_scale", gdpo="baseline adv_scale supervision reward", luspo="loss_mean",
    remax="reward", gpg=f"{CLIP} ratio", raft=f"kl {CLIP} ratio", kl_cov=f"{CLIP} micro_tokens",
    distillation="baseline adv_scale kl supervision reward", clip_cov="micro_tokens",
    entropy_tokens="micro_tokens", vineppo="supervision reward baseline adv_scale",
    **dict.fromkeys("sapo vespo dppo_kl dppo_tv".split(), CLIP))


@pytest.mark.parametrize("name", KNOWN)
def test_settings_that_a_variant_would_ignore_are_refused(name, start, tmp_path, monkeypatch):
    """Before the run; with the values that they have anyway nothing is said."""
    with_constants(monkeypatch, "distillation", TEACHER=start)
    fixed = getattr(module_of(name), "FIXED", [])
    assert fixed == IGNORED.get(name, "").split()
    given = dict(init=start, steps=0, out=str(tmp_path / "run"), algo=name)
    usual = small(**given)
    given["adv_scale"] = usual.adv_scale
    others = OTHERS | dict(supervision="outcome") if name == "vineppo" else OTHERS
    for flag in fixed:
        with pytest.raises(UserError, match=f"{name} does not take --{flag} {others[flag]}$"):
            grpo.train(small(**given | {flag: others[flag]}))
    if fixed:
        grpo.train(small(**given | {flag: getattr(usual, flag) for flag in fixed}))
    config.algorithm("grpo", grpo.ALGOS, grpo)
    config.check_used(grpo.make_config(loss_mean="constant", clip_low=0.125))   # another file's


@pytest.mark.parametrize("given", [dict(supervision="process"), dict(baseline="leave-one-out"),
                                   dict(adv_scale="none")], ids=str)
def test_scores_of_outcomes_that_would_not_be_called(given, start, tmp_path):
    """Are refused, but not if the file's own `advantages` may call them."""
    given = given | dict(init=start, steps=0, out=str(tmp_path / "run"))
    with pytest.raises(UserError, match="maxrl: its scores are of outcomes: .*--adv_scale group"):
        grpo.train(small(**given, algo="maxrl"))
    path = algorithm_in(tmp_path, "own, scores = grpo.advantages, grpo.group_scores",
                        group_scores="return scores(*given)", advantages="return own(*given)")
    grpo.train(small(**given, algo=path))


@pytest.mark.parametrize("given", [dict(kl="watch"), dict(beta=0.0)], ids=str)
def test_beta_needs_a_kl_that_it_weighs(given, start, tmp_path):
    with pytest.raises(UserError, match="adaptive_kl adapts beta: .* --kl loss or reward"):
        grpo.train(small(algo="adaptive_kl", init=start, out=str(tmp_path), **given))


@pytest.mark.parametrize("kl, factor", [(0.05, 1), (0.055, 1.01), (1.0, 1.02), (0.0, 0.98)])
def test_beta_is_steered_to_the_target(kl, factor, monkeypatch):
    """By a tenth of the relative error, of which at most a fifth counts (Ziegler et al., 2.2)."""
    agent, module = agent_for("adaptive_kl")
    agent.beta = 0.5
    monkeypatch.setattr(module, "one_step", lambda *given: ("batch", {"kl": kl}))
    assert grpo.train_step(agent, [], 1) == ("batch", {"kl": kl})
    assert agent.beta == pytest.approx(0.5 * factor)


@pytest.mark.slow
def test_an_adapted_beta_is_resumed(start, tmp_path):
    """With the target far off, it falls by a fiftieth in each step."""
    grpo.train(small(init=start, algo="adaptive_kl", out=str(tmp_path), save_every=1))
    files.LOCK.close()
    grpo.main(["--resume", "--out", str(tmp_path), "--steps", "3"])
    logged = [m["beta"] for m in records(tmp_path / "metrics.jsonl")[1:]]
    saved = checkpoint.load(tmp_path, grpo.Config)[1].beta
    assert [*logged, saved] == pytest.approx([0.04 * 0.98 ** n for n in range(4)])


# --------------------------------------------------------------------- a file of one's own

def algorithm_in(folder, *lines, settings="", name="mine.py", **functions):
    """The path of a file with lines and functions, which replace those of grpo.py."""
    lines = ["import grpo", f"SETTINGS = dict({settings})", *lines]
    for function, body in functions.items():
        lines += [f"def {function}(*given):", f"    {body}", f"grpo.{function} = {function}"]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder / name)


def last_word(capsys, *args):
    """What a command ends with."""
    with pytest.raises(SystemExit):
        grpo.main([*map(str, args)])
    return capsys.readouterr().err


@pytest.mark.slow
def test_an_algorithm_of_ones_own(start, tmp_path, capsys):
    """Where the file lies, it is a path; a resume names it, and takes no other one."""
    out = tmp_path / "run"
    path = algorithm_in(tmp_path, "clipped = grpo.surrogate", settings="kl='none', lr=2e-3",
                        surrogate="return twice(*clipped(*given))")
    text = open(path).read() + "def twice(gain, which):\n    return 2 * gain, which\n"
    (tmp_path / "mine.py").write_text(text)
    tiny = TINY | dict(init=start, warm_steps=0, algo=path, out=out)
    del tiny["lr"]
    grpo.main(flags(tiny))
    cfg = checkpoint.load(out, grpo.Config)[0]
    assert (cfg.algo, cfg.lr, cfg.kl) == (path, 2e-3, "none")
    go_on = ["--resume", "--out", str(out), "--steps", "3"]
    grpo.main([*go_on[:3], "--algo", path, "--kl", "none"])         # nothing to do
    assert f"in the file {path}" in last_word(capsys, *go_on)
    assert f"{path}, not grpo" in last_word(capsys, *go_on, "--algo", "grpo")
    (tmp_path / "mine.py").write_text(text + "# changed\n")
    assert f"{path} has changed" in last_word(capsys, *go_on, "--algo", path)
    (tmp_path / "mine.py").write_text(text)
    grpo.main([*go_on, "--algo", path])
    assert checkpoint.load(out, grpo.Config)[1].step == 3
    (tmp_path / "mine.py").unlink()         # it is not needed for what follows
    grpo.main(["--eval_only", "--init", str(out), "--held_out", "4", "--samples", "1"])


def test_what_a_run_says_of_resuming_is_true(start, tmp_path, capsys):
    """Flags that differ from the file's settings are the run's own then, and no change."""
    path, out = tmp_path / "my algorithm.py", tmp_path / "a run"
    path.write_bytes(b"# -*- coding: latin-1 -*-  \xe9\n"
                     b"SETTINGS = dict(kl='none', steps=4, save_every=3)\n")
    grpo.main(flags(TINY | dict(algo=path, init=start, warm_steps=0, kl="loss", out=out)))
    cfg = checkpoint.load(out, grpo.Config)[0]
    assert (cfg.kl, cfg.steps) == ("loss", 2)
    assert (out / "functions.py").read_bytes() == path.read_bytes()
    program, name, *args = shlex.split(show.resume_command(cfg))

    def read(args):
        """The Config with which `main` goes on."""
        mode, given = config.read(grpo.Config, "", args)
        given, _ = checkpoint.settings(mode, given, grpo.Config)
        return grpo.make_config(**given)
    assert (program, name) == ("python", "grpo.py") and read(args) == cfg
    assert read([*args, "--steps", "3"]) == replace(cfg, steps=3)
    asked = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("ask it: ")[2])
    assert asked[asked.index("--init") + 1] == str(out)


@pytest.mark.parametrize("text, says", [
    ("def surrogate(): pass", "needs a dict named SETTINGS"),
    ("import grpo\nSETTINGS = {}\ngrpo.surogate = print", "no surogate to replace"),
    ("SETTINGS = dict(betta=0)", "did you mean --beta?"),
    ("SETTINGS = {\n", "was never closed"),
    ("SETTINGS = dict(kl='nothing')", "--kl must be one of")])
def test_files_that_are_no_algorithms(text, says, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(says)):
        grpo.make_config(algo=str(tmp_path / "bad.py"))
    assert not hasattr(grpo, "surogate")


@pytest.mark.parametrize("name, says", [
    ("none.py", "no file none.py"), ("CISPO", "did you mean cispo?"), ("", "there are grpo, "),
    ("zzz", "there are grpo, reinforce, "), ("no such", "there are "), (3, "no --algo 3: ")])
def test_names_of_no_algorithm(name, says):
    with pytest.raises(UserError, match=re.escape(says)):
        grpo.make_config(algo=name)


def test_an_evaluation_has_the_functions_of_its_algorithm(start, tmp_path, capsys):
    path = algorithm_in(tmp_path, "from dataclasses import dataclass", "@dataclass",
                        "class Share:", "    x: 'float'", ask="return 'mine'",
                        evaluate="return {'greedy': Share(0.125).x}")
    for mode, said in ((["--eval_only"], "greedy 12.5%\n"), (["--ask", "1*1="], "mine\n")):
        grpo.main([*mode, "--max_new", "4", "--init", start, "--algo", path])
        assert capsys.readouterr().out == said


def owner():
    """The module whose `surrogate` is in place."""
    return grpo.surrogate.__module__.rpartition(".")[2]


def test_a_run_has_its_own_functions_alone(start, tmp_path, monkeypatch):
    """Whatever settings were made after them; what else replaced a function stays."""
    cfg = small(algo="cispo", init=start, steps=0, out=str(tmp_path))
    grpo.make_config(algo="sapo")
    assert owner() == "sapo"
    grpo.train(cfg)
    assert owner() == "cispo"
    for first, second in (("cispo", "sapo"), ("luspo", "cispo")):       # a file builds on grpo.py
        grpo.make_config(algo=first)
        assert module_of("dual_clip").clipped_once.__module__ == "grpo"
        grpo.make_config(algo=second)
        assert owner() == second
    grpo.make_config()
    assert owner() == "grpo"
    monkeypatch.setattr(grpo, "surrogate", print)
    grpo.make_config(algo="luspo")
    grpo.make_config()
    assert grpo.surrogate is print


def test_a_file_that_changed_or_fails(tmp_path):
    """It is read again, as what it imports is; what it replaced before it failed is put back."""
    line = "from experiments.variants import luspo"
    for n in (1, 22, 333):
        path = algorithm_in(tmp_path, line, settings=f"steps={n}", surrogate=f"return {n}")
        assert grpo.make_config(algo=path).steps == n == grpo.surrogate()
        assert grpo.token_weights.__module__ == "experiments.variants.luspo"
    path = algorithm_in(tmp_path, "grpo.surrogate = print", "1 / 0")
    with pytest.raises(ZeroDivisionError):
        grpo.make_config(algo=path)
    grpo.make_config()
    assert owner() == "grpo"


@pytest.mark.slow
def test_the_command_line_itself_may_be_what_is_replaced(start, tmp_path):
    """As `python grpo.py`, where grpo.py is __main__: the file's `import grpo` is no second one."""
    path = algorithm_in(tmp_path, "own = grpo.surrogate", surrogate="print('mine'); "
                        "return own(*given)")
    given = TINY | dict(init=start, warm_steps=0, steps=1, algo=path, out=tmp_path / "run")
    command = [sys.executable, ROOT / "grpo.py", *flags(given)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "mine\n" in done.stdout, done.stderr


# -------------------------------------------------------- other rows than those just sampled

def of_letters(name, **changes):
    """An Agent for the task of test_oracle.py, with one update a step; and the module."""
    given = letters.SMALL | dict(algo=name, epochs=1, minibatches=1) | changes
    agent = letters.new_agent(grpo.make_config(**given))
    return agent, module_of(name)


def judged_by(monkeypatch, module, name, plan):
    """Of the rows that a file's own name for `collect` gives, the plan says which are right."""
    real, plan, made = getattr(module, name), iter(plan), []

    def collect(*given):
        batch = real(*given)
        batch.components["correct"] = torch.tensor(next(plan), dtype=torch.float32)
        made.append(batch)
        return batch
    monkeypatch.setattr(module, name, collect)
    return made


def assert_begun(batch, row, start, ids):
    """A completion begins with given ids, which are judged, but not trained on."""
    n, sampled = len(ids), batch.mask[row].nonzero()[:, 0].tolist()
    assert batch.start[row] == start and batch.ids[row, start:start + n].tolist() == ids
    assert sampled and sampled == [*range(start + n, start + n + len(sampled))]
    assert batch.judged[row].nonzero()[:, 0].tolist() == [*range(start, start + n), *sampled]
    said = batch.ids[row, batch.judged[row]].tolist()
    assert batch.texts[row] == b"".join(map(letters.ENCODING.token_bytes, said)).decode()
    assert_judged(batch, row)
    assert len(said) <= letters.SMALL["max_new"]


def assert_judged(batch, row):
    right = letters.rule(batch.problems[row], batch.texts[row])["correct"]
    assert batch.components["correct"][row] == right * batch.finished[row].item()


def assert_the_trainers(agent, batch):
    logp, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
    torch.testing.assert_close(logp, batch.logp, rtol=0, atol=2e-5)


@torch.no_grad()
def test_tree():
    """Groups of five: three trunks, and a branch of each of the first two."""
    agent, _ = of_letters("tree", group=5, prompts=4)
    batch, kept, differ = grpo.collect(agent, letters.PROBLEMS[:4], random.Random(0)), [], []
    assert len(batch.ids) == 20
    for row, problem in enumerate([p for p in letters.PROBLEMS[:4] for _ in range(5)]):
        prompt = letters.ENCODING.encode_prompt(problem.prompt)
        trunk, begin = row - 3 if row % 5 > 2 else row, len(prompt)
        n = (batch.judged[row] & ~batch.mask[row]).sum().item()
        assert batch.ids[row, :begin].tolist() == prompt and (n == 0 or trunk < row)
        assert_begun(batch, row, begin, batch.ids[trunk, begin:begin + n].tolist())
        if trunk < row:
            assert n < batch.mask[trunk].sum()
            kept.append(n)
            differ.append(n > 0 and not torch.equal(batch.ids[row], batch.ids[trunk]))
    assert len({*kept}) > 2 and any(differ)
    assert_the_trainers(agent, batch)


def test_replay(monkeypatch):
    """Four steps with the same two prompts. In the first one nothing is known of the second,
    which is dead; in the second the first is; in the last both are, after a newer right row."""
    agent, module = of_letters("replay", group=3)
    a, b = letters.PROBLEMS[0], letters.PROBLEMS[2]
    plan = [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1], [0] * 6]
    made, batches = judged_by(monkeypatch, module, "present", plan), []
    for problems in ((a, b), (b, a), (a, b), (b, a)):
        batches.append(grpo.rollout(agent, list(problems), random.Random(len(made)))[0])
        letters.shaken(agent.policy, 0.3, len(made))
    prompts = {tuple(letters.ENCODING.encode_prompt(p.prompt)) for p in (a, b)}
    assert {*module.prompts(agent.state)} == prompts
    sources = {(1, 5): (0, 1), (3, 2): (2, 5), (3, 5): (2, 2)}      # step and row: of which it is
    for (step, batch), row in itertools.product(enumerate(batches), range(6)):
        old_step, old = sources.get((step, row), (step, row))
        source, on = made[old_step], batch.mask[row]
        for name in ("ids", "mask", "logp"):
            x, y = getattr(batch, name)[row].tolist(), getattr(source, name)[old].tolist()
            assert x[:len(y)] == y[:len(x)] and not any(x[len(y):] + y[len(x):]), name
        assert batch.on_policy[row] == (old_step == step)
        assert batch.finished[row] == source.finished[old]
        assert batch.texts[row] == source.texts[old]
        assert batch.problems[row] is source.problems[old]
        assert torch.equal(batch.old_logp[row][on], batch.logp[row][on])
        if old_step < step:
            assert_judged(batch, row)           # again, by the rule
    assert [batch.on_policy.all().item() for batch in batches] == [True, False, True, False]


@torch.no_grad()
def test_hints(monkeypatch):
    """Of two groups the second is dead. Half of a right text at first, and less with each step;
    none if none is right; one token is left at least."""
    agent, module = of_letters("hints", group=3, steps=4)
    problems, (wrong, right) = letters.PROBLEMS[:2], ["bbcdefgg", "abcdefgg"]
    made = judged_by(monkeypatch, module, "unaided", [[1, 0, 0, 0, 0, 0]] * 6)
    for step, shown, hint in ((1, [wrong, right], "abcd"), (2, [wrong, right], "abc"),
                              (4, [wrong, right], "a"), (4, [wrong], ""),
                              (1, [wrong, 2 * right + "a"], "abcde")):
        monkeypatch.setattr(letters.TASK, "demonstration", lambda problem, rng: rng.choice(shown))
        agent.step = step
        batch, want = grpo.collect(agent, problems, random.Random(step)), made[-1]
        for row in (3, 4, 5):
            assert_begun(batch, row, 1, letters.ENCODING.encode_prompt(hint))
        for row in (0, 1, 2):
            assert torch.equal(batch.ids[row][batch.mask[row]], want.ids[row][want.mask[row]])
        assert batch.components["correct"][:3].tolist() == [1, 0, 0]
        assert not torch.equal(batch.ids[3:, :4], want.ids[3:, :4])
        assert len({*batch.texts[3:]}) > 1
        assert_the_trainers(agent, batch)


def test_stale(monkeypatch):
    """Step k samples with the weights with which step k - 2 began, or those of the first one."""
    agent, _ = of_letters("stale", steps=4, group=4)
    began, update = [], grpo.update

    def updated(agent, *given):
        """From today's weights."""
        assert all(map(torch.equal, agent.sampler.parameters(), began[-1].parameters()))
        return update(agent, *given)
    monkeypatch.setattr(grpo, "update", updated)
    for step in (1, 2, 3, 4):
        began.append(copy.deepcopy(agent.policy))
        batch, stats = grpo.train_step(agent, letters.PROBLEMS, step)
        found = [token_logps(gpt, batch.ids, batch.mask, 1.0)[0] for gpt in began]
        near = [(logp - batch.logp).abs().max().item() < 2e-5 for logp in found]
        assert near == [i == max(0, step - 3) for i in range(step)]
        assert batch.old_logp is batch.logp and not batch.on_policy.any()
        assert stats["mismatch"] == 0 and stats["grad_norm"] > 0
        kept = {name.split("@")[1] for name in agent.state}
        assert kept == {str(i) for i in range(max(1, step - 2), step + 1)}


def test_vineppo(monkeypatch):
    """Two groups of two rows, of which the first and the third have two steps. The value after a
    last one is whether the row is right, whatever its label."""
    agent, module = agent_for("vineppo")
    batch = rolled([1.0] * 4, [0.0] * 4, {"correct": torch.tensor([1.0, 0, 1, 1])})
    batch.ends[0, 3] = batch.ends[2, 2] = True
    batch.mask[2, 3] = False                    # a token of a reply
    value = torch.full((4, 6), 0.125)
    value[0, 3], value[2, 2] = 0.25, 0.5
    agent.step = 7
    labels = {(grpo.completions, batch.texts[0], 2, "vineppo 7", 4): value}
    monkeypatch.setattr(module, "rollout_labels", lambda agent, function, batch, *given:
                        labels[function, batch.texts[0], *given])
    monkeypatch.setattr(module, "of_steps", lambda *given: (batch, {"x": 1}))
    got, stats = grpo.rollout(agent, [], None)
    half, quarter = 0.5, 0.25
    first, third = [quarter - half] * 2 + [1 - quarter], [half - 1] + [1 - half] * 2
    assert_advantages(got, [first, [0 - half], third, [0.0, 0.0]], whitened=True)
    assert stats == {"x": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_raft(ranks, monkeypatch):
    """Of four groups two earn something, one the same for all; of two ranks both are the first."""
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)
    agents = [of_letters("raft", prompts=4)[0] for _ in range(ranks)]
    before = copy.deepcopy(agents[0].policy)
    rewards = torch.tensor([[0.5, 1, 1], [-1, 0, 0], [0.5, 0.5, 0.5], [0, 0, 0]])

    def step(rank):
        agent = agents[rank]
        batch = grpo.rollout(agent, letters.PROBLEMS[:4], random.Random(0))[0]
        mine = rewards[rank::ranks].flatten()[:, None]
        batch.reward = torch.where(batch.ends, mine, 0)
        batch.adv = torch.where(batch.mask & (mine > 0.5), -7.0, 0)         # it does not matter
        agent.opt = torch.optim.SGD(agent.policy.parameters(), 1.0)
        grpo.update(agent, batch, random.Random(0))
        return batch
    batch = letters.on_ranks(ranks, step, monkeypatch)[0]
    rows = letters.rows_of(batch, agents[0])
    rows = [rows[i] for i in ([1, 6] if ranks == 1 else [1, 3])]
    logp = [sum(letters.logps(before, row, 1.0)) for row in rows]
    (-sum(logp) / sum(len(row.completion) for row in rows)).backward()
    for agent in agents:
        for p, q in zip(agent.policy.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(q - p, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", "hints raft replay stale tree vineppo".split())
def test_a_killed_run_goes_on_as_if_it_had_not_been(name, start, tmp_path, monkeypatch):
    """Weights, moments and a state of its own, to the byte: with problems that come again."""
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {
        "correct": float(sum(map(ord, text)) % 2)})
    problems, held_out = arithmetic.problems(difficulty=1)
    monkeypatch.setattr(arithmetic, "problems", lambda difficulty=1: (problems[:4], held_out))
    monkeypatch.setattr(grpo, "evaluate", lambda *given: {"greedy": 0.0})
    monkeypatch.setattr(report, "refresh", lambda folder: None)
    found, append = [], files.append

    def killed(path, record):
        """In the third step, once logged."""
        append(path, record)
        if record["step"] == 3:
            raise KeyboardInterrupt
    for kill in (False, True):
        out = tmp_path / str(kill)
        cfg = small(algo=name, init=start, max_new=8, steps=3, save_every=2, out=str(out))
        if kill:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(files, "append", killed)
                grpo.train(cfg)
            files.LOCK.close()
            cfg, saved = checkpoint.resume(out, grpo.Config, {})
        grpo.train(cfg, saved=saved if kill else None)
        found.append(load_file(out / "checkpoint.safetensors"))
        logged = records(out / "metrics.jsonl")
        assert len(logged) == 4 and logged[3]["grad_norm"] > 0
    whole, again = found
    assert any("state." in x for x in whole) == (name in ("replay", "stale"))
    assert whole.keys() == again.keys()
    assert all(map(torch.equal, whole.values(), (again[x] for x in whole)))
