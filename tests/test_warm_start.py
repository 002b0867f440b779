"""What a run starts from, each function alone: whether it can run, its tokenizer and model, the warm start."""
import copy
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import chat_folder, tiny_model

import data.arithmetic as arithmetic
import grpo
from data import UserError, tokenizer
from data.tokenizer import byte_encoding
from grpo import Config
from model import GPT
from run import checkpoint, dist, passes, preflight, pretrained, setup, show, warm_start

PROBLEMS = [SimpleNamespace(prompt=f"{i}=") for i in range(20)]
HELD_OUT = [SimpleNamespace(prompt=f"{i}+") for i in range(60)]
CFG = Config(prompts=2, group=4, max_new=8, warm_steps=3, micro_tokens=40, device="cpu", dtype="float32")


def toy(**parts):
    """A task of PROBLEMS, with all that a task can have."""
    return SimpleNamespace(**dict(problems=lambda: (PROBLEMS, HELD_OUT), reward=lambda p, text: {"correct": 0.0},
                                  steps=lambda p, text: [], demonstration=lambda p, source: "abc", answer=lambda text: text) | parts)


# ------------------------------------------------------------------------------ whether it can run

def check(changes, ranks, monkeypatch, task=None):
    monkeypatch.setattr(dist, "ranks", lambda: ranks)
    preflight.check_run(dataclasses.replace(CFG, **changes), task or toy(), PROBLEMS)


@pytest.mark.parametrize("changes, ranks, fault", [
    (dict(prompts=20), 1, ""),
    (dict(prompts=21), 1, "--prompts 21: the task has only 20 problems"),
    (dict(reward="model"), 2, ""),
    (dict(reward="model", prompts=3), 3, "a learned reward needs 30 problems, the task has 20"),
    (dict(prompts=3), 2, "--prompts 3 is not divisible by 2 ranks"),
    *((dict(group=1, **given), 1, "" if allowed else "--group 1: a completion is compared with others of its prompt, unless "
       "--baseline is none or value and --adv_scale none or batch") for given, allowed in (
          (dict(baseline="none"), False), (dict(adv_scale="none"), False), (dict(baseline="none", adv_scale="batch"), True))),
    (dict(prompts=6), 3, ""),
    (dict(prompts=6), 6, ""),
    (dict(init="a", out="a/"), 1, "--init is in --out: the model in a would be overwritten"),
    *((dict(init=f"a/{x}", out="a"), 1, f"--init is in --out: the model in a/{x} would be overwritten") for x in ("best", "./best/")),
    (dict(init="a/warm_start", out="a"), 1, ""), (dict(init="best", out="a"), 1, ""),
    (dict(init="a", out="b"), 1, ""),
    (dict(init="", out="."), 1, "")])
def test_what_a_run_may_ask_for_at_most(changes, ranks, fault, monkeypatch):
    if fault:
        with pytest.raises(UserError) as e:
            check(changes, ranks, monkeypatch)
        assert str(e.value) == fault
    else:
        check(changes, ranks, monkeypatch)


@pytest.mark.parametrize("lacks, needed, not_needed", [
    ("steps", dict(supervision="process"), {}), ("demonstration", {}, dict(warm_steps=0))])
def test_functions_of_a_task_that_not_every_run_needs(lacks, needed, not_needed, monkeypatch):
    check(not_needed, 1, monkeypatch, toy(**{lacks: None}))
    with pytest.raises(UserError, match=f"has no function {lacks}: "):
        check(needed, 1, monkeypatch, toy(**{lacks: None}))


def test_none_held_out_is_a_fault():
    with pytest.raises(UserError, match="^the task has no held-out problems to evaluate on$"):
        preflight.problems_of(CFG, toy(problems=lambda: (PROBLEMS, [])))


def test_the_reward_is_tried_once(monkeypatch):
    """On the first problem and a completion without text: it may be slow."""
    tried = []
    check({}, 1, monkeypatch, toy(reward=lambda p, text: tried.append((p, text)) or {"correct": 0}))
    assert tried == [(PROBLEMS[0], "")]
    with pytest.raises(UserError, match="'correct'"):
        check({}, 1, monkeypatch, toy(reward=lambda p, text: {}))


