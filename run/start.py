"""What a run starts from: a checkpoint's folder, or a new model, warm-started on demonstrations;
and all its models. And whether it can run: what the task has, the sizes, the memory it takes."""
import copy
import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

import data
from data import Fault, check_parts, require
from data.tokenizer import byte_encoding, load_encoding
from model import CHUNK, GPT, GPTConfig, ScalarHead, token_logps
from run import batches, folder, machine, pretrained, shard, show
from run.files import write_whole

# ------------------------------------------------------------------------------------ a run begins

def begin(cfg, task, checkpoint):
    """What a run begins with, new or from a Checkpoint: the Config, the tokenizer, the policy, the
    problems to train on, and those held out."""
    folder.claim(cfg, checkpoint)
    if checkpoint and checkpoint.step == cfg.steps * cfg.iterations and not checkpoint.stats:
        show.print0(f"the run in {cfg.folder} is at its end; --steps can make it longer")
    encoding = encoding_of(cfg, cfg.folder if checkpoint and checkpoint.model else cfg.init)
    problems, held_out = problems_of(cfg, task)
    check(cfg, task, problems, held_out)
    lengths = [len(encoding.encode_prompt(p.prompt)) for p in problems + held_out]
    longest = max(lengths)
    if checkpoint and checkpoint.model:
        policy, cold = model_of(checkpoint.model, cfg, longest), False
    else:
        policy, cold = starting_model(cfg, task, longest, encoding)
    show.print0(costs(policy, cfg, longest, sum(lengths) / len(lengths)))
    machine.wait_for_all()
    if machine.world()[0] == 0:
        folder.open_run(cfg, checkpoint)
    if cold:
        warm_start(policy, task, problems, cfg, encoding)
    return cfg, encoding, policy, problems, held_out

def problems_of(cfg, task):
    """The problems of a task to train on, and those held out; raises Fault if it has them not."""
    found = task.problems(cfg)
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(have_prompts, found)):
        raise Fault("the task's problems(cfg) must be two lists, to train on and held out, of what "
                    "has a prompt, a text")
    train, held_out = found
    return train, held_out[:cfg.held_out or None]

def have_prompts(problems):
    """Whether each of some problems has a prompt."""
    return all(isinstance(getattr(p, "prompt", None), str) for p in problems)

def encoding_of(cfg, where):
    """The tokenizer in a model's folder, which frames prompts too; bytes for a new model."""
    if cfg.init or where and (Path(where) / "tokenizer.json").exists():
        return load_encoding(where, cfg.chat, cfg.system, cfg.thinking)
    if cfg.system or cfg.thinking != "auto":
        raise Fault("--system and --thinking need a chat template, and a new model has none")
    return byte_encoding()

def to_device(model, cfg):
    """The model on its device, with the dtype of its products, as `machine.resolve` has them."""
    device, dtype, _ = machine.resolve(cfg)
    model.amp = torch.bfloat16 if dtype == "bfloat16" else None
    model.recompute = cfg.recompute == "on"
    return model.to(device)

def load_model(where, cfg, encoding, longest=0):
    """The model in a folder, on its device; raises Fault if the tokenizer is not its own, or if a
    run with prompts of up to `longest` tokens would not fit; 0: no run, only answers."""
    model = pretrained.without_memory(where)
    if model.cfg.vocab_size < encoding.n_vocab:
        raise Fault(f"{where}: a vocabulary of {model.cfg.vocab_size}, and the tokenizer has "
                    f"{encoding.n_vocab}")
    if not 0 <= min(encoding.stop) <= max(encoding.stop) < model.cfg.vocab_size:
        raise Fault(f"{where}: eos_token_id {sorted(encoding.stop)} goes beyond the vocabulary of "
                    f"{model.cfg.vocab_size}")
    check_room(model, cfg, longest)
    return to_device(pretrained.read_weights(model, where), cfg)

def trained_model(cfg):
    """The tokenizer and the model of --init, or of the run's own folder, for use."""
    where = cfg.init or cfg.folder
    encoding = encoding_of(cfg, where)
    return encoding, load_model(where, cfg, encoding)

def model_of(config, cfg, longest):
    """A model of a config.json's dict, into which a checkpoint will be loaded."""
    model = pretrained.of_config(config)
    check_room(model, cfg, longest)
    return to_device(pretrained.allocate(model), cfg)

