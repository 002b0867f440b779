"""What grpo.py joins, function by function, with all that is around it played."""
import dataclasses
import math
import random
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import agent_of, batch_of, batch_of_rows, tiny_model

import data
import grpo
import reward
from data import UserError, gsm8k
from data.tokenizer import byte_encoding
from grpo import Agent, Config
from model import token_logps
from run import checkpoint, config, dist, files, passes, pretrained, report, setup

PROBLEMS = [SimpleNamespace(prompt=f"{i}=") for i in range(30)]
CFG = Config(prompts=2, group=4, max_new=8, micro_tokens=64, device="cpu", dtype="float32", compile=False)


def with_(**changes):
    return dataclasses.replace(CFG, **changes)


# ------------------------------------------------------------------------------------ the models

@pytest.mark.parametrize("changes, needed", [
    ({}, True), (dict(beta=0.0), False), (dict(kl="none"), False), (dict(kl="reward"), True), (dict(kl="watch"), True),
    (dict(kl="watch", beta=0.0), True), (dict(kl="none", reward="model"), True), (dict(beta=0.0, reward="model"), True)])
def test_who_needs_a_reference(changes, needed):
    """The KL, be it only looked at; and a learned reward, whose iterations begin with it."""
    assert with_(**changes).needs_reference is needed
    agent = grpo.new_agent(with_(**changes), None, None, tiny_model())
    assert (agent.ref is not None) is needed


def test_an_agent_for_answers_is_a_policy_alone():
    agent = Agent(CFG, None, None, tiny_model())
    assert agent.ref is agent.critic is agent.reward_model is agent.opt is None and agent.sampler is agent.policy
    assert grpo.new_agent(with_(beta=0.3), None, None, tiny_model()).beta == 0.3


@pytest.mark.parametrize("baseline, critic, there, own", [
    ("group", "separate", False, False), ("value", "shared", True, False), ("value", "separate", True, True),
    ("group+value", "shared", True, False), ("group+value", "separate", True, True)])
def test_a_critic_is_on_the_policy_or_begins_as_its_copy(baseline, critic, there, own):
    agent = grpo.new_agent(with_(baseline=baseline, critic=critic), None, None, tiny_model())
    assert (agent.critic is not None) is there
    if own:
        pairs = zip(agent.policy.parameters(), agent.critic.trunk.parameters(), strict=True)
        assert all(torch.equal(p, q) and p is not q for p, q in pairs)
    assert not there or (agent.critic.trunk is not None) is own


def test_a_reward_model_begins_as_the_policy_with_scores_of_variance_1():
    """Its weights have a standard deviation of 1 / sqrt(C + 1), and follow from the seed."""
    agent = grpo.new_agent(with_(reward="model"), None, None, tiny_model())
    number = random.Random("1/scorer/0").getrandbits(63)
    draw = torch.randn(1, 32, generator=torch.Generator().manual_seed(number))
    torch.testing.assert_close(agent.reward_model.head.weight.detach(), draw / math.sqrt(33))
    pairs = zip(agent.policy.parameters(), agent.reward_model.trunk.parameters(), strict=True)
    assert all(torch.equal(p, q) and p is not q for p, q in pairs)


def test_a_run_begins_in_evaluation_mode():
    """Also heads, to which a fork may add dropout."""
    cfg = with_(reward="model", baseline="value", critic="separate", kl="loss")
    agent = grpo.new_agent(cfg, None, None, tiny_model().train())
    models_of = (agent.policy, agent.ref, agent.critic, agent.reward_model)
    assert not any(part.training for model in models_of for part in model.modules())


def test_a_resumed_run_samples_from_the_weights_that_were_saved():
    """Where the sampler is a rounded copy it is not that of the model as it was built."""
    cfg = with_(dtype="bfloat16", kl="none")
    one, other = (pretrained.to_device(tiny_model(seed), cfg) for seed in (1, 2))
    tensors = checkpoint.training_state(grpo.new_agent(cfg, None, None, one))
    saved = checkpoint.Checkpoint(step=1, stats={}, beta=0.0, model={"saved": True}, sizes={}, tensors=tensors)
    agent = grpo.new_agent(cfg, None, None, other, saved)
    new = dict(one.named_parameters())
    assert agent.sampler is not other and all(
        torch.equal(p, new.get(name, new["embed_tokens.weight"]).to(p.dtype)) for name, p in agent.sampler.named_parameters())


