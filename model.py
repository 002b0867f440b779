"""One GPT for the Llama, Qwen2, Qwen3 and GPT-2 families, with Llama's parameter names: RoPE or
learned positions, RMSNorm or LayerNorm, SwiGLU or GELU, grouped-query attention, no dropout.

Dimensions: B rows, T tokens, C channels, H query heads, K key/value heads, D channels per head,
L layers, S slots of the KV cache, V vocabulary. Padding is on the right: causal attention hides it.
"""
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from data import UserError

@dataclass(frozen=True)
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
    rope_scaling: tuple = ()    # Llama 3's: factor, low and high factor, original context
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    mlp: Literal["swiglu", "gelu"] = "swiglu"       # GELU: the tanh approximation
    bias: Literal["none", "qkv", "all"] = "none"    # which linear layers have one
    qk_norm: bool = False       # RMSNorm on each query and key head
    tied: bool = True           # the head shares the embedding's weights

    def __post_init__(self):
        for f in fields(self):
            if (choices := get_args(f.type)) and getattr(self, f.name) not in choices:
                raise UserError(f"{f.name} must be one of {', '.join(choices)}")
        if (self.n_embd % self.n_head and not self.head_size) or self.n_head % self.n_kv_head:
            raise UserError("n_head must divide n_embd, and n_kv_head must divide n_head")
        object.__setattr__(self, "head_size", self.head_size or self.n_embd // self.n_head)
        if self.head_size % 2 and self.positions == "rope":
            raise UserError(f"RoPE needs an even head size, not {self.head_size}")

class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):       # F.rms_norm: one kernel on a GPU, twice the time on a CPU
        if not x.is_cpu:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
        return x * (square + self.eps).rsqrt() * self.weight

def for_products(x):
    """x in autocast's dtype: cast once, not in each of the products that read it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

def rotate(x, cos, sin):
    """RoPE: rotates the pairs (x[i], x[i + D/2]) of x (B, T, H, D). cos (B, T, 1, D) has each
    cosine twice, sin each sine, the first time negated."""
    return (x * cos + x.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)

def causal_attention(q, k, v):
    """Attention of q (B, T, H, D) to k and v (B, T, K, D) of the same and earlier tokens. On a CPU
    always in float32, as the backward pass in bfloat16 takes 5 times as long there."""
    if v.is_cpu and v.dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)                # (B, ., T, D)
    with torch.autocast("cpu", enabled=False):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2)

def send(x, device):
    """x on a device; the host does not wait for a copy to a GPU."""
    if x.is_cpu and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)

class Rows:
    """The plain layout: all tokens of all rows, (B, T). A token's cache slot is its position."""

    def __init__(self, ids, mask=None, pos=None, device=torch.device("cpu"), keys=None, slots=None):
        columns = torch.arange(ids.size(1), device=device)
        self.ids, self.pos = send(ids, device), columns.expand_as(ids) if pos is None else pos
        if keys is not None:        # of a cache, (B, K, S, D), of which the first slots are in use
            self.row = torch.arange(len(ids), device=device)[:, None]
            self.slots = slots or keys.size(2)
            later = torch.arange(self.slots, device=device) > self.pos[:, None, :, None]
            self.attn_mask = keys.new_zeros(later.shape).masked_fill_(later, float("-inf"))

    def attend(self, q, k, v, cache):
        """Attention to k and v or, once they are added to it, to a layer's cache, (B, K, S, D).
        Query heads that share keys act as tokens: on CUDA much faster than enable_gqa."""
        if cache is None:
            return causal_attention(q, k, v)
        cache[0][self.row, :, self.pos] = k.to(cache[0].dtype)
        cache[1][self.row, :, self.pos] = v.to(cache[1].dtype)
        k, v = (x[:, :, :self.slots] for x in cache)
        q = q.unflatten(2, (k.size(1), -1)).transpose(1, 2)                     # (B, K, T, H/K, D)
        mask = self.attn_mask[..., None, :].expand(-1, -1, -1, q.size(3), -1)   # (B, 1, T, H/K, S)
        y = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask.flatten(2, 3))
        return y.unflatten(2, q.shape[2:4]).transpose(1, 2).flatten(2, 3)

    def in_rows(self, x):
        """Hidden states in the layout of ids, (B, T, C)."""
        return x

    @staticmethod
    def to_score(ids, mask):
        """The n tokens to score, as indices (n,) into the flattened ids, and for each True in mask
        (B, T) its index among these n, (B, T); on the host."""
        return mask.flatten().nonzero()[:, 0], mask.flatten().cumsum(0).view_as(mask) - 1

