"""MaxRL (arXiv 2602.02710): rewards of 0 and 1 minus their mean, divided by it: an unbiased gradient of the log-likelihood
of a right answer, to the order that the group can estimate. Hard problems weigh the most.
"""
import torch

import grpo
from data import UserError

SETTINGS = dict(kl="none")


def outcome_scores(reward, group):
    r = reward.view(-1, group)
    if r.min() < 0:
        raise UserError(f"--algo maxrl: a reward is {r.min():g}, and must not be negative")
    mean, dead = r.mean(1, keepdim=True), r.amax(1) == r.amin(1)
    return torch.where(dead[:, None], 0, (r - mean) / mean.clamp(min=1e-6)).flatten(), dead


grpo.outcome_scores = outcome_scores
