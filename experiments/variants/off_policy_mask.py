"""The mask of DeepSeek-V3.2 (arXiv 2512.02556, eq. 9): a completion with a negative advantage is
left out once the policy has moved away from it by more than DELTA nats a token. The paper gives
no DELTA; this one is TRL's. Its unbiased KL is --estimator 'ratio*k3'. Its old policy is the
sampler; here, as in all of this code, in bfloat16 it is the trainer.
"""
import grpo
from grpo import surrogate as of_all

SETTINGS = dict(kl="loss", estimator="ratio*k3")
DELTA = 0.5


def surrogate(ratio, logp, adv, mask, cfg):
    gain, clipped = of_all(ratio, logp, adv, mask, cfg)
    kl = -(ratio.log() * mask).sum(1, True).detach() / mask.sum(1, True).clamp(min=1)
    out = (adv < 0) & (kl > DELTA)
    return gain * ~out, clipped | out


grpo.surrogate = surrogate
