"""The warm start: supervised fine-tuning on demonstrations. It is kept in the run's folder for
reuse; `data/warm_start` holds that of the default run, so that nobody has to wait for it.

A kept warm start is used if it was made with the same settings, from the same demonstrations, and
if today's model.py gives its weights the loss that is noted beside them.
"""
import hashlib
import json
import random
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

import data
import model
from data import UserError, read_bytes, read_json, turns
from run import dist, passes, pretrained, show
from run.files import write_whole

SHIPPED = Path(data.__file__).parent / "warm_start"

# The settings on which a kept warm start depends. A fork's field that changes the model, or what it
# imitates, goes here.
DEPENDS_ON = "task init chat system seed max_new n_layer n_embd warm_steps warm_lr".split()

# ------------------------------------------------------------------------------- which one to use

def settings(cfg):
    """The settings on which a kept warm start depends, name to value."""
    return {name: getattr(cfg, name) for name in DEPENDS_ON} | cfg.task_args

def shipped(cfg):
    """cfg, with SHIPPED as --init if it serves as cfg's warm start."""
    note = read_note(SHIPPED)
    if note and not changed(replace(cfg, seed=note["settings"]["seed"]), note):
        return replace(cfg, init=str(SHIPPED), warm_steps=0)
    return cfg

def checked(cfg, task, problems):
    """cfg; but if it has SHIPPED as --init, and that is not what today's code would make, cfg with
    a warm start of its own. Says why SHIPPED is not used for its own task."""
    note = read_note(SHIPPED)
    if note and cfg.init == str(SHIPPED):
        own = replace(cfg, init="", warm_steps=note["settings"]["warm_steps"])
    elif note and cfg.warm_steps and not cfg.init and cfg.task == note["settings"]["task"]:
        own = cfg
    else:
        return cfg
    encoding = pretrained.encoding_of(own, "")
    any_seed = replace(own, seed=note["settings"]["seed"])
    if why := outdated(SHIPPED, any_seed, task, problems, encoding):
        show.print0(f"note: {SHIPPED} is not used: {why}")
        return own
    return cfg

def starting_model(cfg, task, problems, longest, encoding):
    """The policy before RL (a kept warm start, --init's model, or a new one), and whether it still
    needs its warm start. `longest`: tokens of the longest prompt."""
    where, cold = cfg.init, cfg.warm_steps > 0
    kept = cfg.folder / "warm_start"
    if cold and (kept / "warm_start.json").exists():
        if why := outdated(kept, cfg, task, problems, encoding):
            show.print0(f"{kept} is rebuilt: {why}")
        else:
            where, cold = kept, False
    if not where:
        return pretrained.new_model(cfg, encoding, longest), cold
    again = f"; --warm_steps {type(cfg).warm_steps} makes a new one"
    show.print0(f"starting from {where}{again if where == str(SHIPPED) else ''}")
    policy = pretrained.load_model(where, cfg, encoding, longest)
    dtype = policy.hf.get("dtype") or policy.hf.get("torch_dtype") or "float32"
    if dtype != "float32":
        show.print0(f"its weights are {dtype}; they are trained, and saved, in float32")
    return policy, cold

def outdated(where, cfg, task, problems, encoding):
    """Why the warm start in a folder is not what a run would make now; None if it is."""
    note = read_note(where)
    if note is None:
        return "another version of this code made it"
    if why := changed(cfg, note):
        return why
    rows = demonstrations(task, problems, encoding)
    if note["sha256"] != sha256_of(cfg, rows):
        return "the demonstrations, their tokens, or --init's weights changed"
    try:
        loss = loss_on(pretrained.load(where), rows)
    except UserError as e:
        return str(e)
    if not abs(loss - note["loss"]) < 1e-4:
        return "model.py changed: its weights give another loss"
    return None

def changed(cfg, note):
    """The first setting of cfg on which a warm start depends and which has another value in its
    note, as text; None if there is none. A setting that the note lacks had its default."""
    default = {f.name: f.default for f in fields(cfg)}
    for name, now in settings(cfg).items():
        was = note["settings"].get(name, default.get(name))
        if was != now:
            return f"--{name} was {was}, and is {now}"
    return None

# -------------------------------------------------------------------------------------- its note

def new_note(cfg, task, problems, encoding):
    """What `outdated` compares, of the warm start in cfg's folder, as JSON."""
    rows = demonstrations(task, problems, encoding)
    loss = loss_on(pretrained.load(cfg.folder / "warm_start"), rows)
    note = {"settings": settings(cfg), "sha256": sha256_of(cfg, rows), "loss": loss}
    return json.dumps(note, indent=1)

