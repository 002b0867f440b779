"""GRPO on a whiteboard: read this first, and then the complete grpo.py.

DeepSeekMath (arXiv 2402.03300, section 4): sample a group of G completions for each of P prompts,
reward them, and make those likelier that beat the mean of their group. No critic is needed.
Here a small GPT, data/warm_start, which mostly guesses products, learns to show its work:

    python experiments/smallest.py      # about two minutes on two CPU cores

It prints a line for each step, and what share of answers to new problems is right: 47% before,
92% after. This is the main job of grpo.py with fewer steps: the same settings, random numbers and,
as tests/test_smallest.py checks, weights. Left out: other algorithms and rewards, prompts of
different lengths, the KV cache, GPUs, several processes, checkpoints and flags.
"""
import copy
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import arithmetic  # noqa: E402
from model import GPT, GPTConfig, token_logps  # noqa: E402

STEPS = 10          # data/arithmetic.py has 24, and the same sizes and rate
CLIP = 0.2          # how far a ratio may leave 1
BETA = 0.04         # KL coefficient
END = 256           # the token that ends a completion; the others are bytes

def load(folder):
    """The model in a folder: a Llama, in Hugging Face's layout."""
    hf = json.loads((folder / "config.json").read_text())
    policy = GPT(GPTConfig(
        vocab_size=hf["vocab_size"], n_layer=hf["num_hidden_layers"], n_embd=hf["hidden_size"],
        n_head=hf["num_attention_heads"], n_kv_head=hf["num_key_value_heads"],
        n_inner=hf["intermediate_size"], block_size=hf["max_position_embeddings"]))
    weights = load_file(folder / "model.safetensors")
    policy.load_state_dict({name.removeprefix("model."): x for name, x in weights.items()})
    return policy

@torch.no_grad()
def sample(policy, problems, N, rng):
    """A completion of at most N tokens for each of B problems: ids (B, T), a mask (B, T) of the
    sampled tokens, the end token included, and the tokens' log-probabilities (B, T)."""
    u = np.random.default_rng(rng.getrandbits(64)).random((len(problems), N))
    u = torch.tensor(u).float().clamp(2 ** -25, 1 - 2 ** -24)   # (B, N): never a token of p = 0
    prompts = torch.tensor([list(p.prompt.encode()) for p in problems])
    start = prompts.size(1)                     # the same in all rows
    ids = torch.nn.functional.pad(prompts, (0, N))                      # (B, T)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    logp = torch.zeros(ids.shape)
    rows = torch.arange(len(ids))               # the n rows that have not ended
    for t in range(start, start + N):
        # Without a cache each token costs a pass over whole rows; equal rows share it.
        distinct, index = ids[rows, :t].unique(dim=0, return_inverse=True)
        p = policy.probs(policy(distinct)[:, -1])[index]        # (n, V), next-token probabilities
        cdf = p.double().cumsum(1)
        share = u[rows, t - start, None] * cdf[:, -1:]                  # (n, 1)
        token = torch.searchsorted(cdf, share, right=True)      # the first with a larger cdf
        ids[rows, t] = token[:, 0]
        mask[rows, t] = True
        logp[rows, t] = p.gather(1, token)[:, 0].log()
        rows = rows[token[:, 0] != END]
        if len(rows) == 0:
            break
    return ids[:, :t + 1], mask[:, :t + 1], logp[:, :t + 1]

def judge(problems, ids, mask):
    """The reward of each row, and 1 if its answer is right: both (B,). Cut-off rows earn 0."""
    reward, correct = torch.zeros(2, len(ids), dtype=torch.float64)
    for i, problem in enumerate(problems):
        *said, last = ids[i, mask[i]].tolist()
        if last == END:
            parts = arithmetic.reward(problem, bytes(said).decode(errors="replace"))
            reward[i] = sum(parts.values())
            correct[i] = parts["correct"]
    return reward, correct

def losses(logp, old_logp, ref_logp, adv, mask):
    """The loss of each row, (b,): the mean over its tokens (eq. 3). adv (b, 1), others (b, T)."""
    ratio = (logp - old_logp).exp()             # pi / pi_old
    gain = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
    log_x = ref_logp - logp                     # x = pi_ref / pi
    kl = log_x.expm1() - log_x                  # x - 1 - log x: k3 (eq. 4)
    return ((BETA * kl - gain) * mask).sum(1) / mask.sum(1)

def train(policy, problems, steps=STEPS, P=32, G=16, N=64, lr=1e-4):
    """Trains the policy, in steps of G completions of at most N tokens for each of P problems."""
    ref = copy.deepcopy(policy)                 # the reference is frozen
    opt = torch.optim.AdamW(policy.parameters(), lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    for step in range(1, steps + 1):
        # 1. Completions of P problems, in B = P * G rows: row p * G + g.
        drawn = random.Random(f"1/problems/{step}").sample(problems, P)     # 1: the seed
        drawn = [problem for problem in drawn for _ in range(G)]
        ids, mask, old_logp = sample(policy, drawn, N, random.Random(f"1/rollout/{step}"))
        # 2. Rewards, and advantages: (r - mean) / std of the group (4.1.2), 0 if all are equal.
        reward, correct = judge(drawn, ids, mask)
        r = reward.view(P, G)
        std = r.std(1, correction=0, keepdim=True)                      # (P, 1)
        adv = torch.where(std > 1e-9, (r - r.mean(1, keepdim=True)) / std, 0)
        adv = adv.float().view(P * G, 1)
        # 3. The update: two minibatches, an optimizer step each; 32 rows a pass.
        order = random.Random(f"1/update/{step}").sample(range(P * G), P * G)
        for half in torch.tensor(order).tensor_split(2):
            for rows in half.split(32):
                logp, _ = token_logps(policy, ids[rows], mask[rows], 1.0)       # (b, T)
                with torch.no_grad():
                    ref_logp, _ = token_logps(ref, ids[rows], mask[rows], 1.0)
                loss = losses(logp, old_logp[rows], ref_logp, adv[rows], mask[rows])
                (loss.sum() / len(half)).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        print(f"step {step:2}  reward {reward.mean():.2f}  right {correct.mean():.0%}")

def accuracy(policy, problems):
    """The share of right answers, of one completion for each problem."""
    ids, mask, _ = sample(policy, problems, 64, random.Random("1/evaluate/0"))
    return judge(problems, ids, mask)[1].mean()

if __name__ == "__main__":
    policy = load(ROOT / "data" / "warm_start")
    problems, held_out = arithmetic.problems()
    print(f"right before: {accuracy(policy, held_out):.1%}")
    train(policy, problems)
    print(f"right after: {accuracy(policy, held_out):.1%}")
