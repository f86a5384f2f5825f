"""The memory where gradients arrive: a few buffers for all workers, because few large gradients arrive at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gem_api.layout import Vector

_BUFFERS = 4  # for gradients that arrive, that are nearly there, that wait to be applied, and that are being applied
_BYTES = 64 << 20  # up to which small models have a buffer for each worker


def _nothing(upload: Upload) -> None: ...


@dataclass(eq=False)
class Upload:
    """Memory for one gradient. It is free again once everyone who uses it has released it: the call, the queue, the log.

    Attributes:
        gradient: float32, shape (P,).
        freed: Called when the last user has released it.
    """

    gradient: Vector
    freed: Callable[[Upload], None] = _nothing
    _users: int = 1

    def hold(self) -> None:
        """Adds a user."""
        self._users += 1

    def release(self) -> None:
        """Call this once for each user."""
        self._users -= 1
        if not self._users:
            self.freed(self)


def buffers_for(workers: int, nbytes: int) -> int:
    """How many buffers of `nbytes` a run with this number of workers has, besides those of gradients that arrive slowly."""
    return min(workers, max(_BUFFERS, _BYTES // max(1, nbytes)))
