"""Makes a run of grpo.py in a process of its own, and measures what its metrics lack.

    run("--algo ppo".split(), 1, Path("out/studies"))

A run's folder is named by its settings, and a result in it is taken as it is: delete `out` after a
change of the code. Runs of a seed share their warm start. Flags may have `--patch name=value`.
"""
import copy
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
import constants  # noqa: E402
import grpo  # noqa: E402
import reward  # noqa: E402
from run import config, dist, passes, pretrained, report, setup  # noqa: E402
from run.device import prepare  # noqa: E402

CURVES = ("length", "entropy", "dead_groups")
HERE_ALONE = ["--device", "cpu", "--dtype", "float32", "--save_every", "100000"]
# Former flags, with which results were recorded: now they are constants.
CONSTANTS = {"value_coef": "grpo.VALUE_COEF", "choices": "reward.CHOICES",
             "warm_batch": "run.setup.WARM_BATCH", "fit_prompts": "reward.FIT_STEPS"}


def read(flags):
    """A command line as (Config, list of patches). Each seed has a warm start of its own."""
    rest, patches, flags = [], [], iter(flags)
    for flag in flags:
        if flag == "--patch":
            patches.append(next(flags))
        elif flag[2:] in CONSTANTS:
            patches.append(f"{flag[2:]}={next(flags)}")
        elif flag == "--n_head":
            next(flags)                     # it was always one for 32 channels
        else:
            rest.append(flag)
    own = [] if "--init" in rest else ["--init=", "--warm_steps", str(grpo.Config.warm_steps)]
    return grpo.make_config(**config.read(grpo.Config, "", [*own, *rest, *HERE_ALONE])[1]), patches


