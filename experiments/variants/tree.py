"""Branching, the simplest form of rollouts as a tree (TreePO, arXiv 2508.17445): half of a group
goes on from a random token of a completion in the other half, whose beginning it shares."""
import torch
import grpo
from reward import repeated
from run import dist, passes

SETTINGS = dict(kl="none")

def collect(agent, problems, rng):
    G, N = agent.cfg.group, agent.cfg.max_new
    half = -(-G // 2)
    trunks = grpo.generate(agent, problems, half, rng)
    at, u = (dist.uniform_here(rng, len(problems), half, n) for n in (1, N))
    begun = []
    for ids, mask, start, share in zip(trunks.ids.cpu(), trunks.mask.cpu(), trunks.start, at[:, 0]):
        sampled = mask.nonzero()[:, 0]
        kept = slice(start, sampled[int(share * len(sampled))])
        begun.append((ids[kept].tolist(), mask[kept].tolist()))
    own = repeated(problems, half)
    branches = grpo.generate(agent, own, 1, u=u, begun=begun)
    rows = torch.arange(2 * len(own)).view(2, -1, half).transpose(0, 1)     # (P, 2, G / 2)
    return passes.joined([trunks, branches], rows.flatten(1)[:, :G].flatten())

grpo.collect = collect
