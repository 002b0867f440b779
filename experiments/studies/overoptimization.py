"""Overoptimization of a learned reward: the policy exploits the reward model's errors; and what helps against it.

    python experiments/studies/overoptimization.py --seed 2                     # ten minutes on 2 cores
    python experiments/studies/overoptimization.py --readme                     # the figure of the docs

Writes overoptimization.json and, if matplotlib is installed, overoptimization.png into --out, or with --readme
beside this script, where the docs take them from. The learned reward, the true accuracy and the KL are those of
each step's rollout.
"""
import argparse
import json
from pathlib import Path

from algorithms import HERE, run
from seeds import panels

RUNS = {
    "divided by the group's std": "--reward model --adv_scale group --steps 36",
    "... and beta 0.2, in k2": "--reward model --adv_scale group --steps 36 --estimator k2 --beta 0.2",
    "... and refitted every 9 steps": "--reward model --adv_scale group --steps 9 --iterations 4",
    "not divided (the default)": "--reward model --steps 36",
}
PANELS = {"reward": "learned reward", "accuracy": "right answers", "kl": "KL to the reference"}


def draw(curves, file):
    """Learned reward, accuracy and KL over the steps of each run."""
    if not (made := panels()):
        return
    figure, axes = made
    for axis, (key, title) in zip(axes, PANELS.items()):
        for name, curve in curves.items():
            axis.plot(range(1, len(curve[key]) + 1), curve[key], label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
    axes[1].set_ylim(0, 1)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/algorithms"))
    parser.add_argument("--readme", action="store_true", help="replace the results that the docs quote")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = HERE if args.readme else args.out
    curves = {}
    for name, flags in RUNS.items():
        metrics, _ = run(flags, args.seed, args.out)
        curves[name] = {key: [round(m[key], 4) for m in metrics[1:]] for key in PANELS}
        curves[name]["pass@1"] = [metrics[0]["pass@1"], metrics[-1]["pass@1"]]
        print(f"{name}: pass@1 {metrics[-1]['pass@1']:.1%}, learned reward "
              f"{metrics[1]['reward']:.2f} -> {metrics[-1]['reward']:.2f}", flush=True)
        (out / "overoptimization.json").write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, out / "overoptimization.png")


if __name__ == "__main__":
    main()
