"""The report in a real browser: it fits a wide screen and a phone, in light and dark, and shows values under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ctl.report_pages import BEGIN, complete_run, history, line
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import page
from telemetry.browser import BROWSER, NAMES, Browser

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"needs a Chromium: none of {', '.join(NAMES)} is installed"),
    pytest.mark.timeout(600),
]
WIDE, PHONE = 1280, 390


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def show(browser: Browser, folder: Path, width: int = WIDE, dark: bool = False) -> None:
    path = folder / "shown.html"
    path.write_text(page(read_run(folder, in_progress=False), BEGIN), encoding="utf-8")
    browser.errors.clear()
    browser.open(path.as_uri(), width, dark=dark)
    browser.until(f"location.href === '{path.as_uri()}' && document.readyState === 'complete'")


def long_names(folder: Path) -> Path:
    """A run that has texts without a place to break them."""
    complete_run(folder)
    history(folder / "commits.csv", [line(number, "w" * 200 + str(number % 3)) for number in range(1, 40)])
    (folder / "run.json").write_text('{"task": "' + "t" * 300 + '"}')
    return folder


def pointed(browser: Browser, plot: int, share: float) -> str:
    """What the page shows when the pointer is over the nth plot, at this share of its width."""
    svg, at = f"document.querySelectorAll('svg')[{plot}]", f"box.left + box.width * {share}"
    moved = f"new PointerEvent('pointermove', {{ clientX: {at}, clientY: box.top + 9 }})"
    browser.look(f"{{ const svg = {svg}, box = svg.getBoundingClientRect(); svg.dispatchEvent({moved}) }}")
    shown = browser.look("document.querySelector('.tip').innerText")
    browser.look(f"{svg}.dispatchEvent(new PointerEvent('pointerleave'))")
    assert browser.look("document.querySelectorAll('.tip, .cross').length") == 0
    return str(shown)


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_nothing_but_the_table_scrolls_sideways(width: int, browser: Browser, tmp_path: Path) -> None:
    for folder in (complete_run(tmp_path / "run"), long_names(tmp_path / "long")):
        show(browser, folder, width)
        assert browser.look("document.documentElement.scrollWidth") == width
        checked = "[...document.querySelectorAll('main *')].filter(one => !one.closest('.wide, svg'))"
        over = f"{checked}.filter(one => one.getBoundingClientRect().right > innerWidth)"
        assert browser.look(f"{over}.map(one => one.className)") == []
        assert browser.errors == []


def test_panels_of_a_row_are_aligned_and_their_plots_have_the_same_axes(browser: Browser, tmp_path: Path) -> None:
    show(browser, complete_run(tmp_path / "run"))
    for what in ("svg", ".panel"):
        boxes = browser.look(f"[...document.querySelectorAll('{what}')].map(one => one.getBoundingClientRect().toJSON())")
        rows = {(round(box["top"]), round(box["height"])) for box in boxes}
        assert len(boxes) == 9
        assert (len(rows), len({round(box["left"]) for box in boxes})) == (3, 3)
    assert len(set(browser.look("[...document.querySelectorAll('clipPath rect')].map(one => one.outerHTML)"))) == 1


def test_the_text_of_a_plot_is_large_enough_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    show(browser, complete_run(tmp_path / "run"), PHONE)
    size = "parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a"
    assert min(browser.look(f"[...document.querySelectorAll('svg text')].map(text => {size})")) > 10


def test_it_is_dark_if_the_reader_prefers_dark(browser: Browser, tmp_path: Path) -> None:
    folder, found = complete_run(tmp_path / "run"), []
    colours = (
        "['.plot path[style*=\"--one\"]', '.plot text', 'body'].map(name => getComputedStyle(document.querySelector(name)))"
    )
    for dark in (False, True):
        show(browser, folder, dark=dark)
        found.append(browser.look(f"(([line, text, body]) => [line.stroke, text.fill, body.backgroundColor])({colours})"))
    assert found[0][2] == "rgb(244, 246, 248)"
    assert not set(found[0]) & set(found[1])


def test_a_plot_shows_its_values_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
    show(browser, complete_run(tmp_path / "run"))
    assert pointed(browser, 1, 0.95) == "commits applied: 300\naccuracy: 97.5 %"
    assert pointed(browser, 1, 0.2) == "commits applied: 100\naccuracy: 80 %"
    assert pointed(browser, 0, 0.97).startswith("commits applied: 300\ntraining: 0.00")
    assert pointed(browser, 8, 0.95) == "staleness: 2\nshare: 99.3 %"
    assert browser.errors == []
