"""Replies that wait for commits that are expected, so that the workers of a round compute on one θ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gem_server.core.timetable import Timetable


@dataclass
class Rendezvous:
    """Says which replies are held, and when they are released.

    A reply waits while another worker's commit is expected: in less than `wait` times what the waiting worker's own step takes,
    or since less than that. All that wait are released as soon as no commit is expected, and each after that time at the
    latest. So nobody waits for a worker that is slow, late or gone.

    Attributes:
        timetable: When commits are expected.
        wait: How long a reply may wait, as a share of its worker's step; 0: no reply waits.
        most: Seconds that a reply may wait at the most.
    """

    timetable: Timetable
    wait: float = 0.0
    most: float = math.inf
    _held: dict[str, tuple[float, float]] = field(default_factory=dict)  # lease: since when, and for how long at most

    def hold(self, lease_id: str, now: float) -> bool:
        """Whether the reply to a commit that has just been applied is held. Ask `due` afterwards."""
        step = self.timetable.step(lease_id)
        most = min(self.wait * step, self.most) if step is not None else 0.0
        if self._nearest(now) >= most:
            return False
        self._held[lease_id] = now, most
        return True

    def due(self, now: float) -> list[str]:
        """The leases whose replies are released now; they are held no longer."""
        if not self._held:
            return []
        nearest = self._nearest(now)
        waiting = {lease_id for lease_id, (since, most) in self._held.items() if now < since + most}
        if not any(nearest < self._held[lease_id][1] for lease_id in waiting):
            waiting = set()
        over = [lease_id for lease_id in self._held if lease_id not in waiting]
        for lease_id in over:
            del self._held[lease_id]
        return over

    def next_look(self, now: float) -> float | None:
        """The time at which to ask `due` again, if no commit arrives before; None if no reply is held."""
        if not self._held:
            return None
        longest = max(most for _, most in self._held.values())
        given_up = (at + longest for at in self.timetable.expected())
        return min([*(since + most for since, most in self._held.values()), *(at for at in given_up if at > now)])

    def end(self, lease_id: str) -> bool:
        """A lease has ended, or asks again: its reply is held no longer. Returns whether it was."""
        return self._held.pop(lease_id, None) is not None

    def _nearest(self, now: float) -> float:
        """Seconds from now to the expected commit that is nearest, before or after; infinite if none is expected."""
        return min((abs(at - now) for at in self.timetable.expected()), default=math.inf)
