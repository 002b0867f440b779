"""Sampling: each row is what it is alone, whichever cache computes it."""
import functools

import pytest
import torch
from conftest import tiny_model
from test_caches import PROMPTS, STOP, assert_same, ending, uniform, watched

from grpo import sample

from model import token_logps
from run import caches
from run.caches import draw, inverse_cdf

END = {256}


def alone(model, prompt, limit, temperature, stop, u):
    """A row from the definitions: token by token, each from its whole beginning."""
    ids, logps = list(prompt), []
    for n in range(limit):
        logits = model.head(model(torch.tensor([ids]))[:, -1])[0].double()
        p = (logits / temperature).softmax(-1)
        token = p.argmax() if u is None else (p.cumsum(-1) > u[n] * p.sum()).nonzero()[0, 0]
        ids.append(token.item())
        logps.append(p[token].log().item())
        if ids[-1] in stop:
            return ids, logps, True
    return ids, logps, False


# Prompts, completions of each, their limits, temperature, what ends them, the logits' scale.
ROLLOUTS = {
    "ragged": (PROMPTS, 8, [20] * 3, 0.7, STOP, 1),
    "hot": (PROMPTS, 4, [12] * 3, 1.6, {256, 9, 200}, 8),
    "cold": (PROMPTS, 4, [12] * 3, 0.4, END, 8),
    "greedy": (PROMPTS, 1, [8] * 3, 1.6, END, 8),
    "trees": (PROMPTS[:2], 20, [16] * 2, 0.3, set(range(0, 257, 7)), 1),
    "limits": ([[65, 66, 67, 68, 69, 70], [71, 72], [73] * 4], 4, [5, 11, 8], 1.0, STOP, 1),
    "first": (PROMPTS, 2, [12, 3, 1], 0.7, STOP, 1),
    "long": (PROMPTS, 8, [3, 1, 40], 0.7, END, 1),
    "one": (PROMPTS[:1], 1, [20], 1.0, END, 1),
    "odd prompts": ([[256, 0, 65, 0], [256]], 3, [6, 6], 1.0, END, 1),
}


