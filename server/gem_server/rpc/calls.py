"""The calls in progress: one exchange of tensors per lease at a time, and none after the lease's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gem_api.errors import GemError, PermissionDenied, Superseded

from gem_server.security.access import ANYONE, Identity


class Call:
    """One RPC being served.

    Attributes:
        lease_id: The lease that it last used.
        exchanging: Whether it uses that lease's buffers now.
        answering: Whether its request is accepted, and only the reply is outstanding.
        error: The error that the server ended it with; None if it did not.
        identify: Returns the caller's identity. Called anew each time, because a token may be withdrawn while a stream is open.
            Raises as `Access.identify`.
    """

    def __init__(self, owner_of: Callable[[str], str | None]) -> None:
        self._task = asyncio.current_task()
        self._owner_of = owner_of
        self.identify: Callable[[], Identity] = lambda: ANYONE
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
        if self.error is None and self._task is not None:
            self.error = error
            self._task.cancel()


class Calls:
    """All calls being served. `owner_of` returns a lease's owner, None if there is no such lease."""

    def __init__(self, owner_of: Callable[[str], str | None]) -> None:
        self._owner_of = owner_of
        self._all: set[Call] = set()
        self._by_lease: dict[str, set[Call]] = {}

    @contextmanager
    def serve(self) -> Iterator[Call]:
        """The lifetime of a call."""
        call = Call(self._owner_of)
        self._all.add(call)
        try:
            yield call
        finally:
            self._all.discard(call)
            self._forget_lease(call)

    @contextmanager
    def exchange(self, call: Call, lease_id: str) -> Iterator[None]:
        """The time in which `call` uses the lease's buffers. A newer call of the same lease ends an older one."""
        self._forget_lease(call)
        mine = self._by_lease.setdefault(lease_id, set())
        for other in [other for other in mine if other.exchanging]:
            other.end(Superseded("a newer call of the same lease replaced this one"))
        call.lease_id, call.exchanging = lease_id, True
        mine.add(call)
        try:
            yield
        finally:
            call.exchanging = call.answering = False

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
