"""Who sees what, and which setting moves what: whole runs through `main`, watched by wrappers that
call through. The first half follows one run of two iterations, whole and resumed; the second turns
each setting in a run where it is active."""
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import chat_folder, flags, records

import grpo
import model
import reward
from grpo import Config
from run import checkpoint, config, dist, files, passes, report, setup

# ------------------------------------------------------------------------------- a task, and runs

PROBLEMS = [SimpleNamespace(prompt=f"{i:02d}=", answer="ab"[i % 2]) for i in range(30)]
TRAIN, HELD_OUT = PROBLEMS[4:28], PROBLEMS[:4]
SPARE = PROBLEMS[28:]           # problems of another difficulty
HERE = [p.prompt for p in TRAIN]
AWAY = [p.prompt for p in HELD_OUT]


def problems(difficulty=2):
    """Two lists; the difficulty adds some to the first."""
    return TRAIN + SPARE[:difficulty - 1], HELD_OUT


def demonstration(problem, rng):
    """The answer's letter, some times over."""
    return problem.answer * rng.randrange(1, 5)


def rule(problem, text):
    """Whether it begins rightly, and a part that is rarely the same twice."""
    return {"correct": float(text[:1] == problem.answer), "style": 0.1 * len(set(text)) + len(text) / 99}


def steps(problem, text):
    """Each character is a step."""
    return [(i + 1, x == problem.answer) for i, x in enumerate(text)]


def answer(text):
    """The first character counts as a vote."""
    return text[:1]


TASK = SimpleNamespace(DEFAULTS={}, problems=problems, demonstration=demonstration, reward=rule,
                       steps=steps, answer=answer)
TINY = dict(difficulty=1, n_layer=1, n_embd=16, warm_steps=3,
            warm_lr=3e-2, prompts=3, group=4, max_new=6, minibatches=2, micro_tokens=1000, steps=2,
            lr=1e-2, device="cpu",
            dtype="float32", compile=False)


@pytest.fixture(autouse=True, scope="module")
def small_fits():
    """Of two completions a problem, of 21 problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "CHOICES", 2)
        patch.setattr(reward, "FIT_STEPS", 7)
        yield


class Killed(BaseException):
    """What ends a run at once, as a kill does."""


def weights(module):
    """A copy of a module's parameters by name; nothing for None."""
    return {} if module is None else {n: p.detach().clone() for n, p in module.named_parameters()}


def texts(rows):
    """The texts of prompts, lists of bytes."""
    return [bytes(x for x in ids if x < 256).decode("utf-8", "replace") for ids in rows]


def after(patch, module, name, look, seen):
    """From now on `look(args, got)` sees each call of a function, once it is done; `seen.within`
    names the functions that are at work."""
    real = getattr(module, name)

    def wrapper(*args, **given):
        """Calls through."""
        seen.within.append(name)
        try:
            got = real(*args, **given)
        finally:
            seen.within.pop()
        look(args, got)
        return got
    patch.setattr(module, name, wrapper)


