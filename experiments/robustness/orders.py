"""Runs the test suite in other orders: the files, and the tests of each file, are shuffled. A test that depends on
another test, or on chance, fails in some of them.

    python experiments/robustness/orders.py [TIMES] [arguments of pytest]       # ten times by default
"""
import os
import random
import subprocess
import sys
from pathlib import Path


def pytest_collection_modifyitems(items):
    """Shuffles the tests. Those of a file stay together, so that what they share is made once."""
    rng, files = random.Random(int(os.environ["ORDER"])), {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    chosen = list(files.values())
    rng.shuffle(chosen)
    for tests in chosen:
        rng.shuffle(tests)
    items[:] = [item for tests in chosen for item in tests]


def main(args):
    times = int(args.pop(0)) if args and args[0].isdigit() else 10
    here, failed = Path(__file__).resolve(), 0
    for order in range(times):
        print(f"order {order}", flush=True)
        environment = os.environ | {"ORDER": str(order), "PYTHONPATH": str(here.parent)}
        failed += subprocess.call([sys.executable, "-m", "pytest", "-q", "-p", here.stem, *args], cwd=here.parents[2], env=environment) != 0
    print(f"{failed} of {times} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
