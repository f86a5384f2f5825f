"""The measurements of a run, saved in throughput.json after each one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.results import write_json
from benchmarks.peers.contenders.base import Contender
from benchmarks.peers.harness import Figures


@dataclass(frozen=True, order=True)
class Cell:
    """A model size and a number of workers. Contenders are compared within one cell."""

    parameters: int
    workers: int


@dataclass(frozen=True)
class Row:
    """A contender's description, and its figures from each repeat."""

    name: str
    label: str
    kind: str
    transport: str
    rule: str
    floor: str | None
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
            cell = Cell(entry.pop("parameters"), entry.pop("workers"))
            results.add(cell, entry.pop("contender"), entry.pop("repeat"), Figures(**entry))
        return results

    def describe(self, contenders: Iterable[Contender]) -> None:
        for each in contenders:
            fields = ("label", "kind", "transport", "rule", "floor", "of")
            self.contenders[each.name] = {name: getattr(each, name) for name in fields}

    def add(self, cell: Cell, contender: str, repeat: int, figures: Figures) -> None:
        self.measurements.setdefault((cell, contender), {})[repeat] = figures

    def cells(self) -> list[Cell]:
        """The cells that have measurements, small models first."""
        return [cell for cell, _ in groupby(sorted(cell for cell, _ in self.measurements))]

    def rows(self, cell: Cell) -> dict[str, Row]:
        """The rows of a cell by contender's name, the fastest first."""
        rows = [
            Row(name, **self.contenders[name], figures=figures)
            for (of, name), figures in self.measurements.items()
            if of == cell
        ]
        return {row.name: row for row in sorted(rows, key=lambda row: -row.rate)}

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


def best(rows: Iterable[Row], kind: str, rule: str, transport: str | None = None) -> Row | None:
    """The fastest of a kind with a rule, on one transport or on any."""
    found = [row for row in rows if (row.kind, row.rule) == (kind, rule) and transport in (None, row.transport)]
    return max(found, key=lambda row: row.rate, default=None)
