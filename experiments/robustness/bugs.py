"""Injects known bugs of GRPO and PPO code into a copy of the repository, one at a time, and runs
tests. Prints each bug and the first test that fails; the exit code is 1 if one is not caught.

    python experiments/robustness/bugs.py            # all; a quarter of an hour
    python experiments/robustness/bugs.py GAE clip   # those whose name contains one of the words
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of each bug its name, its file and the tests to run; below, a text and what replaces it.
TABLE = r"""
the mask excludes the end token | grpo.py | sampling
    mask[rows, column] = sampled  =>  mask[rows, column] = sampled & ~torch.isin(token, stop)
a truncated row counts as finished | grpo.py | sampling
    finished[rows] |= ended  =>  finished[rows] |= ended | (n + 1 >= limit[rows])
finished rows continue | grpo.py | sampling
    ~(forced[rows, column] | done[rows])  =>  ~forced[rows, column]
positions continue from the longest prompt | grpo.py | sampling passes
    p = cache.append(token, column, done)  =>
      p = cache.append(token, (max(lengths) + n) + 0 * column, done)
the mask is one column off | model.py | sampling
    mask[:, 1:].flatten().nonzero()  =>  mask[:, :-1].flatten().nonzero()
random numbers depend on the batch | grpo.py | sampling
    None if u is None else u[rows, n]  =>  None if u is None else u[:len(rows), n]
a token is drawn from the part of the vocabulary before its own | run/caches.py | sampling
    return PART * part + inner  =>  return PART * (part - 1).clamp(min=0) + inner
prompt tokens enter the loss | model.py | loss
    mask[:, 1:].flatten().nonzero()  =>  (ids[:, 1:] >= 0).flatten().nonzero()
masking by x * mask | grpo.py | advantages loss
    torch.where(differ, (x - mean) / std, 0)  =>  ((x - mean) / std * differ)
completions are scored against the wrong prompt | reward.py | oracle -k steps
    return [item for item in items for _ in range(group)]  =>
      return [item for items in [[*items]] for _ in range(group) for item in items]
the text is tokenised a second time | reward.py | oracle reward turns
    said = texts(agent.encoding, batch, episodes)  =>
      said = texts(agent.encoding, batch, episodes)\n    batch.ids = batch.ids.clamp(max=127)
no temperature in the trainer | model.py | sampling
    gpt.logps(states / temperature, send  =>  gpt.logps(states, send
no temperature in the sampler | grpo.py | sampling
    caches.new(policy, slots, temperature)  =>  caches.new(policy, slots, 1.0)
old log-probs are refreshed | grpo.py | loss
    old_logp = batch.old_logp  =>  old_logp = None
the old policy is the policy despite a second update | grpo.py | loss
    if has_ratios:  =>  if False:
the larger surrogate is taken | grpo.py | loss
    torch.minimum(unclipped, clipped)  =>  torch.maximum(unclipped, clipped)
a sequence ratio instead of token ratios | grpo.py | loss
    if cfg.ratio == "sequence":  =>  if True:
the sequence ratio is a sum, not a mean | grpo.py | oracle -k gspo
    log_ratio.sum(1, keepdim=True) / length)  =>  log_ratio.sum(1, keepdim=True))
equal rewards give scores that are not exactly 0 | grpo.py | loss
    dead = ~passes.vary(mean, std)  =>  dead = std < 0
Bessel's correction | grpo.py | loss
    (square.sum((1, 2), keepdim=True) / n)  =>  (square.sum((1, 2), keepdim=True) / (n - 1))
group statistics are computed over the batch | grpo.py | loss
    rows, place = passes.grid(groups, ends.device)  =>
      rows, place = passes.grid(0 * groups, ends.device)
a leave-one-out baseline includes its own row | grpo.py | advantages
    baseline = others / (n - ends.sum(2, keepdim=True)).clamp(min=1)  =>  pass
the mean is taken over each micro-batch | grpo.py | loss
    total_loss(agent, micro, weight, n_tokens)  =>
      total_loss(agent, micro, weight / weight.sum(), n_tokens)
only the last micro-batch is logged | grpo.py | oracle -k steps
    stats[name] += x.detach()  =>  stats[name] = x.detach()
