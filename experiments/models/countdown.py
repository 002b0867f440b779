"""SmolLM2-135M-Instruct learns countdown with two numbers: 40 steps of imitating demonstrations,
because it never writes the tags by itself, then 24 steps of RL. On 2 CPU cores, 20 minutes a seed:

    python experiments/models/smollm2.py                   # the model, into out/smollm2
    python experiments/models/countdown.py 1 2 3           # a run for each seed
    python experiments/models/countdown.py --untrained     # the model before both
    python experiments/models/countdown.py --readme        # countdown.json and countdown.png
"""
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import sums
from sums import ROOT, results

HERE = Path(__file__).parent
UNTRAINED = ROOT / "out" / "countdown-untrained.json"

# The learning rates were chosen on training problems, with seed 11. Evaluations use the first 100
# held-out problems.
TASK = ("--task countdown --difficulty 2 --max_new 64 --held_out 100 --dtype bfloat16").split()
FLAGS = [*TASK, "run.setup.WARM_BATCH=16", *(
    "--warm_steps 40 --warm_lr 1e-4 --steps 24 --prompts 16 --group 8 --minibatches 1 "
    "--lr 3e-5 --half_life 15 --kl none --save_every 23").split()]


def untrained():
    """Measure the model as it is."""
    command = [sys.executable, ROOT / "grpo.py", *TASK, "--eval_only", "--init", sums.INIT]
    said = subprocess.check_output(command, text=True)
    print(said)
    results.write(UNTRAINED, {name: float(x) / 100
                              for name, x in re.findall(r"(\S+) ([\d.]+)%", said)})


def rows(result):
    """The lines of the docs' table."""
    runs = result["runs"].values()
    for name in sums.MEASURED:
        cells = [results.spread(run[when][name] for run in runs) for when in ("before", "after")]
        yield f"| {name} | {result['untrained'][name]:.1%} | {' | '.join(cells)} |"


def main():
    parser = results.parser(__doc__, "untrained", "readme")
    parser.add_argument("seeds", nargs="*", type=int)
    args = parser.parse_args()
    for seed in args.seeds:
        sums.ours(seed, ROOT / "out" / f"countdown-s{seed}", *FLAGS)
    if args.untrained:
        untrained()
    if args.readme:
        made = sorted((ROOT / "out").glob("countdown-s[0-9]*"))
        runs = {path.name.removeprefix("countdown-s"): sums.of_run(path) for path in made}
        result = {"untrained": json.loads(UNTRAINED.read_text()), "runs": runs}
        results.write(HERE / "countdown.json", result)
        draw = partial(sums.draw, runs=runs.values(), over_time=False)
        results.figure(HERE / "countdown.png", draw, sums.TITLES | {"accuracy, sampled": "step"})
        print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
