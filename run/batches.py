"""Minibatches, micro-batches, sets of rows, statistics; the check of sampler against trainer."""
import dataclasses

import torch
from torch import distributed
import torch.nn.functional as F

from data import UserError
from run import dist, show

# --------------------------------------------------------------------------------------- the rows

def on_host(batch):
    """A Batch with all tensors on the host."""
    tensors = {n: x.cpu() for n, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    components = {n: x.cpu() for n, x in batch.components.items()}
    return dataclasses.replace(batch, **tensors, components=components)

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
