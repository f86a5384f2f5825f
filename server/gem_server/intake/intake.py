"""The part that all calls of workers share: when they may go on, and what becomes of them when a lease ends.

Every method runs under the event loop's lock: on its thread, or on one of the lane's that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gem_api.errors import Draining, GemError, LeaseEnded, Overloaded
from gem_api.process.logs import Logger
from gem_api.v1 import training_pb2 as pb

from gem_server.apply_loop import ApplyLoop
from gem_server.commit_times import CommitTimes
from gem_server.core.quarantine import lift_command
from gem_server.core.state_machine import Core
from gem_server.core.values import Ended, Header, Outcome
from gem_server.durability.group_commit import Durability
from gem_server.held_replies import HeldReplies
from gem_server.intake.calls import Call, Calls
from gem_server.intake.turns import Turns
from gem_server.intake.uploads import Uploads
from gem_server.telemetry.progress import Progress, Traffic
from gem_server.telemetry.rpc_metrics import RpcMetrics
from gem_server.telemetry.traces import Traces

SHORT_SECONDS = 2.0  # that a gradient waits for memory before the log says so
REMIND_SECONDS = 60.0  # between two log lines about the same lack of memory
DRAINING = "the server is shutting down: try again once it has restarted"


@dataclass(eq=False)
class Intake:
    """The server as calls need it.

    Attributes:
        core: The state machine.
        apply_loop: Applies commits in order.
        progress: What the status shows.
        calls: The calls in progress.
        durability: Whether a commit is on the disk.
        uploads: Where gradients arrive.
        replies: The turns of θ on its way to workers.
        traffic: Where the bytes of tensors are counted.
        rpcs: Measures how long calls and commits take, and counts their errors.
        traces: Shows what commits spend their time on, to workers that record traces.
        clock: Returns monotonic seconds.
        logger: The server's logger.
    """

    core: Core
    apply_loop: ApplyLoop
    progress: Progress
    calls: Calls
    durability: Durability
    uploads: Uploads
    replies: Turns[object]
    traffic: Traffic
    rpcs: RpcMetrics
    traces: Traces
    clock: Callable[[], float]
    logger: Logger
    _said_short: float = -math.inf  # when the log last said that memory is short

    @property
    def held(self) -> HeldReplies:
        """The replies that wait for other workers' commits."""
        return self.apply_loop.held

    def end_slow_turns(self) -> None:
        """Ends the turns of slow clients, and the upload of one if another waits for its memory. Call it often."""
        now, waited = self.clock(), self.uploads.longest_wait
        if waited >= SHORT_SECONDS and now - self._said_short >= REMIND_SECONDS:
            self._said_short = now
            self.logger.warning(
                "gradients wait for memory: raise memory_limit, or see which workers are slow",
                waiting=self.uploads.waiting_for_memory, seconds=round(waited, 1), limit=self.core.memory.limit,
            )  # fmt: skip
        self.uploads.end_slow_turns()
        self.replies.end_slow_turns()
        lease_id = self.uploads.to_end()
        if lease_id is not None:
            self.logger.warning(
                "a slow upload was ended: others wait for its memory; the worker repeats it",
                worker=self.core.leases.live[lease_id].worker,
            )  # fmt: skip
            why = "this gradient arrives slowly and others wait for its memory: send it again"
            self.calls.stop_exchange(lease_id, Overloaded(why))

    def require_open(self) -> None:
        """Raises Draining once the server shuts down."""
        if self.progress.draining:
            raise Draining(DRAINING)

    def require_recordable(self) -> None:
        """Call this before a change of the run that a reply waits for: a call that is repeated while nothing can be written
        then changes nothing. Raises Draining once the server shuts down, and Overloaded meanwhile."""
        self.require_open()
        self.durability.require_writable()

    def measure(self, message: pb.CommitHeader, transport: str, times: CommitTimes, failure: str, why: str) -> None:
        """Makes metrics and a trace of a commit that has ended, with an error's name if it failed."""
        self.rpcs.commit_ended(times, transport, failure)
        self.traces.add(message, transport, times, f"{failure}: {why}" if why else failure)

    def rejected(self, call: Call, header: Header, error: GemError) -> None:
        """Counts a rejected commit. Raises Quarantined if that puts its worker into quarantine."""
        self._count(header, error)
        ended = self.core.rejected(header.lease_id, error)
        if ended is not None:
            self.logger.warning("worker quarantined", worker=ended.worker, lift=lift_command(ended.worker))
            self.lease_ended(ended, call)
            self.core.quarantine.require_free(ended.worker)
        for ended in self.core.pop_ended_leases():
            self.lease_ended(ended, call)

    def lease_ended(self, ended: Ended, notified: Call | None = None) -> None:
        """Ends the calls of a lease that has ended, except for `notified`, which gets its own error."""
        self.progress.forget(ended.worker)
        self.uploads.forget(ended.lease_id)
        self.replies.forget(ended.lease_id)
        self.held.lease_ended(ended)
        self.uploads.trim()
        self.logger.info(
            "lease ended", worker=ended.worker, reason=str(ended.reason), shards_returned=ended.shards_returned,
            workers=len(self.core.leases.live),
        )  # fmt: skip
        error = LeaseEnded(f"the lease has ended ({ended.reason}): register again", ended.reason)
        self.calls.end_lease(ended.lease_id, error, notified)

    def _count(self, header: Header, error: GemError) -> None:
        if isinstance(error, Draining | Overloaded):
            return  # nothing is wrong with the commit: the worker sends it again
        self.core.outcomes[Outcome.REJECTED] += 1
        leases = self.core.leases
        worker = leases.worker_of(header.lease_id)
        self.progress.count_rejected(worker if header.lease_id in leases.live else None, type(error).__name__)
        self.logger.warning(
            "commit rejected", worker=worker or "unknown", sequence=header.sequence, error=type(error).__name__, why=str(error)
        )
