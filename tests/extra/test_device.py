"""The project on a pretended CUDA device: tensors on two devices, and waits for the device."""
import os
import subprocess
import sys
from collections import Counter

import pretend
import pytest
import torch
from torch import distributed
from conftest import LETTERS, ROOT, flags, metrics
from safetensors.torch import load_file
from test_ranks import pair, without_bias

import grpo
from data.tokenizer import byte_encoding
from run import checkpoint, dist, pretrained, report, signals

pytestmark = pytest.mark.usefixtures("large_epsilons")


# -------- the pretence itself

def adamw(p, step):
    """A step of AdamW, whose count of steps is `step`."""
    p = torch.nn.Parameter(p.clone())
    p.grad = torch.ones_like(p)
    opt = torch.optim.AdamW([p], fused=True)
    opt.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    opt.step()


# c is on the device, h on the CPU, both (4, 3); i are indices on the CPU.
ILLEGAL = {
    "sum": lambda c, h, i: c + h,
    "sum into the CPU": lambda c, h, i: h.add_(c),
    "stack of numbers": lambda c, h, i: torch.stack([c[0, 0], h[0, 0]]),
    "index on the device": lambda c, h, i: h[i.to(c.device)],
    "numpy": lambda c, h, i: c.numpy(),
    "a generator": lambda c, h, i: torch.nn.init.normal_(c, generator=torch.Generator()),
    "a .grad": lambda c, h, i: setattr(c.requires_grad_(), "grad", h),
    "Adam's steps": lambda c, h, i: adamw(c, step=torch.ones(())),
    "two GPUs": lambda c, h, i: c + h.to("cuda:1"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_cuda_refuses_raises(name):
    with pretend.cuda() as device, pytest.raises((RuntimeError, TypeError)):
        ILLEGAL[name](torch.ones(4, 3, device=device), torch.ones(4, 3), torch.tensor([0, 1]))


def test_the_tests_do_not_see_a_gpu():
    """Nor do the processes that they start."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


# -------- the project

SHAPE = dict(vocab_size=257, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, n_inner=32, head_size=8,
             block_size=16, norm_eps=1e-5, tied=True)
SCALED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8)
FAMILIES = {"gpt2": {}, "qwen2": {}, "qwen3": {},
            "llama": dict(tie_word_embeddings=False, rope_scaling=SCALED)}
SMALL = dict(family="llama", prompts=5, group=2, max_new=3, steps=1, held_out=1, samples=1,
             micro_tokens=60, lr=1e-3, compile=False)
TEN = dict(prompts=10, micro_tokens=120)         # as many as are labelled
RUNS = {
    "grpo": {},
    "a2c, qwen3": dict(algo="a2c", family="qwen3"),
    "rloo, gpt2": dict(algo="rloo", family="gpt2"),
    "dr_grpo, qwen2": dict(algo="dr_grpo", family="qwen2", minibatches=2, epochs=2),
    "dapo, nothing shared": dict(algo="dapo", cache="plain", shared_prefixes=False),
    "gspo, recompute": dict(algo="gspo", recompute=True, cache="shared"),
    "ppo, critic of its own": dict(algo="ppo", critic="separate", baseline="group+value"),
    "steps rewarded": dict(supervision="process"),
    "reward learned": dict(reward="model", iterations=2, **TEN),
    "steps learned": dict(reward="rollouts", supervision="process", algo="ppo", **TEN),
    "warm start": dict(family="", max_new=6, n_layer=1, n_embd=16, warm_steps=6, warm_lr=0.1),
}


def prepared(where):
    """A folder with a task, and a random model of each family."""
    # of random bytes half end a completion: most have a few letters, of which some are true steps
    task = LETTERS.replace("x in problem.prompt)", "ord(x) % 3 > 0)")
    (where / "letters.py").write_text(task)
    for family, more in FAMILIES.items():
        names = pretrained.GPT2_NAMES if family == "gpt2" else pretrained.NAMES
        hf = {theirs: SHAPE[ours] for ours, theirs in names.items()} | more
        model = pretrained.of_config(
            hf | dict(model_type=family, eos_token_id=[*range(0, 257, 2)])).to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3, generator=generator)
        pretrained.save(model, where / family, byte_encoding().files)
    return where


@pytest.fixture(scope="module")
def top(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("device"))


def settings(top, name, **changes):
    """One of RUNS."""
    given = SMALL | RUNS[name] | changes
    family = given.pop("family")
    return given | dict(task=str(top / "letters.py"), init=family and str(top / family))


def run(top, name, **changes):
    """One of RUNS in a folder of its own; the agent that it ends with."""
    return grpo.train(grpo.make_config(**settings(top, name, **changes)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_the_cpu(top, tmp_path, name):
    """Every metric, weight, moment and labelled row; in bfloat16 its sampler is the policy."""
    run(top, name, device="cpu", out=str(tmp_path / "cpu"))
    with pretend.cuda() as device:
        for dtype in ("float32", "bfloat16"):
            agent = run(top, name, device="cuda", dtype=dtype, out=str(tmp_path / dtype))
            weights = [*agent.policy.parameters()]
            assert all(p.device == device and p.dtype == torch.float32 for p in weights)
        assert agent.sampler.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    last = metrics(tmp_path / "bfloat16")[-1]
    assert last["mismatch"] < 0.2 and last["grad_norm"] > 0
    one, two = (load_file(tmp_path / x / "checkpoint.safetensors") for x in ("cpu", "float32"))
    assert len(one) > 20
    without_bias(name, one, two)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    for a, b in zip(metrics(tmp_path / "cpu"), metrics(tmp_path / "float32"), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_a_run_that_was_stopped_continues(top, tmp_path, monkeypatch, capsys):
    """Then it is evaluated and asked."""
    given = settings(top, "steps learned", critic="separate", reward="model", steps=2,
                     device="cuda", out=str(tmp_path))
    task, real = ["--task", given["task"]], grpo.train_step

    def interrupted(*given):
        signals.ASKED.append(15)
        return real(*given)
    with pretend.cuda():
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(grpo, "train_step", interrupted)
            grpo.main(flags(given))
        for mode in (["--resume", "--out"], ["--eval_only", "--init"], ["--ask", "ab=", "--init"]):
            assert metrics(tmp_path)[-1]["step"] == (1 if "--resume" in mode else 2)
            capsys.readouterr()
            grpo.main([*task, *mode, str(tmp_path)])
    assert capsys.readouterr().out.startswith("ab=")


RANKS = {"reward learned": dict(dtype="float32", iterations=1, minibatches=2),
         "steps learned": dict(micro_tokens=60)}


def on_gpus(rank, where):
    """All of RANKS on one of two GPUs."""
    top = prepared(where / f"rank{rank}")
    with pretend.cuda(rank) as device, pretend.nccl():
        dist.start(grpo.Config(device="cuda"))
        for name, changes in RANKS.items():
            agent = run(top, name, device="cuda", out=str(where / name), **changes)
            assert all(p.device == device for p in agent.policy.parameters())
        with pytest.raises(RuntimeError, match="No backend type"):
            distributed.all_reduce(torch.zeros(()))
        dist.exit_with(0)


@pytest.mark.slow
def test_two_ranks_reduce_nothing_on_the_cpu(tmp_path):
    """As with nccl, which has no collectives for tensors on the CPU."""
    codes, _, err = pair(tmp_path, on_gpus, tmp_path)
    assert codes == [0, 0], err
    assert all(metrics(tmp_path / name)[-1]["step"] > 0 for name in RANKS)


# -------- waits for the device

@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo, critic of its own", "steps rewarded"])
def test_a_step_waits_seldom(top, tmp_path, monkeypatch, name):
    """Once in a micro-batch, four times in an optimizer step; only pinned indices are copied. A
    rollout waits as often for ten rows as for twenty."""
    calls, seen, rollouts = Counter(), {}, []

    def watch(module, name):
        real = getattr(module, name)

        def counting(*args, **kwargs):
            calls[name] += 1
            with pretend.counted() as now:
                result = real(*args, **kwargs)
            for kind, n in vars(now).items():
                seen.setdefault((name, kind), Counter()).update(n)
            return result
        monkeypatch.setattr(module, name, counting)

    def waits(name):
        return seen[name, "waits"].total()
    for x in ("sample", "rollout", "update", "total_loss"):
        watch(grpo, x)
    watch(report, "record")
    watch(checkpoint, "save")
    for prompts in (5, 10):
        calls.clear()
        seen.clear()
        out = tmp_path / str(prompts)
        with pretend.cuda():
            run(top, name, prompts=prompts, minibatches=2, device="cuda", out=str(out))
        assert calls["rollout"] == calls["update"] == 1 and calls["total_loss"] >= 2
        assert waits("update") <= calls["total_loss"] + 4 * 2, seen["update", "waits"]
        assert not seen["update", "copies"]
        rollouts.append(waits("rollout") - waits("sample") // calls["sample"])
        assert waits("record") <= 4 * 2 + 4                         # twice for each row
        written = [load_file(out / f"{name}.safetensors") for name in ("checkpoint", "model")]
        assert waits("save") <= calls["save"] * sum(map(len, written))
    assert max(rollouts) <= 20 + 2 * (calls["total_loss"] + 1), rollouts


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path):
    """On CPUs."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "grpo.py",
               "--prompts", "3", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "run").exists()
    assert "error: --prompts 3 is not divisible by 2 ranks\n" in done.stderr