def test_all_models_of_a_run_are_compiled(monkeypatch):
    """Each once, as the run uses it."""
    found = []
    monkeypatch.setattr(dist, "compile_all", lambda cfg, *models: found.extend(models))
    cfg = with_(reward="model", baseline="value", critic="separate", kl="loss", dtype="bfloat16")
    agent = grpo.new_agent(cfg, None, None, pretrained.to_device(tiny_model(), cfg))
    assert len(found) == 5 and {*found} == {agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_bfloat16_has_a_sampler_of_its_own(dtype):
    agent = grpo.new_agent(with_(dtype=dtype), None, None, pretrained.to_device(tiny_model(), with_(dtype=dtype)))
    assert (agent.sampler is not agent.policy) is (dtype == "bfloat16")


@pytest.mark.parametrize("given, one, several", [
    ({}, False, False), (dict(baseline="value"), False, False), (dict(kl="reward"), True, True),
    (dict(kl="reward", baseline="value"), True, True), (dict(dtype="bfloat16"), False, True),
    (dict(dtype="bfloat16", baseline="value"), False, True)])
@pytest.mark.parametrize("updates", [dict(), dict(minibatches=2), dict(epochs=2)])
def test_old_log_probabilities_are_those_of_a_pass_where_rounding_matters(given, one, several, updates, monkeypatch):
    """With one update per rollout the loss has its own, and only a KL in the reward needs a pass. A critic makes one."""
    cfg = with_(**given, **updates)
    of_pass = (several if updates else one) or cfg.baseline == "value"
    task = SimpleNamespace(reward=lambda problem, text: {"correct": float(len(text) % 2)})
    agent = grpo.new_agent(cfg, task, byte_encoding(), pretrained.to_device(tiny_model(), cfg))
    asked = []

    def logps(gpt, batch, cfg, critic=None):
        asked.append((gpt, critic))
        return torch.full_like(batch.logp, -7.0), torch.zeros_like(batch.logp) if critic else None
    monkeypatch.setattr(grpo, "logps", logps)
    batch, _ = grpo.rollout(agent, PROBLEMS[:2], random.Random(0))
    if updates:
        assert torch.equal(batch.old_logp, torch.full_like(batch.logp, -7.0) if of_pass else batch.logp)
    else:
        assert batch.old_logp is None
    if cfg.kl == "reward":      # the reference's are the same as the pass's: no penalty, up to the last bit
        zero, value = torch.zeros_like(batch.logp), torch.zeros_like(batch.logp) if agent.critic else None
        assert torch.equal(batch.adv, grpo.advantages(batch.reward, batch.ends, batch.mask, zero, value, cfg)[0])
    first = [(agent.sampler, agent.critic)] if of_pass else []
    assert asked == [*first, (agent.ref, None)]


def test_completions_are_drawn_from_the_stream_that_is_given_and_greedy_without_one(monkeypatch):
    """Of as many tokens as --max_new, less those that are given."""
    asked = []

    def sample(*given, reply):
        asked.append((*given, reply))
        return batch_of(torch.ones(2 * given[2], 9).bool())
    monkeypatch.setattr(grpo, "sample", sample)
    monkeypatch.setattr(reward, "score_by_rule", lambda *given: None)
    agent = agent_of(with_(temperature=0.5))
    for u in ("u", None):
        grpo.completions(agent, PROBLEMS[:2], 4, u, [([5, 6], [True, False]), ([], [])])
    for group, rng in ((4, random.Random(0)), (4, random.Random(0)), (4, random.Random(1)), (1, None)):
        grpo.generate(agent, PROBLEMS[:2], group, rng)
    stop, prompts = agent.encoding.stop, [[*b"0="], [*b"1="]]
    begun = [[*b"0=", 5, 6], [*b"1="]]
    assert asked[:2] == [(agent.sampler, begun, 4, [6, 8], 0.5, stop, u, None) for u in ("u", None)]
    assert all(given[-1] is None for given in asked)            # the task has no replies
    drawn = [given[6] for given in asked[2:]]
    assert [given[2] for given in asked[2:]] == [4, 4, 4, 1]
    assert all(given[:2] + given[3:6] == (agent.sampler, prompts, [8, 8], 0.5, stop) for given in asked[2:])
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2]) and drawn[3] is None
    assert drawn[0].shape == (8, 8) and len(drawn[0].unique()) == 64


