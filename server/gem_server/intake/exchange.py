"""One commit from its header to its reply, whichever way its bytes travel.

All of it holds the event loop's lock, except a carrier while it moves bytes or waits. gRPC's carrier runs in a task of the
loop. The lane drives the coroutine by hand, on its own threads.
"""

from __future__ import annotations

from asyncio import CancelledError, Future
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from gem_api.errors import GemError
from gem_api.layout import Vector
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Format, ThetaFormat

from gem_server.core.central_variable import Check, require_finite
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.facts import Admission, Header
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.core.uploads import Upload
from gem_server.intake import messages
from gem_server.intake.calls import Call, PeerLeft
from gem_server.intake.commit_path import CommitPath, Reply
from gem_server.intake.turns import Turns
from gem_server.telemetry.rpc_metrics import COMMIT, INTERNAL, name_of
from gem_server.telemetry.wire_metrics import Way

T = TypeVar("T")


class Carrier(Protocol):
    """Moves the tensors of one call's commits, and waits. Lends the event loop's lock to others meanwhile."""

    def formats(self, message: pb.CommitHeader, parameters: int) -> tuple[Format, Format]:
        """The wire formats of a commit's gradient and of θ, for P parameters. Raises InvalidRequest, or IncompleteTransfer if
        the size of what follows is known, and is another."""

    def receive(self, form: Format, into: Vector, check: Check, kept: list[memoryview] | None) -> Awaitable[None]:
        """Fills `into` (float32, shape (P,)) with the gradient, and checks each part while it is in the cache. Appends its
        bytes as they arrived to `kept`, if given. Raises IncompleteTransfer or NonFiniteGradient."""

    def skip(self, nbytes: int) -> Awaitable[None]:
        """Reads and drops the gradient of a repeated commit. Raises IncompleteTransfer."""

    def wait(self, future: Future[Any]) -> Awaitable[Any]:
        """Waits until a future is done, without cancelling it. Raises what the future raises."""

    def send(self, result: pb.CommitResult, theta: Vector, form: ThetaFormat) -> Awaitable[None]:
        """Sends a commit's result and θ (float32, shape (P,)), which must not change meanwhile."""


async def exchange(path: CommitPath, call: Call, message: pb.CommitHeader, carrier: Carrier) -> None:
    """Receives the commit of a header, has it applied, and sends its result. Raises GemError."""
    header, began = messages.header(message), path.clock()
    call.trace, call.held_seconds = path.traces.begin(message, call.transport), 0.0
    try:
        await _exchange(path, call, header, message, carrier)
        path.rpcs.ended(COMMIT, began + call.held_seconds)
    except (CancelledError, PeerLeft):
        call.trace.failed(name_of(call.error))
        path.rpcs.ended(COMMIT, began, name_of(call.error))
        raise
    except GemError as error:
        call.trace.failed(f"{name_of(error)}: {error}")
        path.rpcs.ended(COMMIT, began, name_of(error))
        if error is not call.error:
            path.rejected(call, header, error)
        raise
    except Exception:
        call.trace.failed(INTERNAL)
        raise
    finally:
        path.calls.end_exchange(call)
        call.trace.end()
    path.require_open()


async def _exchange(path: CommitPath, call: Call, header: Header, message: pb.CommitHeader, carrier: Carrier) -> None:
    admission, lease = path.admit(call, header)
    gradient, form = carrier.formats(message, path.core.central.size)
    if admission is Admission.FRESH:
        reply = await _submit(path, call, lease, header, gradient, carrier)
    else:
        await carrier.skip(gradient.nbytes(path.core.central.size))
        call.answering = True
        await carrier.wait(path.rewrite_reply(lease))
        reply = path.reply(lease, header.sequence)
    while isinstance(reply, Future):  # until it is applied, released and durable
        if reply is path.held.get(lease.lease_id):
            await _others(path, call, lease, reply, carrier)
        else:
            await carrier.wait(reply)
        reply = path.reply(lease, header.sequence)
    await _answer(path, call, lease, message, reply, form, carrier)


async def _others(path: CommitPath, call: Call, lease: Lease, released: Future[None], carrier: Carrier) -> None:
    """Waits until a held reply is released; it is if the call ends, too."""
    began = path.clock()
    path.durability.hurry()
    try:
        await carrier.wait(released)
    except BaseException:
        path.held.release(lease.lease_id, released)
        raise
    finally:
        ended = path.clock()
        call.held_seconds = ended - began
        call.trace.held(began, ended)


async def _answer(
    path: CommitPath, call: Call, lease: Lease, message: pb.CommitHeader, reply: pb.CommitResult, form: Format, carrier: Carrier
) -> None:
    """Sends a commit's result and θ, when it is its turn."""
    sent = path.theta_format(lease, message, form)
    reply.theta_dtype = sent.dtype
    nbytes = sent.nbytes(path.core.central.size)
    asked = path.clock()
    call.trace.ready(asked)
    turn = await _turn(path.replies, path.replies.begin(lease.lease_id, nbytes, call.nearby), carrier)
    try:
        began = path.wire.waited(Way.DOWN, call.transport, asked)
        await carrier.send(reply, path.core.reply(lease), sent)
        ended = path.wire.carried(Way.DOWN, call.transport, began)
        call.trace.part("wait to send", asked, began)
        call.trace.part("send", began, ended)
    finally:
        path.replies.end(turn)


async def _turn(turns: Turns[T], given: T | Future[T], carrier: Carrier) -> T:
    """Waits for a turn, or gives it up if the call ends."""
    if not isinstance(given, Future):
        return given
    try:
        begun: T = await carrier.wait(given)
        return begun
    except BaseException:
        turns.give_up(given)
        raise


async def _submit(path: CommitPath, call: Call, lease: Lease, header: Header, gradient: Format, carrier: Carrier) -> Reply:
    """Receives a new commit's gradient, when it is its turn, and gives the commit its ticket."""
    path.require_writable()
    asked = path.clock()
    upload = await _turn(path.uploads, path.begin_upload(call, lease), carrier)
    began = path.wire.waited(Way.UP, call.transport, asked)
    try:
        arrived, norm = await _receive(path, lease, gradient, upload, carrier)
        ended = path.wire.carried(Way.UP, call.transport, began)
        call.trace.part("wait to receive", asked, began)
        call.trace.part("receive", began, ended)
        return path.submit(call, lease, header, upload, arrived, norm)
    finally:
        upload.release()


async def _receive(
    path: CommitPath, lease: Lease, gradient: Format, upload: Upload, carrier: Carrier
) -> tuple[Arrived, GradientNorm | None]:
    limit, norm, count = path.core.rule.largest, path.new_norm(), path.uploads.nearly(upload, upload.gradient.nbytes)

    def check(piece: Vector) -> None:
        require_finite(piece, limit, "gradient")
        count(piece.nbytes)
        if norm is not None:
            norm.add(piece)

    kept: list[memoryview] | None = [] if path.keeps_as_arrived(lease, gradient) else None
    try:
        await carrier.receive(gradient, upload.gradient, check, kept)
    finally:
        path.uploads.end(upload)  # before it is applied
    return as_floats(upload.gradient) if kept is None else Arrived(gradient.dtype, kept), norm
