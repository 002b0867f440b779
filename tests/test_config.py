"""Settings: the command line of a dataclass, a task's own, what implies what; a fork's model."""
import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from conftest import chat_folder, tiny_model

import grpo
import model
from data import UserError, arithmetic, load_task
from run import config, dist, passes, pretrained, setup
from run.pretrained import frozen


def read(*argv):
    return grpo.make_config(**config.read(grpo.Config, "", argv)[1])


def shown_help(capsys, kind, *argv):
    with pytest.raises(SystemExit):
        config.read(kind, "", [*argv, "--help"])
    return " ".join(capsys.readouterr().out.split())


# ---------- flags and help

@dataclasses.dataclass
class Forked:
    """Comments in forms that a fork may write."""
    # first title
    plain: int = 0              # a plain one
    hash: str = ""              # with a # in it, and # another
    # second title: of more
    tight: int = 2  #tight
    spaced : float = 0.5        # 50 % of it
    kind: Literal["a", "b"] = "b"       # either
    bare: bool = True
    task: str = "arithmetic"

    def method(self):
        # no title
        plain: int = 3          # no help
        return plain


def test_each_setting_is_a_flag_with_its_own_help(capsys):
    assert config.sections(Forked) == {
        "first title": {"plain": "a plain one", "hash": "with a # in it, and # another"},
        "second title: of more": {"tight": "tight", "spaced": "50 % of it", "kind": "either"},
        "": {"bare": "", "task": ""}}
    argv = "--hash # --spaced 1 --no-bare --kind a".split()
    given = config.read(Forked, "", argv)[1]
    assert given == dict(hash="#", spaced=1.0, bare=False, kind="a")
    said = shown_help(capsys, Forked)
    for text in ("first title: --plain INT a plain one [0]", "--spaced FLOAT 50 % of it [0.5]",
                 "--kind {a,b} either [b]", "--bare, --no-bare [True]"):
        assert text in said


@pytest.fixture
def mine(tmp_path):
    """A task with settings of its own, which also reads those of the run."""
    (tmp_path / "mine.py").write_text(
        "DEFAULTS = dict(size=4, prompts=7)\nreward = answer = print\n"
        "def problems(cfg, seed, size=3, share=0.5, file='', hard=False):\n"
        "    'Of `size` digits.'\n"
        "    return [(cfg, seed, size, share, file, hard)], []\n")
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("argv, seed, own", [
    ("", 1, (4, 0.5, "", False)),
    ("--size 2 --share 1 --file x --hard --seed 7", 7, (2, 1.0, "x", True))])
def test_the_parameters_of_problems_are_flags(argv, seed, own, mine):
    """The task's DEFAULTS may have others than its signature."""
    cfg = read("--task", mine, *argv.split())
    assert cfg.task_args == dict(zip(("size", "share", "file", "hard"), own))
    assert config.problems_of(load_task(mine), cfg) == ([(cfg, seed, *own)], [])
    assert grpo.make_config(**vars(cfg)) == cfg


def test_the_help_has_a_tasks_defaults_and_settings(mine, capsys):
    said = shown_help(capsys, grpo.Config, "--task", mine, "--lr", "1")
    for text in ("mine.py: size 4, prompts 7", "Of `size` digits.", "--size INT [3]", "--file STR"):
        assert text in said


@pytest.mark.parametrize("parameter", ["config", "size=None", "*sizes", "ask=1", "help=1"])
def test_a_parameter_of_problems_needs_a_default(parameter, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"DEFAULTS = {{}}\ndef problems({parameter}): pass\nreward = answer = print\n")
    with pytest.raises(UserError, match="needs a default"):
        grpo.make_config(task=str(path))


# ---------- what is refused

SLIPS = {"clip-hihg": "clip_high", "resum": "resume", "dificulty": "difficulty", "stesp": "steps"}
SEE = "see --help"
OTHERS = dict(learning_rate="--lr", loss_agg_mode="--loss_mean, or", save_steps="--eval_every, ",
              report_to="a recipe in docs/changing.md")