@functools.cache
@torch.no_grad()
def expected(name):
    """A model, in float64 so that no rounding decides, numbers to draw with, and the rows."""
    prompts, group, limits, temperature, stop, scale = ROLLOUTS[name]
    context = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
    positions = "learned" if name in ("ragged", "limits") else "rope"
    model = tiny_model(block_size=context, positions=positions).double()
    real, model.head = model.head, lambda h: scale * real(h)
    n = len(prompts) * group
    u = None if name == "greedy" else uniform(n, max(limits), seed=3)
    rows = [alone(model, prompts[i // group], limits[i // group], temperature, stop,
                  None if u is None else u[i]) for i in range(n)]
    return model, u, rows


@pytest.mark.slow
@pytest.mark.parametrize("cache", caches.CACHES)
@pytest.mark.parametrize("name", ROLLOUTS)
@torch.no_grad()
def test_every_row_is_what_it_is_alone_however_rows_part_and_end(name, cache):
    """Prompt, completion, padding of 0; what was sampled, what ended; and training agrees."""
    prompts, group, limits, temperature, stop, _ = ROLLOUTS[name]
    model, u, rows = expected(name)
    model.kv_cache = cache
    b = sample(model, prompts, group, limits, temperature, stop, u)
    width = max(len(ids) for ids, *_ in rows)
    logp = torch.full((len(rows), width), 1.0)
    for i, (ids, logps, _) in enumerate(rows):
        logp[i, len(ids) - len(logps):len(ids)] = torch.tensor(logps)
    mask = logp < 1
    assert b.ids.tolist() == [ids + [0] * (width - len(ids)) for ids, *_ in rows]
    assert torch.equal(b.mask, mask)
    assert b.finished.tolist() == [finished for *_, finished in rows]
    assert b.start.tolist() == [len(prompt) for prompt in prompts for _ in range(group)]
    torch.testing.assert_close(b.logp, logp * mask, rtol=0, atol=2e-5)
    trained, _ = token_logps(model, b.ids, b.mask, temperature)
    torch.testing.assert_close(trained, b.logp, rtol=0, atol=2e-5)
    if name in ("ragged", "trees"):
        assert b.mask.sum(1).unique().numel() > 3


# -------- the shared cache

@pytest.mark.parametrize("at, prompts, states", [
    # One in twenty may stay; with the second, a tenth, both leave.
    ([0, 1] + [4] * 2 + [6] * 16, [[i, 2] for i in range(20)], [20, 20, 18, 18, 18, 16, 16]),
    # Rows that drew alike have one state; one alone compiles anew.
    ([2, 5, 5, 3, 3, 3], [[1, 2], [3]], [2] * 6), ([0, 0, 4], [[1], [2], [3]], [3, 2, 2, 2, 2])])
def test_states_that_rows_share_and_leave(at, prompts, states):
    model = tiny_model()
    model.kv_cache = "shared"
    _, first, others = ending(model, at, prompts, len(at) // len(prompts), 9)
    assert [n for n, _ in [first, *others]] == states


def test_a_state_is_computed_until_its_rows_part():
    model, u = tiny_model().double(), uniform(1, 12).repeat(8, 1)
    model.kv_cache, seen = "shared", watched(model)
    u[4:, 5] = torch.tensor([0.1, 0.3, 0.6, 0.9])  # of rows 4 to 7, which go on alike
    b = sample(model, PROMPTS[:1], 8, [12], 1.0, set(), u)
    assert len({*map(tuple, b.ids[:, 3:9].tolist())}) == 5
    assert [n for n, _ in seen] == [1] * 6 + [5] * 6


@pytest.mark.parametrize("longest", [1, 14, 15, 16, 17, 126])
def test_slots_grow_by_a_quarter(longest):
    model = tiny_model(block_size=135)
    model.kv_cache = "shared"
    _, first, others = ending(model, [3], [[1] * longest], 1, 9)
    slots = [n for _, n in [first, *others]]
    assert slots == [min(s for s in (16, 32, 128, 160) if s >= n)
                     for n in range(longest, longest + 4)]


@pytest.mark.parametrize("cache", ["shared", "static"])
def test_ids_that_differ_by_powers_of_two_are_told_apart(cache):
    """Cut to 16 bits, or packed with a state's number, some would be equal."""
    few, V = torch.tensor([5, 5 + 2 ** 8, 5 + 2 ** 16]), 2 ** 16 + 128
    model = tiny_model(vocab_size=V, n_layer=1).double()
    weight = model.embed_tokens.weight[few].T / 20
    none = torch.full((1, V), -float("inf"))
    model.head = lambda h: none.repeat(len(h), 1).index_copy(1, few, (h @ weight).float())
    prompts, u = [[5 + 2 ** 16, 40_000, 5], [5, 40_000, 5]], uniform(12, 3)
    u[:, 0] = torch.tensor([0.1, 0.5, 0.9]).repeat(4)  # all three from each prompt's state
    given = prompts, 6, [3, 3], 1.0, set(), u
    plain = sample(model, *given)
    model.kv_cache = cache
    b = sample(model, *given)
    assert_same(b, plain, 2e-5, 1)
    assert b.ids[:, 3].tolist() == few.repeat(4).tolist()


# -------- drawing of a token

ENDS = torch.tensor([0, 2 ** -25, 1 - 2 ** -24, 1], dtype=torch.float64)


@pytest.mark.parametrize("V", [5, 256, 257, 1000, 1024, 49152])
@pytest.mark.parametrize("zeros", [(0, 0), (0, 1 / 8), (0, 3 / 8), (3 / 8, 5 / 8), (5 / 8, 1)])
def test_a_token_is_where_the_sum_passes_u(V, zeros):
    """In float64, up to 3e-6; none of probability 0, a third of them and whole parts."""
    generator = torch.Generator().manual_seed(V)
    n = 40 if V > 2000 else 400
    p = torch.rand(n, V, generator=generator) ** 8  # of very different sizes
    if V > 5:
        p[torch.rand(n, V, generator=generator) < 1 / 3] = 0
    p[:, int(zeros[0] * V):int(zeros[1] * V)] = 0
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    u[:n // 4] = ENDS.repeat(n // 16 + 1)[:n // 4]
    for p in (p, p / p.sum(-1, keepdim=True)):
        token, logp = draw(p, u.float())
        p, at = p.double(), (torch.arange(n), token)
        cdf = p.cumsum(-1) / p.sum(-1, keepdim=True)
        assert (p[at] > 0).all() and torch.allclose(logp.double(), p[at].log(), atol=1e-5)
        assert (cdf[at] > u - 3e-6).all()
        assert (cdf[at] - p[at] / p.sum(-1) < u + 3e-6).all()


def test_a_sum_is_over_128_numbers_at_most(monkeypatch):
    """Of a vocabulary that 128 divides: longer ones take a GPU too long."""
    shapes = []
    monkeypatch.setattr(caches, "inverse_cdf",
                        lambda p, u: (shapes.append(p.shape), inverse_cdf(p, u))[1])
    draw(torch.rand(20, 1024), torch.rand(20))
    assert shapes == [(20, 8), (20, 128)]


def test_of_no_numbers_the_last_token_is_drawn():
    """Not one that there is not; its log-probability stops the run."""
    token, logp = draw(torch.full((1, 256), float("nan")), torch.tensor([0.5]))
    assert token.tolist() == [255] and logp.isnan().all()


@pytest.mark.parametrize("V", [3, 128])
def test_u_at_its_ends_takes_no_token_that_is_nearly_impossible(V):
    p = torch.zeros(1, V)  # 1 - 2 ** -53 is 1 in float32
    p[0, :3] = torch.tensor([1e-9, 1.0, 1e-9])
    assert [draw(p, torch.tensor([u]))[0].item() for u in (0.0, 1.0)] == [1, 1]
