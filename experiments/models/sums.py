"""SmolLM2-135M-Instruct learns sums from rewards alone, with this code and with TRL. On 2 CPU cores:

    pip install -r tests/requirements-peers.txt trl==1.16.0
    python experiments/models/smollm2.py                   # the model, into out/smollm2
    python experiments/models/sums.py 1 2 3                # a run for each seed
    python experiments/models/sums.py --trl 1              # TRL, with the same prompts, groups, lengths, rate
    python experiments/models/sums.py --check 1 2 3        # greedy accuracy with transformers; KL to the start
    python experiments/models/sums.py --readme             # sums.json and sums.png from all runs

All other settings are those of data/sums.py. Both are evaluated on the held-out problems; in both, a completion
that was cut off gets no reward.
"""
import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
INIT = ROOT / "out" / "smollm2"
PART = 32           # rows of a forward and backward pass of TRL (8.5 GiB in all)
LIMIT = 15 * 60     # seconds after which TRL starts no further step
MEASURED = ("greedy", "pass@1", "pass@8", "maj@8")


def folder(kind, seed):
    return ROOT / "out" / f"sums-{kind}{seed}"


def peak():
    """Peak memory of this process, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def ours(seed, out=None, *flags):
    """A run of this code as a child process, with its time and memory; on sums if no other flags are given."""
    code = ("import sys, grpo\nfrom experiments.models.sums import peak\n"
            "from experiments.studies.constants import main\nmain(sys.argv[1:])\nprint('peak', peak())")
    out, began = out or folder("s", seed), time.time()
    flags = [*(flags or ["--task", "sums"]), "--init", str(INIT), "--seed", str(seed), "--out", str(out)]
    child = subprocess.Popen([sys.executable, "-c", code, *flags], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    for line in child.stdout:
        print(line, end="", flush=True)
    if child.wait():
        sys.exit("the run failed")
    (out / "costs.json").write_text(json.dumps({"seconds": time.time() - began, "peak": int(line.split()[1])}))


def with_trl(seed):
    """The same with TRL's GRPOTrainer for up to LIMIT seconds: a line per step into trl.jsonl, then this code's
    evaluation of the saved folder on the held-out problems."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import grpo
    from data import sums
    cfg, out = grpo.make_config(task="sums", init=str(INIT), seed=seed), folder("trl", seed)
    rng = random.Random(seed)
    problems = [p for _ in range(cfg.steps) for p in rng.sample(sums.problems(**cfg.task_args)[0], cfg.prompts)]
    rows = [dict(prompt=[dict(role="user", content=p.prompt)], answer=p.answer) for p in problems]
    tokenizer = AutoTokenizer.from_pretrained(INIT)

    def part(name):
        """A function for one component of the task's reward, 0 for a completion that was cut off."""
        def reward(completions, answer, completion_ids, **_):
            """The component in TRL's signature."""
            return [sums.reward(sums.Problem("", right, ""), said[0]["content"])[name] * (ids[-1] == tokenizer.eos_token_id)
                    for said, right, ids in zip(completions, answer, completion_ids)]
        reward.__name__ = name
        return reward

    class Log(TrainerCallback):
        """Writes a line per step, and stops the training after LIMIT seconds."""
        def on_log(self, args, state, control, logs, **_):
            with open(out / "trl.jsonl", "a") as f:
                f.write(json.dumps({"step": state.global_step, "seconds": time.time() - began} | logs) + "\n")

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= time.time() - began > LIMIT

    out.mkdir(parents=True, exist_ok=True)
    (out / "trl.jsonl").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(INIT, dtype=torch.float32)
    opt = torch.optim.AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    trainer = GRPOTrainer(model, [part("correct"), part("near")], GRPOConfig(
        str(out / "trainer"), per_device_train_batch_size=PART, gradient_accumulation_steps=cfg.prompts * cfg.group // PART,
        num_generations=cfg.group, max_steps=cfg.steps, max_completion_length=cfg.max_new, max_grad_norm=grpo.GRAD_CLIP,
        beta=cfg.beta * cfg.applies_kl, loss_type="grpo", num_iterations=1, temperature=cfg.temperature, shuffle_dataset=False,
        logging_steps=1, save_strategy="no", report_to=[], seed=seed, use_cpu=True, bf16=False, gradient_checkpointing=False),
        Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Log()],
        optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5 ** (step / cfg.half_life))))
    began = time.time()
    trainer.train()
    costs = {"seconds": time.time() - began, "peak": peak()}
    trainer.save_model(out / "model")
    said = subprocess.check_output([sys.executable, ROOT / "grpo.py", "--task", "sums", "--eval_only", "--init",
                                    out / "model"], text=True)
    measured = {name: float(x) / 100 for name, x in re.findall(r"(\S+) ([\d.]+)%", said)}
    (out / "costs.json").write_text(json.dumps(costs | measured))


def kl_to_the_start(where):
    """The KL to the run's initial model: k3, averaged over the tokens of one completion per held-out
    problem."""
    import grpo
    from data import sums
    from run import dist, passes, pretrained
    cfg = grpo.make_config(task="sums", init=str(where))
    encoding, policy = pretrained.trained_model(cfg)
    _, first = pretrained.trained_model(grpo.make_config(task="sums", init=str(INIT)))
    held_out = sums.problems(**cfg.task_args)[1]
    batch = grpo.generate(grpo.Agent(cfg, sums, encoding, policy), held_out, 1, dist.rng(cfg, "kl"))
    logp, ref_logp = (passes.logps(gpt, batch, cfg)[0][batch.mask] for gpt in (policy, first))
    return grpo.kl_estimate(logp, ref_logp, "k3").mean().item()


