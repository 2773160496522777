"""The report in a real browser: it draws its charts, loads nothing, and runs nothing of the texts of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_client.report import write_report
from tests.unit.ledger.samples import step_record, write_ledger
from tests.unit.report.runs import HOSTILE, write_run

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium")
ARGUMENTS = ["--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage", "--disable-gpu"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page that shows a report, with what it did."""

    def __init__(self, browser: Any, report: Path, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(300_000)  # milliseconds: for a busy machine
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())
        assert self.page.evaluate("document.querySelectorAll('.drawing').length === figures.length")

    def drawn(self) -> list[int]:
        """The number of paths and bars in each chart."""
        script = "all => all.map(drawing => drawing.querySelectorAll('.scatterlayer path, .barlayer path').length)"
        return list(self.page.eval_on_selector_all(".drawing", script))


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}])
def test_charts_are_drawn_without_requests_and_without_errors(
    options: dict[str, Any], browser: Any, tmp_path: Path
) -> None:
    report = write_report(write_run(tmp_path))
    visit = Visit(browser, report, **options)
    assert visit.problems == []
    assert visit.requests == [report.as_uri()]
    drawn = visit.drawn()
    assert len(drawn) >= 12
    assert all(drawn)
    width = visit.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "the page scrolls sideways"


def test_texts_of_the_run_are_neither_markup_nor_code(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, write_report(write_run(tmp_path)))
    assert visit.page.evaluate("window.attacked") is None
    assert visit.page.locator("img").count() == 0
    assert HOSTILE in visit.page.locator(".sample pre").first.text_content()
    visit.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.attacked = 3";
            document.body.append(script);
        }"""
    )
    assert visit.page.evaluate("window.attacked") is None, "the policy refuses other scripts"


def test_a_dark_report_is_printed_in_dark_ink_on_paper(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, write_report(write_run(tmp_path)), color_scheme="dark")
    color = "getComputedStyle(document.querySelector('.xtitle')).fill"
    on_screen = visit.page.evaluate(color)
    two_frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    visit.page.emulate_media(media="print")
    visit.page.evaluate(two_frames)
    on_paper = visit.page.evaluate(color)
    width = visit.page.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(svg => svg.clientWidth))")
    visit.page.emulate_media(media="screen")
    visit.page.evaluate(two_frames)
    assert (on_screen, on_paper) == ("rgb(154, 166, 178)", "rgb(91, 103, 116)")
    assert visit.page.evaluate(color) == on_screen
    assert width <= 680
    assert len(visit.page.pdf()) > 10_000


@pytest.mark.parametrize("steps", [0, 1, 6000])
def test_short_and_long_runs_are_drawn(steps: int, browser: Any, tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path, [])
    with ledger.open("a") as lines:  # the ledger makes each line durable, which takes long
        lines.writelines(f"{step_record(step).model_dump_json()}\n" for step in range(1, steps + 1))
    visit = Visit(browser, write_report(tmp_path))
    assert visit.problems == []
    assert all(visit.drawn())
