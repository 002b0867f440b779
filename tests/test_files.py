"""Files that are damaged, hostile or too large, folders that are shared or full: a line, and nothing
lost."""
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from conftest import ROOT, fault
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file

import data
import grpo
import reward
from data import UserError
from data.tokenizer import LETTERS
from data.tokenizer import Encoding, load_encoding
from grpo import Config, main
from run import checkpoint, config, files, pretrained, report, setup
from run.files import clear_up

TINY = ("--difficulty 1 --n_layer 1 --n_embd 16 --warm_steps 2 --prompts 2 --group 4 "
        "--max_new 12 --save_every 1").split()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of 2 steps, with a reward model, so that its checkpoint has all kinds of tensors."""
    where = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "FIT_STEPS", 10)
        main([*TINY, "--reward", "model", "--steps", "2", "--out", str(where)])
    return where


@pytest.fixture
def again(done, tmp_path):
    """A copy of it."""
    return shutil.copytree(done, tmp_path / "run")


# --------------------------------------------------------------------------------- the checkpoint

P = "policy.layers.0.mlp.up_proj.weight"
WRONG = {
    "a moment of another shape": (lambda t: t | {f"opt.exp_avg.{P}": torch.zeros(2, 3)}, "exp_avg"),
    "a weight of another shape": (lambda t: t | {P: t[P][:1].clone()}, P),
    "a weight that is missing": (lambda t: {n: x for n, x in t.items() if n != P}, P),
    "a tensor of no one": (lambda t: t | {"critic.head.bias": torch.zeros(1)}, "critic.head.bias")}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_has_just_the_tensors_of_its_run(name, again, capsys):
    """Those of another model are refused. Adam's fused kernel once wrote beyond a moment smaller than
    its parameter."""
    change, says = WRONG[name]
    cfg, saved = checkpoint.load(again, Config)
    checkpoint.write_checkpoint(dataclasses.replace(cfg, out=str(again)),
                            dataclasses.replace(saved, tensors=change(saved.tensors)))
    assert says in fault(capsys, "--resume", "--steps", 3, "--out", again)


def rewrite_state(where, change):
    """Changes what the header of a run's checkpoint says."""
    cfg, saved = checkpoint.load(where, Config)
    state = vars(saved) | {"config": dataclasses.asdict(cfg)}
    tensors = {n: x.clone() for n, x in state.pop("tensors").items()}
    change(state)
    files.write_tensors(where / "checkpoint.safetensors", tensors, {"grpo": json.dumps(state)})


@pytest.mark.parametrize("change", [lambda state: state.pop("beta"), lambda state: state.update(of_no_version=0.5),
                                    lambda state: state["config"].update(n_mlp=4)])
def test_a_checkpoint_of_another_version_says_what_to_do(change, again, capsys):
    """Also to a new run in its folder. Python's own error once did not."""
    path = again / "checkpoint.safetensors"
    rewrite_state(again, change)
    for flags in (["--resume"], TINY):
        said = fault(capsys, *flags, "--out", again)
        assert said.startswith(f"error: {path} is cut off, or not of this version of grpo.py (")
        assert said.endswith("): choose another --out, or delete the file\n")


TOY = """from types import SimpleNamespace
DEFAULTS = {}
def problems(difficulty=2):
    made = [SimpleNamespace(prompt=c) for c in "abcdefgh"]
    return made, made[:2]
def demonstration(problem, rng): return "a"
def reward(problem, text): return {"correct": float("a" in text)}
def answer(text): return text
"""


@pytest.mark.slow
def test_a_task_that_has_changed_is_noted(tmp_path, capsys):
    """When a run goes on, each time. Without its run.json nothing is known of the file."""
    mine, out = tmp_path / "mine.py", tmp_path / "out"
    mine.write_text(TOY)
    main([*TINY, "--task", str(mine), "--steps", "1", "--out", str(out)])
    for steps, text, noted in ((2, TOY, 0), (3, TOY + "# another\n", 1), (4, TOY + "# another\n", 1), (5, TOY, 0)):
        mine.write_text(text)
        capsys.readouterr()
        main(["--resume", "--task", str(mine), "--steps", str(steps), "--out", str(out)])
        assert capsys.readouterr().out.count(f"note: {mine} has changed since the run in {out} began\n") == noted
    assert json.loads((out / "run.json").read_text())["data"].keys() == {"task"}
    mine.write_text(TOY + "# another\n")
    (out / "run.json").unlink()
    main(["--resume", "--task", str(mine), "--steps", "6", "--out", str(out)])
    said = capsys.readouterr().out
    assert "note: " + str(mine) not in said and said.count("note: without its run.json, whether a file has changed since the run") == 1


