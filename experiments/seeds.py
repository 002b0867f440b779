"""The README's table and figure, from the folders of several runs.

    for s in 1 2 3 4 5; do python grpo.py --task arithmetic --seed $s --out out/s$s; done
    python experiments/seeds.py out/s1 out/s2 out/s3 out/s4 out/s5

Writes seeds.json and, where matplotlib is installed, seeds.png beside this file.
"""
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("greedy", "pass@1", "pass@8", "maj@8")


def main(folders):
    runs = [[json.loads(line) for line in open(Path(f) / "metrics.jsonl")] for f in folders]
    spread = lambda xs: {"median": statistics.median(xs), "least": min(xs), "most": max(xs)}
    table = {name: {when: spread([run[at][name] for run in runs]) for when, at in (("before", 0), ("after", -1))}
             for name in NAMES}
    table["length"] = {when: spread([run[at]["length"] for run in runs])
                       for when, at in (("before", 1), ("after", -1))}
    table["seconds a step"] = spread([statistics.median(r["seconds"] for r in run[1:]) for run in runs])
    table["mismatch"] = max(r["mismatch"] for run in runs for r in run[1:])
    (HERE / "seeds.json").write_text(json.dumps({"seeds": len(runs), **table}, indent=1) + "\n")
    print("| held out | before RL | after RL |\n|---|---|---|")
    for name in (*NAMES, "length"):
        cell = lambda x: (f"{x['median']:.1f} ({x['least']:.1f} to {x['most']:.1f})" if name == "length" else
                          f"{x['median']:.1%} ({x['least']:.1%} to {x['most']:.1%})")
        print(f"| {name} | {cell(table[name]['before'])} | {cell(table[name]['after'])} |")
    try:
        import matplotlib
    except ImportError:
        return print("no figure: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(11, 3))
    for run in runs:
        steps = [r["step"] for r in run[1:]]
        axes[0].plot(steps, [r["accuracy"] for r in run[1:]], alpha=0.7)
        axes[1].plot(steps, [r["length"] for r in run[1:]], alpha=0.7)
        axes[2].plot(steps, [r["kl"] for r in run[1:]], alpha=0.7)
        ends = [run[0], run[-1]]
        axes[0].plot([r["step"] for r in ends], [r["pass@1"] for r in ends], "k.")
    for axis, title in zip(axes, ("accuracy, sampled (dots: held out)", "tokens of a completion",
                                  "KL to the reference (k3)")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(HERE / "seeds.png", dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
