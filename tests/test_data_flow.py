"""Who sees what, and which setting moves what: whole runs through `main`, watched by wrappers that
call through. First a run of two iterations, whole and resumed; then each setting, in a run where
it is active."""
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
from run import checkpoint, config, dist, files, passes, setup, show, warm_start

# ------------------------------------------------------------------------------- a task, and runs

PROBLEMS = [SimpleNamespace(prompt=f"{i:02d}=", answer="ab"[i % 2]) for i in range(30)]
TRAIN, HELD_OUT = PROBLEMS[4:28], PROBLEMS[:4]
SPARE = PROBLEMS[28:]           # problems of another difficulty
HERE, AWAY = ([p.prompt for p in part] for part in (TRAIN, HELD_OUT))
TASK = SimpleNamespace(
    DEFAULTS={}, answer=lambda text: text[:1],
    problems=lambda difficulty=2: (TRAIN + SPARE[:difficulty - 1], HELD_OUT),
    demonstration=lambda problem, rng: problem.answer * rng.randrange(1, 5),
    reward=lambda problem, text: {"correct": float(text[:1] == problem.answer),
                                  "style": 0.1 * len(set(text)) + len(text) / 99},
    steps=lambda problem, text: [(i + 1, x == problem.answer) for i, x in enumerate(text)])
TINY = dict(difficulty=1, n_layer=1, n_embd=16, warm_steps=3, warm_lr=3e-2, prompts=3, group=4,
            max_new=6, minibatches=2, micro_tokens=1000, steps=2, lr=1e-2, device="cpu",
            dtype="float32", compile=False)
PARTS = ("refit_reward_model", "train_step", "evaluate")


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
    """From now on `look(args, got)` sees each call of a function; `seen.within` names those that
    are at work."""
    real = getattr(module, name)

    def wrapper(*args, **given):
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
        *_, policy, train, held_out = got
        seen.problems = [[p.prompt for p in part] for part in (train, held_out)]
        seen.start = weights(policy)

    def sampled(args, got):
        """Prompts by the outermost function that asked, and the number of completions of each."""
        by = next((x for x in seen.within if x in PARTS), "ask")
        seen.prompts.append((by, len(seen.events), texts(args[1]), args[2]))
        greedy = len(args) < 7 or args[6] is None
        seen.limits |= {(by, room, args[4], greedy) for room in args[3]}

    def models(agent):
        return dict(policy=weights(agent.policy), ref=weights(agent.ref),
                    model=weights(agent.reward_model))

    def begun(args, got):
        seen.events.append(f"iteration {args[2]}")
        seen.fits.append(SimpleNamespace(measures=dict(got), **models(args[0])))

    def stepped(args, got):
        seen.agent = args[0]
        seen.events.append(f"step {args[2]}")
        seen.steps[args[2]] = SimpleNamespace(batch=got[0], **models(args[0]))

    def measured(args, got):
        seen.events.append("evaluation")
        seen.results.append(got)

    def logged(args, got):
        """A line of a log; the end, if this is where the run is to be killed."""
        if args[0].name == "metrics.jsonl" and args[1]["step"] == kill_at:
            raise Killed

    def saved(args, got):
        seen.saved.append(args[1])

    def scored(args, got):
        if "warm_start" in seen.within:
            seen.learned.append(args)

    def drawn(args, got):
        seen.streams.append((args[1], args[2] if len(args) > 2 else 0))
        seen.seeds.add(args[0].seed)

    def demonstrated(args, got):
        seen.shown.append((args[0].prompt, got))

    def passed(layer, *given):
        """Of one made again autograd may need no more than the beginning."""
        seen.passes += "update" in seen.within
        return forward(layer, *given)

    def compiled(function, **options):
        seen.compiled += 1
        return function

    def nothing(args, got):
        """Only `within` counts."""

    forward = model.Block.forward
    for module, name, look in (
            (setup, "begin", began), (grpo, "sample", sampled), (grpo, PARTS[0], begun),
            (grpo, PARTS[1], stepped), (grpo, PARTS[2], measured), (grpo, "update", nothing),
            (files, "append", logged), (checkpoint, "save", saved), (dist, "rng", drawn),
            (warm_start, "warm_start", nothing), (passes, "token_logps", scored),
            (TASK, "demonstration", demonstrated)):
        after(patch, module, name, look, seen)
    patch.setattr(model.Block, "forward", passed)
    for place in (torch.nn.Module, torch):
        patch.setattr(place, "compile", compiled)


def run(*mode, kill_at=None, **settings):
    """`main` with a mode and settings as flags, watched; without a task among them, of TASK."""
    seen = SimpleNamespace(
        within=[], prompts=[], events=[], fits=[], steps={}, results=[], saved=[], streams=[],
        learned=[], shown=[], seeds=set(), limits=set(), passes=0, compiled=0)
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


def same(a, b):
    """Whether two dicts of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


ITERATED = TINY | dict(seed=3, temperature=0.8, reward="model", iterations=2, steps=3,
                       save_every=4, eval_every=2, warm_steps=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two iterations of three steps, with a learned reward. It saves after 0, 3, 4, 6."""
    where = tmp_path_factory.mktemp("whole")
    seen = run(out=where, **ITERATED)
    seen.folder = where
    return seen


