"""The way of a commit through the core, as gRPC and the lane share it; they differ in how bytes arrive and how they wait.

Every method runs under the event loop's lock: on its thread, or on one of the lane's that holds it.
"""

from __future__ import annotations

import math
from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gem_api.errors import Draining, GemError, LeaseEnded, Overloaded
from gem_api.process.logs import Logger
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, Format, ThetaFormat, whole

from gem_server.apply_loop import ApplyLoop
from gem_server.core.commits import Arrived
from gem_server.core.facts import Admission, Ended, Header, Outcome
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.core.quarantine import lift_command
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.durability.group_commit import Durability
from gem_server.held_replies import HeldReplies
from gem_server.intake import messages
from gem_server.intake.calls import Call, Calls
from gem_server.intake.turns import Turns
from gem_server.intake.uploads import Uploads
from gem_server.telemetry.progress import Progress
from gem_server.telemetry.rpc_metrics import RpcMetrics
from gem_server.telemetry.traces import Traces
from gem_server.telemetry.wire_metrics import WireMetrics

SHORT_SECONDS = 2.0  # that a gradient waits for memory before the log says so,
REMIND_SECONDS = 60.0  # and between two such lines
DRAINING = "the server is shutting down: try again once it has restarted"
Reply = pb.CommitResult | Future[Any]  # of a commit: its result, or what to wait for before asking again


