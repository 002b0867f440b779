"""Whole runs: learning, determinism, resume after a kill, faults, what is written."""
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Forked, chat_folder, fault

import data
import data.arithmetic as arithmetic
import grpo
from data import UserError
from data.tokenizer import byte_encoding, load_encoding
from grpo import Config, evaluate, main, make_config
from model import GPT, GPTConfig
from run import checkpoint, config, dist, files, passes, pretrained, report, show, warm_start

# A few seconds: 1-digit problems, a small model, a short warm start.
SMALL = ("--difficulty 1 --n_layer 1 --n_embd 64 --warm_steps 80 --warm_lr 5e-3 --prompts 4 "
         "--group 8 --max_new 12 --save_every 2 --lr 1e-3 --beta 0.005").split()


def metrics(where, timed=False):
    lines = [json.loads(line) for line in (Path(where) / "metrics.jsonl").read_text().splitlines()]
    clocks = set() if timed else {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 6 steps in this process, which the others are compared with."""
    where = tmp_path_factory.mktemp("unbroken")
    main([*SMALL, "--steps", "6", "--out", str(where)])
    assert all(m["grad_norm"] > 1e-3 and m["dead_groups"] < 1 for m in metrics(where)[1:])
    return where


def weights(where):
    return (Path(where) / "model.safetensors").read_bytes()


def saved(where):
    return checkpoint.load(Path(where), Config)[1]


def copy_warm_start(source, target):
    shutil.copytree(source / "warm_start", target / "warm_start")


# ------------------------------------------------------------------------------------ learning

def toy(reward):
    """A task of one-byte prompts, without a warm start's help."""
    problems = [arithmetic.Problem(c, c) for c in "abcdefgh"]
    return SimpleNamespace(DEFAULTS={}, problems=lambda: (problems, problems[:2]), reward=reward,
                           demonstration=lambda p, r: "ab"[r.randrange(2)] * r.randrange(1, 6),
                           answer=lambda text: text, steps=lambda p, text: [])


def trained(tmp_path, reward, **changes):
    cfg = Config(out=str(tmp_path), **{**dict(
        n_layer=1, n_embd=32, warm_steps=60, warm_lr=5e-3, prompts=8, group=8, max_new=8,
        steps=25, lr=3e-3), **changes})
    grpo.train(cfg, toy(reward))
    return metrics(tmp_path)[1:]


def only_b(text):
    return float(bool(text) and set(text) == {"b"})


@pytest.mark.slow
def test_learns_what_is_rewarded(tmp_path):
    """Tiny and end to end: completions of nothing but `b` are to replace the others."""
    m = trained(tmp_path, lambda p, text: {"correct": only_b(text)}, steps=40, beta=0.0)
    late = sum(line["reward"] for line in m[-5:]) / 5
    assert m[0]["reward"] < 0.5 and late > m[0]["reward"] + 0.3


@pytest.mark.slow
def test_learns_nothing_from_shuffled_rewards(tmp_path):
    """The same settings, random rewards: on the mean of three seeds no gain."""
    gains = []
    for seed in (1, 2, 3):
        truth, r = [], dist.rng(Config(seed=seed), "shuffled")
        def reward(p, text):
            truth.append(only_b(text))
            return {"correct": float(r.random() < 0.5)}
        trained(tmp_path / str(seed), reward, steps=25, beta=0.0, seed=seed)
        gains.append(sum(truth[-320:]) / 320 - sum(truth[:320]) / 320)
    assert sum(gains) / 3 < 0.15, gains


@pytest.mark.slow
def test_learns_to_stop(tmp_path):
    """Only stopping pays. With the end token outside the mask this could not be learned."""
    m = trained(tmp_path, lambda p, text: {"correct": float(len(text) <= 1)})
    assert m[0]["length"] > 2.5 and m[-1]["length"] < 2.2 and m[-1]["finished"] == 1


def test_a_reward_that_never_varies_is_said(tmp_path, capsys):
    m = trained(tmp_path, lambda p, text: {"correct": 0.0}, steps=4, warm_steps=5)
    assert m[-1]["dead_groups"] == 1
    assert capsys.readouterr().out.count("warning: for 3 steps in a row all rewards") == 1


# --------------------------------------------------------------- the same run, whatever happens

@pytest.mark.slow
def test_same_seed_same_run_and_another_seed_another(unbroken, tmp_path):
    for seed, same in ((1, True), (2, False)):
        main([*SMALL, "--steps", "6", "--seed", str(seed), "--out", str(tmp_path / str(seed))])
        assert (metrics(tmp_path / str(seed)) == metrics(unbroken)) is same
        assert (weights(tmp_path / str(seed)) == weights(unbroken)) is same


@pytest.mark.slow
def test_half_and_half_is_the_whole(unbroken, tmp_path, capsys):
    """Resume that forgets the optimizer, the reference or the random state would show here."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "3", "--out", str(tmp_path)])
    assert "starting from" in capsys.readouterr().out       # the cached warm start
    main(["--resume", "--steps", "6", "--out", str(tmp_path)])
    assert weights(tmp_path) == weights(unbroken)
    assert metrics(tmp_path)[4:] == metrics(unbroken)[4:]
    assert [m["step"] for m in metrics(tmp_path)] == list(range(7))


WHOLE = ["--algo ppo --critic separate", "--reward rollouts --supervision process --iterations 2",
         *(pytest.param(args, marks=pytest.mark.slow) for args in ("--algo ppo", "--baseline group+value",
                                                                   "--reward model --iterations 2"))]


@pytest.mark.slow
@pytest.mark.parametrize("args", WHOLE)
def test_half_and_half_is_the_whole_with_every_part(unbroken, tmp_path, monkeypatch, args):
    """The critic, the reward model, the reference of the second iteration, the labelled rows."""
    class Killed(BaseException):
        pass

    def save(agent, step):
        old_save(agent, step)
        if step == 2:
            raise Killed
    args = [*SMALL, *args.split(), *"--steps 3 --save_every 1 --held_out 2 --samples 2".split()]
    for name in ("whole", "half"):
        copy_warm_start(unbroken, tmp_path / name)
    main([*args, "--out", str(tmp_path / "whole")])
    old_save = checkpoint.save
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint, "save", save)
        main([*args, "--out", str(tmp_path / "half")])
    main(["--resume", "--out", str(tmp_path / "half")])
    assert weights(tmp_path / "half") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    one, other = (saved(tmp_path / name).tensors for name in ("half", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    if "iterations" in " ".join(args):
        assert metrics(tmp_path / "whole")[-1]["step"] == 6
        assert len(one["history.ids"]) == 2 * 54 * 4
        assert sum("rm_accuracy" in m for m in metrics(tmp_path / "whole")) == 2
        begun = pretrained.load(tmp_path / "whole" / "warm_start").embed_tokens.weight
        assert not torch.equal(one["ref.embed_tokens.weight"], begun)       # the reference moved on


@pytest.mark.slow
@pytest.mark.parametrize("algo", list(grpo.ALGOS))
def test_every_algorithm_runs_and_moves_the_policy(unbroken, tmp_path, algo):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "2", "--algo", algo, "--out", str(tmp_path)])
    m = metrics(tmp_path)
    assert m[1]["grad_norm"] > 1e-3 and weights(tmp_path) != (
        tmp_path / "warm_start" / "model.safetensors").read_bytes()
    assert ("value_loss" in m[1] and "explained_variance" in m[1]) is (algo in ("a2c", "ppo"))
    assert grpo.ALGOS[algo].items() <= vars(checkpoint.load(tmp_path, Config)[0]).items()
    assert ("kl" in m[1] and "beta" in m[1]) is (grpo.ALGOS[algo].get("kl") != "none")


def settings(*flags):
    """The Config of a command line."""
    return make_config(**config.read(Config, "", flags)[1])


def test_an_algorithms_fields_can_be_overridden():
    cfg = settings("--algo", "ppo", "--beta", "0", "--clip_high", "0.3")
    assert (cfg.baseline, cfg.beta, cfg.clip_high, cfg.lr) == ("value", 0, 0.3, arithmetic.DEFAULTS["lr"])
    cfg = settings("--algo", "dapo", "--loss_mean", "constant", "--kl", "loss")
    assert (cfg.loss_mean, cfg.kl, cfg.clip_high) == ("constant", "loss", 0.28)      # of the row itself


def test_a_learned_reward_is_not_divided_by_the_std_unless_told():
    scale = lambda *flags: settings(*flags).adv_scale
    assert scale() == "group" and scale("--reward", "model") == "none"
    assert scale("--reward", "model", "--adv_scale", "group") == "group"
    assert scale("--reward", "model", "--algo", "ppo") == "batch"           # the algorithm decides
    assert Config(reward="model").adv_scale == "group"                          # the paper's


@pytest.mark.slow
def test_the_learning_rate_halves_and_is_resumed(unbroken, tmp_path, monkeypatch):
    """It follows from the step alone; 0: it stays as it is."""
    rates, real = [], torch.optim.AdamW.step

    def step(opt, *given):
        if opt.defaults["lr"] == 1e-3:          # not the warm start's
            rates.append(opt.param_groups[0]["lr"])
        return real(opt, *given)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for name, half_life in (("constant", "0"), ("falling", "2"), ("cut", "2")):
        copy_warm_start(unbroken, tmp_path / name)
        main([*SMALL, "--half_life", half_life, "--steps", "2" if name == "cut" else "3", "--out", str(tmp_path / name)])
    main(["--resume", "--steps", "3", "--out", str(tmp_path / "cut")])
    falling = pytest.approx([1e-3 * 0.5 ** (i / 2) for i in (0, 0, 1, 1, 2, 2)])    # two optimizer steps in each
    assert rates[:6] == [1e-3] * 6 and rates[6:12] == falling and rates[12:] == falling
    assert weights(tmp_path / "cut") == weights(tmp_path / "falling") != weights(tmp_path / "constant")


@pytest.mark.slow
def test_ppo_has_an_epsilon_of_its_own(cfg, model):
    for algo, eps in (("grpo", 1e-8), ("ppo", 1e-5)):
        cfg = dataclasses.replace(cfg, **grpo.ALGOS[algo])
        assert grpo.new_agent(cfg, arithmetic, None, model).opt.defaults["eps"] == eps


@pytest.mark.slow
def test_the_true_reward_is_logged_beside_the_learned_one(unbroken, tmp_path):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--reward", "model", "--out", str(tmp_path)])
    one, base = metrics(tmp_path)[1], metrics(unbroken)[1]
    assert one["rule_reward"] == base["reward"] and "rule_reward" not in base
    assert one["reward"] != base["reward"] and one["kl"] > 0


@pytest.mark.slow
def test_what_the_limit_costs_is_no_label(unbroken, tmp_path, monkeypatch):
    """The reward of a row that did not end is set after the labels: -2 is no chance of a step."""
    copy_warm_start(unbroken, tmp_path)
    monkeypatch.setattr(grpo.reward, "TRUNCATED_REWARD", -2.0)
    main([*SMALL, "--steps", "1", "--reward", "model", "--supervision", "process", "--temperature", "3", "--out", str(tmp_path)])
    rows = saved(tmp_path).tensors
    last = passes.last_tokens(rows["history.mask"])
    assert (rows["history.ids"][last] != 256).any() and metrics(tmp_path)[1]["finished"] < 1
    assert set(rows["history.label"][rows["history.ends"]].tolist()) <= {0.0, 1.0}


def signalled(where, work, args, stage, number):
    """Calls `work(args)` in a process, which gets a signal when it prints a line with `stage`: its exit code, what it
    then printed, and its stderr."""
    where.mkdir()
    os.mkfifo(where / "stdout")
    process = Forked(where, work, [*map(str, args)])
    with open(where / "stdout") as lines:
        for line in lines:
            if stage in line:
                process.kill(number)
                break
        rest = lines.read()
    return process.join(), rest, (where / "stderr").read_text()


def dies_in_a_write(args):
    """The command line; SIGKILL comes with half of the second checkpoint written."""
    real, saved = files.save_file, []

    def save_file(tensors, path, metadata):
        """The real one."""
        real(tensors, path, metadata)
        saved.append("checkpoint" in str(path))
        if sum(saved) == 2:
            os.truncate(path, 999)
            os.kill(os.getpid(), signal.SIGKILL)
    files.save_file = save_file
    main(args)


@pytest.mark.slow
def test_killed_at_any_moment(unbroken, forked, tmp_path):
    """SIGKILL four times, the last within a write of the checkpoint; then resume to the end. The
    second finds only the checkpoint of step 0, when the optimizer has no state yet."""
    out = tmp_path / "run"
    for stage in ("warm start", "step 1/6", "step 3/6", "write"):
        flags = [*SMALL, "--steps", "6"] if stage == "warm start" else ["--resume"]
        work = dies_in_a_write if stage == "write" else main
        code, *said = signalled(tmp_path / stage.replace("/", " of "), work, [*flags, "--out", out], stage, signal.SIGKILL)
        assert code == -signal.SIGKILL, (stage, said)
    main(["--resume", "--out", str(out)])
    assert weights(out) == weights(unbroken)
    assert metrics(out) == metrics(unbroken)
    assert (out / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_says_how_to_resume(unbroken, forked, tmp_path, sig):
    out = tmp_path / "run"
    copy_warm_start(unbroken, out)
    code, said, err = signalled(tmp_path / "process", main, [*SMALL, "--steps", "500", "--out", out], "step 1/", sig)
    assert code == 128 + sig and err == ""
    last = said.splitlines()[-1]
    assert re.fullmatch(rf"stopped after step \d+; continue with: python grpo.py --resume --out {out}", last)
    assert saved(out).step == int(re.search(r"step (\d+)", last)[1]) == metrics(out)[-1]["step"]


@pytest.mark.slow
def test_a_stop_in_a_refit_loses_no_step(unbroken, tmp_path, monkeypatch):
    copy_warm_start(unbroken, tmp_path)
    real = grpo.refit_reward_model
    def begin(agent, problems, iteration):
        if iteration == 1:
            raise dist.Stopped("in the reward model")
        return real(agent, problems, iteration)
    monkeypatch.setattr(grpo, "refit_reward_model", begin)
    with pytest.raises(SystemExit):
        main([*SMALL, *"--reward model --iterations 2 --steps 3 --save_every 9".split(), "--out", str(tmp_path)])
    assert saved(tmp_path).step == 3


def test_a_rank_without_rows_in_a_fit():
    model = GPT(GPTConfig(257, 1, 1, 1, 8, n_inner=8, block_size=8))
    warm_start.supervised_fit("nothing", model, lambda step: (), 1, 1e-3)


# -------------------------------------------------------------------------------- what is written

def test_the_run_folder(unbroken):
    assert {p.name for p in unbroken.iterdir()} == {
        "model.safetensors", "config.json", "checkpoint.safetensors", "run.json", "metrics.jsonl",
        "samples.jsonl", "report.html", "warm_start", "tokenizer.json", "tokenizer_config.json", "lock"}
    lines = metrics(unbroken, timed=True)
    assert set(lines[1]) >= set("step seconds beta reward accuracy length kl entropy clip_share mismatch "
                                "grad_norm dead_groups finished reward_seconds rollout_tok_s update_tok_s loss working".split())
    measured = {"greedy", *(f"pass@{k}" for k in (1, 2, 4, 8)), *(f"maj@{k}" for k in (2, 4, 8))}
    assert set(lines[0]) == {"step"} | measured and measured < set(lines[-1])
    record = json.loads((unbroken / "samples.jsonl").read_text().splitlines()[0])
    assert len(record["completions"]) == len(record["rewards"]) == len(record["advantages"]) == 8
    assert json.loads((unbroken / "run.json").read_text())["config"]["group"] == 8


def test_reference_stays_what_it_was(unbroken):
    """Frozen, outside the graph, and in the checkpoint: it is the warm-started policy."""
    tensors = saved(unbroken).tensors
    warm = dict(pretrained.load(unbroken / "warm_start").named_parameters())
    assert saved(unbroken).step == 6
    assert all(torch.equal(tensors[f"ref.{n}"], p) for n, p in warm.items())
    assert all(not torch.equal(tensors[f"policy.{n}"], p) for n, p in warm.items())


def test_trained_ids_are_the_sampled_ids(monkeypatch, tmp_path):
    """Text decoded and tokenised again is another sequence: here bytes that are no UTF-8."""
    seen = {}
    real_sample, real_update = grpo.sample, grpo.update
    def spy(*args, **named):
        seen["sampled"] = real_sample(*args, **named)
        return seen["sampled"]
    def check(agent, batch, *rest):
        assert batch.ids is seen["sampled"].ids and batch.mask is seen["sampled"].mask
        seen["bytes"] = seen.get("bytes", 0) + int((batch.ids[batch.mask] > 127).sum())
        return real_update(agent, batch, *rest)
    monkeypatch.setattr(grpo, "sample", spy)
    monkeypatch.setattr(grpo, "update", check)
    trained(tmp_path, lambda p, text: {"correct": float(len(text) % 2)}, steps=2, warm_steps=0)
    assert seen["bytes"] > 20


def test_beta_0_needs_no_reference(tmp_path, unbroken):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--beta", "0", "--out", str(tmp_path)])
    assert not [n for n in saved(tmp_path).tensors if n.startswith("ref.")]
    assert "kl" not in metrics(tmp_path)[1] and "beta" not in metrics(tmp_path)[1]


@pytest.mark.slow
def test_bfloat16_asks_the_trainer_for_old_logp(tmp_path, unbroken):
    """Sampler and trainer round differently: the first ratio is 1 all the same."""
    main([*SMALL, *"--steps 1 --minibatches 1 --dtype bfloat16 --held_out 1 --samples 1 --warm_steps 2".split(),
          "--init", str(unbroken / "warm_start"), "--out", str(tmp_path)])
    m = metrics(tmp_path)[1]
    assert 1e-4 < m["mismatch"] < passes.MISMATCH[torch.bfloat16][0] and m["clip_share"] == 0
    tensors = saved(tmp_path).tensors
    assert {t.dtype for n, t in tensors.items() if n[:4] != "ref."} == {torch.float32}  # master weights
    ref = {n for n, t in tensors.items() if n[:4] == "ref." and t.dtype == torch.bfloat16}
    assert ref == {n for n in tensors if n[:4] == "ref." and ("_proj." in n or "lm_head" in n)}


@pytest.mark.slow
def test_ask_and_eval_only(unbroken, capsys):
    main(["--ask", "3*4=", "--init", str(unbroken), "--max_new", "12"])
    assert capsys.readouterr().out.startswith("3*4=")
    main(["--eval_only", *SMALL, "--init", str(unbroken)])
    out = capsys.readouterr().out
    for where in ("--init", "--out"):       # with the settings of the run, which once had to be repeated
        main(["--eval_only", where, str(unbroken)])
        assert capsys.readouterr().out == out
    last = metrics(unbroken)[-1]
    assert out.strip() == "  ".join(f"{name} {last[name]:.1%}" for name in ("greedy", "pass@1", "pass@8", "maj@8"))


def test_majority_and_pass_at_k_of_known_completions(monkeypatch):
    """Two problems: answers b b c and 5 empty ones; and 4 right ones against 4 that agree later."""
    texts = {"x": list("bbc") + [""] * 5, "y": list("aaaa") + list("cccc")}
    assert measured(monkeypatch, texts, [True] * 16) == {
        "greedy": 0.5, "pass@1": pytest.approx((1 / 8 + 4 / 8) / 2), "pass@8": 1.0, "maj@8": 0.5}


def test_an_unfinished_completion_has_no_vote(monkeypatch):
    """Its answer is right by the text, but earned nothing: it once stood for the 7 that finished."""
    texts = {"x": list("bbbbbbbb"), "y": list("aaaaaaaa")}
    got = measured(monkeypatch, texts, [True] * 8 + [False] + [True] * 7)
    assert got["maj@8"] == 0.5 and got["pass@1"] == pytest.approx(7 / 16)


def measured(monkeypatch, texts, finished):
    """What an evaluation says of two problems with 8 samples each, and a greedy "a"."""
    problems = [arithmetic.Problem("x", "c"), arithmetic.Problem("y", "a")]
    task = SimpleNamespace(answer=lambda t: t)

    def generate(agent, chunk, n, rng=None):
        """A greedy completion of each problem, or the samples."""
        assert n == (1 if rng is None else 8)
        rows = [(t, t == p.answer and f, f) for p in chunk for t, f in
                ([("a", True)] if rng is None else zip(texts[p.prompt], finished[8 * problems.index(p):]))]
        said, right, ended = zip(*rows)
        return SimpleNamespace(finished=torch.tensor(ended), texts=said,
                               components={"correct": torch.tensor(right).float()})
    monkeypatch.setattr(grpo, "generate", generate)
    policy = SimpleNamespace(device=torch.device("cpu"))
    found = evaluate(grpo.Agent(Config(), task, None, policy), problems)
    assert [*found] == ["greedy", "pass@1", "pass@2", "pass@4", "pass@8", "maj@2", "maj@4", "maj@8"]
    return {name: found[name] for name in ("greedy", "pass@1", "pass@8", "maj@8")}


# ---------------------------------------------------------------------------------------- faults

@pytest.mark.slow
@pytest.mark.parametrize("args, says", [
    (["--grup", "4"], "there is no setting --grup: did you mean --group?"),
    (["--top_k", "5"], "there is no setting --top_k"),         # would need a renormalised log-prob
    (["--group", "many"], "argument --group: invalid int value: 'many'"),
    (["arithmetic"], "there is no argument arithmetic; see --help"),
    (["--group"], "--group: expected one argument"),
    (["--group", "0"], "--group must be at least 1, got 0"),
    *((["--group", "1", *more], "--group 1: a completion is compared with others of its prompt, unless --baseline is")
      for more in ([], ["--baseline", "none"], ["--baseline", "leave-one-out", "--adv_scale", "none"], ["--algo", "rloo"],
                   ["--baseline", "group+value", "--adv_scale", "batch"], ["--adv_scale", "batch"])),
    (["--lr", "nan"], "--lr must be at least 0, got nan"),
    (["--lam", "1.01"], "--lam must be at most 1, got 1.01"),
    (["--beta", "-0.1"], "--beta must be at least 0, got -0.1"),
    (["--compile", "on"], "there is no argument on; see --help"),
    (["--temperature", "0"], "--temperature must be at least"),
    (["--loss_mean", "median"], "argument --loss_mean: invalid choice: 'median' (choose from "),
    (["--prompts", "8000"], "--prompts 8000: the task has only 7600 problems"),
    (["--task", "chess"], "no task 'chess': choose"),
    (["--task", "./mine.py"], "no file mine.py"),
    (["--init", "nowhere"], "no model in nowhere"),
    (["--ask", "1*1=", "--init", "nowhere"], "no model in nowhere"),
    (["--ask", "1*1=", "--resume"], "not allowed with argument"),
    (["--difficulty", "4"], "arithmetic takes 1 to 3"),
    (["--algo", "trpo"], "there is no --algo trpo: there are grpo, reinforce"),
    (["--resume", "--out", "nowhere"], "no run in nowhere"),
    (["--out", "file/in"], "Not a directory: 'file/in'"),
    (["--device", "cuda"], "--device cuda")])
def test_bad_input_is_one_line_and_code_2(args, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as e:
        main(args)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and err.startswith("error: ") and says in err and err.count("\n") == 1


@pytest.mark.slow
def test_no_traceback_from_the_command_line(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "grpo.py"), "--group", "1"], cwd=tmp_path, text=True, capture_output=True,
                          timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_a_question_that_does_not_fit(unbroken, capsys):
    assert "99 tokens do not fit a context of 16" in fault(capsys, "--ask", "1" * 99, "--init", unbroken)


@pytest.mark.parametrize("n", [17, 10 ** 9])
def test_an_evaluation_that_does_not_fit(n, unbroken, tmp_path, capsys):
    """From a run's folder or the command line; refused before there is memory for it."""
    assert f"and --max_new {n} do not fit" in fault(capsys, "--eval_only", "--init", unbroken, "--max_new", n)
    shutil.copytree(unbroken, tmp_path / "run")
    text = (tmp_path / "run" / "run.json").read_text()
    (tmp_path / "run" / "run.json").write_text(text.replace('"max_new": 12', f'"max_new": {n}'))
    assert f"and --max_new {n} do not fit" in fault(capsys, "--eval_only", "--init", tmp_path / "run")


def test_an_evaluation_of_nothing(unbroken, tmp_path, capsys):
    path = tmp_path / "none.py"
    path.write_text(Path(arithmetic.__file__).read_text() + "\n_all = problems\ndef problems():\n    return _all()[0], []\n")
    said = fault(capsys, "--eval_only", "--init", unbroken, "--task", path)
    assert "the task has no held-out problems to evaluate on" in said


def test_sizes_have_bounds(capsys, tmp_path):
    """Past them pass@k overflows, or ten minutes of labelling come before an error."""
    assert "--samples must be at most 1024, got 1025" in fault(capsys, "--samples", 1025)
    assert report.pass_at(512, [1.0] * 1024) == pytest.approx(1)


def test_a_model_whose_context_is_too_short(unbroken, tmp_path, capsys):
    assert "do not fit" in fault(capsys, "--init", unbroken, "--out", tmp_path, "--steps", 1)


def test_nan_reward_stops_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arithmetic, "reward", lambda p, t: {"correct": float("nan")})
    assert "of the prompt" in fault(capsys, *SMALL, "--warm_steps", 0, "--steps", 1, "--out", tmp_path)


