"""Rewards of completions and of their steps, by rule or learned: models, labels, fit, replay."""
import torch
import torch.nn.functional as F

from data import UserError, check_components
from data.tokenizer import decode, step_tokens
from run import batches, machine, optimizer

FIT_LR = 1e-3           # peak learning rate up to 256 channels, then as 1/width (arXiv 2203.03466)
LABEL_NOISE = 0.0       # share of wrong labels, for studies of what people do

# ------------------------------------------------------------------------------- the rule's reward

def score(task, encoding, problems, batch):
    """Put in a batch the problem of each row, its text, and the components of its rule reward."""
    group, lengths = len(batch.ids) // len(problems), batches.row_lengths(batch.mask).tolist()
    batch.problems = [p for p in problems for _ in range(group)]
    batch.texts = [decode(encoding, row[start:end]) for row, start, end
                   in zip(batch.ids.tolist(), batch.start.tolist(), lengths)]
    batch.components = rule_components(task, batch)
    return batch

def rule_components(task, batch):
    """The components (B,) of the rule reward by name; the reward is their sum. A completion that
    did not finish gave no answer: 0. Raises UserError for what is not a number."""
    rows = [task.reward(problem, text) for problem, text in zip(batch.problems, batch.texts)]
    for problem, row in zip(batch.problems, rows):
        check_components(problem, row)
        if row.keys() != rows[0].keys():
            raise UserError(f"the reward of the prompt {problem.prompt!r} has the components "
                            f"{', '.join(row)}: they must always be the same")
    return {name: torch.tensor([float(row[name]) for row in rows], device=batch.ids.device)
            * batch.finished for name in rows[0]}

def of_steps(task, batch, cfg, encoding):
    """The rule reward by steps: `reward` (B, T) in the columns `ends` (B, T), their last tokens.

    Outcome supervision takes the completion for one step, and the sum of its parts for its reward.
    Under process supervision a step earns 1 if it is true; the last, which ends at the last token
    so that stopping is a part of it, only if the answer is correct too: true lines that lead
    elsewhere are no solution.
    """
    last = batches.last_tokens(batch.mask)
    if cfg.supervision == "outcome":
        return torch.where(last, sum(batch.components.values())[:, None], 0), last
    ends, reward, correct = last.clone(), torch.zeros_like(batch.logp), batch.components["correct"]
    for i, (problem, text) in enumerate(zip(batch.problems, batch.texts)):
        columns = batch.mask[i].nonzero()[:, 0].tolist()
        ids, found = batch.ids[i, columns].tolist(), task.steps(problem, text) or [(0, False)]
        tokens = step_tokens(encoding, ids, [end for end, _ in found])
        at = [columns[j] for j in tokens[:-1]] + columns[-1:]
        good = [truth for _, truth in found[:-1]] + [found[-1][1] and correct[i] > 0]
        ends[i, at], reward[i, at] = True, 1.0
        reward[i, [column for column, truth in zip(at, good) if not truth]] = 0.0   # also if shared
    return reward, ends

def at_the_limit(batch, truncated_reward):
    """The rewards (B, T), at most `truncated_reward` at the last token of a row that did not end: a
    learned reward may be lower."""
    cut = batches.last_tokens(batch.mask) & ~batch.finished[:, None]
    return torch.where(cut, batch.reward.clamp(max=truncated_reward), batch.reward)

# -------------------------------------------------------------------------------- learned rewards

def scores(reward_model, ids, mask, cfg):
    """The reward model's raw score after each token, (B, T)."""
    def of_rows(ids, mask):
        """Of some rows, as `in_micro_batches` wants it."""
        ids, mask = (x.to(reward_model.head.weight.device) for x in (ids, mask))
        return [reward_model(ids, mask)]
    return batches.in_micro_batches(of_rows, ids, mask, cfg.micro_tokens)[0]

def learned(reward_model, batch, cfg):
    """The learned reward (B, T) where steps end: under outcome supervision the normalised score,
    under process supervision the chance that the step is good."""
    raw, (mean, std) = scores(reward_model, batch.ids, batch.mask, cfg), reward_model.norm
    reward = raw.sigmoid() if cfg.supervision == "process" else (raw - mean) / std
    return torch.where(batch.ends, reward, 0)

def reward_loss(score, label, K):
    """Negative log-likelihood of the labels, summed; score and label (n,).

    K > 1: rows come in sets of K, the label is 1 for the chosen one: -log softmax of its score
    ("Fine-Tuning Language Models from Human Preferences"; K = 2 is Bradley-Terry). K = 1: the label
    is the chance that a step is good: binary cross-entropy.
    """
    if K == 1:
        return F.binary_cross_entropy_with_logits(score, label, reduction="sum")
    return -(label.view(-1, K) * score.view(-1, K).log_softmax(1)).sum()

# ------------------------------------------------------------------------------------- the labels

def choose(reward, noise, rng):
    """The chance that each of K completions is people's choice, (n, K): they choose the best of
    reward (n, K), any of several equals alike, but in a share `noise` of them a worse one."""
    best = reward == reward.amax(1, keepdim=True)
    chance = best / best.sum(1, keepdim=True)
    for row, good in zip(chance, best.tolist()):
        worse = [k for k, x in enumerate(good) if not x]
        if rng.random() < noise and worse:
            row.copy_(F.one_hot(torch.tensor(rng.choice(worse)), len(good)))
    return chance