def test_a_file_that_is_cut_off_is_found(again):
    path = again / "checkpoint.safetensors"
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, *range(10, len(whole), len(whole) // 20), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="checkpoint.safetensors is cut off"):
            checkpoint.load(again, Config)


def test_a_resumed_run_lets_go_of_the_file(again):
    cfg, saved = checkpoint.resume(again, Config, {"steps": 3})
    kept = {x.untyped_storage().data_ptr() for x in saved.tensors.values()}
    cfg, _, encoding, policy, *_ = setup.begin(cfg, data.load_task(cfg.task), saved)
    agent = grpo.new_agent(cfg, None, encoding, policy, saved)
    state = checkpoint.training_state(agent)
    assert not saved.tensors and not kept & {x.untyped_storage().data_ptr() for x in state.values()}
    files.LOCK.close()


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
    "vocab_size": "320", "head_dim": -4, "rope_theta": "1",
    "tie_word_embeddings": "no", "is_causal": False, "layer_types": ["sliding_attention"],
    "rope_scaling": LLAMA3 | {"low_freq_factor": None}, "rope_parameters": [1], "rms_norm_eps": 10 ** 400, "model_type": [],
    "eos_token_id": -1, "hidden_act": {"a": 1}, "partial_rotary_factor": 0.5}
OURS = {"num_hidden_layers": "n_layer", "max_position_embeddings": "block_size", "hidden_size": "n_embd",
        "rope_scaling": "low_freq_factor", "rope_parameters": "not [1]", "rms_norm_eps": "too large", "head_dim": "head_size", "tie_word_embeddings": "tied"}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_that_cannot_be_is_named(key, model_folder, capsys):
    """Before anything is built: 10^9 layers once took all the memory there is."""
    rewrite(model_folder / "config.json", **{key: CONFIGS[key]})
    line = fault(capsys, "--ask", "1*1=", "--init", model_folder)
    assert OURS.get(key, key) in line and str(model_folder) in line


@pytest.mark.parametrize("args", ["--n_embd 200000", "--n_layer 1" + "0" * 30, "--max_new 1" + "0" * 18,
                                  "--n_embd 1048576", "--n_layer 1" + "0" * 400, "--seed 1" + "0" * 400,
                                  "--micro_tokens 1" + "0" * 12])
def test_sizes_are_checked_before_there_is_memory(args, tmp_path, capsys):
    fault(capsys, *TINY, *args.split(), "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_model_too_large_to_ask(model_folder, capsys, monkeypatch):
    monkeypatch.setattr(pretrained, "free_memory", lambda device: 10 ** 4)
    monkeypatch.setattr(pretrained, "each_tensor", lambda folder: pytest.fail("memory was taken"))
    for mode in (["--ask", "1*1="], ["--eval_only", "--difficulty", 1]):
        assert "this needs about" in fault(capsys, *mode, "--init", model_folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 269060552\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "part"])
def test_a_pointer_in_place_of_a_file(name, model_folder, capsys):
    """What a clone without Git LFS has; safetensors once said that a header was too large."""
    path = model_folder / name
    if name == "part":
        (model_folder / "model.safetensors").unlink()
        (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    path.write_text(POINTER)
    said = fault(capsys, "--ask", "1*1=", "--init", model_folder)
    assert said.endswith(f" {path} is a Git LFS pointer, not the file itself: fetch the file with `git lfs pull`\n")


@pytest.mark.parametrize("gone", [["config.json"], ["config.json", "tokenizer.json"], []])
@pytest.mark.parametrize("flag", ["--init", "--out"])
def test_an_adapter_is_not_a_model(gone, flag, model_folder, capsys):
    """Unless a model is beside it: what to do with it is said before what else the folder lacks."""
    (model_folder / "adapter_config.json").write_text("{}")
    main(["--ask", "1*1=", "--init", str(model_folder), "--max_new", "2"])
    (model_folder / "model.safetensors").rename(model_folder / "adapter_model.safetensors")
    for name in gone:
        (model_folder / name).unlink()
    why = (f"{model_folder} holds a LoRA adapter, not a model: merge it into its base model first, with peft's "
           "merge_and_unload, and give the folder of the result")
    assert fault(capsys, "--ask", "1*1=", flag, model_folder) == f"error: {why}\n"
    with pytest.raises(UserError) as e:
        pretrained.load(model_folder)
    assert str(e.value) == why


NO_JSON = ["[" * 100000, "[]", "{", "\xff", '{"a": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("name, text", [
    *(("config.json", text) for text in NO_JSON),
    *((name, "{") for name in ("tokenizer.json", "tokenizer_config.json", "run.json", "generation_config.json",
                               "model.safetensors.index.json"))])
