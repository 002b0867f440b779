"""Whole runs: learning, determinism, resume after a kill, faults, ranks, what is written."""
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import data.arithmetic as arithmetic
import grpo
from data.run import find_run, percent, rng
from data.tokenizer import byte_encoding
from grpo import Config, evaluate, main
from model import GPT, GPTConfig

# A few seconds: 1-digit problems, a small model, a short warm start.
SMALL = ("--difficulty 1 --n_layer 1 --n_embd 64 --n_head 4 --warm_steps 80 --warm_lr 5e-3 --prompts 4 "
         "--group 8 --max_new 12 --save_every 2 --lr 1e-3 --beta 0.005").split()


def run(*args, cwd=ROOT, **env):
    return subprocess.run([sys.executable, str(ROOT / "grpo.py"), *map(str, args)], cwd=cwd, text=True,
                          capture_output=True, env={**os.environ, **env}, timeout=120)


def metrics(folder, timed=False):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    clocks = set() if timed else {"seconds", "rollout_tok_s", "update_tok_s"}
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 6 steps in this process, which the others are compared with."""
    folder = tmp_path_factory.mktemp("unbroken")
    main([*SMALL, "--steps", "6", "--out", str(folder)])
    assert all(m["grad_norm"] > 1e-3 and m["dead_groups"] < 1 for m in metrics(folder)[1:])
    return folder


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


def copy_warm_start(source, target):
    import shutil
    shutil.copytree(source / "warm_start", target / "warm_start")


# ------------------------------------------------------------------------------------ learning

def toy(reward):
    """A task of one-byte prompts, without a warm start's help."""
    problems = [arithmetic.Problem(c, c) for c in "abcdefgh"]
    return SimpleNamespace(DEFAULTS={}, problems=lambda cfg: (problems, problems[:2]), reward=reward,
                           demonstration=lambda p, r: "ab"[r.randrange(2)] * r.randrange(1, 6),
                           answer=lambda text: text, steps=lambda p, text: [])


def trained(tmp_path, reward, **changes):
    cfg = Config(out=str(tmp_path), **{**dict(
        n_layer=1, n_embd=32, n_head=4, warm_steps=60, warm_lr=5e-3, prompts=8, group=8, max_new=8,
        steps=25, lr=3e-3), **changes})
    grpo.train(cfg, toy(reward))
    return metrics(tmp_path)[1:]


def only_b(text):
    return float(bool(text) and set(text) == {"b"})


def test_learns_what_is_rewarded(tmp_path):
    """Tiny and end to end: completions of nothing but `b` are to replace the others."""
    m = trained(tmp_path, lambda p, text: {"correct": only_b(text)}, steps=40, beta=0.0)
    late = sum(line["reward"] for line in m[-5:]) / 5
    assert m[0]["reward"] < 0.5 and late > m[0]["reward"] + 0.3


def test_learns_nothing_from_shuffled_rewards(tmp_path):
    """The same settings, the rewards dealt at random: on the mean of three seeds no gain."""
    gains = []
    for seed in (1, 2, 3):
        truth, r = [], rng(Config(seed=seed), "shuffled")
        def reward(p, text):
            truth.append(only_b(text))
            return {"correct": float(r.random() < 0.5)}
        trained(tmp_path / str(seed), reward, steps=40, beta=0.0, seed=seed)
        gains.append(sum(truth[-320:]) / 320 - sum(truth[:320]) / 320)
    assert sum(gains) / 3 < 0.15, gains


def test_learns_to_stop(tmp_path):
    """Only stopping pays. With the end token outside the mask this could not be learned."""
    m = trained(tmp_path, lambda p, text: {"correct": float(len(text) <= 1)})
    assert m[0]["length"] > 2.5 and m[-1]["length"] < 2.2 and m[-1]["finished"] == 1


def test_a_reward_that_never_varies_is_said(tmp_path, capsys):
    m = trained(tmp_path, lambda p, text: {"correct": 0.0}, steps=4, warm_steps=5)
    assert m[-1]["dead_groups"] == 1
    assert capsys.readouterr().out.count("warning: nothing to learn from") == 1


# --------------------------------------------------------------- the same run, whatever happens

def test_same_seed_same_run_and_another_seed_another(unbroken, tmp_path):
    for seed, same in ((1, True), (2, False)):
        main([*SMALL, "--steps", "6", "--seed", str(seed), "--out", str(tmp_path / str(seed))])
        assert (metrics(tmp_path / str(seed)) == metrics(unbroken)) is same
        assert (weights(tmp_path / str(seed)) == weights(unbroken)) is same


