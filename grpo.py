"""GRPO, Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4); PPO,
RLOO and others as settings of it. A step, for P prompts with G completions each:

    completions = sample(policy, prompts, G)
    r           = rule(completions)                         # or a learned reward model
    adv         = (r - mean(r)) / std(r)                    # within the group of a prompt
    ratio       = pi(token) / pi_old(token)                 # pi_old: the weights that sampled
    loss        = -min(ratio * adv, clip(ratio) * adv) + beta * KL(pi, reference)

    python grpo.py --task arithmetic                        # a minute of GRPO on a laptop
    python grpo.py --resume                                 # after Ctrl-C, a crash or a kill
    python grpo.py --ask "47*58=" --init out/arithmetic     # try the result
"""
import os
import sys
if sys.version_info < (3, 11):
    sys.exit("error: Python 3.11 or newer is needed")
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")     # before torch: see docs/troubleshooting.md
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages
import torch
from tiktoken import Encoding
from torch import Tensor
from torch.nn import Module

import model
import reward
from run import caches, checkpoint, config, dist, passes, report, setup, terminal
from run.passes import Tokens

# ---------------------------------------------------------------------------- the settings
GRAD_CLIP = 1.0             # maximum gradient norm
GAMMA = 1.0                 # discount, used only with a critic
VALUE_COEF = 0.1            # weight of the critic's loss
VALUE_CLIP = 0.2            # how far PPO's value loss lets a value move from the old one
NO_CLIP = 1e9               # a clip range in which every ratio lies
ALGOS = {       # published algorithms, as differences from Config
    "grpo": {},             # DeepSeekMath, 2402.03300: the group's mean in place of a critic
    "reinforce": dict(baseline="none", adv_scale="none", kl="none",
                      loss_mean="constant", clip_low=NO_CLIP, clip_high=NO_CLIP),
    "a2c": dict(baseline="value", adv_scale="batch", kl="none",
                clip_low=NO_CLIP, clip_high=NO_CLIP),
    "ppo": dict(baseline="value", adv_scale="batch", kl="reward"),
    "rloo": dict(baseline="leave-one-out", adv_scale="none", kl="reward",   # 2402.14740
                 loss_mean="constant", clip_low=NO_CLIP, clip_high=NO_CLIP),
    "dr_grpo": dict(adv_scale="none", kl="none", loss_mean="constant"),     # 2503.20783
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl="none"),   # 2507.18071
}
Baseline = Literal["none", "group", "leave-one-out", "value", "group+value"]
LossMean = Literal["sequence", "token", "constant"]

