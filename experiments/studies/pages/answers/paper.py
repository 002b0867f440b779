"""answers/paper.md. The names in braces are those of page.py, which writes the page."""
OUTCOME, *_, RFT = rows("paper", "figure 5")

PAGE = rf"""# Figure 5 of the paper, and the ladder

All rows behind [figure 5](../../../docs/figures.md#figure-5) and [the ladder](../../../docs/derivation.md). The task is
[a walk among hidden mines](../../../docs/questions.md#the-setting).

- **RFT** ends below GRPO with a corrected p {p_text(RFT, "pass@1")} in pass@1; it stays less confident in every seed. In greedy accuracy
  the p is {p_text(RFT)}.{holds(down(RFT), *(run["entropy"] > 1.3 * runs_of(OUTCOME)[seed]["entropy"] for seed, run in runs_of(RFT).items()))}
- **Online RFT** weights each completion by 1/|o| as in the paper; neither RFT has a KL.
- **The ladder** has four updates a rollout and, in steps 2 to 4, a separate critic, and with it a larger epsilon in Adam. Its table
  compares each rung with the one above. None of these differences holds after correction.{holds(not [part for part, _ in shown_to_differ("paper") if part == "the ladder"])}

{everything("paper")}
"""
