"""800 damaged, hostile or impossible inputs: each must run, or be refused in one line with exit code 2.

    python experiments/robustness/hostile_files.py [SEED]          # a few minutes

Cuts a checkpoint off; changes JSON and tensors in a model's folder, and the settings of a run; passes random flags. Exits with code 1 if any input gave a traceback, or took more than 10 s or 1 GB.
"""
import contextlib
import dataclasses
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo  # noqa: E402
from run import checkpoint  # noqa: E402

TINY = ("--difficulty 1 --n_layer 1 --n_embd 16 --warm_steps 2 --prompts 2 --group 4 --max_new 12 "
        "--steps 1 --reward model").split()
VALUES = [None, True, "no", "a" * 5000, "\0", -1, 0, 1, 5, 10 ** 9, 10 ** 30, 0.5, 1e300, float("nan"), float("inf"),
          [], {}, [[]], {"a": 1}, [1] * 999, json.loads("[" * 500 + "]" * 500)]
LONG = {"difficulty", "steps", "iterations", "warm_steps", "epochs", "compile", "out"}      # large values only take long
ODD = {str: ["", "x", "a" * 5000], int: [-1, 0, 1, 2, 3, 10 ** 9, 10 ** 30], float: [-1, 0, 0.3, 1e9, 1e30, "nan", "x"]}

def late(number, frame):
    raise KeyboardInterrupt("took more than 10 s")

def outcome(*args):
    """How a command ends: "ran", "refused", or a description of the failure."""
    err = io.StringIO()
    signal.alarm(10)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            grpo.main(list(map(str, args)))
        return "ran"
    except BaseException as e:              # including the PanicException of the tokenizer's library
        line = err.getvalue().startswith("error: ") and err.getvalue().count("\n") == 1
        return "refused" if getattr(e, "code", 0) == 2 and line else f"{type(e).__name__}: {e}"[:300]
    finally:
        signal.alarm(0)

def places(x):
    """Every dict and list in a JSON value that is not empty, itself included."""
    inner = x.values() if isinstance(x, dict) else x[:50] if isinstance(x, list) else ()
    return [x, *(found for part in inner for found in places(part))] if inner else []

def change(x, r):
    """A JSON value with a hostile value put somewhere into it."""
    where = r.choice(places(x)[:60])
    where[r.choice([*where] if isinstance(where, dict) else range(len(where)))] = r.choice(VALUES)
    return x

def change_tensors(named, r):
    """A dict of tensors, one of them missing, cut, renamed, or with another dtype, shape or value."""
    name = r.choice(sorted(named))
    x = named.pop(name)
    other = r.choice([None, x[:1] if x.dim() else x[None], x.double(), x.to(torch.int8), x.bfloat16(), x[None],
                      torch.zeros(0), x * float("nan"), (x.float() * 0 - 1e30).to(x.dtype)])
    return named if other is None else named | {r.choice([name] * 5 + ["another"]): other.contiguous()}

def cuts(work, r, i):
    """Cut a checkpoint off, every third time in its header."""
    path = work / "checkpoint.safetensors"
    whole = path.read_bytes()
    size = r.randrange(8 + int.from_bytes(whole[:8], "little") if i % 3 == 0 else len(whole))
    path.write_bytes(whole[:size])
    return f"{size} bytes", ("--resume", "--out", work)

def files(work, r, i):
    """Change a file of a folder, or the settings of a run."""
    path = work / r.choice(["config.json", "tokenizer.json", "tokenizer_config.json", "run.json", "model.safetensors",
                            *["checkpoint.safetensors"] * 2])
    if path.name == "checkpoint.safetensors":
        cfg, saved = checkpoint.load(work, grpo.Config)
        state = vars(saved) | {"config": change(dataclasses.asdict(cfg), r)}
        save_file({n: x.clone() for n, x in state.pop("tensors").items()}, path, {"grpo": json.dumps(state)})
        return path.name, ("--resume", "--steps", 2, "--out", work)
    if path.name == "model.safetensors":
        save_file(change_tensors(load(path.read_bytes()), r), path)
    elif path.name == "run.json":
        about = json.loads(path.read_text())
        path.write_text(json.dumps(about | {"config": change(about["config"], r)}))
    else:
        cut = path.read_text()[:r.randrange(path.stat().st_size)]
        path.write_text(r.choice([cut, "[" * 10 ** 5, *[json.dumps(change(json.loads(path.read_text()), r))] * 8]))
    return path.name, ("--ask", "1*1=", "--max_new", 2, "--init", work)

def flags(work, r, i):
    """One to four random flags, after tiny settings."""
    known = [f for f in dataclasses.fields(grpo.Config) if f.name not in LONG and (f.type in ODD or get_args(f.type))]
    fields = r.sample(known, r.randrange(1, 5))
    args = [str(x) for f in fields for x in (f"--{f.name}", r.choice(get_args(f.type) or ODD[f.type]))]
    return " ".join(args)[:200], (*TINY, "--out", work / "new", *args)

def main(seed=1, times=((cuts, 200), (files, 300), (flags, 300))):
    """Print how often each kind ran and was refused, and all failures; returns the number of failures."""
    signal.signal(signal.SIGALRM, late)
    wrong = []
    with tempfile.TemporaryDirectory() as place:
        base, work = Path(place) / "base", Path(place) / "work"
        assert outcome(*TINY, "--out", base) == "ran"
        size, limits = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size * resource.getpagesize() + 10 ** 9, limits[1]))
        for kind, n in times:
            r, found = random.Random(f"{seed}/{kind.__name__}"), Counter()
            for i in range(n):
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(base, work)
                what, args = kind(work, r, i)
                how = outcome(*args)
                found[how if how in ("ran", "refused") else "wrong"] += 1
                if how not in ("ran", "refused") or kind is cuts and how == "ran":
                    wrong.append(f"    {kind.__name__} {i}: {what}: {how}")
            print(f"{kind.__name__}: {dict(found)}")
        resource.setrlimit(resource.RLIMIT_AS, limits)
    print("\n".join([f"{len(wrong)} failures", *wrong]))
    return len(wrong)

if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
