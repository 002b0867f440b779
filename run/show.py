"""Terminal output."""
import contextlib
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

import data
from data import UserError, tokenizer, turns
from run import dist, passes

def print0(text):
    """Prints on the first rank."""
    if dist.rank() == 0:
        say(text, sys.stdout)

def say(text, stream):
    """Prints to a stream. If it is closed (None), or nobody reads it any more (`| head`), the run
    goes on silently."""
    if stream is None:
        return
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

@contextlib.contextmanager
def exit_code():
    """A context for a whole command: a signal or an error ends it with one line instead of a
    traceback, and with an exit code."""
    code = 0
    if hasattr(sys.stdout, "reconfigure"):          # a notebook's has no such method
        sys.stdout.reconfigure(errors="replace")    # characters that the terminal cannot show
    try:
        yield
    except dist.Stopped as when:
        print0(f"stopped {when}; continue with: {when.command}")
        code = 128 + when.number
    except KeyboardInterrupt:           # in --eval_only or --ask: nothing to save
        code = 130
    except (UserError, OSError) as e:           # OSError: a full disk, a path too long
        if data.is_executed(e) and not isinstance(e, UserError):
            raise                               # of an algorithm's own code
        say(f"error: {on_one_line(str(e))}", sys.stderr)
        code = 2
    dist.exit_with(code)

# -------------------------------------------------------------------------------- texts of models

CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}

def printable(text):
    """A model's text with visible control characters, as they could change a terminal."""
    return text.translate(CONTROLS)

def on_one_line(text):
    """A text with visible line breaks and control characters."""
    return printable(text).replace("\n", " ⏎ ")

def coloured(piece, adv):
    """A token's text. In a terminal it is green if its advantage is positive, red if it is
    negative, and grey if it is 0."""
    piece = on_one_line(piece)
    if not sys.stdout or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return piece
    code = 90
    if adv != 0:
        code = 32 if adv > 0 else 31
    return f"\x1b[{code}m{piece}\x1b[0m"

def group(batch, rows, encoding):
    """Prints the distinct completions of a group (`rows` of a rollout) and how often each was
    sampled, tokens coloured by advantage: at most four, with the highest and lowest rewards."""
    prompt = on_one_line(batch.problems[rows.start].prompt)
    if len(prompt) > 60:
        prompt = f"... {prompt[-40:]}"
    reward = batch.reward.sum(1).tolist()
    alike = {}                          # the rows of each completion and reward
    for row in range(rows.start, rows.stop):
        alike.setdefault((reward[row], str(batch.texts[row])), []).append(row)
    distinct = sorted(alike.values(), key=lambda same: -reward[same[0]])
    if len(distinct) > 4:
        distinct = distinct[:2] + distinct[-2:]
    for same in distinct:
        row = same[0]
        mask = batch.mask[row]
        adv = batch.adv[row][mask].tolist()
        pieces = tokenizer.pieces(encoding, batch.ids[row][mask].tolist())
        text = [*map(coloured, pieces, adv)]
        places = passes.replies_after(mask)
        for n, reply in zip(reversed(places), reversed(batch.texts[row][1::2])):
            text.insert(n, f"[{on_one_line(reply)}]")
        text = "".join(text)
        of = "" if max(adv) - min(adv) < 0.005 else "of the first token "
        print0(f"    {len(same)}x {prompt}{text}   reward {reward[row]:g}  "
               f"advantage {of}{adv[0]:+.2f}")

# ------------------------------------------------------------------------------------ a run's lines

def header(cfg, encoding, policy, problems, held_out):
    """Prints what a run works on, and with."""
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    print0(f"{millions:.2f}M parameters on {dist.device_of(cfg)} in {dist.dtype_of(cfg)}; "
           f"{len(problems)} problems, {len(held_out)} held out; "
           f"{cfg.prompts} x {cfg.group} rows a step, --lr {cfg.lr:g}")
    if cfg.lr == type(cfg).lr and millions < 100:
        print0(f"note: --lr {cfg.lr:g} is the paper's, for a model of 7 billion parameters; one as "
               f"small as this may need 1e-4")
    if cfg.adv_scale == "group" and cfg.baseline in ("none", "value"):
        print0(f"note: with --baseline {cfg.baseline}, advantages are still divided by the group's "
               f"std; --adv_scale none leaves that out")
    if cfg.kl == "reward" and cfg.estimator == "k1":
        print0("note: --estimator k1, as in the reward no other has the gradient of the KL")
    if cfg.reward != "rule" and cfg.adv_scale == "none":
        print0("note: --adv_scale none, as with a learned reward the std of a group whose "
               "completions are all good is only the model's noise")
    if cfg.compile:
        print0("compiling as it goes: the first evaluation and the first steps take longer")
    if cfg.init and Path(cfg.init) != Path(data.__file__).parent / "warm_start":
        frame = encoding.frame
        why = "its chat template"
        if frame.chat in ("", "none"):
            why = "--chat none" if frame.chat else "no chat template"
        print0(f"prompts are sent as {frame.before + '{}' + frame.after!r} ({why})")
    for note in encoding.notes:
        print0(f"note: {note}")

