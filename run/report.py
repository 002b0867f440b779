"""Runs as one self-contained HTML page, which loads nothing from a network; samples.jsonl.

    python grpo.py --report out/grpo out/ppo        # writes out/grpo/comparison.html

`page/` holds its template, style and script, and uPlot, which draws the curves.
"""
import dataclasses
import json
import math
import re
import time
from collections import Counter
from pathlib import Path

import torch

import data
from data import UserError, answer_of, read_json
from data.tokenizer import pieces
from model import send
from run import dist, files, passes, show

PAGE = Path(__file__).parent / "page"
MOST = 20_000_000       # bytes of samples.jsonl on one page, over all its runs

def refresh(folder):
    """Rewrites the report of a run, on the first rank. A run goes on if that fails."""
    if dist.rank() == 0:
        try:
            write([folder])
        except (UserError, OSError) as e:
            show.print0(f"note: no report: {e}")

def print_report(folders, out):
    """`write`; prints the path of the page, and the first and the last evaluation of each run."""
    show.print0(f"the report is in {write(folders, out)}")
    for folder in folders:
        metrics = logged(Path(folder) / "metrics.jsonl")
        evaluated = [m for m in metrics if "greedy" in m]
        for m in evaluated[:1] + evaluated[1:][-1:]:
            show.print0(f"{folder}  step {m['step']}  {show.percentages(m)}")

