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
from collections import defaultdict
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from tiktoken import Encoding

import model
import reward
from run import caches, checkpoint, config, dist, passes, report, setup, show

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
BETAS = (0.9, 0.95)     # of AdamW
Baseline = Literal["none", "group", "leave-one-out", "value", "group+value"]
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
    def total_steps(self):
        return self.steps * self.iterations

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
    task = config.load_task(given.get("task", Config.task))
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
    return setup.shipped(cfg)       # --init data/warm_start, if it serves

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

# ----------------------------------------------------------------------------- the state of a run
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

@dataclass
class Agent:
    """The state of a run. What a run does not need is None."""
    cfg: Config
    task: ModuleType
    encoding: Encoding
    policy: model.GPT
    sampler: model.GPT = None                       # the policy, or its copy in bfloat16
    ref: model.GPT = None                           # the reference, frozen
    critic: model.ScalarHead = None                 # the value of a state
    reward_model: model.ScalarHead = None
    opt: torch.optim.Optimizer = None               # for policy and critic
    beta: float = 0.0                               # KL coefficient
    history: dict = field(default_factory=dict)     # labelled rows of all reward-model fits

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
    """AdamW for policy and critic. No weight decay: it would pull weights to 0, away from the
    pretrained ones."""
    params = [p for p in agent.policy.parameters() if p.requires_grad]
    if agent.critic is None:
        return torch.optim.AdamW(params, agent.cfg.lr, BETAS, weight_decay=0, fused=True)
    params += [p for p in agent.critic.parameters() if p.requires_grad]
    # eps as in the original PPO code and CleanRL
    return torch.optim.AdamW(params, agent.cfg.lr, BETAS, eps=1e-5, weight_decay=0, fused=True)

# -------------------------------------------------------------------------------------- sampling
@torch.no_grad()
def sample(policy, prompts, group, room, temperature, stop, u=None):
    """Samples `group` completions of each prompt (a list of ids), until one of the ids `stop`, of at
    most `room` tokens (one number per prompt). u (B, N): random numbers in [0, 1) to draw with;
    None: the most likely tokens. Returns a Batch: `ids` to `start`."""
    device = policy.device
    lengths = [len(prompt) for prompt in prompts]
    T = max(length + new for length, new in zip(lengths, room))
    ids = torch.zeros(len(prompts), T + 1, dtype=torch.int64)
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    ids = ids.repeat_interleave(group, 0).to(device)                                    # (B, T + 1)
    start = torch.tensor(lengths, device=device).repeat_interleave(group)                     # (B,)
    room = torch.tensor(room, device=device).repeat_interleave(group)                         # (B,)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    logp = torch.zeros_like(ids, dtype=torch.float32)
    finished = torch.zeros_like(start, dtype=torch.bool)
    done = torch.zeros_like(finished)                           # finished, or cut off
    stop = torch.tensor(sorted(stop), device=device)
    if u is not None:
        u = u.to(device, torch.float32)

    cache = caches.new(policy, T, temperature)
    p = cache.prefill(ids[::group, :max(lengths)], start[::group], group)                   # (B, V)
    for n in range(room.max()):
        rows = cache.rows                                       # those not dropped yet, (r,)
        token = p.argmax(-1) if u is None else caches.sample_token(p, u[rows, n])           # (r,)
        column = torch.where(done[rows], T, start[rows] + n)    # T: after the end, cut off below
        ids[rows, column] = token
        mask[rows, column] = True
        logp[rows, column] = p.gather(1, token[:, None])[:, 0].log()
        finished[rows] |= torch.isin(token, stop) & ~done[rows]
        done = finished | (n + 1 >= room)
        p = cache.append(token, column, done)                                               # (r, V)
        if len(p) == 0:
            break
    T = passes.row_lengths(mask[:, :T]).max()
    return Batch(ids[:, :T], mask[:, :T], finished, logp[:, :T], start)

def complete(agent, prompts, group, room, u=None):
    """`sample` from the policy, with the settings of the run."""
    return sample(agent.sampler, prompts, group, room, agent.cfg.temperature, agent.encoding.stop, u)

