"""The figures' pictures, each drawn from its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib import style
from benchmarks.paper.content import CONTENT, RULE_NAMES, TARGET_LOSS, Content, Lines
from benchmarks.paper.plan import PAPERS_WORKERS
from benchmarks.paper.statistics import CHANCE, Measured

STEPS = "worker steps (commits / workers)"
PI_LINEAR = 1e-3  # π below this is shown on a linear scale
_TENSOR_COLUMNS = 5  # panels in a row
Dress = Callable[[Axes, str, Lines], object]  # gives a panel with this name and these lines its axes
Colours = Callable[[Lines], Mapping[str, str]]


@style.styled
def rules_by_workers(content: Content) -> Figure:
    """The loss under three rules, a panel for each number of workers; in Fig. 1 also final loss and accuracy, in Fig. 6 one
    process beside them."""
    colours = style.RULES | {RULE_NAMES["momentum"]: style.GREY}
    columns = 2 if len(content.panels) <= 4 else 3
    figure, places = style.panels(-(-len(content.panels) // columns), columns, content.title)
    for axes, (name, lines) in zip(places, content.panels.items(), strict=False):
        over_steps = name.endswith(("worker", "workers"))
        _draw(axes, lines, colours, style.curve if over_steps else style.marks)
        if name == "test accuracy":
            axes.set(title=name, ylabel="%", ylim=(0, 102))
        else:
            _loss_axes(axes, name)
            axes.axhline(CHANCE, color=style.GREY, linestyle=":", linewidth=1, label="chance")
            axes.set_ylim(0.03, 10)
            _notes(axes, lines)
        if not over_steps:
            axes.set(xlabel="workers", xticks=lines["GEM"]["x"])
    _switch_off(places[len(content.panels) :])
    style.legend(figure, style.BAND, columns=5)
    return figure


@style.styled
def split_batch(content: Content) -> Figure:
    figure, (left, middle, right) = style.panels(1, 3, content.title)
    for axes, name in ((left, "loss over samples"), (middle, "loss over time")):
        _draw(axes, content.panels[name], _in_order(content.panels[name]))
    _loss_axes(left, "the same data …", "thousands of samples, all workers")
    left.xaxis.set_major_formatter(lambda samples, _: f"{samples / 1000:g}")
    _loss_axes(middle, "… in less time", "seconds (simulated, log scale)")
    times = content.panels["time to a loss"]["measured"]
    style.marks(right, times, style.BLUE, "measured")
    if times["mean"][0] is not None:
        ideal = [times["mean"][0] * times["x"][0] / n for n in times["x"]]
        right.plot(times["x"], ideal, "--", color=style.GREY, label="n times as fast")
    right.set(title=f"until the loss is {TARGET_LOSS}", xlabel="workers n (log scale)", ylabel="seconds (simulated, log scale)")
    style.log_scale(middle, "x")
    style.log_scale(right, "x", base=2)
    style.log_scale(right, base=2)
    style.legend(figure, columns=4)
    return figure


@style.styled
def medians(content: Content) -> Figure:
    columns = min(_TENSOR_COLUMNS, len(content.panels))
    figure, places = style.panels(-(-len(content.panels) // columns), columns, content.title, 2.3, sharex=True, sharey=True)
    for axes, lines in zip(places, content.panels.values(), strict=False):
        _draw(axes, lines, style.palette(lines))
    for axes, name in zip(places, content.panels, strict=False):
        _pi_axes(axes, name)
        axes.set_xlabel("worker steps")
        axes.label_outer()
    _switch_off(places[len(content.panels) :])
    style.legend(figure, style.BAND)
    return figure


@style.styled
def errors(content: Content) -> Figure:
    figure, (axes,) = style.panels(1, 1, content.title, 4.2)
    lines = content.panels["test error"]
    colours = (style.BLUE, style.VIOLET, style.TEAL, style.ORANGE, style.RED)
    for (label, columns), colour, marker in zip(lines.items(), colours, style.MARKERS, strict=False):
        style.marks(axes, columns, colour, label, f"{marker}-")
    axes.set(xlabel="workers (log scale)", ylabel="test error, % (log scale)", xscale="log", yscale="log")
    axes.set_xticks(columns["x"], [f"{n:,.0f}" for n in columns["x"]])
    axes.set_yticks((1, 2, 5, 10, 20), ("1", "2", "5", "10", "20"))
    axes.minorticks_off()
    style.legend(figure, columns=2)
    return figure


@style.styled
def beside(
    content: Content, dress: Sequence[Dress], colours: Colours = style.palette, height: float = 3.0, columns: int = 3,
    how: Callable[..., None] = style.curve, **shared: Any,
) -> Figure:  # fmt: skip
    """The content's panels side by side, with the colours of the first one's lines. The last of `dress` is for all the rest."""
    figure, places = style.panels(1, len(content.panels), content.title, height, **shared)
    chosen = colours(next(iter(content.panels.values())))
    for axes, lines in zip(places, content.panels.values(), strict=True):
        _draw(axes, lines, chosen, how)
    for number, (axes, (name, lines)) in enumerate(zip(places, content.panels.items(), strict=True)):
        dress[min(number, len(dress) - 1)](axes, name, lines)
        if shared.get("sharey"):
            axes.label_outer()
    style.legend(figure, style.BAND, columns=columns)
    return figure


def _training(axes: Axes, name: str, lines: Lines) -> None:
    axes.set(title="training loss", xlabel=STEPS, ylabel="training loss", ylim=(0, 2.5))


def _accuracy(axes: Axes, name: str, lines: Lines) -> None:
    axes.axhline(99.38, color=style.RED, linestyle="--", linewidth=1, label=f"the paper, {PAPERS_WORKERS} workers: 99.38 %")
    axes.set(title="test accuracy", xlabel=STEPS, ylabel="%", ylim=(90, 100))
    _notes(axes, lines, "at the end", "lower right")


def _over_epochs(axes: Axes, name: str, lines: Lines) -> None:
    dropout = "with" if name == "training" else "without"
    _loss_axes(axes, f"{name} loss ({dropout} dropout)", "data epochs, all workers together", y="loss")


def _final(axes: Axes, name: str, lines: Lines) -> None:
    axes.set(title=name, xlabel="κ", xticks=next(iter(lines.values()))["x"], ylabel="mean of the last tenth of the run")
    axes.set_ylim(bottom=0)


def _mean_pi(axes: Axes, name: str, lines: Lines) -> None:
    axes.set(title=name, xlabel="κ", xticks=next(iter(lines.values()))["x"], ylabel="mean over the run (log scale)")
    style.log_scale(axes)


def _noted(title: str) -> Dress:
    """The loss, with test accuracies beside the lines' names; without a title, that of the panel."""

    def dress(axes: Axes, name: str, lines: Lines) -> None:
        _loss_axes(axes, title or name)
        _notes(axes, lines, "test accuracy")

    return dress


