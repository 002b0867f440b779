"""experiments/variants: each against its paper's formula, a token at a time in float64, on rows
of unequal length; what an algorithm's file may hold, and what becomes of it in a run."""
import copy
import itertools
import math
import random
import re
import runpy
import shlex
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import test_oracle as letters
import torch
from conftest import ROOT, agent_of, batch_of, fault, flags, records, same, tiny_model
from pytest import MonkeyPatch, approx, fixture, mark, raises
from torch.testing import assert_close

import grpo
from data import UserError, arithmetic
from data.tokenizer import Encoding, byte_encoding
from model import token_logps
from run import checkpoint, config, dist, files, passes, pretrained, report


def variant(name, constants={}, **changes):
    """A Config for pairs, and the module whose functions are now grpo.py's."""
    cfg = grpo.make_config(**dict(algo=name, group=2, max_new=8) | changes)
    module = sys.modules[f"experiments.variants.{name}"]
    vars(module).update(constants)
    return cfg, module


# ---------- the loss

# Two groups of two rows, with ratios within all clips and beyond.
LENGTHS, A = [3, 1, 4, 2], [1.3, -0.7, 0.4, -1.1]
OLD = [[-1.2, -0.3, -2.0], [-0.9], [-0.1, -3.0, -0.7, -1.6], [-2.2, -1.9]]
LOG_RATIO = [[0.02, 0.5, -0.6], [1.2], [-0.3, 1.6, -0.05, 0.45], [1.7, -0.5]]


def tensors(table):
    """Rows as (B, T) tensors behind prompts of two tokens, and their mask."""
    found, mask = torch.zeros(len(table), 6), torch.zeros(len(table), 6, dtype=torch.bool)
    for i, row in enumerate(table):
        found[i, 2:2 + len(row)] = torch.tensor(row)
        mask[i, 2:2 + len(row)] = True
    return found, mask


def of_code(name, scale=1, constants={}, **changes):
    """Loss, gradient and number of clipped tokens, with LOG_RATIO times a scale."""
    (cfg, _), (old, mask) = variant(name, constants, **changes), tensors(OLD)
    logp = (old + scale * tensors(LOG_RATIO)[0]).requires_grad_(True)
    adv = torch.tensor(A)[:, None] * mask
    weight = grpo.token_weights(mask.double(), cfg.loss_mean, 4, 10, cfg.max_new)
    batch = batch_of(mask, old_logp=old, adv=adv)
    with MonkeyPatch.context() as patch:
        patch.setattr(grpo, "token_logps", lambda *given: (logp, None))
        patch.setattr(grpo, "logps", lambda *given: (logp.detach(), None))
        agent = agent_of(cfg)
        batch = grpo.minibatch(agent, batch, torch.arange(4))
        loss, stats, _ = grpo.total_loss(agent, batch, weight, 10)
    loss.backward()
    assert not logp.grad[~mask].any()
    return loss.item(), logp.grad[mask].tolist(), round(stats["clip_share"].item() * 10)


def of_formula(term, mean, scale):
    """Minus the mean of a term of all tokens, of its ratio, new and old log-probability, A, and
    the log-ratios of its row; and the gradient. The mean: over rows of that over a row, over all
    tokens, or over rows of the sum."""
    leaves, total = [], 0
    for old, moved, a in zip(OLD, LOG_RATIO, A):
        new = [torch.tensor(o + scale * x, requires_grad=True) for o, x in zip(old, moved)]
        logs = [n - o for n, o in zip(new, old)]
        terms = [term(x.exp(), n, o, a, logs) for x, n, o in zip(logs, new, old)]
        total = total - sum(terms) / {"sequence": 4 * len(new), "token": 10, "sum": 4}[mean]
        leaves += new
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.item(), [0.0 if g is None else g.item() for g in grads]


def check(name, term, mean, clipped, scale=1, **given):
    value, grad, found = of_code(name, scale, **given)
    want, of_tokens = of_formula(term, mean, scale)
    assert value == approx(want, rel=1e-9) and found == clipped
    assert grad == approx(of_tokens, rel=1e-9, abs=1e-12)


def ppo(r, a, low=0.2, high=0.2):
    near = min(max(r, torch.tensor(1 - low)), torch.tensor(1 + high))
    return min(r * a, near * a)


def mean(x):
    return sum(x) / len(x)


def sapo(r, n, o, a, logs):
    tau = 1.0 if a > 0 else 1.05
    return 4 / tau / (1 + (-tau * (r - 1)).exp()) * a


def gmpo(r, n, o, a, logs):
    near = [min(x, torch.tensor(0.4)) if a > 0 else max(x, torch.tensor(-0.4)) for x in logs]
    return mean(near).exp() * a


def gspo_token(r, n, o, a, logs):
    return ppo(mean(logs).exp().item() * (n - n.item()).exp(), a, 3e-4, 4e-4)


def vespo(r, n, o, a, logs):
    w = math.exp(sum(logs).item())
    k, c = (2, 3) if a >= 0 else (3, 2)
    return w ** k * math.exp(c * (1 - w)) * a * n


def deepseek(r, n, o, a, logs):
    return 0 * n if a < 0 and mean(logs) < -0.5 else ppo(r, a)


def floored(bound):
    return lambda r, n, o, a, logs: bound * a if a < 0 and r > bound else ppo(r, a)


def dppo(distance, delta):
    def term(r, n, o, a, logs):
        far = distance(min(math.exp(n.item()), 1 - 1e-6), math.exp(o)) > delta
        return 0 * n if (a > 0 and n > o or a < 0 and n < o) and far else r * a
    return term


def binary_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def ratio_times_a(r, n, o, a, logs):
    return r * a


@mark.parametrize("name, term, mean, clipped, scale", [       # clipped ones are by hand
    ("sapo", sapo, "sequence", 0, 1),
    ("gmpo", gmpo, "sequence", 4, 1),
    ("gpg", lambda r, n, o, a, logs: a * n, "token", 0, 1),
    ("remax", ratio_times_a, "token", 0, 1),
    ("distillation", ratio_times_a, "token", 0, 1),
    ("gspo_token", gspo_token, "sequence", 4, 1e-3),
    ("gspo_token", gspo_token, "sequence", 3, -1e-3),
    ("dual_clip", floored(3.0), "sequence", 6, 1),
    ("two_sided", floored(4.0), "sequence", 5, 1),
    ("dppo_tv", dppo(lambda p, q: abs(p - q), 0.15), "sequence", 2, 1),
    ("dppo_kl", dppo(binary_kl, 0.05), "sequence", 2, 1),
    ("dppo_kl", dppo(binary_kl, 0.05), "sequence", 4, 2),       # 3 by the other KL
    ("vespo", vespo, "token", 0, 1),
    ("vespo", vespo, "token", 0, -1),
    ("off_policy_mask", deepseek, "sequence", 4, 1),
    ("off_policy_mask", deepseek, "sequence", 5, -1),
    ("off_policy_mask", deepseek, "sequence", 3, -0.5),
    ("kl_cov", ratio_times_a, "token", 1, 1e-6)])       # rounding has no sign
def test_formulas(name, term, mean, clipped, scale, double):
    check(name, term, mean, clipped, scale)


