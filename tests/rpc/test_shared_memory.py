"""Commits by reference: the gradient and the new θ lie in memory that worker and server both map.

What holds for chunks holds here: exactly once, in order, checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from gem_api.layout import Layout
from gem_api.v1 import admin_pb2
from gem_api.v1 import training_pb2 as pb
from live import Live, config, serving, wait_until
from region_client import LARGE, NONCE, RULES, Shared, linux_only, queue_length, shared, sharing
from wire_client import (
    SMALL,
    Wire,
    Worker,
    apply_thread_held,
    chunks,
    received_bytes,
    theta_bits,
    wired,
)

pytestmark = [linux_only, pytest.mark.shared_memory]

P = SMALL.size


@pytest.fixture
def region(worker: Worker) -> Iterator[Shared]:
    """The first worker's region."""
    region = shared(worker)
    yield region
    region.close()


def sent_bytes(live: Live) -> int:
    """Bytes of tensor frames that the server has sent."""
    return live.on_loop(lambda: live.server.parts.traffic.sent)


def outcomes(wire: Wire) -> dict[str, int]:
    return dict(wire.status().commits)


# -- an honest commit


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rule", RULES)
def test_a_commit_by_reference_does_what_the_same_commit_in_chunks_does(rule: str, layout: Layout) -> None:
    dice = np.random.default_rng(7)
    with sharing(RULES[rule], layout) as (live, _, worker, region), serving(config(RULES[rule])) as other, wired(other) as wire:
        twin = wire.started("worker", layout)
        for step in range(6):
            gradient = dice.standard_normal(layout.size, np.float32)
            if step == 3:
                assert worker.pull()[1].tobytes() == twin.pull()[1].tobytes()
            region.gradient[:] = gradient
            result, theta = worker.took(region.answered(worker.wire.whole("Commit", region.header())))
            expected, twins_theta = twin.took(wire.whole("Commit", twin.header(), *chunks(gradient)).answer(layout.size))
            assert result == expected
            assert theta.tobytes() == twins_theta.tobytes()
            assert theta_bits(live) == theta_bits(other)


def test_no_tensor_passes_through_the_network(live: Live, worker: Worker, region: Shared) -> None:
    stream = worker.wire.stream("Commit")
    before = received_bytes(live), sent_bytes(live)
    for _ in range(10):
        region.gradient[:] = 1.0
        stream.send(region.header())
        worker.took(region.answered(stream))
    stream.half_close()
    assert stream.ended_well()
    assert received_bytes(live) - before[0] < 10 * 200
    assert sent_bytes(live) - before[1] < 10 * 200


def test_the_answer_lies_in_the_region_before_the_result_is_sent(live: Live, worker: Worker, region: Shared) -> None:
    for expected in range(1, 4):
        region.answer[:] = np.nan
        result, theta = region.commit()
        assert (result.version, theta.tobytes()) == (expected, theta_bits(live)[1])


def test_one_stream_takes_commits_of_both_kinds_in_any_order(live: Live, worker: Worker, region: Shared) -> None:
    stream = worker.wire.stream("Commit")
    for number, by_reference in enumerate([True, False, False, True, True, False], start=1):
        if by_reference:
            region.gradient[:] = 1.0
            stream.send(region.header())
            result, theta = worker.took(region.answered(stream))
        else:
            result, theta = worker.commit_on(stream)
        assert (result.version, theta.tobytes()) == theta_bits(live) == (number, theta.tobytes())


def test_workers_with_and_without_shared_memory_move_one_theta(live: Live, wire: Wire, worker: Worker, region: Shared) -> None:
    far = wire.join("far")
    far.pull()
    for _ in range(3):
        assert region.commit()[1].tobytes() == theta_bits(live)[1]
        assert far.commit()[1].tobytes() == theta_bits(live)[1]
    assert worker.took(region.commit())[0].staleness == 1


def test_the_contract_that_a_pull_still_sends_theta(live: Live, worker: Worker, region: Shared) -> None:
    region.commit()
    assert worker.pull()[1].tobytes() == theta_bits(live)[1]


# -- refused, and nothing moved

