"""The model: attention, positions, cache, initial weights, files."""
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import chat_folder, tiny_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from data import UserError
from data.tokenizer import load_encoding
from model import GPT, GPTConfig, RMSNorm, Rows, ScalarHead, for_products, rotate
from run import passes, pretrained
from run.caches import new_cache
from run.passes import token_logps
from run.pretrained import frozen


def slow_forward(model, ids):
    """Logits of one row by loops over heads and positions, in float64, from the definitions."""
    c = model.cfg
    D, per = c.n_embd // c.n_head, c.n_head // c.n_kv_head
    turns = c.rope_inv_freq or [c.rope_theta ** (-2 * i / D) for i in range(D // 2)]
    W = {n: p.detach().double() for n, p in model.named_parameters()}
    norm = lambda x, w: x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w

    def rope(x, t):                                     # Llama: pairs (i, i + D/2)
        out = x.clone()
        for i in range(D // 2):
            a = torch.tensor(t * turns[i], dtype=torch.float64)
            out[i] = x[i] * a.cos() - x[i + D // 2] * a.sin()
            out[i + D // 2] = x[i + D // 2] * a.cos() + x[i] * a.sin()
        return out * c.rope_scale

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


@pytest.mark.parametrize("shape", [dict(n_kv_head=1), dict(n_kv_head=2), dict(n_kv_head=4),
                                   dict(rope_inv_freq=(1.0, 0.2, 0.03, 0.001), rope_scale=1.3)])
def test_forward_equals_the_definition(shape):
    model = tiny_model(**shape)
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
    cache = new_cache(model, 3, 16).normal_()            # garbage in the slots not yet written
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


@pytest.mark.slow
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
    with pytest.raises(UserError) as e:
        pretrained.load(tmp_path)
    assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_shapes_that_cannot_be():
    for wrong in (dict(n_embd=30, n_head=4), dict(n_head=4, n_kv_head=3), dict(n_embd=12, n_head=4)):
        with pytest.raises(UserError):
            GPTConfig(**wrong)


# ------------------------------------------------------------------------------- what holds of all

def test_a_shape_is_by_default_that_of_a_small_llama():
    assert dataclasses.asdict(GPTConfig()) == dict(
        vocab_size=257, n_layer=4, n_head=4, n_kv_head=2, n_embd=128, n_inner=352, block_size=128, head_size=32,
        positions="rope", rope_theta=10000.0, rope_inv_freq=(), rope_scale=1.0, norm="rms", norm_eps=1e-5, mlp="swiglu",
        bias="none", qk_norm=False, tied=True)


def test_the_frame_of_prompts_cannot_be_changed(tmp_path):
    frame = load_encoding(chat_folder(tmp_path)).frame
    with pytest.raises(dataclasses.FrozenInstanceError):
        frame.before = frame.before


@pytest.mark.parametrize("name, most", [("n_layer", 1000), ("vocab_size", 1048576), ("n_inner", 1048576),
                                        ("block_size", 1048576), ("n_embd", 1048576)])
def test_sizes_have_bounds(name, most):
    for x in (1, most):
        assert getattr(pretrained.shape(**{"n_head": 1, "n_kv_head": 1, "head_size": 2, name: x}), name) == x
    for x in (0, -1, most + 1):
        with pytest.raises(UserError, match=f"^{name} must be between 1 and {most}, not {x}$"):
            pretrained.shape(**{name: x})


def test_heads_share_the_channels_alike_unless_they_have_a_size_of_their_own():
    assert GPTConfig(n_embd=34, n_head=4, n_kv_head=4, head_size=6).head_size == 6
    with pytest.raises(UserError, match="^n_head 4 must divide n_embd 34$"):
        GPTConfig(n_embd=34, n_kv_head=4)
    for wrong in (dict(n_kv_head=3), dict(n_kv_head=3, head_size=6)):
        with pytest.raises(UserError, match="^n_kv_head 3 must divide n_head 4$"):
            GPTConfig(**wrong)
    with pytest.raises(UserError, match="^RoPE needs an even head size, not 7$"):
        GPTConfig(head_size=7)
    assert GPTConfig(head_size=7, positions="learned").head_size == 7


def test_a_row_may_fill_the_context(model):
    assert model(torch.zeros(3, 64, dtype=torch.int64)).shape == (3, 64, 32)
    with pytest.raises(UserError, match="^65 tokens do not fit a context of 64$"):
        model(torch.zeros(3, 65, dtype=torch.int64))


def test_a_model_is_its_parameters(model):
    """What follows from the shape, the tables of RoPE, is in no file."""
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert {n for n, _ in model.named_buffers()} == {"cos", "sin"}


@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_attention_over_rows_is_in_float32_on_a_cpu(amp, monkeypatch):
    """Under autocast too: products of weights are in bfloat16 alone."""
    model, asked, attend = tiny_model(), [], F.scaled_dot_product_attention
    model.amp = amp

    def recorded(q, k, v, **how):
        y = attend(q, k, v, **how)
        asked.extend(x.dtype for x in (q, k, v, y))
        return y
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    products = []
    for layer in model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, given, made: products.append(made.dtype))
    model(torch.tensor([[1, 2, 3]]))
    assert {*asked} == {torch.float32} and {*products} == {amp or torch.float32}


@pytest.mark.parametrize("amp, dtype", [(None, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_a_cache_holds_keys_and_values_in_the_dtype_of_products(amp, dtype):
    model = tiny_model(n_layer=3)
    model.amp = amp
    cache = new_cache(model, 5, 7)
    assert cache.shape == (3, 2, 5, 2, 7, 8) and cache.dtype == dtype and not cache.any()
    assert cache.device == model.device and not cache.requires_grad


def test_a_critic_has_no_opinion_and_one_number_for_a_state():
    critic, h = ScalarHead(32), torch.randn(2, 5, 32)
    assert critic.head.weight.shape == (1, 32) and critic(None, h=h).shape == (2, 5) and not critic(None, h=h).any()


# ------------------------------------------------------------------------------- log-probabilities

class Heads:
    """How many states a model's head turns into logits, call by call."""

    def __init__(self, model):
        self.sizes, self.real = [], model.head
        model.head = self

    def __call__(self, h):
        self.sizes.append(len(h))
        return self.real(h)


@pytest.mark.parametrize("chunk, forward, backward", [
    (257 * 12, [12], []),                       # all fit: they are made once, and kept
    (257 * 12 - 1, [11, 1], [11, 1]),           # one too many: in parts, each of which is made again
    (257 * 5 + 256, [5, 5, 2], [5, 5, 2]), (257, [1] * 12, [1] * 12),
    (100, [1] * 12, [1] * 12)])                 # not even those of one state: one at a time
def test_logits_are_made_in_parts_that_fit(chunk, forward, backward, model, monkeypatch):
    monkeypatch.setattr(passes, "most_logits", lambda device: chunk)
    ids, mask = torch.randint(0, 256, (3, 9)), torch.arange(9).expand(3, -1) > 4
    heads = Heads(model)
    logp, _ = token_logps(model, ids, mask, 1.0)
    assert heads.sizes == forward
    logp.sum().backward()
    assert sorted(heads.sizes[len(forward):]) == sorted(backward)


def test_rows_without_a_sampled_token_have_no_log_probabilities(model):
    """Alone, as a micro-batch of rows that an algorithm leaves out, or beside others."""
    ids = torch.randint(0, 256, (3, 9))
    for on in (torch.zeros(3, 9), torch.arange(9) > torch.tensor([[9], [4], [9]])):
        logp, _ = token_logps(model, ids, on.bool(), 1.0)
        assert logp.shape == ids.shape and torch.equal(logp < 0, on.bool())


def test_gradients_of_what_is_made_again_can_be_asked_for_alone(model, monkeypatch):
    """By torch.autograd.grad, of some parameters: checkpoints that re-enter autograd refuse that."""
    ids, mask = torch.randint(0, 256, (3, 9)), torch.arange(9).expand(3, -1) > 4
    some = [model.embed_tokens.weight, model.layers[0].mlp.up_proj.weight]
    want = torch.autograd.grad(token_logps(model, ids, mask, 1.0)[0].sum(), some)
    for recompute, chunk in ((True, 2 ** 26), (False, 257 * 5), (True, 257 * 5)):
        model.recompute = recompute
        monkeypatch.setattr(passes, "most_logits", lambda device: chunk)
        have = torch.autograd.grad(token_logps(model, ids, mask, 1.0)[0].sum(), some)
        for x, y in zip(have, want):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------ config.json

LLAMA = dict(model_type="llama", vocab_size=257, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             hidden_size=32, intermediate_size=64, max_position_embeddings=64, rms_norm_eps=1e-6)
GPT2 = dict(model_type="gpt2", vocab_size=257, n_layer=2, n_head=4, n_embd=32, n_positions=64, layer_norm_epsilon=1e-6)
YARN = dict(rope_type="yarn", factor=4.0)
BENT = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def without(config, *names):
    return {name: x for name, x in config.items() if name not in names}


def made(config):
    """A model with random weights of the shape in a config.json."""
    model = GPT(pretrained.read_config(config))
    model.hf = dict(config)
    return model


def test_what_a_config_leaves_out():
    """A llama has no head of its own size, a base of 10000, and an untied head; a GPT-2 an MLP 4 times as wide as its
    channels, and its head is the embedding. Without a number of key heads there are as many as query heads."""
    llama, gpt2 = map(pretrained.read_config, (without(LLAMA, "num_key_value_heads"), GPT2))
    same = dict(vocab_size=257, n_layer=2, n_head=4, n_kv_head=4, n_embd=32, block_size=64, norm_eps=1e-6)
    assert llama == GPTConfig(**same, n_inner=64, tied=False, head_size=8, rope_theta=10000.0)
    assert gpt2 == GPTConfig(**same, n_inner=128, tied=True, positions="learned", norm="layer", mlp="gelu", bias="all")
    assert pretrained.read_config(LLAMA | dict(model_type="mistral", sliding_window=None)) == pretrained.read_config(LLAMA)
    assert pretrained.read_config(GPT2 | dict(n_inner=99, tie_word_embeddings=False)) == dataclasses.replace(
        gpt2, n_inner=99, tied=False)
    assert pretrained.read_config(LLAMA | dict(tie_word_embeddings=True, head_dim=6, rope_theta=5e5)) == dataclasses.replace(
        llama, n_kv_head=2, tied=True, head_size=6, rope_theta=5e5)
    qwen3 = pretrained.read_config(LLAMA | dict(model_type="qwen3"))        # whose default is 128, not a share of the width
    assert qwen3.head_size == 128 and pretrained.read_config(LLAMA | dict(model_type="qwen3", head_dim=6)).head_size == 6


@pytest.mark.parametrize("harmless", [
    dict(hidden_act="silu"), dict(attention_bias=False), dict(mlp_bias=False), dict(use_sliding_window=False),
    dict(is_causal=True), dict(partial_rotary_factor=1), dict(partial_rotary_factor=1.0), dict(add_cross_attention=False),
    dict(quantization_config=None), dict(dtype="float16"), dict(torch_dtype="bfloat16"), dict(layer_types=None),
    dict(layer_types=["full_attention"] * 2), dict(rope_scaling=None), dict(sliding_window=16),
    dict(model_type="mistral"), dict(model_type="mistral", sliding_window=64), dict(original_max_position_embeddings=32),
    dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=1)), dict(rope_theta=10000), dict(head_dim=None), dict(bos_token_id=3)])
def test_what_says_only_how_it_is_anyway(harmless):
    assert pretrained.read_config(LLAMA | harmless) == pretrained.read_config(LLAMA)


@pytest.mark.parametrize("change, fault", [
    (dict(model_type="gemma"), "model_type 'gemma' is not one of llama, mistral, qwen2, qwen3, gpt2"),
    (dict(model_type="mistral", sliding_window=63), "sliding_window 63 is not supported: it is less than max_position_embeddings 64"),
    (dict(model_type="mistral", max_position_embeddings=8192),
     "sliding_window 4096 is not supported: it is less than max_position_embeddings 8192"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (dict(attention_bias=True), "attention_bias True is not supported"),
    (dict(mlp_bias=True), "mlp_bias True is not supported"),
    (dict(use_sliding_window=True), "use_sliding_window True is not supported"),
    (dict(is_causal=False), "is_causal False is not supported"),
    (dict(partial_rotary_factor=0), "partial_rotary_factor 0 is not supported"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
    (dict(quantization_config={}), "quantization_config {} is not supported"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types 'sliding_attention' is not supported"),
    (dict(vocab_size="320"), "vocab_size must be of type int, not '320'"),
    (dict(vocab_size=320.0), "vocab_size must be of type int, not 320.0"),
    (dict(vocab_size=True), "vocab_size must be of type int, not True"),
    (dict(tie_word_embeddings=1), "tied must be of type bool, not 1"),
    (dict(rope_theta="10000"), "rope_theta must be of type float, not '10000'"),
    (dict(rope_theta=True), "rope_theta must be of type float, not True"),
    (dict(vocab_size=None), "vocab_size is missing"),
    (dict(hidden_size=None, vocab_size=None, rms_norm_eps=None), "vocab_size is missing"),
    (dict(rms_norm_eps=None, intermediate_size=None), "intermediate_size is missing"),
    (dict(rope_theta=1), "rope_theta must be a number over 1, not 1.0"),
    (dict(rope_theta=float("inf")), "rope_theta must be a number over 1, not inf"),
    (dict(rope_parameters=dict(rope_theta=float("nan"))), "rope_theta must be a number over 1, not nan"),
    *((dict(rope_scaling={name: kind}), f"rope scaling {kind!r} is not one of linear, llama3, yarn")
      for name, kind in (("type", "dynamic"), ("rope_type", "longrope"), ("rope_type", None), ("type", ["yarn"]))),
    *((dict(rope_scaling=wrong), f"rope scaling: {key} must be a number from 1e-6 to 1e9, not {x}")
      for wrong, key, x in ((dict(type="linear"), "factor", None), (without(BENT, "factor"), "factor", None),
                            (BENT | dict(factor=True), "factor", True), (BENT | dict(factor=-8), "factor", -8),
                            (without(BENT, "low_freq_factor"), "low_freq_factor", None),
                            (BENT | dict(high_freq_factor="4"), "high_freq_factor", "'4'"),
                            (BENT | dict(original_max_position_embeddings=10 ** 400), "original_max_position_embeddings", 10 ** 49),
                            (YARN | dict(attention_factor=float("inf")), "attention_factor", "inf"),
                            (YARN | dict(beta_fast=-1), "beta_fast", -1), (YARN | dict(beta_slow=[1]), "beta_slow", [1]),
                            (YARN | dict(mscale=float("nan"), mscale_all_dim=1), "mscale", "nan"),
                            (YARN | dict(mscale=1, mscale_all_dim="1"), "mscale_all_dim", "'1'")))])
def test_a_config_that_this_model_does_not_compute(change, fault):
    with pytest.raises(UserError) as e:
        pretrained.read_config(LLAMA | change)
    assert str(e.value) == fault


def test_a_gpt2_without_channels():
    with pytest.raises(UserError, match="^n_embd is missing$"):
        pretrained.read_config(without(GPT2, "n_embd"))


def test_what_counts_of_two_thetas():
    read = lambda **rope: pretrained.read_config(LLAMA | rope).rope_theta
    assert read() == 10000.0 and read(rope_theta=7) == 7.0
    assert read(rope_theta=7, rope_scaling=dict(rope_theta=8.0)) == 8.0
    assert read(rope_scaling=dict(rope_theta=8.0), rope_parameters=dict(rope_theta=9.0)) == 8.0


# The frequencies and the factor of cos and sin that transformers 5.23 computes, for a context of 256 and heads of 12 channels.
SCALED = [
    (dict(type="linear", factor=3.0), [0.33333334, 0.071814485, 0.015471961, 0.0033333332, 0.00071814476, 0.00015471964], 1.0),
    (BENT, [1.0, 0.10198934, 0.0058019855, 0.00125, 0.00026930429, 5.8019868e-05], 1.0),
    (YARN | dict(mscale=0.7), [1.0, 0.16158257, 0.02320794, 0.0024999999, 0.00053860858, 0.00011603974], 1.138629436111989),
    (dict(rope_type="yarn", factor=2, original_max_position_embeddings=32, truncate=False, rope_theta=500.0, beta_fast=10,
          beta_slow=0.5, attention_factor=1.5), [1.0, 0.27575317, 0.069767088, 0.022360681, 0.0079370048, 0.0028172696], 1.5),
    (dict(type="yarn", factor=40, original_max_position_embeddings=1024, mscale=1.0, mscale_all_dim=0.5, rope_theta=1e3),
     [1.0, 0.31622776, 0.075624995, 0.016206674, 0.0026874996, 7.9056947e-05], 1.1557219901962608),
    (dict(type="yarn", factor=None, original_max_position_embeddings=6),
     [1.0, 0.0050494559, 0.0010878722, 0.00023437498, 5.0494549e-05, 1.0878725e-05], 1.3753417975251507),
    (dict(type="yarn", factor=0.5, original_max_position_embeddings=10 ** 6, beta_fast=10 ** 4, rope_theta=500.0),
     [1.0, 0.35495368, 0.1259921, 0.049690403, 0.019401567, 0.0075127194], 1.0)]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("given, inv_freq, scale", SCALED)
def test_scaled_frequencies_are_those_of_transformers(given, inv_freq, scale, key):
    """The tables of cos and sin are made from them, of a model without memory too."""
    model = pretrained.of_config(LLAMA | dict(head_dim=12, max_position_embeddings=256, **{key: given}))
    assert model.cfg.rope_inv_freq == pytest.approx(inv_freq, rel=1e-6, abs=0) and model.cfg.rope_scale == scale
    assert model.cos.is_meta
    model.precompute_rope()
    angle = 255 * torch.tensor(inv_freq).double()
    torch.testing.assert_close(model.cos[255, 0].double(), scale * angle.cos().repeat(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.sin[255, 0].double(), scale * torch.cat((-angle.sin(), angle.sin())), rtol=0, atol=1e-4)


def test_the_original_context_is_by_default_the_context():
    """And one outside the settings of RoPE takes precedence over one inside."""
    read = lambda rope, **more: pretrained.read_config(LLAMA | dict(rope_scaling=rope, **more))
    for kind in (BENT, YARN):
        of = lambda n: read(kind | dict(original_max_position_embeddings=n))
        assert read(without(kind, "original_max_position_embeddings")) == of(64) != of(32)
        assert read(kind, original_max_position_embeddings=32) == of(32)
        assert read(kind | dict(original_max_position_embeddings=8), original_max_position_embeddings=32) == of(32)


# ------------------------------------------------------------------------------- a folder's tensors

def fault_of(folder):
    """Why the model in a folder is refused."""
    with pytest.raises(UserError) as e:
        pretrained.load(folder)
    return str(e.value)


def test_a_folder_without_a_config(tmp_path):
    folder = tmp_path / "model"
    assert fault_of(folder) == f"no model in {folder}: train one first, or name its folder with --init"
    (folder / "config.json").mkdir(parents=True)
    assert fault_of(folder) == f"{folder / 'config.json'} is not a regular file"


@pytest.mark.parametrize("config, change, fault", [
    ("llama", lambda x: without(x, "model.layers.1.mlp.up_proj.weight"), "lack tensors of the model: 'model.layers.1.mlp.up_proj.weight'"),
    ("llama", lambda x: without(x, "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"),
     "lack tensors of the model: 'lm_head.weight' and 2 more"),
    ("llama", lambda x: x | {"model.more": torch.ones(3)}, "hold tensors of another model: 'model.more'"),
    ("llama", lambda x: x | {"more": torch.ones(3), "b": torch.ones(())}, "hold tensors of another model: 'b' and 1 more"),
    ("llama", lambda x: x | {"model.norm.weight": torch.ones(3)}, "'model.norm.weight' has the shape [3], not [32]"),
    ("llama", lambda x: x | {"model.norm.weight": torch.ones(())}, "'model.norm.weight' has the shape [], not [32]"),
    ("gpt2", lambda x: without(x, "transformer.h.1.attn.c_attn.weight"), "lack tensors of the model: 'transformer.h.1.attn.c_attn.weight'"),
    ("gpt2", lambda x: x | {"transformer.h.1.attn.c_attn.weight": torch.ones(32, 95)},
     "'transformer.h.1.attn.c_attn.weight' has the shape [32, 95], not [32, 96]"),
    ("gpt2", lambda x: x | {"transformer.h.1.attn.c_attn.bias": torch.ones(95)},
     "'transformer.h.1.attn.c_attn.bias' has the shape [95], not [96]"),
    ("gpt2", lambda x: x | {"transformer.h.1.mlp.c_fc.weight": torch.ones(31, 128)},
     "'transformer.h.1.mlp.c_fc.weight' has the shape [31, 128], not [32, 128]"),
    ("bare", lambda x: without(x, "h.1.attn.c_attn.weight"), "lack tensors of the model: 'h.1.attn.c_attn.weight'"),
    ("bare", lambda x: x | {"h.1.more": torch.ones(3)}, "hold tensors of another model: 'h.1.more'"),
    ("bare", lambda x: x | {"wte.weight": torch.ones(257, 33)}, "'wte.weight' has the shape [257, 33], not [257, 32]")])
def test_a_file_has_each_tensor_of_its_model_and_no_other(config, change, fault, tmp_path):
    """One line says which, as it is, or would be, called in the file; OpenAI's own GPT-2 has shorter names."""
    pretrained.save(made(LLAMA if config == "llama" else GPT2), tmp_path)
    file = tmp_path / "model.safetensors"
    short = "transformer." if config == "bare" else ""
    save_file(change({name.removeprefix(short): x for name, x in load_file(file).items()}), file)
    said = fault_of(tmp_path)
    assert said.removeprefix(f"{tmp_path}: ").removeprefix("its files ") == fault


@pytest.mark.parametrize("config, name", [(LLAMA | dict(tie_word_embeddings=True), "model.embed_tokens.weight"),
                                          (GPT2, "transformer.wte.weight")], ids=["llama", "gpt2"])
def test_a_tied_head_in_the_file_is_the_embedding(config, name, tmp_path):
    """It is left out, or the same; another one would be lost."""
    pretrained.save(made(config), tmp_path)
    tensors = {n: torch.randn_like(x) for n, x in load_file(tmp_path / "model.safetensors").items()}
    assert name in tensors and "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors[name].clone()}, tmp_path / "model.safetensors")
    assert torch.equal(pretrained.load(tmp_path).embed_tokens.weight, tensors[name])
    save_file(tensors | {"lm_head.weight": tensors[name] + 1}, tmp_path / "model.safetensors")
    assert "tie_word_embeddings is true, but lm_head.weight is not the embedding" in fault_of(tmp_path)


def test_a_model_in_parts(tmp_path, model):
    """The index counts only where there is no whole file, and names files beside it."""
    pretrained.save(model, tmp_path)
    index, whole = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    index.write_text(json.dumps({"weight_map": {"a": "none.safetensors"}}))
    assert torch.equal(pretrained.load(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    tensors = load_file(whole)
    whole.unlink()
    parts = {name: f"part{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(parts.values()):
        save_file({name: x for name, x in tensors.items() if parts[name] == file}, tmp_path / file)
    index.write_text(json.dumps({"weight_map": parts}))
    assert torch.equal(pretrained.load(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    elsewhere = {name: f"../elsewhere/{file}" for name, file in parts.items()}
    index.write_text(json.dumps({"weight_map": elsewhere}))         # no file of another folder is read
    assert torch.equal(pretrained.load(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    index.unlink()
    said = fault_of(tmp_path)
    assert said.startswith(f"{tmp_path}: cannot read its tensors: ") and str(whole) in said


def test_a_model_is_written_as_others_write_theirs(tmp_path, model):
    """In a folder that need not be there; JSON with two spaces a level, as transformers writes it."""
    folder = tmp_path / "a" / "b"
    pretrained.save(model, folder, {"c/d.json": "{}"})
    lines = (folder / "config.json").read_text().splitlines()
    assert {len(line) - len(line.lstrip()) for line in lines} == {0, 2, 4}
    assert (folder / "c" / "d.json").read_text() == "{}"


def test_rope_keeps_the_dtype_and_rounds_once():
    """In bfloat16 the tables are float32: queries and keys leave as they came."""
    model, x = tiny_model(), torch.randn(3, 5, 4, 8).bfloat16()
    tables = model.cos[:5], model.sin[:5]
    found = rotate(x, *tables)
    assert found.dtype == torch.bfloat16 and torch.equal(found, rotate(x.float(), *tables).bfloat16())


class Casts(TorchDispatchMode):
    """The addresses of the tensors that are cast to bfloat16."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        if f is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 != args[0].dtype:
            self.seen.append(args[0].data_ptr())
        return out


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_what_several_products_read_is_cast_once(mlp, bias):
    """In bfloat16: the input of q, k and v, that of gate and up. A sampler's weights need no cast; in float32 nothing is."""
    plain = tiny_model(n_layer=1, mlp=mlp, bias=bias)
    x = torch.randn(3, 5, 32)
    with torch.no_grad(), Casts() as casts:
        plain(torch.ones(3, 5, dtype=torch.int64))
        assert for_products(x) is x
    assert casts.seen == []
    plain.amp = torch.bfloat16
    layer = frozen(plain).layers[0]
    with torch.no_grad(), Casts() as casts, plain.autocast():
        layer.mlp(x)
    assert casts.seen == [x.data_ptr()]
    rope = [table[torch.arange(5).expand(3, -1)] for table in (plain.cos, plain.sin)]
    with torch.no_grad(), Casts() as casts, plain.autocast():
        layer.self_attn(x, rope, Rows(torch.ones(3, 5, dtype=torch.int64), x.device), None)
    assert casts.seen.count(x.data_ptr()) == 1
