"""docs/questions.md and docs/figures.md: every number on them is computed from the results, and what they say fits these."""
import ast
import json
import re
import statistics
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "studies"))
import figures  # noqa: E402
import page  # noqa: E402
import runs  # noqa: E402
import studies  # noqa: E402

TEMPLATES = {name: (page.HERE / "pages" / f"{name}.py").read_text() for name in (*page.PAGES, "variants")}
DOCS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in page.PAGES}
RESULTS = [*sorted((ROOT / "experiments" / "studies" / "answers").glob("*.json")), page.filters.HERE / "filters.json"]
# Numbers that are settings, sizes of the task, names of rows, or of the field: of all others none is written by hand.
SETTINGS = {"questions": "0 0.04 0.1 0.2 0.3 0.5 0.95 1 1.0 2 3 4 6 7 8 12 16 24 30 64 80 95 100 300 400 800 1,000 4,000 16,000 64,000",
            "figures": "1 5 6 7 8 64 4,000", "variants": "0 1 3 4 5 12 16 40 95 100 135 200"}


@pytest.mark.parametrize("name", page.PAGES)
def test_a_page_is_what_its_template_gives(name):
    """So each check in the template holds."""
    assert page.rendered(name) == DOCS[name], "run python experiments/studies/page.py"
    assert TEMPLATES[name].count("{holds(") >= 2


def test_the_ladders_table_is_in_the_derivation():
    text = (ROOT / "docs" / "derivation.md").read_text()
    assert page.with_ladder(text) == text and text.count("<details>") == 1
    apart = [p < 0.05 for (part, _), (*_, p) in studies.compared("paper", page.kept("paper"), "greedy").items() if part == "the ladder"]
    gaps = [statistics.mean(x) for x in studies.of_part("paper", page.kept("paper"), "the ladder", "greedy").values()]
    assert len(gaps) == len(apart) == 7 and max(map(abs, gaps)) < 6 and not any(apart)
    assert "no difference between neighbours holds after correction for their number" in " ".join(text.split())


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_measured_number_is_written_by_hand(name):
    parts = next(node for node in ast.walk(ast.parse(TEMPLATES[name])) if isinstance(node, ast.JoinedStr)).values
    text = "".join(part.value for part in parts if isinstance(part, ast.Constant))          # without what is computed
    text = re.sub(r"`.*?`|\]\(.*?\)|arXiv\s\S+|2 layers of 128", "", text, flags=re.S)
    numbers = set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?=\D|$)", re.sub(r",(?=\s)", " ", text)))
    assert numbers == set(SETTINGS[name].split())


def test_the_pages_are_short():
    """In words, without numbers. Tables of a study are no prose; the one at the head is."""
    text = re.sub(r"<details>.*?</details>", "", DOCS["questions"], flags=re.S)
    head, rest = text.split("## The setting")
    prose = head + "\n".join(line for line in rest.splitlines() if not line.startswith("|"))
    assert len([word for word in re.sub(r"\]\(.*?\)", "", prose).split() if re.search("[A-Za-z]", word)]) <= 1800
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert 3 <= len(table.splitlines()) <= 2 + 6
    assert head.count("\n| [") == 6 and text.count("*Where it may fail*") == text.count("*For a\n7B run*") + text.count("*For a 7B run*") == 3


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_how_it_was_made(path):
    found = json.loads(path.read_text())
    assert found["command"]
    for about in [found] if path.stem not in studies.STUDIES else [run["about"] for of in found["runs"].values() for run in of.values()]:
        assert about.keys() >= {"date", "torch", "python", "cores", "machine"}


@pytest.fixture
def toy(monkeypatch):
    """A study of two parts whose numbers can be checked by hand."""
    def run(greedy, seconds, auc=None):
        return {"greedy": greedy, "pass@1": greedy / 2, "seconds": seconds, "tokens": 2e6, "before": {"greedy": 0.1},
                "quality": auc and {"start": {"auc": auc, "calibration": 0.1}, "end": {"auc": 0.6, "calibration": 0.3}}}
    monkeypatch.setitem(studies.STUDIES, "toy", {"one": {"base": "", "other: k1": "--lr 1"}, "two": {"base": "", "third": "--lr 2"}})
    found = {"runs": {"": {"1": run(0.2, 10), "2": run(0.4, 20), "3": run(0.3, 30)},
                      "--lr 1": {"1": run(0.25, 40, 0.7), "2": run(0.47, 60, 0.9), "3": run(0.36, 50, 0.8)},
                      "--lr 2": {"1": run(0.1, 1), "2": run(0.55, 1)}}}
    monkeypatch.setattr(page, "kept", lambda name: found)
    return found


