"""What tells where time goes: a trace of some steps, and the scripts that compare speeds."""
import contextlib
import io
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
from grpo import Agent, new_agent
from run import checkpoint, pretrained
from run.pretrained import to_device

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
    again = new_agent(cfg, None, None, to_device(tiny_model(), cfg), checkpoint.load(out, grpo.Config)[1])
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
    monkeypatch.setitem(speed.SIZES, "tiny", dict(
        task="arithmetic", difficulty=1, init=str(start), prompts=2, group=2, max_new=6))
    monkeypatch.setattr(speed, "matrix_rate", lambda *_: 1e9)
    monkeypatch.setattr(speed, "bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(speed.subprocess, "check_output", lambda *_, **__: f"{2 ** 30}\n")
    monkeypatch.setattr(sys, "argv", ["speed.py", "tiny", "--who", "ours", "ours bfloat16", "--turns", "3", "--device",
                                      "cpu", "--out", str(tmp_path / "speed.json")])
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
    from experiments.cost import speed
    shape = speed.SMALL | dict(bias=bias, rope_theta=1e6)
    speed.random_model(tmp_path, shape, family, byte_encoding())
    model = pretrained.load(tmp_path)
    assert model.cfg == GPTConfig(**shape) and model.hf["eos_token_id"] == 256


def asked_of_a_gpu(monkeypatch, *words):
    """Run gpu.py, with each probe in this process: its exit code."""
    from experiments.cost import gpu, probe, speed

    def limited(command, seconds, log, heard):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if command[0] == gpu.PROBE:
                probe.main(command[1:])
        for line in said.getvalue().splitlines():
            heard(line)
        return 0
    monkeypatch.setattr(gpu, "limited", limited)
    monkeypatch.setattr(speed, "SIDE", 128)             # `probe` sets both
    monkeypatch.setattr(speed, "COPIED", 2 ** 20)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--tiny"])
    with pytest.raises(SystemExit) as e:
        gpu.main()
    return e.value.code


@pytest.mark.slow
def test_all_that_is_asked_of_a_gpu_goes_through(experiments, monkeypatch, tmp_path, capsys):
    """Tiny, on the CPU, in this process: so that it works the first time where there is a GPU."""
    from experiments.cost import gpu
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not asked_of_a_gpu(monkeypatch, *gpu.QUICK, "--device", "cpu", "--out", str(tmp_path / "gpu"))
    found = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    parts = {name: x for name, x in found.items() if isinstance(x, dict)}
    names = ["decode", "update", "steps 0.5B", "steps 135M", "trl", "tests"]
    assert [*parts] == names and {"device", "torch", "date", "commit"} <= found.keys()
    assert parts["trl"] == {"end": {"state": "not run: TRL is not installed"}}
    assert all(parts[name]["end"]["code"] == 0 for name in names if name != "trl")
    assert "error" not in json.dumps(found)

    for shape in ("tiny", "0.5B"):
        check = parts["decode"][f"{shape}, graph and plain cache"]
        assert check["rows that differ"] == 0 and check["tokens before"] > 100 and check["max dlogp"] < 1e-5
    for way in ("8 graph", "8 eager", "8 shared", "8 plain", "4 graph"):        # of fewer rows the default way alone
        token = parts["decode"][f"0.5B {way}"]
        assert token["ms"] > 0 and 0 < token["share"] < 1 and token["tokens/s"] > 0
    inside = parts["decode"]["0.5B 8 graph, inside a token"]
    assert {"graph us", "head and softmax us", "sample_token us", "rest us"} <= inside.keys()
    for name in ("micro_tokens 256", "micro_tokens 128", "micro_tokens 256, 1024 logits"):
        assert 0 < parts["update"][name]["share"] < 1 and parts["update"][name]["mismatch"] < 1e-5
    for name in names[2:4]:
        assert [x for x in parts[name] if x.startswith("step ")] == [f"step {n}" for n in range(4)]
        assert 0 < parts[name]["step 3"]["mismatch"] < 1e-5 and parts[name]["step 1"]["at"] > 0     # all rows are learned from
        assert "checkpoint 3" not in parts[name]

    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + sum(map(len, parts.values()))        # all of it is kept
    assert any(line.startswith("decode: 0.5B 8 graph: ") for line in printed)


@pytest.mark.slow
def test_a_gpu_may_be_pretended(experiments, monkeypatch, tmp_path):
    from experiments.cost import gpu
    run = (f"{gpu.PROBE} steps {{device}} --task arithmetic --difficulty 1 --n_layer 1 --n_embd 32 --warm_steps 20 --max_new 16 "
           "--prompts 4 --group 4 --steps 1 --held_out 1 --samples 1 --cache shared")
    monkeypatch.setitem(gpu.PARTS, "steps", (60, {"": run}))
    assert not asked_of_a_gpu(monkeypatch, "steps", "--device", "pretend", "--out", str(tmp_path))
    assert 1e-5 < json.loads((tmp_path / "gpu.json").read_text())["steps"]["step 1"]["mismatch"] < 0.1   # in bfloat16


def test_a_measurement_that_fails_does_not_stop_the_next(experiments, capsys):
    from experiments.cost import probe
    with probe.measuring("a") as found:
        found["ms"] = 1 / 3
        raise RuntimeError("CUDA error\nand more")
    assert capsys.readouterr().out == 'found {"a": {"ms": 0.3333, "error": "RuntimeError: CUDA error"}}\n'


def test_what_gpu_starts_depends_on_what_is_there(experiments, monkeypatch, tmp_path, capsys):
    from experiments.cost import gpu
    args = SimpleNamespace(tiny=True, out=tmp_path / "gpu", device="cpu")
    assert gpu.started(args, "{device} {small} {smollm2}") == ["cpu", "--small", str(tmp_path / "smollm2-tiny")]
    assert pretrained.load(tmp_path / "smollm2-tiny").cfg.vocab_size == 300 and not (tmp_path / "qwen-tiny").exists()
    args.tiny = False
    assert gpu.started(args, "{small} {trl} 'a b'") == ["qwen", "a b"]
    for words, said in (([], "there is no GPU"), (["step"], "there is no part step")):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit) as e:
            gpu.main()
        assert e.value.code == 2 and said in capsys.readouterr().err


