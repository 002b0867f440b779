"""Peak memory of one update with Qwen's vocabulary, with all logits at once and in chunks; and of each of two ranks,
with whole models and with --shard.

    python experiments/cost/memory.py        # 3 minutes; all logits at once need 16 GB

8 rows of 1,024 tokens, a vocabulary of 152,000, 2 layers; then two steps of GRPO for a model of 114 million
parameters with very few tokens. With --readme the result replaces memory.json, which the docs quote.
"""
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import grpo  # noqa: E402
from experiments import results  # noqa: E402
from experiments.results import peak  # noqa: E402
from data import arithmetic  # noqa: E402
from data.tokenizer import byte_encoding  # noqa: E402
from model import GPT, GPTConfig, token_logps  # noqa: E402
from run import dist, passes, pretrained  # noqa: E402

SHAPE = GPTConfig(vocab_size=152_000, n_layer=2, n_embd=128, n_inner=352, block_size=1024)
ROWS, T = 8, 1024
LARGE = GPTConfig(n_layer=16, n_embd=768, n_head=12, n_kv_head=12, n_inner=2048, block_size=64)


def one(way, file):
    """Write the gradients of one update to a file, and print the memory it took."""
    model = GPT(SHAPE, torch.Generator().manual_seed(0))
    ids = torch.randint(0, SHAPE.vocab_size, (ROWS, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    before = peak()
    if way == "whole":
        logp, _ = token_logps(model, ids, mask, 0.7)
    else:
        logp, _ = passes.token_logps(model, ids, mask, 0.7)
    logp.sum().backward()
    save_file({name: p.grad for name, p in model.named_parameters()}, file)
    print(peak() - before)


def a_rank(models, dtype):
    """Two steps on one of two ranks; prints the memory they took. The environment makes malloc return freed
    memory."""
    cfg = grpo.Config(task="arithmetic", task_args=dict(difficulty=1), shard=models == "part", dtype=dtype, device="cpu",
                      prompts=2, group=2, max_new=4, warm_steps=0)
    dist.start_ranks(torch.device("cpu"))
    before = peak()
    policy = pretrained.to_device(GPT(LARGE, torch.Generator().manual_seed(0)), cfg)
    agent = grpo.new_agent(cfg, arithmetic, byte_encoding(), policy)
    for step in (1, 2):
        grpo.train_step(agent, arithmetic.problems(1)[0], step)
    print(peak() - before, flush=True)
    dist.exit_with(0)


def two_ranks(*how):
    """The larger peak of two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, __file__, "rank", *how], stdout=subprocess.PIPE, text=True, env=os.environ | dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="262144", MALLOC_TRIM_THRESHOLD_="262144")) for rank in (0, 1)]
    return max(int(rank.communicate()[0]) for rank in ranks)


def main():
    with tempfile.TemporaryDirectory() as folder:
        files = {way: f"{folder}/{way}" for way in ("whole", "parts")}
        took = {way: int(subprocess.check_output([sys.executable, __file__, way, file], text=True))
                for way, file in files.items()}
        a, b = (load_file(file) for file in files.values())
    worst = max(((a[name] - b[name]).abs().max() / a[name].abs().max()).item() for name in a)
    result = {"about": results.about(), **took, "share": took["parts"] / took["whole"],
              "largest relative difference of the gradients": worst}
    for dtype in ("float32", "bfloat16"):
        whole_models, parts = (two_ranks(models, dtype) for models in ("whole", "part"))
        result[f"a rank, {dtype}"] = {"whole": whole_models, "part": parts, "share": parts / whole_models}
    if "--readme" in sys.argv:
        results.write(HERE / "memory.json", result)
    print(result)


if __name__ == "__main__":
    if "rank" in sys.argv:
        a_rank(*sys.argv[2:])
    elif len(sys.argv) == 3:
        one(*sys.argv[1:])
    else:
        main()
