"""SmolLM2-135M-Instruct learns countdown with two numbers: 40 steps of imitating demonstrations, because it never
writes the tags by itself, then 24 steps of RL. On 2 CPU cores, 20 minutes for each seed:

    python experiments/models/smollm2.py                   # the model, into out/smollm2
    python experiments/models/countdown.py 1 2 3           # a run for each seed
    python experiments/models/countdown.py --untrained     # the model before both
    python experiments/models/countdown.py --readme        # countdown.json and countdown.png
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import sums

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# The learning rates were chosen on training problems, with seed 11. Evaluations use the first 100 held-out problems.
TASK = "--task countdown --difficulty 2 --max_new 64 --held_out 100 --dtype bfloat16".split()
FLAGS = [*TASK, "run.warm_start.WARM_BATCH=16", *("--warm_steps 40 --warm_lr 1e-4 --steps 24 --prompts 16 --group 8 --minibatches 1 "
                  "--lr 3e-5 --half_life 15 --kl none --save_every 23").split()]
MEASURED = ("greedy", "pass@1", "pass@8", "maj@8")


def folder(seed):
    return ROOT / "out" / f"countdown-s{seed}"


def rows(result):
    """The lines of the docs' table: medians, with the range in brackets."""
    runs = result["runs"].values()

    def cell(when, name):
        x = sorted(run[when][name] for run in runs)
        return f"{statistics.median(x):.1%} ({x[0]:.1%} to {x[-1]:.1%})"
    for name in MEASURED:
        yield f"| {name} | {result['untrained'][name]:.1%} | {cell('before', name)} | {cell('after', name)} |"


def draw(axes, result):
    """Accuracy, length and entropy over the steps of each seed."""
    for run in result["runs"].values():
        for axis, name in zip(axes, ("accuracy", "length", "entropy")):
            axis.plot(range(1, 1 + len(run["curve"][name])), run["curve"][name], color="tab:blue", alpha=0.7)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int)
    for flag in ("untrained", "readme"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    for seed in args.seeds:
        sums.ours(seed, folder(seed), *FLAGS)
    if args.untrained:
        said = subprocess.check_output([sys.executable, ROOT / "grpo.py", *TASK, "--eval_only", "--init", sums.INIT], text=True)
        print(said)
        measured = {name: float(x) / 100 for name, x in re.findall(r"(\S+) ([\d.]+)%", said)}
        (ROOT / "out" / "countdown-untrained.json").write_text(json.dumps(measured))
    if args.readme:
        result = {"untrained": json.loads((ROOT / "out" / "countdown-untrained.json").read_text()),
                  "runs": {}}
        for p in sorted((ROOT / "out").glob("countdown-s[0-9]*")):
            run = sums.of_run(p)
            result["runs"][p.name.removeprefix("countdown-s")] = {name: run[name] for name in ("before", "after", "curve", "samples")}
        (HERE / "countdown.json").write_text(json.dumps(result, indent=1) + "\n")
        sums.figure_of(HERE / "countdown.png", partial(draw, result=result), {
            "accuracy, sampled": "step", "tokens of a completion": "step", "entropy of a token": "step"})
        print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
