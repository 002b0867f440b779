"""One measurement in a process of its own; gpu.py starts them all:

    python experiments/cost/probe.py run cuda --task arithmetic --steps 2       # a run of grpo.py
    python experiments/cost/probe.py rollout cuda --compile on                  # a rollout of a random model
    python experiments/cost/probe.py update cpu --small                         # an update, of a smaller one
    python experiments/cost/probe.py attention cuda                             # attention when a token is sampled

The random model has the shape of Qwen2.5-0.5B, and its tokens are bytes. The flags are those of grpo.py, with the
defaults of QWEN. A result is printed as soon as it is known: `found`, then JSON. The device may be `pretend`, which
is that of tests/pretend.py.
"""
import contextlib
import importlib
import json
import statistics
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import data  # noqa: E402
import grpo  # noqa: E402
import model  # noqa: E402
from data.tokenizer import byte_encoding  # noqa: E402
from experiments.cost import speed  # noqa: E402
from run import agents, batches, flags, machine, models, preflight  # noqa: E402

QWEN = dict(task="sums", prompts=16, group=16, max_new=512, dtype="bfloat16", kl="loss", lr=1e-6, static_cache="on",
            compile="off")
# With --small. In float32, as some CPUs take minutes for a large product in bfloat16.
FEW = dict(prompts=2, group=2, max_new=6, dtype="float32", static_cache="off")
SMALL = dict(vocab_size=300, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=512)


def tell(found):
    """Print results."""
    print("found", json.dumps(found), flush=True)


@contextlib.contextmanager
def on(device):
    """A context on a device, which it yields by the name that it has there. At its end the peak memory is told, and
    what was compiled, if anything was."""
    try:
        if device == "pretend":
            with importlib.import_module("pretend").cuda():
                yield "cuda"
        else:
            yield device
    finally:
        tell({"peak GB": speed.peak() / 1e9})
        if device == "cuda":
            tell({"reserved GB": torch.cuda.max_memory_reserved() / 1e9})
        if counters := getattr(sys.modules.get("torch._dynamo.utils"), "counters", None):
            tell({"graphs": counters["stats"]["unique_graphs"], "graph breaks": sum(counters["graph_break"].values()),
                  "counters": {kind: dict(counters[kind]) for kind in ("graph_break", "inductor")}})


def run(device, words):
    """A run of grpo.py, and what it does not log: the estimate of memory, and the mean gap between sampler and trainer
    in the update in which it is largest."""
    with (on(device) as device, mock.patch.object(preflight, "costs", wraps=preflight.costs) as costs,
          mock.patch.object(batches, "checked_gap", wraps=batches.checked_gap) as checks):
        try:
            grpo.main([*words, "--device", device])
        finally:
            for args, _ in costs.call_args_list:
                tell({"estimate GB": preflight.total(preflight.memory(*args)) / 1e9})
            if gaps := [gaps.sum().item() / max(1, tokens.item()) for (gaps, tokens, _), _ in checks.call_args_list]:
                tell({"mean gap": max(gaps)})


def random_agent(device, words):
    """An Agent with a random model, and the problems of a step."""
    small = "--small" in words
    given, _ = flags.read(grpo.Config, grpo.ALGOS, "", [word for word in words if word != "--small"])
    cfg = grpo.make_config(**QWEN | (FEW if small else {}) | given | dict(device=device))
    task = data.load_task(cfg.task)
    machine.prepare()
    with machine.resolve(cfg)[0]:
        policy = model.GPT(model.GPTConfig(**speed.QWEN | (SMALL if small else {})))
    agent = agents.new_agent(cfg, task, byte_encoding(), models.to_device(policy, cfg))
    return agent, task.problems(cfg)[0][:cfg.prompts]


def twice(place, f):
    """Yield the result and the seconds of f, two times: the first one warms up."""
    for name in ("first s", "s"):
        began = speed.now(place)
        result = f()
        seconds = speed.now(place) - began
        tell({name: seconds})
        yield result, seconds


def kernels(place, f):
    """Tell what takes the most time in f: kernels (on a CPU, operations) by name, with their shares."""
    kind = "CUDA" if place.type == "cuda" and torch.version.cuda else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profile:
        f()
    time = "self_device_time_total" if kind == "CUDA" else "self_cpu_time_total"
    took = {x.key: getattr(x, time) for x in profile.key_averages()}
    longest, total = sorted(took, key=took.get)[:-11:-1], sum(took.values())
    tell({"kernels": {name[:90]: round(took[name] / total, 3) for name in longest}})


