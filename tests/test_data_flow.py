"""Who sees what, and which setting moves what: whole runs through `main`, whose functions note what
they were given and gave. First a run of two iterations, whole and resumed; then each setting, in a
run where it is active."""
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import Killed, chat_folder, contents, flags, float64, metrics, records, same

import grpo
import model
import reward
from grpo import Agent, Config
from run import checkpoint, config, dist, files, report, setup

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
            max_new=6, minibatches=2, micro_tokens=1000, steps=2, lr=1e-2, dtype="float32")
MODELS = ("policy", "ref", "reward_model")
PARTS = ("refit", "train_step", "evaluate")
NOTED = ((setup, "begin"), (grpo, "sample"), (reward, "refit"), (grpo, "train_step"),
         (report, "evaluate"), (grpo, "update"), (files, "append"), (checkpoint, "save"),
         (dist, "rng"), (TASK, "demonstration"))


@pytest.fixture(autouse=True, scope="module")
def small_fits():
    """Of two completions a problem, of 21 problems."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "CHOICES", 2)
        patch.setattr(reward, "FIT_STEPS", 7)
        yield


def weights(module):
    return {} if module is None else {n: p.detach().clone() for n, p in module.named_parameters()}


def texts(rows):
    return [bytes(x for x in ids if x < 256).decode("utf-8", "replace") for ids in rows]


class Seen(list):
    """Calls of the functions NOTED."""
    within, passes = (), 0

    def of(self, name, by=None):
        return [x for x in self if x.name == name and by in (None, x.by)]

    def events(self):
        return [(x.name, *[n for n in x.args[2:3] if isinstance(n, int)]) for x in self
                if x.name in PARTS]

    def prompts(self, by):
        return [prompt for x in self.of("sample", by) for prompt in texts(x.args[1])]

    def note(self, patch, module, name, kill_at):
        real = getattr(module, name)

        def wrapper(*args, **given):
            self.within = (*self.within, name)
            try:
                got = real(*args, **given)
            finally:
                *self.within, _ = self.within
            by = next((x for x in self.within if x in PARTS), "ask")
            agent = Agent(*got[:4]) if name == "begin" else args[0]
            models = {x: weights(getattr(agent, x, None)) for x in MODELS}
            self.append(SimpleNamespace(name=name, by=by, args=args, got=got, **models))
            if name == "append" and args[0].name == "metrics.jsonl" and args[1]["step"] == kill_at:
                raise Killed
            return got
        patch.setattr(module, name, wrapper)


def run(*mode, kill_at=None, **settings):
    """`main` with a mode and settings as flags. It ends with the line of the step `kill_at`."""
    seen, forward = Seen(), model.Block.forward

    def passed(layer, *given):
        seen.passes += "update" in seen.within
        return forward(layer, *given)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in NOTED:
            seen.note(patch, module, name, kill_at)
        patch.setattr(model.Block, "forward", passed)
        for module in (config, setup):
            patch.setattr(module, "load_task", lambda name: TASK)
        with contextlib.suppress(Killed):
            grpo.main([*mode, *flags(settings)])
    return seen


ITERATED = TINY | dict(seed=3, temperature=0.8, reward="model", iterations=2, steps=3,
                       save_every=4, eval_every=2, warm_steps=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two iterations of three steps, with a learned reward. It saves after 3, 4, 6."""
    where = tmp_path_factory.mktemp("whole")
    seen = run(out=where, **ITERATED)
    seen.folder = where
    return seen


@pytest.mark.slow
def test_each_part_of_a_run_has_prompts_from_its_own_side(whole):
    """Held-out ones in the evaluation alone; greedy ones are an evaluation's."""
    problems = whole.of("begin")[0].got[4:]
    assert [[p.prompt for p in part] for part in problems] == [HERE, AWAY]
    assert {*whole.prompts("refit"), *whole.prompts("train_step")} <= {*HERE}
    assert {x.args[0].prompt for x in whole.of("demonstration")} == {*HERE}
    assert {*whole.prompts("evaluate")} == {*AWAY}
    limits = {(x.by, *{*x.args[3]}, x.args[4], x.args[6] is None) for x in whole.of("sample")}
    assert limits == {(by, 6, 0.8, False) for by in PARTS} | {("evaluate", 6, 0.8, True)}


