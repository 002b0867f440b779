"""GRPO, Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, sec. 4), PPO and more.

The old policy (the weights that sample) writes G completions per prompt. A token's advantage, its
factor in the loss, is the z-score of its completion's reward in the group (4.1.2) or, with rewarded
steps, the sum over those that end at or after it (4.1.3). The loss clips the ratio to the old
policy, averages over a completion, then the group (eq. 3), and adds the KL (k3, eq. 4) to the
reference, a copy of the policy made as each iteration begins (Algorithm 1).

    python grpo.py --task arithmetic                      # a minute of GRPO on a laptop
    python grpo.py --resume                               # continue after Ctrl-C, a crash or a kill
    python grpo.py --ask "47*58=" --init out/arithmetic   # try the result
"""
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import torch

import data
import model
import reward
from data import answers, tokenizer
from run import (batches, caches, checkpoint, config, dist, files, preflight, pretrained, report,
                 setup, show, warm_start)

# ---------------------------------------------------------------------------------- the settings
# The published algorithms, as differences from Config. To reinforce, a2c adds a critic; ppo adds a
# clip and a reference; grpo replaces the critic by the group. Other settings differ too.
NEVER = 1e9             # a ratio is never clipped
ALGOS = {
    "grpo": {},                                                         # DeepSeekMath, 2402.03300
    "reinforce": dict(baseline="none", adv_scale="none", kl="none", loss_mean="constant",
                      clip_low=NEVER, clip_high=NEVER),
    "a2c": dict(baseline="value", adv_scale="batch", kl="none", clip_low=NEVER, clip_high=NEVER),
    "ppo": dict(baseline="value", adv_scale="batch", kl="reward"),
    "rloo": dict(baseline="leave-one-out", adv_scale="none", kl="reward", loss_mean="constant",
                 clip_low=NEVER, clip_high=NEVER),                                  # 2402.14740
    "dr_grpo": dict(adv_scale="none", kl="none", loss_mean="constant"),             # 2503.20783
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl="none"),       # 2507.18071
}
Baseline = Literal["none", "group", "leave-one-out", "value",
                   "group+value"]
LossMean = Literal["sequence", "token", "constant"]
Cache = Literal["auto", "plain", "shared", "static"]

@dataclass(frozen=True)
class Config:
    """The settings of a run, as built by `make_config`. A field is a flag, its comment the help. By
    default a step's sizes, lr, beta and the loss are the paper's; the rest is this code's."""
    # basics: in the paper a step has 16 prompts, 64 completions each, up to 1024 tokens long
    task: str = "arithmetic"    # name of a file in data/, or path of one
    task_args: dict = field(default_factory=dict)   # settings of the task's own
    algo: str = "grpo"          # algorithm: a name in ALGOS or experiments/variants, or a .py file
    init: str = ""              # folder of the model to start from; empty: a new model
    out: str = ""               # folder of the run; empty: out/<task>
    steps: int = 100            # steps (a rollout and its update) in each of --iterations
    prompts: int = 16           # prompts per step (P)
    group: int = 64             # completions per prompt (G)
    max_new: int = 1024         # maximum tokens per completion (N)
    lr: float = 1e-6            # learning rate
    seed: int = 1               # random seed
    # prompts and sampling
    chat: Literal["auto", "none", "think", "no_think"] = "auto"  # chat template, thinking on or off
    system: str = ""            # system message for the chat template; empty: its own
    temperature: float = 1.0    # temperature of sampling and of all log-probabilities
    # evaluation and checkpoints
    eval_every: int = 0         # steps between evaluations; 0: before the first, after the last
    held_out: int = 0           # held-out problems to evaluate on; 0: all
    samples: int = 8            # completions per held-out problem, plus one greedy
    save_every: int = 10        # steps between checkpoints, and between entries in samples.jsonl
    # reward
    reward: Literal["rule", "model", "rollouts"] = "rule"   # task's, or model of it or of rollouts
    supervision: Literal["outcome", "process"] = "outcome"  # what is rewarded: completions or steps
    # advantage
    baseline: Baseline = "group"                            # value subtracted from the rewards
    adv_scale: Literal["none", "group", "batch"] = "group"  # std that divides the advantages
    lam: float = 0.95           # lambda of GAE
    critic: Literal["shared", "separate"] = "shared"    # head on the policy, or a model of its own
    # loss
    ratio: Literal["token", "sequence"] = "token"       # importance ratio per token, or completion
    clip_low: float = 0.2       # lower clip range (0.2 is PPO's; the paper is silent)
    clip_high: float = 0.2      # upper clip range
    kl: Literal["loss", "reward", "watch", "none"] = "loss"  # where the KL goes; watch: only logged
    estimator: Literal["k1", "k2", "k3", "ratio*k3"] = "k3"     # KL estimator
    beta: float = 0.04          # KL coefficient; 0: no KL term
    loss_mean: LossMean = "sequence"    # divide by own length (GRPO), tokens, constant (Dr. GRPO)
    # update
    iterations: int = 1         # outer iterations: new reference and refitted reward model in each
    epochs: int = 1             # passes over a rollout (the paper's mu)
    minibatches: int = 1        # optimizer steps in a pass
    micro_tokens: int = 0       # maximum tokens per forward and backward pass; 0: by the memory
    recompute: bool = False     # activation checkpointing
    half_life: int = 0          # steps after which the learning rate has halved; 0: never
    # new model and warm start, which is supervised fine-tuning on the task's demonstrations
    n_layer: int = 2            # layers of a new model
    n_embd: int = 256           # width (channels) of a new model; its heads have 32 channels
    warm_steps: int = 1500      # optimizer steps of the warm start; with --init, 0
    warm_lr: float = 1.2e-3     # peak learning rate of the warm start
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # device; auto: best available
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # matmul dtype; auto: bfloat16 on cuda
    compile: bool = False       # torch.compile; over a minute at first
    cache: Cache = "auto"       # KV cache; plain: prefixes are not shared; auto: static on cuda
    shard: bool = False         # sharding of the models across the ranks (FSDP2)

    def __post_init__(self):
        at_least = dict(group=2, seed=0, steps=0, warm_steps=0, temperature=1e-3)
        config.check(self, at_least, most=dict(lam=1, samples=1024))

    @property
    def folder(self):
        return Path(self.out or f"out/{Path(self.task).stem}")

    @property
    def updates(self):
        return self.epochs * self.minibatches

    @property
    def learns_reward(self):
        return self.reward != "rule"

    @property
    def applies_kl(self):
        return self.beta > 0 and self.kl in ("loss", "reward")

    @property
    def needs_reference(self):
        return self.applies_kl or self.kl == "watch" or self.learns_reward

