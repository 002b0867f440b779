"""Whether a critic and a reward model can learn the task mines: what its studies need before they mean anything.

    python experiments/studies/gates.py                         # on the development maps, 101 to 103
    python experiments/studies/gates.py --readme                # and write gates.json

The policy is frozen after its warm start, and a critic, a copy of it, is fitted on fresh completions. What it explains
of the rewards' variance at the ends of lines is compared with what the true values explain: the covariance of rewards
with the mean reward of 16 other continuations from the same line, over the variance of rewards. A reward model is
fitted on the lines of as many completions; its AUC is the share of pairs of a good and a bad line that it orders rightly.
"""
import argparse
import concurrent.futures
import dataclasses
import json
import os
import random
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import critics  # noqa: E402
import grpo  # noqa: E402
import reward  # noqa: E402
import runs  # noqa: E402
from data import load_task  # noqa: E402
from run import config, passes, pretrained  # noqa: E402

TASK = "--task experiments/studies/mines.py --baseline none --adv_scale none".split()
STEPS = (100, 400, 800)                 # of the fits
CHOICES = 48                            # completions of a problem that is labelled: there are 1,400 problems


def first_policy(seed, out):
    """The agent after the warm start of a seed."""
    flags = [*TASK, "--seed", str(seed)]
    cfg, _ = runs.read(flags)
    cfg = dataclasses.replace(cfg, init=str(runs.warm_folder(cfg, flags, out) / "warm_start"))
    return grpo.Agent(cfg, load_task(cfg.task), *pretrained.trained_model(cfg))


def completed(agent, problems, n, each, rng):
    """`critics.completed`, with the rewards of lines."""
    batch, returns = critics.completed(agent, problems, n, each, rng)
    batch.reward, batch.ends = reward.of_steps(agent.task, agent.encoding, batch)
    return batch, returns


def explained(agent, critic, problems, n, tries, rng):
    """The shares of the outcomes' variance that the critic and the true values explain at the ends of lines, and the
    critic at all tokens, as a run logs it."""
    batch, outcome = completed(agent, problems, n, 2, rng)
    label = reward.rollout_labels(agent, grpo.complete, batch, rng.random(), tries)
    value = passes.logps(agent.policy, batch, agent.cfg, critic)[1]
    places = batch.ends & ~passes.last_tokens(batch.mask)
    got, after = outcome[places], value.roll(-1, 1)[places]         # the value after a line is that before the next token
    true = torch.cov(torch.stack((label[places], got)))
    return {"critic": 1 - ((got - after).var() / got.var()).item(), "true values": (true[0, 1] / true[1, 1]).item(),
            "critic, all tokens": 1 - ((outcome - value)[batch.mask].var() / outcome[batch.mask].var()).item()}


def reward_model_auc(agent, problems, held_out, prompts, rng):
    """The AUC on fresh completions of a reward model of lines, fitted on labels of `prompts` problems."""
    cfg = dataclasses.replace(agent.cfg, reward="model", supervision="process")
    reward.CHOICES, reward.FIT_STEPS = CHOICES, -(-prompts // cfg.prompts)
    fitted = grpo.new_agent(cfg, agent.task, agent.encoding, agent.policy)
    grpo.refit_reward_model(fitted, problems, 0)
    batch, _ = completed(agent, held_out, 200, 4, rng)
    score = reward.scores(fitted.reward_model, batch.ids, batch.mask, cfg)[batch.ends]
    return runs.auc(score, batch.reward[batch.ends] > 0.5)


def measured(seed, out):
    """All of one map: an evaluation of the policy, and what is learned in each number of steps."""
    torch.set_num_threads(1)
    agent = first_policy(seed, out)
    problems, held_out = config.problems_of(agent.task, agent.cfg)
    rng, found = random.Random(f"gates, {seed}"), grpo.evaluate(agent, held_out)
    for steps in STEPS:
        critic = critics.new_critic(agent)
        critics.fit(critic, agent, problems, steps, rng)
        found |= {f"{name}, {steps} steps": x for name, x in explained(agent, critic, held_out, 200, 16, rng).items()}
        found[f"AUC, {steps} steps"] = reward_model_auc(agent, problems, held_out, steps * critics.ROWS // CHOICES, rng)
        print(f"map {seed}, {steps} steps: " + "  ".join(f"{name} {x:.3f}" for name, x in found.items()), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103])
    parser.add_argument("--out", type=Path, default=Path("out/mines"))
    parser.add_argument("--readme", action="store_true", help="replace the result that the docs quote")
    args = parser.parse_args()
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(args.seeds, pool.map(measured, args.seeds, [args.out.resolve()] * len(args.seeds))))
    for name in found[args.seeds[0]]:
        print(f"{name}: {runs.spread([of_map[name] for of_map in found.values()], '.3f')}")
    if args.readme:
        (HERE / "answers" / "gates.json").write_text(json.dumps(runs.about() | {"command": " ".join(["python", *sys.argv]), "maps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
