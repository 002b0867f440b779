"""Rewards of completions and of their steps, by rule or learned: labels, fit, replay."""
import torch
import torch.nn.functional as F

from data import UserError, check_steps, rewards_of, steps_of
from data.tokenizer import step_tokens
from data.turns import Episodes, spoken, texts
from model import send
from run import dist, passes, terminal

FIT_LR = 1e-3           # peak learning rate up to 256 channels, then as 1/width (arXiv 2203.03466)
TRUNCATED_REWARD = 0.0  # maximum reward of a completion that is cut off: for a rule's, at most 0
FIT_STEPS = 64          # a fit labels FIT_STEPS * --prompts problems
CHOICES = 4             # completions that an annotator compares; 2: Bradley-Terry

# ------------------------------------------------------------ the rule's reward

def new_episodes(agent, problems, prompts, begun, group):
    """The Episodes of `group` rows for each prompt, whose completions begin as `begun` says (see
    grpo.generate); None if the task has no replies."""
    reply = getattr(agent.task, "reply", None)
    if reply is None:
        return None
    lengths = repeated(map(len, prompts), group)
    problems = repeated(problems, group)
    episodes = Episodes(reply, agent.encoding, agent.cfg.max_turns, problems, lengths)
    for i, (ids, judged) in enumerate(begun):
        episodes.go_on(range(i * group, (i + 1) * group), ids, judged)
    return episodes

def repeated(items, group):
    """Each of the items `group` times."""
    return [item for item in items for _ in range(group)]

def by_rule(agent, batch, episodes=None):
    """What each row says, and the components (B,) of the rule's reward. Of a row cut off
    only negative ones count."""
    if hasattr(agent.task, "reply") and episodes is None:
        raise UserError("rows of a task with several turns need its Episodes")
    said = texts(agent.encoding, batch, episodes)
    lengths = batch.judged.sum(1).tolist()
    rewards = rewards_of(agent.task, batch.problems, said, lengths, batch.finished.tolist())
    components = {}
    for name in rewards[0]:
        x = torch.tensor([float(row[name]) for row in rewards], device=batch.ids.device)
        components[name] = torch.where(batch.finished, x, x.clamp(max=0))
    return said, components

def counted(components):
    """The components that are added up: all, or that named `reward`; others are only logged."""
    if "reward" in components:
        return {"reward": components["reward"]}
    return components

def of_outcomes(batch):
    """The reward (B, T) of each completion at its last token, the sum of its components, and a mask
    (B, T) of these tokens."""
    last = passes.last_tokens(batch.mask)
    components = torch.stack([*counted(batch.components).values()], 1)  # (B, n)
    total = components.sum(1, keepdim=True)
    return torch.where(last, total, 0), last

def of_steps(task, encoding, batch):
    """The reward (B, T) of each step at its last token, 1 if it is true, and a mask (B, T) of these
    tokens. The last step ends at the completion's last token, and earns 1 only if `correct` is
    above 0, too. If several steps end at one token, all must be true."""
    ids, judged = batch.ids.cpu(), batch.judged.cpu()
    reward = torch.zeros(judged.shape)
    ends = torch.zeros_like(judged)
    correct = batch.components["correct"].tolist()
    for i, (problem, text) in enumerate(zip(batch.problems, batch.texts)):
        steps = steps_of(task, problem, text)
        least = 1 if isinstance(text, str) else 0  # the first turn may be empty
        text = spoken(text)
        check_steps(problem, text, steps, least)
        steps = steps or [(len(text), False)]
        columns = judged[i].nonzero()[:, 0]
        tokens = step_tokens(encoding, ids[i, columns].tolist(), [end for end, _ in steps])
        tokens[-1] = len(columns) - 1
        truths = [truth for _, truth in steps]
        truths[-1] = truths[-1] and correct[i] > 0
        for column, truth in zip(columns[tokens].tolist(), truths):
            before = reward[i, column] if ends[i, column] else 1
            reward[i, column] = min(float(truth), before)
            ends[i, column] = True
    device = batch.ids.device
    return send(reward, device), send(ends, device)

