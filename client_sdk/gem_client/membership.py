"""A session's membership in a run: its lease, its registration, θ's first value and the buffers for θ and the gradient."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from gem_api.errors import GemError, InvalidRequest, LeaseEnded
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import ThetaFormat

from gem_client.retry import Retry, logging_failures
from gem_client.transport.connection import Connection

log = logging.getLogger("gem_client")
T = TypeVar("T")
FINAL_POLL_SECONDS = 0.5


class Membership:
    """One worker's membership in a run, under one lease after another. Only its own methods change it.

    Args:
        name: The worker's name.
        connection: The calls to the server, one attempt each.
        retry: How long to retry.
        shared_memory: Whether to ask a server on the same machine for shared memory.
        theta_format: The format of θ on the network.

    Attributes:
        layout: The run's tensors; None until they are known.
        theta: θ as last received, float32, shape (P,).
        gradient: A buffer for the next gradient, float32, shape (P,). A lane with shared memory replaces both buffers.
        version: Version of `theta`.
        sequence: Number of the lease's last commit.
        steps_done: Commits applied under the worker's name in this run.
        generation: Number of leases held so far.
        overlap: Whether the worker computes a gradient while a commit is under way.
        closed: Whether the session has ended, so that nothing is retried.
    """

    def __init__(self, name: str, connection: Connection, retry: Retry, shared_memory: bool, theta_format: ThetaFormat) -> None:
        self._name = name
        self._process = os.getpid()
        self._connection = connection
        self._retry = retry
        self._wants_region = shared_memory
        self.theta_format = theta_format
        self._registration: pb.RegisterWorkerResponse | None = None
        self._settings: tuple[pb.RegisterWorkerResponse, Hyperparameters] | None = None  # those of one registration
        self._replaced: LeaseEnded | None = None
        self._in_doubt = False  # a call was interrupted, and the server may or may not have received it
        self.layout: Layout | None = None
        self.theta = empty(0)
        self.gradient = empty(0)
        self.version = 0
        self.sequence = 0
        self.steps_done = 0
        self.generation = 0
        self.overlap = False
        self.choice: OptimizerChoice | None = None
        self.closed = False

    @property
    def joined(self) -> bool:
        return self._registration is not None

    @property
    def registration(self) -> pb.RegisterWorkerResponse:
        """The server's response to the last registration. Raises InvalidRequest before the first."""
        if self._registration is None:
            raise InvalidRequest("this session has not joined a run yet: call join with the model's parameters first")
        return self._registration

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The run's, as of the last registration. Raises InvalidRequest before the first."""
        registration, known = self.registration, self._settings
        if known is None or known[0] is not registration:  # every batch asks
            self._settings = known = registration, Hyperparameters.from_message(registration.hyperparameters)
        return known[1]

    @property
    def shares_memory(self) -> bool:
        """Whether `theta` and `gradient` lie in memory shared with the server."""
        lane = self._connection.lane
        return lane is not None and lane.region is not None

    @property
    def known_layout(self) -> Layout:
        """The run's tensors. Raises InvalidRequest before they are known."""
        if self.layout is None:
            raise InvalidRequest("the layout is not known yet: join or pull first")
        return self.layout

    def require_open(self) -> None:
        """Raises InvalidRequest once the session has ended."""
        if self.closed:
            raise InvalidRequest("this session is closed: open another with gem_client.connect")

    def require_usable(self) -> None:
        """Raises InvalidRequest once the session has ended, and in a process that was forked; raises LeaseEnded if another
        worker has registered under this name, as registering again would only evict that one."""
        self.require_open()
        if self._replaced is not None:
            raise self._replaced
        if self.is_copy:
            raise InvalidRequest("this session belongs to the process that opened it: open another one after the fork")

    @property
    def is_copy(self) -> bool:
        """Whether this is the copy of a session in a forked process: the lease belongs to the parent."""
        return os.getpid() != self._process

    # -- joining and leaving

    def prepare(self, layout: Layout, overlap: bool, choice: OptimizerChoice | None) -> None:
        """Makes the buffers for a model of this layout, before the first registration."""
        self.layout, self.theta, self.gradient = layout, empty(layout.size), empty(layout.size)
        self.overlap, self.choice = overlap, choice

    def enter(self) -> None:
        """Registers, initializes θ if the server asks for it, and pulls. Starts over if the lease ends in between."""
        self._in_doubt = True
        while True:
            try:
                self._register()
                while self._retry_pull():
                    self._initialize()
                self._in_doubt = False
                return
            except LeaseEnded as ended:
                self._require_not_replaced_by(ended)

    def enter_again(self, ended: LeaseEnded) -> None:
        """Takes a new lease after the old one has ended, unless another worker has registered under this name."""
        self._require_not_replaced_by(ended)
        log.warning("%s: the lease ended (%s); registering again and dropping the current gradient", self._name, ended.reason)
        self.enter()

    def settle_doubt(self) -> None:
        """Takes a new lease if a commit or a registration was interrupted: only then is the lease's state known."""
        if self._in_doubt:
            self.enter()

    def under_lease(self, attempt: Callable[[str], T]) -> T:
        """Calls `attempt` with the lease's id, with retries; takes a new lease if that one has ended."""
        self.settle_doubt()
        while True:
            try:
                return self._retry.call(lambda: attempt(self.registration.lease_id), self.report)
            except LeaseEnded as ended:
                self.enter_again(ended)

    def leave(self) -> None:
        """Tells the server, once, that the worker leaves. If that fails, the lease expires by itself."""
        if self._registration is None:
            return
        try:
            self._connection.leave(self._registration.lease_id, timeout=2.0)
        except GemError as error:
            log.info("could not leave the run; the lease will expire by itself: %s", error)

    def forget(self) -> None:
        """Returns to the state before the first registration, so that the session may join again."""
        self._registration = None

    def end(self) -> None:
        """Marks the session as ended: a call that is being retried raises InvalidRequest instead of trying again."""
        self.closed = True

    # -- a commit

    def commit_begins(self) -> None:
        """Until the commit's result is known, the lease is in doubt, whatever interrupts the call."""
        self._in_doubt = True

    def commit_rejected(self) -> None:
        """The server did not apply the commit: the next one takes its sequence number."""
        self._in_doubt = False

    def commit_applied(self, result: pb.CommitResult) -> None:
        """The server applied the commit, and `theta` holds the new θ."""
        self.sequence, self.version = result.sequence, result.base_version
        self._in_doubt = False
        self.steps_done += 1

    # -- θ

    def pull(self, lease_id: str) -> bool:
        """Makes one attempt to read θ; an empty `lease_id` means none. Returns whether this worker must initialize θ."""
        header = self._connection.pull(lease_id, self._buffer_for, self.theta_format)
        if not header.must_initialize:
            self.version = header.version
        return header.must_initialize

    def pull_without_lease(self) -> Vector:
        """Reads θ into `theta`, with retries."""
        self._retry.call(lambda: self.pull(""), self.report)
        return self.theta

    def read(self) -> Vector:
        """Reads θ into a new buffer, with retries. Raises LayoutMismatch if the server has begun a run of another model."""
        return self._retry.call(self._read, self.report)

    def wait_until_run_is_over(self) -> None:
        """Polls the server's status until no worker trains any more."""
        while not _is_over(self._retry.call(self._connection.status, self.report)):
            self._retry.sleep(FINAL_POLL_SECONDS)

    def open_lane(self) -> None:
        """Opens a lane for the lease's commits. If it has shared memory, moves θ and the gradient there."""
        self._connection.open_lane(self.registration.lease_id, self.known_layout.size, self._wants_region)
        region = self._connection.lane.region if self._connection.lane is not None else None
        if region is not None:
            np.copyto(region.theta, self.theta)
            np.copyto(region.gradient, self.gradient)
            self.theta, self.gradient = region.theta, region.gradient

    @property
    def report(self) -> Callable[[GemError, float], None]:
        """A callback for one `Retry.call` that logs its failures. Raises InvalidRequest if the session has ended meanwhile."""
        log_failure = logging_failures(self._name)

        def report(error: GemError, pause: float) -> None:
            self.require_open()
            log_failure(error, pause)

        return report

    def _register(self) -> None:
        previous = self._registration
        self._connection.drop_stream()
        registration = self._retry.call(
            lambda: self._connection.register(self._name, self.known_layout, self.overlap, self.choice), self.report
        )
        if previous is not None and previous.run_id != registration.run_id:
            log.warning("%s: the server has begun another run (%s); continuing with that run", self._name, registration.run_id)
        self._registration, self.sequence, self.steps_done = registration, 0, registration.steps_done
        self.generation += 1
        self._connection.keep_alive(registration.lease_id, registration.lease_seconds / 3)
        self._retry.call(self.open_lane, self.report)
        if registration.must_initialize:
            self._initialize()

    def _initialize(self) -> None:
        """Sends θ's first value: the values that the caller joined with, or the last θ received if the server lost its own."""
        registration = self.registration
        try:
            self._retry.call(lambda: self._connection.initialize(registration.lease_id, self.theta), self.report)
        except InvalidRequest as error:  # the first attempt did arrive, and only its response was lost
            log.info("%s: θ has a first value already: %s", self._name, error)

    def _retry_pull(self) -> bool:
        return self._retry.call(lambda: self.pull(self.registration.lease_id), self.report)

    def _read(self) -> Vector:
        # Without the lease: under it, the server would take this θ for the one that the next gradient is computed on.
        theta = empty(0)

        def make_buffer(header: pb.PullHeader) -> Vector:
            nonlocal theta
            layout = Layout.from_message(header.layout)
            if self.joined:
                self.known_layout.require_same(layout)
            self.layout = layout
            theta = empty(layout.size)
            return theta

        self._connection.pull("", make_buffer, self.theta_format)
        return theta

    def _buffer_for(self, header: pb.PullHeader) -> Vector:
        if header.HasField("layout"):
            self.layout = Layout.from_message(header.layout)
        if self.theta.size != self.known_layout.size:
            self.theta = empty(self.known_layout.size)
        return self.theta

    def _require_not_replaced_by(self, ended: LeaseEnded) -> None:
        if ended.reason == "replaced":
            message = f"another worker has registered as {self._name!r}: give each worker its own name"
            self._replaced = LeaseEnded(message, ended.reason)
            raise self._replaced


def _is_over(status: pb.GetStatusResponse) -> bool:
    return status.state in (pb.RUN_STATE_COMPLETE, pb.RUN_STATE_DRAINING) or not status.workers
