"""One commit from its header to its reply, whichever way its bytes travel.

All of it holds the event loop's lock, except a carrier while it moves bytes or waits. gRPC's carrier runs in a task of the
loop. The lane drives the coroutine by hand, on its own threads.
"""

from __future__ import annotations

from asyncio import CancelledError, Future
from collections.abc import Awaitable
from functools import partial
from typing import Any, Protocol, TypeVar

from gem_api.errors import GemError
from gem_api.layout import Vector
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, Format, ThetaFormat, as_theta_format

from gem_server.commit_times import CommitTimes
from gem_server.core.central_variable import Check, require_finite
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.core.values import Admission
from gem_server.intake import messages
from gem_server.intake.calls import Call, PeerLeft
from gem_server.intake.intake import Intake
from gem_server.intake.turns import Turns
from gem_server.telemetry.rpc_metrics import INTERNAL, name_of

T = TypeVar("T")


class Carrier(Protocol):
    """Moves the tensors of one call's commits, and waits. Lends the event loop's lock to others meanwhile."""

    def formats(self, message: pb.CommitHeader, parameters: int) -> tuple[Format, Format]:
        """The wire formats of a commit's gradient and of θ, for P parameters. Raises InvalidRequest, or IncompleteTransfer if
        the size of what follows is known, and is another."""

    def receive(self, format_: Format, into: Vector, check: Check, kept: list[memoryview] | None) -> Awaitable[None]:
        """Fills `into` (float32, shape (P,)) with the gradient, and checks each part while it is in the cache. Appends its
        bytes as they arrived to `kept`, if given. Raises IncompleteTransfer or NonFiniteGradient."""

    def skip(self, nbytes: int) -> Awaitable[None]:
        """Reads and drops the gradient of a repeated commit. Raises IncompleteTransfer."""

    def wait(self, future: Future[Any]) -> Awaitable[Any]:
        """Waits until a future is done, without cancelling it. Raises what the future raises."""

    def send(self, result: pb.CommitResult, theta: Vector, format_: ThetaFormat) -> Awaitable[None]:
        """Sends a commit's result and θ (float32, shape (P,)), which must not change meanwhile."""


