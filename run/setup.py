"""All models of a run, and how a run begins."""
import copy
from dataclasses import dataclass, field, replace

import torch

from model import GPT
from run import checkpoint, dist, preflight, pretrained, show, warm_start
from run.pretrained import ScalarHead, frozen

@dataclass
class Agent:
    """All state of a run; ref, critic, reward_model and sampler are None if they are not needed."""
    cfg: object
    task: object
    encoding: object
    policy: GPT
    ref: GPT = None                     # the reference, frozen
    critic: ScalarHead = None           # the value of a state
    reward_model: ScalarHead = None
    sampler: GPT = None                 # a copy to sample from, in bfloat16 or unsharded
    opt: torch.optim.Optimizer = None   # for policy and critic
    beta: float = 0.0                   # KL coefficient, adapted under --target_kl
    history: dict = field(default_factory=dict)     # labelled rows of all reward-model fits

def new_agent(cfg, task, encoding, policy, saved=None):
    """All models, as before the first step or as in the Checkpoint `saved`."""
    agent, C = Agent(cfg, task, encoding, policy, beta=cfg.beta), policy.cfg.n_embd
    if cfg.needs_reference:
        agent.ref = dist.shard_module(cfg, frozen(policy))
    if cfg.baseline in ("value", "group+value"):        # the head starts at 0, so values do
        trunk = copy.deepcopy(policy) if cfg.critic == "separate" else None
        agent.critic = dist.shard_module(cfg, ScalarHead(C, trunk).to(policy.device))
    if cfg.reward == "model":
        scorer = ScalarHead(C, copy.deepcopy(policy), std=(C + 1) ** -0.5,
                            generator=dist.generator(cfg, "scorer"))
        agent.reward_model = dist.shard_module(cfg, scorer.to(policy.device))
    if policy.amp or dist.is_on(cfg):
        agent.sampler = frozen(policy)
    dist.shard_module(cfg, policy)
    eps = 1e-8 if agent.critic is None else 1e-5    # as in the original PPO code and CleanRL
    agent.opt = warm_start.new_optimizer([policy, agent.critic], cfg.lr, eps)
    if saved and saved.model:
        checkpoint.restore(agent, saved)
    dist.refresh(agent)
    everything = [policy, agent.ref, agent.critic, agent.reward_model, agent.sampler]
    for module in filter(None, everything):
        module.eval()
    dist.compile_all(cfg, *everything)
    return agent

def train_mode(agent, on):
    """Switches policy and critic to training mode or, with on=False, to evaluation mode."""
    for module in filter(None, (agent.policy, agent.critic)):
        module.train(on)

def begin(cfg, task, saved):
    """Prepares a new run, or a resumed one from the Checkpoint `saved`; returns the Config, the
    tokenizer, the policy, and the training and held-out problems."""
    checkpoint.claim(cfg, saved)
    if saved and saved.step == cfg.steps * cfg.iterations and not saved.stats:
        show.print0(f"the run in {cfg.folder} is complete; a larger --steps continues it")
    problems, held_out = preflight.problems_of(cfg, task)
    if not (saved and saved.model):
        cfg = warm_start.checked(cfg, task, problems)
    encoding = pretrained.encoding_of(cfg, cfg.folder if saved and saved.model else cfg.init)
    preflight.check_run(cfg, task, problems)
    longest = max(len(encoding.encode_prompt(p.prompt)) for p in problems + held_out)
    if saved and saved.model:
        policy, cold = pretrained.model_of(saved.model, cfg, longest), False
    else:
        policy, cold = warm_start.starting_model(cfg, task, problems, longest, encoding)
    cfg = replace(cfg, micro_tokens=preflight.micro_tokens(policy, cfg, longest))
    show.print0(preflight.costs(policy, cfg, longest))
    dist.wait_for_all()
    if dist.world()[0] == 0:
        checkpoint.open_run(cfg, saved)
    if cold:
        show.print0(f"the warm start comes first, then {cfg.steps * cfg.iterations} steps of RL")
        warm_start.warm_start(policy, task, problems, cfg, encoding)
    return cfg, encoding, policy, problems, held_out