def test_completions_go_on_from_a_given_beginning():
    """It is judged with what is sampled behind it, up to --max_new together, and is not trained on.
    Those of a problem without one are as they would be alone."""
    seen = []
    task = SimpleNamespace(rewards=lambda problems, texts, tokens: seen.append((texts, tokens)) or
                           [{"correct": 0.0}] * len(texts))
    agent = agent_of(with_(temperature=0.7), task)
    agent.encoding.stop = frozenset(range(0, 257, 9))
    u = dist.uniform(random.Random(0), 8, 8)
    batch = grpo.completions(agent, PROBLEMS[:2], 4, u, [([*b"abc"], [True] * 3), ([], [])])
    assert batch.start.tolist() == [2] * 8
    assert batch.ids[:4, :5].tolist() == [[*b"0=abc"]] * 4 and not batch.mask[:4, :5].any()
    assert torch.equal(batch.judged[4:], batch.mask[4:]) and batch.judged[:4, 2:6].all()
    assert torch.equal(batch.judged[:4, 5:], batch.mask[:4, 5:]) and not batch.judged[:, :2].any()
    length = batch.judged.sum(1)
    (texts, tokens), = seen
    assert tokens == length.tolist() and texts == batch.texts
    assert all(text[:3] == "abc" < text for text in texts[:4])
    assert (length[~batch.finished] == 8).all() and 0 < batch.finished[:4].sum() < 4
    logp, _ = token_logps(agent.policy, batch.ids, batch.mask, 0.7)
    torch.testing.assert_close(logp, batch.logp, rtol=0, atol=5e-5)
    assert (batch.logp[batch.mask] < 0).all()
    alone = grpo.completions(agent, PROBLEMS[1:2], 4, u[4:])
    assert alone.texts == batch.texts[4:] and torch.equal(alone.finished, batch.finished[4:])


# ------------------------------------------------------------------------------------- a step

@pytest.mark.parametrize("half_life, rates", [(0, [0.4] * 4), (1, [0.4, 0.2, 0.1, 0.05]), (2, [0.4, 0.4 * 0.5 ** 0.5, 0.2, 0.1 * 2 ** 0.5])])
def test_the_learning_rate_halves(half_life, rates, monkeypatch):
    """The first step's is --lr; without a half-life each is."""
    batch, seen = batch_of(torch.ones(2, 6).bool()), []
    monkeypatch.setattr(grpo, "rollout", lambda agent, drawn, rng: (batch, {}))
    monkeypatch.setattr(grpo, "update", lambda agent, batch, rng: seen.append(agent.opt.param_groups[0]["lr"]) or {"kl": 0.0})
    opt = torch.optim.SGD([torch.zeros(1)], 0.4)
    for step in range(1, 5):
        grpo.train_step(agent_of(with_(lr=0.4, half_life=half_life), beta=0.5, opt=opt), PROBLEMS, step)
    assert seen == pytest.approx(rates)


def test_speeds_are_tokens_by_seconds(monkeypatch):
    """8 tokens sampled in 2 seconds, after 3 in which the task judged, and learned in 5."""
    clock, batch = iter([10.0, 15.0, 20.0]), batch_of(torch.arange(12).view(2, 6) < 8)
    monkeypatch.setattr(grpo.report.time, "perf_counter", lambda: next(clock))

    def rollout(agent, drawn, source):
        data.SPENT[0] += 3
        return batch, {"reward": len(drawn)}
    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "update", lambda agent, batch, source: {"kl": 0.5})
    got, stats = grpo.train_step(agent_of(CFG, beta=0.04), PROBLEMS, 3)
    assert got is batch and stats == dict(reward=2, kl=0.5, seconds=10.0, reward_seconds=3.0, rollout_tok_s=4.0, update_tok_s=1.6, beta=0.04)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_critic_of_equal_returns_explains_all_of_nothing(value):
    """All rewards alike, and the critic without an opinion: a share of 0, which once could have been no number."""
    cfg = with_(baseline="value", adv_scale="none", kl="none", lam=1.0)
    task = SimpleNamespace(reward=lambda p, text: {"correct": value}, DEFAULTS={})
    agent = grpo.new_agent(cfg, task, byte_encoding(), tiny_model())
    agent.encoding.stop = frozenset(range(257))                     # all end with their first token
    _, stats = grpo.rollout(agent, PROBLEMS[:2], random.Random(0))
    assert stats["explained_variance"] == 1 and stats["reward"] == value


