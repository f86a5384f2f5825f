"""A session's membership in a run: its lease, its registration, θ's first value and the buffers for θ and the gradient."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

import numpy as np
from gem_api import __version__
from gem_api.errors import (
    GemError,
    InvalidRequest,
    LeaseEnded,
    RejectedCommit,
    SettingsDiffer,
    TransportError,
)
from gem_api.formats import CONTRACT
from gem_api.framing import empty, empty_pages
from gem_api.hyperparameters import NO_AVERAGE, Hyperparameters
from gem_api.layout import Layout, Vector
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.ranges import older_than_known
from gem_api.v1 import training_pb2 as pb
from gem_api.wire import as_theta_format

from gem_client.answer import Base
from gem_client.run.link import Caller, Link
from gem_client.run.links import Links
from gem_client.run.pending_commit import PendingCommit

log = logging.getLogger("gem_client")
T = TypeVar("T")
FINAL_POLL_SECONDS = 0.5
# That saying goodbye may take: many workers that end at once keep a small server busy. One that is gone refuses at once.
LEAVE_SECONDS = 30.0


class Membership:
    """One worker's membership in a run, under one lease after another. Only its own methods change it.

    With several servers, a lease has the same id on each, and each commit the same sequence number.

    Attributes:
        links: The links to the servers. Those to the servers that do not lead are made when the leader has named them.
        layout: The run's tensors, all of them; None until they are known.
        theta: θ as last received, float32, shape (P,).
        gradient: A buffer for the next gradient, float32, shape (P,). If one server holds everything, a lane with shared memory
            replaces both buffers.
        sequence: Number of the lease's last commit.
        generation: Number of leases held so far.
        at_end: Called when the session has ended.
    """

    def __init__(self, address: str, caller: Caller) -> None:
        self._caller = caller
        self._pull_format = as_theta_format(caller.theta_format)
        self.name = caller.name
        self._process = os.getpid()
        self.links = Links(address, caller)
        self._registration: pb.RegisterWorkerResponse | None = None
        self._hyperparameters = Hyperparameters()  # those of the last registration
        self._replaced: LeaseEnded | None = None
        self._outcome_unknown = False  # of a commit or a registration that was interrupted
        self._left_for_good = self._first_at_the_end = self._warned_of_gradients = False
        self.layout: Layout | None = None
        self.theta = empty(0)
        self.gradient = empty(0)
        self.sequence = 0
        self.generation = 0
        self.at_end: Callable[[], object] = bool
        self.request = pb.RegisterWorkerRequest(worker_name=caller.name)

    @property
    def joined(self) -> bool:
        return self._registration is not None

    @property
    def lease_id(self) -> str:
        """The lease of the last registration; empty if there is none. Any thread may ask."""
        registration = self._registration
        return registration.lease_id if registration is not None else ""

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
        _ = self.registration
        return self._hyperparameters

    @property
    def version(self) -> int:
        """Version of `theta`: that of range 0."""
        return self.links.leader.version

    @property
    def base(self) -> Base:
        """Identifies `theta`, for the commit that is computed on it."""
        return Base(self.version, self.generation, tuple(peer.version for peer in self.links.peers))

    @property
    def progress(self) -> float:
        """The commits in `theta`, each counted by its share of a batch: in that of range 0."""
        return self.links.leader.progress

    @property
    def steps_done(self) -> int:
        """Number of commits applied under the worker's name in this run."""
        return self.links.leader.steps_done

    @property
    def known_layout(self) -> Layout:
        """The run's tensors. Raises InvalidRequest before they are known."""
        if self.layout is None:
            raise InvalidRequest("the layout is not known yet: join or pull first")
        return self.layout

    def require_usable(self) -> None:
        """Raises InvalidRequest once the session has ended, and in a process that was forked; raises LeaseEnded if another
        worker has registered under this name, as registering again would only evict that one."""
        self._caller.require_open()
        if self._replaced is not None:
            raise self._replaced
        if self.is_copy:
            raise InvalidRequest("this session belongs to the process that opened it: open another one after the fork")

    def require_not_joined(self) -> None:
        """Raises InvalidRequest if the session has joined."""
        if self.joined:
            raise InvalidRequest(
                "this session has joined already. Another model needs a gem-server of its own, on another port (--listen), and "
                "a session with it; several optimizers of one model go into one class, which has the step() of all"
            )

    @property
    def is_copy(self) -> bool:
        """Whether this is the copy of a session in a forked process: the lease belongs to the parent."""
        return os.getpid() != self._process

    def warn_of_gradients(self) -> None:
        """Logs once, for a loop that may have an optimizer of its own, that plain SGD on the server makes the run's steps."""
        if self.hyperparameters.optimizer == "sgd" and not self._warned_of_gradients:
            self._warned_of_gradients = True
            log.warning(
                "%s: SGD on the server makes this run's steps, and an optimizer of this worker is not used. To use it, join "
                'with optimizer="worker", or start the server with --optimizer worker',
                self.name,
            )

    def warn_of_missing_workers(self) -> None:
        """Logs how many workers a run still waits for that has not begun, if it waits for any. Asks the server."""
        status = self._status()
        if (count := status.worker_count) < (wanted := status.start.min_workers):
            log.warning(
                "%s: waiting for %d more workers: %d of %d are in the run (gem-server --min-workers). If one does not come, "
                "look for `registration refused` in the server's log",
                self.name, wanted - count, count, wanted,
            )  # fmt: skip

    def warn_of_last_shards(self) -> None:
        """Logs which workers hold shards, if any do: there is no other one. Asks the server."""
        if holders := [worker.name for worker in self._status().workers if worker.shards]:
            log.warning(
                "%s: all shards are dealt: waiting for %s to finish the last ones. If one dies, others get its shards",
                self.name, ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else ""),
            )  # fmt: skip

    def warn_if_idle(self) -> None:
        """Logs, for a worker that has joined and ends now, that it made no commit."""
        if self.generation and not self.steps_done:
            log.warning(
                "%s: this worker made no commit: the run was over before it came, the others had all shards (a smaller "
                "shard_size makes more), or its loop made no step with this session",
                self.name,
            )

    # -- joining and leaving

    def prepare(self, layout: Layout, overlap: bool, choice: OptimizerChoice | None, frozen: bytes) -> None:
        """Makes the buffers for a model of this layout, and the request, before the first registration."""
        self.layout, self.theta, self.gradient = layout, empty(layout.size), empty(layout.size)
        self.request = pb.RegisterWorkerRequest(
            worker_name=self.name,
            layout=layout.to_message(),
            overlap=overlap,
            optimizer=choice.to_message() if choice else None,
            frozen_fingerprint=frozen,
            contract=CONTRACT,
            release=__version__,
        )

    def enter(self) -> None:
        """Registers everywhere, initializes θ if a server asks for it, and pulls. Starts over if the lease ends in between."""
        self._outcome_unknown = True
        known, run = self.version, self._registration and self._registration.run_id
        while True:
            try:
                self._register()
                for link in self.links:  # in the same order in every session, so that no two wait for each other
                    self._start(link)
                self._outcome_unknown = False
                break
            except LeaseEnded as ended:
                self._require_not_replaced_by(ended)
        if run == self.registration.run_id and self.version < known:
            log.warning(
                "%s: the server has come back without commits that it had applied: it is at version %d now, and was at %d or "
                "later. Their samples come again",
                self.name, self.version, known,
            )  # fmt: skip

    def enter_again(self, ended: LeaseEnded) -> None:
        """Takes a new lease after the old one has ended, unless another worker has registered under this name."""
        self._require_not_replaced_by(ended)
        log.warning("%s: the lease ended (%s); registering again and dropping the current gradient", self.name, ended.reason)
        self.enter()

    def rejoin_if_uncertain(self) -> None:
        """Takes a new lease if a commit or a registration was interrupted: only then is the lease's state known."""
        if self._outcome_unknown:
            self.enter()

    def leave(self) -> None:
        """Tells the servers that the worker leaves; a busy server has time to answer."""
        if self._registration is not None:
            self.links.leave(self._registration.lease_id, LEAVE_SECONDS)

    def end(self) -> None:
        """Leaves the run, if the worker is in it, and closes the connections."""
        self.links.stop()
        self.leave()
        self.links.close()
        self.at_end()

    def forget(self, for_good: bool = False) -> None:
        """Returns to the state before the first registration, so that the session may join again. `for_good`: the caller is
        done with the run, and is told so if it goes on all the same."""
        self._registration, self._left_for_good = None, for_good

    # -- a commit

    def commit(self, commit: PendingCommit) -> pb.CommitResult | None:
        """Has all servers apply a commit; `theta` then holds the new θ.

        Returns the result of the server that leads; None if the commit was lost because its lease had ended. The worker then
        holds a new lease and a fresh θ.

        Raises:
            InvalidRequest: The commit's base is not that of a session with as many servers.
            RejectedCommit: A server rejects its part of the update for its content.
            TransportError: A server could not be reached for as long as `retry` allows.
        """
        servers = len(list(self.links))
        if commit.base.generation != self.generation:
            return None
        if len(commit.base.versions) != servers:
            raise InvalidRequest(f"{commit.base} has no version for each server: take it from the session's property `base`")
        commit.sequence = self.sequence + 1
        self._outcome_unknown = True  # until all servers have answered, whatever interrupts the call
        try:
            result, *_ = self.links.at_once(lambda link: link.send(commit, self.theta))
        except RejectedCommit:
            if servers > 1:  # another may have applied its part; a single one gives its number to the next commit
                self.sequence = commit.sequence
            self._outcome_unknown = len(commit.answered) < servers
            raise
        except LeaseEnded as ended:
            self.enter_again(ended)
            return None
        self.sequence, self._outcome_unknown = commit.sequence, False
        self._move_into_region()
        return result

    # -- shards

    def lease_shard(self, samples: int, holding: Collection[int], fingerprint: bytes = b"") -> pb.LeaseShardResponse:
        """Requests a shard, and keeps the shards `holding`. Takes a new lease if the present one has ended."""
        leader = self.links.leader

        def attempt() -> pb.LeaseShardResponse:
            return leader.connection.lease_shard(self.registration.lease_id, samples, holding, fingerprint)

        return self._unless_ended(lambda: leader.call(attempt))

    def complete_shard(self, lease_id: str, shard_id: int) -> None:
        """Reports a shard of a lease as complete. If that fails, it goes back with the next `lease_shard`."""
        leader = self.links.leader
        with suppress(LeaseEnded, TransportError):
            leader.call(lambda: leader.connection.complete_shard(lease_id, shard_id))

    # -- θ

    def pull(self, link: Link) -> bool:
        """Makes one attempt to read a server's part of θ under the lease. Returns whether this worker must initialize it.

        Raises InvalidRequest if a range is older than it was: each has a log, and loses no version that a worker knows."""
        header = link.connection.pull(self.registration.lease_id, lambda _: link.view(self.theta), self._pull_format)
        if not header.must_initialize:
            if header.version < link.version and not link.part.whole:
                raise InvalidRequest(older_than_known(link.version, header.version))
            link.holds(header.version, header.progress)
        return header.must_initialize

    def pull_under_lease(self) -> None:
        """Reads θ into `theta`, with retries; takes a new lease if that one has ended."""
        self._unless_ended(lambda: self.links.at_once(self._retry_pull))

    def pull_without_lease(self, average: bool = False) -> Vector:
        """Reads θ, or its average, into `theta`, with retries."""

        def own_buffer(layout: Layout) -> Vector:
            if self.theta.size != layout.size:
                self.theta = empty(layout.size)
            return self.theta

        theta, versions = self._read(own_buffer, average)
        for link, version in zip(self.links, versions, strict=True):
            link.version = version
        return theta

    def read(self, average: bool) -> tuple[Vector, int]:
        """Reads θ, or its average, into a new buffer, with retries. Returns it and its version, that of range 0. Raises
        LayoutMismatch if the server has begun a run of another model."""
        theta, versions = self._read(lambda layout: empty(layout.size), average)
        return theta, versions[0]

    def require_average(self) -> None:
        """Raises InvalidRequest if the run keeps no average of θ."""
        if not self._status().hyperparameters.average:
            raise InvalidRequest(NO_AVERAGE)

    def wait_until_run_is_over(self) -> None:
        """Polls the server's status until no worker trains any more."""
        while (status := self._status()).workers and status.state not in (pb.RUN_STATE_COMPLETE, pb.RUN_STATE_DRAINING):
            self._caller.retry.sleep(FINAL_POLL_SECONDS)
        self._first_at_the_end = status.first_worker == self.name

    @property
    def is_first(self) -> bool:
        """Whether this worker is the oldest in the run; once the run is over, whether it was the last to leave."""
        return self._first_at_the_end if self._left_for_good else self._status().first_worker == self.name

    def _status(self) -> pb.GetStatusResponse:
        leader = self.links.leader
        return leader.call(leader.connection.status)

    # -- registering, and one attempt at what is retried

    def _register(self) -> None:
        previous, leader, layout = self._registration, self.links.leader, self.known_layout
        self.links.drop_streams()
        registration = leader.call(lambda: leader.connection.register(self.request))
        if previous is not None and previous.run_id != registration.run_id:
            log.warning("%s: the server has begun another run (%s); continuing with that run", self.name, registration.run_id)
        self._registration, self.sequence = registration, 0
        self._hyperparameters = Hyperparameters.from_message(registration.hyperparameters)
        self.generation += 1
        leader.registered(registration)
        self.links.arrange(registration.peers, layout.size)
        leader.require_part(registration.layout)
        if previous is None or previous.run_id != registration.run_id:
            for link in self.links:
                link.version = 0  # those known are of another run
        answer = pb.LeadsAnswer(
            lease_id=registration.lease_id, run_id=registration.run_id, hyperparameters=registration.hyperparameters
        )
        for peer in self.links.peers:
            self._register_with(peer, answer)

    def _register_with(self, peer: Link, answer: pb.LeadsAnswer) -> None:
        """Registers with a server that does not lead, under the lease that the leader gave. While the two have different
        hyper-parameters, waits for as long as for a server that is away: they may be restarted one by one with other ones."""
        registration = self._caller.call(lambda: self._ask_to_register(peer, answer), (SettingsDiffer,))
        peer.registered(registration)
        peer.require_part(registration.layout)
        if (registration.run_id, registration.lease_id) != (answer.run_id, answer.lease_id):
            raise InvalidRequest(f"the server at {peer.address} belongs to run {registration.run_id}, not {answer.run_id}")

    def _ask_to_register(self, peer: Link, answer: pb.LeadsAnswer) -> pb.RegisterWorkerResponse:
        leader, request = self.links.leader, pb.RegisterWorkerRequest()
        request.CopyFrom(self.request)
        request.lead.CopyFrom(answer)
        request.ClearField("frozen_fingerprint")  # the leader has compared it
        try:
            return peer.call(lambda: peer.connection.register(request))
        except InvalidRequest:  # the leader may have begun another run since: then its lease has ended, and `enter` starts over
            leader.call(leader.connection.renew)
            raise
        except SettingsDiffer as differ:  # the leader may have been restarted since, and have other ones than it answered with
            leader.call(leader.connection.renew)
            now = self._status().hyperparameters
            answer.hyperparameters.CopyFrom(now)
            raise SettingsDiffer(f"{differ}; range 0 is at {leader.address}") from None

    def _start(self, link: Link) -> None:
        """Opens a server's lane, initializes its part of θ if it asks for that, and pulls it."""
        link.call(link.open_lane)
        self._move_into_region()
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
            link.call(lambda: link.connection.initialize(lease_id, link.view(self.theta)))
        except InvalidRequest as error:  # the first attempt did arrive, and only its response was lost
            log.info("%s: θ has a first value already: %s", self.name, error)

    def _retry_pull(self, link: Link) -> bool:
        return link.call(lambda: self.pull(link))

    def _move_into_region(self) -> None:
        """Moves θ and the gradient into new memory shared with the server, if it holds everything."""
        leader = self.links.leader
        region = leader.region
        if region is not None and leader.part.whole and self.theta is not region.theta:
            self._move_into(region.theta, region.gradient)

    def move_into_pages(self) -> None:
        """Moves θ and the gradient into memory that a GPU may lock, if they are not in such memory, as a region is."""
        if self.theta.flags.owndata:
            self._move_into(empty_pages(self.theta.size), empty_pages(self.theta.size))

    def _move_into(self, theta: Vector, gradient: Vector) -> None:
        np.copyto(theta, self.theta)
        np.copyto(gradient, self.gradient)
        self.theta, self.gradient = theta, gradient

    def _unless_ended(self, work: Callable[[], T]) -> T:
        """Calls `work` under the lease; takes a new one and calls it again if that has ended."""
        self.rejoin_if_uncertain()
        while True:
            try:
                return work()
            except LeaseEnded as ended:
                self.enter_again(ended)

    def _read(self, make_buffer: Callable[[Layout], Vector], average: bool) -> tuple[Vector, list[int]]:
        """Reads θ or its average, with retries: the leader's part, which says where the others are, then all others. Returns
        it and the versions of its parts. `make_buffer` returns a buffer for a model."""
        theta, leader = empty(0), self.links.leader

        def view(link: Link, header: pb.PullHeader) -> Vector:
            nonlocal theta
            layout = Layout.from_message(header.layout).whole
            if link is leader and not self.joined:
                self.links.arrange(header.peers, layout.size)
            else:
                self.known_layout.require_same(layout)
            link.require_part(header.layout)
            if link is leader:
                self.layout, theta = layout, make_buffer(layout)
            return link.view(theta)

        def read(link: Link) -> int:
            # Without the lease: under it, the server would take this θ for the one that the next gradient is computed on.
            return link.connection.pull("", lambda header: view(link, header), self._pull_format, average).version

        version = leader.call(lambda: read(leader))
        return theta, self.links.at_once(lambda link: version if link is leader else link.call(lambda: read(link)))

    def _require_not_replaced_by(self, ended: LeaseEnded) -> None:
        if ended.reason == "replaced":
            message = f"another worker has registered as {self.name!r}: give each worker its own name"
            self._replaced = LeaseEnded(message, ended.reason)
            raise self._replaced
