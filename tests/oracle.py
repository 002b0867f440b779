"""A second GRPO and PPO to hold the first against, written from the papers and not from grpo.py.

DeepSeekMath (2402.03300) 4.1, algorithm 1 and eq. 21; PPO (1707.06347); GAE (1506.02438); Schulman's k1, k2, k3
(joschu.net/blog/kl-approx.html); RLOO (2402.14740); Dr. GRPO (2503.20783); DAPO (2503.14476); GSPO
(2507.18071); the steered coefficient of Ziegler et al. (1909.08593). Slow and plain: float64, no
padding, a row and a token at a time. Of the network it takes the hidden states of a single row.
"""
import math
from dataclasses import dataclass, replace

import torch

import grpo
import reward as reward_module


@dataclass
class Row:
    """A completion, alone."""
    prompt: list            # ids
    completion: list        # ids, the one that ended it included
    finished: bool          # by such a one, not by the limit
    components: dict             # components of the rule's reward
    steps: list             # (index of the token that ends it, whether it is true), of each step
    score: list = None      # the reward model's raw output after each token


# ------------------------------------------------------------------------------------ small sums

def mean(x):
    return sum(x) / len(x)


def variance(x):
    return sum((a - mean(x)) ** 2 for a in x) / len(x)


def equal(x, least=0.1):
    """All the same, up to rounding."""
    return max(x) - min(x) <= 1e-6 * max(least, *map(abs, x))


# ----------------------------------------------------------------------------- what the models say

def states(gpt, row):
    """The hidden state before each token of the completion, (n, C): that after the token before it."""
    return gpt(torch.tensor([row.prompt + row.completion]))[0, len(row.prompt) - 1:-1]


def logps(gpt, row, temperature):
    """log pi of each token of the completion."""
    logits = states(gpt, row) @ gpt.embed_tokens.weight.T / temperature                     # (n, V)
    return list(logits[range(len(logits)), row.completion] - logits.logsumexp(1))


def values(policy, critic, row):
    """The critic's value of the state before each token."""
    return list(states(critic.trunk or policy, row) @ critic.head.weight[0] + critic.head.bias[0])


def numbers(tensors):
    return [x.item() for x in tensors]


# ---------------------------------------------------------------------------------------- rewards

def counted(row):
    """The components that count: of a completion that was cut off the negative ones."""
    return {name: x if row.finished or x < 0 else 0.0 for name, x in row.components.items()}


def step_rewards(row, cfg, norm, limit=None):
    """[(index of a token, reward)], one for each step; under outcome supervision the completion is
    one step. `norm`: mean and std of the reward model's scores."""
    last = len(row.completion) - 1
    correct = row.finished and row.components["correct"] > 0
    if cfg.supervision == "outcome":
        found = {last: sum(counted(row).values())}
    else:               # the last step holds the end of the completion, and has to be its answer
        found, steps = {}, row.steps or [(last, False)]
        for index, true in [*steps[:-1], (last, steps[-1][1] and correct)]:
            found[index] = min(found.get(index, 1.0), float(true))      # two may end in one token
    if cfg.reward != "rule":
        for index in found:
            score = row.score[index]
            found[index] = ((score - norm[0]) / norm[1] if cfg.supervision == "outcome" else
                            1 / (1 + math.exp(-score)))
    if not row.finished:
        found[last] = min(found[last], reward_module.TRUNCATED_REWARD if limit is None else limit)
    return sorted(found.items())


def by_rule(row, cfg):
    """`step_rewards` of the task's rule, whether the row ended or not."""
    return step_rewards(row, replace(cfg, reward="rule"), None, limit=math.inf)


