"""What the scripts that write results share: what made a result, its numbers, its figure."""
import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def parser(text, *flags):
    """A parser of a command line whose help begins with a text, with flags that are on or off."""
    made = argparse.ArgumentParser(None, None, text,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        made.add_argument(f"--{flag}", action="store_true")
    return made


def about(*packages):
    """The commit, date, machine and versions of a result, also of packages that may be missing."""
    git = "git describe --always --dirty --exclude *".split()
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"commit": commit, "date": datetime.date.today().isoformat(),
            "machine": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(),
            "python": platform.python_version(), "torch": torch.__version__} | gpu | {
            name: importlib.metadata.version(name) for name in packages
            if importlib.util.find_spec(name)}


def lines(path):
    """The JSON values of a file that has one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, result):
    """A result as a file of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def spread(numbers, form=".1%"):
    """The median; of several numbers, the range in brackets too. Of none, nothing."""
    x = sorted(numbers)
    middle = f"{statistics.median(x):{form}}" if x else ""
    return middle + (f" ({x[0]:{form}} to {x[-1]:{form}})" if len(x) > 1 else "")


def peak():
    """Peak memory of this process, in bytes; on a GPU, the peak allocated there."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def panels(n, size, **options):
    """A figure with n plots in a row; None without matplotlib."""
    if not importlib.util.find_spec("matplotlib"):
        return print("no figure: matplotlib is not installed")
    import matplotlib.pyplot as plt
    return plt.subplots(1, n, figsize=size, **options)


def figure(file, draw, titles):
    """Three plots in a row, drawn by `draw(axes)`, with a title and an x label for each."""
    if made := panels(len(titles), (11, 3)):
        draw(made[1])
        for axis, (title, x) in zip(made[1], titles.items()):
            axis.set_title(title, fontsize=10)
            axis.set_xlabel(x)
            axis.set_ylim(bottom=0)
        made[0].tight_layout()
        made[0].savefig(file, dpi=110)
