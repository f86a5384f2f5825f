"""Serves one lane: its first message, then commit after commit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import numpy as np
from gem_api.errors import GemError, IncompleteTransfer, InvalidRequest, Overloaded, PermissionDenied
from gem_api.lane import Kind, error_message, opening
from gem_api.layout import Vector
from gem_api.region import Region
from gem_api.v1 import lane_pb2, training_pb2
from gem_api.wire import FLOAT32, Format, gradient_format, stated_theta_format

from gem_server.commit_path import CommitPath
from gem_server.core.central_variable import require_finite
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.facts import Admission, Header
from gem_server.core.leases import Lease
from gem_server.core.norm_bound import GradientNorm
from gem_server.event_loop import DecidingLoop
from gem_server.lane.connection import Connection, PeerLeft
from gem_server.lane.reactor import Steps, shut_down
from gem_server.lane.regions import Regions
from gem_server.lane.visitors import Visitors
from gem_server.rpc import messages
from gem_server.rpc.calls import Call
from gem_server.security.access import Identity

PIECE = 1 << 18  # elements that are copied and checked at a time, while they are in the cache


class Ticket:
    """What a token stands for.

    Attributes:
        lease_id: The lease whose commits the lane carries.
        identify: Returns who asked for it; raises as `Access.identify`.
        expires_at: When the token ends, in seconds of the caller's clock.
    """

    def __init__(self, lease_id: str, identify: Callable[[], Identity], expires_at: float) -> None:
        self.lease_id, self.identify, self.expires_at = lease_id, identify, expires_at


class LaneServicer:
    """Serves connections, each as a generator that yields whatever it waits for.

    Args:
        path: The way of a commit through the core.
        loop: Its lock guards the core.
        redeem: Returns what a token stands for, once. Raises InvalidRequest if it is unknown.
        regions: The memory shared with workers on this machine.
        visitors: The connections that have not shown their token yet.
    """

    def __init__(
        self,
        path: CommitPath,
        loop: DecidingLoop,
        redeem: Callable[[bytes], Ticket],
        regions: Regions,
        visitors: Visitors,
    ) -> None:
        self._path = path
        self._lock = loop.lock
        self._redeem = redeem
        self._regions = regions
        self._visitors = visitors

    def serve(self, connection: Connection, sock: socket.socket) -> Steps:
        """A connection from its first byte to its last."""
        with self._lock:
            call = self._path.calls.begin(lambda: _stop(call, connection, sock))
        try:
            yield from self._commits(call, connection)
        except PeerLeft:
            if call.error is not None:
                with suppress(PeerLeft):
                    yield from connection.send_error(call.error)
        except GemError as error:
            with suppress(PeerLeft):
                if connection.payload_left <= FLOAT32.nbytes(self._path.core.central.size):
                    yield from connection.skip()  # a client reads no error before it has sent its gradient
                yield from connection.send_error(error)
        finally:
            with self._lock:
                self._visitors.remove(connection.served)
                self._path.calls.finish(call)

    def _commits(self, call: Call, connection: Connection) -> Steps:
        lease_id, region = yield from self._open(call, connection)
        while True:
            prefix, message = yield from connection.message(Kind.COMMIT, training_pb2.CommitHeader)
            header = messages.header(message)
            if header.lease_id != lease_id:
                raise PermissionDenied("this lane carries the commits of another lease: open one for this lease")
            try:
                if region is None:
                    yield from self._commit(call, connection, prefix.payload, message, header)
                else:
                    yield from self._commit_in_memory(call, connection, prefix.payload, header, region)
            except GemError as error:
                if error is not call.error:
                    with self._lock:
                        self._path.refused(call, header, error)
                raise
            finally:
                with self._lock:
                    connection.sending = False
                    self._path.calls.end_exchange(call)
            with self._lock:
                self._path.require_open()

    def _open(self, call: Call, connection: Connection) -> Generator[Any, None, tuple[str, Region | None]]:
        """Opens the lane of a lease. Returns the lease, and the region that it shares on a Unix socket."""
        yield from connection.handshake()
        call.transport = connection.transport
        prefix, hello = yield from connection.message(Kind.HELLO, lane_pb2.LaneHello)
        if prefix.payload:
            raise InvalidRequest(f"the first message has a payload of {prefix.payload} bytes: it must have none")
        with self._lock:
            self._path.require_open()
            ticket = self._redeem(hello.token)
            call.identify = ticket.identify
            call.require_own(ticket.lease_id)
            self._path.core.leases.get(ticket.lease_id)
            self._path.calls.open_lane(call, ticket.lease_id)
            self._visitors.remove(connection.served)
            connection.opened()
        welcome = opening(Kind.WELCOME, lane_pb2.LaneWelcome())
        if connection.transport != "memory":
            yield from connection.write(welcome)
            return ticket.lease_id, None
        try:
            region, descriptor = self._regions.open(ticket.lease_id)
        except (OSError, MemoryError) as error:
            raise Overloaded(f"no memory can be shared: {error}") from None
        yield from connection.write_with_descriptor(welcome, descriptor)
        return ticket.lease_id, region

    def _commit(
        self, call: Call, connection: Connection, payload: int, message: training_pb2.CommitHeader, header: Header
    ) -> Steps:
        """A commit whose tensors are on the connection."""
        gradient, theta = gradient_format(message.wire_dtype), stated_theta_format(message.theta_dtype)
        admission, lease, upload = yield from self._admit(call, header)
        _require_size(payload, gradient, upload.size)
        if admission is Admission.FRESH:
            arrived, norm = yield from self._receive(connection, gradient, upload)
            with self._lock:
                self._path.submit(call, lease, header, arrived, norm)
        else:
            yield from connection.skip()
            yield from self._settle(call, lease)
        result = yield from self._result(lease, header.sequence)
        with self._lock:
            call.require_going_on()
            reply = self._path.core.reply(lease)
            connection.sending = True
        yield from connection.send_theta(opening(Kind.RESULT, result, theta.nbytes(reply.size)), reply, theta)

    def _commit_in_memory(self, call: Call, connection: Connection, payload: int, header: Header, region: Region) -> Steps:
        """A commit whose gradient is in the region. The rule writes θ there."""
        if payload:
            raise IncompleteTransfer(f"the message has a payload of {payload} bytes, but the gradient is in the shared memory")
        admission, lease, _ = yield from self._admit(call, header)
        with self._lock:
            call.require_going_on()
            self._path.core.adopt_region(lease, region)  # also for a repeated commit, whose reply must go there
            upload = lease.upload
        if admission is Admission.FRESH:
            norm = self._take_over(region.gradient, upload)
            with self._lock:
                self._path.submit(call, lease, header, as_floats(upload), norm)
        else:
            yield from self._settle(call, lease)
        result = yield from self._result(lease, header.sequence)
        with self._lock:
            call.require_going_on()
            connection.sending = True
        yield from connection.write(opening(Kind.RESULT, result))

    def _admit(self, call: Call, header: Header) -> Generator[Any, None, tuple[Admission, Lease, Vector]]:
        """Admits a commit. Returns where its gradient should be received, too."""
        with self._lock:
            call.require_going_on()
            call.require_own(header.lease_id)
            admission, lease = self._path.admit(call, header)
            upload = lease.upload  # a newer call of the lease takes another
            used = self._path.undurable(lease) if admission is Admission.FRESH else None
        if used is not None:  # this gradient overwrites the last one
            yield used
            used.result()
        if admission is Admission.FRESH:
            with self._lock:
                self._path.require_writable()
        return admission, lease, upload

    def _settle(self, call: Call, lease: Lease) -> Steps:
        """Waits until the reply of a repeated commit can be sent again."""
        with self._lock:
            call.answering = True
            written = self._path.rewrite_reply(lease)
        yield written
        written.result()

    def _receive(
        self, connection: Connection, gradient: Format, upload: Vector
    ) -> Generator[Any, None, tuple[Arrived, GradientNorm | None]]:
        core, norm = self._path.core, self._path.new_norm()
        kept: list[memoryview] | None = [] if core.logged and gradient is not FLOAT32 else None
        yield from connection.receive(gradient, upload, core.rule.largest, norm, kept)
        return as_floats(upload) if kept is None else Arrived(gradient.dtype, kept), norm

    def _take_over(self, shared: Vector, upload: Vector) -> GradientNorm | None:
        """Checks a gradient in shared memory, and copies it to `upload` unless that is the same memory: the worker may still
        change it there, so the rule checks what it reads again."""
        norm, limit = self._path.new_norm(), self._path.core.rule.largest
        for begin in range(0, shared.size, PIECE):
            piece = upload[begin : begin + PIECE]
            if upload is not shared:
                np.copyto(piece, shared[begin : begin + PIECE])
            require_finite(piece, limit, "gradient")
            if norm is not None:
                norm.add(piece)
        return norm

    def _result(self, lease: Lease, sequence: int) -> Generator[Any, None, training_pb2.CommitResult]:
        """Waits until a commit is applied and durable."""
        with self._lock:
            queued = self._path.queued(lease, sequence)
        if queued is not None:
            yield queued
            queued.result()
        with self._lock:
            result, flushing = self._path.result(lease, sequence), self._path.undurable(lease)
        if flushing is not None:
            yield flushing
            flushing.result()
        return result


def _require_size(payload: int, gradient: Format, parameters: int) -> None:
    if payload != gradient.nbytes(parameters):
        raise IncompleteTransfer(
            f"the message has a payload of {payload} bytes: {parameters} parameters in {gradient.name} need "
            f"{gradient.nbytes(parameters)}"
        )


def _stop(call: Call, connection: Connection, sock: socket.socket) -> None:
    """Wakes whoever serves a call that was ended. The lock is held.

    It then sends the error, unless it is sending θ, which may change from now on, or waits for a commit in the queue; nobody
    uses the socket during that wait, so the error is sent here.
    """
    assert call.error is not None
    if call.answering and not connection.sending:
        with suppress(OSError):
            sock.send(opening(Kind.ERROR, error_message(call.error)))
    shut_down(sock, socket.SHUT_RDWR if call.answering else socket.SHUT_RD)
