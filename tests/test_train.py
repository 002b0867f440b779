"""What grpo.py joins: models of a run, the order of a step, questions, evaluations. Whole steps and
runs are in test_oracle.py."""
import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import agent_of, batch_of, batch_of_rows, tiny_model
from test_turns import saying

import data
import grpo
from data import UserError
from data import gsm8k
from data.tokenizer import byte_encoding
from grpo import Config
from run import checkpoint, config, dist, pretrained, report, setup

PROBLEMS = [SimpleNamespace(prompt=f"{i}=") for i in range(30)]
CFG = Config(prompts=2, group=4, max_new=8, micro_tokens=64, dtype="float32")
TASK = SimpleNamespace(reward=lambda problem, text: {"correct": float(len(text) % 2)}, answer=str)


def with_(**changes):
    return dataclasses.replace(CFG, **changes)


def new_agent(model=None, saved=None, **changes):
    """As a run begins, or goes on."""
    cfg = with_(**changes)
    policy = pretrained.to_device(model or tiny_model(), cfg)
    return grpo.new_agent(cfg, TASK, byte_encoding(), policy, saved)


@pytest.mark.parametrize("changes, needed", [
    ({}, True), (dict(beta=0.0), False), (dict(kl="none"), False), (dict(kl="reward"), True),
    (dict(kl="watch", beta=0.0), True), (dict(kl="none", reward="model"), True)], ids=str)
def test_who_needs_a_reference(changes, needed):
    assert (new_agent(**changes).ref is not None) == needed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_begin_as_copies_of_the_policy(dtype, monkeypatch):
    """Each compiled once. A reward model's scores have a variance of 1."""
    compiled = []
    monkeypatch.setattr(setup, "compile_all", lambda cfg, *models: compiled.extend(models))
    given = dict(reward="model", baseline="value", critic="separate", dtype=dtype)
    agent = new_agent(**given)
    assert (agent.sampler is not agent.policy) is (dtype == "bfloat16")
    for trunk in (agent.critic.trunk, agent.reward_model.trunk):
        pairs = zip(agent.policy.parameters(), trunk.parameters(), strict=True)
        assert all(torch.equal(p, q) and p is not q for p, q in pairs)
    assert {p.dtype for p in agent.policy.parameters()} == {torch.float32}      # master weights
    models = {agent.policy, agent.sampler, agent.ref, agent.critic, agent.reward_model}
    assert {*compiled} == models and len(compiled) == len(models)
    number = random.Random("1/scorer/0").getrandbits(63)
    draw = torch.randn(1, 32, generator=torch.Generator().manual_seed(number))
    torch.testing.assert_close(agent.reward_model.head.weight.detach(), draw / math.sqrt(33))
    assert new_agent(baseline="value").critic.trunk is None and new_agent().critic is None


def test_a_parameter_that_no_checkpoint_would_keep_is_refused(monkeypatch):
    def new_optimizer(agent):
        return torch.optim.SGD([*agent.policy.parameters(), torch.nn.Parameter(torch.ones(1))])
    monkeypatch.setattr(grpo, "new_optimizer", new_optimizer)
    with pytest.raises(UserError, match="in no model of the agent"):
        new_agent()


def test_a_resumed_run_samples_from_the_weights_that_were_saved():
    """Where the sampler is a rounded copy it is not that of the model as it was built."""
    given = dict(dtype="bfloat16", kl="none")
    one = new_agent(tiny_model(1), **given)
    saved = checkpoint.Checkpoint(step=0, beta=0.0, model={"saved": True}, metrics=0,
                                  samples=0, tensors=checkpoint.training_state(one))
    agent = new_agent(tiny_model(2), saved, **given)
    assert agent.sampler is not agent.policy
    for p, q in zip(agent.sampler.parameters(), one.sampler.parameters(), strict=True):
        assert torch.equal(p, q)


def test_speeds_are_tokens_by_seconds(monkeypatch):
    """8 tokens sampled in 2 seconds, after 3 in which the task judged, and learned in 5."""
    clock, batch = iter([10.0, 15.0, 20.0]), batch_of(torch.arange(12).view(2, 6) < 8)
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(dist, "gather", lambda x: [x, (3.0, 5.0, 10.0)])
    timed = report.Clock()
    data.SPENT[0] += 1
    timed.has_sampled()
    assert timed.speeds(batch) == dict(
        seconds=10.0, reward_seconds=3.0, rollout_tok_s=4.0, update_tok_s=1.6)


