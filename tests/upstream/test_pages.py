"""The pages that experiments/studies/page.py writes: every number is computed from the results, and what they say fits these."""
import ast
import json
import math
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

TEMPLATES = {name: (page.HERE / "pages" / f"{name}.py").read_text() for name in page.PAGES}
TEXTS = {name: file.read_text() for name, file in page.PAGES.items()}
RESULTS = [*sorted((ROOT / "experiments" / "studies" / "answers").glob("*.json")), page.filters.HERE / "filters.json"]
# Numbers that are settings, sizes of the task, names of rows, or of the field, by template: of all others none is written by hand.
SETTINGS = {"questions": "0 0.04 0.1 0.2 0.95 1 2 4 5 7 16 64 95 128 256 300 1,000 4,000 16,000 64,000",
            "figures": "1 5 6 7 8 64 95", "variants": "1 8 16 135", "answers/figure7": "7 8 64", "answers/paper": "1 2 4 5",
            "answers/critic": "0.05 0.1 0.95 1 2 3 4 6 12 24 34 64 80 100 400",
            "answers/labels": "0.04 0.2 1 1.0 4 9 16 30 36 80 4,000 16,000 64,000",
            "answers/kl": "0 0.1 0.3 0.5 1 1.0 3 80", "answers/variants": "0 1 3 4 5 12 16 80 100 135 200"}
QUOTED = {"answers/critic": "1.2 1.9 89.4 90.6 92 93.0 96.1 97.1 97.5 213",           # from results that are no more
          "answers/labels": "0.07 1.09 6 11 53.4 86 91.8 92.3 93.9"}


@pytest.mark.parametrize("name", page.PAGES)
def test_a_page_is_what_its_template_gives(name):
    """So each check in the template holds."""
    assert page.rendered(name) == TEXTS[name], "run python experiments/studies/page.py"
    assert "{holds(" in TEMPLATES[name]


@pytest.mark.parametrize("name", page.PAGES)
def test_lines_and_links_of_a_page(name):
    folder = page.PAGES[name].parent
    for line in TEXTS[name].splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![")), line
    for file, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", TEXTS[name]):
        assert (folder / file).exists()
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (folder / file).read_text() if file else TEXTS[name], re.M)
            assert anchor in [title.lower().replace(" ", "-") for title in titles], anchor


def test_what_is_said_of_the_ladder():
    found = studies.compared("paper", page.kept("paper"), "greedy")
    apart = [p < 0.05 for (part, _), (*_, p) in found.items() if part == "the ladder"]
    assert len(apart) == 7 and not any(apart)
    text = (ROOT / "docs" / "derivation.md").read_text()
    assert "no difference between neighbours holds after correction for their number" in " ".join(text.split())


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_measured_number_is_written_by_hand(name):
    parts = [node for node in ast.walk(ast.parse(TEMPLATES[name])) if isinstance(node, ast.JoinedStr)]
    parts = max(parts, key=lambda node: node.end_lineno - node.lineno).values
    text = "".join(part.value for part in parts if isinstance(part, ast.Constant))          # without what is computed
    text = re.sub(r"`.*?`|\]\(.*?\)|arXiv\s+\S+", "", text, flags=re.S)
    numbers = set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?=\D|$)", re.sub(r",(?=\s)", " ", text)))
    assert numbers == {*SETTINGS[name].split(), *QUOTED.get(name, "").split()}


