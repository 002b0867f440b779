"""Checkpoints: saving, loading, resuming; how a run takes its folder."""
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from data import UserError, load_task, read_json, task_file
from run import dist, files, pretrained, report, show
from run.config import file_of, folder_of
from run.files import LOGS

@dataclass
class Checkpoint:
    """The state of a run. Random streams and the order of problems follow from the seed and the
    step, so they are not stored."""
    step: int           # last complete step; -1 before there is a model
    stats: dict         # of that step, if it has not been evaluated yet; else empty
    beta: float         # current KL coefficient
    model: dict         # the policy's config.json; empty before there is a model
    sizes: dict         # bytes of the logs at this step
    tensors: dict       # see `training_state`

# ------------------------------------------------------------------------------------------- saving

def save(agent, step, stats=()):
    """Writes the policy and the checkpoint after `step`, on the first rank. `stats`: the step's
    statistics, if it has not been evaluated yet."""
    tensors = training_state(agent)
    dist.check_alike(tensors)
    tensors = {n: dist.for_the_first_rank(x) for n, x in tensors.items()}
    if dist.rank() > 0:
        return
    tensors = {n: x.cpu() for n, x in tensors.items()}          # copied once, for both files
    policy = {n.removeprefix("policy."): x for n, x in tensors.items() if n.startswith("policy.")}
    pretrained.save(agent.policy, agent.cfg.folder, agent.encoding.files, policy)
    model = pretrained.config_json(agent.policy)
    sizes = {name: size_on_disk(agent.cfg.folder / name) for name in LOGS}
    write_checkpoint(agent.cfg, Checkpoint(
        step=step, stats=dict(stats), beta=agent.beta, model=model, sizes=sizes, tensors=tensors))

def size_on_disk(path):
    """The bytes of a file, after syncing it to disk: checkpoints rely on the logs."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
        return os.path.getsize(path)

def write_checkpoint(cfg, checkpoint):
    """Writes the settings and a Checkpoint to checkpoint.safetensors."""
    state = vars(checkpoint) | {"config": dataclasses.asdict(cfg)}
    tensors = state.pop("tensors")
    path = cfg.folder / "checkpoint.safetensors"
    files.write_tensors(path, tensors, {"grpo": json.dumps(state)})

def end_step(agent, step, stats):
    """Logs a step and saves when due; raises Stopped after a signal."""
    cfg, stopped = agent.cfg, dist.stop_asked()
    results = {name: x for name, x in stats.items() if name == "greedy" or "@" in name}
    if results:
        show.print0(f"step {step}  held out: {show.percentages(results)}")
        keep_best(agent, step, results)
    if dist.rank() == 0:
        files.append(cfg.folder / "metrics.jsonl", {"step": step, **stats})
    last = step == cfg.total_steps
    due = step % cfg.save_every == 0 or step % cfg.steps == 0
    if last or stopped or step > 0 and due:     # at step 0 there is nothing that could be lost
        save(agent, step)
        report.refresh(cfg.folder)
    if stopped and not last:
        raise dist.Stopped(f"after step {step}")

@contextlib.contextmanager
def running(cfg):
    """A context for a run: a signal stops it after a step. It ends by unlocking the folder."""
    with dist.stoppable(show.resume_command(cfg)), files.LOCK:
        yield

@contextlib.contextmanager
def saved_if_stopped(agent, step, stats):
    """A context for an evaluation: if a signal stops it, saves a checkpoint after `step`, so that a
    resumed run starts with the evaluation."""
    try:
        yield
    except dist.Stopped:
        if step > 0:
            save(agent, step, stats)
        raise

def keep_best(agent, step, results):
    """Under --eval_every, writes the policy to best/ if the `results` of its evaluation have the
    highest pass@1 so far on so many problems and samples, with the step in best.json."""
    if not agent.cfg.eval_every:
        return
    folder = agent.cfg.folder
    best = folder / "best"
    note = best / "best.json"
    known, was = -1, files.about(best).get("config", {})
    if all(was.get(name) == getattr(agent.cfg, name) for name in ("held_out", "samples")):
        known = read_json(note.read_bytes(), note)["pass@1"] if note.exists() else -1
    dist.wait_for_all()                                      # every rank has read it
    if results["pass@1"] <= known:
        return
    policy = {n: dist.for_the_first_rank(p.detach())
              for n, p in dist.parameters(agent.policy).items()}
    if dist.rank() == 0:
        note.unlink(missing_ok=True)            # its last file: without it the rest counts for none
        pretrained.save(agent.policy, best, agent.encoding.files, policy)
        files.write_whole(best / "run.json", (folder / "run.json").read_text())
        files.write_whole(note, json.dumps({"step": step, **results}))

# ------------------------------------------------------------------------------------------ loading

def load(folder, config):
    """Reads what `save` wrote: an instance of the dataclass `config`, and the Checkpoint, whose
    tensors are mapped from the file. Raises UserError if it is missing, cut off or not a run's."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise UserError(f"no run in {folder}")
    try:
        with safe_open(path, "pt") as f:
            state = json.loads(f.metadata()["grpo"])
            tensors = {n: f.get_tensor(n) for n in f.keys()}
        return config(**state.pop("config")), Checkpoint(**state, tensors=tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is cut off, or not of this version of grpo.py ({e}): choose "
                        f"another --out, or delete the file") from e

