"""The machine and the batches: each function alone, with a GPU, glibc and other ranks played."""
import ctypes
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from conftest import ROOT, agent_of, tiny_model

import reward
from data import UserError
from grpo import Batch, Config
from model import Block, ScalarHead, double
from run import dist, passes, report


def two_ranks(monkeypatch, f, first, second):
    """What f gives on each of two ranks, played by threads whose all_reduce waits for the other's."""
    here, meet, given, got, errors = threading.local(), threading.Barrier(2), {}, {}, []

    def gather(x):
        given[here.rank] = x
        meet.wait(10)
        both = [given[0], given[1]]
        meet.wait(10)
        return both

    def all_reduce(x, op=distributed.ReduceOp.SUM):
        both = torch.stack(gather(x))
        if op == distributed.ReduceOp.MIN:
            return both.amin(0)
        return both.sum(0) if op == distributed.ReduceOp.SUM else both.amax(0)

    def work(rank, args):
        here.rank = rank
        try:
            got[rank] = f(*args)
        except Exception as e:
            errors.append(e)
            meet.abort()                    # the other one need not wait
    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "rank", lambda: here.rank)
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    threads = [threading.Thread(target=work, args=x) for x in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return got[0], got[1]


# ------------------------------------------------------------------------------------ the device

@pytest.fixture
def gpus(monkeypatch):
    """A function that says whether there is a GPU, and which of them is this process's."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def there(cuda, local=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
    return there


@pytest.mark.parametrize("cuda, local, device, dtype", [
    (True, None, "cuda:0", "bfloat16"), (True, "3", "cuda:3", "bfloat16"), (False, "3", "cpu", "float32")])
def test_the_best_device_there_is(cuda, local, device, dtype, gpus):
    gpus(cuda, local)
    for asked in ("auto", device[:4].rstrip(":")):
        found = dist.device_of(Config(device=asked))
        assert found == torch.device(device) and found.index == torch.device(device).index
        assert dist.dtype_of(Config(device=asked)) == dtype


@pytest.mark.parametrize("cuda", [True, False])
def test_what_is_asked_for_counts_before_what_is_best(cuda, gpus):
    gpus(cuda)
    assert dist.device_of(Config(device="cpu")).type == "cpu" and dist.dtype_of(Config(device="cpu")) == "float32"
    for dtype in ("float32", "bfloat16"):
        assert dist.dtype_of(Config(dtype=dtype)) == dtype


def test_a_device_that_is_not_there(gpus):
    gpus(False)
    for kind in ("cuda", "mps"):
        with pytest.raises(UserError, match=f"^--device {kind} is not available on this machine$"):
            dist.device_of(Config(device=kind))


@pytest.mark.parametrize("asked", [True, False])
def test_modules_are_compiled_for_all_lengths_if_asked(asked, monkeypatch):
    """And up to 64 graphs may be made of them: prompts, tokens and training have their own."""
    options, config = [], SimpleNamespace(recompile_limit=8)
    monkeypatch.setitem(vars(torch), "_dynamo", SimpleNamespace(config=config))     # without its import
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: options.append((type(self), given)))
    monkeypatch.setattr(torch, "compile", lambda f, **given: options.append((f.__name__, given)) or f)
    dist.compile_all(Config(device="cpu", compile=asked), tiny_model(), ScalarHead(32, tiny_model()), ScalarHead(32))
    of_a_model = [(what, dict(dynamic=True)) for what in ("probs", "logps", Block, Block)]
    assert options == of_a_model * 2 * asked
    assert config.recompile_limit == (64 if asked else 8)


def test_a_sampler_gets_new_weights_where_its_old_ones_were():
    """A CUDA graph reads them from there."""
    policy, sampler = tiny_model(1), tiny_model(2).bfloat16()
    before = [p.data_ptr() for p in sampler.parameters()]
    dist.sync_sampler(agent_of(Config(), policy=policy, sampler=sampler))
    assert [p.data_ptr() for p in sampler.parameters()] == before
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(sampler.parameters(), policy.parameters(), strict=True))


def test_only_mps_has_no_float64():
    wide = [double(SimpleNamespace(device=torch.device(kind), float=lambda: 32, double=lambda: 64)) for kind in ("cpu", "cuda", "mps")]
    assert wide == [64, 64, 32]


# As glibc's malloc.h has them. A threshold of mmap is at most half of what a heap may be, 32 MiB.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


@pytest.mark.parametrize("known", [True, False])
def test_glibc_keeps_freed_memory(known, monkeypatch):
    """Where there is another C library, nothing happens."""
    calls = []

    def library(name):
        if name == "libc.so.6" and known:
            return SimpleNamespace(mallopt=lambda *given: calls.append(given))
        raise OSError(f"{name}: cannot open shared object file")
    monkeypatch.setattr(ctypes, "CDLL", library)
    dist.prepare()
    assert calls == [(TRIM_THRESHOLD, 2147483647), (MMAP_THRESHOLD, 33554432)] * known      # INT_MAX; 32 MiB


def test_stdout_replaces_what_it_cannot_show(monkeypatch):
    given = []
    for stdout in (SimpleNamespace(reconfigure=lambda **x: given.append(x)), SimpleNamespace()):
        monkeypatch.setattr(sys, "stdout", stdout)          # a notebook's has no such method
        with report.exit_code():
            pass
    assert given == [dict(errors="replace")]


# -------------------------------------------------------------------------------------- the ranks

@pytest.fixture
def torchrun(monkeypatch):
    """A process as torchrun starts it; what it is told of devices and groups."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(distributed, "init_process_group", calls.append)
    return calls


def test_ranks_on_gpus_join_by_nccl_each_with_its_own(torchrun):
    device = torch.device("cuda", 1)
    dist.start_ranks(device)
    assert torchrun == [device, "nccl"]


def test_ranks_on_cpus_join_by_gloo(torchrun, monkeypatch):
    dist.start_ranks(torch.device("cpu"))
    assert torchrun == ["gloo"]
    monkeypatch.delenv("RANK")
    dist.start_ranks(torch.device("cpu"))                # alone there is no one to join
    assert torchrun == ["gloo"]


@pytest.mark.parametrize("first, second", [([1.0, 4.0, 9.0], [2.0]), ([1.0, 5.0], []), ([7.0], []), ([], [])])
def test_mean_and_std_are_of_the_numbers_of_all_ranks(first, second, monkeypatch):
    """Of one number the std is 0, and so are both of none."""
    whole = first + second
    want = (statistics.fmean(whole), statistics.pstdev(whole)) if whole else (0, 0)
    for got in two_ranks(monkeypatch, dist.mean_and_std, [torch.tensor(first)], [torch.tensor(second)]):
        assert [x.item() for x in got] == pytest.approx(want)


def test_means_are_of_all_ranks(monkeypatch):
    one, two = ({"a": torch.tensor(a), "b": torch.tensor(b)} for a, b in (([1, 2, 6], [True]), ([5, 5, 5], [False])))
    assert two_ranks(monkeypatch, dist.means, [one], [two]) == (dict(a=4.0, b=0.5),) * 2
    monkeypatch.undo()
    assert dist.means(one) == dict(a=3.0, b=1.0)


@pytest.mark.parametrize("ranks, code, events", [
    (False, 0, []), (False, 2, ["SystemExit 2"]), (False, 130, ["SystemExit 130"]), (True, 2, ["SystemExit 2"]),
    (True, 0, ["wait", "_exit 0"]), (True, 1, ["wait", "_exit 1"]), (True, 3, ["wait", "_exit 3"]),
    (True, 143, ["wait", "_exit 143"])])
def test_ranks_end_together_unless_one_has_a_fault(ranks, code, events, monkeypatch):
    """With a UserError on one rank the others may never come: there is no waiting for them."""
    seen = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: ranks)
    monkeypatch.setattr(dist, "wait_for_all", lambda: seen.append("wait"))
    monkeypatch.setattr(os, "_exit", lambda code: seen.append(f"_exit {code}"))
    monkeypatch.setattr(sys, "exit", lambda code: seen.append(f"SystemExit {code}"))
    dist.exit_with(code)
    assert seen[:len(events)] == events and bool(seen) == bool(events)


