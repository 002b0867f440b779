"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): the importance weight is clipped, held constant.
The paper has no lower bound and prints no upper one; ScaleRL (2510.13786) recommends 5.
"""
import grpo

SETTINGS = dict(kl="none", loss_mean="token", clip_low=1, clip_high=4)


def surrogate(ratio, logp, adv, mask, cfg):
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    return ratio.clamp(low, high).detach() * adv * logp, ((ratio < low) | (ratio > high)) & mask


grpo.surrogate = surrogate
