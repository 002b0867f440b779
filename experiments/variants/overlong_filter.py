"""DAPO's overlong filtering (arXiv 2503.14476, 3.4): a completion that was cut off is left out of the loss."""
from grpo import rollout as of_all

SETTINGS = dict(kl="none")


def rollout(agent, problems, rng):
    batch, stats = of_all(agent, problems, rng)
    batch.mask = batch.mask & batch.finished[:, None]
    return batch, stats
