"""The picture of a run: loss, median π and staleness over commits."""

from __future__ import annotations

from pathlib import Path

from gem_ctl.curves import RunCurves
from gem_ctl.style import BLUE, PALE, RED, STYLE
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gem_worker.evaluation import Score


@rc_context(STYLE)
def plot_report(path: Path, title: str, curves: RunCurves, scores: list[Score], workers: int) -> None:
    """Draws the commits and evaluations of a run as a PNG."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)
    _curve(top, curves, "loss", "training loss")
    top.set_ylim(bottom=0)
    _accuracy(top, scores)
    _curve(middle, curves, "pi_median", "median π of a commit")
    if curves.total_mean("pi_median") is None:
        middle.text(0.5, 0.5, "this rule has no scaling factor", transform=middle.transAxes, ha="center")
    middle.set_ylim(bottom=0)
    _curve(bottom, curves, "staleness", "staleness τ, commits")
    bottom.axhline(workers - 1, color=RED, linewidth=1, linestyle="--", label=f"workers − 1 = {workers - 1}")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel("commits applied")
    figure.legend(handles=bottom.lines, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def _curve(axes: Axes, curves: RunCurves, name: str, label: str) -> None:
    """Draws a dot for each commit, or for the mean of several in a long run; and a line for the moving mean over a hundredth of
    the run."""
    axes.plot(curves.positions(), curves.mean(name), ".", color=PALE, markersize=3, label="commits")
    smoothed = curves.smoothed(name, max(10, (curves.applied + curves.discarded) // 100))
    axes.plot(curves.positions(), smoothed, color=BLUE, label="moving mean")
    axes.set_ylabel(label)


def _accuracy(axes: Axes, scores: list[Score]) -> None:
    known = [(score.version, 100 * score.accuracy) for score in scores if score.accuracy is not None]
    if not known:
        return
    other = axes.twinx()
    other.plot(*zip(*known, strict=True), color=RED, marker="o", markersize=3, linewidth=1)
    other.set_ylabel("test accuracy, %", color=RED)
    other.set_ylim(0, 100.5)
    other.spines["right"].set_visible(True)
    other.grid(visible=False)