minibatches are divided by the whole rollout | grpo.py | oracle -k steps
    token_weights(micro.mask, cfg.loss_mean, n_rows,  =>
      token_weights(micro.mask, cfg.loss_mean, len(batch.ids),
gradients are not cleared | grpo.py | oracle -k steps
    agent.opt.zero_grad()  =>  pass
0 / 0 for an empty row | grpo.py | loss
    mask.sum(1, keepdim=True).clamp(min=1)  =>  mask.sum(1, keepdim=True)
k3 loses its digits near 0 | grpo.py | loss
    k3 = log_r.expm1() - log_r  =>  k3 = log_r.exp() - 1 - log_r
the KL in the wrong direction | grpo.py | loss
    log_r = bounded(ref_logp - logp)  =>  log_r = bounded(logp - ref_logp)
the reference is not frozen | run/setup.py | data_flow -k reference_moves
    agent.ref = frozen(policy)  =>  agent.ref = policy
the value depends on its token | model.py | advantages
    value = F.pad(critic(before, layout, h), (1, 0))  =>  value = critic(ids, None, gpt(ids))
GAE bootstraps from padding | grpo.py | advantages
    next_value = torch.where(sampled, value[:, t], next_value)  =>  next_value = value[:, t]
GAE without lambda | grpo.py | advantages
    delta + gamma * lam * next_adv  =>  delta + gamma * next_adv
the outcome reward is at the wrong token | run/passes.py | advantages reward
    (mask.flip(1).cumsum(1).flip(1) == 1)  =>  (mask.cumsum(1) == 1)
whitening over padding | grpo.py | advantages
    dist.mean_and_std(x[mask])  =>  dist.mean_and_std(x.flatten())
returns are computed from whitened advantages | grpo.py | advantages
    returns = adv + value  =>  returns = whiten(adv, mask) + value
earlier steps count | grpo.py | advantages loss
    score.flip(1).cumsum(1).flip(1)  =>  score.cumsum(1)
the last step ends before the end token | reward.py | reward
    tokens[-1] = len(columns) - 1  =>  pass
all true steps to a wrong answer are good | reward.py | reward
    truths[-1] = truths[-1] and correct[i] > 0  =>  pass
a truncated completion is rewarded | reward.py | faults -k cut_off
    torch.where(batch.finished, x, x.clamp(max=0))  =>  x
truncation raises a bad score | reward.py | reward
    batch.reward.clamp(max=TRUNCATED_REWARD)  =>  TRUNCATED_REWARD
the score is read one token early | reward.py | reward
    (raw - mean) / std, 0)  =>  (raw.roll(1, 1) - mean) / std, 0)
scores are normalised on the last batch only | reward.py | oracle -k three_fits
    normalise(reward_model, agent.history, cfg)  =>  normalise(reward_model, train, cfg)
no history is replayed | reward.py | oracle -k three_fits
    to_fit = passes.join([train, old])  =>  to_fit = train
the held-out tenth is fitted as well | reward.py | reward
    train = passes.take(rows, every[apart:])  =>  train = rows
a learned reward is divided by the group's std | run/config.py | config -k imply
    others["adv_scale"] = "none"  =>  pass
the reference is not updated between iterations | grpo.py | data_flow -k reference_moves
    dist.copy_weights(agent.ref, agent.policy)  =>  pass
the same random numbers on every rank | run/dist.py | ranks
    of_rank(uniform(rng, n * ranks(), group, N))  =>  uniform(rng, n, group, N)
