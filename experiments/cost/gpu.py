"""What this code does on a GPU, in one command:

    python experiments/cost/gpu.py                              # on a GPU: the first five parts, in nine minutes
    python experiments/cost/gpu.py decode                       # some of the parts
    python experiments/cost/gpu.py --device cpu --tiny          # a dry run on the CPU: two minutes
    python experiments/cost/gpu.py --device pretend --tiny      # another, on the CUDA device of tests/pretend.py

The parts, most telling first; probe.py says what a `share` is:

    decode      whether a CUDA graph gives the plain cache's tokens; a token of 64, 256 and 512 rows, in four ways, in the
                shapes of Qwen2.5-0.5B and SmolLM2-135M; where its time goes
    update      updates of 256 rows of 512 tokens, with micro-batches and chunks of several sizes
    steps       three steps of a run: 16 x 16 completions of 512 tokens, by random models of both shapes
    trl         two steps of the first one by this code and by TRL, if that is installed
    tests       the tests that need a GPU

    inductor    a token and an update, compiled

A part is one or more processes, each of at most the seconds in PARTS; all that the parts may take is --budget. What is
found is printed at once, behind the seconds since its process began, and written to OUT/gpu.json, with all that was
printed; what that has of other parts stays. OUT/logs has the rest of what the processes say.
"""
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from experiments import results  # noqa: E402
from experiments.cost import speed  # noqa: E402
from grpo import Config  # noqa: E402

LEAST = 20          # seconds that a process needs
PROBE = "experiments/cost/probe.py"
STEPS = (f"{PROBE} steps {{device}} --task sums --kl loss --micro_tokens {Config.micro_tokens} "
         "--held_out 2 --samples 1 --steps 3 {size} --init")
# The seconds of a process of each part, and the processes, as command lines; `started` fills in the braces.
PARTS = {
    "decode": (130, {"": f"{PROBE} decode {{device}} {{small}}"}),
    "update": (120, {"": f"{PROBE} update {{device}} {{small}}"}),
    "steps": (90, {"0.5B": f"{STEPS} {{qwen}}", "135M": f"{STEPS} {{smollm2}}"}),
    "trl": (110, {"": "experiments/cost/speed.py {trl} --who 'ours bfloat16' 'TRL bfloat16 in parts' "
                      "--turns 2 --no_peak --device {device} --out {out}/speed.json"}),
    "tests": (130, {"": "-m pytest -q -p no:cacheprovider tests/extra/test_gpu.py --gpu"}),
    "inductor": (150, {"": f"{PROBE} inductor {{device}} {{small}}"}),
}
QUICK = [*PARTS][:5]


def started(args, command):
    """A command line of PARTS for this machine, as a list of words; makes the random models that it names."""
    kind = "tiny" if args.tiny else "shaped"
    models = {name: args.out.parent / f"{name}-{kind}" for name in ("qwen", "smollm2")}
    for name, where in models.items():
        if f"{{{name}}}" in command:
            speed.random_folder(where)
    words = dict(small="", trl="qwen", size="--prompts 16 --group 16 --max_new 512")
    if args.tiny:
        words = dict(small="--small", trl="qwen-tiny", size="--prompts 2 --group 2 --max_new 6")
    return shlex.split(command.format(device=args.device, out=args.out, **models, **words))


def limited(command, seconds, log, heard):
    """Run a command for at most so many seconds, its errors in a file; `heard` is given each line
    that it prints. Its exit code, negative if it was killed."""
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if "--small" in command:
        env["OMP_NUM_THREADS"] = "1"
    with open(log, "a") as errors:
        child = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE,
                                 stderr=errors, text=True, errors="replace", process_group=0,
                                 env=env)

    def kill():
        """With all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    clock = threading.Timer(seconds, kill)
    clock.start()
    try:
        for line in child.stdout:
            heard(line.rstrip("\n"))
        return child.wait()
    finally:
        clock.cancel()
        kill()
        child.wait()


def measured(args, name, command, seconds, add):
    """Run a process, of grpo.py in a folder of its own. `add` is given what it finds, when it does: of a probe its
    results, of any other one what it prints. At last come its exit code and, if it failed, its last lines."""
    where, log = args.out / name.replace(" ", "-"), args.out / "logs" / f"{name}.txt"
    log.write_text("")
    shutil.rmtree(where, ignore_errors=True)
    own, began, said = command[:2] == [PROBE, "steps"], time.time(), []

    def heard(line):
        at = round(time.time() - began, 2)
        if line.startswith("found "):
            with contextlib.suppress(ValueError):           # cut off within a line
                for what, found in json.loads(line[6:]).items():
                    add(what, {"at": at} | found)
            return
        with open(log, "a") as f:
            f.write(line + "\n")
        if command[0] != PROBE and line.strip():
            said.append(line)
            add("said", said, f"{at:6.1f}  {line}")
    code = limited(command + ["--out", str(where)] * own, seconds, log, heard)
    end = {"at": round(time.time() - began, 2), "code": code, "state": "ok"}
    if code:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-30:]
        end |= {"state": "cut off" if code in (-9, -15, 143) else "FAILED", "last": last}
    add("end", end)
    return not code


def shown(found):
    """Results on a line."""
    def form(x):
        return f"{x:.4g}" if isinstance(x, float) else f"{x}"
    at = f"{found['at']:6.1f}  " if "at" in found else ""
    return at + "  ".join(f"{name} {form(x)}" for name, x in found.items() if name not in ("at", "last"))


def main():
    began = time.time()
    parser = results.parser(__doc__, "tiny")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: the first five; all: all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "pretend"))
    parser.add_argument("--budget", type=float, default=540, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--json", type=Path, help="the file of the results; default: OUT/gpu.json")
    args = parser.parse_args()
    parts = [*PARTS] if args.parts == ["all"] else args.parts or QUICK
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; see --device")
    args.out = args.out.resolve()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    file, good = args.json or args.out / "gpu.json", True
    about = results.about("trl") | {"device": args.device}
    result = (json.loads(file.read_text()) if file.exists() else {}) | about
    print(shown(about), flush=True)

    def add(name, what, found, line=None):
        """Print what was found, and keep it."""
        print(f"{name}: {line or f'{what}: {shown(found)}'}", flush=True)
        result[name][what] = found
        results.write(file, result)
    todo = [(part, f"{part} {case}".strip(), command)
            for part in parts for case, command in PARTS[part][1].items()]
    for i, (part, name, command) in enumerate(todo):
        result[name] = {}
        left = args.budget - (time.time() - began)
        seconds = left if i == len(todo) - 1 else min(left, PARTS[part][0])
        if part == "trl" and (importlib.util.find_spec("trl") is None or args.device == "pretend"):
            add(name, "end", {"state": "not run: TRL is not installed"})
        elif left < LEAST:
            add(name, "end", {"state": f"not run: {left:.0f} s are left"})
        else:
            try:
                good &= measured(args, name, started(args, command), seconds, lambda *found: add(name, *found))
            except (OSError, RuntimeError, ValueError) as e:        # such as a full disk: the next part may not need it
                add(name, "end", {"state": f"FAILED: {type(e).__name__}: {e}"})
                good = False
    sys.exit(not good)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that its process ends with it
    main()
