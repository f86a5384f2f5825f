"""Serves one lane: its first message, then commit after commit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from gem_api.errors import GemError, IncompleteTransfer, PermissionDenied
from gem_api.lane import Kind, Prefix, opening
from gem_api.v1 import lane_pb2, training_pb2
from gem_api.wire import FLOAT32, Format, gradient_format

from gem_server.commit_path import CommitPath
from gem_server.core.commits import Arrived, as_floats
from gem_server.core.facts import Admission, Header
from gem_server.core.leases import Lease
from gem_server.event_loop import DecidingLoop
from gem_server.lane.connection import Connection, PeerLeft
from gem_server.lane.reactor import Steps
from gem_server.rpc import messages
from gem_server.rpc.calls import Call
from gem_server.rpc.transports import stated_theta_format
from gem_server.security.access import Identity

HELLO_SECONDS = 10.0


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
    """

    def __init__(self, path: CommitPath, loop: DecidingLoop, redeem: Callable[[bytes], Ticket]) -> None:
        self._path = path
        self._lock = loop.lock
        self._redeem = redeem

    def serve(self, connection: Connection, sock: socket.socket) -> Steps:
        """A connection from its first byte to its last."""
        with self._lock:
            call = self._path.calls.begin(lambda: _stop(call, sock))
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
                self._path.calls.finish(call)

    def _commits(self, call: Call, connection: Connection) -> Steps:
        yield from connection.handshake()
        _, hello = yield from connection.message(Kind.HELLO, lane_pb2.LaneHello)
        with self._lock:
            ticket = self._redeem(hello.token)
            call.identify = ticket.identify
            call.require_own(ticket.lease_id)
        yield from connection.write(opening(Kind.WELCOME, lane_pb2.LaneWelcome()))
        while True:
            prefix, message = yield from connection.message(Kind.COMMIT, training_pb2.CommitHeader)
            header = messages.header(message)
            try:
                yield from self._one_commit(call, connection, prefix, message, header, ticket)
            except GemError as error:
                if error is not call.error:
                    with self._lock:
                        self._path.refused(call, header, error)
                raise
            finally:
                with self._lock:
                    self._path.calls.end_exchange(call)

    def _one_commit(
        self,
        call: Call,
        connection: Connection,
        prefix: Prefix,
        message: training_pb2.CommitHeader,
        header: Header,
        ticket: Ticket,
    ) -> Steps:
        path = self._path
        if header.lease_id != ticket.lease_id:
            raise PermissionDenied("this lane carries the commits of another lease: open one for this lease")
        gradient, theta = gradient_format(message.wire_dtype), stated_theta_format(message.theta_dtype)
        with self._lock:
            call.require_going_on()
            call.require_own(header.lease_id)
            admission, lease = path.admit(call, header)
            used = path.undurable(lease) if admission is Admission.FRESH else None
            reply = path.core.reply(lease)
            norm = path.new_norm()
        _require_size(prefix, gradient, reply.size)
        if used is not None:  # this gradient overwrites the last one
            yield used
            used.result()
        if admission is Admission.FRESH:
            arrived = yield from self._receive(connection, gradient, lease, norm)
            with self._lock:
                path.submit(call, lease, header, arrived, norm)
        else:
            yield from connection.skip()
            call.answering = True
        result = yield from self._result(lease, header.sequence)
        start = opening(Kind.RESULT, result, theta.nbytes(reply.size))
        yield from connection.send_theta(start, reply, theta)

    def _receive(self, connection, gradient: Format, lease: Lease, norm):  # type: ignore[no-untyped-def]
        kept: list[memoryview] | None = [] if self._path.core.logged and gradient is not FLOAT32 else None
        upload = lease.upload
        yield from connection.receive(gradient, upload, self._path.core.rule.largest, norm, kept)
        return as_floats(upload) if kept is None else Arrived(gradient.dtype, kept)

    def _result(self, lease: Lease, sequence: int):  # type: ignore[no-untyped-def]
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


def _require_size(prefix: Prefix, gradient: Format, parameters: int) -> None:
    if prefix.payload != gradient.nbytes(parameters):
        raise IncompleteTransfer(
            f"the message has a payload of {prefix.payload} bytes: {parameters} parameters in {gradient.name} need "
            f"{gradient.nbytes(parameters)}"
        )


def _stop(call: Call, sock: socket.socket) -> None:
    """Wakes whoever serves a call that was ended. It may still send the error, unless the server is sending θ, which may change
    from now on."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR if call.answering else socket.SHUT_RD)
