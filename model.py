"""One GPT, in the arithmetic of the Llama family: RoPE (half-split), RMSNorm, SwiGLU, grouped-query
attention, a tied embedding, no biases, no dropout. Parameters carry Hugging Face's names, so that a
checkpoint is a `model.safetensors` with a `config.json` beside it and needs no conversion.

Dimensions: B rows, T tokens, C channels, H query heads, K key/value heads, D = C / H, L layers,
S slots of the KV cache, V vocabulary. Rows are padded on the right, so a causal mask is all that
keeps real tokens from seeing padding; with a cache, the slot of a token is its position in its row.
"""
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from data.run import (Fault, fit, load_tensors, machine, read_tensors, rng, say, world,
                      write_tensors, write_whole)


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
        load_tensors(model, {n.removeprefix("model."): t for n, t in tensors.items()}, folder)
        return model

    def save_pretrained(self, folder, eos_token_id=None):
        """Write config.json and model.safetensors, the names and layout of Hugging Face's Llama."""
        hf = {theirs: getattr(self.cfg, ours) for ours, theirs in HF_NAMES.items()}
        hf |= dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
                   tie_word_embeddings=True, eos_token_id=eos_token_id, dtype="float32")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / "config.json", json.dumps(hf, indent=2))
        tensors = {"model." + n: p.detach() for n, p in self.named_parameters()}
        write_tensors(Path(folder) / "model.safetensors", tensors, {"format": "pt"})

class ScalarHead(nn.Module):
    """A number for each token, a linear map of the hidden state after it: of the GPT `trunk`, or
    without one of hidden states that are handed in. A critic, or a reward model."""

    def __init__(self, size, trunk=None, std=0.0, generator=None):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(size, 1)
        nn.init.normal_(self.head.weight, std=std, generator=generator)
        nn.init.zeros_(self.head.bias)
        self.norm = nn.Parameter(torch.tensor([0.0, 1.0]), requires_grad=False)     # mean and std

    def forward(self, ids, h=None):
        """(B, T) of ids (B, T); h (B, T, C) where there is no trunk."""
        h = h if self.trunk is None else self.trunk(ids)
        return self.head(h.float())[..., 0]

HF_NAMES = dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
                n_kv_head="num_key_value_heads", n_embd="hidden_size", n_inner="intermediate_size",
                block_size="max_position_embeddings", rope_theta="rope_theta",
                norm_eps="rms_norm_eps")

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

def last_tokens(mask):
    """The last sampled token of each row, (B, T)."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

def token_logps(model, ids, mask, temperature, critic=None):
    """log pi of each sampled token, and the critic's value of the state before it (None without a
    critic), both (B, T), 0 where mask is False. The shift by one lives here."""
    h = model(ids[:, :-1])                          # (B, T - 1, C): column t predicts token t + 1
    on = mask[:, 1:]
    logits = model.head(h[on]) / temperature                                               # (n, V)
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:][on][:, None])[:, 0]
    spread = lambda x: F.pad(x.new_zeros(on.shape).masked_scatter(on, x), (1, 0))          # (B, T)
    return spread(logp), critic and spread(critic(ids[:, :-1], h)[on])

@torch.no_grad()
def by_parts(f, ids, mask, budget):
    """f(ids, mask), a tuple of (B, T) tensors or None, in micro-batches and without a graph."""
    out = None
    for rows, T in micro_batches(row_lengths(mask), budget):
        parts = f(ids[rows, :T], mask[rows, :T])
        out = out or [x if x is None else torch.zeros_like(ids, dtype=x.dtype) for x in parts]
        for whole, part in zip(out, parts):
            if part is not None:
                whole[rows, :T] = part.to(ids.device)
    return out

# -------------------------------------------------------------------------------- the warm start

WARM = ("task", "difficulty", "seed", "max_new", "n_layer", "n_head", "n_kv_head", "n_embd",
        "warm_steps", "warm_batch", "warm_lr")                  # what a warm start depends on

def warm_start(model, task, problems, cfg, encoding):
    """Supervised fine-tuning on fresh demonstrations."""
    (rank, ranks), device, encode = world(), model.norm.weight.device, encoding.encode_ordinary
    pad = lambda rows: pad_sequence([torch.tensor(r, device=device) for r in rows], True)
    def losses(step):
        source = rng(cfg, "warm start", step)
        rows = [(encode(p.prompt), encode(task.demonstration(p, source)) + [encoding.eot_token])
                for p in source.choices(problems, k=cfg.warm_batch)]
        tokens = sum(len(text) for _, text in rows)         # of all ranks; this one takes its rows
        if (long := max(len(text) for _, text in rows)) > cfg.max_new:
            raise Fault(f"a demonstration of {long} tokens is longer than --max_new {cfg.max_new}")
        rows = rows[rank::ranks]
        ids = pad([prompt + text for prompt, text in rows])
        mask = pad([[False] * len(prompt) + [True] * len(text) for prompt, text in rows])
        for micro, T in micro_batches(row_lengths(mask), cfg.micro_tokens):
            logp, _ = token_logps(model, ids[micro, :T], mask[micro, :T], 1.0)
            yield -logp.sum() / tokens
    fit("warm start", model, losses, cfg.warm_steps, cfg.warm_lr, cfg.grad_clip)

    if rank == 0:           # kept for the next run that would make the same; the note goes last
        folder, note = cfg.folder / "warm_start", cfg.folder / "warm_start" / "warm_start.json"
        note.unlink(missing_ok=True)
        model.save_pretrained(folder, encoding.eot_token)
        write_whole(note, warm_note(cfg, task))

def warm_note(cfg, task):
    """What a warm start depends on: settings, and the task's own file."""
    source = Path(task.__file__).read_bytes() if hasattr(task, "__file__") else b""
    return json.dumps({name: getattr(cfg, name) for name in WARM}
                      | {"sha256 of the task": hashlib.sha256(source).hexdigest()})

def load_model(folder, cfg, encoding):
    """The model in a folder, on its device; raises Fault if the tokenizer is not its own."""
    model = GPT.from_pretrained(folder).place(cfg)
    if model.cfg.vocab_size != encoding.n_vocab:
        raise Fault(f"{folder}: a vocabulary of {model.cfg.vocab_size}, and the tokenizer has "
                    f"{encoding.n_vocab}")
    return model

def starting_model(cfg, task, longest, encoding, shape=None):
    """The policy before RL, and whether it is whole: --init's, or a kept one, or of the `shape` (a
    dict) of a checkpoint to come. Otherwise it is new, and needs its warm start."""
    folder, model = cfg.folder / "warm_start", None
    note = folder / "warm_start.json"
    if shape is not None:
        model = GPT(GPTConfig(**shape)).place(cfg)
    elif cfg.init or note.exists() and note.read_text() == warm_note(cfg, task):
        say(f"starting from {cfg.init or folder}")
        model = load_model(cfg.init or folder, cfg, encoding)
    if model is not None:
        if longest + cfg.max_new > model.cfg.block_size:
            raise Fault(f"{longest} tokens of a prompt and --max_new {cfg.max_new} do not fit the "
                        f"model's context of {model.cfg.block_size}")
        return model, True
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    shape = GPTConfig(encoding.n_vocab, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.n_embd,
                      n_inner=4 * cfg.n_embd, block_size=context)
    seed = rng(cfg, "weights").getrandbits(63)
    return GPT(shape, torch.Generator().manual_seed(seed)).place(cfg), False
