"""
GRPO, Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4), in one file.

As in the paper: G completions of each prompt from the old policy; the z-score of the reward in this
group as the advantage of every token (4.1.2), or summed over the steps still to end (4.1.3); the
clipped ratio of each token, averaged over the completion, then over the group (eq. 3); the k3
estimator of the KL to a frozen reference, in the loss (eq. 4); learned rewards, refitted in
iterations (Algorithm 1). Beside it PPO and what lies between. Where the paper is silent the choice
and its reason stand beside the line.

    python grpo.py --task arithmetic                      # warm start, then GRPO, on a laptop
    python grpo.py --resume                               # go on after Ctrl-C, a crash or a kill
    python grpo.py --ask "47*58=" --init out/arithmetic   # try the result
    torchrun --nproc_per_node 2 grpo.py                   # the prompts dealt to 2 processes

P prompts, G completions of each, B = P * G rows (row = p * G + g), T tokens of the longest row,
N most new tokens, V vocabulary, C channels. Column t of every (B, T) tensor belongs to token t.

    ids        (B, T) int64    prompt, completion, padding on the right
    mask       (B, T) bool     True where the policy sampled the token, the end token included
    finished   (B,)   bool     the row ended with a stop token, not at the limit of N tokens
    logp       (B, T) float32  log pi(ids[:, t] given ids[:, :t]) at the sampling temperature
    old_logp, ref_logp         the same under the old policy and under the reference
    reward     (B, T) float32  of each step, in the column of its last token; one step: the outcome
    ends       (B, T) bool     those columns
    value      (B, T) float32  the critic's, of the state before token t
    adv        (B, T) float32  advantage
    weight     (B, T) float32  share of a token in the loss = (weight * per_token).sum()
"""
import copy
import shlex
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from data import load_task
from data.run import (ASKED, Fault, Stopped, all_reduce, by_parts, check_fields, check_sizes,
                      compile_all, last_tokens, leave, load_training_state, log, machine,
                      micro_batches, new_optimizer, open_folder, optimizer_step, percent, prepare,
                      read_flags, refuse_unfinished, resume, rng, row_lengths, save, say,
                      show_group, show_step, start_ranks, stop_asked, training_state, widest, world)
from data.start import encoding_of, load_model, starting_model, warm_start
from data.tokenizer import CHATS, decode
from model import GPT, ScalarHead, token_logps
from reward import at_the_limit, join, learn, learned_rewards, rollout_labels, score, step_rewards

# ---------------------------------------------------------------------------------- the settings

# The published algorithms, by how they differ from Config. A ladder from the raw reward to GRPO:
# reinforce, a2c (a critic), ppo --beta 0 (the clip), ppo (the reference), grpo (the group).
UNCLIPPED = dict(clip_low=1e9, clip_high=1e9)
ALGOS = {
    "grpo": {},                                                         # DeepSeekMath, 2402.03300
    "reinforce": dict(baseline="none", scale="none", kl="none", mean="constant", **UNCLIPPED),
    "a2c": dict(baseline="value", scale="batch", kl="none", adam_eps=1e-5, **UNCLIPPED),
    "ppo": dict(baseline="value", scale="batch", kl="reward", estimator="k1", adam_eps=1e-5),
    "rloo": dict(baseline="leave-one-out", scale="none", kl="reward", estimator="k1",
                 mean="constant", **UNCLIPPED),                                     # 2402.14740
    "dr_grpo": dict(scale="none", kl="none", mean="constant"),                      # 2503.20783
    "dapo": dict(clip_high=0.28, kl="none", mean="token"),  # 2503.14476, but no dynamic sampling
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4),                  # 2507.18071
}
# The paper divides a learned reward by the group's std too. Once all completions of a group are
# good, that std is the noise of the reward model, and the policy would follow it.
REWARDS = {"rule": {}, "model": dict(scale="none")}