@pytest.mark.parametrize("name, hint", [
    *((name, f"did you mean --{meant}?") for name, meant in SLIPS.items()),
    *((name, f"here it is {ours}") for name, ours in OTHERS.items()),
    *((name, SEE) for name in ("max_tokens", "task_args", "."))])
def test_an_unknown_flag_names_the_one_that_was_meant(name, hint):
    """A name of another program, if the page has it, is not taken for a slip."""
    for argv in ([f"--{name}", "1"], [f"--{name}=1"]):
        with pytest.raises(UserError) as e:
            read(*argv)
        assert f"there is no setting {argv[0]}: {hint}" in str(e.value)


@pytest.mark.parametrize("argv, says", [
    ("--size x", "--size: invalid int value: 'x'; see --help"), ("chess", "no setting chess"),
    ("--sizze 3", "no setting --sizze: did you mean --size?"),
    ("--difficulty 3", f"no setting --difficulty: {SEE}"),
    ("--resume --eval_only", "not allowed with argument --resume")])
def test_a_command_line_that_cannot_be(argv, says, mine):
    """Nor settings of a task in a notebook."""
    with pytest.raises(UserError) as e:
        read("--task", mine, *argv.split())
    assert says in str(e.value)
    assert grpo.make_config(task=mine, share=1).task_args["share"] == 1
    for name, x, kind in (("size", 1.0, "int"), ("share", "1", "float"), ("hard", 1, "bool")):
        with pytest.raises(UserError, match=f"^--{name} must be of the type {kind}, got "):
            grpo.make_config(task=mine, **{name: x})


@pytest.mark.parametrize("name, x, says", [
    ("lr", float("nan"), "at least 0, got nan"), ("lr", float("inf"), f"at most {2 ** 63}"),
    ("lr", True, "of the type float"), ("lr", "1e-4", "of the type float"),
    ("group", 0, "at least 1, got 0"), ("prompts", True, "of the type int"),
    ("prompts", 1.0, "of the type int"), ("steps", 2 ** 64, f"at most {2 ** 63}"),
    ("steps", -1, "at least 0"), ("compile", 1, "of the type bool"), ("out", 3, "of the type str"),
    ("temperature", 5e-4, "at least 0.001"), ("lam", 1.5, "at most 1, got 1.5"),
    ("samples", 1025, "at most 1024"), ("reward", "modl", "one of rule, model, rollouts")])
def test_settings_that_cannot_be(name, x, says):
    """Also in a notebook, where no parser has looked at them."""
    with pytest.raises(UserError, match=f"^--{name} must be {says}"):
        grpo.Config(**{name: x})


@pytest.mark.parametrize("given", [
    dict(stepps=1), dict(algo="mine.py"), dict(task="mine.py")], ids=str)
