"""Puts known bugs of GRPO and PPO code into a copy of this one, one at a time, and runs the tests.

    python experiments/bugs.py            # all; a quarter of an hour
    python experiments/bugs.py GAE clip   # those whose name holds one of the words
    python experiments/bugs.py --readme   # all, and replace bugs.md

Prints what was changed, and the first test that failed. A bug that no test sees is a hole in the
tests: the script ends with code 1.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

# name, file, text, what replaces it, tests to run
BUGS = [
    # masks, tokens, alignment
    ("the end token is left out of the mask", "grpo.py",
     "token, token_logp, True\n",
     "token, token_logp, ~torch.isin(token, stop)\n", "sampling"),
    ("a truncated row counts as finished", "grpo.py",
     "finished[rows] = torch.isin(token, stop)",
     "finished[rows] = torch.isin(token, stop) | (n + 1 == max_new)", "sampling"),
    ("finished rows go on", "grpo.py",
     "on = ~finished[rows] & (n", "on = (n", "sampling"),
    ("positions count on from the longest prompt", "grpo.py",
     "for x in (token, column))",
     "for x in (token, torch.full_like(column, longest + n)))", "sampling"),
    ("rows that drew differently share a state", "grpo.py",
     " and before.diff().all():", ":", "sampling"),
    ("a state reads the cache of another", "grpo.py",
     "return cache.index_select(2, before), after", "return cache.index_select(2, before.flip(0)), after", "sampling"),
    ("the last column of a padded prompt is read", "grpo.py",
     "h[torch.arange(P, device=device), length - 1]", "h[:, -1]", "sampling"),
    ("the mask is one column off", "model.py",
     "sampled = mask[:, 1:]", "sampled = mask[:, :-1]", "sampling"),
    ("random numbers move with the batch", "grpo.py",
     "u[rows, n], state)", "u[:len(rows), n], state)", "sampling"),
    ("prompt tokens are in the loss", "grpo.py",
     "        return torch.where(mask, x, 0)\n    logp, adv",
     "        return x\n    logp, adv", "loss"),
    ("masked by x * mask", "grpo.py",
     "        return torch.where(mask, x, 0)\n    logp, adv",
     "        return x * mask\n    logp, adv", "loss"),
    ("completions are scored against another prompt", "reward.py",
     "batch.problems = [p for p in problems for _ in range(group)]",
     "batch.problems = [p for _ in range(group) for p in problems]", "loss"),
    ("the text is tokenised again", "reward.py",
     "    batch.parts = parts(task, batch)\n",
     "    batch.parts = parts(task, batch)\n    batch.ids = batch.ids.clamp(max=127)\n",
     "run -k trained_ids"),
    ("rows without an advantage are left out in spite of the KL", "grpo.py",
     "if agent.ref is None and agent.critic is None:", "if agent.critic is None:", "loss"),
    ("rows without an advantage are left out in spite of the critic", "grpo.py",
     "if agent.ref is None and agent.critic is None:", "if agent.ref is None:", "loss"),
    ("rows that begin alike share a log-probability too many", "model.py",
     "once, which = at[mask].unique", "once, which = at[mask.roll(-1, 1)].unique", "loss"),
    # log-probs, ratio
    ("no temperature in the trainer", "model.py",
     "logits = model.head(h / temperature)", "logits = model.head(h)", "sampling"),
    ("no temperature in the sampler", "grpo.py",
     "(logits / (temperature or 1)).log_softmax",
     "logits.log_softmax", "sampling"),
    ("another temperature in the reference", "run/batches.py",
     "temperature=cfg.temperature, critic", "temperature=1.0, critic", "loss"),
    ("old log-probs are refreshed", "grpo.py",
     "policy_loss(logp, b.old_logp,", "policy_loss(logp, logp.detach(),", "loss"),
    ("the clip share misses one side", "grpo.py",
     "((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))",
     "(adv > 0) & (ratio > high)", "loss"),
    ("the larger surrogate is taken", "grpo.py",
     "torch.minimum(ratio * adv,", "torch.maximum(ratio * adv,", "loss"),
    ("a ratio of the row where one of the token is meant", "grpo.py",
     'if cfg.ratio == "sequence":', "if True:", "loss"),
    ("the sequence ratio is a sum", "grpo.py",
     "(log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).expand_as",
     "log_ratio.sum(1, True).expand_as", "credit"),
    # advantages
    ("equal rewards are not exactly 0", "grpo.py",
     "dead = std <= 1e-6 * mean.abs()", "dead = std < 0", "loss"),
    ("Bessel's correction", "grpo.py",
     ".div(n).sqrt()", ".div(n - 1).sqrt()", "loss"),
    ("group statistics over the batch", "grpo.py",
     "x.view(-1, group, x.size(1))", "x[None]", "loss"),
    ("a row is in its own leave-one-out baseline", "grpo.py",
     "(total - r.sum(2, True)) / (n - on.sum(2, True))", "mean", "credit"),
    ("a group of one is let in", "grpo.py",
     "LEAST = dict(group=2", "LEAST = dict(group=1", "loss -k group_of_one"),
    ("a mean over each micro-batch", "grpo.py",
     "b.adv, b.mask, w, tokens,", "b.adv, b.mask, w / w.sum(), tokens,", "loss"),
    ("the last micro-batch is logged", "grpo.py",
     "{name: total.get(name, 0.0) + x for", "{name: x for", "loss"),
    ("minibatches are divided by the whole rollout", "grpo.py",
     "token_weights(mask, cfg.mean, size,",
     "token_weights(mask, cfg.mean, len(batch.ids),", "loss"),
    ("gradients are not cleared", "run/batches.py", "    opt.zero_grad()\n", "", "loss"),
    ("0 / 0 for an empty row", "grpo.py",
     "mask.sum(1, keepdim=True).clamp(min=1)", "mask.sum(1, keepdim=True)", "loss"),
    ("short rows count more in the expected reward", "grpo.py",
     'kl="none", mean="constant", **UNCLIPPED', 'kl="none", **UNCLIPPED', "credit"),
    ("float64 where there is none", "grpo.py",
     "x = x.to(machine.double(x.device))", "x = x.double()", "loss -k float64"),
    # KL
    ("k3 cancels near 0", "grpo.py",
     "log_ratio.expm1() - log_ratio ", "log_ratio.exp() - 1 - log_ratio ", "loss"),
    ("k3 overflows", "grpo.py", "return x + (x.clamp(-20, 20) - x).detach()", "return x", "loss"),
    ("the KL the wrong way", "grpo.py",
     "log_ratio = bounded(ref_logp - logp)", "log_ratio = bounded(logp - ref_logp)", "loss"),
    ("the KL of the reward in the loss as well", "grpo.py",
     'if cfg.kl == "loss":', "if True:", "credit"),
    ("beta is steered the wrong way", "grpo.py",
     'stats["kl"] / cfg.target_kl - 1', '1 - stats["kl"] / cfg.target_kl', "run -k steered"),
    ("the reference is not frozen", "run/start.py",
     "agent.ref = dealt(policy.frozen())", "agent.ref = policy", "run -k reference_stays"),
    # PPO, process supervision
    ("the value knows its token", "model.py",
     "in_columns(critic(ids[:, :-1], sampled, h)[sampled])",
     "in_columns(critic(ids, mask, model(ids))[:, 1:][sampled])", "credit"),
    ("GAE bootstraps from padding", "grpo.py",
     "ahead, torch.where(mask[:, t], value[:, t], 0)", "ahead, value[:, t]", "credit"),
    ("GAE without lambda", "grpo.py",
     "delta + gamma * lam * ahead", "delta + gamma * ahead", "credit"),
    ("PPO with Adam's own epsilon", "grpo.py",
     'kl="reward", adam_eps=1e-5)', 'kl="reward")', "run -k epsilon"),
    ("the outcome at another token", "run/batches.py",
     "(mask.flip(1).cumsum(1).flip(1) == 1)", "(mask.cumsum(1) == 1)", "credit reward"),
    ("whitening over padding", "grpo.py",
     "machine.mean_and_std(x[mask])", "machine.mean_and_std(x.flatten())", "credit"),
    ("returns of whitened advantages", "grpo.py",
     "        returns = adv + value\n", "        returns = whiten(adv, mask) + value\n", "credit"),
    ("the better value error is taken", "grpo.py",
     "torch.maximum((value - returns).square()",
     "torch.minimum((value - returns).square()", "credit"),
    ("steps that ended before count", "grpo.py",
     "score.flip(1).cumsum(1).flip(1)", "score.cumsum(1)", "credit loss"),
    ("the last step ends before the end token", "reward.py",
     "+ columns[-1:]", "+ [columns[tokens[-1]]]", "reward"),
    ("true steps to a wrong answer are all good", "reward.py",
     "[found[-1][1] and correct[i] > 0]", "[found[-1][1]]", "reward"),
    ("an unfinished completion is rewarded", "reward.py",
     "            * batch.finished for name", "            for name", "task"),
    ("the limit is better than a bad score", "reward.py",
     "batch.reward.clamp(max=unfinished)", "unfinished", "reward"),
    # reward models
    ("the score is read one token early", "reward.py",
     "return torch.where(batch.ends, reward, 0)",
     "return torch.where(batch.ends, reward.roll(1, 1), 0)", "reward"),
    ("people choose the worst", "reward.py",
     "best = reward == reward.amax(1, keepdim=True)",
     "best = reward == reward.amin(1, keepdim=True)", "reward"),
    ("label noise is forgotten", "reward.py",
     "if source.random() < noise and worse:", "if 0:", "reward"),
    ("the score is not normalised", "reward.py",
     "else (raw - mean) / std", "else raw", "reward"),
    ("equals are not alike to people", "reward.py",
     "chance = best / best.sum(1, keepdim=True)",
     "chance = F.one_hot(best.float().argmax(1), best.size(1)).float()", "reward"),
    ("scores are normalised on the last batch alone", "reward.py",
     'scores(reward_model, history["ids"], history["mask"], cfg)[history["ends"]]',
     'scores(reward_model, rows["ids"], rows["mask"], cfg)[rows["ends"]]', "reward"),
    ("no history is replayed", "reward.py",
     "if history:\n        data", "if 0:\n        data", "reward"),
    ("the held-out tenth is fitted as well", "reward.py",
     "(slice(apart, None), slice(apart))", "(slice(None), slice(apart))", "reward"),
    ("the problems of another part are labelled", "grpo.py",
     "        batch = generate(agent, part, u)",
     "        batch = generate(agent, drawn[:len(part)], u)", "reward"),
    ("a learned reward is divided by the group's std", "grpo.py",
     '"model": dict(scale="none")', '"model": {}', "run -k divided"),
    ("the reference stays through the iterations", "grpo.py",
     "shard.take(agent.ref, agent.policy)", "pass", "run -k with_every_part"),
    # system
    ("the same random numbers on every rank", "grpo.py",
     "problems, u = machine.deal(problems), machine.deal(u)",
     "problems, u = machine.deal(problems), u[:len(machine.deal(problems))]", "ranks"),
    ("the same prompts on every rank", "grpo.py",
     "problems, u = machine.deal(problems), machine.deal(u)",
     "problems, u = problems[:len(machine.deal(problems))], machine.deal(u)", "ranks"),
    ("gradients are not summed over ranks", "run/batches.py",
     "p.grad = shard.summed(torch.zeros_like(p) if p.grad is None else p.grad)",
     "p.grad = torch.zeros_like(p) if p.grad is None else p.grad", "ranks"),
    ("the copy to sample from stays what the policy was", "run/shard.py",
     "    if agent.sampler is not None:", "    if False:", "speed -k copy"),
    ("a dealt gradient is the mean over the ranks", "run/shard.py",
     "            part.set_gradient_divide_factor(1.0)        # a plain sum: the loss has its weights\n"
     "            part.set_force_sum_reduction_for_comms(True)\n", "            pass\n", "ranks -k dealt"),
    ("a dealt model's ranks make passes of their own number", "run/batches.py",
     "    for _ in range(len(chunks), most):", "    for _ in range(0):", "ranks -k dealt"),
    ("resume without the steered beta", "run/folder.py",
     "agent.beta = checkpoint.beta", "pass", "run -k steered"),
    ("resume without the optimizer", "run/folder.py",
     "agent.opt.state[p] = {key: shard", "_ = {key: shard", "run -k half"),
    ("resume that resets the reference", "run/folder.py",
     "        p.data.copy_(shard.like",
     '        name.startswith("ref.") or p.data.copy_(shard.like', "run -k with_every_part"),
    ("resume without the critic", "run/folder.py",
     "        p.data.copy_(shard.like",
     '        name.startswith("critic.") or p.data.copy_(shard.like', "run -k with_every_part"),
    ("resume without the reward model", "run/folder.py",
     "        p.data.copy_(shard.like",
     '        name.startswith("reward_model.") or p.data.copy_(shard.like', "run -k with_every_part"),
    ("resume without the labelled rows", "run/folder.py",
     "    agent.history = {n.removeprefix", "    _ = {n.removeprefix", "run -k with_every_part"),
    ("lines are logged twice after a resume", "run/folder.py",
     "f.truncate(checkpoint.sizes[name] if checkpoint else 0)", "pass", "run -k killed"),
    ("the checkpoint is written in place", "run/files.py",
     'beside = path.with_name(path.name + ".tmp")', "beside = path", "run -k killed"),
    ("votes of unfinished completions", "grpo.py",
     'agent.task.answer(text) if ended else ""', "agent.task.answer(text)", "run -k vote"),
    ("pass@k where all k are right", "data/answers.py", "enumerate(sorted(right))",
     "enumerate(sorted(right, reverse=True))", "task -k pass_at_k"),
    ("RoPE turns the other way", "model.py",
     "torch.cat((-sin, sin), -1)", "torch.cat((sin, -sin), -1)", "model sampling"),
    ("rows that have parted share their tokens again", "model.py",
     ".cumprod(1).bool()", ".bool()", "model"),
    ("a row takes the state of the padding above it", "model.py",
     "((ids[1:] == ids[:-1]) & used[:-1])", "(ids[1:] == ids[:-1])", "model"),
    ("the cache is read without a mask", "model.py",
     "attn_mask=bias", "attn_mask=None", "model sampling"),
    ("larger parts of the logits than allowed", "model.py",
     "max(1, CHUNK // model", "max(1, 2 * CHUNK // model", "memory"),
    ("activations are kept in spite of --recompute", "model.py",
     "if self.recompute and", "if False and", "memory"),
    ("the evaluator takes texts of any length", "data/answers.py",
     "LONGEST = 200", "LONGEST = 10 ** 9", "task"),
    # settings, folders, what lies around the algorithm
    ("a steered beta is lost between steps", "grpo.py",
     "agent.beta = agent.beta * (1 + 0.1 * error)",
     "agent.beta = cfg.beta * (1 + 0.1 * error)", "run -k steered"),
    ("a KL that is watched is applied", "grpo.py",
     'if cfg.kl == "loss":', 'if cfg.kl in ("loss", "watch"):', "run -k watched"),
    ("an algorithm's row is forgotten", "grpo.py",
     "REWARDS)] | row\n", "REWARDS)]\n", "run -k one_way"),
    ("a row of ALGOS overrides what is asked for", "grpo.py",
     "else {}) | given\n", "else {}) | given | row\n", "run -k overridden"),
    ("a warm start of other code is taken up", "run/start.py",
     "known = warm and note.exists() and note.read_text() == warm_note(cfg, task)",
     "known = warm and note.exists()", "run -k changed_task"),
    ("a copied run writes into the folder it came from", "run/folder.py",
     '**changed | {"out": str(folder)})', "**changed)", "run -k copied"),
    ("a finished run is overwritten", "run/folder.py",
     "                keep_previous(cfg.folder)", "                pass", "run -k kept_aside"),
    ("each rank evaluates with numbers of its own", "grpo.py",
     'machine.rng(agent.cfg, "evaluate")',
     'machine.rng(agent.cfg, "evaluate", machine.world()[0])', "ranks"),
    ("the text of a continuation begins at its prefix", "reward.py",
     "ended.start = batch.start[row].repeat_interleave(tries)", "pass", "reward"),
    ("the score of an outcome is every token's in GAE", "grpo.py",
     "return torch.where(on, r, 0).view_as", "return r.view_as", "credit"),
]


def try_out(bug):
    """Put one bug into a copy of the tree; the first test that then fails, or None."""
    name, file, text, instead, tests = bug
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", ".git", "__pycache__"))
        source = (copy / file).read_text()
        assert source.count(text) >= 1, f"{name}: the text is no longer in {file}"
        (copy / file).write_text(source.replace(text, instead, 1))
        files, _, only = tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header",
                   *(f"tests/test_{f}.py" for f in files.split())]
        command += ["-k", only] if only else []
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert done.returncode in (0, 1), f"{name}: no tests ran\n{done.stdout}"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    return failed and failed[1]


def main(words):
    readme = "--readme" in words
    words = [word for word in words if word != "--readme"]
    chosen = [m for m in BUGS if not words or any(word in m[0] for word in words)]
    rows, missed = [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, file, *_), failed in zip(chosen, pool.map(try_out, chosen)):
            rows.append(f"| {name} | `{file}` | {f'`{failed}`' if failed else '**none**'} |")
            missed += failed is None
            print(rows[-1], flush=True)
    if readme and not words:
        head = "| what was changed | where | first test that fails |\n|---|---|---|\n"
        (HERE / "bugs.md").write_text(head + "\n".join(rows) + "\n")
    print(f"{len(rows)} bugs put in, {missed} not caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
