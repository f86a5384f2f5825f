"""The plots: loss over the learning rate, and loss over the number of workers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.models.analysis import Case, by_rate, measured
from benchmarks.models.plan import SHARED, STEPS, Results, case, cases
from benchmarks.models.runs import METHODS, Method, Run
from benchmarks.paper.statistics import Spread
from benchmarks.paper.style import Drawing, panels

_COLOURS = {
    "gem-adamw": "#1f77b4", "downpour-adamw": "#17becf", "gem-own": "#2ca02c", "downpour-own": "#8fbc3f",
    "adaptive-own": "#ff7f0e", "diloco-8": "#9467bd", "diloco-32": "#e377c2", "gem-sgd": "#d62728",
}  # fmt: skip
_ABOVE_BEST = 1.2  # nats shown above a panel's best loss; what lies beyond is marked at the top


def draw(folder: Path, results: Results) -> list[str]:
    """Writes each plot that has something to show; returns their names."""
    drawings = {"rates": rates(results), "workers": workers(results)}
    for name, drawing in drawings.items():
        if drawing is not None:
            drawing.save(folder, name)
    return [name for name, drawing in drawings.items() if drawing is not None]


def rates(results: Results) -> Drawing | None:
    """A panel for each number of workers; a line for each method. A point with several seeds has a bar for their range."""
    widths = [n for n in sorted(STEPS) if any(by_rate(each, results) for each in cases(n))]
    if not widths:
        return None
    columns = min(2, len(widths))
    rows = -(-len(widths) // columns)
    drawing, places = panels(rows, columns, "Held-out loss over the learning rate", 6.2, 4.6)
    for axes, n in zip(places, widths, strict=False):
        _rates_panel(drawing, axes, n, cases(n), results)
    for axes in places[len(widths) :]:
        axes.set_axis_off()
    _legend_below(drawing, places, 4)
    return drawing


def _rates_panel(drawing: Drawing, axes: Axes, n: int, of: list[Run], results: Results) -> None:
    title = f"{n} worker{'s' if n > 1 else ''}, {STEPS[n]} steps each"
    beyond: list[tuple[float, str]] = []
    lines = [(each, by_rate(each, results)) for each in of]
    lowest = [point.loss.low for _, points in lines for _, point in points if point.loss.count]
    top = min(lowest, default=0) + _ABOVE_BEST
    for each, points in lines:
        method, colour = METHODS[each.method], _COLOURS[each.method]
        shown = [(x, point.loss) for x, point in points if point.loss.count]
        beyond += [(x, colour) for x, point in points if not point.loss.count or point.loss.mean > top]
        if shown:
            xs, values = zip(*shown, strict=True)
            drawing.points(axes, title, method.label, list(xs), list(values), colour, style=_style(method))
    for number, (x, colour) in enumerate(beyond):
        axes.plot(x * 1.06 ** (number % 3 - 1), top - 0.03, "^", color=colour, markersize=7)
    axes.set_xscale("log")
    axes.set(title=title, xlabel="learning rate (log scale; ▲: above, or diverged)", ylabel="held-out loss (nats a character)")
    axes.set_ylim(min(lowest, default=0) - 0.05, top)


def workers(results: Results) -> Drawing | None:
    """Loss at the best rate over the number of workers, beside AdamW alone with as many samples, or as many steps."""
    found = {n: [measured(each, results) for each in cases(n)] for n in sorted(STEPS)}
    if not any(each.summary.outcomes for of in found.values() for each in of):
        return None
    drawing, (axes,) = panels(1, 1, "Held-out loss at each method's best learning rate", 10.0, 6.2)
    places = {n: float(place) for place, n in enumerate(sorted(STEPS))}
    for number, (name, method) in enumerate(METHODS.items()):
        points = [(n, each) for n, of in found.items() for each in of if each.case.method == name and each.summary.loss.count]
        shift = (number - len(METHODS) / 2) * 0.05  # so that bars don't hide each other
        _line(drawing, axes, method.label, [(places[n] + shift, each) for n, each in points], _COLOURS[name], _style(method))
    alone = {n: (measured(case(SHARED, 1, n * STEPS[n]), results), measured(case(SHARED, 1, STEPS[n]), results)) for n in STEPS}
    for label, which, colour in (("one worker's AdamW, as many samples", 0, "#000000"), ("… as many steps", 1, "#999999")):
        line = [(places[n], alone[n][which]) for n in sorted(STEPS) if alone[n][which].summary.loss.count]
        _line(drawing, axes, label, line, colour, "s:")
    axes.set_xticks(list(places.values()), [f"{n}\n{STEPS[n]} steps each" for n in places])
    axes.set(xlabel="workers (lines that leave the picture are in the table)", ylabel="held-out loss (nats a character)")
    useful = [of.summary.loss.high for _, of in alone.values() if of.summary.loss.count]
    if useful:  # a method that is worse than one worker alone must not squeeze the others
        axes.set_ylim(top=max(useful) + 0.1)
    _legend_below(drawing, [axes], 3)
    return drawing


def _line(drawing: Drawing, axes: Axes, label: str, points: list[tuple[float, Case]], colour: str, style: str) -> None:
    if points:
        values: list[Spread] = [each.summary.loss for _, each in points]
        drawing.points(axes, "workers", label, [x for x, _ in points], values, colour, style=style)


def _legend_below(drawing: Drawing, places: list[Axes], columns: int) -> None:
    """One legend for all panels, where it hides nothing."""
    entries = {label: handle for axes in places for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawing.figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=9)


def _style(method: Method) -> str:
    """Solid lines for rules that match energies."""
    return "o-" if method.rule == "gem" else "o--"
