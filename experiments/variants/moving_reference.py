"""A reference that follows the policy, as an exponential moving average (WARP, arXiv 2406.16768;
TR-DPO, 2404.09656). Under autocast it becomes float32, since in bfloat16 its steps would round
away; a resume rounds it once.
"""
import torch

import grpo
from data import UserError
from grpo import train_step as one_step

SETTINGS = dict(kl="loss")
RATE = 0.01


def train_step(agent, problems, step):
    if not agent.cfg.applies_kl:
        raise UserError("--algo moving_reference needs --beta and --kl loss or reward")
    found = one_step(agent, problems, step)
    agent.ref.to(agent.policy.norm.weight.dtype)
    new = dict(agent.policy.named_parameters())
    with torch.no_grad():
        for name, p in agent.ref.named_parameters():
            p.lerp_(new.get(name, new["embed_tokens.weight"]), RATE)    # it may be tied
    return found


grpo.train_step = train_step
