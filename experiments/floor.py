"""What a step costs, over what its floating-point operations alone must cost on the same cores.

    python experiments/floor.py --init out/arithmetic/warm_start --steps 9 [--readme]

Floor: 2 operations a parameter of the layers' matrices for each token that is read or decoded, 2 for
each of the reference, 6 for each that is trained, and as many of the head's for each token that is
sampled; divided by the rate of a float32 matrix product. What rows begin with alike counts once: in
sampling those of a rollout, otherwise those of a micro-batch. The rate is the median of 2048 x 2048
x 2048 products, measured before and after each step. Attention, norms, softmax, drawing and the
optimizer are no part of the floor. Takes the flags of grpo.py; with --readme the result replaces
floor.json, which the docs quote.
"""
import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo  # noqa: E402
from data import load_task  # noqa: E402
from model import distinct  # noqa: E402
from run import batches, machine, start  # noqa: E402


def rate(n=2048, times=5):
    """Floating-point operations a second of an n x n x n product in float32."""
    a, b, seconds = torch.randn(n, n), torch.randn(n, n), []
    for _ in range(times):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2 * n ** 3 / statistics.median(seconds)


def states(ids, mask):
    """How many tokens of rows (B, T) are read, and after how many of them one is sampled, if what
    rows one below the other begin with alike counts once."""
    ids, sampled = ids[:, :-1], mask[:, 1:]
    new, at = distinct(ids, sampled)
    return len(new), len(at[sampled].unique())


def main():
    machine.prepare()
    _, cfg, _ = grpo.read_command([flag for flag in sys.argv[1:] if flag != "--readme"])
    task = load_task(cfg.task)
    problems, _ = task.problems(cfg)
    encoding, policy = start.trained_model(cfg)
    agent = grpo.new_agent(cfg, task, encoding, policy)
    linear = sum(m.weight.numel() for m in policy.layers.modules() if isinstance(m, torch.nn.Linear))
    head, made = policy.table.weight.numel(), []
    for step in range(1, cfg.steps + 1):
        before, began = rate(), time.perf_counter()
        chosen = machine.rng(cfg, "problems", step).sample(problems, cfg.prompts)
        batch, _ = grpo.rollout(agent, chosen, machine.rng(cfg, "rollout", step))
        grpo.update(agent, batch, machine.rng(cfg, "update", step))
        seconds = time.perf_counter() - began
        flops_s = (before + rate()) / 2
        trained = batch.adv.any(1) | (agent.ref is not None or agent.critic is not None)
        forward = []        # operations of making a rollout, and of a pass over its parts
        for rows, budget in ((torch.ones_like(trained), float("inf")), (trained, cfg.micro_tokens)):
            ids, mask = batch.ids[rows], batch.mask[rows]
            parts = [states(ids[chunk, :T], mask[chunk, :T])
                     for chunk, T in batches.micro_batches(ids, mask, budget)]
            forward.append(sum(2 * (linear * read + head * sampled) for read, sampled in parts))
        passes = 3 * cfg.epochs + (agent.ref is not None)
        floor = (forward[0] + passes * forward[1]) / flops_s
        made.append({"seconds": seconds, "floor": floor, "ratio": seconds / floor,
                     "tokens": int(batch.mask.sum()), "gflops": flops_s / 1e9})
        print("  ".join(f"{k} {x:.4g}" for k, x in made[-1].items()), flush=True)
    median = {k: statistics.median(m[k] for m in made[1:]) for k in made[0]}    # the first warms up
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
    print(f"median of {len(made) - 1} steps: {median['seconds']:.2f} s, floor "
          f"{median['floor']:.2f} s at {median['gflops']:.0f} GFLOP/s, ratio "
          f"{median['ratio']:.2f}; peak memory {peak:.2f} GiB")
    if "--readme" in sys.argv:
        file = Path(__file__).parent / "floor.json"
        file.write_text(json.dumps(median, indent=1) + "\n")


if __name__ == "__main__":
    main()
