"""Rewards of completions and of their steps, by rule or learned: labels, models, fit, replay."""
import torch
import torch.nn.functional as F

from data import UserError, check_steps, rewards_of
from data.tokenizer import decode, step_tokens
from model import send
from run import batches, dist, warm_start

FIT_LR = 1e-3           # peak learning rate up to 256 channels, then as 1/width (arXiv 2203.03466)
LABEL_NOISE = 0.0       # fraction of wrong labels, to study imperfect annotators

# ------------------------------------------------------------------------------- the rule's reward

def score(task, encoding, problems, batch):
    """Fills in each row's problem, its decoded text, and the components of its rule reward."""
    group, rows = len(batch.ids) // len(problems), batch.ids.tolist()
    starts, stops = batch.start.tolist(), batches.row_lengths(batch.mask).tolist()
    batch.problems = [p for p in problems for _ in range(group)]
    batch.texts = [decode(encoding, row[a:b]) for row, a, b in zip(rows, starts, stops)]
    tokens = [b - a for a, b in zip(starts, stops)]
    batch.components = rule_components(task, batch, tokens)
    return batch

def rule_components(task, batch, tokens):
    """The components (B,) of the rule reward by name; the reward is their sum. A completion that
    was cut off earns 0. See `rewards_of`."""
    rows = rewards_of(task, batch.problems, batch.texts, tokens)
    return {name: torch.tensor([float(row[name]) for row in rows], device=batch.ids.device)
            * batch.finished for name in rows[0]}

def of_steps(task, batch, cfg, encoding):
    """The rule's reward (B, T) of each step, at the step's last token, and a mask `ends` (B, T) of
    these tokens.

    Outcome supervision: one step, the whole completion; its reward is the sum of its components, 0
    if they cancel up to rounding. Process supervision: 1 for a true step. The last step ends at the
    completion's last token, so it includes stopping, and earns 1 only if the answer is correct too.
    """
    last = batches.last_tokens(batch.mask)
    if cfg.supervision == "outcome":
        parts = torch.stack([*batch.components.values()], 1)                                # (B, n)
        total, size = parts.sum(1, True), parts.abs().sum(1, True)
        return torch.where(last & (total.abs() > 1e-6 * size), total, 0), last
    device, all_ids, mask = last.device, batch.ids.cpu(), batch.mask.cpu()
    ends, reward, correct = last.cpu(), torch.zeros(mask.shape), batch.components["correct"].cpu()
    for i, (problem, text) in enumerate(zip(batch.problems, batch.texts)):
        columns = mask[i].nonzero()[:, 0].tolist()
        ids, found = all_ids[i, columns].tolist(), task.steps(problem, text)
        check_steps(problem, text, found)
        found = found or [(0, False)]
        tokens = step_tokens(encoding, ids, [end for end, _ in found])
        at = [columns[j] for j in tokens[:-1]] + columns[-1:]
        good = [truth for _, truth in found[:-1]] + [found[-1][1] and correct[i] > 0]
        ends[i, at], reward[i, at] = True, 1.0
        # Steps may end at the same token, which then earns 0 if any of them is false.
        reward[i, [column for column, truth in zip(at, good) if not truth]] = 0.0
    return send(reward, device), send(ends, device)

def at_the_limit(batch, truncated_reward):
    """The rewards (B, T), capped at `truncated_reward` at the last token of each row that was cut
    off. A learned reward below the cap is kept."""
    cut = batches.last_tokens(batch.mask) & ~batch.finished[:, None]
    return torch.where(cut, batch.reward.clamp(max=truncated_reward), batch.reward)

# -------------------------------------------------------------------------------- learned rewards

def scores(reward_model, ids, mask, cfg):
    """The reward model's raw score after each token, (B, T)."""
    def of_rows(ids, mask):
        """The scores of some rows, for `in_micro_batches`."""
        return [reward_model(ids, mask)]
    return batches.in_micro_batches(of_rows, ids, mask, cfg.micro_tokens)[0]

