"""The folder of a run:

    model.safetensors, config.json    the policy, for use; tokenizer.json beside them
    chat_frame.json                   what stands around a prompt, if there is a chat template
    checkpoint.safetensors            all that a resumed run needs, one file, JSON in its header
    run.json                          the settings, the versions, the command
    metrics.jsonl                     a line a step
    samples.jsonl                     two groups in full, at some steps (`samples.records`)
    report.html                       both as a page to look at
    warm_start/, previous/            the kept warm start; the finished run that was here before
    lock                              held by the run that is at work here
"""
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from data import Fault, read_json
from run import files, machine, pretrained, report, samples, shard, show
from run.tensors import MOMENTS, check, named_parameters, sha256_of, training_state

LOGS = ("metrics.jsonl", "samples.jsonl")

def log_metrics(folder, step, stats):
    """Add a line to metrics.jsonl, on the first rank."""
    if machine.world()[0] == 0:
        append(folder / "metrics.jsonl", {"step": step, **stats})

def log_samples(agent, step, batch, last):
    """Add two groups to samples.jsonl at the first step, every --sample_every steps and at the
    `last` one, on the first rank; and show one of the first step."""
    first = machine.world()[0] == 0
    if not (first or shard.is_dealt(agent.policy)):     # of such a policy all ranks make each pass
        return
    if step == 1 and first:
        show.group(batch, samples.widest(batch, agent.cfg.group), agent.encoding)
    if step in (1, last) or step % agent.cfg.sample_every == 0:
        for record in samples.records(agent, step, batch):
            if first:
                append(agent.cfg.folder / "samples.jsonl", record)

def append(path, record):
    """Add a line to a file of JSON lines."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(record) + "\n")
    except OSError as e:
        raise Fault(f"cannot write {path}: {e.strerror}") from e

# ---------------------------------------------------------------------------------- the checkpoint

@dataclass
class Checkpoint:
    """What a resumed run goes on with. What is random, and where the run stands in its problems,
    follow from the seed and the step, so they are not in it."""
    step: int           # the last one that was made; -1 before there is a model
    stats: dict         # of that step, if its evaluation is still to come; else empty
    beta: float         # the weight of the KL, which --target_kl steers
    model: dict         # the policy's config.json; empty before there is a model
    sizes: dict         # bytes of the logs at this step
    data: dict          # SHA-256 of the files of --train and --test, when the run began
    tensors: dict       # of `training_state`; empty where only the header was read

    def __post_init__(self):
        kinds = type(self).__annotations__ | {"beta": (int, float)}
        wrong = [n for n, x in vars(self).items() if not isinstance(x, kinds[n])]
        if wrong or not math.isfinite(self.beta) or self.sizes.keys() != set(LOGS) or not all(
                type(x) is int and x >= 0 for x in self.sizes.values()):
            raise ValueError(f"{', '.join(wrong) or 'beta or sizes'} of a wrong type or value")

def save(agent, step, batch=None, stats=()):
    """Write the policy, for use, the checkpoint after `step`, and the report, on the first rank;
    show a group of the batch. `stats`: of a step that is still to be evaluated."""
    folder, tensors = agent.cfg.folder, training_state(agent)
    shard.check_alike(tensors)
    tensors = {n: shard.for_the_first_rank(x) for n, x in tensors.items()}
    if machine.world()[0] > 0:
        return
    if batch and step > 1:
        show.group(batch, samples.widest(batch, agent.cfg.group), agent.encoding)
    policy = {n.removeprefix("policy."): x for n, x in tensors.items() if n.startswith("policy.")}
    pretrained.save(agent.policy, folder, agent.encoding.files, policy)
    state = dict(step=step, stats=dict(stats), beta=agent.beta,
                 model=pretrained.config_json(agent.policy),
                 sizes={name: size_on_disk(folder / name) for name in LOGS},
                 data=load(folder, type(agent.cfg), whole=False)[1].data)
    write_checkpoint(agent.cfg, Checkpoint(**state, tensors=tensors))
    report.write([folder])

@contextlib.contextmanager
def kept(agent, step, batch, stats):
    """In this context a Stopped leaves a checkpoint of `step`, of which only the evaluation is left
    to be made."""
    try:
        yield
    except machine.Stopped:
        if step > 0:
            save(agent, step, batch, stats)
        raise

def ahead(checkpoint):
    """The step that comes next after a Checkpoint, or None; and its statistics, if only its
    evaluation is still to be made, or nothing."""
    if checkpoint is None:
        return 0, {}
    return checkpoint.step + (not checkpoint.stats), checkpoint.stats

def size_on_disk(path):
    """Bytes of a file, all of them on the disk: a checkpoint counts on its logs."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
        return os.path.getsize(path)