def test_what_does_not_fit_the_budget_is_not_run(experiments, monkeypatch, tmp_path, capsys):
    assert not asked_of_a_gpu(monkeypatch, "decode", "update", "--device", "cpu", "--out", str(tmp_path), "--budget", "10")
    assert [line.split(": ", 1)[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["decode", "update"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["decode"] == found["update"] == {"end": {"state": "not run: 10 s are left"}}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")
def test_a_process_is_cut_off_with_all_that_it_started(experiments, tmp_path):
    """What it has told and said is kept; one that fails says so."""
    from experiments.cost import gpu
    (tmp_path / "logs").mkdir()
    args, found = SimpleNamespace(out=tmp_path), {}

    def measured(name, code):
        """What is found by a process, which has 1.5 seconds; whether it succeeds."""
        found.clear()
        return gpu.measured(args, name, ["-c", code], 1.5 if name == "hangs" else 30,
                            lambda what, x, line=None: found.update({what: x}))
    code = ("import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('found {\"a\": {\"b\": 1}}'); print('pid', subprocess.Popen(['sleep', '60']).pid); print('found {\"c'); "
            "time.sleep(60)")
    assert not measured("hangs", code)
    end = found["end"]
    assert end["code"] == -9 and end["state"] == "cut off" and found["a"]["b"] == 1 and 1.5 <= end["at"] < 10
    started = Path("/proc") / found["said"][0].split()[1] / "cmdline"
    until = time.time() + 5
    while (lives := started.exists() and started.read_bytes()) and time.time() < until:
        time.sleep(0.01)
    assert not lives
    assert measured("works", "print('a line')") and found["said"] == ["a line"] and found["end"]["state"] == "ok"
    assert not measured("fails", "1 / 0") and found["end"]["state"] == "FAILED"
    assert found["end"]["last"][-1] == "ZeroDivisionError: division by zero"
