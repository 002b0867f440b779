"""
GRPO, Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4), in one file.

Kept from the paper: G completions of each prompt from the old policy; the z-score of the reward in
this group as the advantage of every token (4.1.2); the clipped ratio of each token, averaged over
the completion, then over the group (eq. 3); the k3 estimator of the KL to a frozen reference,
inside the loss (eq. 4); one update after each sampling stage. Changed: where the paper is silent
(clip range, the std's denominator) the choice and its reason stand beside the line.

    python grpo.py --task arithmetic                      # warm start, then GRPO, on a laptop
    python grpo.py --resume                               # go on after Ctrl-C, a crash or a kill
    python grpo.py --ask "47*58=" --init out/arithmetic   # try the result
    torchrun --nproc_per_node 2 grpo.py                   # the same run, prompts dealt to 2 ranks

P prompts, G completions of each, B = P * G rows (row = p * G + g), T tokens of the longest row,
N most new tokens, V vocabulary, C channels. Column t of every (B, T) tensor belongs to token t.

    ids        (B, T) int64    prompt, completion, padding on the right
    mask       (B, T) bool     True where the policy sampled the token, the end token included
    finished   (B,)   bool     the row ended with a stop token, not at the limit of N tokens
    logp       (B, T) float32  log pi(ids[:, t] given ids[:, :t]) at the sampling temperature
    old_logp, ref_logp         the same under the old policy and under the reference
    reward     (B,)   float32
    adv        (B, T) float32  advantage
    weight     (B, T) float32  share of a token in the loss = (weight * per_token).sum()
"""
import argparse
import copy
import dataclasses
import inspect
import json
import math
import os
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
from torch.nn.utils.rnn import pad_sequence

from data import load_task
from data.tokenizer import byte_encoding, coloured, decode
from model import (GPT, Fault, GPTConfig, all_reduce, keep_memory, load_training_state, machine,
                   micro_batches, read_tensors, row_lengths, say, start_ranks, training_state,
                   world, write_tensors, write_whole)
from reward import score

# ---------------------------------------------------------------------------------- the settings

