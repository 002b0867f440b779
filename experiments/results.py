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


def parser(text, *flags):
    """A parser of a command line whose help is a text, with flags that are on or off."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=text, formatter_class=form)
    for flag in flags:
        made.add_argument(f"--{flag}", action="store_true")
    return made


def about(*packages):
    """The commit, date, machine and versions of a result, also of packages that may be missing."""
    git = subprocess.run("git describe --always --dirty --exclude *".split(), text=True,
                         cwd=Path(__file__).parent, capture_output=True)
    found = {"commit": git.stdout.strip(), "date": datetime.date.today().isoformat(),
             "machine": platform.machine(), "cores": os.cpu_count(),
             "python": platform.python_version(), "torch": torch.__version__}
    if cpu := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
        found["machine"] = cpu[1]
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    known = [name for name in packages if importlib.util.find_spec(name)]
    return found | {name: importlib.metadata.version(name) for name in known}


def lines(path):
    """The JSON values of a file that has one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, result):
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


def figure(file, draw, titles):
    """Three plots in a row, drawn by `draw(axes)`, with a title and an x label for each."""
    if not importlib.util.find_spec("matplotlib"):
        return print("no figure: matplotlib is not installed")
    import matplotlib.pyplot as plt
    whole, axes = plt.subplots(1, len(titles), figsize=(11, 3))
    draw(axes)
    for axis, (title, x) in zip(axes, titles.items()):
        axis.set(title=title, xlabel=x, ylim=(0, None))
    whole.tight_layout()
    whole.savefig(file, dpi=110)