@pytest.mark.slow
def test_a_mistake_leaves_a_finished_run_alone(unbroken, tmp_path, capsys):
    """The folder is opened, and its logs emptied, only after the settings have proved possible."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--out", str(tmp_path)])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    capsys.readouterr()
    fault(capsys, *SMALL, "--prompts", 8000, "--out", tmp_path)
    fault(capsys, *SMALL, "--init", "nowhere", "--out", tmp_path)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert "already at step 1" in fault(capsys, "--resume", "--steps", 0, "--out", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")                 # by somebody; the rest is logged
    main(["--resume", "--steps", "2", "--out", str(tmp_path)])
    assert [m["step"] for m in metrics(tmp_path)] == [2]


@pytest.mark.slow
def test_a_changed_task_gets_a_new_warm_start(unbroken, tmp_path, capsys, monkeypatch):
    """If its demonstrations differ; another reward may be tried at once."""
    reward, demonstration = arithmetic.reward, arithmetic.demonstration
    for name, changes in (("reward", dict(reward=lambda p, text: reward(p, text) | {"more": 0.0})),
                          ("demonstration", dict(demonstration=lambda p, rng: demonstration(p, rng)[:-1] + "0"))):
        with monkeypatch.context() as patch:
            for function, other in changes.items():
                patch.setattr(arithmetic, function, other)
            copy_warm_start(unbroken, tmp_path / name)
            main([*SMALL, "--steps", "0", "--out", str(tmp_path / name)])
        assert ("warm start 80/80" in capsys.readouterr().out) is (name == "demonstration")


def test_resume_needs_nothing_but_the_checkpoint(unbroken, tmp_path):
    """Neither the folder of --init nor the kept warm start."""
    for name in ("checkpoint.safetensors", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(unbroken / name, tmp_path)
    main(["--resume", "--steps", "7", "--out", str(tmp_path)])
    assert metrics(tmp_path)[-1]["step"] == 7 and not (tmp_path / "warm_start").exists()


def test_demonstrations_must_fit(tmp_path, capsys):
    assert "a demonstration has 8 tokens, --max_new is 3" in fault(capsys, *SMALL, "--max_new", 3, "--out", tmp_path)


def test_a_foreign_vocabulary(tmp_path, capsys):
    model = GPT(GPTConfig(vocab_size=200, block_size=64))
    pretrained.save(model, tmp_path / "m", byte_encoding().files)
    assert "a vocabulary of 200, the tokenizer one of 257" in fault(capsys, "--ask", "1*1=", "--init", tmp_path / "m")


def test_resume_refuses_what_contradicts_the_run(unbroken, capsys):
    err = fault(capsys, "--resume", "--lr", 0.5, "--out", unbroken)
    assert "has --lr 0.001, not 0.5" in err


@pytest.mark.slow
def test_an_unfinished_run_is_not_overwritten(unbroken, tmp_path, capsys):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "2", "--out", str(tmp_path)])
    path = tmp_path / "checkpoint.safetensors"
    cfg, state = checkpoint.load(tmp_path, Config)
    checkpoint.write_checkpoint(dataclasses.replace(cfg, steps=4), state)
    before = path.read_bytes()
    capsys.readouterr()
    assert "stopped at step 2:" in fault(capsys, *SMALL, "--out", tmp_path)
    assert path.read_bytes() == before
    checkpoint.write_checkpoint(dataclasses.replace(cfg, steps=4), dataclasses.replace(state, step=0))
    main([*SMALL, "--steps", "1", "--out", str(tmp_path)])      # one that made no step is in nobody's way
    assert saved(tmp_path).step == 1


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another version"])
def test_damaged_checkpoint(unbroken, tmp_path, capsys, damage):
    path = tmp_path / "checkpoint.safetensors"
    whole = (unbroken / "checkpoint.safetensors").read_bytes()
    path.write_bytes({"truncated": whole[:5000], "foreign": weights(unbroken),
                      "another version": whole.replace(b"half_life", b"half_live")}[damage])
    assert "checkpoint.safetensors" in fault(capsys, "--resume", "--out", tmp_path)


# ------------------------------------------------------------------- settings, in a notebook too

def test_one_way_to_a_config():
    """The task's defaults, then the reward's, then the algorithm's, then what is asked for."""
    assert make_config(algo="dapo").clip_high == 0.28
    cfg = make_config(algo="ppo", beta=0.1)
    assert (cfg.baseline, cfg.beta, cfg.lr) == ("value", 0.1, arithmetic.DEFAULTS["lr"])
    assert make_config(task="countdown").max_new == 384
    for flags in ([], ["--algo", "gspo"], ["--reward", "model", "--algo", "rloo", "--lr", "0.5"]):
        given = dict(zip([f[2:] for f in flags[::2]], flags[1::2]))
        given |= {"lr": float(given["lr"])} if "lr" in given else {}
        assert settings(*flags) == make_config(**given)
    with pytest.raises(UserError, match="there is no --algo trpo: there are grpo, reinforce"):
        make_config(algo="trpo")


