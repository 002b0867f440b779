"""Files that are damaged, hostile or too large, folders that are shared or full: a line, and
nothing lost."""
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import sys

import pytest
import torch
from conftest import ROOT, fault, records, rewrite
from safetensors import SafetensorError

import grpo
import reward
from data import UserError
from data.tokenizer import LETTERS, load_encoding
from grpo import Config, main
from run import checkpoint, files, pretrained

TINY = ("--init= --difficulty 1 --n_layer 1 --n_embd 16 --warm_steps 2 --prompts 2 --group 4 "
        "--max_new 12 --save_every 1 --held_out 4 --samples 2").split()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of 2 steps, with a reward model, so that its checkpoint has all kinds of tensors."""
    where = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "FIT_STEPS", 3)
        main([*TINY, "--reward", "model", "--steps", "2", "--out", str(where)])
    return where


@pytest.fixture
def again(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run")


@pytest.fixture
def model_folder(done, tmp_path):
    where = tmp_path / "model"
    where.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(done / name, where)
    return where


def ask(where):
    return ["--ask", "1*1=", "--init", where]


def go_on(where, steps=3):
    main(["--resume", "--steps", str(steps), "--out", str(where)])


# ---------- the checkpoint

def rewrite_checkpoint(where, change_tensors, change_state=lambda state: None):
    cfg, saved = checkpoint.load(where, Config)
    state = vars(saved) | {"config": dataclasses.asdict(cfg)}
    tensors = change_tensors({n: x.clone() for n, x in state.pop("tensors").items()})
    change_state(state)
    header = {"grpo": json.dumps(state)}
    files.write_tensors(where / "checkpoint.safetensors", tensors, header)


P = "policy.layers.0.mlp.up_proj.weight"
M = f"opt.exp_avg.{P}"


@pytest.mark.parametrize("name, change", [
    (P, lambda x: x[:1].clone()), (P, lambda x: None), (M, lambda x: None),
    (M, lambda x: x.flatten()[:3].clone()), ("zzz.x", torch.clone)], ids=str)
def test_a_checkpoint_has_just_the_tensors_of_its_run(name, change, again, capsys):
    """The fused optimizer wrote past the end of a short moment."""
    def changed(t):
        x = change(t.get(name, torch.zeros(1)))
        return {n: y for n, y in (t | {name: x}).items() if y is not None}
    rewrite_checkpoint(again, changed)
    assert f"of another model: {name}\n" in fault(capsys, "--resume", "--steps", 3, "--out", again)


def test_a_parameter_may_be_more_precise(again):
    rewrite_checkpoint(again, lambda t: t | {P: t[P].double()})
    go_on(again)


@pytest.mark.parametrize("change", [
    lambda state: state.pop("beta"), lambda state: state.update(of_no_version=0.5),
    lambda state: state["config"].update(n_mlp=4), lambda state: state.update(config=[]),
    *(lambda state, name=name, x=x: state.update({name: x}) for name, x in (
        ("step", "2"), ("step", -2), ("beta", "x"), ("beta", None), ("model", []), ("metrics", "1"),
        ("samples", -1)))])
def test_a_checkpoint_of_another_version_says_what_to_do(change, again, capsys):
    rewrite_checkpoint(again, dict, change)
    for flags in (["--resume"], TINY):
        said = fault(capsys, *flags, "--out", again)
        assert "choose another --out, or delete the file" in said
    (again / "checkpoint.safetensors").unlink()
    main([*TINY, "--steps", "0", "--out", str(again)])
    assert (again.with_name("run.1") / "model.safetensors").exists()


def test_a_lost_end_of_a_checkpoint_is_found(again, capsys):
    path = again / "checkpoint.safetensors"
    found = path.read_bytes()
    for size in (0, 7, 9, len(found) // 2, len(found) - 1):
        path.write_bytes(found[:size])
        assert "is cut off" in fault(capsys, "--resume", "--steps", 3, "--out", again)
        assert path.read_bytes() == found[:size]


def test_a_log_that_somebody_has_shortened_goes_on(again):
    path = again / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))
    go_on(again)
    assert [line["step"] for line in records(path)] == [0, 1, 3]


def test_a_resumed_run_lets_go_of_the_file(again):
    cfg, saved = checkpoint.resume(again, Config, {"steps": 3})
    kept = {x.untyped_storage().data_ptr() for x in saved.tensors.values()}
    policy = pretrained.model_of(saved.model, cfg, 0)
    agent = grpo.new_agent(cfg, None, None, policy, saved)
    own = {x.untyped_storage().data_ptr() for x in checkpoint.training_state(agent).values()}
    assert len(kept) > 9 and not saved.tensors and not kept & own


# ---------- a model's files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name, text, says", [
    *(("config.json", text, "config.json") for text in (
        "[]", "\xff")),
    *((name, "{", name) for name in ("tokenizer.json", "tokenizer_config.json", "run.json", INDEX)),
    *((name, POINTER, f"{name} is a Git LFS pointer: fetch the file with `git lfs pull`")
      for name in ("model.safetensors", "tokenizer.json", "config.json")),
    *((INDEX, json.dumps({"weight_map": {"a": part}}), "model") for part in (
        "../model.safetensors", 3)),
    *(("model.safetensors", text, "cannot read its tensors") for text in (None, 8 * "\xff" + "{}")),
    ("config.json", None, "no model in"), ("adapter_config.json", "{}", "merge_and_unload"),
    ("tokenizer.json", None, "AutoTokenizer")])
def test_what_is_wrong_with_a_models_file_is_one_line(name, text, says, model_folder, capsys):
    if name == INDEX:
        (model_folder / "model.safetensors").rename(model_folder.parent / "model.safetensors")
    (model_folder / name).unlink(missing_ok=True)
    if text is not None:
        (model_folder / name).write_bytes(text.encode("latin-1"))
    said = fault(capsys, *ask(model_folder))
    assert says in said and len(said) < 1000


@pytest.mark.parametrize("change", [dict(config={"lr": 1, "x": 1}), dict(data={"y": "0"})], ids=str)
def test_a_run_json_that_lacks_something(change, again):
    """Settings that there are no more are nobody's fault: an older version had them."""
    rewrite(again / "run.json", lambda about: about.update(change))
    main([*map(str, ask(again)), "--max_new", "12"])
    go_on(again)
    assert records(again / "metrics.jsonl")[-1]["step"] == 3


