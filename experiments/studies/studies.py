"""Studies on tasks in which a critic and a reward model can learn. Each command makes the runs that are missing,
then a table and figures:

    python experiments/studies/studies.py tuning                # learning rates and betas, on a development map
    python experiments/studies/studies.py critic                # when a critic pays, and what sampling costs
    python experiments/studies/studies.py labels                # what labels a reward model needs, and when it is farmed
    python experiments/studies/studies.py kl                    # the forms of the KL, at equal KL
    python experiments/studies/studies.py paper                 # figure 5 of the paper, and the ladder of the derivation
    python experiments/studies/studies.py variants_tuning       # learning rates of the variants of GRPO
    python experiments/studies/studies.py variants              # variants of GRPO, on-policy and with many updates per rollout
    python experiments/studies/studies.py critic --seeds 1 2 --parts "24 lines"         # only these seeds and rows

The results are kept in answers/, one JSON file for each study; a run that is there with the same flags is not made
again, so delete what you want to repeat. All runs of a seed share its map and its warm start. A row is compared, seed
by seed, with the first row of its part of the table, in the ladder with the row above it.
"""
import concurrent.futures
import json
import math
import os
import statistics
from pathlib import Path

import numpy as np

import runs
from experiments import results
from run import files

HERE = Path(__file__).parent
SEEDS = {"tuning": (101,), "variants_tuning": (101,)}                      # development maps; all other studies: 1 to 5
SETTING = ("--task experiments/studies/mines.py --difficulty 2 --max_new 49 --n_layer 2 --n_embd 128 --n_head 4 --warm_steps 800 "
           "--warm_batch 64 --steps 300 --prompts 16 --group 16 --lr 1e-4 --micro_tokens 16384 --held_out 100 --samples 4 "
           "--eval_every 25 --kl none --adv_scale none").split()
PLAIN = SETTING[-4:]                            # a row with --algo has its algorithm's KL and scale instead

OWN = "--baseline value --critic separate --value_coef 1"
FITTED = f"{OWN} --patch critic_fit=400"
SHORT, LONG, WEAK = "--difficulty 1 --max_new 25", "--difficulty 3 --max_new 97", "--warm_steps 300"  # WEAK: 10 % right, see tuning
FASTER = "--lr 3e-4"                            # the best of three rates for groups of 2 and 4, see answers/tuning.json
KL = "--kl loss --beta 0.2"
STEPS = f"{KL} --supervision process --reward model"
OUTCOMES = f"{KL} --reward model"               # at the best of three betas, 1.0; see answers/tuning.json
LABELLED = {"250": "--fit_prompts 16 --choices 16", "1,000": "--fit_prompts 64 --choices 16", "4,000": "--fit_prompts 256 --choices 16",
            "16,000": "--fit_prompts 1000 --choices 16", "64,000": "--fit_prompts 1000 --choices 64"}      # completions
TAUGHT = f"{STEPS} {LABELLED['4,000']}"
# One pass over a rollout in 4 optimizer steps, so that a clip can act. Each rung of the ladder changes one thing.
RAW = "--baseline none --minibatches 4 --clip_low 1e9 --clip_high 1e9"
CRITIC = f"{OWN} --lam 1 --minibatches 4"
IN_REWARD = "--minibatches 4 --kl reward --estimator k1 --beta 0.04"
GRPO = "--kl loss --beta 0.04 --adv_scale group"
SLIPS, CAREFUL = (f"--task experiments/studies/{task}.py --max_new 80 --warm_steps 1200 --steps 80 --eval_every 20" for task in ("slips", "careful"))
FORMS = [("loss", "k2"), ("loss", "k3"), ("loss", "ratio*k3"), ("reward", "k1"), ("reward", "k2"), ("reward", "k3")]


def forms(task, betas, some=FORMS):
    """Rows of a task with each form of the KL and each beta. k1 in the loss, whose gradient is 0 on average, has one."""
    yield "no KL", task
    for place, name in (("loss", "k1"), *some):
        for beta in betas[-1:] if (place, name) == ("loss", "k1") else betas:
            yield f"{place}, {name}, {beta}", f"{task} --kl {place} --estimator {name} --beta {beta}"


