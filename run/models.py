"""The models of a run: loaded or new, on their device; frozen copies; critics and reward models."""
import copy
import dataclasses
from pathlib import Path

import torch
from torch import nn

from data import UserError
from data.tokenizer import byte_encoding, load_encoding
from model import GPT
from run import machine, preflight, pretrained, sharing

def encoding_of(cfg, where):
    """The tokenizer in a model's folder, with its chat template; bytes for a new model."""
    if cfg.init or where and (Path(where) / "tokenizer.json").exists():
        return load_encoding(where, cfg.chat, cfg.system)
    if cfg.system or cfg.chat not in ("auto", "none"):
        raise UserError("--system and --chat think need a chat template, and a new model has none")
    return byte_encoding()

def to_device(model, cfg):
    """The model on its device, with the dtype of its matrix products and the other settings that
    change how, but not what, it computes."""
    device, dtype, _ = machine.resolve(cfg)
    model.amp = torch.bfloat16 if dtype == "bfloat16" else None
    model.recompute = cfg.recompute == "on"
    if cfg.share_prefix == "on":
        sharing.share(model)
    return model.to(device)

def load_model(where, cfg, encoding, longest=0):
    """The model in a folder, on its device; raises UserError if the tokenizer does not belong to
    it, or if a run with prompts of up to `longest` tokens would not fit (0: no run, only answers).
    """
    model = pretrained.without_memory(where)
    if model.cfg.vocab_size < encoding.n_vocab:
        raise UserError(f"{where}: the model has a vocabulary of {model.cfg.vocab_size}, the "
                        f"tokenizer "
                        f"one of {encoding.n_vocab}")
    if not 0 <= min(encoding.stop) <= max(encoding.stop) < model.cfg.vocab_size:
        raise UserError(f"{where}: eos_token_id {sorted(encoding.stop)} is outside of the "
                        f"vocabulary "
                        f"of {model.cfg.vocab_size}")
    preflight.check_room(model, cfg, longest)
    return to_device(pretrained.read_weights(model, where), cfg)

def trained_model(cfg):
    """The tokenizer and the model of --init, or of the run's own folder, for use."""
    where = cfg.init or cfg.folder
    encoding = encoding_of(cfg, where)
    return encoding, load_model(where, cfg, encoding)

def model_of(config, cfg, longest):
    """A model with the shape in a config.json's dict; its weights are still to be loaded."""
    model = pretrained.of_config(config)
    preflight.check_room(model, cfg, longest)
    return to_device(pretrained.allocate(model), cfg)

def new_model(cfg, encoding, longest):
    """A new model with random weights. Its context is a power of two and holds prompts of `longest`
    tokens and their completions."""
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
    """A copy without gradients. Under autocast its matrices are rounded here, once, and not at
    each use: less memory, the same results. The embedding is not rounded, so a tied head
    becomes a matrix of its own."""
    copied = copy.deepcopy(model).requires_grad_(False)
    if model.amp and model.cfg.tied:
        copied.cfg = dataclasses.replace(model.cfg, tied=False)
        copied.lm_head = nn.Linear(model.cfg.n_embd, 1, bias=False, device="meta")
        copied.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach(), False)
    for layer in copied.modules():
        if isinstance(layer, nn.Linear) and model.amp:
            layer.weight.data = layer.weight.data.to(model.amp)
    return copied

class ScalarHead(nn.Module):
    """A number for each token, linear in the hidden state after it: of its own GPT `trunk`, or,
    without one, of hidden states passed in. A critic, or a reward model."""

    def __init__(self, size, trunk=None, std=0.0, generator=None):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(size, 1)
        nn.init.normal_(self.head.weight, std=std, generator=generator)
        nn.init.zeros_(self.head.bias)
        self.norm = nn.Parameter(torch.tensor([0.0, 1.0]), requires_grad=False)     # mean and std

    def forward(self, ids, mask=None, h=None):
        """(B, T) of ids (B, T), or of h (B, T, C) without a trunk; `mask` as in GPT.forward."""
        h = h if self.trunk is None else self.trunk(ids, mask=mask)
        return h.float() @ self.head.weight[0] + self.head.bias
