"""Rollouts by the policy of K steps ago, as where sampling and training go on at the same time
(arXiv 2410.18252; AReaL, 2505.24298). The ratio is to the policy that sampled."""
import torch
import grpo
from grpo import collect as by_sampler

SETTINGS = dict(kl="none")
K = 2

def collect(agent, problems, rng):
    weights, step = dict(agent.sampler.named_parameters()), agent.step
    agent.state |= {f"{name}@{step}": p.detach().clone() for name, p in weights.items()}
    for name in [name for name in agent.state if name.endswith(f"@{step - K - 1}")]:
        del agent.state[name]
    oldest = min(int(name.split("@")[1]) for name in agent.state)
    for name, p in weights.items():
        p.data.copy_(agent.state[f"{name}@{oldest}"])
    batch = by_sampler(agent, problems, rng)
    for name, p in weights.items():
        p.data.copy_(agent.state[f"{name}@{step}"])
    batch.on_policy = torch.zeros_like(batch.finished)
    return batch

grpo.collect = collect