@dataclass(frozen=True)
class Config:
    """One run. A field is a flag, its comment the flag's help; a task sets defaults of its own."""
    task: str = "arithmetic"    # what to learn: the file data/<task>.py
    difficulty: int = 2         # of its problems; arithmetic: digits of each factor
    init: str = ""              # folder of a model to start from; empty: a new one, warm-started
    out: str = ""               # the run's folder; empty: out/<task>
    seed: int = 1               # of everything random
    steps: int = 100            # rollouts, each followed by its update
    eval_every: int = 0         # steps between evaluations; 0: before the first and after the last
    save_every: int = 10        # steps between checkpoints
    # rollout: the paper samples 64 completions a question, 1024 in a batch, of up to 1024 tokens
    prompts: int = 16           # P, problems of a step
    group: int = 64             # G, completions of each problem
    max_new: int = 1024         # N, most tokens of a completion
    temperature: float = 1.0    # of sampling, and so of every log-probability
    # loss
    clip_low: float = 0.2       # the ratio is clipped below 1 - this (PPO's; the paper is silent)
    clip_high: float = 0.2      # and above 1 + this
    beta: float = 0.04          # weight of the KL to the reference
    scale: str = "group"        # divide advantages by the std of their group, or by none
    mean: str = "sequence"      # over tokens: sequence (1/|o| in each row, eq. 3), token, constant
    # update
    epochs: int = 1             # passes over a rollout, the paper's mu
    minibatches: int = 1        # optimizer steps of a pass
    micro_tokens: int = 2048    # most tokens of one forward and backward; for memory and speed only
    lr: float = 1e-6            # constant, as in the paper
    grad_clip: float = 1.0      # largest norm of a gradient
    # a new model, and its warm start: supervised fine-tuning on the task's demonstrations
    n_layer: int = 2            # layers
    n_head: int = 8             # query heads
    n_kv_head: int = 1          # key/value heads
    n_embd: int = 256           # channels
    warm_steps: int = 1500      # optimizer steps
    warm_batch: int = 48        # demonstrations of a step
    warm_lr: float = 1.2e-3     # at its peak: a short rise, then linearly to 0
    # machine
    device: str = "auto"        # cuda, mps or cpu; auto: the first there is
    dtype: str = "auto"         # of matrix products: float32 or bfloat16; auto: bfloat16 on cuda
    compile: str = "auto"       # torch.compile, on or off; auto: on with cuda

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise Fault(f"--{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for f in dataclasses.fields(self):
            value, least = getattr(self, f.name), LEAST.get(f.name, 1)
            if f.type is not str and not (math.isfinite(value) and value >= least):
                raise Fault(f"--{f.name} is at least {least}, not {value}")
        if self.minibatches > self.prompts * self.group:
            raise Fault(f"--minibatches {self.minibatches}: a rollout has only "
                        f"{self.prompts * self.group} rows")

    @property
    def folder(self):
        return Path(self.out or f"out/{self.task}")

CHOICES = dict(scale=("group", "none"), mean=("sequence", "token", "constant"),
               device=("auto", "cuda", "mps", "cpu"), dtype=("auto", "float32", "bfloat16"),
               compile=("auto", "on", "off"))
# The least value of a number, where it is not 1. A group of one has no spread: its z-score is 0/0.
LEAST = dict(group=2, seed=0, steps=0, eval_every=0, temperature=1e-3, clip_low=0, clip_high=0,
             beta=0, lr=0, grad_clip=1e-9, warm_steps=0, warm_lr=0)
MAY_CHANGE = {"out", "steps", "eval_every", "save_every"}   # on --resume: they alter no step made
WARM = ("task", "difficulty", "seed", "max_new", "n_layer", "n_head", "n_kv_head", "n_embd",
        "warm_steps", "warm_batch", "warm_lr")                  # what a warm start depends on
# The largest gap between the sampler's and the trainer's log-probability of a token before the
# first optimizer step. More is not rounding: the two disagree, and every ratio is wrong.
MISMATCH = {"float32": 1e-4, "bfloat16": 0.5}

def rng(cfg, purpose, at=0):
    """A random stream for each purpose and step: it follows from the seed, so nothing is stored."""
    return random.Random(f"{cfg.seed}/{purpose}/{at}")

# ------------------------------------------------------------------- sampling: prompts to a group

@dataclass
class Batch:
    """The rows of a rollout; the fields are explained at the top of the file."""
    ids: torch.Tensor
    mask: torch.Tensor
    finished: torch.Tensor
    logp: torch.Tensor              # as the sampler saw it
    old_logp: torch.Tensor = None
    ref_logp: torch.Tensor = None
    reward: torch.Tensor = None
    adv: torch.Tensor = None

@torch.no_grad()
def sample(model, prompts, group, max_new, temperature, stop, u=None):
    """`group` completions of each prompt (a list of ids): a Batch with ids, mask, finished, logp.

    Token n of a row is where its cumulative distribution passes u[row, n], u (B, max_new) uniform
    in [0, 1), whatever the other rows do; temperature 0 is greedy. `stop`: the ids that end a row.
    """
    device, P, longest = model.norm.weight.device, len(prompts), max(map(len, prompts))
    T = longest + max_new
    if min(map(len, prompts)) == 0 or T > model.cfg.block_size:
        raise Fault(f"an empty prompt, or one of {longest} tokens, and {max_new} new ones do not "
                    f"fit the model's context of {model.cfg.block_size}")
    by_16 = lambda n: -(-n // 16) * 16      # slots of the cache, in steps: few shapes to compile

    # 1. Read each prompt once, and hand its cache to the whole group.
    ids = torch.tensor([p + [0] * (T - len(p)) for p in prompts], device=device)           # (P, T)
    at = torch.tensor([len(p) for p in prompts], device=device)                            # (P,)
    pos = torch.arange(longest, device=device).expand(P, -1)
    cache = model.new_cache(P, by_16(T))
    h = model(ids[:, :longest], pos, cache[..., :by_16(longest), :])                    # (P, ., C)
    h = h[torch.arange(P, device=device), at - 1]                                          # (P, C)
    h, ids, at = (x.repeat_interleave(group, 0) for x in (h, ids, at))
    cache = cache.repeat_interleave(group, 2)
    mask, logp = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.float32)
    finished = torch.zeros_like(at, dtype=torch.bool)
    stop = torch.tensor(sorted(stop), device=device)
    u = u if u is None else u.to(device, torch.float32 if device.type == "mps" else torch.float64)

    # 2. A token a turn. `row` (b,): the rows in the decode batch, `live` while not finished; `at`:
    # the column that each samples next.
    row, live = torch.arange(len(at), device=device), ~finished
    for n in range(max_new):
        logits = model.head(h)                                                          # (b, V)
        logps = (logits / temperature if temperature else logits).log_softmax(-1)
        if temperature:
            cdf = logps.to(u.dtype).exp().cumsum(-1)
            token = torch.searchsorted(cdf, u[row, n, None] * cdf[:, -1:], right=True)[:, 0]
            token = token.clamp(max=logps.size(-1) - 1)
        else:
            token = logits.argmax(-1)
        r, c, t = row[live], at[live], token[live]
        ids[r, c], mask[r, c], finished[r] = t, True, torch.isin(t, stop)
        logp[r, c] = logps[live].gather(-1, t[:, None])[:, 0]

        # 3. Finished rows leave once they are a tenth of the batch: copying the cache costs too.
        live = live & ~finished[row]
        left = int(live.sum())
        if left == 0 or n + 1 == max_new:
            break
        if left <= 0.9 * len(row):
            row, at, token = row[live], at[live], token[live]
            cache, live = cache[:, :, live], live[live]
        seen = cache[..., :by_16(longest + n + 1), :]
        h = model(token[:, None], at[:, None], seen)[:, 0]                              # (b, C)
        at = at + 1
    T = longest + n + 1
    return Batch(ids[:, :T], mask[:, :T], finished, logp[:, :T])

def token_logps(model, ids, mask, temperature):
    """log pi of each sampled token, (B, T), 0 where mask is False. The shift by one lives here."""
    h = model(ids[:, :-1])                          # (B, T - 1, C): column t predicts token t + 1
    on = mask[:, 1:]
    logits = model.head(h[on]) / temperature                                               # (n, V)
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:][on][:, None])[:, 0]
    return F.pad(torch.zeros_like(on, dtype=logp.dtype).masked_scatter(on, logp), (1, 0))

