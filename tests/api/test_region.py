"""Shared memory regions: both sides see the same data, neither can shrink it, and nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
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
def test_each_side_sees_what_the_other_writes(parameters: int) -> None:
    gradient = np.arange(parameters, dtype=np.float32)
    with made(parameters) as (server, worker, _):
        worker.gradient[:] = gradient
        server.theta[:] = -gradient
        np.testing.assert_array_equal(server.gradient, gradient)
        np.testing.assert_array_equal(worker.theta, -gradient)
        assert worker.nonce == server.nonce


@pytest.mark.parametrize("parameters", SIZES)
def test_it_is_laid_out_as_the_contract_says(parameters: int) -> None:
    """Workers in other languages go by training.proto: gradient from byte 4,096, answer from the next multiple of that."""
    with made(parameters) as (server, _, descriptor):
        server.gradient[:] = 1.0
        server.theta[:] = 2.0
        second = PAGE + -(-4 * parameters // PAGE) * PAGE
        ones, twos = np.ones(parameters, "<f4").tobytes(), np.full(parameters, 2, "<f4").tobytes()
        assert os.pread(descriptor, 4 * parameters, PAGE) == ones
        assert os.pread(descriptor, 4 * parameters, second) == twos
        assert os.pread(descriptor, NONCE_BYTES, 0) == server.nonce
        assert os.fstat(descriptor).st_size == region_bytes(parameters) == 2 * second - PAGE


def test_the_arrays_are_what_a_rule_works_on() -> None:
    with made(1025) as (server, worker, _):
        for array in (server.gradient, server.theta, worker.gradient, worker.theta):
            assert array.dtype == np.float32
            assert array.shape == (1025,)
            assert array.flags.writeable
            assert array.flags.c_contiguous
            assert array.ctypes.data % PAGE == 0


def test_a_new_region_holds_nothing_of_another() -> None:
    with made(2000) as (server, _, _):
        server.gradient[:] = 7.0
        server.theta[:] = 7.0
    with made(2000) as (server, _, _):
        assert not server.gradient.any()
        assert not server.theta.any()


def test_every_region_has_a_name_of_its_own() -> None:
    nonces = set()
    for _ in range(50):
        with made(1) as (server, _, _):
            nonces.add(server.nonce)
            assert len(server.nonce) == NONCE_BYTES
    assert len(nonces) == 50


def test_the_servers_name_for_it_stays_whatever_a_worker_writes() -> None:
    with made(1) as (server, _, descriptor):
        before = bytes(server.nonce)
        os.pwrite(descriptor, b"x" * NONCE_BYTES, 0)
        assert server.nonce == before


# -- a worker that pulls it away

FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which older Pythons have no name for
SHRINK_OR_GROW: dict[str, Callable[[int], object]] = {
    "to nothing": lambda descriptor: os.ftruncate(descriptor, 0),
    "by a byte": lambda descriptor: os.ftruncate(descriptor, region_bytes(5000) - 1),
    "by a page more": lambda descriptor: os.ftruncate(descriptor, region_bytes(5000) + PAGE),
    "with fallocate": lambda descriptor: os.posix_fallocate(descriptor, 0, 2 * region_bytes(5000)),
    "by appending": lambda descriptor: os.pwrite(descriptor, b"x", region_bytes(5000)),
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


def test_a_file_that_is_opened_anew_is_sealed_just_as_well() -> None:
    with made(5000) as (server, _, descriptor):
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(again, 0)
        finally:
            os.close(again)
        assert server.gradient.sum() == 0


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
    "an empty file": lambda folder: os.open(folder / "file", os.O_RDWR | os.O_CREAT),
    "a file that can't be written": read_only,
    "a directory": lambda folder: os.open(folder, os.O_RDONLY),
    "/dev/zero": lambda folder: os.open("/dev/zero", os.O_RDWR),
    "a pipe": lambda folder: os.pipe()[0],
    "a socket": lambda folder: socket.socket(socket.AF_UNIX).detach(),
    "an eventfd": lambda folder: os.eventfd(0),
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


def test_it_outlives_the_side_that_drops_it_and_is_gone_with_the_other() -> None:
    server, descriptor = create_region(1025)
    worker, name = attach_region(descriptor, 1025), inode(descriptor)
    os.close(descriptor)
    assert mapped().count(name) == 2
    worker.gradient[:] = 5.0
    del worker
    assert mapped().count(name) == 1
    assert server.gradient.sum() == 5 * 1025
    del server
    assert name not in mapped()
    assert name not in held_open()


def test_an_array_over_it_keeps_it_alone() -> None:
    region, descriptor = create_region(1025)
    name = inode(descriptor)
    os.close(descriptor)
    tail = region.theta[1000:]
    del region
    tail[:] = 1.0
    assert tail.sum() == 25
    assert mapped().count(name) == 1
    del tail
    assert name not in mapped()


def test_a_refused_region_leaves_nothing_mapped() -> None:
    with made(5000) as (_, _, descriptor):
        before = mapped().count(inode(descriptor)), held_open().count(inode(descriptor))
        with pytest.raises(OSError, match=r"."):
            attach_region(descriptor, 1)
        assert (mapped().count(inode(descriptor)), held_open().count(inode(descriptor))) == before


def test_it_has_no_name_in_any_folder() -> None:
    with made(5000) as (_, _, descriptor):
        assert not [name for name in os.listdir("/dev/shm") if "gem" in name]
        assert os.readlink(f"/proc/self/fd/{descriptor}").endswith("(deleted)")


def test_the_descriptor_is_not_inherited_by_processes_that_are_started() -> None:
    with made(1) as (_, _, descriptor):
        assert not os.get_inheritable(descriptor)


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