def new_model(cfg, encoding, longest):
    """A new model with random weights, its context a power of two that holds prompts of `longest`
    tokens and their completions."""
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    shape = GPTConfig(encoding.n_vocab, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.n_embd,
                      n_inner=4 * cfg.n_embd, block_size=context)
    with torch.device("meta"):
        check_room(GPT(shape), cfg, longest)
    model = to_device(GPT(shape, machine.generator(cfg, "weights")), cfg)
    pretrained.config_json(model)["eos_token_id"] = encoding.end
    return model

def starting_model(cfg, task, longest, encoding):
    """The policy before RL, and whether it still needs its warm start: the kept one of an earlier
    run, or --init's, or a new one. `longest`: tokens of a prompt."""
    where = cfg.folder / "warm_start"
    note, warm = where / "warm_start.json", cfg.warm_steps > 0 or not cfg.init
    known = warm and note.exists() and note.read_text() == warm_note(cfg, task)
    if warm and note.exists() and not known:
        show.print0(f"{where} was made with other settings or other code; it is made anew")
    if cfg.init or known:
        source = where if known else cfg.init
        show.print0(f"starting from {source}")
        model = load_model(source, cfg, encoding, longest)
        if (dtype := model.hf.get("dtype") or model.hf.get("torch_dtype")) not in (None, "float32"):
            show.print0(f"its weights are {dtype}; they are trained, and saved, in float32")
        return model, warm and not known
    return new_model(cfg, encoding, longest), True

# -------------------------------------------------------------------------------- all the models

@dataclass
class Agent:
    """What a run works with; ref, critic and reward_model are None where they are not needed."""
    cfg: object
    task: object
    encoding: object
    policy: GPT
    ref: GPT = None                     # the reference, frozen
    critic: ScalarHead = None           # the value of a state
    reward_model: ScalarHead = None
    sampler: GPT = None                 # the policy in bfloat16, to sample from
    opt: torch.optim.Optimizer = None
    beta: float = 0.0                   # weight of the KL, which --target_kl steers
    history: dict = field(default_factory=dict)     # labelled rows that the reward model learned

def new_agent(cfg, task, encoding, policy, checkpoint=None):
    """All models, as they are before the first step or in a Checkpoint."""
    agent, C = Agent(cfg, task, encoding, policy, beta=cfg.beta), policy.cfg.n_embd
    dealt = partial(shard.deal, cfg)
    if cfg.needs_reference:
        agent.ref = dealt(policy.frozen())      # stays what the policy is now
    if "value" in cfg.baseline:                 # starts at 0: no opinion
        trunk = copy.deepcopy(policy) if cfg.critic == "separate" else None
        agent.critic = dealt(ScalarHead(C, trunk).to(policy.device))
    if cfg.reward == "model":
        scorer = ScalarHead(C, copy.deepcopy(policy), std=(C + 1) ** -0.5,
                            generator=machine.generator(cfg, "scorer"))
        agent.reward_model = dealt(scorer.to(policy.device))
    agent.sampler = policy.frozen() if policy.amp or shard.shards(cfg) else None
    dealt(policy)
    agent.opt = batches.new_optimizer([policy, agent.critic], cfg.lr, cfg.adam_eps)
    if checkpoint and checkpoint.model:
        folder.restore(agent, checkpoint)
    shard.refresh(agent)
    machine.compile_all(cfg, policy, agent.ref, agent.critic, agent.reward_model, agent.sampler)
    return agent

# ------------------------------------------------------------------------------------ warm start

WARM = ("task", "difficulty", "seed", "init", "chat", "system", "thinking", "max_new", "n_layer",
        "n_head", "n_kv_head", "n_embd", "warm_steps", "warm_batch", "warm_lr", "grad_clip",
        "micro_tokens", "recompute")