def test_an_unknown_name_in_a_notebook_or_in_defaults(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("SETTINGS = DEFAULTS = dict(stepps=8)\n"
                                      "def problems(): pass\nreward = answer = print\n")
    with pytest.raises(UserError, match="no setting stepps: did you mean --steps"):
        grpo.make_config(**given)


# ---------- what counts

@pytest.mark.parametrize("argv, task", [
    ("--resume --out two --init one", "gsm8k"), ("--resume --out none", None),
    ("--resume --out file", None), ("--eval_only --init one --out two", "guess"),
    ("--ask x --init file", None), ("--ask= --out two", "gsm8k"), ("--ask x", None),
    ("--ask x --init two --task guess", "guess"), ("--init one --out two", None)])
def test_the_task_on_a_command_line(argv, task, tmp_path, monkeypatch):
    """The run's that goes on or whose model is used, unless a file; a new run takes none."""
    monkeypatch.chdir(tmp_path)
    for folder, name in (("one", "guess"), ("two", "gsm8k"), ("file", "mine.py")):
        (tmp_path / folder).mkdir()
        about = {"config": {"task": name}}
        (tmp_path / folder / "run.json").write_text(json.dumps(about))
    assert config.read(grpo.Config, "", argv.split())[1].get("task") == task


def test_what_settings_imply_for_others():
    """Unless these are given; an algorithm's own scale stays. A length is favoured by none that
    has the gradient of the expected reward."""
    for name, given, found in (
            ("estimator", dict(kl="reward"), "k1"), ("estimator", dict(algo="ppo"), "k1"),
            ("estimator", dict(algo="ppo", kl="loss"), "k3"),
            ("estimator", dict(kl="watch"), "k3"),
            ("estimator", dict(kl="reward", estimator="k2"), "k2"),
            ("adv_scale", {}, "group"), ("adv_scale", dict(reward="model"), "none"),
            ("adv_scale", dict(reward="rollouts"), "none"),
            ("adv_scale", dict(kl="reward"), "none"),
            ("adv_scale", dict(reward="model", adv_scale="group"), "group"),
            ("adv_scale", dict(reward="model", algo="ppo"), "batch"),
            ("warm_steps", dict(init="x"), 0), ("warm_steps", dict(init="x", warm_steps=5), 5),
            ("warm_lr", dict(init="x"), 2e-5), ("warm_lr", dict(init="x", warm_lr=1.0), 1.0),
            *(("loss_mean", dict(algo=x), "constant") for x in ("reinforce", "rloo", "dr_grpo"))):
        assert getattr(grpo.make_config(**given), name) == found, (name, given)


def test_what_comes_before_what(monkeypatch):
    """The task's defaults, then the algorithm's settings, then what is asked for."""
    assert str(grpo.Config(task="./x/y.py").folder) == "out/y"
    home = dict(out="~/x", init="~/y", task="gsm8k", train="~/z")
    flags = [f"--{name}={path}" for name, path in home.items()]
    assert config.read(grpo.Config, "", flags)[1]["init"] == str(Path.home() / "y")
    for cfg in (grpo.make_config(**home), read(*flags)):
        found = cfg.folder, Path(cfg.init), Path(cfg.task_args["train"])
        assert found == tuple(Path.home() / x for x in "xyz")
    cfg = read("--algo", "ppo", "--beta", "0", "--clip_high", "0.3")
    assert cfg == grpo.make_config(algo="ppo", beta=0, clip_high=0.3)
    found = cfg.baseline, cfg.beta, cfg.clip_high, cfg.lr
    assert found == ("value", 0, 0.3, arithmetic.DEFAULTS["lr"])
    cfg = read("--algo", "dapo", "--loss_mean", "constant", "--kl", "loss")
    assert (cfg.loss_mean, cfg.kl, cfg.clip_high) == ("constant", "loss", 0.28)
    monkeypatch.setitem(arithmetic.DEFAULTS, "init", "x")
    assert (grpo.make_config().warm_steps, grpo.make_config(init="").warm_steps) == (0, 1500)
    monkeypatch.setitem(arithmetic.DEFAULTS, "algo", "ppo")
    assert grpo.make_config().baseline == "value"
    assert grpo.make_config(algo="grpo").baseline == "group"


# ---------- a copy of a policy that differs

@torch.no_grad()
def test_a_copy_takes_weights_and_buffers():
    """Rounded once, it gives the same."""
    policy, ids = tiny_model(), torch.randint(0, 256, (3, 20))
    policy.amp = torch.bfloat16
    policy.register_buffer("seen", torch.zeros(3))
    copied = frozen(policy)
    for x in (*policy.parameters(), policy.seen):
        x += torch.randn(x.shape)
    dist.copy_weights(copied, policy)
    assert torch.equal(policy.head(policy(ids)), copied.head(copied(ids)))
    assert torch.equal(copied.seen, policy.seen) and policy.cfg.tied
    for name, p in copied.named_parameters():
        rounded = "_proj" in name or "lm_head" in name
        assert p.dtype == (torch.bfloat16 if rounded else torch.float32) and not p.requires_grad
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.parameters())
    for one in (copied, policy):        # it once got the embedding, resized to fit
        one.extra = torch.nn.Parameter(torch.zeros(2), False)
        with pytest.raises(UserError, match="only one of the two has extra$"):
            dist.copy_weights(copied, policy)
        del one.extra