def watch(patch, seen, kill_at=None):
    """Put wrappers round the parts of a run, which note in `seen` what they were given and gave."""
    def began(args, got):
        """The problems, and the policy before the first step."""
        *_, policy, train, held_out = got
        seen.problems, seen.start = [[p.prompt for p in part] for part in (train, held_out)], weights(policy)

    def sampled(args, got):
        """Prompts by the outermost function that asked, and the number of completions of each."""
        by = next(iter(x for x in seen.within if x in ("refit_reward_model", "train_step", "evaluate")), "ask")
        seen.prompts.append((by, len(seen.events), texts(args[1]), args[2]))
        greedy = len(args) < 7 or args[6] is None
        seen.limits |= {(by, room, args[4], greedy) for room in args[3]}    # most new tokens, temperature

    def begun(args, got):
        """A fit: the models as it left them."""
        agent, _, iteration = args
        seen.events.append(f"iteration {iteration}")
        seen.fits.append(SimpleNamespace(measures=dict(got), policy=weights(agent.policy), ref=weights(agent.ref),
                                         model=weights(agent.reward_model)))

    def stepped(args, got):
        """A step: its batch and statistics, and the reference at its end."""
        agent, _, step = args
        seen.agent = agent
        seen.events.append(f"step {step}")
        seen.steps[step] = SimpleNamespace(batch=got[0], stats=dict(got[1]), ref=weights(agent.ref),
                                           policy=weights(agent.policy))

    def measured(args, got):
        """An evaluation."""
        seen.events.append("evaluation")
        seen.results.append(got)

    def logged(args, got):
        """A line of metrics.jsonl; and the end, if this is where the run is to be killed."""
        path, record = args
        if path.name == "metrics.jsonl":
            seen.logged.append(record)
            if record["step"] == kill_at:
                raise Killed

    def saved(args, got):
        seen.saved.append(args[1])

    def scored(args, got):
        """A training pass; here those of the warm start."""
        if "warm_start" in seen.within:
            note("warm")(args, got)

    def drawn(args, got):
        """A random stream."""
        seen.streams.append((args[1], args[2] if len(args) > 2 else 0))
        seen.seeds.add(args[0].seed)

    def passed(layer, *given):
        """A pass through a layer, in an update; of one made again autograd may need no more than the
        beginning."""
        seen.passes += "update" in seen.within
        return forward(layer, *given)

    def compiled(function, **options):
        seen.compiled += 1
        return function

    forward = model.Block.forward

    def note(name):
        """A function that notes the arguments and the result of each call under a name."""
        return lambda args, got: seen.calls.setdefault(name, []).append((args, got))

    for module, name, look in (
            (setup, "begin", began), (grpo, "sample", sampled), (grpo, "refit_reward_model", begun),
            (grpo, "train_step", stepped), (grpo, "update", note("update")), (grpo, "evaluate", measured),
            (files, "append", logged), (checkpoint, "save", saved), (dist, "rng", drawn),
            (setup, "warm_start", note("warm start")), (passes, "token_logps", scored),
            (TASK, "demonstration", note("demonstration")),
            (reward, "refit", note("refit")), (reward, "fit", note("fit")), (reward, "scores", note("scores")),
            (reward, "replay", note("replay"))):
        after(patch, module, name, look, seen)
    patch.setattr(model.Block, "forward", passed)
    for place in (torch.nn.Module, torch):
        patch.setattr(place, "compile", compiled)


def run(*mode, kill_at=None, **settings):
    """`main` with a mode and settings as flags, watched; without a task in the settings, of TASK."""
    seen = SimpleNamespace(within=[], prompts=[], events=[], fits=[], steps={}, results=[], logged=[], saved=[],
                           streams=[], seeds=set(), limits=set(), calls={}, passes=0, compiled=0)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, seen, kill_at)
        if "task" not in settings:
            for module in (config, setup):
                patch.setattr(module, "load_task", lambda name: TASK)
        try:
            grpo.main([*mode, *flags(settings)])
        except Killed:
            pass
    return seen


def lines(where, name):
    """The records of a file of JSON lines in a run's folder."""
    return records(where / name)


def same(a, b):
    """Whether two dicts of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


ITERATED = TINY | dict(seed=3, temperature=0.8, reward="model", iterations=2, steps=3, save_every=4,
                        eval_every=2, warm_steps=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two iterations of three steps, with a learned reward. It saves after 0, 3, 4 and 6."""
    where = tmp_path_factory.mktemp("whole")
    seen = run(out=where, **ITERATED)
    seen.folder = where
    return seen


@pytest.fixture(scope="module", params=[3, 4])
def resumed(request, tmp_path_factory):
    """The same, killed in the step after one that it had saved, and resumed: between the iterations
    and within the second."""
    where = tmp_path_factory.mktemp("resumed")
    run(out=where, kill_at=request.param + 1, **ITERATED)
    assert [line["step"] for line in lines(where, "metrics.jsonl")] == list(range(request.param + 2))
    seen = run("--resume", out=where)
    seen.folder, seen.from_step = where, request.param
    return seen


