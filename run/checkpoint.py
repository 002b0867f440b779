"""Checkpoints: saving, loading, resuming; how a run takes its folder."""
import contextlib
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from data import UserError, load_task, read_json
from run import config, dist, files, pretrained, report, signals
from run.terminal import print0

@dataclasses.dataclass
class Checkpoint:
    """The state of a run. Random streams follow from the seed and the step: they are not stored."""
    step: int      # last complete step; -1 before there is a model
    beta: float    # current KL coefficient
    model: dict    # the policy's config.json; empty before there is a model
    metrics: int   # bytes of metrics.jsonl at this step
    samples: int   # bytes of samples.jsonl
    tensors: dict  # see `training_state`

    def __post_init__(self):
        config.check(self, dict(step=-1, metrics=0, samples=0), {})

# ----------------------------------------------------------------------- saving

def save(agent, step):
    """Writes the policy and the checkpoint after `step`, on the first rank."""
    tensors = training_state(agent)
    dist.check_alike(tensors)
    if dist.rank() > 0:
        return
    pretrained.save(agent.policy, agent.cfg.folder, agent.encoding.files)
    model = pretrained.config_json(agent.policy)
    sizes = []
    for name in files.LOGS:
        with open(agent.cfg.folder / name, "rb+") as f:
            os.fsync(f.fileno())  # a checkpoint relies on them
            sizes.append(f.seek(0, os.SEEK_END))
    write_checkpoint(agent.cfg, Checkpoint(step, agent.beta, model, *sizes, tensors))

def write_checkpoint(cfg, checkpoint):
    """Writes the settings and a Checkpoint to checkpoint.safetensors."""
    state = vars(checkpoint) | {"config": dataclasses.asdict(cfg)}
    tensors = state.pop("tensors")
    path = cfg.folder / "checkpoint.safetensors"
    files.write_tensors(path, tensors, {"grpo": json.dumps(state)})

def end_step(agent, step, stats):
    """Logs a step and saves when due; raises Stopped after a signal."""
    cfg, stopped = agent.cfg, signals.stop_asked()
    for name, x in agent.state.items():
        if not isinstance(x, torch.Tensor):
            raise UserError(f"agent.state[{name!r}] must be a tensor, not {x!r:.100}")
    results = {name: x for name, x in stats.items() if name == "greedy" or "@" in name}
    if results:
        print0(f"step {step}  held out: {report.percentages(results)}")
        keep_best(agent, step, results)
    if dist.rank() == 0:
        files.append(cfg.folder / "metrics.jsonl", {"step": step, **stats})
    last = step == cfg.total_steps
    due = step % cfg.save_every == 0 or step % cfg.steps == 0
    if last or stopped or due and (step > 0 or cfg.warm_steps):  # it has learned something
        save(agent, step)
        report.refresh(cfg.folder, last or stopped)
    if last:
        files.LOCK.close()  # a notebook's process goes on
    if stopped and not last:
        raise signals.Stopped(f"after step {step}")

@contextlib.contextmanager
def running(cfg, saved=None):
    """A context for a run, or for the rest of one from a Checkpoint, that a signal stops after a
    step; exceptions say how to go on."""
    command = report.resume_command(cfg)
    path = cfg.folder.absolute() / "checkpoint.safetensors"     # a reward may change the directory
    earlier = not saved and path.exists() and path.stat().st_mtime_ns  # another run's
    try:
        with signals.stoppable(command), files.LOCK:
            yield
    except Exception as e:
        if path.exists() and path.stat().st_mtime_ns != earlier:
            e.add_note(f"the last checkpoint is kept; continue with: {command}")
        raise

def keep_best(agent, step, results):
    """Under --eval_every, writes best/ if pass@1 is the highest so far."""
    cfg = agent.cfg
    if not cfg.eval_every or dist.rank() > 0:
        return
    best = cfg.folder / "best"
    note = best / "best.json"
    known = read_json(note.read_bytes(), note) if note.exists() else {}
    if results["pass@1"] <= known.get("pass@1", -1):
        return
    note.unlink(missing_ok=True)  # its last file: without it the rest counts for none
    pretrained.save(agent.policy, best, agent.encoding.files)
    files.write_whole(best / "run.json", (cfg.folder / "run.json").read_text())
    files.write_whole(note, json.dumps({"step": step, **results}))

