"""The drawings, by the figure's name: each a function of what was measured, and of the scale that it was measured at."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paper.figures import beyond, speed, workers
from benchmarks.paper.plan import Scale
from benchmarks.paper.statistics import Measured
from benchmarks.paper.style import Drawing

DRAWINGS: dict[str, Callable[[list[Measured], Scale], Drawing]] = {
    "1": workers.loss, "2": workers.many, "3": workers.pi, "4": speed.split_batch, "5": speed.against_sequential,
    "6": workers.misspecified, "8": workers.kappas, "9-10": workers.medians, "conventions": beyond.conventions,
    "straggler": beyond.straggler, "churn": beyond.churn, "proxies": beyond.proxies,
    "beyond": beyond.errors,
}  # fmt: skip
