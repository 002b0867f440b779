"""What rows begin with alike is computed once: the plain way gives the same."""
import dataclasses
import copy

import pytest
import torch
from conftest import batch_of, shared_logps, tiny_model
from test_caches import FAMILIES, PROMPTS, assert_same, uniform

import grpo
from data import UserError
from grpo import sample
from model import ScalarHead, token_logps
from reward import score_rows
from run import passes
from run.passes import SharedRows, distinct

FAMILIES = FAMILIES | {"scaled": dict(rope_inv_freq=(1.0, 0.2, 0.03, 0.001), tied=False)}


def model_of(family, cache, dtype):
    """A small model in one of the three forms, in a dtype."""
    torch.manual_seed(0)                # of biases
    model = tiny_model(**FAMILIES[family])
    model.kv_cache = cache
    if dtype == torch.float64:
        model.double()
    if dtype == torch.bfloat16:
        model.amp = dtype
    return model


def sampled(model):
    """Completions of ragged prompts, of which many begin alike and end early."""
    u = uniform(24, 12)
    u[1::8] = u[::8]                    # the first two of each group draw alike
    return sample(model, PROMPTS, 8, [12] * 3, 0.5, set(range(0, 257, 5)), u)


@pytest.mark.parametrize("dtype, off, share", [
    (torch.float64, 1e-6, 1), (torch.float32, 1e-4, 0.9), (torch.bfloat16, 0.3, 0.7)])