# ---------- tokenizers

LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
TOKEN = dict(id=257, content="<a>", single_word=False, lstrip=False, rstrip=False,
             normalized=False, special=False)
SPLIT = dict(type="Split", pattern={"Regex": "a"}, behavior="Isolated", invert=False)


def pieces(*parts):
    last = LEVEL | dict(use_regex=False)
    return dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[*parts, last]))


def patterns(*given):
    return pieces(*(SPLIT | dict(pattern={"Regex": x}) for x in given))


@pytest.mark.parametrize("says, change, added, model", [
    *((key, {}, {key: True}, {}) for key in ("lstrip", "rstrip", "single_word")),
    *((key, {}, {}, {key: 0.1}) for key in ("dropout", "end_of_word_suffix")),
    ("RobertaProcessing", dict(post_processor=dict(type="RobertaProcessing")), {}, {}),
    ("'b' is also the letter of a byte", {}, dict(content="b", id=98, special=True), {}),
    ("'b' is also the letter of a byte", {}, dict(content="b"), {}),
    ("not all different integers", {}, {"id": 98}, {}),
    ("not all different integers", {}, {"id": 2 ** 40}, {}),
    ("not in the order of its merges", {}, {}, dict(merges=["c d", "a b"])),
    ("not in the order of its merges", {}, {}, dict(merges=["a b", "c d", "a b"])),
    ("cannot read", dict(model=[]), {}, {}), ("cannot be read", patterns("("), {}, {}),
    ("invert True", pieces(SPLIT | dict(invert=True)), {}, {}),
    ("behavior 'Removed'", pieces(SPLIT, SPLIT | dict(behavior="Removed")), {}, {}),
    (r"\['Whitespace', 'ByteLevel'\]", pieces(dict(type="Whitespace")), {}, {}),
    *((f"several patterns, of which one has {re.escape(part)}: ", patterns(x, "a"), {}, {})
      for x, part in ((r"\w", r"\w"), (r"a\b", r"\b"), (r"\pN", r"\p"), ("[a--b]", "--"))),
    ("that cannot be read", patterns(r"\x{41}", "a"), {}, {}),
    *(("matches nothing", patterns(*x), {}, {}) for x in (("a*", "b"), ("^|x",), ("a", "b?"))),
    ("Lowercase", dict(normalizer=dict(type="Sequence", normalizers=[
        dict(type="NFC"), dict(type="Lowercase")])), {}, {})])
def test_a_tokenizer_that_would_give_other_ids_is_refused(says, change, added, model, model_folder):
    def changed(hf):
        if added:
            hf["added_tokens"].append(TOKEN | added)
        hf["model"]["vocab"] |= dict(ab=300, cd=301)
        hf["model"] |= model
        hf |= change
    rewrite(model_folder / "tokenizer.json", changed)
    with pytest.raises(UserError, match=says):
        load_encoding(model_folder)


