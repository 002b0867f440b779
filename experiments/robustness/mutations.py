"""Mutation testing: changes the code in one place at a time, and runs the tests that reach the place.

    pip install -r tests/requirements-peers.txt
    python experiments/robustness/mutations.py                     # all files: hours; an interrupted run continues
    python experiments/robustness/mutations.py reward.py           # only these files
    python experiments/robustness/mutations.py --again grpo.py     # what was not caught, with more tests
    python experiments/robustness/mutations.py --sample 6          # as many of each file, drawn at random
    python experiments/robustness/mutations.py --sample 6 --seed 1      # others
    python experiments/robustness/mutations.py --readme            # write mutations.md from the results

Some mutations are cosmic-ray's: another operator, comparison or number, a negated condition, a loop that ends at
once, a removed decorator, another exception. An operator is replaced only by the nearest ones, since any test
catches the others. Others are slips of a person: two arguments or names exchanged, a statement, an element of a
literal or a conversion left out, the variable with the most similar name, the two branches exchanged. A third kind
is of state: two writes exchanged, a sum over one rank alone, a part of a union left out.
mutations.md has the sample of seed 1. Tests that compare the source's text would catch every mutation and are left
out. Results are kept in out/mutations/, under the text of the mutated line. Processes that a test starts,
such as the ranks of tests/test_ranks.py, are not watched.
"""
import argparse
import ast
import difflib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import cosmic_ray.plugins
import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOUND = ROOT / "out" / "mutations"
FILES = ["grpo.py", "reward.py", "model.py", "run/setup.py", "run/passes.py", "run/caches.py", "run/dist.py", "run/pretrained.py",
         "run/pretrained.py", "run/checkpoint.py", "run/files.py", "run/setup.py", "run/setup.py", "run/report.py", "run/report.py",
         "run/config.py", "data/__init__.py", "data/answers.py", "data/arithmetic.py", "data/tokenizer.py", "data/chat.py",
         "data/countdown.py", "data/gsm8k.py", "data/guess.py", "experiments/models/sums_task.py", "data/tokenizer.py", "data/turns.py",
         *sorted(f"experiments/variants/{path.name}" for path in (ROOT / "experiments" / "variants").glob("*.py"))]
BY_TEXT = ["tests/test_layout.py", *(f"tests/upstream/test_{name}.py" for name in ("changing", "docs", "lengths", "style"))]
NEAREST = """Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitOr_BitAnd BitAnd_BitOr
             Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt Gt_Lt LtE_GtE GtE_LtE Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is
             USub_UAdd Delete_Invert Delete_Not""".split()
ALONE = ["AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
         "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer",
         "RemoveDecorator", "ZeroIterationForLoop"]
BUDGET, MORE = 15, 120              # seconds of tests per mutation, at first and with --again


# ------------------------------------------------------------------------------------ mutations
def operators():
    for name in cosmic_ray.plugins.operator_names():
        short = name.partition("/")[2]
        if short in ALONE or short.startswith("Replace") and short.partition("_")[2] in NEAREST:
            yield short, cosmic_ray.plugins.get_operator(name)()


SYMMETRIC = "max min maximum minimum transpose rng".split()
OF_RANKS = "all_reduce full for_the_first_rank of_rank".split()
CONVERSIONS = "to detach clone float double long bool cpu contiguous clamp abs copy strip lower any all flatten".split()


def slips(tree, code):
    """The slips of a person: (operator, node or (first node, last node), new text in its place)."""
    begins, text = line_begins(code), code.encode()

    def source(node):
        """The text of a node."""
        first, last = span(begins, node, node)
        return text[first:last].decode()

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from similar_names(node)
        for body in ("body", "orelse", "finalbody"):
            yield from statements_left_out(getattr(node, body, None))
            yield from writes_exchanged(getattr(node, body, None), source)
        if isinstance(node, ast.Call):
            yield from slips_of_call(node, source)
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in OF_RANKS and node.args:
                yield "one rank alone", node, source(node.args[0])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield "part left out", node, source(node.left)
            yield "part left out", node, source(node.right)
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
            for a, b in zip(node.elts, node.elts[1:]):
                yield ("names exchanged", (a, b), f"{source(b)}, {source(a)}") if stored else ("element left out", (a, b), source(b))
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys[:-1], node.values):
                if key:
                    yield "element left out", (key, value), "**{}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and f"{source(node)}.split()" in code:
            for word in node.value.split():
                yield "element left out", node, re.sub(rf"(?<!\S){re.escape(word)}(?!\S)", "", source(node), count=1)
        if isinstance(node, ast.IfExp):
            yield "branches exchanged", (node.body, node.orelse), f"{source(node.orelse)} if {source(node.test)} else {source(node.body)}"


