"""MaxRL (arXiv 2602.02710): rewards of 0 and 1 minus their mean, divided by it: an unbiased
gradient of the log-likelihood of a right answer, to the order that the group can estimate. Hard
problems weigh the most.
"""
import torch

import grpo
from data import UserError

SETTINGS = dict(kl="none")


def group_scores(reward, ends, cfg):
    r = reward.sum(1).view(-1, cfg.group)                                               # (P, G)
    if r.min() < 0:
        raise UserError(f"--algo maxrl: a reward is {r.min():g}, and must not be negative")
    mean, dead = r.mean(1, keepdim=True), r.amax(1) == r.amin(1)
    score = torch.where(dead[:, None], 0, (r - mean) / mean.clamp(min=1e-6))
    return score.view(-1, 1) * ends, dead


grpo.group_scores = group_scores