@mark.parametrize("clipped, low, given", [(1, 0, {}), (3, 0.7, dict(clip_low=0.3))])
def test_cispo(clipped, low, given, double):
    """With a lower bound, too."""
    check("cispo", lambda r, n, o, a, logs: max(min(r.item(), 5.0), low) * a * n, "token",
          clipped, **given)


@mark.parametrize("name, scale, high", [("cispo", 1, 0.7), ("gmpo", -1, 0.4)])
def test_padding_is_not_clipped(name, scale, high, double):
    """Where it has the ratio of its row."""
    assert of_code(name, scale, ratio="sequence", clip_high=high)[2] == 3


@mark.parametrize("clipped, scale", [(4, 1e-2), (3, -1e-2)])
def test_luspo(clipped, scale, double):
    check("luspo", lambda r, n, o, a, logs: ppo(mean(logs).exp(), a, 2e-3, 2.5e-3), "sum",
          clipped, scale)


def covariances():
    adv = [a for a, n in zip(A, LENGTHS) for _ in range(n)]
    logp = [o + x for both in zip(OLD, LOG_RATIO) for o, x in zip(*both)]
    return [(a - mean(adv)) * (x - mean(logp)) for a, x in zip(adv, logp)]


def clipped_at_2(scale=1):
    return [a > 0 and scale * x > math.log(2) for a, row in zip(A, LOG_RATIO) for x in row]


@mark.parametrize("held", [True, False])
def test_clip_cov(held, double):
    """With a range that holds one token that PPO does not clip, or none."""
    cov, place, far = covariances(), itertools.count(), clipped_at_2()
    pick = max((i for i in range(10) if not far[i]), key=lambda i: cov[i])
    middle = cov[pick] if held else 100

    def term(r, n, o, a, logs):
        return 0 * r if next(place) == pick and held else ppo(r, a, 1, 1)
    check("clip_cov", term, "token", sum(far),
          constants=dict(LOW=middle - 1e-6, HIGH=middle + 1e-6))


def test_clip_cov_draws_a_share_of_all_tokens(double):
    """Not just the first, nor any that PPO clips; the same ones after a resume."""
    found, far = [], clipped_at_2(4)
    for seed in (1, 2):
        torch.manual_seed(seed)
        _, grad, n = of_code("clip_cov", 4, dict(LOW=-100, HIGH=100, SHARE=0.3))
        found.append([i for i in range(10) if not grad[i] and not far[i]])
        assert len(found[-1]) == 3 and n == sum(far)
        assert found[-1] != [i for i in range(10) if not far[i]][:3]
    assert found[0] == found[1]


@mark.parametrize("share, n", [(0.002, 1), (0.3, 3)])
def test_kl_cov(share, n, double):
    cov, place = covariances(), itertools.count()
    held = sorted(range(10), key=lambda i: -cov[i])[:n]

    def term(r, new, old, a, logs):
        return r * a - 1.5 * abs(new - old) * (next(place) in held)
    check("kl_cov", term, "token", n, constants=dict(SHARE=share, COEFFICIENT=1.5))


@mark.parametrize("name", ["clip_cov", "entropy_tokens", "kl_cov"])
def test_a_share_is_of_the_minibatch_on_all_ranks(name, monkeypatch):
    """Of as many tokens, also where most are alike: all rows but one have the same advantage."""
    def chosen(rank=0):
        own = dist.of_rank(torch.arange(8).view(4, 2)).flatten()
        longest = passes.row_lengths(mask[own]).max()       # of ranks another
        part = grpo.minibatch(agent, passes.select(batch, own, longest), torch.arange(len(own)))
        tokens = (part.held if name == "kl_cov" else part.adv != 0 if name == "entropy_tokens"
                  else (part.adv == 0) & part.mask)
        return {(own[i].item(), t) for i, t in tokens.nonzero().tolist()}
    cfg, _ = variant(name, dict(SHARE=0.25, LOW=-99, HIGH=99))
    agent, ids = agent_of(cfg, step=3, policy=tiny_model()), torch.randint(0, 9, (8, 9))
    mask = (torch.arange(9) > 1) & (torch.arange(9) < 4 + torch.arange(8)[:, None] % 5)
    adv = torch.where(mask, torch.tensor([2.0] + 7 * [-0.5])[:, None], 0)
    batch = batch_of(mask, ids=ids, adv=adv, problems=[*"aabbccdd"], logp=-1.0 * mask)
    whole, n = chosen(), mask.sum().item()
    assert len(whole) == n // 4
    assert set.union(*letters.on_ranks(2, chosen, monkeypatch)) == whole
    monkeypatch.undo()
    batch = replace(batch, mask=mask & False)
    assert not chosen()


PAPERS = dict(      # what no formula here sees: constants and settings
    adaptive_kl=dict(kl="reward"), clip_cov=dict(SHARE=2e-4, LOW=1, HIGH=5, loss_mean="token"),
    dapo=dict(clip_high=0.28, loss_mean="token"),
    entropy_tokens=dict(SHARE=0.2, clip_high=0.28, loss_mean="token"),
    kl_cov=dict(SHARE=2e-3, COEFFICIENT=1, loss_mean="token"), lite_ppo=dict(loss_mean="token"),
    moving_reference=dict(kl="loss"), off_policy_mask=dict(kl="loss", estimator="ratio*k3"),
    pass_at_k=dict(K=4), periodic_reference=dict(kl="loss"),
    soft_overlong=dict(BUFFER=0.2, FACTOR=0.5), two_sided=dict(kl="loss", beta=0.001),
    vineppo=dict(loss_mean="token"))
NAMES = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "variants.md").read_text(), re.M)


@mark.parametrize("name", NAMES)
def test_constants_and_settings_of_the_papers(name, capsys):
    """A KL is only where the paper has one. What would be ignored is refused."""
    cfg, module = variant(name)
    config.check_used(cfg, arithmetic)
    said = capsys.readouterr().out
    assert said.startswith(f"--algo {name} replaces ") and "without effect" not in said
    found = vars(module) | module.SETTINGS
    assert all(found[x] == value for x, value in (dict(kl="none") | PAPERS.get(name, {})).items())
    for flag in config.FIXED:
        with raises(UserError, match=f"{name} does not take --{flag} other$"):
            config.check_used(SimpleNamespace(**vars(cfg) | {flag: "other"}), None)


FLIPS = [                   # of each line one is enough
    [dict(baseline="leave-one-out")], [dict(adv_scale="none")], [dict(ratio="sequence")],
    [dict(clip_low=x, clip_high=x) for x in (1e-3, 1e6)],
    [dict(loss_mean="constant"), dict(loss_mean="token")],
    [dict(kl="reward")], [dict(supervision="process")]]