class CommitExchange:
    """Receives one commit, has it applied, and sends its result with θ.

    Args:
        intake: The server's part in it.
        call: The call that carries it.
        message: Its header.
        carrier: Moves its tensors.
    """

    __slots__ = ("_call", "_carrier", "_core", "_header", "_intake", "_message", "_times")

    def __init__(self, intake: Intake, call: Call, message: pb.CommitHeader, carrier: Carrier) -> None:
        self._intake, self._call, self._message, self._carrier = intake, call, message, carrier
        self._core = intake.core
        self._header = messages.header(message)
        self._times = CommitTimes(intake.clock())

    async def run(self) -> None:
        """Raises GemError."""
        intake, call, failure = self._intake, self._call, (INTERNAL, "")
        try:
            await self._run()
            failure = ("", "")
        except (CancelledError, PeerLeft):
            failure = (name_of(call.error), "")
            raise
        except GemError as error:
            failure = (name_of(error), str(error))
            if error is not call.error:
                intake.rejected(call, self._header, error)
            raise
        finally:
            intake.calls.end_exchange(call)
            self._times.ended = intake.clock()
            intake.measure(self._message, call.transport, self._times, *failure)
        intake.require_open()

    async def _run(self) -> None:
        admission, lease = self._admit()
        gradient, theta = self._carrier.formats(self._message, self._core.central.size)
        if admission is Admission.FRESH:
            await self._receive(lease, gradient)
        else:
            await self._skip(lease, gradient)
        await self._wait(lease)
        await self._reply(lease, theta)

    def _admit(self) -> tuple[Admission, Lease]:
        """Decides whether the gradient should be received. Raises Draining, or as `Core.admit`."""
        intake, call, core = self._intake, self._call, self._core
        intake.require_open()
        intake.calls.begin_exchange(call, self._header.lease_id)
        admission, lease = core.admit(self._header, self._times.began)
        if call.region is not None:
            core.adopt_region(lease, call.region)  # also for a repeated commit, whose reply must go there
        elif admission is Admission.FRESH:
            core.leases.leave_region(lease)
        (intake.held.release if admission is Admission.REPEATED else intake.held.give_up)(lease.lease_id)
        return admission, lease

    async def _receive(self, lease: Lease, gradient: Format) -> None:
        """Receives a new commit's gradient, when it is its turn, and gives the commit its ticket."""
        intake, call, times = self._intake, self._call, self._times
        intake.durability.require_writable()
        times.upload_asked = intake.clock()
        if lease.region is not None and lease.by_reference:
            upload = Upload(lease.region.gradient)
        else:
            nbytes = FLOAT32.nbytes(self._core.central.size)
            upload = await self._turn(intake.uploads, intake.uploads.begin(lease.lease_id, nbytes, call.nearby))
        times.upload_began = intake.clock()
        try:
            arrived, norm = await self._fill(lease, gradient, upload)
            times.received = intake.clock()
            self._submit(lease, upload, arrived, norm)
        finally:
            upload.release()

    async def _fill(self, lease: Lease, gradient: Format, upload: Upload) -> tuple[Arrived, GradientNorm | None]:
        """Fills an upload with the gradient. Returns it as the log gets it, and its norm if norms have a bound."""
        core, uploads = self._core, self._intake.uploads
        limit, count = core.rule.largest, uploads.count_bytes(upload, upload.gradient.nbytes)
        norm = GradientNorm() if core.norms.bounded else None

        def check(piece: Vector) -> None:
            require_finite(piece, limit, "gradient")
            count(piece.nbytes)
            if norm is not None:
                norm.add(piece)

        encoded = core.logged and gradient is not FLOAT32
        keeps = encoded and core.memory.reserve_record(lease, gradient.nbytes(core.central.size))
        kept: list[memoryview] | None = [] if keeps else None  # if not, the log gets what it was decoded to
        try:
            await self._carrier.receive(gradient, upload.gradient, check, kept)
        finally:
            uploads.end(upload)  # before it is applied
        return as_floats(upload.gradient) if kept is None else Arrived(gradient.dtype, kept), norm

    def _submit(self, lease: Lease, upload: Upload, arrived: Arrived, norm: GradientNorm | None) -> None:
        """Gives the commit, whose gradient is complete, its ticket. It is applied at once if it can be, else queued; that holds
        the upload. Raises GemError if the call was ended meanwhile, or as `Core.ticket`."""
        intake, call = self._intake, self._call
        call.require_going_on()
        intake.require_open()
        measured = norm.value if norm is not None else None
        commit = self._core.ticket(lease, self._header, self._times.received, upload, arrived, measured)
        intake.apply_loop.submit(commit, self._times)
        call.answering = True
        intake.progress.record_transport(lease.worker, call.transport)

    async def _skip(self, lease: Lease, gradient: Format) -> None:
        """Drops the gradient of a repeated commit, and writes its reply again. A pull that was sent before the commit may still
        be queued: it would change the reply while it is sent, so this waits for its turn behind it."""
        await self._carrier.skip(gradient.nbytes(self._core.central.size))
        self._call.answering = True
        await self._carrier.wait(self._intake.apply_loop.queue(lambda: partial(self._core.resend_reply, lease)))

    async def _wait(self, lease: Lease) -> None:
        """Waits until the commit is applied, its reply released, and both are on the disk."""
        intake, sequence = self._intake, self._header.sequence
        while waiting := intake.apply_loop.awaited(lease, sequence) or intake.durability.awaited(lease.recorded):
            if waiting is intake.held.get(lease.lease_id):
                await self._wait_for_others(lease, waiting)
            else:
                await self._carrier.wait(waiting)

    async def _wait_for_others(self, lease: Lease, released: Future[None]) -> None:
        """Waits until a held reply is released; it is if the call ends, too."""
        intake, times = self._intake, self._times
        times.held = intake.clock()
        intake.durability.hurry()
        try:
            await self._carrier.wait(released)
        except BaseException:
            intake.held.release(lease.lease_id, released)
            raise
        finally:
            times.released = intake.clock()

    async def _reply(self, lease: Lease, theta: Format) -> None:
        """Sends the commit's result and θ, when it is its turn. Raises LeaseEnded if the commit was not applied."""
        intake, call, core, times = self._intake, self._call, self._core, self._times
        applied = intake.apply_loop.applied(lease, self._header.sequence)
        share = core.leases.timetable.share(lease.lease_id) if core.part.leads else 0.0
        result = messages.commit_result(applied, lease.base_version, lease.progress, share)
        format_ = theta_format(core, lease, self._message, theta)
        result.theta_dtype = format_.dtype
        times.ready = times.send_began = intake.clock()
        turn = None
        if not call.nearby:  # else it takes nothing from the network
            turn = await self._turn(intake.replies, intake.replies.begin(lease.lease_id, format_.nbytes(core.central.size)))
            times.send_began = intake.clock()
        try:
            await self._carrier.send(result, core.reply(lease), format_)
            times.sent = intake.clock()
        finally:
            intake.replies.end(turn)

    async def _turn(self, turns: Turns[T], given: T | Future[T]) -> T:
        """Waits for a turn on the network, or gives it up if the call ends."""
        if not isinstance(given, Future):
            return given
        try:
            begun: T = await self._carrier.wait(given)
            return begun
        except BaseException:
            turns.give_up(given)
            raise


def theta_format(core: Core, lease: Lease, message: pb.CommitHeader, asked: Format) -> ThetaFormat:
    """The format in which θ is sent with the result of a commit that asks for a format. The difference to what the worker
    holds, if both know that; else θ is whole."""
    if isinstance(asked, ThetaFormat):
        return asked
    held, base = lease.worker_theta, message.theta_base
    is_difference = held is not None and held.sequence == base and base > 0
    if not is_difference:
        held = core.memory.new_worker_theta(lease)
    return held.next_format(message.sequence, is_difference) if held is not None else as_theta_format(asked)
