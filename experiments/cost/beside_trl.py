"""The same training by this code and by TRL's GRPOTrainer: accuracy over samples and over minutes.

    pip install -r tests/requirements-peers.txt trl==1.16.0 matplotlib
    python experiments/cost/beside_trl.py arithmetic 1 2 3 4 5     # seeds; 5 minutes each
    python experiments/models/smollm2.py                           # the model of `sums`
    python experiments/cost/beside_trl.py sums 1 --steps 40        # half an hour
    python experiments/cost/beside_trl.py --readme                 # result, tables, figure

Both have the task's settings: the same model, prompts in the same order, optimizer steps a rollout,
AdamW, rate, clip, and KL. One evaluator, this code's, measures both; its time does not count. Left
unequal: TRL divides by a std with Bessel's correction plus 1e-4, and draws other random numbers.
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
from data import load_task  # noqa: E402
from experiments import results  # noqa: E402
from experiments.cost.speed import new_trainer  # noqa: E402
from run import config, dist, pretrained  # noqa: E402

FOUND = ROOT / "out" / "beside_trl"
JOBS = {"arithmetic": dict(init="data/warm_start", micro_tokens=2048),
        "sums": dict(task="experiments/models/sums_task.py", init="out/smollm2")}
PARTS = {"arithmetic": 128, "sums": 16}     # rows of a forward pass of TRL's, its fastest
COMPARED = {"arithmetic": (0, 4, 8, 12, 16, 20, 24), "sums": (0, 10, 20, 30, 40, 60, 80, 100)}
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}      # Student's, two-sided
COLOURS = {"ours": "tab:blue", "TRL": "tab:orange"}


class Watched:
    """An Agent with its problems, the seconds of its steps, and what its model was worth."""

    def __init__(self, job, settings):
        self.cfg = cfg = grpo.make_config(**JOBS[job] | settings, device="cpu")
        self.task, self.job = load_task(cfg.task), job
        self.problems, self.held_out = config.problems_of(self.task, cfg)
        self.agent = grpo.new_agent(cfg, self.task, *pretrained.trained_model(cfg))
        self.seconds, self.points = [], []
        self.measure(0)

    def measure(self, step):
        if step in COMPARED[self.job]:
            found = grpo.evaluate(self.agent, self.held_out)
            samples = step * self.cfg.prompts * self.cfg.group
            point = dict(step=step, seconds=sum(self.seconds), samples=samples, **found)
            self.points.append(point)
            print(point, file=sys.__stdout__, flush=True)


def ours(watched):
    """A run of this code."""
    for step in range(1, 1 + watched.cfg.steps):
        _, stats = grpo.train_step(watched.agent, watched.problems, step)
        watched.seconds.append(stats["seconds"])
        watched.measure(step)


def trl(watched):
    """The same by TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    cfg, task = watched.cfg, watched.task
    tokenizer = AutoTokenizer.from_pretrained(cfg.init)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    frame = bool(tokenizer.chat_template)
    drawn = [p for step in range(1, 1 + cfg.steps)
             for p in dist.rng(cfg, "problems", step).sample(watched.problems, cfg.prompts)]
    asked = [[dict(role="user", content=p.prompt)] if frame else p.prompt for p in drawn]
    due = [i for i in range(len(drawn)) for _ in range(cfg.group)]      # problem of each completion

    def rewarded(prompts, completions, completion_ids, **_):
        """The rule's reward: of a completion that is cut off only negative components count."""
        rewards = []
        for prompt, completion, ids in zip(prompts, completions, completion_ids):
            i = due.pop(0)
            assert prompt == asked[i]
            text = completion[0]["content"] if frame else completion
            ended = tokenizer.eos_token_id in ids or len(ids) < cfg.max_new
            parts = task.reward(drawn[i], text).values()
            rewards.append(sum(x if ended else min(x, 0) for x in parts))
        return rewards

    class Watch(TrainerCallback):
        """Takes the time of optimizer steps, rollouts among them."""

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, _, state, *__, model, **___):
            took = time.perf_counter() - self.began
            step, later = divmod(state.global_step - 1, cfg.updates)
            if later:
                watched.seconds[step] += took
            else:
                watched.seconds.append(took)
            if later == cfg.updates - 1 and step + 1 in COMPARED[watched.job]:
                with tempfile.TemporaryDirectory() as where:
                    model.save_pretrained(where)
                    weights = pretrained.load(where).state_dict()
                watched.agent.policy.load_state_dict(weights)
                watched.measure(step + 1)

    dataset = Dataset.from_list([{"prompt": prompt} for prompt in asked])
    steps, rows = cfg.steps * cfg.updates, PARTS[watched.job]
    trainer = new_trainer(cfg, tokenizer, rewarded, dataset, Watch(), rows, steps)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert not due


def compared(runs):
    """For each step: both medians of pass@1 and minutes, and the mean of the differences between
    seeds, with its 95 % interval."""
    for points in zip(*(run[who]["points"] for run in runs for who in COLOURS)):
        mine, other = ([p["pass@1"] for p in points[i::2]] for i in (0, 1))
        cells = [results.spread(mine), results.spread(other)]
        if len(runs) > 1:
            gaps = [a - b for a, b in zip(mine, other)]
            half = T95[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
            cells.append(f"{statistics.mean(gaps):+.1%} ± {half:.1%}")
        cells += [results.spread([p["seconds"] / 60 for p in points[i::2]], ".1f") for i in (0, 1)]
        yield f"| {points[0]['step']} | {' | '.join(cells)} |"


def draw(axes, runs):
    """pass@1 over completions, and over minutes: each seed, and the median of all."""
    for axis, (x, unit) in zip(axes, (("samples", 1000), ("seconds", 60))):
        for who, colour in COLOURS.items():
            paths = [[(p[x] / unit, p["pass@1"]) for p in run[who]["points"]] for run in runs]
            for path in paths:
                axis.plot(*zip(*path), color=colour, alpha=0.3, linewidth=1)
            middle = [[statistics.median(n) for n in zip(*at)] for at in zip(*paths)]
            axis.plot(*zip(*middle), color=colour, label=who)
        axis.legend()


def main():
    parser = results.parser(__doc__, "readme")
    parser.add_argument("job", nargs="?", choices=JOBS)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    fewer = {"steps": args.steps} if args.steps else {}
    for seed in args.seeds:
        made = {}
        for who, train in ((("ours", ours), ("TRL", trl))[::1 if seed % 2 else -1]):
            watched = Watched(args.job, fewer | {"seed": seed})
            train(watched)
            made[who] = {"points": watched.points, "seconds": watched.seconds}
        made["about"] = results.about("trl", "transformers")
        results.write(FOUND / f"{args.job}-{seed}.json", made)
    if args.readme:
        found = {job: [json.loads(path.read_text()) for path in sorted(FOUND.glob(f"{job}-*"))]
                 for job in JOBS}
        results.write(HERE / "beside_trl.json", found)
        titles = {"pass@1, held out": "thousand completions", "pass@1, over time": "minutes"}
        results.figure(HERE / "beside_trl.png", lambda axes: draw(axes, found["arithmetic"]),
                       titles)
        for job, runs in found.items():
            print(job, *compared(runs), sep="\n")


if __name__ == "__main__":
    main()
