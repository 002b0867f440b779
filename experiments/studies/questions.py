"""Open questions about GRPO, and the paper's figures in miniature. Each command makes the runs that are missing,
then a table and a figure:

    python experiments/studies/questions.py 1           # GRPO or PPO, and the cost of sampling
    python experiments/studies/questions.py 2           # the KL in the loss or in the reward
    python experiments/studies/questions.py 3 3b        # outcome or process supervision; 3b: three-digit problems
    python experiments/studies/questions.py 4           # how to train a process reward model
    python experiments/studies/questions.py 5 5b        # whether iterating helps; 5b: with process supervision
    python experiments/studies/questions.py 6           # group baseline and critic together
    python experiments/studies/questions.py figure5 figure6 ladder

Finished runs are kept in --out, so an interrupted study continues where it stopped. --readme replaces the results
that docs/questions.md quotes. A row is compared, seed by seed, with the nearest base row above it; runs of one
seed share their warm start. `rates` is the search for the settings, on problems taken from the training set.
"""
import argparse
import fnmatch
import json
import math
import statistics
import sys
from pathlib import Path

import runs

HERE = Path(__file__).parent
ANSWERS = HERE / "answers"
SEEDS = {"rates": (11,)}                        # all others: 1 to 5
CURVES = ("accuracy", "length", "reward", "explained_variance", "dead_groups", "rm_accuracy", "grad_norm")   # metrics kept of each run
SETTING = ("--task experiments/studies/slips.py --n_embd 128 --warm_steps 1200 --steps 80 --prompts 16 --group 16 --lr 1e-4 --held_out 100 "
           "--samples 4 --eval_every 10").split()


def sized(group, prompts):
    """Flags for `prompts` groups of `group` completions: as many steps as give 20,480 completions in all, 8 to
    10 evaluations, and a learning rate that scales with the square root of the batch, as gradient noise does.
    On the development problems that rate is close to the best for 32, 256 and 1,024 completions per step."""
    rows = group * prompts
    return (f"--group {group} --prompts {prompts} --steps {80 * 256 // rows} --eval_every {10 * 256 // rows} "
            f"--lr {1e-4 * (rows / 256) ** 0.5:.1e}")


OWN = "--critic separate"
FAMILIES = {"GRPO": "", "G = 2": sized(2, 128), "G = 64": sized(64, 4), "2 of 16": sized(2, 16), "64 of 16": sized(64, 16),
            "REINFORCE": "--algo reinforce", "PPO": "--algo ppo", "PPO, own critic": f"--algo ppo {OWN}",
            "steps": "--supervision process", "no std": "--adv_scale none"}
NO_KL = "--kl none"         # the same beta would count more where rewards are smaller
FAST = "--patch critic_lr=10"
PASSES = "--patch passes=4"
MODEL = "--reward model --adv_scale none"
STEPS = f"{MODEL} --supervision process"            # with the KL: without it the policy exploits these rewards
CHOICES = "--reward model --fit_prompts"
TAUGHT = f"{STEPS} {PASSES} --fit_prompts"
KINDS = {"outcomes": "outcome", "steps": "process"}
RULE_OR_MODEL = {"rule": "--adv_scale none", "model": f"{MODEL} --fit_prompts 1024"}
ENDS = {"rule": {"": "", ", no KL": NO_KL}, "model": {"": PASSES, ", one pass": "", ", no KL": f"{PASSES} {NO_KL}"}}


def iterations(fitted):
    """Rows on iterating with a reward model, fitted on 1,024 prompts per iteration unless a row says
    otherwise."""
    yield from {"1 iteration": f"{fitted} 1024", "1 iteration, twice the labels": f"{fitted} 2048",
                "1 iteration, four times the labels": f"{fitted} 4096", "4 iterations": f"{fitted} 1024 --steps 20 --iterations 4"}.items()
    for name, row in {"2, reward kept": "--patch refit=never", "2 iterations": "", "2, no history": "--patch history=0",
                      "2, half history": "--patch history=0.5", "2, reference kept": "--patch reference=kept"}.items():
        yield name, f"{fitted} 1024 --steps 40 --iterations 2 {row}"


def forms():
    """Rows on where the KL is applied, its estimator and beta; without the group's std, which would also
    rescale a penalty."""
    yield "no KL", "--kl none"
    for place, names in {"loss": ("k3", "k2", "ratio*k3", "k1"), "reward": ("k1", "k3", "k2")}.items():
        for name in names:
            for beta in (0.04,) if (place, name) == ("loss", "k1") else (0.04, 0.2, 1.0):
                yield f"{place}, {name}, {beta}", f"--kl {place} --estimator {name} --beta {beta}"


