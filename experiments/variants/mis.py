"""Masked importance sampling of completions (yingru.notion.site, 2025; verl's rollout correction): a completion is weighted
by its pi_trainer / pi_sampler, and left out where that is more than C. verl also leaves out completions whose weight is
below 0.5.
"""
from dataclasses import replace

import torch

from grpo import total_loss as unweighted

SETTINGS = dict(kl="none")
C = 2.0


def total_loss(agent, batch, weight, tokens):
    ratio = ((batch.old_logp - batch.logp) * batch.mask).sum(1, True).exp()
    return unweighted(agent, replace(batch, adv=batch.adv * torch.where(ratio <= C, ratio, 0)), weight, tokens)
