"""The KV caches of sampling. Each has `read`, for the prompts; `append`, for a token of every row;
and `keep`, which `grpo.sample` calls after every `every` tokens to drop rows that have ended. A
third one, for rows with common prefixes, is in `run/sharing.py`.
"""
from itertools import chain
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

def new_cache(model, rows, slots):
    """Empty keys [:, 0] and values [:, 1] of each layer, (L, 2, rows, K, slots, D)."""
    c, like = model.cfg, model.norm.weight
    return torch.zeros(c.n_layer, 2, rows, c.n_kv_head, slots, c.head_size,
                       dtype=model.amp or like.dtype, device=like.device)

def prefill(model, ids, length, cache):
    """Reads padded prompts, ids (P, T) with `length` (P,) tokens, into a cache; returns the logits
    of the completions' first tokens, (P, V)."""
    pos = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    h = model(ids, pos, cache)                                                          # (P, T, C)
    return model.head(h[torch.arange(len(ids), device=ids.device), length - 1])

class KVCache:
    """Plain decoding: keys and values for each completion, (L, 2, r, K, S, D)."""
    every = 1           # tokens between two calls of `keep`

    def __init__(self, model, slots):
        self.model, self.slots = model, slots

    def read(self, ids, length, group):
        """Reads padded prompts, ids (P, T) with `length` (P,) tokens, for `group` completions of
        each; returns the logits of the completions' first tokens, (P * group, V)."""
        self.cache = new_cache(self.model, len(ids) * group, self.slots)
        ids, length = ids.repeat_interleave(group, 0), length.repeat_interleave(group)
        return prefill(self.model, ids, length, self.cache)

    def keep(self, active):
        """Drops rows that have ended. Returns the indices of the rows that are kept: at least the
        `active` (r,) ones, but none if none are active."""
        kept = active.nonzero()[:, 0]
        self.cache = self.cache[:, :, kept]
        return kept

    def append(self, token, pos):
        """Appends token (r,) at position pos (r,); returns the logits of the next one, (r, V)."""
        return self.model.next_logits(token, pos, self.cache)

# ---------------------------------------------------------------------------------- static shapes

# A GPU computes a token quickly. What takes time is to launch the kernels one by one, and to wait:
# when the host reads a number from the GPU, the GPU runs out of work. So ended rows are looked for
# only every 16 tokens, and the numbers of rows and slots are rounded up: for each of their few
# values a compiled `next_logits` becomes one CUDA graph, launched as a whole. A graph works on
# fixed addresses, so a model's memory is kept from one rollout to the next.
MEMORY = WeakKeyDictionary()        # of each model, for each layer, keys and values (b, K, S, D)

def memory_of(model, rows, slots):
    """Keys and values for at least so many rows and slots, a list of pairs (b, K, S, D)."""
    like = new_cache(model, 0, slots)                                         # (L, 2, 0, K, S, D)
    if model in MEMORY:
        keys = MEMORY[model][0][0]
        if len(keys) >= rows and keys.size(2) >= slots and keys.dtype == like.dtype:
            return MEMORY[model]
        del MEMORY[model], keys         # free the old ones first
    MEMORY[model] = [[x.new_zeros(rows, *x.shape[1:]) for x in layer] for layer in like]
    return MEMORY[model]

class StaticCache:
    """Decoding with static shapes: b rows, a power of two, and s slots, a multiple of 64."""
    every = 16

    def __init__(self, model, slots):
        self.model, self.slots = model, slots

    def read(self, ids, length, group):
        """Like `KVCache.read`, but each prompt is read once."""
        P, T = ids.shape
        prompt = new_cache(self.model, P, T)                                   # (L, 2, P, K, T, D)
        logits = prefill(self.model, ids, length, prompt)
        self.rows, self.used, self.shape = P * group, T, None
        self.memory = memory_of(self.model, power_of_two(self.rows), by_64(self.slots))
        for x, read in zip(chain(*self.memory), prompt.flatten(0, 1)):
            x[:self.rows, :, :T] = read.repeat_interleave(group, 0)
        return logits.repeat_interleave(group, 0)

    def keep(self, active):
        """Like `KVCache.keep`, but ended rows stay until half of the rows have ended."""
        kept = active.nonzero()[:, 0]
        if 0 < len(kept) and power_of_two(len(kept)) == power_of_two(self.rows):
            return torch.arange(self.rows, device=active.device)
        for x in chain(*self.memory):
            x[:len(kept)] = x[kept]
        self.rows = len(kept)
        return kept

    def append(self, token, pos):
        """Like `KVCache.append`."""
        self.used += 1
        b, s = power_of_two(self.rows), by_64(self.used)
        if self.shape != (b, s):
            self.shape, self.cache = (b, s), [[x[:b, :, :s] for x in kv] for kv in self.memory]
            for x in chain(*self.cache):
                torch._dynamo.mark_static_address(x, guard=False)
        token, pos = F.pad(token, (0, b - self.rows)), F.pad(pos, (0, b - self.rows))
        torch.compiler.cudagraph_mark_step_begin()      # the last logits may be overwritten
        return self.model.next_logits(token, pos, self.cache)[:self.rows]

def power_of_two(n):
    """The least power of two that is at least n and 2: compilation treats 1 apart."""
    return 1 << max(n - 1, 1).bit_length()

def by_64(n):
    """n rounded up to a multiple of 64."""
    return -(-n // 64) * 64
