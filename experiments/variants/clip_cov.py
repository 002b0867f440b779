"""Clip-Cov (arXiv 2505.22617, eq. 11): a SHARE of a minibatch's tokens, drawn among those whose
covariance of advantage and log-probability is in a range, has no gradient: such tokens lower the
entropy the most. The clip at 0 and 2, and the mean over tokens, are from the authors' scripts.
"""
from dataclasses import replace

import torch
from torch.nn.functional import pad

import grpo
from run import dist, passes

SETTINGS = dict(clip_low=1, clip_high=1, kl="none", loss_mean="token")
SHARE, LOW, HIGH = 2e-4, 1.0, 5.0


def covariance(agent, part):
    """Of each token (n, T), around the minibatch's means, and log pi: a forward pass more."""
    logp = part.logp
    if part.old_logp is not None:
        logp, _ = grpo.logps(agent.policy, part, agent.cfg)
    means = [dist.mean_and_std(x[part.mask])[0] for x in (part.adv, logp)]
    return (part.adv - means[0]) * (logp - means[1]), logp


def numbers(batch):
    """Of the columns of rows, (B, T), as if one rank had all, and how many there are."""
    number, total = dist.numbered(batch.groups)
    T = dist.largest(batch.ids.size(1))
    return number[:, None] * T + torch.arange(batch.ids.size(1)), total * T


def highest(x, mask, share):
    """Those tokens in mask (n, T), a share of those of all ranks, at least one, whose x is the
    highest, as a mask."""
    x = x.to(mask.device)
    every = torch.cat(dist.gather(x[mask].cpu()))
    n = max(1, int(share * len(every)))
    least = pad(every, (0, 1), value=-torch.inf).topk(n).values[-1]
    return mask & (x >= least.to(x.device))


def minibatch(agent, batch, rows):
    part = passes.select(batch, rows, batch.ids.size(1))
    cov, logp = covariance(agent, part)
    old = part.logp if part.old_logp is None else part.old_logp
    log_ratio = torch.where(part.mask, logp - old, 0)
    ratio = grpo.importance_ratio(log_ratio, part.mask, agent.cfg)
    _, clipped = grpo.surrogate(ratio, logp, part.adv, part.mask, agent.cfg)
    found = (cov > LOW) & (cov < HIGH) & part.mask & ~clipped
    number, total = numbers(batch)
    u = dist.uniform(dist.rng(agent.cfg, "clip_cov", agent.step), total)[number[rows]]
    drawn = torch.where(found.cpu(), u, -1)
    adv = batch.adv.clone()
    adv[rows] = part.adv * ~(found & highest(drawn, part.mask, SHARE))
    return replace(batch, adv=adv)


grpo.minibatch = minibatch
