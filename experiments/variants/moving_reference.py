"""A reference that follows the policy, as an exponential moving average (WARP, arXiv 2406.16768; TR-DPO, 2404.09656)."""
import torch

from grpo import train_step as one_step

SETTINGS = {}
RATE = 0.01


def train_step(agent, problems, step):
    found = one_step(agent, problems, step)
    if agent.ref:
        agent.ref.to(agent.policy.norm.weight.dtype)            # in bfloat16 an average would stand still
        new = dict(agent.policy.named_parameters())
        with torch.no_grad():
            for name, p in agent.ref.named_parameters():        # its head is a matrix of its own
                p.lerp_(new["embed_tokens.weight" if name not in new else name], RATE)
    return found
