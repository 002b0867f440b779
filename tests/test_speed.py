"""What tells where time goes: a trace of some steps, and the scripts that compare speeds."""
import contextlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, tiny_model

import grpo
from data import arithmetic
from data.tokenizer import byte_encoding
from model import GPTConfig
from run import machine, pretrained
from run.agents import Agent, new_agent
from run.models import to_device

TINY = ("--task arithmetic --difficulty 1 --warm_steps 0 --device cpu --dtype float32 --prompts 2 --group 2 --max_new 6 "
        "--held_out 2 --samples 1").split()


@pytest.fixture
def experiments(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)


def folder_of(model, where, stop=256):
    pretrained.config_json(model)["eos_token_id"] = stop
    pretrained.save(model, where, byte_encoding().files)
    return where


def test_the_copy_to_sample_from_is_the_policy_of_now(tmp_path, monkeypatch):
    """After an update, and after a resume, it has the weights of the policy, rounded."""
    start, out = folder_of(tiny_model(), tmp_path / "start", [*range(0, 257, 3)]), tmp_path / "run"
    cfg = grpo.make_config(task="arithmetic", difficulty=1, init=str(start), warm_steps=0, device="cpu", dtype="bfloat16",
                           prompts=2, group=8, max_new=6, held_out=2, samples=1, lr=0.01, steps=2, out=str(out))
    monkeypatch.setattr(arithmetic, "reward", lambda problem, text: {"correct": float(len(text) > 2)})
    first, agent = dict(tiny_model().named_parameters()), grpo.train(cfg)
    checkpoint = grpo.checkpoint.load(out, grpo.Config)[1]
    again = new_agent(cfg, None, None, to_device(tiny_model(), cfg), checkpoint)
    for made in (agent, again):
        copied = dict(made.sampler.named_parameters())
        for name, p in made.policy.named_parameters():
            assert torch.equal(copied[name], p.to(copied[name].dtype)) and not torch.equal(p, first[name])


def test_the_floor_counts_what_must_be_done(experiments, monkeypatch, tmp_path):
    """Two prompts of 2 and 1 tokens, two rows each, in two ways: one by one, and by hand."""
    from experiments.cost import speed
    monkeypatch.setattr(speed, "matrix_rate", lambda *_: 1e6)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1e30)
    ids = torch.tensor([[1, 2, 5, 6, 0], [1, 2, 5, 7, 8], [3, 4, 0, 0, 0], [3, 9, 9, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]).bool()
    agent = Agent(grpo.Config(device="cpu", dtype="float32", micro_tokens=1000), None, None, tiny_model())
    batch = grpo.Batch(ids, mask, None, None, None, adv=mask.float())
    linear = sum(m.weight.numel() for m in agent.policy.layers.modules() if isinstance(m, torch.nn.Linear))
    head = agent.policy.embed_tokens.weight.numel()
    read = {(1,), (1, 2), (1, 2, 5), (1, 2, 5, 7), (3,), (3, 9)}        # the beginnings after which one is sampled, or less
    sampled = {(1, 2), (1, 2, 5), (1, 2, 5, 7), (3,), (3, 9)}
    found = speed.floors(agent, batch)
    operations = 2 * (linear * len(read) + head * len(sampled))
    assert found["rollout"] == pytest.approx(operations / 1e6) and found["update"] == pytest.approx(3 * operations / 1e6)
    agent.ref = agent.policy
    assert speed.floors(agent, batch)["rollout"] == pytest.approx(2 * operations / 1e6)
    agent.ref, batch.adv = None, batch.adv * torch.tensor([1.0, 1, 0, 0])[:, None]      # a group that is dead
    assert speed.floors(agent, batch)["update"] == pytest.approx(6 * (4 * linear + 3 * head) / 1e6)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1.0)                             # decoding waits for memory
    c = agent.policy.cfg
    slots = 2 * c.n_layer * c.n_kv_head * c.head_size * sum(len(x) - 1 for x in sampled)
    assert speed.floors(agent, batch)["rollout"] == pytest.approx(4 * (3 * (linear + head) + slots))