@mark.slow
@mark.parametrize("name", NAMES)
def test_a_flag_is_obeyed_or_refused(name, monkeypatch):
    """By an update with plain gradients, whose sizes count, too."""
    def moved(**flip):
        given = dict(prompts=4, group=5, kl="none") | flip
        if name in ("adaptive_kl", "moving_reference", "periodic_reference"):
            given = dict(kl="loss") | flip
        agent, _ = of_letters(name, epochs=2, minibatches=2, **given)
        config.check_used(agent.cfg, letters.TASK)
        agent.opt = torch.optim.SGD(agent.policy.parameters(), 0.3)
        before = weights(agent.policy)
        grpo.train_step(agent, letters.PROBLEMS, 1)
        return weights(agent.policy) - before, agent.cfg
    if name == "distillation":          # refuses all of them but the ratio, the clip and the mean
        return
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)
    monkeypatch.setattr(letters.TASK, "reward", lambda problem, text: {
        "correct": sum(map(ord, text)) % 2})
    plain, cfg = moved()

    def differs(flip):
        try:
            found, other = moved(**flip)
        except UserError:
            return True
        return other == cfg or (found - plain).norm() > 1e-3 * plain.norm()
    assert [flips for flips in FLIPS if not any(map(differs, flips))] == []


# ---------- credit

def credit(name, rewards, group=2, penalty=0.0, **given):
    """The advantage of each row, the same at all of its tokens; and which groups are dead."""
    (cfg, _), mask = variant(name, group=group, **given), tensors(OLD * 4)[1][:len(rewards)]
    reward, ends = torch.tensor(rewards, dtype=torch.float32)[:, None], passes.last_tokens(mask)
    groups = torch.arange(len(rewards)) // group
    adv, _, dead = grpo.advantages(reward * ends, ends, groups, mask, penalty * mask, None, cfg)
    assert torch.equal(adv, mask * adv[:, 2:3])
    return adv[:, 2].tolist(), dead.tolist()


STD = statistics.pstdev([1, 0, 5, 1, 2, 2])


@mark.parametrize("name, rewards, wanted, dead, given", [
    ("opo", [1, 0, 2, 2, 0, 3], [0.25, -0.75, 0, 0, -0.75, 2.25], [0, 1, 0], {}),
    ("opo", [1, 0, 2, 2], [0.125, -0.375, -1 / 6, 1 / 3], [0, 0], dict(penalty=0.25)),
    ("gpg", [1, 0, 0, 0, 3, 3], [1.5, -1.5, 0, 0, 0, 0], [0, 1, 1], {}),    # one of three is live
    ("gpg", [1, 1, 3, 3], [0] * 4, [1, 1], {}),
    ("maxrl", [1, 0, 0, 0, 2, 2, 2, 2], [3, -1, -1, -1] + [0] * 4, [0, 1], dict(group=4)),
    ("maxrl", [0, 0, 3, 1], [0, 0, 0.5, -0.5], [1, 0], {}),
    ("lite_ppo", [1, 0, 5, 1, 2, 2], [x / STD for x in (0.5, -0.5, 2, -2, 0, 0)], [0, 0, 1], {}),
    ("lite_ppo", [1] * 4, [0] * 4, [1, 1], {})])
def test_credit_by_hand(name, rewards, wanted, dead, given):
    adv, found = credit(name, rewards, **given)
    assert adv == approx(wanted) and found == dead


def test_soft_overlong_punishes_the_last_step_alone(monkeypatch):
    """The replies of a row that was cut off count, too."""
    mask = tensors(OLD)[1]
    cfg, module = variant("soft_overlong", dict(BUFFER=0.5), max_new=4, supervision="process")
    monkeypatch.setattr(module, "unpunished", lambda reward, *rest: reward)
    mask[2, 4] = False                          # of four tokens the third is a reply's
    found = grpo.advantages(torch.zeros(mask.shape), mask, None, mask, None, None, cfg)
    less = torch.tensor([0.25, 0, 0.5, 0])      # of rows of 3, 1, 4 and 2 tokens
    assert torch.equal(found, -less[:, None] * passes.last_tokens(mask))


def test_opo_of_groups_of_unequal_size():
    """Each as if it were alone."""
    cfg, _ = variant("opo")
    mask = torch.arange(4) < torch.tensor([2, 1, 3, 1, 3])[:, None]
    ends, groups = passes.last_tokens(mask), torch.tensor([0, 0, 0, 1, 1])
    parts = torch.tensor([1.0, 0, 2, 1, 0])[:, None] * ends, ends, groups, mask, 0 * mask.float()
    whole = grpo.advantages(*parts, None, cfg)[0]
    last = grpo.advantages(*[x[3:] for x in parts], None, cfg)[0]
    assert torch.allclose(whole[3:], last) and last[0, 0] == 0.75


@mark.parametrize("name, given", [
    ("remax", dict(baseline="group")), ("remax", dict(adv_scale="batch")),
    *((name, dict(supervision="process")) for name in "remax opo gmpo maxrl".split()),
    ("maxrl", dict(baseline="none")), ("pass_at_k", dict(adv_scale="none"))], ids=str)
def test_settings_that_a_variant_is_not_meant_for(name, given):
    """Scores would be others, or summed over a row."""
    cfg, _ = variant(name, **given)
    with raises(UserError, match=f"--algo {name} does not take --{min(given)}"):
        config.check_used(cfg, arithmetic)


@mark.parametrize("given", [
    dict(algo="gspo", supervision="process"), dict(algo="ppo", ratio="sequence")], ids=str)
def test_one_ratio_of_a_row_has_one_advantage(given):
    with raises(UserError, match="--ratio sequence would give each token its row's mean"):
        config.check_used(grpo.make_config(**given), arithmetic)
    config.check_used(grpo.make_config(**given | dict(algo="gspo_token")), arithmetic)


@mark.parametrize("name, rewards, says", [
    ("beta_norm", [1, 2], "is 2,.*0 to 1"), ("beta_norm", [-0.5, 1], "is -0.5,.*0 to 1"),
    ("maxrl", [-1, 1], "is -1,.*negative"), ("pass_at_k", [1] * 4, "more than K, 4")])
def test_rewards_for_which_a_variant_is_not_meant(name, rewards, says):
    with raises(UserError, match=f"{name}: .*{says}"):
        credit(name, rewards, len(rewards))


@mark.parametrize("right", range(9))
def test_pass_at_k_is_the_z_score_over_all_subsets(right):
    """A completion has the mean over its own; a little for a wrong one makes it not right."""
    rewards, subsets = [1.0] * right + [0.0] * (8 - right), [*itertools.combinations(range(8), 4)]
    value = [max(rewards[i] for i in subset) for subset in subsets]
    std = statistics.pstdev(value)
    adv, dead = credit("pass_at_k", rewards, 8)
    for i in range(8):
        own = mean([v for v, subset in zip(value, subsets) if i in subset])
        assert adv[i] == approx((own - mean(value)) / std if std else 0, abs=1e-6)
    a_little = credit("pass_at_k", [x + 0.1 * (i % 2) for i, x in enumerate(rewards)], 8)
    assert dead == [std == 0] and a_little == (adv, dead)


def test_beta_norm():
    """With moments by hand."""
    def density(q):
        scale = math.gamma(a + b) / math.gamma(a) / math.gamma(b)
        return scale * q ** (a - 1) * (1 - q) ** (b - 1)
    p = [0.75, 0.25, 0.5, 0.0]
    size = mean(p) * (1 - mean(p)) / statistics.pvariance(p) - 1
    a, b = 1 + mean(p) * size / 3, 1 + (1 - mean(p)) * size / 3
    adv, dead = credit("beta_norm", [i < 4 * q for q in p for i in range(4)], 4)
    want = [((i < 4 * q) - q) / density(q) if q else 0 for q in p for i in range(4)]
    assert adv == approx(want, rel=1e-5) and dead == [False, False, False, True]
