"""Episodes of several turns: what the environment says is read, and is nobody's credit."""
import contextlib
import dataclasses
import io
import random
from types import SimpleNamespace

import pretend
import pytest
import torch
from conftest import flags, records, tiny_model
from test_caches import FAMILIES, assert_same

import grpo
import reward
from data import UserError, guess, load_task, turns
from data.tokenizer import byte_encoding, decode, pieces, step_tokens
from grpo import Agent, Batch, Config, advantages, main, make_config, sample
from model import token_logps
from run import caches, passes, preflight, report, show, warm_start
from run.caches import draw

PROMPTS = [[49, 50, 61], [51], [52, 53, 54, 55, 61, 10]]
STOP = set(range(0, 257, 9))        # many: turns end all the time
ROOM = [40, 25, 33]


def uniform(rows, n, seed=0):
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def environment(row, ids, left):
    """Decides by what was said: nothing, cuts off, or some tokens, of which some are stop tokens."""
    size = (7 * sum(ids) + row) % 11
    if size in (0, 9):
        return [], True
    if size == 10 or size >= left:
        return [], False
    return [(7 * sum(ids) + 9 * j) % 257 if j % 2 else 9 * j for j in range(size)], False


def sampled(model, group=8, reply=environment, u=None, prompts=PROMPTS, room=ROOM, temperature=0.7):
    u = uniform(len(prompts) * group, max(room)) if u is None else u
    return sample(model, prompts, group, room, temperature, STOP, u, reply)


def by_hand(model, row, prompt, room, u, temperature=0.7):
    """A row, token by token with whole passes: ids, who said each, and whether it finished."""
    ids, own, calls = [*prompt], [False] * len(prompt), 0
    while len(ids) - len(prompt) < room:
        logits = model.head(model(torch.tensor([ids])))[0, -1]
        p = (logits / temperature).softmax(-1)[None]
        ids.append(draw(p, u[len(ids) - len(prompt)][None].float())[0].item())
        own.append(True)
        if ids[-1] in STOP:
            calls += 1
            said, over = environment(row, ids, room - len(ids) + len(prompt))
            if not said:
                return ids, own, over, calls
            ids += said
            own += [False] * len(said)
    return ids, own, False, calls


# -------------------------------------------------------------------------------------- sampling

