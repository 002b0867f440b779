"""The static cache samples what the plain one samples, in few shapes, with few waits and launches."""
import copy
import gc
import weakref

import pytest
import torch
from conftest import tiny_model

from grpo import make_config, sample
from model import token_logps
from run import caches, dist, pretrained
from run.caches import power_of_two, up

PROMPTS = [[49, 50, 61], [51], [52, 53, 54, 55, 61, 10]]
STOP = set(range(0, 257, 9))        # many: rows end all the time


FAMILIES = {"llama": {}, "qwen2": dict(bias="qkv"), "qwen3": dict(qk_norm=True, head_size=16),
            "gpt2": dict(positions="learned", norm="layer", mlp="gelu", bias="all", n_kv_head=4)}


def assert_same(b, want):
    """The same tokens, with the same log-probabilities."""
    for name in ("ids", "mask", "finished", "start"):
        assert torch.equal(getattr(b, name).cpu(), getattr(want, name).cpu()), name
    torch.testing.assert_close(b.logp.cpu(), want.logp.cpu(), rtol=0, atol=1e-4)


def static(model):
    model.kv_cache = "static"
    return model


def uniform(rows, n, seed=0):
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def watched(model):
    """The rows and slots with which a model is called from now on, the prompts' first."""
    seen, forward = [], model.forward

    def record(ids, pos, cache, slots=None):
        seen.append((len(ids), slots or cache[0][0].size(2)))
        return forward(ids, pos, cache, slots=slots)
    model.forward = record
    return seen


def ending(model, at, prompts, group, longest):
    """A Batch whose row i samples the end token at its turn at[i]: the model finds it as likely as another one."""
    model.head = lambda h: torch.full((len(h), 257), -float("inf")).index_fill(1, torch.tensor([9, 256]), 0.0)
    u = torch.where(torch.arange(longest) == torch.tensor(at)[:, None], 0.9, 0.1).double()
    return sample(model, prompts, group, [longest] * len(prompts), 1.0, {256}, u)


@pytest.mark.parametrize("limits", [[20] * 3, [5, 11, 8], [1, 1, 12], [40, 3, 1], [3, 1, 40]])
def test_the_same_as_the_plain_cache(limits):
    """Rows that have ended, or are at their limit, are computed on for a while: that changes nothing. Those that stay may be
    the first or the last."""
    longest = max(len(p) + n for p, n in zip(PROMPTS, limits))
    # No room for the longest prompt with the largest limit. At a scale of 4 a CPU's rounding comes near the bound.
    model = tiny_model(block_size=longest, scale=2.0)
    stop = STOP if max(limits) < 40 else {256}      # else no row is left at turn 16, when they are looked at
    for u in (uniform(24, max(limits)), None):
        model.kv_cache = "plain"
        plain = sample(model, PROMPTS, 8, limits, 0.7, stop, u)
        b = sample(static(model), PROMPTS, 8, limits, 0.7, stop, u)
        for name in ("ids", "mask", "finished", "start"):
            assert torch.equal(getattr(b, name), getattr(plain, name)), name
        torch.testing.assert_close(b.logp, plain.logp, rtol=0, atol=2e-5)
        torch.testing.assert_close(b.logp, token_logps(model, b.ids, b.mask, 0.7)[0], rtol=0, atol=2e-5)


def test_rows_leave_once_half_of_them_have_ended_and_are_looked_at_every_16_tokens():
    """Of 24 rows, so 32 are computed, 4 end at turn 3 and 8 more at 20: at turn 32 there are at most 16."""
    model = static(tiny_model(block_size=128))
    seen = watched(model)
    at = [3] * 4 + [20] * 8 + [40] * 12
    b = ending(model, at, [[1, 2], [3]], 12, 60)
    assert b.mask.sum(1).tolist() == [n + 1 for n in at] and b.finished.all()
    assert seen[0] == (2, 2)                            # the prompts, once for a group
    assert seen[1:] == [(32, 64)] * 31 + [(16, 64)] * 16            # and at turn 48 none is left
    assert b.ids.size(1) == 1 + 41


def test_slots_are_multiples_of_64():
    model = static(tiny_model(block_size=192))
    seen = watched(model)
    ending(model, [130], [[5] * 60], 1, 132)
    assert [slots for _, slots in seen[1:]] == [64] * 4 + [128] * 64 + [192] * 63
    seen.clear()
    ending(model, [3], [[5] * 60], 1, 132)              # the next rollout begins with few again
    assert [slots for _, slots in seen[1:]] == [64] * 4 + [128] * 11
    assert [up(n, 64) for n in (1, 64, 65)] == [64, 64, 128]
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 512, 513)] == [2, 2, 4, 4, 8, 512, 1024]


def test_slots_are_those_of_the_longest_prompt_and_not_beyond_the_last_token():
    """Wherever it stands among the others; a short one's rows may go on for longer."""
    model, prompts, limits = tiny_model(block_size=100, n_layer=1), [[5, 6], [5] * 80, [7]], [50, 20, 30]
    want = sample(model, prompts, 1, limits, 1.0, set(), uniform(3, 50))
    seen = watched(static(model))
    b = sample(model, prompts, 1, limits, 1.0, set(), uniform(3, 50))
    assert seen == [(3, 80)] + [(4, 128)] * 31 + [(2, 128)] * 18 and max(map(len, prompts)) + max(limits) > 128
    assert_same(b, want)


