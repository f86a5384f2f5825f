"""Copies a checkpoint that a server on this machine has written to another folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 20  # bytes


class BackupFailed(Exception):
    """A checkpoint could not be copied; the message says why, and what to do. No part of a copy is left."""


def copy_checkpoint(checkpoint: Path, sha256: bytes, to: Path) -> Path:
    """Copies a checkpoint into a folder, in which it appears complete or not at all, and returns the copy.

    All files are open before the first is read. So the server may remove the checkpoint meanwhile: what is open stays.

    Args:
        checkpoint: The checkpoint's folder.
        sha256: SHA-256 of its state.json, as the server knows it. state.json has those of the other files.
        to: The folder for copies, made if it is missing.

    Raises:
        BackupFailed: The checkpoint is not on this machine or is another one, or `to` can't be written.
    """
    scratch, copy = to / f".copying-{os.getpid()}", to / checkpoint.name
    with ExitStack() as opened:
        try:
            files = _open(checkpoint, sha256, opened)
        except OSError as error:
            raise BackupFailed(
                f"can't read {checkpoint} on this machine: {error.strerror}. Run gem-ctl checkpoint --to on the server's "
                "machine, in its container, as a user who may read the checkpoint"
            ) from error
        try:
            if copy.exists():
                raise BackupFailed(f"{copy} exists already: choose another folder than the server's own --checkpoint-dir")
            to.mkdir(parents=True, exist_ok=True)
            scratch.mkdir(0o700)
            opened.callback(shutil.rmtree, scratch, ignore_errors=True)
            for name, (file, expected) in files.items():
                _copy(file, expected, scratch / name)
            _sync(scratch)
            scratch.rename(copy)
            _sync(to)
        except OSError as error:
            raise BackupFailed(f"can't write to {to}: {error.strerror}") from error
    return copy


def _open(checkpoint: Path, sha256: bytes, opened: ExitStack) -> dict[str, tuple[BinaryIO, str]]:
    """The open files of a checkpoint, by name, each with the SHA-256 of its content. Raises OSError or BackupFailed."""
    state = _open_file(checkpoint / "state.json", opened)
    content = state.read()
    state.seek(0)
    if hashlib.sha256(content).digest() != sha256:
        raise BackupFailed(f"{checkpoint} on this machine is not what the server has written: run this on the server's machine")
    files: dict[str, tuple[BinaryIO, str]] = {"state.json": (state, sha256.hex())}
    try:
        for name, each in json.loads(content)["files"].items():
            files[Path(name).name] = (_open_file(checkpoint / Path(name).name, opened), each["sha256"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BackupFailed(f"{checkpoint} is not a checkpoint of this version") from error
    return files


def _open_file(path: Path, opened: ExitStack) -> BinaryIO:
    """Opens a file for reading. Raises OSError, also for a path that cannot be, and for a pipe, whose opening would wait."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is not a file")
        return opened.enter_context(path.open("rb"))
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error)) from None


def _copy(file: BinaryIO, expected: str, to: Path) -> None:
    """Copies a file to a new one, which is on the disk on return. Raises OSError, or BackupFailed for another SHA-256."""
    digest = hashlib.sha256()
    with open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
        while piece := file.read(_PIECE):
            digest.update(piece)
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
    if digest.hexdigest() != expected:
        raise BackupFailed(f"{file.name} was changed after it was written (its SHA-256 differs): check the server's disk")


def _sync(folder: Path) -> None:
    """Returns once a folder's entries are on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
