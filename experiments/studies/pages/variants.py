"""docs/variants.md but for its formulas and presets. The names in braces are those of page.py, which writes the page."""
GRPO, DYNAMIC, OVERLONG, SOFT, DAPO, ENTROPY, PASS_AT_K, MAXRL, TOKENS, DR_GRPO = rows(
    "variants", ONCE, "GRPO", "dynamic_sampling", "overlong_filter", "soft_overlong", "dapo", "entropy_tokens", "pass_at_k", "maxrl",
    "tokens alike", "dr_grpo")
WITH_KL, TIS, MIS, LUSPO, CLIP_COV, KL_COV, HIGHER = rows(
    "variants", OFTEN, "GRPO, KL", "tis", "mis", "luspo", "clip_cov", "kl_cov", "clip higher")
GRPO_OFTEN = "variants", OFTEN, "GRPO"
COMPARED = sum(len(of) - 1 for of in studies.STUDIES["variants"].values())

at_fast = {name: middle(("variants_tuning", OFTEN, f"{name}, 3e-4")) for name in studies.STUDIES["variants"][OFTEN]}
lasting = {name for name, x in at_fast.items() if x > 0.5}
real = of_model("filters")
first, last = ([run["points"][i] for run in real["GRPO"].values()] for i in (0, -1))
at_end, at_equal, without_cut = (filters.apart(real, row, spent=spent) for row, spent in (
    ("dynamic_sampling", None), ("dynamic_sampling", "completions"), ("overlong_filter", None)))

PAGE = rf"""# Variants of GRPO

Each is a short file in `experiments/variants/`, used as `python grpo.py --algo cispo`; it holds only what differs
from GRPO. `tests/test_variants.py` recomputes each formula, a token at a time in float64, and compares value and gradient. How to write
and check one is in [changing.md](changing.md).

## What was found

**At equal samples nothing was shown to beat GRPO.** Of {COMPARED} rows one differs from it after correction: `dynamic_sampling`, and
it samples {ratio(DYNAMIC, GRPO, "tokens")} times as many tokens. **With many updates per rollout, a KL or a ratio of whole completions
withstands a higher learning rate.** At such a rate GRPO with PPO's clip alone ends at {shown(at_fast["GRPO"], "greedy")}, in one run.

| what you see | proposed for it | measured here |
|---|---|---|
| most groups are all right or all wrong | `dynamic_sampling`, if steps are expensive and samples cheap | {gained(DYNAMIC)} points more after as many steps, in every seed; with GRPO's tokens {reached(DYNAMIC, GRPO, "tokens")}, GRPO {reached(GRPO, GRPO, "tokens")} |
| training breaks with many updates per rollout | `--kl loss`, or `gspo` | at a learning rate where GRPO ends at {shown(at_fast["GRPO"], "greedy")}: {shown(at_fast["GRPO, KL"], "greedy")} and {shown(at_fast["gspo"], "greedy")}, in one run each; the KL, tuned: {gained(WITH_KL)} points more, in every seed |
| sampler and trainer disagree (`mismatch`) | `mis` rather than `tis` | `mis`: no difference, within {within(MIS)}; `tis` lost {lost(TIS)}, in every seed |
| several answers will be sampled, and one must be right | `pass_at_k`, `maxrl` | pass@8 {gained(PASS_AT_K, of="pass@8")} and {gained(MAXRL, of="pass@8")} points higher, in every seed; pass@1 {effect(PASS_AT_K, of="pass@1")} and {effect(MAXRL, of="pass@1")} |
| completions are cut off | `overlong_filter`, `soft_overlong` | unclear, within {wide(OVERLONG, SOFT)} |
| completions grow | `--loss_mean token`, `dr_grpo`; not `luspo` | no shorter: {median(TOKENS, "length")} and {median(DR_GRPO, "length")} tokens, GRPO {median(GRPO, "length")}; with many updates `luspo` {median(LUSPO, "length")}, GRPO {median(GRPO_OFTEN, "length")} |
| the entropy collapses | `clip_cov`, `kl_cov`, `entropy_tokens`, `--clip_high 0.28` | entropy {median(CLIP_COV, "entropy")}, {median(KL_COV, "entropy")}, {median(ENTROPY, "entropy")} and {median(HIGHER, "entropy")}, GRPO {median(GRPO_OFTEN, "entropy")}; in accuracy unclear, within {wide(CLIP_COV, KL_COV, ENTROPY, HIGHER)} |
| several of these | `dapo` | {effect(DAPO)} points, pass@1 {effect(DAPO, of="pass@1")}, with {ratio(DAPO, GRPO, "tokens")} times as many tokens |
{holds(min(middle(row, "length") for row in (TOKENS, DR_GRPO)) >= middle(GRPO, "length"), {*shown_to_differ("variants")} == {(ONCE, "dynamic_sampling")}, at_fast["GRPO"] < 0.005, lasting <= {"GRPO, KL", "unbiased KL", "two_sided", "gspo", "gspo_token", "luspo"})}

{by_hand("variants", "The formulas")}

## Measured

![each variant's difference to GRPO in greedy accuracy, with its interval, in two regimes](../experiments/studies/answers/variants.png)

The task is [a walk among hidden mines](questions.md#the-setting), the measure greedy accuracy after as many trained completions.
A variant is measured where it acts; `vineppo`, `raft`, `stale`, `tree`, `replay` and `hints` were not measured. *One update per rollout* leaves the ratio at 1. *16 updates per rollout*, with a sampler in
bfloat16, let clips, masks and importance weights act. The learning rate of each row is the best of three on a development map, by
one run each. With {seeds("variants")} seeds, four of five such studies find a difference of {detectable("variants")} points, so smaller
ones may exist. [All rows](../experiments/studies/answers/variants.md) have a page with intervals and flags.

**On SmolLM2-135M, too, dynamic sampling gains nothing per completion.** GRPO goes from {statistics.median(p["pass@1"] for p in first):.0%}
to {statistics.median(p["pass@1"] for p in last):.0%} pass@1 on sums. After as many completions `dynamic_sampling` is below it; after as many steps it is unclear, within {bound(at_end)}. The overlong filter makes no difference, within {bound(without_cut)}, since completions are cut off in the first steps only.
{holds(runs.interval(at_equal)[1] < 0)}

{chr(10).join(filters.lines(real))}

{by_hand("variants", "The presets, and where they come from")}
"""
