"""BNPO (arXiv 2506.02864): rewards of 0 and 1 minus the group's mean p, divided by a Beta density
at p. Its parameters are 1 + a/3 and 1 + b/3, where Beta(a, b) has the mean and variance of p over
the batch: of all densities it leaves the least variance.
"""
import torch

import grpo
from data import UserError
from model import double
from run import dist

SETTINGS = dict(kl="none")
FIXED = ["baseline", "adv_scale", "supervision"]


def group_scores(reward, ends, cfg):
    if cfg.kl == "reward":
        raise UserError("--algo beta_norm does not take --kl reward")
    r, exists = double(reward.sum(2)), ends.any(2)                                      # (P, G)
    if r.min() < 0 or r.max() > 1:
        wrong = r.min() if r.min() < 0 else r.max()
        raise UserError(f"--algo beta_norm: a reward is {wrong:g}, and must be from 0 to 1")
    p = r.sum(1, True) / exists.sum(1, True)                                            # (P, 1)
    mean, std = dist.mean_and_std(p.flatten())
    mean, var = mean.clamp(1e-3, 1 - 1e-3), std.square().clamp(min=1e-4)
    size = (mean * (1 - mean) / var - 1).clamp(min=1e-3)                                # a + b
    beta = torch.distributions.Beta(1 + mean * size / 3, 1 + (1 - mean) * size / 3)
    density = beta.log_prob(p.clamp(1e-3, 1 - 1e-3)).exp()
    dead = ((r == r[:, :1]) | ~exists).all(1)
    score = torch.where(dead[:, None], 0, (r - p) / density).to(reward)
    return score[..., None] * ends, dead


grpo.group_scores = group_scores
