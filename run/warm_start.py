"""The warm start: supervised fine-tuning on demonstrations, kept in the run's folder for reuse."""
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

import data
from data import UserError
from model import token_logps
from run import batches, machine, models, optimizer, pretrained, show
from run.files import write_whole

def starting_model(cfg, task, longest, encoding):
    """The policy before RL (a kept warm start, --init's model, or a new one), and whether it still
    needs its warm start. `longest`: tokens of the longest prompt."""
    where = cfg.folder / "warm_start"
    note, warm = where / "warm_start.json", cfg.warm_steps > 0 or not cfg.init
    known = warm and note.exists() and note.read_text() == warm_note(cfg, task)
    if warm and note.exists() and not known:
        show.print0(f"{where} was made with other settings or other code; it is rebuilt")
    if cfg.init or known:
        source = where if known else cfg.init
        show.print0(f"starting from {source}")
        model = models.load_model(source, cfg, encoding, longest)
        if (dtype := model.hf.get("dtype") or model.hf.get("torch_dtype")) not in (None, "float32"):
            show.print0(f"its weights are {dtype}; they are trained, and saved, in float32")
        return model, warm and not known
    return models.new_model(cfg, encoding, longest), True

# Settings on which a kept warm start does not depend: those that only RL, evaluation, logging or
# the machine uses. It depends on every setting that is not listed here.
RL_ONLY = frozenset(
    "train test out steps iterations eval_every held_out samples save_every prompts group "
    "temperature reward supervision truncated_reward baseline adv_scale gamma lam critic "
    "value_coef ratio clip_low clip_high kl estimator beta target_kl loss_mean epochs "
    "minibatches lr half_life fit_prompts choices labels device dtype compile static_cache "
    "shard".split())

def warm_start(model, task, problems, cfg, encoding):
    """Fine-tunes a model on fresh demonstrations and keeps the result in the run's folder."""
    def row(problem, rng):
        """The ids of a prompt and of a demonstration."""
        said = encoding.encode_ordinary(task.demonstration(problem, rng))
        return encoding.encode_prompt(problem.prompt), said + [encoding.end]

    def losses(step):
        """The loss terms of one optimizer step, over this rank's rows."""
        rng = machine.rng(cfg, "warm start", step)
        rows = [row(p, rng) for p in rng.choices(problems, k=cfg.warm_batch)]
        tokens = sum(len(text) for _, text in rows)             # over all ranks
        if (long := max(len(text) for _, text in rows)) > cfg.max_new:
            raise UserError(f"a demonstration has {long} tokens, --max_new is {cfg.max_new}")
        rows = machine.local_share(rows)
        ids = padded([prompt + text for prompt, text in rows])
        mask = padded([[False] * len(prompt) + [True] * len(text) for prompt, text in rows])
        for micro, T in batches.micro_batches(ids, mask, cfg.micro_tokens):
            logp, _ = token_logps(model, ids[micro, :T], mask[micro, :T], 1.0)
            yield -logp.sum() / tokens
    optimizer.supervised_fit("warm start", model, losses, cfg.warm_steps, cfg.warm_lr,
                             cfg.grad_clip)

    if machine.world()[0] == 0:
        where, note = cfg.folder / "warm_start", cfg.folder / "warm_start" / "warm_start.json"
        note.unlink(missing_ok=True)
        pretrained.save(model, where, encoding.files)
        write_whole(note, warm_note(cfg, task))                 # last: marks the rest complete

def padded(rows):
    """Lists of unequal length as one tensor (B, T), padded on the right with 0 or False."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

def warm_note(cfg, task):
    """All that a warm start depends on, as text: settings, code, data, machine."""
    root = Path(data.__file__).parent.parent
    modules = ("batches", "machine", "models", "optimizer", "pretrained", "sharing", "warm_start")
    sources = [root / "model.py", *sorted((root / "data").glob("*.py")),
               *(root / "run" / f"{name}.py" for name in modules)]
    sources += [Path(x) for x in (getattr(task, "__file__", None), cfg.train or None) if x]
    sources += sorted(filter(Path.is_file, Path(cfg.init).glob("*"))) if cfg.init else []
    sha256 = hashlib.sha256()
    for path in sources:
        with open(path, "rb") as file:
            sha256.update(hashlib.file_digest(file, "sha256").digest())
    device, dtype, _ = machine.resolve(cfg)
    settings = {name: x for name, x in asdict(cfg).items() if name not in RL_ONLY}
    return json.dumps(settings
                      | {"sha256 of code and data": sha256.hexdigest(), "torch": torch.__version__,
                         "device": device.type, "dtype": dtype, "ranks": machine.world()[1]})
