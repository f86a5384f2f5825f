"""Local data and the server's order of samples, for the `setup.diff` of the programs. Import it before torchvision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gem_server.core.shuffle import shuffled
from gem_worker.tasks.mnist import read_idx
from torch import Tensor
from torch.utils.data import Sampler, TensorDataset

SEED = int(os.environ.get("PORTED_SEED", "0"))  # another one in each worker
RUN_SEED = SEED % 1000  # the same in all workers of a run

for _operator in ("nms", "qnms"):  # torchvision's build for GPUs needs them, and defines them only there
    with suppress(RuntimeError):
        torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if os.environ.get("PORTED_NOISE"):  # the program alone, from parameters that one rounding has moved
    _make = torch.optim.Optimizer.__init__

    def _make_noisy(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        _make(self, params, defaults)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 + 2**-23)

    torch.optim.Optimizer.__init__ = _make_noisy  # type: ignore[method-assign]


def mnist(train: bool, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` images of MNIST, in bytes of shape (count, 28, 28), and their labels."""
    folder, name = Path(os.environ["PORTED_DATA"]), "train" if train else "t10k"
    images = read_idx(folder, f"{name}-images-idx3-ubyte", 3)[:count]
    labels = read_idx(folder, f"{name}-labels-idx1-ubyte", 1)[:count]
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.copy()).long()


def mnist_set(train: bool, count: int, mean: float = 0.0, deviation: float = 1.0) -> TensorDataset:
    """The same as a data set, in fp32 of shape (1, 28, 28), scaled to 0 to 1 and then normalised."""
    images, labels = mnist(train, count)
    return TensorDataset((images[:, None].float() / 255 - mean) / deviation, labels)


class Dealt(Sampler[list[int]]):
    """The batches that a server deals to its only worker, epoch after epoch: a `batch_sampler` of a DataLoader.

    Args:
        samples: Number of samples of the training set.
        batch_size: Samples of a batch: the `--batch-size` of the server, whose shards are then a multiple of it.
    """

    def __init__(self, samples: int, batch_size: int) -> None:
        self._samples, self._batch_size = samples, batch_size
        self._epoch = 0

    def __len__(self) -> int:
        return len(range(0, self._samples, self._batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = [int(index) for index in shuffled(0, self._samples, self._samples, RUN_SEED, self._epoch, "")]
        self._epoch += 1
        for begin in range(0, self._samples, self._batch_size):
            yield order[begin : begin + self._batch_size]


def write_citations(folder: str, nodes: int = 1800, words: int = 200, classes: int = 7) -> None:
    """Writes a graph in the format of Cora: papers have words and cite each other, both in part because of their class."""
    random = np.random.default_rng(0)
    labels = random.integers(classes, size=nodes)
    likely = 0.03 + 0.12 * (random.integers(classes, size=words) == labels[:, None])
    has_word = random.random((nodes, words)) < likely
    has_word[:, 0] = True
    cites = np.triu(random.random((nodes, nodes)) < 0.0005 + 0.006 * (labels == labels[:, None]), 1)
    Path(folder).mkdir(exist_ok=True)
    lines = (" ".join(map(str, [node, *has_word[node].astype(int), labels[node]])) for node in range(nodes))
    Path(folder, "cora.content").write_text("\n".join(lines), encoding="utf-8")
    Path(folder, "cora.cites").write_text("\n".join(f"{one} {other}" for one, other in np.argwhere(cites)), encoding="utf-8")


def frechet(real: Tensor, generated: Tensor) -> float:
    """Fréchet distance of two sets of images, as normal distributions of their pixels in a grid of 7 by 7."""
    grids = [torch.nn.functional.adaptive_avg_pool2d(each.detach().double(), 7).flatten(1) for each in (real, generated)]
    means, covariances = [each.mean(0) for each in grids], [torch.cov(each.T) for each in grids]
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    return float((means[0] - means[1]).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * root)


def probe(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Accuracy of a linear classifier on features."""
    from sklearn.linear_model import LogisticRegression

    return float(LogisticRegression(max_iter=200).fit(train.numpy(), labels).score(test.numpy(), test_labels))


def blobs(count: int, size: int = 48) -> list[dict[str, Tensor]]:
    """Noisy images of some discs, of shape (3, size, size), and where the discs are."""
    random = np.random.default_rng(0)
    grid, samples = np.mgrid[:size, :size], []
    for _ in range(count):
        mask = np.zeros((size, size), dtype=np.int64)
        for y, x, radius in random.uniform([0, 0, 4], [size, size, 12], (3, 3)):
            mask |= (grid[0] - y) ** 2 + (grid[1] - x) ** 2 < radius**2
        image = 0.3 * mask + random.normal(0.4, 0.25, (3, size, size))
        samples.append({"image": torch.from_numpy(image).float(), "mask": torch.from_numpy(mask)})
    return samples
