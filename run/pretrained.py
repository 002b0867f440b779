"""Models: Hugging Face's layout in and out, new ones, and the memory that a run needs."""
import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from data import UserError, fetched, read_json
from data.tokenizer import byte_encoding, load_encoding
from model import GPT, GPTConfig
from run import dist
from run.caches import up
from run.device import device_of, dtype_of, has_static_cache
from run.files import write_tensors, write_whole
from run.passes import MICRO_TOKENS
from run.terminal import print0

EXTRA = {}      # for a fork: fields of GPTConfig that no family has, and names in config.json

# The fields of GPTConfig that distinguish a family, and the names of the others in config.json.
FAMILIES = {"llama": {}, "mistral": {}, "qwen2": dict(bias="qkv"),
            "qwen3": dict(qk_norm=True, head_size=128),         # the default there
            "gpt2": dict(positions="learned", norm="layer", mlp="gelu", bias="all")}
NAMES = dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
             n_kv_head="num_key_value_heads", n_embd="hidden_size", n_inner="intermediate_size",
             head_size="head_dim", block_size="max_position_embeddings", norm_eps="rms_norm_eps",
             tied="tie_word_embeddings")
GPT2_NAMES = dict(vocab_size="vocab_size", n_layer="n_layer", n_head="n_head", n_embd="n_embd",
                  n_inner="n_inner", block_size="n_positions", norm_eps="layer_norm_epsilon",
                  tied="tie_word_embeddings")
# The words in the names of GPT-2's tensors, by Llama's.
GPT2_WORDS = dict(embed_tokens="wte", embed_positions="wpe", layers="h", norm="ln_f",
                  input_layernorm="ln_1", post_attention_layernorm="ln_2", self_attn="attn",
                  q_proj="c_attn", k_proj="c_attn", v_proj="c_attn", o_proj="c_proj",
                  up_proj="c_fc", down_proj="c_proj")
TURNED = re.compile(r"\.c_\w+\.weight$")      # GPT-2's linear weights: stored transposed
CONSTANTS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")      # in older files
# Settings in a config.json that may change the arithmetic, with the values that do not.
ONLY = dict(hidden_act=["silu"], activation_function=["gelu_new", "gelu_pytorch_tanh"],
            attention_bias=[False], mlp_bias=[False], use_sliding_window=[False],
            is_causal=[True], partial_rotary_factor=[1],
            scale_attn_by_inverse_layer_idx=[False], quantization_config=[])

# ------------------------------------------------------------------ config.json

def read_config(hf):
    """The GPTConfig of a config.json's dict; UserError for anything not supported."""
    family = hf.get("model_type")
    if family not in [*FAMILIES]:
        raise UserError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    rope = rope_settings(hf)
    for key, values in ONLY.items():
        for about in (hf, rope):
            if about.get(key) is not None and about[key] not in values:
                raise UserError(f"{key} {about[key]!r} is not supported")
    if others := {*(hf.get("layer_types") or [])} - {"full_attention"}:
        raise UserError(f"layer_types {min(others)!r} is not supported")
    names = GPT2_NAMES if family == "gpt2" else NAMES
    given = {ours: hf[theirs] for ours, theirs in (names | EXTRA).items()
             if hf.get(theirs) is not None}
    given.setdefault("tied", family == "gpt2")
    given.setdefault("n_kv_head", given.get("n_head"))
    if family == "gpt2":
        given.setdefault("n_inner", 4 * given.get("n_embd", 0))
    for ours, theirs in names.items():
        if given.get(ours) is None and ours != "head_size":
            raise UserError(f"{theirs} is missing")
    cfg = GPTConfig(**FAMILIES[family] | given | {"rope_theta": rope["rope_theta"]})
    window = hf.get("sliding_window", 4096)         # transformers' default
    if family == "mistral" and window is not None and window < cfg.block_size:
        raise UserError(f"sliding_window {window} is not supported: it is less than "
                        f"max_position_embeddings {cfg.block_size}")
    return replace(cfg, rope_inv_freq=scaled_rope(cfg, rope))

def config_json(model):
    """A model's config.json: as loaded or, for a new one, a Llama's, which must hold all of it."""
    if not hasattr(model, "hf"):
        cfg, names = model.cfg, NAMES | EXTRA
        model.hf = {theirs: getattr(cfg, ours) for ours, theirs in names.items()} | dict(
            model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu",
            rope_theta=cfg.rope_theta, dtype="float32")
        for name, x in vars(read_config(model.hf)).items():
            if x != getattr(cfg, name):
                raise UserError(f"config.json would not say {name} {getattr(cfg, name)!r}: add it "
                                f"to EXTRA in run/pretrained.py")
    return model.hf

