"""Files that are damaged, hostile or too large, folders that are shared or full: a line, and nothing
lost."""
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

import grpo
from data import Fault
from grpo import Config, main
from model import GPT, GPTConfig
from run import files, folder, pretrained, start, tensors

TINY = ("--difficulty 1 --n_layer 1 --n_embd 16 --n_head 2 --warm_steps 2 --prompts 2 --group 4 "
        "--max_new 12 --save_every 1").split()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of 2 steps, with a reward model, so that its checkpoint has all kinds of tensors."""
    where = tmp_path_factory.mktemp("done")
    main([*TINY, "--reward", "model", "--fit_prompts", "10", "--steps", "2", "--out", str(where)])
    return where


@pytest.fixture
def again(done, tmp_path):
    """A copy of it."""
    return shutil.copytree(done, tmp_path / "run")


def fault(capsys, *args):
    """The line with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        main(list(map(str, args)))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


# --------------------------------------------------------------------------------- the checkpoint

P = "policy.layers.0.mlp.up_proj.weight"
WRONG = {
    "a moment of another shape": (lambda t: t | {f"opt.exp_avg.{P}": torch.zeros(2, 3)}, "exp_avg"),
    "a moment of another dtype": (lambda t: t | {f"opt.exp_avg.{P}": t[P].double()}, "exp_avg"),
    "a moment that is missing": (lambda t: {n: x for n, x in t.items() if n != f"opt.step.{P}"}, "opt.step"),
    "no moments at all": (lambda t: {n: x for n, x in t.items() if n[:4] != "opt."}, "missing"),
    "a weight of another dtype": (lambda t: t | {P: t[P].bfloat16()}, P),
    "a tensor of no one": (lambda t: t | {"critic.head.bias": torch.zeros(1)}, "critic.head.bias"),
    "steps that differ": (lambda t: t | {f"opt.step.{P}": torch.tensor(7.0)}, "opt.step"),
    "a weight that is no number": (lambda t: t | {P: t[P] * float("nan")}, P),
    "a mean of squares below 0": (lambda t: t | {f"opt.exp_avg_sq.{P}": -torch.ones_like(t[P])}, P),
    "a token that is none": (lambda t: t | {"history.ids": t["history.ids"] + 257}, "history.ids"),
    "rows that make no sets": (lambda t: t | {n: x[1:] for n, x in t.items() if n[:7] == "history"},
                               "history.ids"),
    "rows of other lengths": (lambda t: t | {"history.mask": t["history.mask"][1:]}, "history.mask")}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_has_just_the_tensors_of_its_run(name, again, capsys):
    """Signed as it should be, but not what the run needs: Adam's fused kernel once wrote beyond a
    moment smaller than its parameter."""
    change, says = WRONG[name]
    cfg, checkpoint = folder.load(again, Config)
    folder.write_checkpoint(dataclasses.replace(cfg, out=str(again)),
                            dataclasses.replace(checkpoint, tensors=change(checkpoint.tensors)))
    assert says in fault(capsys, "--resume", "--steps", 3, "--out", again)


def test_a_flipped_bit_is_found(again):
    path = again / "checkpoint.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, 8 * header, 8 * header // 40), *range(8 * header, 8 * len(whole), len(whole) // 5)]
    for bit in places:
        bad = bytearray(whole)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(Fault, match="checkpoint.safetensors"):
            folder.load(again, Config)


def test_a_look_at_the_step_reads_no_tensors(again, monkeypatch):
    monkeypatch.setattr(folder, "sha256_of", lambda tensors: pytest.fail("read") if tensors else "")
    with pytest.raises(Fault, match="at step 2 already"):
        folder.resume(again, Config, {"steps": 1}, {"steps"})


def test_a_resumed_run_lets_go_of_the_file(again):
    cfg, checkpoint = folder.resume(again, Config, {"steps": 3}, {"steps"})
    kept = {x.untyped_storage().data_ptr() for x in checkpoint.tensors.values()}
    _, encoding, policy, *_ = grpo.start.begin(cfg, grpo.data.load_task(cfg.task), checkpoint)
    agent = grpo.new_agent(cfg, None, encoding, policy, checkpoint)
    state = tensors.training_state(agent)
    assert not checkpoint.tensors and not kept & {x.untyped_storage().data_ptr() for x in state.values()}
    files.unlock()


# ---------------------------------------------------------------------------------- a model's files

@pytest.fixture
def model_folder(done, tmp_path):
    """A model alone, as one that is given to --init."""
    where = tmp_path / "model"
    where.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(done / name, where)
    return where


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
CONFIGS = {
    "num_hidden_layers": 10 ** 9, "max_position_embeddings": 10 ** 9, "hidden_size": 10 ** 30,
    "vocab_size": "320", "head_dim": -4, "rope_theta": -1, "rms_norm_eps": float("inf"),
    "tie_word_embeddings": "no", "is_causal": False, "layer_types": ["sliding_attention"],
    "rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}, "rope_parameters": [1], "model_type": [],
    "eos_token_id": -1, "hidden_act": {"a": 1}, "partial_rotary_factor": 0.5}
