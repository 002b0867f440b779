"""Two-sided clip (INTELLECT-2, arXiv 2505.07291, eq. 2): the ratio itself is cut at DELTA before PPO's minimum, so that a
token with a negative advantage whose ratio is huge has no gradient. Dual clip is the same with another bound.
"""
import grpo
from grpo import surrogate as clipped_once

SETTINGS = dict(kl="loss", beta=0.001)         # section 4.1
DELTA = 4.0


def surrogate(ratio, adv, logp, mask, cfg):
    gain, clipped = clipped_once(ratio.clamp(max=DELTA), adv, logp, mask, cfg)
    return gain, clipped | (ratio > DELTA) & (adv < 0)


grpo.surrogate = surrogate
