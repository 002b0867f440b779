"""What is printed, mostly by the first rank alone, and progress."""
import os
import re
import shlex
import sys
import time
from pathlib import Path

from data import printable
from run import dist
from run.signals import stop_here

def print0(text, coloured=False):
    """Prints on the first rank."""
    if dist.rank() == 0:
        say(text, sys.stdout, coloured)

def say(text, stream, coloured=False):
    """Prints what is `printable`, unless the stream is closed (None) or not read (`| head`)."""
    if stream is None:
        return
    text = text if coloured else printable(str(text))
    if has_colours(stream):  # bold
        text = re.sub(r"^warning:|accuracy \d\.\d+", "\x1b[1m\\g<0>\x1b[0m", text)
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

def has_colours(stream):
    return stream is not None and stream.isatty() and "NO_COLOR" not in os.environ

def command():
    """How this process was started, for commands to paste: `python grpo.py`, or with its path."""
    script = sys.argv[0] if Path(sys.argv[0]).name == "grpo.py" else "grpo.py"
    return f"python {shlex.quote(script)}"

def duration(seconds):
    """Seconds as m:ss, or h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"

def progress(name, total, every=10):
    """A function that prints how much is done, and the time left, every `every` seconds."""
    began = said = time.time()
    def told(done, more="", now=False):
        nonlocal said
        if now or time.time() - said > every:
            said = time.time()
            left = (said - began) / max(done, 1) * (total - done)
            print0(f"{name} {done}/{total}  {more}left {duration(left)}")
    return told

def chunks(name, items, size, stops=False):
    """Yields this rank's share, if any, of `size` items at a time; prints progress, may stop."""
    told = progress(name, len(items))
    for i in range(0, len(items), size):
        told(i)
        if stops:
            stop_here(name)
        if share := dist.of_rank(items[i:i + size]):
            yield share
