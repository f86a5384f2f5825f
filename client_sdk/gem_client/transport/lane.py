"""The client's end of a lane: one blocking socket that carries commits and their results."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from gem_api.errors import InvalidRequest, ServerUnavailable
from gem_api.framing import ChunkView, bytes_of
from gem_api.lane import MAX_HEADER_BYTES, PREFIX_BYTES, Kind, error_of, opening, parse_header, parse_prefix, tune
from gem_api.layout import Vector
from gem_api.region import Region, attach_region, socket_address
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, ThetaFormat

from gem_client.transport.pulse import LOOK_SECONDS, Pulse, silent_for
from gem_client.transport.security import Security
from gem_client.transport.theta_receiver import ThetaReceiver

CONNECT_SECONDS = 3.0  # a firewall that drops packets would otherwise cost minutes
QUIET_SECONDS = 2.5  # without a packet on an idle lane: a renewal takes another way
_USUAL_BYTES = 256  # of a result without θ; what is read beyond it is θ's beginning
_ENCRYPTED_BYTES = 1 << 20  # that TLS is given at a time: it does not say how far it has come


class Lane:
    """An open lane, for the commits of one lease. One thread at a time uses it; any may close it.

    Args:
        sock: The connected socket.
        token: From OpenLane.
        timeout: Seconds without progress that an exchange may take.
        parameters: P, if the server is to share memory for that many parameters on this socket.

    Raises:
        GemError: The server refuses the lane.
        OSError: The connection broke, or the shared memory is not valid.

    Attributes:
        region: Memory shared with the server, for the gradients and θ; None if they go through the socket.
    """

    def __init__(self, sock: socket.socket, token: bytes, timeout: float, parameters: int | None = None) -> None:
        self._sock = sock
        self._using = threading.RLock()  # held during an exchange, so that the socket is not closed under its thread
        weakref.finalize(self, sock.close)  # a session that nobody closes leaves no socket open
        self._gathers = hasattr(sock, "sendmsg") and not self._encrypted  # neither Windows nor TLS can
        self._room = memoryview(bytearray(PREFIX_BYTES + MAX_HEADER_BYTES))
        self._ahead = self._room[:0]  # bytes that were received with a header, and belong to what follows it
        self._whole = 0  # the flag of `recv` that waits for all bytes
        self._pulse: Pulse | None = None
        self._send(opening(Kind.HELLO, lane_pb2.LaneHello(token=token)), ())
        self.region: Region | None = None
        if parameters is None:
            self._receive_message(Kind.WELCOME, lane_pb2.LaneWelcome)
        else:
            self.region = self._receive_region(parameters)
        self._wait_at_most(timeout)

    def _receive_region(self, parameters: int) -> Region:
        """Reads the server's welcome and the descriptor that comes with its first byte."""
        start, descriptors, _, _ = socket.recv_fds(self._sock, PREFIX_BYTES, 1)
        try:
            self._receive_message(Kind.WELCOME, lane_pb2.LaneWelcome, start)
            if not descriptors:
                raise OSError("the server sent no memory")
            return attach_region(descriptors[0], parameters)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _wait_at_most(self, seconds: float) -> None:
        """Ends an exchange that makes no progress for so long, or whose server can't be reached over the network any more.

        The kernel keeps the time if it can: it also waits for all bytes in one call then. Python's own limit would look at the
        socket before each call, and be woken for every packet.
        """
        if self.region is None:
            self._pulse = Pulse(self._sock, seconds)
            seconds = LOOK_SECONDS
        if sys.platform != "linux" or self._encrypted:
            self._sock.settimeout(seconds)
            return
        self._sock.settimeout(None)
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._whole = socket.MSG_WAITALL

    @property
    def transport(self) -> str:
        """How tensors travel: "memory", "tls" or "tcp"."""
        return "memory" if self.region is not None else "tls" if self._encrypted else "tcp"

    @property
    def _encrypted(self) -> bool:
        return isinstance(self._sock, ssl.SSLSocket)

    def exchange(
        self,
        header: pb.CommitHeader,
        nbytes: int,
        pieces: Iterable[npt.NDArray[np.uint8]],
        theta: Vector | None,
        receiver: ThetaReceiver,
    ) -> pb.CommitResult:
        """Sends a commit and receives its result and θ.

        Args:
            header: The commit's header.
            nbytes: Bytes of the gradient in its wire format; 0 if it is in the region.
            pieces: The gradient in its wire format.
            theta: Receives θ: float32, shape (P,). None: it is in the region afterwards.
            receiver: Knows θ's wire format.

        Raises:
            GemError: The server refuses the commit, or the connection broke. The lane can't be used again.
        """
        with self._using:
            try:
                self._send(opening(Kind.COMMIT, header, nbytes), pieces)
                result, payload = self._receive_message(Kind.RESULT, pb.CommitResult)
                sent = receiver.form(result)
                expected = sent.nbytes(theta.size) if theta is not None else 0
                if payload != expected:
                    raise ServerUnavailable(f"the server sent {payload} bytes of θ instead of {expected}")
                if theta is not None:
                    self._receive_theta(theta, sent)
            except (TimeoutError, BlockingIOError):
                raise ServerUnavailable("the connection to the server broke: nothing moved on it for too long") from None
            except OSError as error:
                raise ServerUnavailable(f"the connection to the server broke: {error}") from None
        committed: pb.CommitResult = result
        return committed

    def renew(self) -> bool:
        """Renews the lease, from any thread. Returns False if the lane can't do that now: during an exchange, or if it may have
        broken. That costs both sides a twentieth of what a call over gRPC does."""
        if not self._using.acquire(blocking=False):
            return False
        try:
            if (
                _readable(self._sock) or (silent_for(self._sock) or 0.0) > QUIET_SECONDS
            ):  # the server has ended the lane, or is gone
                return False
            self._sock.sendall(opening(Kind.RENEW, lane_pb2.LaneRenewal()))
            return True
        except (OSError, ValueError):  # broken, or closed
            return False
        finally:
            self._using.release()

    def close(self) -> None:
        """Ends the lane, from any thread; an exchange in progress raises ServerUnavailable."""
        with suppress(OSError):
            # Not the method of an SSLSocket: that drops the encryption first, and an exchange would go on without it.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._using:
            self._sock.close()

    def _send(self, start: bytes, pieces: Iterable[npt.NDArray[np.uint8]]) -> None:
        with suppress(ConnectionError, ssl.SSLEOFError):  # the server may have sent the reason before: what is read next
            for piece in pieces:
                # The header goes with the first piece: a packet of its own would wake the server for nothing.
                sent = self._patiently(self._sock.sendmsg, (start, piece.data)) if start and self._gathers else 0
                self._send_all(memoryview(start)[sent:])
                self._send_all(piece.data[max(0, sent - len(start)) :])
                start = b""
            self._send_all(memoryview(start))

    def _send_all(self, view: memoryview) -> None:
        while view:
            piece = view[:_ENCRYPTED_BYTES] if self._encrypted else view
            view = view[self._patiently(self._sock.send, piece) :]
            if view:
                self._require_silence()

    def _require_silence(self) -> None:
        """Raises ConnectionAbortedError if the server has said something before all was sent: it wants no more. TLS does not
        tell its own messages from that."""
        if not self._encrypted and _readable(self._sock):
            raise ConnectionAbortedError

    def _patiently(self, call: Callable[..., int], *arguments: Any) -> int:
        """Makes a call of the socket, again and again while it times out and the lane is alive. Returns the bytes moved."""
        again = False
        while True:
            try:
                return call(*arguments)
            except (TimeoutError, BlockingIOError) as error:
                if self._pulse is None or error.errno == errno.ETIMEDOUT:  # the system's own limit
                    raise
                if call != self._sock.recv_into:
                    self._require_silence()
                self._pulse.look(again)
                again = True

    def _receive_message(self, kind: Kind, header_type: type, start: bytes = b"") -> tuple[Any, int]:
        """Reads a message up to its payload; `start` has been read already. Returns its header and the payload's bytes."""
        room, received = self._room, len(start)
        room[:received] = start
        received = self._at_least(PREFIX_BYTES, received)
        try:
            prefix = parse_prefix(room[:PREFIX_BYTES])
            end = PREFIX_BYTES + prefix.header
            received = self._at_least(end, received)
            expected = lane_pb2.LaneError if prefix.kind is Kind.ERROR else header_type
            header = parse_header(room[PREFIX_BYTES:end], expected)
        except InvalidRequest as error:  # not the server's words, but those of something in between
            raise ServerUnavailable(f"the connection to the server broke: {error}") from None
        if prefix.kind is Kind.ERROR:
            raise error_of(header)
        if prefix.kind is not kind:
            raise ServerUnavailable(f"the server sent a message of kind {prefix.kind.name} instead of {kind.name}")
        self._ahead = room[end:received]
        return header, prefix.payload

    def _at_least(self, size: int, received: int) -> int:
        """Reads until the room holds `size` bytes, of which it has `received`. Returns how many it holds then, which may be
        more: a system call costs more than the copy of the few bytes too many."""
        while received < size:
            count = self._patiently(self._sock.recv_into, self._room[received : max(size, _USUAL_BYTES)])
            if not count:
                raise ServerUnavailable("the server closed the lane")
            received += count
        return received

    def _receive_theta(self, theta: Vector, form: ThetaFormat) -> None:
        if form is FLOAT32:
            self._fill(bytes_of(theta))
            return
        assembly, begin = form.assembly(theta), 0
        for _, room in form.packing.pieces(theta.size):
            self._fill(room.data)
            assembly.add(ChunkView(begin, room.data))
            begin += room.size

    def _fill(self, view: memoryview) -> None:
        ahead = min(len(view), len(self._ahead))
        view[:ahead], self._ahead = self._ahead[:ahead], self._ahead[ahead:]
        view = view[ahead:]
        while view:
            count = self._patiently(self._sock.recv_into, view, len(view), self._whole)
            if not count:
                raise ServerUnavailable("the server closed the lane")
            view = view[count:]


