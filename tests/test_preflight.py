"""What is held in memory: logits in parts, activations made again, copies in bfloat16, the estimate."""
import math
import dataclasses
import sys
import weakref
from pathlib import Path

import pretend
import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from data import UserError
from data.tokenizer import byte_encoding
from grpo import Config
from model import GPT, GPTConfig, ScalarHead
from run import caches, dist, passes, pretrained, setup
from run.passes import token_logps
from run.pretrained import frozen


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation makes."""
    most = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


class Live(TorchDispatchMode):
    """The most bytes of tensors at one time, of those that were made in this context."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.seen:
                self.seen.add(key)
                self.now += x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.gone, key, x.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return out

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


def gradients(model, critic=None):
    """Of a sum of log-probabilities and values, by name; and what token_logps gave."""
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 257, (6, 40)), torch.rand(6, 40) > 0.3
    mask[:, 0] = False
    model.zero_grad()
    logp, value = token_logps(model, ids, mask, 0.7, critic)
    ((logp * torch.randn_like(logp)).sum() + (0 if value is None else value.sum())).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}, logp.detach(), value


@pytest.mark.parametrize("with_critic", [False, True])
def test_logits_in_parts_are_the_same_and_never_whole(monkeypatch, with_critic):
    model = tiny_model().double()
    critic = ScalarHead(32, None, 1.0, torch.Generator().manual_seed(0)) if with_critic else None
    want, logp, value = gradients(model, critic)
    monkeypatch.setattr(passes, "most_logits", lambda device: 257 * 50)
    with Largest() as seen:
        have, logp2, value2 = gradients(model, critic)
    assert seen.most <= max(257 * 50, 6 * 40 * 64)          # of the logits; of the widest layer
    torch.testing.assert_close(logp2, logp, rtol=0, atol=1e-6)
    assert value is None or torch.equal(value, value2)
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-5, atol=1e-5)


def test_activations_made_again_change_nothing():
    model = tiny_model()
    want, *_ = gradients(model)
    def kept():             # between a forward pass and its backward
        sizes = []
        pack = lambda x: sizes.append(x.numel()) or x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randint(0, 256, (4, 40)))
        return sum(sizes)
    whole, model.recompute = kept(), True
    assert kept() < 0.5 * whole
    have, *_ = gradients(model)
    assert all(torch.equal(have[n], want[n]) for n in want)


