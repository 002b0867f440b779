"""What torch.compile makes of a run: few graphs, for all lengths and models."""
import copy
import functools

import pytest
import torch
from conftest import shared_logps, tiny_model
from test_caches import PROMPTS, STOP, assert_same, static, uniform

import grpo
from data.tokenizer import byte_encoding
from grpo import Config, sample
from model import token_logps
from run import pretrained
from run.device import compile_all

pytestmark = pytest.mark.slow
ON = Config(compile=True)


@pytest.fixture
def compiles(monkeypatch):
    """Lets torch.compile have a backend; the counts of what it does from now on."""
    def with_backend(backend):
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return torch._dynamo.utils.counters
    return with_backend


def test_compiled_layers_have_few_graphs(compiles):
    """24 layers have the same ones, for prompts, for a token, for training passes with and without
    a gradient; three are of the head. All compute what they did."""
    counters = compiles("aot_eager")
    plain = tiny_model(scale=2.0, n_layer=24, block_size=128)
    model = static(copy.deepcopy(plain))
    compile_all(ON, model)
    for prompts, group, longest in ((PROMPTS[:2], 4, 70), (PROMPTS, 8, 12), (PROMPTS, 11, 20)):
        u = uniform(len(prompts) * group, longest)
        stop = {256} if longest == 70 else STOP
        given = prompts, group, [longest] * len(prompts), 0.5, stop, u
        want, b = sample(plain, *given), sample(model, *given)
        assert_same(b, want)
        with torch.no_grad():
            logp, _ = shared_logps(model, b.ids, b.mask, 0.5)
        torch.testing.assert_close(logp, b.logp, rtol=0, atol=1e-4)
        shared_logps(model, b.ids, b.mask, 0.5)[0].sum().backward()
        token_logps(plain, b.ids, b.mask, 0.5)[0].sum().backward()
    grads = (gpt.layers[5].mlp.up_proj.weight.grad for gpt in (model, plain))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    assert not counters["graph_break"]
    assert 2 + 3 <= counters["stats"]["unique_graphs"] <= 4 + 3, counters


def test_a_run_of_ragged_steps_compiles_four_graphs_of_a_layer(tmp_path, monkeypatch, compiles):
    """And three of the head; in bfloat16 too, where policy, reference and sampler share them."""
    counters, lengths, real = compiles("eager"), set(), grpo.train_step

    def train_step(*given):
        batch, stats = real(*given)
        lengths.add((batch.ids.size(1), stats["length"]))
        return batch, stats
    monkeypatch.setattr(grpo, "train_step", train_step)
    pretrained.save(tiny_model(), tmp_path / "start", byte_encoding().files)
    grpo.train(grpo.make_config(
        task="arithmetic", difficulty=1, init=str(tmp_path / "start"), out=str(tmp_path / "run"),
        compile=True, dtype="bfloat16", lr=0.01, prompts=4, group=4, max_new=24,
        steps=6, held_out=8, samples=1))
    assert len(lengths) > 2
    assert counters["stats"]["unique_graphs"] == 4 + 3 and not counters["graph_break"]
