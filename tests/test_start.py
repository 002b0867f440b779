"""What a run starts from: its checks, tokenizer and model, the warm start, the memory it needs."""
import contextlib
import copy
import dataclasses
import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace

import pretend
import pytest
import torch
from conftest import chat_folder, shared_logps, tiny_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from data import UserError, load_task, tokenizer
from data.tokenizer import byte_encoding
from grpo import Config
from run import config, dist, passes, pretrained, setup
from run.pretrained import memory

CFG = Config(task="toy", prompts=2, group=4, max_new=8, warm_steps=3, micro_tokens=40, n_embd=16,
             dtype="float32")
PROBLEMS = [SimpleNamespace(prompt=f"{i}=") for i in range(20)]
HELD_OUT = [SimpleNamespace(prompt=f"{i}+") for i in range(60)]
CPU = torch.device("cpu")


def with_(**changes):
    return dataclasses.replace(CFG, **changes)


def toy(**parts):
    """With all that a task can have."""
    return SimpleNamespace(**dict(
        problems=lambda: (PROBLEMS, HELD_OUT), reward=lambda p, text: {"correct": 0.0},
        steps=lambda p, text: [], demonstration=lambda p, source: "abc",
        answer=lambda text: text) | parts)


# ---------- whether it can run

@pytest.mark.parametrize("changes, ranks, fault", [
    (dict(prompts=20), 1, ""), (dict(prompts=21), 1, "the task has only 20 problems"),
    (dict(prompts=6), 3, ""), (dict(prompts=3), 2, "--prompts 3 is not divisible by 2 ranks"),
    (dict(reward="model"), 2, ""),
    (dict(reward="model", prompts=3), 3, "needs 30 problems, not 20"),
    (dict(group=1, baseline="none"), 1, "--group 1: a completion is compared"),
    (dict(group=1, adv_scale="none"), 1, "--group 1: a completion is compared"),
    (dict(group=1, baseline="none", adv_scale="batch"), 1, ""),
    (dict(group=1, baseline="value", adv_scale="batch"), 1, ""),
    (dict(init="a", out="a/"), 1, "--init is in --out: the model in a would be overwritten"),
    (dict(init="a/./best/", out="a"), 1, "--init is in --out"),
    (dict(init="link", out="a"), 1, "--init is in --out"),
    (dict(init="a/warm_start", out="a"), 1, ""), (dict(init="", out="."), 1, ""),
    (dict(demonstration=None), 1, "has no function demonstration"),
    (dict(demonstration=None, warm_steps=0, steps=None), 1, ""),
    (dict(steps=None, supervision="process"), 1, "has no function steps"),
    (dict(reward="rollouts"), 1, "rollouts labels steps"),
    (dict(reward=lambda p, text: {"correct": 0, text: 0}), 1, "have the components")], ids=str)

def test_what_a_run_may_ask_for(changes, ranks, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "ranks", lambda: ranks)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a")
    parts = {name: x for name, x in changes.items() if callable(x) or x is None}
    cfg = with_(**{name: x for name, x in changes.items() if name not in parts})
    with pytest.raises(UserError, match=fault) if fault else contextlib.nullcontext():
        setup.check_run(cfg, toy(**parts), PROBLEMS)


def test_a_tasks_functions_are_tried_once():
    """On a demonstration and without a text: they may be slow."""
    tried = []
    task = toy(reward=lambda p, text: tried.append((p, text)) or {"correct": 0},
               steps=lambda p, text: tried.append((p, text)) or [(1, True)] * (text > ""))
    setup.check_run(with_(supervision="process"), task, PROBLEMS)
    setup.check_run(with_(supervision="process", warm_steps=0), task, PROBLEMS)
    first = PROBLEMS[0]
    assert tried == [(first, x) for x in ("", "abc", "abc", "", "", "12", "12", "")]


def test_a_learned_reward_with_too_small_a_kl_is_warned_of(capsys):
    for reward, kl, beta, noted in (("model", "none", 1, 1), ("model", "reward", 0.1, 1),
                                    ("rule", "none", 0, 0), ("model", "reward", 0.2, 0)):
        setup.check_run(with_(reward=reward, kl=kl, beta=beta), toy(), PROBLEMS)
        assert capsys.readouterr().out.count("so small a KL") == noted


