"""A second GRPO and PPO to hold the first against, written from the papers and not from grpo.py.

DeepSeekMath (2402.03300) 4.1, algorithm 1 and eq. 21; PPO (1707.06347); GAE (1506.02438); k1, k2,
k3 (joschu.net/blog/kl-approx.html); RLOO (2402.14740); Dr. GRPO (2503.20783); DAPO (2503.14476);
GSPO (2507.18071). Slow and plain: float64, no padding, a row and a token at a time.
Of the network it takes the hidden states of a single row.
"""
import math
import random
from dataclasses import dataclass, replace
from statistics import fmean as mean, pstdev, pvariance, stdev

import torch

import grpo
import reward as reward_module


@dataclass
class Row:
    """A completion, alone."""
    prompt: list            # ids
    completion: list        # ids, the one that ended it included
    finished: bool          # by such a one, not by the limit
    components: dict        # of the rule's reward
    steps: list             # (index of the token that ends it, whether it is true), of each step
    score: list = None      # the reward model's raw output after each token


def equal(x):
    """All the same, up to a millionth."""
    return max(x) - min(x) <= 1e-6 * max(1, *map(abs, x))


def states(gpt, row):
    """The hidden state before each token of the completion, (n, C): that after the token before."""
    return gpt(torch.tensor([row.prompt + row.completion]))[0, len(row.prompt) - 1:-1]


def logps(gpt, row, temperature):
    logits = states(gpt, row) @ gpt.embed_tokens.weight.T / temperature                     # (n, V)
    return logits[range(len(logits)), row.completion] - logits.logsumexp(1)


def values(policy, critic, row):
    return states(critic.trunk or policy, row) @ critic.head.weight[0] + critic.head.bias[0]


# ---------- rewards and advantages

def counted(row):
    """The components that count: of a completion that was cut off the negative ones."""
    return {name: x if row.finished or x < 0 else 0.0 for name, x in row.components.items()}


def by_rule(row, cfg):
    """{index of a token: reward} of each step; under outcome supervision there is one."""
    last = len(row.completion) - 1
    if cfg.supervision == "outcome":
        return {last: sum(counted(row).values())}
    correct = row.finished and row.components["correct"] > 0
    found, steps = {}, row.steps or [(last, False)]
    for index, true in [*steps[:-1], (last, steps[-1][1] and correct)]:
        found[index] = min(found.get(index, 1.0), float(true))      # two may end in one token
    return found


def step_rewards(row, cfg, norm):
    """`by_rule`, or learned, with `norm` the scores' mean and std."""
    found, last = by_rule(row, cfg), len(row.completion) - 1
    for index in found if cfg.reward != "rule" else ():
        score = row.score[index]
        found[index] = ((score - norm[0]) / norm[1] if cfg.supervision == "outcome" else
                        1 / (1 + math.exp(-score)))
    if not row.finished:
        found[last] = min(found[last], reward_module.TRUNCATED_REWARD)
    return found


def group_scores(rewards, cfg):
    """Rewards less their baseline, over the std of all the group's (4.1.2, 4.1.3); and whether all
    are equal."""
    everything = [r for row in rewards for r in row.values()]
    std = pstdev(everything)
    dead = equal(everything)
    scores = []
    for i, row in enumerate(rewards):
        others = [r for j, other in enumerate(rewards) for r in other.values() if j != i]
        less = {"none": 0.0, "value": 0.0, "leave-one-out": mean(others)}
        less = less.get(cfg.baseline, mean(everything))
        by = std if cfg.adv_scale == "group" and not dead else 1
        row = {index: (r - less) / by for index, r in row.items()}
        if dead and cfg.baseline.startswith("group"):
            row = dict.fromkeys(row, 0.0)
        scores.append(row)
    return scores, dead


def gae(reward, value, gamma, lam):
    """Eq. 16 of GAE as it is written; after the last token the value is 0."""
    n, value = len(reward), [*value, 0.0]
    delta = [reward[t] + gamma * value[t + 1] - value[t] for t in range(n)]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]