def test_json_that_is_none_names_its_file(name, text, model_folder, capsys):
    if name.endswith("index.json"):
        (model_folder / "model.safetensors").unlink()
    (model_folder / name).write_bytes(text.encode("latin-1"))
    assert name in fault(capsys, "--ask", "1*1=", "--init", model_folder)


def test_a_header_that_is_no_run(again, capsys):
    for text in ("", "[]", "{}", json.dumps({"config": []})):
        files.write_tensors(again / "checkpoint.safetensors", {}, {"grpo": text})
        assert "checkpoint.safetensors" in fault(capsys, "--resume", "--out", again)


@pytest.mark.parametrize("change", [{"task": 3}, {"task": "\0"}, {"reward": []}, {"chat": {}}, {"train": "\0"}, {"x": 1}])
def test_settings_of_a_folder_that_cannot_be(change, again, capsys):
    """Those that there are no more are nobody's fault: an older version had them."""
    rewrite(again / "run.json", config=json.loads((again / "run.json").read_text())["config"] | change)
    if change.keys() <= {"train", "x"}:
        main(["--ask", "1*1=", "--init", str(again)])
    else:
        fault(capsys, "--ask", "1*1=", "--init", again)
    rewrite_state(again, lambda state: state["config"].update(change))
    fault(capsys, "--resume", "--out", again)


@pytest.mark.parametrize("change", [dict(config=None), dict(config=[]), dict(config="x"), dict(data=[]), dict(config={"task_args": None}),
                                    dict(config={"task_args": 3})], ids=str)
def test_a_damaged_run_json_is_named(change, again, capsys):
    rewrite(again / "run.json", **change)
    for mode in (["--ask", "1*1=", "--init"], ["--eval_only", "--init"], ["--resume", "--out"]):
        assert f"{again / 'run.json'} is damaged" in fault(capsys, *mode, again)


@pytest.mark.parametrize("change", [dict(config={"lr": 1}), dict(config={}), dict(data={"bogus": "0"}),
                                    dict(data={"difficulty": "0"}, config={"task_args": {"difficulty": 1}})], ids=str)
def test_a_run_json_that_lacks_or_adds_something(change, again, capsys):
    rewrite(again / "run.json", **change)
    main(["--ask", "1*1=", "--init", str(again), "--max_new", "12"])
    assert capsys.readouterr().out.startswith("1*1=")
    if "config" not in change:
        main(["--resume", "--out", str(again)])
    (again / "run.json").write_text("{}")                       # of something else
    main(["--ask", "1*1=", "--init", str(again), "--max_new", "12"])


@pytest.mark.parametrize("parts", ["../model.safetensors", "a" * 5000, 3, "\0"])
def test_parts_are_files_beside_their_index(parts, model_folder, capsys):
    os.replace(model_folder / "model.safetensors", model_folder.parent / "model.safetensors")
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": parts}}))
    assert "model" in fault(capsys, "--ask", "1*1=", "--init", model_folder)


@pytest.mark.parametrize("flag", ["--init", "--out", "--task", "--train"])
def test_paths_that_cannot_be(flag, tmp_path, capsys):
    for path in ("a" * 5000, "a/" * 3000):
        fault(capsys, *TINY, "--task", "gsm8k", "--test", "x", flag, path)


def test_a_head_beside_a_tied_embedding(model_folder, capsys):
    tensors = load((model_folder / "model.safetensors").read_bytes())
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
        assert shape.rope_theta == 5e5 and len(shape.rope_inv_freq) == shape.head_size / 2