@dataclass(frozen=True)
class Config:
    """The settings of a run, as built by `make_config`. A field is a flag, its comment the help.
    Defaults are the paper's, where it gives any; a task's DEFAULTS override them."""
    # basics: in the paper a step has 16 prompts, 64 completions each, up to 1024 tokens long
    task: str = "arithmetic"    # name of a file in data/, or path of one
    task_args: dict = field(default_factory=dict)   # settings of the task's own
    algo: str = "grpo"          # in ALGOS or experiments/variants, or a file
    init: str = ""              # folder of the model to start from
    out: str = ""               # folder of the run; empty: out/<task>
    steps: int = 100            # steps per iteration; a step is a rollout and its update
    prompts: int = 16           # prompts per step (P)
    group: int = 64             # completions per prompt (G)
    max_new: int = 1024         # maximum tokens per completion (N), replies included
    max_turns: int = 8          # maximum turns of the policy, if the task replies
    lr: float = 1e-6            # learning rate
    seed: int = 1               # random seed
    # prompts and sampling
    chat: Literal["auto", "none", "think", "no_think"] = "auto"     # template; thinking on or off
    system: str = ""            # system message; empty: the chat template's
    temperature: float = 1.0    # of sampling and of all log-probabilities
    # evaluation and checkpoints
    eval_every: int = 0         # steps between evaluations; 0: first and last
    held_out: int = 0           # held-out problems to evaluate on: the first N; 0: all
    samples: int = 8            # completions per held-out problem
    save_every: int = 10        # steps between checkpoints, and logged samples
    # reward
    reward: Literal["rule", "model", "rollouts"] = "rule"   # rule, a model of it, or of rollouts
    supervision: Literal["outcome", "process"] = "outcome"  # rewards completions or reasoning steps
    # advantage
    baseline: Baseline = "group"    # subtracted from rewards; group+value: both, by GAE
    adv_scale: Literal["none", "group", "batch"] = "group"  # divide by the group's std, or whiten
    lam: float = 0.95           # lambda of GAE
    critic: Literal["shared", "separate"] = "shared"    # head on the policy, or a model of its own
    # loss
    ratio: Literal["token", "sequence"] = "token"       # importance ratio per token, or completion
    clip_low: float = 0.2       # lower clip range: PPO's, as the paper gives none
    clip_high: float = 0.2      # upper; the first update has only ratios of 1
    kl: Literal["loss", "reward", "watch", "none"] = "loss"     # where it is; watch: only logged
    estimator: Literal["k1", "k2", "k3", "ratio*k3"] = "k3"     # KL estimator
    beta: float = 0.04          # KL coefficient; 0: no KL term
    loss_mean: LossMean = "sequence"    # GRPO's; token: DAPO's; constant: Dr. GRPO's
    # update
    iterations: int = 1         # outer loop: new reference, reward-model fit
    epochs: int = 1             # passes over a rollout (the paper's mu)
    minibatches: int = 1        # optimizer steps in a pass
    micro_tokens: int = 0       # tokens of a micro-batch, at most; 0: 2048, on a GPU more
    recompute: bool = False     # activation checkpointing
    half_life: int = 0          # half-life of lr in steps; 0: constant
    # new model and warm start, which is supervised fine-tuning on the task's demonstrations
    n_layer: int = 2            # layers of a new model
    n_embd: int = 256           # width of a new model; heads have 32 channels
    warm_steps: int = 1500      # optimizer steps; default 0 with --init
    warm_lr: float = 1.2e-3     # peak learning rate
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # device; auto: best available
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matmuls; auto: bfloat16 on cuda
    compile: bool = False       # torch.compile; half a minute at first
    cache: Literal["auto", "plain", "shared", "static"] = "auto"    # KV cache
    shared_prefixes: bool = True    # train with common prefixes computed once

    def __post_init__(self):
        least = dict(seed=0, steps=0, warm_steps=0, temperature=1e-3)
        config.check(self, least, most=dict(lam=1, samples=1024))

    @property
    def folder(self):
        return config.folder_of(vars(self))

    @property
    def total_steps(self):
        return self.steps * self.iterations

    @property
    def updates(self):          # optimizer steps of a step
        return self.epochs * self.minibatches

    @property
    def applies_kl(self):
        return self.beta > 0 and self.kl in ("loss", "reward")

    @property
    def needs_reference(self):      # with a learned reward the KL is always logged
        return self.applies_kl or self.kl == "watch" or self.reward != "rule"

def make_config(**given):
    """The Config for a command line or a notebook, which may also give a task's own settings, such
    as `difficulty`. An algorithm's file is executed: it replaces functions of this module. Raises
    UserError for unknown names and bad values."""
    return config.make(Config, ALGOS, sys.modules[__name__], given)

