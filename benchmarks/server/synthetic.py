"""Synthetic workers: they sleep instead of computing, and note when each commit was answered and how stale it was.

One thread of one process holds all workers, and they share one gradient, so that a thousand of them leave the processors and
the memory to the server.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import queue
import socket
import time
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gem_api.lane import PREFIX_BYTES, Kind, error_of, opening, parse_header, parse_prefix, tune
from gem_api.layout import Layout
from gem_api.v1 import lane_pb2, tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_client import connect
from gem_client.transport.channel import Stub, open_channel

from benchmarks.lib import machine

Column = npt.NDArray[np.float64]
LEASE_SECONDS = 600.0  # each commit renews its lease; give the server these lease_seconds
_START_SECONDS = 300.0  # within which all workers must have joined
_CALL_SECONDS = 30.0
_PARAMETER = "theta"
_COLUMNS = 4


@dataclass(frozen=True)
class Work:
    """What the workers do.

    Attributes:
        parameters: P, the number of float32 values in a gradient.
        workers: How many.
        compute_seconds: Mean time that a worker sleeps before each commit.
        spread: Standard deviation of that time, relative to its mean.
    """

    parameters: int
    workers: int
    compute_seconds: float = 0.0
    spread: float = 0.1


@dataclass(frozen=True)
class Seen:
    """The commits that were answered in the measured time. The columns have an entry for each.

    Attributes:
        seconds: Length of that time.
        round_trip: Seconds that each commit took.
        staleness: τ of each commit.
        computed: Seconds that the worker really slept before each commit.
        server_cpu, workers_cpu: Seconds of processor time of the server, and of the workers' process, for each commit.
    """

    seconds: float
    round_trip: Column
    staleness: Column
    computed: Column
    server_cpu: float
    workers_cpu: float

    @property
    def rate(self) -> float:
        """Commits per second of all workers together."""
        return len(self.round_trip) / self.seconds

    @property
    def spread(self) -> float:
        """Standard deviation of the time that the workers really slept, as a share of its mean."""
        return float(self.computed.std() / self.computed.mean())

    def figures(self) -> dict[str, float]:
        """The figures to keep."""
        return {
            "rate": self.rate, "staleness_mean": float(self.staleness.mean()), "spread": self.spread,
            "staleness_p95": float(np.percentile(self.staleness, 95)), "round_trip": float(self.round_trip.mean()),
            "server_cpu": self.server_cpu, "workers_cpu": self.workers_cpu,
        }  # fmt: skip


def observe(address: str, pid: int, work: Work, warm_up: float, seconds: float) -> Seen:
    """Lets the workers commit over TCP to the server with this address and process, and looks at them for some seconds after a
    warm-up that does not count."""
    with connect(address) as session:
        session.join({_PARAMETER: np.zeros(work.parameters, np.float32)})
    context = mp.get_context("spawn")
    results, stop, ready = context.Queue(), context.Event(), context.Barrier(2)
    client = context.Process(target=_client, args=(address, work, ready, stop, results))
    client.start()
    ready.wait(_START_SECONDS)
    time.sleep(warm_up)
    pids = [pid, client.pid or 0]
    begin = time.monotonic()  # one clock for all processes of a machine
    before = [machine.cpu_seconds([each]) for each in pids]
    time.sleep(seconds)
    end = time.monotonic()
    used = [machine.cpu_seconds([each]) - earlier for each, earlier in zip(pids, before, strict=True)]
    stop.set()
    commits = _result(results, client)
    client.join()
    answered = commits[:, 0]
    round_trip, staleness, computed = commits[(begin <= answered) & (answered < end), 1:].T
    count = max(1, len(round_trip))
    return Seen(end - begin, round_trip, staleness, computed, used[0] / count, used[1] / count)


def _result(results: Any, client: Any) -> Column:
    """The rows of the process. Raises RuntimeError if it has failed."""
    while True:
        try:
            rows: Column = results.get(timeout=1.0)
            return rows
        except queue.Empty:
            if client.exitcode:
                raise RuntimeError("the process of the workers has failed; its error is above") from None


def _client(address: str, work: Work, ready: Any, stop: Any, results: Any) -> None:
    """The workers' process. It sends an array with a row for each commit: when it was answered, seconds of its round trip, its
    staleness, seconds of sleep before it."""
    layout, host = Layout.of({_PARAMETER: (work.parameters,)}), address.rpartition(":")[0]
    with open_channel(address) as channel:
        stub = Stub(channel, address=address)
        workers = [_Worker(stub, host, str(number), layout) for number in range(work.workers)]
    ready.wait(_START_SECONDS)
    results.put(asyncio.run(_all(workers, work, stop)))


async def _all(workers: list[_Worker], work: Work, stop: Any) -> Column:
    """All workers work until `stop` is set. Returns the rows, shape (commits, 4)."""
    random, rows = np.random.default_rng(0), array("d")
    gradient, room = np.full(work.parameters, 1e-6, np.float32).data.cast("B"), memoryview(bytearray(1 << 20))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_work(worker, work, random, rows, gradient, room)) for worker in workers]
        while not stop.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
    return np.frombuffer(rows, np.float64).reshape(-1, _COLUMNS)


async def _work(
    worker: _Worker, work: Work, random: np.random.Generator, rows: array[float], gradient: memoryview, room: memoryview
) -> None:
    answered, shape = time.monotonic(), max(work.spread, 1e-3) ** -2
    pause = random.random() * work.compute_seconds
    while True:
        await asyncio.sleep(pause)
        sent = time.monotonic()
        staleness = await worker.commit(gradient, room)
        now = time.monotonic()
        rows.extend((now, now - sent, staleness, sent - answered))
        answered, pause = now, work.compute_seconds * random.gamma(shape, 1 / shape)


class _Worker:
    """A worker's lease and its lane."""

    def __init__(self, stub: Stub, host: str, name: str, layout: Layout) -> None:
        request = pb.RegisterWorkerRequest(worker_name=name, layout=layout.to_message())
        lease = stub.RegisterWorker(request, timeout=_CALL_SECONDS)
        frames = list(stub.Pull(pb.PullRequest(lease_id=lease.lease_id), timeout=_CALL_SECONDS))
        self._header = pb.CommitHeader(
            lease_id=lease.lease_id, layout_fingerprint=lease.layout_fingerprint, sample_count=1,
            base_version=pb.PullResponse.FromString(frames[0]).header.version, wire_dtype=tensors_pb2.WIRE_DTYPE_FLOAT32,
        )  # fmt: skip
        offer = stub.OpenLane(pb.OpenLaneRequest(lease_id=lease.lease_id), timeout=_CALL_SECONDS)
        self._sock = socket.create_connection((host, offer.port), _CALL_SECONDS)
        tune(self._sock)
        self._sock.sendall(opening(Kind.HELLO, lane_pb2.LaneHello(token=offer.token)))
        if parse_prefix(self._sock.recv(PREFIX_BYTES, socket.MSG_WAITALL)).kind is not Kind.WELCOME:
            raise RuntimeError(f"the server opened no lane for {name}")
        self._sock.setblocking(False)

    async def commit(self, gradient: memoryview, room: memoryview) -> int:
        """Commits. θ goes into `room`, which all workers share: nobody reads it. Returns the staleness. Raises GemError."""
        self._header.sequence += 1
        start = opening(Kind.COMMIT, self._header, gradient.nbytes)
        sent = self._sock.sendmsg([start, gradient])  # in one packet if it is small; the socket has room for the start
        await asyncio.get_running_loop().sock_sendall(self._sock, gradient[sent - len(start) :])
        prefix = parse_prefix(await self._received(memoryview(bytearray(PREFIX_BYTES))))
        header = await self._received(memoryview(bytearray(prefix.header)))
        if prefix.kind is Kind.ERROR:
            raise error_of(parse_header(header, lane_pb2.LaneError))
        result = parse_header(header, pb.CommitResult)
        left = prefix.payload
        while left:
            left -= len(await self._received(room[: min(left, len(room))]))
        self._header.base_version = result.base_version
        return int(result.staleness)

    async def _received(self, into: memoryview) -> memoryview:
        """Fills the buffer, and returns it."""
        done = 0
        while done < len(into):
            count = await asyncio.get_running_loop().sock_recv_into(self._sock, into[done:])
            if not count:
                raise RuntimeError("the server closed a lane")
            done += count
        return into
