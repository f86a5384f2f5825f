"""A server's life: wired together, serving, draining, writing the last checkpoint."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

from gem_api.errors import CheckpointFailed, Overloaded
from gem_api.process.logs import Logger
from prometheus_client.registry import CollectorRegistry

from gem_server.apply_loop import ApplyLoop
from gem_server.config import ServerConfig, StartError
from gem_server.core.state_machine import Core
from gem_server.durability import recovery
from gem_server.durability.checkpointer import Checkpointer
from gem_server.durability.group_commit import GroupCommit, Unlogged
from gem_server.durability.journal import Journal
from gem_server.durability.metrics import LogMetrics
from gem_server.durability.resume import lock_directory, make_core, make_journal
from gem_server.endpoint import Endpoint
from gem_server.rpc.admin import AdminServicer
from gem_server.rpc.calls import Calls
from gem_server.rpc.memory_socket import MemorySocket
from gem_server.rpc.training import TrainingServicer
from gem_server.rules import is_users, where_raised
from gem_server.rules.threads import Threads
from gem_server.security.exposure import what_is_open
from gem_server.telemetry.history import open_history
from gem_server.telemetry.metrics import Metrics
from gem_server.telemetry.progress import Progress, Traffic
from gem_server.warm_up import warm_up

_ENDING = (signal.SIGTERM, signal.SIGINT)


async def serve(config: ServerConfig, logger: Logger) -> None:
    """Serves until SIGTERM, SIGINT or Drain, then ends gracefully.

    Raises:
        StartError: Wrong settings, an address in use, no usable checkpoint.
    """
    server = Server(config, time.monotonic, time.time, logger)
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(server.stop, signal.Signals(number).name)

    # Not loop.add_signal_handler: the loop would restore Python's handlers when it closes, and another Ctrl-C during the exit
    # would then change its status.
    for number in _ENDING:
        signal.signal(number, stop)
    try:
        await server.start()
        await server.stopped()
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)


class Server:
    """All parts of a server, wired together.

    Args:
        config: The server's configuration.
        clock: Returns monotonic seconds.
        wall: Returns Unix seconds.
        logger: The server's logger.

    Raises:
        StartError: Wrong settings, an address in use, or no usable checkpoint.

    Attributes:
        core: The state machine.
        registry: Its metrics.
        port: The port that gRPC is served on.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float], wall: Callable[[], float], logger: Logger) -> None:
        config.validate()
        self._config, self._logger, self._clock = config, logger, clock
        self.registry = CollectorRegistry()
        # The addresses first. If they are in use, the files may belong to another server and must stay untouched.
        self._endpoint = Endpoint(config, self.registry, logger)
        self.port = self._endpoint.port
        with ExitStack() as opened:  # a start that fails closes its files and sockets
            self._lock = lock_directory(config.checkpoint_dir) if config.checkpoint_dir else None
            if self._lock:
                opened.enter_context(self._lock)
            self.core, last_record, outdated = make_core(config, clock, logger)
            self._prepare(self.core)

            calls = Calls(self.core.leases.owner)
            self._memory_socket = _open_memory_socket(config.memory_socket, self.core, logger)
            opened.callback(self._memory_socket.close)
            self._history = open_history(config.history, self.core.next_ticket, wall, logger) if config.history else None
            if self._history:
                opened.callback(self._history.close)
            progress, traffic = self._new_progress(), Traffic()
            metrics = Metrics(
                self.registry,
                self.core,
                progress,
                traffic,
                lambda: self._apply_loop.queue_length,
                lambda at: wall() - clock() + at,
            )
            observers = [progress.applied, metrics.applied, *([self._history.applied] if self._history else [])]
            self._apply_loop = ApplyLoop(self.core, clock, observers)

            journal = make_journal(config, self.core.run_id, last_record)
            self._group_commit = self._make_group_commit(journal) if journal else None
            self._checkpointer = self._make_checkpointer(journal, progress)
            if self._group_commit:
                self._begin_log()
            self._end_unfit_leases(self._endpoint.access.asks, outdated)
            opened.pop_all()

        self._servicer = TrainingServicer(
            self.core, self._apply_loop, progress, calls, self._memory_socket, self._group_commit or Unlogged(), traffic, clock,
            logger,
        )  # fmt: skip
        admin = AdminServicer(self._checkpointer, self._apply_loop, self.core.quarantine, self.stop, logger)
        self._endpoint.add_services(self._servicer, admin, calls)
        self._stop = asyncio.Event()
        self._chores: list[asyncio.Task[None]] = []
        self._applying: asyncio.Task[None]  # from `start` on
        self._logging: asyncio.Task[None] | None = None

    def _prepare(self, core: Core) -> None:
        core.leases.looked(self._clock())  # restored leases do not expire because this start takes long
        core.rule.use_threads(Threads(self._config.apply_threads))

    def _new_progress(self) -> Progress:
        core = self.core
        progress = Progress(self._clock(), lambda worker: core.leases.named(worker) is not None)
        if core.central.initialized:
            progress.checkpointed(core.central.version, self._clock())
        return progress

    def _make_group_commit(self, journal: Journal) -> GroupCommit:
        metrics = LogMetrics(self.registry, journal)
        return GroupCommit(journal, self._logger, self._clock, metrics.flushed, lambda: self._checkpointer.write())

    def _make_checkpointer(self, journal: Journal | None, progress: Progress) -> Checkpointer:
        config = self._config
        return Checkpointer(
            config.checkpoint_dir, config.checkpoint_keep, self.core, self._apply_loop, progress, self._clock, self._logger,
            before=self._history.flush if self._history else lambda: None,
            notified=self._group_commit.based if self._group_commit else lambda: None,
            journal=journal, log_limit=config.log_limit,
        )  # fmt: skip

    def _begin_log(self) -> None:
        """Writes the checkpoint that the write-ahead log follows, if θ has a value. Raises StartError."""
        if not self.core.central.initialized:
            return
        try:
            self._checkpointer.write_now()
            recovery.begin_life(self.core)
        except CheckpointFailed as error:
            raise StartError(f"can't write the checkpoint that the write-ahead log starts from: {error}") from error

    def _end_unfit_leases(self, owned: bool, outdated: bool) -> None:
        """Ends the leases of a resumed run whose workers can't continue as they are. The write-ahead log must exist by now,
        because it records this."""
        if ended := self.core.end_unfit(lambda lease: bool(lease.owner) != owned):
            self._logger.warning(
                "credentials are now required, or no longer required: the run's workers must register again",
                leases=len(ended),
            )  # fmt: skip
        if outdated and (ended := self.core.end_unfit(lambda _: True)):
            self._logger.warning(
                "hyperparameters that workers use have changed: the run's workers must register again", leases=len(ended)
            )

    async def start(self) -> None:
        """Compiles the update pass, then serves. Raises StartError if the user's own rule fails."""
        try:
            self._warm_up()
            await self._endpoint.start()
        except BaseException:
            await self._close()
            raise
        self._applying = asyncio.create_task(self._apply_loop.run())
        self._chores = [asyncio.create_task(chore) for chore in self._new_chores()]
        if self._group_commit:
            self._logging = asyncio.create_task(self._group_commit.run())
        self._log_start()

    def _warm_up(self) -> None:
        rule = self.core.rule
        try:
            warm_up(rule, self._logger)
        except Exception as error:
            if not is_users(rule):
                raise
            raise StartError(
                f"rule {self.core.settings.rule} raised {where_raised(rule, error)} on a model of one parameter with a "
                "gradient of zero: fix the rule"
            ) from error

    def _new_chores(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The background tasks besides applying commits. None ends by itself."""
        config = self._config
        yield _repeat(min(1.0, config.lease_seconds / 4), self._servicer.expire_leases)
        yield self._memory_socket.run()
        yield _repeat(1.0, self._memory_socket.take_back)
        if self._history:
            yield _repeat_in_thread(1.0, self._history.flush)
        if config.checkpoint_dir and config.durability != "memory" and (config.checkpoint_interval or self._group_commit):
            yield self._checkpointer.every(config.checkpoint_interval or math.inf)

    def _log_start(self) -> None:
        config, core = self._config, self.core
        if config.checkpoint_dir is None:
            self._logger.warning("no --checkpoint-dir: nothing is saved, and the model is lost when this process ends")
        for what, how_to_close in what_is_open(config.listen, config.metrics_listen, config.tokens, config.tls):
            self._logger.warning(f"OPEN: {what}", close=how_to_close)
        self._logger.info(
            "serving", address=f"{config.listen.rpartition(':')[0]}:{self.port}", metrics=config.metrics_listen or "none",
            memory_socket=config.memory_socket or "off", run=core.run_id, version=core.central.version,
            rule=core.settings.rule, learning_rate=core.settings.learning_rate,
        )  # fmt: skip

    def stop(self, why: str) -> None:
        """Begins the graceful shutdown; `stopped` completes it."""
        if not self._stop.is_set():
            self._logger.info("stopping: finishing queued commits", why=why)
            self._stop.set()

    async def stopped(self) -> None:
        """Waits until `stop` is called. Then applies the queued commits, replies to their workers, and writes the last
        checkpoint.

        Raises:
            StartError: The last checkpoint could not be written.
        """
        await self._until_stop_or_failure()
        await self._endpoint.report_ending()
        self._servicer.drain()
        try:
            await self._finish_queue()
            await self._end_log()
            await self._checkpointer.write_last()
        except CheckpointFailed as error:
            raise StartError(f"the last checkpoint could not be written; the previous one is intact: {error}") from error
        finally:
            await self._close()
        self._logger.info("stopped")

    async def _until_stop_or_failure(self) -> None:
        """Returns when `stop` was called, or one of the tasks has failed."""
        stopping = asyncio.create_task(self._stop.wait())
        logging = [self._logging] if self._logging else []
        await asyncio.wait([stopping, self._applying, *self._chores, *logging], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _finish_queue(self) -> None:
        for chore in self._chores:
            if chore.done():
                chore.result()  # a chore never ends by itself: raises what ended it
            chore.cancel()
        self._apply_loop.close()
        await self._applying

    async def _end_log(self) -> None:
        """Acknowledges what was applied, then closes the write-ahead log. Raises StartError if the disk has failed."""
        if self._group_commit is None or self._logging is None:
            return
        try:
            if self._logging.done():
                self._logging.result()  # raises what ended it
            with suppress(Overloaded):  # the disk is full: the waiting calls got this error, and retry with the next server
                await self._group_commit.settled()
        except OSError as error:
            raise StartError(f"can't write the write-ahead log: {error}; acknowledged commits are in it") from error
        finally:
            self._logging.cancel()
            self._group_commit.close()

    async def _close(self) -> None:
        self._memory_socket.close()
        await self._endpoint.close()
        if self._history:
            await asyncio.to_thread(self._history.close)
        if self._lock:
            self._lock.close()


def _open_memory_socket(address: str, core: Core, logger: Logger) -> MemorySocket:
    try:
        return MemorySocket(address, core, logger)
    except OSError as error:
        raise StartError(f"can't share memory at {address} (--memory-socket): {error}") from None


async def _repeat(seconds: float, chore: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        chore()


async def _repeat_in_thread(seconds: float, chore: Callable[[], None]) -> None:
    """As `_repeat`, for chores that may wait for the disk."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(chore)
