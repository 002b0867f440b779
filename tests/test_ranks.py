"""Two processes against one: the same samples, statistics, weights and files, however the rows are
split; and what one of them meets, a signal or a UserError, reaches the other."""
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import time

import pytest
import torch
from conftest import LETTERS, Forked, flags, large_epsilon, metrics, records
from safetensors.torch import load_file
from test_turns import ECHO

import grpo
import reward
from data import UserError
from run import checkpoint, dist, report, setup

pytestmark = pytest.mark.slow
# Of the 3 held-out problems the second rank has one.
SMALL = dict(n_layer=1, n_embd=32, prompts=4, group=6, max_new=6, steps=2, epochs=2, minibatches=2,
             micro_tokens=80, lr=5e-3, warm_steps=50, warm_lr=5e-3)
RUNS = {
    **{algo: dict(algo=algo) for algo in ("grpo", "ppo")},
    "critic of its own": dict(algo="ppo", critic="separate"),
    "two at a time": dict(group=4, kl="watch"),             # the last held-out problem is rank 0's
    "a row a minibatch": dict(minibatches=24, epochs=1, steps=1),   # one rank has it, one has none
    "few rows": dict(prompts=2, group=3),                   # than an evaluation has of a problem
    "warm start": dict(init="", warm_steps=15, steps=1),
    "reward learned": dict(reward="model", iterations=2, steps=1),
    "steps learned": dict(reward="model", supervision="process", iterations=2, steps=1),
    "turns and a critic": dict(task="turns.py", max_new=12, algo="ppo", reward="model",
                               supervision="process", steps=1),
    "labels by rollouts": dict(reward="rollouts", supervision="process", steps=1),
}
LOST = "error: another rank has ended; continue from the last checkpoint with --resume\n"


# -------- what each process does

def settings(name, where):
    """One of RUNS in a folder of its own, from the model in `start` beside it."""
    above = where.parent
    chosen = SMALL | dict(task="letters.py", init=str(above / "start"), warm_steps=0) | RUNS[name]
    return chosen | dict(task=str(above / chosen["task"]), out=str(where / name))


def run(name, where):
    """One of RUNS: the agent that it ends with, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        agent = grpo.train(grpo.make_config(**settings(name, where)))
    return agent, printed.getvalue()


def set_constants(setattr=setattr):
    """Adam does not amplify rounding, and a fit is quick."""
    setattr(grpo, "new_optimizer", large_epsilon)
    setattr(reward, "FIT_STEPS", 12)     # all 45 problems: of the last one the second rank has none
    setattr(reward, "FIT_LR", 1e-2)


def before(module, name, act):
    """Lets `act` come before each call of a function."""
    real = getattr(module, name)

    def both(*given):
        act(*given)
        return real(*given)
    setattr(module, name, both)


def all_runs(rank, where):
    """All of RUNS; a file of each rank says what the folders do not."""
    opened, found = [], {}

    def note(event, args):
        """Remember the files of the runs that this process opens to write."""
        if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
            if str(args[0]).startswith(str(where)):
                opened.append(str(args[0]))
    sys.addaudithook(note)
    dist.start(grpo.Config())
    for name in RUNS:
        agent, printed = run(name, where)
        sha256 = hashlib.sha256()
        for n, x in sorted(checkpoint.training_state(agent).items()):
            sha256.update(n.encode() + x.contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = {"state": [agent.beta, sha256.hexdigest()], "printed": printed}
    found = {"runs": found, "opened": opened}
    (where.parent / f"{where.name}{rank}.json").write_text(json.dumps(found))
    dist.exit_with(0)


def plain(rank, args):
    grpo.main(args)


def interrupted(rank, receiver, sig, at, args):
    """A signal comes to one rank in an optimizer step."""
    calls = []

    def act(*given):
        calls.append(given)
        if len(calls) == at and rank == receiver:
            os.kill(os.getpid(), sig)
    before(dist, "clip_gradients", act)
    grpo.main(args)


def late(rank, path, args):
    """The first rank is slow at the end of the run, and then makes a file."""
    if rank == 0:
        before(report, "farewell", lambda *given: (time.sleep(0.3), path.touch()))
    grpo.main(args)


def slow_reader(rank, path, args):
    """The second rank comes late to its model; is the folder open by then?"""
    def act(*given):
        time.sleep(0.5 * rank)
        (path / f"opened{rank}").write_text(str((path / "run" / "run.json").exists()))
    before(setup.pretrained, "new_model", act)
    grpo.main(args)


def faulty(rank, args):
    """The second rank alone meets what the user can mend."""
    def evaluate(agent, *given):
        raise UserError("a problem\nof the second rank")
    if rank == 1:
        report.evaluate = evaluate
    grpo.main(args)


def apart(rank, args):
    """A bit of what an algorithm keeps differs on the second rank."""
    def act(agent, *given):
        agent.state["kept"] = torch.tensor([1e8, 1e-3 * rank])
    before(grpo, "train_step", act)
    grpo.main(args)


# -------- pairs of processes

def as_rank(rank, port, work, *given):
    """`work(rank, ...)` as torchrun would have it done."""
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    set_constants()
    work(rank, *given)


def start_pair(where, work, *given):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Forked(where / f"rank{rank}", as_rank, rank, port, work, *given) for rank in (0, 1)]


def end_of(processes):
    """Their exit codes, and what each wrote to stdout and stderr; fails if one waits for ever."""
    return [list(of) for of in zip(*[process.end() for process in processes])]


def pair(where, *work):
    return end_of(start_pair(where, *work))


def quiet(where, code, *work):
    """What the first of two says, if both end with a code and no other line than of a signal."""
    codes, (said, silent), err = pair(where, *work)
    others = [line for text in err for line in text.splitlines() if "stopping after" not in line]
    assert codes == [code] * 2 and others == [] and silent == ""
    return said


@pytest.fixture(scope="module", autouse=True)
def constants():
    """Here as in the processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch.setattr)
        yield


