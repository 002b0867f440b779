"""The KV caches of sampling, and the drawing of tokens."""
from itertools import chain
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from model import CachedRows, double
from run.device import of_glibc

def new_cache(model, rows, slots):
    """Empty keys [:, 0] and values [:, 1] of each layer, (L, 2, rows, K, slots, D)."""
    c, like = model.cfg, model.norm.weight
    return torch.zeros(c.n_layer, 2, rows, c.n_kv_head, slots, c.head_size,
                       dtype=model.amp or like.dtype, device=like.device)

def prefill(model, ids, length, slots):
    """Reads padded prompts, ids (P, T); returns their last tokens' states, (P, C), and a cache."""
    cache = new_cache(model, len(ids), slots)
    h = model(ids, cache=cache)  # (P, T, C)
    return h[torch.arange(len(ids), device=ids.device), length - 1], cache

def decode(model, ids, pos, cache, slots=None):
    """The states (b, C) of one more token of each row; see `CachedRows`."""
    return model(ids, cache, CachedRows(ids, pos, cache, slots))[:, 0]

class KVCache:
    """Plain decoding: keys and values of r rows, (L, 2, r, K, S, D); rows that have ended leave."""
    every = 1  # tokens after which rows that have ended are dropped

    def __init__(self, model, slots, temperature):
        self.model, self.slots, self.temperature = model, slots, temperature

    def prefill(self, ids, length, group):
        """Reads padded prompts, ids (P, T) of `length` (P,) tokens, for `group` rows each; returns
        the rows' indices, (B,), and their first tokens' probabilities, (B, V)."""
        self.rows = torch.arange(len(ids) * group, device=ids.device)
        self.appended = 0
        return self.rows, self.probs(self.read(ids, length, group))

    def probs(self, h):
        """The next token's probabilities of each row, (r, V)."""
        return self.model.probs(h / self.temperature)

    def append(self, token, pos, done):
        """Appends a token (r,) at position pos (r,) to each row that the last call returned, drops
        rows that are done (B,) when it is time, and returns what `prefill` does of the others."""
        self.appended += 1
        if self.appended % self.every == 0:  # the host waits
            kept = self.drop((~done[self.rows]).nonzero()[:, 0])
            self.rows, token, pos = self.rows[kept], token[kept], pos[kept]
        if len(self.rows) == 0:
            return self.rows, token.new_zeros(0, self.model.cfg.vocab_size)
        pos = pos.clamp(max=self.slots - 1)  # of rows that are done
        return self.rows, self.probs(self.step(token, pos))

    def read(self, ids, length, group):
        """The states of each row's last prompt token; a prompt is read once."""
        h, cache = prefill(self.model, ids, length, self.slots)
        self.cache = cache.repeat_interleave(group, 2)
        return h.repeat_interleave(group, 0)

    def drop(self, kept):
        """Keeps those rows, or more; returns the indices of the rows kept."""
        self.cache = self.cache[:, :, kept]
        return kept

    def step(self, token, pos):
        return decode(self.model, token[:, None], pos[:, None], self.cache)

# -------------------------------------------------------------- common prefixes

