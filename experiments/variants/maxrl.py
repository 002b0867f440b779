"""MaxRL (arXiv 2602.02710): rewards of 0 and 1 minus their mean, divided by it: an unbiased
gradient of the log-likelihood of a right answer, to the order that the group can estimate. Hard
problems weigh the most.
"""
import torch

import grpo
from data import UserError

SETTINGS = dict(kl="none")
FIXED = ["baseline", "adv_scale", "supervision"]


def group_scores(reward, ends, cfg):
    if cfg.kl == "reward":
        raise UserError("--algo maxrl does not take --kl reward")
    r, exists = reward.sum(2), ends.any(2)                                              # (P, G)
    if r.min() < 0:
        raise UserError(f"--algo maxrl: a reward is {r.min():g}, and must not be negative")
    mean = r.sum(1, True) / exists.sum(1, True)
    dead = ((r == r[:, :1]) | ~exists).all(1)
    score = torch.where(dead[:, None], 0, (r - mean) / mean.clamp(min=1e-6))
    return score[..., None] * ends, dead


grpo.group_scores = group_scores