def test_a_row_that_is_alone_is_computed_beside_another_one():
    """Compilation treats sizes of 1 apart: the layers and the head would be traced anew."""
    model = static(tiny_model())
    sizes, probs, seen = [], model.probs, watched(model)
    model.probs = lambda h: (sizes.append(len(h)), probs(h))[1]
    b = sample(model, PROMPTS[:1], 1, [20], 1.0, {256}, uniform(1, 20))
    assert b.mask.sum() == 20 and sizes[1:] == [2] * 19 and {rows for rows, _ in seen[1:]} == {2}


@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_that_have_ended_are_not_computed_to_the_limit(rows):
    """No power of two is smaller, and yet they leave at turn 16: an answer of 4 tokens has a limit of a thousand."""
    model = static(tiny_model(block_size=128))
    seen = watched(model)
    b = ending(model, [3] * rows, [[1, 2]], rows, 60)
    assert b.mask.sum(1).tolist() == [4] * rows and len(seen) == 16


def test_a_step_reads_the_slots_in_use_alone():
    """The Memory may be much longer, for other rollouts: what it holds there is not even looked at."""
    model = static(tiny_model(block_size=256))
    want = sample(model, PROMPTS, 8, [20] * 3, 1.0, STOP, uniform(24, 20))
    memory = caches.memory_of(model, 32, 256)
    for x in (x for layer in memory.cache for x in layer):
        x[:, :, 64:] = float("nan")
    b = sample(model, PROMPTS, 8, [20] * 3, 1.0, STOP, uniform(24, 20))
    assert caches.MEMORY[model] is memory and torch.equal(b.ids, want.ids) and torch.equal(b.logp, want.logp)


def test_the_memory_is_kept_for_the_next_rollout_and_only_grows():
    """A CUDA graph works on fixed addresses. What an earlier rollout left in it does not matter."""
    model, other = static(tiny_model(block_size=128)), static(tiny_model())

    def size():
        memory = caches.MEMORY[model]
        assert all(x.shape == (memory.rows, 2, memory.slots + 1, 8) and x.dtype == memory.dtype
                   for kv in memory.cache for x in kv)
        return memory.rows, memory.slots
    sample(model, PROMPTS, 8, [20] * 3, 1.0, STOP, uniform(24, 20))
    first = caches.MEMORY[model]
    assert size() == (32, 64) and other not in caches.MEMORY and first.pool is None
    for x in (x for layer in first.cache for x in layer):
        x.fill_(100.0)
    b = sample(model, PROMPTS[:2], 4, [30, 30], 1.0, STOP, uniform(8, 30))
    assert caches.MEMORY[model] is first
    model.kv_cache = "plain"
    assert torch.equal(b.ids, sample(model, PROMPTS[:2], 4, [30, 30], 1.0, STOP, uniform(8, 30)).ids)
    static(model)
    for group, max_new, found in [(11, 5, (64, 64)), (8, 5, None), (8, 90, (64, 128)), (11, 90, None), (1, 5, None)]:
        before = caches.MEMORY[model]
        sample(model, PROMPTS, group, [max_new] * 3, 1.0, STOP, uniform(3 * group, max_new))
        assert size() == (found or (before.rows, before.slots)) and (caches.MEMORY[model] is before) is (found is None)
    assert copy.deepcopy(model) not in caches.MEMORY
    model.amp = torch.bfloat16
    sample(model, PROMPTS, 8, [20] * 3, 1.0, STOP, uniform(24, 20))
    assert size() == (32, 64) and caches.MEMORY[model].dtype == torch.bfloat16
    here = len(caches.MEMORY)
    caches.forget(model)
    caches.forget(other)                            # it has none
    assert len(caches.MEMORY) == here - 1 and model not in caches.MEMORY


def test_no_two_memories_of_a_model_and_none_without_one(monkeypatch):
    """Each is as large as all keys and values: the old one is freed before there is a new one, and the last one with its
    model."""
    model, alive = static(tiny_model(block_size=128)), []

    class Memory(caches.Memory):
        def __init__(self, *given):
            assert all(memory() is None for memory in alive)
            super().__init__(*given)
            alive.append(weakref.ref(self))
    monkeypatch.setattr(caches, "Memory", Memory)
    for max_new in (20, 20, 90):
        sample(model, PROMPTS, 8, [max_new] * 3, 1.0, STOP, uniform(24, max_new))
    assert [memory() is None for memory in alive] == [True, False] and caches.MEMORY[model].steps
    del model
    gc.collect()
    assert alive[1]() is None


@pytest.mark.parametrize("flag, cuda, found", [
    ("auto", False, "shared"), ("static", False, "static"), ("auto", True, "static"), ("shared", True, "shared"), ("plain", True, "plain")])
def test_the_flag_chooses(flag, cuda, found, monkeypatch):
    cfg = make_config(task="arithmetic", cache=flag, device="cpu")
    monkeypatch.setattr(dist, "device_of", lambda cfg: torch.device("cuda" if cuda else "cpu"))
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    assert pretrained.to_device(tiny_model(), cfg).kv_cache == found and found in caches.CACHES
