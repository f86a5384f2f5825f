"""The models whose steps are measured: the example's transformer in several sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.checks import Checks
from examples.character_transformer.model import CHARACTERS, CONTEXT, CharacterTransformer


@dataclass(frozen=True)
class Size:
    """A model: the arguments of `CharacterTransformer`. Its batch, in windows, and how many of its steps are timed."""

    width: int
    layers: int
    heads: int
    batch: int
    steps: int

    def model(self) -> CharacterTransformer:
        torch.manual_seed(0)
        return CharacterTransformer(self.width, self.layers, self.heads)

    def shapes(self) -> list[torch.Size]:
        """Those of the parameters."""
        with torch.device("meta"):
            return [each.shape for each in self.model().parameters()]

    def parameters(self) -> int:
        """P."""
        return sum(shape.numel() for shape in self.shapes())


_SIZES = {"1M": Size(208, 2, 4, 128, 20), "25M": Size(512, 8, 8, 256, 8), "126M": Size(1024, 10, 16, 256, 4)}
_QUICK = {"13k": Size(24, 1, 2, 2, 4), "165k": Size(64, 3, 2, 2, 4)}


def sizes(checks: Checks) -> Mapping[str, Size]:
    """The sizes to measure, by P."""
    return _QUICK if checks.quick else _SIZES


class Trainee:
    """A model on a device, with one batch, in mixed precision."""

    def __init__(self, size: Size, device: str) -> None:
        self.model, self._device = size.model().to(device), device
        self._inputs, self._targets = torch.randint(0, len(CHARACTERS), (2, size.batch, CONTEXT), device=device)

    def backward(self) -> Tensor:
        """Computes the gradient. Returns the loss."""
        self.model.zero_grad()
        with torch.autocast(self._device, torch.bfloat16):
            loss = functional.cross_entropy(self.model(self._inputs).flatten(0, 1), self._targets.flatten())
        loss.backward()
        return loss
