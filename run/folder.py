"""The folder of a run:

    model.safetensors, config.json    the policy, for use; tokenizer.json beside them
    checkpoint.safetensors            all that a resumed run needs, one file, JSON in its header
    run.json                          the settings, the versions, the command
    metrics.jsonl, samples.jsonl      a line a step; a group in full at every checkpoint
    warm_start/, previous/            the kept warm start; the finished run that was here before
"""
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from data import Fault
from run import machine, pretrained, show
from run.files import write_tensors, write_whole

LOGS = ("metrics.jsonl", "samples.jsonl")

def log_metrics(folder, step, stats):
    """Add a line to metrics.jsonl, on the first rank."""
    if machine.world()[0] == 0:
        append(folder / "metrics.jsonl", {"step": step, **stats})

def append(path, record):
    """Add a line to a file of JSON lines."""
    with open(path, "a") as f:
        f.write(json.dumps(record) + "\n")

# ------------------------------------------------------------------------------ tensors by name

ROLES = ("policy", "ref", "critic", "reward_model")

def modules(agent):
    """The modules of a run by role, those that it has."""
    return {role: getattr(agent, role) for role in ROLES if getattr(agent, role) is not None}

def training_state(agent):
    """Every tensor of a run by name: parameters of the modules by role, state of the optimizer,
    and of the labelled rows in the history."""
    named = {f"{role}.{n}": p for role, module in modules(agent).items()
             for n, p in module.named_parameters()}
    moments = {f"opt.{key}.{n}": x for n, p in named.items()
               for key, x in agent.opt.state.get(p, {}).items()}
    rows = {f"history.{n}": x for n, x in agent.history.items()}
    return {n: p.detach() for n, p in named.items()} | moments | rows