def warm_start(model, task, problems, cfg, encoding):
    """Supervised fine-tuning on fresh demonstrations, kept in the run's folder for the next run."""
    device = model.device

    def row(problem, source):
        """The ids of a prompt and of its demonstration."""
        said = encoding.encode_ordinary(task.demonstration(problem, source))
        return encoding.encode_prompt(problem.prompt), said + [encoding.end]

    def losses(step):
        """The terms of one optimizer step, those of this rank's rows."""
        source = machine.rng(cfg, "warm start", step)
        rows = [row(p, source) for p in source.choices(problems, k=cfg.warm_batch)]
        tokens = sum(len(text) for _, text in rows)             # of all ranks
        if (long := max(len(text) for _, text in rows)) > cfg.max_new:
            raise Fault(f"a demonstration of {long} tokens is longer than --max_new {cfg.max_new}")
        rows = machine.deal(rows)
        ids = padded([prompt + text for prompt, text in rows], device)
        mask = padded([[False] * len(prompt) + [True] * len(text) for prompt, text in rows], device)
        for micro, T in batches.micro_batches(ids, mask, cfg.micro_tokens):
            logp, _ = token_logps(model, ids[micro, :T], mask[micro, :T], 1.0)
            yield -logp.sum() / tokens
    batches.fit("warm start", model, losses, cfg.warm_steps, cfg.warm_lr, cfg.grad_clip)

    if machine.world()[0] == 0:
        where, note = cfg.folder / "warm_start", cfg.folder / "warm_start" / "warm_start.json"
        note.unlink(missing_ok=True)
        pretrained.save(model, where, encoding.files)
        write_whole(note, warm_note(cfg, task))                 # last: it says that all is there

def padded(rows, device):
    """Lists of unequal lengths as one tensor (B, T), padded on the right with 0 or False."""
    return pad_sequence([torch.tensor(row, device=device) for row in rows], batch_first=True)

def warm_note(cfg, task):
    """All that a warm start depends on: settings, code, data, the machine."""
    root = Path(data.__file__).parent.parent
    sources = [root / "model.py", *sorted((root / "data").glob("*.py")),
               *(root / "run" / f"{name}.py" for name in ("batches", "machine", "start"))]
    sources += [Path(x) for x in (getattr(task, "__file__", None), cfg.train or None) if x]
    sources += sorted(filter(Path.is_file, Path(cfg.init).glob("*"))) if cfg.init else []
    sha256 = hashlib.sha256()
    for path in sources:
        with open(path, "rb") as file:
            sha256.update(hashlib.file_digest(file, "sha256").digest())
    device, dtype, _ = machine.resolve(cfg)
    return json.dumps({name: getattr(cfg, name) for name in WARM}
                      | {"sha256 of code and data": sha256.hexdigest(), "torch": torch.__version__,
                         "device": device.type, "dtype": dtype, "ranks": machine.world()[1]})

# ------------------------------------------------------------------------------ whether it can run

def check(cfg, task, problems, held_out):
    """Raise Fault if the task lacks what the run needs, if a step wants more than there are
    problems, or cannot deal them to the ranks alike; say where there are few."""
    if cfg.supervision == "process":
        require(task, "steps", "--supervision process rewards them")
    if cfg.warm_steps:
        require(task, "demonstration", "a warm start imitates them; --init FOLDER needs none")
    if cfg.init and Path(cfg.init).resolve() == cfg.folder.resolve():
        raise Fault(f"--out is --init: the model in {cfg.init} would be overwritten")
    if cfg.minibatches > cfg.prompts * cfg.group:
        raise Fault(f"--minibatches {cfg.minibatches}: a rollout has only "
                    f"{cfg.prompts * cfg.group} rows")
    if not held_out:
        raise Fault("the task holds no problems out: there is nothing to evaluate on")
    for problem in problems[:1]:            # found now, and not after the warm start
        check_parts(problem, task.reward(problem, ""))
    drawn, ranks = {"prompts": cfg.prompts}, machine.world()[1]         # problems at a time
    if cfg.reward == "model":
        drawn["fit_prompts"] = cfg.fit_prompts
    for name, n in drawn.items():
        if n > len(problems):
            raise Fault(f"--{name} {n}: the task has only {len(problems)} problems to draw from")
        if n % ranks:
            raise Fault(f"--{name} {n} cannot be dealt to {ranks} ranks alike")
    if cfg.warm_batch < ranks:
        raise Fault(f"--warm_batch {cfg.warm_batch} is less than a row for each of {ranks} ranks")
    if len(held_out) < 50:
        show.print0(f"note: only {len(held_out)} problems are held out, so one more that is solved "
                    f"moves a result by {1 / len(held_out):.0%}")

def check_room(model, cfg, longest):
    """Raise Fault, before there is memory for the model, if a run with prompts of up to `longest`
    tokens would not fit; 0: if the model alone would not."""
    if longest and longest + cfg.max_new > model.cfg.block_size:
        raise Fault(f"{longest} tokens of a prompt and --max_new {cfg.max_new} do not fit the "
                    f"model's context of {model.cfg.block_size}")
    need, free = memory(model, cfg, longest), free_memory(machine.resolve(cfg)[0])
    if not longest:
        need = {"weights": 4 * sum(p.numel() for p in model.parameters()),
                "RoPE's tables": rope_tables(model.cfg)}
    if free is not None and total(need) > free:
        parts = ", ".join(f"{name} {x / 1e9:.1f}" for name, x in need.items() if x > 5e7)
        raise Fault(f"this needs about {total(need) / 1e9:.1f} GB, and {free / 1e9:.1f} are "
                    f"free ({parts}): lower --micro_tokens, --max_new, --group or --prompts")

