"""Ways to decode that were measured on a GPU and not taken; the results are in gpu.json, under `ways`:

    python experiments/cost/ways.py             # a minute and a half on an H100
    python experiments/cost/ways.py --small     # a dry run on the CPU

Milliseconds for a token of 256 rows in the shape of Qwen2.5-0.5B, as in probe.py: as it is, with the products of q, k, v
and of gate and up joined, with a RoPE of one kernel less, with the rows of a graph in branches that run at once, and
compiled. Then, in a graph, attention of such a token in five ways.
"""
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
import model  # noqa: E402
from experiments.cost import probe  # noqa: E402
from run import caches, dist  # noqa: E402


def joint(x, *layers):
    """The results of linear layers side by side, in one product where `join` has put their weights together."""
    whole = getattr(layers[0], "joined", None)
    return F.linear(x, *whole) if whole else torch.cat([layer(x) for layer in layers], -1)


def join(*layers):
    """Puts the weights and biases of linear layers together, for `joint`."""
    names = ["weight", "bias"] if layers[0].bias is not None else ["weight"]
    layers[0].joined = [torch.cat([getattr(layer, name).data for layer in layers]) for name in names]


def attention(self, x, rope, layout, cache):
    """`Attention.forward` with one product for q, k and v."""
    heads = joint(model.for_products(x), self.q_proj, self.k_proj, self.v_proj)
    turned, v = heads.unflatten(-1, (self.n_head + 2 * self.n_kv_head, -1)).split((self.n_head + self.n_kv_head, self.n_kv_head), 2)
    q, k = model.rotate(turned, *rope).split((self.n_head, self.n_kv_head), 2)
    return self.o_proj(layout.attend(q, k, v, cache).flatten(2))


def mlp(self, x):
    """`MLP.forward` with one product for gate and up."""
    gate, up = joint(model.for_products(x), self.gate_proj, self.up_proj).chunk(2, -1)
    return self.down_proj(F.silu(gate) * up)


def rotate(x, cos, sin):
    """`model.rotate` with addcmul."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).to(x.dtype)


def record(n, step, gpt):
    """`Step.record` with the rows in n branches, on n streams."""
    main, made, graph = torch.cuda.current_stream, [], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, step.pool, capture_error_mode="thread_local"):
        streams = [torch.cuda.Stream() for _ in range(n)]
        for i, stream in enumerate(streams):
            part = slice(i * len(step.ids) // n, (i + 1) * len(step.ids) // n)
            stream.wait_stream(main())
            with torch.cuda.stream(stream):
                cache = [[x[part] for x in kv] for kv in step.cache]
                made.append(gpt(step.ids[part], step.pos[part], cache, slots=step.slots))
        for stream in streams:
            main().wait_stream(stream)
        step.h = torch.cat(made)
    step.graph = graph


@contextmanager
def joined(policy):
    """A context in which a model has joined products."""
    for block in policy.layers:
        join(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        join(block.mlp.gate_proj, block.mlp.up_proj)
    with mock.patch.object(model.Attention, "forward", attention), mock.patch.object(model.MLP, "forward", mlp):
        yield


def token(name, at, policy):
    """Tell the milliseconds of a token."""
    with probe.measuring(name) as found, probe.sampling(policy, "graph"):
        probe.a_token(found, at, policy, "graph", at.rows[0], 1.0, float("nan"))
        found.pop("share"), found.pop("of library")


def of_attention(at, place):
    """Tell the microseconds of attention of a token, the mean over different caches."""
    c, dtype, rows = model.GPTConfig(**at.shapes["0.5B"]), getattr(torch, at.dtype), at.rows[0]
    K, heads, D = c.n_kv_head, c.n_head // c.n_kv_head, c.head_size
    q = torch.randn(rows, K, heads, D, device=place, dtype=dtype)
    for slots in (320, 640):
        layers = [torch.randn(2, rows, K, slots, D, device=place, dtype=dtype) for _ in range(8)]
        mask = torch.zeros(rows, 1, 1, slots, device=place, dtype=dtype)
        used = torch.full((rows,), slots - 3, device=place, dtype=torch.int32)

        def flash(k, v):
            return torch.ops.aten._flash_attention_forward(q.flatten(1, 2)[:, None], k.transpose(1, 2), v.transpose(1, 2), None, None,
                                                           1, slots, 0.0, False, False, scale=D ** -0.5, seqused_k=used)
        ways = {"masked, as in CachedRows.attend": partial(F.scaled_dot_product_attention, q, attn_mask=mask.expand(-1, -1, heads, -1)),
                "without a mask": partial(F.scaled_dot_product_attention, q),
                "two products and a softmax": lambda k, v: (q @ k.mT * D ** -0.5 + mask).softmax(-1) @ v}
        for name, f in (ways | ({"flash with seqused_k": flash} if probe.has_gpu() else {})).items():
            with probe.measuring(f"attention, {slots} slots, {name}") as found:
                found["us"] = probe.micros(place, lambda: [f(*kv) for kv in layers], len(layers))


@torch.no_grad()
def main():
    at, device = (probe.SMALL, "cpu") if "--small" in sys.argv else (probe.LARGE, "cuda")
    policy = probe.random_gpt(at.shapes["0.5B"], at.dtype, device)
    token("as it is", at, policy)
    with mock.patch.object(model, "rotate", rotate):
        token("RoPE by addcmul", at, policy)
        with joined(policy):
            token("joined products and addcmul", at, policy)
    with joined(policy):
        token("joined products", at, policy)
    for n in (2, 4):
        with mock.patch.object(caches.Step, "record", lambda step, gpt: record(n, step, gpt)):
            token(f"{n} branches", at, policy)
    if device == "cuda":
        dist.compile_all(grpo.make_config(task="sums", compile=True), policy)
        token("compiled", at, policy)
    of_attention(at, policy.device)


if __name__ == "__main__":
    main()