def test_the_first_held_out_problems_are_taken():
    agent = SimpleNamespace(task=toy(), encoding=byte_encoding(), policy=tiny_model())
    for n in (0, 7):
        agent.cfg = with_(held_out=n)
        assert setup.held_out(agent) == HELD_OUT[:n or None]
    agent.cfg = with_(max_new=61)
    assert setup.held_out(agent)
    agent.cfg = with_(max_new=62)
    with pytest.raises(UserError, match="3 tokens, '59.', and --max_new 62 do not fit .* of 64: "):
        setup.held_out(agent)


# ---------- the tokenizer and the model

def test_the_tokenizer_is_the_one_in_the_folder(tmp_path):
    """A run's folder without one has a model of bytes; --init's must have one."""
    chat, empty = chat_folder(tmp_path / "chat"), tmp_path / "empty"
    empty.mkdir()
    for cfg, where, size in ((CFG, "", 257), (CFG, empty, 257), (CFG, chat, 259),
                             (with_(init=str(chat)), chat, 259)):
        assert pretrained.encoding_of(cfg, where).n_vocab == size
    with pytest.raises(UserError, match="no model in"):
        pretrained.encoding_of(with_(init=str(empty)), empty)


@pytest.fixture
def saved(tmp_path):
    """A folder of a byte model."""
    pretrained.save(tiny_model(), tmp_path / "model", byte_encoding().files)
    return tmp_path / "model"


def test_a_vocabulary_may_be_larger_than_the_tokenizers(tmp_path, encoding):
    for size in (300, 256):
        pretrained.save(tiny_model(vocab_size=size), tmp_path / str(size))
    assert pretrained.load_model(tmp_path / "300", CFG, encoding).cfg.vocab_size == 300
    with pytest.raises(UserError, match="vocabulary of 256, the tokenizer one of 257$"):
        pretrained.load_model(tmp_path / "256", CFG, encoding)


@pytest.mark.parametrize("longest, context", [(7, 16), (8, 16), (9, 32), (24, 32), (25, 64)])
def test_a_new_model_follows_from_the_seed_alone(longest, context, encoding):
    """By a stream of its own; its context is the least power of two."""
    model = pretrained.new_model(CFG, encoding, longest)
    assert model.cfg.block_size == context and model.hf["eos_token_id"] == 256
    source = torch.Generator().manual_seed(dist.rng(CFG, "weights").getrandbits(63))
    want = torch.randn(257, 16, generator=source) * (2 / (5 * 16)) ** 0.5
    torch.testing.assert_close(model.embed_tokens.weight.detach(), want)


# ---------- a warm start

@pytest.mark.parametrize("dtypes", [
    {}, dict(torch_dtype="float16"), dict(dtype="bfloat16", torch_dtype="float32")])
def test_rounded_weights_are_trained_and_saved_in_float32(dtypes, saved, tmp_path, encoding):
    path, weights = saved / "config.json", saved / "model.safetensors"
    hf = json.loads(path.read_text())
    del hf["dtype"]
    path.write_text(json.dumps(hf | dtypes))
    save_file({n: x.bfloat16() for n, x in load_file(weights).items()}, weights)
    cfg = with_(init=str(saved), out=str(tmp_path / "out"), warm_steps=0)
    model = pretrained.load_model(saved, cfg, encoding, 5)
    pretrained.save(model, saved)
    kept = json.loads(path.read_text())
    assert all(kept[name] == "float32" for name in dtypes)
    dtypes = {p.dtype for p in [*model.parameters(), *load_file(weights).values()]}
    assert dtypes == {torch.float32}


def slow_loss(model, shown, encoding):
    """The mean of -log p of the demonstrations' tokens, ends too, row by row in float64."""
    model, terms = copy.deepcopy(model).double(), []
    for prompt, text in shown:
        start = encoding.encode_prompt(prompt)
        ids = start + [*text.encode(), encoding.end]
        logits = model(torch.tensor([ids]))[0] @ model.embed_tokens.weight.T
        for t in range(len(start), len(ids)):
            terms.append(logits[t - 1].logsumexp(0) - logits[t - 1, ids[t]])
    return torch.stack(terms).mean().item()


