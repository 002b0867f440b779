"""Studies on tasks in which a critic and a reward model can learn. Each command makes the runs that
are missing, then prints a table:

    python experiments/studies/studies.py critic        # a critic, sizes of groups
    python experiments/studies/studies.py labels        # what labels a reward model needs
    python experiments/studies/studies.py kl            # the forms of the KL
    python experiments/studies/studies.py paper         # figure 5 of the paper
    python experiments/studies/studies.py variants      # variants of GRPO in two regimes
    python experiments/studies/studies.py critic --seeds 1 2 --parts baselines

The results are kept in answers/, one JSON file for each study; a run that is there with the same
flags is not made again. All runs of a seed share its map and its warm start. A row is compared,
seed by seed, with the first row of its part. The files have more rows than are made here; their
flags say what.
"""
import concurrent.futures
import json
import os
import statistics
from pathlib import Path

import runs
from experiments import results
from run import files

HERE = Path(__file__).parent
SETTING = ("--task experiments/studies/mines.py --difficulty 2 --max_new 49 --n_layer 2 "
           "--n_embd 128 --n_head 4 --warm_steps 800 --warm_batch 64 --steps 300 --prompts 16 "
           "--group 16 --lr 1e-4 --micro_tokens 16384 --held_out 100 --samples 4 --eval_every 25 "
           "--kl none --adv_scale none").split()
PLAIN = SETTING[-4:]                # a row with --algo has its algorithm's KL and scale instead

OWN = "--baseline value --critic separate --value_coef 1"
FITTED = f"{OWN} --patch critic_fit=400"
WEAK = "--warm_steps 300"           # 10 % right
FASTER = "--lr 3e-4"                # the best of three rates for groups of 2 and 4
KL = "--kl loss --beta 0.2"
STEPS = f"{KL} --supervision process --reward model"
OUTCOMES = f"{KL} --reward model"   # at the best of three betas, 1.0
LABELLED = {"250": "--fit_prompts 16 --choices 16", "1,000": "--fit_prompts 64 --choices 16",
            "4,000": "--fit_prompts 256 --choices 16", "16,000": "--fit_prompts 1000 --choices 16",
            "64,000": "--fit_prompts 1000 --choices 64"}      # completions
TAUGHT, MORE = (f"{STEPS} {LABELLED[n]}" for n in ("4,000", "64,000"))
REFITTED = f"{STEPS} {LABELLED['1,000']} --steps 75 --iterations 4"
GRPO = "--kl loss --beta 0.04 --adv_scale group"
SLIPS = ("--task experiments/studies/slips.py --max_new 80 --warm_steps 1200 --steps 80 "
         "--eval_every 20")
FORMS = [("loss", "k2"), ("loss", "k3"), ("loss", "ratio*k3"),
         ("reward", "k1"), ("reward", "k2"), ("reward", "k3")]


def forms(task, betas, some=FORMS):
    """Rows of a task with each form of the KL and each beta. k1 in the loss, whose gradient is 0 on
    average, has one."""
    yield "no KL", task
    for place, name in (("loss", "k1"), *some):
        for beta in betas[-1:] if (place, name) == ("loss", "k1") else betas:
            yield (f"{place}, {name}, {beta}",
                   f"{task} --kl {place} --estimator {name} --beta {beta}")


# Variants of GRPO, each where it acts: with one update per rollout the ratio is 1.
ONCE = ("dr_grpo rloo luspo gpg opo remax pass_at_k maxrl beta_norm gdpo lite_ppo entropy_tokens "
        "dynamic_sampling soft_overlong overlong_filter dapo moving_reference periodic_reference")
OFTEN = ("dapo gspo luspo gspo_token cispo sapo gmpo dual_clip two_sided dppo_tv dppo_kl vespo "
         "clip_cov kl_cov tis mis off_policy_mask")
SET_ONCE = {"GRPO, KL": "--algo grpo --kl loss",
            "tokens alike": "--algo grpo --kl none --loss_mean token",
            "REINFORCE++": "--algo grpo --baseline none --adv_scale batch --kl reward",
            "REINFORCE++ baseline": "--algo grpo --adv_scale batch --kl loss --estimator k2"}
SET_OFTEN = {"GRPO, KL": "--algo grpo --kl loss",
             "unbiased KL": "--algo grpo --kl loss --estimator ratio*k3",
             "clip higher": "--algo grpo --kl none --clip_high 0.28",
             "no clip": "--algo grpo --kl none --clip_low 1e9 --clip_high 1e9"}
SIXTEEN = "--epochs 4 --minibatches 4 --steps 100 --patch sampler=bfloat16"


def answers(study):
    """The file with the results of a study."""
    return HERE / "answers" / f"{study}.json"


def load(study):
    """The results of a study so far: {flags: {seed: summary}}."""
    return json.loads(answers(study).read_text()) if answers(study).exists() else {
        "command": f"python experiments/studies/studies.py {study}", "setting": " ".join(SETTING),
        "runs": {}}


