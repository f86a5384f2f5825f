"""The figures' pictures, each drawn from its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.style import (
    BAND,
    BLUE,
    GREY,
    MARKERS,
    ORANGE,
    RED,
    RULES,
    TEAL,
    VIOLET,
    curve,
    legend,
    log_scale,
    marks,
    palette,
    panels,
    shades,
    styled,
)
from benchmarks.paper.figures.content import TARGET_LOSS, Content, Lines
from benchmarks.paper.plan import PAPERS_WORKERS
from benchmarks.paper.statistics import CHANCE

STEPS = "worker steps (commits / workers)"
PI_LINEAR = 1e-3  # π below this is shown on a linear scale
_TENSOR_COLUMNS = 5  # panels in a row


@styled
def rules_by_workers(content: Content) -> Figure:
    """The loss under three rules, a panel for each number of workers; in Fig. 1 also final loss and accuracy."""
    columns = 2 if len(content.panels) <= 4 else 3
    figure, places = panels(-(-len(content.panels) // columns), columns, content.title)
    for axes, (name, lines) in zip(places, content.panels.items(), strict=False):
        over_steps = name.endswith(("worker", "workers"))
        _draw(axes, lines, RULES, curve if over_steps else marks)
        if name == "test accuracy":
            axes.set(title=name, ylabel="%", ylim=(0, 102))
        else:
            _loss_axes(axes, name)
            _chance(axes)
            axes.set_ylim(0.03, 10)
            _notes(axes, lines)
        if not over_steps:
            axes.set(xlabel="workers", xticks=lines["GEM"]["x"])
    _switch_off(places[len(content.panels) :])
    legend(figure, BAND, columns=5)
    return figure


@styled
def many(content: Content) -> Figure:
    figure, (left, right) = panels(1, 2, content.title)
    colours = palette(content.panels["loss"])
    _draw(left, content.panels["loss"], colours)
    left.set(title="training loss", xlabel=STEPS, ylabel="training loss", ylim=(0, 2.5))
    _draw(right, content.panels["test accuracy"], colours)
    right.axhline(99.38, color=RED, linestyle="--", linewidth=1, label=f"the paper, {PAPERS_WORKERS} workers: 99.38 %")
    right.set(title="test accuracy", xlabel=STEPS, ylabel="%", ylim=(90, 100))
    _notes(right, content.panels["test accuracy"], "at the end", "lower right")
    legend(figure, BAND)
    return figure


@styled
def pi(content: Content) -> Figure:
    figure, (axes,) = panels(1, 1, content.title, 4)
    _draw(axes, content.panels["pi"], _in_order(content.panels["pi"]))
    _pi_axes(axes, "")
    legend(figure, BAND, columns=5)
    return figure


@styled
def split_batch(content: Content) -> Figure:
    figure, (left, middle, right) = panels(1, 3, content.title)
    for axes, name in ((left, "loss over samples"), (middle, "loss over time")):
        _draw(axes, content.panels[name], _in_order(content.panels[name]))
    _loss_axes(left, "the same data …", "thousands of samples, all workers")
    left.xaxis.set_major_formatter(lambda samples, _: f"{samples / 1000:g}")
    _loss_axes(middle, "… in less time", "seconds (simulated, log scale)")
    times = content.panels["time to a loss"]["measured"]
    marks(right, times, BLUE, "measured")
    if times["mean"][0] is not None:
        ideal = [times["mean"][0] * times["x"][0] / n for n in times["x"]]
        right.plot(times["x"], ideal, "--", color=GREY, label="n times as fast")
    right.set(title=f"until the loss is {TARGET_LOSS}", xlabel="workers n (log scale)", ylabel="seconds (simulated, log scale)")
    log_scale(middle, "x")
    log_scale(right, "x", base=2)
    log_scale(right, base=2)
    legend(figure, columns=4)
    return figure


@styled
def against_sequential(content: Content) -> Figure:
    figure, (left, right) = panels(1, 2, content.title, sharey=True)
    for axes, name, dropout in ((left, "training", "with"), (right, "validation", "without")):
        _draw(axes, content.panels[name], dict(zip(content.panels[name], (BLUE, GREY), strict=False)))
        _loss_axes(axes, f"{name} loss ({dropout} dropout)", "data epochs, all workers together", y="loss")
        axes.label_outer()
    legend(figure, BAND)
    return figure


@styled
def kappas(content: Content) -> Figure:
    figure, places = panels(1, 2, content.title)
    for axes, (name, lines) in zip(places, content.panels.items(), strict=True):
        _draw(axes, lines, palette(lines), marks)
        axes.set(title=name, xlabel="κ", xticks=next(iter(lines.values()))["x"])
    places[0].set(ylabel="mean of the last tenth of the run")
    places[0].set_ylim(bottom=0)
    places[1].set(ylabel="mean over the run (log scale)")
    log_scale(places[1])
    legend(figure, BAND)
    return figure


@styled
def medians(content: Content) -> Figure:
    columns = min(_TENSOR_COLUMNS, len(content.panels))
    figure, places = panels(-(-len(content.panels) // columns), columns, content.title, 2.3, sharex=True, sharey=True)
    for axes, lines in zip(places, content.panels.values(), strict=False):
        _draw(axes, lines, palette(lines))
    for axes, name in zip(places, content.panels, strict=False):
        _pi_axes(axes, name)
        axes.set_xlabel("worker steps")
        axes.label_outer()
    _switch_off(places[len(content.panels) :])
    legend(figure, BAND)
    return figure


@styled
def loss_and_pi(content: Content) -> Figure:
    figure, (left, right) = panels(1, 2, content.title, 3.2)
    colours = palette(content.panels["loss"])
    _draw(left, content.panels["loss"], colours)
    _draw(right, content.panels["pi"], colours)
    _loss_axes(left, "training loss")
    _pi_axes(right, "median π of a commit (0: most parameters stay)")
    _notes(left, content.panels["loss"], "test accuracy")
    legend(figure, BAND, columns=2 if len(colours) > 3 else 4)
    return figure


@styled
def straggler(content: Content) -> Figure:
    figure, places = panels(1, len(content.panels), content.title, sharey=True)
    for axes, (rule, lines) in zip(places, content.panels.items(), strict=True):
        _draw(axes, lines, dict(zip(lines, (GREY, BLUE), strict=False)))
        _loss_axes(axes, rule)
        axes.label_outer()
        _notes(axes, lines, "test accuracy")
    legend(figure, BAND)
    return figure


@styled
def churn(content: Content) -> Figure:
    figure, (left, right) = panels(1, 2, content.title)
    colours = dict(zip(content.panels["loss"], (GREY, BLUE), strict=False))
    _draw(left, content.panels["loss"], colours)
    _draw(right, content.panels["staleness"], colours)
    _loss_axes(left, "training loss")
    _notes(left, content.panels["loss"], "test accuracy")
    right.set(title="staleness", xlabel=STEPS, ylabel="τ, commits")
    right.set_ylim(bottom=0)
    legend(figure, BAND)
    return figure


@styled
def errors(content: Content) -> Figure:
    figure, (axes,) = panels(1, 1, content.title, 4.2)
    lines = content.panels["test error"]
    for (label, columns), colour, marker in zip(lines.items(), (BLUE, VIOLET, TEAL, ORANGE, RED), MARKERS, strict=False):
        marks(axes, columns, colour, label, f"{marker}-")
    axes.set(xlabel="workers (log scale)", ylabel="test error, % (log scale)", xscale="log", yscale="log")
    axes.set_xticks(columns["x"], [f"{n:,.0f}" for n in columns["x"]])
    axes.set_yticks((1, 2, 5, 10, 20), ("1", "2", "5", "10", "20"))
    axes.minorticks_off()
    legend(figure, columns=2)
    return figure


def _draw(axes: Axes, lines: Lines, colours: Mapping[str, str], how: Callable[..., None] = curve) -> None:
    for label, columns in lines.items():
        how(axes, columns, colours[label], label)


def _in_order(lines: Lines) -> dict[str, str]:
    """Colours for lines that are in order."""
    return dict(zip(lines, shades(len(lines)), strict=True))


def _notes(axes: Axes, lines: Lines, title: str = "", loc: Any = "upper right") -> None:
    """What is noted about the lines, in a corner that they leave free."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    noted = {label: columns["note"] for label, columns in lines.items() if "note" in columns}
    if noted:
        axes.legend([handles[label] for label in noted], noted.values(), title=title, loc=loc, fontsize=8, title_fontsize=8)


