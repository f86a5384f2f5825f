"""Quarantine: a worker whose gradients are rejected several times in a row is kept out until an operator lets it in."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from dataclasses import dataclass

from gem_api.errors import GemError, InvalidRequest, NonFiniteGradient, NormOutOfBounds, Quarantined

COUNTED = (NonFiniteGradient, NormOutOfBounds)  # the errors that mean that the gradient itself is bad
MAX_NAMES = 10_000  # names kept; a limit, so that invented names cannot fill the memory


@dataclass(frozen=True)
class Refusals:
    """A worker's rejected commits since its last accepted one: their number, and the error of the last."""

    count: int
    why: str


def lift_command(worker: str) -> str:
    """The command that lets a worker in again. Its name is quoted for the shell, because the worker chose it."""
    return f"gem-ctl quarantine lift {'-- ' if worker.startswith('-') else ''}{shlex.quote(worker)}"


class Quarantine:
    """Counts each worker's rejected commits in a row. It counts by name, so a new lease does not reset the count.

    Args:
        after: The number of rejected commits in a row that leads to quarantine; 0 for no quarantine.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._refusals: OrderedDict[str, Refusals] = OrderedDict()
        self._held: OrderedDict[str, Refusals] = OrderedDict()

    @property
    def held(self) -> dict[str, Refusals]:
        """The workers in quarantine, and why; the one that has been there longest comes first."""
        return dict(self._held)

    def accepted(self, worker: str) -> None:
        """Resets the worker's count: a commit of it was accepted."""
        self._refusals.pop(worker, None)

    def rejected(self, worker: str, error: GemError) -> bool:
        """Counts a rejected commit of the worker. Returns whether that puts it into quarantine."""
        if not self._after or not isinstance(error, COUNTED):
            return False
        before = self._refusals.pop(worker, None)
        refusals = Refusals(before.count + 1 if before else 1, f"{type(error).__name__}: {error}")
        _remember(self._held if refusals.count >= self._after else self._refusals, worker, refusals)
        return worker in self._held

    def require_free(self, worker: str) -> None:
        """Raises Quarantined for a worker in quarantine."""
        refusals = self._held.get(worker)
        if refusals is not None:
            raise Quarantined(
                f"worker {worker!r} is in quarantine after {refusals.count} rejected commits in a row, the last with "
                f"{refusals.why}; once that is fixed, `{lift_command(worker)}` lets it in again"
            )

    def lift(self, worker: str) -> None:
        """Lets a worker in again and resets its count. Raises InvalidRequest if it is not in quarantine."""
        if self._held.pop(worker, None) is None:
            raise InvalidRequest(f"no worker {worker!r} is in quarantine; `gem-ctl quarantine list` shows all that are")


def _remember(where: OrderedDict[str, Refusals], worker: str, refusals: Refusals) -> None:
    where[worker] = refusals
    if len(where) > MAX_NAMES:
        where.popitem(last=False)
