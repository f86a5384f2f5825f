"""Error feedback: the rounding error of one commit is added to the next, so that gradients are delayed but not lost."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import numpy as np

from gem_api.conversions import ByteArray, encode_blocks
from gem_api.framing import Packing, framed
from gem_api.layout import Vector


class FeedbackEncoder:
    """Encodes one lease's gradients g in int8 blocks, with a residual e that is initially 0.

    It sends q = quantised(e + g). When that is applied, e ← e + g − q; until then e does not change. So a resend carries the
    same bytes, and a rejected or dropped commit has no effect. |e| is at most half a quantisation step: max|e + g| / 254 of
    its block. Takes 8·P bytes, for e and its next value.

    Args:
        size: The number of elements P.
        packing: The block format.
    """

    def __init__(self, size: int, packing: Packing) -> None:
        self._packing = packing
        self._residual = np.zeros(size, np.float32)
        self._remainder = np.zeros(size, np.float32)
        # gRPC requests frames from its own thread, and may continue for some time after a stream was cancelled.
        self._lock = Lock()
        self._current: object = None

    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        """The bytes of e + g, with g in `packed` (float32, shape (P,)). Ends the iterator of an earlier call."""
        with self._lock:
            self._current = mine = object()
        return self._pieces(packed, mine)

    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        """The same bytes as gRPC's frames; the first begins with `opening`."""
        return framed(self.pieces(packed), opening)

    def applied(self) -> None:
        """Makes the rounding error of the last frames the new residual."""
        self._residual, self._remainder = self._remainder, self._residual

    def _pieces(self, gradient: Vector, mine: object) -> Iterator[ByteArray]:
        for part, room in self._packing.pieces(gradient.size):
            with self._lock:
                if self._current is not mine:
                    return
                encode_blocks(gradient[part], self._residual[part], self._remainder[part], self._packing.elements, room)
            yield room
