"""Two processes against one: the same samples, statistics, weights and files, however the rows are
split; and what one of them meets, a signal or a UserError, reaches the other.

Two processes make all of RUNS in one go while this one makes them alone, and the tests compare what
both have left.
"""
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
from conftest import ROOT, Forked, flags, records
from safetensors.torch import load_file
from test_turns import ECHO
from torch.distributed.tensor import DTensor

import grpo
import reward
from data import UserError, load_task
from run import checkpoint, dist, passes, pretrained, report, setup
from run.checkpoint import training_state

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]
# Completions of 1 to 5 letters; of the 3 held-out problems the second rank has one.
TASK = """
from types import SimpleNamespace as Problem
DEFAULTS = {}
def problems(difficulty=2):
    words = [(c * (n % 3) + "abcdefgh"[n])[:3] + "=" for c in "abcdef" for n in range(8)]
    return [Problem(prompt=word) for word in words[3:]], [Problem(prompt=word) for word in words[:3]]
def demonstration(problem, rng):
    return "".join(rng.choices("abc", k=rng.randint(1, 5)))
def reward(problem, text):
    return {"correct": float(text.count("a") % 2 == len(problem.prompt) % 2),
            "style": 0.3 * len(set(text) & set(problem.prompt)) - 0.05 * len(text)}
def steps(problem, text):
    return [(i + 1, x in problem.prompt) for i, x in enumerate(text) if x in "ab" or i + 1 == len(text)]
def answer(text):
    return text[:1]
"""
SMALL = dict(n_layer=1, n_embd=32, prompts=4, group=6, max_new=6, steps=2, epochs=2, minibatches=2,
             micro_tokens=80, lr=5e-3, warm_steps=50, warm_lr=5e-3, device="cpu")
RUNS = {
    **{algo: dict(algo=algo) for algo in grpo.ALGOS},
    "critic of its own": dict(algo="ppo", critic="separate"),
    "whitened": dict(adv_scale="batch", loss_mean="token"),
    "steps rewarded": dict(supervision="process"),
    "two at a time": dict(group=4, kl="watch"),             # the last held-out problem is rank 0's
    "a row a minibatch": dict(minibatches=24, epochs=1, steps=1),       # one rank has it, one has none
    "few rows": dict(prompts=2, group=3),                   # fewer than an evaluation has of a problem
    "warm start": dict(init="", warm_steps=15, steps=1),
    "reward learned": dict(reward="model", iterations=2, steps=1),
    "steps learned": dict(reward="model", supervision="process", iterations=2, steps=1),
    "turns and a critic": dict(task="turns.py", max_new=12, algo="ppo", reward="model", supervision="process", steps=1),
    "labels by rollouts": dict(reward="rollouts", supervision="process", steps=1),
}
# Where each rank keeps a part of every model.
SHARDED = ["turns and a critic", "critic of its own", "a row a minibatch", "steps learned"]
PAIRS = [("two", name) for name in RUNS] + [("sharded", name) for name in SHARDED]
LOST = "error: another rank has ended; continue from the last checkpoint with --resume\n"
TIMES = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}


# ----------------------------------------------------------------------- what each process does

def settings(name, where):
    """One of RUNS in a folder of its own, from the model in `start` beside it."""
    above = where.parent
    chosen = SMALL | dict(task="letters.py", init=str(above / "start"), warm_steps=0) | RUNS[name]
    return chosen | dict(task=str(above / chosen["task"]), out=str(where / name), shard=where.name == "sharded")


def run(name, where):
    """One of RUNS: the agent that it ends with, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        agent = grpo.train(grpo.make_config(**settings(name, where)))
    return agent, printed.getvalue()


new_optimizer = grpo.new_optimizer


def large_epsilon(agent):
    """The real one, with another epsilon."""
    opt = new_optimizer(agent)
    opt.param_groups[0]["eps"] = 1e-3
    return opt


def set_constants(setattr=setattr):
    """Adam's epsilon so large that rounding does not decide a sign, and a quick fit on labels of few problems."""
    setattr(grpo, "new_optimizer", large_epsilon)
    setattr(reward, "FIT_STEPS", 10)
    setattr(reward, "FIT_LR", 1e-2)


