"""What DAPO's dynamic sampling and its overlong filter do for SmolLM2 on sums, where soon most groups are all right or all
wrong, and at first most completions are cut off:

    pip install -r tests/requirements-peers.txt
    python experiments/models/smollm2.py                # the model, into out/smollm2
    python experiments/models/filters.py 1 2 3          # a run of each row for each seed, on one thread each
    python experiments/models/filters.py --readme       # filters.json from all runs, and a table

The settings are those of experiments/models/sums_task.py, but in 40 steps and in bfloat16. `at equal completions` is read from the curve of
held-out results, where a run has sampled as many as GRPO's of the same seed in all. As many runs go at once as there are
processors, so `minutes` are those of a busy machine.
"""
import concurrent.futures
import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments" / "studies")]
import grpo  # noqa: E402
import studies  # noqa: E402
from run import config  # noqa: E402
from runs import reached, with_interval  # noqa: E402
from experiments import results  # noqa: E402

ROWS = {"GRPO": [], "dynamic_sampling": ["--algo", "dynamic_sampling"], "overlong_filter": ["--algo", "overlong_filter"]}
SETTING = "--task sums --dtype bfloat16 --steps 40 --half_life 10 --eval_every 5 --save_every 1000".split()
MEASURED = ("greedy", "pass@1", "pass@8")
SPENT = ("completions", "tokens", "seconds")
CURVES = ("accuracy", "dead_groups", "length", "finished", "completions")


def child(flags):
    """One run of grpo.py, whose metrics also have the completions and tokens that each step has sampled; in its folder,
    about.json has the versions and the machine."""
    rollout, train_step, sampled = grpo.rollout, grpo.train_step, []

    @functools.wraps(rollout)
    def counted_rollout(*given):
        batch, stats = rollout(*given)
        sampled.append(batch.mask)
        return batch, stats

    @functools.wraps(train_step)
    def counted_step(*given):
        sampled.clear()
        batch, stats = train_step(*given)
        return batch, stats | {"completions": sum(map(len, sampled)), "tokens": sum(int(mask.sum()) for mask in sampled)}
    grpo.rollout, grpo.train_step = counted_rollout, counted_step       # before an algorithm's file takes them
    grpo.main(flags)
    cfg = grpo.make_config(**config.read(grpo.Config, "", flags)[1])
    results.write(cfg.folder / "about.json", results.about())


def folder(row, seed):
    """Of a run."""
    return ROOT / "out" / "filters" / f"{row}{seed}"


def run(row, seed):
    """A run as a child process on one thread, with its output in the folder's log."""
    out = folder(row, seed)
    out.mkdir(parents=True, exist_ok=True)
    code = "import sys\nfrom experiments.models import filters\nfilters.child(sys.argv[1:])"
    flags = [*SETTING, *ROWS[row], "--init", str(ROOT / "out" / "smollm2"), "--seed", str(seed), "--out", str(out)]
    with open(out / "log", "w") as log:
        subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                       stdout=log, stderr=subprocess.STDOUT, check=True)


def of_run(where):
    """A run's held-out results, with what it had spent before each, and its curves."""
    metrics = results.lines(where / "metrics.jsonl")
    points, spent = [], dict.fromkeys(SPENT, 0)
    for m in metrics:
        spent = {name: round(x + m.get(name, 0), 1) for name, x in spent.items()}
        if "greedy" in m:
            points.append({"step": m["step"]} | spent | {name: m[name] for name in MEASURED})
    return {"points": points, "curves": {name: [round(m[name], 3) for m in metrics[1:]] for name in CURVES}}


def apart(found, row, of="pass@1", spent=None):
    """The differences of a row to GRPO in points, paired by seed: at the end of both runs, or where the row has spent as
    much as GRPO's run in all; at its own end if it has spent less."""
    differences = []
    for seed, run in found[row].items():
        points, base = run["points"], found["GRPO"][seed]["points"][-1]
        own = reached(points, spent, base[spent], of) if spent else points[-1][of]
        differences.append(100 * (own - base[of]))
    return differences


def lines(found):
    """The table: medians with the lowest and highest seed, and mean differences in pass@1 with 95 %
    intervals."""
    yield ("| | greedy | pass@1 | difference | at equal completions | dead groups | completions "
           "| minutes |")
    yield "|---" * 8 + "|"

    def ends(row, i):
        """The accuracies at a point of the curve."""
        points = [run["points"][i] for run in found[row].values()]
        return [results.spread(p[name] for p in points) for name in ("greedy", "pass@1")]
    yield f"| before RL | {' | '.join(ends('GRPO', 0))} |" + " |" * 5
    for row, of_seeds in found.items():
        last = [run["points"][-1] for run in of_seeds.values()]
        dead = [statistics.mean(run["curves"]["dead_groups"][-10:]) for run in of_seeds.values()]
        differ = ["" if row == "GRPO" else with_interval(apart(found, row, spent=spent))
                  for spent in (None, "completions")]
        cells = [*ends(row, -1), *differ, results.spread(dead, ".0%"),
                 results.spread((p["completions"] for p in last), ",.0f"),
                 results.spread((p["seconds"] / 60 for p in last), ".1f")]
        yield f"| {row} | {' | '.join(cells)} |"


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("seeds", nargs="*", type=int)
    args = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [pool.submit(run, row, seed) for seed in args.seeds for row in ROWS]
    for one in made:
        one.result()                    # raises what it raised
    if args.readme:
        done = {row: [str(seed) for seed in range(1, 100)
                      if (folder(row, seed) / "about.json").exists()] for row in ROWS}
        found = {row: {seed: of_run(folder(row, seed)) for seed in seeds}
                 for row, seeds in done.items()}
        first = json.loads((folder("GRPO", done["GRPO"][0]) / "about.json").read_text())
        command = f"python experiments/models/filters.py {' '.join(done['GRPO'])}"
        result = first | {"command": command, "flags": " ".join(SETTING), "runs": found}
        (HERE / "filters.json").write_text(studies.as_text(result))
        print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
