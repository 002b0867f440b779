"""Batches of rows, micro-batches, supervised fits, and a layout in which a prefix that rows have in
common is computed once: on a CPU half the time. States must depend on the past alone."""
from dataclasses import fields, replace
from typing import NewType

import torch
import torch.nn.functional as F
from torch import distributed

import model
from data import UserError
from model import send
from run import dist, signals
from run.terminal import progress

# -------------------------------------------------------------- rows of Batches

Tokens = NewType("Tokens", torch.Tensor)    # the type of fields (B, T)

def padded(rows, group, width):
    """Each of the rows (lists of ids), padded with 0 to `width`, `group` times: (B, width)."""
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, :len(row)] = torch.tensor(row)
    return ids.repeat_interleave(group, 0)

def behind_prompts(mask, prompts, begun, group):
    """Where completions begin, (B,), and which of their tokens are judged, (B, T): those in mask
    (B, T), and given ones that `begun` marks."""
    judged = [[False] * len(prompt) + judged for prompt, (_, judged) in zip(prompts, begun)]
    judged = padded(judged, group, mask.size(1)).bool()
    start = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(group)
    return send(start, mask.device), mask | send(judged, mask.device)

def join(values):
    """A field of several Batches: tensors (B,) or (B, T), padded to the longest, lists, dicts."""
    first = values[0]
    if isinstance(first, dict):
        return {name: join([value[name] for value in values]) for name in first}
    if isinstance(first, list):
        return sum(values, [])
    if first is None:
        return None
    if first.dim() == 2:
        T = max(x.size(1) for x in values)
        values = [F.pad(x, (0, T - x.size(1))) for x in values]
    return torch.cat(values)

def take(x, rows):
    """Some rows of a tensor, list or dict of these, by indices (n,) on the host."""
    if isinstance(x, dict):
        return {name: take(value, rows) for name, value in x.items()}
    if isinstance(x, list):
        return [x[i] for i in rows.tolist()]
    return x[send(rows, x.device)] if isinstance(x, torch.Tensor) else x

def joined(batches, rows):
    """Some rows of several Batches, by indices (n,) through all of them, as one Batch."""
    found = [vars(batch) for batch in batches]
    for name in found[0]:
        if len({fields_of[name] is None for fields_of in found}) > 1:
            raise UserError(f"Batches to join: only some have {name}")
    return type(batches[0])(**take(join(found), rows))

def groups_of(problems):
    """The numbers of rows' groups, (B,), on the host, by the problems of the rows, as objects."""
    numbers = {}
    found = [numbers.setdefault(id(problem), len(numbers)) for problem in problems]
    return torch.tensor(found, dtype=torch.int64)  # of no rows, too

def grid(groups, device="cpu"):
    """The rows of each group, (P, G), -1 where it has fewer, by their groups' numbers (B,), and
    each row's place in there, (B,)."""
    size = groups.bincount()
    G = max(size.tolist(), default=0)
    order = groups.argsort(stable=True)
    of_group = torch.arange(G) < size[:, None]
    rows = torch.full(of_group.shape, -1).masked_scatter(of_group, order)
    place = of_group.flatten().nonzero()[:, 0][order.argsort()]
    return rows.to(device), place.to(device)

def vary(mean, std):
    """Whether numbers with this mean and std differ by more than rounding, a millionth."""
    return std > 1e-6 * mean.abs().clamp(min=1)

# ---------------------------------------------------------------- micro-batches

MICRO_TOKENS = 2048     # per micro-batch on a CPU; see also `pretrained.micro_tokens`

def row_lengths(mask):
    """The length of each row without padding, (B,), of a mask (B, T)."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)

def last_tokens(mask):
    """A mask of each row's last sampled token, (B, T)."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

def replies_after(mask):
    """The number of a row's sampled tokens, by its mask (T,), before each of its replies."""
    columns = mask.nonzero()[:, 0]
    return ((columns.diff() > 1).nonzero()[:, 0] + 1).tolist()

