"""RAFT (arXiv 2304.06767): maximum likelihood of the best completion of each group, the first of
equally good ones. A group that earns nothing has none."""
import torch
import grpo
from grpo import update as of_all
from run.passes import select

SETTINGS = dict(kl="none", loss_mean="token")
FIXED = ["baseline", "adv_scale", "kl", "clip_low", "clip_high", "ratio"]

def update(agent, batch, rng):
    best, which = batch.reward.sum(1).view(-1, agent.cfg.group).max(1)      # (P,)
    rows = which + torch.arange(0, len(batch.ids), agent.cfg.group).to(which)
    rows = rows[best > 0].cpu()
    return of_all(agent, select(batch, rows, batch.ids.size(1)), rng)

def surrogate(ratio, logp, adv, mask, cfg):
    return logp, torch.zeros_like(mask)

grpo.update = update
grpo.surrogate = surrogate
