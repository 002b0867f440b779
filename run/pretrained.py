"""Reads and writes Hugging Face's layout: config.json and tensors of Llama, Qwen2, Qwen3, GPT-2.

A loaded model keeps its config.json as `model.hf`, so that it can be written back unchanged.
"""
import copy
import dataclasses
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from data import UserError, read_bytes, read_json, regular
from data.tokenizer import byte_encoding, load_encoding
from model import GPT, GPTConfig
from run import dist, preflight
from run.files import write_tensors, write_whole

# For a fork. EXTRA: fields of GPTConfig that no family has, and their names in config.json; a file
# that lacks one has the default. NEW: what fills a parameter that a file lacks, by the end of the
# parameter's name, as in {"self_attn.temperature": 1.0}.
EXTRA = {}
NEW = {}

FAMILIES = {"llama": {}, "qwen2": dict(bias="qkv"), "qwen3": dict(qk_norm=True),
            "gpt2": dict(positions="learned", norm="layer", mlp="gelu", bias="all")}
NAMES = dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_head="num_attention_heads",
             n_kv_head="num_key_value_heads", n_embd="hidden_size", n_inner="intermediate_size",
             head_size="head_dim", block_size="max_position_embeddings", norm_eps="rms_norm_eps",
             tied="tie_word_embeddings")
GPT2_NAMES = dict(vocab_size="vocab_size", n_layer="n_layer", n_head="n_head", n_kv_head="n_head",
                  n_embd="n_embd", n_inner="n_inner", block_size="n_positions",
                  norm_eps="layer_norm_epsilon", tied="tie_word_embeddings")
GENERAL = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_embd="hidden_size",
               n_positions="max_position_embeddings")       # what a GPT-2's config.json may say too
GPT2_PARTS = {"embed_tokens": "wte", "embed_positions": "wpe", "layers.": "h.", "input_layernorm":
              "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj",
              "self_attn.q_proj": "attn.c_attn", "self_attn.k_proj": "attn.c_attn",
              "self_attn.v_proj": "attn.c_attn", "up_proj": "c_fc", "down_proj": "c_proj",
              "norm.": "ln_f."}
TURNED = re.compile(r"\.c_\w+\.weight$")      # GPT-2's linear weights: stored transposed
PARAMETERS = re.compile(r"((embed_tokens|embed_positions|norm|lm_head)|layers\.\d+\.(self_attn\."
                        r"([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj|(input|post_attention)"
                        r"_layernorm))\.(weight|bias)")         # those that a family has
CONSTANTS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")      # in older files
# Settings in a config.json that may change the arithmetic, with the values that do not.
ONLY = dict(hidden_act=("silu",), activation_function=("gelu_new", "gelu_pytorch_tanh"),
            attention_bias=(False,), mlp_bias=(False,), use_sliding_window=(False,),
            is_causal=(True,), partial_rotary_factor=(1,),
            scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,),
            add_cross_attention=(False,), quantization_config=(),
            **dict.fromkeys(("dtype", "torch_dtype"), ("float32", "float16", "bfloat16")))

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
KINDS = {int: "an integer", bool: "a bool", float: "a positive number", list: "a list",
         dict: "an object", str: "a string"}

# ------------------------------------------------------------------------------------ config.json

def read_config(hf):
    """The GPTConfig of a config.json's dict; raises UserError for anything not supported."""
    if (family := hf.get("model_type")) not in tuple(FAMILIES):
        raise UserError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    refuse(hf, ONLY)
    for kind in typed(hf, "layer_types", list, []):
        if kind != "full_attention":
            raise UserError(f"layer_types {kind!r} is not supported")
    names = GPT2_NAMES if family == "gpt2" else NAMES
    for own, general in GENERAL.items() if family == "gpt2" else ():
        if hf.get(general) is not None:
            if hf.get(own, hf[general]) != hf[general]:
                raise UserError(f"{own} {hf[own]!r} and {general} {hf[general]!r} contradict each "
                                f"other")
            hf = hf | {own: hf[general]}
    kinds = {f.name: f.type for f in fields(GPTConfig)}
    found = {ours: typed(hf, theirs, kinds[ours]) for ours, theirs in names.items()}
    extra = {ours: typed(hf, theirs, kinds[ours], least=-1e300) for ours, theirs in EXTRA.items()}
    given = {ours: x for ours, x in found.items() if x is not None}
    gpt2 = dict(n_inner=4 * given.get("n_embd", 0)) if family == "gpt2" else {}
    given = dict(n_kv_head=given.get("n_head"), head_size=0, tied=family == "gpt2") | gpt2 | given
    if missing := [theirs for ours, theirs in names.items() if given.get(ours) is None]:
        raise UserError(f"{missing[0]} is missing")
    extra = {ours: x for ours, x in extra.items() if x is not None}
    return shape(**given | FAMILIES[family] | read_rope(hf) | extra)

