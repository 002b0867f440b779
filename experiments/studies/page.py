"""Writes docs/questions.md and docs/figures.md from the templates in pages/, the ladder's table into docs/derivation.md, and
what was measured into docs/variants.md.

    python experiments/studies/page.py

A template is an f-string in the names below, which compute from the results in answers/. `holds` checks what the text
beside it says, so a page whose words no longer fit the numbers is not written. A row of a study is named "part: row", as
in studies.py; `of` is a measure in a summary of a run. Differences are paired by seed, in points.
"""
import json
import re
import runpy
import statistics
from pathlib import Path

import bias
import figure7
import mines
import runs
import studies
from experiments.models import filters
from runs import with_interval

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGES = ("questions", "figures")
SHARES = ("greedy", "pass@1", "pass@8", "pass@1 at 0.5")          # measures that are shares of problems
FORMS = {"explained_variance": "z.2f", "kl": ".2f", "entropy": ".2f", "length": ".1f", "seconds": ".0f", "tokens": ".1f", "auc": ".2f", "auc end": ".2f",
         "calibration": ".2f", "calibration end": ".2f"}
UNITS = {"tokens": 1e6}
DETECTABLE = {3: 3.264, 4: 2.128, 5: 1.682}                       # means of n differences, in their standard deviations, that a t-test finds in 80 %
TITLES = {"pass@1 at 0.5": "at temperature 0.5", "explained_variance": "explained variance", "kl": "KL, nats", "tokens": "million tokens",
          "auc": "AUC, initial policy", "auc end": "AUC, trained policy"}

GROUP, OWN, OWN_1, FITTED, FITTED_1, SHARED, PUBLISHED = (f"critics: {name}" for name in (
    "group", "own critic", "own critic, lambda 1", "fitted critic", "fitted critic, lambda 1", "shared critic", "shared critic, whitened"))
FITTED_1_SHORT, FITTED_LONG, FITTED_1_LONG = "6 lines: fitted critic, lambda 1", "24 lines: fitted critic", "24 lines: fitted critic, lambda 1"
GROUP_100, FITTED_1_100, VINE = (f"values of lines, 100 steps: {name}" for name in ("group", "fitted critic, lambda 1", "4 continuations"))
TWO, FOUR, SIXTY_FOUR, FITTED_TWO = (f"sizes of groups: {name}" for name in ("2 of 128", "4 of 64", "64 of 4", "fitted critic, 2 of 128"))
NONE, SIGNED = (f"baselines: {name}" for name in ("none", "none, rewards of -1 and 1"))
GROUP_WEAK, NONE_WEAK, SIGNED_WEAK, FITTED_1_WEAK = (f"a weak start: {name}" for name in (
    "group", "none", "none, rewards of -1 and 1", "fitted critic, lambda 1"))
LINES_RULE, LINES_1000, LINES_4000, LINES_16000, LINES_64000 = (f"lines, labelled completions: {name}" for name in (
    "the rule", "1,000", "4,000", "16,000", "64,000"))
OUTCOMES_RULE, OUTCOMES_1000, OUTCOMES_4000, OUTCOMES_16000, OUTCOMES_64000 = (f"outcomes, labelled completions: {name}" for name in (
    "the rule", "1,000", "4,000", "16,000", "64,000"))
ONE_ROLLOUT, FOUR_ROLLOUTS, SIXTEEN_ROLLOUTS, NOISE, CHANCE, FORM = (f"4,000 completions, by: {name}" for name in (
    "1 rollout", "4 rollouts", "16 rollouts", "truth, 30 % wrong", "chance", "the form of lines, by rule"))
SMALL_BETA, LARGE_BETA, NO_KL, RULE_NO_KL, BEST_SMALL_BETA, BEST_NO_KL, LOW_OUTCOMES, OUTCOMES_NO_KL = (f"the KL's beta: {name}" for name in (
    "4,000 completions, 0.04", "4,000 completions, 1.0", "4,000 completions, no KL", "the rule, no KL", "64,000 completions, 0.04",
    "64,000 completions, no KL", "4,000 outcomes, 0.2", "4,000 outcomes, no KL"))
TWICE, FOUR_TIMES, NO_HISTORY, KEPT = (f"4,000 completions, fitted: {name}" for name in (
    "twice", "4 times", "4 times, no history", "4 times, reference kept"))

GROUP_LONG = "24 lines: group"


