"""What is held in memory: logits in parts, activations made again, copies in bfloat16, the estimate."""
import dataclasses
import sys
import weakref
from pathlib import Path

import pretend
import pytest
import torch
from conftest import ROOT, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import grpo
import model as model_py
from data import UserError
from grpo import Config
from model import GPT, GPTConfig, token_logps
from run.pretrained import ScalarHead, frozen
from run import caches, dist, preflight, pretrained, setup
from run.files import save_file


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
    monkeypatch.setattr(model_py, "most_logits", lambda device: 257 * 50)
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
    have, want = sum(kept.values()) - weights, preflight.memory(model, cfg, 64)["activations"]
    assert 0.7 < want / have < 1.4, (want, have)
    assert h.requires_grad


@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("n_layer", [2, 8])
def test_the_estimate_of_an_update_is_near(recompute, n_layer):
    """What lives at its peak, of one micro-batch. Recomputed activations live beside some of their gradients: without
    these the estimate was too low."""
    cfg = Config(recompute=recompute, micro_tokens=1024, device="cpu", dtype="float32", prompts=1, group=2, max_new=8)
    model = pretrained.to_device(tiny_model(n_layer=n_layer, n_embd=128, n_inner=512, n_head=8, n_kv_head=2, block_size=128), cfg)
    ids = torch.randint(0, 257, (8, 128))
    with Live() as live:
        token_logps(model, ids, torch.ones(8, 128, dtype=torch.bool), 1.0)[0].sum().backward()
    need = preflight.memory(model, cfg, 64)
    want = sum(need[name] for name in ("gradients", "activations", "logits"))
    assert 0.94 < want / live.most < 1.3, want / live.most


def test_a_run_that_cannot_fit_is_refused_before_there_is_memory(tmp_path, monkeypatch):
    pretrained.save(tiny_model(), tmp_path)
    model = pretrained.without_memory(tmp_path)
    assert all(p.is_meta for p in model.parameters())
    cfg = Config(prompts=4, group=4, max_new=16, device="cpu")
    need = preflight.memory(model, cfg, 9)
    N = sum(p.numel() for p in model.parameters())
    assert (need["weights"], need["Adam"], need["reference"]) == (4 * N, 8 * N, 4 * N)
    half = dataclasses.replace(cfg, dtype="bfloat16", kl="none")
    sampler = sum(p.numel() * p.element_size() for p in frozen(pretrained.to_device(tiny_model(), half)).parameters())
    assert preflight.memory(model, half, 9)["sampler"] == sampler < 4 * N and not preflight.memory(model, half, 9)["reference"]
    wide = preflight.memory(model, dataclasses.replace(cfg, prompts=10 ** 6), 9)
    assert wide["cache"] == 2 * 2 * 4 * 2 * 2 * 8 * 4 * 10 ** 6 * 25    # twice K and V, L, heads, D, rows, slots
    monkeypatch.setattr(preflight, "free_memory", lambda device: sum(need.values()) - 1)
    monkeypatch.setattr(GPT, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(UserError, match=r"this needs about .* lower --micro_tokens"):
        preflight.check_room(model, cfg, 9)
    monkeypatch.setattr(preflight, "free_memory", lambda device: sum(need.values()))
    preflight.check_room(model, cfg, 9)


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
    pretrained.read_weights(model, folder)
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
    named = pretrained.parameters_by_file_name(big)
    tensors = {n: p[0].detach().bfloat16() for n, p in named.items()}
    for dtype in ("float32", "bfloat16"):
        code, said, err = forked(tmp_path / dtype, load, tmp_path).end()
        assert code == 0 and 0.9 * size < int(said) < 1.15 * size, (said, size, err)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})


# ------------------------------------------------------------- the estimate, part by part

def bytes_of(*modules):
    """Of the parameters of modules, none of them None."""
    return sum(p.nbytes for module in modules if module is not None for p in module.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [{}, dict(tied=False)], ids=["tied", "untied"])
@pytest.mark.parametrize("settings", [
    {}, dict(kl="none"), dict(kl="watch"), dict(kl="none", critic="separate"), dict(kl="none", baseline="value"),
    dict(baseline="value", critic="separate"), dict(baseline="group+value", critic="separate", kl="none"),
    dict(reward="model", kl="none", choices=6), dict(reward="model", baseline="value", critic="separate")],
    ids=lambda x: " ".join(map(str, x.values())) or "grpo")