@pytest.mark.slow
@pytest.mark.parametrize("cache", caches.CACHES)
@torch.no_grad()
def test_a_row_is_what_whole_passes_make_of_it(cache):
    """Whatever the cache, though rows end, are cut off by their own limit or by a reply that does not fit, and go on."""
    model = tiny_model(block_size=64).double()
    model.kv_cache = cache
    u = uniform(24, 40)
    b, states = sampled(model, u=u), {"finished": 0, "limit": 0, "refused": 0, "turns": 0, "stops heard": 0}
    for row in range(24):
        room = ROOM[row // 8]
        ids, own, finished, calls = by_hand(model, row, PROMPTS[row // 8], room, u[row])
        n = len(ids)
        assert b.ids[row, :n].tolist() == ids and b.mask[row].tolist() == own + [False] * (b.mask.size(1) - n)
        assert b.finished[row] == finished
        length = n - len(PROMPTS[row // 8])
        states["finished"] += finished
        states["limit"] += not finished and length == room
        states["refused"] += not finished and length < room
        states["turns"] += calls > 2
        states["stops heard"] += any(token in STOP and not said for token, said in zip(ids[6:], own[6:]))
    assert min(states.values()) > 1, states


@pytest.mark.parametrize("cache", caches.CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_agree_after_replies(family, cache):
    """In the plain pass, and in the one in which rows share what they have in common."""
    model = tiny_model(block_size=64, **FAMILIES[family])
    model.kv_cache = cache
    b = sampled(model)
    holes = b.mask.long().diff(dim=1).clamp(min=0).sum(1)               # runs of the policy's tokens
    assert (holes > 2).sum() > 2
    assert (b.logp[b.mask] < 0).all() and (b.logp[~b.mask] == 0).all()
    for form in (token_logps, passes.token_logps):
        logp, value = form(model, b.ids, b.mask, 0.7)
        torch.testing.assert_close(logp, b.logp, rtol=0, atol=5e-5)
        assert value is None


@pytest.mark.slow
def test_the_captured_graph_samples_the_same():
    want = sampled(tiny_model(block_size=64))
    with pretend.cuda():
        model = tiny_model(block_size=64).to("cuda")
        model.kv_cache = "static"
        b = sampled(model)
        assert any(step.graph for step in caches.MEMORY[model].steps.values())
    assert_same(b, want)


def test_a_row_does_not_depend_on_the_others_replies():
    """The numbers with which it is drawn are those of its own tokens."""
    model, u = tiny_model(block_size=64), uniform(24, 40)
    together = sampled(model, u=u)
    talks = together.mask.long().diff(dim=1).clamp(min=0).sum(1)
    row = talks[8:16].argmax().item() + 8               # of the second prompt, the one with the most turns
    assert talks[row] > 2
    silent = sampled(model, u=u, reply=lambda i, ids, left: environment(i, ids, left) if i == row
                     else ([], True))
    alone = sampled(model, 1, u=u[row:row + 1], prompts=PROMPTS[1:2], room=ROOM[1:2],
                    reply=lambda i, ids, left: environment(row, ids, left))
    for b, i in ((silent, row), (alone, 0)):
        n = together.mask[row].nonzero()[-1] + 1
        assert b.ids[i, :n].tolist() == together.ids[row, :n].tolist()
        assert b.mask[i, :n].tolist() == together.mask[row, :n].tolist()


def test_the_last_token_may_be_the_one_before_the_limit():
    """A reply that leaves one token fits, one that leaves none does not."""
    for size, fits in ((3, True), (4, False)):
        asked = []

        def reply(row, ids, left):
            asked.append(left)
            return [1] * size if size < left and len(asked) == 1 else [], False
        model = tiny_model()
        model.head = lambda h: torch.nn.functional.one_hot(torch.full((len(h),), 9), 257) * 100.0
        b = sample(model, [[1]], 1, [5], 1.0, STOP, None, reply)
        assert asked == [4, 0][:1 + fits]
        assert b.ids[0].tolist() == ([1, 9, 1, 1, 1, 9] if fits else [1, 9]) and not b.finished[0]


# ------------------------------------------------------------------------------------- the credit

def rollout_with_holes():
    """A Batch of a toy rollout with everything that a step's credit and loss need."""
    b = sampled(tiny_model(block_size=64))
    source = torch.Generator().manual_seed(1)

    def numbers():
        return torch.randn(b.ids.shape, generator=source) * b.mask
    last = passes.last_tokens(b.mask)
    b.ends = last | b.mask & (torch.rand(b.mask.shape, generator=source) < 0.2)
    b.reward, b.value = numbers() * b.ends, numbers()
    b.old_logp, b.ref_logp = b.logp + 0.2 * numbers(), b.logp + 0.2 * numbers()
    return b


def without_holes(b, x):
    """What is at the policy's tokens, moved together to the left, (B, n)."""
    out = torch.zeros(len(x), int(b.mask.sum(1).max()), dtype=x.dtype)
    for row, values, on in zip(out, x, b.mask):
        row[:int(on.sum())] = values[on]
    return out


@pytest.mark.parametrize("settings", [
    {}, dict(baseline="value", adv_scale="batch", kl="reward"), dict(baseline="leave-one-out", adv_scale="none", kl="reward"),
    dict(baseline="group+value", adv_scale="none")])
def test_credit_crosses_what_the_environment_said(settings):
    """Advantages and returns are those of the policy's tokens alone, as if nothing stood between them."""
    b, cfg = rollout_with_holes(), Config(prompts=3, group=8, **settings)
    value = b.value if "value" in cfg.baseline else None
    penalty = 0.04 * (b.old_logp - b.ref_logp) if cfg.kl == "reward" else torch.zeros_like(b.logp)
    adv, returns, dead = advantages(b.reward, b.ends, b.mask, penalty, value, cfg)
    short = [None if x is None else without_holes(b, x) for x in (b.reward, b.ends, b.mask, penalty, value)]
    want, want_returns, want_dead = advantages(*short, cfg)
    torch.testing.assert_close(without_holes(b, adv), want)
    assert (adv[~b.mask] == 0).all() and adv[b.mask].any() and torch.equal(dead, want_dead)
    if value is not None:
        torch.testing.assert_close(without_holes(b, returns), want_returns)


@pytest.mark.parametrize("settings", [dict(loss_mean=mean, ratio=ratio, estimator=estimator) for mean, ratio, estimator in
                                      (("sequence", "token", "k3"), ("token", "sequence", "ratio*k3"), ("constant", "token", "k1"))])
def test_loss_and_statistics_are_of_the_policys_tokens(settings):
    """Weights, ratios, clips, KL, entropy and lengths: as if nothing stood between them."""
    b, cfg = rollout_with_holes(), Config(prompts=3, group=8, max_new=40, **settings)
    b.adv = torch.randn(b.ids.shape, generator=torch.Generator().manual_seed(2)) * b.mask
    n = b.mask.sum()
    logp = (b.logp + 0.3 * b.value).requires_grad_()

    def loss_of(b, logp):
        weight = grpo.token_weights(b.mask, cfg.loss_mean, 24, n, cfg.max_new)
        return grpo.policy_loss(logp, b, weight, n, cfg, 0.04)
    loss, stats = loss_of(b, logp)
    loss.backward()
    names = ("ids", "mask", "judged", "logp", "old_logp", "ref_logp", "adv", "reward")
    short = dataclasses.replace(b, **{name: without_holes(b, getattr(b, name)) for name in names})
    short_logp = without_holes(b, logp.detach()).requires_grad_()
    want, want_stats = loss_of(short, short_logp)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(dict(stats), dict(want_stats))
    torch.testing.assert_close(without_holes(b, logp.grad), short_logp.grad)
    assert (logp.grad[~b.mask] == 0).all() and 0 < stats["clip_share"] < 1
    for batch in (b, short):
        batch.components, batch.texts, batch.value = {"correct": torch.ones(24)}, [["a"]] * 24, None
    dead = torch.zeros(3, dtype=torch.bool)
    assert report.statistics(b, dead) == pytest.approx(report.statistics(short, dead))


# ------------------------------------------------------------------------------------ the episodes

ENCODING = byte_encoding()
# Replies depend on all that was said; `!` is heard now and then, the word that earns the reward.
ECHO = '''
from types import SimpleNamespace as Problem
DEFAULTS = dict(steps=2, prompts=4, group=4, max_new=24, max_turns=4)
def problems():
    words = [(c * (n % 3) + "abcdefgh"[n])[:3] + "=" for c in "abcdef" for n in range(8)]
    return [Problem(prompt=word) for word in words[3:]], [Problem(prompt=word) for word in words[:3]]
def reply(problem, turns):
    n = sum(map(ord, problem.prompt + "/".join(turns)))
    if n % 5 == 0 or len(turns) > 6:
        return None if n % 2 else ""
    return "!?"[n % 2] * (1 + n % 3)
def demonstration(problem, rng):
    turns = []
    while True:
        turns.append("".join(rng.choices("abc!", k=rng.randint(0, 2))))
        said = reply(problem, turns)
        if not said:
            return turns
        turns.append(said)
def reward(problem, turns):
    said = "".join(turns[::2])
    return {"correct": float("a" in said), "style": 0.3 * said.count("!") - 0.05 * len(said)}
def steps(problem, turns):
    found, end = [], 0
    for i in range(0, len(turns), 2):
        for x in turns[i]:
            end += 1
            if x == "a":
                found.append((end, "b" not in turns[i]))
        if end and (not found or found[-1][0] < end):
            found.append((end, "b" not in turns[i]))
    return found
def answer(turns):
    return "".join(turns[::2])[:1]
'''
SMALL = dict(n_layer=1, n_embd=32, warm_steps=60, warm_lr=1e-2, lr=5e-3, samples=2, save_every=1, device="cpu")


@pytest.fixture
def echo(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


def quietly(argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(map(str, argv)))
    return out.getvalue()


def run(echo, name, **settings):
    out = echo.parent / name
    quietly(flags(SMALL | dict(task=echo, out=out) | settings))
    return out


def generated(task, model=None, group=8, **settings):
    """A rollout of a task, by a policy that says the letters of ECHO and often ends its turns."""
    model = model or tiny_model(block_size=64)
    head, said = model.head, torch.tensor([*b"abc!", 256])
    model.head = lambda h: head(h).index_add(-1, said, torch.full((*h.shape[:-1], 5), 90.0))
    cfg = Config(**dict(prompts=3, group=group, max_new=20, max_turns=4) | settings)
    agent = Agent(cfg, task, ENCODING, model)
    problems = task.problems()[0][:3]
    return agent, grpo.generate(agent, problems, group, random.Random(0))


def dialogue(batch, i):
    """The turns of a row, from its ids and mask alone: bytes, apart where the speaker changes, without stop tokens."""
    ids, own = batch.ids[i, batch.start[i]:].tolist(), batch.mask[i, batch.start[i]:].tolist()
    n = len(own) - own[::-1].index(True)
    spoken, before = [], None
    for token, who in zip(ids[:n], own[:n]):
        if who is not before:
            spoken.append([])
        before = who
        spoken[-1].append(token)
    return [decode(ENCODING, part) for part in spoken]


def test_a_task_sees_the_turns_and_the_environment_its_own(echo):
    """Each reply answers what was said up to it; the turns are those of the ids."""
    task = load_task(str(echo))
    _, b = generated(task)
    for i, (problem, said) in enumerate(zip(b.problems, b.texts)):
        assert said == dialogue(b, i)
        for k in range(1, len(said), 2):
            assert said[k] == task.reply(problem, said[:k])
        if b.finished[i]:
            assert not task.reply(problem, said)
    lengths = [len(said) for said in b.texts]
    assert {1, 3} <= {*lengths} and 0 < b.finished.sum() < 24 and "" in [said[-1] for said in b.texts]


def test_the_environments_words_earn_nothing(echo):
    """A task that rewards a word, and says it itself in most episodes."""
    task = load_task(str(echo))
    agent, b = generated(task)
    heard = [sum(said.count("!") for said in turns[1::2]) for turns in b.texts]
    want = [0.3 * sum(x.count("!") for x in said[::2]) - 0.05 * sum(map(len, said[::2])) for said in b.texts]
    assert sum(n > 0 for n in heard) > 5
    assert b.components["style"].tolist() == pytest.approx([x * end for x, end in zip(want, b.finished.tolist())])


def test_a_step_ends_at_a_token_of_the_policys(echo):
    """Of one that ends with its turn, the turn's stop token; the last step at the last token."""
    task = load_task(str(echo))
    agent, b = generated(task)
    r, ends = reward.of_steps(task, ENCODING, b)
    assert b.mask[ends].all() and ends.sum() > 40 and 0 < r[ends].sum() < ends.sum()
    for i, said in enumerate(b.texts):
        own = b.ids[i][b.mask[i]].tolist()
        text, places = decode(ENCODING, own), ends[i][b.mask[i]].nonzero()[:, 0].tolist()
        assert text == turns.spoken(said)
        told = [len(decode(ENCODING, own[:t + 1])) for t in places[:-1]]
        assert places[-1] == len(own) - 1
        assert {*told} == {end for end, _ in task.steps(b.problems[i], said)[:-1]}
        inner = [t for t in places[:-1] if own[t] != 256]               # the step goes on to no turn's end
        assert all(own[t] == 97 and own[t + 1] != 256 for t in inner)


def test_the_last_stop_token_is_the_last_steps_alone():
    """Of a step that ends with the text, but is not the last, it is no part."""
    assert step_tokens(ENCODING, [97, 256], [1]) == [0]
    assert step_tokens(ENCODING, [97, 256, 98, 256], [1, 2]) == [1, 2]


def test_half_a_character_at_the_end_of_a_turn_stays_there():
    """Its other half, in the next turn, is another broken one: a text and its tokens have the same length."""
    euro = "€".encode()
    ids = [97, *euro[:2], 256, euro[2], 98, 256]
    episodes = turns.Episodes(lambda problem, said: "x" if len(said) == 1 else None, ENCODING, 8, [None], [0])
    assert episodes(0, ids[:4], 9) == ([120], False)
    assert episodes(0, [*ids[:4], 120, *ids[4:]], 9) == ([], True)
    assert episodes.turns == [["a\ufffd", "x", "\ufffdb"]]
    assert "".join(pieces(ENCODING, ids)) == "a\ufffd\ufffdb" == turns.spoken(episodes.turns[0])


@pytest.mark.parametrize("limit, finished", [(1, False), (2, False), (3, True)])
def test_max_turns_cuts_an_episode_off(limit, finished):
    """Unless it is over just then. What is cut off earns nothing, and its last turn is known."""
    def reply(problem, said):
        return "ok" if len(said) < 5 else None
    task = SimpleNamespace(reply=reply, reward=lambda problem, said: {"correct": 1.0})
    model = tiny_model()
    model.head = lambda h: torch.nn.functional.one_hot(torch.full((len(h),), 256), 257) * 100.0
    agent = Agent(Config(prompts=1, group=2, max_new=20, max_turns=limit), task, ENCODING, model)
    b = grpo.generate(agent, [SimpleNamespace(prompt="?")], 2)
    assert b.finished.tolist() == [finished] * 2 and b.components["correct"].tolist() == [finished] * 2
    assert b.texts == [["", "ok"] * (limit - 1) + [""]] * 2


@pytest.mark.parametrize("end, text", [(256, "a"), (33, "a!")])
def test_an_episode_cut_off_within_a_turn_has_what_was_said_of_it(end, text):
    """Once, also if what ends a turn is text, such as a tag: it belongs to the turn that it ends."""
    encoding = byte_encoding()
    encoding.stop |= {33}
    task = SimpleNamespace(reply=lambda problem, said: "ok", reward=lambda problem, said: {"correct": 1.0})
    model = tiny_model()
    script = iter([97, end, 0, 0, 98, 99])
    model.head = lambda h: torch.nn.functional.one_hot(torch.tensor([next(script)]), 257) * 100.0
    agent = Agent(Config(prompts=1, group=2, max_new=6), task, encoding, model)
    b = grpo.generate(agent, [SimpleNamespace(prompt="?")], 1)
    assert b.texts == [[text, "ok", "bc"]] and not b.finished[0] and b.ids[0].tolist() == [*b"?a", end, *b"okbc"]


def test_numbers_of_tokens_are_the_policys():
    """`rewards`, which judges all at once, is given them."""
    seen = []

    def rewards(problems, said, tokens):
        seen.append((said, tokens))
        return [{"correct": 1.0}] * len(said)
    task = SimpleNamespace(reply=lambda problem, said: "a long reply" if len(said) == 1 else None, rewards=rewards)
    model = tiny_model(block_size=64)
    model.head = lambda h: torch.nn.functional.one_hot(torch.full((len(h),), 256), 257) * 100.0
    grpo.generate(Agent(Config(max_new=40), task, ENCODING, model), [SimpleNamespace(prompt="?")], 1)
    assert seen == [([["", "a long reply", ""]], [2])]


# ----------------------------------------------------------------------- what a reply may not be

def failing(problem, said):
    raise ValueError("no such number")


@pytest.mark.parametrize("reply, why", [
    (failing, r"test_turns.py, line \d+: the reply to the prompt '\?' fails: ValueError: no such number$"),
    (lambda problem, said: 7, r"the reply to the prompt '\?' must be a string or None, not 7"),
    (lambda problem, said: ["a"], r"must be a string or None, not \['a'\]")])
def test_a_reply_that_is_none_is_told_in_a_line(reply, why):
    episodes = turns.Episodes(reply, ENCODING, 8, [SimpleNamespace(prompt="?")], [0])
    with pytest.raises(UserError, match=why):
        episodes(0, [97, 256], 100)


def test_a_reply_of_a_megabyte_ends_the_episode_and_takes_no_time(monkeypatch):
    episodes = turns.Episodes(lambda problem, said: "x" * 10 ** 6, ENCODING, 8, [None], [0])
    monkeypatch.setattr(type(ENCODING), "encode_reply", lambda *given: pytest.fail("tokenized"))
    assert episodes(0, [97, 256], 10 ** 9) == ([], False) and episodes.turns == [["a"]]


def test_a_task_cannot_change_the_record_of_what_was_said():
    def reply(problem, said):
        said[:] = ["changed"]
        return "ok"
    episodes = turns.Episodes(reply, ENCODING, 8, [None], [0])
    episodes(0, [97, 256], 100)
    assert episodes.turns == [["a", "ok"]]


# ------------------------------------------------------------------------------------- warm start

def test_the_warm_start_imitates_the_policys_turns():
    problem = guess.Problem("10-20:", 13)
    task = SimpleNamespace(reply=guess.reply, demonstration=lambda problem, rng: ["15", "-", "13"])
    row = warm_start.row(problem, task, ENCODING, random.Random(0))
    assert row == ([*b"10-20:"], [*b"15", 256], [*b"-"], [*b"13", 256])
    ids, mask = warm_start.padded([row, ([1], [2])])
    assert ids[0].tolist() == [*b"10-20:15", 256, *b"-13", 256] and ids[1].tolist() == [1, 2] + [0] * 11
    assert mask[0].tolist() == [False] * 6 + [True] * 3 + [False] + [True] * 3
    assert mask[1].tolist() == [False, True] + [False] * 11


@pytest.mark.parametrize("shown, why", [
    ("15", "must be a list of turns that begins and ends with one of the policy's, not '15'"),
    (["15", "-"], "must be a list of turns"), ([], "must be a list of turns"), ([15], "must be a list of turns"),
    (["15", "+", "13"], r"has the reply '\+' where the task says '-'")])
def test_a_demonstration_that_is_no_episode_is_told_before_the_warm_start(shown, why, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(guess, "problems", lambda: ([guess.Problem("10-20:", 13)] * 40,) * 2)
    monkeypatch.setattr(guess, "demonstration", lambda problem, rng: shown)
    with pytest.raises(UserError, match=why):
        grpo.train(make_config(task="guess", out=str(tmp_path / "out"), device="cpu"))
    assert not (tmp_path / "out" / "warm_start").exists()


def test_turns_in_a_demonstration_of_a_task_without_replies_are_told():
    task = SimpleNamespace(demonstration=lambda problem, rng: ["15"])
    with pytest.raises(UserError, match="must be a string, not"):
        turns.demonstration(task, guess.Problem("10-20:", 13), None)


def test_a_reply_is_tried_before_anything_large_is_made(tmp_path, monkeypatch):
    """Also without demonstrations."""
    monkeypatch.setattr(guess, "reply", lambda problem, said: 7)
    with pytest.raises(UserError, match="must be a string or None, not 7"):
        grpo.train(make_config(task="guess", out=str(tmp_path / "out"), warm_steps=0, device="cpu"))
    assert not (tmp_path / "out").exists()


def test_a_step_may_be_an_empty_first_turn():
    """It ends at its stop token."""
    task = SimpleNamespace(steps=lambda problem, said: [(0, False), (1, True)])
    ids = torch.tensor([[63, 256, 120, 98, 256]])
    mask = torch.tensor([[False, True, False, True, True]])
    b = Batch(ids, mask, torch.ones(1).bool(), torch.zeros(1, 5), torch.ones(1).long())
    b.problems, b.texts, b.components = [guess.Problem("?", 0)], [["", "x", "b"]], {"correct": torch.ones(1)}
    r, ends = reward.of_steps(task, ENCODING, b)
    assert ends[0].tolist() == [False, True, False, False, True] and r[0].tolist() == [0, 0, 0, 0, 1]
    task = SimpleNamespace(steps=task.steps, demonstration=lambda problem, rng: ["", "x", "b"], answer=lambda said: "",
                           reply=lambda problem, said: "x" * (len(said) == 1), reward=lambda problem, said: {"correct": 1.0})
    preflight.check_run(Config(supervision="process", prompts=1), task, b.problems)         # nor is it refused before the run


# ------------------------------------------------------------------------------------- whole runs

CLOCKS = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}


def log_of(out):
    lines = records(out / "metrics.jsonl")
    return [{name: x for name, x in line.items() if name not in CLOCKS} for line in lines]


def assert_equal_runs(one, other):
    assert log_of(one) == log_of(other)
    for name in ("samples.jsonl", "model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.slow
def test_a_run_killed_between_turns_and_resumed_is_the_same(echo, monkeypatch):
    """In the middle of an episode of its second iteration."""
    settings = dict(reward="rollouts", supervision="process", iterations=2, steps=1, warm_steps=20)
    monkeypatch.setattr(reward, "FIT_STEPS", 3)         # 12 problems are labelled
    real, calls = turns.checked_reply, []
    monkeypatch.setattr(turns, "checked_reply", lambda *given: calls.append(0) or real(*given))
    whole = run(echo, "whole", **settings)
    fatal = len(calls) - 60

    def dying(*given):
        calls.append(0)
        if len(calls) == fatal:
            raise Killed
        return real(*given)
    calls.clear()
    monkeypatch.setattr(turns, "checked_reply", dying)
    with pytest.raises(Killed):
        run(echo, "killed", **settings)
    assert 0 < len(log_of(echo.parent / "killed")) < len(log_of(whole)) + 1
    monkeypatch.setattr(turns, "checked_reply", real)
    quietly(["--resume", "--task", echo, "--out", echo.parent / "killed"])
    assert_equal_runs(echo.parent / "killed", whole)


def test_labels_by_rollouts_play_on_from_within_an_episode(echo):
    """From the prefix of a step: its turns are played again, the rest with the same environment."""
    task = load_task(str(echo))
    agent, b = generated(task, supervision="process", reward="rollouts")
    b.reward, b.ends = reward.of_steps(task, ENCODING, b)
    played = []

    def completions(agent, problems, tries, u, begun):
        found = grpo.completions(agent, problems, tries, u, begun)
        played.append((tries, begun, found))
        return found
    label = reward.rollout_labels(agent, completions, b, 8, 0)
    ends = (b.ends & ~passes.last_tokens(b.mask)).nonzero().tolist()
    (tries, begun, found), = played
    known = {n: 0 for n in range(4)}
    for k, (i, t) in enumerate(ends):
        (ids, own), start = begun[k], b.start[i]
        begin = start + len(ids)
        assert ids == b.ids[i, start:begin].tolist() and own == b.mask[i, start:begin].tolist()
        assert not b.mask[i, t + 1:begin].any() and b.mask[i, begin]
        for row in range(k * tries, (k + 1) * tries):
            said, first = found.texts[row], 2 * sum(a > z for a, z in zip(own, own[1:]))
            assert said[:first] == b.texts[i][:first] and found.judged[row].sum() <= 20
            assert turns.spoken(said).startswith(decode(ENCODING, b.ids[i, :t + 1][b.mask[i, :t + 1]].tolist()))
            assert all(said[j] == task.reply(b.problems[i], said[:j]) for j in range(1, len(said), 2))
            known[first // 2] += len(said) > first + 1
        right = [float("a" in turns.spoken(found.texts[row])) * bool(found.finished[row])
                 for row in range(k * tries, (k + 1) * tries)]
        assert label[i, t] == pytest.approx(sum(right) / tries)
    assert known[0] and known[1] and known[2]           # prefixes with replies before them, and further ones
    assert {(b.ids[i, t] == 256).item() for i, t in ends} == {True, False}         # a turn's end, or within one


def begun_amid(echo):
    """The agent, rows that begin amid episodes of several turns, and from which rows these are."""
    task = load_task(str(echo))
    agent, b = generated(task, supervision="process")
    rows, begun = [], []
    for row in range(0, 24, 8):
        i = max(range(row, row + 8), key=lambda i: len(b.texts[i]))
        own = b.mask[i, b.start[i]:].tolist()
        replied = own.index(False)
        n = replied + own[replied:].index(True) + 1         # a token of the second turn
        rows.append(i)
        begun.append((b.ids[i, b.start[i]:][:n].tolist(), own[:n]))
    problems = [b.problems[i] for i in rows]
    asked, reply = [], task.reply
    task.reply = lambda problem, said: asked.append((problem.prompt, said)) or reply(problem, said)
    found = grpo.completions(agent, problems, 6, uniform(18, 20), begun)
    return agent, b, rows, begun, asked, found


def test_episodes_go_on_from_a_given_beginning(echo):
    """The task is asked for its reply again, once for each row's group, before it hears what the
    policy adds; the turns are those of the ids, and only what was sampled is trained on."""
    agent, b, rows, begun, asked, found = begun_amid(echo)
    assert asked[:3] == [(b.problems[i].prompt, b.texts[i][:1]) for i in rows]
    whole = dataclasses.replace(found, mask=found.judged)
    for k in range(18):
        i, (ids, own) = rows[k // 6], begun[k // 6]
        start = int(found.start[k])
        n = start + len(ids)
        assert start == b.start[i] and found.ids[k, start:n].tolist() == ids
        assert found.judged[k, start:n].tolist() == own and not found.mask[k, :n].any()
        assert torch.equal(found.judged[k, n:], found.mask[k, n:]) and found.mask[k, n]
        said = found.texts[k]
        assert said[:2] == b.texts[i][:2] and said == dialogue(whole, k)
        for j in range(1, len(said), 2):
            assert said[j] == agent.task.reply(b.problems[i], said[:j])
    assert 5 in map(len, found.texts) and 0 < found.finished.sum() < 18
    logp, _ = token_logps(agent.policy, found.ids, found.mask, 1.0)
    torch.testing.assert_close(logp, found.logp, rtol=0, atol=5e-5)


def test_steps_of_a_given_beginning_are_rewarded_and_earn_no_credit(echo):
    """They end where they end in the row they are from; a token that was sampled has the scores of
    the steps from it on."""
    agent, b, rows, begun, _, found = begun_amid(echo)
    r, ends = reward.of_rule(agent, found)
    assert not (ends & ~found.judged).any() and (ends & ~found.mask).sum() > 5
    for k, text in enumerate(found.texts):
        own = found.ids[k][found.judged[k]].tolist()
        places = ends[k][found.judged[k]].nonzero()[:, 0].tolist()
        steps = agent.task.steps(found.problems[k], text)
        told = [len(decode(ENCODING, own[:t + 1])) for t in places[:-1]]
        assert {*told} == {end for end, _ in steps[:-1]} and places[-1] == len(own) - 1
    cfg = Config(prompts=3, group=6, supervision="process", kl="none")
    adv, _, _ = advantages(r, ends, found.mask, torch.zeros_like(r), None, cfg)
    score, _ = grpo.group_scores(r, ends, cfg)
    assert (adv[~found.mask] == 0).all() and score[ends & ~found.mask].any()
    want = torch.where(found.mask, score.flip(1).cumsum(1).flip(1), 0)
    torch.testing.assert_close(adv, want)


@pytest.mark.slow
def test_a_run_logs_turns_and_replies(echo):
    """samples.jsonl has the turns, and where among the policy's tokens a reply stood."""
    out = run(echo, "logged")
    lines = records(out / "samples.jsonl")
    several = 0
    for line in lines:
        for said, places, tokens, logp in zip(line["completions"], line["replies"], line["tokens"], line["logp"]):
            cuts = [0, *places, len(tokens)]
            assert ["".join(tokens[a:b]) for a, b in zip(cuts, cuts[1:])] == said[::2]
            assert len(places) == len(said) // 2 and len(tokens) == len(logp)
            several += len(said) > 3
    assert several > 2
    for line in log_of(out)[1:]:
        assert 1 < line["turns"] <= 4 and line["length"] < 20
    assert "replies" in (out / "report.html").read_text()


def test_the_terminal_shows_replies_apart(echo, capsys, monkeypatch):
    task = load_task(str(echo))
    agent, b = generated(task)
    replies = torch.tensor([float(len(said[1::2])) for said in b.texts])
    b.reward = torch.where(passes.last_tokens(b.mask), replies[:, None], 0)        # those with the most are shown
    b.adv = torch.where(b.mask, 0.5, 0)
    show.group(b, slice(0, 8), ENCODING)
    shown = capsys.readouterr().out.splitlines()
    want = {"".join(f"[{x}]" if k % 2 else x for k, x in enumerate(said)) for said in b.texts[:8]}
    assert len(shown) == 4 and all(any(f"{b.problems[0].prompt}{text}   reward" in line for text in want) for line in shown)
    assert any(line.count("[") > 1 for line in shown)


@pytest.mark.slow
def test_a_question_is_played_with_its_problem_or_with_the_person(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    quietly(flags(SMALL | dict(task="guess", out=out, steps=0, held_out=1, samples=1, warm_steps=20, warm_lr=3e-2)))
    capsys.readouterr()
    problem, asked = guess.problems()[1][0], []
    monkeypatch.setattr(guess, "reply", lambda problem, said: asked.append(problem) or ("zz" if len(said) == 1 else None))
    main(["--task", "guess", "--init", str(out), "--ask", problem.prompt])
    said = capsys.readouterr().out
    assert said.startswith(problem.prompt) and said.count("[zz]") == 1 and {p.prompt for p in asked} == {problem.prompt}
    monkeypatch.setattr("sys.stdin", io.StringIO("+\n\n"))
    main(["--task", "guess", "--init", str(out), "--ask", "11-12:"])            # too short for a problem
    shown = capsys.readouterr().out
    assert "[+]" in shown and shown.count("reply, or nothing to end: ") == 2


# ------------------------------------------------------------------------------- the guessing game

def test_halving_always_finds_the_number():
    """And guessing anywhere in what is left does not."""
    train, held_out = guess.problems()
    wins, games = 0, 0
    for problem in train[:400] + held_out:
        said = []
        while True:
            low, high = guess.left(problem, said)
            assert low <= problem.hidden <= high
            said.append(str((low + high) // 2))
            answer = guess.reply(problem, said)
            if answer is None:
                break
            said.append(answer)
        assert guess.reward(problem, said) == {"correct": 1.0}
        games += 1
        wins += guess.reward(problem, guess.demonstration(problem, random.Random(games)))["correct"]
    assert 0.4 < wins / games < 0.75


def test_held_out_intervals_are_not_trained_on():
    train, held_out = guess.problems()
    assert not {p.prompt for p in train} & {p.prompt for p in held_out} and len(held_out) == 500
    sizes = {b - a + 1 for a, b in map(guess.interval, train)}
    assert sizes == {*range(7, 64)} and all(a <= p.hidden <= b for p in train for a, b in [guess.interval(p)])
    assert guess.problems() == (train, held_out)
    ends = [end for problem in train + held_out for end in guess.interval(problem)]
    assert (min(ends), max(ends)) == (10, 99)


@pytest.mark.parametrize("said, correct, truths", [
    (["15", "-", "12", "+", "13"], 1.0, [True, True, True]),
    (["15", "-", "16", "-", "13"], 1.0, [True, False, True]),       # outside what is left
    (["15", "-", "9", "+", "12"], 0.0, [True, False, True]),
    (["15", "-", "13 "], 0.0, [True, False]), (["+"], 0.0, [False]), ([""], 0.0, [False]),
    (["13", "+", "99"], 0.0, None), (["\u0661\u0663"], 0.0, [False])])
def test_rewards_and_steps_of_guesses(said, correct, truths):
    problem = guess.Problem("10-20:", 13)
    assert guess.reward(problem, said) == {"correct": correct} and guess.answer(said) == said[-1]
    if truths is not None:
        found = guess.steps(problem, said)
        assert [truth for _, truth in found] == truths
        assert [end for end, _ in found] == [len("".join(said[:i + 1:2])) for i in range(0, len(said), 2)]


def test_a_game_ends_when_it_is_won_or_lost():
    problem = guess.Problem("10-16:", 13)                               # three guesses
    assert guess.reply(problem, ["13"]) is None and guess.reply(problem, ["12"]) == "+"
    assert guess.reply(problem, ["ten"]) is None and guess.reply(problem, ["20", "-", "1"]) == "+"
    assert guess.reply(problem, ["20", "-", "1", "+", "12"]) is None