def test_the_steps_are_tried_once(monkeypatch):
    """On a demonstration, or without a warm start on a short text; only if steps are rewarded."""
    tried = []
    task = toy(steps=lambda p, text: tried.append((p, text)) or [(len(text), True)])
    for changes in ({}, dict(supervision="process"), dict(supervision="process", warm_steps=0)):
        check(changes, 1, monkeypatch, task)
    assert tried == [(PROBLEMS[0], "abc"), (PROBLEMS[0], "12")]
    check({}, 1, monkeypatch, toy(steps=lambda p, text: None))
    with pytest.raises(UserError, match="^the steps of the prompt '0=' must be a list"):
        check(dict(supervision="process"), 1, monkeypatch, toy(steps=lambda p, text: None))


def test_the_first_held_out_problems_are_taken():
    assert preflight.problems_of(CFG, toy()) == (PROBLEMS, HELD_OUT)
    assert preflight.problems_of(dataclasses.replace(CFG, held_out=7), toy()) == (PROBLEMS, HELD_OUT[:7])


@pytest.mark.parametrize("step, stats, steps, iterations, at_its_end", [
    (6, {}, 3, 2, True), (6, {}, 6, 1, True), (5, {}, 3, 2, False), (3, {}, 3, 2, False), (6, {}, 12, 2, False),
    (6, {"reward": 1.0}, 3, 2, False)])         # its last evaluation is still to come
def test_a_run_at_its_end_says_so(step, stats, steps, iterations, at_its_end, monkeypatch, capsys, tmp_path):
    """And goes on, with the model of its checkpoint, which needs no warm start; the longest prompt has 3 tokens."""
    cfg, calls = dataclasses.replace(CFG, steps=steps, iterations=iterations, out=str(tmp_path)), []
    saved = SimpleNamespace(step=step, stats=stats, model={"a": "config"})
    monkeypatch.setattr(checkpoint, "open_run", lambda *given: calls.append("open"))
    monkeypatch.setattr(show, "header", lambda *given: None)
    monkeypatch.setattr(preflight, "costs", lambda policy, cfg, longest: f"{policy} {longest}")
    monkeypatch.setattr(pretrained, "model_of", lambda config, cfg, longest: calls.append((config, longest)) or "policy")
    got = setup.begin(cfg, toy(), saved)
    assert got[0] == cfg and got[3:] == ("policy", PROBLEMS, HELD_OUT) and got[2].n_vocab == 257
    assert calls == [({"a": "config"}, 3), "open"]
    assert capsys.readouterr().out.splitlines() == [
        f"the run in {tmp_path} is complete" + "; a larger --steps continues it" * (iterations == 1)] * at_its_end + ["policy 3"]


# ------------------------------------------------------------------------ the tokenizer and the model

def test_the_tokenizer_is_the_one_in_the_folder(tmp_path):
    """A run's folder without one has a model of bytes; --init's must have one."""
    chat, empty = chat_folder(tmp_path / "chat"), tmp_path / "empty"
    empty.mkdir()
    init = lambda where: dataclasses.replace(CFG, init=str(where))
    sizes = [pretrained.encoding_of(cfg, where).n_vocab for cfg, where in (
        (CFG, ""), (CFG, empty), (CFG, chat), (init(chat), chat))]
    assert sizes == [257, 257, 259, 259]
    with pytest.raises(UserError, match="tokenizer.json"):
        pretrained.encoding_of(init(empty), empty)


@pytest.fixture
def saved(tmp_path):
    """The folder of a small model of bytes."""
    pretrained.save(tiny_model(), tmp_path / "model", byte_encoding().files)
    return tmp_path / "model"


def test_a_vocabulary_may_be_larger_than_the_tokenizers(tmp_path, encoding):
    pretrained.save(tiny_model(vocab_size=300), tmp_path / "large")
    assert pretrained.load_model(tmp_path / "large", CFG, encoding).cfg.vocab_size == 300
    pretrained.save(tiny_model(vocab_size=256), tmp_path / "small")
    with pytest.raises(UserError, match="small: the model has a vocabulary of 256, the tokenizer one of 257$"):
        pretrained.load_model(tmp_path / "small", CFG, encoding)


