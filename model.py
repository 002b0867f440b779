"""One GPT, in the arithmetic of the Llama family: RoPE (half-split), RMSNorm, SwiGLU, grouped-query
attention, a tied embedding, no biases, no dropout. Parameters carry Hugging Face's names, so that a
checkpoint is a `model.safetensors` with a `config.json` beside it and needs no conversion.

Dimensions: B rows, T tokens, C channels, H query heads, K key/value heads, D = C / H, L layers,
S slots of the KV cache, V vocabulary. Rows are padded on the right, so a causal mask is all that
keeps real tokens from seeing padding; with a cache, the slot of a token is its position in its row.
"""
import ctypes
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


class Fault(Exception):
    """Something the user can mend: `grpo.py` prints it as one line and exits with code 2."""

@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 257
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2          # each key/value head serves n_head / n_kv_head query heads
    n_embd: int = 128
    n_inner: int = 352          # width of the MLP, about 8/3 n_embd rounded to 32
    block_size: int = 128       # most tokens of a row
    positions: str = "rope"     # or "learned": a table added to the embedding, as in GPT-2
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise Fault(f"n_embd {self.n_embd} must be a multiple of n_head {self.n_head}, "
                        f"and that of n_kv_head {self.n_kv_head}")
        if self.n_embd // self.n_head % 2:
            raise Fault(f"RoPE turns pairs: n_embd / n_head = {self.n_embd // self.n_head} is odd")


