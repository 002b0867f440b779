"""docs/questions.md. The names in braces are those of page.py, which writes the page."""
PAGE = rf"""# Open questions

Two studies where critics and reward models can learn, and one of the KL there and on multiplication. Every
measured number is computed from [the results](../experiments/README.md) by [page.py](../experiments/studies/page.py). With
toy tasks, half a million parameters and {min(seeds(study) for study in ("critic", "labels", "kl"))} seeds or more, these are hypotheses for larger models. Terms
are those of [the derivation](derivation.md).

| question | answer | effect on greedy accuracy, points | evidence | where it may fail |
|---|---|---|---|---|
| [Is a critic worth it?](#is-a-critic-worth-it) | None was found that beats the mean of a group. With a GAE lambda of 0.95 some runs on the longest task end far behind. | 24 lines, lambda 1: {effect("critic", FITTED_1_LONG)}; lambda 0.95: {effect("critic", FITTED_LONG)} | lambda 0.95: {sure("critic", FITTED_LONG)} | intermediate rewards; long completions |
| [How large should groups be?](#is-a-critic-worth-it) | Groups of 64 end lower in every seed; between 2, 4 and 16, at equal completions, no difference could be shown. | groups of 2: {effect("critic", TWO)}; of 64: {effect("critic", SIXTY_FOUR)}, against 16 | of 64: {sure("critic", SIXTY_FOUR)} | problems that are rarely solved |
| [Is a baseline needed?](#is-a-critic-worth-it) | With rewards of 0 and 1 every seed ends lower without one; from a weak start no difference could be shown. With -1 and 1, and few correct completions, training collapses. | 0 and 1: {effect("critic", NONE)}; -1 and 1, weak start: {effect("critic", SIGNED_WEAK)} | {agree(apart("critic", NONE))}, corrected p {f'{corrected("critic", NONE):.2f}'}; collapse: {f'{corrected("critic", SIGNED_WEAK):.2f}'} | other rewards |
| [How many labels?](#labels-and-reward-hacking) | 1,000 labels are too few; between 4,000 and 64,000 no difference could be shown. | 64,000 minus 4,000, for lines: {effect("labels", LINES_64000, LINES_4000)}; for outcomes: {effect("labels", OUTCOMES_64000, OUTCOMES_4000)}. 4,000 for lines minus true rewards: {effect("labels", LINES_4000)} | the last: {sure("labels", LINES_4000)} | human labels; several passes over them |
| [What prevents reward hacking?](#labels-and-reward-hacking) | A KL: without one, learned rewards end at 0% in every seed, even if the AUC was {median("labels", BEST_NO_KL, "auc")}. | beta 0.04 minus 0.2: {effect("labels", SMALL_BETA)} | no KL: {sure("labels", NO_KL)} | larger reward models, refitted often |
| [Which form of the KL?](#the-form-of-the-kl) | Neither k2 nor ratio\*k3 in the loss could be shown to differ from k1 in the reward. At equal beta k3 in the loss leaves a less confident policy where the reference guesses. | pass@1 with k3 minus k1 in the reward, beta 0.1, at temperature 1: {effect("kl", K3, K1_REWARD, "pass@1")}; at 0.5: {effect("kl", K3, K1_REWARD, "pass@1 at 0.5")} | at 1: {agree(apart("kl", K3, K1_REWARD, "pass@1"))} | larger models; many updates per rollout |

## The setting

**A walk on a grid of {mines.SIZE} by {mines.SIZE} with {mines.MINES} hidden mines.** The prompt gives start and goal (`46>72:`), 4 to 8 moves apart; the
completion has up to 12 lines, each a move and the cell where it leads (`R56`). It is correct if every line
is a legal move, the goal is reached, and no line leads onto a mine. The map is the same in all problems and in no prompt,
and the demonstrators do not know it: 80% of their moves go towards the goal, the others anywhere
([mines.py](../experiments/studies/mines.py)):

![how often walks pass each cell of the map, before and after RL; crosses are mines](../experiments/studies/answers/grid.png)

The policy is a GPT with 2 layers of 128, warm-started for 800 steps, then trained for 300 steps of 16 problems with 16
completions, one update per rollout, without a KL unless given. Each seed has its own map, warm start and
held-out problems, shared by all rows. The measure is *greedy* accuracy, since pass@1 at temperature 1 also rises when a
policy only becomes more confident. Tables have medians over the seeds. Differences are paired by seed: their mean and its
95% interval. P-values are corrected for a study's rows (Holm), intervals are
not. Curves are of half of the held-out problems. In four of five such studies a
single uncorrected test finds a difference of {detectable("critic")} points between critics, {detectable("labels")} between labels and
{detectable("kl")} between forms of the KL.

The learning rates of {len(studies.FAMILIES)} families of rows, and a beta for each kind of label, are the best of three on a
development map ([tuning.json](../experiments/studies/answers/tuning.json)). On three such maps, before any study
([gates.py](../experiments/studies/gates.py)), a critic fitted on the frozen policy for 800 steps explains
{f"{gate('critic, 800 steps'):.2f}"} of the variance of outcomes at the ends of lines, the best possible one
{f"{gate('true values, 800 steps'):.2f}"}, and a reward model separates good lines from bad with an AUC of
{f"{gate('AUC, 800 steps'):.3f}"}.{holds(all(best_rate(name) == ("3e-4" if "128" in name or "of 64" in name else "1e-4") for name in studies.FAMILIES), gate("critic, 800 steps") >= 0.8 * gate("true values, 800 steps"), gate("AUC, 800 steps") >= 0.95)}
On arithmetic both fell short: checking a line means comparing its digits with those of other lines, which a model
of this size hardly learned, while a mine is known from one line.

## Is a critic worth it

**With one reward at the end, no critic was found to beat the mean of a group in greedy accuracy. With lambda 1, a critic fitted
before RL could not be shown to differ from it at 6, 12 and 24 lines, and took {times("critic", FITTED_1, GROUP)} times as
long; with lambda 0.95 some runs at 24 lines end far behind.**
{holds(*(unclear("critic", row) for row in (FITTED_1_SHORT, FITTED_1, FITTED_1_LONG, FITTED_1_100, VINE)), min(apart("critic", FITTED_LONG)) < -10, not any(up("critic", row) for row in (OWN, OWN_1, FITTED, FITTED_1, PUBLISHED, SHARED)))}

![greedy accuracy minus the group's, against explained variance; the differences of the rows with 12 lines](../experiments/studies/answers/critic.png)

{table("critic", (GROUP, OWN, OWN_1, FITTED, FITTED_1, PUBLISHED), "pass@8", "explained_variance", "seconds")}

*Own*: a separate copy of the policy with a head; *fitted*: own, trained for 400 steps before RL; *shared*: a head on the
policy; *whitened*: PPO's scaling of advantages over the batch. Lambda is 0.95 unless given.

- **No gain from a better critic could be shown.** Over the last quarter of 100 steps the fitted critic, with lambda 1,
  explains {median("critic", FITTED_1_100, "explained_variance")} of the variance of returns. Monte Carlo values of each line,
  from 4 continuations (VinePPO, arXiv 2410.01679), explain {median("critic", VINE, "explained_variance")}, at
  {ratio("critic", VINE, GROUP_100, "tokens")} times the group's tokens. The differences to the group are {effect("critic", FITTED_1_100)} and {effect("critic", VINE)} points.
- **Cost**: the group reaches {reached("critic", GROUP, GROUP, "tokens")}; with as many tokens, the fitted critic and
  lambda 1 reach {reached("critic", FITTED_1, GROUP, "tokens")}, in as much time {reached("critic", FITTED_1, GROUP, "seconds")}. At equal completions they
  end above it in pass@1 in every seed, by {effect("critic", FITTED_1, of="pass@1")}, corrected p {f'{corrected("critic", FITTED_1, "pass@1"):.2f}'}.{holds(up("critic", FITTED_1, of="pass@1"))}
- **Lambda**: with 24 lines at most, a walk has {f"{middle('critic', GROUP_LONG, 'length'):.0f}"} tokens, and lambda 0.95 leaves
  {f"{100 * 0.95 ** middle('critic', GROUP_LONG, 'length'):.0f}%"} of the reward to its first token; the critic has to supply the
  rest. By seed the differences are {each("critic", FITTED_LONG)} points.
- **A shared critic** ends {beside("critic", SHARED)} the group, whitened {beside("critic", PUBLISHED)}. Sharing,
  lambda, or the value coefficient (0.1, the others' 1) may be the cause.{holds(down("critic", PUBLISHED), down("critic", SHARED))}
- **Groups**: of 256 completions per step, without division by the std, groups of 2 and 4 (at 3e-4, their best rate) differ
  by {effect("critic", TWO)} and {effect("critic", FOUR)} points from groups of 16; groups of 64, with
  4 problems per step, by {effect("critic", SIXTY_FOUR)}, in pass@1 by {effect("critic", SIXTY_FOUR, of="pass@1")}.{holds(down("critic", SIXTY_FOUR), unclear("critic", TWO), unclear("critic", FOUR))}
- **No baseline**: {points("critic", NONE)} points with rewards of 0 and 1, {points("critic", SIGNED)} with -1 and 1. From a
  weak start ({f"{100 * before('critic', GROUP_WEAK, 'greedy'):.0f}%"}) 0 and 1 reach
  {median("critic", NONE_WEAK)}, the group {median("critic", GROUP_WEAK)}, and -1 and 1
  {median("critic", SIGNED_WEAK)}: nearly every completion is only made less likely.{holds(down("critic", NONE), unclear("critic", NONE_WEAK), middle("critic", SIGNED_WEAK) == 0)}

*Where it may fail*: intermediate rewards; long completions; prompts too costly to sample twice. *For a
7B run*: try small groups of many problems first, without a critic; if you need one, try lambda 1.

{everything("critic")}

## Labels and reward hacking

**Between 4,000 and 64,000 labelled completions no difference could be shown, and no learned reward's median came up
to the true outcome without a KL, {median("critic", GROUP)}. More labels raise the AUC on the initial policy to
{median("labels", LINES_64000, "auc")}; on what the trained policy writes it is {median("labels", LINES_64000, "auc end")} for lines and
{median("labels", OUTCOMES_64000, "auc end")} for outcomes.**
{holds(*(down("labels", row.replace("4,000", "1,000"), row) for row in (LINES_4000, OUTCOMES_4000)), all(middle("labels", row) < middle("critic", GROUP) - 0.05 for row in learned_rows()), *(down("labels", row) for row in (LINES_4000, LINES_16000, LINES_64000)), unclear("labels", LINES_64000, LINES_4000), unclear("labels", OUTCOMES_64000, OUTCOMES_4000), *(0.6 < middle("labels", row, "auc end") < 0.8 for row in (LINES_4000, LINES_16000, LINES_64000)), *(middle("labels", row, "auc end") > middle("labels", row, "auc") - 0.04 for row in (OUTCOMES_4000, OUTCOMES_16000, OUTCOMES_64000)))}

![final greedy accuracy against the AUC of the reward model; true and learned rewards over the steps](../experiments/studies/answers/labels.png)

{table("labels", (LINES_RULE, LINES_4000, LINES_64000, OUTCOMES_RULE, OUTCOMES_4000, OUTCOMES_64000), "pass@8", "auc", "auc end", "kl")}

*The rule* is the task's own reward; AUC is the share of pairs of a good and a bad line, or completion, in the right order.
The KL is k3 in the loss, with a beta of 0.2 for lines and 1.0 for outcomes. The reward model reads its labels once, so fewer
labels also mean fewer steps of its fit.

- **The KL decides.** For lines, from 4,000 completions, a beta of 1.0 differs from 0.2 by {effect("labels", LARGE_BETA)} points, 0.04 by
  {effect("labels", SMALL_BETA)}. Without a KL every seed ends at 0%, from 64,000 completions too; the rule at
  {median("labels", RULE_NO_KL)}. There nearly every line is scored as good (calibration error {median("labels", NO_KL, "calibration end")}, with a beta of 0.2
  {median("labels", LINES_4000, "calibration end")}, on the initial policy {median("labels", LINES_4000, "calibration")}); completions shrink from {median("labels", LINES_4000, "length")} to {median("labels", NO_KL, "length")} tokens.
- **Outcomes** need a beta of 1.0, at which the policy moves little, with the true outcome too; with 0.2 the seeds end at
  {each_end("labels", LOW_OUTCOMES)}, without a KL all at 0%.{holds(max(run["greedy"] for row in (NO_KL, BEST_NO_KL, OUTCOMES_NO_KL) for run in runs_of("labels", row).values()) < 0.005, down("labels", SMALL_BETA))}
- **Rollouts as labels**: if 1, 4 or 16 continuations say whether a line is good, the differences from true labels are
  {effect("labels", ONE_ROLLOUT)}, {effect("labels", FOUR_ROLLOUTS)} and {effect("labels", SIXTEEN_ROLLOUTS)} points.
  The AUC on true labels is
  {median("labels", SIXTEEN_ROLLOUTS, "auc")}, with true labels {median("labels", LINES_4000, "auc")}: after a mine no continuation is correct,
  so every later line counts as bad, while the rule judges each line alone.
- **Controls**: with 30% of the labels wrong {effect("labels", NOISE)} points. Random labels end at
  {median("labels", CHANCE)}, from {f"{100 * before('labels', CHANCE):.0f}%"} before RL. The outcome by the rule and
  a reward for each legal move, mine or not, reach {median("labels", FORM)}, {points("labels", FORM, LINES_4000)} from true labels.
- **Refits, with 4,000 labels in all**: two fits {effect("labels", TWICE)} points, four fits
  {effect("labels", FOUR_TIMES)}, four without old labels {effect("labels", NO_HISTORY)}, and with the first
  reference kept {effect("labels", KEPT)}.

*Where it may fail*: human labels; a reward model larger than the policy. *For a 7B run*: watch the true reward on a
sample, not the held-out AUC; tune the KL before buying labels.

{everything("labels")}

## The form of the KL

**With the same beta, 0.1, k3 in the loss ends, where the reference guesses, {lost("kl", K3, K1_REWARD, "pass@1")} points lower in
pass@1 at temperature 1 than k1 in the reward, but not at 0.5 and not in greedy accuracy: the policy is less confident. Neither k2 nor ratio\*k3 in the loss could be shown to differ from k1 in the reward;
k2 and k3 in the reward hardly restrain the policy.**
{holds(middle("kl", K3, "entropy") > middle("kl", K1_REWARD, "entropy"), down("kl", K3, K1_REWARD, "pass@1"), not down("kl", K3, K1_REWARD), near("kl", K3, K1_REWARD, of="pass@1 at 0.5", within=1), near("kl", K3, K1_REWARD, within=1), *(abs(statistics.mean(at_equal_kl("slips and guesses", f"loss, {form}, {beta}"))) < 3 for form in ("k2", "ratio*k3") for beta in (0.1, 0.3, 1.0)), *(middle("kl", f"slips and guesses: reward, {form}, 1.0", "kl") > 0.9 * middle("kl", "slips and guesses: no KL", "kl") for form in ("k2", "k3")))}

With r = reference / policy, the probabilities of a token, k1 is -log r, k2 is (log r)² / 2, and k3 is r - 1 - log r;
ratio\*k3 multiplies by policy / old policy. *In the reward* they are subtracted from it, *in the loss* their gradient is
taken.

![pass@1 against the KL, one line per form, where the reference guesses and where it does not](../experiments/studies/answers/kl.png)

The task is two-digit multiplication. Demonstrations get 3% of their numbers wrong
([slips.py](../experiments/studies/slips.py)) and, in *slips and guesses*, half of them guess.

{kl_table("slips and guesses", ("no KL", "loss, k2, 0.1", "loss, k3, 0.1", "loss, ratio*k3, 0.1", "reward, k1, 0.1", "reward, k3, 1.0"))}

At equal KL, interpolated between the betas of k1 in
the reward, k3 in the loss differs in pass@1 by {frontier("slips and guesses", "loss, k3, 0.3")} points with a beta of 0.3, and on mines by {frontier("mines", "loss, k3, 0.1")} with 0.1.

On a model small enough to enumerate all completions, k1 in the reward has the exact gradient of
the KL; at half a nat, k2 and ratio\*k3 in the loss are off by {f"{100 * error('loss, k2'):.0f}% and {100 * error('loss, ratio*k3'):.0f}%"}, k3 by
{f"{100 * error('loss, k3'):.0f}%"} ([bias.py](../experiments/studies/bias.py)). While the ratio is 1, the mean
gradient of k3 at a token is that of KL(reference, policy), which penalises dropping anything that the reference does; that
of k1 in the loss is 0; with a beta of 1.0 greedy accuracy differs by
{each("kl", "slips and guesses: loss, k1, 1.0")} points from no KL.
arXiv 2510.01555 derives that k1 in the reward and k2 in the loss have the same gradient at a token, unlike k3; arXiv
2512.21852 finds that unbiased gradients train larger models better.

Where the reference does not guess, k3 in the loss with a beta of 0.1 differs from k1 in the reward in pass@1 by
{effect("kl", "slips: loss, k3, 0.1", "slips: reward, k1, 0.1", "pass@1")} points on slips and by
{effect("kl", "mines: loss, k3, 0.1", "mines: reward, k1, 0.1", "pass@1")} on mines.

*Where it may fail*: larger models; many updates per rollout. *For a 7B run*: compare forms of the KL at equal KL, and at
the temperature of use.

{everything("kl")}

{bias_table()}

## What an earlier version said

On arithmetic, where critics and reward models learned little, an earlier version found that PPO ends below GRPO,
that no baseline gives the highest pass@1, that rollouts are as good as true labels, and that learned rewards per line last
longer than learned outcomes. Here a fitted critic with lambda 1 is {effect("critic", FITTED_1)} points from the group, no
baseline {effect("critic", NONE, of="pass@1")} in pass@1, one rollout as label {effect("labels", ONE_ROLLOUT)} from true labels, and 4,000
labelled outcomes, their beta now tuned, {effect("labels", OUTCOMES_4000)} from the true outcome.
{holds(near("critic", FITTED_1), down("critic", NONE, of="pass@1"), down("labels", ONE_ROLLOUT), near("labels", OUTCOMES_4000), near("critic", TWO, within=4))}
"""
