"""What torch.compile makes of a run: few graphs, for all lengths and all models, and no copies."""
import copy
import functools
import re
import shutil
import time

import pytest
import torch
from conftest import tiny_model
from test_caches import PROMPTS, STOP, static, uniform

import grpo
from data.tokenizer import byte_encoding
from grpo import Config, make_config, sample
from model import token_logps
from run import caches, config, dist, passes, pretrained


@pytest.mark.slow
def test_compiled_layers_have_few_graphs(monkeypatch):
    """24 layers have the same ones: for prompts, for a token, for a training pass with and without a gradient; and
    three of the head, for sampling and these passes. To trace them takes seconds; the decoding step as a whole took
    minutes."""
    from torch._dynamo.utils import counters
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    plain = tiny_model(scale=2.0, n_layer=24, block_size=128)
    model = static(copy.deepcopy(plain))
    dist.compile_all(make_config(task="arithmetic", compile=True, device="cpu"), model)
    spent = 0.0
    for seed, (prompts, group, longest) in enumerate([(PROMPTS[:2], 4, 70), (PROMPTS, 8, 12), (PROMPTS, 11, 20)]):
        u = uniform(len(prompts) * group, longest, seed)
        stop = {256} if longest == 70 else STOP
        room = [longest] * len(prompts)
        want = sample(plain, prompts, group, room, 0.5, stop, u)
        token_logps(plain, want.ids, want.mask, 0.5)[0].sum().backward()
        began = time.process_time()
        b = sample(model, prompts, group, room, 0.5, stop, u)
        assert torch.equal(b.ids, want.ids) and torch.equal(b.finished, want.finished)
        torch.testing.assert_close(b.logp, want.logp, rtol=0, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(passes.token_logps(model, b.ids, b.mask, 0.5)[0], b.logp, rtol=0, atol=1e-4)
        passes.token_logps(model, b.ids, b.mask, 0.5)[0].sum().backward()
        spent += time.process_time() - began
        assert b.mask.sum(1).unique().numel() > (1 if longest == 70 else 5)
    assert caches.MEMORY[model].slots == 128 and {slots for _, slots in caches.MEMORY[model].steps} == {64}
    torch.testing.assert_close(model.layers[5].mlp.up_proj.weight.grad, plain.layers[5].mlp.up_proj.weight.grad,
                               rtol=1e-3, atol=1e-3)
    assert not counters["graph_break"] and 2 + 3 <= counters["stats"]["unique_graphs"] <= 4 + 3, counters
    assert spent < 30



@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
def test_a_compiled_layer_does_not_copy_the_cache():
    """It writes to it in place. Of a cache that is not contiguous, as one cut to the slots in use, Inductor made a copy of
    the keys and one of the values for every token. The Memory here is longer than the step, in rows and slots."""
    from torch._inductor.utils import run_and_get_code
    plain = tiny_model(n_layer=1, block_size=128)
    model, token, pos = copy.deepcopy(plain), torch.arange(8), torch.arange(8) % 3
    dist.compile_all(make_config(task="arithmetic", compile=True, device="cpu"), model)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        want = caches.Memory(plain, 16, 128).step(8, 64)(plain, token, pos)
        step = caches.Memory(model, 16, 128).step(8, 64)
        have, (code,) = run_and_get_code(step, model, token, pos)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    of_cache = r"\((?:s\d+, ){3}8\)"           # rows, heads, slots, of 8 numbers
    assert len(re.findall(r"assert_size_stride\(arg\w+, " + of_cache, code)) == 2, code
    assert not re.findall(r"= empty_strided_cpu\(" + of_cache, code), code



@pytest.mark.slow
def test_all_models_of_a_run_share_their_graphs(monkeypatch):
    """Policy, reference and sampler are of one class: four graphs of a layer in all, of which one is a lone prompt's, and
    two of the head, for probabilities and for log-probabilities."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    models = [tiny_model() for _ in range(3)]
    dist.compile_all(Config(compile=True), *models)
    for model in models:
        for prompts in ([[1, 2], [3]], [[1]]):
            u = torch.rand(len(prompts) ** 2 + 2, 9)
            sample(model, prompts, 1 + len(prompts), [9] * len(prompts), 1.0, set(), u)
        with torch.no_grad():
            passes.token_logps(model, torch.randint(0, 256, (3, 9)), torch.ones(3, 9, dtype=torch.bool), 1.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4 + 2



@pytest.mark.slow
def test_a_run_of_ragged_steps_compiles_four_graphs_of_a_layer(tmp_path, monkeypatch):
    """Prompts, tokens, a pass without gradients and one with them, and three of the head, for sampling and these passes; in
    bfloat16 too, where the reference and the sampler have the same ones. A prompt or a row that is alone would have more."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    pretrained.save(tiny_model(), tmp_path / "start", byte_encoding().files)
    lengths = []
    real_step = grpo.train_step
    def train_step(*given):
        batch, stats = real_step(*given)
        lengths.append((batch.ids.size(1), stats["length"]))
        return batch, stats
    monkeypatch.setattr(grpo, "train_step", train_step)
    grpo.main(["--task", "arithmetic", "--difficulty", "1", "--init", str(tmp_path / "start"), "--warm_steps", "0",
               "--out", str(tmp_path / "run"), "--device", "cpu", "--compile", "--dtype", "bfloat16", "--lr", "0.01",
               "--prompts", "4", "--group", "4", "--max_new", "24", "--steps", "6", "--held_out", "8",
               "--samples", "1"])
    assert len({*lengths}) > 2
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 4 + 3 and not counted["graph_break"]



@pytest.mark.slow
def test_compilations_do_not_grow_with_the_lengths(monkeypatch):
    """Without dynamic shapes every rollout length compiles anew; and the layers share their graphs."""
    torch._dynamo.reset()
    seen = []
    def count(graph, example):
        seen.append(1)
        return graph.forward
    model = tiny_model()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    dist.compile_all(Config(compile=True), model)
    for rows, T in ((3, 9), (4, 11), (5, 17), (8, 23), (6, 31), (7, 40), (9, 13), (2, 22)):
        passes.token_logps(model, torch.randint(0, 256, (rows, T)), torch.ones(rows, T, dtype=torch.bool), 1.0)
    assert 2 <= len(seen) <= 3
