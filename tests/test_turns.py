"""Episodes of several turns: what the environment says is read, and is nobody's credit."""
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import LETTERS, agent_of, tiny_model
from test_caches import PROMPTS, STOP, uniform

import grpo
import reward
from data import UserError, guess, load_task, turns
from data.tokenizer import Encoding, byte_encoding, decode, pieces, step_tokens
from grpo import Agent, Config, advantages, sample
from model import token_logps
from run import caches, passes, report, setup

ROOM = [40, 25, 33]
ENCODING = byte_encoding()
QUESTION = SimpleNamespace(prompt="?")
U = uniform(24, 40)


def environment(row, ids, left):
    size = (7 * sum(ids) + row) % 11
    if size in (0, 9, 10) or size >= left:
        return [], size in (0, 9)
    return [(7 * sum(ids) + 9 * j) % 257 if j % 2 else 9 * j for j in range(size)], False


def sampled(model):
    return sample(model, PROMPTS, 8, ROOM, 0.7, STOP, U, environment)


def saying(*tokens):
    """A model that says these tokens, one after the other, the last one for ever."""
    model, script = tiny_model(), [*tokens]

    def head(h):
        token = script.pop(0) if len(script) > 1 else script[0]
        return torch.nn.functional.one_hot(torch.full((len(h),), token), 257) * 100.0
    model.head = head
    return model


def played(model, encoding=ENCODING, group=1, max_new=20, max_turns=8, **task):
    cfg = Config(prompts=1, group=group, max_new=max_new, max_turns=max_turns)
    return grpo.generate(Agent(cfg, SimpleNamespace(**task), encoding, model), [QUESTION], group)


# ---------- sampling