class SharedCache(KVCache):
    """Rows with the same tokens so far share one state: they diverge when they sample others."""

    def read(self, ids, length, group):
        self.used = ids.size(1)
        self.state = torch.arange(len(ids), device=ids.device).repeat_interleave(group)  # (r,)
        h, self.cache = prefill(self.model, ids, length, up(self.used, 16))
        return h  # (P, C), and the cache is (L, 2, b, K, S, D)

    def probs(self, h):
        return super().probs(h)[self.state]

    def drop(self, kept):  # states that no row needs any more leave in `advance`
        self.state = self.state[kept]
        return kept

    def step(self, token, pos):
        self.advance(token)
        if self.used == self.cache.size(4):
            self.cache = F.pad(self.cache, (0, 0, 0, max(16, self.used // 4)))  # copies all
        self.used += 1
        of_state = torch.zeros(2, self.cache.size(2), dtype=token.dtype, device=token.device)
        token, pos = of_state.index_copy(1, self.state, torch.stack((token, pos)))  # (b,)
        return super().step(token, pos)                                             # (b, C)

    def advance(self, token):
        """The states after `token` (r,); not copied if nine tenths are needed and none diverge."""
        pair, after = torch.stack((self.state, token)).unique(dim=1, return_inverse=True)
        before = pair[0]  # (b,)
        if max(len(before), 2) > 0.9 * self.cache.size(2) and before.diff().all():
            return
        if len(before) == 1:  # avoids compiling again for a batch of one
            before = before.repeat(2)
        self.cache, self.state = self.cache.index_select(2, before), after

def up(n, to):
    """n rounded up to a multiple: few shapes."""
    return -(-n // to) * to

# ---------------------------------------------------------------- static shapes

# A GPU would idle while the host launches a token's kernels, 600 for 24 layers. For each number of
# rows and slots they are recorded once, as a CUDA graph: cache and weights must stay in place.
MEMORY = WeakKeyDictionary()        # the Memory of each model

class Memory:
    """Keys and values (b, K, S, D) of each layer, and the Steps that decode with parts of them."""

    def __init__(self, model, rows, slots):
        # A slot more than is ever read: a step that read all would be compiled apart.
        like = new_cache(model, 0, slots + 1)  # (L, 2, 0, K, S + 1, D)
        self.cache = [[x.new_zeros(rows, *x.shape[1:]) for x in layer] for layer in like]
        self.rows, self.slots, self.dtype, self.steps = rows, slots, like.dtype, {}
        self.pool = torch.cuda.graph_pool_handle() if like.is_cuda else None    # of all graphs

    def step(self, rows, slots):
        if (rows, slots) not in self.steps:
            cache = [[x[:rows] for x in kv] for kv in self.cache]
            self.steps[rows, slots] = Step(cache, slots, self.pool)
        return self.steps[rows, slots]

def memory_of(model, rows, slots):
    """A model's Memory, for at least so many rows and slots; training and evaluation share it."""
    old, dtype = MEMORY.get(model), new_cache(model, 0, 0).dtype
    if old and old.dtype == dtype:
        rows, slots = max(rows, old.rows), max(slots, old.slots)
        if (rows, slots) == (old.rows, old.slots):
            return old
    del old
    MEMORY.pop(model, None)  # frees it before there is a new one
    MEMORY[model] = Memory(model, rows, slots)
    return MEMORY[model]

class Step:
    """The states (b, C) after one more token (r,) of each row; rows from r on have ended. On CUDA a
    graph. The first `slots` of the cache are read: a compiled layer would copy a slice."""

    def __init__(self, cache, slots, pool):
        self.cache, self.slots, self.pool, self.graph = cache, slots, pool, None
        rows, device = len(cache[0][0]), cache[0][0].device
        self.ids, self.pos = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)

    def __call__(self, model, token, pos):
        self.ids[:len(token), 0], self.pos[:len(token), 0] = token, pos
        if self.graph is None:  # on CUDA before recording: libraries prepare, layers compile
            self.h = decode(model, self.ids, self.pos, self.cache, self.slots)
            if self.ids.is_cuda:
                self.record(model)
        if self.graph is not None:
            self.graph.replay()  # the first time it writes the same keys and values again
        return self.h

    def record(self, model):
        """Records the model's kernels as a graph; nothing is computed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
            self.h = decode(model, self.ids, self.pos, self.cache, self.slots)
        self.graph = graph

class StaticCache(KVCache):
    """Static shapes: b rows, a power of two, and s slots, a multiple of 64."""
    every = 16

    def read(self, ids, length, group):
        P, T = ids.shape
        h, prompt = prefill(self.model, ids, length, T)  # (P, C); (L, 2, P, K, T, D)
        self.used, rows = T, P * group
        self.memory = memory_of(self.model, power_of_two(rows), up(self.slots, 64))
        for x, read in zip(chain(*self.memory.cache), prompt.flatten(0, 1)):
            x[:rows, :, :T] = read.repeat_interleave(group, 0)
        return h.repeat_interleave(group, 0)

    def drop(self, kept):  # ended rows stay until the power of two is smaller
        if 0 < len(kept) and power_of_two(len(kept)) == power_of_two(len(self.rows)):
            return torch.arange(len(self.rows), device=kept.device)
        for x in chain(*self.memory.cache):
            x[:len(kept)] = x[kept]
        return kept

    def probs(self, h):  # one row would be compiled apart, so there are at least two
        return super().probs(h)[:len(self.rows)]

    def step(self, token, pos):
        self.used = min(self.used + 1, self.slots)  # no row has more
        step = self.memory.step(power_of_two(len(self.rows)), up(self.used, 64))
        return step(self.model, token, pos)[:max(len(self.rows), 2)]

def power_of_two(n):
    """The least power of two that is at least n and 2: compilation treats 1 apart."""
    return 1 << max(n - 1, 1).bit_length()

CACHES = {"plain": KVCache, "shared": SharedCache, "static": StaticCache}

def release():
    """Gives the memory that sampling has freed back: an update needs blocks of other sizes."""
    of_glibc("malloc_trim", 0)

def new(model, slots, temperature):
    """The cache that a model samples with, for rows of at most `slots` tokens."""
    return CACHES[model.kv_cache](model, slots, temperature)

# ---------------------------------------------------------------------- drawing

PART = 128      # tokens of a part of the vocabulary

def inverse_cdf(p, u):
    """The first index at which the sum of p (r, n) exceeds u (r,) of its total, and by how much."""
    # float64 (a parallel float32 sum may fall) and the clamp: no element of nearly 0 is chosen.
    cdf = double(p).cumsum(-1)
    share = u[:, None].clamp(2 ** -25, 1 - 2 ** -24) * cdf[:, -1:]
    i = torch.searchsorted(cdf, share, right=True)
    i = i.clamp(max=p.size(1) - 1)  # of NaN: the last
    return i[:, 0], (cdf.gather(1, i) - share)[:, 0]

def draw(p, u):
    """Draws a token from each row of probabilities p (r, V), by u (r,), uniform in [0, 1), or the
    most likely one, without u; returns tokens and log-probabilities, both (r,)."""
    token = p.argmax(-1) if u is None else by_parts(p, u)
    return token, p.gather(1, token[:, None])[:, 0].log()

def by_parts(p, u):
    """`inverse_cdf`, faster on a GPU: first a part of a large vocabulary, then its token."""
    if p.size(1) % PART:
        return inverse_cdf(p, u)[0]
    parts = p.unflatten(1, (-1, PART))
    rows = torch.arange(len(p), device=p.device)
    mass = parts.sum(-1)
    part, over = inverse_cdf(mass, u)
    within = 1 - over / mass[rows, part]  # u is so far within that part
    inner, _ = inverse_cdf(parts[rows, part], within)
    return PART * part + inner
