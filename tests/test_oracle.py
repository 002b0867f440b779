"""Two whole training steps against tests/oracle.py, which was written from the papers: every
weight and every number of metrics.jsonl, in float64, for every algorithm and choice."""
import copy
import itertools
import json
import math
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from conftest import tiny_model
from oracle import Draws, FitOracle, Oracle, Row, logps

import grpo
import reward
from model import GPT
from run import checkpoint, config, dist, files, passes, report, setup

TEXTS = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"ba"]   # of a token; the last ends two steps
STOP = {len(TEXTS), len(TEXTS) + 1}                         # two tokens that end a completion
PROBLEMS = [SimpleNamespace(prompt=text) for text in ("acc", "g", "defgab", "cc", "eg")]
ENCODING = SimpleNamespace(stop=STOP, encode_prompt=lambda text: ["abcdefg".index(x) for x in text],
                           encode_demonstration=lambda text: ["abcdefg".index(x) for x in text],
                           token_bytes=lambda i: b"" if i in STOP else TEXTS[i], files={})
SMALL = dict(seed=7, prompts=2, group=3, max_new=6, epochs=2, minibatches=2, micro_tokens=24,
             lr=0.015, steps=2, dtype="float32", device="cpu", compile=False)
TIMES = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
ALGOS = ("grpo", "reinforce", "a2c", "ppo", "rloo", "dr_grpo", "dapo", "gspo")
BASELINES = ("none", "group", "leave-one-out", "value", "group+value")


# ------------------------------------------------------------------------------------- the task

def steps(problem, text):
    """A step ends at each a, b, c, and is true if the prompt has that letter; so does the text."""
    ends = [i + 1 for i, x in enumerate(text) if x in "abc" or i + 1 == len(text)]
    return [(end, text[end - 1] in problem.prompt) for end in ends]


def rule(problem, text):
    """Right or not, and a part that is rarely the same twice."""
    return {"correct": float(text.count("a") % 2 == len(problem.prompt) % 2),
            "style": 0.3 * len(set(text) & set(problem.prompt)) - 0.05 * len(text)}


def demonstration(problem, rng):
    """One of some texts, right or wrong."""
    return rng.choice(["bcd", "ccbddb", "abcdef", "bag"])


TASK = SimpleNamespace(reward=rule, steps=steps, answer=lambda text: text[:1], demonstration=demonstration)


# ----------------------------------------------------------------------- the tested side, recorded

class Torch:
    """torch, whose float32 has 64 bits."""
    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """The tested side too computes in float64, where two ways to the same number agree. The first
    optimizer imports half of torch, which is not to see that."""
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters(), 1.0)
    threads, single = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(grpo, "torch", Torch())
    yield
    torch.set_default_dtype(single)
    torch.set_num_threads(threads)


def shaken(module, by, seed):
    """Its weights moved at random."""
    source = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if name != "norm":          # a reward model's mean and std
            p.data += by * torch.randn(p.shape, generator=source)


def new_policy(cfg):
    """A model of one layer, whose rows share their beginnings."""
    policy = tiny_model(cfg.seed, 3.0, vocab_size=len(TEXTS) + 2, n_layer=1, n_head=2, n_kv_head=1,
                        n_embd=16, n_inner=24, block_size=16)
    policy.kv_cache = "shared"
    return policy


def new_agent(cfg):
    """The reference is not the policy, the critic has an opinion, and the reward model a mean and std that are not 0 and 1."""
    return opinionated(grpo.new_agent(cfg, TASK, ENCODING, new_policy(cfg)))


def opinionated(agent):
    """An agent whose models differ."""
    if agent.ref is not None:
        shaken(agent.ref, 0.1, 1)
    if agent.critic is not None:
        shaken(agent.critic, 0.1, 2)
    if agent.reward_model is not None:
        agent.reward_model.norm.data = torch.tensor([0.3, 1.7])
    return agent


