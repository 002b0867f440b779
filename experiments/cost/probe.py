"""One measurement in a process of its own; gpu.py starts them all:

    python experiments/cost/probe.py decode cuda        # a token of many rows: in which way, and where its time goes
    python experiments/cost/probe.py update cuda        # updates, with micro-batches and chunks of several sizes
    python experiments/cost/probe.py inductor cuda      # a token and an update, as they are and compiled
    python experiments/cost/probe.py steps cuda --init FOLDER --steps 2         # a run of grpo.py; its end is not saved

Models are random, in the shapes of Qwen2.5-0.5B and SmolLM2-135M, or tiny with --small. A result is printed as soon as
it is known: `found`, then JSON. A measurement that fails is told with its error, and the next one follows. The device
may be `pretend`, which is that of tests/pretend.py.

A `share` is a lower bound on a time, divided by the time. For a token: the bytes of weights and cache, at the rate of a
copy. For an update: its products, at the rate of a large one.
"""
import contextlib
import dataclasses
import gc
import importlib
import json
import statistics
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import data  # noqa: E402
import grpo  # noqa: E402
import model  # noqa: E402
from data.tokenizer import byte_encoding  # noqa: E402
from experiments import results  # noqa: E402
from experiments.cost import speed  # noqa: E402
from run import caches, checkpoint, dist, passes, pretrained, setup  # noqa: E402

# The models, numbers of rows, rows and tokens of a prompt, and of updates: the batch, and for micro-batches the tokens
# and, if not the default, the logits at a time.
LARGE = SimpleNamespace(
    shapes={"0.5B": speed.QWEN, "135M": speed.SMOLLM2}, rows=(256, 64, 512), group=16, context=256,
    dtype="bfloat16", batch=dict(prompts=16, group=16, max_new=512),
    updates=((16384, None), (4096, None), (16384, 2 ** 26), (32768, None)))
SMALL = SimpleNamespace(        # in float32, as some CPUs take minutes for a large product in bfloat16
    shapes={"0.5B": speed.SMALL, "135M": speed.SMALL | dict(n_layer=1)}, rows=(8, 4), group=2, context=70,
    dtype="float32", batch=dict(prompts=2, group=2, max_new=24), updates=((256, None), (128, None), (256, 2 ** 10)))
CACHES = {"graph": "static", "eager": "static", "shared": "shared", "plain": "plain"}
AT_FIRST = {"graph": "record s", "compiled": "compile s"}       # what takes the time that the first call takes longer
STEP = ("seconds", "rollout_tok_s", "update_tok_s", "length", "accuracy", "greedy", "pass@1", "mismatch")


def tell(name, **found):
    """Print results, to four digits."""
    found = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in found.items()}
    print("found", json.dumps({name: found}), flush=True)


@contextlib.contextmanager
def measuring(name):
    """A context that yields a dict for the results of a measurement, and tells them. If it fails, they have its error."""
    found = {}
    try:
        yield found
    except Exception as e:      # whatever it is, the next measurement may work
        traceback.print_exc()
        found["error"] = f"{type(e).__name__}: {e}".splitlines()[0][:300]
    if found:
        tell(name, **found)


def has_gpu():
    """Whether there is a real one."""
    return torch.cuda.is_initialized()


def memory():
    """The peak of the memory in use, and what PyTorch holds on a GPU."""
    reserved = {"reserved GB": torch.cuda.memory_reserved() / 1e9} if has_gpu() else {}
    return {"peak GB": results.peak() / 1e9} | reserved


def reset():
    """Free what is not in use on a GPU, and forget the peak."""
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------------- a token of many rows

def random_gpt(shape, dtype, device):
    """A model as a run samples from it, with random weights."""
    cfg = grpo.make_config(task="sums", dtype=dtype, device=device)
    with dist.device_of(cfg):
        gpt = model.GPT(model.GPTConfig(**shape))
    return pretrained.frozen(pretrained.to_device(gpt, cfg))


