"""What the rule rewards share: a safe evaluator for arithmetic. Model text never sees `eval`."""
import math
import numbers
import re
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data.run import Fault, by_parts, fit, last_tokens, micro_batches, row_lengths, say, world
from data.tokenizer import step_tokens

NUMERAL = r"[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15}"    # ASCII: int() takes other digits too
TOKEN = re.compile(NUMERAL + "|[-+*/()]")
LONGEST = 200                                   # characters; bounds the time, the depth, the result


def evaluate(text):
    """Exact value of an arithmetic expression as a Fraction, or None for anything else.

    Takes integers and decimals of up to 15 digits, + - * /, unary minus, parentheses and spaces, in
    at most 200 characters: no names, no powers, nothing that can run long.
    """
    squeezed = text.replace(" ", "")
    tokens = TOKEN.findall(squeezed) if len(text) <= LONGEST else []
    apart = re.search(r"[0-9.] +[0-9.]|[0-9]{16}|\.[0-9]*\.", text)      # no one number
    if not tokens or "".join(tokens) != squeezed or apart:
        return None
    tokens.append("")                           # the end
    at = 0

    def take():
        """The next token, which is used up."""
        nonlocal at
        at += 1
        return tokens[at - 1]

    def sum_():
        """A product, or several with + or - between them."""
        value = product()
        while tokens[at] in ("+", "-"):
            value = value + product() if take() == "+" else value - product()
        return value

    def product():
        """An atom, or several with * or / between them."""
        value = atom()
        while tokens[at] in ("*", "/"):
            value = value * atom() if take() == "*" else value / atom()
        return value

    def atom():
        """A number, a sum in parentheses, or minus an atom."""
        token = take()
        if token == "-":
            return -atom()
        if token == "(":
            value = sum_()
            if take() != ")":
                raise SyntaxError
            return value
        if token in ("", ")", "+", "*", "/"):
            raise SyntaxError
        return Fraction(token)

    try:
        value = sum_()
    except (SyntaxError, ZeroDivisionError):
        return None
    return value if tokens[at] == "" else None


def score(task, problems, texts, finished):
    """The components of the rule reward by name, a list of floats each; the reward is their sum.

    A completion that did not finish gave no answer: 0. Raises Fault for what is not a number.
    """
    parts = [task.reward(problem, text) for problem, text in zip(problems, texts)]
    for problem, part in zip(problems, parts):
        if part.keys() != parts[0].keys() or "correct" not in part:
            raise Fault(f"the reward of the prompt {problem.prompt!r} has the components "
                        f"{', '.join(part)}: they must always be the same, among them 'correct'")
        for name, x in part.items():
            if not isinstance(x, numbers.Real) or not math.isfinite(x):
                raise Fault(f"the reward {name!r} of the prompt {problem.prompt!r} is {x!r}, not a "
                            f"finite number")
    return {name: [float(part[name]) if done else 0.0 for part, done in zip(parts, finished)]
            for name in parts[0]}


# ------------------------------------------------------------------- rewards of reasoning steps

def step_rewards(task, problems, texts, parts, batch, cfg, encoding):
    """The rule reward by steps: `reward` (B, T) in the columns `ends` (B, T), their last tokens.

    Outcome supervision takes the completion for one step, and the sum of `parts` for its reward.
    Under process supervision a step earns 1 if it is true; the last, which ends at the last token
    so that stopping is a part of it, only if the answer is correct too: true lines that lead
    elsewhere are no solution.
    """
    last = last_tokens(batch.mask)
    if cfg.supervision == "outcome":
        ends, reward = last, torch.where(last, sum(parts.values())[:, None], 0)
    else:
        ends, reward = last.clone(), torch.zeros_like(batch.logp)
        for i, (problem, text) in enumerate(zip(problems, texts)):
            columns = batch.mask[i].nonzero()[:, 0].tolist()
            ids, found = batch.ids[i, columns].tolist(), task.steps(problem, text) or [(0, False)]
            tokens = step_tokens(encoding, ids, [end for end, _ in found])
            at = [columns[j] for j in tokens[:-1]] + columns[-1:]
            true = [t for _, t in found[:-1]] + [found[-1][1] and parts["correct"][i] > 0]
            for column, t in sorted(zip(at, true), key=lambda x: not x[1]):     # the worst counts
                ends[i, column], reward[i, column] = True, float(t)
    return reward, ends


