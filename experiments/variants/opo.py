"""OPO (arXiv 2505.23585, eq. 8): the baseline of a group is the mean of its rewards weighted by
length, which minimizes the gradient's variance if gradients grow with the length. On-policy: no
clip, no std, no KL; a mean over tokens.
"""
import grpo

SETTINGS = dict(kl="none", adv_scale="none", loss_mean="token", clip_low=1e9, clip_high=1e9)
FIXED = ["baseline", "adv_scale"]


def advantages(reward, ends, mask, penalty, value, cfg):
    r, n = (reward - penalty).sum(1).view(-1, cfg.group), mask.sum(1).view(-1, cfg.group)
    score = r - (r * n).sum(1, True) / n.sum(1, True)
    dead = r.amax(1) == r.amin(1)
    return score.masked_fill(dead[:, None], 0).view(-1, 1) * mask, None, dead


grpo.advantages = advantages
