import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

# Here and in what tests start: models this small gain nothing from two threads.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
# Nor do they see a GPU: with --gpu, test_gpu.py runs on it alone.
if "--gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest  # noqa: E402
import torch  # noqa: E402

torch.backends.mps.is_available = functools.cache(lambda: False)     # as torch unwraps it
torch.set_num_threads(THREADS)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from data.tokenizer import byte_encoding  # noqa: E402
import grpo  # noqa: E402
import noise  # noqa: E402
from grpo import Config  # noqa: E402
from model import GPT, GPTConfig, token_logps  # noqa: E402
from run import config, files, passes, pretrained  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--extra", action="store_true", help="also tests/extra: a pretended GPU, "
                     "compilation, a browser, other libraries")
    parser.addoption("--upstream", action="store_true",
                     help="also tests/upstream: what this repository says about itself")
    parser.addoption("--gpu", action="store_true",
                     help="the tests that need a GPU, tests/extra/test_gpu.py, and no others")
    parser.addoption("--noise", type=int, metavar="SEED",
                     help="matrix products are off by a last bit, as on another machine")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes a quarter of a second or more")
    config.addinivalue_line("markers", "quick: all that are not slow; a minute")
    config.addinivalue_line("markers", "without_noise: sees what --noise itself does")
    if [Path(argument).resolve() for argument in config.args] == [ROOT]:
        config.args[:] = [str(ROOT / "tests")]          # not those of another clone within this one
    if config.option.noise is not None:
        noise.install(config.option.noise)
        Forked.noise = config.option.noise
    ignored = "ignore:.*torch.jit.script_method:DeprecationWarning"     # of torch._dynamo
    config.addinivalue_line("filterwarnings", ignored)


def pytest_ignore_collect(collection_path, config):
    """The folders extra/ and upstream/ are for flags or arguments that name them."""
    name = collection_path.name
    if collection_path.parent != ROOT / "tests" or name not in ("extra", "upstream"):
        return None
    paths = [Path(file_of(argument)).resolve() for argument in config.args]
    named = any(collection_path in (path, *path.parents) for path in paths)
    if named or config.getoption(name) or config.option.gpu and name == "extra":
        return None
    return True


def file_of(argument):
    """The path in an argument such as tests/test_loss.py::test_a_sum."""
    return argument.partition("::")[0]


def pytest_collection_modifyitems(config, items):
    if config.option.gpu:
        items[:] = [item for item in items if item.path.name == "test_gpu.py"]
    if config.option.noise is not None:
        items[:] = [item for item in items if item.get_closest_marker("without_noise") is None]
    for item in items:
        if item.get_closest_marker("slow") is None and item.path.parent == ROOT / "tests":
            item.add_marker("quick")


# -------- processes of the tests

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch._dynamo", "grpo"])


class Forked:
    """A process that runs `work(*given)`, with stdout and stderr in files of the folder `where`,
    forked from one that has run no test."""
    noise = None        # the seed of --noise

    def __init__(self, where, work, *given):
        where.mkdir(parents=True, exist_ok=True)
        self.where = where
        self.process = FORKSERVER.Process(target=begin, args=(Forked.noise, where, work, given),
                                          daemon=True)
        self.process.start()

    def join(self):
        """Waits for its end; its exit code, negative after a signal, or None if it still runs."""
        self.process.join(300)
        return self.process.exitcode

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)

    def end(self):
        """Waits for its end, which must come; its exit code, stdout and stderr."""
        code = self.join()
        if code is None:
            self.kill()
        said = [(self.where / name).read_text() for name in ("stdout", "stderr")]
        assert code is not None, said
        return code, *said


def begin(seed, where, work, given):
    """In the new process."""
    multiprocessing.current_process()._config["daemon"] = False     # it may have children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(where / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        setattr(sys, name, open(number, "w", closefd=False))
    if seed is not None:
        noise.install(seed)
    work(*given)


# -------- what tests share

class Killed(BaseException):
    """As if by SIGKILL: nothing is saved."""


TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=64)


def tiny_model(seed=0, scale=4.0, **changes):
    """A random GPT whose distributions are far from uniform (a fresh one's are close to it)."""
    model = GPT(GPTConfig(**{**TINY, **changes}), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)):
                m.weight.mul_(scale)
    return model.eval()