def asked(seen, by):
    """The prompts that a function had completed, a list for each time."""
    return [prompts for who, _, prompts, _ in seen.prompts if who == by]


# ------------------------------------------------------------------------ which problems are seen

@pytest.mark.slow
def test_each_part_of_a_run_has_prompts_from_its_own_side(whole):
    """Held-out ones in the evaluation alone, which sees no other."""
    assert whole.problems == [HERE, AWAY]
    for by in ("refit_reward_model", "train_step"):
        assert set(sum(asked(whole, by), [])) <= set(HERE)
    assert set(sum(asked(whole, "evaluate"), [])) == set(AWAY)
    assert {p.prompt for (p, _), _ in whole.calls["demonstration"]} <= set(HERE)
    assert {by for by, *_ in whole.prompts} == {"refit_reward_model", "train_step", "evaluate"}


def test_all_completions_have_the_same_room_and_temperature_and_greedy_ones_are_an_evaluations(whole):
    parts = ("refit_reward_model", "train_step", "evaluate")
    assert whole.limits == {*((by, 6, 0.8, False) for by in parts), ("evaluate", 6, 0.8, True)}


def test_the_warm_start_imitates_demonstrations_of_training_problems(whole):
    """The rows that it learns are a prompt, its own demonstration and the end, from the end of the
    prompt on; and those are all that were demonstrated, before each problem is once for its note."""
    learned = []
    for (_, ids, mask, temperature), _ in whole.calls["warm"]:
        assert temperature == 1
        for row, on in zip(ids.tolist(), mask.tolist()):
            begin, end = on.index(True), len(on) - on[::-1].index(True)
            assert on[begin:end] == [True] * (end - begin) and row[end - 1] == 256
            learned.append((bytes(row[:begin]).decode(), bytes(row[begin:end - 1]).decode()))
    checked, *shown = [(p.prompt, text) for (p, _), text in whole.calls["demonstration"]]
    assert checked[0] == TRAIN[0].prompt                # before anything large is made
    noted = shown[20 * 48:]
    assert Counter(learned) == Counter(shown[:20 * 48]) and [prompt for prompt, _ in noted] == [p.prompt for p in TRAIN]
    answers = {p.prompt: p.answer for p in TRAIN}
    assert all(set(text) == {answers[prompt]} for prompt, text in learned)
    assert len({prompt for prompt, _ in shown}) > 20


def test_a_step_completes_other_problems_each_time_and_none_twice(whole):
    rollouts = [(prompts, group) for by, _, prompts, group in whole.prompts if by == "train_step"]
    assert len(rollouts) == 6 and all(len(set(prompts)) == 3 and group == 4 for prompts, group in rollouts)
    assert len({frozenset(prompts) for prompts, _ in rollouts}) > 4
    for (prompts, _), step in zip(rollouts, whole.steps.values()):
        assert [p.prompt for p in step.batch.problems] == [x for x in prompts for _ in range(4)]


def test_an_evaluation_asks_each_held_out_problem_once_greedily_and_in_k_samples(whole):
    for number in {at for by, at, *_ in whole.prompts if by == "evaluate"}:
        seen = [(x, group) for by, at, prompts, group in whole.prompts if by == "evaluate" and at == number
                for x in prompts]
        assert sorted(seen) == sorted((x, n) for x in AWAY for n in (1, 8))     # a greedy one, and samples
    assert len(whole.results) == 4 == whole.events.count("evaluation")      # after 0, 2, 4 and 6
    at_a_time = {len(prompts) * group for _, _, prompts, group in whole.prompts}
    assert max(at_a_time) == 3 * 4          # no more rows than a rollout has


def test_each_fit_labels_fresh_problems(whole):
    """No problem twice in a fit, and another choice of them in each."""
    first, second = (sum(x, []) for x in (fit_prompts(whole, 0), fit_prompts(whole, 1)))
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == 21
    assert set(first) != set(second)
    assert all(group == 2 for by, _, _, group in whole.prompts if by == "refit_reward_model")


