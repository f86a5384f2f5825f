"""Serves one lane: its first message, then commit after commit."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gem_api.errors import GemError, IncompleteTransfer, InvalidRequest, Overloaded, PermissionDenied
from gem_api.lane import MAX_HEADER_BYTES, Kind, error_message, opening
from gem_api.layout import Vector
from gem_api.region import Region
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, Format, gradient_format, stated_theta_format

from gem_server.core.central_variable import require_finite
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.facts import Admission, Header
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.event_loop import DecidingLoop
from gem_server.intake import messages
from gem_server.intake.calls import Call
from gem_server.intake.commit_path import CommitPath, Reply
from gem_server.lane.connection import TURN_BYTES, Connection, PeerLeft, Waits
from gem_server.lane.pending_connections import PendingConnections
from gem_server.lane.reactor import Steps, Wait
from gem_server.lane.regions import Regions
from gem_server.security.access import Identity

_HELLO = {Kind.HELLO: lane_pb2.LaneHello}
_LATER = {Kind.COMMIT: pb.CommitHeader, Kind.RENEW: lane_pb2.LaneRenewal}
PIECE = 1 << 18  # elements that are copied and checked at a time, while they are in the cache
TURN = TURN_BYTES // 4  # elements that are, before others have a turn


@dataclass(frozen=True)
class Ticket:
    """The right to open one lane, which a token stands for.

    Attributes:
        lease_id: The lease whose commits the lane carries.
        identify: Returns who asked for it; raises as `Access.identify`.
        expires_at: When the token ends, in seconds of the server's clock.
    """

    lease_id: str
    identify: Callable[[], Identity]
    expires_at: float


class LaneServicer:
    """Serves connections.

    Args:
        path: The way of a commit through the core.
        loop: Its lock guards the core.
        redeem: Returns what a token stands for, once. Raises InvalidRequest if it is unknown.
        regions: The memory shared with workers on this machine.
        pending: The connections that are not authenticated yet.
    """

    def __init__(
        self,
        path: CommitPath,
        loop: DecidingLoop,
        redeem: Callable[[bytes], Ticket],
        regions: Regions,
        pending: PendingConnections,
    ) -> None:
        self._path = path
        self._lock = loop.lock
        self._redeem = redeem
        self._regions = regions
        self._pending = pending

    def serve(self, connection: Connection) -> Steps:
        """A connection from its first byte to its last, as a generator that yields whatever it waits for."""
        try:
            last = yield from self._carry(connection)
            if last is not None:
                with self._lock:
                    self._pending.add(connection.served)
                # An honest client has one commit under way at most.
                yield from connection.finish(last, FLOAT32.nbytes(self._path.core.central.size) + MAX_HEADER_BYTES)
        finally:
            with self._lock:
                connection.ended()
                self._pending.remove(connection.served)

    def _carry(self, connection: Connection) -> Generator[Any, None, bytes | None]:
        """Carries commits until the lane ends. Returns the message that says why, unless the client has left.

        It returns no exception: with its traceback, that would keep the lease's memory.
        """
        with self._lock:
            call = self._path.calls.begin(connection.stop)
        try:
            yield from connection.handshake()
            call.transport = connection.transport
            lease_id, region = yield from self._open(call, connection)
            commits = _Commits(self._path, self._lock, call, connection, lease_id, region)
            while True:
                yield from commits.next()
        except PeerLeft:
            return _last_message(call.error) if call.error is not None else None
        except GemError as error:
            return _last_message(error)
        finally:
            with self._lock:
                self._path.calls.finish(call)

    def _open(self, call: Call, connection: Connection) -> Generator[Any, None, tuple[str, Region | None]]:
        """Opens the lane of a lease. Returns the lease, and the region that it shares on a Unix socket."""
        _, payload, hello = yield from connection.message(_HELLO)
        _require_none(payload)
        with self._lock:
            self._path.require_open()
            ticket = self._redeem(hello.token)
            call.identify = ticket.identify
            call.require_own(ticket.lease_id)
            self._path.core.leases.get(ticket.lease_id)
            self._path.calls.open_lane(call, ticket.lease_id)
            self._pending.remove(connection.served)
            connection.opened()
        welcome = opening(Kind.WELCOME, lane_pb2.LaneWelcome())
        if call.transport != "memory":
            yield from connection.write(welcome)
            return ticket.lease_id, None
        try:
            with self._lock:
                prepared = self._regions.prepare(ticket.lease_id)
            yield from connection.done(prepared)
            with self._lock:
                region, descriptor = self._regions.hand_out(ticket.lease_id)
        except (OSError, MemoryError) as error:
            raise Overloaded(f"no memory can be shared: {error}") from None
        yield from connection.write_with_descriptor(welcome, descriptor)
        return ticket.lease_id, region


@dataclass(frozen=True)
class _Commits:
    """The commits of one lane, one after the other."""

    path: CommitPath
    lock: Any
    call: Call
    connection: Connection
    lease_id: str
    region: Region | None

    def next(self) -> Steps:
        """Receives a commit, has it applied, and sends its result; or receives a sign of life."""
        kind, payload, message = yield from self.connection.message(_LATER)
        if kind is Kind.RENEW:
            _require_none(payload)
            return self._renew()
        header = messages.header(message)
        if header.lease_id != self.lease_id:
            raise PermissionDenied("this lane carries the commits of another lease: open one for this lease")
        try:
            if self.region is None:
                yield from self._over_the_socket(payload, message, header)
            else:
                yield from self._through_memory(payload, header, self.region)
        except GemError as error:
            if error is not self.call.error:
                with self.lock:
                    self.path.refused(self.call, header, error)
            raise
        finally:
            self.path.calls.end_exchange(self.call)
        self.path.require_open()

    def _renew(self) -> None:
        with self.lock:
            self.call.require_going_on()
            self.call.require_own(self.lease_id)
            self.path.renew(self.lease_id)

    def _over_the_socket(self, payload: int, message: pb.CommitHeader, header: Header) -> Steps:
        gradient, form = gradient_format(message.wire_dtype), stated_theta_format(message.theta_dtype)
        admission, lease, upload = yield from self._admit(header)
        _require_size(payload, gradient, upload.size)
        if admission is Admission.FRESH:
            arrived, norm = yield from self._receive(gradient, lease, upload)
            with self.lock:
                reply = self.path.submit(self.call, lease, header, arrived, norm)
        else:
            yield from self.connection.skip()
            reply = yield from self._again(lease, header)
        result = yield from self._result(reply, lease, header)
        theta = self.path.core.reply(lease)
        yield from self.connection.send_theta(opening(Kind.RESULT, result, form.nbytes(theta.size)), theta, form)

    def _through_memory(self, payload: int, header: Header, region: Region) -> Steps:
        """The gradient is in the region; the rule writes θ there."""
        if payload:
            raise IncompleteTransfer(f"the message has a payload of {payload} bytes, but the gradient is in the shared memory")
        admission, lease, upload = yield from self._admit(header)
        if admission is Admission.FRESH:
            norm = yield from self._take_over(region.gradient, upload)
            with self.lock:
                reply = self.path.submit(self.call, lease, header, as_floats(upload), norm)
        else:
            reply = yield from self._again(lease, header)
        result = yield from self._result(reply, lease, header)
        yield from self.connection.write(opening(Kind.RESULT, result))

    def _admit(self, header: Header) -> Generator[Any, None, tuple[Admission, Lease, Vector]]:
        """Admits a commit. Returns the memory that its gradient should be received in, too."""
        with self.lock:
            self.call.require_going_on()
            self.call.require_own(header.lease_id)
            admission, lease = self.path.admit(self.call, header)
            fresh = admission is Admission.FRESH
            if self.region is not None:
                self.path.core.adopt_region(lease, self.region)  # also for a repeated commit, whose reply must go there
            upload = lease.upload  # a newer call of the lease takes another
            flushing = self.path.undurable(lease) if fresh else None
        if flushing is not None:  # the log still has to read the last gradient, which this one overwrites
            yield from self.connection.done(flushing)
        if fresh:
            self.path.require_writable()
        return admission, lease, upload

    def _receive(
        self, gradient: Format, lease: Lease, upload: Vector
    ) -> Generator[Any, None, tuple[Arrived, GradientNorm | None]]:
        core, norm = self.path.core, self.path.new_norm()
        with self.lock:
            kept: list[memoryview] | None = [] if self.path.keeps_as_arrived(lease, gradient) else None
        yield from self.connection.receive(gradient, upload, core.rule.largest, norm, kept)
        return as_floats(upload) if kept is None else Arrived(gradient.dtype, kept), norm

    def _take_over(self, shared: Vector, upload: Vector) -> Waits[GradientNorm | None]:
        """Checks a gradient in shared memory, and copies it to `upload` unless that is the same memory: the worker may still
        change it there, so the rule checks what it reads again."""
        norm, limit = self.path.new_norm(), self.path.core.rule.largest
        for begin in range(0, shared.size, PIECE):
            piece = upload[begin : begin + PIECE]
            if upload is not shared:
                np.copyto(piece, shared[begin : begin + PIECE])
            require_finite(piece, limit, "gradient")
            if norm is not None:
                norm.add(piece)
            if (begin + PIECE) % TURN == 0:
                yield Wait.TURN
        return norm

    def _again(self, lease: Lease, header: Header) -> Generator[Any, None, Reply]:
        """The reply to a repeated commit."""
        with self.lock:
            self.call.answering = True
            written = self.path.rewrite_reply(lease)
        yield from self.connection.done(written)
        with self.lock:
            return self.path.reply(lease, header.sequence)

    def _result(self, reply: Reply, lease: Lease, header: Header) -> Generator[Any, None, pb.CommitResult]:
        """Waits until a commit is applied and durable."""
        while isinstance(reply, Future):
            yield from self.connection.done(reply)
            with self.lock:
                reply = self.path.reply(lease, header.sequence)
        return reply


def _require_none(payload: int) -> None:
    if payload:
        raise InvalidRequest(f"the message has a payload of {payload} bytes: it must have none")


def _require_size(payload: int, gradient: Format, parameters: int) -> None:
    if payload != gradient.nbytes(parameters):
        raise IncompleteTransfer(
            f"the message has a payload of {payload} bytes: {parameters} parameters in {gradient.name} need "
            f"{gradient.nbytes(parameters)}"
        )


def _last_message(error: GemError) -> bytes:
    return opening(Kind.ERROR, error_message(error))
