"""Signals: a run that is asked to stop ends after a step, saved."""
import contextlib
import os
import signal
import threading

from torch import distributed

from data import Ended, UserError
from run import dist

class Stopped(Exception):
    """A signal asked the run to stop; `stoppable` adds its number and the command to go on."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)    # the last: the terminal is closed
ASKED = []      # signals received: the current step is finished and saved first

def ask_to_stop(number, frame):
    """A handler: notes the first signal, exits at the second."""
    if ASKED and number != signal.SIGHUP:   # of which a shell and its terminal send two
        raise Ended(128 + number)
    ASKED.append(number)
    with contextlib.suppress(OSError):  # a closed terminal
        os.write(2, b"stopping after this step; a second signal ends it at once\n")

def in_a_fork():
    """SIGTERM alone ends a process that a task's code forks, as a pool expects."""
    for number in SIGNALS:
        if signal.getsignal(number) is ask_to_stop:
            action = signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
            signal.signal(number, action)

os.register_at_fork(after_in_child=in_a_fork)

def stop_asked():
    """The number of a signal that any rank received; 0 without one."""
    return dist.largest(max(ASKED, default=0))

def stop_here(work):
    """Raises Stopped if a signal came amid work that will begin again."""
    if stop_asked():
        raise Stopped(f"in the {work}, which will begin again")

@contextlib.contextmanager
def stoppable(command=""):
    """A context in which signals ask the run to stop; UserError if another rank has ended."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, ask_to_stop) for number in SIGNALS
                if main and (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)}
    try:
        yield
    except Stopped as when:
        when.number, when.command = stop_asked(), command
        raise
    except RuntimeError as e:
        of_ranks = isinstance(e, distributed.DistError) or "gloo" in str(e)
        if dist.ranks() == 1 or not of_ranks:  # gloo's errors have no type of their own
            raise
        raise UserError("another rank has ended; continue from the last checkpoint with "
                        "--resume") from e
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        ASKED.clear()
