"""docs/figures.md. The names in braces are those of page.py, which writes the page."""
OUTCOME, PROCESS, ONLINE, RFT = (f"figure 5: {name}" for name in ("GRPO, outcome", "GRPO, process", "Online RFT", "RFT"))
low_mines, high_mines = runs.interval(changes("mines", "pass@64"))
low_countdown, high_countdown = runs.interval([after - before for before, after in countdown()])

PAGE = rf"""# Figures of the paper

Figures 5, 6 and 7 of DeepSeekMath (arXiv 2402.03300) in miniature, the first two in [the setting](questions.md#the-setting) of the
studies: a walk on a grid with hidden mines, half a million parameters, {seeds("labels")} to {seeds("paper")} seeds. The command, the flags
and all rows are folded under each figure. [The ladder](derivation.md), from the raw reward to GRPO, is in the derivation.

## Figure 5

In the paper: GRPO with process supervision (a reward per line) > GRPO with outcome supervision > Online RFT > RFT.

![greedy accuracy over the steps, and the differences to GRPO](../experiments/studies/answers/figure5.png)

**RFT, which draws completions from the initial policy only, ends {effect("paper", RFT, of="pass@1")} points from GRPO in pass@1, which
holds after correction; it stays less confident. In greedy accuracy no difference does. There process supervision, first in the
paper, ends below outcome supervision in every seed, {effect("paper", PROCESS)}, as RFT does, {effect("paper", RFT)}; Online RFT
differs by {effect("paper", ONLINE)}.**
Online RFT is REINFORCE on correct completions alone, each weighted by 1/|o| as in the paper; neither has a KL. Rewards are the
task's own, in the paper a reward model's.
{holds({*shown_to_differ("paper", "pass@1")} == {("figure 5", "RFT")}, not shown_to_differ("paper"), down("paper", PROCESS), down("paper", RFT), *(run["entropy"] > 1.3 * runs_of("paper", OUTCOME)[seed]["entropy"] for seed, run in runs_of("paper", RFT).items()))}

{table("paper", ["figure 5: " + row for row in studies.STUDIES["paper"]["figure 5"]], "pass@1", "pass@8", "entropy", "seconds")}

{everything("paper", "figure 5")}

## Figure 6

In the paper each iteration with a refitted reward model ends higher, the first by most.

![greedy accuracy over the steps](../experiments/studies/answers/figure6.png)

**No difference to one fit holds after correction.** Two fits differ by {effect("labels", TWICE)} points in greedy accuracy and by
{effect("labels", TWICE, of="pass@1")} in pass@1, four by {effect("labels", FOUR_TIMES)} and {effect("labels", FOUR_TIMES, of="pass@1")}, four without old
labels by {effect("labels", NO_HISTORY)} and {effect("labels", NO_HISTORY, of="pass@1")}, four with the first reference kept by
{effect("labels", KEPT)} and {effect("labels", KEPT, of="pass@1")}. The paper adds labels in each iteration; here 4,000 labelled
completions are split between them.
{holds("4,000 completions, fitted" not in {part for of in ("greedy", "pass@1") for part, _ in shown_to_differ("labels", of)})}

{everything("labels", "4,000 completions, fitted")}

## Figure 7

In the paper RL raises maj@K but not pass@K: the model is more often right, but seems no more capable.

![pass@K and maj@K over K, before and after RL](../experiments/studies/answers/figure7.png)

**maj@64 rises in every seed of every task, as in the paper. pass@64 rises on sums; on mines, and pass@8 on countdown, no
change could be shown.** On mines, where demonstrators stray, at least one of 64 walks is correct for {share("mines", "before", "pass@64")} of the
problems before RL and for {share("mines", "after", "pass@64")} after it, by seed
{f"{min(changes('mines', 'pass@64')):+.0f} to {max(changes('mines', 'pass@64')):+.0f}".replace("-", "−")} points; at pass@8 all rise, from
{share("mines", "before", "pass@8")} to {share("mines", "after", "pass@8")}. SmolLM2's pass@64 on sums rises from {share("sums", "before", "pass@64")} to {share("sums", "after", "pass@64")}. On
countdown, after supervised training on full solutions, its pass@8 goes, by seed, {", ".join(f"{before:.0f} to {after:.0f}%" for before, after in countdown())}
([countdown.json](../experiments/models/countdown.json)). On arithmetic pass@64 is at its ceiling before RL.
{holds(min(changes("sums", "pass@64")) > 0, low_mines <= 0 <= high_mines, low_countdown <= 0 <= high_countdown, *(min(changes(task, "maj@64")) > 0 for task in kept("figure7")["rows"]), min(changes("mines", "pass@8")) > 0, max(changes("arithmetic", "pass@64")) == 0, min(run["before"]["pass@64"] for run in kept("figure7")["rows"]["arithmetic"].values()) == 1)}

{figure7_table()}
"""
