"""The 1,797 handwritten digits that come with scikit-learn: real data that needs no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gem_api.process.extras import install
from torch.nn import functional

from gem_worker.tasks.base import TaskError
from gem_worker.tasks.convnet import Classification, Images

TEST_SHARE = 0.2
_SPLIT_SEED = 0  # the same split in every run, so that accuracies compare


class Digits(Classification):
    """Optical digits (Alpaydin & Kaynak 1998, UCI), 8×8 greys scaled up to 28×28; every fifth sample is held out.

    Args:
        data: Not used; the data is embedded.
    """

    def __init__(self, data: Path | None) -> None:
        greys, targets = _read()
        small = torch.from_numpy(greys.reshape(-1, 8, 8) / 16)[:, None]
        images = functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
        labels = torch.from_numpy(targets)
        order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(len(labels)))
        test, training = order[: int(TEST_SHARE * len(order))], order[int(TEST_SHARE * len(order)) :]
        mean, deviation = float(images.mean()), float(images.std())
        self._training = Images(images[training], labels[training], mean, deviation)
        self._test = Images(images[test], labels[test], mean, deviation)

    def training_data(self) -> Images:
        return self._training

    def test_data(self) -> Images:
        return self._test


def _read() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Greys from 0 to 16, shape (1797, 64), and digits, shape (1797,). Raises TaskError without scikit-learn.

    From the file in scikit-learn's folder: importing the package would take each worker 50 MB and a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise TaskError(f'task "digits" needs scikit-learn: {install("demo")}')
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.float32)
    return table[:, :64], table[:, 64].astype(np.int64)
