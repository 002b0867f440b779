"""Pass@k training (arXiv 2508.10751, eq. 10 to 15): the z-score of pass@K over all subsets of K
of the group's completions, in closed form. Completions are right (reward of at least 1) or wrong;
once fewer than K are wrong, the group is dead.
"""
from math import comb

import torch

import grpo
from data import UserError

SETTINGS = dict(kl="none")
K = 4


def group_scores(reward, ends, cfg):
    group = cfg.group
    if group <= K:
        raise UserError(f"pass_at_k: --group {group} must be more than K, {K}")
    right = reward.sum(1).view(-1, group) >= 1          # (P, G)
    fails = [comb(group - n, K) / comb(group, K) for n in right.sum(1).tolist()]
    ways = comb(group - 1, K - 1)
    alone = [comb(max(0, group - n - 1), K - 1) / ways for n in right.sum(1).tolist()]
    fail, alone = (torch.tensor(x)[:, None].to(reward) for x in (fails, alone))
    dead, std = (fail == 0) | (fail == 1), (fail * (1 - fail)).sqrt()
    score = torch.where(dead, 0, torch.where(right, fail, fail - alone) / std)
    return score.view(-1, 1) * ends, dead.flatten()


grpo.group_scores = group_scores
