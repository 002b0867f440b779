"""docs/questions.md. The names in braces are those of page.py, which writes the page."""
PAGE = rf"""# Open questions

Two studies on a task where critics and reward models can learn, and one of the KL. [page.py](../experiments/studies/page.py)
computes every measured number from [the results](../experiments/README.md). With toy tasks, half a million parameters and
{min(seeds(study) for study in ("critic", "labels", "kl"))} seeds or more, these are hypotheses for larger models. [The derivation](derivation.md) defines the terms.

| question | answer | effect on greedy accuracy, points | evidence | where it may fail |
|---|---|---|---|---|
| [Is a critic worth it?](#is-a-critic-worth-it) | None was found that beats the mean of a group. A critic not fitted before RL ends lower with a GAE lambda of 0.95 than with 1. | fitted, lambda 1, 12 lines: {effect("critic", FITTED_1)}; not fitted, lambda 0.95 minus 1: {effect("critic", OWN, OWN_1)} | the last: {agree(apart("critic", OWN, OWN_1))}, post hoc | intermediate rewards; one completion per problem |
| [How large should groups be?](#is-a-critic-worth-it) | Groups of 64, with 4 problems per step, end lower in every seed; between 2, 4 and 16, at equal completions, no difference could be shown. | groups of 2: {effect("critic", TWO)}; of 64: {effect("critic", SIXTY_FOUR)}, against 16 | of 64: {sure("critic", SIXTY_FOUR)} | problems that are rarely solved |
| [Is a baseline needed?](#is-a-critic-worth-it) | With rewards of 0 and 1 every seed ends lower without one; from a weak start no difference could be shown. With -1 and 1, and few correct completions, training collapses. | 0 and 1: {effect("critic", NONE)}; -1 and 1, weak start: {effect("critic", SIGNED_WEAK)} | {agree(apart("critic", NONE))}, corrected p {f'{corrected("critic", NONE):.2f}'}; collapse: {f'{corrected("critic", SIGNED_WEAK):.2f}'} | other rewards |
| [How many labels?](#labels-and-reward-hacking) | 1,000 labels, each read once, are too few; between 4,000 and 64,000 no difference could be shown. | 64,000 minus 4,000, for lines: {effect("labels", LINES_64000, LINES_4000)}; for outcomes: {effect("labels", OUTCOMES_64000, OUTCOMES_4000)}. 4,000 for lines minus true rewards: {effect("labels", LINES_4000)} | the last: {sure("labels", LINES_4000)} | human labels; several passes over them |
| [What prevents reward hacking?](#labels-and-reward-hacking) | A strong enough KL limits it: without one, learned rewards end at 0% in every seed, even if the AUC was {median("labels", BEST_NO_KL, "auc")}. | beta 0.04 minus 0.2: {effect("labels", SMALL_BETA)} | no KL: {sure("labels", NO_KL)} | larger reward models, refitted often |
| [Which form of the KL?](#the-form-of-the-kl) | At equal beta k3 in the loss leaves a less confident policy than k1 in the reward; k2 and ratio\*k3 in the loss could not be shown to differ from it. | pass@1 with k3 minus k1, beta 0.1, where the reference guesses, at temperature 1: {effect("kl", K3, K1_REWARD, "pass@1")}; at 0.5: {effect("kl", K3, K1_REWARD, "pass@1 at 0.5")} | at 1: {agree(apart("kl", K3, K1_REWARD, "pass@1"))} | larger models; many updates per rollout |

## The setting

**A walk on a grid of {mines.SIZE} by {mines.SIZE} with {mines.MINES} hidden mines.** The prompt gives start and goal (`46>72:`), 4 to 8 moves apart; the
completion has up to 12 lines, each a move and the cell where it leads (`R56`). It is correct if every move
is legal, the goal is reached, and no line leads onto a mine. The map is the same in all problems and in no prompt,
and the demonstrators do not know it: 80% of their moves go towards the goal, the others anywhere
([mines.py](../experiments/studies/mines.py)):

![walks before and after RL; crosses are mines](../experiments/studies/answers/grid.png)

The policy is a GPT with 2 layers of 128, warm-started for 800 steps, then trained for 300 steps of 16 problems with 16
completions, one update per rollout, without a KL or division by the std unless given. Each seed has its own map, warm
start and held-out problems, shared by all rows. Accuracy is *greedy*, since pass@1 at temperature 1 also rises
when a policy only becomes more confident. Tables have medians over the seeds; differences are paired by seed, with the 95%
interval of their mean. P-values, not intervals, are corrected for a study's rows (Holm). All rows have three seeds; those of
the headlines got two more after the first results. With five, a single uncorrected test has a power of 80% for differences
of {detectable("critic")} points between critics, {detectable("labels")} between labels and, in pass@1, {detectable("kl", "pass@1")} between forms of the KL.

The learning rates of {len(studies.FAMILIES)} families of rows, and a beta for each kind of label, are the best of three on a
development map ([tuning.json](../experiments/studies/answers/tuning.json)). Before any study, on three such maps
([gates.py](../experiments/studies/gates.py)), a critic fitted on the frozen policy for 800 steps explains
{f"{gate('critic, 800 steps'):.2f}"} of the variance of outcomes at the ends of lines, the best possible one
{f"{gate('true values, 800 steps'):.2f}"}, and a reward model has an AUC on lines of
{f"{gate('AUC, 800 steps'):.3f}"}.{holds(all(best_rate(name) == ("3e-4" if "128" in name or "of 64" in name else "1e-4") for name in studies.FAMILIES), gate("critic, 800 steps") >= 0.8 * gate("true values, 800 steps"), gate("AUC, 800 steps") >= 0.95)}
A mine is known from its line alone; on arithmetic a line must be compared with others, which is harder for so small a model.

## Is a critic worth it

**With one reward at the end, no critic was found to beat the mean of a group in greedy accuracy. Fitted before RL and with
lambda 1, it could not be shown to differ in any of five comparisons, though its mean is above in each, most from a weak
start, {effect("critic", FITTED_1_WEAK)}; with 12 lines it takes {times("critic", FITTED_1, GROUP)} times as long. Not fitted, it ends lower with
lambda 0.95 than with 1 in every seed.**
{holds(*(unclear("critic", row) and 0 < statistics.mean(apart("critic", row)) <= statistics.mean(apart("critic", FITTED_1_WEAK)) for row in (FITTED_1_SHORT, FITTED_1, FITTED_1_LONG, FITTED_1_100, FITTED_1_WEAK)), unclear("critic", VINE), down("critic", OWN, OWN_1), down("critic", OWN), not any(up("critic", row) for row in (OWN, OWN_1, FITTED, FITTED_1, PUBLISHED, SHARED)))}

![differences to the group](../experiments/studies/answers/critic.png)

{table("critic", (GROUP, OWN, OWN_1, FITTED, FITTED_1, PUBLISHED), "pass@8", "explained_variance", "seconds")}

*Own*: a separate copy of the policy with a head; *fitted*: own, trained for 400 steps before RL; *shared*: a head on the
policy; *whitened*: PPO's scaling of advantages over the batch. Lambda is 0.95 unless given.

- **A better critic** was not shown to help. Late in 100 steps the fitted one, with lambda 1, explains
  {median("critic", FITTED_1_100, "explained_variance")} of the variance of returns; Monte Carlo values of each line, from 4 continuations (VinePPO, arXiv 2410.01679),
  explain {median("critic", VINE, "explained_variance")}, at {ratio("critic", VINE, GROUP_100, "tokens")} times the group's tokens. The differences to the group are {effect("critic", FITTED_1_100)} and
  {effect("critic", VINE)} points.
- **Cost**: the group reaches {reached("critic", GROUP, GROUP, "tokens")}. With lambda 1 and as many tokens, the fitted critic reaches {reached("critic", FITTED_1, GROUP, "tokens")}, without the fit {reached("critic", OWN_1, GROUP, "tokens")}; in as
  much time {reached("critic", FITTED_1, GROUP, "seconds")}, as the fit takes about as long, and {reached("critic", OWN_1, GROUP, "seconds")}. After as many steps, and a third more completions, the
  fitted one is above the group in pass@1 in every seed, by {effect("critic", FITTED_1, of="pass@1")}, corrected p {f'{corrected("critic", FITTED_1, "pass@1"):.2f}'}.{holds(up("critic", FITTED_1, of="pass@1"), 0.75 < (middle("critic", FITTED_1, "seconds") - middle("critic", OWN_1, "seconds")) / middle("critic", GROUP, "seconds") < 1.25)}
- **Lambda**: with 24 lines at most, a walk has {f"{middle('critic', GROUP_LONG, 'length'):.0f}"} tokens, and lambda 0.95 leaves
  {f"{100 * 0.95 ** middle('critic', GROUP_LONG, 'length'):.0f}%"} of the reward to its first token. There the fitted one
  differs from the group by {each("critic", FITTED_LONG)} points.
- **A shared critic** ends {beside("critic", SHARED)} the group, whitened {beside("critic", PUBLISHED)}. Lambda, the
  value coefficient (0.1, the others' 1) and the learning rate, not tuned for them, may be the cause too.{holds(down("critic", PUBLISHED), down("critic", SHARED))}
- **Groups** of 2 and 4 have 3e-4, their best learning rate; those of 4 differ by {effect("critic", FOUR)} points from 16, those
  of 64 in pass@1 by {effect("critic", SIXTY_FOUR, of="pass@1")}.{holds(down("critic", SIXTY_FOUR), unclear("critic", TWO), unclear("critic", FOUR))}
- **No baseline** with rewards of -1 and 1 differs by {effect("critic", SIGNED)} points. From a weak start
  ({f"{100 * before('critic', GROUP_WEAK, 'greedy'):.0f}%"}) 0 and 1 reach {median("critic", NONE_WEAK)}, the group {median("critic", GROUP_WEAK)}, and -1 and 1
  {median("critic", SIGNED_WEAK)}: nearly every completion is only made less likely.{holds(down("critic", NONE), unclear("critic", NONE_WEAK), middle("critic", SIGNED_WEAK) == 0)}

*Where it may fail*: intermediate rewards; one completion per problem, which was not run. *For a
7B run*: try groups of 4 to 16 first, without a critic; if you need one, try lambda 1.

{everything("critic")}

## Labels and reward hacking

**Between 4,000 and 64,000 labelled completions no difference in greedy accuracy could be shown. With the same KL, learned
rewards for lines end {lost("labels", LINES_4000)} (4,000) and {lost("labels", LINES_64000)} points (64,000) below the rule. More labels raise the AUC on the initial policy to
{median("labels", LINES_64000, "auc")}; on what the trained policy writes it depends on the KL: from 4,000 it is {median("labels", LARGE_BETA, "auc end")} for lines and {median("labels", OUTCOMES_4000, "auc end")} for
outcomes with a beta of 1.0, {median("labels", LINES_4000, "auc end")} and {median("labels", LOW_OUTCOMES, "auc end")} with 0.2.**
{holds(*(down("labels", row.replace("4,000", "1,000"), row) for row in (LINES_4000, OUTCOMES_4000)), *(down("labels", row) for row in (LINES_4000, LINES_16000, LINES_64000)), unclear("labels", LINES_64000, LINES_4000), unclear("labels", OUTCOMES_64000, OUTCOMES_4000), middle("labels", LARGE_BETA, "auc end") > middle("labels", LINES_4000, "auc end") + 0.1, middle("labels", OUTCOMES_4000, "auc end") > middle("labels", LOW_OUTCOMES, "auc end") + 0.1)}

![accuracy against AUC; rewards over the steps](../experiments/studies/answers/labels.png)

{table("labels", (LINES_RULE, LINES_4000, LINES_64000, OUTCOMES_RULE, OUTCOMES_4000, OUTCOMES_64000), "pass@8", "auc", "auc end", "kl")}

*The rule* is the task's own reward; AUC is the share of pairs of good and bad lines, or completions, in the right order.
The KL is k3 in the loss, with a beta of 0.2 for lines and 1.0 for outcomes. Each label is read once, so fewer
labels also mean a shorter fit.

- **The KL decides.** For lines, from 4,000 completions, a beta of 1.0 differs from 0.2 by {effect("labels", LARGE_BETA)} points, 0.04 by
  {effect("labels", SMALL_BETA)}; with 0.04, 64,000 completions end at {median("labels", BEST_SMALL_BETA)}, 4,000 at {median("labels", SMALL_BETA)}. With 0.2 and 64,000 the learned
  reward goes from {ends("labels", LINES_64000, "reward")}, the true one from {ends("labels", LINES_64000, "rule_reward")}. Without a KL every seed ends at 0%,
  from 64,000 too; the rule at {median("labels", RULE_NO_KL)}. There nearly every line is scored as good (calibration error
  {median("labels", NO_KL, "calibration end")}, with 0.2 {median("labels", LINES_4000, "calibration end")}), but lines become few, so the learned reward falls.
- **Outcomes** were stable only with a beta of 1.0; with 0.2 the seeds end at {each_end("labels", LOW_OUTCOMES)}, without a KL all at 0%. With
  1.0 the policy moves little; 16,000 learned outcomes end {effect("labels", OUTCOMES_16000)} points from the true one, whose rewards
  of 0 and 1 it restrains more.{holds(max(run["greedy"] for row in (NO_KL, BEST_NO_KL, OUTCOMES_NO_KL) for run in runs_of("labels", row).values()) < 0.005, down("labels", SMALL_BETA), up("labels", BEST_SMALL_BETA, SMALL_BETA), middle("labels", OUTCOMES_16000, "kl") > 1.5 * middle("labels", OUTCOMES_RULE, "kl"))}
- **Rollouts as labels**: with 1, 4 or 16 continuations per line the differences from true labels are
  {effect("labels", ONE_ROLLOUT)}, {effect("labels", FOUR_ROLLOUTS)} and {effect("labels", SIXTEEN_ROLLOUTS)} points.
  The AUC is
  {median("labels", SIXTEEN_ROLLOUTS, "auc")}, with true labels {median("labels", LINES_4000, "auc")}: after a mine no continuation is correct,
  so every later line counts as bad.
- **Controls**: with 30% of the labels wrong {effect("labels", NOISE)} points. Random labels end at
  {median("labels", CHANCE)}, from {f"{100 * before('labels', CHANCE):.0f}%"} before RL. The outcome by the rule and
  a reward for each legal move, mine or not, reach {median("labels", FORM)}, {effect("labels", FORM, LINES_4000)} from true labels.
- **Refits**: see [figure 6](figures.md#figure-6).

*Where it may fail*: human labels; a reward model larger than the policy. *For a 7B run*: watch the true reward on a
sample, since the held-out AUC does not tell what a weak KL will do.

{everything("labels")}

## The form of the KL

**With the same beta, k3 in the loss leaves a less confident policy than k1 in the reward: where the reference guesses, with
0.1, pass@1 ends {lost("kl", K3, K1_REWARD, "pass@1")} points lower at temperature 1, but not at 0.5. k2 and
ratio\*k3 in the loss, whose gradients are the same with one update per rollout, could not be shown to differ from k1 in the
reward; k2 and k3 in the reward hardly restrain the policy.**
{holds(middle("kl", K3, "entropy") > middle("kl", K1_REWARD, "entropy"), down("kl", K3, K1_REWARD, "pass@1"), not down("kl", K3, K1_REWARD), near("kl", K3, K1_REWARD, of="pass@1 at 0.5", within=1), near("kl", K3, K1_REWARD, within=1), *(unclear("kl", f"slips and guesses: loss, {form}, {beta}", f"slips and guesses: reward, k1, {beta}", of) for form in ("k2", "ratio*k3") for beta in (0.1, 0.3, 1.0) for of in ("greedy", "pass@1")), *(middle("kl", f"slips and guesses: reward, {form}, 1.0", "kl") > 0.9 * middle("kl", "slips and guesses: no KL", "kl") for form in ("k2", "k3")))}

With r = reference / policy, the probabilities of a token, k1 is -log r, k2 is (log r)² / 2, and k3 is r - 1 - log r;
ratio\*k3 multiplies by policy / old policy. *In the reward* they are subtracted from it, *in the loss* their gradient is
taken.

![pass@1 against the KL for all forms but k1 in the loss](../experiments/studies/answers/kl.png)

The task is two-digit multiplication; demonstrations have 3% of their numbers wrong
([slips.py](../experiments/studies/slips.py)) and, in *slips and guesses*, half guess.

{kl_table("slips and guesses", ("no KL", "loss, k2, 0.1", "loss, k3, 0.1", "loss, ratio*k3, 0.1", "reward, k1, 0.1", "reward, k3, 1.0"))}

With betas of 0.3 and 1.0 pass@1 with k3 ends {lost("kl", K3.replace("0.1", "0.3"), K1_REWARD.replace("0.1", "0.3"), "pass@1")} and {lost("kl", K3.replace("0.1", "1.0"), K1_REWARD.replace("0.1", "1.0"), "pass@1")} points lower, at temperature 0.5 lower too. At equal KL, interpolated
between the betas of k1 in the reward, pass@1 differs with 0.3 by {frontier("slips and guesses", "loss, k3, 0.3")} for k3 and {frontier("slips and guesses", "loss, k2, 0.3")} for
k2; on mines with 0.1 by {frontier("mines", "loss, k3, 0.1")} for k3. Straight lines lie below a concave curve, which flatters the other forms.{holds(*(max(apart("kl", K3.replace("0.1", beta), K1_REWARD.replace("0.1", beta), of)) < 0 for beta in ("0.3", "1.0") for of in ("pass@1", "pass@1 at 0.5")))}

On a model small enough to enumerate, k1 in the reward has the exact gradient of the KL; at half a nat, k2 and ratio\*k3 in
the loss are off by {f"{100 * error('loss, k2'):.0f}%"}, k3 by {f"{100 * error('loss, k3'):.0f}%"} ([bias.py](../experiments/studies/bias.py)). While the ratio is 1, the mean
gradient of k3 at a token is that of KL(reference, policy), which penalises dropping what the reference does; that
of k1 in the loss is 0, yet with a beta of 1.0 greedy accuracy differs by
{each("kl", "slips and guesses: loss, k1, 1.0")} points from no KL.{holds(error("loss, k2") == error("loss, ratio*k3"))}
arXiv 2510.01555 derives that k1 in the reward and k2 in the loss have the same gradient at a token; in arXiv 2512.21852
unbiased gradients train larger models better.

Without guesses, pass@1 with k3 minus k1, betas 0.1 and 0.3, is
{effect("kl", "slips: loss, k3, 0.1", "slips: reward, k1, 0.1", "pass@1")} and {effect("kl", "slips: loss, k3, 0.3", "slips: reward, k1, 0.3", "pass@1")} points on slips,
{effect("kl", "mines: loss, k3, 0.1", "mines: reward, k1, 0.1", "pass@1")} and {effect("kl", "mines: loss, k3, 0.3", "mines: reward, k1, 0.3", "pass@1")} on mines.

*Where it may fail*: larger models; many updates per rollout. *For a 7B run*: compare forms of the KL at equal KL, and at
the temperature of use.

{everything("kl")}

{bias_table()}

## What an earlier version said

On arithmetic, where critics and reward models learned little, an earlier version found PPO below GRPO, pass@1 highest
without a baseline, rollouts as good as true labels, and learned outcomes farmed sooner than lines. Here critics with lambda 1
could not be shown to end below the group, no baseline differs by {effect("critic", NONE, of="pass@1")} in pass@1, one rollout by {effect("labels", ONE_ROLLOUT)} from
true labels, and outcomes last with a tuned beta.
{holds(unclear("critic", OWN_1), down("critic", NONE, of="pass@1"), down("labels", ONE_ROLLOUT), near("labels", OUTCOMES_4000))}
"""
