"""Adds a row to each group that the policy did not sample: a demonstration of the task (as in
LUFFY, arXiv 2504.14945, here with PPO's clip). For rows of your own replace `shown`."""
import torch
import grpo
from data import require, turns
from grpo import collect as sampled
from run import dist, passes, setup

SETTINGS = dict(kl="none")

def shown(agent, problem):
    rng = dist.rng(agent.cfg, f"demonstration {problem.prompt}", agent.step)
    return turns.demonstration(agent.task, problem, rng)

def collect(agent, problems, rng):
    require(agent.task, "demonstration", "--algo demonstrations adds it to each group")
    batch = sampled(agent, problems, rng)
    said = [agent.encoding.encode_demonstration(shown(agent, problem)) for problem in problems]
    rows = torch.arange(len(batch.ids) + len(said))
    return passes.joined([batch, given(agent, problems, said)], rows)

def given(agent, problems, said):
    """Rows that the policy did not sample, judged by the rule: of each problem a completion, as
    ids. Their logp is the present policy's, unless you put their author's there."""
    prompts = [agent.encoding.encode_prompt(p.prompt) for p in problems]
    ids, mask = setup.ids_and_mask(list(zip(prompts, said)))
    ids = ids.to(agent.policy.device)
    mask = mask.to(ids.device)
    ends = [row[-1] in agent.encoding.stop for row in said]
    finished = torch.tensor(ends, device=ids.device)
    logp = torch.zeros_like(mask, dtype=torch.float32)
    batch = grpo.Batch(ids, mask, finished, logp, start=mask.int().argmax(1))
    batch.on_policy = torch.zeros_like(finished)
    batch.logp, _ = grpo.logps(agent.sampler, batch, agent.cfg)
    batch.problems = [*problems]
    batch.texts, batch.components = grpo.reward.by_rule(agent, batch)
    return batch

grpo.collect = collect
