"""TrainingService: translates workers' requests to calls of the core, and the core's facts to replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from gem_api.errors import Draining, IncompleteTransfer, InvalidRequest, LayoutMismatch
from gem_api.formats import outdated, require_known_contract
from gem_api.layout import Layout, Vector
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.ranges import Range
from gem_api.schedule import Schedule
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, Format, ThetaFormat, as_theta_format, theta_format_of, wire_format

from gem_server.core.central_variable import require_finite
from gem_server.core.leases import Lease
from gem_server.core.shards import NoShard, Shard
from gem_server.core.values import Ended, PullDecision
from gem_server.intake import messages
from gem_server.intake.calls import Call
from gem_server.intake.commit_exchange import CommitExchange
from gem_server.intake.intake import DRAINING, Intake
from gem_server.rpc.handlers import Context, require_short
from gem_server.rpc.tensor_stream import Transfer
from gem_server.rules.base import largest
from gem_server.security.access import Identity, require_name
from gem_server.telemetry.run_view import RunView

SHARD_WAIT_SECONDS = 0.5
START_WAIT_SECONDS = 2.0  # at most, of a run that has not begun: many workers would take each other's processor time
READER_SECONDS = 60.0
MAX_FINGERPRINT = 32
MAX_LOGGED_NAME = 100
MAX_INLINE_TENSORS = 1000  # of a layout that is converted on the event loop, in 10 ms
MAX_INLINE_SAMPLES = 10_000  # of a shard that is shuffled and serialised on the event loop, in about 5 ms


class _Frames(Transfer):
    """Carries commits in the frames of a stream."""

    def formats(self, message: pb.CommitHeader, parameters: int) -> tuple[Format, Format]:
        return wire_format(message.wire_dtype), theta_format_of(message.theta_dtype)

    async def wait(self, future: asyncio.Future[Any]) -> Any:
        return await asyncio.shield(future)

    async def send(self, result: pb.CommitResult, theta: Vector, format_: ThetaFormat) -> None:
        await self.send_theta(pb.CommitResponse(result=result).SerializeToString(), theta, format_)


class TrainingServicer:
    """Serves `gem_api.v1.TrainingService`.

    Args:
        intake: What all calls share.
        view: The run's status.
        offer_lane: Makes a token for a lane.
        peers: Addresses of the servers of the other ranges, if this one leads.
    """

    def __init__(
        self,
        intake: Intake,
        view: RunView,
        offer_lane: Callable[[str, Callable[[], Identity]], pb.OpenLaneResponse],
        peers: Sequence[str] = (),
    ) -> None:
        self._intake, self._view, self._offer_lane, self._peers = intake, view, offer_lane, peers
        self._core, self._durability, self._clock = intake.core, intake.durability, intake.clock
        self._held_up = False  # whether a worker was told to wait until the run begins
        self._changed = asyncio.Event()
        self._converting = asyncio.Lock()  # one large layout or shard after the other

    # -- commits

    async def commit(self, call: Call, context: Context) -> None:
        frames = _Frames(call, context, pb.CommitRequest, self._intake.traffic)
        while (message := await frames.read_header()) is not None:
            await CommitExchange(self._intake, call, message, frames).run()

    # -- reading and initialising θ

    async def pull(self, call: Call, request: pb.PullRequest, context: Context) -> None:
        transfer = Transfer(call, context, pb.PullRequest, self._intake.traffic)
        format_ = as_theta_format(theta_format_of(request.theta_dtype))
        if not request.lease_id:
            await self._pull_without_lease(transfer, format_, request.average)
            return
        if request.average:
            raise InvalidRequest("the average of θ is read without a lease: leave out the lease id")
        while (decision := self._core.pull_decision(request.lease_id, self._clock())) is PullDecision.WAIT:
            self._intake.require_open()
            with self._intake.calls.exchange(call, request.lease_id):
                await self._changed.wait()
        if decision is PullDecision.INITIALIZE:
            await transfer.write(self._pull_opening(must_initialize=True))
            return
        lease = self._core.renew(request.lease_id, self._clock())
        self._durability.require_writable()
        with self._intake.calls.exchange(call, request.lease_id):
            self._intake.held.give_up(request.lease_id)
            version = await self._intake.apply_loop.between_commits(lambda: self._core.plan_pull(lease))
            await self._durability.settled()
            opening = self._pull_opening(version=version, progress=lease.progress)
            await transfer.send_theta(opening, self._core.reply(lease), format_)

    async def _pull_without_lease(self, transfer: Transfer, format_: ThetaFormat, average: bool) -> None:
        self._core.central.require_initialized()
        copy = await self._intake.apply_loop.between_commits(lambda: self._core.plan_copy(average))
        await self._durability.settled()
        layout = self._core.central.layout
        assert layout is not None
        opening = self._pull_opening(
            version=copy.version,
            progress=copy.progress,
            layout=layout.to_message(),
            peers=self._peers,
            average=average,
        )
        await transfer.send_theta(opening, copy.theta, format_, patience=READER_SECONDS)

    def _pull_opening(self, **fields: Any) -> bytes:
        layout = self._core.central.layout
        header = pb.PullHeader(layout_fingerprint=layout.fingerprint if layout is not None else b"", **fields)
        return pb.PullResponse(header=header).SerializeToString()

    async def initialize_central(self, call: Call, context: Context) -> pb.InitializeCentralResponse:
        transfer = Transfer(call, context, pb.InitializeCentralRequest, self._intake.traffic)
        header = await transfer.read_header()
        if header is None:
            raise IncompleteTransfer("the stream was empty: send the header, then the chunks")
        self._intake.require_open()
        lease = self._core.require_initializer(header.lease_id, self._clock())
        with self._intake.calls.exchange(call, header.lease_id):
            limit = largest(1.0)
            await transfer.receive(FLOAT32, self._core.central.theta, lambda piece: require_finite(piece, limit, "first value"))
            await transfer.require_end()
            self._core.require_initializer(header.lease_id, self._clock())
            self._core.initialized()
            try:
                await self._durability.begin()
            finally:  # whatever becomes of this call, θ has its value: wake the workers that wait for it
                self.notify()
        self._intake.logger.info("central variable initialised", worker=lease.worker, parameters=self._core.central.size)
        return pb.InitializeCentralResponse(version=self._core.central.version)

    # -- leases

    async def register_worker(
        self, call: Call, request: pb.RegisterWorkerRequest, context: Context
    ) -> pb.RegisterWorkerResponse:
        try:
            return await self._register(call, request)
        except (InvalidRequest, LayoutMismatch) as error:  # it does not come by itself: the others may wait for it
            self._intake.logger.info(
                "registration refused", worker=request.worker_name[:MAX_LOGGED_NAME], error=type(error).__name__,
                why=str(error), workers=len(self._core.leases.live), **self._awaited(),
            )  # fmt: skip
            raise

    async def _register(self, call: Call, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        self._intake.require_open()
        caller = call.identify()
        require_name(caller, request.worker_name)
        require_known_contract(request.contract, request.release)
        for name in ("optimizer", "lead"):
            require_short(f"RegisterWorkerRequest.{name}", getattr(request, name).ByteSize())
        layout = await self._layout_of(request.layout)
        self._intake.require_recordable()
        if other := self._other_with("frozen", request.worker_name, request.frozen_fingerprint):
            raise LayoutMismatch(  # each would train on a model of its own
                f"this worker's frozen parameters have other values than those of worker {other!r}: before you make the "
                "Optimizer, load the same weights into every worker's model; random ones need the same seed"
            )
        choice = OptimizerChoice.from_message(request.optimizer) if request.HasField("optimizer") else None
        leader = messages.leader_registration(request.lead) if request.HasField("lead") else None
        before = self._core.settings
        try:
            registration = self._core.register(
                request.worker_name, layout, self._clock(), request.overlap, caller.owner, choice, leader
            )
        finally:
            for ended in self._core.pop_ended_leases():
                self._lease_ended(ended)
        if registration.ended:
            self._lease_ended(registration.ended)
        self._core.leases.get(registration.lease_id).frozen = request.frozen_fingerprint
        notes: dict[str, int | str] = {**self._awaited()}
        if old := outdated("the worker", request.contract, request.release):
            notes["upgrade"] = old
        self._intake.logger.info("worker registered", worker=request.worker_name, workers=len(self._core.leases.live), **notes)
        if (settings := self._core.settings) != before:
            servers = {"learning_rate": settings.learning_rate, "schedule": str(Schedule.of(settings))}
            self._intake.logger.info(
                "the run takes what its first worker brings; the schedule counts all workers' commits, each by its share",
                optimizer=settings.optimizer, **({} if settings.optimizer == "worker" else servers),
            )  # fmt: skip
        await self._durability.settled()
        return messages.registration(registration, self._core, self._peers)

    def _awaited(self) -> dict[str, int]:
        """The workers that the run waits for before it begins, for a line of the log."""
        awaited = self._core.awaited(self._clock())
        if awaited is None:
            return {}
        others = {"begins_in_seconds": round(awaited.seconds)} if awaited.seconds else {}
        return others | ({"waiting_for": awaited.min_workers} if awaited.min_workers > len(self._core.leases.live) else {})

    def _other_with(self, what: str, worker: str, fingerprint: bytes) -> str | None:
        """Another worker in the run whose fingerprint of `what`, "frozen" or "samples", is not this one's; an empty one is not
        known. Raises InvalidRequest if it is too long."""
        require_short(f"{what}_fingerprint", len(fingerprint), MAX_FINGERPRINT)
        known = [(lease.worker, getattr(lease, what)) for lease in self._core.leases.live.values() if fingerprint]
        return next((other for other, its in known if its not in (b"", fingerprint) and other != worker), None)

    async def _layout_of(self, message: tensors_pb2.TensorLayout) -> Layout:
        """The layout in a registration. Raises InvalidRequest if it is invalid, or only a part of a model."""
        if len(message.tensors) <= MAX_INLINE_TENSORS:
            return _whole_layout(message)
        async with self._converting:
            return await asyncio.to_thread(_prepared_layout, message, self._core.part)

    async def renew_lease(self, call: Call, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        self._core.renew(request.lease_id, self._clock(), request.waiting)
        return pb.RenewLeaseResponse(lease_seconds=self._core.leases.duration)

    async def leave_cluster(self, call: Call, request: pb.LeaveClusterRequest, context: Context) -> pb.LeaveClusterResponse:
        self._lease_ended(self._core.leave(request.lease_id))
        await self._durability.settled()
        return pb.LeaveClusterResponse()

    async def open_lane(self, call: Call, request: pb.OpenLaneRequest, context: Context) -> pb.OpenLaneResponse:
        self._intake.require_open()
        self._core.renew(request.lease_id, self._clock())
        return self._offer_lane(request.lease_id, call.identify)

    def expire_leases(self) -> None:
        """Ends the leases that have expired, and those of workers that no longer train. Time during which this server was
        suspended does not count."""
        now = self._clock()
        if stood_still := self._core.leases.extend_after_suspension(now):
            self._intake.logger.warning(
                "the server was suspended; all leases are extended", seconds=round(stood_still, 1),
                workers=len(self._core.leases.live),
            )  # fmt: skip
        for ended in self._core.expire(now, self._intake.calls.exchanging):
            self._lease_ended(ended)

    def _lease_ended(self, ended: Ended) -> None:
        """Ends a lease's calls, and wakes the workers that wait for θ: another of them may have to give it its first value."""
        self._intake.lease_ended(ended)
        self.notify()

    # -- shards, evaluation, status

    async def lease_shard(self, call: Call, request: pb.LeaseShardRequest, context: Context) -> pb.LeaseShardResponse | bytes:
        self._intake.require_recordable()
        self._require_leading()
        now = self._clock()
        self._require_same_samples(self._core.leases.get(request.lease_id), request.samples_fingerprint)
        shard = self._core.lease_shard(request.lease_id, request.sample_count, now, set(request.holding))
        if awaited := self._core.awaited(now):
            self._held_up = True
            return pb.LeaseShardResponse(wait_seconds=min(max(awaited.seconds, SHARD_WAIT_SECONDS), START_WAIT_SECONDS))
        if self._held_up:
            self._held_up = False
            self._intake.logger.info("training begins", workers=len(self._core.leases.live))
        await self._durability.settled()
        if not isinstance(shard, NoShard):
            return await self._shard_response(shard)
        if shard.complete:
            return pb.LeaseShardResponse(complete=True)
        return pb.LeaseShardResponse(wait_seconds=SHARD_WAIT_SECONDS)

    def _require_same_samples(self, lease: Lease, fingerprint: bytes) -> None:
        """Raises InvalidRequest if a worker in the run has other samples: those that one holds out, another would train on."""
        if fingerprint in (b"", lease.samples) or self._core.settings.shards == "replicate":  # there each may have its own data
            return
        if other := self._other_with("samples", lease.worker, fingerprint):
            raise InvalidRequest(
                f"this worker's training set has other samples than that of worker {other!r}, or in another order: a random "
                "split needs the same seed in all workers, such as random_split(data, parts, "
                "generator=torch.Generator().manual_seed(0))"
            )
        lease.samples = fingerprint

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
        self._intake.progress.evaluated(messages.evaluation(request), self._clock())
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
        self._intake.progress.draining = True
        self._intake.calls.end_unanswered(Draining(DRAINING))
        self._intake.held.close()
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
