"""Hints (BREAD, arXiv 2506.17211; GHPO, 2507.10628): a group without a right completion is sampled
anew behind the beginning of a right demonstration, SHARE of it at first, nothing in the end."""
import torch
import grpo
from data import require, rewards_of, turns
from grpo import collect as unaided
from run import dist, passes

SETTINGS = dict(kl="none")
SHARE, TRIES = 0.5, 50

def collect(agent, problems, rng):
    require(agent.task, "demonstration", "--algo hints shows its beginning")
    batch, G = unaided(agent, problems, rng), agent.cfg.group
    u = dist.uniform_here(rng, len(problems), G, agent.cfg.max_new)
    dead = (batch.components["correct"].view(-1, G).amax(1) == 0).nonzero()[:, 0].tolist()
    if not dead:
        return batch
    hinted = [problems[p] for p in dead]
    begun = [hint(agent, problem) for problem in hinted]
    u = u.view(len(problems), G, -1)[dead].flatten(0, 1)
    aided = grpo.generate(agent, hinted, G, u=u, begun=begun)
    rows = torch.arange(len(batch.ids)).view(-1, G)
    rows[dead] = len(batch.ids) + torch.arange(len(aided.ids)).view(-1, G)
    return passes.joined([batch, aided], rows.flatten())

def hint(agent, problem):
    rng = dist.rng(agent.cfg, f"hint {problem.prompt}", agent.step)
    shown = [turns.demonstration(agent.task, problem, rng) for _ in range(TRIES)]
    rewards = rewards_of(agent.task, [problem] * TRIES, shown, [1] * TRIES, [True] * TRIES)
    text = next((x for x, reward in zip(shown, rewards) if reward["correct"] == 1), "")
    ids = agent.encoding.encode_demonstration(text if isinstance(text, str) else text[0])
    share = SHARE * (1 - (agent.step - 1) / agent.cfg.total_steps)
    ids = ids[:min(int(share * len(ids)), agent.cfg.max_new - 1)]
    return ids, [True] * len(ids)

grpo.collect = collect
