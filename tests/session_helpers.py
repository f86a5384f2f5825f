"""Helpers of the integration tests: a small model, expiring leases, a retry whose time is controlled, a breakable network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gem_api.hyperparameters import Hyperparameters
from gem_client import Retry, Session
from live import Live, wait_until

T = TypeVar("T")
Array = npt.NDArray[np.float32]

SIZE = 9
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
    wait_until(lambda: not workers(live), "every lease to end")


def expire_but(live: Live, sign_of_life: Callable[[], object]) -> None:
    """Lets every lease expire except that of the worker which `sign_of_life` renews."""
    before = ended(live).get("expired", 0)
    live.clock.advance(0.6 * live.config.lease_seconds)
    sign_of_life()
    live.clock.advance(0.6 * live.config.lease_seconds)
    wait_until(lambda: ended(live).get("expired", 0) > before, "the silent lease to end")


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
    return live.on_loop(lambda: (live.server.parts.traffic.received, live.server.parts.traffic.sent))


def assert_goes_over_the_network(live: Live, session: Session) -> None:
    """Asserts that the session commits, receives the server's θ, and sends everything in chunks."""
    assert not session.shares_memory
    before = traffic(live)
    for _ in range(3):
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
    assert traffic(live)[0] - before[0] >= 3 * 4 * SIZE
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


class Wire:
    """A relay between a client and a server that can lose responses, stall and break. New connections work."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._passing = threading.Event()
        self._passing.set()
        self._losing = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def lose_answers(self) -> None:
        """From now on, drops everything that the server sends."""
        self._losing = True

    def stall(self) -> None:
        """From now on, holds back everything, without an error."""
        self._passing.clear()

    def flow(self) -> None:
        """Ends `stall`; what was held back arrives."""
        self._passing.set()

    def cut(self) -> None:
        """Breaks every connection, and lets new ones through."""
        self._losing = False
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.close()
        self.flow()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._server)
                except OSError:
                    client.close()
                    raise
                self._ends += [client, server]
                threading.Thread(target=self._relay, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._relay, args=(server, client, True), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError), source:
            while data := source.recv(1 << 16):
                self._passing.wait()
                if not (answers and self._losing):
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
