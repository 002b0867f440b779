"""A KL coefficient that is adapted towards a TARGET (Ziegler et al., arXiv 1909.08593, 2.2):
after each step beta grows or shrinks by a tenth of the relative error of the measured KL, which
is bounded. Beta is part of a checkpoint.
"""
import grpo
from data import UserError
from grpo import train_step as one_step

SETTINGS = dict(kl="reward")
TARGET = 0.05           # nats per token
RATE, BOUND = 0.1, 0.2


def train_step(agent, problems, step):
    if not agent.cfg.applies_kl:
        raise UserError("--algo adaptive_kl needs --beta and --kl loss or reward")
    batch, stats = one_step(agent, problems, step)
    error = min(max(stats["kl"] / TARGET - 1, -BOUND), BOUND)
    agent.beta *= 1 + RATE * error
    return batch, stats


grpo.train_step = train_step
