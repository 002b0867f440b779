"""Many runs of grpo.py, as many at a time as there are cores, each on one thread; what came of them, and
whether they differ.

    run_all([("--algo ppo".split(), 1), ("--algo grpo".split(), 1)], Path("out/questions"))

A run is kept under the name of its settings, so it is made once, however they are spelled; what went wrong is
said at the end. Runs of a seed share their warm start. Flags may hold `--patch name=value`, see `PATCHES`.
"""
import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
import reward  # noqa: E402
from run import batches, machine, start  # noqa: E402

MEASURED = ("greedy", "pass@1", "pass@8", "maj@8")
CURVES = ("accuracy", "length", "reward", "rule_reward", "kl", "entropy", "dead_groups", "explained_variance", "rm_accuracy",
          "rm_error", "grad_norm", "seconds")
HERE_ALONE = ["--device", "cpu", "--dtype", "float32", "--save_every", "100000", "--sample_every", "100000"]


def read(flags):
    """A command line as (Config, its patches)."""
    at = [i for i, x in enumerate(flags) if x == "--patch"]
    patches = [flags[i + 1] for i in at]
    rest = [x for i, x in enumerate(flags) if i not in at and i - 1 not in at]
    return grpo.read_command([*rest, *HERE_ALONE])[1], patches


def name_of(numbers):
    """A short name for what can be written as JSON."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:10]

# ------------------------------------------------------------------------------------- in the child

def patch_tries(value):
    """How many continuations label a step."""
    reward.rollout_labels.__defaults__ = (int(value),)


def patch_history(value):
    """The share of history in a refit; 0.1 without this."""
    replay = reward.replay
    reward.replay = lambda history, rows, *more: replay(history, round(10 * float(value) * rows), *more)


def patch_reference(value):
    """`kept`: a new iteration leaves the reference as it was."""
    assert value == "kept"
    grpo.shard.take = lambda *_: None


def patch_refit(value):
    """`never`: a new iteration leaves the reward model as it was."""
    assert value == "never"
    begin = grpo.begin_iteration

    def first_only(agent, problems, iteration):
        if iteration == 0:
            return begin(agent, problems, iteration)
        grpo.shard.take(agent.ref, agent.policy)
        return {}
    grpo.begin_iteration = first_only


PATCHES = {"tries": patch_tries, "history": patch_history, "reference": patch_reference, "refit": patch_refit}


class Labelling:
    """Counts the tokens that are sampled for a reward model's labels."""

    def __init__(self):
        self.tokens, self.on = 0, False
        begin, sample = grpo.begin_iteration, grpo.sample

        def counted_begin(*given):
            self.on = True
            found = begin(*given)
            self.on = False
            return found

        def counted_sample(*given):
            batch = sample(*given)
            self.tokens += int(batch.mask.sum()) * self.on
            return batch
        grpo.begin_iteration, grpo.sample = counted_begin, counted_sample


def completions(agent, policy, problems, purpose):
    """Four of each problem, by a policy."""
    u = machine.uniform(machine.rng(agent.cfg, purpose), len(problems), 4, agent.cfg.max_new)
    return grpo.generate(dataclasses.replace(agent, policy=policy, sampler=None), problems, u)


def kl_to(agent, before, problems):
    """The KL of the policy to another, of a token and of a completion, by sampling."""
    batch = completions(agent, agent.policy, problems, "kl")
    now, then = (batches.logps(gpt, batch, agent.cfg)[0] for gpt in (agent.policy, before))
    gap = ((now - then) * batch.mask).double()
    return {"kl of a token": (gap.sum() / batch.mask.sum()).item(), "kl": gap.sum(1).mean().item()}


def step_quality(agent, policy, problems):
    """How well the reward model tells true steps of working from false ones in completions of a policy: the
    area under the ROC curve, and the expected calibration error of its probability, in 10 bins."""
    batch = completions(agent, policy, problems, "quality")
    truth, ends = reward.of_steps(agent.task, batch, agent.cfg, agent.encoding)
    working = torch.tensor([text.startswith("\n") for text in batch.texts])[:, None]
    score = reward.scores(agent.reward_model, batch.ids, batch.mask, agent.cfg)
    score, truth = score[ends & working].double(), truth[ends & working] > 0.5
    rank = score.argsort().argsort().double()
    good, bad = truth.sum(), (~truth).sum()
    auc = (rank[truth].sum() - good * (good - 1) / 2) / (good * bad) if good and bad else torch.tensor(float("nan"))
    p, gap = score.sigmoid(), torch.zeros(10, dtype=torch.float64)
    gap.index_add_(0, (p * 10).long().clamp(max=9), p - truth.double())
    return {"auc": auc.item(), "calibration": (gap.abs().sum() / len(p)).item(), "true": truth.double().mean().item(), "steps": len(p)}


