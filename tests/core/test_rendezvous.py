"""Which replies wait for whom, and for how long: single cases, and runs with workers that are slow, late, gone and unknown."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from gem_server.core.rendezvous import Rendezvous
from gem_server.core.timetable import Timetable
from hypothesis import example, given, settings
from hypothesis import strategies as st

WAIT, MOST = 0.15, 1.0
LEAST = 0.2  # seconds that a reply waits at the most, in runs in which some steps are long enough for that
EPSILON = 1e-9


def known(timetable: Timetable, worker: str, step: float, now: float) -> None:
    """A worker whose steps take that long, and who computes since `now`."""
    timetable.began(worker, now - 2 * step - 2, 1.0)
    timetable.arrived(worker, now - step - 1, 1.0)  # the first step does not count
    timetable.began(worker, now - step, 1.0)
    timetable.arrived(worker, now, 1.0)
    timetable.began(worker, now, 1.0)


def pair(step: float = 1.0, partner: float = 1.1, now: float = 10.0) -> Rendezvous:
    """Two workers that compute: ann's commit is expected at `now + step`, ben's at `now + partner`."""
    timetable = Timetable()
    known(timetable, "ann", step, now)
    known(timetable, "ben", partner, now)
    return Rendezvous(timetable, WAIT, MOST)


def commits(rendezvous: Rendezvous, worker: str, now: float) -> bool:
    """A worker's commit. Returns whether its reply is held."""
    rendezvous.timetable.arrived(worker, now, 1.0)
    return rendezvous.hold(worker, now)


def test_a_reply_waits_for_a_commit_that_is_expected_soon_and_is_released_with_it() -> None:
    rendezvous = pair()
    assert commits(rendezvous, "ann", 11.0)
    assert rendezvous.due(11.05) == []
    assert not commits(rendezvous, "ben", 11.1)  # nobody else computes
    assert rendezvous.due(11.1) == ["ann"]
    assert rendezvous.due(11.1) == []


def test_it_waits_for_no_commit_that_is_expected_later_than_the_bound() -> None:
    assert not commits(pair(partner=1.2), "ann", 11.0)


def test_it_waits_no_longer_than_its_share_of_its_own_step() -> None:
    """Ben is late: after the bound, nobody waits for it any more."""
    rendezvous = pair()
    assert commits(rendezvous, "ann", 11.0)
    look = rendezvous.next_look(11.0)
    assert look is not None
    assert look == pytest.approx(11.15)
    assert rendezvous.due(look - EPSILON) == []
    assert rendezvous.due(look + EPSILON) == ["ann"]


def test_a_slow_worker_waits_no_longer_than_the_bound_in_seconds() -> None:
    rendezvous = pair(step=100.0, partner=110.0)
    assert commits(rendezvous, "ann", 119.5)
    assert rendezvous.next_look(119.5) == pytest.approx(119.5 + MOST)


def test_it_does_not_wait_for_a_worker_that_has_gone() -> None:
    rendezvous = pair()
    assert commits(rendezvous, "ann", 11.0)
    rendezvous.timetable.end("ben")
    assert rendezvous.due(11.0) == ["ann"]


def test_it_does_not_wait_for_a_worker_whose_step_is_not_known() -> None:
    rendezvous = pair()
    rendezvous.timetable.end("ben")
    rendezvous.timetable.began("ben", 10.0, 1.0)
    assert not commits(rendezvous, "ann", 11.0)


def test_a_worker_whose_own_step_is_not_known_does_not_wait() -> None:
    rendezvous = pair()
    rendezvous.timetable.end("ann")
    rendezvous.timetable.began("ann", 10.0, 1.0)
    assert not commits(rendezvous, "ann", 11.0)


def test_nobody_waits_for_who_waits() -> None:
    """Cas is expected by both; ann and ben don't expect each other."""
    rendezvous = pair()
    known(rendezvous.timetable, "cas", 1.12, 10.0)
    assert commits(rendezvous, "ann", 11.0)
    assert commits(rendezvous, "ben", 11.05)
    rendezvous.timetable.end("cas")
    assert sorted(rendezvous.due(11.05)) == ["ann", "ben"]


