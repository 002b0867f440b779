"""Checks before anything large is allocated: the task, the context, the memory."""
import random
import re
from dataclasses import replace
from pathlib import Path

import torch

from data import (UserError, answer_of, check_steps, of, require, rewards_of, steps_of,
                  turns)
from run import config, dist, show
from run.passes import MICRO_TOKENS, most_logits

def problems_of(cfg, task):
    """A task's training and held-out problems; raises UserError if they are none, or there are none
    to evaluate on."""
    found = config.problems_of(task, cfg)
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise UserError(f"problems must return two lists, of training and of held-out problems, "
                        f"not {found!r:.200}")
    train, held_out = map(list, found)
    for problem in train + held_out:
        prompt = getattr(problem, "prompt", None)
        if not isinstance(prompt, str):
            raise UserError(f"a problem's prompt must be a text, not {prompt!r:.200}")
    if not held_out:
        raise UserError("the task has no held-out problems to evaluate on")
    return train, held_out[:cfg.held_out or None]

def to_train_on(cfg, task):
    """`problems_of` a task of which there must be both kinds; prints a note if they overlap."""
    train, held_out = problems_of(cfg, task)
    if not train:
        empty = [f"--{name}" for name, x in cfg.task_args.items() if x == ""]
        raise UserError(f"the task has no training problems{', without ' * bool(empty)}"
                        f"{' and '.join(empty)}")
    known = {p.prompt for p in train}
    n = sum(p.prompt in known for p in held_out)
    if n:
        same = ", as if one file were both" if n == len(held_out) else ""
        show.print0(f"note: {n} of {len(held_out)} held-out prompts are also training prompts"
                    f"{same}: evaluations will count what was learned by heart")
    return train, held_out

def held_out(cfg, task, encoding, policy):
    """A task's held-out problems; raises UserError if they do not fit the context."""
    found = problems_of(cfg, task)[1]
    check_context(policy, cfg, longest_of(encoding, found))
    return found

class Longest(int):
    """The number of tokens of the longest prompt, with its `problem`."""

def longest_of(encoding, problems):
    """The Longest of some problems."""
    tokens = [len(encoding.encode_prompt(p.prompt)) for p in problems]
    longest = Longest(max(tokens))
    longest.problem = problems[tokens.index(longest)]
    return longest

def check_run(cfg, task, problems):
    """Raises UserError for what would otherwise end a run only after its warm start."""
    config.check_used(cfg)
    if cfg.warm_steps:
        require(task, "demonstration", "the warm start imitates it; or start from a model with "
                                       "--init FOLDER")
    ranks = dist.ranks()
    if cfg.prompts > len(problems):
        raise UserError(f"--prompts {cfg.prompts}: the task has only {len(problems)} problems")
    compares = cfg.baseline not in ("none", "value") or cfg.adv_scale == "group"
    if cfg.group == 1 and compares:
        raise UserError("--group 1: a completion is compared with others of its prompt, unless "
                        "--baseline is none or value and --adv_scale none or batch")
    if cfg.prompts % ranks:
        raise UserError(f"--prompts {cfg.prompts} is not divisible by {ranks} ranks")
    if cfg.reward != "rule" and len(problems) < 10 * ranks:
        raise UserError(f"a learned reward needs {10 * ranks} problems, the task has "
                        f"{len(problems)}")
    problem = problems[0]
    replies = hasattr(task, "reply")
    nothing, something = ([""], ["12"]) if replies else ("", "12")
    rewards_of(task, [problem], [nothing], [1])     # raises UserError for what is no reward
    answer_of(task, nothing)
    if replies:
        turns.checked_reply(task.reply, problem, nothing)
    if cfg.warm_steps:
        something = turns.demonstration(task, problem, random.Random(0))
    if cfg.supervision == "process":
        require(task, "steps", "--supervision process rewards steps")
        found = steps_of(task, problem, something)
        check_steps(problem, turns.spoken(something), found, least=0 if replies else 1)
    out = cfg.folder.resolve()
    if cfg.init and Path(cfg.init).resolve() in (out, out / "best"):
        raise UserError(f"--init is in --out: the model in {cfg.init} would be overwritten")

