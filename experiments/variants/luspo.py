"""LUSPO (arXiv 2602.05261): GSPO, with each completion weighted by its length, so that tokens of
long completions count no less.
"""
import grpo

SETTINGS = dict(kl="none", ratio="sequence", clip_low=2e-3, clip_high=2.5e-3)
FIXED = ["loss_mean"]


def token_weights(mask, loss_mean, rows, tokens, max_new):
    return mask / max(rows, 1)


grpo.token_weights = token_weights
