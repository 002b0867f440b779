"""One GPT for the families of Llama, Mistral, Qwen2, Qwen3 and GPT-2, in Llama's names: RoPE or
learned positions, RMSNorm or LayerNorm, SwiGLU or GELU, grouped-query attention, no dropout.

Dimensions: B rows, T tokens, C channels, H query heads, K key/value heads, D channels per head,
L layers, S slots of the KV cache, V vocabulary. Padding is on the right: causal attention hides it.
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

@dataclass
class GPTConfig:
    """The shape of a model. The fields from `positions` on distinguish the families."""
    vocab_size: int = 257
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2          # each key/value head serves n_head / n_kv_head query heads
    n_embd: int = 128
    n_inner: int = 352          # width of the MLP
    block_size: int = 128       # maximum tokens per row
    head_size: int = 0          # D; 0: n_embd / n_head
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_inv_freq: tuple = ()   # D/2 numbers, if they are scaled; else rope_theta ** (-2 i / D)
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    mlp: Literal["swiglu", "gelu"] = "swiglu"       # GELU: the tanh approximation
    bias: Literal["none", "qkv", "all"] = "none"    # which linear layers have one
    qk_norm: bool = False       # RMSNorm on each query and key head
    tied: bool = True           # the head shares the embedding's weights

    def __post_init__(self):
        self.head_size = self.head_size or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")

def for_products(x):
    """x in autocast's dtype: cast once, not in each product that reads it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x

def rotate(x, cos, sin):
    """RoPE: rotates the pairs (x[i], x[i + D/2]) of x (B, T, H, D). cos and sin (B, T, 1, D) have
    each value twice, sin the first time negated."""
    other = x.roll(x.size(-1) // 2, -1)
    return (x * cos + other * sin).to(x.dtype)

def causal_attention(q, k, v):
    """Attention of q (B, T, H, D) to k and v (B, T, K, D) of the same and earlier tokens; on a CPU
    in float32: in bfloat16 the backward pass takes 5 times as long there."""
    if v.is_cpu and v.dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = [x.transpose(1, 2) for x in (q, k, v)]  # (B, ., T, D)
    with torch.autocast("cpu", enabled=False):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2)

def send(x, device):
    """x on a device; the host does not wait for a copy to a GPU."""
    if x.is_cpu and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)

def double(x):
    """x in float64, or in float32 on mps, which has no float64."""
    return x.float() if x.device.type == "mps" else x.double()

# ------------------------------------------------- which token attends to which
class Rows:
    """A pass over whole rows, ids (B, T). run/passes.py has one that shares prefixes."""

    def __init__(self, gpt, ids, mask):
        self.ids = send(ids, gpt.device)
        self.pos = torch.arange(ids.size(1), device=gpt.device).expand_as(ids)

    def attend(self, q, k, v, cache):
        """Attention for q (B, T, H, D), k and v (B, T, K, D). A layer's cache, two (B, K, S, D),
        gets k and v; a token's slot is its position."""
        if cache is not None:
            for new, slots in zip((k, v), cache):
                slots[:, :, :new.size(1)] = new.transpose(1, 2)
        return causal_attention(q, k, v)

    def in_rows(self, h):
        """Hidden states in the layout of the rows, (B, T, C)."""
        return h

    def once(self, at, tokens):
        """The n distinct (position, token) pairs, and the index of each of the m in them."""
        return at, tokens, torch.arange(len(at))

class CachedRows(Rows):
    """A pass over one more token of each row, ids (B, 1) at positions pos (B, 1), that also sees
    the first `slots` slots of a KV cache (None: all), up to its own."""

    def __init__(self, ids, pos, cache, slots=None):
        keys = cache[0][0]  # (B, K, S, D)
        self.ids = ids
        self.pos = pos
        self.slots = slots or keys.size(2)
        self.row = torch.arange(len(ids), device=keys.device)[:, None]  # (B, 1)
        slot = torch.arange(self.slots, device=keys.device)
        later = slot > pos[..., None, None]  # (B, 1, 1, S)
        self.mask = keys.new_zeros(later.shape).masked_fill_(later, -torch.inf)

    def attend(self, q, k, v, cache):
        """Adds k and v to a layer's cache, then attends to it. Query heads that share keys act as
        tokens: on CUDA much faster than enable_gqa."""
        for new, slots in zip((k, v), cache):
            slots[self.row, :, self.pos] = new.to(slots.dtype)
        k, v = [x[:, :, :self.slots] for x in cache]
        q = q.reshape(len(q), k.size(1), -1, k.size(3))  # (B, K, H/K, D)
        y = F.scaled_dot_product_attention(q, k, v, self.mask)
        return y.flatten(1, 2)[:, None]  # (B, 1, H, D)

