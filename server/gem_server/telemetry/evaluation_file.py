"""The file of a run's evaluations beside its history: what workers and evaluators have reported."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

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

    Attributes:
        known: The evaluations, in the order in which they came.
    """

    def __init__(self, history: Path, version: float | None) -> None:
        self._path = evaluations_beside(history)
        self.known = [] if version is None else _up_to(self._path, version)
        self._waiting = False
        if version is None:
            with suppress(OSError):  # there is none
                self._path.replace(self._path.with_name(self._path.name + ".old"))

    @property
    def last(self) -> Evaluation | None:
        """The newest evaluation; None if there is none."""
        return self.known[-1] if self.known else None

    def add(self, evaluation: Evaluation) -> None:
        """Adds an evaluation; `flush` writes it. One without a finite loss is left out."""
        if math.isfinite(evaluation.loss):
            self.known = [*self.known, evaluation][-_MOST:]
            self._waiting = True

    def flush(self) -> None:
        """Writes the file if there is a new evaluation. Raises OSError; a later call tries again."""
        if not self._waiting:
            return
        self._waiting = False
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.write_text(json.dumps([asdict(each) for each in self.known]) + "\n", encoding="utf-8")
            os.replace(new, self._path)
        except OSError:
            self._waiting = True
            raise


def _up_to(path: Path, version: float) -> list[Evaluation]:
    """The file's evaluations up to a version; none if it can't be read, or holds something else."""
    with suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        known = [
            Evaluation(int(row["version"]), float(row["loss"]), None if row["accuracy"] is None else float(row["accuracy"]))
            for row in json.loads(read_regular(path, MAX_BYTES))
        ]
        return [each for each in known if each.version <= version and math.isfinite(each.loss)]
    return []