def generate(agent, problems, group, rng=None):
    """`group` completions of each problem in this rank's share, with their texts and rule rewards;
    without a random stream rng, the most likely ones."""
    N, u = agent.cfg.max_new, None
    if rng is not None:     # of all ranks: samples do not depend on their number
        u = dist.uniform(rng, len(problems), group, N)
        u = dist.of_rank(u).flatten(0, 1)                                               # (B, N)
    problems = dist.of_rank(problems)
    prompts = [agent.encoding.encode_prompt(p.prompt) for p in problems]
    batch = complete(agent, prompts, group, [N] * len(prompts), u)
    reward.score_by_rule(agent.task, agent.encoding, problems, batch)
    return batch

# ---------------------------------------------------------------- advantages: rewards to credit
def group_scores(r, ends, cfg):
    """GRPO's advantages of steps: (r - mean) / std, over the rewards of the group's completions
    (DeepSeekMath 4.1.2) or, with process supervision, of all their steps (4.1.3). Other baselines
    and scales leave out a part. r (B, T): rewards, at `ends` (B, T). Returns scores (B, T), and
    which groups are dead, (P,): rewards equal up to rounding, with scores of exactly 0. The std has
    no Bessel correction (the paper is silent): the mean square is 1 for any G. It has no epsilon."""
    shape = r.shape
    at = ends.view(-1, cfg.group, shape[1])                                               # (P, G, T)
    r = torch.where(at, model.double(r).view_as(at), 0)
    n = at.sum((1, 2), keepdim=True)                                                      # (P, 1, 1)
    mean = r.sum((1, 2), keepdim=True) / n
    square = torch.where(at, r - mean, 0).square()
    std = (square.sum((1, 2), keepdim=True) / n).sqrt()
    dead = std <= 1e-6 * mean.abs().clamp(min=0.1)
    if cfg.baseline == "leave-one-out":             # the mean of the other completions
        others = r.sum((1, 2), keepdim=True) - r.sum(2, keepdim=True)                     # (P, G, 1)
        r = r - others / (n - at.sum(2, keepdim=True))
    elif "group" in cfg.baseline:                   # "group", "group+value"
        r = torch.where(dead, 0, r - mean)
    if cfg.adv_scale == "group":
        r = torch.where(dead, r, r / std)
    return torch.where(at, r, 0).view(shape).float(), dead.flatten()

GAMMA = 1.0             # discount, used only with a critic

def gae(r, value, mask, gamma, lam):
    """Generalized advantage estimation, (B, T): A_t = sum over l of (gamma lam)^l delta_{t+l}, with
    delta_t = r_t + gamma V_{t+1} - V_t; V_t is the value before token t, 0 after the last one. The
    next token is the next that was sampled: credit crosses holes in the mask (B, T)."""
    adv = torch.zeros_like(r)
    next_adv = torch.zeros_like(r[:, 0])
    next_value = torch.zeros_like(r[:, 0])
    for t in reversed(range(r.size(1))):
        delta = r[:, t] + gamma * next_value - value[:, t]
        next_adv = torch.where(mask[:, t], delta + gamma * lam * next_adv, next_adv)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        adv[:, t] = torch.where(mask[:, t], next_adv, 0)
    return adv

def whiten(x, mask):
    """(x - mean) / std over all tokens in mask, on all ranks; 0 elsewhere, or if all are equal."""
    x = model.double(x)
    mean, std = dist.mean_and_std(x[mask])
    differ = mask & (std > 1e-6 * mean.abs())
    return torch.where(differ, (x - mean) / std, 0).float()

def advantages(r, ends, mask, penalty, value, cfg):
    """Advantages, returns or None, and dead groups (P,), from the rewards r of steps at `ends`, the
    KL penalty on each token's reward, and the critic's values or None; all but `dead` (B, T)."""
    returns = None
    if value is None:       # the whole KL penalty is on the last reward
        last = passes.last_tokens(mask)
        r = r - torch.where(last, penalty.sum(1, keepdim=True), 0)
        score, dead = group_scores(r, ends, cfg)
        adv = score.flip(1).cumsum(1).flip(1)       # of the steps that end at or after a token
        adv = torch.where(mask, adv, 0)
    else:
        score, dead = group_scores(r, ends, cfg)
        adv = gae(score - penalty, value, mask, GAMMA, cfg.lam)
        returns = adv + value
    if cfg.adv_scale == "batch":
        adv = whiten(adv, mask)
    return adv, returns, dead

