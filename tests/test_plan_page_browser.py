"""The page of a plan in a real browser: it fits its width, fetches nothing, and its policy lets its own style act."""

import pytest

from tests.test_plan_outlook import EIGHT, public
from tests.test_plan_page import page_of
from tests.test_report_browser import CHROMIUM, Browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("browser")
    given = (
        "cluster.nodes=1024",
        EIGHT,
        "cluster.device=h200",
        "batch.prompts_per_step=8192",
        "parallel.rollout.tensor=4",
    )
    split = ('placement.actor=["node[1-512]:all"]', 'placement.rollout=["node[513-1024]:all"]')
    (folder / "plan.html").write_text(page_of(public(folder, "Qwen2.5-7B"), *given, *split), "utf-8")
    opened = Browser(folder / "profile", (folder / "plan.html").as_uri())
    yield opened
    opened.close()


def test_nothing_fails_and_nothing_is_fetched(browser: Browser) -> None:
    assert browser.run("getComputedStyle(document.querySelector('.card')).borderRadius") == "12px"
    bad = ("Runtime.exceptionThrown", "Log.entryAdded")
    assert [m for m in browser.messages if m.get("method") in bad] == []
    urls = [m["params"]["request"]["url"] for m in browser.messages if m.get("method") == "Network.requestWillBeSent"]
    assert len([url for url in urls if not url.startswith("data:")]) == 1 and urls[0].startswith("file:")


@pytest.mark.parametrize("width", [1920, 1280, 800, 360])
def test_the_page_fits_its_width(browser: Browser, width: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    assert browser.run("document.documentElement.scrollWidth") <= width
    texts = "[...document.querySelectorAll('.bar-numbers, .chip > span, .link')]"
    outside = f"{texts}.filter(n => n.scrollWidth > n.clientWidth + 1)"
    assert browser.run(f"{outside}.map(n => n.textContent)") == []


def test_bars_have_room_and_their_pieces_have_names(browser: Browser) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    widths = browser.run("[...document.querySelectorAll('.bars svg')].map(n => n.getBoundingClientRect().width)")
    assert widths and min(widths) > 400
    titles = browser.run("[...document.querySelectorAll('.bars rect > title')].map(n => n.textContent)")
    assert any(title.startswith("actor: optimizer moments") for title in titles)
