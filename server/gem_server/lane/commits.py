"""Serves one lane: its first message, then commit after commit."""

from __future__ import annotations

import threading
from asyncio import Future
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import coroutine
from typing import Any

import numpy as np
from gem_api.errors import GemError, IncompleteTransfer, InvalidRequest, NonFiniteGradient, Overloaded, PermissionDenied
from gem_api.lane import MAX_HEADER_BYTES, Kind, error_message, opening
from gem_api.layout import Vector
from gem_api.region import Region
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, Format, ThetaFormat, theta_format_of, wire_format

from gem_server.core.central_variable import Check
from gem_server.event_loop import Lent
from gem_server.intake.calls import Call, PeerLeft
from gem_server.intake.commit_exchange import Carrier, CommitExchange
from gem_server.intake.intake import Intake
from gem_server.lane.checks import Checks
from gem_server.lane.connection import TURN_BYTES, Connection, Waits
from gem_server.lane.pending_connections import PendingConnections
from gem_server.lane.reactor import Steps, Wait
from gem_server.lane.regions import Regions
from gem_server.security.access import Identity
from gem_server.telemetry.rpc_metrics import COMMIT, INTERNAL

_HELLO = {Kind.HELLO: lane_pb2.LaneHello}
_LATER = {Kind.COMMIT: pb.CommitHeader, Kind.RENEW: lane_pb2.LaneRenewal}
PIECE = 1 << 18  # elements that are copied and checked at a time, while they are in the cache
TURN = TURN_BYTES // 4  # elements that are copied and checked before others have a turn


@dataclass(frozen=True)
class Ticket:
    """The right to open one lane, which a token stands for.

    Attributes:
        lease_id: The lease whose commits the lane carries.
        identify: Returns who asked for it; raises as `Access.identifier` says.
        expires_at: When the token ends, in seconds of the server's clock.
    """

    lease_id: str
    identify: Callable[[], Identity]
    expires_at: float


@dataclass(frozen=True, eq=False)
class LaneServicer:
    """Serves connections.

    Attributes:
        intake: What all calls share.
        lock: The event loop's, which guards the core.
        redeem: Returns what a token stands for, once. Raises InvalidRequest if it is unknown.
        regions: The memory shared with workers on this machine.
        checks: Checks large gradients there.
        pending: The connections that are not authenticated yet.
    """

    intake: Intake
    lock: threading.Lock
    redeem: Callable[[bytes], Ticket]
    regions: Regions
    checks: Checks
    pending: PendingConnections

    def serve(self, connection: Connection) -> Steps:
        """A connection from its first byte to its last, as a generator that yields whatever it waits for."""
        try:
            last = yield from self._carry(connection)
            if last is not None:
                with self.lock:
                    self.pending.add(connection.served)
                # An honest client has one commit under way at most.
                yield from connection.finish(last, FLOAT32.nbytes(self.intake.core.central.size) + MAX_HEADER_BYTES)
        finally:
            with self.lock:
                connection.ended()
                self.pending.remove(connection.served)

    def _carry(self, connection: Connection) -> Generator[Any, None, bytes | None]:
        """Carries commits until the lane ends. Returns the message that says why, unless the client has left.

        It returns no exception: with its traceback, that would keep the lease's memory.
        """
        with self.lock:
            call = self.intake.calls.begin(connection.stop)
        try:
            yield from connection.handshake()
            call.transport, call.nearby = connection.transport, connection.nearby
            lease_id = yield from self._open(call, connection)
            carrier = _Lane(connection, call.region, self.checks, Lent(self.lock))
            while True:
                yield from self._next(call, connection, lease_id, carrier)
        except PeerLeft:
            return _last_message(call.error) if call.error is not None else None
        except GemError as error:
            return _last_message(error)
        except Exception:
            with self.lock:
                self.intake.rpcs.failed(COMMIT, INTERNAL)
            raise
        finally:
            with self.lock:
                self.intake.calls.finish(call)

    def _open(self, call: Call, connection: Connection) -> Generator[Any, None, str]:
        """Opens the lane of a lease, and shares memory with the worker on a Unix socket. Returns the lease."""
        _, payload, hello = yield from connection.message(_HELLO)
        _require_none(payload)
        with self.lock:
            self.intake.require_open()
            ticket = self.redeem(hello.token)
            call.identify = ticket.identify
            call.require_own(ticket.lease_id)
            self.intake.core.leases.get(ticket.lease_id)
            self.intake.calls.open_lane(call, ticket.lease_id)
            self.pending.remove(connection.served)
            connection.opened()
        welcome = opening(Kind.WELCOME, lane_pb2.LaneWelcome())
        if call.transport != "memory":
            yield from connection.write(welcome)
            return ticket.lease_id
        try:
            with self.lock:
                prepared = self.regions.prepare(ticket.lease_id)
            yield from connection.done(prepared)
            with self.lock:
                call.region, descriptor = self.regions.hand_out(ticket.lease_id)
        except (OSError, MemoryError) as error:
            raise Overloaded(f"no memory can be shared: {error}") from None
        yield from connection.write_with_descriptor(welcome, descriptor)
        return ticket.lease_id

    def _next(self, call: Call, connection: Connection, lease_id: str, carrier: Carrier) -> Steps:
        """Receives a commit, has it applied, and sends its result; or receives a sign of life."""
        kind, payload, message = yield from connection.message(_LATER)
        with self.lock:
            call.require_going_on()
            call.require_own(lease_id)
            if kind is Kind.RENEW:
                _require_none(payload)
                self.intake.core.renew(lease_id, self.intake.clock())
                return
            if message.lease_id != lease_id:
                raise PermissionDenied("this lane carries the commits of another lease: open one for this lease")
            yield from CommitExchange(self.intake, call, message, carrier).run().__await__()