@dataclass(frozen=True)
class Config:
    """One run. A field is a flag, its comment the flag's help; tasks and --algo set defaults."""
    task: str = "arithmetic"    # what to learn: the file data/<task>.py
    difficulty: int = 2         # of its problems: digits of a factor, or numbers of countdown
    train: str = ""             # file of its problems, where it reads them
    test: str = ""              # and of the held-out ones
    init: str = ""              # folder of a model to start from; empty: a new one, warm-started
    chat: Literal["auto", *CHATS, "none"] = "auto"  # format of its prompts; auto: what it says
    out: str = ""               # the run's folder; empty: out/<task>
    seed: int = 1               # of everything random
    steps: int = 100            # rollouts, each followed by its update
    iterations: int = 1         # of Algorithm 1, each of --steps: reference and reward model anew
    eval_every: int = 0         # steps between evaluations; 0: before the first and after the last
    save_every: int = 10        # steps between checkpoints
    # rollout: the paper samples 64 completions a question, 1024 in a batch, of up to 1024 tokens
    prompts: int = 16           # P, problems of a step
    group: int = 64             # G, completions of each problem
    max_new: int = 1024         # N, most tokens of a completion
    temperature: float = 1.0    # of sampling, and so of every log-probability
    # reward
    reward: Literal[*REWARDS] = "rule"                      # the task's own, or a learned one
    supervision: Literal["outcome", "process"] = "outcome"  # 4.1.2, or 4.1.3: each reasoning step
    unfinished: float = 0.0     # most that a completion earns that did not end
    # advantage
    algo: Literal[*ALGOS] = "grpo"  # a row of ALGOS; its fields can be overridden one by one
    baseline: Literal["none", "group", "leave-one-out", "value", "group+value"] = "group"  # r - it
    scale: Literal["none", "group", "batch"] = "group"      # divide by the std of group or step
    gamma: float = 1.0          # discount of later rewards, with a value baseline
    lam: float = 0.95           # GAE's lambda
    critic: Literal["shared", "separate"] = "shared"        # value head on the policy, or a model
    value_coef: float = 0.1     # weight of the value loss
    value_clip: float = 0.2     # largest move of a value in one update
    # loss
    ratio: Literal["token", "sequence"] = "token"           # of probabilities new / old
    clip_low: float = 0.2       # the ratio is clipped below 1 - this (PPO's; the paper is silent)
    clip_high: float = 0.2      # and above 1 + this
    kl: Literal["loss", "reward", "none"] = "loss"          # where the KL to the reference counts
    estimator: Literal["k1", "k2", "k3", "ratio*k3"] = "k3"  # of that KL
    beta: float = 0.04          # its weight
    target_kl: float = 0.0      # to which beta is steered; 0: beta stays
    mean: Literal["sequence", "token", "constant"] = "sequence"  # over tokens; eq. 3: 1/|o| a row
    # update
    epochs: int = 1             # passes over a rollout, the paper's mu
    minibatches: int = 1        # optimizer steps of a pass
    micro_tokens: int = 2048    # most tokens of one forward and backward; for memory and speed only
    recompute: Literal["off", "on"] = "off"     # activations in the backward: less memory, slower
    lr: float = 1e-6            # constant, as in the paper
    adam_eps: float = 1e-8      # Adam's epsilon; 1e-5 is PPO's
    grad_clip: float = 1.0      # largest norm of a gradient
    # a new model, and its warm start: supervised fine-tuning on the task's demonstrations
    n_layer: int = 2            # layers
    n_head: int = 8             # query heads
    n_kv_head: int = 1          # key/value heads
    n_embd: int = 256           # channels
    warm_steps: int = 1500      # optimizer steps
    warm_batch: int = 48        # demonstrations of a step
    warm_lr: float = 1.2e-3     # at its peak: a short rise, then linearly to 0
    # a learned reward: fitted before the first step, and refitted at each iteration
    fit_prompts: int = 256      # problems whose completions are labelled
    fit_lr: float = 3e-4        # at its peak
    choices: int = 4            # K, completions of which the best is chosen; 2: Bradley-Terry
    label_noise: float = 0.0    # share of wrong choices, or wrong labels of steps
    labels: Literal["rule", "rollouts"] = "rule"            # of steps: truth, or where they lead
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first there is
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of products; auto: bfloat16 on cuda
    compile: Literal["auto", "on", "off"] = "auto"          # torch.compile; auto: on with cuda

    def __post_init__(self):
        check_fields(self, LEAST, MOST)

    @property
    def folder(self):
        return Path(self.out or f"out/{self.task}")