def shape(**given):
    """A GPTConfig; raises UserError for sizes out of bounds, so that a damaged file cannot allocate
    memory. A size may be 0 if that is its default."""
    sizes = {f.name: f.default for f in fields(GPTConfig)}
    for name, x in given.items():
        least, most = int(sizes[name] != 0), 1000 if name == "n_layer" else 2 ** 20
        if type(x) is int and not least <= x <= most:
            raise UserError(f"{name} must be between {least} and {most}, not {x}")
    return GPTConfig(**given)

def read_rope(hf):
    """GPTConfig's fields for RoPE. As in transformers, `rope_scaling` takes precedence over
    `rope_parameters`, and a rope_theta inside either over one outside."""
    rope = typed(hf, "rope_scaling", dict) or typed(hf, "rope_parameters", dict, {})
    if unknown := rope.keys() - {"rope_type", "type", "rope_theta", *ONLY, *LLAMA3}:
        raise UserError(f"rope scaling with {min(unknown)} is not supported")
    refuse(rope, ONLY)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"rope scaling {kind!r} is not supported")
    scaling = [typed(rope, key, float) for key in LLAMA3 if kind == "llama3"]
    if None in scaling or scaling and scaling[1] >= scaling[2]:
        raise UserError(f"rope scaling needs {', '.join(LLAMA3)}, the second less than the third")
    theta = typed(hf, "rope_theta", float, 10000.0)
    return dict(rope_theta=typed(rope, "rope_theta", float, theta), rope_scaling=tuple(scaling))

def refuse(hf, only):
    """Raises UserError for a key that has a value other than those in `only`."""
    for key, values in only.items():
        if hf.get(key) is not None and hf[key] not in values:
            raise UserError(f"{key} {hf[key]!r} is not supported")

def typed(hf, key, kind, default=None, least=0):
    """The value of a key; raises UserError if it has another type, or is a float not above `least`.
    The choices of a Literal are checked by GPTConfig."""
    x = default if hf.get(key) is None else hf[key]
    if x is None or get_args(kind) or type(x) is kind and kind is not float:
        return x
    if kind is float and type(x) in (int, float) and least < x < 1e300:
        return float(x)
    what = "a number" if kind is float and least < 0 else KINDS[kind]
    raise UserError(f"{key} must be {what}, not {x!r}")

def config_json(model):
    """The config.json of a model: the one it was loaded with, or a Llama's for a new model. Raises
    UserError if the model has a setting that the latter does not hold."""
    if not hasattr(model, "hf"):
        names = NAMES | EXTRA
        model.hf = {theirs: getattr(model.cfg, ours) for ours, theirs in names.items()} | dict(
            model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu",
            rope_theta=model.cfg.rope_theta, dtype="float32")
        read, written = vars(read_config(model.hf)), vars(model.cfg)
        if lost := [name for name in written if read[name] != written[name]]:
            raise UserError(f"config.json would not say {lost[0]} {written[lost[0]]!r}: add it to "
                            f"EXTRA in run/pretrained.py")
    return model.hf

# ----------------------------------------------------------------------------------------- reading

def load(folder):
    """Loads the model in `folder`; raises UserError if it is incomplete or of another family. Holds
    at most the model and one of the file's tensors in memory."""
    return read_weights(without_memory(folder), folder)

def without_memory(folder):
    """The model in `folder` on the meta device: its shape, without memory for its weights."""
    path = Path(folder) / "config.json"
    try:
        text = read_bytes(path)
    except (OSError, ValueError) as e:
        why = "train one first, or name its folder with --init"
        if path.exists():
            why = f"config.json: {e.__class__.__name__}: {e}"
        raise UserError(f"no model in {folder}: {why}") from e
    return of_config(read_json(text, path), path)

def of_config(hf, source="config.json"):
    """The model of a config.json's dict, on the meta device; a UserError it raises names `source`.
    """
    try:
        shape = read_config(hf)
    except UserError as e:
        raise UserError(f"{source}: {e}") from e
    with torch.device("meta"):
        model = GPT(shape)
    model.hf = hf
    return model

