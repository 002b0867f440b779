"""GRPO, Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), in one file.

As in section 4 of the paper: G completions of each prompt from the old policy; the z-score of the
reward in this group as the advantage of every token (4.1.2), or summed over the steps still to end
(4.1.3); the clipped ratio of each token, averaged over the completion, then over the group (eq. 3);
the k3 estimator of the KL to a frozen reference, in the loss (eq. 4); rewards learned again in each
iteration (Algorithm 1). Beside it PPO. Where the paper is silent, the reason stands by the choice.

    python grpo.py --task arithmetic                      # warm start, then GRPO, on a laptop
    python grpo.py --resume                               # go on after Ctrl-C, a crash or a kill
    python grpo.py --ask "47*58=" --init out/arithmetic   # try the result
    torchrun --nproc_per_node 2 grpo.py                   # the prompts dealt to 2 processes
"""
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

import data
import model
import reward
from data import answers, tokenizer
from run import batches, flags, folder, machine, report, shard, show, start

# ---------------------------------------------------------------------------------- the settings
# The published algorithms, by how they differ from Config. A ladder from the raw reward to GRPO:
# reinforce, a2c (a critic), ppo --beta 0 (the clip), ppo (the reference), grpo (the group).
UNCLIPPED = dict(clip_low=1e9, clip_high=1e9)
ALGOS = {
    "grpo": {},                                                         # DeepSeekMath, 2402.03300
    "reinforce": dict(baseline="none", scale="none", kl="none", mean="constant", **UNCLIPPED),
    "a2c": dict(baseline="value", scale="batch", kl="none", adam_eps=1e-5, **UNCLIPPED),
    "ppo": dict(baseline="value", scale="batch", kl="reward", adam_eps=1e-5),
    "rloo": dict(baseline="leave-one-out", scale="none", kl="reward", mean="constant",
                 **UNCLIPPED),                                                      # 2402.14740
    "dr_grpo": dict(scale="none", kl="none", mean="constant"),                      # 2503.20783
    "dapo": dict(clip_high=0.28, kl="none", mean="token"),  # 2503.14476, but no dynamic sampling
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4),                  # 2507.18071
}
# The paper divides a learned reward by the group's std too. Once all completions of a group are
# good, that std is the noise of the reward model, and the policy would follow it.
REWARDS = {"rule": {}, "model": dict(scale="none")}
# In the reward the paper has k1 (eq. 2), the one whose gradient there is that of the KL.
PENALTY = dict(estimator="k1")
# A checkpoint starts as it is; with --warm_steps, at a rate that leaves it what it has learned.
CHECKPOINT = dict(warm_steps=0, warm_lr=2e-5)