# ------------------------------------------------------------------ rollout: rewards, advantages

def group_advantages(reward, group, scale):
    """Advantage (B,) of each row in its group, (r - mean) / std (DeepSeekMath 4.1.2); dead (P,).

    The std is without Bessel's correction (the paper is silent): the mean square is 1 at every G.
    No epsilon: the reward's scale does not matter. Rewards equal up to rounding get exactly 0.
    """
    r = reward.double().view(-1, group)                                                    # (P, G)
    adv = r - r.mean(1, keepdim=True)
    dead = r.amax(1) - r.amin(1) <= 1e-6 * r.abs().amax(1)                                 # (P,)
    if scale == "group":
        adv = adv / adv.square().mean(1, keepdim=True).sqrt()
    return adv.masked_fill(dead[:, None], 0).flatten().float(), dead

def complete(model, task, problems, group, cfg, encoding, source=None):
    """Sample and score `group` completions of each problem, greedily without a random `source`:
    the Batch, its texts, and the components (B,) of its rewards by name."""
    rank, ranks = world()
    u = None
    if source:          # drawn for all ranks alike: their number changes no sample
        shape = len(problems) * ranks, group, cfg.max_new
        u = np.random.default_rng(source.getrandbits(64)).random(shape)[rank::ranks]
        u = torch.from_numpy(u).flatten(0, 1)
    batch = sample(model, [encoding.encode_ordinary(p.prompt) for p in problems], group,
                   cfg.max_new, cfg.temperature if source else 0, {encoding.eot_token}, u)
    texts = [decode(encoding, row[on].tolist()) for row, on in zip(batch.ids, batch.mask)]
    rows = [p for p in problems for _ in range(group)]
    parts = score(task, rows, texts, batch.finished.tolist())
    parts = {name: torch.tensor(x) for name, x in parts.items()}
    batch.reward = sum(parts.values())
    return batch, texts, parts

