"""The report in a real browser: it fits a wide screen and a phone, in light and dark, and shows values under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ctl.report_pages import BEGIN, complete_run, history, line, write_json
from gem_ctl.recorded_run import read_run
from gem_ctl.run_report import page
from telemetry.browser import BROWSER, NAMES, Browser

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"needs a Chromium: none of {', '.join(NAMES)} is installed"),
    pytest.mark.timeout(600),
]
WIDE, PHONE = 1280, 390
HOSTILE = '</script><img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def show(browser: Browser, folder: Path, width: int = WIDE, dark: bool = False, media: str = "") -> None:
    path = (folder if folder.is_dir() else folder.parent) / "shown.html"
    path.write_text(page(read_run(folder, in_progress=False), BEGIN), encoding="utf-8")
    browser.errors.clear()
    browser.open(path.as_uri(), width, dark=dark, media=media)
    browser.until(f"location.href === '{path.as_uri()}' && document.readyState === 'complete'")


def long_names(folder: Path) -> Path:
    """A run that has texts without a place to break them."""
    complete_run(folder)
    history(folder / "commits.csv", [line(number, "w" * 200 + str(number % 3)) for number in range(1, 40)])
    (folder / "run.json").write_text('{"task": "' + "t" * 300 + '"}')
    return folder


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_it_shows_the_run_and_nothing_scrolls_sideways(width: int, browser: Browser, tmp_path: Path) -> None:
    for folder in (complete_run(tmp_path / "run"), long_names(tmp_path / "long")):
        show(browser, folder, width)
        assert browser.look("document.documentElement.scrollWidth") == width
        assert browser.look("[...document.querySelectorAll('td, th')].filter(one => one.scrollWidth > one.clientWidth)") == []
        assert browser.errors == []
    show(browser, tmp_path / "run", width)
    text = browser.text()
    for shown in (
        "Run run", "complete · id 1a2b3c4d", "97.50 %", "π at its bounds", "Energies", "w-0", "33.3 %", "Settings", "digits",
        "Versions", "training time, min:s", "π is the factor",
    ):  # fmt: skip
        assert shown in text, f"{shown!r} is missing in:\n{text}"
    assert browser.look("[...document.querySelectorAll('.live, #notice')].some(one => one.checkVisibility())") is False
    assert browser.look("document.querySelectorAll('#charts svg').length") == 8
    assert browser.look("document.title") == "run run · GEM"


def test_a_name_or_a_setting_is_text(browser: Browser, tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run")
    history(folder / "commits.csv", [line(1, HOSTILE)])
    write_json(folder, run={"task": HOSTILE}, summary={"outcome": HOSTILE, "versions": {"gem-ps": HOSTILE}})
    show(browser, folder)
    assert browser.text().count(HOSTILE) == 4
    assert browser.look("document.images.length") == 0
    assert (browser.errors, browser.look("document.title")) == ([], "run run · GEM")


def test_a_run_without_commits_says_so_and_draws_nothing(browser: Browser, tmp_path: Path) -> None:
    show(browser, history(tmp_path / "none.csv", []))
    assert "No commit has been applied." in browser.text()
    assert browser.look("document.querySelectorAll('#charts svg, #workers td').length") == 0
    assert browser.errors == []


def test_it_is_dark_if_the_reader_prefers_dark_but_not_on_paper(browser: Browser, tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run")

    def ink(**how: Any) -> Any:
        show(browser, folder, **how)
        return browser.look("['.one', '.grid', 'svg text'].map(name => getComputedStyle(document.querySelector(name)).stroke)")

    light, dark = ink(), ink(dark=True)
    assert light != dark
    assert ink(dark=True, media="print") == light


def test_its_curves_show_their_values_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
    show(browser, complete_run(tmp_path / "run"))
    box = "CHARTS[1].svg.getBoundingClientRect()"

    def values(share: float) -> Any:
        at = f"clientX: {box}.left + LEFT + {share} * ({box}.width - LEFT - RIGHT), clientY: {box}.top + 9"
        browser.look(f"CHARTS[1].svg.dispatchEvent(new PointerEvent('pointermove', {{ {at} }}))")
        return browser.look("[...document.querySelectorAll('figcaption')].map(one => one.querySelector('b').textContent)")

    assert values(0.5)[1] == "80.00 %"
    assert values(1)[1] == "97.50 %"
    assert values(0.05)[1] == "–"
    assert browser.look("document.querySelectorAll('.cross').length") == 8
    assert browser.look("document.querySelector('figcaption .quiet').textContent") == "smoothedheld-out –"
    assert browser.errors == []
