"""The static cache on CUDA, where the model's step is recorded as a graph for each shape: on a pretended device, whose
graphs compute nothing while they record (see pretend.py)."""
import copy
import gc
import sys
import weakref
from types import SimpleNamespace

import pretend
import pytest
import torch
from conftest import tiny_model
from test_caches import FAMILIES, PROMPTS, STOP, assert_same, static, uniform

import model
from data import UserError
from grpo import sample
from run import caches, dist
from run.pretrained import frozen

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pretend.py looks for names as they are on Unix")
NEVER = {257}       # no token
# Prompts, completions of each, their tokens, what ends them: the first and the third need the largest Memory.
FEW = set(range(3, 257, 36))
ROLLOUTS = [(PROMPTS, 8, 140, FEW), (PROMPTS[:1], 4, 130, {7}), (PROMPTS, 8, 140, FEW), (PROMPTS[1:], 8, 30, STOP)]


@pytest.fixture
def device():
    with pretend.cuda() as found:
        yield found


def sampled(gpt, rollout, seed=0):
    prompts, group, longest, stop = rollout
    return sample(gpt, prompts, group, [longest] * len(prompts), 1.0, stop, uniform(len(prompts) * group, longest, seed))


def graphs(gpt):
    """The graphs that a model has, by rows and slots."""
    return {shape: step.graph for shape, step in caches.MEMORY[gpt].steps.items()}


def eager(step, gpt, token, pos):
    """A Step without a graph. It reads as many slots: with more, sums may round otherwise."""
    step.ids[:len(token), 0], step.pos[:len(token), 0] = token, pos
    return gpt(step.ids, step.pos, step.cache, slots=step.slots)[:len(token), 0]


@pytest.mark.slow
@pytest.mark.parametrize("family, dtype", [("gpt2", torch.float32), ("qwen3", torch.float32),
                                           ("llama", torch.bfloat16), ("qwen2", torch.bfloat16)])
def test_rollouts_of_changing_sizes(device, monkeypatch, family, dtype):
    """As without graphs, to the bit: over so many tokens the plain cache, which rounds otherwise, may draw another one. The
    third rollout is the first once more, and records nothing."""
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
    assert caches.MEMORY[gpt].dtype == dtype and len({n for n, _ in shapes[0]}) > 1 and len({n for _, n in shapes[0]}) > 1
    for before, after in zip(shapes, shapes[1:]):       # a graph is recorded once
        assert all(after[shape] is before[shape] for shape in before)
    assert all(shapes[3].values()) and len(shapes[1]) > len(shapes[0]) and len(shapes[2]) == len(shapes[1])
    with monkeypatch.context() as patch:
        patch.setattr(caches.Step, "__call__", eager)
        for b, rollout in zip(found, ROLLOUTS, strict=True):
            want = sampled(without, rollout)
            assert_same(b, want)
            assert torch.equal(b.logp.cpu(), want.logp.cpu())
    assert found[0].mask.sum(1).unique().numel() > 5 and found[0].mask.sum(1).max() > 64
    assert not any(graphs(without).values())


def test_weights_that_change_in_place_are_seen(device):
    """As an update changes them: the copy of the policy that samples keeps its addresses."""
    policy = tiny_model()
    sampler = static(frozen(copy.deepcopy(policy).to(device)))
    rollout = (PROMPTS, 8, 20, STOP)
    before = sampled(sampler, rollout)
    recorded = graphs(sampler)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn_like(p), alpha=0.3 * p.std().item())
    dist.copy_weights(sampler, copy.deepcopy(policy).to(device))
    b = sampled(sampler, rollout)
    assert graphs(sampler)[32, 64] is recorded[32, 64]
    assert_same(b, sampled(policy, rollout))
    assert b.ids.shape != before.ids.shape or not torch.equal(b.ids, before.ids)


def test_weights_with_new_addresses_are_recorded_anew(device, monkeypatch):
    """A sharded run frees the weights of its sampler for the update, and with them the graphs, which hold the old ones."""
    policy, rollout = tiny_model(), (PROMPTS, 8, 20, STOP)
    on_device = copy.deepcopy(policy).to(device)
    agent = SimpleNamespace(policy=on_device, sampler=static(copy.deepcopy(on_device)))
    with dist.updating(agent):                         # not sharded: nothing is freed
        assert all(p.numel() for p in agent.sampler.parameters())
    sampled(agent.sampler, rollout)
    before = graphs(agent.sampler)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_sharded", lambda x: x is agent.policy)
        patch.setattr(dist, "parameters", lambda module: dict(module.named_parameters()))
        with dist.updating(agent):
            assert agent.sampler not in caches.MEMORY and not any(p.numel() for p in agent.sampler.parameters())
            with torch.no_grad():
                for p, q in zip(policy.parameters(), agent.policy.parameters(), strict=True):
                    q.copy_(p.mul_(1.1))
    assert_same(sampled(agent.sampler, rollout), sampled(policy, rollout))
    assert all(graph not in before.values() for graph in graphs(agent.sampler).values())