def sha256_of(tensors):
    """SHA-256 of a dict of tensors."""
    parts = (name.encode() + x.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, x in sorted(tensors.items()))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def all_runs(rank, where):
    """All of RUNS; a file of each rank says what the folders do not."""
    opened, kept, found, updating = [], [], {}, dist.updating

    def note(event, args):
        """Remember the files of the runs that this process opens to write."""
        if event == "open" and str(args[0]).startswith(str(where)) and args[2] & (os.O_WRONLY | os.O_RDWR):
            opened.append(str(args[0]))

    @contextlib.contextmanager
    def freed(agent):
        """The real one; remember which share of its models this process keeps, and of the sampler before and after."""
        def held(*modules):
            """How many numbers."""
            params = [p for module in modules for p in module.parameters()]
            return sum(getattr(p, "_local_tensor", p).numel() for p in params)
        parts = [*filter(None, (agent.policy, agent.ref, agent.critic, agent.reward_model))]
        for module in parts:
            dist.parameters(module)
        share = held(*parts) / sum(p.numel() for module in parts for p in module.parameters())
        before = held(agent.sampler) / sum(p.numel() for p in agent.policy.parameters())
        with updating(agent):
            kept.append((share, before, held(agent.sampler)))
            yield
    sys.addaudithook(note)
    dist.updating = freed
    dist.start_ranks(torch.device("cpu"))
    for name in SHARDED if where.name == "sharded" else RUNS:
        agent, printed = run(name, where)
        state = {n: x for n, x in training_state(agent).items() if not isinstance(x, DTensor)}
        found[name] = {"state": sha256_of(state), "beta": agent.beta, "printed": printed}
    found = {"runs": found, "opened": opened, "kept": kept}
    (where.parent / f"{where.name}{rank}.json").write_text(json.dumps(found))
    dist.exit_with(0)


def interrupted(rank, receiver, sig, at, args):
    """The command line; a signal comes to the rank `receiver` alone, in an optimizer step."""
    real, calls = dist.clip_gradients, []

    def clip_gradients(*given):
        """The real one."""
        calls.append(given)
        if len(calls) == at and rank == receiver:
            os.kill(os.getpid(), sig)
        return real(*given)
    dist.clip_gradients = clip_gradients
    grpo.main(args)


def late(rank, path, args):
    """The command line; the first rank is slow at the end of the run, and then makes a file."""
    real = report.farewell

    def farewell(*given):
        """The real one."""
        if rank == 0:
            time.sleep(0.3)
            path.touch()
        real(*given)
    report.farewell = farewell
    grpo.main(args)


def slow_reader(rank, path, args):
    """The command line; the second rank comes late to the look for a kept warm start, and notes
    whether the first has opened the folder by then."""
    real = setup.starting_model

    def starting_model(*given):
        """The real one."""
        if rank == 1:
            time.sleep(0.5)
        (path / f"opened{rank}").write_text(str((path / "run" / "run.json").exists()))
        return real(*given)
    setup.starting_model = starting_model
    grpo.main(args)


def torn(rank, args):
    """The command line; a signal comes to the first rank in a step, and to the second as it stops."""
    real, asked, sent = dist.clip_gradients, dist.stop_asked, []

    def send():
        """Once."""
        if not sent:
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    def clip_gradients(*given):
        """The real one."""
        if rank == 0:
            send()
        return real(*given)

    def stop_asked():
        """The real one."""
        number = asked()
        if number and rank == 1:
            send()
        return number
    dist.clip_gradients, dist.stop_asked = clip_gradients, stop_asked
    grpo.main(args)


def faulty(rank, args):
    """The command line; the second rank alone meets what the user can mend."""
    def evaluate(agent, problems):
        """No evaluation."""
        raise UserError("a problem\nof the second rank")
    if rank == 1:
        grpo.evaluate = evaluate
    grpo.main(args)


