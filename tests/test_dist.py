"""Devices, random streams, signals, and what ranks agree on: each function alone."""
import ast
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed
import torch.nn.functional as F
from conftest import ROOT
from test_oracle import on_ranks

from data import UserError, call
from grpo import Config
from run import dist, passes, signals
from run.device import device_of, dtype_of


def two_ranks(monkeypatch, f, first, second):
    """What f gives on each of two ranks."""
    return on_ranks(2, lambda rank: f(*(first, second)[rank]), monkeypatch)


def result_or_fault(f, *given):
    try:
        return f(*given)
    except UserError as e:
        return str(e)


# -------- the device

@pytest.mark.parametrize("asked, cuda, local, device", [
    ("auto", True, "", "cuda:0"), ("auto", True, "3", "cuda:3"), ("cuda", True, "3", "cuda:3"),
    ("auto", False, "3", "cpu"), ("cpu", True, "3", "cpu"), ("cuda", False, "", None),
    ("mps", True, "", None), ("mps", True, "", "mps")])
def test_the_best_device_there_is_unless_another_is_asked_for(
        asked, cuda, local, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: device == "mps")
    monkeypatch.setenv("LOCAL_RANK", local)
    if not local:
        monkeypatch.delenv("LOCAL_RANK")
    if device is None:
        with pytest.raises(UserError, match=f"--device {asked} is not available"):
            device_of(Config(device=asked))
        return
    assert device_of(Config(device=asked)) == torch.device(device)
    auto = "bfloat16" if "cuda" in device else "float32"
    for dtype, found in (("auto", auto), ("float32", "float32"), ("bfloat16", "bfloat16")):
        assert dtype_of(Config(device=asked, dtype=dtype)) == found


@pytest.mark.parametrize("version, own, says", [
    ((3, 11), {}, "1000 1"), ((3, 11), {"GOMP_SPINCOUNT": "7"}, "7 1"),
    ((3, 10, 9), {}, "error: Python 3.11 or newer is needed")])
def test_what_comes_before_torch_is_imported(version, own, says):
    """Threads that wait soon give their core away, as OpenMP reads then; what the user has set
    stays. An older Python can parse the file."""
    ast.parse((ROOT / "grpo.py").read_text(), feature_version=(3, 8))
    code = f"""
import os, sys
sys.modules["torch"], sys.version_info = None, {version}
try:
    import grpo
except ImportError:
    print(os.environ["GOMP_SPINCOUNT"], os.environ["THP_MEM_ALLOC_ENABLE"])"""
    left_out = "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"
    env = {name: x for name, x in os.environ.items() if name not in left_out} | own
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert (done.stdout + done.stderr).decode().strip() == says


