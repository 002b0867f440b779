"""KL-Cov (arXiv 2505.22617, eq. 12): the SHARE of tokens with the largest covariance of advantage
and log-probability is penalized by |log ratio|, as in the authors' code; there is no clip. The
covariance's means are over a micro-batch, whose size is fixed; the loss is a mean over tokens.
"""
import torch

import grpo

SETTINGS = dict(kl="none", loss_mean="token", micro_tokens=2048)
FIXED = ["clip_low", "clip_high", "micro_tokens"]
SHARE, COEFFICIENT = 2e-3, 1.0


def surrogate(logp, old_logp, adv, mask, cfg):
    ratio = grpo.importance_ratio(logp, old_logp, mask, cfg)
    cov = (adv - adv[mask].mean()) * (logp - logp[mask].mean()).detach()
    ranked = cov[mask].sort(descending=True).values             # none if a rank has no rows
    held = mask & (cov >= ranked[max(1, int(SHARE * len(ranked))) - 1]) if len(ranked) else mask
    moved = ratio.log().abs()
    moved = torch.where(moved > 1e-4, moved, 0)         # below, it is rounding
    return ratio * adv - held * COEFFICIENT * moved, held


def has_gradient(agent, batch):
    return torch.ones(len(batch.ids), dtype=torch.bool)     # all rows may be held back


grpo.surrogate = surrogate
grpo.has_gradient = has_gradient
