"""What a file system lacks, and what a process lacks, is not taken for something else."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from gem_api.process.files import advice, lock, sync_directory
from gem_api.process.regular_file import read_regular
from gem_ctl.backups import restore
from gem_ctl.backups.stores import BackupFailed
from gem_ctl.local_runs import Announcement
from gem_server.config import StartError
from gem_server.durability.range_files import BadRanges, _require_at_rest
from gem_server.durability.resume import lock_directory
from gem_server.durability.storage import Storage
from gem_server.server import Server
from kit.failing import failing
from structlog.testing import CapturingLogger


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO])
def test_a_folder_that_can_not_be_locked_is_not_one_that_another_server_uses(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", failing(number))
    why = os.strerror(number)
    with pytest.raises(StartError, match=f"can't lock {tmp_path}: {why}"):
        lock_directory(tmp_path, CapturingLogger())
    with ExitStack() as opened, pytest.raises(BackupFailed, match=f"can't lock {tmp_path}: {why}"):
        restore._take(tmp_path, opened)
    with pytest.raises(BadRanges, match=f"can't tell whether a server is using {tmp_path}: {why}"):
        _require_at_rest(tmp_path)
    Announcement(tmp_path, "127.0.0.1:1").close()  # without locks, gem-ctl does not find the run


def test_a_folder_that_another_server_uses_is_said_to_be(tmp_path: Path) -> None:
    with lock_directory(tmp_path, CapturingLogger()), pytest.raises(StartError, match=f"another server is using {tmp_path}"):
        lock_directory(tmp_path, CapturingLogger())


def test_readers_share_a_lock_and_keep_writers_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as one, (tmp_path / "file").open() as two, (tmp_path / "file").open("a") as writer:
        assert [lock(one, shared=True), lock(two, shared=True), lock(writer)] == [True, True, False]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_syncs_no_folders_is_used_and_warned_of(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(number))
    Storage().sync_directory(tmp_path)
    logger = CapturingLogger()
    lock_directory(tmp_path, logger).close()
    (warning,) = (call for call in logger.calls if call.method_name == "warning")
    assert "when the names of files are on the disk" in warning.args[0]


def test_a_folder_that_the_disk_fails_to_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_directory(tmp_path)


def test_a_file_system_that_reserves_nothing_holds_a_log_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    file = Storage().create(tmp_path / "file")
    file.allocate(10)
    file.close()
    assert (tmp_path / "file").read_bytes() == bytes(10)


def test_a_server_that_can_not_write_its_log_says_what_to_do_about_this_error() -> None:
    server = Mock()
    server.wiring.checkpointer.write_last = AsyncMock()
    for error, what in ((OSError(errno.EFBIG, "File too large"), "ulimit -f"), (OSError(errno.EIO, ""), "check the disk")):
        with pytest.raises(StartError, match=rf"has all commits: .*{what}.*, then start again with --resume"):
            asyncio.run(Server._write_last(server, error))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_named_and_does_not_hold_its_reader_up(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(ValueError, match="/x is not a regular file"):
        read_regular(tmp_path / "x", 10)


def test_the_advice_fits_the_error() -> None:
    assert "ulimit -f" in advice(OSError(errno.EFBIG, "File too large"))
    assert "ulimit -n" in advice(OSError(errno.EMFILE, "Too many open files"))
    assert advice(OSError(errno.EIO, "")) == "check the disk"
    assert [advice(error, "look") for error in (OSError("no number"), ValueError(), None)] == ["look"] * 3
