"""answers/critic.md. The names in braces are those of page.py, which writes the page."""


def times(row, base):
    """How many times as long a row takes as another, the lowest and highest seed, as text."""
    known = [run["seconds"] / runs_of(base)[seed]["seconds"] for seed, run in runs_of(row).items()]
    return f"{min(known):.1f} to {max(known):.1f}"


kept_of_reward = 100 * 0.95 ** middle(GROUP_LONG, "length")
fit_time = (middle(FITTED_1, "seconds") - middle(OWN_1, "seconds")) / middle(GROUP, "seconds")

PAGE = rf"""# Critics, baselines and sizes of groups

All rows behind the first three of the [open questions](../../../docs/questions.md). The task is
[a walk among hidden mines](../../../docs/questions.md#the-setting).

- **A fitted critic with lambda 1** could not be told from the group with 6, 12 and 24 lines, within
  {wide(FITTED_1_SHORT, FITTED_1, FITTED_1_LONG)}, or from a weak start, within {wide(FITTED_1_WEAK)}. Each mean is above the
  group's.{holds(*(statistics.mean(apart(row)) > 0 for row in (FITTED_1_SHORT, FITTED_1, FITTED_1_LONG, FITTED_1_WEAK)))}
- **Lambda, not fitted**: 0.95 minus 1 is {effect(OWN, OWN_1)} points, below in every seed. This comparison was chosen after the
  results.{holds(down(OWN, OWN_1))}
- **Lambda, fitted**: with 24 lines at most, a walk has {middle(GROUP_LONG, "length"):.0f} tokens, and lambda 0.95 leaves
  {kept_of_reward:.0f}% of the reward to its first token. There the fitted critic's seeds differ from the group by {each(FITTED_LONG)}
  points.
- **A better critic** was not shown to help. Near step 100 a fitted critic, lambda 1, explains
  {median(FITTED_1_100, "explained_variance")} of the variance of returns. Monte Carlo values of lines, from 4 continuations (VinePPO, arXiv
  2410.01679), explain {median(VINE, "explained_variance")}, at {ratio(VINE, GROUP_100, "tokens")} times the group's tokens. Neither makes a
  difference to the group, within {within(FITTED_1_100, VINE)}; in pass@1 the latter is {effect(VINE, of="pass@1")}.
- **Cost**: the fitted critic with lambda 1 takes {times(FITTED_1, GROUP)} times as long as the group. With the group's tokens
  ({reached(GROUP, GROUP, "tokens")}) critics with lambda 1 reach {reached(FITTED_1, GROUP, "tokens")} fitted and {reached(OWN_1, GROUP, "tokens")} not.
  In the group's time they reach {reached(FITTED_1, GROUP, "seconds")} (the fit takes about as long) and
  {reached(OWN_1, GROUP, "seconds")}. After as many steps, and a third more completions, the fitted critic's pass@1 is above the
  group's in every seed, by {effect(FITTED_1, of="pass@1")}, corrected p {p_text(FITTED_1, "pass@1")}.{holds(up(FITTED_1, of="pass@1"), 0.75 < fit_time < 1.25)}
- **A shared critic** was not tuned: not lambda, the learning rate or the value coefficient (0.1, the others' 1).
- **Groups** of 2 and 4 use their best learning rate, 3e-4. 2 differs from 4 by {effect(TWO, FOUR)} points; a fitted critic adds
  {effect(FITTED_TWO, TWO)} to groups of 2. For 64 the corrected p is {p_text(SIXTY_FOUR)}, below 0.05 in pass@1.{holds(unclear(TWO, FOUR), unclear(FITTED_TWO, TWO), ("sizes of groups", "64 of 4") in shown_to_differ("critic", "pass@1"))}
- **Without a baseline** the corrected p is {p_text(NONE)}; for the collapse from a weak start, {100 * before(WEAK, "greedy"):.0f}%
  before RL, it is {p_text(SIGNED_WEAK)}.
- With a critic Adam's epsilon is `1e-5`, not `1e-8`. *Fitted* critics had 400 steps before RL.
- **Learning rates** for {len(studies.FAMILIES)} groups of rows are the best of three on a development map ([tuning.json](tuning.json)).{holds(all(best_rate(name) == ("3e-4" if "128" in name or "of 64" in name else "1e-4") for name in studies.FAMILIES))}
- **Power**: with five seeds and the median spread, 80% of studies find, uncorrected, a difference of {detectable("critic")} points. All
  rows had three seeds first; the two more came after the first results.
- **On arithmetic**, where a critic learns little, an earlier version found PPO below GRPO, and pass@1 highest without a baseline. Here
  critics with lambda 1 make no difference to the group, within {within(OWN_1, FITTED_1)}, and without a baseline pass@1 is
  {lost(NONE, of="pass@1")} points lower.
- **Every algorithm on arithmetic**, as published until commit f8c608c: medians of pass@1 over 3 seeds of 34 steps. GRPO, GRPO
  with a critic, RLOO, Dr. GRPO, GSPO, DAPO's clip and mean, the raw reward, process supervision and two iterations all ended between
  96.1% and 97.5%, so the table could not rank them. PPO with a head on the policy ended at 93.0%, without its KL at 90.6%, with a
  separate critic at 97.1%; `a2c` ended at 89.4%, the lowest. A step of PPO took 1.2 times as long as one of GRPO, with a separate
  critic 1.9 times, and that critic needed 213 MiB more. Learned rewards ended at 92%.

{everything("critic")}
"""