def test_half_and_half_is_the_whole(unbroken, tmp_path, capsys):
    """Resume that forgets the optimizer, the reference or the random state would show here."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "3", "--out", str(tmp_path)])
    assert "starting from" in capsys.readouterr().out       # the cached warm start
    main(["--resume", "--steps", "6", "--out", str(tmp_path)])
    assert weights(tmp_path) == weights(unbroken)
    assert metrics(tmp_path)[4:] == metrics(unbroken)[4:]
    assert [m["step"] for m in metrics(tmp_path)] == list(range(7))


WHOLE = ["--algo ppo", "--algo ppo --critic separate", "--baseline group+value",
         "--reward model --iterations 2",
         "--reward model --supervision process --labels rollouts --iterations 2"]


@pytest.mark.parametrize("args", WHOLE)
def test_half_and_half_is_the_whole_with_every_part(unbroken, tmp_path, args):
    """The critic, the reward model, the reference of the second iteration, the labelled rows."""
    args = [*SMALL, *args.split(), "--steps", "3", "--fit_prompts", "20", "--save_every", "1"]
    for name in ("whole", "half"):
        copy_warm_start(unbroken, tmp_path / name)
    main([*args, "--out", str(tmp_path / "whole")])
    code = ("import data.run, grpo, os, signal, sys\nold, n = grpo.save, []\n"
            "def save(*a):\n"
            "    old(*a)\n"
            "    n.append(a[1])\n"
            "    if a[1] == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
            "grpo.save = save\ngrpo.main(sys.argv[1:])")
    killed = subprocess.run([sys.executable, "-c", code, *args, "--out", str(tmp_path / "half")],
                            cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    main(["--resume", "--out", str(tmp_path / "half")])
    assert weights(tmp_path / "half") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    one, other = (find_run(tmp_path / name, Config)[1]["tensors"] for name in ("half", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    if "iterations" in " ".join(args):
        assert metrics(tmp_path / "whole")[-1]["step"] == 6
        assert len(one["history.ids"]) == 2 * 20 * 4
        assert sum("rm_accuracy" in m for m in metrics(tmp_path / "whole")) == 2
        start = GPT.from_pretrained(tmp_path / "whole" / "warm_start").embed_tokens.weight
        assert not torch.equal(one["ref.embed_tokens.weight"], start)       # the reference moved on


@pytest.mark.parametrize("algo", list(grpo.ALGOS))
def test_every_algorithm_runs_and_moves_the_policy(unbroken, tmp_path, algo):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "2", "--algo", algo, "--out", str(tmp_path)])
    m = metrics(tmp_path)
    assert m[1]["grad_norm"] > 1e-3 and weights(tmp_path) != (
        tmp_path / "warm_start" / "model.safetensors").read_bytes()
    assert ("value_loss" in m[1] and "explained_variance" in m[1]) is (algo in ("a2c", "ppo"))
    assert grpo.ALGOS[algo].items() <= vars(find_run(tmp_path, Config)[0]).items()


def test_an_algorithms_fields_can_be_overridden(tmp_path):
    cfg = grpo.read_command(["--algo", "ppo", "--beta", "0", "--clip_high", "0.3"])[0]
    assert (cfg.baseline, cfg.beta, cfg.clip_high, cfg.lr) == ("value", 0, 0.3, arithmetic.DEFAULTS["lr"])


def test_a_learned_reward_is_not_divided_by_the_std_unless_told(tmp_path):
    scale = lambda *flags: grpo.read_command([*flags, "--out", str(tmp_path / "none")])[0].scale
    assert scale() == "group" and scale("--reward", "model") == "none"
    assert scale("--reward", "model", "--scale", "group") == "group"
    assert scale("--reward", "model", "--algo", "ppo") == "batch"           # the algorithm decides
    assert Config(reward="model").scale == "group"                          # the paper's


def test_beta_is_steered_to_the_target_kl_and_resumed(unbroken, tmp_path):
    """Far from the target beta moves by 0.1 * 0.2 a step; an interrupted run goes on with it."""
    for name, target, factor in (("up", "1e-9", 1.02), ("down", "1e9", 0.98)):
        copy_warm_start(unbroken, tmp_path / name)
        flags = [*SMALL, "--save_every", "1", "--target_kl", target, "--out", str(tmp_path / name)]
        main([*flags, "--steps", "3"])
        assert metrics(tmp_path / name)[2]["kl"] > 1e-9
        betas = [m["beta"] for m in metrics(tmp_path / name)[1:]]
        assert betas == pytest.approx([0.005, 0.005 * factor, 0.005 * factor ** 2])
    copy_warm_start(unbroken, tmp_path / "cut")
    main([*flags[:-1], str(tmp_path / "cut"), "--steps", "2"])
    main(["--resume", "--steps", "3", "--out", str(tmp_path / "cut")])
    assert metrics(tmp_path / "cut")[-1] == metrics(tmp_path / "down")[-1]
    assert weights(tmp_path / "cut") == weights(tmp_path / "down")


def test_ppo_has_an_epsilon_of_its_own(cfg, model):
    for algo, eps in (("grpo", 1e-8), ("ppo", 1e-5)):
        cfg = dataclasses.replace(cfg, **grpo.ALGOS[algo])
        assert grpo.new_agent(cfg, arithmetic, model, None).opt.defaults["eps"] == eps


def test_the_true_reward_is_logged_beside_the_learned_one(unbroken, tmp_path):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--reward", "model", "--fit_prompts", "20", "--out", str(tmp_path)])
    one, base = metrics(tmp_path)[1], metrics(unbroken)[1]
    assert one["rule_reward"] == base["rule_reward"] == pytest.approx(base["reward"])
    assert one["reward"] != base["reward"] and one["kl"] > 0


def test_what_the_limit_costs_is_no_label(unbroken, tmp_path):
    """The reward of a row that did not end is set after the labels: -2 is no chance of a step."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--reward", "model", "--supervision", "process", "--fit_prompts",
          "20", "--unfinished", "-2", "--temperature", "3", "--out", str(tmp_path)])
    rows = find_run(tmp_path, Config)[1]["tensors"]
    last = grpo.last_tokens(rows["history.mask"])
    assert (rows["history.ids"][last] != 256).any() and metrics(tmp_path)[1]["finished"] < 1
    assert set(rows["history.label"][rows["history.ends"]].tolist()) <= {0.0, 1.0}