def check(seed):
    """Measure the greedy accuracy on the held-out problems with transformers' own generate, and the KL to the
    initial model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import grpo
    from data import sums
    where = folder("s", seed)
    cfg, tokenizer = grpo.make_config(task="sums"), AutoTokenizer.from_pretrained(where)
    model, right = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32), 0
    held_out = sums.problems(**cfg.task_args)[1]
    for p in held_out:
        ids = tokenizer.apply_chat_template([dict(role="user", content=p.prompt)], add_generation_prompt=True,
                                            return_tensors="pt", return_dict=True)
        new = model.generate(**ids, max_new_tokens=cfg.max_new, do_sample=False)[0, ids["input_ids"].size(1):]
        ended = tokenizer.eos_token_id in new
        right += ended and sums.reward(p, tokenizer.decode(new, skip_special_tokens=True))["correct"]
    share = right / len(held_out)
    last = lines(where / "metrics.jsonl")[-1]["greedy"]
    kl = kl_to_the_start(where)
    print(f"greedy accuracy {share:.1%} with transformers, {last:.1%} with this code; KL to the initial model {kl:.2f} nats per token")
    costs = json.loads((where / "costs.json").read_text())
    (where / "costs.json").write_text(json.dumps(costs | {"greedy by transformers": share, "kl": kl}))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_run(where):
    """The metrics of a run before and after RL, its curves and two of its samples."""
    found = lines(where / "metrics.jsonl")
    steps = [m for m in found if m["step"]]
    texts = {s["step"]: {name: s[name] for name in ("prompt", "completions")} for s in lines(where / "samples.jsonl")}
    return {"before": {name: found[0][name] for name in MEASURED}, "after": {name: found[-1][name] for name in MEASURED},
            "curve": {name: [round(m[name], 4) for m in steps] for name in ("accuracy", "length", "entropy", "seconds")},
            "samples": [texts[min(texts)], texts[max(texts)]], **json.loads((where / "costs.json").read_text())}


def rows(result):
    """The lines of the table in docs/measurements.md: before, after, and TRL's after; medians, with the range in brackets if
    there are several runs."""
    runs, trl = result["runs"].values(), result["trl"].values()

    def cell(numbers, form):
        x = sorted(numbers)
        spread = f" ({x[0]:{form}} to {x[-1]:{form}})" if len(x) > 1 else ""
        return f"{statistics.median(x):{form}}{spread}"
    for name in MEASURED:
        before = cell([run["before"][name] for run in runs], ".1%")
        after = [cell([run["after"][name] for run in found], ".1%") for found in (runs, trl)]
        yield f"| {name} | {before} | {after[0]} | {after[1]} |"
    lengths = [cell([run["curve"]["length"][i] for run in found], ".1f") for found, i in ((runs, 0), (runs, -1), (trl, -1))]
    yield f"| tokens per completion, in training | {' | '.join(lengths)} |"
    for title, form, name, unit in (("minutes", ".1f", "seconds", 60), ("peak memory, GiB", ".1f", "peak", 2 ** 30)):
        costs = [cell([run[name] / unit for run in found], form) for found in (runs, trl)]
        yield f"| {title} | | {costs[0]} | {costs[1]} |"


def figure_of(file, draw, titles):
    """Three plots in a row, drawn by `draw(axes)`, with a title and an x label for each."""
    try:
        import matplotlib
    except ImportError:
        return print("no figure: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(11, 3))
    draw(axes)
    for axis, (title, x) in zip(axes, titles.items()):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x)
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def draw(axes, result):
    """Accuracy over time, for both; length and entropy over steps, for this code."""
    for run in result["runs"].values():
        curve = run["curve"]
        minutes = [sum(curve["seconds"][:i + 1]) / 60 for i in range(len(curve["seconds"]))]
        axes[0].plot(minutes, curve["accuracy"], color="tab:blue", alpha=0.7)
        axes[1].plot(curve["length"], color="tab:blue", alpha=0.7)
        axes[2].plot(curve["entropy"], color="tab:blue", alpha=0.7)
    for run in result["trl"].values():
        axes[0].plot([s / 60 for s in run["curve"]["seconds"]], run["curve"]["accuracy"], color="tab:orange", alpha=0.7)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int)
    for flag in ("trl", "check", "readme"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    for seed in args.seeds:
        (with_trl if args.trl else check if args.check else ours)(seed)
    if args.readme:
        made = {kind: {p.name.removeprefix(f"sums-{kind}"): p for p in sorted((ROOT / "out").glob(f"sums-{kind}[0-9]*"))}
                for kind in ("s", "trl")}
        result = {"cores": os.cpu_count(), "runs": {seed: of_run(p) for seed, p in made["s"].items()}, "trl": {}}
        for seed, p in made["trl"].items():
            found = [m for m in lines(p / "trl.jsonl") if "reward" in m]
            curve = {name: [m[key] for m in found] for name, key in (
                ("seconds", "seconds"), ("accuracy", "rewards/correct/mean"), ("length", "completions/mean_length"))}
            costs = json.loads((p / "costs.json").read_text())
            after = {name: costs.pop(name) for name in MEASURED}
            result["trl"][seed] = costs | {"after": after, "steps": len(found), "curve": curve}
        (HERE / "sums.json").write_text(json.dumps(result, indent=1) + "\n")
        figure_of(HERE / "sums.png", partial(draw, result=result), {
            "accuracy, sampled (orange: TRL)": "minutes", "tokens of a completion": "step", "entropy of a token": "step"})
        print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
