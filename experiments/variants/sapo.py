"""SAPO (arXiv 2511.20347, eq. 5 and 6): in place of the clip a soft gate, 4 / tau * sigmoid(tau *
(r - 1)), whose slope is 1 at r = 1 and falls off at both sides, faster for negative advantages.
"""
import torch

import grpo

SETTINGS = dict(kl="none")
FIXED = ["clip_low", "clip_high"]
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05


def surrogate(ratio, logp, adv, mask, cfg):
    tau = (adv > 0) * TAU_POSITIVE + (adv <= 0) * TAU_NEGATIVE
    return (tau * (ratio - 1)).sigmoid() * 4 / tau * adv, torch.zeros_like(mask)


grpo.surrogate = surrogate