@pytest.fixture(scope="module", params=[3, 4])
def resumed(request, tmp_path_factory):
    """The same, killed in the step after one that it had saved, and resumed: between the
    iterations and within the second."""
    where = tmp_path_factory.mktemp("resumed")
    run(out=where, kill_at=request.param + 1, **ITERATED)
    lines = records(where / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(request.param + 2)]
    seen = run("--resume", out=where)
    seen.folder, seen.from_step = where, request.param
    return seen


def asked(seen, by):
    """The prompts that a function had completed, a list for each time."""
    return [prompts for who, _, prompts, _ in seen.prompts if who == by]


# ------------------------------------------------------------------------ which problems are seen

@pytest.mark.slow
def test_each_part_of_a_run_has_prompts_from_its_own_side(whole):
    """Held-out ones in the evaluation alone, which sees no other; all have the same room and
    temperature, and greedy ones are an evaluation's."""
    assert whole.problems == [HERE, AWAY]
    for by in PARTS[:2]:
        assert {*sum(asked(whole, by), [])} <= {*HERE}
    assert {*sum(asked(whole, "evaluate"), [])} == {*AWAY}
    assert {prompt for prompt, _ in whole.shown} <= {*HERE}
    everything = {(by, 6, 0.8, False) for by in PARTS} | {("evaluate", 6, 0.8, True)}
    assert whole.limits == everything


def test_the_warm_start_imitates_demonstrations_of_training_problems(whole):
    """Its rows are a prompt, its own demonstration and the end, from the end of the prompt on;
    all that were demonstrated, before each problem is once for its note."""
    learned = []
    for _, ids, mask, temperature in whole.learned:
        assert temperature == 1
        for row, on in zip(ids.tolist(), mask.tolist()):
            begin, end = on.index(True), len(on) - on[::-1].index(True)
            assert all(on[begin:end]) and row[end - 1] == 256
            learned.append((bytes(row[:begin]).decode(), bytes(row[begin:end - 1]).decode()))
    checked, *shown = whole.shown
    assert checked[0] == TRAIN[0].prompt                # before anything large is made
    assert Counter(learned) == Counter(shown[:20 * 48])
    assert [prompt for prompt, _ in shown[20 * 48:]] == HERE
    answers = {p.prompt: p.answer for p in TRAIN}
    assert all({*text} == {answers[prompt]} for prompt, text in learned)
    assert len({prompt for prompt, _ in shown}) > 20


def test_a_step_completes_other_problems_each_time_and_none_twice(whole):
    rollouts = asked(whole, "train_step")
    assert len(rollouts) == 6 and all(len({*prompts}) == 3 for prompts in rollouts)
    assert len({frozenset(prompts) for prompts in rollouts}) > 4
    for prompts, step in zip(rollouts, whole.steps.values()):
        assert [p.prompt for p in step.batch.problems] == [x for x in prompts for _ in range(4)]


def test_an_evaluation_asks_each_held_out_problem_once_greedily_and_in_k_samples(whole):
    """After the steps 0, 2, 4 and 6. No part has more rows at a time than a rollout, 12."""
    for number in {at for by, at, *_ in whole.prompts if by == "evaluate"}:
        seen = [(x, group) for by, at, prompts, group in whole.prompts
                if by == "evaluate" and at == number for x in prompts]
        assert sorted(seen) == sorted((x, n) for x in AWAY for n in (1, 8))
    assert len(whole.results) == 4 == whole.events.count("evaluation")
    rows = [(by, len(prompts) * group) for by, _, prompts, group in whole.prompts]
    assert [max(n for who, n in rows if who == by) for by in PARTS] == [12, 12, 8]


# ------------------------------------------------------------------------- a run that is resumed

@pytest.mark.slow
def test_logs_after_a_resume_are_those_of_the_whole_run(whole, resumed):
    """Also where lines had been written after the checkpoint."""
    clocks = {"seconds", "reward_seconds", "rollout_tok_s", "update_tok_s"}
    one, other = ([{n: x for n, x in line.items() if n not in clocks}
                   for line in records(seen.folder / "metrics.jsonl")] for seen in (whole, resumed))
    assert one == other
    one, other = ((seen.folder / "samples.jsonl").read_bytes() for seen in (whole, resumed))
    assert one == other


def test_each_purpose_and_step_has_a_random_stream_of_its_own(whole):
    """Each is opened once, but for the evaluation's, which begins anew every time; by the seed."""
    each = dict(problems=range(1, 7), rollout=range(1, 7), update=range(1, 7), fit=range(2))
    for name, steps in each.items():
        assert [at for of, at in whole.streams if of == name] == [*steps]
    opened = Counter(whole.streams)
    assert {of: n for of, n in opened.items() if n > 1} == {("evaluate", 0): 4}
    assert whole.seeds == {3}


