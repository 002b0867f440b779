"""LUSPO (arXiv 2602.05261): GSPO with each completion weighted by its length, so that a long one counts no less per token."""
SETTINGS = dict(kl="none", ratio="sequence", clip_low=3e-4, clip_high=4e-4)


def token_weights(mask, loss_mean, rows, tokens, max_new):
    return mask / max(rows, 1)