# ---------------------------------------------------------------------------------- the model

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


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.n_kv_head, D = cfg.n_head, cfg.n_kv_head, cfg.n_embd // cfg.n_head
        self.q_proj = nn.Linear(cfg.n_embd, cfg.n_head * D, bias=False)
        self.k_proj = nn.Linear(cfg.n_embd, cfg.n_kv_head * D, bias=False)
        self.v_proj = nn.Linear(cfg.n_embd, cfg.n_kv_head * D, bias=False)
        self.o_proj = nn.Linear(cfg.n_head * D, cfg.n_embd, bias=False)

    def forward(self, x, rope, pos, cache, bias):
        B, T, _ = x.size()
        H, K = self.n_head, self.n_kv_head
        q = self.q_proj(x).view(B, T, H, -1)                                 # (B, T, H, D)
        k = self.k_proj(x).view(B, T, K, -1)                                 # (B, T, K, D)
        v = self.v_proj(x).view(B, T, K, -1)                                 # (B, T, K, D)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is None:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
            y = y.transpose(1, 2)                                            # (B, T, H, D)
        else:
            rows = torch.arange(B, device=x.device)[:, None]
            cache[0][rows, :, pos], cache[1][rows, :, pos] = k, v
            # The query heads that share a key head stand side by side as if they were time, so the
            # cache is read once, not repeated H / K times.
            q = q.view(B, T, K, H // K, -1).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * T, -1)
            y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=bias)
            y = y.view(B, H, T, -1).transpose(1, 2)                          # (B, T, H, D)
        return self.o_proj(y.reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.n_embd, cfg.n_inner, bias=False)
        self.up_proj = nn.Linear(cfg.n_embd, cfg.n_inner, bias=False)
        self.down_proj = nn.Linear(cfg.n_inner, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x, rope, pos, cache, bias):
        x = x + self.self_attn(self.input_layernorm(x), rope, pos, cache, bias)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    def __init__(self, cfg, generator=None):
        super().__init__()
        self.cfg = cfg
        self.amp = None     # torch.bfloat16: autocast to it; the weights stay float32
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        if cfg.positions == "learned":
            self.embed_positions = nn.Embedding(cfg.block_size, cfg.n_embd)
        D = cfg.n_embd // cfg.n_head
        turn = cfg.rope_theta ** (-torch.arange(0, D, 2) / D)                # angle by position
        cos, sin = (f(torch.arange(cfg.block_size)[:, None] * turn) for f in (torch.cos, torch.sin))
        self.register_buffer("cos", torch.cat((cos, cos), 1)[:, None], persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), 1)[:, None], persistent=False)
        std = (2 / (5 * cfg.n_embd)) ** 0.5     # GPT-2's 0.02 at width 1000, more in a narrower one
        for name, p in self.named_parameters():
            if p.dim() == 2:                    # and its residual branches shrink with depth
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * cfg.n_layer) ** -0.5 if residual else 1
                nn.init.normal_(p, std=std * scale, generator=generator)

    def forward(self, ids, pos=None, cache=None):
        """Hidden states (B, T, C) after the last norm, for `head`; ids (B, T).

        Without a cache, row positions are 0..T-1. With one (`new_cache`), pos (B, T) says where
        each token stands in its row: its key and value are written there, in place, and it sees the
        slots up to itself.
        """
        if ids.size(1) > self.cfg.block_size:
            raise Fault(f"{ids.size(1)} tokens do not fit the model's context of "
                        f"{self.cfg.block_size}")
        with self.autocast():
            return self.walk(ids, pos, cache)

    def walk(self, ids, pos, cache):
        T = ids.size(1)
        x = self.embed_tokens(ids)                                           # (B, T, C)
        where = slice(T) if pos is None else pos
        learned = self.cfg.positions == "learned"
        if learned:
            x = x + self.embed_positions.weight[where]
        rope = None if learned else (self.cos[where], self.sin[where])       # (B or none, T, 1, D)
        bias = None
        if cache is not None:
            seen = torch.arange(cache.size(4), device=ids.device) <= pos[..., None]   # (B, T, S)
            bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~seen, float("-inf"))
            bias = bias.repeat(1, self.cfg.n_head // self.cfg.n_kv_head, 1)[:, None]
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, pos, None if cache is None else cache[i], bias)
        return self.norm(x)

    def head(self, x):
        """Logits (..., V) in float32 of hidden states (..., C): the embedding, tied."""
        with self.autocast():
            return F.linear(x, self.embed_tokens.weight).float()

    def autocast(self):
        return torch.autocast(self.norm.weight.device.type, self.amp, enabled=self.amp is not None)

    def new_cache(self, rows, slots):
        """Empty KV cache (L, 2, rows, K, slots, D): keys at [:, 0], values at [:, 1]."""
        D = self.cfg.n_embd // self.cfg.n_head
        return torch.zeros(self.cfg.n_layer, 2, rows, self.cfg.n_kv_head, slots, D,
                           dtype=self.amp or self.norm.weight.dtype, device=self.norm.weight.device)

    def place(self, cfg):
        """Move to the device, and do matrix products in the dtype, that `machine` gives."""
        device, dtype, _ = machine(cfg)
        self.amp = torch.bfloat16 if dtype == "bfloat16" else None
        return self.to(device)

    @classmethod
    def from_pretrained(cls, folder):
        """The model in `folder`: config.json and model.safetensors of a tied Llama."""
        path = Path(folder) / "config.json"
        try:
            hf = json.loads(path.read_text())
            if hf["model_type"] != "llama" or not hf["tie_word_embeddings"]:
                raise Fault(f"{path}: not a Llama with tied embeddings")
            cfg = GPTConfig(**{ours: hf[theirs] for ours, theirs in HF_NAMES.items()})
        except (OSError, ValueError) as e:
            raise Fault(f"no model in {folder}: cannot read {path} ({e.__class__.__name__})") from e
        except (KeyError, TypeError) as e:
            raise Fault(f"{path}: not the config.json of a Llama: {e}") from e
        model = cls(cfg)
        tensors, _ = read_tensors(Path(folder) / "model.safetensors")
        model.load_tensors({n.removeprefix("model."): t for n, t in tensors.items()}, folder)
        return model

    def load_tensors(self, tensors, source):
        """Copy in every parameter by name; raises Fault where names or shapes differ."""
        own = dict(self.named_parameters())
        wrong = sorted(own.keys() ^ tensors.keys())
        wrong += [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
        if wrong:
            raise Fault(f"{source}: tensors missing, superfluous or of another shape: {wrong[0]}"
                        + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(tensors[name])

    def save_pretrained(self, folder, eos_token_id=None):
        """Write config.json and model.safetensors, the names and layout of Hugging Face's Llama."""
        hf = {theirs: getattr(self.cfg, ours) for ours, theirs in HF_NAMES.items()}
        hf |= dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
                   tie_word_embeddings=True, eos_token_id=eos_token_id, dtype="float32")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / "config.json", json.dumps(hf, indent=2))
        tensors = {"model." + n: p.detach() for n, p in self.named_parameters()}
        write_tensors(Path(folder) / "model.safetensors", tensors, {"format": "pt"})

