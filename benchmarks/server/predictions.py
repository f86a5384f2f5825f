"""Compares what `gem-ctl plan` says with synthetic workers on the real service: `python -m benchmarks.server.predictions`.

Machines differ, so the costs are fitted to three measurements first, for each size of the model: 4 and 64 workers that ask
for four times what the server can do, and one alone that never sleeps. All other numbers of workers and compute times are
predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import click
import numpy as np
from gem_ctl.planning.outcome import Outcome, outcome
from gem_ctl.planning.plan import Costs, Setup, plan, server_seconds
from gem_ctl.planning.scenario import Scenario

from benchmarks.lib import machine
from benchmarks.lib.measuring import measurement
from benchmarks.lib.page import row, table
from benchmarks.lib.processes import server
from benchmarks.lib.results import write_json
from benchmarks.server.synthetic import LEASE_SECONDS, Seen, Work, observe

TARGET = 0.15  # how far a prediction may be from what is measured
# The workers that fill the server in the calibration, and how much of it they ask for. A commit of a few costs it less than one
# of many, because the buffers of a few stay in the processor's cache.
FEW, MANY, FILLING_LOAD = 4, 64, 4.0
_HEADS = (
    "workers", "load", "compute ms", "commits/s", "simulated", "ratio", "plan", "τ mean", "simulated", "95 %", "simulated",
    "round trip ms", "simulated", "server CPU ms", "client CPU ms",
)  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """What a commit of one size costs on this machine, in seconds: the time of the server with FEW workers and with MANY, and
    the rest of the round trip of a worker alone."""

    few: float
    many: float
    transit: float

    def costs(self, workers: int) -> Costs:
        """The costs for `gem-ctl plan`: between FEW and MANY workers by the logarithm of their number."""
        server = float(np.interp(np.log(workers), np.log((FEW, MANY)), (self.few, self.many)))
        return Costs(by_reference=server, by_network=server, parameter=0.0, byte=0.0, conversion=0.0)


@dataclass(frozen=True)
class Compared:
    """A measurement beside its prediction. The simulation gets the compute time and the spread that the workers really had."""

    setup: Setup
    load: float
    measured: dict[str, float]
    planned: float
    simulated: Outcome

    @property
    def ratio(self) -> float:
        """Predicted commits per second, divided by those measured."""
        return self.simulated.commits_per_second / self.measured["rate"]


@measurement(
    parameters=(10_000, 156_450, 1_000_000), workers=(4, 30, 100, 300, 1000), seconds=10.0, repeats=3,
    out=Path("runs/predictions.json"),
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Five minutes: few workers, short measurements.")
def main(
    parameters: tuple[int, ...], workers: tuple[int, ...], seconds: float, repeats: int, quick: bool, out: Path
) -> None:  # fmt: skip
    """Measures synthetic workers, which sleep instead of computing, and prints beside it what the simulation predicts.

    A load of 2 asks for twice what the server can do. Kinds that would need more than half of the free memory are left out.
    """
    loads = (0.3, 2.0) if quick else (0.3, 0.9, 2.0)
    if quick:
        parameters, workers, seconds, repeats = (10_000, 156_450), (4, 100), 2.0, 1
    setups: list[dict[str, object]] = []
    found: list[Compared] = []
    for size in parameters:
        fit = _calibrate(size, seconds, repeats)
        click.echo(
            f"\nP = {size:,}: a commit takes the server {1e3 * fit.few:.3g} ms with {FEW} workers, {1e3 * fit.many:.3g} ms "
            f"with {MANY}, and {1e3 * fit.transit:.3g} ms more to go there and back"
        )
        click.echo(table(_HEADS, []))
        for setup, share in _kinds(size, workers, loads, fit):
            found.append(_compare(setup, share, fit, seconds, repeats))
            setups.append({"fit": asdict(fit), **asdict(found[-1])})
            click.echo(row(_cells(found[-1])))
            write_json(out, setups)
    within = sum(abs(each.ratio - 1) <= TARGET for each in found)
    click.echo(f"\nwithin {100 * TARGET:.0f} %: {within} of {len(found)}")


def _kinds(size: int, workers: tuple[int, ...], loads: tuple[float, ...], fit: Fit) -> Iterator[tuple[Setup, float]]:
    """Setups whose workers ask for these loads, without those that need too much memory or that can't ask for so much."""
    for count in workers:
        bare, costs = Setup(parameters=size, workers=count, compute_seconds=0.0), fit.costs(count)
        for load in loads if plan(bare, costs).server_bytes < machine.available_bytes() / 2 else ():
            compute = server_seconds(bare, costs) * (count / load - 1)
            if compute > 0:
                yield replace(bare, compute_seconds=compute), load


def _calibrate(parameters: int, seconds: float, repeats: int) -> Fit:
    """Fits the costs of a model of this size: to a full server, and to a worker alone."""
    few = 1 / _median_of(Work(parameters, FEW), seconds, repeats).rate
    compute = (MANY / FILLING_LOAD - 1) * few  # workers that sleep cost more than those that never do
    many = 1 / _median_of(Work(parameters, MANY, compute), seconds, repeats).rate
    alone = _median_of(Work(parameters, 1), seconds, repeats)
    return Fit(few, many, max(0.0, float(np.median(alone.round_trip)) - few))


def _compare(setup: Setup, load: float, fit: Fit, seconds: float, repeats: int) -> Compared:
    work = Work(setup.parameters, setup.workers, setup.compute_seconds)
    costs = fit.costs(setup.workers)
    cycle = max(setup.compute_seconds, setup.workers * server_seconds(setup, costs))
    seen = _median_of(work, max(seconds, 5 * cycle), repeats, warm_up=max(1.0, 3 * cycle))
    real = replace(setup, compute_seconds=float(seen.computed.mean()))
    scenario = Scenario(real, costs, spread=seen.spread, latency=fit.transit / 2)
    return Compared(real, load, seen.figures(), plan(real, costs).commits_per_second, outcome(scenario))


def _median_of(work: Work, seconds: float, repeats: int, warm_up: float = 1.0) -> Seen:
    """The measurement with the median rate; each has a fresh server."""
    seen = []
    for _ in range(repeats):
        with server("gem", None, lease_seconds=LEASE_SECONDS) as (address, pid):
            seen.append(observe(address, pid, work, warm_up, seconds))
    middle = median(each.rate for each in seen)
    return min(seen, key=lambda each: abs(each.rate - middle))


def _cells(of: Compared) -> list[str]:
    told, seen = of.simulated, of.measured
    numbers = (
        of.setup.workers, of.load, 1e3 * of.setup.compute_seconds, seen["rate"], told.commits_per_second, of.ratio, of.planned,
        seen["staleness_mean"], told.staleness.mean, seen["staleness_p95"], told.staleness.p95, 1e3 * seen["round_trip"],
        1e3 * told.round_trip, 1e3 * seen["server_cpu"], 1e3 * seen["workers_cpu"],
    )  # fmt: skip
    return [f"{number:.4g}" for number in numbers]


if __name__ == "__main__":
    main()
