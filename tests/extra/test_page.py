"""The page of a run in a real browser, where there is one: chromium with its driver, and selenium."""
import json
import random
import re
import shutil
import subprocess

import pytest
from test_report import HOSTILE, lines, shown_data

from run import files, report


FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --window-size=1280,900").split()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("there is no chromium with a chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def invented(steps, texts, rows=16, groups=("spread", "random")):
    """Records of samples.jsonl, by `texts(step, which, row)`; the rewards go down from row to row, but in each
    third step the group at random is dead."""
    for step in steps:
        for which in groups:
            own = [texts(step, which, i) for i in range(rows)]
            dead = which == "random" and step % 3 == 0
            numbers = {name: [[round(at + 0.01 * (t % 7), 4) for t in range(len(text) + 1)] for text in own]
                       for name, at in (("logp", -0.5), ("new_logp", -0.4), ("ref_logp", -0.6), ("entropy", 0.3))}
            yield {"step": step, "which": which, "prompt": f"{which} {step}=", "completions": own,
                   "finished": [i > 0 for i in range(rows)], "rewards": [0.0 if dead else float(rows - i) for i in range(rows)],
                   "parts": {"correct": [1.0] * rows}, "tokens": [[*text, ""] for text in own],
                   "advantages": [[0.0 if dead else 1.5 - i] * (len(text) + 1) for i, text in enumerate(own)],
                   **numbers, "ends": [[2, len(text)] for text in own], "step_rewards": [[0.25, 0.75 - i] for i in range(rows)]
                   if not dead else [[0.5, 0.5]] * rows}


def folder_of(where, records, steps=4, **config):
    """A run's folder with some records, and its page."""
    where.mkdir()
    (where / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    for step in range(steps + 1):
        files.append(where / "metrics.jsonl", {"step": step} | (dict(reward=step / steps, accuracy=0.5, kl=0.01,
                      entropy=1.0, length=9.0, dead_groups=0.1, style=0.2) if step else {}) | (
                      {"greedy": step / 10, "pass@4": 0.7, "maj@2": 0.2, "pass@8": 0.9} if step % 2 == 0 else {}))
    (where / "run.json").write_text(json.dumps(dict(config={"lr": 1e-4} | config, command=["grpo.py"], versions={})))
    return report.write([where])


@pytest.fixture
def opened(browser):
    """A function that opens a page: nothing may be said on its console, and nothing asked of a network."""
    def open_page(path, width=1280, scheme="light"):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                dict(features=[dict(name="prefers-color-scheme", value=scheme)]))
        browser.get(path.as_uri())
        return browser
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    yield open_page
    asked = [x["params"]["request"]["url"] for x in (json.loads(x["message"])["message"] for x in
             browser.get_log("performance")) if x["method"] == "Network.requestWillBeSent"]
    assert asked and all(x.startswith("file:///") and x.endswith(("/report.html", "/comparison.html")) for x in asked)
    assert browser.get_log("browser") == []


SETTLED = "setTimeout(arguments[0], 100)"       # what the browser does after an event is done
LOADED = """                                    // when the load event was done, in milliseconds; 0 before it is
const ended = () => performance.getEntriesByType('navigation')[0].loadEventEnd;
const wait = () => ended() ? arguments[0](ended()) : setTimeout(wait, 20);
wait()"""


def find(browser, css):
    return browser.find_elements("css selector", css)


def text_of(browser, css):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", css)


def choose(browser, name, value):
    """Set a control, as a person does."""
    browser.execute_script("const x = document.getElementById(arguments[0]); x.value = arguments[1];"
                           "x.dispatchEvent(new Event('input')); x.dispatchEvent(new Event('change'))", name, value)


