"""The gradient of the KL to the reference in each of its forms, compared with the exact gradient.

    OMP_NUM_THREADS=1 python experiments/studies/bias.py [--readme]

A GPT with a vocabulary of 4 and completions of 4 tokens is small enough to sum over all 256 completions, so there
is no sampling noise. The policy is placed at three distances from the reference, in float64 (logits in float32). In
the loss, the estimates of a row's tokens are summed; in the reward, their sum is the row's penalty and the gradient
is that of REINFORCE. The exact gradient is that of the KL of whole completions. All are on-policy: the ratio is 1.
"""
import itertools
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
import grpo  # noqa: E402
from experiments import results  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from model import token_logps as both  # noqa: E402

V, N = 4, 4                         # vocabulary, tokens per completion
DISTANCES = (0.1, 0.5, 2.0)         # KL per completion, in nats
ESTIMATORS = ("k1", "k2", "k3", "ratio*k3")


def completions():
    """All completions after one prompt token, and their mask: (256, 5) each."""
    ids = torch.tensor([(0, *row) for row in itertools.product(range(V), repeat=N)])
    return ids, torch.arange(1 + N).expand(len(ids), -1) > 0


def tiny(seed):
    """A random model far from uniform, in float64."""
    made = GPT(GPTConfig(V, 1, 2, 1, 16, n_inner=32, block_size=8), torch.Generator().manual_seed(seed)).double()
    for p in made.parameters():
        if p.dim() == 2:
            p.data *= 3
    return made


def token_logps(gpt, ids, mask, temperature):
    return both(gpt, ids, mask, temperature)[0]


def at_distance(ref, other, kl):
    """The model on the line between two whose KL to the first is `kl`, found by bisection."""
    ids, mask = completions()
    with torch.no_grad():
        target = token_logps(ref, ids, mask, 1.0).sum(1)
        low, high, model = 0.0, 1.0, tiny(0)
        for _ in range(60):
            middle = (low + high) / 2
            for p, a, b in zip(model.parameters(), ref.parameters(), other.parameters()):
                p.copy_(torch.lerp(a, b, middle))
            logp = token_logps(model, ids, mask, 1.0).sum(1)
            found = (logp.exp() * (logp - target)).sum().item()
            low, high = (middle, high) if found < kl else (low, middle)
    assert abs(found / kl - 1) < 1e-3, f"the other model is less than {kl} nats away"
    return model


def gradient(loss, model):
    """The gradient with respect to all parameters, as one vector."""
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([g.flatten() for g in found])


def errors(kl, seed):
    """For each form the error of its gradient relative to the norm of the exact one, and their cosine; the
    cosine is 0 if the gradient is only rounding error."""
    ref = tiny(2 * seed)
    model = at_distance(ref, tiny(2 * seed + 1), kl)
    ids, mask = completions()
    with torch.no_grad():
        ref_logp = token_logps(ref, ids, mask, 1.0)
    logp = token_logps(model, ids, mask, 1.0)
    old, row = logp.detach(), logp.sum(1)
    chance = row.detach().exp()
    exact = gradient((row.exp() * (row - ref_logp.sum(1))).sum(), model)
    forms = {f"loss, {name}": (chance[:, None] * grpo.kl_estimate(logp, ref_logp, name, (logp - old).exp())).sum()
             for name in ESTIMATORS}
    forms |= {f"reward, {name}": (chance * grpo.kl_estimate(old, ref_logp, name).sum(1) * row).sum()
              for name in ESTIMATORS[:3]}
    found = {name: gradient(loss, model) for name, loss in forms.items()}
    return {name: {"error": ((g - exact).norm() / exact.norm()).item(),
                   "cosine": torch.cosine_similarity(g, exact, dim=0).item() if g.norm() > 1e-4 * exact.norm() else 0.0}
            for name, g in found.items()}


def lines(result):
    """The lines of the table: relative error and cosine at each distance."""
    distances = list(next(iter(result["forms"].values())))
    yield "| " + " | ".join(["form", *(f"{float(kl):g} nats" for kl in distances)]) + " |"
    yield "|---" * (1 + len(distances)) + "|"
    for form, of in result["forms"].items():
        yield f"| {form} | " + " | ".join(f"{x['error']:.2f}, {x['cosine']:.2f}" for x in of.values()) + " |"


def main():
    parser = results.parser(__doc__, "readme")
    args = parser.parse_args()
    made = {kl: [errors(kl, seed) for seed in range(10)] for kl in DISTANCES}
    forms = {form: {kl: {part: torch.tensor([x[form][part] for x in made[kl]]).median().item()
                         for part in ("error", "cosine")} for kl in DISTANCES} for form in made[DISTANCES[0]][0]}
    result = {**results.about(), "command": "python experiments/studies/bias.py --readme", "forms": forms}
    print("\n".join(lines(result)))
    if args.readme:
        results.write(HERE / "answers" / "bias.json", result)


if __name__ == "__main__":
    main()
