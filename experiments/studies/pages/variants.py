"""The section of docs/variants.md on what was measured. The names in braces are those of page.py, which writes it."""
once, often = studies.REGIMES
GRPO_ONCE, DYNAMIC = f"{once}: GRPO", f"{once}: dynamic_sampling"
highest = at_rate(often, "3e-4")
collapsed = [name for name, x in highest.items() if x < 0.01]
lasting = {name: x for name, x in highest.items() if x > 0.5}


def lengths(name):
    """Of a row of both regimes, as text."""
    return " and ".join(median("variants", f"{part}: {name}", "length") for part in (once, often))


real = filtered()
rows = real["runs"]
first, last = ([run["points"][i] for run in rows["GRPO"].values()] for i in (0, -1))
more = statistics.median(run["points"][-1]["completions"] for run in rows["dynamic_sampling"].values()) / last[0]["completions"]
at_end, at_equal, without_cut = (filters.apart(rows, row, spent=spent) for row, spent in (
    ("dynamic_sampling", None), ("dynamic_sampling", "completions"), ("overlong_filter", None)))

PAGE = rf"""## Measured

**{verdict("variants")}** It samples {ratio("variants", DYNAMIC, GRPO_ONCE, "tokens")} times
GRPO's tokens: when it has sampled as many as GRPO in all it is at {reached("variants", DYNAMIC, GRPO_ONCE, "tokens")}, after as many seconds
at {reached("variants", DYNAMIC, GRPO_ONCE, "seconds")}; GRPO ends at {reached("variants", GRPO_ONCE, GRPO_ONCE, "tokens")} (medians). The task is
[a walk among hidden mines](questions.md#the-setting), the measure greedy accuracy after training on as many completions:
{holds({*shown_to_differ("variants")} == {(once, "dynamic_sampling")})}

![each variant's difference to GRPO in greedy accuracy, with its interval, in two regimes](../experiments/studies/answers/variants.png)

A variant is measured where it acts. *One update per rollout*: 200 steps of 16 prompts with 16 completions, so that the ratio
is 1. *16 updates per rollout*: 100 such steps, each with 4 epochs of 4 minibatches and a sampler in bfloat16, so that clips,
masks and importance weights act; *no clip* is GRPO without its own. All rows train on the same number of completions, but
`dynamic_sampling` and `dapo` sample up to three times as many, and ReMax one more per prompt. The learning rate of each row is
the best of three on a development map ([variants_tuning.json](../experiments/studies/answers/variants_tuning.json)), by one
run each, so the choice itself is noisy.
Differences are paired by seed; p-values are corrected over all rows (Holm). With {seeds("variants")} seeds and the median spread of differences, a test without
that correction finds a difference of {detectable("variants")} points in four of five such studies, so smaller ones may exist.
`gspo` and `gspo_token` have the same gradient as long as all tokens of a completion have one advantage, so the difference
between them, by seed {each("variants", f"{often}: gspo_token", f"{often}: gspo")} points, is what rounding alone can do.

**With many updates per rollout, in one seed on the development map, a KL or the ratio of a whole completion withstood a learning rate
at which PPO's clip alone did not:**

- *One update per rollout*: the rows end between {span(once, "3e-5")} at 3e-5,
  and between {span(once, "1e-4")} at 1e-4.
- *16 updates, 1e-4*: below half end {listed({name: x for name, x in at_rate(often, "1e-4").items() if x < 0.5})}.
- *16 updates, 3e-4*: {len(collapsed)} of {len(highest)} rows end at 0%, GRPO among them. Above half end
  {listed(lasting)}: all have a KL to the reference or the ratio of a
  whole completion; off_policy_mask, with a KL too, ends at {shown(highest["off_policy_mask"], "greedy")}.{holds("GRPO" in collapsed, {*lasting} <= {"GRPO, KL", "unbiased KL", "two_sided", "gspo", "gspo_token", "luspo"})}

**Lengths** in the last quarter of the steps, in tokens, with one update and with 16: {lengths("GRPO")} with a mean over each
completion, {lengths("luspo")} if it is not divided by its length (LUSPO); with one update {median("variants", f"{once}: tokens alike", "length")}
with `--loss_mean token` and {median("variants", f"{once}: dr_grpo", "length")} with a constant (Dr. GRPO).

**On SmolLM2-135M, too, dynamic sampling may gain per step, but not per completion.** {len(last)} seeds of 40 steps on sums, in
bfloat16: GRPO goes from {statistics.median(p["pass@1"] for p in first):.0%} to {statistics.median(p["pass@1"] for p in last):.0%} pass@1, and in its last ten steps {of_filters("GRPO", "dead_groups", slice(-10, None))} of the groups are all right
or all wrong. `dynamic_sampling` samples {more:.1f} times as many completions, and its difference to GRPO is {with_interval(at_end)} points; after
as many completions as GRPO it is {with_interval(at_equal)}. There its learning rate, which falls with the steps, is still
higher, which may be why. No difference could be shown for the overlong filter: only in the first steps are completions cut
off ({of_filters("GRPO", "finished", slice(1))} finish in the first step, {of_filters("GRPO", "finished", slice(4, None))} from the fifth on).{holds(runs.interval(at_equal)[1] < 0, runs.interval(without_cut)[0] < 0 < runs.interval(without_cut)[1])}

{chr(10).join(filters.lines(rows))}

Medians with the lowest and highest seed; differences in pass@1 are means with 95 % intervals; minutes are those of {len(rows["GRPO"])} runs of
each row at once, up to 12 at a time, on an {real["gpu"]}. `{real["command"]}`, {real["date"]}, torch {real["torch"]}.

{everything("variants")}
"""