def test_graphs_go_with_their_memory_and_with_their_model(device):
    """A larger rollout needs a larger Memory; a smaller one does not, and finds its graphs again."""
    plain = tiny_model(block_size=128)
    gpt = static(copy.deepcopy(plain).to(device))
    small, large = (PROMPTS, 4, 12, NEVER), (PROMPTS, 8, 100, NEVER)

    def same(rollout):
        assert_same(sampled(gpt, rollout), sampled(plain, rollout))
        return caches.MEMORY[gpt], graphs(gpt)
    first, old = same(small)
    assert [*old] == [(16, 64)]
    second, grown = same(large)
    assert (second.rows, second.slots) == (32, 128) and [*grown] == [(32, 64), (32, 128)]
    third, both = same(small)
    assert third is second and [*both] == [(32, 64), (32, 128), (16, 64)] and both[16, 64] is not old[16, 64]
    for rollout in (large, small):
        assert same(rollout) == (second, both)
    assert copy.deepcopy(gpt) not in caches.MEMORY
    memories = weakref.ref(first), weakref.ref(second)
    del first, second, third
    gc.collect()
    assert [memory() is not None for memory in memories] == [False, True]
    del gpt
    gc.collect()
    assert memories[1]() is None


def test_a_model_that_waits_inside_is_refused(device, monkeypatch):
    """In one line that says what to do about it."""
    gpt, forward = static(tiny_model().to(device)), model.MLP.forward
    monkeypatch.setattr(model.MLP, "forward", lambda self, x: forward(self, x) * (1.0 if x.sum().item() < 9e9 else 0.0))
    with pytest.raises(UserError, match="--cache shared") as caught:
        sampled(gpt, ROLLOUTS[3])
    assert len(str(caught.value).splitlines()) == 1 and "test_graphs.py:" in str(caught.value)
    gpt.kv_cache = "plain"
    want = sampled(gpt, ROLLOUTS[3])
    monkeypatch.undo()
    assert_same(sampled(static(gpt), ROLLOUTS[3]), want)            # and then nothing is left of the attempt


def test_another_error_while_a_graph_is_recorded_comes_through(device, monkeypatch):
    plain, forward = tiny_model(), model.MLP.forward
    gpt = static(copy.deepcopy(plain).to(device))

    def fails(self, x):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("shapes that do not fit")
        return forward(self, x)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="^shapes that do not fit$"):
        patch.setattr(model.MLP, "forward", fails)
        sampled(gpt, ROLLOUTS[3])
    assert not torch.cuda.is_current_stream_capturing()
    assert_same(sampled(gpt, ROLLOUTS[3]), sampled(plain, ROLLOUTS[3]))


def tape(device, **shape):
    """The number of launches in the graph of a step of a model of the Qwen2 family, in bfloat16."""
    gpt = tiny_model(**FAMILIES["qwen2"], **shape).to(device)
    gpt.amp = torch.bfloat16
    gpt = static(frozen(gpt))
    sampled(gpt, (PROMPTS, 8, 4, NEVER))
    recorded, = graphs(gpt).values()
    return len(recorded.tape)


def test_a_step_has_few_launches(device):
    """Each takes the GPU 2 microseconds, however little it computes."""
    one, three = tape(device, n_layer=1), tape(device, n_layer=3)
    a_layer = (three - one) / 2
    assert 15 < a_layer <= 28 and 0 < one - a_layer <= 10


def test_a_token_is_one_launch_of_a_graph_and_few_others(device):
    """And the host waits once in 16 tokens: counted between a rollout of 20 tokens and one of 52."""
    gpt = tiny_model(n_layer=3, **FAMILIES["qwen2"]).to(device)
    gpt.amp = torch.bfloat16
    gpt, found = static(frozen(gpt)), []
    for longest in (52, 20, 52):                # the first one records
        with pretend.counted() as seen:
            b = sampled(gpt, (PROMPTS, 8, longest, NEVER))
        assert b.mask.sum(1).tolist() == [longest] * 24
        found.append(seen)
    assert len(graphs(gpt)) == 1
    _, short, long = found
    replays = [sum(n for at, n in seen.launches.items() if at.endswith("replay")) for seen in (short, long)]
    assert replays == [19, 51]                  # the last token is not read
    assert long.launches.total() - short.launches.total() - 32 <= 45 * 32
    assert 1 <= long.waits.total() - short.waits.total() <= 2 and long.copies == short.copies


def test_no_graph_for_slots_that_no_row_has(device):
    """Here the longest prompt has the smallest limit: counted from its end, the other row would need more than there are."""
    gpt = static(tiny_model(block_size=128).to(device))
    b = sample(gpt, [[5] * 50, [6]], 2, [1, 60], 1.0, NEVER, uniform(4, 60))
    assert b.mask.sum(1).tolist() == [1, 1, 60, 60] and {slots for _, slots in graphs(gpt)} == {64}
