"""The noise that each baseline leaves: the variance of advantages and gradients for one fixed policy.

    python experiments/studies/variance.py [--readme]

The policies are the first and the last of the five runs of question 6 with the group baseline. For every baseline
with a critic, a separate critic is fitted to each policy, on rollouts that are then discarded, until it explains no
more of fresh ones. Then each of 64 rollouts gives a gradient under every baseline, without a clip or a KL, with
token weights 1/|o| as in those runs or with equal token weights. Noise is the mean squared distance of the
gradients from their mean, divided by the squared length of the mean's component along the true direction: that of
leave-one-out with equal token weights, which is unbiased. The cosine of the two directions is what bias lowers.
Products of two mean gradients take them from different halves of the rollouts, so that noise does not bias them.
"""
import argparse
import concurrent.futures
import copy
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import critics  # noqa: E402
import grpo  # noqa: E402
import questions  # noqa: E402
import reward  # noqa: E402
import runs  # noqa: E402
from data import load_task  # noqa: E402
from model import token_logps  # noqa: E402
from run import agents, batches, machine, models, optimizer  # noqa: E402

ALIKE = dict(loss_mean="constant")
TRUE = "leave-one-out, all tokens alike"
BASELINES = {TRUE: dict(baseline="leave-one-out", **ALIKE), "none": {}, "none, all tokens alike": dict(baseline="none", **ALIKE),
             "group": {}, "group, all tokens alike": dict(baseline="group", **ALIKE),
             "group, divided by its std": dict(baseline="group", adv_scale="group"),
             "critic": dict(baseline="value", lam=1.0), "critic, lambda 0.95": dict(baseline="value"),
             "group and critic": dict(baseline="group+value", lam=1.0), "group and critic, lambda 0.95": dict(baseline="group+value")}
FITTED = ("value", "group+value")
SIZE = dict(prompts=16, group=16)       # of a rollout


def rollout(agent, problems, rng, N):
    """A rollout with its rewards, without advantages."""
    cfg = agent.cfg
    drawn = rng.sample(problems, cfg.prompts)
    batch = grpo.generate(agent, drawn, machine.uniform(rng, cfg.prompts, cfg.group, N))
    batch.reward, batch.ends = reward.of_steps(agent.task, batch, cfg, agent.encoding)
    return batch


def credit(agent, batch, cfg, critic):
    """Advantages and returns under a baseline."""
    value = None
    if critic is not None:
        value = batches.logps(agent.policy, batch, cfg, critic)[1]
    adv, returns, _ = grpo.advantages(batch.reward, batch.ends, batch.mask, torch.zeros_like(batch.logp), value, cfg)
    return adv, returns


def explained(agent, problems, cfg, critic, rng):
    """The share of the returns' variance that a critic explains, on a fresh rollout."""
    batch = rollout(agent, problems, rng, cfg.max_new)
    returns = credit(agent, batch, cfg, critic)[1]
    value = batches.logps(agent.policy, batch, cfg, critic)[1]
    return 1 - ((returns - value)[batch.mask].var() / returns[batch.mask].var()).item()


def fitted_critic(agent, problems, cfg, rng, rounds=8):
    """(explained variance, critic): a separate critic fitted to the fixed policy, in rounds of 10 rollouts with
    3 passes over each, for as long as it explains more."""
    cfg, best = dataclasses.replace(cfg, lam=1.0), (float("-inf"), None)
    critic = critics.new_critic(agent)
    opt = optimizer.new_optimizer([critic], 3e-4)
    for n in range(rounds):
        for batch in [rollout(agent, problems, rng, cfg.max_new) for _ in range(10)] * 3:
            critics.critic_step(critic, opt, batch, credit(agent, batch, cfg, critic)[1], cfg)
        share = sum(explained(agent, problems, cfg, critic, rng) for _ in range(4)) / 4
        print(f"{cfg.baseline}: explained variance {share:.3f} after {10 * (n + 1)} rollouts", flush=True)
        if share < best[0] + 0.01:
            break
        best = share, copy.deepcopy(critic)
    return best


def gradient(agent, batch, adv, cfg):
    """The gradient of the policy-gradient loss, as one vector."""
    weight = grpo.token_weights(batch.mask, cfg.loss_mean, len(batch.ids), 1, cfg.max_new)
    for rows, T in batches.micro_batches(batch.ids, batch.mask, cfg.micro_tokens):
        b = batch.select(rows, T)
        logp = token_logps(agent.policy, b.ids, b.mask, 1.0)[0]
        (-weight[rows, :T] * adv[rows, :T] * logp).sum().backward()
    found = torch.cat([p.grad.flatten() for p in agent.policy.parameters()])
    agent.policy.zero_grad()
    return found


