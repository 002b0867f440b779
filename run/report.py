"""Runs as one self-contained HTML page, which loads nothing from a network.

    python grpo.py --report out/grpo out/ppo

`page/` holds its template, style and script, and uPlot, which draws the curves.
"""
import base64
import hashlib
import json
import math
import re
from functools import partial
from pathlib import Path

from data import UserError, read_bytes, read_json
from run import files, machine

PAGE = Path(__file__).parent / "page"
MOST = 20_000_000       # bytes of samples.jsonl on one page, over all its runs

def refresh(folder):
    """Rewrites the report of a run, on the first rank."""
    if machine.world()[0] == 0:
        write([folder])

def write(folders, out=""):
    """Writes report.html on the runs in `folders`, into the first folder or into `out`; returns its
    path. Raises UserError for a folder without a run."""
    folders, to = [Path(x) for x in folders], Path(out or folders[0])
    text = page([run_of(x, MOST // len(folders)) for x in folders])
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write in {to}: {e.strerror}") from e
    files.write_whole(to / "report.html", text)
    return to / "report.html"

def run_of(folder, most):
    """What the page shows of a run, with at most `most` bytes of samples."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"no run in {folder}")
    about = folder / "run.json"
    settings = read_json(read_bytes(about), about) if about.is_file() else {}
    samples, steps = thinned(folder / "samples.jsonl", most)
    return dict(name=folder.resolve().name, path=str(folder), about=settings, steps=steps,
                metrics=[parsed(line, path) for line in whole_lines(path)], samples=samples)

def whole_lines(path):
    """The complete lines of a file, as bytes; none if there is no file."""
    if path.is_file():
        with open(path, "rb") as f:
            yield from (line for line in f if line.endswith(b"\n"))

def parsed(line, path):
    """The record in a line of a log; raises UserError if it is not one."""
    found = read_json(line, path)
    if type(found.get("step")) is not int:
        raise UserError(f"{path} has a line without a step")
    return found

def thinned(path, most):
    """The records of samples.jsonl at evenly spaced steps, the first and the last included, at most
    `most` bytes of them; and the number of steps in the file."""
    sizes = {}                                          # bytes by step: the file may be large
    for line in whole_lines(path):
        sizes[step_of(line)] = sizes.get(step_of(line), 0) + len(line)
    steps, n = sorted(sizes), len(sizes)
    while n and sum(sizes[step] for step in spread(steps, n)) > most:
        n = n * 9 // 10
    kept = set(spread(steps, n))
    return [parsed(line, path) for line in whole_lines(path) if step_of(line) in kept], len(steps)

def step_of(line):
    """The step at the beginning of a line of samples.jsonl; -1 if it has none."""
    found = re.match(rb'\{"step": (\d{1,15}),', line)
    return int(found[1]) if found else -1

def spread(items, n):
    """n of the items, evenly spaced, the first and the last included."""
    return [items[i * (len(items) - 1) // max(1, n - 1)] for i in range(n)]

def page(runs):
    """The page on some runs."""
    names = ("page.html", "page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css",
             "uPlot.LICENSE")
    template, style, script, plot, plot_style, licence = (
        (PAGE / name).read_text("utf-8") for name in names)
    style = plot_style + style
    shown = {"STYLE": style, "STYLES": hash_of(style), "PLOT": plot, "SCRIPT": script,
             "SCRIPTS": f"{hash_of(plot)} {hash_of(script)}", "LICENCE": licence,
             "DATA": escaped(runs)}
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: shown[found[1]], template)

def hash_of(text):
    """The hash by which a Content-Security-Policy allows a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

def escaped(data):
    """JSON that is safe inside a script element: no text in it can open or close an element. It is
    ASCII, so U+2028 and U+2029, which end a line of a script, are escaped as well."""
    dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False)
    try:
        try:
            text = dumps(data)
        except ValueError:
            text = dumps(finite(data))
    except RecursionError as e:
        raise UserError("a log to report on is nested too deeply") from e
    for c in "<>&":
        text = text.replace(c, f"\\u{ord(c):04x}")
    return text

def finite(data):
    """The data with null in place of NaN and infinities, which JSON lacks."""
    if isinstance(data, dict):
        return {name: finite(x) for name, x in data.items()}
    if isinstance(data, list):
        return [finite(x) for x in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
