"""Checks before anything large is allocated: the task, the sizes, the memory."""
import random
import re
from dataclasses import replace
from pathlib import Path

import torch

from data import UserError, check_steps, require, rewards_of
from run.passes import most_logits
from run import config, dist, show
from run.passes import MICRO_TOKENS
from run.caches import by_64, power_of_two

def problems_of(cfg, task):
    """A task's training and held-out problems; raises UserError if it returns anything else, or
    none to evaluate on."""
    found = config.problems_of(task, cfg)
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(are_problems, found)):
        raise UserError("the task's problems() must return two lists, training and held-out, of "
                        "objects with a string `prompt`")
    train, held_out = found
    if not held_out:
        raise UserError("the task has no held-out problems to evaluate on")
    return train, held_out[:cfg.held_out or None]

def held_out_of(agent):
    """The held-out problems of an agent's task; raises UserError if their prompts and completions
    do not fit the model's context."""
    held_out = problems_of(agent.cfg, agent.task)[1]
    longest = max((len(agent.encoding.encode_prompt(p.prompt)) for p in held_out), default=0)
    check_context(agent.policy, agent.cfg, longest)
    return held_out

def are_problems(found):
    """Whether `found` is a list of objects with a string `prompt`."""
    return isinstance(found, (list, tuple)) and all(
        isinstance(getattr(p, "prompt", None), str) for p in found)

def check_run(cfg, task, problems, held_out):
    """Raises UserError if the task lacks a function that the run needs, or if a step needs more
    problems than there are or a number not divisible by the ranks; notes a small held-out set."""
    config.check_called(cfg)
    if cfg.supervision == "process":
        require(task, "steps", "--supervision process rewards steps")
    if cfg.warm_steps:
        require(task, "demonstration", "the warm start imitates it; or start from a model with "
                                       "--init FOLDER")
    out = cfg.folder.resolve()
    moved = (out, out / "best", out / "previous", out / "previous" / "best")
    if cfg.init and Path(cfg.init).resolve() in moved:
        raise UserError(f"--init is in --out: the model in {cfg.init} would be overwritten")
    if cfg.minibatches > cfg.prompts * cfg.group:
        raise UserError(f"--minibatches {cfg.minibatches}: a rollout has only "
                        f"{cfg.prompts * cfg.group} rows")
    for problem in problems[:1]:            # fail before the warm start
        check_rule(cfg, task, problem)
    ranks = dist.ranks()
    if cfg.prompts > len(problems):
        raise UserError(f"--prompts {cfg.prompts}: the task has only {len(problems)} problems to "
                        f"draw from")
    if cfg.prompts % ranks:
        raise UserError(f"--prompts {cfg.prompts} is not divisible by {ranks} ranks")
    if cfg.learns_reward and len(problems) < 10 * ranks:
        raise UserError(f"a learned reward needs {10 * ranks} problems, the task has "
                        f"{len(problems)}")
    if len(held_out) < cfg.held_out:
        show.print0(f"note: --held_out {cfg.held_out}, but the task has only {len(held_out)} "
                    f"held-out problems")
    if len(held_out) < 50:
        show.print0(f"note: with only {len(held_out)} held-out problems, one more solved changes a "
                    f"result by {1 / len(held_out):.0%}")

def check_rule(cfg, task, problem):
    """Raises UserError if the reward, the answer or the steps of a problem are not what they should
    be; notes components of the reward that process supervision does not use."""
    parts, = rewards_of(task, [problem], [""], [1])
    if not isinstance(task.answer(""), str):
        raise UserError(f"answer must return a string, '' for none, not {task.answer('')!r}")
    if cfg.supervision == "process":
        text = task.demonstration(problem, random.Random(0)) if cfg.warm_steps else "12"
        check_steps(problem, text, task.steps(problem, text))
        if logged := [name for name in parts if name != "correct"]:
            show.print0(f"note: --supervision process rewards steps, and the last one for a right "
                        f"answer; this is only logged: {', '.join(logged)}")

def check_room(model, cfg, longest):
    """Raises UserError, before the model is allocated, if a run with prompts of up to `longest`
    tokens would not fit its context or the memory; longest 0: only the weights must fit."""
    if longest:
        check_context(model, cfg, longest)
    need, free = memory(model, cfg, longest), free_memory(dist.device_of(cfg))
    if not longest:
        need = {"weights": 4 * sum(p.numel() for p in model.parameters()),
                "RoPE's tables": rope_tables(model.cfg)}
    if free is not None and total(need) > free:
        parts = ", ".join(f"{name} {x / 1e9:.1f}" for name, x in need.items() if x > 5e7)
        raise UserError(f"this needs about {total(need) / 1e9:.1f} GB, and {free / 1e9:.1f} are "
                        f"free ({parts}): lower --micro_tokens, --max_new, --group or --prompts")

