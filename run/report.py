"""What a run shows: in the terminal, in metrics.jsonl, samples.jsonl, and on an HTML page."""
import contextlib
import dataclasses
import json
import math
import re
import shlex
import statistics as stat
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import data
from data import UserError, answer_of, printable
from data.tokenizer import pieces
from run import dist, files, passes, signals
from run.device import device_of, dtype_of
from run.terminal import chunks, command, duration, has_colours, print0, say

# ----------------------------------------------------------------- the terminal

@contextlib.contextmanager
def exit_code():
    """A context for a command: errors are one line, but those of a task a traceback."""
    code = 0
    if hasattr(sys.stdout, "reconfigure"):        # not a notebook's
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except signals.Stopped as when:
        print0(f"stopped {when}; continue with: {when.command}")
        code = 128 + when.number
    except KeyboardInterrupt:  # in --eval_only or --ask: nothing to save
        code = 130
    except (UserError, OSError) as e:  # OSError: a full disk, a path too long
        if data.is_executed(e) and not isinstance(e, UserError):
            raise
        say(f"error: {on_one_line(str(e))}", sys.stderr)
        code = 2
    dist.exit_with(code)

def on_one_line(text):
    """A text with visible line breaks and control characters."""
    return printable(text).replace("\n", " ⏎ ")

def coloured(piece, adv):
    """A token's text; in a terminal green for a positive advantage, red for a negative one."""
    piece = on_one_line(piece)
    if not has_colours(sys.stdout):
        return piece
    return f"\x1b[{32 if adv > 0 else 31 if adv < 0 else 90}m{piece}\x1b[0m"

def print_group(batch, encoding):
    """Prints distinct completions of a group: at most four, of highest and lowest reward."""
    prompt = on_one_line(batch.problems[0].prompt)
    reward = batch.reward.sum(1).tolist()
    alike = {}  # the rows of each completion and reward
    for row in range(len(reward)):
        alike.setdefault((reward[row], str(batch.texts[row])), []).append(row)
    distinct = sorted(alike.values(), key=lambda same: -reward[same[0]])
    others = f"   ({len(distinct) - 4} others between)" if len(distinct) > 4 else ""
    print0(f"    {prompt if len(prompt) <= 96 else f'{prompt[:60]} ... {prompt[-31:]}'}{others}")
    for same in distinct[:2] + distinct[2:][-2:]:
        row = same[0]
        mask = batch.mask[row]
        adv = batch.adv[row][mask].tolist() or [0.0]    # of a row without a sampled token
        said = [*map(coloured, pieces(encoding, batch.ids[row][mask].tolist()), adv)]
        places = passes.replies_after(mask)
        for n, reply in zip(reversed(places), reversed(batch.texts[row][1::2])):
            said.insert(n, f"[{on_one_line(reply)}]")
        of = "" if max(adv) - min(adv) < 0.005 else "of the first token "
        parts = [f"{name} {x[row]:g}" for name, x in batch.components.items() if name != "reward"]
        parts = f" ({', '.join(parts)})" if len(parts) > 1 else ""
        print0(f"      {len(same)}x {''.join(said)}   reward {reward[row]:g}{parts}  "
               f"advantage {of}{adv[0]:+.2f}", coloured=True)

def header(cfg, encoding, policy, problems, held_out):
    given = [f"{f.name} {getattr(cfg, f.name)}" for f in dataclasses.fields(cfg)
             if f.name != "out" and getattr(cfg, f.name) not in (f.default, {})]
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    print0(f"{millions:.2f}M parameters on {device_of(cfg)} in {dtype_of(cfg)}; "
           f"{len(problems)} problems, {len(held_out)} held out; "
           f"{cfg.prompts} x {cfg.group} rows a step, --lr {cfg.lr:g}")
    print0(f"settings: {', '.join(given)}")
    if cfg.lr == type(cfg).lr and millions < 100:
        print0(f"note: --lr {cfg.lr:g} is the paper's, for 7 billion parameters; try 1e-4")
    if encoding.frame.before + encoding.frame.after:
        print0(f"prompts are sent as {encoding.frame.before + '{}' + encoding.frame.after!r}")