CONTEXT = "original_max_position_embeddings"        # before RoPE was scaled to a longer one

def rope_settings(hf):
    """Those of a config.json's dict, by transformers' precedence: `rope_scaling` over
    `rope_parameters`, rope_theta inside over outside, an original context outside over inside."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    outside = {CONTEXT: hf[CONTEXT]} if hf.get(CONTEXT) else {}
    return {"rope_theta": hf.get("rope_theta", 10000.0)} | given | outside

def scaled_rope(cfg, given):
    """RoPE's frequencies by position interpolation (2306.15595) or Llama 3 (2407.21783); () if not
    scaled. In transformers' order: rounding changes the angles far out in a context."""
    def number(key, default=None):
        x = given.get(key) or default
        if type(x) not in (int, float) or not 1e-6 <= x <= 1e9:
            raise UserError(f"rope scaling: {key} must be a number from 1e-6 to 1e9, not {x!r:.50}")
        return x

    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return ()
    if kind not in ("linear", "llama3"):
        raise UserError(f"rope scaling {kind!r} is not supported, only linear and llama3. With "
                        f"prompts and completions of up to {CONTEXT} tokens, yarn may be removed")
    factor = number("factor")
    inv_freq = 1 / cfg.rope_theta ** (torch.arange(0, cfg.head_size, 2) / cfg.head_size)
    if kind == "linear":
        return tuple((inv_freq / factor).tolist())
    # Divides those whose period is long for the original context.
    low, high = number("low_freq_factor"), number("high_freq_factor")
    turns = number(CONTEXT, cfg.block_size) * inv_freq / (2 * torch.pi)
    kept = (turns - low) / (high - low)
    return tuple(torch.lerp(inv_freq / factor, inv_freq, kept.clamp(0, 1)).tolist())

# ---------------------------------------------------------------------- reading

def load(folder):
    """The model in `folder`, read one tensor at a time."""
    model = without_memory(folder)
    try:
        return fill(model, read_weights(model, folder))
    except (OSError, SafetensorError, RuntimeError, LookupError, TypeError) as e:
        why = " ".join(str(e).split())          # PyTorch's has several lines
        raise UserError(f"{folder}: cannot read its tensors: {why:.300}") from e

def without_memory(folder):
    """The model in `folder` on the meta device, without memory for its weights."""
    path = config_of(folder)
    hf = read_json(fetched(path).read_bytes(), path)
    try:
        return of_config(hf)
    except (UserError, TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        raise UserError(f"{path}: {e}") from e

def config_of(folder):
    """The path of a model's config.json; UserError if there is none."""
    path = Path(folder) / "config.json"
    if path.with_name("adapter_config.json").exists():
        raise UserError(f"{folder} holds a LoRA adapter: merge it into its model, by peft's "
                        f"merge_and_unload")
    if not path.exists():
        raise UserError(f"no model in {folder}: train one, or hf download NAME --local-dir FOLDER")
    return path

def of_config(hf):
    """The model of a config.json's dict, on the meta device."""
    cfg = read_config(hf)
    with torch.device("meta"):
        model = GPT(cfg)
    model.hf = hf
    return model

def fill(model, weights):
    """A model that was on the meta device, with its weights and RoPE."""
    model.load_state_dict(weights, assign=True)
    model.precompute_rope()
    return model

def read_weights(model, folder):
    """The tensors in a folder, in float32, by the model's parameters, which they must match."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    names, weights = file_names(model.hf, shapes), {}
    for name, tensor in each_tensor(folder):
        if CONSTANTS.search(name):
            continue
        parts = names.get(name) or names.get(f"transformer.{name}", [name])     # OpenAI's GPT-2
        pieces = [tensor]
        if parts[0] in shapes:
            pieces = split(name, tensor, [shapes[part] for part in parts])
        if not tensor.isfinite().all():
            raise UserError(f"{folder}: {name!r:.200} has numbers that are not finite")
        for part, piece in zip(parts, pieces):
            weights[part] = piece.to(torch.float32, copy=True).contiguous()
    if model.cfg.tied and "lm_head.weight" in weights:
        head = weights.pop("lm_head.weight")
        if not torch.equal(head, weights.get("embed_tokens.weight", head)):
            raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the "
                            f"embedding: set it to false, or remove the tensor")
    foreign = weights.keys() - shapes.keys()
    missing = [name for name, parts in names.items() if not weights.keys() >= {*parts}]
    if foreign or missing:
        what = "hold tensors of another model" if foreign else "lack tensors of the model"
        found = [*(foreign or missing)]
        raise UserError(f"{folder}: its files {what}: {min(found)!r:.200}, one of {len(found)}")
    return weights

def split(name, tensor, shapes):
    """A file's tensor as parameters of these shapes: one, or several in one matrix."""
    tensor = tensor.T if TURNED.search(name) else tensor
    return tensor.split([shape[0] for shape in shapes]) if len(shapes) > 1 else [tensor]

def each_tensor(folder):
    """Yields (name, tensor) from a folder's model.safetensors, or from its shards."""
    folder, files = Path(folder), ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / files[0]).exists():
        parts = read_json(fetched(index).read_bytes(), index)["weight_map"].values()
        files = sorted({Path(part).name for part in parts})  # beside the index
    for file in files:
        with safe_open(fetched(folder / file), "pt") as f:
            for name in f.keys():
                yield name, f.get_tensor(name)

