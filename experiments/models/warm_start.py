"""Makes data/warm_start, with which `python grpo.py --task arithmetic` begins:

    python experiments/models/warm_start.py         # 5 minutes on 2 CPU cores
"""
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
from data.arithmetic import START  # noqa: E402
from experiments import results  # noqa: E402

COMMAND = "python grpo.py --task arithmetic --init= --warm_steps 1500 --steps 0"


def main():
    folder = ROOT / "out" / "warm_start"
    grpo.main([*COMMAND.split()[2:], "--out", str(folder)])
    evaluation, = results.lines(folder / "metrics.jsonl")
    shutil.copytree(folder / "warm_start", START, dirs_exist_ok=True)
    results.write(Path(START) / "warm_start.json", results.about() | {
        "command": COMMAND, "evaluation": evaluation})


if __name__ == "__main__":
    main()
