"""Minibatches, micro-batches, sets of rows, statistics; the check of sampler against trainer."""
import dataclasses
from functools import partial

import torch
from torch import distributed
import torch.nn.functional as F

from data import UserError
from model import send, token_logps
from run import dist, show

# --------------------------------------------------------------------------------------- the rows

def pad_prompts(prompts, group, max_new, context, device):
    """Rows for `group` completions of each prompt (a list of ids), padded on the right, ids (B, T),
    with room for at most `max_new` new tokens (a number, or one per prompt); the length of a row's
    prompt and its maximum of new tokens, both (B,). Raises UserError if T exceeds the `context`."""
    most = torch.as_tensor(max_new).expand(len(prompts)).tolist()
    lengths = [len(prompt) for prompt in prompts]
    T = max(length + n for length, n in zip(lengths, most))
    if T > context:
        raise UserError(f"a prompt of {max(lengths)} tokens and --max_new {max_new} do not fit the "
                        f"model's context of {context}")
    padded = [prompt + [0] * (T - len(prompt)) for prompt in prompts]
    return (torch.tensor(x, device=device).repeat_interleave(group, 0)
            for x in (padded, lengths, most))

def on_host(batch):
    """A Batch with all tensors on the host."""
    tensors = {n: x.cpu() for n, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    components = {n: x.cpu() for n, x in batch.components.items()}
    return dataclasses.replace(batch, **tensors, components=components)

def row_lengths(mask):
    """The length of each row without padding, (B,)."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)

def last_tokens(mask):
    """A mask of each row's last sampled token, (B, T)."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

def minibatches(cfg, rng, n):
    """Splits the rows of a step at random into the minibatches of each epoch. Yields for each its
    rows on this rank, as indices (on the host) into this rank's batch, and its number of rows on
    all ranks. Raises UserError unless the batch has this rank's share of rows; n: how many."""
    rows = cfg.prompts * cfg.group
    local = dist.of_rank(torch.arange(rows).view(-1, cfg.group)).flatten()
    if n != len(local):
        raise UserError(f"a rollout must have --prompts x --group rows, here {len(local)}, not {n}")
    for _ in range(cfg.epochs):
        permutation = torch.tensor(rng.sample(range(rows), rows))
        for part in permutation.tensor_split(cfg.minibatches):
            yield torch.isin(local, part).nonzero()[:, 0], len(part)

MICRO_TOKENS = 2048     # per micro-batch on a CPU; see also `preflight.micro_tokens`

def micro_batches(ids, mask, budget):
    """Splits rows of ids and mask (B, T) into chunks of at most `budget` tokens (0: MICRO_TOKENS),
    padding included, or of one longer row; yields (row indices on the host, longest length). Rows
    are sorted, so that rows with a common prefix are neighbours and share it. Every rank yields as
    many chunks, empty ones at the end if need be: with sharded models all take part in each pass.
    """
    rows, length, chunks, longest = ids.tolist(), row_lengths(mask.cpu()).tolist(), [], 0
    budget = budget or MICRO_TOKENS
    for row in sorted(range(len(rows)), key=rows.__getitem__):
        longest = max(longest, length[row])
        if chunks and (len(chunks[-1]) + 1) * longest <= budget:
            chunks[-1].append(row)
        else:
            chunks.append([row])
            longest = length[row]
    most = dist.all_reduce(torch.tensor(len(chunks)), distributed.ReduceOp.MAX).item()
    for chunk in chunks:
        yield torch.tensor(chunk), max(length[row] for row in chunk)
    for _ in range(len(chunks), most):
        yield torch.tensor([], dtype=torch.int64), ids.size(1)

@torch.no_grad()
def in_micro_batches(f, ids, mask, budget):
    """f(ids, mask), a tuple of (B, T) tensors or None, in micro-batches and without gradients. f is
    given its ids and mask on the host; the results are on the device of `ids`."""
    device, ids, mask, out = ids.device, ids.cpu(), mask.cpu(), None
    for rows, T in micro_batches(ids, mask, budget):
        parts = f(ids[rows, :T], mask[rows, :T])
        out = out or [x if x is None else torch.zeros(ids.shape, dtype=x.dtype, device=device)
                      for x in parts]
        for whole, part in zip(out, parts):
            if part is not None:
                whole[send(rows, device), :T] = part.to(device)
    return out

def logps(gpt, batch, cfg, critic=None):
    """`token_logps` of a batch, in micro-batches and without gradients."""
    of_rows = partial(token_logps, gpt, temperature=cfg.temperature, critic=critic)
    return in_micro_batches(of_rows, batch.ids, batch.mask, cfg.micro_tokens)

def in_chunks(name, items, size):
    """Yields the items `size` at a time, except chunks in which this rank has no share, and prints
    progress if it takes long. Raises Stopped on a signal; the work then begins again."""
    told = show.progress(name, len(items))
    for i in range(0, len(items), size):
        if dist.stop_asked():
            raise dist.Stopped(f"in the {name}, which will begin again")
        told(i)
        if dist.of_rank(items[i:i + size]):
            yield items[i:i + size]

# ------------------------------------------------------------------------ sets of rows, as dicts

def concatenate(*sets):
    """Joins sets of rows, dicts of (R, T) tensors, into one, padded to the longest."""
    T = max(x["ids"].size(1) for x in sets)
    return {name: torch.cat([F.pad(x[name], (0, T - x[name].size(1))) for x in sets])
            for name in sets[0]}

def of_all_ranks(rows, K):
    """All-gathers rows to the CPU of every rank, as sets of K in the order of their problems."""
    rows = {name: x.cpu() for name, x in rows.items()}
    if not distributed.is_initialized():
        return rows
    parts = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, rows)
    return {name: torch.stack(x.unflatten(0, (len(parts), -1, K)).unbind(0), 1).flatten(0, 2)
            for name, x in concatenate(*parts).items()}

