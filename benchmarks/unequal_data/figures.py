"""The picture of docs/results/unequal-data."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from benchmarks.lib.style import BAND, BLUE, GREY, dots, legend, panels, styled
from benchmarks.paper.statistics import columns, spread
from benchmarks.unequal_data.runs import METHODS, RARE, SLOWER, WORKERS, Case, Outcome, reported

_KINDS = (
    ("rare", f"digits {' and '.join(map(str, RARE))}, which only the last worker has", BLUE, "o"),
    ("accuracy", "all digits", GREY, "D"),
)
_SHIFT = 0.15  # of a row, by which the two are moved apart


@styled
def draw(known: Mapping[Case, Outcome]) -> Figure:
    """A panel for each slowness of the last worker, and a row for each method."""
    title = f"Held-out accuracy, if one of {WORKERS} workers is slow and has digits of its own"
    figure, places = panels(1, len(SLOWER), title, 2.9, sharex=True, sharey=True)
    places[0].set(xlim=(-5, 105), yticks=range(len(METHODS)), yticklabels=[method.label for method in METHODS.values()])
    places[0].invert_yaxis()
    for axes, slower in zip(places, SLOWER, strict=True):
        for (column, label, colour, marker), shift in zip(_KINDS, (-_SHIFT, _SHIFT), strict=True):
            found = {row: one[1] for row, name in enumerate(METHODS) if (one := reported(known, name, slower))}
            values = [spread(getattr(each, column) for each in outcomes) for outcomes in found.values()]
            dots(axes, columns([row + shift for row in found], values, 100), colour, label, marker)
        name = "all equally fast" if slower == 1 else f"the last {slower} times slower"
        axes.set(title=name, xlabel="held-out accuracy, %")
    legend(figure, BAND)
    return figure