def rollout(model, ref, task, problems, cfg, encoding, source):
    """One step's completions, rewards and advantages: Batch, texts, statistics."""
    batch, texts, parts = complete(model, task, problems, cfg.group, cfg, encoding, source)
    adv, dead = group_advantages(batch.reward, cfg.group, cfg.scale)
    batch.adv = torch.where(batch.mask, adv.to(batch.ids.device)[:, None], 0)              # (B, T)
    # Under bfloat16 the sampler rounds otherwise than the trainer, so the trainer is asked.
    batch.old_logp = all_logps(model, batch, cfg) if model.amp else batch.logp
    batch.ref_logp = all_logps(ref, batch, cfg) if ref is not None else None
    stats = {"reward": batch.reward, "accuracy": parts["correct"], **parts, "dead_groups": dead,
             "length": batch.mask.sum(1), "finished": batch.finished}
    means = all_reduce(torch.stack([x.float().mean().to(batch.ids.device) for x in stats.values()]))
    return batch, texts, dict(zip(stats, (means / world()[1]).tolist()))

@torch.no_grad()
def all_logps(model, batch, cfg):
    """`token_logps` of a whole rollout, in micro-batches and without a graph."""
    out = torch.zeros_like(batch.logp)
    for rows, T in micro_batches(row_lengths(batch.mask), cfg.micro_tokens):
        ids, mask = batch.ids[rows, :T], batch.mask[rows, :T]
        out[rows, :T] = token_logps(model, ids, mask, cfg.temperature)
    return out

# -------------------------------------------------------------------------------------- the loss

def token_weights(mask, mean, rows, tokens, max_new):
    """What each token counts in the loss, (B, T); `rows` and `tokens` are of the whole optimizer
    step, all its micro-batches and ranks. sequence: 1/|o| in each row (eq. 3), so tokens of long
    rows count less; token: all alike; constant: alike, whatever lengths came out (Dr. GRPO)."""
    if mean == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / max(rows, 1)
    return mask / max(tokens if mean == "token" else rows * max_new, 1)

def bounded(x):
    """x with its value, not its gradient, held within 20: exp(x) and its gradient stay finite."""
    return x + (x.clamp(-20, 20) - x).detach()

def policy_loss(logp, old_logp, ref_logp, adv, mask, weight, cfg):
    """Clipped surrogate (DeepSeekMath eq. 3) with the k3 KL (eq. 4): the loss and its statistics.

    All (B, T). In the first update of a rollout the ratio is 1 and the loss about 0, but by logp
    its gradient is -weight * (adv + beta * (pi_ref / pi - 1)): the paper's eq. 21.
    """
    kept = lambda x: torch.where(mask, x, 0)        # elsewhere even NaN stays out of the gradient
    logp, adv = kept(logp), kept(adv)
    ratio = bounded(logp - kept(old_logp)).exp()                                           # (B, T)
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        r = bounded(kept(ref_logp) - logp)
        kl = r.expm1() - r                          # exp(r) - 1 - r would lose its digits near 0
    loss = (weight * (cfg.beta * kl - surrogate)).sum()
    out = ((adv > 0) & (ratio > 1 + cfg.clip_high)) | ((adv < 0) & (ratio < 1 - cfg.clip_low))
    stats = {"loss": loss, "kl": (weight * kl).sum(), "entropy": -(weight * logp).sum(),
             "clip_share": (weight * out).sum()}
    return loss, {name: x.detach() for name, x in stats.items()}

# ------------------------------------------------------------------------------------ the update

