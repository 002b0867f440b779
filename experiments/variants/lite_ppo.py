"""Lite PPO (arXiv 2508.08221): the group's mean as the baseline, the std of the whole batch, all
tokens alike."""
from dataclasses import replace

import grpo
from grpo import group_scores as minus_mean
from run.dist import mean_and_std

SETTINGS = dict(kl="none", loss_mean="token")
FIXED = ["baseline", "adv_scale", "supervision"]


def group_scores(reward, ends, cfg):
    score, dead = minus_mean(reward, ends, replace(cfg, adv_scale="none"))
    _, std = mean_and_std(reward.sum(2)[ends.any(2)])
    return score / std.clamp(min=1e-6), dead


grpo.group_scores = group_scores