def rolled(adv=(0.0, 0.0, 0.0, 0.0), rewards=(1.0, 1.0, 1.0, 1.0), **components):
    """A rollout of four rows, two groups, of which the last was cut off."""
    mask, finished = tensors(OLD)[1], torch.tensor([True, True, True, False])
    parts = {name: torch.tensor(x) for name, x in components.items()}
    return batch_of(mask, finished=finished, components=parts, problems=[*"aabb"],
                    adv=torch.tensor(adv)[:, None] * mask,
                    reward=passes.last_tokens(mask) * torch.tensor(rewards)[:, None])


def assert_advantages(batch, wanted, whitened=False):
    """One of each row, or each token, and 0 elsewhere."""
    tokens = sum((x if isinstance(x, list) else [x] * n
                  for x, n in zip(wanted, batch.mask.sum(1).tolist())), [])
    if whitened:
        std = statistics.pstdev(tokens)
        tokens = [(x - mean(tokens)) / std for x in tokens]
    assert batch.adv[batch.mask].tolist() == approx(tokens, abs=1e-5)
    assert not batch.adv[~batch.mask].any()


def rollout_of(name, batch, stats={}, **stubs):
    """What a file makes of a Batch and statistics from grpo.py."""
    cfg, module = variant(name, stubs, max_new=4)
    of_grpo = next(x for x, value in vars(module).items() if value is config.REPLACED["rollout"])
    setattr(module, of_grpo, lambda *given: (batch, dict(stats)))
    return grpo.rollout(agent_of(cfg, step=7), ["a", "b"], random.Random(0))


@mark.parametrize("parts, wanted", [
    (dict(format=[9.0, 0, 1, 1]), [1 + 1, -1 - 1, 1 + 0, -1 + 0]),
    (dict(format=[9.0, 0, 1, 1], reward=[5.0, 5, 2, 7]), [0, 0, -1, 1])])
def test_gdpo(parts, wanted):
    """Each part has a z-score of its own, in a pair 1 or -1; one named reward alone counts."""
    batch, stats = rollout_of("gdpo", rolled(correct=[1.0, 0, 1, 0], **parts), {"x": 1})
    assert_advantages(batch, wanted, whitened=True)
    assert stats == {"x": 1}
    with raises(UserError, match="not take --kl reward"):
        grpo.rollout(agent_of(variant("gdpo", kl="reward")[0]), [], None)


@mark.parametrize("name", ["pass_at_k", "maxrl", "beta_norm"])
def test_a_reward_of_0_or_1_has_no_kl(name):
    """All right completions once counted as wrong."""
    cfg = variant(name, kl="reward")[0]
    with raises(UserError, match=f"--algo {name} does not take --kl reward"):
        grpo.group_scores(torch.ones(1, 8, 2), torch.ones(1, 8, 2) > 0, cfg)


@mark.parametrize("ref, critic", [(None, None), ("a model", None), (None, "a model")])
def test_overlong_filter(ref, critic):
    """A row that was cut off is in no loss, with a KL or a critic neither; logs have it."""
    batch, seen = rolled(adv=[1.0, 0.0, 1.0, 1.0]), []
    cfg, _ = variant("overlong_filter", dict(of_all=lambda agent, batch, rng: seen.append(batch)))
    agent, before = agent_of(cfg, ref=ref, critic=critic), batch.mask.clone()
    grpo.update(agent, batch, None)
    assert torch.equal(seen[0].mask[:3], before[:3]) and not seen[0].mask[3].any()
    assert torch.equal(batch.mask, before)
    learns = grpo.has_gradient(agent, seen[0])
    assert learns.tolist() == [True, bool(ref or critic), True, bool(ref or critic)]


GAPS = [[0.1, 0.9, -0.4], [0.3], [0.5, 0.4, -0.1, 0.0], [900.0, 0.0]]


@mark.parametrize("name, weights", [
    ("tis", [[min(math.exp(min(x, 9)), 2) for x in row] for row in GAPS]),
    ("mis", [math.exp(0.6), math.exp(0.3), 0, 0])])
def test_weights_between_sampler_and_trainer(name, weights):
    """Of tokens at most 2; of completions 0 above 2, also where they overflow. With one update
    they are of the trainer's own pass."""
    batch = rolled(adv=[1.0] * 4)
    batch.old_logp = tensors(GAPS)[0]
    variant(name, dict(unweighted=lambda agent, batch, *more: batch))
    assert_advantages(grpo.total_loss(None, batch, None, None), weights)
    assert_advantages(batch, [1] * 4)
    for epochs in (1, 2):               # with several the rollout has what it needs
        agent, _ = of_letters(name, epochs=epochs)
        agent.sampler = copy.deepcopy(agent.policy)
        letters.shaken(agent.sampler, 0.2, 5)
        batch, _ = grpo.rollout(agent, letters.PROBLEMS[:2], random.Random(0))
        want, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
        assert_close(batch.old_logp, want if epochs == 1 else batch.logp, rtol=0, atol=1e-5)


def test_soft_overlong_logs_what_counts():
    """Of at most 4 tokens with a buffer of 2: 1 of 2 too many costs a quarter."""
    stats = {"reward": 0.625, "length": 2.5}
    batch = rolled(rewards=[1.0, 0.0, 1.0, 0.5])
    logged, stats = rollout_of("soft_overlong", batch, stats, BUFFER=0.5)
    assert logged.reward.sum(1).tolist() == [0.75, 0.0, 0.5, 0.5]
    assert stats == {"reward": 0.4375, "length": 2.5}


def test_dapo_punishes_each_rollout_of_a_step():
    """Those of dynamic sampling are punished one at a time: statistics are means over all."""
    variant("dapo")
    of_step, of_one = (sys.modules[f"experiments.variants.{name}"]
                       for name in ("dynamic_sampling", "soft_overlong"))
    assert grpo.rollout is of_step.rollout and of_step.one_rollout is of_one.rollout
    assert grpo.advantages is of_one.advantages and grpo.train_step is of_step.train_step


def test_the_tokens_with_the_highest_entropy():
    cfg, _ = variant("entropy_tokens", temperature=1.3)
    batch, chosen = rolled(adv=[1.0, 1.0, -1.0, 0.0]), []
    batch.ids, before = torch.randint(0, 200, (4, 6)), batch.adv.clone()
    for policy in (tiny_model(0, 3.0), tiny_model(1, 3.0)):     # and after an update
        entropy, agent = torch.full((4, 6), -1.0), agent_of(cfg, policy=policy)
        for i, t in batch.mask.nonzero().tolist():
            h = policy(batch.ids[i, None, :t])[0, -1]
            p = (h @ policy.embed_tokens.weight.T / 1.3).softmax(-1)
            entropy[i, t] = -(p * p.log()).sum().item()
        chosen.append(entropy >= entropy[batch.mask].sort().values[-2])         # 2 of 10
        adv = grpo.minibatch(agent, batch, torch.arange(4)).adv
        assert torch.equal(adv, chosen[-1] * before) and torch.equal(batch.adv, before)
    assert not torch.equal(*chosen)


