"""The report's plots: lines of any values."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from gem_ctl.plots import Line, draw_distribution, draw_lines

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")


def drawn(values: Any, at: Any = None, **more: bool) -> str:
    x = np.arange(len(values), dtype=np.float64) if at is None else np.array(at, np.float64)
    return draw_lines("a title", {"a line": Line(x, np.array(values, np.float64))}, 0, 60, "commits", **more)


def texts(svg: str) -> list[str]:
    """The texts of a picture, which must be well-formed."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_is_the_same_every_time() -> None:
    assert drawn([1, 2]) == drawn([1, 2])


def test_without_any_finite_value_there_is_no_picture() -> None:
    assert drawn([]) == drawn([float("nan"), float("inf")]) == draw_distribution("a title", np.zeros(5), "x") == ""


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
    return [path for path in paths if "#1f4e79" in path.get("style", "")]