@pytest.mark.parametrize("cache", ["shared", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_is_the_same(family, cache, dtype, off, share):
    assert_same(*[sampled(model_of(family, kind, dtype)) for kind in (cache, "plain")], off, share)


@pytest.mark.parametrize("dtype, off", [
    (torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_values_and_gradients_are_the_same(family, dtype, off):
    """Of ragged rows with holes in the mask; the critic reads the policy's states."""
    model = model_of(family, "plain", dtype)
    b = sampled(model)
    mask = b.mask & (uniform(*b.mask.shape, seed=2) > 0.2)
    weight = uniform(*mask.shape, seed=1)
    critic = ScalarHead(32, std=0.1, generator=torch.Generator().manual_seed(2))
    found = []
    for way in (shared_logps, token_logps):
        logp, value = way(model, b.ids, mask, 0.7, critic)
        loss = (weight * (logp.exp() + value)).sum()
        found.append((logp, value, torch.autograd.grad(loss, [*model.parameters()])))
        assert logp.dtype == torch.float32 and not logp[~mask].any() and not value[~mask].any()
    (logp, value, grads), (want, want_value, want_grads) = found
    assert mask.sum() > 32 and (want[mask] < -0.01).any()
    torch.testing.assert_close(logp, want, rtol=off, atol=10 * off)
    torch.testing.assert_close(value, want_value, rtol=off, atol=10 * off)
    for (name, _), x, y in zip(model.named_parameters(), grads, want_grads, strict=True):
        if not name.endswith("k_proj.bias"):    # rounding alone: it shifts all of a query's scores
            assert (x - y).abs().max() <= 2 * off * y.abs().max() + 1e-7, name


def test_what_else_differs_between_rows_is_refused():
    """A fork adds a vector of its own to each row (B, 1, C)."""
    ids, vector = torch.tensor([[1, 2, 3, 4]]).repeat(3, 1), torch.randn(3, 1, 32)

    def steered(model):
        model.embed_tokens.register_forward_hook(lambda module, given, x: x + vector)
        return model(ids, layout=passes.layout_of(model, ids, ids > 0))
    with pytest.raises(UserError, match="--no-shared_prefixes"):
        steered(tiny_model())
    plain = tiny_model()
    plain.shared_prefixes = False
    assert steered(plain).shape == (3, 4, 32)


def test_no_rows_have_no_groups():
    groups = batch_of(torch.ones(0, 3) > 0, problems=[]).groups
    assert groups.dtype == torch.int64 and passes.grid(groups)[0].shape == (0, 0)


def test_some_rows_of_several_batches():
    """In any order and more than once; what none of them has, the rows have not."""
    wide = batch_of(torch.arange(5) > torch.tensor([[1], [2]]), texts=["a", "b"],
                    components={"x": torch.tensor([1.0, 2])})
    narrow = batch_of(torch.tensor([[False, True]]), texts=[["c", "d"]],
                      components={"x": torch.tensor([3.0])})
    wide.logp, narrow.logp = wide.mask * 1.0, narrow.mask * 5.0
    got = passes.joined([narrow, wide], torch.tensor([2, 0, 2, 1]))
    assert got.texts == ["b", ["c", "d"], "b", "a"]
    assert got.components["x"].tolist() == [2, 3, 2, 1] and got.start.tolist() == [3, 1, 3, 2]
    b = [0, 0, 0, 1, 1]
    assert got.logp.tolist() == [b, [0, 5, 0, 0, 0], b, [0, 0, 1, 1, 1]]
    assert torch.equal(got.mask, got.logp > 0) and torch.equal(got.judged, got.mask)
    assert got.value is None and got.on_policy.all()
    narrow.on_policy = torch.tensor([False])
    got = passes.joined([narrow, wide], torch.tensor([2, 0, 2, 1]))
    assert got.on_policy.tolist() == [True, False, True, True]
    narrow.value = narrow.logp
    with pytest.raises(UserError, match="only some have value"):
        passes.joined([wide, narrow], torch.tensor([0]))


@dataclasses.dataclass
class Wider(grpo.Batch):
    code: torch.Tensor = None       # (B, 4), by chance as wide as the rows
    names: list = None
    parts: dict = None
    factor: float = 1.0
    mine: grpo.Tokens = None


def test_a_field_of_ones_own_reaches_the_loss_as_it_is():
    """Row by row; only Tokens are cut."""
    batch, x = batch_of(torch.ones(3, 4).bool()), torch.arange(12.0).view(3, 4)
    batch = Wider(**vars(batch), code=x, names=[*"abc"], parts={"x": x[:, 0]}, factor=0.5, mine=x)
    got = passes.select(batch, torch.tensor([2, 0]), 2)
    assert torch.equal(got.code, x[[2, 0]]) and torch.equal(got.mine, x[[2, 0], :2])
    assert got.names == ["c", "a"] and got.parts["x"].tolist() == [8, 0] and got.factor == 0.5
    assert got.ids.shape == (2, 2) and got.problems == batch.problems[:2]


def test_gradients_of_many_rows_are_summed_in_float32():
    """In bfloat16 a sum of ones stays at 256."""
    ids = torch.ones(1000, 2, dtype=torch.int64)
    x = torch.ones(1, 2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    SharedRows(x, ids, ids > 0).gather(x).sum().backward()
    assert x.grad.flatten().tolist() == [1000, 1000]


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_distinct_is_what_stands_there(seed, least):
    """Each place has a number, whose first place ends the same beginning; of sorted rows none
    is computed twice, unless padding looks like a token. Tokens differ in high bits alone."""
    rng = torch.Generator().manual_seed(seed)
    used = torch.arange(9) < torch.randint(0, 10, (7, 1), generator=rng)
    ids = (least + 2 ** 16 * torch.randint(0, 2, (7, 9), generator=rng)) * used
    order = sorted(range(7), key=ids.tolist().__getitem__)
    for ids, used, once in ((ids, used, False), (ids[order], used[order], least == 1)):
        first, at = distinct(ids, used)
        assert 0 <= at.min() and at.max() < len(first)      # where nothing is read, too
        used = used | (torch.arange(9) == 0)                # an empty row has a token, too
        begins = {(b, t): tuple(ids[b, :t + 1].tolist()) for b, t in used.nonzero().tolist()}
        firsts = [begins[divmod(i, 9)] for i in first.tolist()]
        assert all(firsts[at[place]] == begin for place, begin in begins.items())
        assert not once or len(firsts) == len({*begins.values()})


def test_what_rows_share_is_computed_once():
    """A prompt of 20 tokens under 8 completions of 3, two of them alike."""
    ids = torch.randint(0, 256, (1, 26)).repeat(8, 1)
    ids[:, 20:23] = torch.arange(24).view(8, 3)
    ids[1, 20:23] = ids[0, 20:23]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 20:23] = True
    seen, scored, model = [], [], model_of("llama", "shared", torch.float32)
    critic, logps = ScalarHead(32, copy.deepcopy(model)), model.logps
    for gpt in (model, critic.trunk):
        gpt.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].size(1)))
    model.logps = lambda h, tokens: (scored.append(len(tokens)), logps(h, tokens))[1]
    shared_logps(model, ids, mask, 1.0, critic)
    score_rows(critic, ids, mask)               # only here the last token is read
    assert scored == [7 * 3] and seen == [20 + 7 * 2, 20 + 7 * 2, 20 + 7 * 3]
    at = mask.flatten().nonzero()[:, 0] - 1
    tokens = 150_000 + ids.flatten()[at + 1]                # of a large vocabulary
    states, once, each = SharedRows(model, ids, mask).once(at, tokens)
    assert torch.equal(once[each], tokens) and len(states) == 7 * 3