# Variants of GRPO, each where it acts: with one update per rollout the ratio is 1, so that clips, masks and weights do nothing.
ONCE = ("dr_grpo", "rloo", "luspo", "gpg", "opo", "remax", "pass_at_k", "maxrl", "beta_norm", "gdpo", "lite_ppo", "entropy_tokens",
        "dynamic_sampling", "soft_overlong", "overlong_filter", "dapo", "moving_reference", "periodic_reference")
OFTEN = ("dapo", "gspo", "luspo", "gspo_token", "cispo", "sapo", "gmpo", "dual_clip", "two_sided", "dppo_tv", "dppo_kl", "vespo",
         "clip_cov", "kl_cov", "tis", "mis", "off_policy_mask")
SET_ONCE = {"GRPO, KL": "--algo grpo --kl loss", "tokens alike": "--algo grpo --kl none --loss_mean token",
            "REINFORCE++": "--algo grpo --baseline none --adv_scale batch --kl reward",
            "REINFORCE++ baseline": "--algo grpo --adv_scale batch --kl loss --estimator k2"}
SET_OFTEN = {"GRPO, KL": "--algo grpo --kl loss", "unbiased KL": "--algo grpo --kl loss --estimator ratio*k3",
             "clip higher": "--algo grpo --kl none --clip_high 0.28", "no clip": "--algo grpo --kl none --clip_low 1e9 --clip_high 1e9"}
SIXTEEN = "--epochs 4 --minibatches 4 --steps 100 --patch sampler=bfloat16"


def variants(settings, names, more):
    """Rows of a regime: GRPO without a KL, what settings express, and files; those whose papers have a KL have it."""
    files = {name: f"--algo {name}{' --kl loss' if 'reference' in name or name == 'off_policy_mask' else ''}" for name in names}
    return {name: f"{row} {more}" for name, row in {"GRPO": "--algo grpo --kl none", **settings, **files}.items()}


REGIMES = {"one update per rollout": variants(SET_ONCE, ONCE, "--steps 200"), "16 updates per rollout": variants(SET_OFTEN, OFTEN, SIXTEEN)}
RATES = ("1e-4", "3e-5", "3e-4")


def answers(study):
    """The file with the results of a study."""
    return HERE / "answers" / f"{study}.json"


def load(study):
    """The results of a study so far: {flags: {seed: summary}}, and of which machine and versions."""
    return json.loads(answers(study).read_text()) if answers(study).exists() else {
        "command": f"python experiments/studies/studies.py {study}", "setting": " ".join(SETTING), "runs": {}}


def best_rate(row, runs):
    """The learning rate with which a variant ended best on the development map, in greedy accuracy; RATES[0] until all are known."""
    greedy = {lr: runs[f"{row} --lr {lr}"]["101"]["greedy"] for lr in RATES if f"{row} --lr {lr}" in runs}
    return max(greedy, key=greedy.get) if len(greedy) == len(RATES) else RATES[0]


TUNED = load("variants_tuning")["runs"]
FAMILIES = {"group": "", "none": "--baseline none", "2 of 128": "--group 2 --prompts 128", "4 of 64": "--group 4 --prompts 64",
            "64 of 4": "--group 64 --prompts 4", "own critic": OWN, "fitted critic": FITTED,
            "fitted critic, 2 of 128": f"{FITTED} --group 2 --prompts 128"}

