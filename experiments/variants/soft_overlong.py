"""DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): in the last BUFFER of the tokens that a completion may have,
its reward falls linearly, by at most FACTOR: half the difference between right and wrong, as in the paper, where rewards
are -1 and 1 and it falls by 1.
"""
import grpo
from grpo import advantages as unpunished
from run.passes import last_tokens

SETTINGS = dict(kl="none")
BUFFER, FACTOR = 0.2, 0.5


def advantages(reward, ends, mask, penalty, value, cfg):
    over = mask.sum(1, True) - (1 - BUFFER) * cfg.max_new
    less = FACTOR * (over / (BUFFER * cfg.max_new)).clamp(0, 1)
    return unpunished(reward - less * last_tokens(mask), ends, mask, penalty, value, cfg)


grpo.advantages = advantages
