"""What it costs that replies are read token by token: `python experiments/cost/replies.py`, five minutes.

A row says 8 tokens, hears a reply of 5 or 200, and says 8 more. Beside it: a rollout that begins the second turn with
one pass over all that was said, and an update. Medians of 5, in turn.
"""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo
from data.tokenizer import byte_encoding
from run import passes, pretrained

PROMPTS, GROUP, SAID = [[49, 50, 42, 51, 52, 61]] * 16, 16, 8
END = 256


def policy():
    """The network of the default run, whose turns end where `u` says."""
    model = pretrained.new_model(grpo.make_config(max_new=300), byte_encoding(), 6)
    head = model.head

    def without_end(h):
        """Only u above the largest share draws END, which is the last token."""
        return head(h).index_fill(-1, torch.tensor([END]), -12.0)
    model.head = without_end
    return model.eval()


def numbers(n, seed=0):
    """Random numbers (B, n) that draw END as the token SAID of a turn."""
    u = torch.rand(len(PROMPTS) * GROUP, n, generator=torch.Generator().manual_seed(seed)) * 0.99
    u[:, SAID - 1] = 1.0
    return u


def token_by_token(model, size):
    """The whole episode in one rollout."""
    def reply(row, ids, left):
        """The reply, once."""
        return [60] * size if left > size else []
    room = [2 * SAID + size] * len(PROMPTS)
    return grpo.sample(model, PROMPTS, GROUP, room, 1.0, {END}, numbers(room[0]), reply)


def in_one_pass(model, size):
    """Two rollouts, the second from all that was said before it."""
    first = grpo.sample(model, PROMPTS, GROUP, [SAID] * len(PROMPTS), 1.0, {END}, numbers(SAID))
    prompts = [ids + [60] * size for ids in first.ids.tolist()]
    return grpo.sample(model, prompts, 1, [SAID] * len(prompts), 1.0, {END}, numbers(SAID, 1))


def update(model, batch):
    """A forward and a backward pass over the episodes."""
    for part in passes.micro_batches(batch, torch.arange(len(batch.ids)), 2048):
        logp, _ = passes.token_logps(model, part.ids, part.mask, 1.0)
        logp.sum().backward()


def seconds(work, *given):
    began = time.perf_counter()
    found = work(*given)
    return time.perf_counter() - began, found


def main():
    torch.set_num_threads(1)
    model = policy()
    for cache in ("shared", "static"):
        model.kv_cache = cache
        for size in (5, 200):
            times = {"token by token": [], "in one pass": [], "update": []}
            for _ in range(6):
                took, batch = seconds(token_by_token, model, size)
                times["token by token"].append(took)
                times["in one pass"].append(seconds(in_one_pass, model, size)[0])
                times["update"].append(seconds(update, model, batch)[0])
            assert batch.ids.size(1) == 6 + 2 * SAID + size
            slow, fast, learned = (statistics.median(x[1:]) for x in times.values())
            print(f"{cache}, reply of {size}: {slow:.2f} s and {fast:.2f} s of a rollout, {learned:.2f} s of an update; "
                  f"a step takes {(slow + learned) / (fast + learned):.2f} times as long")


if __name__ == "__main__":
    main()