DECIMALS = dict(reward=3, rule_reward=3, accuracy=3, length=1, kl=3, entropy=3, dead_groups=2)

def step_line(step, total, done):
    """Prints a line for the last of the steps `done`, and warnings."""
    stats = done[-1]
    shown = [f"{name} {stats[name]:.{DECIMALS[name]}f}  " for name in DECIMALS if name in stats]
    if stats["finished"] < 0.9:
        shown.append(f"finished {stats['finished']:.2f}  ")
    seconds = stat.median(stats["seconds"] for stats in done[-9:])
    print0(f"step {step}/{total}  {''.join(shown)}{stats['seconds']:.2f} s  "
           f"left {duration(seconds * (total - step))}")
    best = max(x["accuracy"] for x in done)
    # By chance it may fall, too, but not so far, or at so large a KL.
    fallen = in_a_row(x["accuracy"] < best / 2 - 0.1 * (x.get("kl", 0) <= 1) for x in done)
    if fallen == 3 and "rule_reward" not in stats:
        print0(f"warning: accuracy fell below half its best: --lr {stats['lr']:g} may be too high: "
               "see \"The policy has collapsed\" in docs/troubleshooting.md")
    if "rule_reward" in stats:      # by chance once in 30 runs of 100 steps
        least = min(x["rule_reward"] for x in done[:6])
        first = done[0]["rule_reward"]      # a fall within six steps to 0 is one, too
        if in_a_row(least >= x["rule_reward"] < first for x in done) == 6:
            print0("warning: rule_reward fell: --beta may be too low for a learned reward: see "
                   "\"A learned reward\" in docs/questions.md")
    if fallen:
        return
    if in_a_row(x.get("dead_groups") == 1 and x["accuracy"] < 1 for x in done) == 3:
        print0("warning: for 3 steps in a row every group had equal rewards, of which a group "
               "baseline learns nothing: see \"All groups are dead\" in docs/troubleshooting.md")
    if in_a_row(stats["finished"] < 0.5 for stats in done) == 3:
        print0("warning: for 3 steps in a row most completions were cut off, at --max_new or "
               "--max_turns: see \"No completion ends\" in docs/troubleshooting.md")

def in_a_row(held):
    """How many of the last are True."""
    return [False, *held][::-1].index(False)

def percentages(results):
    """Shares on one line; of those at k only the ones at 1 and at the largest k."""
    at = {name: int(name.partition("@")[2] or 1) for name in results if name != "held_out"}
    shown = [f"{name} {results[name]:.1%}" for name in at if at[name] in (1, max(at.values()))]
    if "held_out" in results:
        shown.append(f"of {results['held_out']} problems")
    return "  ".join(shown)

def completion_of(batch):
    """A Batch's first completion for a terminal, with replies in brackets."""
    completion = batch.texts[0]
    if isinstance(completion, list):
        completion = "".join(f"[{turn}]" if i % 2 else turn for i, turn in enumerate(completion))
    cut = "" if batch.finished[0] else f"\n(cut off after {int(batch.mask[0].sum())} tokens)"
    return completion + cut

def farewell(cfg, question):
    """Says what the run has gained, and where report and model are."""
    log = [*parsed(cfg.folder / "metrics.jsonl")] if dist.rank() == 0 else []
    seconds = sum(m.get("seconds", 0) for m in log)
    evaluated = [m for m in log if {"pass@1", "greedy"} <= m.keys()]
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        print0(f"pass@1 {first['pass@1']:.1%} -> {last['pass@1']:.1%}, greedy "
               f"{first['greedy']:.1%} -> {last['greedy']:.1%} in {last['step']} steps, "
               f"{duration(seconds)}")
    if cfg.eval_every:
        print0(f"the best by pass@1 is in {cfg.folder}/best")
    print0(f"curves, and completions token by token: {cfg.folder}/report.html")
    if len(question) > 60 or "\n" in question:
        question = "QUESTION"
    print0(f"the model is in {cfg.folder}; ask it: {command()} --task {shlex.quote(cfg.task)} "
           f"--init {shlex.quote(str(cfg.folder))} --ask {shlex.quote(question)}")

