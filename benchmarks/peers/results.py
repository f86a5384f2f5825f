"""The measurements of a run, saved in throughput.json after each one, and the claims: ratios of rates, with targets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.measuring import spread, verdict
from benchmarks.lib.page import short, table
from benchmarks.lib.results import write_json
from benchmarks.peers.contenders.base import Contender
from benchmarks.peers.harness import Figures

SMALL, MIDDLE, LARGE = 156_450, 1_000_000, 25_000_000
_DESCRIBED = ("label", "kind", "transport", "rule", "of")


@dataclass(frozen=True, order=True)
class Cell:
    """A model size and a number of workers. Contenders are compared within one cell."""

    parameters: int
    workers: int

    def __str__(self) -> str:
        return f"P = {self.parameters:,}, W = {self.workers}"


@dataclass(frozen=True)
class Row:
    """A contender's description, and its figures from each repeat."""

    label: str
    kind: str
    transport: str
    rule: str
    of: str
    figures: dict[int, Figures]

    @property
    def rate(self) -> float:
        """Median of the round trips per second."""
        return self.median("rate")

    def median(self, figure: str) -> float:
        return float(median(getattr(each, figure) for each in self.figures.values()))

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest number of round trips per second."""
        rates = [each.rate for each in self.figures.values()]
        return min(rates), max(rates)

    def ratio_to(self, other: Row) -> tuple[float, float, float]:
        """Ratio of this rate to another's: median, lowest and highest over the repeats that both have."""
        ratios = [each.rate / other.figures[repeat].rate for repeat, each in self.figures.items() if repeat in other.figures]
        return (median(ratios), min(ratios), max(ratios)) if ratios else (float("nan"),) * 3


@dataclass
class Results:
    """All measurements of a run, and what was left out and why."""

    path: Path
    settings: dict[str, Any]
    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: dict[tuple[Cell, str], dict[int, Figures]] = field(default_factory=dict)
    left_out: dict[tuple[Cell, str], str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads an earlier run's measurements. Contenders that it left out are tried again."""
        content = json.loads(path.read_text())
        results = cls(path, content["settings"], content["contenders"])
        for entry in content["measurements"]:
            figures = Figures(**{name: entry[name] for name in Figures.__dataclass_fields__})
            results.add(Cell(entry["parameters"], entry["workers"]), entry["contender"], entry["repeat"], figures)
        return results

    def describe(self, contenders: Iterable[Contender]) -> None:
        for each in contenders:
            self.contenders[each.name] = {name: getattr(each, name) for name in _DESCRIBED}

    def add(self, cell: Cell, contender: str, repeat: int, figures: Figures) -> None:
        self.measurements.setdefault((cell, contender), {})[repeat] = figures

    def cells(self) -> list[Cell]:
        """The cells that have measurements, small models first."""
        return sorted({cell for cell, _ in self.measurements})

    def rows(self, cell: Cell) -> dict[str, Row]:
        """The rows of a cell by contender's name, the fastest first."""
        described = {name: {each: self.contenders[name][each] for each in _DESCRIBED} for _, name in self.measurements}
        rows = {name: Row(**described[name], figures=of) for (where, name), of in self.measurements.items() if where == cell}
        return dict(sorted(rows.items(), key=lambda item: -item[1].rate))

    def save(self) -> None:
        """Rewrites the file, so that an interrupted run keeps its measurements."""
        content = {
            "settings": self.settings,
            "machine": machine.description(),
            "contenders": self.contenders,
            "measurements": [
                {**asdict(cell), "contender": name, "repeat": repeat, **asdict(each)}
                for (cell, name), figures in self.measurements.items()
                for repeat, each in sorted(figures.items())
            ],
            "left_out": [{**asdict(cell), "contender": name, "why": why} for (cell, name), why in self.left_out.items()],
        }
        write_json(self.path, content)


Selection = Callable[[dict[str, Row]], Row | None]


def _peer(rule: str, transport: str | None = None) -> Selection:
    """The fastest peer with a rule, on one transport or on any."""

    def best(rows: dict[str, Row]) -> Row | None:
        found = [row for row in rows.values() if (row.kind, row.rule) == ("peer", rule) and transport in (None, row.transport)]
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
        for cell in results.cells():
            rows = results.rows(cell)
            subject, other = rows.get(name), against(rows)
            if subject is not None and other is not None and cell.parameters in targets:
                yield verdict(f"{cell}: {subject.label} : {other.label}", targets[cell.parameters], subject.ratio_to(other))


def as_table(results: Results, cell: Cell) -> str:
    """The contenders of one cell, the fastest first."""
    rows = results.rows(cell)
    peer = _peer("gem")(rows)
    heads = [str(cell), "round trips/s", "lowest..highest", "of the best GEM", "server CPU ms", "worker's", "p50 ms", "p99 ms"]
    return table(heads, (
        [
            row.label, short(row.rate), "..".join(map(short, row.spread)), spread(row.ratio_to(peer)) if peer else "–",
            *(short(1e3 * row.median(figure)) for figure in ("server_cpu", "worker_cpu", "p50", "p99")),
        ]
        for row in rows.values()
    ))  # fmt: skip