def writes_exchanged(body, source):
    """Neighbouring statements that write, to a file or to what outlives them, in the other order."""
    body = body if isinstance(body, list) else []
    for a, b in zip(body, body[1:]):
        if is_write(a) and is_write(b):
            yield "writes exchanged", (a, b), f"{source(b)}\n{' ' * a.col_offset}{source(a)}"


def is_write(x):
    called = isinstance(x, ast.Expr) and isinstance(x.value, ast.Call)
    return called or isinstance(x, ast.Assign) and isinstance(x.targets[0], (ast.Attribute, ast.Subscript))


def similar_names(function):
    """Each variable that a function reads, with the one of its variables that has the most similar name."""
    names = [a.arg for a in function.args.args]
    names += sorted({n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})
    for n in ast.walk(function):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names:
            for near in difflib.get_close_matches(n.id, [x for x in names if x != n.id], 1):
                yield "similar name", n, near


def statements_left_out(body):
    """The statements of a body without which the others still have their names."""
    for x in body if isinstance(body, list) else ():
        docstring = isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
        stored = isinstance(x, ast.Assign) and not isinstance(x.targets[0], (ast.Name, ast.Tuple))
        if stored or isinstance(x, (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)) and not docstring:
            yield "statement left out", x, "pass"


def slips_of_call(call, source):
    """Exchanged arguments, unless their order does not matter, and a conversion that is left out."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    for a, b in zip(call.args, call.args[1:]) if name not in SYMMETRIC else ():
        yield "arguments exchanged", (a, b), f"{source(b)}, {source(a)}"
    if isinstance(call.func, ast.Attribute) and name in CONVERSIONS:
        yield "conversion left out", call, source(call.func.value)


def line_begins(code):
    """Where the lines of a text begin, in bytes."""
    return [0, *itertools.accumulate(len(line) + 1 for line in code.encode().split(b"\n"))]


def span(begins, first, last):
    """Where a text from one node to another begins and ends, in bytes."""
    return begins[first.lineno - 1] + first.col_offset, begins[last.end_lineno - 1] + last.end_col_offset


def slipped(code, node, instead):
    """The code with another text in place of a node, or of what reaches from one node to another."""
    first, last = span(line_begins(code), *(node if isinstance(node, tuple) else (node, node)))
    return (code.encode()[:first] + instead.encode() + code.encode()[last:]).decode()


def statement_lines(tree, line):
    """The lines of the innermost statement that contains a line; of a compound statement, those of its head."""
    begun = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and first_line(node) <= line <= node.end_lineno]
    inner = max(begun, key=first_line)
    body = getattr(inner, "body", None)
    end = max(body[0].lineno, inner.lineno + 1) if body else inner.end_lineno + 1
    return range(first_line(inner), max(end, line + 1))


def first_line(node):
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def changes(file):
    """Every mutation of a file: a dict with the lines it touches, the line before and after, and the new
    text."""
    code = (ROOT / file).read_text()
    tree, parsed, seen = ast.parse(code), get_ast(code), {code}
    for name, operator in operators():
        spots = [spot for node in ast_nodes(parsed) for spot in operator.mutation_positions(node)]
        for i, ((line, _), _) in enumerate(spots):
            try:
                changed = mutate_code(code, operator, i)
                ast.parse(changed)
            except (AttributeError, SyntaxError):   # a dotted exception name; no valid program
                continue
            if changed not in seen:
                seen.add(changed)
                yield change_of(file, tree, code, changed, line, name)
    same = {ast.dump(tree)}
    for name, node, instead in slips(tree, code):
        changed = slipped(code, node, instead)
        try:
            meaning = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if changed not in seen and meaning not in same:
            seen.add(changed)
            same.add(meaning)
            yield change_of(file, tree, code, changed, (node[0] if isinstance(node, tuple) else node).lineno, name)


def change_of(file, tree, code, changed, line, operator):
    """A mutation as a dict: see `changes`."""
    before, after = differing(code, changed)
    key = hashlib.sha256(f"{file}\n{before}\n{after}".encode()).hexdigest()[:16]
    return dict(file=file, line=line, lines=statement_lines(tree, line), before=before, after=after,
                operator=operator, text=changed, key=key)


def differing(code, changed):
    """The lines in which two texts differ, joined into one line for each text."""
    a, b = code.splitlines(), changed.splitlines()
    first = next(i for i, (x, y) in enumerate(zip(a + [""], b + [""])) if x != y)
    last = 0
    while last < min(len(a), len(b)) - first and a[-1 - last] == b[-1 - last]:
        last += 1
    return tuple(" ".join(" ".join(x[first:max(len(x) - last, first + 1)]).split()) for x in (a, b))


# ------------------------------------------------------------------------------ which tests reach a line
class Watch:
    """A pytest plugin that records which lines each test reaches, how long it takes, and its module-scoped
    fixtures."""

    def __init__(self, measured):
        self.measured, self.seconds, self.setup, self.shared, self.failed = measured, {}, {}, {}, set()

    def pytest_runtest_logreport(self, report):
        if report.when == "setup":
            self.setup[report.nodeid] = report.duration
        if not report.passed:           # skipped, or too slow under coverage
            self.failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.measured.switch_context(item.nodeid)
        began = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - began
        defs = item._fixtureinfo.name2fixturedefs.values()
        self.shared[item.nodeid] = [f"{item.path.name}:{d[-1].argname}" for d in defs if d[-1].scope == "module"]
        return result


def reach():
    """What the tests reach: {file: {line: tests}}, and the seconds of each test. Kept until the code or a test
    changes."""
    kept = FOUND / "reach.json"
    state = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(ROOT.glob("tests/**/*.py")))
                           + b"".join((ROOT / f).read_bytes() for f in FILES)).hexdigest()
    if kept.exists() and json.loads(kept.read_text())["state"] == state:
        return json.loads(kept.read_text())
    measured = coverage.Coverage(data_file=None, include=[str(ROOT / f) for f in FILES])
    watch = Watch(measured)
    measured.start()
    pytest.main(["-q", "-p", "no:cacheprovider", "--extra", "--upstream", str(ROOT / "tests"), "--rootdir", str(ROOT),
                 *(f"--ignore={ROOT / name}" for name in BY_TEXT)], plugins=[watch])
    measured.stop()
    watch.seconds = {test: s for test, s in watch.seconds.items() if test not in watch.failed}
    together = {}
    for test, fixtures in watch.shared.items():
        for fixture in fixtures:
            together.setdefault(fixture, []).append(test)
    for tests in together.values():         # any of them may be the one that needs the fixture
        tests = [test for test in tests if test in watch.seconds]
        setup = max((watch.setup[test] for test in tests), default=0)
        watch.seconds |= {test: max(watch.seconds[test], watch.seconds[test] - watch.setup[test] + setup) for test in tests}
    lines = {}
    for file in FILES:
        by_line = measured.get_data().contexts_by_lineno(str(ROOT / file))
        for line, tests in by_line.items():
            more = [other for test in tests for f in watch.shared.get(test, ()) for other in together[f]]
            lines.setdefault(file, {})[line] = sorted({*tests, *more} & {*watch.seconds})
    reached = Counter(test for by_line in lines.values() for tests in by_line.values() for test in tests)
    known = dict(state=state, seconds=watch.seconds, lines=lines, reached=reached)
    FOUND.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(known))
    return json.loads(kept.read_text())


@functools.cache
def naming(module):
    """The two test files that name a module most often."""
    count = {path.name: len(re.findall(rf"\b{module}\b", path.read_text())) for path in ROOT.glob("tests/**/test_*.py")}
    return tuple(sorted(count, key=count.get)[-2:])


def tests_of(change, known, caught=(), budget=BUDGET):
    """The tests for a mutation, as many as fit into `budget` seconds: those that reach it, or, if only an
    import or another process does, those that reach its file and all quick ones. First come those that caught
    mutations nearby, then those of the two test files that name its module most often, then those that reach few lines, as they check
    the most closely; of those that reach many, the ones that caught the most."""
    lines, seconds = known["lines"].get(change["file"], {}), known["seconds"]
    before = Counter(r["caught"] for r in caught)
    near = {r["caught"] for r in caught
            if r["file"] == change["file"] and abs(r["line"] - change["line"]) < 20}
    tests = {test for line in change["lines"] for test in lines.get(str(line), ())}
    quick = {test for test, s in seconds.items() if s < 0.1}
    tests = tests or quick | {test for some in lines.values() for test in some}

    own = naming(Path(change["file"]).stem)

    def promise(test):
        """The sort key: the most promising test first."""
        name, reached = test.removeprefix("tests/"), known["reached"].get(test, 0)
        return (name not in near, not name.startswith(own), min(reached, 300) // 10 + 5 * seconds[test] // 1,
                -before[name] / (0.1 + seconds[test]), test)
    order = sorted(tests, key=promise)
    spent = itertools.accumulate(seconds[t] for t in order)
    return [t for t, s in zip(order, spent) if s <= budget]


# -------------------------------------------------------------------------------------- trials
def prepare():
    """A copy of the tree for each core. Imports all that the tests import except the tree itself, once for all
    children."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    import hypothesis, safetensors.torch, tiktoken, tokenizers, torch._dynamo, transformers  # noqa: E401, F401
    copies = [Path(tempfile.mkdtemp()) / "copy" for _ in range(os.cpu_count())]
    for copy in copies:
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", ".git", ".hypothesis"))
        subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"],
                       cwd=copy, env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""}, stdout=subprocess.DEVNULL)
    return copies                   # with the tests already compiled


