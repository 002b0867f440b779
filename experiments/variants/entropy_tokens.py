"""The tokens with the highest entropy (arXiv 2506.01939): only a SHARE of the tokens of a
micro-batch, whose size is fixed, has an advantage: those at which the current policy is the least
sure, as in the authors' code. That takes a forward pass more.
"""
from dataclasses import replace

import torch

import grpo
from grpo import total_loss as of_all_tokens

SETTINGS = dict(kl="none", clip_high=0.28, loss_mean="token", micro_tokens=2048)
FIXED = ["micro_tokens"]
SHARE = 0.2


def total_loss(agent, batch, weight, n_tokens):
    with torch.no_grad():
        h = agent.policy(batch.ids)
        logp = agent.policy.head(h / agent.cfg.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).roll(1, 1)                       # before a token
    if batch.mask.any():        # none if a rank has no rows
        least = entropy[batch.mask].quantile(1 - SHARE)
        batch = replace(batch, adv=batch.adv * (entropy >= least))
    return of_all_tokens(agent, batch, weight, n_tokens)


def has_gradient(agent, batch):
    return torch.ones(len(batch.ids), dtype=torch.bool)     # all rows count in the share


grpo.total_loss = total_loss
grpo.has_gradient = has_gradient
