"""Batches in proportion to speed: which share of a whole batch each worker's next gradient should have."""

from __future__ import annotations

from dataclasses import dataclass

from gem_server.core.timetable import TOLERANCE, Timetable

# Fine enough that workers stay in step, and no more values, so that compiled models and CUDA graphs see few sizes.
SHARES = tuple(sixteenths / 16 for sixteenths in range(1, 17))
LARGER = 2  # times its share: what a worker tries now and then


@dataclass(frozen=True)
class Shares:
    """Chooses shares so that all workers' steps take about as long as the fastest one's with a whole batch.

    With T the seconds of a whole batch, a worker should have the share T_fastest/T. Its share stays as it is until that is far
    from it, or the end of a shard has cut it, and is then the nearest of `SHARES`. It is 1 before the worker's pace is known.
    Now and then a worker tries twice its share, and keeps it if that step takes no longer than the fastest one's, or hardly
    longer than its own: part of a step's time may be fixed costs.

    Attributes:
        timetable: How long each worker's steps take.
        smallest: The smallest share; 1: all batches are whole.
    """

    timetable: Timetable
    smallest: float = 1.0

    def next(self, lease_id: str) -> float:
        """The share of a whole batch that a worker's next gradient should have."""
        if self.smallest >= 1:
            return 1.0
        now, pace, fastest = self.timetable.share(lease_id), self.timetable.pace(lease_id), self.timetable.fastest
        if pace is None or fastest is None:
            return now
        wanted = max(self.smallest, self.timetable.least_share(lease_id), fastest / pace)
        if now in SHARES and now / TOLERANCE <= wanted <= now * TOLERANCE:
            return now
        return min((each for each in SHARES if each >= self.smallest), key=lambda each: max(each / wanted, wanted / each))

    def begin(self, lease_id: str, now: float) -> None:
        """A worker begins to compute its next gradient, on its share of a batch."""
        share = self.next(lease_id)
        trial = share < 1 and self.timetable.may_try(lease_id)
        self.timetable.began(lease_id, now, min(1.0, LARGER * share) if trial else share, trial)

    def weight(self, share: float) -> float:
        """ω, what a commit with this share counts: from the smallest share to 1. 0, from a worker that names none, means 1."""
        return min(1.0, max(self.smallest, share or 1.0)) if self.smallest < 1 else 1.0