def _readable(sock: socket.socket) -> bool:
    """Whether something can be read, or the connection has ended."""
    if not hasattr(select, "poll"):  # on Windows; elsewhere `select` refuses descriptors above 1,023
        return bool(select.select((sock,), (), (), 0)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def open_memory_lane(offer: pb.OpenLaneResponse, parameters: int, timeout: float) -> Lane:
    """Opens the lane with shared memory that a server on the same machine offers, for P parameters.

    Raises:
        OSError: The socket is on another machine or unreachable, or its region is not valid.
        GemError: The server refuses the lane.
    """
    if not offer.socket or not hasattr(socket, "recv_fds"):
        raise OSError("the server, or this system, has no Unix socket that passes memory")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(socket_address(offer.socket))
        return Lane(sock, offer.token, timeout, parameters)
    except BaseException:
        sock.close()
        raise


def open_network_lane(offer: pb.OpenLaneResponse, address: str, security: Security, timeout: float) -> Lane:
    """Opens the lane over TCP that a server offers, on the host where gRPC found it at `address`.

    Raises:
        OSError: The port can't be reached, or its certificate is not valid.
        GemError: The server refuses the lane.
    """
    if not offer.port:
        raise OSError("the server has no port for it (lane_listen)")
    host = _host_of(address)
    sock = socket.create_connection((host, offer.port), CONNECT_SECONDS)
    try:
        tune(sock)
        context = security.context()
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=host)
        return Lane(sock, offer.token, timeout)
    except BaseException:
        sock.close()
        raise


def _host_of(address: str) -> str:
    """The host of an address of gRPC. Raises OSError if it has none."""
    found = re.fullmatch(r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:)?(\[[^]]+\]|[^:/,]+):[0-9]+", address)
    if found is None:
        raise OSError(f"{address} names no host")
    return found[1].strip("[]")
