"""GMPO (arXiv 2507.20673, eq. 4): the geometric mean of a completion's token ratios, each clipped
first, in logarithms, on the side where PPO clips. The weight of a completion is 1, as in the
paper; a token's is 1/|o|.
"""
import grpo

SETTINGS = dict(kl="none", clip_low=0.4, clip_high=0.4)
FIXED = ["supervision"]


def surrogate(ratio, logp, adv, mask, cfg):
    x = ratio.log()
    near = x.clamp(-cfg.clip_low, cfg.clip_high)
    kept = (adv > 0) * x.minimum(near) + (adv <= 0) * x.maximum(near)
    mean = (kept * mask).sum(1, True) / mask.sum(1, True).clamp(min=1)
    return mean.exp() * adv, (kept != x) & mask


grpo.surrogate = surrogate