def test_an_evaluation_asks_each_held_out_problem_once_greedily_and_in_k_samples(whole):
    """No part has more rows at a time than a rollout, 12."""
    asked = Counter((prompt, x.args[2]) for x in whole.of("sample", "evaluate")
                    for prompt in texts(x.args[1]))
    assert asked == {(x, n): 4 for x in AWAY for n in (1, 8)}
    at = [i for i, x in enumerate(whole.events()) if x == ("evaluate",)]
    assert at == [0, 4, 8, 11]
    streams = Counter((*x.args[1:], 0)[:2] for x in whole.of("rng"))
    assert {of: n for of, n in streams.items() if n > 1} == {("evaluate", i): 4 for i in range(4)}
    rows = [[len(x.args[1]) * x.args[2] for x in whole.of("sample", by)] for by in PARTS]
    assert [*map(max, rows)] == [12, 12, 8]


def test_the_reference_moves_to_the_policy_at_the_start_of_an_iteration_alone(whole):
    first, second = whole.of("refit")
    steps = whole.of("train_step")
    assert same(first.ref, whole.of("begin")[0].policy) and same(second.ref, steps[2].policy)
    for step, fit in zip(steps, [first] * 3 + [second] * 3, strict=True):
        assert same(step.ref, fit.ref) and not same(step.ref, step.policy)


@pytest.mark.slow
@pytest.mark.parametrize("last", [3, 4])
def test_a_resumed_run_goes_on_in_its_iteration(last, whole, tmp_path):
    """Killed in the step after one that it had saved, between the iterations or within one."""
    run(out=tmp_path, kill_at=last + 1, **ITERATED)
    assert [line["step"] for line in metrics(tmp_path)] == [*range(last + 2)]
    seen = run("--resume", out=tmp_path)
    fits = [("refit", 1)] * (last == 3)
    left = [x for x in seen.events() if x != ("evaluate",)]
    assert left == [*fits, *(("train_step", i) for i in range(last + 1, 7))]
    assert not {"weights", "warm start"} & {x.args[1] for x in seen.of("rng")}
    steps = whole.of("train_step")
    assert not same(steps[2].reward_model, steps[3].reward_model)
    assert len(steps[0].args[0].history["ids"]) == 2 * 38
    one, other = (checkpoint.load(x, Config)[1].tensors for x in (whole.folder, tmp_path))
    assert same(one, other) and one.keys() > {"history.ids", "reward_model.norm"}
    assert metrics(whole.folder) == metrics(tmp_path)
    one, other = (records(x / "samples.jsonl") for x in (whole.folder, tmp_path))
    assert one == other and [x["step"] for x in one] == [1, 1, 4, 4, 6, 6]


def test_eval_only_evaluates_all_held_out_problems_and_writes_nothing(whole, capsys):
    before = contents(whole.folder)
    capsys.readouterr()
    seen = run("--eval_only", out=whole.folder)
    assert seen.events() == [("evaluate",)] and sorted(seen.prompts(None)) == sorted(2 * AWAY)
    found = whole.of("evaluate")[-1].got
    assert seen.of("evaluate")[0].got == found
    names = ("greedy", "pass@1", "pass@8", "maj@8")
    want = "  ".join(f"{name} {found[name]:.1%}" for name in names)
    want += f"  of {len(AWAY)} problems"
    shown, said = capsys.readouterr().out.splitlines()
    [text, *_] = texts(seen.of("sample")[0].got.ids.tolist())
    assert shown.startswith(f"    {report.on_one_line(text)}") and said == want
    assert contents(whole.folder) == before