def fit_prompts(seen, iteration):
    """The prompts completed for a fit, a list for each time."""
    at = seen.events.index(f"iteration {iteration}")
    return [prompts for by, number, prompts, _ in seen.prompts if (by, number) == ("refit_reward_model", at)]


def completions(rows):
    """Rows of a fit as (prompt, what follows), in order."""
    ids = [[x for x, on in zip(row, mask) if on] for row, mask in zip(rows["ids"].tolist(), rows["mask"].tolist())]
    return list(zip(texts(row[:3] for row in rows["ids"].tolist()), map(tuple, ids)))


def test_a_fit_learns_all_but_the_problems_that_it_is_measured_on(whole):
    """A tenth of the problems, whole ones, are set apart; to the rest come a tenth as many rows of
    history, in whole sets, from the second fit on. What one fit is measured on, none has learned:
    once the second one learned rows and problems that had been set apart in the first."""
    earlier, measured, learned = [], set(), set()
    for i, ((refit_args, _), (fit_args, _)) in enumerate(zip(whole.calls["refit"], whole.calls["fit"])):
        labelled, fitted = ([x for batch in refit_args[1] for x in completions(vars(batch))], completions(fit_args[1]))
        assert [x for x, _ in labelled] == [x for x in sum(fit_prompts(whole, i), []) for _ in range(2)]
        tested = [args for args, _ in whole.calls["scores"] if len(args[1]) == 4][i]
        tested = completions(dict(ids=tested[1], mask=tested[2]))
        assert len({x for x, _ in tested}) == 2 and Counter(tested + fitted[:38]) == Counter(labelled)
        replayed = fitted[38:]
        assert len(replayed) == (0, 2)[i]       # a tenth of 38 rows, down to whole sets of 2
        assert set(replayed) <= set(earlier) and len({x for x, _ in replayed}) <= 1
        measured |= {x for x, _ in tested}
        learned |= {x for x, _ in fitted}
        earlier += fitted[:38]
    assert i == 1 and len(whole.calls["replay"]) == 1 and measured.isdisjoint(learned)


# --------------------------------------------------------------------------------- what is logged

CLOCKS = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}


@pytest.mark.slow
def test_logs_after_a_resume_are_those_of_the_whole_run(whole, resumed):
    """Also where lines had been written after the checkpoint."""
    one, other = ([{n: x for n, x in line.items() if n not in CLOCKS} for line in lines(seen.folder, "metrics.jsonl")]
                  for seen in (whole, resumed))
    assert one == other
    one, other = ((seen.folder / "samples.jsonl").read_bytes() for seen in (whole, resumed))
    assert one == other


# --------------------------------------------------------------------------------- random streams

def test_each_purpose_and_step_has_a_random_stream_of_its_own(whole):
    """Each is opened once, but for the evaluation's, which begins anew every time; all by the run's
    own seed."""
    opened = Counter(whole.streams)
    each = dict(problems=range(1, 7), rollout=range(1, 7), update=range(1, 7), fit=range(2))
    for name, steps in each.items():
        assert [at for of, at in whole.streams if of == name] == [*steps]
    assert {of for of, n in opened.items() if n > 1} == {("evaluate", 0)} and opened["evaluate", 0] == 4
    assert whole.seeds == {3}


# ------------------------------------------------------------------------------------- iterations

def test_the_reference_moves_to_the_policy_at_the_start_of_an_iteration_alone(whole):
    first, second = whole.fits
    assert same(first.ref, whole.start) and same(first.policy, whole.start)
    assert same(second.ref, whole.steps[3].policy) and same(second.policy, whole.steps[3].policy)
    assert not same(first.ref, second.ref)
    for step, seen in whole.steps.items():
        assert same(seen.ref, (first if step <= 3 else second).ref) and not same(seen.ref, seen.policy)