def allocate(model):
    """Allocates a model on the meta device; its weights are uninitialised."""
    uninitialised = dict(model.to_empty(device="cpu").named_buffers())
    model.precompute_rope()
    for name, x in model.named_buffers():
        if x is uninitialised[name]:
            raise UserError(f"files do not hold the buffer {name}: compute it in precompute_rope, in "
                            f"model.py")
    return model

@torch.no_grad()
def read_weights(model, folder):
    """Allocates a model on the meta device and fills it with the tensors in a folder."""
    held, seen, head = parameters_by_file_name(allocate(model)), set(), None
    for name, tensor in each_tensor(folder):
        name = name if name in held else f"transformer.{name}"      # as in OpenAI's GPT-2 files
        if name in held:
            parts = held[name]
            tensor = tensor.T if TURNED.search(name) else tensor
            want = tuple(parts[0].shape)
            if len(parts) > 1:
                want = (sum(p.size(0) for p in parts), *want[1:])
            if tensor.shape != want:
                raise UserError(f"{folder}: {name} has the shape {tuple(tensor.shape)}, not {want}")
            if not tensor.is_floating_point():
                raise UserError(f"{folder}: {name} has the dtype {tensor.dtype}, not a float dtype")
            pieces = [tensor] if len(parts) == 1 else tensor.split([p.size(0) for p in parts])
            for p, piece in zip(parts, pieces):
                p.copy_(piece)
                if not finite(p):
                    raise UserError(f"{folder}: {name} has values that are not finite")
            seen.add(name)
        elif model.cfg.tied and name == "transformer.lm_head.weight":
            head = tensor
        elif not CONSTANTS.search(name):
            raise UserError(f"{folder}: the tensor {name} does not belong to this model")
    fill_new(model, {name: held[name] for name in sorted(held.keys() - seen)}, folder)
    if head is not None and not torch.equal(head.float(), model.embed_tokens.weight):
        raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the "
                        f"embedding: set it to false, or remove the tensor")
    return model

def fill_new(model, missing, folder):
    """Fills the parameters that a file lacks, lists by name, as NEW says; raises UserError for any
    that it does not name."""
    values = {name: x for name in missing for end, x in NEW.items() if name.endswith(end)}
    if left := [name for name in missing if name not in values]:
        hint = "; NEW in run/pretrained.py can give it a value"
        raise UserError(f"{folder}: tensor {left[0]} is missing, and {len(left) - 1} more"
                        + hint * (left[0] in own_parameters(model)))
    for name, parts in missing.items():
        for p in parts:
            p.fill_(values[name])

def finite(tensor):
    """Whether all values of a tensor are finite, without allocating another of its size."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())

def each_tensor(folder):
    """Yields (name, tensor) from a checkpoint's model.safetensors, or from its shards."""
    folder = Path(folder)
    index, files = folder / "model.safetensors.index.json", ["model.safetensors"]
    try:
        if index.exists() and not (folder / files[0]).exists():
            parts = typed(read_json(read_bytes(index), index), "weight_map", dict, {}).values()
            if not all(type(part) is str and Path(part).name == part for part in parts):
                raise UserError(f"{index}: weight_map names something that is not a file beside it")
            files = sorted(set(parts))
        for file in files:
            with safe_open(regular(folder / file), "pt") as f:
                for name in f.keys():
                    yield name, f.get_tensor(name)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{folder}: cannot read its tensors ({e.__class__.__name__}: {e})") from e

def parameters_by_file_name(model, parameters=None):
    """Lists of parameters by their name in a file: GPT-2 stores query, key and value in one."""
    held, gpt2 = {}, config_json(model)["model_type"] == "gpt2"
    for name, p in (dict(model.named_parameters()) if parameters is None else parameters).items():
        if gpt2:
            for ours, theirs in GPT2_PARTS.items():
                name = name.replace(ours, theirs)
        if name != "lm_head.weight":
            name = ("transformer." if gpt2 else "model.") + name
        held.setdefault(name, []).append(p)
    return held

def own_parameters(model):
    """The parameters that no family has, by their names in a file: other programs ignore them."""
    own = {n: p for n, p in model.named_parameters() if not PARAMETERS.fullmatch(n)}
    return parameters_by_file_name(model, own)

# ----------------------------------------------------------------------------------------- writing

