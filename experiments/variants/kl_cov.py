"""KL-Cov (arXiv 2505.22617, eq. 12): the SHARE of a minibatch's tokens with the largest covariance
of advantage and log-probability, the first of equal ones, is penalized by |log ratio|, as in the
authors' code; there is no clip, and the loss is a mean over tokens.
"""
from dataclasses import dataclass, replace

import torch

import grpo
from experiments.variants.clip_cov import covariance, highest, numbers
from grpo import total_loss as unpenalized
from run import passes

SETTINGS = dict(kl="none", loss_mean="token", clip_low=1e9, clip_high=1e9)
FIXED = ["clip_low", "clip_high"]
SHARE, COEFFICIENT = 2e-3, 1.0


@dataclass
class Batch(grpo.Batch):
    held: grpo.Tokens = None        # (B, T) bool: penalized


def minibatch(agent, batch, rows):
    part = passes.select(batch, rows, batch.ids.size(1))
    cov, _ = covariance(agent, part)
    number, total = numbers(batch)
    first = cov.cpu().double().round(decimals=4) - 5e-5 * number[rows] / total
    held = torch.zeros_like(batch.mask)
    held[rows] = highest(first, part.mask, SHARE)
    return replace(batch, held=held)


def total_loss(agent, batch, weight, n_tokens):
    loss, stats, logp = unpenalized(agent, batch, weight, n_tokens)
    stats["clip_share"] = batch.held.sum() / n_tokens
    if batch.old_logp is not None:
        log_ratio = torch.where(batch.mask, logp - batch.old_logp, 0)
        ratio = grpo.importance_ratio(log_ratio, batch.mask, agent.cfg)
        moved = ratio.log().abs()
        moved = torch.where(moved > 1e-4, moved, 0)         # below, it is rounding
        penalty = COEFFICIENT * (weight * batch.held * moved).sum()
        stats["loss"] = stats["loss"] + penalty
        loss = loss + penalty
    return loss, stats, logp


grpo.Batch, grpo.minibatch, grpo.total_loss = Batch, minibatch, total_loss
