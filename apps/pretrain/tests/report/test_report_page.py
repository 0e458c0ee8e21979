"""The page of `report`, opened in Chromium."""

import fcntl
import itertools
import json
import os
import re
import select
import shutil
import subprocess

import pytest
from rich.console import Console

from pretrain._commands.report import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
CHROMIUM = next(filter(None, map(shutil.which, (*NAMES, MAC))), "")
VIRTUAL = {"Space": 32, "Tab": 9}
TITLES = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Wait for data"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]

# Of each visible chart: its place, and of each line its first, middle and last point, in pixels of the window.
VISIBLE_CHARTS = """
[...document.querySelectorAll(".chart")].filter(chart => chart.checkVisibility()).map(chart => {
  const {left, right, top, bottom} = chart.getBoundingClientRect();
  const lines = [...chart.querySelectorAll("path:not(.dots)")].map(path => {
    const matrix = path.getScreenCTM(), length = path.getTotalLength();
    return [0, 0.5, 1].map(share => {
      const at = path.getPointAtLength(share * length).matrixTransform(matrix);
      return [at.x, at.y];
    });
  });
  return {label: chart.getAttribute("aria-label"), left, right, top, bottom, lines};
})
"""


class Browser:
    """A headless Chromium that is spoken to over pipes: https://chromedevtools.github.io/devtools-protocol/."""

    def __init__(self, profile):
        to_browser, self._commands = os.pipe()
        self._events, from_browser = os.pipe()
        # The shell gives the pipes the numbers 3 and 4, so they must have others here.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        os.close(to_browser)
        os.close(from_browser)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", CHROMIUM, *options,
             f"--user-data-dir={profile}"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in ends:
            os.close(end)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.seen = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._wait(lambda answer: answer.get("id") == number)["result"]

    def _wait(self, is_it):
        while True:
            while b"\0" not in self._rest:
                assert select.select([self._events], [], [], 30)[0], "Chromium does not answer"
                read = os.read(self._events, 1 << 20)
                assert read, "Chromium has ended"
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(line)
            self.seen.append(message)
            if is_it(message):
                assert "error" not in message, message
                return message

    def open(self, path, *, width=1280, dark=False, scripts=True):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.seen.clear()
        self.call("Page.navigate", url=path.as_uri())
        if not any(message.get("method") == "Page.loadEventFired" for message in self.seen):
            self._wait(lambda message: message.get("method") == "Page.loadEventFired")

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector):
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key, code):
        for kind in ("rawKeyDown", "char", "keyUp"):
            text = {"text": " "} if kind == "char" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=VIRTUAL[code], **text
            )

    def complaints(self):
        """Errors, messages and requests since the page was opened, other than for the page itself."""
        self.value("0")  # the answer follows all events before it
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.requestWillBeSent")
        found = [message for message in self.seen if message.get("method") in kinds]
        pages = [m for m in found if m["method"] == kinds[3] and m["params"]["request"]["url"].startswith("file:")]
        data = [m for m in found if m["method"] == kinds[3] and m["params"]["request"]["url"].startswith("data:")]
        assert len(pages) == 1
        return [message for message in found if message not in pages + data]

    def close(self):
        self._session = None
        self.call("Browser.close")
        self._process.wait(20)
        os.close(self._commands)
        os.close(self._events)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(write_run, records, tmp_path):
    """The page of two runs; the first was killed and stopped."""
    phases = [
        ("starting", 0, 0), ("training", 0, 5), ("restarting", 500, 25), ("stopped", 750, 60), ("training", 750, 100),
        ("finished", 1500, 120),
    ]  # fmt: skip
    began_s = 1_700_000_000.0
    folders = [
        write_run(
            "first", records=records(60), starts=[{"step": 0}, {"step": 501}],
            phases=[{"step": step, "time_s": began_s + s, "phase": phase} for phase, step, s in phases],
            samples=[{"step": 0, "prompt": "def ", "text": "def <script>document.title = 'attacked'</script>"}],
        ),
        write_run("second_" + "x" * 60, records=records(40, floor=2.0)),
    ]  # fmt: skip
    return report([str(folder) for folder in folders], out=str(tmp_path / "page.html"), console=Console(quiet=True))


@pytest.fixture
def comparison(write_run, records, tmp_path):
    """The page of a mean over two seeds, `s0`, and of another run, `s1`."""
    folders = [
        write_run("a-0", records=records(40), seed=0),
        write_run("a-1", records=records(40, floor=2.0), seed=1),
        write_run("b", records=records(40, floor=3.0), data="other", val="ef56"),
    ]
    return report([str(folder) for folder in folders], out=str(tmp_path / "page.html"), console=Console(quiet=True))