def run_tests(copy, tests):
    """In a forked child: run tests in this order, up to the first that fails."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    os.dup2(os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    os.chdir(copy)
    sys.path[:] = [str(copy)] + [p for p in sys.path if p != str(HERE)]
    os._exit(pytest.main(["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests]))


def begin(change, tests, copy, seconds):
    """Apply a mutation to a copy, and start its tests: the state that `end` needs."""
    path = copy / change["file"]
    original = path.read_text()
    path.write_text(change["text"])
    child = os.fork()
    if not child:
        run_tests(copy, tests)
    return dict(child=child, change=change, tests=tests, copy=copy, path=path, original=original,
                until=time.time() + 30 + 5 * seconds)


def end(trial):
    """A mutation with the first test that failed, or None if none did; None itself while the tests run."""
    done, status = os.waitpid(trial["child"], os.WNOHANG)
    if not done and time.time() < trial["until"]:
        return None
    try:
        os.killpg(trial["child"], signal.SIGKILL)       # and the processes it started
    except ProcessLookupError:
        pass
    if not done:
        os.waitpid(trial["child"], 0)
    trial["path"].write_text(trial["original"])
    lines = (trial["copy"] / "output.txt").read_text(errors="replace").splitlines()
    failed = [line.split(" - ")[0].partition("tests/")[2] for line in lines
              if line.startswith(("FAILED tests/", "ERROR tests/"))]
    code = os.waitstatus_to_exitcode(status) if done else None
    caught = "no end" if not done else None if code == 0 else failed[0] if failed else f"exit code {code}"
    kept = {name: trial["change"][name] for name in ("key", "file", "line", "before", "after", "operator")}
    return kept | dict(caught=caught, tests=len(trial["tests"]))


def trials(left, known, results, budget):
    """Try mutations, as many at a time as there are cores; yields the result of each."""
    free, running = prepare(), []
    same = dict(left[0], text=(ROOT / left[0]["file"]).read_text())
    left = [same, *left]
    while left or running:
        while left and free:
            change = left.pop(0)
            tests = tests_of(change, known, results.values(), BUDGET if change is same else budget)
            running.append(begin(change, tests, free.pop(), sum(known["seconds"][t] for t in tests)))
        time.sleep(0.05)
        for trial in [*running]:
            if (result := end(trial)) is not None:
                running.remove(trial)
                free.append(trial["copy"])
                if trial["change"] is not same:
                    yield result
                elif result["caught"]:
                    sys.exit(f"{result['caught']} fails on the unchanged code: fix it first")


# --------------------------------------------------------------------------------------- the table
def words():
    """The reasons that mutations.md gives for each mutation that was not caught: why no test can catch it."""
    page = HERE / "mutations.md"
    rows = page.read_text().splitlines() if page.exists() else []
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| `")]
    return {tuple(c[:3]): c[3] for c in cells if len(c) == 4}


def explained(change):
    """Whether mutations.md has a reason why no test can catch a mutation."""
    row = tuple(cell(change[name]) for name in ("file", "before", "after"))
    return not words().get(row, "?").startswith("?")


def cell(text):
    return "`" + text.replace("|", "\\|") + "`"


def write_table(results):
    """mutations.md, and its counts on the terminal."""
    sys.path.insert(0, str(ROOT))
    from experiments.results import stamp           # here alone: tests are to import the tree of a copy
    known, counts, rows = words(), ["| file | mutations | caught | no test can catch | share |", "|---|---|---|---|---|"], []
    total = [0, 0, 0]
    for file in FILES:
        own = [r for r in results if r["file"] == file]
        missed = sorted((r for r in own if r["caught"] is None), key=lambda r: r["line"])
        same = 0
        for r in missed:
            row = cell(file), cell(r["before"]), cell(r["after"])
            word = known.get(row, "?")
            same += not word.startswith("?")
            rows.append("| " + " | ".join((*row, word)) + " |")
        caught = len(own) - len(missed)
        total = [t + x for t, x in zip(total, (len(own), caught, same))]
        counts.append(f"| `{file}` | {len(own)} | {caught} | {same} | {caught / max(len(own) - same, 1):.1%} |")
    counts.append(f"| all | {total[0]} | {total[1]} | {total[2]} | {total[1] / max(total[0] - total[2], 1):.1%} |")
    (HERE / "mutations.md").write_text("\n".join(counts + ["", "| file | before | after | why no test can catch it |",
                                                           "|---|---|---|---|", *rows, "", stamp()]) + "\n")
    print("\n".join(counts))


def some(changes, most, seed):
    """At most so many of a file's changes, drawn at random. None: all."""
    changes = list(changes)
    if most is None or len(changes) <= most:
        return changes
    return random.Random(seed).sample(changes, most)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    for flag in ("reach", "again", "readme"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.reach:
        reach()
        return
    kept = FOUND / "results.jsonl"
    FOUND.mkdir(parents=True, exist_ok=True)
    results = {r["key"]: r for r in map(json.loads, kept.open())} if kept.exists() else {}
    files = args.files or FILES
    present = [change for file in files for change in some(changes(file), args.sample, args.seed)]
    present.sort(key=lambda c: " " not in c["operator"])       # the slips of a person first
    left = [c for c in present if c["key"] not in results
            or args.again and results[c["key"]]["caught"] is None and not explained(c)]
    print(f"{len(present)} mutations, {len(left)} to try", flush=True)
    if left and not args.readme:
        subprocess.run([sys.executable, __file__, "--reach"], check=True)   # it imports the tree
        for r in trials(left, reach(), results, MORE if args.again else BUDGET):
            results[r["key"]] = r
            with kept.open("a") as f:
                f.write(json.dumps(r) + "\n")
            print(f"{r['file']}:{r['line']}  {r['before']}  ->  {r['after']}  {r['caught'] or 'NOT CAUGHT'}", flush=True)
    chosen = [results[c["key"]] | {"line": c["line"]} for c in present if c["key"] in results]
    if args.readme:
        write_table(chosen)
    missed = [r for r in chosen if r["caught"] is None]
    print(f"{len(chosen)} tried, {len(missed)} not caught")


if __name__ == "__main__":
    main(sys.argv[1:])
