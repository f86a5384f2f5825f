"""A session's membership in a run: its lease, its registration, θ's first value and the buffers for θ and the gradient."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
from gem_api.errors import GemError, InvalidRequest, LeaseEnded, SettingsDiffer
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.ranges import older_than_known
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import ThetaFormat

from gem_client.retry import Retry, logging_failures
from gem_client.run.link import Link
from gem_client.run.links import Links

log = logging.getLogger("gem_client")
T = TypeVar("T")
FINAL_POLL_SECONDS = 0.5
# That saying goodbye may take: many workers that end at once keep a small server busy. One that is gone refuses at once.
LEAVE_SECONDS = 30.0


class Membership:
    """One worker's membership in a run, under one lease after another. Only its own methods change it.

    With several servers, a lease has the same id on each, and each commit the same sequence number.

    Args:
        name: The worker's name.
        links: The links to the servers. Those to the servers that do not lead are made when the lead has named them.
        retry: How long to retry.
        shared_memory: Whether to ask a server on the same machine for shared memory.
        theta_format: The format of θ on the network.

    Attributes:
        layout: The run's tensors, all of them; None until they are known.
        theta: θ as last received, float32, shape (P,).
        gradient: A buffer for the next gradient, float32, shape (P,). If one server holds everything, a lane with shared memory
            replaces both buffers.
        sequence: Number of the lease's last commit.
        steps_done: Commits applied under the worker's name in this run.
        generation: Number of leases held so far.
        overlap: Whether the worker computes a gradient while a commit is under way.
        choice: The optimizer that the worker brings.
        frozen: A fingerprint of the parameters that it does not train; empty: none.
        closed: Whether the session has ended, so that nothing is retried.
    """

    def __init__(self, name: str, links: Links, retry: Retry, shared_memory: bool, theta_format: ThetaFormat) -> None:
        self._name = name
        self._process = os.getpid()
        self.links = links
        self._retry = retry
        self._wants_region = shared_memory
        self.theta_format = theta_format
        self._registration: pb.RegisterWorkerResponse | None = None
        self._settings: tuple[pb.RegisterWorkerResponse, Hyperparameters] | None = None  # those of one registration
        self._replaced: LeaseEnded | None = None
        self._in_doubt = False  # a call was interrupted, and the server may or may not have received it
        self._left_for_good = False
        self.layout: Layout | None = None
        self.theta = empty(0)
        self.gradient = empty(0)
        self.sequence = 0
        self.steps_done = 0
        self.generation = 0
        self.overlap = False
        self.choice: OptimizerChoice | None = None
        self.frozen = b""
        self.closed = False

    @property
    def joined(self) -> bool:
        return self._registration is not None

    @property
    def registration(self) -> pb.RegisterWorkerResponse:
        """The response of the server that leads to the last registration. Raises InvalidRequest before the first."""
        if self._registration is None and self._left_for_good:
            raise InvalidRequest(
                "this worker has left the run, by load_final or pull_final: open another session with gem_client.connect"
            )
        if self._registration is None:
            raise InvalidRequest(
                "this session has not joined a run yet: make the Optimizer first, or call join with the model's parameters"
            )
        return self._registration

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The run's, as of the last registration. Raises InvalidRequest before the first."""
        registration, known = self.registration, self._settings
        if known is None or known[0] is not registration:  # every batch asks
            self._settings = known = registration, Hyperparameters.from_message(registration.hyperparameters)
        return known[1]

    @property
    def version(self) -> int:
        """Version of `theta`: that of range 0."""
        return self.links.lead.version

    @property
    def peer_versions(self) -> tuple[int, ...]:
        """The versions of the ranges 1, 2, … of `theta`."""
        return tuple(peer.version for peer in self.links.peers)

    @property
    def lies_in_region(self) -> bool:
        """Whether `theta` and `gradient` lie in memory shared with the server, which then holds everything."""
        return self.links.lead.part.whole and self.links.lead.region is not None

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

    def prepare(self, layout: Layout, overlap: bool, choice: OptimizerChoice | None, frozen: bytes) -> None:
        """Makes the buffers for a model of this layout, before the first registration."""
        self.layout, self.theta, self.gradient = layout, empty(layout.size), empty(layout.size)
        self.overlap, self.choice, self.frozen = overlap, choice, frozen

    def enter(self) -> None:
        """Registers everywhere, initializes θ if a server asks for it, and pulls. Starts over if the lease ends in between."""
        self._in_doubt = True
        while True:
            try:
                self._register()
                for link in self.links:  # in the same order in every session, so that no two wait for each other
                    self._start(link)
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
        return self._unless_ended(lambda: self._retry.call(lambda: attempt(self.registration.lease_id), self.report))

    def leave(self) -> None:
        """Tells the servers, once, that the worker leaves; a busy server has time to answer. If it fails, the lease expires by
        itself."""
        if self._registration is None:
            return

        def failed(error: GemError) -> None:
            log.info("could not leave the run; the lease will expire by itself: %s", error)

        self.links.leave(self._registration.lease_id, LEAVE_SECONDS, failed)

    def forget(self, for_good: bool = False) -> None:
        """Returns to the state before the first registration, so that the session may join again. `for_good`: the caller is
        done with the run, and is told so if it goes on all the same."""
        self._registration, self._left_for_good = None, for_good

    def end(self) -> None:
        """Marks the session as ended: a call that is being retried raises InvalidRequest instead of trying again."""
        self.closed = True

    # -- a commit

    def commit_begins(self) -> None:
        """Until the commit's result is known, the lease is in doubt, whatever interrupts the call."""
        self._in_doubt = True

    def part_applied(self, link: Link, result: pb.CommitResult) -> None:
        """A server applied its part of the commit, and `theta` holds its part of the new θ."""
        link.sequence, link.version = result.sequence, result.base_version
        self.steps_done += link.part.leads

    def part_rejected(self, link: Link, sequence: int) -> None:
        """A server rejected its part of the commit for its content."""
        link.sequence = sequence

    def commit_rejected(self) -> None:
        """A server rejected the commit. If there is only that one, the next commit takes its sequence number; else another
        server may have applied its part."""
        if self.links.peers:
            self.sequence += 1
        self._in_doubt = any(link.sequence < self.sequence for link in self.links)

    def commit_applied(self, result: pb.CommitResult) -> None:
        """All servers applied the commit, and `theta` holds the new θ."""
        self.sequence = result.sequence
        self._in_doubt = False

    # -- θ

    def pull(self, link: Link) -> bool:
        """Makes one attempt to read a server's part of θ under the lease. Returns whether this worker must initialize it.

        Raises InvalidRequest if a range is older than it was: each has a log, and loses no version that a worker knows."""
        header = link.connection.pull(self.registration.lease_id, lambda header: link.view(self.theta), self.theta_format)
        if not header.must_initialize:
            if header.version < link.version and not link.part.whole:
                raise InvalidRequest(older_than_known(link.version, header.version))
            link.version = header.version
        return header.must_initialize

    def pull_under_lease(self) -> None:
        """Reads θ into `theta`, with retries; takes a new lease if that one has ended."""
        self._unless_ended(lambda: self.links.at_once(self._retry_pull))

    def pull_without_lease(self) -> Vector:
        """Reads θ into `theta`, with retries."""

        def own_buffer(layout: Layout) -> Vector:
            if self.theta.size != layout.size:
                self.theta = empty(layout.size)
            return self.theta

        theta, versions = self._read(own_buffer)
        for link, version in zip(self.links, versions, strict=True):
            link.version = version
        return theta

    def read(self) -> Vector:
        """Reads θ into a new buffer, with retries. Raises LayoutMismatch if the server has begun a run of another model."""
        return self._read(lambda layout: empty(layout.size))[0]

    def wait_until_run_is_over(self) -> None:
        """Polls the server's status until no worker trains any more."""
        while not _is_over(self._retry.call(self.links.lead.connection.status, self.report)):
            self._retry.sleep(FINAL_POLL_SECONDS)

    def open_lane(self, link: Link) -> None:
        """Opens a lane for the lease's commits. If it has shared memory for everything, moves θ and the gradient there."""
        link.connection.open_lane(self.registration.lease_id, link.view(self.theta).size, self._wants_region)
        region = link.region
        if region is not None and link.part.whole:
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
        previous, lead, layout = self._registration, self.links.lead, self.known_layout
        self.links.drop_streams()
        registration = self._retry.call(
            lambda: lead.connection.register(self._name, layout, self.overlap, self.choice, frozen=self.frozen), self.report
        )
        if previous is not None and previous.run_id != registration.run_id:
            log.warning("%s: the server has begun another run (%s); continuing with that run", self._name, registration.run_id)
        self._registration, self.sequence, self.steps_done = registration, 0, registration.steps_done
        self.generation += 1
        lead.registered(registration)
        self.links.arrange(registration.peers, layout.size)
        lead.require_part(registration.layout)
        if previous is None or previous.run_id != registration.run_id:
            for link in self.links:
                link.version = 0  # those known are of another run
        answer = pb.LeadsAnswer(
            lease_id=registration.lease_id, run_id=registration.run_id, hyperparameters=registration.hyperparameters
        )
        for peer in self.links.peers:
            self._register_with(peer, answer)

    def _register_with(self, peer: Link, answer: pb.LeadsAnswer) -> None:
        """Registers with a server that does not lead, under the lease that the lead gave. While the two have different
        hyper-parameters, waits for as long as for a server that is away: they may be restarted one by one with other ones."""
        registration = self._retry.call(lambda: self._ask_to_register(peer, answer), self.report, (SettingsDiffer,))
        peer.registered(registration)
        peer.require_part(registration.layout)
        if (registration.run_id, registration.lease_id) != (answer.run_id, answer.lease_id):
            raise InvalidRequest(f"the server at {peer.address} belongs to run {registration.run_id}, not {answer.run_id}")

    def _ask_to_register(self, peer: Link, answer: pb.LeadsAnswer) -> pb.RegisterWorkerResponse:
        lead = self.links.lead
        try:
            return peer.retry(
                self._retry,
                lambda: peer.connection.register(self._name, self.known_layout, self.overlap, self.choice, answer),
                self.report,
            )
        except InvalidRequest:  # the lead may have begun another run since: then its lease has ended, and `enter` starts over
            self._retry.call(lead.connection.renew, self.report)
            raise
        except SettingsDiffer as differ:  # the lead may have been restarted since, and have other ones than it answered with
            self._retry.call(lead.connection.renew, self.report)
            now = self._retry.call(lead.connection.status, self.report).hyperparameters
            answer.hyperparameters.CopyFrom(now)
            raise SettingsDiffer(f"{differ}; range 0 is at {lead.address}") from None

    def _start(self, link: Link) -> None:
        """Opens a server's lane, initializes its part of θ if it asks for that, and pulls it."""
        link.retry(self._retry, lambda: self.open_lane(link), self.report)
        if link.registration is not None and link.registration.must_initialize:
            self._initialize(link)
        while self._retry_pull(link):
            self._initialize(link)

    def _initialize(self, link: Link) -> None:
        """Sends a part's first value: the values that the caller joined with, or the last θ received if it was lost.

        Raises InvalidRequest if only this server has lost it: no worker may commit before all parts have a first value."""
        lease_id = self.registration.lease_id
        if not link.part.leads and self.version > 0:
            with suppress(GemError):
                link.leave(lease_id, LEAVE_SECONDS)  # else it would wait for this worker
            raise InvalidRequest(
                f"range {link.part} at {link.address} has lost its data: it asks for a first value, but the run is at version "
                f"{self.version}. Start that server with the checkpoint folder that it had (--checkpoint-dir, --resume), or "
                "make new folders for all ranges from one backup with `gem-ctl reshard`"
            )
        try:
            link.retry(self._retry, lambda: link.connection.initialize(lease_id, link.view(self.theta)), self.report)
        except InvalidRequest as error:  # the first attempt did arrive, and only its response was lost
            log.info("%s: θ has a first value already: %s", self._name, error)

    def _retry_pull(self, link: Link) -> bool:
        return link.retry(self._retry, lambda: self.pull(link), self.report)

    def _unless_ended(self, work: Callable[[], T]) -> T:
        """Calls `work` under the lease; takes a new one and calls it again if that has ended."""
        self.settle_doubt()
        while True:
            try:
                return work()
            except LeaseEnded as ended:
                self.enter_again(ended)

    def _read(self, make_buffer: Callable[[Layout], Vector]) -> tuple[Vector, list[int]]:
        """Reads θ, with retries: the lead's part, which says where the others are, then all others. Returns it and the
        versions of its parts. `make_buffer` returns a buffer for a model."""
        theta, version = self._retry.call(lambda: self._read_lead(make_buffer), self.report)

        def read(link: Link) -> int:
            if link.part.leads:
                return version
            return link.retry(self._retry, lambda: self._read_part(link, theta), self.report)

        return theta, self.links.at_once(read)

    # Without the lease: under it, the server would take this θ for the one that the next gradient is computed on.

    def _read_lead(self, make_buffer: Callable[[Layout], Vector]) -> tuple[Vector, int]:
        theta, lead = empty(0), self.links.lead

        def view(header: pb.PullHeader) -> Vector:
            nonlocal theta
            layout = Layout.from_message(header.layout).whole
            if self.joined:
                self.known_layout.require_same(layout)
            else:
                self.links.arrange(header.peers, layout.size)
            lead.require_part(header.layout)
            self.layout, theta = layout, make_buffer(layout)
            return lead.view(theta)

        header = lead.connection.pull("", view, self.theta_format)
        return theta, header.version

    def _read_part(self, link: Link, theta: Vector) -> int:
        def view(header: pb.PullHeader) -> Vector:
            self.known_layout.require_same(Layout.from_message(header.layout).whole)
            link.require_part(header.layout)
            return link.view(theta)

        return link.connection.pull("", view, self.theta_format).version

    def _require_not_replaced_by(self, ended: LeaseEnded) -> None:
        if ended.reason == "replaced":
            message = f"another worker has registered as {self._name!r}: give each worker its own name"
            self._replaced = LeaseEnded(message, ended.reason)
            raise self._replaced


def _is_over(status: pb.GetStatusResponse) -> bool:
    return status.state in (pb.RUN_STATE_COMPLETE, pb.RUN_STATE_DRAINING) or not status.workers
