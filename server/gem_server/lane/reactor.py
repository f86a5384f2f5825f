"""Runs many connections on a few threads. Each connection is a generator; it yields what it waits for.

A thread that waits for a connection's next bytes stays with it for a moment, if other threads are free for other connections:
the peer of a fast exchange answers at once, and a hand-over between threads costs more than the wait. With more active
connections than threads, nobody waits: all are served in the order in which they become ready. A client whose bytes never end
has no claim to a thread either: its connection yields TURN now and then.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from enum import Enum
from typing import Any

from gem_api.process.logs import Logger

from gem_server.background import new_thread
from gem_server.event_loop import DecidingLoop

_STAY_MS = 2  # how long a thread waits for one connection alone
SWEEP_SECONDS = 2.0
GRACE_SECONDS = 5.0
QUIET_SECONDS = 0.25  # a client that has its error, and sends nothing for so long, holds up no shutdown


class Wait(Enum):
    """The reason why a connection waits: for its socket, or for others that were ready before."""

    READ = select.EPOLLIN
    WRITE = select.EPOLLOUT
    TURN = 0


Steps = Generator["Wait | Future[Any]", None, None]


class Served:
    """One connection being served.

    Args:
        sock: Its socket, non-blocking.
        steps: The connection. It may be resumed before what it waits for has come; it then waits again.
        wake: The reactor's.

    Attributes:
        give_up_at: When it is closed unless it goes on before, on the reactor's clock; None: it may wait for ever.
        quiet_at: From when on a shutdown does not wait for it, on the reactor's clock; None: it may have a reply to send.
    """

    def __init__(self, sock: socket.socket, steps: Steps, wake: Callable[[Served], None]) -> None:
        self.sock = sock
        self.steps = steps
        self._wake = wake
        self.turn = threading.Lock()  # held by the thread that resumes it
        self.give_up_at: float | None = None
        self.quiet_at: float | None = None
        self.fileno = sock.fileno()
        self.watched = False  # whether the epoll knows it
        self.alone = {wait: select.poll() for wait in (Wait.READ, Wait.WRITE)}
        for wait, poll in self.alone.items():
            poll.register(sock, select.POLLIN if wait is Wait.READ else select.POLLOUT)

    def wake(self) -> None:
        """Has it resumed soon, from any thread, though what it waits for may not have come."""
        self._wake(self)


class Reactor:
    """A fixed number of threads that resume connections.

    Args:
        loop: Its lock guards futures that connections wait for.
        clock: Returns monotonic seconds.
        logger: Reports errors of our own.
        threads: How many.
        failed: Called, on its thread, with what ends one of them.
    """

    def __init__(
        self,
        loop: DecidingLoop,
        clock: Callable[[], float],
        logger: Logger,
        threads: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._logger = logger
        self._epoll = select.epoll()
        self._served: dict[int, Served] = {}
        self._woken: deque[Served] = deque()
        self._bell = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._free_lock = threading.Lock()
        self._free = 0  # threads that wait for any connection
        self._closed = False
        self._sweep_at = 0.0  # on the clock of `time.monotonic`, which the threads' waits follow
        self._threads = [new_thread(f"lane-{n}", self._run, failed) for n in range(threads)]

    @property
    def connections(self) -> int:
        """Connections being served."""
        return len(self._served)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def serve(self, served: Served) -> None:
        """Begins to serve a connection, from any thread."""
        self._served[served.fileno] = served
        served.wake()

    def close(self) -> None:
        """Waits a moment for connections that send something, then ends the threads and closes all connections."""
        end = time.monotonic() + GRACE_SECONDS
        while self._busy() and time.monotonic() < end:
            time.sleep(0.01)
        self._closed = True
        os.eventfd_write(self._bell, len(self._threads))
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for served in list(self._served.values()):
            self._drop(served)
        self._epoll.close()
        os.close(self._bell)

    def _busy(self) -> bool:
        """Whether a connection has a reply to send, or a client still sends although it was told why the lane ends."""
        now = self._clock()
        return any(served.quiet_at is None or now < served.quiet_at for served in list(self._served.values()))

    def _run(self) -> None:
        while not self._closed:
            with self._free_lock:
                self._free += 1
            try:
                events = self._epoll.poll(SWEEP_SECONDS, 1)
            finally:
                with self._free_lock:
                    self._free -= 1
            for fileno, _ in events:
                served = self._next_woken() if fileno == self._bell else self._served.get(fileno)
                if served is not None:
                    with served.turn:
                        self._advance(served)
            self._sweep()

    def _next_woken(self) -> Served | None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:  # another thread was faster
            return None
        try:
            return self._woken.popleft()
        except IndexError:
            return None

    def _advance(self, served: Served) -> None:
        """Resumes a connection until it has to wait for longer."""
        try:
            wait = next(served.steps)
            while isinstance(wait, Future) or self._ready_soon(served, wait):
                if isinstance(wait, Future) and self._wait_for(wait, served):
                    return
                wait = next(served.steps)
            if wait is Wait.TURN:
                served.wake()  # behind those that are ready
            else:
                self._watch(served, wait)
        except StopIteration:
            self._drop(served)
        except Exception:
            self._logger.exception("internal error while serving a lane; please report it")
            self._drop(served)

    def _watch(self, served: Served, wait: Wait) -> None:
        """Has the connection resumed, by one thread, once its socket is ready. Nobody touches it before that."""
        watch = self._epoll.modify if served.watched else self._epoll.register
        served.watched = True
        watch(served.fileno, wait.value | select.EPOLLONESHOT)

    def _ready_soon(self, served: Served, wait: Wait) -> bool:
        """Waits a moment for a connection, unless all other threads are busy."""
        if wait is Wait.TURN:
            self._sweep()  # a client that never waits must not keep others for ever
            return self._free > 0 or not self._others_ready()
        return self._free > 0 and bool(served.alone[wait].poll(_STAY_MS))

    def _others_ready(self) -> bool:
        """Whether a connection is ready that no thread serves."""
        ready = select.poll()
        ready.register(self._epoll, select.POLLIN)
        return bool(ready.poll(0))

    def _wait_for(self, future: Future[Any], served: Served) -> bool:
        """Has the connection resumed once the future is done. Returns False if it is done already."""
        with self._loop.lock:
            if future.done():
                return False
            served.give_up_at = None  # the server keeps the client waiting, not the client the server
            future.add_done_callback(_notice)
            future.add_done_callback(lambda _: served.wake())
            return True

    def wake(self, served: Served) -> None:
        """As `Served.wake`."""
        if not self._closed:
            self._woken.append(served)
            os.eventfd_write(self._bell, 1)

    def _drop(self, served: Served) -> None:
        if self._served.get(served.fileno) is not served:  # a late wake of one whose number another socket has by now
            return
        del self._served[served.fileno]
        try:
            served.steps.close()
        except Exception:
            self._logger.exception("internal error while ending a lane; please report it")
        served.sock.close()  # and the epoll forgets it

    def _sweep(self) -> None:
        """Shuts down connections whose time is up; the thread that serves each then finds its end."""
        now = time.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_SECONDS
        now = self._clock()
        for served in list(self._served.values()):
            if served.give_up_at is not None and served.give_up_at < now:
                shut_down(served.sock)


def _notice(future: Future[Any]) -> None:
    """Looks at a future's error: the connection may wait for it no longer, and asyncio would warn."""
    if not future.cancelled():
        future.exception()


def shut_down(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Ends a connection, from any thread; whoever uses the socket finds its end.

    An SSLSocket's own `shutdown` forgets its encryption: another thread would go on in plain text.
    """
    with suppress(OSError):
        socket.socket.shutdown(sock, how)