def check_context(model, cfg, longest):
    """Raises UserError if a prompt of `longest` tokens and a completion do not fit the context."""
    if longest + cfg.max_new > model.cfg.block_size:
        raise UserError(f"a prompt of {longest} tokens and --max_new {cfg.max_new} do not fit the "
                        f"model's context of {model.cfg.block_size}")

def free_memory(device):
    """Free bytes on a device, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", known.read_text()) if known.exists() else None
    return 1024 * int(found[1]) if found and device.type == "cpu" else None

def rope_tables(shape):
    """Bytes of RoPE's cosines and sines, each twice."""
    return 8 * shape.block_size * shape.head_size

def memory(model, cfg, longest):
    """Bytes that a run needs, by purpose. Rollout and update alternate, so only the larger of the
    two counts. The activations are an estimate."""
    c, half = model.cfg, dist.dtype_of(cfg) == "bfloat16"
    N, b = sum(p.numel() for p in model.parameters()), 2 if half else 4     # b: bytes in products
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    frozen = 4 * N - (4 - b) * linear + b * c.vocab_size * c.n_embd * (half and c.tied)
    learned, slots, V = cfg.learns_reward, longest + cfg.max_new, c.vocab_size
    rows = cfg.prompts * max(cfg.group, 4 * learned) // dist.ranks()
    tokens = max(cfg.micro_tokens or MICRO_TOKENS, slots * (4 if learned else 1))     # CHOICES
    inner, heads = c.n_inner * (4 if c.mlp == "swiglu" else 2), (c.n_head + c.n_kv_head)
    layer = 4 * 4 * c.n_embd + b * (2 * c.n_embd + 3 * heads * c.head_size + inner)   # per token
    stored = layer * c.n_layer
    if cfg.recompute:           # one layer's, half as much for their gradients, all inputs
        stored = layer * 3 // 2 + 4 * c.n_embd * c.n_layer
    trained = 1 + ("value" in cfg.baseline and cfg.critic == "separate")
    sharded = dist.is_sharding(cfg)
    own = N / (dist.ranks() if sharded else 1)    # a model's parameters on one rank
    # A cache counts twice, as it is copied when rows diverge or finish; a static one is not, but it
    # is kept during the update.
    static = dist.has_static_cache(cfg)
    slot = 2 * b * c.n_layer * c.n_kv_head * c.head_size
    cache = slot * (power_of_two(rows) * by_64(slots) if static else 2 * rows * slots)
    rollout = {"cache": cache, "logits of a token": 24 * rows * V,
               "full sampler": frozen * sharded}
    # A sharded model gathers two layers at a time, and the weights outside the layers.
    update = {"gradients": 4 * own * trained, "activations": stored * tokens * trained,
              "logits": 12 * min(most_logits(dist.device_of(cfg)), V * tokens),
              "gathered layers": 4 * (N - linear + 2 * linear // c.n_layer) * sharded}
    update |= {"static cache": cache} if static else {}
    models = trained + cfg.needs_reference + (half or sharded) + learned
    run = {"weights": 4 * own * trained, "Adam": 8 * own * trained,
           "reference": frozen * own / N * cfg.needs_reference,
           "sampler": frozen * (half and not sharded), "reward model": 16 * own * learned,
           "RoPE's tables": rope_tables(c) * models, **max(rollout, update, key=total)}
    begun = {"weights before sharding": 4 * N * sharded, "frozen copies": 2 * frozen * sharded,
             "the warm start's gradients and Adam": 12 * N * sharded * (cfg.warm_steps > 0)}
    return max(run, begun, key=total)

def total(need):
    """The sum over all purposes of `memory`."""
    return sum(need.values())

def micro_tokens(model, cfg, longest):
    """--micro_tokens or, if it is 0, 2,048 on a CPU, and on CUDA the largest power of two up to
    32,768 with which a run takes at most 60 % of the free memory."""
    if cfg.micro_tokens or dist.device_of(cfg).type != "cuda":
        return cfg.micro_tokens or MICRO_TOKENS
    free, n = 0.6 * free_memory(dist.device_of(cfg)), MICRO_TOKENS
    while n < 32768 and total(memory(model, replace(cfg, micro_tokens=2 * n), longest)) < free:
        n *= 2
    return n

def costs(model, cfg, longest):
    """A line with the memory that a run with prompts of up to `longest` tokens needs."""
    need, free = total(memory(model, cfg, longest)), free_memory(dist.device_of(cfg))
    known = "" if free is None else f" of {free / 1e9:.1f} free"
    return f"memory: about {need / 1e9:.1f} GB{known}"
