"""Clients that go away while they are answered are no error of the server's; those that read too slowly are ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
from gem_api.errors import DeadlineExceeded
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32
from gem_server.intake.calls import Call
from gem_server.rpc.tensor_stream import Transfer
from gem_server.rpc.training import READER_SECONDS
from gem_server.telemetry.progress import Traffic
from kit.logs import Lines, captured
from kit.raw_client import Worker, wired
from kit.server import serving, wait_until

LARGE = Layout.of({"w": (8_000_000,)})  # more than any buffer between the two takes
ANSWERED: dict[str, Callable[[Worker], Any]] = {
    "a pull": lambda worker: worker.open_pull(),
    "a commit": lambda worker: worker.whole(worker.header(), *worker.body(0.001)),
}


@pytest.fixture
def logged() -> Iterator[Lines]:
    """What the server logs."""
    with captured(logging.INFO) as lines:
        yield lines


@pytest.mark.parametrize("what", ANSWERED)
def test_a_client_that_goes_away_in_the_middle_of_its_answer_is_no_error(what: str, logged: Lines) -> None:
    calls: list[Any] = []  # a call that is forgotten is cancelled too early
    with serving() as live:
        with wired(live) as wire:
            wire.started("first", LARGE).leave()
        for number in range(2):
            with wired(live) as wire:
                worker = wire.join(f"worker {number}", LARGE)
                worker.pull()
                before = live.sent_bytes
                calls.append(ANSWERED[what](worker))
                wait_until(lambda: live.sent_bytes > before, "the answer to begin")  # noqa: B023
            wait_until(lambda: not live.on_loop(lambda: live.server.wiring.intake.calls._all), "the call to end")
    assert "worker registered" in [entry["event"] for entry in logged]
    assert [entry for entry in logged if entry["log_level"] == "error"] == []


@pytest.mark.parametrize(("seconds", "frames"), [(59.0, 2), (1.9, 200)])
def test_a_reader_that_takes_a_minute_for_each_frame_is_ended_and_a_slow_one_is_not(seconds: float, frames: int) -> None:
    class Loop(asyncio.SelectorEventLoop):
        ahead = 0.0

        def time(self) -> float:
            return super().time() + self.ahead

    class Reader:
        read = 0

        async def write(self, frame: bytes) -> None:
            loop.ahead += seconds
            await asyncio.sleep(0.001)  # the timeout is noticed
            self.read += 1

    loop, reader = Loop(), Reader()
    transfer = Transfer(Call(lambda _: None, lambda: None), reader, pb.CommitRequest, Traffic())
    theta = np.zeros(200 << 18, np.float32)
    with closing(loop), pytest.raises(DeadlineExceeded) if frames < 200 else nullcontext():
        loop.run_until_complete(transfer.send_theta(b"", theta, FLOAT32, patience=READER_SECONDS))
    assert reader.read == pytest.approx(frames, abs=2)
