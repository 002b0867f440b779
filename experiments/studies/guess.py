"""Where the guesses of data/guess.py lie in what is left, before and after RL, from the folders of several runs.

    for s in 1 2 3 4 5; do python grpo.py --task guess --seed $s --out out/g$s; done
    python experiments/studies/guess.py out/g1 out/g2 out/g3 out/g4 out/g5

Writes guess.json and, if matplotlib is installed, guess.png into out/, or with --readme beside
this script.
"""
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
import runs  # noqa: E402
from data import guess  # noqa: E402
from experiments import results  # noqa: E402
from run import dist, setup  # noqa: E402

BINS = 9        # parts of what is left; the middle one is around the number that halves it
GAMES = 8       # for each held-out problem


def games_of(model):
    """Games of the model in a folder on the held-out problems: (problem, turns) each."""
    agent = runs.agent_of(grpo.make_config(task="guess"), model)
    problems = setup.held_out(agent)
    batch = grpo.generate(agent, problems, GAMES, dist.rng(agent.cfg, "guesses"))
    return list(zip(batch.problems, batch.texts))


def places(games):
    """For each guess within what is left, unless that is a single number, the part in which it lies."""
    found = []
    for problem, turns in games:
        for i in range(0, len(turns), 2):
            low, high = guess.left(problem, turns[:i])
            n = guess.number(turns[i])
            if n is not None and low <= n <= high > low:
                found.append(min(BINS - 1, (n - low) * BINS // (high - low + 1)))
    return found


def measured(model):
    """What a model's games are like."""
    games = games_of(model)
    won = [guess.reward(*game)["correct"] for game in games]
    lengths = [len(turns[::2]) for (_, turns), right in zip(games, won) if right]
    at = places(games)
    shares = [at.count(i) / len(at) for i in range(BINS)]
    outer = BINS // 3
    return {"won": statistics.mean(won), "guesses": statistics.mean(lengths), "places": shares,
            "middle third": sum(shares[outer:BINS - outer])}


def draw(found, path):
    """Shares of guesses by their place, each run thin and the medians thick."""
    if not (made := results.panels(1, (6, 3.4), layout="constrained")):
        return
    figure, axes = made
    edges = [i / BINS for i in range(BINS + 1)]
    for when, colour in (("before", "#d55e00"), ("after", "#0072b2")):
        rows = [run[when]["places"] for run in found]
        for row in rows:
            axes.stairs(row, edges, color=colour, alpha=0.25, baseline=None)
        won = statistics.median(run[when]["won"] for run in found)
        middle = [statistics.median(part) for part in zip(*rows)]
        axes.stairs(middle, edges, color=colour, linewidth=2.2, baseline=None,
                    label=f"{when} RL: finds {won:.0%}")
    axes.set(xlabel="where a guess lies in what is left", ylabel="share of guesses",
             xlim=(0, 1), ylim=(0, None))
    axes.set_xticks([0, 0.5, 1], ["smallest", "middle", "largest"])
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    out = HERE if args.readme else ROOT / "out"
    found = [{"before": measured(run / "warm_start"), "after": measured(run)} for run in args.runs]
    results.write(out / "guess.json", {"about": results.about(), "runs": found})
    for when in ("before", "after"):
        for name in ("won", "guesses", "middle third"):
            print(f"{when} {name}: {results.spread([run[when][name] for run in found], '.3f')}")
    draw(found, out / "guess.png")


if __name__ == "__main__":
    main()
