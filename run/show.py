"""Terminal output."""
import contextlib
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

import data
from data import UserError, tokenizer
from run import dist

def print0(text):
    """Prints on the first rank. If stdout is closed, the run continues silently."""
    if dist.world()[0] == 0:
        say(text, sys.stdout)

def error(e):
    """Prints an error to stderr, as one line."""
    say("error: " + on_one_line(str(e)), sys.stderr)

@contextlib.contextmanager
def exit_code():
    """A context for a whole command: a signal or an error ends it with one line instead of a
    traceback, and with an exit code."""
    code = 0
    try:
        yield
    except dist.Stopped as when:
        print0(f"stopped {when}; continue with: {when.command}")
        code = 128 + when.number
    except KeyboardInterrupt:           # in --eval_only or --ask: nothing to save
        code = 130
    except (UserError, OSError) as e:           # OSError: a full disk, a path too long
        error(e)
        code = 2
    dist.exit_with(code)

def say(text, stream):
    """Prints to a stream that may be closed, or a pipe to a `head` that has ended."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:             # the rest of its buffer is discarded too
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

def clock(seconds):
    """Seconds as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

def progress(name, total, every=10):
    """A function that prints progress and the time left, at most once in `every` seconds unless
    told to print now."""
    began = said = time.time()
    def told(done, more="", now=False):
        """Prints that `done` items are done, then `more`."""
        nonlocal said
        if now or time.time() - said > every:
            said = time.time()
            left = (said - began) / max(done, 1) * (total - done)
            print0(f"{name} {done}/{total}  {more}left {clock(left)}")
    return told

def percentages(results):
    """Shares by name on one line; of pass@k and maj@k only pass@1 and the largest k."""
    most = max(int(name.partition("@")[2] or 0) for name in results)
    shown = dict.fromkeys(("greedy", "pass@1", f"pass@{most}", f"maj@{most}"))
    return "  ".join(f"{name} {results[name]:.1%}" for name in shown if name in results)

def header(agent, problems, held_out):
    """Prints what a run works on, and with."""
    cfg, (device, dtype, compiled) = agent.cfg, dist.resolve(agent.cfg)
    millions = sum(p.numel() for p in agent.policy.parameters()) / 1e6
    print0(f"{millions:.2f}M parameters on {device} in {dtype}; {len(problems)} problems, "
           f"{len(held_out)} held out; {cfg.prompts} x {cfg.group} rows a step, --lr {cfg.lr:g}")
    if cfg.lr == type(cfg).lr and millions < 100:
        print0(f"note: --lr {cfg.lr:g} is the paper's, for a model of 7 billion parameters; one as "
               f"small as this may need 1e-4")
    if cfg.adv_scale == "group" and cfg.baseline in ("none", "value"):
        print0(f"note: with --baseline {cfg.baseline}, advantages are still divided by the group's "
               f"std; --adv_scale none leaves that out")
    if cfg.kl == "reward" and cfg.estimator == "k1":
        print0("--kl reward implies --estimator k1, whose gradient there is that of the KL")
    if cfg.learns_reward and cfg.adv_scale == "none":
        print0(f"--reward {cfg.reward} implies --adv_scale none: once all completions of a group "
               f"are good, their std is only the model's noise")
    if compiled:
        print0("compiling as it goes: the first evaluation and the first steps take longer")
    if cfg.init and Path(cfg.init) != Path(data.__file__).parent / "warm_start":
        frame = agent.encoding.frame
        why = {"": "no chat template", "none": "--chat none"}.get(frame.chat, "its chat template")
        print0(f"prompts are sent as {frame.before + '{}' + frame.after!r} ({why})")

def farewell(cfg, question):
    """Prints where the report and the model are, and how to ask the model a question."""
    print0(f"curves, and completions token by token: {cfg.folder / 'report.html'}")
    question = shlex.quote(question) if len(question) <= 60 and "\n" not in question else "QUESTION"
    print0(f"the model is in {cfg.folder}; ask it: python grpo.py --task {shlex.quote(cfg.task)} "
           f"--init {shlex.quote(str(cfg.folder))} --ask {question}")

