"""gem-ctl restore of what somebody else has put into a store: one line, bounded by the files that are there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gem_ctl.backups import backup
from gem_ctl.cli import main

NAME = "backup-20260101T000000Z-abcdef01"
CHECKPOINT = "checkpoint-000000000001-0001"
FILES = dict.fromkeys(("model.safetensors", "workers.safetensors"), b"x")
SUMS = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in FILES.items()}
STATE = {"format": "gem-checkpoint/2", "run_id": "abcdef01", "version": 1, "range": [0, 1], "files": SUMS}


def make(folder: Path, name: str = NAME, **changes: Any) -> Path:
    """A backup made by hand; None leaves a part of its state out."""
    path = folder / name / CHECKPOINT
    path.mkdir(parents=True)
    state = {key: value for key, value in (STATE | changes).items() if value is not None}
    state["sha256"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (path / "state.json").write_text(json.dumps(state))
    for file, data in FILES.items():
        (path / file).write_bytes(data)
    return path


def restored(folder: Path) -> Result:
    return CliRunner().invoke(main, ["restore", str(folder), str(folder.parent / "to")])


def sums(**changes: Any) -> dict[str, Any]:
    return {name: each | changes for name, each in SUMS.items()}


MADE_UP: dict[str, tuple[dict[str, Any], str]] = {
    "no range": ({"range": None}, "no 'range'"),
    "very many ranges": ({"range": [0, 10**8]}, "range is 0 of 100000000"),
    "more ranges than there are": ({"range": [0, 64]}, "lacks range 1"),
    "no ranges": ({"range": [0, 0]}, "range is 0 of 0"),
    "a negative range": ({"range": [-1, 1]}, "state.range[0]"),
    "a size that is a text": ({"files": sums(bytes="1")}, "bytes must be a whole number"),
    "a size of 400 digits": ({"files": sums(bytes=10**400)}, "bytes must be a whole number"),
    "files that are a list": ({"files": []}, "state.files"),
    "a version that is a text": ({"version": "\x1b[31m"}, "state.version"),
    "a higher format": ({"format": "gem-checkpoint/3", "server_version": "9.8.7"}, "of format 3, and this release"),
    "fewer bytes than there are": ({"files": sums(bytes=0)}, "was changed after it was written"),
}  # fmt: skip


@pytest.mark.parametrize("what", MADE_UP)
def test_a_made_up_state_ends_in_one_line(what: str, tmp_path: Path) -> None:
    changes, said = MADE_UP[what]
    make(tmp_path / "b", **changes)
    done = restored(tmp_path / "b")
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    last = done.stderr.splitlines()[-1]
    assert said in last
    assert last.startswith("gem-ctl: ")
    assert last.isprintable()
    assert not list((tmp_path / "to").glob("checkpoint-*"))


def test_what_a_state_says_is_printed_without_its_control_characters(tmp_path: Path) -> None:
    make(tmp_path / "b", run_id="\x1b]0;owned\x07\x1b[31mRED")
    done = restored(tmp_path / "b")
    assert done.exit_code == 0
    assert all(line.isprintable() for line in done.stdout.splitlines())


def grow(path: Path) -> None:
    """As long as a file that has no end."""
    os.truncate(path, 1 << 42)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [grow, pipe])
@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "backup-format.json"])
def test_no_more_is_read_than_a_file_may_have(
    harm: Callable[[Path], None], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gem_ctl.backups.backup.MAX_STATE_BYTES", 1 << 20)
    path = make(tmp_path / "b") / file if file != "backup-format.json" else make(tmp_path / "b").parent / file
    path.touch()
    harm(path)
    done = restored(tmp_path / "b")
    if file == "backup-format.json" and harm is pipe:  # no file, so it says nothing
        assert done.exit_code == 0
        return
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1


# -- formats


def test_a_newer_backup_of_a_higher_format_is_refused_and_no_older_one_restored(tmp_path: Path) -> None:
    """Whether it is complete can't be known: its files may have other names."""
    make(tmp_path / "b")
    newer = tmp_path / "b" / "backup-20260102T000000Z-abcdef01"
    newer.mkdir()
    (newer / backup.FORMAT).write_text(json.dumps({"format": 3, "release": "9.8.7"}))
    done = restored(tmp_path / "b")
    assert done.exit_code == 1
    assert f"{newer} is of format 3" in done.stderr
    assert "release 9.8.7, which wrote it" in done.stderr
    named = restored(newer)
    assert named.exit_code == 1
    assert "is of format 3" in named.stderr


def test_a_format_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    path = make(tmp_path / "b").parent / backup.FORMAT
    for content in ("", "[]", '{"format": "3"}', '{"format": 2, "release": 1}', "[" * 900):
        path.write_text(content)
        done = restored(tmp_path / "b")
        assert done.exit_code == 1
        assert "backup-format.json is damaged" in done.stderr


def test_an_older_backup_of_a_higher_format_holds_nobody_up(tmp_path: Path) -> None:
    make(tmp_path / "b", "backup-20260102T000000Z-abcdef01")
    older = tmp_path / "b" / NAME
    older.mkdir()
    (older / backup.FORMAT).write_text(json.dumps({"format": 3, "release": "9.8.7"}))
    assert restored(tmp_path / "b").exit_code == 0