def _loss_axes(axes: Axes, title: str, x: str = STEPS, y: str = "training loss") -> None:
    """A panel with the loss over something."""
    axes.set(title=title, xlabel=x, ylabel=f"{y} (log scale)")
    log_scale(axes)


def _pi_axes(axes: Axes, title: str) -> None:
    """A panel with π over worker steps. The axis is logarithmic, and linear below `PI_LINEAR`: medians of 0 are common."""
    axes.set_yscale("symlog", linthresh=PI_LINEAR, linscale=0.3)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title=title, xlabel=STEPS, ylabel="median of π (log scale)")
    axes.set_ylim(bottom=-PI_LINEAR / 10)  # room for a line at 0


def _chance(axes: Axes) -> None:
    axes.axhline(CHANCE, color=GREY, linestyle=":", linewidth=1, label="chance")


def _switch_off(places: list[Axes]) -> None:
    for axes in places:
        axes.set_axis_off()


PICTURES: dict[str, Callable[[Content], Figure]] = {
    "1": rules_by_workers, "2": many, "3": pi, "4": split_batch, "5": against_sequential, "6": rules_by_workers, "8": kappas,
    "9-10": medians, "conventions": loss_and_pi, "straggler": straggler, "churn": churn, "proxies": loss_and_pi,
    "beyond": errors,
}  # fmt: skip
