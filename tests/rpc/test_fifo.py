"""Commits are applied one by one, in the order in which they were complete. Readers see whole versions. Service is fair."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from kit.raw_client import SMALL, Theta, Wire, Worker, apply_thread_held, chunk, on_server_loop, path
from kit.regions import queue_length
from kit.server import Live, config, serving, wait_until
from kit.ways import all_ways, configured, read_by_the_server, running, through_sockets, wired

P = SMALL.size
COUNTING = Hyperparameters(rule="downpour", learning_rate=1.0)  # a gradient of -1 adds 1 to every element


# -- tickets


@through_sockets
def test_a_slow_uploader_that_began_first_is_applied_last_and_holds_nobody_up(live: Live, wire: Wire) -> None:
    slow, fast, faster = wire.crew(3)
    stream = read_by_the_server(live, slow, slow.header(), chunk(0, slow.gradient()[:2].tobytes()))
    assert [fast.commit()[0].ticket, faster.commit()[0].ticket] == [1, 2]
    stream.send(chunk(8, slow.gradient()[2:].tobytes()))
    result, _ = stream.answer(P)
    assert (result.ticket, result.version, result.staleness) == (3, 3, 2)


@all_ways
def test_complete_commits_are_applied_in_the_order_in_which_they_became_complete(live: Live, wire: Wire) -> None:
    crew = wire.crew(5)
    order = [3, 0, 4, 1, 2]
    with apply_thread_held(live) as release:
        streams = {}
        for place, number in enumerate(order, start=1):
            streams[number] = crew[number].stream(crew[number].header(), *crew[number].body())
            wait_until(lambda: queue_length(live) == place, "it to queue")  # noqa: B023
        release()
        results = [streams[number].answer(P)[0] for number in order]
    assert [(result.ticket, result.version, result.staleness) for result in results] == [(n, n, n - 1) for n in range(1, 6)]


@all_ways
def test_the_history_lists_tickets_in_the_order_of_versions(way: str, tmp_path: Path) -> None:
    workers, commits = 5, 8
    history = tmp_path / "history.csv"
    with running(way, history=history) as (_, wire), ThreadPoolExecutor(workers) as threads:
        crew = wire.crew(workers)
        runs = [threads.submit(lambda w: [w.commit()[0] for _ in range(commits)], worker) for worker in crew]
        answered = {result.version: result for run in runs for result in run.result()}
    rows = list(csv.DictReader(history.read_text().splitlines()))
    versions, tickets = ([int(row[column]) for row in rows] for column in ("version", "ticket"))
    assert versions == list(range(1, workers * commits + 1))
    assert tickets == sorted(set(tickets))
    assert [(int(row["ticket"]), int(row["staleness"])) for row in rows] == [
        (answered[version].ticket, answered[version].staleness) for version in versions
    ]


# -- one version at a time


def assert_whole(version: int, theta: Theta) -> None:
    """θ of a counting run: every element is the version's number."""
    assert np.unique(theta).tolist() == [float(version)]


@all_ways
def test_no_pull_and_no_answer_ever_mixes_versions(way: str) -> None:
    """θ has several chunks and is read, with and without a lease, while others commit."""
    layout, commits, pulls = Layout.of({"w": (700_001,)}), 12, 12
    with serving(configured(way, COUNTING)) as live, ThreadPoolExecutor(6) as threads:
        with wired(live, way) as wire:
            wire.started("first", layout, value=0.0)

        def with_own_channel(work: Callable[[Wire], None]) -> None:
            with wired(live, way) as wire:
                work(wire)

        def committer(name: str) -> Callable[[Wire], None]:
            def work(wire: Wire) -> None:
                worker = wire.join(name, layout)
                worker.pull()
                for _ in range(commits):
                    result, theta = worker.commit(-1.0)
                    assert_whole(result.version, theta)

            return work

        def reader_with_lease(wire: Wire) -> None:
            reader = wire.join("reader", layout)
            for _ in range(pulls):
                header, theta = reader.pull()
                assert_whole(header.version, theta)

        def reader_without_lease(wire: Wire) -> None:
            for _ in range(pulls):
                header, theta = wire.pull(layout.size)
                assert_whole(header.version, theta)

        work = [committer("a"), committer("b"), committer("c"), reader_with_lease, reader_without_lease, reader_without_lease]
        for done in [threads.submit(with_own_channel, each) for each in work]:
            done.result()
        assert live.on_loop(lambda: live.core.central.version) == 3 * commits


def test_a_reader_that_stalls_keeps_its_version_while_others_commit() -> None:
    layout = Layout.of({"w": (8_000_000,)})  # more than any buffer between the two takes
    with serving(config(COUNTING)) as live, wired(live) as wire, wired(live) as slow_wire:
        worker = wire.started("worker", layout, value=0.0)
        stalled = slow_wire.whole("Pull", pb.PullRequest().SerializeToString())
        wait_until(lambda: live.on_loop(lambda: live.core.central.copies) == 1, "the reader's copy to be made")
        assert worker.commit(-1.0)[0].version == 1
        header, theta = stalled.pulled(layout.size)
        assert header.version == 0
        assert_whole(0, theta)


# -- fairness


def jain(shares: list[int]) -> float:
    """Jain's index: 1 where all shares are equal, 1/n where one has everything (Jain, Chiu & Hawe 1984)."""
    return float(sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)))


def test_a_hundred_sessions_that_commit_as_fast_as_they_can_get_equal_shares(live: Live, wire: Wire) -> None:
    sessions, total = 100, 1000
    shares = [0] * sessions
    crew = wire.crew(sessions)

    async def exchange(stream: grpc.aio.StreamStreamCall, worker: Worker) -> None:
        for frame in (worker.header(), *worker.body()):
            await stream.write(frame)
        result = pb.CommitResponse.FromString(await stream.read()).result
        worker.sequence, worker.base_version = result.sequence + 1, result.base_version

    async def session(number: int, worker: Worker, started: asyncio.Barrier) -> None:
        async with grpc.aio.insecure_channel(live.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stream = channel.stream_stream(path("Commit"))()
            await exchange(stream, worker)  # every stream is open before the race begins
            await started.wait()
            while sum(shares) < total:
                await exchange(stream, worker)
                shares[number] += 1
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

    async def all_sessions() -> None:
        started = asyncio.Barrier(sessions)
        await asyncio.gather(*(session(number, worker, started) for number, worker in enumerate(crew)))

    on_server_loop(live, all_sessions)
    assert sum(shares) + sessions == live.on_loop(lambda: live.core.central.version)
    assert jain(shares) >= 0.98, sorted(shares)
