"""Draws figures of the docs from the results in answers/. Needs matplotlib.

    python experiments/studies/figures.py                       # all
    python experiments/studies/figures.py figure5 figure6 figure7 variants

critic.png, labels.png, kl.png and grid.png were drawn by earlier code, as was guess.png.
"""
import json
import statistics

import matplotlib.pyplot as plt

import studies
from experiments import results
from figure7 import KS, of_seeds

# Okabe and Ito's colours, safe for colour-blind readers.
COLOURS = "#000000 #0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #777777".split()
# figures 5 and 6 of the paper: study, part
PARTS = {"figure5": ("paper", "figure 5"), "figure6": ("labels", "4,000 completions, fitted")}


def panels(height=4.0):
    """A figure of two plots, 900 pixels wide."""
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(1, 2, figsize=(9, height), dpi=100, layout="constrained")


def forest(axis, rows, label):
    """Mean paired differences with their 95 % intervals; dots are seeds."""
    axis.axvline(0, color="0.7", linewidth=1)
    for i, x in enumerate(reversed(rows.values())):
        if len(x) > 2:
            axis.plot(studies.interval(x), [i, i], color=COLOURS[0], linewidth=1.5)
        axis.plot(x, [i] * len(x), "o", color=COLOURS[1], markersize=3.5, alpha=0.6)
        axis.plot(statistics.mean(x), i, "D", color=COLOURS[0], markersize=5)
    axis.set_yticks(range(len(rows)), list(reversed(rows)))
    axis.set_xlabel(label)


def part_of(study, part):
    """Medians of greedy accuracy over the steps of a part's rows, and their differences."""
    found = studies.load(study)
    figure, (left, right) = panels(4.5)
    for (name, row), colour in zip(studies.runs_of(study, found, part).items(), COLOURS):
        row = [{p["step"]: 100 * p["greedy"] for p in run["points"]} for run in row.values()]
        steps = sorted(row[0])
        left.plot(steps, [statistics.median(run[step] for run in row) for step in steps],
                  color=colour, label=name, linewidth=1.2)
    left.set(xlabel="step", ylabel="greedy accuracy, %")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    base = next(iter(studies.STUDIES[study][part]))
    forest(right, studies.differences(study, found, part, "greedy"), f"greedy minus {base}, points")
    return figure


def figure7():
    """Figure 7 of the paper: medians of pass@K and maj@K over K, before and after RL."""
    rows = json.loads(studies.answers("figure7").read_text())["rows"]
    figure, axes = panels()
    for axis, task in zip(axes, ("mines", "sums")):
        for kind, colour in (("pass@", COLOURS[1]), ("maj@", COLOURS[2])):
            for when, line in (("before", "--"), ("after", "-")):
                y = [100 * statistics.median(of_seeds(rows[task], when, kind, K)) for K in KS]
                axis.plot(KS, y, color=colour, linestyle=line, label=f"{kind}K, {when} RL")
        axis.set_xscale("log", base=2)
        axis.set_xticks(KS, [str(K) for K in KS])
        axis.set(title=f"{task}, {len(rows[task])} seeds", xlabel="K, completions of a problem",
                 ylabel="held-out problems solved, %", ylim=(0, 102))
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, loc="outside lower center",
                  ncols=4)
    return figure


def variants():
    """All variants of GRPO in two regimes: differences to it in greedy accuracy."""
    figure, axes = panels(9)
    for axis, part in zip(axes, studies.STUDIES["variants"]):
        rows = studies.differences("variants", studies.load("variants"), part, "greedy")
        forest(axis, rows, "greedy accuracy minus GRPO's, points")
        axis.set_title(part)
    return figure


if __name__ == "__main__":
    parser = results.parser(__doc__)
    parser.add_argument("figures", nargs="*", default=[*PARTS, "figure7", "variants"])
    for name in parser.parse_args().figures:
        drawn = part_of(*PARTS[name]) if name in PARTS else globals()[name]()
        drawn.savefig(studies.HERE / "answers" / f"{name}.png")
