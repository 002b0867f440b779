"""Changes that a fork makes: nothing about it is silent."""
import argparse
import dataclasses
import inspect
import json
import os
import re
import runpy
import shutil
import sys
from typing import Literal

import pytest
import torch
from conftest import ROOT, chat_folder, tiny_model

import grpo
import model
from data import UserError, arithmetic, load_task
from run import config, dist, passes, pretrained
from run.pretrained import frozen

FIELD = next(line for line in inspect.getsource(grpo.Config).splitlines(True) if line.startswith("    lr: "))


def fork(tmp_path, edit):
    """A folder with a copy of the code, grpo.py edited."""
    for name in ("data", "run"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model.py", "reward.py"):
        shutil.copy(ROOT / name, tmp_path)
    text = (ROOT / "grpo.py").read_text()
    assert FIELD in text
    (tmp_path / "grpo.py").write_text(edit(text))
    return tmp_path


def read(*argv):
    """The Config of a command line."""
    return grpo.make_config(**config.read(grpo.Config, "", argv)[1])


def move_to(folder):
    """From now on this process imports the code in a folder."""
    for name in [n for n in sys.modules if re.match(r"(grpo|model|reward|data|run|conftest|test_\w+)(\.|$)", n)]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path.insert(0, str(folder))


def command_line(folder, *command):
    """`python grpo.py` with a command in a folder."""
    move_to(folder)
    sys.argv = ["grpo.py", *command]
    runpy.run_path("grpo.py", run_name="__main__")


def run_tests(folder, *files):
    """`python -m pytest` with some files in a folder."""
    move_to(folder)
    sys.exit(pytest.main(["-q", *files]))


# ------------------------------------------------------------------------------------- a new setting

@dataclasses.dataclass
class Forked:
    """Comments in forms that a fork may write."""
    # first title
    plain: int = 1              # a plain one
    hash: str = ""              # with a # in it, and # another
    # second title: of more
    tight: int = 2  #tight
    spaced : float = 0.5        # 50 % of it
    bare: bool = True
    task: str = "arithmetic"

    def method(self):
        # no title
        plain: int = 3          # no help
        return plain


def test_each_setting_has_its_own_help():
    assert config.sections(Forked) == {
        "first title": {"plain": "a plain one", "hash": "with a # in it, and # another"},
        "second title: of more": {"tight": "tight", "spaced": "50 % of it"}, "": {"bare": "", "task": ""}}
    assert config.read(Forked, "", ["--hash", "#", "--spaced", "1", "--no-bare"])[1] == {"hash": "#", "spaced": 1.0, "bare": False}


@pytest.mark.slow
def test_the_help_has_the_defaults_of_the_task(capsys, tmp_path):
    """And its own settings, with what its `problems` says of them."""
    (tmp_path / "mine.py").write_text('def problems(size=3, file=""):\n    """Of `size` digits."""\n'
                                      "DEFAULTS = dict(lr=0.125, prompts=7)\nreward = answer = print\n")
    for words, said in (([], ("--task arithmetic has its own: steps 24, ", "--difficulty INT", "factors of `difficulty` digits")),
                        (["--task", str(tmp_path / "mine.py"), "--lr", "1"],
                         ("mine.py has its own: lr 0.125, prompts 7", "Of `size` digits.", "--size INT", "--file STR"))):
        with pytest.raises(SystemExit):
            read(*words, "--help")
        out = capsys.readouterr().out.replace("\n", " ")
        assert all(text in out for text in said), out


def test_a_new_setting_is_a_flag(forked, tmp_path):
    """With its help, if it has one; and the one after it is still there."""
    new = '    n_mlp: Literal["a", "b"] = "a"  # width (#) of the MLP\n    bare: int = 4\n'
    folder = fork(tmp_path, lambda text: text.replace(FIELD, new + FIELD))
    code, said, _ = forked(tmp_path / "process", command_line, folder, "--help").end()
    assert code == 0 and "--n_mlp {a,b}" in said and "width (#) of the MLP [a]" in said
    assert re.search(r"\n  --bare INT +\[4\]\n", said)
    assert f"{FIELD.partition('# ')[2].strip()} [{grpo.Config.lr}]" in said


@pytest.mark.parametrize("make", [lambda kind: kind(), lambda kind: config.read(kind, "", [])],
                         ids=["notebook", "command line"])
def test_a_setting_may_not_be_optional(make):
    """There would be no flag for None. It says which types there are."""
    Optional = dataclasses.make_dataclass(
        "Optional", [("top_p", float | None, None)], bases=(grpo.Config,), frozen=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "sections", lambda kind: {"sampling": {"top_p": ""}})
        with pytest.raises(TypeError, match=r"^a field of Config is a bool, int, float, str or "
                                            r"Literal, not float \| None$"):
            make(Optional)


# ------------------------------------------------------------------------------ a task's own settings

@pytest.fixture
def mine(tmp_path):
    """A task with settings of its own, which it also reads from the run's."""
    (tmp_path / "mine.py").write_text("DEFAULTS = dict(size=4)\ndef problems(seed, size=3, share=0.5, file='', hard=False):\n"
                                      "    return [(seed, size, share, file, hard)], []\nreward = answer = print\n")
    return str(tmp_path / "mine.py")


def test_the_parameters_of_problems_are_flags(mine):
    """The task's DEFAULTS may have others than its signature."""
    for argv, own in (([], (1, 4, 0.5, "", False)), ("--size 2 --share 1 --file x --hard --seed 7".split(), (7, 2, 1.0, "x", True))):
        cfg = read("--task", mine, *argv)
        assert cfg.task_args == dict(zip(("size", "share", "file", "hard"), own[1:]))
        assert config.problems_of(load_task(mine), cfg) == ([own], [])
        assert grpo.make_config(**vars(cfg)) == cfg
    assert grpo.make_config(task="arithmetic", difficulty=3).task_args == {"difficulty": 3}
    assert grpo.make_config(task="gsm8k").task_args == {"train": "", "test": "", "longest": 0}


def test_problems_may_ask_for_the_whole_config(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("DEFAULTS = {}\ndef problems(cfg, seed, size=2): return [cfg, seed, size], []\nreward = answer = print\n")
    cfg = read("--task", str(path), "--size", "5", "--seed", "3")
    assert cfg.task_args == {"size": 5} and config.problems_of(load_task(str(path)), cfg) == ([cfg, 3, 5], [])


SEE = "see --help, and docs/troubleshooting.md for the names of TRL's and verl's settings"


@pytest.mark.parametrize("argv, fault", [
    (["--size", "x"], "argument --size: invalid int value: 'x'; see --help"),
    (["--sizze", "3"], "there is no setting --sizze: did you mean --size?"),
    (["--difficulty", "3"], f"there is no setting --difficulty: {SEE}")])
def test_a_tasks_own_settings_are_checked(argv, fault, mine):
    with pytest.raises(UserError, match=f"^{re.escape(fault)}$"):
        read("--task", mine, *argv)


def test_a_whole_number_serves_as_a_share_in_a_notebook(mine):
    """And a share is no whole number."""
    assert grpo.make_config(task=mine, share=1).task_args["share"] == 1
    for given, kind in ((dict(size=1.0), "int"), (dict(share="1"), "float"), (dict(hard=1), "bool")):
        with pytest.raises(UserError, match=f"^--{min(given)} must be of the type {kind}, got "):
            grpo.make_config(task=mine, **given)


@pytest.mark.parametrize("given, says", [
    (dict(lr=float("nan")), "at least 0, got nan"), (dict(group=0), "at least 1, got 0"),
    (dict(lr=float("inf")), "at most 9223372036854775808, got inf"), (dict(lr=float("-inf")), "at least 0, got -inf"),
    (dict(steps=2 ** 64), f"at most {2 ** 63}, got {2 ** 64}"), (dict(lr=True), "of the type float, got True"),
    (dict(prompts=True), "of the type int, got True"), (dict(shard=1), "of the type bool, got 1"),
    (dict(temperature=5e-4), "at least 0.001, got 0.0005"), (dict(lam=1.5), "at most 1, got 1.5"),
    (dict(samples=1025), "at most 1024, got 1025"), (dict(group="8"), "of the type int, got '8'"),
    (dict(lr="1e-4"), "of the type float, got '1e-4'"), (dict(out=3), "of the type str, got 3"),
    (dict(reward="modl"), "one of rule, model, rollouts, got 'modl'")], ids=str)
def test_settings_that_cannot_be(given, says):
    """Also in a notebook, where no parser has looked at them."""
    with pytest.raises(UserError, match=f"^--{min(given)} must be {says}$"):
        grpo.Config(**given)


@pytest.mark.parametrize("argv, task", [
    ("--resume --out one", "guess"), ("--resume --out two --init one", "gsm8k"), ("--resume --out none", None),
    ("--resume --out file", None),
    ("--eval_only --init one --out two", "guess"), ("--eval_only --out two", "gsm8k"), ("--eval_only --init file", None),
    ("--ask x --init one --out two", "guess"), ("--ask= --out two", "gsm8k"), ("--ask x", None),
    ("--ask x --init one --task guess", "guess"), ("--resume --out one --task guess", "guess"),
    ("--out one", None), ("--init one --out two", None), ("--init one", None), ("--task guess --out one", "guess")])
def test_the_task_on_a_command_line(argv, task, tmp_path, monkeypatch):
    """That of the run that goes on, or whose model is used, though not if it is a file; a new run has none from a folder."""
    monkeypatch.chdir(tmp_path)
    for folder, name in (("one", "guess"), ("two", "gsm8k"), ("file", "mine.py")):
        os.mkdir(folder)
        with open(f"{folder}/run.json", "w") as f:
            json.dump({"config": {"task": name}}, f)
    parser = argparse.ArgumentParser()
    for name in ("task", "init", "out"):
        parser.add_argument(f"--{name}")
    for name, options in config.MODES.items():
        parser.add_argument(f"--{name}", **options)
    assert config.task_of(parser.parse_known_args(argv.split())[0]) == task


@pytest.mark.parametrize("given", ["config", "size=None", "*sizes"])
def test_a_parameter_of_problems_needs_a_default(given, tmp_path):
    (tmp_path / "mine.py").write_text(f"DEFAULTS = {{}}\ndef problems({given}): pass\nreward = answer = print\n")
    with pytest.raises(UserError, match="of the task's problems() is no setting of the run, so it needs a default".replace("(", r"\(").replace(")", r"\)")):
        grpo.make_config(task=str(tmp_path / "mine.py"))


# ------------------------------------------------------------------------------------ names of settings

@pytest.mark.parametrize("name, meant", [("clip_hihg", "clip_high"), ("clip-high", "clip_high"), ("max-new", "max_new"),
                                         ("resum", "resume"), ("dificulty", "difficulty"), ("grup", "group"), ("epoch", "epochs"), ("betta", "beta")])
def test_an_unknown_flag_names_the_one_that_was_meant(name, meant):
    for argv in ([f"--{name}", "1"], [f"--{name}=1"]):
        with pytest.raises(UserError, match=f"^there is no setting {argv[0]}: did you mean --{meant}\\?$"):
            read(*argv)


@pytest.mark.parametrize("name", ["report_to", "use_peft", "warmup_ratio", "learning_rate", "num_generations", "save_steps",
                                  "eval_steps", "loss_type", "max_tokens", "share_prefix", "beam"])
def test_a_name_of_another_program_is_not_taken_for_a_slip(name):
    with pytest.raises(UserError, match=f"^there is no setting --{name}: {SEE}$"):
        read(f"--{name}", "1")


def test_the_settings_of_a_task_have_flags_of_their_own():
    with pytest.raises(UserError, match=f"^there is no setting --task_args: {SEE}$"):
        read("--task_args", "3")


@pytest.mark.parametrize("given", [dict(stepps=1), dict(algo="mine.py")], ids=str)
def test_an_unknown_name_in_a_notebook_or_in_defaults(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("SETTINGS = DEFAULTS = dict(stepps=8)\ndef problems(): pass\nreward = answer = print\n")
    with pytest.raises(UserError, match=r"^there is no setting stepps: did you mean --steps\?$"):
        grpo.make_config(**given)
    with pytest.raises(UserError, match=r"^there is no setting stepps: did you mean --steps\?$"):
        grpo.make_config(task="mine.py")


def test_what_settings_imply_for_others():
    """Unless these are given; an algorithm's own scale stays."""
    make = grpo.make_config
    kls = dict(kl="reward"), dict(algo="ppo"), dict(algo="ppo", kl="loss"), dict(kl="watch"), dict(kl="reward", estimator="k2")
    assert [make(**given).estimator for given in kls] == ["k1", "k1", "k3", "k3", "k2"]
    learned = {}, dict(reward="model"), dict(reward="rollouts"), dict(reward="model", adv_scale="group"), dict(reward="model", algo="ppo")
    assert [make(**given).adv_scale for given in learned] == ["group", "none", "none", "group", "batch"]
    begun = dict(init="x"), dict(init="x", warm_steps=5), dict(init="x", warm_steps=5, warm_lr=1.0)
    assert [(make(**given).warm_steps, make(**given).warm_lr) for given in begun] == [(0, 2e-5), (5, 2e-5), (5, 1.0)]


def test_what_comes_before_what(monkeypatch):
    """The task's defaults, then the algorithm's settings, then what is asked for; on a command line and in a notebook."""
    assert grpo.make_config(task="countdown").max_new == 384
    for argv, given in (([], {}), ("--algo ppo --beta 0 --clip_high 0.3".split(), dict(algo="ppo", beta=0, clip_high=0.3)),
                        ("--reward model --algo rloo --lr 0.5".split(), dict(reward="model", algo="rloo", lr=0.5))):
        assert read(*argv) == grpo.make_config(**given)
    cfg = read("--algo", "ppo", "--beta", "0", "--clip_high", "0.3")
    assert (cfg.baseline, cfg.beta, cfg.clip_high, cfg.lr) == ("value", 0, 0.3, arithmetic.DEFAULTS["lr"])
    cfg = read("--algo", "dapo", "--loss_mean", "constant", "--kl", "loss")
    assert (cfg.loss_mean, cfg.kl, cfg.clip_high) == ("constant", "loss", 0.28)         # of dapo itself
    monkeypatch.setitem(arithmetic.DEFAULTS, "algo", "ppo")
    assert grpo.make_config().baseline == "value" and grpo.make_config(algo="grpo").baseline == "group"


def test_a_config_cannot_be_changed():
    """A run's settings are what was checked and written down."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        grpo.Config().lr = 1.0


# ----------------------------------------------------------------- a copy of the policy that differs

def test_a_copy_takes_weights_and_buffers():
    policy = tiny_model()
    policy.register_buffer("seen", torch.zeros(3))
    copied = frozen(policy)
    policy.seen += 1
    with torch.no_grad():
        policy.norm.weight += 1
    dist.copy_weights(copied, policy)
    assert torch.equal(copied.seen, policy.seen) and torch.equal(copied.norm.weight, policy.norm.weight)


def test_a_parameter_that_only_the_copy_has_is_refused():
    """It once got the embedding, resized to fit."""
    policy = tiny_model()
    copied = frozen(policy)
    copied.extra = torch.nn.Parameter(torch.zeros(2), False)
    with pytest.raises(UserError, match="only one of the two has extra$"):
        dist.copy_weights(copied, policy)


@pytest.mark.parametrize("tied", [True, False])
def test_what_only_the_policy_has_is_refused(tied):
    """A buffer, and the head of a policy that is not tied."""
    policy = tiny_model(tied=tied)
    copied = frozen(policy)
    if tied:
        policy.register_buffer("seen", torch.zeros(3))
    else:
        del copied.lm_head
    with pytest.raises(UserError, match=f"only one of the two has {'seen' if tied else 'lm_head.weight'}$"):
        dist.copy_weights(copied, policy)


def test_a_copy_whose_memory_was_released_is_filled_again():
    policy = tiny_model()
    copied = frozen(policy)
    for p in copied.parameters():
        p.data = p.data.new_empty(0)
    dist.copy_weights(copied, policy)
    assert all(torch.equal(p, x) for p, x in zip(copied.parameters(), policy.parameters(), strict=True))


def test_a_parameter_of_another_shape_is_refused():
    policy = tiny_model()
    copied = frozen(policy)
    copied.norm.weight.data = torch.zeros(5)
    with pytest.raises(RuntimeError, match="size"):
        dist.copy_weights(copied, policy)


def test_the_head_of_a_copy_is_the_embedding_of_a_tied_policy():
    policy = tiny_model()
    policy.amp = torch.bfloat16
    copied = frozen(policy)
    with torch.no_grad():
        policy.embed_tokens.weight += 1
    dist.copy_weights(copied, policy)
    assert torch.equal(copied.lm_head.weight, policy.embed_tokens.weight.bfloat16())


# ------------------------------------------------------------------------- a model of another kind

def test_a_shape_that_config_json_cannot_hold_is_refused():
    """It would be lost by --resume, --init and a kept warm start."""
    with pytest.raises(UserError, match="would not say norm 'layer': add it to EXTRA in run/pretrained.py$"):
        pretrained.config_json(tiny_model(norm="layer"))


@dataclasses.dataclass
class Wider(model.GPTConfig):
    """A shape with a field of each kind; by default all do nothing."""
    window: int = 0
    gated: bool = False
    gain: float = -0.5
    act: Literal["silu", "relu"] = "silu"


@pytest.fixture
def wider(monkeypatch):
    """Each field has one entry in a table."""
    monkeypatch.setattr(pretrained, "GPTConfig", Wider)
    monkeypatch.setattr(pretrained, "EXTRA", dict(window="window", gated="gated", gain="own_gain", act="act", norm="norm"))


@pytest.mark.parametrize("changes", [{}, dict(window=8, gated=True, gain=-1.5, act="relu", norm="layer"),
                                     dict(gated=True), dict(gain=0.0)])
def test_a_field_of_ones_own_is_saved_and_loaded(changes, wider, tmp_path):
    shape = Wider(vocab_size=9, n_layer=1, n_head=2, n_kv_head=1, n_embd=8, n_inner=8, block_size=8, **changes)
    pretrained.save(model.GPT(shape, torch.Generator().manual_seed(0)), tmp_path)
    assert pretrained.load(tmp_path).cfg == shape


def test_a_file_without_a_field_of_ones_own_has_its_default(wider, tmp_path):
    """As every file from elsewhere; also one of another family, whose own fields win over the defaults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "GPTConfig", model.GPTConfig)
        patch.setattr(pretrained, "EXTRA", {})
        pretrained.save(tiny_model(), tmp_path)
    assert vars(pretrained.load(tmp_path).cfg) == vars(Wider(**vars(tiny_model().cfg)))
    gpt2 = dict(model_type="gpt2", vocab_size=9, n_layer=1, n_head=2, n_embd=8, n_positions=8, layer_norm_epsilon=1e-5)
    shape = pretrained.read_config(gpt2 | dict(window=3))
    assert (shape.norm, shape.window, shape.act) == ("layer", 3, "silu")


@pytest.mark.parametrize("wrong, fault", [
    (dict(window=2.0), "window must be of type int, not 2.0"), (dict(window=True), "window must be of type int, not True"),
    (dict(window=-1), "window must be between 0 and 1048576, not -1"), (dict(gated=1), "gated must be of type bool, not 1"),
    (dict(own_gain="1"), "gain must be of type float, not '1'")])
def test_a_field_of_ones_own_is_checked(wrong, fault, wider):
    hf = pretrained.config_json(model.GPT(Wider()))
    with pytest.raises(UserError, match=f"^{fault}$"):
        pretrained.read_config(hf | wrong)


class Scaled(model.Attention):
    """Attention with a factor for each head, and one for all."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.of_heads = torch.nn.Parameter(torch.ones(cfg.n_head, 1))
        self.of_all = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, *given):
        return super().forward(*given) * self.of_heads.mean() * self.of_all


@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_a_parameter_of_ones_own_begins_as_written(family, monkeypatch):
    """The weights of linear layers and embeddings alone are drawn, in the order of their names, as without it."""
    shape = dict(tied=False, **pretrained.FAMILIES[family])
    plain = dict(tiny_model(scale=1, **shape).named_parameters())
    monkeypatch.setattr(model, "Attention", Scaled)
    source, std = torch.Generator().manual_seed(0), (2 / (5 * 32)) ** 0.5
    gpt = tiny_model(scale=1, **shape)
    drawn = {f"{name}.weight" for name, m in gpt.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Embedding))}
    for name, p in gpt.named_parameters():
        if name.endswith("self_attn.of_heads"):
            assert p.shape == (4, 1) and (p == 1).all()
        elif name in drawn:
            scale = std / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else std        # 2 layers
            assert torch.equal(p, torch.empty(p.shape).normal_(0, scale, generator=source))
            assert torch.equal(p, plain[name])
        elif name.endswith("of_all"):
            assert p.item() == 1.5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_parameter_of_ones_own_is_saved_and_loaded(family, tmp_path, monkeypatch):
    """One number as well. A file without it is refused, unless a table says what it begins as."""
    shape = pretrained.FAMILIES[family]
    hf = dict(model_type="gpt2", vocab_size=257, n_layer=2, n_head=4, n_embd=32, n_positions=64, layer_norm_epsilon=1e-5,
              n_inner=64) if family == "gpt2" else {}

    def saved(folder):
        """A model, saved there."""
        gpt = tiny_model(**shape, **dict(n_kv_head=4) if hf else {})
        if hf:
            gpt.hf = dict(hf)
        with torch.no_grad():
            for name, p in gpt.named_parameters():
                if "of_heads" in name or "of_all" in name:
                    p += 1
        pretrained.save(gpt, folder)
        return gpt
    plain = saved(tmp_path / "plain")
    monkeypatch.setattr(model, "Attention", Scaled)
    gpt, loaded = saved(tmp_path / "own"), pretrained.load(tmp_path / "own")
    assert all(torch.equal(p, x) for p, x in zip(gpt.parameters(), loaded.parameters(), strict=True))
    for new, left, more in (({}, "of_all", 3), ({"attn.of_all": 1.5}, "of_heads", 1)):
        monkeypatch.setattr(pretrained, "NEW", new)
        with pytest.raises(UserError, match=f"lack tensors of the model: '.*0.{'attn' if hf else 'self_attn'}.{left}.*, one of {more + 1}$"):
            pretrained.load(tmp_path / "plain")
    monkeypatch.setattr(pretrained, "NEW", {"attn.of_all": 1.5, "self_attn.of_heads": 2})
    filled = pretrained.load(tmp_path / "plain")
    assert filled.layers[1].self_attn.of_all.item() == 1.5 and (filled.layers[0].self_attn.of_heads == 2).all()
    assert torch.equal(filled.norm.weight, plain.norm.weight)


def test_a_buffer_that_no_file_holds_is_refused(tmp_path):
    """A loaded model is made without memory: such a buffer would hold whatever was in memory before."""
    class Forked(model.GPT):
        def __init__(self, cfg, generator=None):
            super().__init__(cfg, generator)
            self.register_buffer("slopes", torch.ones(3), persistent=False)

    class Mended(Forked):
        def precompute_rope(self):
            super().precompute_rope()
            self.register_buffer("slopes", torch.ones(3), persistent=False)
    pretrained.save(tiny_model(), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "GPT", Forked)
        with pytest.raises(UserError, match="files do not hold the buffer slopes: compute it in precompute_rope, in model.py$"):
            pretrained.load(tmp_path)
        patch.setattr(pretrained, "GPT", Mended)
        assert pretrained.load(tmp_path).slopes.tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_run_with_parameters_of_ones_own(tmp_path, monkeypatch):
    """Trained, saved, resumed and started from."""
    small = "--difficulty 1 --n_layer 1 --n_embd 32 --warm_steps 20 --warm_lr 5e-3 --prompts 2 --group 4 " \
            "--max_new 12 --held_out 20 --lr 1e-2".split()
    grpo.main([*small, "--steps", "0", "--out", str(tmp_path / "plain")])
    monkeypatch.setattr(model, "Attention", Scaled)
    grpo.main([*small, "--steps", "2", "--out", str(tmp_path / "own")])
    grpo.main(["--resume", "--steps", "3", "--out", str(tmp_path / "own")])
    learned = pretrained.load(tmp_path / "own").layers[0].self_attn
    assert learned.of_all != 1.5 and (learned.of_heads != 1).all()
    monkeypatch.setattr(pretrained, "NEW", {"of_all": 1.0, "of_heads": 1.0})
    grpo.main([*small[:-2], "--warm_steps", "0", "--lr", "0", "--steps", "1", "--init", str(tmp_path / "plain"), "--out",
               str(tmp_path / "from")])
    begun = pretrained.load(tmp_path / "from").layers[0].self_attn
    assert begun.of_all == 1 and (begun.of_heads == 1).all()


@pytest.mark.parametrize("init", [True, False])
def test_a_model_that_answers_is_in_evaluation_mode(init, tmp_path):
    """With --eval_only and --ask a fork's dropout was once on."""
    chat_folder(tmp_path)
    cfg = grpo.Config(**{"init" if init else "out": str(tmp_path)}, chat="none")
    assert not pretrained.trained_model(cfg)[1].training


def test_dropout_is_on_in_a_fit_alone():
    """A reward model scores without."""
    module, seen = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout()).eval(), []

    def losses(step):
        seen.append(module[1].training)
        yield module(torch.ones(1, 2)).sum()
    passes.supervised_fit("fit", module, losses, 3, 1e-3)
    assert seen == [True] * 3 and not module.training and not module[1].training


# ------------------------------------------------------------------------------- innocent changes

@pytest.mark.slow
def test_new_files_and_prints_are_fine(forked, tmp_path):
    """A task and a script beside grpo.py, in any style; data/mytask.py, run/mine.py, a print in grpo.py, 30 more lines
    in model.py: the tests of the layout stay green. A module that imports the script does not."""
    shutil.copytree(ROOT, tmp_path / "fork", ignore=shutil.ignore_patterns(".git", "out", "__pycache__", "*.json", "*.png"))
    fork = tmp_path / "fork"
    shutil.copy(fork / "data" / "countdown.py", fork / "data" / "mytask.py")
    (fork / "run" / "mine.py").write_text("from run import dist\n\ndef place():\n    a = 1\n    b = 2\n    return dist.rank(), a, b\n")
    shutil.copy(fork / "data" / "countdown.py", fork / "reverse.py")
    (fork / "plot.py").write_text("import matplotlib\n\ndef plot():\n    a = 1\n    b = 2\n    return eval('a + b')" + " " * 100 + "\n")
    with open(fork / "grpo.py", "a") as f:
        f.write("    print()\n")
    with open(fork / "model.py", "a") as f:
        f.write("# a comment\n" * 30)
    code, said, _ = forked(tmp_path / "green", run_tests, fork, "tests/test_layout.py").end()
    assert code == 0 and " passed" in said, said[-2000:]
    (fork / "run" / "mine.py").write_text("import plot\nimport pandas\n")
    code, said, _ = forked(tmp_path / "red", run_tests, fork, "tests/test_layout.py").end()
    assert "run.mine imports plot: imports run down" in said and "add them to requirements.txt" in said
    assert "3 failed" not in said and "2 failed" in said


@pytest.mark.parametrize("mode", ["--steps=0", "--eval_only", "--ask=1*1="])
def test_a_command_prepares_the_process_first(mode, tmp_path, monkeypatch, capsys):
    """Before it has a model, or writes a file."""
    def prepare():
        raise UserError("prepared")
    monkeypatch.setattr(dist, "prepare", prepare)
    with pytest.raises(SystemExit, match="2"):
        grpo.main([mode, "--out", str(tmp_path / "none")])
    assert capsys.readouterr() == ("", "error: prepared\n") and not (tmp_path / "none").exists()
