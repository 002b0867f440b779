"""DAPO (arXiv 2503.14476): a higher upper clip (eq. 10), dynamic sampling (eq. 11), all tokens
alike (eq. 12) and the soft overlong punishment (eq. 13), without a KL. Its alternative for
truncated completions is overlong_filter.py.
"""
# They replace functions: first that of a single rollout.
from experiments.variants import soft_overlong  # noqa: F401, I001
from experiments.variants import dynamic_sampling  # noqa: F401

SETTINGS = dict(clip_high=0.28, kl="none", loss_mean="token")
