"""What a run starts from: a checkpoint's folder, or a new model, warm-started on demonstrations."""
import hashlib
import json
import re
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from data.run import Fault, fit, machine, micro_batches, rng, row_lengths, say, world, write_whole
from data.tokenizer import byte_encoding, load_encoding
from model import CHUNK, GPT, GPTConfig, token_logps

WARM = ("task", "difficulty", "train", "seed", "max_new", "n_layer", "n_head", "n_kv_head",
        "n_embd", "warm_steps", "warm_batch", "warm_lr", "grad_clip")   # what it depends on

def warm_start(model, task, problems, cfg, encoding):
    """Supervised fine-tuning on fresh demonstrations."""
    (rank, ranks), device, encode = world(), model.norm.weight.device, encoding.encode_ordinary
    pad = lambda rows: pad_sequence([torch.tensor(r, device=device) for r in rows], True)
    def losses(step):
        """The terms of one optimizer step, those of this rank's rows."""
        source = rng(cfg, "warm start", step)
        rows = [(encode(p.prompt), encode(task.demonstration(p, source)) + [encoding.eot_token])
                for p in source.choices(problems, k=cfg.warm_batch)]
        tokens = sum(len(text) for _, text in rows)         # of all ranks; this one takes its rows
        if (long := max(len(text) for _, text in rows)) > cfg.max_new:
            raise Fault(f"a demonstration of {long} tokens is longer than --max_new {cfg.max_new}")
        rows = rows[rank::ranks]
        ids = pad([prompt + text for prompt, text in rows])
        mask = pad([[False] * len(prompt) + [True] * len(text) for prompt, text in rows])
        for micro, T in micro_batches(row_lengths(mask), cfg.micro_tokens):
            logp, _ = token_logps(model, ids[micro, :T], mask[micro, :T], 1.0)
            yield -logp.sum() / tokens
    fit("warm start", model, losses, cfg.warm_steps, cfg.warm_lr, cfg.grad_clip)

    if rank == 0:           # kept for the next run that would make the same; the note goes last
        folder, note = cfg.folder / "warm_start", cfg.folder / "warm_start" / "warm_start.json"
        note.unlink(missing_ok=True)
        model.save_pretrained(folder, encoding.files)
        write_whole(note, warm_note(cfg, task))

def warm_note(cfg, task):
    """What a warm start depends on: settings, and the task's own file."""
    source = Path(task.__file__).read_bytes() if hasattr(task, "__file__") else b""
    return json.dumps({name: getattr(cfg, name) for name in WARM}
                      | {"sha256 of the task": hashlib.sha256(source).hexdigest()})

def encoding_of(cfg, folder):
    """The tokenizer in a model's folder; bytes for a new model."""
    chat, about = cfg.chat, Path(folder or ".") / "run.json"
    if folder and chat == "auto" and about.exists():        # a run's prompts keep their format
        try:
            chat = json.loads(about.read_text())["config"].get("chat", "auto")
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as e:
            raise Fault(f"{about}: not a run's ({e.__class__.__name__}: {e})") from e
    here = folder and (Path(folder) / "tokenizer.json").exists()
    return load_encoding(folder, chat) if here or cfg.init else byte_encoding()

def place(model, cfg):
    """The model on its device, with the dtype of its products, as `machine` has them."""
    device, dtype, _ = machine(cfg)
    model.amp = torch.bfloat16 if dtype == "bfloat16" else None
    model.recompute = cfg.recompute == "on"
    return model.to(device)

def load_model(folder, cfg, encoding, longest=0):
    """The model in a folder, on its device; raises Fault if the tokenizer is not its own, or if a
    run with prompts of up to `longest` tokens would not fit."""
    model = GPT.outline(folder)
    if model.cfg.vocab_size < encoding.n_vocab:
        raise Fault(f"{folder}: a vocabulary of {model.cfg.vocab_size}, and the tokenizer has "
                    f"{encoding.n_vocab}")
    if longest:
        check_room(model, cfg, longest)
    return place(model.read(folder), cfg)