@pytest.mark.parametrize("given, why", [
    (dict(clip_hi=3), "there is no setting clip_hi: did you mean --clip_high\\?$"), (dict(group="8"), "--group must be of the type int, got '8'"),
    (dict(lr="1e-4"), "--lr must be of the type float, got '1e-4'"), (dict(seed=1.5), "must be of the type int, got 1.5"), (dict(out=3), "must be of the type str, got 3"),
    (dict(difficulty="1"), "--difficulty must be of the type int, got '1'"),
    (dict(xyz=1), "there is no setting xyz: see --help, and docs/troubleshooting.md for"), (dict(reward="modl"), "--reward must be one of rule, model, rollouts, got 'modl'")])
def test_a_wrong_setting_in_a_notebook_is_a_fault(given, why):
    with pytest.raises(UserError, match=why):
        make_config(**given)


def test_a_wrong_default_of_a_task_is_a_fault(monkeypatch):
    monkeypatch.setitem(arithmetic.DEFAULTS, "step", 30)
    with pytest.raises(UserError, match=r"no setting step: did you mean --steps"):
        make_config()


def test_a_task_may_choose_an_algorithm(monkeypatch):
    monkeypatch.setitem(arithmetic.DEFAULTS, "algo", "ppo")
    assert make_config().baseline == "value" and make_config(algo="grpo").baseline == "group"


