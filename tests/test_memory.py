"""What is held in memory: logits in parts, activations made again, copies in bfloat16, the estimate."""
import dataclasses
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import data.gsm8k as gsm8k
import model as model_py
from data import Fault
from grpo import Config
from model import GPT, GPTConfig, ScalarHead, token_logps
from run import pretrained, start
from run.files import save_file


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation makes."""
    most = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


def gradients(model, critic=None):
    """Of a sum of log-probabilities and values, by name; and what token_logps gave."""
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 257, (6, 40)), torch.rand(6, 40) > 0.3
    mask[:, 0] = False
    model.zero_grad()
    logp, value = token_logps(model, ids, mask, 0.7, critic)
    ((logp * torch.randn_like(logp)).sum() + (0 if value is None else value.sum())).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}, logp.detach(), value


@pytest.mark.parametrize("with_critic", [False, True])
def test_logits_in_parts_are_the_same_and_never_whole(monkeypatch, with_critic):
    model = tiny_model()
    critic = ScalarHead(32, None, 1.0, torch.Generator().manual_seed(0)) if with_critic else None
    want, logp, value = gradients(model, critic)
    monkeypatch.setattr(model_py, "CHUNK", 257 * 50)
    with Largest() as seen:
        have, logp2, value2 = gradients(model, critic)
    assert seen.most <= max(257 * 50, 6 * 40 * 64)          # of the logits; of the widest layer
    torch.testing.assert_close(logp2, logp, rtol=0, atol=1e-6)
    assert value is None or torch.equal(value, value2)
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-5, atol=1e-5)


def test_activations_made_again_change_nothing():
    model = tiny_model()
    want, *_ = gradients(model)
    def kept():             # between a forward pass and its backward
        sizes = []
        pack = lambda x: sizes.append(x.numel()) or x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randint(0, 256, (4, 40)))
        return sum(sizes)
    whole, model.recompute = kept(), True
    assert kept() < 0.5 * whole
    have, *_ = gradients(model)
    assert all(torch.equal(have[n], want[n]) for n in want)


def test_a_frozen_copy_is_half_and_gives_the_same():
    model = tiny_model(n_kv_head=4)
    model.amp = torch.bfloat16
    ids = torch.randint(0, 256, (3, 20))
    copied = model.frozen()
    with torch.no_grad():
        assert torch.equal(model.head(model(ids)), copied.head(copied(ids)))
    assert {p.dtype for n, p in copied.named_parameters() if "_proj" in n} == {torch.bfloat16}
    assert not any(p.requires_grad for p in copied.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():                                   # later steps reach it
        model.layers[0].mlp.up_proj.weight.mul_(2)
        model.embed_tokens.weight.mul_(1.5)
    copied.take(model)
    with torch.no_grad():
        assert torch.equal(model.head(model(ids)), copied.head(copied(ids)))
        assert torch.equal(copied.embed_tokens.weight, model.embed_tokens.weight)
    assert copied.lm_head.weight.dtype == torch.bfloat16 and model.cfg.tied


SHAPES = {"qwen2": GPTConfig(n_layer=4, n_embd=64, n_head=8, n_kv_head=2, n_inner=192, bias="qkv"),
          "gpt2": GPTConfig(n_layer=4, n_embd=64, n_head=8, n_kv_head=8, n_inner=256, bias="all",
                            norm="layer", mlp="gelu", positions="learned")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHAPES)
def test_the_estimate_of_activations_is_near(family, dtype):
    cfg = Config(dtype=dtype, micro_tokens=1024, device="cpu", prompts=1, group=2, max_new=8)
    model = start.to_device(GPT(SHAPES[family]), cfg)
    own = {p.data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept = {}
    def pack(x):
        if x.data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        h = model(torch.randint(0, 256, (8, 128)))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) * 2 * (dtype == "bfloat16")
    have, want = sum(kept.values()) - weights, start.memory(model, cfg, 64)["activations"]
    assert 0.7 < want / have < 1.4, (want, have)
    assert h.requires_grad


def test_a_run_that_cannot_fit_is_refused_before_there_is_memory(tmp_path, monkeypatch):
    pretrained.save(tiny_model(), tmp_path)
    model = pretrained.without_memory(tmp_path)
    assert all(p.is_meta for p in model.parameters())
    cfg = Config(prompts=4, group=4, max_new=16, device="cpu")
    need = start.memory(model, cfg, 9)
    N = sum(p.numel() for p in model.parameters())
    assert (need["weights"], need["Adam"], need["reference"]) == (4 * N, 8 * N, 4 * N)
    half = dataclasses.replace(cfg, dtype="bfloat16", kl="none")
    sampler = sum(p.numel() * p.element_size() for p in start.to_device(tiny_model(), half).frozen().parameters())
    assert start.memory(model, half, 9)["sampler"] == sampler < 4 * N and not start.memory(model, half, 9)["reference"]
    wide = start.memory(model, dataclasses.replace(cfg, prompts=10 ** 6), 9)
    assert wide["cache"] == 2 * 2 * 4 * 2 * 2 * 8 * 4 * 10 ** 6 * 25    # twice K and V, L, heads, D, rows, slots
    monkeypatch.setattr(start, "free_memory", lambda device: sum(need.values()) - 1)
    monkeypatch.setattr(GPT, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(Fault, match=r"this needs about .* lower --micro_tokens"):
        start.check_room(model, cfg, 9)
    monkeypatch.setattr(start, "free_memory", lambda device: sum(need.values()))
    start.check_room(model, cfg, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_loading_holds_one_copy(tmp_path):
    """160 MB of weights, in float32 and in bfloat16: at any moment hardly more than these. The file
    is mapped, which the system takes back as it likes."""
    big = GPT(GPTConfig(vocab_size=256, n_layer=8, n_embd=640, n_head=8, n_kv_head=8, n_inner=1792))
    size = sum(p.numel() for p in big.parameters()) * 4
    assert 1.5e8 < size < 2e8
    pretrained.save(big, tmp_path)
    named = pretrained.parameters_by_file_name(big)
    tensors = {n: p[0].detach().bfloat16() for n, p in named.items()}
    code = f"""
from pathlib import Path
from run import pretrained
lines = lambda: Path("/proc/self/status").read_text().splitlines()
held = lambda: next(int(line.split()[1]) * 1024 for line in lines() if "RssAnon" in line)
model, real, seen = pretrained.without_memory({str(tmp_path)!r}), pretrained.each_tensor, []
def each_tensor(folder):
    for x in real(folder):
        yield x
        seen.append(held())
pretrained.each_tensor, before = each_tensor, held()
pretrained.read_weights(model, {str(tmp_path)!r})
print(max(*seen, held()) - before)"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert 0.9 * size < int(done.stdout) < 1.15 * size, (int(done.stdout) / size, done.stderr)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})


def test_the_memory_of_half_a_billion():
    """Qwen2.5-0.5B's shape with the defaults of gsm8k and prompts of 300 tokens."""
    model = pretrained.of_config(dict(
        model_type="qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, intermediate_size=4864, vocab_size=151936, rms_norm_eps=1e-6,
        max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=1e6, hidden_act="silu"))
    assert sum(p.numel() for p in model.parameters()) == 494_032_768
    need = start.memory(model, Config(**gsm8k.DEFAULTS, dtype="bfloat16", device="cpu"), 300)
    text = (ROOT / "docs" / "measurements.md").read_text()
    for name, size in need.items():
        assert not size or f"| {name} | {size / 1e9:.1f} |" in text, (name, size)
    assert f"| together | {sum(need.values()) / 1e9:.1f} |" in text and sum(need.values()) < 20e9
