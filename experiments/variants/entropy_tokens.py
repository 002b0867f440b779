"""The tokens with the highest entropy (arXiv 2506.01939): only a SHARE of a rollout's tokens (with several processes, of
each one's), those at which the policy was the least sure, has an advantage. (The authors' code chooses a share of each
micro-batch.) It computes the logits of a whole rollout at once.
"""
import torch

import grpo
from grpo import rollout as of_all_tokens

SETTINGS = dict(kl="none", clip_high=0.28, loss_mean="token")
SHARE = 0.2


def rollout(agent, problems, rng):
    batch, stats = of_all_tokens(agent, problems, rng)
    with torch.no_grad():
        logp = (agent.policy.head(agent.policy(batch.ids)) / agent.cfg.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).roll(1, 1)[batch.mask]           # before a token
    batch.adv[batch.mask] *= entropy >= entropy.quantile(1 - SHARE)
    return batch, stats


grpo.rollout = rollout
