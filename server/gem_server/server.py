"""A server's life: serving, draining, writing the last checkpoint."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from gem_api.errors import CheckpointFailed, Overloaded
from gem_api.named_settings import written
from gem_api.process.addresses import is_loopback, with_port
from gem_api.process.files import advice
from gem_api.process.kernel_network import kernel_settings
from gem_api.process.lifetime import LAUNCHER, ending_signals
from gem_api.process.logs import Logger
from gem_api.schedule import misfit
from gem_api.timeline import SAMPLE_SECONDS

from gem_server.background import new_thread, start_chore
from gem_server.config import ServerConfig, StartError
from gem_server.durability import recovery
from gem_server.rules import is_users, where_raised
from gem_server.security.exposure import how_to_join, what_is_open
from gem_server.telemetry.health import BEAT_SECONDS
from gem_server.warm_up import warm_up
from gem_server.wiring import Wiring

LAG_SECONDS = 0.25  # between two looks at the event loop's lag
REGIONS_SECONDS = 1.0  # between two looks at the shared memory of workers that have left
_COMMITS_WITHOUT_SHARDS = 20  # from which on it is clear that no worker takes shards
_SLOW_SECONDS = 2.0  # what numba has in its cache takes less


async def serve(config: ServerConfig, logger: Logger) -> bool:
    """Serves until SIGTERM, SIGINT, SIGHUP or Drain, then ends gracefully. Returns whether a thread still compiles.

    Raises:
        StartError: Wrong settings, an address in use, no usable checkpoint.
    """
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        loop.call_soon_threadsafe(server.stop, name)

    # Not loop.add_signal_handler: the loop would restore Python's handlers when it closes, and another Ctrl-C during the exit
    # would then change its status. A signal that comes just before the loop waits is noticed when it wakes, within a second.
    # The first handler at once: process 1 of a container gets no signals without one, and to restore a run may take minutes.
    _handle_ending(_once(_stop_restoring))
    try:
        server = Server(config, time.monotonic, time.time, logger)
        _handle_ending(_once(stop))
    except _StoppedEarly as stopped:
        logger.info("stopped before the run was restored", why=str(stopped))
        return False
    try:
        if not await server.start():
            logger.info("stopped before it served")
            return True
        await server.stopped()
        return False
    finally:
        _handle_ending(signal.SIG_IGN)


class _StoppedEarly(BaseException):
    """A signal ends the server before it serves. Nothing else may catch it."""


def _stop_restoring(name: str) -> None:
    raise _StoppedEarly(name)


Handler = Callable[[int, FrameType | None], None]


def _once(act: Callable[[str], None]) -> Handler:
    """A handler that calls `act` with the name of the first signal, and has the others ignored. Until they are, it returns at
    once: if each signal interrupted the handler of the one before it, a flood of them would be an endless recursion."""
    heard = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if not heard:
            heard = True
            _handle_ending(signal.SIG_IGN)
            act(signal.Signals(number).name)

    return handle


def _handle_ending(handler: Handler | signal.Handlers) -> None:
    for number in ending_signals():
        signal.signal(number, handler)


class Server:
    """A server's life. Its parts are made and resumed with it, and run from `start` to the end of `stopped`.

    Args:
        config: The server's configuration.
        clock: Returns monotonic seconds.
        wall: Returns Unix seconds.
        logger: The server's logger.

    Raises:
        StartError: Wrong settings, an address in use, or no usable checkpoint.

    Attributes:
        wiring: Its parts.
        core: The state machine.
        registry: Its metrics.
        port: The port that gRPC is served on.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float], wall: Callable[[], float], logger: Logger) -> None:
        config.validate()
        self._config, self._logger = config, logger
        self._stop = asyncio.Event()
        with ExitStack() as opened:  # a start that fails closes its files and sockets
            self.wiring = Wiring(config, clock, wall, logger, self.stop, opened)
            self.core, self.registry, self.port = self.wiring.core, self.wiring.registry, self.wiring.endpoint.port
            self._begin_log()
            self._end_unfit_leases()
            opened.pop_all()
        self._said_complete = self._checked_schedule = self._checked_end = False
        self._begun = self.core.central.progress  # a resumed run's, at this start
        self._chores: list[asyncio.Task[None]] = []
        self._applying: asyncio.Task[None]  # from `start` on
        self._logging: asyncio.Task[None] | None = None

    def _begin_log(self) -> None:
        """Writes the checkpoint that the write-ahead log follows, if there is a log and θ has a value. Raises StartError."""
        if self.wiring.group_commit is None or not self.core.central.initialized:
            return
        try:
            self.wiring.checkpointer.write_now()
            recovery.begin_life(self.core)
        except CheckpointFailed as error:
            raise StartError(
                f"can't write the checkpoint that the write-ahead log starts from: {error}"
                + ", or keep fewer checkpoints (checkpoint_keep)" * ("free space" in str(error))
            ) from error

    def _end_unfit_leases(self) -> None:
        """Ends the leases of a resumed run whose workers can't continue as they are. The write-ahead log must exist by now,
        because it records this."""
        owned = self.wiring.endpoint.access.asks
        if ended := self.core.end_unfit(lambda lease: bool(lease.owner) != owned):
            self._logger.warning(
                "credentials are now required, or no longer required: the run's workers must register again",
                leases=len(ended),
            )  # fmt: skip
        if self.wiring.outdated and (ended := self.core.end_unfit(lambda _: True)):
            self._logger.warning(
                "hyperparameters that workers use have changed: the run's workers must register again", leases=len(ended)
            )

    async def start(self) -> bool:
        """Compiles the update pass, then serves. Returns False if it was stopped while it compiled: then it is closed, and a
        thread still compiles. Raises StartError if the user's own rule fails."""
        try:
            if not await self._warm_up():
                await self._close()
                return False
            await self.wiring.endpoint.start(self.wiring.why_stalled)
            self.wiring.lane.start()
        except BaseException:
            await self._close()
            raise
        self.core.leases.begin(self.wiring.intake.clock())
        self._applying = start_chore("apply", self.wiring.apply_loop.run, self._logger)
        self._chores = [start_chore(name, chore, self._logger) for name, chore in self._new_chores()]
        if self.wiring.group_commit:
            self._logging = start_chore("log", self.wiring.group_commit.run, self._logger)
        self._log_start()
        return True

    async def _warm_up(self) -> bool:
        """Compiles in a thread, because that can take a minute and no signal interrupts it. Returns False if `stop` was called
        meanwhile."""
        rule = self.core.rule
        compiled: Future[None] = Future()

        def compile_pass() -> None:
            warm_up(rule)
            compiled.set_result(None)

        new_thread("warm-up", compile_pass, compiled.set_exception).start()
        stopping: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
        either: list[asyncio.Future[Any]] = [asyncio.wrap_future(compiled), stopping]
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=_SLOW_SECONDS)
        if not done:
            self._logger.info("loading the update pass, or compiling it: in a minute or so, once for each installation")
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not compiled.done():
            return False
        try:
            compiled.result()
        except Exception as error:
            if not is_users(rule):
                raise
            raise StartError(
                f"rule {self.core.settings.rule} raised {where_raised(rule, error)} on a model of one parameter with a "
                "gradient of zero: fix the rule"
            ) from error
        return True

    def _new_chores(self) -> Iterator[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """The background tasks besides applying commits and writing the log, with their names. None ends by itself."""
        config, wiring = self._config, self.wiring
        yield "leases", partial(_repeat, min(1.0, config.lease_seconds / 4), wiring.training.expire_leases)
        yield "completion", partial(_repeat, 1.0, self._note_completion)
        yield "schedule", partial(_repeat, 1.0, self._check_schedule)
        yield "end", partial(_repeat, 1.0, self._check_end)
        yield "view", partial(_repeat, SAMPLE_SECONDS, wiring.view.sample)
        if wiring.endpoint.http_address:
            yield "health", partial(_repeat, BEAT_SECONDS, wiring.endpoint.health.beat)
            yield "lag", partial(_measure_lag, wiring.metrics.lagged)
        yield "lane", wiring.lane.run
        yield "regions", partial(_repeat, REGIONS_SECONDS, wiring.lane.regions.take_back)
        yield "turns", partial(_repeat, 0.1, wiring.intake.end_slow_turns)
        if wiring.history:
            yield "history", partial(_repeat_in_thread, 1.0, wiring.history.flush)
        if config.checkpoint_dir and config.durability != "memory" and (config.checkpoint_interval or wiring.group_commit):
            yield "checkpoints", partial(wiring.checkpointer.every, config.checkpoint_interval or math.inf)

    def _log_start(self) -> None:
        config, core, wiring = self._config, self.core, self.wiring
        http = wiring.endpoint.http_address
        if config.checkpoint_dir is None:
            self._logger.warning("no --checkpoint-dir: nothing is saved, and the model is lost when this process ends")
        if core.rule.caution:
            self._logger.warning(core.rule.caution)
        lane, exposed = config.lane_address, config.metrics_listen
        for what, how_to_close in what_is_open(config.listen, lane, exposed, config.tokens, config.tls):
            self._logger.warning(f"OPEN: {what}", close=how_to_close)
        self._log_kernel_settings()
        address = with_port(config.listen, self.port)
        self._logger.info(
            "serving", address=address, lane=wiring.lane.listener.address or "off",
            metrics=http or "none", page=f"http://{http}/" if http else "none",
            memory_socket=config.memory_socket or "off", run=core.run_id, version=core.central.version,
            rule=core.settings.rule,
        )  # fmt: skip
        if core.part.leads and LAUNCHER not in os.environ:  # gem-train starts the workers itself
            self._logger.info(how_to_join(address, config.tokens, config.tls))

    def _log_kernel_settings(self) -> None:
        """Names the kernel's settings that slow commits of other machines down, if other machines can reach this one."""
        reachable = not all(map(is_loopback, filter(None, (self._config.listen, self._config.lane_address))))
        slow = [setting.name for setting in kernel_settings() if setting.advice] if reachable else []
        if slow:
            self._logger.info(
                "this machine's kernel may slow commits down on a network: gem-ctl doctor says what to set", settings=slow
            )

    def _note_completion(self) -> None:
        """Says once that the run is complete, when its workers have left."""
        core = self.core
        complete = core.part.leads and not core.leases.live and core.complete
        if complete and not self._said_complete:
            self._logger.info(
                "run complete: save the model with `gem-ctl pull model.safetensors`, end the server with `gem-ctl drain`. To "
                "go on, start it with --resume, more --epochs and, if it has one, a longer --schedule; a new run needs another "
                "folder for its checkpoints, or in containers `docker compose down --volumes`",
                version=core.central.version,
            )  # fmt: skip
        self._said_complete = complete

    def _check_schedule(self) -> None:
        """Warns once if the learning rate's schedule and the run do not end together."""
        commits = None if self._checked_schedule else self.core.expected_commits
        if commits is None:
            return
        self._checked_schedule = True
        if what := misfit(self.core.settings, commits, self._begun):
            length = max(1, round(commits) - self.core.settings.warmup_versions)
            self._logger.warning(what, schedule=written(replace(self.core.settings, decay_versions=length))["schedule"])

    def _check_end(self) -> None:
        """Warns once if the run has epochs and no worker takes shards, which are what epochs are counted by."""
        core, settings = self.core, self.core.settings
        if self._checked_end or not core.part.leads or core.central.version < _COMMITS_WITHOUT_SHARDS:
            return
        self._checked_end = True
        if settings.epochs and not settings.steps and not core.ledger.samples:
            self._logger.warning(
                "the workers' loops draw their own samples, so --epochs does not end this run: take the batches from a "
                "ShardSampler; or end the loops themselves, and start the server with --until-stopped or --steps",
                epochs=settings.epochs,
            )  # fmt: skip

    def stop(self, why: str) -> None:
        """Begins the graceful shutdown; `stopped` completes it."""
        if not self._stop.is_set():
            self._stop.set()
            self._logger.info("stopping: finishing queued commits", why=why)

    async def stopped(self) -> None:
        """Waits until `stop` is called. Then applies the queued commits, replies to their workers, and writes the last
        checkpoint.

        Raises:
            StartError: The last checkpoint or the log could not be written.
            Exception: A background task failed, and so ended the server.
        """
        await self._until_stop_or_failure()
        await self.wiring.endpoint.report_ending()
        self.wiring.training.drain()
        try:
            await self._finish_queue()
            log_error = await self._end_log()
            await self._write_last(log_error)
        finally:
            await self._close()
        for chore in self._chores:
            if chore.done() and not chore.cancelled():
                chore.result()  # a chore never ends by itself: raises what ended it
        self._logger.info("stopped")

    async def _until_stop_or_failure(self) -> None:
        """Returns when `stop` was called, or one of the tasks has failed."""
        stopping = asyncio.create_task(self._stop.wait())
        logging = [self._logging] if self._logging else []
        await asyncio.wait([stopping, self._applying, *self._chores, *logging], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _finish_queue(self) -> None:
        for chore in self._chores:
            chore.cancel()
        self.wiring.apply_loop.close()
        await self._applying

    async def _end_log(self) -> Exception | None:
        """Acknowledges what was applied, then closes the write-ahead log. Returns the error if the log can't be written."""
        group_commit = self.wiring.group_commit
        if group_commit is None or self._logging is None:
            return None
        try:
            if self._logging.done():
                self._logging.result()  # raises what ended it
            with suppress(Overloaded):  # the disk is full: the waiting calls got this error, and retry with the next server
                await group_commit.finished()
        except Exception as error:
            return error
        finally:
            self._logging.cancel()
            await group_commit.close()
        return None

    async def _write_last(self, log_error: Exception | None) -> None:
        """Writes the last checkpoint, also after an error of the log: it holds what was acknowledged, even if the log is gone.
        Raises StartError after that error, or if the checkpoint can't be written."""
        log = f"can't write the write-ahead log: {str(log_error) or type(log_error).__name__}; " if log_error else ""
        try:
            await self.wiring.checkpointer.write_last()
        except CheckpointFailed as error:
            left = self.wiring.checkpointer.what_is_left()
            raise StartError(f"{log}the last checkpoint could not be written; {left}: {error}") from error
        if log_error:
            what = advice(log_error, "check the disk" if isinstance(log_error, OSError) else "see the lines above")
            raise StartError(f"{log}the last checkpoint has all commits: {what}, then start again with --resume")

    async def _close(self) -> None:
        wiring = self.wiring
        await wiring.endpoint.close()
        await asyncio.to_thread(wiring.lane.close)
        await asyncio.to_thread(wiring.traces.close)
        if wiring.history:
            await asyncio.to_thread(wiring.history.close)
        if wiring.directory_lock:
            wiring.directory_lock.close()


async def _repeat(seconds: float, chore: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        chore()


async def _measure_lag(observe: Callable[[float], None]) -> None:
    """Reports how much later than due the event loop goes on: so long, something else held it."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        observe(max(0.0, loop.time() - due))


async def _repeat_in_thread(seconds: float, chore: Callable[[], None]) -> None:
    """As `_repeat`, for chores that may wait for the disk."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(chore)
