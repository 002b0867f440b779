"""What each baseline leaves of noise: the variance of advantages and of gradients, of one policy.

    python experiments/variance.py start out/questions/WARM_START [--readme]
    python experiments/variance.py end out/questions/RUN [--readme]

The policy is that of a run; its result has the name that is given first. A critic of its own is fitted to it
for every baseline that has one, on rollouts that are then forgotten, until it explains no more of fresh ones.
Then many rollouts are drawn, and each gives a gradient under every baseline, without a clip or a KL. Noise is
the mean squared distance of a gradient from their mean, over the squared length of what their mean has of the
true direction, that of leave-one-out, which has no bias; the cosine of the two is what a bias would lower.
Products of two means are of different halves of the rollouts, so that noise adds nothing to them.
"""
import argparse
import copy
import dataclasses
import json
import random
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import grpo  # noqa: E402
import reward  # noqa: E402
import runs  # noqa: E402
from data import load_task  # noqa: E402
from model import ScalarHead, token_logps  # noqa: E402
from run import batches, machine, start  # noqa: E402

BASELINES = {"leave-one-out": {}, "none": {}, "group": {}, "group, divided by its std": dict(baseline="group", scale="group"),
             "value": {}, "value, lambda 1": dict(baseline="value", lam=1.0),
             "group+value": {}, "group+value, lambda 1": dict(baseline="group+value", lam=1.0)}


def rollout(agent, problems, source, N):
    """A rollout and its rewards, without any credit."""
    cfg = agent.cfg
    drawn = source.sample(problems, cfg.prompts)
    batch = grpo.generate(agent, drawn, machine.uniform(source, cfg.prompts, cfg.group, N))
    batch.reward, batch.ends = reward.of_steps(agent.task, batch, cfg, agent.encoding)
    return batch


def credit(agent, batch, cfg, critic):
    """Advantages and returns under a baseline."""
    value = None
    if critic is not None:
        value = batches.logps(agent.policy, batch, cfg, critic)[1]
    adv, returns, _ = grpo.advantages(batch.reward, batch.ends, batch.mask, torch.zeros_like(batch.logp), value, cfg)
    return adv, returns


def explained(agent, problems, cfg, critic, source):
    """The share of the returns' variance that a critic explains, on a fresh rollout."""
    batch = rollout(agent, problems, source, cfg.max_new)
    returns = credit(agent, batch, cfg, critic)[1]
    value = batches.logps(agent.policy, batch, cfg, critic)[1]
    return 1 - ((returns - value)[batch.mask].var() / returns[batch.mask].var()).item()


def fitted_critic(agent, problems, cfg, source, rounds=8):
    """A critic of its own for the policy as it is: rounds of 10 rollouts with 3 passes over each, for as long
    as it explains more."""
    cfg, best = dataclasses.replace(cfg, lam=1.0), (float("-inf"), None)
    critic = ScalarHead(agent.policy.cfg.n_embd, copy.deepcopy(agent.policy)).requires_grad_(True)
    critic.norm.requires_grad_(False)
    opt = batches.new_optimizer([critic], 3e-4)
    for n in range(rounds):
        for batch in [rollout(agent, problems, source, cfg.max_new) for _ in range(10)] * 3:
            returns = credit(agent, batch, cfg, critic)[1]
            for rows, T in batches.micro_batches(batch.ids, batch.mask, cfg.micro_tokens):
                b = batch.select(rows, T)
                value = critic(b.ids[:, :-1], b.mask[:, 1:])
                error = torch.where(b.mask[:, 1:], value - returns[rows, 1:T], 0).square().sum() / batch.mask.sum()
                error.backward()
            batches.optimizer_step(opt, 1.0)
        share = sum(explained(agent, problems, cfg, critic, source) for _ in range(4)) / 4
        print(f"{cfg.baseline}: explained variance {share:.3f} after {10 * (n + 1)} rollouts", flush=True)
        if share < best[0] + 0.01:
            break
        best = share, copy.deepcopy(critic)
    return best


def gradient(agent, batch, adv, cfg):
    """Of the policy gradient's loss, as one vector."""
    weight = grpo.token_weights(batch.mask, "constant", len(batch.ids), 1, cfg.max_new)
    for rows, T in batches.micro_batches(batch.ids, batch.mask, cfg.micro_tokens):
        b = batch.select(rows, T)
        logp = token_logps(agent.policy, b.ids, b.mask, 1.0)[0]
        (-weight[rows, :T] * adv[rows, :T] * logp).sum().backward()
    found = torch.cat([p.grad.flatten() for p in agent.policy.parameters()])
    agent.policy.zero_grad()
    return found


def halves(gradients):
    """The means of two halves of them."""
    return [torch.stack(gradients[n::2]).double().mean(0) for n in range(2)]


def product(a, b):
    """Of the means of two baselines, each in halves, without what their noise has in common."""
    return ((a[0] @ b[1] + a[1] @ b[0]) / 2).item()


def lines(result):
    """The table: for each policy the mean square of an advantage, the noise of a gradient, and its cosine."""
    policies = result["policies"]
    yield "| baseline | " + " | ".join(f"{name}: advantages | noise | cosine" for name in policies) + " |"
    yield "|---" * (1 + 3 * len(policies)) + "|"
    for row in BASELINES:
        cells = [f"{x:.2f}" for found in policies.values() for x in found["rows"][row].values()]
        yield f"| {row} | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("run", type=Path)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--readme", action="store_true", help="replace what the docs quote")
    args = parser.parse_args()
    kept = json.loads((args.run / "run.json").read_text())["config"]
    cfg = dataclasses.replace(grpo.Config(**kept), init=str(args.run), scale="none", kl="none", critic="separate", prompts=16,
                              group=16, lam=0.95, gamma=1.0)
    task = load_task(cfg.task)
    agent = start.Agent(cfg, task, *start.trained_model(cfg))
    problems = task.problems(cfg)[0]
    of = {name: dataclasses.replace(cfg, **{"baseline": name, **changes}) for name, changes in BASELINES.items()}
    fitted = {name: fitted_critic(agent, problems, of[name], random.Random(name)) for name in ("value", "group+value")}
    source, gradients, squares = random.Random("variance"), {name: [] for name in of}, {name: [] for name in of}
    for _ in range(args.rollouts):
        batch = rollout(agent, problems, source, cfg.max_new)
        for name, its in of.items():
            adv, _ = credit(agent, batch, its, fitted.get(its.baseline, (0, None))[1])
            gradients[name].append(gradient(agent, batch, adv, its))
            squares[name].append(adv[batch.mask].square().mean().item())
    means = {name: halves(made) for name, made in gradients.items()}
    true = means["leave-one-out"]
    found = {"explained": {name: share for name, (share, _) in fitted.items()}, "rollouts": args.rollouts, "rows": {}}
    for name, own in means.items():
        noise, along = torch.stack(gradients[name]).var(0).sum().item(), product(own, true)
        found["rows"][name] = {"advantages": sum(squares[name]) / args.rollouts, "noise": noise * product(true, true) / along ** 2,
                               "cosine": along / (product(own, own) * product(true, true)) ** 0.5}
    file = HERE / "answers" / "variance.json" if args.readme else args.run.parent / "variance.json"
    file.parent.mkdir(exist_ok=True)
    known = json.loads(file.read_text())["policies"] if file.exists() else {}
    result = {**runs.about(), "command": "python experiments/variance.py NAME RUN --readme", "policies": known | {args.name: found}}
    file.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