def kept(name):
    """A result in answers/."""
    return json.loads(studies.answers(name).read_text())


def flags_of(study, row):
    """The flags of a row."""
    part, _, name = row.partition(": ")
    return studies.STUDIES[study][part][name]


def runs_of(study, row):
    """{seed: summary} of a row."""
    return kept(study)["runs"].get(flags_of(study, row), {})


def value(run, of):
    """A measure of a run, also the AUC or calibration error of its reward model, by completions of the first policy, or of the last with
    `end`; None if it has none."""
    name, _, end = of.partition(" ")
    if name in ("auc", "calibration"):
        return run["quality"]["end" if end else "start"][name] if run["quality"] else None
    return run.get(of)


def middle(study, row, of="greedy"):
    """The median over the seeds; None if the runs have none."""
    known = [x for x in (value(run, of) for run in runs_of(study, row).values()) if x is not None]
    return statistics.median(known) if known else None


def before(study, row, of="greedy"):
    """The median of a measure of the first policies."""
    return statistics.median(run["before"][of] for run in runs_of(study, row).values())


def shown(x, of):
    """A number as the page writes it."""
    return "" if x is None else f"{100 * x:.0f}%" if of in SHARES else f"{x / UNITS.get(of, 1):{FORMS[of]}}".replace("-", "−")


def median(study, row, of="greedy"):
    """The median over the seeds, as text."""
    return shown(middle(study, row, of), of)


def seeds(study):
    """How many seeds every row has."""
    return min(len(runs_of(study, row)) for row in studies.rows_of(study).values())


def apart(study, row, base=None, of="greedy"):
    """The differences of a row to another, by default to the one that its part compares it with."""
    if base:
        return studies.differences(runs_of(study, row), runs_of(study, base), of)
    part, _, name = row.partition(": ")
    return studies.of_part(study, kept(study), part, of)[name]


def beside(study, row, base=None, of="greedy"):
    """Where a row ends relative to another, as text: `9.8 points below`."""
    x = statistics.mean(apart(study, row, base, of))
    return f"{abs(x):.1f} points {'from' if abs(x) < 0.05 else 'above' if x > 0 else 'below'}"


def lost(study, row, base=None, of="greedy"):
    """How many points a row is below another, as text."""
    return f"{-statistics.mean(apart(study, row, base, of)):.1f}"


def each(study, row, base=None, of="greedy"):
    """The difference of each seed, as text."""
    return ", ".join(f"{x:+.1f}" for x in apart(study, row, base, of)).replace("-", "−")


def effect(study, row, base=None, of="greedy"):
    """The mean difference with its interval, as text."""
    return with_interval(apart(study, row, base, of))


def corrected(study, row, of="greedy"):
    """The p-value of a difference, by Holm's correction over the study."""
    part, _, name = row.partition(": ")
    return studies.compared(study, kept(study), of)[part, name][3]


def agree(x):
    """How many differences have the sign of their mean, as text."""
    return f"{sum(a * statistics.mean(x) > 0 for a in x)} of {len(x)} seeds agree"


def p_text(study, row, of="greedy"):
    """The corrected p-value, as text."""
    p = corrected(study, row, of)
    return "< 0.01" if p < 0.01 else f"{p:.2f}"


def sure(study, row, of="greedy"):
    """How many seeds agree with the mean difference, and the corrected p-value, as text."""
    return f"{agree(apart(study, row, of=of))}, corrected p {p_text(study, row, of)}"


def down(study, row, base=None, of="greedy"):
    """Whether a row is below another in every seed."""
    return max(apart(study, row, base, of)) < 0


def up(study, row, base=None, of="greedy"):
    """Whether a row is above another in every seed."""
    return min(apart(study, row, base, of)) > 0


def unclear(study, row, base=None, of="greedy"):
    """Whether 0 is within the 95 % interval of the mean difference."""
    low, high = runs.interval(apart(study, row, base, of))
    return low <= 0 <= high


def at_zero(study, row):
    """Whether every seed ends at 0 %, as the page rounds it."""
    return max(run["greedy"] for run in runs_of(study, row).values()) < 0.005


def ratio(study, row, base, of="seconds"):
    """How many times as much a row takes as another, as text."""
    return f"{middle(study, row, of) / middle(study, base, of):.1f}"


def times(study, row, base, of="seconds"):
    """The same for each seed, the lowest and highest, as text."""
    known = [run[of] / runs_of(study, base)[seed][of] for seed, run in runs_of(study, row).items()]
    return f"{min(known):.1f} to {max(known):.1f}"


