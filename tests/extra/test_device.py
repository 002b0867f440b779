"""The project on a CUDA device that is pretended (see pretend.py): tensors on two devices, and waits for the device."""
import contextlib
import copy
import json
import multiprocessing
import os
import re
import socket
import sys
import traceback
from collections import Counter
from dataclasses import replace

import pretend
import pytest
import torch
from torch import distributed
import torch.nn.functional as F
from conftest import flags, records, tiny_model
from safetensors.torch import load, load_file, save
from torch.utils.checkpoint import checkpoint as recomputed

import grpo
from data.tokenizer import byte_encoding
from model import GPT
from run import caches, checkpoint, dist, passes, preflight, pretrained, report
from run.pretrained import frozen

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pretend.py looks for names as they are on Unix")


@pytest.fixture
def device():
    with pretend.cuda() as found:
        yield found


# ----------------------------------------------------------------------------------- the pretence itself

def adamw(p, step):
    """A step of AdamW, whose count of steps is `step`."""
    p = torch.nn.Parameter(p.clone())
    p.grad = torch.ones_like(p)
    opt = torch.optim.AdamW([p], fused=True)
    opt.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    opt.step()


# c is on the device, h on the CPU, both (4, 3); i are indices on the CPU.
ILLEGAL = {
    "sum": lambda c, h, i: c + h,
    "sum in place": lambda c, h, i: c.add_(h),
    "sum into the CPU": lambda c, h, i: h.add_(c),
    "sum into a number": lambda c, h, i: h.sum().add_(c[0, 0]),
    "product": lambda c, h, i: c @ h.T,
    "condition": lambda c, h, i: torch.where(h > 0, c, 0),
    "choice": lambda c, h, i: torch.where(c > 0, c, h),
    "cat": lambda c, h, i: torch.cat([c, h]),
    "stack of numbers": lambda c, h, i: torch.stack([c[0, 0], h[0, 0]]),
    "gather": lambda c, h, i: c.gather(0, i[:, None]),
    "index_select": lambda c, h, i: c.index_select(0, i),
    "embedding": lambda c, h, i: F.embedding(i, c),
    "index on the device": lambda c, h, i: h[i.to(c.device)],
    "mask on the device": lambda c, h, i: h[c > 0],
    "set from the CPU": lambda c, h, i: c.__setitem__(i, h[:2]),
    "set on the CPU": lambda c, h, i: h.__setitem__(i, c[:2]),
    "masked_fill": lambda c, h, i: c.masked_fill(h > 0, 1.0),
    "masked_scatter": lambda c, h, i: c.masked_scatter(h > 0, c),
    "searchsorted": lambda c, h, i: torch.searchsorted(c[0], h[0]),
    "isin": lambda c, h, i: torch.isin(c, h[0]),
    "three inputs": lambda c, h, i: torch.addcmul(c, c, h[0, 0]),
    "numpy": lambda c, h, i: c.numpy(),
    "a generator": lambda c, h, i: torch.randn(3, device=c.device, generator=torch.Generator()),
    "a generator in place": lambda c, h, i: torch.nn.init.normal_(c, generator=torch.Generator()),
    "attention": lambda c, h, i: F.scaled_dot_product_attention(c[None], h[None], h[None]),
    "a layer left behind": lambda c, h, i: torch.nn.Linear(3, 2)(c),
    "a .grad": lambda c, h, i: setattr(c.requires_grad_(), "grad", h),
    "Adam's steps": lambda c, h, i: adamw(c, step=torch.ones(())),
    "two GPUs": lambda c, h, i: c + h.to("cuda:1"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_cuda_refuses_raises(device, name):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        ILLEGAL[name](torch.ones(4, 3, device=device), torch.ones(4, 3), torch.tensor([0, 1]))
    told = "test_device.py:" in str(caught.value)
    assert told or name in ("numpy", "a .grad"), caught.value


def test_what_cuda_allows_does_not_raise(device):
    """Numbers and indices on the CPU, copies, a device without its index."""
    c = torch.arange(12.0, device="cuda").view(4, 3)
    two, i = torch.tensor(2.0), torch.tensor([0, 2])
    assert c.device == device and c.is_cuda and not c.is_cpu and c.to("cuda") is c and c[0].device == device
    assert (c * two)[1, 1].item() == 8 and (two * c).is_cuda and torch.where(c > 0, c, two).is_cuda
    assert c[i, torch.tensor([1, 0])].tolist() == [1, 6]
    c[i, 0] = torch.tensor(9.0)
    assert c[:, 0].tolist() == [9, 3, 9, 9]
    row = c[1]
    row += 1                                                    # a view writes through
    assert c.cpu()[1].tolist() == [4, 5, 6] and type(c.cpu()) is torch.Tensor
    assert f"{c[0, 0]:.1f}" == "9.0" and int(c[0, 0]) == 9 and c[0, 0] == 9
    c.copy_(torch.zeros(4, 3))
    assert not c.any() and torch.zeros(4, 3).copy_(c).is_cpu and c.nonzero().tolist() == []
    values, where = torch.tensor([3, 1, 3], device=device).unique(return_inverse=True)
    assert values.tolist() == [1, 3] and where.tolist() == [1, 0, 1]
    assert torch.zeros(3, device="cuda:1").device.index == 1
    torch.cuda.set_device("cuda:1")
    assert torch.zeros(3, device="cuda").device.index == 1


def test_numbers_are_those_of_the_cpu():
    found = []
    for x in (torch.randn(5, 6), torch.randn(5, 6) > 0):
        with pretend.cuda() as device:
            for y in (x, x.to(device)):
                ids = torch.tensor([[0, 1], [2, 3]], device=y.device)
                y = y.clone()
                y[ids[0], ids[1]] = y[ids[1], ids[0]]
                y[1] = 1
                y[:2][ids[0] > 0] = 0
                scattered = y.float().masked_scatter(y > 0, y.float().flatten())
                parts = y[y > 0], scattered, y[:2].repeat_interleave(ids[1], 0)
                found.append([part.cpu() for part in (y, *parts, torch.searchsorted(y[0].float(), y[1].float()))])
    for one, two in (found[:2], found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def trained(device, amp):
    """What three steps of a small model make of its weights, and the dtype of its logits."""
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(11, 8), "head": torch.nn.Linear(8, 11)}).to(device)
    opt = torch.optim.AdamW(net.parameters(), 1e-2, fused=True)
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones(4, 1, 6, 6, device=device).tril().bool()
    for _ in range(3):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=amp):
            h = net["embed"](ids)[:, None]
            h = F.scaled_dot_product_attention(h, h, h, is_causal=True) + F.scaled_dot_product_attention(h, h, h, mask)
            logits = net["head"](recomputed(torch.tanh, h[:, 0], use_reentrant=False))
        logp = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        (-logp.mean() * torch.tensor(2.0)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    again = copy.deepcopy(net)
    assert all(p.device == ids.device and isinstance(p, torch.nn.Parameter) for p in again.parameters())
    return load(save({name: x.cpu() for name, x in again.state_dict().items()})), logits.dtype


@pytest.mark.parametrize("amp", [False, True])
def test_a_model_trains_as_on_the_cpu(amp):
    """To the bit in float32. In bfloat16 CUDA rounds elsewhere, and Adam, which moves weights by 3e-2 here, makes more
    of it."""
    one, dtype = trained("cpu", amp)
    with pretend.cuda() as device, pretend.counted() as seen:
        two, dtype_there = trained(device, amp)
    assert dtype == dtype_there == (torch.bfloat16 if amp else torch.float32)
    for name, x in one.items():
        assert torch.allclose(x, two[name], atol=5e-3) if amp else torch.equal(x, two[name])
    assert seen.waits.total() == 3                                      # of state_dict
    assert seen.copies.total() == 4                                     # the weights, the ids
    assert sum(n for at, n in seen.launches.items() if "flash_attention_for_cpu" in at) == 3 * 4


# Programs with the waits and copies that they have, and the launches, of a mask m too.
COUNTS = {
    "item": (lambda c, h, m: c.sum().item(), 1, 0, 1),
    "bool, float, an index": (lambda c, h, m: (bool(c.any()), float(c[0, 0]), [7, 8][m[0, 0]]), 3, 0, 1),
    "a bound of a slice": (lambda c, h, m: c[:, :m.sum()], 1, 0, 1),
    "tolist": (lambda c, h, m: (c.tolist(), c[0, 0].tolist()), 2, 0, 0),
    "cpu": (lambda c, h, m: (c.cpu(), c.to("cpu", non_blocking=True), h.copy_(c)), 2, 0, 0),
    "nonzero": (lambda c, h, m: (m.nonzero(), torch.where(m)), 2, 0, 2),
    "a mask": (lambda c, h, m: (c[m], c[:, m[0]], c.masked_select(m)), 3, 0, 3),
    "a mask, set": (lambda c, h, m: (c.__setitem__(m, 1.0), c.__setitem__(m, c[0, :1])), 1, 0, 2),
    "unique": (lambda c, h, m: (c.unique(), c.unique(dim=1)), 2, 0, 2),
    "repeats": (lambda c, h, m: (c.repeat_interleave(2, 0), c.repeat_interleave(m[:, 0].long(), 0)), 1, 0, 4),
    "repeats of known size": (lambda c, h, m: c.repeat_interleave(m[:, 0].long(), 0, output_size=4), 0, 0, 3),
    "equal": (lambda c, h, m: torch.equal(c, c + 1), 1, 0, 2),
    "isin": (lambda c, h, m: (torch.isin(c, c[0]), torch.isin(c, 1), torch.isin(c[0], c.repeat(9, 1))), 1, 0, 4),
    "a tensor of a list": (lambda c, h, m: (torch.tensor([1, 2], device="cuda"), c.new_tensor([3.0])), 0, 2, 0),
    "to": (lambda c, h, m: (h.to("cuda"), c.to("cuda"), c.copy_(h), h.to("cuda", non_blocking=True)), 0, 3, 0),
    "pinned": (lambda c, h, m: (h.pin_memory().to("cuda", non_blocking=True), h.pin_memory().to("cuda")), 0, 1, 0),
    "indices on the CPU": (lambda c, h, m: (c[torch.tensor([0, 1])], c[[0, 1], [1, 2]]), 0, 3, 2),
    "indices on the device": (
        lambda c, h, m: c.__setitem__((m[:, 0].long(), m[:, 1].long()), c[0, :1].clone()), 0, 0, 4),
    "a number set": (lambda c, h, m: (c.__setitem__(m[0].long(), 1.0), c.__setitem__(0, 1.0)), 0, 1, 3),
    "numbers": (lambda c, h, m: (c + h[0, 0], torch.where(m, c, 0), torch.where(m, c, h[0, 0])), 0, 1, 4),
    "views": (lambda c, h, m: (c.view(3, 4), c.T, c[None], c.expand(2, 4, 3), c.detach()), 0, 0, 0),
    "factories": (lambda c, h, m: (torch.empty(3, device="cuda"), torch.zeros(3, device="cuda")), 0, 0, 1),
    "synchronize": (lambda c, h, m: torch.cuda.synchronize(), 1, 0, 0),
    "on the CPU": (lambda c, h, m: (h[h > 0], h.sum().item(), h.tolist(), h + 1), 0, 0, 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_waits_are_counted(device, name):
    program, *expected = COUNTS[name]
    c, h = torch.arange(12.0, device=device).view(4, 3), torch.ones(4, 3)
    m = c >= 0
    with pretend.counted() as seen:
        program(c, h, m)
    assert [n.total() for n in (seen.waits, seen.copies, seen.launches)] == expected, vars(seen)
    assert all("test_device.py:" in at for n in vars(seen).values() for at in n)


def test_backward_passes_wait_too(device):
    """Masked values are gathered for the gradient; where a mask or an index was on the CPU it is copied again."""
    x, mask = torch.ones(4, 3, device=device, requires_grad=True), torch.ones(4, 3, device=device) > 0
    y = torch.zeros_like(mask, dtype=torch.float32).masked_scatter(mask, x).sum() + x[torch.tensor([0, 1])].sum()
    with pretend.counted() as seen:
        y.backward()
    assert [at.split()[1] for at in seen.waits] == ["masked_scatter_backward"]
    assert seen.copies.total() == 1 and x.grad.tolist() == [[2.0] * 3] * 2 + [[1.0] * 3] * 2


def test_a_graph_records_and_computes_only_when_it_is_replayed(device):
    """On the tensors that it has seen, with what they hold then; as one launch."""
    x, total = torch.ones(4, 3, device=device), torch.zeros(4, 3, device=device)
    recorded = torch.cuda.CUDAGraph()
    with pretend.counted() as seen, torch.cuda.graph(recorded, torch.cuda.graph_pool_handle()):
        y = (2 * x).T
        total[1:] += y.T[1:]
        n, some = y.long(), y > 0
    assert not seen.launches and len(recorded.tape) == 5                # of +=, the second writes what is there already
    assert y.isnan().all() and (n == 7777).all() and some.all() and not total.any() and (x == 1).all()
    for k in (3.0, 5.0):
        x.fill_(k)
        with pretend.counted() as seen:
            recorded.replay()
        assert seen.launches.total() == 1 and (y == 2 * k).all() and (n == 2 * k).all()
    assert total[:, 0].tolist() == [0, 16, 16, 16]
    for waits in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.cpu(), lambda: x + torch.ones(3).to(device),
                  torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                waits()
    assert not torch.cuda.is_current_stream_capturing()


def test_the_tests_do_not_see_a_gpu():
    """Nor do the processes that they start: they would run on it, compiled, where no device is given."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


def test_nothing_is_left_of_the_pretence():
    before = torch.cuda.is_available(), torch.tensor, torch.Tensor.to, F.scaled_dot_product_attention
    with pretend.cuda(), pretend.counted():
        assert torch.cuda.is_available()
    assert before == (torch.cuda.is_available(), torch.tensor, torch.Tensor.to, F.scaled_dot_product_attention)
    assert pretend.COUNTING == []
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(3, device="cuda")


# ------------------------------------------------------------------------------------------- the project

# Of random bytes half end a completion: most have a few letters, and a reward by what these are.
TASK = """
from types import SimpleNamespace as Problem
DEFAULTS = {}
def problems(difficulty=2):
    words = [Problem(prompt=a + b[:n] + "=") for a in "abcdef" for b in "ghi" for n in (0, 1)]
    return words[1:], words[:1]
def demonstration(problem, rng):
    return rng.choice("abc")
def reward(problem, text):
    return {"correct": float(len(text) % 2), "style": sum(map(ord, text)) % 7 / 7}
def steps(problem, text):
    return [(i + 1, ord(x) % 3 > 0) for i, x in enumerate(text)]
def answer(text):
    return text[:1]
"""
TIMES = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
SHAPE = dict(vocab_size=257, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, n_inner=32, head_size=8, block_size=16,
             norm_eps=1e-5, tied=True)
FAMILIES = {"gpt2": {}, "qwen2": {}, "qwen3": {}, "llama": dict(
    tie_word_embeddings=False, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                 original_max_position_embeddings=8))}
SMALL = dict(family="llama", prompts=5, group=2, max_new=3, steps=1, held_out=1, samples=1, micro_tokens=60, lr=1e-3,
             compile=False)
TEN = dict(prompts=10, micro_tokens=120)         # as many as are labelled
RUNS = {
    "grpo": {},
    "reinforce, qwen2": dict(algo="reinforce", family="qwen2"),
    "a2c, qwen3": dict(algo="a2c", family="qwen3"),
    "ppo": dict(algo="ppo"),
    "rloo, gpt2": dict(algo="rloo", family="gpt2"),
    "dr_grpo, minibatches": dict(algo="dr_grpo", minibatches=2, epochs=2),
    "grpo, static cache": dict(cache="static"),
    "dapo, nothing shared": dict(algo="dapo", cache="plain"),
    "gspo, recompute": dict(algo="gspo", recompute=True),
    "ppo, critic of its own": dict(algo="ppo", critic="separate", baseline="group+value"),
    "steps rewarded": dict(supervision="process"),
    "reward learned": dict(reward="model", iterations=2, **TEN),
    "steps learned": dict(reward="rollouts", supervision="process", algo="ppo", **TEN),
    "warm start": dict(family="", n_layer=1, n_embd=16, warm_steps=6, warm_lr=0.1, group=4),
}


def model_of(family, where):
    """A folder with a random model of a family."""
    names = pretrained.GPT2_NAMES if family == "gpt2" else pretrained.NAMES
    hf = {theirs: SHAPE[ours] for ours, theirs in names.items()} | FAMILIES[family] | dict(
        model_type=family, eos_token_id=[*range(0, 257, 2)])
    model, generator = pretrained.of_config(hf).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    pretrained.save(model, where, byte_encoding().files)


def prepared(where):
    """A folder with a task and a model of each family."""
    (where / "letters.py").write_text(TASK)
    for family in FAMILIES:
        model_of(family, where / family)
    return where


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("device"))


def settings(top, name, **changes):
    """One of RUNS."""
    given = SMALL | RUNS[name] | changes
    family = given.pop("family")
    return given | dict(task=str(top / "letters.py"), init=family and str(top / family))


def run(top, name, **changes):
    """One of RUNS in a folder of its own; the agent that it ends with."""
    return grpo.train(grpo.make_config(**settings(top, name, **changes)))


def metrics(where):
    return records(where / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_float32_is_that_of_the_cpu(top, tmp_path, name):
    """Every metric, weight, moment and labelled row."""
    run(top, name, device="cpu", out=str(tmp_path / "cpu"))
    with pretend.cuda() as device:
        agent = run(top, name, device="cuda", dtype="float32", out=str(tmp_path / "cuda"))
        assert all(p.device == device for p in agent.policy.parameters())
    one, two = (load_file(tmp_path / kind / "checkpoint.safetensors") for kind in ("cpu", "cuda"))
    assert one.keys() == two.keys() and len(one) > 20
    if name == "reward learned":    # the loss of choices does not depend on the bias, so rounding moves it: by lr, with Adam
        for x in (one, two):
            x["reward_model.norm"][0] -= x.pop("reward_model.head.bias")[0]     # nor do rewards: the scores' mean has it
    for n, x in one.items():
        assert x.dtype == two[n].dtype and torch.allclose(x, two[n], rtol=1e-5, atol=1e-6), n
    for a, b in zip(metrics(tmp_path / "cpu"), metrics(tmp_path / "cuda"), strict=True):
        assert all(a[x] == pytest.approx(b[x], rel=1e-5, abs=1e-6) for x in (a.keys() | b.keys()) - TIMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_bfloat16(top, tmp_path, name):
    """Its sampler has weights in bfloat16, and is the policy up to rounding."""
    with pretend.cuda() as device:
        agent = run(top, name, device="cuda", out=str(tmp_path / "run"))
        assert agent.policy.amp == torch.bfloat16 and agent.sampler.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        assert all(p.device == device and p.dtype == torch.float32 for p in agent.policy.parameters())
    last = metrics(tmp_path / "run")[-1]
    assert last["mismatch"] < 0.2 and last["grad_norm"] > 0


@pytest.mark.slow
def test_a_run_that_was_stopped_continues(top, tmp_path, monkeypatch, capsys):
    """Then it is evaluated, asked, shown."""
    given = settings(top, "steps learned", critic="separate", reward="model", steps=2, device="cuda", out=str(tmp_path))
    task, real = ["--task", given["task"]], grpo.train_step

    def interrupted(agent, problems, step):
        dist.ASKED.append(15)
        return real(agent, problems, step)
    with pretend.cuda():
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setattr(grpo, "train_step", interrupted)
            grpo.main(flags(given))
        assert stopped.value.code == 128 + 15 and metrics(tmp_path)[-1]["step"] == 1
        grpo.main(["--resume", *task, "--out", str(tmp_path)])
        assert metrics(tmp_path)[-1]["step"] == 2
        capsys.readouterr()
        grpo.main(["--eval_only", *task, "--init", str(tmp_path)])
        assert re.match(r"greedy \d+\.\d%  pass@1 ", capsys.readouterr().out)
        grpo.main(["--ask", "ag=", *task, "--init", str(tmp_path)])
        assert capsys.readouterr().out.startswith("ag=")
        grpo.main(["--report", str(tmp_path)])


@pytest.mark.slow
def test_a_run_keeps_the_tokens_of_a_micro_batch_that_it_found(top, tmp_path, monkeypatch):
    """By the memory that was free when it began, and whatever is free when it goes on; they are in its files."""
    found, real = [], preflight.micro_tokens

    def micro_tokens(model, cfg, longest):
        """With 1.2 times the memory that it would take, fewer would be found now."""
        if found:
            need = preflight.memory(model, cfg, longest)
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1.2 * need, 8e10))
            assert real(model, replace(cfg, micro_tokens=0), longest) < 32768
        found.append(real(model, cfg, longest))
        return found[-1]

    def noted():
        return json.loads((tmp_path / "run.json").read_text())["config"]["micro_tokens"], checkpoint.load(
            tmp_path, grpo.Config)[0].micro_tokens
    monkeypatch.setattr(preflight, "micro_tokens", micro_tokens)
    given = settings(top, "grpo", micro_tokens=0, device="cuda", out=str(tmp_path))
    with pretend.cuda():
        agent = grpo.train(grpo.make_config(**given))
        assert (agent.cfg.micro_tokens, *noted()) == (32768,) * 3
        cfg, saved = checkpoint.resume(tmp_path, grpo.Config, dict(steps=2, task=given["task"]))
        agent = grpo.train(cfg, saved=saved)
        assert (agent.cfg.micro_tokens, *noted()) == (32768,) * 3 and metrics(tmp_path)[-1]["step"] == 2
    assert found == [32768] * 2


@pytest.mark.slow
def test_a_runs_graphs_outlive_evaluation_and_a_learned_reward(top, tmp_path, monkeypatch):
    """Rollouts, evaluations and labels ask for as many rows as they have; the Memory that they share only grows, so that from
    the second step on nothing is recorded."""
    asked, recorded, memory_of, record = [], [], caches.memory_of, caches.Step.record

    def memory(model, rows, slots):
        found = memory_of(model, rows, slots)
        asked.append((rows, slots, found))
        return found
    monkeypatch.setattr(caches, "memory_of", memory)
    monkeypatch.setattr(caches.Step, "record", lambda step, model: (recorded.append(len(asked)), record(step, model)))
    with pretend.cuda():
        run(top, "reward learned", steps=4, eval_every=1, samples=3, device="cuda", out=str(tmp_path))
    assert len({rows for rows, *_ in asked}) > 1 and asked[0][0] < max(rows for rows, *_ in asked)
    for (_, _, one), (rows, slots, two) in zip(asked, asked[1:]):
        assert two is one or two.rows > one.rows or two.slots > one.slots, (rows, slots)
        assert two.rows >= max(rows, one.rows) and two.slots >= max(slots, one.slots)
    memories, steps = {id(found) for *_, found in asked}, {id(step) for *_, found in asked for step in found.steps.values()}
    assert len(memories) <= 3 and len(recorded) == len(steps)           # greedy, sampled, labels; each Step once
    assert recorded[-1] < len(asked) / 2


def test_chosen_rows_stay_where_they_are(device):
    """Ids on the host, to make layouts of, and the rest on the device: neither is copied, and nothing waits."""
    rows, x = torch.tensor([2, 0]), torch.arange(12).view(3, 4)
    batch = grpo.Batch(x, (x > 0).to(device), torch.tensor([True, False, True]), x.float().to(device), x[:, 0].to(device))
    with pretend.counted() as seen:
        part = passes.select(batch, rows, 3)
    assert part.ids.is_cpu and part.finished.is_cpu and part.mask.is_cuda and part.logp.is_cuda and part.start.is_cuda
    assert not seen.waits and not seen.copies
    assert part.ids.tolist() == part.logp.tolist() == [[8, 9, 10], [0, 1, 2]] and part.start.tolist() == [8, 0]


def test_a_tensor_left_on_the_cpu_is_found_with_its_line(top, tmp_path, monkeypatch):
    monkeypatch.setattr(GPT, "device", torch.device("cpu"))
    found = r"^model\.py:\d+: Expected all tensors to be on the same device"
    with pretend.cuda(), pytest.raises(RuntimeError, match=found):
        run(top, "grpo", device="cuda", out=str(tmp_path / "run"))


# --------------------------------------------------------------------------------------- two processes

RANKS = {
    "reward learned": dict(dtype="float32", iterations=1, minibatches=2),
    "steps learned": dict(micro_tokens=60),
}


def as_rank(rank, port, top, where):
    """All of RANKS on one of two GPUs; what went wrong goes to a file."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port))
    try:
        with pretend.cuda(rank) as device, pretend.nccl():
            dist.start_ranks(device)
            for name, changes in RANKS.items():
                agent = run(top, name, **{"device": "cuda", "out": str(where / name)} | changes)
                assert all(p.device == device for p in agent.policy.parameters())
            with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
                distributed.all_reduce(torch.zeros(()))
            dist.wait_for_all()
    except BaseException:
        (where / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)                         # the other one does not wait for this one
    os._exit(0)


@pytest.mark.slow
def test_two_ranks_reduce_nothing_on_the_cpu(top, tmp_path):
    """As with nccl, which has no collectives for tensors on the CPU. Learned rewards once had one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=as_rank, args=(rank, port, top, tmp_path)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0], [path.read_text() for path in tmp_path.glob("error*")]
    assert all(metrics(tmp_path / name)[-1]["step"] > 0 for name in RANKS)


# ------------------------------------------------------------------------------- waits for the device

@contextlib.contextmanager
def calls_of(monkeypatch, *functions):
    """Counts the calls of functions (module, name), and what happens in them, by name."""
    calls, seen = Counter(), {}

    def watch(name, real):
        def counting(*args, **kwargs):
            calls[name] += 1
            with pretend.counted() as now:
                result = real(*args, **kwargs)
            for kind, n in vars(now).items():
                seen.setdefault(name, {}).setdefault(kind, Counter()).update(n)
            return result
        return counting
    with monkeypatch.context() as patch:
        for module, name in functions:
            patch.setattr(module, name, watch(name, getattr(module, name)))
        yield calls, seen


@pytest.mark.slow
def test_sampling_waits_once_in_16_tokens(monkeypatch):
    """And once for the width of the result. A token is one launch of the model, and few others."""
    with pretend.cuda() as device:
        model = tiny_model(n_layer=3).to(device)
        model.amp, model.kv_cache = torch.bfloat16, "static"
        sampler, u, stop = frozen(model), torch.rand(24, 40), {256, *range(300, 400)}
        grpo.sample(sampler, [[1, 2], [3]], 12, [40, 40], 1.0, stop, u)              # records
        with pretend.counted() as seen:
            b = grpo.sample(sampler, [[1, 2], [3]], 12, [40, 40], 1.0, stop, u)
        assert b.ids.shape == (24, 42)
    assert seen.waits.total() <= 40 // 16 + 1 + 1, seen.waits
    assert seen.copies.total() <= 5, seen.copies            # prompts, lengths, room, stop tokens, random numbers
    assert sum(n for at, n in seen.launches.items() if at.endswith("replay")) == 39
    assert seen.launches.total() <= 40 * 41 + (3 * 53 + 60)                 # the prompts are no graph


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo, critic of its own", "steps rewarded"])
def test_a_step_waits_seldom(top, tmp_path, monkeypatch, name):
    """At most once in a micro-batch, and four times more in an optimizer step; nothing but the rows' indices, from
    pinned memory, is copied to the device. The rest of a rollout waits as often for ten rows as for twenty."""
    rollouts = []
    for prompts in (5, 10):
        with pretend.cuda(), calls_of(monkeypatch, (grpo, "sample"), (grpo, "rollout"), (grpo, "update"), (grpo, "total_loss"),
                                     (dist, "clip_gradients"), (report, "record"), (checkpoint, "save")) as (calls, seen):
            run(top, name, prompts=prompts, minibatches=2, micro_tokens=60, device="cuda", out=str(tmp_path / str(prompts)))
        assert calls["rollout"] == calls["update"] == 1 and calls["clip_gradients"] == 2 and calls["total_loss"] >= 2
        update = seen["update"]
        assert update["waits"].total() <= calls["total_loss"] + 4 * 2, update["waits"]
        assert not update["copies"], update["copies"]
        rollouts.append(seen["rollout"]["waits"].total() - seen["sample"]["waits"].total() // calls["sample"])
        assert seen["record"]["waits"].total() <= 4 * 2 + 4, seen["record"]["waits"]         # twice for each row
        whole = load_file(tmp_path / str(prompts) / "checkpoint.safetensors")
        assert seen["save"]["waits"].total() <= calls["save"] * len(whole)       # each tensor once, for both files
    assert max(rollouts) <= 20 + 2 * (calls["total_loss"] + 1), rollouts