class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.n_kv_head, D = cfg.n_head, cfg.n_kv_head, cfg.head_size
        bias = cfg.bias != "none"
        self.q_proj = nn.Linear(cfg.n_embd, cfg.n_head * D, bias=bias)
        self.k_proj = nn.Linear(cfg.n_embd, cfg.n_kv_head * D, bias=bias)
        self.v_proj = nn.Linear(cfg.n_embd, cfg.n_kv_head * D, bias=bias)
        self.o_proj = nn.Linear(cfg.n_head * D, cfg.n_embd, bias=cfg.bias == "all")
        self.q_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x, rope, layout, cache):
        x = for_products(x)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.n_head, -1)))              # (B, T, H, D)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.n_kv_head, -1)))           # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (self.n_kv_head, -1))
        if rope is not None:        # both in one go: fewer kernels
            heads = torch.cat((q, k), 2)
            q, k = rotate(heads, *rope).split((self.n_head, self.n_kv_head), 2)
        y = layout.attend(q, k, v, cache)                                             # (B, T, H, D)
        return self.o_proj(y.flatten(2))

class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        C, inner, bias = cfg.n_embd, cfg.n_inner, cfg.bias == "all"
        self.gate_proj = nn.Linear(C, inner, bias=bias) if cfg.mlp == "swiglu" else None
        self.up_proj = nn.Linear(C, inner, bias=bias)
        self.down_proj = nn.Linear(inner, C, bias=bias)

    def forward(self, x):
        x = for_products(x)
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        norm = RMSNorm if cfg.norm == "rms" else nn.LayerNorm
        self.input_layernorm = norm(cfg.n_embd, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = norm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x, rope, layout, cache):
        x = x + self.self_attn(self.input_layernorm(x), rope, layout, cache)
        return x + self.mlp(self.post_attention_layernorm(x))

