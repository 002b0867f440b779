"""Rows into micro-batches, the optimizer's step, supervised fits."""
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import Fault
from model import token_logps
from run import machine, shard, show

# --------------------------------------------------------------------------------------- the rows

def row_lengths(mask):
    """Tokens of each row without its padding, (B,)."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)

def last_tokens(mask):
    """The last sampled token of each row, (B, T)."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

def by_16(n):
    """n, up to the next multiple of 16: of sizes rounded so, few shapes are compiled."""
    return -(-n // 16) * 16

def minibatches(cfg, source, device):
    """Deal the rows of a step, of all ranks, at random to the minibatches of each epoch. Yields of
    each the rows that are on this rank, as indices into its batch, and the number on all ranks."""
    rows = cfg.prompts * cfg.group
    local = machine.deal(torch.arange(rows).view(-1, cfg.group)).flatten()
    for _ in range(cfg.epochs):
        permutation = torch.tensor(source.sample(range(rows), rows))
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
def by_parts(f, ids, mask, budget):
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
    """What `token_logps` gives of a batch, in micro-batches and without a graph."""
    of = partial(token_logps, gpt, temperature=cfg.temperature, critic=critic)
    return by_parts(of, batch.ids, batch.mask, cfg.micro_tokens)

def parts(name, items, size):
    """The items, `size` at a time, without a part in which this rank has no share; where that takes
    long, with a line on how far it is. Raises Stopped if a signal came: all will begin anew."""
    told = show.progress(name, len(items))
    for i in range(0, len(items), size):
        if machine.stop_asked():
            raise machine.Stopped(f"in the {name}, which will begin anew")
        told(i)
        if machine.deal(items[i:i + size]):
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

# ----------------------------------------------------------------------------------- the training

def new_optimizer(modules, lr, eps=1e-8):
    """AdamW of the modules that are not None. Without weight decay: what holds the weights here is
    the KL to the reference."""
    params = [p for module in filter(None, modules) for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr, betas=(0.9, 0.95), eps=eps, weight_decay=0, fused=True)

def optimizer_step(opt, grad_clip):
    """Sum the gradients over the ranks, clip, step, clear. Gives the norm before clipping: one of
    all weights, a separate critic's too, as in PPO's first code and in CleanRL. Adam divides most
    of a common factor out again."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for p in params:
        p.grad = shard.summed(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = shard.whole(torch.nn.utils.clip_grad_norm_(params, grad_clip)).item()
    if not math.isfinite(norm):
        raise Fault(f"the norm of the gradient is {norm}")
    opt.step()
    opt.zero_grad()
    return norm

# The largest gap between the sampler's and the trainer's log-probability of a token before the
# first optimizer step; beyond it the two disagree, and every ratio is wrong. In float32 30 layers
# were up to 1.3e-4 apart; in bfloat16 a logit of 32 has steps of 0.25 (and the ratios take the
# trainer's old_logp). A shifted token is nats away.
MISMATCH = {None: 1e-3, torch.bfloat16: 2.0}

def checked_gap(gap, dtype):
    """The largest `gap` of all ranks between the sampler's and the trainer's log-probability of a
    token; raises Fault if it is more than the rounding of products in `dtype`."""
    gap = machine.all_reduce(gap, dist.ReduceOp.MAX).item()
    if not gap <= MISMATCH[dtype]:
        raise Fault(f"sampler and trainer disagree: their log-probabilities are {gap:.2g} apart, "
                    f"more than the {MISMATCH[dtype]} of rounding")
    return gap

def fit(name, module, losses, steps, lr, grad_clip):
    """Supervised training: `steps` optimizer steps, each on the sum of the terms that
    `losses(step)` yields; the learning rate rises, then falls to 0."""
    opt, told = new_optimizer([module], lr), show.progress(name, steps)
    for step in range(steps):
        if machine.stop_asked():
            raise machine.Stopped(f"in the {name}, which will begin anew")
        opt.param_groups[0]["lr"] = lr * min(1 - step / steps, (step + 1) / 30)
        total = torch.zeros((), device=opt.param_groups[0]["params"][0].device)
        for loss in losses(step):
            loss.backward()
            total += loss.detach()
        optimizer_step(opt, grad_clip)
        tenth = (step + 1) % max(1, steps // 10) == 0
        told(step + 1, f"loss {machine.all_reduce(total).item():.3f}  ", tenth)