def starting_model(cfg, task, longest, encoding, config=None):
    """The policy before RL, and whether it is whole: --init's, or a kept one, or one of a `config`
    (config.json's), into which a checkpoint will be loaded. Otherwise it is new, and needs its warm
    start. `longest`: tokens of a prompt."""
    folder = cfg.folder / "warm_start"
    note = folder / "warm_start.json"
    if config is not None:
        model = GPT.of(config)
        check_room(model, cfg, longest)
        return place(model.allocate(), cfg), True
    if cfg.init or note.exists() and note.read_text() == warm_note(cfg, task):
        say(f"starting from {cfg.init or folder}")
        return load_model(cfg.init or folder, cfg, encoding, longest), True
    context = 1 << (longest + cfg.max_new - 1).bit_length()
    shape = GPTConfig(encoding.n_vocab, cfg.n_layer, cfg.n_head, cfg.n_kv_head, cfg.n_embd,
                      n_inner=4 * cfg.n_embd, block_size=context)
    seed = rng(cfg, "weights").getrandbits(63)
    model = place(GPT(shape, torch.Generator().manual_seed(seed)), cfg)
    model.hf["eos_token_id"] = encoding.eot_token
    check_room(model, cfg, longest)
    return model, False

# ------------------------------------------------------------------------------------- its memory

def memory(model, cfg, longest):
    """Bytes that a run needs, by what for. Of the rollout's and the update's own only the larger
    count, for they take turns. Activations, what the backward pass needs of each layer, are an
    estimate."""
    c, half = model.cfg, machine(cfg)[1] == "bfloat16"
    N, b = sum(p.numel() for p in model.parameters()), 2 if half else 4     # b: of a product
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    frozen = 4 * N - (4 - b) * linear
    rows, V, slots = cfg.prompts * cfg.group // world()[1], c.vocab_size, longest + cfg.max_new
    inner, heads = c.n_inner * (4 if c.mlp == "swiglu" else 2), (c.n_head + c.n_kv_head)
    layer = 4 * 4 * c.n_embd + b * (2 * c.n_embd + 3 * heads * c.head_size + inner)   # of a token
    kept = layer + 4 * c.n_embd * c.n_layer if cfg.recompute == "on" else layer * c.n_layer
    trained = 1 + ("value" in cfg.baseline and cfg.critic == "separate")
    # The cache twice: when finished rows leave, what stays is copied.
    rollout = {"cache": 2 * 2 * b * c.n_layer * c.n_kv_head * c.head_size * rows * slots,
               "logits of a token": 24 * rows * V}
    update = {"gradients": 4 * N * trained, "activations": kept * cfg.micro_tokens * trained,
              "logits": 12 * min(CHUNK, V * cfg.micro_tokens)}
    return {"weights": 4 * N * trained, "Adam": 8 * N * trained,
            "reference": frozen * (cfg.reward == "model" or bool(cfg.beta and cfg.kl != "none")),
            "sampler": frozen * half, "reward model": 16 * N * (cfg.reward == "model"),
            **max(rollout, update, key=lambda x: sum(x.values()))}

def check_room(model, cfg, longest):
    """Raise Fault, before there is memory for the model, if a run with it would not fit."""
    if longest + cfg.max_new > model.cfg.block_size:
        raise Fault(f"{longest} tokens of a prompt and --max_new {cfg.max_new} do not fit the "
                    f"model's context of {model.cfg.block_size}")
    need, free = memory(model, cfg, longest), free_memory(machine(cfg)[0])
    if free is not None and sum(need.values()) > free:
        parts = ", ".join(f"{name} {x / 1e9:.1f}" for name, x in need.items() if x > 5e7)
        raise Fault(f"this needs about {sum(need.values()) / 1e9:.1f} GB, and {free / 1e9:.1f} are "
                    f"free ({parts}): lower --prompts, --group, --max_new or --micro_tokens")

def free_memory(device):
    """Bytes free on a device, or None where nothing says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", known.read_text()) if known.exists() else None
    return 1024 * int(found[1]) if found and device.type == "cpu" else None