def resume_command(cfg):
    """The command that continues a run, with its files of code."""
    words = f"{command()} --resume --out {shlex.quote(str(cfg.folder))}"
    for flag, file in ("task", cfg.task), ("algo", cfg.algo):
        if file.endswith(".py"):
            words += f" --{flag} {shlex.quote(file)}"
    return words

# ---------------------------------------------------------------- samples.jsonl

def log_step(agent, step, batch, done, logps):
    """Prints a step's line; when due also a group, and adds two to samples.jsonl. logps: grpo's."""
    cfg = agent.cfg
    step_line(step, cfg.total_steps, done)
    due = step in (1, cfg.total_steps) or step % cfg.save_every == 0
    if dist.rank() > 0 or not due:
        return
    for which, rows in chosen(cfg, step, batch).items():
        group = passes.select(batch, rows, batch.ids.size(1))
        with torch.compiler.set_stance("force_eager"):      # so few rows would be compiled again
            new_logp, _ = logps(agent.policy, group, cfg)
            entropy = passes.entropies(agent.policy, group, cfg)
        tensors = {n: x.cpu() for n, x in vars(group).items() if isinstance(x, torch.Tensor)}
        components = {n: x.cpu() for n, x in group.components.items()}
        group = dataclasses.replace(group, **tensors, components=components)
        if which == "spread":
            print_group(group, agent.encoding)
        found = record(agent, group, new_logp.cpu(), entropy.cpu())
        files.append(cfg.folder / "samples.jsonl", {"step": step, "which": which, **found})

def chosen(cfg, step, batch):
    """The rows of up to two of this rank's groups: of the widest spread of rewards, and another."""
    grid, _ = passes.grid(batch.groups)
    groups = [rows[rows >= 0] for rows in grid]
    if not groups:
        return {}
    rewards = batch.reward.sum(1).double().cpu()
    spread = [rewards[rows].std(correction=0).item() for rows in groups]
    found = {"spread": groups.pop(spread.index(max(spread)))}
    if groups:
        found["random"] = dist.rng(cfg, "samples", step).choice(groups)
    return found

def record(agent, batch, new_logp, entropy):
    """What samples.jsonl holds of a group, a Batch on the host, token by token."""
    mask, ends = batch.mask, batch.ends & batch.mask
    found = {
        "prompt": batch.problems[0].prompt,
        "completions": batch.texts,
        "finished": batch.finished.tolist(),
        "rewards": rounded(batch.reward.sum(1)),
        "parts": {name: rounded(x) for name, x in batch.components.items() if name != "reward"},
        "tokens": [pieces(agent.encoding, row[on].tolist()) for row, on in zip(batch.ids, mask)],
        "advantages": numbers(batch.adv, mask),
        "logp": numbers(batch.logp, mask),
        "new_logp": numbers(new_logp, mask),
        "ref_logp": None if batch.ref_logp is None else numbers(batch.ref_logp, mask),
        "entropy": numbers(entropy, mask),
        "ends": [end[on].nonzero()[:, 0].tolist() for end, on in zip(ends, mask)],
        "step_rewards": numbers(batch.reward, ends)}
    if hasattr(batch.problems[0], "answer"):
        found["answer"] = str(batch.problems[0].answer)
    if hasattr(agent.task, "reply"):    # the number of tokens sampled before each reply
        found["replies"] = [passes.replies_after(row) for row in mask]
    return found

def numbers(x, where):
    """For each row of x (n, T) its numbers in the mask `where` (n, T)."""
    return [rounded(row[on]) for row, on in zip(x, where)]

def rounded(x):
    """The numbers of a tensor (n,), to four decimals."""
    return [round(value, 4) for value in x.tolist()]

# --------------------------------------------------------------- the statistics

