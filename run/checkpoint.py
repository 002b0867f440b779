"""Checkpoints: saving, loading, validating, resuming; claiming a run's folder."""
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from data import UserError, read_bytes, read_json, regular, task_file
from run import config, dist, files, pretrained, show
from run.files import LOGS, clear_up, keep_previous

@dataclass
class Checkpoint:
    """The state of a run. Random streams and the order of problems follow from the seed and the
    step, so they are not stored."""
    step: int           # last complete step; -1 before there is a model
    stats: dict         # of that step, if it has not been evaluated yet; else empty
    beta: float         # current KL coefficient, see --target_kl
    model: dict         # the policy's config.json; empty before there is a model
    sizes: dict         # bytes of the logs at this step
    data: dict          # SHA-256 of the task's and the problems' files when the run began
    tensors: dict       # see `training_state`; empty if only the header was read

    def __post_init__(self):
        kinds = type(self).__annotations__ | {"beta": (int, float)}
        wrong = [n for n, x in vars(self).items() if not isinstance(x, kinds[n])]
        if wrong or not math.isfinite(self.beta) or self.sizes.keys() != set(LOGS) or not all(
                type(x) is int and x >= 0 for x in self.sizes.values()):
            raise ValueError(f"{', '.join(wrong) or 'beta or sizes'} has a wrong type or value")
        if (self.step < 0) is bool(self.model):
            raise ValueError("only before step 0 there is no model")

def save(agent, step, stats=()):
    """Writes the policy and the checkpoint after `step`, on the first rank. `stats`: the step's
    statistics, if it has not been evaluated yet."""
    folder, tensors = agent.cfg.folder, training_state(agent)
    dist.check_alike(tensors)
    tensors = {n: dist.for_the_first_rank(x) for n, x in tensors.items()}
    if dist.rank() > 0:
        return
    tensors = {n: x.cpu() for n, x in tensors.items()}          # copied once, for both files
    policy = {n.removeprefix("policy."): x for n, x in tensors.items() if n.startswith("policy.")}
    pretrained.save(agent.policy, folder, agent.encoding.files, policy)
    state = dict(step=step, stats=dict(stats), beta=agent.beta,
                 model=pretrained.config_json(agent.policy),
                 sizes={name: size_on_disk(folder / name) for name in LOGS},
                 data=load(folder, type(agent.cfg), whole=False)[1].data)
    write_checkpoint(agent.cfg, Checkpoint(**state, tensors=tensors))

def keep_best(agent, step, results):
    """Under --eval_every, writes the policy to best/ if the `results` of its evaluation have the
    highest pass@1 of the run so far, with the run's settings and the step in best.json."""
    if not agent.cfg.eval_every:
        return
    best = agent.cfg.folder / "best"
    note = best / "best.json"
    known = read_json(read_bytes(note), note).get("pass@1", 0) if note.exists() else -1
    dist.wait_for_all()                                      # every rank has read it
    if results["pass@1"] > known:
        policy = {n: dist.for_the_first_rank(p.detach())
                  for n, p in dist.parameters(agent.policy).items()}
        if dist.rank() == 0:
            pretrained.save(agent.policy, best, agent.encoding.files, policy)
            files.write_whole(best / "run.json", (agent.cfg.folder / "run.json").read_text())
            files.write_whole(note, json.dumps({"step": step, **results}))

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

def size_on_disk(path):
    """The bytes of a file, after syncing it to disk: checkpoints rely on the logs."""
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
        return os.path.getsize(path)

def write_checkpoint(cfg, checkpoint):
    """Writes the settings and a Checkpoint to checkpoint.safetensors."""
    state = {n: x for n, x in vars(checkpoint).items() if n != "tensors"}
    write_state(cfg.folder / "checkpoint.safetensors", state | {"config": dataclasses.asdict(cfg)},
                checkpoint.tensors)

def write_state(path, state, tensors):
    """Writes a dict and tensors with a SHA-256 of each, so that `load` detects any changed bit."""
    tensors = {n: x.cpu().contiguous() for n, x in tensors.items()}
    text = json.dumps(state | {"tensors": sha256_of(tensors)})
    text = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    files.write_tensors(path, tensors, {"grpo": text})

