"""GDPO (arXiv 2601.05242, eq. 4 to 6): each component of the reward is normalised within its group before they are added
up, so that combinations with the same sum stay apart; the sum is whitened over the batch, here over its tokens, as in the
authors' code for verl. For rewards by the task's rule.
"""
import grpo
from data import UserError
from grpo import rollout as of_the_sum
from run.batches import whiten

SETTINGS = dict(kl="none")


def rollout(agent, problems, rng):
    cfg = agent.cfg
    if cfg.supervision == "process" or cfg.learns_reward or cfg.kl == "reward":
        raise UserError("--algo gdpo has no --supervision process, --reward model or --kl reward")
    batch, stats = of_the_sum(agent, problems, rng)
    parts = [grpo.outcome_scores(x, cfg.group)[0] for x in batch.components.values()]
    batch.adv = whiten(sum(parts)[:, None] * batch.mask, batch.mask)
    return batch, stats


grpo.rollout = rollout
