"""A session's buffers, for what copies them to an accelerator and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from gem_api.layout import Vector
from gem_api.wire import Format

from gem_client.run.membership import Membership


class HostBuffers:
    """The buffers of a session, and how its commits carry the gradient. `lock` is held while a commit is under way."""

    def __init__(self, member: Membership, lock: AbstractContextManager[Any]) -> None:
        self._member, self._lock = member, lock
        self.gradient_format: Format = member.links.leader.caller.gradient_format

    @property
    def gradient(self) -> Vector:
        """See `Session.gradient`."""
        return self._member.gradient

    @property
    def theta(self) -> Vector:
        """See `Session.theta`."""
        return self._member.theta

    @property
    def parts_to_encode(self) -> list[slice]:
        """See `Links.parts_to_encode`."""
        return self._member.links.parts_to_encode

    def move_into_pages(self) -> None:
        """Moves both into memory that a GPU may lock. Waits for a commit under way."""
        with self._lock:
            self._member.move_into_pages()

    def at_end(self, work: Callable[[], object]) -> None:
        """Has `work` called when the session has ended."""
        self._member.at_end = work