def test_each_rank_in_turn_takes_one(monkeypatch):
    """Alone it takes all."""
    assert (dist.rank(), dist.ranks()) == (0, 1) and dist.of_rank("abcdefg") == "abcdefg"
    for rank, share in enumerate(("adg", "be", "cf")):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        monkeypatch.setattr(dist, "ranks", lambda: 3)
        assert dist.of_rank("abcdefg") == share


@pytest.mark.parametrize("backend, met", [(None, []), ("gloo", ["cpu"])])
def test_only_ranks_wait_for_each_other(backend, met, monkeypatch):
    """By a sum of all ranks, which none has before all have given their part."""
    calls = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(distributed, "all_reduce", lambda x, op: calls.append(x.device.type))
    dist.wait_for_all()
    assert calls == met


# ----------------------------------------------------------------------------------- random streams

def test_a_stream_is_of_its_seed_purpose_and_step():
    """Without a step it is that of step 0; and no two are alike."""
    cfg = Config(seed=7)
    assert dist.rng(cfg, "fit").random() == dist.rng(cfg, "fit", 0).random() == random.Random("7/fit/0").random()
    streams = [(cfg, "fit", 0), (cfg, "fit", 1), (cfg, "update", 0), (Config(seed=8), "fit", 0)]
    assert len({dist.rng(*stream).random() for stream in streams}) == 4


