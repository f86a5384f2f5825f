"""A session's lease and what comes and goes with it: registration, the first value, shared memory, the buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from gem_api.errors import GemError, InvalidRequest, LeaseEnded
from gem_api.framing import empty
from gem_api.layout import Layout, Vector
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import ThetaFormat

from gem_client.retry import Retry, logging_failures
from gem_client.transport.connection import Connection

log = logging.getLogger("gem_client")


class Membership:
    """One worker's place in the run, held under one lease after another.

    Args:
        name: The worker's name.
        connection: Its calls, one attempt each.
        retry: How long to try again.
        shared_memory: Whether to ask a server on this machine for shared memory.
        theta_format: How θ comes over the network.

    Attributes:
        layout: The run's tensors; None before they are known.
        theta: θ as last received, float32, shape (P,).
        gradient: Room for the next gradient, float32, shape (P,). Both are replaced when a lease brings shared memory.
        region: Nonce of the shared memory that both lie in; empty where they go over the network.
        version: Version of `theta`.
        sequence: The lease's last commit.
        steps_done: Commits applied under the worker's name in this run.
        generation: Leases held so far.
        in_doubt: Something was broken off half-way: the server may or may not have taken it.
        overlap: Whether a gradient is computed while a commit is under way.
        closed: Whether the session is over, so that nothing is tried again.
    """

    def __init__(self, name: str, connection: Connection, retry: Retry, shared_memory: bool, theta_format: ThetaFormat) -> None:
        self._name = name
        self._connection = connection
        self._retry = retry
        self._wants_region = shared_memory
        self.theta_format = theta_format
        self._registration: pb.RegisterWorkerResponse | None = None
        self._replaced: LeaseEnded | None = None
        self.layout: Layout | None = None
        self.theta = empty(0)
        self.gradient = empty(0)
        self.region = b""
        self.version = 0
        self.sequence = 0
        self.steps_done = 0
        self.generation = 0
        self.in_doubt = False
        self.overlap = False
        self.closed = False

    @property
    def joined(self) -> bool:
        return self._registration is not None

    @property
    def registration(self) -> pb.RegisterWorkerResponse:
        """What the server answered to the last registration. Raises InvalidRequest before the first."""
        if self._registration is None:
            raise InvalidRequest("this session has not joined a run yet: call join with the model's parameters first")
        return self._registration

    @property
    def known_layout(self) -> Layout:
        """The run's tensors. Raises InvalidRequest before they are known."""
        if self.layout is None:
            raise InvalidRequest("the layout is not known yet: join or pull first")
        return self.layout

    def require_open(self) -> None:
        if self.closed:
            raise InvalidRequest("this session is closed: open another with gem_client.connect")

    def require_not_replaced(self) -> None:
        """Raises LeaseEnded once another worker has taken this one's name: registering again would only throw it out."""
        if self._replaced is not None:
            raise self._replaced

    # -- in and out

    def enter(self) -> None:
        """Registers and pulls, initialising θ if asked to, until all of it has worked under one lease."""
        self.in_doubt = True
        while True:
            try:
                self._register()
                while self.retry_pull():
                    self._initialize()
                self.in_doubt = False
                return
            except LeaseEnded as ended:
                self._require_not_replaced_by(ended)

    def enter_again(self, ended: LeaseEnded) -> None:
        """The lease has ended: takes another, unless another worker has this one's name."""
        self._require_not_replaced_by(ended)
        log.warning("%s: the lease ended (%s); registering again and dropping the gradient in hand", self._name, ended.reason)
        self.enter()

    def settle_doubt(self) -> None:
        """After a commit or a registration that was broken off, only a new lease is in a known state."""
        if self.in_doubt:
            self.enter()

    def leave(self) -> None:
        """Says good-bye, once; the lease expires by itself where that does not get through."""
        if self._registration is None:
            return
        try:
            self._connection.leave(self._registration.lease_id, timeout=2.0)
        except GemError as error:
            log.info("could not say good-bye; the lease will expire by itself: %s", error)

    def forget(self) -> None:
        """As before the first registration: another may be tried."""
        self._registration = None

    def renew(self) -> None:
        if self._registration is not None:
            self._connection.renew(self._registration.lease_id)

    # -- θ

    def retry_pull(self) -> bool:
        """Reads θ under the lease; returns whether this worker must give θ its first value instead."""
        return self._retry.call(lambda: self.pull(self.registration.lease_id), self.report)

    def pull(self, lease_id: str) -> bool:
        """One attempt to read θ, without a lease if that is empty."""
        header = self._connection.pull(lease_id, self._room_for, self.theta_format)
        if not header.must_initialize:
            self.version = header.version
        return header.must_initialize

    def read(self) -> Vector:
        """One attempt to read θ into a buffer of its own, without the lease: there the server would take this θ for the one
        that the next gradient is computed on. Raises LayoutMismatch if the server has begun a run of another model."""
        theta = empty(0)

        def make_room(header: pb.PullHeader) -> Vector:
            nonlocal theta
            layout = Layout.from_message(header.layout)
            if self.joined:
                self.known_layout.require_same(layout)
            self.layout = layout
            theta = empty(layout.size)
            return theta

        self._connection.pull("", make_room, self.theta_format)
        return theta

    def share_memory(self) -> None:
        """Moves θ and the gradient to memory shared with the server, where that is on this machine and willing."""
        shared = (
            self._connection.share_memory(self.registration.lease_id, self.known_layout.size) if self._wants_region else None
        )
        self.region = shared.nonce if shared is not None else b""
        if shared is not None:
            np.copyto(shared.theta, self.theta)
            np.copyto(shared.gradient, self.gradient)
            self.theta, self.gradient = shared.theta, shared.gradient

    def make_room(self, layout: Layout) -> None:
        """Buffers for a model of this layout."""
        self.layout, self.theta, self.gradient = layout, empty(layout.size), empty(layout.size)

    @property
    def report(self) -> Callable[[GemError, float], None]:
        """For one `Retry.call`: logs its failures. Raises InvalidRequest if the session was closed meanwhile."""
        log_failure = logging_failures(self._name)

        def report(error: GemError, pause: float) -> None:
            self.require_open()
            log_failure(error, pause)

        return report

    def _register(self) -> None:
        previous = self._registration
        self._connection.drop_stream()
        registration = self._retry.call(
            lambda: self._connection.register(self._name, self.known_layout, self.overlap), self.report
        )
        if previous is not None and previous.run_id != registration.run_id:
            log.warning("%s: the server has begun another run (%s); going on with that", self._name, registration.run_id)
        self._registration, self.sequence, self.steps_done = registration, 0, registration.steps_done
        self.generation += 1
        self._connection.keep_alive(registration.lease_seconds / 3)
        self.share_memory()
        if registration.must_initialize:
            self._initialize()

    def _initialize(self) -> None:
        """Gives θ its first value: what the caller joined with, or after the loss of a server the θ last received."""
        registration = self.registration
        try:
            self._retry.call(lambda: self._connection.initialize(registration.lease_id, self.theta), self.report)
        except InvalidRequest as error:  # the first try did arrive, and only its answer was lost
            log.info("%s: θ has a first value already: %s", self._name, error)

    def _room_for(self, header: pb.PullHeader) -> Vector:
        if header.HasField("layout"):
            self.layout = Layout.from_message(header.layout)
        if self.theta.size != self.known_layout.size:
            self.theta = empty(self.known_layout.size)
        return self.theta

    def _require_not_replaced_by(self, ended: LeaseEnded) -> None:
        if ended.reason == "replaced":
            message = f"another worker has registered as {self._name!r}: give each worker a name of its own"
            self._replaced = LeaseEnded(message, ended.reason)
            raise self._replaced