def of_rule(agent, batch):
    """`of_outcomes` or `of_steps`, by the supervision."""
    if agent.cfg.supervision == "outcome":
        return of_outcomes(batch)
    return of_steps(agent.task, agent.encoding, batch)

def check_groups(batch, cfg):
    """UserError if a row is compared with no other."""
    if cfg.group > 1 and (batch.groups.bincount() == 1).any():
        raise UserError("a group of one row: the rows of a group must share one problem object")

def cap_truncated(batch):
    """The rewards (B, T), at most TRUNCATED_REWARD at the last token of a row cut off."""
    last = passes.last_tokens(batch.mask)
    cut_off = last & ~batch.finished[:, None]
    capped = batch.reward.clamp(max=TRUNCATED_REWARD)
    return torch.where(cut_off, capped, batch.reward)

# -------------------------------------------------------------- learned rewards

@torch.no_grad()
def scores(reward_model, ids, mask, cfg):
    """The reward model's raw score (B, T) after each token of ids (B, T)."""
    device = ids.device
    out = torch.zeros(ids.shape, device=device)
    ids, mask = ids.cpu(), mask.cpu()
    for rows, T in passes.split_rows(ids, mask, cfg.micro_tokens):
        score = score_rows(reward_model, ids[rows, :T], mask[rows, :T])
        out[send(rows, device), :T] = score.to(device)
    return out

def score_rows(reward_model, ids, mask):
    """The raw scores (B, T) of one pass over ids (B, T), on the host."""
    return reward_model(ids, passes.layout_of(reward_model.trunk, ids, mask))

def learned(reward_model, batch, cfg):
    """The learned reward (B, T) at `ends`: the normalised score of a completion, or the probability
    that a step is good; 0 before the first fit."""
    raw = scores(reward_model, batch.ids, batch.mask, cfg)
    mean, std = reward_model.norm  # std is infinite before the first fit
    if cfg.supervision == "process":
        return torch.where(batch.ends & std.isfinite(), raw.sigmoid(), 0)
    return torch.where(batch.ends, (raw - mean) / std, 0)

def reward_loss(score, label, K):
    """Cross-entropy of scores and labels (n,), summed. K > 1: a label is the probability that a row
    is chosen among its K, by the softmax of their scores (Ziegler et al. 2019; K = 2 is
    Bradley-Terry). K = 1: that a step is good, by the sigmoid."""
    if K == 1:
        return F.binary_cross_entropy_with_logits(score, label, reduction="sum")
    logp = score.view(-1, K).log_softmax(1)
    chance = label.view(-1, K)
    return -(chance * logp).sum()

# ------------------------------------------------------------------- the labels

def problems_to_label(problems, cfg, rng):
    """Problems to label for a fit: a held-out tenth, from the first tenth of all problems, which no
    fit learns from; and the rest, to fit to."""
    n = min(FIT_STEPS * cfg.prompts, len(problems))
    n_held_out = n // 10
    tenth = len(problems) // 10
    held_out = rng.sample(problems[:tenth], n_held_out)
    to_fit = rng.sample(problems[tenth:], n - n_held_out)
    return held_out, to_fit