def learned(reward_model, batch, cfg):
    """The learned reward (B, T) at the ends of steps: the normalised score under outcome
    supervision, the probability that the step is good under process supervision."""
    raw, (mean, std) = scores(reward_model, batch.ids, batch.mask, cfg), reward_model.norm
    reward = raw.sigmoid() if cfg.supervision == "process" else (raw - mean) / std
    return torch.where(batch.ends, reward, 0)

def reward_loss(score, label, K):
    """Negative log-likelihood of the labels, summed; score and label (n,).

    K > 1: the labels are each row's probability of being chosen among its K, and the loss is the
    cross-entropy with the softmax of their scores (Ziegler et al. 2019; K = 2 is Bradley-Terry).
    K = 1: the label is the probability that a step is good; the loss is binary cross-entropy.
    """
    if K == 1:
        return F.binary_cross_entropy_with_logits(score, label, reduction="sum")
    return -(label.view(-1, K) * score.view(-1, K).log_softmax(1)).sum()

# ------------------------------------------------------------------------------------- the labels

def choose(reward, noise, rng):
    """The probability (n, K) that an annotator chooses each of K completions: the one with the
    highest reward (n, K), uniformly among ties, but in a fraction `noise` of sets a worse one."""
    best = reward == reward.amax(1, keepdim=True)
    chance = best / best.sum(1, keepdim=True)
    for row, good in zip(chance, best.tolist()):
        worse = [k for k, x in enumerate(good) if not x]
        if rng.random() < noise and worse:
            row.copy_(F.one_hot(torch.tensor(rng.choice(worse)), len(good)))
    return chance

def noisy_labels(rows, K, noise, rng):
    """`rows` with an annotator's labels: which of K completions is best or, for K = 1, whether each
    step is good. A fraction `noise` of the labels is wrong."""
    labels = rows["label"][rows["ends"]]
    if K > 1:
        labels = choose(labels.view(-1, K), noise, rng)
    else:
        wrong = torch.tensor([rng.random() < noise for _ in labels])
        labels = torch.where(wrong, 1 - labels, labels)
    return rows | {"label": rows["label"].masked_scatter(rows["ends"], labels)}

def rollout_labels(complete, agent, batch, rng, tries=4):
    """Monte Carlo labels (B, T) of steps: the share of `tries` continuations from a step's end that
    are right. `complete` is grpo.complete. A last step keeps its true label."""
    ids, start, label = batch.ids.cpu(), batch.start.cpu(), batch.reward.to("cpu", copy=True)
    places = (batch.ends & ~batches.last_tokens(batch.mask)).cpu().nonzero()               # (n, 2)
    for row, column in (part.T for part in places.split(128) if len(part)):
        prefixes = [ids[i, :t + 1].tolist() for i, t in zip(row, column)]
        room = (agent.cfg.max_new - (column + 1 - start[row])).tolist()         # tokens left
        u = dist.uniform(rng, len(prefixes), tries, max(room)).flatten(0, 1)
        ended = complete(agent, prefixes, tries, u, room)
        ended.start = start[row].repeat_interleave(tries)           # texts include the prefix
        score(agent.task, agent.encoding, [batch.problems[i] for i in row], ended)
        label[row, column] = ended.components["correct"].view(-1, tries).mean(1).cpu()
    return send(label, batch.ids.device)

# ---------------------------------------------------------------------------------------- the fit