# Integers are at least 1, other numbers 0, but for these. A group of one has no spread: 0/0.
LEAST = dict(group=2, choices=2, fit_prompts=10, seed=0, steps=0, eval_every=0, warm_steps=0,
             temperature=1e-3, grad_clip=1e-9, unfinished=-1e9)
MOST = dict(gamma=1, lam=1, label_noise=1)
MAY_CHANGE = {"out", "steps", "eval_every", "save_every"}   # on --resume: they alter no step made
# The largest gap between the sampler's and the trainer's log-probability of a token before the
# first optimizer step; beyond it the two disagree, and every ratio is wrong. In bfloat16 a logit of
# 32 has steps of 0.25 (and the ratios take the trainer's old_logp); a shifted token is nats away.
MISMATCH = {"float32": 1e-4, "bfloat16": 2.0}

# ------------------------------------------------------------------- sampling: prompts to a group

@dataclass
class Agent:
    """What a run works with; ref, critic and scorer are None where they are not needed."""
    cfg: Config
    task: object
    encoding: object
    model: GPT                          # the policy
    ref: GPT = None                     # the reference, frozen
    critic: ScalarHead = None           # the value of a state
    scorer: ScalarHead = None           # the learned reward
    sampler: GPT = None                 # the policy in bfloat16, to sample from
    opt: torch.optim.Optimizer = None
    history: dict = field(default_factory=dict)     # labelled rows that the scorer learned from

@dataclass
class Batch:
    """The rows of a rollout; the fields are explained at the top of the file."""
    ids: torch.Tensor
    mask: torch.Tensor
    finished: torch.Tensor
    logp: torch.Tensor                  # as the sampler saw it
    old_logp: torch.Tensor = None
    ref_logp: torch.Tensor = None
    value: torch.Tensor = None
    reward: torch.Tensor = None
    ends: torch.Tensor = None
    adv: torch.Tensor = None
    returns: torch.Tensor = None

    def pick(self, rows, T):
        """Some of the rows, cut to T columns."""
        cut = lambda x: x if x is None else x[rows, :T] if x.dim() == 2 else x[rows]
        return Batch(**{name: cut(x) for name, x in vars(self).items()})

@torch.no_grad()
def sample(model, prompts, group, max_new, temperature, stop, u=None):
    """`group` completions of each prompt (a list of ids): a Batch with ids, mask, finished, logp.

    Token n of a row is where its cumulative distribution passes u[row, n], u (B, max_new) uniform
    in [0, 1), whatever the other rows do; temperature 0 is greedy. `stop`: the ids that end a row.
    """
    device, P, longest = model.norm.weight.device, len(prompts), max(map(len, prompts))
    T = longest + max_new
    if T > model.cfg.block_size:
        raise Fault(f"a prompt of {longest} tokens and --max_new {max_new} do not fit the model's "
                    f"context of {model.cfg.block_size}")
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
    u = u if u is None else u.to(device, widest(device))

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

# ---------------------------------------------------------------- advantages: rewards to credit

def relative(reward, ends, group, baseline, scale):
    """Rewards (B, T) of the steps, in the columns `ends` (B, T), against those of their group
    (DeepSeekMath 4.1.2; 4.1.3 over all steps of the group); and which groups are dead, (P,).

    The std is without Bessel's correction (the paper is silent): the mean square is 1 at every G.
    No epsilon: the reward's scale does not matter. Rewards equal up to rounding get exactly 0.
    """
    r, on = (x.view(-1, group, x.size(1)) for x in (reward.to(widest(reward.device)), ends))
    r = torch.where(on, r, 0)
    n, total = on.sum((1, 2), True), r.sum((1, 2), True)                                # (P, 1, 1)
    centre = torch.where(on, r - total / n, 0)
    dead = centre.abs().amax((1, 2), True) <= 1e-6 * r.abs().amax((1, 2), True)         # (P, 1, 1)
    out = r
    if "group" in baseline:
        out = centre.masked_fill(dead, 0)
    elif baseline == "leave-one-out":
        out = r - (total - r.sum(2, True)) / (n - on.sum(2, True))      # the mean of the other rows
    if scale == "group":
        out = out / centre.square().sum((1, 2), True).div(n).sqrt().masked_fill(dead, 1)
    return torch.where(on, out, 0).view_as(reward).float(), dead.flatten()

