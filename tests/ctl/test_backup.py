"""gem-ctl checkpoint --to: a copy to resume from, whatever the server does with its own checkpoint meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gem_client import connect
from gem_ctl import backup
from gem_ctl.backup import BackupFailed, copy_checkpoint
from gem_ctl.cli import main
from gem_server.durability.checkpoint import read_state
from kit.model import GRADIENT, PLAIN, in_background, model, theta
from kit.server import DEADLINE, Live, config, serving


def checkpoint(live: Live, to: Path) -> Result:
    return CliRunner().invoke(main, ["--server", live.address, "checkpoint", "--to", str(to)])


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_server_resumes_from_the_copy(durability: str, tmp_path: Path) -> None:
    """Also from one of several, and with the log, which stays behind."""
    folder, copies = tmp_path / "checkpoints", tmp_path / "new" / "copies"
    begun = config(PLAIN, checkpoint_dir=folder, durability=durability)
    with serving(begun) as live, connect(live.address) as session:
        session.join(model())
        for _ in range(2):
            session.commit(GRADIENT)
            copied = checkpoint(live, copies)
        good = theta(live)
        session.commit(GRADIENT)
    newest = max(copies.iterdir())
    assert (copied.exit_code, copied.stdout.splitlines()[1]) == (0, f"copied to {newest}")
    assert sorted(path.name.split("-")[1] for path in copies.iterdir()) == ["000000000001", "000000000002"]
    shutil.rmtree(folder)
    with serving(config(PLAIN, checkpoint_dir=copies, durability=durability, resume=True)) as live:
        assert live.on_loop(lambda: live.core.central.version) == 2
        assert (theta(live) == good).all()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint that a server has written."""
    folder = tmp_path / "checkpoints"
    with serving(config(PLAIN, checkpoint_dir=folder, durability="memory")) as live, connect(live.address) as session:
        session.join(model())
        assert checkpoint(live, tmp_path / "first").exit_code == 0
    return min(folder.glob("checkpoint-*"))  # the server writes another one at its end


def sha256(path: Path) -> bytes:
    return hashlib.sha256((path / "state.json").read_bytes()).digest()


def test_the_server_may_remove_the_checkpoint_while_it_is_copied(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = backup._copy

    def remove_then_copy(*arguments: Any) -> None:
        shutil.rmtree(written, ignore_errors=True)
        original(*arguments)

    monkeypatch.setattr(backup, "_copy", remove_then_copy)
    copy = copy_checkpoint(written, sha256(written), tmp_path / "copies")
    assert not written.exists()
    assert read_state(copy)["version"] == 0


def lose(path: Path) -> None:
    shutil.rmtree(path)


def lose_the_model(path: Path) -> None:
    (path / "model.safetensors").unlink()


def change(path: Path) -> None:
    (path / "state.json").write_bytes((path / "state.json").read_bytes() + b" ")


def damage(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lose, "can't read .* on this machine: No such file.* on the server's machine"),
        (lose_the_model, "can't read .* on this machine: No such file"),
        (change, "on this machine is not what the server has written"),
        (damage, "model.safetensors was changed after it was written"),
    ],
)
def test_what_is_not_the_servers_checkpoint_leaves_no_copy(
    written: Path, tmp_path: Path, harm: Callable[[Path], None], why: str
) -> None:
    known = sha256(written)
    harm(written)
    with pytest.raises(BackupFailed, match=why):
        copy_checkpoint(written, known, tmp_path / "copies")
    assert not (tmp_path / "copies").exists() or not list((tmp_path / "copies").iterdir())


@pytest.mark.parametrize("content", ["[]", '{"files": [1]}', '{"files": {"/etc/passwd": {}}}', "{"])
def test_a_server_that_names_another_programs_folder_gets_nothing_copied(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "state.json").write_text(content)
    with pytest.raises(BackupFailed):
        copy_checkpoint(folder, sha256(folder), tmp_path / "copies")
    assert not (tmp_path / "copies").exists()


def test_a_path_that_cannot_be_and_a_pipe_are_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.json")
    for path, why in ((Path("a\0b"), "embedded null byte"), (tmp_path, "state.json is not a file")):
        copying = in_background(partial(copy_checkpoint, path, b"", tmp_path / "copies"))
        with pytest.raises(BackupFailed, match=why):
            copying.result(DEADLINE)


def test_a_copy_replaces_nothing(written: Path, tmp_path: Path) -> None:
    """Nor is the server's own folder one for copies."""
    for folder in (written.parent, tmp_path / "first"):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with pytest.raises(BackupFailed, match="exists already"):
            copy_checkpoint(written, sha256(written), folder)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "c")) as live, connect(live.address) as session:
        session.join(model())
        failed = checkpoint(live, tmp_path / "file" / "copies")
    assert failed.exit_code == 1
    assert failed.stderr == f"Error: can't write to {tmp_path / 'file' / 'copies'}: Not a directory\n"