def rollout(device, words):
    """Rollouts: milliseconds for a token of each row, next to those for reading the weights and the cache."""
    with on(device) as device:
        agent, problems = random_agent(device, words)
        policy, c, cfg, place = agent.policy, agent.policy.cfg, agent.cfg, agent.policy.device
        prompts = [agent.encoding.encode_prompt(p.prompt) for p in problems]
        linear = sum(m.weight.numel() for m in policy.layers.modules() if isinstance(m, torch.nn.Linear))
        weights, slot = linear + c.vocab_size * c.n_embd, 2 * c.n_layer * c.n_kv_head * c.head_size
        copied, width = speed.bandwidth(place), 2 if cfg.dtype == "bfloat16" else 4
        tell({"copy GB/s": copied / 1e9})
        for batch, seconds in twice(place, lambda: grpo.complete(agent, prompts, cfg.group, None)):
            mask = batch.mask.cpu()
            turns, read = mask.sum(1).max().item(), (mask * torch.arange(mask.size(1))).sum().item()
            bound = width * (turns * weights + slot * read) / copied
            tell({"ms a token": 1e3 * seconds / turns, "bound ms": 1e3 * bound / turns, "share": bound / seconds,
                  "tokens/s": mask.sum().item() / seconds})
        kernels(place, lambda: grpo.complete(agent, prompts, cfg.group, None, max_new=min(cfg.max_new, 32)))


def update(device, words):
    """A rollout and two updates with it: seconds, next to those of the matrix products alone."""
    with on(device) as device:
        agent, problems = random_agent(device, words)
        cfg, longest = agent.cfg, max(len(agent.encoding.encode_prompt(p.prompt)) for p in problems)
        tell({"estimate GB": preflight.total(preflight.memory(agent.policy, cfg, longest)) / 1e9})
        batch, _ = grpo.rollout(agent, problems, machine.rng(cfg, "rollout"))
        bound = speed.floors(agent, batch)
        tell({"product TFLOP/s": bound["gflops"] / 1e3})

        def again():
            """An update with the same rollout."""
            return grpo.update(agent, batch, machine.rng(cfg, "update"))
        for stats, seconds in twice(agent.policy.device, again):
            tell({"share": bound["update"] / seconds, "tokens/s": batch.mask.sum().item() / seconds,
                  "mismatch": stats["mismatch"]})
        kernels(agent.policy.device, again)


def attention(device, words):
    """Microseconds of a layer's attention of one token of 256 rows to 640 slots: as in model.py, in two other ways, and
    of reading the slots alone. First with cuDNN, then without it, as run/machine.py has it."""
    B, S, shape = (4, 64, SMALL) if "--small" in words else (256, 640, speed.QWEN)
    c = model.GPTConfig(**shape)
    H, K, D = c.n_head, c.n_kv_head, c.head_size
    with on(device) as device:
        place = torch.device(device)
        q, k, v = (torch.randn(B, 1, n, D, device=place, dtype=torch.bfloat16) for n in (H, K, K))
        cache = [torch.randn(B, K, S, D, device=place, dtype=torch.bfloat16) for _ in "kv"]
        pos = torch.full((B, 1), S - 1, device=place)
        layout = model.Rows(pos, pos=pos, device=place, keys=cache[0])
        mask = layout.attn_mask

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        ways = {"as in model.py": lambda: layout.attend(q, k, v, cache),
                "heads as tokens": lambda: attend(q.view(B, K, H // K, D), *cache),
                "heads repeated": lambda: attend(q.view(B, H, 1, D), *(x.repeat_interleave(H // K, 1) for x in cache))}
        for cudnn in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            for name, f in ways.items():
                tell({name + ", cuDNN" * cudnn: 1e6 * statistics.median(speed.timed(place, f))})
        tell({"bound": 1e6 * 2 * 2 * cache[0].numel() / speed.bandwidth(place)})


def main(argv):
    """Make the measurement that the first word names."""
    if "--small" in argv:
        speed.SIDE, speed.COPIED = 128, 2 ** 20
    {f.__name__: f for f in (run, rollout, update, attention)}[argv[0]](argv[1], argv[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