def credit(rewards, penalties, value, cfg):
    """Advantages, returns or None, and which groups are dead. PPO takes the penalty token by token
    (eq. 2); without a critic the completion is one action, and it comes off the last reward."""
    if value is None:
        rewards = [found | {max(found): found[max(found)] - sum(penalty)}
                   for found, penalty in zip(rewards, penalties)]
    scores, dead, adv, returns = [], [], [], None
    for start in range(0, len(rewards), cfg.group):
        of_rows, same = group_scores(rewards[start:start + cfg.group], cfg)
        scores += of_rows
        dead.append(same)
    for i, penalty in enumerate(penalties):
        places = range(len(penalty))
        if value is None:
            adv.append([sum(x for end, x in scores[i].items() if end >= t) for t in places])
        else:
            reward = [scores[i].get(t, 0.0) - penalty[t] for t in places]
            adv.append(gae(reward, value[i], grpo.GAMMA, cfg.lam))
    if value is not None:
        returns = [[a + v for a, v in zip(*both)] for both in zip(adv, value)]
    if cfg.adv_scale == "batch":
        everything = sum(adv, [])
        centre, std = mean(everything), pstdev(everything)
        adv = [[0.0 if equal(everything) else (a - centre) / std for a in row] for row in adv]
    return adv, returns, dead


def kl_of_token(logp, ref, ratio, estimator):
    """Of KL(pi || ref), with x = pi_ref / pi; ratio*k3 is k3 under the importance weight."""
    log_x = ref - logp
    k3 = log_x.exp() - 1 - log_x
    return {"k1": -log_x, "k2": log_x ** 2 / 2, "k3": k3, "ratio*k3": ratio * k3}[estimator]


def weight_of_token(length, lengths, cfg):
    """GRPO: the mean over a row, then rows; DAPO: over all tokens; Dr. GRPO: over --max_new."""
    return {"sequence": 1 / len(lengths) / length, "token": 1 / sum(lengths),
            "constant": 1 / (len(lengths) * cfg.max_new)}[cfg.loss_mean]


def value_error(value, old, target, clip=0.2):
    """Half the squared error, or that of the value near the old one if it is more."""
    moved = value.item() - old
    kept = value if abs(moved) <= clip else old + math.copysign(clip, moved)
    plain, clipped = (value - target) ** 2, (kept - target) ** 2
    return (plain if plain >= clipped else clipped) / 2


# ---------- training