def halves(gradients):
    """The mean of every second gradient, and that of the others."""
    return [torch.stack(gradients[n::2]).double().mean(0) for n in range(2)]


def product(a, b):
    """The product of two baselines' mean gradients, each given as halves, without the noise that they share."""
    return ((a[0] @ b[1] + a[1] @ b[0]) / 2).item()


def measured(run, name, rollouts):
    """The rows of `variance-NAME.json` in a run's folder, for its first policy (start) or its last (end)."""
    kept = json.loads((run / "run.json").read_text())["config"]
    cfg = dataclasses.replace(grpo.Config(**kept), init=str(run / "warm_start" if name == "start" else run), adv_scale="none", kl="none",
                              critic="separate", lam=0.95, gamma=1.0, **SIZE)
    task = load_task(cfg.task)
    agent = agents.Agent(cfg, task, *models.trained_model(cfg))
    problems = task.problems(cfg)[0]
    of = {row: dataclasses.replace(cfg, **{"baseline": row, **changes}) for row, changes in BASELINES.items()}
    fitted = {row: fitted_critic(agent, problems, dataclasses.replace(cfg, baseline=row), random.Random(f"{row}, {cfg.seed}")) for row in FITTED}
    rng, gradients, squares = random.Random(f"variance, {cfg.seed}"), {row: [] for row in of}, {row: [] for row in of}
    for _ in range(rollouts):
        batch = rollout(agent, problems, rng, cfg.max_new)
        for row, its in of.items():
            adv, _ = credit(agent, batch, its, fitted.get(its.baseline, (0, None))[1])
            gradients[row].append(gradient(agent, batch, adv, its))
            squares[row].append(adv[batch.mask].square().mean().item())
    means = {row: halves(made) for row, made in gradients.items()}
    true, found = means[TRUE], {}
    for row, own in means.items():
        noise, along = torch.stack(gradients[row]).var(0).sum().item(), product(own, true)
        found[row] = {"advantages": sum(squares[row]) / rollouts, "noise": noise * product(true, true) / along ** 2,
                      "cosine": along / (product(own, own) * product(true, true)) ** 0.5,
                      "explained": fitted.get(of[row].baseline, (None,))[0]}
    return found


def sources(rollouts):
    """A hash of what a result depends on: the code, and the number of rollouts."""
    return runs.name_of([runs.sources(), Path(__file__).read_text(), rollouts])


def policy(run, name, rollouts):
    """`measured`, from its file or in a single-threaded process of its own."""
    file = run / f"variance-{name}.json"
    if not file.exists() or json.loads(file.read_text())["sources"] != sources(rollouts):
        subprocess.run([sys.executable, __file__, "--policy", run, name, "--rollouts", str(rollouts)], check=True,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(file.read_text())["rows"]


def lines(result):
    """The lines of the table: for each policy the noise of the gradient, its cosine with the true direction,
    the mean square of an advantage, and the critic's explained variance; medians over seeds, for noise also the
    range."""
    policies = result["policies"]
    yield "| baseline | " + " | ".join(f"{name}: noise | cosine | advantages | explained" for name in policies) + " |"
    yield "|---" * (1 + 4 * len(policies)) + "|"
    for row in BASELINES:
        cells = []
        for seeds in policies.values():
            of = {name: [found[row][name] for found in seeds.values()] for name in ("noise", "cosine", "advantages", "explained")}
            known = "" if None in of["explained"] else f"{statistics.median(of['explained']):.2f}"
            cells += [runs.spread(of["noise"], ".2f"), *(f"{statistics.median(of[name]):.2f}" for name in ("cosine", "advantages")), known]
        yield f"| {row} | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2, 3, 4, 5))
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out/questions"))
    parser.add_argument("--readme", action="store_true", help="replace the results that the docs quote")
    parser.add_argument("--policy", nargs=2, metavar=("RUN", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.policy:
        run, name = Path(args.policy[0]), args.policy[1]
        found = {"sources": sources(args.rollouts), "rows": measured(run, name, args.rollouts)}
        return (run / f"variance-{name}.json").write_text(json.dumps(found))
    flags = [*questions.SETTING, *questions.QUESTIONS["6"]["group"].split()]
    made = runs.run_all([(flags, seed) for seed in args.seeds], args.out.resolve())
    folders = {seed: Path(run["flags"][-1]) for seed, run in zip(args.seeds, made) if run}          # the last flag is --out
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: {seed: pool.submit(policy, run, name, args.rollouts) for seed, run in folders.items()} for name in ("start", "end")}
        found = {name: {str(seed): job.result() for seed, job in of.items()} for name, of in jobs.items()}
    where = HERE / "answers" if args.readme else args.out
    result = {**runs.about(), "command": " ".join(["python", *sys.argv]), "flags": " ".join(flags), "rollouts": args.rollouts, "policies": found}
    (where / "variance.json").write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