def test_the_six_answers():
    """A line each, with its section, whose table is small; and what may be wrong with them comes last."""
    text = TEXTS["questions"]
    head, *sections = re.split(r"^## ", text, flags=re.M)
    rows = re.findall(r"^\| \[(.+?)\?\]\(#(.+?)\) \| (.+?) \| (.+?) \|$", head, re.M)
    titles = [section.split("\n")[0] for section in sections]
    assert [anchor.replace("-", " ") for _, anchor, *_ in rows] == [title.lower() for title in titles[:6]]
    assert len(rows) == 6 and titles[6:] == ["The setting", "Where it may fail"]
    for section in sections:
        tables = re.findall(r"(?:^\|.*\n)+", section, re.M)
        assert len(tables) == (section in sections[:6]) and all(len(table.splitlines()) <= 2 + 6 for table in tables)
        prose = re.sub(r"^\|.*$", "", section, flags=re.M)
        assert not re.search(r"[+−]\d\S* to [+−]\d", prose), "intervals stand in tables"
        assert not re.search("could (not )?be shown", prose)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_how_it_was_made(path):
    found = json.loads(path.read_text())
    assert found["command"]
    made = found.get("about", {"all": found}).values()
    if path.stem in studies.STUDIES:
        made = [run["about"] for of in found["runs"].values() for run in of.values()]
    for about in made:
        assert about.keys() >= {"commit", "date", "torch", "python", "cores", "machine"}


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


BASE, ROW, THIRD = ("toy", "one", "base"), ("toy", "one", "other: k1"), ("toy", "two", "third")


def test_numbers_of_a_row(toy):
    assert page.rows("toy", "one") == [BASE, ROW] and page.rows("toy", "two", "third") == [THIRD]
    assert page.median(ROW) == "36%" and page.median(ROW, "auc") == "0.80" and page.median(ROW, "auc end") == "0.60"
    assert page.median(ROW, "calibration") == "0.10" and page.median(ROW, "calibration end") == "0.30"
    assert page.median(BASE, "auc") == "" and page.median(ROW, "tokens") == "2.0" and page.each_end(ROW) == "25%, 47% and 36%"
    assert page.gained(ROW) == "6.0" and page.gained(ROW, of="pass@1") == "3.0" and page.lost(BASE, ROW) == "6.0"
    for claim in (page.gained, page.lost):
        with pytest.raises(AssertionError):             # -10 in one seed, +15 in another
            claim(THIRD)
    assert page.each(THIRD) == "−10.0, +15.0" and page.effect(THIRD) == "+2.5 (−10.0 and +15.0)"         # of two there is no interval
    low, high = runs.interval([5, 7, 6])
    assert page.effect(ROW) == f"+6.0 ({low:+.1f} to {high:+.1f})" and page.effect(ROW, of="pass@1").startswith("+3.0 ")
    p = studies.holm([studies.p_value([5, 7, 6]), studies.p_value([-10, 15])])
    assert page.p_text(ROW) == f"{p[0]:.2f}" and page.p_text(THIRD) == f"{p[1]:.2f}"
    assert page.ratio(ROW, BASE) == "2.5" and page.seeds("toy") == 2 and page.before(ROW) == 0.1


def test_no_difference_is_a_bound():
    """By hand: the half-width of four differences of spread 2 is 3.182; of spread 0.2 a tenth of it."""
    x = [1.0, -3.0, 1.0, 1.0]
    assert page.bound(x) == page.bound([0.1, -0.3, 0.1, 0.1], x) == "4 points" and page.bound([n / 10 for n in x]) == "1 point"
    assert page.bound([n + 1 for n in x]) == "5 points"
    with pytest.raises(AssertionError):
        page.bound(x, [n + 4 for n in x])


def test_no_difference_of_rows(toy):
    for seed, greedy in zip("123", (0.21, 0.37, 0.32)):
        toy["runs"]["--lr 1"][seed]["greedy"] = greedy                      # +1, -3, +2
    most = max(map(abs, runs.interval([1.0, -3.0, 2.0])))
    assert page.wide(ROW) == page.wide((BASE, ROW)) == f"{math.ceil(most)} points" != "5 points"
    with pytest.raises(AssertionError):                                     # too wide for no difference
        page.within(ROW)
    with pytest.raises(AssertionError):                                     # +2.5, +3.5, +3
        page.wide(ROW, of="pass@1")
    for seed, greedy in zip("123", (0.205, 0.385, 0.305)):
        toy["runs"]["--lr 1"][seed]["greedy"] = greedy                      # +0.5, -1.5, +0.5
    assert page.within(ROW) == page.wide(ROW) == "4 points"