def gae(reward, value, mask, gamma, lam):
    """Generalized advantage estimation, (B, T): A_t = sum over l of (gamma lam)^l delta_{t+l}, with
    delta_t = r_t + gamma V_{t+1} - V_t, V_t of the state before token t, and 0 after the last."""
    out, ahead, after = torch.zeros_like(reward), 0.0, 0.0          # A and V of the column after t
    for t in reversed(range(reward.size(1))):
        delta = reward[:, t] + gamma * after - value[:, t]
        ahead = torch.where(mask[:, t], delta + gamma * lam * ahead, 0)
        out[:, t], after = ahead, torch.where(mask[:, t], value[:, t], 0)
    return out

def whiten(x, mask):
    """(x - mean) / std over the columns in mask of all ranks, 0 elsewhere and if all are equal."""
    x = torch.where(mask, x, 0).to(widest(x.device))
    mean = all_reduce(x.sum()) / (n := all_reduce(mask.sum()).clamp(min=1))
    centre = torch.where(mask, x - mean, 0)
    std = (all_reduce(centre.square().sum()) / n).sqrt()
    return torch.where(std > 1e-6 * mean.abs(), centre / std, 0).float()

def advantages(reward, ends, mask, penalty, value, cfg):
    """Advantages and returns (B, T), dead groups (P,), of step rewards (B, T) at `ends` (B, T).

    `penalty` (B, T): what the KL takes from the reward of each token. Without a value baseline a
    row is one action: its penalties count at its end, and a token's advantage is the sum over the
    steps that end at or after it. `value` (B, T) or None.
    """
    if value is None:
        reward = reward - torch.where(last_tokens(mask), penalty.sum(1, True), 0)
    reward, dead = relative(reward, ends, cfg.group, cfg.baseline, cfg.scale)
    if value is None:
        adv, returns = torch.where(mask, reward.flip(1).cumsum(1).flip(1), 0), None
    else:
        adv = gae(reward - penalty, value, mask, cfg.gamma, cfg.lam)
        returns = adv + value
    return whiten(adv, mask) if cfg.scale == "batch" else adv, returns, dead

# ----------------------------------------------------------- rollout: completions, rewards, credit

def complete(agent, problems, group, source=None, begun=None):
    """Sample and score `group` completions of each problem, greedily without a random `source`:
    the Batch, its texts, and the components (B,) of their rule reward by name. `begun`: ids to go
    on from, each a prompt and the beginning of a completion."""
    cfg, encoding, (rank, ranks), u = agent.cfg, agent.encoding, world(), None
    prompts = [encoding.encode_prompt(p.prompt) for p in problems]
    begun, left = begun or prompts, agent.model.cfg.block_size - max(map(len, begun or prompts))
    room = cfg.max_new if begun is prompts else min(cfg.max_new, left)
    if source:          # drawn for all ranks alike: their number changes no sample
        shape = len(problems) * ranks, group, room
        u = np.random.default_rng(source.getrandbits(64)).random(shape)[rank::ranks]
        u = torch.from_numpy(u).flatten(0, 1)
    model = agent.model
    if agent.sampler is not None:
        (model := agent.sampler).load_state_dict(agent.model.state_dict())
    batch = sample(model, begun, group, room, cfg.temperature if source else 0, encoding.stop, u)
    rows = [p for p in problems for _ in range(group)]
    spans = zip([len(p) for p in prompts for _ in range(group)], row_lengths(batch.mask).tolist())
    texts = [decode(encoding, row[a:b]) for row, (a, b) in zip(batch.ids.tolist(), spans)]
    parts = score(agent.task, rows, texts, batch.finished.tolist())
    parts = {name: torch.tensor(x, device=batch.ids.device) for name, x in parts.items()}
    batch.reward, batch.ends = step_rewards(agent.task, rows, texts, parts, batch, cfg, encoding)
    return batch, texts, parts

