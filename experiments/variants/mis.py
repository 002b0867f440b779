"""Masked importance sampling of completions (yingru.notion.site, 2025; verl's rollout
correction): a completion is weighted by its pi_trainer / pi_sampler, and left out where that is
more than C. verl also leaves out completions whose weight is below 0.5.
"""
from dataclasses import replace

import torch

import grpo
from grpo import rollout as of_sampler
from grpo import total_loss as unweighted

SETTINGS = dict(kl="none")
C = 2.0


def rollout(agent, problems, rng):
    batch, stats = of_sampler(agent, problems, rng)
    if batch.old_logp is None:          # with one update the loss needs none, but the weights do
        batch.old_logp, _ = grpo.logps(agent.policy, batch, agent.cfg)
    return batch, stats


def total_loss(agent, batch, weight, tokens):
    ratio = ((batch.old_logp - batch.logp) * batch.mask).sum(1, True).exp()
    adv = batch.adv * torch.where(ratio <= C, ratio, 0)
    return unweighted(agent, replace(batch, adv=adv), weight, tokens)


grpo.rollout = rollout
grpo.total_loss = total_loss