def test_speeds_are_medians_and_a_table(experiments, monkeypatch, tmp_path, capsys):
    """Of this code alone: TRL is no part of the suite."""
    from experiments.cost import speed
    start = folder_of(tiny_model(), tmp_path / "start")
    monkeypatch.setitem(speed.SIZES, "tiny", dict(task="arithmetic", difficulty=1, prompts=2, group=2, max_new=6))
    monkeypatch.setattr(speed, "matrix_rate", lambda *_: 1e9)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(speed.subprocess, "check_output", lambda *_, **__: f"{2 ** 30}\n")
    monkeypatch.setattr(sys, "argv", ["speed.py", "tiny", "--who", "ours", "ours bfloat16", "--turns", "3", "--device",
                                      "cpu", "--arithmetic", str(start), "--out", str(tmp_path / "speed.json")])
    speed.main()
    found = json.loads((tmp_path / "speed.json").read_text())["sizes"]["tiny"]
    assert set(found) == {"ours", "ours bfloat16"}
    for x in found.values():
        assert x["seconds"] > x["floors"]["rollout"] + x["floors"]["update"] > 0 and x["peak"] == 2 ** 30
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 3 + 2 and lines[-2].startswith("| tiny, ours | ") and lines[-1].endswith(" 1.00 |")


def test_short_calls_are_timed_together(experiments, monkeypatch):
    """A call that takes 1 ms, and a clock that takes 4."""
    from experiments.cost import speed
    clock = [0.0]

    def pass_(seconds):
        clock[0] += seconds
        return clock[0]
    monkeypatch.setattr(speed, "now", lambda device: pass_(0.004))
    assert [*speed.timed(None, lambda: pass_(0.001), times=2)] == pytest.approx([0.001 + 0.004 / 3] * 2)
    assert [*speed.timed(None, lambda: pass_(1.0), times=1)] == pytest.approx([1.004])


@pytest.mark.parametrize("family, bias", [("llama", "none"), ("qwen2", "qkv")])
def test_a_random_model_is_read_again(experiments, tmp_path, family, bias):
    from experiments.cost import probe, speed
    shape = probe.SMALL | dict(bias=bias, rope_theta=1e6)
    speed.random_model(tmp_path, shape, family, byte_encoding())
    model = pretrained.load(tmp_path)
    assert model.cfg == GPTConfig(**shape) and model.hf["eos_token_id"] == 256


def asked_of_a_gpu(monkeypatch, parts, *words):
    """Run these parts of gpu.py, with each process in this one: the exit code."""
    from experiments.cost import gpu, probe, speed

    def limited(command, log):
        with open(log, "w") as said, contextlib.redirect_stdout(said):
            if command[1] == gpu.PROBE:
                probe.main(command[2:])
        return 0
    monkeypatch.setattr(gpu, "limited", limited)
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(speed, "SIDE", 128)             # `probe` sets both
    monkeypatch.setattr(speed, "COPIED", 2 ** 20)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", *words])
    with pytest.raises(SystemExit) as e:
        gpu.main()
    return e.value.code


