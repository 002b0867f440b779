"""Pass@k training (arXiv 2508.10751, eq. 10 to 15): the z-score of pass@K over all subsets of K
of the group's completions, in closed form. Completions are right (reward of at least 1) or wrong;
once fewer than K are wrong, the group is dead.
"""
from math import comb

import torch

import grpo
from data import UserError

SETTINGS = dict(kl="none")
FIXED = ["baseline", "adv_scale", "supervision"]
K = 4


def group_scores(reward, ends, cfg):
    if cfg.kl == "reward":
        raise UserError("--algo pass_at_k does not take --kl reward")
    right = reward.sum(2) >= 1                          # (P, G)
    sizes = ends.any(2).sum(1).tolist()
    if min(sizes, default=K + 1) <= K:
        raise UserError(f"pass_at_k: --group {min(sizes)} must be more than K, {K}")
    counts = [*zip(sizes, right.sum(1).tolist())]
    fails = [comb(G - n, K) / comb(G, K) for G, n in counts]
    alone = [comb(max(0, G - n - 1), K - 1) / comb(G - 1, K - 1) for G, n in counts]
    fail, alone = (torch.tensor(x)[:, None].to(reward) for x in (fails, alone))
    dead, std = (fail == 0) | (fail == 1), (fail * (1 - fail)).sqrt()
    score = torch.where(dead, 0, torch.where(right, fail, fail - alone) / std)
    return score[..., None] * ends, dead.flatten()


grpo.group_scores = group_scores
