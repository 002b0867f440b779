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
from run import checkpoint, config, dist, passes, pretrained, report, setup

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
    setup.check_run(dataclasses.replace(CFG, **changes), task or toy(), PROBLEMS)


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
        setup.problems_of(CFG, toy(problems=lambda: (PROBLEMS, [])))


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
    for n, found in ((0, HELD_OUT), (7, HELD_OUT[:7])):
        agent = SimpleNamespace(cfg=dataclasses.replace(CFG, held_out=n), task=toy(), encoding=byte_encoding(), policy=tiny_model())
        assert setup.held_out(agent) == found


@pytest.mark.parametrize("step, stats, steps, iterations, at_its_end", [
    (6, {}, 3, 2, True), (6, {}, 6, 1, True), (5, {}, 3, 2, False), (3, {}, 3, 2, False), (6, {}, 12, 2, False)])
def test_a_run_at_its_end_says_so(step, stats, steps, iterations, at_its_end, monkeypatch, capsys, tmp_path):
    """And goes on, with the model of its checkpoint, which needs no warm start; the longest prompt has 3 tokens."""
    cfg, calls = dataclasses.replace(CFG, steps=steps, iterations=iterations, out=str(tmp_path)), []
    saved = SimpleNamespace(step=step, stats=stats, model={"a": "config"})
    monkeypatch.setattr(checkpoint, "open_run", lambda *given: calls.append("open"))
    monkeypatch.setattr(report, "header", lambda *given: None)
    monkeypatch.setattr(pretrained, "micro_tokens", lambda policy, cfg, longest: print(policy, longest) or cfg.micro_tokens)
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
    with pytest.raises(UserError, match="no model in"):
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
    monkeypatch.setattr(pretrained, "free_memory", lambda device: whole)
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
    model, cold = setup.starting_model(cfg, toy(), PROBLEMS, 5, encoding)
    assert capsys.readouterr().out.splitlines() == [f"starting from {saved}"] + [
        f"its weights are {told}; they are trained, and saved, in float32"] * bool(told)
    assert not cold and model.embed_tokens.weight.dtype == torch.float32


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
    monkeypatch.setattr(passes, "supervised_fit", fit)
    monkeypatch.setattr(dist, "rank", lambda: world[0])
    monkeypatch.setattr(dist, "ranks", lambda: world[1])
    monkeypatch.setattr(setup, "loss_on", lambda *_: 0.5)
    problems = [SimpleNamespace(prompt="1234567890"[:n]) for n in (1, 2, 5, 9)]
    setup.warm_start(model, toy(demonstration=demonstration), problems, cfg, byte_encoding())
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


@pytest.mark.slow
def test_a_warm_start_frames_its_prompts_and_teaches_the_end_of_a_turn(tmp_path, monkeypatch):
    """What a checkpoint with a chat template learns from is what it will be asked, up to the token
    that ends its turn."""
    chat_folder(tmp_path / "chat")
    seen, real = [], passes.token_logps

    def token_logps(model, ids, mask, temperature):
        """The real one."""
        seen.append((ids, mask))
        return real(model, ids, mask, temperature)
    monkeypatch.setattr(passes, "token_logps", token_logps)
    encoding = tokenizer.load_encoding(tmp_path / "chat")
    grpo.main(["--init", str(tmp_path / "chat"), *"--difficulty 1 --warm_steps 1 --steps 0 --held_out 2 "
               "--max_new 40 --prompts 2 --group 2".split(), "--out", str(tmp_path / "run")])
    rows = [(ids[:n], on[:n]) for ids, mask in seen for ids, on in zip(ids, mask)
            for n in [int(on.nonzero()[-1]) + 1]]
    prompts = {tuple(encoding.encode_prompt(p.prompt)) for p in arithmetic.problems(1)[0]}
    rows = rows[:4]                 # later ones are of its note
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
    monkeypatch.setattr(dist, "time", SimpleNamespace(time=lambda: 1000.0 + seconds * len(now)))

    def losses(step):
        """Two terms, together the step's number."""
        now.append(step)
        for part in (0.25, 0.75):
            yield part * step + 0 * module.weight.sum()
    passes.supervised_fit("a fit", module, losses, steps, 0.1)
    assert capsys.readouterr().out.splitlines() == [
        f"a fit {n}/{steps}  loss {n - 1:.3f}  left {dist.clock(seconds * (steps - n))}" for n in told]
