"""GPG (arXiv 2504.02546, eq. 9): no ratio, no clip, no std; advantages are multiplied by (groups / live groups), since a
dead group adds nothing to the sum and would only make the step smaller.
"""
from grpo import advantages as of_groups

SETTINGS = dict(kl="none", adv_scale="none", loss_mean="token")


def advantages(reward, ends, mask, penalty, value, cfg):
    adv, returns, dead = of_groups(reward, ends, mask, penalty, value, cfg)
    return adv * len(dead) / (~dead).sum().clamp(min=1), returns, dead


def surrogate(ratio, adv, logp, mask, cfg):
    return adv * logp, ratio != ratio