@dataclass(frozen=True)
class Config:
    """The settings of a run, by default the paper's; `make_config` makes one for a task and an
    algorithm. A field is a flag, and its comment is the flag's help."""
    # the task and the run
    task: str = "arithmetic"    # Learn this task: the name of a file in data/, or a path to one.
    difficulty: int = 2         # Use factors of this many digits; in countdown, this many numbers.
    train: str = ""             # Read the training problems from this file (gsm8k).
    test: str = ""              # Read the held-out problems from this file (gsm8k).
    init: str = ""              # Start from the model in this folder; without it, from a new one.
    chat: Literal["auto", "none"] = "auto"      # Frame a prompt by the model's chat template.
    system: str = ""            # Tell that template this system message; without it, its own.
    thinking: Literal["auto", "on", "off"] = "auto"     # Tell it enable_thinking; auto: nothing.
    out: str = ""               # Write the run to this folder; without it, to out/<task>.
    seed: int = 1               # Derive everything random from this number.
    steps: int = 100            # Make this many rollouts, each with its update, in an iteration.
    iterations: int = 1         # Repeat the outer loop of Algorithm 1: new reference, new rewards.
    eval_every: int = 0         # Evaluate every so many steps; 0: before the first, after the last.
    held_out: int = 0           # Evaluate on the first so many of the held-out problems; 0: on all.
    samples: int = 8            # Sample so many completions of each of them, beside a greedy one.
    save_every: int = 10        # Write a checkpoint every so many steps.
    sample_every: int = 10      # Write two groups in full every so many steps, to look at.
    # rollout: the paper samples 64 completions a question, 1024 in a batch, of up to 1024 tokens
    prompts: int = 16           # Take this many problems in a step (P).
    group: int = 64             # Sample this many completions of each problem (G).
    max_new: int = 1024         # Cut a completion after this many tokens (N).
    temperature: float = 1.0    # Sample, and take log-probabilities, at this temperature.
    # reward
    reward: Literal[*REWARDS] = "rule"  # Take rewards from the task's rule or from a learned model.
    supervision: Literal["outcome", "process"] = "outcome"  # Reward the whole completion, or steps.
    unfinished: float = 0.0     # Give a completion that did not end at most this.
    # advantage
    baseline: Literal["none", "group", "leave-one-out", "value",
                      "group+value"] = "group"          # Subtract this baseline from each reward.
    scale: Literal["none", "group", "batch"] = "group"  # Divide by the std of the group, or step.
    gamma: float = 1.0          # Discount later rewards by this, with a value baseline.
    lam: float = 0.95           # Take this lambda in GAE; nearer to 1 the critic counts less.
    critic: Literal["shared", "separate"] = "shared"    # Put the critic on the policy, or apart.
    value_coef: float = 0.1     # Weigh the critic's loss by this.
    value_clip: float = 0.2     # Reward the critic for moving a value no farther than this.
    # loss
    ratio: Literal["token", "sequence"] = "token"       # Clip the ratio of each token, or row.
    clip_low: float = 0.2       # Clip it below 1 minus this (0.2 is PPO's; the paper is silent).
    clip_high: float = 0.2      # Clip it above 1 plus this.
    kl: Literal["loss", "reward", "watch", "none"] = "loss"     # Put the KL to the reference here.
    estimator: Literal["k1", "k2", "k3", "ratio*k3"] = "k3"     # Estimate that KL in this way.
    beta: float = 0.04          # Weigh that KL by this; 0 keeps no reference.
    target_kl: float = 0.0      # Steer beta until the KL is this; 0 leaves beta alone.
    mean: Literal["sequence", "token", "constant"] = "sequence"  # Weigh tokens by 1/|o|, or alike.
    # update
    epochs: int = 1             # Pass this often over a rollout (the paper's mu).
    minibatches: int = 1        # Make this many optimizer steps in a pass.
    micro_tokens: int = 2048    # Put at most this many tokens into one forward and backward pass.
    recompute: Literal["off", "on"] = "off"     # Save memory: make activations again when needed.
    lr: float = 1e-6            # Learn at this rate.
    half_life: int = 0          # Halve it in every so many steps; 0: constant, as in the paper.
    adam_eps: float = 1e-8      # Add this to Adam's denominator (PPO adds 1e-5).
    grad_clip: float = 1.0      # Scale a gradient down to this norm.
    # a new model, and the warm start: supervised fine-tuning on the task's demonstrations
    n_layer: int = 2            # Give a new model this many layers.
    n_head: int = 8             # Give it this many query heads.
    n_kv_head: int = 1          # Give it this many key/value heads.
    n_embd: int = 256           # Give it this many channels.
    warm_steps: int = 1500      # Make this many optimizer steps in the warm start; with --init, 0.
    warm_batch: int = 48        # Take this many demonstrations in each of them.
    warm_lr: float = 1.2e-3     # Learn at up to this rate in them: a short rise, then down to 0.
    # a learned reward: fitted before the first step, and refitted at each iteration
    fit_prompts: int = 256      # Label completions of this many problems.
    fit_lr: float = 3e-4        # Learn the reward at up to this rate.
    choices: int = 4            # Have people choose the best of this many (2: Bradley-Terry).
    label_noise: float = 0.0    # Have them err in this share of the labels.
    labels: Literal["rule", "rollouts"] = "rule"        # Label steps by truth, or by rollouts.
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"      # Run on this; auto: the best.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Multiply in this; auto: bf16 on cuda.
    compile: Literal["auto", "on", "off"] = "auto"      # Use torch.compile; auto does so on cuda.
    shard: Literal["off", "on"] = "off"     # Keep on each rank its part of the models alone.
    profile: Literal["off", "on"] = "off"   # Write a trace of three steps, for a viewer.

    def __post_init__(self):
        flags.check(self, LEAST, MOST)
        if self.target_kl and not self.applies_kl:
            raise data.Fault("--target_kl steers --beta: it needs --kl loss or reward, and a beta")

    @property
    def folder(self):
        return Path(self.out or f"out/{Path(self.task).stem}")

    @property
    def applies_kl(self):
        return self.beta > 0 and self.kl in ("loss", "reward")

    @property
    def needs_reference(self):
        return self.applies_kl or self.kl == "watch" or self.reward == "model"