def group_scores(rewards, cfg):
    """The rewards of a group, a list for each row, less their baseline, over their std (4.1.2, and
    4.1.3 where a row has several); and whether they are all equal. RLOO's baseline of a row is the
    mean over the other rows."""
    everything = [r for row in rewards for r in row]
    centre, std = mean(everything), math.sqrt(variance(everything))
    dead = equal(everything, 1e-6 if cfg.reward == "rule" and cfg.kl != "reward" else 0.1)
    scores = []
    for i, row in enumerate(rewards):
        others = [r for j, other in enumerate(rewards) for r in other if j != i]
        baseline = {"group": centre, "group+value": centre, "leave-one-out": mean(others)}
        row = [r - baseline.get(cfg.baseline, 0.0) for r in row]
        if dead and cfg.baseline.startswith("group"):
            row = [0.0] * len(row)
        if cfg.adv_scale == "group" and not dead:
            row = [r / std for r in row]
        scores.append(row)
    return scores, dead


# ------------------------------------------------------------------------------------- advantages

def gae(reward, value, gamma, lam):
    """Eq. 16 of GAE as it is written; after the last token the value is 0."""
    n, value = len(reward), [*value, 0.0]
    delta = [reward[t] + gamma * value[t + 1] - value[t] for t in range(n)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]


def credit(rows, rewards, penalties, value, cfg):
    """The advantage of each token, the returns (None without a critic), and which groups are dead.
    PPO takes the penalty (eq. 2 of DeepSeekMath) token by token; without a critic the completion is
    one action, and its penalties come off its last reward."""
    if value is None:
        rewards = [[*found[:-1], (found[-1][0], found[-1][1] - sum(penalty))]
                   for found, penalty in zip(rewards, penalties)]
    scores, dead = [], []
    for start in range(0, len(rows), cfg.group):
        group = rewards[start:start + cfg.group]
        of_rows, same = group_scores([[r for _, r in found] for found in group], cfg)
        scores += [{index: x for (index, _), x in zip(found, row)}
                   for found, row in zip(group, of_rows)]
        dead.append(same)
    adv, returns = [], None
    for i, row in enumerate(rows):
        n = len(row.completion)
        if value is None:
            adv.append([sum(x for end, x in scores[i].items() if end >= t) for t in range(n)])
        else:
            reward = [scores[i].get(t, 0.0) - penalties[i][t] for t in range(n)]
            adv.append(gae(reward, value[i], grpo.GAMMA, cfg.lam))
    if value is not None:
        returns = [[a + v for a, v in zip(*both)] for both in zip(adv, value)]
    if cfg.adv_scale == "batch":
        everything = [a for row in adv for a in row]
        centre, std = mean(everything), math.sqrt(variance(everything))
        adv = [[0.0 if equal(everything) else (a - centre) / std for a in row] for row in adv]
    return adv, returns, dead


# ----------------------------------------------------------------------------------------- losses

def kl_of_token(logp, ref, ratio, estimator):
    """Of KL(pi || ref), with x = pi_ref / pi: k1 = -log x, k2 = (log x)^2 / 2, k3 = x - 1 - log x,
    and k3 under the importance weight."""
    log_x = ref - logp
    if estimator == "k1":
        return -log_x
    if estimator == "k2":
        return log_x ** 2 / 2
    k3 = log_x.exp() - 1 - log_x
    return {"k3": k3, "ratio*k3": ratio * k3}[estimator]


def weight_of_token(length, lengths, cfg):
    """GRPO: the mean over a row, then over rows; DAPO: over all tokens; Dr. GRPO: over the most
    tokens there could have been. `lengths`: of all rows of the optimizer step."""
    return {"sequence": 1 / len(lengths) / length, "token": 1 / sum(lengths),
            "constant": 1 / (len(lengths) * cfg.max_new)}[cfg.loss_mean]


def value_error(value, old, target, clip):
    """Half the squared error, or that of the value kept within `clip` of the old if it is more."""
    moved = value.item() - old
    kept = value if abs(moved) <= clip else old + math.copysign(clip, moved)
    plain, clipped = (value - target) ** 2, (kept - target) ** 2
    return (plain if plain >= clipped else clipped) / 2


# --------------------------------------------------------------------------------------- training

