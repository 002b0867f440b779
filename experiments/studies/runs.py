"""Makes a run of grpo.py in a single-threaded process of its own, and measures what its metrics lack.

    run("--algo ppo".split(), 1, Path("out/studies"))

A run's folder is named by its settings, so each run is made once, however its flags are spelled. Runs of a seed share
their warm start. Flags may include `--patch name=value`, see `PATCHES`.
"""
import copy
import dataclasses
import hashlib
import json
import os
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
import constants  # noqa: E402
import critics  # noqa: E402
import grpo  # noqa: E402
import reward  # noqa: E402
from run import config, dist, passes, pretrained, report, setup  # noqa: E402

CURVES = ("length", "reward", "rule_reward", "entropy", "dead_groups", "explained_variance")
HERE_ALONE = ["--device", "cpu", "--dtype", "float32", "--save_every", "100000"]


# Former flags, with which results were recorded: now they are constants.
CONSTANTS = {"value_coef": "grpo.VALUE_COEF", "choices": "reward.CHOICES",
             "warm_batch": "run.setup.WARM_BATCH", "fit_prompts": "reward.FIT_STEPS"}


def read(flags):
    """A command line as (Config, list of patches). Each seed has a warm start of its own."""
    rest, patches = [], []
    flags = iter(flags)
    for flag in flags:
        if flag == "--patch":
            patches.append(next(flags))
        elif flag[2:] in CONSTANTS:
            patches.append(f"{flag[2:]}={next(flags)}")
        elif flag == "--labels":
            rest += ["--reward", {"rule": "model", "rollouts": "rollouts"}[next(flags)]]
        elif flag == "--n_head":
            next(flags)                     # it was always one for 32 channels
        else:
            rest.append(flag)
    own = [] if "--init" in rest else ["--warm_steps", str(grpo.Config.warm_steps)]
    return grpo.make_config(**config.read(grpo.Config, "", [*own, *rest, *HERE_ALONE])[1]), patches