# ---------- a model of another kind

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
    names = dict(window="window", gated="gated", gain="own_gain", act="act", norm="norm")
    monkeypatch.setattr(pretrained, "GPTConfig", Wider)
    monkeypatch.setattr(pretrained, "EXTRA", names)


@pytest.mark.parametrize("changes", [
    {}, dict(window=8, gated=True, gain=-1.5, act="relu", norm="layer"), dict(gain=0.0)])
def test_a_field_of_ones_own_is_saved_and_loaded(changes, wider, tmp_path):
    shape = Wider(vocab_size=9, n_layer=1, n_embd=8, n_inner=8, block_size=8, **changes)
    gpt = model.GPT(shape)
    pretrained.save(gpt, tmp_path)
    assert pretrained.load(tmp_path).cfg == shape


def test_a_file_without_a_field_of_ones_own_has_its_default(wider):
    """A family's own fields win over the defaults."""
    hf = pretrained.config_json(model.GPT(Wider()))
    for name in ("window", "gated", "own_gain", "act", "norm"):
        del hf[name]
    assert pretrained.read_config(hf) == Wider()
    gpt2 = dict(model_type="gpt2", vocab_size=9, n_layer=1, n_head=2, n_embd=8, n_positions=8,
                layer_norm_epsilon=1e-5, window=3)
    shape = pretrained.read_config(gpt2)
    assert (shape.norm, shape.window, shape.act) == ("layer", 3, "silu")


def test_a_shape_that_config_json_cannot_hold_is_refused():
    """It would be lost by --resume, --init and a kept warm start."""
    with pytest.raises(UserError, match="would not say norm 'layer': add it to EXTRA"):
        pretrained.config_json(tiny_model(norm="layer"))


class Scaled(model.Attention):
    """Attention with a factor for each head, and one for all."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.of_heads = torch.nn.Parameter(torch.ones(cfg.n_head, 1))
        self.of_all = torch.nn.Parameter(torch.tensor(1.5))


@pytest.mark.parametrize("family, attn", [("llama", "self_attn"), ("gpt2", "attn")])
def test_a_parameter_of_ones_own_is_saved_and_loaded(family, attn, tmp_path, monkeypatch):
    """It begins as written: only the weights of linear layers and embeddings are drawn, in the
    order of their names."""
    def saved(folder):
        gpt = tiny_model(n_kv_head=4, scale=1, **pretrained.FAMILIES[family])
        if family == "gpt2":
            gpt.hf = dict(model_type="gpt2", vocab_size=257, n_layer=2, n_head=4, n_embd=32,
                          n_positions=64, layer_norm_epsilon=1e-5, n_inner=64)
        pretrained.save(gpt, folder)
        return gpt
    saved(tmp_path / "plain")
    monkeypatch.setattr(model, "Attention", Scaled)
    gpt, loaded = saved(tmp_path / "own"), pretrained.load(tmp_path / "own")
    assert all(map(torch.equal, gpt.parameters(), loaded.parameters()))
    source, std = torch.Generator().manual_seed(0), (2 / (5 * 32)) ** 0.5
    for name, m in loaded.named_modules():
        if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)):
            scale = std / 2 if name.endswith(("o_proj", "down_proj")) else std      # 2 layers
            want = torch.empty(m.weight.shape).normal_(0, scale, generator=source)
            assert torch.equal(m.weight, want)
    own = loaded.layers[1].self_attn
    assert own.of_all.item() == 1.5 and (own.of_heads == 1).all()
    with pytest.raises(UserError, match=f"lack tensors of the model: '.*0.{attn}.of_all.* 4$"):
        pretrained.load(tmp_path / "plain")


def test_dropout_is_on_in_a_fit_alone(tmp_path):
    """With --eval_only and --ask it once was on."""
    module, seen = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout()).eval(), []

    def losses(step):
        seen.append(module[1].training)
        yield module(torch.ones(1, 2)).sum()
    passes.supervised_fit("fit", module, losses, 3, 1e-3)
    assert seen == [True] * 3 and not module[1].training
    for name in ("init", "out"):
        cfg = grpo.Config(**{name: str(chat_folder(tmp_path))}, chat="none")
        assert not setup.trained_model(cfg)[2].training