class Oracle:
    """Models that it changes. `high`, `low`: how many tokens were clipped at each side."""

    def __init__(self, cfg, policy, ref, critic, norm):
        self.cfg, self.policy, self.ref, self.critic, self.norm = cfg, policy, ref, critic, norm
        self.params = [p for model in (policy, critic) if model is not None
                       for p in model.parameters() if p.requires_grad]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.params]
        self.steps, self.updates, self.high, self.low, self.eps = 0, 0, 0, 0, 1e-8

    def follow(self):
        """The reference becomes the policy."""
        for p, q in zip(self.ref.parameters(), self.policy.parameters(), strict=True):
            p.data.copy_(q.data)

    def step(self, rows, minibatches):
        """Trains on a rollout, in minibatches of indices of its rows; gives the statistics."""
        cfg, ref, value = self.cfg, None, None
        with torch.no_grad():
            old = [logps(self.policy, row, cfg.temperature).tolist() for row in rows]
            if self.ref is not None:
                ref = [logps(self.ref, row, cfg.temperature).tolist() for row in rows]
            if self.critic is not None:
                value = [values(self.policy, self.critic, row).tolist() for row in rows]
        penalties = [[0.0] * len(row) for row in old]
        if cfg.kl == "reward" and ref:
            penalties = [[cfg.beta * kl_of_token(*torch.tensor(both), 1, cfg.estimator).item()
                          for both in zip(*row)] for row in zip(old, ref)]
        rewards = [step_rewards(row, cfg, self.norm) for row in rows]
        adv, returns, dead = credit(rewards, penalties, value, cfg)

        stats = {name: mean(counted(row)[name] for row in rows) for name in rows[0].components}
        stats["accuracy"] = stats.pop("correct")
        if cfg.reward != "rule":
            stats["rule_reward"] = mean(sum(by_rule(row, cfg).values()) for row in rows)
        stats |= {"reward": mean(sum(found.values()) for found in rewards),
                  "length": mean(len(row.completion) for row in rows),
                  "finished": mean(row.finished for row in rows), "dead_groups": mean(dead),
                  "entropy": mean(-x for row in old for x in row), "mismatch": 0.0}
        if value is not None:
            left = [r - v for both in zip(returns, value) for r, v in zip(*both)]
            spread = max(pvariance(sum(returns, [])), 1e-8)
            stats["explained_variance"] = 1 - pvariance(left) / spread
        data = [dict(row=row, old=old[i], ref=ref and ref[i], value=value and value[i], adv=adv[i],
                     returns=returns and returns[i]) for i, row in enumerate(rows)]
        of_updates = [self.update([data[i] for i in chosen]) for chosen in minibatches]
        stats |= {name: mean(x[name] for x in of_updates) for name in of_updates[0]}
        self.steps += 1
        if cfg.beta and cfg.kl in ("loss", "reward"):
            stats["beta"] = cfg.beta
        return stats

    def update(self, rows):
        """One optimizer step. Its statistics but the losses are means over all tokens."""
        cfg, lengths = self.cfg, [len(d["adv"]) for d in rows]
        loss = errors = torch.zeros((), requires_grad=True)         # all may be clipped
        clipped, kls = self.high + self.low, []
        for d in rows:
            logp, n = logps(self.policy, d["row"], cfg.temperature), len(d["adv"])
            value = self.critic and values(self.policy, self.critic, d["row"])
            weight = weight_of_token(n, lengths, cfg)
            of_row = (sum(logp[t] - d["old"][t] for t in range(n)) / n).exp()
            for t, A in enumerate(d["adv"]):
                of_token = (logp[t] - d["old"][t]).exp()
                ratio = of_row if cfg.ratio == "sequence" else of_token
                gain = ratio * A
                if A > 0 and ratio > 1 + cfg.clip_high:
                    gain, self.high = (1 + cfg.clip_high) * A, self.high + 1
                if A < 0 and ratio < 1 - cfg.clip_low:
                    gain, self.low = (1 - cfg.clip_low) * A, self.low + 1
                if d["ref"]:
                    kl = kl_of_token(logp[t], d["ref"][t], of_token, cfg.estimator)
                    kls.append(kl.item())
                    gain = gain - cfg.beta * kl if cfg.kl == "loss" else gain
                loss = loss - weight * gain
                if self.critic:
                    error = value_error(value[t], d["value"][t], d["returns"][t])
                    errors = errors + weight * error
        clipped = self.high + self.low - clipped
        stats = {"loss": loss.item(), "clip_share": clipped / sum(lengths)}
        stats |= {"kl": mean(kls)} if kls else {}
        if self.critic is not None:
            stats["value_loss"] = errors.item()
        norm = self.descend(loss + grpo.VALUE_COEF * errors)
        return stats | {"grad_norm": norm, "lr": self.rate}

    def descend(self, loss):
        """Clips the gradient to a norm, all models together (torch adds 1e-6 to the denominator),
        then Adam with betas 0.9 and 0.95. Gives the norm before."""
        grads = torch.autograd.grad(loss, self.params, materialize_grads=True)
        norm = math.sqrt(sum((g * g).sum().item() for g in grads))
        self.updates += 1
        rate = self.cfg.lr
        if self.cfg.half_life:
            rate *= 2 ** (-self.steps / self.cfg.half_life)
        self.rate = rate
        for p, g, (m, v) in zip(self.params, grads, self.moments):
            g = g * min(1.0, grpo.GRAD_CLIP / (norm + 1e-6))
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.95 * v + 0.05 * g * g)
            first, second = m / (1 - 0.9 ** self.updates), v / (1 - 0.95 ** self.updates)
            p.data -= rate * first / (second.sqrt() + self.eps)
        return norm


# ---------- the reward model

class Draws(random.Random):
    """A random stream that keeps what was sampled."""

    def __init__(self, source):
        self.samples = []
        self.setstate(source.getstate())

    def sample(self, *given):
        found = super().sample(*given)
        self.samples.append((*given, found))
        return found