@pytest.mark.parametrize("kind", ["bytes", "chat"])
def test_the_loss_of_a_warm_start_is_that_of_the_demonstrations_tokens(kind, tmp_path, monkeypatch):
    """With the prompt's frame, and the token that ends a turn."""
    shown, found, model, encoding = [], [], tiny_model(vocab_size=259), byte_encoding()
    cfg = with_(out=str(tmp_path), max_new=8, temperature=2.0)     # which is RL's
    if kind == "chat":
        encoding = tokenizer.load_encoding(chat_folder(tmp_path / "chat"))
        assert encoding.end != 256 and encoding.frame.after

    def demonstration(problem, source):
        shown.append((problem.prompt, "abcdefg"[:source.randrange(1, 8)]))
        return shown[-1][1]

    def fit(*given):
        terms = [*given[2](0)]
        found.extend((given, sum(terms).item(), len(terms)))
    monkeypatch.setattr(passes, "supervised_fit", fit)
    problems = [SimpleNamespace(prompt="1234567890"[:n]) for n in (1, 2, 5, 9)]
    (stale := tmp_path / "warm_start" / "chat_frame.json").parent.mkdir()
    stale.touch()
    setup.warm_start(model, toy(demonstration=demonstration), problems, cfg, encoding)
    assert not stale.exists() or stale.stat().st_size > 0
    given, loss, terms = found
    assert given[:2] == ("warm start", model) and given[3:] == (3, cfg.warm_lr)
    shown = shown[len(problems):]           # each problem's was looked at before
    assert len(shown) == 48 and len({len(text) for _, text in shown}) > 2 and terms > 1
    assert loss == pytest.approx(slow_loss(model, shown, encoding), rel=1e-5)
    with pytest.raises(UserError, match="the prompt '1' has 9 tokens, more than --max_new 8"):
        setup.warm_start(model, toy(demonstration=lambda *_: "abcdefgh"), problems, cfg, encoding)
    game = toy(reply=lambda *_: "b", demonstration=lambda *_: ["a", "b", "a"])
    for n, why in ((60, "2 turns, more than --max_turns 1"), (4, ".* tokens")):
        with pytest.raises(UserError, match=f"has {why}"):
            setup.warm_start(model, game, problems, with_(max_turns=1, max_new=n), encoding)
    model.embed_tokens.weight.data.zero_()
    setup.warm_start(model, game, problems, with_(max_new=60), encoding)
    assert found[-2] == pytest.approx(math.log(259))


def test_the_default_run_begins_with_the_shipped_warm_start():
    given = grpo.make_config(), grpo.make_config(init=""), grpo.make_config(difficulty=1)
    assert [(cfg.init != "", cfg.warm_steps) for cfg in given] == [(1, 0), (0, 1500), (1, 0)]
    with pytest.raises(UserError, match="is for --difficulty 2: for 1 add --init ''"):
        config.problems_of(load_task("arithmetic"), given[2])


# ---------- the memory

TINY = dict(prompts=1, group=2, max_new=8, held_out=1, dtype="float32")
WIDE = dict(vocab_size=2000, n_embd=128, n_inner=512, n_head=8)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Without what lies between blocks."""
    monkeypatch.setattr(pretrained, "KEPT", 1)


def test_on_a_cpu_freed_blocks_are_kept(monkeypatch):
    cfg = Config(**TINY)
    need = memory(tiny_model(), cfg, 9)
    monkeypatch.setattr(pretrained, "KEPT", 3)
    assert memory(tiny_model(), cfg, 9) == 3 * need
    with pretend.cuda():
        assert memory(tiny_model(), dataclasses.replace(cfg, device="cuda"), 9) < 2 * need


def bytes_of(*modules):
    return sum(p.nbytes for module in modules if module for p in module.parameters())


def of(model=None, longest=4, **changes):
    cfg = Config(**TINY | dict(group=171, warm_steps=0) | changes)  # 2,052 tokens a step
    return memory(pretrained.to_device(model or tiny_model(), cfg), cfg, longest)


class Live(TorchDispatchMode):
    """The most bytes at one time of tensors made in this context."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.seen:
                key, size = x.untyped_storage()._cdata, x.untyped_storage().nbytes()
                self.seen.add(key)
                self.now += size
                weakref.finalize(x.untyped_storage(), self.gone, key, size)
        self.most = max(self.most, self.now)
        return out

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


def estimate(work, shape, longest, **settings):
    """That of a run, less moments and sampler, over the peak of work(model)."""
    cfg = Config(**TINY | settings, kl="none")
    model = tiny_model(**WIDE | dict(vocab_size=257, block_size=2048) | shape)
    model = pretrained.to_device(model, cfg)
    with Live() as live:
        work(model)
    there = 3 * bytes_of(model) + bytes_of(model.amp and pretrained.frozen(model))
    return (memory(model, cfg, longest) - there) / live.most