def save(model, folder, files=(), parameters=None):
    """Writes config.json and model.safetensors in the layout that was loaded, and `files` (name to
    bytes). `parameters`: the full tensors of a sharded model. Weights are saved in float32 whatever
    they came in: at small learning rates bfloat16 would round most updates away."""
    folder, hf = Path(folder), config_json(model)
    hf |= {key: "float32" for key in ("dtype", "torch_dtype") if hf.get(key)}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", json.dumps(hf, indent=2))
    for name, content in dict(files).items():
        (folder / name).parent.mkdir(exist_ok=True)     # a template may be in a subfolder
        write_whole(folder / name, content)
    tensors = {}
    for name, parts in parameters_by_file_name(model, parameters).items():
        whole = parts[0].detach() if len(parts) == 1 else torch.cat([p.detach() for p in parts])
        tensors[name] = whole.T if TURNED.search(name) else whole
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def encoding_of(cfg, where):
    """The tokenizer and chat template in a model's folder; the byte tokenizer for a new model."""
    if cfg.init or where and (Path(where) / "tokenizer.json").exists():
        return load_encoding(where, cfg.chat, cfg.system)
    if cfg.system or cfg.chat not in ("auto", "none"):
        raise UserError("--system and --chat think need a chat template, and a new model has none")
    return byte_encoding()

def to_device(model, cfg):
    """Moves a model to its device in evaluation mode, and applies the settings that change how, but
    not what, it computes."""
    device, dtype = dist.device_of(cfg), dist.dtype_of(cfg)
    model.amp = torch.bfloat16 if dtype == "bfloat16" else None
    model.recompute = cfg.recompute
    model.kv_cache = "plain" if cfg.cache == "plain" else "shared"
    if dist.has_static_cache(cfg):
        model.kv_cache = "static"
    return model.to(device).eval()

def load_model(where, cfg, encoding, longest=0):
    """Loads the model in a folder; raises UserError if the tokenizer does not match, or if a run
    with prompts of up to `longest` tokens would not fit in memory (0: only the model must fit).
    """
    model = without_memory(where)
    if model.cfg.vocab_size < encoding.n_vocab:
        raise UserError(f"{where}: the model has a vocabulary of {model.cfg.vocab_size}, the "
                        f"tokenizer one of {encoding.n_vocab}")
    if not 0 <= min(encoding.stop) <= max(encoding.stop) < model.cfg.vocab_size:
        raise UserError(f"{where}: eos_token_id {sorted(encoding.stop)} is outside the vocabulary "
                        f"of {model.cfg.vocab_size}")
    preflight.check_room(model, cfg, longest)
    return to_device(read_weights(model, where), cfg)

def trained_model(cfg):
    """The tokenizer and the model in --init or, by default, in the run's own folder."""
    where = cfg.init or cfg.folder
    encoding = encoding_of(cfg, where)
    return encoding, load_model(where, cfg, encoding)

def model_of(config, cfg, longest):
    """A model of the shape in a config.json's dict; its weights are uninitialised."""
    model = of_config(config)
    preflight.check_room(model, cfg, longest)
    return to_device(allocate(model), cfg)

HEAD = 32               # channels of a head of a new model, with one key/value head for all

def new_model(cfg, encoding, longest):
    """A new model with random weights, whose context is a power of two that fits prompts of
    `longest` tokens and their completions."""
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    D = min(HEAD, cfg.n_embd)
    sizes = shape(vocab_size=encoding.n_vocab, block_size=context, n_layer=cfg.n_layer,
                  n_head=cfg.n_embd // D, n_kv_head=1, head_size=D, n_embd=cfg.n_embd,
                  n_inner=4 * cfg.n_embd)
    with torch.device("meta"):
        preflight.check_room(GPT(sizes), cfg, longest)
    model = to_device(GPT(sizes, dist.generator(cfg, "weights")), cfg)
    config_json(model)["eos_token_id"] = encoding.end
    return model

def frozen(model):
    """A copy without gradients. Under autocast its matrices are rounded once, here, instead of at
    each use, with the same results in less memory. The embedding is not rounded, so a tied head
    becomes a separate matrix."""
    copied = copy.deepcopy(model).requires_grad_(False)
    if model.amp and model.cfg.tied:
        copied.cfg = dataclasses.replace(model.cfg, tied=False)
        copied.lm_head = nn.Linear(model.cfg.n_embd, 1, bias=False, device="meta")
        copied.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach(), False)
    for layer in copied.modules():
        if isinstance(layer, nn.Linear) and model.amp:
            for p in layer.parameters():
                p.data = p.data.to(model.amp)
    return copied
