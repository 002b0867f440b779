"""The page of runs in a real browser: chromium with its driver, and selenium. What it shows is
computed anew from what was logged."""
import json
import math
import random
import re
import shutil

import pytest
from conftest import records
from test_report import HOSTILE

from run import report

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --window-size=1280,900""".split()
SPY = """
window.charts = [];
window.plots = [];
let plot;
Object.defineProperty(window, "uPlot", {get: () => plot, set: real => {
  plot = class extends real {
    constructor(...given) { super(...given); charts.push(given[1]); plots.push(this); }}}});"""
SETTLED = "setTimeout(arguments[0], 100)"       # what the browser does after an event is done


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program, driver = next(filter(None, programs), None), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("there is no chromium with a chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", dict(source=SPY))
    yield found
    found.quit()


@pytest.fixture
def opened(browser):
    """Opens a page, which may say nothing on its console nor ask a network."""
    def open_page(path):
        browser.get(path.as_uri())
        return browser
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    yield open_page
    events = [json.loads(x["message"])["message"] for x in browser.get_log("performance")]
    asked = [x["params"]["request"]["url"] for x in events
             if x["method"] == "Network.requestWillBeSent"]
    assert asked and all(re.fullmatch(r"file:///.*/(report|comparison)\.html", x) for x in asked)
    assert browser.get_log("browser") == []


def find(browser, css):
    return browser.find_elements("css selector", css)


def texts(browser, css):
    script = "return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)"
    return browser.execute_script(script, css)


def choose(browser, name, value):
    """Set a control, as a person does."""
    browser.execute_script(
        "const x = document.getElementById(arguments[0]); x.value = arguments[1];"
        "x.dispatchEvent(new Event('input')); x.dispatchEvent(new Event('change'))", name, value)


# -------- what is logged

def invented(rng, step, which, rows=5, text=None):
    """A record of samples.jsonl: two completions are equal. Groups at random have equal sums of
    rewards; in one of two steps a completion has two."""
    own = [text or "".join(rng.choices("xyZ\n", k=rng.randint(1, 6))) for _ in range(rows)]
    rewards = [rng.choice((-1.25, -0.5, 0.0, 2.0)) for _ in own]
    own[-1], rewards[-1] = own[1], rewards[1]
    tokens = [[*x, ""] for x in own]
    ends = [[len(x)] for x in own]
    if which == "random" and step % 3 < 2:
        rewards = [-0.5] * rows
    of_steps = [[x] for x in rewards]
    if which == "random" and step % 3 == 1:
        ends[0], of_steps[0] = [0, ends[0][0]], [0.5, -1.0]
    numbers = {key: [[round(rng.gauss(-0.2, 1), 4) for _ in x] for x in tokens]
               for key in ("advantages", "logp", "new_logp", "ref_logp", "entropy")}
    return {"step": step, "which": which, "prompt": f"{which} {step}=", "completions": own,
            "finished": [i > 0 for i in range(rows)], "rewards": rewards, "tokens": tokens,
            "parts": {"correct": [float(x > 0) for x in rewards],
                      "price": [-0.0123 * len(x) for x in own]},
            "ends": ends, "step_rewards": of_steps, **numbers}


def folder_of(where, samples, log=(), **config):
    """A run's folder, with what was logged."""
    where.mkdir()
    for name, lines in (("samples", samples), ("metrics", log or [{"step": 0}, {"step": 9}])):
        (where / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    about = dict(config={"lr": 1e-4} | config, command=["grpo.py"], versions={})
    (where / "run.json").write_text(json.dumps(about))
    return where


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs of other lengths, one of them measured at other steps."""
    rng, made = random.Random(0), []
    for name, last in (("a", 4), ("b", 8)):
        log = [{"step": 0, "greedy": 0, "pass@1": 0.5, "pass@4": 0.1, "held_out": 20}]
        for step in range(1, last + 1):
            log.append({"step": step, "reward": round(rng.gauss(-1, 1), 5), "length": step / 3,
                        "accuracy": rng.choice((0.0, 0.5)), "kl": -1e-4 * step, "beta": 0,
                        "entropy": 1.0, "finished": 0, "price": -1.0, "seconds": 30.0})
            if step == last - 1:
                log[-1] |= {"greedy": 0.625, "pass@1": 0.6 + last / 100, "pass@4": 0.5625}
        samples = [invented(rng, step, which) | {"answer": f"{step} {which}"}
                   for step in range(1, 5) for which in ("spread", "random")]
        made.append(folder_of(tmp_path_factory.mktemp("page") / name, samples, log, group=last,
                              prompts=3, held_out=20, init="x", warm_lr=last))
    return made


@pytest.fixture(scope="module")
def page(folders):
    return report.write(folders)


def shown(x):
    """A number as the page writes it: four digits, integers in full."""
    if float(x).is_integer():
        return str(int(x))
    text = f"{x:.4g}" if abs(x) >= 1e-3 else f"{x:.3e}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text)


def kl(g, i, t):
    gap = g["ref_logp"][i][t] - g["logp"][i][t]
    return math.expm1(gap) - gap


QUANTITIES = {
    "advantage": lambda g, i, t: g["advantages"][i][t],
    "log-ratio": lambda g, i, t: g["new_logp"][i][t] - g["logp"][i][t],
    "KL": kl,
    "entropy": lambda g, i, t: g["entropy"][i][t]}


def values_of(g, name):
    of, tokens = QUANTITIES[name], g["tokens"]
    return [[of(g, i, t) for t in range(len(row))] for i, row in enumerate(tokens)]


# -------- the page

def test_the_curves_of_a_run_are_those_of_its_log(opened, folders):
    """Zeros on a whole axis; evaluations dotted, pass@1 with its interval."""
    page, log = opened(report.write(folders[:1])), records(folders[0] / "metrics.jsonl")
    ends = " → ".join(shown(log[n]["reward"]) for n in (1, -1))
    assert texts(page, "#figures strong") == ["0.0% → 62.5%", "50.0% → 64.0%", ends]
    # Wilson's for 0.64 of 20.
    assert texts(page, "#figures span")[3] == "95% interval 42.3% to 81.1%"
    assert texts(page, "#first .value")[1:5] == [
        f"{log[-1]['accuracy']:.1%}", "62.5%", "64.0%", "56.2%"]
    assert page.execute_script("""
        const {ctx, valToPos, series} = plots[1], y = valToPos(0.45, "y", true);
        const {data} = ctx.getImageData(valToPos(3, "x", true), y, 1, 30);
        return [plots[5].scales.y.max, series.map(x => x.dash?.length), data[3], data.at(-1) < 99]
        """) == [1, [None, 0, 2, 2, 2], 255, True]
    for name, of in (("completions", 12), ("minutes", 0.5)):
        choose(page, "axis", name)
        x, _, greedy, *_ = page.execute_script("return charts.at(-5)")
        assert x == [of * n for n in range(5)] and greedy == [0, None, None, 0.625, None]


def test_a_learned_reward_stands_beside_the_rules(opened, folders, tmp_path):
    log = records(folders[0] / "metrics.jsonl")
    lines = [json.dumps(m | {"rule_reward": m["step"] / 8} if m["step"] else m) for m in log]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, last = opened(report.write([tmp_path])), shown(log[-1]["step"] / 8)
    assert texts(page, "#figures strong")[2] == f"0.125 → {last}"
    assert texts(page, "#first h3")[:3] == ["reward", "rule_reward", "accuracy"]


def test_curves_of_several_runs_and_their_table(opened, folders, page):
    """Each point. The table is sorted as one likes."""
    page, logs = opened(page), [records(where / "metrics.jsonl") for where in folders]
    find(page, "#more summary")[0].click()
    page.execute_async_script(SETTLED)
    first = ["reward", "accuracy", "pass@1", "length", "kl", "entropy", "finished"]
    others = ["price", "beta", "seconds"]
    assert texts(page, "#first h3") == first and texts(page, "#more h3") == others
    assert "rule" in texts(page, "#more p")[0]
    charts = page.execute_script("return charts")[-len(first + others):]
    for key, drawn in zip(first + others, charts, strict=True):
        at = [{m["step"]: m.get(key) for m in log} for log in logs]
        assert drawn == [[*range(9)], *([x.get(step) for step in range(9)] for x in at)]
    ends = [[shown(log[n]["reward"]) for n in (1, -1)] for log in logs]
    assert texts(page, "#first .lines")[0] == f"at the end:a {ends[0][1]}b {ends[1][1]}"
    assert texts(page, "#overview th") == [
        "run", "group", "pass@1", "greedy", "reward", "accuracy", "length", "steps"]
    rows = [[run, n, f"50.0% → {best}", "0.0% → 62.5%", " → ".join(of)] for run, n, best, of in
            zip("ab", "48", ("64.0%", "68.0%"), ends)]
    for order, column in (-1, None), (1, 2), (-1, 0), (1, 0), (-1, 1):
        page.execute_script("document.querySelectorAll('button')[arguments[0]]?.click()", column)
        found = texts(page, "#overview td")
        assert [found[:5], found[8:13]] == rows[::order]
    assert texts(page, ".best") == ["50.0% → 68.0%"]
    label, note = texts(page, "#figures span")
    assert label == "best pass@1: b" and note.endswith("; perhaps no worse: a")
    colours = [x.value_of_css_property("stroke") for x in find(page, "#overview path, .chart path")]
    assert colours[:2] == colours[2:4][::-1] and len({*colours}) == 2
    assert texts(page, "#settings tr.differs") == ["group48", "warm_lr48"]


def test_completions_are_those_of_the_logs(opened, folders, page):
    """Their order and numbers, the colours of tokens and their scale, what is dead; for each step
    and group, and what one chooses to see."""
    page = opened(page)
    for number, where in enumerate(folders):
        choose(page, "run", number)
        samples = records(where / "samples.jsonl")
        for n, g in enumerate(samples):
            name = [*QUANTITIES][n % 4]
            choose(page, "step", g["step"] - 1)
            choose(page, "which", g["which"])
            choose(page, "colour", name)
            assert texts(page, "#group > pre") == [g["prompt"], f"right answer: {g['answer']}"]
            assert texts(page, "#at") == [f"{g['step']} ({g['step']} of 4)"]
            about, = texts(page, "#group p")
            assert f"mean reward {shown(sum(g['rewards']) / 5)}" in about
            assert ("a dead group" in about) == (len({*sum(g["step_rewards"], [])}) == 1)
            every = sorted(abs(x) for s in samples for row in values_of(s, name) for x in row)
            most = every[len(every) * 9 // 10]
            least = "0" if name in ("KL", "entropy") else f"≤ {shown(-most)}"
            assert texts(page, "#legend")[0].startswith(f"{least}≥ {shown(most)}{name}: ")
            values = values_of(g, name)
            order = sorted(range(5), key=lambda i: -g["rewards"][i])    # ties as in the log
            keys = [*zip(g["completions"], g["rewards"], g["finished"])]
            order = [i for i in order if keys.index(keys[i]) == i]
            for i, card in zip(order, find(page, ".card"), strict=True):
                heads = [x.text for x in card.find_elements("css selector", "header > *")]
                parts = [f"{x} {shown(g['parts'][x][i])}" for x in ("correct", "price")]
                times = [f"{n}x"] if (n := keys.count(keys[i])) > 1 else []
                assert heads == [*times, f"reward {shown(g['rewards'][i])}", *parts,
                                 "finished" if i else "cut", f"{len(values[i])} tokens"]
                colours = [x.get_attribute("style")
                           for x in card.find_elements("css selector", ".tok")]
                for x, style in zip(values[i], colours, strict=True):
                    hue, share = re.search(r"var\((--\w+)\) / calc\(var\(--deep\) \* ([\d.]+)",
                                           style).groups()
                    assert hue == ("--much" if least == "0" else "--plus" if x > 0 else "--minus")
                    assert float(share) == pytest.approx(min(1, abs(x) / most) ** 0.5, abs=6e-4)
            page.execute_script("document.querySelector('.tok').click()")       # a tap
            i = order[0]
            old, new = (shown(math.exp(g[key][i][0])) for key in ("logp", "new_logp"))
            assert texts(page, "#tip td") == [
                json.dumps(g["tokens"][i][0]), f"1 of {len(values[i])}",
                *(shown(of(g, i, 0)) for of in QUANTITIES.values()), f"{old} → {new}"]


def test_replies_stand_between_the_tokens_and_are_none(opened, tmp_path):
    """Each before the token that was sampled next; a search is in what the policy said."""
    one = invented(random.Random(0), 1, "spread", 2, "ab")
    one |= {"completions": [["given", "?", "a", "<b>no</b>", "b"], ["ab"]], "replies": [[1], []],
            "rewards": [1.0, 0.0], "ends": [[0, 2], [2]], "step_rewards": [[0.5, 0.25], [0.75]],
            "advantages": [[0, 0, 0], [0, 0, 0]]}
    page = opened(report.write([folder_of(tmp_path / "turns", [one])]))
    assert texts(page, ".card .text") == ["a0.5<b>no</b>b·0.25", "ab⟨end⟩0.75"]
    assert texts(page, ".reply") == ["<b>no</b>"] and len(find(page, ".tok")) == 6
    assert texts(page, "#legend") == ["advantage: 0 in every logged token."]
    choose(page, "search", "no")
    assert find(page, ".card") == []


def test_what_is_hostile_shows_as_text(opened, tmp_path):
    """Wherever it comes from: a folder's name, a completion, a prompt, a metric, a setting."""
    one = invented(random.Random(0), 1, "spread", 2, HOSTILE)
    one |= dict(prompt=HOSTILE * 5, parts={HOSTILE: [1.0, 2.0]}, answer=HOSTILE)
    where = tmp_path / '<img src=x onerror="hacked=1">'
    folder_of(where, [one], [{"step": 0}, {"step": 5, HOSTILE: 1.0}], task=HOSTILE)
    page = opened(report.write([where]))
    page.execute_script("for (const x of document.querySelectorAll('details')) x.open = true")
    page.execute_async_script(SETTLED)
    assert texts(page, "#group pre")[1:3] == [HOSTILE * 5, f"right answer: {HOSTILE}"]
    assert HOSTILE in texts(page, ".prompt summary")[0] and not find(page, "summary pre")[0].text
    assert texts(page, "h1") == [f"The run {where.name}"]
    assert {*texts(page, ".card .text")} == {HOSTILE + "·", HOSTILE + "⟨end⟩"}
    assert HOSTILE in texts(page, ".chart h3")
    assert HOSTILE in texts(page, "#settings")[0]
    assert page.execute_script("return typeof hacked") == "undefined"
    assert not find(page, "img") and len(find(page, "script")) == 3
