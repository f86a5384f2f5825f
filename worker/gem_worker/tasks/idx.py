"""Reads IDX files, the format of MNIST: a magic number, the shape, then the bytes (LeCun et al., "The MNIST database")."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gem_worker.tasks.base import TaskError

_UNSIGNED_BYTE = 0x08


def read_idx(directory: Path, name: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in the file `name`, or `name`.gz, of a directory: uint8, with `dimensions` dimensions.

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