def write(folders, out=""):
    """Writes report.html on a run, or comparison.html on several, into the first of `folders` or
    into `out`; returns its path. Raises UserError for a folder without a run."""
    name = "report.html" if len(folders) == 1 else "comparison.html"
    path = Path(out or folders[0]) / name
    text = page([run_of(Path(folder), MOST // len(folders)) for folder in folders])
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, text)
    return path

def page(runs):
    """The page on some runs. `<` is escaped in their data, so that no text in it ends the script
    element in which it stands."""
    text = json.dumps(files.strict(runs), separators=(",", ":")).replace("<", "\\u003c")
    def part(found):
        return text if found[1] == "data" else (PAGE / found[1]).read_text("utf-8")
    return re.sub(r"\{\{(.+?)\}\}", part, (PAGE / "page.html").read_text("utf-8"))

def run_of(folder, most):
    """What the page shows of a run, with at most `most` bytes of samples."""
    path = folder / "run.json"
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"no run in {folder}")
    about = read_json(path.read_bytes(), path) if path.is_file() else {}
    samples, steps = thinned(folder / "samples.jsonl", most)
    return dict(name=folder.resolve().name, path=str(folder), about=about, steps=steps,
                metrics=logged(folder / "metrics.jsonl"), samples=samples)

def thinned(path, most):
    """The records of samples.jsonl at evenly spaced steps, the first and the last included, at most
    `most` bytes of them; and the number of steps in the file."""
    sizes = Counter()                                   # bytes by step: the file may be large
    for n, line in whole_lines(path):
        sizes[step_of(path, n, line)] += len(line)
    steps = sorted(sizes)
    n = len(steps)
    while sum(sizes[step] for step in spread(steps, n)) > most:
        n = n * 9 // 10
    return logged(path, spread(steps, n)), len(steps)

def spread(items, n):
    """n of the items, evenly spaced, the first and the last included."""
    return [items[i * (len(items) - 1) // max(1, n - 1)] for i in range(n)]

def logged(path, steps=None):
    """The records of a log, or those of some steps. None takes the place of NaN and infinities,
    which an earlier version wrote though JSON lacks them."""
    found = []
    for n, line in whole_lines(path):
        if steps is None or step_of(path, n, line) in steps:
            try:
                found.append(json.loads(line, parse_constant=lambda name: None))
            except ValueError as e:
                raise UserError(f"{path}, line {n}, is not JSON: {e}") from e
    return found

def whole_lines(path):
    """The complete lines of a log, as bytes, with their numbers: a run may be writing one. Blank
    ones are left out. None if there is no file."""
    if path.is_file():
        with open(path, "rb") as f:
            for n, line in enumerate(f, 1):
                if line.endswith(b"\n") and line.strip():
                    yield n, line

def step_of(path, n, line):
    """The step at the beginning of line n of a log."""
    found = re.match(rb'\{"step": (\d+)', line)
    if not found:
        raise UserError(f"{path}, line {n}, does not begin with a step")
    return int(found[1])

# ---------------------------------------------------------------------------------- samples.jsonl

PART = 2 ** 24      # most logits at a time, 64 MiB in float32

def log_step(agent, step, batch, done):
    """Prints a line for a step, from the statistics of the steps `done`; at the first one, the last
    one, and every --save_every steps also a group of its completions, and adds two groups to
    samples.jsonl."""
    cfg, first = agent.cfg, dist.rank() == 0
    show.step_line(step, cfg.total_steps, done)
    if step not in (1, cfg.total_steps) and step % cfg.save_every != 0:
        return
    batch = on_host(batch)
    if first:
        show.group(batch, widest(batch, cfg.group), agent.encoding)
    if first or dist.is_sharded(agent.policy):          # every rank takes part in its passes
        for which, rows in chosen(agent.cfg, step, batch).items():
            found = {"step": step, "which": which, **record(agent, batch, rows)}
            if first:
                files.append(agent.cfg.folder / "samples.jsonl", found)

def widest(batch, group):
    """The rows of the group with the largest std of rewards; the first one in a tie."""
    rewards = batch.reward.sum(1).double().view(-1, group)
    p = int(rewards.std(1, correction=0).argmax())
    return slice(p * group, (p + 1) * group)

def chosen(cfg, step, batch):
    """The rows of two of this rank's groups by reason: the widest spread of rewards, and a random
    other group, if there is one."""
    spread = widest(batch, cfg.group)
    others = [*range(0, len(batch.ids), cfg.group)]
    others.remove(spread.start)
    if not others:
        return {"spread": spread}
    begin = dist.rng(cfg, "samples", step).choice(others)
    return {"spread": spread, "random": slice(begin, begin + cfg.group)}

def record(agent, batch, rows):
    """What samples.jsonl holds of a group, given by its rows in a rollout that is on the host. An
    inner list has an entry per token; `ends` are indices, from 0, of tokens that end a step."""
    ids = batch.ids[rows]
    mask = batch.mask[rows]
    ends = batch.ends[rows]
    ref_logp = None
    if batch.ref_logp is not None:
        ref_logp = numbers(batch.ref_logp[rows], mask)
    new_logp, entropy = as_it_is_now(agent.policy, ids, mask, agent.cfg.temperature)
    found = {
        "prompt": batch.problems[rows.start].prompt,
        "completions": batch.texts[rows],
        "finished": batch.finished[rows].tolist(),
        "rewards": rounded(batch.reward[rows].sum(1)),
        "parts": {name: rounded(x[rows]) for name, x in batch.components.items()},
        "tokens": [pieces(agent.encoding, row[on].tolist()) for row, on in zip(ids, mask)],
        "advantages": numbers(batch.adv[rows], mask),
        "logp": numbers(batch.logp[rows], mask),
        "new_logp": new_logp,
        "ref_logp": ref_logp,
        "entropy": entropy,
        "ends": [end[on].nonzero()[:, 0].tolist() for end, on in zip(ends, mask)],
        "step_rewards": numbers(batch.reward[rows], ends)}
    if hasattr(agent.task, "reply"):    # the number of tokens sampled before each reply
        found["replies"] = [passes.replies_after(row) for row in mask]
    return found

def numbers(x, where):
    """For each row of x (n, T) its numbers where `where` (n, T) is true."""
    return [rounded(row[on]) for row, on in zip(x, where)]

def rounded(x):
    """The numbers of a tensor (n,), to four decimals."""
    return [round(value, 4) for value in x.tolist()]

@torch.no_grad()
def as_it_is_now(policy, ids, mask, temperature):
    """log pi of each sampled token and the entropy at its position, in nats, under the policy after
    the update: for each, a list per row. Computes one row at a time, PART logits at a time."""
    logps, entropies = [], []
    size = max(1, PART // policy.cfg.vocab_size)
    for row, on, T in zip(ids, mask, passes.row_lengths(mask).tolist()):
        with torch.compiler.set_stance("force_eager"):      # a single row would be compiled again
            h = policy(row[None, :T - 1])[0]                                                # (T, C)
        h = h[on[1:T]]                                                                  # (n, C)
        tokens = send(row[:T][on[:T]], h.device)                                        # (n,)
        logp, entropy = [], []
        for part, token in zip(h.split(size), tokens.split(size)):
            logits = policy.head(part / temperature).log_softmax(-1)                        # (n, V)
            logp += rounded(logits.gather(-1, token[:, None])[:, 0])
            entropy += rounded(-(logits.exp() * logits).sum(-1))
        logps.append(logp)
        entropies.append(entropy)
    return logps, entropies

def on_host(batch):
    """A Batch with all tensors on the host."""
    tensors = {n: x.cpu() for n, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    components = {n: x.cpu() for n, x in batch.components.items()}
    return dataclasses.replace(batch, **tensors, components=components)

# ------------------------------------------------------------------------------ the statistics

def statistics(batch, dead):
    """The logged statistics of a rollout, means over the rows or tokens of all ranks. dead (P,):
    which groups are dead."""
    stats = dict(batch.components)
    stats["accuracy"] = stats.pop("correct")
    # The mean of -log pi estimates the entropy. It cannot serve as an entropy bonus: as a term of
    # the loss its expected gradient is 0.
    entropy, _ = dist.mean_and_std(-batch.logp[batch.mask])
    stats |= {"reward": batch.reward.sum(1), "length": batch.mask.sum(1),
              "finished": batch.finished, "entropy": entropy}
    if len(dead) < len(batch.ids):          # with one completion per prompt there are no groups
        stats["dead_groups"] = dead
    if isinstance(batch.texts[0], list):    # of the policy's
        turns = [float(len(text[::2])) for text in batch.texts]
        stats["turns"] = torch.tensor(turns, device=batch.ids.device)
    if batch.value is not None:             # 1: predicts all returns; 0: only their mean
        _, error = dist.mean_and_std((batch.returns - batch.value)[batch.mask])
        _, spread = dist.mean_and_std(batch.returns[batch.mask])
        stats["explained_variance"] = 1 - (error / spread.clamp(min=1e-4)).square()
    return dist.means(stats)

class Clock:
    """Takes the times of a step, from when it is made."""

    def __init__(self):
        self.began, self.judged = time.perf_counter(), data.SPENT[0]

    def has_sampled(self):
        """Notes that the rollout has ended, and how much of it was the time of the rewards."""
        self.sampled = time.perf_counter()
        self.judging = data.SPENT[0] - self.judged

    def speeds(self, batch):
        """The step's seconds, up to now, those of the task's rewards, and the tokens per second of
        its update and of the rest of its rollout."""
        ended = time.perf_counter()
        tokens = dist.all_reduce(batch.mask.sum()).item()
        sampling = self.sampled - self.began - self.judging
        return {"seconds": ended - self.began, "reward_seconds": self.judging,
                "rollout_tok_s": tokens / sampling, "update_tok_s": tokens / (ended - self.sampled)}

def solved(task, greedy, sampled, n):
    """The results of an evaluation: shares of the problems solved, by name, from Batches of this
    rank: with a greedy completion of each problem, and with n samples of each. The answer of a
    sample that was cut off does not vote."""
    ks = powers_of_two(n)
    names = ["greedy", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in ks[1:])]
    total = dict.fromkeys(names, 0.0)
    for batch in greedy:
        total["greedy"] += sum(batch.components["correct"].tolist())
    for batch in sampled:
        right = batch.components["correct"].tolist()
        votes = []
        for text, finished in zip(batch.texts, batch.finished.tolist()):
            votes.append(answer_of(task, text) if finished else "")
        for i in range(0, len(right), n):
            for name, x in shares(right[i:i + n], votes[i:i + n]).items():
                total[name] += x
    problems = sum(len(batch.ids) for batch in greedy)
    *sums, count = dist.all_reduce(torch.tensor([*total.values(), problems])).tolist()
    return {name: x / count for name, x in zip(total, sums)}

def shares(right, answers):
    """pass@k and maj@k by name for one problem, for k = 1, 2, 4, ... up to all its samples, given
    which samples are `right` and their `answers`. maj@1 is left out: it equals pass@1."""
    ks = powers_of_two(len(right))
    return {f"pass@{k}": pass_at(k, right) for k in ks} | {
        f"maj@{k}": majority_at(k, right, answers) for k in ks[1:]}

def powers_of_two(n):
    """1, 2, 4, ... up to n, and n."""
    return [1 << i for i in range(n.bit_length()) if 1 << i < n] + [n]

def pass_at(k, right):
    """The expected best of k of these samples, drawn without replacement (unbiased: 2107.03374)."""
    best = sum(math.comb(i, k - 1) * x for i, x in enumerate(sorted(right)))
    return best / math.comb(len(right), k)

def majority_at(k, right, answers):
    """The share of disjoint, consecutive sets of k samples whose most frequent answer is right. Of
    equally frequent answers the first wins; "" is not counted."""
    sets, solved = range(0, len(right) - k + 1, k), 0.0
    for i in sets:
        votes = answers[i:i + k]
        most = Counter(answer for answer in votes if answer).most_common(1)
        solved += right[i + votes.index(most[0][0])] if most else 0.0
    return solved / len(sets)