def update(model, opt, batch, cfg, source, bound):
    """The optimizer steps of one rollout: epochs x minibatches, each summed over micro-batches and
    ranks. Changes model and opt; gives their mean statistics. Raises Fault if before the first
    step the sampler's and the trainer's log-probabilities are more than `bound` apart."""
    rank, ranks = world()
    rows = cfg.prompts * cfg.group
    mine = torch.arange(rows).view(-1, cfg.group)[rank::ranks].flatten()    # which rows of the step
    length = row_lengths(batch.mask)
    total, mismatch = Counter(), None
    for _ in range(cfg.epochs):
        for part in torch.tensor(source.sample(range(rows), rows)).tensor_split(cfg.minibatches):
            here = torch.isin(mine, part).nonzero()[:, 0].to(batch.ids.device)
            mask, gap = batch.mask[here], batch.logp.new_zeros(())
            weight = token_weights(mask, cfg.mean, len(part), all_reduce(mask.sum()), cfg.max_new)
            for micro, T in micro_batches(length[here], cfg.micro_tokens):
                at, on = here[micro], mask[micro, :T]
                logp = token_logps(model, batch.ids[at, :T], on, cfg.temperature)
                ref_logp = None if batch.ref_logp is None else batch.ref_logp[at, :T]
                loss, stats = policy_loss(logp, batch.old_logp[at, :T], ref_logp, batch.adv[at, :T],
                                          on, weight[micro, :T], cfg)
                loss.backward()
                total.update(stats)
                gap = torch.maximum(gap, (logp.detach() - batch.logp[at, :T]).abs().max())
            if mismatch is None:
                mismatch = all_reduce(gap, dist.ReduceOp.MAX).item()
                if not mismatch <= bound:
                    raise Fault(f"sampler and trainer disagree: their log-probabilities are "
                                f"{mismatch:.2g} apart, more than the {bound} of rounding")
            total["grad_norm"] += optimizer_step(model, opt, cfg) / ranks
    n = cfg.epochs * cfg.minibatches
    sums = torch.stack([torch.as_tensor(x, device=length.device) for x in total.values()])
    return dict(zip(total, (all_reduce(sums) / n).tolist())) | {"mismatch": mismatch}

def optimizer_step(model, opt, cfg):
    """Sum the gradients over the ranks, clip, step, clear. Gives the norm before clipping."""
    for p in model.parameters():
        p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip).item()
    if not math.isfinite(norm):
        raise Fault(f"the norm of the gradient is {norm}")
    opt.step()
    opt.zero_grad()
    return norm

def new_optimizer(model, lr):
    """AdamW without weight decay: what holds the weights here is the KL to the reference."""
    return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0, fused=True)

# -------------------------------------------------------------------------------- the warm start