def put_constant(name, value, cfg):
    """Gives a constant its value; `fit_prompts` is a number of problems, FIT_STEPS one of steps."""
    value = -(-int(value) // cfg.prompts) if name == "fit_prompts" else value
    constants.put(f"{CONSTANTS[name]}={value}")


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
    dist.copy_weights = lambda *_: None


def patch_critic_lr(value):
    """The critic's learning rate, as a multiple of the policy's."""
    make = grpo.new_agent

    def with_own_rate(*given):
        agent = make(*given)
        group, own = agent.opt.param_groups[0], {id(p) for p in agent.critic.parameters()}
        whole = group["params"]
        group["params"] = [p for p in whole if id(p) not in own]
        agent.opt.add_param_group({"params": [p for p in whole if id(p) in own], "lr": group["lr"] * float(value)})
        return agent
    grpo.new_agent = with_own_rate


def patch_critic_fit(value):
    """The number of steps for which a separate critic is fitted before the first step of RL."""
    train_step = grpo.train_step

    def fit_first(agent, problems, step):
        if step == 1:
            critics.fit(agent.critic, agent, problems, int(value), dist.rng(agent.cfg, "critic fit"))
        return train_step(agent, problems, step)
    grpo.train_step = fit_first


def patch_vine(value):
    """The number of continuations that tell the value of a line (VinePPO), in place of the run's advantages."""
    rollout = grpo.rollout

    def of_lines(agent, problems, rng):
        batch, stats = rollout(agent, problems, rng)
        batch.value, batch.adv = critics.line_values(agent, batch, rng, int(value))
        returns = batch.reward.sum(1, True).expand_as(batch.value)
        stats["explained_variance"], batch.value = explained(returns[batch.mask], batch.value[batch.mask]), None
        return batch, stats
    grpo.rollout = of_lines


def patch_drawn(value):
    """`once`: completions are those of the first policy, as in RFT, and the policy is trained on them as on its own."""
    assert value == "once"
    rollout, first = grpo.rollout, []

    def of_the_first(agent, problems, rng):
        first.extend([] if first else [pretrained.frozen(agent.policy)])
        batch, stats = rollout(dataclasses.replace(agent, policy=first[0], sampler=None), problems, rng)
        batch.logp = batch.old_logp = grpo.logps(agent.policy, batch, agent.cfg)[0]
        return batch, stats
    grpo.rollout = of_the_first


def patch_sampler(value):
    """`bfloat16`: the sampler's weights are rounded to bfloat16, and the trainer computes the old log-probabilities anew."""
    assert value == "bfloat16"
    rollout = grpo.rollout
    passes.MISMATCH[None] = passes.MISMATCH[torch.bfloat16]

    def rounded(agent, problems, rng):
        sampling = copy.copy(agent)             # with what an algorithm may have added
        sampling.policy = sampling.sampler = pretrained.frozen(agent.policy)
        for p in sampling.policy.parameters():
            p.copy_(p.bfloat16())
        batch, stats = rollout(sampling, problems, rng)
        batch.old_logp = grpo.logps(agent.policy, batch, agent.cfg)[0]
        return batch, stats
    grpo.rollout = rounded


def patch_wrong(value):
    """The reward of a wrong completion or step, in place of 0."""
    of_rule = reward.of_rule

    def signed(agent, batch):
        found, ends = of_rule(agent, batch)
        return torch.where(ends, found + float(value) * (1 - found), 0), ends
    reward.of_rule = signed


def patch_format(value):
    """`moves`: on the task mines a step is good if it is a true move, wherever it leads."""
    assert value == "moves"
    make = grpo.new_agent

    def with_form(cfg, task, *more):
        task.steps = lambda problem, text: [(end, place is not None) for end, place in task.walk(problem, text) if end]
        return make(cfg, task, *more)
    grpo.new_agent = with_form


def patch_label_noise(value):
    """The share of labels of steps that are wrong."""
    refit = reward.refit

    def of_imperfect(agent, batches, held_out, rng):
        assert agent.cfg.supervision == "process"
        for batch in batches:
            wrong = dist.uniform(rng, *batch.ends.shape) < float(value)
            batch.reward = torch.where(batch.ends & wrong, 1 - batch.reward, batch.reward)
        return refit(agent, batches, held_out, rng)
    reward.refit = of_imperfect


PATCHES = {"label_noise": patch_label_noise, "tries": patch_tries, "history": patch_history, "reference": patch_reference,
           "critic_lr": patch_critic_lr, "critic_fit": patch_critic_fit, "vine": patch_vine, "drawn": patch_drawn, "wrong": patch_wrong,
           "sampler": patch_sampler, "format": patch_format}


class Watch:
    """Records what the metrics of a run lack: the tokens sampled and the seconds spent up to each step, evaluations
    apart, those that a reward model takes included; and for each step the critic's explained variance, measured with
    lambda 1 whatever lambda it trains with."""

    def __init__(self):
        self.sampled = self.tokens = self.seconds = self.label_tokens = 0
        self.spent, self.known = [], []
        self.sample, self.advantages = grpo.sample, grpo.advantages
        grpo.sample, grpo.advantages = self.counted_sample, self.measured_advantages
        critics.fit = self.measured(critics.fit, lambda *_: 0, of_labels=True)
        grpo.refit_reward_model = self.measured(
            grpo.refit_reward_model, lambda agent, _, iteration: iteration * agent.cfg.steps, True)
        grpo.train_step = self.measured(grpo.train_step, lambda agent, problems, step: step)

    def measured(self, function, at, of_labels=False):
        """A function whose tokens and seconds count, once even if it calls another such one, and
        are spent after the step `at`."""
        def call(*given):
            began, before, spent, sampled = (
                time.perf_counter(), self.sampled, self.seconds, self.tokens)
            found = function(*given)
            self.seconds = spent + time.perf_counter() - began
            self.tokens = sampled + self.sampled - before
            self.label_tokens += of_labels * (self.sampled - before)
            self.spent.append((at(*given), self.tokens, round(self.seconds, 2)))
            return found
        return call

    def counted_sample(self, *given, **named):
        """`sample`, with its tokens counted."""
        batch = self.sample(*given, **named)
        self.sampled += int(batch.mask.sum())
        return batch

    def measured_advantages(self, rewards, ends, mask, penalty, value, cfg):
        """`advantages`; also records the share of the variance of the lambda-1 returns that the critic
        explains."""
        if value is not None:
            to_come = self.advantages(rewards, ends, mask, penalty, value, dataclasses.replace(cfg, lam=1.0))[1]
            self.known.append(explained(to_come[mask], value[mask]))
        return self.advantages(rewards, ends, mask, penalty, value, cfg)


def explained(to_come, value):
    """The share of the variance of returns that values explain, both (n,); None if the returns are equal."""
    own = to_come.var().item()
    return 1 - (to_come - value).var().item() / own if own > 1e-8 else None


def agent_of(cfg, where):
    """An agent with the model in a folder, to evaluate it with the settings of a run."""
    its = dataclasses.replace(cfg, init=os.path.abspath(where))
    return grpo.Agent(its, *setup.trained_model(its))


def completions(agent, policy, problems, purpose):
    """Four completions of each problem, from the given policy."""
    return grpo.generate(dataclasses.replace(agent, policy=policy, sampler=None), problems, 4, dist.rng(agent.cfg, purpose))


def kl_to(agent, before, problems):
    """The KL of the policy to another model in nats, per token and per completion, estimated by sampling."""
    batch = completions(agent, agent.policy, problems, "kl")
    now, then = (grpo.logps(gpt, batch, agent.cfg)[0] for gpt in (agent.policy, before))
    gap = ((now - then) * batch.mask).double()
    return {"kl of a token": (gap.sum() / batch.mask.sum()).item(), "kl": gap.sum(1).mean().item()}


def quality(agent, policy, problems):
    """How well the reward model separates true from false steps of working in a policy's completions, or right
    from wrong completions: the AUC and, for the probability of a step, the expected calibration error in 10
    bins. Guesses contain no working, so process supervision leaves them out."""
    batch = completions(agent, policy, problems, "quality")
    truth, ends = reward.of_rule(agent, batch)
    if agent.cfg.supervision == "process":
        ends = ends & torch.tensor([not text.startswith("~") for text in batch.texts])[:, None]
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


def no_change(*_):
    """In place of what `child` has done."""


def child(flags):
    """Make one run and write result.json into its folder: the curves, and the final model's evaluation on all
    held-out problems."""
    dist.prepare()
    cfg, patches = read(flags)
    config.algorithm(cfg.algo, grpo.ALGOS, grpo)            # before what is patched and measured, not after it
    config.algorithm = no_change
    for patch in patches:
        name, value = patch.split("=")
        if name in CONSTANTS:
            put_constant(name, value, cfg)
        else:
            PATCHES[name](value)
    watch = Watch()
    agent = grpo.train(cfg)
    result = {"flags": flags, "label tokens": watch.label_tokens, "sources": sources()}
    metrics = [json.loads(line) for line in (cfg.folder / "metrics.jsonl").read_text().splitlines()]
    result |= {"points": points_of(metrics, watch.spent),
               "steps": {name: [m.get(name) for m in metrics[1:]] for name in CURVES if any(name in m for m in metrics)}}
    if watch.known:
        result["steps"]["explained_variance"] = watch.known
    agent.cfg = dataclasses.replace(cfg, held_out=0, samples=8, prompts=32, group=16)
    held_out = setup.problems_of(agent.cfg, agent.task)[1]
    before = pretrained.load_model(cfg.folder / "warm_start", cfg, agent.encoding)
    cool = dataclasses.replace(agent, cfg=dataclasses.replace(agent.cfg, temperature=0.5))
    result |= {"final": grpo.evaluate(agent, held_out), "final at 0.5": grpo.evaluate(cool, held_out), **kl_to(agent, before, held_out)}
    if (cfg.folder / "start.json").exists():
        result |= json.loads((cfg.folder / "start.json").read_text())
    else:
        start, cool_start = (dataclasses.replace(x, policy=before, sampler=None) for x in (agent, cool))
        result |= {"start": grpo.evaluate(start, held_out), "start at 0.5": grpo.evaluate(cool_start, held_out)}
    if agent.reward_model is not None:
        result["quality"] = {when: quality(agent, gpt, held_out) for when, gpt in (("start", before), ("end", agent.policy))}
    (cfg.folder / "result.json").write_text(json.dumps(result))
    for large in ("checkpoint.safetensors", "report.html"):
        (cfg.folder / large).unlink(missing_ok=True)


def points_of(metrics, spent):
    """For each evaluation its step and results, and the tokens and seconds spent so far. `spent`: (step, tokens,
    seconds), also where an iteration begins: if a fit took something, there is a second point there."""
    evaluated, points, before = {m["step"]: m for m in metrics if "pass@1" in m}, [], (0, 0, 0.0)
    for step, tokens, seconds in [before, *spent]:
        if step in evaluated and (not points or tokens > before[1]):
            m = evaluated[step]
            points.append({"step": step, "tokens": tokens, "seconds": seconds, "pass@1": m["pass@1"], "greedy": m["greedy"]})
        before = step, tokens, seconds
    return points


def sources():
    """A hash of the code that makes a run."""
    own = ("slips", "careful", "mines", "critics", "constants", "runs")
    files = [*(ROOT / f"{name}.py" for name in ("grpo", "model", "reward")),
             *sorted((ROOT / "data").glob("*.py")), *sorted((ROOT / "run").glob("*.py")),
             *sorted((ROOT / "experiments" / "variants").glob("*.py")),
             *(HERE / f"{name}.py" for name in own)]
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


def warm_folder(cfg, patches, flags, out):
    """The folder with a run's warm start, made if it is missing."""
    batch = [patch for patch in patches if patch.startswith("warm_batch=")]
    folder = out / f"warm-{name_of([setup.settings(cfg), batch])}-{cfg.seed}"
    with LOCKS[folder]:
        if not made(folder):
            shutil.rmtree(folder, ignore_errors=True)
            start_child([*flags, "--steps", "0", "--iterations", "1", "--reward", "rule"], folder)
    return folder


def folder_of(flags, seed, out):
    """The folder of a run."""
    cfg, patches = read([*flags, "--seed", str(seed)])
    settings = {name: x for name, x in vars(cfg).items() if name not in ("seed", "out")}
    return out / f"{name_of([settings, patches])}-{seed}"


def run(flags, seed, out):
    """The result of a run: from its folder, or made now."""
    folder = folder_of(flags, seed, out)
    flags = [*flags, "--seed", str(seed)]
    with LOCKS[folder]:
        if not made(folder):
            warm = warm_folder(*read(flags), flags, out)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(warm / "warm_start", folder / "warm_start")
            first = {name: x for name, x in made(warm).items() if name.startswith("start")}
            (folder / "start.json").write_text(json.dumps(first))       # measured once
            start_child(flags, folder)
        return made(folder)

# ----------------------------------------------------------------------------------- results

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}   # 97.5 % quantiles of Student's t for n numbers


def interval(differences):
    """The 95 % interval (Student's t) of the mean of paired differences; a bootstrap of five would be too
    narrow."""
    n, middle = len(differences), statistics.mean(differences)
    half = STUDENT[n] * statistics.stdev(differences) / n ** 0.5
    return middle - half, middle + half


def with_interval(differences):
    """The mean of differences with its 95 % interval, or both of two, as text."""
    two = len(differences) == 2
    low, high = differences if two else interval(differences)
    return f"{statistics.mean(differences):+.1f} ({low:+.1f} {'and' if two else 'to'} {high:+.1f})".replace("-", "−")


def reached(points, spent, limit, of):
    """A measure where a run has spent so much, by its curve: the last one if it has spent less in all."""
    return float(np.interp(limit, [p[spent] for p in points], [p[of] for p in points]))


if __name__ == "__main__":
    child(sys.argv[1:])