def write_checkpoint(cfg, checkpoint):
    """Write checkpoint.safetensors: the settings and a Checkpoint."""
    state = {n: x for n, x in vars(checkpoint).items() if n != "tensors"}
    write_state(cfg.folder / "checkpoint.safetensors", state | {"config": dataclasses.asdict(cfg)},
                checkpoint.tensors)

def write_state(path, state, tensors):
    """Write a dict and tensors, with the SHA-256 of both, by which `load` finds any bit that has
    changed since."""
    tensors = {n: x.cpu().contiguous() for n, x in tensors.items()}
    text = json.dumps(state | {"tensors": sha256_of(tensors)})
    text = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    files.write_tensors(path, tensors, {"grpo": text})

def load(folder, config, whole=True):
    """What `save` left in `folder`: the `config` (a dataclass) and the Checkpoint, of which without
    `whole` only the header is read."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise Fault(f"no run in {folder}")
    try:
        with safe_open(path, "pt") as f:
            sha256, _, text = (f.metadata() or {})["grpo"].partition(" ")
            tensors = {n: f.get_tensor(n) for n in f.keys()} if whole else {}
        if hashlib.sha256(text.encode()).hexdigest() != sha256:
            raise Fault(f"{path} is damaged: its header is not what was written")
        state = read_json(text, path)
        if state["tensors"] != sha256_of(tensors) and whole:
            raise Fault(f"{path} is damaged: its tensors are not what was written")
        return config(**state.pop("config")), Checkpoint(**state | {"tensors": tensors})
    except (OSError, SafetensorError) as e:
        raise Fault(f"{path}: not a whole safetensors file: {e}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise Fault(f"{path} is not of a run of this program ({type(e).__name__}: {e})") from e

def refuse_foreign_code(task, given, folder):
    """Raise Fault if the task that a folder names is a file, which would be executed, and the flags
    `given` do not name it too: opening a stranger's folder runs no code."""
    if str(task).endswith(".py") and given.get("task") != task:
        raise Fault(f"the task of the run in {folder} is the file {task}, which would be executed: "
                    f"if that is wanted, add --task {task}")

def settings(folder, given=None):
    """The settings of the run in a folder, but not where it was, and only with the flags `given` a
    task that is a file; nothing for what is no run."""
    path = Path(folder) / "run.json"
    if not path.exists():
        return {}
    try:
        found = read_json(path.read_bytes(), path)["config"]
        found = {name: x for name, x in found.items() if name not in ("out", "init")}
    except (OSError, LookupError, AttributeError, TypeError) as e:
        raise Fault(f"{path}: not a run's ({e.__class__.__name__}: {e})") from e
    if given is not None:
        refuse_foreign_code(found.get("task"), given, folder)
    return found

def restore(agent, checkpoint):
    """Put what `save` wrote back in its places, and let go of the file; raises Fault for a tensor
    that is not as this run has it."""
    tensors = checkpoint.tensors
    check(agent, checkpoint)
    for name, p in named_parameters(agent).items():
        p.data.copy_(shard.like(p, tensors[name]))
        if f"opt.step.{name}" in tensors:               # not before the first optimizer step
            agent.opt.state[p] = {key: shard.like(p, tensors[f"opt.{key}.{name}"])
                                  for key in MOMENTS}
    agent.history = {n.removeprefix("history."): x.clone() for n, x in tensors.items()
                     if n.startswith("history.")}
    agent.beta = checkpoint.beta
    tensors.clear()                     # they are a map of the file, which they would keep open