# ------------------------------------------------------------------------------- the reward model

@pytest.mark.parametrize("fit_prompts, apart", [(30, 3), (18, 1), (19, 1), (20, 2), (99, 3)])
def test_a_tenth_of_the_problems_measures_a_tenth_of_a_fit(fit_prompts, apart, monkeypatch):
    """Both rounded down: of 30 problems the first 3 are never fitted."""
    monkeypatch.setattr(reward, "FIT_STEPS", fit_prompts)
    parts = reward.problems_to_label(PROBLEMS, with_(prompts=1), random.Random(0))
    numbers = [PROBLEMS.index(p) for part in parts for p in part]
    assert len(set(numbers)) == len(numbers) == min(fit_prompts, 30) and len(parts[0]) == apart
    assert all(i < 3 for i in numbers[:apart]) and all(i >= 3 for i in numbers[apart:])


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["model", "rollouts"])
def test_labels_of_two_ranks_are_those_of_one_process(labels, monkeypatch):
    """Of each completion of a problem, though the rows beside it are others; each iteration draws
    anew."""
    cfg = with_(reward=labels, supervision="process")
    task = SimpleNamespace(reward=lambda problem, text: {"correct": float(len(text) % 2)},
                           steps=lambda problem, text: [(i + 1, True) for i in range(len(text))])
    agent, found, streams, rng = agent_of(cfg, task, reward_model=1), [], {}, dist.rng
    agent.encoding.stop = frozenset(range(0, 257, 9))

    def refit(agent, batches, held_out, rng):
        assert (len(batches), held_out) == (5, 1)
        found.append({})
        for batch in batches:
            labelled = reward.labelled(batch).values()
            for problem, *row in zip(batch.problems, *labelled, strict=True):
                own = [x[:int(row[1].nonzero()[-1]) + 1].tolist() for x in row]
                found[-1].setdefault(problem.prompt, []).append(own)
    monkeypatch.setattr(reward, "refit", refit)
    monkeypatch.setattr(dist, "rng", lambda cfg, purpose, at=0:
                        streams.setdefault(purpose, set()).add(str(at)) or rng(cfg, purpose, at))
    for rank, ranks, iteration in ((0, 1, 4), (0, 2, 4), (1, 2, 4), (0, 1, 5)):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "ranks", lambda ranks=ranks: ranks)
        grpo.refit_reward_model(agent, PROBLEMS[:10], iteration)
    one, first, second, another = found
    assert one == first | second and len(first) == len(second) == 5 and one != another
    assert all(len(rows) == reward.CHOICES for rows in one.values())
    assert {at.partition("/")[0] for ats in streams.values() for at in ats} == {"4", "5"}
    rewards = {x for rows in one.values() for *_, label in rows for x in label}
    assert rewards == ({0, 1} if labels == "model" else {0, 0.25, 0.5, 0.75, 1})


def test_a_fit_stops_when_it_is_asked_to(monkeypatch):
    layer, asked = torch.nn.Linear(2, 1), iter([0, 15])
    monkeypatch.setattr(dist, "stop_asked", lambda: next(asked))
    with pytest.raises(dist.Stopped, match="^in the nothing, which will begin again$"):
        passes.supervised_fit("nothing", layer, lambda step: [layer(torch.ones(1, 2)).sum()], 9, 1e-3)
    assert next(asked, None) is None                # in the second step


# ------------------------------------------------------------------------------- the order of a run

