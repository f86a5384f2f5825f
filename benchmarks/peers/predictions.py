"""Compares the predictions of `gem-ctl plan` with measurements: the rate at which the server is saturated, and its memory for
each worker."""

from __future__ import annotations

from collections.abc import Iterator

from gem_ctl.planning.plan import Setup, plan

from benchmarks.peers.contenders.ours import OURS, Ours
from benchmarks.peers.results import Cell, Results


def predictions(results: Results) -> Iterator[str]:
    """A line for each of this server's rows. The workers compute nothing, so the server is saturated."""
    ours = {each.name: each for each in OURS if each.transport != "tls"}  # the plan knows plain TCP alone
    yield f"{'':56s} {'trips/s':>9s} {'predicted':>9s} {'ratio':>6s} {'MiB a worker':>13s} {'predicted':>9s}"
    for cell in results.cells():
        for name, row in results.rows(cell).items():
            if name in ours:
                planned = plan(setup(ours[name], cell))
                yield (
                    f"P = {cell.parameters:>10,}, W = {cell.workers:2d}: {row.label:34s} {row.rate:9.1f} "
                    f"{planned.commits_per_second:9.1f} {planned.commits_per_second / row.rate:6.2f} "
                    f"{row.median('bytes_per_worker') / 2**20:13.1f} {planned.worker_bytes / 2**20:9.1f}"
                )


def setup(ours: Ours, cell: Cell) -> Setup:
    return Setup(
        parameters=cell.parameters,
        workers=cell.workers,
        compute_seconds=0.0,
        rule=ours.rule,
        shared_memory=ours.transport == "shm",
        gradient_dtype=ours.gradient_dtype,
        theta_dtype=ours.theta_dtype,
    )
