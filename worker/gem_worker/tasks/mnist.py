"""The MNIST task, read from its four IDX files (LeCun et al., "The MNIST database")."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gem_worker.tasks.base import TaskError
from gem_worker.tasks.convnet import Classification, Images

_UNSIGNED_BYTE = 0x08
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


def read_idx(directory: Path, name: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """Reads an IDX file: a magic number, the shape, then the bytes.

    It is the file `name`, or `name`.gz, of a directory. The array is uint8, with `dimensions` dimensions.

    Raises:
        TaskError: The file is missing, can't be unpacked, is not an IDX file of unsigned bytes with that number of
            dimensions, or is shorter or longer than its header says.
    """
    path = _find(directory, name)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"{path} can't be read: {error}") from error
    expected = _UNSIGNED_BYTE << 8 | dimensions
    header = 4 + 4 * dimensions
    magic = int.from_bytes(data[:4], "big")
    if len(data) < header or magic != expected:
        raise TaskError(f"{path} begins with the magic number 0x{magic:08x}; an IDX file of this kind has 0x{expected:08x}")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    size = header + math.prod(shape)
    if len(data) != size:
        raise TaskError(f"{path} has {len(data)} bytes, but its header says {size}: the file is truncated or damaged")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise TaskError(f"{directory} has neither {name} nor {name}.gz: give --data the folder of MNIST's four IDX files")