def rollout(agent, problems, source):
    """One step's completions, rewards and advantages: Batch, texts, statistics."""
    cfg = agent.cfg
    batch, texts, parts = complete(agent, problems, cfg.group, source)
    stats = {"accuracy": parts["correct"], **parts, "rule_reward": batch.reward.sum(1)}
    if agent.scorer is not None:
        batch.reward = learned_rewards(agent.scorer, batch, cfg)
    batch.reward = at_the_limit(batch, cfg.unfinished)
    logps = lambda model, critic=None: by_parts(
        partial(token_logps, model, temperature=cfg.temperature, critic=critic), batch.ids,
        batch.mask, cfg.micro_tokens)
    # Under bfloat16 the sampler rounds otherwise than the trainer, so the trainer is asked.
    batch.old_logp = batch.logp
    if agent.critic is not None or agent.model.amp:
        batch.old_logp, batch.value = logps(agent.model, agent.critic)
    penalty = torch.zeros_like(batch.logp)
    if agent.ref is not None:
        batch.ref_logp, _ = logps(agent.ref)
        if cfg.kl == "reward":                              # k1 of the old policy, token by token
            penalty = cfg.beta * torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0)
    batch.adv, batch.returns, dead = advantages(batch.reward, batch.ends, batch.mask, penalty,
                                                batch.value, cfg)
    stats |= {"reward": batch.reward.sum(1), "dead_groups": dead, "length": batch.mask.sum(1),
              "finished": batch.finished}
    if batch.value is not None:             # 1: the critic knows the returns; 0: just their mean
        left, own = ((batch.returns - v)[batch.mask].var(correction=0) for v in (batch.value, 0))
        stats["explained_variance"] = 1 - left / own.clamp(min=1e-8)
    means = all_reduce(torch.stack([x.float().mean() for x in stats.values()])) / world()[1]
    return batch, texts, dict(zip(stats, means.tolist()))

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

def kl_terms(logp, ref_logp, ratio, estimator):
    """Estimates of the KL to the reference, token by token (B, T), from samples of the policy.

    As a loss their gradient is, on-policy and in the mean, 0 for k1, that of KL(pi || ref) for k2
    and ratio*k3, and that of KL(ref || pi) for k3, the paper's eq. 4.
    """
    r = bounded(ref_logp - logp)
    k3 = r.expm1() - r                              # exp(r) - 1 - r would lose its digits near 0
    return {"k1": -r, "k2": r.square() / 2, "k3": k3, "ratio*k3": ratio * k3}[estimator]

def policy_loss(logp, old_logp, ref_logp, adv, mask, weight, cfg):
    """Clipped surrogate (DeepSeekMath eq. 1, 3) with the KL (eq. 4): the loss and its statistics.

    All (B, T). In the first update of a rollout the ratio is 1 and the loss about 0, but by logp
    its gradient is -weight * (adv + beta * (pi_ref / pi - 1)): the paper's eq. 21.
    """
    kept = lambda x: torch.where(mask, x, 0)        # elsewhere even NaN stays out of the gradient
    logp, adv = kept(logp), kept(adv)
    change = logp - kept(old_logp)
    if cfg.ratio == "sequence":                     # GSPO: the geometric mean over the row
        change = (change.sum(1, True) / mask.sum(1, True).clamp(min=1)).expand_as(change)
    ratio = bounded(change).exp()                                                          # (B, T)
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    surrogate = torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = kl_terms(logp, kept(ref_logp), ratio, cfg.estimator)
    loss = (weight * ((cfg.kl == "loss") * cfg.beta * kl - surrogate)).sum()
    out = ((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))
    stats = {"loss": loss, "kl": (weight * kl).sum(), "entropy": -(weight * logp).sum(),
             "clip_share": (weight * out).sum()}
    return loss, {name: x.detach() for name, x in stats.items()}

def value_loss(value, old_value, returns, mask, weight, clip):
    """Half the squared error of the values, (B, T), the worse of it and of the value kept within
    `clip` of the old one: PPO's clipped value loss."""
    value, old_value, returns = (torch.where(mask, x, 0) for x in (value, old_value, returns))
    held = old_value + (value - old_value).clamp(-clip, clip)
    error = torch.maximum((value - returns).square(), (held - returns).square())
    return (weight * error).sum() / 2