# ------------------------------------------------------------------- the layers
class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        C, D = cfg.n_embd, cfg.head_size
        bias = cfg.bias != "none"
        self.heads = cfg.n_head, cfg.n_kv_head
        self.q_proj = nn.Linear(C, cfg.n_head * D, bias=bias)
        self.k_proj = nn.Linear(C, cfg.n_kv_head * D, bias=bias)
        self.v_proj = nn.Linear(C, cfg.n_kv_head * D, bias=bias)
        self.o_proj = nn.Linear(cfg.n_head * D, C, bias=cfg.bias == "all")
        norm = nn.RMSNorm if cfg.qk_norm else nn.Identity
        self.q_norm = norm(D, cfg.norm_eps)
        self.k_norm = norm(D, cfg.norm_eps)

    def forward(self, x, rope, layout, cache):
        x = for_products(x)
        H, K = self.heads
        q = self.q_proj(x).unflatten(-1, (H, -1))                       # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (K, -1))                       # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (K, -1))
        q = self.q_norm(q)
        k = self.k_norm(k)
        if rope is not None:        # both in one go: fewer kernels
            heads = rotate(torch.cat((q, k), 2), *rope)
            q, k = heads.split(self.heads, 2)
        y = layout.attend(q, k, v, cache)  # (B, T, H, D)
        return self.o_proj(y.flatten(2))

class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        C, inner = cfg.n_embd, cfg.n_inner
        bias = cfg.bias == "all"
        self.gate_proj = None
        if cfg.mlp == "swiglu":
            self.gate_proj = nn.Linear(C, inner, bias=bias)
        self.up_proj = nn.Linear(C, inner, bias=bias)
        self.down_proj = nn.Linear(inner, C, bias=bias)

    def forward(self, x):
        x = for_products(x)
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(F.gelu(up, approximate="tanh"))
        gate = F.silu(self.gate_proj(x))
        return self.down_proj(gate * up)

class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        norm = nn.RMSNorm if cfg.norm == "rms" else nn.LayerNorm
        self.input_layernorm = norm(cfg.n_embd, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = norm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x, rope, layout, cache):
        x = x + self.self_attn(self.input_layernorm(x), rope, layout, cache)
        return x + self.mlp(self.post_attention_layernorm(x))