def test_a_reply_that_is_given_up_is_not_released() -> None:
    rendezvous = pair()
    assert commits(rendezvous, "ann", 11.0)
    assert rendezvous.end("ann")
    assert not rendezvous.end("ann")
    assert rendezvous.due(12.0) == []
    assert rendezvous.next_look(12.0) is None


@dataclass
class Cluster:
    """Workers with steps and shares of a batch of their own, and the times of the looks."""

    steps: list[list[float]]
    shares: list[float]
    dies: dict[int, int]  # worker: after how many commits
    rendezvous: Rendezvous = field(default_factory=lambda: Rendezvous(Timetable(), WAIT, LEAST))
    since: dict[str, tuple[float, float]] = field(default_factory=dict)
    looks: int = 0

    def run(self) -> None:
        arrivals: dict[int, float] = {worker: steps[0] for worker, steps in enumerate(self.steps)}
        for worker in arrivals:
            self.rendezvous.timetable.began(str(worker), 0.0, self.shares[worker])
        made, now = [1] * len(self.steps), 0.0
        while arrivals or self.since:
            look = self.rendezvous.next_look(now)
            assert (look is not None) == bool(self.since)
            first = min(arrivals, key=lambda worker: arrivals[worker]) if arrivals else -1
            if look is not None and (not arrivals or look < arrivals[first]):
                assert look > now, "a look that makes no progress would be repeated for ever"
                now, self.looks = look, self.looks + 1
            else:
                now = arrivals.pop(first)
                self._commits(str(first), now)
            for lease in self.rendezvous.due(now):
                held, most = self.since.pop(lease)
                assert now - held <= most + EPSILON
                self._computes(int(lease), now, made, arrivals)
            if first >= 0 and str(first) not in self.since and first not in arrivals:
                self._computes(first, now, made, arrivals)
            self._nobody_waits_in_vain(now)

    def _commits(self, worker: str, now: float) -> None:
        timetable = self.rendezvous.timetable
        share = self.shares[int(worker)]
        timetable.arrived(worker, now, share)
        if self.rendezvous.hold(worker, now):
            pace = timetable.pace(worker)
            assert pace is not None
            self.since[worker] = now, min(WAIT * pace * share, LEAST)

    def _computes(self, worker: int, now: float, made: list[int], arrivals: dict[int, float]) -> None:
        if made[worker] >= min(len(self.steps[worker]), self.dies.get(worker, 99)):
            self.rendezvous.timetable.end(str(worker))
            return
        self.rendezvous.timetable.began(str(worker), now, self.shares[worker])
        arrivals[worker] = now + self.steps[worker][made[worker]]
        made[worker] += 1

    def _nobody_waits_in_vain(self, now: float) -> None:
        expected = [at for at in self.rendezvous.timetable.expected() if at > now - LEAST - EPSILON]
        assert expected or not self.since


_STEPS = st.lists(st.floats(0.05, 3.0), min_size=3, max_size=12)


@settings(max_examples=100, deadline=None)
@example(
    [[1.0, 2.0, 1.5, 1.0, 1.0, 2.0], [1.0, 1.25, 1.25, 1.75, 1.0, 2.0]], [1.0] * 6, {}
)  # late by the bound, but for rounding
@given(
    st.lists(_STEPS, min_size=1, max_size=6),
    st.lists(st.sampled_from((1.0, 0.5, 1 / 16)), min_size=6, max_size=6),
    st.dictionaries(st.integers(0, 5), st.integers(1, 8), max_size=3),
)
def test_every_run_comes_to_its_end_and_nobody_waits_beyond_the_bound(
    steps: list[list[float]], shares: list[float], dies: dict[int, int]
) -> None:
    cluster = Cluster(steps, shares, dies)
    cluster.run()
    assert cluster.looks <= 2 * sum(map(len, steps)) * len(steps)
