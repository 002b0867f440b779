"""Writes docs/questions.md, docs/figures.md and docs/variants.md from the templates in pages/, and
from pages/answers/ what was found in detail, with all rows and flags, beside the results.

    python experiments/studies/page.py

A template is an f-string in the names below, which compute from the results. What its words claim
is checked where they are written: by functions that return a text only if it is true, and by
`holds`. A row is (study, part, name), as in studies.py; `of` is a measure in a summary of a run.
Differences are paired by seed, in points.
"""
import functools
import json
import math
import re
import runpy
import statistics
import textwrap
from pathlib import Path

import runs
import studies
from experiments.models import filters
from runs import with_interval

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("questions", "figures", "variants")}
PAGES |= {f"answers/{name}": HERE / "answers" / f"{name}.md"
          for name in ("critic", "labels", "kl", "paper", "variants", "figure7")}
SHARES = ("greedy", "pass@1", "pass@8", "pass@1 at 0.5")          # of problems
FORMS = {"explained_variance": "z.2f", "kl": ".2f", "length": ".1f", "entropy": ".2f",
         "seconds": ".0f", "tokens": ".1f", "auc": ".2f", "calibration": ".2f"}
UNITS = {"tokens": 1e6}
TITLES = {"explained_variance": "explained variance", "kl": "KL, nats a completion", "auc": "AUC before RL",
          "auc end": "AUC after RL", "tokens": "million tokens", "length": "tokens"}
# Means of n differences, in their standard deviations, that a t-test finds in 80 % of studies.
DETECTABLE = {3: 3.264, 4: 2.128, 5: 1.682}


def rows(study, part, *names):
    """Some rows of a part of a study, or all."""
    return [(study, part, name) for name in names or studies.STUDIES[study][part]]


# The rows that templates speak of.
SEPARATE = ("own critic", "own critic, lambda 1", "fitted critic", "fitted critic, lambda 1")
GROUP, OWN, OWN_1, FITTED, FITTED_1, SHARED = rows(
    "critic", "critics", "group", *SEPARATE, "shared critic")
_, GROUP_STD, LEAVE_ONE_OUT, NONE, SIGNED = rows("critic", "baselines")
SIXTEEN, TWO, FOUR, SIXTY_FOUR, FITTED_TWO = rows("critic", "sizes of groups")
WEAK, NONE_WEAK, SIGNED_WEAK, FITTED_1_WEAK = rows("critic", "a weak start")
FITTED_1_SHORT = rows("critic", "6 lines")[-1]
GROUP_LONG, _, FITTED_LONG, FITTED_1_LONG = rows("critic", "24 lines")
GROUP_100, FITTED_1_100, VINE = rows("critic", "values of lines, 100 steps")

LABELLED = ("1,000", "4,000", "16,000", "64,000")                # completions
LINES_1000, LINES_4000, LINES_16000, LINES_64000 = rows(
    "labels", "lines, labelled completions", *LABELLED)
OUTCOMES_RULE, OUTCOMES_1000, OUTCOMES_4000, OUTCOMES_16000, OUTCOMES_64000 = rows(
    "labels", "outcomes, labelled completions", "the rule", *LABELLED)
(BETA, SMALL_BETA, LARGE_BETA, NO_KL, RULE_NO_KL, OUTCOMES_LOW, OUTCOMES_NO_KL, BEST_SMALL_BETA,
 BEST_NO_KL) = rows("labels", "the KL's beta")
TRUTH, *ROLLOUTS, NOISE, CHANCE, _ = rows("labels", "4,000 completions, by")
TWICE, FOUR_TIMES = rows("labels", "4,000 completions, fitted", "twice", "4 times")


def form(name, beta, part="slips and guesses"):
    """A row of the KL: a form with a beta."""
    return "kl", part, f"{name}, {beta}"


BETAS = ("0.1", "0.3", "1.0")
K1, K2, K3, RATIO_K3 = ({beta: form(name, beta) for beta in BETAS}
                        for name in ("reward, k1", "loss, k2", "loss, k3", "loss, ratio*k3"))
NO_KL_SLIPS = ("kl", "slips and guesses", "no KL")
ONCE, OFTEN = studies.REGIMES


# ------------------------------------------------------------------------------ rows and measures

@functools.cache
def kept(name):
    """A result in answers/."""
    return json.loads(studies.answers(name).read_text())


def runs_of(row):
    """{seed: summary} of a row."""
    study, part, name = row
    return studies.runs_of(study, kept(study), part)[name]


def value(run, of):
    """A measure of a run, also the AUC or calibration error of its reward model, by completions
    of the first policy, or of the last with `end`; None if it has none."""
    name, _, end = of.partition(" ")
    if name in ("auc", "calibration"):
        return run["quality"] and run["quality"]["end" if end else "start"][name]
    return run.get(of)


def middle(row, of="greedy"):
    """The median over the seeds; None if the runs have none."""
    known = [value(run, of) for run in runs_of(row).values()]
    known = [x for x in known if x is not None]
    return statistics.median(known) if known else None


