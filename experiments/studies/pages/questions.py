"""docs/questions.md. The names in braces are those of page.py, which writes the page."""
CRITICS = [f"{part}: {name}" for part, rows in studies.STUDIES["critic"].items() for name, flags in rows.items() if "value" in flags or "vine" in flags]
BETAS = ("0.1", "0.3", "1.0")
K1, K2, K3, RATIO_K3 = ({beta: f"slips and guesses: {form}, {beta}" for beta in BETAS} for form in ("reward, k1", "loss, k2", "loss, k3", "loss, ratio*k3"))
k3_seeds = len(at_equal_kl("slips and guesses", "loss, k3, 0.3"))

PAGE = rf"""# Open questions

Two studies on a task where critics and reward models can learn, and one of the KL. [page.py](../experiments/studies/page.py)
computes every measured number from [the results](../experiments/README.md). From toy tasks, half a million parameters and
{min(seeds(study) for study in ("critic", "labels", "kl"))} to {max(len(runs_of("critic", row)) for row in CRITICS)} seeds, these are hypotheses for larger models. [The derivation](derivation.md) defines the terms.

| question | answer | effect on greedy accuracy, points | evidence | where it may fail |
|---|---|---|---|---|
| [Is a critic worth it?](#is-a-critic-worth-it) | None was found to beat the mean of a group. One not fitted before RL ends lower with a GAE lambda of 0.95 than with 1. | fitted, lambda 1, 12 lines: {effect("critic", FITTED_1)}; not fitted, lambda 0.95 minus 1: {effect("critic", OWN, OWN_1)} | the last: {agree(apart("critic", OWN, OWN_1))}, post hoc | intermediate rewards; one completion per problem |
| [How large should groups be?](#is-a-critic-worth-it) | Groups of 64, with 4 problems per step, end lower in every seed; between 2, 4 and 16, at equal completions, no difference could be shown. | groups of 2: {effect("critic", TWO)}; of 64: {effect("critic", SIXTY_FOUR)}, against 16 | of 64: {sure("critic", SIXTY_FOUR)} | problems that are rarely solved |
| [Is a baseline needed?](#is-a-critic-worth-it) | With rewards of 0 and 1 every seed ends lower without one; from a weak start no difference could be shown. With -1 and 1, and few correct completions, training collapses. | 0 and 1: {effect("critic", NONE)}; -1 and 1, weak start: {effect("critic", SIGNED_WEAK)} | 0 and 1: {sure("critic", NONE)}; collapse: {p_text("critic", SIGNED_WEAK)} | other rewards |
| [How many labels?](#labels-and-reward-hacking) | 1,000 labelled completions, read once, are too few. 16,000 beat 4,000 for outcomes, 64,000 for lines if the KL is weak. | 16,000 minus 4,000 outcomes: {effect("labels", OUTCOMES_16000, OUTCOMES_4000)}; 64,000 minus 4,000 for lines: {effect("labels", LINES_64000, LINES_4000)}, with a beta of 0.04 {effect("labels", BEST_SMALL_BETA, SMALL_BETA)} | first and last: {agree(apart("labels", OUTCOMES_16000, OUTCOMES_4000))}, uncorrected | human labels; several passes over them |
| [What prevents reward hacking?](#labels-and-reward-hacking) | A strong enough KL limits it: without one, learned rewards end at 0% in every seed, even if the AUC was {median("labels", BEST_NO_KL, "auc")}. | beta 0.04 minus 0.2: {effect("labels", SMALL_BETA)}; none: {effect("labels", NO_KL)} | corrected p {p_text("labels", SMALL_BETA)}; none: {p_text("labels", NO_KL)} | larger reward models, refitted often |
| [Which form of the KL?](#the-form-of-the-kl) | At equal beta k3 in the loss leaves a less confident policy than k1 in the reward; k2 and ratio\*k3 in the loss could not be shown to differ from k1. | pass@1 with k3 minus k1, where the reference guesses, beta 0.1: {effect("kl", K3["0.1"], K1["0.1"], "pass@1")}, at temperature 0.5 {effect("kl", K3["0.1"], K1["0.1"], "pass@1 at 0.5")}; beta 0.3: {effect("kl", K3["0.3"], K1["0.3"], "pass@1")}, {effect("kl", K3["0.3"], K1["0.3"], "pass@1 at 0.5")} | temperature 1: {agree(apart("kl", K3["0.1"], K1["0.1"], "pass@1"))} for each beta | larger models; many updates per rollout |

## The setting

**A walk on a grid of {mines.SIZE} by {mines.SIZE} with {mines.MINES} hidden mines.** The prompt gives start and goal (`46>72:`), 4 to 8 moves apart; the
completion has up to 12 lines, each a move and the cell where it leads (`R56`). It is correct if every move
is legal, the goal is reached, and no line leads onto a mine. The map is the same in all problems, in no prompt,
and unknown to the demonstrators: 80% of their moves go towards the goal, the others anywhere
([mines.py](../experiments/studies/mines.py)):

![walks before and after RL; crosses are mines](../experiments/studies/answers/grid.png)

The policy is a GPT with 2 layers of 128, warm-started for 800 steps, then trained for 300 steps of 16 problems with 16
completions, one update per rollout, without a KL or division by the std unless given. Each seed has its own map, warm
start and held-out problems, shared by all rows. Accuracy is *greedy*: pass@1 at temperature 1 also rises
when a policy only becomes more confident. Tables have medians over the seeds; differences are means of pairs by seed, with 95%
intervals, and need not match the medians. P-values, not intervals, are corrected for a study's rows (Holm). All rows have three seeds; those of
the headlines got two more after the first results. With five and the median spread, 80% of studies find, uncorrected, a difference
of {detectable("critic")} points between critics, {detectable("labels")} between labels and, in pass@1, {detectable("kl", "pass@1")} between forms of the KL.

Learning rates, for {len(studies.FAMILIES)} groups of rows, and beta, for each kind of label, are the best of three on a
development map ([tuning.json](../experiments/studies/answers/tuning.json)). Before any study, on three such maps
([gates.py](../experiments/studies/gates.py)), a critic fitted on the frozen policy for 800 steps explains
{f"{gate('critic, 800 steps'):.2f}"} of the variance of outcomes at line ends (at best {f"{gate('true values, 800 steps'):.2f}"}), and a reward model's AUC on lines is
{f"{gate('AUC, 800 steps'):.3f}"}.{holds(all(best_rate(name) == ("3e-4" if "128" in name or "of 64" in name else "1e-4") for name in studies.FAMILIES), gate("critic, 800 steps") >= 0.8 * gate("true values, 800 steps"), gate("AUC, 800 steps") >= 0.95)}
A mine is known from its line alone; on arithmetic a line must be compared with others.

## Is a critic worth it

**With one reward at the end, no critic was found to beat the mean of a group in greedy accuracy. A critic fitted before RL,
with lambda 1, could not be shown to differ from it, not at 6, 12 or 24 lines nor from a weak start, {effect("critic", FITTED_1_WEAK)}, though
each mean is above the group's; with 12 lines it takes {times("critic", FITTED_1, GROUP)} times as long. One not
fitted ends lower with lambda 0.95 than with 1 in every seed.**
{holds(*(unclear("critic", row) or statistics.mean(apart("critic", row)) < 0 for row in CRITICS), *(unclear("critic", row) and 0 < statistics.mean(apart("critic", row)) <= statistics.mean(apart("critic", FITTED_1_WEAK)) for row in (FITTED_1_SHORT, FITTED_1, FITTED_1_LONG, FITTED_1_WEAK)), down("critic", OWN, OWN_1))}

![differences from the group](../experiments/studies/answers/critic.png)

{table("critic", (GROUP, OWN, OWN_1, FITTED, FITTED_1, PUBLISHED), "pass@8", "explained_variance", "seconds")}

*Own*: a separate copy of the policy with a head; *fitted*: own, trained for 400 steps before RL; *shared*: a head on the
policy; *whitened*: PPO's scaling of advantages over the batch. Lambda is 0.95 unless given; with a critic Adam's epsilon is
`1e-5`, not `1e-8`.

- **A better critic** was not shown to help. Near step 100 a fitted critic, lambda 1, explains
  {median("critic", FITTED_1_100, "explained_variance")} of the variance of returns; Monte Carlo values of lines, from 4 continuations (VinePPO, arXiv 2410.01679),
  explain {median("critic", VINE, "explained_variance")}, at {ratio("critic", VINE, GROUP_100, "tokens")} times the group's tokens. They end {effect("critic", FITTED_1_100)} and
  {effect("critic", VINE)} points from the group, the latter in pass@1 {effect("critic", VINE, of="pass@1")}.
- **Cost**: with the group's tokens ({reached("critic", GROUP, GROUP, "tokens")}) critics with lambda 1 reach {reached("critic", FITTED_1, GROUP, "tokens")} fitted
  and {reached("critic", OWN_1, GROUP, "tokens")} not; in the group's time {reached("critic", FITTED_1, GROUP, "seconds")} (the fit takes about as long) and {reached("critic", OWN_1, GROUP, "seconds")}. After as many steps, and a third more
  completions, the fitted critic's pass@1 is above the group's in every seed, by {effect("critic", FITTED_1, of="pass@1")}, corrected p {p_text("critic", FITTED_1, "pass@1")}.{holds(up("critic", FITTED_1, of="pass@1"), 0.75 < (middle("critic", FITTED_1, "seconds") - middle("critic", OWN_1, "seconds")) / middle("critic", GROUP, "seconds") < 1.25)}
- **Lambda**: with 24 lines at most, a walk has {f"{middle('critic', GROUP_LONG, 'length'):.0f}"} tokens, and lambda 0.95 leaves
  {f"{100 * 0.95 ** middle('critic', GROUP_LONG, 'length'):.0f}%"} of the reward to its first token. There the fitted critic's seeds
  differ from the group by {each("critic", FITTED_LONG)} points.
- **A shared critic** ends {beside("critic", SHARED)} the group, whitened {beside("critic", PUBLISHED)}. Lambda, the learning
  rate and the value coefficient (0.1, the others' 1) were not tuned for it.{holds(down("critic", PUBLISHED), down("critic", SHARED))}
- **Groups** of 2 and 4 use their best learning rate, 3e-4; 4 differs from 16 by {effect("critic", FOUR)} points, 64 in pass@1
  by {effect("critic", SIXTY_FOUR, of="pass@1")}. A fitted critic adds {effect("critic", FITTED_TWO, TWO)} to groups of 2.{holds(down("critic", SIXTY_FOUR), unclear("critic", TWO), unclear("critic", FOUR), unclear("critic", TWO, FOUR), unclear("critic", FITTED_TWO, TWO))}
- **Without a baseline** rewards of -1 and 1 differ from the group by {effect("critic", SIGNED)} points. From a weak start
  ({f"{100 * before('critic', GROUP_WEAK, 'greedy'):.0f}%"}) 0 and 1 differ by {effect("critic", NONE_WEAK)}; -1 and 1 end at {median("critic", SIGNED_WEAK)} in every seed: nearly every
  completion is only made less likely.{holds(down("critic", NONE), unclear("critic", NONE_WEAK), at_zero("critic", SIGNED_WEAK))}

*Where it may fail*: intermediate rewards; one completion per problem, which was not run. *For a
7B run*: try groups of 4 to 16 first, without a critic; if you need one, try lambda 1.

{everything("critic")}

## Labels and reward hacking

**1,000 labelled completions are too few: for lines they end {lost("labels", LINES_1000)} points below the rule, for outcomes {lost("labels", OUTCOMES_1000)}. With tuned betas
64,000 could not be shown to beat 4,000 in greedy accuracy; 16,000 outcomes did, by {effect("labels", OUTCOMES_16000, OUTCOMES_4000)}. More labels raise the AUC on the initial
policy to {median("labels", LINES_64000, "auc")}; on the trained policy's completions it also depends on beta: from 4,000 it is {median("labels", LARGE_BETA, "auc end")} for lines and
{median("labels", OUTCOMES_4000, "auc end")} for outcomes with 1.0, {median("labels", LINES_4000, "auc end")} and {median("labels", LOW_OUTCOMES, "auc end")} with 0.2.**
{holds(down("labels", LINES_1000, LINES_4000), down("labels", OUTCOMES_1000, OUTCOMES_4000), *(down("labels", row) for row in (LINES_1000, OUTCOMES_1000, LINES_4000, LINES_16000, LINES_64000)), unclear("labels", LINES_16000, LINES_4000), unclear("labels", LINES_64000, LINES_4000), unclear("labels", OUTCOMES_64000, OUTCOMES_4000), up("labels", OUTCOMES_16000, OUTCOMES_4000), middle("labels", LINES_1000, "auc") < middle("labels", LINES_4000, "auc") < middle("labels", LINES_64000, "auc"), middle("labels", LARGE_BETA, "auc end") > middle("labels", LINES_4000, "auc end") + 0.1, middle("labels", OUTCOMES_4000, "auc end") > middle("labels", LOW_OUTCOMES, "auc end") + 0.1)}

![accuracy against AUC; rewards over the steps](../experiments/studies/answers/labels.png)

{table("labels", (LINES_RULE, LINES_4000, LINES_64000, OUTCOMES_RULE, OUTCOMES_4000, OUTCOMES_64000), "pass@8", "auc", "auc end", "kl")}

*The rule* is the task's own reward; AUC is the share of pairs of good and bad lines, or completions, in the right order.
The KL is k3 in the loss, beta 0.2 for lines and 1.0 for outcomes. Each label is read once, so fewer
labels also mean a shorter fit.

- **KL and labels.** For lines, from 4,000 completions, a beta of 1.0 ends {effect("labels", LARGE_BETA)} points from 0.2, 0.04
  {effect("labels", SMALL_BETA)}; with 0.04, 64,000 end {effect("labels", BEST_SMALL_BETA, SMALL_BETA)} from 4,000. With 0.2 and 64,000 the learned
  reward changes by {change("labels", LINES_64000, "reward")} good lines, the rule's by {change("labels", LINES_64000, "rule_reward")}. Without a KL every seed ends at 0%,
  even from 64,000; the rule at {median("labels", RULE_NO_KL)}. Nearly every line is then scored as good (calibration error
  {median("labels", NO_KL, "calibration end")}, with 0.2 {median("labels", LINES_4000, "calibration end")}); in most seeds few lines remain, and the learned reward falls.
- **Outcomes** were stable only with a beta of 1.0; with 0.2 the seeds end at {each_end("labels", LOW_OUTCOMES)}. With
  1.0, 16,000 learned outcomes end {effect("labels", OUTCOMES_16000)} points from the rule, which that beta restrains more, but
  {with_interval(studies.differences(runs_of("labels", OUTCOMES_16000), runs_of("critic", GROUP), "greedy"))} from the rule without a KL.{holds(*(at_zero("labels", row) for row in (NO_KL, BEST_NO_KL, OUTCOMES_NO_KL)), down("labels", SMALL_BETA), up("labels", BEST_SMALL_BETA, SMALL_BETA), up("labels", OUTCOMES_16000), middle("labels", OUTCOMES_16000, "kl") > 1.5 * middle("labels", OUTCOMES_RULE, "kl"), min(run["greedy"] for run in runs_of("labels", OUTCOMES_4000).values()) > 0.5 > 0.2 > min(run["greedy"] for run in runs_of("labels", LOW_OUTCOMES).values()), *(sum(run["length"] < 20 and run["reward, means of 25 steps"][0] > run["reward, means of 25 steps"][-1] for run in runs_of("labels", row).values()) >= 4 for row in (NO_KL, BEST_NO_KL)))}
- **Continuations as labels**: with 1, 4 or 16 per line the differences from true labels are
  {effect("labels", ONE_ROLLOUT)}, {effect("labels", FOUR_ROLLOUTS)} and {effect("labels", SIXTEEN_ROLLOUTS)} points.
  Their AUC is {median("labels", SIXTEEN_ROLLOUTS, "auc")}, that of true labels {median("labels", LINES_4000, "auc")}: after a mine no continuation is correct,
  so every later line counts as bad.
- **Controls**: 30% wrong labels differ by {effect("labels", NOISE)} points. Random labels end at
  {median("labels", CHANCE)}, from {f"{100 * before('labels', CHANCE):.0f}%"} before RL. The rule's outcome plus
  a reward per legal move reaches {median("labels", FORM)}, {effect("labels", FORM, LINES_4000)} from true labels.
- **Refits**: no difference holds after correction ([figure 6](figures.md#figure-6)).

*Where it may fail*: human labels; a reward model larger than the policy. *For a 7B run*: watch the true reward on a
sample, since the held-out AUC does not tell what a weak KL will do.

{everything("labels")}

## The form of the KL

**At equal beta, k3 in the loss leaves a less confident policy than k1 in the reward: where the reference guesses, a beta of
0.1 costs {lost("kl", K3["0.1"], K1["0.1"], "pass@1")} points of pass@1 at temperature 1; at 0.5 only larger betas were shown to. k2 and ratio\*k3 in the loss, whose
gradients are the same here, could not be shown to differ from k1 in the reward at equal beta; k2 and
k3 in the reward lower pass@1 but not the KL.**
{holds(*(up("kl", K3[beta], K1[beta], "entropy") and down("kl", K3[beta], K1[beta], "pass@1") for beta in BETAS), *(up("kl", f"mines: loss, k3, {beta}", f"mines: reward, k1, {beta}", "entropy") for beta in ("0.1", "0.3")), *(unclear("kl", K3["0.1"], K1["0.1"], of) for of in ("greedy", "pass@1 at 0.5")), *(unclear("kl", form[beta], K1[beta], of) for form in (K2, RATIO_K3) for beta in BETAS for of in ("greedy", "pass@1", "pass@1 at 0.5")), *(middle("kl", f"slips and guesses: reward, {form}, 1.0", "kl") > 0.9 * middle("kl", "slips and guesses: no KL", "kl") and down("kl", f"slips and guesses: reward, {form}, 1.0", of="pass@1") for form in ("k2", "k3")))}

With x = reference / policy, the probabilities of a token, k1 is -log x, k2 is (log x)² / 2, and k3 is x - 1 - log x;
ratio\*k3 is k3 times policy / old policy. *In the reward*, beta times them is subtracted; *in the loss* it is added and
differentiated.

![pass@1 against the KL, without k1 in the loss](../experiments/studies/answers/kl.png)

The task is two-digit multiplication; demonstrations have 3% wrong numbers ([slips.py](../experiments/studies/slips.py)) and,
in *slips and guesses* (the table), half guess.

{kl_table("slips and guesses", ("no KL", "loss, k2, 0.1", "loss, k3, 0.1", "loss, ratio*k3, 0.1", "reward, k1, 0.1", "reward, k3, 1.0"))}

With betas of 0.3 and 1.0 pass@1 with k3 ends {lost("kl", K3["0.3"], K1["0.3"], "pass@1")} and {lost("kl", K3["1.0"], K1["1.0"], "pass@1")} points lower, here at temperature 0.5 too. At equal KL,
interpolated between k1's betas, pass@1 differs with 0.3 by {frontier("slips and guesses", "loss, k2, 0.3")} for k2 and {frontier("slips and guesses", "loss, k3, 0.3")} for k3 ({k3_seeds} seeds; in {len(runs_of("kl", K3["0.3"])) - k3_seeds} its
KL is beyond k1's), on mines with 0.1 by {frontier("mines", "loss, k3, 0.1")} for k3. Linear interpolation underestimates a concave curve, which
flatters the other forms.{holds(*(down("kl", K3[beta], K1[beta], of) for beta in ("0.3", "1.0") for of in ("pass@1", "pass@1 at 0.5")))}

On an enumerable model k1 in the reward has the exact gradient of a completion's KL; at half a nat, k2 and ratio\*k3 in the
loss, per token, are off by {f"{100 * error('loss, k2'):.0f}%"}, k3 by {f"{100 * error('loss, k3'):.0f}%"} ([bias.py](../experiments/studies/bias.py)). While the ratio is 1, the mean
gradient of k3 at a token is that of KL(reference, policy), which penalises dropping what the reference does; that
of k1 in the loss is 0, yet with a beta of 1.0 its seeds end
{each("kl", "slips and guesses: loss, k1, 1.0")} points from no KL.{holds(error("loss, k2") == error("loss, ratio*k3"), error("reward, k1") < 1e-6)}
arXiv 2510.01555 derives that k1 in the reward and k2 in the loss agree at a token; arXiv 2512.21852 finds unbiased
gradients better for larger models.

Without guesses, pass@1 with k3 minus k1, betas 0.1, 0.3 and 1.0, is {effect("kl", "slips: loss, k3, 0.1", "slips: reward, k1, 0.1", "pass@1")},
{effect("kl", "slips: loss, k3, 0.3", "slips: reward, k1, 0.3", "pass@1")} and {effect("kl", "slips: loss, k3, 1.0", "slips: reward, k1, 1.0", "pass@1")} points on slips, with 0.1 and 0.3
{effect("kl", "mines: loss, k3, 0.1", "mines: reward, k1, 0.1", "pass@1")} and {effect("kl", "mines: loss, k3, 0.3", "mines: reward, k1, 0.3", "pass@1")} on mines.

*Where it may fail*: larger models; many updates per rollout. *For a 7B run*: compare forms of the KL at equal KL, and at
the temperature of use.

{everything("kl")}

{bias_table()}

## What an earlier version said

On arithmetic, where critics and reward models learned little, an earlier version found PPO below GRPO, pass@1 highest
without a baseline, rollouts as good as true labels, and outcomes hacked before lines. Here critics with lambda 1
could not be shown to end below the group; without a baseline pass@1 differs by {effect("critic", NONE, of="pass@1")}, one continuation by
{effect("labels", ONE_ROLLOUT)} from true labels; with a beta of 0.2 outcomes still fail sooner, with 1.0 they last.
{holds(unclear("critic", OWN_1), unclear("critic", FITTED_1), down("critic", NONE, of="pass@1"), down("labels", ONE_ROLLOUT), unclear("labels", OUTCOMES_4000))}
"""
