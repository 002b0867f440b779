"""docs/derivation.md: every number on the page is what this code computes, every quoted line of
code stands in the function named beside it, every flag is one.

The page's first table is the example; its rewards and all that follows are computed from it. For
each section a function below yields the section's numbers in the order of its text, tables row by
row, with the Config that the section's own flags make.
"""
import inspect
import random
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
import reward as rewards  # noqa: E402
from data import arithmetic  # noqa: E402
from run import config, passes  # noqa: E402

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
    """Four decimals are rounded, all others exact, but for the rounding of float32."""
    rounding = 0.5e-4 if len(shown.partition(".")[2]) == 4 else 0
    return abs(float(shown) - value) <= rounding + 1e-6


def flags_of(section):
    """The command lines that a section names as its own."""
    return in_code(" ".join(re.findall(r"^- flag: .+", section, re.M)))


# ----------------------------------------------------------- the example, read off the first table

EXAMPLE = next(iter(SECTIONS))
TABLE = [row.strip("|").split("|") for row in SECTIONS[EXAMPLE].splitlines() if row[:5] == "| $o_"]
LINES = [in_code(row[1]) for row in TABLE]              # of each completion; a line is a token
TEXTS = ["\n" * ("=" in lines[0]) + "\n".join(lines) for lines in LINES]
TOKENS = [re.findall(r"\n?[^\n]+\n?", text) + [""] for text in TEXTS]       # the last is the end
VOCABULARY = sorted({token for row in TOKENS for token in row})
LENGTH = torch.tensor([len(row) for row in TOKENS])
MASK = torch.arange(4) < LENGTH[:, None]                                                    # (4, 4)
PROBLEM = arithmetic.Problem("13*17=", "221")
ENCODING = SimpleNamespace(token_bytes=lambda i: VOCABULARY[i].encode(), stop=())
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
    rewards.score_by_rule(SimpleNamespace(task=arithmetic, encoding=ENCODING), [PROBLEM], batch)
    return batch


@pytest.fixture
def rollout(monkeypatch):
    """The real `rollout`, with the example in place of what the models would say."""
    models = {"policy": (OLD.log(), VALUE), "ref": (REF.log(), None)}
    monkeypatch.setattr(grpo, "generate", lambda *_: sampled())
    monkeypatch.setattr(grpo, "logps", lambda gpt, *_: models[gpt.name])

    def run(cfg):
        """The Batch, with rewards and advantages."""
        policy, ref = (SimpleNamespace(name=name, amp=None) for name in models)
        agent = grpo.Agent(cfg, arithmetic, ENCODING, policy, beta=cfg.beta,
                           ref=ref if cfg.needs_reference else None,
                           critic="value" in cfg.baseline or None)
        return grpo.rollout(agent, [PROBLEM], random.Random(0))[0]
    return run


def config_of(flag):
    """The Config of a command line, for this group."""
    _, chosen = config.read(grpo.Config, "", flag.split())
    return grpo.make_config(**dict(prompts=1, group=4, max_new=4) | chosen)


def weights(cfg):
    """What each token counts."""
    return grpo.token_weights(MASK, cfg.loss_mean, 4, LENGTH.sum(), cfg.max_new)


def loss_of(cfg, batch, probability, weight=None):
    """The loss once the policy gives the tokens this probability, its gradient by their
    log-probabilities (4, 4), and the statistics."""
    logp, weight = probability.log().requires_grad_(), weights(cfg) if weight is None else weight
    loss, stats = grpo.policy_loss(logp, batch, weight, LENGTH.sum(), cfg, cfg.beta)
    return loss.item(), torch.autograd.grad(loss, logp)[0], stats


def surrogate(cfg, batch, adv=None):
    """min(ratio A, clip(ratio) A) of each token, (4, 4): less its loss alone, without the KL; with
    `adv`, that advantage for all."""
    batch, out = batch if adv is None else replace(batch, adv=torch.full((4, 4), adv)), []
    for alone in torch.eye(16).view(16, 4, 4):
        out.append(-loss_of(replace(cfg, kl="watch"), batch, NEW, alone)[0])
    return torch.tensor(out).view(4, 4)


def old_ratio(cfg, batch):
    """The ratio as long as the policy is the one that sampled."""
    return surrogate(cfg, replace(batch, old_logp=NEW.log()), 1.0)[0, 0]


