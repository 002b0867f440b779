"""Makes many runs of grpo.py, one single-threaded process per core, and summarises and compares their results.

    run_all([("--algo ppo".split(), 1), ("--algo grpo".split(), 1)], Path("out/questions"))

A run's folder is named by its settings, so each run is made once, however its flags are spelled; errors are
printed. Runs of a seed share their warm start. Flags may include `--patch name=value`, see `PATCHES`.
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
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
import reward  # noqa: E402
from run import agents, batches, machine, models, preflight, warm_start  # noqa: E402

MEASURED = ("greedy", "pass@1", "pass@8", "maj@8")
CURVES = ("accuracy", "length", "reward", "rule_reward", "kl", "entropy", "dead_groups", "explained_variance", "rm_accuracy",
          "rm_error", "grad_norm", "seconds")
HERE_ALONE = ["--device", "cpu", "--dtype", "float32", "--save_every", "100000"]


def read(flags):
    """A command line as (Config, list of patches). Each seed has a warm start of its own."""
    at = [i for i, x in enumerate(flags) if x == "--patch"]
    patches = [flags[i + 1] for i in at]
    rest = [x for i, x in enumerate(flags) if i not in at and i - 1 not in at]
    own = [] if "--init" in rest else ["--warm_steps", str(grpo.Config.warm_steps)]
    return grpo.read_command([*own, *rest, *HERE_ALONE])[1], patches


def name_of(numbers):
    """A short hash of a value that can be written as JSON."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:10]

# ------------------------------------------------------------------------------------- in the child process

def patch_tries(value):
    """The number of continuations that label a step."""
    reward.rollout_labels.__defaults__ = (int(value),)


def patch_history(value):
    """The share of history in a refit; 0.1 without this patch."""
    replay = reward.replay
    reward.replay = lambda history, rows, *more: replay(history, round(10 * float(value) * rows), *more)


def patch_reference(value):
    """`kept`: a new iteration keeps the reference."""
    assert value == "kept"
    grpo.shard.copy_weights = lambda *_: None


def patch_refit(value):
    """`never`: a new iteration keeps the reward model."""
    assert value == "never"
    begin = grpo.begin_iteration

    def first_only(agent, problems, iteration):
        if iteration == 0:
            return begin(agent, problems, iteration)
        grpo.shard.copy_weights(agent.ref, agent.policy)
        return {}
    grpo.begin_iteration = first_only


def patch_passes(value):
    """The number of passes of a reward model over its labelled rows."""
    fit = reward.fit

    def repeated(reward_model, data, *more):
        fit(reward_model, {name: torch.cat([x] * int(value)) for name, x in data.items()}, *more)
    reward.fit = repeated


def patch_critic_lr(value):
    """The critic's learning rate, as a multiple of the policy's."""
    make = agents.new_agent

    def with_own_rate(*given):
        agent = make(*given)
        group, own = agent.opt.param_groups[0], {id(p) for p in agent.critic.parameters()}
        whole = group["params"]
        group["params"] = [p for p in whole if id(p) not in own]
        agent.opt.add_param_group({"params": [p for p in whole if id(p) in own], "lr": group["lr"] * float(value)})
        return agent
    agents.new_agent = with_own_rate


def patch_label_noise(value):
    """The share of labels that are wrong."""
    reward.LABEL_NOISE = float(value)


PATCHES = {"label_noise": patch_label_noise, "tries": patch_tries, "history": patch_history, "reference": patch_reference, "refit": patch_refit,
           "passes": patch_passes, "critic_lr": patch_critic_lr}


class Watch:
    """Records what the metrics of a run lack: for each iteration the tokens and seconds that its reward model
    takes, and for each step the critic's explained variance, measured with lambda 1 whatever lambda it trains
    with."""

    def __init__(self):
        self.fits, self.tokens, self.known = [], 0, []
        self.begin, self.sample, self.advantages = grpo.begin_iteration, grpo.sample, grpo.advantages
        grpo.begin_iteration, grpo.sample, grpo.advantages = self.timed_begin, self.counted_sample, self.measured_advantages

    def timed_begin(self, *given):
        """`begin_iteration`, timed."""
        began, self.tokens = time.perf_counter(), 0
        found = self.begin(*given)
        self.fits.append((self.tokens, time.perf_counter() - began))
        return found

    def counted_sample(self, *given):
        """`sample`, with its tokens counted."""
        batch = self.sample(*given)
        self.tokens += int(batch.mask.sum())
        return batch

    def measured_advantages(self, rewards, ends, mask, penalty, value, cfg):
        """`advantages`; also records the share of the variance of the lambda-1 returns that the critic
        explains."""
        if value is not None:
            to_come = self.advantages(rewards, ends, mask, penalty, value, dataclasses.replace(cfg, lam=1.0))[1]
            own = to_come[mask].var().item()
            self.known.append(1 - (to_come - value)[mask].var().item() / own if own > 1e-8 else None)
        return self.advantages(rewards, ends, mask, penalty, value, cfg)


