"""What anybody can read: colours stand out from white, and nothing in a figure is cut or hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from benchmarks.figures import DOCS, FIGURES
from benchmarks.lib.style import COLOURS, PALE, WIDTH, legend, panels, shades, styled

ON_WHITE, TEXT_ON_WHITE = 3.0, 4.5  # the contrasts that WCAG 2.1 asks for
MAX_LINES = 6  # in a panel
FAST = ("results/paper/1.png", "results/paper/churn.png", "results/unequal-data/unequal-data.png", "images/throughput.png")


def contrast(colour: Any) -> float:
    """Of a colour with white, by WCAG 2.1."""
    channels = np.array(to_rgb(colour), float)
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05))


def faults(figure: Figure) -> list[str]:
    """What a reader would stumble over."""
    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox(renderer)
    width, height = figure.get_size_inches()
    inside = drawn.x0 >= -0.02 and drawn.y0 >= -0.02 and drawn.x1 <= width + 0.02 and drawn.y1 <= height + 0.02
    found = [] if inside else [f"something is cut: {drawn} of {width} × {height}"]
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    found += [f"pale text: {text.get_text()}" for text in texts if contrast(text.get_color()) < TEXT_ON_WHITE]
    for axes in figure.axes:
        found += [f"pale line: {line}" for line in axes.lines if contrast(line.get_color()) < ON_WHITE]
        named = axes.get_legend_handles_labels()[1]
        found += [f"{len(set(named))} lines in one panel"] if len(set(named)) > MAX_LINES else []
        found += ["a panel's legend hides a line"] if (own := axes.get_legend()) and hides(own, axes) else []
        panel: Any = axes.get_tightbbox(renderer)
        found += ["the legend is over a panel" for each in figure.legends if each.get_window_extent().overlaps(panel)]
    return found


def hides(own: Legend, axes: Axes) -> bool:
    box = own.get_window_extent()
    return any(line.get_path().transformed(line.get_transform()).intersects_bbox(box, filled=False) for line in axes.lines)


def test_every_colour_stands_out_from_white() -> None:
    colours = [*COLOURS, PALE, *(colour for count in range(1, 7) for colour in shades(count))]
    assert [colour for colour in colours if contrast(colour) < ON_WHITE] == []
    assert (contrast("black"), contrast("white")) == (21, 1)


@pytest.mark.parametrize("path", [pytest.param(path, marks=() if path in FAST else pytest.mark.slow) for path in FIGURES])
def test_a_figure_of_the_documentation_hides_nothing(path: str) -> None:
    figure = FIGURES[path]()
    assert figure is not None
    assert figure.get_size_inches()[0] == WIDTH
    assert faults(figure) == []
    assert (DOCS / path).exists()


def test_faults_are_found() -> None:
    @styled
    def bad() -> Figure:
        figure, (axes,) = panels(1, 1, "A title that is far too long for its figure, " * 5)
        for number in range(7):
            axes.plot([0, 1], [number, number], color="yellow", label=f"line {number}")
        axes.legend(loc="center")
        axes.text(0.5, 1, "hardly legible", color="lightgrey")
        legend(figure)
        figure.legends[0].set_loc("center")
        return figure

    assert {fault.split(":")[0] for fault in faults(bad())} == {
        "something is cut", "pale text", "pale line", "7 lines in one panel", "a panel's legend hides a line",
        "the legend is over a panel",
    }  # fmt: skip
