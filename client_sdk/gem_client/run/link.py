"""A session's link to one server: the calls, and what the session knows of the part of θ that this server holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from gem_api.errors import GemError, InvalidRequest, RejectedCommit
from gem_api.framing import empty
from gem_api.layout import Vector
from gem_api.ranges import WHOLE, Range
from gem_api.region import Region
from gem_api.update_kind import KINDS
from gem_api.v1 import tensors_pb2
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import Encoder, Format

from gem_client.retry import RETRYABLE, FailureLog, Retry
from gem_client.run.encoded import EncodedPart, EncodedUpdate
from gem_client.run.pending_commit import PendingCommit
from gem_client.transport.connection import Connection, Standing
from gem_client.transport.side_thread import SideThread
from gem_client.transport.theta_receiver import ThetaReceiver

T = TypeVar("T")


@dataclass
class Caller:
    """How a session calls its servers: what `gem_client.connect` was given.

    Attributes:
        connect: Opens a connection to an address.
        closed: Whether the session has ended, so that nothing is retried.
        standing: What its links know of the session.
    """

    name: str
    connect: Callable[[str], Connection]
    retry: Retry
    shared_memory: bool
    gradient_format: Format
    theta_format: Format
    closed: bool = False
    standing: Standing = field(default_factory=Standing)

    def __post_init__(self) -> None:
        self._failures = FailureLog(self.name)  # one for all threads: an outage is one line, not one for each

    def require_open(self) -> None:
        """Raises InvalidRequest once the session has ended."""
        if self.closed:
            raise InvalidRequest("this session is closed: open another with gem_client.connect")

    def call(
        self,
        attempt: Callable[[], T],
        temporary: tuple[type[GemError], ...] = RETRYABLE,
        pause: Callable[[float], None] | None = None,
    ) -> T:
        """Calls `attempt` with retries, as `Retry.call`, and logs the failures. `pause` takes the place of `time.sleep`. Raises
        InvalidRequest if the session has ended meanwhile."""

        def report(error: GemError, left: float) -> None:
            self.require_open()
            self._failures.failed(error, left)

        retry = replace(self.retry, sleep=pause) if pause and self.retry.sleep is time.sleep else self.retry
        with self.standing.calling():
            return retry.call(attempt, report, self._failures.recovered, temporary)


class Link:
    """A link to the server of one range. Its calls are made by one thread at a time; any thread may abort or stop it.

    Attributes:
        connection: The calls, one attempt each.
        part: Which part of θ the server holds.
        bounds: Its elements.
        registration: The server's response to the last registration; None before the first.
        version: Version of the part of θ that was received last.
        progress: The commits in it, each counted by its share of a batch.
        batch_share: The share of a whole batch that the server wants the next gradient to have; 1 until it says so.
        steps_done: Commits that this server has applied under the worker's name in this run.
    """

    def __init__(self, address: str, caller: Caller) -> None:
        self.address = address
        self.caller = caller
        self.connection = caller.connect(address)
        self.part = WHOLE
        self.bounds = slice(0, 0)
        self._renewed = False
        self.registration: pb.RegisterWorkerResponse | None = None
        self.version = 0
        self.progress = 0.0
        self.batch_share = 1.0
        self.steps_done = 0
        self._encoder: Encoder | None = None
        self._receiver: ThetaReceiver | None = None
        self._working = threading.RLock()  # held while the side thread runs a task
        self._side: SideThread | None = None
        self._aborted = threading.Event()

    # -- the part of θ

    def hold(self, part: Range, parameters: int) -> None:
        """Sets which part of a θ with P parameters the server holds. Raises InvalidRequest if θ is too small for
        that."""
        bounds = slice(*part.bounds(parameters))
        if (self.part, self.bounds) != (part, bounds):
            self.part, self.bounds, self._encoder, self._receiver = part, bounds, None, None

    def view(self, whole: Vector) -> Vector:
        """The server's part of a packed buffer (float32, shape (P,)): a view of it, or the buffer itself if the server holds
        everything."""
        return whole if self.part.whole else whole[self.bounds]

    def holds(self, version: int, progress: float) -> None:
        """Notes which part of θ was received last. An older server sends no `progress`: it counts every commit as one."""
        self.version, self.progress = version, progress or float(version)

    def require_part(self, held: tensors_pb2.TensorLayout) -> None:
        """Raises InvalidRequest unless the server holds the part that this link is for."""
        if (held.range_begin, held.range_end) == (self.bounds.start, self.bounds.stop):
            return
        what = f"the server at {self.address} holds the elements [{held.range_begin}, {held.range_end}) of the model"
        expected = f"[{self.bounds.start}, {self.bounds.stop})"
        if self.part.whole:
            raise InvalidRequest(f"{what}, not {expected}, and names no other servers: connect to the server of range 0")
        raise InvalidRequest(
            f"{what}, not {expected} as range {self.part}: give the server of range 0 the addresses of ranges 1 to "
            f"{self.part.count - 1} in this order (--peers), and start each with its own --range"
        )

    # -- the lease

    def registered(self, registration: pb.RegisterWorkerResponse) -> None:
        """Takes a new lease, and renews it in the background until `leave`."""
        self.registration, self.steps_done, self._receiver = registration, registration.steps_done, None
        self.batch_share = 1.0
        self.connection.keep_alive(registration.lease_id, registration.lease_seconds / 3, self.caller.standing)
        self._renewed = True

    def leave(self, lease_id: str, timeout: float) -> None:
        """Leaves the run. The lease is renewed no more, even if the call fails."""
        self._renewed = False
        self.connection.leave(lease_id, timeout)

    # -- a commit

    def open_lane(self) -> None:
        """Chooses how the lease's commits travel. If that is over the network, compiles the conversion to the wire format ahead
        of the first one, which takes about a second."""
        assert self.registration is not None
        size = self.bounds.stop - self.bounds.start
        self.connection.open_lane(self.registration.lease_id, size, self.caller.shared_memory)
        if self.region is None:
            self.caller.gradient_format.prepare()
            self.caller.theta_format.prepare()

    @property
    def region(self) -> Region | None:
        """The memory shared with the server; None: commits go over the network."""
        lane = self.connection.lane
        return lane.region if lane is not None else None

    def send(self, commit: PendingCommit, theta: Vector) -> pb.CommitResult:
        """Has the server apply its part of a commit, with retries. Its part of the new θ comes into `theta` (float32, shape
        (P,)).

        Raises:
            RejectedCommit: The server rejects its part of the update for its content.
            LeaseEnded: The lease has ended.
            TransportError: The server could not be reached for as long as the session's `retry` allows.
        """
        whole = commit.update
        update = whole.parts[self.part.index] if isinstance(whole, EncodedUpdate) else self.view(whole)
        header, theta = self._header(commit), self.view(theta)
        try:
            result = self.call(lambda: self.attempt(header, update, theta))
        except RejectedCommit:
            commit.answered.add(self.part.index)
            raise
        commit.answered.add(self.part.index)
        self.holds(result.base_version, result.progress)
        self.batch_share = result.batch_share or 1.0
        self.steps_done += 1
        return result

    def attempt(self, header: pb.CommitHeader, update: Vector | EncodedPart, theta: Vector) -> pb.CommitResult:
        """Makes one attempt to commit this part: through shared memory, else through a lane's socket, else over gRPC.

        Args:
            header: The commit's header.
            update: The part of the update: float32, shape (its size,), or encoded.
            theta: Receives the part of the new θ: float32, shape (its size,).
        """
        connection = self.connection
        if not connection.chosen:
            self.open_lane()
        region = self.region
        if region is None:
            return self._attempt_over_network(header, update, theta)
        if isinstance(update, EncodedPart):  # the memory came after the update was encoded
            update.decode(region.gradient)
        elif update is not region.gradient:  # a part, or the memory was replaced after the update was packed
            np.copyto(region.gradient, update)
        result = connection.commit_on_lane(header)
        if theta is not region.theta:
            np.copyto(theta, region.theta)
        if isinstance(update, EncodedPart):
            update.applied()
        return result

    def _attempt_over_network(self, header: pb.CommitHeader, update: Vector | EncodedPart, theta: Vector) -> pb.CommitResult:
        connection, gradient_format = self.connection, self.caller.gradient_format
        encoder: Encoder
        if isinstance(update, EncodedPart):
            encoder, packed = update, empty(0)
        else:  # the link's own encoder keeps the gradients' rounding errors from one commit to the next
            encoder = self._encoder = self._encoder or gradient_format.encoder(theta.size)
            packed = update
        receiver = self._receiver = self._receiver or ThetaReceiver(self.caller.theta_format, theta.size)
        header.theta_base = receiver.base
        if connection.lane is not None:
            nbytes = gradient_format.nbytes(theta.size)
            result = connection.commit_on_lane(header, nbytes, encoder.pieces(packed), theta, receiver)
        else:
            opening = pb.CommitRequest(header=header).SerializeToString()
            result = connection.commit_on_stream(encoder.frames(packed, opening), theta, receiver)
        encoder.applied()
        return result

    def _header(self, commit: PendingCommit) -> pb.CommitHeader:
        registration = self.registration
        assert registration is not None
        return pb.CommitHeader(
            lease_id=registration.lease_id,
            sequence=commit.sequence,
            base_version=commit.base.versions[self.part.index],
            wire_dtype=self.caller.gradient_format.dtype,
            theta_dtype=self.caller.theta_format.dtype,
            layout_fingerprint=registration.layout_fingerprint,
            loss=None if commit.loss is None else float(commit.loss),
            sample_count=commit.samples,
            batch_share=commit.share,
            update_kind=KINDS[commit.kind],
            traceparent=commit.span.traceparent,
            tracestate=commit.span.tracestate,
        )

    # -- its thread

    def begin(self, work: Callable[[Link], T]) -> Future[T]:
        """Calls `work` with this link, in the link's own thread."""
        self._side = self._side or SideThread("gem-session-range", self._working)
        return self._side.submit(work, self)

    def call(self, attempt: Callable[[], T]) -> T:
        """Calls `attempt` with retries. Ends them, and their pauses, if the link is aborted. With several servers, an error of
        `attempt` begins with which of them it comes from."""
        if self.part.whole:
            return self.caller.call(attempt)

        def attempt_here() -> T:
            if self._aborted.is_set():
                raise InvalidRequest("the call was interrupted")
            try:
                return attempt()
            except GemError as error:
                error.args = (f"range {self.part} at {self.address}: {error}",)
                raise

        return self.caller.call(attempt_here, pause=self._pause)

    def successor(self) -> Link:
        """A link to the same server, under the same lease, with a new connection and a new thread. Then `abort` this one."""
        link = Link(self.address, self.caller)
        link.part, link.bounds, link._encoder = self.part, self.bounds, self._encoder
        if self._renewed and self.registration is not None:
            link.registered(self.registration)
        link.version, link.progress, link.batch_share = self.version, self.progress, self.batch_share
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