# {study: {part: {row: flags}}}. The first row of a part is what the others are compared with.
STUDIES = {
    "tuning": {**{name: {f"{name}, {lr}": f"{row} --lr {lr}" for lr in RATES} for name, row in FAMILIES.items()},
               **{name: {f"{name}, beta {beta}": f"{row} --beta {beta}" for beta in ("0.2", "0.04", "1.0")}
                  for name, row in {"learned steps": TAUGHT, "learned outcomes": f"{OUTCOMES} {LABELLED['4,000']}"}.items()},
               **{name: {f"{name}, {lr}": f"{row} --lr {lr}" for lr in RATES} for name, row in
                  {"raw reward, 4 minibatches": RAW, "GRPO, 4 minibatches": f"{GRPO} --minibatches 4"}.items()},
               "a weak start": {f"{n} steps of warm start": f"--warm_steps {n}" for n in (200, 250, 300, 400)}},
    "critic": {
        "baselines": {
            "group": "", "group, divided by its std (GRPO)": "--adv_scale group", "leave-one-out": "--baseline leave-one-out",
            "none": "--baseline none", "none, rewards of -1 and 1": "--baseline none --patch wrong=-1"},
        "critics": {
            "group": "", "shared critic": "--baseline value", "own critic": OWN, "own critic, lambda 1": f"{OWN} --lam 1",
            "own critic, 3 times the rate": f"{OWN} --patch critic_lr=3", "fitted critic": FITTED,
            "fitted critic, lambda 1": f"{FITTED} --lam 1", "group and fitted critic": f"{FITTED} --baseline group+value",
            "shared critic, whitened": "--algo ppo --kl none --adv_scale batch"},
        "values of lines, 100 steps": {
            "group": "--steps 100", "fitted critic, lambda 1": f"{FITTED} --lam 1 --steps 100", "4 continuations": "--baseline none --patch vine=4 --steps 100"},
        "sizes of groups": {
            "16 of 16": "", "2 of 128": f"--group 2 --prompts 128 {FASTER}", "4 of 64": f"--group 4 --prompts 64 {FASTER}",
            "64 of 4": "--group 64 --prompts 4", "fitted critic, 2 of 128": f"{FITTED} --group 2 --prompts 128 {FASTER}"},
        "a weak start": {"group": WEAK, "none": f"--baseline none {WEAK}", "none, rewards of -1 and 1": f"--baseline none --patch wrong=-1 {WEAK}",
                         "fitted critic, lambda 1": f"{FITTED} --lam 1 {WEAK}"},
        "6 lines": {"group": SHORT, "own critic": f"{OWN} {SHORT}", "own critic, lambda 1": f"{OWN} --lam 1 {SHORT}",
                    "fitted critic": f"{FITTED} {SHORT}", "fitted critic, lambda 1": f"{FITTED} --lam 1 {SHORT}"},
        "24 lines": {"group": LONG, "own critic, lambda 1": f"{OWN} --lam 1 {LONG}", "fitted critic": f"{FITTED} {LONG}",
                     "fitted critic, lambda 1": f"{FITTED} --lam 1 {LONG}"},
    },
    "labels": {
        "lines, labelled completions": {"the rule": f"{KL} --supervision process",
                                        **{f"{n}": f"{STEPS} {flags}" for n, flags in LABELLED.items()}},
        "outcomes, labelled completions": {"the rule": f"{KL} --beta 1.0",
                                           **{f"{n}": f"{OUTCOMES} {flags} --beta 1.0" for n, flags in LABELLED.items()}},
        "4,000 completions, by": {
            "truth": TAUGHT, **{name: f"{TAUGHT} --labels rollouts --patch tries={n}" for name, n in (("1 rollout", 1), ("4 rollouts", 4), ("16 rollouts", 16))},
            "truth, 30 % wrong": f"{TAUGHT} --patch label_noise=0.3", "chance": f"{TAUGHT} --patch label_noise=0.5",
            "the form of lines, by rule": f"{KL} --supervision process --patch format=moves"},
        "the KL's beta": {
            "4,000 completions, 0.2": TAUGHT, "4,000 completions, 0.04": f"{TAUGHT} --beta 0.04", "4,000 completions, 1.0": f"{TAUGHT} --beta 1.0",
            "4,000 completions, no KL": f"{TAUGHT} --kl none", "the rule, no KL": "--supervision process",
            "4,000 outcomes, 0.2": f"{OUTCOMES} {LABELLED['4,000']}",
            "4,000 outcomes, no KL": f"{OUTCOMES} {LABELLED['4,000']} --kl none",
            "64,000 completions, 0.04": f"{STEPS} {LABELLED['64,000']} --beta 0.04",
            "64,000 completions, no KL": f"{STEPS} {LABELLED['64,000']} --kl none"},
        "4,000 completions, fitted": {
            "once": TAUGHT, "twice": f"{STEPS} --fit_prompts 128 --choices 16 --steps 150 --iterations 2",
            "4 times": f"{STEPS} {LABELLED['1,000']} --steps 75 --iterations 4",
            "4 times, no history": f"{STEPS} {LABELLED['1,000']} --steps 75 --iterations 4 --patch history=0",
            "4 times, half history": f"{STEPS} {LABELLED['1,000']} --steps 75 --iterations 4 --patch history=0.5",
            "4 times, reference kept": f"{STEPS} {LABELLED['1,000']} --steps 75 --iterations 4 --patch reference=kept"},
    },
    "kl": {
        "slips and guesses": dict(forms(SLIPS, (0.1, 0.3, 1.0))), "slips": dict(forms(CAREFUL, (0.1, 0.3, 1.0))),
        "mines": dict(forms("", (0.1, 0.3), FORMS[:4])),
    },
    "variants": {regime: {name: f"{row} --lr {best_rate(row, TUNED)}" for name, row in rows.items()} for regime, rows in REGIMES.items()},
    "variants_tuning": {regime: {f"{name}, {lr}": f"{row} --lr {lr}" for name, row in rows.items() for lr in RATES}
                        for regime, rows in REGIMES.items()},
    "paper": {
        "figure 5": {
            "GRPO, outcome": GRPO, "GRPO, process": f"{GRPO} --supervision process", "GRPO, outcome, no KL": "--adv_scale group",
            "Online RFT": "--baseline none", "RFT": "--baseline none --patch drawn=once"},
        "the ladder": {
            "1 raw reward": RAW, "2 critic": f"{CRITIC} --clip_low 1e9 --clip_high 1e9", "3 clip": CRITIC,
            "4 reference: k1 in the reward": f"{OWN} --lam 1 {IN_REWARD}", "5a group in place of the critic": IN_REWARD,
            "5b KL in the loss, k3": "--minibatches 4 --kl loss --beta 0.04", "5c divided by the group's std": f"{GRPO} --minibatches 4",
            "6 a reward for each line": f"{GRPO} --minibatches 4 --supervision process"},
    },
}


