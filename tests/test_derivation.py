"""docs/derivation.md: every number on the page is what this code computes, every quoted line of code
stands in the function named beside it, every flag is one.

The page's first table is the example; its rewards and all that follows are computed from it. For
each section a function below yields the section's numbers in the order of its text, tables row by
row, with the Config that the section's own flags make.
"""
import inspect
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
import reward as rewards  # noqa: E402
from data import arithmetic  # noqa: E402
from run import batches, flags  # noqa: E402

PAGE = (ROOT / "docs" / "derivation.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


# ------------------------------------------------------------------------------- reading the page

def in_code(text):
    """What stands in backticks."""
    return re.findall(r"`(.+?)`", text)


def numbers(text):
    """The numbers of a text as they are written, but for those in formulas, in code, and those that
    only point at something."""
    text = re.sub(r"\$\$.*?\$\$|\$.*?\$|`.+?`", " ", text, flags=re.S)
    text = re.sub(r"\b(eq\.|section|Algorithm|[Ss]teps?|arXiv) [\d.]*\d", " ", text)
    return re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)


def agrees(shown, value):
    """Four decimals are rounded, fewer are exact."""
    rounding = 0.5e-4 if len(shown.partition(".")[2]) == 4 else 0
    return abs(float(shown) - value) <= rounding + 2e-6


def flags_of(section):
    """The command lines that a section names."""
    return re.findall(r"^- flag: `(.+?)`", section, re.M)


# ------------------------------------------------------------------- the example, off the first table

EXAMPLE = next(iter(SECTIONS))
TABLE = [row.strip("|").split("|") for row in SECTIONS[EXAMPLE].splitlines() if row[:5] == "| $o_"]
LINES = [in_code(row[1]) for row in TABLE]              # of each completion; a line is a token
TEXTS = ["\n" * ("=" in lines[0]) + "\n".join(lines) for lines in LINES]
TOKENS = [re.findall(r"\n?[^\n]+\n?", text) + [""] for text in TEXTS]       # the last is the end
VOCABULARY = sorted({token for row in TOKENS for token in row})
LENGTH = torch.tensor([len(row) for row in TOKENS])
MASK = torch.arange(4) < LENGTH[:, None]                                                    # (4, 4)
PROBLEM = arithmetic.Problem("13*17=", "221")
ENCODING = SimpleNamespace(token_bytes=lambda i: VOCABULARY[i].encode())
PADDING = 1e9                                           # what stands there must not matter


def padded(rows):
    """Lists of numbers, one a token, as a tensor (4, 4)."""
    assert [len(row) for row in rows] == LENGTH.tolist()
    return torch.tensor([[*row, *[PADDING] * (4 - len(row))] for row in rows])


def column(at):
    """A column of the first table, one number a token."""
    return padded([[float(x) for x in row[at].split(",")] for row in TABLE])


OLD, NEW, REF, VALUE = (column(at) for at in (4, 5, 6, 7))


def sampled():
    """The group as the sampler would give it, with the task's own rewards."""
    ids = padded([[VOCABULARY.index(token) for token in row] for row in TOKENS])
    ids = torch.where(MASK, ids, 0).long()
    batch = grpo.Batch(ids, MASK, LENGTH > 0, OLD.log(), torch.zeros(4, dtype=torch.int64))
    return rewards.score(arithmetic, ENCODING, [PROBLEM], batch)


@pytest.fixture
def rollout(monkeypatch):
    """The real `rollout`, with the example in place of what the models would say."""
    models = {"policy": (OLD.log(), VALUE), "ref": (REF.log(), None)}
    monkeypatch.setattr(grpo, "generate", lambda *_: sampled())
    monkeypatch.setattr(batches, "logps", lambda gpt, *_: models[gpt.name])

    def run(cfg):
        """The Batch, with rewards and advantages."""
        policy, ref = (SimpleNamespace(name=name, amp=None) for name in models)
        agent = grpo.Agent(cfg, arithmetic, ENCODING, policy, beta=cfg.beta,
                           ref=ref if cfg.needs_reference else None,
                           critic="value" in cfg.baseline or None)
        return grpo.rollout(agent, [PROBLEM], None)[0]
    return run


def config(flag, **given):
    """The Config of a command line, for this group."""
    chosen, _ = flags.read(grpo.Config, grpo.ALGOS, "", flag.split())
    return grpo.make_config(**dict(prompts=1, group=4, max_new=4) | chosen | given)


def loss_of(cfg, batch, probability, weight=None):
    """The loss once the policy gives the tokens this probability, its gradient by their
    log-probabilities (4, 4), and the statistics."""
    logp = probability.log().requires_grad_()
    if weight is None:
        weight = grpo.token_weights(MASK, cfg.mean, 4, LENGTH.sum(), cfg.max_new)
    loss, stats = grpo.policy_loss(logp, batch.old_logp, batch.ref_logp, batch.adv, MASK, weight,
                                   cfg, cfg.beta)
    return loss.item(), torch.autograd.grad(loss, logp)[0], stats


def surrogate(cfg, batch):
    """min(ratio A, clip(ratio) A), (4, 4): less the loss of each token alone, without the KL."""
    out = torch.zeros(4, 4)
    for at in MASK.nonzero().tolist():
        alone = torch.zeros(4, 4)
        alone[tuple(at)] = 1
        out[tuple(at)] = -loss_of(replace(cfg, kl="watch"), batch, NEW, alone)[0]
    return out


def by_row(*tensors):
    """The numbers of a table with a line for each completion and a column for each tensor, (4, 4)
    for a number a token, (4,) for one."""
    for i in range(4):
        for x in tensors:
            yield from x[i][MASK[i]].tolist() if x.dim() == 2 else [x[i].item()]


# -------------------------------------------------------------------------- the numbers, by section

def example(rollout):
    """The group."""
    cfg = grpo.Config()
    reward = rollout(config("--algo grpo")).reward.sum(1)
    yield from by_row(LENGTH, reward, OLD, NEW, REF, VALUE)
    yield from [cfg.clip_low, cfg.beta, cfg.gamma, cfg.lam]


def raw_reward(rollout, flag):
    """REINFORCE."""
    cfg = config(flag)
    batch = rollout(cfg)
    loss, gradient, _ = loss_of(cfg, batch, OLD)
    yield from [4, cfg.max_new, 1 / 16]
    yield from by_row(batch.adv, gradient)
    yield loss
    batch.adv = grpo.advantages(batch.reward + batch.ends, batch.ends, MASK, torch.zeros(4, 4), None,
                                cfg)[0]
    _, gradient, _ = loss_of(cfg, batch, OLD)
    yield from [1, gradient[1, 0].item(), gradient[0, 0].item()]


def critic(rollout, flag):
    """TD error, GAE, whitening, the critic's loss."""
    cfg = config(flag)
    batch = rollout(cfg)
    delta, adv, plain = (grpo.gae(batch.reward, VALUE, MASK, cfg.gamma, lam)
                         for lam in (0, cfg.lam, 1))
    assert torch.allclose((batch.returns - VALUE)[MASK], adv[MASK], atol=1e-6)
    assert torch.equal(batch.adv, grpo.whiten(adv, MASK))
    yield from by_row(delta, adv, batch.adv)
    yield from [adv[0, 2].item(), cfg.gamma * cfg.lam, adv[0, 1].item(), adv[0, 0].item()]


SKETCH = dict(example=example, raw_reward=raw_reward, critic=critic)
