"""How a run begins: its problems and checks, its models, its warm start."""
import copy
import hashlib
import random
import shutil
from contextlib import chdir
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import model
from data import (UserError, answer_of, call, check_steps, load_task, need, of, require,
                  rewards_of, shown, steps_of, turns)
from model import ScalarHead
from run import checkpoint, config, dist, passes, pretrained, report
from run.device import compile_all
from run.pretrained import frozen
from run.terminal import print0

def begin(cfg, task, saved):
    """Prepares a new run, or one resumed from a Checkpoint: what `train` needs."""
    cfg = replace(cfg, out=str(cfg.folder.resolve()))  # wherever a task's code may go
    dist.start(cfg)
    task = task or load_task(cfg.task)
    has_model = bool(saved and saved.model)
    problems, held_out = to_train_on(cfg, task)
    which = fingerprint(cfg, problems, held_out)
    if saved or cfg.init:
        checkpoint.compare(cfg.folder if saved else cfg.init, which)
    held_out = held_out[:cfg.held_out or None]
    encoding = pretrained.encoding_of(cfg, cfg.folder if has_model else cfg.init)
    with chdir("."):        # and back, if a reward changed it
        check_run(cfg, task, problems)
    empty = pretrained.of_config(saved.model) if has_model else (
        cfg.init and pretrained.without_memory(cfg.init))
    longest = longest_of(encoding, problems + held_out, cfg, empty)
    if has_model:
        policy = pretrained.model_of(saved.model, cfg, longest)
    elif cfg.init:
        print0(f"starting from {cfg.init}")
        policy = pretrained.load_model(cfg.init, cfg, encoding, longest)
    else:
        policy = pretrained.new_model(cfg, encoding, longest)
    cfg = replace(cfg, micro_tokens=pretrained.micro_tokens(policy, cfg, longest))
    dist.wait_for_all()  # all have read what is in the folder
    if dist.rank() == 0:
        checkpoint.open_run(cfg, saved, which)
    if cfg.warm_steps and not has_model:
        print0(f"the warm start comes first, then {cfg.total_steps} steps of RL")
        warm_start(policy, task, problems, cfg, encoding)
    report.header(cfg, encoding, policy, problems, held_out)
    return cfg, task, encoding, policy, problems, held_out

# ---------------------------------------------------------- problems and checks

def problems_of(cfg, task):
    """A task's training and held-out problems; UserError if there are none held out."""
    found = config.problems_of(task, cfg)
    need(isinstance(found, list | tuple) and [hasattr(x, "__iter__") for x in found] == [True] * 2,
         "problems", "return two lists, of training and of held-out problems", found)
    train, held_out = map(list, found)
    for problem in train + held_out:
        need(isinstance(getattr(problem, "prompt", None), str), "a problem",
             "be an object with a text as its `prompt`", problem)
    if not held_out:
        raise UserError("the task has no held-out problems to evaluate on")
    return train, held_out

def to_train_on(cfg, task):
    """`problems_of` a run, of both kinds; prints a note if they overlap."""
    train, held_out = problems_of(cfg, task)
    if not train:
        empty = [f", without --{name}" for name, x in cfg.task_args.items() if x == ""]
        raise UserError(f"the task has no training problems{''.join(empty)}")
    train = [copy.copy(p) for p in train]  # groups go by objects
    same = shown if hasattr(task, "reply") else attrgetter("prompt")    # a game hides the rest
    known = {*map(same, train)}
    if n := sum(same(p) in known for p in held_out):
        print0(f"note: {n} of {len(held_out)} held-out problems are also training problems")
    return train, held_out

def fingerprint(cfg, train, held_out):
    """SHA-256 of the problems, by task and settings; UserError if the ranks differ."""
    parts = [[(p.prompt, getattr(p, "__dict__", p)) for p in part] for part in (train, held_out)]
    found = hashlib.sha256(shown(parts).encode()).hexdigest()
    if {*dist.gather(found)} != {found}:
        raise UserError("the ranks have different problems: seed what draws or shuffles them")
    return {f"problems of {Path(cfg.task).stem} {cfg.task_args}": found}