# The least of a number is 0, of an integer 1 (or its default, 0), but for these.
LEAST = dict(group=2, choices=2, fit_prompts=10, seed=0, steps=0, warm_steps=0, temperature=1e-3,
             grad_clip=1e-9, unfinished=-1e9, adam_eps=1e-15)   # a group of 1 has no spread: 0/0
MOST = dict(gamma=1, lam=1, label_noise=1, warm_batch=10 ** 6, choices=10 ** 4)
MAY_CHANGE = {"out", "steps", "eval_every", "save_every", "sample_every", "profile"}  # by --resume

def make_config(**given):
    """The Config of a command line or a notebook. Later ones win: the task's own DEFAULTS, the row
    of REWARDS, the row of ALGOS named `algo`, PENALTY if the KL is in the reward, CHECKPOINT if
    there is an `init`, `given`. Raises Fault for what cannot be."""
    defaults = data.load_task(given.get("task", Config.task)).DEFAULTS
    chosen = {"algo": "grpo", "reward": "rule"} | defaults | given
    row = ALGOS[flags.choose("algo", chosen["algo"], ALGOS)]
    fields = defaults | REWARDS[flags.choose("reward", chosen["reward"], REWARDS)] | row
    fields |= PENALTY if (fields | given).get("kl") == "reward" else {}
    fields |= (CHECKPOINT if chosen.get("init") else {}) | given
    return flags.build(Config, {name: x for name, x in fields.items() if name != "algo"})