def test_a_large_run_loads_in_two_seconds(opened, tmp_path):
    """200 steps, 2 groups, 16 completions of 50 tokens; the last step is shown."""
    path = folder_of(tmp_path / "run", [], 200)
    two = [json.dumps(x) for x in invented([1], lambda *at: "47*50=2000\n" * 4 + "12345")]
    (path.parent / "samples.jsonl").write_text("".join(
        line.replace(" 1, ", f" {step}, ", 1).replace(" 1=", f" {step}=") + "\n" for step in range(1, 201) for line in two))
    report.write([path.parent])
    assert path.stat().st_size > 10_000_000
    page = opened(path)
    assert 0 < page.execute_async_script(LOADED) < 2000
    assert text_of(page, "#at") == "200 (200 of 200)" and text_of(page, "pre.prompt") == "spread 200="
    assert len(find(page, ".card")) == 16 and len(find(page, ".tok")) == 16 * 50
    assert text_of(page, "#note") == ""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run of 4 steps, 3 rows a group."""
    records = invented(range(1, 5), lambda step, which, i: f"ab{step}\n{which}{i}", rows=3)
    return folder_of(tmp_path_factory.mktemp("page") / "small", records, group=3)


def test_the_slider_and_the_buttons_go_through_the_steps(opened, page):
    page = opened(page)
    step = find(page, "#step")[0]
    assert text_of(page, "pre.prompt") == "spread 4="
    step.send_keys("\ue012")                                # the left arrow
    assert text_of(page, "pre.prompt") == "spread 3=" and text_of(page, "#at") == "3 (3 of 4)"
    find(page, "#back")[0].click()
    assert text_of(page, "pre.prompt") == "spread 2="
    choose(page, "which", "random")
    assert text_of(page, "pre.prompt") == "random 2="
    find(page, "#on")[0].click()
    assert text_of(page, "pre.prompt") == "random 3=" and "a dead group" in text_of(page, "#group p")
    cards = [" ".join(card.text.split()) for card in find(page, ".card header")]
    assert cards[0].startswith("reward 0 correct 1 cut") and cards[1].startswith("reward 0 correct 1 finished")
    assert [x.text for x in find(page, ".card .text")] == [f"ab30.5↵\nrandom{i}(end)".replace("(end)", end) + "0.5"
            for i, end in enumerate(("·", "⟨end⟩", "⟨end⟩"))]


def test_replies_stand_between_the_tokens_and_are_none(opened, tmp_path):
    """Each before the token that was sampled next; a text is looked for in what the policy said."""
    one, = invented([1], lambda *at: "ab", rows=2, groups=("spread",))
    one |= {"completions": [["a", "<b>no</b>", "b"], ["ab"]], "replies": [[1], []]}
    page = opened(folder_of(tmp_path / "turns", [one], steps=1))
    assert [x.text for x in find(page, ".card .text")] == ["a<b>no</b>b·0.25", "ab⟨end⟩0.25"]
    assert [x.text for x in find(page, ".reply")] == ["<b>no</b>"] and len(find(page, ".tok")) == 6
    choose(page, "search", "no")
    assert find(page, ".card") == []
    choose(page, "search", "ab")
    assert len(find(page, ".card")) == 2 and [x.text for x in find(page, ".found")] == [*"abab"]


def rgba(page, token=0):
    """The background of a token: red, green, blue, alpha."""
    css = find(page, ".tok")[token].value_of_css_property("background-color")
    return [float(x) for x in re.findall(r"[\d.]+", css)]


def test_tokens_are_coloured_by_what_one_chooses(opened, page):
    """The first card has the advantage 1.5, the third -0.5; the scale goes to the ninth of ten values."""
    page, n = opened(page), 12
    high, low = rgba(page), rgba(page, 2 * n)
    assert high[2] > high[0] and low[0] > low[2] and high[3] == pytest.approx(3 * low[3], abs=0.02)
    assert text_of(page, "#legend").startswith("≤ -1.5≥ 1.5advantage: blue")
    seen = {tuple(high)}
    for name, at in (("log-ratio", 0.1), ("KL", None), ("entropy", 0.35), ("surprise", 0.5)):
        choose(page, "colour", name)
        seen.add(tuple(rgba(page)) + (name,))
        assert name in text_of(page, "#legend") and (at is None or f"≥ {at}" in text_of(page, "#legend"))
        assert rgba(page)[3] > 0.3
    choose(page, "colour", "entropy")
    assert rgba(page, 0)[3] < rgba(page, 6)[3]              # 0.30 and 0.36
    assert len(seen) == 5


def shown(x):
    """A number as the page writes it: four digits, integers in full."""
    if x is None or isinstance(x, str):
        return x or "–"
    if float(x).is_integer():
        return str(int(x))
    short = float(f"{x:.4g}")
    text = f"{short:.4g}" if abs(short) >= 1e-3 else f"{short:.3e}"
    return re.sub(r"\.?0*e([+-])0*", r"e\1", text).replace("e-", "e-")


CARDS = """
return [...document.querySelectorAll(".card")].map(card => [
  [...card.querySelectorAll("header span")].map(x => x.textContent),
  [...card.querySelectorAll(".tok")].map(x => x.getAttribute("style"))])"""


def test_the_numbers_of_the_page_are_those_of_the_logs(opened, tmp_path):
    """Two runs with negative and tied values: the overview, the curves' last values, the order and the numbers of
    cards, colours of tokens, the scale, what is dead, and the filters, all computed anew from what was logged."""
    rng, folders = random.Random(0), []
    for name in ("a", "b"):
        records = list(invented(range(1, 5), lambda step, which, i: "".join(rng.choices("xyz\n", k=rng.randint(1, 6))), rows=5))
        for n, g in enumerate(records):
            sizes = [len(row) for row in g["tokens"]]
            g["rewards"] = [-0.5] * 5 if n % 3 == 2 else [round(rng.choice((-1.25, -0.5, 0.0, 2.0)), 4) for _ in range(5)]
            g["ends"], g["step_rewards"] = [[size - 1] for size in sizes], [[x] for x in g["rewards"]]
            g["parts"] = {"correct": [float(x > 0) for x in g["rewards"]], "price": [-0.0123 * size for size in sizes]}
            for key in ("advantages", "logp", "new_logp", "ref_logp", "entropy"):
                g[key] = [[round(rng.gauss(-0.2, 1), 4) for _ in range(size)] for size in sizes]
        where = tmp_path / name
        folder_of(where, records)
        (where / "metrics.jsonl").write_text("")
        for step in range(5):
            values = {"step": step, "greedy": round(rng.random(), 4), "pass@1": 0.25} | ({} if step == 0 else dict(
                reward=round(rng.gauss(-1, 1), 5), accuracy=rng.choice((0.0, 0.5)), length=step / 3, kl=-1e-4 * step, entropy=1.0))
            files.append(where / "metrics.jsonl", values)
        folders.append((where, records))
    page = opened(report.write([where for where, _ in folders]))
    for (where, _), row in zip(folders, find(page, "#overview tr")[1:]):
        logged = lines(where / "metrics.jsonl")
        pairs = [" → ".join(shown(m[key]) for m in (logged[1 if key in ("reward", "accuracy", "length") else 0], logged[-1]))
                 for key in ("reward", "accuracy", "length", "greedy", "pass@1")]
        assert [x.text for x in row.find_elements("css selector", "td")][2:] == ["4", *pairs, ""]
    for chart in find(page, "#first .chart"):
        name, said = chart.get_attribute("data-name"), chart.find_element("css selector", ".lines").text
        for where, _ in folders:
            assert f"{where.name} {shown(lines(where / 'metrics.jsonl')[-1][name])}" in said, (name, said)
    for number, (where, records) in enumerate(folders):
        choose(page, "run", number)
        every = sorted(abs(x) for g in records for row in g["advantages"] for x in row)
        most = every[len(every) * 9 // 10]
        assert text_of(page, "#legend").startswith(f"≤ {shown(-most)}≥ {shown(most)}advantage")
        living = set()
        for g in records:
            choose(page, "step", g["step"] - 1)
            choose(page, "which", g["which"])
            assert text_of(page, "pre.prompt") == g["prompt"]
            dead = len({*g["rewards"]}) == 1
            living |= set() if dead else {g["step"]}
            about = text_of(page, "#group p")
            assert f"mean reward {shown(sum(g['rewards']) / 5)}" in about and ("a dead group" in about) is dead
            order = sorted(range(5), key=lambda i: -g["rewards"][i])        # ties in the order of the log
            for i, (head, styles) in zip(order, page.execute_script(CARDS), strict=True):
                assert head == [f"reward {shown(g['rewards'][i])}", f"correct {shown(g['parts']['correct'][i])}",
                                f"price {shown(g['parts']['price'][i])}", "finished" if g["finished"][i] else "cut",
                                f"{len(g['tokens'][i])} tokens"]
                for x, style in zip(g["advantages"][i], styles, strict=True):
                    share = re.search(r"var\((--\w+)\) / calc\(var\(--deep\) \* ([\d.]+)", style)
                    assert share[1] == ("--plus" if x > 0 else "--minus") and float(share[2]) == pytest.approx(
                        min(1, abs(x) / most), abs=6e-4)
        find(page, "#living")[0].click()
        assert text_of(page, "#at").endswith(f"of {len(living)})")
        find(page, "#living")[0].click()


def test_a_token_that_is_pointed_at_shows_its_numbers(opened, page):
    from selenium.webdriver import ActionChains
    page = opened(page)
    tip = find(page, "#tip")[0]
    assert not tip.is_displayed()
    page.execute_script("document.querySelector('.tok').scrollIntoView({block: 'center'})")
    page.execute_async_script(SETTLED)                      # a page that scrolls hides the numbers
    ActionChains(page).move_to_element(find(page, ".tok")[2]).perform()
    assert tip.is_displayed()
    rows = dict(row.text.split(" ", 1) for row in find(page, "#tip tr"))
    assert rows == {"token": '"4"', "place": "3 of 12", "advantage": "1.5", "log-ratio": "0.1", "KL": "0.004837",
                    "entropy": "0.32", "surprise": "0.48", "probability": "0.6188 → 0.6839"}
    ActionChains(page).move_to_element(find(page, "h2")[1]).perform()
    assert not tip.is_displayed()
    page.execute_script("document.querySelectorAll('.tok')[3].click()")     # a tap
    assert tip.is_displayed() and '"\\n"' in tip.text


def test_search_and_the_filter_of_dead_groups(opened, page):
    page = opened(page)
    find(page, "#search")[0].send_keys("B2\nSpread1")
    choose(page, "search", "spread1")
    assert len(find(page, ".card")) == 1 and text_of(page, "#at") == "4 (4 of 4)"
    assert "1 with “spread1”" in text_of(page, "#group p")
    assert "".join(x.text for x in find(page, ".tok.found")) == "spread1"
    choose(page, "search", "AB2")
    assert text_of(page, "#at") == "2 (1 of 1)" and len(find(page, ".card")) == 3
    choose(page, "search", "random 3=")                     # a prompt: all of its completions
    assert text_of(page, "pre.prompt") == "random 3=" and len(find(page, ".card")) == 3
    find(page, "#living")[0].click()
    assert text_of(page, "#note") == "No group matches." and not find(page, ".card")
    choose(page, "search", "")
    assert text_of(page, "pre.prompt") == "spread 4="
    choose(page, "search", "random")
    assert [choose(page, "step", i) or text_of(page, "pre.prompt") for i in range(3)] == ["random 1=", "random 2=", "random 4="]


def test_what_is_hostile_shows_as_text(opened, tmp_path):
    """Wherever it comes from: a folder's name, a completion, a prompt, a metric, a setting."""
    records = [x | dict(prompt=HOSTILE, parts={HOSTILE: [1.0, 2.0]}, ends=[[3], [3]], step_rewards=[[1], [1]])
               for x in invented([1], lambda *at: HOSTILE, rows=2)]
    where = tmp_path / '<img src=x onerror="hacked=1">'
    folder_of(where, records, task=HOSTILE)
    files.append(where / "metrics.jsonl", {"step": 5, HOSTILE: 1.0})
    page = opened(report.write([where]))
    page.execute_script("for (const x of document.querySelectorAll('details')) x.open = true")
    page.execute_async_script(SETTLED)
    assert text_of(page, "pre.prompt") == HOSTILE and text_of(page, "h1") == f"The run {where.name}"
    assert [x.get_attribute("textContent") for x in find(page, ".card .text")] == [
        HOSTILE + end for end in ("·", "⟨end⟩")]
    assert HOSTILE in [x.get_attribute("textContent") for x in find(page, ".chart h3")]
    assert json.dumps(HOSTILE, ensure_ascii=False) in text_of(page, "#settings")
    assert page.execute_script("return typeof hacked") == "undefined"
    assert not find(page, "img") and len(find(page, "script")) == 3


