"""What this code does on a GPU; without a part all three, in five minutes:

    python experiments/cost/gpu.py decode       # a graph beside the plain cache; a token's time
    python experiments/cost/gpu.py update       # updates of 256 rows of 512 tokens
    python experiments/cost/gpu.py tests        # the tests that need a GPU
    python experiments/cost/gpu.py decode update --device cpu --tiny        # a dry run

What is found is printed at once, behind the seconds since the start, and kept in --out. A `share`
is a lower bound on a time, divided by it: of a token the bytes of weights and cache at the rate of
a copy, of an update its products.
"""
import contextlib
import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import grpo  # noqa: E402
import model  # noqa: E402
from data.tokenizer import byte_encoding  # noqa: E402
from experiments import results  # noqa: E402
from experiments.cost import speed  # noqa: E402
from run import caches, dist, pretrained  # noqa: E402
from run.device import compile_all, device_of, prepare  # noqa: E402

BEGAN, FOUND = time.time(), {"about": results.about()}
# random models in the shapes of Qwen2.5-0.5B and SmolLM2-135M; updates: micro-batches, logits
LARGE = SimpleNamespace(
    shapes={"0.5B": model.GPTConfig(151936, 24, 14, 2, 896, 4864, 2048, bias="qkv"),
            "135M": model.GPTConfig(49152, 30, 9, 3, 576, 1536, 2048)},
    rows=(256, 64, 512), group=16, context=256, dtype="bfloat16",
    batch=dict(prompts=16, group=16, max_new=512),
    updates=((16384, None), (4096, None), (16384, 2 ** 26), (32768, None)))
TINY = SimpleNamespace(
    shapes={"0.5B": model.GPTConfig(300, 2, 4, 2, 32, 64, 512)}, rows=(8, 4),
    group=2, context=70, dtype="float32", batch=dict(prompts=2, group=2, max_new=24),
    updates=((256, None), (256, 2 ** 10)))


@contextlib.contextmanager
def measuring(args, name):
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = FOUND[name] = {}
    try:
        yield found
    except Exception as e:      # whatever it is, the next measurement may work
        found["error"] = f"{type(e).__name__}: {e}"[:300]
    found["peak GB"] = results.peak() / 1e9
    print(f"{time.time() - BEGAN:6.1f}  {name}: {found}", flush=True)
    results.write(args.out, FOUND)


def random_model(args, shape, dtype, **more):
    cfg = grpo.make_config(task="experiments/models/sums_task.py", dtype=dtype, device=args.device,
                           compile=args.compile, **more)
    with device_of(cfg):
        return pretrained.to_device(model.GPT(shape), cfg), cfg


def sampled(policy, lengths, group, new, stop=(-1,)):
    rng = torch.Generator().manual_seed(new)
    prompts = [torch.randint(policy.cfg.vocab_size, (n,), generator=rng).tolist() for n in lengths]
    u = torch.rand(len(prompts) * group, new, generator=rng)
    return grpo.sample(policy, prompts, group, [new] * len(prompts), 1.0, set(stop), u)


