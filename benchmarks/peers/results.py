"""The measurements of a run, saved in throughput.json after each one, and the claims: ratios of rates, with targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.measuring import middle, ratio, spread, verdict
from benchmarks.lib.page import short, table
from benchmarks.lib.results import Store
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.contenders.base import Contender

SMALL, MIDDLE, LARGE = 156_450, 1_000_000, 25_000_000


@dataclass(frozen=True)
class Figures:
    """What is kept of a measurement; see `Load`."""

    rate: float
    server_cpu: float
    worker_cpu: float
    p50: float
    p99: float


@dataclass(frozen=True, order=True)
class Cell:
    """A model size and a number of workers. Contenders are compared within one cell."""

    parameters: int
    workers: int

    def __str__(self) -> str:
        return f"P = {self.parameters:,}, W = {self.workers}"


@dataclass(frozen=True)
class Measurement:
    """A repeat of a contender, by its name, in a cell."""

    parameters: int
    workers: int
    contender: str
    repeat: int

    @property
    def cell(self) -> Cell:
        return Cell(self.parameters, self.workers)


Results = Store[Measurement, Figures]


@dataclass(frozen=True)
class Row:
    """A contender, and its figures from each repeat."""

    contender: Contender
    figures: dict[int, Figures]

    @property
    def rate(self) -> float:
        """Median of the round trips per second."""
        return middle(self.figures.values(), "rate")

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest number of round trips per second."""
        rates = [each.rate for each in self.figures.values()]
        return min(rates), max(rates)

    def ratio_to(self, other: Row) -> tuple[float, float, float]:
        """Ratio of this rate to another's: median, lowest and highest over the repeats that both have."""
        both = [repeat for repeat in self.figures if repeat in other.figures]
        mine, theirs = ([of.figures[repeat] for repeat in both] for of in (self, other))
        return ratio(mine, theirs) if both else (math.nan,) * 3


def stored(path: Path, settings: Mapping[str, Any] | None = None) -> Results:
    """The measurements of a run, begun with these settings."""
    head = {"format": 1, "settings": settings or {}, "machine": machine.description()}
    names = [field.name for field in fields(Figures)]
    return Store(
        path, "measurement", Measurement, vars, lambda key, row: Figures(**{name: row[name] for name in names}), head
    )  # fmt: skip


def cells(results: Iterable[Measurement]) -> list[Cell]:
    """The cells that have measurements, small models first."""
    return sorted({each.cell for each in results})


def rows(results: Results, cell: Cell) -> dict[str, Row]:
    """The rows of a cell by contender's name, the fastest first."""
    found = {each.name: Row(each, {}) for each in CONTENDERS}
    for key, figures in results.items():
        if key.cell == cell:
            found[key.contender].figures[key.repeat] = figures
    return dict(sorted(((name, row) for name, row in found.items() if row.figures), key=lambda item: -item[1].rate))


Selection = Callable[[dict[str, Row]], Row | None]


def _peer(rule: str, transport: str | None = None) -> Selection:
    """The fastest peer with a rule, on one transport or on any."""

    def best(rows: dict[str, Row]) -> Row | None:
        peers = [row for row in rows.values() if (row.contender.kind, row.contender.rule) == ("peer", rule)]
        found = [row for row in peers if transport in (None, row.contender.transport)]
        return max(found, key=lambda row: row.rate, default=None)

    return best


def _row(name: str) -> Selection:
    return lambda rows: rows.get(name)


# The contender, what it is compared with, and by how many times it is to be as fast with each size that is claimed.
CLAIMS: tuple[tuple[str, Selection, dict[int, float]], ...] = (
    ("ours-shm", _peer("gem"), {SMALL: 4, MIDDLE: 5.5, LARGE: 7}),
    ("ours-shm", _peer("add"), {SMALL: 2, MIDDLE: 1.8, LARGE: 2.8}),
    ("ours-tcp", _peer("gem", "tcp"), {SMALL: 4, MIDDLE: 2.5, LARGE: 3}),
    ("ours-tcp", _row("tcp-echo"), {SMALL: 0.6, MIDDLE: 0.75, LARGE: 0.7}),
    ("ours-tls", _row("ours-tcp"), {MIDDLE: 0.7, LARGE: 0.7}),
    ("ours-tcp-bf16", _row("ours-tcp"), {MIDDLE: 1.5, LARGE: 1.6}),
)


def verdicts(results: Results) -> Iterable[str]:
    """A line for each claim and cell: the claim, its target, the measured ratio, and whether it meets the target."""
    for name, against, targets in CLAIMS:
        for cell in cells(results):
            measured = rows(results, cell)
            subject, other = measured.get(name), against(measured)
            if subject is not None and other is not None and cell.parameters in targets:
                what = f"{cell}: {subject.contender.label} : {other.contender.label}"
                yield verdict(what, targets[cell.parameters], subject.ratio_to(other))


def as_table(results: Results, cell: Cell) -> str:
    """The contenders of one cell, the fastest first."""
    measured = rows(results, cell)
    peer = _peer("gem")(measured)
    heads = [str(cell), "round trips/s", "lowest..highest", "of the best GEM", "server CPU ms", "worker's", "p50 ms", "p99 ms"]
    return table(heads, (
        [
            row.contender.label, short(row.rate), "..".join(map(short, row.spread)),
            spread(row.ratio_to(peer)) if peer else "–",
            *(short(1e3 * middle(row.figures.values(), figure)) for figure in ("server_cpu", "worker_cpu", "p50", "p99")),
        ]
        for row in measured.values()
    ))  # fmt: skip