def test_a_frozen_copy_is_half_and_gives_the_same():
    model = tiny_model(n_kv_head=4)
    model.amp = torch.bfloat16
    ids = torch.randint(0, 256, (3, 20))
    copied = frozen(model)
    with torch.no_grad():
        assert torch.equal(model.head(model(ids)), copied.head(copied(ids)))
    assert {p.dtype for n, p in copied.named_parameters() if "_proj" in n} == {torch.bfloat16}
    assert not any(p.requires_grad for p in copied.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():                                   # later steps reach it
        model.layers[0].mlp.up_proj.weight.mul_(2)
        model.embed_tokens.weight.mul_(1.5)
    dist.copy_weights(copied, model)
    with torch.no_grad():
        assert torch.equal(model.head(model(ids)), copied.head(copied(ids)))
        assert torch.equal(copied.embed_tokens.weight, model.embed_tokens.weight)
    assert copied.lm_head.weight.dtype == torch.bfloat16 and model.cfg.tied


SHAPES = {"qwen2": GPTConfig(n_layer=4, n_embd=64, n_head=8, n_kv_head=2, n_inner=192, bias="qkv"),
          "gpt2": GPTConfig(n_layer=4, n_embd=64, n_head=8, n_kv_head=8, n_inner=256, bias="all",
                            norm="layer", mlp="gelu", positions="learned")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHAPES)
def test_the_estimate_of_activations_is_near(family, dtype):
    """What 1,024 more tokens in a micro-batch add, but for their logits."""
    cfg = Config(dtype=dtype, micro_tokens=1024, device="cpu", prompts=1, group=2, max_new=8)
    model = pretrained.to_device(GPT(SHAPES[family]), cfg)
    own = {p.data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept = {}
    def pack(x):
        if x.data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        h = model(torch.randint(0, 256, (8, 128)))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) * 2 * (dtype == "bfloat16")
    one, two = (pretrained.memory(model, dataclasses.replace(cfg, micro_tokens=n), 64) for n in (1024, 2048))
    have, want = sum(kept.values()) - weights, two - one - 12 * 257 * 1024
    assert 0.7 < want / have < 1.4, (want, have)
    assert h.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n_layer", [2, 8])
def test_the_estimate_of_an_update_is_near(recompute, n_layer):
    """What lives at its peak, of one micro-batch. Recomputed activations live beside some of their gradients: without
    these the estimate was too low."""
    cfg = Config(recompute=recompute, micro_tokens=1024, device="cpu", dtype="float32", prompts=1, group=2, max_new=8, kl="none")
    model = pretrained.to_device(tiny_model(n_layer=n_layer, n_embd=128, n_inner=512, n_head=8, n_kv_head=2, block_size=128), cfg)
    ids = torch.randint(0, 257, (8, 128))
    with Live() as live:
        token_logps(model, ids, torch.ones(8, 128, dtype=torch.bool), 1.0)[0].sum().backward()
    want = pretrained.memory(model, cfg, 64) - 3 * bytes_of(model)           # the weights and their two moments
    assert 0.94 < want / live.most < 1.3, want / live.most


def test_a_run_that_cannot_fit_is_refused_before_there_is_memory(tmp_path, monkeypatch):
    pretrained.save(tiny_model(), tmp_path)
    model = pretrained.without_memory(tmp_path)
    assert all(p.is_meta for p in model.parameters())
    cfg = Config(prompts=4, group=4, max_new=16, device="cpu", init=str(tmp_path))
    need = pretrained.memory(model, cfg, 9)
    monkeypatch.setattr(pretrained, "free_memory", lambda device: need - 1)
    monkeypatch.setattr(pretrained, "each_tensor", lambda folder: pytest.fail("memory was taken"))
    with pytest.raises(UserError, match=r"this needs about .* lower --micro_tokens"):
        pretrained.load_model(tmp_path, cfg, byte_encoding(), 9)
    monkeypatch.setattr(pretrained, "free_memory", lambda device: need)
    pretrained.check_room(model, cfg, 9)


def held():
    """Bytes that this process holds, without the files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if "RssAnon" in line)


def load(folder):
    """Loads a model, and prints how many bytes more were held at most than before."""
    model, real, seen = pretrained.without_memory(folder), pretrained.each_tensor, []

    def each_tensor(folder):
        """The real one."""
        for x in real(folder):
            yield x
            seen.append(held())
    pretrained.each_tensor, before = each_tensor, held()
    pretrained.fill(model, pretrained.read_weights(model, folder))
    print(max(*seen, held()) - before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_loading_holds_one_copy(forked, tmp_path):
    """80 MB of weights, in float32 and in bfloat16: at any moment hardly more than these. The file
    is mapped, which the system takes back as it likes."""
    big = GPT(GPTConfig(vocab_size=256, n_layer=4, n_embd=640, n_head=8, n_kv_head=8, n_inner=1792))
    size = sum(p.numel() for p in big.parameters()) * 4
    assert 7.5e7 < size < 1e8
    pretrained.save(big, tmp_path)
    tensors = {n: x.bfloat16() for n, x in load_file(tmp_path / "model.safetensors").items()}
    for dtype in ("float32", "bfloat16"):
        code, said, err = forked(tmp_path / dtype, load, tmp_path).end()
        assert code == 0 and 0.9 * size < int(said) < 1.15 * size, (said, size, err)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})


# ------------------------------------------------------------------ the estimate, and what there is

def bytes_of(*modules):
    """Of the parameters of modules, none of them None."""
    return sum(p.nbytes for module in modules if module is not None for p in module.parameters())


WIDE = dict(vocab_size=2000, n_embd=128, n_inner=512, n_head=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [{}, dict(tied=False)], ids=["tied", "untied"])
@pytest.mark.parametrize("settings", [
    {}, dict(kl="none"), dict(kl="watch"), dict(kl="none", critic="separate"), dict(kl="none", baseline="value"),
    dict(baseline="value", critic="separate"), dict(baseline="group+value", critic="separate", kl="none"),
    dict(reward="model", kl="none"), dict(reward="model", baseline="value", critic="separate")],
    ids=lambda x: " ".join(map(str, x.values())) or "grpo")
def test_the_estimate_counts_every_model_of_a_run(settings, shape, dtype):
    """Their weights, gradients and moments after a step are nearly all of it where rows are few and short."""
    cfg = Config(prompts=1, group=2, max_new=2, micro_tokens=1, device="cpu", dtype=dtype, **settings)
    agent = grpo.new_agent(cfg, None, None, pretrained.to_device(tiny_model(**WIDE, **shape), cfg))
    trained = [module for module in (agent.policy, agent.critic) if module is not None]
    there = 4 * sum(p.nbytes for module in trained for p in module.parameters())
    sampler = agent.sampler if agent.sampler is not agent.policy else None
    there += bytes_of(agent.ref, sampler) + 4 * bytes_of(agent.reward_model)
    assert 1 < pretrained.memory(agent.policy, cfg, 2) / there < 1.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache, copies", [("shared", 2), ("plain", 2), ("static", 1)])
def test_the_estimate_of_a_rollout_is_that_of_its_cache(cache, copies, dtype, monkeypatch):
    """And of the logits of a token for each row; ranks share the rows. A static cache is kept during the update too."""
    cfg, model = Config(prompts=10 ** 5, group=4, max_new=8, device="cpu", dtype=dtype, cache=cache), tiny_model()
    model = pretrained.to_device(model, cfg)
    slot = caches.new_cache(model, 1, 1).nbytes
    want = 4e5 * (copies * 13 * slot + 24 * 257)
    assert pretrained.memory(model, cfg, 5) == pytest.approx(want, rel=0.01)
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    assert pretrained.memory(model, cfg, 5) == pytest.approx(want / 2, rel=0.01)
    monkeypatch.undo()
    with_cache, without = (pretrained.memory(model, dataclasses.replace(cfg, prompts=9, micro_tokens=10 ** 6, cache=x), 5)
                           for x in (cache, "plain"))
    assert with_cache - without == (copies == 1) * 36 * 13 * slot


@pytest.mark.parametrize("changes, more", [
    (dict(micro_tokens=2000), 2), (dict(baseline="value", critic="separate"), 2), (dict(baseline="value"), 1),
    (dict(critic="separate"), 1), (dict(recompute=True), 0.8), (dict(dtype="bfloat16"), 0.6)])
def test_activations_are_of_the_tokens_of_a_micro_batch(changes, more, monkeypatch):
    """And of the models that are trained on them."""
    model, cfg = tiny_model(), Config(prompts=1, group=2, max_new=8, device="cpu", dtype="float32", micro_tokens=1000)
    monkeypatch.setattr(pretrained, "most_logits", lambda device: 0)

    def activations(**changes):
        """Those of `micro_tokens`, which are more than those of one row."""
        asked = dataclasses.replace(cfg, **changes)
        return pretrained.memory(model, asked, 4) - pretrained.memory(model, dataclasses.replace(asked, micro_tokens=12), 4)
    assert activations(**changes) / activations() == pytest.approx(more, rel=0.1)


def test_activations_made_again_need_the_inputs_of_all_layers(monkeypatch):
    """4 bytes for each channel of each token in a further layer, and nothing else."""
    cfg = Config(prompts=1, group=2, max_new=8, device="cpu", dtype="float32", recompute=True)
    monkeypatch.setattr(pretrained, "most_logits", lambda device: 0)
    two, eight = ([pretrained.memory(tiny_model(n_layer=n), dataclasses.replace(cfg, micro_tokens=tokens), 4)
                   for tokens in (512, 1512)] for n in (2, 8))
    assert (eight[1] - eight[0]) - (two[1] - two[0]) == 6 * 4 * 32 * 1000


def test_a_row_longer_than_a_micro_batch_is_taken_alone():
    model, cfg = tiny_model(), Config(prompts=1, group=2, max_new=900, micro_tokens=16, device="cpu")
    need = pretrained.memory(model, cfg, 100)
    assert need == pretrained.memory(model, dataclasses.replace(cfg, micro_tokens=1000), 100)


def test_logits_are_never_more_than_there_are_at_a_time(monkeypatch):
    cfg = Config(prompts=1, group=2, max_new=8, device="cpu", micro_tokens=1000)
    whole = pretrained.memory(tiny_model(), cfg, 4)
    monkeypatch.setattr(pretrained, "most_logits", lambda device: 1000)
    assert whole - pretrained.memory(tiny_model(), cfg, 4) == 12 * (257 * 1000 - 1000)


def test_tokens_of_a_micro_batch_are_given_or_found_by_the_memory(monkeypatch):
    """On CUDA the largest power of two up to 32,768 with which a run takes at most 60 % of what is free, and at least 2,048;
    2,048 on a CPU."""
    def cfg(device, **given):
        return Config(prompts=1, group=2, max_new=8, device=device, **given)

    def of(device, **given):
        return pretrained.micro_tokens(model, cfg(device, **given), 4)
    model, sizes = tiny_model(), [2 ** n for n in range(11, 16)]
    assert of("cpu") == 2048 and of("cpu", micro_tokens=77) == 77
    with pretend.cuda():
        need = {n: pretrained.memory(model, cfg("cuda", micro_tokens=n), 4) for n in [*sizes, 2 ** 16]}
        assert len({*need.values()}) == 6
        cases = [(n, 1.001, n) for n in sizes] + [(n, 0.999, max(2048, n // 2)) for n in sizes] + [(2 ** 16, 2, 2 ** 15)]
        for n, share, found in cases:
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (share * need[n] / 0.6, 8e10))
            assert of("cuda") == found, (n, share)
            assert of("cuda", micro_tokens=77) == 77 and of("cuda", micro_tokens=2 ** 20) == 2 ** 20


def test_the_memory_counts_what_is_chosen_on_a_cpu():
    found, given = (pretrained.memory(tiny_model(), Config(prompts=1, group=2, max_new=8, device="cpu", micro_tokens=n), 4)
                    for n in (0, 2048))
    assert found == given


def test_logits_at_a_time_are_256_mb_on_a_cpu_and_a_32nd_of_a_gpu(monkeypatch):
    """In float32; three copies of them are a tenth."""
    assert 4 * passes.most_logits(torch.device("cpu")) == 2 ** 28
    with pretend.cuda() as device:
        assert 4 * passes.most_logits(device) == 8 * 10 ** 10 // 32
        asked = []
        monkeypatch.setattr(passes, "most_logits", lambda device: asked.append(device) or 257)
        model = tiny_model().to(device)
        token_logps(model, torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool), 1.0)
        assert asked == [device]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_sharded_model_a_rank_needs_its_part(dtype, monkeypatch):
    """And a whole copy to sample from."""
    cfg = Config(shard=True, dtype=dtype, device="cpu", reward="model", prompts=1, group=2, micro_tokens=1, max_new=2, warm_steps=0)
    model = pretrained.to_device(tiny_model(**WIDE), cfg)
    whole, copied = bytes_of(model), bytes_of(frozen(model))
    assert pretrained.memory(model, cfg, 2) == pytest.approx(8 * whole + copied * (2 if dtype == "bfloat16" else 1), rel=0.05)
    monkeypatch.setattr(dist, "ranks", lambda: 4)
    assert pretrained.memory(model, cfg, 2) == pytest.approx((8 * whole + copied) / 4 + copied, rel=0.15)
    unsharded = dataclasses.replace(cfg, shard=False)           # each of the ranks has all of it then
    assert pretrained.memory(model, unsharded, 2) == pytest.approx(8 * whole + copied * (2 if dtype == "bfloat16" else 1), rel=0.05)


# ---------------------------------------------------------------------------- whether it fits

def refusal(model, cfg, longest):
    """What check_room says."""
    with pytest.raises(UserError) as e:
        pretrained.check_room(model, cfg, longest)
    return str(e.value)


@pytest.mark.parametrize("need, free, told", [
    (1_750_000_000, 1_250_000_000, "1.8 GB, and 1.2 are free"), (1_250_000_000, 750_000_000, "1.2 GB, and 0.8 are free")])
def test_a_gigabyte_has_a_thousand_million_bytes(need, free, told, monkeypatch):
    monkeypatch.setattr(pretrained, "memory", lambda *_: need)
    monkeypatch.setattr(pretrained, "free_memory", lambda device: free)
    assert refusal(tiny_model(), Config(max_new=8, device="cpu"), 5) == (
        f"this needs about {told}: lower --micro_tokens, --max_new, --group or --prompts")


def test_only_to_answer_takes_the_weights(monkeypatch):
    """Whatever the rest of the settings would need."""
    model, cfg = tiny_model(), Config(prompts=10 ** 9, max_new=10 ** 9, device="cpu")
    monkeypatch.setattr(pretrained, "free_memory", lambda device: bytes_of(model))
    pretrained.check_room(model, cfg, 0)
    monkeypatch.setattr(pretrained, "free_memory", lambda device: bytes_of(model) - 1)
    assert refusal(model, cfg, 0).startswith("this needs about 0.0 GB")


def test_a_run_must_fit_the_context(monkeypatch):
    monkeypatch.setattr(pretrained, "free_memory", lambda device: float("inf"))   # nothing says how much there is
    model = tiny_model()
    pretrained.check_room(model, Config(max_new=8, device="cpu"), 56)
    assert refusal(model, Config(max_new=8, device="cpu"), 57).startswith(
        "a prompt of 57 tokens and --max_new 8 do not fit the model's context of 64: see ")
    pretrained.check_room(model, Config(max_new=80, device="cpu"), 0)            # only to answer


def test_free_memory_is_what_the_system_says(monkeypatch):
    """In the kibibytes of /proc/meminfo; of a GPU the first of free and all; of anything else nothing is known."""
    cpu, text = torch.device("cpu"), "MemTotal:  9000000 kB\nMemFree:  17 kB\nMemAvailable:    5000000 kB\n"
    monkeypatch.setattr(setup.Path, "exists", lambda path: str(path) == "/proc/meminfo")
    monkeypatch.setattr(setup.Path, "read_text", lambda path: text)
    assert pretrained.free_memory(cpu) == 5_120_000_000
    assert pretrained.free_memory(torch.device("mps")) == math.inf
    monkeypatch.setattr(setup.Path, "read_text", lambda path: "MemTotal:  9000000 kB\n")
    assert pretrained.free_memory(cpu) == math.inf
    monkeypatch.setattr(setup.Path, "exists", lambda path: False)
    assert pretrained.free_memory(cpu) == math.inf
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 80))
    assert pretrained.free_memory(torch.device("cuda", 0)) == 7


@pytest.mark.parametrize("need, free, text", [
    (1_750_000_000, 4_250_000_000, "memory: about 1.8 GB of 4.2 free"), (1_250_000_000, math.inf, "memory: about 1.2 GB")])
def test_costs_are_in_units_of_a_billion_bytes(need, free, text, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "memory", lambda *_: need)
    monkeypatch.setattr(pretrained, "free_memory", lambda device: free)
    assert pretrained.micro_tokens(tiny_model(), Config(max_new=8, device="cpu", dtype="float32"), 7) == 2048
    assert capsys.readouterr().out == text + "\n"