def make_config(**given):
    """The Config for a command line or a notebook, which may also give a task's own settings, such
    as `difficulty`. Raises UserError for unknown names and bad values."""
    given = given.pop("task_args", {}) | given
    task = data.load_task(given.get("task", Config.task))
    algo = (task.DEFAULTS | given).get("algo", Config.algo)
    # From here on each line overrides those above it.
    chosen = {f.name: f.default for f in fields(Config) if f.name != "task_args"}
    chosen |= task.DEFAULTS
    chosen |= config.algorithm(algo, ALGOS, sys.modules[__name__])
    chosen |= implied(chosen | given)
    chosen |= given
    cfg = config.build(Config, task, chosen)
    if "init" in given or "warm_steps" in given:
        return cfg
    return warm_start.shipped(cfg)          # --init data/warm_start, if it serves

def implied(chosen):
    """What some settings imply for others, unless these are given too."""
    others = {}
    if chosen["kl"] == "reward":
        others["estimator"] = "k1"          # it has the KL's gradient there (eq. 2)
    if chosen["reward"] != "rule" and chosen["adv_scale"] == "group":
        others["adv_scale"] = "none"        # once all are good, the group's std is only noise
    if chosen["init"]:
        others |= dict(warm_steps=0, warm_lr=2e-5)      # lower, if --warm_steps adds one
    return others

# ------------------------------------------------------------------- sampling: prompts to a group
PART = 128      # tokens of a part of the vocabulary, see `sample_token`

@dataclass
class Batch:
    """A rollout: P prompts * G completions = B rows, row p * G + g; column t belongs to token t."""
    ids: torch.Tensor               # (B, T) int64    prompt, completion, padding on the right
    mask: torch.Tensor              # (B, T) bool     sampled tokens, the end token included
    finished: torch.Tensor          # (B,)   bool     ended with a stop token; False if cut off
    logp: torch.Tensor              # (B, T) float32  log pi(ids[:, t] | ids[:, :t]), the sampler's
    start: torch.Tensor             # (B,)   int64    column of the completion's first token
    problems: list = None           # (B,)            problem of each row
    texts: list = None              # (B,)            completion as text
    components: dict = None         # (B,)   float32  components of the rule's reward, by name
    reward: torch.Tensor = None     # (B, T) float32  reward of a step, at the step's last token
    ends: torch.Tensor = None       # (B, T) bool     last tokens of steps; an outcome is one step
    old_logp: torch.Tensor = None   # (B, T) float32  log pi under the old policy; None: the policy
    ref_logp: torch.Tensor = None   # (B, T) float32  log pi under the reference
    value: torch.Tensor = None      # (B, T) float32  critic's value of the state before token t
    adv: torch.Tensor = None        # (B, T) float32  advantages
    returns: torch.Tensor = None    # (B, T) float32  targets of the value

    def select(self, rows, T):
        """The tensors of some rows, indices on the host, cut to T columns, each on its device."""
        there = model.send(rows, self.mask.device)
        tensors = {n: x[rows if x.is_cpu else there] for n, x in vars(self).items()
                   if isinstance(x, torch.Tensor)}
        return Batch(**{n: x[:, :T] if x.dim() == 2 else x for n, x in tensors.items()})

