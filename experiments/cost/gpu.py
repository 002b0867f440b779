"""What this code does on a GPU, in one command:

    python experiments/cost/gpu.py                              # on a GPU
    python experiments/cost/gpu.py warm main compiled           # some of the parts
    python experiments/cost/gpu.py --device cpu --tiny          # a dry run on the CPU: two minutes
    python experiments/cost/gpu.py --device pretend --tiny      # another, on the CUDA device of tests/pretend.py

The parts, most telling first:

    step        whether a step runs: of GRPO, of PPO with a critic, with a learned reward of steps
    warm        the main job's warm start, made anew; later runs start with it or, without it, with data/warm_start
    agree       how far sampler and trainer are apart, in float32 and bfloat16, with each KV cache
    main        24 steps of the main job, not compiled: time, accuracy before and after
    compiled    the same, compiled: time, number of graphs and of graph breaks
    decode      rollouts of 256 completions of 512 tokens, by a random model in the shape of Qwen2.5-0.5B
    update      updates with such a rollout; "large" has micro-batches of 16,384 tokens
    memory      the peak of each process so far, divided by the estimate that grpo.py prints
    resume      the largest difference of a weight between 4 steps and 2 + 2, and between 4 steps and 4 others
    trl         steps of this code and of TRL, if that is installed
    smollm2     steps of out/smollm2 (see experiments/models/smollm2.py) or, without it, of a random model of its shape
    suite       the tests that need a GPU

A part is one or more processes, each of at most LIMIT seconds. After each, a line is printed and OUT/gpu.json written;
what it holds of other parts stays. A process that failed or was cut off has there its last lines and what it had
measured until then; OUT/logs has everything. A `share` is a lower bound on a time, divided by the time: of a rollout,
the bytes of weights and cache over the bandwidth of a copy; of an update, its products at the rate of a large one.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from data.tokenizer import byte_encoding  # noqa: E402
from experiments.cost import probe, speed  # noqa: E402
from grpo import Config  # noqa: E402
from run import checkpoint  # noqa: E402

LIMIT, PATIENCE = 240, 5        # of these seconds, in the last ones a process is asked to stop: a run ends its step
TINY = ("--difficulty 1 --n_layer 1 --n_embd 32 --n_head 4 --warm_steps 20 --warm_batch 8 --max_new 16 --prompts 4 "
        "--group 4 --held_out 4 --samples 1 --fit_prompts 40")
PROBE = "experiments/cost/probe.py"
RUN = f"{PROBE} run {{device}} --task arithmetic --compile off"
STEP, FEW = f"{RUN} {TINY} --steps 1", f"{RUN} {{tiny}} {{start}} --held_out 20 --samples 1 --steps"
ROLLOUT, UPDATE = f"{PROBE} rollout {{device}} {{small}}", f"{PROBE} update {{device}} {{small}}"
CACHES = {"static": "--static_cache on", "shared": "--static_cache off",
          "plain": "--static_cache off --share_prefix off"}
# The processes of each part, as command lines; `started` fills in the braces.
PARTS = {
    "step": {"grpo": STEP, "ppo": f"{STEP} --algo ppo --critic separate",
             "learned": f"{STEP} --reward model --supervision process"},
    "warm": {"": f"{RUN} --warm_steps 1500 {{tiny}} --steps 0"},
    "agree": {f"{dtype} {name}": f"{FEW} 2 --dtype {dtype} {cache}"
              for dtype in ("float32", "bfloat16") for name, cache in CACHES.items()},
    "main": {"": f"{RUN} {{tiny}} {{start}} --steps 24"},
    "compiled": {"": f"{RUN} {{tiny}} {{start}} --steps 24 --compile {{on}}"},
    "decode": {"attention": f"{PROBE} attention {{device}} {{small}}", "static": f"{ROLLOUT} --static_cache on",
               "compiled": f"{ROLLOUT} --compile {{on}}", "shared": f"{ROLLOUT} --static_cache off"},
    "update": {"eager": UPDATE, "compiled": f"{UPDATE} --compile {{on}}", "large": f"{UPDATE} --micro_tokens 16384"},
    "memory": {},
    "resume": {"whole": f"{FEW} 4", "again": f"{FEW} 4", "halves": f"{FEW} 2", "halves resumed": f"{FEW} 4 --resume"},
    "trl": {"": "experiments/cost/speed.py {size} --who ours TRL --turns 2 --device {device} --arithmetic {warm} "
                "--out {out}/speed.json"},
    "smollm2": {"": f"{RUN} {{tiny}} --task sums --init {{smollm2}} --warm_steps 0 --held_out 20 --samples 1 --kl loss "
                    "--steps 3"},
    "suite": {"": "-m pytest -v tests/test_gpu.py --gpu"},
}


def started(args, command):
    """A command line of PARTS for this machine, as a list of words."""
    warm, smollm2 = args.out / "warm" / "warm_start", ROOT / "out" / "smollm2"
    start = f"--init {warm} --warm_steps 0" if (warm / "warm_start.json").exists() else ""
    if "{smollm2}" in command and (args.tiny or not smollm2.exists()):
        smollm2 = args.out / "random"
        speed.random_model(smollm2, probe.SMALL if args.tiny else speed.SMOLLM2, "llama", byte_encoding())
    size = dict(tiny=TINY, small="--small", on="off", size="tiny") if args.tiny else dict(
        tiny="", small="", on="on", size="arithmetic-512")
    return command.format(device=args.device, start=start, warm=warm, smollm2=smollm2, out=args.out, **size).split()


def limited(command, log):
    """Run a command, its output in a file, for at most LIMIT seconds: its exit code, negative if it was killed."""
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TORCH_LOGS": "graph_breaks,recompiles"}
    env |= {"OMP_NUM_THREADS": "1"} if "--small" in command or TINY in " ".join(command) else {}
    with open(log, "w") as said:
        child = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, process_group=0, env=env)
    try:
        child.wait(LIMIT - PATIENCE)
    except subprocess.TimeoutExpired:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):       # with all that it has started
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def measured(out, name, command):
    """Run a command, of grpo.py in a folder of its own: what it tells and logs, and its last lines if it is not a probe
    that succeeds."""
    where, log = out / name.removesuffix(" resumed").replace(" ", "-"), out / "logs" / f"{name}.txt"
    if "--resume" not in command:
        shutil.rmtree(where, ignore_errors=True)
    began, folder = time.time(), ["--out", str(where)] if command[:2] == [PROBE, "run"] else []
    code = limited([sys.executable, *command, *folder], log)
    said, found = log.read_text(errors="replace").splitlines(), {"process s": time.time() - began, "code": code}
    for line in said:
        found |= json.loads(line[6:]) if line.startswith("found ") else {}
    if code or command[0] != PROBE:
        found["said"] = [line for line in said if not line.startswith("found ")][-30:]
    return found | (of_a_run(where / "metrics.jsonl") if folder else {})


def of_a_run(path):
    """What a run logs of time, agreement and accuracy. Times are medians of the second half of its steps."""
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = dict(zip(("before", "after"), [{x: m[x] for x in ("greedy", "pass@1")} for m in steps if "pass@1" in m]))
    if trained := [m for m in steps if m["step"]]:
        found |= {"steps": len(trained), "mismatch": max(m["mismatch"] for m in trained),
                  "first step s": trained[0]["seconds"]}
        later = trained[len(trained) // 2:]
        names = {"step s": "seconds", "rollout tokens/s": "rollout_tok_s", "update tokens/s": "update_tok_s"}
        found |= {name: statistics.median(m[key] for m in later) for name, key in names.items()}
    return found


def in_all(part, out, result):
    """What the processes of several parts, or of one, tell together."""
    if part == "memory":
        both = {name: x for name, x in result.items() if isinstance(x, dict) and {"estimate GB", "peak GB"} <= x.keys()}
        return {name: x["peak GB"] / x["estimate GB"] for name, x in both.items()}
    if part == "resume" and not any(result[f"resume {name}"]["code"] for name in PARTS["resume"]):
        folders = [out / f"resume-{name}" for name in ("whole", "again", "halves")]
        one, *others = (checkpoint.load(folder, Config)[1].tensors for folder in folders)
        return {name: max((one[n] - two[n]).abs().max().item() for n in one if n.startswith("policy."))
                for name, two in zip(("4 and 4", "4 and 2 + 2"), others)}
    return {}


def shown(found):
    """Results on a line: whether a process succeeded, its numbers, the last line it said."""
    state = {0: ["ok"], -9: ["cut off"], -15: ["cut off"], 143: ["cut off"]}.get(found.get("code"), ["FAILED"])
    numbers = [f"{name} {x:.3g}" for name, x in found.items() if isinstance(x, (int, float)) and name != "code"]
    numbers += [f"pass@1 {when} {found[when]['pass@1']:.1%}" for when in ("before", "after") if when in found]
    return "  ".join([*(state if "code" in found else []), *numbers, *found.get("said", [])[-1:]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "pretend"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; see --device")
    args.out = args.out.resolve()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    file, failed = args.out / "gpu.json", False
    result = json.loads(file.read_text()) if file.exists() else {}
    result |= {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
               "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device}

    def add(name, found):
        """Keep results, and print them."""
        result[name] = found
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {shown(found)}", flush=True)
    for part in args.parts or PARTS:
        if part == "trl" and (importlib.util.find_spec("trl") is None or args.device == "pretend"):
            add("trl", {"said": ["TRL is not installed"]})
            continue
        for case, command in PARTS[part].items():
            if args.tiny and case == "compiled":        # it would not be
                continue
            name = f"{part} {case}".strip()
            add(name, measured(args.out, name, started(args, command)))
            failed = failed or result[name]["code"] != 0
        if found := in_all(part, args.out, result):
            add(f"{part}, in all", found)
    sys.exit(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that its process ends with it
    main()