def statistics(batch, dead):
    """The logged statistics of a rollout, means over all ranks; dead (P,) says which groups are."""
    stats = dict(batch.components)
    stats["accuracy"] = stats.pop("correct")
    # The mean of -log pi. It is no entropy bonus: as a loss its expected gradient is 0.
    entropy, _ = dist.mean_and_std(-batch.logp[batch.mask])
    stats |= {"reward": batch.reward.sum(1), "length": batch.mask.sum(1),
              "finished": batch.finished, "entropy": entropy}
    if len(dead) < len(batch.ids) or not len(dead):  # one completion per prompt is no group
        stats["dead_groups"] = dead
    if any(isinstance(text, list) for text in batch.texts):  # of the policy's
        said = [float(len(text[::2])) for text in batch.texts]
        stats["turns"] = torch.tensor(said, device=batch.ids.device)
    if batch.value is not None:  # 1: predicts all returns; 0: only their mean
        _, error = dist.mean_and_std((batch.returns - batch.value)[batch.mask])
        _, spread = dist.mean_and_std(batch.returns[batch.mask])
        stats["explained_variance"] = 1 - (error / spread.clamp(min=1e-4)).square()
    return dist.means(stats)

class Clock:
    """Takes the times of a step, from when it is made."""

    def __init__(self):
        self.began, self.judged = time.perf_counter(), data.SPENT[0]

    def has_sampled(self):
        """Notes that the rollout has ended."""
        self.sampled = time.perf_counter()
        self.judging = data.SPENT[0] - self.judged

    def speeds(self, batch):
        """Seconds and speeds, of the rank that judged longest: all wait for it."""
        times = self.judging, self.sampled - self.began, time.perf_counter() - self.began
        judging, rollout, whole = max(dist.gather(times))
        tokens = dist.all_reduce(batch.mask.sum()).item()
        return {"seconds": whole, "reward_seconds": judging,
                "rollout_tok_s": tokens / (rollout - judging),
                "update_tok_s": tokens / (whole - rollout)}

def schedules(agent):
    """The statistics of a step that schedules may change: learning rate and KL coefficient."""
    rate = {"lr": agent.opt.param_groups[0]["lr"]}
    return rate | ({"beta": agent.beta} if agent.cfg.applies_kl else {})

