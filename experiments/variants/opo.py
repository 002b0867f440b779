"""OPO (arXiv 2505.23585, eq. 8): the baseline of a group is the mean of its rewards weighted by
length, which minimizes the gradient's variance if gradients grow with the length. On-policy: no
clip, no std, no KL; a mean over tokens.
"""
import grpo
from run.passes import grid

SETTINGS = dict(kl="none", adv_scale="none", loss_mean="token", clip_low=1e9, clip_high=1e9)
FIXED = ["baseline", "adv_scale", "supervision"]


def advantages(reward, ends, groups, mask, penalty, value, cfg):
    rows, place = grid(groups, mask.device)             # (P, G), (B,)
    exists = rows >= 0
    r, n = (reward - penalty).sum(1)[rows], mask.sum(1)[rows] * exists
    score = r - (r * n).sum(1, True) / n.sum(1, True)
    dead = ((r == r[:, :1]) | ~exists).all(1)
    score = score.masked_fill(dead[:, None], 0).flatten()[place]
    return score[:, None] * mask, None, dead


grpo.advantages = advantages