@pytest.mark.parametrize("part, refused", [(1, False), (0.5, True)])
def test_rope_of_a_part_of_a_head_is_refused_wherever_it_stands(part, refused, model_folder):
    for change in ({"partial_rotary_factor": part}, {"rope_parameters": {"partial_rotary_factor": part}}):
        rewrite(model_folder / "config.json", rope_scaling=None, **change)
        with pytest.raises(UserError, match="partial_rotary_factor") if refused else contextlib.nullcontext():
            pretrained.without_memory(model_folder)
        rewrite(model_folder / "config.json", partial_rotary_factor=1, rope_parameters=None)


# -------------------------------------------------------------------------------------- tokenizers

LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
TOKEN = dict(id=257, content="<a>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)


def single(*parts):
    return dict(type="TemplateProcessing", single=[
        {"Sequence": {"id": "A"}} if x is None else {"SpecialToken": {"id": x}} for x in parts])


def split(pattern, **more):
    return dict(type="Sequence", pretokenizers=[
        dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False) | more, LEVEL])


SPLIT = dict(type="Split", pattern={"Regex": "a"}, behavior="Isolated", invert=False)


def pieces(*parts):
    return lambda t: t | dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[*parts, LEVEL]))


@pytest.mark.parametrize("says, change", [
    ("invert", lambda t: t | dict(pre_tokenizer=split("a", invert=True))),
    *(("may be empty", lambda t, x=x: t | dict(pre_tokenizer=split(x))) for x in ("a*", r"\p{L}+|(?<=a)|x", "^|x")),
    *((key, lambda t, key=key: t | dict(added_tokens=[*t["added_tokens"], TOKEN | {key: True}]))
      for key in ("lstrip", "rstrip", "single_word")),
    *((key, lambda t, key=key, x=x: t | dict(model=t["model"] | {key: x}))
      for key, x in (("dropout", 0.1), ("end_of_word_suffix", "</w>"), ("continuing_subword_prefix", "#"))),
    ("after a text", lambda t: t | dict(post_processor=single(None, "<|endoftext|>"))),
    ("an unknown token", lambda t: t | dict(post_processor=single("<none>", None))),
    ("RobertaProcessing", lambda t: t | dict(post_processor=dict(type="RobertaProcessing"))),
    *(("added token 'b' is also the letter of a byte", lambda t, i=i, x=x: t | dict(
        added_tokens=[*t["added_tokens"], TOKEN | dict(content="b", id=i, special=x)])) for i in (98, 257) for x in (True, False)),
    ("two of its tokens have the same id", lambda t: t | dict(added_tokens=[*t["added_tokens"], TOKEN | {"id": 98}])),
    ("not in the order of its merges", lambda t: t | dict(model=t["model"] | dict(
        vocab=t["model"]["vocab"] | dict(ab=257, cd=258), merges=["c d", "a b"]))),
    ("integers", lambda t: t | dict(added_tokens=[TOKEN | {"id": -1}])),
    ("integers", lambda t: t | dict(added_tokens=[TOKEN | {"id": 2 ** 40}])),
    ("cannot read", lambda t: t | dict(added_tokens=3)), ("cannot read", lambda t: t | dict(model=[])),
    ("cannot read", lambda t: t | dict(pre_tokenizer=split("("))),
    ("Split has behavior 'Removed'", pieces(SPLIT, SPLIT | dict(behavior="Removed"))),
    ("Split has invert True", pieces(SPLIT, SPLIT | dict(invert=True))),
    ("may be empty: 'b\\*'", pieces(SPLIT, SPLIT | dict(pattern={"Regex": "b*"}))),
    ("may be empty: ''", pieces(SPLIT | dict(pattern={"String": ""}))),
    (r"not supported: \['Whitespace', 'ByteLevel'\]", pieces(dict(type="Whitespace"))),
    *((f"several patterns, of which one has {re.escape(part)}: ", pieces(SPLIT | dict(pattern={"Regex": x}), SPLIT))
      for x, part in ((r"\w", r"\w"), (r"a\b", r"\b"), (r"\h", r"\h"), (r"\pN", r"\p"), (r"\PN", r"\P"), ("[a-c~~b-d]", "~~"),
                      ("[a--b]", "--"), ("[a||b]", "||"))),
    ("that cannot be read", pieces(SPLIT | dict(pattern={"Regex": r"\x{41}"}), SPLIT)),
    ("Lowercase", lambda t: t | dict(normalizer=dict(type="Sequence", normalizers=[dict(type="NFC"), dict(type="Lowercase")])))])
