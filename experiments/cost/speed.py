"""Time and memory of steps of this code and of TRL's GRPOTrainer, alternating in one process, on the same model and
prompts.

    pip install -r tests/requirements-peers.txt trl==1.16.0
    python experiments/models/smollm2.py               # the model of smollm2
    python experiments/cost/speed.py arithmetic-512 arithmetic-64 smollm2 [--turns 10] [--readme]

Both have the paper's loss with the KL, and the same rows, lengths, AdamW and learning rate; "TRL" puts all rows into
one pass, "TRL in parts" splits them. If TRL is not installed, only this code is measured. Results are medians of
all turns but the first, which warms up; peak memory is that of a separate process for each. With --readme the
result replaces speed.json, which the docs quote.

`floors` gives a lower bound on the time of each phase on this machine: 2 operations per parameter of the layers'
matrices for each token that is read, sampled or scored by the reference, 6 for each that is trained on, and the
same for the head's at each sampled token, divided by the rate of a matrix product; or, if that takes longer, the
bytes of weights and cache that decoding reads, divided by the bandwidth of a copy. Prefixes that rows share count
once: within a rollout when sampling, otherwise within a micro-batch.
"""
import contextlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
import model  # noqa: E402
from data import load_task  # noqa: E402
from data.tokenizer import byte_encoding, load_encoding  # noqa: E402
from experiments import results  # noqa: E402
from run import config, dist, passes, pretrained  # noqa: E402

# lr: so small that all keep their initial model, and with it the lengths
SAME = dict(seed=1, kl="loss", minibatches=1, lr=1e-6, half_life=0, warm_steps=0)
ARITHMETIC = dict(task="arithmetic", init="data/warm_start", group=16, max_new=64)
SIZES = {
    "arithmetic-512": dict(ARITHMETIC, prompts=32),
    "arithmetic-64": dict(ARITHMETIC, prompts=4),
    "smollm2": dict(task="sums", init="out/smollm2", prompts=8, group=8, max_new=128),
    # random models: in the shape of Qwen2.5-0.5B, for a GPU, and tiny
    "qwen": dict(task="sums", init="out/qwen-shaped", prompts=16, group=16, max_new=512,
                 micro_tokens=16384),
    "qwen-tiny": dict(task="sums", init="out/qwen-tiny", prompts=2, group=2, max_new=6),
}
QWEN = dict(vocab_size=151936, n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_inner=4864, block_size=32768,
            rope_theta=1e6, norm_eps=1e-6, bias="qkv")
SMOLLM2 = dict(vocab_size=49152, n_layer=30, n_head=9, n_kv_head=3, n_embd=576, n_inner=1536, block_size=8192, rope_theta=1e5)
SMALL = dict(vocab_size=300, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=512)
# The families and shapes of random models, by the name of their folder.
RANDOM = {"qwen-shaped": ("qwen2", QWEN), "smollm2-shaped": ("llama", SMOLLM2),
          "qwen-tiny": ("qwen2", SMALL | dict(bias="qkv", rope_theta=1e6)), "smollm2-tiny": ("llama", SMALL)}
# Rows of a forward pass of "TRL in parts".
PARTS = {"arithmetic-512": 128, "arithmetic-64": 16, "smollm2": 16, "qwen": 16, "qwen-tiny": 2}
WHO = ("ours", "ours bfloat16", "TRL", "TRL in parts", "TRL bfloat16", "TRL bfloat16 in parts")


def settings(size, who):
    return grpo.make_config(**SAME | SIZES[size] | {"dtype": "bfloat16" if "bfloat16" in who else "float32"})


def random_model(where, shape, family, encoding):
    """Write a folder with a random model of a shape, GPTConfig's fields, and a tokenizer."""
    gpt = model.GPT(model.GPTConfig(**shape), torch.Generator().manual_seed(0))
    gpt.hf = {theirs: getattr(gpt.cfg, ours) for ours, theirs in pretrained.NAMES.items()} | dict(
        model_type=family, architectures=[f"{family.capitalize()}ForCausalLM"], rope_theta=gpt.cfg.rope_theta,
        eos_token_id=encoding.end)
    pretrained.save(gpt, where, encoding.files)


def random_folder(where):
    """A folder of RANDOM, which is made if it is not there. Its tokenizer is SmolLM2's or, if that is not there, of bytes."""
    if not (where / "model.safetensors").exists():
        family, shape = RANDOM[where.name]
        smollm2 = ROOT / SIZES["smollm2"]["init"]
        known = smollm2.exists() and shape["vocab_size"] >= SMOLLM2["vocab_size"]
        random_model(where, shape, family, load_encoding(smollm2) if known else byte_encoding())
    return where

# ------------------------------------------------------------------------------- one step

