"""An update that comes to the host in the network's format: its worker's accelerator has encoded it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gem_api.framing import CHUNK_BYTES
from gem_api.layout import Vector
from gem_api.wire import Encoder, Format


class EncodedPart(Encoder):
    """One server's part of an update.

    Args:
        form: The format.
        data: The bytes: uint8. They stay as they are until the update has been committed, or given up.

    Attributes:
        was_applied: Whether the server has applied it. What it has rounded off then goes into the next update.
    """

    def __init__(self, form: Format, data: npt.NDArray[np.uint8]) -> None:
        self._form, self._data = form, data
        self.was_applied = False

    def pieces(self, packed: Vector) -> Iterator[npt.NDArray[np.uint8]]:
        """Generates the bytes; `packed` is not used."""
        block = self._form.packing.block
        step = CHUNK_BYTES // block * block
        for begin in range(0, self._data.size, step):
            yield self._data[begin : begin + step]

    def decode(self, into: Vector) -> None:
        """Writes what the server would read (float32, shape (P,)), for memory that is shared with it."""
        self._form.assembly(into).add_all(self._data.data)

    def applied(self) -> None:
        self.was_applied = True


@dataclass(frozen=True)
class EncodedUpdate:
    """The parts of an update, one for each server, in the order of the ranges."""

    parts: Sequence[EncodedPart]