def mean_k3(cfg, probability):
    """The mean of k3 as the loss has it."""
    k3 = grpo.kl_estimate(probability.log(), REF.log(), "k3")
    return torch.where(MASK, weights(cfg) * k3, 0).sum().item()


def mean_and_std(x, score):
    """Those that make x its standard score, both (n,)."""
    high, low = x.argmax(), x.argmin()
    std = (x[high] - x[low]) / (score[high] - score[low])
    return [(x[low] - std * score[low]).item(), std.item()]


def by_row(*tensors):
    """The numbers of a table with a line for each completion and a column for each tensor, (4, 4)
    for a number a token, (4,) for one."""
    for i in range(4):
        for x in tensors:
            yield from x[i][MASK[i]].tolist() if x.dim() == 2 else [x[i].item()]


# ------------------------------------------------------------------ the numbers, section by section

def example(section, rollout):
    """The group; what the task gives for three answers; the settings."""
    for answer in (TEXTS[0], "~221", TEXTS[1]):
        yield sum(arithmetic.reward(PROBLEM, answer).values())
    yield from by_row(LENGTH, rollout(config_of("--algo grpo")).reward.sum(1), OLD, NEW, REF, VALUE)
    cfg = grpo.Config()
    yield from [cfg.clip_low, cfg.beta, grpo.GAMMA, cfg.lam]
    assert cfg.clip_low == cfg.clip_high


def raw_reward(section, rollout):
    """REINFORCE, and with 1 more for every completion."""
    cfg = config_of(*flags_of(section))
    batch = rollout(cfg)
    loss, gradient, _ = loss_of(cfg, batch, OLD)
    for x in batch.adv, gradient:                       # one number for a row, alike in two and two
        assert all((row[on] == row[0]).all() for row, on in zip(x, MASK))
        assert torch.equal(x[0, 0], x[3, 0]) and torch.equal(x[1, 0], x[2, 0])
    yield from [batch.adv[0, 0], batch.adv[1, 0], 4, cfg.max_new, weights(cfg)[0, 0]]
    yield old_ratio(cfg, batch)
    yield from [-weights(cfg)[0, 0], LENGTH[0], LENGTH[3], batch.reward[0].sum(), loss]
    yield from [LENGTH[0], LENGTH[3]]
    yield from [gradient[0, 0], gradient[1, 0], batch.reward[1].sum(), 1]
    more = batch.reward + batch.ends
    batch.adv = grpo.advantages(more, batch.ends, MASK, torch.zeros(4, 4), None, cfg)[0]
    gradient = loss_of(cfg, batch, OLD)[1]
    yield from [gradient[0, 0], gradient[1, 0]]


def critic(section, rollout):
    """The TD error is GAE with lambda 0, the reward less the value is that with lambda 1."""
    cfg = config_of(*flags_of(section))
    batch = rollout(cfg)
    delta, adv, plain = (grpo.gae(batch.reward, VALUE, MASK, grpo.GAMMA, lam)
                         for lam in (0, cfg.lam, 1))
    assert torch.allclose((batch.returns - VALUE)[MASK], adv[MASK], atol=1e-6)
    yield from by_row(delta, adv, batch.adv)

    yield 0                                             # the value after the last token: of padding
    yield from [batch.reward[0, 2], VALUE[0, 2], adv[0, 2]]
    yield from [delta[0, 1], grpo.GAMMA * cfg.lam, adv[0, 2], adv[0, 1]]
    yield from [delta[0, 0], grpo.GAMMA * cfg.lam, adv[0, 1], adv[0, 0]]
    yield from [adv[0, 0], adv[2, 0], 0, delta[0, 0], 1, plain[0, 0], plain[2, 0]]
    assert delta[0, 0] == delta[2, 0] and plain[0, 0] == batch.reward[0].sum() - VALUE[0, 0]
    yield from [LENGTH.sum(), *mean_and_std(adv[MASK], batch.adv[MASK])]
    yield from [adv[3, 3], batch.adv[3, 3], *batch.returns[0, :3]]
    yield from [loss_of(cfg, batch, OLD)[0], old_ratio(cfg, batch)]
    yield grpo.value_loss(VALUE, VALUE, batch.returns, weights(cfg))
    yield grpo.VALUE_COEF


