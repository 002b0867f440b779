"""The model: its forward pass by the definitions, the cache, config.json, a folder's tensors."""
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from safetensors.torch import load, load_file, save_file
from test_caches import FAMILIES

from data import UserError
from model import GPT, GPTConfig, LogSoftmaxAt, ScalarHead, token_logps
from run import pretrained
from run.caches import new_cache


def slow_forward(model, ids):
    """Logits of one row in float64, from the definitions."""
    c = model.cfg
    D, rope, t = c.head_size, c.positions == "rope", torch.arange(len(ids)).double()
    turns = c.rope_inv_freq or [c.rope_theta ** (-2 * i / D) for i in range(D // 2)]
    angle = t[:, None, None] * torch.tensor(turns).double()             # (T, 1, D / 2)
    W = {n: p.detach().double() for n, p in model.named_parameters()}

    def linear(x, name):
        return x @ W[f"{name}.weight"].T + W.get(f"{name}.bias", 0)

    def norm(x, name):
        if c.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
        return x * W[f"{name}.weight"] + W.get(f"{name}.bias", 0)

    def heads(h, name):                                                 # (T, H, D)
        x = linear(h, f"{name}_proj").unflatten(-1, (-1, D))
        if name[-1] != "v":
            x = norm(x, f"{name}_norm") if c.qk_norm else x
            one, two = x[..., :D // 2], x[..., D // 2:]     # Llama: pairs (i, i + D/2)
            cos, sin = angle.cos(), angle.sin()
            x = torch.cat((one * cos - two * sin, two * cos + one * sin), -1) if rope else x
        return x.repeat_interleave(c.n_head // x.size(1), 1)

    x = W["embed_tokens.weight"][ids]
    x = x if rope else x + W["embed_positions.weight"][:len(ids)]
    for at in (f"layers.{i}." for i in range(c.n_layer)):
        h = norm(x, f"{at}input_layernorm")
        q, k, v = (heads(h, f"{at}self_attn.{name}") for name in "qkv")
        score = torch.einsum("thd,shd->hts", q, k) / D ** 0.5
        score = score.masked_fill(t[:, None] < t, float("-inf")).softmax(-1)
        x = x + linear(torch.einsum("hts,shd->thd", score, v).flatten(1), f"{at}self_attn.o_proj")
        h = norm(x, f"{at}post_attention_layernorm")
        up = linear(h, f"{at}mlp.up_proj")
        if c.mlp == "gelu":
            up = up / 2 * (1 + ((2 / torch.pi) ** 0.5 * (up + 0.044715 * up ** 3)).tanh())
        else:
            gate = linear(h, f"{at}mlp.gate_proj")
            up = gate * gate.sigmoid() * up
        x = x + linear(up, f"{at}mlp.down_proj")
    return linear(norm(x, "norm"), "embed_tokens" if c.tied else "lm_head")


SHAPES = FAMILIES | {
    "one key head": dict(n_kv_head=1, norm_eps=0.5, qk_norm=True),
    "keys": dict(n_kv_head=4, rope_theta=50.0),
    "scaled": dict(rope_inv_freq=(1.0, 0.2, 0.03, 0.001), tied=False)}


def shaped(name):
    """A model of one of the shapes, whose norms and biases are random, too."""
    model = tiny_model(**SHAPES[name])
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.3 * torch.randn(p.shape)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_equals_the_definition(shape):
    model, ids = shaped(shape), torch.randint(0, 256, (11,))
    logits = model.head(model(ids[None]))[0].double()
    torch.testing.assert_close(logits, slow_forward(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape, fault", [
    (dict(n_embd=34, n_kv_head=4, head_size=6), None),
    (dict(n_kv_head=3, head_size=6), "n_kv_head 3 must divide n_head 4"),
    (dict(head_size=7, positions="learned"), None)])
def test_shapes_that_cannot_be(shape, fault):
    if fault is None:
        assert GPTConfig(**shape).head_size == shape["head_size"]
        return
    with pytest.raises(ValueError, match=fault):
        GPTConfig(**shape)


# ---------- dtypes

@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_attention_over_rows_is_in_float32_on_a_cpu(amp, monkeypatch):
    """Under autocast too; the products of weights and the cache are not."""
    model, asked, attend = tiny_model(n_layer=3), set(), F.scaled_dot_product_attention
    model.amp, products = amp, []

    def recorded(q, k, v, **how):
        asked.update((q.dtype, k.dtype, v.dtype))
        return attend(q, k, v, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    model.layers[0].self_attn.q_proj.register_forward_hook(lambda *x: products.append(x[2].dtype))
    model(torch.tensor([[1, 2, 3]]))
    assert asked == {torch.float32} and products == [amp or torch.float32]
    cache = new_cache(model, 5, 7)
    assert cache.shape == (3, 2, 5, 2, 7, 8) and cache.dtype == products[0] and not cache.any()


@pytest.mark.parametrize("dtype, digits", [(torch.float32, 1e-6), (torch.bfloat16, 2 ** -8)])
def test_log_softmax_is_that_of_float64_also_in_bfloat16(dtype, digits):
    """Rows in parts of four and one; backwards twice."""
    logits = (4 * torch.randn(5, 2 ** 20)).to(dtype)
    tokens, up = torch.cat([logits[:3].argmax(1), logits[3:].argmin(1)]), torch.randn(5)
    x, exact = logits.requires_grad_(), logits.detach().double().requires_grad_()
    logp, want = LogSoftmaxAt.apply(x, tokens), exact.log_softmax(1)[range(5), tokens]
    torch.testing.assert_close(logp.double(), want, rtol=1e-6, atol=0)
    want, = torch.autograd.grad(want, exact, up.double())
    for _ in range(2):
        got, = torch.autograd.grad(logp, x, up, retain_graph=True)
        torch.testing.assert_close(got.double(), want, rtol=digits, atol=1e-12)


def test_probabilities_are_those_of_rounded_logits():
    model, h = tiny_model(), torch.randn(3, 32)
    model.amp = torch.bfloat16
    logits = F.linear(h.bfloat16(), model.embed_tokens.weight.bfloat16())
    torch.testing.assert_close(model.probs(h), logits.float().softmax(-1), rtol=1e-5, atol=0)


# ---------- log-probabilities

@pytest.mark.parametrize("chunk, sizes", [
    (257 * 12, [12]),                           # all fit: they are made once, and kept
    (257 * 12 - 1, [11, 1] * 2),                # one too many: in parts, each made again
    (257 * 5 + 256, [5, 5, 2] * 2), (100, [1] * 24)])       # not even those of one state
@pytest.mark.parametrize("recompute", [False, True])
def test_logits_are_made_in_parts_that_fit(chunk, sizes, recompute, model):
    """Results and gradients of some parameters are the same, with recomputed layers too."""
    ids, mask = torch.randint(0, 256, (3, 9)), torch.arange(9).expand(3, -1) > 4
    model.double()
    critic = ScalarHead(32, None, 1.0, torch.Generator().manual_seed(0))
    some, seen, head = [*model.parameters()][:5], [], model.head
    model.head = lambda h: (seen.append(len(h)), head(h))[1]

    def found():
        logp, value = token_logps(model, ids, mask, 0.7, critic)
        return logp, value, *torch.autograd.grad((logp + value).sum(), some)
    want = found()
    model.most_logits, model.recompute = chunk, recompute
    seen.clear()
    torch.testing.assert_close(found(), want, rtol=1e-5, atol=1e-5)
    assert sorted(seen) == sorted(sizes)
    assert not ScalarHead(32)(None, h=torch.randn(2, 5, 32)).any()          # no opinion yet


# ---------- config.json

LLAMA = dict(model_type="llama", vocab_size=257, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, hidden_size=32, intermediate_size=64,
             max_position_embeddings=64, rms_norm_eps=1e-6)
GPT2 = dict(model_type="gpt2", vocab_size=257, n_layer=2, n_head=4, n_embd=32, n_positions=64,
            layer_norm_epsilon=1e-6)
CONTEXT = "original_max_position_embeddings"
BENT = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        CONTEXT: 64}


ONE = torch.ones(())
UP, ATTENTION = "model.layers.1.mlp.up_proj.weight", "transformer.h.1.attn.c_attn.weight"


def without(config, *names):
    return {name: x for name, x in config.items() if name not in names}


def read(**changes):
    return pretrained.read_config(LLAMA | changes)


def test_what_a_config_leaves_out():
    llama = pretrained.read_config(without(LLAMA, "num_key_value_heads"))
    gpt2 = pretrained.read_config(GPT2)
    same = dict(vocab_size=257, n_layer=2, n_head=4, n_kv_head=4, n_embd=32, block_size=64,
                norm_eps=1e-6)
    assert llama == GPTConfig(**same, n_inner=64, tied=False)
    assert gpt2 == GPTConfig(**same, n_inner=128, positions="learned", norm="layer", mlp="gelu",
                             bias="all")
    other = pretrained.read_config(GPT2 | dict(n_inner=99, tie_word_embeddings=False))
    assert other == replace(gpt2, n_inner=99, tied=False)
    assert read(tie_word_embeddings=True, head_dim=6, rope_theta=5e5) == replace(
        llama, n_kv_head=2, tied=True, head_size=6, rope_theta=5e5)
    assert read(model_type="qwen2", num_hidden_layers=1000) == replace(
        read(), bias="qkv", n_layer=1000)
    qwen3 = replace(read(), qk_norm=True, head_size=128)
    assert read(model_type="qwen3") == qwen3
    assert read(model_type="qwen3", head_dim=6) == replace(qwen3, head_size=6)


@pytest.mark.parametrize("harmless", [
    dict(hidden_act="silu", attention_bias=False, mlp_bias=False, is_causal=True, dtype="float16",
         use_sliding_window=False, sliding_window=16, partial_rotary_factor=1, bos_token_id=3,
         layer_types=["full_attention"] * 2, quantization_config=None, rope_theta=10000),
    dict(model_type="mistral"), dict(model_type="mistral", sliding_window=None),
    dict(model_type="mistral", sliding_window=64), {CONTEXT: 32},
    dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=1.0))])
def test_what_says_only_how_it_is_anyway(harmless):
    assert read(**harmless) == read()


@pytest.mark.parametrize("change, fault", [
    (dict(model_type="gemma"), "model_type 'gemma' is not one of llama, mistral"),
    (dict(model_type=[]), "model_type [] is not one of"),
    (dict(model_type="mistral", sliding_window=63), "sliding_window 63 is not supported"),
    (dict(model_type="mistral", max_position_embeddings=8192), "sliding_window 4096 is not"),
    *((wrong, " ".join(f"{name} {x!r}" for name, x in wrong.items()) + " is not supported")
      for wrong in (
          dict(hidden_act={"a": 1}), dict(attention_bias=True), dict(mlp_bias=True),
          dict(use_sliding_window=True), dict(is_causal=False),
          dict(scale_attn_by_inverse_layer_idx=True), dict(partial_rotary_factor=0),
          dict(quantization_config={}))),
    (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor 0.5 is not"),
    (dict(layer_types=["full_attention", "sliding"]), "layer_types 'sliding' is not"),
    (dict(hidden_size=None, vocab_size=None, rms_norm_eps=None), "vocab_size is missing"),
    *((dict(rope_scaling={name: kind}), f"rope scaling {kind!r} is not supported")
      for name, kind in (("rope_type", "yarn"), ("type", "yarn"), ("type", "dynamic"),
                         ("rope_type", None), ("type", ["yarn"]))),
    *((dict(rope_scaling=rope | {key: x}), f"{key} must be a number from 1e-6 to 1e9, not {x!r:.9}")
      for rope, key, x in (
          (dict(type="linear"), "factor", None), (BENT, "factor", True), (BENT, "factor", -8),
          (BENT, "low_freq_factor", None), (BENT, "high_freq_factor", "4"),
          (BENT, CONTEXT, 10 ** 400)))])
def test_a_config_that_this_model_does_not_compute(change, fault):
    with pytest.raises(UserError) as e:
        read(**change)
    assert fault in str(e.value)


# The frequencies of transformers 5.23, for a context of 256 and heads of 12 channels.
SCALED = [
    (dict(type="linear", factor=3.0),
     [0.33333334, 0.071814485, 0.015471961, 0.0033333332, 0.00071814476, 0.00015471964]),
    (BENT, [1.0, 0.10198934, 0.0058019855, 0.00125, 0.00026930429, 5.8019868e-05])]


@pytest.mark.parametrize("given, inv_freq", SCALED)
def test_scaled_frequencies_are_those_of_transformers(given, inv_freq):
    """And the tables that are made of them, of a model without memory too."""
    changes = dict(head_dim=12, max_position_embeddings=256, rope_parameters=given)
    model = pretrained.of_config(LLAMA | changes)
    assert model.cfg.rope_inv_freq == pytest.approx(inv_freq, rel=1e-6, abs=0)
    assert model.cos.is_meta
    model.precompute_rope()
    angle = 255 * torch.tensor(inv_freq).double()
    for table, x in ((model.cos, angle.cos()), (model.sin, angle.sin())):
        x = torch.cat((-x if table is model.sin else x, x))
        torch.testing.assert_close(table[255, 0].double(), x, rtol=0, atol=1e-4)


def test_which_setting_of_rope_counts():
    """An inner theta before an outer one, an outer context before an inner one."""
    inner = dict(rope_scaling=dict(rope_theta=8.0))
    assert read(rope_theta=7).rope_theta == 7.0
    assert read(rope_theta=7, **inner).rope_theta == 8.0
    assert read(**inner, rope_parameters=dict(rope_theta=9.0)).rope_theta == 8.0
    by = {n: read(rope_scaling=BENT | {CONTEXT: n}) for n in (None, 8, 32, 64)}
    assert by[None] == by[64] != by[32]                 # the context is the default
    for n in (None, 8):
        assert read(rope_scaling=BENT | {CONTEXT: n}, **{CONTEXT: 32}) == by[32]


# ---------- a folder's files

def made(config, where):
    """Saves a model with random weights of the shape in a config.json."""
    model = GPT(pretrained.read_config(config))
    model.hf = dict(config)
    pretrained.save(model, where)
    return where / "model.safetensors"


def fault_of(folder):
    """Why the model in a folder is refused, in one line that names it."""
    with pytest.raises(UserError) as e:
        pretrained.load(folder)
    assert str(folder) in str(e.value) and "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("family", pretrained.FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_is_read_and_written(family, tied, tmp_path):
    """In a folder that need not be there; config.json is as it was."""
    folder, gpt2 = tmp_path / "a" / "b", family == "gpt2"
    config = dict(GPT2 if gpt2 else LLAMA, model_type=family, eos_token_id=256,
                  tie_word_embeddings=tied)
    model = GPT(pretrained.read_config(config))
    model.hf = config
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    model.compile(backend="eager")              # no name begins with `_orig_mod.` then
    pretrained.save(model, folder, {"d.json": b"{}"})
    again = pretrained.load(folder)
    assert again.cfg == model.cfg and (folder / "d.json").read_bytes() == b"{}"
    for (n, p), (m, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert n == m and torch.equal(p, q)
    text = (folder / "config.json").read_text()
    assert json.loads(text) == config and '\n  "model_type"' in text
    tensors, attention = load_file(folder / "model.safetensors"), model.layers[1].self_attn
    assert ("lm_head.weight" in tensors) is not tied
    for i, part in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
        if gpt2:
            assert torch.equal(tensors[ATTENTION].T.split(32)[i], part.weight)
            assert torch.equal(tensors[ATTENTION[:-6] + "bias"].split(32)[i], part.bias)
        else:
            name = f"model.layers.1.self_attn.{'qkv'[i]}_proj.weight"
            assert torch.equal(tensors[name], part.weight)


@pytest.mark.parametrize("config, gone, new, fault", [
    (LLAMA, [UP], {}, f"lack tensors of the model: '{UP}', one of 1"),
    (LLAMA, ["lm_head.weight", "model.norm.weight"], {}, "'lm_head.weight', one of 2"),
    (LLAMA, [], {"more": ONE, "b": ONE + 1}, "hold tensors of another model: 'b', one of 2"),
    (LLAMA, [], {"model.norm.weight": ONE}, "size mismatch for norm.weight"),
    (LLAMA, [], {"model.norm.weight": torch.full((32,), torch.nan)}, "that are not finite"),
    (GPT2, [], {ATTENTION: torch.ones(96, 32)}, "expects split_sizes to sum exactly to 32"),
    ("bare", ["h.1.mlp.c_fc.bias"], {}, "lack tensors of the model: 'transformer.h.1.mlp.c_fc")])
def test_a_file_has_each_tensor_of_its_model_and_no_other(config, gone, new, fault, tmp_path):
    """OpenAI's own GPT-2 has shorter names; older files hold constants."""
    short = "transformer." if config == "bare" else ""
    file = made(GPT2 if short else config, tmp_path)
    tensors = {name.removeprefix(short): x for name, x in load(file.read_bytes()).items()}
    save_file(tensors | {"h.0.attn.bias": ONE, "h.0.attn.masked_bias": ONE - 2,
                         "layers.0.rotary_emb.inv_freq": ONE + 1}, file)
    pretrained.load(tmp_path)
    save_file(without(tensors, *gone) | new, file)
    assert fault in fault_of(tmp_path)


def test_a_tied_head_in_the_file_is_the_embedding(tmp_path):
    """It is left out, or the same; another one would be lost."""
    file = made(LLAMA | dict(tie_word_embeddings=True), tmp_path)
    tensors, name = load(file.read_bytes()), "model.embed_tokens.weight"
    save_file(tensors | {"lm_head.weight": tensors[name].clone()}, file)
    assert torch.equal(pretrained.load(tmp_path).embed_tokens.weight, tensors[name])
    save_file(tensors | {"lm_head.weight": tensors[name] + 1}, file)
    assert "lm_head.weight is not the embedding" in fault_of(tmp_path)


def test_a_model_in_parts(tmp_path, model):
    """The index counts only where there is no whole file, and names files beside it."""
    def load(names):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        assert torch.equal(pretrained.load(tmp_path).embed_tokens.weight, model.embed_tokens.weight)
    pretrained.save(model, tmp_path)
    load({"a": "none.safetensors"})
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {"0": [*tensors][::2], "1": [*tensors][1::2]}
    for part, of in names.items():
        save_file({name: tensors[name] for name in of}, tmp_path / part)
    load({name: part for part, of in names.items() for name in of})
    load({name: f"../elsewhere/{part}" for part, of in names.items() for name in of})