def refit(reward_model, rows, history, cfg, rng):
    """Fits the reward model to this rank's labelled rows, `cfg.choices` completions per problem,
    plus a tenth as many from `history`. The first tenth of the rows is held out to measure the fit;
    its labels are as noisy as the others. Returns the history with the fitted rows added, and the
    metrics. rows: ids, mask, ends, and the truth of each step as label, (R, T).
    """
    K = cfg.choices if cfg.supervision == "outcome" else 1
    rows = noisy_labels(batches.of_all_ranks(rows, cfg.choices), K, LABEL_NOISE, rng)
    apart = cfg.fit_prompts // 10 * cfg.choices
    train, test = ({name: x[part] for name, x in rows.items()}
                   for part in (slice(apart, None), slice(apart)))
    data = train
    if history:
        data = batches.concatenate(train, replay(history, len(train["ids"]) // 10, K, rng))
    fit(reward_model, data, K, cfg, rng)

    score = scores(reward_model, test["ids"], test["mask"], cfg)[test["ends"]]
    if not score.isfinite().all():
        raise UserError("the reward model's scores are not finite: lower FIT_LR in reward.py")
    accuracy, error = quality(score, test["label"][test["ends"]], K)
    history = batches.concatenate(history, train) if history else train
    if K > 1:       # mean 0, std 1 over the whole history: the latest rows alone vary too little
        score = scores(reward_model, history["ids"], history["mask"], cfg)[history["ends"]]
        if not score.std() > 1e-6 * score.mean().abs():
            raise UserError("the reward model gives every completion the same score: there is "
                            "nothing to learn from")
        reward_model.norm.copy_(torch.stack([score.mean(), score.std()]))
    return history, {"rm_accuracy": accuracy, "rm_error": error}

def fit(reward_model, data, K, cfg, rng):
    """One pass over labelled rows in sets of K, 64 rows a step. Every rank has all rows."""
    n = len(data["ids"]) // K
    steps, order = min(n, max(1, n * K // 64)), torch.tensor(rng.sample(range(n), n))
    whole = {name: data[name].unflatten(0, (n, K)) for name in ("ids", "mask")}     # (n, K, T)
    device = reward_model.head.weight.device
    budget = max(1, (cfg.micro_tokens or batches.MICRO_TOKENS) // K)

    def rows_of(sets):
        """The row indices of some sets."""
        return (sets[:, None] * K + torch.arange(K)).flatten()

    def losses(step):
        """The loss terms of one optimizer step, from this rank's sets."""
        sets = order.tensor_split(steps)[step]
        count = data["ends"][rows_of(sets)].sum() / K                           # over all ranks
        sets = dist.of_rank(sets)
        ids, mask = whole["ids"][sets].flatten(1), whole["mask"][sets].any(1)
        for micro, T in batches.micro_batches(ids, mask, budget):
            part = {name: x[rows_of(sets[micro]), :T] for name, x in data.items()}
            at = part["ends"].flatten().nonzero()[:, 0]
            score = reward_model(part["ids"], part["mask"]).flatten()[send(at, device)]
            yield reward_loss(score, send(part["label"].flatten()[at], device), K) / count
    lr = min(FIT_LR, 256 * FIT_LR / reward_model.head.in_features)
    warm_start.supervised_fit("reward model", reward_model, losses, steps, lr, cfg.grad_clip)

def quality(score, label, K):
    """Accuracy and expected calibration error (10 bins) of scores on labels, both (n,). With K
    choices, picking any of the completions most likely to be chosen counts as right."""
    if K == 1:
        p = score.sigmoid()
        confidence, correct = torch.maximum(p, 1 - p), ((p > 0.5) == (label > 0.5)).float()
        outcome = correct
    else:
        confidence, pick = score.view(-1, K).softmax(1).max(1)
        outcome = label.view(-1, K).gather(1, pick[:, None])[:, 0]      # its chance of being chosen
        correct = (outcome == label.view(-1, K).amax(1)).float()
    bins = (confidence * 10).long().clamp(max=9)
    gap = torch.zeros(10).index_add(0, bins, confidence - outcome)
    return correct.mean().item(), (gap.abs().sum() / len(correct)).item()

def replay(history, rows, K, rng):
    """Up to `rows` rows drawn at random from the history, in whole sets of K."""
    sets = range(len(history["ids"]) // K)
    chosen = torch.tensor(rng.sample(sets, min(rows // K, len(sets))), dtype=torch.long)
    return {name: x.unflatten(0, (-1, K))[chosen].flatten(0, 1) for name, x in history.items()}
