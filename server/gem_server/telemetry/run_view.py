"""The one view of a run: its status, rates and curves. `GetStatus`, /status.json and all who draw a run read it here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from gem_api import __version__
from gem_api.formats import CONTRACT
from gem_api.schedule import server_rate
from gem_api.timeline import Rate, Timeline
from gem_api.v1 import training_pb2 as pb

from gem_server.core.leases import Lease
from gem_server.core.state_machine import Core
from gem_server.telemetry.progress import Evaluation, Progress


@dataclass(eq=False)
class RunView:
    """The run, as everyone sees it. Use it on the thread that applies commits.

    Attributes:
        core: The state machine.
        progress: The run's smoothed figures.
        clock: Returns monotonic seconds.
        timeline: The curves; those from before this start of the server, if they are known.
        queue_length: Returns the number of commits in the queue.
        stall: Returns why no commit can be acknowledged; None if they can.
        peers: Addresses of the servers of the other ranges, if this one leads.
    """

    core: Core
    progress: Progress
    clock: Callable[[], float]
    timeline: Timeline = field(default_factory=Timeline)
    queue_length: Callable[[], int] = lambda: 0
    stall: Callable[[], pb.Stall | None] = lambda: None
    peers: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._rate = Rate()
        self._start_version = self._version = self.core.central.version
        begin = self.timeline.begin_version
        self._begin_version = self._start_version if begin is None else max(0, begin - 1)
        self._looked = self.clock()
        self._shown: Evaluation | None = None

    def sample(self) -> None:
        """Adds this moment to the curves; call it every `SAMPLE_SECONDS`. Commits do nothing for it: `Progress` keeps all that
        it reads. Time stands still before the first commit, and while there are no workers."""
        now, version, timeline = self.clock(), self.core.central.version, self.timeline
        passed, self._looked = now - self._looked, now
        self._rate.add(version, now)
        if version == 0 or not (self.core.leases.live or version != self._version):
            return
        timeline.seconds += 0.0 if timeline.begin_version is None else passed
        new = self.progress.evaluation if self.progress.evaluation is not self._shown else None
        self._shown, self._version = self.progress.evaluation, version
        evaluated = {"evaluation_loss": new.loss, "accuracy": new.accuracy} if new else {}
        timeline.add(self._figures(), evaluated)

    def read(self, max_workers: int | None = None, *, curves: bool = False) -> pb.GetStatusResponse:
        """The run's status, with at most `max_workers` of its live workers (the oldest ones), and with its curves if asked."""
        core, progress, now, stall = self.core, self.progress, self.clock(), self.stall()
        evaluation, held = progress.evaluation, core.ledger.held_by_lease()
        leases = islice(core.leases.live.values(), max_workers)
        return pb.GetStatusResponse(
            run_id=core.run_id,
            state=_state(core, progress.draining, stall is not None, now),
            version=core.central.version,
            hyperparameters=core.settings.to_message(),
            parameter_count=core.central.size,
            first_worker=core.leases.first_worker,
            workers=[_worker(core, progress, lease, held[lease.lease_id], now) for lease in leases],
            commits={str(outcome): count for outcome, count in core.outcomes.items()},
            leases_ended={str(reason): count for reason, count in core.leases.ended.items()},
            shards=_shards(core),
            training_loss=progress.loss.value,
            pi_median=progress.pi_median.value,
            staleness=progress.staleness.value or 0.0,
            evaluation=pb.ReportEvaluationRequest(**asdict(evaluation)) if evaluation else None,
            queue_length=self.queue_length(),
            memory_bytes=core.memory.held,
            memory_limit_bytes=core.memory.limit,
            checkpoint_version=progress.checkpoint_version,
            checkpoint_age_seconds=now - progress.checkpoint_at if progress.checkpoint_version is not None else 0.0,
            uptime_seconds=now - progress.started,
            server_version=__version__,
            contract=CONTRACT,
            range_index=core.part.index,
            range_count=core.part.count,
            peers=self.peers,
            stall=stall,
            worker_count=len(core.leases.live),
            lease_seconds=core.leases.duration,
            learning_rate=server_rate(core.settings, core.central.progress),
            commits_per_second=None if core.complete else self._rate.value,
            nonfinite_losses=progress.nonfinite_losses,
            begin_version=self._begin_version,
            start_version=self._start_version,
            curves=self._curves() if curves else None,
            start=_start(core, now),
        )

    def _curves(self) -> pb.RunCurves:
        columns = self.timeline.columns()
        versions = map(int, columns.pop("version", ()))
        return pb.RunCurves(version=versions, **columns)

    def _figures(self) -> dict[str, float | None]:
        progress = self.progress
        return {
            "version": self.core.central.version,
            "commits_per_second": self._rate.value,
            "workers": len(self.core.leases.live),
            "loss": progress.loss.value,
            "pi_median": progress.pi_median.value,
            "staleness": progress.staleness.value,
        }


def _start(core: Core, now: float) -> pb.Start | None:
    awaited = core.awaited(now) if core.part.leads else None
    if awaited is None or (awaited.min_workers <= 1 and not awaited.at_most):  # any first worker begins the run
        return None
    return pb.Start(min_workers=awaited.min_workers, seconds=awaited.seconds, at_most_seconds=awaited.at_most)


def _state(core: Core, draining: bool, stalled: bool, now: float) -> pb.RunState:
    if draining:
        return pb.RUN_STATE_DRAINING
    if stalled:
        return pb.RUN_STATE_STALLED
    if not core.central.initialized or core.awaited(now):
        return pb.RUN_STATE_WAITING
    if not core.part.leads:
        return pb.RUN_STATE_FOLLOWING
    return pb.RUN_STATE_COMPLETE if core.complete else pb.RUN_STATE_TRAINING


def _worker(core: Core, progress: Progress, lease: Lease, shards: int, now: float) -> pb.WorkerStatus:
    mine = progress.workers.get(lease.worker)
    last = mine.last if mine else None
    return pb.WorkerStatus(
        name=lease.worker,
        commits=mine.commits if mine else 0,
        staleness=last.staleness if last else 0,
        pi_median=mine.pi_median.value if mine else None,
        loss=last.loss if last else None,
        lease_remaining_seconds=max(0.0, lease.expires_at - now),
        memory_bytes=lease.nbytes,
        shards=shards,
        transport=mine.transport if mine else "",
        rejected=mine.rejected if mine else 0,
        pace_seconds=core.leases.timetable.pace(lease.lease_id) or 0.0,
        batch_share=core.leases.timetable.share(lease.lease_id),
        wait_seconds=mine.wait.value or 0.0 if mine else 0.0,
        waited_seconds=mine.waited if mine else 0.0,
    )


def _shards(core: Core) -> pb.ShardStatus:
    ledger = core.ledger
    return pb.ShardStatus(
        epoch=ledger.epoch,
        epochs=core.settings.epochs,
        pending=ledger.pending,
        leased=len(ledger.held),
        completed=ledger.completed,
        samples_completed=ledger.samples_completed,
        samples_committed=core.samples_committed,
    )
