"""Kills runs at random moments and during saves, resumes them, and compares them with uninterrupted runs.

    python experiments/robustness/kills.py [KILLS]         # 60 kills by default; about ten minutes

Two kinds of run alternate: PPO under process supervision with a learned reward, labels by rollouts, two iterations
and an adaptive beta; and GRPO with a learned reward on two ranks, where sometimes only one rank is killed. A killed
run is resumed, and killed again up to six times, until one finishes; its weights, checkpoint, metrics and samples
must then be bit-identical to those of an uninterrupted run.
"""
import itertools
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
SMALL = ("--difficulty 1 --n_layer 1 --n_embd 64 --warm_steps 60 --warm_lr 5e-3 --prompts 4 --group 8 "
         "--max_new 16 --save_every 1 --lr 1e-3 --reward model --iterations 2 --steps 6").split()
ALONE = [sys.executable, GRPO, *SMALL, "--algo", "ppo", "--supervision", "process", "--reward", "rollouts",
         "--critic", "separate"]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29633", GRPO,
         *SMALL, "--algo", "adaptive_kl"]
CLOCKS = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
WRITTEN = ("model.safetensors.tmp", "checkpoint.safetensors.tmp", "run.json.tmp")


def begin(command, where):
    """Start a run, or resume the one in a folder."""
    resume = ["--resume"] if (where / "checkpoint.safetensors").exists() else []
    return subprocess.Popen([*command, "--out", str(where), *resume], start_new_session=True, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill_once(child, where, rng, seconds):
    """Kill a run at a random moment, or in the first save after it: how it was killed, or None if it finished
    before."""
    aimed, end = rng.random() < 0.5, time.time() + rng.uniform(0, seconds)
    while child.poll() is None and time.time() < end:
        time.sleep(0.01)
    if aimed:
        while child.poll() is None and not any((where / name).exists() for name in WRITTEN):
            time.sleep(0.0002)
        time.sleep(rng.uniform(0, 0.003))
    if child.poll() is not None:
        return None
    ranks = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True).stdout.split()
    manner, doomed = "all", [child.pid, *map(int, ranks)]   # torchrun's ranks are process groups of their own
    if ranks and rng.random() < 0.5:
        manner, doomed = "one rank", [int(rng.choice(ranks))]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    child.communicate(timeout=120)
    return f"{manner}, in a save" if aimed else f"{manner}, at random"


def made(where):
    """The output of a run: its weights, its samples, its metrics without times, and the tensors of its
    checkpoint."""
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    checkpoint = (where / "checkpoint.safetensors").read_bytes()
    header = int.from_bytes(checkpoint[:8], "little")       # the header contains the folder and the times
    return ((where / "model.safetensors").read_bytes(), (where / "samples.jsonl").read_bytes(),
            [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines], checkpoint[8 + header:])


def main(kills=60):
    rng, count, survived, came = random.Random(1), Counter(), 0, {}
    with tempfile.TemporaryDirectory() as home:
        for turn in itertools.count():
            kind, command = ("two ranks", RANKS) if turn % 2 else ("one process", ALONE)
            where, broken = Path(home) / f"run{turn}", 0
            if kind not in came:
                began, child = time.time(), begin(command, Path(home) / kind)
                err = child.communicate()[1]
                assert child.returncode == 0, err
                came[kind] = made(Path(home) / kind), time.time() - began
            expected, seconds = came[kind]
            while True:
                child = begin(command, where)
                manner = kill_once(child, where, rng, seconds) if broken < 6 else None
                if manner is None:
                    break
                broken += 1
                count[f"{kind}: {manner}"] += 1
            err = child.communicate()[1]
            same = child.returncode == 0 and made(where) == expected
            survived += broken * same
            print(f"{kind}: {broken} kills, {'identical' if same else 'DIFFERENT: ' + err[-500:]}", flush=True)
            if count.total() >= kills:
                break
    for manner, n in sorted(count.items()):
        print(f"{n:4}  {manner}")
    print(f"{survived} of {count.total()} kills survived")
    return survived < count.total()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
