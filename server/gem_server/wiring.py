"""The parts of a server, wired together: who needs what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from gem_api.process.logs import Logger
from gem_api.timeline import Timeline

from gem_server.apply_loop import ApplyLoop
from gem_server.config import ServerConfig
from gem_server.core.state_machine import Core
from gem_server.durability.checkpointer import Checkpointer
from gem_server.durability.group_commit import Durability, GroupCommit
from gem_server.durability.journal import Journal
from gem_server.durability.log_file import LogFile
from gem_server.durability.metrics import LogMetrics
from gem_server.durability.resume import lock_directory, make_core, make_log
from gem_server.endpoint import Endpoint
from gem_server.event_loop import running_loop
from gem_server.intake import messages
from gem_server.intake.calls import Calls
from gem_server.intake.intake import Intake
from gem_server.intake.turns import Turns
from gem_server.intake.uploads import Uploads
from gem_server.lane.lane import Lane
from gem_server.lane.listener import Listener
from gem_server.rpc.admin import AdminServicer
from gem_server.rpc.training import TrainingServicer
from gem_server.rules.threads import Threads
from gem_server.telemetry.history import open_history
from gem_server.telemetry.metrics import Metrics, ServerRegistry
from gem_server.telemetry.progress import Progress, Traffic
from gem_server.telemetry.rpc_metrics import RpcMetrics
from gem_server.telemetry.run_view import RunView
from gem_server.telemetry.traces import Traces

Clock = Callable[[], float]


class Wiring:
    """All parts of a server, each made from the ones before it. None of them runs yet.

    Args:
        config: The server's configuration.
        clock: Returns monotonic seconds.
        wall: Returns Unix seconds.
        logger: The server's logger.
        stop: Begins the server's graceful shutdown; called with the reason.
        opened: Receives what must be closed if the start fails.

    Raises:
        StartError: Wrong settings, an address in use, or no usable checkpoint.

    Attributes:
        outdated: Whether this start has changed hyperparameters that the run's workers use.
        directory_lock: Keeps other servers out of the checkpoint directory; None without one.
        history: Writes the run's history; None if none is kept.
        group_commit: Writes the log; None if none is kept.
        view: The run's status, rates and curves.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Clock,
        wall: Clock,
        logger: Logger,
        stop: Callable[[str], None],
        opened: ExitStack,
    ) -> None:
        self.registry = ServerRegistry(config.range)
        # The addresses first. If they are in use, the files may belong to another server and must stay untouched.
        self.endpoint = Endpoint(config, self.registry, logger)
        self.directory_lock = lock_directory(config.checkpoint_dir, logger, config.resume) if config.checkpoint_dir else None
        if self.directory_lock:
            opened.enter_context(self.directory_lock)

        self.core, last_record, self.outdated, written = make_core(config, clock, logger)
        core = self.core
        core.rule.use_threads(Threads(config.apply_threads))

        calls = Calls(core.leases.owner)
        listener = Listener(config.lane_address, config.memory_socket, clock, logger, insist=config.lane_listen is not None)
        opened.callback(listener.close)
        history = config.history_file
        self.history = open_history(history, core.next_ticket, wall, logger, written is not None) if history else None
        if self.history:
            opened.callback(self.history.close)
        self.progress, self.traffic = new_progress(core, clock(), wall(), written), Traffic()
        unix = lambda at: wall() - clock() + at  # noqa: E731
        certificates = self.endpoint.certificates
        self.metrics = Metrics(
            self.registry, core, self.progress, self.traffic, self._queue_length, unix,
            lane=bool(listener.port), certificate_ends=certificates.ends if certificates else dict,
            waiting_for_memory=lambda: self.uploads.waiting_for_memory,
        )  # fmt: skip
        self.traces = Traces(core, unix)
        observers = [self.progress.applied, self.metrics.applied]
        if self.history:
            observers.append(self.history.applied)
            self.progress.evaluation, self.progress.keep = self.history.evaluations.last, self.history.evaluations.add
        self.apply_loop = ApplyLoop(core, clock, observers, [self.progress.waited, self.metrics.waited])

        log = make_log(config, core.run_id, last_record)
        self.group_commit = self._new_group_commit(*log, logger, clock) if log else None
        self.checkpointer = Checkpointer(
            config.checkpoint_dir, config.checkpoint_keep, core, self.apply_loop, self.progress, clock, logger,
            before_write=self.history.flush if self.history else lambda: None,
            after_write=self.group_commit.base_checkpoint_written if self.group_commit else lambda: None,
            journal=self.group_commit.journal if self.group_commit else None, log_limit=config.log_limit,
        )  # fmt: skip

        durability = self.group_commit or Durability()
        loop, workers = running_loop(), lambda: len(core.leases.live)
        self.uploads = Uploads(core.memory, loop, clock, workers, durability.hurry)
        self.replies = Turns[object](lambda turn: object(), lambda slot: None, loop, clock, workers)
        self.view = RunView(
            core, self.progress, clock, self.history.earlier if self.history else Timeline(),
            queue_length=self._queue_length, stall=lambda: messages.stall(durability.stall, clock()), peers=config.peers,
        )  # fmt: skip
        self.intake = Intake(
            core, self.apply_loop, self.progress, calls, durability, self.uploads, self.replies,
            self.traffic, RpcMetrics(self.registry, clock), self.traces, clock, logger,
        )  # fmt: skip
        self.lane = Lane(listener, self.intake, certificates)
        self.training = TrainingServicer(self.intake, self.view, listener.offer, config.peers)
        admin = AdminServicer(self.checkpointer, self.apply_loop, core.quarantine, stop, logger)
        self.endpoint.add_services(self.training, admin, self.intake)
        self.endpoint.show(self.view)

    def why_stalled(self) -> str:
        """The reason why no commit can be acknowledged at present; empty if they can. From any thread."""
        stall = self.group_commit.stall if self.group_commit else None
        return f"stalled: {stall.why}" if stall is not None else ""

    def _queue_length(self) -> int:
        return self.apply_loop.queue_length

    def _new_group_commit(self, journal: Journal, file: LogFile, logger: Logger, clock: Clock) -> GroupCommit:
        metrics = LogMetrics(self.registry, journal)
        return GroupCommit(journal, file, logger, clock, metrics.flushed, lambda: self.checkpointer.write())


def new_progress(core: Core, now: float, unix: float, written: float | None) -> Progress:
    """A resumed run begins with the checkpoint that it was restored from, which was `written` before `unix`, the present."""
    progress = Progress(now, lambda worker: core.leases.named(worker) is not None)
    if written is not None:
        progress.checkpointed(core.central.version, now - max(0.0, unix - written))
    return progress
