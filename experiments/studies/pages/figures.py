"""docs/figures.md. The names in braces are those of page.py, which writes the page."""
figure7 = kept("figure7")["rows"]
OUTCOME, PROCESS, OUTCOME_NO_KL, ONLINE, RFT = rows("paper", "figure 5")
countdown = [100 * (run["after"]["pass@8"] - run["before"]["pass@8"]) for run in of_model("countdown").values()]


def goes(task, of):
    """A share before and after RL, as cells."""
    return [of_figure7(task, when, of) for when in ("before", "after")]


PAGE = rf"""# Figures of the paper

Figures 5, 6 and 7 of DeepSeekMath (arXiv 2402.03300) in miniature, the first two in [the setting](questions.md#the-setting) of the
studies. As there, *within 5 points* bounds the 95% interval of the mean difference. [The ladder](derivation.md),
from the raw reward to GRPO, is in the derivation.

## Figure 5

In the paper: GRPO with process supervision > GRPO with outcome supervision > Online RFT > RFT.

![greedy accuracy over the steps, and the differences to GRPO](../experiments/studies/answers/figure5.png)

**RFT comes last, as in the paper; process supervision does not come first.** RFT draws its completions from the initial policy and
ends {lost(RFT, of="pass@1")} points of pass@1 below GRPO, the one difference that holds after correction. In greedy accuracy, process
supervision ends {lost(PROCESS)} points below outcome supervision, in every seed. Online RFT is REINFORCE on correct completions
alone; its difference to GRPO is unclear, within {wide(ONLINE)}.
{holds({*shown_to_differ("paper", "pass@1")} == {("figure 5", "RFT")}, not shown_to_differ("paper"))}

{table((OUTCOME, PROCESS, OUTCOME_NO_KL, ONLINE, RFT), "greedy", "pass@1", "pass@8", "entropy", "seconds")}

Rewards are the task's own, in the paper a reward model's. [More](../experiments/studies/answers/paper.md)

## Figure 6

In the paper each iteration with a refitted reward model ends higher, the first by most.

![greedy accuracy over the steps](../experiments/studies/answers/figure6.png)

**Two fits beat one; four are unclear.** Two fits end {gained(TWICE)} points above one, and {gained(TWICE, of="pass@1")} in pass@1, in every
seed; for four the difference is unclear, within {wide(FOUR_TIMES)}. Refits have three seeds. No difference holds after correction. The paper adds labels in each iteration; here the same labels are split
between them.
{holds("4,000 completions, fitted" not in {part for of in ("greedy", "pass@1") for part, _ in shown_to_differ("labels", of)})}

{table(rows("labels", "4,000 completions, fitted"), "greedy", "pass@1", "pass@8", "entropy")}

The reference is the policy of the last fit unless kept. [More](../experiments/studies/answers/labels.md)

## Figure 7

In the paper RL raises maj@K but not pass@K: the model is more often right, but seems no more capable.

![pass@K and maj@K over K, before and after RL](../experiments/studies/answers/figure7.png)

**maj@64 rises in every seed of every task, as in the paper; pass@64 rises where the policy began low.** On mines it is unclear, within {bound(changes("mines", "pass@64"))}; on arithmetic all problems were
solved before RL. On sums, with SmolLM2, it rises in every seed, by {statistics.mean(changes("sums", "pass@64")):.0f} points. On countdown,
after supervised training on full solutions, pass@8 fell in every seed, by {-statistics.mean(countdown):.0f} points.
{holds(max(countdown) < 0, min(changes("sums", "pass@64")) > 0, *(min(changes(task, "maj@64")) > 0 for task in figure7), min(changes("mines", "pass@8")) > 0, max(changes("arithmetic", "pass@64")) == 0, min(run["before"]["pass@64"] for run in figure7["arithmetic"].values()) == 1)}

{as_table(["", "pass@64 before", "after", "maj@64 before", "after"], [[task, *goes(task, "pass@64"), *goes(task, "maj@64")] for task in figure7])}

[All K](../experiments/studies/answers/figure7.md)
"""
