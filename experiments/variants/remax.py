"""ReMax (arXiv 2310.10505, eq. 5): REINFORCE, with the reward of a prompt's greedy completion as
its baseline, which costs one more completion. One sample per prompt (`--group 1`) is enough. For
rewards by the task's rule.
"""
import grpo
from grpo import rollout as of_samples

SETTINGS = dict(kl="none", baseline="none", adv_scale="none", loss_mean="token", clip_low=1e9,
                clip_high=1e9)
FIXED = ["baseline", "adv_scale", "supervision", "reward"]


def rollout(agent, problems, rng):
    batch, stats = of_samples(agent, problems, rng)
    greedy = grpo.generate(agent, problems, 1)
    greedy.reward, _ = grpo.reward.of_rule(agent, greedy)
    baseline = grpo.reward.cap_truncated(greedy).sum(1)
    batch.adv = batch.adv - baseline.repeat_interleave(agent.cfg.group)[:, None] * batch.mask
    return batch, stats


grpo.rollout = rollout
