"""answers/kl.md. The names in braces are those of page.py, which writes the page."""
import bias


def frontier(name, beta, part="slips and guesses"):
    """A form's mean difference in pass@1 to k1 in the reward, at its own KL, with its interval."""
    return with_interval(studies.at_equal_kl(kept("kl"), part, "pass@1")[f"{name}, {beta}"])


def error(name):
    """The relative error of the gradient of a form at half a nat."""
    return kept("bias")["forms"][name]["0.5"]["error"]


def k3_minus_k1(part, beta):
    """In pass@1, with its interval."""
    return effect(form("loss, k3", beta, part), form("reward, k1", beta, part), "pass@1")


K1_LOSS = form("loss, k1", "1.0")
K3_SEEDS = len(studies.at_equal_kl(kept("kl"), "slips and guesses", "pass@1")["loss, k3, 0.3"])

PAGE = rf"""# Forms of the KL

All rows behind the last of the [open questions](../../../docs/questions.md#which-kl). *Slips and guesses* is two-digit
multiplication whose demonstrations have 3% wrong numbers and half guess ([slips.py](../slips.py)); *slips* has no guesses
([careful.py](../careful.py)); *mines* is [the walk](../../../docs/questions.md#the-setting). *In the reward*, beta times the estimate
is subtracted; *in the loss* it is added and differentiated. `ratio*k3` is k3 times policy / old policy.

- **k3 in the loss minus k1 in the reward**, in pass@1, where the reference guesses: {effect(K3["0.1"], K1["0.1"], "pass@1")} points with a
  beta of 0.1, {effect(K3["0.3"], K1["0.3"], "pass@1")} with 0.3, {effect(K3["1.0"], K1["1.0"], "pass@1")} with 1.0. At temperature 0.5:
  {effect(K3["0.1"], K1["0.1"], "pass@1 at 0.5")}, {effect(K3["0.3"], K1["0.3"], "pass@1 at 0.5")} and
  {effect(K3["1.0"], K1["1.0"], "pass@1 at 0.5")}. The entropy is higher in every seed.{holds(*(up(K3[beta], K1[beta], "entropy") for beta in BETAS), *(down(K3[beta], K1[beta], of) for beta in ("0.3", "1.0") for of in ("pass@1", "pass@1 at 0.5")), unclear(K3["0.1"], K1["0.1"]))}
- **Without guesses** it is {k3_minus_k1("slips", "0.1")}, {k3_minus_k1("slips", "0.3")} and {k3_minus_k1("slips", "1.0")} on slips; with 0.1 and 0.3
  {k3_minus_k1("mines", "0.1")} and {k3_minus_k1("mines", "0.3")} on mines, where the entropy is higher too.{holds(*(up(form("loss, k3", beta, "mines"), form("reward, k1", beta, "mines"), "entropy") for beta in ("0.1", "0.3")))}
- **At equal KL**, interpolated between k1's betas, pass@1 differs with 0.3 by {frontier("loss, k2", "0.3")} for k2 and
  {frontier("loss, k3", "0.3")} for k3 ({K3_SEEDS} seeds; in {len(runs_of(K3["0.3"])) - K3_SEEDS} its KL is beyond k1's), on mines with 0.1 by
  {frontier("loss, k3", "0.1", "mines")} for k3. Linear interpolation underestimates a concave curve, which flatters the other forms.
- **Gradients**: on an enumerable model k1 in the reward has the exact gradient of a completion's KL. At half a nat, k2 and `ratio*k3`
  in the loss, per token, are off by {100 * error("loss, k2"):.0f}%, k3 by {100 * error("loss, k3"):.0f}% ([bias.py](../bias.py), the last
  table).{holds(abs(error("loss, k2") - error("loss, ratio*k3")) < 1e-7, error("reward, k1") < 1e-6)}
- **What they pull towards**: while the ratio is 1, the mean gradient of k3 at a token is that of KL(reference, policy), which penalises
  dropping what the reference does. That of k1 in the loss is 0; yet with a beta of 1.0 its seeds end {each(K1_LOSS)} points from no KL.
- **Elsewhere**: arXiv 2510.01555 derives that k1 in the reward and k2 in the loss agree at a token; arXiv 2512.21852 finds unbiased
  gradients better for larger models.
- **Power**: with five seeds and the median spread, 80% of studies find, uncorrected, a difference of {detectable("kl", "pass@1")} points of
  pass@1.

{everything("kl")}

## The error of each form's gradient

Relative error and cosine to the exact gradient, at each distance. `{kept("bias")["command"]}`, {kept("bias")["date"]}.

{chr(10).join(bias.lines(kept("bias")))}
"""