# ----------------------------------------------------------------------- the state of a run
@dataclass
class Batch:
    """A rollout: P prompts * G completions = B rows, row p * G + g; column t belongs to token t.
    Tensors are float32 unless a type is given. The loss gets some rows, with Tokens cut to them."""
    ids: Tokens                 # (B, T) int64: prompt, completion, padding on the right
    mask: Tokens                # (B, T) bool: sampled tokens, the end token included
    finished: Tensor            # (B,) bool: ended with a stop token; False if cut off
    logp: Tokens                # (B, T) log pi(ids[:, t] | ids[:, :t]), as sampled
    start: Tensor               # (B,) int64: column of the completion's first token
    judged: Tokens = None       # (B, T) bool: mask, plus given tokens that count as said
    on_policy: Tensor = None    # (B,) bool: sampled by the current policy; default: all
    problems: list = None       # (B,) problem of each row
    texts: list = None          # (B,) completion as text, or list of turns if the task replies
    components: dict = None     # (B,) each: components of the rule's reward, by name
    reward: Tokens = None       # (B, T), at `ends` below
    ends: Tokens = None         # (B, T) bool: last token of the row, or of each reasoning step
    old_logp: Tokens = None     # (B, T) log pi_old; None: pi is pi_old, the ratio is 1
    ref_logp: Tokens = None     # (B, T) log pi of the reference
    value: Tokens = None        # (B, T) critic's value of the state before token t
    adv: Tokens = None          # (B, T) advantages
    returns: Tokens = None      # (B, T) targets of the value

    def __post_init__(self):
        if self.judged is None:
            self.judged = self.mask
        if self.on_policy is None:
            self.on_policy = self.mask.new_ones(len(self.mask))

    @property
    def groups(self):
        """The number of each row's group, (B,), on the host: rows of one problem are a group."""
        return passes.groups_of(self.problems)

@dataclass
class Agent:
    """The state of a run. What a run does not need is None."""
    cfg: Config
    task: ModuleType
    encoding: Encoding
    policy: Module
    sampler: Module = None              # the policy, or a copy in bfloat16
    ref: Module = None                  # the reference, frozen
    critic: Module = None               # the value of a state
    reward_model: Module = None
    opt: torch.optim.Optimizer = None   # for policy and critic
    step: int = 0                       # of the run; 0 before the first
    beta: float = 0.0                   # KL coefficient, which a variant may adapt
    history: dict = field(default_factory=dict)     # rows labelled for the reward model
    state: dict = field(default_factory=dict)       # a variant's tensors, for checkpoints

    def __post_init__(self):
        self.sampler = self.sampler or self.policy

def new_agent(cfg, task, encoding, policy, saved=None):
    """All models, as before the first step or as in the Checkpoint `saved`."""
    agent = Agent(cfg, task, encoding, policy, beta=cfg.beta)
    setup.add_models(agent)
    agent.opt = new_optimizer(agent)
    setup.make_ready(agent, saved)
    return agent

def new_optimizer(agent):
    """AdamW for policy and critic, without weight decay, which would pull weights to 0."""
    params = [*agent.policy.parameters()]
    eps = 1e-8
    if agent.critic:
        params += agent.critic.parameters()
        eps = 1e-5  # as in the original PPO code and CleanRL
    params = [p for p in params if p.requires_grad]
    return torch.optim.AdamW(params, agent.cfg.lr, betas=(0.9, 0.95), eps=eps,
                             weight_decay=0, fused=True)

