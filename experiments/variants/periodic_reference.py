"""A reference that is set to the policy every EVERY steps (TR-DPO's hard update, arXiv
2404.09656; ProRL, 2505.24864)."""
import grpo
from grpo import train_step as one_step
from run import dist

SETTINGS = dict(kl="loss")
EVERY = 25


def train_step(agent, problems, step):
    found = one_step(agent, problems, step)
    if agent.ref and step % EVERY == 0:
        dist.copy_weights(agent.ref, agent.policy)
    return found


grpo.train_step = train_step