@pytest.fixture(scope="module")
def both(constants, tmp_path_factory):
    """The folders of all RUNS, `one` by this process and `two` by a pair; what this one printed,
    and what the ranks found."""
    top = tmp_path_factory.mktemp("ranks")
    (top / "letters.py").write_text(LETTERS)
    (top / "turns.py").write_text(ECHO)
    start = dict(task=str(top / "letters.py"), steps=0, out=str(top / "start"))
    grpo.train(grpo.make_config(**SMALL | start))
    two = start_pair(top / "two", all_runs, top / "two")
    printed = {name: run(name, top / "one")[1] for name in RUNS}
    codes, _, err = end_of(two)
    assert codes == [0, 0], err
    return top, printed, [json.loads((top / f"two{rank}.json").read_text()) for rank in (0, 1)]


def tensors(where):
    return checkpoint.load(where, grpo.Config)[1].tensors


# -------- two equal one

def close(one, two, moved=None):
    """Whether numbers differ by rounding alone, mostly 1e-5 of what has `moved`, by default the
    numbers themselves, and after 24 steps of Adam 1e-4. Some are infinite."""
    scale = (one if moved is None else moved).abs().max()
    return torch.equal(one, two) or (one - two).abs().max() <= 5e-4 * scale + 1e-7


def assert_alike(one, two):
    """The same statistics, up to rounding; the gap between sampler and trainer is all rounding."""
    for a, b in zip(metrics(one), metrics(two), strict=True):
        for x in a.keys() - {"mismatch"}:
            assert a[x] == pytest.approx(b[x], rel=3e-4, abs=3e-6), x


def without_bias(name, *states):
    """Choices say nothing about the bias of a reward model, which rounding alone moves, and with it
    the mean of the scores."""
    if name == "reward learned":
        for state in states:
            state["reward_model.norm"][0] -= state.pop("reward_model.head.bias")[0]


@pytest.mark.parametrize("name", RUNS)
def test_every_weight_is_that_of_one_process(both, name):
    """The moments of Adam and the labelled rows too."""
    one, two = (tensors(both[0] / where / name) for where in ("one", "two"))
    begun = load_file(both[0] / "start" / "model.safetensors")
    assert one.keys() == two.keys() and len(one) > 20
    without_bias(name, one, two)
    for n, x in one.items():
        weight = begun.get("model." + n.removeprefix("policy."))
        if x.dtype != torch.float32:
            assert torch.equal(x, two[n]), n
        else:
            assert close(x, two[n], None if weight is None else x - weight), n


@pytest.mark.parametrize("name", RUNS)
def test_every_statistic_is_that_of_one_process(both, name):
    """Speeds count the tokens of both."""
    one, two = (both[0] / where / name for where in ("one", "two"))
    assert_alike(one, two)
    assert [[*m] for m in metrics(one)] == [[*m] for m in metrics(two)]
    cfg = grpo.make_config(**settings(name, two.parent))
    for m in records(two / "metrics.jsonl")[1:]:
        assert m["mismatch"] < 1e-5
        seconds = m["seconds"] - m["reward_seconds"]
        tokens = seconds / (1 / m["rollout_tok_s"] + 1 / m["update_tok_s"])
        assert tokens == pytest.approx(m["length"] * cfg.prompts * cfg.group)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_rank_prints_what_one_process_does(both, name):
    """But for times, folders, last digits and the groups that are shown, each rank's own."""
    first, second = (rank["runs"][name] for rank in both[2])
    assert first["state"] == second["state"] and second["printed"] == ""        # to the bit
    found = []
    for text in (both[1][name], first["printed"]):
        assert "\n      1x " in text
        text = re.sub(r"^(    \S(?=.*\n      \d+x )|      \d+x |memory).*\n", "", text, flags=re.M)
        text = re.sub(r"([\d.]+ s  )?left +\S+|/\S*/|steps, [\d:]+", "", text)
        parts = re.split(r"(-?\d+\.\d+)", text)
        found.append((parts[::2], [*map(float, parts[1::2])]))
    (words, numbers), (others, other_numbers) = found
    assert words == others and numbers == pytest.approx(other_numbers, rel=2e-3, abs=2e-3)