def test_ask_completes_the_question_alone_and_greedily(whole, capsys):
    """With the policy as the run left it, of which it changes no file."""
    before, policy = contents(whole.folder), whole.of("train_step")[-1].args[0].policy
    for question, room, after in (("17=", 6, ""), ("\x01", 2, "\n(cut off after 2 tokens)")):
        capsys.readouterr()
        seen, n = run("--ask", question, out=whole.folder, max_new=room), len(question)
        ids = seen.of("sample")[0].got.ids
        assert capsys.readouterr().out == report.printable(texts(ids.tolist())[0]) + after + "\n"
        with torch.no_grad():
            logits = policy.head(policy(ids))[0, n - 1:-1]
        lost = logits.amax(1) - logits.gather(1, ids[0, n:, None])[:, 0]
        assert lost.max() < 1e-4 and (len(lost) == room or ids[0, -1] == 256)
        assert seen.prompts(None) == [question] and not seen.events()
    assert contents(whole.folder) == before


# ---------- every setting

# Each setting that test_oracle.py does not compare: those of a run in which it is active, beside
# BASE; and other values, each with the first of STAGES at which its run differs from that one, or
# None.
STAGES = ("problems", "held out", "start", "prompts", "samples", "policy", "passes", "evaluations",
          "saves")
BASE = TINY | dict(warm_steps=20, steps=1, samples=2, held_out=2)
SETTINGS = dict(
    seed=({}, {0: "start"}),
    chat=(dict(init="chat", warm_steps=0), {"none": "prompts", "think": "prompts"}),
    system=(dict(init="chat", warm_steps=0), {"Be brief.": "prompts"}),
    held_out=({}, {3: "held out"}),
    samples=({}, {3: "evaluations"}),
    save_every=(dict(steps=3), {2: "saves"}),
    micro_tokens=({}, {20: "passes"}),
    recompute=({}, {True: "passes"}),
    n_layer=({}, {2: "start"}),
    n_embd=({}, {32: "start"}),
    warm_steps=({}, {19: "start"}),
    warm_lr=({}, {1e-3: "start"}),
    dtype=(dict(init="chat", warm_steps=0), {"auto": None, "bfloat16": "samples"}),
    cache=(dict(minibatches=1), {"plain": None, "shared": None, "static": None}),
    shared_prefixes=({}, {False: None}),
    difficulty=({}, {2: "problems"}))
TURNS = [(name, value) for name, (_, values) in SETTINGS.items() for value in values]


def stages(seen):
    [begin], (step, *_) = seen.of("begin"), seen.of("train_step")
    agent, batch = step.args[0], step.got[0]
    prompts = [row[:begin] for row, begin in zip(batch.ids.tolist(), batch.start.tolist())]
    found = [*([p.prompt for p in part] for part in begin.got[4:]), begin.policy,
             prompts[::len(prompts) // agent.cfg.prompts], [batch.ids, batch.logp],
             weights(agent.policy), seen.passes,
             [[x == ("evaluate",) for x in seen.events()],
              [x.args[2] for x in seen.of("sample", "evaluate")]],
             [x.args[1] for x in seen.of("save")]]
    return dict(zip(STAGES, found, strict=True))


def alike(a, b):
    """Up to rounding."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-5, 1e-5)
    if isinstance(a, dict):
        a, b = [*a.items()], [*b.items()]
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The stages of a run with BASE and some settings, in the folder where it was started; in
    float64: Adam divides a gradient that is all rounding by its own size."""
    known = {}

    def of(settings):
        if (key := str(sorted(settings.items()))) not in known:
            where = tmp_path_factory.mktemp("made")
            chat_folder(where / "chat")
            halves = settings.get("dtype") == "bfloat16"        # of 64 bits there are none
            exact = contextlib.nullcontext() if halves else float64()
            with pytest.MonkeyPatch.context() as patch, exact:
                patch.chdir(where)
                known[key] = stages(run(**BASE | settings))
        return known[key]
    return of


@pytest.mark.slow
@pytest.mark.parametrize("name, value", TURNS, ids=[f"{name}={value}" for name, value in TURNS])
def test_a_setting_changes_what_it_should_and_nothing_before_it(name, value, made):
    base, values = SETTINGS[name]
    one, other = made(base), made(base | {name: value})
    changed = [stage for stage in STAGES if not alike(one[stage], other[stage])]
    assert changed[:1] == [values[value]] * (values[value] is not None)