# ------------------------------------------------------------------------------------ the update

def update(agent, batch, source, bound):
    """The optimizer steps of one rollout: epochs x minibatches, each summed over micro-batches and
    ranks. Changes the models; gives mean statistics. Raises Fault if before the first step the
    sampler's and the trainer's log-probabilities are more than `bound` apart."""
    cfg, (rank, ranks) = agent.cfg, world()
    rows = cfg.prompts * cfg.group
    mine = torch.arange(rows).view(-1, cfg.group)[rank::ranks].flatten()    # which rows of the step
    length = row_lengths(batch.mask)
    names = "loss kl entropy clip_share".split() + ["value_loss"] * (agent.critic is not None)
    total, norm, mismatch = Counter(dict.fromkeys(names, 0.0)), 0.0, None
    for _ in range(cfg.epochs):
        for part in torch.tensor(source.sample(range(rows), rows)).tensor_split(cfg.minibatches):
            here = torch.isin(mine, part).nonzero()[:, 0].to(batch.ids.device)
            mask, gap = batch.mask[here], batch.logp.new_zeros(())
            weight = token_weights(mask, cfg.mean, len(part), all_reduce(mask.sum()), cfg.max_new)
            for micro, T in micro_batches(length[here], cfg.micro_tokens):
                b, w = batch.pick(here[micro], T), weight[micro, :T]
                logp, value = token_logps(agent.model, b.ids, b.mask, cfg.temperature, agent.critic)
                loss, stats = policy_loss(logp, b.old_logp, b.ref_logp, b.adv, b.mask, w, cfg)
                if value is not None:
                    error = value_loss(value, b.value, b.returns, b.mask, w, cfg.value_clip)
                    loss, stats["value_loss"] = loss + cfg.value_coef * error, error.detach()
                loss.backward()
                total.update(stats)
                gap = torch.maximum(gap, (logp.detach() - b.logp).abs().max())
            if mismatch is None:
                mismatch = all_reduce(gap, dist.ReduceOp.MAX).item()
                if not mismatch <= bound:
                    raise Fault(f"sampler and trainer disagree: their log-probabilities are "
                                f"{mismatch:.2g} apart, more than the {bound} of rounding")
            norm += optimizer_step(agent.opt, cfg.grad_clip)
    n = cfg.epochs * cfg.minibatches
    sums = torch.stack([torch.as_tensor(x, device=length.device) for x in total.values()])
    stats = dict(zip(total, (all_reduce(sums) / n).tolist()))
    return stats | {"grad_norm": norm / n, "mismatch": mismatch}

# ------------------------------------------------------------------------------ the reward model

