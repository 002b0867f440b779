"""The folder of a run:

    model.safetensors, config.json    the policy; tokenizer.json beside them
    chat_frame.json                   what the chat template puts around a prompt
    checkpoint.safetensors            everything a resumed run needs, one file, JSON in its header
    run.json                          the settings, the versions, the command
    metrics.jsonl                     a line per step
    samples.jsonl                     two groups in full, of some steps, the first and last included
    report.html                       metrics and samples as a page
    best/                             under --eval_every, the policy with the highest pass@1 so far
    warm_start/, previous/            the kept warm start; the finished run that was here before
    lock                              locked while a run is active
"""
import contextlib
import json
import os
import shutil

from data import UserError
from run import batches, files, machine, samples, shard, show

LOGS = ("metrics.jsonl", "samples.jsonl")

def log_metrics(folder, step, stats):
    """Adds a line to metrics.jsonl, on the first rank."""
    if machine.world()[0] == 0:
        append(folder / "metrics.jsonl", {"step": step, **stats})

def log_samples(agent, step, batch, last):
    """At the first step, the `last` one, and every --save_every steps: prints one group and adds
    two to samples.jsonl, on the first rank."""
    if step not in (1, last) and step % agent.cfg.save_every != 0:
        return
    first, batch = machine.world()[0] == 0, batches.on_host(batch)
    if first:
        show.group(batch, samples.widest(batch, agent.cfg.group), agent.encoding)
    if first or shard.is_sharded(agent.policy):         # every rank takes part in its passes
        for record in samples.records(agent, step, batch):
            if first:
                append(agent.cfg.folder / "samples.jsonl", record)

def append(path, record):
    """Adds a line to a JSON lines file."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(record) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e

@contextlib.contextmanager
def unlocked():
    """A context that ends by releasing the folder's lock, which `checkpoint.claim` takes."""
    try:
        yield
    finally:
        files.unlock()

def keep_previous(folder):
    """Moves the finished run in `folder`, its best/, and any other files there, to previous/."""
    previous = folder / "previous"
    previous.mkdir(exist_ok=True)
    for path in [*folder.iterdir()]:
        if path.is_file() and path.name != "lock":
            os.replace(path, previous / path.name)
    shutil.rmtree(previous / "best", ignore_errors=True)
    if (folder / "best").is_dir():
        os.replace(folder / "best", previous / "best")
    show.print0(f"the finished run in {folder} was moved to {previous}")

def clear_up(folder):
    """Removes temporary files of interrupted saves, which are as large as the model: its own, and
    those with a random name that safetensors renames to them."""
    for place in (folder, folder / "warm_start"):
        for kind in ("*.json.tmp", "*.safetensors.tmp", "*.html.tmp", f".tmp{'[0-9A-Za-z]' * 6}"):
            for path in [*place.glob(kind)]:
                path.unlink()