class LogSoftmaxAt(torch.autograd.Function):
    """log softmax of logits (n, V) at tokens (n,), in float32: (n,). log_softmax and gather would
    make five more matrices (n, V); here float32 copies exist of a few rows at a time."""

    @staticmethod
    def forward(ctx, logits, tokens):
        ctx.few = max(1, 2 ** 22 // logits.size(1))
        norm = torch.cat([x.float().logsumexp(1) for x in logits.split(ctx.few)])
        ctx.save_for_backward(logits, tokens, norm)
        return logits.gather(1, tokens[:, None])[:, 0].float() - norm

    @staticmethod
    def backward(ctx, grad):
        logits, tokens, norm = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        parts = [x.split(ctx.few) for x in (logits, tokens, norm, grad, of_logits)]
        for x, token, lse, g, out in zip(*parts):  # (one at the token - softmax) * g
            slope = (x.float() - lse[:, None]).exp_() * -g[:, None]
            out.copy_(slope.scatter_add_(1, token[:, None], g[:, None]))
        return of_logits, None

class GPT(nn.Module):
    def __init__(self, cfg, generator=None):
        super().__init__()
        self.cfg = cfg
        self.amp = None             # torch.bfloat16: autocast to it; the weights stay float32
        self.recompute = False      # activation checkpointing, a layer at a time
        self.kv_cache = "plain"     # --cache, but never "auto"; read in run/caches.py
        self.shared_prefixes = True  # in training; read in run/passes.py
        self.most_logits = 2 ** 28  # at a time
        norm = nn.RMSNorm if cfg.norm == "rms" else nn.LayerNorm
        C = cfg.n_embd
        self.embed_tokens = nn.Embedding(cfg.vocab_size, C)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = norm(C, cfg.norm_eps)
        if cfg.positions == "learned":
            self.embed_positions = nn.Embedding(cfg.block_size, C)
        if not cfg.tied:
            self.lm_head = nn.Linear(C, cfg.vocab_size, bias=False)
        self.precompute_rope()
        std = (2 / (5 * C)) ** 0.5  # GPT-2's 0.02 at width 1000
        into_residual = std * (2 * cfg.n_layer) ** -0.5
        for name, m in self.named_modules():
            if name.endswith(("o_proj", "down_proj")):
                nn.init.normal_(m.weight, std=into_residual, generator=generator)
            elif isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=std, generator=generator)

    def precompute_rope(self):
        """Sets RoPE's cos and sin (block_size, 1, D), which no file holds."""
        c = self.cfg
        inv_freq = torch.tensor(c.rope_inv_freq)
        if not c.rope_inv_freq:
            exponent = torch.arange(0, c.head_size, 2) / c.head_size
            inv_freq = 1 / c.rope_theta ** exponent
        angle = torch.arange(c.block_size)[:, None, None] * inv_freq
        angle = torch.cat((-angle, angle), -1)  # (block_size, 1, D)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids, cache=None, layout=None):
        """Hidden states (B, T, C) of ids (B, T), whose keys and values a cache gets; by `Rows`, if
        no other layout is given."""
        if ids.size(1) > self.cfg.block_size:
            raise ValueError(f"{ids.size(1)} tokens do not fit a context of {self.cfg.block_size}")
        if layout is None:
            layout = Rows(self, ids, None)
        with self.autocast():
            x = self.embed_tokens(layout.ids)  # (B, T, C)
            rope = None
            if self.cfg.positions == "learned":
                x = x + self.embed_positions(layout.pos)
            else:
                rope = self.cos[layout.pos], self.sin[layout.pos]  # (B, T, 1, D)
            for i, layer in enumerate(self.layers):
                kv = None if cache is None else cache[i]
                if self.recompute and torch.is_grad_enabled():
                    x = checkpoint(layer, x, rope, layout, kv, use_reentrant=False)
                else:
                    x = layer(x, rope, layout, kv)
            return layout.in_rows(self.norm(x))

    def head(self, x):
        """Logits (..., V), in the dtype of products, of hidden states (..., C)."""
        head = self.embed_tokens if self.cfg.tied else self.lm_head
        with self.autocast():
            return F.linear(x, head.weight)

    def probs(self, h):
        """The next token's probabilities (n, V). h (n, C): hidden states / temperature."""
        return self.head(h).float().softmax(-1)     # without a bias, h / t gives logits / t

    def logps(self, h, tokens):
        """log pi (n,) of the next tokens (n,); h as in `probs`. Logits are made in parts."""
        size = max(1, self.most_logits // self.cfg.vocab_size)
        if len(tokens) > size:
            parts = zip(h.split(size), tokens.split(size))
            return torch.cat([checkpoint(self.logps, *x, use_reentrant=False) for x in parts])
        return LogSoftmaxAt.apply(self.head(h), tokens)

    def autocast(self):
        """A context that runs matrix products in `amp`."""
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    @property
    def device(self):
        return self.norm.weight.device

class ScalarHead(nn.Module):
    """A critic or a reward model: a scalar per token, linear in the hidden state of its trunk, a
    GPT, or else of the policy."""

    def __init__(self, size, trunk=None, std=0.0, generator=None):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(size, 1)
        nn.init.normal_(self.head.weight, std=std, generator=generator)
        nn.init.zeros_(self.head.bias)
        unfitted = torch.tensor([0.0, torch.inf])  # mean and std of scores: all count as 0
        self.norm = nn.Parameter(unfitted, requires_grad=False)

    def forward(self, ids, layout=None, h=None):
        """Scalars (B, T) of ids (B, T); without a trunk, of the policy's states h (B, T, C)."""
        if self.trunk is not None:
            h = self.trunk(ids, layout=layout)
        return h.float() @ self.head.weight[0] + self.head.bias

def token_logps(gpt, ids, mask, temperature, critic=None, layout_of=Rows):
    """log pi of each sampled token, and the critic's value of the state before it, both (B, T), 0
    where mask is False; None without a critic."""
    ids = ids.cpu()  # for the layout
    mask = mask.cpu()
    before = ids[:, :-1]
    device = gpt.device
    layout = layout_of(gpt, before, mask[:, 1:])
    at = mask[:, 1:].flatten().nonzero()[:, 0]  # the m sampled tokens
    scored, tokens, index = layout.once(at, ids[:, 1:].flatten()[at])
    h = gpt(before, layout=layout)  # (B, T - 1, C)
    states = F.embedding(send(scored, device), h.flatten(0, 1))
    logp = gpt.logps(states / temperature, send(tokens, device))  # (n,)
    logp = logp.index_select(0, send(index, device))  # (m,)
    logp = logp.new_zeros(before.numel()).index_copy(0, send(at, device), logp)
    logp = F.pad(logp.view_as(before), (1, 0))  # column t belongs to token t
    if critic is None:
        return logp, None
    value = F.pad(critic(before, layout, h), (1, 0))
    return logp, torch.where(send(mask, device), value, 0)
