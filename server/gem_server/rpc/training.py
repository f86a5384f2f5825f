"""TrainingService: translates workers' requests to calls of the core, and the core's facts to replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from gem_api.errors import Draining, GemError, IncompleteTransfer, InvalidRequest, LayoutMismatch, LeaseEnded
from gem_api.layout import Layout
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.process.logs import Logger
from gem_api.ranges import Range
from gem_api.schedule import Schedule
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Format, ThetaFormat, gradient_format, stated_theta_format

from gem_server.apply_loop import ApplyLoop
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.facts import Admission, Ended, Header, PullDecision
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.core.shards import NoShard, Shard
from gem_server.core.state_machine import Core
from gem_server.durability.group_commit import Durability
from gem_server.intake import messages
from gem_server.intake.calls import Call, Calls
from gem_server.intake.commit_path import DRAINING, CommitPath
from gem_server.rpc.handlers import Context, require_short
from gem_server.rpc.tensor_stream import Transfer
from gem_server.rules.base import largest
from gem_server.security.access import Identity, require_name
from gem_server.telemetry.progress import Progress, Traffic
from gem_server.telemetry.run_view import RunView

SHARD_WAIT_SECONDS = 0.5
READER_SECONDS = 60.0
MAX_FINGERPRINT = 32
MAX_INLINE_TENSORS = 1000  # of a layout that is converted on the event loop, in 10 ms
MAX_INLINE_SAMPLES = 10_000  # of a shard that is shuffled and serialised there, in about 5 ms


class TrainingServicer:
    """Serves `gem_api.v1.TrainingService`.

    Args:
        core: The state machine.
        apply_loop: Applies commits in order.
        progress: What the status shows.
        view: The run's status.
        calls: The calls in progress.
        path: The way of a commit.
        offer_lane: Makes a token for a lane.
        durability: Waited for before a reply.
        traffic: Where the bytes of tensors are counted.
        clock: Returns monotonic seconds.
        logger: The server's logger.
        peers: Addresses of the servers of the other ranges, if this one leads.
    """

    def __init__(
        self,
        core: Core,
        apply_loop: ApplyLoop,
        progress: Progress,
        view: RunView,
        calls: Calls,
        path: CommitPath,
        offer_lane: Callable[[str, Callable[[], Identity]], pb.OpenLaneResponse],
        durability: Durability,
        traffic: Traffic,
        clock: Callable[[], float],
        logger: Logger,
        peers: Sequence[str] = (),
    ) -> None:
        self._core = core
        self._peers = peers
        self._apply_loop = apply_loop
        self._progress = progress
        self._view = view
        self._calls = calls
        self._path = path
        path.lease_ends = self.lease_ended
        self._offer_lane = offer_lane
        self._durability = durability
        self._traffic = traffic
        self._clock = clock
        self._logger = logger
        self._changed = asyncio.Event()
        self._converting = asyncio.Lock()  # one large layout or shard after the other

    # -- commits

    async def commit(self, call: Call, context: Context) -> None:
        transfer = Transfer(call, context, pb.CommitRequest, self._traffic)
        while (message := await transfer.read_header()) is not None:
            header = messages.header(message)
            try:
                await self._one_commit(call, message, header, transfer)
            except GemError as error:
                self._path.refused(call, header, error)
                raise
            finally:
                self._calls.end_exchange(call)
            self._path.require_open()

    async def _one_commit(self, call: Call, message: pb.CommitHeader, header: Header, transfer: Transfer) -> None:
        admission, lease = self._path.admit(call, header)
        gradient, theta = gradient_format(message.wire_dtype), stated_theta_format(message.theta_dtype)
        if admission is Admission.FRESH:
            await self._durability.reached(lease.recorded)  # this gradient overwrites the last one
            self._durability.require_writable()
            norm = self._path.new_norm()
            arrived = await self._receive(lease, transfer, gradient, norm)
            outcome = self._path.submit(call, lease, header, arrived, norm)
        else:
            await transfer.skip(gradient.nbytes(lease.upload.size))
            call.answering = True
            await asyncio.shield(self._path.rewrite_reply(lease))
            outcome = self._path.reply(lease, header.sequence)
        while isinstance(outcome, asyncio.Future):
            await asyncio.shield(outcome)
            outcome = self._path.reply(lease, header.sequence)
        result = outcome
        await transfer.send(pb.CommitResponse(result=result).SerializeToString(), self._core.reply(lease), theta)

    async def _receive(self, lease: Lease, transfer: Transfer, gradient: Format, norm: GradientNorm | None) -> Arrived:
        """Receives the gradient into `lease.upload`. Keeps its bytes for the log if they are compressed, and there is room."""
        kept: list[memoryview] | None = [] if self._path.keeps_as_arrived(lease, gradient) else None
        await transfer.receive(lease.upload, self._core.rule.largest, "gradient", gradient, norm, kept)
        return as_floats(lease.upload) if kept is None else Arrived(gradient.dtype, kept)

    # -- reading and initialising θ

    async def pull(self, call: Call, request: pb.PullRequest, context: Context) -> None:
        transfer, form = Transfer(call, context, pb.PullRequest, self._traffic), stated_theta_format(request.theta_dtype)
        if not request.lease_id:
            await self._pull_without_lease(transfer, form)
            return
        while (decision := self._core.pull_decision(request.lease_id, self._clock())) is PullDecision.WAIT:
            self._path.require_open()
            with self._calls.exchange(call, request.lease_id):
                await self._changed.wait()
        if decision is PullDecision.INITIALIZE:
            await transfer.write(self._pull_opening(must_initialize=True))
            return
        lease = self._core.renew(request.lease_id, self._clock())
        self._durability.require_writable()
        with self._calls.exchange(call, request.lease_id):
            version = await self._apply_loop.between_commits(lambda: self._core.plan_pull(lease))
            await self._durability.settled()
            await transfer.send(self._pull_opening(version=version), self._core.reply(lease), form)

    async def _pull_without_lease(self, transfer: Transfer, form: ThetaFormat) -> None:
        self._core.central.require_initialized()
        copy = await self._apply_loop.between_commits(self._core.plan_copy)
        await self._durability.settled()
        layout = self._core.central.layout
        assert layout is not None
        opening = self._pull_opening(version=copy.version, layout=layout.to_message(), peers=self._peers)
        await transfer.send(opening, copy.theta, form, patience=READER_SECONDS)

    def _pull_opening(self, **fields: Any) -> bytes:
        layout = self._core.central.layout
        header = pb.PullHeader(layout_fingerprint=layout.fingerprint if layout is not None else b"", **fields)
        return pb.PullResponse(header=header).SerializeToString()

    async def initialize_central(self, call: Call, context: Context) -> pb.InitializeCentralResponse:
        transfer = Transfer(call, context, pb.InitializeCentralRequest, self._traffic)
        header = await transfer.read_header()
        if header is None:
            raise IncompleteTransfer("the stream was empty: send the header, then the chunks")
        self._path.require_open()
        lease = self._core.require_initializer(header.lease_id, self._clock())
        with self._calls.exchange(call, header.lease_id):
            await transfer.receive(self._core.central.theta, largest(1.0), "first value")
            await transfer.require_end()
            self._core.require_initializer(header.lease_id, self._clock())
            self._core.initialized()
            try:
                await self._durability.begin()
            finally:  # whatever becomes of this call, θ has its value: wake the workers that wait for it
                self.notify()
        self._logger.info("central variable initialised", worker=lease.worker, parameters=self._core.central.size)
        return pb.InitializeCentralResponse(version=self._core.central.version)

    # -- leases

    async def register_worker(
        self, call: Call, request: pb.RegisterWorkerRequest, context: Context
    ) -> pb.RegisterWorkerResponse:
        self._path.require_open()
        caller = call.identify()
        require_name(caller, request.worker_name)
        for field in ("optimizer", "lead"):
            require_short(f"RegisterWorkerRequest.{field}", getattr(request, field).ByteSize())
        layout = await self._layout_of(request.layout)
        self._path.require_recordable()
        self._require_same_frozen(request.worker_name, request.frozen_fingerprint)
        choice = OptimizerChoice.from_message(request.optimizer) if request.HasField("optimizer") else None
        lead = messages.leads_answer(request.lead) if request.HasField("lead") else None
        before = self._core.settings
        try:
            registration = self._core.register(
                request.worker_name, layout, self._clock(), request.overlap, caller.owner, choice, lead
            )
        finally:
            for dropped in self._core.take_dropped():
                self.lease_ended(dropped)
        if registration.ended:
            self.lease_ended(registration.ended)
        self._core.leases.get(registration.lease_id).frozen = request.frozen_fingerprint
        awaited = {"waiting_for": self._core.workers_awaited} if self._core.workers_awaited else {}
        self._logger.info("worker registered", worker=request.worker_name, workers=len(self._core.leases.live), **awaited)
        if (settings := self._core.settings) != before:
            servers = {"learning_rate": settings.learning_rate, "schedule": str(Schedule.of(settings))}
            self._logger.info(
                "the run takes what its first worker brings; a version is a commit of any worker",
                optimizer=settings.optimizer, **({} if settings.optimizer == "worker" else servers),
            )  # fmt: skip
        await self._durability.settled()
        return messages.registration(registration, self._core, self._peers)

    def _require_same_frozen(self, worker: str, fingerprint: bytes) -> None:
        """Raises LayoutMismatch if a worker in the run has other frozen parameters: each would train on a model of its own."""
        require_short("RegisterWorkerRequest.frozen_fingerprint", len(fingerprint), MAX_FINGERPRINT)
        for lease in self._core.leases.live.values():
            if fingerprint and lease.frozen not in (b"", fingerprint) and lease.worker != worker:
                raise LayoutMismatch(
                    f"this worker's frozen parameters have other values than those of worker {lease.worker!r}: load the same "
                    "weights into the model of every worker before you make the Optimizer"
                )

    async def _layout_of(self, message: tensors_pb2.TensorLayout) -> Layout:
        """The layout in a registration. Raises InvalidRequest if it is invalid, or only a part of a model."""
        if len(message.tensors) <= MAX_INLINE_TENSORS:
            return _whole_layout(message)
        async with self._converting:
            return await asyncio.to_thread(_prepared_layout, message, self._core.part)

    async def renew_lease(self, call: Call, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        self._core.renew(request.lease_id, self._clock())
        return pb.RenewLeaseResponse(lease_seconds=self._core.leases.duration)

    async def leave_cluster(self, call: Call, request: pb.LeaveClusterRequest, context: Context) -> pb.LeaveClusterResponse:
        self.lease_ended(self._core.leave(request.lease_id))
        await self._durability.settled()
        return pb.LeaveClusterResponse()

    async def open_lane(self, call: Call, request: pb.OpenLaneRequest, context: Context) -> pb.OpenLaneResponse:
        self._path.require_open()
        self._core.renew(request.lease_id, self._clock())
        return self._offer_lane(request.lease_id, call.identify)

    def expire_leases(self) -> None:
        """Ends expired leases. Time during which this server was suspended does not count."""
        now = self._clock()
        if stood_still := self._core.leases.looked(now):
            self._logger.warning(
                "the server was suspended or slow to start; all leases are extended", seconds=round(stood_still, 1),
                workers=len(self._core.leases.live),
            )  # fmt: skip
        for ended in self._core.expire(now):
            self.lease_ended(ended)

    def lease_ended(self, ended: Ended, notified: Call | None = None) -> None:
        """Ends the calls of a lease that has ended, except for `notified`, which gets its own error."""
        self._progress.forget(ended.worker)
        self._logger.info(
            "lease ended", worker=ended.worker, reason=str(ended.reason), shards_returned=ended.shards_returned,
            workers=len(self._core.leases.live),
        )  # fmt: skip
        error = LeaseEnded(f"the lease has ended ({ended.reason}): register again", ended.reason)
        self._calls.end_lease(ended.lease_id, error, notified)
        self.notify()

    # -- shards, evaluation, status

    async def lease_shard(self, call: Call, request: pb.LeaseShardRequest, context: Context) -> pb.LeaseShardResponse | bytes:
        self._path.require_recordable()
        self._require_leading()
        shard = self._core.lease_shard(request.lease_id, request.sample_count, self._clock(), set(request.holding))
        await self._durability.settled()
        if not isinstance(shard, NoShard):
            return await self._shard_response(shard)
        if shard.complete:
            return pb.LeaseShardResponse(complete=True)
        return pb.LeaseShardResponse(wait_seconds=SHARD_WAIT_SECONDS)

    async def _shard_response(self, shard: Shard) -> bytes:
        """The samples depend on nothing but the shard and the run's seed, so that a large shard is made in a thread."""

        def work() -> bytes:
            return messages.shard_response(shard, self._core.ledger.indices(shard))

        if shard.end - shard.begin <= MAX_INLINE_SAMPLES:
            return work()
        async with self._converting:
            return await asyncio.to_thread(work)

    async def complete_shard(self, call: Call, request: pb.CompleteShardRequest, context: Context) -> pb.CompleteShardResponse:
        self._require_leading()
        self._durability.require_writable()
        accepted = self._core.complete_shard(request.lease_id, request.shard_id, self._clock())
        await self._durability.settled()
        return pb.CompleteShardResponse(accepted=accepted)

    async def report_evaluation(
        self, call: Call, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        self._require_leading()
        if request.HasField("accuracy") and not 0 <= request.accuracy <= 1:
            raise InvalidRequest(f"the accuracy must lie between 0 and 1, not {request.accuracy}")
        self._progress.evaluated(messages.evaluation(request))
        return pb.ReportEvaluationResponse()

    async def get_status(self, call: Call, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return self._view.read(curves=request.curves)

    def _require_leading(self) -> None:
        if not self._core.part.leads:
            raise InvalidRequest(
                f"this server holds range {self._core.part} of the model: ask the server of range 0, which leads"
            )

    def notify(self) -> None:
        """Wakes calls that wait for the run's state to change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Accepts no more commits. Commits that hold a ticket are still applied, and their workers get the reply."""
        self._progress.draining = True
        self._calls.end_unanswered(Draining(DRAINING))
        self.notify()


def _whole_layout(message: tensors_pb2.TensorLayout) -> Layout:
    layout = Layout.from_message(message)
    layout.require_whole()
    return layout


def _prepared_layout(message: tensors_pb2.TensorLayout, part: Range) -> Layout:
    """The layout with all that the event loop will ask of it."""
    layout = _whole_layout(message)
    layout.part(part).prepare()
    return layout
