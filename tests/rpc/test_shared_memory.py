"""Commits in shared memory: the gradient and the new θ lie in memory that worker and server both map.

What holds for commits over the network holds here: exactly once, in order, checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import SMALL, Wire, Worker, apply_thread_held, chunks, received_bytes, theta_bits, wired
from kit.raw_lane import header
from kit.regions import LARGE, RULES, Shared, abstract, linux_only, queue_length, shared, sharing
from kit.server import Live, config, serving, wait_until
from kit.ways import opened

pytestmark = [linux_only, pytest.mark.shared_memory]

P = SMALL.size


@pytest.fixture
def region(worker: Worker) -> Iterator[Shared]:
    """The first worker's region."""
    region = shared(worker)
    yield region
    region.close()


def outcomes(wire: Wire) -> dict[str, int]:
    return dict(wire.status().commits)


# -- an honest commit


@pytest.mark.parametrize(("rule", "layout"), [*((rule, SMALL) for rule in RULES), ("gem, after", LARGE)])
def test_a_commit_in_memory_does_what_the_same_commit_over_the_network_does(rule: str, layout: Layout) -> None:
    dice = np.random.default_rng(7)
    with sharing(RULES[rule], layout) as (live, _, worker, region), serving(config(RULES[rule])) as other, wired(other) as wire:
        twin = wire.started("worker", layout)
        for step in range(6):
            gradient = dice.standard_normal(layout.size, np.float32)
            if step == 3:
                assert worker.pull()[1].tobytes() == twin.pull()[1].tobytes()
            region.gradient[:] = gradient
            result, theta = worker.took(region.answered(region.sent()))
            expected, twins_theta = twin.took(wire.whole("Commit", twin.header(), *chunks(gradient)).answer(layout.size))
            assert result == expected
            assert theta.tobytes() == twins_theta.tobytes()
            assert theta_bits(live) == theta_bits(other)


def test_no_tensor_passes_through_the_socket(live: Live, worker: Worker, region: Shared) -> None:
    before = received_bytes(live), live.sent_bytes
    for _ in range(10):
        region.gradient[:] = 1.0
        worker.took(region.answered(region.sent_on()))
    assert received_bytes(live) - before[0] < 10 * 200
    assert live.sent_bytes - before[1] < 10 * 200


def test_a_worker_commits_in_memory_and_over_the_network_in_any_order(live: Live, worker: Worker, region: Shared) -> None:
    for number, in_memory in enumerate([True, False, False, True, True, False], start=1):
        result, theta = region.commit() if in_memory else worker.commit()
        assert (result.version, theta.tobytes()) == theta_bits(live) == (number, theta.tobytes())


# -- refused, and nothing moved


@pytest.mark.parametrize("size", [1, 4 * P, 1 << 30])
def test_a_payload_after_a_commit_in_memory_is_refused(size: int, live: Live, worker: Worker, region: Shared) -> None:
    before = theta_bits(live)
    region.gradient[:] = 1.0
    region.lane.commit(header(worker), bytes(size) if size <= 4 * P else b"", declared=size)
    assert region.lane.refusal().error == "INCOMPLETE_TRANSFER"
    assert theta_bits(live) == before
    assert region.commit()[0].version == 1


# -- exactly once


def sent(way: str, worker: Worker, sequence: int, value: float = 1.0) -> tuple[pb.CommitResult, bytes]:
    """A first commit, or a repeat of it, by any way: its result and the θ that came with it."""
    frames = [worker.header(sequence=sequence, base_version=0), *worker.body(value)]
    stream = worker.wire.stream("Commit") if way == "grpc" else opened(worker, way)
    stream.send(*frames)
    result, theta = stream.answer(worker.size)
    stream.cancel()
    return result, theta.tobytes()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(["grpc", "tcp", "memory"], repeat=2)))
def test_a_repeat_gets_the_first_answer_whichever_way_either_is_sent(first: str, second: str) -> None:
    with serving(config(memory_socket=abstract())) as live, wired(live) as wire:
        worker = wire.started("worker")
        other = wire.join("other")
        other.pull()
        answer = sent(first, worker, 1)
        other.commit(3.0)
        before = theta_bits(live)
        for _ in range(2):
            assert sent(second, worker, 1, value=-9.0) == answer
        assert theta_bits(live) == before
        assert outcomes(wire) == {"applied": 2, "repeated": 2, "rejected": 0, "discarded": 0}


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_that_the_worker_wrote_over_is_given_again(rule: str) -> None:
    with sharing(RULES[rule]) as (live, _, _, region):
        result, theta = region.commit()
        before = theta_bits(live)
        region.answer[:] = np.nan
        again, restored = region.answered(region.sent(sequence=1, base_version=0))
        assert again == result
        assert restored.tobytes() == theta.tobytes()
        assert theta_bits(live) == before


def test_a_queued_commit_keeps_its_gradient_though_its_repeat_comes_in_memory(live: Live, worker: Worker) -> None:
    """What was checked is what is applied, and its answer comes to where the repeat asks for it."""
    with serving(config()) as other, wired(other) as wire:
        expected = wire.started("twin").commit(1.0)[1].tobytes()
    with apply_thread_held(live) as release:
        old = worker.wire.stream("Commit", worker.header(), *worker.body(1.0))
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        region = shared(worker)
        region.gradient[:] = np.nan
        new = region.sent_on()
        assert old.refusal().error == "SUPERSEDED"
        release()
        result, theta = region.answered(new)
    assert result.version == 1
    assert theta_bits(live) == (1, expected)
    assert theta.tobytes() == expected
    region.close()
