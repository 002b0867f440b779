"""What is around the algorithm: the machine, its ranks, signals, and the folder of a run:

    model.safetensors, config.json    the policy, for use
    checkpoint.safetensors            all that a resumed run needs, one file, JSON in its header
    run.json                          the settings, the versions, the command
    metrics.jsonl, samples.jsonl      a line a step; a group in full at every checkpoint
"""
import argparse
import ctypes
import dataclasses
import inspect
import json
import math
import os
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

class Fault(Exception):
    """Something the user can mend: `grpo.py` prints it as one line and exits with code 2."""

# ------------------------------------------------------------------------ the machine, the ranks

class Stopped(Exception):
    """A signal asked to stop; all that was made is saved."""

ASKED = []      # signals that came: the step in progress is finished and saved first

def stop_asked():
    """Whether a signal came to any rank."""
    cuda = dist.is_initialized() and dist.get_backend() == "nccl"
    device = torch.device("cuda" if cuda else "cpu")
    return all_reduce(torch.tensor(float(sum(ASKED)), device=device)).item() > 0

def machine(cfg):
    """(device, dtype name, whether to compile): the best there is where cfg says auto."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    kind = next(d for d in there if there[d]) if cfg.device == "auto" else cfg.device
    if not there[kind]:
        raise Fault(f"--device {kind}: there is none here")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)
    dtype = ("bfloat16" if kind == "cuda" else "float32") if cfg.dtype == "auto" else cfg.dtype
    return device, dtype, kind == "cuda" if cfg.compile == "auto" else cfg.compile == "on"

def start_ranks(device):
    """Join the other processes, if torchrun started this one."""
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

def leave(code):
    """End the process, if there is something to tell or there are ranks."""
    if dist.is_initialized() and code != 2:     # gloo's threads can abort an orderly exit
        dist.barrier()
        sys.stdout.flush()
        os._exit(code)
    if code:
        sys.exit(code)

def world():
    """(rank, number of ranks) under torchrun; (0, 1) without."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def all_reduce(x, op=dist.ReduceOp.SUM):
    """Sum (or `op`) of a tensor over all ranks."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x, op)
    return x

def rng(cfg, purpose, at=0):
    """A random stream for each purpose and step: it follows from the seed, so nothing is stored."""
    return random.Random(f"{cfg.seed}/{purpose}/{at}")

def say(text):
    """Print on one rank."""
    if world()[0] == 0:
        print(text, flush=True)

def prepare():
    """Let stdout replace what the terminal cannot show, and have glibc keep freed memory: handed
    back to the system, every activation faults in anew, on a CPU a twentieth of a training step."""
    sys.stdout.reconfigure(errors="replace")
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2 ** 31 - 1)       # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)           # M_MMAP_THRESHOLD, at its largest

def widest(device):
    """The widest floats of a device: mps has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

def compile_all(*modules):
    """torch.compile of each module that is not None. They are of one class, so all their graphs
    (prompts, one token, training; a batch of one row) count against one limit, by default 8."""
    torch._dynamo.config.recompile_limit = 64
    for module in filter(None, modules):
        module.compile(dynamic=True)

# -------------------------------------------------------------------------------------- the rows

def row_lengths(mask):
    """Tokens of each row without its padding, (B,)."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)

def micro_batches(length, budget):
    """Chunks of rows (indices, longest length), each of at most `budget` tokens with its padding;
    rows go by length (B,), and none is padded to more than twice its own."""
    order = length.argsort(descending=True, stable=True)
    sizes = length[order].tolist()
    i = 0
    while i < len(sizes):
        fits = [j for j in range(i, min(len(sizes), i + max(1, budget // sizes[i])))
                if 2 * sizes[j] >= sizes[i]]
        yield order[i:fits[-1] + 1], sizes[i]
        i = fits[-1] + 1

def last_tokens(mask):
    """The last sampled token of each row, (B, T)."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)

@torch.no_grad()
def by_parts(f, ids, mask, budget):
    """f(ids, mask), a tuple of (B, T) tensors or None, in micro-batches and without a graph."""
    out = None
    for rows, T in micro_batches(row_lengths(mask), budget):
        parts = f(ids[rows, :T], mask[rows, :T])
        out = out or [x if x is None else torch.zeros_like(ids, dtype=x.dtype) for x in parts]
        for whole, part in zip(out, parts):
            if part is not None:
                whole[rows, :T] = part.to(ids.device)
    return out

# ------------------------------------------------------------------------------------ the training

