"""Rows into minibatches and micro-batches; sets of rows; whether sampler and trainer agree."""
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import UserError
from model import token_logps
from run import machine, show

# --------------------------------------------------------------------------------------- the rows

def pad_prompts(prompts, max_new, context, device):
    """Prompts (lists of ids) as ids (P, T), padded on the right with room for completions of
    `max_new` tokens (of each prompt, or of all); their lengths, and the most new tokens, both (P,).
    Raises UserError if a row would not fit in the `context`."""
    most = torch.as_tensor(max_new).expand(len(prompts)).tolist()
    T = max(len(prompt) + n for prompt, n in zip(prompts, most))
    if T > context:
        raise UserError(f"a prompt of {max(map(len, prompts))} tokens and --max_new {max_new} do "
                        f"not fit the model's context of {context}")
    padded = [prompt + [0] * (T - len(prompt)) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    return (torch.tensor(x, device=device) for x in (padded, lengths, most))

def row_lengths(mask):
    """Tokens of each row without its padding, (B,)."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)

def last_tokens(mask):
    """The last sampled token of each row, (B, T)."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

def by_16(n):
    """n, up to the next multiple of 16: of sizes rounded so, few shapes are compiled."""
    return -(-n // 16) * 16

def minibatches(cfg, rng, device):
    """Deal the rows of a step, of all ranks, at random to the minibatches of each epoch. Yields of
    each the rows that are on this rank, as indices into its batch, and the number on all ranks."""
    rows = cfg.prompts * cfg.group
    local = machine.local_share(torch.arange(rows).view(-1, cfg.group)).flatten()
    for _ in range(cfg.epochs):
        permutation = torch.tensor(rng.sample(range(rows), rows))
        for part in permutation.tensor_split(cfg.minibatches):
            yield torch.isin(local, part).nonzero()[:, 0].to(device), len(part)

def micro_batches(ids, mask, budget):
    """Chunks of rows (indices, longest length) of ids and mask (B, T), each of at most `budget`
    tokens with its padding, or of one row. Rows that begin alike are put one below the other: a
    model computes that beginning once. All ranks have as many chunks, the last ones without a row:
    where models are dealt, each takes part in every pass."""
    rows, length, chunks, longest = ids.tolist(), row_lengths(mask).tolist(), [], 0
    for row in sorted(range(len(rows)), key=rows.__getitem__):
        longest = max(longest, length[row])
        if chunks and (len(chunks[-1]) + 1) * longest <= budget:
            chunks[-1].append(row)
        else:
            chunks.append([row])
            longest = length[row]
    most = machine.all_reduce(torch.tensor(len(chunks), device=ids.device), dist.ReduceOp.MAX)
    for chunk in chunks:
        yield torch.tensor(chunk), max(length[row] for row in chunk)
    for _ in range(len(chunks), most):
        yield torch.tensor([], dtype=torch.int64), ids.size(1)

@torch.no_grad()
def in_micro_batches(f, ids, mask, budget):
    """f(ids, mask), a tuple of (B, T) tensors or None, in micro-batches and without a graph."""
    out = None
    for rows, T in micro_batches(ids, mask, budget):
        parts = f(ids[rows, :T], mask[rows, :T])
        out = out or [x if x is None else torch.zeros_like(ids, dtype=x.dtype) for x in parts]
        for whole, part in zip(out, parts):
            if part is not None:
                whole[rows, :T] = part.to(ids.device)
    return out

def logps(gpt, batch, cfg, critic=None):
    """`token_logps` of a batch, in micro-batches and without a graph."""
    of_rows = partial(token_logps, gpt, temperature=cfg.temperature, critic=critic)
    return in_micro_batches(of_rows, batch.ids, batch.mask, cfg.micro_tokens)

def in_chunks(name, items, size):
    """The items, `size` at a time, without a part in which this rank has no share; where that takes
    long, with a line on how far it is. Raises Stopped if a signal came: all will begin anew."""
    told = show.progress(name, len(items))
    for i in range(0, len(items), size):
        if machine.stop_asked():
            raise machine.Stopped(f"in the {name}, which starts over")
        told(i)
        if machine.local_share(items[i:i + size]):
            yield items[i:i + size]

# ------------------------------------------------------------------------ sets of rows, as dicts

def concatenate(*sets):
    """Sets of rows, each a dict of (R, T) tensors, as one, padded to the longest."""
    T = max(x["ids"].size(1) for x in sets)
    return {name: torch.cat([F.pad(x[name], (0, T - x[name].size(1))) for x in sets])
            for name in sets[0]}

def of_all_ranks(rows, K):
    """Rows of all ranks, on each of them: sets of K in the order of their problems, on the CPU."""
    rows = {name: x.cpu() for name, x in rows.items()}
    if not dist.is_initialized():
        return rows
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return {name: torch.stack(x.unflatten(0, (len(parts), -1, K)).unbind(0), 1).flatten(0, 2)
            for name, x in concatenate(*parts).items()}

# ---------------------------------------------------------------------------------- the statistics

def statistics(batch, dead):
    """What the log says of a rollout: means over rows, or tokens, of all ranks. dead (P,): the dead
    groups."""
    stats = dict(batch.components)
    stats["accuracy"] = stats.pop("correct")
    # The mean of -log pi estimates the entropy. It is no bonus: as a term of the loss its gradient
    # is 0 in the mean over samples of the policy.
    entropy, _ = machine.mean_and_std(-batch.old_logp[batch.mask])
    stats |= {"reward": batch.reward.sum(1), "dead_groups": dead, "length": batch.mask.sum(1),
              "finished": batch.finished, "entropy": entropy}
    if batch.value is not None:             # 1: the critic knows the returns; 0: only their mean
        _, error = machine.mean_and_std((batch.returns - batch.value)[batch.mask])
        _, spread = machine.mean_and_std(batch.returns[batch.mask])
        stats["explained_variance"] = 1 - (error / spread.clamp(min=1e-4)).square()
    return machine.means(stats)

def speed(batch, began, sampled, ended):
    """The seconds of a step, and the tokens a second of its rollout and of its update, from the
    times at which it began, had sampled and ended."""
    tokens = machine.all_reduce(batch.mask.sum()).item()
    return {"seconds": ended - began, "rollout_tok_s": tokens / (sampled - began),
            "update_tok_s": tokens / (ended - sampled)}

# ------------------------------------------------------------------ sampler and trainer must agree

# How far the sampler's and the trainer's log-probabilities of a token may be apart before the first
# optimizer step, at most and on average; beyond it the two disagree, and every ratio is wrong. In
# float32 30 layers were up to 1.3e-4 apart. In bfloat16 a logit of 32 has steps of 0.25, so single
# tokens may be far apart, but the average was 0.034 in 30 layers. (There the ratios take the
# trainer's own log-probabilities as the old ones.)
MISMATCH = {None: (1e-3, 1e-4), torch.bfloat16: (2.0, 0.1)}

def checked_gap(gaps, dtype):
    """The largest of the gaps (n,) between the sampler's and the trainer's log-probability of a
    token, on all ranks; raises UserError if it, or the mean, is more than rounding in `dtype`."""
    most, most_on_average = MISMATCH[dtype]
    largest = machine.all_reduce(F.pad(gaps, (0, 1)).max(), dist.ReduceOp.MAX).item()
    mean = machine.mean_and_std(gaps)[0].item()
    if not (largest <= most and mean <= most_on_average):
        raise UserError(f"sampler and trainer disagree: their log-probabilities are up to "
                        f"{largest:.2g} apart, {mean:.2g} on average; rounding explains {most} and "
                        f"{most_on_average}")
    return largest
