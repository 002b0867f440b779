"""Puts known bugs of GRPO and PPO code into a copy of this one, one at a time, and runs the tests.

    python experiments/mutations.py            # all; some minutes
    python experiments/mutations.py GAE clip   # those whose name holds one of the words

Writes mutations.md: what was changed, and the first test that failed. A bug that no test sees is a
hole in the tests: the script ends with code 1.
"""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

# name, file, text, what replaces it, tests to run
MUTATIONS = [
    # masks, tokens, alignment
    ("the end token is left out of the mask", "grpo.py",
     "finished[r] = t, True, torch.isin(t, stop)",
     "finished[r] = t, ~torch.isin(t, stop), torch.isin(t, stop)", "sampling"),
    ("a truncated row counts as finished", "grpo.py",
     "finished[r] = t, True, torch.isin(t, stop)",
     "finished[r] = t, True, torch.isin(t, stop) | (n + 1 == max_new)", "sampling"),
    ("finished rows go on", "grpo.py", "live = live & ~finished[row]", "live = live", "sampling"),
    ("positions count on from the longest prompt", "grpo.py",
     "    cache = cache.repeat_interleave(group, 2)",
     "    cache, at = cache.repeat_interleave(group, 2), torch.full_like(at, longest)", "sampling"),
    ("the last column of a padded prompt is read", "grpo.py",
     "h[torch.arange(P, device=device), at - 1]", "h[:, -1]", "sampling"),
    ("the mask is one column off", "model.py", "on = mask[:, 1:]", "on = mask[:, :-1]", "sampling"),
    ("random numbers move with the batch", "grpo.py", "u[row, n, None]", "u[:len(row), n, None]",
     "sampling"),
    ("prompt tokens are in the loss", "grpo.py", "kept = lambda x: torch.where(mask, x, 0)",
     "kept = lambda x: x", "loss"),
    ("masked by x * mask", "grpo.py", "kept = lambda x: torch.where(mask, x, 0)",
     "kept = lambda x: x * mask", "loss"),
    ("completions are scored against another prompt", "grpo.py",
     "rows = [p for p in problems for _ in range(group)]",
     "rows = [p for _ in range(group) for p in problems]", "loss"),
    ("the text is tokenised again", "grpo.py",
     "    parts = score(agent.task, rows,",
     "    batch.ids = batch.ids.clamp(max=127)\n    parts = score(agent.task, rows,", "run -k trained_ids"),
    # log-probs, ratio
    ("no temperature in the trainer", "model.py", "logits = model.head(h) / temperature",
     "logits = model.head(h)", "sampling"),
    ("no temperature in the sampler", "grpo.py",
     "(logits / temperature if temperature else logits).log_softmax", "logits.log_softmax",
     "sampling"),
    ("another temperature in the reference", "grpo.py",
     "partial(token_logps, model, temperature=cfg.temperature,",
     "partial(token_logps, model, temperature=1.0,", "loss"),
    ("old log-probs are refreshed", "grpo.py", "policy_loss(logp, b.old_logp,",
     "policy_loss(logp, logp.detach(),", "loss"),
    ("the clip share misses one side", "grpo.py",
     "((adv > 0) & (ratio > high)) | ((adv < 0) & (ratio < low))", "(adv > 0) & (ratio > high)",
     "loss"),
    ("the larger surrogate is taken", "grpo.py", "torch.minimum(ratio * adv,",
     "torch.maximum(ratio * adv,", "loss"),
    ("a ratio of the row where one of the token is meant", "grpo.py",
     'if cfg.ratio == "sequence":', "if True:", "loss"),
    ("the sequence ratio is a sum", "grpo.py",
     "change.sum(1, True) / mask.sum(1, True).clamp(min=1)", "change.sum(1, True)", "credit"),
    # advantages
    ("equal rewards are not exactly 0", "grpo.py", "out = centre.masked_fill(dead, 0)",
     "out = centre / (centre.square().mean().sqrt() + 1e-8)", "loss"),
    ("Bessel's correction", "grpo.py", ".div(n).sqrt()", ".div(n - 1).sqrt()", "loss"),
    ("group statistics over the batch", "grpo.py", "(x.view(-1, group, x.size(1)) for",
     "(x.view(1, -1, x.size(1)) for", "loss"),
    ("a row is in its own leave-one-out baseline", "grpo.py",
     "(total - r.sum(2, True)) / (n - on.sum(2, True))", "total / n", "credit"),
    ("a group of one is let in", "grpo.py", "LEAST = dict(group=2", "LEAST = dict(group=1",
     "loss -k group_of_one"),
    ("a mean over each micro-batch", "grpo.py", "b.mask, w, cfg)\n                if value",
     "b.mask, w / w.sum(), cfg)\n                if value", "loss"),
    ("the last micro-batch is logged", "grpo.py", "                total.update(stats)",
     "                total = Counter(stats)", "loss"),
    ("minibatches are divided by the whole rollout", "grpo.py",
     "token_weights(mask, cfg.mean, len(part),", "token_weights(mask, cfg.mean, rows,", "loss"),
    ("gradients are not cleared", "data/run.py", "    opt.zero_grad()\n", "", "loss"),
    ("0 / 0 for an empty row", "grpo.py", "mask.sum(1, keepdim=True).clamp(min=1)",
     "mask.sum(1, keepdim=True)", "loss"),
    ("short rows count more in the expected reward", "grpo.py",
     'kl="none", mean="constant", **UNCLIPPED', 'kl="none", **UNCLIPPED', "credit"),
    ("float64 where there is none", "grpo.py", "torch.where(mask, x, 0).to(widest(x.device))",
     "torch.where(mask, x, 0).double()", "loss -k float64"),
    # KL
    ("k3 cancels near 0", "grpo.py", "r.expm1() - r ", "r.exp() - 1 - r ", "loss"),
    ("k3 overflows", "grpo.py", "return x + (x.clamp(-20, 20) - x).detach()", "return x", "loss"),
    ("the KL the wrong way", "grpo.py", "r = bounded(ref_logp - logp)",
     "r = bounded(logp - ref_logp)", "loss"),
    ("the KL of the reward in the loss as well", "grpo.py", '(cfg.kl == "loss") * cfg.beta * kl',
     "cfg.beta * kl", "credit"),
    ("beta is steered the wrong way", "grpo.py", 'stats["kl"] / cfg.target_kl - 1',
     '1 - stats["kl"] / cfg.target_kl', "run -k steered"),
    ("the reference is not frozen", "grpo.py", "agent.ref = model.frozen()",
     "agent.ref = model", "run -k reference_stays"),
    # PPO, process supervision
    ("the value knows its token", "model.py", "spread(critic(ids[:, :-1], h)[on])",
     "spread(critic(ids, model(ids))[:, 1:][on])", "credit"),
    ("GAE bootstraps from padding", "grpo.py", "ahead, torch.where(mask[:, t], value[:, t], 0)",
     "ahead, value[:, t]", "credit"),
    ("GAE without lambda", "grpo.py", "delta + gamma * lam * ahead", "delta + gamma * ahead",
     "credit"),
    ("PPO with Adam's own epsilon", "grpo.py", 'estimator="k1", adam_eps=1e-5)', 'estimator="k1")',
     "run -k epsilon"),
    ("the outcome at another token", "data/run.py", "(mask.flip(1).cumsum(1).flip(1) == 1)",
     "(mask.cumsum(1) == 1)", "credit reward"),
    ("whitening over padding", "grpo.py", "centre = torch.where(mask, x - mean, 0)",
     "centre = x - mean", "credit"),
    ("returns of whitened advantages", "grpo.py", "        returns = adv + value\n",
     "        returns = whiten(adv, mask) + value\n", "credit"),
    ("the better value error is taken", "grpo.py",
     "torch.maximum((value - returns).square()", "torch.minimum((value - returns).square()", "credit"),
    ("steps that ended before count", "grpo.py", "reward.flip(1).cumsum(1).flip(1)",
     "reward.cumsum(1)", "credit loss"),
    ("the last step ends before the end token", "reward.py", "+ columns[-1:]",
     "+ [columns[tokens[-1]]]", "reward"),
    ("true steps to a wrong answer are all good", "reward.py",
     'found[-1][1] and parts["correct"][i] > 0', "found[-1][1]", "reward"),
    ("an unfinished completion is rewarded", "reward.py",
     "[float(part[name]) if done else 0.0", "[float(part[name])", "task"),
    ("the limit is better than a bad score", "reward.py", "batch.reward.clamp(max=unfinished)",
     "unfinished", "reward"),
    # reward models
    ("the score is read one token early", "reward.py", "return torch.where(batch.ends, score, 0)",
     "return torch.where(batch.ends, score.roll(1, 1), 0)", "reward"),
    ("people choose the worst", "reward.py", "best = reward == reward.amax(1, keepdim=True)",
     "best = reward == reward.amin(1, keepdim=True)", "reward"),
    ("label noise is forgotten", "reward.py", "if source.random() < noise and worse:", "if 0:",
     "reward"),
    ("the score is not normalised", "reward.py", "else (score - mean) / std", "else score", "reward"),
    ("equals are not alike to people", "reward.py", "chance = best / best.sum(1, keepdim=True)",
     "chance = F.one_hot(best.float().argmax(1), best.size(1)).float()", "reward"),
    ("scores are normalised on the last batch alone", "reward.py",
     'scores(scorer, history["ids"], history["mask"], cfg)[history["ends"]]',
     'scores(scorer, rows["ids"], rows["mask"], cfg)[rows["ends"]]', "reward"),
    ("no history is replayed", "reward.py", "if history:\n        data", "if 0:\n        data", "reward"),
    ("the held-out tenth is fitted as well", "reward.py", "(slice(apart, None), slice(apart))",
     "(slice(None), slice(apart))", "reward"),
    ("the problems of another part are labelled", "grpo.py", "mine = drawn[i:i + size][rank::ranks]",
     "mine = drawn[:size][rank::ranks]", "reward"),
    ("a learned reward is divided by the group's std", "grpo.py", '"model": dict(scale="none")',
     '"model": {}', "run -k divided"),
    ("the reference stays through the iterations", "grpo.py",
     "agent.ref.load_state_dict(agent.model.state_dict())", "pass", "run -k with_every_part"),
    # system
    ("the same random numbers on every rank", "grpo.py", "random(shape)[rank::ranks]",
     "random(shape)[:len(problems)]", "run -k ranks"),
    ("the same prompts on every rank", "grpo.py", "cfg.prompts)[rank::ranks]\n    batch, texts",
     "cfg.prompts)[:cfg.prompts // ranks]\n    batch, texts", "run -k ranks"),
    ("gradients are not summed over ranks", "data/run.py",
     "p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad)",
     "p.grad = torch.zeros_like(p) if p.grad is None else p.grad", "run -k ranks"),
    ("resume without the steered beta", "grpo.py", "save(cfg.folder, step, agent.cfg,",
     "save(cfg.folder, step, cfg,", "run -k steered"),
    ("resume without the optimizer", "data/run.py", "opt.state[p] = {key: x.to", "_ = {key: x.to",
     "run -k half"),
    ("resume that resets the reference", "data/run.py",
     "        if module is not None:\n            load_tensors",
     '        if module is not None and role != "ref":\n            load_tensors', "run -k with_every_part"),
    ("resume without the critic", "data/run.py",
     "        if module is not None:\n            load_tensors",
     '        if module is not None and role != "critic":\n            load_tensors',
     "run -k with_every_part"),
    ("resume without the reward model", "data/run.py",
     "        if module is not None:\n            load_tensors",
     '        if module is not None and role != "scorer":\n            load_tensors',
     "run -k with_every_part"),
    ("resume without the labelled rows", "data/run.py", 'return under("history.")', "return {}",
     "run -k with_every_part"),
    ("lines are logged twice after a resume", "data/run.py",
     'f.truncate(run["sizes"][name] if run else 0)', "pass", "run -k killed"),
    ("the checkpoint is written in place", "data/run.py",
     'beside = path.with_name(path.name + ".tmp")', "beside = path", "run -k killed"),
    ("votes of unfinished completions", "grpo.py", 'agent.task.answer(text) if ended else ""',
     "agent.task.answer(text)", "run -k vote"),
    ("pass@k where all k are right", "grpo.py", "max(right)", "min(right)", "run -k pass_at_k"),
    ("RoPE turns the other way", "model.py", "torch.cat((-sin, sin), -1)", "torch.cat((sin, -sin), -1)",
     "model sampling"),
    ("the cache is read without a mask", "model.py", "attn_mask=bias", "attn_mask=None",
     "model sampling"),
    ("larger parts of the logits than allowed", "model.py", "max(1, CHUNK // model", "max(1, 2 * CHUNK // model",
     "memory"),
    ("activations are kept in spite of --recompute", "model.py", "if self.recompute and",
     "if False and", "memory"),
    ("the evaluator takes texts of any length", "reward.py", "LONGEST = 200", "LONGEST = 10 ** 9", "task"),
]


def main(words):
    rows, missed = [], 0
    for name, file, text, instead, tests in MUTATIONS:
        if words and not any(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", ".git", "__pycache__"))
            source = (copy / file).read_text()
            assert source.count(text) >= 1, f"{name}: the text is no longer in {file}"
            (copy / file).write_text(source.replace(text, instead, 1))
            files, _, only = tests.partition(" -k ")
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header",
                       *(f"tests/test_{f}.py" for f in files.split()), *(["-k", only] if only else [])]
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
            assert done.returncode in (0, 1), f"{name}: no tests ran\n{done.stdout}"
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
        rows.append(f"| {name} | `{file}` | {f'`{failed[1]}`' if failed else '**none**'} |")
        missed += failed is None
        print(rows[-1], flush=True)
    if not words:
        head = "| what was changed | where | first test that fails |\n|---|---|---|\n"
        (HERE / "mutations.md").write_text(head + "\n".join(rows) + "\n")
    print(f"{len(rows)} bugs put in, {missed} not caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
