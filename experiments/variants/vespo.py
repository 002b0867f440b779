"""VESPO (arXiv 2602.10693): log pi is weighted by a smooth function of the ratio w of whole
completions, held constant: w ** k * exp(c * (1 - w)), which is 1 at w = 1 and largest at w = k /
c.
"""
import grpo

SETTINGS = dict(kl="none", loss_mean="token")
FIXED = ["clip_low", "clip_high", "ratio"]
POSITIVE, NEGATIVE = (2.0, 3.0), (3.0, 2.0)         # k and c, by the sign of the advantage


def surrogate(ratio, logp, adv, mask, cfg):
    w = (ratio.log() * mask).sum(1, True).detach().clamp(-18.42, 20).exp()
    k, c = ((adv >= 0) * a + (adv < 0) * b for a, b in zip(POSITIVE, NEGATIVE))
    return (c + k * w.log() - c * w).exp() * adv * logp, w.expand_as(adv) != w


grpo.surrogate = surrogate
