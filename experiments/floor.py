"""What a step costs, over what its floating-point operations alone must cost on the same cores.

    python experiments/floor.py --init out/arithmetic/warm_start --steps 9 [--readme]

Floor: (6 N tokens trained + 2 N tokens read or decoded + 2 N tokens of the reference) / the rate of
a float32 matrix product, N the parameters in matrix products (the embedding counts once, as the
head). Tokens are those of the rows without their padding; where rows of a micro-batch begin alike,
that beginning counts once. The rate is the median of 2048 x 2048 x
2048 products, measured before and after each step. Attention, norms, softmax, sampling and the
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


def main():
    machine.prepare()
    _, cfg, _ = grpo.read_command([flag for flag in sys.argv[1:] if flag != "--readme"])
    task = load_task(cfg.task)
    problems, _ = task.problems(cfg)
    encoding, policy = start.trained_model(cfg)
    agent = grpo.new_agent(cfg, task, encoding, policy)
    N, rows = sum(p.numel() for p in policy.parameters()), []
    for step in range(1, cfg.steps + 1):
        before, began = rate(), time.perf_counter()
        chosen = machine.rng(cfg, "problems", step).sample(problems, cfg.prompts)
        batch, _ = grpo.rollout(agent, chosen, machine.rng(cfg, "rollout", step))
        grpo.update(agent, batch, machine.rng(cfg, "update", step))
        seconds = time.perf_counter() - began
        flops_s = (before + rate()) / 2
        new, tokens = int(batch.mask.sum()), 0
        for chunk, T in batches.micro_batches(batch.ids, batch.mask, cfg.micro_tokens):
            tokens += len(distinct(batch.ids[chunk, :T], batch.mask[chunk, :T])[0])
        read = sum(len(encoding.encode_ordinary(p.prompt)) for p in chosen)
        floor = N * (6 * cfg.epochs * tokens + 2 * (read + new) + 2 * tokens) / flops_s
        rows.append({"seconds": seconds, "floor": floor, "ratio": seconds / floor,
                     "tokens": tokens, "gflops": flops_s / 1e9})
        print("  ".join(f"{k} {x:.4g}" for k, x in rows[-1].items()), flush=True)
    median = {k: statistics.median(r[k] for r in rows[1:]) for k in rows[0]}    # the first warms up
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
    print(f"median of {len(rows) - 1} steps: {median['seconds']:.2f} s, floor "
          f"{median['floor']:.2f} s at {median['gflops']:.0f} GFLOP/s, ratio "
          f"{median['ratio']:.2f}; peak memory {peak:.2f} GiB")
    if "--readme" in sys.argv:
        file = Path(__file__).parent / "floor.json"
        file.write_text(json.dumps(median, indent=1) + "\n")


if __name__ == "__main__":
    main()