def test_a_resumed_run_goes_on_in_its_iteration(whole, resumed):
    """It keeps the reference of the checkpoint, learns rewards only where an iteration begins, and
    makes the steps that are left, all to the bit."""
    left = range(resumed.from_step + 1, 7)
    fits = ["iteration 1"] * (resumed.from_step == 3)
    assert [x for x in resumed.events if x != "evaluation"] == [*fits, *(f"step {i}" for i in left)]
    for step in left:
        one, other = whole.steps[step], resumed.steps[step]
        assert same(one.ref, other.ref) and same(one.policy, other.policy)
        assert not same(other.ref, other.policy)
        assert one.batch.texts == other.batch.texts and torch.equal(one.batch.adv, other.batch.adv)
    assert {of for of, _ in resumed.streams if of in ("weights", "warm start")} == set()


def test_reward_model_and_history_are_carried_on(whole, resumed):
    """The second fit begins from the first one's model and rows; a resumed run has both."""
    assert not same(whole.fits[0].model, whole.fits[1].model)
    history = whole.calls["replay"][0][0][0]
    fitted = [completions(args[1])[:38] for args, _ in whole.calls["fit"]]
    assert completions(history) == fitted[0] and completions(whole.agent.history) == sum(fitted, [])
    assert same(weights(whole.agent.reward_model), weights(resumed.agent.reward_model))
    assert same(whole.fits[1].model, weights(whole.agent.reward_model))     # no step moves it
    assert same(whole.agent.history, resumed.agent.history) and len(whole.agent.history["ids"])
    one, other = (checkpoint.load(seen.folder, Config)[1].tensors for seen in (whole, resumed))
    assert same(one, other)


# ------------------------------------------------------------------------------------------ modes

def files_of(where):
    """Every file below a folder, and its bytes."""
    return {path: path.read_bytes() for path in where.rglob("*") if path.is_file()}


def test_eval_only_evaluates_all_held_out_problems_and_writes_nothing(whole, capsys):
    before = files_of(whole.folder)
    capsys.readouterr()
    seen = run("--eval_only", out=whole.folder)
    assert seen.events == ["evaluation"] and seen.results == whole.results[-1:]
    assert sorted(sum(asked(seen, "evaluate"), [])) == sorted(2 * AWAY) and len(asked(seen, "ask")) == 0
    want = "  ".join(f"{name} {whole.results[-1][name]:.1%}" for name in ("greedy", "pass@1", "pass@8", "maj@8"))
    assert capsys.readouterr().out == want + "\n" and files_of(whole.folder) == before


def test_ask_completes_the_question_alone_and_greedily(whole, capsys):
    """With the policy as the run left it, of which it changes no file."""
    before, seen = files_of(whole.folder), []
    for _ in range(2):
        capsys.readouterr()
        asking = run("--ask", "17=", out=whole.folder)
        seen.append(capsys.readouterr().out)
        assert [(by, *rest) for by, _, *rest in asking.prompts] == [("ask", ["17="], 1)] and not asking.events
    policy, ids = whole.agent.policy, list(b"17=")
    with torch.no_grad():
        while ids[-1] != 256 and len(ids) < 3 + 6:
            ids.append(policy.head(policy(torch.tensor([ids])))[0, -1].argmax().item())
    assert seen == [report.printable(bytes(x for x in ids if x < 256).decode("utf-8", "replace")) + "\n"] * 2
    assert files_of(whole.folder) == before


def test_resume_of_a_run_at_its_end_makes_no_step(whole):
    names = ("checkpoint.safetensors", "model.safetensors", "metrics.jsonl", "samples.jsonl")
    before = [(whole.folder / name).read_bytes() for name in names]
    seen = run("--resume", out=whole.folder)
    assert seen.events == seen.prompts == []
    assert [(whole.folder / name).read_bytes() for name in names] == before


# --------------------------------------------------------------------------------- every setting