@pytest.mark.slow
def test_a_kl_can_be_watched_without_being_applied(unbroken, tmp_path):
    """The policy goes the way of a run without a reference, and the KL to it is logged. Up to rounding: without one,
    rows that have no advantage are left out."""
    for name, flags in (("watch", ["--kl", "watch"]), ("none", ["--kl", "none"])):
        copy_warm_start(unbroken, tmp_path / name)
        main([*SMALL, "--steps", "2", *flags, "--out", str(tmp_path / name)])
    watched, blind = metrics(tmp_path / "watch"), metrics(tmp_path / "none")
    a, b = (saved(tmp_path / name).tensors["policy.embed_tokens.weight"] for name in ("watch", "none"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert watched[2]["kl"] > 1e-4 and "kl" not in blind[2]
    for one, other in zip(watched, blind, strict=True):
        assert {k: x for k, x in one.items() if k != "kl"} == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_main_works_in_a_notebook(unbroken, monkeypatch, capsys):
    """Its stdout cannot be reconfigured, and its Ctrl-C is its own afterwards."""
    import io
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    main(["--resume", "--steps", "6", "--out", str(unbroken)])
    assert "the model is in" in out.getvalue() and signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_train_takes_a_config_alone(unbroken, tmp_path):
    copy_warm_start(unbroken, tmp_path)
    flags = dict(zip((f[2:] for f in SMALL[::2]), SMALL[1::2]))
    kinds = {f.name: f.type for f in dataclasses.fields(Config)}
    cfg = make_config(**{name: kinds.get(name, int)(x) for name, x in flags.items()}, steps=6, out=str(tmp_path))
    agent = grpo.train(cfg)
    assert torch.equal(agent.policy.embed_tokens.weight, pretrained.load(tmp_path).embed_tokens.weight)
    assert weights(tmp_path) == weights(unbroken)


@pytest.mark.slow
def test_a_finished_run_is_kept_aside(unbroken, tmp_path, capsys):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--out", str(tmp_path)])
    first = weights(tmp_path)
    main([*SMALL, "--steps", "1", "--lr", "2e-3", "--out", str(tmp_path)])
    assert f"was moved to {tmp_path / 'previous'}" in capsys.readouterr().out
    assert weights(tmp_path / "previous") == first != weights(tmp_path)
    assert saved(tmp_path / "previous").step == 1 and len(metrics(tmp_path / "previous")) == 2
    main(["--ask", "3*4=", "--init", str(tmp_path / "previous"), "--max_new", "12"])


def test_a_copied_run_is_resumed_where_it_lies(unbroken, tmp_path, monkeypatch):
    """The settings name the folder that it was copied from, which was once overwritten."""
    before, here = weights(unbroken), tmp_path / "out" / "arithmetic"
    shutil.copytree(unbroken, here)
    monkeypatch.chdir(tmp_path)
    main(["--resume", "--steps", "7"])
    assert saved(here).step == 7 and saved(unbroken).step == 6
    assert weights(unbroken) == before
    assert json.loads((here / "run.json").read_text())["config"]["out"] == "out/arithmetic"


def test_resume_with_the_algorithm_of_the_run_or_another(unbroken, capsys):
    main(["--resume", "--algo", "grpo", "--out", str(unbroken)])
    for other in ("gspo", "cispo"):
        assert f"has --algo grpo, not {other}" in fault(capsys, "--resume", "--algo", other, "--out", unbroken)
    assert "there is no --algo trpo: there are" in fault(capsys, "--resume", "--algo", "trpo", "--out", unbroken)


@pytest.mark.parametrize("name", ["reward", "kl", "length", "step", "greedy", "mismatch"])
def test_a_component_with_the_name_of_a_statistic_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=f"rename the reward component '{name}'"):
        trained(tmp_path, lambda p, text: {"correct": 0.0, name: 1.0}, steps=1, warm_steps=0)


@pytest.mark.slow
def test_every_statistic_is_a_name_that_no_component_may_bear(tmp_path, unbroken):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--algo", "ppo", "--reward", "model", "--out",
          str(tmp_path)])
    names = set().union(*metrics(tmp_path, timed=True))
    names = {name for name in names if "@" not in name} - {"working"}
    assert not names - data.STATISTICS, f"add {names - data.STATISTICS} to STATISTICS in data/__init__.py"