def test_the_reference_moves_to_the_policy_at_the_start_of_an_iteration_alone(whole):
    first, second = whole.fits
    assert same(first.ref, whole.start) and same(first.policy, whole.start)
    assert same(second.ref, whole.steps[3].policy) and same(second.policy, second.ref)
    for step, seen in whole.steps.items():
        assert same(seen.ref, (first if step <= 3 else second).ref)
        assert not same(seen.ref, seen.policy)


def test_a_resumed_run_goes_on_in_its_iteration(whole, resumed):
    """With the reference, the reward model and its history; it learns rewards only where an
    iteration begins, and makes the steps that are left, all to the bit."""
    left = range(resumed.from_step + 1, 7)
    fits = ["iteration 1"] * (resumed.from_step == 3)
    steps = [x for x in resumed.events if x != "evaluation"]
    assert steps == [*fits, *(f"step {i}" for i in left)]
    for step in left:
        one, other = whole.steps[step], resumed.steps[step]
        assert same(one.ref, other.ref) and same(one.policy, other.policy)
        assert one.batch.texts == other.batch.texts and torch.equal(one.batch.adv, other.batch.adv)
    assert not {"weights", "warm start"} & {name for name, _ in resumed.streams}
    one, other = (seen.agent for seen in (whole, resumed))
    assert same(weights(one.reward_model), weights(other.reward_model))
    assert same(one.history, other.history) and len(one.history["ids"])
    assert not same(whole.fits[0].model, whole.fits[1].model)
    assert same(whole.fits[1].model, weights(one.reward_model))         # no step moves it
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
    assert sorted(sum(asked(seen, "evaluate"), [])) == sorted(2 * AWAY) and not asked(seen, "ask")
    names = ("greedy", "pass@1", "pass@8", "maj@8")
    want = "  ".join(f"{name} {whole.results[-1][name]:.1%}" for name in names)
    assert capsys.readouterr().out == want + "\n" and files_of(whole.folder) == before


def test_ask_completes_the_question_alone_and_greedily(whole, capsys):
    """With the policy as the run left it, of which it changes no file."""
    before, policy, ids = files_of(whole.folder), whole.agent.policy, list(b"17=")
    with torch.no_grad():
        while ids[-1] != 256 and len(ids) < 3 + 6:
            h = policy(torch.tensor([ids]))
            ids.append(policy.head(h)[0, -1].argmax().item())
    capsys.readouterr()
    asking = run("--ask", "17=", out=whole.folder)
    assert capsys.readouterr().out == show.printable(texts([ids])[0]) + "\n"
    assert [(by, *rest) for by, _, *rest in asking.prompts] == [("ask", ["17="], 1)]
    assert not asking.events and files_of(whole.folder) == before


def test_resume_of_a_run_at_its_end_makes_no_step(whole):
    before = files_of(whole.folder)
    seen = run("--resume", out=whole.folder)
    assert seen.events == seen.prompts == []
    changed = {path.name for path, x in files_of(whole.folder).items() if before[path] != x}
    assert changed <= {"report.html", "run.json"}


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
STAGES = ("problems", "held out", "start", "fit", "compiled", "prompts", "samples", "rewards",
          "credit", "policy", "passes", "evaluations", "saves", "samples.jsonl", "folder")
BASE = TINY | dict(init="@warm", warm_steps=0, steps=1, samples=2, held_out=2)
COLD = dict(init="", warm_steps=3)                          # a new model, with a warm start
CRITIC = dict(baseline="value", epochs=3)
KL = dict(beta=0.5, epochs=2, steps=2)       # in the first step it is 0 where it is a reward
FILES = dict(task="gsm8k", difficulty=None, train="@one.jsonl", test="@one.jsonl", init="",
             warm_steps=0, max_new=2)
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
    baseline=({}, {x: "credit" for x in ("none", "leave-one-out", "value", "group+value")}),
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
    # Of one update: a sampler rounds in its own way.
    cache=(dict(minibatches=1), {"plain": None, "shared": None, "static": None}),
    shard=({}, {True: None}))
OWN = dict(difficulty=({}, {2: "problems"}), train=(FILES, {"@two.jsonl": "problems"}),
           test=(FILES, {"@two.jsonl": "held out"}))
TURNS = [(name, value) for name, (_, values) in (SETTINGS | OWN).items() for value in values]


def stages(seen, where):
    """What there was at each of STAGES: of the first step where each step has its own."""
    batch = seen.steps[1].batch
    prompts = [row[:begin] for row, begin in zip(batch.ids.tolist(), batch.start.tolist())]
    fits = [[fit.measures, fit.model] for fit in seen.fits[:1]]
    found = [*seen.problems, seen.start, fits, seen.compiled,
             prompts[::len(prompts) // seen.agent.cfg.prompts], [batch.ids, batch.logp],
             [batch.reward, batch.ends], batch.adv, weights(seen.agent.policy), seen.passes,
             [[i for i, x in enumerate(seen.events) if x == "evaluation"],
              [rows for by, *_, rows in seen.prompts if by == "evaluate"]], seen.saved,
             [line["step"] for path in where.rglob("samples.jsonl") for line in records(path)],
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
            given = {name: places[x[1:]] if str(x)[:1] == "@" else x
                     for name, x in settings.items() if x is not None}
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
