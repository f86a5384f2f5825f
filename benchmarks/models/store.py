"""The results of all runs in one JSON file, a line for each, and the conditions that they were measured under."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.models.runs import Outcome, Run

FORMAT = 1
_PACKAGES = ("torch", "numpy", "numba", "grpcio")


class StoreError(Exception):
    """The file can't be used; the message says what to do."""


class Store:
    """Results by run. `add` saves at once, so that an interruption loses only the run in progress.

    Args:
        path: The file; it need not exist.

    Raises:
        StoreError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.conditions: dict[str, Any] = {}
        self._outcomes: dict[Run, Outcome] = {}
        if path.exists():
            try:
                self._load(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{path} can't be read ({error!r}): restore it, or give another --out") from error

    def __len__(self) -> int:
        return len(self._outcomes)

    def result(self, run: Run) -> Outcome | None:
        return self._outcomes.get(run)

    def add(self, run: Run, outcome: Outcome) -> None:
        self._outcomes[run] = outcome
        self.conditions = self.conditions or here()
        self.save()

    def save(self) -> None:
        """Writes the file atomically."""
        lines = (json.dumps({"run": run.to_json(), **asdict(outcome)}) for run, outcome in self._outcomes.items())
        rows = ",\n".join(lines)
        text = f'{{"format": {FORMAT},\n"conditions": {json.dumps(self.conditions)},\n"runs": [\n{rows}\n]}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path)

    def require_same_text(self) -> None:
        """Raises StoreError if this Python's library, which the runs train on, is another text than that of the results."""
        theirs = self.conditions.get("python", platform.python_version())
        if theirs != platform.python_version():
            raise StoreError(
                f"the results in {self.path} are on the standard library of Python {theirs}, and this is "
                f"{platform.python_version()}: continue with that version, or give another --out"
            )

    def _load(self, body: dict[str, Any]) -> None:
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}, not {FORMAT}")
        self.conditions = body["conditions"]
        for row in body["runs"]:
            run = Run(**row.pop("run"))
            self._outcomes[run] = Outcome(**row)


def here() -> dict[str, Any]:
    """The conditions of runs on this machine: processor, cores, memory, system, Python and libraries."""
    return {**machine.description(), **{name: metadata.version(name) for name in _PACKAGES}}