def before(row, of="greedy"):
    """The median of a measure of the first policies."""
    return statistics.median(run["before"][of] for run in runs_of(row).values())


def apart(row, base=None, of="greedy"):
    """The differences of a row to another, by default to the one that its part compares it with."""
    if base:
        return studies.differences(runs_of(row), runs_of(base), of)
    study, part, name = row
    return studies.of_part(study, kept(study), part, of)[name]


def of_model(name):
    """The runs of a result in experiments/models."""
    return json.loads((filters.HERE / f"{name}.json").read_text())["runs"]


def of_figure7(task, when, of):
    """The median over the seeds of a share of figure 7, as text."""
    found = kept("figure7")["rows"][task].values()
    return f"{100 * statistics.median(run[when][of] for run in found):.0f}%"


def changes(task, of):
    """What RL adds to a share of figure 7, in points, for each seed."""
    found = kept("figure7")["rows"][task].values()
    return [100 * (run["after"][of] - run["before"][of]) for run in found]


def seeds(study):
    """How many seeds every row has."""
    return min(len(runs_of(row)) for part in studies.STUDIES[study] for row in rows(study, part))


def shown_to_differ(study, of="greedy"):
    """{(part, name): mean difference} of the rows whose difference holds after correction."""
    found = studies.compared(study, kept(study), of)
    return {row: x[0] for row, x in found.items() if x[3] < 0.05}


def down(row, base=None, of="greedy"):
    """Whether a row is below another in every seed."""
    return max(apart(row, base, of)) < 0


def up(row, base=None, of="greedy"):
    """Whether a row is above another in every seed."""
    return min(apart(row, base, of)) > 0


def unclear(row, base=None, of="greedy"):
    """Whether 0 is within the 95 % interval of the mean difference."""
    low, high = runs.interval(apart(row, base, of))
    return low <= 0 <= high


def best_rate(family):
    """The learning rate with which a family of rows ended best on the development map."""
    found = {rate: middle(("tuning", family, f"{family}, {rate}")) for rate in studies.RATES}
    return max(found, key=found.get)


# --------------------------------------------------------- as text, and only if the words are true

def holds(*conditions):
    """Nothing, if the text beside it fits the numbers."""
    wrong = [i for i, x in enumerate(conditions) if not x]
    assert not wrong, f"of the conditions, counted from 0, {wrong} do not hold"
    return ""


def shown(x, of):
    """A number as a page writes it."""
    if x is None:
        return ""
    if of in SHARES:
        return f"{100 * x:.0f}%"
    return f"{x / UNITS.get(of, 1):{FORMS[of.removesuffix(' end')]}}".replace("-", "−")


def median(row, of="greedy"):
    """The median over the seeds."""
    return shown(middle(row, of), of)


def each_end(row, of="greedy"):
    """What each seed reaches."""
    *most, last = (shown(run[of], of) for _, run in sorted(runs_of(row).items()))
    return f"{', '.join(most)} and {last}"


def effect(row, base=None, of="greedy"):
    """The mean difference with its interval."""
    return with_interval(apart(row, base, of))


def each(row, base=None, of="greedy"):
    """The difference of each seed."""
    return ", ".join(f"{x:+.1f}" for x in apart(row, base, of)).replace("-", "−")


def lost(row, base=None, of="greedy"):
    """By how much a row is below another on average, of one that is below in every seed."""
    assert down(row, base, of), row
    return f"{-statistics.mean(apart(row, base, of)):.1f}"


def gained(row, base=None, of="greedy"):
    """By how much a row is above another on average, of one that is above in every seed."""
    assert up(row, base, of), row
    return f"{statistics.mean(apart(row, base, of)):.1f}"


def bound(*differences):
    """Within how many points: the 95 % intervals have 0 in them and end before."""
    intervals = [runs.interval(x) for x in differences]
    assert all(low <= 0 <= high for low, high in intervals), intervals
    most = math.ceil(max(abs(end) for interval in intervals for end in interval))
    return "1 point" if most == 1 else f"{most} points"


def within(*compared, of="greedy"):
    """The same for rows, each against the first of its part, or for pairs of a row and a base: of
    what a page calls no difference, at most 5."""
    found = wide(*compared, of=of)
    assert int(found.split()[0]) <= 5, (compared, found)
    return found


def wide(*compared, of="greedy"):
    """The same for what a page calls unclear, however wide it is."""
    pairs = [pair if isinstance(pair[0], tuple) else (pair, None) for pair in compared]
    return bound(*(apart(row, base, of) for row, base in pairs))


def ahead(name, beta, part):
    """By how many points of pass@1 a form of the KL is above k1 in the reward, at its own KL, with
    an interval above 0, where it is not above it in every part."""
    apart_by = {of: studies.at_equal_kl(kept("kl"), of, "pass@1")
                for of in (part, "slips and guesses")}
    assert runs.interval(apart_by[part][f"{name}, {beta}"])[0] > 0
    low, high = runs.interval(apart_by["slips and guesses"][f"{name}, 0.3"])
    assert low <= 0 <= high
    return f"{statistics.mean(apart_by[part][f'{name}, {beta}']):.1f}"