# --------------------------------------------------------------------------------- sampling
@torch.no_grad()
def sample(policy, prompts, group, room, temperature, stop, u=None, reply=None):
    """Samples `group` completions of each prompt (a list of ids). A row ends at one of the ids in
    `stop`, or after room[prompt] tokens. u (B, N): uniform random numbers, one a token; None:
    greedy. With `reply` a stop token ends a turn: reply(row, ids so far, tokens left) returns the
    ids to insert, fewer than are left, and whether the episode is over; no ids end the row.
    Returns a Batch's first five fields."""
    device = policy.device
    lengths = [*map(len, prompts)]
    longest = max(lengths)
    N = max(room)
    ids = passes.padded(prompts, group, longest + N).to(device)
    sizes = torch.tensor([lengths, room])  # (2, P)
    slots = sizes.sum(0).max().item()
    start, limit = sizes.to(device).repeat_interleave(group, 1)  # (B,)
    stop = torch.tensor(sorted(stop), device=device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    forced = torch.zeros_like(mask)     # tokens of replies: read, not sampled
    logp = torch.zeros_like(ids, dtype=torch.float32)
    finished = torch.zeros_like(start, dtype=torch.bool)
    done = torch.zeros_like(finished)   # finished, or cut off
    if u is not None:
        u = u.to(device, torch.float32)
    cache = caches.new(policy, slots, temperature)
    rows, p = cache.prefill(ids[::group, :longest], start[::group], group)
    for n in range(N):              # p (r, V): of token n, for r active rows
        column = start[rows] + n
        sampled = ~(forced[rows, column] | done[rows])
        token, token_logp = caches.draw(p, None if u is None else u[rows, n])
        token = torch.where(sampled, token, ids[rows, column])
        ids[rows, column] = token
        mask[rows, column] = sampled
        logp[rows, column] = torch.where(sampled, token_logp, 0)
        ended = (token[:, None] == stop).any(1) & sampled
        finished[rows] |= ended
        for row in rows[ended].tolist() if reply else ():
            end = int(start[row]) + n + 1  # the column after the turn
            left = int(limit[row]) - n - 1
            inserted, finished[row] = reply(row, ids[row, :end].tolist(), left)
            columns = slice(end, end + len(inserted))
            ids[row, columns] = ids.new_tensor(inserted)
            forced[row, columns] = True  # read, not sampled
            done[row] = not inserted
        done |= finished | (n + 1 >= limit)
        if n + 1 < N:  # reads the token; done rows may leave
            rows, p = cache.append(token, column, done)
        if len(rows) == 0:
            break
    T = passes.row_lengths(mask).max().item()  # up to the last sampled one
    return Batch(ids[:, :T], mask[:, :T], finished, logp[:, :T], start)

def generate(agent, problems, group, rng=None, u=None, begun=None):
    """`group` completions of each of this rank's problems, judged by the rule; drawn by rng, or by
    u (B, N), as in `sample`, or greedy. begun: each problem's first ids (fewer than --max_new, not
    trained on), and which of them are judged."""
    cfg = agent.cfg
    if rng is not None:
        u = dist.uniform_here(rng, len(problems), group, cfg.max_new)
    prompts = [agent.encoding.encode_prompt(p.prompt) for p in problems]
    begun = begun or [([], [])] * len(problems)
    prefixes = [prompt + ids for prompt, (ids, _) in zip(prompts, begun)]
    room = [cfg.max_new - len(ids) for ids, _ in begun]
    episodes = reward.new_episodes(agent, problems, prompts, begun, group)
    batch = sample(agent.sampler, prefixes, group, room, cfg.temperature,
                   agent.encoding.stop, u, reply=episodes)
    batch.start, batch.judged = passes.behind_prompts(batch.mask, prompts, begun, group)
    batch.problems = reward.repeated(problems, group)
    batch.texts, batch.components = reward.by_rule(agent, batch, episodes)
    return batch

# ----------------------------------------------------------- advantages: rewards to credit
def group_scores(r, ends, cfg):
    """(r - mean) / std, over the rewards r of the group's completions (DeepSeekMath 4.1.2) or, with
    process supervision, of all their reasoning steps (4.1.3); settings may replace the mean, or
    drop the division. r and `ends` are (P, G, T); the rows that a smaller group lacks have no ends.
    Returns scores (P, G, T), and which groups are dead, (P,): their rewards are equal up to a
    millionth. The std divides by n, not n - 1; the paper does not say which."""
    r = torch.where(ends, model.double(r), 0)
    n = ends.sum((1, 2), keepdim=True)  # (P, 1, 1)
    total = r.sum((1, 2), keepdim=True)
    mean = total / n
    square = torch.where(ends, r - mean, 0).square()
    std = (square.sum((1, 2), keepdim=True) / n).sqrt()
    dead = ~passes.vary(mean, std)
    baseline = mean
    if cfg.baseline == "leave-one-out":  # the mean of the other completions
        others = total - r.sum(2, keepdim=True)  # (P, G, 1)
        baseline = others / (n - ends.sum(2, keepdim=True)).clamp(min=1)
    baseline = torch.where(dead, r, baseline)   # r - baseline is exactly 0
    if cfg.baseline in ("none", "value"):
        baseline = 0
    scale = torch.where(dead, 1, std) if cfg.adv_scale == "group" else 1
    score = (r - baseline) / scale
    return torch.where(ends, score, 0).float(), dead.flatten()

def scores_of_rows(r, ends, groups, cfg):
    """`group_scores` of rows (B, T), given the numbers (B,) of their groups."""
    rows, place = passes.grid(groups, ends.device)  # (P, G), (B,)
    exists = rows[..., None] >= 0   # -1, a missing row, reads the last one
    score, dead = group_scores(r[rows], ends[rows] & exists, cfg)
    return score.flatten(0, 1)[place], dead

def gae(r, value, mask, gamma, lam):
    """Generalized advantage estimation, (B, T): A_t = sum over l of (gamma lam)^l delta_{t+l}, with
    delta_t = r_t + gamma V_{t+1} - V_t; V_t is the value before token t, 0 after the last one.
    Columns outside mask (B, T) are skipped, even between sampled ones (a tool's answer)."""
    adv = torch.zeros_like(r)
    next_adv = next_value = torch.zeros_like(r[:, 0])
    for t in reversed(range(r.size(1))):
        delta = r[:, t] + gamma * next_value - value[:, t]
        sampled = mask[:, t]
        next_adv = torch.where(sampled, delta + gamma * lam * next_adv, next_adv)
        next_value = torch.where(sampled, value[:, t], next_value)
        adv[:, t] = next_adv
    return torch.where(mask, adv, 0)

def whiten(x, mask):
    """(x - mean) / std over all tokens in mask, on all ranks; 0 elsewhere, or if all are equal."""
    x = model.double(x)
    mean, std = dist.mean_and_std(x[mask])
    differ = mask & passes.vary(mean, std)
    return torch.where(differ, (x - mean) / std, 0).float()

def advantages(r, ends, groups, mask, penalty, value, cfg):
    """Advantages (B, T), returns (B, T) or None, and which groups are dead, (P,). Given are rewards
    r (B, T) at `ends`; groups (B,); penalty (B, T), beta times a token's KL, 0 outside mask; and
    the critic's value (B, T), or None."""
    returns = None
    if value is None:  # a row's penalty counts at its end, before centering
        last = passes.last_tokens(mask)
        r = r - torch.where(last, penalty.sum(1, keepdim=True), 0)
    score, dead = scores_of_rows(r, ends, groups, cfg)
    if value is None:
        adv = score.flip(1).cumsum(1).flip(1)   # sum of the scores at or after a token
        adv = torch.where(mask, adv, 0)
    else:                   # each token is an action, with a penalty of its own
        adv = gae(score - penalty, value, mask, GAMMA, cfg.lam)
        returns = adv + value
    if cfg.adv_scale == "batch":
        adv = whiten(adv, mask)
    return adv, returns, dead

# ----------------------------------------------------- rollout: completions, rewards, credit
def collect(agent, problems, rng):
    """The rows of a rollout, judged by the rule; a variant may collect other ones."""
    return generate(agent, problems, agent.cfg.group, rng)

def rollout(agent, problems, rng):
    """Completions of this rank's problems, rewards, advantages: a Batch, and its statistics."""
    cfg = agent.cfg
    # 1. Sample.
    batch = collect(agent, problems, rng)
    reward.check_groups(batch, cfg)
    # 2. Reward, by rule or learned.
    batch.reward, batch.ends = reward.of_rule(agent, batch)
    if agent.reward_model:
        batch.components["rule_reward"] = batch.reward.sum(1)
        batch.reward = reward.learned(agent.reward_model, batch, cfg)
    batch.reward = reward.cap_truncated(batch)
    # 3. Advantages. A training pass of the sampler's weights gives values, and a log pi_old rounded
    # as in the update, which a KL in the reward needs, and ratios in bfloat16.
    kl_in_reward = bool(agent.ref) and cfg.kl == "reward"
    # If a step has one update, pi is pi_old, and ratios are 1, except in off-policy rows.
    has_ratios = cfg.updates > 1 or dist.largest(not batch.on_policy.all())
    logp = batch.logp
    if agent.critic or kl_in_reward or (has_ratios and agent.policy.amp):
        logp, batch.value = logps(agent.sampler, batch, cfg, agent.critic)
    if has_ratios:  # off-policy rows keep their sampler's logp
        batch.old_logp = torch.where(batch.on_policy[:, None], logp, batch.logp)
    if agent.ref:
        batch.ref_logp, _ = logps(agent.ref, batch, cfg)
    penalty = torch.zeros_like(batch.logp)
    if kl_in_reward:
        penalty = agent.beta * kl_estimate(logp, batch.ref_logp, cfg.estimator)
    batch.adv, batch.returns, dead = advantages(
        batch.reward, batch.ends, batch.groups, batch.mask, penalty, batch.value, cfg)
    return batch, report.statistics(batch, dead)

@torch.no_grad()
def logps(gpt, batch, cfg, critic=None):
    """`token_logps` of a whole rollout, without gradients."""
    return passes.in_parts(token_logps, gpt, batch, cfg, critic)

def token_logps(gpt, batch, cfg, critic=None):
    """log pi of each sampled token, and the critic's value of the state before it, both (B, T), 0
    outside mask; None without a critic."""
    return model.token_logps(gpt, batch.ids, batch.mask, cfg.temperature, critic,
                             passes.layout_of)

# --------------------------------------------------------------------------------- the loss
def token_weights(mask, loss_mean, n_rows, n_tokens, max_new):
    """Each token's weight in the loss, (B, T). n_rows and n_tokens count the whole minibatch, over
    all micro-batches and ranks. sequence: 1 / (|o| n_rows) (eq. 3), so tokens of long completions
    weigh less; token: 1 / n_tokens; constant: 1 / (max_new n_rows) (Dr. GRPO)."""
    if loss_mean == "token":
        return mask / n_tokens
    if loss_mean == "constant":
        return mask / (n_rows * max_new)
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / n_rows

def bounded(x):
    """x clamped to [-20, 20], so that its exp stays finite; but its gradient is that of x."""
    return x + (x.clamp(-20, 20) - x).detach()

def kl_estimate(logp, ref_logp, estimator, ratio=1.0):
    """A per-token estimate (B, T) of KL(pi || ref) from samples of pi; the paper's is k3 (eq. 4).
    The expected gradient in a loss, on-policy, is 0 for k1, that of KL(pi || ref) for k2 and
    ratio*k3, that of KL(ref || pi) for k3."""
    log_r = bounded(ref_logp - logp)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    k3 = log_r.expm1() - log_r      # exp(log_r) - 1 - log_r, exact near 0
    return k3 if estimator == "k3" else ratio * k3

def importance_ratio(log_ratio, mask, cfg):
    """pi / pi_old of each token, (B, T), or the geometric mean of its row's ratios."""
    if cfg.ratio == "sequence":  # GSPO
        length = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(1, keepdim=True) / length).expand_as(log_ratio)
    return bounded(log_ratio).exp()