def at_the_limit(batch, unfinished):
    """The rewards (B, T), at most `unfinished` at the last token of a row that did not end: a
    learned reward may be lower."""
    cut = last_tokens(batch.mask) & ~batch.finished[:, None]
    return torch.where(cut, batch.reward.clamp(max=unfinished), batch.reward)


# -------------------------------------------------------------------------------- learned rewards

def scores(scorer, ids, mask, cfg):
    """The reward model's raw score after each token, (B, T)."""
    read = lambda ids, mask: [scorer(ids.to(scorer.head.weight.device))]
    return by_parts(read, ids, mask, cfg.micro_tokens)[0]


def learned_rewards(scorer, batch, cfg):
    """The learned reward (B, T) where steps end: under outcome supervision the normalised score,
    under process supervision the chance that the step is good."""
    score, (mean, std) = scores(scorer, batch.ids, batch.mask, cfg), scorer.norm
    score = score.sigmoid() if cfg.supervision == "process" else (score - mean) / std
    return torch.where(batch.ends, score, 0)


def choose(reward, noise, source):
    """The chance that each of K completions is people's choice, (n, K): they choose the best of
    reward (n, K), any of several equals alike, but in a share `noise` of them a worse one."""
    best = reward == reward.amax(1, keepdim=True)
    chance = best / best.sum(1, keepdim=True)
    for row, good in zip(chance, best.tolist()):
        worse = [k for k, x in enumerate(good) if not x]
        if source.random() < noise and worse:
            row.copy_(F.one_hot(torch.tensor(source.choice(worse)), len(good)))
    return chance


def reward_loss(score, label, K):
    """Negative log-likelihood of the labels, summed; score and label (n,).

    K > 1: rows come in sets of K, the label is 1 for the chosen one: -log softmax of its score
    ("Fine-Tuning Language Models from Human Preferences"; K = 2 is Bradley-Terry). K = 1: the label
    is the chance that a step is good: binary cross-entropy.
    """
    if K == 1:
        return F.binary_cross_entropy_with_logits(score, label, reduction="sum")
    return -(label.view(-1, K) * score.view(-1, K).log_softmax(1)).sum()


def quality(score, label, K):
    """Accuracy, and expected calibration error (10 bins), of scores on labels, both (n,). Of K
    completions any that is as likely as the best to be chosen is a right guess."""
    if K == 1:
        p = score.sigmoid()
        sure, hit = torch.maximum(p, 1 - p), ((p > 0.5) == (label > 0.5)).float()
        came = hit
    else:
        sure, pick = score.view(-1, K).softmax(1).max(1)
        came = label.view(-1, K).gather(1, pick[:, None])[:, 0]         # the chance that it is
        hit = (came == label.view(-1, K).amax(1)).float()
    gap = torch.zeros(10).index_add(0, (sure * 10).long().clamp(max=9), sure - came)
    return hit.mean().item(), (gap.abs().sum() / len(hit)).item()


def gather(rows, K):
    """Labelled rows of all ranks for each, in sets of K, in the order of their problems, on the
    CPU."""
    rows = {name: x.cpu() for name, x in rows.items()}
    if not dist.is_initialized():
        return rows
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return {name: torch.stack(x.unflatten(0, (len(parts), -1, K)).unbind(0), 1).flatten(0, 2)
            for name, x in join(*parts).items()}


