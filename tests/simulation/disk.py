"""A simulated disk that can fail: bytes that were not synced may be lost, in part or all, when the power fails. It can be full.

Files are really there, in a folder of the test's, so that the code under test reads them as ever. Beside them the disk
keeps what has reached the platter; a power failure leaves that, and a random part of the rest.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gem_api.framing import Bytes
from gem_server.durability.storage import Storage

SECTOR = 16  # bytes that reach the platter together; small, so that small records are torn


class PowerFailure(Exception):
    """The machine lost power in the middle of an operation."""


@dataclass
class Content:
    """A file's bytes: those on the platter, those not there yet, and its allocated length."""

    platter: bytearray = field(default_factory=bytearray)
    cached: list[tuple[int, bytes]] = field(default_factory=list)

    def size(self) -> int:
        return max([len(self.platter), *(at + len(data) for at, data in self.cached)])

    def sync(self) -> None:
        for at, data in self.cached:
            _put(self.platter, at, data)
        self.cached.clear()

    def after_failure(self, random: Random) -> bytes:
        """The bytes on the platter, and some sectors that were not synced."""
        image = bytearray(self.platter)
        for at, data in self.cached:
            for begin in range(0, len(data), SECTOR):
                if random.random() < 0.5:
                    _put(image, at + begin, data[begin : begin + SECTOR])
        return bytes(image)


class SimulatedDisk(Storage):
    """A folder on a disk of limited size.

    Args:
        root: The folder.
        random: Decides what a power failure leaves.

    Attributes:
        capacity: Bytes that its files may have together; None for no limit.
        fails_in: Operations until the power fails; None for never.
        sick: Whether folders may fail to be made, listed or removed: now and then, until the next start.
    """

    def __init__(self, root: Path, random: Random) -> None:
        self.root = root
        self.capacity: int | None = None
        self.fails_in: int | None = None
        self.sick = False
        self._random = random
        self._files: dict[Path, Content] = {}  # as programs see them
        self._names: dict[Path, Content] = {}  # as the platter has them
        self._steps: list[Callable[[dict[Path, Content]], None]] = []  # names that changed since, in order
        self._open: list[SimulatedFile] = []

    # -- what programs do

    def create(self, path: Path) -> SimulatedFile:
        self._tick()
        self.require_room(1)
        path.touch(mode=0o600, exist_ok=False)
        content = self._files[path] = Content()
        self._steps.append(lambda names: names.__setitem__(path, content))
        return self._opened(path, content)

    def reopen(self, path: Path) -> SimulatedFile:
        self._tick()
        return self._opened(path, self._files[path])

    def _opened(self, path: Path, content: Content) -> SimulatedFile:
        self._open.append(file := SimulatedFile(self, path, content))
        return file

    def make_directory(self, path: Path) -> None:
        self._tick()
        self._may_fail()
        super().make_directory(path)

    def make_directories(self, path: Path, mode: int = 0o777) -> None:
        self._tick()
        self._may_fail()
        super().make_directories(path, mode)

    def glob(self, path: Path, pattern: str) -> list[Path]:
        self._may_fail()
        return super().glob(path, pattern)

    def rename(self, old: Path, new: Path) -> None:
        self._tick()
        super().rename(old, new)
        _move(self._files, old, new)
        self._steps.append(lambda names: _move(names, old, new))

    def remove(self, path: Path) -> None:
        self._tick()
        self._may_fail()
        super().remove(path)
        _drop(self._files, path)
        self._steps.append(lambda names: _drop(names, path))

    def sync_directory(self, path: Path) -> None:
        """Simplified: every name reaches the platter, as in a journal."""
        self._tick()
        for step in self._steps:
            step(self._names)
        self._steps.clear()

    # -- what happens to it

    def fail(self) -> None:
        """The power fails and returns: the folder holds what survived."""
        self.close()
        for step in self._steps[: self._random.randint(0, len(self._steps))]:
            step(self._names)
        self._steps.clear()
        image = {path: content.after_failure(self._random) for path, content in self._names.items()}
        shutil.rmtree(self.root)
        self.root.mkdir()
        (self.root / "log").mkdir()
        for path, data in image.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._names = {path: Content(bytearray(data)) for path, data in image.items()}
        self._files = dict(self._names)
        self.fails_in, self.sick = None, False

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self._names.clear()
        self._steps.clear()
        self.fail()

    def close(self) -> None:
        """Ends the files that are open, as a process's end does. They have no buffer: nothing more is written."""
        for file in self._open:
            file.close()
        self._open.clear()

    def damage(self, path: Path) -> None:
        """Corrupts a byte of a file."""
        content = self._files[path]
        content.platter[len(content.platter) // 2] ^= 1
        path.write_bytes(content.platter)

    def require_room(self, nbytes: int) -> None:
        if self.capacity is not None and sum(content.size() for content in self._files.values()) + nbytes > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _may_fail(self) -> None:
        if self.sick and self._random.random() < 0.5:
            raise OSError(errno.EIO, "Input/output error")

    def _tick(self) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise PowerFailure


class SimulatedFile:
    """An open file of a `SimulatedDisk`."""

    def __init__(self, disk: SimulatedDisk, path: Path, content: Content) -> None:
        self._disk = disk
        self._content = content
        self._file = path.open("r+b", buffering=0)

    def write(self, offset: int, pieces: Sequence[Bytes]) -> None:
        data = b"".join(pieces)
        self._disk.require_room(max(0, offset + len(data) - self._content.size()))
        self._content.cached.append((offset, data))
        self._disk._tick()  # it may fail with the bytes in the cache
        self._file.seek(offset)
        self._file.write(data)

    def allocate(self, nbytes: int) -> None:
        self._disk._tick()
        self._disk.require_room(max(0, nbytes - self._content.size()))
        self._file.truncate(nbytes)
        self._content.cached.append((nbytes - 1, b"\0"))

    def sync(self) -> None:
        self._disk._tick()
        self._content.sync()

    def close(self) -> None:
        self._file.close()


def _put(data: bytearray, at: int, piece: bytes) -> None:
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(piece)] = piece


def _move(files: dict[Path, Content], old: Path, new: Path) -> None:
    for path in [path for path in files if path.is_relative_to(old)]:
        files[new / path.relative_to(old) if path != old else new] = files.pop(path)


def _drop(files: dict[Path, Content], gone: Path) -> None:
    for path in [path for path in files if path.is_relative_to(gone)]:
        del files[path]
