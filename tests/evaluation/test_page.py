import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from importlib import resources

import pytest
from markupsafe import escape
from plotly.offline import get_plotlyjs
from report_example import NASTY, report_example, with_answer
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from specheads.evaluation.answer import answer_of, main_data_set, ratios_of
from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import evidence_text, use_text
from specheads.evaluation.keys import MEASURED
from specheads.evaluation.page.document import html_of
from specheads.evaluation.report import DataSet, Report
from specheads.evaluation.tables import live_table, winners_table
from specheads.replay.intervals import Interval

FOLDER = resources.files("specheads.evaluation.page")
CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
UNFOLD = (
    "document.querySelectorAll('section > details:not(.numbers)').forEach(one => { one.open ="
    " true; })"
)
SIZES = {"wide": (1280, 800, False), "narrow": (390, 844, True)}
VOID = {"meta", "link", "input", "wbr"}


class Page(HTMLParser):
    """The page as a browser's parser would take it: tags, what they refer to, and text outside of
    scripts and styles.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open = []
        self.tags = []
        self.references = []
        self.text = []
        self.figures = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.references += [
            value for name, value in attrs if name in ("src", "href", "action", "data")
        ]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.figures = self.figures or data
        elif "style" not in self.open:
            self.text.append(data)


@pytest.fixture(scope="module")
def report():
    return report_example()


@pytest.fixture(scope="module")
def path(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html_of(report), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def html(path):
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_it_is_one_file_that_refers_to_nothing_else(path, html, page):
    rest = html.replace(get_plotlyjs(), "")
    assert len(rest) < len(html)
    assert "cdn" not in rest.lower()
    assert "http:" not in rest and "https:" not in rest
    assert all(reference.startswith("#") or reference == "data:," for reference in page.references)
    assert path.stat().st_size < 8e6
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_tags_nest_and_no_text_of_the_data_is_a_tag(html, page):
    assert page.open == []
    assert not {"deep", "test", "wide", "lossy", "weight", "tiny"} & set(page.tags)
    assert "<b>bold" not in html and "</script><b>" not in html
    assert page.tags.count("script") == 3


def test_everything_in_the_report_is_on_the_page(report, html, page):
    text = "".join(page.text)
    for data_set in report.data_sets:
        assert data_set.name in text
        for winner in data_set.winners:
            assert winner.family in text and winner.name in text
    for name in [row.name for row in report.live] + list(report.notes):
        assert name in text
    for sample in report.texts:
        assert sample.prompt in text and sample.rule in text
        assert all(str(escape(piece.strip())) in html for _, piece in sample.pieces)
    assert NASTY in text
    drawn = json.loads(page.figures)
    assert set(drawn) == {"speed", "pareto", "reliability"}
    hovers = [hover for trace in drawn["pareto"]["1"]["data"][1:] for hover in trace["hovertext"]]
    assert len(hovers) == len(report.data_sets[1].rules)


def test_figures_begin_with_the_main_families_each_in_its_look(report, page):
    traces = json.loads(page.figures)["pareto"]["1"]["data"]
    shown = [trace["name"] for trace in traces if trace.get("visible", True)]
    assert shown[:3] == ["Pareto front", "fixed_length", "head_threshold &lt;deep&gt;"] and shown[
        -2:
    ] == ["ceiling", "oracle"]
    assert len(shown) == 6  # and the best rule without a head
    lines = json.loads(page.figures)["speed"]["1 10"]["data"]
    thresholds = {
        escape(row.family)
        for row in report.data_sets[1].rules
        if "threshold" in row.parameters and not row.bound
    }
    looks = {
        (line["line"]["color"], line["marker"]["symbol"])
        for line in lines
        if line["name"] in thresholds
    }
    assert len(looks) == len(thresholds)
    by_name = {line["name"]: line for line in lines}
    assert by_name["best fixed length"]["y"][0] > by_name["target alone"]["y"][0] == 1
    # No rule that a decoder can use beats one of the Pareto front in both rates.
    usable = [row for row in report.data_sets[1].rules if not row.bound]
    points = [(row.discard_rate.value, row.verification_rate.value) for row in usable]
    for x, y in zip(traces[0]["x"], traces[0]["y"], strict=True):
        assert (x, y) in points
        assert not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)


def test_the_answer_comes_first_with_its_code_and_the_rest_is_folded(report, page, html):
    text = "".join(page.text)
    order = [
        "Use:",
        report.answer.setting,
        use_text(report.answer.comparison),
        evidence_text(report.answer),
        "Timing unreliable here",
        "Copy",
        "over best fixed",
        "Cost ratio",
        "Another cost ratio changes the winner",
        "What became of each token",
        "Speed-up by threshold",
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert (
        "specheads generate &#39;x=&lt;y&gt;&#39;" in html and "print(&#39;&lt;y&gt;&#39;)" in html
    )
    folded = re.findall(r'<section id="(\w+)"><details>', html)
    assert folded == ["winners", "pareto", "reliability", "live", "batches", "context"]


def test_a_share_below_nothing_is_no_gain_and_a_cost_above_a_step_is_no_share(report):
    data = report.data_sets[1]
    row = replace(
        next(each for each in data.winners if each.head),
        gap_ceiling=Interval(-6.95, -9, -1),
        head_share=1.12,
    )
    table = winners_table(report, replace(data, winners=[row]), row.ratio)
    shown = dict(zip(table.columns, table.rows[0], strict=True))
    assert (shown["of gap to ceiling"].text, shown["of gap to ceiling"].limits) == ("no gain", None)
    assert shown["head’s cost"].text == "over a step"


def test_decoded_figures_are_greyed_where_they_are_unreliable(report, html):
    assert html.index("The machine was &lt;busy&gt;.") < html.index("At cost ratio 5.4")
    assert html.count('class="scroll doubtful"') == 1 + len(report.batches)
    trusted = html_of(with_answer(replace(report, doubts=[])))
    assert 'class="scroll doubtful"' not in trusted and ", unreliable" not in trusted


def marked(table):
    return [row[0].text for row in table.rows if row[0].tag == "use"]


def test_the_setting_that_dev_prompts_chose_is_marked_and_not_the_fastest_in_hindsight(report):
    data = report.data_sets[1]
    order = sorted(
        (row for row in data.winners if row.ratio == "10" and not row.bound),
        key=lambda row: row.speedup.value,
    )
    slow = order[0]
    fast = order[-1]
    heads = [row for row in order if row.head]
    # On dev prompts it was the other way round
    swap = {id(slow): 9.0, id(fast): 0.1, id(heads[0]): 8.0}
    winners = [replace(row, dev_speedup=swap.get(id(row), row.dev_speedup)) for row in data.winners]
    other = with_answer(
        replace(report, doubts=[], data_sets=[report.data_sets[0], replace(data, winners=winners)])
    )
    assert marked(winners_table(other, other.data_sets[1], "10")) == [slow.family]
    slowest = min(
        (row for row in report.live if row.lossless), key=lambda row: row.speedup.value
    ).name
    assert marked(live_table(replace(other, answer=answer_of(other, {MEASURED: slowest})))) == [
        slowest
    ]


def test_an_empty_report_is_a_page_too():
    page = Page(html_of(Report({}, None)))
    assert page.open == [] and "section" not in page.tags and "svg" not in page.tags
    assert json.loads(page.figures) == {}


def test_without_plotly_the_page_has_all_but_the_plots(tmp_path):
    script = (
        "import sys, pathlib; sys.modules['plotly'] = None;"
        "from report_example import report_example;"
        "from specheads.evaluation.presentation import write_report;"
        f"write_report(report_example(), pathlib.Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert "pip install 'specheads[plots]'" in done.stderr
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == [] and page.figures == "{}"
    text = "".join(page.text)
    assert "Use:" in text and "The best of each family" in text
    assert "Speed-up by threshold" not in text


def test_parts_of_a_report_make_a_page(report):
    first = report.data_sets[1]
    bare = replace(first, winners=[], reliability=[])
    unbound = [replace(row, gap_ceiling=None) for row in first.winners if row.ratio == MEASURED]
    sets = [
        bare,
        DataSet("none", "dev", 0, 0, 0, [], []),
        replace(first, winners=unbound, rules=[]),
    ]
    parts = [replace(report, data_sets=[data], live=[]) for data in sets]
    for part in (*parts, replace(report, data_sets=sets), replace(report, data_sets=[])):
        assert Page(html_of(with_answer(part))).open == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not (CHROMIUM and CHROMEDRIVER):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(CHROMEDRIVER)) as browser:
        yield browser


@pytest.fixture(scope="module", params=SIZES)
def opened(request, browser, path):
    width, height, mobile = SIZES[request.param]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    # A window is never as narrow as a phone
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    browser.execute_script(UNFOLD)
    drawn = (
        "return [...document.querySelectorAll('.plot')].every(one =>"
        " one.querySelector('.main-svg'))"
    )
    # Figures come after the page, later where a machine is busy; a test says which did not
    with contextlib.suppress(TimeoutException):
        WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(drawn))
    return browser


def test_a_browser_shows_every_figure_without_an_error_or_a_request(opened):
    assert (
        opened.execute_script(
            "return [...document.querySelectorAll('.plot')].map(one =>"
            " !!one.querySelector('.main-svg'))"
        )
        == [True] * 3
    )
    assert (
        opened.execute_script("return [...document.querySelectorAll('.plot .points')].length") > 5
    )
    addresses = opened.execute_script(
        "return performance.getEntriesByType('resource').map(one => one.name)"
    )
    assert not [address for address in addresses if address.startswith("http")]
    assert not [
        entry for entry in opened.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]


def test_nothing_sticks_out_of_the_page(opened):
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert opened.execute_script(
        "return [...document.querySelectorAll('.plot')].every(one => one.scrollWidth <="
        " one.clientWidth + 1)"
    )


def test_a_table_is_copied_as_markdown_and_the_setting_as_a_command(opened):
    opened.execute_script(
        "window.copied = []; navigator.clipboard.writeText = async (text) => {"
        " copied.push(text); };"
    )
    for button in ("[data-copy]", ".choices [data-copy-table]"):
        opened.execute_script(f"document.querySelector('{button}').click()")
    command, table = opened.execute_script("return window.copied")
    assert command == "specheads generate 'x=<y>'"
    head, line, alone, *rest = table.split("\n")
    assert (
        head == "|  | speed-up | over best fixed | setting |"
        and line == "| --- | --: | --: | --: |"
        and len(rest) == 3
    )
    assert alone == "| target alone | 1.00× | – | target alone |"


def test_selecting_a_ratio_changes_tables_and_a_data_set_figures_too(opened):
    captions = (
        "return [...document.querySelectorAll('#winners .panel:not([hidden]) caption')].map(one =>"
        " one.textContent)"
    )
    drawn = "return document.querySelector('[data-figure=reliability]').data.map(one => [...one.y])"
    before = opened.execute_script(captions), opened.execute_script(drawn)
    assert "ratio 5.4 (measured)" in before[0][0] and "mt-bench" in before[0][0]
    opened.execute_script(
        "document.querySelector('input[data-select=ratio][value=\"20\"]').click()"
    )
    assert "ratio 20" in opened.execute_script(captions)[0]
    opened.execute_script(
        "const one = document.querySelector('select'); one.value = 2; one.dispatchEvent(new"
        " Event('change', {bubbles: true}))"
    )
    data_set = opened.execute_script(captions), opened.execute_script(drawn)
    assert "gsm8k" in data_set[0][0] and data_set[1] != before[1]
    assert not opened.get_log("browser")


def test_a_table_has_the_numbers_of_each_plot(opened):
    """It is made when it is opened, and follows what is selected."""
    points = "[...document.querySelectorAll('.plot')].filter(one => !one.hidden)"
    counts = f"return {points}.map(one => one.data.reduce((sum, trace) => sum + trace.x.length, 0))"
    rows = (
        f"return {points}.map(one => one.parentElement.querySelectorAll('.numbers tbody"
        " tr').length)"
    )
    assert set(opened.execute_script(rows)) == {0}
    opened.execute_script(
        "document.querySelectorAll('.numbers').forEach(one => { one.open = true; })"
    )
    WebDriverWait(opened, 10).until(
        lambda driver: driver.execute_script(rows) == driver.execute_script(counts)
    )
    first = (
        "return document.querySelector('.plot[data-figure=reliability]')"
        ".parentElement.querySelector('.numbers').textContent"
    )
    select = "const one = document.querySelector('select'); one.value = %d; "
    select += "one.dispatchEvent(new Event('change', {bubbles: true}))"
    before = opened.execute_script(first)
    shown = opened.execute_script("return +document.querySelector('select').value")
    opened.execute_script(select % (1 if shown == 2 else 2))
    assert (
        opened.execute_script(rows) == opened.execute_script(counts)
        and opened.execute_script(first) != before
    )
    opened.execute_script(select % shown)
    opened.execute_script(
        "document.querySelectorAll('.numbers').forEach(one => { one.open = false; })"
    )
    assert not opened.get_log("browser")


def test_axe_finds_nothing_to_mend(opened):
    """Names, roles, contrast, keyboard: the rules of WCAG 2 A and AA, on a wide light page and on a
    narrow dark one.
    """
    scheme = "light" if opened.execute_script("return innerWidth") > 1000 else "dark"
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    opened.execute_script(resources.files("axe_core_python").joinpath("axe.min.js").read_text())
    run = (
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa'], resultTypes:"
        " ['violations']}).then(arguments[0])"
    )
    violations = opened.execute_async_script(run)["violations"]
    assert not [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3]) for each in violations
    ]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_click_on_a_heading_sorts_a_table(opened):
    column = (
        "return [...document.querySelectorAll('#live tbody tr')].map(row =>"
        " +row.cells[2].dataset.key)"
    )
    for order in (-1, 1):
        opened.execute_script("document.querySelectorAll('#live th button')[2].click()")
        values = opened.execute_script(column)
        assert values == sorted(values, key=lambda value: order * value)


ATTACK = (
    '\'"></span></script><script>window.injected = 1</script><img src=x onerror="window.injected ='
    ' 1"><svg onload=window.injected=1>-->'
)


def attacked(value, field=""):
    """A report with an attempt to inject a script in every text that a model, a config or a name
    wrote.
    """
    if is_dataclass(value):
        return replace(
            value,
            **{part.name: attacked(getattr(value, part.name), part.name) for part in fields(value)},
        )
    if isinstance(value, dict):
        shown = field in ("warp", "versions", "head_shares", "prompts")  # whose keys are shown, too
        return {
            f"{key}{ATTACK}" if shown else key: attacked(part, "" if shown else key)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        if field == "pieces":
            return [(kind, text + ATTACK) for kind, text in value]
        return [attacked(part, field) for part in value]
    known = field in ("role", "ratio", "use", "kind", "fastest") or value in (
        FIXED,
        CEILING,
        ORACLE,
    )
    return value + ATTACK if isinstance(value, str) and not known else value


@pytest.mark.parametrize(
    "doubts",
    [pytest.param([ATTACK], id="doubtful"), pytest.param([], id="trusted", marks=pytest.mark.full)],
)
def test_no_text_of_a_report_runs_or_becomes_an_element(browser, report, tmp_path, doubts):
    """Names of models, heads, rules and prompts, the config and the responses are only text, in
    tables and in figures.
    """
    path = tmp_path / "report.html"
    path.write_text(html_of(replace(attacked(report), doubts=doubts)), encoding="utf-8")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(path.as_uri())
    browser.execute_script(UNFOLD)
    drawn = (
        "return [...document.querySelectorAll('.plot')].every(one => one.hidden ||"
        " one.querySelector('.main-svg'))"
    )
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(drawn))
    hover = "for (const box of document.querySelectorAll('.plot:not([hidden])')) "
    hover += "for (const [curveNumber, trace] of box.data.entries())"
    hover += " if (trace.x.length) Plotly.Fx.hover(box, [{curveNumber, pointNumber: 0}]);"
    select = (
        "const one = document.querySelector('select'); one.value = %s; one.dispatchEvent(new"
        " Event('change', {bubbles: true}));"
    )
    for number in range(len(report.data_sets)):
        browser.execute_script(select % number + hover)
        for ratio in ratios_of(report) if number == main_data_set(report) else ():
            browser.execute_script(
                f"document.querySelector('input[data-select=ratio][value=\"{ratio}\"]').click();"
                + hover
            )
    time.sleep(0.5)  # an error handler would run by now
    assert browser.execute_script("return window.injected === undefined")
    assert browser.execute_script("return document.querySelectorAll('script').length") == 3
    handlers = "return document.querySelectorAll('[onerror], [onload], img').length"
    assert browser.execute_script(handlers) == 0
    text = browser.execute_script("return document.body.textContent")
    assert text.count("window.injected = 1") > 200 and "tiny & pair" + ATTACK in text
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_attack_would_run_if_it_were_not_escaped(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(f"<!DOCTYPE html><body><p title='{ATTACK}'>", encoding="utf-8")
    browser.get(path.as_uri())
    WebDriverWait(browser, 10).until(
        lambda driver: driver.execute_script("return window.injected === 1")
    )
