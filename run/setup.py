"""All models of a run, and how a run begins."""
import copy
from dataclasses import dataclass, field, replace

import torch

from model import GPT
from run import checkpoint, dist, preflight, pretrained, show, warm_start
from run.pretrained import ScalarHead, frozen

@dataclass
class Agent:
    """All state of a run; ref, critic and reward_model are None if they are not needed."""
    cfg: object
    task: object
    encoding: object
    policy: GPT
    ref: GPT = None                     # the reference, frozen
    critic: ScalarHead = None           # the value of a state
    reward_model: ScalarHead = None
    sampler: GPT = None                 # the policy, or a copy in bfloat16 or unsharded
    opt: torch.optim.Optimizer = None   # for policy and critic
    beta: float = 0.0                   # KL coefficient, adapted under --target_kl
    history: dict = field(default_factory=dict)     # labelled rows of all reward-model fits

    def __post_init__(self):
        self.sampler = self.sampler or self.policy

def new_agent(cfg, task, encoding, policy, saved=None):
    """All models, as before the first step or as in the Checkpoint `saved`. With --shard each copy
    of the policy is sharded once it is made, and the policy when all are made."""
    agent = Agent(cfg, task, encoding, policy, beta=cfg.beta)
    width, device = policy.cfg.n_embd, policy.device
    if cfg.needs_reference:
        agent.ref = dist.shard_module(cfg, frozen(policy))
    if cfg.baseline in ("value", "group+value"):        # the head starts at 0, so values do
        trunk = copy.deepcopy(policy) if cfg.critic == "separate" else None
        agent.critic = dist.shard_module(cfg, ScalarHead(width, trunk).to(device))
    if cfg.reward == "model":
        std = (width + 1) ** -0.5                       # scores of variance 1
        generator = dist.generator(cfg, "scorer")
        scorer = ScalarHead(width, copy.deepcopy(policy), std, generator)
        agent.reward_model = dist.shard_module(cfg, scorer.to(device))
    models = [policy, agent.ref, agent.critic, agent.reward_model]
    if policy.amp or dist.is_sharding(cfg):
        agent.sampler = frozen(policy)
        models.append(agent.sampler)
    dist.shard_module(cfg, policy)

    eps = 1e-8 if agent.critic is None else 1e-5    # as in the original PPO code and CleanRL
    agent.opt = warm_start.new_optimizer([policy, agent.critic], cfg.lr, eps)
    if saved and saved.model:
        checkpoint.restore(agent, saved)
    dist.sync_sampler(agent)
    models = [model for model in models if model is not None]
    for model in models:
        model.eval()
    dist.compile_all(cfg, *models)
    return agent

def train_mode(agent, on):
    """Switches policy and critic to training mode or, with on=False, to evaluation mode."""
    agent.policy.train(on)
    if agent.critic is not None:
        agent.critic.train(on)

def begin(cfg, task, saved):
    """Prepares a new run, or a resumed one from the Checkpoint `saved`; returns the Config, the
    tokenizer, the policy, and the training and held-out problems."""
    checkpoint.claim(cfg, saved)
    has_model = bool(saved and saved.model)
    total = cfg.steps * cfg.iterations
    if has_model and saved.step == total and not saved.stats:
        show.print0(f"the run in {cfg.folder} is complete; a larger --steps continues it")

    problems, held_out = preflight.problems_of(cfg, task)
    if has_model:
        encoding = pretrained.encoding_of(cfg, cfg.folder)
    else:
        cfg = warm_start.checked(cfg, task, problems)
        encoding = pretrained.encoding_of(cfg, cfg.init)
    preflight.check_run(cfg, task, problems, held_out)
    longest = max(len(encoding.encode_prompt(p.prompt)) for p in problems + held_out)

    cold = False                        # whether it still needs a warm start
    if has_model:
        policy = pretrained.model_of(saved.model, cfg, longest)
    else:
        policy, cold = warm_start.starting_model(cfg, task, problems, longest, encoding)
    cfg = replace(cfg, micro_tokens=preflight.micro_tokens(policy, cfg, longest))
    show.print0(preflight.costs(policy, cfg, longest))
    if own := [*pretrained.own_parameters(policy)]:
        show.print0(f"note: other programs will ignore {own[0]} in the saved model, and "
                    f"{len(own) - 1} more: a {policy.hf['model_type']} has no such parameters")

    dist.wait_for_all()                 # all have read what is in the folder
    if dist.rank() == 0:
        checkpoint.open_run(cfg, saved)
    if cold:
        show.print0(f"the warm start comes first, then {total} steps of RL")
        warm_start.warm_start(policy, task, problems, cfg, encoding)
    return cfg, encoding, policy, problems, held_out