def test_a_tokenizer_that_would_give_other_ids_is_refused(says, change, model_folder):
    path = model_folder / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=says):
        load_encoding(model_folder)


def test_a_character_whose_bytes_a_tokenizer_lacks_is_dropped(model_folder):
    """All of it: the first byte of the other one, and the last, are there."""
    path = model_folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for lost in ("b", LETTERS[0xa9]):           # the second byte of an e with an acute accent
        del tokenizer["model"]["vocab"][lost]
    path.write_text(json.dumps(tokenizer))
    assert load_encoding(model_folder).encode_ordinary("ab\u00e9\u00e8c") == [97, 0xc3, 0xa8, 99]


@pytest.mark.parametrize("steps, nfc", [([], False), ([dict(type="NFC")], True)])
def test_normalizers_in_a_sequence(steps, nfc, model_folder):
    """DeepSeek's is empty."""
    rewrite(model_folder / "tokenizer.json", normalizer=dict(type="Sequence", normalizers=steps))
    assert load_encoding(model_folder).encode_ordinary("e\u0301") == [*("\u00e9" if nfc else "e\u0301").encode()]


# Tokenizers of letters, merges and words, and the ids that tokenizers 0.23.3 gives for texts.
RECORDED = json.loads((ROOT / "tests" / "tokenizers.json").read_text())
CASES = {case["name"]: dict(merges=RECORDED["merges"], texts=RECORDED["texts"]) | case for case in RECORDED["cases"]}


def tokenizer_json(case):
    """The tokenizer.json of a case: the words of its merges in their order, then those of none."""
    merges = [pair.split(" ") for pair in case["merges"]]
    words = dict.fromkeys([*map("".join, merges), *case.get("words", [])])
    vocab = {LETTERS[b]: b for b in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    end = TOKEN | dict(id=256 + len(words), content="<end>", special=True)
    return dict(version="1.0", added_tokens=[end], normalizer=None, post_processor=None, decoder=None, truncation=None, padding=None,
                pre_tokenizer=dict(type="Sequence", pretokenizers=case["parts"]),
                model=dict(type="BPE", vocab=vocab, merges=merges, ignore_merges=case.get("ignore_merges", False)))


def write_tokenizer(case, folder):
    for name, content in (("tokenizer.json", tokenizer_json(case)), ("config.json", {}), ("tokenizer_config.json", dict(eos_token="<end>"))):
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_that_were_recorded(name, tmp_path):
    """Of chains of patterns, as DeepSeek's, and of merges in the way of each other. The texts of ids are
    those of the vocabulary, also where no text has the id."""
    case = CASES[name]
    ours = load_encoding(write_tokenizer(case, tmp_path))
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        assert ours.encode_ordinary(text) == ids, repr(text)
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    for word, i in tokenizer_json(case)["model"]["vocab"].items():
        assert "".join(LETTERS[b] for b in ours.token_bytes(i)) == word


def test_a_whole_piece_that_two_tokens_would_make_is_refused(tmp_path):
    """Merges would be left out for whole pieces alone, but tiktoken would make the word in others too. An added
    token is in no piece."""
    case = CASES["a word that no merge makes"]
    path = write_tokenizer(case | dict(ignore_merges=True), tmp_path) / "tokenizer.json"
    with pytest.raises(UserError, match="its token 'abc' is 'ab' and 'c', which no merge joins"):
        load_encoding(tmp_path)
    rewrite(path, added_tokens=[*json.loads(path.read_text())["added_tokens"], TOKEN | dict(content="abc")])
    assert load_encoding(tmp_path).encode_ordinary("xabcab") == [120, 257, 256]


def test_a_word_that_no_merge_makes_may_end_a_completion(tmp_path):
    write_tokenizer(CASES["a word that no merge makes"], tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257]}')
    encoding = load_encoding(tmp_path)
    assert encoding.stop == {257, 259} and encoding.token_bytes(257) == b"abc" and encoding.notes == []


