"""What an exchange costs, kept in a file of its own beside the runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.results import Store
from benchmarks.versus.plan import Case


def stored(out: Path) -> Store[Case, float]:
    """The milliseconds of an exchange by contender, model and number of workers. Raises DamagedError."""
    path = out / "overhead.json"
    return Store(path, "case", Case, lambda value: {"ms": round(value, 3)}, lambda case, row: float(row["ms"]))
