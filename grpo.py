"""
GRPO, Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4), in one file.

Kept from the paper: groups of G completions of each prompt from the old policy; the group's
z-score of the reward as the advantage of all its tokens (4.1.2); the clipped ratio of each token,
averaged over each completion, then over the group (eq. 3); the k3 estimator of the KL to a frozen
reference inside the loss (eq. 4); one update after each sampling stage. Dropped: nothing of it.

    python grpo.py --task arithmetic                    # warm start, then GRPO; a laptop will do
    python grpo.py --resume                             # go on after Ctrl-C, a crash or a kill
    python grpo.py --ask "47*58=" --init out/arithmetic # try the result
    torchrun --nproc_per_node 2 grpo.py                 # ranks: the same run, the prompts divided

P prompts, G completions of each, B = P * G rows (row = p * G + g), T tokens of the longest row,
N most new tokens, V vocabulary. Column t of every (B, T) tensor belongs to token t.

    ids         (B, T) int64    prompt, completion, padding on the right
    mask        (B, T) bool     True where the policy sampled the token, the end token included
    finished    (B,)   bool     the row ended with a stop token, not at the limit of N tokens
    logp        (B, T) float32  log pi(ids[:, t] given ids[:, :t]) at the sampling temperature
    old_logp, ref_logp          the same under the old policy and under the reference
    reward      (B,)   float32
    adv         (B, T) float32  advantage
    weight      (B, T) float32  share of a token in the loss = (weight * per_token).sum()
"""
import argparse
import copy
import dataclasses
import importlib
import inspect
import json
import math
import numbers
import os
import platform
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data.tokenizer import END, byte_encoding
from model import GPT, Fault, GPTConfig, read_tensors, write_tensors, write_whole

# ------------------------------------------------------------------------------------- the knobs