def test_numbers_of_a_row(toy):
    row, third = "one: other: k1", "two: third"
    assert page.median("toy", row) == "36%" and page.median("toy", row, "auc") == "0.80" and page.median("toy", row, "auc end") == "0.60"
    assert page.median("toy", row, "calibration") == "0.10" and page.median("toy", row, "calibration end") == "0.30"
    assert page.times("toy", row, "one: base") == "1.7 to 4.0" and page.each_end("toy", row) == "25%, 47% and 36%"
    assert page.median("toy", "one: base", "auc") == "" and page.median("toy", row, "tokens") == "2.0"
    assert page.beside("toy", row) == "6.0 points above" and page.beside("toy", third, row) == "3.5 points below"
    assert page.beside("toy", row, row) == "0.0 points from"
    assert page.lost("toy", third, row) == "3.5" and page.each("toy", third) == "−10.0, +15.0"
    low, high = runs.interval([5, 7, 6])
    assert page.effect("toy", third) == "+2.5 (−10.0 and +15.0)"          # of two there is no interval
    assert page.effect("toy", row) == f"+6.0 ({low:+.1f} to {high:+.1f})" and page.effect("toy", row, of="pass@1").startswith("+3.0 ")
    p = studies.holm([studies.p_value([5, 7, 6]), studies.p_value([-10, 15])])
    assert page.p_text("toy", row) == f"{p[0]:.2f}"
    assert page.sure("toy", row) == f"3 of 3 seeds agree, corrected p {p[0]:.2f}" and page.sure("toy", third) == f"1 of 2 seeds agree, corrected p {p[1]:.2f}"
    assert page.ratio("toy", row, "one: base") == "2.5" and page.seeds("toy") == 2 and page.before("toy", row) == 0.1


@pytest.mark.parametrize("p, text", [(0.0099, "< 0.01"), (0.01, "0.01"), (1.0, "1.00")])
def test_a_small_p_value_is_a_bound(monkeypatch, p, text):
    monkeypatch.setattr(page, "corrected", lambda study, row, of: p)
    assert page.p_text("toy", "one: other") == text


def test_small_negative_numbers_have_no_sign():
    assert page.shown(-0.004, "explained_variance") == "0.00" and page.shown(-0.01, "explained_variance") == "−0.01"


def test_what_holds_of_a_row(toy):
    row, third = "one: other: k1", "two: third"
    assert page.up("toy", row) and not page.down("toy", row)
    assert not page.up("toy", third) and not page.down("toy", third)
    assert page.unclear("toy", third) and not page.unclear("toy", row) and not page.unclear("toy", "one: base", row)
    assert not page.at_zero("toy", third)
    for seed, greedy in (("1", 0.0), ("2", 0.004)):
        toy["runs"]["--lr 2"][seed]["greedy"] = greedy
    assert page.at_zero("toy", third)
    toy["runs"]["--lr 2"]["2"]["greedy"] = 0.006
    assert not page.at_zero("toy", third)
    assert page.holds(True, True) == ""
    with pytest.raises(AssertionError, match="1 of 2"):
        page.holds(True, False)


def test_which_rows_differ_from_the_first(toy):
    assert page.shown_to_differ("toy") == {("one", "other: k1"): pytest.approx(6)}
    assert page.verdict("toy") == "1 of 2 rows could be shown to differ from GRPO: other: k1, one (+6.0 points)."
    toy["runs"]["--lr 1"]["1"]["greedy"] = 0.1                              # -10 points, then 7 and 6
    assert page.shown_to_differ("toy") == {} and page.verdict("toy") == "None of 2 rows could be shown to differ from GRPO."


