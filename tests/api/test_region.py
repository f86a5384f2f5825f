"""Shared memory regions: both sides see the same data, neither can shrink it, and nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gem_api.region import NONCE_BYTES, Region, attach_region, create_region, region_bytes, socket_address
from kit.regions import PAGE, held_open, linux_only, mapped

pytestmark = linux_only
# Around a page (1,024 elements), around two, and one element, which is far less.
SIZES = [1, 2, 1023, 1024, 1025, 2048, 2049, 100_003]


@contextmanager
def made(parameters: int) -> Iterator[tuple[Region, Region, int]]:
    """The server's side of a region, the worker's side, and the descriptor that was handed over."""
    region, descriptor = create_region(parameters)
    try:
        yield region, attach_region(descriptor, parameters), descriptor
    finally:
        os.close(descriptor)


# -- what both see


@pytest.mark.parametrize("parameters", SIZES)
def test_both_sides_see_it_as_the_contract_lays_it_out(parameters: int) -> None:
    """Workers in other languages go by training.proto: gradient from byte 4,096, answer from the next multiple of that."""
    gradient = np.arange(parameters, dtype="<f4")
    with made(parameters) as (server, worker, descriptor):
        worker.gradient[:] = gradient
        server.theta[:] = -gradient
        np.testing.assert_array_equal(server.gradient, gradient)
        np.testing.assert_array_equal(worker.theta, -gradient)
        second = PAGE + -(-4 * parameters // PAGE) * PAGE
        assert os.pread(descriptor, 4 * parameters, PAGE) == gradient.tobytes()
        assert os.pread(descriptor, 4 * parameters, second) == (-gradient).tobytes()
        assert os.pread(descriptor, NONCE_BYTES, 0) == worker.nonce == server.nonce
        assert os.fstat(descriptor).st_size == region_bytes(parameters) == 2 * second - PAGE


def test_it_has_a_nonce_of_its_own_that_stays_whatever_a_worker_writes_and_no_name_in_any_folder() -> None:
    with made(1) as (server, _, descriptor), made(1) as (other, _, _):
        before = bytes(server.nonce)
        assert len(before) == NONCE_BYTES
        assert before != other.nonce
        os.pwrite(descriptor, b"x" * NONCE_BYTES, 0)
        assert server.nonce == before
        assert os.readlink(f"/proc/self/fd/{descriptor}").endswith("(deleted)")
        assert not os.get_inheritable(descriptor)


# -- a worker that pulls it away

FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which older Pythons have no name for
SHRINK_OR_GROW: dict[str, Callable[[int], object]] = {
    "to nothing": lambda descriptor: os.ftruncate(descriptor, 0),
    "by a byte": lambda descriptor: os.ftruncate(descriptor, region_bytes(5000) - 1),
    "by a page more": lambda descriptor: os.ftruncate(descriptor, region_bytes(5000) + PAGE),
    "with fallocate": lambda descriptor: os.posix_fallocate(descriptor, 0, 2 * region_bytes(5000)),
    "by appending": lambda descriptor: os.pwrite(descriptor, b"x", region_bytes(5000)),
    "opened anew": lambda descriptor: Path(f"/proc/self/fd/{descriptor}").write_bytes(b""),
    "with a seal of its own": lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FUTURE_WRITE),
}


@pytest.mark.parametrize("how", SHRINK_OR_GROW)
def test_a_worker_can_not_change_its_size_and_the_server_still_reads_all_of_it(how: str) -> None:
    with made(5000) as (server, worker, descriptor):
        worker.gradient[:] = 3.0
        with pytest.raises(OSError, match=r"."):
            SHRINK_OR_GROW[how](descriptor)
        assert os.fstat(descriptor).st_size == region_bytes(5000)
        assert server.gradient.sum() == 15_000
        server.theta[:] = 1.0


# -- what is no region


@pytest.mark.parametrize("size", [0, 1, 2 * PAGE, 3 * PAGE - 1, 3 * PAGE + 1, 4 * PAGE])
def test_a_file_that_was_shrunk_or_grown_is_refused(size: int) -> None:
    descriptor = os.memfd_create("unsealed")
    try:
        os.ftruncate(descriptor, 3 * PAGE)
        attach_region(descriptor, 1)  # the right size is taken
        os.ftruncate(descriptor, size)
        with pytest.raises(OSError, match=str(size)):
            attach_region(descriptor, 1)
    finally:
        os.close(descriptor)


def read_only(folder: Path) -> int:
    (folder / "file").write_bytes(bytes(region_bytes(1)))
    return os.open(folder / "file", os.O_RDONLY)


OTHER_KINDS: dict[str, Callable[[Path], int]] = {
    "a file that can't be written": read_only,
    "a directory": lambda folder: os.open(folder, os.O_RDONLY),
    "a pipe": lambda folder: os.pipe()[0],
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_descriptor_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    descriptor = OTHER_KINDS[kind](tmp_path)
    try:
        with pytest.raises(OSError, match=r"."):
            attach_region(descriptor, 1)
    finally:
        os.close(descriptor)


# -- what is left behind


def inode(descriptor: int) -> str:
    return str(os.fstat(descriptor).st_ino)


def test_it_outlives_the_side_that_drops_it_and_is_gone_with_the_last_array_over_it() -> None:
    server, descriptor = create_region(1025)
    worker, name = attach_region(descriptor, 1025), inode(descriptor)
    os.close(descriptor)
    assert mapped().count(name) == 2
    worker.gradient[:] = 5.0
    del worker
    assert mapped().count(name) == 1
    tail = server.gradient[1000:]
    del server
    assert tail.sum() == 5 * 25
    assert mapped().count(name) == 1
    del tail
    assert name not in mapped()
    assert name not in held_open()


def test_a_refused_region_leaves_nothing_mapped() -> None:
    with made(5000) as (_, _, descriptor):
        before = mapped().count(inode(descriptor)), held_open().count(inode(descriptor))
        with pytest.raises(OSError, match=r"."):
            attach_region(descriptor, 1)
        assert (mapped().count(inode(descriptor)), held_open().count(inode(descriptor))) == before


# -- a system that has none


def test_a_system_without_anonymous_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="memfd_create"):
        create_region(1)


def test_memory_that_can_not_be_had_is_an_error_and_leaves_no_file_open() -> None:
    before = set(held_open())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(OSError, match=r"."):
            create_region(5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(held_open()) <= before


def test_a_socket_is_named_by_its_path_or_in_the_abstract_namespace() -> None:
    assert socket_address("/run/gem/memory") == "/run/gem/memory"
    assert socket_address("@gem-1") == "\0gem-1"
