"""The durations of each worker's steps, and so when its next commit is expected, by the server's clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gem_server.core.fixed_costs import SERIES, FixedCosts
from gem_server.core.moving_mean import moved

TOLERANCE = 1.25  # what differs by no more than this factor is about as long
PATIENCE = 8, 256  # steps between two in which a worker tries a larger batch: at first; at most, if that fails


@dataclass(slots=True)
class _Steps:
    """A worker's steps, as far as they are known.

    Attributes:
        began: When its step began: it got a reply, or θ. None while the server holds its reply, or after a restart.
        share: The share of a batch of that step.
        pace: The moving mean of the seconds that a whole batch takes it; None before its second commit.
        first: Whether the step is its first: it may load data and compile, and does not count.
        trial: Whether the step tries a larger share than its pace allows.
        since_trial, patience: Steps since the last one, and how many come between two.
        costs: What of its steps does not depend on the share.
    """

    began: float | None = None
    share: float = 1.0
    pace: float | None = None
    first: bool = True
    trial: bool = False
    since_trial: int = 0
    patience: int = PATIENCE[0]
    costs: FixedCosts = field(default_factory=FixedCosts)


@dataclass
class Timetable:
    """The times at which each worker's next commit is expected.

    A step lasts from a reply until the commit is whole on the server, so that what the network and a batch's fixed costs take
    is a part of it. A restart forgets all of it.

    Args:
        tries: Whether a worker with a small share tries a larger one now and then.
    """

    tries: bool = True
    _steps: dict[str, _Steps] = field(default_factory=dict)
    _fastest: float | None = None  # the lowest pace; None: it may have changed since the last look

    def began(self, lease_id: str, now: float, share: float, trial: bool = False) -> None:
        """A worker got what it computes its next gradient on, with this share of a batch. `trial`: as `may_try` allowed."""
        steps = self._steps.get(lease_id) or self._new(lease_id)
        steps.began, steps.share, steps.trial = now, share, trial

    def arrived(self, lease_id: str, now: float, share: float) -> None:
        """A commit of this share of a batch has arrived whole: its worker computes no more."""
        steps = self._steps.get(lease_id) or self._new(lease_id)
        began, trial, asked = steps.began, steps.trial, steps.share
        steps.began, steps.trial, steps.share = None, False, share
        if began is None or now <= began:
            return
        if steps.first:
            steps.first = False
            return
        if trial:
            self._tried(steps, now - began, enough=share >= asked / TOLERANCE)
            return
        steps.since_trial += 1
        if share == asked and steps.costs.usual(share, now - began):
            steps.since_trial, steps.patience = 0, PATIENCE[0]
        took, pace = (now - began) / share, steps.pace
        steps.pace = took if pace is None else moved(pace, took)
        if self._fastest is not None and (pace == self._fastest or steps.pace < self._fastest):
            self._fastest = None

    def _tried(self, steps: _Steps, took: float, enough: bool) -> None:
        """A step has tried a larger share, or less at the end of a shard. If it was no longer than a step should be, or several
        in a row hardly longer than with the worker's own share, the worker's pace is that of this step, but not below the
        fastest one's: by one step that random times made short, all others would be slow."""
        fastest, steps.since_trial = self.fastest, 0
        in_step = enough and fastest is not None and took <= TOLERANCE * fastest
        passed = steps.costs.tried(steps.share, took) if enough and not in_step else 0
        if fastest is not None and (in_step or passed == SERIES):
            steps.pace, self._fastest, steps.patience = max(fastest, took / steps.share), None, PATIENCE[0]
        elif not passed:
            steps.patience = min(2 * steps.patience, PATIENCE[1])
        if passed and (passed < SERIES or steps.share < 1):  # the next step tries that share, too, or an even larger one
            steps.since_trial = steps.patience

    def may_try(self, lease_id: str) -> bool:
        """Whether a worker with a small share should try a larger one in its next step. Its pace is that of a whole batch only
        if its steps have no fixed costs: a worker that was slow for a moment would otherwise keep a small share for ever."""
        steps = self._steps.get(lease_id)
        return self.tries and steps is not None and steps.since_trial >= steps.patience

    def pace(self, lease_id: str) -> float | None:
        """The seconds that a whole batch takes a worker; None if that is not known yet."""
        steps = self._steps.get(lease_id)
        return steps.pace if steps is not None else None

    def least_share(self, lease_id: str) -> float:
        """The share below which a worker's steps hardly get shorter; 0 if none is known."""
        steps = self._steps.get(lease_id)
        return steps.costs.least if steps is not None else 0.0

    def share(self, lease_id: str) -> float:
        """The share of a batch of a worker's last step; 1 if it has made none."""
        steps = self._steps.get(lease_id)
        return steps.share if steps is not None else 1.0

    def step(self, lease_id: str) -> float | None:
        """The seconds that a worker's step takes with its share; None if that is not known yet."""
        steps = self._steps.get(lease_id)
        return steps.pace * steps.share if steps is not None and steps.pace is not None else None

    @property
    def fastest(self) -> float | None:
        """The lowest pace of all; None if none is known. All workers are looked at only if it may have changed."""
        if self._fastest is None:
            self._fastest = min((steps.pace for steps in self._steps.values() if steps.pace is not None), default=None)
        return self._fastest

    def expected(self) -> Iterator[float]:
        """The times at which the commits of the workers that compute now are expected."""
        for steps in self._steps.values():
            if steps.began is not None and steps.pace is not None:
                yield steps.began + steps.pace * steps.share

    def suspended(self, seconds: float, now: float) -> None:
        """The server itself stood still for so long, which is nobody's time."""
        for steps in self._steps.values():
            if steps.began is not None:
                steps.began = min(steps.began + seconds, now)

    def resumed(self, lease_id: str, share: float) -> None:
        """A worker repeats a commit. If that is from before a restart, the worker goes on with that share."""
        self._steps.setdefault(lease_id, _Steps(share=share))

    def interrupted(self, lease_id: str) -> None:
        """A worker's step does not count, as the server stood still meanwhile."""
        if lease_id in self._steps:
            self._steps[lease_id].began = None

    def end(self, lease_id: str) -> None:
        """A lease has ended."""
        if (steps := self._steps.pop(lease_id, None)) is not None and steps.pace == self._fastest:
            self._fastest = None

    def restart(self) -> None:
        """Forgets everything: what a log tells has no times."""
        self._steps.clear()
        self._fastest = None

    def _new(self, lease_id: str) -> _Steps:
        steps = self._steps[lease_id] = _Steps()
        return steps