def each_end(study, row, of="greedy"):
    """What each seed reaches, as text."""
    *most, last = (shown(run[of], of) for _, run in sorted(runs_of(study, row).items()))
    return f"{', '.join(most)} and {last}"


def change(study, row, name):
    """The change of a metric from the mean of the first 25 steps to that of the last 25, with its interval over the seeds, as text."""
    means = [run[f"{name}, means of 25 steps"] for run in runs_of(study, row).values()]
    return with_interval([x[-1] - x[0] for x in means])


def best_rate(family):
    """The learning rate with which a family of rows ended best on the development map."""
    found = {rate: runs_of("tuning", f"{family}: {family}, {rate}")["101"]["greedy"] for rate in studies.RATES}
    return max(found, key=found.get)


def reached(study, row, base, spent):
    """A row's median greedy accuracy when it has spent as many tokens or seconds as another row did in all, by its curve, as text."""
    limits = {seed: run["points"][-1][spent] for seed, run in runs_of(study, base).items()}
    return shown(statistics.median(runs.reached(run["points"], spent, limits[seed], "greedy") for seed, run in runs_of(study, row).items()),
                 "greedy")


def at_equal_kl(part, form, of="pass@1"):
    """A form's differences to the frontier of k1 in the reward, at its own KL."""
    return studies.at_equal_kl(kept("kl"), part, of)[form]


def frontier(part, form, of="pass@1"):
    """Their mean with its interval, as text."""
    return with_interval(at_equal_kl(part, form, of))


def gate(name):
    """The median over the development maps."""
    return statistics.median(of_map[name] for of_map in kept("gates")["maps"].values())


def error(form, distance="0.5"):
    """The relative error of the gradient of a form of the KL, on the enumerable model."""
    return kept("bias")["forms"][form][distance]["error"]


def share(task, when, of):
    """The median over the seeds of a share of figure 7, as text."""
    return f"{100 * statistics.median(run[when][of] for run in kept('figure7')['rows'][task].values()):.0f}%"


def changes(task, of):
    """What RL adds to a share of figure 7, in points."""
    return [100 * (run["after"][of] - run["before"][of]) for run in kept("figure7")["rows"][task].values()]


def countdown():
    """pass@8 of SmolLM2 on countdown in per cent, before and after RL, of each seed."""
    of_seeds = json.loads((ROOT / "experiments" / "models" / "countdown.json").read_text())["runs"].values()
    return [(100 * run["before"]["pass@8"], 100 * run["after"]["pass@8"]) for run in of_seeds]


def holds(*conditions):
    """Nothing, if the text beside it fits the numbers."""
    assert all(conditions), f"{sum(not x for x in conditions)} of {len(conditions)} does not hold"
    return ""