class GPT(nn.Module):
    def __init__(self, cfg, generator=None):
        super().__init__()
        self.cfg = cfg
        self.amp = None         # torch.bfloat16: autocast to it; the weights stay float32
        self.recompute = False  # activation checkpointing, a layer at a time
        self.layout_class = Rows        # of training passes; see also run/prefixes.py
        self.cache_class = None         # of sampling; None: caches.KVCache
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = (RMSNorm if cfg.norm == "rms" else nn.LayerNorm)(cfg.n_embd, cfg.norm_eps)
        if cfg.positions == "learned":
            self.embed_positions = nn.Embedding(cfg.block_size, cfg.n_embd)
        if not cfg.tied:
            self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.set_angles()
        std = (2 / (5 * cfg.n_embd)) ** 0.5     # GPT-2's 0.02 at width 1000
        for name, m in self.named_modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):    # smaller for residual projections
                scale = (2 * cfg.n_layer) ** -0.5 if name.endswith(("o_proj", "down_proj")) else 1
                nn.init.normal_(m.weight, std=std * scale, generator=generator)

    def set_angles(self):
        """Sets the buffers, which no file holds: RoPE's cos and sin (block_size, 1, D). Llama 3's
        scaling divides low frequencies (wavelengths long for the original context) by `factor`."""
        c = self.cfg
        inv_freq = 1 / c.rope_theta ** (torch.arange(0, c.head_size, 2) / c.head_size)
        if c.rope_scaling:                      # arXiv 2407.21783
            factor, low, high, context = c.rope_scaling
            kept = (context * inv_freq / (2 * torch.pi) - low) / (high - low)
            inv_freq = torch.lerp(inv_freq / factor, inv_freq, kept.clamp(0, 1))
        angle = torch.arange(c.block_size)[:, None] * inv_freq
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)

    def forward(self, ids, pos=None, cache=None, mask=None, slots=None):
        """Hidden states (B, T, C) of ids (B, T), for `head`. pos (B, T): positions, if not 0..T-1.
        A cache is written to, and its first `slots` are read (None: all). Without one, states after
        a row's last True in mask are arbitrary."""
        if ids.size(1) > self.cfg.block_size:
            raise UserError(f"{ids.size(1)} tokens do not fit a context of {self.cfg.block_size}")
        with self.autocast():
            if cache is None:
                layout = self.layout_class(ids, mask, pos, self.device)
                cache = [None] * self.cfg.n_layer
            else:
                layout = Rows(ids, mask, pos, self.device, cache[0][0], slots)
            x, rope = self.embed_tokens(layout.ids), None                                # (B, T, C)
            if self.cfg.positions == "learned":
                x = x + self.embed_positions(layout.pos)
            else:
                rope = self.cos[layout.pos], self.sin[layout.pos]                     # (B, T, 1, D)
            for layer, kv in zip(self.layers, cache):
                if self.recompute and torch.is_grad_enabled():
                    x = checkpoint(layer, x, rope, layout, kv, use_reentrant=False)
                else:
                    x = layer(x, rope, layout, kv)
            return layout.in_rows(self.norm(x))

    def head(self, x):
        """Logits (..., V), in float32, of hidden states (..., C)."""
        head = self.embed_tokens if self.cfg.tied else self.lm_head
        with self.autocast():
            return F.linear(x, head.weight).float()

    def probs(self, h):
        """The next token's probabilities (n, V). h (n, C): hidden states over the temperature."""
        return self.head(h).softmax(-1)         # without a bias, h / t gives logits / t

    def logps(self, h, tokens):
        """log pi (n,) of the tokens (n,) that come next; h as in `probs`."""
        return self.head(h).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    def autocast(self):
        """A context that runs matrix products in `amp`."""
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    @property
    def device(self):
        return self.norm.weight.device

def most_logits(device):
    """The maximum number of logits at a time: each part of them reads the head's weights again."""
    if device.type == "cuda":       # a tenth of the memory, with their gradients
        return torch.cuda.get_device_properties(device).total_memory // 128
    return 2 ** 26          # 256 MiB in float32

def token_logps(model, ids, mask, temperature, critic=None):
    """log pi of each sampled token, and the critic's value of the state before it (None without a
    critic), both (B, T), 0 where mask is False. In training the shift by one is only here. Logits
    of more than `most_logits` are computed in parts, and again in the backward pass."""
    ids, mask, device = ids.cpu(), mask.cpu(), model.device     # layouts are made on the host
    h = model(ids[:, :-1], mask=mask[:, 1:])                                      # (B, T - 1, C)
    before = F.pad(h, (0, 0, 1, 0)).flatten(0, 1)               # the state before each token
    scored, index = model.layout_class.to_score(ids, mask)                           # (n,), (B, T)
    before = before[send(scored, device)] / temperature                                   # (n, C)
    tokens = send(ids.flatten()[scored], device)                                            # (n,)
    size = max(1, most_logits(device) // model.cfg.vocab_size)
    if len(tokens) <= size:
        logp = model.logps(before, tokens)                                                  # (n,)
    else:
        logp = torch.cat([checkpoint(model.logps, *part, use_reentrant=False)
                          for part in zip(before.split(size), tokens.split(size))])
    sampled = send(mask, device)
    logp = torch.where(sampled, F.pad(logp, (0, 1))[send(index, device)], 0)                # (B, T)
    if critic is None:
        return logp, None
    value = F.pad(critic(ids[:, :-1], mask[:, 1:], h), (1, 0))
    return logp, torch.where(sampled, value, 0)