# ---------------------------------------------------------------------- loading

def load(folder, kind, locks=False):
    """The dataclass `kind` and the Checkpoint of a run, whose tensors are mapped from the file."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise UserError(f"no run in {folder}")
    if locks and (folder / files.MARK).exists() and os.environ.get("RANK", "0") == "0":
        files.lock(folder)  # what follows is of a run that has ended
    try:
        with safe_open(path, "pt") as f:
            state = read_json(f.metadata()["grpo"], "its header")
            tensors = {n: f.get_tensor(n) for n in f.keys()}
        return kind(**state.pop("config")), Checkpoint(**state, tensors=tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, UserError) as e:
        raise UserError(f"{path} is cut off, or not of this version of grpo.py ({e}): choose "
                        f"another --out, or delete the file") from e

def refuse_foreign_code(found, given, folder):
    """UserError for a file with code that a folder's settings name, but not the flags."""
    for name in ("task", "algo"):
        file = str(found.get(name))
        if file.endswith(".py") and name not in given:
            raise UserError(f"the run in {folder} has its {name} in the file {file}; to allow it "
                            f"to be executed, add --{name} {file}")

def settings(mode, given, kind):
    """The settings, flags over those of a run that is used; the Checkpoint of one to resume."""
    name = given.get("task", kind.task)
    task = load_task(name)
    folder = config.folder_of({"task": name} | task.DEFAULTS | given)
    if mode.resume:
        cfg, saved = resume(folder, kind, given)
        return vars(cfg), saved
    if not mode.eval_only and mode.ask is None:
        if not mode.report:
            check_folder(folder, kind)
        return given, None
    if {"init", "out"} <= given.keys():
        print0("note: nothing is written to --out")
    folder = given.get("init", folder)
    record = files.about(folder)
    names = {f.name for f in dataclasses.fields(kind)} - {"out"}
    known = {name: x for name, x in record.get("config", {}).items() if name in names}
    if str(known.get("algo")).endswith(".py") and "algo" not in given:
        print0(f"note: without the run's --algo {known.pop('algo')}, which may sample otherwise")
    refuse_foreign_code(known, given, folder)
    args, own = known.pop("task_args", {}), config.own_settings(task, kind)
    if same(given.get("task", name), known.get("task", name)):
        known |= {name: x for name, x in args.items() if name in own}
    return known | {"init": str(folder)} | given, None

def same(one, other):
    """Whether two settings are equal, or paths of a file that was moved."""
    if isinstance(one, str) and isinstance(other, str):
        return Path(one).name.removesuffix(".py") == Path(other).name.removesuffix(".py")
    return one == other

# Of a resumed run: its length, what it measures and keeps, what changes only the rounding.
MAY_CHANGE = {"out", "steps", "eval_every", "held_out", "samples", "save_every", "micro_tokens",
              "recompute", "device", "dtype", "compile", "cache", "shared_prefixes"}

def resume(folder, kind, flags):
    """The Config and the Checkpoint to continue from; `flags` may change some of the settings."""
    cfg, checkpoint = load(folder, kind, True)
    refuse_foreign_code(vars(cfg), flags, folder)
    may_change = MAY_CHANGE if cfg.iterations == 1 else MAY_CHANGE - {"steps"}  # of each iteration
    has = vars(cfg) | cfg.task_args
    for name, value in flags.items():
        is_moved = name in {"task", "algo", *cfg.task_args} and same(value, has[name])
        if name not in may_change and value != has.get(name) and not is_moved:
            raise UserError(f"the run in {folder} has --{name} {has.get(name)}, not {value}; "
                            f"a resumed run may change only {', '.join(sorted(may_change))}, and "
                            f"the path of a file that was moved")
    args = {name: flags.get(name, x) for name, x in cfg.task_args.items()}
    flags = {name: x for name, x in flags.items() if name not in args}
    changed = dataclasses.replace(cfg, **flags | {"out": str(folder), "task_args": args})
    if changed.total_steps < checkpoint.step:
        raise UserError(f"the run in {folder} is already at step {checkpoint.step}")
    if changed.total_steps == checkpoint.step:
        print0("note: the run is complete: it goes on with more --steps")
    return changed, checkpoint