def apart(rank, what, args):
    """The command line; on the second rank a number has changed before what it has learned is saved."""
    real, train_step = dist.check_alike, grpo.train_step

    def with_state(agent, *given):
        """The real one, of an algorithm that keeps a number."""
        agent.state["kept"] = torch.arange(9.0)
        return train_step(agent, *given)
    grpo.train_step = with_state

    def check_alike(tensors):
        """The real one."""
        names = [n for n in tensors if n.startswith(f"{what}.")]
        if rank == 1 and names and len(tensors) > 60:
            x = tensors[names[-1]]
            tensors |= {names[-1]: torch.where(torch.arange(x.numel()).view(x.shape) == 3, ~x if x.dtype == torch.bool
                                               else torch.nextafter(x, x + 1), x)}
        real(tensors)
    dist.check_alike = check_alike
    grpo.main(args)


def plain(rank, args):
    """The command line."""
    grpo.main(args)


def torchrun(out):
    """The command line of torchrun."""
    from torch.distributed.run import main
    main(["--standalone", "--nproc_per_node", "2", str(ROOT / "grpo.py"), "--prompts", "3", "--out", str(out)])


# ------------------------------------------------------------------------------ pairs of processes

def as_rank(rank, port, work, *given):
    """`work(rank, ...)` as torchrun would have it done."""
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port))
    set_constants()
    work(rank, *given)


def start_pair(where, work, *given):
    """Two processes at work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Forked(where / f"rank{rank}", as_rank, rank, port, work, *given) for rank in (0, 1)]


def end_of(processes):
    """Their exit codes, and what each wrote to stdout and stderr; fails if one waits for ever."""
    for process in processes:
        process.join()
    return [list(of) for of in zip(*[process.end(0) for process in processes])]


def pair(where, *work):
    """Two processes from their start to their end."""
    return end_of(start_pair(where, *work))


@pytest.fixture(scope="module", autouse=True)
def constants():
    """Here as in the processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch.setattr)
        yield


@pytest.fixture(scope="module")
def both(constants, tmp_path_factory):
    """The folders of all RUNS, `one` by this process and `two` by a pair, and of SHARDED by another; what
    the ranks of both pairs found."""
    top = tmp_path_factory.mktemp("ranks")
    (top / "letters.py").write_text(TASK)
    (top / "turns.py").write_text(ECHO)
    grpo.train(grpo.make_config(**SMALL | dict(task=str(top / "letters.py"), steps=0, out=str(top / "start"))))
    two = start_pair(top / "two", all_runs, top / "two")
    printed = {name: run(name, top / "one")[1] for name in RUNS}
    codes, _, err = end_of(two)
    assert codes == [0, 0], err
    codes, _, err = pair(top / "sharded", all_runs, top / "sharded")
    assert codes == [0, 0] and err == ["", ""], err
    found = {ranks: [json.loads((top / f"{ranks}{rank}.json").read_text()) for rank in (0, 1)] for ranks in ("two", "sharded")}
    return top, printed, found["two"], found["sharded"]


def metrics(where):
    return records(where / "metrics.jsonl")


def samples(where):
    return records(where / "samples.jsonl")


def tensors(where):
    return checkpoint.load(where, grpo.Config)[1].tensors


# -------------------------------------------------------------------------------- two equal one

def close(one, two, moved=None):
    """Whether numbers differ by rounding alone. Of what has `moved`, by default the numbers themselves,
    it is mostly 1e-5, and after 24 steps of Adam 1e-4."""
    scale = (one if moved is None else moved).abs().max()
    return (one - two).abs().max() <= 5e-4 * scale + 1e-7


@pytest.mark.parametrize("ranks, name", PAIRS)
def test_every_weight_is_that_of_one_process(both, ranks, name):
    """The moments of Adam and the labelled rows too. Choices say nothing about the bias of a reward
    model, which rounding alone moves, and with it the mean of the scores."""
    one, two = (tensors(both[0] / where / name) for where in ("one", ranks))
    begun = load_file(both[0] / "start" / "model.safetensors")
    assert one.keys() == two.keys() and len(one) > 20
    if name == "reward learned":
        for model in (one, two):
            model["reward_model.norm"][0] -= model["reward_model.head.bias"][0]
    for n, x in one.items():
        weight = "model." + n.removeprefix("policy.")
        if x.dtype != torch.float32:
            assert torch.equal(x, two[n]), n
        elif (name, n) != ("reward learned", "reward_model.head.bias"):
            assert close(x, two[n], x - begun[weight] if weight in begun else None), n


