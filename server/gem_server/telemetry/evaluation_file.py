"""The file of a run's evaluations beside its history, for the report: as many as workers and evaluators have reported."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gem_api.history import evaluations_beside
from gem_api.process.regular_file import MAX_BYTES, read_regular

from gem_server.telemetry.progress import Evaluation

_MOST = 10_000  # evaluations that are kept: the newest


class EvaluationFile:
    """Writes evaluations as a JSON array of objects with `version`, `loss` and `accuracy` (0 to 1, or null).

    Args:
        history: The history's file, which names this one.
        version: The newest version of a resumed run; later evaluations in the file are of commits that a crash has taken. None
            for a new run, which renames an earlier run's file to FILE.old.
    """

    def __init__(self, history: Path, version: float | None) -> None:
        self._path = evaluations_beside(history)
        self._rows = [] if version is None else _rows_up_to(self._path, version)
        self._waiting = False
        if version is None:
            with suppress(OSError):  # there is none
                self._path.replace(self._path.with_name(self._path.name + ".old"))

    def add(self, evaluation: Evaluation) -> None:
        """Adds an evaluation; `flush` writes it. One without a finite loss is left out."""
        if math.isfinite(evaluation.loss):
            self._rows = [*self._rows, asdict(evaluation)][-_MOST:]
            self._waiting = True

    def flush(self) -> None:
        """Writes the file if there is a new evaluation. Raises OSError; a later call tries again."""
        if not self._waiting:
            return
        self._waiting = False
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_text(json.dumps(self._rows) + "\n", encoding="utf-8")
            os.replace(new, self._path)
        except OSError:
            self._waiting = True
            raise


def _rows_up_to(path: Path, version: float) -> list[dict[str, Any]]:
    """The file's evaluations up to a version; none if it can't be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return [row for row in json.loads(read_regular(path, MAX_BYTES)) if row["version"] <= version]
    return []