def test_numbers_are_the_same_on_every_machine():
    """To the bit, and so are the runs of a seed; a second draw from the stream is another one."""
    source = random.Random(0)
    got = dist.uniform(source, 2, 2), dist.uniform(source, 2)
    assert [x.dtype for x in got] == [torch.float64] * 2 and got[0].shape == (2, 2)
    assert [x.flatten().tolist() for x in got] == [
        [0.7984801223563218, 0.8003479718879506, 0.8372418555995936, 0.8896066683651614],
        [0.3528477596074505, 0.3184049182633061]]


# --------------------------------------------------------------------------------------- signals

def test_a_second_signal_is_obeyed_at_once():
    """With the code of a shell: 128 and its number."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert dist.ask_to_stop not in before               # no run of an earlier test has left it
    with dist.stoppable():
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == dist.ask_to_stop
        assert dist.stop_asked() == 0
        signal.raise_signal(signal.SIGINT)
        assert dist.stop_asked() == 2
        with pytest.raises(SystemExit) as e:
            signal.raise_signal(signal.SIGTERM)
        assert e.value.code == 143
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before and not dist.ASKED


def test_a_fork_gives_up_the_handlers_of_a_run_alone():
    """Outside of a run, and where a task has set its own, it keeps what there is."""
    def own(number, frame):
        """A task's own handler."""
    def handlers():
        return [signal.getsignal(number) for number in dist.SIGNALS]
    before = handlers()
    dist.in_a_fork()
    assert handlers() == before and dist.ask_to_stop not in before
    with dist.stoppable():
        signal.signal(signal.SIGTERM, own)
        dist.in_a_fork()
        assert handlers() == [signal.SIG_IGN, own]
    assert handlers() == before


@pytest.mark.parametrize("which", [0, 1, 2])
def test_ranks_whose_weights_differ_are_stopped(which, monkeypatch):
    """Whichever tensor it is, and on each rank; by one bit, which a sum of numbers would not show."""
    def checked(tensors):
        try:
            return dist.check_alike(tensors)
        except UserError as e:
            return str(e)
    one, two = ({name: torch.tensor([1e8, 0.0]) for name in "abc"} for _ in range(2))
    assert two_ranks(monkeypatch, checked, [one], [two]) == (None, None)
    two["abc"[which]][1] += 1e-3
    assert one["abc"[which]].sum() == two["abc"[which]].sum()
    said = two_ranks(monkeypatch, checked, [one], [two])
    assert said[0] == said[1] and f"the ranks no longer hold the same {'abc'[which]};" in said[0]