def inverse_cdf(p, u):
    """The first index at which the cumulative sum of p (r, n) exceeds the share u (r,) of its
    total, and by how much; both (r,). u in [0, 1) is clamped to what float32 can tell from 0 and 1,
    so that an element of nearly 0 is not chosen."""
    # float64, as a parallel float32 sum need not be monotonic: an element of 0 might be chosen
    cdf = p.to(dist.double(p.device)).cumsum(-1)
    share = u[:, None].clamp(2 ** -25, 1 - 2 ** -24) * cdf[:, -1:]
    i = torch.searchsorted(cdf, share, right=True).clamp(max=p.size(1) - 1)     # of NaN: the last
    return i[:, 0], (cdf.gather(1, i) - share)[:, 0]

def sample_token(p, u):
    """Samples a token (r,) from each row of probabilities p (r, V) by inverse CDF: the first whose
    cumulative probability exceeds u (r,), uniform in [0, 1)."""
    if p.size(1) % PART:
        return inverse_cdf(p, u)[0]
    parts = p.unflatten(1, (-1, PART))      # first a part, then its token: faster on a GPU
    rows, mass = torch.arange(len(p), device=p.device), parts.sum(-1)
    part, over = inverse_cdf(mass, u)
    within = 1 - over / mass[rows, part]                        # u is so far within that part
    inner, _ = inverse_cdf(parts[rows, part], within)
    return PART * part + inner

