"""VinePPO (arXiv 2410.01679): the advantage of a step is the value after it minus the one before.
The value is the share of TRIES completions from there that are right; at first, of the group."""
import torch
import grpo
from data import UserError
from grpo import rollout as of_steps
from reward import rollout_labels
from run.passes import last_tokens

SETTINGS = dict(kl="none", supervision="process", loss_mean="token")
FIXED = ["supervision", "reward", "baseline", "adv_scale"]
TRIES = 4

def rollout(agent, problems, rng):
    if agent.cfg.kl == "reward":
        raise UserError("--algo vineppo does not take --kl reward")
    batch, stats = of_steps(agent, problems, rng)
    G, right = agent.cfg.group, batch.components["correct"]
    stream = f"vineppo {agent.step}"
    value = rollout_labels(agent, grpo.generate, batch, stream, TRIES)
    value = torch.where(last_tokens(batch.mask), right[:, None], value).cpu()
    adv = torch.zeros_like(value)
    before = right.view(-1, G).mean(1).repeat_interleave(G).tolist()
    for i, (ends, begin) in enumerate(zip(batch.ends.cpu(), batch.start.tolist())):
        for end in ends.nonzero()[:, 0].tolist():
            adv[i, begin:end + 1] = value[i, end] - before[i]
            begin, before[i] = end + 1, value[i, end]
    batch.adv = grpo.whiten(adv.to(right.device) * batch.mask, batch.mask)
    return batch, stats

grpo.rollout = rollout
