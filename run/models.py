"""Loads or creates the models of a run; frozen copies; heads for critics and reward models."""
import copy
import dataclasses
from pathlib import Path

import torch
from torch import nn

from data import UserError
from data.tokenizer import byte_encoding, load_encoding
from model import GPT
from run import caches, machine, preflight, pretrained, sharing

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
    device, dtype, _ = machine.resolve(cfg)
    model.amp = torch.bfloat16 if dtype == "bfloat16" else None
    model.recompute = cfg.recompute == "on"
    if cfg.share_prefix == "on":
        sharing.share(model)
    if machine.has_static_cache(cfg):
        model.cache_class = caches.StaticCache
    return model.to(device).eval()

def load_model(where, cfg, encoding, longest=0):
    """Loads the model in a folder; raises UserError if the tokenizer does not match, or if a run
    with prompts of up to `longest` tokens would not fit in memory (0: only the model must fit).
    """
    model = pretrained.without_memory(where)
    if model.cfg.vocab_size < encoding.n_vocab:
        raise UserError(f"{where}: the model has a vocabulary of {model.cfg.vocab_size}, the "
                        f"tokenizer one of {encoding.n_vocab}")
    if not 0 <= min(encoding.stop) <= max(encoding.stop) < model.cfg.vocab_size:
        raise UserError(f"{where}: eos_token_id {sorted(encoding.stop)} is outside the vocabulary "
                        f"of {model.cfg.vocab_size}")
    preflight.check_room(model, cfg, longest)
    return to_device(pretrained.read_weights(model, where), cfg)

def trained_model(cfg):
    """The tokenizer and the model in --init or, by default, in the run's own folder."""
    where = cfg.init or cfg.folder
    encoding = encoding_of(cfg, where)
    return encoding, load_model(where, cfg, encoding)

def model_of(config, cfg, longest):
    """A model of the shape in a config.json's dict; its weights are uninitialised."""
    model = pretrained.of_config(config)
    preflight.check_room(model, cfg, longest)
    return to_device(pretrained.allocate(model), cfg)

def new_model(cfg, encoding, longest):
    """A new model with random weights, whose context is a power of two that fits prompts of
    `longest` tokens and their completions."""
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    shape = pretrained.shape(vocab_size=encoding.n_vocab, n_layer=cfg.n_layer, n_head=cfg.n_head,
                             n_kv_head=cfg.n_kv_head, n_embd=cfg.n_embd, n_inner=4 * cfg.n_embd,
                             block_size=context)
    with torch.device("meta"):
        preflight.check_room(GPT(shape), cfg, longest)
    model = to_device(GPT(shape, machine.generator(cfg, "weights")), cfg)
    pretrained.config_json(model)["eos_token_id"] = encoding.end
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

class ScalarHead(nn.Module):
    """A critic or a reward model: a scalar per token, linear in the hidden state of its own GPT
    `trunk` or, without a trunk, in hidden states passed in."""

    def __init__(self, size, trunk=None, std=0.0, generator=None):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(size, 1)
        nn.init.normal_(self.head.weight, std=std, generator=generator)
        nn.init.zeros_(self.head.bias)
        self.norm = nn.Parameter(torch.tensor([0.0, 1.0]), requires_grad=False)     # mean and std

    def forward(self, ids, mask=None, h=None):
        """Scalars (B, T) from ids (B, T), or from h (B, T, C) without a trunk; `mask` as in GPT."""
        h = h if self.trunk is None else self.trunk(ids, mask=mask)
        return h.float() @ self.head.weight[0] + self.head.bias