GPT2 = dict(n_kv_head=8, norm="layer", mlp="gelu", positions="learned", bias="all")


@pytest.mark.slow
@pytest.mark.without_noise
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype, size, shape", [
    ("float32", (1, 8), dict(n_layer=2)), ("float32", (1, 8), dict(n_layer=8)),
    ("float32", (1, 8), dict(n_layer=8, **GPT2)), ("bfloat16", (2, 3), dict(n_layer=8))])
def test_the_estimate_of_an_update_is_near(recompute, dtype, size, shape):
    """Recomputed activations live beside some of their gradients."""
    def update(model):
        for ids in torch.randint(0, 257, (*size, 128)):
            shared_logps(model, ids, ids >= 0, 1.0)[0].sum().backward()
    assert 0.94 < estimate(update, shape, 64, recompute=recompute, dtype=dtype, group=15,
                           micro_tokens=128 * size[1]) < 1.3


@pytest.mark.slow
@pytest.mark.without_noise
@pytest.mark.parametrize("cache, shape", [
    ("plain", dict(n_layer=1)), ("shared", dict(n_layer=2, **GPT2)), ("static", dict(n_layer=1))])
def test_the_estimate_of_reading_prompts_is_near(cache, shape):
    """Nothing has T * T elements. A static cache is there already."""
    def read(model):
        for _ in range(2):
            grpo.sample(model, [[5] * 1000] * 8, 2, [8] * 8, 1.0, ())
    assert 0.87 < estimate(read, shape, 1000, cache=cache, prompts=8) < 1.15


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [
    {}, dict(kl="none"), dict(kl="none", critic="separate"), dict(kl="none", baseline="value"),
    dict(baseline="value", critic="separate"), dict(reward="model", kl="none"),
    dict(baseline="group+value", critic="separate", kl="none", reward="model")], ids=str)
def test_the_estimate_counts_every_model_of_a_run(settings, tied, dtype):
    """Nearly all of it where rows are few and short."""
    cfg = Config(**TINY | dict(max_new=2, micro_tokens=1, dtype=dtype) | settings)
    policy = pretrained.to_device(tiny_model(**WIDE, tied=tied), cfg)
    agent = grpo.new_agent(cfg, None, None, policy)
    sampler = agent.sampler if agent.sampler is not policy else None
    there = 4 * bytes_of(policy, agent.critic, agent.reward_model) + bytes_of(agent.ref, sampler)
    there += bytes_of(sampler and policy, sampler and agent.critic) / 2
    assert 1 < memory(policy, cfg, 2) / there < 1.05


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("cache, copies", [("shared", 2.25), ("plain", 2.25), ("static", 1)])
def test_the_estimate_of_a_rollout_is_that_of_its_cache(cache, copies, dtype, size, monkeypatch):
    """And of a token's logits; ranks share the rows. A static cache is kept in the update."""
    row = 12 * 64 * size                # slots; 2 layers, keys and values, 2 heads, 8 channels
    want, many = 4e5 * (copies * row + 24 * 257), dict(dtype=dtype, prompts=2 * 10 ** 5, group=2)
    assert of(**many, cache=cache) == pytest.approx(want, rel=0.01)
    few = dict(dtype=dtype, prompts=18, group=2)
    assert of(**few, cache=cache) - of(**few, cache="plain") == (copies == 1) * 36 * row
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    assert of(**many, cache=cache) == pytest.approx(want / 2, rel=0.01)


@pytest.mark.parametrize("changes, more", [
    (dict(baseline="value", critic="separate"), 2), (dict(baseline="value"), 1),
    (dict(recompute=True), 0.8), (dict(dtype="bfloat16"), 0.6)])
def test_what_a_micro_batch_needs(changes, more, monkeypatch):
    """A longer row is taken alone; by default it has 2,048 tokens; logits in parts."""
    def activations(model=None, **changes):
        return of(model, micro_tokens=2048, **changes) - of(model, micro_tokens=1548, **changes)
    long = dict(max_new=900, longest=100)
    assert of(**long, micro_tokens=16) == of(**long, micro_tokens=1000)
    assert of() == of(micro_tokens=2048) < of(micro_tokens=2052) == of(micro_tokens=10 ** 6)
    for fit in dict(warm_steps=1), dict(reward="model"):
        assert of(micro_tokens=2052, **fit) < of(micro_tokens=10 ** 6, **fit)
    whole = of(micro_tokens=1000)
    monkeypatch.setattr(pretrained, "most_logits", lambda device: 0)
    assert whole - of(micro_tokens=1000) == 16 * 257 * 1000
    assert activations(**changes) / activations() == pytest.approx(more, rel=0.1)
    two, eight = (activations(tiny_model(n_layer=n), recompute=True) for n in (2, 8))
    assert eight - two == 6 * 4 * 32 * 500              # the inputs of six more layers