def test_each_part_is_the_bytes_of_what_it_stands_for(settings, shape, dtype):
    """Of a run's own models after a step, and of a cache. The maps to a number, of a few bytes, are left out."""
    cfg = Config(prompts=3, group=4, max_new=8, micro_tokens=500, device="cpu", dtype=dtype, **settings)
    agent = setup.new_agent(cfg, None, None, pretrained.to_device(tiny_model(**shape), cfg))
    trunk, learned = agent.critic and agent.critic.trunk, agent.reward_model and agent.reward_model.trunk
    trained = [p for module in (agent.policy, trunk) if module is not None for p in module.parameters()]
    for p in (p for group in agent.opt.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    agent.opt.step()
    need = preflight.memory(agent.policy, cfg, 5)
    assert need["weights"] == bytes_of(agent.policy, trunk) == sum(p.nbytes for p in trained)
    assert need["Adam"] == sum(agent.opt.state[p][m].nbytes for p in trained for m in ("exp_avg", "exp_avg_sq"))
    assert need["gradients"] == sum(p.grad.nbytes for p in trained)
    sampler = agent.sampler if agent.sampler is not agent.policy else None
    assert (need["reference"], need["sampler"]) == (bytes_of(agent.ref), bytes_of(sampler))
    assert need["reward model"] == 4 * bytes_of(learned)        # its weights, two moments and gradients
    all_models = [x for x in (agent.policy, trunk, agent.ref, sampler, learned) if x is not None]
    assert need["RoPE's tables"] == sum(x.cos.nbytes + x.sin.nbytes for x in all_models)
    rollout = preflight.memory(agent.policy, dataclasses.replace(cfg, prompts=600), 5)
    rows = 600 * max(4, cfg.choices if cfg.reward == "model" else 0)
    cache = caches.new_cache(agent.policy, rows, 5 + 8)
    assert rollout["cache"] == 2 * cache.nbytes and rollout["logits of a token"] == rows * 257 * 24


def test_ranks_share_the_rows_of_a_rollout_and_nothing_else(monkeypatch):
    cfg, model = Config(prompts=600, group=4, max_new=8, micro_tokens=100, device="cpu"), tiny_model()
    alone = preflight.memory(model, cfg, 5)
    monkeypatch.setattr(dist, "rank", lambda: 1)
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    both = preflight.memory(model, cfg, 5)
    halved = {name for name in alone if both[name] != alone[name]}
    assert halved == {"cache", "logits of a token"} and all(2 * both[n] == alone[n] for n in halved)


# Bytes that the backward pass needs of a token in a layer of 32 channels, 64 in the MLP, and 4 + 2 heads of 8.
# The residual stream, float32: 4 times 32 numbers. In the dtype of products: twice the 32 channels, three times the
# 6 * 8 of the heads, 4 times the 64 of SwiGLU, or twice those of GELU.
ONE = {"float32": 4 * 128 + 4 * (64 + 144 + 256), "bfloat16": 4 * 128 + 2 * (64 + 144 + 256),
       "gelu": 4 * 128 + 4 * (64 + 144 + 128)}


@pytest.mark.parametrize("settings, stored", [
    (dict(micro_tokens=100), 100 * 2 * ONE["float32"]),
    (dict(micro_tokens=100, dtype="bfloat16"), 100 * 2 * ONE["bfloat16"]),
    (dict(micro_tokens=100, recompute=True), 100 * (1.5 * ONE["float32"] + 2 * 128)),     # a layer, some gradients; what each begins with
    (dict(micro_tokens=100, baseline="value"), 100 * 2 * ONE["float32"]),
    (dict(micro_tokens=100, baseline="value", critic="separate"), 2 * 100 * 2 * ONE["float32"]),
    (dict(micro_tokens=100, critic="separate"), 100 * 2 * ONE["float32"]),          # of no use without a value
    (dict(micro_tokens=5), 12 * 2 * ONE["float32"]),                # a row does not fit: it is taken alone
    (dict(micro_tokens=5, choices=50), 12 * 2 * ONE["float32"]),
    (dict(micro_tokens=5, choices=50, reward="model"), 50 * 12 * 2 * ONE["float32"])])      # nor does a set of 50
def test_activations_are_of_the_tokens_of_a_micro_batch(settings, stored, monkeypatch):
    cfg = Config(prompts=1, group=2, max_new=8, device="cpu", **settings)
    need = preflight.memory(tiny_model(), cfg, 4)
    assert need["activations"] == stored
    tokens = 100 if cfg.micro_tokens == 100 else 600 if cfg.reward == "model" else 12
    assert need["logits"] == 257 * tokens * 12
    monkeypatch.setattr(preflight, "most_logits", lambda device: 1000)      # more are never made at a time
    assert preflight.memory(tiny_model(), cfg, 4)["logits"] == 12000


def test_tokens_of_a_micro_batch_are_given_or_found_by_the_memory(monkeypatch):
    """On CUDA the largest power of two up to 32,768 with which a run takes at most 60 % of what is free, and at least 2,048;
    2,048 on a CPU."""
    def cfg(device, **given):
        return Config(prompts=1, group=2, max_new=8, device=device, **given)

    def of(device, **given):
        return preflight.micro_tokens(model, cfg(device, **given), 4)
    model, sizes = tiny_model(), [2 ** n for n in range(11, 16)]
    assert of("cpu") == 2048 and of("cpu", micro_tokens=77) == 77
    with pretend.cuda():
        need = {n: preflight.total(preflight.memory(model, cfg("cuda", micro_tokens=n), 4)) for n in [*sizes, 2 ** 16]}
        assert len({*need.values()}) == 6
        cases = [(n, 1.001, n) for n in sizes] + [(n, 0.999, max(2048, n // 2)) for n in sizes] + [(2 ** 16, 2, 2 ** 15)]
        for n, share, found in cases:
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (share * need[n] / 0.6, 8e10))
            assert of("cuda") == found, (n, share)
            assert of("cuda", micro_tokens=77) == 77 and of("cuda", micro_tokens=2 ** 20) == 2 ** 20


def test_the_memory_counts_what_is_chosen_on_a_cpu():
    found, given = (preflight.memory(tiny_model(), Config(prompts=1, group=2, max_new=8, device="cpu", micro_tokens=n), 4)
                    for n in (0, 2048))
    assert found == given


def test_logits_at_a_time_are_256_mb_on_a_cpu_and_a_32nd_of_a_gpu(monkeypatch):
    """In float32; three copies of them are a tenth."""
    assert 4 * model_py.most_logits(torch.device("cpu")) == 2 ** 28
    with pretend.cuda() as device:
        assert 4 * model_py.most_logits(device) == 8 * 10 ** 10 // 32
        cfg = Config(prompts=1, group=2, max_new=8, micro_tokens=10 ** 9, device="cuda")
        assert preflight.memory(tiny_model(), cfg, 4)["logits"] == 12 * (8 * 10 ** 10 // 128)
        asked = []
        monkeypatch.setattr(model_py, "most_logits", lambda device: asked.append(device) or 257)
        model = tiny_model().to(device)
        token_logps(model, torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool), 1.0)
        assert asked == [device]


def test_activations_of_gelu():
    cfg = Config(prompts=1, group=2, max_new=8, micro_tokens=100, device="cpu")
    assert preflight.memory(tiny_model(mlp="gelu"), cfg, 4)["activations"] == 100 * 2 * ONE["gelu"]


@pytest.mark.parametrize("prompts, names", [
    (1, ["gradients", "activations", "logits", "gathered layers"]),
    (600, ["cache", "logits of a token", "full sampler"])])
def test_of_rollout_and_update_the_larger_counts(prompts, names):
    need = preflight.memory(tiny_model(), Config(prompts=prompts, group=2, max_new=8, micro_tokens=100, device="cpu"), 4)
    assert [*need][-len(names):] == names and [*need][0] == "weights" and len(need) == 6 + len(names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_sharded_model_a_rank_needs_its_part(dtype, monkeypatch):
    """And at times two layers with all that is in none; or to sample all weights, which it lets go of."""
    cfg, model = Config(shard=True, dtype=dtype, device="cpu", reward="model", group=2, micro_tokens=256, max_new=4,
                        warm_steps=0), tiny_model(n_layer=5)
    alone = preflight.memory(model, cfg, 2)
    assert not alone["gathered layers"] and alone["sampler"] == (dtype == "bfloat16") * alone["reference"]
    monkeypatch.setattr(dist, "rank", lambda: 1)
    monkeypatch.setattr(dist, "ranks", lambda: 4)
    parts, rollout = (preflight.memory(model, dataclasses.replace(cfg, prompts=p), 2) for p in (1, 4000))
    for name in ("weights", "Adam", "reference", "reward model"):
        assert parts[name] == rollout[name] == alone[name] / 4 > 0
    assert parts["gradients"] == parts["weights"] and parts["sampler"] == 0
    layer = sum(m.weight.numel() for m in model.layers[0].modules() if isinstance(m, torch.nn.Linear))
    outside = sum(p.numel() for p in model.parameters()) - 5 * layer
    assert parts["gathered layers"] == 4 * (2 * layer + outside)
    assert rollout["full sampler"] == alone["reference"] and "gradients" not in rollout


def test_a_model_is_whole_before_it_is_sharded(monkeypatch):
    """With a warm start so are its gradients and moments; that counts where it is more than the run."""
    model = tiny_model(n_layer=5)
    N = sum(p.numel() for p in model.parameters())
    cfg = Config(shard=True, dtype="float32", device="cpu", prompts=1, group=2, micro_tokens=1, max_new=1, warm_steps=0)
    alone = preflight.memory(model, cfg, 1)
    assert alone["weights"] == 4 * N and "frozen copies" not in alone
    monkeypatch.setattr(dist, "rank", lambda: 1)
    monkeypatch.setattr(dist, "ranks", lambda: 64)
    assert preflight.total(preflight.memory(model, cfg, 1)) == 4 * N + 2 * 4 * N
    assert preflight.total(preflight.memory(model, dataclasses.replace(cfg, warm_steps=1), 1)) == 12 * N + 12 * N


# ---------------------------------------------------------------------------- whether it fits

def refusal(model, cfg, longest):
    """What check_room says."""
    with pytest.raises(UserError) as e:
        preflight.check_room(model, cfg, longest)
    return str(e.value)


@pytest.mark.parametrize("need, free, told", [
    (1_750_000_000, 1_250_000_000, "1.8 GB, and 1.2 are free (weights 1.8)"),
    (1_250_000_000, 750_000_000, "1.2 GB, and 0.8 are free (weights 1.2)")])
def test_a_gigabyte_has_a_thousand_million_bytes(need, free, told, monkeypatch):
    monkeypatch.setattr(preflight, "memory", lambda *_: {"weights": need})
    monkeypatch.setattr(preflight, "free_memory", lambda device: free)
    assert refusal(tiny_model(), Config(max_new=8, device="cpu"), 5) == (
        f"this needs about {told}: lower --micro_tokens, --max_new, --group or --prompts")


def test_what_is_too_small_to_show_is_not_named(monkeypatch):
    """Up to 0.05 GB."""
    sizes = {"weights": 2_940_000_000, "Adam": 50_000_000, "cache": 50_000_001, "logits": 0}
    monkeypatch.setattr(preflight, "memory", lambda *_: sizes)
    monkeypatch.setattr(preflight, "free_memory", lambda device: 3_040_000_000)
    assert "3.0 GB, and 3.0 are free (weights 2.9, cache 0.1): " in refusal(tiny_model(), Config(max_new=8, device="cpu"), 5)


def test_only_to_answer_takes_the_weights_and_their_tables(monkeypatch):
    """Whatever the rest of the settings would need."""
    model, cfg = tiny_model(), Config(prompts=10 ** 9, max_new=10 ** 9, device="cpu")
    whole = bytes_of(model) + model.cos.nbytes + model.sin.nbytes
    monkeypatch.setattr(preflight, "free_memory", lambda device: whole)
    preflight.check_room(model, cfg, 0)
    monkeypatch.setattr(preflight, "free_memory", lambda device: whole - 1)
    assert refusal(model, cfg, 0).startswith("this needs about 0.0 GB")


def test_a_run_must_fit_the_context(monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda device: None)          # nothing says how much there is
    model = tiny_model()
    preflight.check_room(model, Config(max_new=8, device="cpu"), 56)
    assert refusal(model, Config(max_new=8, device="cpu"), 57) == (
        "a prompt of 57 tokens and --max_new 8 do not fit the model's context of 64")
    preflight.check_room(model, Config(max_new=80, device="cpu"), 0)            # only to answer


def test_free_memory_is_what_the_system_says(monkeypatch):
    """In the kibibytes of /proc/meminfo; of a GPU the first of free and all; of anything else nothing is known."""
    cpu, text = torch.device("cpu"), "MemTotal:  9000000 kB\nMemFree:  17 kB\nMemAvailable:    5000000 kB\n"
    monkeypatch.setattr(preflight.Path, "exists", lambda path: str(path) == "/proc/meminfo")
    monkeypatch.setattr(preflight.Path, "read_text", lambda path: text)
    assert preflight.free_memory(cpu) == 5_120_000_000
    assert preflight.free_memory(torch.device("mps")) is None
    monkeypatch.setattr(preflight.Path, "read_text", lambda path: "MemTotal:  9000000 kB\n")
    assert preflight.free_memory(cpu) is None
    monkeypatch.setattr(preflight.Path, "exists", lambda path: False)
    assert preflight.free_memory(cpu) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 80))
    assert preflight.free_memory(torch.device("cuda", 0)) == 7


@pytest.mark.parametrize("need, free, text", [
    (1_750_000_000, 4_250_000_000, "memory: about 1.8 GB of 4.2 free"), (1_250_000_000, None, "memory: about 1.2 GB")])
def test_costs_are_in_units_of_a_billion_bytes(need, free, text, monkeypatch):
    monkeypatch.setattr(preflight, "memory", lambda *_: {"weights": need / 2, "Adam": need / 2})
    monkeypatch.setattr(preflight, "free_memory", lambda device: free)
    assert preflight.costs(tiny_model(), Config(max_new=8, device="cpu", dtype="float32"), 7) == text
