"""DAPO's overlong filtering (arXiv 2503.14476, 3.4): a completion that was cut off is left out of
the loss, though not of its group's mean and std.
"""
from dataclasses import replace

import grpo
from grpo import update as of_all

SETTINGS = dict(kl="none")


def update(agent, batch, rng):
    return of_all(agent, replace(batch, mask=batch.mask & batch.finished[:, None]), rng)


grpo.update = update