def load(folder, config, whole=True):
    """Reads what `save` wrote: an instance of the dataclass `config`, and the Checkpoint, without
    its tensors unless `whole`. Raises UserError if the file is missing, damaged or not a run's."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise UserError(f"no run in {folder}")
    try:
        with safe_open(regular(path), "pt") as f:
            sha256, _, text = (f.metadata() or {})["grpo"].partition(" ")
            tensors = {n: f.get_tensor(n) for n in f.keys()} if whole else {}
        if hashlib.sha256(text.encode()).hexdigest() != sha256:
            raise UserError(f"{path} is damaged: its header has changed")
        state = read_json(text, path)
        if state["tensors"] != sha256_of(tensors) and whole:
            raise UserError(f"{path} is damaged: its tensors have changed")
        return config(**state.pop("config")), Checkpoint(**state | {"tensors": tensors})
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path} is not a complete safetensors file: {e}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} was not written by this version of grpo.py: choose another --out, "
                        f"or delete the file") from e

def flag_of(name):
    """The flag that sets a setting."""
    return "algo" if name == "functions" else name

def refuse_foreign_code(found, given, folder):
    """Raises UserError if the settings `found` in a folder name a task or functions in a file that
    the flags `given` do not: opening somebody else's folder must not execute code."""
    for name in ("task", "functions"):
        file = found.get(name)
        if str(file).endswith(".py") and given.get(name) != file:
            raise UserError(f"the run in {folder} has its {name} in the file {file}, which would "
                            f"be executed; to allow it, add --{flag_of(name)} {file}")

def settings(folder, given):
    """The flags `given` with the settings of the run in a folder, if there is one, for all that
    they leave open; `init` is the folder. See `refuse_foreign_code`."""
    path, found = Path(folder) / "run.json", {}
    try:
        if path.exists():
            found = read_json(read_bytes(path), path)["config"]
            found = {name: x for name, x in found.items() if name not in ("out", "functions")}
            refuse_foreign_code(found, given, folder)
    except (OSError, LookupError, AttributeError, TypeError) as e:
        raise UserError(f"{path} was not written by grpo.py ({type(e).__name__}: {e})") from e
    return found | {"init": str(folder)} | given

def restore(agent, checkpoint):
    """Copies the tensors of a Checkpoint into models and optimizer, then releases the file; raises
    UserError if they do not fit this run."""
    tensors = checkpoint.tensors
    check_tensors(agent, checkpoint)
    named = named_parameters(agent)
    for name, p in named.items():
        p.data.copy_(dist.like(p, tensors[name]))
    restore_optimizer(agent.opt, named, tensors)
    agent.history = {n.removeprefix("history."): x.clone() for n, x in tensors.items()
                     if n.startswith("history.")}
    agent.beta = checkpoint.beta
    tensors.clear()                     # they are mapped from the file and keep it open

# Settings, when a run is resumed. A size of micro-batches changes a gradient only by rounding.
MAY_CHANGE = {"out", "steps", "eval_every", "save_every", "micro_tokens"}

def resume(folder, config, flags):
    """The Config and the Checkpoint to continue from. `flags` may change only the settings named in
    MAY_CHANGE. The run stays in `folder`, even if it was moved there."""
    cfg, checkpoint = load(folder, config, whole=False)
    refuse_foreign_code(vars(cfg), flags, folder)
    may_change = MAY_CHANGE - ({"steps"} if cfg.iterations > 1 else set())  # of each iteration
    for name in flags.keys() - may_change:
        if flags[name] != getattr(cfg, name):
            raise UserError(f"the run in {folder} has --{flag_of(name)} {getattr(cfg, name)}, not "
                            f"{flags[name]}; a resumed run may change only "
                            f"{', '.join(sorted(may_change))}")
    changed = {name: flags[name] for name in may_change & flags.keys()}
    cfg = dataclasses.replace(cfg, **changed | {"out": str(folder)})
    if cfg.steps * cfg.iterations < checkpoint.step:
        raise UserError(f"the run in {folder} is already at step {checkpoint.step}")
    for name, sha256 in data_of(cfg).items():
        if checkpoint.data.get(name) != sha256:
            raise UserError(f"--{flag_of(name)} {getattr(cfg, name)} has changed since the run in "
                            f"{folder} began: restore the file, or start a new run")
    return cfg, load(folder, config)[1]