TUNED = load("variants_tuning")["runs"]


def variants(settings, names, more):
    """Rows of a regime: GRPO without a KL, what settings express, and files, with a KL if their
    papers have one; each at the learning rate of three that ended best on the development map."""
    with_kl = {name: " --kl loss" for name in names.split()
               if "reference" in name or name == "off_policy_mask"}
    own = {name: f"--algo {name}{with_kl.get(name, '')}" for name in names.split()}
    for name, row in {"GRPO": "--algo grpo --kl none", **settings, **own}.items():
        rates = {lr: TUNED.get(f"{row} {more} --lr {lr}") for lr in ("1e-4", "3e-5", "3e-4")}
        known = all(rates.values())
        best = max(rates, key=lambda lr: rates[lr]["101"]["greedy"]) if known else "1e-4"
        yield name, f"{row} {more} --lr {best}"


# {study: {part: {row: flags}}}. The first row of a part is what the others are compared with.
STUDIES = {
    "critic": {
        "baselines": {
            "group": "", "group, divided by its std (GRPO)": "--adv_scale group",
            "leave-one-out": "--baseline leave-one-out", "none": "--baseline none",
            "none, rewards of -1 and 1": "--baseline none --patch wrong=-1"},
        "critics": {
            "group": "", "shared critic": "--baseline value", "own critic": OWN,
            "own critic, lambda 1": f"{OWN} --lam 1", "fitted critic": FITTED,
            "fitted critic, lambda 1": f"{FITTED} --lam 1"},
        "sizes of groups": {
            "16 of 16": "", "2 of 128": f"--group 2 --prompts 128 {FASTER}",
            "4 of 64": f"--group 4 --prompts 64 {FASTER}", "64 of 4": "--group 64 --prompts 4",
            "fitted critic, 2 of 128": f"{FITTED} --group 2 --prompts 128 {FASTER}"},
        "a weak start": {
            "group": WEAK, "none": f"--baseline none {WEAK}",
            "none, rewards of -1 and 1": f"--baseline none --patch wrong=-1 {WEAK}"},
    },
    "labels": {
        "lines, labelled completions": {
            "the rule": f"{KL} --supervision process",
            **{n: f"{STEPS} {flags}" for n, flags in LABELLED.items()}},
        "outcomes, labelled completions": {
            "the rule": f"{KL} --beta 1.0",
            **{n: f"{OUTCOMES} {flags} --beta 1.0" for n, flags in LABELLED.items()}},
        "the KL's beta": {
            "4,000 completions, 0.2": TAUGHT, "4,000 completions, 0.04": f"{TAUGHT} --beta 0.04",
            "4,000 completions, no KL": f"{TAUGHT} --kl none",
            "the rule, no KL": "--supervision process",
            "64,000 completions, 0.04": f"{MORE} --beta 0.04",
            "64,000 completions, no KL": f"{MORE} --kl none"},
        "4,000 completions, fitted": {
            "once": TAUGHT,
            "twice": f"{STEPS} --fit_prompts 128 --choices 16 --steps 150 --iterations 2",
            "4 times": REFITTED, "4 times, no history": f"{REFITTED} --patch history=0",
            "4 times, half history": f"{REFITTED} --patch history=0.5",
            "4 times, reference kept": f"{REFITTED} --patch reference=kept"},
    },
    "kl": {"slips and guesses": dict(forms(SLIPS, (0.1, 0.3, 1.0))),
           "mines": dict(forms("", (0.1, 0.3), FORMS[:4]))},
    "variants": {"one update per rollout": dict(variants(SET_ONCE, ONCE, "--steps 200")),
                 "16 updates per rollout": dict(variants(SET_OFTEN, OFTEN, SIXTEEN))},
    "paper": {
        "figure 5": {
            "GRPO, outcome": GRPO, "GRPO, process": f"{GRPO} --supervision process",
            "GRPO, outcome, no KL": "--adv_scale group", "Online RFT": "--baseline none",
            "RFT": "--baseline none --patch drawn=once"},
    },
}

# ---------------------------------------------------------------------------------------- the runs

def write(study, found):
    """Write the results of a study, with a line for each run."""
    head = json.dumps({name: x for name, x in found.items() if name != "runs"}, indent=1)
    parts = []
    for flags, of_seeds in found["runs"].items():
        each = ",\n   ".join(f"{json.dumps(seed)}: {json.dumps(run)}"
                             for seed, run in sorted(of_seeds.items()))
        parts.append(f"  {json.dumps(flags)}: {{\n   {each}\n  }}")
    files.write_whole(answers(study),
                      head[:-2] + ',\n "runs": {\n' + ",\n".join(parts) + "\n }\n}\n")