# ---------------------------------------------------------------------------------- the statistics

def statistics(batch, dead):
    """The logged statistics of a rollout, means over the rows or tokens of all ranks. dead (P,):
    which groups are dead."""
    stats = dict(batch.components)
    stats["accuracy"] = stats.pop("correct")
    # The mean of -log pi estimates the entropy. It cannot serve as an entropy bonus: as a term of
    # the loss its expected gradient is 0.
    entropy, _ = dist.mean_and_std(-batch.logp[batch.mask])
    stats |= {"reward": batch.reward.sum(1), "dead_groups": dead, "length": batch.mask.sum(1),
              "finished": batch.finished, "entropy": entropy}
    if batch.value is not None:             # 1: predicts all returns; 0: only their mean
        _, error = dist.mean_and_std((batch.returns - batch.value)[batch.mask])
        _, spread = dist.mean_and_std(batch.returns[batch.mask])
        stats["explained_variance"] = 1 - (error / spread.clamp(min=1e-4)).square()
    return dist.means(stats)

def whiten(x, mask):
    """(x - mean) / std over all tokens in mask, on all ranks; 0 elsewhere, or if all are equal."""
    x = x.to(dist.double(x.device))
    mean, std = dist.mean_and_std(x[mask])
    spread = mask & (std > 1e-6 * mean.abs())
    return torch.where(spread, (x - mean) / std, 0).float()

def speed(batch, began, sampled, ended):
    """A step's seconds and the tokens per second of its rollout and update, from the times at which
    it began, had sampled and ended."""
    tokens = dist.all_reduce(batch.mask.sum()).item()
    return {"seconds": ended - began, "rollout_tok_s": tokens / (sampled - began),
            "update_tok_s": tokens / (ended - sampled)}

# ------------------------------------------------------------------ sampler and trainer must agree

# The largest and the mean gap allowed between the sampler's and the trainer's log-probability of a
# token before the first optimizer step; beyond it every ratio would be wrong. With 30 layers the
# largest gap was 1.3e-4 in float32. In bfloat16 a logit of 32 is rounded to steps of 0.25, so gaps
# at single tokens may be large, but with 30 layers the mean gap was 0.034. (In bfloat16 the old
# log-probabilities in the ratios are the trainer's own.)
MISMATCH = {None: (1e-3, 1e-4), torch.bfloat16: (2.0, 0.1)}

def checked_gap(gaps, tokens, dtype):
    """The largest of the gaps (n,) between the sampler's and the trainer's log-probabilities of
    `tokens` tokens, over all ranks; gaps of other columns are 0. Raises UserError if it, or the
    mean, exceeds what rounding in `dtype` explains."""
    most, most_on_average = MISMATCH[dtype]
    largest = dist.all_reduce(F.pad(gaps, (0, 1)).max(), distributed.ReduceOp.MAX).item()
    mean = dist.all_reduce(gaps.sum()).item() / max(1, dist.all_reduce(tokens).item())
    if not (largest <= most and mean <= most_on_average):
        raise UserError(f"sampler and trainer disagree: their log-probabilities are up to "
                        f"{largest:.2g} apart, {mean:.2g} on average; rounding explains {most} and "
                        f"{most_on_average}")
    return largest