DECIMALS = dict(reward=3, accuracy=3, length=1, kl=3, entropy=3, dead_groups=2)

def step_line(step, total, done):
    """Prints a line for a step, from the statistics of the steps `done`, with the time left; and a
    warning after three steps in a row without differences within groups, or whose completions were
    mostly cut off."""
    stats = done[-1]
    shown = [f"{name} {stats[name]:.{DECIMALS[name]}f}  " for name in DECIMALS if name in stats]
    if stats["finished"] < 0.9:
        shown.append(f"finished {stats['finished']:.2f}  ")
    seconds = statistics.median(stats["seconds"] for stats in done[-9:])
    print0(f"step {step}/{total}  {''.join(shown)}{stats['seconds']:.2f} s  "
           f"left {clock(seconds * (total - step))}")
    if in_a_row(stats.get("dead_groups") == 1 for stats in done) == 3:
        print0("warning: for 3 steps in a row all rewards of every group were equal, from which "
               "nothing is learned: see \"All groups are dead\" in docs/troubleshooting.md")
    if in_a_row(stats["finished"] < 0.5 for stats in done) == 3:
        print0("warning: for 3 steps in a row most completions were cut off at --max_new, and "
               "earned at most 0: see \"No completion ends\" in docs/troubleshooting.md")

def in_a_row(held):
    """How many of the last were true."""
    n = 0
    for x in held:
        n = n + 1 if x else 0
    return n

def percentages(results):
    """Shares by name on one line; of pass@k and maj@k only pass@1 and the largest k."""
    most = max(int(name.partition("@")[2] or 0) for name in results)
    shown = dict.fromkeys(("greedy", "pass@1", f"pass@{most}", f"maj@{most}"))
    return "  ".join(f"{name} {results[name]:.1%}" for name in shown if name in results)

def results(found):
    """Prints the results of an evaluation."""
    print0(percentages(found))

def dialogue(encoding, question, batch, episodes=None):
    """A question and its completion, for a terminal: what is not the policy's is in brackets."""
    [completion] = turns.texts(encoding, batch, episodes)
    if episodes is not None:
        completion = "".join(f"[{turn}]" if i % 2 else turn for i, turn in enumerate(completion))
    between = "\n" if encoding.frame.after else ""
    return printable(question + between + completion)

def typed_reply(problem, said):
    """The `reply` of the person at the keyboard: a line, the end of the episode if it is empty."""
    print0(printable(said[-1]))
    print("reply, or nothing to end: ", end="", flush=True)
    return sys.stdin.readline().rstrip("\n")

def reward_model_quality(measures):
    """Prints the quality of a fitted reward model on held-out problems."""
    print0(f"reward model  held out: accuracy {measures['rm_accuracy']:.1%}  "
           f"calibration error {measures['rm_error']:.3f}")

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

def clock(seconds):
    """Seconds as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

def farewell(cfg, question):
    """Prints where the report and the model are, and how to ask the model a question."""
    print0(f"curves, and completions token by token: {cfg.folder / 'report.html'}")
    if len(question) > 60 or "\n" in question:
        question = "QUESTION"
    print0(f"the model is in {cfg.folder}; ask it: python grpo.py --task {shlex.quote(cfg.task)} "
           f"--init {shlex.quote(str(cfg.folder))} --ask {shlex.quote(question)}")

def resume_command(cfg):
    """The command that continues a run. It must name files with code, as they are executed."""
    command = f"python grpo.py --resume --out {shlex.quote(str(cfg.folder))}"
    for flag, file in ("task", cfg.task), ("algo", cfg.algo):
        if file.endswith(".py"):
            command += f" --{flag} {shlex.quote(file)}"
    return command

def chunks(name, items, size):
    """Yields the items `size` at a time, except chunks in which this rank has no share, and prints
    progress if it takes long. Raises Stopped on a signal; the work then begins again."""
    told = progress(name, len(items))
    for i in range(0, len(items), size):
        if dist.stop_asked():
            raise dist.Stopped(f"in the {name}, which will begin again")
        told(i)
        if dist.of_rank(items[i:i + size]):
            yield items[i:i + size]
