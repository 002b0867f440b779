"""The warm start: supervised fine-tuning on demonstrations. It is kept in the run's folder for
reuse; `data/warm_start` holds that of the default run, so that nobody has to wait for it.

A kept warm start is used if the same settings and code would make it, from the same demonstrations,
and if today's model.py gives its weights the log-probabilities that are noted beside them.
"""
import hashlib
import json
import math
import random
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

import data
from data import UserError, read_bytes, read_json
from run.passes import token_logps
from run import config, dist, passes, pretrained, show
from run.files import write_whole

SHIPPED = Path(data.__file__).parent / "warm_start"

# A kept warm start depends on the settings under "new model and warm start" in Config, on these of
# other headings, and on what `made_with` returns: not on those that only RL, evaluation or logging
# uses, and a fork's new ones count by the heading under which they stand.
MODEL_HEADING = "new model and warm start"
DEPENDS_ON = frozenset(
    "task task_args init chat system seed max_new recompute cache".split())
# Of these, SHIPPED may have been made with others.
ANY = frozenset("seed recompute cache".split())

# ------------------------------------------------------------------------------- which one to use

def settings(cfg):
    """The names of the settings on which a kept warm start depends. A field under no heading is one
    of them, to be safe."""
    others = set()
    for kind in filter(is_dataclass, type(cfg).__mro__):
        for heading, helps in config.sections(kind).items():
            if not heading.startswith(MODEL_HEADING):
                others |= helps.keys()
    return [f.name for f in fields(cfg) if f.name not in others - DEPENDS_ON]

def shipped(cfg):
    """cfg, with SHIPPED as --init if it serves as cfg's warm start."""
    note = read_note(SHIPPED)
    if note is None or changed(cfg, note, ANY):
        return cfg
    return replace(cfg, init=str(SHIPPED), warm_steps=0)

def checked(cfg, task, problems):
    """cfg; but if it has SHIPPED as --init, and that is no longer what today's code would make, cfg
    with a warm start of its own. Says why SHIPPED is not used for its own task."""
    note = read_note(SHIPPED)
    if note and not cfg.init and cfg.warm_steps and cfg.task == note["settings"]["task"]:
        if why := changed(cfg, note, ANY):
            show.print0(f"note: {SHIPPED} is not used: {why}")
    if cfg.init != str(SHIPPED) or note is None:
        return cfg
    own = replace(cfg, init="", warm_steps=note["settings"]["warm_steps"])
    if why := outdated(SHIPPED, own, task, problems, pretrained.encoding_of(own, ""), ANY):
        show.print0(f"note: {SHIPPED} is not used: {why}")
        return own
    return cfg

def starting_model(cfg, task, problems, longest, encoding):
    """The policy before RL (a kept warm start, --init's model, or a new one), and whether it still
    needs its warm start. `longest`: tokens of the longest prompt."""
    where, warm = cfg.folder / "warm_start", cfg.warm_steps > 0
    known = warm and (where / "warm_start.json").exists()
    if known and (why := outdated(where, cfg, task, problems, encoding)):
        show.print0(f"{where} is rebuilt: {why}")
        known = False
    if cfg.init or known:
        source = where if known else cfg.init
        again = f"; --warm_steps {type(cfg).warm_steps} makes a new one"
        show.print0(f"starting from {source}{again if cfg.init == str(SHIPPED) else ''}")
        model = pretrained.load_model(source, cfg, encoding, longest)
        if (dtype := model.hf.get("dtype") or model.hf.get("torch_dtype")) not in (None, "float32"):
            show.print0(f"its weights are {dtype}; they are trained, and saved, in float32")
        return model, warm and not known
    return pretrained.new_model(cfg, encoding, longest), warm

def changed(cfg, note, ignored=frozenset()):
    """The first setting of cfg on which a warm start depends and which has another value in its
    note, as text; None if there is none. A setting that the note lacks had its default."""
    default = {field.name: field.default for field in fields(cfg)}
    then = default | note["settings"] | note["settings"].get("task_args", {})
    now = vars(cfg) | cfg.task_args
    for name in [*cfg.task_args, *settings(cfg)]:
        if name not in ignored and then.get(name) != now[name]:
            return f"--{name} was {then.get(name)}, and is {now[name]}"
    return None

def outdated(where, cfg, task, problems, encoding, ignored=frozenset()):
    """Why the warm start in a folder is not what a run would make now; None if it is, or would be
    with other values of the settings `ignored`."""
    note = read_note(where)
    if note is None:
        return "another version of this code made it"
    if why := changed(cfg, note, ignored):
        return why
    rows = demonstrations(task, problems, encoding)
    if note["demonstrations"] != sha256_of(rows):
        return "the demonstrations or their tokens changed"
    if not ignored:
        for name, now in made_with(cfg).items():
            if note["made with"].get(name) != now:
                return f"{name} changed"
    try:
        now = log_probabilities(pretrained.load(where), rows)
    except UserError as e:
        return str(e)
    was = note["log-probabilities"]
    if len(was) != len(now) or max(abs(x - y) for x, y in zip(was, now)) > 1e-3:
        return "model.py changed: its weights give different log-probabilities"
    return None

# ------------------------------------------------------------------------------------ making one

WARM_BATCH = 48         # demonstrations per optimizer step