def table(study, rows, *columns):
    """A table of some rows: medians over the seeds, and the differences in greedy accuracy where a row is compared."""
    titles = ["", "greedy", "difference", *(TITLES.get(of, of) for of in columns)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    parts = {row.partition(": ")[0] for row in rows}
    for row in rows:
        part, _, name = row.partition(": ")
        first = name == next(iter(studies.STUDIES[study][part]))
        cells = [median(study, row), "" if first else effect(study, row), *(median(study, row, of) for of in columns)]
        lines.append(f"| {name if len(parts) == 1 else row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kl_table(part, rows):
    """A table of forms of the KL: medians, and the difference in pass@1 to k1 in the reward."""
    lines = ["| | KL, nats | tokens | greedy | pass@1 | minus k1 in the reward, beta 0.1 |", "|---" * 6 + "|"]
    base = f"{part}: reward, k1, 0.1"
    for name in rows:
        row = f"{part}: {name}"
        cells = [median("kl", row, of) for of in ("kl", "length", "greedy", "pass@1")]
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if row == base else effect('kl', row, base, 'pass@1')} |")
    return "\n".join(lines)


def everything(study, *parts):
    """The table of all rows, the command and the flags, folded."""
    parts = parts or tuple(studies.STUDIES[study])
    found, made = kept(study), kept(study)["runs"].values()
    about = [run["about"] for of_seeds in made for run in of_seeds.values()]
    dates, machines = sorted({x["date"] for x in about}), sorted({f"{x['machine']}, {x['cores']} cores" for x in about})
    lines = ["<details><summary>All rows, command and flags</summary>", "", f"`{found['command']}`, {dates[0]} to {dates[-1]}, torch "
             f"{', '.join(sorted({x['torch'] for x in about}))}, {'; '.join(machines)}. Flags are those of the commit that made a row; runs.py still reads them. Every row has the flags `{found['setting']}`, then its own; rows with the same flags are the same runs. Curves are of half of the held-out problems.", ""]
    lines += [*studies.lines(study, found, parts), "", "| | flags |", "|---|---|"]
    lines += [f"| {part}: {name} | {f'`{flags}`' if flags else ''} |" for part in parts for name, flags in studies.STUDIES[study][part].items()]
    return "\n".join([*lines, "", "</details>"])


def bias_table():
    """The gradients' errors, folded."""
    return "\n".join(["<details><summary>The error of each form's gradient</summary>", "", *bias.lines(kept("bias")), "", "</details>"])


def figure7_table():
    """pass@K and maj@K, folded."""
    return "\n".join(["<details><summary>All numbers</summary>", "", *figure7.rows(kept("figure7")["rows"]), "", "</details>"])


def rendered(name):
    """A page, from its template."""
    return runpy.run_path(str(HERE / "pages" / f"{name}.py"), init_globals=globals())["PAGE"]


def shown_to_differ(study, of="greedy"):
    """{(part, row): mean difference} of the rows whose difference holds after correction."""
    return {row: x[0] for row, x in studies.compared(study, kept(study), of).items() if x[3] < 0.05}


def verdict(study):
    """How many variants could be shown to differ from GRPO, and which, as a sentence."""
    n, found = sum(len(rows) - 1 for rows in studies.STUDIES[study].values()), shown_to_differ(study)
    which = "; ".join(f"{name}, {part} ({x:+.1f} points)" for (part, name), x in sorted(found.items(), key=lambda row: -row[1])).replace("-", "−")
    return f"{len(found) or 'None'} of {n} rows could be shown to differ from GRPO{': ' * bool(found)}{which}."


def detectable(study, of="greedy"):
    """The difference that a paired t-test (5 %, two-sided) finds in 80 % of studies with as many seeds as the rows with most
    of them, and their median spread, as text."""
    found = [x for part in studies.STUDIES[study] for x in studies.of_part(study, kept(study), part, of).values()]
    n = max(len(x) for x in found)
    return f"{DETECTABLE[n] * statistics.median(statistics.stdev(x) for x in found if len(x) == n):.1f}"


def at_rate(part, rate):
    """{row: greedy accuracy} of a part of the variants with a learning rate, on the development map."""
    found = kept("variants_tuning")["runs"]
    return {name: found[f"{row} --lr {rate}"]["101"]["greedy"] for name, row in studies.REGIMES[part].items()}


def span(part, rate):
    """Their lowest and highest, as text."""
    known = at_rate(part, rate).values()
    return f"{shown(min(known), 'greedy')} and {shown(max(known), 'greedy')}"


def listed(rows):
    """Rows with their greedy accuracy, the highest first, as text."""
    return ", ".join(f"{name} {shown(x, 'greedy')}" for name, x in sorted(rows.items(), key=lambda row: -row[1]))


def filtered():
    """What experiments/models/filters.py measured."""
    return json.loads((filters.HERE / "filters.json").read_text())


def of_filters(row, name, steps=slice(None)):
    """The median over the seeds of the mean of a curve over some steps, as text."""
    return f"{statistics.median(statistics.mean(run['curves'][name][steps]) for run in filtered()['runs'][row].values()):.0%}"


def with_measured(text):
    """The text of docs/variants.md, with the section on what was measured as it is now."""
    return re.sub(r"## Measured\n.*?(?=\n## )", lambda _: rendered("variants"), text, flags=re.S)


def with_ladder(text):
    """The text of docs/derivation.md, with the ladder's table as it is now."""
    return re.sub(r"<details>.*?</details>", lambda _: everything("paper", "the ladder"), text, flags=re.S)


def main():
    for name in PAGES:
        (ROOT / "docs" / f"{name}.md").write_text(rendered(name))
    derivation = ROOT / "docs" / "derivation.md"
    derivation.write_text(with_ladder(derivation.read_text()))
    variants = ROOT / "docs" / "variants.md"
    variants.write_text(with_measured(variants.read_text()))


if __name__ == "__main__":
    main()
