"""A real server on a real socket, in a thread of the test's process, so that a test can inspect it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog
from gem_api.hyperparameters import Hyperparameters
from gem_server.config import ServerConfig
from gem_server.event_loop import DecidingLoop
from gem_server.server import Server

from kit.ports import free_address

T = TypeVar("T")
_ANY = "127.0.0.1:0"
DEADLINE = 120.0  # seconds that a condition may take on a busy machine


class Clock:
    """Monotonic seconds that a test can move forward.

    Args:
        look: Called at every `step` of seconds on the way: the server runs meanwhile, and is not one that stood still.
    """

    def __init__(self, step: float = math.inf, look: Callable[[], object] = lambda: None) -> None:
        self.ahead = 0.0
        self._step, self._look = step, look

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def advance(self, seconds: float) -> None:
        while seconds > 0:
            self.ahead += min(seconds, self._step)
            seconds -= self._step
            self._look()

    def jump(self, seconds: float) -> None:
        """Moves the clock forward while the server is suspended."""
        self.ahead += seconds


class Live:
    """A running server. `core` is its state machine; read it only through `on_loop`, never on the test's thread.

    Attributes:
        address: "127.0.0.1:port".
        clock: The server's clock.
        server: The wired parts.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.clock = Clock(config.lease_seconds / 4, self._look)
        self._loop: asyncio.AbstractEventLoop
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._error: BaseException | None = None
        self.server: Server
        self._thread.start()
        self._started.result(DEADLINE)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def core(self) -> Any:
        return self.server.core

    def on_loop(self, look: Callable[[], T]) -> T:
        """Calls `look` on the server's thread, between two steps of its event loop."""

        async def call() -> T:
            return look()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(DEADLINE)

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensor frames that it has sent."""
        return self.on_loop(lambda: self.server.wiring.traffic.sent)

    @property
    def lanes(self) -> int:
        """Connections to its lanes that it has accepted and not closed."""
        return self.on_loop(lambda: self.server.wiring.lane.connections)

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of a sample of its metrics; None if there is none."""
        return self.on_loop(lambda: self.server.registry.get_sample_value(name, labels))

    def _look(self) -> None:
        with suppress(RuntimeError):  # it has ended, and closed its loop
            self.on_loop(lambda: self.core.leases.extend_after_suspension(self.clock()))

    def stop(self, why: str = "test") -> None:
        """Stops gracefully and waits for the end. Does nothing the second time. Raises what the server ended with."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it was drained, and has just closed its loop
                self._loop.call_soon_threadsafe(self.server.stop, why)
            self._thread.join(DEADLINE)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            with asyncio.Runner(
                loop_factory=DecidingLoop
            ) as runner:  # as the command does: what is left at the end is cancelled
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            self._error = error

    async def _serve(self) -> None:
        listen = free_address() if self.config.listen == _ANY else self.config.listen
        self.server = Server(replace(self.config, listen=listen), self.clock, time.time, structlog.get_logger())
        await self.server.start()
        self._started.set_result(None)
        await self.server.stopped()


def config(
    settings: Hyperparameters | None = None, *, checkpoint_dir: Path | None = None, resume: bool = False, **changes: Any
) -> ServerConfig:
    """A server's configuration for tests: a free port, no metrics port, checkpoints only on request and at the end."""
    base = ServerConfig(
        hyperparameters=settings or Hyperparameters(),
        listen=_ANY,
        metrics_listen="",
        checkpoint_dir=checkpoint_dir,
        checkpoint_interval=0.0,
        resume=resume,
        lease_seconds=60.0,
        memory_limit=0,
        memory_socket="",
        lane_listen=_ANY,
    )
    return replace(base, **changes)


@contextmanager
def serving(configuration: ServerConfig | None = None) -> Iterator[Live]:
    """Runs a server during a `with` block."""
    live = Live(configuration or config())
    try:
        yield live
    finally:
        live.stop()


def wait_until(condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """Waits for a condition to hold and returns its value; fails, naming it, when the time is up."""
    end, pause = time.monotonic() + deadline, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline} s in vain for: {what}"
        pause.wait(0.01)
    return value