# ------------------------------------------------------------------- sampling: prompts to a group
@dataclass
class Batch:
    """A rollout: P prompts * G completions = B rows, row p * G + g; column t belongs to token t."""
    ids: torch.Tensor               # (B, T) int64    prompt, completion, padding on the right
    mask: torch.Tensor              # (B, T) bool     the policy sampled the token; the end's too
    finished: torch.Tensor          # (B,)   bool     it ended with a stop token, not at the limit
    logp: torch.Tensor              # (B, T) float32  log pi(ids[:, t] given ids[:, :t]), as sampled
    start: torch.Tensor             # (B,)   int64    the column where the completion begins
    problems: list = None           # of each row
    texts: list = None              # its completion
    parts: dict = None              # (B,)   float32  the components of its rule reward, by name
    reward: torch.Tensor = None     # (B, T) float32  of each step, in the column of its last token
    ends: torch.Tensor = None       # (B, T) bool     those columns; one step: the outcome
    old_logp: torch.Tensor = None   # (B, T) float32  under the old policy, as the trainer has it
    ref_logp: torch.Tensor = None   # (B, T) float32  under the reference
    value: torch.Tensor = None      # (B, T) float32  the critic's, of the state before token t
    adv: torch.Tensor = None        # (B, T) float32  the advantage
    returns: torch.Tensor = None    # (B, T) float32  what the value should have been

    def select(self, rows, T):
        """The tensors of some rows, cut to T columns."""
        tensors = {n: x[rows] for n, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return Batch(**{n: x[:, :T] if x.dim() == 2 else x for n, x in tensors.items()})

def draw(logits, temperature, u, state):
    """A token for each row, and its log-probability at that temperature, (r,), by the logits (b, V)
    of its `state` (r,). It is where their cumulative distribution passes the row's u (r,), uniform
    in [0, 1): a row's tokens follow from its own u alone, whichever rows are beside it and however
    many ranks there are. Where u is negative, and at temperature 0, it is the likeliest token."""
    logps = (logits / (temperature or 1)).log_softmax(-1)                                   # (b, V)
    blocks = F.pad(logps.exp(), (0, -logps.size(1) % 256)).unflatten(1, (-1, 256))     # (b, ., 256)
    block, rest = passed(blocks.sum(-1)[state], u)
    token, _ = passed(blocks[state, block], rest)
    likeliest = logits.argmax(-1)[state]
    token = torch.where((u < 0) | (temperature == 0), likeliest, 256 * block + token)
    return token, logps[state, token]

def passed(p, u):
    """Where the running sum of each row of p (b, n) passes the share u (b,) of the whole: the index
    (b,), and the share of that number that is needed, in [0, 1). Sums are float64, as u is."""
    cdf = p.to(u.dtype).cumsum(-1)                                                          # (b, n)
    mark = u[:, None] * cdf[:, -1:]
    i = torch.searchsorted(cdf, mark, right=True).clamp(max=p.size(1) - 1)                  # (b, 1)
    own = p.gather(-1, i)
    rest = (mark - cdf.gather(-1, i) + own) / own
    return i[:, 0], rest[:, 0].clamp(0, 1 - torch.finfo(u.dtype).eps)

@torch.no_grad()
def sample(policy, prompts, group, max_new, temperature, stop, u=None):
    """`group` completions of each prompt (ids), of at most `max_new` tokens (of all, or of each):
    a Batch with ids, mask, finished, logp. `stop`: ids that end one; `u` (B, N): for `draw`."""
    device, P, longest = policy.device, len(prompts), max(map(len, prompts))
    most = torch.as_tensor(max_new).expand(P)                                              # (P,)
    T = max(len(p) + n for p, n in zip(prompts, most.tolist()))
    if T > policy.cfg.block_size:
        raise data.Fault(f"a prompt of {longest} tokens and --max_new {max_new} do not fit the "
                         f"model's context of {policy.cfg.block_size}")
    u = torch.rand(P * group, most.max(), dtype=torch.float64) if u is None else u
    u, stop = u.to(device, machine.double(device)), torch.tensor(sorted(stop), device=device)

    # 1. Read each prompt once. All rows of its group are in the same state.
    ids = torch.tensor([p + [0] * (T - len(p)) for p in prompts], device=device)           # (P, T)
    length = torch.tensor([len(p) for p in prompts], device=device)                        # (P,)
    pos = torch.arange(longest, device=device).repeat(P, 1)
    cache = policy.new_cache(P, batches.by_16(longest))                      # (L, 2, P, K, S, D)
    h = policy(ids[:, :longest], pos, cache)                                            # (P, ., C)
    h = h[torch.arange(P, device=device), length - 1]                                      # (P, C)
    ids, begin, most = (x.repeat_interleave(group, 0) for x in (ids, length, most.to(device)))
    mask, logp = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.float32)
    finished = torch.zeros_like(begin, dtype=torch.bool)

    # 2. A token a turn for each of the `rows` that go on, by the logits of its `state`.
    rows = torch.arange(P * group, device=device)                                          # (r,)
    state = rows // group
    for n in range(u.size(1)):
        token, token_logp = draw(policy.head(h), temperature, u[rows, n], state)           # (r,)
        column = begin[rows] + n
        ids[rows, column], logp[rows, column], mask[rows, column] = token, token_logp, True
        finished[rows] = torch.isin(token, stop)
        on = ~finished[rows] & (n + 1 < most[rows])
        rows, state, token, column = rows[on], state[on], token[on], column[on]
        if len(rows) == 0:
            break

        # 3. Compute the next states, each once for all of its rows.
        cache, state = successors(cache, state, token)
        token, column = (x.new_zeros(cache.size(2)).scatter(0, state, x) for x in (token, column))
        if longest + n == cache.size(4):        # it is full: more slots
            cache = F.pad(cache, (0, 0, 0, 16))
        h = policy(token[:, None], column[:, None], cache)[:, 0]                           # (b, C)
    T = longest + n + 1
    return Batch(ids[:, :T], mask[:, :T], finished, logp[:, :T], begin)

def successors(cache, state, token):
    """The cache of the next states, and which of them each row is in, (r,), if it was in `state`
    (r,) and drew `token` (r,): rows that were in one and drew alike share the next. If none part,
    states keep their places until a tenth of them is not needed: copying the cache costs too."""
    pair, after = torch.stack((state, token)).unique(dim=1, return_inverse=True)
    before = pair[0]                                                                       # (b,)
    if max(len(before), 2) > 0.9 * cache.size(2) and before.diff().all():
        return cache, state
    if len(before) == 1:                # a state alone would be compiled anew
        before = before.repeat(2)
    return cache.index_select(2, before), after

def complete(agent, prompts, group, u, most=None):
    """`sample` from the policy as it is, at most `most` or --max_new tokens."""
    cfg, policy = agent.cfg, agent.sampler or agent.policy
    return sample(policy, prompts, group, most or cfg.max_new, cfg.temperature, agent.encoding.stop,
                  u)

def generate(agent, problems, u):
    """Completions of this rank's share of `problems`, with their texts and rule rewards. `u` (n, G,
    N) draws those of all ranks, G of each problem: the number of ranks changes no sample."""
    problems, u = machine.deal(problems), machine.deal(u)
    prompts = [agent.encoding.encode_prompt(p.prompt) for p in problems]
    batch = complete(agent, prompts, u.size(1), u.flatten(0, 1))
    return reward.score(agent.task, agent.encoding, problems, batch)

