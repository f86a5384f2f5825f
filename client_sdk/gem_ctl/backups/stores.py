"""Stores of backups: a folder, or an object store that fsspec knows. Both hold files by their paths below a root."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from gem_api.errors import GemError
from gem_api.process.extras import install
from gem_api.process.files import sync_directory
from gem_api.process.printable import without_password
from gem_api.process.regular_file import open_regular

_PIECE = 1 << 20  # bytes
_BACKUP_PREFIXES = ("backup-", "range-", "checkpoint-")  # how the names of backups begin, or of what is in one


class BackupFailed(Exception):
    """A backup can't be made or restored; the message says why, and what to do. No part of it is left."""


class Store(Protocol):
    """Files by their paths, as in "a/b". Every method raises BackupFailed."""

    def files(self) -> list[str]:
        """The paths of all files of backups. Empty if the root does not exist yet. What else is there is not looked into."""
        ...

    def read(self, path: str) -> Iterator[bytes]:
        """A file's content in pieces."""
        ...

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        """Writes a file, which is durable on return. It appears whole, unless `pieces` raises."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with everything in it, if it is there."""
        ...


def open_store(to: str) -> Store:
    """The store at a folder's path or a URL. Raises BackupFailed if fsspec or its library for the URL is missing."""
    protocol, separator, rest = to.partition("://")
    if not separator or protocol == "file":
        return Folder(Path(rest if separator else to))
    return ObjectStore(to)


@contextmanager
def _failing(what: str, hint: str = "") -> Iterator[None]:
    """Raises BackupFailed for any error of a file system; the libraries of object stores have errors of their own kinds. The
    hint is for those of missing rights."""
    try:
        yield
    except (GemError, BackupFailed):
        raise
    except Exception as error:
        why = without_password((isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__)
        raise BackupFailed(
            f"can't {what}: {' '.join(why.split())}{hint if isinstance(error, PermissionError) else ''}"
        ) from error


class Folder:
    """A folder of this machine. What is written is readable for its owner only."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def files(self) -> list[str]:
        with _failing(f"read {self}"):
            if self._root.exists() and not self._root.is_dir():
                raise NotADirectoryError(0, "it is not a folder")
            found = [entry for name in _BACKUP_PREFIXES for entry in self._root.glob(f"{name}*")]
            paths = chain(found, *(entry.rglob("*") for entry in found))
            return sorted(path.relative_to(self._root).as_posix() for path in paths if path.is_file())

    def read(self, path: str) -> Iterator[bytes]:
        with _failing(f"read {self._root / path}"), open_regular(self._root / path) as file:
            while piece := file.read(_PIECE):
                yield piece

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        target = self._root / path
        scratch = target.with_name(f".{target.name}.part")
        with _failing(f"write to {self}"):
            target.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(target)
            for folder in target.parents[: len(Path(path).parents)]:  # up to the root
                sync_directory(folder)
            with suppress(PermissionError):  # then it is not ours, and not new
                sync_directory(self._root.parent)

    def remove(self, path: str) -> None:
        target = self._root / path
        with _failing(f"remove {target}"), suppress(FileNotFoundError):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()


class ObjectStore:
    """A bucket, or what lies in it below a prefix. fsspec makes the calls; its own variables and those of the store's library
    configure it, such as AWS_PROFILE and AWS_ENDPOINT_URL for S3."""

    _HINT = ". Check the credentials, and that they may list, read, write and delete there"  # for missing rights

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(url)
        except ImportError as error:
            raise BackupFailed(_missing(url.partition("://")[0], error)) from error
        except Exception as error:  # a library of another store may raise anything
            raise BackupFailed(without_password(f"can't open {url}: {error}")) from error
        if not root.strip("/"):
            raise BackupFailed(f"{without_password(url)} names no bucket: write {url.partition('://')[0]}://BUCKET/PREFIX")
        self._fs: Any = fs
        self._root: str = root.rstrip("/")

    def __str__(self) -> str:
        return without_password(str(self._fs.unstrip_protocol(self._root)))

    def files(self) -> list[str]:
        with _failing(f"list {self}", self._HINT):
            self._fs.invalidate_cache()  # some libraries remember what they listed
            try:
                entries = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                entries = self._fs.find(self._root)  # nothing, or it says that there is no bucket
            ours = [each for each in entries if each.rstrip("/").rpartition("/")[2].startswith(_BACKUP_PREFIXES)]
            return sorted(path.removeprefix(f"{self._root}/") for entry in ours for path in self._fs.find(entry))

    def read(self, path: str) -> Iterator[bytes]:
        with _failing(f"read {self}/{path}", self._HINT), self._fs.open(self._path(path), "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        with _failing(f"write to {self}", self._HINT), self._fs.open(self._path(path), "wb") as file:
            for piece in pieces:
                file.write(piece)

    def remove(self, path: str) -> None:
        with _failing(f"remove {self}/{path}", self._HINT):
            with suppress(FileNotFoundError):
                self._fs.rm(self._path(path), recursive=True)
            if any(f"{each}/".startswith(f"{path}/") for each in self.files()):  # s3fs does not raise if the store refuses
                raise PermissionError("it is still there")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"


def _missing(protocol: str, error: ImportError) -> str:
    """The package to install for a protocol of fsspec."""
    if protocol in ("s3", "s3a"):
        return f"{protocol}:// needs {(error.name or 's3fs').partition('.')[0]}, which is not installed: {install('s3')}"
    return f"{protocol}:// needs a library of fsspec that is not installed: {error}"
