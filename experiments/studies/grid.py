"""How RL changes the paths on the task mines: how often walks pass each place of a map, before and after RL.

    python experiments/studies/grid.py [--seed 1] [--readme]

The run is the first row of the study `critic`, and the walks are 16 completions of each held-out problem; those after a
line that is not a true move are left out. figures.py draws the result.
"""
import dataclasses
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import grpo  # noqa: E402
import mines  # noqa: E402
import runs  # noqa: E402
import studies  # noqa: E402
from data import load_task  # noqa: E402
from experiments import results  # noqa: E402
from run import config, pretrained  # noqa: E402


def passed(agent, problems, each):
    """How many of the walks pass each place, [column][row], the number of walks, and the share that is right."""
    batch, count = grpo.generate(agent, problems, each, random.Random("grid")), [[0] * mines.SIZE for _ in range(mines.SIZE)]
    for problem, text in zip(batch.problems, batch.texts):
        for x, y in {place for _, place in mines.walk(problem, text) if place}:
            count[x][y] += 1
    right = [mines.reward(problem, text)["correct"] for problem, text in zip(batch.problems, batch.texts)]
    return {"passed": count, "walks": len(batch.texts), "right": sum(right) / len(right)}


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/studies"))
    args = parser.parse_args()
    runs.run(studies.SETTING, args.seed, args.out.resolve())
    cfg, _ = runs.read([*studies.SETTING, "--seed", str(args.seed)])
    folder = runs.folder_of(studies.SETTING, args.seed, args.out.resolve())
    held_out, found = config.problems_of(load_task(cfg.task), cfg)[1], results.about()
    found |= {"command": "python experiments/studies/grid.py --readme", "seed": args.seed, "size": mines.SIZE}
    found["mines"] = sorted(held_out[0].mines)
    for when, where in (("before", folder / "warm_start"), ("after", folder)):
        its = dataclasses.replace(cfg, init=str(where))
        found[when] = passed(grpo.Agent(its, load_task(cfg.task), *pretrained.trained_model(its)), held_out, 16)
        print(f"{when} RL {found[when]['right']:.1%} of {found[when]['walks']} walks are right")
    if args.readme:
        results.write(studies.answers("grid"), found)


if __name__ == "__main__":
    main()