def make(study, seeds, out, parts):
    """Make the runs of parts of a study that are missing; each is written when it is finished."""
    found, about = load(study), results.about()
    rows = dict.fromkeys(row for part in parts for row in STUDIES[study][part].values())
    jobs = [(row, seed) for seed in seeds for row in rows
            if str(seed) not in found["runs"].get(row, {})]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {}
        for row, seed in jobs:
            setting = SETTING[:-len(PLAIN)] if "--algo" in row else SETTING
            waiting[pool.submit(runs.run, [*setting, *row.split()], seed, out)] = row, seed
        for n, job in enumerate(concurrent.futures.as_completed(waiting)):
            row, seed = waiting[job]
            if not job.exception():
                found = load(study)                     # another command may have written to it
                of_row = found["runs"].setdefault(row, {})
                of_row[str(seed)] = summary(job.result()) | {"about": about}
                write(study, found)
            print(f"{n + 1} of {len(jobs)}: {row}, seed {seed} {job.exception() or ''}", flush=True)


def summary(result):
    """What tables and figures need of one run."""
    def last_quarter(name):
        """The mean of a metric over the last quarter of the steps."""
        x = result["steps"].get(name, [])
        x = [n for n in x[-max(1, len(x) // 4):] if n is not None]
        return float(f"{statistics.mean(x):.4g}") if x else None

    def evaluated(when):
        found = {name: result[when][name] for name in ("greedy", "pass@1", "pass@8")}
        return found | {"pass@1 at 0.5": result[f"{when} at 0.5"]["pass@1"]}
    return {**evaluated("final"), "kl": float(f"{result['kl']:.4g}"),
            "before": evaluated("start") | {"entropy": result["steps"]["entropy"][0]},
            **{name: last_quarter(name)
               for name in ("entropy", "length", "explained_variance", "dead_groups")},
            "tokens": result["points"][-1]["tokens"], "seconds": result["points"][-1]["seconds"],
            "points": result["points"], "quality": result.get("quality")}

# ----------------------------------------------------------------------------- comparisons, a table

# 97.5 % quantiles of Student's t for n numbers
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
COLUMNS = (("greedy", "greedy", ".1%", 1), ("pass@1", "pass@1", ".1%", 1),
           ("at 0.5", "pass@1 at 0.5", ".1%", 1), ("pass@8", "pass@8", ".1%", 1),
           ("KL", "kl", ".2f", 1), ("entropy", "entropy", ".3f", 1),
           ("explained", "explained_variance", "z.2f", 1), ("million tokens", "tokens", ".2f", 1e6),
           ("seconds", "seconds", ".0f", 1))


def interval(x):
    """The 95 % interval of the mean of paired differences, by Student's t."""
    half = STUDENT[len(x)] * statistics.stdev(x) / len(x) ** 0.5
    return statistics.mean(x) - half, statistics.mean(x) + half


def runs_of(study, found, part):
    """{row: {seed: summary}} of a part, also of rows that have no runs yet."""
    return {name: found["runs"].get(flags, {}) for name, flags in STUDIES[study][part].items()}


def differences(study, found, part, measure):
    """{row: its differences in points, of the seeds that both have}, for rows with two or more."""
    (_, base), *rows = runs_of(study, found, part).items()
    known = {name: [100 * (row[seed][measure] - base[seed][measure])
                    for seed in sorted(row) if seed in base] for name, row in rows}
    return {name: x for name, x in known.items() if len(x) > 1}


def lines(study, found, parts):
    """The lines of a table: medians over the seeds; mean differences with their 95 % intervals."""
    titles = ["", "seeds", "greedy, less the first", "pass@1, less the first",
              *(title for title, *_ in COLUMNS)]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * (len(COLUMNS) + 4) + "|"
    for part in parts:
        rows = runs_of(study, found, part)
        before = [run["before"] for run in next(iter(rows.values())).values()]
        of = [differences(study, found, part, measure) for measure in ("greedy", "pass@1")]
        for name, row in {f"*{part}*, before RL": before, **rows}.items():
            cells = [str(len(row))]
            for x in (known.get(name) for known in of):
                cells.append("{:+.1f} ({:+.1f} to {:+.1f})".format(statistics.mean(x), *interval(x))
                             if x else "")
            for _, key, form, unit in COLUMNS:
                each = row.values() if isinstance(row, dict) else row
                x = [run[key] / unit for run in each if run.get(key) is not None]
                cells.append(f"{statistics.median(x):{form}}" if x else "")
            yield f"| {name} | {' | '.join(cells)} |"


def main():
    parser = results.parser(__doc__, "table")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--parts", nargs="+", help="only these parts of a table, by their titles")
    parser.add_argument("--out", type=Path, default=Path("out/studies"))
    args = parser.parse_args()
    parts = args.parts or [*STUDIES[args.study]]
    if unknown := {*parts} - STUDIES[args.study].keys():
        parser.error(f"{args.study} has no part {unknown}; it has {[*STUDIES[args.study]]}")
    if not args.table:
        make(args.study, args.seeds, args.out.resolve(), parts)
    print("\n".join(lines(args.study, load(args.study), parts)))


if __name__ == "__main__":
    main()
