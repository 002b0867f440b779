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
     'mask[rows, column] |= active',
     'mask[rows, column] |= active & ~is_stop[token]', 'sampling'),
    ('a truncated row counts as finished', 'grpo.py',
     'finished[rows] |= active & is_stop[token]',
     'finished[rows] |= active & (is_stop[token] | (n + 1 == max_new))', 'sampling'),
    ('finished rows continue', 'grpo.py',
     'active = ~finished[rows] & (n',
     'active = (n', 'sampling'),
    ('positions continue from the longest prompt', 'grpo.py',
     'p = cache.append(token, column)',
     'p = cache.append(token, (longest + n) + 0 * column)', 'sampling sharing'),
    ('rows with different tokens share a state', 'run/prefixes.py',
     ' and before.diff().all():',
     ':', 'sampling sharing'),
    ("a state reads another state's cache", 'run/prefixes.py',
     'self.cache.index_select(2, before), after',
     'self.cache.index_select(2, before.flip(0)), after', 'sampling sharing'),
    ('the last column of a padded prompt is read', 'run/caches.py',
     'h[torch.arange(len(ids), device=ids.device), length - 1]',
     'h[:, -1]', 'sampling sharing'),
    ('the mask is one column off', 'model.py',
     '.to_score(ids, mask)',
     '.to_score(ids, mask.roll(1, 1))', 'sampling'),
    ('random numbers depend on the batch', 'grpo.py',
     'sample_token(p, u[rows, n])',
     'sample_token(p, u[:len(rows), n])', 'sampling'),
    ('a token is drawn from the part of the vocabulary before its own', 'grpo.py',
     'return PART * part + inner',
     'return PART * (part - 1).clamp(min=0) + inner', 'sampling'),
    ('a part and its token are drawn with the same number', 'grpo.py',
     'parts[rows, part], within)',
     'parts[rows, part], u)', 'sampling'),
    ('a random number of 1 is past the last token', 'grpo.py',
     'u[:, None].clamp(2 ** -25, 1 - 2 ** -24)',
     'u[:, None]', 'sampling'),
    ('prompt tokens enter the loss', 'grpo.py',
     'logp, old_logp, adv = (torch.where(mask, x, 0) for x in (logp, old_logp, adv))',
     'pass', 'loss'),
    ('masking by x * mask', 'grpo.py',
     'logp, old_logp, adv = (torch.where(mask, x, 0) for',
     'logp, old_logp, adv = (x * mask for', 'loss'),
    ("completions are scored against the wrong prompt", "reward.py",
     "batch.problems = [p for p in problems for _ in range(group)]",
     "batch.problems = [p for _ in range(group) for p in problems]", "loss"),
    ("the text is tokenised a second time", "reward.py",
     "    batch.components = rule_components(task, batch, tokens)\n",
     "    batch.components = rule_components(task, batch, tokens)\n    batch.ids = batch.ids.clamp(max=127)\n",
     "run -k trained_ids"),
    ('rows without an advantage are skipped despite a KL', 'grpo.py',
     'if agent.ref is not None or agent.critic is not None:',
     'if agent.critic is not None:', 'loss'),
    ('rows without an advantage are skipped despite a critic', 'grpo.py',
     'if agent.ref is not None or agent.critic is not None:',
     'if agent.ref is not None:', 'loss'),
    ('a log-probability too many is shared between rows', 'run/prefixes.py',
     'once = index[mask].unique',
     'once = index[mask.roll(-1, 1)].unique', 'loss sharing oracle'),
    ("no temperature in the trainer", "model.py",
     "before[send(scored, device)] / temperature", "before[send(scored, device)]", "sampling"),
    ('no temperature in the sampler', 'grpo.py',
     'ids.size(1), temperature)',
     'ids.size(1), 1.0)', 'sampling'),
    ('a static cache has the temperature for the first token alone', 'run/caches.py',
     'self.model.probs(h / self.temperature)[:self.rows]',
     'self.model.probs(h)[:self.rows]', 'sampling caches'),
    ('a shared cache has the temperature for all tokens but the first', 'run/prefixes.py',
     'self.model.probs(h / self.temperature)[self.state]\n\n    def keep',
     'self.model.probs(h)[self.state]\n\n    def keep', 'sampling sharing'),
    ("the reference has another temperature", "run/batches.py",
     "temperature=cfg.temperature, critic", "temperature=1.0, critic", "loss"),
    ('old log-probs are refreshed', 'grpo.py',
     'logp.detach() if batch.old_logp is None else batch.old_logp',
     'logp.detach()', 'loss'),
    ('the old policy is the policy despite a second update', 'grpo.py',
     'batch.old_logp = old_logp if cfg.updates > 1 else None',
     'batch.old_logp = None', 'glue'),
    ("the clip share misses one side", "grpo.py",
     "((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))",
     "(adv > 0) & (ratio > high)", "loss"),
    ("the larger surrogate is taken", "grpo.py",
     "torch.minimum(ratio * adv,", "torch.maximum(ratio * adv,", "loss"),
    ("a sequence ratio instead of token ratios", "grpo.py",
     'if cfg.ratio == "sequence":', "if True:", "loss"),
    ("the sequence ratio is a sum, not a mean", "grpo.py",
     "(log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).expand_as",
     "log_ratio.sum(1, True).expand_as", "credit"),
    # advantages
    ("equal rewards give scores that are not exactly 0", "grpo.py",
     "correction=0)\n    dead = std <= 1e-6 * mean.abs().clamp(min=0.1)", "correction=0)\n    dead = std < 0", "loss"),
    ("equal rewards of steps give scores that are not exactly 0", "grpo.py",
     ".div(n).sqrt()\n    dead = std <= 1e-6 * mean.abs().clamp(min=0.1)", ".div(n).sqrt()\n    dead = std < 0", "credit"),
    ("Bessel's correction", "grpo.py",
     "r.std(1, keepdim=True, correction=0)", "r.std(1, keepdim=True)", "loss"),
    ("Bessel's correction over steps", "grpo.py",
     ".div(n).sqrt()", ".div(n - 1).sqrt()", "credit oracle"),
    ('group statistics are computed over the batch', 'grpo.py',
     'r = reward.to(dist.double(reward.device)).view(-1, group)',
     'r = reward.to(dist.double(reward.device))[None]', 'loss'),
    ("a leave-one-out baseline includes its own row", "grpo.py",
     "(total - r.sum(2, True)) / (n - on.sum(2, True))", "mean", "credit"),
    ("a group of one is accepted", "grpo.py",
     "LEAST = dict(group=2", "LEAST = dict(group=1", "loss -k group_of_one"),
    ('the mean is taken over each micro-batch', 'grpo.py',
     'total_loss(agent, part, weight, tokens)',
     'total_loss(agent, part, weight / weight.sum(), tokens)', 'loss'),
    ('only the last micro-batch is logged', 'grpo.py',
     'total[name] = total.get(name, 0.0) + x',
     'total[name] = x', 'loss'),
    ('minibatches are divided by the whole rollout', 'grpo.py',
     'token_weights(part.mask, cfg.loss_mean, size,',
     'token_weights(part.mask, cfg.loss_mean, len(batch.ids),', 'loss'),
    ('gradients are not cleared', 'run/warm_start.py',
     '    opt.zero_grad()\n',
     '', 'loss'),
    ("0 / 0 for an empty row", "grpo.py",
     "mask.sum(1, keepdim=True).clamp(min=1)", "mask.sum(1, keepdim=True)", "loss"),
    ('short rows have more weight in the expected reward', 'grpo.py',
     '"rloo": dict(baseline="leave-one-out", adv_scale="none", kl="reward", loss_mean="constant",',
     '"rloo": dict(baseline="leave-one-out", adv_scale="none", kl="reward",', 'credit plumbing'),
    ('float64 on a device without it', 'run/batches.py',
     'x = x.to(dist.double(x.device))',
     'x = x.double()', 'loss -k float64'),
    ("k3 loses its digits near 0", "grpo.py",
     "k3 = log_r.expm1() - log_r ", "k3 = log_r.exp() - 1 - log_r ", "loss"),
    ("k3 overflows", "grpo.py", "return x + (x.clamp(-20, 20) - x).detach()", "return x", "loss"),
    ("the KL in the wrong direction", "grpo.py",
     "log_r = bounded(ref_logp - logp)", "log_r = bounded(logp - ref_logp)", "loss"),
    ("the reward's KL is in the loss as well", "grpo.py",
     'if cfg.kl == "loss":', "if True:", "credit"),
    ("beta is adapted in the wrong direction", "grpo.py",
     'stats["kl"] / TARGET - 1', '1 - stats["kl"] / TARGET', "variants -k steered"),
    ('the reference is not frozen', 'run/setup.py',
     'agent.ref = dist.shard_module(cfg, frozen(policy))',
     'agent.ref = policy', 'run -k reference_stays'),
    # PPO, process supervision
    ('the value depends on its token', 'model.py',
     'F.pad(critic(ids[:, :-1], mask[:, 1:], h), (1, 0))',
     'critic(ids, mask, model(ids))', 'credit'),
    ('GAE bootstraps from padding', 'grpo.py',
     'next_value = torch.where(mask[:, t], value[:, t], next_value)',
     'next_value = value[:, t]', 'credit'),
    ('GAE without lambda', 'grpo.py',
     'delta + gamma * lam * next_adv',
     'delta + gamma * next_adv', 'credit'),
    ("PPO with Adam's default epsilon", 'run/setup.py',
     'eps = 1e-8 if agent.critic is None else 1e-5',
     'eps = 1e-8', 'plumbing -k adamw'),
    ("the outcome reward is at the wrong token", "run/batches.py",
     "(mask.flip(1).cumsum(1).flip(1) == 1)", "(mask.cumsum(1) == 1)", "credit reward"),
    ("whitening over padding", "run/batches.py",
     "machine.mean_and_std(x[mask])", "machine.mean_and_std(x.flatten())", "credit"),
    ("returns are computed from whitened advantages", "grpo.py",
     "        returns = adv + value\n", "        returns = batches.whiten(adv, mask) + value\n", "credit"),
    ("the smaller value error is taken", "grpo.py",
     "torch.maximum((value - returns).square()",
     "torch.minimum((value - returns).square()", "credit"),
    ("earlier steps count", "grpo.py",
     "score.flip(1).cumsum(1).flip(1)", "score.cumsum(1)", "credit loss"),
    ("the last step ends before the end token", "reward.py",
     "+ columns[-1:]", "+ [columns[tokens[-1]]]", "reward"),
    ("all true steps to a wrong answer are good", "reward.py",
     "[found[-1][1] and correct[i] > 0]", "[found[-1][1]]", "reward"),
    ("a truncated completion is rewarded", "reward.py",
     "            * batch.finished for name", "            for name", "task"),
    ("truncation raises a bad score", "reward.py",
     "batch.reward.clamp(max=TRUNCATED_REWARD)", "TRUNCATED_REWARD", "reward"),
    # reward models
    ("the score is read one token early", "reward.py",
     "return torch.where(batch.ends, reward, 0)",
     "return torch.where(batch.ends, reward.roll(1, 1), 0)", "reward"),
    ("annotators choose the worst", "reward.py",
     "best = reward == reward.amax(1, keepdim=True)",
     "best = reward == reward.amin(1, keepdim=True)", "reward"),
    ("label noise is ignored", "reward.py",
     "if rng.random() < noise and worse:", "if 0:", "reward"),
    ("the score is not normalised", "reward.py",
     "else (raw - mean) / std", "else raw", "reward"),
    ("ties are not broken uniformly", "reward.py",
     "chance = best / best.sum(1, keepdim=True)",
     "chance = F.one_hot(best.float().argmax(1), best.size(1)).float()", "reward"),
    ("scores are normalised on the last batch only", "reward.py",
     'scores(reward_model, history["ids"], history["mask"], cfg)[history["ends"]]',
     'scores(reward_model, rows["ids"], rows["mask"], cfg)[rows["ends"]]', "reward"),
    ("no history is replayed", "reward.py",
     "if history:\n        data", "if 0:\n        data", "reward"),
    ("the held-out tenth is fitted as well", "reward.py",
     "(slice(apart, None), slice(apart))", "(slice(None), slice(apart))", "reward"),
    ('the wrong problems are labelled', 'grpo.py',
     '        batch = generate(agent, part, machine',
     '        batch = generate(agent, drawn[:len(part)], machine', 'reward'),
    ("a learned reward is divided by the group's std", "grpo.py",
     '"model": dict(adv_scale="none")', '"model": {}', "run -k divided"),
    ("the reference is not updated between iterations", "grpo.py",
     "shard.copy_weights(agent.ref, agent.policy)", "pass", "run -k with_every_part"),
    # system
    ("the same random numbers on every rank", "grpo.py",
     "problems, u = dist.of_rank(problems), dist.of_rank(u)",
     "problems, u = dist.of_rank(problems), u[:len(dist.of_rank(problems))]", "ranks"),
    ("the same prompts on every rank", "grpo.py",
     "problems, u = dist.of_rank(problems), dist.of_rank(u)",
     "problems, u = problems[:len(dist.of_rank(problems))], dist.of_rank(u)", "ranks"),
    ('gradients are not summed over ranks', 'run/warm_start.py',
     'p.grad = dist.summed(torch.zeros_like(p) if p.grad is None else p.grad)',
     'p.grad = torch.zeros_like(p) if p.grad is None else p.grad', 'ranks'),
    ("the sampler keeps the old policy", "run/dist.py",
     "    if agent.sampler is not agent.policy:", "    if False:", "speed -k copy"),
    ("a sharded gradient is averaged over the ranks", "run/dist.py",
     "        part.set_gradient_divide_factor(1.0)        # a sum: the loss is weighted over all ranks\n"
     "        part.set_force_sum_reduction_for_comms(True)\n", "        pass\n", "ranks -k sharded"),
    ("ranks of a sharded model make different numbers of passes", "run/batches.py",
     "    for _ in range(len(chunks), most):", "    for _ in range(0):", "ranks -k sharded"),
    ('resume without the adapted beta', 'run/checkpoint.py',
     'agent.beta = checkpoint.beta',
     'pass', 'run -k steered'),
    ('resume without the optimizer', 'run/checkpoint.py',
     'restore_optimizer(agent.opt, named, tensors)',
     'pass', 'run -k half'),
    ('resume that resets the reference', 'run/checkpoint.py',
     '        p.data.copy_(dist.like',
     '        name.startswith("ref.") or p.data.copy_(dist.like', 'run -k with_every_part'),
    ('resume without the critic', 'run/checkpoint.py',
     '        p.data.copy_(dist.like',
     '        name.startswith("critic.") or p.data.copy_(dist.like', 'run -k with_every_part'),
    ('resume without the reward model', 'run/checkpoint.py',
     '        p.data.copy_(dist.like',
     '        name.startswith("reward_model.") or p.data.copy_(dist.like', 'run -k with_every_part'),
    ('resume without the labelled rows', 'run/checkpoint.py',
     '    agent.history = {n.removeprefix',
     '    _ = {n.removeprefix', 'run -k with_every_part'),
    ('lines are logged twice after a resume', 'run/checkpoint.py',
     'f.truncate(min(f.tell(), checkpoint.sizes[name]))',
     'pass', 'run -k killed'),
    ("the checkpoint is written in place", "run/files.py",
     'beside = path.with_name(path.name + ".tmp")', "beside = path", "run -k killed"),
    ("truncated completions vote", "grpo.py",
     'agent.task.answer(text) if ended else ""', "agent.task.answer(text)", "run -k vote"),
    ("pass@k requires all k to be right", "data/answers.py", "enumerate(sorted(right))",
     "enumerate(sorted(right, reverse=True))", "task -k pass_at_k"),
    ('RoPE rotates in the wrong direction', 'model.py',
     'x * cos + x.roll(',
     'x * cos - x.roll(', 'model sampling'),
    ('rows share tokens again after diverging', 'run/prefixes.py',
     'alike.cumprod(1).bool()',
     'alike.bool()', 'sharing'),
    ('a row takes its state from padding in the row above', 'run/prefixes.py',
     '    alike = needed[:-1]\n',
     '    alike = torch.ones_like(needed[:-1])\n', 'sharing'),
    ("the cache is read without a mask", "model.py",
     "attn_mask=mask.flatten(2, 3)", "attn_mask=None", "model sampling"),
    ("larger parts of logits than allowed", "model.py",
     "max(1, most_logits(device) // model", "max(1, 2 * most_logits(device) // model", "memory"),
    ("activations are kept despite --recompute", "model.py",
     "if self.recompute and", "if False and", "memory"),
    ("the evaluator accepts texts of any length", "data/answers.py",
     "LONGEST = 200", "LONGEST = 10 ** 9", "task"),
    # settings, folders, everything else
    ("an adapted beta is lost between steps", "grpo.py",
     "agent.beta *= 1 + 0.1 * error",
     "agent.beta = cfg.beta * (1 + 0.1 * error)", "run -k steered"),
    ("a KL that is only watched is applied", "grpo.py",
     'if cfg.kl == "loss":', 'if cfg.kl in ("loss", "watch"):', "run -k watched"),
    ("an algorithm's settings are ignored", "grpo.py",
     "REWARDS)] | row\n", "REWARDS)]\n", "run -k one_way"),
    ('a row of ALGOS overrides the given flags', 'grpo.py',
     'flags.build(Config, fields, given)',
     'flags.build(Config, fields | given, row)', 'run -k overridden'),
    ('a warm start made with other code is reused', 'run/warm_start.py',
     '        if why := outdated(kept',
     '        if False and outdated(kept', 'run -k changed_task'),
    ('a copied run writes into its original folder', 'run/checkpoint.py',
     '**flags | {"out": str(folder)})',
     '**flags)', 'run -k copied'),
    ('a finished run is overwritten', 'run/checkpoint.py',
     '        files.keep_previous(folder)',
     '        pass', 'run -k kept_aside'),
    ("each rank evaluates with its own random numbers", "grpo.py",
     'machine.rng(agent.cfg, "evaluate")',
     'machine.rng(agent.cfg, "evaluate", dist.rank())', "ranks"),
    ('the text of a continuation lacks its prefix', 'reward.py',
     'ended.start = start[row].repeat_interleave(tries)',
     'pass', 'reward'),
    ("GAE gives an outcome's score to every token", 'grpo.py',
     'return torch.where(on, r / divisor[scale], 0).view_as',
     'return (r / divisor[scale]).view_as', 'credit'),
    ('shared rows ignore positions', 'run/prefixes.py',
     'first, index = distinct(mask, *known)',
     'first, index = distinct(mask, known[0])', 'sharing'),
    ('a plain cache attends to slots not yet written', 'model.py',
     '> self.pos[:, None, :, None]',
     '> self.pos[:, None, :, None] + 1', 'sharing sampling'),
    ('a graph is prepared with tokens of 0, whose keys stay', 'run/caches.py',
     '            self.h = model(self.ids, self.pos, self.cache, slots=self.slots)\n            if self.ids.is_cuda:',
     '            on = not self.ids.is_cuda\n'
     '            self.h = model(on * self.ids, on * self.pos, self.cache, slots=self.slots)\n            if self.ids.is_cuda:',
     'graphs'),
    ('a graph has the positions with which it was recorded', 'run/caches.py',
     'self.ids[:len(token), 0], self.pos[:len(token), 0] = token, pos',
     'self.ids[:len(token), 0], self.pos[:len(token), 0] = token, pos if self.graph is None else self.pos[:len(token), 0]',
     'graphs'),
    ('graphs outlive the weights that they read', 'run/caches.py',
     'MEMORY.pop(model, None)',
     'pass', 'graphs'),
    ('a static cache moves rows, but not their keys', 'run/caches.py',
     '            x[:len(kept)] = x[kept]\n',
     '            pass\n', 'caches'),
    ('rows with a new loss term are skipped', 'grpo.py',
     '    if loss.item() != 0:',
     '    if False:', 'loss'),
    ('dropout stays on after the update', 'grpo.py',
     '    setup.train_mode(agent, False)\n',
     '', 'loss'),
    ("a fork's parameter is filled with the embedding", 'run/dist.py',
     '    if differing := source.keys() ^ target.keys():',
     '    source = dict.fromkeys(target, source["embed_tokens.weight"]) | source\n    if False:', 'fork'),
    ("a field gets the next field's help", 'run/config.py',
     '            statement = []\n',
     '            statement = [] if text.type == tokenize.COMMENT or name.string not in names else statement\n', 'fork'),
    ('the mean gap is ignored', 'run/batches.py',
     ' and mean <= most_on_average',
     '', 'machine'),
    ('a kept warm start ignores a setting', 'run/warm_start.py',
     'if not title.startswith(MODEL_HEADING)',
     'if title', 'start'),
    ('micro-batches are as large as can be, whatever memory is free', 'run/preflight.py',
     'while n < 32768 and memory(model, replace(cfg, micro_tokens=2 * n), longest) < free:',
     'while n < 32768:', 'memory'),
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
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--processes", "1"]
        if quick:
            command += ["-m", "quick"]
        else:
            command += [f"tests/test_{f}.py" for f in files.split()] + (["-k", only] if only else [])
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
