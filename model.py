"""One GPT for the families of Llama, Qwen2, Qwen3 and GPT-2: RoPE (half-split) or learned
positions, RMSNorm or LayerNorm, SwiGLU or GELU, grouped-query attention, no dropout. Parameters
carry Llama's names; `run/pretrained.py` reads and writes checkpoints.

Dimensions: B rows, T tokens, n distinct ones, C channels, H query heads, K key/value heads, D
channels of a head, L layers, S slots of the KV cache, V vocabulary. Rows are padded on the right,
so a causal mask is all that keeps real tokens from seeing padding; with a cache, the slot of a
token is its position in its row.
"""
import copy
import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from data import Fault

@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; what the families differ in stands last."""
    vocab_size: int = 257
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2          # each key/value head serves n_head / n_kv_head query heads
    n_embd: int = 128
    n_inner: int = 352          # width of the MLP
    block_size: int = 128       # most tokens of a row
    head_size: int = 0          # D; 0: n_embd / n_head
    positions: str = "rope"     # or "learned": a table added to the embedding
    rope_theta: float = 10000.0
    rope_scaling: tuple = ()    # Llama 3's: factor, low and high frequency factor, first context
    norm: str = "rms"           # or "layer"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"         # or "gelu", its approximation by tanh
    bias: str = "none"          # or "qkv", "all": which linear layers have one
    qk_norm: bool = False       # RMSNorm of each query and key head
    tied: bool = True           # the head is the embedding

    def __post_init__(self):
        for name, x in vars(self).items():      # bounds: before anything is built, or multiplied
            most = 1000 if name == "n_layer" else 2 ** 20
            if type(x) is int and not (name != "head_size") <= x <= most:
                raise Fault(f"{name} {x} is less than 1 or more than {most}")
        if self.n_embd % self.n_head and not self.head_size or self.n_head % self.n_kv_head:
            raise Fault(f"n_embd {self.n_embd} must be a multiple of n_head {self.n_head}, "
                        f"and that of n_kv_head {self.n_kv_head}")
        object.__setattr__(self, "head_size", self.head_size or self.n_embd // self.n_head)
        if self.head_size % 2 and self.positions == "rope":
            raise Fault(f"RoPE turns pairs: the size of a head, {self.head_size}, is odd")

class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):       # F.rms_norm squares into a tensor of its own: twice the CPU time
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
        return x * (square + self.eps).rsqrt() * self.weight

def rotate(x, cos, sin):
    """RoPE: turn the pairs (x[i], x[i + D/2]) of each head by their angles. x (B, T, H, D)."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).to(x.dtype)

def distinct(ids, mask):
    """The tokens of rows (B, T) that have to be computed: up to the last one in `mask` (B, T) of
    their row, but where the row above has begun in the same way. Gives the places of these n
    tokens, counted through all rows, (n,); and which of them stands at each place, (B, T)."""
    used = mask.flip(1).cumsum(1).flip(1) > 0
    shared = ((ids[1:] == ids[:-1]) & used[:-1]).cumprod(1).bool()
    new = used & ~F.pad(shared, (0, 0, 1, 0))
    count = new.flatten().cumsum(0).view_as(ids)
    return new.flatten().nonzero()[:, 0], torch.where(new, count - 1, 0).cummax(0).values

def in_rows(x, at):
    """Heads x (n, H, D) of tokens at their places, for attention: (B, H, T, D). On a CPU bfloat16
    becomes float32: of its attention the backward pass takes five times as long there."""
    x = x.float() if x.is_cpu and x.dtype == torch.bfloat16 else x
    return F.embedding(at, x.flatten(1)).unflatten(-1, x.shape[1:]).transpose(1, 2)