def refuse_foreign_code(found, given, folder):
    """Raises UserError if the settings `found` in a folder name a task or an algorithm in a file,
    and the flags `given` name none: opening somebody else's folder must not execute code."""
    for name in ("task", "algo"):
        file = str(found.get(name))
        if file.endswith(".py") and name not in given:
            raise UserError(f"the run in {folder} has its {name} in the file {file}, which would "
                            f"be executed; to allow it, add --{name} {file}")

def settings(mode, given, config):
    """The flags `given`, after the settings of a run's folder, which they override, and its
    Checkpoint or None: of the run in --out, to resume it, or of that in --init or --out, if there
    is one, to evaluate its model or ask it; the folder is then `init`. A new run has the flags."""
    task = given.get("task", config.task)
    folder = folder_of({"task": task} | load_task(task).DEFAULTS | given)
    if mode.resume:
        cfg, saved = resume(folder, config, given)
        return vars(cfg), saved
    if not mode.eval_only and mode.ask is None:
        return given, None
    folder = given.get("init", folder)
    record = files.about(folder)
    names = {f.name for f in dataclasses.fields(config)} - {"out", "algo"}
    known = {name: x for name, x in record.get("config", {}).items() if name in names}
    refuse_foreign_code(known, given, folder)
    args = known.pop("task_args", {})
    for name in record.get("data", {}).keys() & args.keys():
        if not Path(str(args[name])).exists():
            del args[name]              # an evaluation may do without, or says which flag it needs
    if "task" in known and given.get("task", known["task"]) == known["task"]:
        known |= args
    return known | {"init": str(folder)} | given, None

# The settings that a resumed run may change: how long it runs, what it measures and keeps, and what
# the machine needs, which changes a result only by rounding.
MAY_CHANGE = {"out", "steps", "eval_every", "held_out", "samples", "save_every", "micro_tokens",
              "recompute", "device", "dtype", "compile", "cache", "shard"}

