"""docs/questions.md. The names in braces are those of page.py, which writes the page."""
PAGE = rf"""# Open questions

Three studies in a setting where critics and reward models can learn. Every number is computed from
[the results](../experiments/README.md) by [page.py](../experiments/studies/page.py). With toy tasks, half a million
parameters and {min(seeds(study) for study in ("critic", "labels", "kl"))} seeds or more, these are hypotheses for larger models.

| question | answer | effect on greedy accuracy, points | evidence | where it may fail |
|---|---|---|---|---|
| [Is a critic worth it?](#is-a-critic-worth-it) | None was found that beats the mean of a group. With a GAE lambda of 0.95 some runs on the longest task end far behind. | 24 lines, lambda 1: {effect("critic", FITTED_1_LONG)}; lambda 0.95: {effect("critic", FITTED_LONG)} | lambda 0.95: {sure("critic", FITTED_LONG)} | intermediate rewards; long completions |
| [How large should groups be?](#is-a-critic-worth-it) | At equal completions, no difference could be shown. | groups of 2: {effect("critic", TWO)}; of 64: {effect("critic", SIXTY_FOUR)}, against 16 | of 64: {sure("critic", SIXTY_FOUR)} | problems that are rarely solved |
| [Is a baseline needed?](#is-a-critic-worth-it) | Not with rewards of 0 and 1. With -1 and 1, and few correct completions, training collapses without one. | 0 and 1: {effect("critic", NONE)}; -1 and 1, weak start: {effect("critic", SIGNED_WEAK)} | collapse: {sure("critic", SIGNED_WEAK)} | other rewards |
| [How many labels?](#labels-and-reward-hacking) | 4,000 labelled completions did as well as 64,000. Learned rewards per line ended below the true ones. | 4,000 for lines: {effect("labels", LINES_4000)}; for outcomes: {effect("labels", OUTCOMES_4000)}, against the true reward | lines: {sure("labels", LINES_4000)} | human labels |
| [What prevents reward hacking?](#labels-and-reward-hacking) | The KL more than the reward model: without a KL the policy ends at 0% even if the AUC was {median("labels", BEST_NO_KL, "auc")}. | no KL: {effect("labels", NO_KL)}; beta 0.04: {effect("labels", SMALL_BETA)}, against beta 0.2 | no KL: {sure("labels", NO_KL)} | larger reward models, refitted often |
| [Which form of the KL?](#the-form-of-the-kl) | Neither k2 nor ratio\*k3 in the loss could be shown to differ from k1 in the reward; at equal beta k3 in the loss costs pass@1. | pass@1 with beta 0.1, k3: {effect("kl", K3, K1_REWARD, "pass@1")}; k2: {effect("kl", K2, K1_REWARD, "pass@1")}, against k1 in the reward | k3: {agree(apart("kl", K3, K1_REWARD, "pass@1"))} | larger models; many updates per rollout |

## The setting

**A walk on a grid of {mines.SIZE} by {mines.SIZE} with {mines.MINES} hidden mines.** The prompt gives start and goal (`46>72:`), 4 to 8 moves apart; the
completion has up to 12 lines, each a move and the cell where it leads (`R56`). It is correct if every line
is a legal move, the goal is reached, and no line leads onto a mine. The map is the same in all problems and in no prompt,
and the demonstrators do not know it: 80% of their moves go towards the goal, the others anywhere. So RL has to find
which walks are safe ([mines.py](../experiments/studies/mines.py)):

![how often walks pass each cell of the map, before and after RL; crosses are mines](../experiments/studies/answers/grid.png)

The policy is a GPT with 2 layers of 128, warm-started for 800 steps, then trained for 300 steps of 16 problems with 16
completions, one update per rollout, without a KL unless a row says otherwise. Each seed has its own map, warm start and
held-out problems, shared by all rows. The measure is *greedy* accuracy, since pass@1 at temperature 1 also rises when a
policy only becomes more confident. Tables have medians over the seeds. Differences are paired by seed: their mean and its
95% interval (Student's t), or both values if there are two. P-values are corrected for a study's rows (Holm), intervals are
not. Curves are of half of the held-out problems.

The learning rates of {len(studies.FAMILIES) + 2} families of rows, and a beta for each kind of label, are the best of three on a
development map ([tuning.json](../experiments/studies/answers/tuning.json)). On three such maps, before any study
([gates.py](../experiments/studies/gates.py)), a critic fitted on the frozen policy explains
{f"{gate('critic, 800 steps'):.2f}"} of the variance of outcomes at the ends of lines, the best possible one
{f"{gate('true values, 800 steps'):.2f}"}, and a reward model separates good lines from bad with an AUC of
{f"{gate('AUC, 800 steps'):.3f}"}.{holds(gate("critic, 800 steps") >= 0.8 * gate("true values, 800 steps"), gate("AUC, 800 steps") >= 0.95)}
On arithmetic both fell short: checking a line means comparing its digits with those of other lines, which is too hard for
a model of this size, while a mine is known from one line. Both can judge only what is visible in the text.

## Is a critic worth it

**With one reward at the end, no critic was found to beat the mean of a group. With lambda 1, a critic fitted
before RL could not be shown to differ from it at 6, 12 and 24 lines, and took {ratio("critic", FITTED_1, GROUP)} times the
wall time; with lambda 0.95 some runs at 24 lines end far behind.**
{holds(*(near("critic", row, within=4) for row in (FITTED_1_SHORT, FITTED_1, FITTED_1_LONG)), min(apart("critic", FITTED_LONG)) < -10, not any(up("critic", row) for row in (OWN, OWN_1, FITTED, FITTED_1, PUBLISHED, SHARED)))}

![greedy accuracy minus the group's, against explained variance; the differences of the rows with 12 lines](../experiments/studies/answers/critic.png)

{table("critic", (GROUP, OWN, OWN_1, FITTED, FITTED_1, PUBLISHED), "pass@8", "explained_variance", "seconds")}

*Own*: a separate copy of the policy with a head; *fitted*: own, trained for 400 steps before RL; *shared*: a head on the
policy. Lambda is 0.95 unless given; *as published* whitens advantages.

- **No gain from a better critic could be shown.** Over the last quarter of 100 steps the fitted critic, with lambda 1,
  explains {median("critic", FITTED_1_100, "explained_variance")} of the variance of returns. Monte Carlo values of each line,
  from 4 continuations (VinePPO, arXiv 2410.01679), explain {median("critic", VINE, "explained_variance")}, at
  {ratio("critic", VINE, GROUP_100, "tokens")} times the group's tokens, {ratio("critic", VINE, FITTED_1_100, "tokens")} times that
  critic's. The differences to the group are {effect("critic", FITTED_1_100)} and {effect("critic", VINE)} points.
- **Cost**: the group reaches {reached("critic", GROUP, GROUP, "tokens")}; with as many tokens, the fitted critic and
  lambda 1 reach {reached("critic", FITTED_1, GROUP, "tokens")}, in as much time {reached("critic", FITTED_1, GROUP, "seconds")},
  as the fit takes nearly all of it.
- **Lambda**: with 24 lines at most, a walk has {f"{middle('critic', GROUP_LONG, 'length'):.0f}"} tokens, and lambda 0.95 leaves
  {f"{100 * 0.95 ** middle('critic', GROUP_LONG, 'length'):.0f}%"} of the reward to its first token; the critic has to supply the
  rest. By seed the differences are {each("critic", FITTED_LONG)} points, though that critic explains
  {median("critic", FITTED_LONG, "explained_variance")}.
- **A shared critic** ends {beside("critic", SHARED)} the group, PPO as published {beside("critic", PUBLISHED)}. A
  likely reason: the value loss also updates the policy's layers.{holds(down("critic", PUBLISHED), down("critic", SHARED))}
- **Small groups cost GRPO nothing that could be shown.** Of 256 completions per step, groups of 2 and 4 differ by
  {points("critic", TWO)} and {points("critic", FOUR)} points from groups of 16; groups of 64, the paper's size, with 4
  problems per step, by {points("critic", SIXTY_FOUR)}.{holds(down("critic", SIXTY_FOUR), near("critic", TWO, within=4), near("critic", FOUR, within=4))}
- **No baseline**: {points("critic", NONE)} points with rewards of 0 and 1, {points("critic", SIGNED)} with -1 and 1. From a
  weak start ({f"{100 * before('critic', GROUP_WEAK, 'greedy'):.0f}%"}, also greedy) 0 and 1 reach
  {median("critic", NONE_WEAK)}, the group {median("critic", GROUP_WEAK)}, and -1 and 1
  {median("critic", SIGNED_WEAK)}: nearly every completion is only made less likely.{holds(middle("critic", SIGNED_WEAK) == 0)}

*Where it may fail*: intermediate rewards; completions of thousands of tokens; prompts too costly to sample twice. *For a
7B run*: start without a critic, with small groups of many problems; if you need a critic, make it separate, fit it first,
and set lambda to 1.

{everything("critic")}

## Labels and reward hacking

**4,000 labelled completions did as well as 64,000, for rewards per line and for outcomes. More labels raise the AUC on the
initial policy to 0.99; on the trained policy it falls to about 0.7 with a KL of beta 0.2, and barely falls with 1.0.**
{holds(*(down("labels", row) for row in (LINES_4000, LINES_16000, LINES_64000)), near("labels", LINES_64000, LINES_4000), near("labels", OUTCOMES_64000, OUTCOMES_4000), f"{middle('labels', LINES_64000, 'auc'):.2f}" == "0.99", *(0.6 < middle("labels", row, "auc end") < 0.8 for row in (LINES_4000, LINES_16000, LINES_64000)), *(middle("labels", row, "auc end") > middle("labels", row, "auc") - 0.04 for row in (OUTCOMES_4000, OUTCOMES_16000, OUTCOMES_64000)))}

![final greedy accuracy against the AUC of the reward model; true and learned rewards over the steps](../experiments/studies/answers/labels.png)

{table("labels", (LINES_RULE, LINES_4000, LINES_64000, OUTCOMES_RULE, OUTCOMES_4000, OUTCOMES_64000), "pass@8", "auc", "auc end", "kl")}

*The rule* is the task's own reward; AUC is the share of pairs of a good and a bad line, or completion, in the right order.
The KL is k3 in the loss, with a beta of 0.2 for lines and 1.0 for outcomes.

- **The KL decides.** With 4,000 completions the policy ends at {median("labels", LARGE_BETA)} with a beta of 1.0,
  {median("labels", LINES_4000)} with 0.2, {median("labels", SMALL_BETA)} with 0.04 and {median("labels", NO_KL)} without
  a KL; the rule without one at {median("labels", RULE_NO_KL)}. Sixteen times the labels help in part: {median("labels", BEST_SMALL_BETA)} with 0.04, and still
  {median("labels", BEST_NO_KL)} without.{holds(middle("labels", NO_KL) == middle("labels", BEST_NO_KL) == 0, down("labels", SMALL_BETA), middle("labels", BEST_SMALL_BETA) > middle("labels", SMALL_BETA))}
- **Rollouts as labels**: if 1, 4 or 16 continuations say whether a line is good, the differences from true labels are
  {points("labels", ONE_ROLLOUT)}, {points("labels", FOUR_ROLLOUTS)} and {points("labels", SIXTEEN_ROLLOUTS)} points, and
  sixteen take {ratio("labels", SIXTEEN_ROLLOUTS, ONE_ROLLOUT, "tokens")} times the tokens of one. A likely reason: after a
  mine every later line counts as bad.
- **Controls**: with 30% of the labels wrong {effect("labels", NOISE)} points. Random labels end at
  {median("labels", CHANCE)}, from {f"{100 * before('labels', CHANCE):.0f}%"} before RL. The outcome by the rule and
  a reward for each legal move, mine or not, reach {median("labels", FORM)}.
- **Refits, with 4,000 labels in all**: two fits {effect("labels", TWICE)} points, four fits
  {effect("labels", FOUR_TIMES)}, four without old labels {effect("labels", NO_HISTORY)}, and with the first
  reference kept {effect("labels", KEPT)} (otherwise each iteration
  resets it).

*Where it may fail*: human labels; a reward model larger than the policy. *For a 7B run*: watch the true reward on a
sample, not the held-out AUC; tune the KL before buying labels.

{everything("labels")}

## The form of the KL

**k3 in the loss, GRPO's form, costs {lost("kl", K3, K1_REWARD, "pass@1")} points of pass@1 with a beta of 0.1 and
{lost("kl", "slips and guesses: loss, k3, 0.3", "slips and guesses: reward, k1, 0.3", "pass@1")} with 0.3, but no greedy
accuracy, where the reference guesses. Neither k2 nor ratio\*k3 in the loss could be shown to differ from k1 in the reward;
k2 and k3 in the reward hardly restrain the policy.**
{holds(down("kl", K3, K1_REWARD, "pass@1"), not down("kl", K3, K1_REWARD), *(abs(statistics.mean(at_equal_kl("slips and guesses", f"loss, {form}, {beta}"))) < 3 for form in ("k2", "ratio*k3") for beta in (0.1, 0.3, 1.0)), *(middle("kl", f"slips and guesses: reward, {form}, 1.0", "kl") > 0.9 * middle("kl", "slips and guesses: no KL", "kl") for form in ("k2", "k3")))}

With r = reference / policy, the probabilities of a token, k1 is -log r, k2 is (log r)² / 2, and k3 is r - 1 - log r;
ratio\*k3 multiplies by policy / old policy. *In the reward* they are subtracted from it, *in the loss* their gradient is
taken.

![pass@1 against the KL, one line per form, where the reference guesses and where it does not](../experiments/studies/answers/kl.png)

The task is two-digit multiplication. Demonstrations get 3% of their numbers wrong
([slips.py](../experiments/studies/slips.py)) and, in *slips and guesses*, half of them guess.

{kl_table("slips and guesses", ("no KL", "loss, k2, 0.1", "loss, k3, 0.1", "loss, ratio*k3, 0.1", "reward, k1, 0.1", "reward, k3, 1.0"))}

With a beta of 0.1 k3 in the loss is behind although its KL is no smaller; shorter completions suggest that it keeps guessing. With 0.3 its KL is smaller, and at equal KL, interpolated between the betas of k1 in the
reward, the difference is {frontier("slips and guesses", "loss, k3, 0.3")}.
{holds(middle("kl", K3, "kl") > middle("kl", K1_REWARD, "kl"), middle("kl", K3, "length") < middle("kl", K1_REWARD, "length"))}

The gradients may explain a part. On a model small enough to enumerate all completions, k1 in the reward has the exact gradient of
the KL; at half a nat, k2 and ratio\*k3 in the loss are off by {f"{100 * error('loss, k2'):.0f}% and {100 * error('loss, ratio*k3'):.0f}%"}, k3 by
{f"{100 * error('loss, k3'):.0f}%"} ([bias.py](../experiments/studies/bias.py)). While the ratio is 1, the mean
gradient of k3 at a token is that of KL(reference, policy), which penalises dropping anything that the reference does; that
of k1 in the loss is 0, so it only adds noise, and with a beta of 1.0 greedy accuracy differs by
{each("kl", "slips and guesses: loss, k1, 1.0")} points from no KL.
arXiv 2510.01555 derives that k1 in the reward and k2 in the loss have the same gradient at a token, unlike k3; arXiv
2512.21852 finds that unbiased gradients train larger models better.

Where the reference does not guess, k3 in the loss with a beta of 0.1 differs from k1 in the reward by
{effect("kl", "slips: loss, k3, 0.1", "slips: reward, k1, 0.1", "pass@1")} points on slips and by
{effect("kl", "mines: loss, k3, 0.1", "mines: reward, k1, 0.1", "pass@1")} on mines.

*Where it may fail*: larger models; many updates per rollout. *For a 7B run*: k2 or ratio\*k3 in the loss instead of k3; compare at equal KL.

{everything("kl")}

{bias_table()}

## What an earlier version said

On arithmetic, where critics and reward models learned little, an earlier version of this page found that PPO ends below GRPO,
that training without a baseline reaches the highest pass@1, that rollouts are as good as true labels, and that learned
rewards per line last longer than learned outcomes. Here a fitted critic with lambda 1 ends {beside("critic", FITTED_1)} the group;
training without a baseline ends {beside("critic", NONE, of="pass@1")} it in pass@1; labels from one rollout end
{beside("labels", ONE_ROLLOUT)} true ones; and 4,000 labelled outcomes, whose beta is now tuned too, end {beside("labels", OUTCOMES_4000)}
the rule. The cost of k3 in the loss, and that groups of two suffice, were confirmed.
{holds(near("critic", FITTED_1), down("critic", NONE, of="pass@1"), down("labels", ONE_ROLLOUT), near("labels", OUTCOMES_4000), near("critic", TWO, within=4))}
"""
