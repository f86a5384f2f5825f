"""Helpers of the integration tests: a small model, expiring leases, a retry whose time is controlled, a breakable network."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gem_api.hyperparameters import Hyperparameters
from gem_client import Retry, Session

from kit.server import Live, wait_until

T = TypeVar("T")
Array = npt.NDArray[np.float32]

SIZE = 9
ELSEWHERE = "127.0.0.2"  # this machine too
GRADIENT: Array = np.full(SIZE, 0.5, np.float32)
PLAIN = Hyperparameters(rule="downpour", learning_rate=0.5)  # θ falls by 0.25 with each commit of GRADIENT


def model() -> dict[str, Array]:
    """A model of 9 parameters: six ones, three zeros."""
    return {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def version(live: Live) -> int:
    return int(live.on_loop(lambda: live.core.central.version))


def theta(live: Live) -> Array:
    """A copy of the server's central variable."""
    return live.on_loop(lambda: live.core.central.theta.copy())


def ended(live: Live) -> dict[str, int]:
    """How many leases have ended, by reason."""
    return live.on_loop(lambda: {str(reason): count for reason, count in live.core.leases.ended.items()})


def outcomes(live: Live) -> dict[str, int]:
    """Number of commits by outcome, without zeros."""
    return live.on_loop(lambda: {str(kind): count for kind, count in live.core.outcomes.items() if count})


def workers(live: Live) -> list[str]:
    """Names of the live workers."""
    return live.on_loop(lambda: [lease.worker for lease in live.core.leases.live.values()])


def expire_all(live: Live) -> None:
    """Lets every lease expire, by advancing the server's clock."""
    live.clock.advance(live.config.lease_seconds + 1)
    live.on_loop(live.server.wiring.training.expire_leases)  # the server itself does so once a second
    wait_until(lambda: not workers(live), "every lease to end")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread that does not outlive the tests."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def traffic(live: Live) -> tuple[int, int]:
    """Bytes of tensor frames that the server has received and sent."""
    return live.on_loop(lambda: (live.server.wiring.traffic.received, live.server.wiring.traffic.sent))


def assert_goes_over_the_network(live: Live, session: Session, transport: str = "tcp") -> None:
    """Asserts that the session commits, receives the server's θ, and sends everything over the network."""
    assert not session.shares_memory
    before = traffic(live)
    for _ in range(3):
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
    assert traffic(live)[0] - before[0] >= 3 * 4 * SIZE
    assert transports(live)[session.name] == transport
    assert not live.on_loop(lambda: any(lease.region for lease in live.core.leases.live.values()))


class Patience:
    """The clock of a `Retry`: it stands still until `run_out`, and then passes the limit soon.

    Attributes:
        pauses: Number of pauses so far.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._now, self._pace = 0.0, 0.0

    def retry(self) -> Retry:
        return Retry(give_up_after=60.0, clock=lambda: self._now, sleep=self._pause)

    def run_out(self) -> None:
        self._pace = 1000.0

    def renew(self) -> None:
        self._pace = 0.0

    def _pause(self, seconds: float) -> None:
        self.pauses += 1
        self._now += self._pace
        threading.Event().wait(0.01)


class Relay:
    """Carries the connections to one listening socket on to another. Descriptors that come over a Unix socket go on, too.

    Attributes:
        accepted: Number of connections so far.
    """

    def __init__(self, listener: socket.socket, target: Any) -> None:
        self.accepted = 0
        self._listener, self._target = listener, target
        self._ends: list[socket.socket] = []
        self._passing = threading.Event()
        self._passing.set()
        self._losing = False
        self._until_cut: int | None = None  # bytes that clients may still send
        self._for_good = False
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self) -> None:
        """From now on, drops everything that the server sends."""
        self._losing = True

    def cut_after(self, nbytes: int, for_good: bool) -> None:
        """Lets clients send this many bytes more, and then breaks every connection; refuses new ones if it is for good."""
        self._for_good, self._until_cut = for_good, nbytes

    def stall(self) -> None:
        """From now on, holds back everything, without an error."""
        self._passing.clear()

    def flow(self) -> None:
        """Ends `stall`; what was held back arrives."""
        self._passing.set()

    def block(self) -> None:
        """From now on, holds back everything without an error, and lets no connection be made."""
        self.stall()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut(self) -> None:
        """Breaks every connection, and lets new ones through."""
        self._losing = False
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Breaks every connection, and refuses new ones from now on."""
        self.block()
        self.flow()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                server = socket.socket(client.family)
                try:
                    server.connect(self._target)
                except OSError:
                    client.close()
                    server.close()
                    raise
                self._ends += [client, server]
                threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError), source:
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, 1 << 16, 4)
                if not data:
                    break
                self._passing.wait()
                if not answers and self._cuts(len(data)):
                    break
                if not (answers and self._losing):
                    sent = socket.send_fds(sink, [data], descriptors) if descriptors else 0
                    sink.sendall(data[sent:])
                for descriptor in descriptors:
                    os.close(descriptor)
            sink.shutdown(socket.SHUT_WR)

    def _cuts(self, nbytes: int) -> bool:
        if self._until_cut is None:
            return False
        self._until_cut -= nbytes
        if self._until_cut >= 0:
            return False
        self._until_cut = None
        if self._for_good:
            self.refuse()
        else:
            self.cut()
        return True


class Wire:
    """A network between clients and a server that can lose responses, stall and break; new connections work.

    It carries gRPC, and the lane if `live` is given. The server names the lane's port and its socket: so the network has the
    same port on another address of this machine, and takes the socket's place in the file system.

    Attributes:
        grpc: The way of gRPC.
        lanes: The ways of the lanes, over TCP and the Unix socket, as far as the server has them.
    """

    def __init__(self, server: str, live: Live | None = None) -> None:
        host, _, port = server.rpartition(":")
        listener = socket.create_server((ELSEWHERE, 0))
        self.address = f"{ELSEWHERE}:{listener.getsockname()[1]}"
        self.grpc = Relay(listener, (host, int(port)))
        self.lanes: list[Relay] = []
        if live is None:
            return
        if lane_port := lane_port_of(live):
            self.lanes.append(Relay(socket.create_server((ELSEWHERE, lane_port)), (host, lane_port)))
        if path := live.config.memory_socket:
            os.rename(path, f"{path}.server")
            unix = socket.socket(socket.AF_UNIX)
            unix.bind(path)
            unix.listen()
            self.lanes.append(Relay(unix, f"{path}.server"))

    def lose_answers(self) -> None:
        """From now on, drops everything that the server sends."""
        for relay in self._relays:
            relay.lose_answers()

    def stall(self) -> None:
        """From now on, holds back everything, without an error."""
        for relay in self._relays:
            relay.stall()

    def flow(self) -> None:
        """Ends `stall`; what was held back arrives."""
        for relay in self._relays:
            relay.flow()

    def cut(self) -> None:
        """Breaks every connection, and lets new ones through."""
        for relay in self._relays:
            relay.cut()

    @property
    def _relays(self) -> list[Relay]:
        return [self.grpc, *self.lanes]

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for relay in self._relays:
            relay.refuse()


def lane_port_of(live: Live) -> int:
    """The TCP port of the server's lane; 0 if it has none."""
    port: int = live.server.wiring.lane._listener.port
    return port


def transports(live: Live) -> dict[str, str]:
    """How each live worker's last commit came, by name, as the status shows it."""
    return {one.name: one.transport for one in live.on_loop(live.server.wiring.view.read).workers}