def test_what_stops_bears_the_signals_number():
    with pytest.raises(dist.Stopped) as e, dist.stoppable():
        signal.raise_signal(signal.SIGTERM)
        raise dist.Stopped("here")
    assert e.value.number == 15 and dist.stop_asked() == 0


def test_ranks_on_cpus_ask_each_other_there(monkeypatch):
    """Only nccl needs the number on a GPU."""
    asked = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(distributed, "all_reduce", lambda x, op: asked.append((x.device.type, op)) or x.add_(2))
    assert dist.stop_asked() == 2 and asked == [("cpu", distributed.ReduceOp.MAX)]


# ------------------------------------------------------------------------------ batches and training

def test_sets_of_all_ranks_are_in_the_order_of_their_problems(monkeypatch):
    """Problems 0, 2, 4 are the first rank's, with two rows each, and 1, 3, 5 the second's."""
    def rows(problems, T):
        ids = torch.tensor([[10 * p + k] * T for p in problems for k in range(2)])
        return dict(ids=ids, mask=ids > 0)

    def all_gather_object(parts, own):
        parts[:] = [own, rows([1, 3, 5], 5)]
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(reward, "CHOICES", 2)
    got = reward.of_all_ranks(rows([0, 2, 4], 4))
    assert got["ids"][:, 0].tolist() == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
    assert got["ids"][:, 4].tolist() == [0, 0, 10, 11, 0, 0, 30, 31, 0, 0, 50, 51]         # padding, on the right
    assert got["ids"].shape == got["mask"].shape == (12, 5) and torch.equal(got["mask"], got["ids"] > 0)


def test_equal_rows_stay_in_their_order():
    """As no sort need leave them: which rows go together then follows from what they hold alone."""
    ids = torch.arange(1000)[:, None] % 3
    order = [i for rows, _ in passes.split_rows(ids, ids >= 0, 30) for i in rows.tolist()]
    assert order == sorted(range(1000), key=lambda i: i % 3)


def test_one_rank_and_one_set_stay_what_they_are():
    rows = dict(ids=torch.arange(12).view(4, 3), label=torch.rand(4, 3))
    for got in (reward.of_all_ranks(rows), passes.join([rows])):
        assert all(torch.equal(got[n], rows[n]) for n in rows) and got.keys() == rows.keys()


def test_gradients_are_summed_over_the_ranks_then_clipped(monkeypatch):
    """A weight without one has zeros, so that its moments are there as a checkpoint wants."""
    used, unused = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    params = [used.weight, unused.weight]
    monkeypatch.setattr(dist, "all_reduce", lambda x: 2 * x)
    for clip, after in ((100.0, [6.0, 8.0]), (5.0, [3.0, 4.0])):
        used.weight.grad, unused.weight.grad = torch.tensor([[3.0, 4.0]]), None
        dist.sum_gradients(params)
        assert dist.clip_gradients(params, clip) == pytest.approx(10.0)
        assert used.weight.grad[0].tolist() == pytest.approx(after) and unused.weight.grad.tolist() == [[0.0, 0.0]]
    used.weight.grad[0, 0] = float("nan")
    with pytest.raises(UserError, match="the norm of the gradient is nan"):
        dist.clip_gradients(params, 1.0)


def scored(gaps, n):
    """A micro-batch of a row of which the first n tokens were sampled, and its log-probabilities, with gaps (T,)."""
    logp = torch.nn.functional.pad(gaps, (0, max(0, n - len(gaps))))[None]
    return Batch(None, torch.arange(logp.size(1))[None] < n, None, torch.zeros_like(logp), None), logp