@pytest.mark.parametrize("p, text", [(0.0099, "< 0.01"), (0.01, "0.01"), (1.0, "1.00")])
def test_a_small_p_value_is_a_bound(monkeypatch, p, text):
    monkeypatch.setattr(page, "kept", lambda study: None)
    monkeypatch.setattr(studies, "compared", lambda study, found, of: {("one", "other: k1"): (1, 0, 2, p)})
    assert page.p_text(ROW) == text


def test_small_negative_numbers_have_no_sign():
    assert page.shown(-0.004, "explained_variance") == "0.00" and page.shown(-0.01, "explained_variance") == "−0.01"


def test_what_holds_of_a_row(toy):
    assert page.up(ROW) and not page.down(ROW) and not page.up(THIRD) and not page.down(THIRD)
    assert page.unclear(THIRD) and not page.unclear(ROW) and not page.unclear(BASE, ROW)
    for seed, greedy in (("1", 0.0), ("2", 0.004)):
        toy["runs"]["--lr 2"][seed]["greedy"] = greedy
    assert page.zero(THIRD) == "0%"
    toy["runs"]["--lr 2"]["2"]["greedy"] = 0.006
    with pytest.raises(AssertionError):
        page.zero(THIRD)
    assert page.holds(True, True) == ""
    with pytest.raises(AssertionError, match=r"\[1\]"):
        page.holds(True, False)


def test_which_rows_differ_from_the_first(toy):
    assert page.shown_to_differ("toy") == {("one", "other: k1"): pytest.approx(6)}
    toy["runs"]["--lr 1"]["1"]["greedy"] = 0.1                              # -10 points, then 7 and 6
    assert page.shown_to_differ("toy") == {}


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


