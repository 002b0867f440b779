"""Runs as one self-contained HTML page, which loads nothing from a network.

    python grpo.py --report out/grpo out/ppo        # writes out/grpo/comparison.html

`page/` holds its template, style and script, and uPlot, which draws the curves.
"""
import base64
import hashlib
import json
import math
import re
from functools import partial
from pathlib import Path

import torch

from data import UserError, read_bytes, read_json
from data.tokenizer import pieces
from model import send
from run import batches, dist, files, show

PAGE = Path(__file__).parent / "page"
MOST = 20_000_000       # bytes of samples.jsonl on one page, over all its runs
TOKENS, CHARACTERS = 4096, 2 ** 18      # most of a completion, and of any text, on the page
PER_TOKEN = ("advantages", "logp", "new_logp", "ref_logp", "entropy")

def refresh(folder):
    """Rewrites the report of a run, on the first rank. A run goes on if that fails."""
    if dist.rank() == 0:
        try:
            write([folder])
        except UserError as e:
            show.print0(f"note: no report: {e}")

def write(folders, out=""):
    """Writes html on a run, or comparison.html on several, into the first of `folders` or
    into `out`; returns its path. Raises UserError for a folder without a run."""
    folders, to = [Path(x) for x in folders], Path(out or folders[0])
    file = to / ("report.html" if len(folders) == 1 else "comparison.html")
    text = page([run_of(x, MOST // len(folders)) for x in folders])
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write in {to}: {e.strerror}") from e
    files.write_whole(file, text)
    return file

def print_report(folders, out):
    """`write`; prints the path of the page, and the first and the last evaluation of each run."""
    show.print0(f"the report is in {write(folders, out)}")
    for folder in folders:
        path = Path(folder) / "metrics.jsonl"
        evaluated = [m for m in (parsed(line, path) for line in whole_lines(path)) if "greedy" in m]
        for m in evaluated[:1] + evaluated[1:][-1:]:
            show.print0(f"{folder}  step {m['step']}  {show.percentages(m)}")

def run_of(folder, most):
    """What the page shows of a run, with at most `most` bytes of samples."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"no run in {folder}")
    about = folder / "run.json"
    settings = read_json(read_bytes(about), about) if about.is_file() else {}
    samples, steps = thinned(folder / "samples.jsonl", most)
    good = [shortened(g) for g in samples if readable(g)]
    steps -= len({g["step"] for g in samples} - {g["step"] for g in good})
    return dict(name=folder.resolve().name, path=str(folder), about=settings, steps=steps,
                metrics=[parsed(line, path) for line in whole_lines(path)], samples=good,
                unreadable=len(samples) - len(good))

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

def readable(g):
    """Whether a record of samples.jsonl has what the page reads of it: see `records`. Those
    of older runs have no tokens, nor what came later."""
    texts, parts = g.get("completions"), g.get("parts", {})
    if not lists([texts], [None], str) or not texts or type(parts) is not dict:
        return False
    n = len(texts)
    sizes = sizes_of(g["tokens"]) if "tokens" in g else [None] * n
    ends = g.get("ends", [[]] * n)
    counts = sizes_of(ends)
    return (type(g.get("prompt")) is str and len(sizes) == len(counts) == n
            and lists([g.get("rewards"), *parts.values()], [n] * (1 + len(parts)), int, float)
            and lists([g.get("finished", [True] * n)], [n], bool)
            and lists(g.get("tokens", [[]] * n), sizes, str)
            and all(g.get(name) is None or lists(g[name], sizes, int, float) for name in PER_TOKEN)
            and lists(ends, counts, int) and lists(g.get("step_rewards", ends), counts, int, float)
            and all(0 <= end < (size or 0) for row, size in zip(ends, sizes) for end in row))

def lists(x, sizes, *kinds):
    """Whether x is a list of lists of these sizes, None being any, of entries of these types."""
    return type(x) is list and len(x) == len(sizes) and all(
        type(row) is list and size in (None, len(row)) and {*map(type, row)} <= {*kinds}
        for row, size in zip(x, sizes))

def sizes_of(x):
    """The lengths of the lists in a list; empty for anything else."""
    return [len(row) for row in x if type(row) is list] if type(x) is list else []

def shortened(g):
    """A record with at most TOKENS tokens of each completion, and at most CHARACTERS of the prompt
    and of a completion without tokens. `partly`: which completions are not in full, if any."""
    tokens = g.get("tokens", [[text] for text in g["completions"]])
    most = CHARACTERS // min(TOKENS, max(map(len, tokens)) or 1)        # characters of a token
    partly = [len(row) > TOKENS or max(map(len, row), default=0) > most for row in tokens]
    rows = {name: [row[:TOKENS] for row in g[name]] for name in PER_TOKEN if g.get(name)}
    return g | rows | {"tokens": [[piece[:most] for piece in row[:TOKENS]] for row in tokens],
                       "prompt": g["prompt"][:CHARACTERS],
                       "completions": [text[:CHARACTERS] for text in g["completions"]],
                       **({"partly": partly} if any(partly) else {})}

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


PART = 2 ** 24      # most logits at a time, 64 MiB in float32

def widest(batch, group):
    """The rows of the group with the largest std of rewards; the first one in a tie."""
    spread = batch.reward.sum(1).double().view(-1, group).std(1, correction=0)
    p = int(spread.argmax())
    return slice(p * group, (p + 1) * group)

def chosen(cfg, step, batch):
    """The rows of two of this rank's groups by reason: the widest spread of rewards, and a random
    other group, if there is one."""
    rows = {"spread": widest(batch, cfg.group)}
    others = [at for at in range(0, len(batch.ids), cfg.group) if at != rows["spread"].start]
    if others:
        begin = dist.rng(cfg, "samples", step).choice(others)
        rows["random"] = slice(begin, begin + cfg.group)
    return rows

@torch.no_grad()
def as_it_is_now(policy, ids, mask, temperature):
    """log pi of each sampled token and the entropy at its position, in nats, under the policy after
    the update: for each, a list per row. Computes one row at a time, PART logits at a time."""
    logps, entropies = [], []
    for row, on, T in zip(ids, mask, batches.row_lengths(mask).tolist()):
        with torch.compiler.set_stance("force_eager"):      # a single row would be compiled again
            h = policy(row[None, :T - 1])[0]                                                # (T, C)
        h, tokens = h[on[1:T]], send(row[:T][on[:T]], h.device)                     # (n, C), (n,)
        logp, entropy = [], []
        size = max(1, PART // policy.cfg.vocab_size)
        for part, token in zip(h.split(size), tokens.split(size)):
            logits = policy.head(part / temperature).log_softmax(-1)                        # (n, V)
            logp += rounded(logits.gather(-1, token[:, None])[:, 0])
            entropy += rounded(-(logits.exp() * logits).sum(-1))
        logps.append(logp)
        entropies.append(entropy)
    return logps, entropies

def rounded(x):
    """The numbers of a tensor (n,), to four decimals."""
    return [round(value, 4) for value in x.tolist()]

def records(agent, step, batch):
    """The records of samples.jsonl for two groups of a rollout that is on the host, a dict each. An
    inner list has an entry per token; `ends` are indices, from 0, of tokens that end a step."""
    cfg, found = agent.cfg, []
    for which, rows in chosen(cfg, step, batch).items():
        ids, mask = batch.ids[rows], batch.mask[rows]
        new_logp, entropy = as_it_is_now(agent.policy, ids, mask, cfg.temperature)

        def of_tokens(x, where=mask):
            """For each row the numbers at its sampled tokens, or at those in `where`."""
            return None if x is None else [rounded(row[on]) for row, on in zip(x[rows], where)]
        found.append({
            "step": step, "which": which, "prompt": batch.problems[rows.start].prompt,
            "completions": batch.texts[rows], "finished": batch.finished[rows].tolist(),
            "rewards": rounded(batch.reward[rows].sum(1)),
            "parts": {name: rounded(x[rows]) for name, x in batch.components.items()},
            "tokens": [pieces(agent.encoding, row[on].tolist()) for row, on in zip(ids, mask)],
            "advantages": of_tokens(batch.adv), "logp": of_tokens(batch.logp),
            "new_logp": new_logp, "ref_logp": of_tokens(batch.ref_logp), "entropy": entropy,
            "ends": [end[on].nonzero()[:, 0].tolist() for end, on in zip(batch.ends[rows], mask)],
            "step_rewards": of_tokens(batch.reward, batch.ends[rows])})
    return found

def log_samples(agent, step, batch, last):
    """At the first step, the `last` one, and every --save_every steps: prints one group and adds
    two to samples.jsonl, on the first rank."""
    if step not in (1, last) and step % agent.cfg.save_every != 0:
        return
    first, batch = dist.rank() == 0, batches.on_host(batch)
    if first:
        show.group(batch, widest(batch, agent.cfg.group), agent.encoding)
    if first or dist.is_sharded(agent.policy):         # every rank takes part in its passes
        for record in records(agent, step, batch):
            if first:
                files.append(agent.cfg.folder / "samples.jsonl", record)