@dataclass(frozen=True)
class Config:
    """One run. A field is a flag and its comment the flag's help. A task has defaults of its own."""
    task: str = "arithmetic"    # what to learn: the file data/<task>.py
    difficulty: int = 2         # of its problems; arithmetic: digits of each factor
    init: str = ""              # folder of a model to start from; empty: a new one, warm-started
    out: str = ""               # the run's folder; empty: out/<task>
    seed: int = 1               # of everything random
    steps: int = 100            # rollouts, each followed by its update
    eval_every: int = 0         # steps between evaluations; 0: only before the first, after the last
    save_every: int = 10        # steps between checkpoints
    # rollout: the paper samples 64 completions a question, 1024 in a batch, up to 1024 tokens
    prompts: int = 16           # P, problems of a step
    group: int = 64             # G, completions of each problem
    max_new: int = 1024         # N, most tokens of a completion
    temperature: float = 1.0    # of sampling, and of every log-probability
    # loss
    clip_low: float = 0.2       # the ratio is clipped below 1 - clip_low; PPO's 0.2, the paper is silent
    clip_high: float = 0.2      # and above 1 + clip_high
    beta: float = 0.04          # weight of the KL to the reference
    scale: str = "group"        # divide the advantage by the group's std, or none
    mean: str = "sequence"      # over tokens: sequence (1/|o| in each row, eq. 3), token, constant
    # update
    epochs: int = 1             # passes over a rollout, the paper's mu
    minibatches: int = 1        # optimizer steps of a pass
    micro_tokens: int = 8192    # most tokens of one forward and backward; changes no result
    lr: float = 1e-6            # constant, as in the paper
    grad_clip: float = 1.0      # largest norm of a gradient
    # a new model and its warm start by supervised fine-tuning on the task's demonstrations
    n_layer: int = 4            # layers
    n_head: int = 4             # query heads
    n_kv_head: int = 2          # key/value heads
    n_embd: int = 128           # channels
    warm_steps: int = 1000      # optimizer steps
    warm_batch: int = 64        # demonstrations of a step
    warm_lr: float = 2e-3       # peak: a short rise, then linearly to 0
    # machine
    device: str = "auto"        # cuda, mps or cpu; auto: the first there is
    dtype: str = "auto"         # of matrix products, float32 or bfloat16; auto: bfloat16 on cuda
    compile: str = "auto"       # torch.compile, on or off; auto: on with cuda

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise Fault(f"--{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type in (int, float) and not (math.isfinite(value) and value >= LEAST.get(f.name, 1)):
                raise Fault(f"--{f.name} is at least {LEAST.get(f.name, 1)}, not {value}")
        if self.minibatches > self.prompts * self.group:
            raise Fault(f"--minibatches {self.minibatches}: a rollout has only "
                        f"{self.prompts * self.group} rows")

    @property
    def folder(self):
        return Path(self.out or f"out/{self.task}")


CHOICES = dict(scale=("group", "none"), mean=("sequence", "token", "constant"),
               device=("auto", "cuda", "mps", "cpu"), dtype=("auto", "float32", "bfloat16"),
               compile=("auto", "on", "off"))
# A group of one has no spread: its z-score is 0/0. Positive rates are checked as "more than 0".
LEAST = dict(group=2, seed=0, steps=0, eval_every=0, temperature=1e-3, clip_low=0, clip_high=0,
             beta=0, lr=0, grad_clip=1e-9, warm_steps=0, warm_lr=0)
# What a resumed run may change: nothing that alters a step that was already made.
MAY_CHANGE = {"out", "steps", "eval_every", "save_every"}
TASK = ("problems", "demonstration", "reward", "answer", "steps")
# Largest gap between the sampler's and the trainer's log-probability of a token before the first
# optimizer step. More than rounding means that the two disagree, and the ratio is wrong.
MISMATCH = {"float32": 1e-4, "bfloat16": 0.5}


def load_task(name):
    """The module data/<name>.py; raises Fault if it is missing or is not a task."""
    there = sorted(p.stem for p in (Path(__file__).parent / "data").glob("*.py"))
    tasks = [n for n in there if n not in ("__init__", "tokenizer")]
    if name not in tasks:
        raise Fault(f"unknown task {name!r}; there are: {', '.join(tasks)}")
    task = importlib.import_module(f"data.{name}")
    missing = [f for f in TASK if not callable(getattr(task, f, None))]
    if missing or not isinstance(getattr(task, "DEFAULTS", None), dict):
        raise Fault(f"data/{name}.py is not a task: it has no {', '.join(missing) or 'DEFAULTS'}")
    return task


def rng(cfg, purpose, at=0):
    """A random stream of its own for each purpose and step: derived, so never stored or resumed."""
    return random.Random(f"{cfg.seed}/{purpose}/{at}")


def uniforms(source, *shape):
    return torch.from_numpy(np.random.default_rng(source.getrandbits(64)).random(shape))


# ------------------------------------------------------------------------------------- the ranks

def world():
    """(rank, number of ranks) under torchrun; (0, 1) without."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce(x, op=dist.ReduceOp.SUM):
    """Sum (or `op`) of a tensor over all ranks."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x, op)
    return x


def say(*text):
    if world()[0] == 0:
        print(*text, flush=True)


# ------------------------------------------------------------------- sampling: prompts to a group

@dataclass
class Batch:
    """The rows of a rollout, or some of them; the fields are explained at the top of the file."""
    ids: torch.Tensor
    mask: torch.Tensor
    finished: torch.Tensor
    logp: torch.Tensor
    old_logp: torch.Tensor = None
    ref_logp: torch.Tensor = None
    reward: torch.Tensor = None
    adv: torch.Tensor = None


@torch.no_grad()
def sample(model, prompts, group, max_new, temperature, stop, u=None):
    """`group` completions of each prompt (a list of ids): a Batch with ids, mask, finished, logp.

    u (B, max_new) in [0, 1) are the random numbers: token n of a row is the inverse of its
    cumulative distribution at u[row, n], whatever the other rows do. temperature 0 is greedy.
    `stop` is the set of ids that end a row.
    """
    device = model.norm.weight.device
    length = torch.tensor([len(p) for p in prompts], device=device)                        # (P,)
    P, longest = len(prompts), max(map(len, prompts))
    T = longest + max_new
    if min(map(len, prompts)) == 0 or T > model.cfg.block_size:
        raise Fault(f"a prompt of {longest} tokens and {max_new} new ones do not fit the model's "
                    f"context of {model.cfg.block_size}" if longest else "an empty prompt")

    # 1. Read each prompt once, and hand its cache to the whole group.
    ids = torch.zeros(P, T, dtype=torch.int64, device=device)
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    slots = -(-T // 16) * 16                        # read in steps of 16: few shapes to compile
    cache = model.new_cache(P, slots)
    pos = torch.arange(longest, device=device).expand(P, -1)
    h = model(ids[:, :longest], pos, cache[..., :-(-longest // 16) * 16, :])
    h = h[torch.arange(P, device=device), length - 1].repeat_interleave(group, 0)          # (B, C)
    cache = cache.repeat_interleave(group, 2)
    ids = ids.repeat_interleave(group, 0)
    at = length.repeat_interleave(group)            # (b,) the column that each row samples next
    B = P * group
    logp = torch.zeros(B, T, device=device)
    mask = torch.zeros(B, T, dtype=torch.bool, device=device)
    finished = torch.zeros(B, dtype=torch.bool, device=device)
    stop = torch.tensor(sorted(stop), device=device)
    if u is not None:
        u = u.to(device, torch.float32 if device.type == "mps" else torch.float64)

    # 2. One token a turn. `row` are the rows of the decode batch, `live` those not finished.
    row = torch.arange(B, device=device)
    live = torch.ones(B, dtype=torch.bool, device=device)
    for n in range(max_new):
        logits = model.head(h)                                                             # (b, V)
        dist_logp = (logits / temperature if temperature else logits).log_softmax(-1)
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            cdf = dist_logp.to(u.dtype).exp().cumsum(-1)
            token = torch.searchsorted(cdf, u[row, n, None] * cdf[:, -1:], right=True)[:, 0]
            token = token.clamp(max=logits.size(-1) - 1)
        r, c, t = row[live], at[live], token[live]
        ids[r, c], mask[r, c] = t, True
        logp[r, c] = dist_logp[live].gather(-1, t[:, None])[:, 0]
        finished[r] = torch.isin(t, stop)

        # 3. Drop finished rows once they are a quarter: copying the cache costs as well.
        live = live & ~finished[row]
        alive = int(live.sum())
        if alive == 0 or n == max_new - 1:
            break
        if alive <= 0.75 * len(row):
            row, at, token, cache, live = row[live], at[live], token[live], cache[:, :, live], live[live]
        seen = -(-(longest + n + 1) // 16) * 16
        h = model(token[:, None], at[:, None], cache[..., :seen, :])[:, 0]                 # (b, C)
        at = at + 1
    T = longest + n + 1
    return Batch(ids[:, :T], mask[:, :T], finished, logp[:, :T])


def token_logps(model, ids, mask, temperature):
    """log pi of each sampled token, (B, T), 0 where mask is False. The shift by one lives here."""
    h = model(ids[:, :-1])                          # (B, T - 1, C), column t predicts token t + 1
    on = mask[:, 1:]
    logits = model.head(h[on]) / temperature                                               # (n, V)
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:][on][:, None])[:, 0]
    return F.pad(torch.zeros_like(on, dtype=logp.dtype).masked_scatter(on, logp), (1, 0))


def micro_batches(length, budget):
    """Rows (indices) in chunks of similar length: at most `budget` tokens with the padding, and
    no row padded to more than twice its length. length (B,) counts prompt and completion."""
    chunk, longest = [], 0
    for row in length.argsort(descending=True, stable=True).tolist():
        n = int(length[row])
        if chunk and ((len(chunk) + 1) * longest > budget or 2 * n < longest):
            yield torch.tensor(chunk, device=length.device), longest
            chunk = []
        if not chunk:
            longest = n
        chunk.append(row)
    if chunk:
        yield torch.tensor(chunk, device=length.device), longest


# ------------------------------------------------------------- rollout: rewards and advantages

def score(task, problems, texts, finished):
    """Reward (B,) and its components (B,) by name. An unfinished completion gave no answer: 0."""
    parts = [task.reward(problem, text) for problem, text in zip(problems, texts)]
    for problem, part in zip(problems, parts):
        for name, x in part.items():
            if not isinstance(x, numbers.Real) or not math.isfinite(x):
                raise Fault(f"the reward {name!r} of prompt {problem.prompt!r} is {x!r}, not a number")
    components = {name: torch.tensor([float(part[name]) for part in parts]) * finished.cpu()
                  for name in parts[0]}
    return sum(components.values()), components


def group_advantages(reward, group, scale):
    """Advantage (B,) of each row over its group, and which groups (P,) are dead.

    DeepSeekMath 4.1.2: (r - mean) / std. The std is that of the group itself, without Bessel's
    correction (the paper is silent): the mean square of the advantages is then 1 at every G. There
    is no epsilon, so the scale of the reward does not matter; a group whose rewards are equal up to
    rounding has nothing to compare and gets exactly 0.
    """
    r = reward.double().view(-1, group)                                                 # (P, G)
    adv = r - r.mean(1, keepdim=True)
    dead = r.amax(1) - r.amin(1) <= 1e-6 * r.abs().amax(1)                              # (P,)
    if scale == "group":
        adv = adv / adv.pow(2).mean(1, keepdim=True).sqrt()
    return adv.masked_fill(dead[:, None], 0).flatten().float(), dead


def complete(model, task, problems, group, cfg, encoding, source=None):
    """Sample and score `group` completions of each problem, greedy without a random `source`.

    Gives the Batch, the texts and the components of the rewards.
    """
    rank, ranks = world()
    u = None
    if source:          # drawn for all ranks, so that their number changes no sample
        u = uniforms(source, len(problems) * ranks, group, cfg.max_new)[rank::ranks].flatten(0, 1)
    batch = sample(model, [encoding.encode_ordinary(p.prompt) for p in problems], group,
                   cfg.max_new, cfg.temperature if source else 0, {encoding.eot_token}, u)
    stop = {encoding.eot_token}
    texts = [encoding.decode([t for t in row[on].tolist() if t not in stop])
             for row, on in zip(batch.ids.cpu(), batch.mask.cpu())]
    rows = [p for p in problems for _ in range(group)]
    batch.reward, components = score(task, rows, texts, batch.finished)
    return batch, texts, components


def rollout(model, ref, task, problems, cfg, encoding, source):
    """Completions, rewards and advantages of one step: Batch, texts, statistics."""
    batch, texts, components = complete(model, task, problems, cfg.group, cfg, encoding, source)
    adv, dead = group_advantages(batch.reward, cfg.group, cfg.scale)
    batch.adv = torch.where(batch.mask, adv.to(batch.ids.device)[:, None], 0)           # (B, T)
    batch.old_logp = batch.logp
    with torch.no_grad():
        if model.amp:   # the sampler's rounding is not the trainer's: ask the trainer
            batch.old_logp = all_logps(model, batch, cfg)
        if ref is not None:
            batch.ref_logp = all_logps(ref, batch, cfg)
    stats = {"reward": batch.reward, "accuracy": components["correct"], **components,
             "length": batch.mask.sum(1), "finished": batch.finished, "dead_groups": dead}
    means = all_reduce(torch.stack([x.float().mean().to(batch.ids.device) for x in stats.values()]))
    return batch, texts, dict(zip(stats, (means / world()[1]).tolist()))


def row_lengths(mask):
    """Tokens of each row without padding, (B,): its last sampled token is its last."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)


def all_logps(model, batch, cfg):
    """`token_logps` of a whole rollout, in micro-batches, without a graph."""
    out = torch.zeros_like(batch.logp)
    for rows, T in micro_batches(row_lengths(batch.mask), cfg.micro_tokens):
        out[rows, :T] = token_logps(model, batch.ids[rows, :T], batch.mask[rows, :T], cfg.temperature)
    return out


# ------------------------------------------------------------------------------------- the loss

def token_weights(mask, mean, rows, tokens, max_new):
    """What each token counts in the loss, (B, T); over all micro-batches and ranks it sums to 1.

    `rows` and `tokens` are the totals of the optimizer step. sequence: 1/|o| within a row, so a
    token of a long row weighs less (the paper's eq. 3); token: all the same; constant: the same
    whatever the lengths came out as (Dr. GRPO), the sum then is the share of max_new in use.
    """
    if mean == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / max(rows, 1)
    return mask / max(tokens if mean == "token" else rows * max_new, 1)


def bounded(x):
    """x, its value kept within 20 and its gradient as it is: exp(x) and its gradient stay finite."""
    return x + (x.clamp(-20, 20) - x).detach()


def policy_loss(logp, old_logp, ref_logp, adv, mask, weight, cfg):
    """Clipped surrogate (DeepSeekMath eq. 3) and k3 KL (eq. 4): scalar loss, dict of statistics.

    All but cfg (B, T). At the first update of a rollout the ratio is 1 and the loss about 0, but
    its gradient is not: -weight * (adv + beta * (pi_ref / pi - 1)) by logp, the paper's eq. 21.
    """
    kept = lambda x: torch.where(mask, x, 0)        # garbage elsewhere stays out of the gradient too
    logp, adv = kept(logp), kept(adv)
    ratio = bounded(logp - kept(old_logp)).exp()                                        # (B, T)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    surrogate = torch.minimum(ratio * adv, clipped * adv)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        r = bounded(kept(ref_logp) - logp)
        kl = r.expm1() - r                          # exp(r) - 1 - r loses all digits near 0
    loss = (weight * (cfg.beta * kl - surrogate)).sum()
    out = ((adv > 0) & (ratio > 1 + cfg.clip_high)) | ((adv < 0) & (ratio < 1 - cfg.clip_low))
    stats = {"loss": loss, "kl": (weight * kl).sum(), "entropy": -(weight * logp).sum(),
             "clip_share": (weight * out).sum()}
    return loss, {name: x.detach() for name, x in stats.items()}


# ----------------------------------------------------------------------------------- the update

def update(model, opt, batch, cfg, source, bound):
    """One rollout's optimizer steps: epochs x minibatches, each a sum over micro-batches and ranks.

    Changes model and opt; gives statistics, weighted as the loss and averaged over the optimizer
    steps. Raises Fault if before the first one the sampler's and the trainer's log-probabilities
    are further apart than `bound`: their ratio would be wrong from the start.
    """
    rank, ranks = world()
    rows = cfg.prompts * cfg.group
    mine = torch.arange(rows).view(-1, cfg.group)[rank::ranks].flatten()    # of the step's rows
    length = row_lengths(batch.mask)
    total, mismatch = Counter(), None
    for _ in range(cfg.epochs):
        for part in torch.tensor(source.sample(range(rows), rows)).tensor_split(cfg.minibatches):
            here = torch.isin(mine, part).nonzero()[:, 0].to(batch.ids.device)
            mask = batch.mask[here]
            weight = token_weights(mask, cfg.mean, len(part), all_reduce(mask.sum()), cfg.max_new)
            gap = torch.zeros((), device=mask.device)
            for micro, T in micro_batches(length[here], cfg.micro_tokens):
                at, on = here[micro], mask[micro, :T]
                logp = token_logps(model, batch.ids[at, :T], on, cfg.temperature)
                ref_logp = None if batch.ref_logp is None else batch.ref_logp[at, :T]
                loss, stats = policy_loss(logp, batch.old_logp[at, :T], ref_logp, batch.adv[at, :T],
                                          on, weight[micro, :T], cfg)
                loss.backward()
                total.update(stats)
                gap = torch.maximum(gap, (logp - batch.logp[at, :T]).detach().abs().max())
            if mismatch is None:
                mismatch = all_reduce(gap, dist.ReduceOp.MAX).item()
                if not mismatch <= bound:
                    raise Fault(f"sampler and trainer disagree: log-probabilities {mismatch:.2g} "
                                f"apart, more than the {bound} that rounding explains")
            total["grad_norm"] += optimizer_step(model, opt, cfg)
    n = cfg.epochs * cfg.minibatches
    means = {name: x / n for name, x in total.items()}
    for name in ("loss", "kl", "entropy", "clip_share"):
        means[name] = all_reduce(means[name]).item()
    return {**means, "mismatch": mismatch}


def optimizer_step(model, opt, cfg):
    """Sum the gradients over the ranks, clip, step, clear; the norm before clipping."""
    for p in model.parameters():
        p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip).item()
    if not math.isfinite(norm):
        raise Fault(f"the gradient is {norm}")
    opt.step()
    opt.zero_grad()
    return norm


def new_optimizer(model, lr):
    """AdamW without weight decay: the KL to the reference is what holds the weights here."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


# --------------------------------------------------------------------------------- the warm start

def warm_start(model, task, problems, cfg, encoding, stopping):
    """Supervised fine-tuning on demonstrations, drawn afresh at each step."""
    opt = new_optimizer(model, cfg.warm_lr)
    rank, ranks = world()
    device = model.norm.weight.device
    began = time.time()
    for step in range(cfg.warm_steps):
        if stopping():
            raise KeyboardInterrupt
        left = 1 - step / cfg.warm_steps
        for g in opt.param_groups:
            g["lr"] = cfg.warm_lr * min(left, (step + 1) / 30)
        source = rng(cfg, "warm start", step)
        rows = []
        for problem in source.choices(problems, k=cfg.warm_batch):
            prompt = encoding.encode_ordinary(problem.prompt)
            text = encoding.encode_ordinary(task.demonstration(problem, source))
            rows.append((prompt, text + [encoding.eot_token]))
        tokens = sum(len(completion) for _, completion in rows)
        rows = rows[rank::ranks]
        T = max(len(prompt) + len(completion) for prompt, completion in rows)
        ids = torch.zeros(len(rows), T, dtype=torch.int64)
        mask = torch.zeros(len(rows), T, dtype=torch.bool)
        for i, (prompt, completion) in enumerate(rows):
            ids[i, :len(prompt) + len(completion)] = torch.tensor(prompt + completion)
            mask[i, len(prompt):len(prompt) + len(completion)] = True
        ids, mask, loss = ids.to(device), mask.to(device), 0.0
        for micro, T in micro_batches(row_lengths(mask), cfg.micro_tokens):
            logp = token_logps(model, ids[micro, :T], mask[micro, :T], 1.0)
            part = -logp.sum() / tokens
            part.backward()
            loss += part.detach()
        optimizer_step(model, opt, cfg)
        if (step + 1) % max(1, cfg.warm_steps // 10) == 0:
            seconds = time.time() - began
            say(f"warm start {step + 1}/{cfg.warm_steps}  loss {all_reduce(loss).item():.3f}"
                f"  left {clock(seconds / (step + 1) * (cfg.warm_steps - step - 1))}")


# ------------------------------------------------------------------------------------- evaluation

def pass_at_k(n, c, k):
    """Chance that k of n completions, c of them right, hold a right one (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


@torch.no_grad()
def evaluate(model, task, problems, cfg, encoding, k=8):
    """Share of the problems solved: greedy, and from k samples pass@1, pass@k and the majority."""
    rank, ranks = world()
    source = rng(cfg, "evaluate", rank)
    size = max(1, cfg.prompts * cfg.group // k)     # as many rows at a time as in training
    total = torch.zeros(5, dtype=torch.float64)
    mine = problems[rank::ranks]
    for chunk in (mine[i:i + size] for i in range(0, len(mine), size)):
        _, _, greedy = complete(model, task, chunk, 1, cfg, encoding)
        _, texts, sampled = complete(model, task, chunk, k, cfg, encoding, source)
        for i, right in enumerate(sampled["correct"].view(-1, k).tolist()):
            votes = [task.answer(text) for text in texts[i * k:(i + 1) * k]]
            most = Counter(vote for vote in votes if vote).most_common(1)
            majority = right[votes.index(most[0][0])] if most else 0
            c = int(sum(right))
            total += torch.tensor([1, greedy["correct"][i], pass_at_k(k, c, 1),
                                   pass_at_k(k, c, k), majority])
    n, *shares = all_reduce(total).tolist()
    return dict(zip(("greedy", "pass@1", f"pass@{k}", f"maj@{k}"), (x / n for x in shares)))


# -------------------------------------------------------------------------------- the checkpoint

def save(cfg, step, model, ref, opt, encoding):
    """The policy for use, and everything that a resumed run needs in one file: whole or not at all.

    Random streams and the position in the data follow from the seed and the step.
    """
    tensors = {f"opt.{key}.{n}": x for n, p in model.named_parameters() for key, x in opt.state[p].items()}
    for role, module in (("model", model), ("ref", ref)):
        if module is not None:
            tensors |= {f"{role}.{n}": p.detach() for n, p in module.named_parameters()}
    sizes = {name: os.path.getsize(cfg.folder / name) for name in LOGS}
    state = dict(step=step, config=dataclasses.asdict(cfg), sizes=sizes)
    write_tensors(cfg.folder / "checkpoint.safetensors", tensors, {"grpo": json.dumps(state)})
    model.save_pretrained(cfg.folder, encoding.eot_token)


LOGS = ("metrics.jsonl", "samples.jsonl")


def load(cfg, tensors, model, ref, opt):
    """Put back what `save` wrote."""
    path = cfg.folder / "checkpoint.safetensors"
    pick = lambda role: {n[len(role):]: t for n, t in tensors.items() if n.startswith(role)}
    model.load_tensors(pick("model."), path)
    if ref is not None:
        ref.load_tensors(pick("ref."), path)
    keys = sorted({n.split(".")[1] for n in tensors if n.startswith("opt.")})
    for n, p in model.named_parameters():
        opt.state[p] = {key: tensors[f"opt.{key}.{n}"].to("cpu" if key == "step" else p.device)
                        for key in keys}


def find_run(folder):
    """(Config, step, tensors, log sizes) of the run in `folder`, at step 0 before its first save."""
    path = folder / "checkpoint.safetensors"
    step, tensors, sizes = 0, {}, dict.fromkeys(LOGS, 0)
    try:
        if path.exists():
            tensors, metadata = read_tensors(path)
            state = json.loads(metadata["grpo"])
            step, sizes = state["step"], state["sizes"]
        else:
            path = folder / "run.json"
            state = json.loads(path.read_text())
        return Config(**state["config"]), step, tensors, sizes
    except FileNotFoundError as e:
        raise Fault(f"no run to resume in {folder}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise Fault(f"{path} is not of a run of this program: {e}") from e


# --------------------------------------------------------------------------------- what one sees

def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def show_group(step, problem, batch, texts, group, encoding):
    """The first group of a rollout: printed, tokens coloured by advantage, and as a record."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    adv = [row[on].tolist() for row, on in zip(batch.adv[:group], batch.mask)]
    for ids, on, row, reward in list(zip(batch.ids, batch.mask, adv, batch.reward))[:4]:
        pieces = [encoding.decode([t]).replace("\n", " \u23ce ") for t in ids[on].tolist()]
        if colour:      # grey, green, red
            pieces = [f"\x1b[{90 if a == 0 else 32 if a > 0 else 31}m{s}\x1b[0m" for a, s in zip(row, pieces)]
        say(f"    {problem.prompt}{''.join(pieces)}   reward {reward:g}  advantage {row[0]:+.2f}")
    return {"step": step, "prompt": problem.prompt, "completions": texts[:group],
            "rewards": batch.reward[:group].tolist(),
            "advantages": [[round(a, 4) for a in row] for row in adv]}


def percent(results):
    return "  ".join(f"{name} {x:.1%}" for name, x in results.items())


# ------------------------------------------------------------------------------------- the run

def machine(cfg):
    """(device, dtype name, whether to compile), the best there is where cfg says auto."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(d for d in there if there[d]) if cfg.device == "auto" else cfg.device
    if not there[device]:
        raise Fault(f"--device {device}: there is none here")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    cuda = device.startswith("cuda")
    dtype = ("bfloat16" if cuda else "float32") if cfg.dtype == "auto" else cfg.dtype
    return torch.device(device), dtype, cuda if cfg.compile == "auto" else cfg.compile == "on"


def on_machine(model, cfg):
    """The model on the device, its matrix products in the dtype, that cfg chooses."""
    device, dtype, _ = machine(cfg)
    model.to(device).amp = torch.bfloat16 if dtype == "bfloat16" else None
    return model


def starting_model(cfg, task, problems, encoding, stopping):
    """The policy before RL: --init's, or a new one after its warm start, kept in the run's folder."""
    folder = cfg.folder / "warm_start"
    wanted = {name: getattr(cfg, name) for name in WARM}
    note = folder / "warm_start.json"
    cached = not cfg.init and note.exists() and json.loads(note.read_text()) == wanted
    if cfg.init or cached:
        say(f"starting from {cfg.init or folder}")
        model = GPT.from_pretrained(cfg.init or folder)
    else:
        longest = max(len(encoding.encode_ordinary(p.prompt)) for p in problems)
        model = GPT(GPTConfig(encoding.n_vocab, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.n_embd,
                              n_inner=-(-cfg.n_embd * 8 // 96) * 32,
                              block_size=1 << (longest + cfg.max_new - 1).bit_length()),
                    torch.Generator().manual_seed(rng(cfg, "weights").getrandbits(63)))
    on_machine(model, cfg)
    if not (cfg.init or cached):
        warm_start(model, task, problems, cfg, encoding, stopping)
        if world()[0] == 0:
            model.save_pretrained(folder, encoding.eot_token)
            write_whole(note, lambda p: p.write_text(json.dumps(wanted)))
    return model


WARM = ("task", "difficulty", "seed", "max_new", "n_layer", "n_head", "n_kv_head", "n_embd",
        "warm_steps", "warm_batch", "warm_lr")


def train(cfg, task, run=None):
    """A whole run; `run`, from `find_run`, is where a resumed one goes on."""
    rank, ranks = world()
    device, dtype, compiled = machine(cfg)
    if cfg.prompts % ranks:
        raise Fault(f"--prompts {cfg.prompts} do not divide among {ranks} ranks")
    encoding = byte_encoding()
    problems, held_out = task.problems(cfg)
    if len(problems) < cfg.prompts:
        raise Fault(f"--prompts {cfg.prompts}: the task has only {len(problems)} problems")
    stop = []       # signals received: the step is finished and saved before they are obeyed
    stopping = lambda: bool(all_reduce(torch.tensor(float(len(stop)), device=device)))
    before = {s: signal.signal(s, lambda s, _: stop.append(s)) for s in (signal.SIGINT, signal.SIGTERM)}

    # 1. The folder: what an older run logged beyond its last checkpoint never happened.
    done, tensors, sizes = run or (0, {}, dict.fromkeys(LOGS, 0))
    about = {"config": dataclasses.asdict(cfg), "command": sys.argv,
             "versions": {"python": platform.python_version(), "torch": torch.__version__}}
    if rank == 0:
        try:
            cfg.folder.mkdir(parents=True, exist_ok=True)
            if not done:
                (cfg.folder / "checkpoint.safetensors").unlink(missing_ok=True)
            for name, size in sizes.items():
                with open(cfg.folder / name, "ab") as f:
                    f.truncate(size)
            write_whole(cfg.folder / "run.json", lambda p: p.write_text(json.dumps(about, indent=1)))
        except OSError as e:
            raise Fault(f"cannot write in {cfg.folder}: {e.strerror}") from e

    def log(name, record):
        if rank == 0:
            with open(cfg.folder / name, "a") as f:
                f.write(json.dumps(record) + "\n")

    # 2. The models. The reference is the policy as it is before RL, and frozen.
    model = starting_model(cfg, task, problems, encoding, stopping)
    ref = copy.deepcopy(model).requires_grad_(False) if cfg.beta else None
    opt = new_optimizer(model, cfg.lr)
    if done:
        load(cfg, tensors, model, ref, opt)
    if compiled:
        model.compile(dynamic=True)
        if ref is not None:
            ref.compile(dynamic=True)
    n = sum(p.numel() for p in model.parameters())
    say(f"{n / 1e6:.2f}M parameters on {device} in {dtype}; {len(problems)} problems to train on, "
        f"{len(held_out)} held out; {cfg.prompts} x {cfg.group} completions a step")
    if not done:
        results = evaluate(model, task, held_out, cfg, encoding)
        say(f"step 0  {percent(results)}")
        log("metrics.jsonl", {"step": 0, **results})
        if rank == 0:
            model.save_pretrained(cfg.folder, encoding.eot_token)

    # 3. The steps.
    seconds, idle = [], 0
    for step in range(done + 1, cfg.steps + 1):
        began = time.perf_counter()
        chosen = rng(cfg, "problems", step).sample(problems, cfg.prompts)[rank::ranks]
        batch, texts, stats = rollout(model, ref, task, chosen, cfg, encoding, rng(cfg, "rollout", step))
        sampled = time.perf_counter()
        stats |= update(model, opt, batch, cfg, rng(cfg, "update", step), MISMATCH[dtype])
        ended = time.perf_counter()
        tokens = all_reduce(batch.mask.sum()).item()
        stats |= {"seconds": ended - began, "rollout_tok_s": tokens / (sampled - began),
                  "update_tok_s": tokens / (ended - sampled)}
        seconds.append(ended - began)
        say(f"step {step}/{cfg.steps}  reward {stats['reward']:.3f}  accuracy {stats['accuracy']:.3f}  "
            f"length {stats['length']:.1f}  kl {stats['kl']:.4f}  entropy {stats['entropy']:.3f}  "
            f"clip {stats['clip_share']:.3f}  {stats['seconds']:.2f} s  "
            f"left {clock(statistics.median(seconds[-9:]) * (cfg.steps - step))}")
        idle = idle + 1 if stats["dead_groups"] == 1 or stats["finished"] == 0 else 0
        if idle == 3:
            say("warning: for 3 steps no completion ended, or all rewards of each group were equal: "
                "there is nothing to learn from")
        last = step == cfg.steps
        if last or cfg.eval_every and step % cfg.eval_every == 0:
            results = evaluate(model, task, held_out, cfg, encoding)
            say(f"step {step}  {percent(results)}")
            stats |= results
        log("metrics.jsonl", {"step": step, **stats})
        halt = stopping()
        if last or halt or step % cfg.save_every == 0:
            log("samples.jsonl", show_group(step, chosen[0], batch, texts, cfg.group, encoding))
            if rank == 0:
                save(cfg, step, model, ref, opt, encoding)
        if halt and not last:
            say(f"stopped after step {step}; go on with: python grpo.py --resume --out {cfg.folder}")
            sys.exit(128 + max(stop, default=0))
    for s, handler in before.items():
        signal.signal(s, handler)
    say(f"the model is in {cfg.folder}; ask it: python grpo.py --init {cfg.folder} "
        f"--ask \"{held_out[0].prompt}\"")


def ask(cfg, question):
    """The greedy completion of a question by the model of --init, or else of the run's folder."""
    model = on_machine(GPT.from_pretrained(cfg.init or cfg.folder), cfg)
    encoding = byte_encoding()
    prompt = encoding.encode_ordinary(question)
    batch = sample(model, [prompt], 1, min(cfg.max_new, model.cfg.block_size - len(prompt)), 0,
                   {encoding.eot_token})
    return question + encoding.decode(batch.ids[0][batch.mask[0]].tolist()).removesuffix(END)


# ------------------------------------------------------------------------------ the command line

def read_command(argv):
    """(Config, its task, mode arguments, find_run's rest or None) of a command line."""
    help_ = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, exit_on_error=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Config):
        parser.add_argument(f"--{f.name}", type=f.type, default=argparse.SUPPRESS,
                            help=f"{help_[f.name]} ({f.default})".replace("%", "%%"))
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--eval_only", action="store_true", help="only measure the model of --init or --out")
    parser.add_argument("--ask", metavar="QUESTION", help="only let that model answer")
    try:
        args, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as e:
        raise Fault(str(e)) from e
    if unknown:
        raise Fault(f"unknown argument {unknown[0]}; python grpo.py --help lists the flags")
    flags = vars(args)
    mode = {name: flags.pop(name) for name in ("resume", "eval_only", "ask")}
    task = load_task(flags.get("task", Config.task))
    cfg = Config(**{**task.DEFAULTS, **flags})
    if not mode["resume"]:
        return cfg, task, mode, None
    old, *run = find_run(cfg.folder)
    for name, x in flags.items():
        if name not in MAY_CHANGE and x != getattr(old, name):
            raise Fault(f"the run in {cfg.folder} has --{name} {getattr(old, name)}, not {x}; "
                        f"a resumed run may change only {', '.join(sorted(MAY_CHANGE))}")
    cfg = dataclasses.replace(old, **{name: flags[name] for name in MAY_CHANGE & flags.keys()})
    return cfg, load_task(cfg.task), mode, run


def main(argv=None):
    try:
        cfg, task, mode, run = read_command(argv)
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if machine(cfg)[0].type == "cuda" else "gloo")
        if mode["ask"] is not None:
            print(ask(cfg, mode["ask"]))
        elif mode["eval_only"]:
            model = on_machine(GPT.from_pretrained(cfg.init or cfg.folder), cfg)
            say(percent(evaluate(model, task, task.problems(cfg)[1], cfg, byte_encoding())))
        else:
            train(cfg, task, run)
    except Fault as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
