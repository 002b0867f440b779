"""On-policy distillation beside GRPO: pass@1 before and after as many steps from the same warm
start, three seeds of each.

    python grpo.py --task arithmetic                        # the teacher, in out/arithmetic
    python experiments/studies/distillation.py [--readme]   # 6 minutes

Writes distillation.json into out/, or with --readme beside this script. `right from step`: the
first step in which nine of ten sampled completions were right.
"""
import subprocess
import sys
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from experiments import results  # noqa: E402

SEEDS = (2, 3, 4)                   # 1 is the teacher's


def main():
    teacher = results.lines(ROOT / "out" / "arithmetic" / "metrics.jsonl")
    table = {"about": results.about(), "teacher": teacher[-1]["pass@1"]}
    for algo in ("grpo", "distillation"):
        table[algo] = {}
        for seed in SEEDS:
            out = ROOT / "out" / f"{algo}-{seed}"
            flags = ["--algo", algo, "--seed", str(seed), "--out", out]
            subprocess.run([sys.executable, "grpo.py", *flags], cwd=ROOT, check=True)
            first, *steps = results.lines(out / "metrics.jsonl")
            right = next((step["step"] for step in steps if step["accuracy"] >= 0.9), None)
            table[algo][seed] = {"before": first["pass@1"], "after": steps[-1]["pass@1"],
                                 "steps": len(steps), "right from step": right}
    path = (HERE if "--readme" in sys.argv else ROOT / "out") / "distillation.json"
    results.write(path, table)
    print(path.read_text())


if __name__ == "__main__":
    main()