def test_files_of_an_older_kind(model_folder, capsys):
    """What to do with a vocabulary and merges apart."""
    (model_folder / "tokenizer.json").unlink()
    for name in ("vocab.json", "merges.txt"):
        (model_folder / name).write_text("{}")
    line = fault(capsys, "--ask", "1*1=", "--init", model_folder)
    assert "has vocab.json, but no tokenizer.json" in line and "train a model" not in line
    assert f"AutoTokenizer.from_pretrained({str(model_folder)!r}).save_pretrained({str(model_folder)!r})" in line


def test_a_tokenizer_needs_the_config_of_its_model(model_folder):
    (model_folder / "config.json").unlink()
    with pytest.raises(UserError, match="cannot read its tokenizer .FileNotFoundError"):
        load_encoding(model_folder)


def test_what_other_programs_read_of_a_tokenizer_is_kept(model_folder, tmp_path):
    """Also what this code does not need."""
    names = ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
             "additional_chat_templates/tools.jinja"]
    for name in names:
        (model_folder / name).parent.mkdir(exist_ok=True)
        (model_folder / name).write_text("{}")
    kept = load_encoding(model_folder, "none").files
    assert {*names, "tokenizer.json", "tokenizer_config.json"} <= {*kept} and kept["merges.txt"] == b"{}"


def test_which_tokens_end_and_which_have_a_text():
    bytes_ = {bytes([i]): i for i in range(256)}
    encoding = Encoding("x", r"[\s\S]", bytes_, {"<a>": 256, "<b>": 257, "<c>": 258, "<d>": 259}, [258, 257], {})
    assert encoding.end == 258 and encoding.stop == {257, 258}
    assert [encoding.token_bytes(i) for i in (65, 256, 257, 258, 259, 260)] == [b"A", b"<a>", b"", b"", b"<d>", b""]


# ------------------------------------------------------------------- folders that are shared or full

def test_two_runs_in_one_folder(again, capsys):
    """Another process holds the lock: a line, and after its end the run goes on."""
    code = (f"import fcntl, sys; f = open({str(again / 'lock')!r}, 'ab'); fcntl.flock(f, fcntl.LOCK_EX); "
            "print('held', flush=True); sys.stdin.read()")
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    (again / "model.safetensors.tmp").touch()                   # which it may be writing
    for args in (["--resume", "--steps", 3], [*TINY, "--steps", 1]):
        assert "another run is active in" in fault(capsys, *args, "--out", again)
    assert (again / "model.safetensors.tmp").exists()
    other.kill()
    other.communicate()
    main(["--resume", "--steps", "3", "--out", str(again)])
    with open(again / "lock") as f:                             # this process let go of it
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_run_that_went_on_meanwhile(again, capsys):
    """The steps are made again, and are the same."""
    cfg, saved = checkpoint.resume(again, Config, {"steps": 3})
    main(["--resume", "--steps", "3", "--out", str(again)])
    names = ("model.safetensors", "samples.jsonl")
    before = [(again / name).read_bytes() for name in names]
    grpo.train(cfg, saved=saved)
    files.LOCK.close()
    assert [(again / name).read_bytes() for name in names] == before


def test_a_run_is_compared_with_how_it_began_after_two_resumes_too(tmp_path, capsys):
    """Its record keeps the first content of a task that has changed; a file that is named only now is recorded as it is."""
    task, table = tmp_path / "mine.py", tmp_path / "rows.csv"
    task.write_text("first")
    cfg = grpo.Config(task=str(task), task_args={"rows": str(table)}, out=str(tmp_path / "run"))
    checkpoint.open_run(cfg)
    first = files.about(cfg.folder)["data"]
    task.write_text("second")
    table.write_text("1,2")
    saved = checkpoint.load(cfg.folder, grpo.Config)[1]
    for _ in range(2):
        checkpoint.open_run(cfg, saved)
        assert f"note: {task} has changed since the run in {cfg.folder} began" in capsys.readouterr().out
        assert files.about(cfg.folder)["data"] == first | checkpoint.data_of({"rows": table}) and [*first] == ["task"]
    files.LOCK.close()


def test_what_killed_saves_left_is_cleared(again):
    """A name of six random characters is one that safetensors writes to before it renames."""
    left = [again / "model.safetensors.tmp", again / "warm_start" / "model.safetensors.tmp", again / "run.json.tmp",
            again / ".tmp0a79jC", again / "warm_start" / ".tmpABCDEF", again / "best" / ".tmpABCDEF"]
    own = [again / "notes.tmp", again / ".tmp0a79jCx"]
    (again / "best").mkdir()
    for path in (*left, *own):
        path.write_bytes(b"x")
    main(["--resume", "--steps", "3", "--out", str(again)])
    assert all(path.exists() for path in own) and not any(path.exists() for path in left)


