"""The static cache: the shapes in which it computes, and the memory that it keeps."""
import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model

from grpo import Config, new_agent, sample
from run import caches, dist, pretrained

PROMPTS = [[49, 50, 61], [51], [52, 53, 54, 55, 61, 10]]
STOP = set(range(0, 257, 9))        # many: rows end all the time
FAMILIES = {"llama": {}, "qwen2": dict(bias="qkv"), "qwen3": dict(qk_norm=True, head_size=16),
            "gpt2": dict(positions="learned", norm="layer", mlp="gelu", bias="all", n_kv_head=4)}


def assert_same(b, want, off=1e-4, share=0.9):
    """The same tokens, in a share of the rows to the end, in the others until rounding decides one;
    with the same log-probabilities."""
    names = "ids mask finished start logp".split()
    b, want = (SimpleNamespace(**{x: getattr(of, x).cpu() for x in names}) for of in (b, want))
    T = min(b.ids.size(1), want.ids.size(1))
    same = (b.ids[:, :T] == want.ids[:, :T]).cumprod(1).bool() & b.mask[:, :T] & want.mask[:, :T]
    alike = same.sum(1) == b.mask.sum(1).maximum(want.mask.sum(1))
    assert alike.float().mean() >= share and torch.equal(b.start, want.start)
    assert torch.equal(b.finished[alike], want.finished[alike])
    assert (b.logp[:, :T] - want.logp[:, :T])[same].abs().max() < off


def static(model):
    model.kv_cache = "static"
    return model


def uniform(rows, n, seed=0):
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def watched(model):
    """The rows and slots with which a model is called from now on."""
    seen, forward = [], model.forward

    def record(ids, cache=None, layout=None):
        seen.append((len(ids), layout.slots if layout else cache[0][0].size(2)))
        return forward(ids, cache, layout)
    model.forward = record
    return seen


def ending(model, at, prompts, group, longest):
    """A Batch whose row i ends at its turn at[i]; the shapes of prompts, and of tokens."""
    logits = torch.full((257,), -float("inf"))
    logits[[9, 256]] = 0.0                      # as likely: u chooses between them
    seen = watched(model)
    model.head = lambda h: logits.expand(len(h), -1)
    u = torch.where(torch.arange(longest) == torch.tensor(at)[:, None], 0.9, 0.1).double()
    b = sample(model, prompts, group, [longest] * len(prompts), 1.0, {256}, u)
    assert b.mask.sum(1).tolist() == [min(n + 1, longest) for n in at]
    return b, seen[0], seen[1:]


@pytest.mark.parametrize("at, prompts, longest, of_prompts, of_tokens", [
    # Of 24 rows 32 are computed; at turn 32 at most 16 are left, at turn 48 none.
    ([3] * 4 + [20] * 8 + [40] * 12, [[1, 2], [3]], 60, (2, 2), [(32, 64)] * 31 + [(16, 64)] * 16),
    ([130], [[5] * 60], 131, (1, 60), [(2, 64)] * 4 + [(2, 128)] * 64 + [(2, 192)] * 62),
    ([3], [[5] * 60], 131, (1, 60), [(2, 64)] * 4 + [(2, 128)] * 11),
    ([3] * 2, [[1, 2]], 60, (1, 2), [(2, 64)] * 15)])   # no power of two is smaller than two