class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.n_kv_head, D = cfg.n_head, cfg.n_kv_head, cfg.head_size
        linear = partial(nn.Linear, cfg.n_embd, bias=cfg.bias != "none")
        self.q_proj = linear(cfg.n_head * D)
        self.k_proj, self.v_proj = linear(cfg.n_kv_head * D), linear(cfg.n_kv_head * D)
        self.o_proj = nn.Linear(cfg.n_head * D, cfg.n_embd, bias=cfg.bias == "all")
        self.q_norm, self.k_norm = ((RMSNorm(D, cfg.norm_eps) for _ in range(2)) if cfg.qk_norm
                                    else (nn.Identity(), nn.Identity()))

    def forward(self, x, rope, place, cache):
        H, K = self.n_head, self.n_kv_head
        q = self.q_norm(self.q_proj(x).unflatten(-1, (H, -1)))               # (n, H, D), or
        k = self.k_norm(self.k_proj(x).unflatten(-1, (K, -1)))               # (B, T, K, D)
        v = self.v_proj(x).unflatten(-1, (K, -1))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is None:
            new, at = place
            q, k, v = in_rows(q, at), in_rows(k, at), in_rows(v, at)         # (B, H or K, T, D)
            with torch.autocast("cpu", enabled=False):      # it would round them again
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
            y = F.embedding(new, y.transpose(1, 2).flatten(2).flatten(0, 1))        # (n, H * D)
        else:
            (pos, bias), (B, T, _) = place, x.size()
            rows = torch.arange(B, device=x.device)[:, None]
            cache[0][rows, :, pos], cache[1][rows, :, pos] = k.to(cache.dtype), v.to(cache.dtype)
            # The query heads that share a key head stand side by side as if they were time, so the
            # cache is read once, not repeated H / K times.
            q = q.view(B, T, K, H // K, -1).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * T, -1)
            y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=bias)
            y = y.view(B, H, T, -1).transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(y)

class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        C, inner, linear = cfg.n_embd, cfg.n_inner, partial(nn.Linear, bias=cfg.bias == "all")
        self.gate_proj = linear(C, inner) if cfg.mlp == "swiglu" else None
        self.up_proj, self.down_proj = linear(C, inner), linear(inner, C)

    def forward(self, x):
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

    def forward(self, x, rope, place, cache):
        x = x + self.self_attn(self.input_layernorm(x), rope, place, cache)
        return x + self.mlp(self.post_attention_layernorm(x))