def test_safetensors_writes_to_a_name_that_is_cleared(tmp_path):
    names, x = set(), torch.zeros(10 ** 6)
    thread = threading.Thread(target=lambda: [files.save_file({"x": x}, tmp_path / "x") for _ in range(20)])
    thread.start()
    while thread.is_alive():
        names |= {path.name for path in tmp_path.iterdir()}
    for name in names - {"x"}:
        (tmp_path / name).touch()
    clear_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"x"}


# ------------------------------------------------------------------------------ no regular files

@pytest.fixture
def seconds():
    """Ends a test that waits for ever."""
    def late(*_):
        raise TimeoutError
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def in_place_of(path, what):
    """A named pipe, or a link to endless zeros, at a path."""
    path.unlink(missing_ok=True)
    os.mkfifo(path) if what == "pipe" else path.symlink_to("/dev/zero")


READ = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("what", ["pipe", "zeros"])
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_is_refused(name, what, again, seconds, capsys):
    in_place_of(again / name, what)
    assert fault(capsys, "--ask", "1*1=", "--init", again).count(name) == 1


def test_a_file_without_end_is_refused(again, monkeypatch, capsys):
    monkeypatch.setattr(data, "LARGEST", (again / "tokenizer.json").stat().st_size - 1)
    assert "tokenizer.json is too large: " in fault(capsys, "--ask", "1*1=", "--init", again)


def test_problems_come_from_a_file(tmp_path, seconds, capsys):
    os.mkfifo(tmp_path / "rows")
    assert "rows is not a regular file" in fault(capsys, "--task", "gsm8k", "--train", tmp_path / "rows", "--test", "x",
                                                 "--init", "y")


def test_all_files_of_a_run_may_be_read_by_the_same_people(tmp_path):
    before = os.umask(0)
    os.umask(before)
    files.write_tensors(tmp_path / "model.safetensors", {"x": torch.ones(1)}, {"format": "pt"})
    files.write_whole(tmp_path / "run.json", "{}")
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {oct(0o666 & ~before)}


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_temporary_file_is_a_new_one(what, again, seconds, tmp_path):
    """What is in its place is not written to."""
    (tmp_path / "mine").write_text("mine")
    for name in ("report.html.tmp", "config.json.tmp", "checkpoint.safetensors.tmp"):
        os.mkfifo(again / name) if what == "pipe" else (again / name).symlink_to(tmp_path / "mine")
    main(["--report", str(again)])
    main(["--resume", "--steps", "3", "--out", str(again)])
    assert (tmp_path / "mine").read_text() == "mine" and (again / "report.html").stat().st_size > 1000
    files.write_whole(again / "report.html", "new")
    in_place_of(again / "report.html.tmp", what)
    files.write_whole(again / "report.html", "newer")
    assert (again / "report.html").read_text() == "newer"


def test_a_file_in_a_folder_that_has_gone(tmp_path):
    """There is not even a temporary file to remove."""
    path = tmp_path / "gone" / "run.json"
    with pytest.raises(UserError, match=f"^cannot write {re.escape(str(path))}: .*No such file"):
        files.write_whole(path, "{}")


def test_logs_are_on_the_disk_before_the_checkpoint(again, monkeypatch):
    order, real_sync, real_save = [], os.fsync, files.save_file
    def name(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(name(fd)) or real_sync(fd))
    monkeypatch.setattr(files, "save_file", lambda t, path, metadata: order.append(path.name) or
                        real_save(t, path, metadata))
    main(["--resume", "--steps", "3", "--out", str(again)])
    last = len(order) - 1 - order[::-1].index("checkpoint.safetensors.tmp")
    assert {"metrics.jsonl", "samples.jsonl"} <= set(order[:last])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint.safetensors", "model.safetensors", "metrics.jsonl", "run.json"])