def without(*functions):
    task = toy(lambda p, text: {"correct": 0.0})
    for name in functions:
        delattr(task, name)
    return task


def test_what_a_task_need_not_have(tmp_path):
    """`steps` serves process supervision alone, `demonstration` the warm start."""
    small = dict(n_layer=1, n_embd=32, warm_steps=2, prompts=4, group=2, max_new=8, steps=1)
    grpo.train(Config(out=str(tmp_path / "a"), **small), without("steps"))
    grpo.train(Config(out=str(tmp_path / "b"), init=str(tmp_path / "a"), **small | dict(warm_steps=0)), without("demonstration"))
    for name, change in (("steps", dict(supervision="process")), ("demonstration", {})):
        with pytest.raises(UserError, match=f"has no function {name}"):
            grpo.train(Config(out=str(tmp_path / "c"), **small, **change), without(name))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("wrong, why", [
    (dict(reward=lambda p, text: 1.0), "must be a dict with 'correct'"),
    (dict(reward=lambda p, text: {"right": 1.0}), "must be a dict with 'correct'")])
def test_a_wrong_task_is_found_before_the_warm_start(tmp_path, wrong, why, capsys):
    task = SimpleNamespace(**vars(toy(lambda p, text: {"correct": 0.0})) | wrong)
    with pytest.raises(UserError, match=why):
        grpo.train(Config(task="sums", out=str(tmp_path), prompts=8, warm_steps=10), task)
    assert "warm start" not in capsys.readouterr().out