def test_curves_of_several_runs(opened, page, tmp_path):
    """Each in its colour, with the folder's name; what is not of first interest is folded away, and of
    pass@k and maj@k those between the least k and the largest are left out."""
    small = page.parent
    other = folder_of(tmp_path / "other", [], 8, group=5).parent
    page = opened(report.write([small, other], tmp_path))
    names = [x.text for x in find(page, "#first h3")]
    assert names == ["reward", "accuracy", "length", "kl", "entropy"] and not find(page, "#more .chart")
    find(page, "#more summary")[0].click()
    page.execute_async_script(SETTLED)
    assert [x.text for x in find(page, "#more h3")] == ["style", "dead_groups"]
    legend = [x.text for x in find(page, "#first .chart:nth-child(2) .lines > div")]
    assert legend == ["at the end: accuracy: small 0.5 other 0.5".replace(": accuracy", ":\naccuracy").replace("0.5 other", "0.5\nother")
                      .replace(": small", ":\nsmall"), *(x.replace(": ", ":\n", 1).replace(" other", "\nother") for x in (
                          "greedy: small 0.4 other 0.8", "pass@8: small 0.9 other 0.9"))]
    drawn = page.execute_script("""
        const c = document.querySelector("#first canvas"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        const seen = {};
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) seen[[d[i], d[i + 1], d[i + 2]]] = 1 + (seen[[d[i], d[i + 1], d[i + 2]]] || 0);
        return seen""")
    assert drawn.get("0,114,178", 0) > 50 and drawn.get("213,94,0", 0) > 50
    assert [x.text for x in find(page, "#overview td:first-child")] == ["small", "other"]
    assert [x.text for x in find(page, "#overview td:last-child")] == ["group 3", "group 5"]
    find(page, "#settings summary")[0].click()
    assert find(page, "#settings tr.differs")[0].text.split() == ["group", "3", "5"]
    choose(page, "run", "1")
    assert text_of(page, "#note") == "No completions have been logged yet."