# ---------------------------------------------------------------- advantages: rewards to credit
def group_scores(reward, ends, group, baseline="group", scale="group"):
    """Rewards (B, T) of steps, in the columns `ends` (B, T), against those of all steps of their
    group, (B, T); and which groups are dead, (P,). Under outcome supervision (DeepSeekMath 4.1.2) a
    row is one step, under process supervision (4.1.3) it has several.

    The std is without Bessel's correction (the paper is silent): the mean square is 1 at every G.
    No epsilon: the reward's scale does not matter. Rewards equal up to rounding get exactly 0.
    """
    r = torch.where(ends, reward, 0).to(machine.double(reward.device))
    r, on = (x.view(-1, group, x.size(1)) for x in (r, ends))                           # (P, G, T)
    n, total = on.sum((1, 2), True), r.sum((1, 2), True)                                # (P, 1, 1)
    mean = total / n
    std = torch.where(on, r - mean, 0).square().sum((1, 2), True).div(n).sqrt()
    dead = std <= 1e-6 * mean.abs()
    if "group" in baseline:             # "group+value" too; under "value" the critic comes later
        r = torch.where(dead, 0, r - mean)
    elif baseline == "leave-one-out":   # the mean of the other rows
        r = r - (total - r.sum(2, True)) / (n - on.sum(2, True))
    if scale == "group":
        r = r / torch.where(dead, 1, std)
    return torch.where(on, r, 0).view_as(reward).float(), dead.flatten()

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
    x = x.to(machine.double(x.device))
    mean, std = machine.mean_and_std(x[mask])
    spread = mask & (std > 1e-6 * mean.abs())
    return torch.where(spread, (x - mean) / std, 0).float()

def advantages(reward, ends, mask, penalty, value, cfg):
    """Advantages and returns (B, T), dead groups (P,), of step rewards (B, T) at `ends` (B, T).
    `penalty` (B, T): what the KL takes from the reward of each token. Without a value baseline a
    row is one action: its penalties count at its end, and a token's advantage is the sum over the
    steps that end at or after it. `value` (B, T) or None."""
    if value is None:
        reward = reward - torch.where(batches.last_tokens(mask), penalty.sum(1, True), 0)
    score, dead = group_scores(reward, ends, cfg.group, cfg.baseline, cfg.scale)        # (B, T)
    if value is None:
        adv, returns = torch.where(mask, score.flip(1).cumsum(1).flip(1), 0), None
    else:
        adv = gae(score - penalty, value, mask, cfg.gamma, cfg.lam)
        returns = adv + value
    return whiten(adv, mask) if cfg.scale == "batch" else adv, returns, dead

# ----------------------------------------------------------- rollout: completions, rewards, credit
@torch.profiler.record_function("rollout")
def rollout(agent, problems, source):
    """One step's completions, rewards and advantages: the Batch, and its statistics."""
    cfg = agent.cfg
    u = machine.uniform(source, len(problems), cfg.group, cfg.max_new)
    batch = generate(agent, problems, u)
    batch.reward, batch.ends = reward.of_steps(agent.task, batch, cfg, agent.encoding)
    stats = dict(batch.parts)
    stats["accuracy"] = stats.pop("correct")                # its name in the log
    if agent.reward_model is not None:
        stats["rule_reward"] = batch.reward.sum(1)
        batch.reward = reward.learned(agent.reward_model, batch, cfg)
    batch.reward = reward.at_the_limit(batch, cfg.unfinished)
    batch.old_logp = batch.logp
    if agent.critic is not None or agent.policy.amp:        # bfloat16 rounds otherwise in training
        batch.old_logp, batch.value = batches.logps(agent.sampler or agent.policy, batch, cfg,
                                                    agent.critic)
    if agent.ref is not None:
        batch.ref_logp, _ = batches.logps(agent.ref, batch, cfg)
    penalty = torch.zeros_like(batch.logp)
    if cfg.kl == "reward" and agent.ref is not None:        # of the old policy: its ratio is 1
        penalty = agent.beta * kl_estimate(batch.old_logp, batch.ref_logp, 1.0, cfg.estimator)
    batch.adv, batch.returns, dead = advantages(batch.reward, batch.ends, batch.mask, penalty,
                                                batch.value, cfg)
    # The mean of -log pi estimates the entropy, to be looked at. As a bonus in the loss it would do
    # nothing: its gradient is 0 in the mean over samples of the policy.
    entropy, _ = machine.mean_and_std(-batch.old_logp[batch.mask])
    stats |= {"reward": batch.reward.sum(1), "dead_groups": dead, "length": batch.mask.sum(1),
              "finished": batch.finished, "entropy": entropy}
    if batch.value is not None:             # 1: the critic knows the returns; 0: just their mean
        error = batch.returns - batch.value
        (_, left), (_, own) = (machine.mean_and_std(x[batch.mask]) for x in (error, batch.returns))
        stats["explained_variance"] = 1 - (left / own.clamp(min=1e-4)).square()
    return batch, machine.means(stats)

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