def ours(size, who):
    """A function that makes the step of a given number, and returns its measurements."""
    cfg = settings(size, who)
    task = load_task(cfg.task)
    agent = grpo.new_agent(cfg, task, *pretrained.trained_model(cfg))
    problems = config.problems_of(task, cfg)[0]

    def turn(step):
        """One rollout and its update."""
        batch, stats = grpo.train_step(agent, problems, step)
        tokens = int(batch.mask.sum())
        rollout = tokens / stats["rollout_tok_s"]
        return {"seconds": stats["seconds"], "rollout": rollout, "update": stats["seconds"] - stats["reward_seconds"] - rollout,
                "tokens": tokens, "floors": floors(agent, batch)}
    return turn


def with_trl(size, who):
    """The same for TRL's trainer: each turn is a run of one step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cfg = settings(size, who)
    task, rows = load_task(cfg.task), cfg.prompts * cfg.group
    problems, part = config.problems_of(task, cfg)[0], PARTS[size] if "parts" in who else rows
    tokenizer = AutoTokenizer.from_pretrained(cfg.init)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    marks, frame = {}, bool(tokenizer.chat_template)
    known = {p.prompt: p for p in problems}

    def rewarded(prompts, completions, **_):
        """The task's reward in TRL's signature."""
        pairs = [(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions)] if frame else zip(prompts, completions)
        return [sum(task.reward(known[p], c).values()) for p, c in pairs]

    def drawn(step):
        """The problems that this code samples at a step, as a data set."""
        chosen = dist.rng(cfg, "problems", step).sample(problems, cfg.prompts)
        return Dataset.from_list([{"prompt": [dict(role="user", content=p.prompt)] if frame else p.prompt} for p in chosen])

    class Marks(TrainerCallback):
        """Records when a step begins and ends."""
        def on_step_begin(self, *_, **__):
            marks["began"] = now(device)

        def on_step_end(self, *_, **__):
            marks["ended"] = now(device)

    device, bf16 = dist.device_of(cfg), cfg.dtype == "bfloat16"
    gpt = AutoModelForCausalLM.from_pretrained(cfg.init, dtype=torch.float32)
    opt = torch.optim.AdamW(gpt.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scratch = tempfile.mkdtemp()
    trainer = GRPOTrainer(gpt, rewarded, GRPOConfig(
        scratch, per_device_train_batch_size=part, gradient_accumulation_steps=rows // part, max_steps=1,
        num_generations=cfg.group, max_completion_length=cfg.max_new, max_grad_norm=grpo.GRAD_CLIP, beta=cfg.beta,
        loss_type="grpo", num_iterations=1, temperature=cfg.temperature, shuffle_dataset=False, save_strategy="no",
        report_to=[], seed=cfg.seed, use_cpu=device.type == "cpu", bf16=bf16, gradient_checkpointing=False,
        disable_tqdm=True, logging_strategy="no"),
        drawn(1), processing_class=tokenizer, callbacks=[Marks()],
        optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)))
    make = trainer._generate_and_score_completions

    def made(inputs):
        """A rollout, timed, with its tokens counted."""
        began, out = now(device), make(inputs)
        marks.update(rollout=now(device) - began, tokens=int(out["completion_mask"].sum()))
        return out
    trainer._generate_and_score_completions = made

    def turn(step):
        trainer.train_dataset = drawn(step)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        seconds = marks["ended"] - marks["began"]
        return {"seconds": seconds, "rollout": marks["rollout"], "update": seconds - marks["rollout"], "tokens": marks["tokens"]}
    return turn


def turns_of(size, who):
    """The function that makes a step, of this code or of TRL."""
    return (ours if who.startswith("ours") else with_trl)(size, who)


def now(device):
    """The time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

# -------------------------------------------------------------------------------------- lower bounds

SIDE, COPIED = 2048, 2 ** 26        # of a matrix, and of what is copied, in numbers


def matrix_rate(device, dtype, n=None):
    """Floating-point operations per second of an n x n x n product; of a larger one, if that takes less than a millisecond."""
    n = n or SIDE
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    seconds = statistics.median(timed(device, lambda: a @ b))
    return 2 * n ** 3 / seconds if seconds > 1e-3 else matrix_rate(device, dtype, 2 * n)


def bandwidth(device):
    """Bytes per second of a copy, reads and writes together."""
    a = torch.ones(COPIED, device=device)
    b = torch.empty_like(a)
    return 2 * 4 * a.numel() / statistics.median(timed(device, lambda: b.copy_(a)))


def timed(device, f, times=7):
    """The seconds of a call of f, `times` times, after two calls to warm up. If a call is short, each is the mean of 10 ms of
    them: on a GPU, to start one and to wait for it takes long."""
    f()
    began = now(device)
    f()
    calls = 1 + int(0.01 / (now(device) - began))
    for _ in range(times):
        began = now(device)
        for _ in range(calls):
            f()
        yield (now(device) - began) / calls


def states(ids, mask):
    """For rows (B, T): how many tokens are read, and the columns of those after which a token is sampled. A
    prefix that adjacent rows share counts once."""
    ids, sampled = ids[:, :-1], mask[:, 1:]
    new, at = passes.distinct(ids, sampled)
    once = at[sampled].unique()
    return len(new), new[once] % ids.size(1)