def test_the_clock_is_told_between_rollout_and_update(monkeypatch):
    seen = []
    order = ["rollout", "has_sampled", "release", "update"]
    for module, name in zip((grpo, report.Clock, grpo.caches, grpo), order):
        def noted(*given, name=name, real=getattr(module, name)):
            seen.append(name)
            return real(*given)
        monkeypatch.setattr(module, name, noted)
    grpo.train_step(new_agent(kl="none"), PROBLEMS, 1)
    assert seen == order


def test_the_rate_and_the_coefficient_of_now_are_logged():
    """Not those of the settings; a coefficient only where it counts."""
    for changes, logged in (({}, {"lr": 0.5, "beta": 0.7}), (dict(kl="watch"), {"lr": 0.5})):
        agent = new_agent(**changes)
        agent.beta = 0.7
        agent.opt.param_groups[0]["lr"] = 0.5
        assert report.schedules(agent) == logged


def test_a_critic_of_equal_returns_explains_all_of_nothing(monkeypatch):
    monkeypatch.setattr(TASK, "reward", lambda problem, text: {"correct": 1.0})
    agent = new_agent(baseline="value", adv_scale="none", kl="none", lam=1.0)
    agent.encoding.stop = frozenset(range(257))                     # all end at once
    _, stats = grpo.rollout(agent, PROBLEMS[:2], random.Random(0))
    assert stats["explained_variance"] == 1 == stats["reward"]


def test_a_question_may_leave_no_room_for_an_answer():
    """A context of 64: after 63 or 64 tokens of a prompt there is one for the answer."""
    agent = agent_of(CFG, policy=saying(97))
    for n, answer in ((60, "aaaa"), (63, "a"), (64, "a")):
        assert setup.ask(agent, "1" * n, grpo.sample).split("\n(")[0] == "1" * n + answer
    with pytest.raises(ValueError, match="65 tokens do not fit"):
        setup.ask(agent, "1" * 65, grpo.sample)


@pytest.mark.parametrize("after, said", [("", "yes"), ("<|im_end|>", "\nyes")])
def test_a_question_is_sent_with_the_instructions_of_its_task(after, said, monkeypatch):
    """The terminal shows them, too; a chat model's answer is on a line of its own."""
    agent, sent = agent_of(with_(max_new=64), gsm8k, policy=tiny_model(block_size=256)), []
    agent.encoding.frame = dataclasses.replace(agent.encoding.frame, after=after)
    batch = batch_of_rows([(b"?", b"yes")])
    monkeypatch.setattr(grpo, "sample", lambda policy, prompts, group, room, *given, **named:
                        sent.extend([*prompts, room]) or batch)
    assert setup.ask(agent, "How many?", grpo.sample) == gsm8k.prompt("How many?") + said
    problem = gsm8k.problem_of({"question": "How many?", "answer": "1+1=2\n#### 2"})
    assert sent == [agent.encoding.encode_prompt(problem.prompt), [64]]


def test_ctrl_c_outside_of_a_run_is_exit_code_130(monkeypatch, capsys):
    def interrupted(*given):        # a job in the background of a shell ignores the signal
        raise KeyboardInterrupt
    monkeypatch.setattr(config, "read", interrupted)
    with pytest.raises(SystemExit) as ended:
        grpo.main([])
    assert ended.value.code == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("prompts, group, sizes", [(7, 5, [4, 4, 1]), (2, 2, [1] * 9)])
def test_an_evaluation_has_no_more_rows_than_a_rollout(prompts, group, sizes, monkeypatch):
    """Problem i of 9 is solved by i of its 8 samples, which agree; and greedily where i is odd."""
    parts, drawn = {1: [], 8: []}, []

    def generate(agent, part, n, u=None):
        drawn.extend([] if u is None else u.split(8))
        seen = [int(p.prompt[:-1]) for p in part for _ in range(n)]
        parts[n].append(len(part))
        right = [i % 2 if u is None else 8 - k % 8 <= i for k, i in enumerate(seen)]
        texts = [f"{i}" if yes else f"{i} {k}" for k, (i, yes) in enumerate(zip(seen, right))]
        return batch_of(torch.ones(len(texts), 1).bool(), texts=texts,
                        components={"correct": torch.tensor(right).float()})
    monkeypatch.setattr(grpo, "generate", generate)
    agent = agent_of(with_(prompts=prompts, group=group), TASK)
    found = report.evaluate(agent, PROBLEMS[:9], generate)
    assert parts[8] == sizes and max(parts[1]) <= prompts * group and sum(parts[1]) == 9
    assert [u.sum() for u in drawn] == [
        dist.uniform(dist.rng(agent.cfg, "evaluate", i), 8, 8).sum() for i in range(9)]
    wanted = {"greedy": 4 / 9, "pass@1": 36 / 8 / 9, "pass@8": 8 / 9, "maj@8": 7 / 9}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