def new_optimizer(modules, lr, eps=1e-8):
    """AdamW without weight decay: what holds the weights here is the KL to the reference."""
    params = [p for module in modules for p in module.parameters()]
    return torch.optim.AdamW(params, lr, betas=(0.9, 0.95), eps=eps, weight_decay=0, fused=True)

def optimizer_step(opt, grad_clip):
    """Sum the gradients over the ranks, clip, step, clear. Gives the norm before clipping."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for p in params:
        p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = torch.nn.utils.clip_grad_norm_(params, grad_clip).item()
    if not math.isfinite(norm):
        raise Fault(f"the norm of the gradient is {norm}")
    opt.step()
    opt.zero_grad()
    return norm

def fit(name, module, losses, steps, lr, grad_clip):
    """Supervised training: `steps` optimizer steps, each on the sum of the terms that
    `losses(step)` yields; the learning rate rises, then falls to 0."""
    opt, began = new_optimizer([module], lr), time.time()
    for step in range(steps):
        if stop_asked():
            raise Stopped(f"in the {name}, which will begin anew")
        opt.param_groups[0]["lr"] = lr * min(1 - step / steps, (step + 1) / 30)
        total = torch.zeros((), device=opt.param_groups[0]["params"][0].device)
        for loss in losses(step):
            loss.backward()
            total += loss.detach()
        optimizer_step(opt, grad_clip)
        if (step + 1) % max(1, steps // 10) == 0:
            left = (time.time() - began) / (step + 1) * (steps - step - 1)
            say(f"{name} {step + 1}/{steps}  loss {all_reduce(total).item():.3f}  "
                f"left {clock(left)}")

def clock(seconds):
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

def load_tensors(module, tensors, source):
    """Copy in every parameter by name; raises Fault where names or shapes differ."""
    own = dict(module.named_parameters())
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    if wrong:
        raise Fault(f"{source}: tensors missing, superfluous or of another shape: {wrong[0]}"
                    + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(tensors[name])

def training_state(modules, opt, history):
    """Every tensor of a run by name: parameters of the modules by role, state of the optimizer,
    and of the labelled rows in `history`."""
    named = {f"{role}.{n}": p for role, module in modules.items() if module is not None
             for n, p in module.named_parameters()}
    moments = {f"opt.{key}.{n}": x for n, p in named.items()
               for key, x in opt.state.get(p, {}).items()}
    rows = {f"history.{n}": x for n, x in history.items()}
    return {n: p.detach() for n, p in named.items()} | moments | rows

def load_training_state(tensors, source, modules, opt):
    """Put the tensors of `training_state` back in their places, and give the history. `source`
    names them in a Fault."""
    under = lambda prefix: {n.removeprefix(prefix): x for n, x in tensors.items()
                            if n.startswith(prefix)}
    for role, module in modules.items():
        if module is not None:
            load_tensors(module, under(f"{role}."), source)
            for n, p in module.named_parameters():      # no moments before the first optimizer step
                moments = {key: under(f"opt.{key}.").get(f"{role}.{n}")
                           for key in ("step", "exp_avg", "exp_avg_sq")}
                if all(x is not None for x in moments.values()):
                    opt.state[p] = {key: x.to(p.device) for key, x in moments.items()}
    return under("history.")

# ------------------------------------------------------------------------------ the run's folder

LOGS = ("metrics.jsonl", "samples.jsonl")

def write_whole(path, content):
    """Write a file beside `path`, then rename it: a crash leaves the old file whole. content: text,
    or a function that writes a path."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(content) if isinstance(content, str) else content(beside)
    with open(beside, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(beside, path)

def write_tensors(path, tensors, metadata):
    """A safetensors file, whole or not at all. One metadata key: the order of several is random."""
    tensors = {n: t.cpu().contiguous() for n, t in tensors.items()}
    write_whole(Path(path), lambda p: save_file(tensors, p, metadata=metadata))

def read_tensors(path):
    """(tensors by name, metadata) of a safetensors file; raises Fault if it is not a whole one."""
    try:
        with safe_open(path, "pt") as f:
            return {n: f.get_tensor(n) for n in f.keys()}, f.metadata() or {}
    except (OSError, SafetensorError) as e:
        why = "not found" if not Path(path).exists() else f"not a whole safetensors file: {e}"
        raise Fault(f"{path}: {why}") from e

def each_tensor(folder):
    """(name, tensor) of a checkpoint's model.safetensors, or of its parts, one after the other."""
    folder = Path(folder)
    index, files = folder / "model.safetensors.index.json", ["model.safetensors"]
    try:
        if index.exists() and not (folder / files[0]).exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        for file in files:
            with safe_open(folder / file, "pt") as f:
                for name in f.keys():
                    yield name, f.get_tensor(name)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as e:
        raise Fault(f"{folder}: cannot read its tensors ({e.__class__.__name__}: {e})") from e

def read_flags(config, modes, about, argv):
    """A command line as a dict of the flags given and of all modes. A field of the dataclass
    `config` is a flag, its comment the flag's help; `modes` are flags too, of which one at most."""
    comments = dict(re.findall(r"^    (\w+): .+? = .*?  # (.*)$", inspect.getsource(config), re.M))
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False,
                                     epilog="In brackets the defaults; a task may set its own.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(config):
        parser.add_argument(f"--{f.name}", type=str if get_args(f.type) else f.type,
                            default=argparse.SUPPRESS, help=f"{comments[f.name]} ({f.default})")
    only_one = parser.add_mutually_exclusive_group()
    for name, options in modes.items():
        only_one.add_argument(f"--{name}", **options)
    def error(message):
        """What argparse calls instead of exiting itself."""
        raise Fault(f"{message}; --help lists the flags")
    parser.error = error
    return vars(parser.parse_args(argv))

def check_fields(cfg, least, most):
    """Raise Fault for a field of a dataclass that is none of its choices, or a number not finite,
    less than least[name] (without that an integer is at least 1, another number 0) or more than
    most[name]."""
    for f in dataclasses.fields(cfg):
        value, choices = getattr(cfg, f.name), get_args(f.type)
        low = least.get(f.name, int(f.type is int))
        if choices and value not in choices:
            raise Fault(f"--{f.name} is one of {', '.join(choices)}, not {value!r}")
        if f.type in (int, float) and not (math.isfinite(value) and value >= low):
            raise Fault(f"--{f.name} is at least {low}, not {value}")
        if f.name in most and value > most[f.name]:
            raise Fault(f"--{f.name} is at most {most[f.name]}, not {value}")

def check_sizes(cfg, problems):
    """Raise Fault if a step wants more than there are `problems`, or cannot deal them to the ranks
    alike."""
    if cfg.init and Path(cfg.init).resolve() == cfg.folder.resolve():
        raise Fault(f"--out is --init: the model in {cfg.init} would be overwritten")
    if cfg.minibatches > cfg.prompts * cfg.group:
        raise Fault(f"--minibatches {cfg.minibatches}: a rollout has only "
                    f"{cfg.prompts * cfg.group} rows")
    drawn = [cfg.prompts] + [cfg.fit_prompts] * (cfg.reward == "model")     # problems at a time
    if max(drawn) > problems:
        raise Fault(f"{max(drawn)} prompts at a time: the task has only {problems} problems")
    if any(n % (ranks := world()[1]) for n in drawn) or cfg.warm_batch < ranks:
        raise Fault(f"prompts {drawn}, --warm_batch {cfg.warm_batch}: not for {ranks} ranks alike")

def resume(folder, config, flags, may_change):
    """The `config` and the run to go on with, of which `flags` may change only some."""
    cfg, run = find_run(folder, config)
    if cfg.iterations > 1:                  # an iteration begins after every `steps`
        may_change = may_change - {"steps"}
    for name in flags.keys() - may_change:
        if flags[name] != getattr(cfg, name):
            raise Fault(f"the run in {folder} has --{name} {getattr(cfg, name)}, not "
                        f"{flags[name]}; only {', '.join(sorted(may_change))} may change")
    cfg = dataclasses.replace(cfg, **{name: flags[name] for name in may_change & flags.keys()})
    if cfg.steps * cfg.iterations < run["step"]:
        raise Fault(f"the run in {folder} is at step {run['step']} already")
    return cfg, run

def refuse_unfinished(folder, config):
    """Raise Fault if a new run in `folder` would overwrite one that is not at its end."""
    if (folder / "checkpoint.safetensors").exists():
        cfg, run = find_run(folder, config)
        if 0 <= run["step"] < cfg.steps * cfg.iterations:
            raise Fault(f"{folder} holds a run stopped at step {run['step']}: go on with --resume, "
                        f"or choose another --out")

def open_folder(cfg, run=None):
    """Make the folder of a new run, or cut the logs of a resumed one back to its checkpoint: what
    was logged later will be made anew."""
    about = {"config": dataclasses.asdict(cfg), "command": sys.argv,
             "versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
    try:
        cfg.folder.mkdir(parents=True, exist_ok=True)
        for name, size in (run["sizes"] if run else {}).items():
            if size > (os.path.getsize(p) if (p := cfg.folder / name).exists() else 0):
                raise Fault(f"{p} is shorter than at the checkpoint")
        write_whole(cfg.folder / "run.json", json.dumps(about, indent=1))
        if run is None:
            save(cfg.folder, -1, cfg, None, {})
        for name in LOGS:
            with open(cfg.folder / name, "ab") as f:
                f.truncate(run["sizes"][name] if run else 0)
    except OSError as e:
        raise Fault(f"cannot write in {cfg.folder}: {e.strerror}") from e

def save(folder, step, cfg, config, tensors):
    """The checkpoint after `step`, -1 before there is a model; `config` is its config.json's. What
    is random and where the run stands in its problems follow from seed and step, so they are not in
    it."""
    state = {"step": step, "config": dataclasses.asdict(cfg),
             "model": config,
             "sizes": {name: os.path.getsize(folder / name) if tensors else 0 for name in LOGS}}
    write_tensors(folder / "checkpoint.safetensors", tensors, {"grpo": json.dumps(state)})

def find_run(folder, config):
    """What `save` left in `folder`: the `config`, and a dict of step, model, sizes, tensors."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise Fault(f"no run in {folder}")
    tensors, metadata = read_tensors(path)
    try:
        state = json.loads(metadata["grpo"])
        run = {name: state[name] for name in ("step", "model", "sizes")} | {"tensors": tensors}
        return config(**state["config"]), run
    except (KeyError, TypeError, ValueError) as e:
        raise Fault(f"{path} is not of a run of this program ({type(e).__name__}: {e})") from e

def log(folder, name, record):
    """Add a line to metrics.jsonl or samples.jsonl."""
    with open(folder / name, "a") as f:
        f.write(json.dumps(record) + "\n")

# --------------------------------------------------------------------------------- what one sees

def percent(results):
    """Shares by name on one line."""
    return "  ".join(f"{name} {x:.1%}" for name, x in results.items())

def show_step(step, total, done):
    """One line for a step, by the statistics of the steps `done`, with the time left; and a warning
    when three in a row taught nothing."""
    stats, times = done[-1], [stats["seconds"] for stats in done]
    shown = ("reward", "accuracy", "length", "kl", "entropy", "clip_share")
    left = statistics.median(times[-9:]) * (total - step)
    say(f"step {step}/{total}  " + "".join(f"{name} {stats[name]:.3f}  " for name in shown)
        + f"{times[-1]:.2f} s  left {clock(left)}")
    idle = [stats["dead_groups"] == 1 or stats["finished"] == 0 for stats in done]
    if idle[-3:] == [True] * 3 and idle[-4:] != [True] * 4:
        say("warning: nothing to learn from in 3 steps: in every group all rewards were equal, or "
            "no completion ended")

def on_one_line(text):
    """A text with its line breaks shown."""
    return text.replace("\n", " ⏎ ")

def coloured(encoding, ids, adv):
    """The text of tokens on one line. In a terminal green is to become likelier, red less likely,
    and in grey there is nothing to learn."""
    pieces = [encoding.decode([t]) if t in encoding.known else "" for t in ids]
    pieces = [on_one_line(piece) for piece in pieces]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        codes = (32 if a > 0 else 31 if a < 0 else 90 for a in adv)
        pieces = [f"\x1b[{code}m{piece}\x1b[0m" for code, piece in zip(codes, pieces)]
    return "".join(pieces)

def show_group(step, problem, batch, texts, group, encoding):
    """The first group of a rollout: printed, its tokens coloured by advantage, and as a record."""
    adv = [row[on].tolist() for row, on in zip(batch.adv[:group], batch.mask)]
    for ids, on, row, reward in list(zip(batch.ids, batch.mask, adv, batch.reward.sum(1)))[:4]:
        text = coloured(encoding, ids[on].tolist(), row)
        say(f"    {on_one_line(problem.prompt)}{text}   reward {reward:g}  advantage {row[0]:+.2f}")
    return {"step": step, "prompt": problem.prompt, "completions": texts[:group],
            "rewards": batch.reward[:group].sum(1).tolist(),
            "advantages": [[round(a, 4) for a in row] for row in adv]}