def split_rows(ids, mask, budget):
    """Splits rows of ids and mask (B, T), sorted, so that common prefixes are neighbours, into
    micro-batches of at most `budget` tokens (0: MICRO_TOKENS), padding included, or of one row;
    yields (row indices on the host, longest length)."""
    budget = budget or MICRO_TOKENS
    rows = ids.tolist()
    length = row_lengths(mask.cpu()).tolist()
    chunks, longest = [], 0
    for row in sorted(range(len(rows)), key=lambda i: rows[i]):
        longest = max(longest, length[row])
        if chunks and (len(chunks[-1]) + 1) * longest <= budget:
            chunks[-1].append(row)
        else:
            chunks.append([row])
            longest = length[row]
    for chunk in chunks or [[]]:  # without rows one that is empty
        T = max((length[row] for row in chunk), default=ids.size(1))
        yield torch.tensor(chunk, dtype=torch.int64), T

def select(batch, rows, T):
    """Some rows of a Batch, indices on the host, Tokens cut to T columns."""
    found = take(vars(batch), rows)
    for f in fields(batch):
        if f.type is Tokens and found[f.name] is not None:
            found[f.name] = found[f.name][:, :T]
    return type(batch)(**found)

def micro_batches(batch, mask, rows, budget):
    """Yields the parts of `split_rows` of some rows as Batches; ids and mask are on the host."""
    for part, T in split_rows(batch.ids[rows], mask[rows], budget):
        yield select(batch, rows[part], T)

def in_parts(token_logps, gpt, batch, cfg, critic=None):
    """`grpo.token_logps` of a Batch, in micro-batches."""
    batch = replace(batch, ids=batch.ids.cpu(), mask=batch.mask.cpu())
    logp = torch.zeros(batch.ids.shape, device=gpt.device)
    value = None if critic is None else torch.zeros_like(logp)
    for rows, T in split_rows(batch.ids, batch.mask, cfg.micro_tokens):
        scored = token_logps(gpt, select(batch, rows, T), cfg, critic)
        rows = send(rows, gpt.device)
        logp[rows, :T] = scored[0]
        if critic is not None:
            value[rows, :T] = scored[1]
    return logp, value

# ------------------------------------------------------- rows, prefixes once

def distinct(ids, mask):
    """The tokens to compute: those of each row up to its last True in mask (B, T), less the prefix
    that it has in common with the row above: of rows `a b c` and `a b d` a, b, c and d. Returns
    their indices into the flattened rows, (n,), and for each position the index among these,
    (B, T), here 0 1 2 and 0 1 3; arbitrary after the last True."""
    needed = mask.flip(1).cumsum(1).flip(1) > 0
    needed[:, :1] = True  # there is a token, whatever mask has
    same = needed[:-1] & (ids[1:] == ids[:-1])
    prefix = F.pad(same.cumprod(1).bool(), (0, 0, 1, 0))  # of the first row: none
    new = needed & ~prefix
    count = new.flatten().cumsum(0).view_as(mask)
    index = torch.where(new, count - 1, 0).cummax(0).values  # from the nearest row above
    return new.flatten().nonzero()[:, 0], index

class SharedRows:
    """The `distinct` tokens of ids (B, T) as one row, (1, n); only attention sees full rows."""

    def __init__(self, gpt, ids, mask):
        device = gpt.device
        first, index = self.on_host = distinct(ids, mask)
        self.first = send(first, device)
        self.index = send(index, device)
        self.ids = send(ids.flatten()[first][None], device)  # (1, n)
        self.pos = send(first % ids.size(1), device)[None]

    def attend(self, q, k, v, cache):
        if q.shape[:2] != self.ids.shape:
            raise UserError(f"shared rows have {self.ids.size(1)} tokens, but attention is given "
                            f"{tuple(q.shape[:2])}: rows that differ in more than ids need "
                            f"--no-shared_prefixes")
        heads = self.gather(torch.cat((q, k, v), 2))  # (B, T, H + 2 K, D)
        y = model.causal_attention(*heads.split((q.size(2), k.size(2), v.size(2)), 2))
        y = F.embedding(self.first, y.flatten(2).flatten(0, 1))  # (n, H D)
        return y.unflatten(-1, q.shape[2:])[None]                # (1, n, H, D)

    def gather(self, x):
        """Heads x (1, n, H, D) as full rows, (B, T, H, D), in float32 as in `causal_attention`."""
        x = x.float() if x.is_cpu and x.dtype == torch.bfloat16 else x
        x, heads = x[0].flatten(1), x.shape[2:]
        return F.embedding(self.index, x).unflatten(-1, heads)  # its gradient is faster than x[...]

    def in_rows(self, h):
        """Hidden states h (1, n, C) as full rows, (B, T, C)."""
        return F.embedding(self.index, h[0])

    def once(self, at, tokens):
        """As in `Rows`, equal tokens behind a state once."""
        first, index = self.on_host
        pair, each = (index.flatten()[at] << 32 | tokens).unique(return_inverse=True)
        return first[pair >> 32], pair & 2 ** 32 - 1, each