class Oracle:
    """Models that it changes, in float64, and what lasts from step to step: Adam's moments, beta.
    `high`, `low`: how many tokens were clipped at each side."""

    def __init__(self, cfg, policy, ref, critic, norm):
        self.cfg, self.policy, self.ref, self.critic, self.norm = cfg, policy, ref, critic, norm
        self.params = [p for model in (policy, critic) if model is not None
                       for p in model.parameters() if p.requires_grad]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.steps, self.updates, self.beta, self.high, self.low = 0, 0, cfg.beta, 0, 0

    def follow(self, policy, share=1):
        """The reference goes a share of the way to the policy: all of it where an iteration begins."""
        for p, q in zip(self.ref.parameters(), policy.parameters(), strict=True):
            p.data += share * (q.data - p.data)

    def steer(self, kl):
        """Beta after a step: to a KL of 0.05, by a tenth of the relative error, of which a fifth counts at most."""
        self.beta *= 1 + 0.1 * min(max(kl / 0.05 - 1, -0.2), 0.2)

    def step(self, rows, minibatches):
        """Train on a rollout; `minibatches`: indices of the rows of each optimizer step. Gives the
        statistics of the step."""
        cfg, ref, value = self.cfg, None, None
        with torch.no_grad():
            old = [numbers(logps(self.policy, row, cfg.temperature)) for row in rows]
            if self.ref is not None:
                ref = [numbers(logps(self.ref, row, cfg.temperature)) for row in rows]
            if self.critic is not None:
                value = [numbers(values(self.policy, self.critic, row)) for row in rows]
        penalties = [[0.0] * len(row.completion) for row in rows]
        if cfg.kl == "reward" and ref:
            penalties = [[self.beta * kl_of_token(torch.tensor(a), torch.tensor(b), 1, cfg.estimator).item()
                          for a, b in zip(*both)] for both in zip(old, ref)]
        rewards = [step_rewards(row, cfg, self.norm) for row in rows]
        adv, returns, dead = credit(rows, rewards, penalties, value, cfg)

        stats = self.measures(rows, rewards, dead)
        stats["entropy"] = mean([-x for row in old for x in row])
        if value is not None:
            target, left = ([x for row in table for x in row] for table in (returns, [
                [r - v for r, v in zip(*both)] for both in zip(returns, value)]))
            stats["explained_variance"] = 1 - variance(left) / max(variance(target), 1e-8)
        data = [dict(row=row, old=old[i], ref=ref and ref[i], value=value and value[i], adv=adv[i],
                     returns=returns and returns[i]) for i, row in enumerate(rows)]
        of_updates = [self.update([data[i] for i in chosen]) for chosen in minibatches]
        stats |= {name: mean([x[name] for x in of_updates]) for name in of_updates[0]}
        stats["mismatch"] = 0.0
        self.steps += 1
        if cfg.beta and cfg.kl in ("loss", "reward"):
            stats["beta"] = self.beta
        return stats

    def measures(self, rows, rewards, dead):
        """What is logged of a rollout: means over rows; dead groups over groups."""
        stats = {name: mean([counted(row)[name] for row in rows])
                 for name in rows[0].components}
        stats["accuracy"] = stats.pop("correct")
        if self.cfg.reward != "rule":
            stats["rule_reward"] = mean([sum(r for _, r in by_rule(row, self.cfg)) for row in rows])
        return stats | {"reward": mean([sum(r for _, r in found) for found in rewards]),
                        "length": mean([len(row.completion) for row in rows]),
                        "finished": mean([row.finished for row in rows]),
                        "dead_groups": mean(dead)}

    def update(self, rows):
        """One optimizer step, and its statistics: the losses as they are weighed, the others means
        over all tokens."""
        cfg, lengths = self.cfg, [len(d["adv"]) for d in rows]
        loss = errors = torch.zeros((), requires_grad=True)         # all may be clipped
        clipped, tokens, kls = 0, 0, []
        for d in rows:
            logp, n = logps(self.policy, d["row"], cfg.temperature), len(d["adv"])
            value = self.critic and values(self.policy, self.critic, d["row"])
            weight = weight_of_token(n, lengths, cfg)
            of_row = (sum(logp[t] - d["old"][t] for t in range(n)) / n).exp()           # GSPO's
            for t, A in enumerate(d["adv"]):
                ratio = of_row if cfg.ratio == "sequence" else (logp[t] - d["old"][t]).exp()
                gain = ratio * A
                if A > 0 and ratio > 1 + cfg.clip_high:
                    gain, clipped, self.high = (1 + cfg.clip_high) * A, clipped + 1, self.high + 1
                if A < 0 and ratio < 1 - cfg.clip_low:
                    gain, clipped, self.low = (1 - cfg.clip_low) * A, clipped + 1, self.low + 1
                tokens += 1
                if d["ref"]:
                    kl = kl_of_token(logp[t], d["ref"][t], ratio, cfg.estimator)
                    kls.append(kl.item())
                    if cfg.kl == "loss":
                        gain = gain - self.beta * kl
                loss = loss - weight * gain
                if value:
                    errors = errors + weight * value_error(value[t], d["value"][t],
                                                           d["returns"][t], 0.2)
        stats = {"loss": loss.item(), "clip_share": clipped / tokens}
        stats |= {"kl": mean(kls)} if kls else {}
        if self.critic is not None:
            stats["value_loss"] = errors.item()
        return stats | {"grad_norm": self.descend(loss + grpo.VALUE_COEF * errors)}

    def descend(self, loss):
        """Clip the gradient to a norm, all models together (torch adds 1e-6 to the denominator),
        then Adam with betas 0.9 and 0.95. Gives the norm before."""
        grads = torch.autograd.grad(loss, self.params, materialize_grads=True)
        norm = math.sqrt(sum((g * g).sum().item() for g in grads))
        self.updates += 1
        rate = self.cfg.lr
        if self.cfg.half_life:
            rate *= 2 ** (-self.steps / self.cfg.half_life)
        for p, g, (m, v) in zip(self.params, grads, self.moments):
            g = g * min(1.0, grpo.GRAD_CLIP / (norm + 1e-6))
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.95 * v + 0.05 * g * g)
            first, second = m / (1 - 0.9 ** self.updates), v / (1 - 0.95 ** self.updates)
            p.data -= rate * first / (second.sqrt() + (1e-5 if "value" in self.cfg.baseline else 1e-8))
        return norm