@dataclass(frozen=True)
class _Lane:
    """Carries commits over the connection, or through memory shared with the worker: its gradient is there, and the rule writes
    θ there."""

    connection: Connection
    region: Region | None
    checks: Checks
    lent: Lent

    def formats(self, message: pb.CommitHeader, parameters: int) -> tuple[Format, Format]:
        payload = self.connection.payload_left
        if self.region is not None:
            if payload:
                raise IncompleteTransfer(
                    f"the message has a payload of {payload} bytes, but the gradient is in the shared memory"
                )
            return FLOAT32, FLOAT32
        gradient, theta = wire_format(message.wire_dtype), theta_format_of(message.theta_dtype)
        if payload != gradient.nbytes(parameters):
            raise IncompleteTransfer(
                f"the message has a payload of {payload} bytes: {parameters} parameters in {gradient.name} need "
                f"{gradient.nbytes(parameters)}"
            )
        return gradient, theta

    @coroutine
    def receive(self, format_: Format, into: Vector, check: Check, kept: list[memoryview] | None) -> Waits[None]:
        # A gradient that is copied is not left to other threads: if the lane is stopped, another gradient may get the memory.
        stays = self.region is not None and into is self.region.gradient
        if stays and (checked := self.checks.begin(into, check)) is not None:
            if why := (yield from self.wait(checked)):
                raise NonFiniteGradient(why)
            return
        with self.lent:
            if self.region is None:
                yield from self.connection.receive(format_, into, check, kept)
            else:
                yield from take_over(self.region.gradient, into, check)

    @coroutine
    def skip(self, nbytes: int) -> Waits[None]:
        with self.lent:
            yield from self.connection.skip()

    @coroutine
    def wait(self, future: Future[Any]) -> Generator[Any, None, Any]:
        with self.lent:
            yield from self.connection.done(future)
        self.connection.require_going_on()  # a newer call may have held the lock meanwhile
        return future.result()

    @coroutine
    def send(self, result: pb.CommitResult, theta: Vector, format_: ThetaFormat) -> Waits[None]:
        with self.lent:
            if self.region is None:
                yield from self.connection.send_theta(opening(Kind.RESULT, result, format_.nbytes(theta.size)), theta, format_)
            else:
                yield from self.connection.write(opening(Kind.RESULT, result))


def take_over(shared: Vector, upload: Vector, check: Check) -> Waits[None]:
    """Checks a gradient in shared memory, and copies it to `upload` unless that is the same memory: the worker may still change
    it there, so the rule checks what it reads again."""
    for begin in range(0, shared.size, PIECE):
        piece = upload[begin : begin + PIECE]
        if upload is not shared:
            np.copyto(piece, shared[begin : begin + PIECE])
        check(piece)
        if (begin + PIECE) % TURN == 0:
            yield Wait.TURN


def _require_none(payload: int) -> None:
    if payload:
        raise InvalidRequest(f"the message has a payload of {payload} bytes: it must have none")


def _last_message(error: GemError) -> bytes:
    return opening(Kind.ERROR, error_message(error))