@pytest.mark.slow
def test_all_that_is_asked_of_a_gpu_goes_through(experiments, monkeypatch, tmp_path, capsys):
    """Tiny, on the CPU, in this process: so that it works the first time where there is a GPU."""
    from experiments.cost import gpu
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    parts = {name: gpu.PARTS[name] for name in ("warm", "resume", "decode", "update", "memory", "trl")} | {
        "decode": {"attention": gpu.PARTS["decode"]["attention"], "shared": gpu.PARTS["decode"]["shared"]},
        "update": {"eager": gpu.UPDATE, "compiled": "not to be"}}
    assert not asked_of_a_gpu(monkeypatch, parts, "--device", "cpu", "--out", str(tmp_path))
    found = json.loads((tmp_path / "gpu.json").read_text())
    names = ["warm", "resume whole", "resume again", "resume halves", "resume halves resumed", "resume, in all",
             "decode attention", "decode shared", "update eager", "memory, in all", "trl"]
    assert [name for name, x in found.items() if isinstance(x, dict)] == names
    assert capsys.readouterr().out.count(": ok  process s ") == 8
    assert found["resume, in all"] == {"4 and 4": 0, "4 and 2 + 2": 0}
    for name in names[1:5]:
        run = found[name]
        assert run["steps"] == 4 - 2 * (name == "resume halves") and run["step s"] > 0
        assert 0 < run["mean gap"] < run["mismatch"] / 4 < 1e-5             # a mean, of the worst step
        assert found["memory, in all"][name] == run["peak GB"] / run["estimate GB"] > 1
        assert {*run["before"]} == {*run["after"]} == {"greedy", "pass@1"}
    settings = json.loads((tmp_path / "resume-whole" / "run.json").read_text())["config"]
    assert settings["init"] == str(tmp_path / "warm" / "warm_start")
    for name in ("decode shared", "update eager"):
        assert 0 < found[name]["share"] < 1 and found[name]["tokens/s"] > 0 and found[name]["kernels"]
    attention = found["decode attention"]
    assert all(attention["bound"] < attention[f"{name}{more}"] for more in ("", ", cuDNN")
               for name in ("as in model.py", "heads as tokens", "heads repeated"))
    assert found["trl"] == {"said": ["TRL is not installed"]}


@pytest.mark.slow
def test_a_gpu_may_be_pretended(experiments, monkeypatch, tmp_path):
    from experiments.cost import gpu
    parts = {"step": {"grpo": f"{gpu.STEP} --warm_steps 1 --held_out 1 --static_cache off"}}
    assert not asked_of_a_gpu(monkeypatch, parts, "--device", "pretend", "--out", str(tmp_path))
    assert 1e-5 < json.loads((tmp_path / "gpu.json").read_text())["step grpo"]["mismatch"] < 0.1        # in bfloat16


def test_what_gpu_starts_depends_on_what_is_there(experiments, monkeypatch, tmp_path, capsys):
    from experiments.cost import gpu
    args = SimpleNamespace(tiny=False, out=tmp_path, device="cuda")
    assert gpu.started(args, "{device} {tiny} {start} {on}") == ["cuda", "on"]
    (tmp_path / "warm" / "warm_start").mkdir(parents=True)
    (tmp_path / "warm" / "warm_start" / "warm_start.json").write_text("{}")
    assert gpu.started(args, "{start}") == ["--init", str(tmp_path / "warm" / "warm_start"), "--warm_steps", "0"]
    args.tiny = True
    assert gpu.started(args, "{on} {smollm2}") == ["off", str(tmp_path / "random")]
    assert pretrained.load(tmp_path / "random").cfg.vocab_size == 300
    for words, said in (([], "there is no GPU"), (["steps"], "there is no part steps")):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit) as e:
            gpu.main()
        assert e.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_a_process_is_cut_off_with_all_that_it_started(experiments, monkeypatch, tmp_path):
    """What it has told and said is kept; one that fails says so."""
    from experiments.cost import gpu
    monkeypatch.setattr(gpu, "LIMIT", 1.5)
    monkeypatch.setattr(gpu, "PATIENCE", 0.5)
    (tmp_path / "logs").mkdir()
    code = ("import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('found {\"a\": 1}'); print('pid', subprocess.Popen(['sleep', '60']).pid); time.sleep(60)")
    found = gpu.measured(tmp_path, "hangs", ["-c", code])
    assert found["code"] == -9 and found["a"] == 1 and 1.5 < found["process s"] < 10
    started = Path("/proc") / found["said"][-1].split()[1] / "cmdline"
    until = time.time() + 5
    while (lives := started.exists() and started.read_bytes()) and time.time() < until:
        time.sleep(0.01)
    assert not lives
    assert gpu.shown(found).startswith("cut off  ")
    assert gpu.measured(tmp_path, "works", ["-c", "print('a line')"])["said"] == ["a line"]
    found = gpu.measured(tmp_path, "fails", ["-c", "1 / 0"])
    assert found["code"] == 1 and gpu.shown(found).startswith("FAILED  ")
    assert gpu.shown(found).endswith("  ZeroDivisionError: division by zero")
