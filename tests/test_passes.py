"""What rows begin with alike is computed once: the plain way gives the same."""
import copy

import pytest
import torch
from conftest import batch_of, records, tiny_model

from data import UserError
from grpo import sample
from model import ScalarHead, token_logps as reference
from reward import score_rows
from run import caches, passes
from run.passes import SharedRows, distinct, token_logps

FAMILIES = {"llama": {}, "yarn": dict(rope_inv_freq=(1.0, 0.2, 0.03, 0.001), rope_scale=1.3, tied=False), "qwen2": dict(bias="qkv"),
            "qwen3": dict(qk_norm=True, head_size=16),
            "gpt2": dict(positions="learned", norm="layer", mlp="gelu", bias="all", n_kv_head=4)}
PROMPTS = [[49, 50, 61], [51], [52, 53, 54, 55, 61, 10]]


def both(family, amp=None):
    """A model that shares, and the same one without."""
    plain = tiny_model(**FAMILIES[family])
    plain.amp = amp
    sharing = copy.deepcopy(plain)
    sharing.kv_cache = "shared"
    return sharing, plain


def sampled(model, temperature=0.5):
    """Completions of ragged prompts, of which many begin alike and end early."""
    u = torch.rand(24, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u[1::8] = u[::8]                    # the first two of each group draw alike
    return sample(model, PROMPTS, 8, [12] * 3, temperature, set(range(0, 257, 5)), u)


@pytest.mark.parametrize("amp, off", [(None, 2e-5), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_is_the_same(family, amp, off):
    """The same tokens with the same log-probabilities; in bfloat16 up to a token that rounding decides."""
    b, plain = (sampled(model) for model in both(family, amp))
    if amp is None:
        assert torch.equal(b.ids, plain.ids) and torch.equal(b.mask, plain.mask) and torch.equal(b.finished, plain.finished)
        torch.testing.assert_close(b.logp, plain.logp, rtol=0, atol=off)
        return
    T = min(b.ids.size(1), plain.ids.size(1))
    same = (b.ids[:, :T] == plain.ids[:, :T]).cumprod(1).bool() & b.mask[:, :T] & plain.mask[:, :T]
    assert same.sum() > 0.8 * plain.mask.sum()
    assert (b.logp[:, :T] - plain.logp[:, :T])[same].abs().max() < off


@pytest.mark.parametrize("amp, off", [(None, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_values_and_gradients_are_the_same(family, amp, off):
    sharing, plain = both(family, amp)
    b = sampled(plain)
    weight = torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for model in (sharing, plain):
        critic = ScalarHead(32, std=0.1, generator=torch.Generator().manual_seed(2))
        logp, value = token_logps(model, b.ids, b.mask, 0.5, critic)
        (weight * (logp.exp() + value)).sum().backward()
        found.append((logp.detach(), value.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (logp, value, grads), (plain_logp, plain_value, plain_grads) = found
    torch.testing.assert_close(logp, plain_logp, rtol=off, atol=10 * off)
    torch.testing.assert_close(value, plain_value, rtol=off, atol=10 * off)
    for name, grad in grads.items():
        if name.endswith("k_proj.bias"):            # 0 but for rounding: it shifts all scores of a query
            continue
        assert (grad - plain_grads[name]).abs().max() <= 2 * off * plain_grads[name].abs().max() + 1e-7, name


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("cache", caches.CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_runs_is_the_plain_reference(family, cache, in_parts, monkeypatch):
    """Log-probabilities and gradients of both, in float64: of ragged rows, with holes in the mask, at a temperature; of all
    logits at once, or in parts."""
    if in_parts:
        monkeypatch.setattr(passes, "most_logits", lambda device: 257 * 8)
    model = tiny_model(**FAMILIES[family]).double()
    model.kv_cache = cache
    b = sampled(model)
    holes = torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    mask, weight = b.mask & ~holes, torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(1))
    assert b.mask.sum(1).unique().numel() > 3 and mask.sum() > 4 * 8
    found = []
    for logp in (token_logps(model, b.ids, mask, 0.7)[0], reference(model, b.ids, mask, 0.7)[0]):
        grads = torch.autograd.grad((weight * logp.exp()).sum(), [*model.parameters()])
        found.append((logp.detach(), grads))
    (logp, grads), (want, want_grads) = found
    assert (want[mask] < -0.01).any() and logp.dtype == want.dtype == torch.float32         # logits are in float32
    torch.testing.assert_close(logp, want, rtol=1e-6, atol=1e-5)
    assert not logp[~mask].any() and not want[~mask].any()
    for (name, p), grad, want_grad in zip(model.named_parameters(), grads, want_grads, strict=True):
        assert (grad - want_grad).abs().max() <= 1e-6 * want_grad.abs().max() + 1e-8, name


def test_a_part_of_the_logits_has_a_token_at_least(model, monkeypatch):
    """However large the vocabulary is."""
    ids = torch.tensor([[49, 50, 61, 7]])
    want = token_logps(model, ids, ids < 60, 1.0)[0]
    monkeypatch.setattr(passes, "most_logits", lambda device: model.cfg.vocab_size - 1)
    torch.testing.assert_close(token_logps(model, ids, ids < 60, 1.0)[0], want, rtol=0, atol=1e-6)


def test_what_else_differs_between_rows_is_refused():
    """A fork adds a vector of its own to each row (B, 1, C): shared tokens have no row, so one line says what to do."""
    def steered(model, ids, vector):
        embed = model.embed_tokens.register_forward_hook(lambda module, given, x: x + vector)
        try:
            return model(ids, layout=passes.layout_of(model, ids, torch.ones_like(ids, dtype=torch.bool)))
        finally:
            embed.remove()
    sharing, plain = both("llama")
    ids, vector = torch.tensor([[1, 2, 3, 4]]).repeat(3, 1), torch.randn(3, 1, 32)
    assert steered(plain, ids, vector).shape == (3, 4, 32)
    with pytest.raises(UserError, match="--cache plain"):
        steered(sharing, ids, vector)


@pytest.mark.slow
def test_the_flag_chooses(tmp_path):
    """--cache plain shares nothing, in every model of a run, and gives the same run up to rounding."""
    
    import grpo
    task = tmp_path / "ragged.py"           # a reward that a model of bytes gets at once
    task.write_text("from data.arithmetic import *\ndef reward(problem, text): return dict(correct=0, size=len(text))\n")
    found = {}
    for way in ("shared", "plain"):
        out = tmp_path / way
        cfg = grpo.make_config(task=str(task), difficulty=1, n_layer=1, n_embd=32, warm_steps=100, steps=2,
                               prompts=2, group=4, max_new=10, held_out=2, samples=1, lr=1e-3, baseline="value", critic="separate",
                               cache=way, device="cpu", dtype="float32", out=str(out))
        agent = grpo.train(cfg)
        models = (agent.policy, agent.ref, agent.critic.trunk)
        assert {model.kv_cache for model in models} == {way}
        found[way] = records(out / "metrics.jsonl")
    assert all(line["grad_norm"] > 0.1 for line in found["shared"] if "grad_norm" in line)
    for one, other in zip(*found.values()):
        for name in one.keys() & {"reward", "length", "loss", "kl", "grad_norm", "pass@1"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_some_rows_of_several_batches():
    """Which are as wide as they need be, in any order and more than once; what none of them has, the rows have not."""
    wide = batch_of(torch.arange(5) > torch.tensor([[1], [2]]), texts=["a", "b"], components={"x": torch.tensor([1.0, 2])})
    narrow = batch_of(torch.tensor([[False, True]]), texts=[["c", "d"]], components={"x": torch.tensor([3.0])})
    for batch, n in ((wide, 1.0), (narrow, 5.0)):
        batch.logp = batch.mask * n
    got = passes.joined([narrow, wide], torch.tensor([2, 0, 2, 1]))
    assert got.texts == ["b", ["c", "d"], "b", "a"] and got.components["x"].tolist() == [2, 3, 2, 1]
    assert got.logp.tolist() == [[0, 0, 0, 1, 1], [0, 5, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
    assert torch.equal(got.mask, got.logp > 0) and torch.equal(got.judged, got.mask) and got.start.tolist() == [3, 1, 3, 2]
    assert got.ids.dtype == torch.int64 and got.mask.dtype == torch.bool and got.value is got.on_policy is None
    narrow.value = narrow.logp
    with pytest.raises(AssertionError):
        passes.joined([wide, narrow], torch.tensor([0]))


def a_tree(seed, least=0, rows=7, longest=9):
    """Rows of two tokens, so that many begin alike, with how much of each counts; what lies beyond
    is 0, which may be a token too."""
    rng = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (rows,), generator=rng)
    used = torch.arange(longest) < length[:, None]
    return torch.randint(least, least + 2, (rows, longest), generator=rng) * used, used


def test_distinct():
    ids = torch.tensor([[7, 8, 9, 1], [7, 8, 9, 2], [7, 8, 0, 0], [7, 8, 0, 2], [5, 8, 0, 2], [5, 8, 0, 2]])
    used = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    first, at = distinct(ids, used)
    assert first.tolist() == [0, 1, 2, 3, 7, 14, 15, 16, 17, 18, 19]    # row 3 has what row 2 only pads with
    assert torch.where(used, at, -1).tolist() == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, -1, -1], [0, 1, 5, 6],
                                                  [7, 8, 9, 10], [7, 8, 9, -1]]
    assert (at >= 0).all() and (at < 11).all()          # of the others any, so that it can be looked up


def test_tokens_that_differ_in_high_bits_alone_are_distinct():
    """A vocabulary may have more than 65,536 of them."""
    ids = torch.tensor([[1, 5, 7], [1, 2 ** 16 + 5, 7], [1, 2 ** 16 + 5, 7]])
    first, at = distinct(ids, ids > 0)
    assert first.tolist() == [0, 1, 2, 4, 5] and at.tolist() == [[0, 1, 2], [0, 3, 4], [0, 3, 4]]


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_distinct_is_what_stands_there(seed, least):
    """Each place has a number, whose first place ends the same beginning. Of sorted rows no
    beginning is computed twice, unless padding looks like a token."""
    ids, used = a_tree(seed, least)
    order = sorted(range(len(ids)), key=ids.tolist().__getitem__)
    for ids, used, once in ((ids, used, False), (ids[order], used[order], least == 1)):
        first, at = distinct(ids, used)
        begins = {(b, t): tuple(ids[b, :t + 1].tolist()) for b, t in used.nonzero().tolist()}
        firsts = [begins[divmod(i, ids.size(1))] for i in first.tolist()]
        assert all(firsts[at[place]] == begin for place, begin in begins.items())
        assert set(firsts) == set(begins.values())
        assert not once or len(firsts) == len(set(firsts))


@pytest.mark.parametrize("shape", [{}, dict(positions="learned", norm="layer", mlp="gelu", bias="all"),
                                   dict(qk_norm=True, bias="qkv")])
def test_states_and_gradients_are_those_of_each_row_alone(shape):
    """Whatever the rows above it are, in float64."""
    model = tiny_model(**shape).double()
    for seed in range(3):
        ids, used = a_tree(seed)
        weight = torch.rand(*ids.shape, 1).double() * used[..., None]
        h = model(ids, layout=SharedRows(ids, used, model.device))
        whole = torch.autograd.grad((h.square() * weight).sum(), list(model.parameters()), allow_unused=True)
        alone, total = torch.zeros_like(h), [0] * len(whole)
        for b, n in enumerate(used.sum(1).tolist()):
            own = model(ids[b:b + 1, :n])
            alone[b, :n] = own[0].detach()
            parts = torch.autograd.grad((own[0].square() * weight[b, :n]).sum(), list(model.parameters()),
                                        allow_unused=True)
            total = [x if part is None else x + part for x, part in zip(total, parts)]
        torch.testing.assert_close(h[used], alone[used], rtol=0, atol=1e-11)
        for x, y in zip(whole, total):
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_what_rows_share_is_computed_once(model, monkeypatch):
    """A prompt of 20 tokens under 8 completions of 3, two of them alike, and no padding."""
    ids = torch.randint(0, 256, (1, 26)).repeat(8, 1)
    ids[:, 20:23] = torch.arange(24).view(8, 3)
    ids[1, 20:23] = ids[0, 20:23]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 20:23] = True
    seen, critic = [], ScalarHead(32, tiny_model())
    for gpt in (model, critic.trunk):
        gpt.kv_cache = "shared"
        gpt.layers[1].register_forward_pre_hook(lambda layer, given: seen.append(given[0].shape))
    scored, logps = [], model.logps
    monkeypatch.setattr(model, "logps", lambda h, tokens: (scored.append(len(tokens)), logps(h, tokens))[1])
    token_logps(model, ids, mask, 1.0, critic)
    assert scored == [7 * 3]                # no logits of the prompt
    score_rows(critic, ids, mask)
    # The last token of a row is not read for log-probabilities and values, and is for a reward.
    assert seen == [(1, 20 + 7 * 2, 32), (1, 20 + 7 * 2, 32), (1, 20 + 7 * 3, 32)]