def test_remax(monkeypatch):
    """The baseline is the greedy completion's reward, also if it was cut off."""
    def generate(agent, problems, group, rng=None):
        assert (problems, group, rng) == (["a", "b"], 1, None)
        parts = dict(correct=torch.tensor([0.0, 1.0]), format=torch.tensor([0.25, 1.0]))
        finished = torch.tensor([True, False])
        return batch_of(torch.ones(2, 3) > 0, finished=finished, components=parts)
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(grpo.reward, "TRUNCATED_REWARD", 0.5)
    batch, _ = rollout_of("remax", rolled(adv=[1.0, 0.25, 0.4, 1.0]))   # the third has a KL of 0.1
    assert_advantages(batch, [0.75, 0, -0.1, 0.5])


def test_vineppo():
    """The first and the third row have two steps. After a last one the value is whether the row is
    right, whatever its label."""
    batch, value = rolled(correct=[1.0, 0.0, 1.0, 1.0]), torch.full((4, 6), 0.125)
    batch.ends[0, 3] = batch.ends[2, 2] = True
    batch.mask[2, 3] = False                    # a token of a reply
    value[0, 3], value[2, 2] = 0.25, 0.5

    def labels(agent, generate, batch, *given):
        assert generate is grpo.generate and given == ("vineppo 7", 4)
        return value
    got, _ = rollout_of("vineppo", batch, rollout_labels=labels)
    half, quarter = 0.5, 0.25
    first, third = [quarter - half] * 2 + [1 - quarter], [half - 1] + [1 - half] * 2
    assert_advantages(got, [first, [0 - half], third, [0.0, 0.0]], whitened=True)


def test_distillation():
    """An advantage is log pi_teacher - log pi_student of the token, at the temperature."""
    cfg, module = variant("distillation", **letters.SMALL | dict(temperature=1.3))
    agent = module.of_student(cfg, letters.TASK, letters.ENCODING, letters.new_policy(cfg))
    agent.teacher = copy.deepcopy(agent.policy)
    letters.shaken(agent.teacher, 0.1, 1)
    batch, stats = grpo.rollout(agent, letters.PROBLEMS[:2], random.Random(0))
    assert "reward" in stats and "dead_groups" not in stats
    wanted = []
    for row in letters.rows_of(batch, agent):
        of_both = [letters.logps(gpt, row, 1.3) for gpt in (agent.teacher, agent.policy)]
        wanted.append([(a - b).item() for a, b in zip(*of_both)])
    assert_advantages(batch, wanted)
    assert batch.adv.abs().max() > 0.1 and len({*map(len, wanted)}) > 1


def test_a_teacher_has_the_students_tokenizer(tmp_path):
    teacher = tiny_model()
    pretrained.save(teacher, tmp_path, byte_encoding().files)
    cfg, _ = variant("distillation", dict(TEACHER=str(tmp_path)), dtype="float32")
    agent = grpo.new_agent(cfg, arithmetic, byte_encoding(), tiny_model(1))
    assert torch.equal(weights(agent.teacher), weights(teacher))
    ranks = {bytes([255 - i]): i for i in range(256)}
    mine = Encoding("mine", r"[\s\S]", ranks, {"<|endoftext|>": 256}, [256], {})
    for encoding, size in (mine, 257), (byte_encoding(), 258):
        with raises(UserError, match=f"^{tmp_path}: .*vocabulary"):
            grpo.new_agent(cfg, arithmetic, encoding, tiny_model(1, vocab_size=size))


# ---------- sampling and references

@mark.parametrize("ranks, given", [
    (1, dict(prompts=1, group=2)), (1, dict(prompts=2, group=4, adv_scale="batch")),
    (2, dict(prompts=2, group=4))], ids=str)