# ----------------------------------------------------------- rollout: completions, rewards, credit
def rollout(agent, problems, rng):
    """Completions of the problems with their rewards and advantages: a Batch and its statistics."""
    cfg = agent.cfg
    batch = generate(agent, problems, cfg.group, rng)
    reward.of_batch(agent, batch)

    # The sampler's log-probabilities are those of a training pass up to rounding. Where rounding
    # matters, use a pass: in bfloat16, and for a KL in the reward, which may be all the reward.
    # With one update per rollout the old policy is the one that is trained, see `total_loss`.
    old_logp = batch.logp
    use_pass = agent.policy.amp is not None and cfg.updates > 1 or cfg.kl == "reward"
    if use_pass or agent.critic is not None:
        logp, batch.value = passes.logps(agent.sampler, batch, cfg, agent.critic)
        old_logp = logp if use_pass else batch.logp
    batch.old_logp = old_logp if cfg.updates > 1 else None
    if agent.ref is not None:
        batch.ref_logp, _ = passes.logps(agent.ref, batch, cfg)

    penalty = torch.zeros_like(batch.logp)
    if cfg.kl == "reward" and agent.ref is not None:
        penalty = agent.beta * kl_estimate(old_logp, batch.ref_logp, cfg.estimator)
    batch.adv, batch.returns, dead = advantages(batch.reward, batch.ends, batch.mask, penalty,
                                                batch.value, cfg)
    return batch, report.statistics(batch, dead)

# -------------------------------------------------------------------------------------- the loss
def token_weights(mask, loss_mean, n_rows, n_tokens, max_new):
    """Each token's weight in the loss, (B, T). n_rows and n_tokens count the whole minibatch, over
    all micro-batches and ranks. sequence: 1/|o| (eq. 3), so tokens of long completions weigh less;
    token: all equal; constant: all equal, and independent of the lengths (Dr. GRPO)."""
    if loss_mean == "token":
        return mask / n_tokens
    if loss_mean == "constant":
        return mask / (n_rows * max_new)
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / n_rows

def bounded(x):
    """x clamped to [-20, 20], so that its exp stays finite, with the gradient of x."""
    return x + (x.clamp(-20, 20) - x).detach()

def kl_estimate(logp, ref_logp, estimator, ratio=1.0):
    """A per-token estimate (B, T) of the KL to the reference from samples of the policy. In a loss,
    its expected gradient on-policy is 0 for k1, that of KL(pi || ref) for k2 and ratio*k3, and that
    of KL(ref || pi) for k3, the paper's eq. 4."""
    log_r = bounded(ref_logp - logp)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    k3 = log_r.expm1() - log_r          # exp(log_r) - 1 - log_r would lose its digits near 0
    return k3 if estimator == "k3" else ratio * k3

def importance_ratio(logp, old_logp, mask, cfg):
    """The ratio of the new to the old probability, (B, T), or its geometric mean over a row."""
    log_ratio = logp - old_logp
    if cfg.ratio == "sequence":                 # GSPO
        length = mask.sum(1, keepdim=True).clamp(min=1)
        mean = log_ratio.sum(1, keepdim=True) / length
        log_ratio = mean.expand_as(log_ratio)
    return bounded(log_ratio).exp()

def surrogate(ratio, adv, logp, mask, cfg):
    """PPO's clipped surrogate, which is maximized, and where the clip takes its gradient away; all
    are (B, T)."""
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv
    gain = torch.minimum(unclipped, clipped)
    return gain, clipped < unclipped

def policy_loss(logp, batch, weight, n_tokens, cfg, beta):
    """The clipped surrogate (DeepSeekMath eq. 1, 3) plus the KL (eq. 4), from tensors (B, T), and
    statistics, which are means over the n_tokens of the minibatch. At ratio 1 its gradient with
    respect to logp is -weight * (adv + beta * (pi_ref / pi - 1)), the paper's eq. 21."""
    mask = batch.mask
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp      # None: ratio 1
    ratio = importance_ratio(logp, old_logp, mask, cfg)
    gain, clipped = surrogate(ratio, batch.adv, logp, mask, cfg)
    per_token = -gain
    stats = {"clip_share": clipped.sum() / n_tokens}
    if batch.ref_logp is not None:
        kl = kl_estimate(logp, batch.ref_logp, cfg.estimator, ratio)
        stats["kl"] = kl.sum() / n_tokens
        if cfg.kl == "loss":
            per_token = per_token + beta * kl
    loss = (weight * per_token).sum()
    stats["loss"] = loss
    return loss, stats