def oracle_of(agent):
    """An Oracle with copies of an agent's models."""
    rm, models = agent.reward_model, copy.deepcopy([agent.policy, agent.ref, agent.critic])
    for gpt in (part for model in models if model is not None for part in model.modules() if isinstance(part, GPT)):
        gpt.kv_cache = "plain"              # shares no beginnings
    return Oracle(agent.cfg, *models, None if rm is None else rm.norm.tolist())


def rows_of(batch, agent):
    """A rollout as rows of their own. Their problems are found by their prompts."""
    rows = []
    for ids, mask, start in zip(batch.ids.tolist(), batch.mask.tolist(), batch.start.tolist()):
        n = sum(mask)
        assert mask == [start <= t < start + n for t in range(len(mask))] and 1 <= n
        row = row_of(ids[:start], ids[start:start + n])
        if agent.reward_model is not None:
            with torch.no_grad():
                row.score = agent.reward_model(torch.tensor([ids[:start + n]]))[0, start:].tolist()
        rows.append(row)
    return rows


def row_of(prompt, completion):
    """A completion, which ends at a token that ends it or with as many tokens as there may be."""
    assert not STOP & set(completion[:-1])
    finished = completion[-1] in STOP
    assert len(completion) == SMALL["max_new"] or finished and len(completion) < SMALL["max_new"]
    problem = next(p for p in PROBLEMS if ENCODING.encode_prompt(p.prompt) == prompt)
    of_char = [i for i, x in enumerate(completion) for _ in ENCODING.token_bytes(x)]
    text = b"".join(map(ENCODING.token_bytes, completion)).decode()
    return Row(prompt, completion, finished, rule(problem, text),
               [(of_char[end - 1], true) for end, true in steps(problem, text)])


def recorded(minibatches, chosen):
    """`minibatches`; on the side the indices that it gives, in the order of the rows of all ranks:
    each rank in turn takes a group."""
    def record(cfg, *given):
        rank, ranks = dist.rank(), dist.ranks()
        for rows, size in minibatches(cfg, *given):
            groups = [divmod(i, cfg.group) for i in rows.tolist()]
            chosen[rank].append([(g * ranks + rank) * cfg.group + i for g, i in groups])
            yield rows, size
    return record


def on_ranks(ranks, work, monkeypatch):
    """`work(rank)` of each rank, in threads that sum up as processes would."""
    if ranks == 1:
        return [work(0)]
    own, barrier, handed = threading.local(), threading.Barrier(ranks, timeout=20), [None] * ranks

    def gather(x):
        """What each rank has."""
        handed[own.rank] = x
        barrier.wait()
        found = [*handed]
        barrier.wait()
        return found

    def all_reduce(x, op=distributed.ReduceOp.SUM):
        """Sum, minimum or maximum."""
        stacked = torch.stack(gather(x.detach().clone()))
        if op == distributed.ReduceOp.MIN:
            return stacked.amin(0)
        return stacked.amax(0) if op == distributed.ReduceOp.MAX else stacked.sum(0)

    def of_rank(rank):
        """What a rank does; if it fails, none waits for it."""
        own.rank = rank
        try:
            return work(rank)
        finally:
            if sys.exc_info()[0]:
                barrier.abort()
    with monkeypatch.context() as patch, ThreadPoolExecutor(ranks) as pool:
        patch.setattr(dist, "rank", lambda: own.rank)
        patch.setattr(dist, "ranks", lambda: ranks)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "gather", gather)
        return list(pool.map(of_rank, range(ranks)))


# -------------------------------------------------------------------------------- the comparison

def check_minibatches(chosen, cfg):
    """In every epoch each row once, in parts whose sizes differ by 1 at most; split anew in each
    epoch and step."""
    n, B = cfg.minibatches, cfg.prompts * cfg.group
    epochs = [chosen[i:i + n] for i in range(0, len(chosen), n)]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == list(range(B))
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    splits = {tuple(map(tuple, map(sorted, epoch))) for epoch in epochs}
    assert len(epochs) == cfg.steps * cfg.epochs and (n == 1 or len(splits) > len(epochs) / 2)