class GPT(nn.Module):
    def __init__(self, cfg, generator=None):
        super().__init__()
        self.cfg = cfg
        self.amp = None         # torch.bfloat16: autocast to it; the weights stay float32
        self.recompute = False  # activations in the backward pass, a layer at a time
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = (RMSNorm if cfg.norm == "rms" else nn.LayerNorm)(cfg.n_embd, cfg.norm_eps)
        if cfg.positions == "learned":
            self.embed_positions = nn.Embedding(cfg.block_size, cfg.n_embd)
        if not cfg.tied:
            self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.set_angles()
        std = (2 / (5 * cfg.n_embd)) ** 0.5     # GPT-2's 0.02 at width 1000, more in a narrower one
        for name, p in self.named_parameters():
            if p.dim() == 2:                    # and its residual branches shrink with depth
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * cfg.n_layer) ** -0.5 if residual else 1
                nn.init.normal_(p, std=std * scale, generator=generator)

    def set_angles(self):
        """The tables of RoPE, cos and sin (block_size, 1, D) of each position's angles. Llama 3's
        scaling slows the turns that are slow against its first context (arXiv 2407.21783)."""
        c = self.cfg
        turn = 1 / c.rope_theta ** (torch.arange(0, c.head_size, 2) / c.head_size)  # as elsewhere
        if c.rope_scaling:
            factor, low, high, first = c.rope_scaling
            kept = (first * turn / (2 * math.pi) - low) / (high - low)
            turn = torch.lerp(turn / factor, turn, kept.clamp(0, 1))
        angle = torch.arange(c.block_size)[:, None] * turn
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)

    def forward(self, ids, pos=None, cache=None, mask=None):
        """Hidden states (B, T, C) after the last norm, for `head`; ids (B, T).

        Without a cache, row positions are 0..T-1. What rows one below the other begin with alike,
        as completions with their prompt, is computed once, and what comes after the last token in
        mask (B, T) not at all: attention sees rows, the rest a list of n tokens, (n, C). With a
        cache (`new_cache`), pos (B, T) says where each token stands in its row: its key and value
        are written there, in place, and it sees the slots up to itself.
        """
        T, most = ids.size(1), self.cfg.block_size
        if T > most:
            raise Fault(f"{T} tokens do not fit the model's context of {most}")
        with self.autocast():
            if cache is None:
                new, at = distinct(ids, torch.ones_like(ids) if mask is None else mask)
                place, pos, ids = (new, at), new % T, ids.flatten()[new]
            else:
                place = pos, self.cache_bias(cache, pos)
            x, rope = self.embed_tokens(ids), None                           # (n, C) or (B, T, C)
            if self.cfg.positions == "learned":
                x = x + self.embed_positions(pos)
            else:
                rope = self.cos[pos], self.sin[pos]                          # (.., 1, D)
            for i, layer in enumerate(self.layers):
                if self.recompute and torch.is_grad_enabled():
                    x = checkpoint(layer, x, rope, place, None, use_reentrant=False)
                else:
                    x = layer(x, rope, place, None if cache is None else cache[i])
            x = self.norm(x)
            return F.embedding(at, x) if cache is None else x

    def cache_bias(self, cache, pos):
        """What attention adds to its scores, 0 for the slots up to the token's own and -inf for
        those after it, (B, 1, H / K * T, S): once for each query head of a key head."""
        seen = torch.arange(cache.size(4), device=pos.device) <= pos[..., None]          # (B, T, S)
        bias = torch.where(seen, 0, float("-inf")).to(self.norm.weight.dtype)
        return bias.repeat(1, self.cfg.n_head // self.cfg.n_kv_head, 1)[:, None]

    def head(self, x):
        """Logits (..., V) in float32 of hidden states (..., C)."""
        with self.autocast():
            return F.linear(x, self.table.weight).float()

    @property
    def table(self):
        return self.embed_tokens if self.cfg.tied else self.lm_head

    def autocast(self):
        """The context in which products are done in `amp`."""
        return torch.autocast(self.device.type, self.amp, enabled=self.amp is not None)

    @property
    def device(self):
        return self.norm.weight.device

    def new_cache(self, rows, slots):
        """Empty KV cache (L, 2, rows, K, slots, D): keys at [:, 0], values at [:, 1]."""
        c, like = self.cfg, self.norm.weight
        return torch.zeros(c.n_layer, 2, rows, c.n_kv_head, slots, c.head_size,
                           dtype=self.amp or like.dtype, device=like.device)

    def frozen(self):
        """A copy without gradients. Under autocast its matrices are rounded once, here, instead of
        at every use, the head apart from the embedding: less memory, and the same results."""
        copied = copy.deepcopy(self).requires_grad_(False)
        if self.amp and self.cfg.tied:
            copied.cfg = dataclasses.replace(self.cfg, tied=False)
            copied.lm_head = nn.Linear(self.cfg.n_embd, 1, bias=False, device="meta")
            copied.lm_head.weight = nn.Parameter(self.embed_tokens.weight.detach(), False)
        for layer in copied.modules():
            if isinstance(layer, nn.Linear) and self.amp:
                layer.weight.data = layer.weight.data.to(self.amp)
        return copied

class ScalarHead(nn.Module):
    """A number for each token, a linear map of the hidden state after it: of the GPT `trunk`, or
    without one of hidden states that are handed in. A critic, or a reward model."""

    def __init__(self, size, trunk=None, std=0.0, generator=None):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(size, 1)
        nn.init.normal_(self.head.weight, std=std, generator=generator)
        nn.init.zeros_(self.head.bias)
        self.norm = nn.Parameter(torch.tensor([0.0, 1.0]), requires_grad=False)     # mean and std

    def forward(self, ids, mask=None, h=None):
        """(B, T) of ids (B, T), up to the last in `mask`; h (B, T, C) where there is no trunk."""
        h = h if self.trunk is None else self.trunk(ids, mask=mask)
        return h.float() @ self.head.weight[0] + self.head.bias

# ------------------------------------------------------------------------------- log-probabilities

CHUNK = 2 ** 26     # most logits at a time, 256 MiB in float32

def token_logps(model, ids, mask, temperature, critic=None):
    """log pi of each sampled token, and the critic's value of the state before it (None without a
    critic), both (B, T), 0 where mask is False. The shift by one lives here. More than CHUNK logits
    are made in parts, and again in the backward pass: there is no (B, T, V) tensor."""
    def logps_of(h, tokens):
        """log pi of the `tokens` (n,) after the states h (n, C)."""
        logits = model.head(h / temperature)                                               # (n, V)
        return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    def in_columns(x):
        """The numbers x (n,) of the sampled tokens in their columns, (B, T)."""
        return F.pad(x.new_zeros(sampled.shape).masked_scatter(sampled, x), (1, 0))

    sampled = mask[:, 1:]
    h = model(ids[:, :-1], mask=sampled)            # (B, T - 1, C): column t predicts token t + 1
    new, at = distinct(ids, mask)
    once, which = at[mask].unique(return_inverse=True)      # what rows begin with alike, once
    row, t = torch.unravel_index(new[once], ids.shape)
    states, tokens = h[row, t - 1], ids[row, t]                                     # (n, C), (n,)
    size = max(1, CHUNK // model.cfg.vocab_size)
    of = logps_of if len(tokens) <= size else partial(checkpoint, logps_of, use_reentrant=False)
    logp = torch.cat([of(*part) for part in zip(states.split(size), tokens.split(size))])
    value = None if critic is None else in_columns(critic(ids[:, :-1], sampled, h)[sampled])
    return in_columns(logp[which]), value