def zero(*ended):
    """That every seed of some rows ends at 0 %, as a page rounds it."""
    for row in ended:
        assert max(run["greedy"] for run in runs_of(row).values()) < 0.005, row
    return "0%"


def p_text(row, of="greedy"):
    """The p-value of a difference, by Holm's correction over the study."""
    study, *key = row
    p = studies.compared(study, kept(study), of)[tuple(key)][3]
    return "< 0.01" if p < 0.01 else f"{p:.2f}"


def ratio(row, base, of="seconds"):
    """How many times as much a row takes as another, by their medians."""
    return f"{middle(row, of) / middle(base, of):.1f}"


def change(row, name):
    """The change of a metric from the first 25 steps to the last, with its interval."""
    means = [run[f"{name}, means of 25 steps"] for run in runs_of(row).values()]
    return with_interval([x[-1] - x[0] for x in means])


def reached(row, base, spent):
    """A row's median greedy accuracy when it has spent as many tokens or seconds as another row
    did in all, by its curve."""
    limits = {seed: run["points"][-1][spent] for seed, run in runs_of(base).items()}
    known = [runs.reached(run["points"], spent, limits[seed], "greedy")
             for seed, run in runs_of(row).items()]
    return shown(statistics.median(known), "greedy")


def detectable(study, of="greedy"):
    """The difference that a paired t-test (5 %, two-sided) finds in 80 % of studies with as many
    seeds as the rows with most of them, and their median spread."""
    parts = studies.STUDIES[study]
    found = [x for part in parts for x in studies.of_part(study, kept(study), part, of).values()]
    n = max(map(len, found))
    spread = statistics.median(statistics.stdev(x) for x in found if len(x) == n)
    return f"{DETECTABLE[n] * spread:.1f}"


# ----------------------------------------------------------------------------------------- tables

def as_table(titles, lines):
    """A table of cells."""
    lines = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(shown_rows, *columns, of="greedy", base=None):
    """A table of rows: medians over the seeds, and how each differs from the first of its part,
    or from `base`."""
    one_part = len({part for _, part, _ in shown_rows}) == 1
    lines = []
    for row in shown_rows:
        study, part, name = row
        first = base or (study, part, next(iter(studies.STUDIES[study][part])))
        cells = [median(row, column) for column in columns]
        differs = "" if row == first else effect(row, first, of)
        lines.append([name if one_part else f"{part}: {name}", *cells, differs])
    title = f"difference in {'accuracy' if of == 'greedy' else of}"
    return as_table(["", *(TITLES.get(column, column) for column in columns), title], lines)


def everything(study):
    """How a study was made, the table of all its rows, and their flags."""
    found = kept(study)
    about = [run["about"] for of_seeds in found["runs"].values() for run in of_seeds.values()]
    dates = sorted({x["date"] for x in about})
    machines = "; ".join(sorted({f"{x['machine']}, {x['cores']} cores" for x in about}))
    versions = ", ".join(sorted({x["torch"] for x in about}))
    flags = [[f"{part}: {name}", f"`{row}`" if row else ""]
             for part, of_part in studies.STUDIES[study].items() for name, row in of_part.items()]
    return "\n".join([
        f"`{found['command']}`, {dates[0]} to {dates[-1]}, torch {versions}, {machines}. Medians "
        "over the seeds; differences to the first row of a part, in the ladder to the row above, "
        "with 95% intervals, bold where they hold after Holm's correction over the study.", "",
        *studies.lines(study, found), "",
        f"Every row has the flags `{found['setting']}`, then its own; rows with the same flags are "
        "the same runs. Flags are those of the commit that made a row; runs.py still reads them. "
        "Curves are of half of the held-out problems.", "",
        as_table(["", "flags"], flags)])


# ------------------------------------------------------------------------------------------ pages

def by_hand(name, title):
    """A section of a page as it stands, which no template has."""
    return re.search(rf"^## {title}\n.*?(?=\n## |\Z)", PAGES[name].read_text(), re.M | re.S)[0]


def wrapped(text):
    """The text with its paragraphs and list items in lines of at most 120 characters."""
    def fill(item):
        return textwrap.fill(" ".join(item.split()), 120, break_long_words=False,
                             break_on_hyphens=False, subsequent_indent="  " * item.startswith("- "))
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", text)]
    blocks = [block if re.match(r"\||#|!\[|```", block) else
              "\n".join(fill(item) for item in re.split(r"\n(?=- )", block))
              for block in blocks if block]
    return "\n\n".join(blocks) + "\n"


def rendered(name):
    """A page, from its template."""
    template = HERE / "pages" / f"{name}.py"
    return wrapped(runpy.run_path(str(template), init_globals=globals())["PAGE"])


def main():
    for name, file in PAGES.items():
        file.write_text(rendered(name))


if __name__ == "__main__":
    main()