def warm_start(model, task, problems, cfg, encoding):
    """Supervised fine-tuning on fresh demonstrations; the learning rate rises, then falls to 0."""
    opt = new_optimizer(model, cfg.warm_lr)
    rank, ranks = world()
    device, encode, began = model.norm.weight.device, encoding.encode_ordinary, time.time()
    for step in range(cfg.warm_steps):
        if stop_asked(device):
            raise Stopped("in the warm start, which will begin anew")
        opt.param_groups[0]["lr"] = cfg.warm_lr * min(1 - step / cfg.warm_steps, (step + 1) / 30)
        source = rng(cfg, "warm start", step)
        rows = [(encode(p.prompt), encode(task.demonstration(p, source)) + [encoding.eot_token])
                for p in source.choices(problems, k=cfg.warm_batch)]
        tokens = sum(len(text) for _, text in rows)         # of all ranks; this one takes its rows
        rows = rows[rank::ranks]
        pad = lambda rows: pad_sequence([torch.tensor(r, device=device) for r in rows], True)
        ids = pad([prompt + text for prompt, text in rows])
        mask = pad([[False] * len(prompt) + [True] * len(text) for prompt, text in rows])
        loss = 0.0
        for micro, T in micro_batches(row_lengths(mask), cfg.micro_tokens):
            part = -token_logps(model, ids[micro, :T], mask[micro, :T], 1.0).sum() / tokens
            part.backward()
            loss += part.detach()
        optimizer_step(model, opt, cfg)
        if (step + 1) % max(1, cfg.warm_steps // 10) == 0:
            left = (time.time() - began) / (step + 1) * (cfg.warm_steps - step - 1)
            say(f"warm start {step + 1}/{cfg.warm_steps}  loss {all_reduce(loss).item():.3f}  "
                f"left {clock(left)}")

def starting_model(cfg, task, problems, longest, encoding):
    """The policy before RL: --init's, or a new one after its warm start, which is kept in the run's
    folder and taken from there by the next run that would make the same."""
    folder = cfg.folder / "warm_start"
    note = folder / "warm_start.json"
    wanted = json.dumps({name: getattr(cfg, name) for name in WARM})
    if cfg.init or note.exists() and note.read_text() == wanted:
        say(f"starting from {cfg.init or folder}")
        return GPT.from_pretrained(cfg.init or folder).place(cfg)
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    shape = GPTConfig(encoding.n_vocab, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.n_embd,
                      n_inner=4 * cfg.n_embd, block_size=context)
    seed = rng(cfg, "weights").getrandbits(63)
    model = GPT(shape, torch.Generator().manual_seed(seed)).place(cfg)
    warm_start(model, task, problems, cfg, encoding)
    if world()[0] == 0:
        model.save_pretrained(folder, encoding.eot_token)
        write_whole(note, wanted)
    return model

# ------------------------------------------------------------------------------------ evaluation

def pass_at_k(n, c, k):
    """Chance that k of n completions, c of them right, hold a right one (Chen et al. 2021)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)

def evaluate(model, task, problems, cfg, encoding, k=8):
    """Share of the problems solved: greedily, and by k samples as pass@1, pass@k and majority."""
    rank, ranks = world()
    source = rng(cfg, "evaluate", rank)
    size = max(1, cfg.prompts * cfg.group // k)     # problems at a time: rows as in training
    mine = problems[rank::ranks]
    total = torch.zeros(5, device=model.norm.weight.device)
    for chunk in (mine[i:i + size] for i in range(0, len(mine), size)):
        _, _, greedy = complete(model, task, chunk, 1, cfg, encoding)
        _, texts, sampled = complete(model, task, chunk, k, cfg, encoding, source)
        for i, right in enumerate(sampled["correct"].view(-1, k).tolist()):
            answers = [task.answer(text) for text in texts[i * k:(i + 1) * k]]
            votes = Counter(answer for answer in answers if answer).most_common(1)
            c, majority = int(sum(right)), right[answers.index(votes[0][0])] if votes else 0.0
            total += torch.tensor([1, greedy["correct"][i], pass_at_k(k, c, 1), pass_at_k(k, c, k),
                                   majority], device=total.device)
    n, *solved = all_reduce(total).tolist()
    return dict(zip(("greedy", "pass@1", f"pass@{k}", f"maj@{k}"), (x / n for x in solved)))

# ------------------------------------------------------------------------------ the run's folder

LOGS = ("metrics.jsonl", "samples.jsonl")

def save(cfg, step, tensors):
    """All that a resumed run needs, in one file, whole or not at all; `step`: the last one made,
    -1 before there is a model. What is random and where the run stands in its problems follow from
    seed and step. What was logged later than this will be made anew, so the sizes are kept."""
    sizes = {name: os.path.getsize(cfg.folder / name) if tensors else 0 for name in LOGS}
    state = {"step": step, "config": dataclasses.asdict(cfg), "sizes": sizes}
    write_tensors(cfg.folder / "checkpoint.safetensors", tensors, {"grpo": json.dumps(state)})

def find_run(folder):
    """What `save` left in `folder`: Config, step, tensors, sizes of the logs."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise Fault(f"no run in {folder}")
    tensors, metadata = read_tensors(path)
    try:
        state = json.loads(metadata["grpo"])
        return Config(**state["config"]), state["step"], tensors, state["sizes"]
    except (KeyError, TypeError, ValueError) as e:
        raise Fault(f"{path} is not of a run of this program ({type(e).__name__}: {e})") from e

def open_folder(cfg, run):
    """Make the folder of a new run, or cut a resumed one's logs back to its checkpoint."""
    about = {"config": dataclasses.asdict(cfg), "command": sys.argv,
             "versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
    try:
        cfg.folder.mkdir(parents=True, exist_ok=True)
        write_whole(cfg.folder / "run.json", json.dumps(about, indent=1))
        if run is None:
            save(cfg, -1, {})
        for name in LOGS:
            with open(cfg.folder / name, "ab") as f:
                f.truncate(run[2][name] if run else 0)
    except OSError as e:
        raise Fault(f"cannot write in {cfg.folder}: {e.strerror}") from e

def log(cfg, name, record):
    """Add a line to metrics.jsonl or samples.jsonl."""
    if world()[0] == 0:
        with open(cfg.folder / name, "a") as f:
            f.write(json.dumps(record) + "\n")

# --------------------------------------------------------------------------------- what one sees

SHOWN = ("reward", "accuracy", "length", "kl", "entropy", "clip_share")

def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

def percent(results):
    return "  ".join(f"{name} {x:.1%}" for name, x in results.items())

def show_group(step, problem, batch, texts, group, encoding):
    """The first group of a rollout: printed, its tokens coloured by advantage, and as a record."""
    adv = [row[on].tolist() for row, on in zip(batch.adv[:group], batch.mask)]
    for ids, on, row, reward in list(zip(batch.ids, batch.mask, adv, batch.reward))[:4]:
        say(f"    {problem.prompt}{coloured(encoding, ids[on].tolist(), row)}   reward {reward:g}  "
            f"advantage {row[0]:+.2f}")
    return {"step": step, "prompt": problem.prompt, "completions": texts[:group],
            "rewards": batch.reward[:group].tolist(),
            "advantages": [[round(a, 4) for a in row] for row in adv]}

# --------------------------------------------------------------------------------------- the run

class Stopped(Exception):
    """A signal asked to stop; all that was made is saved."""

ASKED = []      # signals that came: the step in progress is finished and saved first

def stop_asked(device):
    """Whether a signal came to any rank."""
    return all_reduce(torch.tensor(float(sum(ASKED)), device=device)).item() > 0

def train(cfg, task, run=None):
    """A whole run, or the rest of one: `run` is what `find_run` found behind the Config."""
    # 1. What it works on.
    rank, ranks = world()
    device, dtype, compiled = machine(cfg)
    encoding = byte_encoding()
    problems, held_out = task.problems(cfg)
    longest = max(len(encoding.encode_ordinary(p.prompt)) for p in problems + held_out)
    if cfg.prompts % ranks or cfg.prompts > len(problems):
        raise Fault(f"--prompts {cfg.prompts}: not to be had of {len(problems)} problems, or not "
                    f"to be divided among {ranks} ranks")
    if rank == 0:
        open_folder(cfg, run)

    # 2. The models. The reference is the policy as it is before RL, and stays so.
    model = starting_model(cfg, task, problems, longest, encoding)
    if longest + cfg.max_new > model.cfg.block_size:
        raise Fault(f"{longest} tokens of a prompt and --max_new {cfg.max_new} do not fit the "
                    f"model's context of {model.cfg.block_size}")
    ref = copy.deepcopy(model).requires_grad_(False) if cfg.beta else None
    opt = new_optimizer(model, cfg.lr)
    done, tensors, _ = run or (-1, {}, {})
    if tensors:
        load_training_state(tensors, cfg.folder / "checkpoint.safetensors", model, ref, opt)
    for module in (model, ref):
        if compiled and module is not None:
            module.compile(dynamic=True)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    say(f"{millions:.2f}M parameters on {device} in {dtype}; {len(problems)} problems, "
        f"{len(held_out)} held out; {cfg.prompts} x {cfg.group} rows a step")

    # 3. The steps; 0 only measures.
    times, idle = [], 0
    for step in range(done + 1, cfg.steps + 1):
        began, last, stats = time.perf_counter(), step == cfg.steps, {}
        if step > 0:
            mine = rng(cfg, "problems", step).sample(problems, cfg.prompts)[rank::ranks]
            batch, texts, stats = rollout(model, ref, task, mine, cfg, encoding,
                                          rng(cfg, "rollout", step))
            sampled = time.perf_counter()
            stats |= update(model, opt, batch, cfg, rng(cfg, "update", step), MISMATCH[dtype])
            ended = time.perf_counter()
            times.append(ended - began)
            tokens = all_reduce(batch.mask.sum()).item()
            stats |= {"seconds": times[-1], "rollout_tok_s": tokens / (sampled - began),
                      "update_tok_s": tokens / (ended - sampled)}
            left = statistics.median(times[-9:]) * (cfg.steps - step)
            say(f"step {step}/{cfg.steps}  " + "".join(f"{k} {stats[k]:.3f}  " for k in SHOWN)
                + f"{times[-1]:.2f} s  left {clock(left)}")
            idle = idle + 1 if stats["dead_groups"] == 1 or stats["finished"] == 0 else 0
            if idle == 3:
                say("warning: nothing to learn from in 3 steps: in every group all rewards were "
                    "equal, or no completion ended")
        if last or step == 0 or cfg.eval_every and step % cfg.eval_every == 0:
            results = evaluate(model, task, held_out, cfg, encoding)
            say(f"step {step}  held out: {percent(results)}")
            stats |= results
        log(cfg, "metrics.jsonl", {"step": step, **stats})
        halt = stop_asked(device)
        if last or halt or step % cfg.save_every == 0:
            if step > 0:
                record = show_group(step, mine[0], batch, texts, cfg.group, encoding)
                log(cfg, "samples.jsonl", record)
            if rank == 0:
                save(cfg, step, training_state(model, ref, opt))
                model.save_pretrained(cfg.folder, encoding.eot_token)
        if halt and not last:
            raise Stopped(f"after step {step}")
    say(f"the model is in {cfg.folder}; ask it: python grpo.py --ask \"{held_out[0].prompt}\" "
        f"--init {cfg.folder}")

def ask(cfg, question):
    """The greedy completion of a question by the model of --init, or else of the run's folder."""
    model, encoding = GPT.from_pretrained(cfg.init or cfg.folder).place(cfg), byte_encoding()
    prompt, stop = encoding.encode_ordinary(question), {encoding.eot_token}
    room = max(1, min(cfg.max_new, model.cfg.block_size - len(prompt)))
    batch = sample(model, [prompt], 1, room, 0, stop)
    return question + decode(encoding, batch.ids[0][batch.mask[0]].tolist())

# ------------------------------------------------------------------------------ the command line

def read_command(argv):
    """A command line as (Config, its task, the mode flags, the rest of `find_run` if resumed)."""
    comments = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Config):
        parser.add_argument(f"--{f.name}", type=f.type, default=argparse.SUPPRESS,
                            help=f"{comments[f.name]} ({f.default})")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--eval_only", action="store_true", help="only measure --init's or --out's")
    parser.add_argument("--ask", metavar="QUESTION", help="only let that model answer")
    def error(message):
        raise Fault(f"{message}; python grpo.py --help lists the flags")
    parser.error = error
    flags = vars(parser.parse_args(argv))
    mode = {name: flags.pop(name) for name in ("resume", "eval_only", "ask")}
    task = load_task(flags.get("task", Config.task))
    cfg = Config(**task.DEFAULTS | flags)
    if mode["resume"]:
        old, *run = find_run(cfg.folder)
        for name in flags.keys() - MAY_CHANGE:
            if flags[name] != getattr(old, name):
                raise Fault(f"the run in {cfg.folder} has --{name} {getattr(old, name)}, not "
                            f"{flags[name]}; only {', '.join(sorted(MAY_CHANGE))} may change")
        cfg = dataclasses.replace(old, **{name: flags[name] for name in MAY_CHANGE & flags.keys()})
        return cfg, load_task(cfg.task), mode, run
    trains = not mode["eval_only"] and mode["ask"] is None
    if trains and (cfg.folder / "checkpoint.safetensors").exists():
        old, step, *_ = find_run(cfg.folder)
        if 0 <= step < old.steps:
            raise Fault(f"{cfg.folder} holds a run stopped at step {step} of {old.steps}: go on "
                        f"with --resume, or choose another --out")
    return cfg, task, mode, None

def main(argv=None):
    """The command line; a Fault is one line on stderr and exit code 2."""
    keep_memory()
    code = 0
    try:
        cfg, task, mode, run = read_command(argv)
        start_ranks(machine(cfg)[0])
        if mode["ask"] is not None:
            print(ask(cfg, mode["ask"]))
        elif mode["eval_only"]:
            model = GPT.from_pretrained(cfg.init or cfg.folder).place(cfg)
            say(percent(evaluate(model, task, task.problems(cfg)[1], cfg, byte_encoding())))
        else:
            for s in (signal.SIGINT, signal.SIGTERM):       # a second one is obeyed at once
                signal.signal(s, lambda s, _: sys.exit(128 + s) if ASKED else ASKED.append(s))
            train(cfg, task, run)
    except Stopped as where:
        say(f"stopped {where}; go on with: python grpo.py --resume --out {cfg.folder}")
        code = 128 + max(ASKED, default=0)
    except Fault as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    if dist.is_initialized() and code != 2:     # gloo's threads can abort an orderly exit
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)

if __name__ == "__main__":
    main()