SEQUENCE_GAP: dict[str, object] = {"sequence": 5}
REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "a gap in the sequence": ("SEQUENCE_GAP", SEQUENCE_GAP),
    "a base version from the future": ("INVALID_REQUEST", {"base_version": 1}),
    "another layout's fingerprint": ("LAYOUT_MISMATCH", {"layout_fingerprint": bytes(32)}),
    "an impossible number of samples": ("INVALID_REQUEST", {"sample_count": 2**64 - 1}),
    "an unknown lease": ("LEASE_ENDED", {"lease_id": "nobody"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_header_is_refused_by_reference_too(what: str, live: Live, worker: Worker, region: Shared) -> None:
    error, changes = REFUSED[what]
    before = theta_bits(live)
    region.gradient[:] = 1.0
    assert worker.wire.whole("Commit", region.header(**changes)).refusal().error == error
    assert theta_bits(live) == before
    assert region.commit()[0].version == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e30, -3e38])
@pytest.mark.parametrize("at", [0, P - 1])
def test_a_gradient_that_is_no_number_is_refused(value: float, at: int, live: Live, worker: Worker, region: Shared) -> None:
    region.commit()
    before = theta_bits(live)
    region.gradient[:] = 1.0
    region.gradient[at] = value
    assert worker.wire.whole("Commit", region.header()).refusal().error == "NON_FINITE_GRADIENT"
    assert theta_bits(live) == before
    assert outcomes(worker.wire) == {"applied": 1, "repeated": 0, "rejected": 1, "discarded": 0}
    assert region.commit()[0].version == 2


def test_a_large_gradient_is_checked_to_its_last_element() -> None:
    with sharing(layout=LARGE) as (live, _, worker, region):
        before = theta_bits(live)
        for at in (0, LARGE.size // 2, LARGE.size - 1):
            region.gradient[:] = 1.0
            region.gradient[at] = np.nan
            assert worker.wire.whole("Commit", region.header()).refusal().error == "NON_FINITE_GRADIENT"
        assert theta_bits(live) == before
        assert region.commit()[0].version == 1


@pytest.mark.parametrize("together", [False, True], ids=["in frames of their own", "in the header's frame"])
def test_chunks_after_a_commit_by_reference_are_refused_and_the_commit_stands(
    together: bool, live: Live, worker: Worker, region: Shared
) -> None:
    region.gradient[:] = 1.0
    frames = [region.header(), *worker.body()]
    stream = worker.wire.whole("Commit", *([b"".join(frames)] if together else frames))
    assert worker.took(region.answered(stream))[0].version == 1
    assert stream.refusal().error == "INCOMPLETE_TRANSFER"
    assert theta_bits(live)[0] == 1
    assert region.commit()[0].version == 2


def test_another_leases_region_is_unknown(live: Live, wire: Wire, worker: Worker, region: Shared) -> None:
    other = wire.join("other")
    other.pull()
    before = theta_bits(live)
    for adopted in (False, True):
        assert wire.whole("Commit", other.header(region=region.nonce)).refusal().error == "UNKNOWN_REGION"
        assert theta_bits(live) == before
        if not adopted:
            assert region.commit()[0].version == 1
            before = theta_bits(live)
    assert other.commit()[0].version == 2


@pytest.mark.parametrize("length", [1, NONCE - 1, NONCE, NONCE + 1])
def test_a_name_that_was_made_up_is_unknown(length: int, live: Live, worker: Worker, region: Shared) -> None:
    before = theta_bits(live)
    made_up = (region.nonce + b"\0")[:length] if length != NONCE else bytes(NONCE)
    assert worker.wire.whole("Commit", worker.header(region=made_up)).refusal().error == "UNKNOWN_REGION"
    assert theta_bits(live) == before
    assert region.commit()[0].version == 1


def test_the_region_of_a_lease_that_ended_is_refused_with_the_lease(live: Live, worker: Worker, region: Shared) -> None:
    region.commit()
    before = theta_bits(live)
    worker.leave()
    refusal = worker.wire.whole("Commit", region.header()).refusal()
    assert (refusal.error, refusal.reason) == ("LEASE_ENDED", "left")
    again = worker.wire.join("worker")
    assert worker.wire.whole("Commit", again.header(region=region.nonce)).refusal().error == "UNKNOWN_REGION"
    assert theta_bits(live) == before


# -- exactly once

WAYS = ["reference", "chunks"]


def sent(way: str, region: Shared, sequence: int, value: float = 1.0) -> tuple[pb.CommitResult, bytes]:
    """A first commit, or a repeat of it, by either way: its result and the θ that came with it."""
    worker = region.worker
    if way == "reference":
        region.gradient[:] = value
        stream = worker.wire.whole("Commit", region.header(sequence=sequence, base_version=0))
        result, theta = region.answered(stream)
    else:
        frames = [worker.header(sequence=sequence, base_version=0), *worker.body(value)]
        result, theta = worker.wire.whole("Commit", *frames).answer(worker.size)
    return result, theta.tobytes()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(WAYS, WAYS)))
