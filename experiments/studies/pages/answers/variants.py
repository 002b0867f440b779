"""answers/variants.md. The names in braces are those of page.py, which writes the page."""


def at_rate(part, rate):
    """{row: greedy accuracy} of a part with a learning rate, on the development map."""
    return {name: middle(("variants_tuning", part, f"{name}, {rate}")) for name in studies.STUDIES["variants"][part]}


def span(part, rate):
    """Their lowest and highest, as text."""
    known = at_rate(part, rate).values()
    return f"{shown(min(known), 'greedy')} and {shown(max(known), 'greedy')}"


def listed(found):
    """Rows with their greedy accuracy, the highest first, as text."""
    return ", ".join(f"{name} {shown(x, 'greedy')}" for name, x in sorted(found.items(), key=lambda row: -row[1]))


def lengths(name):
    """Of a row of both regimes, as text."""
    return " and ".join(median(("variants", part, name), "length") for part in (ONCE, OFTEN))


def of_filters(name, steps):
    """The median over GRPO's seeds of the mean of a curve over some steps, as text."""
    return f"{statistics.median(statistics.mean(run['curves'][name][steps]) for run in real['runs']['GRPO'].values()):.0%}"


GRPO, DYNAMIC = rows("variants", ONCE, "GRPO", "dynamic_sampling")
real = json.loads((filters.HERE / "filters.json").read_text())
fast = at_rate(OFTEN, "3e-4")
lasting = {name: x for name, x in fast.items() if x > 0.5}
more = statistics.median(run["points"][-1]["completions"] for run in real["runs"]["dynamic_sampling"].values()) / (
    real["runs"]["GRPO"]["1"]["points"][-1]["completions"])

PAGE = rf"""# Variants of GRPO

All rows behind [the page of variants](../../../docs/variants.md). The task is
[a walk among hidden mines](../../../docs/questions.md#the-setting).

- **The two regimes**: 200 steps of 16 prompts with 16 completions, one update each; and 100 such steps, each with 4 epochs of 4
  minibatches and a sampler in bfloat16. *No clip* is GRPO without its own. All rows train on as many completions, but
  `dynamic_sampling` and `dapo` sample up to three times as many, and ReMax one more per prompt.
- **Dynamic sampling** samples {ratio(DYNAMIC, GRPO, "tokens")} times GRPO's tokens. When it has sampled as many as GRPO in all it is at
  {reached(DYNAMIC, GRPO, "tokens")}, after as many seconds at {reached(DYNAMIC, GRPO, "seconds")}; GRPO ends at {reached(GRPO, GRPO, "tokens")}
  (medians).
- **What noise can do**: `gspo` and `gspo_token` have the same gradient as long as all tokens of a completion have one advantage. The
  difference between them, by seed {each(("variants", OFTEN, "gspo_token"), ("variants", OFTEN, "gspo"))} points, is rounding alone.
- **Power**: with {seeds("variants")} seeds and the median spread, 80% of studies find, uncorrected, a difference of
  {detectable("variants")} points.
- **One update, on the development map**: the rows end between {span(ONCE, "3e-5")} at 3e-5, and between {span(ONCE, "1e-4")} at 1e-4
  ([variants_tuning.json](variants_tuning.json)).
- **16 updates, 1e-4**: below half end {listed({name: x for name, x in at_rate(OFTEN, "1e-4").items() if x < 0.5})}.
- **16 updates, 3e-4**: {sum(x < 0.01 for x in fast.values())} of {len(fast)} rows end at 0%, GRPO among them. Above half end
  {listed(lasting)}: all have a KL to the reference or the ratio of a whole completion. off_policy_mask, with a KL too, ends at
  {shown(fast["off_policy_mask"], "greedy")}.{holds(fast["GRPO"] < 0.01, {*lasting} <= {"GRPO, KL", "unbiased KL", "two_sided", "gspo", "gspo_token", "luspo"})}
- **Lengths** in the last quarter of the steps, in tokens, with one update and with 16: {lengths("GRPO")} with a mean over each
  completion, {lengths("luspo")} if it is not divided by its length (LUSPO). With one update {median(("variants", ONCE, "tokens alike"), "length")}
  with `--loss_mean token` and {median(("variants", ONCE, "dr_grpo"), "length")} with a constant (Dr. GRPO).
- **On SmolLM2-135M**, in bfloat16: in GRPO's last ten steps {of_filters("dead_groups", slice(-10, None))} of the groups are all right or all
  wrong. `dynamic_sampling` samples {more:.1f} times as many completions. Where it has sampled as many as GRPO, its learning rate,
  which falls with the steps, is still higher, which may be why it is below. Completions are cut off in the first steps only:
  {of_filters("finished", slice(1))} finish in the first step, {of_filters("finished", slice(4, None))} from the fifth on. In the page's
  table minutes are those of {len(real["runs"]["GRPO"])} runs of each row at once, up to 12 at a time, on an {real["gpu"]}.
  `{real["command"]}`, {real["date"]}, torch {real["torch"]}.
- **Changed since**: `entropy_tokens` chose by the policy that sampled, and `dynamic_sampling` could draw a problem twice in a step.

{everything("variants")}
"""
