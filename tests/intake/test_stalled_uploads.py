"""Uploads that stall under a memory limit, at a real server, over gRPC and the lane: others go on, and nothing is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from gem_api import framing
from gem_api.layout import Vector
from gem_api.wire import Encoder
from gem_client import connect
from gem_server.core.uploads import STALLED
from gem_server.intake.turns import FIRST, LONGEST
from kit.logs import Lines, captured
from kit.model import GRADIENT, PLAIN, Patience, in_background, model
from kit.raw_client import CommitStream, Worker, chunk
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.ways import read_by_the_server, through_sockets, wired

LATE = FIRST + 1.0


@pytest.fixture
def lines() -> Iterator[Lines]:
    with captured() as lines:
        yield lines


@pytest.fixture
def live(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server with two buffers for gradients, however many workers there are."""
    monkeypatch.setattr(framing, "_UPLOAD_BYTES", 0)
    monkeypatch.setattr(framing, "_UPLOADS", 2)
    with serving(config(PLAIN, memory_socket="")) as server:
        yield server


@contextmanager
def limited(live: Live) -> Iterator[None]:
    """No more memory than is held now."""
    live.on_loop(lambda: setattr(live.core.memory, "limit", live.core.memory.held))
    yield
    live.on_loop(lambda: setattr(live.core.memory, "limit", 0))


def begun(live: Live, worker: Worker, elements: int = 1) -> CommitStream:
    """A commit of which only the first elements of the gradient come."""
    stream = read_by_the_server(live, worker, worker.header(), chunk(0, worker.gradient()[:elements].tobytes()))
    wait_until(lambda: live.on_loop(lambda: arriving(live, worker)), "the gradient to begin")
    return stream


def arriving(live: Live, worker: Worker) -> bool:
    return any(each.lease_id == worker.lease_id for each in live.server.wiring.uploads._arriving.values())


def waiting(live: Live) -> int:
    return live.on_loop(lambda: live.server.wiring.uploads.waiting_for_memory)


@through_sockets
def test_a_stalled_upload_gives_its_memory_to_one_that_waits(way: str, live: Live, lines: Lines) -> None:
    with wired(live, way) as wire, wired(live) as calm:
        honest = calm.started("honest")
        workers = [wire.join(f"stalls {number}") for number in range(2)]
        for worker in workers:
            worker.pull()
        with limited(live):
            streams = [begun(live, worker, elements) for worker, elements in zip(workers, (1, 16), strict=True)]
            committing = in_background(honest.commit)
            wait_until(lambda: waiting(live) == 1, "the honest worker to wait for memory")
            live.clock.advance(LATE)
            assert committing.result(DEADLINE)[0].version == 1
            refusal = streams[1].refusal()
            assert (refusal.error, refusal.details) == (
                "OVERLOADED", "this gradient arrives slowly and others wait for its memory: send it again",
            )  # fmt: skip
            again = in_background(workers[1].commit)  # known as slow: it leaves the last buffer to others
            wait_until(lambda: waiting(live) == 1, "the slow worker to wait for memory")
            assert honest.commit()[0].version == 2
            streams[0].send(chunk(4, workers[0].gradient()[1:].tobytes()))
            assert workers[0].took(streams[0].answer(workers[0].size))[0].version == 3
            assert again.result(DEADLINE)[0].version == 4
    said = {line["event"].partition(":")[0]: line for line in lines}
    assert said["gradients wait for memory"]["waiting"] == 1
    assert said["a slow upload was ended"]["worker"] == "stalls 1"
    assert sum("was ended" in line["event"] for line in lines) == 1


@through_sockets
def test_with_room_for_one_gradient_a_worker_is_told_why_it_waits_and_then_goes_on(
    way: str, live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(framing, "_UPLOADS", 1)
    if way == "grpc":
        monkeypatch.setattr("gem_client.transport.connection.Connection.open_lane", lambda *arguments: None)
    with (
        wired(live, "tcp") as wire,
        connect(live.address, name="honest", shared_memory=False, retry=Patience().retry()) as session,
        caplog.at_level(logging.WARNING, "gem_client"),
    ):
        session.join(model())
        session.commit(GRADIENT)
        worker = wire.join("stalls", live.core.central.layout)
        worker.pull()
        with limited(live):
            stream = begun(live, worker)
            committing = in_background(partial(session.commit, GRADIENT))
            wait_until(lambda: waiting(live) == 1, "the session to wait for memory")
            live.clock.advance(LONGEST + 0.1)
            wait_until(lambda: "no memory for this gradient was free" in caplog.text, "the session to be told")
            live.clock.advance(STALLED - LONGEST)
            assert committing.result(DEADLINE).version == 2
            assert stream.refusal().error == "OVERLOADED"
    assert "the connection to the server broke" not in caplog.text


class Stuck(Encoder):
    """An encoder whose first gradient stops after 260 bytes, until `go`."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._whole = False
        self.go, self.reached = threading.Event(), threading.Event()

    def pieces(self, packed: Vector) -> Iterator[Any]:
        for piece in self._encoder.pieces(packed):
            if self._whole:
                yield piece
                continue
            self._whole = True
            yield piece[:260]
            self.reached.set()
            assert self.go.wait(DEADLINE)
            yield piece[260:]

    def applied(self) -> None:
        self._encoder.applied()


@through_sockets
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_session_whose_upload_was_ended_repeats_the_commit_and_loses_nothing(
    dtype: str, way: str, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "grpc":
        monkeypatch.setattr("gem_client.transport.connection.Connection.open_lane", lambda *arguments: None)
    with serving(live.config) as other:
        expected = thetas(other, dtype, disturbed=False)
    assert thetas(live, dtype, disturbed=True) == expected


def thetas(live: Live, dtype: str, disturbed: bool) -> list[bytes]:
    """What a session gets for three commits. Before the second, two others commit; `disturbed`: while it is under way, and it
    has to give way to them."""
    gradients = [np.random.default_rng(seed).normal(size=600).astype(np.float32) for seed in range(3)]
    with (
        wired(live) as wire,
        connect(
            live.address, shared_memory=False, gradient_dtype=dtype, theta_dtype=dtype, retry=Patience().retry()
        ) as session,
    ):
        session.join({"w": np.zeros(600, np.float32)})
        received = [session.commit(gradients[0]).theta.tobytes()]
        one, other = (wire.join(name, live.core.central.layout) for name in ("one", "other"))
        one.pull()
        other.pull()
        if not disturbed:
            one.commit()
            other.commit()
            return [*received, *(session.commit(gradient).theta.tobytes() for gradient in gradients[1:])]
        link = session._member.links.leader
        stuck = link._encoder = Stuck(link._encoder)
        with limited(live):
            slow = begun(live, other)
            committing = in_background(partial(session.commit, gradients[1]))
            assert stuck.reached.wait(DEADLINE)
            wait_until(lambda: live.on_loop(lambda: len(live.server.wiring.uploads._arriving)) == 2, "the session's gradient")
            waits = in_background(one.commit)
            wait_until(lambda: waiting(live) == 1, "another to wait for memory")
            live.clock.advance(LATE)
            assert waits.result(DEADLINE)[0].version == 2
            stuck.go.set()
            slow.send(chunk(4, other.gradient()[1:].tobytes()))
            assert slow.answer(other.size)[0].version == 3
            received.append(committing.result(DEADLINE).theta.tobytes())
        return [*received, session.commit(gradients[2]).theta.tobytes()]