def file_names(hf, names):
    """For each tensor in a file its name, and the parameters in it: GPT-2's hold several."""
    found, gpt2 = {}, hf["model_type"] == "gpt2"
    for name in names:
        words = name.split(".")
        if gpt2:
            words = [GPT2_WORDS.get(word, word) for word in words]
        if words[0] != "lm_head":
            words = ["transformer" if gpt2 else "model", *words]
        found.setdefault(".".join(words), []).append(name)
    return found

# ---------------------------------------------------------------------- writing

def save(model, folder, files=()):
    """Writes a model in the layout that was loaded, and `files` (name to bytes). In float32:
    bfloat16 would round most updates away."""
    folder, hf = Path(folder), config_json(model)
    folder.mkdir(parents=True, exist_ok=True)
    hf |= {key: "float32" for key in ("dtype", "torch_dtype") if hf.get(key)}
    for name, content in {"config.json": json.dumps(hf, indent=2), **dict(files)}.items():
        write_whole(folder / name, content)
    parameters, tensors = dict(model.named_parameters()), {}
    for name, parts in file_names(hf, parameters).items():
        pieces = [parameters[part].detach() for part in parts]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        tensors[name] = whole.T if TURNED.search(name) else whole
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})

# ---------------------------------------------------------- the models of a run

def encoding_of(cfg, where):
    """The tokenizer of the model in `where`; bytes for a new model."""
    if cfg.init or where and (Path(where) / "tokenizer.json").exists():
        config_of(where)
        return load_encoding(where, cfg.chat, cfg.system)
    if cfg.system or cfg.chat not in ("auto", "none"):
        raise UserError("--system and --chat think need a chat template, and a new model has none")
    return byte_encoding()

def to_device(model, cfg):
    """A model on its device, in evaluation mode, that computes as cfg says."""
    model.amp = torch.bfloat16 if dtype_of(cfg) == "bfloat16" else None
    model.recompute = cfg.recompute
    model.shared_prefixes = cfg.shared_prefixes
    model.kv_cache = cfg.cache
    if cfg.cache == "auto":
        model.kv_cache = "static" if has_static_cache(cfg) else "shared"
    model.most_logits = most_logits(device_of(cfg))
    return model.to(device_of(cfg)).eval()

def most_logits(device):
    """At a time; on CUDA a tenth of the memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 128
    return 2 ** 28

def load_model(where, cfg, encoding, longest=0):
    """The model in a folder, for a run with prompts of up to `longest` tokens; 0: for no run."""
    model = without_memory(where)
    if model.cfg.vocab_size < encoding.n_vocab:
        raise UserError(f"{where}: the model has a vocabulary of {model.cfg.vocab_size}, the "
                        f"tokenizer one of {encoding.n_vocab}")
    check_room(model, cfg, longest)
    return to_device(load(where), cfg)

def model_of(hf, cfg, longest):
    """A model of a config.json's dict, with uninitialised weights."""
    model = of_config(hf)
    check_room(model, cfg, longest)
    empty = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    return to_device(fill(model, empty), cfg)

HEAD = 32  # channels of a head of a new model, with one key/value head for all

def new_model(cfg, encoding, longest):
    """A new model with random weights, whose context is a power of two."""
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    D = min(HEAD, up(cfg.n_embd, 2))  # RoPE turns pairs
    sizes = GPTConfig(encoding.n_vocab, cfg.n_layer, n_head=max(1, cfg.n_embd // D), n_kv_head=1,
                      n_embd=cfg.n_embd, n_inner=4 * cfg.n_embd, block_size=context, head_size=D)
    with torch.device("meta"):
        check_room(GPT(sizes), cfg, longest)
    model = GPT(sizes, dist.generator(cfg, "weights"))
    config_json(model)["eos_token_id"] = encoding.end
    return to_device(model, cfg)

def frozen(model):
    """A copy without gradients. Under autocast its matrices are rounded here, once, with the same
    results; the embedding is not, so a tied head becomes a matrix of its own."""
    copied = copy.deepcopy(model).requires_grad_(False)
    if model.amp and model.cfg.tied:
        copied.cfg = replace(model.cfg, tied=False)
        copied.lm_head = nn.Linear(model.cfg.n_embd, 1, bias=False, device="meta")
        copied.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach(), False)
    for layer in copied.modules():
        if isinstance(layer, nn.Linear) and model.amp:
            for p in layer.parameters():
                p.data = p.data.to(model.amp)
    return copied

