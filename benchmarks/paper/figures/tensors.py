"""Figs. 9 and 10: the median π of each tensor over time."""

from __future__ import annotations

from benchmarks.paper.plan import Scale
from benchmarks.paper.statistics import Band, Measured, over_seeds, smooth
from benchmarks.paper.style import Drawing, palette, panels, pi_axes

_COLUMNS = 5


def medians(measured: list[Measured], scale: Scale) -> Drawing:
    """A panel for each tensor, biases last; a line for each number of workers. All panels have the same axes."""
    names = [name for name in measured[0].results[0].tensors if name != "version"]
    names.sort(key=lambda name: name.endswith("bias"))
    columns = min(_COLUMNS, len(names))
    drawing, axes = panels(
        -(-len(names) // columns),
        columns,
        "Figs. 9 and 10: median π of each tensor under GEM, sampled twice a second",
        2.8,
        2.8,
    )
    for place, name in zip(axes, names, strict=False):
        for each, colour in zip(measured, palette(len(measured)), strict=True):
            drawing.line(place, name, each.label, _median(each, name), colour)
        pi_axes(place, name)
    top = max(place.get_ylim()[1] for place in axes[: len(names)])
    for place in axes[: len(names)]:
        place.set_ylim(top=top)
        place.label_outer()
    for empty in axes[len(names) :]:
        empty.set_axis_off()
    return drawing


def _median(each: Measured, tensor: str) -> Band:
    """The smoothed median π of one tensor over worker steps."""
    return over_seeds([
        (run.tensors["version"] / run.experiment.workers, smooth(run.tensors[tensor], 0.1))
        for run in each.results
        if tensor in run.tensors
    ])  # fmt: skip