# --------------------------------------------------------------------------------- the reward model

class Draws:
    """A random stream that keeps what was drawn from it: of each method the arguments and results."""

    def __init__(self, source):
        self.source, self.of = source, {"sample": []}

    def __getattr__(self, name):
        def draw(*args):
            """A draw, which is kept."""
            found = getattr(self.source, name)(*args)
            if name in self.of:
                self.of[name].append((*args, found[:]))
            return found
        return draw


def is_best(rewards):
    """The chance of each completion of a set to be chosen: any of the best."""
    return [(r == max(rewards)) / rewards.count(max(rewards)) for r in rewards]


class FitOracle:
    """A reward model, in float64, over the iterations of algorithm 1. `history`: the labelled sets of all fits. A set is
    a list of (row, {index of a token: label}): of K completions of a problem where one of them is chosen, else of one."""

    def __init__(self, cfg, model, row_of):
        """`row_of(prompt, completion)`: a Row from tokens."""
        self.cfg, self.model, self.row_of, self.history, self.norm = cfg, model, row_of, [], None
        self.K = reward_module.CHOICES if cfg.supervision == "outcome" else 1

    def scores(self, row, labels):
        """The score of each token that has a label."""
        h = self.model.trunk(torch.tensor([row.prompt + row.completion]))[0, len(row.prompt):]
        return [h[index] @ self.model.head.weight[0] + self.model.head.bias[0] for index in sorted(labels)]

    def labels(self, rows, continued):
        """The labelled sets. `continued`: for each step but the last, in order, the tokens up to its end, and those of
        the same with each continuation."""
        found = [dict(by_rule(row, self.cfg)) for row in rows]
        for row, labels in zip(rows, found) if self.cfg.reward == "rollouts" else ():
            for index in sorted(labels)[:-1]:
                before, tries = next(continued)
                assert before == row.prompt + row.completion[:index + 1] and len(tries) == 4
                tries = [self.row_of(row.prompt, ids[len(row.prompt):]) for ids in tries]
                labels[index] = mean([more.finished * more.components["correct"] for more in tries])
        for group in (found[i:i + self.K] for i in range(0, len(found), self.K)) if self.K > 1 else ():
            chosen = is_best([sum(labels.values()) for labels in group])
            for labels, chance in zip(group, chosen):
                labels.update(dict.fromkeys(labels, chance))
        assert next(continued, None) is None
        sets = [*zip(rows, found)]
        return [sets[i:i + self.K] for i in range(0, len(sets), self.K)]

    def loss(self, chosen):
        """Bradley-Terry's, for K completions, or the cross-entropy of each step; its mean over sets or steps."""
        terms = []
        for a_set in chosen:
            score = [self.scores(row, labels) for row, labels in a_set]
            label = [[labels[i] for i in sorted(labels)] for _, labels in a_set]
            if self.K == 1:
                terms += [-(y * torch.sigmoid(s).log() + (1 - y) * torch.sigmoid(-s).log()) for s, y in zip(score[0], label[0])]
            else:
                all_of_them = sum(s.exp() for s, in score)
                terms.append(-sum(y * (s.exp() / all_of_them).log() for (s,), (y,) in zip(score, label)))
        return sum(terms) / len(terms)

    def fit(self, rows, continued, draws):
        """An iteration. The first tenth of the rows, of problems apart, measures; a tenth as many rows of history are
        learned again. Gives accuracy and calibration error. `draws`: what was drawn for it, in `Draws`."""
        sets = self.labels(rows, continued)
        apart = 50 // 10 * reward_module.CHOICES // self.K
        test, own = sets[:apart], sets[apart:]
        *more, (numbers_of, n, order) = draws.of["sample"][2:]
        assert len(more) == bool(self.history)
        again = []
        for old, n_old, picked in more:
            assert [*old] == [*range(len(self.history))] and n_old == len(own) * self.K // 10 // self.K
            again = [self.history[i] for i in picked]
        data = own + again
        assert [*numbers_of] == [*range(len(data))] and n == len(data)
        self.descend([data[i] for i in order], max(1, len(data) * self.K // 64))
        self.history += own
        with torch.no_grad():
            found = self.quality(test)
            if self.K > 1:
                score = [s.item() for a_set in self.history for row, labels in a_set for s in self.scores(row, labels)]
                self.norm = mean(score), math.sqrt(variance(score) * len(score) / (len(score) - 1))
        return found

    def descend(self, data, steps):
        """Adam, once through the data in `steps` parts; the larger ones come first. 30 steps of warm-up, then down to 0."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        adam = Oracle(self.cfg, None, None, self.model, None)
        assert [*map(id, adam.params)] == [*map(id, params)]
        peak = 1e-3 * min(1, 256 / len(self.model.head.weight[0]))
        size, longer = divmod(len(data), steps)
        for step in range(steps):
            part, data = data[:size + (step < longer)], data[size + (step < longer):]
            adam.cfg = replace(self.cfg, lr=peak * min(1 - step / steps, (step + 1) / 30), baseline="none")
            adam.descend(self.loss(part))
        assert not data

    def quality(self, test):
        """The accuracy, and how far certainty is from it, a tenth of certainty at a time."""
        right, tenths = [], {}
        for a_set in test:
            score = [s.item() for row, labels in a_set for s in self.scores(row, labels)]
            label = [labels[i] for _, labels in a_set for i in sorted(labels)]
            if self.K == 1:
                for s, y in zip(score, label):
                    p = 1 / (1 + math.exp(-s))
                    right.append((p > 0.5) == (y > 0.5))
                    tenths.setdefault(min(9, int(10 * max(p, 1 - p))), []).append(max(p, 1 - p) - right[-1])
            else:
                pick = score.index(max(score))
                p = math.exp(score[pick]) / sum(map(math.exp, score))
                right.append(label[pick] == max(label))
                tenths.setdefault(min(9, int(10 * p)), []).append(p - label[pick])
        return {"rm_accuracy": mean(right), "rm_error": sum(abs(sum(x)) for x in tenths.values()) / len(right)}