@torch.no_grad()
def sample(policy, prompts, group, max_new, temperature, stop, u=None, n_greedy=0):
    """Samples `group` completions, the first `n_greedy` of them greedily, of each prompt (a list of
    ids), with at most `max_new` tokens (one number, or one per prompt). `stop`: ids that end a
    completion. u (B, N): random numbers for `sample_token`. Returns a Batch: `ids` to `start`."""
    device, longest = policy.device, max(map(len, prompts))
    ids, start, most = batches.pad_prompts(prompts, group, max_new, policy.cfg.block_size, device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    logp = torch.zeros_like(ids, dtype=torch.float32)
    finished = torch.zeros_like(start, dtype=torch.bool)
    rows = torch.arange(len(ids), device=device)    # (r,), the rows in the cache
    active = torch.ones_like(finished)              # (r,), those of them that have not ended
    is_greedy = rows % group < n_greedy                                                       # (B,)
    u = (torch.rand(len(ids), most.max()) if u is None else u).to(device, torch.float32)
    is_stop = torch.isin(torch.arange(policy.cfg.vocab_size), torch.tensor(sorted(stop))).to(device)

    cache = (policy.cache_class or caches.KVCache)(policy, ids.size(1), temperature)
    p = cache.read(ids[::group, :longest], start[::group], group)                           # (B, V)
    for n in range(u.size(1)):
        token = sample_token(p, u[rows, n])                                                 # (r,)
        if n_greedy:
            token = torch.where(is_greedy[rows], p.argmax(-1), token)
        token_logp = p.gather(1, token[:, None])[:, 0].log()
        column = (start[rows] + n).clamp(max=ids.size(1) - 1)
        ids[rows, column] = torch.where(active, token, ids[rows, column])
        logp[rows, column] = torch.where(active, token_logp, logp[rows, column])
        mask[rows, column] |= active
        finished[rows] |= active & is_stop[token]
        active = ~finished[rows] & (n + 1 < most[rows])
        if (n + 1) % cache.every == 0 or n + 1 == u.size(1):     # the host waits
            kept = cache.keep(active)
            if len(kept) == 0:
                break
            rows, active, token, column = rows[kept], active[kept], token[kept], column[kept]
        p = cache.append(token, column)                                                     # (r, V)
    T = batches.row_lengths(mask).max().item()
    return Batch(ids[:, :T], mask[:, :T], finished, logp[:, :T], start)

def complete(agent, prompts, group, u, max_new=None, n_greedy=0):
    """`sample` from the policy, with the settings of the run."""
    cfg, policy = agent.cfg, agent.sampler or agent.policy
    return sample(policy, prompts, group, max_new or cfg.max_new, cfg.temperature,
                  agent.encoding.stop, u, n_greedy)

def generate(agent, problems, u, n_greedy=0):
    """Completions of this rank's share of `problems`, with their texts and rule rewards. The random
    numbers u (n, G, N) cover all ranks, so samples do not depend on the number of ranks."""
    problems, u = dist.local_share(problems), dist.local_share(u)
    prompts = [agent.encoding.encode_prompt(p.prompt) for p in problems]
    batch = complete(agent, prompts, u.size(1), u.flatten(0, 1), n_greedy=n_greedy)
    return reward.score(agent.task, agent.encoding, problems, batch)

# ---------------------------------------------------------------- advantages: rewards to credit
def outcome_scores(reward, group):
    """GRPO's advantages under outcome supervision (DeepSeekMath 4.1.2): the z-score of each
    completion's reward within its group, (B,), and which groups are dead, (P,): rewards equal up to
    rounding (1e-6 of their mean, at least 1e-7), whose scores are exactly 0. The std has no Bessel
    correction (the paper is silent): the mean square is 1 for any G. It has no epsilon."""
    r = reward.to(dist.double(reward.device)).view(-1, group)                            # (P, G)
    mean = r.mean(1, keepdim=True)
    std = r.std(1, keepdim=True, correction=0)
    dead = std <= 1e-6 * mean.abs().clamp(min=0.1)
    return torch.where(dead, 0, (r - mean) / std).flatten().float(), dead.flatten()

def step_scores(reward, ends, group, baseline="group", scale="group"):
    """The general form, for process supervision (4.1.3) and for other baselines and scales: the
    rewards of steps (B, T), at the columns `ends` (B, T), relative to those of all steps of the
    group. One step per row is outcome supervision. Returns scores (B, T), dead groups (P,)."""
    r = torch.where(ends, reward, 0).to(dist.double(reward.device))
    r, on = r.view(-1, group, r.size(1)), ends.view(-1, group, r.size(1))                # (P, G, T)
    n, total = on.sum((1, 2), True), r.sum((1, 2), True)                                # (P, 1, 1)
    mean = total / n
    std = torch.where(on, r - mean, 0).square().sum((1, 2), True).div(n).sqrt()
    dead = std <= 1e-6 * mean.abs().clamp(min=0.1)
    if baseline in ("group", "group+value"):
        r = torch.where(dead, 0, r - mean)
    elif baseline == "leave-one-out":           # the mean of the other completions
        r = r - (total - r.sum(2, True)) / (n - on.sum(2, True))
    elif baseline not in ("none", "value"):
        raise ValueError(f"no case for the baseline {baseline!r}")
    divisor = {"group": torch.where(dead, 1, std), "batch": 1, "none": 1}   # batch: in `advantages`
    return torch.where(on, r / divisor[scale], 0).view_as(reward).float(), dead.flatten()

GAMMA = 1.0             # discount, used only with a critic

def gae(reward, value, mask, gamma, lam):
    """Generalized advantage estimation, (B, T): A_t = sum over l of (gamma lam)^l delta_{t+l}, with
    delta_t = r_t + gamma V_{t+1} - V_t; V_t is the value before token t, 0 after the last one. The
    next token is the next that was sampled: credit crosses holes in the mask (B, T)."""
    out = torch.zeros_like(reward)
    next_adv = next_value = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.size(1))):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        next_adv = torch.where(mask[:, t], delta + gamma * lam * next_adv, next_adv)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        out[:, t] = torch.where(mask[:, t], next_adv, 0)
    return out

def advantages(reward, ends, mask, penalty, value, cfg):
    """Advantages, returns or None, dead groups (P,), from the rewards of steps at `ends`, the KL
    penalty on each token's reward, and the critic's values or None; all but `dead` are (B, T)."""
    if value is None:               # no critic: the whole KL penalty is on the last reward
        reward = reward - torch.where(batches.last_tokens(mask), penalty.sum(1, True), 0)
    if cfg.supervision == "outcome" and cfg.baseline == cfg.adv_scale == "group":
        score, dead = outcome_scores(reward.sum(1), cfg.group)
        score = torch.where(ends, score[:, None], 0)
    else:
        score, dead = step_scores(reward, ends, cfg.group, cfg.baseline, cfg.adv_scale)
    if value is None:               # a token gets the scores of the steps that end at or after it
        adv, returns = torch.where(mask, score.flip(1).cumsum(1).flip(1), 0), None
    else:
        adv = gae(score - penalty, value, mask, GAMMA, cfg.lam)
        returns = adv + value
    if cfg.adv_scale == "batch":
        adv = batches.whiten(adv, mask)
    return adv, returns, dead