VALUE_COEF = 0.1        # weight of the critic's loss
VALUE_CLIP = 0.2        # how far PPO's value loss lets a value move from the old one

def value_loss(value, old_value, returns, weight):
    """PPO's clipped value loss: half the squared error of the values (B, T), or of the values
    clipped to within VALUE_CLIP of the old ones, whichever is larger."""
    near = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    error = torch.maximum((value - returns).square(), (near - returns).square())
    return (weight * error).sum() / 2

def total_loss(agent, batch, weight, n_tokens):
    """The sum of all terms of the loss (a new term goes here) for some rows of a rollout, the
    statistics, and the log-probabilities (B, T)."""
    cfg = agent.cfg
    logp, value = passes.token_logps(agent.policy, batch.ids, batch.mask, cfg.temperature,
                                     agent.critic)
    loss, stats = policy_loss(logp, batch, weight, n_tokens, cfg, agent.beta)
    if value is not None:
        error = value_loss(value, batch.value, batch.returns, weight)
        loss = loss + VALUE_COEF * error
        stats["value_loss"] = error
    return loss, stats, logp

# ------------------------------------------------------------------------------------ the update
GRAD_CLIP = 1.0         # maximum gradient norm

def minibatches(cfg, rng, n):
    """Splits the rows of a step at random into the minibatches of each epoch. Yields for each its
    rows on this rank, as indices (on the host) into its batch of n rows, and its number of rows on
    all ranks."""
    rows = cfg.prompts * cfg.group
    own = dist.of_rank(torch.arange(rows).view(-1, cfg.group)).flatten()
    assert n == len(own), "a rollout must have --prompts x --group rows"
    for _ in range(cfg.epochs):
        order = torch.tensor(rng.sample(range(rows), rows))
        for part in order.tensor_split(cfg.minibatches):
            yield torch.isin(own, part).nonzero()[:, 0], len(part)

def update(agent, batch, rng):
    """Makes one optimizer step for each minibatch of each epoch over a rollout, accumulating
    gradients over micro-batches; returns the mean statistics. Raises UserError if, before the first
    optimizer step, the sampler's and the trainer's log-probabilities disagree."""
    cfg = agent.cfg
    stats = defaultdict(float)
    norm, mismatch = 0.0, None
    learns = has_gradient(agent, batch)
    mask = batch.mask.cpu()                             # rows are chosen on the host
    params = [p for group in agent.opt.param_groups for p in group["params"]]
    for rows, n_rows in minibatches(cfg, rng, len(mask)):
        n_tokens = dist.all_reduce(mask[rows].sum()).clamp(min=1).item()
        rows = rows[learns[rows]]
        gaps = []
        for part in passes.micro_batches(batch, rows, cfg.micro_tokens):
            weight = token_weights(part.mask, cfg.loss_mean, n_rows, n_tokens, cfg.max_new)
            loss, found, logp = total_loss(agent, part, weight, n_tokens)
            loss.backward()
            for name, x in found.items():
                stats[name] += x.detach()
            gaps.append(logp.detach() - part.logp)
        if mismatch is None:
            mismatch = passes.checked_gap(gaps, mask[rows].sum(), agent.policy.amp)
        dist.sum_gradients(params)
        norm += dist.clip_gradients(params, GRAD_CLIP)
        agent.opt.step()
        agent.opt.zero_grad()
    total = dist.all_reduce(torch.stack([*stats.values()]))
    means = dict(zip(stats, (total / cfg.updates).tolist()))
    return means | {"grad_norm": norm / cfg.updates, "mismatch": mismatch}