def test_a_task_needs_held_out_problems(tmp_path):
    task = toy(None)
    task.problems = lambda: (toy(None).problems()[0], [])
    with pytest.raises(UserError, match="no held-out problems"):
        grpo.train(Config(out=str(tmp_path / "x"), prompts=8), task)


@pytest.mark.slow
def test_a_task_is_a_file_anywhere(tmp_path, monkeypatch, capsys):
    """Its run is in out/<name>; the same warm start is taken up until its demonstrations change."""
    path = tmp_path / "letters.py"
    path.write_text(
        "from typing import NamedTuple\n"
        "DEFAULTS = dict(n_layer=1, n_embd=32, warm_steps=3, prompts=4, group=2, max_new=4,\n"
        "                steps=1)\n"
        "class Problem(NamedTuple):\n    prompt: str\n"
        "def problems(): return [Problem(c) for c in 'abcd'], [Problem('e')]\n"
        "def demonstration(problem, rng): return problem.prompt\n"
        "def reward(problem, text): return {'correct': float(text == problem.prompt)}\n"
        "def answer(text): return text\n")
    monkeypatch.chdir(tmp_path)
    for again, says in ((False, "warm start 3/3"), (True, "starting from"), (True, "starting from")):
        main(["--task", "./letters.py"])
        assert says in capsys.readouterr().out
    assert (tmp_path / "out" / "letters" / "model.safetensors").exists()
    path.write_text(path.read_text() + "# changed\n")
    main(["--task", "./letters.py"])
    assert "starting from" in capsys.readouterr().out
    path.write_text(path.read_text().replace("return problem.prompt\n", "return 2 * problem.prompt\n"))
    main(["--task", "./letters.py"])
    assert "is rebuilt: the demonstrations, their tokens, or --init's weights changed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["task", "algo"])