def sampled(policy, lengths, group, new, stop=(-1,)):
    """A rollout of at most so many new tokens after random prompts of these lengths."""
    rng = torch.Generator().manual_seed(new)
    prompts = [torch.randint(policy.cfg.vocab_size, (n,), generator=rng).tolist() for n in lengths]
    u = torch.rand(len(prompts) * group, new, generator=rng)
    return grpo.sample(policy, prompts, group, [new] * len(prompts), 1.0, set(stop), u)


@torch.no_grad()
def agree(shape, device, rows, group):
    """Three rollouts of different sizes by the graph and by the plain cache, in float32, each after the weights were
    changed in place. Up to the first token in which a row differs (rounding may decide a token), how far are the
    log-probabilities apart? The vocabulary is small, so that rounding decides few."""
    policy, found = random_gpt(shape | dict(vocab_size=300), "float32", device), []
    for P, longest, new in ((rows // group, 40, 40), (rows // group, 150, 60), (rows // group // 4, 20, 30)):
        for p in policy.parameters():
            p.copy_(p.flip(0))
        made = []
        for cache in ("static", "plain"):
            policy.kv_cache = cache
            batch = sampled(policy, range(longest, longest - P, -1), group, new, stop=range(10))
            made.append([x.cpu() for x in (batch.ids, batch.mask, batch.logp)])
        T = min(ids.size(1) for ids, *_ in made)
        (ids, mask, logp), (ids2, mask2, logp2) = ([x[:, :T] for x in batch] for batch in made)
        differ = (ids != ids2) | (mask != mask2)
        same = (differ.cumsum(1) == 0) & mask
        found.append((len(ids), differ.any(1).sum().item(), same.sum().item(), (logp - logp2)[same].abs().max().item()))
    all_rows, unequal, tokens, gaps = zip(*found)
    return {"rows": sum(all_rows), "rows that differ": sum(unequal), "tokens before": sum(tokens),
            "max dlogp": max(gaps), "steps recorded": len(caches.MEMORY[policy].steps)} | memory()


def compute(step, model):
    """In place of `Step.record`: a graph that is none."""
    step.graph = SimpleNamespace(replay=lambda: setattr(step, "h", model(step.ids, step.pos, step.cache, slots=step.slots)))


@contextlib.contextmanager
def sampling(policy, way):
    """A context in which a model samples in one of the ways of CACHES."""
    policy.kv_cache = CACHES.get(way, "static")
    reset()
    with mock.patch.object(caches.Step, "record", compute) if way == "eager" else contextlib.nullcontext():
        try:
            yield
        finally:
            caches.forget(policy)


def a_token(found, at, policy, way, rows, copied):
    """Measure a token of each row: the difference of rollouts of two lengths, in which no row ends, divided by that of
    the lengths. The first rollout of all compiles and records. Returns seconds."""
    place, c, took = policy.device, policy.cfg, {}
    *counts, times = (16, 64, 3) if way in AT_FIRST else (8, 24, 2)     # all within as many slots

    def seconds(n):
        began = speed.now(place)
        sampled(policy, [at.context] * (rows // at.group), at.group, n)
        return speed.now(place) - began
    first, _ = (seconds(n) for n in counts)
    few, many = (min(seconds(n) for _ in range(times)) for n in counts)
    token = (many - few) / (counts[1] - counts[0])
    linear = sum(m.weight.numel() for m in policy.layers.modules() if isinstance(m, torch.nn.Linear))
    slots = rows * (at.context + sum(counts) / 2) * 2 * c.n_layer * c.n_kv_head * c.head_size
    bound = (2 if policy.amp else 4) * (linear + c.vocab_size * c.n_embd + slots) / copied
    found |= {"ms": 1e3 * token, "tokens/s": rows / token, "share": bound / token,
              "first call s": first, AT_FIRST.get(way, "warm up s"): first - few} | memory()
    return token


def of_a_token(at, policy):
    """What a token consists of, as functions: after a rollout with a graph."""
    rows = at.rows[0]
    sampled(policy, [at.context] * (rows // at.group), at.group, 16)
    *_, step = caches.MEMORY[policy].steps.values()
    h, u = step.h[:, 0], torch.rand(rows).to(policy.device)
    p = policy.probs(h)
    return {"graph": step.graph.replay if step.graph else partial(policy, step.ids, step.pos, step.cache, slots=step.slots),
            "head and softmax": lambda: policy.probs(h), "sample_token": lambda: caches.draw(p, u)}


def where_time_goes(found, at, policy, token):
    """Measure the parts of a token that takes so many seconds, and how long the host is busy launching its graph."""
    place, parts, launches = policy.device, of_a_token(at, policy), []
    took = {f"{name} us": 1e6 * statistics.median(speed.timed(place, f)) for name, f in parts.items()}
    for _ in range(20):
        began = speed.now(place)
        parts["graph"]()
        launches.append(time.perf_counter() - began)
    found |= took | {"rest us": 1e6 * token - sum(took.values()), "host's launch us": 1e6 * statistics.median(launches)}


@torch.no_grad()
def decode(at, device):
    """Milliseconds for a token of each row, in all ways; where that time goes. First, whether the graph is right."""
    for name, shape in (("tiny", speed.SMALL), ("0.5B", at.shapes["0.5B"])):
        with measuring(f"{name}, graph and plain cache") as found:
            found |= agree(shape, device, at.rows[0], at.group)
    policies = {name: random_gpt(shape, at.dtype, device) for name, shape in at.shapes.items()}
    place = policies["0.5B"].device
    copied = speed.bandwidth(place)
    tell("copy", **{"TB/s": copied / 1e12})
    for rows in at.rows:
        for name, policy in policies.items():
            for way in CACHES if rows == at.rows[0] else ("graph",):
                one_way(name, at, policy, way, rows, copied)


def one_way(name, at, policy, way, rows, copied):
    """Measure a token in one way, and, of the first model and number of rows, where its time goes."""
    with measuring(f"{name} {rows} {way}") as found, sampling(policy, way):
        token = a_token(found, at, policy, way, rows, copied)
    if (name, rows) == ("0.5B", at.rows[0]) and way in AT_FIRST and "ms" in found:
        with measuring(f"{name} {rows} {way}, inside a token") as found, sampling(policy, way):
            where_time_goes(found, at, policy, token)

# -------------------------------------------------------------------------------------------- updates

def random_batch(agent, start=20):
    """A rollout of random tokens, all rows equally long, with the log-probabilities that the model gives them."""
    cfg, V, rows = agent.cfg, agent.policy.cfg.vocab_size, agent.cfg.prompts * agent.cfg.group
    prompts = torch.randint(V, (cfg.prompts, start)).repeat_interleave(cfg.group, 0)
    ids = torch.cat((prompts, torch.randint(V, (rows, cfg.max_new))), 1)
    mask = (torch.arange(ids.size(1)) >= start).expand(ids.shape)
    made = dict(ids=ids, mask=mask, finished=torch.zeros(rows, dtype=torch.bool), logp=torch.zeros(ids.shape),
                start=torch.full((rows,), start), adv=torch.where(mask, torch.randn(rows, 1), 0))
    batch = grpo.Batch(**{name: x.to(agent.policy.device) for name, x in made.items()})
    batch.logp, _ = grpo.logps(agent.sampler, batch, cfg)
    batch.old_logp = batch.ref_logp = batch.logp
    return batch


def new_agent(at, device):
    """An agent with a random model, whose updates change nothing, and a rollout for it."""
    cfg = grpo.make_config(task="sums", lr=0, kl="loss", micro_tokens=at.updates[0][0], dtype=at.dtype, device=device,
                           **at.batch)
    with dist.device_of(cfg):
        policy = model.GPT(model.GPTConfig(**at.shapes["0.5B"]))
    agent = grpo.new_agent(cfg, data.load_task(cfg.task), byte_encoding(), pretrained.to_device(policy, cfg))
    return agent, random_batch(agent)


def some_updates(name, agent, batch, bound):
    """Measure two updates; the first one warms up, or compiles."""
    with measuring(name) as found:
        reset()
        for key in ("first s", "s"):
            began = speed.now(agent.policy.device)
            stats = grpo.update(agent, batch, dist.rng(agent.cfg, "update"))
            found[key] = speed.now(agent.policy.device) - began
        found |= {"tokens/s": batch.mask.sum().item() / found["s"], "share": bound / found["s"],
                  "mismatch": stats["mismatch"]} | memory()
    if "error" in found:
        agent.opt.zero_grad()


def update(at, device):
    """Updates of 256 rows of 512 tokens: seconds and memory for several sizes of micro-batches."""
    agent, batch = new_agent(at, device)
    cfg, bound = agent.cfg, speed.floors(agent, batch)
    tell("large product", **{"TFLOP/s": bound["gflops"] / 1e3})
    for tokens, logits in at.updates:
        agent.cfg = dataclasses.replace(cfg, micro_tokens=tokens)
        name = f"micro_tokens {tokens}" + (f", {logits} logits" if logits else "")
        most = passes.most_logits if logits is None else lambda device: logits
        with mock.patch.object(passes, "most_logits", most):
            some_updates(name, agent, batch, bound["update"])

# ------------------------------------------------------------------------------------------- compiled

def inductor(at, device):
    """A token, and an update, as they are and compiled."""
    with torch.no_grad():
        policy = random_gpt(at.shapes["0.5B"], at.dtype, device)
        copied = speed.bandwidth(policy.device)
        for way in AT_FIRST:
            if way == "compiled":
                compile_layers(policy)
            one_way("0.5B", at, policy, way, at.rows[0], copied)
    del policy
    reset()
    agent, batch = new_agent(at, device)
    bound = speed.floors(agent, batch)["update"]
    some_updates("update", agent, batch, bound)
    compile_layers(agent.policy, agent.ref)
    some_updates("update, compiled", agent, batch, bound)


def compile_layers(*models):
    """As --compile does; not without a GPU, where it takes minutes."""
    if has_gpu():
        torch._dynamo.reset()
        dist.compile_all(grpo.make_config(task="sums", compile=True), *models)

# ---------------------------------------------------------------------------------------- steps of runs

def steps(words, device):
    """The first steps of a run, and what it does not log. Its last checkpoint, which takes long, is not written."""
    end_step, save = checkpoint.end_step, checkpoint.save

    def ended(agent, step, stats):
        tell(f"step {step}", **{key: stats[key] for key in STEP if key in stats}, **memory())
        end_step(agent, step, stats)

    def saved(agent, step, *more):
        if step < agent.cfg.steps:
            save(agent, step, *more)
    with (mock.patch.object(checkpoint, "end_step", ended), mock.patch.object(checkpoint, "save", saved),
          mock.patch.object(preflight, "costs", wraps=setup.costs) as costs):
        try:
            grpo.main([*words, "--device", device])
        finally:
            for args, _ in costs.call_args_list:
                tell("estimate", GB=pretrained.memory(*args) / 1e9, **memory())


def main(argv):
    """Make the measurement that the first word names, on the device that the second one names."""
    name, device, *words = argv
    dist.prepare()
    if "--small" in words:
        speed.SIDE, speed.COPIED = 128, 2 ** 20
    at = SMALL if "--small" in words else LARGE
    f = {f.__name__: f for f in (decode, update, inductor, steps)}[name]
    with importlib.import_module("pretend").cuda() if device == "pretend" else contextlib.nullcontext():
        f(words if f is steps else at, "cuda" if device == "pretend" else device)


if __name__ == "__main__":
    main(sys.argv[1:])