def resume(folder, config, flags, may_change):
    """The `config` and the Checkpoint to go on with, of which `flags` may change only some. A run's
    folder is where it was found, whatever its settings say."""
    cfg, checkpoint = load(folder, config, whole=False)
    refuse_foreign_code(cfg.task, flags, folder)
    if cfg.iterations > 1:                  # an iteration begins after every `steps`
        may_change = may_change - {"steps"}
    for name in flags.keys() - may_change:
        if flags[name] != getattr(cfg, name):
            raise Fault(f"the run in {folder} has --{name} {getattr(cfg, name)}, not "
                        f"{flags[name]}; only {', '.join(sorted(may_change))} may change")
    changed = {name: flags[name] for name in may_change & flags.keys()}
    cfg = dataclasses.replace(cfg, **changed | {"out": str(folder)})
    if cfg.steps * cfg.iterations < checkpoint.step:
        raise Fault(f"the run in {folder} is at step {checkpoint.step} already")
    for name, sha256 in data_of(cfg).items():
        if checkpoint.data.get(name) != sha256:
            raise Fault(f"--{name} {getattr(cfg, name)} is not the file that the run in {folder} "
                        f"began with")
    return cfg, load(folder, config)[1]

def data_of(cfg):
    """SHA-256 of the files of problems, by the flag that names them."""
    return {name: hashlib.sha256(Path(getattr(cfg, name)).read_bytes()).hexdigest()
            for name in ("train", "test") if getattr(cfg, name)}

# ----------------------------------------------------------------------------------- a run begins

@contextlib.contextmanager
def alone():
    """In this context a run that begins keeps others out of its folder; after it they may come."""
    try:
        yield
    finally:
        files.unlock()

def claim(cfg, checkpoint):
    """Lock the folder of a run; raises Fault if another one is at work in it, or has gone on since
    the checkpoint was read, or is not at its end and would be overwritten."""
    folder = cfg.folder
    if machine.world()[0] == 0 and folder.exists():
        files.lock(folder / "lock")
    if checkpoint or (folder / "checkpoint.safetensors").exists():
        old, found = load(folder, type(cfg), whole=False)
        if checkpoint and found.step != checkpoint.step:
            raise Fault(f"another run has gone on in {folder} in the meantime")
        if not checkpoint and 0 <= found.step < old.steps * old.iterations:
            raise Fault(f"{folder} holds a run stopped at step {found.step}: go on with --resume, "
                        f"or choose another --out")

def keep_previous(folder):
    """Move the finished run in `folder`, and whatever files are beside it, to previous/."""
    previous = folder / "previous"
    previous.mkdir(exist_ok=True)
    for path in [*folder.iterdir()]:
        if path.is_file() and path.name != "lock":
            os.replace(path, previous / path.name)
    show.print0(f"the finished run that was in {folder} is now in {previous}")

def clear_up(folder):
    """Remove what saves that were killed have left: files as large as the model."""
    for place in (folder, folder / "warm_start"):
        for kind in ("json", "safetensors", "html"):
            for path in [*place.glob(f"*.{kind}.tmp")]:
                path.unlink()

def open_run(cfg, checkpoint=None):
    """Make the folder of a new run, or cut the logs of a resumed one back to its checkpoint: what
    was logged later will be made anew."""
    about = {"config": dataclasses.asdict(cfg), "command": sys.argv,
             "versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
    try:
        cfg.folder.mkdir(parents=True, exist_ok=True)
        claim(cfg, checkpoint)
        clear_up(cfg.folder)
        for name, size in (checkpoint.sizes if checkpoint else {}).items():
            path = cfg.folder / name
            if size > (os.path.getsize(path) if path.exists() else 0):
                raise Fault(f"{path} is shorter than at the checkpoint")
        if checkpoint is None:
            if (cfg.folder / "model.safetensors").exists():
                keep_previous(cfg.folder)
            write_checkpoint(cfg, Checkpoint(-1, {}, cfg.beta, {}, dict.fromkeys(LOGS, 0),
                                             data_of(cfg), {}))
        files.write_whole(cfg.folder / "run.json", json.dumps(about, indent=1))
        for name in LOGS:
            with open(cfg.folder / name, "ab") as f:
                f.truncate(checkpoint.sizes[name] if checkpoint else 0)
    except OSError as e:
        raise Fault(f"cannot write in {cfg.folder}: {e.strerror}") from e
