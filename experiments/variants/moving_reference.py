"""A reference that follows the policy, as an exponential moving average (WARP, arXiv 2406.16768; TR-DPO, 2404.09656)."""
import torch

from grpo import train_step as one_step

SETTINGS = {}
RATE = 0.01


def train_step(agent, problems, step):
    found = one_step(agent, problems, step)
    with torch.no_grad():
        for ref, p in zip(agent.ref.parameters() if agent.ref else (), agent.policy.parameters()):
            ref.lerp_(p, RATE)
    return found
