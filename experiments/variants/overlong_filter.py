"""DAPO's overlong filtering (arXiv 2503.14476, 3.4): a completion that was cut off is left out of
the loss, though not of its group's mean and std.
"""
from dataclasses import replace

import grpo
from grpo import update as of_all

SETTINGS = dict(kl="none")


def update(agent, batch, rng):
    return of_all(agent, replace(batch, mask=batch.mask & batch.finished[:, None]), rng)


def has_gradient(agent, batch):
    everything = agent.ref is not None or agent.critic is not None
    return (batch.finished & (batch.adv.any(1) | everything)).cpu()


grpo.update = update
grpo.has_gradient = has_gradient