def resume(folder, config, flags):
    """The Config and the Checkpoint to continue from. `flags` may change only the settings named in
    MAY_CHANGE, and the path of a file that was moved. The run stays in `folder`, even if that was
    moved."""
    cfg, checkpoint = load(folder, config)
    refuse_foreign_code(vars(cfg), flags, folder)
    may_change = MAY_CHANGE if cfg.iterations == 1 else MAY_CHANGE - {"steps"}  # of each iteration
    has = vars(cfg) | cfg.task_args
    began = data_at_first(cfg, folder)
    named = data_of({name: x for name, x in flags.items() if name in began})
    changed = {}
    for name, value in flags.items():
        if name in may_change or name in named and named[name] == began[name]:
            changed[name] = value
        elif name in named and value != has.get(name):
            raise UserError(f"the run in {folder} has --{name} {has.get(name)}, not {value}, which "
                            f"has other content")
        elif value != has.get(name):
            raise UserError(f"the run in {folder} has --{name} {has.get(name)}, not {value}; "
                            f"a resumed run may change only {', '.join(sorted(may_change))}, and "
                            f"the path of a file that was moved")
    args = {name: changed.pop(name, x) for name, x in cfg.task_args.items()}
    cfg = dataclasses.replace(cfg, **changed | {"out": str(folder), "task_args": args})
    if gone := sorted(began.keys() - data_of(code_and_problems(cfg)).keys()):
        flags = " ".join(f"--{name} FILE" for name in gone)
        raise UserError(f"{has[gone[0]]}, a file of the run in {folder}, is gone: if it was moved, "
                        f"add {flags}")
    if cfg.total_steps < checkpoint.step:
        raise UserError(f"the run in {folder} is already at step {checkpoint.step}")
    return cfg, checkpoint

# ------------------------------------------------------------------------------------- a run begins

def open_run(cfg, checkpoint=None):
    """Locks the folder of a new run, or of one that is resumed from a Checkpoint; writes what it is
    to run.json, and cuts its logs to the Checkpoint's step, as later steps are repeated. Raises
    UserError if another process runs there or an unfinished run would be lost."""
    folder = cfg.folder
    folder.mkdir(parents=True, exist_ok=True)
    files.lock(folder / "lock")
    files.clear_up(folder)
    data = data_of(code_and_problems(cfg))
    file = file_of(cfg.algo)
    functions = file.read_bytes() if file else b""      # it may be among what is moved away
    if checkpoint:
        data |= check_data(cfg, data)
    else:
        checkpoint = begin_anew(cfg)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    record = dict(config=dataclasses.asdict(cfg), command=sys.argv, versions=versions, data=data)
    files.write_whole(folder / "run.json", json.dumps(record, indent=1))
    if functions:
        files.write_whole(folder / "functions.py", functions)
    else:                                   # of a run killed at step 0
        (folder / "functions.py").unlink(missing_ok=True)
    for name in LOGS:
        with open(folder / name, "ab") as f:
            f.truncate(min(f.tell(), checkpoint.sizes[name]))

def begin_anew(cfg):
    """Moves a finished run out of the folder, and writes a Checkpoint without a model."""
    folder = cfg.folder
    if (folder / "checkpoint.safetensors").exists():
        old, found = load(folder, type(cfg))
        if 0 < found.step < old.total_steps:
            raise UserError(f"{folder} holds a run stopped at step {found.step}: continue it with "
                            f"--resume, or choose another --out")
    if (folder / "model.safetensors").exists() or (folder / files.MOVING).exists():
        files.keep_previous(folder)
    shutil.rmtree(folder / "best", ignore_errors=True)          # of a run killed at step 0
    checkpoint = Checkpoint(step=-1, stats={}, beta=cfg.beta, model={},
                            sizes=dict.fromkeys(LOGS, 0), tensors={})
    write_checkpoint(cfg, checkpoint)
    return checkpoint

def code_and_problems(cfg):
    """The settings that may name a file with code or with problems."""
    return {"task": cfg.task, "algo": cfg.algo, **cfg.task_args}

def data_of(settings):
    """SHA-256 of the files that `code_and_problems` name, by setting."""
    paths = dict(settings)
    if "task" in paths:
        paths["task"] = task_file(paths["task"])
    if "algo" in paths:
        paths["algo"] = file_of(paths["algo"])
    return {name: hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for name, path in paths.items()
            if isinstance(path, (str, Path)) and Path(path).is_file()}