def surrogate(ratio, logp, adv, mask, cfg):
    """PPO's clipped surrogate (eq. 1, 3), to be maximized, and where clipping makes its gradient 0,
    as a mask. All are (B, T); logp and mask are for variants, such as `cispo`."""
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    return torch.minimum(unclipped, clipped), clipped < unclipped

def policy_loss(logp, batch, weight, n_tokens, cfg, beta):
    """Minus the clipped surrogate, plus beta times a KL in the loss (eq. 3, 4), and statistics: the
    loss, and means over the n_tokens of the minibatch. With k3 in the loss the gradient for logp at
    ratio 1 is eq. 21: -weight * (adv + beta * (pi_ref / pi - 1))."""
    old_logp = batch.old_logp
    if old_logp is None:
        old_logp = logp.detach()  # ratio 1
    log_ratio = torch.where(batch.mask, logp - old_logp, 0)
    ratio = importance_ratio(log_ratio, batch.mask, cfg)
    gain, is_clipped = surrogate(ratio, logp, batch.adv, batch.mask, cfg)
    assert gain.shape == ratio.shape, "surrogate must return tensors (B, T)"
    per_token = -gain
    stats = {"clip_share": is_clipped.sum() / n_tokens}
    if batch.ref_logp is not None:
        token_ratio = bounded(log_ratio).exp()
        kl = kl_estimate(logp, batch.ref_logp, cfg.estimator, token_ratio)
        kl = torch.where(batch.mask, kl, 0)
        stats["kl"] = kl.sum() / n_tokens
        if cfg.kl == "loss":
            per_token = per_token + beta * kl
    stats["loss"] = (weight * per_token).sum()
    return stats["loss"], stats

