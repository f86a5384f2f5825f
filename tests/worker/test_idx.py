"""MNIST's file format: complete files are read, anything else is rejected with the file's name."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gem_worker.tasks import TaskError
from gem_worker.tasks.mnist import Mnist, read_idx

LABELS = np.array([7, 2, 1], np.uint8)
IMAGES = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    """An array as an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 0x08, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, images: npt.NDArray[np.uint8] = IMAGES, labels: npt.NDArray[np.uint8] = LABELS) -> Path:
    """A tiny MNIST: the same images and labels for training and test."""
    for prefix in ("train", "t10k"):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def test_a_file_is_read_plain_or_gzipped_and_the_plain_one_if_both_are_there(tmp_path: Path) -> None:
    for array in (LABELS, IMAGES):
        (tmp_path / "data.gz").write_bytes(gzip.compress(idx(array)))
        np.testing.assert_array_equal(read_idx(tmp_path, "data", array.ndim), array)
    (tmp_path / "data").write_bytes(idx(LABELS))
    np.testing.assert_array_equal(read_idx(tmp_path, "data", 1), LABELS)


DAMAGED = {
    "empty": b"",
    "shorter than a magic number": b"\0\0",
    "header cut short": idx(LABELS)[:6],
    "truncated": idx(LABELS)[:-1],
    "too long": idx(LABELS) + b"\0",
    "wrong magic": b"\x89PNG" + idx(LABELS)[4:],
    "signed bytes": idx(LABELS).replace(b"\x08", b"\x09", 1),
    "other dimension": idx(IMAGES),
    "extents beyond all files": struct.pack(">4BI", 0, 0, 8, 1, 2**32 - 1) + LABELS.tobytes(),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    for file, written in ((tmp_path / "data.gz", gzip.compress(content)), (tmp_path / "data", content)):
        file.write_bytes(written)
        with pytest.raises(TaskError, match=re.escape(str(file))):
            read_idx(tmp_path, "data", 1)


def test_extents_whose_product_leaves_64_bits_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2**22, 2**21, 2**21))
    with pytest.raises(TaskError, match="data"):
        read_idx(tmp_path, "data", 3)


DAMAGED_GZIP = {
    "no gzip": b"this is no gzip file",
    "cut short": gzip.compress(idx(IMAGES))[:-9],
    "header only": gzip.compress(idx(IMAGES))[:10],
    "wrong checksum": gzip.compress(idx(IMAGES))[:-8] + b"\0" * 8,
    "damaged inside": gzip.compress(idx(IMAGES))[:12] + b"\xff" * 30 + gzip.compress(idx(IMAGES))[42:],
}


@pytest.mark.parametrize("content", DAMAGED_GZIP.values(), ids=DAMAGED_GZIP.keys())
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.gz").write_bytes(content)
    with pytest.raises(TaskError, match=r"data\.gz"):
        read_idx(tmp_path, "data", 3)


def test_mnist_reads_four_files(tmp_path: Path) -> None:
    task = Mnist(write_mnist(tmp_path))
    image, label = task.training_data()[1]
    assert (len(task.training_data()), len(task.test_data()), tuple(image.shape), int(label)) == (3, 3, (1, 28, 28), 2)
    np.testing.assert_allclose(image[0].numpy(), (IMAGES[1].astype(np.float32) - 33.3) / 78.6, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_mnist_names_the_file_that_is_missing_and_its_folder(tmp_path: Path, name: str) -> None:
    (write_mnist(tmp_path) / name).unlink()
    with pytest.raises(TaskError, match=name) as caught:
        Mnist(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_mnist_refuses_more_labels_than_images_and_names_them(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(4, np.uint8)))
    with pytest.raises(TaskError, match="t10k") as caught:
        Mnist(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"images": np.zeros((3, 8, 8), np.uint8)}, {"labels": np.array([7, 10, 1], np.uint8)}], ids=["size", "no digit"]
)
def test_mnist_refuses_images_of_another_size_and_labels_that_are_no_digits(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write_mnist(tmp_path, **wrong)
    with pytest.raises(TaskError, match="train"):
        Mnist(tmp_path)


def test_mnist_without_a_folder_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="--data"):
        Mnist(None)
    with pytest.raises(TaskError, match="no-such-folder"):
        Mnist(tmp_path / "no-such-folder")