def held_out(agent):
    train, found = problems_of(agent.cfg, agent.task)
    checkpoint.compare(agent.cfg.init, fingerprint(agent.cfg, train, found))
    found = found[:agent.cfg.held_out or None]
    longest_of(agent.encoding, found, agent.cfg, agent.policy)
    return found

def longest_of(encoding, problems, cfg, model):
    """The number of tokens of the longest prompt, which must fit the context of a model."""
    n, prompt = max((len(encoding.encode_prompt(p.prompt)), p.prompt) for p in problems)
    if model and n + cfg.max_new > model.cfg.block_size:
        raise UserError(f"a prompt of {n} tokens, {prompt[:80]!r}, and --max_new {cfg.max_new} do "
                        f"not fit the model's context of {model.cfg.block_size}: see \"A prompt is "
                        f"too long\" in docs/troubleshooting.md")
    return n

def check_run(cfg, task, problems):
    """UserError for what would end a run late."""
    config.check_used(cfg, task)
    if cfg.warm_steps:
        require(task, "demonstration", "the warm start imitates it; or begin with --init FOLDER")
    ranks = dist.ranks()
    if cfg.prompts > len(problems):
        raise UserError(f"--prompts {cfg.prompts}: the task has only {len(problems)} problems")
    compares = cfg.baseline not in ("none", "value") or cfg.adv_scale == "group"
    if cfg.group == 1 and compares:
        raise UserError("--group 1: a completion is compared with others of its prompt, unless "
                        "--baseline is none or value and --adv_scale none or batch")
    if cfg.prompts % ranks:
        raise UserError(f"--prompts {cfg.prompts} is not divisible by {ranks} ranks")
    if cfg.reward != "rule" and len(problems) < 10 * ranks:
        raise UserError(f"a learned reward needs {10 * ranks} problems, not {len(problems)}")
    if cfg.reward == "rollouts" and cfg.supervision == "outcome":
        raise UserError("--reward rollouts labels steps: it needs --supervision process")
    if cfg.reward != "rule" and (cfg.beta < 0.2 or not cfg.applies_kl):
        print0("note: with so small a KL a learned reward is soon exploited: try --beta 1, or 0.2 "
               "for steps")
    problem, replies = problems[0], hasattr(task, "reply")
    nothing, something = ([""], ["12"]) if replies else ("", "12")
    answer_of(task, nothing)
    if replies:
        turns.checked_reply(task.reply, problem, nothing)
    if cfg.warm_steps:
        something = turns.demonstration(task, problem, random.Random(0))
    rewards_of(task, [problem] * 2, [nothing, something], [1, 1], [True, True])
    if cfg.supervision == "process":
        require(task, "steps", "--supervision process rewards steps")
        for said in something, nothing:
            found = steps_of(task, problem, said)
            check_steps(problem, turns.spoken(said), found, least=0 if replies else 1)
    out = cfg.folder.resolve()
    if cfg.init and Path(cfg.init).resolve() in (out, out / "best"):
        raise UserError(f"--init is in --out: the model in {cfg.init} would be overwritten")

# ------------------------------------------------------------------- the models

def add_models(agent):
    """The copies of the policy that a run needs."""
    cfg, policy = agent.cfg, agent.policy
    width = policy.cfg.n_embd
    if cfg.needs_reference:
        agent.ref = frozen(policy)
    if cfg.baseline in ("value", "group+value"):        # the head starts at 0, so values do
        trunk = copy.deepcopy(policy) if cfg.critic == "separate" else None
        agent.critic = ScalarHead(width, trunk).to(policy.device)
    if cfg.reward != "rule":
        std = (width + 1) ** -0.5  # scores of variance 1
        generator = dist.generator(cfg, "scorer")
        scorer = ScalarHead(width, copy.deepcopy(policy), std, generator)
        agent.reward_model = scorer.to(policy.device)
    if policy.amp:
        agent.sampler = frozen(policy)

def make_ready(agent, saved):
    """The models as before the first step, or as in a Checkpoint; compiled if asked."""
    kept = {*checkpoint.named_parameters(agent).values()}
    for group in agent.opt.param_groups:
        group.setdefault("initial_lr", group["lr"])
        if not kept.issuperset(group["params"]):
            raise UserError("the optimizer has a parameter that is in no model of the agent, so "
                            "that no checkpoint would keep it")
    if saved and saved.model:
        checkpoint.restore(agent, saved)
    dist.sync_sampler(agent)
    models = {agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model} - {None}
    for module in models:
        module.eval()
    compile_all(agent.cfg, *models)

