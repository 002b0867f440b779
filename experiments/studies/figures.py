"""Draws the figures of docs/questions.md and docs/figures.md from the results in answers/. Needs matplotlib.

    python experiments/studies/figures.py                       # all whose results are there
    python experiments/studies/figures.py critic labels kl grid figure5
"""
import json
import statistics
from functools import partial
from pathlib import Path

import numpy as np

import runs
import studies
from experiments import results
from figure7 import KS, of_seeds

HERE = Path(__file__).parent
# Okabe and Ito's colours, safe for colour-blind readers.
BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"
GREY = "#777777"
COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY)


def panels(height=4.0):
    """A figure of two plots, 900 pixels wide."""
    import matplotlib
    look = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    matplotlib.rcParams.update(look)
    return results.panels(2, (9, height), dpi=100, layout="constrained")


def save(figure, name):
    """Write a figure beside the results."""
    figure.savefig(HERE / "answers" / f"{name}.png")


def forest(axis, rows, label):
    """Mean paired differences, with their 95 % intervals if there are more than two; dots are seeds. rows: {name:
    differences in points, one for each seed}."""
    axis.axvline(0, color="0.7", linewidth=1)
    for i, x in enumerate(reversed(rows.values())):
        if len(x) > 2:
            axis.plot(runs.interval(x), [i, i], color=BLACK, linewidth=1.5)
        axis.plot(x, [i] * len(x), "o", color=BLUE, markersize=3.5, alpha=0.6)
        axis.plot(statistics.mean(x), i, "D", color=BLACK, markersize=5)
    axis.set_yticks(range(len(rows)), list(reversed(rows)))
    axis.set_xlabel(label)


def named(axis, points):
    """Names of points, {name: (x, y)}, where no other point is near."""
    spans = [max(axis_points) - min(axis_points) or 1 for axis_points in zip(*points.values())]
    for name, (x, y) in points.items():
        near = [other for other, (a, b) in points.items() if abs(a - x) < 0.3 * spans[0] and abs(b - y) < 0.05 * spans[1] and other != name]
        if not near:
            left = x > axis.dataLim.x0 + 0.6 * axis.dataLim.width
            axis.annotate(name[-1], (x, y), (-6 if left else 6, -3), textcoords="offset points", ha="right" if left else "left")


def critic(found):
    """The final greedy accuracy against what the critic explains; and all rows' differences in it."""
    figure, (left, right) = panels(6.5)
    points = {}
    for part, marker, colour in zip(("critics", "values of lines, 100 steps", "6 lines", "24 lines"), "osv^", COLOURS):
        of_part = studies.runs_of("critic", found, part)
        base = next(iter(of_part.values()))
        for name, row in of_part.items():
            row = {seed: run for seed, run in row.items() if run["explained_variance"] is not None}
            if row:
                x = statistics.median(run["explained_variance"] for run in row.values())
                points[part, name] = x, statistics.mean(studies.differences(row, base, "greedy"))
                left.plot(*points[part, name], marker, color=colour)
        left.plot([], [], marker, color=colour, label=part.replace("critics", "12 lines"))
    named(left, points)
    left.axhline(0, color="0.7", linewidth=1)
    left.set(xlabel="explained variance", ylabel="greedy accuracy minus the group's, points")
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    rows = {}
    for part in ("baselines", "critics", "sizes of groups"):
        rows |= studies.of_part("critic", found, part, "greedy")
    forest(right, rows, "12 lines: minus the group, points")
    save(figure, "critic")