def kl_estimate(logp, ref_logp, ratio, estimator):
    """An estimate of the KL to the reference, token by token (B, T), from samples of the policy.
    As a loss its gradient is, on-policy and in the mean, 0 for k1, that of KL(pi || ref) for k2 and
    ratio*k3, and that of KL(ref || pi) for k3, the paper's eq. 4."""
    log_ratio = bounded(ref_logp - logp)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    k3 = log_ratio.expm1() - log_ratio          # exp(r) - 1 - r would lose its digits near 0
    return ratio * k3 if estimator == "ratio*k3" else k3

def policy_loss(logp, old_logp, ref_logp, adv, mask, weight, tokens, cfg, beta):
    """Clipped surrogate (DeepSeekMath eq. 1, 3) with the KL (eq. 4), all (B, T): the loss, and its
    statistics, means over all `tokens` of the optimizer step. Where the ratio is 1, by logp
    its gradient is -weight * (adv + beta * (pi_ref / pi - 1)): the paper's eq. 21."""
    def kept(x):                                # elsewhere even NaN stays out of the gradient
        return torch.where(mask, x, 0)
    logp, adv = kept(logp), kept(adv)
    log_ratio = logp - kept(old_logp)
    if cfg.ratio == "sequence":                 # GSPO: the geometric mean over the row
        log_ratio = (log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).expand_as(log_ratio)
    ratio = bounded(log_ratio).exp()                                                       # (B, T)
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    per_token = -torch.minimum(ratio * adv, ratio.clamp(low, high) * adv)
    clipped = ((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))
    stats = {"clip_share": clipped.sum() / tokens}
    if ref_logp is not None:
        kl = kl_estimate(logp, kept(ref_logp), ratio, cfg.estimator)
        stats["kl"] = kl.sum() / tokens
        if cfg.kl == "loss":
            per_token = per_token + beta * kl
    loss = (weight * per_token).sum()
    return loss, {name: x.detach() for name, x in ({"loss": loss} | stats).items()}

def value_loss(value, old_value, returns, mask, weight, clip):
    """Half the squared error of the values, (B, T), the worse of it and of the value kept within
    `clip` of the old one: PPO's clipped value loss."""
    value, old_value, returns = (torch.where(mask, x, 0) for x in (value, old_value, returns))
    held = old_value + (value - old_value).clamp(-clip, clip)
    error = torch.maximum((value - returns).square(), (held - returns).square())
    return (weight * error).sum() / 2

# ------------------------------------------------------------------------------------ the update
@torch.profiler.record_function("update")
def update(agent, batch, source):
    """The optimizer steps of one rollout: epochs x minibatches, each the sum of its micro-batches.
    Changes the models; gives the mean statistics. Raises Fault if before the first step the
    sampler's and the trainer's log-probabilities disagree."""
    cfg, norm, mismatch, zero = agent.cfg, 0.0, None, batch.logp.new_zeros(())
    total = {"loss": zero, "clip_share": zero}
    shard.release(agent)
    for rows, size in batches.minibatches(cfg, source, batch.ids.device):
        tokens = machine.all_reduce(batch.mask[rows].sum()).clamp(min=1)
        if agent.ref is None and agent.critic is None:      # no advantage then means no gradient
            rows = rows[batch.adv[rows].any(1)]
        mask, gap = batch.mask[rows], zero
        weight = token_weights(mask, cfg.mean, size, tokens, cfg.max_new)
        for micro, T in batches.micro_batches(batch.ids[rows], mask, cfg.micro_tokens):
            b, w = batch.select(rows[micro], T), weight[micro, :T]
            logp, value = model.token_logps(agent.policy, b.ids, b.mask, cfg.temperature,
                                            agent.critic)
            loss, stats = policy_loss(logp, b.old_logp, b.ref_logp, b.adv, b.mask, w, tokens,
                                      cfg, agent.beta)
            if value is not None:
                error = value_loss(value, b.value, b.returns, b.mask, w, cfg.value_clip)
                loss, stats["value_loss"] = loss + cfg.value_coef * error, error.detach()
            loss.backward()
            total = {name: total.get(name, 0.0) + x for name, x in stats.items()}
            gap = torch.cat((gap[None], (logp.detach() - b.logp).abs().flatten())).max()
        if mismatch is None:
            mismatch = batches.checked_gap(gap, agent.policy.amp)
        norm += batches.optimizer_step(agent.opt, cfg.grad_clip)    # reduce, clip, step, zero_grad
    shard.refresh(agent)
    steps = cfg.epochs * cfg.minibatches
    means = (machine.all_reduce(torch.stack([*total.values()])) / steps).tolist()
    return dict(zip(total, means)) | {"grad_norm": norm / steps, "mismatch": mismatch}