def free_memory(device):
    """Bytes free on a device, or None where nothing says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", known.read_text()) if known.exists() else None
    return 1024 * int(found[1]) if found and device.type == "cpu" else None

def rope_tables(shape):
    """Bytes of the cosines and sines in a model."""
    return 8 * shape.block_size * shape.head_size

def memory(model, cfg, longest):
    """Bytes that a run needs, by what for. Of the rollout's and the update's own only the larger
    count, for they take turns. Activations, what the backward pass needs of each layer, are an
    estimate."""
    c, half = model.cfg, machine.resolve(cfg)[1] == "bfloat16"
    N, b = sum(p.numel() for p in model.parameters()), 2 if half else 4     # b: of a product
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    frozen = 4 * N - (4 - b) * linear + b * c.vocab_size * c.n_embd * (half and c.tied)
    learned, slots, V = cfg.reward == "model", longest + cfg.max_new, c.vocab_size
    rows = cfg.prompts * max(cfg.group, cfg.choices * learned) // machine.world()[1]
    tokens = max(cfg.micro_tokens, slots * (cfg.choices if learned else 1))     # at least a row
    inner, heads = c.n_inner * (4 if c.mlp == "swiglu" else 2), (c.n_head + c.n_kv_head)
    layer = 4 * 4 * c.n_embd + b * (2 * c.n_embd + 3 * heads * c.head_size + inner)   # of a token
    stored = layer + 4 * c.n_embd * c.n_layer if cfg.recompute == "on" else layer * c.n_layer
    trained = 1 + ("value" in cfg.baseline and cfg.critic == "separate")
    dealt = shard.shards(cfg)
    own = N / (machine.world()[1] if dealt else 1)      # parameters of a model that a rank keeps
    # The cache twice: when rows part or end, what goes on is copied.
    rollout = {"cache": 2 * 2 * b * c.n_layer * c.n_kv_head * c.head_size * rows * slots,
               "logits of a token": 24 * rows * V, "whole sampler": frozen * dealt}
    # Of a model that is dealt two layers are whole at a time, and what is in none.
    update = {"gradients": 4 * own * trained, "activations": stored * tokens * trained,
              "logits": 12 * min(CHUNK, V * tokens),
              "whole layers": 4 * (N - linear + 2 * linear // c.n_layer) * dealt}
    models = trained + cfg.needs_reference + (half or dealt) + learned
    run = {"weights": 4 * own * trained, "Adam": 8 * own * trained,
           "reference": frozen * own / N * cfg.needs_reference,
           "sampler": frozen * (half and not dealt), "reward model": 16 * own * learned,
           "RoPE's tables": rope_tables(c) * models, **max(rollout, update, key=total)}
    begun = {"weights before they are dealt": 4 * N * dealt, "copies of them": 2 * frozen * dealt,
             "the warm start's gradients and Adam": 12 * N * dealt * (cfg.warm_steps > 0)}
    return max(run, begun, key=total)

def total(need):
    """Bytes in all, of what `memory` gives."""
    return sum(need.values())

def costs(model, cfg, longest, tokens):
    """A line on the memory that a run needs, and the least time of a step with prompts of so many
    `tokens`, in which all completions are as long as they may be, and share no more than their
    prompt: its operations at the speed of products of matrices."""
    device, dtype, _ = machine.resolve(cfg)
    need, free = total(memory(model, cfg, longest)), free_memory(device)
    linear = sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    head, rows = model.table.weight.numel(), cfg.prompts * cfg.group / machine.world()[1]
    passes = 1 + cfg.needs_reference + ("value" in cfg.baseline or dtype == "bfloat16")
    once = linear * rows / cfg.group * tokens + (linear + head) * rows * cfg.max_new
    seconds = (2 * passes + 6 * cfg.epochs) * once / machine.matrix_rate(device, dtype)
    known = "" if free is None else f" of {free / 1e9:.1f} free"
    return (f"memory about {need / 1e9:.1f} GB{known}; a step with completions of {cfg.max_new} "
            f"tokens takes at least {seconds:.2g} s ({machine.rates(device, dtype)})")