@pytest.mark.parametrize("ranks, name", PAIRS)
def test_every_statistic_is_that_of_one_process(both, ranks, name):
    """The gap between sampler and trainer is all rounding."""
    one, two = (metrics(both[0] / where / name) for where in ("one", ranks))
    assert len(one) == len(two) > 1
    for a, b in zip(one, two):
        assert [*a] == [*b]
        for x in a.keys() - TIMES - {"mismatch"}:
            assert a[x] == pytest.approx(b[x], rel=3e-4, abs=3e-6), f"{x} differs with 2 ranks: see `dist.means`"
        assert b.get("mismatch", 0.0) < 1e-5


@pytest.mark.parametrize("name", RUNS)
def test_speeds_count_the_tokens_of_both(both, name):
    cfg = grpo.make_config(**settings(name, both[0] / "two"))
    for m in metrics(both[0] / "two" / name)[1:]:
        tokens = (m["seconds"] - m["reward_seconds"]) / (1 / m["rollout_tok_s"] + 1 / m["update_tok_s"])
        assert tokens == pytest.approx(m["length"] * cfg.prompts * cfg.group)


def test_the_samples_are_those_of_one_process(both):
    """The first rank chooses among its own groups: those that one process chose as well are the same,
    with rewards and advantages, and with the log-probabilities after the update."""
    common = 0
    for name in RUNS:
        one, two = ({(x["step"], *map(str, x["completions"])): x for x in samples(both[0] / ranks / name)}
                    for ranks in ("one", "two"))
        assert {step for step, *_ in one} == {step for step, *_ in two} and one
        assert name != "turns and a critic" or any(places for x in two.values() for places in x["replies"])
        for at in one.keys() & two.keys():
            a, b = one[at], two[at]
            assert [a[x] for x in ("prompt", "tokens", "ends")] == [b[x] for x in ("prompt", "tokens", "ends")]
            assert a["rewards"] == pytest.approx(b["rewards"], rel=1e-3, abs=2e-4)
            for key in ("advantages", "logp", "new_logp", "entropy", "step_rewards"):
                for x, y in zip(a[key], b[key], strict=True):
                    assert x == pytest.approx(y, rel=1e-3, abs=2e-3), key
            common += 1
    assert common > len(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_rank_prints_what_one_process_does(both, name):
    """Loss of a fit included, but for times, folders, last digits and the groups that are shown, each
    rank's own; the second prints nothing."""
    one, (two, silent) = both[1][name], [rank["runs"][name]["printed"] for rank in both[2]]
    assert "\n    1x " in one and "\n    1x " in two
    one, two = (re.sub(r"^    \d+x .*\n", "", text, flags=re.M) for text in (one, two))
    for line, other in zip(one.splitlines(), two.splitlines(), strict=True):
        line, other = (re.sub(r"[\d.]+ s  left|left .*|\d+:\d\d|/\S*/|^memory.*", "", x) for x in (line, other))
        assert re.sub(r"-?\d+\.\d+", "", line) == re.sub(r"-?\d+\.\d+", "", other)
        numbers = [[float(x) for x in re.findall(r"-?\d+\.\d+", text)] for text in (line, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-3, abs=2e-2 if "%" in line else 2e-3)
    assert silent == ""


@pytest.mark.parametrize("name", RUNS)
def test_both_ranks_end_alike_to_the_bit(both, name):
    first, second = (rank["runs"][name] for rank in both[2])
    assert (first["state"], first["beta"]) == (second["state"], second["beta"])


def test_a_rank_keeps_its_part_of_the_models(both):
    """The sampler is whole between updates, and let go of in one. A rank alone keeps all."""
    assert all(share == before == 1 and after > 0 for rank in both[2] for share, before, after in rank["kept"])
    for rank in both[3]:
        assert len(rank["kept"]) > len(SHARDED)
        for share, before, after in rank["kept"]:
            assert 0.4 < share < 0.6 and before >= 1 and after == 0


def test_the_first_rank_alone_writes(both):
    for found, runs in ((both[2], RUNS), (both[3], SHARDED)):
        first, second = (rank["opened"] for rank in found)
        assert len(first) > len(runs) and second == []


def test_labels_by_rollouts_are_those_of_one_process(both):
    """To the bit, and with all that four tries can give."""
    one, two = (tensors(both[0] / ranks / "labels by rollouts") for ranks in ("one", "two"))
    assert all(torch.equal(x, two[n]) for n, x in one.items() if n.startswith("history."))
    inner = one["history.ends"] & ~passes.last_tokens(one["history.mask"])
    assert {*one["history.label"][inner].tolist()} == {0, 0.25, 0.5, 0.75, 1}


def test_a_warm_start_of_two_ranks_serves_one(both):
    for ranks in ("one", "two"):
        cfg = grpo.make_config(**settings("warm start", both[0] / ranks))
        task = load_task(cfg.task)
        _, cold = setup.starting_model(cfg, task, task.problems()[0], 4, pretrained.byte_encoding())
        assert not cold


# --------------------------------------------------------------- what one meets reaches the other

def command(both, name, **changes):
    """The command line of one of RUNS, somewhere else."""
    return flags(settings(name, both[0] / "two") | changes)


def resume(both, where):
    """The command line that goes on with a run."""
    return ["--resume", "--task", str(both[0] / "letters.py"), "--out", str(where)]


@pytest.mark.parametrize("sig, receiver, when", [(signal.SIGTERM, 1, "after step 1"), (signal.SIGINT, 0, "in the greedy evaluation")])
def test_a_signal_to_one_rank_stops_both_after_the_same_step(both, tmp_path, sig, receiver, when):
    """Or in its evaluation, which they give up. And two ranks that go on end to the bit where they
    would have, one process up to rounding. The second rank once ended with another code."""
    out, whole, after = tmp_path / "run", both[0] / "two" / "ppo", when == "after step 1"
    args = command(both, "ppo", out=out, eval_every=0 if after else 1)
    codes, (said, silent), err = pair(tmp_path, interrupted, receiver, sig, 2, args)
    assert codes == [128 + sig] * 2 and err == ["", ""] and silent == ""
    assert re.match(rf"stopped {when}(, which will begin again)?; continue with: python grpo.py --resume --out {out}",
                    said.splitlines()[-1])
    assert checkpoint.load(out, grpo.Config)[1].step == 1 == metrics(out)[-1]["step"] + (not after)
    shutil.copytree(out, tmp_path / "alone")
    codes, (said, silent), err = pair(tmp_path, plain, resume(both, out))
    assert codes == [0, 0] and err == ["", ""] and silent == "" and "step 2/2" in said
    grpo.main(resume(both, tmp_path / "alone"))
    for a, b, c in zip(*map(metrics, (whole, out, tmp_path / "alone")), strict=True):
        assert all(a[x] == b[x] for x in a.keys() - TIMES)
        assert all(a[x] == pytest.approx(c[x], rel=3e-4, abs=3e-6) for x in a.keys() - TIMES)
    for n, x in tensors(whole).items():
        assert torch.equal(x, tensors(out)[n]) and close(x, tensors(tmp_path / "alone")[n]), n


def test_a_signal_in_the_warm_start_stops_both_ranks(both, tmp_path):
    out = tmp_path / "run"
    args = command(both, "warm start", out=out)
    codes, (said, silent), err = pair(tmp_path, interrupted, 1, signal.SIGTERM, 2, args)
    assert codes == [128 + signal.SIGTERM] * 2 and err == ["", ""] and silent == ""
    assert said.splitlines()[-1].startswith("stopped in the warm start, which will begin again; continue with: ")
    assert not (out / "warm_start").exists() and metrics(out) == []


def test_a_signal_that_comes_late_to_a_rank_is_not_a_second_one(both, tmp_path):
    """A launcher tells one rank after the other; a second signal would end a rank at once."""
    codes, _, err = pair(tmp_path, torn, command(both, "grpo", out=tmp_path / "run"))
    assert codes == [128 + signal.SIGTERM] * 2 and err == ["", ""]


def test_no_rank_reads_what_the_first_is_writing(both, tmp_path):
    """It opens the folder, and moves what is there, only when the second has found its start."""
    args = command(both, "warm start", out=tmp_path / "run", warm_steps=0)
    codes, _, err = pair(tmp_path, slow_reader, tmp_path, args)
    assert codes == [0, 0] and [(tmp_path / f"opened{rank}").read_text() for rank in (0, 1)] == ["False"] * 2, err


def test_no_rank_ends_before_the_others_have_done_their_work(both, tmp_path):
    two = start_pair(tmp_path, late, tmp_path / "done", command(both, "grpo", out=tmp_path / "run", steps=0))
    two[1].join(60)
    assert (tmp_path / "done").exists()
    assert end_of(two)[0] == [0, 0]


def test_of_a_fault_on_one_rank_there_is_one_line(both, tmp_path):
    """The other rank does not wait for ever: it ends too."""
    codes, _, (lost, err) = pair(tmp_path, faulty, command(both, "grpo", out=tmp_path / "run"))
    assert codes[1] == 2 and err == "error: a problem ⏎ of the second rank\n"
    assert codes[0] == 2 and lost == LOST


@pytest.mark.parametrize("ranks", ["two", "sharded"])
def test_a_rank_that_dies_brings_the_other_down(both, tmp_path, ranks):
    """And one process goes on where both were, with a sharded model too."""
    args, out = flags(settings("ppo", both[0] / ranks) | dict(out=tmp_path / "run", save_every=1)), tmp_path / "run"
    codes, _, (lost, _) = pair(tmp_path, interrupted, 1, signal.SIGKILL, 6, args)
    assert codes == [2, -signal.SIGKILL] and lost == LOST
    assert checkpoint.load(out, grpo.Config)[1].step == 1
    grpo.main(resume(both, out))
    for a, b in zip(metrics(both[0] / "one" / "ppo"), metrics(out), strict=True):
        assert all(a[x] == pytest.approx(b[x], rel=3e-4, abs=3e-6) for x in a.keys() - TIMES - {"mismatch"})


@pytest.mark.parametrize("name", ["critic of its own", "steps learned"])
def test_ranks_resume_with_sharded_models(both, tmp_path, name):
    """After a stop they end to the bit where they would have: weights, moments, labelled rows."""
    out, whole = tmp_path / "run", both[0] / "sharded" / name
    args = flags(settings(name, both[0] / "sharded") | dict(out=out))
    at = 2 if name == "critic of its own" else 4            # in the first step; before it there is a fit
    codes, _, err = pair(tmp_path, interrupted, 0, signal.SIGTERM, at, args)
    assert codes == [128 + signal.SIGTERM] * 2 and err == ["", ""]
    assert checkpoint.load(out, grpo.Config)[1].step == 1
    codes, _, err = pair(tmp_path, plain, resume(both, out))
    assert codes == [0, 0] and err == ["", ""]
    for a, b in zip(metrics(whole), metrics(out), strict=True):
        assert all(a[x] == b[x] for x in a.keys() - TIMES)
    one, two = tensors(whole), tensors(out)
    assert one.keys() == two.keys() and all(torch.equal(x, two[n]) for n, x in one.items())


@pytest.mark.parametrize("what, name", [
    ("policy", r"policy\.norm\.weight"), ("history", r"history\.label"), ("state", r"state\.kept")])
def test_ranks_that_have_come_apart_end_the_run(both, tmp_path, what, name):
    """A bit of a weight, of a labelled row or of an algorithm's state is enough; it is named."""
    codes, _, err = pair(tmp_path, apart, what, command(both, "reward learned", out=tmp_path / "run"))
    says = rf"error: the ranks no longer hold the same {name}; .*\n"
    assert codes == [2, 2] and all(re.fullmatch(says, x) for x in err), err


def test_evaluation_and_questions_are_answered_once(both, tmp_path, capsys):
    for args in (["--eval_only"], ["--ask", "ab="]):
        args += ["--init", str(both[0] / "start"), "--task", str(both[0] / "letters.py")]
        codes, (said, silent), err = pair(tmp_path, plain, args)
        capsys.readouterr()
        grpo.main(args)
        assert codes == [0, 0] and err == ["", ""] and silent == "" and said == capsys.readouterr().out > ""


def test_torchrun_starts_the_ranks(tmp_path):
    """All above take its place."""
    code, out, err = Forked(tmp_path / "torchrun", torchrun, tmp_path / "run").end(120)
    assert code == 1 and out == "" and not (tmp_path / "run").exists()
    assert "error: --prompts 3 is not divisible by 2 ranks\n" in err