def test_a_strangers_folder_runs_no_code(name, unbroken, tmp_path, capsys):
    """Its settings may name a file, which is executed only if a flag names it too. Of the algorithm a question and an
    evaluation need nothing."""
    shutil.copytree(unbroken, tmp_path / "run")
    ran, file = tmp_path / "ran", tmp_path / "file.py"
    rest = Path(arithmetic.__file__).read_text() if name == "task" else "SETTINGS = {}\n"
    file.write_text(f"open({str(ran)!r}, 'w').close()\n" + rest)
    (tmp_path / "run" / "functions.py").write_text(file.read_text())
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["config"][name] = str(file)
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    _, state = checkpoint.load(tmp_path / "run", Config)
    checkpoint.write_checkpoint(Config(**about["config"] | {"out": str(tmp_path / "run")}), state)
    for mode in (["--resume", "--out"], ["--eval_only", "--init"], ["--ask", "1*1=", "--out"]):
        if name == "task" or "--resume" in mode:
            assert "which would be executed" in fault(capsys, *mode, tmp_path / "run")
        else:
            main([*mode, str(tmp_path / "run")])
        assert not ran.exists()
    main(["--eval_only", "--init", str(tmp_path / "run"), f"--{name}", str(file)])
    assert ran.exists()
    main(["--resume", "--out", str(tmp_path / "run"), f"--{name}", str(file)])
    assert show.resume_command(Config(**{name: str(file)}, out="x")).endswith(f"--out x --{name} {file}")


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 6])
def test_a_signal_in_an_evaluation_loses_nothing(unbroken, tmp_path, monkeypatch, capsys, at):
    """The evaluation is given up, the step it follows is kept, and the run ends as one left alone."""
    copy_warm_start(unbroken, tmp_path)
    real, step = grpo.evaluate, []

    def evaluate(agent, problems):
        """The real one; Ctrl-C comes to the first, or to the last."""
        step.append(6 * len(step))
        if step[-1] == at:
            os.kill(os.getpid(), signal.SIGINT)
        return real(agent, problems)
    monkeypatch.setattr(grpo, "evaluate", evaluate)
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--steps", "6", "--out", str(tmp_path)])
    assert ended.value.code == 130
    assert "stopped in the greedy evaluation, which will begin again; continue with" in capsys.readouterr().out
    assert [m["step"] for m in metrics(tmp_path)] == [*range(at)]
    assert saved(tmp_path).step == (6 if at else -1) and bool(saved(tmp_path).stats) == bool(at)
    main(["--resume", "--out", str(tmp_path)])
    assert metrics(tmp_path) == metrics(unbroken) and weights(tmp_path) == weights(unbroken)
    assert "is complete" not in capsys.readouterr().out and not saved(tmp_path).stats
    assert (tmp_path / "samples.jsonl").read_bytes() == (unbroken / "samples.jsonl").read_bytes()


def test_ctrl_c_ends_an_evaluation_alone_at_once(unbroken, monkeypatch, capsys):
    def evaluate(agent, problems):
        """Ctrl-C comes."""
        raise KeyboardInterrupt
    monkeypatch.setattr(grpo, "evaluate", evaluate)
    with pytest.raises(SystemExit) as ended:
        main(["--eval_only", "--out", str(unbroken)])
    assert ended.value.code == 130 and capsys.readouterr() == ("", "")


def test_a_second_signal_is_obeyed_at_once():
    with pytest.raises(SystemExit) as ended, dist.stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
        assert dist.stop_asked() == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.code == 130


def test_what_takes_long_says_how_far_it_is(capsys, monkeypatch):
    """Every 10 seconds, and when it is told to, with the time left at the pace so far."""
    now = [0.0]
    monkeypatch.setattr(show.time, "time", lambda: now[0])
    told = show.progress("evaluation", 500)
    for done, at in ((0, 0), (10, 9), (20, 11), (30, 12), (50, 20), (60, 22)):
        now[0] = at
        told(done)
    told(60, "loss 1.5  ", True)
    assert capsys.readouterr().out.splitlines() == [
        "evaluation 20/500  left 4:24", "evaluation 60/500  left 2:41", "evaluation 60/500  loss 1.5  left 2:41"]