# ----------------------------------------------------------- rollout: completions, rewards, credit
def rollout(agent, problems, rng):
    """Completions of the problems with their rewards and advantages: a Batch and its statistics."""
    cfg = agent.cfg
    batch = generate(agent, problems, dist.uniform(rng, len(problems), cfg.group, cfg.max_new))
    batch.reward, batch.ends = reward.of_steps(agent.task, batch, cfg, agent.encoding)
    if agent.reward_model is not None:
        batch.components["rule_reward"] = batch.reward.sum(1)
        batch.reward = reward.learned(agent.reward_model, batch, cfg)
    batch.reward = reward.at_the_limit(batch)

    # The sampler's log-probabilities are those of a training pass up to rounding. Where rounding
    # matters, use a pass: in bfloat16, and for a KL in the reward, which may be all the reward.
    # With one update per rollout the old policy is the one that is trained, see `total_loss`.
    use_pass = agent.policy.amp is not None and cfg.updates > 1 or cfg.kl == "reward"
    old_logp = batch.logp
    if use_pass or agent.critic is not None:
        pass_logp, batch.value = batches.logps(agent.sampler or agent.policy, batch, cfg,
                                               agent.critic)
        old_logp = pass_logp if use_pass else batch.logp
    batch.old_logp = old_logp if cfg.updates > 1 else None
    if agent.ref is not None:
        batch.ref_logp, _ = batches.logps(agent.ref, batch, cfg)

    penalty = torch.zeros_like(batch.logp)
    if cfg.kl == "reward" and agent.ref is not None:    # 1.0: the ratio of the old policy to itself
        penalty = agent.beta * kl_estimate(old_logp, batch.ref_logp, 1.0, cfg.estimator)
    batch.adv, batch.returns, dead = advantages(batch.reward, batch.ends, batch.mask, penalty,
                                                batch.value, cfg)
    return batch, batches.statistics(batch, dead)

# -------------------------------------------------------------------------------------- the loss
def token_weights(mask, loss_mean, rows, tokens, max_new):
    """Each token's weight in the loss, (B, T). `rows` and `tokens` count the whole minibatch, over
    all micro-batches and ranks. sequence: 1/|o| (eq. 3), so tokens of long completions weigh less;
    token: all equal; constant: all equal, and independent of the lengths (Dr. GRPO)."""
    if loss_mean == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / max(rows, 1)
    return mask / max({"token": tokens, "constant": rows * max_new}[loss_mean], 1)

def bounded(x):
    """x clamped to [-20, 20] with a straight-through gradient, so that its exp stays finite."""
    return x + (x.clamp(-20, 20) - x).detach()

def kl_estimate(logp, ref_logp, ratio, estimator):
    """A per-token estimate (B, T) of the KL to the reference from samples of the policy. In a loss,
    its expected gradient on-policy is 0 for k1, that of KL(pi || ref) for k2 and ratio*k3, and that
    of KL(ref || pi) for k3, the paper's eq. 4."""
    log_r = bounded(ref_logp - logp)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    k3 = log_r.expm1() - log_r          # exp(log_r) - 1 - log_r would lose its digits near 0
    return k3 * {"k3": 1, "ratio*k3": ratio}[estimator]

def importance_ratio(logp, old_logp, mask, cfg):
    """The ratio of the new to the old probability, (B, T), or its geometric mean over a row."""
    log_ratio = logp - old_logp
    if cfg.ratio == "sequence":                 # GSPO
        log_ratio = (log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).expand_as(log_ratio)
    return bounded(log_ratio).exp()

def surrogate(ratio, adv, logp, mask, cfg):
    """PPO's clipped surrogate, which is maximized, and where the clip takes its gradient away; all
    are (B, T)."""
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    gain = torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    return gain, ((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))