def test_tokens_of_a_micro_batch_are_given_or_found_by_the_memory(monkeypatch, capsys):
    """On CUDA a power of two from 2,048 to 32,768 within 60 % of what is free."""
    def of(device, n=0):
        cfg = Config(**TINY | dict(device=device, micro_tokens=n, group=66))
        return pretrained.micro_tokens(model, cfg, 1000), memory(model, cfg, 1000)
    model = tiny_model()
    loaded = 4 * sum(p.numel() for p in model.parameters())
    assert of("cpu")[0] == 2048 and of("cpu", 77)[0] == 77
    assert 4 * pretrained.most_logits(CPU) == 2 ** 30
    with pretend.cuda() as device:
        assert 4 * pretrained.most_logits(device) == 8 * 10 ** 10 // 32
        for n, share, found in ((2048, 0.9, 2048), (4096, 0.999, 2048), (4096, 1.001, 4096),
                                (32768, 1.001, 32768), (65536, 2, 32768)):
            free = share * of("cuda", n)[1] / 0.6
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - loaded, 8e10))
            assert of("cuda")[0] == found and of("cuda", 77)[0] == 77
        monkeypatch.setattr(pretrained, "memory", lambda *_: 1_750_000_000)
        monkeypatch.setattr(pretrained, "free_memory", lambda device: 4_230_000_000)
        capsys.readouterr()
        assert of("cuda", 77)[0] == 77
        assert capsys.readouterr().out == "memory: needs about 1.8 GB, 4.2 GB are free\n"


# ---------- whether it fits

def test_a_run_must_fit_the_memory(saved, monkeypatch, encoding):
    """Refused before memory is taken; to answer takes the weights alone."""
    model, free = pretrained.without_memory(saved), []
    monkeypatch.setattr(pretrained, "free_memory", lambda device: free[-1])
    monkeypatch.setattr(pretrained, "each_tensor", lambda folder: pytest.fail("memory was taken"))
    monkeypatch.setattr(pretrained, "memory", lambda _, cfg, n: 1e9 * (
        8 - 3 * cfg.recompute - 2 * (cfg.kl == "none") - (cfg.micro_tokens == 1)))
    for longest, need, said in ((9, 8e9, "8.0, 2.0 with"), (0, bytes_of(model), "0.0$")):
        free.append(need)
        pretrained.check_room(model, CFG, longest)
        free.append(need - 1)
        with pytest.raises(UserError, match="needs about " + said):
            pretrained.load_model(saved, CFG, encoding, longest)
    monkeypatch.undo()
    cfg = with_(task="arithmetic", init=str(saved), max_new=1000)
    assert setup.trained_model(cfg)[2].cfg == model.cfg


def test_free_memory_is_what_the_system_says(monkeypatch):
    has = {"meminfo": "MemFree:  17 kB\nMemAvailable:    5000000 kB\n", "memory.max": "max"}
    monkeypatch.setattr(Path, "exists", lambda path: path.name in has)
    monkeypatch.setattr(Path, "read_text", lambda path: has[path.name])
    assert pretrained.free_memory(CPU) == 5_120_000_000
    has |= {"memory.max": "4000000000\n", "memory.stat": "anon 1000000000\nfile 2000000000\n"}
    assert pretrained.free_memory(CPU) == 3_000_000_000
    has.clear()
    assert pretrained.free_memory(CPU) == math.inf
    assert pretrained.free_memory(torch.device("mps")) == math.inf


def test_loading_holds_one_of_the_files_tensors(saved, monkeypatch):
    """And the one before it; the model's own are copies."""
    held, real = [], pretrained.each_tensor

    def each_tensor(folder):
        for name, x in real(folder):
            held.append(weakref.ref(x.untyped_storage()))
            yield name, x
            assert sum(ref() is not None for ref in held) <= 2
    monkeypatch.setattr(pretrained, "each_tensor", each_tensor)
    model = pretrained.load(saved)
    assert len(held) == len([*model.parameters()]) and not any(ref() for ref in held)
