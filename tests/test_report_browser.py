"""The report in a real browser: it draws, filters, sorts and opens samples, and runs nothing that a model wrote."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshloom.observe.report import write_report
from tests.test_report import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--window-size=1280,900",
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")]


class Browser:
    """One page, driven over the DevTools protocol: commands go in on descriptor 3, answers come out on 4."""

    def __init__(self, profile: Path, url: str) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        command = ["bash", "-c", script, "-", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(command, pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL)
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._count, self.messages = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self._wait("Page.loadEventFired")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> dict:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.messages.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, expression: str) -> Any:
        """The value of an expression, after the page has laid itself out."""
        code = f"new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r({expression}))))"
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self) -> None:
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        self._process.wait(timeout=20)

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _wait(self, method: str) -> None:
        while not any(message.get("method") == method for message in self.messages):
            self.messages.append(self._next())


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("browser")
    path = write_report(make_run(folder / "run", steps=12))
    opened = Browser(folder / "profile", path.as_uri())
    yield opened
    opened.close()


COUNT = "document.querySelector('.count').textContent"


def fill(label: str, value: str) -> str:
    """Sets a filter and gives the count."""
    field = f"[...document.querySelectorAll('label.field')].find(l => l.firstChild.textContent === {json.dumps(label)})"
    change = f"i.value = {json.dumps(value)}; i.dispatchEvent(new Event('input'))"
    return f"(() => {{ const i = {field}.lastChild; {change}; return {COUNT}; }})()"


def reset(browser: Browser) -> None:
    browser.run("[...document.querySelectorAll('.filters button')].at(-1).click()")


def test_nothing_fails_and_nothing_is_fetched(browser):
    # Reward and accuracy; a metric that never had a number gets no chart, the run's own one waits under "Other".
    assert browser.run("document.querySelectorAll('.chart svg').length") == 2
    bad = ("Runtime.exceptionThrown", "Log.entryAdded")
    assert [m for m in browser.messages if m.get("method") in bad] == []
    urls = [m["params"]["request"]["url"] for m in browser.messages if m.get("method") == "Network.requestWillBeSent"]
    assert len([url for url in urls if not url.startswith("data:")]) == 1 and urls[0].startswith("file:")


def test_the_page_fits_its_width(browser):
    for width in (1280, 800, 360):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_before_and_after_stand_on_top(browser):
    assert browser.run("[...document.querySelectorAll('.figure-value')].map(n => n.textContent)") == ["25.0%", "75.0%"]
    assert "+50.0 points" in browser.run("document.querySelector('.gain').textContent")


def test_filters_narrow_the_table(browser):
    assert browser.run(COUNT) == "97 samples"
    assert browser.run(fill("Outcome", "invalid")) == "1 of 97 samples"
    reset(browser)
    assert browser.run(fill("Outcome", "solved")) == "48 of 97 samples"
    assert browser.run(fill("Step from", "11")) == "8 of 97 samples"
    assert browser.run(fill("Search", "it is 3")) == "4 of 97 samples"
    assert browser.run(fill("Reward from", "2")) == "0 of 97 samples"
    reset(browser)
    assert browser.run(COUNT) == "97 samples"


def test_a_click_on_a_head_sorts_and_pages_turn(browser):
    column = "[...document.querySelectorAll('td.col-reward')].map(n => n.textContent)"
    click = "document.querySelector('th.col-reward button').click()"
    browser.run(click)
    assert browser.run(column)[:3] == ["0", "0", "0"]
    browser.run(click)
    assert browser.run(column)[:3] == ["1", "1", "1"]
    assert browser.run("document.querySelector('th.col-reward').getAttribute('aria-sort')") == "descending"
    for _ in range(4):
        browser.run("[...document.querySelectorAll('.pager button')].at(-1).click()")
    assert browser.run(column)[-1] == "invalid", "a missing reward stands last"
    reset(browser)


def test_a_hostile_sample_opens_as_text(browser):
    browser.run(fill("Outcome", "invalid"))
    browser.run("document.querySelector('.expand').click()")
    text = browser.run("document.querySelectorAll('.detail pre')[2].textContent")
    assert text.startswith("</script><script>document.title='taken'")
    assert browser.run("document.querySelectorAll('img, #main script').length") == 0
    assert browser.run("document.title") == "run – meshloom"
    assert browser.run("document.querySelector('.detail pre.ids').textContent") == "1 2 3"
    reset(browser)


def test_one_crosshair_crosses_all_charts_and_a_click_shows_the_steps_samples(browser):
    chart = "document.querySelector('.chart svg')"
    box = browser.run(f"(() => {{ const b = {chart}.getBoundingClientRect(); return [b.left, b.top, b.width]; }})()")
    at = json.dumps({"clientX": box[0] + box[2] * 0.6, "clientY": box[1] + 50, "bubbles": True})
    browser.run(f"{chart}.dispatchEvent(new PointerEvent('pointermove', {at}))")
    steps = browser.run("[...document.querySelectorAll('.chart-head .at')].map(n => n.textContent)")
    assert len(set(steps)) == 1 and steps[0] != "step 12"
    browser.run(f"{chart}.dispatchEvent(new MouseEvent('click', {at}))")
    assert browser.run(COUNT) == "8 of 97 samples"
    assert f"step {browser.run('document.querySelector(`td.col-step`).textContent')[1:]}" == steps[0]
    reset(browser)
