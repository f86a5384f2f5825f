"""A new run on a running server that waits until nobody else joins."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from gem_api.v1 import training_pb2 as pb
from kit.logs import captured
from kit.raw_client import Wire, Worker, wired
from kit.server import Live, config, serving


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(config(start_quiet_seconds=15.0, min_workers=2)) as live:
        yield live


@pytest.fixture
def wire(live: Live) -> Iterator[Wire]:
    with wired(live) as wire:
        yield wire


def ask(worker: Worker) -> pb.LeaseShardResponse:
    request = pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=1000)
    response: pb.LeaseShardResponse = worker.wire.call("LeaseShard", request)
    return response


def test_the_run_says_what_it_waits_for_and_begins_by_itself(live: Live, wire: Wire) -> None:
    assert wire.status().start == pb.Start(min_workers=2, seconds=15.0, at_most_seconds=600.0)
    with captured(logging.INFO) as said:
        ann, bob = wire.started("ann"), wire.join("bob")
        live.clock.advance(10.0)
        assert ask(ann).wait_seconds == 2.0
        waiting = wire.status()
        assert waiting.state == pb.RUN_STATE_WAITING
        assert 0.0 < waiting.start.seconds <= 5.0
        assert 500.0 < waiting.start.at_most_seconds <= 590.0
        live.clock.advance(5.0)
        assert ask(ann).HasField("shard")
        assert ask(bob).HasField("shard")
    assert not wire.status().HasField("start")
    lines = [line for line in said if line["event"] in ("worker registered", "training begins")]
    assert [line.get("waiting_for", line["workers"]) for line in lines] == [2, 2, 2]
    assert lines[1]["begins_in_seconds"] == 15
    assert lines[2]["event"] == "training begins"


def test_the_others_wait_as_long_as_the_run_does_so_that_all_begin_together(live: Live, wire: Wire) -> None:
    ann, _ = wire.started("ann"), wire.join("bob")
    live.clock.advance(14.2)
    assert ask(ann).wait_seconds <= 0.8