MALLOC = """
import ctypes
from run import caches, device
class Info(ctypes.Structure):       # first: the heap
    _fields_ = [("numbers", ctypes.c_size_t * 10)]
libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype, libc.malloc.restype = Info, ctypes.c_void_p
device.prepare()
for size in 2 ** 22, 2 ** 24:
    heap = libc.mallinfo2().numbers[0]
    libc.free(ctypes.c_void_p(libc.malloc(size)))
    print(libc.mallinfo2().numbers[0] - heap > size / 2)
caches.release()
print(heap - libc.mallinfo2().numbers[0] > 2 ** 21)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_blocks_of_up_to_8_mb_are_kept_until_released():
    done = subprocess.run([sys.executable, "-c", MALLOC], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\nFalse\nTrue\n", done.stderr


def test_a_start_prepares_the_process():
    torch.backends.cuda.enable_cudnn_sdp(True)
    dist.start(Config(device="cpu"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# -------- the ranks

@pytest.mark.parametrize("first, second", [
    ([1.0, 4.0, 9.0], [2.0]), ([1.0, 5.0], []), ([7.0], []), ([], []), ([8e3, 8e3 + 1], [])])
def test_mean_and_std_are_of_the_numbers_of_all_ranks(first, second, monkeypatch):
    whole = first + second or [0.0]
    want = pytest.approx([statistics.fmean(whole), statistics.pstdev(whole)])
    given = [torch.tensor(first)], [torch.tensor(second)]
    for got in two_ranks(monkeypatch, dist.mean_and_std, *given):
        assert [x.item() for x in got] == want


def test_means_are_of_their_names_whatever_their_order(monkeypatch):
    one = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([5.0])}
    two = {"b": torch.tensor([7.0]), "a": torch.tensor([4.0, 4.0])}
    assert two_ranks(monkeypatch, dist.means, [one], [two]) == [{"a": 3.0, "b": 6.0}] * 2
    del two["b"]
    for said in two_ranks(monkeypatch, result_or_fault, [dist.means, one], [dist.means, two]):
        assert "other ranks have other components" in said


@pytest.mark.parametrize("error, kind", [
    (RuntimeError("a shape"), RuntimeError), (distributed.DistBackendError("NCCL"), UserError),
    (RuntimeError("[gloo] Connection closed by peer"), UserError)])
def test_the_end_of_another_rank_is_told_from_other_errors(error, kind, monkeypatch):
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    with pytest.raises(kind), signals.stoppable():
        raise error


# -------- random streams

def test_a_stream_is_of_its_seed_purpose_and_step():
    cfg = Config(seed=7)
    assert dist.rng(cfg, "fit").random() == random.Random("7/fit/0").random()
    streams = [(cfg, "fit", 0), (cfg, "fit", 1), (cfg, "update", 0), (Config(seed=8), "fit", 0)]
    assert len({dist.rng(*stream).random() for stream in streams}) == 4


def test_numbers_are_the_same_on_every_machine():
    """To the bit, those of numpy; a second draw from the stream is another one."""
    source, seeds = random.Random(0), random.Random(0)
    for shape in ((2, 2), (2,)):
        want = np.random.default_rng(seeds.getrandbits(64)).random(shape)
        got = dist.uniform(source, *shape)
        assert got.dtype == torch.float64 and got.tolist() == want.tolist()


# -------- signals

def handlers():
    return [signal.getsignal(number) for number in signals.SIGNALS]


def test_a_second_signal_is_obeyed_at_once(capfd):
    """With the code of a shell; what stops after the first, which is told, bears its number."""
    before = handlers()
    assert signals.ask_to_stop not in before
    with pytest.raises(signals.Stopped) as stopped, signals.stoppable("a command"):
        assert handlers() == [signals.ask_to_stop] * 3 and signals.stop_asked() == 0
        signal.raise_signal(signal.SIGINT)
        assert signals.stop_asked() == 2
        assert re.fullmatch("stopping after this step;.*\n", capfd.readouterr().err)
        signal.raise_signal(signal.SIGHUP)          # of a terminal that closes, also twice
        with pytest.raises(SystemExit) as ended:
            call(signal.raise_signal, "a reward", signal.SIGTERM)
        assert ended.value.code == 143
        raise signals.Stopped("here")
    assert (stopped.value.number, stopped.value.command) == (2, "a command")
    assert handlers() == before and signals.stop_asked() == 0


def test_a_closed_terminal_stops_a_run_unless_it_is_ignored(monkeypatch):
    """As nohup has it; nothing can be written; a shell sends it twice."""
    monkeypatch.setattr(os, "write", lambda *given: os.stat("/none"))
    with pytest.raises(signals.Stopped) as stopped, signals.stoppable():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        raise signals.Stopped("here")
    assert stopped.value.number == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.stoppable():
        signal.raise_signal(signal.SIGHUP)
        assert signals.stop_asked() == 0
    signal.signal(signal.SIGHUP, before)


def test_a_run_outside_the_main_thread_hears_no_signals():
    before, found = handlers(), []

    def run():
        with signals.stoppable():
            found.append(handlers())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_fork_gives_up_the_handlers_of_a_run_alone():
    """Where a task has set its own, it keeps it."""
    def own(number, frame):
        pass
    before = handlers()
    signals.in_a_fork()
    assert handlers() == before
    with signals.stoppable():
        signals.in_a_fork()
        assert handlers() == [signal.SIG_IGN, signal.SIG_DFL, signal.SIG_IGN]
        signal.signal(signal.SIGTERM, own)
        signals.in_a_fork()
        assert handlers() == [signal.SIG_IGN, own, signal.SIG_IGN]


# -------- sampler and trainer must agree

def gap(gaps, n=100, dtype=None):
    """What is found of a row of which the first n tokens were sampled; None if it is too large."""
    logp = F.pad(torch.as_tensor(gaps, dtype=torch.float64), (0, max(0, n - len(gaps))))[None]
    mask = (torch.arange(logp.size(1)) < n).expand(2, -1)
    row = SimpleNamespace(mask=mask, logp=torch.zeros_like(logp), on_policy=torch.arange(2) < 1)
    try:
        return passes.checked_gap([(row, logp)], dtype)
    except UserError as e:
        assert str(e).startswith("sampler and trainer disagree")


@pytest.mark.parametrize("dtype, most, mean", [(None, 1e-3, 1e-4), (torch.bfloat16, 2.0, 0.1)])
def test_gaps_may_be_as_large_as_rounding_explains_and_no_larger(dtype, most, mean):
    """A single one, or all of them on average; columns without a sampled token do not count."""
    def found(*given):
        return gap(*given, dtype=dtype)
    assert found([most]) == most and found([], 0) == 0
    assert found([most * (1 + 1e-6)]) is found([float("nan")]) is found([1.5 * mean], 1) is None
    alike = [mean * (1 - 1e-6)] * 100
    assert found(alike) == pytest.approx(mean, rel=1e-5)
    assert found([mean * (1 + 1e-6)] * 100 + [0.0] * 900) is None


@pytest.mark.parametrize("first, second, largest", [
    (([1e-5], 1), ([5e-5, 0], 1), 5e-5), (([0], 9), ([4e-4], 1), 4e-4),
    (([0], 1), ([4e-4], 9), 4e-4), (([0], 1), ([4e-4], 1), None)])
def test_gaps_are_over_the_tokens_of_all_ranks(first, second, largest, monkeypatch):
    """Both go on, or neither."""
    found = two_ranks(monkeypatch, gap, first, second)
    assert found == [None if largest is None else pytest.approx(largest)] * 2


def test_each_tenth_of_a_fit_is_told(monkeypatch):
    told, module = [], torch.nn.Linear(1, 1)
    monkeypatch.setattr(passes, "progress", lambda name, total: lambda *x: told.append(x[::2]))
    passes.supervised_fit("a fit", module, lambda step: (), 20, 6.0)
    assert told == [(n, n % 2 == 0) for n in range(1, 21)]