def label(agent, problems, iteration, generate):
    """Batches of CHOICES completions of each problem, with labels as rewards."""
    cfg = agent.cfg
    rng = dist.rng(cfg, "label", iteration)
    groups = max(1, cfg.group // CHOICES)
    size = groups * cfg.prompts  # problems at a time: as many rows as a step has
    labelled = []
    for some in terminal.chunks("labelling", problems, size, stops=True):
        batch = generate(agent, some, CHOICES, rng)
        batch.reward, batch.ends = of_rule(agent, batch)
        if cfg.reward == "rollouts":
            batch.reward = rollout_labels(agent, generate, batch, stream=iteration)
        labelled.append(batch)
    return labelled

def rollout_labels(agent, generate, batch, stream, tries=4):
    """Monte Carlo labels (B, T) of steps: the share of `tries` continuations from a step's end, by
    grpo.generate, that are right; a last step keeps its true label. `stream`, prompt and place
    name a step's random numbers."""
    cfg = agent.cfg
    of_groups, place = passes.grid(batch.groups)
    number = place % of_groups.size(1)  # in its group
    ids, mask, judged = batch.ids.cpu(), batch.mask.cpu(), batch.judged.cpu()
    start = batch.start.tolist()
    label = batch.reward.cpu().clone()
    places = batch.ends.cpu() & ~passes.last_tokens(mask)
    for part in places.nonzero().split(128):  # (n, 2)
        problems, begun, u = [], [], []
        for row, column in part.tolist():
            problem, first = batch.problems[row], start[row]
            later = judged[row, column + 1:].int().argmax()  # 0, or the length of a reply
            prefix = slice(first, column + 1 + later)
            problems.append(problem)
            begun.append((ids[row, prefix].tolist(), judged[row, prefix].tolist()))
            place = f"{stream}/{problem.prompt}/{number[row]}/{column - first}"
            u.append(dist.uniform(dist.rng(cfg, "labels", place), tries, cfg.max_new))
        if problems:
            played = generate(agent, problems, tries, u=torch.cat(u), begun=begun)
            right = played.components["correct"].view(-1, tries)
            rows, columns = part.T
            label[rows, columns] = right.mean(1).cpu()
    return send(label, batch.ids.device)

# ------------------------------------------------- the labelled rows, as a dict

def rows_of(sets, K):
    """The indices of the rows of some sets of K, given those of the sets."""
    rows = sets[:, None] * K + torch.arange(K)
    return rows.flatten()

def scores_of(reward_model, rows, cfg):
    """The raw scores (n,) at the ends of steps of labelled rows."""
    score = scores(reward_model, rows["ids"], rows["mask"], cfg)
    return score[rows["ends"]]

def of_all_ranks(rows):
    """The labelled rows of all ranks, on every rank, in the order of their problems."""
    gathered = dist.gather(rows)
    numbers = [torch.arange(len(of_rank["ids"]) // CHOICES) for of_rank in gathered]
    order = torch.cat(numbers).argsort(stable=True)  # problems belong to the ranks in turn
    return passes.take(passes.join(gathered), rows_of(order, CHOICES))

def choices(rows, K):
    """The rows, labelled with the probability that each of a problem's K is chosen: 1 for the one
    with the highest reward, shared by those that tie."""
    label = rows["label"]
    ends = rows["ends"]
    reward = label[ends].view(-1, K)
    best = reward == reward.amax(1, keepdim=True)
    chance = best / best.sum(1, keepdim=True)
    return rows | {"label": label.masked_scatter(ends, chance)}

def replay(history, rows, K, rng):
    """Up to `rows` rows drawn at random from the history, in whole sets of K."""
    sets = range(len(history["ids"]) // K)
    n = min(rows // K, len(sets))
    chosen = torch.tensor(rng.sample(sets, n), dtype=torch.int64)
    return passes.take(history, rows_of(chosen, K))

# ---------------------------------------------------------------------- the fit

def refit(agent, problems, iteration, generate):
    """Algorithm 1: fits the reward model to labelled completions of the policy, by grpo.generate,
    plus a tenth as many earlier ones. Returns its accuracy on held-out problems, as metrics."""
    rng = dist.rng(agent.cfg, "fit", iteration)
    held_out, train = problems_to_label(problems, agent.cfg, rng)
    batches = label(agent, held_out + train, iteration, generate)
    return fit_and_measure(agent, batches, len(held_out), rng)

def fit_and_measure(agent, batches, n_held_out, rng):
    """Fits the reward model to completions, CHOICES for each problem, labelled by their rewards,
    and to a tenth as many of `agent.history`, which they join. Measures it on those of the first
    n_held_out problems; returns the metrics."""
    cfg, reward_model = agent.cfg, agent.reward_model
    rows = passes.join([labelled(batch) for batch in batches])
    rows = of_all_ranks(rows)
    K = 1
    if cfg.supervision == "outcome":        # which of K completions is best
        K = CHOICES
        rows = choices(rows, K)
    every = torch.arange(len(rows["ids"]))
    apart = n_held_out * CHOICES
    test = passes.take(rows, every[:apart])
    train = passes.take(rows, every[apart:])
    to_fit = history = train
    if agent.history:
        tenth = len(train["ids"]) // 10
        old = replay(agent.history, tenth, K, rng)
        to_fit = passes.join([train, old])
        history = passes.join([agent.history, train])
    agent.history = history
    labels = to_fit["label"][to_fit["ends"]]
    if labels.amin() == labels.amax():
        terminal.print0("warning: all labels are equal: the last fit is kept, or rewards are 0")
        return {}
    fit(reward_model, to_fit, K, cfg, rng)

    score = scores_of(reward_model, test, cfg)
    accuracy, chance = quality(score, test["label"][test["ends"]], K)
    if K > 1:
        normalise(reward_model, agent.history, cfg)
    else:
        reward_model.norm[1] = 1  # finite: of steps the probabilities count
    terminal.print0(f"reward model  fitted to {len(to_fit['ids'])} completions  held out: accuracy "
                f"{accuracy:.1%}{f' (best of {K})' * (K > 1)}, a guess {chance:.1%}")
    if not accuracy > chance:
        terminal.print0("warning: no better than chance: try --supervision process, more FIT_STEPS")
    return {"rm_accuracy": accuracy}

def labelled(batch):
    """The rows of a Batch, with their rewards as labels, on the host: tensors (B, T)."""
    rows = dict(ids=batch.ids, mask=batch.mask, ends=batch.ends, label=batch.reward)
    return {name: x.cpu() for name, x in rows.items()}

def normalise(reward_model, history, cfg):
    """Gives scores the mean 0 and the std 1 over the history: the latest rows vary too little."""
    score = scores_of(reward_model, history, cfg)
    mean, std = score.mean(), score.std()
    if not passes.vary(mean, std):
        raise UserError("the reward model gives every completion the same score: there is nothing "
                        "to learn from")
    reward_model.norm.copy_(torch.stack([mean, std]))

def fit(reward_model, rows, K, cfg, rng):
    """One pass over labelled rows in sets of K, 64 rows a step. Every rank has all rows."""
    n = len(rows["ids"]) // K
    steps = max(1, n * K // 64)
    steps = min(n, steps)
    order = torch.tensor(rng.sample(range(n), n))
    order = order.tensor_split(steps)
    ids = rows["ids"].unflatten(0, (n, K))  # (n, K, T)
    mask = rows["mask"].unflatten(0, (n, K))
    device = reward_model.head.weight.device
    tokens = cfg.micro_tokens or passes.MICRO_TOKENS
    budget = max(1, tokens // K)

    def losses(step):
        sets = order[step]
        ends = rows["ends"][rows_of(sets, K)]
        count = ends.sum() / K  # over all ranks
        sets = dist.of_rank(sets)
        ids_of_sets = ids[sets].flatten(1)
        said = mask[sets].any(1)
        for micro, T in passes.split_rows(ids_of_sets, said, budget):
            part = passes.take(rows, rows_of(sets[micro], K))
            part = {name: x[:, :T] for name, x in part.items()}
            at = part["ends"].flatten().nonzero()[:, 0]
            score = score_rows(reward_model, part["ids"], part["mask"])
            score = score.flatten()[send(at, device)]
            label = part["label"].flatten()[at]
            yield reward_loss(score, send(label, device), K) / count
    lr = min(FIT_LR, 256 * FIT_LR / reward_model.head.in_features)
    passes.supervised_fit("reward model", reward_model, losses, steps, lr)

def quality(score, label, K):
    """The accuracy of scores (n,) on labels (n,), and of a guess, copies as one. Of K choices
    any best one is right; sets of equal ones do not count."""
    if K == 1:
        good = label > 0.5
        right = (score > 0) == good
        share = good.float().mean()
        chance = share.maximum(1 - share)
    else:
        shares = label.view(-1, K)  # the probability to be chosen
        best = shares == shares.amax(1, keepdim=True)
        differ = ~best.all(1)
        best, score = best[differ], score.view_as(best)[differ]
        right = best.gather(1, score.argmax(1, keepdim=True))
        copies = torch.isclose(score[..., None], score[:, None]).sum(2)
        chance = ((best / copies).sum(1) / (1 / copies).sum(1)).mean()
    return right.float().mean().item(), chance.item()