def noisy_labels(rows, K, noise, rng):
    """`rows` with labels as people give them: which of K completions is the best, or for K = 1
    whether each step is good; a share `noise` of them is wrong."""
    labels = rows["label"][rows["ends"]]
    if K > 1:
        labels = choose(labels.view(-1, K), noise, rng).flatten()
    else:
        wrong = torch.tensor([rng.random() < noise for _ in labels])
        labels = torch.where(wrong, 1 - labels, labels)
    return rows | {"label": rows["label"].masked_scatter(rows["ends"], labels)}

def rollout_labels(complete, agent, batch, rng, tries=4):
    """Labels (B, T) of steps by Monte Carlo: of `tries` completions from the step's end, the share
    that come out right. `complete` is grpo.complete. The last step keeps its true label."""
    label = batch.reward.clone()
    places = (batch.ends & ~batches.last_tokens(batch.mask)).nonzero()                     # (n, 2)
    for row, column in (part.T for part in places.split(128) if len(part)):
        prefixes = [batch.ids[i, :t + 1].tolist() for i, t in zip(row, column)]
        room = (agent.cfg.max_new - (column + 1 - batch.start[row])).tolist()   # less what it has
        u = machine.uniform(rng, len(prefixes), tries, max(room)).flatten(0, 1)
        ended = complete(agent, prefixes, tries, u, room)
        ended.start = batch.start[row].repeat_interleave(tries)
        score(agent.task, agent.encoding, [batch.problems[i] for i in row], ended)
        label[row, column] = ended.components["correct"].view(-1, tries).mean(1)
    return label

# ---------------------------------------------------------------------------------------- the fit

def refit(reward_model, rows, history, cfg, rng):
    """Fit the reward model to this rank's labelled rows, `cfg.choices` completions of each problem,
    and to a tenth as many of `history`; the first tenth is set apart to measure it, on labels as
    noisy: people have no others. Returns the history with all fitted rows, and the measures.

    rows: ids, mask, ends, and as label the truth of each step, (R, T).
    """
    K = cfg.choices if cfg.supervision == "outcome" else 1
    rows = noisy_labels(batches.of_all_ranks(rows, cfg.choices), K, LABEL_NOISE, rng)
    apart = cfg.fit_prompts // 10 * cfg.choices
    data, test = ({name: x[part] for name, x in rows.items()}
                  for part in (slice(apart, None), slice(apart)))
    rows = data
    if history:
        data = batches.concatenate(data, replay(history, len(data["ids"]) // 10, K, rng))
    fit(reward_model, data, K, cfg, rng)

    score = scores(reward_model, test["ids"], test["mask"], cfg)[test["ends"]]
    if not score.isfinite().all():
        raise UserError("the reward model's scores are not finite: lower FIT_LR in reward.py")
    accuracy, error = quality(score, test["label"][test["ends"]], K)
    history = batches.concatenate(history, rows) if history else rows
    if K > 1:       # mean 0, std 1 of what the references wrote: the last one's alone are too alike
        score = scores(reward_model, history["ids"], history["mask"], cfg)[history["ends"]]
        if not score.std() > 1e-6 * score.mean().abs():
            raise UserError("the reward model gives every completion the same score: there is "
                            "nothing "
                            "to learn from")
        reward_model.norm.copy_(torch.stack([score.mean(), score.std()]))
    return history, {"rm_accuracy": accuracy, "rm_error": error}

def fit(reward_model, data, K, cfg, rng):
    """One pass over labelled rows that every rank holds, in sets of K, 64 rows a step."""
    n = len(data["ids"]) // K
    steps, order = max(1, n * K // 64), torch.tensor(rng.sample(range(n), n))
    whole = {name: data[name].unflatten(0, (n, K)) for name in ("ids", "mask")}     # (n, K, T)
    device = reward_model.head.weight.device

    def rows_of(sets):
        """The rows of some sets."""
        return (sets[:, None] * K + torch.arange(K)).flatten()

    def losses(step):
        """The terms of one optimizer step, those of this rank's sets."""
        sets = order.tensor_split(steps)[step]
        count = data["ends"][rows_of(sets)].sum() / K                               # of all ranks
        sets = machine.local_share(sets)
        ids, mask = whole["ids"][sets].flatten(1), whole["mask"][sets].any(1)
        for micro, T in batches.micro_batches(ids, mask, cfg.micro_tokens // K):
            part = {name: x[rows_of(sets[micro]), :T].to(device) for name, x in data.items()}
            score = reward_model(part["ids"], part["mask"])[part["ends"]]
            yield reward_loss(score, part["label"][part["ends"]], K) / count
    lr = min(FIT_LR, 256 * FIT_LR / reward_model.head.in_features)
    optimizer.supervised_fit("reward model", reward_model, losses, steps, lr, cfg.grad_clip)

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

def replay(history, rows, K, rng):
    """`rows` labelled rows of the history at random, whole sets of K."""
    sets = range(len(history["ids"]) // K)
    chosen = torch.tensor(rng.sample(sets, min(rows // K, len(sets))), dtype=torch.long)
    return {name: x.unflatten(0, (-1, K))[chosen].flatten(0, 1) for name, x in history.items()}
