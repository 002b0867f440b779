"""A reference that is set to the policy every EVERY steps (TR-DPO's hard update, arXiv
2404.09656; ProRL, 2505.24864)."""
import grpo
from data import UserError
from grpo import train_step as one_step
from run import dist

SETTINGS = dict(kl="loss")
EVERY = 25


def train_step(agent, problems, step):
    if not agent.cfg.applies_kl:
        raise UserError("--algo periodic_reference needs --beta and --kl loss or reward")
    found = one_step(agent, problems, step)
    if step % EVERY == 0:
        dist.copy_weights(agent.ref, agent.policy)
    return found


grpo.train_step = train_step