@pytest.mark.parametrize("steps, text", [([], "e\u0301"), ([dict(type="NFC")], "\u00e9")])
def test_normalizers_in_a_sequence(steps, text, model_folder):
    """DeepSeek's is empty."""
    normalizer = dict(type="Sequence", normalizers=steps)
    rewrite(model_folder / "tokenizer.json", lambda hf: hf.update(normalizer=normalizer))
    assert load_encoding(model_folder).encode_ordinary("e\u0301") == [*text.encode()]


# Tokenizers, and the ids that tokenizers 0.23.3 gives for texts.
RECORDED = json.loads((ROOT / "tests" / "tokenizers.json").read_text())
COMMON = dict(merges=RECORDED["merges"], texts=RECORDED["texts"])
CASES = {case["name"]: COMMON | case for case in RECORDED["cases"]}


def write_tokenizer(case, folder):
    """The files of a case: the words of its merges in their order, then those of none. In older
    files ByteLevel has no use_regex."""
    merges = [pair.split(" ") for pair in case["merges"]]
    words = dict.fromkeys([*map("".join, merges), *case.get("words", [])])
    vocab = {LETTERS[b]: b for b in range(256) if b not in case.get("lacks", ())}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    parts = [SPLIT | part if "pattern" in part else part for part in case.get("parts", [])]
    level = LEVEL | {name: case[name] for name in ("use_regex",) if name in case}
    hf = dict(
        version="1.0", normalizer=None, post_processor=None, decoder=None, truncation=None,
        padding=None, added_tokens=[TOKEN | dict(id=256 + len(words), content="<end>",
                                                 special=True)],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[*parts, level]),
        model=dict(type="BPE", vocab=vocab, merges=merges,
                   ignore_merges=case.get("ignore_merges", False)))
    for name, content in (("tokenizer.json", hf), ("config.json", {}),
                          ("tokenizer_config.json", dict(eos_token="<end>"))):
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_that_were_recorded(name, tmp_path):
    """Of chains of patterns, as DeepSeek's, and of merges in the way of each other. Bytes that the
    vocabulary lacks are dropped from pieces."""
    case = CASES[name]
    ours = load_encoding(write_tokenizer(case, tmp_path))
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        assert ours.encode_ordinary(text) == ids, repr(text)
        known = bytes(b for b in text.encode() if b not in case.get("lacks", ()))
        assert b"".join(map(ours.token_bytes, ids)) == known

    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    for word, i in vocab.items():               # also where no text has the id
        assert "".join(LETTERS[b] for b in ours.token_bytes(i)) == word


def test_a_word_that_no_merge_makes(tmp_path):
    """It may end a completion. As a whole piece it is refused, but an added token is in none."""
    case = CASES["a word that no merge makes"]
    write_tokenizer(case, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257]}')
    encoding = load_encoding(tmp_path)
    assert encoding.stop == {257, 259} and encoding.token_bytes(257) == b"abc"
    (tmp_path / "chat_frame.json").write_text('{"chat": "none", "before": "xa"}')
    assert load_encoding(tmp_path).encode_prompt("b") == [120, 256]    # a token of frame and text
    write_tokenizer(case | dict(ignore_merges=True), tmp_path)
    with pytest.raises(UserError, match="token 'abc' is 'ab' and 'c', which no merge joins"):
        load_encoding(tmp_path)
    added = [TOKEN | dict(id=259, content="<end>", special=True), TOKEN | dict(content="abc")]
    rewrite(tmp_path / "tokenizer.json", lambda hf: hf.update(added_tokens=added))
    assert load_encoding(tmp_path).encode_ordinary("xabcab") == [120, 257, 256]


def test_what_other_programs_read_of_a_tokenizer_is_kept(model_folder):
    names = ["special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
             "generation_config.json"]
    for name in names:
        (model_folder / name).write_text("{}")
    kept = load_encoding(model_folder, "none").files
    assert {*names, "tokenizer.json", "tokenizer_config.json"} <= {*kept}
    assert kept["merges.txt"] == b"{}"


# ---------- folders that are shared or full

