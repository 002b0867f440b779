import json
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
from run import pretrained  # noqa: E402

# `python -m pytest -m quick`: the inner loop of a change, half a minute.
QUICK = "sampling sharing model loss credit oracle reward machine glue start layout fork".split()


def pytest_configure(config):
    config.addinivalue_line("markers", "quick: the tests of the algorithm and the model, half a minute")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem.removeprefix("test_") in QUICK:
            item.add_marker("quick")


TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=64)


def tiny_model(seed=0, scale=4.0, **changes):
    """A random GPT whose distributions are far from uniform (a fresh one's are close to it)."""
    model = GPT(GPTConfig(**{**TINY, **changes}), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(scale)
    return model


CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")


def chat_folder(where, template=CHAT):
    """A small model whose tokenizer, bytes, knows the tokens of a chat, and its chat template."""
    files = {name: json.loads(text) for name, text in byte_encoding().files.items()}
    end = files["tokenizer.json"]["added_tokens"][0]
    files["tokenizer.json"]["added_tokens"] += [
        end | dict(id=257 + i, content=name) for i, name in enumerate(("<|im_start|>", "<|im_end|>"))]
    files["tokenizer_config.json"]["chat_template"] = template
    shape = GPTConfig(259, 1, 2, 1, 16, n_inner=64, block_size=128)
    pretrained.save(GPT(shape, torch.Generator().manual_seed(0)), where,
                    {name: json.dumps(x).encode() for name, x in files.items()})
    return where


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
