"""A session's link to one server: the calls, and what the session knows of the part of θ that this server holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from gem_api.errors import GemError, InvalidRequest
from gem_api.layout import Vector
from gem_api.ranges import WHOLE, Range
from gem_api.region import Region
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Encoder, Format

from gem_client.retry import Retry
from gem_client.transport.connection import Connection
from gem_client.transport.side_thread import SideThread

T = TypeVar("T")


class Link:
    """A link to the server of one range. Its calls are made by one thread at a time; any thread may abort or stop it.

    Args:
        address: The server's "host:port".
        connect: Opens a connection to it.

    Attributes:
        connection: The calls, one attempt each.
        part: Which part of θ the server holds.
        registration: The server's response to the last registration; None before the first.
        version: Version of the part of θ that was received last.
        sequence: Number of the lease's last commit that this server has answered.
    """

    def __init__(self, address: str, connect: Callable[[str], Connection]) -> None:
        self.address = address
        self._connect = connect
        self.connection = connect(address)
        self.part = WHOLE
        self._bounds = slice(0, 0)
        self._renewed = False
        self.registration: pb.RegisterWorkerResponse | None = None
        self.version = 0
        self.sequence = 0
        self._encoder: Encoder | None = None
        self._working = threading.RLock()  # held while the side thread runs a task
        self._side: SideThread | None = None
        self._aborted = threading.Event()

    # -- the part of θ

    def hold(self, part: Range, parameters: int) -> None:
        """Sets which part of a θ with P parameters the server holds. Raises InvalidRequest if θ is too small for
        that."""
        bounds = slice(*part.bounds(parameters))
        if (self.part, self._bounds) != (part, bounds):
            self.part, self._bounds, self._encoder = part, bounds, None

    def view(self, whole: Vector) -> Vector:
        """The server's part of a packed buffer (float32, shape (P,)): a view of it, or the buffer itself if the server holds
        everything."""
        return whole if self.part.whole else whole[self._bounds]

    def require_part(self, held: tensors_pb2.TensorLayout) -> None:
        """Raises InvalidRequest unless the server holds the part that this link is for."""
        if (held.range_begin, held.range_end) == (self._bounds.start, self._bounds.stop):
            return
        what = f"the server at {self.address} holds the elements [{held.range_begin}, {held.range_end}) of the model"
        expected = f"[{self._bounds.start}, {self._bounds.stop})"
        if self.part.whole:
            raise InvalidRequest(f"{what}, not {expected}, and names no other servers: connect to the server of range 0")
        raise InvalidRequest(
            f"{what}, not {expected} as range {self.part}: give the server of range 0 the addresses of ranges 1 to "
            f"{self.part.count - 1} in this order (--peers), and start each with its own --range"
        )

    # -- the lease

    def registered(self, registration: pb.RegisterWorkerResponse) -> None:
        """Takes a new lease, and renews it in the background until `leave`."""
        self.registration, self.sequence = registration, 0
        self.connection.keep_alive(registration.lease_id, registration.lease_seconds / 3)
        self._renewed = True

    def leave(self, lease_id: str, timeout: float) -> None:
        """Leaves the run. The lease is renewed no more, even if the call fails."""
        self._renewed = False
        self.connection.leave(lease_id, timeout)

    # -- a commit

    @property
    def region(self) -> Region | None:
        """The memory shared with the server; None: commits go over the network."""
        lane = self.connection.lane
        return lane.region if lane is not None else None

    def encoder(self, form: Format, size: int) -> Encoder:
        """The encoder of this part's gradients (float32, shape (size,)). It keeps their rounding errors."""
        self._encoder = self._encoder or form.encoder(size)
        return self._encoder

    # -- its thread

    def begin(self, work: Callable[[Link], T]) -> Future[T]:
        """Calls `work` with this link, in the link's own thread."""
        self._side = self._side or SideThread("gem-session-range", self._working)
        return self._side.submit(work, self)

    def retry(self, retry: Retry, attempt: Callable[[], T], on_failure: Callable[[GemError, float], None]) -> T:
        """Calls `attempt` with retries, as `Retry.call`. Ends them, and their pauses, if the link is aborted. With several
        servers, an error of `attempt` begins with which of them it comes from."""
        if self.part.whole:
            return retry.call(attempt, on_failure)

        def attempt_here() -> T:
            if self._aborted.is_set():
                raise InvalidRequest("the call was interrupted")
            try:
                return attempt()
            except GemError as error:
                error.args = (f"range {self.part} at {self.address}: {error}",)
                raise

        return (replace(retry, sleep=self._pause) if retry.sleep is time.sleep else retry).call(attempt_here, on_failure)

    def successor(self) -> Link:
        """A link to the same server, under the same lease, with a new connection and a new thread. Then `abort` this one."""
        link = Link(self.address, self._connect)
        link.part, link._bounds, link._encoder = self.part, self._bounds, self._encoder
        if self._renewed and self.registration is not None:
            link.registered(self.registration)
        link.version, link.sequence = self.version, self.sequence
        return link

    def abort(self) -> None:
        """Ends the connection and what the link's thread does. `wait` waits for that."""
        self._aborted.set()
        if self._side is not None:
            self._side.close()
        self.connection.abort()

    def wait(self) -> None:
        """Waits until the link's thread does nothing."""
        with self._working:
            pass

    def close(self) -> None:
        """Closes the connection, and ends the thread after its present task."""
        if self._side is not None:
            self._side.close()
        self.connection.close()

    def _pause(self, seconds: float) -> None:
        """`time.sleep`, which `abort` ends."""
        self._aborted.wait(seconds)