def check_context(model, cfg, longest):
    """Raises UserError if a prompt of `longest` tokens and a completion do not fit the context."""
    if longest + cfg.max_new > model.cfg.block_size:
        which = ""
        if isinstance(longest, Longest):
            which = (f": {of(longest.problem)}. See \"A prompt is too long\" in "
                     f"docs/troubleshooting.md")
        raise UserError(f"a prompt of {longest} tokens and --max_new {cfg.max_new} do not fit the "
                        f"model's context of {model.cfg.block_size}{which}")

def check_room(model, cfg, longest):
    """Raises UserError if a run would not fit the model's context or the memory; longest 0: only
    the model must fit. The model may be on the meta device."""
    need = 4 * sum(p.numel() for p in model.parameters())
    if longest:
        check_context(model, cfg, longest)
        need = memory(model, cfg, longest)
    free = free_memory(dist.device_of(cfg))
    if free is not None and need > free:
        raise UserError(f"this needs about {need / 1e9:.1f} GB, and {free / 1e9:.1f} are free: "
                        f"lower --micro_tokens, --max_new, --group or --prompts")

def memory(model, cfg, longest):
    """About how many bytes a run needs: its models, and what a rollout or an update holds besides,
    whichever is more. docs/measurements.md has an example, term by term."""
    c, device, ranks = model.cfg, dist.device_of(cfg), dist.ranks()
    N, V, C = sum(p.numel() for p in model.parameters()), c.vocab_size, c.n_embd
    half = dist.dtype_of(cfg) == "bfloat16"
    shards = ranks if dist.is_sharding(cfg) else 1
    b = 2 if half else 4                        # bytes of a number in a matrix product
    policies = 1 + (cfg.critic == "separate" and "value" in cfg.baseline)
    trained = policies + (cfg.reward != "rule")
    frozen = b * N + (4 - b) * V * C * (1 + c.tied)         # the embedding is not rounded
    copies = cfg.needs_reference / shards + (half or shards > 1)

    rows, slots = cfg.prompts * cfg.group // ranks, longest + cfg.max_new
    cache = 2 * b * c.n_layer * c.n_kv_head * c.head_size * rows * slots
    static = dist.has_static_cache(cfg)         # any other is copied when rows finish
    rollout = cache * (1 if static else 2) + 24 * rows * V

    tokens = max(cfg.micro_tokens or MICRO_TOKENS, slots)
    layer = 16 * C + b * (6 * C + c.n_inner * (4 if c.mlp == "swiglu" else 2))
    stored = layer * c.n_layer                  # for the backward pass, per token
    if cfg.recompute:                   # one layer, half as much for gradients, all inputs
        stored = 1.5 * layer + 4 * C * c.n_layer
    logits = 12 * min(most_logits(device), V * tokens)
    update = 4 * N * trained / shards + policies * stored * tokens + logits + cache * static
    return 12 * N * trained / shards + frozen * copies + max(rollout, update)

def free_memory(device):
    """Free bytes on a device, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", known.read_text()) if known.exists() else None
    return 1024 * int(found[1]) if found and device.type == "cpu" else None

def micro_tokens(model, cfg, longest):
    """--micro_tokens or, if it is 0, 2,048 on a CPU, and on CUDA the largest power of two up to
    32,768 with which a run takes at most 60 % of the free memory."""
    device, n = dist.device_of(cfg), MICRO_TOKENS
    if cfg.micro_tokens or device.type != "cuda":
        return cfg.micro_tokens or n
    free = 0.6 * free_memory(device)
    while n < 32768 and memory(model, replace(cfg, micro_tokens=2 * n), longest) < free:
        n *= 2
    return n

def costs(model, cfg, longest):
    """A line with the memory that a run with prompts of up to `longest` tokens needs."""
    need, free = memory(model, cfg, longest), free_memory(dist.device_of(cfg))
    known = "" if free is None else f" of {free / 1e9:.1f} free"
    return f"memory: about {need / 1e9:.1f} GB{known}"
