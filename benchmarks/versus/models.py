"""The models that every contender trains, with batches that depend on seed, worker and step alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gem_worker.tasks import load_task
from torch import Tensor, nn
from torch.nn import functional

from examples.character_transformer.model import CharacterTransformer
from examples.character_transformer.task import Characters

NOBODY = -100  # a target that counts nothing
_SCORED = 2000  # of MNIST's 10,000 test images: they are scored often
Batch = tuple[Tensor, Tensor]  # inputs and targets


class Problem:
    """A model, its loss, its batches and its held-out data.

    Args:
        training, held_out: Inputs and targets of all samples.
    """

    batch_size = 16
    has_accuracy = True  # whether the share of right answers is what the problem is about
    unit_seconds = 0.25  # of a race: two cores compute the gradients of eight workers in a unit, with time to spare

    def __init__(self, training: Batch, held_out: Batch) -> None:
        self._training, self._held_out, self._size = training, held_out, len(training[0])

    def model(self, seed: int) -> nn.Module:
        """The model with the first value of the seed."""
        torch.manual_seed(seed)
        return self._make()

    def batch(self, seed: int, worker: int, step: int, size: int | None = None) -> Batch:
        """The batch of a worker's step: drawn with replacement from all training data. Of a smaller one, the first samples."""
        drawn = np.random.default_rng([seed, worker, step]).integers(0, self._size, self.batch_size)[:size]
        return self._samples(torch.from_numpy(drawn))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss on a batch."""
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].long().flatten(), ignore_index=NOBODY)

    def score(self, model: nn.Module) -> float:
        """The mean loss on held-out data."""
        return float(self._evaluated(model, lambda: self.loss(model, self._held_out)))

    def accuracy(self, model: nn.Module) -> float | None:
        """The share of right answers on held-out data; None if that is not what the problem is about."""
        if not self.has_accuracy:
            return None
        inputs, targets = self._held_out
        right = self._evaluated(model, lambda: model(inputs).argmax(-1)) == targets
        return float(right[targets != NOBODY].float().mean())

    def _evaluated(self, model: nn.Module, make: Callable[[], Tensor]) -> Tensor:
        """What is made in evaluation mode."""
        training = model.training
        model.eval()
        with torch.no_grad():
            found = make()
        model.train(training)
        return found

    def _make(self) -> nn.Module:
        raise NotImplementedError

    def _samples(self, drawn: Tensor) -> Batch:
        return self._training[0][drawn], self._training[1][drawn]


class Transformer(Problem):
    """The example's character transformer on the source text of Python's standard library. A sample is a window of 32
    characters.

    Args:
        width: 64 for 114,528 parameters, 208 for 1,090,848.
        unit_seconds: See `Problem`.
    """

    has_accuracy = False

    def __init__(self, width: int = 64, unit_seconds: float = 0.25) -> None:
        self._width, self.unit_seconds = width, unit_seconds
        task = Characters(None)
        super().__init__(cast(Batch, task.training_data().tensors), cast(Batch, task.test_data().tensors))

    def _make(self) -> nn.Module:
        return CharacterTransformer(width=self._width)


class Convnet(Problem):
    """The convolutional network of the GEM paper (163,790 parameters) on MNIST."""

    def __init__(self, data: Path | None) -> None:
        self._task: Any = load_task("mnist", data)
        super().__init__(
            (cast(Tensor, self._task.training_data()), torch.empty(0)), _together(self._task.test_data(), torch.arange(_SCORED))
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = self._task.loss(model, batch)
        return loss

    def _make(self) -> nn.Module:
        made: nn.Module = self._task.model()
        return made

    def _samples(self, drawn: Tensor) -> Batch:
        return _together(self._training[0], drawn)


def _together(data: Any, drawn: Tensor) -> Batch:
    images, labels = zip(*data.__getitems__(drawn.tolist()), strict=True)
    return torch.stack(images), torch.stack(labels)


MODELS: Mapping[str, Callable[[Path | None], Problem]] = {
    "transformer": lambda data: Transformer(),
    "large": lambda data: Transformer(208, unit_seconds=1.0),
    "convnet": Convnet,
}