def value_loss(value, old_value, returns, weight):
    """PPO's clipped value loss: half the squared error of the values (B, T), or of the values
    clipped to within VALUE_CLIP of the old ones, whichever is larger."""
    near = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    error = torch.maximum((value - returns).square(), (near - returns).square())
    return (weight * error).sum() / 2

def total_loss(agent, batch, weight, n_tokens):
    """The loss of some rows, statistics, and log pi (B, T). A new term: see `has_gradient`, too."""
    cfg = agent.cfg
    logp, value = token_logps(agent.policy, batch, cfg, agent.critic)
    loss, stats = policy_loss(logp, batch, weight, n_tokens, cfg, agent.beta)
    if value is not None:
        stats["value_loss"] = value_loss(value, batch.value, batch.returns, weight)
        loss = loss + VALUE_COEF * stats["value_loss"]
    return loss, stats, logp

# ------------------------------------------------------------------------------- the update
def minibatches(cfg, rng, groups):
    """Splits a step's rows at random into minibatches, in each epoch. For each it yields the
    indices (on the host) of its rows among this rank's, and its number of rows on all ranks."""
    here, total = dist.numbered(groups)  # this rank's rows among all
    for _ in range(cfg.epochs):
        order = torch.tensor(rng.sample(range(total), total))
        for chosen in order.tensor_split(cfg.minibatches):
            rows = torch.isin(here, chosen).nonzero()[:, 0]
            yield rows, max(1, len(chosen))

