"""The static cache on CUDA, where the model's step is recorded as a graph for each shape: on a
pretended device, whose graphs compute nothing while they record."""
import copy

import pretend
import pytest
import torch
from conftest import tiny_model
from test_caches import FAMILIES, PROMPTS, STOP, assert_same, static, uniform

import model
from grpo import sample
from run import caches
from run.pretrained import frozen

NEVER = {257}       # no token
SHORT = (PROMPTS, 8, 20, STOP)
# Prompts, completions of each, their tokens, what ends them: two need the largest Memory.
FEW = set(range(3, 257, 36))
ROLLOUTS = [(PROMPTS, 8, 140, FEW), (PROMPTS[:1], 4, 130, {7}), (PROMPTS, 8, 140, FEW),
            (PROMPTS[1:], 8, 30, STOP)]


@pytest.fixture
def device():
    with pretend.cuda() as found:
        yield found


def sampled(gpt, rollout):
    prompts, group, longest, stop = rollout
    u = uniform(len(prompts) * group, longest)
    return sample(gpt, prompts, group, [longest] * len(prompts), 1.0, stop, u)


def graphs(gpt):
    """The graphs that a model has, by rows and slots."""
    return {shape: step.graph for shape, step in caches.MEMORY[gpt].steps.items()}


def eager(step, gpt, token, pos):
    """A Step without a graph."""
    step.ids[:len(token), 0], step.pos[:len(token), 0] = token, pos
    return caches.decode(gpt, step.ids, step.pos, step.cache, step.slots)[:len(token)]


@pytest.mark.slow
@pytest.mark.parametrize("family, dtype", [
    ("gpt2", torch.float32), ("qwen3", torch.float32), ("llama", torch.bfloat16)])
def test_rollouts_of_changing_sizes(device, monkeypatch, family, dtype):
    """As without graphs, to the bit. The third rollout is the first again, and records nothing."""
    gpt = tiny_model(block_size=256, **FAMILIES[family]).to(device)
    if dtype == torch.bfloat16:
        gpt.amp = dtype
        gpt = frozen(gpt)
    static(gpt)
    without = copy.deepcopy(gpt)
    found, shapes = [], []
    for rollout in ROLLOUTS:
        found.append(sampled(gpt, rollout))
        shapes.append(graphs(gpt))
    rows, slots = map(set, zip(*shapes[0]))
    assert caches.MEMORY[gpt].dtype == dtype and len(rows) > 1 and len(slots) > 1
    for old, new in zip(shapes, shapes[1:]):            # a graph is recorded once
        assert all(new[shape] is old[shape] for shape in old)
    assert all(shapes[3].values())
    assert len(shapes[0]) < len(shapes[1]) == len(shapes[2])
    monkeypatch.setattr(caches.Step, "__call__", eager)
    for b, rollout in zip(found, ROLLOUTS, strict=True):
        want = sampled(without, rollout)
        assert_same(b, want)
        assert torch.equal(b.logp.cpu(), want.logp.cpu())
    lengths = found[0].mask.sum(1)
    assert lengths.unique().numel() > 5 and lengths.max() > 64
    assert not any(graphs(without).values())


def test_a_model_that_waits_inside_cannot_be_recorded(device, monkeypatch):
    """And then nothing is left of the attempt."""
    gpt, forward = static(tiny_model().to(device)), model.MLP.forward
    want = sampled(tiny_model(), SHORT)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="capturing"):
        patch.setattr(model.MLP, "forward",
                      lambda self, x: forward(self, x) * float(x.sum().item() < 9e9))
        sampled(gpt, SHORT)
    assert not torch.cuda.is_current_stream_capturing()
    assert_same(sampled(gpt, SHORT), want)


def test_a_token_is_one_launch_of_a_graph_and_few_others(device):
    """And the host waits once in 16 tokens: counted between rollouts of 20 tokens and of 52."""
    found, tapes = [], []
    for n_layer in (1, 3):
        gpt = tiny_model(n_layer=n_layer, **FAMILIES["qwen2"]).to(device)
        gpt.amp = torch.bfloat16
        gpt = static(frozen(gpt))
        for longest in (52, 20, 52):                # the first one records
            with pretend.counted() as seen:
                b = sampled(gpt, (PROMPTS, 8, longest, NEVER))
            assert b.mask.sum(1).tolist() == [longest] * 24
            found.append(seen)
        recorded, = graphs(gpt).values()
        tapes.append(len(recorded.tape))
    short, long = found[-2:]
    assert (short.launches["replay"], long.launches["replay"]) == (19, 51)   # the last is not read
    assert long.launches.total() - short.launches.total() - 32 <= 45 * 32
    assert 1 <= long.waits.total() - short.waits.total() <= 2
    assert long.waits.total() <= 52 // 16 + 2 and long.copies == short.copies
    assert long.copies.total() <= 5         # prompts, lengths, room, stop tokens, random numbers
    assert tapes[0] <= 51 and tapes[1] <= 125
