"""The file operations that durability depends on: one small class, so that tests can replace it with a disk that fails."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from gem_api.framing import Bytes
from gem_api.process.files import UNSUPPORTED, sync_directory

FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_PIECES = 1000  # for one system call; the lowest limit in use (IOV_MAX) is 1,024


class NoRoom(OSError):
    """The disk has too little room for a file, which needs `nbytes` bytes more."""

    def __init__(self, error: OSError, nbytes: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.nbytes = nbytes


class NewFile(Protocol):
    """A file open for writing, with access for its owner only. All methods raise OSError."""

    def write(self, offset: int, pieces: Sequence[Bytes]) -> None:
        """Writes the pieces one after the other, beginning at byte `offset`."""

    def allocate(self, nbytes: int) -> None:
        """Reserves disk space for the file's first `nbytes` bytes; they read as zeros until written."""

    def sync(self) -> None:
        """Returns once everything written is on the disk (fdatasync). Fails if the file has no name any more: nobody could read
        it back."""

    def close(self) -> None: ...


class Storage:
    """The operating system's files. All methods raise OSError."""

    def create(self, path: Path) -> NewFile:
        """Creates a file. Raises FileExistsError if there is one of that name."""
        return _File(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def reopen(self, path: Path) -> NewFile:
        """Opens an existing file, to overwrite it."""
        return _File(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def make_directories(self, path: Path, mode: int = 0o777) -> None:
        """Makes a folder and its missing parents, unless it exists. Returns once its path is on the disk. All folders above it
        are synced, because another program may have made them a moment ago."""
        if path.is_dir():
            return
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(mode, parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(folder.parent)
        for above in missing[-1].absolute().parent.parents:
            with suppress(OSError):  # a folder that we may not read is not a new one
                self.sync_directory(above)

    def glob(self, path: Path, pattern: str) -> list[Path]:
        """The entries of a folder whose names match the pattern."""
        return list(path.glob(pattern))

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with everything in it. Does nothing if a file does not exist."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free(self, path: Path) -> int:
        """Bytes that are free on the disk of a folder."""
        return shutil.disk_usage(path).free

    def sync_directory(self, path: Path) -> None:
        """Returns once a folder's entries (the names of its files) are on the disk, if its file system can tell. A server warns
        of one that can't."""
        sync_directory(path)


DISK = Storage()


@contextmanager
def write_atomically(storage: Storage, scratch: Path, path: Path) -> Iterator[None]:
    """Makes a file or a folder appear at `path` whole or not at all. The block writes it to `scratch`, and syncs it.

    Afterwards the name `path` is on the disk. If anything raises, nothing is left of it, and what was at `path` stays.
    """
    try:
        yield
        storage.rename(scratch, path)
        storage.sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            storage.remove(scratch)
        raise


class _File:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, offset: int, pieces: Sequence[Bytes]) -> None:
        for begin in range(0, len(pieces), _MAX_PIECES):
            offset = self._write_some(offset, list(pieces[begin : begin + _MAX_PIECES]))

    def _write_some(self, offset: int, pieces: list[Bytes]) -> int:
        while pieces:
            written = os.pwritev(self._descriptor, pieces, offset)
            offset += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if written:
                pieces[0] = memoryview(pieces[0])[written:]
        return offset

    def allocate(self, nbytes: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            os.ftruncate(self._descriptor, nbytes)  # it reserves nothing: a write may find the disk full

    def sync(self) -> None:
        if hasattr(os, "fdatasync"):
            os.fdatasync(self._descriptor)
        else:
            os.fsync(self._descriptor)
        if os.fstat(self._descriptor).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or replaced while the server wrote to it")

    def close(self) -> None:
        os.close(self._descriptor)
