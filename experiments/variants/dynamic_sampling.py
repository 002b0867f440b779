"""DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): other prompts are rolled out, up to TRIES
rollouts in all, until a step's worth of groups is live, neither all right nor all wrong; where
too few are found, dead ones fill the step (the authors' code tries ten rollouts, then stops).
With several processes each fills its own share.
"""
from dataclasses import replace

import torch

import grpo
from grpo import whiten
from grpo import rollout as one_rollout
from grpo import train_step as one_step
from run import dist
from run.passes import joined

SETTINGS = dict(kl="none")
TRIES = 3


def train_step(agent, problems, step):
    agent.all = problems
    batch, stats = one_step(agent, problems, step)
    kept = dist.all_reduce(batch.mask.sum()).item()
    stats["rollout_tok_s"] *= stats.pop("@sampled") / kept       # it counted the kept ones alone
    return batch, stats


def rollout(agent, problems, rng):
    found, live, own = [], torch.zeros(0, dtype=torch.bool), len(problems)
    number = {id(problem): i for i, problem in enumerate(agent.all)}
    tried, sampler = set(), agent
    whitens = agent.cfg.adv_scale == "batch"
    if whitens:                         # in the end, without what is dropped
        sampler = replace(agent, cfg=replace(agent.cfg, adv_scale="none"))
    while len(found) < TRIES and dist.all_reduce((live.sum() < own).int()).item():
        found.append(one_rollout(sampler, problems, rng))
        right = found[-1][0].components["correct"].view(own, -1).cpu()
        live = torch.cat((live, right.amin(1) < right.amax(1)))
        tried |= {*sum(dist.gather([number[id(problem)] for problem in problems]), [])}
        others = [problem for i, problem in enumerate(agent.all) if i not in tried]
        if len(others) < own * dist.ranks():
            break
        problems = dist.of_rank(rng.sample(others, own * dist.ranks()))
    order = (~live).int().sort(stable=True).indices[:own]
    rows = (order[:, None] * agent.cfg.group + torch.arange(agent.cfg.group)).flatten()
    stats = {name: sum(s[name] for _, s in found) / len(found) for name in found[0][1]}
    rolled = [batch for batch, _ in found]
    stats["@sampled"] = dist.all_reduce(sum(batch.mask.sum() for batch in rolled)).item()
    batch = joined(rolled, rows)
    if whitens:
        batch.adv = whiten(batch.adv, batch.mask)
    return batch, stats


grpo.train_step = train_step
grpo.rollout = rollout
