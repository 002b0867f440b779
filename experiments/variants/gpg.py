"""GPG (arXiv 2504.02546, eq. 9): no ratio, no clip, no std; advantages are multiplied by (groups
/ live groups), since a dead group adds nothing to the sum and would only make the step smaller.
Its authors also sample again until half of the groups are live.
"""
import torch

import grpo
from grpo import advantages as of_groups
from run import dist

SETTINGS = dict(kl="none", adv_scale="none", loss_mean="token")
FIXED = ["clip_low", "clip_high", "ratio"]


def advantages(reward, ends, groups, mask, penalty, value, cfg):
    adv, returns, dead = of_groups(reward, ends, groups, mask, penalty, value, cfg)
    groups, live = dist.all_reduce(torch.tensor([len(dead), int((~dead).sum())])).tolist()
    return adv * groups / max(live, 1), returns, dead


def surrogate(ratio, logp, adv, mask, cfg):
    return adv * logp, torch.zeros_like(mask)


grpo.advantages = advantages
grpo.surrogate = surrogate
