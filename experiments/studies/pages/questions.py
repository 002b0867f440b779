"""docs/questions.md. The names in braces are those of page.py, which writes the page."""
SEEDS = {len(runs_of(row)) for study in ("critic", "labels", "kl") for part in studies.STUDIES[study] for row in rows(study, part)}
LABEL_ROWS = [[n, effect(line), median(line, "auc"), effect(outcome), median(outcome, "auc")] for n, line, outcome in zip(
    LABELLED, (LINES_1000, LINES_4000, LINES_16000, LINES_64000), (OUTCOMES_1000, OUTCOMES_4000, OUTCOMES_16000, OUTCOMES_64000))]
CRITICS = [("critic", part, name) for part, of in studies.STUDIES["critic"].items() for name, flags in of.items()
           if re.search("value|vine", flags)]
K1_PAIRS = [(of[beta], K1[beta]) for of in (K2, RATIO_K3) for beta in BETAS]

FEW_HOLD = (
    not shown_to_differ("critic") and not shown_to_differ("kl"),
    {part for part, _ in shown_to_differ("critic", "pass@1")} == {"sizes of groups"},
    {("the KL's beta", name) for *_, name in (NO_KL, BEST_NO_KL, OUTCOMES_NO_KL)} | {
        (part, "250") for part in studies.STUDIES["labels"] if "labelled" in part} == {*shown_to_differ("labels")},
    LINES_1000[1:] in shown_to_differ("labels", "pass@1"),
    ("slips and guesses", "loss, k3, 0.1") in shown_to_differ("kl", "pass@1"))