class FitOracle:
    """A reward model over iterations. A set is a list of (row, {index of a token: label}): of K
    completions of a problem where one of them is chosen, else of one."""

    def __init__(self, cfg, model, row_of):
        self.cfg, self.model, self.row_of, self.history, self.norm = cfg, model, row_of, [], None
        self.K = reward_module.CHOICES if cfg.supervision == "outcome" else 1

    def scores(self, row, labels):
        """The score of each token that has a label."""
        h = self.model.trunk(torch.tensor([row.prompt + row.completion]))[0, len(row.prompt):]
        head = self.model.head
        return [h[index] @ head.weight[0] + head.bias[0] for index in sorted(labels)]

    def labels(self, rows, continued):
        """The labelled sets. `continued`: tokens up to the end of each step but the last, and the
        same with each continuation."""
        found = [by_rule(row, self.cfg) for row in rows]
        for row, labels in zip(rows, found) if self.cfg.reward == "rollouts" else ():
            for index in sorted(labels)[:-1]:
                before, tries = next(continued)
                assert before == row.prompt + row.completion[:index + 1] and len(tries) == 4
                tries = [self.row_of(row.prompt, ids[len(row.prompt):]) for ids in tries]
                labels[index] = mean(x.finished * x.components["correct"] for x in tries)
        assert next(continued, None) is None
        sets = [*zip(rows, found)]
        sets = [sets[i:i + self.K] for i in range(0, len(sets), self.K)]
        for a_set in sets if self.K > 1 else ():        # any of the best is chosen
            totals = [sum(labels.values()) for _, labels in a_set]
            for total, (_, labels) in zip(totals, a_set):
                chance = (total == max(totals)) / totals.count(max(totals))
                labels.update(dict.fromkeys(labels, chance))
        return sets

    def loss(self, chosen):
        """Bradley-Terry's, for K completions, or the cross-entropy of each step."""
        terms = []
        for a_set in chosen:
            score = [s for row, labels in a_set for s in self.scores(row, labels)]
            label = [labels[i] for _, labels in a_set for i in sorted(labels)]
            if self.K == 1:
                terms += [-(y * torch.sigmoid(s).log() + (1 - y) * torch.sigmoid(-s).log())
                          for s, y in zip(score, label)]
            else:
                total = sum(s.exp() for s in score)
                terms.append(-sum(y * (s.exp() / total).log() for s, y in zip(score, label)))
        return sum(terms) / len(terms)

    def fit(self, rows, continued, draws):
        """The first tenth of the rows measures; a tenth as many of history are learned again."""
        sets = self.labels(rows, continued)
        apart = 50 // 10 * reward_module.CHOICES // self.K
        test, own = sets[:apart], sets[apart:]
        *more, (numbers_of, n, order) = draws.samples[2:]
        assert len(more) == bool(self.history)
        again = []
        for old, n_old, picked in more:
            assert [*old] == [*range(len(self.history))]
            assert n_old == len(own) * self.K // 10 // self.K
            again = [self.history[i] for i in picked]
        data = own + again
        assert [*numbers_of] == [*range(len(data))] and n == len(data)
        self.descend([data[i] for i in order], max(1, len(data) * self.K // 64))
        self.history += own
        with torch.no_grad():
            score = [s.item() for a_set in self.history for x in a_set for s in self.scores(*x)]
            self.norm = mean(score), stdev(score)
            return self.quality(test)

    def descend(self, data, steps):
        """Adam, once through the data in `steps` parts, larger ones first; 30 steps of warm-up,
        then down to 0."""
        adam = Oracle(self.cfg, None, None, self.model, None)
        peak = 1e-3 * min(1, 256 / len(self.model.head.weight[0]))
        size, longer = divmod(len(data), steps)
        for step in range(steps):
            part, data = data[:size + (step < longer)], data[size + (step < longer):]
            rate = peak * min(1 - step / steps, (step + 1) / 30)
            adam.cfg = replace(self.cfg, lr=rate, baseline="none")
            adam.descend(self.loss(part))
        assert not data

    def quality(self, test):
        """Accuracy, the best of K or by the sign."""
        right = []
        for a_set in test:
            score = [s.item() for x in a_set for s in self.scores(*x)]
            label = [labels[i] for _, labels in a_set for i in sorted(labels)]
            if self.K == 1:
                right += [(s > 0) == (y > 0.5) for s, y in zip(score, label)]
            elif min(label) < max(label):
                right.append(label[score.index(max(score))] == max(label))
        return {"rm_accuracy": mean(right)}
