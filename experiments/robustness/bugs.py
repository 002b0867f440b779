"""Injects known bugs of GRPO and PPO code into a copy of the repository, one at a time, and runs the tests.

    python experiments/robustness/bugs.py            # all; a quarter of an hour
    python experiments/robustness/bugs.py GAE clip   # those whose name contains one of the words
    python experiments/robustness/bugs.py --readme   # all, and rewrite bugs.md
    python experiments/robustness/bugs.py --quick    # how many of them `pytest -m quick` catches

Prints each bug and the first test that fails. The exit code is 1 if no test fails for one of them.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# name, file, text, what replaces it, tests to run
BUGS = [
    # masks, tokens, alignment
    ('the mask excludes the end token', 'grpo.py',
     'mask[rows, column] = own',
     'mask[rows, column] = own & ~torch.isin(token, stop)', 'sampling'),
    ('a truncated row counts as finished', 'grpo.py',
     '(token[:, None] == stop).any(1) & own',
     '((token[:, None] == stop).any(1) | (n + 1 >= limit[rows])) & own', 'sampling'),
    ('finished rows continue', 'grpo.py',
     'torch.where(done[rows], T, start[rows] + n)',
     'start[rows] + n', 'sampling'),
    ('positions continue from the longest prompt', 'grpo.py',
     'p = cache.append(token, column, done)',
     'p = cache.append(token, (max(lengths) + n) + 0 * column, done)', 'sampling passes'),
    ('rows with different tokens share a state', 'run/caches.py', ' and before.diff().all():', ':', 'sampling passes'),
    ("a state reads another state's cache", 'run/caches.py',
     'self.cache.index_select(2, before), after',
     'self.cache.index_select(2, before.flip(0)), after', 'sampling passes'),
    ('the last column of a padded prompt is read', 'run/caches.py',
     'h[torch.arange(len(ids), device=ids.device), length - 1]',
     'h[:, -1]', 'sampling passes'),
    ('the mask is one column off', 'run/passes.py',
     'scored, index = tokens_to_score(ids, mask, gpt',
     'scored, index = tokens_to_score(ids, mask.roll(1, 1), gpt', 'passes'),
    ('random numbers depend on the batch', 'grpo.py',
     'None if u is None else u[rows, n]',
     'None if u is None else u[:len(rows), n]', 'sampling'),
    ('a token is drawn from the part of the vocabulary before its own', 'run/caches.py',
     'return PART * part + inner',
     'return PART * (part - 1).clamp(min=0) + inner', 'sampling'),
    ('a part and its token are drawn with the same number', 'run/caches.py',
     'parts[rows, part], within)',
     'parts[rows, part], u)', 'sampling'),
    ('a random number of 1 is past the last token', 'run/caches.py',
     'u[:, None].clamp(2 ** -25, 1 - 2 ** -24)',
     'u[:, None]', 'sampling'),
    ('prompt tokens enter the loss', 'run/passes.py',
     'logp = torch.where(sampled, F.pad(logp, (0, 1))[send(index, device)], 0)',
     'logp = F.pad(logp, (0, 1))[send(index, device)]', 'loss'),
    ('masking by x * mask', 'grpo.py',
     'torch.where(differ, (x - mean) / std, 0)',
     '((x - mean) / std * differ)', 'advantages loss'),
    ('completions are scored against the wrong prompt', 'reward.py',
     'return [item for item in items for _ in range(group)]',
     'return [item for items in [[*items]] for _ in range(group) for item in items]', 'tasks -k pairs'),
    ('the text is tokenised a second time', 'reward.py',
     '    batch.texts = texts(agent.encoding, batch, episodes)\n',
     '    batch.texts = texts(agent.encoding, batch, episodes)\n    batch.ids = batch.ids.clamp(max=127)\n',
     'end_to_end -k trained_ids'),
    ('rows without an advantage are skipped despite a KL', 'run/passes.py',
     'if agent.ref is not None or agent.critic is not None:',
     'if agent.critic is not None:', 'loss'),
    ('rows without an advantage are skipped despite a critic', 'run/passes.py',
     'if agent.ref is not None or agent.critic is not None:',
     'if agent.ref is not None:', 'loss'),
    ('a log-probability too many is shared between rows', 'run/passes.py',
     'once = index[mask].unique',
     'once = index[mask.roll(-1, 1)].unique', 'loss passes oracle'),
    ('no temperature in the trainer', 'run/passes.py',
     'before = before[send(scored, device)] / temperature',
     'before = before[send(scored, device)]', 'passes'),
    ('no temperature in the sampler', 'grpo.py',
     'caches.new(policy, T, temperature)',
     'caches.new(policy, T, 1.0)', 'sampling'),
    ('a cache has the temperature for the first token alone', 'run/caches.py',
     'self.probs(self.step(',
     'self.probs(self.temperature * self.step(', 'sampling caches'),
    ('a cache has the temperature for all tokens but the first', 'run/caches.py',
     'self.probs(self.read(',
     'self.probs(self.temperature * self.read(', 'sampling passes'),
    ('the reference has another temperature', 'run/passes.py',
     'mask[rows, :T], cfg.temperature, critic)',
     'mask[rows, :T], 1.0, critic)', 'oracle -k temperature'),
    ('old log-probs are refreshed', 'grpo.py', '    old_logp = batch.old_logp\n', '    old_logp = None\n', 'loss'),
    ('the old policy is the policy despite a second update', 'grpo.py', '    if has_ratios:', '    if False:', 'train'),
    ('the clip share misses one side', 'grpo.py',
     'torch.minimum(unclipped, clipped), clipped < unclipped',
     'torch.minimum(unclipped, clipped), (clipped < unclipped) & (adv > 0)', 'loss'),
    ('the larger surrogate is taken', 'grpo.py',
     'torch.minimum(unclipped, clipped)',
     'torch.maximum(unclipped, clipped)', 'loss'),
    ('a sequence ratio instead of token ratios', 'grpo.py', 'if cfg.ratio == "sequence":', 'if True:', 'loss'),
    ('the sequence ratio is a sum, not a mean', 'grpo.py',
     'mean = log_ratio.sum(1, keepdim=True) / length',
     'mean = log_ratio.sum(1, keepdim=True)', 'oracle -k gspo'),
    # advantages
    ('equal rewards give scores that are not exactly 0', 'grpo.py', 'dead = std <= 1e-6', 'dead = std < 0', 'loss'),
    ("Bessel's correction", 'grpo.py',
     'std = (square.sum((1, 2), keepdim=True) / n).sqrt()',
     'std = (square.sum((1, 2), keepdim=True) / (n - 1)).sqrt()', 'loss'),
    ('group statistics are computed over the batch', 'grpo.py',
     'ends = ends.view(-1, cfg.group, shape[1])',
     'ends = ends[None]', 'loss'),
    ('a leave-one-out baseline includes its own row', 'grpo.py',
     'score = r - others / (n - ends.sum(2, keepdim=True))',
     'score = r - mean', 'advantages'),
    ('a group of one is compared with itself', 'run/preflight.py', 'if cfg.group == 1 and compares:', 'if False:', 'warm_start -k at_most'),
    ('the mean is taken over each micro-batch', 'grpo.py',
     'total_loss(agent, part, weight, n_tokens)',
     'total_loss(agent, part, weight / weight.sum(), n_tokens)', 'loss'),
    ('only the last micro-batch is logged', 'grpo.py', 'stats[name] += x.detach()', 'stats[name] = x.detach()', 'oracle -k steps'),
    ('minibatches are divided by the whole rollout', 'grpo.py',
     'token_weights(part.mask, cfg.loss_mean, n_rows,',
     'token_weights(part.mask, cfg.loss_mean, len(batch.ids),', 'oracle -k steps'),
    ('gradients are not cleared', 'grpo.py', '        agent.opt.zero_grad()\n', '', 'oracle -k steps'),
    ('0 / 0 for an empty row', 'grpo.py',
     'mask.sum(1, keepdim=True).clamp(min=1)',
     'mask.sum(1, keepdim=True)', 'loss'),
    ('short rows have more weight in the expected reward', 'grpo.py',
     '# 2402.14740\n                 loss_mean="constant",',
     '# 2402.14740\n                ', 'advantages'),
    ('float64 on a device without it', 'model.py',
     'return x.float() if x.device.type == "mps" else x.double()',
     'return x.double()', 'loss -k float64'),
    ('k3 loses its digits near 0', 'grpo.py', 'k3 = log_r.expm1() - log_r ', 'k3 = log_r.exp() - 1 - log_r ', 'loss'),
    ('k3 overflows', 'grpo.py', 'return x + (x.clamp(-20, 20) - x).detach()', 'return x', 'loss'),
    ('the KL in the wrong direction', 'grpo.py',
     'log_r = bounded(ref_logp - logp)',
     'log_r = bounded(logp - ref_logp)', 'loss'),
    ("the reward's KL is in the loss as well", 'grpo.py', 'if cfg.kl == "loss":', 'if True:', 'advantages'),
    ('beta is adapted in the wrong direction', 'experiments/variants/adaptive_kl.py',
     'stats["kl"] / TARGET - 1',
     '1 - stats["kl"] / TARGET', 'variants -k steered'),
    ('the reference is not frozen', 'run/setup.py',
     'agent.ref = dist.shard_module(cfg, frozen(policy))',
     'agent.ref = policy', 'data_flow -k reference_moves'),
    # PPO, process supervision
    ('the value depends on its token', 'run/passes.py',
     'value = F.pad(critic(ids[:, :-1], layout, h), (1, 0))',
     'value = critic(ids, layout_of(gpt, ids, mask), gpt(ids))', 'advantages'),
    ('GAE bootstraps from padding', 'grpo.py',
     'next_value = torch.where(sampled, value[:, t], next_value)',
     'next_value = value[:, t]', 'advantages'),
    ('GAE without lambda', 'grpo.py', 'delta + gamma * lam * next_adv', 'delta + gamma * next_adv', 'advantages'),
    ("PPO with Adam's default epsilon", 'grpo.py', '        eps = 1e-5 ', '        eps = 1e-8 ', 'oracle -k ppo'),
    ('the outcome reward is at the wrong token', 'run/passes.py',
     '(mask.flip(1).cumsum(1).flip(1) == 1)',
     '(mask.cumsum(1) == 1)', 'advantages reward'),
    ('whitening over padding', 'grpo.py', 'dist.mean_and_std(x[mask])', 'dist.mean_and_std(x.flatten())', 'advantages'),
    ('returns are computed from whitened advantages', 'grpo.py',
     '        returns = adv + value\n',
     '        returns = whiten(adv, mask) + value\n', 'advantages'),
    ('the smaller value error is taken', 'grpo.py',
     'torch.maximum((value - returns)',
     'torch.minimum((value - returns)', 'advantages'),
    ('earlier steps count', 'grpo.py', 'score.flip(1).cumsum(1).flip(1)', 'score.cumsum(1)', 'advantages loss'),
    ('the last step ends before the end token', 'reward.py', '        tokens[-1] = len(said) - 1\n', '', 'reward'),
    ('all true steps to a wrong answer are good', 'reward.py',
     'truths[-1] = truths[-1] and correct[i] > 0',
     'pass', 'reward'),
    ('a truncated completion is rewarded', 'reward.py',
     'torch.where(batch.finished, x, x.clamp(max=0))',
     'x', 'task_errors -k cut_off'),
    ('truncation raises a bad score', 'reward.py',
     'batch.reward.clamp(max=TRUNCATED_REWARD)',
     'TRUNCATED_REWARD', 'reward'),
    # reward models
    ('the score is read one token early', 'reward.py',
     '(raw - mean) / std, 0)',
     '(raw.roll(1, 1) - mean) / std, 0)', 'reward'),
    ('annotators choose the worst', 'reward.py',
     'best = reward == reward.amax(1, keepdim=True)',
     'best = reward == reward.amin(1, keepdim=True)', 'reward'),
    ('the score is not normalised', 'reward.py', '(raw - mean) / std, 0)', 'raw, 0)', 'reward'),
    ('ties are not broken uniformly', 'reward.py',
     'chance = best / best.sum(1, keepdim=True)',
     'chance = F.one_hot(best.float().argmax(1), best.size(1)).float()', 'reward'),
    ('scores are normalised on the last batch only', 'reward.py',
     'normalise(reward_model, agent.history, cfg)',
     'normalise(reward_model, train, cfg)', 'oracle -k three_fits'),
    ('no history is replayed', 'reward.py',
     'to_fit = concatenate(train, old)', 'to_fit = train', 'oracle -k three_fits'),
    ('the held-out tenth is fitted as well', 'reward.py',
     'train = some(rows, slice(apart, None))',
     'train = rows', 'reward'),
    ('the wrong problems are labelled', 'grpo.py',
     'generate(agent, part, reward.CHOICES, rng)',
     'generate(agent, train[:len(part)], reward.CHOICES, rng)', 'oracle -k three_fits'),
    ("a learned reward is divided by the group's std", 'grpo.py',
     'others["adv_scale"] = "none"',
     'pass', 'config -k imply'),
    ('the reference is not updated between iterations', 'grpo.py',
     'dist.copy_weights(agent.ref, agent.policy)',
     'pass', 'data_flow -k reference_moves'),
    # system
    ('the same random numbers on every rank', 'grpo.py',
     'u = dist.of_rank(u).flatten(0, 1)',
     'u = u[:len(dist.of_rank(u))].flatten(0, 1)', 'ranks'),
    ('the same prompts on every rank', 'grpo.py',
     '    problems = dist.of_rank(problems)\n',
     '    problems = problems[:len(dist.of_rank(problems))]\n', 'ranks'),
    ('gradients are not summed over ranks', 'run/dist.py',
     'p.grad = grad if is_sharded(grad) else all_reduce(grad)',
     'p.grad = grad', 'ranks'),
    ('the sampler keeps the old policy', 'run/dist.py',
     '    if agent.sampler is not agent.policy:',
     '    if False:', 'speed -k copy'),
    ('a sharded gradient is averaged over the ranks', 'run/dist.py',
     '        part.set_gradient_divide_factor(1.0)        # a sum: the loss is weighted over all ranks\n'
     '        part.set_force_sum_reduction_for_comms(True)\n',
     '        pass\n', 'ranks -k sharded'),
    ('ranks of a sharded model make different numbers of passes', 'run/passes.py',
     '    for _ in range(most - len(chunks)):',
     '    for _ in range(0):', 'ranks -k sharded'),
    ('resume without the adapted beta', 'run/checkpoint.py', 'agent.beta = checkpoint.beta', 'pass', 'variants -k adapted_beta'),
    ('resume without the optimizer', 'run/checkpoint.py',
     'restore_optimizer(agent.opt, named, tensors)',
     'pass', 'checkpoint -k any_optimizer'),
    ('resume that resets the reference', 'run/checkpoint.py',
     '        p.data.copy_(dist.like',
     '        name.startswith("ref.") or p.data.copy_(dist.like', 'oracle -k any_two'),
    ('resume without the critic', 'run/checkpoint.py',
     '        p.data.copy_(dist.like',
     '        name.startswith("critic.") or p.data.copy_(dist.like', 'oracle -k any_two'),
    ('resume without the reward model', 'run/checkpoint.py',
     '        p.data.copy_(dist.like',
     '        name.startswith("reward_model.") or p.data.copy_(dist.like', 'data_flow -k goes_on'),
    ('resume without the labelled rows', 'run/checkpoint.py',
     '    agent.history = {n.removeprefix',
     '    _ = {n.removeprefix', 'data_flow -k goes_on'),
    ('lines are logged twice after a resume', 'run/checkpoint.py',
     'f.truncate(min(f.tell(), checkpoint.sizes[name]))',
     'pass', 'end_to_end -k killed'),
    ('the checkpoint is written in place', 'run/files.py',
     'beside = path.with_name(path.name + ".tmp")',
     'beside = path', 'end_to_end -k killed'),
    ('truncated completions vote', 'run/report.py',
     'answer_of(task, text) if finished else ""',
     'answer_of(task, text)', 'end_to_end -k vote'),
    ('pass@k requires all k to be right', 'run/report.py',
     'enumerate(sorted(right))',
     'enumerate(sorted(right, reverse=True))', 'tasks -k pass_at_k'),
    ('RoPE rotates in the wrong direction', 'model.py',
     '(x * cos + other * sin)',
     '(x * cos - other * sin)', 'model sampling'),
    ('rows share tokens again after diverging', 'run/passes.py', 'same.cumprod(1).bool()', 'same.bool()', 'passes'),
    ('a row takes its state from padding in the row above', 'run/passes.py',
     'same = needed[:-1] & (ids[1:] == ids[:-1])',
     'same = ids[1:] == ids[:-1]', 'passes'),
    ('the cache is read without a mask', 'model.py',
     'q.flatten(2, 3), k, v, mask)',
     'q.flatten(2, 3), k, v)', 'model sampling'),
    ('larger parts of logits than allowed', 'run/passes.py',
     'max(1, most_logits(gpt.device) // gpt',
     'max(1, 2 * most_logits(gpt.device) // gpt', 'preflight'),
    ('activations are kept despite --recompute', 'model.py', 'if self.recompute and', 'if False and', 'preflight'),
    ('the evaluator accepts texts of any length', 'data/answers.py', 'LONGEST = 200', 'LONGEST = 10 ** 9', 'tasks'),
    # settings, folders, everything else
    ('an adapted beta is lost between steps', 'experiments/variants/adaptive_kl.py',
     'agent.beta *= 1 + RATE * error',
     'agent.beta = agent.cfg.beta * (1 + RATE * error)', 'variants -k steered'),
    ('a KL that is only watched is applied', 'grpo.py',
     'if cfg.kl == "loss":',
     'if cfg.kl in ("loss", "watch"):', 'advantages -k nowhere'),
    ("an algorithm's settings are ignored", 'grpo.py', '    chosen |= settings\n', '', 'config -k before_what'),
    ('a row of ALGOS overrides the given flags', 'grpo.py',
     '    chosen |= given\n',
     '    chosen |= given | settings\n', 'config -k before_what'),
    ('a warm start made with other code is reused', 'run/warm_start.py',
     '        if why := outdated(kept',
     '        if False and outdated(kept', 'warm_start -k is_the_same'),
    ('a copied run writes into its original folder', 'run/checkpoint.py',
     '{"out": str(folder), "task_args": args}',
     '{"task_args": args}', 'checkpoint -k alone'),
    ('a finished run is overwritten', 'run/checkpoint.py',
     '        files.keep_previous(folder)',
     '        pass', 'checkpoint -k is_lost'),
    ('a third run replaces the first', 'run/files.py', 'moving = folder / MOVING', 'moving = folder / "previous"', 'checkpoint -k is_lost'),
    ('a file at another path may have another content', 'run/checkpoint.py', 'named[name] == began[name]', 'True', 'checkpoint -k of_the_beginning or was_moved'),
    ('each rank evaluates with its own random numbers', 'grpo.py',
     'dist.rng(cfg, "evaluate")',
     'dist.rng(cfg, "evaluate", dist.rank())', 'ranks'),
    ('the text of a continuation lacks its prefix', 'reward.py',
     '        played.mask |= send(said.repeat_interleave(tries, 0), played.mask.device)\n',
     '', 'reward'),
    ("GAE gives an outcome's score to every token", 'grpo.py',
     'score = torch.where(ends, score, 0).float()',
     'score = score.float()', 'advantages'),
    ('shared rows ignore positions', 'run/passes.py',
     'send(first % ids.size(1), device)',
     'send(torch.arange(len(first)), device)', 'passes'),
    ('a plain cache attends to slots not yet written', 'model.py',
     '> pos[:, None, :, None]',
     '> pos[:, None, :, None] + 1', 'passes sampling'),
    ('a graph is prepared with tokens of 0, whose keys stay', 'run/caches.py',
     '            self.h = model(self.ids, self.pos, self.cache, slots=self.slots)\n            if self.ids.is_cuda:',
     '            on = not self.ids.is_cuda\n'
     '            self.h = model(on * self.ids, on * self.pos, self.cache, slots=self.slots)\n'
     '            if self.ids.is_cuda:', 'graphs'),
    ('a graph has the positions with which it was recorded', 'run/caches.py',
     'self.ids[:len(token), 0], self.pos[:len(token), 0] = token, pos',
     'self.ids[:len(token), 0], self.pos[:len(token), 0] = token, pos if self.graph is None else self.pos[:len(token), 0]', 'graphs'),
    ('graphs outlive the weights that they read', 'run/caches.py', 'MEMORY.pop(model, None)', 'pass', 'graphs'),
    ('a static cache moves rows, but not their keys', 'run/caches.py',
     '            x[:len(kept)] = x[kept]\n',
     '            pass\n', 'caches'),
    ('rows with a new loss term are skipped', 'run/passes.py',
     'return learns if loss == 0 else everything',
     'return learns', 'loss'),
    ('dropout stays on after a fit', 'run/warm_start.py', '    module.eval()\n', '', 'config'),
    ("a fork's parameter is filled with the embedding", 'run/dist.py',
     '    if differing := source.keys() ^ target.keys():',
     '    source = dict.fromkeys(target, source["embed_tokens.weight"]) | source\n    if False:', 'config'),
    ('a # in the help of a field cuts it off', 'run/config.py', '[^#\\n]*)?#', '.*)?#', 'config'),
    ('the mean gap is ignored', 'run/passes.py', ' and mean <= most_on_average', '', 'dist'),
    ('a kept warm start ignores a setting', 'run/warm_start.py',
     'if heading and not heading.startswith(MODEL_HEADING):',
     'if heading:', 'warm_start'),
    ('micro-batches are as large as can be, whatever memory is free', 'run/preflight.py',
     'while n < 32768 and memory(model, replace(cfg, micro_tokens=2 * n), longest) < free:',
     'while n < 32768:', 'preflight'),
    # turns
    ('a reply counts as said by the policy', 'grpo.py', 'mask[rows, column] = own', 'mask[rows, column] = column < T', 'turns'),
    ('a stop token in a reply ends a turn', 'grpo.py',
     '(token[:, None] == stop).any(1) & own', '(token[:, None] == stop).any(1) & (column < T)', 'turns'),
    ('a reply is sampled, not read', 'grpo.py', 'torch.where(own, token, ids[rows, column])', 'token', 'turns'),
    ('a reply has log-probabilities', 'grpo.py', 'logp = torch.where(mask, logp, 0)', 'logp = logp', 'turns'),
    ('an episode that is cut off counts as finished', 'grpo.py',
     'finished[row] = False\n            limit', 'finished[row] = True\n            limit', 'turns'),
    ('a reply begins a column late', 'grpo.py', 'columns = slice(end, end + len(said))',
     'columns = slice(end + 1, end + 1 + len(said))', 'turns'),
    ('a reply may take the last token', 'data/turns.py', 'len(said) >= left:', 'len(said) > left:', 'turns'),
    ('a turn too many', 'data/turns.py', 'len(turns[::2]) >= self.max_turns', 'len(turns[::2]) > self.max_turns', 'turns'),
    ('a turn is read from the beginning of the episode', 'data/turns.py',
     'self.begun[row] = len(ids) + len(said)', 'pass', 'turns'),
    ('an episode cut off within a turn lacks it', 'data/turns.py', 'if len(turns) % 2 == 0:', 'if not turns:', 'turns'),
    ('what was said includes the replies', 'data/turns.py', '"".join(completion[::2])', '"".join(completion)', 'turns'),
    ('a task changes the record of what was said', 'data/turns.py', 'call(reply, what, problem, [*turns])', 'call(reply, what, problem, turns)', 'turns'),
    ('the warm start imitates the replies', 'run/warm_start.py', 'i % 2 == 1 for i, part', 'i > 0 for i, part', 'turns'),
    ('a prefix ends before the reply to it', 'reward.py', 'begin = later.int().argmax(1) ', 'begin = column + 1 ', 'turns'),
    ('a continuation does not know the turns before it', 'data/turns.py',
     'self.turns[row] = turns[:2 * replies]', 'self.turns[row] = []', 'turns'),
    ('half a character goes on in the next turn', 'data/tokenizer.py', 'i == last or t in encoding.stop', 'i == last', 'turns'),
    ('turns are counted with the replies', 'run/report.py', 'len(text[::2])', 'len(text)', 'turns'),
    ('replies are logged a token late', 'run/passes.py',
     '(columns.diff() > 1).nonzero()[:, 0] + 1', '(columns.diff() > 1).nonzero()[:, 0] + 2', 'turns'),
    ('a reply that fails is a traceback', 'data/__init__.py', 'except (Exception, SystemExit) as e:', 'except UserError as e:', 'turns'),
    ("a demonstration's replies are not checked", 'data/turns.py', 'if said != shown[i]:', 'if False:', 'turns'),
    ('credit stops at a reply', 'grpo.py', 'next_adv = torch.where(sampled, delta + gamma * lam * next_adv, next_adv)',
     'next_adv = torch.where(sampled, delta + gamma * lam * next_adv, 0)', 'turns'),
]


def try_out(bug, quick=False):
    """Inject one bug into a copy of the tree: the first test that then fails, or None. Runs the bug's own tests, or
    all of the quick ones."""
    name, file, text, instead, tests = bug
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", ".git", "__pycache__"))
        source = (copy / file).read_text()
        assert text in source, f"update experiments/robustness/bugs.py: {name}: the quoted text is no longer in {file}"
        (copy / file).write_text(source.replace(text, instead, 1))
        files, _, only = tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header"]
        if quick:
            command += ["-m", "quick"]
        else:
            command += [str(next(copy.glob(f"tests/**/test_{f}.py"))) for f in files.split()]
            command += ["-k", only] if only else []
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert done.returncode in (0, 1), f"{name}: no tests ran\n{done.stdout}"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    return failed and failed[1]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="inject only bugs whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="run all quick tests instead of each bug's own")
    parser.add_argument("--readme", action="store_true", help="write bugs.md")
    args = parser.parse_args(argv)
    chosen = [m for m in BUGS if not args.words or any(word in m[0] for word in args.words)]
    rows, missed = [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, file, *_), failed in zip(chosen, pool.map(partial(try_out, quick=args.quick), chosen)):
            rows.append(f"| {name} | `{file}` | {f'`{failed}`' if failed else '**none**'} |")
            missed += failed is None
            print(rows[-1], flush=True)
    if args.readme and not args.words:
        head = "| what was changed | where | first test that fails |\n|---|---|---|\n"
        (HERE / "bugs.md").write_text(head + "\n".join(rows) + "\n")
    print(f"{len(rows)} bugs injected, {missed} not caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