def test_rows_are_powers_of_two_and_slots_multiples_of_64(
        at, prompts, longest, of_prompts, of_tokens):
    """And every 16 tokens rows that have ended leave, if that halves them."""
    model = static(tiny_model(block_size=192))
    for _ in range(2):                  # the next rollout begins with few slots again
        _, first, others = ending(model, at, prompts, len(at) // len(prompts), longest)
        assert first == of_prompts and others == of_tokens


def test_no_slots_beyond_the_last_token_of_a_row():
    """A short prompt's rows may go on for longer. The head, too, has two rows at least."""
    model, sizes = static(tiny_model(block_size=100, n_layer=1)), []
    probs, seen = model.probs, watched(model)
    model.probs = lambda h: (sizes.append(len(h)), probs(h))[1]
    sample(model, [[5, 6], [5] * 80, [7]], 1, [50, 20, 30], 1.0, set(), uniform(3, 50))
    assert seen == [(3, 80)] + [(4, 128)] * 31 + [(2, 128)] * 18
    assert min(sizes) == 2


def test_a_step_reads_the_slots_in_use_alone():
    """What a longer Memory holds beyond them is not even looked at."""
    model, rollout = static(tiny_model(block_size=256)), (PROMPTS, 8, [20] * 3, 1.0, STOP)
    want = sample(model, *rollout, uniform(24, 20))
    memory = caches.memory_of(model, 32, 256)
    for x in sum(memory.cache, []):
        x[:, :, 64:] = float("nan")
    b = sample(model, *rollout, uniform(24, 20))
    assert_same(b, want)


@torch.no_grad()
def test_the_memory_is_kept_for_the_next_rollout_and_only_grows():
    """A CUDA graph has fixed addresses. What an earlier rollout left there does not matter."""
    model = static(tiny_model(block_size=128))
    plain = copy.deepcopy(model)
    plain.kv_cache = "plain"
    sizes, memories = [], []
    for group, n in ((8, 20), (2, 30), (11, 5), (8, 5), (8, 90), (11, 90), (1, 5)):
        given = (PROMPTS, group, [n] * 3, 1.0, STOP, uniform(3 * group, n))
        assert_same(sample(model, *given), sample(plain, *given))
        memory = caches.MEMORY[model]
        for x in sum(memory.cache, []):
            assert x.shape == (memory.rows, 2, memory.slots + 1, 8)
            x.fill_(100.0)
        sizes.append((memory.rows, memory.slots))
        memories.append(memory)
    assert sizes == [(32, 64)] * 2 + [(64, 64)] * 2 + [(64, 128)] * 3
    assert len({*map(id, memories)}) == 3
    assert plain not in caches.MEMORY and copy.deepcopy(model) not in caches.MEMORY
    plain.norm.weight.mul_(1.1)
    at = model.norm.weight.data_ptr()
    dist.sync_sampler(SimpleNamespace(policy=plain, sampler=model))
    assert model.norm.weight.data_ptr() == at
    assert_same(sample(model, *given), sample(plain, *given))
    model.amp = torch.bfloat16
    sample(model, *given)
    assert caches.MEMORY[model].dtype == torch.bfloat16


def test_no_two_memories_of_a_model_and_none_without_one(monkeypatch):
    """The old one is freed before there is a new one, the last one with its model."""
    model, alive = static(tiny_model(block_size=128)), []

    class Memory(caches.Memory):
        def __init__(self, *given):
            assert not [memory for memory in alive if memory() is not None]
            super().__init__(*given)
            alive.append(weakref.ref(self))
    monkeypatch.setattr(caches, "Memory", Memory)
    for n in (20, 20, 90):
        sample(model, PROMPTS, 8, [n] * 3, 1.0, STOP, uniform(24, n))
    assert len(alive) == 2
    del model
    gc.collect()
    assert alive[1]() is None


@pytest.mark.parametrize("flag, cuda, found", [
    ("auto", False, "shared"), ("auto", True, "static"), ("static", False, "static"),
    ("shared", True, "shared"), ("plain", True, "plain")])
def test_the_flag_chooses(flag, cuda, found, monkeypatch):
    """In all models of a run."""
    cfg = Config(cache=flag, shared_prefixes=cuda, baseline="value", critic="separate")
    device = torch.device("cuda" if cuda else "cpu")
    for module in "device", "pretrained":
        monkeypatch.setattr(f"run.{module}.device_of", lambda cfg: device)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    monkeypatch.setattr(pretrained, "most_logits", lambda device: 1)
    agent = new_agent(cfg, None, None, pretrained.to_device(tiny_model(), cfg))
    models = agent.policy, agent.ref, agent.critic.trunk
    assert {(model.kv_cache, model.shared_prefixes) for model in models} == {(found, cuda)}
