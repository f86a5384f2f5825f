"""Encodes gradients for the network where they are computed: fewer bytes then go to the host, which converts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from gem_api.wire import INT8, Format
from torch import Tensor

from gem_client.run.encoded import EncodedPart, EncodedUpdate

SMALLEST = 2.0**-119  # a block below this would need a subnormal scale
MAX = torch.finfo(torch.float32).max
STEP = 1 << 24  # elements at a time, so that what is computed in between takes some hundred MB at most


class DeviceEncoder:
    """Encodes a flat gradient on its device, into the bytes that `gem_api.wire` makes on the host.

    The error of int8 is fed back as `gem_api.wire.FeedbackEncoder` does: once a server has applied its part of an update, what
    that has rounded off is added to the next. Until then the flat gradient holds it. The residual takes 4·P bytes.

    Args:
        form: The format: bfloat16 or int8.
        gradient: The flat gradient: float32, shape (P,).

    Attributes:
        data: The bytes of the last update, on the device: uint8.
    """

    def __init__(self, form: Format, gradient: Tensor) -> None:
        self._form, self._gradient = form, gradient
        self._parts: Sequence[slice] = ()
        self._sent: Sequence[EncodedPart] = ()
        self._residual = self.data = torch.empty(0, dtype=torch.uint8, device=gradient.device)

    def encode(self, parts: Sequence[slice]) -> Tensor:
        """Encodes the gradient, one part of θ after the other, into `data`. Changes the gradient."""
        if parts != self._parts:
            self._parts = parts
            self.data = torch.empty(self._ends[-1], dtype=torch.uint8, device=self._gradient.device)
            self._residual = torch.zeros_like(self._gradient) if self._form is INT8 else self._residual
        for part, (begin, end) in zip(parts, pairwise(self._ends), strict=True):
            if self._form is INT8:
                encode_blocks(self._gradient[part], self._residual[part], INT8.packing.elements, self.data[begin:end])
            else:
                self.data[begin:end].view(torch.bfloat16).copy_(self._gradient[part])
        return self.data

    def update(self, data: npt.NDArray[np.uint8]) -> EncodedUpdate:
        """The update whose bytes have come to the host."""
        self._sent = [EncodedPart(self._form, data[begin:end]) for begin, end in pairwise(self._ends)]
        return EncodedUpdate(self._sent)

    def settle(self) -> None:
        """Keeps what the last update has rounded off, if it was applied. Call it before the gradient is overwritten."""
        for part, sent in zip(self._parts, self._sent, strict=False):
            if sent.was_applied and self._form is INT8:
                self._residual[part].copy_(self._gradient[part])
        self._sent = ()

    @property
    def _ends(self) -> list[int]:
        """Where the bytes of each part end, after a 0."""
        return list(accumulate((self._form.nbytes(part.stop - part.start) for part in self._parts), initial=0))


def encode_blocks(gradient: Tensor, residual: Tensor, elements: int, out: Tensor) -> None:
    """Does what `gem_api.conversions.encode_blocks` does, with the same bits, on any device.

    Args:
        gradient: g: float32, shape (n,). Holds e + g minus the decoded bytes afterwards.
        residual: e: float32, shape (n,).
        elements: Elements in a block.
        out: uint8, shape (n + 4·ceil(n / elements),): receives the bytes.
    """
    step, whole, block = STEP // elements * elements, len(gradient) // elements * elements, 4 + elements
    for begin in range(0, whole, step):
        end = min(begin + step, whole)
        blocks = out[begin // elements * block : end // elements * block].view(-1, block)
        _encode(gradient[begin:end].view(-1, elements), residual[begin:end].view(-1, elements), blocks)
    if whole < len(gradient):
        _encode(gradient[whole:].view(1, -1), residual[whole:].view(1, -1), out[whole // elements * block :].view(1, -1))


def _encode(sums: Tensor, residual: Tensor, out: Tensor) -> None:
    """Encodes blocks: `sums` and `residual` (float32, shape (blocks, elements)), `out` (uint8, shape (blocks, 4 + elements)).

    Each operation rounds as the host's does. It divides by tensors: for a number, PyTorch may multiply by its reciprocal."""
    sums.add_(residual)
    largest = sums.abs().amax(dim=1, keepdim=True)  # or a NaN
    most = torch.full_like(largest, 127)
    fits = (largest >= SMALLEST) & (largest <= MAX)
    scale, inverse = torch.where(fits, largest / most, 0), torch.where(fits, most / largest, 0)
    quanta = (sums * inverse).round_().masked_fill_(~fits, 0)
    out[:, 4:].view(torch.int8).copy_(quanta)
    sums.sub_(quanta.mul_(scale))
    out[:, :4].copy_(torch.where(fits | (largest < SMALLEST), scale, torch.nan).view(torch.uint8))