@pytest.mark.parametrize("n", page.DETECTABLE)
def test_a_detectable_difference_is_found_in_four_of_five_studies(n, monkeypatch):
    monkeypatch.setitem(studies.STUDIES, "toy", {"one": {"base": "", "other": "--lr 1", "third": "--lr 2"}})
    signs = [(-1) ** i for i in range(n)]
    spread = statistics.stdev(signs)
    run = lambda x: {"greedy": x}           # noqa: E731
    monkeypatch.setattr(page, "kept", lambda name: {"runs": {"": {str(i): run(0.5) for i in range(n)},
                                                             "--lr 1": {str(i): run(0.5 + sign / spread / 10) for i, sign in enumerate(signs)},
                                                             "--lr 2": {"0": run(0.1), "1": run(0.9)}}})         # of fewer seeds: not counted
    x = np.random.default_rng(0).normal(float(page.detectable("toy")), 10, (100_000, n))         # of a spread of 10 points
    t = x.mean(1) / x.std(1, ddof=1) * n ** 0.5
    assert 0.79 < (t > runs.STUDENT[n]).mean() < 0.81


def test_the_measured_section_is_replaced_alone(monkeypatch):
    monkeypatch.setattr(page, "rendered", lambda name: f"## Measured\n\nnew {name}\n")
    assert page.with_measured("# A\n\n## Measured\n\nold\n\nold\n\n## B\n\nx\n") == "# A\n\n## Measured\n\nnew variants\n\n## B\n\nx\n"
    assert page.with_measured("# A\n\n## B\n") == "# A\n\n## B\n"


def test_what_was_measured_is_in_the_page_of_variants():
    text = (ROOT / "docs" / "variants.md").read_text()
    assert page.with_measured(text) == text and text.count("\n## Measured\n") == 1, "run python experiments/studies/page.py"


def test_curves_of_filters(monkeypatch):
    """The median over the seeds, of means over steps."""
    made = {seed: {"curves": {"finished": [0.2, x, x + 0.2]}} for seed, x in zip("123", (0.3, 0.7, 0.5))}
    monkeypatch.setattr(page, "filtered", lambda: {"runs": {"GRPO": made}})
    assert page.of_filters("GRPO", "finished", slice(1)) == "20%" and page.of_filters("GRPO", "finished", slice(1, None)) == "60%"


def test_the_section_on_variants(monkeypatch):
    """On made-up results: rows of the same name in two regimes are told apart."""
    about = dict(date="2026-01-01", machine="a", cores=2, torch="9")
    found = {"command": "c", "setting": "s", "runs": {}}
    for part, rows in studies.STUDIES["variants"].items():
        for name, flags in rows.items():
            for seed, noise in zip("123", (0, 0.01, -0.01)):
                better, tokens = 0.2 * (name == "dynamic_sampling"), 2e6 if name == "dynamic_sampling" else 1e6
                found["runs"].setdefault(flags, {})[seed] = {of: 0.5 + better + noise * (name != "GRPO") for of in ("greedy", "pass@1")} | {
                    "tokens": tokens, "points": [{"tokens": 0, "seconds": 0, "greedy": 0.3}, {"tokens": tokens, "seconds": 9, "greedy": 0.5 + better}],
                    "length": 20.0 + part.startswith("16") + 5 * (name == "luspo") + (name == "dr_grpo"),
                    "before": {"greedy": 0.3, "pass@1": 0.2}, "about": about}
    tuned = {"runs": {f"{row} --lr {lr}": {"101": {"greedy": 0.0 if lr == "3e-4" else 0.4 if name == "tis" else 0.6}}
                      for rows in studies.REGIMES.values() for name, row in rows.items() for lr in studies.RATES}}
    often = studies.REGIMES["16 updates per rollout"]
    for name, x in (("gspo", 0.7), ("GRPO, KL", 0.8), ("dapo", 0.5)):
        tuned["runs"][f"{often[name]} --lr 3e-4"]["101"]["greedy"] = x
    monkeypatch.setattr(page, "kept", lambda name: tuned if name == "variants_tuning" else found)
    text = page.rendered("variants")
    said = " ".join(text.split())
    assert "below half end tis 40%." in said and "19 of 22 rows end at 0%, GRPO among them. Above half end GRPO, KL 80%, gspo 70%: all have" in said
    assert "with one update and with 16: 20.0 and 21.0 with a mean over each completion, 25.0 and 26.0 if it is not divided by its length" in said
    assert "20.0 with `--loss_mean token` and 21.0 with a constant (Dr. GRPO)" in said
    assert "the rows end between 40% and 60% at 3e-5" not in said and "the rows end between 60% and 60% at 3e-5" in said
    assert "1 of 43 rows could be shown to differ from GRPO: dynamic_sampling, one update per rollout (+20.0 points).** It samples 2.0 times" in text
    assert "GRPO's tokens: when it has sampled as many as GRPO in all it is at 50%, after as many seconds at 70%; GRPO ends at 50% (medians)." in said
    assert f"With 3 seeds and the median spread of differences, a test without that correction finds a difference of {page.detectable('variants')} " in said
    assert text.count("\n| dapo | 3 |") == 2
    for part, rows in studies.STUDIES["variants"].items():
        for run in found["runs"][rows["dapo"]].values():
            run["greedy"] += 0.2 if part.startswith("one") else -0.2
    assert "dapo, one update per rollout (+20.0 points); dapo, 16 updates per rollout (−20.0 points)." in page.verdict("variants")
    with pytest.raises(AssertionError):         # the text speaks of one row
        page.rendered("variants")
    for part, rows in studies.STUDIES["variants"].items():
        for run in found["runs"][rows["dapo"]].values():
            run["greedy"] -= 0.2 if part.startswith("one") else -0.2
    page.rendered("variants")
    tuned["runs"][f"{often['cispo']} --lr 3e-4"]["101"]["greedy"] = 0.6
    with pytest.raises(AssertionError):         # it has neither a KL nor the ratio of a completion
        page.rendered("variants")