def put_constant(name, value, cfg):
    """Gives a constant its value; `fit_prompts` is a number of problems, FIT_STEPS one of steps."""
    value = -(-int(value) // cfg.prompts) if name == "fit_prompts" else value
    constants.put(f"{CONSTANTS[name]}={value}")

# -------------------------------------------------------------------------- in the child process

def patch_history(value):
    """The share of history in a refit; 0.1 without this patch."""
    replay = reward.replay
    reward.replay = lambda history, rows, *more: replay(
        history, round(10 * float(value) * rows), *more)


def patch_reference(value):
    """`kept`: a new iteration keeps the reference."""
    assert value == "kept"
    dist.copy_weights = lambda *_: None


def patch_critic_fit(value):
    """The steps for which a separate critic is fitted to the first policy's completions; in their
    second half the rate falls to 0."""
    train_step = grpo.train_step

    def fit_first(agent, problems, step):
        if step == 1:
            opt = torch.optim.AdamW([p for p in agent.critic.parameters() if p.requires_grad],
                                    betas=(0.9, 0.95), weight_decay=0, fused=True)
            rng, n = dist.rng(agent.cfg, "critic fit"), int(value)
            for i in range(n):
                opt.param_groups[0]["lr"] = 3e-4 * min(1, 2 - 2 * i / n)
                critic_step(agent, opt, problems, rng)
        return train_step(agent, problems, step)
    grpo.train_step = fit_first


def critic_step(agent, opt, problems, rng):
    """One step on the squared error to the returns of 4 completions of 16 problems."""
    batch = grpo.generate(agent, rng.sample(problems, 16), 4, rng)
    cfg = dataclasses.replace(agent.cfg, supervision="outcome", group=4, adv_scale="none")
    batch.reward, batch.ends = reward.of_rule(dataclasses.replace(agent, cfg=cfg), batch)
    batch.reward = reward.cap_truncated(batch)
    score, _ = grpo.group_scores(batch.reward, batch.ends, cfg)
    returns = score.sum(1, True).expand_as(batch.mask)
    for rows, T in passes.split_rows(batch.ids, batch.mask, cfg.micro_tokens):
        b = passes.select(batch, rows, T)
        ids, mask = b.ids[:, :-1], b.mask[:, 1:]
        value = agent.critic(ids, passes.layout_of(agent.critic.trunk, ids, mask))
        error = torch.where(mask, value - returns[rows, 1:T], 0).square().sum() / batch.mask.sum()
        error.backward()
    dist.clip_gradients(opt.param_groups[0]["params"], 1.0)
    opt.step()
    opt.zero_grad()


def patch_drawn(value):
    """`once`: completions are the first policy's, as in RFT, and trained on as the policy's own."""
    assert value == "once"
    rollout, first = grpo.rollout, []

    def of_the_first(agent, problems, rng):
        first.extend([] if first else [pretrained.frozen(agent.policy)])
        its = dataclasses.replace(agent, policy=first[0], sampler=None)
        batch, stats = rollout(its, problems, rng)
        batch.logp = batch.old_logp = grpo.logps(agent.policy, batch, agent.cfg)[0]
        return batch, stats
    grpo.rollout = of_the_first


def patch_sampler(value):
    """`bfloat16`: the sampler's weights are rounded, and the trainer computes old_logp anew."""
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


class Watch:
    """Records the tokens sampled and the seconds spent up to each step, evaluations apart, fits of
    a reward model included; and the critic's explained variance, measured with lambda 1."""

    def __init__(self):
        self.sampled = self.tokens = self.seconds = 0
        self.spent, self.known = [], []
        self.sample, self.advantages = grpo.sample, grpo.advantages
        grpo.sample, grpo.advantages = self.counted_sample, self.measured_advantages
        reward.refit = self.measured(reward.refit, lambda agent, _, i, __: i * agent.cfg.steps)
        grpo.train_step = self.measured(grpo.train_step, lambda agent, problems, step: step)

    def measured(self, function, at):
        """A function whose tokens and seconds count, and are spent after the step `at`."""
        def call(*given):
            began, before = time.perf_counter(), self.sampled
            found = function(*given)
            self.seconds += time.perf_counter() - began
            self.tokens += self.sampled - before
            self.spent.append((at(*given), self.tokens, round(self.seconds, 2)))
            return found
        return call

    def counted_sample(self, *given, **named):
        batch = self.sample(*given, **named)
        self.sampled += int(batch.mask.sum())
        return batch

    def measured_advantages(self, rewards, ends, mask, penalty, value, cfg):
        if value is not None:
            plain = dataclasses.replace(cfg, lam=1.0)
            returns = self.advantages(rewards, ends, mask, penalty, value, plain)[1][mask]
            own = returns.var().item()
            rest = (returns - value[mask]).var().item()
            self.known.append(1 - rest / own if own > 1e-8 else None)
        return self.advantages(rewards, ends, mask, penalty, value, cfg)


def agent_of(cfg, where):
    """An agent with the model in a folder, to evaluate it with the settings of a run."""
    its = dataclasses.replace(cfg, init=os.path.abspath(where))
    return grpo.Agent(its, *setup.trained_model(its))


def completions(agent, policy, problems, purpose):
    """Four completions of each problem, from the given policy."""
    own = dataclasses.replace(agent, policy=policy, sampler=None)
    return grpo.generate(own, problems, 4, dist.rng(agent.cfg, purpose))


def kl_to(agent, before, problems):
    """The KL of the policy to another model in nats per completion, estimated by sampling."""
    batch = completions(agent, agent.policy, problems, "kl")
    now, then = (grpo.logps(gpt, batch, agent.cfg)[0] for gpt in (agent.policy, before))
    return ((now - then) * batch.mask).double().sum(1).mean().item()


def quality(agent, policy, problems):
    """The share of pairs of a true and a false step, or of a right and a wrong completion, that
    the reward model orders rightly (the AUC). Guesses have no steps."""
    batch = completions(agent, policy, problems, "quality")
    truth, ends = reward.of_rule(agent, batch)
    if agent.cfg.supervision == "process":
        ends = ends & torch.tensor([not text.startswith("~") for text in batch.texts])[:, None]
    score = reward.scores(agent.reward_model, batch.ids, batch.mask, agent.cfg)[ends].double()
    truth = truth[ends] > 0.5
    rank, good, bad = score.argsort().argsort(), truth.sum().item(), (~truth).sum().item()
    above = rank[truth].sum().item() - good * (good - 1) / 2
    return {"auc": above / (good * bad) if good and bad else None, "steps": len(truth)}


def child(flags):
    """Make one run and write result.json into its folder: the curves, and the evaluation of the
    last and the first model on all held-out problems, at temperature 0.5 too."""
    prepare()
    cfg, patches = read(flags)
    config.algorithm(cfg.algo, grpo.ALGOS, grpo)            # before what is patched, not after it
    config.algorithm = lambda *_: None
    for name, _, value in (patch.partition("=") for patch in patches):
        if name in CONSTANTS:
            put_constant(name, value, cfg)
        else:
            globals()[f"patch_{name}"](value)
    watch = Watch()
    agent = grpo.train(cfg)
    lines = (cfg.folder / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    result = {"flags": flags, "points": points_of(metrics, watch.spent),
              "steps": {name: [m.get(name) for m in metrics[1:]] for name in CURVES}}
    if watch.known:
        result["steps"]["explained_variance"] = watch.known
    agent.cfg = dataclasses.replace(cfg, held_out=0, samples=8, prompts=32, group=16)
    held_out = setup.problems_of(agent.cfg, agent.task)[1]
    before = pretrained.load_model(cfg.init, cfg, agent.encoding)
    for how, cool in (("", cfg.temperature), (" at 0.5", 0.5)):
        its = dataclasses.replace(agent.cfg, temperature=cool)
        for when, gpt in (("start", before), ("final", agent.policy)):
            model = dataclasses.replace(agent, cfg=its, policy=gpt, sampler=None)
            result[when + how] = report.evaluate(model, held_out, grpo.generate)
    result["kl"] = kl_to(agent, before, held_out)
    if agent.reward_model is not None:
        result["quality"] = {when: quality(agent, gpt, held_out)
                             for when, gpt in (("start", before), ("end", agent.policy))}
    (cfg.folder / "result.json").write_text(json.dumps(result))
    for large in ("checkpoint.safetensors", "report.html"):
        (cfg.folder / large).unlink(missing_ok=True)


def points_of(metrics, spent):
    """For each evaluation its step and results, and the tokens and seconds spent so far; two for a
    step after which a reward model was fitted."""
    evaluated = {m["step"]: m for m in metrics if "pass@1" in m}
    points, before = [], 0
    for step, tokens, seconds in [(0, 0, 0.0), *spent]:
        if step in evaluated and (not points or tokens > before):
            its = {name: evaluated[step][name] for name in ("pass@1", "greedy")}
            points.append({"step": step, "tokens": tokens, "seconds": seconds} | its)
        before = tokens
    return points

# ------------------------------------------------------------------------- in the parent process

LOCKS = defaultdict(threading.Lock)         # one for each folder


def start_child(flags, folder):
    """Run `child` on one thread, with its output in the folder's log."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "runs.py"), *flags, "--out", str(folder)]
    with open(folder / "log", "w") as log:
        code = subprocess.call(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                               stdout=log, stderr=subprocess.STDOUT)
    if code:
        raise RuntimeError(f"failed, see {folder / 'log'}")


def folder_of(kind, settings, patches, seed, out):
    """A folder that is named by settings."""
    own = {name: x for name, x in settings.items() if name not in ("seed", "out")}
    text = json.dumps([own, patches], sort_keys=True)
    return out / f"{kind}{hashlib.sha256(text.encode()).hexdigest()[:10]}-{seed}"


def warm_folder(flags, seed, out):
    """The folder with a run's warm start, made if it is missing."""
    cfg, patches = read([*flags, "--seed", str(seed)])
    names = ("task", "task_args", "init", "max_new", "n_layer", "n_embd", "warm_steps", "warm_lr")
    batch = [patch for patch in patches if patch.startswith("warm_batch=")]
    folder = folder_of("warm-", {name: getattr(cfg, name) for name in names}, batch, seed, out)
    with LOCKS[folder]:
        if not (folder / "result.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            own = ["--seed", str(seed), "--steps", "0", "--iterations", "1", "--reward", "rule"]
            start_child([*flags, *own], folder)
    return folder


def run(flags, seed, out):
    """The result of a run: from its folder, or made now."""
    cfg, patches = read([*flags, "--seed", str(seed)])
    folder = folder_of("", vars(cfg), patches, seed, out)
    with LOCKS[folder]:
        if not (folder / "result.json").exists():
            warm = warm_folder(flags, seed, out)
            shutil.rmtree(folder, ignore_errors=True)
            start = ["--init", str(warm / "warm_start"), "--warm_steps", "0"]
            start_child([*flags, "--seed", str(seed), *start], folder)
        return json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    child(sys.argv[1:])
