"""The section of docs/variants.md on what was measured. The names in braces are those of page.py, which writes it."""
PAGE = rf"""## Measured

**{verdict("variants")}** The task is [a walk among hidden mines](questions.md#the-setting), the
measure greedy accuracy after equal completions:

![each variant's difference to GRPO in greedy accuracy, with its interval, in two regimes](../experiments/studies/answers/variants.png)

A variant is measured where it acts. *One update per rollout*: 200 steps of 16 prompts with 16 completions, so that the ratio
is 1. *16 updates per rollout*: 100 such steps, each with 4 epochs of 4 minibatches and a sampler in bfloat16, so that clips,
masks and importance weights act; *no clip* is GRPO without its own. All rows train on the same number of completions, but
`dynamic_sampling` and `dapo` sample up to three times as many, and ReMax one more per prompt. The learning rate of each row is
the best of three on a development map ([variants_tuning.json](../experiments/studies/answers/variants_tuning.json)).
Differences are paired by seed; p-values are corrected over all rows (Holm). With {seeds("variants")} seeds and the median spread of differences, a test without
that correction finds a difference of {detectable("variants")} points in four of five such studies, so smaller ones may exist.

{everything("variants")}
"""
