"""Replay of successes (after RLEP, arXiv 2507.07451): in a group without a right completion the
last one is replaced by the latest right one of that prompt, if there was one in an earlier step."""
import torch
import grpo
from data import UserError
from grpo import collect as present
from reward import by_rule
from run import dist, passes

SETTINGS = dict(kl="none")
FIELDS = ("ids", "mask", "finished", "logp", "start")

def collect(agent, problems, rng):
    if hasattr(agent.task, "reply"):
        raise UserError("--algo replay takes no task with several turns")
    batch, G = present(agent, problems, rng), agent.cfg.group
    n, device = len(batch.ids), batch.ids.device
    right = batch.components["correct"].view(-1, G).cpu()
    now = {name: getattr(batch, name).cpu() for name in FIELDS}
    place = {prompt: i for i, prompt in enumerate(prompts(agent.state))}
    rows, used, owners = torch.arange(n), [], []
    for first, prompt in zip(range(0, n, G), prompts(now)[::G]):
        if right[first // G].amax() < 1 and prompt in place:
            rows[first + G - 1] = n + len(used)
            used.append(place[prompt])
            owners.append(batch.problems[first])
    if used:
        old = grpo.Batch(**{name: x[used].to(device) for name, x in agent.state.items()})
        old.problems = owners
        old.texts, old.components = by_rule(agent, old)
        batch = passes.joined([batch, old], rows)
    batch.on_policy = (rows < n).to(device)
    best = (right.argmax(1) + torch.arange(0, n, G))[right.amax(1) == 1]
    found = dist.gather(passes.take(now, best))
    every = passes.join([part for part in (agent.state, *found) if part])
    latest = {prompt: i for i, prompt in enumerate(prompts(every))}
    agent.state |= {name: x[[*latest.values()]] for name, x in every.items()}
    return batch

def prompts(rows):
    """The prompt of each row, as a tuple."""
    pairs = zip(rows["ids"].tolist(), rows["start"].tolist()) if rows else []
    return [tuple(ids[:start]) for ids, start in pairs]

grpo.collect = collect
