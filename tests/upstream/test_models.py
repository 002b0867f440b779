"""RL on a real language model, experiments/models: a whole run on GSM8K with a random model, and what it is told by."""
import json
import sys

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "experiments" / name) for name in ("cost", "models", "studies")]
import gsm8k  # noqa: E402
import grpo  # noqa: E402
import speed  # noqa: E402
from data.tokenizer import byte_encoding  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes a run with flags, its processes called here."""
    speed.random_model(tmp_path / "random", speed.SMALL, "llama", byte_encoding())
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(300)]
    rows[7]["answer"] = "It takes long. " * 20 + rows[7]["answer"]
    for name, part in (("train", rows), ("test", rows[:30])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    monkeypatch.setattr(gsm8k, "start", grpo.main)
    monkeypatch.setattr(gsm8k, "ROOT", tmp_path)

    def made(folder, *flags):
        """The result in a folder, and its run's metrics."""
        monkeypatch.setattr(sys, "argv", ["gsm8k.py", *flags, "--init", str(tmp_path / "random"), "--device", "cpu"])
        gsm8k.main()
        where = tmp_path / "out" / folder
        return json.loads((where / "result.json").read_text()), gsm8k.results.lines(where / "trained" / "metrics.jsonl")
    return made


def test_a_run_on_gsm8k(run, tmp_path, monkeypatch, capsys):
    files = [str(tmp_path / f"{name}.jsonl") for name in ("train", "test")]
    found, metrics = run("gsm8k-tiny1", *files, "--tiny", "--lr", "1e-3")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3] and found["steps"] == 3
    assert found["held out"]["after the supervised start"]["greedy"] == metrics[0]["greedy"]
    assert found["held out"]["after GRPO"]["pass@1"] == metrics[-1]["pass@1"]
    assert found["curve"]["length"] == pytest.approx([m["length"] for m in metrics[1:]], abs=1e-4)
    rows, settings = found["rows"], found["settings"]
    assert (rows["train"], rows["left out"], rows["held_out"], rows["samples"]) == (20, 280, 2, 1)
    assert settings["lr"] == 1e-3 and settings["warm_steps"] == 2 and "init" not in settings

    where = tmp_path / "out" / "gsm8k-s1"                       # what a run with 4 samples has, for the table
    where.mkdir()
    shares = {name: {"greedy": 0.25, "pass@1": 0.125, "pass@4": 0.5} for name in gsm8k.STAGES}
    (where / "result.json").write_text(json.dumps(found | {"held out": shares}))
    monkeypatch.setattr(gsm8k, "HERE", tmp_path)
    gsm8k.readme()
    assert "| greedy | 25.0% | 25.0% | 25.0% |\n| pass@1, 1 samples |" in capsys.readouterr().out
    assert json.loads((tmp_path / "gsm8k.json").read_text())["1"]["held out"] == shares


def test_rows_set_aside(run, tmp_path):
    """Without test rows the last training rows take their place; what is too long is not trained on."""
    small = "--held_out 2 --samples 1 --max_new 64 --prompts 2 --group 2 --warm_steps 1 --steps 1".split()
    found, _ = run("gsm8k-aside1", str(tmp_path / "train.jsonl"), *small)
    assert (found["rows"]["train"], found["rows"]["left out"]) == (300 - gsm8k.ASIDE - 1, 1)
    train, aside = ((tmp_path / "out" / "gsm8k-aside1" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test"))
    assert len(aside) == gsm8k.ASIDE and not {*train} & {*aside}


def test_the_settings_of_the_run_on_gsm8k(tmp_path):
    """Three epochs of 2,000 rows; groups as in nanochat, without a KL; a completion has as much room as a solution."""
    flags = ["--task", "gsm8k", "--init", str(tmp_path), *gsm8k.COMMON, *gsm8k.SUPERVISED, *gsm8k.RL]
    cfg = gsm8k.read(flags)
    assert round(cfg.warm_steps * int(gsm8k.WARM_BATCH.partition("=")[2]) / 2000, 1) == 3.0
    assert (cfg.group, cfg.max_new, cfg.applies_kl, cfg.minibatches) == (16, 256, False, 2)