def trained_model(cfg):
    """The task, the tokenizer and the model in --init or --out."""
    dist.start(cfg)
    where = cfg.init or cfg.folder
    encoding = pretrained.encoding_of(cfg, where)
    return load_task(cfg.task), encoding, pretrained.load_model(where, cfg, encoding)

def ask(agent, question, sample):
    """A question, as the task sends it, and its greedy completion, as text."""
    task, episodes = agent.task, None
    if hasattr(task, "prompt"):
        question = call(task.prompt, "the function prompt", question)
    ids = agent.encoding.encode_prompt(question)
    if hasattr(task, "reply"):
        known = {p.prompt: p for p in chain(*problems_of(agent.cfg, task))}
        problem = known.get(question, SimpleNamespace(prompt=question))
        episodes = turns.Episodes(task.reply, agent.encoding, agent.cfg.max_turns, [problem],
                                  [len(ids)])
    room = min(agent.cfg.max_new, agent.policy.cfg.block_size - len(ids))
    batch = sample(agent.sampler, [ids], 1, [max(1, room)], agent.cfg.temperature,
                   agent.encoding.stop, reply=episodes)
    batch.texts = turns.texts(agent.encoding, batch, episodes)
    return question + "\n" * bool(agent.encoding.frame.after) + report.completion_of(batch)

# --------------------------------------------------------------- the warm start

WARM_BATCH = 48  # demonstrations per optimizer step

def warm_start(policy, task, problems, cfg, encoding):
    """Fine-tunes a model on fresh demonstrations, and keeps it in the run's folder, for --init."""
    def losses(step):
        rng = dist.rng(cfg, "warm start", step)
        drawn = rng.choices(problems, k=WARM_BATCH)
        rows = [checked_row(p, task, encoding, cfg, rng) for p in drawn]
        tokens = sum(len(said) for parts in rows for said in parts[1::2])  # over all ranks
        ids, mask = ids_and_mask(dist.of_rank(rows))
        for micro, T in passes.split_rows(ids, mask, cfg.micro_tokens):
            said, on = ids[micro, :T], mask[micro, :T]
            logp, _ = model.token_logps(policy, said, on, 1.0, None, passes.layout_of)
            yield -logp.sum() / tokens
    for problem in problems:  # before the time of a fit is spent
        checked_row(problem, task, encoding, cfg, random.Random(0))
    passes.supervised_fit("warm start", policy, losses, cfg.warm_steps, cfg.warm_lr)

    if dist.rank() == 0:
        where = cfg.folder / "warm_start"
        shutil.rmtree(where, ignore_errors=True)    # it may hold files of another model
        pretrained.save(policy, where, encoding.files)

def checked_row(problem, task, encoding, cfg, rng):
    """The `row` of a problem, whose demonstration must be no longer than a completion."""
    parts = row(problem, task, encoding, rng)
    for name, n, what in (("max_new", sum(map(len, parts[1:])), "tokens"),
                          ("max_turns", len(parts[1::2]), "turns")):
        if n > getattr(cfg, name):
            raise UserError(f"the demonstration of {of(problem)} has {n} {what}, more than "
                            f"--{name} {getattr(cfg, name)}")
    return parts

def row(problem, task, encoding, rng):
    """The ids of a prompt and of each turn and reply of a demonstration."""
    shown = turns.demonstration(task, problem, rng)
    parts = [encoding.encode_prompt(problem.prompt)]
    for i, text in enumerate([shown] if isinstance(shown, str) else shown):
        parts.append(encoding.encode_reply(text) if i % 2 else encoding.encode_demonstration(text))
    return tuple(parts)

def ids_and_mask(rows):
    """The rows as ids and mask, (B, T). Of a row's parts every second one is imitated."""
    ids = [sum(parts, []) for parts in rows]
    mask = [[i % 2 == 1 for i, part in enumerate(parts) for _ in part] for parts in rows]
    T = max(map(len, ids))
    return passes.padded(ids, 1, T), passes.padded(mask, 1, T).bool()