def floors(agent, batch):
    """Lower bounds on the seconds of a rollout and of its update."""
    cfg, policy, c = agent.cfg, agent.policy, agent.policy.cfg
    device, dtype = dist.device_of(cfg), dist.dtype_of(cfg)
    linear = sum(m.weight.numel() for m in policy.layers.modules() if isinstance(m, torch.nn.Linear))
    head, width = policy.cfg.vocab_size * policy.cfg.n_embd, 2 if dtype == "bfloat16" else 4
    trained = batch.adv.any(1) | (agent.ref is not None or agent.critic is not None)
    operations, decoded = [], None
    for rows, budget in ((torch.ones_like(trained), float("inf")), (trained, cfg.micro_tokens)):
        ids, mask = batch.ids[rows], batch.mask[rows]
        parts = [states(ids[chunk, :T], mask[chunk, :T]) for chunk, T in passes.split_rows(ids, mask, budget)]
        operations.append(sum(2 * (linear * read + head * len(columns)) for read, columns in parts))
        decoded = parts[0][1] if decoded is None else decoded
    slot = 2 * c.n_layer * c.n_kv_head * c.head_size
    turns = int(batch.mask.sum(1).max())
    moved = width * (turns * (linear + head) + slot * int(decoded.sum()))
    rate = matrix_rate(device, dtype)
    again = (agent.ref is not None) + (policy.amp is not None and cfg.updates > 1)     # forward passes without a gradient
    return {"rollout": max(operations[0] / rate, moved / bandwidth(device)) + again * operations[1] / rate,
            "update": 3 * cfg.epochs * operations[1] / rate, "gflops": rate / 1e9}

# ---------------------------------------------------------------------------------------- the comparison

def median(turns):
    """The median of each number, also within nested dicts."""
    return {name: median([t[name] for t in turns]) if isinstance(turns[0][name], dict)
            else statistics.median(t[name] for t in turns) for name in turns[0]}


def study(size, who, turns, has_peak=True):
    """Turns of all of `who`, alternating: their medians, and the peak memory of each, if asked for, from a process of
    its own, started before this one loads a model."""
    peaks = dict.fromkeys(who, 0)
    for name in who if has_peak else ():
        command = [sys.executable, __file__, size, "--peak", name, "--device", SAME["device"]]
        peaks[name] = int(subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).split()[-1])
        print(f"{size}  {name}  {peaks[name] / 2 ** 30:.2f} GiB", flush=True)
    step = {name: turns_of(size, name) for name in who}
    made = {name: [] for name in who}
    for n in range(1, turns + 1):
        for name in who:
            made[name].append(step[name](n))
            x = made[name][-1]
            print(f"{size}  {name}  {x['seconds']:.2f} s, {x['rollout']:.2f} of them the rollout  {x['tokens']} tokens", flush=True)
    return {name: median(found[1:]) | {"peak": peaks[name]} for name, found in made.items()}


def rows(result):
    """The lines of the docs' table."""
    for size, found in result["sizes"].items():
        trl = min((x["seconds"] for name, x in found.items() if name in ("TRL", "TRL in parts")), default=None)
        for name, x in found.items():
            floor = f"{x['seconds'] / (x['floors']['rollout'] + x['floors']['update']):.1f}" if "floors" in x else ""
            ratio = f"{x['seconds'] / trl:.2f}" if trl else ""
            yield (f"| {size}, {name} | {x['seconds']:.2f} | {ratio} | {floor} | {x['tokens'] / x['rollout']:,.0f} | "
                   f"{x['tokens'] / x['update']:,.0f} | {x['peak'] / 2 ** 30:.2f} |")


def main():
    parser = results.parser(__doc__, "no_peak", "readme")
    parser.add_argument("sizes", nargs="+", choices=SIZES)
    parser.add_argument("--who", nargs="+", choices=WHO, default=WHO[:5])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--peak", choices=WHO)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default="out/speed.json")
    args = parser.parse_args()
    os.chdir(ROOT)
    dist.prepare()
    SAME["device"] = args.device
    if args.peak:                       # two steps of one of them, then the peak memory
        turn = turns_of(args.sizes[0], args.peak)
        turn(1)
        turn(2)
        return print(results.peak())
    who = [name for name in args.who if name.startswith("ours") or importlib.util.find_spec("trl")]
    file = HERE / "speed.json" if args.readme else ROOT / args.out
    result = json.loads(file.read_text()) if file.exists() else {"sizes": {}}
    for size in args.sizes:
        if (init := ROOT / SIZES[size]["init"]).name in RANDOM:
            random_folder(init)
        result["sizes"][size] = study(size, who, args.turns, not args.no_peak)
        result.setdefault("about", {})[size] = results.about("trl", "transformers")
        results.write(file, result)
    print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