@pytest.mark.slow
@pytest.mark.parametrize("cache", caches.CACHES)
@torch.no_grad()
def test_a_row_is_what_whole_passes_make_of_it(cache):
    """Though others end, are cut off by their limit or by a reply that does not fit, and go on.
    Sampler and trainer agree."""
    model = tiny_model(block_size=64).double()
    model.kv_cache = cache
    b, seen = sampled(model), []
    p = (model.head(model(b.ids)) / 0.7).softmax(-1)
    for row, (ids, own) in enumerate(zip(b.ids.tolist(), b.mask.tolist())):
        start = t = len(PROMPTS[row // 8])
        stop, ends, heard = start + ROOM[row // 8], "limit", []
        assert ids[:t] == PROMPTS[row // 8] and not any(own[:t])
        while t < stop:
            token, _ = caches.draw(p[row, t - 1][None], U[row, t - start][None].float())
            assert own[t] and ids[t] == token
            t += 1
            if ids[t - 1] in STOP:
                said, over = environment(row, ids[:t], stop - t)
                if not said:
                    ends = "finished" if over else "refused"
                    break
                assert ids[t:t + len(said)] == said and not any(own[t:t + len(said)])
                t += len(said)
                heard.append("stop" if STOP & {*said} else "")
        assert not any(own[t:]) and b.finished[row] == (ends == "finished")
        seen += [ends, *heard, "turns" * (len(heard) > 1)]
    assert min(map(seen.count, ("finished", "limit", "refused", "turns", "stop"))) > 1, seen
    logp, value = token_logps(model, b.ids, b.mask, 0.7)
    torch.testing.assert_close(logp, b.logp, rtol=0, atol=1e-5)
    assert value is None


# ---------- the credit

@pytest.mark.parametrize("settings", [
    {}, dict(baseline="value", adv_scale="batch", kl="reward", loss_mean="token", estimator="k1"),
    dict(baseline="leave-one-out", adv_scale="none", kl="reward", ratio="sequence"),
    dict(baseline="group+value", adv_scale="none", loss_mean="constant", estimator="ratio*k3")])
def test_credit_crosses_what_the_environment_said(settings):
    """Advantages, loss and statistics are the same if the policy's tokens alone are left."""
    cfg = Config(prompts=3, group=8, max_new=40, **settings)
    b, source = sampled(tiny_model(block_size=64)), torch.Generator().manual_seed(1)

    def numbers():
        return torch.randn(b.ids.shape, generator=source) * b.mask

    def short(x, mask=b.mask):
        out = torch.zeros(len(x), int(mask.sum(1).max()), dtype=x.dtype)
        for row, values, on in zip(out, x, mask):
            row[:int(on.sum())] = values[on]
        return out
    b.ends = passes.last_tokens(b.mask) | b.mask & (numbers() > 0.8)
    b.reward, b.value = numbers() * b.ends, numbers() if "value" in cfg.baseline else None
    b.old_logp, b.ref_logp = b.logp + 0.2 * numbers(), b.logp + 0.2 * numbers()
    penalty = 0.04 * (b.old_logp - b.ref_logp) * (cfg.kl == "reward")
    given, groups = (b.reward, b.ends, b.mask, penalty, b.value), torch.arange(len(b.ids)) // 8
    adv, returns, dead = advantages(*given[:2], groups, *given[2:], cfg)
    less = [None if x is None else short(x) for x in given]
    want = advantages(*less[:2], groups, *less[2:], cfg)
    torch.testing.assert_close(short(adv), want[0])
    assert (adv[~b.mask] == 0).all() and adv[b.mask].any() and torch.equal(dead, want[2])
    assert b.value is None or torch.allclose(short(returns), want[1])
    b.adv, n = numbers(), b.mask.sum()
    names = ("ids", "mask", "judged", "logp", "old_logp", "ref_logp", "adv", "reward")
    other = dataclasses.replace(b, **{name: short(getattr(b, name)) for name in names})
    logp, found = b.logp + 0.3 * numbers(), []
    for batch, x in ((b, logp), (other, short(logp))):
        weight = grpo.token_weights(batch.mask, cfg.loss_mean, 24, n, cfg.max_new)
        loss, stats = grpo.policy_loss(x.requires_grad_(), batch, weight, n, cfg, 0.04)
        loss.backward()
        batch.components, batch.value, batch.texts = {"correct": torch.ones(24)}, None, [[]] * 24
        stats |= report.statistics(batch, torch.zeros(3, dtype=torch.bool))
        found.append([loss, short(x.grad, batch.mask), dict(stats)])
    assert (logp.grad[~b.mask] == 0).all() and 0 < stats["clip_share"] < 1
    torch.testing.assert_close(*found, check_device=False)


# ---------- episodes

# Replies depend on all that was said; `!` is heard now and then, the word that earns the reward.
ECHO = LETTERS + '''
DEFAULTS = dict(steps=2, prompts=4, group=4, max_new=24, max_turns=4)
def reply(problem, turns):
    n = sum(map(ord, problem.prompt + "/".join(turns)))
    if n % 5 == 0 or len(turns) > 6:
        return None if n % 2 else ""
    return "!?"[n % 2] * (1 + n % 3)
def demonstration(problem, rng):
    turns = []
    while not turns or turns[-1]:
        turns.append("".join(rng.choices("abc!", k=rng.randint(0, 2))))
        turns.append(reply(problem, turns))
    return turns[:-1]
def reward(problem, turns):
    said = "".join(turns[::2])
    return {"correct": float("a" in said), "style": 0.3 * said.count("!") - 0.05 * len(said)}
def steps(problem, turns):
    found, end = [], 0
    for turn in filter(None, turns[::2]):
        ends = [end + i for i, x in enumerate(turn, 1) if x == "a"]
        end += len(turn)
        found += [(x, "b" not in turn) for x in dict.fromkeys([*ends, end])]
    return found
def answer(turns):
    return "".join(turns[::2])[:1]
'''


@pytest.fixture
def echo(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


def generated(echo, **settings):
    """The agent and a rollout, in which the policy says the letters of ECHO."""
    task, model = load_task(str(echo)), tiny_model(block_size=64)
    head, said = model.head, torch.tensor([*b"abc!", 256])
    model.head = lambda h: head(h).index_add(-1, said, torch.full((*h.shape[:-1], 5), 90.0))
    cfg = Config(prompts=3, group=8, max_new=20, max_turns=4, **settings)
    agent = Agent(cfg, task, ENCODING, model)
    return agent, grpo.generate(agent, task.problems()[0][:3], 8, random.Random(0))


def assert_played(agent, batch):
    """The turns are those of the ids, and each reply answers what was said up to it."""
    for i, (problem, said) in enumerate(zip(batch.problems, batch.texts)):
        ids, own = (x[i, batch.start[i]:].tolist() for x in (batch.ids, batch.judged))
        spoken = []
        for t in range(len(own) - own[::-1].index(True)):
            if t == 0 or own[t] is not own[t - 1]:
                spoken.append([])
            spoken[-1].append(ids[t])
        assert said == [decode(ENCODING, part) for part in spoken]
        for k in range(1, len(said), 2):
            assert said[k] == agent.task.reply(problem, said[:k])
        assert not batch.finished[i] or not agent.task.reply(problem, said)


def assert_steps_end(agent, batch, ends):
    """Steps end where the task says; the last one at the last token."""
    for i, said in enumerate(batch.texts):
        own = batch.ids[i][batch.judged[i]].tolist()
        places = ends[i][batch.judged[i]].nonzero()[:, 0].tolist()
        assert decode(ENCODING, own) == turns.spoken(said) and places[-1] == len(own) - 1
        told = {len(decode(ENCODING, own[:t + 1])) for t in places[:-1]}
        assert told == {end for end, _ in agent.task.steps(batch.problems[i], said)[:-1]}
        inner = [t for t in places[:-1] if own[t] != 256]       # else it is a turn's end
        assert all(own[t] == 97 and own[t + 1] != 256 for t in inner)


def test_the_environments_words_earn_nothing(echo):
    """A task sees the turns. A step that ends with its turn ends at the turn's stop token."""
    agent, b = generated(echo)
    assert_played(agent, b)
    own = ["".join(said[::2]) for said in b.texts]
    style = [(0.3 * x.count("!") - 0.05 * len(x)) * end for x, end in zip(own, b.finished.tolist())]
    assert b.components["style"].tolist() == pytest.approx(style)
    assert 0 < b.finished.sum() < 24 and sum("!" in "".join(said[1::2]) for said in b.texts) > 5
    grpo.make_config(algo="tree")
    tree = grpo.collect(agent, agent.task.problems()[0][:3], random.Random(0))
    assert_played(agent, tree)
    heard = tree.ids == ord("?")            # which only the environment says
    assert heard.any() and not tree.judged[heard].any()
    r, ends = reward.of_steps(agent.task, ENCODING, b)
    assert b.mask[ends].all() and ends.sum() > 40 and 0 < r[ends].sum() < ends.sum()
    assert_steps_end(agent, b, ends)
    assert step_tokens(ENCODING, [97, 256], [1]) == [0]
    assert step_tokens(ENCODING, [97, 256, 98, 256], [1, 2]) == [1, 2]
    # What ends with a turn's stop token does not go on to that of the next, empty turn.
    assert step_tokens(ENCODING, [0xc3, 256, 256, 98, 256], [1, 2]) == [1, 3]


def test_half_a_character_at_the_end_of_a_turn_stays_there():
    ids = [97, 226, 130, 256, 172, 98, 256]
    replies = iter("x")
    episodes = turns.Episodes(lambda *given: next(replies, None), ENCODING, 8, [GAME], [0])
    assert episodes(0, ids[:4], 9) == ([120], False)
    assert episodes(0, [*ids[:4], 120, *ids[4:]], 9) == ([], True)
    assert episodes.turns == [["a\ufffd", "x", "\ufffdb"]]
    assert "".join(pieces(ENCODING, ids)) == "a\ufffd\ufffdb"


@pytest.mark.parametrize("limit, finished", [(1, False), (2, False), (3, True)])
def test_max_turns_cuts_an_episode_off(limit, finished):
    b = played(saying(256), group=2, max_turns=limit, reward=lambda *given: {"correct": 1.0},
               reply=lambda problem, said: "ok" if len(said) < 5 else None)
    assert b.finished.tolist() == b.components["correct"].tolist() == [finished] * 2
    assert b.texts == [["", "ok"] * (limit - 1) + [""]] * 2


@pytest.mark.parametrize("end, text", [(256, "a"), (33, "a!")])
def test_an_episode_cut_off_within_a_turn_has_what_was_said_of_it(end, text):
    """Once, also if what ends a turn is text. The policy's tokens are counted."""
    letters, seen = {bytes([i]): i for i in range(256)}, []
    encoding = Encoding("bytes", r"[\s\S]", letters, {"<end>": 256}, [256, 33], {})
    b = played(saying(97, end, 0, 0, 98, 99), encoding, max_new=6, reply=lambda *given: "ok",
               rewards=lambda problems, *said: seen.append(said) or [{"correct": 1.0}])
    assert seen == [([[text, "ok", "bc"]], [4], [False])] and not b.finished[0]
    assert b.ids[0].tolist() == [*b"?a", end, *b"okbc"]


@pytest.mark.parametrize("said, left, found", [
    ("abc", 4, ([*b"abc"], False)), ("abc", 3, ([], False)), (None, 9, ([], True)),
    ("", 9, ([], True)), ("x" * 10 ** 6, 10 ** 9, ([], False))])
def test_the_last_token_may_be_the_one_before_the_limit(said, left, found):
    """A reply must leave a token to the policy. A task cannot change the record."""
    def reply(problem, record):
        record[:] = ["changed"]
        return said
    episodes = turns.Episodes(reply, ENCODING, 8, [QUESTION], [0])
    assert episodes(0, [97, 256], left) == found
    assert episodes.turns == [["a", said] if found[0] else ["a"]]


# ---------- warm start

GAME = guess.Problem("10-20:", 13)


def test_the_warm_start_imitates_the_policys_turns():
    task = SimpleNamespace(reply=guess.reply, demonstration=lambda *given: ["15", "-", "13"])
    row = setup.row(GAME, task, ENCODING, random.Random(0))
    assert row == ([*b"10-20:"], [*b"15", 256], [*b"-"], [*b"13", 256])
    ids, mask = setup.ids_and_mask([row, ([1], [2])])
    assert ids.tolist() == [[*b"10-20:15", 256, *b"-13", 256], [1, 2] + [0] * 11]
    own = [[0] * 6 + [1] * 3 + [0] + [1] * 3, [0, 1] + [0] * 11]
    assert mask.int().tolist() == own


@pytest.mark.parametrize("shown", ["15", ["15", "-"], [], [15], ["15", "+", "13"], None])
def test_a_demonstration_that_is_no_episode(shown):
    task = SimpleNamespace(reply=guess.reply, demonstration=lambda *given: shown)
    with pytest.raises(UserError, match="must be a list of turns|must have the reply '-'"):
        turns.demonstration(task, GAME, None)


def test_a_step_may_be_an_empty_first_turn():
    task = SimpleNamespace(
        steps=lambda _, said: [(0, False), (1, True)][:len(said)],
        demonstration=lambda *given: ["", "x", "b"],
        answer=lambda said: "", reply=lambda problem, said: {1: "x"}.get(len(said)),
        reward=lambda *given: {"correct": 1.0})
    setup.check_run(Config(supervision="process", prompts=1), task, [QUESTION])
    b = played(saying(256, 0, 98, 256), **vars(task))
    r, ends = reward.of_steps(task, ENCODING, b)
    assert ends.int().tolist() == [[0, 1, 0, 0, 1]] and r.tolist() == [[0, 0, 0, 0, 1]]


# ---------- episodes that go on

def test_labels_by_rollouts_play_on_from_within_an_episode(echo):
    """From the prefix of a step, whose own steps are rewarded and earn no credit."""
    agent, b = generated(echo, supervision="process", reward="rollouts")
    b.reward, b.ends = reward.of_steps(agent.task, ENCODING, b)
    calls = []

    def generate(agent, problems, tries, **given):
        calls.append((tries, given["begun"], grpo.generate(agent, problems, tries, **given)))
        return calls[-1][-1]
    label = reward.rollout_labels(agent, generate, b, 0)
    ends = (b.ends & ~passes.last_tokens(b.mask)).nonzero().tolist()
    (tries, begun, found), = calls
    assert_played(agent, found)
    heard = set()
    for k, said in enumerate(found.texts):
        (i, t), (ids, own) = ends[k // tries], begun[k // tries]
        start, n = int(b.start[i]), int(b.start[i]) + len(ids)
        assert ids == b.ids[i, start:n].tolist() and own == b.mask[i, start:n].tolist()
        assert not b.mask[i, t + 1:n].any() and b.mask[i, n] and found.start[k] == start
        assert found.ids[k, start:n].tolist() == ids
        assert found.judged[k, start:n].tolist() == own and not found.mask[k, :n].any()
        assert torch.equal(found.judged[k, n:], found.mask[k, n:]) and found.mask[k, n]
        replies = sum(a > z for a, z in zip(own, own[1:]))
        assert said[:2 * replies] == b.texts[i][:2 * replies]
        heard |= {replies} if len(said) > 2 * replies + 1 else set()
    assert heard >= {0, 1, 2}               # prefixes with replies before them, and further ones
    assert {(b.ids[i, t] == 256).item() for i, t in ends} == {True, False}
    right = torch.tensor(["a" in turns.spoken(said) for said in found.texts]) & found.finished
    assert label[tuple(zip(*ends))].tolist() == right.view(-1, tries).float().mean(1).tolist()
    logp, _ = token_logps(agent.policy, found.ids, found.mask, 1.0)
    torch.testing.assert_close(logp, found.logp, rtol=0, atol=5e-5)
    r, ends = reward.of_rule(agent, found)
    assert_steps_end(agent, found, ends)
    assert not (ends & ~found.judged).any() and found.judged.sum(1).max() <= 20
    cfg, groups = Config(supervision="process", kl="none"), torch.arange(len(r)) // tries
    adv, _, _ = advantages(r, ends, groups, found.mask, torch.zeros_like(r), None, cfg)
    score, _ = grpo.scores_of_rows(r, ends, groups, cfg)
    later = score.flip(1).cumsum(1).flip(1)         # of the steps from a token on
    torch.testing.assert_close(adv, torch.where(found.mask, later, 0))
    assert score[ends & ~found.mask].any()


# ---------- what is shown and asked

def test_the_terminal_shows_replies_apart(echo, capsys):
    """The logs say after how many tokens they stood, and how many turns there were."""
    agent, b = generated(echo)
    replies = torch.tensor([float(len(said[1::2])) for said in b.texts])
    b.ends = passes.last_tokens(b.mask)
    b.reward = b.ends * replies[:, None]        # those with the most are shown
    b.adv = torch.where(b.mask, 0.5, 0)
    part = passes.select(b, torch.arange(8), b.ids.size(1))
    report.print_group(part, ENCODING)
    _, *lines = capsys.readouterr().out.splitlines()
    want = ["".join(f"[{x}]" if k % 2 else x for k, x in enumerate(said)) for said in b.texts[:8]]
    assert len(lines) == 4 and any(line.count("[") > 1 for line in lines)
    assert all(any(f"x {text}   reward" in line for text in want) for line in lines)
    found = report.record(agent, part, part.logp, part.logp)
    for said, places, tokens in zip(part.texts, found["replies"], found["tokens"], strict=True):
        cuts = [0, *places, len(tokens)]
        assert ["".join(tokens[a:z]) for a, z in zip(cuts, cuts[1:])] == said[::2]
        assert not any(tokens[n - 1] for n in places)       # the stop token
    stats = report.statistics(b, torch.zeros(3).bool())
    assert stats["turns"] == pytest.approx(replies.mean().item() + 1)


def test_a_question_is_played_with_its_problem_or_one_of_its_own(monkeypatch):
    problem, asked = guess.problems()[1][0], []
    monkeypatch.setattr(guess, "reply", lambda *given: asked.append(given) or {1: "zz"}.get(
        len(given[1])))
    agent = agent_of(grpo.make_config(task="guess"), guess)
    for question in (problem.prompt, "11-12:"):         # too short for a problem
        agent.sampler = saying(49, 256)
        assert setup.ask(agent, question, grpo.sample) == question + "1[zz]"
    assert asked[:2] == [(problem, ["1"]), (problem, ["1", "zz", ""])]
    assert vars(asked[-1][0]) == dict(prompt="11-12:")


# ---------- the guessing game

def test_halving_always_finds_the_number():
    """And guessing anywhere in what is left does not. Held-out intervals are not trained on."""
    assert guess.left(GAME, ["15", "-", "12", "+", "3", "+", "99", "-"]) == (13, 14)
    train, held_out = sides = guess.problems()
    assert not {p.prompt for p in train} & {p.prompt for p in held_out} and len(held_out) == 500
    assert {b - a + 1 for a, b in map(guess.interval, train)} == {*range(7, 64)}
    assert guess.problems() == sides
    wins, problems = 0, train[:400] + held_out
    for n, problem in enumerate(problems):
        said = []
        while not said or said[-1]:
            low, high = guess.left(problem, said)
            assert 10 <= low <= problem.hidden <= high <= 99
            said.append(str((low + high) // 2))
            said.append(guess.reply(problem, said))
        assert guess.reward(problem, said[:-1]) == {"correct": 1.0}
        shown = guess.demonstration(problem, random.Random(n))
        wins += guess.reward(problem, shown)["correct"]
    assert 0.4 < wins / len(problems) < 0.75


@pytest.mark.parametrize("said, correct, truths", [
    ("15 - 12 + 13", 1, "+++"), ("15 - 16 - 13", 1, "+-+"),     # outside what is left
    ("15 - 9 + 12", 0, "+-+"), ("15 - 13\t", 0, "+-"), ("", 0, "-"), ("\u0661\u0663", 0, "-")])
def test_rewards_and_steps_of_guesses(said, correct, truths):
    said = said.split(" ")
    assert guess.reward(GAME, said) == {"correct": correct} and guess.answer(said) == said[-1]
    ends = [len("".join(said[:i + 1:2])) for i in range(0, len(said), 2)]
    assert guess.steps(GAME, said) == [(end, x == "+") for end, x in zip(ends, truths)]


@pytest.mark.parametrize("said, reply", [
    ("13", None), ("12", "+"), ("ten", None), ("20 - 1", "+"), ("20 - 1 + 12", None), ("14", "-")])
def test_a_game_of_three_guesses_is_won_or_lost(said, reply):
    assert guess.reply(guess.Problem("10-16:", 13), said.split(" ")) == reply
