"""Clients that exhaust the server: its memory stays under the limit, and an honest worker keeps committing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from gem_api.layout import Layout
from gem_api.v1 import training_pb2 as pb
from gem_server.core.leases import FIRST_TERM
from gem_server.core.memory_budget import MAX_COPIES
from gem_server.durability.segment import Segment
from gem_server.lane import connection
from gem_server.lane.connection import HELLO_SECONDS
from gem_server.lane.listener import TOKEN_SECONDS
from kit.raw_client import SMALL, Refusal, Stream, Wire, Worker, chunk, on_server_loop, path, received_bytes, register_request
from kit.raw_lane import header as lane_header
from kit.raw_lane import offer
from kit.regions import abstract, linux_only, memory_bytes
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.ways import opened, read_by_the_server, through_sockets, wired

EACH = 4 * SMALL.size * 3  # moment, snapshot, upload
LARGE = Layout.of({"w": (8_000_000,)})  # more than any buffer between the two takes
BYTES = 4 * LARGE.size
many_times = pytest.mark.parametrize("times", [200, pytest.param(10_000, marks=pytest.mark.slow)])


@contextmanager
def limited(workers: int, layout: Layout = SMALL, **changes: Any) -> Iterator[tuple[Live, Wire, Worker]]:
    """A server that has room for so many workers and a copy of θ, the first of which is honest and in the run."""
    limit = 4 * layout.size * (1 + 1 + 3 * workers)
    with serving(config(memory_limit=limit, **changes)) as live, wired(live) as wire:
        yield live, wire, wire.started("honest", layout)


def resident() -> int:
    """Resident bytes of this process, which is the server's and its clients' too (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def honest_while(live: Live, honest: Worker, attack: Callable[[], object]) -> int:
    """Commits while an attack is under way, once at least; returns how often. The limit holds all the while."""
    commits = 0
    stream = honest.wire.stream("Commit", timeout=5 * DEADLINE)
    with ThreadPoolExecutor(1) as thread:
        attacking = thread.submit(attack)
        while not (attacking.done() and commits):
            honest.commit_on(stream, 0.001)
            commits += 1
            assert not live.core.memory.limit or memory_bytes(live) <= live.core.memory.limit
        attacking.result()
    return commits


async def registered(channel: grpc.aio.Channel, worker: str, layout: Layout = SMALL) -> Refusal | pb.RegisterWorkerResponse:
    """Registers, or says how that was refused."""
    request = pb.RegisterWorkerRequest(worker_name=worker, layout=layout.to_message())
    try:
        answer = await channel.unary_unary(path("RegisterWorker"))(request.SerializeToString(), timeout=DEADLINE)
        return pb.RegisterWorkerResponse.FromString(answer)
    except grpc.aio.AioRpcError as error:
        return Refusal.of(error)


def register_all(live: Live, names: list[str]) -> list[Refusal | pb.RegisterWorkerResponse]:
    """Registers under all the names, 32 at a time."""

    async def run() -> list[Refusal | pb.RegisterWorkerResponse]:
        waiting, answers = iter(names), []

        async def caller(channel: grpc.aio.Channel) -> None:
            for worker in waiting:
                answers.append(await registered(channel, worker))

        async with grpc.aio.insecure_channel(live.address) as channel:
            await asyncio.gather(*(caller(channel) for _ in range(32)))
        return answers

    return on_server_loop(live, run, deadline=2 * DEADLINE)


# -- registering


@many_times
def test_thousands_of_registrations_under_one_name_hold_one_place(times: int) -> None:
    with limited(2) as (live, _, honest):
        commits = honest_while(live, honest, lambda: register_all(live, ["again"] * times))
        assert commits > 1
        assert memory_bytes(live) == 4 * SMALL.size + 2 * EACH
        assert live.on_loop(lambda: len(live.core.leases._reasons)) <= 10_000
        assert live.on_loop(lambda: len(live.server.wiring.lane.listener._tickets)) == 0
        honest.commit(0.001)


@many_times
def test_thousands_of_names_get_no_more_places_than_the_limit_has(times: int) -> None:
    with limited(100) as (live, wire, honest):
        answers: list[Refusal | pb.RegisterWorkerResponse] = []
        honest_while(live, honest, lambda: answers.extend(register_all(live, [f"n{number}" for number in range(times)])))
        refused = [answer for answer in answers if isinstance(answer, Refusal)]
        assert len(answers) - len(refused) == 99
        assert {answer.error for answer in refused} == {"OVERLOADED"}
        for _ in range(FIRST_TERM):  # who has only registered has longer
            live.clock.advance(live.config.lease_seconds - 1)
            honest.commit(0.001)
        live.clock.advance(FIRST_TERM)
        wait_until(lambda: memory_bytes(live) == 4 * SMALL.size + EACH, "the strangers' leases to end")
        assert wire.join("late").lease_id


def test_a_registration_costs_the_same_however_many_workers_there_are(live: Live, worker: Worker) -> None:
    """What the server looks at does not grow with the leases: their sizes are not added up again for each."""
    looked_at: list[str] = []
    live.on_loop(lambda: setattr(live.core, "memory_limit", 1 << 30))
    register_all(live, [f"n{number}" for number in range(300)])
    with pytest.MonkeyPatch.context() as patch:
        lease_type = type(live.core.leases.live[worker.lease_id])
        whole = lease_type.own_nbytes.fget
        patch.setattr(lease_type, "own_nbytes", property(lambda lease: looked_at.append(lease.worker) or whole(lease)))
        register_all(live, ["one", "two"])
    assert set(looked_at) == {"one", "two"}


def test_a_log_that_only_registrations_fill_stays_within_its_limit(tmp_path: Path) -> None:
    """They carry no gradient, and none of them moves the version; the disk would fill all the same."""
    log_limit = 50_000
    with serving(config(checkpoint_dir=tmp_path, durability="log", log_limit=log_limit)) as live, wired(live) as wire:
        honest = wire.started("honest")
        for _ in range(2):
            register_all(live, ["again"] * 200)
            wait_until(lambda: log_size(live) < log_limit, "a checkpoint to be written")
        honest.commit()
        assert len(list(tmp_path.glob("checkpoint-*"))) > 1


def log_size(live: Live) -> int:
    journal: Any = live.server.wiring.checkpointer.journal
    return int(live.on_loop(lambda: journal.size))


# -- uploads that never end


@through_sockets
def test_uploads_that_never_end_take_no_turn_and_end_with_their_leases(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 1e6)  # or their silence might end them first
    with limited(101) as (live, wire, honest), wired(live, way) as slow_wire:
        slow = [slow_wire.join(f"slow {number}") for number in range(100)]
        streams = [each.stream() for each in slow]
        before = received_bytes(live)
        for each, stream in zip(slow, streams, strict=True):
            stream.send(each.header(), chunk(0, bytes(4)))
        sent = sum(stream.sent for stream in streams)
        wait_until(lambda: received_bytes(live) == before + sent, "the beginnings of all uploads to arrive")
        held = memory_bytes(live)
        for version in range(1, 21):
            assert honest.commit(0.001)[0].version == version
        assert memory_bytes(live) == held
        one_more = register_request("one more", [("w", (3, 5)), ("b", (2,))], 0, 17)
        assert wire.refusal("RegisterWorker", one_more).error == "OVERLOADED"
        for _ in range(FIRST_TERM):  # who has only registered has longer
            live.clock.advance(live.config.lease_seconds - 1)
            honest.commit(0.001)
        live.clock.advance(FIRST_TERM)
        assert {stream.refusal().error for stream in streams} == {"LEASE_ENDED"}
        wait_until(lambda: memory_bytes(live) == 4 * SMALL.size + EACH, "their memory to be freed")
        honest.commit(0.001)


# -- answers that nobody reads


def test_answers_that_nobody_reads_hold_no_more_than_their_leases_do() -> None:
    with limited(3, LARGE) as (live, _, honest), wired(live) as deaf_wire:
        deaf = [deaf_wire.join(f"deaf {number}", LARGE) for number in range(2)]
        held, before = memory_bytes(live), resident()
        pulls = [each.open_pull() for each in deaf]
        for pull in pulls:
            pull.read()  # and nothing more
        for version in range(1, 3):
            assert honest.commit(0.001)[0].version == version
        assert memory_bytes(live) == held
        assert resident() < before + held + 8 * BYTES  # their frames in the buffers of both sides
        for _ in range(FIRST_TERM):  # who has only registered has longer
            live.clock.advance(live.config.lease_seconds - 1)
            honest.commit(0.001)
        live.clock.advance(FIRST_TERM)
        wait_until(lambda: live.on_loop(lambda: len(live.core.leases.live)) == 1, "their leases to end")
        assert "LEASE_ENDED" in {outcome(pull) for pull in pulls}
        assert memory_bytes(live) == BYTES * 4


def outcome(stream: Stream) -> str:
    """How a stream ended, once all that is left of it is read: the name of an error, or nothing."""
    try:
        while True:
            stream.read()
    except grpc.RpcError as error:
        return Refusal.of(error).error
    except StopIteration:
        return ""


def test_readers_that_never_read_hold_a_few_copies_and_stop_no_commit() -> None:
    limit = BYTES * (1 + MAX_COPIES + 3)
    with serving(config(memory_limit=limit)) as live, wired(live) as wire, wired(live) as deaf_wire:
        honest, streams = wire.started("honest", LARGE), []
        for version in range(1, MAX_COPIES + 2):
            streams.append(deaf_wire.whole("Pull", pb.PullRequest().SerializeToString()))
            copies = min(version, MAX_COPIES)
            wait_until(lambda: live.on_loop(lambda: live.core.central.copies) == copies, "the copy to be made")  # noqa: B023
            assert honest.commit(0.001)[0].version == version
            assert memory_bytes(live) <= limit
        assert {stream.refusal().error for stream in streams[MAX_COPIES:]} == {"OVERLOADED"}


# -- shards


def ask(worker: Worker, holding: list[int], samples: int = 10**6) -> pb.LeaseShardResponse:
    request = pb.LeaseShardRequest(lease_id=worker.lease_id, sample_count=samples, holding=holding)
    return worker.wire.call("LeaseShard", request)  # type: ignore[no-any-return]


def test_shards_that_a_worker_only_claims_to_hold_are_not_written_to_the_log(tmp_path: Path) -> None:
    """Kilobytes of made-up numbers with each question would fill the disk."""
    with serving(config(checkpoint_dir=tmp_path, durability="log")) as live, wired(live) as wire:
        worker = wire.started("worker")
        mine = ask(worker, []).shard.shard_id
        ask(worker, [mine, *range(10**6, 10**6 + 10_000)])
        (segment,) = (tmp_path / "log").glob("segment-*")
        held = [entry.record.fields["holding"] for entry in Segment(segment).entries() if entry.record.kind == "dealt"]
        assert held == [[], [mine]]


# -- lanes


def tickets(live: Live) -> int:
    """Tokens that can still be used."""
    return live.on_loop(lambda: len(live.server.wiring.lane.listener._tickets))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@linux_only
def test_lanes_that_are_offered_and_never_opened_take_nothing() -> None:
    with limited(101, memory_socket=abstract()) as (live, wire, honest):
        idlers = [wire.join(f"idler {number}") for number in range(100)]
        held, before = memory_bytes(live), descriptors()
        for _ in range(5):
            for idler in idlers:
                offer(idler)
        assert memory_bytes(live) == held
        assert descriptors() <= before + 5
        assert tickets(live) == len(idlers)
        assert honest.commit()[0].version == 1
        live.clock.advance(TOKEN_SECONDS + 1)
        offer(honest)
        assert tickets(live) == 1


@linux_only
@pytest.mark.parametrize("way", ["tcp", "memory"])
def test_a_worker_that_opens_lane_after_lane_holds_one(way: str) -> None:
    with limited(2, memory_socket=abstract()) as (live, wire, honest), ExitStack() as lanes:
        greedy = wire.join("greedy")
        live.on_loop(lambda: setattr(live.core.memory, "limit", 1 << 20))
        before = descriptors()
        streams = [opened(greedy, way) for _ in range(100)]
        for stream in streams:
            lanes.callback(stream.cancel)
        assert {stream.refusal().error for stream in streams[:-1]} == {"SUPERSEDED"}
        live.clock.advance(HELLO_SECONDS + 1)  # the older ones never close their end
        wait_until(lambda: live.lanes == 1, "the older ones to end")
        assert descriptors() <= before + 3 * len(streams)  # ours: a socket each, and a mapping's descriptor in memory
        greedy.pull()
        assert greedy.commit_on(streams[-1])[0].version == 1
        assert honest.commit()[0].version == 2


def test_an_upload_that_stops_in_the_middle_is_given_up_though_its_lease_goes_on(live: Live, worker: Worker) -> None:
    stream = read_by_the_server(live, worker, worker.header(), chunk(0, bytes(4)))
    stream.cancel()
    lane = opened(worker, "tcp").lane
    lane.commit(lane_header(worker), bytes(4), declared=4 * worker.size)
    calls = live.server.wiring.intake.calls
    wait_until(lambda: live.on_loop(lambda: any(call.exchanging for call in calls._all)), "the upload to begin")
    for _ in range(4):
        live.clock.advance(0.4 * live.config.lease_seconds)
        worker.wire.call("RenewLease", pb.RenewLeaseRequest(lease_id=worker.lease_id))
    assert lane.closed()
    lane.close()
    assert worker.commit()[0].version == 1
