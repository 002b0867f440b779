"""Every algorithm on the arithmetic task, from shared warm starts.

    python experiments/studies/algorithms.py --rows GRPO PPO --seeds 1          # a part of it
    python experiments/studies/algorithms.py --readme                           # the table of the docs

A row of the table is an entry of ROWS; its runs have 34 steps, and unknown flags are passed on to every run.
algorithms.json is written after every run, into --out or with --readme beside this script, where the docs take it
from; a later call makes only the missing runs. pass@1 is on the held-out problems, before and after RL; seconds are
per step; memory is the peak of the whole run. All of it takes about 2 hours on 2 cores.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROWS = {
    "raw reward": "--algo reinforce",
    "critic": "--algo a2c",
    "PPO without reference": "--algo ppo --beta 0",
    "PPO": "--algo ppo",
    "PPO, critic of its own": "--algo ppo --critic separate",
    "GRPO": "",
    "GRPO with a critic": "--baseline group+value",
    "RLOO": "--algo rloo",
    "Dr. GRPO": "--algo dr_grpo",
    "DAPO's clip and mean": "--kl none --clip_high 0.28 --loss_mean token",
    "GSPO with a KL": "--algo gspo --kl loss",
    "process supervision": "--supervision process",
    "learned reward": "--reward model",
    "learned reward of steps": "--reward model --supervision process",
    "two iterations": "--iterations 2",
}


def run(flags, seed, out, more=()):
    """One run in a process of its own, from the warm start that all runs of this seed share: its metrics, and
    its peak memory in GiB."""
    folder = out / f"{flags.replace('--', '').replace(' ', '_') or 'grpo'}-{seed}"
    warm = out / f"warm_start-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    if warm.exists():
        shutil.copytree(warm, folder / "warm_start")
    command = [sys.executable, str(HERE.parent.parent / "grpo.py"), "--warm_steps", "1500", "--steps", "34", *flags.split(), *more,
               "--seed", str(seed), "--out", str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(command)}")
    if not warm.exists():
        shutil.copytree(folder / "warm_start", warm)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, used.ru_maxrss / 2 ** 20


def summary(metrics, memory):
    """What the table needs from a run."""
    return {"before": metrics[0]["pass@1"], "after": metrics[-1]["pass@1"],
            "kl": metrics[-1].get("kl"), "length": metrics[-1]["length"],
            "step": statistics.median(m["seconds"] for m in metrics[1:]), "memory": memory}


def lines(results):
    """The lines of the docs' table: median, lowest and highest pass@1, and medians of the costs."""
    yield "| | pass@1 | s a step | GiB |"
    yield "|---|---|---|---|"
    table = {name: results[name] for name in ROWS if name in results}
    first = next(iter(table.values()))                                  # all rows share their warm starts
    before = {seed: {"after": run["before"]} for seed, run in first.items()}
    for name, runs in ({"before RL": before} | table).items():
        of = lambda key: [r[key] for r in runs.values() if key in r]
        spread = "{:.1%} ({:.1%} to {:.1%})".format(
            statistics.median(of("after")), min(of("after")), max(of("after")))
        flags = f" `{ROWS[name]}`" if ROWS.get(name) else ""
        cost = [f"{statistics.median(of(key)):.2f}" for key in ("step", "memory") if of(key)]
        yield f"| {name}{flags} | {spread} | {' | '.join(cost or ['', ''])} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--out", type=Path, default=Path("out/algorithms"))
    parser.add_argument("--readme", action="store_true", help="replace the results that the docs quote")
    args, more = parser.parse_known_args()
    if args.readme and more:
        parser.error(f"--readme uses the task's own settings: remove {' '.join(more)}")
    file = (HERE if args.readme else args.out) / "algorithms.json"
    args.out.mkdir(parents=True, exist_ok=True)
    results = json.loads(file.read_text()) if file.exists() else {}
    for seed in args.seeds:
        for name in args.rows:
            if str(seed) not in results.setdefault(name, {}):
                results[name][str(seed)] = summary(*run(ROWS[name], seed, args.out, more))
                file.write_text(json.dumps(results, indent=1) + "\n")
                print(f"seed {seed}  {name}  {results[name][str(seed)]}", flush=True)
    print(*lines(results), sep="\n")


if __name__ == "__main__":
    main()
