"""TrainingService: what a worker says, turned into questions to the core, and the core's facts turned into answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from gem_api.errors import DeadlineExceeded, Draining, GemError, IncompleteTransfer, InvalidRequest, LeaseEnded
from gem_api.framing import Assembly, ChunkView, chunk_frames, parse_frame
from gem_api.layout import Layout, Vector
from gem_api.logs import Logger
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb

from gem_server import messages
from gem_server.apply_loop import ApplyLoop
from gem_server.calls import Call, Calls
from gem_server.central import require_finite
from gem_server.core import Core
from gem_server.edge import Context
from gem_server.facts import Admission, Ended, Header, Outcome, PullDecision
from gem_server.progress import Progress
from gem_server.shards import NoShard

SHARD_WAIT_SECONDS = 0.5
READER_SECONDS = 60.0
_DRAINING = "the server is shutting down: resend once a server answers again"


@dataclass
class Traffic:
    """Bytes of tensor frames so far."""

    received: int = 0
    sent: int = 0


class TrainingServicer:
    """Serves `gem_api.v1.TrainingService`.

    Args:
        core: Decides.
        apply_loop: Applies commits in order.
        progress: Remembers what the status shows.
        calls: The calls in progress.
        clock: Monotonic seconds.
        log: The server's log.
    """

    def __init__(
        self, core: Core, apply_loop: ApplyLoop, progress: Progress, calls: Calls, clock: Callable[[], float], log: Logger
    ) -> None:
        self._core = core
        self._apply_loop = apply_loop
        self._progress = progress
        self._calls = calls
        self._clock = clock
        self._log = log
        self._changed = asyncio.Event()
        self.traffic = Traffic()
        self.draining = False

    # -- commits

    async def commit(self, call: Call, context: Context) -> None:
        while (frame := await self._read(context, pb.CommitRequest)) is not None:
            if isinstance(frame, ChunkView):
                raise IncompleteTransfer("a chunk where a commit's header was due: send the header first")
            header = messages.header(frame)
            try:
                with self._calls.exchange(call, header.lease_id):
                    await self._one_commit(call, frame, header, context)
            except GemError as error:
                self._count_rejected(header, error)
                for ended in self._core.take_rolled_back():
                    self.lease_ended(ended, told=call)
                raise
            self._require_open()

    async def _one_commit(self, call: Call, message: pb.CommitHeader, header: Header, context: Context) -> None:
        self._require_open()
        admission, lease = self._core.admit(header, self._clock())
        if message.wire_dtype != tensors_pb2.WIRE_DTYPE_FLOAT32:
            raise InvalidRequest(f"wire dtype {message.wire_dtype} is not taken: send float32 (1)")
        if admission is Admission.FRESH:
            await self._receive(context, pb.CommitRequest, lease.upload, self._core.rule.learning_rate, "gradient")
            self._require_open()
            self._apply_loop.submit(self._core.ticket(lease, header, self._clock()))
        else:
            await self._skip(context, lease.upload.nbytes)
        call.answering = True
        applied = await self._apply_loop.answer(lease, header.sequence)
        if admission is not Admission.FRESH:
            # A pull that this repeat overtook may still have its turn to come, and would change the answer under way.
            await self._apply_loop.between_commits(lambda: lambda: None)
        result = messages.commit_result(applied, lease.base_version)
        await self._write(context, pb.CommitResponse(result=result).SerializeToString())
        await self._send(context, self._core.answer(lease))

    def _count_rejected(self, header: Header, error: GemError) -> None:
        if isinstance(error, Draining):
            return
        self._core.outcomes[Outcome.REJECTED] += 1
        self._progress.rejected[type(error).__name__] += 1
        lease = self._core.leases.live.get(header.lease_id)
        worker = lease.worker if lease else None
        self._log.warning(
            "commit rejected", worker=worker, sequence=header.sequence, error=type(error).__name__, why=str(error)
        )

    # -- reading and initialising θ

    async def pull(self, call: Call, request: pb.PullRequest, context: Context) -> None:
        if not request.lease_id:
            await self._pull_without_lease(context)
            return
        while (decision := self._core.pull_decision(request.lease_id, self._clock())) is PullDecision.WAIT:
            self._require_open()
            with self._calls.exchange(call, request.lease_id):
                await self._changed.wait()
        if decision is PullDecision.INITIALIZE:
            await self._write_pull_header(context, pb.PullHeader(must_initialize=True))
            return
        lease = self._core.renew(request.lease_id, self._clock())
        with self._calls.exchange(call, request.lease_id):
            version = await self._apply_loop.between_commits(lambda: partial(self._core.pull, lease))
            await self._write_pull_header(context, pb.PullHeader(version=version))
            await self._send(context, self._core.answer(lease))

    async def _pull_without_lease(self, context: Context) -> None:
        self._core.central.require_initialized()
        copy = await self._apply_loop.between_commits(self._core.plan_copy)
        layout = self._core.central.layout
        assert layout is not None
        await self._write_pull_header(context, pb.PullHeader(version=copy.version, layout=layout.to_message()))
        await self._send(context, copy.theta, patience=READER_SECONDS)

    async def _write_pull_header(self, context: Context, header: pb.PullHeader) -> None:
        if self._core.central.layout is not None:
            header.layout_fingerprint = self._core.central.layout.fingerprint
        await self._write(context, pb.PullResponse(header=header).SerializeToString())

    async def initialize_central(self, call: Call, context: Context) -> pb.InitializeCentralResponse:
        header = await self._read(context, pb.InitializeCentralRequest)
        if not isinstance(header, pb.InitializeCentralHeader):
            raise IncompleteTransfer("the first frame was no header: send the header, then the chunks")
        self._require_open()
        lease = self._core.require_initializer(header.lease_id, self._clock())
        with self._calls.exchange(call, header.lease_id):
            await self._receive(context, pb.InitializeCentralRequest, self._core.central.theta, 1.0, "first value")
            if await self._read(context, pb.InitializeCentralRequest) is not None:
                raise IncompleteTransfer("a frame after the whole of the first value had arrived: end the stream there")
            self._core.require_initializer(header.lease_id, self._clock())
            self._core.initialized()
        self._log.info("central variable initialised", worker=lease.worker, parameters=self._core.central.size)
        self.notify()
        return pb.InitializeCentralResponse(version=self._core.central.version)

    # -- leases

    async def register_worker(
        self, call: Call, request: pb.RegisterWorkerRequest, context: Context
    ) -> pb.RegisterWorkerResponse:
        self._require_open()
        layout = Layout.from_message(request.layout)
        registration = self._core.register(request.worker_name, layout, self._clock())
        if registration.ended:
            self.lease_ended(registration.ended)
        awaited = {"waiting_for": self._core.workers_awaited} if self._core.workers_awaited else {}
        self._log.info("worker registered", worker=request.worker_name, workers=len(self._core.leases.live), **awaited)
        return messages.registration(registration, self._core)

    async def renew_lease(self, call: Call, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        self._core.renew(request.lease_id, self._clock())
        return pb.RenewLeaseResponse(lease_seconds=self._core.leases.duration)

    async def leave_cluster(self, call: Call, request: pb.LeaveClusterRequest, context: Context) -> pb.LeaveClusterResponse:
        self.lease_ended(self._core.leave(request.lease_id))
        return pb.LeaveClusterResponse()

    def expire_leases(self) -> None:
        """Ends the leases whose time is up."""
        for ended in self._core.expire(self._clock()):
            self.lease_ended(ended)

    def lease_ended(self, ended: Ended, told: Call | None = None) -> None:
        """Tells everyone concerned that a lease has ended; the call `told` hears of it in another way."""
        self._progress.forget(ended.worker)
        self._log.info(
            "lease ended", worker=ended.worker, reason=str(ended.reason), shards_returned=ended.shards_returned,
            workers=len(self._core.leases.live),
        )  # fmt: skip
        error = LeaseEnded(f"the lease has ended ({ended.reason}): register again", ended.reason)
        self._calls.end_lease(ended.lease_id, error, told)
        self.notify()

    # -- shards, evaluation, status

    async def lease_shard(self, call: Call, request: pb.LeaseShardRequest, context: Context) -> pb.LeaseShardResponse:
        self._require_open()
        shard = self._core.lease_shard(request.lease_id, request.sample_count, self._clock(), set(request.holding))
        if not isinstance(shard, NoShard):
            return pb.LeaseShardResponse(shard=messages.shard(shard, self._core.ledger.indices(shard)))
        if shard.complete:
            return pb.LeaseShardResponse(complete=True)
        return pb.LeaseShardResponse(wait_seconds=SHARD_WAIT_SECONDS)

    async def complete_shard(self, call: Call, request: pb.CompleteShardRequest, context: Context) -> pb.CompleteShardResponse:
        accepted = self._core.complete_shard(request.lease_id, request.shard_id, self._clock())
        return pb.CompleteShardResponse(accepted=accepted)

    async def report_evaluation(
        self, call: Call, request: pb.ReportEvaluationRequest, context: Context
    ) -> pb.ReportEvaluationResponse:
        if request.HasField("accuracy") and not 0 <= request.accuracy <= 1:
            raise InvalidRequest(f"an accuracy lies between 0 and 1, not at {request.accuracy}")
        self._progress.evaluated(messages.evaluation(request))
        return pb.ReportEvaluationResponse()

    async def get_status(self, call: Call, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return messages.status(self._core, self._progress, self._apply_loop.queue_length, self.draining, self._clock())

    # -- frames

    async def _read(self, context: Context, message_type: Any) -> ChunkView | Any | None:
        """The next frame, parsed; None at the end of the stream."""
        frame = await context.read()
        if frame is grpc.aio.EOF:
            return None
        self.traffic.received += len(frame)
        return parse_frame(frame, message_type)

    async def _read_chunk(self, context: Context, message_type: Any, assembly: Assembly) -> ChunkView:
        frame = await self._read(context, message_type)
        if frame is None:
            assembly.require_complete()
        if not isinstance(frame, ChunkView):
            raise IncompleteTransfer("a header where a chunk was due: finish one transfer before the next")
        return frame

    async def _receive(self, context: Context, message_type: Any, into: Vector, scale: float, what: str) -> None:
        """Fills `into` (float32, shape (P,)) from chunks, each checked while it is in the cache."""
        assembly = Assembly(into)
        while not assembly.complete:
            chunk = await self._read_chunk(context, message_type, assembly)
            require_finite(assembly.add(chunk), scale, what)

    async def _skip(self, context: Context, size: int) -> None:
        """Reads and drops the chunks of a gradient of `size` bytes that is here already."""
        received = 0
        while received < size:
            frame = await self._read(context, pb.CommitRequest)
            if not isinstance(frame, ChunkView) or frame.offset != received or not 0 < len(frame.data) <= size - received:
                raise IncompleteTransfer("the repeated commit's chunks do not cover its gradient: a repeat is sent whole")
            received += len(frame.data)

    async def _write(self, context: Context, frame: bytes) -> None:
        self.traffic.sent += len(frame)
        await context.write(frame)

    async def _send(self, context: Context, packed: Vector, patience: float | None = None) -> None:
        """Streams θ from where it lies (float32, shape (P,)); no one changes it before this exchange is over.

        A client that takes longer than `patience` seconds for one frame is sent away: without a lease it could keep its
        copy of θ for ever.
        """
        for frame in chunk_frames(packed):
            try:
                async with asyncio.timeout(patience):
                    await self._write(context, frame)
            except TimeoutError:
                raise DeadlineExceeded(f"one frame was not read within {patience} s") from None

    def _require_open(self) -> None:
        if self.draining:
            raise Draining(_DRAINING)

    def notify(self) -> None:
        """Wakes those who wait for something to change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Takes no more commits; what holds a ticket is still applied and answered."""
        self.draining = True
        self._calls.end_unanswered(Draining(_DRAINING))
        self.notify()
