"""A region of memory that the server and one worker on its machine both map: tensors pass by reference in it.

The memory is an anonymous file (memfd): it has no name that could be left behind, and is gone when the last of the two
processes unmaps it or dies, however it dies. It is sealed before it is handed over, so that no worker can shrink it
under the server, whose next access would then end the server.

    byte 0       nonce: naming it proves that one sees this very memory
    byte 4,096   gradient, float32, written by the worker, read by the server
    next page    answer, float32: the θ for the next gradient, written by the server before it answers
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
    """Mapped memory; unmapped when the last array over it is gone.

    Attributes:
        nbytes: Bytes of the whole region.
        nonce: NONCE_BYTES random bytes.
        gradient: float32, shape (P,).
        answer: float32, shape (P,).
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
    """A new region for P parameters, and the file descriptor to hand over and then to close.

    All of its memory is taken at once: a machine that has too little says so here, not by a signal in mid-commit.

    Raises:
        OSError: The system has no such memory (or is no Linux).
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
    """Maps a region that was handed over. Raises OSError where it has another size than one for P parameters."""
    size = region_bytes(parameters)
    held = os.fstat(descriptor).st_size
    if held != size:
        raise OSError(f"the region has {held} bytes, one for {parameters} parameters has {size}")
    return Region(_map(descriptor, size), parameters)


def open_again(descriptor: int) -> int:
    """Opens a region once more, so that `held_elsewhere` can tell who has it open. Raises OSError where there is no /proc."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def held_elsewhere(descriptor: int) -> bool:
    """Whether somebody who was handed `open_again(descriptor)` still maps the region, or has it open.

    The kernel grants a write lease only to the one opener of a file. Neither the original descriptor nor mappings made
    with it count as openers: memfd_create opens no path.

    Raises:
        OSError: This system can't tell.
    """
    import fcntl  # not on Windows, where workers run too

    probe = open_again(descriptor)
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(probe)  # and the lease ends with it
    return False


def socket_address(text: str) -> str:
    """What the socket module calls the Unix socket at a path, or at "@NAME" in the abstract namespace."""
    return "\0" + text[1:] if text.startswith("@") else text


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Populated now: the first commit would otherwise stop at every page.
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _pages(parameters: int) -> int:
    return -(-parameters * _ITEM // _PAGE) * _PAGE
