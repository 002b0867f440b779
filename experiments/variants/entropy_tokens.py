"""The tokens with the highest entropy (arXiv 2506.01939): only a SHARE of the tokens of a minibatch
has an advantage: those at which the current policy is the least sure, as in the authors' code.
That takes a forward pass more.
"""
from dataclasses import replace

import grpo
from experiments.variants.clip_cov import highest
from run import passes

SETTINGS = dict(kl="none", clip_high=0.28, loss_mean="token")
SHARE = 0.2


def minibatch(agent, batch, rows):
    part = passes.select(batch, rows, batch.ids.size(1))
    entropy = passes.entropies(agent.policy, part, agent.cfg)
    adv = batch.adv.clone()
    adv[rows] = part.adv * highest(entropy, part.mask, SHARE)
    return replace(batch, adv=adv)


grpo.minibatch = minibatch
