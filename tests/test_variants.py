"""experiments/variants: each against its paper's formula, written anew a token at a time in float64, value and gradient, on
rows of unequal length; what an algorithm's file may hold, and what becomes of it in a run."""
import copy
import itertools
import json
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
import torch
import test_oracle as letters
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
    surrogate="cispo clip_cov dppo_kl dppo_tv dual_clip gmpo gpg kl_cov off_policy_mask raft sapo two_sided vespo",
    group_scores="beta_norm lite_ppo maxrl pass_at_k", advantages="dapo gpg opo soft_overlong", importance_ratio="gspo_token",
    rollout="dapo distillation dynamic_sampling gdpo mis remax soft_overlong tis vineppo", total_loss="entropy_tokens mis tis",
    token_weights="luspo",
    train_step="adaptive_kl dapo dynamic_sampling moving_reference periodic_reference", update="overlong_filter raft", collect="hints replay stale tree",
    has_gradient="entropy_tokens kl_cov overlong_filter", new_agent="distillation")
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


# ----------------------------------------------------------------------------------------- the loss

# Two groups of two rows. Ratios within all clips and beyond them at both sides, with advantages of both signs.
LENGTHS, A = [3, 1, 4, 2], [1.3, -0.7, 0.4, -1.1]
OLD = [[-1.2, -0.3, -2.0], [-0.9], [-0.1, -3.0, -0.7, -1.6], [-2.2, -1.9]]
LOG_RATIO = [[0.02, 0.5, -0.6], [1.2], [-0.3, 1.6, -0.05, 0.45], [1.7, -0.5]]
GENTLE = [[1e-4, 2e-3, -5e-4], [9e-4], [3e-4, 1e-4, 2e-4, -1e-3], [-1e-3, -1e-3]]       # for bounds of 3e-4


def tensors(table):
    """Rows as (B, T) tensors in float64 behind prompts of two tokens, and their mask."""
    T = 2 + max(LENGTHS)
    found, mask = torch.zeros(len(table), T, dtype=torch.float64), torch.zeros(len(table), T, dtype=torch.bool)
    for i, row in enumerate(table):
        found[i, 2:2 + len(row)], mask[i, 2:2 + len(row)] = torch.tensor(row, dtype=torch.float64), True
    return found, mask


def of_code(name, log_ratio, advantages=A, **changes):
    """Loss and gradient of a variant, by grpo.py; outside the mask it has no gain, and nothing that is clipped."""
    cfg = grpo.make_config(**dict(algo=name, group=2, max_new=8) | changes)
    old, mask = tensors(OLD)
    logp = (old + tensors(log_ratio)[0]).requires_grad_(True)
    adv = torch.tensor(advantages, dtype=torch.float64)[:, None] * mask
    weight = grpo.token_weights(mask.double(), cfg.loss_mean, len(OLD), sum(LENGTHS), cfg.max_new)
    batch = grpo.Batch(None, mask, None, None, None, old_logp=old, adv=adv)
    loss, stats = grpo.policy_loss(logp, batch, weight, sum(LENGTHS), cfg, 0.0)
    loss.backward()
    assert logp.grad[~mask].abs().sum() == 0
    gain, clipped = grpo.surrogate(logp, old, adv, mask, cfg)
    assert (gain[~mask] * weight[~mask] == 0).all() and not clipped[~mask].any()
    return loss.item(), [row[on].tolist() for row, on in zip(logp.grad, mask)], round(stats["clip_share"].item() * sum(LENGTHS))


def of_formula(objective, log_ratio, mean="sequence"):
    """Minus the mean of an objective of rows, and its gradient. `objective(new, old, A)` gives the terms of a row's tokens;
    their mean: over rows of the mean over a row, over all tokens, or over rows of the sum."""
    new = [[torch.tensor(o + x, dtype=torch.float64, requires_grad=True) for o, x in zip(*both)] for both in zip(OLD, log_ratio)]
    total = 0
    for row, old, a in zip(new, OLD, A):
        terms = objective(row, old, a)
        total = total - sum(terms) / {"sequence": len(OLD) * len(row), "token": sum(LENGTHS), "sum": len(OLD)}[mean]
    leaves = [x for row in new for x in row]
    grads = [0.0 if g is None else g.item() for g in torch.autograd.grad(total, leaves, allow_unused=True)]
    found = iter(grads)
    return total.item(), [[next(found) for _ in row] for row in new]


@pytest.fixture(autouse=True)
def double(request):
    """Numbers without a type have 64 bits in the tests of losses."""
    torch.set_default_dtype(torch.float64 if "start" not in request.fixturenames else torch.float32)
    yield
    torch.set_default_dtype(torch.float32)


def same(name, objective, log_ratio=LOG_RATIO, mean="sequence", **changes):
    value, grad, clipped = of_code(name, log_ratio, **changes)
    want, of_tokens = of_formula(objective, log_ratio, mean)
    assert value == pytest.approx(want, rel=1e-9)
    for row, wanted in zip(grad, of_tokens):
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    return clipped


def ratios(new, old):
    return [(n - o).exp() for n, o in zip(new, old)]


def ppo(r, a, low=0.2, high=0.2):
    return min(r * a, min(max(r, torch.tensor(1.0 - low)), torch.tensor(1.0 + high)) * a)


def test_cispo():
    def terms(new, old, a):
        return [min(r.item(), 5.0) * a * n for r, n in zip(ratios(new, old), new)]
    assert same("cispo", terms, mean="token") == 1          # e^1.7

    def from_below(new, old, a):
        return [max(min(r.item(), 5.0), 0.7) * a * n for r, n in zip(ratios(new, old), new)]
    assert same("cispo", from_below, mean="token", clip_low=0.3) == 1 + 2           # e^-0.6, e^-0.5, too


@pytest.mark.parametrize("name, constants", [
    ("clip_cov", dict(SHARE=2e-4, LOW=1, HIGH=5)), ("kl_cov", dict(SHARE=2e-3, COEFFICIENT=1)), ("entropy_tokens", dict(SHARE=0.2)),
    ("soft_overlong", dict(BUFFER=0.2, FACTOR=0.5)), ("pass_at_k", dict(K=4)), ("moving_reference", dict(RATE=0.01)),
    ("dppo_tv", dict(DELTA=0.15)), ("dppo_kl", dict(DELTA=0.05)), ("dapo", dict(SETTINGS=dict(clip_high=0.28, kl="none", loss_mean="token"))),
    ("entropy_tokens", dict(SETTINGS=dict(clip_high=0.28, kl="none", loss_mean="token", micro_tokens=2048))), ("lite_ppo", dict(SETTINGS=dict(kl="none", loss_mean="token"))),
    ("off_policy_mask", dict(SETTINGS=dict(kl="loss", estimator="ratio*k3")))])
def test_constants_that_no_formula_sees(name, constants):
    assert vars(module_of(name)).items() >= constants.items()


def test_a_kl_is_only_where_the_paper_has_one():
    own = dict(adaptive_kl="reward", moving_reference="loss", off_policy_mask="loss", periodic_reference="loss", two_sided="loss")
    assert {name: module_of(name).SETTINGS["kl"] for name in KNOWN} == dict.fromkeys(KNOWN, "none") | own


@pytest.mark.parametrize("rise", [1.0, 1.3])
def test_sapo(rise, monkeypatch):
    """With its constants, and with another one."""
    def terms(new, old, a):
        tau = rise if a > 0 else 1.05
        return [4 / tau / (1 + (-tau * (r - 1)).exp()) * a for r in ratios(new, old)]
    if rise != 1:
        with_constants(monkeypatch, "sapo", TAU_POSITIVE=rise)
    same("sapo", terms)


def test_gmpo():
    def terms(new, old, a):
        logs = [n - o for n, o in zip(new, old)]
        kept = [min(x, torch.tensor(0.4)) if a > 0 else max(x, torch.tensor(-0.4)) for x in logs]
        return [(sum(kept) / len(kept)).exp() * a] + [0.0] * 0
    assert same("gmpo", lambda *given: [terms(*given)[0]] * len(given[0])) == 4
    new, mask = torch.full((1, 1), 0.1), torch.ones(1, 1).bool()            # within the clip, without an advantage
    assert not grpo.surrogate(new, torch.zeros(1, 1), torch.zeros(1, 1), mask, grpo.make_config(algo="gmpo"))[1].any()


def test_gpg(monkeypatch):
    same("gpg", lambda new, old, a: [a * n for n in new], mean="token")
    cfg = grpo.make_config(algo="gpg", group=2)
    reward = torch.tensor([[0.0, 1], [0, 0], [0, 1], [0, 1], [0, 0], [0, 0]])
    ends, mask = torch.tensor([[False, True]] * 6), torch.ones(6, 2, dtype=torch.bool)
    adv, _, dead = module_of("gpg").advantages(reward, ends, mask, torch.zeros(6, 2), None, cfg)
    assert dead.tolist() == [False, True, True] and adv[:, 0].tolist() == [1.5, -1.5, 0, 0, 0, 0]       # one of three is live
    assert module_of("gpg").advantages(0 * reward, ends, mask, torch.zeros(6, 2), None, cfg)[0].tolist() == [[0, 0]] * 6
    monkeypatch.setattr(dist, "all_reduce", lambda counts: counts + torch.tensor([1, 1]))        # another rank: one, live
    assert module_of("gpg").advantages(reward, ends, mask, torch.zeros(6, 2), None, cfg)[0][0, 0].item() == 0.5 * 4 / 2


def test_luspo():
    def terms(new, old, a):
        s = (sum(n - o for n, o in zip(new, old)) / len(new)).exp()
        return [ppo(s, a, 2e-3, 2.5e-3)] * len(new)
    assert same("luspo", terms, [[5 * x for x in row] for row in GENTLE], "sum") == 3 + 2        # a row beyond each bound
    assert grpo.token_weights(torch.ones(1, 3), "sequence", 1, 3, 8).tolist() == [[1, 1, 1]]