PAGE = rf"""# Open questions

Six questions, answered on toy tasks with half a million parameters and {min(SEEDS)} to {max(SEEDS)} seeds. Take the answers as
hypotheses for larger models. Accuracy is greedy, and runs are compared seed by seed. *No difference, within 5 points* means: the 95% interval of the mean difference contains zero and reaches at most 5 points from it;
*unclear*, that it reaches further. Corrected over a study, these hold: the collapse
without a KL, what few labels cost, and the pass@1 that groups of 64 and a KL cost.{holds(*FEW_HOLD)}

| you ask | do | how sure |
|---|---|---|
| [a critic?](#a-critic) | No: the group's mean. If you must, a separate one with lambda 1. | no critic was better; at best no difference, within {within(FITTED_1)}, at {ratio(FITTED_1, GROUP)} times the time |
| [how many completions per problem?](#how-many-completions-per-problem) | 4 to 16, and more problems instead. | groups of 64 lost {lost(SIXTY_FOUR)} points, in every seed; 2 and 4 against 16: unclear, within {wide(TWO, FOUR)} |
| [no baseline?](#no-baseline) | Keep one. Without one never -1 for wrong answers from a weak start. | without, {lost(NONE)} points lost, in every seed; with -1 from a weak start every seed ends at {zero(SIGNED_WEAK)} |
| [a learned reward?](#a-learned-reward) | Only with a KL, and watch the true reward on a sample. | without, {zero(NO_KL, BEST_NO_KL, OUTCOMES_NO_KL)} in every seed, even at an AUC of {median(BEST_NO_KL, "auc")} |
| [how many labels?](#how-many-labels) | At least 4,000 labelled completions. | with 1,000, {lost(OUTCOMES_1000)} to {lost(LINES_1000)} points below the task's own reward, in every seed |
| [which KL?](#which-kl) | Compare at equal KL. At equal beta k3 flattens the policy. | k3 lost {lost(K3["0.1"], K1["0.1"], "pass@1")} points of pass@1 at equal beta, in every seed; greedily no difference, within {within((K3["0.1"], K1["0.1"]))} |

*More* links to all rows and flags; [the derivation](derivation.md) defines the terms.

## A critic

![differences from the group](../experiments/studies/answers/critic.png)

**No critic beat the mean of a group.** A critic that was fitted before RL, with lambda 1, makes no difference, within
{within(FITTED_1)}, and the run takes {ratio(FITTED_1, GROUP)} times as long. Not fitted, it ends {lost(OWN, OWN_1)} points lower with
the usual lambda of 0.95 than with 1, in every seed. A critic that shares the policy's weights ends {lost(SHARED)} points below the group.
{holds(*(unclear(row) or statistics.mean(apart(row)) < 0 for row in CRITICS))}

{table((GROUP, OWN, OWN_1, FITTED, FITTED_1, SHARED),  "greedy", "explained_variance", "seconds")}

*Own* is a separate copy of the policy with a head, *fitted* one trained before RL, and *shared* a head on the policy. Lambda is 0.95 unless given.
[More](../experiments/studies/answers/critic.md): shorter and longer tasks, Monte Carlo values, cost.

## How many completions per problem

**Spend a step's samples on problems first.** Whether groups of 2 and 4 differ from groups of 16 is unclear, within {wide(TWO, FOUR)}. Groups of 64 leave only four problems and lose {lost(SIXTY_FOUR)} points, in every seed.

{table((SIXTEEN, TWO, FOUR, SIXTY_FOUR, FITTED_TWO), "greedy", "pass@1", "pass@8", "seconds")}

*2 of 128* is 2 completions of each of 128 problems, at the best of three learning rates. [More](../experiments/studies/answers/critic.md)

## No baseline

**Keep the baseline.** With rewards of 0 and 1, training without one costs {lost(NONE)} points, in every seed. With -1 for wrong answers
and a weak start, where most answers are wrong, training collapses: nearly every reward is -1, which only lowers probabilities. From that start 0 and 1 without a baseline are unclear, within {wide(NONE_WEAK)}.

{table((GROUP, NONE, SIGNED, WEAK, NONE_WEAK, SIGNED_WEAK), "greedy", "pass@8")}

Leave-one-out and the division by the group's std make no difference to the plain mean, within {within(GROUP_STD, LEAVE_ONE_OUT)}.
[More](../experiments/studies/answers/critic.md)

## A learned reward

![accuracy against AUC; rewards over the steps](../experiments/studies/answers/labels.png)

**A strong enough KL keeps the policy honest; a good reward model alone does not.** Without a KL every seed ends at
{zero(NO_KL, BEST_NO_KL, OUTCOMES_NO_KL)}, while the task's own reward needs none. A beta of 0.04 in place of 0.2 costs
{lost(SMALL_BETA)} points; with 16 times as many labels it costs less. A learned
reward is not divided by the group's std by default: of equally good completions, that std is the model's noise.

{table((BETA, SMALL_BETA, BEST_SMALL_BETA, NO_KL, BEST_NO_KL, RULE_NO_KL),  "greedy", "auc", "auc end", "kl")}

The reward scores each line, and the KL is k3 in the loss, with the beta that a row names. AUC is the share of pairs of good and bad lines that the model orders rightly. 
[More](../experiments/studies/answers/labels.md): outcomes, noisy labels, labels from continuations, refits.

## How many labels

**At least 4,000 completions.** With fewer, lines end {lost(LINES_1000)} points below the task's own reward, and outcomes
{lost(OUTCOMES_1000)}. More labels raise the AUC further, but the gain of 64,000 in accuracy is unclear, within {wide((LINES_64000, LINES_4000), (OUTCOMES_64000, OUTCOMES_4000))}. At these betas only 16,000 outcomes do better.
{holds(down(LINES_1000, LINES_4000), down(OUTCOMES_1000, OUTCOMES_4000), unclear(LINES_16000, LINES_4000), not unclear(OUTCOMES_16000, OUTCOMES_4000), *(middle(a, "auc") < middle(b, "auc") for a, b in ((LINES_1000, LINES_4000), (LINES_4000, LINES_64000), (OUTCOMES_1000, OUTCOMES_4000), (OUTCOMES_4000, OUTCOMES_64000))))}

{as_table(["labelled completions", "lines, minus the rule", "AUC", "outcomes, minus the rule", "AUC"], LABEL_ROWS)}

*The rule* is the task's own reward with the same KL, which restrains it more than learned outcomes. Each label is read once, so fewer labels also mean a shorter fit.
[More](../experiments/studies/answers/labels.md)

## Which KL

![pass@1 against the KL, without k1 in the loss](../experiments/studies/answers/kl.png)

**At equal beta, k3 in the loss leaves a less confident policy.** Where half of the demonstrations guess, a beta of 0.1 costs
{lost(K3["0.1"], K1["0.1"], "pass@1")} points of pass@1 against k1 in the reward. At half the temperature there is no
difference, within {within((K3["0.1"], K1["0.1"]), of="pass@1 at 0.5")}. k2 and `ratio*k3` in the loss make none to k1 in the
reward, within {within(*K1_PAIRS, of="pass@1")} of pass@1. As a reward, k2 and k3 lower pass@1 without holding the KL. At equal KL no form was better in both tasks: k3 against k1 is unclear here, and {ahead("loss, k3", "0.1", "mines")} points better on mines.
{holds(*(up(K3[beta], K1[beta], "entropy") and down(K3[beta], K1[beta], "pass@1") for beta in BETAS), *(unclear(*pair, of) for pair in K1_PAIRS for of in ("greedy", "pass@1 at 0.5")), *(middle(form(f"reward, {name}", "1.0"), "kl") > 0.9 * middle(NO_KL_SLIPS, "kl") and down(form(f"reward, {name}", "1.0"), of="pass@1") for name in ("k2", "k3")))}

{table((NO_KL_SLIPS, K2["0.1"], K3["0.1"], RATIO_K3["0.1"], K1["0.1"], form("reward, k3", "1.0")), "kl", "length", "greedy", "pass@1", of="pass@1", base=K1["0.1"])}

With x = reference / policy, the probabilities of a token, k1 is -log x, k2 is (log x)² / 2, and k3 is x - 1 - log x.
[More](../experiments/studies/answers/kl.md): at equal KL, other tasks, the error of each gradient.

## The setting

![walks before and after RL; crosses are mines](../experiments/studies/answers/grid.png)

**A walk among hidden mines.** The prompt gives start and goal on a grid, the completion a line for each move. It is right if it reaches the goal with legal moves, none onto a mine. The mines are the same in all problems and
in no prompt, so a line can be judged by itself ([mines.py](../experiments/studies/mines.py)). Forms of the KL are compared on
two-digit multiplication, with slips and guesses in the demonstrations ([slips.py](../experiments/studies/slips.py)).

A small GPT is warm-started on demonstrations that stray, then trained for 300 steps of 256 completions, one update each. Each seed
has its own map, warm start and held-out problems, shared by all rows. Unless a row says otherwise there is no KL, and no division by the group's std. Tables have medians over the seeds and mean
differences, which need not agree.

## Where it may fail

- A critic: intermediate rewards, or one completion per problem, which was not run.
- Group sizes: problems that are rarely solved.
- Labels and rewards: human labels, several passes over them, a reward model larger than the policy.
- The KL: larger models, many updates per rollout.

For a 7B run, start without a critic, with groups of 4 to 16. With a learned reward, watch the true one on a sample: the held-out
AUC does not tell what a weak KL will do.
"""
