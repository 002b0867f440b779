r"""Figure 7 of DeepSeekMath in miniature: pass@K and maj@K for K = 1 to 64, before and after RL.

    for s in 1 2 3 4 5; do python grpo.py --init= --warm_steps 1500 --seed $s --out out/s$s; done
    python experiments/studies/figure7.py out/s1 out/s2 out/s3 out/s4 out/s5

Other policies can hardly do their task before RL: a walk among mines that no demonstration knew,
and SmolLM2-135M. On 2 CPU cores the evaluations take a minute and a quarter of an hour.

    for s in 1 2 3 4 5; do python grpo.py --task experiments/studies/mines.py --steps 300 \
        --adv_scale none --seed $s --out out/mines$s; done
    python experiments/models/from_pypi.py smollm2
    for s in 1 2 3; do python grpo.py --task experiments/models/sums_task.py \
        --init out/smollm2 --seed $s --out out/smol$s; done
    python experiments/studies/figure7.py out/smol1 out/smol2 out/smol3 --temperature 0.7

The folders of one call are seeds of one task; with --readme they replace the results of that task
and temperature in answers/. Each of 100 held-out problems gets 64 completions, at the training
temperature unless --temperature is given; the paper's is 0.7.
"""
import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import grpo  # noqa: E402
import runs  # noqa: E402
from experiments import results  # noqa: E402
from run import report, setup  # noqa: E402
from run.device import prepare  # noqa: E402

KS = (1, 2, 4, 8, 16, 32, 64)
PROBLEMS = 100


def shares(folder, temperature=None):
    """(task, seed, results): what `evaluate` returns for the first and the last model of a run."""
    kept = json.loads((folder / "run.json").read_text())["config"]
    name = Path(kept["task"]).stem
    if temperature is not None:
        kept["temperature"], name = temperature, f"{name} at {temperature}"
    cfg = dataclasses.replace(grpo.Config(**kept), held_out=PROBLEMS, samples=KS[-1], device="cpu")
    warm, found = folder / "warm_start", {}
    for when, where in (("before", warm if warm.exists() else cfg.init), ("after", folder)):
        agent = runs.agent_of(cfg, where)
        found[when] = report.evaluate(agent, setup.held_out(agent), grpo.generate)
    return name, cfg.seed, found


def of_seeds(seeds, when, kind, K):
    """One metric of all runs, sorted; maj@1 is pass@1."""
    return sorted(run[when][f"{kind}{K}" if K > 1 else "pass@1"] for run in seeds.values())


def rows(found):
    """The lines of the table: medians over the seeds."""
    yield "| | " + " | ".join(str(K) for K in KS) + " |"
    yield "|---" * (1 + len(KS)) + "|"
    for task, seeds in found.items():
        for kind, when in itertools.product(("pass@", "maj@"), ("before", "after")):
            x = [f"{statistics.median(of_seeds(seeds, when, kind, K)):.1%}" for K in KS]
            yield f"| {task}, {kind}K, {when} | {' | '.join(x)} |"


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--temperature", type=float)
    args = parser.parse_args()
    prepare()
    file = (HERE / "answers" if args.readme else Path("out")) / "figure7.json"
    found, kept = {}, json.loads(file.read_text()) if file.exists() else {}
    for folder in args.folders:
        task, seed, its = shares(folder, args.temperature)
        found.setdefault(task, {})[str(seed)] = its
    new = {"command": dict.fromkeys(found, " ".join(["python", *sys.argv])),
           "about": dict.fromkeys(found, results.about()), "rows": found}
    result = {name: kept.get(name, {}) | x for name, x in new.items()}
    results.write(file, {"problems": PROBLEMS, "samples": KS[-1], **result})
    print("\n".join(rows(result["rows"])))


if __name__ == "__main__":
    main()