def completions(agent, policy, problems, purpose):
    """Four completions of each problem, from the given policy."""
    u = machine.uniform(machine.rng(agent.cfg, purpose), len(problems), 4, agent.cfg.max_new)
    return grpo.generate(dataclasses.replace(agent, policy=policy, sampler=None), problems, u)


def kl_to(agent, before, problems):
    """The KL of the policy to another model in nats, per token and per completion, estimated by sampling."""
    batch = completions(agent, agent.policy, problems, "kl")
    now, then = (batches.logps(gpt, batch, agent.cfg)[0] for gpt in (agent.policy, before))
    gap = ((now - then) * batch.mask).double()
    return {"kl of a token": (gap.sum() / batch.mask.sum()).item(), "kl": gap.sum(1).mean().item()}


def quality(agent, policy, problems):
    """How well the reward model separates true from false steps of working in a policy's completions, or right
    from wrong completions: the AUC and, for the probability of a step, the expected calibration error in 10
    bins. Guesses contain no working, so process supervision leaves them out."""
    batch = completions(agent, policy, problems, "quality")
    truth, ends = reward.of_steps(agent.task, batch, agent.cfg, agent.encoding)
    if agent.cfg.supervision == "process":
        ends = ends & torch.tensor([text.startswith("\n") for text in batch.texts])[:, None]
    score = reward.scores(agent.reward_model, batch.ids, batch.mask, agent.cfg)[ends].double()
    truth = truth[ends] > 0.5
    found = {"auc": auc(score, truth), "true": truth.double().mean().item(), "steps": len(truth)}
    if agent.cfg.supervision == "process":
        p, gap = score.sigmoid(), torch.zeros(10, dtype=torch.float64)
        gap.index_add_(0, (p * 10).long().clamp(max=9), p - truth.double())
        found["calibration"] = (gap.abs().sum() / len(p)).item()
    return found


def auc(score, truth):
    """The share of pairs of a true and a false item that a score orders rightly; None without such a pair."""
    rank = score.double().argsort().argsort().double()
    good, bad = truth.sum().item(), (~truth).sum().item()
    return (rank[truth].sum().item() - good * (good - 1) / 2) / (good * bad) if good and bad else None


def peak():
    """Peak memory of this process, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def child(flags):
    """Make one run and write result.json into its folder: the curves, and the final model's evaluation on all
    held-out problems."""
    machine.prepare()
    cfg, patches = read(flags)
    watch = Watch()
    for patch in patches:
        name, value = patch.split("=")
        PATCHES[name](value)
    agent = grpo.train(cfg)
    result = {"flags": flags, "peak": peak(), "label tokens": sum(tokens for tokens, _ in watch.fits), "sources": sources()}
    metrics = [json.loads(line) for line in (cfg.folder / "metrics.jsonl").read_text().splitlines()]
    result |= {"points": points_of(metrics, watch.fits, cfg),
               "steps": {name: [m.get(name) for m in metrics[1:]] for name in CURVES if any(name in m for m in metrics)}}
    if watch.known:
        result["steps"]["explained_variance"] = watch.known
    agent.cfg = dataclasses.replace(cfg, held_out=0, samples=8, prompts=32, group=16)
    held_out = preflight.problems_of(agent.cfg, agent.task)[1]
    before = models.load_model(cfg.folder / "warm_start", cfg, agent.encoding)
    result |= {"final": grpo.evaluate(agent, held_out), **kl_to(agent, before, held_out)}
    if agent.reward_model is not None:
        result["quality"] = {when: quality(agent, gpt, held_out) for when, gpt in (("start", before), ("end", agent.policy))}
    (cfg.folder / "result.json").write_text(json.dumps(result))
    for large in ("checkpoint.safetensors", "report.html"):
        (cfg.folder / large).unlink(missing_ok=True)


def points_of(metrics, fits, cfg):
    """For each evaluation the step, pass@1, and the tokens and seconds spent so far. The cost of a reward model
    is added where its iteration begins, as a second point with the same step and pass@1."""
    tokens, seconds, points, fits = 0.0, 0.0, [], iter(fits)
    for m in metrics:
        if m["step"] and (m["step"] - 1) % cfg.steps == 0:
            more = next(fits, (0, 0.0))         # empty if the reward model was kept
            tokens, seconds = tokens + more[0], seconds + more[1]
            if more[0] and points[-1]["step"] == m["step"] - 1:
                points.append(points[-1] | {"tokens": tokens, "seconds": round(seconds, 2)})
        tokens, seconds = tokens + m.get("length", 0) * cfg.prompts * cfg.group, seconds + m.get("seconds", 0)
        if "pass@1" in m:
            points.append({"step": m["step"], "tokens": tokens, "seconds": round(seconds, 2), "pass@1": m["pass@1"]})
    return points


def sources():
    """A hash of the code that makes a run."""
    files = [*(ROOT / f"{name}.py" for name in ("grpo", "model", "reward")), *sorted((ROOT / "data").glob("*.py")),
             *sorted((ROOT / "run").glob("*.py")), HERE / "slips.py", HERE / "development.py", Path(__file__)]
    return name_of([path.read_text() for path in files])

# ------------------------------------------------------------------------------------ in the parent process

LOCKS = defaultdict(threading.Lock)         # one for each folder


def start_child(flags, folder):
    """Run `child` on one thread, with its output in the folder's log; raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "w") as log:
        code = subprocess.call([sys.executable, str(HERE / "runs.py"), *flags, "--out", str(folder)], cwd=ROOT,
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT)
    if code:
        raise RuntimeError(f"failed, see {folder / 'log'}")