def test_gspo_token():
    def terms(new, old, a):
        s = math.exp(sum(n.item() - o for n, o in zip(new, old)) / len(new))
        return [ppo(s * (n - n.item()).exp(), a, 3e-4, 4e-4) for n in new]
    assert same("gspo_token", terms, GENTLE) > 0
    (value, grad, clipped), whole = of_code("gspo_token", GENTLE), of_code("gspo", GENTLE)      # with one advantage per row
    assert value == pytest.approx(whole[0]) and clipped == whole[2]
    assert all(row == pytest.approx(wanted, abs=1e-15) for row, wanted in zip(grad, whole[1]))


@pytest.mark.parametrize("name, bound", [("dual_clip", 3.0), ("two_sided", 4.0)])
def test_clips_with_a_second_bound(name, bound):
    def terms(new, old, a):
        return [bound * a if a < 0 and r > bound else ppo(r, a) for r in ratios(new, old)]
    plain = sum(a > 0 and x > math.log(1.2) or a < 0 and x < math.log(0.8) for a, row in zip(A, LOG_RATIO) for x in row)
    assert same(name, terms) == plain + sum(a < 0 and x > math.log(bound) for a, row in zip(A, LOG_RATIO) for x in row) > plain
    new, mask = torch.full((1, 1), math.log(2 * bound)), torch.ones(1, 1).bool()       # without an advantage there is no clip
    assert not grpo.surrogate(new, torch.zeros(1, 1), torch.zeros(1, 1), mask, grpo.make_config(algo=name))[1].any()


