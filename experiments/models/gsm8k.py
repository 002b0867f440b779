"""SmolLM2-135M-Instruct learns GSM8K, in ten minutes on an H100: it imitates the published solutions of the training
rows, because it never writes the tags by itself, then come as many steps of GRPO as fit:

    pip install -r tests/requirements-peers.txt
    python experiments/models/smollm2.py                                # the model, into out/smollm2
    python experiments/models/gsm8k.py train.jsonl test.jsonl           # a run; --seed 2: another
    python experiments/models/gsm8k.py --readme                         # gsm8k.json and gsm8k.png from all runs

The model is evaluated as it is, after the supervised start and after GRPO, on the first rows of test.jsonl, by which no
setting was chosen. To choose one, leave test.jsonl out: then the last 256 training rows are set aside, and evaluated on.
Flags of grpo.py override the settings below, and --tiny is a dry run on a CPU, in three minutes:

    python experiments/models/gsm8k.py train.jsonl --minutes 4 --warm_lr 1e-4
    python experiments/models/gsm8k.py train.jsonl test.jsonl --tiny

When its time is up, the run of grpo.py is asked to stop, and resumed for one last step and the evaluation.
"""
import argparse
import hashlib
import json
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import sums
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments" / "studies")]
import grpo  # noqa: E402
from data import gsm8k  # noqa: E402
from run import config, pretrained, warm_start  # noqa: E402
from runs import about  # noqa: E402

# Evaluations: at 5 %, a standard error of one point on 512 rows. A completion may have 256 tokens, as in nanochat's RL on
# GSM8K; of 2,000 training rows 16 have longer solutions, and are left out.
COMMON = "--held_out 512 --samples 4 --max_new 256 --prompts 32 --group 16".split()
# The supervised start: three epochs of 2,000 rows. SmolLM2 itself had 1e-3 for two epochs of its conversations
# (alignment-handbook, recipes/smollm2); so few rows get less than a third of that rate.
WARM_BATCH = "run.warm_start.WARM_BATCH=32"
SUPERVISED = "--warm_steps 188 --warm_lr 3e-4".split()
# GRPO: a group of 16, as in nanochat, but of 32 problems, since at first most groups have no right answer. No KL, as in
# nanochat and DAPO: dead groups then cost no update. Of 3e-5 and 1e-5, with which this model learned sums, the lower one,
# as there are more steps here, each of them two of the optimizer; a rate that falls ended higher there. AReaL gives 1.5
# billion parameters 1.7e-5. The end is saved, and nothing before.
RL = "--lr 1e-5 --half_life 100 --kl none --save_every 10000".split()
MOST = 10000        # steps, more than fit
ASIDE = 256         # training rows set aside if there are no test rows
TINY = "--held_out 2 --samples 1 --max_new 64 --prompts 2 --group 4 --warm_steps 2".split()
STAGES = ("as it is", "after the supervised start", "after GRPO")
CURVES = ("accuracy", "reward", "length", "finished", "entropy", "dead_groups", "seconds")
MEASURED = {"greedy": "greedy, {held_out} rows", "pass@1": "pass@1, {held_out} rows with {samples} samples each",
            "pass@4": "pass@4"}

# ------------------------------------------------------------------------------------------------------- a run

def run(args, flags):
    """The three processes of a run: the untouched model's evaluation; the supervised start and GRPO, for as long as there
    is time; the last step. After each, result.json has the numbers so far."""
    where = ROOT / "out" / f"gsm8k-{'tiny' if args.tiny else 's' if args.test else 'aside'}{args.seed}"
    flags = ["--task", "gsm8k", "--init", str(args.init), "--seed", str(args.seed), "--train", str(where / "train.jsonl"),
             "--test", str(where / "test.jsonl"), *COMMON, *SUPERVISED, *RL, *(TINY if args.tiny else []), *flags]
    began, rows, seconds = time.time(), write_rows(args, flags, where), {}

    def part(name, out, *given, limit=None):
        """One process in the run's folder `out`, and the results with it: whether it was stopped."""
        start = time.time()
        stopped = started([*given, "--out", str(where / out)], limit)
        seconds[name] = round(time.time() - start, 1)
        (where / "result.json").write_text(json.dumps(result(where, flags, rows, seconds)))
        return stopped
    part("as it is", "untrained", *flags, "--steps", "0", "--warm_steps", "0")
    # The last process, too, starts, evaluates and saves, in less time, since completions have become shorter; before
    # it, a step is finished and saved.
    left = 60 * args.minutes - (time.time() - began) - 2 * seconds["as it is"]
    if part("training", "trained", *flags, "--steps", str(MOST), limit=left):
        done = sums.lines(where / "trained" / "metrics.jsonl")
        if not done:
            sys.exit("no step of GRPO has begun: a larger --minutes")
        part("last step", "trained", "--resume", "--steps", str(done[-1]["step"] + 1))
    print(f"{(time.time() - began) / 60:.1f} minutes; the numbers are in {where / 'result.json'}")


def read(flags):
    """The settings that flags give."""
    return grpo.make_config(**config.read(grpo.Config, "", flags)[1])


