"""The picture of a run: loss, median π and staleness over commits."""

from __future__ import annotations

from pathlib import Path

from gem_ctl.curves import RunCurves
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gem_worker.evaluation import Score

_INK, _DOTS, _MARK = "#1f4e79", "#9db8d2", "#c0392b"


def plot_report(path: Path, title: str, curves: RunCurves, scores: list[Score], workers: int) -> None:
    """Draws the commits and evaluations of a run as a PNG."""
    plt.switch_backend("Agg")  # draws without a screen
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, constrained_layout=True)
    figure.suptitle(title)
    _curve(top, curves, "loss", "training loss")
    top.set_ylim(bottom=0)
    _accuracy(top, scores)
    _curve(middle, curves, "pi_median", "median π of a commit")
    if curves.total_mean("pi_median") is None:
        middle.text(0.5, 0.5, "this rule has no scaling factor", transform=middle.transAxes, ha="center")
    middle.set_ylim(bottom=0)
    _curve(bottom, curves, "staleness", "staleness τ")
    bottom.axhline(workers - 1, color=_MARK, linewidth=1, linestyle="--", label=f"workers − 1 = {workers - 1}")
    bottom.set_ylim(bottom=0)
    bottom.legend(loc="upper right")
    bottom.set_xlabel("commits applied")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curve(axes: Axes, curves: RunCurves, name: str, label: str) -> None:
    """Draws a dot for each commit, or for the mean of several in a long run; and a line for the moving mean over a hundredth of
    the run."""
    axes.plot(curves.positions(), curves.mean(name), ".", color=_DOTS, markersize=3)
    smoothed = curves.smoothed(name, max(10, (curves.applied + curves.discarded) // 100))
    axes.plot(curves.positions(), smoothed, color=_INK, linewidth=1.5)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _accuracy(axes: Axes, scores: list[Score]) -> None:
    known = [(score.version, 100 * score.accuracy) for score in scores if score.accuracy is not None]
    if not known:
        return
    other = axes.twinx()
    other.plot(*zip(*known, strict=True), color=_MARK, marker="o", markersize=3, linewidth=1)
    other.set_ylabel("test accuracy, %", color=_MARK)
    other.set_ylim(0, 100.5)