def clip(section, rollout):
    """The ratio is the unclipped product with the advantage 1."""
    cfg = config_of(*flags_of(section))
    unclipped = replace(cfg, clip_low=grpo.NO_CLIP, clip_high=grpo.NO_CLIP)
    batch = rollout(cfg)
    ratio = surrogate(unclipped, batch, 1.0)
    loss, gradient, stats = loss_of(cfg, batch, NEW)
    yield from by_row(ratio, surrogate(cfg, batch), gradient)

    yield from [OLD[0, 1], NEW[0, 1], NEW[0, 1], OLD[0, 1], ratio[0, 1]]
    yield surrogate(cfg, batch, 1.0)[0, 1]
    yield from [NEW[2, 1], OLD[2, 1], ratio[2, 1], -surrogate(cfg, batch, -1.0)[2, 1]]
    assert (gradient[MASK] == 0).sum() == 3
    yield from [stats["clip_share"], ratio[2, 0], gradient[2, 0]]
    yield from [loss, loss_of(unclipped, batch, NEW)[0], cfg.clip_low]


def reference(section, rollout):
    """The KL in PPO's rewards; the estimators over all first tokens, and their mean gradients."""
    ppo, in_loss = map(config_of, flags_of(section))
    batch = rollout(ppo)
    k1 = grpo.kl_estimate(OLD.log(), REF.log(), "k1")
    with mock.patch.object(grpo, "GAMMA", 0.0):
        of_token = rollout(ppo).returns             # without a future
    yield from by_row(k1, of_token, batch.returns - VALUE)
    yield from [loss_of(ppo, batch, NEW)[0], loss_of(replace(ppo, kl="none"), rollout(in_loss), NEW)[0]]

    p, ref = (torch.tensor([*x[[0, 1, 3], 0], 1 - x[[0, 1, 3], 0].sum()]) for x in (NEW, REF))
    logits = p.log().requires_grad_()
    k, slope = {}, {}
    for name in ("k1", "k2", "k3"):
        estimate = grpo.kl_estimate(logits.log_softmax(0), ref.log(), name)
        slope[name] = torch.autograd.grad((p * estimate).sum(), logits)[0]
        k[name] = estimate.detach()
    for i in range(4):
        yield from [p[i], ref[i], *(k[name][i] for name in k), slope["k2"][i], slope["k3"][i]]
    yield from [(p * k[name]).sum() for name in k]

    policy = logits.softmax(0)
    exact = {"k2": (policy * (policy / ref).log()).sum(), "k3": (ref * (ref / policy).log()).sum()}
    for name, kl in exact.items():
        gradient = torch.autograd.grad(kl, logits, retain_graph=True)[0]
        torch.testing.assert_close(slope[name], gradient, atol=1e-6, rtol=0)
    torch.testing.assert_close(slope["k3"], p - ref, atol=1e-6, rtol=0)
    yield from [exact["k2"].item(), slope["k1"].abs().max()]

    batch = rollout(in_loss)
    loss = loss_of(in_loss, batch, NEW)[0]
    kl = mean_k3(in_loss, NEW)
    yield from [kl, in_loss.beta, kl, in_loss.beta * kl, loss]
    without = loss_of(replace(in_loss, kl="watch"), batch, NEW)[0]
    assert loss - without == pytest.approx(in_loss.beta * kl, abs=1e-6)


def group(section, rollout):
    """GRPO with the policy of step 3, and what is ours where the paper is silent."""
    cfg = config_of(*flags_of(section))
    batch = rollout(cfg)
    loss, gradient, _ = loss_of(cfg, batch, NEW)
    k3 = grpo.kl_estimate(NEW.log(), REF.log(), cfg.estimator)
    rows = [loss_of(cfg, batch, NEW, weights(cfg) * row[:, None])[0] for row in torch.eye(4)]
    yield from by_row(batch.adv, surrogate(cfg, batch), k3, torch.tensor(rows), gradient)

    reward = batch.reward.sum(1)
    yield from [*reward, *mean_and_std(reward, batch.adv[:, 0]), loss, gradient[0, 0]]
    assert gradient[0, 0] == gradient[0, 1] and loss == pytest.approx(sum(rows))
    yield outcome_scores(torch.tensor([1.0, 5, 2, 2, 0])).square().mean()
    yield from [reward.std(), batch.adv[0, 0] / reward.std(), batch.adv[1, 0] / reward.std()]
    yield from [*(10 * reward), *outcome_scores(10 * reward)]
    yield outcome_scores(torch.full((4,), 0.1)).abs().max()
    yield from [weights(cfg)[3, 0], weights(cfg)[1, 0]]