def test_a_model_that_only_answers_needs_no_room_for_a_run(saved, monkeypatch):
    """Neither in its context nor in memory."""
    whole = sum(p.nbytes for p in tiny_model().parameters())
    monkeypatch.setattr(preflight, "free_memory", lambda device: whole)
    cfg = dataclasses.replace(CFG, init=str(saved), max_new=1000, prompts=10 ** 6)
    encoding, model = pretrained.trained_model(cfg)
    assert encoding.n_vocab == model.cfg.vocab_size == 257
    with pytest.raises(UserError, match="do not fit the model's context of 64"):
        pretrained.load_model(saved, cfg, encoding, 1)


@pytest.mark.parametrize("longest, context", [(7, 16), (8, 16), (9, 32), (24, 32), (25, 64)])
def test_a_new_models_context_is_the_least_power_of_two(longest, context, encoding):
    cfg = dataclasses.replace(CFG, n_embd=16)
    assert pretrained.new_model(cfg, encoding, longest).cfg.block_size == context
    assert pretrained.new_model(cfg, encoding, longest).hf["eos_token_id"] == 256


def test_new_weights_follow_from_the_seed_alone(encoding):
    """By a stream of their own."""
    cfg = dataclasses.replace(CFG, n_embd=16, seed=5)
    model = pretrained.new_model(cfg, encoding, 8)
    number = dist.rng(cfg, "weights").getrandbits(63)
    std = (2 / (5 * 16)) ** 0.5
    want = torch.randn(257, 16, generator=torch.Generator().manual_seed(number)) * std
    torch.testing.assert_close(model.embed_tokens.weight.detach(), want)
    other = pretrained.new_model(dataclasses.replace(cfg, seed=6), encoding, 8)
    assert not torch.equal(other.embed_tokens.weight, model.embed_tokens.weight)


@pytest.mark.parametrize("dtypes, told", [
    ({}, None), (dict(dtype="float32"), None), (dict(dtype="bfloat16"), "bfloat16"),
    (dict(torch_dtype="float16"), "float16"), (dict(dtype="bfloat16", torch_dtype="float32"), "bfloat16")])
def test_weights_that_were_rounded_are_told(dtypes, told, saved, tmp_path, encoding, capsys):
    path = saved / "config.json"
    path.write_text(json.dumps({n: x for n, x in json.loads(path.read_text()).items() if n != "dtype"} | dtypes))
    cfg = dataclasses.replace(CFG, init=str(saved), out=str(tmp_path / "out"), warm_steps=0)
    model, cold = warm_start.starting_model(cfg, toy(), PROBLEMS, 5, encoding)
    assert capsys.readouterr().out.splitlines() == [f"starting from {saved}"] + [
        f"its weights are {told}; they are trained, and saved, in float32"] * bool(told)
    assert not cold and model.embed_tokens.weight.dtype == torch.float32


def kept(cfg, task=None, problems=PROBLEMS, model=None):
    """Keep a model, by default a tiny one, as the warm start in cfg's folder; returns the folder."""
    pretrained.save(model or tiny_model(), cfg.folder / "warm_start", byte_encoding().files)
    note = warm_start.new_note(cfg, task or toy(), problems, byte_encoding())
    (cfg.folder / "warm_start" / "warm_start.json").write_text(note)
    return cfg.folder / "warm_start"


def why(cfg, task=None, problems=PROBLEMS):
    return warm_start.outdated(cfg.folder / "warm_start", cfg, task or toy(), problems, byte_encoding())


def test_a_kept_warm_start_is_taken_if_it_is_the_same(tmp_path, encoding, capsys):
    cfg = dataclasses.replace(CFG, out=str(tmp_path), n_embd=16)
    model, cold = warm_start.starting_model(cfg, toy(), PROBLEMS, 5, encoding)
    assert cold and model.cfg.n_embd == 16 and capsys.readouterr().out == ""
    where = kept(cfg)
    model, cold = warm_start.starting_model(cfg, toy(), PROBLEMS, 5, encoding)
    assert not cold and model.cfg.n_embd == 32 and capsys.readouterr().out == f"starting from {where}\n"
    model, cold = warm_start.starting_model(dataclasses.replace(cfg, seed=2), toy(), PROBLEMS, 5, encoding)
    assert cold and model.cfg.n_embd == 16
    assert capsys.readouterr().out == f"{where} is rebuilt: --seed was 1, and is 2\n"


