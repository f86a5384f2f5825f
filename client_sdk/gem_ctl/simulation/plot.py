"""A study as a picture, with Matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, PercentFormatter

from gem_ctl.simulation.study import Study

_INK, _BAND, _MARK, _OTHER = "#1f4e79", "#9db8d2", "#c0392b", "#5d6d7e"
_LEAST_RANGE = 3.0  # of a logarithmic axis: its highest value by its lowest


def draw(study: Study, path: Path) -> None:
    """Draws commits per second, load, staleness and waiting against the number of workers.

    The name's ending is the format: .png, .svg or .pdf. Raises OSError if the file can't be written.
    """
    with matplotlib.rc_context({"svg.hashsalt": "gem-ctl simulate", "font.size": 9}):
        figure = Figure(figsize=(9, 6.4), layout="constrained")
        (rate, load), (staleness, wait) = figure.subplots(2, 2, sharex=True)
        workers = [outcome.workers for outcome in study.outcomes]
        for axes in (rate, load, staleness, wait):
            axes.set_xscale("log")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.axvline(study.saturated_at or study.full_at, color=_OTHER, linewidth=0.8, linestyle=":")
        for axes in (staleness, wait):
            axes.set_xlabel("workers")
        _rate(rate, workers, study)
        _shares(load, workers, study)
        _staleness(staleness, workers, study)
        _wait(wait, workers, study)
        date = {".png": {}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {"Date": None})
        figure.savefig(path, dpi=120, metadata=date)


def _rate(axes: Axes, workers: list[int], study: Study) -> None:
    axes.plot(workers, [each.commits_per_second for each in study.outcomes], "o-", color=_INK, label="simulated")
    axes.plot(workers, [each.planned for each in study.outcomes], "--", color=_MARK, label="gem-ctl plan")
    _logarithmic(axes, "")
    axes.set_title("commits per second")
    axes.legend(frameon=False)


def _logarithmic(axes: Axes, unit: str) -> None:
    """A logarithmic y axis, whose small ticks have numbers too if there are few large ones."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < _LEAST_RANGE * low:  # nearly constant: no axis that shows rounding errors
        middle = (low * high) ** 0.5
        low, high = middle / _LEAST_RANGE**0.5, middle * _LEAST_RANGE**0.5
        axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.yaxis.set_minor_formatter(EngFormatter(unit) if high < 10 * low else NullFormatter())


def _shares(axes: Axes, workers: list[int], study: Study) -> None:
    axes.plot(workers, [each.load for each in study.outcomes], "o-", color=_INK, label="a server is busy")
    axes.plot(workers, [each.idle for each in study.outcomes], "o-", color=_MARK, label="a worker does not compute")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, 1.02)
    axes.set_title("share of the time (dotted: saturation)")
    axes.legend(frameon=False)


def _staleness(axes: Axes, workers: list[int], study: Study) -> None:
    of = [each.staleness for each in study.outcomes]
    axes.fill_between(workers, [each.p5 for each in of], [each.p95 for each in of], color=_BAND, label="5 % to 95 %")
    axes.plot(workers, [each.p50 for each in of], "o-", color=_INK, label="median")
    axes.plot(workers, [each.max for each in of], ".:", color=_MARK, label="maximum")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_title("staleness τ, commits")
    axes.legend(frameon=False)


def _wait(axes: Axes, workers: list[int], study: Study) -> None:
    axes.plot(workers, [each.round_trip for each in study.outcomes], "o-", color=_MARK, label="round trip")
    if any(each.wait for each in study.outcomes):
        axes.plot(workers, [each.wait or float("nan") for each in study.outcomes], "o-", color=_INK, label="of it in the queue")
    _logarithmic(axes, "s")
    axes.set_title("waiting time of a commit")
    axes.legend(frameon=False)
