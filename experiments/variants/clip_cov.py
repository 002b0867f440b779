"""Clip-Cov (arXiv 2505.22617, eq. 11): a SHARE of a minibatch's tokens, drawn among those whose
covariance of advantage and log-probability is in a range, has no gradient: such tokens lower the
entropy the most. The clip at 0 and 2, and the mean over tokens, are from the authors' scripts.
Takes a forward pass more.
"""
from dataclasses import replace

import torch

import grpo
from run import dist, passes

SETTINGS = dict(clip_low=1, clip_high=1, kl="none", loss_mean="token")
SHARE, LOW, HIGH = 2e-4, 1.0, 5.0


def minibatch(agent, batch, rows):
    part = passes.select(batch, rows, batch.ids.size(1))
    on = part.mask
    logp = old_logp = part.logp
    if part.old_logp is not None:
        old_logp = part.old_logp
        logp, _ = grpo.logps(agent.policy, part, agent.cfg)
    _, clipped = grpo.surrogate(logp, old_logp, part.adv, on, agent.cfg)
    adv_mean, _ = dist.mean_and_std(part.adv[on])
    logp_mean, _ = dist.mean_and_std(logp[on])
    cov = (part.adv - adv_mean) * (logp - logp_mean)
    found = (cov > LOW) & (cov < HIGH) & on & ~clipped
    number, total = passes.token_numbers(batch)
    u = dist.uniform(dist.rng(agent.cfg, "clip_cov", agent.step), total)[number[rows]]
    drawn = torch.where(found.cpu(), u, -1)
    dropped = found & passes.highest(drawn, on, SHARE)
    adv = batch.adv.clone()
    adv[rows] = torch.where(dropped, 0, part.adv)
    return replace(batch, adv=adv)


grpo.minibatch = minibatch