def has_gradient(agent, batch):
    """Which rows of a rollout have a gradient, (B,) on the host; `update` skips the others. Without
    a reference and a critic, rows whose advantages are all 0 have none, unless the loss has a new
    term: then two of them have a loss."""
    everything = torch.ones(len(batch.ids), dtype=torch.bool)
    if agent.ref is not None or agent.critic is not None:
        return everything
    learns = batch.adv.any(1).cpu()
    two = passes.select(batch, (~learns).nonzero()[:2, 0], batch.ids.size(1))
    with torch.no_grad():
        loss, *_ = total_loss(agent, two, two.mask.float(), 1)
    return learns if loss == 0 else everything

# ------------------------------------------------------------------------------ the reward model
def refit_reward_model(agent, problems, iteration):
    """Algorithm 1: fits the reward model to labels of the policy's completions, and a tenth as many
    old ones; problems held out from all fits measure it. Returns the metrics."""
    cfg = agent.cfg
    rng = dist.rng(cfg, "fit", iteration)
    labels_rng = dist.rng(cfg, f"labels of rank {dist.rank()}", iteration)
    held_out, train = reward.problems_to_label(problems, cfg, rng)
    labelled = []
    size = max(1, cfg.group // reward.CHOICES) * cfg.prompts        # as many rows as in training
    for part in show.chunks("labelling", held_out + train, size):
        batch = generate(agent, part, reward.CHOICES, rng)
        batch.reward, batch.ends = reward.of_rule(agent, batch)
        if cfg.reward == "rollouts":
            batch.reward = rollout_labels(agent, batch, labels_rng)
        labelled.append(batch)
    return reward.refit(agent, labelled, len(held_out), rng)

def rollout_labels(agent, batch, rng, tries=4):
    """Monte Carlo labels (B, T) of steps: the share of `tries` continuations from a step's end that
    are right. A last step keeps its true label."""
    ids, mask, start = batch.ids.cpu(), batch.mask.cpu(), batch.start.cpu()
    label = batch.reward.cpu().clone()
    places = batch.ends.cpu() & ~passes.last_tokens(mask)
    for part in places.nonzero().split(128):                                                # (n, 2)
        if len(part) == 0:
            continue
        row, column = part.T
        prefixes = [ids[i, :t + 1].tolist() for i, t in part]
        room = (agent.cfg.max_new - (column + 1 - start[row])).tolist()         # tokens left
        u = dist.uniform(rng, len(part), tries, max(room)).flatten(0, 1)
        played = complete(agent, prefixes, tries, room, u)
        T = played.ids.size(1)
        said = F.pad(mask[row], (0, T - mask.size(1)))          # the prefix is the policy's, too
        said &= torch.arange(T) <= column[:, None]
        played.mask |= said.repeat_interleave(tries, 0).to(played.mask.device)
        reward.score_by_rule(agent.task, agent.encoding, [batch.problems[i] for i in row], played)
        label[row, column] = played.components["correct"].view(-1, tries).mean(1).cpu()
    return label.to(batch.ids.device)

# ------------------------------------------------------------------------------------ evaluation
def evaluate(agent, problems):
    """Shares of the problems solved: greedily, by at least one of k samples (pass@k), and by the
    majority vote of k samples (maj@k), for k = 1, 2, 4, ... up to --samples."""
    cfg, n = agent.cfg, agent.cfg.samples
    rng = dist.rng(cfg, "evaluate")
    rows = cfg.prompts * cfg.group              # at a time, as in training
    names = ["greedy", *report.shares([0.0] * n, [""] * n)]
    solved = dict.fromkeys(names, 0.0)          # on every rank, also one without problems
    for part in show.chunks("greedy evaluation", problems, rows):
        solved["greedy"] += generate(agent, part, 1).components["correct"].sum().item()
    for part in show.chunks("evaluation", problems, max(1, rows // (1 + n))):
        batch = generate(agent, part, n, rng)
        right = batch.components["correct"].view(-1, n).tolist()
        votes = []
        for text, finished in zip(batch.texts, batch.finished.tolist()):
            votes.append(agent.task.answer(text) if finished else "")
        for i in range(len(right)):
            shares = report.shares(right[i], votes[i * n:(i + 1) * n])
            for name, share in shares.items():
                solved[name] += share
    total = dist.all_reduce(torch.tensor([*solved.values()]))
    return dict(zip(solved, (total / len(problems)).tolist()))

# --------------------------------------------------------------------------------------- the run
def train_step(agent, problems, step):
    """One rollout and its update: the Batch, for samples.jsonl, and the step's statistics."""
    cfg = agent.cfg
    began = time.perf_counter()
    if cfg.half_life:
        for group in agent.opt.param_groups:
            rate = group.setdefault("initial_lr", group["lr"])
            group["lr"] = rate * 0.5 ** ((step - 1) / cfg.half_life)
    drawn = dist.rng(cfg, "problems", step).sample(problems, cfg.prompts)
    batch, stats = rollout(agent, drawn, dist.rng(cfg, "rollout", step))
    sampled = time.perf_counter()
    with dist.updating(agent):
        stats |= update(agent, batch, dist.rng(cfg, "update", step))
    stats |= report.speed(batch, began, sampled)
    if cfg.applies_kl:
        stats["beta"] = agent.beta
    return batch, stats

def train(cfg, task=None, saved=None):
    """A whole run, or the rest of one from the Checkpoint `saved`, as in Algorithm 1: in each
    iteration a new reference, a refitted reward model, and --steps steps."""
    config.algorithm(cfg.algo, ALGOS, sys.modules[__name__])    # a file may replace what is above
    cfg, task, encoding, policy, problems, held_out = setup.begin(cfg, task, saved)
    agent = new_agent(cfg, task, encoding, policy, saved)
    history = []                                            # statistics of this process's steps
    done = saved.step if saved else -1
    if done < 0:
        finish_step(agent, held_out, 0, {})                 # step 0 only evaluates
    elif saved.stats:                                       # stopped during an evaluation
        finish_step(agent, held_out, done, saved.stats)

    for iteration in range(cfg.iterations):
        first = 1 + iteration * cfg.steps
        fitted = {}
        if done < first:
            if agent.ref is not None:
                dist.copy_weights(agent.ref, agent.policy)
            if agent.reward_model is not None:
                fitted = refit_reward_model(agent, problems, iteration)
        for step in range(max(first, done + 1), first + cfg.steps):
            batch, stats = train_step(agent, problems, step)
            history.append(fitted | stats)
            fitted = {}
            report.log_step(agent, step, batch, history)
            finish_step(agent, held_out, step, history[-1])
    show.farewell(cfg, held_out[0].prompt)
    return agent

def finish_step(agent, held_out, step, stats):
    """Evaluates when due, then logs and saves."""
    cfg = agent.cfg
    if step in (0, cfg.total_steps) or (cfg.eval_every and step % cfg.eval_every == 0):
        with checkpoint.saved_if_stopped(agent, step, stats):
            stats = stats | evaluate(agent, held_out)
    checkpoint.end_step(agent, step, stats)

def ask(agent, question):
    """A question and its greedy completion."""
    prompt = agent.encoding.encode_prompt(question)
    room = min(agent.cfg.max_new, agent.policy.cfg.block_size - len(prompt))
    batch = complete(agent, [prompt], 1, [max(1, room)])
    return show.dialogue(agent.encoding, question, batch.ids[0][batch.mask[0]].tolist())

# ------------------------------------------------------------------------------ the command line
def main(argv=None):
    """The command line; an error that the user can fix is one line, and exit code 2."""
    with show.exit_code():
        mode, given = config.read(Config, __doc__, argv)
        cfg, saved = make_config(**given), None
        if mode.resume:
            cfg, saved = checkpoint.resume(cfg.folder, Config, given)
        elif mode.eval_only or mode.ask is not None:        # with the settings of that run
            cfg = make_config(**checkpoint.settings(cfg, given))
        dist.start(cfg)
        if mode.report:
            report.print_report(mode.report, cfg.out)
        elif mode.ask is not None:
            show.print0(ask(trained_agent(cfg), mode.ask))
        elif mode.eval_only:
            agent = trained_agent(cfg)
            show.results(evaluate(agent, setup.held_out_of(agent)))
        else:
            with checkpoint.running(cfg):
                train(cfg, saved=saved)

def trained_agent(cfg):
    """An Agent with the model in --init or --out, which can be evaluated and asked."""
    config.algorithm(cfg.algo, ALGOS, sys.modules[__name__])
    task, encoding, policy = setup.trained_model(cfg)
    return Agent(cfg, task, encoding, policy, sampler=policy)

if __name__ == "__main__":
    main()