def test_what_is_reached_at_equal_cost(toy):
    """The first seed of the row is half-way to its second point when the base ends, the others are at it or beyond."""
    for seed, tokens in (("1", 10), ("2", 20), ("3", 90)):
        toy["runs"][""][seed]["points"] = [{"tokens": 0, "greedy": 0.0}, {"tokens": tokens, "greedy": 0.9}]
        toy["runs"]["--lr 1"][seed]["points"] = [{"tokens": 0, "greedy": 0.1}, {"tokens": 20, "greedy": 0.3}, {"tokens": 40, "greedy": 0.5}]
    assert page.reached("toy", "one: other: k1", "one: base", "tokens") == "30%"
    toy["runs"][""]["2"]["points"][-1]["tokens"] = 15
    assert page.reached("toy", "one: other: k1", "one: base", "tokens") == "25%"


def test_how_a_metric_changes(toy):
    for seed, (first, last) in zip("123", ((5.0, 6.5), (4.0, 7.5), (5.5, 4.5))):
        toy["runs"]["--lr 1"][seed]["reward, means of 25 steps"] = [first, 9.0, last]
    assert page.change("toy", "one: other: k1", "reward") == runs.with_interval([1.5, 3.5, -1.0])


def test_a_table_of_a_page(toy):
    assert "| two: base | 30% |" in page.table("toy", ["two: base", "one: other: k1"], "seconds")
    lines = page.table("toy", ["one: base", "one: other: k1"], "seconds", "auc").splitlines()
    assert lines[0] == "|  | greedy | difference | seconds | AUC, initial policy |" and len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| base | 30% |  | 20 |  |" and lines[3].startswith("| other: k1 | 36% | +6.0 (") and lines[3].endswith("| 50 | 0.80 |")


def test_what_is_folded_has_all_rows_with_their_flags():
    for study, name in (("critic", "questions"), ("labels", "questions"), ("kl", "questions")):
        text = page.everything(study)
        assert text in DOCS[name] and all(f"| {where} | {f'`{flags}`' if flags else ''} |" in text for flags, where in studies.rows_of(study).items())


def test_what_could_not_be_shown_to_differ():
    """A critic with lambda 1 from a group's mean, and groups of 2 from 16."""
    assert page.unclear("critic", page.FITTED_1) and page.unclear("critic", page.TWO)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_drawn(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    draw, result = figures.FIGURES[name]
    if not studies.answers(result).exists():
        pytest.skip("not made yet")
    (tmp_path / "answers").mkdir()
    monkeypatch.setattr(figures, "HERE", tmp_path)
    draw(page.kept(result))
    assert (tmp_path / "answers" / f"{name}.png").stat().st_size > 10_000
