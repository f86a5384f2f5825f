"""A server's life: put together, serve, drain, write the last checkpoint."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from gem_api.errors import CheckpointFailed, Overloaded
from gem_api.methods import ADMIN, MAX_MESSAGE_BYTES, TRAINING
from gem_api.process.addresses import names_a_port
from gem_api.process.exposition import serve_metrics
from gem_api.process.logs import Logger
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client.registry import CollectorRegistry

from gem_server.apply_loop import ApplyLoop, Observer
from gem_server.config import ServerConfig, StartError
from gem_server.durability import recovery
from gem_server.durability.checkpointer import Checkpointer
from gem_server.durability.group_commit import GroupCommit, Unlogged
from gem_server.durability.journal import Journal
from gem_server.durability.metrics import LogMetrics
from gem_server.durability.resume import lock_directory, make_core, make_journal
from gem_server.rpc.admin import AdminServicer
from gem_server.rpc.calls import Calls
from gem_server.rpc.handlers import rpc_handlers
from gem_server.rpc.memory_socket import MemorySocket
from gem_server.rpc.training import TrainingServicer
from gem_server.rules import is_users, where_raised
from gem_server.rules.threads import Threads
from gem_server.security.access import Access
from gem_server.security.exposure import what_is_open
from gem_server.security.tls import Certificates
from gem_server.security.tokens import TokenFile
from gem_server.telemetry.history import open_history
from gem_server.telemetry.metrics import Metrics
from gem_server.telemetry.progress import Progress
from gem_server.warm_up import warm_up

ANSWER_GRACE_SECONDS = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers on one port would share out the workers by chance
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)


async def serve(config: ServerConfig, log: Logger) -> None:
    """Serves until SIGTERM, SIGINT or Drain, then ends gracefully.

    Raises:
        StartError: Wrong settings, an address in use, no usable checkpoint.
    """
    server = Server(config, time.monotonic, time.time, log)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop, number.name)
    await server.start()
    await server.stopped()


class Server:
    """All parts of a server, wired together.

    Args:
        config: How it runs.
        clock: Monotonic seconds.
        wall: Unix seconds.
        log: Its log.

    Raises:
        StartError: An address is in use, wrong settings, or no usable checkpoint.

    Attributes:
        core: The state machine.
        registry: Its metrics.
        port: The port that gRPC is served on.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float], wall: Callable[[], float], log: Logger) -> None:
        self._config = config
        self._log = log
        self.registry = CollectorRegistry()
        # The addresses first: a server that can't have them must leave the files alone, which may be another server's.
        self._grpc = grpc.aio.server(options=_CHANNEL_OPTIONS)
        access, certificates = _credentials(config, log)
        self.port = _bind(self._grpc, config.listen, certificates)
        try:
            serve_metrics(config.metrics_listen, self.registry)
        except ValueError as error:
            raise StartError(str(error)) from None
        self._lock = lock_directory(config.checkpoint_dir) if config.checkpoint_dir else None
        self.core, number, outdated = make_core(config, clock, log)
        core = self.core
        core.leases.looked(clock())  # what this start takes from here on is not charged to restored leases
        core.rule.use_threads(Threads(config.apply_threads))
        progress = Progress(clock(), lambda worker: core.leases.named(worker) is not None)
        calls = Calls(core.leases.owner)
        if core.central.initialized:
            progress.checkpointed(core.central.version, clock())
        observers: list[Observer] = [progress.applied]
        self._apply_loop = ApplyLoop(core, clock, observers)
        try:
            self._memory_socket = MemorySocket(config.memory_socket, core, log)
        except OSError as error:
            raise StartError(f"can't share memory at {config.memory_socket} (--memory-socket): {error}") from None
        self._history = open_history(config.history, core.next_ticket, wall, log) if config.history else None
        journal = make_journal(config, core.run_id, number)
        self._checkpointer = Checkpointer(
            config.checkpoint_dir, config.keep, core, self._apply_loop, progress, clock, log,
            before=self._history.flush if self._history else lambda: None,
            journal=journal, log_limit=config.log_limit,
        )  # fmt: skip
        self._group_commit = self._make_group_commit(journal, clock) if journal else None
        durability = self._group_commit or Unlogged()
        self._end_unfit_leases(access.asks, outdated)
        self._servicer = TrainingServicer(
            core, self._apply_loop, progress, calls, self._memory_socket, durability, clock, log
        )  # fmt: skip
        metrics = Metrics(
            self.registry, core, progress, self._servicer.traffic, lambda: self._apply_loop.queue_length,
            lambda at: wall() - clock() + at,
        )  # fmt: skip
        observers.append(metrics.applied)
        if self._history:
            observers.append(self._history.applied)
        self._stop = asyncio.Event()
        self._health = HealthServicer()
        admin = AdminServicer(self._checkpointer, self._apply_loop, core.quarantine, self.stop, log)
        served = ((TRAINING, self._servicer), (ADMIN, admin))
        handlers = [rpc_handlers(service, servicer, calls, access, log) for service, servicer in served]
        _add_services(self._grpc, handlers, self._health, reflected=not access.asks)
        self._tasks: list[asyncio.Task[None]] = []
        self._logging: asyncio.Task[None] | None = None

    def _end_unfit_leases(self, owned: bool, outdated: bool) -> None:
        """Of workers that the run had before, who can't go on as they are. The log is told, so it must be there already."""
        if ended := self.core.end_unfit(lambda lease: bool(lease.owner) != owned):
            self._log.warning(
                "credentials are asked for now, or no longer: workers of before must register again", leases=len(ended)
            )
        if outdated and (ended := self.core.end_unfit(lambda _: True)):
            self._log.warning("workers go by the settings of before, and must register again", leases=len(ended))

    def _make_group_commit(self, journal: Journal, clock: Callable[[], float]) -> GroupCommit:
        metrics = LogMetrics(self.registry, journal)
        group_commit = GroupCommit(journal, self._log, clock, metrics.flushed, self._checkpointer.write)
        metrics.stalled = lambda: bool(group_commit.trouble)
        self._checkpointer.told = group_commit.based
        if self.core.central.initialized:
            try:
                self._checkpointer.write_now()
                recovery.begin_life(self.core)
            except CheckpointFailed as error:
                raise StartError(f"no checkpoint can be written for the log to follow: {error}") from error
        return group_commit

    async def start(self) -> None:
        """Compiles what is to be compiled, and serves."""
        config, core = self._config, self.core
        try:
            warm_up(core.rule, self._log)
        except Exception as error:
            if not is_users(core.rule):
                raise
            raise StartError(
                f"rule {core.settings.rule} raised {where_raised(core.rule, error)} on a model of one parameter with a "
                "gradient of zero: mend the rule"
            ) from error
        await self._grpc.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        expire = _repeat(min(1.0, config.lease_seconds / 4), self._servicer.expire_leases)
        take_back = _repeat(1.0, self._memory_socket.take_back)
        chores = [self._apply_loop.run(), expire, self._memory_socket.run(), take_back]
        if self._history:
            chores.append(_repeat_in_thread(1.0, self._history.flush))
        if config.checkpoint_dir and config.durability != "memory" and (config.checkpoint_interval or self._group_commit):
            chores.append(self._checkpointer.every(config.checkpoint_interval or math.inf))
        self._tasks = [asyncio.create_task(chore) for chore in chores]
        if self._group_commit:
            self._logging = asyncio.create_task(self._group_commit.run())
        address = f"{config.listen.rpartition(':')[0]}:{self.port}"
        settings = core.settings
        if config.checkpoint_dir is None:
            self._log.warning("no --checkpoint-dir: nothing is saved, and the model is lost when this process ends")
        for what, how_to_close in what_is_open(config.listen, config.metrics_listen, config.tokens, config.tls):
            self._log.warning(f"OPEN: {what}", close=how_to_close)
        self._log.info(
            "serving", address=address, metrics=config.metrics_listen or "none",
            memory_socket=config.memory_socket or "off", run=core.run_id, version=core.central.version,
            rule=settings.rule, learning_rate=settings.learning_rate,
        )  # fmt: skip

    async def _set_health(self, status: int) -> None:
        for name in ("", TRAINING.full_name, ADMIN.full_name):
            await self._health.set(name, status)

    def stop(self, why: str) -> None:
        """Begins the graceful end; `stopped` sees it through."""
        if not self._stop.is_set():
            self._log.info("stopping: finishing what is queued", why=why)
            self._stop.set()

    async def stopped(self) -> None:
        """Waits until told to stop; then applies and answers what is queued, and writes the last checkpoint.

        Raises:
            StartError: The last checkpoint could not be written.
        """
        stopping = asyncio.create_task(self._stop.wait())
        logging = [self._logging] if self._logging else []
        await asyncio.wait([stopping, *self._tasks, *logging], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._servicer.drain()
        applying, *chores = self._tasks
        try:
            for chore in chores:
                if chore.done():
                    chore.result()  # a chore never ends by itself: raises what ended it
                chore.cancel()
            self._apply_loop.close()
            await applying
            await self._end_log()
            await self._checkpointer.write_last()
        except CheckpointFailed as error:
            raise StartError(f"the last checkpoint was not written; the one before it stands: {error}") from error
        finally:
            self._memory_socket.close()
            await self._grpc.stop(ANSWER_GRACE_SECONDS)
            if self._history:
                await asyncio.to_thread(self._history.close)
            if self._lock:
                self._lock.close()
        self._log.info("stopped")

    async def _end_log(self) -> None:
        """Has what was applied acknowledged, and ends the log. Raises StartError where the disk has failed."""
        if self._group_commit is None or self._logging is None:
            return
        try:
            if self._logging.done():
                self._logging.result()  # raises what ended it
            with suppress(Overloaded):  # the disk is full: those who wait were told, and will ask the next server
                await self._group_commit.settled()
        except OSError as error:
            raise StartError(f"the log can't be written: {error}; what was acknowledged is in it") from error
        finally:
            self._logging.cancel()
            self._group_commit.close()


def _credentials(config: ServerConfig, log: Logger) -> tuple[Access, Certificates | None]:
    """Who may call, and what the server shows of itself. Raises StartError where a file is not as it must be."""
    try:
        tokens = TokenFile(config.tokens, log) if config.tokens is not None else None
        certificates = Certificates(config.tls, log) if config.tls is not None else None
    except ValueError as error:
        raise StartError(str(error)) from None
    return Access(tokens, config.tls is not None and config.tls.client_ca is not None), certificates


def _add_services(server: Any, handlers: list[Any], health: HealthServicer, reflected: bool) -> None:
    """Health checks are open to everyone, for containers need them; reflection is, where everything is."""
    server.add_generic_rpc_handlers(handlers)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if not reflected:
        return
    names = [service.full_name for service in (TRAINING, ADMIN, health_pb2.DESCRIPTOR.services_by_name["Health"])]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)


def _bind(server: Any, address: str, certificates: Certificates | None) -> int:
    if not names_a_port(address):
        raise StartError(f"can't listen on {address!r}: give --listen HOST:PORT, such as 127.0.0.1:50051")
    try:
        if certificates is not None:
            return int(server.add_secure_port(address, certificates.credentials()))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        why = str(error).partition(";")[0]
        raise StartError(
            f"can't listen on {address}: the address is in use, not this machine's, or no HOST:PORT ({why})"
        ) from None


async def _repeat(seconds: float, chore: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        chore()


async def _repeat_in_thread(seconds: float, chore: Callable[[], None]) -> None:
    """For chores that may wait for the disk."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(chore)