# -------------------------------------------------------------------------------------- the rows

def row_lengths(mask):
    """Tokens of each row without its padding, (B,)."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)

def micro_batches(length, budget):
    """Chunks of rows (indices, longest length), each of at most `budget` tokens with its padding;
    rows go by length (B,), and none is padded to more than twice its own."""
    order = length.argsort(descending=True, stable=True)
    sizes = length[order].tolist()
    i = 0
    while i < len(sizes):
        fits = [j for j in range(i, min(len(sizes), i + max(1, budget // sizes[i])))
                if 2 * sizes[j] >= sizes[i]]
        yield order[i:fits[-1] + 1], sizes[i]
        i = fits[-1] + 1

# ------------------------------------------------------------------------ the machine, the ranks

def machine(cfg):
    """(device, dtype name, whether to compile): the best there is where cfg says auto."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    kind = next(d for d in there if there[d]) if cfg.device == "auto" else cfg.device
    if not there[kind]:
        raise Fault(f"--device {kind}: there is none here")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    dtype = ("bfloat16" if kind == "cuda" else "float32") if cfg.dtype == "auto" else cfg.dtype
    return device, dtype, kind == "cuda" if cfg.compile == "auto" else cfg.compile == "on"

def start_ranks(device):
    """Join the other processes, if torchrun started this one."""
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

def world():
    """(rank, number of ranks) under torchrun; (0, 1) without."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def all_reduce(x, op=dist.ReduceOp.SUM):
    """Sum (or `op`) of a tensor over all ranks."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x, op)
    return x

def say(text):
    """Print on one rank."""
    if world()[0] == 0:
        print(text, flush=True)

def keep_memory():
    """Have glibc keep freed memory. Handed back to the system, every activation faults in anew:
    with PyTorch on a CPU a twentieth of a training step and more."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2 ** 31 - 1)       # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)           # M_MMAP_THRESHOLD, at its largest

# ---------------------------------------------------------------------------------------- the files

HF_NAMES = dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
                n_kv_head="num_key_value_heads", n_embd="hidden_size", n_inner="intermediate_size",
                block_size="max_position_embeddings", rope_theta="rope_theta",
                norm_eps="rms_norm_eps")


def write_whole(path, content):
    """Write a file beside `path`, then rename it: a crash leaves the old file whole. content: text,
    or a function that writes a path."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(content) if isinstance(content, str) else content(beside)
    with open(beside, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside, path)


def write_tensors(path, tensors, metadata):
    """A safetensors file, whole or not at all. One metadata key: the order of several is random."""
    tensors = {n: t.cpu().contiguous() for n, t in tensors.items()}
    write_whole(Path(path), lambda p: save_file(tensors, p, metadata=metadata))


def read_tensors(path):
    """(tensors by name, metadata) of a safetensors file; raises Fault if it is not a whole one."""
    try:
        with safe_open(path, "pt") as f:
            return {n: f.get_tensor(n) for n in f.keys()}, f.metadata() or {}
    except (OSError, SafetensorError) as e:
        why = "not found" if not Path(path).exists() else f"not a whole safetensors file: {e}"
        raise Fault(f"{path}: {why}") from e


def training_state(model, ref, opt):
    """Every tensor of a run by name: of the policy, the reference, the optimizer."""
    named = lambda module: module.named_parameters() if module is not None else ()
    return {**{f"model.{n}": p.detach() for n, p in named(model)},
            **{f"ref.{n}": p.detach() for n, p in named(ref)},
            **{f"opt.{key}.{n}": x for n, p in named(model) for key, x in opt.state[p].items()}}


def load_training_state(tensors, source, model, ref, opt):
    """Put the tensors of `training_state` back in their places; `source` names them in a Fault."""
    part = lambda role: {n.removeprefix(role): x for n, x in tensors.items() if n.startswith(role)}
    model.load_tensors(part("model."), source)
    if ref is not None:
        ref.load_tensors(part("ref."), source)
    for n, p in model.named_parameters():       # none of it before the first optimizer step
        state = {key: tensors.get(f"opt.{key}.{n}") for key in ("step", "exp_avg", "exp_avg_sq")}
        if all(x is not None for x in state.values()):
            opt.state[p] = {key: x.to(p.device) for key, x in state.items()}