@pytest.mark.parametrize("dtype, most, mean", [(None, 1e-3, 1e-4), (torch.bfloat16, 2.0, 0.1)])
def test_gaps_may_be_as_large_as_rounding_explains_and_no_larger(dtype, most, mean):
    """A single one, or all of them on average."""
    def checked(gaps, n=100):
        return passes.checked_gap([scored(gaps, n)], dtype)
    one = torch.zeros(100, dtype=torch.float64)
    one[7] = most
    assert checked(one) == most and checked(torch.zeros(0), 0) == 0
    with pytest.raises(UserError, match="^sampler and trainer disagree"):
        checked(torch.tensor([1.5 * mean]), 1)              # of one token the gap is the mean
    alike = torch.full((100,), mean, dtype=torch.float64)
    assert checked(alike * (1 - 1e-6)) == pytest.approx(mean, rel=1e-5)
    padding = torch.zeros(900, dtype=torch.float64)         # columns without a sampled token do not count
    with pytest.raises(UserError, match="^sampler and trainer disagree"):
        checked(torch.cat((alike * (1 + 1e-6), padding)))
    for wrong in (one * (1 + 1e-6), one * float("nan")):
        with pytest.raises(UserError, match="^sampler and trainer disagree"):
            checked(wrong)


@pytest.mark.parametrize("error, kind", [
    (RuntimeError("a shape"), RuntimeError), (RuntimeError("[gloo] Connection closed by peer"), UserError),
    (distributed.DistBackendError("NCCL"), UserError)])
def test_the_end_of_another_rank_is_told_from_other_errors(error, kind, monkeypatch):
    """Of which there are several."""
    monkeypatch.setattr(dist, "ranks", lambda: 2)
    with pytest.raises(kind), dist.stoppable():
        raise error


def test_the_largest_gap_of_all_ranks_counts(monkeypatch):
    got = two_ranks(monkeypatch, lambda gap: passes.checked_gap([scored(gap, 1)], None), [torch.tensor([1e-5])],
                    [torch.tensor([5e-5, 0])])
    assert got == (pytest.approx(5e-5),) * 2


@pytest.mark.parametrize("gap, tokens, disagree", [(4e-4, (9, 1), False), (4e-4, (1, 9), False), (4e-4, (1, 1), True)])
def test_the_mean_gap_is_over_the_tokens_of_all_ranks(gap, tokens, disagree, monkeypatch):
    """Of which the second has one token with a gap and the first none: both go on, or neither."""
    def checked(gaps, n):
        try:
            return passes.checked_gap([scored(gaps, n)], None) < 0
        except UserError:
            return True
    got = two_ranks(monkeypatch, checked, [torch.zeros(9), tokens[0]], [torch.tensor([gap]), tokens[1]])
    assert got == (disagree,) * 2 and (gap / sum(tokens) > passes.MISMATCH[None][1]) == disagree


def test_the_rate_of_a_short_fit(monkeypatch):
    """In less than 30 steps the rise meets the fall: thirtieths going up, tenths coming down."""
    rates, module = [], torch.nn.Linear(1, 1)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda opt: rates.append(opt.param_groups[0]["lr"]))
    monkeypatch.setattr(dist, "progress", lambda name, total: lambda *told: None)
    passes.supervised_fit("a fit", module, lambda step: (), 10, 3.0)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.6, 0.3])


@pytest.mark.parametrize("own", [None, "7"])
def test_threads_that_wait_soon_give_their_core_away(own):
    """As OpenMP reads when torch is imported; what the user has set stays."""
    code = """if True:
        import os, sys
        class Finder:
            def find_spec(self, name, *given):
                if name == "torch":
                    print(os.environ.get("GOMP_SPINCOUNT"))
                    sys.exit()
        sys.meta_path.insert(0, Finder())
        import grpo"""
    env = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"} | ({"GOMP_SPINCOUNT": own} if own else {})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == [own or "1000"]