def test_the_first_rank_alone_writes(both):
    first, second = both[2]
    assert len(first["opened"]) > len(first["runs"]) and second["opened"] == []


# -------- what one meets reaches the other

def command(both, name, **changes):
    """The command line of one of RUNS, somewhere else."""
    return flags(settings(name, both[0] / "two") | changes)


def resume(both, where):
    return ["--resume", "--task", str(both[0] / "letters.py"), "--out", str(where)]


@pytest.mark.parametrize("name, sig, receiver, at, when, step", [
    ("ppo", signal.SIGTERM, 1, 2, "after step 1", 1),
    ("ppo", signal.SIGINT, 0, 2, "after step 1", 1),
    ("warm start", signal.SIGTERM, 1, 2, "in the warm start", -1),
    ("steps learned", signal.SIGTERM, 0, 4, "after step 1", 1)])    # after a fit
def test_a_signal_to_one_rank_stops_both(both, tmp_path, name, sig, receiver, at, when, step):
    """Going on, they end to the bit where they would have, one process up to rounding."""
    out, alone, whole = tmp_path / "run", tmp_path / "alone", both[0] / "two" / name
    args = command(both, name, out=out, eval_every=int(sig == signal.SIGINT))
    said = quiet(tmp_path, 128 + sig, interrupted, receiver, sig, at, args)
    assert re.match(rf"stopped {when}(, which will begin again)?; continue with: python grpo.py "
                    rf"--resume --out {out}", said.splitlines()[-1])
    assert checkpoint.load(out, grpo.Config)[1].step == step
    shutil.copytree(out, alone)
    quiet(tmp_path, 0, plain, resume(both, out))
    grpo.main(resume(both, alone))
    for a, b in zip(metrics(whole), metrics(out), strict=True):
        assert a.items() <= b.items()
    assert_alike(whole, alone)
    one, two, three = map(tensors, (whole, out, alone))
    assert one.keys() == two.keys() == three.keys()
    for n, x in one.items():
        assert torch.equal(x, two[n]) and (x.dtype != torch.float32 or close(x, three[n])), n


def test_no_rank_reads_what_the_first_is_writing(both, tmp_path):
    """It opens the folder, and moves what is there, only when the second has found its start."""
    args = command(both, "warm start", out=tmp_path / "run", warm_steps=0)
    quiet(tmp_path, 0, slow_reader, tmp_path, args)
    assert [(tmp_path / f"opened{rank}").read_text() for rank in (0, 1)] == ["False"] * 2


def test_no_rank_ends_before_the_others_have_done_their_work(both, tmp_path):
    args = command(both, "grpo", out=tmp_path / "run", steps=0)
    two = start_pair(tmp_path, late, tmp_path / "done", args)
    two[1].join()
    assert (tmp_path / "done").exists()
    assert end_of(two)[0] == [0, 0]


def test_of_a_fault_on_one_rank_there_is_one_line(both, tmp_path):
    """The other rank does not wait for ever: it ends too."""
    args = command(both, "grpo", out=tmp_path / "run")
    codes, _, err = pair(tmp_path, faulty, args)
    assert codes == [2, 2] and err == [LOST, "error: a problem ⏎ of the second rank\n"]


def test_a_rank_that_dies_brings_the_other_down(both, tmp_path):
    """And one process goes on where both were."""
    args = command(both, "ppo", out=tmp_path / "run", save_every=1)
    codes, _, (lost, _) = pair(tmp_path, interrupted, 1, signal.SIGKILL, 6, args)
    assert codes == [2, -signal.SIGKILL] and lost == LOST
    assert checkpoint.load(tmp_path / "run", grpo.Config)[1].step == 1
    grpo.main(resume(both, tmp_path / "run"))
    assert_alike(both[0] / "one" / "ppo", tmp_path / "run")


def test_ranks_that_have_come_apart_end_the_run(both, tmp_path):
    """A bit of an algorithm's state is enough; it is named."""
    codes, _, err = pair(tmp_path, apart, command(both, "grpo", out=tmp_path / "run"))
    says = "error: the ranks no longer hold the same state.kept;"
    assert codes == [2, 2] and all(x.startswith(says) for x in err), err


@pytest.mark.parametrize("mode", [["--eval_only"], ["--ask", "ab="]])
def test_evaluation_and_questions_are_answered_once(both, tmp_path, capsys, mode):
    args = [*mode, "--init", str(both[0] / "start"), "--task", str(both[0] / "letters.py")]
    said = quiet(tmp_path, 0, plain, args)
    capsys.readouterr()
    grpo.main(args)
    assert said == capsys.readouterr().out > ""