# Changes of a task or of the tokenizer. The demonstrations are the same before and after the last ones.
OTHER_WORDS = "the demonstrations, their tokens, or --init's weights changed"
@pytest.mark.parametrize("changes, fault", [
    (dict(demonstration=lambda p, rng: "abd"), OTHER_WORDS),
    (dict(demonstration=lambda p, rng: "abcd"), OTHER_WORDS),
    (dict(demonstration=lambda p, rng: "abc" if p.prompt != "19=" or rng.random() < 0 else "x"), OTHER_WORDS),
    (dict(demonstration=lambda p, rng: "ab" + "c"), None),
    (dict(reward=lambda p, text: {"correct": 1.0}), None)])
def test_a_kept_warm_start_depends_on_the_demonstrations(changes, fault, tmp_path):
    cfg = dataclasses.replace(CFG, out=str(tmp_path))
    kept(cfg)
    assert why(cfg, toy(**changes)) == fault


def test_a_kept_warm_start_depends_on_the_problems_and_on_the_tokenizer(tmp_path, monkeypatch):
    cfg = dataclasses.replace(CFG, out=str(tmp_path))
    kept(cfg)
    assert why(cfg) is None and why(cfg, problems=PROBLEMS[:]) is None
    assert why(cfg, problems=PROBLEMS[::-1]) == why(cfg, problems=PROBLEMS[:-1]) == OTHER_WORDS
    real = tokenizer.Encoding.encode_ordinary
    monkeypatch.setattr(tokenizer.Encoding, "encode_ordinary", lambda self, text: real(self, text.upper()))
    assert why(cfg) == OTHER_WORDS


def test_a_kept_warm_start_depends_on_what_the_model_computes(tmp_path, monkeypatch):
    """A fork that changes the model is told; a comment or rounding changes nothing."""
    cfg = dataclasses.replace(CFG, out=str(tmp_path))
    where = kept(cfg)
    real = GPT.forward

    def forward_with(add):
        return lambda self, *args, **named: real(self, *args, **named) + add
    monkeypatch.setattr(GPT, "forward", forward_with(1e-6))
    assert why(cfg) is None
    monkeypatch.setattr(GPT, "forward", forward_with(torch.arange(32) / 100))
    assert why(cfg) == "model.py changed: its weights give another loss"
    monkeypatch.undo()
    hf = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(hf | {"hidden_act": "relu"}))
    assert "hidden_act" in why(cfg)
    (where / "config.json").unlink()
    assert why(cfg).startswith("no model in ")


NOTE = {"settings": {}, "sha256": "", "loss": 0.0}


@pytest.mark.parametrize("text", ["", "{}", "[]", "{",
                                  *(json.dumps({n: x for n, x in NOTE.items() if n != name}) for name in NOTE)])
def test_a_note_of_another_version_is_no_note(text, tmp_path):
    cfg = dataclasses.replace(CFG, out=str(tmp_path))
    (kept(cfg) / "warm_start.json").write_text(text)
    assert why(cfg) == "another version of this code made it"


# ------------------------------------------------------------------------- the one that is shipped

@pytest.fixture(scope="module")
def for_the_default_run(tmp_path_factory):
    """A kept start with the settings of the default run."""
    cfg = grpo.make_config(init="", out=str(tmp_path_factory.mktemp("shipped")), warm_steps=Config.warm_steps, device="cpu",
                           dtype="float32")
    return kept(cfg, arithmetic, arithmetic.problems(**cfg.task_args)[0])


@pytest.fixture
def shipped(for_the_default_run, monkeypatch):
    """It, in place of data/warm_start."""
    monkeypatch.setattr(warm_start, "SHIPPED", for_the_default_run)
    return for_the_default_run


@pytest.mark.slow
@pytest.mark.parametrize("given, serves", [
    ({}, True), (dict(seed=7), True), (dict(algo="ppo", steps=3, lr=1e-3, reward="model"), True),
    (dict(micro_tokens=4096, recompute=True, cache="plain"), True), (dict(n_layer=2), True),
    (dict(n_layer=3), False), (dict(difficulty=1), False), (dict(max_new=32), False), (dict(warm_steps=1500), False),
    (dict(warm_steps=0), False), (dict(warm_lr=1e-4), False), (dict(init=""), False), (dict(init="x"), False),
    (dict(task="sums"), False)])