def rollout_labels(complete, problems, batch, group, source, tries=4):
    """Labels (B, T) of steps by Monte Carlo: the share of `tries` completions from the step's end
    that come out right, by `complete(problems, tries, source, begun)`. The last step's is its own
    truth. `group`: rows of each problem."""
    label = batch.reward.clone()
    places = (batch.ends & ~last_tokens(batch.mask)).nonzero().tolist()
    for at in (places[i:i + 128] for i in range(0, len(places), 128)):
        begun = [batch.ids[i, :t + 1].tolist() for i, t in at]
        _, _, parts = complete([problems[i // group] for i, _ in at], tries, source, begun)
        label[tuple(torch.tensor(at).T)] = parts["correct"].view(-1, tries).mean(1)
    return label


def join(*sets):
    """Sets of labelled rows, each a dict of (R, T) tensors, as one, padded to the longest."""
    T = max(x["ids"].size(1) for x in sets)
    return {name: torch.cat([F.pad(x[name], (0, T - x[name].size(1))) for x in sets])
            for name in sets[0]}


def replay(history, rows, K, source):
    """`rows` labelled rows of the history at random, whole sets of K."""
    sets = range(len(history["ids"]) // K)
    chosen = torch.tensor(source.sample(sets, min(rows // K, len(sets))), dtype=torch.long)
    return {name: x.unflatten(0, (-1, K))[chosen].flatten(0, 1) for name, x in history.items()}


def learn(scorer, rows, history, cfg, source):
    """Fit the reward model to this rank's labelled rows, `cfg.choices` completions of each problem,
    and to a tenth as many of `history`; a tenth of the problems is kept apart to measure it.
    Returns the history with the rows of all ranks, and the measures.

    rows: ids, mask, ends, and as label the truth of each step, (R, T). The fit sees which of K
    completions is the best, or whether each step is good; a share `cfg.label_noise` of it is wrong.
    """
    K = cfg.choices if cfg.supervision == "outcome" else 1
    rows = gather(rows, cfg.choices)
    labels = rows["label"][rows["ends"]]
    if K > 1:
        labels = choose(labels.view(-1, K), cfg.label_noise, source).flatten()
    else:
        wrong = torch.tensor([source.random() < cfg.label_noise for _ in labels])
        labels = torch.where(wrong, 1 - labels, labels)
    rows["label"] = rows["label"].masked_scatter(rows["ends"], labels)

    apart = max(1, cfg.fit_prompts // 10) * cfg.choices
    data, test = ({name: x[part] for name, x in rows.items()}
                  for part in (slice(apart, None), slice(apart)))
    if history:
        data = join(data, replay(history, len(data["ids"]) // 10, K, source))
    fit_scorer(scorer, data, K, cfg, source)

    score = scores(scorer, test["ids"], test["mask"], cfg)[test["ends"]]
    accuracy, error = quality(score, test["label"][test["ends"]], K)
    history = join(history, rows) if history else rows
    if K > 1:       # mean 0, std 1 of what the references wrote: the last one's alone are too alike
        score = scores(scorer, history["ids"], history["mask"], cfg)[history["ends"]]
        scorer.norm.copy_(torch.stack([score.mean(), score.std()]))
    say(f"reward model  held out: accuracy {accuracy:.1%}  calibration error {error:.3f}")
    return history, {"rm_accuracy": accuracy, "rm_error": error}


def fit_scorer(scorer, data, K, cfg, source):
    """One pass over labelled rows that every rank holds, in sets of K, 64 rows a step."""
    n, (rank, ranks) = len(data["ids"]) // K, world()
    steps, order = max(1, n * K // 64), torch.tensor(source.sample(range(n), n))
    longest = row_lengths(data["mask"]).view(-1, K).amax(1)                         # of each set

    def losses(step):
        """The terms of one optimizer step, those of this rank's sets."""
        sets = order.tensor_split(steps)[step]
        rows_of = lambda sets: (sets[:, None] * K + torch.arange(K)).flatten()
        count = data["ends"][rows_of(sets)].sum() / K                               # of all ranks
        sets = sets[rank::ranks]
        for micro, T in micro_batches(longest[sets], cfg.micro_tokens // K):
            part = {name: x[rows_of(sets[micro]), :T].to(scorer.head.weight.device)
                    for name, x in data.items()}
            score = scorer(part["ids"])[part["ends"]]
            yield reward_loss(score, part["label"][part["ends"]], K) / count
    fit("reward model", scorer, losses, steps, cfg.fit_lr, cfg.grad_clip)