def layout_of(gpt, ids, mask):
    """The layout of a pass over ids (B, T), on the host, for scalars in mask (B, T)."""
    kind = SharedRows if gpt.shared_prefixes else model.Rows
    return kind(gpt, ids, mask)

@torch.no_grad()
def entropies(gpt, batch, cfg):
    """The entropy (B, T), in nats, behind each token as of now."""
    ids, mask, device = batch.ids.cpu(), batch.mask.cpu(), gpt.device
    entropy = torch.zeros(mask.shape, device=device)
    size = max(1, gpt.most_logits // 16 // gpt.cfg.vocab_size)
    for rows, T in split_rows(ids, mask, cfg.micro_tokens):
        before, on = ids[rows, :T][:, :-1], mask[rows, 1:T]
        h = gpt(before, layout=layout_of(gpt, before, on))  # (r, T - 1, C)
        on = send(on, device)
        parts = (h[on] / cfg.temperature).split(size)
        found = torch.cat([torch.special.entr(gpt.probs(part)).sum(-1) for part in parts])
        found = entropy.new_zeros(on.shape).masked_scatter(on, found)
        entropy[send(rows, device), 1:T] = found
    return entropy

# ----------------------------------------------- sampler and trainer must agree

# The largest and the mean gap allowed before the first optimizer step; beyond it every ratio would
# be wrong. With 30 layers the largest was 1.3e-4 in float32. In bfloat16 a logit of 32 is rounded
# to steps of 0.25: a gap may be large, but the mean was 0.034, and ratios use the trainer's own.
MISMATCH = {None: (1e-3, 1e-4), torch.bfloat16: (2.0, 0.1)}

def checked_gap(scored, dtype):
    """The largest gap between log-probabilities of sampler and trainer, over all ranks. `scored`:
    micro-batches, each with the trainer's (B, T). UserError unless rounding explains it."""
    most, most_on_average = MISMATCH[dtype]
    gaps, tokens = [], 0
    for batch, logp in scored:
        mask = batch.mask & batch.on_policy[:, None]
        gaps.append(torch.where(mask, logp - batch.logp, 0).abs().flatten())
        tokens = tokens + mask.sum()
    gaps = torch.cat(gaps)
    largest = dist.all_reduce(F.pad(gaps, (0, 1)).max(), distributed.ReduceOp.MAX)
    total, tokens = dist.all_reduce(torch.stack([gaps.sum(), tokens.to(gaps)]))
    largest, mean = torch.stack([largest, total / tokens.clamp(min=1)]).tolist()
    if not (largest <= most and mean <= most_on_average):
        raise UserError(f"sampler and trainer disagree: their log-probabilities are up to "
                        f"{largest:.2g} apart, {mean:.2g} on average; rounding explains {most} and "
                        f"{most_on_average}: see the section in docs/troubleshooting.md")
    return largest

# -------------------------------------------------------------- supervised fits

@torch.enable_grad()
def supervised_fit(name, module, losses, steps, lr):
    """`steps` steps of AdamW on the loss terms of `losses(step)`; the rate rises, then falls."""
    params = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0, fused=True)
    told = progress(name, steps)
    module.train()
    for step in range(steps):
        signals.stop_here(name)
        opt.param_groups[0]["lr"] = lr * min(1 - step / steps, (step + 1) / 30)
        total = torch.zeros((), device=params[0].device)
        for loss in losses(step):
            loss.backward()
            total += loss.detach()
        dist.sum_gradients(params)
        dist.clip_gradients(params, 1.0)
        opt.step()
        opt.zero_grad()
        tenth = (step + 1) % max(1, steps // 10) == 0
        told(step + 1, f"loss {dist.all_reduce(total).item():.3f}  ", tenth)
    module.eval()
