"""One lane's socket: reads and writes its messages, and yields whenever it has to wait."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from asyncio import Future
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from gem_api.errors import InvalidRequest
from gem_api.framing import CHUNK_BYTES, Assembly, ChunkView, bytes_of
from gem_api.lane import MAX_HEADER_BYTES, PREFIX_BYTES, Kind, parse_header, parse_prefix
from gem_api.layout import Vector
from gem_api.wire import FLOAT32, Format, ThetaFormat

from gem_server.core.central_variable import Check
from gem_server.intake.calls import PeerLeft
from gem_server.lane.reactor import QUIET_SECONDS, Served, Wait, shut_down
from gem_server.telemetry.progress import Traffic

T = TypeVar("T")
P = TypeVar("P")
Waits = Generator[Wait, None, T]
HELLO_SECONDS = 10.0  # from the connection to its complete first message
PATIENCE_SECONDS = 60.0  # without progress in the middle of a message
_ROOM = 2048  # bytes; usual headers are smaller, larger ones get memory of their own
_PIECE = CHUNK_BYTES  # bytes that are received and then checked, while they are in the cache
TURN_BYTES = 8 << 20  # of one message that a fast client can move before others have a turn


class Connection:
    """A non-blocking socket, plain or TLS.

    Args:
        sock: The socket.
        traffic: Where bytes are counted.
        clock: Returns monotonic seconds.
        nearby: Whether the client is on this machine.

    Attributes:
        payload_left: Bytes of the last message's payload that have not been read.
        served: What the reactor knows about it.
    """

    def __init__(self, sock: socket.socket, traffic: Traffic, clock: Callable[[], float], nearby: bool = False) -> None:
        self._sock = sock
        self.nearby = nearby
        self._traffic = traffic
        self._meter = traffic.begin()
        self._clock = clock
        self._room = memoryview(bytearray(_ROOM))
        self._ahead = self._room[:0]  # bytes that were received with a header, and belong to what follows it
        self._moved = 0  # bytes since others had a turn
        self._opened = False
        self._stopped = False
        self._sending = threading.Lock()  # held while the system copies what is sent
        self._between = not self._encrypted  # whether a message may begin: not in the handshake, nor inside another message
        self.payload_left = 0
        self.served: Served

    # -- bytes

    def read(self, into: memoryview) -> Waits[None]:
        """Fills a buffer. Raises PeerLeft."""
        ahead = min(len(into), len(self._ahead))
        if ahead:
            into[:ahead], self._ahead = self._ahead[:ahead], self._ahead[ahead:]
        yield from self._receive(into[ahead:], len(into) - ahead)
        self.payload_left = max(0, self.payload_left - len(into))

    def _receive(self, into: memoryview, least: int) -> Waits[int]:
        """Receives at least so many bytes, and returns how many. Raises PeerLeft."""
        receive, received = self._sock.recv_into, 0
        while received < least:
            self.require_going_on()
            before, wait = received, None
            try:
                # TLS hands out one record in a call, 16 KiB at most. So nothing else is done for each.
                while received < least and (count := receive(into[received:])):
                    received += count
            except (BlockingIOError, ssl.SSLWantReadError):
                wait = Wait.READ
            except ssl.SSLWantWriteError:
                wait = Wait.WRITE
            except OSError as error:
                raise PeerLeft from error
            finally:
                self._meter.received += received - before
            if received > before:
                self._progressed()
                self._moved += received - before
            if self._moved >= TURN_BYTES:
                yield from self._turn()
            elif wait is not None:
                yield wait
            elif received < least:
                raise PeerLeft  # the client has closed its end
        return received

    def write(self, *parts: bytes | memoryview) -> Waits[None]:
        """Sends all parts, one after the other. Raises PeerLeft."""
        self._progressed()
        rest = [memoryview(part).cast("B") for part in parts if len(part)]
        while rest:
            try:
                with self._sending:
                    self.require_going_on()
                    # TLS sends all that it is given before it returns: a slow peer would be taken for one that has stopped.
                    count = self._sock.send(rest[0][:_PIECE]) if self._encrypted else self._sock.sendmsg(rest)
            except BlockingIOError:
                yield Wait.WRITE
                continue
            except ssl.SSLWantWriteError:
                self._between = False  # it keeps the beginning until there is room
                yield Wait.WRITE
                continue
            except ssl.SSLWantReadError:
                yield Wait.READ
                continue
            except OSError as error:
                raise PeerLeft from error
            self._meter.sent += count
            self._moved += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
            self._between = not rest
            self._progressed()
            if self._moved >= TURN_BYTES:
                yield from self._turn()

    def _turn(self) -> Waits[None]:
        self._moved = 0
        yield Wait.TURN

    def handshake(self) -> Waits[None]:
        """Completes the handshake of TLS. Raises PeerLeft if the client is refused."""
        while self._encrypted:
            self.require_going_on()
            try:
                self._sock.do_handshake()  # type: ignore[attr-defined]
                self._between = True
                return
            except ssl.SSLWantReadError:
                yield Wait.READ
            except ssl.SSLWantWriteError:
                yield Wait.WRITE
            except OSError as error:
                raise PeerLeft from error

    def done(self, future: Future[T]) -> Generator[Future[T], None, T]:
        """Waits for a future and returns its result. Raises what the future raises, or PeerLeft if the lane is stopped."""
        while True:
            self.require_going_on()
            if future.done():
                return future.result()
            yield future

    def require_going_on(self) -> None:
        """Raises PeerLeft if the lane is stopped."""
        if self._stopped:
            raise PeerLeft

    # -- the end

    def stop(self) -> None:
        """Has whoever serves it end with PeerLeft soon, from any thread. It changes nothing that it sends from now on, and what
        it sends may be changed."""
        with self._sending:
            self._stopped = True
        self.served.wake()

    def finish(self, last: bytes, most: int) -> Waits[None]:
        """Sends the last message, unless another one was cut off, and ends the connection without losing it.

        A socket that is closed while bytes are unread, or still come, resets the connection: the client might lose what it has
        not read yet. So up to `most` bytes are dropped until the client closes its end, or its time is up.
        """
        self._opened = self._stopped = False
        if self._between:
            with suppress(PeerLeft):
                yield from self.write(last)
        shut_down(self._sock, socket.SHUT_WR)
        while most > 0:
            self.served.quiet_at = self._clock() + QUIET_SECONDS
            yield Wait.READ  # before each piece: others have their turn
            try:
                dropped = len(socket.socket.recv(self._sock, _PIECE))  # TLS need not decrypt it
            except BlockingIOError:
                continue
            except OSError:
                return
            if not dropped:
                return
            self._meter.received += dropped
            most -= dropped

    def ended(self) -> None:
        """Call this at the end, under the lock: the bytes stay counted."""
        self._traffic.end(self._meter)

    @property
    def _encrypted(self) -> bool:
        return isinstance(self._sock, ssl.SSLSocket)

    def opened(self) -> None:
        """Call this once the client has shown its token. It may then be silent between two messages."""
        self._opened = True
        self.served.give_up_at = None

    def _progressed(self) -> None:
        if self._opened:
            self.served.give_up_at = self._clock() + PATIENCE_SECONDS

    # -- messages

    def message(self, expected: Mapping[Kind, Any]) -> Waits[tuple[Kind, int, Any]]:
        """Reads the next message up to its payload. `expected` maps the kinds that may come to their headers' types. Returns
        the kind, the payload's bytes, and the header. Raises PeerLeft, or InvalidRequest if it is another message."""
        if self._opened:
            self.served.give_up_at = None  # a worker may compute for as long as its lease lasts
        received = len(self._ahead)
        self._room[:received], self._ahead = self._ahead, self._room[:0]
        self._moved = 0
        # No client of ours sends a message before the last one is answered: one that does has others served in between.
        yield Wait.TURN if received or self._pending() else Wait.READ
        # More than is needed, if it has come: a system call costs more than the copy of the few bytes too many.
        received += yield from self._receive(self._room[received:], PREFIX_BYTES - received)
        prefix = parse_prefix(self._room[:PREFIX_BYTES])
        if prefix.kind not in expected:
            names = " or ".join(kind.name for kind in expected)
            raise InvalidRequest(f"expected a message of kind {names}, got {prefix.kind.name}")
        end, room = PREFIX_BYTES + prefix.header, self._room
        if end > len(room):
            room = memoryview(bytearray(end))
            room[:received] = self._room[:received]
        received += yield from self._receive(room[received:], end - received)
        self._ahead, self.payload_left = room[end:received], prefix.payload
        return prefix.kind, prefix.payload, parse_header(room[PREFIX_BYTES:end], expected[prefix.kind])

    def _pending(self) -> int:
        """Bytes that TLS holds, so that no wait on the socket would notice them."""
        return self._sock.pending() if isinstance(self._sock, ssl.SSLSocket) else 0

    @property
    def transport(self) -> str:
        """The transport of tensors: "memory", "tls" or "tcp"."""
        return "memory" if self._sock.family == socket.AF_UNIX else "tls" if self._encrypted else "tcp"

    def write_with_descriptor(self, message: bytes, descriptor: int) -> Waits[None]:
        """Sends a message; the descriptor goes with its first byte. Closes the descriptor."""
        try:
            while True:
                try:
                    sent = socket.send_fds(self._sock, [message], [descriptor])
                    break
                except BlockingIOError:
                    yield Wait.WRITE
                except OSError as error:
                    raise PeerLeft from error
        finally:
            os.close(descriptor)
        yield from self.write(message[sent:])

    # -- payloads

    def receive(self, format_: Format, into: Vector, check: Check, kept: list[memoryview] | None) -> Waits[None]:
        """Fills `into` (float32, shape (P,)) from a payload in the wire format `format_`. Checks each piece while it is in the
        cache, and appends its bytes to `kept`, if given. Raises NonFiniteGradient."""
        for piece in self._floats(into) if format_ is FLOAT32 else self._decoded(format_, into, kept):
            if isinstance(piece, Wait):
                yield piece
            else:
                check(piece)

    def _floats(self, into: Vector) -> Iterator[Wait | Vector]:
        view = bytes_of(into)
        for begin in range(0, len(view), _PIECE):
            yield from self.read(view[begin : begin + _PIECE])
            yield into[begin // 4 : (begin + _PIECE) // 4]

    def _decoded(self, format_: Format, into: Vector, kept: list[memoryview] | None) -> Iterator[Wait | Vector]:
        assembly: Assembly = format_.assembly(into)
        begin = 0
        for _, room in format_.packing.pieces(into.size):
            data = room.data if kept is None else memoryview(bytearray(room.size))
            yield from self.read(data)
            yield assembly.add(ChunkView(begin, data))
            begin += len(data)
            if kept is not None:
                kept.append(data)

    def skip(self) -> Waits[None]:
        """Reads and drops the rest of the payload."""
        room = memoryview(bytearray(min(self.payload_left, MAX_HEADER_BYTES)))
        while self.payload_left:
            yield from self.read(room[: self.payload_left])

    def send_theta(self, start: bytes, theta: Vector, format_: ThetaFormat) -> Waits[None]:
        """Sends a message that begins with `start`; its payload is θ (float32, shape (P,)), which must not change meanwhile."""
        if format_ is FLOAT32:
            yield from self.write(start, bytes_of(theta))
            return
        pieces = format_.pieces(theta)
        while (piece := self._next_of(pieces)) is not None:
            yield from self.write(start, piece.data)
            start, self._between = b"", False
        self._between = True

    def _next_of(self, pieces: Iterator[P]) -> P | None:
        """The next piece of θ. Making it may change what is known of the worker's θ, which a stopped lane must not. Raises
        PeerLeft."""
        with self._sending:
            self.require_going_on()
            return next(pieces, None)