def write_rows(args, flags, where):
    """Write the training and held-out rows of a run into its folder; returns their files, with SHA-256, and numbers. Rows
    whose solution has more than --max_new tokens are not trained on; --tiny takes the 20 with the shortest."""
    cfg = read(flags)
    encoding = pretrained.encoding_of(cfg, cfg.init)

    def length(line):
        return len(warm_start.row(gsm8k.problem_of(json.loads(line)), gsm8k, encoding, None)[1])
    train, *test = (path.read_text(encoding="utf-8-sig").strip().split("\n") for path in (args.train, args.test) if path)
    train, test = (train, *test) if test else (train[:-ASIDE], train[-ASIDE:])
    kept = [line for line in train if length(line) <= cfg.max_new]
    kept, test = [sorted(lines, key=length)[:20] for lines in (kept, test)] if args.tiny else (kept, test)
    where.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", kept), ("test", test)):
        (where / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (args.train, args.test) if path}
    return {"files": files, "train": len(kept), "left out": len(train) - len(kept), "held_out": min(cfg.held_out, len(test)),
            "samples": cfg.samples}


def started(command, limit):
    """Run grpo.py as a child process, which is asked to stop after `limit` seconds: whether it was."""
    if limit is not None and limit <= 0:
        sys.exit("no time is left to train: a larger --minutes")
    child = subprocess.Popen([sys.executable, "experiments/studies/constants.py", WARM_BATCH, *command], cwd=ROOT)
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        child.terminate()
        code = child.wait()
    if code not in (0, 128 + signal.SIGTERM):
        sys.exit("the run failed")
    return code != 0

# ------------------------------------------------------------------------------------------------- its numbers

def result(where, flags, rows, seconds):
    """The numbers of a run, as far as it has come, with its settings, rows, times and machine."""
    found = sums.lines(where / "untrained" / "metrics.jsonl")
    if "training" in seconds:
        found += sums.lines(where / "trained" / "metrics.jsonl")
    held_out = [{name: m[name] for name in m if name == "greedy" or "@" in name} for m in found if "greedy" in m]
    held_out = held_out[:2] + held_out[2:][-1:]
    steps = [m for m in found if m["step"]]
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    cfg, default = vars(read(flags)), vars(grpo.Config())
    settings = {name: x for name, x in cfg.items() if x != default[name] and name not in ("init", "task_args", "steps")}
    return about() | gpu | {
        "settings": settings, "rows": rows, "seconds": seconds, "steps": len(steps), "held out": dict(zip(STAGES, held_out)),
        "curve": {name: [round(m[name], 4) for m in steps] for name in CURVES}}


def rows(runs):
    """The lines of the docs' table: medians, with the range in brackets if there are several runs."""
    def cell(numbers):
        x = sorted(numbers)
        spread = f" ({x[0]:.1%} to {x[-1]:.1%})" if len(x) > 1 else ""
        return f"{statistics.median(x):.1%}{spread}"
    first = next(iter(runs.values()))
    for name, title in MEASURED.items():
        cells = [cell(run["held out"][stage][name] for run in runs.values()) for stage in STAGES]
        yield f"| {title.format(**first['rows'])} | {' | '.join(cells)} |"


def draw(axes, runs):
    """The held-out results of each run at the three stages; accuracy and length in training, over the steps."""
    for run in runs.values():
        for name, colour in (("greedy", "tab:blue"), ("pass@1", "tab:orange")):
            shares = [of[name] for of in run["held out"].values()]
            axes[0].plot(("as it is", "supervised", "GRPO")[:len(shares)], shares, "o-", color=colour, alpha=0.7)
        for axis, name in zip(axes[1:], ("accuracy", "length")):
            axis.plot(range(1, 1 + run["steps"]), run["curve"][name], color="tab:blue", alpha=0.7)


def readme():
    """gsm8k.json, gsm8k.png and the docs' table, from the results of all seeds."""
    runs = {path.parent.name.removeprefix("gsm8k-s"): json.loads(path.read_text())
            for path in sorted((ROOT / "out").glob("gsm8k-s[0-9]*/result.json"))}
    each = ",\n".join(f" {json.dumps(seed)}: {json.dumps(run)}" for seed, run in runs.items())
    (HERE / "gsm8k.json").write_text(f"{{\n{each}\n}}\n")
    sums.figure_of(HERE / "gsm8k.png", partial(draw, runs=runs), {
        "held out: greedy, pass@1 (orange)": "", "right in training, sampled": "step", "tokens of a completion": "step"})
    print("\n".join(rows(runs)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "test"):
        parser.add_argument(name, nargs="?", type=lambda path: Path(path).resolve())
    parser.add_argument("--init", type=lambda path: Path(path).resolve(), default=sums.INIT)
    parser.add_argument("--minutes", type=float, help="time for all; 10, or 2.8 with --tiny")
    parser.add_argument("--seed", type=int, default=1)
    for flag in ("tiny", "readme"):
        parser.add_argument(f"--{flag}", action="store_true")
    args, flags = parser.parse_known_args()
    if args.readme:
        return readme()
    if not args.train:
        parser.error("which training rows? the path of train.jsonl, then that of test.jsonl")
    if not (args.init / "model.safetensors").exists():
        parser.error(f"no model in {args.init}: make one with experiments/models/smollm2.py, here or elsewhere")
    args.minutes = args.minutes or (2.8 if args.tiny else 10)
    run(args, flags)


if __name__ == "__main__":
    main()
