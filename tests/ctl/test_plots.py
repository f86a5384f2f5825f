"""The report's plots: lines of any values."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from gem_ctl.plots import Line, Plot, draw_distribution, draw_lines

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")


def plotted(values: Any, at: Any = None, **more: bool | None) -> Plot | None:
    x = np.arange(len(values), dtype=np.float64) if at is None else np.array(at, np.float64)
    return draw_lines("a title", {"a line": Line(x, np.array(values, np.float64))}, 0, 60, "commits", **more)  # type: ignore[arg-type]


def drawn(values: Any, at: Any = None, **more: bool | None) -> str:
    plot = plotted(values, at, **more)
    assert plot is not None
    return plot.svg


def texts(svg: str) -> list[str]:
    """The texts of a picture, which must be well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_is_the_same_every_time() -> None:
    assert drawn([1, 2]) == drawn([1, 2])


def test_without_any_finite_value_there_is_no_picture() -> None:
    assert plotted([]) is plotted([float("nan"), float("inf")]) is draw_distribution("a title", np.zeros(5), "x") is None


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[1.0], [0, 0, 0], [1, float("nan"), 3], [1, float("inf"), 3], [float("-inf"), 2], [-1, 2], [-3, -2], [1e30, 1e-30]],
    ids=str,
)
def test_lines_can_be_drawn_of_any_values(values: list[float], log: bool, share: bool) -> None:
    assert texts(drawn(values, log=log, share=share))


@pytest.mark.parametrize("values", [[1, 3], [0.002, 0.9], [1, 1e9], [5, 5]], ids=str)
def test_ticks_on_a_logarithmic_axis_are_numbers(values: list[float]) -> None:
    assert not [text for text in texts(drawn(values, log=True)) if "$" in text or "\\" in text]


@pytest.mark.parametrize(
    ("values", "log"), [([3.1, 0.1], True), ([2.9, 0.1], False), ([3.1, 0.1, 0], False), ([3.1, 0.1, -1], False)], ids=str
)
def test_a_wide_span_of_positive_values_is_drawn_on_a_logarithmic_scale_which_the_axis_says(
    values: list[float], log: bool
) -> None:
    assert ("logarithmic scale" in texts(drawn(values, log=None))) == log


@pytest.mark.parametrize("highest", [1, 2, 3, 5, 12, 700])
def test_ticks_of_what_is_counted_are_whole(highest: int) -> None:
    numbers = texts(drawn([1, highest], whole=True))[:-1]  # the last one names the axis
    assert len(numbers) > 3
    assert not [text for text in numbers if "." in text]


def test_a_line_at_the_top_is_not_cut_in_half() -> None:
    for values in ([5.0, 5.0], [0.0, 100.0]):
        (path,) = curves(drawn(values))
        assert (
            min(float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))) > 165.6 * 0.09 + 2
        )  # its clip and half its width


def test_the_names_of_lines_are_in_the_legend_unless_there_is_one_line_alone() -> None:
    lines = {"expected": Line(np.arange(2.0), np.ones(2), dashed=True), "mean": Line(np.arange(2.0), np.ones(2))}
    plot = draw_lines("a title", lines, 0, 2, "commits")
    assert plot is not None
    assert plot.legend == (("quiet", "expected"), ("one", "mean"))
    assert (alone := plotted([1, 2])) is not None
    assert alone.legend == ()


def test_lines_below_zero_are_shown() -> None:
    """A loss may be negative: a likelihood's, for one."""
    for values in ([-1, -2, -3], [1, -2, 3]):
        assert any(re.match(r"[-−]\d", text) for text in texts(drawn(values)))


def test_no_line_is_drawn_where_the_history_has_a_hole() -> None:
    """A straight line across a gap would claim what nobody saw."""
    pictures = [drawn(range(4), at=at) for at in ([0, 5, 10, 15], [0, 5, 30, 35])]
    assert [max(path.get("d", "").count("M") for path in curves(picture)) for picture in pictures] == [1, 2]


def curves(svg: str) -> list[ElementTree.Element]:
    """The paths that show data: they are the clipped ones of the lines' colour."""
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    return [path for path in paths if "var(--one)" in path.get("style", "")]
