"""The report's pictures: lines and heatmaps of any values."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from ctl.fake_prometheus import BEGIN
from ctl.parsed_page import DRAWN
from gem_ctl.panels import Kind, Panel, Query
from gem_ctl.plots import draw
from gem_ctl.prometheus import Series

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")


def series(values: Any, begin: float = BEGIN, **labels: str) -> Series:
    return Series(labels, begin + 5.0 * np.arange(len(values), dtype=np.float64), np.array(values, np.float64))


def lines(*several: Series, legend: str = "", end: float = BEGIN + 60, **panel: Any) -> list[str]:
    """The texts of a picture with lines."""
    return texts(draw(Panel("a title", "", (Query("x"),), **panel), [(Query("x", legend), list(several))], BEGIN, end))


def heatmap(buckets: dict[str, list[float]], end: float = BEGIN + 60) -> str:
    panel = Panel("a heatmap", "", (Query("x"),), kind=Kind.HEATMAP)
    return draw(panel, [(Query("x", "{{le}}"), [series(values, le=bound) for bound, values in buckets.items()])], BEGIN, end)


def texts(svg: str) -> list[str]:
    """The texts of a picture, which must be well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_is_the_same_every_time() -> None:
    assert heatmap({"0.0": [1, 2], "+Inf": [3, 9]}) == heatmap({"0.0": [1, 2], "+Inf": [3, 9]})


def test_without_any_series_there_is_no_picture() -> None:
    assert draw(Panel("a title", "", (Query("x"),)), [(Query("x"), []), (Query("x"), [])], BEGIN, BEGIN + 60) == ""


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[1.0], [0, 0, 0], [1, float("nan"), 3], [1, float("inf"), 3], [float("-inf"), 2], [-1, 2], [-3, -2], [1e30, 1e-30]],
    ids=str,
)
def test_lines_can_be_drawn_of_any_values(values: list[float], log: bool) -> None:
    assert lines(series(values), legend="x", log=log)


@pytest.mark.parametrize("unit", sorted({panel.unit for panel in DRAWN}))
def test_every_unit_can_be_shown(unit: str) -> None:
    assert lines(series([0, 1e-6, 0.5, 12, 1e9]), unit=unit)


@pytest.mark.parametrize("values", [[1, 3], [0.002, 0.9], [1, 1e9], [5, 5]], ids=str)
def test_ticks_on_a_logarithmic_axis_are_numbers(values: list[float]) -> None:
    for unit in ("short", "bytes", "s"):
        assert not [text for text in lines(series(values), log=True, unit=unit) if "$" in text or "\\" in text]


def test_lines_below_zero_are_shown() -> None:
    """A loss may be negative: a likelihood's, for one."""
    assert any(re.match(r"[-−]\d", text) for text in lines(series([-1, -2, -3])))
    assert any(re.match(r"[-−]\d", text) for text in lines(series([1, -2, 3])))


def test_no_line_is_drawn_where_nothing_was_scraped() -> None:
    """A straight line across a gap would claim what nobody saw."""
    whole, gap = [BEGIN, BEGIN + 5, BEGIN + 10, BEGIN + 15], [BEGIN, BEGIN + 5, BEGIN + 30, BEGIN + 35]
    pictures = [
        draw(
            Panel("a title", "", (Query("x"),)),
            [(Query("x"), [Series({}, np.array(times), np.arange(4.0))])],
            BEGIN,
            BEGIN + 60,
        )
        for times in (whole, gap)
    ]
    strokes = [max(path.get("d", "").count("M") for path in curves(picture)) for picture in pictures]
    assert strokes == [1, 2]


def curves(svg: str) -> list[ElementTree.Element]:
    """The paths that show data: they are the clipped ones of the lines' colour."""
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    return [path for path in paths if "#1f4e79" in path.get("style", "")]


def test_each_line_is_called_by_its_labels() -> None:
    shown = lines(series([1, 2], worker="ann"), series([1, 2], worker="bob"), series([1, 2]), legend="worker {{ worker }}")
    assert [text.strip() for text in shown if text.startswith("worker")] == ["worker ann", "worker bob", "worker"]


def test_the_time_axis_counts_from_the_beginning_in_a_fitting_unit() -> None:
    units = {60: "seconds", 600: "minutes", 7 * 3600: "hours"}
    for span, unit in units.items():
        shown = lines(series([1, 2]), end=BEGIN + span)
        assert unit in shown
        assert "0" in shown


BUCKETS = {
    "one sample": {"0.0": [4.0], "1.0": [6.0], "+Inf": [6.0]},
    "all zero": {"0.0": [0.0, 0.0], "+Inf": [0.0, 0.0]},
    "one sample, zero": {"0.0": [0.0], "+Inf": [0.0]},
    "no number": {"0.0": [float("nan")] * 3, "+Inf": [float("nan")] * 3},
    "no number at times": {"0.0": [1, float("nan"), 3], "1.0": [2, float("nan"), 9], "+Inf": [2, float("nan"), 9]},
    "one bucket": {"+Inf": [1.0, 2.0]},
    "less than before": {"0.0": [5.0, 5.0], "1.0": [4.0, 6.0], "+Inf": [6.0, 6.0]},
    "infinite": {"0.0": [1.0, 2.0], "+Inf": [float("inf"), 3.0]},
    "huge": {"0.0": [1e-300, 1.0], "+Inf": [1e300, 1e300]},
    "ragged": {"0.0": [1.0, 2.0, 3.0], "+Inf": [2.0]},
}


@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)
def test_a_heatmap_can_be_drawn_of_any_histogram(buckets: dict[str, list[float]]) -> None:
    svg = heatmap(buckets)
    assert svg == "" or ElementTree.fromstring(svg) is not None


@pytest.mark.parametrize("what", ["one sample", "no number at times", "one bucket", "less than before"])
def test_what_a_heatmap_holds_is_shown(what: str) -> None:
    assert "data:image/png" in heatmap(BUCKETS[what])


def test_a_heatmap_is_as_high_as_the_buckets_that_hold_anything() -> None:
    """Bounds are in the order of numbers, not of texts."""
    buckets = {"10.0": [7.0, 7.0], "2.0": [5.0, 5.0], "0.5": [0.0, 0.0], "+Inf": [7.0, 7.0], "100.0": [7.0, 7.0]}
    assert [text for text in texts(heatmap(buckets)) if text.startswith("≤")] == ["≤ 2", "≤ 10"]