# ------------------------------------------------------------------- the memory
KEPT = 1.1      # on a CPU freed blocks are kept

def check_room(model, cfg, longest):
    """UserError if a run (longest 0: the model alone) would not fit the memory."""
    need = 4 * sum(p.numel() for p in model.parameters())
    advice = ""
    if longest:
        need = memory(model, cfg, longest)
        less = replace(cfg, micro_tokens=1, recompute=True, kl="none")
        advice = (f", {memory(model, less, longest) / 1e9:.1f} with --micro_tokens 1 --recompute "
                  f"--kl none; or lower --max_new, --group")
    free = free_memory(device_of(cfg))
    if need > free:
        raise UserError(f"{free / 1e9:.1f} GB are free, but this needs about {need / 1e9:.1f}"
                        f"{advice}")

def memory(model, cfg, longest):
    """About the bytes of a run: its models, and the larger of rollout and update."""
    c, ranks = model.cfg, dist.ranks()
    n = sum(p.numel() for p in model.parameters())
    b = 2 if dtype_of(cfg) == "bfloat16" else 4        # bytes of a number in a matrix product
    policies = 1 + (cfg.critic == "separate" and "value" in cfg.baseline)
    trained = n * (policies + (cfg.reward != "rule"))
    copies = cfg.needs_reference + (b == 2)
    frozen = b * n + (4 - b) * c.vocab_size * c.n_embd * (1 + c.tied)    # no rounded embedding

    rows, slots = cfg.prompts * cfg.group // ranks, longest + cfg.max_new
    kv = 2 * b * c.n_layer * c.n_kv_head * c.head_size  # per token, as is `layer`
    cache = kv * rows * slots
    static = has_static_cache(cfg)  # it stays; a copy of any other may be a quarter larger
    decoding = cache * (0 if static else 2.25) + 24 * rows * c.vocab_size
    layer = 16 * c.n_embd + b * (6 * c.n_embd + c.n_inner * (4 if c.mlp == "swiglu" else 2))
    read = min(rows, max(cfg.prompts, cfg.held_out or math.inf) / ranks)    # prompts at a time
    reading = read * longest * (kv + 0.7 * layer)  # of one layer what lives at a time
    tokens = max(cfg.micro_tokens or MICRO_TOKENS, slots)
    if not cfg.warm_steps and cfg.reward == "rule":         # a fit has rows of its own
        tokens = min(tokens, rows * slots)
    stored = layer * c.n_layer * tokens + 2 * (b == 2) * n  # backward reads rounded weights
    if cfg.recompute:  # one layer, half as much for gradients, all inputs
        stored = (1.5 * layer + 4 * c.n_embd * c.n_layer) * tokens
    logits = min(most_logits(device_of(cfg)), c.vocab_size * tokens)
    logits = 2 * b * logits + 8 * min(2 ** 22, logits)  # in float32 a few rows
    update = 4 * trained + policies * stored + logits
    need = 12 * trained + copies * frozen + cache * static + max(reading, decoding, update)
    return need * (KEPT if device_of(cfg).type == "cpu" else 1)

def free_memory(device):
    """Free bytes on a device, or of a container's limit, infinite if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return math.inf
    def number(path, pattern, otherwise=math.inf):
        text = Path(path).read_text() if Path(path).exists() else ""
        found = re.search(pattern, text)
        return int(found[1]) if found else otherwise
    limit = number("/sys/fs/cgroup/memory.max", r"(\d+)")
    limit -= number("/sys/fs/cgroup/memory.stat", r"anon (\d+)", 0)
    return min(limit, 1024 * number("/proc/meminfo", r"MemAvailable: *(\d+) kB"))

def micro_tokens(model, cfg, longest):
    """--micro_tokens, or 2,048, on CUDA up to 32,768 within 60 % of the memory; prints the need."""
    device, n = device_of(cfg), cfg.micro_tokens or MICRO_TOKENS
    free = free_memory(device) + sum(p.nbytes for p in model.parameters())   # it is loaded
    while (not cfg.micro_tokens and device.type == "cuda" and n < 32768
           and memory(model, replace(cfg, micro_tokens=2 * n), longest) < 0.6 * free):
        n *= 2
    need = memory(model, replace(cfg, micro_tokens=n), longest)
    print0(f"memory: needs about {max(need / 1e9, 0.1):.1f} GB, {free / 1e9:.1f} GB are free")
    return n