def test_two_runs_in_one_folder(again, capsys):
    """While another holds the lock there is a line, and after its end the run goes on."""
    temporary = again / "model.safetensors.tmp"
    temporary.touch()                                           # which it may be writing
    with open(again / files.MARK, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("4321")
        other.flush()
        for args in (["--resume", "--steps", 3], [*TINY, "--steps", 1], ["--resume", "--steps", 1]):
            assert "run, process 4321, is active" in fault(capsys, *args, "--out", again)
    assert temporary.exists()
    cfg, saved = checkpoint.load(again, Config)
    cfg = dataclasses.replace(cfg, out=str(again), steps=3)
    grpo.train(cfg, saved=saved)                                # as in a notebook
    with open(again / files.MARK) as other:                     # this process let go of it
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert other.read() == str(os.getpid())


def test_a_file_system_without_locks(again, capsys, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", flock)
    go_on(again)
    assert f"note: {again} cannot be locked: " in capsys.readouterr().out


def test_what_killed_saves_left_is_cleared(again):
    """Also under the names of six characters that safetensors writes to before it renames."""
    left = [again / ".tmp0a79jC", again / "best" / ".tmpABCDEF", again / "model.safetensors.tmp",
            again / "warm_start" / "model.safetensors.tmp"]
    own = [again / "notes.tmp", again / ".tmp0a79jCx"]
    (again / "best").mkdir()
    for path in (*left, *own):
        path.touch()
    files.clear_up(again)
    assert all(path.exists() for path in own) and not any(path.exists() for path in left)


def test_files_are_as_others(again, tmp_path):
    (tmp_path / "mine").touch()
    (again / "run.json.tmp").symlink_to(tmp_path / "mine")      # is not followed
    go_on(again)
    assert (tmp_path / "mine").read_bytes() == b""
    for name in ("report.html", "config.json", "checkpoint.safetensors", "metrics.jsonl"):
        assert (again / name).stat().st_mode == (tmp_path / "mine").stat().st_mode
    with pytest.raises(UserError, match="cannot write .*gone/run.json: .*No such file"):
        files.write_whole(again / "gone" / "run.json", "{}")


def test_a_log_has_no_number_that_json_lacks(tmp_path):
    inf = float("inf")
    files.append(tmp_path / "log", {"a": inf - inf, "b": [1.5, {"c": -inf}], "d": (inf,)})
    assert records(tmp_path / "log") == [{"a": None, "b": [1.5, {"c": None}], "d": [None]}]


def test_logs_are_on_the_disk_before_the_checkpoint(again, monkeypatch):
    order, real_sync, real_save = [], os.fsync, files.save_file

    def fsync(fd):
        here = os.fstat(fd)
        order.extend(x.name for x in again.iterdir() if os.path.samestat(x.stat(), here))
        real_sync(fd)

    def save_file(tensors, path, metadata):
        order.append(f"{path.name} is written")
        real_save(tensors, path, metadata)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(files, "save_file", save_file)
    go_on(again)
    last = order[:order.index("checkpoint.safetensors.tmp is written")]
    assert {"metrics.jsonl", "samples.jsonl", "model.safetensors.tmp"} <= {*last}
    assert "checkpoint.safetensors.tmp" in order


@pytest.mark.slow
@pytest.mark.parametrize("what", [
    "checkpoint.safetensors", "model.safetensors", "metrics.jsonl", "run.json"])
def test_a_full_disk_is_a_line_and_loses_nothing(what, again, capsys, monkeypatch):
    """Half of a file, then no more room: as safetensors says it, and as Python does."""
    before, real_save = (again / "checkpoint.safetensors").read_bytes(), files.save_file
    full = OSError(errno.ENOSPC, "No space left on device")

    def save(tensors, path, metadata):
        real_save(tensors, path, metadata)
        if what in path.name:
            os.truncate(path, 100)
            raise SafetensorError(f"I/O error: {full}")

    def refuse(*_):
        raise full
    monkeypatch.setattr(files, "save_file", save)
    if what == "metrics.jsonl":
        monkeypatch.setattr(files, "append", refuse)
    if what == "run.json":
        monkeypatch.setattr(os, "fsync", refuse)
    line = fault(capsys, "--resume", "--steps", 3, "--out", again)
    assert "No space left" in line
    assert what == "metrics.jsonl" or f"cannot write {again / what}" in line
    assert (again / "checkpoint.safetensors").read_bytes() == before and not [*again.glob("*.tmp")]
    monkeypatch.undo()
    go_on(again)


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


FULL = [lambda: open("/dev/full", "w")] if os.path.exists("/dev/full") else []


@pytest.mark.slow
@pytest.mark.parametrize("stream", [broken_pipe, lambda: None, *FULL])
def test_nobody_reads(stream, again, monkeypatch, capfd):
    """`| head`, a closed terminal, a full disk: a run goes on, and an error is code 2."""
    def into(out, err, *args):
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
    assert into(None, stream(), "--group", "0") == into(stream(), None, "--group", "0") == 2


def test_scores_that_say_nothing(monkeypatch):
    """All the same, up to rounding."""
    for x, spread in ((1.0, 0), (0.0, 0), (1e4, 1e-3), (-2.0, 0)):
        monkeypatch.setattr(reward, "scores_of", lambda *_: x + spread * torch.randn(20))
        with pytest.raises(UserError, match="gives every completion the same score"):
            reward.normalise(None, {}, Config())