def minibatch(agent, batch, rows):
    """A hook for variants: the batch as an optimizer step on `rows` (host indices) is to see it,
    for what depends on a whole minibatch, over all ranks, as in `clip_cov`."""
    return batch

@torch.enable_grad()  # a task's code may have switched it off
def update(agent, batch, rng):
    """Makes an optimizer step for each minibatch of each epoch; returns the mean statistics."""
    cfg = agent.cfg
    stats = defaultdict(float)
    norm = 0.0
    params = dist.trained(agent.opt)
    batch = replace(batch, ids=batch.ids.cpu())  # for layouts
    for i, (rows, n_rows) in enumerate(minibatches(cfg, rng, batch.groups)):
        part = minibatch(agent, batch, rows)
        mask = part.mask.cpu()
        n_tokens = max(1, dist.all_reduce(mask[rows].sum()).item())
        rows = rows[has_gradient(agent, part)[rows]]
        scored = []
        for micro in passes.micro_batches(part, mask, rows, cfg.micro_tokens):
            weight = token_weights(micro.mask, cfg.loss_mean, n_rows,
                                   n_tokens, cfg.max_new)
            loss, terms, logp = total_loss(agent, micro, weight, n_tokens)
            loss.backward()
            for name, x in terms.items():
                stats[name] += x.detach() / cfg.updates
            scored.append((micro, logp.detach()))
        if i == 0:  # raises UserError if these are not the sampler's log-probabilities
            mismatch = passes.checked_gap(scored, agent.policy.amp)
        dist.sum_gradients(params)  # over the ranks
        norm += dist.clip_gradients(params, GRAD_CLIP)
        agent.opt.step()
        agent.opt.zero_grad()
    return dist.sums(stats) | {"grad_norm": norm / cfg.updates, "mismatch": mismatch}

