"""The same training by this code and by TRL's GRPOTrainer: accuracy over samples and over minutes.

    pip install -r tests/requirements-peers.txt trl==1.16.0 matplotlib
    python experiments/cost/beside_trl.py 1 2 3 4 5             # seeds; 5 minutes each on 2 cores
    python experiments/cost/beside_trl.py --readme              # the result, its table and figure

Both start from data/warm_start and have the main job's settings: the same prompts in the same
order, two optimizer steps a rollout, AdamW, clip, k3, a constant rate. One evaluator, this code's,
measures both on the held-out problems; its time does not count. TRL differs in that it divides by
a std with Bessel's correction, plus 1e-4, and draws other random numbers, also for minibatches.
"""
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
from experiments import results  # noqa: E402
from experiments.cost.speed import new_trainer  # noqa: E402
from run import dist, pretrained, setup  # noqa: E402

FOUND = ROOT / "out" / "beside_trl"
EVERY = 4               # steps between evaluations
COMPARED = (8, 16, 24)  # steps after which accuracies are compared
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}      # Student's, two-sided
COLOURS = {"ours": "tab:blue", "TRL": "tab:orange"}


def new_agent(seed):
    """An Agent that starts from the shipped warm start, its training and held-out problems."""
    cfg = grpo.make_config(init="data/warm_start", seed=seed, device="cpu", micro_tokens=2048)
    task, encoding, policy = setup.trained_model(cfg)
    agent = grpo.new_agent(cfg, task, encoding, policy)
    return agent, *setup.problems_of(cfg, task)


def measured(agent, held_out, points, step, seconds, samples):
    """Adds what the agent's model is worth after a step."""
    found = grpo.evaluate(agent, held_out)
    points.append(dict(step=step, seconds=seconds, samples=samples, **found))
    print(points[-1], flush=True)


def ours(seed):
    """The points of a run of this code."""
    agent, problems, held_out = new_agent(seed)
    cfg, points, seconds = agent.cfg, [], 0.0
    for step in range(1 + cfg.steps):
        if step:
            seconds += grpo.train_step(agent, problems, step)[1]["seconds"]
        if step % EVERY == 0:
            measured(agent, held_out, points, step, seconds, step * cfg.prompts * cfg.group)
    return points


def trl(seed):
    """The points of a run of TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    agent, problems, held_out = new_agent(seed)
    cfg, points, spent = agent.cfg, [], [0.0, 0.0]
    drawn = [p for step in range(1, 1 + cfg.steps)
             for p in dist.rng(cfg, "problems", step).sample(problems, cfg.prompts)]
    rows, seen = cfg.prompts * cfg.group, []
    tokenizer = AutoTokenizer.from_pretrained(cfg.init)
    tokenizer.pad_token = tokenizer.eos_token

    def rewarded(prompts, completions, completion_ids, **_):
        """The rule's reward: of a completion that is cut off only negative components count."""
        begin = len(seen) // cfg.group
        seen.extend(prompts)
        same = [p for p in drawn[begin:begin + cfg.prompts] for _ in range(cfg.group)]
        assert [p.prompt for p in same] == prompts
        rewards = []
        for problem, text, ids in zip(same, completions, completion_ids):
            parts = agent.task.reward(problem, text).values()
            ended = tokenizer.eos_token_id in [int(i) for i in ids] or len(ids) < cfg.max_new
            rewards.append(sum(x if ended else min(x, 0) for x in parts))
        return rewards

    class Watch(TrainerCallback):
        """Takes the time of optimizer steps, rollouts among them, and measures the model."""

        def on_step_begin(self, *_, **__):
            spent[1] = time.perf_counter()

        def on_step_end(self, _, state, *__, model, **___):
            spent[0] += time.perf_counter() - spent[1]
            if state.global_step % (EVERY * cfg.updates) == 0:
                with tempfile.TemporaryDirectory() as where:
                    model.save_pretrained(where)
                    agent.policy.load_state_dict(pretrained.load(where).state_dict())
                step = state.global_step // cfg.updates
                with contextlib.redirect_stdout(sys.__stdout__):
                    measured(agent, held_out, points, step, spent[0], step * rows)

    dataset = Dataset.from_list([{"prompt": p.prompt} for p in drawn])
    trainer = new_trainer(cfg, tokenizer, rewarded, dataset, Watch(), 128, cfg.steps * cfg.updates)
    measured(agent, held_out, points, 0, 0.0, 0)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert len(seen) == rows * cfg.steps
    return points


def interval(differences):
    """Mean and half the width of the 95 % interval of paired differences."""
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, T95[len(differences)] * error


def at(points, step, name):
    """A number of a run's after a step."""
    return next(point[name] for point in points if point["step"] == step)


def rows(result):
    """The lines of the table in docs/measurements.md."""
    runs = [run["points"] for run in result["runs"].values()]
    for step in COMPARED:
        cells = [results.spread([at(run[who], step, "pass@1") for run in runs]) for who in COLOURS]
        mean, half = interval([at(run["ours"], step, "pass@1") - at(run["TRL"], step, "pass@1")
                               for run in runs])
        cells.append(f"{mean:+.1%} ± {half:.1%}")
        cells += [results.spread([at(run[who], step, "seconds") / 60 for run in runs], ".1f")
                  for who in COLOURS]
        yield f"| {step} | {' | '.join(cells)} |"


def draw(axes, runs):
    """pass@1 over completions, and over minutes: each seed, and the median of all."""
    for axis, (x, unit) in zip(axes, (("samples", 1000), ("seconds", 60))):
        for who, colour in COLOURS.items():
            paths = [run["points"][who] for run in runs]
            for points in paths:
                axis.plot([p[x] / unit for p in points], [p["pass@1"] for p in points],
                          color=colour, alpha=0.3, linewidth=1)
            middle = [[statistics.median(p[name] for p in column) for column in zip(*paths)]
                      for name in (x, "pass@1")]
            axis.plot([n / unit for n in middle[0]], middle[1], color=colour, label=who)
        axis.legend()


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("seeds", nargs="*", type=int)
    args = parser.parse_args()
    for seed in args.seeds:
        made = {"ours": ours, "TRL": trl}
        order = [*made] if seed % 2 else [*reversed(made)]
        points = {who: made[who](seed) for who in order}
        about = results.about("trl", "transformers")
        results.write(FOUND / f"{seed}.json", {"points": points, "about": about})
    if args.readme:
        runs = {path.stem: json.loads(path.read_text()) for path in sorted(FOUND.glob("*.json"))}
        results.write(HERE / "beside_trl.json", {"runs": runs})
        titles = {"pass@1, held out": "thousand completions", "pass@1, over time": "minutes"}
        results.figure(HERE / "beside_trl.png", lambda axes: draw(axes, runs.values()), titles)
        print("\n".join(rows({"runs": runs})))


if __name__ == "__main__":
    main()
