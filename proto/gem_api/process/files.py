"""Locks and syncs on any file system, and what to do about an error of the system."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO, Any

UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # of a file system that lacks a call
# The process or its machine lacks something: it says nothing about the file or the peer that was asked for.
OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EADDRNOTAVAIL)
_ADVICE = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space, or get a larger quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or use a file system that allows larger files",
    errno.EROFS: "mount the file system so that it can be written",
    errno.EACCES: "let this user read and write there",
    errno.EPERM: "let this user read and write there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOMEM: "free memory on this machine",
    errno.ESTALE: "mount the network's file system again",
    errno.EIO: "check the disk",
}


def advice(error: BaseException | None, otherwise: str = "") -> str:
    """Advice on an error of the system; `otherwise` if nothing is known of it."""
    return _ADVICE.get(getattr(error, "errno", None) or 0, otherwise)


def lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Locks a file until it is closed. Returns False if another process has locked it.

    Raises:
        OSError: The file can't be locked, as on a file system without locks. Whether another process uses it is not known.
        ImportError: The system has no such locks.
    """
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_directory(path: Path) -> bool:
    """Returns once a folder's entries (the names of its files) are on the disk. Returns False if its file system can't say so.
    Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    finally:
        os.close(handle)
    return True
