"""Shared memory between the server and one worker on the same machine: tensors pass through it without a copy.

The memory is an anonymous file (memfd): it leaves no file behind, and the kernel frees it when the last of the two processes
unmaps it or dies. The server seals its size before it hands the region over. A worker could otherwise shrink it, and the
server would crash at its next access.

    byte 0       nonce: a process that can name it sees the same memory
    byte 4,096   gradient, float32, written by the worker, read by the server
    next page    theta, float32: the θ for the next gradient, written by the server before it replies
"""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np

from gem_api.layout import Vector

NONCE_BYTES = 16
_PAGE = 4096
_ITEM = 4


class Region:
    """A mapped region; unmapped when the last array on it is freed.

    Attributes:
        nbytes: Bytes of the whole region.
        nonce: NONCE_BYTES random bytes.
        gradient: float32, shape (P,).
        theta: float32, shape (P,).
    """

    def __init__(self, memory: mmap.mmap, parameters: int) -> None:
        self.nbytes = region_bytes(parameters)
        self.nonce = memory[:NONCE_BYTES]
        self.gradient: Vector = np.frombuffer(memory, "<f4", parameters, _PAGE)
        self.theta: Vector = np.frombuffer(memory, "<f4", parameters, _PAGE + _pages(parameters))


def region_bytes(parameters: int) -> int:
    """Bytes of a region for P parameters."""
    return _PAGE + 2 * _pages(parameters)


def create_region(parameters: int) -> tuple[Region, int]:
    """Creates a region for P parameters. Returns it and its file descriptor, to be handed over and then closed.

    Allocates all memory at once, so that a lack of memory raises an error here instead of a signal during a commit.

    Raises:
        OSError: The memory is not available, or the system is not Linux.
    """
    size = region_bytes(parameters)
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    import fcntl  # not on Windows, where workers run too

    descriptor = os.memfd_create("gem-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = _map(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    memory[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
    return Region(memory, parameters), descriptor


def attach_region(descriptor: int, parameters: int) -> Region:
    """Maps a region from its file descriptor. Raises OSError if its size is not that of a region for P parameters."""
    size = region_bytes(parameters)
    held = os.fstat(descriptor).st_size
    if held != size:
        raise OSError(f"the region has {held} bytes, but {parameters} parameters need {size}")
    return Region(_map(descriptor, size), parameters)


def open_again(descriptor: int) -> int:
    """Opens a region a second time, so that `held_elsewhere` can detect this descriptor.

    Raises:
        BlockingIOError: A process has leased the file (F_SETLEASE). To wait for that process would take 45 s.
        OSError: The system has no /proc.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


def held_elsewhere(descriptor: int) -> bool:
    """Whether a process that got `open_again(descriptor)` still maps the region or has it open.

    The kernel grants a write lease only if the file has no other opener. The original descriptor and its mappings do
    not count: memfd_create opens no path.

    Raises:
        OSError: The system can't tell.
    """
    import fcntl  # not on Windows, where workers run too

    try:
        probe = open_again(descriptor)
    except BlockingIOError:
        return True
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(probe)  # and the lease ends with it
    return False


def socket_address(text: str) -> str:
    """The address of a Unix socket for Python's socket module, from a path or "@NAME" (abstract namespace)."""
    return "\0" + text[1:] if text.startswith("@") else text


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Populated now: otherwise the first commit would cause a fault at every page.
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _pages(parameters: int) -> int:
    return -(-parameters * _ITEM // _PAGE) * _PAGE
