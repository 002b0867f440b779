"""ReMax (arXiv 2310.10505, eq. 5): the baseline of a prompt is the reward of its greedy completion, which costs one more
completion. One sample a prompt is enough there; here a group has several. For rewards by the task's rule.
"""
import torch

import grpo
from grpo import rollout as of_samples

SETTINGS = dict(kl="none", baseline="none", adv_scale="none")


def rollout(agent, problems, rng):
    batch, stats = of_samples(agent, problems, rng)
    greedy = grpo.generate(agent, problems, torch.zeros(len(problems), 1, agent.cfg.max_new), n_greedy=1)
    baseline = sum(greedy.components.values()).repeat_interleave(agent.cfg.group)
    batch.adv = (batch.reward.sum(1) - baseline)[:, None] * batch.mask
    return batch, stats
