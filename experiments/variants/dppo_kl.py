"""DPPO (arXiv 2602.04879), with the binary KL: a token loses its gradient when its ratio moves
away from 1 and the two policies differ there by more than DELTA, as Bernoulli distributions of
drawing this token. The authors' script also uses Dr. GRPO's loss mean and advantages, which are
not used here. Their old policy is the sampler; here, as in all of this code, in bfloat16 it is
the trainer. Nor are ratios capped, at 10 as in their script or at 20 as in verl's version.
"""
import grpo

SETTINGS = dict(kl="none")
FIXED = ["clip_low", "clip_high"]
DELTA = 0.05


def surrogate(ratio, logp, adv, mask, cfg):
    p = logp.detach().exp()             # of the token under the new policy,
    q = p / ratio.detach()              # and under the old one
    p, q = p.clamp(1e-12, 1 - 1e-6), q.clamp(1e-12, 1 - 1e-6)
    away = (adv > 0) & (ratio > 1) | (adv < 0) & (ratio < 1)
    blocked = away & (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log() > DELTA)
    return ratio * adv * ~blocked, blocked & mask


grpo.surrogate = surrogate