def restore(agent, checkpoint):
    """Put what `save` wrote back in its places."""
    def under(prefix):
        """The tensors whose name begins so, by the rest of their name."""
        return {n.removeprefix(prefix): x for n, x in checkpoint.tensors.items()
                if n.startswith(prefix)}
    for role, module in modules(agent).items():
        load_tensors(module, under(f"{role}."), agent.cfg.folder)
        for n, p in module.named_parameters():          # no moments before the first optimizer step
            moments = {key: under(f"opt.{key}.").get(f"{role}.{n}")
                       for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(x is not None for x in moments.values()):
                agent.opt.state[p] = {key: x.to(p.device) for key, x in moments.items()}
    agent.history, agent.beta = under("history."), checkpoint.beta

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

# ---------------------------------------------------------------------------------- the checkpoint

@dataclass
class Checkpoint:
    """What a resumed run goes on with. What is random, and where the run stands in its problems,
    follow from the seed and the step, so they are not in it."""
    step: int           # the last one that was made; -1 before there is a model
    beta: float         # the weight of the KL, which --target_kl steers
    model: dict         # the policy's config.json
    sizes: dict         # bytes of the logs at this step
    tensors: dict       # of `training_state`; empty where only the header was read

def save(agent, step, batch=None):
    """Write the policy, for use, and the checkpoint after `step`, on the first rank; show and log a
    group of the batch."""
    if machine.world()[0] > 0:
        return
    folder = agent.cfg.folder
    if batch:
        show.group(batch, agent.cfg.group, agent.encoding)
        append(folder / "samples.jsonl", group_record(step, batch, agent.cfg.group))
    pretrained.save(agent.policy, folder, agent.encoding.files)
    write_checkpoint(agent.cfg, step, agent.beta, pretrained.config_json(agent.policy),
                     {name: os.path.getsize(folder / name) for name in LOGS}, training_state(agent))

def group_record(step, batch, size):
    """The first group of a rollout, `size` rows, in full."""
    return {"step": step, "prompt": batch.problems[0].prompt, "completions": batch.texts[:size],
            "rewards": batch.reward[:size].sum(1).tolist(),
            "advantages": [[round(a, 4) for a in adv[on].tolist()]
                           for adv, on in zip(batch.adv[:size], batch.mask)]}

def write_checkpoint(cfg, step, beta, model, sizes, tensors):
    """Write checkpoint.safetensors: the settings, and the fields of Checkpoint."""
    state = {"step": step, "config": dataclasses.asdict(cfg), "beta": beta, "model": model,
             "sizes": sizes}
    write_tensors(cfg.folder / "checkpoint.safetensors", tensors, {"grpo": json.dumps(state)})

def load(folder, config, whole=True):
    """What `save` left in `folder`: the `config` (a dataclass) and the Checkpoint, of which without
    `whole` only the header is read."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        raise Fault(f"no run in {folder}")
    try:
        with safe_open(path, "pt") as f:
            tensors = {n: f.get_tensor(n) for n in f.keys()} if whole else {}
            state = json.loads((f.metadata() or {})["grpo"])
        return config(**state.pop("config")), Checkpoint(**state, tensors=tensors)
    except (OSError, SafetensorError) as e:
        raise Fault(f"{path}: not a whole safetensors file: {e}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise Fault(f"{path} is not of a run of this program ({type(e).__name__}: {e})") from e

def settings(folder):
    """The settings of the run in a folder, but not where it was; nothing for what is no run."""
    path = Path(folder) / "run.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())["config"]
        return {name: x for name, x in found.items() if name not in ("out", "init")}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as e:
        raise Fault(f"{path}: not a run's ({e.__class__.__name__}: {e})") from e

def resume(folder, config, flags, may_change):
    """The `config` and the Checkpoint to go on with, of which `flags` may change only some. A run's
    folder is where it was found, whatever its settings say."""
    cfg, checkpoint = load(folder, config)
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
    return cfg, checkpoint

# ----------------------------------------------------------------------------------- a run begins

def refuse_unfinished(folder, config):
    """Raise Fault if a new run in `folder` would overwrite one that is not at its end."""
    if (folder / "checkpoint.safetensors").exists():
        cfg, checkpoint = load(folder, config, whole=False)
        if 0 <= checkpoint.step < cfg.steps * cfg.iterations:
            raise Fault(f"{folder} holds a run stopped at step {checkpoint.step}: go on with "
                        f"--resume, or choose another --out")

def keep_previous(folder):
    """Move the finished run in `folder`, and whatever files are beside it, to previous/."""
    previous = folder / "previous"
    previous.mkdir(exist_ok=True)
    for path in [*folder.iterdir()]:
        if path.is_file():
            os.replace(path, previous / path.name)
    show.print0(f"the finished run that was in {folder} is now in {previous}")

def open_run(cfg, checkpoint=None):
    """Make the folder of a new run, or cut the logs of a resumed one back to its checkpoint: what
    was logged later will be made anew."""
    about = {"config": dataclasses.asdict(cfg), "command": sys.argv,
             "versions": {"python": sys.version.split()[0], "torch": torch.__version__}}
    try:
        cfg.folder.mkdir(parents=True, exist_ok=True)
        for name, size in (checkpoint.sizes if checkpoint else {}).items():
            path = cfg.folder / name
            if size > (os.path.getsize(path) if path.exists() else 0):
                raise Fault(f"{path} is shorter than at the checkpoint")
        if checkpoint is None:
            if (cfg.folder / "model.safetensors").exists():
                keep_previous(cfg.folder)
            write_checkpoint(cfg, -1, cfg.beta, None, dict.fromkeys(LOGS, 0), {})
        write_whole(cfg.folder / "run.json", json.dumps(about, indent=1))
        for name in LOGS:
            with open(cfg.folder / name, "ab") as f:
                f.truncate(checkpoint.sizes[name] if checkpoint else 0)
    except OSError as e:
        raise Fault(f"cannot write in {cfg.folder}: {e.strerror}") from e