def labels(found):
    """Final accuracy against the AUC of the reward model; and what a policy earns by the model and in truth, over the steps."""
    figure, (left, right) = panels()
    for part, colour in (("lines, labelled completions", BLUE), ("outcomes, labelled completions", RED)):
        points = {}
        for name, row in studies.runs_of("labels", found, part).items():
            row = [run for run in row.values() if run["quality"]]
            dots = [(run["quality"]["start"]["auc"], 100 * run["greedy"]) for run in row]
            left.plot([x for x, _ in dots], [y for _, y in dots], "o", color=colour, markersize=3, alpha=0.4)
            if row:
                points[part, name] = [statistics.median(x) for x in zip(*dots)]
        left.plot(*zip(*points.values()), "o-", color=colour, label=f"labels of {part.split(',')[0]}", linewidth=1)
        for (_, name), at in points.items():
            beside = dict(xytext=(6, -3), ha="left") if name == "64,000" else dict(xytext=(-4, 5 if colour == BLUE else -12), ha="right")
            left.annotate(name, at, textcoords="offset points", color=colour, **beside)
    left.set(xlabel="AUC of the reward model on the initial policy", ylabel="final greedy accuracy, %", xlim=(0.35, 1.13), xticks=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    left.legend(frameon=False, loc="upper left")
    of_part = studies.runs_of("labels", found, "the KL's beta")
    for name, beta, colour in (("0.2", "beta 0.2", BLUE), ("0.04", "beta 0.04", RED), ("no KL", "no KL", PINK)):
        row = of_part[f"4,000 completions, {name}"].values()
        for key, style in (("rule_reward", "-"), ("reward", ":")):
            curves = [run[f"{key}, means of 25 steps"] for run in row]
            if curves:
                middle = [statistics.median(x) for x in zip(*curves)]
                right.plot([25 * i + 12.5 for i in range(len(middle))], middle, style, color=colour)
                if style == "-":
                    right.annotate(beta, (25 * len(middle) - 10, middle[-1]), color=colour, va="center")
    right.set(xlabel="step", ylabel="good lines per completion; dotted: as learned", xlim=(0, 370))
    save(figure, "labels")


def kl(found):
    """Accuracy against the KL, a line for each form of the KL, where the reference has a bad habit and where it has none; a
    thin line spans the seeds. k1 in the loss, whose gradient is noise, is beyond the right edge."""
    figure, axes = panels(4.5)
    for axis, part in zip(axes, ("slips and guesses", "slips")):
        forms = {}
        for name, row in studies.runs_of("kl", found, part).items():
            row = row.values()
            if row and not name.startswith("loss, k1"):
                accuracy = sorted(100 * run["pass@1"] for run in row)
                point = statistics.median(run["kl"] for run in row), statistics.median(accuracy), accuracy[0], accuracy[-1]
                forms.setdefault(", ".join(name.split(", ")[:2]), []).append(point)
        for (form, points), colour, marker in zip(forms.items(), (BLACK, *COLOURS), "*sv^D<>"):
            x, y, low, high = zip(*sorted(points))
            axis.plot(x, y, marker=marker, color=colour, label=form, linewidth=1)
            axis.vlines(x, low, high, color=colour, linewidth=0.7)
        axis.set(title=part, xlabel="KL of a completion from the reference, nats", ylabel="pass@1, %")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    save(figure, "kl")


def curves(axis, found, study, part, of="greedy"):
    """Medians of a measure of the evaluations over the steps, a line for each row of a part."""
    of_part = studies.runs_of(study, found, part)
    for (name, row), colour in zip(of_part.items(), (BLACK, *COLOURS)):
        row = [{p["step"]: 100 * p[of] for p in run["points"]} for run in row.values()]
        if row:
            steps = sorted(row[0])
            axis.plot(steps, [statistics.median(run[step] for run in row) for step in steps], color=colour, label=name, linewidth=1.2)
    axis.set(xlabel="step", ylabel=f"{of} accuracy, %" if of == "greedy" else f"{of}, %")


def part_of(found, name, study, part, of="greedy"):
    """The curves of a part, and the differences of its rows."""
    figure, (left, right) = panels(4.5)
    curves(left, found, study, part, of)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    base = "the row above" if part == "the ladder" else next(iter(studies.STUDIES[study][part]))
    forest(right, studies.of_part(study, found, part, of), f"{of} minus {base}, points")
    save(figure, name)


def figure7(found):
    """Figure 7 of the paper: medians of pass@K and maj@K over K, before and after RL."""
    figure, axes = panels()
    for axis, task in zip(axes, ("mines", "sums")):
        for kind, colour in (("pass@", BLUE), ("maj@", RED)):
            for when, line in (("before", "--"), ("after", "-")):
                y = [100 * statistics.median(of_seeds(found["rows"][task], when, kind, K)) for K in KS]
                axis.plot(KS, y, color=colour, linestyle=line, label=f"{kind}K, {when} RL")
        axis.set_xscale("log", base=2)
        axis.set_xticks(KS, [str(K) for K in KS])
        axis.set(title=f"{task}, {len(found['rows'][task])} seeds", xlabel="K, completions of a problem", ylabel="held-out problems solved, %", ylim=(0, 102))
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    save(figure, "figure7")


def variants(found):
    """All variants of GRPO in two regimes: differences to it in greedy accuracy."""
    figure, axes = panels(9)
    for axis, part in zip(axes, studies.STUDIES["variants"]):
        forest(axis, studies.of_part("variants", found, part, "greedy"), "greedy accuracy minus GRPO's, points")
        axis.set_title(part)
    save(figure, "variants")


def grid(found):
    """How often the paths of the held-out problems pass each place, before and after RL. Mines are crosses."""
    figure, axes = panels(4.3)
    share = {when: 100 * np.array(found[when]["passed"]).T / found[when]["walks"] for when in ("before", "after")}      # [row][column]
    for axis, when in zip(axes, share):
        picture = axis.imshow(share[when], cmap="Blues", vmin=0, vmax=max(x.max() for x in share.values()))
        axis.plot(*zip(*found["mines"]), "x", color=RED, markersize=9, markeredgewidth=2)
        axis.set(title=f"{when} RL: {found[when]['right']:.0%} of samples correct", xticks=range(found["size"]), yticks=range(found["size"]))
    figure.colorbar(picture, ax=axes, label="% of walks that pass a cell", shrink=0.8)
    save(figure, "grid")


# Parts of studies: figures 5 and 6 of the paper, and the ladder of docs/derivation.md.
PARTS = {"figure5": ("paper", "figure 5"), "figure6": ("labels", "4,000 completions, fitted"),
         "ladder": ("paper", "the ladder")}
# What draws a figure, and the result that it is drawn from.
FIGURES = {"critic": (critic, "critic"), "labels": (labels, "labels"), "kl": (kl, "kl"),
           "variants": (variants, "variants"), "grid": (grid, "grid"),
           "figure7": (figure7, "figure7"),
           **{name: (partial(part_of, name=name, study=study, part=part), study)
              for name, (study, part) in PARTS.items()}}


def main():
    parser = results.parser(__doc__)
    parser.add_argument("figures", nargs="*", choices=[[], *FIGURES])
    for name in parser.parse_args().figures or FIGURES:
        draw, result = FIGURES[name]
        if studies.answers(result).exists():
            draw(json.loads(studies.answers(result).read_text()))


if __name__ == "__main__":
    main()
