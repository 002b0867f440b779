"""Whole training steps and runs against tests/oracle.py, which was written from the papers: every
weight and every number of metrics.jsonl, in float64, for every algorithm and choice."""
import copy
import functools
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from conftest import LETTERS, TIMES, Killed, metrics, tiny_model
from oracle import Draws, FitOracle, Oracle, Row, logps  # noqa: F401, test_variants.py has logps

import grpo
import reward
from data import STATISTICS
from model import GPT
from run import checkpoint, config, dist, files, report, setup, signals

pytestmark = pytest.mark.usefixtures("double")
TEXTS = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"ba"]   # the last ends two steps
STOP = {len(TEXTS), len(TEXTS) + 1}                         # two tokens that end a completion
PROBLEMS = [SimpleNamespace(prompt=text) for text in ("acc", "g", "defgab", "cc", "eg")]
ENCODING = SimpleNamespace(stop=STOP, encode_prompt=lambda text: ["abcdefg".index(x) for x in text],
                           encode_demonstration=lambda text: ["abcdefg".index(x) for x in text],
                           token_bytes=lambda i: b"" if i in STOP else TEXTS[i], files={})
SMALL = dict(seed=7, prompts=2, group=3, max_new=6, epochs=2, minibatches=2, micro_tokens=24,
             lr=0.015, steps=2, dtype="float32")


def steps(problem, text):
    """A step ends at each a, b, c, and is true if the prompt has that letter; so does the text."""
    ends = [i + 1 for i, x in enumerate(text) if x in "abc" or i + 1 == len(text)]
    return [(end, text[end - 1] in problem.prompt) for end in ends]


exec(LETTERS, letters := {})
rule = letters["reward"]            # of which a part is rarely the same twice


def demonstration(problem, rng):
    return rng.choice(["bcd", "ccbddb", "abcdef", "bag"])


TASK = SimpleNamespace(reward=rule, steps=steps, answer=lambda text: text[:1],
                       demonstration=demonstration)


# ---------- the tested side, recorded

def shaken(module, by, seed):
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
    return opinionated(grpo.new_agent(cfg, TASK, ENCODING, new_policy(cfg)))


def opinionated(agent):
    """The reference is not the policy, the critic has an opinion, the reward model a norm."""
    if agent.ref is not None:
        shaken(agent.ref, 0.1, 1)
    if agent.critic is not None:
        shaken(agent.critic, 0.1, 2)
    if agent.reward_model is not None:
        agent.reward_model.norm.data = torch.tensor([0.3, 1.7])
    return agent


def oracle_of(agent):
    rm, models = agent.reward_model, copy.deepcopy([agent.policy, agent.ref, agent.critic])
    for part in [part for x in models if x is not None for part in x.modules()]:
        if isinstance(part, GPT):
            part.shared_prefixes = False
    found = Oracle(agent.cfg, *models, None if rm is None else rm.norm.tolist())
    found.eps = agent.opt.param_groups[0]["eps"]
    return found


def rows_of(batch, agent):
    rows = []
    for ids, mask, start in zip(batch.ids.tolist(), batch.mask.tolist(), batch.start.tolist()):
        n = sum(mask)
        assert mask == [start <= t < start + n for t in range(len(mask))] and 1 <= n
        row = row_of(ids[:start], ids[start:start + n])
        if agent.reward_model is not None:
            with torch.no_grad():
                score = agent.reward_model(torch.tensor([ids[:start + n]]))
            row.score = score[0, start:].tolist()
        rows.append(row)
    return rows


def row_of(prompt, completion):
    """It ends at a token that ends it, or with as many as there may be."""
    finished = completion[-1] in STOP
    assert not STOP & {*completion[:-1]} and len(completion) <= SMALL["max_new"]
    assert finished or len(completion) == SMALL["max_new"]
    problem = next(p for p in PROBLEMS if ENCODING.encode_prompt(p.prompt) == prompt)
    of_char = [i for i, x in enumerate(completion) for _ in ENCODING.token_bytes(x)]
    text = b"".join(map(ENCODING.token_bytes, completion)).decode()
    return Row(prompt, completion, finished, rule(problem, text),
               [(of_char[end - 1], true) for end, true in steps(problem, text)])