@pytest.fixture
def order(monkeypatch):
    """A function that makes a run whose parts only note when they are at work, one a step; and the notes. It is
    asked to stop at the step `halt`."""
    notes, at = [], [0]

    def note(module, name, text, got=None):
        monkeypatch.setattr(module, name, lambda *given: (notes.append(text(*given)), got)[1])

    def train_step(agent, problems, step):
        at[0] = step
        notes.append(f"step {step}")
        return batch_of(torch.ones(1, 1).bool()), {"loss": step}

    def made(halt=None, saved=None, **changes):
        agent = agent_of(with_(**changes), reward_model=1)
        begun = agent.cfg, None, agent.encoding, agent.policy, PROBLEMS[:20], PROBLEMS[20:]
        monkeypatch.setattr(setup, "begin", lambda *given: begun)
        monkeypatch.setattr(grpo, "new_agent", lambda *given: agent)
        monkeypatch.setattr(dist, "stop_asked", lambda: 15 if at[0] == halt else 0)
        notes.clear()
        try:
            grpo.train(agent.cfg, saved=saved)
        except dist.Stopped as when:
            notes.append(f"stopped {when}")
        return notes
    note(grpo, "refit_reward_model", lambda agent, problems, i: f"iteration {i}", {})
    note(grpo, "evaluate", lambda agent, problems: f"evaluation on {problems[0].prompt}", {"greedy": 0.5})
    note(files, "append", lambda path, record: f"log {' '.join(map(str, [record.pop('step'), *record]))}")
    note(checkpoint, "keep_best", lambda agent, step, results: f"{results['greedy']} at {step}")
    note(checkpoint, "save", lambda agent, step, *_: f"save {step}")
    monkeypatch.setattr(report, "refresh", lambda folder: None)
    note(report, "farewell", lambda cfg, question: f"try {question}")
    monkeypatch.setattr(report, "log_step", lambda *given: None)
    monkeypatch.setattr(grpo, "train_step", train_step)
    return made


def test_the_order_of_a_run(order):
    """Two iterations of three steps. Evaluations are before the first, every 4 and after the last; saves every 5, and
    at the end of an iteration, which the next one may change."""
    assert order(steps=3, iterations=2, eval_every=4, save_every=5) == [
        "evaluation on 20=", "0.5 at 0", "log 0 greedy", "iteration 0", "step 1", "log 1 loss", "step 2", "log 2 loss",
        "step 3", "log 3 loss", "save 3", "iteration 1", "step 4", "evaluation on 20=", "0.5 at 4", "log 4 loss greedy",
        "step 5", "log 5 loss", "save 5", "step 6", "evaluation on 20=", "0.5 at 6", "log 6 loss greedy", "save 6", "try 20="]


def test_without_steps_a_run_is_an_evaluation(order):
    assert order(steps=0) == ["evaluation on 20=", "0.5 at 0", "log 0 greedy", "save 0", "try 20="]


def test_a_run_that_is_asked_to_stop_saves_the_step(order, monkeypatch):
    """With a page that has it, though none is due."""
    monkeypatch.setattr(report, "refresh", lambda folder: files.append(folder / "report.html", {"step": "page"}))
    assert order(halt=2, steps=4) == [
        "evaluation on 20=", "0.5 at 0", "log 0 greedy", "iteration 0", "step 1", "log 1 loss", "step 2", "log 2 loss",
        "save 2", "log page", "stopped after step 2"]
    assert order(halt=4, steps=4)[-4:] == ["log 4 loss greedy", "save 4", "log page", "try 20="]        # it is done anyway


@pytest.mark.parametrize("at, saved", [(0, []), (1, ["save 1"]), (2, ["save 2"])])
def test_a_stop_in_an_evaluation_saves_the_step_before_it(at, saved, order, monkeypatch):
    """Before the first step there is none."""
    seen = []

    def evaluate(agent, problems):
        seen.append(len(seen))
        if seen[-1] == at:
            raise dist.Stopped("in the evaluation")
        return {"greedy": 0.5}
    monkeypatch.setattr(grpo, "evaluate", evaluate)
    notes = order(steps=3, eval_every=1, save_every=9)
    assert [x for x in notes if x.startswith("s") and "step" not in x] == saved + ["stopped in the evaluation"]


def test_a_resumed_run_goes_on_with_the_next_step(order):
    """Or with the evaluation of the last one, if that was still to come."""
    checkpoint = SimpleNamespace(step=3, stats={})
    assert order(saved=checkpoint, steps=3, iterations=2, eval_every=3)[:2] == ["iteration 1", "step 4"]
    checkpoint.stats = {"reward": 1.0}
    assert order(saved=checkpoint, steps=3, iterations=2, eval_every=3)[:6] == [
        "evaluation on 20=", "0.5 at 3", "log 3 reward greedy", "save 3", "iteration 1", "step 4"]