def test_a_shipped_start_serves_a_run_that_would_make_the_same(given, serves, shipped):
    """Whatever its seed and what RL alone uses. One who gives --warm_steps wants a new one."""
    cfg = grpo.make_config(**given)
    assert (cfg.init == str(shipped)) is serves
    assert cfg.warm_steps == (0 if serves or given.get("init") else given.get("warm_steps", 1500))
    assert cfg.warm_lr == given.get("warm_lr", 2e-5 if given.get("init") else 1.2e-3)


@pytest.mark.slow
def test_this_code_would_make_the_shipped_start(capsys):
    """The one in data/: its settings, demonstrations, and log-probabilities."""
    cfg = grpo.make_config(task="arithmetic")
    assert cfg.init == str(warm_start.SHIPPED) and warm_start.checked(cfg, arithmetic, arithmetic.problems(**cfg.task_args)[0]) is cfg
    assert capsys.readouterr().out == ""


def test_without_a_shipped_start_there_is_a_warm_start(monkeypatch, tmp_path):
    monkeypatch.setattr(warm_start, "SHIPPED", tmp_path)
    assert (grpo.make_config().init, grpo.make_config().warm_steps) == ("", 1500)


@pytest.mark.slow
def test_an_outdated_shipped_start_is_replaced_by_one_of_the_runs_own(shipped, monkeypatch, capsys):
    cfg, problems = grpo.make_config(seed=3), arithmetic.problems()[0]
    assert warm_start.checked(cfg, arithmetic, problems) == cfg
    assert capsys.readouterr().out == ""
    warm_start.starting_model(dataclasses.replace(cfg, max_new=8), arithmetic, problems, 6, byte_encoding())
    assert capsys.readouterr().out == f"starting from {shipped}; --warm_steps 1500 makes a new one\n"
    real = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *given, **named: real(self, *given, **named) + torch.arange(32) / 100)
    own = dataclasses.replace(cfg, init="", warm_steps=1500)
    assert warm_start.checked(cfg, arithmetic, problems) == own
    assert capsys.readouterr().out == f"note: {shipped} is not used: model.py changed: its weights give another loss\n"
    monkeypatch.undo()
    other = dataclasses.replace(cfg, init="elsewhere")
    assert warm_start.checked(other, arithmetic, problems[1:]) == other and capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------ warm start

def demonstrated(monkeypatch, cfg, world=(0, 1), text="abcdefg"):
    """The loss of a warm start's first step, the model, the arguments of its fit, and what was demonstrated."""
    shown, got, model = [], [], tiny_model()

    def demonstration(problem, source):
        shown.append((problem.prompt, text[:source.randrange(1, len(text) + 1)] if len(text) < 8 else text))
        return shown[-1][1]

    def fit(name, module, losses, *settings):
        terms = [*losses(0)]
        got.append((sum(terms), len(terms), (name, module, *settings)))
    monkeypatch.setattr(warm_start, "supervised_fit", fit)
    monkeypatch.setattr(dist, "rank", lambda: world[0])
    monkeypatch.setattr(dist, "ranks", lambda: world[1])
    monkeypatch.setattr(warm_start, "new_note", lambda *_: "the note")
    problems = [SimpleNamespace(prompt="1234567890"[:n]) for n in (1, 2, 5, 9)]
    warm_start.warm_start(model, toy(demonstration=demonstration), problems, cfg, byte_encoding())
    return *got[0], model, shown


def slow_loss(model, shown):
    """The mean of -log p of the demonstrations' tokens, ends too, row by row in float64."""
    model, terms = copy.deepcopy(model).double(), []
    for prompt, text in shown:
        ids = [*prompt.encode(), *text.encode(), 256]
        logits = model(torch.tensor([ids]))[0] @ model.embed_tokens.weight.T
        for t in range(len(prompt), len(ids)):
            terms.append(logits[t - 1].logsumexp(0) - logits[t - 1, ids[t]])
    return torch.stack(terms).mean().item()


def test_the_loss_of_a_warm_start_is_that_of_the_demonstrations_tokens(tmp_path, monkeypatch):
    cfg = dataclasses.replace(CFG, out=str(tmp_path))
    loss, terms, given, model, shown = demonstrated(monkeypatch, cfg)
    assert len(shown) == 48 and len({len(text) for _, text in shown}) > 2 and terms > 1
    assert loss.item() == pytest.approx(slow_loss(model, shown), rel=1e-5)
    assert given == ("warm start", model, 3, cfg.warm_lr)