def outcome_scores(reward):
    """The scores of one group, (G,)."""
    cfg = grpo.Config(group=len(reward))
    return grpo.group_scores(reward[:, None], torch.ones(len(reward), 1, dtype=torch.bool), cfg)[0][:, 0]


def process(section, rollout):
    """Rewards of steps; their mean and std are what undoes the standardising."""
    cfg = config_of(*flags_of(section))
    batch = rollout(cfg)
    score = grpo.group_scores(batch.reward, batch.ends, cfg)[0]
    for i, ends in enumerate(batch.ends):
        yield from [*ends.nonzero()[:, 0] + 1, *batch.reward[i, ends], *score[i, ends],
                    *batch.adv[i, MASK[i]]]
    steps = batch.reward[batch.ends]
    yield from [steps.max(), len(steps), *mean_and_std(steps, score[batch.ends])]
    yield from [batch.adv[2, 0], batch.adv[2, 1], batch.adv[3, 0], batch.adv[0, 0]]
    assert batch.adv[2, 1] == batch.adv[1, 0]
    yield loss_of(cfg, batch, NEW)[0]


def six_losses(section, rollout):
    """At the old and at the new policy, and the critic's term at its values."""
    for flag in [span for span in in_code(section) if span[:2] == "--"]:
        cfg = config_of(flag)
        batch = rollout(cfg)
        before, after = (loss_of(cfg, batch, policy)[0] for policy in (OLD, NEW))
        assert after < before
        yield from [before, after]
        if batch.value is not None:
            yield grpo.VALUE_COEF * grpo.value_loss(VALUE, VALUE, batch.returns, weights(cfg))


def iterations(section, rollout, monkeypatch):
    """The real `train`, of models and steps that do nothing."""
    cfg, made, fitted, loaded = config_of(*flags_of(section)), [], [], []

    def generate(agent, problems, group, rng):
        """Completions of one token."""
        n = len(problems) * group
        made.append(n)
        return grpo.Batch(torch.zeros(n, 1).long(), torch.ones(n, 1, dtype=torch.bool), None, None,
                          None)
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(rewards, "of_rule", lambda agent, b: (torch.rand(b.ids.shape), b.mask))
    monkeypatch.setattr(rewards, "scores", lambda model, ids, *_: torch.rand(ids.shape))
    monkeypatch.setattr(rewards, "fit", lambda model, data, *_: fitted.append(len(data["ids"])))
    monkeypatch.setattr(grpo.dist, "copy_weights", lambda copied, policy: loaded.append((copied, policy)))
    agent = grpo.Agent(cfg, arithmetic, ENCODING, "the policy", ref="the reference",
                       reward_model=SimpleNamespace(norm=torch.zeros(2)))
    begun = cfg, arithmetic, ENCODING, "the policy", range(1000), [PROBLEM]
    for module, name, found in ((grpo.setup, "begin", begun), (grpo, "new_agent", agent), (grpo, "train_step", (None, {})),
                                (grpo.report, "log_step", None), (grpo, "finish_step", None)):
        monkeypatch.setattr(module, name, lambda *_, found=found: found)
    grpo.train(cfg, arithmetic)
    labelled = sum(made) // 2
    learned, replayed = fitted[0], fitted[1] - fitted[0]
    assert len(agent.history["ids"]) == 2 * learned
    apart = labelled - learned
    assert loaded == [("the reference", "the policy")] * 2
    yield from [rewards.FIT_STEPS * cfg.prompts, rewards.CHOICES, labelled, apart, apart / rewards.CHOICES]
    yield from [learned, replayed]
    yield round(100 * replayed / learned)


