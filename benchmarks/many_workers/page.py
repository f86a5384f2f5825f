"""The page docs/results/many-workers and its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib import page as markdown
from benchmarks.many_workers import rivals
from benchmarks.many_workers.check import Comparison, checks_table
from benchmarks.many_workers.runs import AGAINST, COUNTS, REMEDIES, SEEDS, SPREADS, Run, experiment, order_cases
from benchmarks.many_workers.stability import gamma_times, stable_below, uniform_times
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import AT_RANDOM, LOCKSTEP

Runs = Mapping[Experiment, Run]
_LEAST_LEAP = 0.01  # below this a leap is noise, and is drawn at it on the logarithmic axis
_ENERGIES = {
    "moved": "what all commits of a round moved θ",
    "largest_moment": "the largest |m| of all workers",
    "proxy": "one worker's m",
    "mean_moment": "the mean m of all workers",
}


def write_page(runs: Runs, checks: list[Comparison], tuned: rivals.Outcomes, folder: Path) -> Path:
    """Writes README.md and its pictures, as far as the runs for them are there. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.switch_backend("Agg")
    if all(experiment(spread=spread, against=against) in runs for spread in SPREADS for against in AGAINST):
        _draw_order(runs, folder / "order.png")
        _draw_energies(runs, folder / "energies.png")
    counted = [
        count for count in COUNTS if all(experiment(workers=count, spread=spread) in runs for spread in (LOCKSTEP, AT_RANDOM))
    ]
    if len(counted) > 1:
        _draw_counts(runs, counted, folder / "number.png")
    body = (Path(__file__).parent / "page.txt").read_text(encoding="utf-8")
    tables = {
        "orders": _order_table(runs),
        "remedies": _remedy_table(runs),
        "counts": _count_table(runs, counted),
        "checks": checks_table(checks),
        "rivals": rivals.table(tuned),
        "progress": rivals.progress(tuned),
        "seeds": _seeds(runs),
        "varied": f"{stable_below(uniform_times(REMEDIES['both'].batch_variation), experiment().momentum):.0f}",
    }
    (folder / "README.md").write_text(body.format(**tables), encoding="utf-8")
    return folder / "README.md"


def _made(runs: Runs, case: Experiment) -> list[Run]:
    """The runs of a case under every seed, as far as they are there."""
    return [runs[one] for seed in SEEDS if (one := replace(case, seed=seed)) in runs]


def _leap(runs: Runs, case: Experiment) -> float:
    return float(np.mean([run.leap for run in _made(runs, case)]))


def _draw_order(runs: Runs, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for spread, colour in zip(SPREADS, colormaps["viridis"](np.linspace(0, 0.9, len(SPREADS))), strict=True):
        run = runs[experiment(spread=spread)]
        left.plot(run.rounds, run.column("loss"), color=colour, label=f"{spread:g}")
    left.set(xlabel="rounds: commits of each worker", ylabel="training loss", ylim=(0, 4))
    left.legend(title="spread of compute times", fontsize=8)
    for against, colour in zip(AGAINST, ("#b03030", "#1f77b4"), strict=True):
        leaps = [max(_LEAST_LEAP, _leap(runs, experiment(spread=spread, against=against))) for spread in SPREADS]
        right.plot(SPREADS, leaps, "o-", color=colour, label="the paper's rule" if against == 1 else f"against = {against:g}")
    right.set(xlabel="spread of compute times", ylabel="leap of the training loss", yscale="log")
    right.legend(loc="upper right", fontsize=8)
    limit = right.twinx()
    grid = np.linspace(0.02, 0.7, 35)
    limit.plot(grid, [stable_below(gamma_times(float(each)), 0.9) for each in grid], "--", color="#444444")
    limit.set(ylabel="the model: stable below this c·η·h (dashed)", yscale="log", ylim=(1, 300))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    _save(figure, path)


def _draw_energies(runs: Runs, path: Path) -> None:
    figure, panels = _pair("100 workers commit", yscale="log")
    for axes, spread in panels:
        run = runs[experiment(spread=spread)]
        for name, label in _ENERGIES.items():
            axes.plot(run.rounds, run.column(name), label=label)
    panels[0][0].set_ylabel("energy, ½Σ(·)²")
    panels[0][0].legend(fontsize=8)
    _save(figure, path)


def _draw_counts(runs: Runs, counts: Iterable[int], path: Path) -> None:
    figure, panels = _pair("commits", ylim=(0, 4))
    for axes, spread in panels:
        for count in counts:
            run = runs[experiment(workers=count, spread=spread)]
            axes.plot(run.rounds, run.column("loss"), label=f"{count} workers")
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("training loss")
    _save(figure, path)


def _pair(title: str, **settings: Any) -> tuple[Figure, list[tuple[Axes, float]]]:
    """A panel for lockstep and one for random times, each with its spread."""
    figure, grid = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, constrained_layout=True)
    for axes, order in zip(grid, ("in lockstep", "at random times"), strict=True):
        axes.set(xlabel="rounds", title=f"{title} {order}", **settings)
        axes.grid(alpha=0.3)
    return figure, list(zip(grid, (LOCKSTEP, AT_RANDOM), strict=True))


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _order_table(runs: Runs) -> str:
    heads = ["Spread", "The model: stable below c·η·h =", "Leap", "Accuracy", "Leap, `against=0.5`", "Accuracy"]
    rows = []
    for spread in SPREADS:
        limit = stable_below(gamma_times(spread), experiment().momentum)
        cells = [_cells(runs, experiment(spread=spread, against=against)) for against in AGAINST]
        rows.append([f"{spread:g}", _number(limit), *cells])
    return markdown.table(heads, rows)


def _remedy_table(runs: Runs) -> str:
    rows = ([name, _cells(runs, case)] for name, case in REMEDIES.items())
    return markdown.table(["In lockstep, 100 workers", "Leap", "Accuracy"], rows)


def _count_table(runs: Runs, counts: Iterable[int]) -> str:
    rows = ([n, *(_cells(runs, experiment(workers=n, spread=spread)) for spread in (LOCKSTEP, AT_RANDOM))] for n in counts)
    return markdown.table(["Workers", "Leap in lockstep", "Accuracy", "Leap at random times", "Accuracy"], rows)


def _cells(runs: Runs, case: Experiment) -> str:
    """Leap and accuracy, means over the seeds that are there; dashes if there is none."""
    made = _made(runs, case)
    if not made:
        return "– | –"
    return f"{_leap(runs, case):.2f} | {100 * np.mean([run.accuracy for run in made]):.2f} %"


def _seeds(runs: Runs) -> str:
    """How many seeds the rows are the means of."""
    missing = [case for case in order_cases() if case not in runs]
    return f"{len(SEEDS)} seeds" if not missing else f"up to {len(SEEDS)} seeds; {len(missing)} runs are missing"


def _number(value: float) -> str:
    return "any" if math.isinf(value) else f"{value:.1f}"
