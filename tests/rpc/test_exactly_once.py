"""(lease, sequence) identifies a commit: however often it is sent, it is applied once, and its reply is the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import SMALL, Wire, Worker, apply_thread_held, chunk, chunks, theta_bits
from kit.regions import queue_length
from kit.server import Live, serving, wait_until
from kit.ways import FAILED, WAYS, all_ways, configured, read_by_the_server, refusal_of, through_sockets, wired

P = SMALL.size


def resend(worker: Worker, sequence: int, base_version: int, value: float = 1.0) -> list[bytes]:
    """The frames of a commit that was sent before."""
    return [worker.header(sequence=sequence, base_version=base_version), *worker.body(value)]


@all_ways
def test_a_commit_whose_reply_was_lost_is_resent_and_answered_as_the_first_time(live: Live, wire: Wire, worker: Worker) -> None:
    lost = worker.stream(worker.header(), *worker.body())
    wait_until(lambda: live.on_loop(lambda: live.core.central.version) == 1, "the commit to be applied")
    lost.cancel()
    before = theta_bits(live)
    first, first_theta = worker.whole(*resend(worker, 1, 0)).answer(P)
    second, second_theta = worker.whole(*resend(worker, 1, 0)).answer(P)
    assert first == second
    assert (first.sequence, first.version, first.ticket, first.staleness) == (1, 1, 1, 0)
    assert first.HasField("pi")
    assert first_theta.tobytes() == second_theta.tobytes() == before[1]
    assert theta_bits(live) == before
    assert dict(wire.status().commits) == {"applied": 1, "repeated": 2, "rejected": 0, "discarded": 0}


@all_ways
def test_a_repeat_after_a_pull_says_which_version_its_chunks_are(wire: Wire, worker: Worker) -> None:
    """The next gradient is computed on the chunks, and its staleness counts from the base version stated."""
    other = wire.join("other")
    other.pull()
    thetas = {1: worker.commit()[1].tobytes(), 2: other.commit(5.0)[1].tobytes()}
    assert len(set(thetas.values())) == 2
    assert worker.pull()[0].version == 2
    again, theta = worker.whole(*resend(worker, 1, 0)).answer(P)
    assert (again.sequence, again.version) == (1, 1)
    assert thetas[again.base_version] == theta.tobytes()


@through_sockets
@pytest.mark.parametrize("newer", WAYS)
def test_a_resend_overtakes_the_stream_that_stalled_in_mid_body(newer: str, way: str) -> None:
    """The two bodies share one buffer on the server: nothing of the old one may be left in the new."""
    stale = chunks(np.full(P, 1000.0, np.float32), size=8)
    with serving(configured("memory")) as live, wired(live, way) as first, wired(live, newer) as second:
        worker = first.started("worker")
        old = read_by_the_server(live, worker, worker.header(), *stale[:3])
        worker.wire = second
        result, theta = worker.whole(*resend(worker, 1, 0, value=0.5)).answer(P)
        old.send(*stale[3:])
        refusal = old.refusal()
        assert refusal.error == "SUPERSEDED"
        assert refusal.status in (None, grpc.StatusCode.ABORTED)
        assert result.version == 1
        assert len(set(theta.tolist())) == 1
        assert theta_bits(live) == (1, theta.tobytes())


@all_ways
def test_a_repeat_of_a_queued_commit_waits_for_the_same_answer(live: Live, worker: Worker) -> None:
    with apply_thread_held(live) as release:
        old = worker.stream(*resend(worker, 1, 0))
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        new = read_by_the_server(live, worker, *resend(worker, 1, 0, value=9.0))
        assert old.refusal().error == "SUPERSEDED"
        assert queue_length(live) == 1
        release()
        result, theta = new.answer(P)
    assert (result.sequence, result.version, result.ticket) == (1, 1, 1)
    assert theta_bits(live) == (1, theta.tobytes())
    again, theta_again = worker.whole(*resend(worker, 1, 0)).answer(P)
    assert again == result
    assert theta_again.tobytes() == theta.tobytes()


@through_sockets
def test_a_repeat_whose_body_ends_after_the_first_was_applied_is_answered_too(live: Live, worker: Worker) -> None:
    with apply_thread_held(live) as release:
        old = worker.stream(*resend(worker, 1, 0))
        wait_until(lambda: queue_length(live) == 1, "the commit to be queued")
        new = read_by_the_server(live, worker, worker.header(), chunk(0, bytes(8)))
        assert old.refusal().error == "SUPERSEDED"
        release()
    wait_until(lambda: queue_length(live) == 0, "the first to be applied")
    new.send(chunk(8, bytes(4 * P - 8)))
    result, theta = new.answer(P)
    assert (result.sequence, result.version) == (1, 1)
    assert theta_bits(live) == (1, theta.tobytes())


# -- all at once


def persist(worker: Worker, frames: list[bytes]) -> pb.CommitResult:
    """Sends a commit until it is answered: a stream that was abandoned before may reach the server later."""
    while True:
        try:
            return worker.whole(*frames).answer(P)[0]
        except (EOFError, BrokenPipeError, ConnectionResetError):  # a lane that a newer one replaced while it answered
            continue
        except FAILED as error:
            refusal = refusal_of(error)
            assert refusal.error == "SUPERSEDED", refusal


def storm(seed: int, worker: Worker, commits: int) -> list[set[tuple[int, int, int]]]:
    """Sends every commit many times over, on streams that it cancels, leaves half-way or lets finish.

    Returns:
        For each commit, the different (sequence, version, ticket) that it was answered with.
    """
    dice = random.Random(seed)
    abandoned, answers = [], []
    for _ in range(commits):
        frames = [worker.header(), *chunks(worker.gradient(0.01 * seed), size=8)]
        for _ in range(dice.randrange(4)):
            stream = worker.stream(*frames[: dice.randrange(1, len(frames) + 1)])
            if dice.random() < 0.5:
                stream.cancel()
            else:
                abandoned.append(stream)
        results = [persist(worker, frames) for _ in range(2)]
        worker.sequence, worker.base_version = worker.sequence + 1, results[0].base_version
        answers.append({(result.sequence, result.version, result.ticket) for result in results})
    for stream in abandoned:
        stream.cancel()
    return answers


@all_ways
def test_a_storm_of_duplicates_applies_every_commit_once(way: str, live: Live) -> None:
    workers, commits = 4, 12
    with wired(live, way) as wire, ThreadPoolExecutor(workers) as threads:
        storms = [threads.submit(storm, seed, worker, commits) for seed, worker in enumerate(wire.crew(workers))]
        answers = [storm.result() for storm in storms]
        assert wire.status().commits["applied"] == workers * commits
    assert theta_bits(live)[0] == workers * commits
    assert all(len(answer) == 1 for mine in answers for answer in mine), "a repeat got another answer"
    assert all([sequence for ((sequence, _, _),) in mine] == list(range(1, commits + 1)) for mine in answers)
    versions = sorted(version for mine in answers for ((_, version, _),) in mine)
    assert versions == list(range(1, workers * commits + 1))