# ---------------------------------------------------------------------------------------- the runs

def flags_of(row):
    """All flags of a row."""
    return [*(SETTING[:-len(PLAIN)] if "--algo" in row else SETTING), *row.split()]


def rows_of(study, parts=None):
    """{flags: where it stands}, of all parts or some: each set of flags once, although it may be a row of several parts."""
    return {row: f"{part}: {name}" for part in parts or STUDIES[study] for name, row in STUDIES[study][part].items()}


def as_text(found):
    """Results as JSON, with a line for each run."""
    head = json.dumps({name: x for name, x in found.items() if name != "runs"}, indent=1)
    parts = []
    for flags, of_seeds in found["runs"].items():
        each = ",\n   ".join(f"{json.dumps(seed)}: {json.dumps(run)}" for seed, run in sorted(of_seeds.items()))
        parts.append(f"  {json.dumps(flags)}: {{\n   {each}\n  }}")
    return head[:-2] + ',\n "runs": {\n' + ",\n".join(parts) + "\n }\n}\n"


def write(study, found):
    """Write the results of a study."""
    files.write_whole(answers(study), as_text(found))


def make(study, seeds, out, parts=None):
    """Make the runs of a study, or of some of its parts, that are missing, a seed after the other; each is written when it
    is finished."""
    found = load(study)
    if found["setting"] != " ".join(SETTING):
        raise SystemExit(f"{answers(study)} is of another setting: move it away")
    jobs = [(row, seed) for seed in seeds for row in rows_of(study, parts) if str(seed) not in found["runs"].get(row, {})]
    about = results.about()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(runs.run, flags_of(row), seed, out): (row, seed) for row, seed in jobs}
        for n, job in enumerate(concurrent.futures.as_completed(waiting)):
            row, seed = waiting[job]
            if job.exception():
                print(f"{row}, seed {seed}: {job.exception()}", flush=True)
                continue
            found = load(study)                         # another command may have written to it
            found["runs"].setdefault(row, {})[str(seed)] = summary(job.result()) | {"about": about}
            write(study, found)
            print(f"{n + 1} of {len(jobs)}: {rows_of(study)[row]}, seed {seed}", flush=True)
    return found