gradients are not summed over ranks | run/dist.py | ranks
    p.grad = all_reduce(  =>  p.grad = (
resume without the adapted beta | run/checkpoint.py | variants -k adapted_beta
    agent.beta = checkpoint.beta  =>  pass
resume without the optimizer | run/checkpoint.py | checkpoint -k any_optimizer
    into.copy_(x  =>  name.startswith("opt.") or into.copy_(x
resume that resets the reference | run/checkpoint.py | checkpoint data_flow oracle
    into.copy_(x  =>  name.startswith("ref.") or into.copy_(x
resume without the critic | run/checkpoint.py | oracle -k any_two
    into.copy_(x  =>  name.startswith("critic.") or into.copy_(x
lines are logged twice after a resume | run/checkpoint.py | end_to_end -k killed
    f.truncate(min(f.tell(), size))  =>  pass
the checkpoint is written in place | run/files.py | files checkpoint
    beside = path.with_name(path.name + ".tmp")  =>  beside = path
truncated completions vote | run/report.py | end_to_end -k vote
    answer_of(task, text) if finished else ""  =>  answer_of(task, text)
pass@k requires all k to be right | run/report.py | tasks -k pass_at_k
    enumerate(sorted(right))  =>  enumerate(sorted(right, reverse=True))
RoPE rotates in the wrong direction | model.py | model sampling
    (x * cos + other * sin)  =>  (x * cos - other * sin)
the cache is read without a mask | model.py | model sampling
    q, k, v, self.mask)  =>  q, k, v)
a finished run is overwritten | run/checkpoint.py | checkpoint -k is_lost
    files.keep_previous(folder)  =>  pass
each rank evaluates with its own random numbers | run/report.py | ranks
    dist.rng(cfg, "evaluate", i)  =>  dist.rng(cfg, "evaluate", dist.rank())
GAE gives an outcome's score to every token | grpo.py | advantages
    torch.where(ends, score, 0).float(), dead  =>  score.float(), dead
shared rows ignore positions | run/passes.py | passes
    send(first % ids.size(1), device)  =>  send(torch.arange(len(first)), device)
a model has two memories at a time | run/caches.py | caches
    MEMORY.pop(model, None)  =>  pass
a reply counts as said by the policy | grpo.py | turns
    mask[rows, column] = sampled  =>  mask[rows, column] = sampled | forced[rows, column]
a reply is sampled, not read | grpo.py | turns
    torch.where(sampled, token, ids[rows, column])  =>  token
a reply may take the last token | data/turns.py | turns
    len(answer) >= left:  =>  len(answer) > left:
the warm start imitates the replies | run/setup.py | turns
    i % 2 == 1 for i, part  =>  i > 0 for i, part
credit stops at a reply | grpo.py | turns
    next_adv = torch.where(sampled, delta + gamma * lam * next_adv, next_adv)  =>
      next_adv = torch.where(sampled, delta + gamma * lam * next_adv, 0)
rows without an advantage are skipped despite a KL or a critic | grpo.py | loss oracle
    if agent.ref or agent.critic or own_loss:  =>  if own_loss:
the reference has another temperature | grpo.py | oracle -k temperature
    logps(agent.ref, batch, cfg)  =>  logps(agent.ref, batch, replace(cfg, temperature=1.0))
"""


def bugs():
    """Of each bug (name, file, tests, text, what replaces it)."""
    for bug in re.split(r"\n(?=\S)", TABLE.strip()):
        head, _, body = bug.partition("\n")
        yield *head.split(" | "), *(x.strip().replace("\\n", "\n") for x in body.split("  =>"))


def try_out(bug):
    """Inject one bug into a copy of the tree: the first of its tests that then fails, or None."""
    name, file, tests, text, instead = bug
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", ".git", "__pycache__"))
        source = (copy / file).read_text()
        assert text in source, f"update bugs.py: {name}: the quoted text is no longer in {file}"
        (copy / file).write_text(source.replace(text, instead, 1))
        files, _, only = tests.partition(" -k ")
        paths = [str(next(copy.glob(f"tests/**/test_{f}.py"))) for f in files.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *paths]
        done = subprocess.run(command + ["-k", only] * bool(only), cwd=copy, capture_output=True,
                              text=True)
        assert done.returncode in (0, 1), f"{name}: no tests ran\n{done.stdout}"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    return failed and failed[1]


def main(words):
    chosen = [bug for bug in bugs() if not words or any(word in bug[0] for word in words)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = []
        for (name, file, *_), failed in zip(chosen, pool.map(try_out, chosen)):
            found.append(failed)
            print(f"{name} ({file}): {failed or 'NOT CAUGHT'}", flush=True)
    print(f"{len(found)} bugs injected, {found.count(None)} not caught")
    return None in found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
