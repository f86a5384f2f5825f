"""The pictures of docs/results/many-workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.style import BLUE, GREY, ORANGE, RED, TEAL, legend, log_scale, panels, shades, styled
from benchmarks.many_workers.runs import AGAINST, SPREADS, Runs, experiment, mean_leap
from benchmarks.many_workers.stability import gamma_times, stable_below
from benchmarks.paper.plan import AT_RANDOM, LOCKSTEP

_SHOWN = (0.05, 0.3, 0.5, 0.7, 1.0)  # of the spreads, as curves
_MIN_LEAP = 0.01  # below this a leap is noise, and is drawn at it on the logarithmic axis
_ENERGIES = {
    "moved": ("what all commits of a round moved θ", BLUE),
    "largest_moment": ("the largest |m| of all workers", ORANGE),
    "proxy": ("one worker's m", TEAL),
    "mean_moment": ("the mean m of all workers", RED),
}


@styled
def order(runs: Runs) -> Figure:
    """Loss and leap by the spread of compute times, beside the limit that the model predicts."""
    title = "100 workers whose compute times vary little (0.05) or much (1)"
    figure, (left, middle, right) = panels(1, 3, title, 3.2)
    for spread, colour in zip(_SHOWN, shades(len(_SHOWN)), strict=True):
        run = runs[experiment(spread=spread)]
        left.plot(run.rounds, run.column("loss"), color=colour, label=f"spread {spread:g}")
    left.set(title="training loss", xlabel="rounds: commits of each worker", ylabel="training loss (log scale)")
    for against, colour, style in zip(AGAINST, (BLUE, RED), ("o-", "s-"), strict=True):
        values = [max(_MIN_LEAP, mean_leap(runs, experiment(spread=spread, against=against))) for spread in SPREADS]
        label = "the paper's rule" if against == 1 else f"against = {against:g}"
        middle.plot(SPREADS, values, style, color=colour, label=label)
    middle.set(title="leap of the training loss", ylabel="leap (log scale)")
    grid = np.linspace(0.02, 0.7, 35)
    right.plot(grid, [stable_below(gamma_times(float(each)), 0.9) for each in grid], color=GREY)
    right.set(title="the model: stable below this", ylabel="c·η·h (log scale)", ylim=(1, 300))
    right.text(0.88, 17, "from 0.7:\nalways\nstable", ha="center", va="center", fontsize=9)
    for axes in (middle, right):
        axes.set(xlabel="spread of compute times", xlim=(0, 1.05))
    for axes in (left, middle, right):
        log_scale(axes)
    legend(figure, columns=4)
    return figure


@styled
def energies(runs: Runs) -> Figure:
    figure, pair = _pair("Energies of a round of 100 workers", "energy, ½Σ(·)² (log scale)")
    for axes, spread in pair:
        run = runs[experiment(spread=spread)]
        for name, (label, colour) in _ENERGIES.items():
            axes.plot(run.rounds, run.column(name), color=colour, label=label)
        log_scale(axes)
    legend(figure, columns=2)
    return figure


@styled
def counts(runs: Runs, numbers: Sequence[int]) -> Figure:
    figure, pair = _pair("Training loss by the number of workers", "training loss (log scale)")
    for axes, spread in pair:
        for number, colour in zip(numbers, shades(len(numbers)), strict=True):
            run = runs[experiment(workers=number, spread=spread)]
            axes.plot(run.rounds, run.column("loss"), color=colour, label=f"{number} workers")
        log_scale(axes)
    legend(figure, columns=4)
    return figure


def _pair(title: str, y: str) -> tuple[Figure, list[tuple[Axes, float]]]:
    """A panel for lockstep and one for random times, each with its spread."""
    figure, places = panels(1, 2, title, sharey=True)
    for axes, name in zip(places, ("in lockstep", "at random times"), strict=True):
        axes.set(xlabel="rounds: commits of each worker", title=f"commits {name}")
    places[0].set_ylabel(y)
    return figure, list(zip(places, (LOCKSTEP, AT_RANDOM), strict=True))
