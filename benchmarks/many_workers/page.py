"""The page docs/results/many-workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.lib import page as markdown
from benchmarks.lib.style import save
from benchmarks.many_workers import figures, rivals
from benchmarks.many_workers import runs as made
from benchmarks.many_workers.check import checks_text
from benchmarks.many_workers.check import stored as stored_checks
from benchmarks.many_workers.stability import gamma_times, stable_below, uniform_times
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.plan import AT_RANDOM, LOCKSTEP


def draw(folder: Path) -> Path:
    """Writes README.md and its pictures, as far as the runs for them are there. Returns the page's path."""
    runs = made.stored(folder)
    held, tuned = rivals.stored(folder / "in-step.json"), rivals.stored(folder / "rivals.json")
    if all(made.experiment(spread=spread, against=against) in runs for spread in made.SPREADS for against in made.AGAINST):
        save(figures.order(runs), folder / "order.png")
        save(figures.energies(runs), folder / "energies.png")
    both = (LOCKSTEP, AT_RANDOM)
    counted = [n for n in made.COUNTS if all(made.experiment(workers=n, spread=spread) in runs for spread in both)]
    if len(counted) > 1:
        save(figures.counts(runs, counted), folder / "number.png")
    return markdown.filled(
        Path(__file__).with_name("page.txt"), folder / "README.md",
        orders=_order_table(runs), remedies=_remedies(runs), counts=_count_table(runs, counted), seeds=_seeds(runs),
        checks=checks_text(stored_checks(folder)), held=rivals.waiting_table(held, tuned), rivals=rivals.table(tuned),
        progress=rivals.progress(tuned),
        varied=f"{stable_below(uniform_times(made.REMEDIES['both'].batch_variation), made.experiment().momentum):.0f}",
    )  # fmt: skip


def _order_table(runs: made.Runs) -> str:
    rows = []
    for spread in made.SPREADS:
        limit = stable_below(gamma_times(spread), made.experiment().momentum)
        rows.append([f"{spread:g}", _number(limit), _cells(runs, made.experiment(spread=spread))])
    return markdown.table(["Spread", "Stable below", "Leap", "Accuracy, %"], rows)


def _remedies(runs: made.Runs) -> str:
    return "\n".join(f"- {name}: {_cells(runs, case).replace(' | ', ', ')} %" for name, case in made.REMEDIES.items())


def _count_table(runs: made.Runs, counts: Iterable[int]) -> str:
    rows = ([n, *(_cells(runs, made.experiment(workers=n, spread=spread)) for spread in (LOCKSTEP, AT_RANDOM))] for n in counts)
    return markdown.table(["Workers", "Leap in lockstep", "Accuracy, %", "Leap at random times", "Accuracy, %"], rows)


def _cells(runs: made.Runs, case: Experiment) -> str:
    """Leap and accuracy, means over the seeds that are there; dashes if there is none."""
    found = made.under_all_seeds(runs, case)
    if not found:
        return "– | –"
    return f"{made.mean_leap(runs, case):.2f} | {100 * np.mean([run.accuracy for run in found]):.2f}"


def _seeds(runs: made.Runs) -> str:
    """How many seeds the rows are the means of."""
    missing = [case for case in made.order_cases() if case not in runs]
    return f"{len(made.SEEDS)} seeds" if not missing else f"up to {len(made.SEEDS)} seeds; {len(missing)} runs are missing"


def _number(value: float) -> str:
    return "any" if math.isinf(value) else f"{value:.1f}"