def data_at_first(cfg, folder):
    """The `data_of` a run when it began, as its run.json has it."""
    known = files.about(folder).get("data", {})
    return {name: x for name, x in known.items() if name in code_and_problems(cfg)}

def check_data(cfg, data):
    """What a resumed run began with. Raises UserError if its problems or its algorithm are others
    now, in `data`; prints a note if its task is."""
    if not files.about(cfg.folder):
        show.print0(f"note: without its run.json, whether a file has changed since the run in "
                    f"{cfg.folder} began is not known")
    began = data_at_first(cfg, cfg.folder)
    for name in began:
        if data.get(name) == began[name]:
            continue
        file = code_and_problems(cfg)[name]
        changed = f"{file} has changed since the run in {cfg.folder} began"
        if name != "task":
            raise UserError(f"{changed}: restore the file, or start a new run")
        show.print0(f"note: {changed}")
    return began

# -------------------------------------------------------------------------------- a run's tensors

ROLES = ("policy", "ref", "critic", "reward_model")

def named_parameters(agent):
    """The parameters of a run by role and name; of sharded ones, this rank's shards."""
    modules = {role: getattr(agent, role) for role in ROLES}
    return {f"{role}.{n}": p for role, module in modules.items() if module is not None
            for n, p in dist.parameters(module).items()}

def training_state(agent):
    """Every tensor of a run by name: the parameters by role, the optimizer's state as
    `opt.<key>.<parameter>`, the history of labelled rows, and the state of an algorithm's own."""
    named = named_parameters(agent)
    moments = {f"opt.{key}.{n}": x for n, p in named.items()
               for key, x in agent.opt.state.get(p, {}).items()}
    for n, x in agent.state.items():
        if not isinstance(x, torch.Tensor):
            raise UserError(f"agent.state[{n!r}] must be a tensor, not {x!r:.100}")
    others = {f"{kind}.{n}": x for kind in ("history", "state")
              for n, x in getattr(agent, kind).items()}
    return {n: p.detach() for n, p in named.items()} | moments | others

def restore(agent, checkpoint):
    """Copies the tensors of a Checkpoint into models and optimizer, then releases the file; raises
    UserError if they do not fit this run's models."""
    named = named_parameters(agent)
    tensors = checkpoint.tensors
    want = {n: p.shape for n, p in named.items()}
    have = {n: x.shape for n, x in tensors.items() if n.split(".")[0] in ROLES}
    if wrong := want.items() ^ have.items():
        raise UserError(f"{agent.cfg.folder}: the checkpoint is of another model: "
                        f"{min(wrong)[0]} differs")
    for n, p in named.items():
        p.data.copy_(dist.like(p, tensors[n]))
    restore_optimizer(agent.opt, named, tensors)
    agent.history, agent.state = ({n.removeprefix(kind): x.clone() for n, x in tensors.items()
                                   if n.startswith(kind)} for kind in ("history.", "state."))
    agent.beta = checkpoint.beta
    tensors.clear()                     # they are mapped from the file and keep it open

def restore_optimizer(opt, named, tensors):
    """Gives an optimizer its tensors of `training_state`; `named`: the parameters by name."""
    names = {p: n for n, p in named.items()}
    params = [p for group in opt.param_groups for p in group["params"]]
    numbers = {names[p]: i for i, p in enumerate(params)}
    state = opt.state_dict()
    for name, x in tensors.items():
        if name.startswith("opt."):
            _, key, parameter = name.split(".", 2)
            p = named[parameter]
            if "exp_avg" in key and x.shape != p.shape:     # a fused kernel would write past it
                raise UserError(f"the checkpoint's tensor {name} is of another shape")
            moments = state["state"].setdefault(numbers[parameter], {})
            moments[key] = dist.like(p, x) if x.shape == p.shape else x.clone()
    opt.load_state_dict(state)
