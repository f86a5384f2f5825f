"""One client that reads next to nothing, among many with large models: it holds up nobody, and ends as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_server.intake import turns
from kit.model import ELSEWHERE, in_background
from kit.raw_client import Wire, Worker, wired
from kit.raw_lane import RawLane, committed, header, offer, tcp
from kit.server import DEADLINE, Live, config, serving, wait_until

LARGE = Layout.of({"w": (3_000_000,)})  # needs a turn, and no buffer between the two takes it
WORKERS = 6


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(turns, "FIRST", 0.1)
    monkeypatch.setattr(turns, "GRACE", 0.05)
    with serving(config(memory_socket="")) as server:
        yield server


@pytest.fixture
def crew(live: Live) -> Iterator[list[tuple[Worker, RawLane]]]:
    """Workers that have pulled, each with a lane as over a network."""
    with wired(live) as wire, ExitStack() as lanes:
        workers = [wire.started("worker 0", LARGE), *joined(wire)]
        yield [(worker, lanes.enter_context(opened(worker))) for worker in workers]


def opened(worker: Worker) -> RawLane:
    offered = offer(worker)
    lane = tcp(offered.port, source=ELSEWHERE)
    lane.hello(offered.token)
    return lane


def joined(wire: Wire) -> Iterator[Worker]:
    for number in range(1, WORKERS):
        worker = wire.join(f"worker {number}", LARGE)
        worker.pull()
        yield worker


def all_commit(crew: list[tuple[Worker, RawLane]]) -> None:
    """Each commits twice, all at once; each gets a whole θ."""

    def commits(worker: Worker, lane: RawLane) -> None:
        for _ in range(2):
            _, theta = committed(worker, lane)
            assert np.isfinite(theta).all()

    for committing in [in_background(partial(commits, worker, lane)) for worker, lane in crew]:
        committing.result(DEADLINE)


def test_a_theta_that_nobody_reads(live: Live, crew: list[tuple[Worker, RawLane]]) -> None:
    (slow, lane), *others = crew
    before = live.sent_bytes
    lane.commit(header(slow), slow.gradient().tobytes())
    wait_until(lambda: live.sent_bytes > before + 1000, "θ to begin")
    all_commit(others)
    result, theta = slow.took(lane.answer())
    assert (result.version, len(np.unique(theta))) == (1, 1)