def first_update(section, rollout):
    """Eq. 21, and the loss of the first update with other settings."""
    cfg = config_of("--algo grpo")
    batch = rollout(cfg)
    loss, gradient, stats = loss_of(cfg, batch, OLD)
    bracket = -gradient / torch.where(MASK, weights(cfg), 1)
    eq_21 = batch.adv + cfg.beta * (REF / OLD - 1)
    torch.testing.assert_close(bracket[MASK], eq_21[MASK], atol=1e-6, rtol=0)
    at_reference = loss_of(cfg, replace(batch, ref_logp=OLD.log()), OLD)[0]
    assert stats["clip_share"] == 0

    yield at_reference                                  # in the title
    yield from [old_ratio(cfg, batch), (weights(cfg) * batch.adv).sum()]
    yield from [cfg.beta, mean_k3(cfg, OLD), loss, 0]
    yield from [OLD[0, 0], REF[0, 0]]
    yield from [batch.adv[0, 0], cfg.beta, REF[0, 0], OLD[0, 0], 1, bracket[0, 0], gradient[0, 0]]
    yield from [bracket[2, 0], gradient[2, 0]]
    yield from [batch.adv[1, 0], cfg.beta, REF[1, 0], OLD[1, 0], 1, bracket[1, 0], gradient[1, 0]]
    yield 0
    for flag in [span for span in in_code(section) if span[:2] == "--"]:
        cfg = config_of(flag)
        yield loss_of(cfg, rollout(cfg), OLD)[0]


def summaries(section, rollout):
    """The example without the std; and that GAE at lambda 0 is the TD error."""
    found = torch.tensor([float(x) for x in numbers(section)[:3]])
    yield from [*found, *outcome_scores(found), *(found - found.mean())]
    td = torch.tensor([0.2, 0.8, 0.2])                  # of step 2's table, as its values and a reward of 2
    at_0 = grpo.gae(torch.tensor([[0.0, 0, 2]]), torch.tensor([[0.8, 1, 1.8]]), torch.ones(1, 3, dtype=torch.bool), 1.0, 0.0)
    torch.testing.assert_close(at_0[0], td)
    yield 0


# ------------------------------------------------------------------------------------- the page

STEPS = [example, raw_reward, critic, clip, reference, group, process, six_losses, iterations, first_update, summaries]


@pytest.mark.parametrize("title, computed", list(zip(SECTIONS, STEPS, strict=True)), ids=SECTIONS)
def test_numbers_of_a_section(title, computed, rollout, monkeypatch):
    """All of them, in their order."""
    more = [monkeypatch] if computed is iterations else []
    computed = [float(x) for x in computed(SECTIONS[title], rollout, *more)]
    shown = numbers(re.sub(r"^\d\. ", "", title) + "\n" + SECTIONS[title])
    wrong = [pair for pair in zip(shown, computed) if not agrees(*pair)]
    assert not wrong, f"shown and computed, first of {len(wrong)} that differ: {wrong[0]}"
    assert len(shown) == len(computed)


def test_no_number_escapes():
    """Outside the sections there is none but the paper's, and none of the example in a formula."""
    head = PAGE[:PAGE.index("\n## ")]
    formulas = re.findall(r"\$\$.*?\$\$|\$.*?\$", PAGE, re.S)
    assert numbers(head) == [] and not re.search(r"\d\.\d|\d\d", "".join(formulas))


def function(name):
    """The function of this code with that name, or None."""
    found = [getattr(module, name, None) for module in (grpo, rewards)]
    return next(filter(inspect.isfunction, found), None)


QUOTED = re.findall(r"^- in `(.+?)`: `(.+)`$", PAGE, re.M)


@pytest.mark.parametrize("name, line", QUOTED)
def test_quoted_line_stands_in_its_function(name, line):
    """Whole, but for its comment."""
    source = inspect.getsource(function(name)).splitlines()
    assert line in [re.split("  +#", code)[0].strip() for code in source]


def test_all_code_on_the_page_is_known():
    """A command line that is accepted, a setting, a function, a quoted line, or the task's text."""
    settings = {f"--{f.name}" for f in fields(grpo.Config)}
    known = {PROBLEM.prompt, *sum(LINES, []), *(line for _, line in QUOTED)} | settings
    for code in in_code(PAGE):
        if code.startswith("--") and code not in settings:
            assert config_of(code)
        else:
            assert code in known or function(code), code


def test_every_step_quotes_its_code_and_names_its_flag():
    steps = [title for title in SECTIONS if title[0].isdigit()]
    assert [int(title[0]) for title in steps] == [1, 2, 3, 4, 5, 6]
    for title in steps:
        assert flags_of(SECTIONS[title]) and "\n- in `" in SECTIONS[title], title


def test_tables_have_the_completions_in_order():
    assert re.fullmatch("(1234)+", "".join(re.findall(r"^\| \$o_(\d)\$ \|", PAGE, re.M)))
