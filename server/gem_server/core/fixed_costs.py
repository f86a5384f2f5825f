"""What of a worker's step a smaller batch does not shorten, and so how small its batches should be at least."""

from __future__ import annotations

from dataclasses import dataclass

from gem_server.core.moving_mean import MEMORY, moved

SERIES = 8  # steps in a row with the larger share that have to take little longer: at random times few do
MOST = 0.4  # of the time that a larger share would take longer if all of a step were proportional to it
LEAST = 1 / 16  # of all shares
FORGET = 64  # steps after which half of that share is tried again: what takes the time may have changed


@dataclass(slots=True)
class FixedCosts:
    """Finds the share of a batch below which a worker's steps hardly get shorter.

    A step of a share w takes a + b·w seconds. If a is most of it, a smaller batch costs samples and hardly brings the worker
    nearer to others: it waits for data, for a slow link, or for itself. Steps that try a larger share show it.

    Attributes:
        least: That share; 0 as long as none is known.
    """

    least: float = 0.0
    _age: int = 0  # steps since `least` was found
    _share: float = 1.0  # the worker's own, of its last steps
    _count: int = 0  # of those steps
    _mean: float = 0.0  # of their seconds
    _passed: int = 0  # steps in a row that took little longer with a larger share
    _tries: float = 0.0  # the sum of their seconds

    def usual(self, share: float, seconds: float) -> bool:
        """A step with the worker's own share has ended. Returns whether the worker should soon try a larger one again."""
        if share != self._share:
            self._share, self._count = share, 0
        self._count, self._passed = self._count + 1, 0
        self._mean = seconds if self._count == 1 else moved(self._mean, seconds, max(MEMORY, 1 / self._count))
        self._age += 1
        forget = self._age >= FORGET and self.least > 0
        if forget:
            self._age, self.least = 0, self.least / 2 if self.least > LEAST else 0.0
        return forget

    def tried(self, share: float, seconds: float) -> int:
        """A step with a larger share has ended. Returns how many in a row took little longer; with `SERIES` it is `least`."""
        little = self._mean * (1 + MOST * (share / self._share - 1))
        if seconds >= little:
            self._passed = 0
            return 0
        self._passed += 1
        self._tries = self._tries * (self._passed > 1) + seconds
        if self._passed < SERIES:
            return self._passed
        self.least, self._age = share, 0
        self._share, self._count, self._mean, self._passed = share, SERIES, self._tries / SERIES, 0
        return SERIES