OURS = {"num_hidden_layers": "n_layer", "max_position_embeddings": "block_size", "hidden_size": "n_embd",
        "rope_scaling": "low_freq_factor", "model_type": "family", "head_dim": "head_size"}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_that_cannot_be_is_named(key, model_folder, capsys):
    """Before anything is built: 10^9 layers once took all the memory there is."""
    rewrite(model_folder / "config.json", **{key: CONFIGS[key]})
    line = fault(capsys, "--ask", "1*1=", "--init", model_folder)
    assert OURS.get(key, key) in line and str(model_folder) in line


def test_eos_beyond_the_vocabulary(model_folder, capsys):
    rewrite(model_folder / "config.json", eos_token_id=257)
    assert "eos_token_id" in fault(capsys, "--ask", "1*1=", "--init", model_folder)


@pytest.mark.parametrize("args", ["--n_embd 200000 --n_head 2", "--n_layer 1" + "0" * 30, "--max_new 1" + "0" * 18,
                                  "--n_embd 1048576 --n_head 2", "--n_layer 1" + "0" * 400, "--seed 1" + "0" * 400,
                                  "--micro_tokens 1" + "0" * 12, "--warm_batch 1000000000",
                                  "--reward model --fit_prompts 10 --choices 1000000000"])
def test_sizes_are_checked_before_there_is_memory(args, tmp_path, capsys):
    fault(capsys, *TINY, *args.split(), "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_model_too_large_to_ask(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(start, "free_memory", lambda device: 10 ** 4)
    monkeypatch.setattr(pretrained, "allocate", lambda model: pytest.fail("memory was taken"))
    for mode in (["--ask", "1*1="], ["--eval_only", "--difficulty", 1]):
        assert "this needs about" in fault(capsys, *mode, "--init", model_folder)


def test_memory_counts_the_tables_and_a_row_longer_than_micro_tokens():
    shape = GPTConfig(n_embd=32, n_head=2, block_size=4096, n_inner=64)
    model, cfg = GPT(shape), Config(prompts=1, group=2, max_new=4000, micro_tokens=16, device="cpu")
    need = start.memory(model, cfg, 96)
    assert need["RoPE's tables"] == 2 * (model.cos.nbytes + model.sin.nbytes)       # and the reference's
    assert need["activations"] == start.memory(model, dataclasses.replace(cfg, micro_tokens=4096), 96)["activations"]


DEEP = "[" * 100000


@pytest.mark.parametrize("text", [DEEP, "[]", "{", "\xff", '{"a": 1' + "0" * 5000 + "}"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "run.json",
                                  "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_none_names_its_file(name, text, model_folder, capsys):
    if name.endswith("index.json"):
        (model_folder / "model.safetensors").unlink()
    (model_folder / name).write_bytes(text.encode("latin-1"))
    assert name in fault(capsys, "--ask", "1*1=", "--init", model_folder)


def test_a_header_that_is_no_run(again, capsys):
    for text in (DEEP, "[]", "{}", json.dumps({"tensors": "", "config": DEEP})):
        signed = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
        files.write_tensors(again / "checkpoint.safetensors", {}, {"grpo": signed})
        assert "checkpoint.safetensors" in fault(capsys, "--resume", "--out", again)


@pytest.mark.parametrize("parts", ["../model.safetensors", "a" * 5000, 3, "\0"])
def test_parts_are_files_beside_their_index(parts, model_folder, capsys):
    os.replace(model_folder / "model.safetensors", model_folder.parent / "model.safetensors")
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": parts}}))
    assert "model" in fault(capsys, "--ask", "1*1=", "--init", model_folder)


@pytest.mark.parametrize("flag", ["--init", "--out", "--task", "--train"])
def test_paths_that_cannot_be(flag, tmp_path, capsys):
    for path in ("a" * 5000, "a/" * 3000):
        fault(capsys, *TINY, "--task", "gsm8k", "--test", "x", flag, path)


def test_tensors_that_are_no_weights(model_folder, capsys):
    tensors = load_file(model_folder / "model.safetensors")
    name = "model.norm.weight"
    for x, says in ((tensors[name] / 0, "finite"), (tensors[name].long(), "dtype")):
        save_file(tensors | {name: x}, model_folder / "model.safetensors")
        assert says in fault(capsys, "--ask", "1*1=", "--init", model_folder)
    head = tensors["model.embed_tokens.weight"].clone()
    for head, fails in ((head, False), (head + 1, True)):           # the same head, and another
        save_file(tensors | {"lm_head.weight": head}, model_folder / "model.safetensors")
        if fails:
            assert "tie_word_embeddings" in fault(capsys, "--ask", "1*1=", "--init", model_folder)
        else:
            main(["--ask", "1*1=", "--init", str(model_folder), "--max_new", "2"])


def test_theta_may_stand_in_rope_scaling(model_folder):
    for key in ("rope_scaling", "rope_parameters"):
        rewrite(model_folder / "config.json", **{"rope_scaling": None, key: LLAMA3 | {"rope_theta": 5e5}})
        shape = pretrained.without_memory(model_folder).cfg
        assert (shape.rope_theta, shape.rope_scaling) == (5e5, (8.0, 1.0, 4.0, 64.0))
