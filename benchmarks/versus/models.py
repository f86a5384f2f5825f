"""The two models that every contender trains, with batches that depend on seed, worker and step alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gem_worker.tasks import load_task
from torch import Tensor, nn

from examples.character_transformer.model import CharacterTransformer
from examples.character_transformer.task import Characters

_SCORED = 2000  # of MNIST's 10,000 test images: they are scored often


class Problem:
    """A model, its loss, its batches and its held-out data."""

    batch_size: int

    def model(self, seed: int) -> nn.Module:
        """The model with the first value of the seed."""
        torch.manual_seed(seed)
        return self._make()

    def batch(self, seed: int, worker: int, step: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        """The batch of a worker's step: drawn with replacement from all training data. Of a smaller one, the first samples."""
        drawn = np.random.default_rng([seed, worker, step]).integers(0, self._size, self.batch_size)[:size]
        return self._samples(torch.from_numpy(drawn))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss on a batch."""
        raise NotImplementedError

    def score(self, model: nn.Module) -> float:
        """The mean loss on held-out data, in evaluation mode."""
        training = model.training
        model.eval()
        with torch.no_grad():
            loss = float(self.loss(model, self._held_out))
        model.train(training)
        return loss

    def accuracy(self, model: nn.Module) -> float | None:
        """The share of right answers on held-out data; None if that is not what the problem is about."""
        return None

    _size: int
    _held_out: tuple[Tensor, Tensor]

    def _make(self) -> nn.Module:
        raise NotImplementedError

    def _samples(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Transformer(Problem):
    """The example's character transformer with 114,528 parameters, on the source text of Python's standard library. 16 windows
    of 32 characters a batch."""

    batch_size = 16

    def __init__(self, data: Path | None = None) -> None:
        self._task = Characters(data)
        self._inputs, self._targets = self._task.training_data().tensors
        self._size = len(self._inputs)
        inputs, targets = self._task.test_data().tensors
        self._held_out = inputs, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._task.loss(model, batch)

    def _make(self) -> nn.Module:
        return CharacterTransformer(width=64)

    def _samples(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        return self._inputs[drawn], self._targets[drawn]


class Convnet(Problem):
    """The convolutional network of the GEM paper (163,790 parameters) on MNIST. 16 images a batch."""

    batch_size = 16

    def __init__(self, data: Path | None) -> None:
        self._task = cast(Any, load_task("mnist", data))
        self._images = self._task.training_data()
        self._size = len(self._images)
        self._held_out = _together(self._task.test_data(), torch.arange(_SCORED))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self._task.loss(model, batch)
        return loss

    def accuracy(self, model: nn.Module) -> float | None:
        training = model.training
        model.eval()
        with torch.no_grad():
            right = model(self._held_out[0]).argmax(1) == self._held_out[1]
        model.train(training)
        return float(right.float().mean())

    def _make(self) -> nn.Module:
        made: nn.Module = self._task.model()
        return made

    def _samples(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        return _together(self._images, drawn)


def _together(data: Any, drawn: Tensor) -> tuple[Tensor, Tensor]:
    images, labels = zip(*data.__getitems__(drawn.tolist()), strict=True)
    return torch.stack(images), torch.stack(labels)


@dataclass(frozen=True)
class Goal:
    """What a model is trained with, and the held-out losses that time is measured to.

    Attributes:
        make: Makes the problem; its argument is the folder of MNIST's files.
        optimizer: "adamw" or "sgd": what a user would take for the model.
        losses: The two losses, the higher one first.
    """

    make: Callable[[Path | None], Problem]
    optimizer: str
    losses: tuple[float, float]


GOALS: Mapping[str, Goal] = {
    "transformer": Goal(lambda data: Transformer(), "adamw", (2.5, 2.3)),
    "convnet": Goal(Convnet, "sgd", (0.3, 0.15)),
}