# The CSS classes of the visible paths in the visible chart of the loss, without those of looks.
VISIBLE_LINES = """
[...document.querySelectorAll("figure:first-child .chart")].filter(chart => chart.checkVisibility()).flatMap(chart =>
  [...chart.querySelectorAll("path, .end")].filter(path => getComputedStyle(path).display !== "none")
  .map(path => [...path.classList].filter(name => /^s\\d$|single/.test(name)).join(" ")))
"""


def visible_lines(browser):
    return set(browser.value(VISIBLE_LINES))


def read_out(browser, share=0.5):
    """The values that the page shows under the pointer, by the name of their line."""
    browser.value("document.querySelector('figure').scrollIntoView()")
    chart = browser.value(VISIBLE_CHARTS)[0]
    x = chart["left"] + share * (chart["right"] - chart["left"])
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=chart["bottom"] - 20)
    read = browser.value("document.querySelector('output').textContent")
    return {name: value for name, _, value in (words.partition(": ") for words in read.split(" \N{MIDDLE DOT} ")[1:])}


def test_a_run_is_hidden_and_shown_by_the_keyboard(browser, comparison):
    browser.open(comparison)
    assert browser.complaints() == []
    assert visible_lines(browser) == {"s0", "s1"}
    browser.value("document.querySelector('#singles').focus()")
    browser.press("Tab", "Tab")
    assert browser.value("document.activeElement.id") == "show-0"
    browser.press(" ", "Space")
    assert visible_lines(browser) == {"s1"}
    assert {name.partition(",")[0] for name in read_out(browser)} == {"b"}
    browser.press(" ", "Space")
    assert visible_lines(browser) == {"s0", "s1"}


def test_all_runs_are_hidden_and_shown_at_once(browser, comparison):
    browser.open(comparison)
    browser.click("#hide")
    assert visible_lines(browser) == set()
    assert read_out(browser) == {}
    browser.click("button[type=reset]")
    assert visible_lines(browser) == {"s0", "s1"}


def test_the_single_runs_of_a_mean_are_shown_in_the_chart_and_the_table(browser, comparison):
    browser.open(comparison)
    rows = "[...document.querySelectorAll('.comparison tbody tr')].filter(row => row.checkVisibility()).length"
    assert (browser.value(rows), visible_lines(browser)) == (2, {"s0", "s1"})
    browser.click("#singles")
    assert (browser.value(rows), visible_lines(browser)) == (4, {"s0", "s0 single", "s1"})
    assert {"a-0, validation", "a-1, validation"} < read_out(browser).keys()


def test_runs_can_be_told_apart_without_scripts(browser, comparison):
    browser.open(comparison, scripts=False)
    browser.value("document.querySelector('#show-1').click()")
    assert visible_lines(browser) == {"s0"}
    assert browser.value("document.querySelector('#hide').checkVisibility()") is False


def test_the_pointer_reads_the_nearest_of_many_lines(browser, write_run, records, tmp_path):
    folders = [write_run(f"run-{n}", records=records(40, floor=1.0 + n), data=f"{n}") for n in range(14)]
    page = report([str(folder) for folder in folders], out=str(tmp_path / "many.html"), console=Console(quiet=True))
    browser.open(page)
    read = read_out(browser, share=0.9)  # near the lower edge
    assert [*read] == [*(f"run-{n}, validation" for n in range(6)), "and 8 more"]
    for n in range(6):
        assert float(read[f"run-{n}, validation"]) == pytest.approx(1.1 + n, abs=0.1)


def test_a_line_is_not_read_beside_its_steps(browser, write_run, records, tmp_path):
    folders = [write_run("long", records=records(40)), write_run("short", records=records(20), data="other")]
    page = report([str(folder) for folder in folders], out=str(tmp_path / "page.html"), console=Console(quiet=True))
    browser.open(page)
    assert {name.partition(",")[0] for name in read_out(browser, share=0.4)} == {"long", "short"}
    assert {name.partition(",")[0] for name in read_out(browser, share=0.7)} == {"long"}


@pytest.mark.parametrize("width", [390, 1280])
def test_a_comparison_is_as_wide_as_its_window(browser, comparison, width):
    browser.open(comparison, width=width)
    browser.click("#singles")
    assert browser.value("document.documentElement.scrollWidth") <= width


