"""Rows of a rollout have common prefixes: the prompt, and often more. This module computes each
prefix once. `share` installs it in a model: `SharedRows` replaces `model.Rows` in a training pass,
and `SharedCache` replaces `caches.KVCache` in sampling. The results are the same up to rounding; on
a CPU a step takes about half the time.

Rows share a token if they have the same tokens and positions up to it. This assumes that a token's
state depends on nothing else: a bidirectional prefix, or a router that sees other tokens, needs
`--cache plain`.
"""
import torch
import torch.nn.functional as F

from data import UserError
from model import causal_attention, send
from run.caches import SharedCache

def share(model):
    """Makes a model compute prefixes that rows share only once."""
    model.layout_class, model.cache_class = SharedRows, SharedCache

# ---------------------------------------------------------------------------------- training passes

def distinct(mask, *same):
    """The tokens that must be computed: in each row those up to the last True in mask (B, T), less
    any prefix in which all tensors of `same`, (B, T), equal the row above. Returns their indices
    into the flattened rows, (n,), and for each position of the rows the index among these n,
    (B, T), which is arbitrary after the last True."""
    needed = mask.flip(1).cumsum(1).flip(1) > 0
    alike = needed[:-1]
    for x in same:
        alike = alike & (x[1:] == x[:-1])
    new = needed & ~F.pad(alike.cumprod(1).bool(), (0, 0, 1, 0))
    count = new.flatten().cumsum(0).view_as(mask)
    return new.flatten().nonzero()[:, 0], torch.where(new, count - 1, 0).cummax(0).values

class SharedRows:
    """The layout of a training pass over the n distinct tokens, as one row (1, n). Only attention
    sees full rows."""

    def __init__(self, ids, mask=None, pos=None, device=torch.device("cpu")):
        known = [x.cpu() for x in (ids, pos) if x is not None]          # compared on the host
        mask = torch.ones_like(known[0]) if mask is None else mask.cpu()
        first, index = distinct(mask, *known)
        self.first, self.index = send(first, device), send(index, device)
        self.ids = send(known[0].flatten()[first][None], device)                            # (1, n)
        at = first % ids.size(1) if pos is None else known[1].flatten()[first]
        self.pos = send(at[None], device)

    def attend(self, q, k, v, cache):
        """Like `Rows.attend` without a cache, for the heads (1, n, H, D) of the distinct tokens."""
        if q.shape[:2] != self.ids.shape:
            raise UserError(f"shared rows have {self.ids.size(1)} tokens, but attention is given "
                            f"{tuple(q.shape[:2])}: rows that differ in more than ids and "
                            f"positions need --cache plain")
        heads = self.gather(torch.cat((q, k, v), 2)).split((q.size(2), k.size(2), v.size(2)), 2)
        y = causal_attention(*heads)                                                  # (B, T, H, D)
        y = F.embedding(self.first, y.flatten(2).flatten(0, 1))
        return y.unflatten(-1, q.shape[2:])[None]                                     # (1, n, H, D)

    def gather(self, x):
        """Heads x (1, n, H, D) as full rows, (B, T, H, D). `embedding` sums a token's gradient over
        its rows faster than indexing. For the cast to float32 see `causal_attention`."""
        x = x.float() if x.is_cpu and x.dtype == torch.bfloat16 else x
        return F.embedding(self.index, x[0].flatten(1)).unflatten(-1, x.shape[2:])

    def in_rows(self, x):
        """Hidden states (1, n, C) as full rows, (B, T, C); arbitrary at padding."""
        return F.embedding(self.index, x[0])

    @staticmethod
    def to_score(ids, mask):
        """Like `Rows.to_score`, but a token that rows share is scored once."""
        first, index = distinct(mask, ids)
        once = index[mask].unique()
        rank = torch.zeros_like(first).index_copy(0, once, torch.arange(len(once)))
        return first[once], rank[index]