def test_parts_stop_when_they_are_asked_to(monkeypatch):
    assert [*show.chunks("labelling", "abcde", 2)] == ["ab", "cd", "e"]
    with pytest.raises(dist.Stopped, match="in the labelling, which will begin again"), dist.stoppable():
        for part in show.chunks("labelling", "abcde", 2):
            assert part == "ab"
            os.kill(os.getpid(), signal.SIGINT)


def test_more_samples_of_fewer_problems(unbroken, capsys):
    main(["--eval_only", "--out", str(unbroken), "--samples", "5", "--held_out", "7"])
    said = dict(part.split(" ") for part in capsys.readouterr().out.strip().split("  "))
    assert [*said] == ["greedy", "pass@1", "pass@5", "maj@5"]
    assert all(abs(float(x[:-1]) / 100 * 35 - round(float(x[:-1]) / 100 * 35)) < 0.02 for x in said.values())


# -------------------------------------------------------------- a warm start from a checkpoint

@pytest.mark.slow
def test_a_checkpoint_starts_as_it_is_or_warm(unbroken, tmp_path, capsys):
    """Without --warm_steps its weights are the start; with it they are fitted, at another rate, and
    kept for the next run with the same settings and the same checkpoint."""
    base = tmp_path / "base"
    main([*SMALL, "--steps", "0", "--warm_steps", "3", "--held_out", "2", "--out", str(base)])
    args = ["--init", str(base), *SMALL[:2], *SMALL[-10:], "--steps", "0", "--held_out", "2"]
    main([*args, "--out", str(tmp_path / "as_it_is")])
    assert weights(tmp_path / "as_it_is") == weights(base) and not (tmp_path / "as_it_is/warm_start").exists()
    warm = [*args, "--warm_steps", "30", "--warm_lr", "2e-3", "--out", str(tmp_path / "warm")]
    capsys.readouterr()
    main(warm)
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"warm start \d+/30  loss ([\d.]+)", out)]
    assert f"starting from {base}" in out and losses[-1] < losses[0]
    assert weights(tmp_path / "warm") != weights(base)
    fitted = weights(tmp_path / "warm")
    main(warm)
    out = capsys.readouterr().out
    assert f"starting from {tmp_path / 'warm/warm_start'}" in out and "warm start 3/30" not in out
    assert weights(tmp_path / "warm") == fitted
    main([*SMALL, "--steps", "0", "--warm_steps", "4", "--held_out", "2", "--out", str(base)])
    main(warm)
    assert "is rebuilt: the demonstrations, their tokens, or --init's weights changed" in capsys.readouterr().out
    assert weights(tmp_path / "warm") != fitted


def test_the_settings_of_a_checkpoint():
    """It makes no warm start unless asked, and then at a rate for a trained model; a flag comes first."""
    assert (make_config(task="sums").warm_steps, make_config(task="sums").warm_lr) == (1500, 1.2e-3)
    assert (make_config(init="x").warm_steps, make_config(init="x").warm_lr) == (0, 2e-5)
    given = make_config(init="x", warm_steps=7, warm_lr=1e-4)
    assert (given.warm_steps, given.warm_lr) == (7, 1e-4)


@pytest.mark.slow
def test_a_warm_start_frames_its_prompts_and_teaches_the_end_of_a_turn(tmp_path, monkeypatch):
    """What a checkpoint with a chat template learns from is what it will be asked, up to the token
    that ends its turn."""
    chat_folder(tmp_path / "chat")
    seen, real = [], warm_start.token_logps

    def token_logps(model, ids, mask, temperature):
        """The real one."""
        seen.append((ids, mask))
        return real(model, ids, mask, temperature)
    monkeypatch.setattr(warm_start, "token_logps", token_logps)
    encoding = load_encoding(tmp_path / "chat")
    grpo.main(["--init", str(tmp_path / "chat"), *"--difficulty 1 --warm_steps 1 --steps 0 --held_out 2 "
               "--max_new 40 --prompts 2 --group 2".split(), "--out", str(tmp_path / "run")])
    rows = [(ids[:n], on[:n]) for ids, mask in seen for ids, on in zip(ids, mask)
            for n in [int(on.nonzero()[-1]) + 1]]
    prompts = {tuple(encoding.encode_prompt(p.prompt)) for p in arithmetic.problems(1)[0]}
    rows = rows[:4]                 # later ones are of its note
    assert {256, encoding.end} <= encoding.stop and encoding.frame.after
    assert encoding.end == encoding.special["<|im_end|>"] != 256
    for ids, on in rows:
        assert tuple(ids[~on].tolist()) in prompts and ids[-1] == encoding.end
        assert encoding.end not in ids[on].tolist()[:-1]


@pytest.mark.parametrize("compile", [True, False])
def test_the_header_says_with_what_a_run_works(capsys, compile):
    cfg = Config(device="cpu", dtype="float32", compile=compile, lr=3e-5)
    show.header(cfg, byte_encoding(), torch.nn.Linear(999, 10), range(70), range(5))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0.01M parameters on cpu in float32; 70 problems, 5 held out; 16 x 64 rows a step, --lr 3e-05"
    assert ["compiling" in line for line in said[1:]] == [True] * compile


@pytest.mark.parametrize("settings, noted", [
    (dict(lr=1e-6), ["--lr 1e-06 is the paper's"]), (dict(lr=2e-6), []), (dict(lr=1e-4, baseline="none"), ["--baseline none"]),
    (dict(lr=1e-4, baseline="value", adv_scale="none"), []), (dict(lr=1e-4, baseline="leave-one-out"), []),
    (dict(lr=1e-4, baseline="value"), ["--baseline value"])])
def test_the_header_notes_what_a_newcomer_would_not_expect(settings, noted, capsys):
    cfg = Config(device="cpu", dtype="float32", **settings)
    show.header(cfg, byte_encoding(), torch.nn.Linear(999, 10), range(70), range(5))
    said = capsys.readouterr().out.splitlines()[1:]
    assert len(said) == len(noted) and all(text in line and line.startswith("note: ") for text, line in zip(noted, said))
