"""GDPO (arXiv 2601.05242, eq. 4 to 6): each component of the reward is normalised within its
group before they are added up, so that combinations with the same sum stay apart; the sum is
whitened over the batch, here over its tokens, as in the authors' code for verl. For rewards by
the task's rule.
"""
import torch

import grpo
from data import UserError
from grpo import rollout as of_the_sum
from grpo import whiten

SETTINGS = dict(kl="none")
FIXED = ["baseline", "adv_scale", "supervision", "reward"]


def rollout(agent, problems, rng):
    cfg = agent.cfg
    if cfg.kl == "reward":
        raise UserError("--algo gdpo does not take --kl reward")
    batch, stats = of_the_sum(agent, problems, rng)
    total = torch.zeros_like(batch.reward)
    for x in grpo.reward.counted(batch.components).values():
        total += grpo.scores_of_rows(x[:, None] * batch.ends, batch.ends, batch.groups, cfg)[0]
    batch.adv = whiten(total.sum(1, keepdim=True) * batch.mask, batch.mask)
    return batch, stats


grpo.rollout = rollout
