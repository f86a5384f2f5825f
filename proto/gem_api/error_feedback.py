"""Error feedback: what rounding takes from one commit is added to the next, so that only delay is lost, not gradient."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import numpy as np

from gem_api.conversions import Bytes, encode_blocks
from gem_api.framing import Packing, framed
from gem_api.layout import Vector


class FeedbackEncoder:
    """Encodes one lease's gradients g in int8 blocks, with a residual e that begins at 0.

    What is sent is q = quantised(e + g); once that is applied, e ← e + g − q. Until then e stays as it is. So a resend
    carries the same bytes, and a commit that was refused or dropped leaves no trace. |e| is at most half a quantisation
    step: max|e + g| / 254 of its block. Costs 8·P bytes, for e and for what it will be.

    Args:
        size: P.
        packing: The blocks.
    """

    def __init__(self, size: int, packing: Packing) -> None:
        self._packing = packing
        self._residual = np.zeros(size, np.float32)
        self._remainder = np.zeros(size, np.float32)
        # gRPC asks for frames from a thread of its own, and for some time goes on to do so on a stream that was given up.
        self._lock = Lock()
        self._current: object = None

    def frames(self, packed: Vector, opening: bytes = b"") -> Iterator[bytes]:
        """The frames that carry e + g, g being `packed` (float32, shape (P,)); those of an earlier call end here."""
        with self._lock:
            self._current = mine = object()
        return framed(self._pieces(packed, mine), opening)

    def applied(self) -> None:
        """What the frames left over is the residual from now on."""
        self._residual, self._remainder = self._remainder, self._residual

    def _pieces(self, gradient: Vector, mine: object) -> Iterator[Bytes]:
        for part, room in self._packing.pieces(gradient.size):
            with self._lock:
                if self._current is not mine:
                    return
                encode_blocks(gradient[part], self._residual[part], self._remainder[part], self._packing.elements, room)
            yield room