CHAT = ("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "<|im_start|>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")


def shared_logps(gpt, ids, mask, temperature, critic=None):
    """model.token_logps of rows that share prefixes."""
    return token_logps(gpt, ids, mask, temperature, critic, passes.SharedRows)


def chat_folder(where, template=CHAT):
    """A small model whose tokenizer, bytes, knows the tokens of a chat, and its chat template."""
    files = {name: json.loads(text) for name, text in byte_encoding().files.items()}
    end = files["tokenizer.json"]["added_tokens"][0]
    for i, name in enumerate(("<|im_start|>", "<|im_end|>")):
        files["tokenizer.json"]["added_tokens"].append(end | dict(id=257 + i, content=name))
    files["tokenizer_config.json"]["chat_template"] = template
    shape = GPTConfig(259, 1, 2, 1, 16, n_inner=64, block_size=128)
    pretrained.save(GPT(shape, torch.Generator().manual_seed(0)), where,
                    {name: json.dumps(x).encode() for name, x in files.items()})
    return where


# A task that a small model learns: completions of 1 to 5 letters.
LETTERS = """
from types import SimpleNamespace as Problem
DEFAULTS = {}
def problems(difficulty=2):
    words = [(c * (n % 3) + "abcdefgh"[n])[:3] + "=" for c in "abcdef" for n in range(8)]
    made = [Problem(prompt=word) for word in words]
    return made[3:], made[:3]
def demonstration(problem, rng):
    return "".join(rng.choices("abc", k=rng.randint(1, 5)))
def reward(problem, text):
    return {"correct": float(text.count("a") % 2 == len(problem.prompt) % 2),
            "style": 0.3 * len(set(text) & set(problem.prompt)) - 0.05 * len(text)}
def steps(problem, text):
    return [(i + 1, x in problem.prompt) for i, x in enumerate(text)
            if x in "ab" or i + 1 == len(text)]
def answer(text):
    return text[:1]
"""


@contextlib.contextmanager
def float64():
    """The tested side too computes in float64, where two ways to a number agree."""
    torch.optim.AdamW([torch.zeros(1)], 1.0)        # imports half of torch, which is not to see it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(grpo, "torch", SimpleNamespace(**vars(torch) | {"float32": torch.float64}))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.fixture
def double():
    with float64():
        yield


def large_epsilon(agent, new_optimizer=grpo.new_optimizer):
    """That of Adam, so that it does not divide a gradient that is all rounding by its own size."""
    opt = new_optimizer(agent)
    opt.param_groups[0]["eps"] = 1e-3
    return opt


@pytest.fixture(scope="module")
def large_epsilons():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "new_optimizer", large_epsilon)
        yield


def agent_of(cfg, task=None, **parts):
    """An Agent with what every run has: a policy and a tokenizer."""
    return grpo.Agent(cfg, task, **{"encoding": byte_encoding(), "policy": tiny_model(), **parts})


def batch_of(mask, **parts):
    """A whole Batch of rows that were sampled where the mask (B, T) says, 0 but for `parts`."""
    on, zero = torch.as_tensor(mask), torch.zeros(*mask.shape)
    rows = dict(finished=torch.ones(len(on), dtype=torch.bool), start=on.int().argmax(1))
    rows |= dict(problems=[SimpleNamespace(prompt="?")] * len(on), texts=[""] * len(on))
    made = dict(logp=zero, reward=zero, ends=passes.last_tokens(on), adv=zero)
    made |= dict(ids=on.long(), mask=on, components={"correct": zero[:, 0]})
    return grpo.Batch(**rows | made | parts)


def batch_of_rows(rows, **parts):
    """That of pairs of ids: what was read, and what was sampled."""
    start, n = torch.tensor([[len(a), len(b)] for a, b in rows]).T
    at = torch.arange((start + n).max())
    ids = torch.zeros(len(rows), len(at), dtype=torch.int64)
    for row, (a, b) in zip(ids, rows):
        row[:len(a) + len(b)] = torch.tensor([*a, *b])
    mask = (at >= start[:, None]) & (at < (start + n)[:, None])
    return batch_of(mask, **{"ids": ids, "start": start, **parts})


def rewrite(path, change):
    """Changes what is in a file of JSON, in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def records(path):
    """Those of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def same(a, b):
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file() and path.name != files.MARK}


TIMES = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}


def metrics(where):
    """The lines of a run's metrics.jsonl, less its times."""
    lines = records(where / "metrics.jsonl")
    return [{name: x for name, x in line.items() if name not in TIMES} for line in lines]


def flags(settings):
    """Settings as a command line."""
    found = []
    for name, x in settings.items():
        found += [f"--no-{name}" if x is False else f"--{name}"]
        found += [] if isinstance(x, bool) else [str(x)]
    return found


def fault(capsys, *args):
    """The line with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        grpo.main(list(map(str, args)))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


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
def own_functions():
    """After a run of an algorithm in a file, grpo.py has its own functions again; a test leaves no
    other ones there."""
    own = dict(vars(grpo))
    yield
    config.algorithm("grpo", grpo.ALGOS, grpo)
    assert all(getattr(grpo, name, None) is x for name, x in own.items())


@pytest.fixture(autouse=True)
def seeded():
    """A test does not depend on those before it; a compilation raises the recursion limit."""
    torch.manual_seed(0)
    sys.setrecursionlimit(1000)