@pytest.mark.parametrize("rule", RULES)
def test_a_repeat_gets_the_first_answer_whichever_way_either_is_sent(rule: str, first: str, second: str) -> None:
    with sharing(RULES[rule]) as (live, wire, _, region):
        other = wire.join("other")
        other.pull()
        answer = sent(first, region, 1)
        other.commit(3.0)
        before = theta_bits(live)
        for _ in range(2):
            assert sent(second, region, 1, value=-9.0) == answer
        assert theta_bits(live) == before
        assert outcomes(wire) == {"applied": 2, "repeated": 2, "rejected": 0, "discarded": 0}


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_that_the_worker_wrote_over_is_given_again(rule: str) -> None:
    with sharing(RULES[rule]) as (live, _, worker, region):
        result, theta = region.commit()
        before = theta_bits(live)
        region.answer[:] = np.nan
        again, restored = region.answered(worker.wire.whole("Commit", region.header(sequence=1, base_version=0)))
        assert again == result
        assert restored.tobytes() == theta.tobytes()
        assert theta_bits(live) == before


def test_a_commit_whose_reply_was_lost_is_resent_by_reference(live: Live, worker: Worker, region: Shared) -> None:
    region.gradient[:] = 1.0
    lost = worker.wire.stream("Commit", region.header())
    wait_until(lambda: theta_bits(live)[0] == 1, "the commit to be applied")
    lost.cancel()
    before = theta_bits(live)
    result, theta = region.answered(worker.wire.whole("Commit", region.header()))
    assert (result.sequence, result.version, theta.tobytes()) == (1, 1, before[1])
    assert theta_bits(live) == before


def test_a_repeat_of_a_queued_commit_by_reference_waits_for_the_same_answer(live: Live, worker: Worker, region: Shared) -> None:
    region.gradient[:] = 1.0
    with apply_thread_held(live) as release:
        old = worker.wire.stream("Commit", region.header())
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        before = received_bytes(live)
        new = worker.wire.stream("Commit", region.header())
        wait_until(lambda: received_bytes(live) > before, "the repeat to be read")
        assert old.refusal().error == "SUPERSEDED"
        release()
        result, theta = region.answered(new)
    assert (result.sequence, result.version, result.ticket) == (1, 1, 1)
    assert theta_bits(live) == (1, theta.tobytes())


def test_a_queued_commit_keeps_its_gradient_though_its_repeat_names_a_region(live: Live, worker: Worker) -> None:
    """What was checked is what is applied, and its answer comes to where the repeat asks for it."""
    with serving(config()) as other, wired(other) as wire:
        expected = wire.started("twin").commit(1.0)[1].tobytes()
    with apply_thread_held(live) as release:
        old = worker.wire.stream("Commit", worker.header(), *worker.body(1.0))
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        region = shared(worker)
        region.gradient[:] = np.nan
        before = received_bytes(live)
        new = worker.wire.stream("Commit", region.header())
        wait_until(lambda: received_bytes(live) > before, "the repeat to be read")
        assert old.refusal().error == "SUPERSEDED"
        release()
        result, theta = region.answered(new)
    assert result.version == 1
    assert theta_bits(live) == (1, expected)
    assert theta.tobytes() == expected
    region.close()


# -- the end


def test_a_server_that_drains_answers_a_queued_commit_by_reference(live: Live, worker: Worker, region: Shared) -> None:
    region.gradient[:] = 1.0
    with apply_thread_held(live) as release:
        queued = worker.wire.stream("Commit", region.header())
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        worker.wire.call("Drain", admin_pb2.DrainRequest())
        assert worker.wire.refusal("ShareMemory", pb.ShareMemoryRequest(lease_id=worker.lease_id)).error == "DRAINING"
        release()
        assert worker.took(region.answered(queued))[0].version == 1
