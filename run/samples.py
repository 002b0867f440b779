"""Groups of a rollout to look at: which ones, and what is written down of each."""
import torch

from data.tokenizer import pieces
from run import batches, machine

PART = 2 ** 24      # most logits at a time for the entropy, 64 MiB in float32

def widest(batch, group):
    """The rows of the group whose rewards spread most, by their std; of equal ones the first."""
    spread = batch.reward.sum(1).cpu().double().view(-1, group).std(1, correction=0)
    p = int(spread.argmax())
    return slice(p * group, (p + 1) * group)

def chosen(cfg, step, batch):
    """Two groups of this rank, as rows by the reason: the one of the widest spread, and another one
    at random, if there is another."""
    rows = {"spread": widest(batch, cfg.group)}
    others = [at for at in range(0, len(batch.ids), cfg.group) if at != rows["spread"].start]
    if others:
        begin = machine.rng(cfg, "samples", step).choice(others)
        rows["random"] = slice(begin, begin + cfg.group)
    return rows

@torch.no_grad()
def as_it_is_now(policy, ids, mask, temperature):
    """log pi of the sampled tokens, and the entropy of the distribution that each is from, in nats:
    two lists for each row, under the policy after its update. One row at a time, PART logits at a
    time."""
    logps, entropies = [], []
    for row, on, T in zip(ids, mask, batches.row_lengths(mask).tolist()):
        with torch.compiler.set_stance("force_eager"):      # a row alone would be compiled anew
            h = policy(row[None, :T - 1])[0]                                                # (T, C)
        h, tokens = h[on[1:T]], row[:T][on[:T]]                                     # (n, C), (n,)
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
    """The numbers of a tensor (n,), to four digits."""
    return [round(value, 4) for value in x.tolist()]

def records(agent, step, batch):
    """What samples.jsonl says of two groups of a rollout after its update, a dict for each. A list
    in a list is of a row's tokens; `ends` are those, counted from 0, where its steps end."""
    cfg, found = agent.cfg, []
    for which, rows in chosen(cfg, step, batch).items():
        ids, mask = batch.ids[rows], batch.mask[rows]
        new_logp, entropy = as_it_is_now(agent.policy, ids, mask, cfg.temperature)

        def of_tokens(x, where=mask):
            """The numbers of the sampled tokens of each row, or of some of them."""
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