def test_a_demonstration_may_be_as_long_as_a_completion(tmp_path, monkeypatch):
    """Its end counts."""
    cfg = dataclasses.replace(CFG, out=str(tmp_path), max_new=9)
    demonstrated(monkeypatch, cfg, text="abcdefgh")
    with pytest.raises(UserError) as e:
        demonstrated(monkeypatch, cfg, text="abcdefghi")
    assert str(e.value) == "a demonstration has 10 tokens, --max_new is 9"


def test_a_kept_warm_start_depends_on_the_weights_that_init_names(tmp_path):
    """On no other file of the folder; without --init, on no file of the folder one happens to be in."""
    (tmp_path / "model").mkdir()
    cfg = dataclasses.replace(CFG, out=str(tmp_path / "out"), init=str(tmp_path / "model"))
    kept(cfg)
    (tmp_path / "model" / "metrics.jsonl").write_text("x")
    assert why(cfg) is None
    (tmp_path / "model" / "model.safetensors").write_text("x")
    assert why(cfg) == OTHER_WORDS


# A setting of which a kept warm start depends, and another value of it.
COUNTS = dict(task="sums", task_args={"difficulty": 1}, init="x", chat="none", system="x", seed=9, max_new=99,
              n_layer=9, n_embd=9, warm_steps=9, warm_lr=9.0)


@pytest.mark.parametrize("name", COUNTS)
def test_a_warm_start_depends_on_each_of_these_settings(name, tmp_path):
    cfg = dataclasses.replace(CFG, out=str(tmp_path))
    note = json.loads(kept(cfg).joinpath("warm_start.json").read_text())
    other = changed({name: COUNTS[name]})
    assert warm_start.changed(cfg, note) is None
    was, now = (None, 1) if name == "task_args" else (getattr(cfg, name), COUNTS[name])
    assert warm_start.changed(other, note) == f"--{name if name != 'task_args' else 'difficulty'} was {was}, and is {now}"


# Those of RL, evaluation, logs and the machine, by which a start is not made anew.
OTHERS = """algo out steps max_turns iterations eval_every held_out samples save_every prompts group temperature reward supervision
            baseline adv_scale lam critic ratio clip_low clip_high kl estimator beta loss_mean
            epochs minibatches lr half_life device dtype compile shard cache recompute
            micro_tokens""".split()


@pytest.mark.parametrize("name", OTHERS)
def test_a_warm_start_does_not_depend_on_each_of_these(name):
    note = {"settings": dataclasses.asdict(CFG)}
    assert warm_start.changed(changed({name: "another"}), note) is None and name not in COUNTS
    assert warm_start.changed(CFG, {"settings": note["settings"] | {name: "another"}}) is None


def changed(changes):
    """CFG with changes that are not checked."""
    made = dataclasses.replace(CFG)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


def forked(tmp_path, after, line):
    """grpo.py with a line after the one that begins like that."""
    text = Path(grpo.__file__).read_text()
    before = next(x for x in text.splitlines(keepends=True) if x.startswith(after))
    (tmp_path / "forked.py").write_text(text.replace(before, before + line))
    spec = importlib.util.spec_from_file_location("forked", tmp_path / "forked.py")
    module = sys.modules["forked"] = importlib.util.module_from_spec(spec)      # inspect.getsource looks there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_forks_setting_keeps_the_shipped_start_unless_it_is_listed(tmp_path, capsys, monkeypatch):
    """As one of the model's must be. A start that is not taken says why, in a line."""
    fork = forked(tmp_path, "    temperature: float", "    top_k: int = 0     # sampled from the k most likely tokens\n")
    assert fork.make_config().init == fork.make_config(top_k=50).init == str(warm_start.SHIPPED)
    fork = forked(tmp_path, "    n_embd: int", "    n_wide: int = 1    # width of something new in the model\n")
    assert fork.make_config(n_wide=3).init == str(warm_start.SHIPPED)
    monkeypatch.setattr(warm_start, "DEPENDS_ON", [*warm_start.DEPENDS_ON, "n_wide"])
    same, other = fork.make_config(), fork.make_config(n_wide=3)
    assert same.init == str(warm_start.SHIPPED) and (other.init, other.warm_steps) == ("", 1500)
    for cfg, says in ((same, ""), (other, f"note: {warm_start.SHIPPED} is not used: --n_wide was 1, and is 3\n"),
                      (fork.make_config(n_layer=3), f"note: {warm_start.SHIPPED} is not used: --n_layer was 2, and is 3\n"),
                      (fork.make_config(warm_steps=1500), ""), (fork.make_config(task="sums", warm_steps=5), ""),
                      (fork.make_config(init="x", warm_steps=5), "")):
        assert warm_start.checked(cfg, arithmetic, arithmetic.problems(**cfg.task_args)[0]) is cfg
        assert capsys.readouterr().out == says