QUESTIONS = {
    "rates": {f"{name}, {lr}": f"{row} --task experiments/studies/development.py --lr {lr}"
              for name, row in FAMILIES.items() for lr in ("3e-5", "1e-4", "3e-4")},
    "1": {name: f"{row} {NO_KL}" for name, row in {
          "16 of 16": "", **{f"{G} of {256 // G}": sized(G, 256 // G) for G in (4, 8, 32, 64)},
          **{f"{G} of 16": sized(G, 16) for G in (4, 8, 32, 64)}, "16 of 2": sized(16, 2),
          "PPO, shared critic": "--algo ppo", "PPO, own critic": f"--algo ppo {OWN}",
          "PPO, fast critic": f"--algo ppo {OWN} {FAST}", "PPO, fast critic, lambda 1": f"--algo ppo {OWN} {FAST} --lam 1",
          "2 of 128": sized(2, 128), "PPO, fast critic, 2 of 128": f"--algo ppo {OWN} {FAST} {sized(2, 128)}",
          "2 of 16": sized(2, 16), "PPO, fast critic, 2 of 16": f"--algo ppo {OWN} {FAST} {sized(2, 16)}"}.items()},
    "2": {name: f"{row} --adv_scale none" for name, row in forms()} | {"reward with std, k1, 0.2": "--kl reward --beta 0.2"},
    "3": {f"{reward}, {kind}{end}": f"{RULE_OR_MODEL[reward]} --supervision {KINDS[kind]} {more}" for reward, ends in ENDS.items()
          for end, more in ends.items() for kind in KINDS},
    "3b": {f"{reward}, {kind}": f"{RULE_OR_MODEL[reward]} --supervision {KINDS[kind]} {ends['']} --difficulty 3 --max_new 160 "
           "--warm_steps 2400" for reward, ends in ENDS.items() for kind in KINDS},
    "4": {"truth": f"{TAUGHT} 1024", "truth, 10 % wrong": f"{TAUGHT} 1024 --patch label_noise=0.1",
          "truth, 30 % wrong": f"{TAUGHT} 1024 --patch label_noise=0.3",
          **{name: f"{TAUGHT} 1024 --labels rollouts --patch tries={n}" for name, n in (("1 rollout", 1), ("4 rollouts", 4), ("16 rollouts", 16))},
          "4 rollouts, 10 % wrong": f"{TAUGHT} 1024 --labels rollouts --patch tries=4 --patch label_noise=0.1",
          "truth of a quarter": f"{TAUGHT} 256", "16 rollouts of a quarter": f"{TAUGHT} 256 --labels rollouts --patch tries=16",
          "16 rollouts of a quarter, 16 passes": f"{STEPS} --fit_prompts 256 --patch passes=16 --labels rollouts --patch tries=16"},
    "5": dict(iterations(CHOICES)), "5b": dict(iterations(TAUGHT)),
    "6": {f"{name}{what}": f"--baseline {baseline} --adv_scale none --lam {lam} {NO_KL} {critic} {row}" for what, row in
          (("", ""), (", 2 of 128", sized(2, 128))) for name, baseline, lam, critic in
          (("group", "group", 1, ""), ("none", "none", 1, ""), ("critic", "value", 1, f"{OWN} {FAST}"),
           ("group and critic", "group+value", 1, f"{OWN} {FAST}"), ("critic, lambda 0.95", "value", 0.95, f"{OWN} {FAST}"),
           ("group and critic, lambda 0.95", "group+value", 0.95, f"{OWN} {FAST}"))},
    "figure5": {"GRPO, outcomes": "", "right answers alone": "--algo reinforce", "GRPO, steps": "--supervision process",
                "right answers alone, but GRPO's loss": "--baseline none --adv_scale none", "GRPO, outcomes, no KL": "--kl none",
                "GRPO, outcomes, all tokens alike": "--loss_mean constant", "right answers alone, each alike": "--algo reinforce --loss_mean sequence",
                "right answers alone, KL": "--algo reinforce --kl loss",
                "right answers alone, clip": "--algo reinforce --clip_low 0.2 --clip_high 0.2"},
    "figure6": {"1 iteration": f"{TAUGHT} 1024 --steps 90", "1 iteration, three times the labels": f"{TAUGHT} 3072 --steps 90",
                "2 iterations": f"{TAUGHT} 1024 --steps 45 --iterations 2",
                "3 iterations": f"{TAUGHT} 1024 --steps 30 --iterations 3"},
    "ladder": {"1 raw reward: all tokens of a completion count alike": "--algo reinforce",
               "2 critic: only what was better than expected counts": "--algo a2c",
               "3 clip: no step takes the policy too far from the rollout's": "--algo ppo --beta 0",
               "4 reference: the policy stays near where it began": "--algo ppo",
               "5 group: the other completions are the baseline": "",
               "6 steps: a reward for each line of the working": "--supervision process"},
}


# Rows that later rows are compared with, besides the first row of each question.
BASES = {"1": ("2 of 128", "2 of 16"),
         "3": ("rule, outcomes, no KL", "model, outcomes", "model, outcomes, no KL"), "3b": ("model, outcomes",),
         "5": ("2 iterations",), "5b": ("2 iterations",), "6": ("group, 2 of 128",), "ladder": tuple(QUESTIONS["ladder"])}


def answer(question, seeds, out):
    """Make all runs of a question: its settings and {row: {seed: summary}}. Rows with a failed run are left
    out."""
    rows = {name: [*SETTING, *row.split()] for name, row in QUESTIONS[question].items()}
    jobs = [(name, seed) for name in rows for seed in seeds]
    made = dict(zip(jobs, runs.run_all([(rows[name], seed) for name, seed in jobs], out)))
    found = {name: {str(seed): summary(made[name, seed]) for seed in seeds} for name in rows
             if all(made[name, seed] for seed in seeds)}
    return {"setting": " ".join(SETTING), **runs.about(), "flags": QUESTIONS[question], "rows": found}


def summary(result):
    """What the tables and figures need from one run."""
    curve = {name: [mean(part) for part in sixteenths(result["steps"][name])] for name in CURVES if name in result["steps"]}
    quality = result.get("quality") or {}
    return {**{name: result["final"][name] for name in runs.MEASURED},
            "kl": result["kl"], "peak": result["peak"], "label tokens": result["label tokens"],
            **{f"{name} {when}": quality[when].get(name) for when in quality for name in ("auc", "calibration")},
            "points": result["points"], "curve": curve,
            **{f"{name} {part}": mean(x) for name, own in curve.items() for part, x in
               (("early", own[:4]), ("late", own[-4:]), ("all", own))}}


def sixteenths(numbers):
    """A list cut into 16 consecutive parts; with fewer than 16 items some parts are empty."""
    n = len(numbers)
    return [numbers[n * i // 16:n * (i + 1) // 16] for i in range(16)]


def mean(numbers):
    """The mean of the numbers that are not None, to 4 digits; None if there are none."""
    x = [n for n in numbers if n is not None]
    return float(f"{statistics.mean(x):.4g}") if x else None


def write(found, file):
    """Write results as JSON, one line per row."""
    head = json.dumps({name: x for name, x in found.items() if name != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found["rows"].items())
    file.write_text(f"{head[:-2]},\n \"rows\": {{\n{rows}\n }}\n}}\n")


# ------------------------------------------------------------------------------------- tables

COLUMNS = (("maj@8", "maj@8", ".1%", 1), ("pass@8", "pass@8", ".1%", 1), ("KL", "kl", ".2f", 1), ("length", "length late", ".0f", 1),
           ("GiB", "peak", ".2f", 2 ** 30))         # title, key in a summary, format, unit
AUC = (("AUC, first policy", "auc start", ".2f", 1), ("AUC, its last policy", "auc end", ".2f", 1),
       ("label tokens, million", "label tokens", ".2f", 1e6))
EXPLAINED = (("explained variance, early", "explained_variance early", ".2f", 1), ("late", "explained_variance late", ".2f", 1))
OWN_COLUMNS = {"1": (("dead groups", "dead_groups all", ".0%", 1), *EXPLAINED), "6": EXPLAINED,
               **dict.fromkeys(("3", "3b", "5", "5b", "figure6"), AUC),
               "4": (*AUC, ("calibration error", "calibration start", ".2f", 1))}
SHARES = (0.8, 0.9)         # levels, as shares of the best row's final pass@1
AT_ONCE = ("4", "5", "5b", "figure6")           # all rows reach the levels by the first evaluation or soon after


def best(found):
    """The highest final pass@1 of any row, as the median over its seeds."""
    return max(statistics.median(run["points"][-1]["pass@1"] for run in row.values()) for row in found["rows"].values())


def reached(row, level, x, form):
    """The median over seeds of x (step, tokens, seconds) when pass@1 reaches a level, or "never"."""
    needed = [runs.until(run, level, x) for run in row.values()]
    middle = statistics.median(math.inf if n is None else n for n in needed)
    return "never" if middle == math.inf else f"{middle / (1e3 if x == 'tokens' else 1):{form}}"


def apart(row, base, of):
    """The mean paired difference to another row in points, with its 95 % interval; in bold if the interval
    excludes 0."""
    x = [100 * (of(run) - of(base[seed])) for seed, run in row.items()]
    if len(x) == 1:
        return f"{x[0]:+.1f}"
    low, high = runs.interval(x)
    text = f"{statistics.mean(x):+.1f} ({low:+.1f} to {high:+.1f})"
    return f"**{text}**" if low * high > 0 else text


def last(run):
    """Final pass@1."""
    return run["pass@1"]


def greedy(run):
    """Final greedy accuracy."""
    return run["greedy"]


MEASURES = {"pass@1": last, "area": runs.area, "greedy": greedy}


def lines(question, found):
    """The lines of a question's table: final pass@1, area under pass@1 and greedy accuracy, each with its
    difference to the base row; what it takes to reach two levels; and the columns of this question."""
    columns, levels = (*COLUMNS, *OWN_COLUMNS.get(question, ())), [share * best(found) for share in SHARES]
    costs = {} if question in AT_ONCE else {"steps": "step", "thousand tokens": "tokens", "seconds": "seconds"}
    titles = [title for name in MEASURES for title in (name, "difference")]
    titles += [f"{name} to {' / '.join(f'{n:.0%}' for n in levels)}" for name in costs]
    titles += [title for title, *_ in columns]
    yield f"| | {' | '.join(titles)} |"
    yield "|---" * (1 + len(titles)) + "|"
    bases = {next(iter(QUESTIONS[question])), *BASES.get(question, ())}
    base = first = found["rows"][next(iter(QUESTIONS[question]))]
    yield f"| before RL | {runs.spread([run['points'][0]['pass@1'] for run in first.values()])} |{' |' * (len(titles) - 1)}"
    for name, row in found["rows"].items():
        cells = []
        for of in MEASURES.values():
            x = [of(run) for run in row.values()]
            cells += [runs.spread(x) if of is last else f"{statistics.median(x):.1%}", "" if row is first else apart(row, base, of)]
        cells += [" / ".join(reached(row, level, x, ".0f") for level in levels) for x in costs.values()]
        for _, key, form, unit in columns:
            x = [run[key] for run in row.values() if run.get(key) is not None]
            cells.append(f"{statistics.median(x) / unit:{form}}" if 2 * len(x) > len(row) else "")     # if most runs have it
        if name in bases:
            base = row
        marked = f"{name} (base)" if name in bases and len(bases) < len(found["rows"]) else name
        yield f"| {marked} | {' | '.join(cells)} |"


# ------------------------------------------------------------------------------------- figures

# Okabe and Ito's colours, safe for colour-blind readers; line styles differ for print in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")


def band(axis, i, name, x, of_seeds):
    """Plot the median of several curves, and a band over their range."""
    y = [sorted(v for v in values if v is not None) for values in zip(*of_seeds)]
    x, y = zip(*((at, v) for at, v in zip(x, y) if v))
    axis.plot(x, [statistics.median(v) for v in y], label=name, color=COLOURS[i % 7], linestyle=LINES[i % 4])
    axis.fill_between(x, [v[0] for v in y], [v[-1] for v in y], color=COLOURS[i % 7], alpha=0.15, linewidth=0)


def curves(axis, found, names, x="step"):
    """pass@1 on 100 held-out problems against steps, or against thousands of sampled tokens."""
    for i, name in enumerate(names):
        of_seeds = [run["points"] for run in found["rows"][name].values()]
        at = [statistics.median(p[x] for p in points) / (1 if x == "step" else 1e3) for points in zip(*of_seeds)]
        band(axis, i, name, at, [[p["pass@1"] for p in points] for points in of_seeds])
    axis.set_xlabel("optimization step" if x == "step" else "thousand tokens sampled")
    axis.set_ylabel("pass@1, held out")
    axis.legend(fontsize=7)


def course(axis, found, names, key, label):
    """A training metric over the steps, averaged over each sixteenth of a run."""
    for i, name in enumerate(names):
        row = found["rows"][name].values()
        steps = next(iter(row))["points"][-1]["step"]
        band(axis, i, name, [steps * (n + 0.5) / 16 for n in range(16)], [run["curve"][key] for run in row])
    axis.set_xlabel("optimization step")
    axis.set_ylabel(label)
    axis.legend(fontsize=7)


def ranges(axis, found, names, key="pass@1", label="pass@1 at the end"):
    """A final number for each row: every seed, and the median."""
    for i, name in enumerate(reversed(names)):
        x = [run[key] for run in found["rows"][name].values()]
        axis.plot([min(x), max(x)], [i, i], color="0.6", linewidth=1)
        axis.plot(x, [i] * len(x), "o", color=COLOURS[0], markersize=3)
        axis.plot(statistics.median(x), i, "|", color=COLOURS[1], markersize=12)
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
    axis.set_xlabel(label)


def against(axis, found, names, key, label):
    """Final pass@1 against another number, medians over seeds; rows that share the first two parts of their
    name form a line."""
    forms = {}
    for name in names:
        forms.setdefault(", ".join(name.split(", ")[:2]), []).append(found["rows"][name].values())
    for i, (form, rows) in enumerate(forms.items()):
        own = sorted(tuple(statistics.median(run[k] for run in row) for k in (key, "pass@1")) for row in rows)
        axis.plot(*zip(*own), marker="os^v"[i % 4], markersize=4, label=form, color=COLOURS[i % 7], linestyle=LINES[i % 4])
    axis.set_xlabel(label)
    axis.set_ylabel("pass@1 at the end")
    axis.legend(fontsize=7)


def among(names, *patterns):
    """The names that match any of the patterns."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


SIZES = ("16 of 16", "2 of 128", "64 of 4", "PPO, shared critic", "PPO, own critic", "PPO, fast critic")
KL = "KL of a completion to the start, nats"
BASELINES = ("group", "none", "critic", "group and critic")
LEARNED = ("1 iteration", "4 iterations", "2 iterations")
PANELS = {          # of each question: (plot function, patterns of its rows or None for all, further arguments)
    "1": ((curves, SIZES, "tokens"), (course, SIZES[3:], "explained_variance", "variance the critic explains"), (ranges, None)),
    "2": ((against, ("no KL", "loss*"), "kl", KL), (against, ("no KL", "reward*"), "kl", KL), (ranges, None)),
    "4": ((curves, ("truth", "1 rollout", "16 rollouts", "16 rollouts of a quarter")),
          (ranges, None, "auc start", "AUC on the first policy"), (ranges, None)),
    **dict.fromkeys(("5", "5b"), ((curves, LEARNED), (course, LEARNED, "reward", "learned reward"), (ranges, None))),
    "6": ((curves, BASELINES), (curves, [f"{name}, 2 of 128" for name in BASELINES]), (ranges, None)),
    **dict.fromkeys(("3", "3b"), ((curves, ("rule*",)), (curves, ("model*",)), (course, ("model*",), "reward", "learned reward"))),
    "rates": ((ranges, None),), "figure6": ((curves, None), (ranges, None)),
    "figure5": ((curves, tuple(QUESTIONS["figure5"])[:4]), (ranges, None)),
    "ladder": ((curves, None),)}


def draw(question, found, file):
    """Draw the figure of a question."""
    try:
        import matplotlib
    except ImportError:
        return print("no figure: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows, panels = list(found["rows"]), PANELS[question]
    figure, axes = plt.subplots(1, len(panels), figsize=(max(4.2 * len(panels), 6), max(3.4, 0.2 * len(rows))), squeeze=False)
    for axis, (panel, names, *more) in zip(axes[0], panels):
        panel(axis, found, rows if names is None else among(rows, *names), *more)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", choices=QUESTIONS)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--out", type=Path, default=Path("out/questions"))
    parser.add_argument("--readme", action="store_true", help="replace the results that the docs quote")
    args = parser.parse_args()
    for question in args.questions:
        found = answer(question, args.seeds or SEEDS.get(question, (1, 2, 3, 4, 5)), args.out.resolve())
        where = ANSWERS if args.readme else args.out
        where.mkdir(parents=True, exist_ok=True)
        write(found | {"command": " ".join(["python", *sys.argv])}, where / f"{question}.json")
        draw(question, found, where / f"{question}.png")
        print("\n".join(lines(question, found)))


if __name__ == "__main__":
    main()