@pytest.mark.parametrize("name, delta", [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo(name, delta):
    def blocked(n, o, a):
        p, q = min(math.exp(n.item()), 1 - 1e-6), math.exp(o)
        far = abs(p - q) if name == "dppo_tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        return (a > 0 and n > o or a < 0 and n < o) and far > delta

    def terms(new, old, a):
        return [0.0 * n if blocked(n, o, a) else (n - o).exp() * a for n, o in zip(new, old)]
    assert 0 < same(name, terms) < sum(LENGTHS)
    old, new = torch.tensor([[1e-3, 0.5, 6e-3]]), torch.tensor([[1e-8, 5e-9, 1e-8]])         # of rare tokens that became rarer
    cfg, adv, mask = grpo.make_config(algo=name), torch.full((1, 3), -1.0), torch.ones(1, 3).bool()
    _, far = module_of(name).surrogate(new.log(), old.log(), adv, mask, cfg)
    assert far.tolist() == [[False, True, name == "dppo_kl"]]           # the third: 0.006 apart, 0.074 nats
    never, mask1 = torch.tensor([[-150.0]], dtype=torch.float32), torch.ones(1, 1).bool()       # 0 in float32, and now less
    assert not module_of(name).surrogate(never - 50, never, -torch.ones(1, 1), mask1, cfg)[1].any()
    old, new = torch.tensor([[0.3, 0.5] * 3]), torch.tensor([[0.5, 0.3] * 3])       # far; the first two want back
    adv, mask = torch.tensor([[-1.0, 1, 1, -1, 0, 0]]), torch.ones(1, 6).bool()
    assert module_of(name).surrogate(new.log(), old.log(), adv, mask, cfg)[1].tolist() == [[False, False, True, True, False, False]]


def covariances():
    """Of each token: its advantage and log-probability less their means, multiplied."""
    adv = [a for a, n in zip(A, LENGTHS) for _ in range(n)]
    logp = [o + x for both in zip(OLD, LOG_RATIO) for o, x in zip(*both)]
    return [(a - statistics.mean(adv)) * (x - statistics.mean(logp)) for a, x in zip(adv, logp)]


def test_clip_cov(monkeypatch):
    """With a range in which there is one token that PPO does not clip, and then with one in which there is none."""
    cov = covariances()
    clipped = [a > 0 and x > math.log(2) for a, row in zip(A, LOG_RATIO) for x in row]
    pick = max((i for i, on in enumerate(clipped) if not on), key=lambda i: cov[i])
    for low, high, held in ((cov[pick] - 1e-6, cov[pick] + 1e-6, pick), (100, 101, None)):
        with_constants(monkeypatch, "clip_cov", LOW=low, HIGH=high)
        place = itertools.count()

        def terms(new, old, a):
            return [0.0 * r if next(place) == held else ppo(r, a, 1, 1) for r in ratios(new, old)]
        assert same("clip_cov", terms, mean="token") == sum(clipped) + (held is not None)


def test_clip_cov_draws_a_share_of_all_tokens(monkeypatch):
    """Among those in the range that PPO does not clip; the same ones again in a run that was resumed, whatever else has drawn."""
    with_constants(monkeypatch, "clip_cov", LOW=-100, HIGH=100, SHARE=0.3)
    cfg, (old, mask), log_ratio = grpo.make_config(algo="clip_cov"), tensors(OLD), tensors(LOG_RATIO)[0]
    adv = torch.tensor(A)[:, None] * mask
    drawn = []
    for moved in (log_ratio, 4 * log_ratio):
        held = []
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            gain, all_held = module_of("clip_cov").surrogate(old + moved, old, adv, mask, cfg)
            held.append(all_held & (gain == 0) & mask)
            clipped = (adv > 0) & (moved > math.log(2))
            assert (all_held == clipped | held[-1]).all() and not (clipped & held[-1]).any()
        assert clipped.any() and held[0].sum() == 3             # of 10 tokens
        assert torch.equal(held[0], held[1]) and torch.equal(held[0], held[2])
        free = mask & ~clipped
        drawn.append(torch.equal(held[0][free], torch.arange(free.sum()) < 3))
    assert drawn != [True, True]        # they are not just the first ones


@pytest.mark.parametrize("share, n", [(0.002, 1), (0.3, 3)])
def test_kl_cov(share, n, monkeypatch):
    with_constants(monkeypatch, "kl_cov", SHARE=share, COEFFICIENT=1.5)
    cov, place = covariances(), itertools.count()
    held = sorted(range(len(cov)), key=lambda i: -cov[i])[:n]

    def terms(new, old, a):
        return [r * a - (1.5 * abs(x - o) if next(place) in held else 0) for r, x, o in zip(ratios(new, old), new, old)]
    assert same("kl_cov", terms, mean="token") == n
    nothing = torch.zeros(0, 3)         # what a rank may have in an epoch's last micro-batch
    cfg = grpo.make_config(algo="kl_cov")
    assert module_of("kl_cov").surrogate(nothing, nothing, nothing, nothing.bool(), cfg)[0].shape == (0, 3)


def test_vespo():
    def terms(new, old, a):
        w = math.exp(sum(n.item() - o for n, o in zip(new, old)))
        k, c = (2, 3) if a >= 0 else (3, 2)
        return [w ** k * math.exp(c * (1 - w)) * a * n for n in new]
    same("vespo", terms, mean="token")
    old, mask = torch.full((2, 60), -30.0, dtype=torch.float32), torch.ones(2, 60, dtype=torch.bool)
    far = torch.tensor([[19.0], [-19.0]], dtype=torch.float32)              # rows that have moved by more than float32 has
    assert (60 * far).exp().tolist() == [[math.inf], [0]]
    gain, _ = module_of("vespo").surrogate(old + far, old, mask.float(), mask, grpo.make_config(algo="vespo"))
    assert gain.isfinite().all() and gain.abs().max() < 1e-9


@pytest.mark.parametrize("name", ["cispo", "clip_cov", "dppo_kl", "dual_clip", "gmpo", "gspo_token", "kl_cov", "luspo",
                                  "off_policy_mask", "sapo", "two_sided", "vespo"])
def test_a_row_without_tokens_is_no_loss(name):
    """As `overlong_filter` leaves them where a file builds on it: no 0 / 0."""
    cfg, (old, mask) = grpo.make_config(algo=name, group=2, max_new=8), tensors(OLD)
    mask[1] = False
    adv, logp = torch.tensor(A)[:, None] * mask, (old * mask + 0.1 * mask).requires_grad_()
    gain, _ = module_of(name) and grpo.surrogate(logp, old * mask, adv, mask, cfg)
    (gain * grpo.token_weights(mask.double(), cfg.loss_mean, 4, 9, 8)).sum().backward()
    assert gain.isfinite().all() and logp.grad.isfinite().all() and (logp.grad[1] == 0).all() and logp.grad[3].any()


def test_the_mask_of_deepseek():
    """The last row has moved by -0.6 nats a token, the second by -1.2: with a ratio above 1 the KL is negative, and stays."""
    def terms(new, old, a):
        moved = sum(o - n.item() for n, o in zip(new, old)) / len(new)
        return [0.0 * r if a < 0 and moved > 0.5 else ppo(r, a) for r in ratios(new, old)]
    falling = [*LOG_RATIO[:3], [-0.9, -0.5]]
    same("off_policy_mask", terms, falling)
    assert of_code("off_policy_mask", falling)[1][3] == [0, 0] and of_code("off_policy_mask", LOG_RATIO)[1][3] != [0, 0]
    slightly = [*LOG_RATIO[:3], [-0.2, -0.2]]           # by 0.2 nats a token, within the clip
    same("off_policy_mask", terms, slightly)
    assert of_code("off_policy_mask", slightly)[1][3] != [0, 0]


@pytest.mark.parametrize("name", ["tis", "mis"])
def test_weights_between_sampler_and_trainer(name, monkeypatch):
    """The advantages that the loss gets; those of a token, or of a completion."""
    old, mask = tensors(OLD)
    gap = tensors([[0.1, 0.9, -0.4], [0.3], [0.5, 0.4, -0.1, 0.0], [-0.2, -0.9]])[0]
    seen, module = [], module_of(name)
    monkeypatch.setattr(module, "unweighted", lambda agent, batch, weight, tokens: seen.append(batch.adv))
    batch = grpo.Batch(torch.zeros(4, 6), mask, None, old - gap, None, old_logp=old, adv=torch.ones(4, 6, dtype=torch.float64))
    module.total_loss(None, batch, None, 1)
    for row, (got, on, x) in enumerate(zip(seen[0], mask, gap)):
        ratio = x[on].exp() if name == "tis" else x[on].sum().exp().expand(on.sum())
        want = ratio.clamp(max=2) if name == "tis" else torch.where(ratio <= 2, ratio, 0)
        torch.testing.assert_close(got[on], want)
    assert (batch.adv == 1).all()
    assert seen[0][0, 3] == 2 if name == "tis" else (seen[0][2][mask[2]] == 0).all() and seen[0][0, 3] > 1      # e^0.9; e^0.8, e^0.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["tis", "mis"])
def test_weights_of_a_rounded_sampler_with_one_update(name, dtype, monkeypatch):
    """The loss needs no log-probabilities of the trainer then, but the weights do: in float32 these are 1 up to rounding, in
    bfloat16 not. The trainer's are in the trainer's dtype."""
    torch.set_default_dtype(torch.float32)
    cfg = grpo.make_config(algo=name, prompts=2, group=4, max_new=8, minibatches=1, dtype=dtype, device="cpu", warm_steps=0)
    assert cfg.updates == 1
    module, seen, asked, logps = module_of(name), [], [], grpo.logps
    agent = grpo.new_agent(cfg, arithmetic, byte_encoding(), pretrained.to_device(tiny_model(), cfg))
    monkeypatch.setattr(module, "unweighted", lambda agent, batch, weight, tokens: seen.append(batch.adv))
    monkeypatch.setattr(grpo, "logps", lambda gpt, *more: (asked.append(gpt), logps(gpt, *more))[1])
    batch, _ = module.rollout(agent, arithmetic.problems()[0][:2], random.Random(0))
    want, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
    assert asked == [agent.policy] and (batch.old_logp - want).abs().max() < (0.1 if dtype == "bfloat16" else 1e-5)
    batch.adv = batch.mask.float()
    module.total_loss(agent, batch, None, None)
    gap = (seen[0][batch.mask] - 1).abs().max()
    assert gap > 1e-2 if dtype == "bfloat16" else gap < 1e-3


@pytest.mark.parametrize("name", ["tis", "mis"])
def test_with_several_updates_the_weights_have_the_old_policys(name, monkeypatch):
    """Of the rollout's own pass: no other is made."""
    module, old = module_of(name), torch.zeros(4, 6)
    batch = batch_of(tensors(OLD)[1], old_logp=old)
    monkeypatch.setattr(module, "of_sampler", lambda *given: (batch, {}))
    made, stats = module.rollout(agent_of(grpo.make_config()), None, None)
    assert made is batch and batch.old_logp is old and stats == {}


# ----------------------------------------------------------------------------------------- credit

def test_opo():
    """By hand: (3 * 1 + 1 * 0) / 4 and dead."""
    mask = tensors(OLD)[1]
    reward = torch.zeros(4, 6)
    reward[0, 4], reward[2, 5], reward[3, 3] = 1.0, 2.0, 2.0
    penalty = 0.5 * mask / mask.sum(1, True)                # taken off; the same for all rows here
    adv, returns, dead = module_of("opo").advantages(reward, None, mask, penalty, None, grpo.make_config(algo="opo", group=2))
    assert [row[on].unique().tolist() for row, on in zip(adv, mask)] == [[pytest.approx(0.25)], [pytest.approx(-0.75)], [0], [0]]
    assert adv[~mask].abs().sum() == 0 and returns is None and dead.tolist() == [False, True]


def scores(name, rewards, group):
    """A variant's score of each completion (B,), for rewards at the ends of rows of 1 to 3 tokens; it is 0 elsewhere.
    And which groups are dead."""
    ends = torch.zeros(len(rewards), 5, dtype=torch.bool)
    ends[range(len(rewards)), [1 + i % 3 for i in range(len(rewards))]] = True
    r = ends * torch.as_tensor(rewards)[:, None]
    score, dead = module_of(name).group_scores(r, ends, grpo.make_config(algo=name, group=group))
    assert score.shape == ends.shape and (score[~ends] == 0).all()
    return score[ends], dead


@pytest.mark.parametrize("right", range(9))
def test_pass_at_k_is_the_z_score_over_all_subsets(right):
    """Of pass@4 over the 70 subsets of 4 of 8; of a completion, the mean over those that hold it."""
    rewards = [1.0] * right + [0.0] * (8 - right)
    subsets = [*itertools.combinations(range(8), 4)]
    value = [max(rewards[i] for i in subset) for subset in subsets]
    mean, std = statistics.mean(value), statistics.pstdev(value)
    score, dead = scores("pass_at_k", rewards, 8)
    assert dead.tolist() == [std == 0]
    for i in range(8):
        own = statistics.mean(v for v, subset in zip(value, subsets) if i in subset)
        assert score[i].item() == pytest.approx((own - mean) / std if std else 0, abs=1e-6)


def test_maxrl():
    score, dead = scores("maxrl", [1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1], 4)
    assert score.tolist() == [3, -1, -1, -1] + [0] * 8 and dead.tolist() == [False, True, True]


def test_beta_norm():
    """The density by its formula, with moments by hand; among densities p^x (1 - p)^y, the one that leaves the least variance."""
    rewards = [1.0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0]
    p = [0.75, 0.25, 0.5, 0.0]
    mean, var = statistics.mean(p), statistics.pvariance(p)
    size = mean * (1 - mean) / var - 1
    a, b = mean * size, (1 - mean) * size
    score, dead = scores("beta_norm", rewards, 4)

    def beta(x, y):
        return math.gamma(x) * math.gamma(y) / math.gamma(x + y)

    def density(q, x, y):
        return q ** (x - 1) * (1 - q) ** (y - 1) / beta(x, y)
    for i, r in enumerate(rewards):
        q = p[i // 4]
        assert score[i].item() == pytest.approx((r - q) / density(q, 1 + a / 3, 1 + b / 3) if q else 0, rel=1e-5)
    assert dead.tolist() == [False, False, False, True]
    apart = scores("beta_norm", [1.0, 1, 0, 0, 1, 0], 2)[0]            # means of 1, 0 and 0.5: a + b is 0.5
    assert apart.tolist() == pytest.approx([0] * 4 + [x / density(0.5, 1 + 0.25 / 3, 1 + 0.25 / 3) for x in (0.5, -0.5)])
    near = [scores("beta_norm", [1.0, 0, 1, 0, x, 0], 2)[0].tolist() for x in (1e-3, 1e-5, 1e-7)]
    assert all(found[4] == pytest.approx(-found[5]) for found in near)
    assert near[1][4] == pytest.approx(near[0][4] / 100, rel=0.1) and near[2][4] < near[1][4] / 90      # p counts as 0.001 at least

    def left(x, y):
        """The mean of p (1 - p) / density(p) squared under Beta(a, b), by sums."""
        points = [(i + 0.5) / 2000 for i in range(2000)]
        return sum(density(q, a, b) * q * (1 - q) / density(q, x, y) ** 2 for q in points) / 2000
    best = left(1 + a / 3, 1 + b / 3)
    assert all(best < left(1 + a / 3 + dx, 1 + b / 3 + dy) for dx, dy in ((0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1), (0.1, 0.1)))


def test_lite_ppo():
    """The group's mean, over the std of all rewards."""
    rewards = [1.0, 0, 5, 1, 2, 2]
    score, dead = scores("lite_ppo", rewards, 2)
    std = statistics.pstdev(rewards)
    assert score.tolist() == pytest.approx([0.5 / std, -0.5 / std, 2 / std, -2 / std, 0, 0]) and dead.tolist() == [False, False, True]
    assert scores("lite_ppo", [1.0] * 4, 2)[0].tolist() == [0] * 4


def rolled(reward, adv, components=None, finished=(True, True, True, False)):
    """A rollout of four rows, two groups."""
    mask = tensors(OLD)[1]
    last = mask & ~mask.roll(-1, 1)
    return batch_of(mask, finished=torch.tensor(finished), problems=[*"aabb"], texts=[*"wxyz"], components=components or {},
                    reward=torch.where(last, torch.tensor(reward)[:, None], 0), adv=torch.tensor(adv)[:, None] * mask)


def test_gdpo(monkeypatch):
    """Sums of 1 each, by different parts: each part has its own z-score."""
    parts = {"correct": torch.tensor([1.0, 0, 1, 0]), "format": torch.tensor([0.0, 1, 1, 1]), "rule_reward": torch.tensor([9.0, 9, 9, 0])}
    module, cfg = module_of("gdpo"), grpo.make_config(algo="gdpo", group=2)
    monkeypatch.setattr(module, "of_the_sum", lambda *given: (rolled([1.0] * 4, [0.0] * 4, parts), {"x": 1}))
    batch, stats = module.rollout(agent_of(cfg), [], None)
    score = [1 - 1, -1 + 1, 1 + 0, -1 + 0]          # z-scores of pairs are 1 and -1
    tokens = [x for x, n in zip(score, LENGTHS) for _ in range(n)]
    mean, std = statistics.mean(tokens), statistics.pstdev(tokens)
    for row, on, x in zip(batch.adv, batch.mask, score):
        assert row[on].tolist() == pytest.approx([(x - mean) / std] * on.sum().item()) and row[~on].abs().sum() == 0
    assert stats == {"x": 1}


@pytest.mark.parametrize("ref, critic", [(None, None), ("a model", None), (None, "a model")])
def test_overlong_filter(ref, critic, monkeypatch):
    """A row that was cut off is in no loss, with a KL or a critic neither; the rollout, which is logged, keeps it."""
    module, seen = module_of("overlong_filter"), []
    batch = rolled([1.0] * 4, [1.0, 0.0, 1.0, 1.0])
    monkeypatch.setattr(module, "of_all", lambda agent, batch, rng: seen.append(batch))
    before, agent = batch.mask.clone(), agent_of(grpo.make_config(), ref=ref, critic=critic)
    module.update(agent, batch, None)
    assert torch.equal(seen[0].mask[:3], before[:3]) and not seen[0].mask[3].any() and torch.equal(batch.mask, before)
    assert module.has_gradient(agent, batch).tolist() == [True, bool(ref or critic), True, False]


@pytest.mark.parametrize("name", ["tis", "mis"])
def test_a_weight_that_overflows(name, monkeypatch):
    module, batch = module_of(name), rolled([1.0] * 4, [1.0] * 4)
    batch.old_logp, batch.logp = torch.zeros(4, 6), torch.where(batch.mask, -900.0, 0)
    monkeypatch.setattr(module, "unweighted", lambda agent, batch, *more: batch.adv)
    assert torch.equal(module.total_loss(None, batch, None, None), batch.mask * (2.0 if name == "tis" else 0.0))


def test_soft_overlong(monkeypatch):
    """Of at most 4 tokens with a buffer of 2: 1 of 2 too many costs a quarter."""
    module, seen = module_of("soft_overlong"), []
    monkeypatch.setattr(module, "BUFFER", 0.5)
    monkeypatch.setattr(module, "unpunished", lambda reward, *more: seen.extend((reward, *more)))
    batch = rolled([1.0, 0.0, 1.0, 0.5], [0.0] * 4)
    module.advantages(batch.reward, batch.ends, batch.mask, None, None, grpo.make_config(max_new=4))
    assert seen[1] is batch.ends and seen[2] is batch.mask
    assert seen[0].sum(1).tolist() == [0.75, 0.0, 0.5, 0.5] and seen[0][~batch.ends].abs().sum() == 0     # of 3, 1, 4, 2 tokens
    monkeypatch.setattr(module, "of_task", lambda *given: (batch, {"reward": 0.625, "length": 2.5}))
    logged, stats = module.rollout(agent_of(grpo.make_config(max_new=4)), [], None)
    assert torch.equal(logged.reward, seen[0]) and stats == {"reward": 0.4375, "length": 2.5}


def test_dapo_punishes_each_rollout_of_a_step():
    """Those of dynamic sampling are punished one at a time: their statistics are means over all of them."""
    module_of("dapo")
    of_step, of_one = (sys.modules[f"experiments.variants.{name}"] for name in ("dynamic_sampling", "soft_overlong"))
    assert grpo.rollout is of_step.rollout and of_step.one_rollout is of_one.rollout and grpo.advantages is of_one.advantages


def test_the_tokens_with_the_highest_entropy(monkeypatch):
    """Of each micro-batch, by the entropy of the whole distribution under the current policy, a row at a time; rows without
    an advantage count, too."""
    module, cfg = module_of("entropy_tokens"), grpo.make_config(algo="entropy_tokens", temperature=1.3)
    batch = rolled([1.0] * 4, [1.0, 1.0, -1.0, 0.0])
    batch.ids = torch.randint(0, 200, (4, 6), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(module, "of_all_tokens", lambda agent, batch, *more: (batch.adv, *more))
    chosen = []
    for policy in (tiny_model(0, 3.0), tiny_model(1, 3.0)):         # as sampled, and after an update
        entropy = torch.full((4, 6), -1.0)
        for i, row in enumerate(batch.ids):
            for t in batch.mask[i].nonzero()[:, 0].tolist():
                p = ((policy(row[None, :t])[0, -1] @ policy.embed_tokens.weight.T) / 1.3).softmax(-1)
                entropy[i, t] = -(p * p.log()).sum().item()
        kept = entropy >= entropy[batch.mask].sort().values[-2]         # 2 of 10
        before = batch.adv.clone()
        adv, *more = module.total_loss(agent_of(cfg, policy=policy), batch, "weight", 10)
        assert torch.equal(adv, torch.where(kept, before, 0)) and kept.sum() == 2 and more == ["weight", 10]
        assert torch.equal(batch.adv, before)
        chosen.append(kept)
    assert not torch.equal(*chosen)
    nothing = replace(batch, mask=batch.mask & False)
    assert module.total_loss(agent_of(cfg, policy=policy), nothing, 0, 0)[0] is batch.adv
    assert grpo.has_gradient(None, batch).tolist() == [True] * 4


@pytest.mark.parametrize("name", ["kl_cov", "entropy_tokens"])
def test_rows_without_an_advantage_count_in_a_share(name):
    """In a step's first update their loss is 0, by which other algorithms know that they may be left out."""
    torch.set_default_dtype(torch.float32)
    cfg, policy = grpo.make_config(algo=name, group=2, epochs=2), tiny_model()
    batch = rolled([1.0] * 4, [1.0, -1.0, 0.0, 0.0])
    batch.old_logp = token_logps(policy, batch.ids, batch.mask, 1.0)[0].detach()
    agent = agent_of(cfg, policy=policy)
    assert passes.has_gradient(agent, batch, grpo.total_loss).tolist() == [True, True, False, False]
    assert grpo.has_gradient(agent, batch).tolist() == [True] * 4


def test_remax(monkeypatch):
    """The greedy completion of each prompt is its baseline; there is no clip, and a mean over tokens."""
    same("remax", lambda new, old, a: [a * r for r in ratios(new, old)], mean="token")
    module, asked = module_of("remax"), []
    batch = rolled([1.0, 0.25, 0.5, 1.0], [1.0, 0.25, 0.4, 1.0])        # the third has a KL of 0.1 in its reward

    def generate(agent, problems, group, rng=None):
        asked.append((problems, group, rng))
        parts = {"correct": torch.tensor([0.0, 1.0]), "format": torch.tensor([0.25, 1.0])}
        return batch_of(batch.mask[:2], finished=torch.tensor([True, False]), components=parts)
    monkeypatch.setattr(module, "of_samples", lambda *given: (batch, {}))
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(grpo.reward, "TRUNCATED_REWARD", 0.5)
    cfg = grpo.make_config(algo="remax", group=2, max_new=5)
    adv = module.rollout(agent_of(cfg), ["a", "b"], random.Random(0))[0].adv
    for row, on, x in zip(adv, batch.mask, [0.75, 0, -0.1, 0.5]):       # the second greedy completion was cut off: 0.5
        assert row[on].tolist() == pytest.approx([x] * on.sum().item())
    assert asked == [(["a", "b"], 1, None)] and adv[~batch.mask].abs().sum() == 0


def test_distillation(start, tmp_path, monkeypatch):
    """A token's advantage is log pi_teacher - log pi_student as sampled, of whole rows a token at a time; nothing elsewhere."""
    other = pretrained.load(start)
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight.mul_(3)
    pretrained.save(other, tmp_path, byte_encoding().files)
    with_constants(monkeypatch, "distillation", TEACHER=str(tmp_path))
    cfg = grpo.make_config(**TINY | dict(algo="distillation", init=start, warm_steps=0, temperature=1.3))
    agent = grpo.new_agent(cfg, arithmetic, *pretrained.trained_model(cfg))
    batch, stats = grpo.rollout(agent, arithmetic.problems(difficulty=1)[0][:3], random.Random(0))
    assert len({*batch.mask.sum(1).tolist()}) > 1 and "reward" in stats and "dead_groups" not in stats
    for row, on, adv in zip(batch.ids, batch.mask, batch.adv):
        for t in range(len(row)):
            of_student, of_teacher = ((gpt.head(gpt(row[None, :t])[0, -1]).double() / 1.3).log_softmax(-1)[row[t]].item()
                                      for gpt in (agent.policy, other)) if on[t] else (0, 0)
            assert adv[t].item() == pytest.approx(of_teacher - of_student, abs=2e-4)
    assert batch.adv[batch.mask].abs().max() > 0.1 and (batch.adv[~batch.mask] == 0).all()


def test_the_loss_of_distillation():
    """Minus the mean over all tokens of r A, without a clip."""
    assert same("distillation", lambda new, old, a: [a * r for r in ratios(new, old)], mean="token") == 0


@pytest.mark.parametrize("other", [dict(special={"<|end|>": 256}), dict(ranks={bytes([255 - i]): i for i in range(256)})], ids=["special tokens", "ranks"])
def test_a_teacher_with_another_tokenizer_is_refused(other, start, monkeypatch):
    with_constants(monkeypatch, "distillation", TEACHER=start)
    cfg, known = grpo.make_config(**TINY | dict(algo="distillation", init=start, warm_steps=0)), byte_encoding()
    given = dict(ranks={bytes([i]): i for i in range(256)}, special={"<|endoftext|>": 256}) | other
    mine = type(known)("mine", r"[\s\S]", stop=[256], files={}, **given)
    with pytest.raises(UserError, match=f"^{start}: the teacher's tokenizer is not the student's$"):
        grpo.new_agent(cfg, arithmetic, mine, tiny_model())


@pytest.mark.parametrize("name", ["moving_reference", "periodic_reference"])
def test_without_a_reference_there_is_none_to_move(name, monkeypatch):
    module = module_of(name)
    monkeypatch.setattr(module, "one_step", lambda agent, problems, step: "found")
    assert module.train_step(agent_of(grpo.make_config()), [], 25) == "found"


@pytest.mark.parametrize("name", ["moving_reference", "periodic_reference", "off_policy_mask"])
def test_variants_of_the_kl_have_one_on_every_task(name):
    assert grpo.make_config(algo=name, task="sums").needs_reference and not grpo.make_config(task="sums").needs_reference


def test_rewards_for_which_a_variant_is_not_meant():
    for name, rewards, says in (("beta_norm", [1.0, 2.0], "a reward is 2, and must be from 0 to 1"),
                                ("beta_norm", [-0.5, 1.0], "a reward is -0.5, and must be from 0 to 1"),
                                ("maxrl", [-1.0, 1.0], "a reward is -1, and must not be negative")):
        with pytest.raises(UserError, match=f"^--algo {name}: {says}$"):
            scores(name, rewards, 2)


def test_a_little_for_a_wrong_completion_makes_it_not_right():
    """Sums, gsm8k and countdown pay some."""
    found = [scores("pass_at_k", rewards, 8) for rewards in (
        [0.1] * 5 + [1.1, 1.0, 0.1], [0.0] * 5 + [1.0, 1.0, 0.0])]
    assert torch.equal(found[0][0], found[1][0]) and not found[0][1].any()


def test_padding_is_not_clipped():
    logp, mask = torch.full((1, 3), 9.0), torch.tensor([[True, True, False]])
    cfg = grpo.make_config(algo="cispo", ratio="sequence")      # whose ratio is the same in all columns
    assert module_of("cispo").surrogate(logp, logp - 3, 1.0, mask, cfg)[1].tolist() == [[True, True, False]]


@pytest.mark.slow
def test_a_step_in_which_all_completions_are_cut_off(start, tmp_path, monkeypatch):
    """No row is left: no loss, no KL, no change."""
    def cut_off(*given, own=grpo.generate):
        batch = own(*given)
        return replace(batch, finished=torch.zeros_like(batch.finished))
    monkeypatch.setattr(grpo, "generate", cut_off)
    cfg = grpo.make_config(**TINY | dict(algo="overlong_filter", kl="loss", init=start, warm_steps=0, steps=1, out=str(tmp_path)))
    monkeypatch.setattr(grpo, "evaluate", lambda *_: {"greedy": 0.0, "pass@1": 0.0})
    policy = grpo.train(cfg).policy
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert [logged[name] for name in ("loss", "kl", "clip_share", "grad_norm")] == [0] * 4
    before = pretrained.load(start)
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before.parameters(), strict=True))


def test_a_group_is_larger_than_k():
    with pytest.raises(UserError, match="pass_at_k: --group 4 must be more than K, 4"):
        scores("pass_at_k", [1.0] * 4, 4)


def test_what_is_rounding_holds_nothing_back():
    """In the first update of a rollout, the ratio is 1 up to rounding; the sign of that once had a gradient."""
    noise = [[1e-6 * (-1) ** t for t in range(n)] for n in LENGTHS]
    same("kl_cov", lambda new, old, a: [r * a for r in ratios(new, old)], noise, "token")


# ---------------------------------------------------------------------------- sampling and references

@pytest.mark.parametrize("live, rolls, ranks", [([[1, 1]], 1, 1), ([[1, 0], [0, 1]], 2, 1), ([[0, 0], [1, 0], [0, 0]], 3, 1), ([[0, 0]] * 3, 3, 1),
                                                ([[1, 1], [0, 1]], 2, 2), ([[0, 0]] * 3, 3, 2)])
def test_dynamic_sampling(live, rolls, ranks, monkeypatch):
    """Until two groups are live, three times at most; live ones first, in their order. Rollouts have rows of their own length.
    Of two ranks each has its own two groups; the other one needs two rollouts."""
    module, made, plan = module_of("dynamic_sampling"), [], iter(live)

    def one_rollout(agent, problems, rng):
        groups, n = next(plan), len(made)
        batch = rolled([1.0] * 4, [float(groups[i // 2]) * (-1) ** i for i in range(4)], {
            "correct": torch.tensor([float(groups[i // 2] * (i % 2)) for i in range(4)]), "place": torch.arange(4.0) + 10 * n})
        batch.texts = [f"{n}{i}" for i in range(4)]
        if n:
            batch.ids, batch.mask, batch.adv = (torch.nn.functional.pad(x, (0, n)) for x in (batch.ids, batch.mask, batch.adv))
            batch.logp, batch.reward, batch.ends = (torch.nn.functional.pad(x, (0, n)) for x in (batch.logp, batch.reward, batch.ends))
        made.append(problems)
        tokens.append(batch.mask.sum().item())
        return batch, {"reward": float(n)}

    def one_step(agent, problems, step):
        batch, stats = module.rollout(agent, [*"pqrs"[:2 * ranks]], random.Random(0))
        return batch, stats | {"rollout_tok_s": float(batch.mask.sum())}        # in a second
    tokens = []
    monkeypatch.setattr(module, "one_rollout", one_rollout)
    monkeypatch.setattr(module, "one_step", one_step)
    monkeypatch.setattr(dist, "rank", lambda: 0)
    monkeypatch.setattr(dist, "ranks", lambda: ranks)
    monkeypatch.setattr(dist, "all_reduce", lambda x: x + (ranks == 2 and len(made) < 2))
    agent = agent_of(grpo.make_config(algo="dynamic_sampling", group=2))
    batch, stats = module.train_step(agent, [*"pqrstuvwxyzaefgh"], 1)
    assert len(made) == rolls and made[0] == [*"pqrs"[:2 * ranks]] and all(len(x) == 2 * ranks for x in made)
    assert len({*sum(made, [])}) == len(sum(made, []))              # no problem is drawn twice in a step
    groups = [(n, g) for n, of in enumerate(live) for g in range(2)]
    first = sorted(groups, key=lambda x: not live[x[0]][x[1]])[:2]
    assert batch.texts == [f"{n}{2 * g + i}" for n, g in first for i in range(2)]
    assert batch.components["place"].tolist() == [10 * n + 2 * g + i for n, g in first for i in range(2)]
    assert batch.adv.any(1).view(2, 2).any(1).tolist() == [bool(live[n][g]) for n, g in first]
    assert batch.ids.shape == batch.mask.shape == batch.adv.shape == (4, 5 + rolls) and batch.value is None
    if ranks == 1:                      # the tokens of all rollouts
        assert stats["rollout_tok_s"] == pytest.approx(sum(tokens))
        assert rolls == 1 or sum(tokens) > batch.mask.sum()
    assert stats["reward"] == (rolls - 1) / 2 and {*stats} == {"reward", "rollout_tok_s"}


def test_dynamic_sampling_ends_with_the_problems(monkeypatch):
    module = module_of("dynamic_sampling")
    made = []

    def one_rollout(agent, problems, rng):
        made.append(problems)
        return rolled([1.0] * 4, [0.0] * 4, {"correct": torch.ones(4)}), {}
    monkeypatch.setattr(module, "one_rollout", one_rollout)
    problems = [SimpleNamespace(prompt="2+2=") for _ in range(5)]       # of the same text, and yet five
    agent = agent_of(grpo.make_config(algo="dynamic_sampling", group=2))
    agent.others = problems
    batch, _ = module.rollout(agent, problems[:2], random.Random(0))
    assert len(made) == 2 and all(any(x is y for y in problems[2:]) for x in made[1]) and len(batch.ids) == 4


def test_dynamic_sampling_whitens_what_is_kept(start, tmp_path, monkeypatch):
    """As verl does: the tokens that train have mean 0 and std 1, and dead groups, far from the others, none of it."""
    seen, real = [], grpo.update
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {
        "correct": float(sum(map(ord, problem.prompt)) % 3 > 0 and sum(map(ord, text)) % 2), "more": float(problem.answer) / 9})
    cfg = grpo.make_config(**TINY | dict(init=start, warm_steps=0, out=str(tmp_path / "run"), steps=2, algo="dynamic_sampling",
                                         adv_scale="batch", baseline="none"))
    found = []

    def watched(agent, batch, rng):
        adv = batch.adv[batch.mask]
        seen.append((adv.mean().item(), adv.std(correction=0).item()))
        total = batch.reward.sum(1, keepdim=True).expand_as(batch.mask)[batch.mask]         # over all that is kept, once
        torch.testing.assert_close(adv, (total - total.mean()) / total.std(correction=0), rtol=1e-5, atol=1e-5)
        return real(agent, batch, rng)
    monkeypatch.setattr(grpo, "update", watched)
    load = config.import_file

    def loaded(path, name):             # a run executes the file again
        module = load(path, name)
        joined = module.joined
        module.joined = lambda rolled, rows: found.append((len(rolled), rows)) or joined(rolled, rows)
        return module
    monkeypatch.setattr(config, "import_file", loaded)
    grpo.train(cfg)
    assert any(n > 1 for n, _ in found) and len(seen) == 2          # some groups were dead
    assert all(abs(mean) < 1e-5 and abs(std - 1) < 1e-5 for mean, std in seen)


@pytest.mark.parametrize("name", ["moving_reference", "periodic_reference"])
def test_references_that_move(name, monkeypatch):
    """After the step, to the weights that it leaves; the step itself has the reference as it was. By the number of the step,
    as in a run that goes on after a resume."""
    def weights(model):
        return torch.cat([x.detach().flatten() for x in model.parameters()])

    def one_step(agent, problems, step):
        seen.append(weights(agent.ref))
        with torch.no_grad():
            agent.policy.norm.weight += 1
        return "found"
    module, seen = module_of(name), []
    monkeypatch.setattr(module, "one_step", one_step)
    policy, ref = tiny_model(1), tiny_model(2)
    agent = agent_of(grpo.make_config(), policy=policy, ref=ref)
    for step in (24, 25, 26, 50):
        before = weights(ref)
        assert module.train_step(agent, [], step) == "found" and torch.equal(seen[-1], before)
        p, now = weights(policy), weights(ref)
        if name == "moving_reference":
            torch.testing.assert_close(now, p + (before - p) * 0.99)
        else:
            assert torch.equal(now, p if step in (25, 50) else before) and not torch.equal(p, before)


def test_a_moving_reference_in_bfloat16(monkeypatch):
    """Each of its tensors moves, the head too, which is tied in the policy; and by less than bfloat16 can tell."""
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
        want = before[name].lerp(new[name if name in new else "embed_tokens.weight"], 0.01)
        assert torch.equal(p, want) and not torch.equal(p, before[name])


# ------------------------------------------------------------------------------------------- in a run

TINY = dict(difficulty=1, n_layer=1, n_embd=32, warm_steps=25, warm_lr=1e-2, steps=2, prompts=3, group=4, max_new=16,
            samples=1, held_out=4, device="cpu", compile=False, lr=1e-3)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model after its warm start."""
    where = tmp_path_factory.mktemp("start")
    grpo.train(grpo.make_config(**TINY | dict(steps=0, out=str(where / "run"))))
    return str(where / "run" / "warm_start")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_each_runs_for_two_steps(name, start, tmp_path, monkeypatch):
    """With rewards that differ within groups, and two updates of a rollout; in bfloat16, the default on a GPU. Some completions
    are cut off."""
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {
        "correct": float(sum(map(ord, text)) % 2), "size": 0.0 if name == "beta_norm" else len(text) / 50})
    with_constants(monkeypatch, "pass_at_k", K=2)         # of 4
    with_constants(monkeypatch, "distillation", TEACHER=start)
    config.algorithm("grpo", grpo.ALGOS, grpo)
    before = vars(grpo).copy()
    given = TINY | dict(algo=name, init=start, warm_steps=0, epochs=2, minibatches=2, max_new=9, dtype="bfloat16", out=str(tmp_path))
    fixed = getattr(module_of(name), "FIXED", [])
    given = {x: value for x, value in given.items() if x not in fixed}
    cfg = grpo.make_config(**given)
    grpo.train(cfg)
    assert {x for x in before if vars(grpo)[x] is not before[x]} == {*config.REPLACED}
    metrics = records(tmp_path / "metrics.jsonl")
    assert all(0 < m["finished"] < 1 for m in metrics[1:])
    assert len(metrics) == 3 and all(math.isfinite(x) for m in metrics for x in m.values()) and metrics[1]["grad_norm"] > 0
    assert (tmp_path / "functions.py").read_text() == config.file_of(name).read_text()
    assert (module_of(name).SETTINGS | given).items() <= (vars(cfg) | cfg.task_args).items()
    config.algorithm("grpo", grpo.ALGOS, grpo)
    assert vars(grpo) == before


def test_a_file_puts_all_its_functions_in_place():
    """One that is only defined would not be missed: the others run without it."""
    for name in KNOWN:
        config.algorithm(name, grpo.ALGOS, grpo)
        assert {*config.REPLACED} == {function for function, files in REPLACED.items() if name in files.split()}, name


@pytest.mark.slow
def test_an_algorithm_of_ones_own(start, tmp_path, capsys):
    """Where the file lies, it is a path; a resume names it, and takes no other one."""
    path = tmp_path / "mine.py"
    path.write_text("import grpo\nSETTINGS = dict(kl='none', lr=2e-3)\nclipped = grpo.surrogate\n"
                    "def surrogate(*given):\n    gain, which = clipped(*given)\n    return twice(gain), which\n"
                    "def twice(x):\n    return 2 * x\ngrpo.surrogate = surrogate\n")
    out, tiny = tmp_path / "run", {**TINY, "init": start, "warm_steps": 0}
    del tiny["lr"]
    grpo.main(flags(tiny | dict(algo=path, out=out)))
    cfg = checkpoint.load(out, grpo.Config)[0]
    assert (cfg.algo, cfg.lr, cfg.kl) == (str(path), 2e-3, "none")
    grpo.main(["--resume", "--out", str(out), "--algo", str(path), "--kl", "none"])         # nothing to do
    for args, said in (((), f"the run in {out} has its algo in the file {path}"), (("--algo", "grpo"), f"has --algo {path}, not grpo")):
        with pytest.raises(SystemExit):
            grpo.main(["--resume", "--out", str(out), "--steps", "3", *args])
        assert said in capsys.readouterr().err
    own = path.read_text()
    path.write_text(own + "# changed\n")
    with pytest.raises(SystemExit):
        grpo.main(["--resume", "--out", str(out), "--steps", "3", "--algo", str(path)])
    assert f"{path} has changed since the run in {out} began" in capsys.readouterr().err
    path.write_text(own)
    grpo.main(["--resume", "--out", str(out), "--steps", "3", "--algo", str(path)])
    assert checkpoint.load(out, grpo.Config)[1].step == 3
    path.unlink()                       # it is not needed for what follows
    grpo.main(["--eval_only", "--init", str(out), "--held_out", "4", "--samples", "1"])


def test_what_a_run_says_of_resuming_is_true(start, tmp_path, capsys):
    """Flags had another value than the file's settings: these are the run's own then, and no change."""
    path, out = tmp_path / "my algorithm.py", tmp_path / "a run"
    path.write_bytes(b"# -*- coding: latin-1 -*-  \xe9\nSETTINGS = dict(kl='none', steps=4, save_every=3)\n")
    given = TINY | dict(algo=path, init=start, warm_steps=0, kl="loss", out=out)
    grpo.main(flags(given))
    cfg = checkpoint.load(out, grpo.Config)[0]
    assert (cfg.kl, cfg.steps) == ("loss", 2) and (out / "functions.py").read_bytes() == path.read_bytes()
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
    grpo.main(["--ask", "1*\x07", "--init", str(out)])
    assert capsys.readouterr().out.startswith("1*\\x07")


OTHERS = dict(baseline="leave-one-out", adv_scale="batch", loss_mean="constant", clip_low=0.125, clip_high=0.125, ratio="sequence",
              supervision="process", reward="model", kl="watch", micro_tokens=1000)


@pytest.mark.parametrize("name", KNOWN)
def test_settings_that_a_variant_would_ignore_are_refused(name, start, tmp_path, monkeypatch):
    """Before the run; with the values that they have anyway nothing is said."""
    with_constants(monkeypatch, "distillation", TEACHER=start)
    ignored = dict(opo="baseline adv_scale", gdpo="baseline adv_scale supervision reward", luspo="loss_mean", remax="reward",
                   gpg="clip_low clip_high ratio", distillation="baseline adv_scale kl supervision reward", **dict.fromkeys("sapo vespo dppo_kl dppo_tv".split(), "clip_low clip_high"),
                   **dict.fromkeys("clip_cov entropy_tokens".split(), "micro_tokens"), kl_cov="clip_low clip_high micro_tokens",
                   raft="kl clip_low clip_high ratio", vineppo="supervision reward baseline adv_scale")
    fixed = getattr(module_of(name), "FIXED", [])
    assert fixed == ignored.get(name, "").split()
    tiny = TINY | dict(init=start, warm_steps=0, steps=0, out=str(tmp_path / "run"), algo=name)
    usual = grpo.make_config(**tiny)
    if usual.supervision == "process":
        monkeypatch.setitem(OTHERS, "supervision", "outcome")
    for flag in fixed:
        with pytest.raises(UserError, match=f"^--algo {name} does not take --{flag} {OTHERS[flag]}$"):
            grpo.train(grpo.make_config(**tiny | {"adv_scale": usual.adv_scale, flag: OTHERS[flag]}))
    if fixed:
        grpo.train(grpo.make_config(**tiny | {flag: getattr(usual, flag) for flag in fixed}))
    config.algorithm("grpo", grpo.ALGOS, grpo)
    config.check_used(grpo.make_config(algo="grpo", loss_mean="constant", clip_low=0.125))      # that was the other file's


def test_gdpo_has_no_kl_in_its_rewards(start, tmp_path):
    with pytest.raises(UserError, match="--algo gdpo does not take --kl reward"):
        grpo.train(grpo.make_config(**TINY | dict(init=start, warm_steps=0, out=str(tmp_path / "run")), algo="gdpo", kl="reward"))


@pytest.mark.parametrize("text, says", [
    ("def surrogate(): pass", "is not an algorithm: it needs a dict named SETTINGS"),
    ("import grpo\nSETTINGS = {}\ngrpo.surogate = print", "bad.py: grpo.py has no surogate to replace"),
    ("SETTINGS = dict(betta=0)", "there is no setting betta: did you mean --beta?"), ("SETTINGS = {\n", "line 1: '{' was never closed"),
    ("SETTINGS = dict(kl='nothing')", "--kl must be one of loss, reward, watch, none, got 'nothing'")])
def test_files_that_are_no_algorithms(text, says, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=says.replace("{", "\\{")):
        grpo.make_config(algo=str(tmp_path / "bad.py"))
    assert not hasattr(grpo, "surogate")


@pytest.mark.parametrize("given", [dict(supervision="process"), dict(baseline="leave-one-out"), dict(adv_scale="none")], ids=str)
def test_scores_of_outcomes_that_would_not_be_called(given, start, tmp_path):
    """Are refused, but not if the file's own `advantages` may call them."""
    tiny = TINY | dict(init=start, warm_steps=0, steps=0, out=str(tmp_path / "run")) | given
    needs = "it needs --supervision outcome, --baseline group and --adv_scale group"
    with pytest.raises(UserError, match=f"--algo maxrl: its scores are of outcomes: {needs}"):
        grpo.train(grpo.make_config(**tiny, algo="maxrl"))
    (tmp_path / "mine.py").write_text("import grpo\nfrom grpo import advantages as own, group_scores as scores\nSETTINGS = {}\n"
                                      "def group_scores(*given):\n    return scores(*given)\n"
                                      "def advantages(*given):\n    return own(*given)\n"
                                      "grpo.group_scores, grpo.advantages = group_scores, advantages\n")
    grpo.train(grpo.make_config(**tiny, algo=str(tmp_path / "mine.py")))


def test_an_evaluation_has_the_functions_of_its_algorithm(start, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from dataclasses import dataclass\nimport grpo\nSETTINGS = {}\n"
                                      "def evaluate(agent, problems):\n    return {'greedy': Share(0.125).x}\n"
                                      "def ask(agent, question):\n    return 'mine'\n"
                                      "@dataclass\nclass Share:\n    x: 'float'\n"
                                      "grpo.evaluate, grpo.ask = evaluate, ask\n")
    for mode, said in ((["--eval_only"], "greedy 12.5%\n"), (["--ask", "1*1="], "mine\n")):
        grpo.main([*mode, "--max_new", "4", "--init", start, "--algo", str(tmp_path / "mine.py")])
        assert capsys.readouterr().out == said


@pytest.mark.parametrize("name, says", [
    ("none.py", "no file none.py"), ("CISPO", "there is no --algo CISPO: did you mean cispo?"), ("", "there is no --algo : there are grpo, reinforce, "),
    ("zzz", "there is no --algo zzz: there are grpo, reinforce, "), ("no such", "there is no --algo no such: there are "), (3, "there is no --algo 3: ")])
def test_names_of_no_algorithm(name, says):
    with pytest.raises(UserError, match=re.escape(says)):
        grpo.make_config(algo=name)


def test_a_run_has_its_own_functions_alone():
    """The one before is forgotten; what else replaced a function stays."""
    plain = grpo.surrogate
    for name in ("cispo", "sapo", "grpo"):
        config.algorithm(name, grpo.ALGOS, grpo)
        assert grpo.surrogate is (plain if name == "grpo" else sys.modules[f"experiments.variants.{name}"].surrogate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "surrogate", print)
        config.algorithm("luspo", grpo.ALGOS, grpo)
        config.algorithm("grpo", grpo.ALGOS, grpo)
        assert grpo.surrogate is print


def test_a_run_has_the_functions_of_its_settings(start, tmp_path, monkeypatch):
    """Whatever settings were made after them."""
    cfg = grpo.make_config(**TINY | dict(algo="cispo", init=start, warm_steps=0, steps=0, out=str(tmp_path)))
    grpo.make_config(algo="sapo")
    grpo.train(cfg)
    assert grpo.surrogate.__module__ == "experiments.variants.cispo"


def test_a_file_that_changed_in_the_meantime_is_read_again(tmp_path):
    """Also one that is only imported, as dapo imports others."""
    path = tmp_path / "mine.py"
    for n in (1, 22, 333):
        path.write_text(f"import grpo\nfrom experiments.variants import luspo\nSETTINGS = dict(steps={n})\n"
                        f"def surrogate():\n    return {n}\ngrpo.surrogate = surrogate\n")
        assert grpo.make_config(algo=str(path)).steps == n and grpo.surrogate() == n
        assert grpo.token_weights.__module__ == "experiments.variants.luspo"


def test_a_file_that_fails_half_way_leaves_nothing(tmp_path):
    plain = grpo.surrogate
    (tmp_path / "mine.py").write_text("import grpo\ngrpo.surrogate = print\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        grpo.make_config(algo=str(tmp_path / "mine.py"))
    grpo.make_config()
    assert grpo.surrogate is plain


@pytest.mark.slow
def test_the_command_line_itself_may_be_what_is_replaced(start, tmp_path):
    """As `python grpo.py`, where grpo.py is __main__: the file's `import grpo` is not a second one."""
    (tmp_path / "mine.py").write_text("import sys\nimport grpo\nown = grpo.surrogate\nSETTINGS = dict(kl='none')\n"
                                      "assert sys.modules['grpo'] is sys.modules['__main__']\n"
                                      "def surrogate(*given):\n    print('mine')\n    return own(*given)\ngrpo.surrogate = surrogate\n")
    given = TINY | dict(init=start, warm_steps=0, steps=1, algo=tmp_path / "mine.py", out=tmp_path / "run")
    done = subprocess.run([sys.executable, ROOT / "grpo.py", *flags(given)], capture_output=True, text=True)
    assert done.returncode == 0 and "mine\n" in done.stdout, done.stderr


@pytest.mark.parametrize("first, second", [("cispo", "sapo"), ("luspo", "cispo")])
def test_a_file_that_is_read_during_a_run_of_another(first, second):
    """Builds on grpo.py's own functions, not on the replaced ones."""
    plain = grpo.surrogate
    config.algorithm(first, grpo.ALGOS, grpo)
    assert module_of("dual_clip").clipped_once is plain
    config.algorithm(second, grpo.ALGOS, grpo)
    assert grpo.surrogate.__module__ == f"experiments.variants.{second}"


# -------------------------------------------------------------------- other rows than those just sampled

def of_letters(name, **changes):
    """An Agent that runs an algorithm on the task of test_oracle.py, whose tokens are letters, with one update a step; and
    its module."""
    torch.set_default_dtype(torch.float32)
    agent = letters.new_agent(grpo.make_config(**letters.SMALL | dict(algo=name, epochs=1, minibatches=1) | changes))
    return agent, module_of(name)


def judged_by(monkeypatch, module, name, plan):
    """Of the rows that a file's own name for `collect` gives, the next of the plan says which are right."""
    real, plan = getattr(module, name), iter(plan)

    def collect(*given):
        batch = real(*given)
        batch.components["correct"] = torch.tensor(next(plan), dtype=torch.float32)
        made.append(batch)
        return batch
    made = []
    monkeypatch.setattr(module, name, collect)
    return made


def assert_begun(batch, row, start, ids):
    """A row whose completion begins with given ids, which are judged, but not trained on; the rest is the trainer's."""
    n, sampled = len(ids), batch.mask[row].nonzero()[:, 0].tolist()
    assert batch.start[row] == start and batch.ids[row, start:start + n].tolist() == ids
    assert sampled and sampled == [*range(start + n, start + n + len(sampled))]
    assert batch.judged[row].nonzero()[:, 0].tolist() == [*range(start, start + n), *sampled]
    said = batch.ids[row, batch.judged[row]].tolist()
    assert batch.texts[row] == b"".join(map(letters.ENCODING.token_bytes, said)).decode()
    right = letters.rule(batch.problems[row], batch.texts[row])["correct"] * batch.finished[row].item()
    assert batch.components["correct"][row] == right and len(said) <= letters.SMALL["max_new"]


def assert_the_trainers(agent, batch):
    logp, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
    torch.testing.assert_close(logp, batch.logp, rtol=0, atol=2e-5)


@torch.no_grad()
def test_tree():
    """Groups of five: three trunks, and a branch of each of the first two."""
    agent, module = of_letters("tree", group=5, prompts=4)
    batch, kept, differ = grpo.collect(agent, letters.PROBLEMS[:4], random.Random(0)), [], []
    assert len(batch.ids) == 20
    for first in range(0, 20, 5):
        prompt = letters.ENCODING.encode_prompt(letters.PROBLEMS[first // 5].prompt)
        for row in range(first, first + 5):
            trunk = row - 3 if row > first + 2 else row
            n = (batch.judged[row] & ~batch.mask[row]).sum().item()
            assert batch.ids[row, :len(prompt)].tolist() == prompt and (n == 0 or trunk < row)
            assert_begun(batch, row, len(prompt), batch.ids[trunk, len(prompt):len(prompt) + n].tolist())
            if trunk < row:
                assert n < batch.mask[trunk].sum()
                kept.append(n)
                differ.append(not torch.equal(batch.ids[row], batch.ids[trunk]))
    assert len({*kept}) > 2 and any(on for on, n in zip(differ, kept) if n)
    assert_the_trainers(agent, batch)


def test_replay():
    """Four steps with the same two prompts. In the first one nothing is known of the second prompt, which is dead; in the
    second the first one is dead; in the last both are, and then the latest right rows are those of the third."""
    agent, module = of_letters("replay", group=3)
    a, b = letters.PROBLEMS[0], letters.PROBLEMS[2]
    with pytest.MonkeyPatch.context() as patch:
        made = judged_by(patch, module, "present", [
            [0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
        batches = []
        for problems in ((a, b), (b, a), (a, b), (b, a)):
            batches.append(grpo.rollout(agent, list(problems), random.Random(len(made)))[0])
            letters.shaken(agent.policy, 0.3, len(made))
    assert {*module.prompts(agent.state)} == {tuple(letters.ENCODING.encode_prompt(p.prompt)) for p in (a, b)}
    sources = {(1, 5): (0, 1), (3, 2): (2, 5), (3, 5): (2, 2)}          # step and row, of which step and row it is
    for step, batch in enumerate(batches):
        for row in range(6):
            old_step, old = sources.get((step, row), (step, row))
            source = made[old_step]
            on = source.mask[old]
            for name in ("ids", "mask", "logp"):
                x, y = getattr(batch, name)[row], getattr(source, name)[old]
                assert x[:len(y)].tolist() == y[:len(x)].tolist() and not x[len(y):].any() and not y[len(x):].any(), name
            assert batch.on_policy[row] == (old_step == step) and batch.finished[row] == source.finished[old]
            assert batch.texts[row] == source.texts[old] and batch.problems[row] is source.problems[old]
            assert batch.old_logp[row][batch.mask[row]].tolist() == source.logp[old][on].tolist()
            if old_step < step:             # judged again, by the rule
                assert batch.components["correct"][row] == letters.rule(batch.problems[row], batch.texts[row])["correct"] * batch.finished[row]
    assert [batch.on_policy.all().item() for batch in batches] == [True, False, True, False]


@torch.no_grad()
def test_hints(monkeypatch):
    """Of two groups the second is dead. Half of the text at first, and less with each step; none if none is right."""
    agent, module = of_letters("hints", group=3, steps=4)
    problems, texts = letters.PROBLEMS[:2], ["bbcdefgg", "abcdefgg", "babbb"]     # for "g" the text has an odd number of a
    assert [letters.rule(problems[1], text)["correct"] for text in texts] == [0, 1, 1] and len(problems[1].prompt) == 1
    made = judged_by(monkeypatch, module, "unaided", [[1, 0, 0, 0, 0, 0]] * 6)
    for step, shown, hint in ((1, texts[:2], "abcd"), (2, texts[:2], "abc"), (4, texts[:2], "a"), (4, texts[:1], ""),
                              (1, texts[:1] + [2 * texts[1] + "a"], "abcde")):        # one token is left at least
        monkeypatch.setattr(letters.TASK, "demonstration", lambda problem, rng: rng.choice(shown))
        agent.step = step
        batch, want = grpo.collect(agent, problems, random.Random(step)), made[-1]
        for row in (3, 4, 5):
            assert_begun(batch, row, 1, letters.ENCODING.encode_prompt(hint))
        for row in (0, 1, 2):
            assert batch.ids[row][batch.mask[row]].tolist() == want.ids[row][want.mask[row]].tolist()
        assert batch.components["correct"][:3].tolist() == [1, 0, 0]
        assert not torch.equal(batch.ids[3:, :4], want.ids[3:, :4]) and len({*batch.texts[3:]}) > 1
        assert_the_trainers(agent, batch)


def test_stale():
    """Step k samples with the weights with which step k - 2 began, or those of the first one."""
    agent, module = of_letters("stale", steps=4, group=4)
    began = []
    for step in (1, 2, 3, 4):
        began.append(copy.deepcopy(agent.policy))
        own, seen = [*agent.policy.parameters()], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpo, "update", lambda agent, batch, rng, update=grpo.update: (
                seen.extend(p.detach().clone() for p in agent.sampler.parameters()), update(agent, batch, rng))[1])
            batch, stats = grpo.train_step(agent, letters.PROBLEMS, step)
        assert seen and all(map(torch.equal, seen, began[-1].parameters()))     # today's
        of = [token_logps(model, batch.ids, batch.mask, 1.0)[0].detach() for model in began]
        gaps = [(logp - batch.logp).abs().max().item() for logp in of]
        sampled = max(0, step - 3)
        assert gaps[sampled] < 2e-5 and all(gap > 1e-3 for i, gap in enumerate(gaps) if i != sampled)
        assert batch.old_logp is batch.logp and not batch.on_policy.any() and stats["mismatch"] == 0
        assert {name.split("@")[1] for name in agent.state} == {str(i) for i in range(max(1, step - 2), step + 1)}
        assert stats["grad_norm"] > 0 and not all(map(torch.equal, own, began[-1].parameters()))


def test_vineppo(monkeypatch):
    """Two groups of two rows, of which the first and the third have two steps. The value after a last one is whether the row
    is right, whatever its label."""
    module, asked = module_of("vineppo"), []
    batch = rolled([1.0] * 4, [0.0] * 4, {"correct": torch.tensor([1.0, 0, 1, 1])})
    batch.ends[0, 3] = batch.ends[2, 2] = True
    batch.mask[2, 3] = False                    # a token of a reply
    value = torch.full((4, 6), 0.125)
    value[0, 3], value[2, 2] = 0.25, 0.5

    def labels(*given):
        asked.append(given)
        return value
    monkeypatch.setattr(module, "rollout_labels", labels)
    monkeypatch.setattr(module, "of_steps", lambda *given: (batch, {"x": 1}))
    agent = agent_of(grpo.make_config(algo="vineppo", group=2))
    agent.step = 7
    got, stats = module.rollout(agent, [], None)
    assert stats == {"x": 1} and asked == [(agent, grpo.completions, batch, 2, "vineppo 7", 4)]
    adv = [[0.25 - 0.5] * 2 + [1 - 0.25], [0 - 0.5], [0.5 - 1] + [1 - 0.5] * 2, [0.0, 0.0]]
    tokens = sum(adv, [])
    mean, std = statistics.mean(tokens), statistics.pstdev(tokens)
    for row, on, want in zip(got.adv, batch.mask, adv, strict=True):
        assert row[on].tolist() == pytest.approx([(x - mean) / std for x in want]) and not row[~on].any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_raft(ranks, monkeypatch):
    """Of four groups two earn something, one of them the same for all; with two ranks both are of the first."""
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)
    agents = [of_letters("raft", prompts=4, minibatches=1)[0] for _ in range(ranks)]
    before = copy.deepcopy(agents[0].policy)
    rewards = torch.tensor([[0.5, 1, 1], [-1, 0, 0], [0.5, 0.5, 0.5], [0, 0, 0]])

    def step(rank):
        agent = agents[rank]
        batch = grpo.rollout(agent, letters.PROBLEMS[:4], random.Random(0))[0]
        mine = rewards[rank::ranks].flatten()
        batch.reward = torch.where(batch.ends, mine[:, None], 0)
        batch.adv = torch.where(batch.mask & (mine > 0.5)[:, None], -7.0, 0)            # it does not matter
        agent.opt = torch.optim.SGD(agent.policy.parameters(), 1.0)
        grpo.update(agent, batch, random.Random(0))
        return batch
    batches = letters.on_ranks(ranks, step, monkeypatch)
    rows = letters.rows_of(batches[0], agents[0])
    rows = [rows[i] for i in ([1, 6] if ranks == 1 else [1, 3])]
    loss = -sum(sum(letters.logps(before, row, 1.0)) for row in rows) / sum(len(row.completion) for row in rows)
    loss.backward()
    for agent in agents:
        for p, q in zip(agent.policy.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(q - p, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", "hints raft replay stale tree vineppo".split())
def test_a_killed_run_goes_on_as_if_it_had_not_been(name, start, tmp_path, monkeypatch):
    """The same weights, moments and state of its own, to the byte: with few problems, so that each comes again."""
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {"correct": float(sum(map(ord, text)) % 2)})
    problems, held_out = arithmetic.problems(difficulty=1)
    monkeypatch.setattr(arithmetic, "problems", lambda difficulty=1: (problems[:4], held_out))
    real, found = grpo.train_step, []
    monkeypatch.setattr(grpo, "evaluate", lambda *given: {"greedy": 0.0, "pass@1": 0.0})
    monkeypatch.setattr(report, "refresh", lambda folder: None)
    for kill in (0, 3):
        def train_step(agent, problems, step, kill=kill):
            if step == kill and killed.append(step) is None and len(killed) == 1:
                raise KeyboardInterrupt
            return real(agent, problems, step)
        killed, out = [], tmp_path / str(kill)
        monkeypatch.setattr(grpo, "train_step", train_step)
        cfg = grpo.make_config(**TINY | dict(algo=name, init=start, warm_steps=0, max_new=8, steps=3, save_every=2, out=str(out)))
        try:
            grpo.train(cfg)
        except KeyboardInterrupt:
            files.LOCK.close()
            cfg, saved = checkpoint.resume(out, grpo.Config, {})
            grpo.train(cfg, saved=saved)
        assert killed == [kill] * 2 * bool(kill)
        found.append(load_file(out / "checkpoint.safetensors"))
        logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert len(logged) == 4 and logged[3]["grad_norm"] > 0
    whole, again = found
    assert whole.keys() == again.keys() and any("state." in x for x in whole) == (name in ("replay", "stale"))
    assert all(map(torch.equal, whole.values(), (again[x] for x in whole)))


# ------------------------------------------------------------------------------------ adaptive_kl

def test_beta_is_steered_to_the_target():
    """By a tenth of the relative error, of which at most a fifth counts (Ziegler et al., 2.2)."""
    module = module_of("adaptive_kl")
    for kl, factor in ((0.05, 1), (0.055, 1.01), (0.045, 0.99), (1.0, 1.02), (0.0, 0.98)):
        agent = agent_of(grpo.make_config(algo="adaptive_kl"), beta=0.5)
        module.one_step = lambda *given: ("batch", {"kl": kl})
        assert module.train_step(agent, [], 1) == ("batch", {"kl": kl}) and agent.beta == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("given", [dict(kl="watch"), dict(beta=0.0)], ids=str)
def test_beta_needs_a_kl_that_it_weighs(given, start, tmp_path):
    cfg = grpo.make_config(**TINY | dict(algo="adaptive_kl", init=start, warm_steps=0, out=str(tmp_path)) | given)
    with pytest.raises(UserError, match="--algo adaptive_kl adapts beta: it needs --beta and --kl loss or reward"):
        grpo.train(cfg)


@pytest.mark.slow
def test_an_adapted_beta_is_resumed(start, tmp_path):
    """With the target far off, it falls by a fiftieth in each step."""
    given = TINY | dict(init=start, warm_steps=0, algo="adaptive_kl", out=tmp_path, save_every=1)
    grpo.main(flags(given))
    grpo.main(["--resume", "--out", str(tmp_path), "--steps", "3"])
    logged = [m["beta"] for m in records(tmp_path / "metrics.jsonl")[1:]]
    saved = checkpoint.load(tmp_path, grpo.Config)[1].beta
    assert [*logged, saved] == pytest.approx([0.04 * 0.98 ** n for n in range(4)])