def agree(args, at):
    """How far are log-probabilities apart, up to the first token that rounding decides?"""
    shape = dataclasses.replace(at.shapes["0.5B"], vocab_size=300)
    policy = pretrained.frozen(random_model(args, shape, "float32")[0])
    for new in (40, 60):
        for p in policy.parameters():
            p.copy_(p.flip(0))
        lengths, made = range(150, 150 - at.rows[0] // at.group, -1), []
        with measuring(args, f"graph and plain cache, {new} tokens") as found:
            for policy.kv_cache in ("static", "plain"):
                batch = sampled(policy, lengths, at.group, new, range(10))
                made.append((batch.ids, batch.mask, batch.logp))
            T = min(ids.size(1) for ids, *_ in made)
            (ids, mask, logp), (ids2, mask2, logp2) = ([x[:, :T] for x in of] for of in made)
            differ = (ids != ids2) | (mask != mask2)
            same = (differ.cumsum(1) == 0) & mask
            found |= {"rows": len(ids), "rows that differ": differ.any(1).sum().item(),
                      "max dlogp": (logp - logp2)[same].abs().max().item()}


def a_token(found, at, policy, rows, copied):
    """A token of each row: the difference of rollouts of two lengths."""
    def seconds(n):
        began = speed.now(policy.device)
        sampled(policy, [at.context] * (rows // at.group), at.group, n)
        return speed.now(policy.device) - began
    found["first call s"], _ = seconds(16), seconds(64)
    few, many = (min(seconds(n) for _ in range(3)) for n in (16, 64))
    c, token = policy.cfg, (many - few) / 48
    linear = sum(m.weight.numel() for m in policy.layers.modules() if hasattr(m, "in_features"))
    slots = rows * (at.context + 40) * 2 * c.n_layer * c.n_kv_head * c.head_size
    moved = (2 if policy.amp else 4) * (linear + c.vocab_size * c.n_embd + slots)
    found |= {"ms": 1e3 * token, "tokens/s": rows / token, "share": moved / copied / token}
    if policy.kv_cache == "static":
        *_, step = caches.MEMORY[policy].steps.values()
        h, u = step.h, torch.rand(len(step.h)).to(policy.device)
        p, graph = policy.probs(h), step.graph and step.graph.replay
        for name, f in (("graph", graph), ("head and softmax", lambda: policy.probs(h)),
                        ("drawing", lambda: caches.draw(p, u))):
            found[f"{name} us"] = f and 1e6 * speed.seconds(policy.device, f)


@torch.no_grad()
def decode(args, at):
    agree(args, at)
    for name, shape in at.shapes.items():
        policy, cfg = random_model(args, shape, at.dtype)
        policy = pretrained.frozen(policy)
        compile_all(cfg, policy)
        copied = speed.bandwidth(policy.device)
        for rows in at.rows:
            for way in ("static", "shared", "plain") if rows == at.rows[0] else ("static",):
                with measuring(args, f"{name}, {rows} rows, {way}") as found:
                    policy.kv_cache = way
                    a_token(found, at, policy, rows, copied)
                caches.MEMORY.pop(policy, None)


def update(args, at):
    policy, cfg = random_model(args, at.shapes["0.5B"], at.dtype, lr=0, kl="loss", **at.batch)
    agent = grpo.new_agent(cfg, data.load_task(cfg.task), byte_encoding(), policy)
    rows, T = cfg.prompts * cfg.group, 20 + cfg.max_new
    mask = (torch.arange(T) >= 20).expand(rows, T)
    made = dict(ids=torch.randint(policy.cfg.vocab_size, (rows, T)), start=torch.full((rows,), 20),
                mask=mask, logp=torch.zeros(rows, T), finished=torch.zeros(rows) > 0,
                adv=torch.where(mask, torch.randn(rows, 1), 0))
    batch = grpo.Batch(**{name: x.to(policy.device) for name, x in made.items()})
    batch.problems = [made] * len(batch.ids)
    batch.logp = batch.old_logp = batch.ref_logp = grpo.logps(agent.sampler, batch, cfg)[0]
    for tokens, logits in at.updates:
        agent.cfg = dataclasses.replace(cfg, micro_tokens=tokens)
        policy.most_logits = logits or pretrained.most_logits(policy.device)
        with measuring(args, f"micro_tokens {tokens}, {logits or 'default'} logits") as found:
            for name in ("first s", "s"):       # the first one warms up, or compiles
                began = speed.now(policy.device)
                grpo.update(agent, batch, dist.rng(cfg, "update"))
                found[name] = speed.now(policy.device) - began
            found["share"] = speed.floors(agent, batch)["least update"] / found["s"]


if __name__ == "__main__":
    parser = results.parser(__doc__, "tiny", "compile")
    parser.add_argument("parts", nargs="*", default=["decode", "update", "tests"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu.json")
    args = parser.parse_args()
    prepare()
    if args.tiny:
        speed.SIDE, speed.COPIED = 128, 2 ** 20
    for part in args.parts:
        if part == "tests":
            command = "-m pytest -q -p no:cacheprovider tests/extra/test_gpu.py --gpu".split()
            FOUND[part] = {"code": subprocess.call([sys.executable, *command], cwd=ROOT)}
        else:
            {"decode": decode, "update": update}[part](args, TINY if args.tiny else LARGE)
    sys.exit(any("error" in x or x.get("code") for x in FOUND.values()))
