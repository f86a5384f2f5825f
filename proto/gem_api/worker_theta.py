"""θ as the difference to what a worker holds: a byte an element. Both sides keep what the worker holds, with the same bits.

What one difference rounds off is in the next, because that is taken to what the worker really holds. If either side is not sure
(a new lease, a server that has restarted, a transfer that broke), θ is sent whole, and both keep that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gem_api.framing import CHUNK_BYTES, Assembly
from gem_api.layout import Vector
from gem_api.wire import FLOAT32, INT8, ThetaFormat

if TYPE_CHECKING:
    from gem_api.conversions import ByteArray


class WorkerTheta:
    """θ as a worker holds it. The server has one for each lease, the worker one for each server.

    Args:
        size: The number of elements P. It takes 4·P bytes.

    Attributes:
        theta: float32, shape (P,).
        sequence: Of the commit with whose result it came; 0 if it came with none, or is not complete.
    """

    def __init__(self, size: int) -> None:
        self.theta = np.zeros(size, np.float32)
        self.sequence = 0

    def next_format(self, sequence: int, is_difference: bool) -> ThetaFormat:
        """The format of θ in the result of a commit, for sending or receiving it once. It changes what is held.

        Args:
            sequence: Of the commit.
            is_difference: Whether θ comes as the difference, else whole.
        """
        kind = _Difference if is_difference else _Whole
        base = INT8 if is_difference else FLOAT32
        return kind(base.name, base.dtype, base.packing, self, sequence)


@dataclass(frozen=True)
class _Tracked(ThetaFormat):
    """A format that keeps what it sends or receives."""

    worker_theta: WorkerTheta
    sequence: int

    def assembly(self, into: Vector) -> Assembly:
        self.worker_theta.sequence = 0
        end = 0

        def unpack(data: memoryview, filled: Vector) -> None:
            nonlocal end
            begin, end = end, end + filled.size
            self._unpack(data, self.worker_theta.theta[begin:end], filled)
            if end == into.size:
                self.worker_theta.sequence = self.sequence

        return Assembly(into, self.packing, unpack)

    @abstractmethod
    def _unpack(self, data: memoryview, held: Vector, filled: Vector) -> None:
        """Decodes bytes into a part of θ, and into the same part of what is held."""


@dataclass(frozen=True)
class _Whole(_Tracked):
    """θ in float32."""

    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        self.worker_theta.sequence = 0
        step = CHUNK_BYTES // 4
        for begin in range(0, packed.size, step):
            held = self.worker_theta.theta[begin : begin + step]
            np.copyto(held, packed[begin : begin + step])
            yield held.view(np.uint8)
        self.worker_theta.sequence = self.sequence

    def _unpack(self, data: memoryview, held: Vector, filled: Vector) -> None:
        filled[:] = np.frombuffer(data, np.float32)
        np.copyto(held, filled)


@dataclass(frozen=True)
class _Difference(_Tracked):
    """θ minus what is held, in int8 blocks."""

    def pieces(self, packed: Vector) -> Iterator[ByteArray]:
        from gem_api.conversions import encode_difference

        self.worker_theta.sequence = 0
        for part, room in self.packing.pieces(packed.size):
            encode_difference(packed[part], self.worker_theta.theta[part], self.packing.elements, room)
            yield room
        self.worker_theta.sequence = self.sequence

    def _unpack(self, data: memoryview, held: Vector, filled: Vector) -> None:
        from gem_api.conversions import add_blocks

        add_blocks(np.frombuffer(data, np.uint8), self.packing.elements, held)
        np.copyto(filled, held)
