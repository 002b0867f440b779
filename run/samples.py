"""The groups of a rollout that samples.jsonl shows, and their records."""
import torch

from data.tokenizer import pieces
from model import send
from run import batches, machine

PART = 2 ** 24      # most logits at a time, 64 MiB in float32

def widest(batch, group):
    """The rows of the group with the largest std of rewards; the first one in a tie."""
    spread = batch.reward.sum(1).double().view(-1, group).std(1, correction=0)
    p = int(spread.argmax())
    return slice(p * group, (p + 1) * group)

def chosen(cfg, step, batch):
    """The rows of two of this rank's groups by reason: the widest spread of rewards, and a random
    other group, if there is one."""
    rows = {"spread": widest(batch, cfg.group)}
    others = [at for at in range(0, len(batch.ids), cfg.group) if at != rows["spread"].start]
    if others:
        begin = machine.rng(cfg, "samples", step).choice(others)
        rows["random"] = slice(begin, begin + cfg.group)
    return rows

@torch.no_grad()
def as_it_is_now(policy, ids, mask, temperature):
    """log pi of each sampled token and the entropy at its position, in nats, under the policy after
    the update: for each, a list per row. Computes one row at a time, PART logits at a time."""
    logps, entropies = [], []
    for row, on, T in zip(ids, mask, batches.row_lengths(mask).tolist()):
        with torch.compiler.set_stance("force_eager"):      # a single row would be compiled again
            h = policy(row[None, :T - 1])[0]                                                # (T, C)
        h, tokens = h[on[1:T]], send(row[:T][on[:T]], h.device)                     # (n, C), (n,)
        logp, entropy = [], []
        size = max(1, PART // policy.cfg.vocab_size)
        for part, token in zip(h.split(size), tokens.split(size)):
            logits = policy.head(part / temperature).log_softmax(-1)                        # (n, V)
            logp += rounded(logits.gather(-1, token[:, None])[:, 0])
            entropy += rounded(-(logits.exp() * logits).sum(-1))
        logps.append(logp)
        entropies.append(entropy)
    return logps, entropies

def rounded(x):
    """The numbers of a tensor (n,), to four decimals."""
    return [round(value, 4) for value in x.tolist()]

def records(agent, step, batch):
    """The records of samples.jsonl for two groups of a rollout that is on the host, a dict each. An
    inner list has an entry per token; `ends` are indices, from 0, of tokens that end a step."""
    cfg, found = agent.cfg, []
    for which, rows in chosen(cfg, step, batch).items():
        ids, mask = batch.ids[rows], batch.mask[rows]
        new_logp, entropy = as_it_is_now(agent.policy, ids, mask, cfg.temperature)

        def of_tokens(x, where=mask):
            """For each row the numbers at its sampled tokens, or at those in `where`."""
            return None if x is None else [rounded(row[on]) for row, on in zip(x[rows], where)]
        found.append({
            "step": step, "which": which, "prompt": batch.problems[rows.start].prompt,
            "completions": batch.texts[rows], "finished": batch.finished[rows].tolist(),
            "rewards": rounded(batch.reward[rows].sum(1)),
            "parts": {name: rounded(x[rows]) for name, x in batch.components.items()},
            "tokens": [pieces(agent.encoding, row[on].tolist()) for row, on in zip(ids, mask)],
            "advantages": of_tokens(batch.adv), "logp": of_tokens(batch.logp),
            "new_logp": new_logp, "ref_logp": of_tokens(batch.ref_logp), "entropy": entropy,
            "ends": [end[on].nonzero()[:, 0].tolist() for end, on in zip(batch.ends[rows], mask)],
            "step_rewards": of_tokens(batch.reward, batch.ends[rows])})
    return found