def data_of(cfg):
    """SHA-256 of the files with problems, and of an algorithm's, by the flag that names them."""
    paths = {"train": cfg.train, "test": cfg.test, "functions": config.file_of(cfg.functions)}
    return {name: hash_of(path) for name, path in paths.items() if path}

def hash_of(path):
    """SHA-256 of a file."""
    return hashlib.sha256(regular(path).read_bytes()).hexdigest()

# ------------------------------------------------------------------------------------- a run begins

def claim(cfg, checkpoint):
    """Locks the folder of a run; raises UserError if another process is running there or continued
    the run after the checkpoint was read, or if an unfinished run would be overwritten."""
    folder = cfg.folder
    if dist.rank() == 0 and folder.exists():
        files.lock(folder / "lock")
    if checkpoint or (folder / "checkpoint.safetensors").exists():
        old, found = load(folder, type(cfg), whole=False)
        if checkpoint and found.step != checkpoint.step:
            raise UserError(f"another process has continued the run in {folder} in the meantime")
        if not checkpoint and 0 < found.step < old.steps * old.iterations:
            raise UserError(f"{folder} holds a run stopped at step {found.step}: continue it with "
                            f"--resume, or choose another --out")

def open_run(cfg, checkpoint=None):
    """Creates the folder of a new run, or truncates the logs of a resumed one to its checkpoint, as
    later steps are repeated; notes that a resumed run's task has changed."""
    task = hash_of(task_file(cfg.task))
    if checkpoint and checkpoint.data.get("task", task) != task:
        show.print0(f"note: {task_file(cfg.task)} has changed since the run began")
    about = {"config": dataclasses.asdict(cfg), "command": sys.argv,
             "versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
    try:
        cfg.folder.mkdir(parents=True, exist_ok=True)
        claim(cfg, checkpoint)
        clear_up(cfg.folder)
        for name, size in (checkpoint.sizes if checkpoint else {}).items():
            path = cfg.folder / name
            if size > (os.path.getsize(path) if path.exists() else 0):
                raise UserError(f"{path} is shorter than at the checkpoint")
        if checkpoint is None:
            if (cfg.folder / "model.safetensors").exists():
                keep_previous(cfg.folder)
            shutil.rmtree(cfg.folder / "best", ignore_errors=True)     # of a run killed at step 0
            write_checkpoint(cfg, Checkpoint(
                step=-1, stats={}, beta=cfg.beta, model={}, sizes=dict.fromkeys(LOGS, 0),
                data=data_of(cfg) | {"task": task}, tensors={}))
        files.write_whole(cfg.folder / "run.json", json.dumps(about, indent=1))
        if file := config.file_of(cfg.functions):
            files.write_whole(cfg.folder / "functions.py", file.read_bytes())
        for name in LOGS:
            with open(regular(cfg.folder / name), "ab") as f:
                f.truncate(checkpoint.sizes[name] if checkpoint else 0)
    except OSError as e:
        raise UserError(f"cannot write in {cfg.folder}: {e.strerror}") from e


ROLES = ("policy", "ref", "critic", "reward_model")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")             # at least these, if the optimizer is Adam
ROWS = dict(ids=torch.int64, mask=torch.bool, ends=torch.bool, label=torch.float32)

def modules(agent):
    """The modules that a run has, by role."""
    return {role: getattr(agent, role) for role in ROLES if getattr(agent, role) is not None}

def named_parameters(agent):
    """The parameters of a run by role and name; of sharded ones, this rank's shards."""
    return {f"{role}.{n}": p for role, module in modules(agent).items()
            for n, p in dist.parameters(module).items()}

def training_state(agent):
    """Every tensor of a run by name: the parameters by role, the optimizer's state, and the
    history of labelled rows."""
    named = named_parameters(agent)
    rows = {f"history.{n}": x for n, x in agent.history.items()}
    return {n: p.detach() for n, p in named.items()} | optimizer_state(agent.opt, named) | rows

def optimizer_state(opt, named):
    """The state of any optimizer as tensors `opt.<key>.<parameter>`; named: parameters by name."""
    state = {f"opt.{key}.{n}": x for n, p in named.items()
             for key, x in opt.state.get(p, {}).items() if x is not None}
    if wrong := [n for n, x in state.items() if not isinstance(x, torch.Tensor)]:
        raise UserError(f"a checkpoint cannot hold {wrong[0]}: it is no tensor")
    return state

def restore_optimizer(opt, named, tensors):
    """Gives an optimizer the state that `optimizer_state` returned."""
    names = {p: n for n, p in named.items()}
    params = [p for group in opt.param_groups for p in group["params"]]
    keys, state = state_keys(tensors, names.values()), {}
    for i, p in enumerate(params):
        found = {key: tensors.get(f"opt.{key}.{names[p]}") for key in keys}
        state[i] = {key: dist.like(p, x) if x.shape == p.shape else x.clone()
                    for key, x in found.items() if x is not None}
    groups = opt.state_dict()["param_groups"]
    opt.load_state_dict({"state": {i: x for i, x in state.items() if x}, "param_groups": groups})

def state_keys(tensors, names):
    """The keys in the optimizer's state of any of these parameters: exp_avg, momentum_buffer."""
    parts = [n.split(".", 2) for n in tensors if n.startswith("opt.")]
    return sorted({part[1] for part in parts if part[-1] in names})

def wanted(agent, checkpoint):
    """The tensors that a Checkpoint must have: for each name one of the right shape and dtype. A
    fused optimizer would write beyond a moment smaller than its parameter; any other one may have
    what it likes for each parameter."""
    want, have = named_parameters(agent), checkpoint.tensors
    names = {p: n for n, p in want.items()}
    least = set(MOMENTS if isinstance(agent.opt, torch.optim.Adam | torch.optim.AdamW) else ())
    for group in agent.opt.param_groups if checkpoint.step > 0 else ():
        trained = {names[p] for p in group["params"]}
        for key, n in itertools.product(least | {*state_keys(have, trained)}, trained):
            name = f"opt.{key}.{n}"
            if group.get("fused"):
                want[name] = have.get(name, want[n]) if key == "step" else want[n]
            elif name in have:
                want[name] = have[name]
    if checkpoint.step > 0 and agent.reward_model is not None:
        shape = checkpoint.tensors.get("history.ids", torch.zeros(0, 0)).shape
        want |= {f"history.{n}": torch.empty(shape, dtype=dtype, device="meta")
                 for n, dtype in ROWS.items()}
    return want

def check_tensors(agent, checkpoint):
    """Raises UserError unless a Checkpoint has exactly the `wanted` tensors, with valid values."""
    want, have = wanted(agent, checkpoint), checkpoint.tensors
    wrong = sorted(want.keys() ^ have.keys())
    wrong += [n for n in want.keys() & have.keys() if have[n].shape != want[n].shape
              or have[n].dtype != want[n].dtype and not n.startswith("ref.")]   # rounded on a GPU
    if wrong:
        raise UserError(f"{agent.cfg.folder}: tensors missing, unexpected, or of a wrong shape or "
                        f"dtype: {wrong[0]}" + (f" and {len(wrong) - 1} more" if wrong[1:] else ""))
    wrong = [n for n, x in have.items() if x.is_floating_point() and not finite(x)
             or n.startswith("opt.exp_avg_sq.") and x.min() < 0]
    steps = {x.item(): n for n, x in have.items() if n.startswith("opt.step.")}
    if len(steps) > 1 or min(steps, default=1) < 1:         # one step count for all parameters
        wrong += steps.values()
    ids = have.get("history.ids", torch.zeros(0, 1))
    if ids.dim() != 2 or len(ids) % agent.cfg.choices or len(ids) and not (
            0 <= ids.min() and ids.max() < agent.policy.cfg.vocab_size):
        wrong.append("history.ids")
    if wrong:
        raise UserError(f"{agent.cfg.folder}: the tensor {wrong[0]} has invalid values")

def sha256_of(tensors):
    """SHA-256 of a dict of CPU tensors: names, dtypes, shapes, bytes. 2 GB take seconds."""
    sha256 = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        sha256.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        sha256.update(x.contiguous().flatten().view(torch.uint8).numpy())
    return sha256.hexdigest()

def finite(tensor):
    """Whether all values of a tensor are finite, without allocating another of its size."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())
