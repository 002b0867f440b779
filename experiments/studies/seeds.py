"""A table and a figure of several runs, before and after RL, from their folders.

    for s in 1 2 3 4 5; do python grpo.py --task arithmetic --warm_steps 1500 --seed $s --out out/s$s; done
    python experiments/studies/seeds.py out/s1 out/s2 out/s3 out/s4 out/s5

Writes seeds.json and, if matplotlib is installed, seeds.png into --out, or with --readme beside this script, where
docs/measurements.md takes them from.
"""
import argparse
import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("greedy", "pass@1", "pass@8", "maj@8")


def summary(runs):
    """The median, lowest and highest over the runs of each metric, before and after RL."""
    def spread(values):
        values = list(values)
        return {"median": statistics.median(values), "least": min(values), "most": max(values)}
    table = {name: {"before": spread(run[0][name] for run in runs),
                    "after": spread(run[-1][name] for run in runs)} for name in NAMES}
    table["length"] = {"before": spread(run[1]["length"] for run in runs),
                       "after": spread(run[-1]["length"] for run in runs)}
    table["seconds a step"] = spread(statistics.median(r["seconds"] for r in run[1:])
                                     for run in runs)
    table["mismatch"] = max(r["mismatch"] for run in runs for r in run[1:])
    return {"seeds": len(runs), **table}


def rows(table):
    """The lines of the table in docs/measurements.md."""
    def cell(x, form):
        return "{0:{3}} ({1:{3}} to {2:{3}})".format(x["median"], x["least"], x["most"], form)
    for name in (*NAMES, "length"):
        form = ".1f" if name == "length" else ".1%"
        label = "tokens per completion, in training" if name == "length" else name
        before, after = (cell(table[name][when], form) for when in ("before", "after"))
        yield f"| {label} | {before} | {after} |"


def panels():
    """A figure and its three axes, or None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return print("no figure: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt.subplots(1, 3, figsize=(11, 3))


def draw(runs, file):
    """Accuracy, length and KL over the steps of each run."""
    if not (made := panels()):
        return
    figure, axes = made
    titles = {"accuracy": "accuracy, sampled (dots: pass@1, held out)",
              "length": "tokens of a completion", "kl": "KL to the reference (k3)"}
    for axis, (name, title) in zip(axes, titles.items()):
        for run in runs:
            line = [(r["step"], r[name]) for r in run[1:] if name in r]
            axis.plot([step for step, _ in line], [x for _, x in line], alpha=0.7)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
    for end in (0, -1):
        axes[0].plot([run[end]["step"] for run in runs], [run[end]["pass@1"] for run in runs], "k.")
    for axis in axes:
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--readme", action="store_true", help="replace the results that README and docs quote")
    args = parser.parse_args()
    out = HERE if args.readme else args.out
    runs = [[json.loads(line) for line in open(run / "metrics.jsonl")] for run in args.runs]
    table = summary(runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "seeds.json").write_text(json.dumps(table, indent=1) + "\n")
    print("| held out | before RL | after RL |\n|---|---|---|", *rows(table), sep="\n")
    draw(runs, out / "seeds.png")
    print(f"written: {out / 'seeds.json'}")


if __name__ == "__main__":
    main()