def made(folder):
    """The result in a folder if the current code made it, else None."""
    file = folder / "result.json"
    found = json.loads(file.read_text()) if file.exists() else None
    return found if found and found["sources"] == sources() else None


def warm_folder(cfg, flags, out):
    """The folder with a run's warm start, made if it is missing."""
    folder = out / f"warm-{name_of({name: x for name, x in vars(cfg).items() if name not in warm_start.RL_ONLY})}-{cfg.seed}"
    with LOCKS[folder]:
        if not made(folder):
            shutil.rmtree(folder, ignore_errors=True)
            start_child([*flags, "--steps", "0", "--iterations", "1", "--reward", "rule"], folder)
    return folder


def run(flags, seed, out):
    """The result of a run: from its folder, or made now."""
    flags = [*flags, "--seed", str(seed)]
    cfg, patches = read(flags)
    settings = {name: x for name, x in vars(cfg).items() if name not in ("seed", "out")}
    folder = out / f"{name_of([settings, patches])}-{seed}"
    with LOCKS[folder]:
        if not made(folder):
            warm = warm_folder(cfg, flags, out)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(warm / "warm_start", folder / "warm_start")
            start_child(flags, folder)
        return made(folder)


def run_all(jobs, out):
    """The results of all (flags, seed), made as many at a time as there are cores; None for a run that
    failed."""
    def one(job):
        """One run; errors are printed."""
        try:
            return run(*job, out)
        except (RuntimeError, grpo.data.UserError) as e:
            print(f"{' '.join(job[0])}, seed {job[1]}: {e}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = []
        for result in pool.map(one, jobs):
            results.append(result)
            print(f"{len(results)} of {len(jobs)} runs", flush=True)
    return results

# ----------------------------------------------------------------------------------- results

def area(result):
    """The mean of pass@1 over the steps of a run, by the trapezoidal rule."""
    at, y = ([point[name] for point in result["points"]] for name in ("step", "pass@1"))
    return float(np.trapezoid(y, at) / (at[-1] - at[0]))


def until(result, level, x):
    """x (step, tokens or seconds) when pass@1 first reaches a level, by linear interpolation; None if it never
    does."""
    points = result["points"]
    if points[0]["pass@1"] >= level:
        return points[0][x]
    for a, b in zip(points, points[1:]):
        if b["pass@1"] >= level:
            return a[x] + (level - a["pass@1"]) / (b["pass@1"] - a["pass@1"]) * (b[x] - a[x])
    return None


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}         # 97.5 % quantiles of Student's t for n numbers


def interval(differences):
    """The 95 % interval (Student's t) of the mean of paired differences; a bootstrap of five would be too
    narrow."""
    n, middle = len(differences), statistics.mean(differences)
    half = STUDENT[n] * statistics.stdev(differences) / n ** 0.5
    return middle - half, middle + half


def spread(numbers, form=".1%"):
    """The median, with the lowest and highest in brackets."""
    x = sorted(numbers)
    return f"{statistics.median(x):{form}} ({x[0]:{form}} to {x[-1]:{form}})"


def about():
    """The date, versions and machine of a result."""
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
            "cores": os.cpu_count(), "machine": model[1] if model else platform.processor()}


if __name__ == "__main__":
    child(sys.argv[1:])