def evaluate(agent, problems, generate):
    """Shares of the problems solved, by grpo.generate: greedily, by at least one of k samples
    (pass@k), and by the majority vote of k samples (maj@k), for k = 1, 2, 4, ... to --samples."""
    cfg = agent.cfg
    rows = cfg.prompts * cfg.group  # at a time: as many as a step has
    greedy, sampled = [], []
    for some in chunks("greedy evaluation", problems, rows):
        greedy.append(generate(agent, some, 1))
    if greedy:
        frame, prompt = agent.encoding.frame, greedy[0].problems[0].prompt
        whole = frame.before + prompt + frame.after + completion_of(greedy[0])
        print0(f"    {on_one_line(whole)}")
    for some in chunks("evaluation", [*enumerate(problems)], max(1, rows // cfg.samples)):
        u = [dist.uniform(dist.rng(cfg, "evaluate", i), cfg.samples, cfg.max_new) for i, _ in some]
        sampled.append(generate(agent, [p for _, p in some], cfg.samples, u=torch.cat(u)))
    return solved(agent.task, greedy, sampled, cfg.samples)

def solved(task, greedy, sampled, n):
    """The shares of problems solved, by all ranks' Batches; completions cut off do not vote. Of a
    component that is only logged, the mean over the samples: its share at 1."""
    total = Counter(dict.fromkeys(("greedy", *shares([0] * n, [""] * n)), 0.0))
    for batch in greedy:
        total["greedy"] += sum(batch.components["correct"].tolist())
    for batch in sampled:
        right = batch.components["correct"].tolist()
        votes = [answer_of(task, text) if finished else ""
                 for text, finished in zip(batch.texts, batch.finished.tolist())]
        for i in range(0, len(right), n):
            for name, x in shares(right[i:i + n], votes[i:i + n]).items():
                total[name] += x
        for name, x in batch.components.items():
            if "reward" in batch.components and name not in ("correct", "reward"):
                total[f"{name}@1"] += x.sum().item() / n
    total["problems"] = sum(len(batch.ids) for batch in greedy)
    whole = Counter()
    for of_rank in dist.gather(total):
        whole.update(of_rank)
    problems = whole.pop("problems")
    return {name: x / problems for name, x in whole.items()} | {"held_out": problems}

def shares(right, answers):
    """pass@k and maj@k of one problem, for k = 1, 2, 4, ... and n; maj@1 would equal pass@1."""
    n = len(right)
    ks = [1 << i for i in range(n.bit_length()) if 1 << i < n] + [n]
    return {f"pass@{k}": pass_at(k, right) for k in ks} | {
        f"maj@{k}": majority_at(k, right, answers) for k in ks[1:]}

def pass_at(k, right):
    """The expected best of k of these samples, drawn without replacement (unbiased: 2107.03374)."""
    best = sum(math.comb(i, k - 1) * x for i, x in enumerate(sorted(right)))
    return best / math.comb(len(right), k)

def majority_at(k, right, answers):
    """The share of sets of k samples whose most frequent answer, the first of equals, is right."""
    sets, solved = range(0, len(right) - k + 1, k), 0.0
    for i in sets:
        votes = answers[i:i + k]
        most = Counter(answer for answer in votes if answer).most_common(1)
        solved += right[i + votes.index(most[0][0])] if most else 0.0
    return solved / len(sets)

# --------------------------------------------------------------------- the page

PAGE = Path(__file__).parent / "page"
MOST = 3_000_000  # about as many bytes of samples.jsonl on one page, over all its runs
DUE = {}  # when the page of a folder may be rewritten: that takes 1 % of the time

def refresh(folder, last=True):
    """Rewrites the report of a run, if due or the last time; the run goes on if that fails."""
    began = time.perf_counter()
    if dist.rank() == 0 and (last or began >= DUE.get(folder, 0)):
        try:
            write([folder])
        except (UserError, OSError) as e:
            print0(f"note: no report: {e}")
        DUE[folder] = began + 100 * (time.perf_counter() - began)

def write(folders, out=""):
    """Writes report.html on a run, or comparison.html, into `out` or the first folder; its path."""
    path = Path(out or folders[0]) / f"{'report' if len(folders) == 1 else 'comparison'}.html"
    text = page([run_of(Path(folder), MOST // len(folders)) for folder in folders])
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, text)
    return path

def page(runs):
    """The page on some runs; with `<` escaped no text of theirs ends the script element."""
    text = json.dumps(data.strict(runs), separators=(",", ":")).replace("<", "\\u003c")
    def part(found):
        return text if found[1] == "data" else (PAGE / found[1]).read_text("utf-8")
    return re.sub(r"\{\{(.+?)\}\}", part, (PAGE / "page.html").read_text("utf-8"))

def run_of(folder, most):
    """What the page shows of a run: about `most` bytes of samples, those of every n-th step."""
    path = folder / "samples.jsonl"
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"no run in {folder}")
    steps = [*dict.fromkeys(step for step, _ in lines(path) if step)]
    size = path.stat().st_size if steps else 1
    kept = {*steps[::size // -most]}  # that is rounded to the larger step
    return dict(name=folder.resolve().name, path=str(folder), about=files.about(folder),
                steps=len(steps), metrics=[*parsed(folder / "metrics.jsonl")],
                samples=[*parsed(path, kept)])

def lines(path):
    """Yields the step, or None, and the text of each line of a log that is complete."""
    if path.is_file():
        with open(path, "rb") as f:
            for line in f:
                if line.endswith(b"\n"):
                    step = re.match(rb'\{"step": (\d+)', line)
                    yield step and int(step[1]), line

def parsed(path, steps=None):
    """Yields the lines of some steps, or all; of a damaged one there is a note."""
    for n, (step, line) in enumerate(lines(path), 1):
        if not steps or step is None or step in steps:
            try:
                yield data.read_json(line, f"{path}, line {n},")
            except UserError as e:
                print0(f"note: {e}")