def test_dynamic_sampling(ranks, given, monkeypatch):
    """Until all ranks have their share of live groups, in three rollouts and five problems; live
    ones first. What is kept is whitened alone. Statistics are of all rollouts."""
    def one_rollout(agent, problems, rng):
        made[dist.rank()].append((problems, *real(agent, problems, rng)))
        return made[dist.rank()][-1][1:]
    monkeypatch.setattr(letters.TASK, "reward", lambda *given: {    # a share is not all right
        "correct": letters.rule(*given)["correct"] / 2})
    agents = [of_letters("dynamic_sampling", **given)[0] for _ in range(ranks)]
    module = sys.modules["experiments.variants.dynamic_sampling"]
    real, module.one_rollout, counts = module.one_rollout, one_rollout, set()
    own, G = given["prompts"] // ranks, given["group"]
    monkeypatch.setattr(report.Clock, "speeds", lambda clock, batch: {      # in a second
        "rollout_tok_s": dist.all_reduce(batch.mask.sum()).item()})
    for step in range(1, 7):
        made = [[] for _ in agents]
        found = letters.on_ranks(
            ranks, lambda rank: grpo.train_step(agents[rank], letters.PROBLEMS, step), monkeypatch)
        n, enough = len(made[0]), []
        sampled = sum(batch.mask.sum().item() for of_rank in made for _, batch, _ in of_rank)
        asked = [id(p) for of_rank in made for problems, *_ in of_rank for p in problems]
        assert len({*asked}) == len(asked) == n * given["prompts"]
        for (batch, stats), of_rank in zip(found, made):
            groups = [(x, slice(G * g, G * g + G)) for _, x, _ in of_rank for g in range(own)]
            live = [len({*x.components["correct"][rows].tolist()}) > 1 for x, rows in groups]
            first = [groups[i] for i in sorted(range(n * own), key=lambda i: not live[i])[:own]]
            assert batch.texts == sum((x.texts[rows] for x, rows in first), [])
            adv = torch.cat([x.adv[rows][x.mask[rows]] for x, rows in first])
            if "adv_scale" in given:
                adv = (adv - adv.mean()) / adv.std(correction=0)
            assert_close(batch.adv[batch.mask], adv, rtol=1e-5, atol=1e-5)
            assert stats["rollout_tok_s"] == approx(sampled) and "@sampled" not in stats
            assert stats["reward"] == approx(mean([x["reward"] for *_, x in of_rank]))
            enough.append([sum(live[:own * k]) >= own for k in range(n + 1)])
        *before, now = [all(of_ranks) for of_ranks in zip(*enough)]
        assert not any(before) and (now or n == min(3, 5 // given["prompts"]))
        counts.add((n, now))
    assert len(counts) > 1 and ((3, False) in counts or own * ranks > 1)


def weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().float()


def test_a_moving_reference_in_bfloat16():
    """Each tensor moves, by less than bfloat16 can tell; the head too, tied in the policy."""
    def one_step(agent, problems, step):
        for p in agent.policy.parameters():
            p.data += 1e-4
    (cfg, _), policy = variant("moving_reference", dict(one_step=one_step)), tiny_model(1)
    policy.amp = torch.bfloat16
    agent = agent_of(cfg, policy=policy, ref=pretrained.frozen(policy))
    before = {name: p.float().clone() for name, p in agent.ref.named_parameters()}
    grpo.train_step(agent, [], 1)
    new = dict(policy.named_parameters())
    for name, p in agent.ref.named_parameters():
        want = before[name].lerp(new.get(name, new["embed_tokens.weight"]), 0.01)
        assert torch.equal(p, want) and not torch.equal(p, before[name])


def test_a_periodic_reference():
    def one_step(agent, problems, step):
        assert torch.equal(weights(agent.ref), before)
        agent.policy.norm.weight.data += 1
    cfg, _ = variant("periodic_reference", dict(one_step=one_step))
    agent = agent_of(cfg, ref=tiny_model(2))
    for step in (24, 25, 26, 50):
        before = weights(agent.ref)
        grpo.train_step(agent, [], step)
        want = weights(agent.policy) if step in (25, 50) else before
        assert torch.equal(weights(agent.ref), want)


@mark.parametrize("kl, factor", [(0.05, 1), (0.055, 1.01), (1.0, 1.02), (0.0, 0.98)])
def test_beta_is_steered_to_the_target(kl, factor):
    """By a tenth of the relative error, of which at most a fifth counts."""
    cfg, _ = variant("adaptive_kl", dict(one_step=lambda *given: ("batch", {"kl": kl})))
    agent = agent_of(cfg, beta=0.5)
    assert grpo.train_step(agent, [], 1) == ("batch", {"kl": kl})
    assert agent.beta == approx(0.5 * factor)


@mark.parametrize("name", ["adaptive_kl", "moving_reference", "periodic_reference"])
def test_what_needs_a_kl(name):
    for given in (dict(kl="watch"), dict(beta=0.0)):
        cfg, _ = variant(name, **given)
        with raises(UserError, match=f"{name} needs --beta and --kl loss or reward"):
            grpo.train_step(agent_of(cfg), [], 1)


# ---------- other rows than those just sampled

def of_letters(name, **changes):
    """An Agent for the task of test_oracle.py; and the module."""
    cfg, module = variant(name, **letters.SMALL | dict(epochs=1, minibatches=1) | changes)
    return letters.new_agent(cfg), module


def judged_by(module, name, plan):
    """Of the rows that a file's own name for `collect` gives, the plan says which are right."""
    real, plan, made = getattr(module, name), iter(plan), []

    def collect(*given):
        batch = real(*given)
        batch.components["correct"] = torch.tensor(next(plan), dtype=torch.float32)
        made.append(batch)
        return batch
    setattr(module, name, collect)
    return made


def assert_begun(agent, batch, row, ids):
    """A completion begins with given ids, which are judged, but not trained on; the sampler's
    log-probabilities are the trainer's."""
    prompt = letters.ENCODING.encode_prompt(batch.problems[row].prompt)
    start, n = len(prompt), len(ids)
    judged, sampled = (x[row].nonzero()[:, 0].tolist() for x in (batch.judged, batch.mask))
    assert batch.ids[row, :start + n].tolist() == prompt + ids and batch.start[row] == start
    assert judged == [*range(start, start + n), *sampled] == [*range(start, start + len(judged))]
    assert len(sampled) >= 1 and len(judged) <= letters.SMALL["max_new"]
    said = map(letters.ENCODING.token_bytes, batch.ids[row, judged].tolist())
    assert batch.texts[row] == b"".join(said).decode()
    assert_judged(batch, row)
    logp, _ = token_logps(agent.policy, batch.ids[[row]], batch.mask[[row]], 1.0)
    assert_close(logp[0], batch.logp[row], rtol=0, atol=2e-5)


def assert_judged(batch, row):
    right = letters.rule(batch.problems[row], batch.texts[row])["correct"]
    assert batch.components["correct"][row] == right * batch.finished[row].item()


@torch.no_grad()
def test_tree():
    """Groups of five: three trunks, and a branch of each of the first two."""
    agent, _ = of_letters("tree", group=5, prompts=4)
    batch, kept, differ = grpo.collect(agent, letters.PROBLEMS[:4], random.Random(0)), [], []
    assert batch.problems == [problem for problem in letters.PROBLEMS[:4] for _ in range(5)]
    for row, start in enumerate(batch.start.tolist()):
        trunk = row - 3 if row % 5 > 2 else row
        n = (batch.judged[row] & ~batch.mask[row]).sum().item()
        assert_begun(agent, batch, row, batch.ids[trunk, start:start + n].tolist())
        if trunk < row:
            assert n < batch.mask[trunk].sum()
            kept.append(n)
            differ.append(n > 0 and not torch.equal(batch.ids[row], batch.ids[trunk]))
        else:
            assert n == 0
    assert len({*kept}) > 2 and any(differ)


def test_demonstrations():
    """They come last, and count in their group's mean; one without a stop token is cut off."""
    agent, module = of_letters("demonstrations", group=4, prompts=3)
    stops = iter([[8], [9], []])
    ended = dict(encode_demonstration=lambda text: [*map("abcdefg".index, text)] + next(stops))
    agent.encoding = SimpleNamespace(**vars(agent.encoding) | ended)
    batch, _ = grpo.rollout(agent, letters.PROBLEMS[:3], random.Random(0))
    assert batch.on_policy.tolist() == [True] * 12 + [False] * 3
    assert batch.finished[12:].tolist() == [True, True, False]
    logp, _ = token_logps(agent.policy, batch.ids, batch.mask, 1.0)
    assert_close(batch.logp, logp, rtol=0, atol=2e-5)
    assert batch.texts[12:] == [module.shown(agent, p) for p in batch.problems[12:]]
    assert {*batch.groups.bincount().tolist()} == {5}
    for i in range(3):
        rows = (batch.groups == i).nonzero()[:, 0].tolist()
        earned, adv = (x.sum(1)[rows] for x in (batch.reward, batch.adv / batch.mask.sum(1, True)))
        spread = statistics.pstdev(earned.tolist())
        assert_close(adv, (earned - earned.mean()) / (spread or 1), rtol=1e-4, atol=1e-5)
    assert batch.adv.any()


def test_replay():
    """Steps with the same two prompts: nothing is known of a dead one; the other is dead; none;
    both, after a newer right row."""
    (agent, module), (a, _, b, *_), batches = of_letters("replay", group=3), letters.PROBLEMS, []
    plan = [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0.5, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6]
    made = judged_by(module, "present", plan)
    for problems in ([a, b], [b, a], [a, b], [b, a]):
        batches.append(grpo.rollout(agent, problems, random.Random(len(made)))[0])
        letters.shaken(agent.policy, 0.3, len(made))
    assert len(agent.state["ids"]) == 2
    sources = {(1, 5): (0, 1), (2, 2): (0, 1), (3, 2): (2, 5), (3, 5): (0, 1)}  # step, row: whose
    for (step, batch), row in itertools.product(enumerate(batches), range(6)):
        old_step, old = sources.get((step, row), (step, row))
        source, on = made[old_step], batch.mask[row]
        for name in ("ids", "mask", "logp"):
            x, y = getattr(batch, name)[row].tolist(), getattr(source, name)[old].tolist()
            assert x[:len(y)] == y[:len(x)] and not any(x[len(y):] + y[len(x):]), name
        for name in ("finished", "texts", "problems"):
            assert getattr(batch, name)[row] == getattr(source, name)[old]
        assert batch.on_policy[row] == (old_step == step)
        if batch.on_policy.all():
            assert batch.old_logp is None
        else:
            assert torch.equal(batch.old_logp[row][on], batch.logp[row][on])
        if old_step < step:
            assert_judged(batch, row)           # again, by the rule


WRONG, RIGHT = "bbcdefgg", "abcdefgg"


@torch.no_grad()
@mark.parametrize("step, shown, hint", [
    (1, [WRONG, RIGHT], "abcd"), (2, [WRONG, RIGHT], "abc"), (4, [WRONG, RIGHT], "a"),
    (4, [WRONG], ""), (1, [2 * RIGHT + "a"], "abcde")])
def test_hints(step, shown, hint, monkeypatch):
    """Of two groups the second is dead. Half of a right text at first; a token is left at least."""
    agent, module = of_letters("hints", group=3, steps=2, iterations=2)
    monkeypatch.setattr(module.turns, "demonstration", lambda task, problem, rng: [
        drawn.append(rng.getstate()) or rng.choice(shown), "", "bb"][:3 if step < 4 else 1])
    drawn = []
    module.rewards_of = lambda *given: [{"correct": 0.5 + (x[0][0] == "a") / 2} for x in given[2]]
    made, agent.step = judged_by(module, "unaided", [[1, 0, 0, 0, 0, 0]]), step
    batch = grpo.collect(agent, letters.PROBLEMS[:2], random.Random(step))
    source = dist.rng(agent.cfg, f"hint {letters.PROBLEMS[1].prompt}", step)
    assert drawn[0] == source.getstate()
    for row in (3, 4, 5):
        assert_begun(agent, batch, row, letters.ENCODING.encode_prompt(hint))
    unaided, n = made[0], made[0].ids.size(1)
    assert torch.equal(batch.ids[:3, :n], unaided.ids[:3])
    assert batch.components["correct"][:3].tolist() == [1, 0, 0]
    assert batch.texts[3:] != unaided.texts[3:] and len({*batch.texts[3:]}) > 1
    agent.task = None
    with raises(UserError, match="the task has no function demonstration"):
        grpo.collect(agent, [], random)


def test_stale(monkeypatch):
    """A step samples with the weights from which the one before the last was updated."""
    def updated(agent, *given):
        assert torch.equal(weights(agent.sampler), weights(began[-1]))
        return update(agent, *given)
    (agent, _), began, update = of_letters("stale", steps=4, group=4), [], grpo.update
    monkeypatch.setattr(grpo, "update", updated)
    for step in (1, 2, 3, 4):
        began.append(copy.deepcopy(agent.policy))
        batch, stats = grpo.train_step(agent, letters.PROBLEMS, step)
        found = [token_logps(gpt, batch.ids, batch.mask, 1.0)[0] for gpt in began]
        near = [(logp - batch.logp).abs().max().item() < 2e-5 for logp in found]
        assert near == [i == max(0, step - 3) for i in range(step)]
        assert torch.equal(batch.old_logp, batch.logp) and not batch.on_policy.any()
        assert stats["mismatch"] == 0 and stats["grad_norm"] > 0
        kept = {name.split("@")[1] for name in agent.state}
        assert kept == {str(i) for i in range(max(1, step - 2), step + 1)}


def test_raft(monkeypatch):
    """Of four groups two earn something, one the same for all: the likelihood of two rows. Rows of
    a group may be apart."""
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)
    agent, _ = of_letters("raft", prompts=4)
    before = copy.deepcopy(agent.policy)
    batch, _ = grpo.rollout(agent, letters.PROBLEMS[:4], random.Random(0))
    rewards = torch.tensor([0.5, 1, 1, -1, 0, 0, 0.5, 0.5, 0.5, 0, 0, 0])[:, None]
    batch.reward, batch.adv = batch.ends * rewards, -7.0 * batch.mask       # adv does not matter
    agent.opt = torch.optim.SGD(agent.policy.parameters(), 1.0)
    apart = passes.select(batch, torch.arange(12).view(4, 3).T.flatten(), batch.ids.size(1))
    with torch.no_grad():       # as a task's code may leave it
        grpo.update(agent, apart, random.Random(0))
    ids, mask = batch.ids[[1, 6]], batch.mask[[1, 6]]
    (-token_logps(before, ids, mask, 1.0)[0].sum() / mask.sum()).backward()
    for p, q in zip(agent.policy.parameters(), before.parameters()):
        assert_close(q - p, q.grad, rtol=1e-4, atol=1e-5)


# ---------- in a run

TINY = dict(init="", difficulty=1, n_layer=1, n_embd=32, warm_steps=0, warm_lr=1e-2, steps=2,
            prompts=3, group=5, max_new=9, samples=1, held_out=4, lr=1e-3)


@fixture(scope="module")
def start(tmp_path_factory):
    """The folder out/arithmetic of a run that has ended after its warm start."""
    out = tmp_path_factory.mktemp("start") / "out" / "arithmetic"
    grpo.train(grpo.make_config(**TINY | dict(warm_steps=25, steps=0, out=str(out))))
    return str(out)


@fixture
def bare(monkeypatch):
    """Runs are short, and rewards differ within groups."""
    monkeypatch.setattr(report, "evaluate", lambda *given: {"greedy": 0.0})
    monkeypatch.setattr(report, "refresh", lambda *given: None)
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {
        "correct": float(sum(map(ord, text)) % 2)})