def recorded(minibatches, chosen):
    """`minibatches`, noting its indices in the order of the rows of all ranks, which take groups
    in turn."""
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
    own, barrier = threading.local(), threading.Barrier(ranks, timeout=300)
    handed, op_of = [None] * ranks, distributed.ReduceOp

    def gather(x):
        handed[own.rank] = x
        barrier.wait()
        found = [*handed]
        barrier.wait()
        return found

    def all_reduce(x, op=op_of.SUM):
        stacked = torch.stack(gather(x.detach().clone()))
        return {op_of.MAX: stacked.amax, op_of.SUM: stacked.sum}[op](0)

    def of_rank(rank):
        own.rank = rank
        try:
            return work(rank)
        except BaseException:
            barrier.abort()
            raise
    with monkeypatch.context() as patch, ThreadPoolExecutor(ranks) as pool:
        patch.setattr(dist, "rank", lambda: own.rank)
        patch.setattr(dist, "ranks", lambda: ranks)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "gather", gather)
        return list(pool.map(of_rank, range(ranks)))


def both_step(agents, oracle, step, train_step, problems, monkeypatch):
    """A step of both. Gives the first rank's batch and statistics, the oracle's, all rows, and
    those of each minibatch."""
    chosen, cfg, ranks = [[] for _ in agents], agents[0].cfg, len(agents)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "minibatches", recorded(grpo.minibatches, chosen))
        done = on_ranks(ranks, lambda rank: train_step(agents[rank], problems, step), patch)
    rows = [rows_of(batch, agents[0]) for batch, _ in done]
    rows = [row for p in range(cfg.prompts)
            for row in rows[p % ranks][p // ranks * cfg.group:][:cfg.group]]
    assert len({tuple(row.prompt) for row in rows}) == cfg.prompts
    assert all(row.prompt == rows[i // cfg.group * cfg.group].prompt for i, row in enumerate(rows))
    chosen = [sum(parts, []) for parts in zip(*chosen, strict=True)]
    want = oracle.step(rows, chosen)
    for _, stats in done:
        assert all(stats[name] > 0 for name in TIMES) and {*stats} - {"style"} <= STATISTICS
        assert stats == pytest.approx(want | {name: stats[name] for name in TIMES}, 1e-7, 1e-9)
    return *done[0], want, rows, chosen


def check_minibatches(chosen, cfg):
    """In every epoch each row once, in parts of equal size; split anew each time."""
    n, B = cfg.minibatches, cfg.prompts * cfg.group
    epochs = [chosen[i:i + n] for i in range(0, len(chosen), n)]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == list(range(B))
        assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    splits = {tuple(map(tuple, map(sorted, epoch))) for epoch in epochs}
    assert len(epochs) == cfg.steps * cfg.epochs and (n == 1 or len(splits) > len(epochs) / 2)


def check_weights(agent, oracle, before):
    """Those of policy and critic, by how far each has moved."""
    tested = [p for model in (agent.policy, agent.critic) if model is not None
              for p in model.parameters() if p.requires_grad]
    for p, q, first in zip(tested, oracle.params, before, strict=True):
        torch.testing.assert_close(p - first, q - first, rtol=1e-6, atol=1e-7)


# Any two settings go together below; here are published algorithms, two ranks, whose sums are of
# rows of unequal length, and what needs three settings or more.
CASES = [
    *(dict(algo=x) for x in "grpo reinforce a2c ppo rloo dr_grpo dapo gspo".split()),
    *(dict(supervision="process", baseline=x) for x in ("group", "leave-one-out", "group+value")),
    dict(baseline="group+value", critic="separate", GAMMA=0.9, lam=0.7, VALUE_COEF=1),
    dict(algo="ppo", reward="model", supervision="process"),
    dict(temperature=1.3, algo="ppo", critic="separate"),
    dict(epochs=1, minibatches=4, micro_tokens=1000),
    dict(epochs=3, recompute=True),
    dict(prompts=3, group=2, minibatches=3),
    dict(steps=4),
    dict(RANKS=2, prompts=4),
    dict(RANKS=2, prompts=4, algo="ppo", adv_scale="batch"),
    dict(RANKS=2, prompts=4, loss_mean="token", kl="reward"),
]


def made(given, monkeypatch):
    """A Config; names in capitals are constants of the code."""
    for name, x in given.items():
        if name.isupper() and name != "RANKS":
            monkeypatch.setattr(reward if hasattr(reward, name) else grpo, name, x)
    cfg = grpo.make_config(**SMALL | {name: x for name, x in given.items() if not name.isupper()})
    config.algorithm("grpo", grpo.ALGOS, grpo)      # of dapo its settings alone
    return cfg


def title(given):
    return " ".join(f"{name}={x}" for name, x in given.items())


@pytest.mark.slow
@pytest.mark.parametrize("given", CASES, ids=title)
def test_training_steps(given, monkeypatch):
    """In each there is something to learn, rows end and are cut, and tokens are clipped."""
    cfg, ranks = made(given, monkeypatch), given.get("RANKS", 1)
    agents = [new_agent(cfg) for _ in range(ranks)]
    oracle = oracle_of(agents[0])
    before, rng, streams = copy.deepcopy(oracle.params), dist.rng, []
    monkeypatch.setattr(dist, "rng", lambda cfg, *of: streams.append(of) or rng(cfg, *of))
    logged, rows, chosen = [], [], []
    for step in range(1, cfg.steps + 1):
        *_, want, more, parts = both_step(agents, oracle, step, grpo.train_step, PROBLEMS,
                                          monkeypatch)
        logged, rows, chosen = logged + [want], rows + more, chosen + parts
    check_minibatches(chosen, cfg)
    assert {streams.count(of) for of in streams} == {ranks}         # no random stream twice
    for agent in agents:
        check_weights(agent, oracle, before)

    assert {row.finished for row in rows} == {True, False}
    assert logged[0]["dead_groups"] < 1 and logged[0]["grad_norm"] > 0.1
    if cfg.clip_high < 1 and cfg.epochs > 1:
        assert oracle.high > 0 and (oracle.low > 0 or cfg.baseline == "none")
    if cfg.clip_high > 1:
        assert oracle.high == oracle.low == 0
    if cfg.steps == 4:      # a dead group beside a live one; gradients scaled down, and not
        assert 0.5 in [m["dead_groups"] for m in logged]
        assert min(m["grad_norm"] for m in logged) < 1 < max(m["grad_norm"] for m in logged)


# Values that make a difference; and after how many steps the run is killed and goes on (0: never).
VALUES = dict(
    baseline=("none", "group", "leave-one-out", "value", "group+value"),
    adv_scale=("none", "group", "batch"), supervision=("outcome", "process"),
    reward=("rule", "model"), TRUNCATED_REWARD=(0.0, -1.0), critic=("shared", "separate"),
    GAMMA=(1.0, 0.9), lam=(0.95, 0.7), VALUE_COEF=(0.1, 1.0), ratio=("token", "sequence"),
    clip_low=(0.2, 0.05), clip_high=(0.2, 0.4), kl=("loss", "reward", "watch", "none"),
    estimator=("k1", "k2", "k3", "ratio*k3"), beta=(0.3, 0.04, 0.0),
    loss_mean=("sequence", "token", "constant"), temperature=(1.0, 1.3), epochs=(1, 2),
    minibatches=(2, 1), micro_tokens=(24, 1, 1000), recompute=(False, True), GRAD_CLIP=(1.0, 0.01),
    iterations=(1, 3), half_life=(0, 2), eval_every=(0, 2), resumed=(0, 1, 2))
STEPS = {1: 2, 3: 1}                # of an iteration, by the number of iterations
RUNS = 36


def pairs_of(given):
    """Each two of those settings that have an effect beside the others."""
    idle = set()
    if "value" not in given["baseline"]:
        idle |= {"critic", "GAMMA", "lam", "VALUE_COEF"}
    if given["epochs"] * given["minibatches"] == 1:         # then the ratio is 1
        idle |= {"ratio", "clip_low", "clip_high"}
    if given["kl"] in ("watch", "none"):
        idle |= {"beta"}
    if given["kl"] == "none" or given["beta"] == 0:
        idle |= {"estimator"}
    return {*itertools.combinations([item for item in given.items() if item[0] not in idle], 2)}


@functools.cache
def configurations():
    """Few choices of all settings, in which each pair of values has an effect that can have one."""
    rng, seen, found = random.Random(12), set(), []
    pairs = [*itertools.combinations([(name, x) for name in VALUES for x in VALUES[name]], 2)]
    rng.shuffle(pairs)
    for pair in pairs:
        tried = []
        while pair not in seen and pair[0][0] != pair[1][0] and len(tried) < 60:
            given = {name: rng.choice(values) for name, values in VALUES.items()} | dict(pair)
            tried.append((pair in pairs_of(given), len(pairs_of(given) - seen), len(tried), given))
        if tried and max(tried)[0]:
            found.append(max(tried)[3])
            seen |= pairs_of(found[-1])
    return found


RESULTS = {"greedy": 0.25, "pass@1": 0.5}       # of each evaluation


@pytest.mark.slow
@pytest.mark.parametrize("number", range(RUNS))
def test_any_two_settings_go_together(number, monkeypatch, tmp_path):
    """In whole runs by `train`, killed after the step `resumed`: each step, each logged line."""
    assert len(configurations()) == RUNS
    given = dict(configurations()[number])
    resumed = given.pop("resumed")
    given |= dict(steps=STEPS[given["iterations"]], save_every=1 if resumed else 10)
    cfg = made(given | dict(out=str(tmp_path)), monkeypatch)
    wanted, happened, begun = [], [], SimpleNamespace(oracle=None)
    real_agent, real_step = grpo.new_agent, grpo.train_step

    def begin(cfg, task, saved):
        checkpoint.open_run(cfg, saved, {})
        return cfg, TASK, ENCODING, new_policy(cfg), PROBLEMS, PROBLEMS[3:]

    def new_models(cfg, *given):
        agent = real_agent(cfg, *given)
        if begun.oracle is None:
            begun.oracle = oracle_of(opinionated(agent))
            begun.params = copy.deepcopy(begun.oracle.params)
        return agent

    def refit(agent, problems, iteration, generate):
        """No fit, but what one moves is moved."""
        shaken(agent.reward_model, 0.1, iteration)
        agent.reward_model.norm.data += 0.1
        begun.oracle.norm = agent.reward_model.norm.tolist()
        return {"rm_accuracy": iteration / 10}

    def train_step(agent, problems, step):
        if step == resumed + 1 and resumed and "killed" not in happened:
            happened.append("killed")
            raise Killed
        oracle, (iteration, later) = begun.oracle, divmod(step - 1, cfg.steps)
        if agent.ref is not None and not later:
            oracle.follow()
        batch, stats, want, *_ = both_step([agent], oracle, step, real_step, problems, monkeypatch)
        wanted.append({"step": step, **want})
        if agent.reward_model and not later:
            wanted[-1]["rm_accuracy"] = iteration / 10
        happened.append(step)
        return batch, stats

    with monkeypatch.context() as patch:
        for module, name, instead in (
                (setup, "begin", begin), (grpo, "new_agent", new_models),
                (reward, "refit", refit), (grpo, "train_step", train_step),
                (report, "evaluate", lambda *given: RESULTS),
                (report, "log_step", lambda *given: None), (report, "refresh", lambda *given: None),
                (report, "farewell", lambda *given: None)):
            patch.setattr(module, name, instead)
        try:
            agent = grpo.train(cfg)
        except Killed:
            cfg, saved = checkpoint.resume(cfg.folder, grpo.Config, {})
            agent = grpo.train(cfg, saved=saved)
        finally:
            files.LOCK.close()
    check_weights(agent, begun.oracle, begun.params)
    all_steps = [*range(1, cfg.total_steps + 1)]
    if 0 < resumed < cfg.total_steps:
        all_steps.insert(resumed, "killed")
    assert happened == all_steps
    first, *logged = metrics(cfg.folder)
    assert first == {"step": 0, **RESULTS}
    for line, want in zip(logged, wanted, strict=True):
        step = want["step"]
        due = step == cfg.total_steps or cfg.eval_every and step % cfg.eval_every == 0
        assert line == pytest.approx(want | (RESULTS if due else {}), rel=1e-7, abs=1e-9)


# ---------- algorithms in files

STATES = dict(       # which a step must reach, and seeds with which one does
    tree=(1, lambda batch: (batch.judged ^ batch.mask).any()),
    hints=(2, lambda batch: (batch.judged ^ batch.mask).any()),
    replay=(2, lambda batch: not batch.on_policy.all()),
    demonstrations=(1, lambda batch: not batch.on_policy.all()),
    vineppo=(4, lambda batch: (batch.ends.sum(1) > 1).any()))
OTHERS = "adaptive_kl beta_norm gdpo gpg lite_ppo overlong_filter raft remax soft_overlong stale"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS.split(), *STATES])
def test_a_variant_of_two_ranks_is_that_of_one(name, monkeypatch):
    """Whose numbers of tokens and of dead groups, and means of rewards, differ."""
    seed, is_there = STATES.get(name, (1, lambda batch: True))
    if name == "beta_norm":             # for rewards from 0 to 1
        monkeypatch.setattr(TASK, "reward", lambda *given: {"correct": rule(*given)["correct"]})
    cfg = grpo.make_config(**SMALL | dict(
        algo=name, seed=seed, prompts=4, group=2, epochs=1, minibatches=1, micro_tokens=1000))
    alone, *both = [new_agent(cfg) for _ in range(3)]
    differ, reached = torch.zeros(3, dtype=torch.bool), False
    for step in range(1, 7 if name == "replay" else 3):
        batch, want = grpo.train_step(alone, PROBLEMS, step)
        reached |= is_there(batch)
        found = on_ranks(2, lambda rank: grpo.train_step(both[rank], PROBLEMS, step), monkeypatch)
        own = []
        for batch, stats in found:
            r = batch.reward.sum(1).view(-1, cfg.group)
            own.append(torch.stack([batch.mask.sum(), r.mean(), (r.amax(1) == r.amin(1)).sum()]))
            assert stats == pytest.approx(want | {name: stats[name] for name in TIMES}, 1e-7, 1e-9)
        differ |= own[0] != own[1]
    assert differ.all() and reached
    for agent in both:
        assert agent.beta == pytest.approx(alone.beta) and agent.state.keys() == alone.state.keys()
        assert all(torch.equal(x, both[0].state[name]) for name, x in agent.state.items())
        one, other = ([*x.policy.parameters()] for x in (agent, alone))
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


FITTED = [SimpleNamespace(prompt="".join(x))
          for n in (1, 2, 3) for x in itertools.product("abceg", repeat=n)][:120]


@pytest.mark.slow
@pytest.mark.parametrize("given", [
    dict(beta=0.0, CHOICES=3), dict(supervision="process", reward="rollouts", CHOICES=2),
    dict(supervision="process", CHOICES=3)], ids=title)
def test_three_fits(given, monkeypatch):
    """All weights of the reward model, its mean and std, accuracy and calibration after each."""
    cfg = made(dict(reward="model", TRUNCATED_REWARD=-1.0, FIT_STEPS=25) | given, monkeypatch)
    agent, streams, rng = new_agent(cfg), {}, dist.rng
    oracle = FitOracle(cfg, copy.deepcopy(agent.reward_model), row_of)
    oracle.model.trunk.shared_prefixes = False
    before = [p.clone() for p in oracle.model.parameters()]
    generate, asked, rows, continued = grpo.generate, [], [], []

    def record(agent, problems, *more, **given):
        """A problem's completions; or those from the end of a step: prefix, and how it went on."""
        batch = generate(agent, problems, *more, **given)
        if given:
            return record_continued(problems, *more, batch, given["begun"])
        asked.extend(problems)
        rows.extend(rows_of(batch, SimpleNamespace(reward_model=None)))
        return batch

    def record_continued(problems, tries, ended, begun):
        lengths = [max(on.nonzero()) + 1 for on in ended.mask]
        ids = [row[:n].tolist() for row, n in zip(ended.ids, lengths)]
        for i, (problem, (prefix, _)) in enumerate(zip(problems, begun)):
            prompt = ENCODING.encode_prompt(problem.prompt)
            continued.append((prompt + prefix, ids[i * tries:(i + 1) * tries]))
        return ended
    with monkeypatch.context() as patch, pytest.raises(signals.Stopped, match="in the labelling"):
        patch.setattr(signals, "stop_asked", lambda: 15)
        reward.refit(agent, FITTED, 0, grpo.generate)
    monkeypatch.setattr(grpo, "generate", record)
    monkeypatch.setattr(dist, "rng", lambda cfg, *of: streams.setdefault(of, Draws(rng(cfg, *of))))
    monkeypatch.setitem(globals(), "PROBLEMS", FITTED)
    for iteration in range(3):
        shaken(agent.policy, 0.3, iteration)
        for kept in (asked, rows, continued):
            kept.clear()
        found = reward.refit(agent, FITTED, iteration, grpo.generate)
        draws = streams["fit", iteration]
        (apart, n, first), (others, m, rest) = draws.samples[:2]
        assert apart == FITTED[:12] and others == FITTED[12:] and n == 5 and n + m == 50
        assert asked == first + rest and [row.prompt for row in rows] == [
            ENCODING.encode_prompt(p.prompt) for p in asked for _ in range(reward.CHOICES)]
        want = oracle.fit(rows, iter(continued), draws)
        assert found == pytest.approx(want, rel=1e-7, abs=1e-9)
        oracle.model.norm[1] = 1
        if oracle.K > 1:
            oracle.model.norm.data = torch.tensor(oracle.norm)
        models = agent.reward_model.parameters(), oracle.model.parameters(), before
        for p, q, first in zip(*models, strict=True):
            torch.testing.assert_close(p - first, q - first, rtol=1e-6, atol=1e-7)
    assert {at[0] for of, at in streams if of == "labels"} in ({*()}, {*"012"})
    for p, first in zip(oracle.model.parameters(), before):
        assert not p.requires_grad or not torch.equal(p, first)
