"""Simulated compute time, on a clock that only sleeping and the test advance."""

from __future__ import annotations

import pytest
from gem_worker.command import Stopped
from gem_worker.compute_gate import ComputeGate
from gem_worker.process.step_limits import NO_LIMITS, StepLimits
from gem_worker.process.stopping import Stopping


class Clock:
    """Seconds, and the sleeps that were asked for."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(("computing", "slept"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (3.0, 0.0)])
def test_a_step_sleeps_what_its_computation_leaves_of_the_time(clock: Clock, computing: float, slept: float) -> None:
    with StepLimits(1.0, clock.now, clock.sleep).step():
        clock.seconds += computing
    assert sum(clock.slept) == slept
    assert clock.seconds == max(1.0, computing)


@pytest.mark.parametrize("share", [0.1, 1.0, 1.9])
def test_a_larger_batch_takes_longer_in_proportion(clock: Clock, share: float) -> None:
    with StepLimits(2.0, clock.now, clock.sleep).step(share):
        clock.seconds += 0.1
    assert clock.seconds == pytest.approx(2.0 * share)


def test_without_a_stated_time_nothing_is_slept(clock: Clock) -> None:
    with StepLimits(now=clock.now, sleep=clock.sleep).step():
        clock.seconds += 0.5
    assert set(clock.slept) == {0.0}
    assert NO_LIMITS.step_seconds == 0


def test_a_worker_sleeps_after_it_has_given_its_turn_to_the_next(clock: Clock) -> None:
    gate, free_while_asleep = ComputeGate(1), []

    def sleep(seconds: float) -> None:
        if seconds:
            with gate.slot():  # would wait for ever if this step still had the turn
                free_while_asleep.append(seconds)

    with StepLimits(1.0, clock.now, sleep, gate).step():
        clock.seconds += 0.25
    assert free_while_asleep == [0.75]


def test_a_worker_that_is_to_stop_does_not_begin_another_step() -> None:
    stopping, gate, computed = Stopping(), ComputeGate(1), []
    stopping.begin()
    with pytest.raises(Stopped), StepLimits(sleep=stopping.sleep, gate=gate).step():
        computed.append(1)
    assert computed == []
    with gate.slot():  # its turn was given back
        pass


def test_a_worker_that_is_told_to_stop_in_a_step_sleeps_no_more() -> None:
    stopping = Stopping()
    with pytest.raises(Stopped), StepLimits(3600.0, sleep=stopping.sleep).step():
        stopping.begin()