@mark.slow
@mark.parametrize("name", sorted(path.stem for path in config.VARIANTS.glob("*.py")))
def test_each_runs_for_two_steps(name, start, bare, tmp_path, monkeypatch):
    monkeypatch.chdir(f"{start}/../..")             # where distillation finds a teacher
    given = dict(init=start, epochs=2, minibatches=2, dtype="bfloat16", out=str(tmp_path))
    cfg, _ = variant(name, **TINY | given)
    grpo.train(cfg)
    module = sys.modules[f"experiments.variants.{name}"]
    own = {x for x, value in vars(module).items() if hasattr(grpo, x)
           and getattr(value, "__module__", "") == module.__name__}
    assert own <= {*config.REPLACED}        # one that is only defined would not be missed
    metrics = records(tmp_path / "metrics.jsonl")[1:]
    assert len(metrics) == 2 and all(0 < m["finished"] < 1 for m in metrics)
    assert all(math.isfinite(x) for m in metrics for x in m.values())
    assert max(m["grad_norm"] for m in metrics) > 0
    assert (module.SETTINGS | given).items() <= vars(cfg).items()


@mark.slow
def test_a_kl_in_the_reward_has_the_adapted_beta():
    cfg = grpo.make_config(**letters.SMALL | dict(kl="reward", baseline="none", adv_scale="none"))
    agent, found = letters.new_agent(cfg), []
    for beta in (0.0, cfg.beta, 3 * cfg.beta):
        agent.beta = beta
        found.append(grpo.rollout(agent, letters.PROBLEMS[:cfg.prompts], random.Random(0))[0].adv)
    none, one, three = found
    assert (one - none).abs().max() > 1e-3
    assert_close(three - none, 3 * (one - none), rtol=1e-4, atol=1e-6)


@mark.parametrize("name", [
    "adaptive_kl", "distillation", "hints", "replay", "stale", "tree", "vineppo"])
