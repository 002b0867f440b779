"""GSPO-token (arXiv 2507.18071, eq. 13): the ratio of the completion, with the gradient of each
token's own probability, so that advantages may differ from token to token.
"""
import grpo
from grpo import importance_ratio as of_completion

SETTINGS = dict(kl="none", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


def importance_ratio(log_ratio, mask, cfg):
    of_token = (log_ratio - log_ratio.detach()).exp()       # 1
    return of_completion(log_ratio, mask, cfg).detach() * of_token


grpo.importance_ratio = importance_ratio
