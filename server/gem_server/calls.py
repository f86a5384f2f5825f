"""The calls in progress: one exchange of tensors per lease at a time, and none after the lease's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gem_api.errors import GemError, Superseded


class Call:
    """One RPC being served.

    Attributes:
        lease_id: The lease that it was last made under.
        exchanging: Whether it uses that lease's buffers now.
        answering: Whether what it brought is accepted, and only the answer is outstanding.
        error: Why the server itself ended it, if it did.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.lease_id: str | None = None
        self.exchanging = False
        self.answering = False
        self.error: GemError | None = None

    def end(self, error: GemError) -> None:
        """Stops the call where it waits; it is answered with `error`."""
        if self.error is None and self._task is not None:
            self.error = error
            self._task.cancel()


class Calls:
    """All calls being served."""

    def __init__(self) -> None:
        self._all: set[Call] = set()
        self._by_lease: dict[str, set[Call]] = {}

    @contextmanager
    def serve(self) -> Iterator[Call]:
        """The lifetime of a call."""
        call = Call()
        self._all.add(call)
        try:
            yield call
        finally:
            self._all.discard(call)
            self._forget_lease(call)

    @contextmanager
    def exchange(self, call: Call, lease_id: str) -> Iterator[None]:
        """The time in which `call` uses the lease's buffers. A newer call of the same lease ends an older one's exchange."""
        self._forget_lease(call)
        mine = self._by_lease.setdefault(lease_id, set())
        for other in [other for other in mine if other.exchanging]:
            other.end(Superseded("a newer call under the same lease took over"))
        call.lease_id, call.exchanging = lease_id, True
        mine.add(call)
        try:
            yield
        finally:
            call.exchanging = call.answering = False

    def end_lease(self, lease_id: str, error: GemError, spared: Call | None) -> None:
        """Ends every call of a lease but one."""
        for call in self._by_lease.get(lease_id, set()) - {spared}:
            call.end(error)

    def end_unanswered(self, error: GemError) -> None:
        """Ends every call but those whose answer is outstanding."""
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