def summary(result):
    """What tables and figures need of one run."""
    def last_quarter(name):
        """The mean of a metric over the last quarter of the steps."""
        x = [n for n in result["steps"].get(name, [])[-max(1, len(result["steps"].get(name, [])) // 4):] if n is not None]
        return float(f"{statistics.mean(x):.4g}") if x else None
    final, start = result["final"], result["start"]
    found = {"greedy": final["greedy"], "pass@1": final["pass@1"], "pass@8": final["pass@8"], "maj@8": final["maj@8"],
             "pass@1 at 0.5": result["final at 0.5"]["pass@1"], "kl": float(f"{result['kl']:.4g}"),
             "before": {"greedy": start["greedy"], "pass@1": start["pass@1"], "pass@8": start["pass@8"],
                        "pass@1 at 0.5": result["start at 0.5"]["pass@1"], "entropy": result["steps"]["entropy"][0]},
             **{name: last_quarter(name) for name in ("entropy", "length", "explained_variance", "dead_groups")},
             "tokens": result["points"][-1]["tokens"], "seconds": result["points"][-1]["seconds"], "label tokens": result["label tokens"],
             "points": result["points"], "quality": result.get("quality")}
    for name in ("explained_variance", "reward", "rule_reward"):
        if name in result["steps"]:
            found[f"{name}, means of 25 steps"] = means(result["steps"][name], 25)
    return found


def means(numbers, n):
    """The means of each `n` numbers, to 3 digits; None is left out, and the mean of nothing."""
    parts = [[x for x in numbers[i:i + n] if x is not None] for i in range(0, len(numbers), n)]
    return [float(f"{statistics.mean(part):.3g}") if part else None for part in parts]


# -------------------------------------------------------------------------------------- statistics

def p_value(x):
    """Of the mean of paired differences, two-sided, by Student's t distribution."""
    n, spread = len(x), statistics.stdev(x)
    if not spread:                  # a tie of two seeds, of shares of 200 problems, is no evidence
        return 1.0
    t = abs(statistics.mean(x)) / (spread / n ** 0.5)
    angle = np.linspace(math.atan(t / (n - 1) ** 0.5), math.pi / 2, 10001)         # t = sqrt(n - 1) tan(angle)
    density = np.cos(angle) ** (n - 2)
    whole = np.linspace(0, math.pi / 2, 10001)
    return float(np.trapezoid(density, angle) / np.trapezoid(np.cos(whole) ** (n - 2), whole))


def holm(p):
    """p-values corrected for their number (Holm 1979), in their order."""
    order, found, largest = sorted(range(len(p)), key=lambda i: p[i]), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        found[i] = largest
    return found


def differences(row, base, measure):
    """The paired differences of a measure to another row in points, of the seeds that both have."""
    return [round(100 * (row[seed][measure] - base[seed][measure]), 9) for seed in sorted(row) if seed in base]


def runs_of(study, found, part):
    """{row: {seed: summary}} of a part, also of rows that have no runs yet."""
    return {name: found["runs"].get(flags, {}) for name, flags in STUDIES[study][part].items()}


def of_part(study, found, part, measure):
    """{row: its differences to the first row of a part, in the ladder to the row above}, for rows with two seeds or more."""
    rows = [*runs_of(study, found, part).items()]
    bases = rows if part == "the ladder" else rows[:1] * len(rows)
    known = {name: differences(row, base, measure) for (name, row), (_, base) in zip(rows[1:], bases)}
    return {name: x for name, x in known.items() if len(x) > 1}


def compared(study, found, measure):
    """{(part, row): (mean difference, low, high, corrected p)} for the rows that are compared with the first of their part;
    those with a single seed have no interval."""
    known = {(part, name): (statistics.mean(x), *runs.interval(x), p_value(x))
             for part in STUDIES[study] for name, x in of_part(study, found, part, measure).items()}
    corrected = holm([x[3] for x in known.values()])
    return {key: (*x[:3], p) for (key, x), p in zip(known.items(), corrected)}


def at_equal_kl(found, part, measure, base="reward, k1"):
    """{row: the differences of a measure in points, of each seed, to what form `base` of the KL reaches at the row's own KL}:
    interpolated between its betas, the row without a KL, and the start, whose KL is 0; without the seeds that are beyond."""
    of, known = runs_of("kl", found, part), {}
    for name, row in of.items():
        for seed in sorted(row):
            own = [of[other].get(seed) for other in of if other == "no KL" or other.startswith(base)]
            if name != "no KL" and not name.startswith(base) and all(own):
                frontier = sorted([(0.0, own[0]["before"][measure]), *((run["kl"], run[measure]) for run in own)])
                if row[seed]["kl"] <= frontier[-1][0]:
                    at_its_kl = float(np.interp(row[seed]["kl"], *zip(*frontier)))
                    known.setdefault(name, []).append(100 * (row[seed][measure] - at_its_kl))
    return known


# ------------------------------------------------------------------------------------------ tables

COLUMNS = (("greedy", "greedy", ".1%", 1), ("pass@1", "pass@1", ".1%", 1), ("at 0.5", "pass@1 at 0.5", ".1%", 1), ("pass@8", "pass@8", ".1%", 1),
           ("entropy", "entropy", ".3f", 1), ("explained", "explained_variance", "z.2f", 1), ("million tokens", "tokens", ".2f", 1e6),
           ("seconds", "seconds", ".0f", 1))


def lines(study, found, parts=None):
    """The lines of the table of a study, or of some of its parts: medians over the seeds, and the mean paired differences
    of greedy accuracy and pass@1 with their 95 % intervals, in bold where Holm's p is below 0.05."""
    of = {name: compared(study, found, name) for name in ("greedy", "pass@1")}
    titles = [title for title, *_ in COLUMNS]
    yield "| | seeds | " + " | ".join(titles[:1] + ["difference"] + titles[1:2] + ["difference"] + titles[2:]) + " |"
    yield "|---" * (len(titles) + 4) + "|"
    for part in parts or STUDIES[study]:
        yield f"| *{part}* |" + " |" * (len(titles) + 3)
        rows = runs_of(study, found, part)
        first = next(iter(rows.values()))
        yield cells_of("before RL", [run["before"] for run in first.values()], {})
        for name, row in rows.items():
            known = {key: difference(x[part, name]) for key, x in of.items() if (part, name) in x}
            yield cells_of(name, row.values(), known)


def cells_of(name, row, known):
    """A line of a table: medians over the summaries of a row, and its differences."""
    cells = [str(len(row))]
    for _, key, form, unit in COLUMNS:
        x = [run[key] for run in row if run.get(key) is not None]
        cells.append(f"{statistics.median(x) / unit:{form}}" if x else "")
        if key in ("greedy", "pass@1"):
            cells.append(known.get(key, ""))
    return f"| {name} | {' | '.join(cells)} |"


def difference(x):
    """A cell of a table: a difference with its interval, in bold if it holds after correction."""
    text = f"{x[0]:+.1f} ({x[1]:+.1f} to {x[2]:+.1f})"
    return f"**{text}**" if x[3] < 0.05 else text


def main():
    parser = results.parser(__doc__, "table")
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--parts", nargs="+", help="only these parts of a table, by their titles")
    parser.add_argument("--out", type=Path, default=Path("out/studies"))
    args = parser.parse_args()
    for study in args.studies:
        if unknown := [part for part in args.parts or () if part not in STUDIES[study]]:
            parser.error(f"{study} has no part {unknown[0]!r}; it has {', '.join(map(repr, STUDIES[study]))}")
    for study in args.studies:
        seeds = args.seeds or SEEDS.get(study, (1, 2, 3, 4, 5))
        found = load(study) if args.table else make(study, seeds, args.out.resolve(), args.parts)
        print("\n".join(lines(study, found, args.parts)))


if __name__ == "__main__":
    main()
