"""The gradient of the KL to the reference in each of its forms, compared with the exact gradient.

    OMP_NUM_THREADS=1 python experiments/studies/bias.py [--readme]

A GPT with a vocabulary of 4 and completions of 4 tokens is small enough to sum over all 256
completions, so there is no sampling noise. The policy is at three distances from the reference, in
float64. In the loss, the estimates of a row's tokens are summed; in the reward, their sum is the
row's penalty and the gradient is REINFORCE's. The exact one is that of the KL of completions.
"""
import itertools
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import grpo  # noqa: E402
from experiments import results  # noqa: E402
from model import GPT, GPTConfig, token_logps  # noqa: E402

V, N = 4, 4                         # vocabulary, tokens per completion
DISTANCES = (0.1, 0.5, 2.0)         # KL per completion, in nats
ESTIMATORS = ("k1", "k2", "k3", "ratio*k3")
# all completions after one prompt token, and their mask, (256, 5)
IDS = torch.tensor([(0, *row) for row in itertools.product(range(V), repeat=N)])
MASK = torch.arange(1 + N).expand(len(IDS), -1) > 0


def tiny(seed):
    """A random model far from uniform, in float64."""
    shape = GPTConfig(V, 1, 2, 1, 16, n_inner=32, block_size=8)
    made = GPT(shape, torch.Generator().manual_seed(seed)).double()
    for p in made.parameters():
        if p.dim() == 2:
            p.data *= 3
    return made


@torch.no_grad()
def at_distance(ref, other, kl):
    """The model on the line between two whose KL to the first is `kl`, found by bisection."""
    target = token_logps(ref, IDS, MASK, 1.0)[0].sum(1)
    low, high, model = 0.0, 1.0, tiny(0)
    for _ in range(60):
        middle = (low + high) / 2
        for p, a, b in zip(model.parameters(), ref.parameters(), other.parameters()):
            p.copy_(torch.lerp(a, b, middle))
        logp = token_logps(model, IDS, MASK, 1.0)[0].sum(1)
        found = (logp.exp() * (logp - target)).sum().item()
        low, high = (middle, high) if found < kl else (low, middle)
    assert abs(found / kl - 1) < 1e-3, f"the other model is less than {kl} nats away"
    return model


def errors(kl, seed):
    """For each form the error of its gradient relative to the norm of the exact one, and their
    cosine; the cosine is 0 if the gradient is only rounding error."""
    ref = tiny(2 * seed)
    model = at_distance(ref, tiny(2 * seed + 1), kl)

    def gradient(loss):
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return torch.cat([g.flatten() for g in found])
    ref_logp = token_logps(ref, IDS, MASK, 1.0)[0].detach()
    logp = token_logps(model, IDS, MASK, 1.0)[0]
    old, row, ratio = logp.detach(), logp.sum(1), (logp - logp.detach()).exp()
    chance, known = row.detach().exp(), {}
    exact = gradient((row.exp() * (row - ref_logp.sum(1))).sum())
    for name in ESTIMATORS:
        found = grpo.kl_estimate(logp, ref_logp, name, ratio)
        known[f"loss, {name}"] = gradient((chance[:, None] * found).sum())
    for name in ESTIMATORS[:3]:
        found = grpo.kl_estimate(old, ref_logp, name).sum(1)
        known[f"reward, {name}"] = gradient((chance * found * row).sum())
    cosine = torch.cosine_similarity
    return {name: {"error": ((g - exact).norm() / exact.norm()).item(),
                   "cosine": cosine(g, exact, 0).item() if g.norm() > 1e-4 * exact.norm() else 0.0}
            for name, g in known.items()}


def main():
    args = results.parser(__doc__, "readme").parse_args()
    made = {kl: [errors(kl, seed) for seed in range(10)] for kl in DISTANCES}
    forms = {form: {kl: {part: torch.tensor([x[form][part] for x in made[kl]]).median().item()
                         for part in ("error", "cosine")} for kl in DISTANCES}
             for form in made[DISTANCES[0]][0]}
    print("error and cosine at", *(f"{kl} nats" for kl in DISTANCES))
    for form, of in forms.items():
        print(form, *(f"{x['error']:.2f}, {x['cosine']:.2f}" for x in of.values()), sep="\t")
    if args.readme:
        command = "python experiments/studies/bias.py --readme"
        results.write(HERE / "answers" / "bias.json",
                      {**results.about(), "command": command, "forms": forms})


if __name__ == "__main__":
    main()