def test_the_page_opens_without_an_error_or_a_request(browser, page):
    browser.open(page)
    assert browser.complaints() == []
    assert browser.value("document.title").startswith("first, second_")
    assert browser.value("document.querySelectorAll('script').length") == 1


@pytest.mark.parametrize("x_axis", ["step", "tokens", "time"])
@pytest.mark.parametrize("y_axis", ["linear", "log"])
def test_lines_are_drawn_in_their_charts_on_each_axis(browser, page, x_axis, y_axis):
    browser.open(page)
    browser.click(f"#x-{x_axis}")
    browser.click(f"#y-{y_axis}")
    charts = browser.value(VISIBLE_CHARTS)
    assert [re.split(",", chart["label"])[0] for chart in charts] == TITLES
    for chart in charts:
        assert len(chart["lines"]) >= 2
        for line in chart["lines"]:
            (first, _), _, (last, end) = line
            assert chart["left"] - 1 <= first <= last <= chart["right"] + 1
            assert chart["top"] - 1 <= end <= chart["bottom"] + 1
    assert all(chart["right"] - chart["left"] > 250 for chart in charts)


def test_a_line_falls_as_its_loss(browser, page):
    browser.open(page)
    browser.click("#y-log")
    loss = browser.value(VISIBLE_CHARTS)[0]
    for line in loss["lines"]:
        assert line[0][1] < line[2][1] - 30  # upper values have smaller coordinates


@pytest.mark.parametrize("scripts", [True, False], ids=["", "without JavaScript"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_as_wide_as_its_window(browser, page, width, scripts):
    browser.open(page, width=width, scripts=scripts)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert len(browser.value(VISIBLE_CHARTS)) == len(TITLES)
    texts = "[...document.querySelectorAll('.chart text')].filter(t => t.checkVisibility())"
    assert browser.value(f"Math.min(...{texts}.map(t => t.getBoundingClientRect().left))") >= 0
    assert browser.value(f"Math.max(...{texts}.map(t => t.getBoundingClientRect().right))") <= width


@pytest.mark.parametrize("y_axis", ["linear", "log"])
def test_the_pointer_reads_the_value_of_a_line(browser, page, y_axis):
    browser.open(page)
    browser.click(f"#y-{y_axis}")
    browser.value("document.querySelector('figure').scrollIntoView()")
    chart = browser.value(VISIBLE_CHARTS)[0]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=chart["right"] - 1, y=chart["bottom"] - 20)
    read = browser.value("document.querySelector('output').textContent")
    ends = dict(re.findall(r"(first, \w+) ends at ([\d.]+)", chart["label"]))
    shown = dict(re.findall(r"(first, \w+): ([\d.]+)", read))
    assert read.startswith("step 1,49")
    assert ends.keys() == shown.keys() == {"first, training", "first, validation"}
    assert {name: float(value) for name, value in shown.items()} == pytest.approx(
        {name: float(value) for name, value in ends.items()}, abs=0.002
    )


def test_bars_of_the_time_line_have_the_lengths_of_their_phases(browser, page):
    browser.open(page)
    bars = browser.value("""
      [...document.querySelectorAll(".timeline rect")].map(bar => {
        const {left, right} = bar.getBoundingClientRect(), line = bar.parentNode.getBoundingClientRect();
        return [bar.getAttribute("class"), (left - line.left) / line.width, (right - line.left) / line.width];
      }).sort((a, b) => a[1] - b[1] || a[2] - b[2])
    """)
    assert [name for name, _, _ in bars] == ["starting", "training", "restarting", "stopped", "training"]
    ends = [(0, 5), (5, 25), (25, 60), (60, 60.12), (60, 80)]  # the 40 s without a command have no length
    assert [end for _, *pair in bars for end in pair] == pytest.approx(
        [s / 80 for pair in ends for s in pair], abs=1e-3
    )


@pytest.mark.parametrize(("dark", "least"), [(False, 200), (True, 0)])
def test_the_page_follows_the_color_scheme(browser, page, dark, least):
    browser.open(page, dark=dark)
    color = browser.value("getComputedStyle(document.body).backgroundColor")
    levels = [int(level) for level in re.findall(r"\d+", color)]
    assert len(levels) == 3
    assert least <= min(levels) <= max(levels) <= least + 55


def test_a_script_in_the_page_that_is_not_its_own_does_not_run(browser, page, tmp_path):
    changed = tmp_path / "changed.html"
    changed.write_text(page.read_text().replace("<main>", "<main><script>document.title = 'attacked'</script>"))
    browser.open(changed)
    assert browser.value("document.title") != "attacked"
    assert "violates the following Content Security Policy" in str(browser.complaints())
