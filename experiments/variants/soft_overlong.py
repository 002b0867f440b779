"""DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): in the last BUFFER of the tokens
that a completion may have, its reward falls linearly, by at most FACTOR: half the difference
between right and wrong, as in the paper, where rewards are -1 and 1 and it falls by 1.
"""
import grpo
from grpo import advantages as unpunished
from grpo import rollout as of_task
from run import dist
from run.passes import last_tokens, row_lengths

SETTINGS = dict(kl="none")
BUFFER, FACTOR = 0.2, 0.5


def punishment(mask, cfg):
    length = row_lengths(mask)[:, None] - mask.int().argmax(1, True)    # replies count, too
    over = length - (1 - BUFFER) * cfg.max_new
    return FACTOR * (over / (BUFFER * cfg.max_new)).clamp(0, 1) * last_tokens(mask)


def advantages(reward, ends, groups, mask, penalty, value, cfg):
    return unpunished(reward - punishment(mask, cfg), ends, groups, mask, penalty, value, cfg)


def rollout(agent, problems, rng):
    batch, stats = of_task(agent, problems, rng)
    less = punishment(batch.mask, agent.cfg)                # for the logs, too
    batch.reward = batch.reward - less
    stats["reward"] -= dist.means({"less": less.sum(1)})["less"]
    return batch, stats


grpo.advantages = advantages
grpo.rollout = rollout
