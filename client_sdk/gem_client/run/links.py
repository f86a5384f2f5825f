"""A session's links to all servers of a run: one for each range of θ, of which range 0 leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from gem_api.errors import GemError, LeaseEnded, Overloaded, Quarantined, RejectedCommit, TransportError
from gem_api.ranges import Range
from gem_api.wire import FLOAT32

from gem_client.run.link import Caller, Link
from gem_client.transport.side_thread import SideThread

log = logging.getLogger("gem_client")
T = TypeVar("T")


class Links:
    """The links of one session, range 0 first. With a single server there is only the leader's, and no thread.

    Attributes:
        leader: The link to the server that leads. It stays the same.
        peers: The links to the servers of the other ranges, in order.
    """

    def __init__(self, address: str, caller: Caller) -> None:
        self._caller = caller
        self.leader = Link(address, caller)
        self.peers: list[Link] = []
        self._interrupted = False  # threads of the peers may be at work, although nobody waits for them
        self._ending: list[Link] = []  # former links whose threads may still be at work
        self._ended = False

    def __iter__(self) -> Iterator[Link]:
        yield self.leader
        yield from self.peers

    def arrange(self, addresses: Sequence[str], parameters: int) -> None:
        """Makes the links to the servers of range 1, 2, … of a θ with P parameters; keeps those that exist already.

        Raises InvalidRequest if an address is malformed, or θ is too small for this number of servers."""
        count = 1 + len(addresses)
        self.leader.hold(Range(0, count), parameters)
        former = {(peer.address, peer.part): peer for peer in self.peers}
        self.peers = []
        try:
            for index, address in enumerate(addresses, 1):
                part = Range(index, count)
                known = (address, part) in former
                self.peers.append(former.pop((address, part)) if known else Link(address, self._caller))
                self.peers[-1].hold(part, parameters)
        finally:
            for peer in former.values():
                peer.close()

    # -- all servers at once

    def at_once(self, work: Callable[[Link], T]) -> list[T]:
        """Calls `work` with every link at the same time: the leader's in the caller's thread, each other in its own.

        Returns the results in the order of the ranges. Waits for all; if any fails, raises the error that says what to do next:
        of several, a lease that has ended comes first, then a commit that was rejected, then a server that is unreachable. If
        the caller's thread is interrupted, by Ctrl-C for example, ends what the others do before it raises.
        """
        if not self.peers:
            return [work(self.leader)]
        self.settle()
        self._interrupted = True
        results: list[T] = []
        errors: list[BaseException] = []
        try:
            tasks = [peer.begin(work) for peer in self.peers]
            try:
                results.append(work(self.leader))
            except GemError as error:
                errors.append(error)
            errors += filter(None, [task.exception() for task in tasks])
        except BaseException:
            self.settle()
            raise
        self._interrupted = False
        if not errors:
            return [*results, *(task.result() for task in tasks)]
        try:
            raise min(errors, key=_rank)
        finally:
            del errors, tasks  # they hold the errors, and those the frames and their gradients

    def settle(self) -> None:
        """Ends what an interrupted `at_once` has left in the peers' threads, and waits for it."""
        if not self._interrupted:
            return
        self._ending += self.peers
        if not self._ended:
            self.peers = [peer.successor() for peer in self.peers]
        for peer in self._ending:
            peer.abort()
        for peer in self._ending:
            peer.wait()
        self._interrupted, self._ending = False, []

    def drop_streams(self) -> None:
        """Ends all lanes and streams."""
        self.settle()
        for link in self:
            link.connection.drop_stream()

    # -- the end

    def leave(self, lease_id: str, timeout: float) -> None:
        """Tells the servers, once each, that the worker leaves. If that fails, the lease expires by itself."""

        def leave(link: Link) -> None:
            try:
                with suppress(LeaseEnded):  # it has left
                    link.leave(lease_id, timeout)
            except GemError as error:
                log.info("could not leave the run; the lease will expire by itself: %s", error)

        self._each(leave)

    def stop(self) -> None:
        """Ends the renewals, the lanes and the streams; only `leave` is still possible."""
        self._ended = True
        self._each(lambda link: link.connection.stop())

    def close(self) -> None:
        self._each(lambda link: link.close())

    def _each(self, work: Callable[[Link], None]) -> None:
        """As `at_once`, but even while the links are in use. A server that hangs delays none of the others."""
        tasks = [SideThread("gem-session-end", threading.RLock()).submit(work, peer) for peer in self.peers]
        work(self.leader)
        for task in tasks:
            task.result()

    # -- how commits travel

    @property
    def parts_to_encode(self) -> list[slice]:
        """The parts of an update, one for each server, if all of them get it over the network, in fewer bytes than float32."""
        encodes = self._caller.gradient_format is not FLOAT32 and all(link.region is None for link in self)
        return [link.bounds for link in self] if encodes else []

    @property
    def share_memory(self) -> bool:
        """Whether all servers share memory with this session."""
        return all(link.region is not None for link in self)

    @property
    def transport(self) -> str:
        """The transport of commits: "memory", "tcp", "tls" or "grpc". If it differs, those that occur, such as "memory+tcp"."""
        return "+".join(dict.fromkeys(link.connection.transport for link in self))


def _rank(error: BaseException) -> int:
    """The place of an error in the order of what the session must do about it."""
    if isinstance(error, LeaseEnded):
        return 1 + (error.reason != "replaced")  # a worker that was replaced must not register again
    if isinstance(error, (Quarantined, RejectedCommit)):
        return 3
    if isinstance(error, (TransportError, Overloaded)):
        return 5
    return 4 if isinstance(error, GemError) else 0