def _staleness(axes: Axes, name: str, lines: Lines) -> None:
    axes.set(title="staleness", xlabel=STEPS, ylabel="τ, commits")
    axes.set_ylim(bottom=0)


def _draw(axes: Axes, lines: Lines, colours: Mapping[str, str], how: Callable[..., None] = style.curve) -> None:
    for label, columns in lines.items():
        how(axes, columns, colours[label], label)


def _in_order(lines: Lines) -> dict[str, str]:
    """Colours for lines that are in order."""
    return dict(zip(lines, style.shades(len(lines)), strict=True))


def _two(*colours: str) -> Colours:
    return lambda lines: dict(zip(lines, colours, strict=False))


def _notes(axes: Axes, lines: Lines, title: str = "", loc: Any = "upper right") -> None:
    """What is noted about the lines, in a corner that they leave free."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    noted = {label: columns["note"] for label, columns in lines.items() if "note" in columns}
    if noted:
        axes.legend([handles[label] for label in noted], noted.values(), title=title, loc=loc, fontsize=8, title_fontsize=8)


def _loss_axes(axes: Axes, title: str, x: str = STEPS, y: str = "training loss") -> None:
    """A panel with the loss over something."""
    axes.set(title=title, xlabel=x, ylabel=f"{y} (log scale)")
    style.log_scale(axes)


def _pi_axes(axes: Axes, title: str) -> None:
    """A panel with π over worker steps. The axis is logarithmic, and linear below `PI_LINEAR`: medians of 0 are common."""
    axes.set_yscale("symlog", linthresh=PI_LINEAR, linscale=0.3)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title=title, xlabel=STEPS, ylabel="median of π (log scale)")
    axes.set_ylim(bottom=-PI_LINEAR / 10)  # room for a line at 0


def _switch_off(places: list[Axes]) -> None:
    for axes in places:
        axes.set_axis_off()


def _pi(title: str) -> Dress:
    return lambda axes, name, lines: _pi_axes(axes, title)


_LOSS_AND_PI = (_noted("training loss"), _pi("median π of a commit (0: most parameters stay)"))
PICTURES: dict[str, Callable[[Content], Figure]] = {
    "1": rules_by_workers,
    "2": partial(beside, dress=(_training, _accuracy)),
    "3": partial(beside, dress=(_pi(""),), colours=_in_order, height=4, columns=5),
    "4": split_batch,
    "5": partial(beside, dress=(_over_epochs,), colours=_two(style.BLUE, style.GREY), sharey=True),
    "6": rules_by_workers,
    "8": partial(beside, dress=(_final, _mean_pi), how=style.marks),
    "9-10": medians,
    "conventions": partial(beside, dress=_LOSS_AND_PI, height=3.2, columns=4),
    "straggler": partial(beside, dress=(_noted(""),), colours=_two(style.GREY, style.BLUE), sharey=True),
    "churn": partial(beside, dress=(_noted("training loss"), _staleness), colours=_two(style.GREY, style.BLUE)),
    "proxies": partial(beside, dress=_LOSS_AND_PI, height=3.2, columns=2),
    "beyond": errors,
}


def draw_figure(name: str, measured: list[Measured], folder: Path) -> None:
    """Writes NAME.json and NAME.png; without results, the picture of a stored NAME.json if there is one."""
    stored = folder / f"{name}.json"
    if measured:
        CONTENT[name](measured).save(stored)
    if stored.exists():
        style.save(PICTURES[name](Content.load(stored)), stored.with_suffix(".png"))