def has_gradient(agent, batch):
    """Which rows may have a gradient, (B,), on the host; update skips the others. If the loss is
    the surrogate alone, those with an advantage; with a reference, critic or other loss, all."""
    own_loss = any(f.__module__ != __name__ for f in (surrogate, policy_loss, total_loss))
    if agent.ref or agent.critic or own_loss:
        return torch.ones(len(batch.ids), dtype=torch.bool)
    return (batch.mask & (batch.adv != 0)).any(1).cpu()

# ---------------------------------------------------------------------------------- the run
def train_step(agent, problems, step):
    """A rollout (1 to 3) and its update (4); returns the Batch and statistics."""
    cfg = agent.cfg
    agent.step = step
    clock = report.Clock()
    if cfg.half_life:
        for opt_group in agent.opt.param_groups:
            opt_group["lr"] = opt_group["initial_lr"] * 0.5 ** ((step - 1) / cfg.half_life)
    rng = dist.rng(cfg, "problems", step)
    drawn = rng.sample(problems, cfg.prompts)
    batch, stats = rollout(agent, dist.of_rank(drawn), dist.rng(cfg, "rollout", step))
    clock.has_sampled()
    caches.release()
    # 4. Update.
    stats |= update(agent, batch, dist.rng(cfg, "update", step))
    dist.sync_sampler(agent)
    stats |= clock.speeds(batch) | report.schedules(agent)
    return batch, stats

def train(cfg, task=None, saved=None):
    """A whole run, or the rest of one from the Checkpoint `saved`: the warm start (in setup.begin)
    and Algorithm 1: in each iteration a new reference, a refitted reward model, --steps steps."""
    config.algorithm(cfg.algo, ALGOS, sys.modules[__name__])    # undoes later make_configs
    cfg, task, encoding, policy, problems, held_out = setup.begin(cfg, task, saved)
    agent = new_agent(cfg, task, encoding, policy, saved)
    first = saved.step + 1 if saved else 0  # 0, too, if stopped in its warm start
    if first == 0:
        finish_step(agent, held_out, 0, {})
    log = []  # of this process
    for step in range(max(1, first), cfg.total_steps + 1):
        iteration, earlier = divmod(step - 1, cfg.steps)
        fitted = {}
        if earlier == 0:  # the first step of an iteration
            if agent.ref:
                dist.copy_weights(agent.ref, agent.policy)
            if agent.reward_model:
                fitted = reward.refit(agent, problems, iteration, generate)
        batch, stats = train_step(agent, problems, step)
        stats |= fitted
        log.append(stats)
        report.log_step(agent, step, batch, log, logps)
        finish_step(agent, held_out, step, stats)
    report.farewell(cfg, held_out[0].prompt)
    return agent

def finish_step(agent, held_out, step, stats):
    """Evaluates when due, then logs and saves."""
    cfg = agent.cfg
    due = cfg.eval_every and step % cfg.eval_every == 0
    if due or step in (0, cfg.total_steps):
        stats = stats | report.evaluate(agent, held_out, generate)
    checkpoint.end_step(agent, step, stats)

# ------------------------------------------------------------------------- the command line
def main(argv=None):
    """The command line; an error that the user can fix is one line, and exit code 2."""
    with report.exit_code():
        mode, given = config.read(Config, __doc__, argv)
        given, saved = checkpoint.settings(mode, given, Config)  # and those of a run's folder
        cfg = make_config(**given)
        if mode.report:
            terminal.print0(f"the report is in {report.write(mode.report, cfg.out)}")
        elif mode.eval_only:
            agent = Agent(cfg, *setup.trained_model(cfg))
            results = report.evaluate(agent, setup.held_out(agent), generate)
            terminal.print0(report.percentages(results))
        elif mode.ask is not None:
            agent = Agent(cfg, *setup.trained_model(cfg))
            terminal.print0(setup.ask(agent, mode.ask, sample))
        else:
            with checkpoint.running(cfg, saved):  # Ctrl-C ends it after a step, saved
                train(cfg, saved=saved)

if __name__ == "__main__":
    main()