def test_a_resumed_run_has_its_state_and_an_adapted_beta(name, start, bare, tmp_path, monkeypatch):
    """To the byte, as one that was not stopped: with problems that come again."""
    monkeypatch.chdir(f"{start}/../..")
    problems, held_out = arithmetic.problems(difficulty=1)
    monkeypatch.setattr(arithmetic, "problems", lambda difficulty=1: (problems[:4], held_out))
    found = []
    for stops in ([3], [1, 2, 3]):
        out, saved = tmp_path / str(stops), None
        cfg, _ = variant(name, **TINY | dict(init=start, out=str(out), steps=stops[0]))
        for steps in stops:
            if steps != stops[0]:
                cfg, saved = checkpoint.resume(out, grpo.Config, {"steps": steps})
            grpo.train(cfg, saved=saved)
            files.LOCK.close()
        found.append(checkpoint.load(out, grpo.Config)[1])
    whole, again = found
    assert any("state." in x for x in whole.tensors) == (name in ("replay", "stale"))
    assert whole.beta == again.beta and (whole.beta != cfg.beta) is (name == "adaptive_kl")
    assert same(whole.tensors, again.tensors)


def test_what_is_idle_is_noted(tmp_path, capsys):
    path = algorithm_in(tmp_path, advantages="pass")
    own = dict(kl="none", init="", max_turns=3)
    for more, idle in ((own, "beta, --estimator, --lam, --max_turns"),
                       (dict(kl="watch", init="x", n_layer=7, n_embd=9), "beta, --lam, --n_layer")):
        cfg = grpo.make_config(algo=path, beta=0.5, lam=0.5, estimator="k2", **more)
        config.check_used(cfg, SimpleNamespace(DEFAULTS={"n_embd": 9}))
        said = capsys.readouterr().out.splitlines()
        assert said[-2].endswith(" replaces advantages in grpo.py")
        assert said[-1] == f"note: without effect in this run: --{idle}"


# ---------- a file of one's own

def algorithm_in(folder, *lines, settings="", **functions):
    """The path of a file with lines and functions, which replace those of grpo.py."""
    lines = ["import grpo", f"SETTINGS = dict({settings})", *lines]
    for function, body in functions.items():
        lines += [f"def {function}(*given):", f"    {body}", f"grpo.{function} = {function}"]
    (folder / "my file.py").write_text("\n".join(lines))
    return str(folder / "my file.py")


@mark.slow
def test_an_algorithm_of_ones_own(start, bare, tmp_path, capsys):
    given = dict(settings="kl='none', beta=0.5, steps=4", gae="return 'mine'")
    path, out = algorithm_in(tmp_path, **given), tmp_path / "a run"
    grpo.main(flags(TINY | dict(algo=path, init=start, kl="loss", out=out)))
    cfg, _ = checkpoint.load(out, grpo.Config)
    assert (cfg.algo, cfg.beta, cfg.kl, cfg.steps) == (path, 0.5, "loss", 2)
    program, file, *command = shlex.split(report.resume_command(cfg))
    assert (program, file) == ("python", "grpo.py")
    grpo.main([*command, "--beta", "0.5"])                          # nothing to do
    go_on = ["--resume", "--out", str(out), "--steps", "3"]
    assert f"has --algo {path}, not grpo" in fault(capsys, *go_on, "--algo", "grpo")
    algorithm_in(tmp_path, "# changed", **given)
    grpo.main([*command, "--steps", "3"])
    assert checkpoint.load(out, grpo.Config)[0] == replace(cfg, steps=3)
    (tmp_path / "my file.py").unlink()      # it is not needed for what follows
    grpo.main(["--ask", "1*\x07", "--init", str(out)])
    assert capsys.readouterr().out.splitlines()[-1].startswith("1*\\x07")


def test_what_an_imported_variant_does_not_use_is_refused(tmp_path):
    path = tmp_path / "two.py"
    path.write_text("from experiments.variants import gdpo\nSETTINGS = {}\n")
    cfg = grpo.make_config(algo=str(path), supervision="process")
    with raises(UserError, match="two.py does not take --supervision process"):
        config.check_used(cfg, arithmetic)


@mark.parametrize("name, text, says", [
    ("bad.py", "def surrogate(): pass", "needs a dict named SETTINGS"),
    ("bad.py", "import grpo\nSETTINGS = {}\ngrpo.surogate = print", "no surogate to replace"),
    ("bad.py", "SETTINGS = dict(betta=0)", "did you mean --beta"),
    ("bad.py", "SETTINGS = dict(kl='nothing')", "--kl must be one of"),
    ("none.py", "", "no file none.py"), ("CISPO", "", "did you mean cispo"),
    ("dpao", "", "did you mean dapo"),
    ("bad.py", "SETTINGS = {}\nFIXED = ['clip_hi']", "did you mean --clip_high"),
    *((name, "", "there are grpo, .*docs/variants.md") for name in ("reinforce++", "dpo", "sppo")),
    (3, "", "no --algo 3: "),
    ("", "", "there are grpo, reinforce, .*, cispo, ")])
def test_files_and_names_of_no_algorithm(name, text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(text)
    with raises(UserError, match=says):
        grpo.make_config(algo=name)
    assert not hasattr(grpo, "surogate")


def test_the_command_line_itself_may_be_what_is_replaced(start, tmp_path, monkeypatch, capsys):
    """Where grpo.py is __main__, the file's `import grpo` is no second one."""
    same = "raise UserError(sys.modules['__main__'] is grpo)"
    path = algorithm_in(tmp_path, "import sys\nfrom data import UserError", generate=same)
    monkeypatch.setitem(sys.modules, "grpo", grpo)      # as it is afterwards
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--eval_only", "--init", start, "--algo", path])
    with raises(SystemExit):
        runpy.run_path(str(ROOT / "grpo.py"), run_name="__main__")
    assert capsys.readouterr().err == "error: True\n"
    config.REPLACED.clear()                             # they were the other module's


def owner():
    return grpo.surrogate.__module__.rpartition(".")[2]


def test_a_run_has_its_own_functions_alone(start, bare, tmp_path, monkeypatch):
    """Whatever settings were made since; what else replaced a function stays."""
    cfg, _ = variant("cispo", **TINY | dict(init=start, steps=0, out=str(tmp_path)))
    variant("sapo")
    assert owner() == "sapo"
    grpo.train(cfg)
    assert owner() == "cispo"
    assert variant("dual_clip")[1].clipped_once.__module__ == "grpo"    # a file builds on grpo.py
    grpo.make_config()
    assert owner() == "grpo"
    monkeypatch.setattr(grpo, "surrogate", print)
    variant("luspo")
    grpo.make_config()
    assert grpo.surrogate is print


def test_a_file_that_changed_or_fails(tmp_path):
    """It is read again, as what it imports is; what it replaced is put back."""
    line = "from experiments.variants import luspo"
    for n in (1, 22, 333):
        path = algorithm_in(tmp_path, line, settings=f"steps={n}", surrogate=f"return {n}")
        assert grpo.make_config(algo=path).steps == n == grpo.surrogate()
        assert grpo.token_weights.__module__ == "experiments.variants.luspo"
    algorithm_in(tmp_path, "grpo.surrogate = print", "1 / 0")
    with raises(ZeroDivisionError):
        grpo.make_config(algo=path)
    grpo.make_config()
    assert owner() == "grpo"