def compare(folder, problems):
    """Notes that `problems`, by setup.fingerprint, were others when the run in a folder, or above
    it, began."""
    about = files.about(folder) or files.about(Path(folder).parent)
    for name, x in problems.items():
        if about.get("data", {}).get(name, x) != x:
            print0(f"warning: the problems are others than when the run in {folder} began: seed "
                   f"what draws them, sort sets")

# ----------------------------------------------------------------- a run begins

def check_folder(folder, kind):
    """Whether a new run's folder has a finished one, to be kept; UserError for anything else."""
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found and files.MARK not in found:
        raise UserError(f"{folder} holds files that are not of a run: choose another --out")
    if "checkpoint.safetensors" in found:
        old, saved = load(folder, kind, True)
        if 0 < saved.step < old.total_steps:
            raise UserError(f"{folder} holds a run stopped at step {saved.step}: --resume it, or "
                            f"choose another --out")
    return "model.safetensors" in found

def open_run(cfg, checkpoint, data):
    """Locks a run's folder, writes run.json, with the first `data`, cuts logs to a Checkpoint."""
    folder = cfg.folder
    is_kept = checkpoint is None and check_folder(folder, type(cfg))
    folder.mkdir(parents=True, exist_ok=True)
    files.lock(folder)
    files.clear_up(folder)
    if checkpoint:
        data = data | files.about(folder).get("data", {})
    else:
        if is_kept:
            files.keep_previous(folder)
        shutil.rmtree(folder / "best", ignore_errors=True)      # of a run killed at step 0
        checkpoint = Checkpoint(-1, cfg.beta, {}, 0, 0, {})
        write_checkpoint(cfg, checkpoint)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    record = dict(config=dataclasses.asdict(cfg), command=sys.argv, versions=versions, data=data)
    files.write_whole(folder / "run.json", json.dumps(record, indent=1))
    for name, size in zip(files.LOGS, (checkpoint.metrics, checkpoint.samples)):
        with open(folder / name, "ab+") as f:
            f.truncate(min(f.tell(), size))  # somebody may have shortened it

# -------------------------------------------------------------- a run's tensors

ROLES = ("policy", "ref", "critic", "reward_model")
OTHERS = ("history", "state")       # tensors by name, which may be any

def named_parameters(agent):
    """The parameters of a run by role and name."""
    modules = {role: getattr(agent, role) for role in ROLES}
    return {f"{role}.{n}": p for role, module in modules.items() if module is not None
            for n, p in module.named_parameters()}

def training_state(agent):
    """A run's tensors: parameters by role, `opt.<key>.<parameter>` and rates, other state."""
    named = named_parameters(agent)
    moments = {f"opt.{key}.{n}": x for n, p in named.items()
               for key, x in agent.opt.state.get(p, {}).items()}
    rates = {f"rate.{i}": torch.tensor([group["lr"], group["initial_lr"]], dtype=torch.float64)
             for i, group in enumerate(agent.opt.param_groups)}
    others = {f"{kind}.{n}": x for kind in OTHERS for n, x in getattr(agent, kind).items()}
    return {n: p.detach() for n, p in named.items()} | moments | rates | others

def restore(agent, checkpoint):
    """Copies the tensors of a Checkpoint into models and optimizer, then releases the file."""
    if checkpoint.step > 0:  # a step with gradients of 0 makes the moments, to be filled
        for p in dist.trained(agent.opt):
            p.grad = torch.zeros_like(p)
        agent.opt.step()
        agent.opt.zero_grad()
    tensors, others = checkpoint.tensors, {kind: {} for kind in OTHERS}
    want = training_state(agent)
    for name in sorted(want.keys() | tensors.keys()):
        x, into = tensors.get(name), want.get(name)
        kind, _, rest = name.partition(".")
        if kind in OTHERS:
            others[kind][rest] = x.clone()
        elif None in (x, into) or x.shape != into.shape:
            raise UserError(f"{agent.cfg.folder}: the checkpoint is of another model: {name}")
        else:
            into.copy_(x)
    for i, group in enumerate(agent.opt.param_groups):
        group["lr"], group["initial_lr"] = want[f"rate.{i}"].tolist()
    agent.history, agent.state = others.values()
    agent.beta = checkpoint.beta
    tensors.clear()  # they are mapped from the file and keep it open