# ------------------------------------------------------------------------------ the reward model
def begin_iteration(agent, problems, iteration):
    """Algorithm 1: the policy becomes the reference; it completes fresh problems, and the reward
    model learns from their labels and from 10 % of history. Gives the measures of the fit."""
    cfg = agent.cfg
    if agent.ref is not None:
        shard.take(agent.ref, agent.policy)
    if agent.reward_model is None:
        return {}
    source = machine.rng(cfg, "fit", iteration)
    labels = machine.rng(cfg, f"labels of rank {machine.world()[0]}", iteration)
    tenth, n = len(problems) // 10, cfg.fit_prompts // 10   # the first ones measure, never fitted
    drawn, rows = source.sample(problems[:tenth], n), []
    drawn += source.sample(problems[tenth:], cfg.fit_prompts - n)
    size = max(1, cfg.group // cfg.choices) * cfg.prompts
    for part in batches.parts("labelling", drawn, size):
        u = machine.uniform(source, len(part), cfg.choices, cfg.max_new)
        batch = generate(agent, part, u)
        batch.reward, batch.ends = reward.of_steps(agent.task, batch, cfg, agent.encoding)
        if cfg.labels == "rollouts":
            batch.reward = reward.rollout_labels(partial(complete, agent), agent, batch, labels)
        rows.append(dict(ids=batch.ids, mask=batch.mask, ends=batch.ends, label=batch.reward))
    agent.history, measures = reward.refit(agent.reward_model, batches.concatenate(*rows),
                                           agent.history, cfg, source)
    show.fit(measures)
    return measures

# ------------------------------------------------------------------------------------ evaluation
def evaluate(agent, problems):
    """Share of the problems solved: greedily, and by --samples: as the chance that one of k of them
    is right (pass@k), or the answer that most of k give (maj@k), for k = 1, 2, 4, ... up to all."""
    cfg, source, n = agent.cfg, machine.rng(agent.cfg, "evaluate"), agent.cfg.samples
    names = ["greedy", *answers.shares([0.0] * n, [""] * n)]
    total = torch.zeros(1 + len(names), device=agent.policy.device)
    size = max(1, cfg.prompts * cfg.group // (1 + n))   # at a time: rows as in training
    for part in batches.parts("evaluation", problems, size):
        u = machine.uniform(source, len(part), n, cfg.max_new)
        batch = generate(agent, part, F.pad(u, (0, 0, 1, 0), value=-1))     # the first one greedy
        said = [agent.task.answer(text) if ended else ""
                for text, ended in zip(batch.texts, batch.finished.tolist())]
        for i, (greedy, *right) in enumerate(batch.parts["correct"].view(-1, 1 + n).tolist()):
            own = said[i * (1 + n) + 1:(i + 1) * (1 + n)]
            total += total.new_tensor([1, greedy, *answers.shares(right, own).values()])
    count, *solved = machine.all_reduce(total).tolist()
    return dict(zip(names, (x / count for x in solved)))

# --------------------------------------------------------------------------------------- the run
def train_step(agent, problems, step):
    """One rollout and its update: the Batch to look at, and its statistics."""
    machine.tick()
    cfg, began = agent.cfg, time.perf_counter()
    if cfg.half_life:
        agent.opt.param_groups[0]["lr"] = cfg.lr * 0.5 ** ((step - 1) / cfg.half_life)
    drawn = machine.rng(cfg, "problems", step).sample(problems, cfg.prompts)
    batch, stats = rollout(agent, drawn, machine.rng(cfg, "rollout", step))
    sampled = time.perf_counter()
    stats |= update(agent, batch, machine.rng(cfg, "update", step))
    ended, tokens = time.perf_counter(), machine.all_reduce(batch.mask.sum()).item()
    stats |= {"seconds": ended - began, "rollout_tok_s": tokens / (sampled - began),
              "update_tok_s": tokens / (ended - sampled)}
    if cfg.applies_kl:
        stats["beta"] = agent.beta
    if cfg.target_kl:       # Ziegler et al. 2019, 2.2: a tenth of the relative error, bounded
        error = min(max(stats["kl"] / cfg.target_kl - 1, -0.2), 0.2)
        agent.beta = agent.beta * (1 + 0.1 * error)
    return batch, stats

def train(cfg, task=None, checkpoint=None):
    """A whole run, or the rest of one from a Checkpoint."""
    task = task or data.load_task(cfg.task)
    cfg, encoding, policy, problems, held_out = start.begin(cfg, task, checkpoint)
    agent = start.new_agent(cfg, task, encoding, policy, checkpoint)
    show.header(agent, problems, held_out)
    (first, stats), total, done = folder.ahead(checkpoint), cfg.steps * cfg.iterations, []
    for step in range(first, total + 1):                    # step 0 only measures
        batch, stats = None, stats if step == first else {}
        if step > 0 and not stats:
            if (step - 1) % cfg.steps == 0:
                stats = begin_iteration(agent, problems, (step - 1) // cfg.steps)
            batch, learned = train_step(agent, problems, step)
            stats |= learned
            done.append(stats)
            show.step_line(step, total, done)
            folder.log_samples(agent, step, batch, last=total)
        last = step == total
        if last or step == 0 or cfg.eval_every and step % cfg.eval_every == 0:
            with folder.kept(agent, step, batch, stats):    # if a signal comes
                results = evaluate(agent, held_out)
            show.print0(f"step {step}  held out: {show.percentages(results)}")
            stats |= results
        halt = machine.stop_asked()
        folder.log_metrics(cfg.folder, step, stats)
        if last or halt or step % cfg.save_every == 0 or step % cfg.steps == 0:
            folder.save(agent, step, batch)
        if halt and not last:
            raise machine.Stopped(f"after step {step}")
    show.farewell(cfg, held_out[0].prompt)
    return agent

def ask(agent, question):
    """A question and its greedy completion."""
    prompt = agent.encoding.encode_prompt(question)
    room = max(1, min(agent.cfg.max_new, agent.policy.cfg.block_size - len(prompt)))
    batch = sample(agent.policy, [prompt], 1, room, 0, agent.encoding.stop)
    return question + tokenizer.decode(agent.encoding, batch.ids[0][batch.mask[0]].tolist())

# ------------------------------------------------------------------------------ the command line
def read_command(argv):
    """A command line as (mode flags, Config, the Checkpoint if it is to resume)."""
    given, mode = flags.read(Config, ALGOS, __doc__, argv)
    where = make_config(**given).folder
    if mode["resume"]:
        row = ALGOS[given.pop("algo", "grpo")]
        return mode, *folder.resume(where, Config, row | given, MAY_CHANGE)
    if mode["ask"] is not None or mode["eval_only"]:        # of a run: with its settings
        given = folder.settings(given.get("init", where), given) | given
    return mode, make_config(**given), None

def main(argv=None):
    """The command line; a Fault is one line on stderr and exit code 2."""
    machine.prepare()
    code = 0
    try:
        mode, cfg, checkpoint = read_command(argv)
        machine.start_ranks(machine.resolve(cfg)[0])
        if mode["report"]:
            show.print0(f"the report is in {report.write(mode['report'], cfg.out)}")
        elif mode["ask"] is not None or mode["eval_only"]:
            agent = start.Agent(cfg, data.load_task(cfg.task), *start.trained_model(cfg))
            show.print0(show.percentages(evaluate(agent, start.problems_of(cfg, agent.task)[1]))
                        if mode["eval_only"] else ask(agent, mode["ask"]))
        else:
            with machine.stoppable(), machine.profiled(cfg), folder.alone():
                train(cfg, checkpoint=checkpoint)
    except machine.Stopped as when:
        show.print0(f"stopped {when}; go on with: {show.resume_command(cfg)}")
        code = 128 + when.number
    except KeyboardInterrupt:           # in an evaluation or an answer: there is nothing to save
        code = 130
    except (data.Fault, OSError) as e:      # an OSError: a disk that is full, a path too long
        show.error(e)
        code = 2
    machine.exit_with(code)

if __name__ == "__main__":
    main()