def peak():
    """The most memory that this process ever held, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def child(flags):
    """A run, and result.json in its folder: the curves, and what the model at the end is like on all
    held-out problems."""
    machine.prepare()
    cfg, patches = read(flags)
    labelling = Labelling()
    for patch in patches:
        name, value = patch.split("=")
        PATCHES[name](value)
    agent = grpo.train(cfg)
    result = {"flags": flags, "peak": peak(), "label tokens": labelling.tokens, "sources": sources(cfg)}
    metrics = [json.loads(line) for line in (cfg.folder / "metrics.jsonl").read_text().splitlines()]
    rows, tokens, seconds, points = cfg.prompts * cfg.group, 0.0, 0.0, []
    for m in metrics:
        tokens, seconds = tokens + m.get("length", 0) * rows, seconds + m.get("seconds", 0)
        if "pass@1" in m:
            points.append({"step": m["step"], "tokens": tokens, "seconds": round(seconds, 2), "pass@1": m["pass@1"]})
    result |= {"points": points, "steps": {name: [m.get(name) for m in metrics[1:]] for name in CURVES
                                           if any(name in m for m in metrics)}}
    agent.cfg = dataclasses.replace(cfg, held_out=0, samples=8, prompts=32, group=16)
    held_out = start.problems_of(agent.cfg, agent.task)[1]
    before = start.load_model(cfg.folder / "warm_start", cfg, agent.encoding)
    result |= {"final": grpo.evaluate(agent, held_out), **kl_to(agent, before, held_out)}
    if agent.reward_model is not None and cfg.supervision == "process":
        result["quality"] = {when: step_quality(agent, gpt, held_out) for when, gpt in (("start", before), ("end", agent.policy))}
    (cfg.folder / "result.json").write_text(json.dumps(result))
    for large in ("checkpoint.safetensors", "report.html"):
        (cfg.folder / large).unlink(missing_ok=True)


def sources(cfg):
    """A name for the code that a run was made by."""
    files = [*(ROOT / f"{name}.py" for name in ("grpo", "model", "reward")), *sorted((ROOT / "data").glob("*.py")),
             *sorted((ROOT / "run").glob("*.py")), HERE / "slips.py", HERE / "development.py"]
    return name_of([path.read_text() for path in files])

# ------------------------------------------------------------------------------------ from the parent

LOCKS = defaultdict(threading.Lock)         # one for each warm start


def start_child(flags, folder):
    """Run `child` on one thread; its output goes into the folder's log."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "w") as log:
        code = subprocess.call([sys.executable, str(HERE / "runs.py"), *flags, "--out", str(folder)], cwd=ROOT,
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT)
    if code:
        raise RuntimeError(f"failed, see {folder / 'log'}")


def warm_folder(cfg, flags, out):
    """The folder of the warm start of a run, made if it is not there."""
    folder = out / f"warm-{name_of({name: getattr(cfg, name) for name in start.WARM})}-{cfg.seed}"
    with LOCKS[folder]:
        if not (folder / "result.json").exists():
            start_child([*flags, "--steps", "0", "--iterations", "1", "--reward", "rule"], folder)
    return folder


def run(flags, seed, out):
    """The result of a run, from its file or made."""
    flags = [*flags, "--seed", str(seed)]
    cfg, patches = read(flags)
    settings = {name: x for name, x in vars(cfg).items() if name not in ("seed", "out")}
    folder = out / f"{name_of([settings, patches])}-{seed}"
    with LOCKS[folder]:
        if not (folder / "result.json").exists():
            warm = warm_folder(cfg, flags, out)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(warm / "warm_start", folder / "warm_start")
            start_child(flags, folder)
    return json.loads((folder / "result.json").read_text())


def run_all(jobs, out):
    """The results of all (flags, seed), as many at a time as there are cores; None where one failed."""
    def one(job):
        """A run; what went wrong is printed."""
        try:
            return run(*job, out)
        except (RuntimeError, grpo.data.Fault) as e:
            print(f"{' '.join(job[0])}, seed {job[1]}: {e}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = []
        for result in pool.map(one, jobs):
            made.append(result)
            print(f"{len(made)} of {len(jobs)} runs", flush=True)
    return made

# ----------------------------------------------------------------------------------- what came of it

def area(result, x="tokens"):
    """The mean of pass@1 over the tokens that were sampled, by trapezoids."""
    at, y = ([point[name] for point in result["points"]] for name in (x, "pass@1"))
    return float(np.trapezoid(y, at) / (at[-1] - at[0]))


def until(result, level, x):
    """How much of x (step, tokens or seconds) it takes until pass@1 is at a level, between two points on a
    line; None if it never is."""
    points = result["points"]
    if points[0]["pass@1"] >= level:
        return points[0][x]
    for a, b in zip(points, points[1:]):
        if b["pass@1"] >= level:
            return a[x] + (level - a["pass@1"]) / (b["pass@1"] - a["pass@1"]) * (b[x] - a[x])
    return None


def interval(differences, times=10_000):
    """The 95 % interval of the mean of paired differences, by bootstrap. Of five it is narrow: what differs
    has the same sign in all of them, too."""
    x = np.asarray(differences)
    drawn = np.random.default_rng(0).integers(len(x), size=(times, len(x)))
    return tuple(float(q) for q in np.quantile(x[drawn].mean(1), (0.025, 0.975)))


def spread(numbers, form=".1%"):
    """Median, and the least and the most in brackets."""
    x = sorted(numbers)
    return f"{statistics.median(x):{form}} ({x[0]:{form}} to {x[-1]:{form}})"


def about():
    """What a result depends on beside the code."""
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
            "cores": os.cpu_count(), "machine": model[1] if model else platform.processor()}


if __name__ == "__main__":
    child(sys.argv[1:])