def test_a_full_disk_is_a_line_and_loses_nothing(what, again, capsys, monkeypatch):
    """Half of a file, then no more room: as safetensors says it, and as Python does."""
    before, real_save = (again / "checkpoint.safetensors").read_bytes(), files.save_file
    full = OSError(errno.ENOSPC, "No space left on device")
    def save(named, path, metadata):
        real_save(named, path, metadata=metadata)
        if what in path.name:
            os.truncate(path, 100)
            raise SafetensorError(f"I/O error: {full}")
    monkeypatch.setattr(files, "save_file", save)
    real_dumps = json.dumps
    if what == "metrics.jsonl":
        def dumps(x, **how):
            if "reward" in x:
                raise full
            return real_dumps(x, **how)
        monkeypatch.setattr(json, "dumps", dumps)
    if what == "run.json":
        def fsync(fd):
            raise full
        monkeypatch.setattr(os, "fsync", fsync)
    line = fault(capsys, "--resume", "--steps", 3, "--out", again)
    assert "No space left" in line and (what == "metrics.jsonl" or f"cannot write {again / what}" in line)
    assert (again / "checkpoint.safetensors").read_bytes() == before and not [*again.glob("*.tmp")]
    monkeypatch.undo()
    main(["--resume", "--steps", "3", "--out", str(again)])


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [broken_pipe, lambda: None, lambda: open("/dev/full", "w")])
def test_nobody_reads(stream, again, monkeypatch, capfd):
    """`| head`, a terminal that was closed, a full disk: a run goes on to its end without a word, and
    the help too, and an error is code 2."""
    def into(out, err, *args):
        """The exit code of a command with these streams; what is left in their buffers breaks nothing."""
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        try:
            main(list(args))
        except SystemExit as e:
            return e.code
        finally:
            for stream in filter(None, (out, err)):
                stream.close()
    into(stream(), None, "--resume", "--steps", "3", "--out", str(again))
    assert checkpoint.load(again, Config)[1].step == 3
    assert into(stream(), None, "--help") == 0
    assert into(None, stream(), "--group", "0") == into(stream(), None, "--group", "0") == 2


# ----------------------------------------------------------------------- settings that cannot be

@pytest.mark.slow
@pytest.mark.parametrize("x, spread, says", [(1.0, 0, "the same score"), (0.0, 0, "the same score"),
                                             (1e4, 1e-2, "the same score"), (-2.0, 0, "the same score"),
                                             (float("nan"), 0, "are not finite")])
def test_scores_that_say_nothing(x, spread, says, tmp_path, capsys, monkeypatch):
    """All the same, up to rounding, or no numbers."""
    real = reward.scores
    monkeypatch.setattr(reward, "FIT_STEPS", 10)
    monkeypatch.setattr(reward, "scores", lambda *args: x + spread * real(*args))
    assert says in fault(capsys, *TINY, "--reward", "model", "--steps", 1, "--out", tmp_path)


def test_other_problems_on_resume(tmp_path, capsys, monkeypatch):
    """Also where the file was changed while the run that had read it was at work."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "How many?", "answer": "#### 4"}) + "\n")
    args = [*TINY[2:], "--task", "gsm8k", "--max_new", "90", "--train", str(rows), "--test", str(rows), "--prompts", "1"]
    monkeypatch.setattr(grpo, "evaluate", lambda *_: rows.write_text(rows.read_text() * 2) and {"greedy": 0.0})
    main([*args, "--steps", "0", "--out", str(tmp_path / "x")])
    assert f"{rows} has changed since" in fault(capsys, "--resume", "--steps", 1, "--out", tmp_path / "x")
    rows.unlink()
    fault(capsys, "--resume", "--steps", 1, "--out", tmp_path / "x")


@pytest.mark.slow
def test_the_dtype_of_a_folder_is_said(model_folder, tmp_path, capsys):
    named = load((model_folder / "model.safetensors").read_bytes())      # no map of the file
    save_file({n: x.bfloat16() for n, x in named.items()}, model_folder / "model.safetensors")
    rewrite(model_folder / "config.json", dtype="bfloat16")
    main([*TINY, "--steps", "1", "--lr", "1e-6", "--reward", "model",
          "--init", str(model_folder), "--out", str(tmp_path / "x")])
    assert "its weights are bfloat16; they are trained, and saved, in float32" in capsys.readouterr().out
    after = load_file(tmp_path / "x" / "model.safetensors")
    for n, x in after.items():          # every tensor has moved, and in bfloat16 hardly one would have
        assert (x != named[n].bfloat16()).any() and (x.bfloat16() == named[n].bfloat16()).float().mean() > 0.9
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "float32"
