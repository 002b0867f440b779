"""A run of grpo.py with other constants than those in the code.

    python experiments/studies/constants.py grpo.GAMMA=0.99 run.setup.WARM_BATCH=32 --algo ppo

Such a run is not resumed with them unless the same command resumes it.
"""
import ast
import importlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo  # noqa: E402

CONSTANT = re.compile(r"([\w.]+)\.([A-Z_]+)=(.+)")


def put(argument):
    """Gives a constant, `module.NAME=value`, its value."""
    module, name, value = CONSTANT.fullmatch(argument).groups()
    module = importlib.import_module(module)
    if not hasattr(module, name):
        raise SystemExit(f"{argument}: there is no such constant")
    setattr(module, name, ast.literal_eval(value))


def main(argv):
    """Runs grpo.py."""
    for argument in filter(CONSTANT.fullmatch, argv):
        put(argument)
    grpo.main([x for x in argv if not CONSTANT.fullmatch(x)])


if __name__ == "__main__":
    main(sys.argv[1:])
