"""Peak memory of one update with the vocabulary of Qwen: all logits at once, and in parts.

    python experiments/memory.py        # 2 minutes; 16 GB of memory for the first way

8 rows of 1,024 tokens, a vocabulary of 152,000, 2 layers. With --readme the result replaces
memory.json, which the docs quote.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from model import GPT, GPTConfig, token_logps  # noqa: E402

SHAPE = GPTConfig(vocab_size=152_000, n_layer=2, n_embd=128, n_inner=352, block_size=1024)
ROWS, T = 8, 1024


def whole(model, ids, mask, temperature):
    """What `token_logps` gives, the obvious way."""
    logp = (model.head(model(ids[:, :-1])) / temperature).log_softmax(-1)           # (B, T - 1, V)
    return F.pad(logp.gather(-1, ids[:, 1:, None])[..., 0], (1, 0)), None


def peak():
    """The most memory that this process ever held, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def one(way, file):
    """One update's gradients, into a file; the memory it took."""
    model = GPT(SHAPE, torch.Generator().manual_seed(0))
    ids = torch.randint(0, SHAPE.vocab_size, (ROWS, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    before = peak()
    logp, _ = {"whole": whole, "parts": token_logps}[way](model, ids, mask, 0.7)
    logp.sum().backward()
    save_file({name: p.grad for name, p in model.named_parameters()}, file)
    print(peak() - before)


def main():
    with tempfile.TemporaryDirectory() as folder:
        files = {way: f"{folder}/{way}" for way in ("whole", "parts")}
        took = {way: int(subprocess.check_output([sys.executable, __file__, way, file], text=True))
                for way, file in files.items()}
        a, b = (load_file(file) for file in files.values())
    worst = max(((a[name] - b[name]).abs().max() / a[name].abs().max()).item() for name in a)
    result = {**took, "share": took["parts"] / took["whole"],
              "largest relative difference of the gradients": worst}
    if "--readme" in sys.argv:
        (HERE / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    print(result)


if __name__ == "__main__":
    one(*sys.argv[1:]) if len(sys.argv) == 3 else main()
