"""Kills runs at random moments and during saves, resumes them, and compares them with others.

    python experiments/robustness/kills.py [KILLS]         # 60 by default; about ten minutes

Two kinds of run alternate: PPO under process supervision with a learned reward, labels by rollouts,
two iterations; and GRPO with a learned reward and an adaptive beta on two ranks, where sometimes
only one rank is killed. A run is killed and resumed up to six times; its weights, checkpoint,
metrics and samples must then be bit-identical to those of an uninterrupted run.
"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

GRPO = str(Path(__file__).parents[2] / "grpo.py")
SMALL = ("--difficulty 1 --n_layer 1 --n_embd 64 --warm_steps 60 --warm_lr 5e-3 --prompts 4 "
         "--group 8 --max_new 16 --save_every 1 --lr 1e-3 --reward model --iterations 2 "
         "--steps 6").split()
ALONE = [sys.executable, GRPO, *SMALL, *"--algo ppo --supervision process --reward rollouts "
         "--critic separate".split()]
RANKS = [sys.executable, *"-m torch.distributed.run --nproc_per_node 2 --master_port 29633".split(),
         GRPO, *SMALL, "--algo", "adaptive_kl"]
CLOCKS = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
WRITTEN = ("model.safetensors.tmp", "checkpoint.safetensors.tmp", "run.json.tmp")


def begin(command, where):
    """Start a run, or resume the one in a folder."""
    resume = ["--resume"] if (where / "checkpoint.safetensors").exists() else []
    return subprocess.Popen([*command, "--out", str(where), *resume], start_new_session=True,
                            text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill_once(child, where, rng, seconds):
    """Kill a run at a random moment, or in the first save after it: how; None if it ended."""
    aimed, end = rng.random() < 0.5, time.time() + rng.uniform(0, seconds)
    while child.poll() is None and time.time() < end:
        time.sleep(0.01)
    if aimed:
        while child.poll() is None and not any((where / name).exists() for name in WRITTEN):
            time.sleep(0.0002)
        time.sleep(rng.uniform(0, 0.003))
    if child.poll() is not None:
        return None
    ranks = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True,
                           text=True).stdout.split()      # process groups of their own
    one = bool(ranks) and rng.random() < 0.5
    for pid in [int(rng.choice(ranks))] if one else [child.pid, *map(int, ranks)]:
        os.kill(pid, signal.SIGKILL)
    child.communicate(timeout=120)
    return f"{'one rank' if one else 'all'}, {'in a save' if aimed else 'at random'}"


def made(where):
    """What a run leaves, without times and the header of its checkpoint, which has the folder."""
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    checkpoint = (where / "checkpoint.safetensors").read_bytes()
    return ((where / "model.safetensors").read_bytes(), (where / "samples.jsonl").read_bytes(),
            [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines],
            checkpoint[8 + int.from_bytes(checkpoint[:8], "little"):])


def main(kills=60):
    rng, count, survived, came, turn = random.Random(1), Counter(), 0, {}, 0
    with tempfile.TemporaryDirectory() as home:
        while count.total() < kills:
            kind, command = ("two ranks", RANKS) if turn % 2 else ("one process", ALONE)
            where, broken, turn = Path(home) / f"run{turn}", 0, turn + 1
            if kind not in came:
                began, child = time.time(), begin(command, Path(home) / kind)
                err = child.communicate()[1]
                assert child.returncode == 0, err
                came[kind] = made(Path(home) / kind), time.time() - began
            child = begin(command, where)
            while broken < 6 and (manner := kill_once(child, where, rng, came[kind][1])):
                broken += 1
                count[f"{kind}: {manner}"] += 1
                child = begin(command, where)
            err = child.communicate()[1]
            same = child.returncode == 0 and made(where) == came[kind][0]
            survived += broken * same
            print(kind, broken, "kills", "identical" if same else f"DIFFERENT: {err[-500:]}")
    print(f"{survived} of {count.total()} kills survived:", dict(count))
    return survived < count.total()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
