"""The client's end of a lane: one blocking socket that carries commits and their results."""

from __future__ import annotations

import logging
import re
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

import numpy as np
import numpy.typing as npt
from gem_api.errors import ServerUnavailable
from gem_api.framing import ChunkView, bytes_of
from gem_api.lane import MAX_HEADER_BYTES, PREFIX_BYTES, Kind, error_of, opening, parse_header, parse_prefix, tune
from gem_api.layout import Vector
from gem_api.v1 import lane_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import FLOAT32, ThetaFormat

from gem_client.transport.security import Security

log = logging.getLogger("gem_client")
CONNECT_SECONDS = 3.0  # a firewall that drops packets would otherwise cost minutes


class Lane:
    """An open lane, for the commits of one lease. Used by one thread; `cancel` by any.

    Args:
        sock: The connected socket.
        token: From OpenLane.

    Raises:
        GemError: The server refuses the lane.
        OSError: The connection broke.
    """

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self._sock = sock
        self._room = memoryview(bytearray(MAX_HEADER_BYTES))
        self._sock.sendall(opening(Kind.HELLO, lane_pb2.LaneHello(token=token)))
        self._receive_message(Kind.WELCOME, lane_pb2.LaneWelcome)

    def exchange(
        self, header: pb.CommitHeader, nbytes: int, pieces: Iterable[npt.NDArray[np.uint8]], theta: Vector, form: ThetaFormat
    ) -> pb.CommitResult:
        """Sends a commit and receives its result and θ.

        Args:
            header: The commit's header.
            nbytes: Bytes of the gradient in its wire format.
            pieces: The gradient in its wire format.
            theta: Receives θ: float32, shape (P,).
            form: θ's wire format.

        Raises:
            GemError: The server refuses the commit, or the connection broke. The lane can't be used again.
        """
        try:
            self._send(opening(Kind.COMMIT, header, nbytes), pieces)
            result, payload = self._receive_message(Kind.RESULT, pb.CommitResult)
            if payload != form.nbytes(theta.size):
                raise ServerUnavailable(f"the server sent {payload} bytes of θ instead of {form.nbytes(theta.size)}")
            self._receive_theta(theta, form)
        except OSError as error:
            raise ServerUnavailable(f"the lane broke: {error}") from None
        committed: pb.CommitResult = result
        return committed

    def cancel(self) -> None:
        """Ends the lane, from any thread; an exchange in progress raises ServerUnavailable."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _send(self, start: bytes, pieces: Iterable[npt.NDArray[np.uint8]]) -> None:
        parts = chain((memoryview(start),), (piece.data for piece in pieces))
        with suppress(BrokenPipeError, ConnectionResetError):  # the server has sent the reason before it closed the connection
            for part in parts:
                self._sock.sendall(part)

    def _receive_message(self, kind: Kind, header_type: type) -> tuple[object, int]:
        self._fill(self._room[:PREFIX_BYTES])
        prefix = parse_prefix(self._room[:PREFIX_BYTES])
        self._fill(self._room[: prefix.header])
        if prefix.kind is Kind.ERROR:
            raise error_of(parse_header(self._room[: prefix.header], lane_pb2.LaneError))
        if prefix.kind is not kind:
            raise ServerUnavailable(f"the server sent a message of kind {prefix.kind.name} instead of {kind.name}")
        return parse_header(self._room[: prefix.header], header_type), prefix.payload

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
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ServerUnavailable("the server closed the lane")
            view = view[count:]


def open_lane(offer: pb.OpenLaneResponse, address: str, security: Security, timeout: float) -> Lane:
    """Opens the lane that a server offers.

    Args:
        offer: The server's offer.
        address: Where gRPC found the server; the lane is on the same host.
        security: The TLS files.
        timeout: Seconds without progress that an exchange may take.

    Raises:
        OSError: The port can't be reached, or its certificate is not valid.
        GemError: The server refuses the lane.
    """
    host = _host_of(address)
    sock = socket.create_connection((host, offer.port), CONNECT_SECONDS)
    try:
        tune(sock)
        context = security.context()
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=host)
        lane = Lane(sock, offer.token)
        sock.settimeout(timeout)
        return lane
    except BaseException:
        sock.close()
        raise


def _host_of(address: str) -> str:
    """The host of an address of gRPC. Raises OSError if it has none."""
    found = re.fullmatch(r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:)?(\[[^]]+\]|[^:/,]+):[0-9]+", address)
    if found is None:
        raise OSError(f"{address} names no host")
    return found[1].strip("[]")
