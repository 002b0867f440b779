"""A table and a figure of several runs, before and after RL, from their folders.

    for s in 1 2 3 4 5; do python grpo.py --warm_steps 1500 --seed $s --out out/s$s; done
    python experiments/studies/seeds.py out/s1 out/s2 out/s3 out/s4 out/s5

Writes seeds.json and, if matplotlib is installed, seeds.png into --out, or with --readme beside
this script, where docs/measurements.md takes them from.
"""
import statistics
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from experiments import results  # noqa: E402

NAMES = ("greedy", "pass@1", "pass@8", "maj@8")
TITLES = {"accuracy, sampled (dots: pass@1, held out)": "step", "tokens of a completion": "step",
          "KL to the reference (k3)": "step"}


def spread(values):
    """The median, lowest and highest."""
    values = [*values]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(runs):
    """The spread over the runs of each metric, before and after RL."""
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


def draw(axes, runs):
    """Accuracy, length and KL over the steps of each run; dots are pass@1 at both ends."""
    for axis, name in zip(axes, ("accuracy", "length", "kl")):
        for run in runs:
            line = [(r["step"], r[name]) for r in run[1:] if name in r]
            axis.plot(*zip(*line), alpha=0.7)
    for end in (0, -1):
        axes[0].plot([run[end]["step"] for run in runs], [run[end]["pass@1"] for run in runs], "k.")


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    out = HERE if args.readme else args.out
    runs = [results.lines(run / "metrics.jsonl") for run in args.runs]
    table = {"about": results.about()} | summary(runs)
    results.write(out / "seeds.json", table)
    print("| held out | before RL | after RL |\n|---|---|---|", *rows(table), sep="\n")
    results.figure(out / "seeds.png", partial(draw, runs=runs), TITLES)
    print(f"written: {out / 'seeds.json'}")


if __name__ == "__main__":
    main()