def begin_iteration(agent, problems, iteration):
    """Algorithm 1: the policy becomes the reference; it completes fresh problems, and the reward
    model learns from their labels and from 10 % of history. Gives the measures of the fit."""
    cfg, (rank, ranks) = agent.cfg, world()
    if agent.ref is not None:
        agent.ref.load_state_dict(agent.model.state_dict())
    if agent.scorer is None:
        return {}
    source, labels = rng(cfg, "fit", iteration), rng(cfg, f"labels of rank {rank}", iteration)
    drawn, rows = source.sample(problems, cfg.fit_prompts), []
    size = max(1, cfg.group // cfg.choices) * cfg.prompts       # problems at a time, all ranks'
    for i in range(0, len(drawn), size):
        mine = drawn[i:i + size][rank::ranks]
        batch, *_ = complete(agent, mine, cfg.choices, source)
        if cfg.labels == "rollouts":
            batch.reward = rollout_labels(partial(complete, agent), mine, batch, cfg.choices,
                                          labels)
        rows.append(dict(ids=batch.ids, mask=batch.mask, ends=batch.ends, label=batch.reward))
    agent.history, measures = learn(agent.scorer, join(*rows), agent.history, cfg, source)
    return measures

# ------------------------------------------------------------------------------------ evaluation

def evaluate(agent, problems, k=8):
    """Share of the problems solved: greedily, and by k samples as pass@1, pass@k and majority."""
    cfg, (rank, ranks) = agent.cfg, world()
    source = rng(cfg, "evaluate", rank)
    size = max(1, cfg.prompts * cfg.group // k)     # problems at a time: rows as in training
    problems = problems[rank::ranks]
    total = torch.zeros(5, device=agent.model.norm.weight.device)
    for chunk in (problems[i:i + size] for i in range(0, len(problems), size)):
        _, _, greedy = complete(agent, chunk, 1)
        batch, texts, sampled = complete(agent, chunk, k, source)
        answers = [agent.task.answer(text) if ended else ""
                   for text, ended in zip(texts, batch.finished.tolist())]
        for i, right in enumerate(sampled["correct"].view(-1, k).tolist()):
            mine = answers[i * k:(i + 1) * k]
            votes = Counter(answer for answer in mine if answer).most_common(1)
            majority = right[mine.index(votes[0][0])] if votes else 0.0
            total += torch.tensor([1, greedy["correct"][i], sum(right) / k, max(right), majority],
                                  device=total.device)
    n, *solved = all_reduce(total).tolist()
    return dict(zip(("greedy", "pass@1", f"pass@{k}", f"maj@{k}"), (x / n for x in solved)))

# --------------------------------------------------------------------------------------- the run

def new_agent(cfg, task, model, encoding):
    """The models before the first step. The reference is the policy as it is now, and stays so."""
    agent, device = Agent(cfg, task, encoding, model), model.norm.weight.device
    C, twin = model.cfg.n_embd, lambda: copy.deepcopy(model)
    if cfg.reward == "model" or cfg.beta and cfg.kl != "none":
        agent.ref = model.frozen()
    if "value" in cfg.baseline:             # starts at 0: no opinion
        agent.critic = ScalarHead(C, twin() if cfg.critic == "separate" else None).to(device)
    if cfg.reward == "model":
        seed = torch.Generator().manual_seed(rng(cfg, "scorer").getrandbits(63))
        agent.scorer = ScalarHead(C, twin(), (C + 1) ** -0.5, seed).to(device)
    agent.sampler = model.frozen() if model.amp else None
    agent.opt = new_optimizer([m for m in (model, agent.critic) if m is not None], cfg.lr,
                              cfg.adam_eps)
    return agent

def train_step(agent, problems, step):
    """One rollout and its update: statistics; a problem, the batch and the texts to look at."""
    cfg, (rank, ranks), began = agent.cfg, world(), time.perf_counter()
    mine = rng(cfg, "problems", step).sample(problems, cfg.prompts)[rank::ranks]
    batch, texts, stats = rollout(agent, mine, rng(cfg, "rollout", step))
    sampled = time.perf_counter()
    stats |= update(agent, batch, rng(cfg, "update", step), MISMATCH[machine(cfg)[1]])
    if cfg.target_kl:       # Ziegler et al. 2019, 2.2: a tenth of the relative error, bounded
        error = min(max(stats["kl"] / cfg.target_kl - 1, -0.2), 0.2)
        agent.cfg = replace(cfg, beta=cfg.beta * (1 + 0.1 * error))
    ended, tokens = time.perf_counter(), all_reduce(batch.mask.sum()).item()
    return stats | {"beta": cfg.beta, "seconds": ended - began,
                    "rollout_tok_s": tokens / (sampled - began),
                    "update_tok_s": tokens / (ended - sampled)}, (mine[0], batch, texts)

def train(cfg, task, run=None):
    """A whole run, or the rest of one: `run` is what `find_run` found beside the Config."""
    # 1. What it works on, and with.
    tensors, config = (run["tensors"], run["model"]) if run else ({}, None)
    rank, encoding = world()[0], encoding_of(cfg, cfg.folder if tensors else cfg.init)
    problems, held_out = task.problems(cfg)
    longest = max(len(encoding.encode_prompt(p.prompt)) for p in problems + held_out)
    check_sizes(cfg, len(problems))
    cfg = replace(cfg, chat=encoding.chat)      # the folder now has a format of its own
    model, kept = starting_model(cfg, task, longest, encoding, config)
    if rank == 0:
        open_folder(cfg, run)
    if not kept:
        warm_start(model, task, problems, cfg, encoding)
    agent = new_agent(cfg, task, model, encoding)
    modules = {name: getattr(agent, name) for name in ("model", "ref", "critic", "scorer")}
    if tensors:
        agent.history = load_training_state(tensors, cfg.folder, modules, agent.opt)
    device, dtype, compiled = machine(cfg)
    if compiled:
        compile_all(*modules.values(), agent.sampler)
    millions = sum(p.numel() for p in agent.model.parameters()) / 1e6
    say(f"{millions:.2f}M parameters on {device} in {dtype}; {len(problems)} problems, "
        f"{len(held_out)} held out; {cfg.prompts} x {cfg.group} rows a step")

    # 2. The steps; 0 only measures.
    total, done = cfg.steps * cfg.iterations, []
    for step in range(run["step"] + 1 if run else 0, total + 1):
        stats = {}
        if step > 0:
            if (step - 1) % cfg.steps == 0:
                stats = begin_iteration(agent, problems, (step - 1) // cfg.steps)
            more, group = train_step(agent, problems, step)
            done.append(stats := stats | more)
            show_step(step, total, done)
        last = step == total
        if last or step == 0 or cfg.eval_every and step % cfg.eval_every == 0:
            results = evaluate(agent, held_out)
            say(f"step {step}  held out: {percent(results)}")
            stats |= results
        halt = stop_asked()
        keep = last or halt or step % cfg.save_every == 0 or step % cfg.steps == 0
        if rank == 0:
            log(cfg.folder, "metrics.jsonl", {"step": step, **stats})
            if keep and step > 0:
                log(cfg.folder, "samples.jsonl", show_group(step, *group, cfg.group, encoding))
            if keep:
                state = training_state(modules, agent.opt, agent.history)
                agent.model.save_pretrained(cfg.folder, encoding.files)
                save(cfg.folder, step, agent.cfg, agent.model.hf, state)
        if halt and not last:
            raise Stopped(f"after step {step}")
    say(f"the model is in {cfg.folder}; ask it: python grpo.py --task {cfg.task} "
        f"--init {cfg.folder} --ask {shlex.quote(held_out[0].prompt)}")

def ask(agent, question):
    """A question and its greedy completion."""
    encoding, model = agent.encoding, agent.model
    prompt = encoding.encode_prompt(question)
    room = max(1, min(agent.cfg.max_new, model.cfg.block_size - len(prompt)))
    batch = sample(model, [prompt], 1, room, 0, encoding.stop)
    return question + decode(encoding, batch.ids[0][batch.mask[0]].tolist())

# ------------------------------------------------------------------------------ the command line

MODES = dict(resume=dict(action="store_true", help="go on with the run in --out"),
             eval_only=dict(action="store_true", help="only evaluate --init's model, or --out's"),
             ask=dict(metavar="QUESTION", help="only let that model answer"))

def read_command(argv):
    """A command line as (Config, its task, the mode flags, the run of `find_run` if resumed)."""
    flags = read_flags(Config, MODES, __doc__, argv)
    mode = {name: flags.pop(name) for name in MODES}
    task = load_task(flags.get("task", Config.task))
    row = lambda table, name: table.get((task.DEFAULTS | flags).get(name), {})
    cfg = Config(**task.DEFAULTS | row(REWARDS, "reward") | row(ALGOS, "algo") | flags)
    if mode["resume"]:
        cfg, run = resume(cfg.folder, Config, flags, MAY_CHANGE)
        return cfg, load_task(cfg.task), mode, run
    if not mode["eval_only"] and mode["ask"] is None:
        refuse_unfinished(cfg.folder, Config)
    return cfg, task, mode, None

def main(argv=None):
    """The command line; a Fault is one line on stderr and exit code 2."""
    prepare()
    code = 0
    try:
        cfg, task, mode, run = read_command(argv)
        start_ranks(machine(cfg)[0])
        if mode["ask"] is not None or mode["eval_only"]:        # of --init's model, or the run's
            encoding = encoding_of(cfg, folder := cfg.init or cfg.folder)
            agent = Agent(cfg, task, encoding, load_model(folder, cfg, encoding))
            say(percent(evaluate(agent, task.problems(cfg)[1])) if mode["eval_only"] else
                ask(agent, mode["ask"]))
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
    leave(code)

if __name__ == "__main__":
    main()
