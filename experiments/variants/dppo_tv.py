"""DPPO (arXiv 2602.04879), with the binary total variation: a token loses its gradient when its ratio moves away from 1
and the two policies differ there by more than DELTA, as Bernoulli distributions of drawing this token.
"""
SETTINGS = dict(kl="none")
DELTA = 0.15


def surrogate(ratio, adv, logp, mask, cfg):
    p = logp.detach().exp().clamp(1e-6, 1 - 1e-6)               # of the token under the new policy,
    q = (p / ratio.detach()).clamp(1e-6, 1 - 1e-6)              # and under the old one
    away = (adv > 0) & (ratio > 1) | (adv < 0) & (ratio < 1)
    blocked = away & ((p - q).abs() > DELTA)
    return ratio * adv * ~blocked, blocked & mask
