"""Truncated importance sampling (fengyao.notion.site/off-policy-rl, 2025): where the sampler
computes in another precision, each token's surrogate is weighted by min(pi_trainer / pi_sampler,
C).
"""
from dataclasses import replace
import grpo
from grpo import rollout as of_sampler
from grpo import total_loss as unweighted

SETTINGS = dict(kl="none")
C = 2.0


def rollout(agent, problems, rng):
    batch, stats = of_sampler(agent, problems, rng)
    if batch.old_logp is None:          # with one update the loss needs none, but the weights do
        batch.old_logp, _ = grpo.logps(agent.policy, batch, agent.cfg)
    return batch, stats


def total_loss(agent, batch, weight, tokens):
    ratio = (batch.old_logp - batch.logp).exp()
    return unweighted(agent, replace(batch, adv=batch.adv * ratio.clamp(max=C)), weight, tokens)


grpo.rollout = rollout
grpo.total_loss = total_loss