LETTERS = """from types import SimpleNamespace
DEFAULTS = {{}}
def problems(difficulty=2):
    return [SimpleNamespace(prompt=c) for c in {letters!r}], [SimpleNamespace(prompt="z")]
def reward(problem, text): return {{"correct": float(len(text) % 2)}}
def answer(text): return text
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders and files that settings name, by name."""
    root = tmp_path_factory.mktemp("places")
    for name, seed in (("warm", 1), ("other", 2)):
        run(out=root / name, **TINY | dict(seed=seed, warm_steps=20, max_new=13, steps=0))
    chat_folder(root / "chat")
    for name in ("one", "two"):
        (root / f"{name}.py").write_text(LETTERS.format(letters=name))
        row = dict(question=f"What is {name}?", answer="It is 1. #### 1")
        (root / f"{name}.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    (root / "turns.py").write_text(LETTERS.format(letters="one") + """
def reply(problem, turns): return "?"
def answer(turns): return turns[-1]
def demonstration(problem, rng): return ["a"]
""")
    return {path.name: str(path) for path in root.iterdir()}


# Each setting: those of a run in which it is active, beside BASE; and other values of it, each with
# the first of STAGES at which its run differs from that one, or None. An @ names one of `places`.
# (upstream/test_settings.py checks that none of this repository's own settings is missing.)
STAGES = ("problems", "held out", "start", "fit", "compiled", "prompts", "samples", "rewards", "credit", "policy",
          "passes", "evaluations", "saves", "samples.jsonl", "folder")
BASE = TINY | dict(init="@warm", warm_steps=0, steps=1, samples=2, held_out=2)
COLD = dict(init="", warm_steps=3)                          # a new model, with a warm start
CRITIC = dict(baseline="value", epochs=3)
KL = dict(beta=0.5, epochs=2, steps=2)                     # in the first step it is 0 where it is a reward
FILES = dict(task="gsm8k", difficulty=None, train="@one.jsonl", test="@one.jsonl", init="", warm_steps=0, max_new=2)
SETTINGS = dict(
    task=(dict(task="@one.py", init="", warm_steps=0), {"@two.py": "problems"}),
    init=({}, {"@other": "start", "": "start"}),
    out=({}, {"elsewhere": "folder"}),
    algo=(dict(epochs=2, kl="none"), {"cispo": "policy", "opo": "credit"}),
    steps=({}, {2: "policy"}),
    prompts=({}, {4: "prompts"}),
    group=({}, {5: "samples"}),
    max_new=({}, {5: "samples"}),
    max_turns=(dict(task="@turns.py", init="", warm_steps=40), {1: "samples"}),
    lr=({}, {1e-3: "policy"}),
    seed=(COLD, {2: "start"}),
    chat=(dict(init="@chat"), {"none": "prompts", "think": "prompts", "no_think": "prompts"}),
    system=(dict(init="@chat"), {"Be brief.": "prompts"}),
    temperature=({}, {0.7: "samples"}),
    eval_every=(dict(steps=2), {1: "evaluations"}),
    held_out=({}, {3: "held out"}),
    samples=({}, {3: "evaluations"}),
    save_every=(dict(steps=3), {2: "saves"}),
    reward=(dict(supervision="process"), {"model": "fit", "rollouts": "fit"}),
    supervision=({}, {"process": "rewards"}),
    baseline=({}, {"none": "credit", "leave-one-out": "credit", "value": "credit", "group+value": "credit"}),
    adv_scale=({}, {"none": "credit", "batch": "credit"}),
    lam=(CRITIC, {0.5: "credit"}),
    critic=(CRITIC, {"separate": "policy"}),
    ratio=(dict(epochs=2), {"sequence": "policy"}),
    clip_low=(dict(epochs=2), {0.01: "policy"}),
    clip_high=(dict(epochs=2), {0.01: "policy"}),
    kl=(KL, {"reward": "policy", "watch": "policy", "none": "policy"}),
    estimator=(KL, {"k1": "policy", "k2": "policy", "ratio*k3": "policy"}),
    beta=({}, {0.5: "policy", 0: "policy"}),
    loss_mean=({}, {"token": "policy", "constant": "policy"}),
    iterations=({}, {2: "policy"}),
    epochs=({}, {2: "policy"}),
    minibatches=({}, {1: "policy"}),
    micro_tokens=({}, {20: "passes"}),
    recompute=({}, {True: "passes"}),
    half_life=(dict(steps=2), {1: "policy"}),
    n_layer=(COLD, {2: "start"}),
    n_embd=(COLD, {32: "start"}),
    warm_steps=(COLD, {4: "start"}),
    warm_lr=(COLD, {1e-3: "start"}),
    device=({}, {"auto": None}),
    dtype=({}, {"auto": None, "bfloat16": "samples"}),
    compile=({}, {True: "compiled"}),
    cache=(dict(minibatches=1), {"plain": None, "shared": None, "static": None}),     # of one update: a sampler rounds in its own way
    shard=({}, {True: None}))
OWN = dict(difficulty=({}, {2: "problems"}), train=(FILES, {"@two.jsonl": "problems"}), test=(FILES, {"@two.jsonl": "held out"}))
TURNS = [(name, value) for name, (_, values) in (SETTINGS | OWN).items() for value in values]


def stages(seen, where):
    """What there was at each of STAGES: of the first step where each step has its own."""
    batch = seen.steps[1].batch
    prompts = [row[:begin] for row, begin in zip(batch.ids.tolist(), batch.start.tolist())]
    found = [*seen.problems, seen.start, [[fit.measures, fit.model] for fit in seen.fits[:1]], seen.compiled,
             prompts[::len(prompts) // seen.agent.cfg.prompts], [batch.ids, batch.logp],
             [batch.reward, batch.ends], batch.adv, weights(seen.agent.policy), seen.passes,
             [[i for i, x in enumerate(seen.events) if x == "evaluation"],
              [rows for by, *_, rows in seen.prompts if by == "evaluate"]], seen.saved,
             [line["step"] for path in where.rglob("samples.jsonl") for line in lines(path.parent, path.name)],
             [str(path.parent.relative_to(where)) for path in where.rglob("run.json")]]
    return dict(zip(STAGES, found, strict=True))


def alike(a, b):
    """Whether two stages are equal, their numbers up to rounding."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-5, 1e-5)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[n], b[n]) for n in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


@pytest.fixture(scope="module")
def made(places, tmp_path_factory):
    """The stages of a run by its settings, each made once; it is in the folder where it was
    started, if its settings do not say."""
    known = {}

    def of(settings):
        """Those of a run with BASE and some settings."""
        settings = BASE | settings
        if (key := tuple(sorted(settings.items(), key=str))) not in known:
            where = tmp_path_factory.mktemp("made")
            given = {name: places[x[1:]] if str(x)[:1] == "@" else x for name, x in settings.items() if x is not None}
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(where)
                known[key] = stages(run(**given), where)
        return known[key]
    return of


@pytest.mark.slow
@pytest.mark.parametrize("name, value", TURNS, ids=[f"{name}={value}" for name, value in TURNS])
def test_a_setting_changes_what_it_should_and_nothing_before_it(name, value, made):
    base, values = (SETTINGS | OWN)[name]
    if name == "device" and dist.device_of(Config(device=value)).type != "cpu":
        pytest.skip("there is a better device than the CPU")
    one, other = made(base), made(base | {name: value})
    changed = [stage for stage in STAGES if not alike(one[stage], other[stage])]
    assert changed[:1] == [values[value]] * (values[value] is not None)


@pytest.mark.parametrize("name", ["baseline", "adv_scale", "kl", "estimator", "loss_mean"])
def test_choices_differ_from_each_other(name, made):
    """In where they lead; but watching a KL leads where none does."""
    base, values = (SETTINGS | OWN)[name]
    for a, b in itertools.combinations(values, 2):
        one, other = (made(base | {name: value})["policy"] for value in (a, b))
        assert alike(one, other) is ({a, b} == {"watch", "none"}), (a, b)