def test_killed_at_any_moment(unbroken, tmp_path):
    """SIGKILL four times, the last within a write of the checkpoint; then resume to the end. The
    second finds only the checkpoint of step 0, when the optimizer has no state yet."""
    args = [*SMALL, "--steps", "6", "--out", tmp_path]
    for stage in ("warm start", "step 1/6", "step 3/6", "write"):
        code = "import grpo, sys; grpo.main(sys.argv[1:])"
        if stage == "write":        # die with half of the second checkpoint written
            code = ("import data.run, grpo, os, signal, sys\nold, n = data.run.save_file, []\n"
                    "def save(tensors, path, metadata):\n"
                    "    old(tensors, path, metadata)\n"
                    "    n.append('checkpoint' in str(path))\n"
                    "    if sum(n) == 2: os.truncate(path, 999); os.kill(os.getpid(), signal.SIGKILL)\n"
                    "data.run.save_file = save\n" + code)
        flags = args if stage == "warm start" else ["--resume", "--out", tmp_path]
        child = subprocess.Popen([sys.executable, "-c", code, *map(str, flags)], cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in child.stdout:
            if stage in line:
                child.kill()
                break
        child.communicate()
        assert child.returncode == -signal.SIGKILL, stage
    done = run("--resume", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path) == weights(unbroken)
    assert metrics(tmp_path) == metrics(unbroken)
    assert (tmp_path / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_says_how_to_resume(unbroken, tmp_path, sig):
    copy_warm_start(unbroken, tmp_path)
    child = subprocess.Popen([sys.executable, str(ROOT / "grpo.py"), *SMALL, "--steps", "500", "--out",
                              str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("step 1/"):
            child.send_signal(sig)
            break
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + sig and err == ""
    last = out.splitlines()[-1]
    assert re.fullmatch(rf"stopped after step \d+; go on with: python grpo.py --resume --out {tmp_path}", last)
    assert find_run(tmp_path, Config)[1]["step"] == int(re.search(r"step (\d+)", last)[1]) == metrics(tmp_path)[-1]["step"]


def test_a_stop_in_a_refit_loses_no_step(unbroken, tmp_path, monkeypatch):
    copy_warm_start(unbroken, tmp_path)
    real = grpo.begin_iteration
    def begin(agent, problems, iteration):
        if iteration == 1:
            raise grpo.Stopped("in the reward model")
        return real(agent, problems, iteration)
    monkeypatch.setattr(grpo, "begin_iteration", begin)
    with pytest.raises(SystemExit):
        main([*SMALL, "--iterations", "2", "--steps", "3", "--save_every", "9", "--out", str(tmp_path)])
    assert find_run(tmp_path, Config)[1]["step"] == 3


def test_a_rank_without_rows_in_a_fit():
    from data.run import fit
    fit("nothing", GPT(GPTConfig(257, 1, 1, 1, 8, n_inner=8, block_size=8)), lambda step: (), 1, 1e-3, 1.0)


def test_ranks_divide_the_prompts_and_change_nothing(unbroken, tmp_path):
    """Two processes: different rows on each, together the samples and the update of one. With 16
    optimizer steps a rank has no row in some, and once added its statistics to others."""
    args = [*SMALL, "--steps", "2", "--minibatches", "16"]
    for ranks in ("1", "2"):
        copy_warm_start(unbroken, tmp_path / ranks)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks,
             str(ROOT / "grpo.py"), *args, "--out", str(tmp_path / ranks)], capture_output=True,
            text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    one, two = metrics(tmp_path / "1")[1:], metrics(tmp_path / "2")[1:]
    assert two[0] == pytest.approx(one[0], rel=2e-3, abs=1e-4)
    assert two[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=0.02)


# -------------------------------------------------------------------------------- what is written

def test_the_run_folder(unbroken):
    assert {p.name for p in unbroken.iterdir()} == {
        "model.safetensors", "config.json", "checkpoint.safetensors", "run.json", "metrics.jsonl",
        "samples.jsonl", "warm_start", "tokenizer.json", "tokenizer_config.json"}
    lines = metrics(unbroken, timed=True)
    assert set(lines[1]) == set("step seconds beta reward accuracy length kl entropy clip_share mismatch "
                                "grad_norm dead_groups finished rollout_tok_s update_tok_s loss correct "
                                "working rule_reward".split())
    measured = {"greedy", "pass@1", "pass@8", "maj@8"}
    assert set(lines[0]) == {"step"} | measured and measured < set(lines[-1])
    record = json.loads((unbroken / "samples.jsonl").read_text().splitlines()[0])
    assert len(record["completions"]) == len(record["rewards"]) == len(record["advantages"]) == 8
    assert json.loads((unbroken / "run.json").read_text())["config"]["group"] == 8


def test_reference_stays_what_it_was(unbroken):
    """Frozen, outside the graph, and in the checkpoint: it is the warm-started policy."""
    run = find_run(unbroken, Config)[1]
    step, tensors = run["step"], run["tensors"]
    warm = dict(GPT.from_pretrained(unbroken / "warm_start").named_parameters())
    assert step == 6 and all(torch.equal(tensors[f"ref.{n}"], p) for n, p in warm.items())
    assert all(not torch.equal(tensors[f"model.{n}"], p) for n, p in warm.items())


def test_trained_ids_are_the_sampled_ids(monkeypatch, tmp_path):
    """Text decoded and tokenised again is another sequence: here bytes that are no UTF-8."""
    seen = {}
    real_sample, real_update = grpo.sample, grpo.update
    def spy(*args):
        seen["sampled"] = real_sample(*args)
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
    assert not [n for n in find_run(tmp_path, Config)[1]["tensors"] if n.startswith("ref.")]


def test_bfloat16_asks_the_trainer_for_old_logp(tmp_path, unbroken):
    """Sampler and trainer round differently: the first ratio is 1 all the same."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "2", "--minibatches", "1", "--dtype", "bfloat16", "--out", str(tmp_path)])
    m = metrics(tmp_path)[1]
    assert 1e-4 < m["mismatch"] < grpo.MISMATCH["bfloat16"] and m["clip_share"] == 0
    tensors = find_run(tmp_path, Config)[1]["tensors"]
    assert {t.dtype for n, t in tensors.items() if n[:4] != "ref."} == {torch.float32}  # master weights
    ref = {n for n, t in tensors.items() if n[:4] == "ref." and t.dtype == torch.bfloat16}
    assert ref == {n for n in tensors if n[:4] == "ref." and "_proj." in n}


def test_ask_and_eval_only(unbroken, capsys):
    main(["--ask", "3*4=", "--init", str(unbroken), "--max_new", "12"])
    assert capsys.readouterr().out.startswith("3*4=")
    main(["--eval_only", *SMALL, "--init", str(unbroken)])
    out = capsys.readouterr().out
    assert out.strip() == percent({k: v for k, v in metrics(unbroken)[-1].items()
                                        if k in ("greedy", "pass@1", "pass@8", "maj@8")})


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
    problems = [arithmetic.Problem("x", "c"), arithmetic.Problem("y", "a")]
    task = SimpleNamespace(answer=lambda t: t)
    def complete(agent, chunk, group, source=None):
        rows = [t for p in chunk for t in (texts[p.prompt] if source else ["a"])]
        ended = finished if source else [True] * 2
        right = [float(t == p.answer and f)
                 for p, t, f in zip([p for p in chunk for _ in range(group)], rows, ended)]
        batch = SimpleNamespace(finished=torch.tensor(ended))
        return batch, rows, {"correct": torch.tensor(right)}
    monkeypatch.setattr(grpo, "complete", complete)
    model = SimpleNamespace(norm=SimpleNamespace(weight=torch.zeros(1)))
    return evaluate(grpo.Agent(Config(), task, None, model), problems)


# ---------------------------------------------------------------------------------------- faults

@pytest.mark.parametrize("args, says", [
    (["--grup", "4"], "unrecognized arguments: --grup"),
    (["--top_k", "5"], "unrecognized arguments: --top_k"),         # would need a renormalised log-prob
    (["--group", "many"], "argument --group: invalid int value: 'many'"),
    (["--group"], "--group: expected one argument"),
    (["--group", "1"], "--group is at least 2, not 1"),
    (["--lr", "nan"], "--lr is at least 0, not nan"),
    (["--label_noise", "1.1"], "--label_noise is at most 1, not 1.1"),
    (["--gamma", "1.01"], "--gamma is at most 1, not 1.01"),
    (["--temperature", "0"], "--temperature is at least"),
    (["--mean", "median"], "--mean is one of sequence, token, constant"),
    (["--minibatches", "9999"], "--minibatches 9999"),
    (["--prompts", "8000"], "only 7600 problems"),
    (["--task", "chess"], "unknown task 'chess'"),
    (["--init", "nowhere"], "no model in nowhere"),
    (["--ask", "1*1=", "--init", "nowhere"], "no model in nowhere"),
    (["--ask", "1*1=", "--resume"], "not allowed with argument"),
    (["--difficulty", "4"], "arithmetic has 1 to 3"),
    (["--algo", "trpo"], "--algo is one of grpo, reinforce"),
    (["--difficulty", "1", "--reward", "model"], "2048 prompts at a time: the task has only 59"),
    (["--fit_prompts", "9"], "--fit_prompts is at least 10"),
    (["--resume", "--out", "nowhere"], "no run in nowhere"),
    (["--out", "file/in"], "cannot write in file/in"),
    (["--device", "cuda"], "--device cuda")])
def test_bad_input_is_one_line_and_code_2(args, says, tmp_path, monkeypatch, capsys):
    if args[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as e:
        main(args)
    out, err = capsys.readouterr()
    assert e.value.code == 2 and err.startswith("error: ") and says in err and err.count("\n") == 1


def test_no_traceback_from_the_command_line(tmp_path):
    done = run("--group", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def fault(capsys, *args):
    with pytest.raises(SystemExit) as e:
        main(list(map(str, args)))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1
    return err


def test_a_question_that_does_not_fit(unbroken, capsys):
    assert "do not fit the model's context of 16" in fault(capsys, "--ask", "1" * 99, "--init", unbroken)


def test_a_model_whose_context_is_too_short(unbroken, tmp_path, capsys):
    assert "do not fit" in fault(capsys, "--init", unbroken, "--out", tmp_path, "--steps", 1)


def test_nan_reward_stops_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arithmetic, "reward", lambda p, t: {"correct": float("nan")})
    assert "of the prompt" in fault(capsys, *SMALL, "--warm_steps", 0, "--steps", 1, "--out", tmp_path)


def test_a_warm_start_depends_on_how_and_on_what_it_was_fitted():
    from data.start import warm_note
    cfg = Config()
    for change in (dict(grad_clip=2.0), dict(train="rows.jsonl"), dict(warm_lr=1e-4)):
        assert warm_note(dataclasses.replace(cfg, **change), arithmetic) != warm_note(cfg, arithmetic)


def test_a_mistake_leaves_a_finished_run_alone(unbroken, tmp_path, capsys):
    """The folder is opened, and its logs emptied, only after the settings have proved possible."""
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "1", "--out", str(tmp_path)])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    capsys.readouterr()
    fault(capsys, *SMALL, "--n_embd", 65, "--out", tmp_path)
    fault(capsys, *SMALL, "--init", "nowhere", "--out", tmp_path)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    (tmp_path / "metrics.jsonl").write_text("")
    assert "shorter than at the checkpoint" in fault(capsys, "--resume", "--steps", 2, "--out", tmp_path)
    assert "at step 1 already" in fault(capsys, "--resume", "--steps", 0, "--out", tmp_path)


def test_a_changed_task_gets_a_new_warm_start(unbroken, tmp_path, capsys, monkeypatch):
    copy_warm_start(unbroken, tmp_path)
    task = tmp_path / "arithmetic.py"
    task.write_text(Path(arithmetic.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(arithmetic, "__file__", str(task))
    main([*SMALL, "--steps", "0", "--out", str(tmp_path)])
    assert "warm start 80/80" in capsys.readouterr().out


def test_resume_needs_nothing_but_the_checkpoint(unbroken, tmp_path):
    """Neither the folder of --init nor the kept warm start."""
    import shutil
    for name in ("checkpoint.safetensors", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(unbroken / name, tmp_path)
    main(["--resume", "--steps", "7", "--out", str(tmp_path)])
    assert metrics(tmp_path)[-1]["step"] == 7 and not (tmp_path / "warm_start").exists()


def test_demonstrations_must_fit(tmp_path, capsys):
    assert "longer than --max_new 3" in fault(capsys, *SMALL, "--max_new", 3, "--out", tmp_path)


def test_a_foreign_vocabulary(tmp_path, capsys):
    model = GPT(GPTConfig(vocab_size=200, block_size=64))
    model.save_pretrained(tmp_path / "m", byte_encoding().files)
    assert "a vocabulary of 200, and the tokenizer has 257" in fault(capsys, "--ask", "1*1=", "--init", tmp_path / "m")


def test_resume_refuses_what_contradicts_the_run(unbroken, capsys):
    err = fault(capsys, "--resume", "--lr", 0.5, "--out", unbroken)
    assert "has --lr 0.001, not 0.5" in err


def test_an_unfinished_run_is_not_overwritten(unbroken, tmp_path, capsys):
    copy_warm_start(unbroken, tmp_path)
    main([*SMALL, "--steps", "2", "--out", str(tmp_path)])
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes().replace(rb'\"steps\": 2', rb'\"steps\": 4'))
    before = path.read_bytes()
    capsys.readouterr()
    assert "stopped at step 2:" in fault(capsys, *SMALL, "--out", tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another version"])
def test_damaged_checkpoint(unbroken, tmp_path, capsys, damage):
    path = tmp_path / "checkpoint.safetensors"
    whole = (unbroken / "checkpoint.safetensors").read_bytes()
    path.write_bytes({"truncated": whole[:5000], "foreign": weights(unbroken),
                      "another version": whole.replace(b"grad_clip", b"grad_klip")}[damage])
    assert "checkpoint.safetensors" in fault(capsys, "--resume", "--out", tmp_path)


# --------------------------------------------------------------------------- README and sources

def test_readme_is_true():
    text = (ROOT / "README.md").read_text()
    flags = set(re.findall(r"(?<![\w-])--(\w+)", text))
    known = {f.name for f in dataclasses.fields(Config)} | {*grpo.MODES, "help"}
    assert flags <= known | {"nproc_per_node"}, flags - known
    for name, lines in re.findall(r"`(\w+\.py)` \| (\d+)", text):
        assert abs(len((ROOT / name).read_text().splitlines()) - int(lines)) <= 10, name
    assert "pip install -r requirements.txt && python grpo.py --task arithmetic" in text
    assert "pip install -r requirements.txt && python -m pytest" in text


def test_the_map_points_at_its_lines():
    rows = re.findall(r"\[([\w/.]+):(\d+)\]\(([\w/.]+)#L(\d+)\) `(.+?)` \|", (ROOT / "README.md").read_text())
    assert len(rows) >= 25
    for file, line, link, anchor, text in rows:
        text = text.replace("&#124;", "|")
        found = [n for n, x in enumerate((ROOT / file).read_text().splitlines(), 1) if text in x]
        assert found == [int(line)] and (link, anchor) == (file, line), f"{text}: now at {file}:{found}"


def test_readme_quotes_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import algorithms
    import seeds
    text = (ROOT / "README.md").read_text()
    results = json.loads((ROOT / "experiments" / "algorithms.json").read_text())
    assert results.keys() == algorithms.ROWS.keys()
    assert all(line in text for line in algorithms.lines(results))
    cost = lambda name: statistics.median(run["step"] for run in results[name].values())
    for name in ("PPO", "PPO, critic of its own"):
        assert f" {cost(name) / cost('GRPO'):.1f} times" in text
    curves = json.loads((ROOT / "experiments" / "overoptimization.json").read_text()).values()
    assert all(f"{curve['pass@1'][1]:.1%}" in text for curve in curves)
    proxy, right = next(iter(curves))["reward"], next(iter(curves))["accuracy"]
    assert f"rises from {proxy[0]:.2f} to {proxy[-1]:.2f}" in text and max(right) > right[-1] + 0.2
    for name, runs in results.items():
        for seed in "123":
            after, rule = runs[seed]["after"], results["GRPO"][seed]["after"]
            assert after - runs[seed]["before"] > 0.2
            assert "learned" not in name or rule - after < 0.1
    for line in seeds.rows(json.loads((ROOT / "experiments" / "seeds.json").read_text())):
        assert line in text
    caught = (ROOT / "experiments" / "mutations.md").read_text().splitlines()[2:]
    assert f"[{len(caught)} put in by script]" in text and not any("**none**" in x for x in caught)
    memory = json.loads((ROOT / "experiments" / "memory.json").read_text())
    assert f"{memory['parts'] / 1e9:.1f} GB instead of {memory['whole'] / 1e9:.1f} " in text
    assert memory["share"] < 1 / 3
    floor = json.loads((ROOT / "experiments" / "floor.json").read_text())
    assert f"{floor['ratio']:.2f} times its floating-point floor" in text
    assert (f"{floor['seconds']:.2f} s against {floor['floor']:.2f} s at "
            f"{floor['gflops']:.0f} GFLOP/s") in text.replace("\n", " ")


def test_every_flag_has_its_help(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    assert all(f"--{f.name} " in out for f in dataclasses.fields(Config))


def test_run_time_packages_are_the_five():
    allowed = {"torch", "tiktoken", "numpy", "safetensors", "data", "model", "reward", "grpo"}
    for path in [ROOT / "grpo.py", ROOT / "model.py", ROOT / "reward.py", *(ROOT / "data").glob("*.py")]:
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M):
            assert name in allowed | set(sys.stdlib_module_names), (path.name, name)
        if path.parent.name == "data" and path.name not in ("run.py", "start.py"):
            assert "import torch" not in path.read_text()


def test_nothing_evaluates_or_unpickles():
    files = [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py"), *(ROOT / "experiments").glob("*.py")]
    assert len(files) >= 15
    for path in files:
        assert not re.search(r"(?<![\w.])eval\(|torch\.load|pickle|exec\(|builtins|__import__", path.read_text())


def readme_task(folder):
    """The README's task as a module, from its text."""
    import importlib.util
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    (folder / "reverse.py").write_text(code)
    spec = importlib.util.spec_from_file_location("reverse", folder / "reverse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_own_task_learns(tmp_path, monkeypatch):
    import data
    task = readme_task(tmp_path)
    assert all(callable(getattr(task, f)) for f in data.FUNCTIONS)
    problem = task.problems(Config())[0][0]
    assert task.reward(problem, problem.answer) == {"correct": 1.0}
    monkeypatch.setattr(grpo, "load_task", lambda name: task)
    main(["--n_layer", "2", "--n_embd", "96", "--n_head", "4", "--lr", "5e-4", "--difficulty", "1",
          "--warm_lr", "3e-3", "--steps", "20", "--out", str(tmp_path / "out")])
    before, after = metrics(tmp_path / "out")[0], metrics(tmp_path / "out")[-1]
    assert after["pass@1"] > before["pass@1"] + 0.2, (before, after)
