"""All checks and measurements on a GPU in one command, with the results in OUT/gpu.json:

    pip install -r tests/requirements-peers.txt trl==1.16.0          # only to compare with TRL
    python experiments/cost/gpu.py                                   # on a GPU: not yet tried
    python experiments/cost/gpu.py --device cpu --tiny               # a dry run on the CPU: two minutes

The parts: the tests that need a GPU; the main job with and without compilation, what it learns and how long it takes; how
far sampler and trainer are apart in bfloat16; whether a resumed run is the same; the time of a step next to its
lower bound and to TRL's; the estimate of memory next to the peak; and a trace of three steps. Each part is a
process of its own: if one fails, its last lines are kept and the others go on.
"""
import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from grpo import Config  # noqa: E402
from run import checkpoint  # noqa: E402

TINY = ["--difficulty", "1", "--n_layer", "1", "--n_embd", "32", "--n_head", "4", "--warm_steps", "20", "--warm_batch", "8", "--max_new", "16",
        "--prompts", "4", "--group", "4", "--held_out", "4", "--samples", "1", "--fit_prompts", "40"]
CHILD = "import sys, grpo\nfrom experiments.cost.speed import peak\ngrpo.main(sys.argv[1:])\nprint('peak', peak())"


def child(command, limit):
    """Run a command: its output, and a dict of its seconds, its exit code and, if it failed, its last lines."""
    began = time.time()
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as e:
        said, code = (e.stdout or b"").decode(errors="replace"), 124
    found = {"seconds": round(time.time() - began, 1), "code": code}
    return said, found | ({} if code == 0 else {"said": said.splitlines()[-12:]})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Study:
    """The parts; each method returns a dict of results."""

    def __init__(self, args):
        self.args, self.out = args, Path(args.out).resolve()
        self.flags = ["--task", "arithmetic", "--device", args.device, *(TINY if args.tiny else [])]
        self.main = ["--steps", "4" if args.tiny else "24"]
        self.few = ["--steps", "4", *([] if args.tiny else ["--held_out", "20"])]
        self.warm = self.out / "eager" / "warm_start"

    def run(self, name, *flags, limit=240):
        """A run in a folder of its own, from the warm start that the first run made."""
        where = self.out / name
        if "--resume" not in flags and self.warm.exists():
            shutil.copytree(self.warm, where / "warm_start", dirs_exist_ok=True)
        said, found = child([sys.executable, "-c", CHILD, *self.flags, "--out", str(where), *flags], limit)
        steps = lines(where / "metrics.jsonl")
        trained = [m for m in steps if m["step"]]
        if estimate := re.search(r"memory: about ([\d.]+) GB", said):
            found["estimated GB"] = float(estimate[1])
        if peak := re.search(r"^peak (\d+)", said, re.M):
            found["peak GB"] = round(int(peak[1]) / 1e9, 2)
        if trained:
            found |= {name: statistics.median(m[name] for m in trained[len(trained) // 2:])
                      for name in ("seconds", "rollout_tok_s", "update_tok_s")} | {"run": found["seconds"]}
            found["mismatch"] = [m["mismatch"] for m in trained]
        measured = [m for m in steps if "pass@1" in m]
        found |= {when: {x: m[x] for x in ("greedy", "pass@1")} for when, m in zip(("before", "after"), measured)}
        return found

    def suite(self):
        """The tests that need a GPU."""
        tests = ["tests/test_credit.py"] if self.args.tiny else ["tests/test_gpu.py", "--gpu"]
        said, found = child([sys.executable, "-m", "pytest", "-q", *tests], 300)
        return found | {"said": said.splitlines()[-5:]}

    def eager(self):
        """The main job."""
        return self.run("eager", "--compile", "off", *self.main)

    def compiled(self):
        """The main job, compiled."""
        return self.run("compiled", "--compile", "off" if self.args.tiny else "on", *self.main)

    def float32(self):
        """A few steps in float32, where sampler and trainer must agree closely."""
        return self.run("float32", *self.few, "--dtype", "float32")

    def ppo(self):
        """PPO with a separate critic."""
        return self.run("ppo", *self.few, "--algo", "ppo", "--critic", "separate")

    def learned(self):
        """A learned process reward."""
        return self.run("learned", *self.few, "--reward", "model", "--supervision", "process")

    def resume(self):
        """Four steps, and two resumed for two more: the largest difference of a weight."""
        found = self.run("whole", *self.few)
        self.run("halves", *self.few, "--steps", "2")
        again = self.run("halves", *self.few, "--resume")
        one, two = (checkpoint.load(self.out / name, Config)[1].tensors for name in ("whole", "halves"))
        worst = max((one[n].float() - two[n].float()).abs().max().item() for n in one if n.startswith("policy."))
        return found | {"resumed": again["code"], "largest difference": worst}

    def speed(self):
        """The time of a step next to its lower bound and, if TRL is installed, to TRL's; by speed.py."""
        file = self.out / "speed.json"
        sizes, who = ["tiny"], ["--who", "ours", "--turns", "2"]
        if not self.args.tiny:
            sizes = ["arithmetic-512", *(["qwen"] if (ROOT / "out" / "smollm2").exists() else [])]
            who = ["--turns", "4"]
        _, found = child([sys.executable, "experiments/cost/speed.py", *sizes, *who, "--arithmetic", str(self.warm),
                          "--device", self.args.device, "--out", str(file)], 240)
        return found | {"sizes": json.loads(file.read_text())["sizes"] if file.exists() else {}}


PARTS = ("eager", "compiled", "float32", "ppo", "learned", "resume", "speed", "suite")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", default="out/gpu")
    args = parser.parse_args()
    study = Study(args)
    shutil.rmtree(study.out, ignore_errors=True)
    study.out.mkdir(parents=True)
    there = torch.cuda.is_available()
    result = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
              "device": torch.cuda.get_device_name() if there else args.device}
    for name in args.parts or PARTS:
        result[name] = getattr(study, name)()
        (study.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps({k: x for k, x in result[name].items() if k not in ("mismatch", "sizes")}), flush=True)
    sys.exit(any(found.get("code") for found in result.values() if isinstance(found, dict)))


if __name__ == "__main__":
    main()
