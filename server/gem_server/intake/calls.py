"""The calls in progress: one exchange of tensors per lease at a time, and none after the lease's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gem_api.errors import GemError, PermissionDenied, Superseded
from gem_api.region import Region

from gem_server.security.access import ANYONE, Identity


class PeerLeft(Exception):
    """The client has closed the connection, or the server has stopped it."""


class Call:
    """One RPC, or one lane, being served.

    Args:
        owner_of: Returns a lease's owner.
        stop: Makes whoever serves it stop soon, and end with `error`.

    Attributes:
        transport: How its tensors travel: "grpc", "tcp", "tls" or "memory".
        nearby: Whether its worker is on this machine, so that no network is to be shared out.
        region: The memory that it shares with its worker; None if tensors travel as bytes.
        lease_id: The lease that it last used.
        exchanging: Whether it uses that lease's buffers now.
        answering: Whether its request is accepted, and only the reply is outstanding.
        error: The error that the server ended it with; None if it did not.
        identify: Returns the caller's identity. Called anew each time, because a token may be withdrawn while a stream is open.
            Raises as `Access.identifier` says.
    """

    def __init__(self, owner_of: Callable[[str], str | None], stop: Callable[[], object]) -> None:
        self._stop = stop
        self._owner_of = owner_of
        self.identify: Callable[[], Identity] = lambda: ANYONE
        self.transport = "grpc"
        self.nearby = False
        self.region: Region | None = None
        self.lease_id: str | None = None
        self.exchanging = False
        self.answering = False
        self.error: GemError | None = None

    def require_own(self, lease_id: str) -> None:
        """Raises PermissionDenied if a lease was opened with other credentials than this call's."""
        owner = self._owner_of(lease_id)
        if owner is not None and owner != self.identify().owner:
            raise PermissionDenied("this lease was opened with other credentials: register with your own")

    def end(self, error: GemError) -> None:
        """Stops the call, which fails with `error`."""
        if self.error is None:
            self.error = error
            self._stop()

    def require_going_on(self) -> None:
        """Raises the error that the call was ended with, if it was."""
        if self.error is not None:
            raise self.error


class Calls:
    """All calls being served. `owner_of` returns a lease's owner, None if there is no such lease."""

    def __init__(self, owner_of: Callable[[str], str | None]) -> None:
        self._owner_of = owner_of
        self._all: set[Call] = set()
        self._by_lease: dict[str, set[Call]] = {}

    @contextmanager
    def serve(self) -> Iterator[Call]:
        """The lifetime of an RPC, in its task."""
        task = asyncio.current_task()
        assert task is not None
        call = self.begin(task.cancel)
        try:
            yield call
        finally:
            self.finish(call)

    def begin(self, stop: Callable[[], object]) -> Call:
        """A new call, until `finish`."""
        call = Call(self._owner_of, stop)
        self._all.add(call)
        return call

    def finish(self, call: Call) -> None:
        self.end_exchange(call)
        self._all.discard(call)
        self._forget_lease(call)

    @contextmanager
    def exchange(self, call: Call, lease_id: str) -> Iterator[None]:
        """The time in which `call` uses the lease's buffers. A newer call of the same lease ends an older one."""
        self.begin_exchange(call, lease_id)
        try:
            yield
        finally:
            self.end_exchange(call)

    def begin_exchange(self, call: Call, lease_id: str) -> bool:
        """Begins an exchange, until `end_exchange`. Returns whether this ended an older one, which may not stop at once."""
        if call.lease_id != lease_id:
            self._forget_lease(call)
            self._by_lease.setdefault(lease_id, set()).add(call)
            call.lease_id = lease_id
        older = [other for other in self._by_lease[lease_id] if other.exchanging and other is not call]
        for other in older:
            other.end(Superseded("a newer call of the same lease replaced this one"))
        call.exchanging = True
        return bool(older)

    def exchanging(self, lease_id: str) -> bool:
        """Whether a call uses the lease's buffers now."""
        return any(call.exchanging for call in self._by_lease.get(lease_id, ()))

    def open_lane(self, call: Call, lease_id: str) -> None:
        """Makes `call` the lease's lane: it ends with the lease, and a newer lane ends an older one."""
        mine = self._by_lease.setdefault(lease_id, set())
        for other in [other for other in mine if other.transport != "grpc"]:
            other.end(Superseded("a newer lane of the same lease replaced this one"))
        call.lease_id = lease_id
        mine.add(call)

    def end_exchange(self, call: Call) -> None:
        call.exchanging = call.answering = False

    def stop_exchange(self, lease_id: str, error: GemError) -> None:
        """Ends the call that uses the lease's buffers now."""
        for call in self._by_lease.get(lease_id, ()):
            if call.exchanging:
                call.end(error)

    def end_lease(self, lease_id: str, error: GemError, spared: Call | None) -> None:
        """Ends every call of a lease except `spared`."""
        for call in self._by_lease.get(lease_id, set()) - {spared}:
            call.end(error)

    def end_unanswered(self, error: GemError) -> None:
        """Ends every call except those whose request is accepted already."""
        for call in list(self._all):
            if not call.answering:
                call.end(error)

    def _forget_lease(self, call: Call) -> None:
        if call.lease_id is None:
            return
        mine = self._by_lease.get(call.lease_id, set())
        mine.discard(call)
        if not mine:
            self._by_lease.pop(call.lease_id, None)
        call.lease_id = None
