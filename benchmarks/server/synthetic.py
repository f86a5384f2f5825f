"""Synthetic workers: they sleep instead of computing, and note when each commit was answered and how stale it was.

One thread of one process holds all workers, and they share one gradient, so that a thousand of them leave the processors and
the memory to the server.
"""

from __future__ import annotations

import heapq
import multiprocessing as mp
import queue
import select
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
    """The commits that were answered in the measured time.

    Attributes:
        seconds: Length of that time.
        round_trip: Seconds that each commit took. Shape (commits,).
        staleness: τ of each commit. Shape (commits,).
        computed: Seconds that the worker really slept before each commit. Shape (commits,).
        server_cpu: Seconds of processor time of the server for each commit.
        workers_cpu: The same of the workers' process.
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
    """Lets the workers commit over TCP, and looks at them for some seconds after a warm-up that does not count.

    Args:
        address: The server's address.
        pid: Its process.
        work: What the workers do.
        warm_up, seconds: How long they do it before they are measured, and while they are.
    """
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
    crowd = _Crowd(address, work, np.random.default_rng(0))
    ready.wait(_START_SECONDS)
    results.put(crowd.run(stop))


class _Worker:
    """A worker's lease, its lane, and the commit under way."""

    def __init__(self, stub: Stub, host: str, name: str, layout: Layout) -> None:
        request = pb.RegisterWorkerRequest(worker_name=name, layout=layout.to_message())
        lease = stub.RegisterWorker(request, timeout=_CALL_SECONDS)
        frames = list(stub.Pull(pb.PullRequest(lease_id=lease.lease_id), timeout=_CALL_SECONDS))
        self.header = pb.CommitHeader(
            lease_id=lease.lease_id, layout_fingerprint=lease.layout_fingerprint, sample_count=1,
            base_version=pb.PullResponse.FromString(frames[0]).header.version, wire_dtype=tensors_pb2.WIRE_DTYPE_FLOAT32,
        )  # fmt: skip
        offer = stub.OpenLane(pb.OpenLaneRequest(lease_id=lease.lease_id), timeout=_CALL_SECONDS)
        self.sock = socket.create_connection((host, offer.port), _CALL_SECONDS)
        tune(self.sock)
        self.sock.sendall(opening(Kind.HELLO, lane_pb2.LaneHello(token=offer.token)))
        if parse_prefix(self.sock.recv(PREFIX_BYTES, socket.MSG_WAITALL)).kind is not Kind.WELCOME:
            raise RuntimeError(f"the server opened no lane for {name}")
        self.sock.setblocking(False)
        self.rest: list[memoryview] = []  # of the commit, not sent yet
        self.start = b""  # of the answer, up to its payload
        self.missing = -1  # bytes of the answer that are still to come; −1: not known yet
        self.answered = self.sent = 0.0
        self.staleness = 0


class _Crowd:
    """All workers, in one thread."""

    def __init__(self, address: str, work: Work, random: np.random.Generator) -> None:
        self._work = work
        self._random = random
        self._gradient = np.full(work.parameters, 1e-6, np.float32).data.cast("B")
        self._room = memoryview(bytearray(1 << 20))  # what is received into, again and again
        self._poll = select.epoll()  # before the sockets: `select` takes descriptors below 1,024 only
        layout = Layout.of({_PARAMETER: (work.parameters,)})
        with open_channel(address) as channel:
            stub, host = Stub(channel, address=address), address.rpartition(":")[0]
            self._workers = [_Worker(stub, host, str(number), layout) for number in range(work.workers)]
        self._rows = array("d")  # of all commits, one after the other
        self._asleep: list[tuple[float, int]] = []  # when each wakes, and its index
        self._shape = max(work.spread, 1e-3) ** -2

    def run(self, stop: Any) -> Column:
        """Works until `stop` is set. Returns the rows, shape (commits, 4)."""
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            worker.answered = now
            self._asleep.append((now + self._random.random() * self._work.compute_seconds, index))
        heapq.heapify(self._asleep)
        by_descriptor = {worker.sock.fileno(): index for index, worker in enumerate(self._workers)}
        for descriptor in by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        while not stop.is_set():
            self._wake()
            pause = min(0.1, max(0.0, self._asleep[0][0] - time.monotonic())) if self._asleep else 0.1
            select.select((self._poll,), (), (), pause)  # epoll itself rounds the pause up to a millisecond
            for descriptor, _ in self._poll.poll(0):
                self._go_on(by_descriptor[descriptor])
        for worker in self._workers:
            worker.sock.close()
        return np.frombuffer(self._rows, np.float64).reshape(-1, _COLUMNS)

    def _wake(self) -> None:
        """Begins the commits of all workers whose sleep is over."""
        now = time.monotonic()
        while self._asleep and self._asleep[0][0] <= now:
            worker = self._workers[heapq.heappop(self._asleep)[1]]
            worker.header.sequence += 1
            start = opening(Kind.COMMIT, worker.header, self._gradient.nbytes)
            worker.rest, worker.sent = [memoryview(start), self._gradient], time.monotonic()
            _send(worker)

    def _go_on(self, index: int) -> None:
        """Sends and receives what is possible for this worker; it sleeps again if its answer is complete."""
        worker = self._workers[index]
        _send(worker)
        if not self._receive(worker):
            return
        now, compute = time.monotonic(), self._work.compute_seconds
        self._rows.extend((now, now - worker.sent, worker.staleness, worker.sent - worker.answered))
        worker.answered, worker.start, worker.missing = now, b"", -1
        heapq.heappush(self._asleep, (now + compute * self._random.gamma(self._shape, 1 / self._shape), index))

    def _receive(self, worker: _Worker) -> bool:
        """Receives what has come. Returns whether the answer is complete. Raises GemError if the server sends one."""
        while worker.missing:
            wanted = self._room if worker.missing < 0 else self._room[: worker.missing]
            try:
                count = worker.sock.recv_into(wanted)
            except BlockingIOError:
                return False
            if not count:
                raise RuntimeError("the server closed a lane")
            if worker.missing > 0:
                worker.missing -= count
            else:
                worker.start += bytes(self._room[: min(count, 1024)])
                _read_header(worker, len(worker.start) + max(0, count - 1024))
        return True


def _read_header(worker: _Worker, received: int) -> None:
    """Reads the answer's header, if it is there: of the answer, `received` bytes are."""
    if len(worker.start) < PREFIX_BYTES:
        return
    prefix = parse_prefix(worker.start[:PREFIX_BYTES])
    end = PREFIX_BYTES + prefix.header
    if len(worker.start) < end:
        return
    if prefix.kind is Kind.ERROR:
        raise error_of(parse_header(worker.start[PREFIX_BYTES:end], lane_pb2.LaneError))
    result = parse_header(worker.start[PREFIX_BYTES:end], pb.CommitResult)
    worker.header.base_version, worker.staleness = result.base_version, result.staleness
    worker.missing = end + prefix.payload - received


def _send(worker: _Worker) -> None:
    """Sends what the socket takes of the worker's commit."""
    while worker.rest:
        try:
            count = worker.sock.sendmsg(worker.rest)
        except BlockingIOError:
            return
        while worker.rest and count >= len(worker.rest[0]):
            count -= len(worker.rest.pop(0))
        if worker.rest:
            worker.rest[0] = worker.rest[0][count:]
