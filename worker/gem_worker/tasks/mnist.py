"""The MNIST task, read from its four IDX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gem_worker.tasks.base import TaskError
from gem_worker.tasks.convnet import Classification, Images
from gem_worker.tasks.idx import read_idx

_MEAN, _DEVIATION = 33.3, 78.6  # of the training images' bytes


class Mnist(Classification):
    """60,000 training and 10,000 test images (LeCun, Cortes & Burges).

    Args:
        data: The folder with train-images-idx3-ubyte and its three companions, plain or gzipped.

    Raises:
        TaskError: `data` is not a folder, or a file in it is missing or damaged.
    """

    def __init__(self, data: Path | None) -> None:
        if data is None:
            raise TaskError("task mnist needs --data: the folder of MNIST's four IDX files")
        if not data.is_dir():
            raise TaskError(f"--data {data} is not a folder: give the folder of MNIST's four IDX files")
        self._training = _images(data, "train")
        self._test = _images(data, "t10k")

    def training_data(self) -> Images:
        return self._training

    def test_data(self) -> Images:
        return self._test


def _images(directory: Path, prefix: str) -> Images:
    greys = read_idx(directory, f"{prefix}-images-idx3-ubyte", 3)
    labels = read_idx(directory, f"{prefix}-labels-idx1-ubyte", 1)
    if greys.shape[1:] != (28, 28) or len(greys) != len(labels):
        raise TaskError(f"{directory}: {greys.shape} images and {labels.shape} labels under {prefix!r} do not match")
    if labels.size and labels.max() > 9:
        raise TaskError(f"{directory}: a label under {prefix!r} is {labels.max()}, but MNIST's labels are 0 to 9")
    images = torch.from_numpy(greys.copy())[:, None]
    return Images(images, torch.from_numpy(labels.astype(np.int64)), _MEAN, _DEVIATION)