def resume_command(cfg):
    """The command that continues a run. It must name files with code, as they are executed."""
    named = {"task": cfg.task, "algo": cfg.algo}.items()
    files = [f"--{name} {shlex.quote(file)}" for name, file in named if file.endswith(".py")]
    return " ".join(["python grpo.py --resume --out", shlex.quote(str(cfg.folder)), *files])

def step_line(step, total, done):
    """Prints a line for a step, from the statistics of the steps `done`, with the time left; and a
    warning after three steps in a row without differences within groups, or whose completions were
    mostly cut off."""
    stats, times = done[-1], [stats["seconds"] for stats in done]
    shown = dict(reward=3, accuracy=3, length=1, kl=3, entropy=3, dead_groups=2)    # name=decimals
    if stats["finished"] < 0.9:
        shown["finished"] = 2
    left = statistics.median(times[-9:]) * (total - step)
    print0(f"step {step}/{total}  "
           + "".join(f"{name} {stats[name]:.{digits}f}  " for name, digits in shown.items()
                     if name in stats)
           + f"{times[-1]:.2f} s  left {clock(left)}")
    warnings = {"all rewards of every group were equal": [s["dead_groups"] == 1 for s in done],
                "most completions were cut off at --max_new, and earned at most 0":
                [s["finished"] < 0.5 for s in done]}
    for text, held in warnings.items():
        if held[-3:] == [True] * 3 and held[-4:] != [True] * 4:
            print0(f"warning: for 3 steps in a row {text}")

def reward_model_quality(measures):
    """Prints the quality of a fitted reward model on held-out problems."""
    print0("reward model  held out: accuracy {rm_accuracy:.1%}  calibration error {rm_error:.3f}"
           .format(**measures))

CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}

def printable(text):
    """A model's text with visible control characters, as they could change a terminal."""
    return text.translate(CONTROLS)

def on_one_line(text):
    """A text with visible line breaks and control characters."""
    return printable(text).replace("\n", " ⏎ ")

def coloured(pieces, adv):
    """The texts of tokens on one line. In a terminal, green tokens have a positive advantage, red
    ones a negative one, grey ones 0."""
    pieces = [on_one_line(piece) for piece in pieces]
    if sys.stdout and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        codes = (32 if a > 0 else 31 if a < 0 else 90 for a in adv)
        pieces = [f"\x1b[{code}m{piece}\x1b[0m" for code, piece in zip(codes, pieces)]
    return "".join(pieces)

def group(batch, rows, encoding):
    """Prints the distinct completions of a group (`rows` of a rollout) and how often each was
    sampled, tokens coloured by advantage: at most four, with the highest and lowest rewards."""
    found, prompt = {}, on_one_line(batch.problems[rows.start].prompt)
    prompt = prompt if len(prompt) <= 60 else f"... {prompt[-40:]}"
    rewards = batch.reward[rows].sum(1).tolist()
    for i, (text, reward) in enumerate(zip(batch.texts[rows], rewards), rows.start):
        found.setdefault((-reward, text), []).append(i)
    distinct = [(-reward, at) for (reward, _), at in sorted(found.items(), key=lambda x: x[0][0])]
    for reward, at in distinct if len(distinct) <= 4 else distinct[:2] + distinct[-2:]:
        on = batch.mask[at[0]]
        adv, ids = batch.adv[at[0]][on].tolist(), batch.ids[at[0]][on].tolist()
        text = coloured(tokenizer.pieces(encoding, ids), adv)
        of = "" if max(adv) - min(adv) < 0.005 else "of the first token "
        print0(f"    {len(at)}x {prompt}{text}   reward {reward:g}  advantage {of}{adv[0]:+.2f}")
