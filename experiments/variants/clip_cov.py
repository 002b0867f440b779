"""Clip-Cov (arXiv 2505.22617, eq. 11): a SHARE of all tokens, drawn among those whose covariance
of advantage and log-probability is in a range, has no gradient: such tokens lower the entropy the
most. Means are over a micro-batch, whose size is fixed. The clip at 0 and 2, and the mean over
tokens, are from the authors' scripts.
"""
import torch

import grpo
from grpo import surrogate as clipped_once

SETTINGS = dict(clip_low=1, clip_high=1, kl="none", loss_mean="token", micro_tokens=2048)
FIXED = ["micro_tokens"]
SHARE, LOW, HIGH = 2e-4, 1.0, 5.0


def surrogate(logp, old_logp, adv, mask, cfg):
    gain, clipped = clipped_once(logp, old_logp, adv, mask, cfg)
    cov = (adv - adv[mask].mean()) * (logp - logp[mask].mean()).detach()
    found = ((cov > LOW) & (cov < HIGH) & mask & ~clipped).nonzero()
    same = torch.Generator().manual_seed(len(found))     # as before, in a resumed run
    found = found[torch.randperm(len(found), generator=same)[:max(1, int(SHARE * mask.sum()))]]
    kept = torch.ones_like(adv).index_put(tuple(found.T), torch.zeros(()).to(adv))
    return gain * kept, clipped | (kept == 0)


grpo.surrogate = surrogate