@dataclasses.dataclass(frozen=True)
class Forked(Config):
    """A setting without a comment."""
    n_mlp: int = 4


def test_a_forks_new_setting_counts_once_it_is_listed(monkeypatch):
    """A fork adds `n_mlp` to Config; a warm start with another value of it is not taken up."""
    monkeypatch.setattr(warm_start, "DEPENDS_ON", [*warm_start.DEPENDS_ON, "n_mlp"])
    four, eight = (Forked(**dataclasses.asdict(CFG), n_mlp=n) for n in (4, 8))
    after = {"settings": warm_start.settings(eight)}
    before = {"settings": {n: x for n, x in after["settings"].items() if n != "n_mlp"}}
    assert warm_start.changed(four, before) is None
    assert warm_start.changed(eight, before) == "--n_mlp was 4, and is 8"
    assert warm_start.changed(four, after) == "--n_mlp was 8, and is 4"


@pytest.mark.slow
def test_a_warm_start_frames_its_prompts_and_teaches_the_end_of_a_turn(tmp_path, monkeypatch):
    """What a checkpoint with a chat template learns from is what it will be asked, up to the token
    that ends its turn."""
    chat_folder(tmp_path / "chat")
    seen, real = [], passes.token_logps

    def token_logps(model, ids, mask, *given):
        """The real one."""
        seen.append((ids, mask))
        return real(model, ids, mask, *given)
    monkeypatch.setattr(passes, "token_logps", token_logps)
    encoding = tokenizer.load_encoding(tmp_path / "chat")
    grpo.main(["--init", str(tmp_path / "chat"), *"--difficulty 1 --warm_steps 1 --steps 0 --held_out 2 "
               "--max_new 40 --prompts 2 --group 2".split(), "--out", str(tmp_path / "run")])
    rows = [(ids[:n], on[:n]) for ids, mask in seen for ids, on in zip(ids, mask)
            for n in [int(on.nonzero()[-1]) + 1]]
    prompts = {tuple(encoding.encode_prompt(p.prompt)) for p in arithmetic.problems(1)[0]}
    assert len(rows) == 48
    assert {256, encoding.end} <= encoding.stop and encoding.frame.after
    assert encoding.end == encoding.special["<|im_end|>"] != 256
    for ids, on in rows:
        assert tuple(ids[~on].tolist()) in prompts and ids[-1] == encoding.end
        assert encoding.end not in ids[on].tolist()[:-1]


@pytest.mark.parametrize("steps, seconds, told", [
    (3, 1, [1, 2, 3]), (25, 1, range(2, 26, 2)), (200, 0.1, range(20, 201, 20)), (200, 7, range(2, 201, 2))])
def test_a_fit_tells_some_ten_times_how_far_it_is(steps, seconds, told, monkeypatch, capsys):
    """And when it was silent for 10 seconds. The loss is of that step."""
    module, now = torch.nn.Linear(1, 1, bias=False), []
    monkeypatch.setattr(show, "time", SimpleNamespace(time=lambda: 1000.0 + seconds * len(now)))

    def losses(step):
        """Two terms, together the step's number."""
        now.append(step)
        for part in (0.25, 0.75):
            yield part * step + 0 * module.weight.sum()
    warm_start.supervised_fit("a fit", module, losses, steps, 0.1)
    assert capsys.readouterr().out.splitlines() == [
        f"a fit {n}/{steps}  loss {n - 1:.3f}  left {show.clock(seconds * (steps - n))}" for n in told]
