"""Two-sided clip (INTELLECT-2, arXiv 2505.07291, eq. 2): the ratio itself is cut at DELTA before
PPO's minimum, so that a token with a negative advantage whose ratio is huge has no gradient. Dual
clip is the same with another bound.
"""
import torch

import grpo

SETTINGS = dict(kl="loss", beta=0.001)         # section 4.1
DELTA = 4.0


def surrogate(ratio, logp, adv, mask, cfg):
    cut = ratio.clamp(max=DELTA)
    unclipped, clipped = cut * adv, cut.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    return torch.minimum(unclipped, clipped), (clipped < unclipped) | (ratio > DELTA) & (adv < 0)


grpo.surrogate = surrogate
