"""How RL changes the paths on the task mines: how often walks pass each place of a map, before and after RL.

    python experiments/studies/grid.py [--readme]

The run is the first row of the study `critic`, and the walks are 16 completions of each held-out problem; those after a
line that is not a true move are left out. figures.py draws the result.
"""
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import grpo  # noqa: E402
import mines  # noqa: E402
import runs  # noqa: E402
import studies  # noqa: E402
from experiments import results  # noqa: E402
from run import setup  # noqa: E402

SEED = 1


def passed(agent, problems, each):
    """How many of the walks pass each place, [column][row], the number of walks, and the share that is right."""
    batch, count = grpo.generate(agent, problems, each, random.Random("grid")), [[0] * mines.SIZE for _ in range(mines.SIZE)]
    for problem, text in zip(batch.problems, batch.texts):
        for x, y in {place for _, place in mines.walk(problem, text) if place}:
            count[x][y] += 1
    right = [mines.reward(problem, text)["correct"] for problem, text in zip(batch.problems, batch.texts)]
    return {"passed": count, "walks": len(batch.texts), "right": sum(right) / len(right)}


def main():
    args, out = results.parser(__doc__, "readme").parse_args(), Path("out/studies").resolve()
    runs.run(studies.SETTING, SEED, out)
    cfg, _ = runs.read([*studies.SETTING, "--seed", str(SEED), "--held_out", "0"])      # all
    folder = runs.folder_of(studies.SETTING, SEED, out)
    found = results.about() | {"command": "python experiments/studies/grid.py --readme",
                               "seed": SEED, "size": mines.SIZE}
    for when, where in (("before", folder / "warm_start"), ("after", folder)):
        agent = runs.agent_of(cfg, where)
        held_out = setup.held_out(agent)
        found["mines"] = sorted(held_out[0].mines)
        found[when] = passed(agent, held_out, 16)
        print(f"{when} RL {found[when]['right']:.1%} of {found[when]['walks']} walks are right")
    if args.readme:
        results.write(studies.answers("grid"), found)


if __name__ == "__main__":
    main()
