"""answers/labels.md. The names in braces are those of page.py, which writes the page."""
hacked = [[run for run in runs_of(row).values() if run["length"] < 20 and run["reward, means of 25 steps"][0] > run["reward, means of 25 steps"][-1]]
          for row in (NO_KL, BEST_NO_KL)]

PAGE = rf"""# Learned rewards and their labels

All rows behind two of the [open questions](../../../docs/questions.md), and [figure 6](../../../docs/figures.md#figure-6). The task is
[a walk among hidden mines](../../../docs/questions.md#the-setting). *The rule* is the task's own reward. The KL is k3 in the loss, beta
0.2 for lines and 1.0 for outcomes unless given, each the best of three on a development map ([tuning.json](tuning.json)).

- **How many**: 64,000 minus 4,000 completions is {effect(LINES_64000, LINES_4000)} points for lines and
  {effect(OUTCOMES_64000, OUTCOMES_4000)} for outcomes; 16,000 minus 4,000 outcomes {effect(OUTCOMES_16000, OUTCOMES_4000)}, uncorrected.
  For lines every seed ends below the rule.{holds(*(down(row) for row in (LINES_1000, LINES_4000, LINES_16000, LINES_64000)))}
- **AUC**: more labels raise it on the initial policy to {median(LINES_64000, "auc")}. On the trained policy's completions it also
  depends on beta: from 4,000 it is {median(LARGE_BETA, "auc end")} for lines and {median(OUTCOMES_4000, "auc end")} for outcomes with 1.0,
  {median(LINES_4000, "auc end")} and {median(OUTCOMES_LOW, "auc end")} with 0.2.{holds(middle(LARGE_BETA, "auc end") > middle(LINES_4000, "auc end") + 0.1, middle(OUTCOMES_4000, "auc end") > middle(OUTCOMES_LOW, "auc end") + 0.1)}
- **Beta**: for lines, 0.04 minus 0.2 has a corrected p of {p_text(SMALL_BETA)}. With 0.04, 64,000 end
  {effect(BEST_SMALL_BETA, SMALL_BETA)} from 4,000.
- **Farming**: with 0.2 and 64,000 the learned reward changes by {change(LINES_64000, "reward")} good lines, the rule's by
  {change(LINES_64000, "rule_reward")}.
- **Without a KL** every seed ends at {zero(NO_KL, BEST_NO_KL, OUTCOMES_NO_KL)}, corrected p {p_text(NO_KL)}, even from 64,000; the rule
  at {median(RULE_NO_KL)}. Nearly every line is then scored as good: the calibration error is {median(NO_KL, "calibration end")}, with 0.2
  {median(LINES_4000, "calibration end")}. In most seeds few lines remain, and the learned reward falls.{holds(*(len(x) >= 4 for x in hacked))}
- **Outcomes** were stable only with a beta of 1.0; with 0.2 the seeds end at {each_end(OUTCOMES_LOW)}. With 1.0, 16,000 learned outcomes
  end {effect(OUTCOMES_16000)} points from the rule, which that beta restrains more, but {effect(OUTCOMES_16000, GROUP)} from the rule
  without a KL.{holds(up(OUTCOMES_16000), middle(OUTCOMES_16000, "kl") > 1.5 * middle(OUTCOMES_RULE, "kl"), min(run["greedy"] for run in runs_of(OUTCOMES_4000).values()) > 0.5 > 0.2 > min(run["greedy"] for run in runs_of(OUTCOMES_LOW).values()))}
- **Division by the group's std**, on arithmetic, as published until commit f8c608c (one seed, 36 steps): with it the learned reward
  rose from -0.07 to 1.09, while the share of right answers fell after step 11 from 86%, and pass@1 ended at 53.4%. Once all
  completions of a group are good, that std is the reward model's noise. The run ended at 92.3% without the division, at 93.9% with a
  beta of 0.2 and k2, and at 91.8% with a refit every 9 steps. So a learned reward is not divided unless `--adv_scale group` is given.
- **Continuations as labels**, 1, 4 or 16 per line, end below true labels in every seed. Their AUC is
  {median(ROLLOUTS[-1], "auc")}, that of true labels {median(TRUTH, "auc")}: after a mine no continuation is correct, so every later line
  counts as bad.{holds(*(down(row) for row in ROLLOUTS))}
- **Controls**: what 30% wrong labels do is unclear, within {wide(NOISE)}. Random labels end at {median(CHANCE)}, from
  {100 * before(CHANCE, "greedy"):.0f}% before RL. *The form of lines* is the rule's outcome plus a reward per legal move.
- **Refits**: no difference to one fit holds after correction.
- **Power**: with five seeds and the median spread, 80% of studies find, uncorrected, a difference of {detectable("labels")} points.
- **On arithmetic**, where reward models learned little, an earlier version found continuations as good as true labels, and outcomes
  hacked before lines. Here every seed with continuations is lower; with a beta of 0.2 outcomes still fail sooner, with 1.0 they last.

{everything("labels")}
"""