def policy_loss(logp, old_logp, ref_logp, adv, mask, weight, tokens, cfg, beta):
    """The clipped surrogate (DeepSeekMath eq. 1, 3) plus the KL (eq. 4), from tensors (B, T), and
    statistics, which are means over the `tokens` of the minibatch. At ratio 1 its gradient with
    respect to logp is -weight * (adv + beta * (pi_ref / pi - 1)), the paper's eq. 21."""
    logp, old_logp, adv = (torch.where(mask, x, 0) for x in (logp, old_logp, adv))  # NaN stays out
    ratio = importance_ratio(logp, old_logp, mask, cfg)
    gain, clipped = surrogate(ratio, adv, logp, mask, cfg)
    per_token, stats = -gain, {"clip_share": clipped.sum() / tokens}
    if ref_logp is not None:
        kl = kl_estimate(logp, torch.where(mask, ref_logp, 0), ratio, cfg.estimator)
        stats["kl"] = kl.sum() / tokens
        if cfg.kl == "loss":
            per_token = per_token + beta * kl
    loss = (weight * per_token).sum()
    stats["loss"] = loss
    return loss, {name: x.detach() for name, x in stats.items()}

VALUE_COEF = 0.1        # weight of the critic's loss
VALUE_CLIP = 0.2        # how far PPO's value loss lets a value move from the old one

def value_loss(value, old_value, returns, mask, weight):
    """PPO's clipped value loss: half the squared error of the values (B, T), or of the values
    clipped to within VALUE_CLIP of the old ones, whichever is larger."""
    value, old_value, returns = (torch.where(mask, x, 0) for x in (value, old_value, returns))
    near = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    error = torch.maximum((value - returns).square(), (near - returns).square())
    return (weight * error).sum() / 2

def total_loss(agent, batch, weight, tokens):
    """The sum of all terms of the loss (a new term goes here) for some rows of a rollout, the
    statistics, and the log-probabilities (B, T)."""
    cfg = agent.cfg
    logp, value = model.token_logps(agent.policy, batch.ids, batch.mask, cfg.temperature,
                                    agent.critic)
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp     # ratio 1
    loss, stats = policy_loss(logp, old_logp, batch.ref_logp, batch.adv, batch.mask, weight, tokens,
                              cfg, agent.beta)
    if value is not None:
        error = value_loss(value, batch.value, batch.returns, batch.mask, weight)
        loss = loss + VALUE_COEF * error
        stats["value_loss"] = error.detach()
    return loss, stats, logp.detach()

# ------------------------------------------------------------------------------------ the update
GRAD_CLIP = 1.0         # maximum gradient norm

def update(agent, batch, rng):
    """Makes one optimizer step for each minibatch of each epoch over a rollout, accumulating
    gradients over micro-batches; returns the mean statistics. Raises UserError if, before the first
    optimizer step, the sampler's and the trainer's log-probabilities disagree."""
    cfg, zero = agent.cfg, batch.logp.new_zeros(())
    total = {"loss": zero, "clip_share": zero}          # for a step that skips every row
    norm, mismatch = 0.0, None
    dist.release(agent)
    learns = has_gradient(agent, batch)
    ids, mask = batch.ids.cpu(), batch.mask.cpu()       # rows are chosen on the host
    batch = replace(batch, ids=ids)
    setup.train_mode(agent, True)                      # in case you add dropout
    for rows, size in batches.minibatches(cfg, rng, len(ids)):
        tokens = max(1, dist.all_reduce(mask[rows].sum()).item())
        live, gaps = rows[learns[rows]], [batch.logp.new_zeros(0)]
        for micro, T in batches.micro_batches(ids[live], mask[live], cfg.micro_tokens):
            part = batch.select(live[micro], T)
            weight = token_weights(part.mask, cfg.loss_mean, size, tokens, cfg.max_new)
            loss, stats, logp = total_loss(agent, part, weight, tokens)
            loss.backward()
            for name, x in stats.items():
                total[name] = total.get(name, 0.0) + x
            gaps.append((logp - part.logp).abs().flatten())
        if mismatch is None:
            mismatch = batches.checked_gap(torch.cat(gaps), mask[live].sum(), agent.policy.amp)
        norm += warm_start.optimizer_step(agent.opt, GRAD_CLIP)
    setup.train_mode(agent, False)
    dist.refresh(agent)
    means = (dist.all_reduce(torch.stack([*total.values()])) / cfg.updates).tolist()
    return dict(zip(total, means)) | {"grad_norm": norm / cfg.updates, "mismatch": mismatch}