def test_what_a_page_has_by_hand(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text("# A\n\n## B\n\nx\n\ny\n\n## C\n\nz\n")
    monkeypatch.setitem(page.PAGES, "a", tmp_path / "a.md")
    assert page.by_hand("a", "B") == "## B\n\nx\n\ny\n" and page.by_hand("a", "C") == "## C\n\nz\n"


def test_paragraphs_are_wrapped():
    """Not tables, headings, pictures or code; what is empty is left out."""
    words = " ".join(["word"] * 40)
    text = page.wrapped(f"# {words}\n\n{words}\n\n\n- {words}\n- b\n  c\n\n| {words} |\n|---|\n\n![{words}](x)\n")
    title, prose, items, table, picture = text.split("\n\n")
    assert title == f"# {words}" and table == f"| {words} |\n|---|" and picture == f"![{words}](x)\n"
    assert len(prose.splitlines()) == 2 and max(map(len, prose.splitlines())) <= 120 and " ".join(prose.split()) == words
    assert [line[:2] for line in items.splitlines()] == ["- ", "  ", "- "] and items.endswith("- b c")


def test_the_page_of_variants_fits_its_numbers(monkeypatch):
    """On made-up results that say what it says, and on some that do not."""
    found = {"runs": {}}
    for part, rows in studies.STUDIES["variants"].items():
        for name, flags in rows.items():
            better = 0.2 * (name in ("dynamic_sampling", "pass_at_k", "maxrl") or (name, part) == ("GRPO, KL", page.OFTEN))
            worse = 0.1 * (name == "tis")
            for seed, noise in zip("12345", (0.02, -0.02, 0.01, -0.01, 0.0)):
                run = {of: 0.5 + better - worse + noise * (name != "GRPO") for of in ("greedy", "pass@1", "pass@8")}
                found["runs"].setdefault(flags, {})[seed] = run | {
                    "tokens": 1e6, "length": 20.0, "entropy": 0.1,
                    "points": [{"tokens": 0, "greedy": 0.3}, {"tokens": 1e6, "greedy": run["greedy"]}]}
    tuned = {"runs": {flags: {"101": {"greedy": 0.0}} for flags in studies.rows_of("variants_tuning")}}
    fast = {name: f"{flags} --lr 3e-4" for name, flags in studies.REGIMES[page.OFTEN].items()}
    for name, x in (("gspo", 0.7), ("GRPO, KL", 0.8), ("dapo", 0.5)):
        tuned["runs"][fast[name]]["101"]["greedy"] = x
    monkeypatch.setattr(page, "kept", lambda name: tuned if name == "variants_tuning" else found)
    differ = {(page.ONCE, "dynamic_sampling"): 20.0}
    monkeypatch.setattr(page, "shown_to_differ", lambda study: differ)
    text = page.rendered("variants")
    assert "where GRPO ends at 0%: 80% and 70%, in one run each; the KL, tuned: 20.0 points more" in text
    assert "Of 43 rows one differs" in " ".join(text.split())
    tuned["runs"][fast["cispo"]]["101"]["greedy"] = 0.6     # it has neither a KL nor the ratio of a completion
    with pytest.raises(AssertionError):
        page.rendered("variants")
    tuned["runs"][fast["cispo"]]["101"]["greedy"] = 0.0
    differ[page.OFTEN, "dapo"] = 10.0                       # the text speaks of one row
    with pytest.raises(AssertionError):
        page.rendered("variants")


def test_what_is_reached_at_equal_cost(toy):
    """The first seed of the row is half-way to its second point when the base ends, the others are at it or beyond."""
    for seed, tokens in (("1", 10), ("2", 20), ("3", 90)):
        toy["runs"][""][seed]["points"] = [{"tokens": 0, "greedy": 0.0}, {"tokens": tokens, "greedy": 0.9}]
        toy["runs"]["--lr 1"][seed]["points"] = [{"tokens": 0, "greedy": 0.1}, {"tokens": 20, "greedy": 0.3}, {"tokens": 40, "greedy": 0.5}]
    assert page.reached(ROW, BASE, "tokens") == "30%"
    toy["runs"][""]["2"]["points"][-1]["tokens"] = 15
    assert page.reached(ROW, BASE, "tokens") == "25%"


def test_how_a_metric_changes(toy):
    for seed, (first, last) in zip("123", ((5.0, 6.5), (4.0, 7.5), (5.5, 4.5))):
        toy["runs"]["--lr 1"][seed]["reward, means of 25 steps"] = [first, 9.0, last]
    assert page.change(ROW, "reward") == runs.with_interval([1.5, 3.5, -1.0])


def test_a_table_of_a_page(toy):
    assert "| two: base | 30% |" in page.table([("toy", "two", "base"), ROW], "greedy")
    lines = page.table([BASE, ROW], "greedy", "seconds", "auc").splitlines()
    assert lines[0] == "|  | greedy | seconds | AUC before RL | difference in accuracy |"
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| base | 30% | 20 |  |  |" and lines[3].startswith("| other: k1 | 36% | 50 | 0.80 | +6.0 (")
    lines = page.table([BASE, ROW], "greedy", of="pass@1", base=ROW).splitlines()
    assert lines[0].endswith("| difference in pass@1 |") and lines[3] == "| other: k1 | 36% |  |"
    assert lines[2].startswith("| base | 30% | −3.0 (")


@pytest.mark.parametrize("study", ["critic", "labels", "kl", "paper", "variants"])
def test_all_rows_have_a_page_with_their_flags(study):
    text = TEXTS[f"answers/{study}"]
    assert all(f"| {where} | {f'`{flags}`' if flags else ''} |" in text for flags, where in studies.rows_of(study).items())
    assert text.count("\n| before RL |") == len(studies.STUDIES[study])


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