def warm_start(model, task, problems, cfg, encoding):
    """Fine-tunes a model on fresh demonstrations and keeps the result in the run's folder."""
    def losses(step):
        """The loss terms of one optimizer step, over this rank's rows."""
        rng = dist.rng(cfg, "warm start", step)
        rows = [row(p, task, encoding, rng) for p in rng.choices(problems, k=WARM_BATCH)]
        tokens = sum(len(text) for _, text in rows)             # over all ranks
        if (long := max(len(text) for _, text in rows)) > cfg.max_new:
            raise UserError(f"a demonstration has {long} tokens, --max_new is {cfg.max_new}")
        ids, mask = padded(dist.of_rank(rows))
        for micro, T in passes.micro_batches(ids, mask, cfg.micro_tokens):
            logp, _ = token_logps(model, ids[micro, :T], mask[micro, :T], 1.0)
            yield -logp.sum() / tokens
    supervised_fit("warm start", model, losses, cfg.warm_steps, cfg.warm_lr)

    if dist.rank() == 0:
        where, note = cfg.folder / "warm_start", cfg.folder / "warm_start" / "warm_start.json"
        note.unlink(missing_ok=True)
        pretrained.save(model, where, encoding.files)
        write_whole(note, new_note(cfg, task, problems, encoding))      # marks the rest complete

def row(problem, task, encoding, rng):
    """The ids of a prompt and of a demonstration."""
    said = encoding.encode_ordinary(task.demonstration(problem, rng))
    return encoding.encode_prompt(problem.prompt), said + [encoding.end]

def padded(rows):
    """Rows of unequal length as ids and mask, (B, T), padded on the right with 0 and False."""
    ids = [torch.tensor(prompt + text) for prompt, text in rows]
    mask = [torch.arange(len(x)) >= len(prompt) for x, (prompt, _) in zip(ids, rows)]
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)

# ------------------------------------------------------------------------------------- its note

KINDS = {"settings": dict, "made with": dict, "demonstrations": str, "log-probabilities": list}

def demonstrations(task, problems, encoding):
    """A demonstration of each problem, as rows; the same ones each time."""
    rng = random.Random(0)
    return [row(problem, task, encoding, rng) for problem in problems]

@torch.no_grad()
def log_probabilities(model, rows):
    """Those of the tokens of the first four demonstrations, in float32 on the CPU."""
    ids, mask = padded(rows[:4])
    return token_logps(model.eval(), ids, mask, 1.0)[0][mask].tolist()

def new_note(cfg, task, problems, encoding):
    """What `outdated` compares, of the warm start in cfg's folder, as JSON."""
    rows = demonstrations(task, problems, encoding)
    logp = log_probabilities(pretrained.load(cfg.folder / "warm_start"), rows)
    return json.dumps({
        "settings": {name: getattr(cfg, name) for name in settings(cfg)},
        "made with": made_with(cfg), "demonstrations": sha256_of(rows),
        "log-probabilities": [round(x, 5) for x in logp]}, indent=1)

def made_with(cfg):
    """What else decides a warm start, up to its last digits."""
    device, dtype = dist.device_of(cfg), dist.dtype_of(cfg)
    files = [Path(__file__)]
    files += sorted(filter(Path.is_file, Path(cfg.init).glob("*"))) if cfg.init else []
    digests = []
    for path in files:
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return {"torch": torch.__version__, "device": device.type, "dtype": dtype,
            "ranks": dist.ranks(), "the fit's code or --init's files": sha256_of(digests)}

def read_note(where):
    """The note of a kept warm start; None if there is none that `new_note` could have written."""
    try:
        note = read_json(read_bytes(where / "warm_start.json"), where)
    except (OSError, UserError):
        return None
    kinds = {name: type(note.get(name)) for name in KINDS}
    return note if kinds == KINDS else None

def sha256_of(values):
    """SHA-256 of a list, as it prints."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def new_optimizer(modules, lr, eps=1e-8):
    """AdamW for the modules that are not None. No weight decay: it would pull weights to 0,
    away from the pretrained ones."""
    params = [p for module in filter(None, modules) for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr, betas=(0.9, 0.95), eps=eps, weight_decay=0, fused=True)

def scale_rates(opt, factor):
    """Sets the learning rate of each group to a factor times the one that it began with."""
    for group in opt.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

def optimizer_step(opt, grad_clip):
    """Sums the gradients over the ranks, clips, steps, clears; returns the norm before clipping,
    which is over all weights, those of a separate critic included, as in the original PPO code
    and in CleanRL. (Adam cancels most of a common factor.)"""
    params = [p for group in opt.param_groups for p in group["params"]]
    for p in params:
        p.grad = dist.summed(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = dist.full(torch.nn.utils.clip_grad_norm_(params, grad_clip)).item()
    if not math.isfinite(norm):
        raise UserError(f"the norm of the gradient is {norm}")
    opt.step()
    opt.zero_grad()
    return norm

GRAD_CLIP = 1.0         # maximum gradient norm of a supervised fit

def supervised_fit(name, module, losses, steps, lr):
    """Supervised training: `steps` optimizer steps, each on the sum of the loss terms that
    `losses(step)` yields. The learning rate rises for 30 steps and falls linearly to 0."""
    opt, report = new_optimizer([module], lr), show.progress(name, steps)
    module.train()
    for step in range(steps):
        if dist.stop_asked():
            raise dist.Stopped(f"in the {name}, which will begin again")
        scale_rates(opt, min(1 - step / steps, (step + 1) / 30))
        total = torch.zeros((), device=opt.param_groups[0]["params"][0].device)
        for loss in losses(step):
            loss.backward()
            total += loss.detach()
        optimizer_step(opt, GRAD_CLIP)
        tenth = (step + 1) % max(1, steps // 10) == 0
        report(step + 1, f"loss {dist.all_reduce(total).item():.3f}  ", tenth)
    module.eval()
