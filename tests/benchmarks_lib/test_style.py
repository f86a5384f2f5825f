"""How figures look: a legend stays within its figure."""

from __future__ import annotations

import pytest

from benchmarks.lib import style


@pytest.mark.parametrize(("entries", "rows"), [(3, 1), (5, 2)])
@style.styled
def test_a_legend_is_no_wider_than_its_figure(entries: int, rows: int) -> None:
    figure, (axes,) = style.panels(1, 1, "a title")
    for number in range(entries):
        axes.plot([0, 1], label=f"line {number} has a long enough name")
    style.legend(figure, columns=5)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == rows