@dataclass(eq=False)
class CommitPath:
    """Admits commits, gives them tickets, and makes their results.

    Attributes:
        core: The state machine.
        apply_loop: Applies commits in order.
        progress: What the status shows.
        calls: The calls in progress.
        durability: Whether a commit is on the disk.
        uploads: Where gradients arrive.
        replies: The turns of θ on its way to workers.
        wire: Measures how long tensors are on the network.
        rpcs: Measures how long commits take, and counts their errors.
        traces: Notes what commits spend their time on, for workers that record traces.
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
    wire: WireMetrics
    rpcs: RpcMetrics
    traces: Traces
    clock: Callable[[], float]
    logger: Logger
    _said_short: float = -math.inf  # when the log last said that memory is short

    def admit(self, call: Call, header: Header) -> tuple[Admission, Lease]:
        """Decides whether a commit's gradient should be received. Raises Draining, or as `Core.admit`."""
        self.require_open()
        self.calls.begin_exchange(call, header.lease_id)
        admission, lease = self.core.admit(header, self.clock())
        if call.region is not None:
            self.core.adopt_region(lease, call.region)  # also for a repeated commit, whose reply must go there
        elif admission is Admission.FRESH:
            self.core.leases.leave_region(lease)
        (self.held.release if admission is Admission.REPEATED else self.held.give_up)(lease.lease_id)
        return admission, lease

    @property
    def held(self) -> HeldReplies:
        """The replies that wait for other workers' commits."""
        return self.apply_loop.held

    def begin_upload(self, call: Call, lease: Lease) -> Upload | Future[Upload]:
        """Where the gradient of a commit goes, or what to wait for before. Raises Overloaded."""
        if lease.region is not None and lease.by_reference:
            return Upload(lease.region.gradient)
        return self.uploads.begin(lease.lease_id, FLOAT32.nbytes(self.core.central.size), call.nearby)

    def pass_over(self) -> None:
        """Ends the turns of slow clients, and the upload of one if another waits for its memory. Call it often."""
        now, waited = self.clock(), self.uploads.longest_wait
        if waited >= SHORT_SECONDS and now - self._said_short >= REMIND_SECONDS:
            self._said_short = now
            self.logger.warning(
                "gradients wait for memory: raise memory_limit, or see which workers are slow",
                waiting=self.uploads.waiting_for_memory, seconds=round(waited, 1), limit=self.core.memory.limit,
            )  # fmt: skip
        self.uploads.pass_over()
        self.replies.pass_over()
        lease_id = self.uploads.to_end()
        if lease_id is not None:
            self.logger.warning(
                "a slow upload was ended: others wait for its memory; the worker repeats it",
                worker=self.core.leases.live[lease_id].worker,
            )  # fmt: skip
            why = "this gradient arrives slowly and others wait for its memory: send it again"
            self.calls.stop_exchange(lease_id, Overloaded(why))

    def renew(self, lease_id: str) -> None:
        """Notes a sign of life. Raises LeaseEnded."""
        self.core.renew(lease_id, self.clock())

    def new_norm(self) -> GradientNorm | None:
        """A sum for a gradient's norm; None if norms have no bound."""
        return GradientNorm() if self.core.norms.bounded else None

    def submit(
        self, call: Call, lease: Lease, header: Header, upload: Upload, arrived: Arrived, norm: GradientNorm | None
    ) -> Reply:
        """Gives a commit whose gradient is complete its ticket. Applies it at once if it can; otherwise queues it. Holds the
        upload until it is applied. Returns the reply.

        Raises:
            GemError: The call was ended meanwhile, or as `Core.ticket`.
        """
        call.require_going_on()
        self.require_open()
        measured = norm.value if norm is not None else None
        self.apply_loop.submit(self.core.ticket(lease, header, self.clock(), upload, arrived, measured))
        call.answering = True
        self.progress.record_transport(lease.worker, call.transport)
        return self.reply(lease, header.sequence)

    def reply(self, lease: Lease, sequence: int) -> Reply:
        """The reply to a commit that is complete. Raises LeaseEnded if it was not applied."""
        waiting = self.apply_loop.awaited(lease, sequence) or self.undurable(lease)
        if waiting is not None:
            return waiting
        core, applied = self.core, self.apply_loop.applied(lease, sequence)
        share = core.leases.timetable.share(lease.lease_id) if core.part.leads else 0.0
        return messages.commit_result(applied, lease.base_version, lease.progress, share)

    # -- helpers

    def rewrite_reply(self, lease: Lease) -> Future[None]:
        """Writes the reply to a repeated commit again. A pull that was sent before the commit may still be queued: it would
        change the reply while it is sent, so this waits for its turn behind it."""
        return self.apply_loop.queue(lambda: partial(self.core.resend_reply, lease))

    def require_open(self) -> None:
        """Raises Draining once the server shuts down."""
        if self.progress.draining:
            raise Draining(DRAINING)

    def require_recordable(self) -> None:
        """Call this before a change of the run that a reply waits for: a call that is repeated while nothing can be written
        then changes nothing. Raises Draining once the server shuts down, and Overloaded meanwhile."""
        self.require_open()
        self.durability.require_writable()

    def keeps_as_arrived(self, lease: Lease, gradient: Format) -> bool:
        """Whether the log gets a gradient in the format in which it arrives. If not, it gets what it was decoded to."""
        core = self.core
        return core.logged and gradient is not FLOAT32 and core.memory.reserve_record(lease, gradient.nbytes(core.central.size))

    def theta_format(self, lease: Lease, message: pb.CommitHeader, asked: Format) -> ThetaFormat:
        """The format in which θ is sent with the result of a commit that asks for a format. The difference to what the worker
        holds, if both know that; else θ is whole."""
        if isinstance(asked, ThetaFormat):
            return asked
        held, base = lease.held, message.theta_base
        is_difference = held is not None and held.sequence == base and base > 0
        if not is_difference:
            held = self.core.memory.new_held_theta(lease)
        return held.form(message.sequence, is_difference) if held is not None else whole(asked)

    def undurable(self, lease: Lease) -> Future[None] | None:
        """Done once the lease's last commit is on the disk; None if it is there."""
        return self.durability.awaited(lease.recorded)

    def require_writable(self) -> None:
        """Raises Overloaded while no commit can be acknowledged."""
        self.durability.require_writable()

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
