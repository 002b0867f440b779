import os
import sys
from pathlib import Path

# In this process and those that tests start: models this small gain nothing from a second thread,
# and on a busy machine processes with two threads wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from data.tokenizer import byte_encoding  # noqa: E402
from grpo import Config  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=64)


def tiny_model(seed=0, scale=4.0, **changes):
    """A random GPT whose distributions are far from uniform (a fresh one's are close to it)."""
    model = GPT(GPTConfig(**{**TINY, **changes}), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(scale)
    return model


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def encoding():
    return byte_encoding()


@pytest.fixture
def cfg():
    return Config(prompts=2, group=4, max_new=8, micro_tokens=64, lr=1e-3)


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws at random does not depend on the tests before it."""
    torch.manual_seed(0)
