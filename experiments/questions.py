"""The open questions on GRPO, and figures of the paper in miniature. Each is one command, which makes the
runs that are missing, a table and a figure:

    python experiments/questions.py 1           # GRPO or PPO, and what sampling costs
    python experiments/questions.py 2           # the KL in the loss or in the reward
    python experiments/questions.py 3           # rewards of outcomes or of steps
    python experiments/questions.py 4           # how to train a reward model of steps
    python experiments/questions.py 5           # does iterating help
    python experiments/questions.py 6           # group and critic together
    python experiments/questions.py figure5 figure6 ladder

A run is kept in --out, so a study that was stopped goes on. With --readme the results replace those that
docs/questions.md quotes. A row is compared with the first of its question, seed by seed: both begin with the
same warm start. `rates` is what the settings were chosen by, on problems cut from the training ones.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

import runs

HERE = Path(__file__).parent
ANSWERS = HERE / "answers"
SEEDS = {"rates": (11, 12)}                     # elsewhere 1 to 5
LEVEL = 0.7                                     # of pass@1: how much a row takes to come there
SETTING = ("--task experiments/slips.py --n_embd 128 --warm_steps 800 --steps 80 --prompts 16 --group 16 --lr 1e-4 --held_out 100 "
           "--samples 4 --eval_every 10").split()


def sized(group, prompts):
    """So many rows a step, and as many steps as give 20,480 rows in all, with 8 evaluations."""
    steps = 80 * 256 // (group * prompts)
    return f"--group {group} --prompts {prompts} --steps {steps} --eval_every {steps // 8}"


OWN = "--critic separate"
FAMILIES = {"GRPO": "", "G = 2": sized(2, 128), "G = 64": sized(64, 4), "2 of 16": sized(2, 16), "64 of 16": sized(64, 16),
            "REINFORCE": "--algo reinforce", "PPO": "--algo ppo", "PPO, own critic": f"--algo ppo {OWN}",
            "steps": "--supervision process", "no std": "--scale none"}
STEPS = "--reward model --supervision process --scale none --fit_prompts 512"
CHOICES = "--reward model --fit_prompts 1024"


def forms():
    """The KL's places, estimators and weights; without the group's std, which would divide a penalty too."""
    yield "no KL", "--kl none"
    for place, names in {"loss": ("k3", "k2", "ratio*k3", "k1"), "reward": ("k1", "k3", "k2")}.items():
        for name in names:
            for beta in (0.04,) if (place, name) == ("loss", "k1") else (0.04, 0.2, 1.0):
                yield f"{place}, {name}, {beta}", f"--kl {place} --estimator {name} --beta {beta}"


QUESTIONS = {
    "rates": {f"{name}, {lr}": f"{row} --task experiments/development.py --lr {lr}"
              for name, row in FAMILIES.items() for lr in ("3e-5", "1e-4", "3e-4")},
    "1": {"16 of 16": "", **{f"{G} of {256 // G}": sized(G, 256 // G) for G in (2, 4, 8, 32, 64)},
          **{f"{G} of 16": sized(G, 16) for G in (2, 4, 8, 32, 64)},
          **{f"PPO, {critic} critic{what}": f"--algo ppo --critic {kind} {row}" for critic, kind in (("shared", "shared"), ("own", "separate"))
             for what, row in (("", ""), (", lambda 1", "--lam 1"), (", 2 of 128", sized(2, 128)))}},
    "2": {name: f"{row} --scale none" for name, row in forms()} | {"reward, k1, 0.2, std": "--kl reward --beta 0.2"},
    "3": {f"{digits} digits, {reward}, {kind}": f"--difficulty {digits} --reward {reward} --supervision {kind} --scale none" + more
          for digits, more in ((2, ""), (3, " --max_new 160 --warm_steps 1600")) for reward in ("rule", "model")
          for kind in ("outcome", "process")},
    "4": {"truth": STEPS, "truth, 10 % wrong": f"{STEPS} --label_noise 0.1", "truth, 30 % wrong": f"{STEPS} --label_noise 0.3",
          **{f"{n} rollouts": f"{STEPS} --labels rollouts --patch tries={n}" for n in (1, 4, 16)},
          "16 rollouts of a tenth": f"{STEPS} --fit_prompts 50 --labels rollouts --patch tries=16",
          "4 rollouts, 10 % wrong": f"{STEPS} --labels rollouts --label_noise 0.1"},
    "5": {"1 iteration": CHOICES, "1 iteration, twice the labels": "--reward model --fit_prompts 2048",
          "2 iterations": f"{CHOICES} --steps 40 --iterations 2", "4 iterations": f"{CHOICES} --steps 20 --iterations 4",
          "2, no history": f"{CHOICES} --steps 40 --iterations 2 --patch history=0",
          "2, half history": f"{CHOICES} --steps 40 --iterations 2 --patch history=0.5",
          "2, reference kept": f"{CHOICES} --steps 40 --iterations 2 --patch reference=kept",
          "2, reward kept": f"{CHOICES} --steps 40 --iterations 2 --patch refit=never"},
    "6": {f"{name}{what}": f"--baseline {baseline} {critic} --scale none {row}" for what, row in (("", ""), (", 2 of 128", sized(2, 128)))
          for name, baseline, critic in (("group", "group", ""), ("none", "none", ""), ("critic", "value", OWN),
                                         ("group and critic", "group+value", OWN))},
    "figure5": {"GRPO, outcomes": "", "right answers alone": "--algo reinforce", "GRPO, steps": "--supervision process"},
    "figure6": {"1 iteration": f"{CHOICES} --steps 90", "2 iterations": f"{CHOICES} --steps 45 --iterations 2",
                "3 iterations": f"{CHOICES} --steps 30 --iterations 3"},
    "ladder": {"group": "", "raw reward": "--algo reinforce", "critic": "--algo a2c", "clip": "--algo ppo --beta 0",
               "reference": "--algo ppo", "steps": "--supervision process"},
}


def answer(question, seeds, out):
    """The results of all runs of a question: by row, then by seed; a row that failed is left out."""
    rows = {name: [*SETTING, *row.split()] for name, row in QUESTIONS[question].items()}
    jobs = [(name, seed) for seed in seeds for name in rows]
    made = dict(zip(jobs, runs.run_all([(rows[name], seed) for name, seed in jobs], out)))
    found = {name: {str(seed): summary(made[name, seed]) for seed in seeds} for name in rows
             if all(made[name, seed] for seed in seeds)}
    return {"setting": " ".join(SETTING), **runs.about(), "flags": QUESTIONS[question], "rows": found}


def summary(result):
    """Of one run: what the tables and the figures need."""
    return {"area": runs.area(result), **{name: result["final"][name] for name in runs.MEASURED},
            "kl": result["kl"], "peak": result["peak"], "label tokens": result["label tokens"],
            "length": result["steps"]["length"][-1], "seconds": result["points"][-1]["seconds"],
            "tokens": result["points"][-1]["tokens"], "points": result["points"], "quality": result.get("quality"),
            **{f"{x} to it": runs.until(result, LEVEL, x) for x in ("step", "tokens", "seconds")},
            "curve": {name: [x if x is None else round(x, 4) for x in result["steps"][name]]
                      for name in ("accuracy", "explained_variance", "reward", "kl", "dead_groups", "rm_accuracy") if name in result["steps"]}}


def lines(found):
    """A question's table: pass@1 at the end and its area over tokens; the mean difference of each to the
    first row, seed by seed, with its interval, in points."""
    names = ["pass@1", "", "area", "", "maj@8", "pass@8", "KL", "tokens", f"steps to {LEVEL:.0%}", "thousand tokens", "seconds"]
    yield f"| | {' | '.join(names)} |"
    yield "|---" * (1 + len(names)) + "|"
    first = next(iter(found["rows"].values()))
    for name, row in found["rows"].items():
        def middle(key, form, scale=1.0):
            x = [run[key] for run in row.values() if run[key] is not None]
            part = f" ({len(x)} of {len(row)})" if len(x) < len(row) else ""
            return f"{statistics.median(x) / scale:{form}}{part}" if x else "never"

        def apart(key):
            x = [100 * (run[key] - first[seed][key]) for seed, run in row.items()]
            low, high = runs.interval(x)
            return "" if row is first else f"{statistics.mean(x):+.1f} ({low:+.1f} to {high:+.1f})"
        cells = [runs.spread([run["pass@1"] for run in row.values()]), apart("pass@1"), middle("area", ".1%"), apart("area"),
                 middle("maj@8", ".1%"), middle("pass@8", ".1%"), middle("kl", ".2f"), middle("length", ".0f"),
                 middle("step to it", ".0f"), middle("tokens to it", ".0f", 1e3), middle("seconds to it", ".0f")]
        yield f"| {name} | {' | '.join(cells)} |"


# ------------------------------------------------------------------------------------- the figures

# Okabe and Ito's colours, which the colour-blind can tell apart; lines differ in print too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
FIRST = {"1": ("16 of 16", "2 of 128", "64 of 4", "PPO, shared critic", "PPO, own critic")}      # rows whose curves are drawn


def curves(axis, found, names, x="step"):
    """pass@1 on 100 held-out problems over steps or tokens: medians, and bands from the least to the most."""
    for i, name in enumerate(names):
        of_seeds = [run["points"] for run in found["rows"][name].values()]
        at = [statistics.median(p[x] for p in points) / (1 if x == "step" else 1e3) for points in zip(*of_seeds)]
        y = [sorted(p["pass@1"] for p in points) for points in zip(*of_seeds)]
        axis.plot(at, [statistics.median(v) for v in y], label=name, color=COLOURS[i % 7], linestyle=LINES[i % 4])
        axis.fill_between(at, [v[0] for v in y], [v[-1] for v in y], color=COLOURS[i % 7], alpha=0.15, linewidth=0)
    axis.set_xlabel("optimization step" if x == "step" else "thousand tokens sampled")
    axis.set_ylabel("pass@1, held out")
    axis.legend(fontsize=7)


def ranges(axis, found, names, key="pass@1", label="pass@1 at the end"):
    """A number at the end of each row: every seed, and the median."""
    for i, name in enumerate(reversed(names)):
        x = [run[key] for run in found["rows"][name].values()]
        axis.plot([min(x), max(x)], [i, i], color="0.6", linewidth=1)
        axis.plot(x, [i] * len(x), "o", color=COLOURS[0], markersize=3)
        axis.plot(statistics.median(x), i, "|", color=COLOURS[1], markersize=12)
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
    axis.set_xlabel(label)


def frontier(axis, found, names):
    """pass@1 against the KL to the start, medians of each row; a form of the KL is a line over beta."""
    forms = {}
    for name in names:
        forms.setdefault(", ".join(name.split(", ")[:2]), []).append(found["rows"][name].values())
    for i, (form, rows) in enumerate(forms.items()):
        own = sorted(tuple(statistics.median(run[key] for run in row) for key in ("kl", "pass@1")) for row in rows)
        axis.plot(*zip(*own), marker="os^v"[i % 4], markersize=4, label=form, color=COLOURS[i % 7], linestyle=LINES[i % 4])
    axis.set_xlabel("KL of a completion to the start, nats")
    axis.set_ylabel("pass@1 at the end")
    axis.legend(fontsize=7)


def draw(question, found, file):
    """The figure of a question."""
    try:
        import matplotlib
    except ImportError:
        return print("no figure: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    names = list(found["rows"])
    figure, axes = plt.subplots(1, 2, figsize=(9, max(3.2, 0.22 * len(names))))
    if question == "2":
        frontier(axes[0], found, names)
    else:
        shown = [name for name in FIRST.get(question, names[:6]) if name in names]
        curves(axes[0], found, shown, "tokens" if question == "1" else "step")
    ranges(axes[1], found, names)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", choices=QUESTIONS)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--out", type=Path, default=Path("out/questions"))
    parser.add_argument("--readme", action="store_true", help="replace what the docs quote")
    args = parser.parse_args()
    for question in args.questions:
        found = answer(question, args.seeds or SEEDS.get(question, (1, 2, 3, 4, 5)), args.out.resolve())
        where = ANSWERS if args.readme else args.out
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{question}.json").write_text(json.dumps(found | {"command": " ".join(["python", *sys.argv])}, indent=1) + "\n")
        draw(question, found, where / f"{question}.png")
        print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