# ------------------------------------------------------------------------------ the command line

def test_a_question_may_leave_no_room_for_an_answer():
    """A context of 64: after 63 or 64 tokens of a prompt there is one for the answer; of 65 a line says so."""
    agent = agent_of(CFG)
    assert len(grpo.ask(agent, "1" * 63)) >= 63 and len(grpo.ask(agent, "1" * 64)) >= 64
    assert len(grpo.ask(agent, "1" * 60).encode()) <= 64
    with pytest.raises(UserError, match="65 tokens do not fit a context of 64"):
        grpo.ask(agent, "1" * 65)


def test_a_question_is_sent_with_the_instructions_of_its_task(monkeypatch):
    """As a problem of the task is; the terminal shows the question alone."""
    row = {"question": "How many?", "answer": "1+1=2\n#### 2"}
    problem = gsm8k.problem_of(row)
    assert problem.prompt.startswith("How many?") and "<answer>" in problem.prompt
    sent, encoding = [], byte_encoding()

    def sample(policy, prompts, *given, **named):
        sent.extend(prompts)
        return batch_of_rows([(b"?", b"yes")])
    monkeypatch.setattr(grpo, "sample", sample)
    for task, prompt in ((gsm8k, problem.prompt), (None, "How many?")):
        assert grpo.ask(agent_of(CFG, task), "How many?") == "How many?yes"
        assert sent.pop() == encoding.encode_prompt(prompt) and not sent
    broken = SimpleNamespace(prompt=lambda question: 1 / 0)
    with pytest.raises(UserError, match="the function prompt fails: ZeroDivisionError"):
        grpo.ask(agent_of(CFG, broken), "How many?")


@pytest.mark.parametrize("after, between", [("", ""), ("<|im_end|>", "\n")])
def test_a_chat_models_answer_is_on_a_line_of_its_own(after, between, monkeypatch):
    """That to `47*58=` goes on where it ends."""
    batch = batch_of_rows([(b"?", b"yes")])
    monkeypatch.setattr(grpo, "sample", lambda *given, **named: batch)
    encoding = byte_encoding()
    encoding.frame = dataclasses.replace(encoding.frame, after=after)
    assert grpo.ask(agent_of(CFG, encoding=encoding), "?") == "?" + between + "yes"


@pytest.mark.parametrize("question, asked", [
    ("47*58=", "'47*58='"), ("1 + 1", "'1 + 1'"), ("x" * 60, "x" * 60), ("x" * 61, "QUESTION"), ("a\nb", "QUESTION")])
def test_the_last_line_is_a_command_on_one_line(question, asked, capsys):
    report.farewell(CFG, question)
    assert capsys.readouterr().out.endswith(f" --init {CFG.folder} --ask {asked}\n")


@pytest.fixture
def command(monkeypatch):
    """A function that gives the code with which a command ends; and what it tried, with ranks on which device."""
    tried = []
    monkeypatch.setattr(dist, "prepare", lambda: None)
    monkeypatch.setattr(dist, "start_ranks", tried.append)
    monkeypatch.setattr(dist, "exit_with", tried.append)
    task = SimpleNamespace(DEFAULTS={}, problems=lambda: (PROBLEMS[:20], PROBLEMS[20:]))
    for module in (config, setup):
        monkeypatch.setattr(module, "load_task", lambda name: task)

    def ended(*args):
        tried.clear()
        grpo.main([*args, "--device", "cpu"])
        return tried
    return ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_ends_with_the_code_of_its_signal(number, command, monkeypatch, capsys):
    def train(cfg, saved):
        signal.raise_signal(number)
        raise dist.Stopped("after step 3")
    monkeypatch.setattr(grpo, "train", train)
    assert command("--out", "there") == [128 + int(number)]
    assert capsys.readouterr().out == "stopped after step 3; continue with: python grpo.py --resume --out there\n"


def test_an_evaluation_is_on_the_problems_held_out(command, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "trained_model", lambda cfg: (byte_encoding(), tiny_model(block_size=2048)))
    asked = []
    monkeypatch.setattr(grpo, "evaluate", lambda agent, problems: asked.append(problems) or {"greedy": 0.125})
    assert command("--eval_only", "--out", "there") == [torch.device("cpu"), 0]
    assert asked == [PROBLEMS[20:]] and "12.5%" in capsys.readouterr().out


