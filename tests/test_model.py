"""The model: attention, positions, cache, initial weights, files."""
import json

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file

from data import Fault
from model import GPTConfig, RMSNorm, rotate
from run import pretrained


def slow_forward(model, ids):
    """Logits of one row by loops over heads and positions, in float64, from the definitions."""
    c = model.cfg
    D, per = c.n_embd // c.n_head, c.n_head // c.n_kv_head
    W = {n: p.detach().double() for n, p in model.named_parameters()}
    norm = lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w

    def rope(x, t):                                     # Llama: pairs (i, i + D/2)
        out = x.clone()
        for i in range(D // 2):
            a = torch.tensor(t * c.rope_theta ** (-2 * i / D), dtype=torch.float64)
            out[i] = x[i] * a.cos() - x[i + D // 2] * a.sin()
            out[i + D // 2] = x[i + D // 2] * a.cos() + x[i] * a.sin()
        return out

    x = W["embed_tokens.weight"][ids]
    for layer in range(c.n_layer):
        w = lambda name: W[f"layers.{layer}.{name}.weight"]
        h = norm(x, w("input_layernorm"))
        q, k, v = (h @ w(f"self_attn.{n}_proj").T for n in "qkv")
        out = torch.zeros_like(q)
        for head in range(c.n_head):
            mine = slice(head * D, (head + 1) * D)
            shared = slice(head // per * D, (head // per + 1) * D)
            for t in range(len(ids)):
                score = torch.stack([rope(q[t, mine], t) @ rope(k[s, shared], s) for s in range(t + 1)])
                out[t, mine] = (score / D ** 0.5).softmax(0) @ v[:t + 1, shared]
        x = x + out @ w("self_attn.o_proj").T
        h = norm(x, w("post_attention_layernorm"))
        gate, up = h @ w("mlp.gate_proj").T, h @ w("mlp.up_proj").T
        x = x + (gate * gate.sigmoid() * up) @ w("mlp.down_proj").T
    return norm(x, W["norm.weight"]) @ W["embed_tokens.weight"].T


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_forward_equals_the_definition(kv):
    model = tiny_model(n_kv_head=kv)
    ids = torch.randint(0, 256, (11,))
    torch.testing.assert_close(model.head(model(ids[None]))[0].double(), slow_forward(model, ids),
                               rtol=1e-4, atol=1e-4)


def test_rms_norm_is_the_formula():
    x, norm = torch.randn(5, 7) * 10, RMSNorm(7, 1e-5)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (7,), norm.weight, 1e-5))


def test_rope_keeps_only_the_distance():
    D, turn = 8, 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    def at(x, t):
        cos, sin = (t * turn).cos(), (t * turn).sin()
        return rotate(x, torch.cat((cos, cos)), torch.cat((-sin, sin)))
    q, k = torch.randn(2, D)
    torch.testing.assert_close(at(q, 5) @ at(k, 3), at(q, 12) @ at(k, 10))
    assert not torch.isclose(at(q, 5) @ at(k, 3), at(q, 5) @ at(k, 4))


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_right_padding_changes_nothing(positions):
    """RoPE sees only distances and hides a wrong start; a learned table does not."""
    model = tiny_model(positions=positions)
    rows = [torch.randint(0, 256, (n,)).tolist() for n in (3, 9, 6)]
    padded = torch.tensor([r + [0] * (12 - len(r)) for r in rows])
    for r, h in zip(rows, model(padded)):
        torch.testing.assert_close(h[:len(r)], model(torch.tensor([r]))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_cache_with_ragged_rows_equals_no_cache(positions, kv):
    """Each row has its own position, and slots beyond it hold another row's leftovers."""
    model = tiny_model(positions=positions, n_kv_head=kv)
    lengths = [2, 7, 5]
    full = torch.randint(0, 256, (3, 12))
    want = model(full)
    cache = model.new_cache(3, 16).normal_()            # garbage in the slots not yet written
    with torch.no_grad():
        got = model(full[:, :7], torch.arange(7).expand(3, -1), cache)
        for i, n in enumerate(lengths):
            torch.testing.assert_close(got[i, :n], want[i, :n], rtol=1e-5, atol=1e-5)
        at = torch.tensor(lengths)
        for _ in range(4):
            h = model(full[torch.arange(3), at][:, None], at[:, None], cache)[:, 0]
            torch.testing.assert_close(h, want[torch.arange(3), at], rtol=1e-5, atol=1e-5)
            at = at + 1


def test_a_token_moves_only_later_columns(model):
    ids = torch.randint(0, 256, (1, 10))
    other = ids.clone()
    other[0, 4] += 1
    moved = (model(ids) != model(other)).any(-1)[0]
    assert moved.tolist() == [False] * 4 + [True] * 6


def test_save_and_load(tmp_path, model):
    pretrained.config_json(model)["eos_token_id"] = 256
    pretrained.save(model, tmp_path, {"some.json": b"{}"})
    again = pretrained.load(tmp_path)
    for (n, p), (m, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert n == m and torch.equal(p, q)
    assert again.cfg == model.cfg and (tmp_path / "some.json").read_bytes() == b"{}"
    hf = json.loads((tmp_path / "config.json").read_text())
    assert (hf["model_type"], hf["eos_token_id"], hf["num_key_value_heads"]) == ("llama", 256, 2)
    assert "model.layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")


def test_compiled_model_saves_plain_names(tmp_path, model):
    """A wrapper of torch.compile once put `_orig_mod.` before every name."""
    model.compile(backend="eager")
    model(torch.zeros(1, 3, dtype=torch.int64))
    pretrained.save(model, tmp_path)
    assert pretrained.load(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "no config", "foreign", "shape", "missing", "not json"])
def test_damaged_checkpoints_are_refused(tmp_path, model, damage):
    pretrained.save(model, tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "no config":
        config.unlink()
    if damage == "foreign":
        config.write_text(json.dumps({"model_type": "gpt_neox"}))
    if damage == "shape":
        config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 96'))
    if damage == "missing":
        weights.unlink()
    if damage == "not json":
        config.write_text("{")
    with pytest.raises(Fault) as e:
        pretrained.load(tmp_path)
    assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_shapes_that_cannot_be():
    for wrong in (dict(n_embd=30, n_head=4), dict(n_head=4, n_kv_head=3), dict(n_embd=12, n_head=4)):
        with pytest.raises(Fault):
            GPTConfig(**wrong)
