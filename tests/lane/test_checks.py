"""Large gradients in shared memory: all threads of the pass check them, while the lane's thread serves others."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gem_api.layout import Layout, Vector
from gem_server.core.central_variable import require_finite
from gem_server.event_loop import DecidingLoop
from gem_server.lane import checks as checks_module
from gem_server.lane.checks import PASSES, Checks
from gem_server.rules.threads import Threads
from kit.raw_client import SMALL, theta_bits
from kit.regions import Shared, linux_only, mapped, shared, sharing
from kit.server import DEADLINE, wait_until

pytestmark = [linux_only, pytest.mark.shared_memory]

LAYOUT = Layout.of({"w": (1000, 40), "b": (7,)})
PIECE = 1 << 10
MARK = 7.0  # the first element of a gradient whose check waits for the test


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has LAYOUT be large."""
    monkeypatch.setattr(checks_module, "PIECE", PIECE)
    monkeypatch.setattr("gem_server.wiring.Threads", lambda count: Threads(3, least=PIECE))


@pytest.fixture
def loop() -> Iterator[DecidingLoop]:
    loop = DecidingLoop()
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def checks_by(threads: int, loop: DecidingLoop) -> Checks:
    core: Any = SimpleNamespace(rule=SimpleNamespace(threads=Threads(threads, least=PIECE)))
    return Checks(core, loop)


def checked(loop: DecidingLoop, gradient: Vector, check: Any, threads: int = 3) -> str:
    """Checks a gradient that is large, to the end. Returns why it is refused."""
    checks = checks_by(threads, loop)
    done = checks.begin(gradient, check)
    assert done is not None
    try:
        return loop.run_until_complete(done)
    finally:
        checks.close()


@pytest.mark.parametrize("size", [3 * PASSES * PIECE, 3 * PASSES * PIECE + 1, 17 * PIECE - 1])
def test_every_element_is_checked_once_and_by_all_threads_at_a_time(size: int, loop: DecidingLoop) -> None:
    gradient, counts, meeting = np.arange(size, dtype=np.float32), np.zeros(size, np.int64), threading.Barrier(3)
    first = threading.local()

    def check(piece: Vector) -> None:
        if not hasattr(first, "passed"):
            first.passed = meeting.wait(DEADLINE)  # only if all three are here at once
        counts[piece.astype(np.int64)] += 1

    assert checked(loop, gradient, check) == ""
    assert (counts == 1).all()


@pytest.mark.parametrize("at", [0, PIECE, -1])
def test_a_nan_anywhere_is_found(at: int, loop: DecidingLoop) -> None:
    gradient = np.ones(2 * PASSES * PIECE + 1, np.float32)
    gradient[at] = np.nan
    assert "holds NaN" in checked(loop, gradient, lambda piece: require_finite(piece, np.float32(9), "gradient"), threads=2)


@pytest.mark.parametrize(("threads", "size"), [(3, 2 * PASSES * PIECE - 1), (1, 1 << 20)])
def test_a_small_gradient_or_one_thread_is_left_to_the_caller(threads: int, size: int, loop: DecidingLoop) -> None:
    assert checks_by(threads, loop).begin(np.ones(size, np.float32), lambda piece: None) is None


# -- a server


class Held:
    """Has the check of gradients that begin with MARK wait, from construction to `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._may_end = threading.Event(), threading.Event()
        self.release = self._may_end.set
        monkeypatch.setattr("gem_server.intake.commit_exchange.require_finite", self._check)

    def _check(self, piece: Vector, limit: np.float32, what: str) -> None:
        if piece[0] == MARK:
            self.begun.set()
            assert self._may_end.wait(DEADLINE)
        require_finite(piece, limit, what)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.release()


def marked(region: Shared) -> None:
    """The worker begins a commit whose check waits."""
    region.gradient[:] = 1.0
    region.gradient[0] = MARK
    region.sent_on()


def test_lanes_are_served_while_a_large_gradient_is_checked(held: Held) -> None:
    with sharing(layout=LAYOUT) as (_, wire, worker, region):
        marked(region)
        assert held.begun.wait(DEADLINE)
        with_a_lane = shared(wire.join("other", LAYOUT))  # the lane's one thread says welcome
        with_a_lane.close()
        held.release()
        assert worker.took(region.answered(region.lane))[0].version == 1


def test_a_large_gradient_with_a_nan_changes_nothing_and_its_repeat_counts_once() -> None:
    with sharing(layout=LAYOUT) as (live, _, _, region):
        before = theta_bits(live)
        region.gradient[:] = 1.0
        region.gradient[-1] = np.nan
        assert region.sent_on().refusal().error == "NON_FINITE_GRADIENT"
        assert theta_bits(live) == before
        for _ in range(2):
            region.gradient[:] = 1.0
            assert region.answered(region.sent(sequence=1, base_version=0))[0].version == 1
        assert theta_bits(live)[0] == 1


def test_a_large_commit_that_a_repeat_replaces_while_it_is_checked_counts_once(held: Held) -> None:
    with sharing(layout=LAYOUT) as (_, wire, _, region):
        marked(region)
        assert held.begun.wait(DEADLINE)
        again = region.sent(sequence=1, base_version=0)
        held.release()
        assert region.answered(again)[0].version == 1
        assert dict(wire.status().commits)["applied"] == 1


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("layout", [SMALL, LAYOUT])
def test_a_lease_whose_gradient_had_a_nan_leaves_no_memory_behind(layout: Layout, uncollected: None) -> None:
    """Also if no garbage is collected: a server may not do that for hours."""
    with sharing(layout=layout) as (_, _, worker, region):
        region.gradient[:] = np.nan
        assert region.sent_on().refusal().error == "NON_FINITE_GRADIENT"
        worker.leave()
        wait_until(lambda: mapped(os.getpid()).count(region.inode) == 1, "the server to unmap the region")