# Of a page nothing is there but its data; what is drawn goes into `charts`.
NO_PAGE = """
const charts = [];
const none = new Proxy(function () {}, {
  get: (_, name) => name === Symbol.iterator ? function* () {} : name === Symbol.toPrimitive ? () => "" : name === "value" ? "" : none,
  set: () => true, apply: () => none, construct: () => none});
const page = id => id === "data" ? {textContent: DATA} : none;
const document = new Proxy({}, {get: (_, name) => name === "getElementById" ? page : none});
const getComputedStyle = () => none, matchMedia = () => none;
class ResizeObserver { observe() {} }
class uPlot { constructor(options, data) { charts.push(data); } }
"""


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_every_point_of_every_curve(tmp_path):
    """Not the last ones alone. The runs are of other lengths, one was measured at other steps, and their folders have the
    same name, so that they are shown by their paths; what one lacks is null, and a 0 is a number."""
    logs = {"one/run": [{"step": 0, "greedy": 0.1}, {"step": 1, "reward": 1.5, "beta": 0}, {"step": 2, "reward": -2, "beta": 0.5},
                        {"step": 3, "reward": 0, "greedy": 0.4}], "other/run": [{"step": 0, "greedy": 0}, {"step": 12, "reward": 7}]}
    for name, log in logs.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in log))
    folders = [str(tmp_path / name) for name in logs]
    found = json.dumps(shown_data(report.write(folders)))
    script = f"const DATA = {json.dumps(found)};{NO_PAGE}{(report.PAGE / 'page.js').read_text()}"
    script += "\nconsole.log(JSON.stringify({charts, labels: runs.map(run => run.label)}))"
    done = subprocess.run(["node"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["labels"] == folders
    assert said["charts"][:2] == [[[1, 2, 3, 12], [1.5, -2, 0, None], [None, None, None, 7]], [[0, 3], [0.1, 0.4], [0, None]]]


def test_a_metric_is_described_as_what_it_is(opened, tmp_path):
    """A fork's own was once said to be a component of the reward."""
    records = [x | dict(parts={"correct": [1.0, 0.0], "style": [0.2, 0.2]}) for x in invented([1], lambda *at: "ab", rows=2)]
    where = folder_of(tmp_path / "run", records).parent
    files.append(where / "metrics.jsonl", {"step": 5, "odd": 1.0})
    page = opened(report.write([where]))
    find(page, "#more summary")[0].click()
    page.execute_async_script(SETTLED)
    assert {box.get_attribute("data-name"): box.find_element("css selector", ".about").text for box in find(page, "#more .chart")} == {
        "style": "a component of the rule's reward, mean over completions",
        "odd": "not described: MEANING in run/page/page.js lacks it",
        "dead_groups": "share of groups whose rewards are all equal; with a group baseline they teach nothing"}


def test_the_page_says_what_was_left_out(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST", 30_000)
    path = folder_of(tmp_path / "run", invented(range(1, 31), lambda *at: "abc", rows=2))
    page, kept = opened(path), len({x["step"] for x in shown_data(path)[0]["samples"]})
    assert 5 < kept < 30 and text_of(page, "#note").startswith(f"This page has {kept} of 30 logged steps")


def test_a_phone_and_the_dark(opened, page):
    page = opened(page, 375, "dark")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 375
    left = {round(card.rect["x"]) for card in find(page, ".card")}
    assert len(left) == 1                                   # one below the other
    back, text = ([float(x) for x in re.findall(r"[\d.]+", find(page, "body")[0].value_of_css_property(name))][:3]
                  for name in ("background-color", "color"))
    assert max(back) < 50 and min(text) > 200