def read_note(where):
    """The note of a kept warm start; None if there is none that `new_note` could have written."""
    try:
        note = read_json(read_bytes(where / "warm_start.json"), where)
    except (OSError, UserError):
        return None
    return note if note.keys() >= {"settings", "sha256", "loss"} else None

def demonstrations(task, problems, encoding):
    """A demonstration of each problem, as rows; the same ones each time."""
    rng = random.Random(0)
    return [row(problem, task, encoding, rng) for problem in problems]

def sha256_of(cfg, rows):
    """SHA-256 of demonstrations, and of the weights that --init names."""
    sha256 = hashlib.sha256(repr(rows).encode())
    for path in sorted(Path(cfg.init).glob("model*.safetensors")) if cfg.init else []:
        with open(path, "rb") as f:
            sha256.update(hashlib.file_digest(f, "sha256").digest())
    return sha256.hexdigest()

@torch.no_grad()
def loss_on(policy, rows):
    """A model's loss on the first four demonstrations, in float32 on the CPU."""
    ids, mask = padded(rows[:4])
    logp, _ = model.token_logps(policy.eval(), ids, mask, 1.0)
    return -logp[mask].mean().item()

# ------------------------------------------------------------------------------------ making one

WARM_BATCH = 48         # demonstrations per optimizer step

def warm_start(policy, task, problems, cfg, encoding):
    """Fine-tunes a model on fresh demonstrations and keeps the result in the run's folder."""
    form = model.token_logps if cfg.cache == "plain" else passes.token_logps    # the faster one

    def losses(step):
        """The loss terms of one optimizer step, over this rank's rows."""
        rng = dist.rng(cfg, "warm start", step)
        rows = [row(p, task, encoding, rng) for p in rng.choices(problems, k=WARM_BATCH)]
        longest = max(sum(map(len, parts)) for _, *parts in rows)
        if longest > cfg.max_new:
            raise UserError(f"a demonstration has {longest} tokens, --max_new is {cfg.max_new}")
        tokens = sum(len(said) for parts in rows for said in parts[1::2])       # over all ranks
        ids, mask = padded(dist.of_rank(rows))
        for micro, T in passes.split_rows(ids, mask, cfg.micro_tokens, policy):
            logp, _ = form(policy, ids[micro, :T], mask[micro, :T], 1.0)
            yield -logp.sum() / tokens
    supervised_fit("warm start", policy, losses, cfg.warm_steps, cfg.warm_lr)

    if dist.rank() == 0:
        where = cfg.folder / "warm_start"
        (where / "warm_start.json").unlink(missing_ok=True)
        pretrained.save(policy, where, encoding.files)
        note = new_note(cfg, task, problems, encoding)
        write_whole(where / "warm_start.json", note)            # marks the rest complete

def row(problem, task, encoding, rng):
    """The ids of a prompt and of a demonstration: of its one turn, or of its turns and replies."""
    shown = turns.demonstration(task, problem, rng)
    if isinstance(shown, str):
        shown = [shown]
    parts = [encoding.encode_prompt(problem.prompt)]
    for i, text in enumerate(shown):
        if i % 2 == 0:
            parts.append(encoding.encode_demonstration(text))
        else:
            parts.append(encoding.encode_reply(text))
    return tuple(parts)

def padded(rows):
    """Rows of unequal length as ids and mask, (B, T), padded on the right with 0 and False. A row
    has parts, of which every second one is to be imitated."""
    ids, mask = [], []
    for parts in rows:
        ids.append(torch.tensor([token for part in parts for token in part]))
        mask.append(torch.tensor([i % 2 == 1 for i, part in enumerate(parts) for _ in part]))
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)

GRAD_CLIP = 1.0         # maximum gradient norm of a supervised fit

def supervised_fit(name, module, losses, steps, lr):
    """Supervised training: `steps` steps of AdamW, each on the sum of the loss terms that
    `losses(step)` yields. The learning rate rises for 30 steps and falls linearly to 0."""
    params = [p for p in module.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0, fused=True)
    report = show.progress(name, steps)
    module.train()
    for step in range(steps):
        if dist.stop_asked():
            raise dist.Stopped(f"in the {name}, which will begin again")
        opt.param_groups[0]["lr"] = lr * min(1 - step / steps, (step + 1) / 30)
        total = torch.zeros((), device=params[0].device)
        for loss in losses(step):
            loss.backward()
            total += loss.detach()
        dist.sum_gradients(params)
        dist.clip_gradients(params, GRAD_CLIP)
        opt.step()
        opt.zero_grad()
        tenth = (step + 1) % max(1, steps // 10) == 0
        report(step + 1, f"loss {dist.all_reduce(total).item():.3f}  ", tenth)
    module.eval()