def compare(cfg, monkeypatch, ranks=1):
    """The steps of both; gives the oracle, its statistics and the rows of all steps."""
    agents, all_chosen = [new_agent(cfg) for _ in range(ranks)], []
    G, oracle = cfg.group, oracle_of(agents[0])
    before, logged, seen = copy.deepcopy(oracle.params), [], []
    minibatches, rng, streams = grpo.minibatches, dist.rng, []
    monkeypatch.setattr(dist, "rng", lambda cfg, *of: streams.append(of) or rng(cfg, *of))
    for step in range(1, cfg.steps + 1):
        chosen = [[] for _ in agents]
        monkeypatch.setattr(grpo, "minibatches", recorded(minibatches, chosen))
        done = on_ranks(ranks, lambda rank: grpo.train_step(agents[rank], PROBLEMS, step),
                        monkeypatch)
        rows = [rows_of(batch, agents[0]) for batch, _ in done]
        rows = [row for p in range(cfg.prompts) for row in rows[p % ranks][p // ranks * G:][:G]]
        assert len({tuple(row.prompt) for row in rows}) == cfg.prompts
        assert all(row.prompt == rows[i // G * G].prompt for i, row in enumerate(rows))
        chosen = [sum(parts, []) for parts in zip(*chosen, strict=True)]
        want = oracle.step(rows, chosen)
        for _, stats in done:
            assert {*want} | TIMES == {*stats} and all(stats[name] > 0 for name in TIMES)
            for name in want:
                assert stats[name] == pytest.approx(want[name], rel=1e-7, abs=1e-9), (step, name)
        seen, logged, all_chosen = seen + rows, logged + [want], all_chosen + chosen
    check_minibatches(all_chosen, cfg)
    assert {streams.count(of) for of in streams} == {ranks}         # no random stream twice
    for agent in agents:
        check_weights(agent, oracle, before)
    return oracle, logged, seen


def check_weights(agent, oracle, before):
    """Those of policy and critic, by how far each has moved."""
    tested = [p for model in (agent.policy, agent.critic) if model is not None
              for p in model.parameters() if p.requires_grad]
    for p, q, first in zip(tested, oracle.params, before, strict=True):
        torch.testing.assert_close(p - first, q - first, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------- the cases

def each(**choices):
    """A dict for each combination of the choices of some settings."""
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


# Any two settings go together below; here are published algorithms, and what needs three settings or more.
CASES = [
    *each(algo=ALGOS),
    *each(supervision=["process"], baseline=["group", "leave-one-out", "group+value"]),
    dict(baseline="group+value", critic="separate", GAMMA=0.9, lam=0.7, VALUE_COEF=1),
    *each(ratio=["sequence"], loss_mean=["token", "constant"]),
    dict(clip_low=0.05, clip_high=0.4),
    dict(TRUNCATED_REWARD=-1.0, supervision="process"),
    dict(reward="model", TRUNCATED_REWARD=-1.0), dict(algo="ppo", reward="model", supervision="process"),
    dict(temperature=1.3, algo="ppo", critic="separate"),
    dict(epochs=1, minibatches=4, micro_tokens=1000),
    dict(epochs=3, recompute=True),
    dict(prompts=3, group=2, minibatches=3),
    dict(GRAD_CLIP=0.01),
]


def made(given, monkeypatch):
    """A Config; names in capitals are constants of the code."""
    for name, x in given.items():
        if name.isupper():
            monkeypatch.setattr(reward if hasattr(reward, name) else grpo, name, x)
    cfg = grpo.make_config(**SMALL | {name: x for name, x in given.items() if not name.isupper()})
    config.algorithm("grpo", grpo.ALGOS, grpo)          # of dapo its settings alone; `train` replaces functions
    return cfg


def title(given):
    return " ".join(f"{name}={x}" for name, x in given.items())


@pytest.mark.slow
@pytest.mark.parametrize("given", CASES, ids=title)
def test_training_steps(given, monkeypatch):
    """In each there is something to learn, rows end and are cut, and tokens are clipped at both
    sides; without a baseline few advantages are negative."""
    cfg = made(given, monkeypatch)
    oracle, logged, rows = compare(cfg, monkeypatch)
    assert {row.finished for row in rows} == {True, False}
    assert logged[0]["dead_groups"] < 1 and logged[0]["grad_norm"] > 0.1
    if cfg.clip_high < 1 and cfg.epochs > 1:
        assert oracle.high > 0 and (oracle.low > 0 or cfg.baseline == "none")
    if cfg.clip_high > 1:
        assert oracle.high == oracle.low == 0


# Settings of a run, each with values that make a difference; and after how many steps it is killed and goes on (0: never).
VALUES = dict(
    baseline=BASELINES, adv_scale=("none", "group", "batch"), supervision=("outcome", "process"), reward=("rule", "model"),
    TRUNCATED_REWARD=(0.0, -1.0), critic=("shared", "separate"), GAMMA=(1.0, 0.9), lam=(0.95, 0.7), VALUE_COEF=(0.1, 1.0),
    ratio=("token", "sequence"), clip_low=(0.2, 0.05), clip_high=(0.2, 0.4), kl=("loss", "reward", "watch", "none"),
    estimator=("k1", "k2", "k3", "ratio*k3"), beta=(0.3, 0.04, 0.0),
    loss_mean=("sequence", "token", "constant"), temperature=(1.0, 1.3), epochs=(1, 2), minibatches=(2, 1),
    micro_tokens=(24, 1, 1000), recompute=(False, True),
    GRAD_CLIP=(1.0, 0.01), iterations=(1, 3), half_life=(0, 2), eval_every=(0, 2), resumed=(0, 1, 2),
    algo=("grpo", "adaptive_kl", "periodic_reference", "moving_reference"))
STEPS = {1: 2, 3: 1}                # of an iteration, by the number of iterations


def active(given):
    """The settings that have an effect beside the others."""
    idle = set()
    if "value" not in given["baseline"]:
        idle |= {"critic", "GAMMA", "lam", "VALUE_COEF"}
    if given["epochs"] * given["minibatches"] == 1:         # then the ratio is 1
        idle |= {"ratio", "clip_low", "clip_high"}
    if given["kl"] in ("watch", "none"):
        idle |= {"beta"}
    if given["kl"] == "none" or given["beta"] == 0:
        idle |= {"estimator"}
    if given["algo"] == "adaptive_kl" and idle & {"beta", "estimator"}:
        idle |= {"algo"}                                    # it would be refused
    return {name: x for name, x in given.items() if name not in idle}


def pairs_of(given):
    """Each two settings of a dict with their values, a set, of those that have an effect."""
    return set(itertools.combinations(active(given).items(), 2))


def configurations():
    """As few choices of all settings as a greedy search finds in which each pair of values has an effect, if it can."""
    rng, left, found = random.Random(0), set(), []
    lively = {name: values[0] for name, values in VALUES.items()} | dict(baseline="value", epochs=2)
    for names in itertools.combinations(VALUES, 2):
        for pair in itertools.product(*([(name, x) for x in VALUES[name]] for name in names)):
            left |= {pair} & pairs_of(lively | dict(pair))
    while left:
        candidates = []
        for first, second in rng.sample(sorted(left, key=repr), min(12, len(left))) * 10:
            given = {name: rng.choice(values) for name, values in VALUES.items()} | dict([first, second])
            candidates.append(given)
        best = max(candidates, key=lambda given: len(pairs_of(given) & left))
        found.append(best)
        left -= pairs_of(best)
    return found


ALL_PAIRS = configurations()


RESULTS = {"greedy": 0.25, "pass@1": 0.5}       # of each evaluation


class Killed(BaseException):
    """As if by SIGKILL: nothing is saved."""


def compare_runs(cfg, resumed, monkeypatch):
    """Whole runs of both, by `train`: each step, and each line of metrics.jsonl. The tested one is killed after the step
    `resumed`, and goes on with new models."""
    wanted, fits, happened, begun = [], {}, [], SimpleNamespace(oracle=None)
    real_agent, real_step, real_import = grpo.new_agent, grpo.train_step, config.import_file

    def begin(cfg, task, saved):
        """Without a warm start."""
        checkpoint.open_run(cfg, saved)
        return cfg, TASK, ENCODING, new_policy(cfg), PROBLEMS, PROBLEMS[3:]

    def made(cfg, *given):
        """The models; the first time also those of the oracle."""
        agent = real_agent(cfg, *given)
        if begun.oracle is None:
            begun.oracle = oracle_of(opinionated(agent))
            begun.params = copy.deepcopy(begun.oracle.params)
        return agent

    def scorer(agent):
        return [p.detach().clone() for p in agent.reward_model.parameters()] + [agent.history["ids"]]

    def refit(agent, problems, iteration):
        """No fit, but what it moves is moved."""
        shaken(agent.reward_model, 0.1, iteration)
        agent.reward_model.norm.data += 0.1
        agent.history = {"ids": torch.cat([agent.history.get("ids", torch.zeros(0)), torch.full((2,), float(iteration))])}
        fits.setdefault(iteration, scorer(agent))
        begun.oracle.norm = agent.reward_model.norm.tolist()
        return {"rm_accuracy": iteration / 10}

    def train_step(agent, problems, step):
        """A step of both."""
        if step == resumed + 1 and resumed and "killed" not in happened:
            happened.append("killed")
            raise Killed
        oracle, chosen, (iteration, later) = begun.oracle, [], divmod(step - 1, cfg.steps)
        if agent.ref is not None and not later:
            oracle.follow(oracle.policy)
        assert agent.reward_model is None or all(map(torch.equal, scorer(agent), fits[iteration]))
        with monkeypatch.context() as patch:
            patch.setattr(grpo, "minibatches", recorded(grpo.minibatches, [chosen]))
            batch, stats = real_step(agent, problems, step)
        want = oracle.step(rows_of(batch, agent), chosen)
        assert stats == pytest.approx(want | {name: stats[name] for name in TIMES}, rel=1e-7, abs=1e-9), step
        if cfg.algo == "adaptive_kl":
            oracle.steer(want["kl"])
        share = {"moving_reference": 0.01, "periodic_reference": step % 2 == 0}.get(cfg.algo, 0)
        if agent.ref is not None and share:
            oracle.follow(oracle.policy, share)
        fitted = {"rm_accuracy": iteration / 10} if agent.reward_model is not None and not later else {}
        wanted.append({"step": step, **want, **fitted})
        happened.append(step)
        return batch, stats

    def loaded(path, name):
        """An algorithm; one that acts now and then does so at every second step."""
        module = real_import(path, name)
        module.EVERY = 2
        return module
    with monkeypatch.context() as patch:
        for module, name, instead in (
                (setup, "begin", begin), (grpo, "new_agent", made), (grpo, "refit_reward_model", refit),
                (grpo, "train_step", train_step), (grpo, "evaluate", lambda *given: RESULTS), (config, "import_file", loaded),
                (report, "log_step", lambda *given: None), (report, "refresh", lambda folder: None),
                (show, "farewell", lambda *given: None)):
            patch.setattr(module, name, instead)
        try:
            agent = grpo.train(cfg)
        except Killed:
            cfg, saved = checkpoint.resume(cfg.folder, grpo.Config, {})
            agent = grpo.train(cfg, saved=saved)
        finally:
            files.LOCK.close()
            config.algorithm("grpo", grpo.ALGOS, grpo)
    check_weights(agent, begun.oracle, begun.params)
    assert [step for step in happened if step != "killed"] == [*range(1, cfg.total_steps + 1)]
    assert ("killed" in happened) is (0 < resumed < cfg.total_steps)
    first, *logged = map(json.loads, (cfg.folder / "metrics.jsonl").read_text().splitlines())
    assert first == {"step": 0, **RESULTS}
    for line, want in zip(logged, wanted, strict=True):
        due = want["step"] == cfg.total_steps or cfg.eval_every and want["step"] % cfg.eval_every == 0
        assert {name: x for name, x in line.items() if name not in TIMES} == pytest.approx(
            want | (RESULTS if due else {}), rel=1e-7, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ALL_PAIRS)))
def test_any_two_settings_go_together(number, monkeypatch, tmp_path):
    """Each two values of two settings are in one of these runs, beside random values of the others."""
    given = dict(ALL_PAIRS[number])
    resumed = given.pop("resumed")
    if given["algo"] == "adaptive_kl" and (given["beta"] == 0 or given["kl"] not in ("loss", "reward")):
        given["algo"] = "grpo"              # it would be refused
    more = dict(steps=STEPS[given["iterations"]], save_every=1 if resumed else 10, out=str(tmp_path))
    compare_runs(made(given | more, monkeypatch), resumed, monkeypatch)


def test_the_cases_hold_what_is_rare(monkeypatch):
    """A dead group beside a live one; gradients that are scaled down and such that are not."""
    _, logged, _ = compare(grpo.make_config(**SMALL | dict(steps=4)), monkeypatch)
    assert 0.5 in [m["dead_groups"] for m in logged]
    assert min(m["grad_norm"] for m in logged) < 1 < max(m["grad_norm"] for m in logged)


@pytest.mark.parametrize("given", [dict(algo="grpo"), dict(algo="ppo", adv_scale="batch"),
                                   dict(loss_mean="token", kl="reward")], ids=title)
def test_two_ranks(given, monkeypatch):
    """Sums over tokens and rows are those of both, of unequal length."""
    cfg = grpo.make_config(**SMALL | dict(prompts=4) | given)
    compare(cfg, monkeypatch, ranks=2)


# ------------------------------------------------------------------------------- algorithms in files

STATES = dict(tree=lambda batch: (batch.judged ^ batch.mask).any(), replay=lambda batch: not batch.on_policy.all(),
              hints=lambda batch: (batch.judged ^ batch.mask).any(), vineppo=lambda batch: (batch.ends.sum(1) > 1).any())
SEEDS = dict(hints=2, replay=2, vineppo=4)


@pytest.mark.parametrize("name", "adaptive_kl beta_norm gdpo gpg hints lite_ppo overlong_filter raft remax replay "
                         "soft_overlong stale tree vineppo".split())
def test_a_variant_of_two_ranks_is_that_of_one(name, monkeypatch):
    """What such a file counts or averages itself, it does over all ranks: the same statistics and weights after two steps.
    Their numbers of tokens and of dead groups differ, and the means of their rewards."""
    if name == "beta_norm":             # for rewards from 0 to 1
        monkeypatch.setattr(TASK, "reward", lambda problem, text: {"correct": rule(problem, text)["correct"]})
    cfg = grpo.make_config(**SMALL | dict(algo=name, seed=SEEDS.get(name, 1), prompts=4, group=2, epochs=1, minibatches=1,
                                          micro_tokens=1000))
    alone, *both = [new_agent(cfg) for _ in range(3)]
    differ, reached = torch.zeros(3, dtype=torch.bool), False
    for step in range(1, 7 if name == "replay" else 3):
        batch, want = grpo.train_step(alone, PROBLEMS, step)
        reached |= STATES.get(name, lambda batch: True)(batch)
        found = on_ranks(2, lambda rank: grpo.train_step(both[rank], PROBLEMS, step), monkeypatch)
        rewards = [batch.reward.sum(1).view(-1, cfg.group) for batch, _ in found]
        own = [torch.stack([batch.mask.sum(), r.mean(), (r.amax(1) == r.amin(1)).sum()]) for (batch, _), r in zip(found, rewards)]
        differ |= own[0] != own[1]
        for _, stats in found:
            assert {n: x for n, x in stats.items() if n not in TIMES} == pytest.approx(
                {n: x for n, x in want.items() if n not in TIMES}, rel=1e-7, abs=1e-9)
    assert differ.all() and reached and both[0].beta == both[1].beta == pytest.approx(alone.beta)
    assert both[0].state.keys() == both[1].state.keys()
    assert all(torch.equal(x, both[1].state[name]) for name, x in both[0].state.items())
    for agent in both:
        for p, q in zip(agent.policy.parameters(), alone.policy.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_the_speed_of_dynamic_sampling_is_that_of_all_ranks(monkeypatch):
    """In the tokens of all rollouts of both ranks, though each keeps some groups alone, and other numbers of tokens."""
    cfg, tokens, kept = grpo.make_config(**SMALL | dict(algo="dynamic_sampling", prompts=2, group=2, epochs=1)), [], []
    real = (module := sys.modules["experiments.variants.dynamic_sampling"]).one_rollout

    def one_rollout(*given):
        batch, stats = real(*given)
        tokens.append(batch.mask.sum().item())
        return batch, stats

    def speeds(clock, batch):
        """Of a rollout and an update that took a second each."""
        kept.append(batch.mask.sum().item())
        return {"rollout_tok_s": dist.all_reduce(batch.mask.sum()).item()}
    monkeypatch.setattr(module, "one_rollout", one_rollout)
    monkeypatch.setattr(report.Clock, "speeds", speeds)
    agents = [new_agent(cfg) for _ in range(2)]
    found = on_ranks(2, lambda rank: grpo.train_step(agents[rank], PROBLEMS, 1), monkeypatch)
    assert len(tokens) > 2 and sum(kept) < sum(tokens) and kept[0] != kept[1]
    assert [stats["rollout_tok_s"] for _, stats in found] == pytest.approx([sum(tokens)] * 2)


@pytest.mark.parametrize("name", ["tis", "mis"])
def test_a_step_whose_sampler_is_another_model(name, monkeypatch):
    """As one of another precision is, by more than rounding: the gradient of the whole step, by hand. Weights of tokens or
    completions are both below the bound and above it."""
    for key in passes.MISMATCH:
        monkeypatch.setitem(passes.MISMATCH, key, (9.0, 9.0))
    monkeypatch.setattr(grpo, "GRAD_CLIP", 1e9)
    cfg = grpo.make_config(**SMALL | dict(algo=name, epochs=1, minibatches=1, group=6))
    agent = new_agent(cfg)
    agent.sampler = copy.deepcopy(agent.policy)
    shaken(agent.sampler, 0.2, 5)
    monkeypatch.setattr(dist, "sync_sampler", lambda agent: None)
    agent.opt, policy = torch.optim.SGD(agent.policy.parameters(), 1.0), copy.deepcopy(agent.policy)
    batch, _ = grpo.train_step(agent, PROBLEMS, 1)
    loss, weights = 0, []
    for row, adv in zip(rows_of(batch, agent), batch.adv.sum(1) / batch.mask.sum(1)):
        new, own = (logps(gpt, row, 1.0) for gpt in (policy, agent.sampler))
        of_tokens = [math.exp((a - b).item()) for a, b in zip(new, own)]
        whole = math.prod(of_tokens)
        weight = [min(x, 2.0) if name == "tis" else whole * (whole <= 2) for x in of_tokens]
        loss = loss - sum(w * adv * x for w, x in zip(weight, new)) / len(new) / len(batch.ids)
        weights += weight
    loss.backward()
    assert (2.0 if name == "tis" else 0.0) in weights and any(0.3 < x < 1.9 for x in weights)
    for p, q in zip(agent.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(q - p, q.grad, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------- the reward model

FITTED = [SimpleNamespace(prompt="".join(x)) for n in (1, 2, 3) for x in itertools.product("abceg", repeat=n)][:120]


def compare_fits(cfg, monkeypatch):
    """Three iterations of both; gives the oracle."""
    agent, streams = new_agent(cfg), {}
    oracle, rng = FitOracle(cfg, copy.deepcopy(agent.reward_model), row_of), dist.rng
    oracle.model.trunk.kv_cache = "plain"
    before = [p.clone() for p in oracle.model.parameters()]
    monkeypatch.setattr(sys.modules[__name__], "PROBLEMS", FITTED)
    monkeypatch.setattr(dist, "rng", lambda cfg, *of: streams.setdefault(of, Draws(rng(cfg, *of))))
    generate, completions, asked, made, continued = grpo.generate, grpo.completions, [], [], []

    def record(agent, problems, *more):
        """`generate`; on the side the problems and their completions."""
        with monkeypatch.context() as patch:
            patch.setattr(grpo, "completions", completions)
            batch = generate(agent, problems, *more)
        asked.extend(problems)
        made.extend(rows_of(batch, SimpleNamespace(reward_model=None)))
        return batch

    def record_continued(agent, problems, tries, u, begun):
        """`completions`, after a step; on the side the prefixes and how they went on."""
        ended = completions(agent, problems, tries, u, begun)
        prefixes = [agent.encoding.encode_prompt(p.prompt) + ids for p, (ids, _) in zip(problems, begun)]
        ids = [row[:max(i for i, on in enumerate(mask) if on) + 1] for row, mask in zip(ended.ids.tolist(), ended.mask.tolist())]
        continued.extend((prefix, ids[i * tries:(i + 1) * tries]) for i, prefix in enumerate(prefixes))
        return ended
    monkeypatch.setattr(grpo, "generate", record)
    monkeypatch.setattr(grpo, "completions", record_continued)
    for iteration in range(3):
        shaken(agent.policy, 0.3, iteration)
        for kept in (asked, made, continued):
            kept.clear()
        found = grpo.refit_reward_model(agent, FITTED, iteration)
        draws = streams["fit", iteration]
        (apart, n, first), (others, m, rest) = draws.of["sample"][:2]
        assert apart == FITTED[:12] and others == FITTED[12:] and n == 5 and n + m == 50
        assert asked == first + rest and [row.prompt for row in made] == [
            ENCODING.encode_prompt(p.prompt) for p in asked for _ in range(reward.CHOICES)]
        want = oracle.fit(made, iter(continued), draws)
        assert found == pytest.approx(want, rel=1e-7, abs=1e-9)
        if oracle.K > 1:
            oracle.model.norm.data = torch.tensor(oracle.norm)
        for p, q, first in zip(agent.reward_model.parameters(), oracle.model.parameters(), before, strict=True):
            torch.testing.assert_close(p - first, q - first, rtol=1e-6, atol=1e-7)
    assert not any(torch.equal(p, first) for p, first in zip(oracle.model.parameters(), before) if p.requires_grad)
    return oracle


@pytest.mark.slow
@pytest.mark.parametrize("given", [dict(beta=0.0, CHOICES=3), dict(supervision="process", reward="rollouts", CHOICES=2),
                                   dict(supervision="process", CHOICES=3)], ids=title)
def test_three_fits(given, monkeypatch):
    """All weights of the reward model after each fit, its mean and std, accuracy and calibration: which problems are
    drawn, who labels what, what of history comes again, the order, the loss, the steps."""
    compare_fits(made(dict(reward="model", TRUNCATED_REWARD=-1.0, FIT_STEPS=25) | given, monkeypatch), monkeypatch)
