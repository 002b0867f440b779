"""Dual clip (arXiv 1912.09729, eq. 5): with a negative advantage a token's surrogate is at least
C times the advantage, however large the ratio; PPO's clip does not bound that side.
"""
import torch

import grpo
from grpo import surrogate as clipped_once

SETTINGS = dict(kl="none")
C = 3.0


def surrogate(ratio, logp, adv, mask, cfg):
    gain, clipped = clipped_once(ratio, logp, adv, mask, cfg)
    far = (adv < 0) & (ratio > C)
    return torch.where(far, C * adv, gain), clipped | far


grpo.surrogate = surrogate