def has_gradient(agent, batch):
    """Which rows of a rollout have a gradient, (B,) on the host; `update` skips the others. Without
    a reference and a critic, rows whose advantages are all 0 have none. As a check, the loss of two
    of them is computed: if it is not 0, the loss has a new term that needs these rows."""
    if agent.ref is not None or agent.critic is not None:
        return torch.ones(len(batch.ids), dtype=torch.bool)
    learns = batch.adv.any(1).cpu()
    probe = batch.select((~learns).nonzero()[:2, 0], batch.ids.size(1))
    with torch.no_grad():
        loss, *_ = total_loss(agent, probe, probe.mask.float(), 1)
    if loss.item() != 0:
        raise data.UserError("rows whose advantages are 0 have a loss, but the update would skip "
                             "them: let has_gradient in grpo.py return all rows")
    return learns

# ------------------------------------------------------------------------------ the reward model
FIT_STEPS = 64          # a fit labels completions of as many problems as so many steps have

def begin_iteration(agent, problems, iteration):
    """Algorithm 1: the policy becomes the reference, and the reward model is fitted to labels of
    its completions plus 10 % old rows. Returns the metrics of the fit."""
    cfg = agent.cfg
    if agent.ref is not None:
        dist.copy_weights(agent.ref, agent.policy)
    if agent.reward_model is None:
        return {}
    rng = dist.rng(cfg, "fit", iteration)
    labels_rng = dist.rng(cfg, f"labels of rank {dist.world()[0]}", iteration)
    n = min(FIT_STEPS * cfg.prompts, len(problems))
    n -= n % dist.world()[1]
    tenth = len(problems) // 10                                 # the first tenth is held out
    drawn = rng.sample(problems[:tenth], n // 10)
    drawn += rng.sample(problems[tenth:], n - n // 10)
    rows = []
    size = max(1, cfg.group // reward.CHOICES) * cfg.prompts       # as many rows as in training
    for part in batches.in_chunks("labelling", drawn, size):
        batch = generate(agent, part, dist.uniform(rng, len(part), reward.CHOICES, cfg.max_new))
        batch.reward, batch.ends = reward.of_steps(agent.task, batch, cfg, agent.encoding)
        if cfg.reward == "rollouts":
            batch.reward = reward.rollout_labels(complete, agent, batch, labels_rng)
        rows.append(dict(ids=batch.ids, mask=batch.mask, ends=batch.ends, label=batch.reward))
    agent.history, measures = reward.refit(agent.reward_model, batches.concatenate(*rows),
                                           agent.history, cfg, rng)
    show.reward_model_quality(measures)
    return measures

# ------------------------------------------------------------------------------------ evaluation
def evaluate(agent, problems):
    """Shares of the problems solved: greedily, by at least one of k samples (pass@k), and by the
    majority vote of k samples (maj@k), for k = 1, 2, 4, ... up to --samples."""
    cfg, rng, n = agent.cfg, dist.rng(agent.cfg, "evaluate"), agent.cfg.samples
    names = ["greedy", *answers.shares([0.0] * n, [""] * n)]
    total = [0.0] * (1 + len(names))                # the number of problems, then the sum of each
    size = max(1, cfg.prompts * cfg.group // (1 + n))   # as many rows at a time as in training
    for part in batches.in_chunks("evaluation", problems, size):
        u = dist.uniform(rng, len(part), n, cfg.max_new)
        u = torch.cat((torch.zeros_like(u[:, :1]), u), 1)           # the greedy row's are not used
        batch = generate(agent, part, u, n_greedy=1)
        said = [agent.task.answer(text) if ended else ""
                for text, ended in zip(batch.texts, batch.finished.tolist())]
        for i, (greedy, *right) in enumerate(batch.components["correct"].view(-1, 1 + n).tolist()):
            votes = said[i * (1 + n) + 1:(i + 1) * (1 + n)]
            found = [1, greedy, *answers.shares(right, votes).values()]
            total = [x + y for x, y in zip(total, found)]
    count, *solved = dist.all_reduce(torch.tensor(total)).tolist()
    return dict(zip(names, (x / count for x in solved)))

# --------------------------------------------------------------------------------------- the run
def train_step(agent, problems, step):
    """One rollout and its update: the Batch, for samples.jsonl, and the step's statistics."""
    cfg, began = agent.cfg, time.perf_counter()
    if cfg.half_life:
        warm_start.scale_rates(agent.opt, 0.5 ** ((step - 1) / cfg.half_life))
    drawn = dist.rng(cfg, "problems", step).sample(problems, cfg.prompts)
    batch, stats = rollout(agent, drawn, dist.rng(cfg, "rollout", step))
    sampled = time.perf_counter()
    stats |= update(agent, batch, dist.rng(cfg, "update", step))
    stats |= batches.speed(batch, began, sampled, time.perf_counter())
    if cfg.applies_kl:
        stats["beta"] = agent.beta
    return batch, stats

def train(cfg, task=None, saved=None):
    """A whole run, or the rest of one from the Checkpoint `saved`."""
    task = task or data.load_task(cfg.task)
    config.algorithm(cfg.algo, ALGOS, sys.modules[__name__])    # a file may replace what is above
    cfg, encoding, policy, problems, held_out = setup.begin(cfg, task, saved)
    agent = setup.new_agent(cfg, task, encoding, policy, saved)
    show.header(agent, problems, held_out)
    total, done = cfg.steps * cfg.iterations, []
    if saved and saved.stats:                               # stopped during an evaluation: redo it
        finish_step(agent, held_out, saved.step, saved.stats)
    for step in range(saved.step + 1 if saved else 0, total + 1):
        stats = {}
        if step > 0:                                        # step 0 only evaluates
            if (step - 1) % cfg.steps == 0:
                stats = begin_iteration(agent, problems, (step - 1) // cfg.steps)
            batch, learned = train_step(agent, problems, step)          # rollout, update
            stats |= learned
            done.append(stats)
            show.step_line(step, total, done)
            report.log_samples(agent, step, batch, last=total)
        finish_step(agent, held_out, step, stats)           # evaluate, log, save
    show.farewell(cfg, held_out[0].prompt)
    return agent

def finish_step(agent, held_out, step, stats):
    """Evaluates, logs and saves when due; raises Stopped after a signal."""
    cfg = agent.cfg
    last = step == cfg.steps * cfg.iterations
    if last or step == 0 or cfg.eval_every and step % cfg.eval_every == 0:
        with checkpoint.saved_if_stopped(agent, step, stats):
            results = evaluate(agent, held_out)
        show.print0(f"step {step}  held out: {show.percentages(results)}")
        checkpoint.keep_best(agent, step, results)
        stats = stats | results
    halt = dist.stop_asked()
    files.log_metrics(cfg.folder, step, stats)
    # At step 0 there is nothing that a run which begins again would not make again.
    if last or halt or step and (step % cfg.save_every == 0 or step % cfg.steps == 0):
        checkpoint.save(agent, step)
        report.refresh(cfg.folder)
    if halt and not last:
        raise dist.Stopped(f"after step {step}")

def ask(agent, question):
    """A question and its greedy completion."""
    prompt = agent.encoding.encode_prompt(question)
    room = max(1, min(agent.cfg.max_new, agent.policy.cfg.block_size - len(prompt)))
    batch = sample(agent.policy, [prompt], 1, room, 1.0, agent.encoding.stop, n_greedy=1)
    answer = tokenizer.decode(agent.encoding, batch.ids[0][batch.mask[0]].tolist())
    return question + ("\n" if agent.encoding.frame.after else "") + answer

# ------------------------------------------------------------------------------ the command line
def read_command(argv):
    """Parses a command line into mode flags, a Config, and the Checkpoint to resume or None."""
    given, mode = config.read(Config, __doc__, argv)
    cfg, saved = make_config(**given), None
    if mode["resume"]:
        cfg, saved = checkpoint.resume(cfg.folder, Config, given)
    elif mode["eval_only"] or mode["ask"] is not None:      # with the settings of that run
        known = checkpoint.settings(given.get("init", cfg.folder), given)
        cfg = make_config(**known)
    return mode, cfg, saved

def trained_agent(cfg):
    """An Agent with the model in --init or --out, which can be evaluated and asked."""
    task = data.load_task(cfg.task)
    config.algorithm(cfg.algo, ALGOS, sys.modules[__name__])
    return setup.Agent(cfg, task, *pretrained.trained_model(cfg))

def main(argv=None):
    """The command line; a UserError is one line on stderr and exit code 2."""
    dist.prepare()
    with show.exit_code():
        mode, cfg, saved = read_command(argv)
        dist.start_ranks(dist.resolve(cfg)[0])
        if mode["report"]:
            report.print_report(mode["report"], cfg.out)
        elif mode["ask"] is not None:
            answer = ask(trained_agent(cfg), mode["ask"])
            show.print0(show.printable(answer))
        elif mode["eval_only"]:
            agent = trained_agent(cfg)
            results = evaluate(agent, preflight.held_out_of(agent))
            show.print0(show.percentages(results))
        else:
            with dist.stoppable(show.resume_command(cfg)), files.unlocked():
                train(cfg, saved=saved)

if __name__ == "__main__":
    main()
