"""docs/derivation.md: each number with four decimals is one that the training functions give for
the page's example, each quoted line stands in its function, each command line is understood."""
import inspect
import random
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import grpo
import reward
from data import arithmetic
from run import config

PAGE = (ROOT / "docs" / "derivation.md").read_text()
CODE = re.findall(r"`(.+?)`", PAGE)
SETTINGS = {f"--{f.name}" for f in fields(grpo.Config)}
FLAGS = {code for code in CODE if code.startswith("--") and code not in SETTINGS}
QUOTED = re.findall(r"^- in `(.+?)`: `(.+)`$", PAGE, re.M)

# the example, read off the first table: o, completion, tokens, reward, old, new, reference, value
TABLE = [row.strip("|").split("|") for row in PAGE.split("\n## ")[1].splitlines()
         if row.startswith("| $o_")]
LINES = [re.findall(r"`(.+?)`", row[1]) for row in TABLE]                   # a line is a token
TOKENS = [[f"\n{lines[0]}" if "=" in lines[0] else lines[0], *lines[1:], ""] for lines in LINES]
TOKENS = [[token + "\n" * (1 < len(row) - i > 2) for i, token in enumerate(row)] for row in TOKENS]
VOCABULARY = sorted({token for row in TOKENS for token in row})
LENGTH = torch.tensor([len(row) for row in TOKENS])
MASK = torch.arange(4) < LENGTH[:, None]                                    # (4, 4)
PROBLEM = arithmetic.Problem("13*17=", "221")
ENCODING = SimpleNamespace(token_bytes=lambda i: VOCABULARY[i].encode(), stop=())


def padded(rows):
    """Lists of numbers, one a token, as a tensor (4, 4); the padding must not matter."""
    return torch.tensor([[*row, *[1e9] * (4 - len(row))] for row in rows])


OLD, NEW, REF, VALUE = (padded([[float(x) for x in row[at].split(",")] for row in TABLE])
                        for at in (4, 5, 6, 7))


def rolled_out(flag, monkeypatch):
    """The Config of a command line, and the real `rollout` of the example with it."""
    _, chosen = config.read(grpo.Config, "", flag.split())
    cfg = grpo.make_config(**dict(prompts=1, group=4, max_new=4) | chosen)

    def generate(*_):
        ids = padded([[VOCABULARY.index(token) for token in row] for row in TOKENS])
        ids = torch.where(MASK, ids, 0).long()
        batch = grpo.Batch(ids, MASK, LENGTH > 0, OLD.log(), torch.zeros(4, dtype=torch.int64))
        agent = SimpleNamespace(task=arithmetic, encoding=ENCODING)
        batch.problems = [PROBLEM] * 4
        batch.texts, batch.components = reward.by_rule(agent, batch)
        return batch
    said = {"policy": (OLD.log(), VALUE), "ref": (REF.log(), None)}
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(grpo, "logps", lambda gpt, *_: said[gpt.name])
    policy, ref = (SimpleNamespace(name=name, amp=None) for name in said)
    agent = grpo.Agent(cfg, arithmetic, ENCODING, policy, beta=cfg.beta,
                       ref=ref if cfg.needs_reference else None,
                       critic="value" in cfg.baseline or None)
    return cfg, grpo.rollout(agent, [PROBLEM], random.Random(0))[0]


def computed(cfg, batch):
    """What a step with these settings has: advantages, and for the old and the new policy the loss,
    its gradient, its share of each row and the surrogate, with and without the clip."""
    weight = grpo.token_weights(MASK, cfg.loss_mean, 4, LENGTH.sum(), cfg.max_new)
    yield from (weight, batch.adv, batch.reward)
    if batch.returns is not None:
        adv = batch.returns - VALUE
        std = adv[MASK].std(correction=0)
        yield from (batch.returns, adv, adv[MASK].mean(), std)
        error = grpo.value_loss(VALUE, VALUE, batch.returns, weight)
        yield from (error, grpo.VALUE_COEF * error)
    no_clip = replace(cfg, clip_low=grpo.NO_CLIP, clip_high=grpo.NO_CLIP)
    for other in (cfg, no_clip, replace(cfg, kl="none")):
        for probability in (OLD, NEW):
            logp = probability.log().requires_grad_()
            own = replace(batch, ref_logp=None) if other.kl == "none" else batch
            loss, *rows = (grpo.policy_loss(logp, own, weight * row, 12, other, cfg.beta)[0]
                           for row in (1, *torch.eye(4)[..., None]))
            gradient, = torch.autograd.grad(loss, logp)
            ratio = grpo.importance_ratio(logp - OLD.log(), MASK, other)
            gain, _ = grpo.surrogate(ratio, logp, batch.adv, MASK, other)
            yield from (loss, gradient, torch.stack(rows), gain, -gradient / weight.clamp(min=1e-9))
    for probability in (OLD, NEW):
        for name in ("k1", "k2", "k3"):
            k = grpo.kl_estimate(probability.log(), REF.log(), name)
            mean = torch.where(MASK, weight * k, 0).sum()
            yield from (k, -cfg.beta * k, mean, cfg.beta * mean)


def of_first_tokens():
    """The estimators over all first tokens, the rest of the vocabulary as one more, their means,
    and the mean gradients by the logits."""
    p, ref = (torch.tensor([*x[[0, 1, 3], 0], 1 - x[[0, 1, 3], 0].sum()]) for x in (NEW, REF))
    logits = p.log().requires_grad_()
    for name in ("k1", "k2", "k3"):
        k = grpo.kl_estimate(logits.log_softmax(0), ref.log(), name)
        yield from (k, (p * k).sum(), torch.autograd.grad((p * k).sum(), logits)[0])


def test_the_numbers(monkeypatch):
    pool = [*of_first_tokens()]
    for flag in sorted(FLAGS | {"--algo grpo"}):
        cfg, batch = rolled_out(flag, monkeypatch)
        pool += computed(cfg, batch)
        if batch.ref_logp is not None:          # at first the reference is the policy
            pool += computed(cfg, replace(batch, ref_logp=OLD.log()))
    pool = torch.cat([torch.as_tensor(x).detach().double().flatten() for x in pool])
    text = re.sub(r"\$\$.*?\$\$|\$.*?\$|`.+?`", " ", PAGE, flags=re.S)
    shown = set(map(float, re.findall(r"(?<![\w.])-?\d+\.\d{4}\b", text)))
    wrong = [x for x in sorted(shown) if not ((pool - x).abs() < 0.5e-4 + 1e-6).any()]
    assert len(shown) > 60 and not wrong


@pytest.mark.parametrize("name, line", QUOTED)
def test_quoted_line_stands_in_its_function(name, line):
    source = inspect.getsource(getattr(grpo, name)).splitlines()
    assert line in [re.split("  +#", code)[0].strip() for code in source]


def test_all_code_on_the_page_is_known():
    known = {PROBLEM.prompt, *sum(LINES, []), *(line for _, line in QUOTED)} | SETTINGS | FLAGS
    assert all(code in known or hasattr(grpo, code) for code in CODE)
