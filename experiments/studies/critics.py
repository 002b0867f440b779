"""Critics other than the run's own: one that is fitted to a fixed policy, and Monte Carlo values of lines."""
import dataclasses

import torch

import grpo
import reward
from run import dist, passes

ROWS, EACH, RATE = 64, 4, 3e-4          # completions of a step of a fit, those of a problem, the peak learning rate


def critic_step(critic, opt, batch, returns, cfg):
    """One optimizer step on the mean squared error to the returns (B, T)."""
    for rows, T in passes.split_rows(batch.ids, batch.mask, cfg.micro_tokens):
        b = passes.select(batch, rows, T)
        ids, mask = b.ids[:, :-1], b.mask[:, 1:]
        value = critic(ids, passes.layout_of(critic.trunk, ids, mask))
        error = torch.where(mask, value - returns[rows, 1:T], 0).square().sum() / batch.mask.sum()
        error.backward()
    dist.clip_gradients(opt.param_groups[0]["params"], 1.0)
    opt.step()
    opt.zero_grad()


def completed(agent, problems, n, each, rng):
    """`each` completions of n problems, with their rewards, and the return of each token, relative to the baseline."""
    batch = grpo.generate(agent, rng.sample(problems, n), each, rng)
    cfg = dataclasses.replace(agent.cfg, supervision="outcome", group=each, adv_scale="none")
    batch.reward, batch.ends = reward.of_rule(dataclasses.replace(agent, cfg=cfg), batch)
    batch.reward = reward.cap_truncated(batch)
    score, _ = grpo.group_scores(batch.reward, batch.ends, cfg)
    return batch, score.sum(1, True).expand_as(batch.mask)


def fit(critic, agent, problems, steps, rng):
    """Fit a critic to the returns of the fixed policy's completions; in the second half the rate falls to 0."""
    params = [p for p in critic.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, RATE, betas=(0.9, 0.95), weight_decay=0, fused=True)
    for step in range(steps):
        opt.param_groups[0]["lr"] = RATE * min(1, 2 - 2 * step / steps)
        critic_step(critic, opt, *completed(agent, problems, ROWS // EACH, EACH, rng), agent.cfg)


def line_values(agent, batch, rng, tries):
    """Monte Carlo values of lines, and the credit of lines after VinePPO (arXiv 2410.01679): (value, advantage), both (B, T).
    The value of a line's tokens is the mean reward of `tries` continuations from its beginning, for the first line that
    of the group's other completions; the advantage is the value of the next line, or the reward after the last one, less
    that of the line itself. Rewards are 0 and 1."""
    cfg = agent.cfg
    outcome = batch.reward.sum(1)
    lines = dataclasses.replace(batch)
    _, lines.ends = reward.of_steps(agent.task, agent.encoding, batch)
    last = passes.last_tokens(batch.mask)
    lines.reward = torch.where(last, outcome[:, None], 0.0)
    after = reward.rollout_labels(agent, grpo.completions, lines, agent.cfg.group, rng.random(), tries)      # at the ends of lines
    others = outcome.view(-1, cfg.group)
    first = ((others.sum(1, True) - others) / (cfg.group - 1)).flatten()
    value, advantage = torch.zeros(batch.mask.shape), torch.zeros(batch.mask.shape)
    for row, (mask, ends) in enumerate(zip(batch.mask, lines.ends)):
        begin, known = mask.nonzero()[0, 0].item(), first[row]
        for end in ends.nonzero()[:, 0].tolist():
            value[row, begin:end + 1], advantage[row, begin:end + 1] = known, after[row, end] - known
            begin, known = end + 1, after[row, end]
    return value, advantage