# ----------------------------------------------------------------------------------- evaluations

@pytest.mark.parametrize("prompts, group, at_a_time", [(6, 6, 4), (7, 5, 4), (2, 2, 1)])
def test_an_evaluation_has_no_more_rows_than_a_rollout_and_finds_its_own(prompts, group, at_a_time, monkeypatch):
    """A greedy row and 8 samples of each of 9 problems. What counts for each is of its own rows: problem
    i is solved by i of its samples, which agree, and its others by i differ; the greedy row is right
    where i is odd."""
    problems, parts = [SimpleNamespace(prompt=str(i)) for i in range(9)], ([], [])

    def generate(agent, part, n, rng=None):
        """Texts and what is right, known beforehand."""
        assert n == (1 if rng is None else 8) and (n * len(part) <= prompts * group or len(part) == 1)
        seen = [int(p.prompt) for p in part]
        parts[rng is not None].append(len(part))
        right, texts = [i % 2 for i in seen], [f"greedy {i}" for i in seen]
        if rng is not None:
            right = [k >= 8 - i for i in seen for k in range(8)]
            texts = [f"right {i}" if k >= 8 - i else f"wrong {i} {k}" for i in seen for k in range(8)]
        return batch_of(torch.ones(len(texts), 1).bool(), texts=texts,
                        components={"correct": torch.tensor(right).float()})
    monkeypatch.setattr(grpo, "generate", generate)
    agent = agent_of(with_(prompts=prompts, group=group), SimpleNamespace(answer=str))
    found = grpo.evaluate(agent, problems)
    assert parts[1] == [at_a_time] * (9 // at_a_time) + [9 % at_a_time] * (9 % at_a_time > 0) and sum(parts[0]) == 9
    assert found["greedy"] == pytest.approx(4 / 9) and found["pass@1"] == pytest.approx(36 / 8 / 9)
    assert found["pass@8"] == pytest.approx(8 / 9) and found["maj@8"] == pytest.approx(7 / 9)


def test_samples_that_are_all_right_are_no_others(monkeypatch):
    """The votes of a problem are its own samples'."""
    def generate(agent, part, n, rng=None):
        """Greedy rows are wrong, and say what the samples of the next problem say."""
        texts = ["b", "a"] if rng is None else ["a", "c", "b", "d"]
        right = [0., 0] if rng is None else [1., 0, 1, 0]
        return batch_of(torch.ones(len(texts), 1).bool(), texts=texts,
                        components={"correct": torch.tensor(right)})
    monkeypatch.setattr(grpo, "generate", generate)
    agent = agent_of(with_(prompts=2, group=3, samples=2), SimpleNamespace(answer=str))
    assert grpo.evaluate(agent, PROBLEMS[:2]) == {"greedy": 0, "pass@1": 0.5, "pass@2": 1, "maj@2": 1}


def test_ctrl_c_outside_of_a_run_is_exit_code_130(monkeypatch, capsys):
    def read(*given):
        """Ctrl-C comes."""
        raise KeyboardInterrupt
    monkeypatch.setattr(config, "read", read)
    with pytest.raises(SystemExit) as ended:
        grpo.main([])
    assert ended.value.code == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("group, choices, sizes", [(4, 2, [6, 6, 6, 2]), (2, 4, [3] * 6 + [2]), (4, 4, [3] * 6 + [2])])
def test_labelling_has_as_many_rows_as_a_rollout_but_a_problem_a_prompt(group, choices, sizes, monkeypatch):
    seen = []

    def generate(agent, part, n, rng):
        """Completions of one token."""
        seen.append(len(part))
        return batch_of(torch.ones(n * len(part), 1).bool())
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(reward, "of_rule", lambda agent, b: (torch.zeros(b.ids.shape), b.mask))
    monkeypatch.setattr(reward, "refit", lambda *_: {"rm_accuracy": 1.0, "rm_error": 0.0})
    monkeypatch.setattr(reward, "CHOICES", choices)
    cfg = with_(prompts=3, group=group, reward="model")
    grpo.refit_reward_model(agent_of(cfg, reward_model=1), PROBLEMS[:20], 0)
    assert seen == sizes
