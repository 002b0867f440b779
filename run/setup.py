"""All models of a run, and how a run begins."""
import copy
from dataclasses import replace
from itertools import chain

from data import call, load_task
from data.turns import Episodes
from model import ScalarHead
from run import checkpoint, dist, preflight, pretrained, show, warm_start
from run.pretrained import frozen

def add_models(agent):
    """The copies of the policy that a run needs: reference, critic, reward model, and one to sample
    from. With --shard each is sharded once it is made, and the policy when all are made."""
    cfg, policy = agent.cfg, agent.policy
    width = policy.cfg.n_embd
    if cfg.needs_reference:
        agent.ref = dist.shard_module(cfg, frozen(policy))
    if cfg.baseline in ("value", "group+value"):        # the head starts at 0, so values do
        trunk = copy.deepcopy(policy) if cfg.critic == "separate" else None
        critic = ScalarHead(width, trunk).to(policy.device)
        agent.critic = dist.shard_module(cfg, critic)
    if cfg.reward != "rule":
        std = (width + 1) ** -0.5                       # scores of variance 1
        generator = dist.generator(cfg, "scorer")
        scorer = ScalarHead(width, copy.deepcopy(policy), std, generator).to(policy.device)
        agent.reward_model = dist.shard_module(cfg, scorer)
    if policy.amp or dist.is_sharding(cfg):
        agent.sampler = frozen(policy)
    dist.shard_module(cfg, policy)

def make_ready(agent, saved):
    """The models as before the first step, or as in the Checkpoint `saved`; compiled, if asked."""
    if saved and saved.model:
        checkpoint.restore(agent, saved)
    dist.sync_sampler(agent)
    models = {agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model} - {None}
    for module in models:
        module.eval()
    dist.compile_all(agent.cfg, *models)

def begin(cfg, task, saved):
    """Prepares a new run, or a resumed one from the Checkpoint `saved`; returns the Config, the
    task, the tokenizer, the policy, and the training and held-out problems."""
    dist.start(cfg)
    task = task or load_task(cfg.task)
    has_model = bool(saved and saved.model)
    if has_model and saved.step == cfg.total_steps and not saved.stats:
        more = "; a larger --steps continues it" if cfg.iterations == 1 else ""
        show.print0(f"the run in {cfg.folder} is complete{more}")

    problems, held_out = preflight.to_train_on(cfg, task)
    if has_model:
        encoding = pretrained.encoding_of(cfg, cfg.folder)
    else:
        cfg = warm_start.checked(cfg, task, problems)
        encoding = pretrained.encoding_of(cfg, cfg.init)
    preflight.check_run(cfg, task, problems)
    longest = preflight.longest_of(encoding, problems + held_out)

    cold = False                        # whether it still needs a warm start
    if has_model:
        policy = pretrained.model_of(saved.model, cfg, longest)
    else:
        policy, cold = warm_start.starting_model(cfg, task, problems, longest, encoding)
    cfg = replace(cfg, micro_tokens=preflight.micro_tokens(policy, cfg, longest))
    show.print0(preflight.costs(policy, cfg, longest))
    dist.wait_for_all()                 # all have read what is in the folder
    if dist.rank() == 0:
        checkpoint.open_run(cfg, saved)
    if cold:
        show.print0(f"the warm start comes first, then {cfg.total_steps} steps of RL")
        warm_start.warm_start(policy, task, problems, cfg, encoding)
    show.header(cfg, encoding, policy, problems, held_out)
    return cfg, task, encoding, policy, problems, held_out

def shipped(cfg):
    """cfg, with the shipped warm start as --init if it serves as cfg's own."""
    return warm_start.shipped(cfg)

def trained_model(cfg):
    """The task, the tokenizer and the model in --init or --out."""
    dist.start(cfg)
    return load_task(cfg.task), *pretrained.trained_model(cfg)

def asked(agent, question):
    """The ids of the prompt for a question, and its Episodes: with the environment of the problem
    of which it is the prompt, or with the person at the keyboard; None if the task has no replies.
    A task that adds instructions to its questions does so in its function `prompt`."""
    task = agent.task
    if hasattr(task, "prompt"):
        question = call(task.prompt, "the function prompt", question)
    ids = agent.encoding.encode_prompt(question)
    if not hasattr(task, "reply"):
        return ids, None
    reply, problem = show.typed_reply, None
    for known in chain(*preflight.problems_of(agent.cfg, task)):
        if known.prompt == question:
            reply, problem = task.reply, known
    return ids, Episodes(reply, agent.encoding, agent.cfg.max_turns, [problem], [len(ids)])

def held_out(agent):
    """The held-out problems to evaluate an agent on: a question needs none."""
    return preflight.held_out(agent.cfg, agent.task, agent.encoding, agent.policy)
