"""gem-ctl checkpoint --to: a backup is complete or none, and a server resumes from what gem-ctl restore makes of it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gem_api.checkpoint import TENSORS
from gem_api.errors import CheckpointFailed, GemError
from gem_client import Admin, connect
from gem_ctl.backups import backup
from gem_ctl.backups.backup import Arriving
from gem_ctl.backups.restore import restore
from gem_ctl.backups.stores import BackupFailed, Folder, open_store
from gem_ctl.cli import main
from gem_server.durability.checkpoint import read_state
from kit.model import GRADIENT, PLAIN, model, theta, version
from kit.process import python
from kit.raw_ranges import commit_all, serving_ranges
from kit.server import Live, config, serving

NAME = backup.name_of("abcd1234", 0)


def ctl(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments], env=environment)


def backed_up(live: Live, to: Path, **environment: str) -> Result:
    return ctl("--server", live.address, "checkpoint", "--to", to, **environment)


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_server_resumes_from_the_newest_backup(durability: str, tmp_path: Path) -> None:
    """Also with the log, which stays behind."""
    folder, backups = tmp_path / "checkpoints", tmp_path / "new" / "backups"
    begun = config(PLAIN, checkpoint_dir=folder, durability=durability)
    with serving(begun) as live, connect(live.address) as session, pytest.MonkeyPatch.context() as patch:
        session.join(model())
        for seconds in (1, 2):
            session.commit(GRADIENT)
            patch.setattr("gem_ctl.backups.command.time", lambda now=seconds: now)
            copied = backed_up(live, backups)
            assert copied.exit_code == 0, copied.output
        good = theta(live)
        session.commit(GRADIENT)
    newest = max(backups.iterdir())
    assert copied.stdout.splitlines()[1] == f"copied to {newest}"
    shutil.rmtree(folder)
    restored = ctl("restore", backups, folder)
    run = newest.name.rpartition("-")[2]
    assert restored.stdout.splitlines() == [
        f"restored run {run} at version 2 from {newest.name}",
        f"  gem-server --checkpoint-dir {folder} --resume",
    ]
    with serving(config(PLAIN, checkpoint_dir=folder, durability=durability, resume=True)) as live:
        assert version(live) == 2
        assert (theta(live) == good).all()


def test_several_servers_resume_from_one_backup(tmp_path: Path) -> None:
    """A machine that holds one range restores that alone."""
    with serving_ranges(tmp_path / "first") as ranges:
        commit_all(ranges.started("ann"))
        copied = backed_up(ranges.lives[0], tmp_path / "backups")
        assert copied.exit_code == 0, copied.output
        commit_all(ranges.joined("bob"))
    restored = ctl("restore", tmp_path / "backups", tmp_path / "all")
    assert [line.split(" --resume")[0] for line in restored.stdout.splitlines()[1:]] == [
        f"  gem-server --range {index}/2 --durability log --checkpoint-dir {tmp_path / 'all' / f'range-{index}'}"
        for index in range(2)
    ]
    for index in range(2):
        assert ctl("restore", tmp_path / "backups", tmp_path / "each" / f"range-{index}", str(index)).exit_code == 0
    for folder in ("all", "each"):
        with serving_ranges(tmp_path / folder, resume=True) as ranges:
            assert [version(live) for live in ranges.lives] == [1, 1]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that a server has written."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with serving(config(PLAIN, checkpoint_dir=folder, durability="memory")) as live, connect(live.address) as session:
        session.join(model())
        with Admin(live.address) as admin:
            return Path(admin.checkpoint().path)


def pieces(path: Path) -> Iterator[tuple[str, bytes]]:
    """A checkpoint's files, as `Admin.read_checkpoint` yields them, in small pieces."""
    for name in ("state.json", *TENSORS):
        content = (path / name).read_bytes()
        yield from ((name, content[at : at + 1000]) for at in range(0, len(content), 1000))


def received(path: Path, index: int | None = None, sha256: bytes | None = None) -> Arriving:
    known = sha256 or hashlib.sha256((path / "state.json").read_bytes()).digest()
    return backup.received(str(path), known, index, pieces(path))


# -- reading a checkpoint from its server


def test_the_server_may_remove_the_checkpoint_while_it_is_read(tmp_path: Path) -> None:
    with serving(config(PLAIN, checkpoint_dir=tmp_path)) as live, connect(live.address) as session, ExitStack() as opened:
        session.join(model())
        with Admin(live.address) as admin:
            path = admin.checkpoint().path
        files = live.server.wiring.checkpointer.open_files(path, opened)
        before = [(Path(path) / file.name).read_bytes() for file in files]
        shutil.rmtree(path)
        assert [file.read() for file in files] == before


def test_the_server_shows_no_other_files(tmp_path: Path) -> None:
    folder, other = tmp_path / "checkpoints", tmp_path / "checkpoint-000000000000-0001"
    with serving(config(PLAIN, checkpoint_dir=folder)) as live, connect(live.address) as session:
        session.join(model())
        with Admin(live.address) as admin:
            shutil.copytree(admin.checkpoint().path, other)
            for path in (str(other), f"{folder}/../{other.name}", str(folder), "", "a\0b"):
                with pytest.raises(CheckpointFailed, match="not one of this server's checkpoints"):
                    next(admin.read_checkpoint(path))


def test_a_reader_that_stalls_holds_up_neither_training_nor_the_servers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gem_server.endpoint.REPLY_GRACE_SECONDS", 0.1)
    gradient = np.ones(4 << 20, np.float32)  # 16 MB: more than a connection takes unread
    with (
        serving(config(PLAIN, checkpoint_dir=tmp_path)) as live,
        connect(live.address) as session,
        Admin(live.address) as admin,
    ):
        session.join({"w": np.zeros(gradient.size, np.float32)})
        pieces = admin.read_checkpoint(admin.checkpoint().path)
        next(pieces)
        assert [session.commit(gradient).version for _ in range(3)] == [1, 2, 3]
        live.stop()
        with pytest.raises(GemError):
            list(pieces)


def lose_the_model(path: Path) -> None:
    (path / "model.safetensors").unlink()


def change_the_state(path: Path) -> None:
    (path / "state.json").write_bytes((path / "state.json").read_bytes() + b" ")


def change_the_model(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lose_the_model, "No such file or directory; make the server write a new one"),
        (change_the_state, "was changed after it was written: check the server's disk"),
        (change_the_model, "model.safetensors on the server's disk was changed after it was written"),
    ],
)
def test_a_checkpoint_that_the_servers_disk_damaged_leaves_no_backup(
    harm: Callable[[Path], None], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Admin.read_checkpoint

    def harmed(admin: Admin, path: str) -> Iterator[tuple[str, bytes]]:
        harm(Path(path))
        return original(admin, path)

    monkeypatch.setattr(Admin, "read_checkpoint", harmed)
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "c")) as live, connect(live.address) as session:
        session.join(model())
        failed = backed_up(live, tmp_path / "backups")
    assert failed.exit_code == 1
    assert why in failed.stderr.splitlines()[-1]
    assert Folder(tmp_path / "backups").files() == []


# -- complete or none


class Dying(Folder):
    """A folder to which some files are written; then the process is killed: nothing more happens there."""

    def __init__(self, root: Path, left: int) -> None:
        super().__init__(root)
        self.left = left

    def _use(self) -> None:
        if self.left == 0:
            raise BackupFailed("killed")
        self.left -= 1

    def write(self, path: str, pieces: Iterable[bytes]) -> None:
        self._use()
        super().write(path, pieces)

    def remove(self, path: str) -> None:
        self._use()
        super().remove(path)


def test_a_backup_counts_once_all_of_it_is_there(written: Path, tmp_path: Path) -> None:
    files = 7
    for left in range(files + 1):
        store = Dying(tmp_path / str(left), left)
        with suppress(BackupFailed):
            backup.write(store, NAME, [received(written, 0), received(written, 1)])
        assert len(store.files()) == left
        assert [each.complete for each in backup.find(store).values()] == [left == files] * bool(left)


def test_a_backup_that_is_being_removed_does_not_count(written: Path, tmp_path: Path) -> None:
    for seconds in range(2):
        backup.write(Folder(tmp_path), backup.name_of("run", seconds), [received(written)])
    store = Dying(tmp_path, 1)
    with pytest.raises(BackupFailed, match="killed"):
        backup.prune(store, "run", 1)
    assert len(store.files()) == 7
    assert [each.complete for each in backup.find(store).values()] == [False, True]
    assert backup.prune(Folder(tmp_path), "run", 1) == [backup.name_of("run", 0)]
    assert len(store.files()) == 4


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_store_that_keeps_other_bytes_is_noticed(name: str, written: Path, tmp_path: Path) -> None:
    class Damaging(Folder):
        def write(self, path: str, pieces: Iterable[bytes]) -> None:
            content = b"".join(pieces)
            super().write(path, [content[:-1], b"?"] if path.endswith(name) else [content])

    with pytest.raises(BackupFailed, match=f"{name} was changed after it was written"):
        backup.write(Damaging(tmp_path), NAME, [received(written)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("model.safetensors",), "did not send workers.safetensors"),
        (("../model.safetensors",), "is not of a checkpoint"),
        ((*TENSORS, "model.safetensors"), "'model.safetensors' that is not of a checkpoint"),
    ],
)
def test_a_server_that_sends_other_files_leaves_no_backup(
    files: tuple[str, ...], why: str, written: Path, tmp_path: Path
) -> None:
    pieces = [(name, (written / name).read_bytes() if (written / name).exists() else b"") for name in files]
    with pytest.raises(BackupFailed, match=why):
        backup.write(Folder(tmp_path), NAME, [replace(received(written), files=groupby(pieces, itemgetter(0)))])
    assert list(tmp_path.iterdir()) == []


def test_a_backup_replaces_nothing(written: Path, tmp_path: Path) -> None:
    backup.write(Folder(tmp_path), NAME, [received(written)])
    with pytest.raises(BackupFailed, match="exists already"):
        backup.write(Folder(tmp_path), NAME, [received(written)])
    assert len(Folder(tmp_path).files()) == 4


# -- how many are kept


def test_the_newest_backups_of_a_run_are_kept(written: Path, tmp_path: Path) -> None:
    """Not those with the highest version, as a run may go back; and other runs are left alone."""
    store = Folder(tmp_path)
    names = [backup.name_of("run", seconds) for seconds in range(5)]
    other = backup.name_of("other", 0)
    for name in (names[0], names[2], names[3], other):
        backup.write(store, name, [received(written)])
    for name in (names[1], names[4]):  # attempts that were killed; the last may still be under way
        store.write(f"{name}/{written.name}/model.safetensors", [b"half"])
    assert backup.prune(store, "run", 3) == []
    assert backup.prune(store, "run", 2) == names[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[2:], other])


def test_a_backup_made_after_one_of_a_clock_that_was_ahead_is_the_newest(written: Path, tmp_path: Path) -> None:
    store = Folder(tmp_path)
    assert backup.next_name(store, "run", 50.5) == backup.name_of("run", 50)
    backup.write(store, backup.name_of("run", 4_000_000_000), [received(written)])
    made = backup.next_name(store, "run", 50)
    assert made == backup.name_of("run", 4_000_000_001)
    assert backup.next_name(store, "other", 50) == backup.name_of("other", 50)
    backup.write(store, made, [received(written)])
    assert backup.prune(store, "run", 1) == [backup.name_of("run", 4_000_000_000)]


def test_the_command_keeps_as_many_as_the_setting_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "c")) as live, connect(live.address) as session:
        session.join(model())
        for seconds in range(3):
            monkeypatch.setattr("gem_ctl.backups.command.time", lambda now=seconds: now)
            done = backed_up(live, tmp_path / "backups", GEM_BACKUP_KEEP="2")
            assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"removed {tmp_path / 'backups'}/{backup.name_of(live.core.run_id, 0)}"
    assert len(list((tmp_path / "backups").iterdir())) == 2


# -- restoring


def test_an_attempt_that_was_killed_is_not_restored(written: Path, tmp_path: Path) -> None:
    store = Folder(tmp_path / "backups")
    with pytest.raises(BackupFailed, match="holds no backup: name the folder"):
        restore(store, tmp_path / "to")
    later = backup.name_of("run", 1)
    store.write(f"{later}/{written.name}/model.safetensors", [b"half"])
    with pytest.raises(BackupFailed, match="no backup, but 1 that were not completed"):
        restore(store, tmp_path / "to")
    backup.write(store, NAME, [received(written)])
    assert restore(store, tmp_path / "to").backup == NAME
    assert read_state(tmp_path / "to" / written.name).version == 0


def test_one_backup_can_be_named(written: Path, tmp_path: Path) -> None:
    for seconds in range(2):
        backup.write(Folder(tmp_path / "b"), backup.name_of("run", seconds), [received(written)])
    older = backup.name_of("run", 0)
    assert restore(open_store(str(tmp_path / "b" / older)), tmp_path / "to").backup == older


def test_a_folder_with_files_is_left_as_it_is(written: Path, tmp_path: Path) -> None:
    backup.write(Folder(tmp_path / "b"), NAME, [received(written)])
    to = tmp_path / "to"
    for name in ("checkpoint-000000000001-0001/state.json", "log/segment-00000001", "notes.txt"):
        (to / name).parent.mkdir(parents=True)
        (to / name).write_text("mine")
        with pytest.raises(BackupFailed, match=f"{to} is not empty, it has {name}: name another folder"):
            restore(Folder(tmp_path / "b"), to)
        assert [str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()] == [name]
        shutil.rmtree(to)
    (to / "lost+found").mkdir(parents=True)
    with serving(config(PLAIN, checkpoint_dir=to, durability="log")):
        pass  # no worker came, so there is no run
    restore(Folder(tmp_path / "b"), to)


def test_a_folder_that_a_server_uses_is_refused(written: Path, tmp_path: Path) -> None:
    backup.write(Folder(tmp_path / "b"), NAME, [received(written)])
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "to")), pytest.raises(BackupFailed, match="a server is using"):
        restore(Folder(tmp_path / "b"), tmp_path / "to")


def change_the_version(path: Path) -> None:
    content = (path / "state.json").read_text()
    (path / "state.json").write_text(content.replace('"version": 0', '"version": 1'))


@pytest.mark.parametrize(
    ("damage", "why"),
    [(change_the_model, "was changed after"), (change_the_version, "state.json is damaged"), (lose_the_model, "can't read")],
)
def test_a_damaged_backup_restores_nothing(damage: Callable[[Path], None], why: str, written: Path, tmp_path: Path) -> None:
    backup.write(Folder(tmp_path / "b"), NAME, [received(written)])
    damage(tmp_path / "b" / NAME / written.name)
    with pytest.raises(BackupFailed, match=why):
        restore(Folder(tmp_path / "b"), tmp_path / "to")
    assert {path.name for path in (tmp_path / "to").rglob("*")} <= {".lock"}


def test_a_backup_that_lost_a_range_is_refused(tmp_path: Path) -> None:
    with serving_ranges(tmp_path / "servers") as ranges:
        commit_all(ranges.started("ann"))
        assert backed_up(ranges.lives[0], tmp_path / "backups").exit_code == 0
    (whole,) = (tmp_path / "backups").iterdir()
    said = [
        (whole / "range-1", [], "is range 1 of a backup: name the backup itself, and 1 after the folder"),
        (whole, ["2"], "there is no range 2: this run has 2, counted from 0"),
    ]
    for source, arguments, why in said:
        failed = ctl("restore", source, tmp_path / "to", *arguments)
        assert (failed.exit_code, why in failed.stderr) == (1, True), failed.stderr
    shutil.rmtree(whole / "range-1")
    assert "lacks range 1" in ctl("restore", tmp_path / "backups", tmp_path / "to").stderr
    assert not (tmp_path / "to").exists()


# -- errors of use


def test_a_folder_that_can_not_be_made_is_one_line_and_no_checkpoint_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "c")) as live, connect(live.address) as session:
        session.join(model())
        failed = backed_up(live, tmp_path / "file")
        assert (failed.exit_code, failed.stdout) == (1, "")
        assert failed.stderr == f"gem-ctl: can't read {tmp_path / 'file'}: it is not a folder\n"
        below = backed_up(live, tmp_path / "file" / "backups").stderr
    assert below.splitlines()[-1] == f"gem-ctl: can't write to {tmp_path / 'file' / 'backups'}: Not a directory"


@pytest.mark.long
@pytest.mark.parametrize(
    ("url", "hidden", "said"),
    [
        ("s3://bucket/run", "s3fs", 's3:// needs s3fs, which is not installed: pip install ".[s3]"'),
        ("gs://bucket/run", "gcsfs", "gs:// needs a library of fsspec that is not installed: Please install gcsfs"),
    ],
)
def test_what_is_missing_for_an_object_store_is_said(url: str, hidden: str, said: str) -> None:
    """In a process of its own, because fsspec remembers what was imported."""
    pytest.importorskip("fsspec")
    code = f"import sys; sys.modules[{hidden!r}] = None; from gem_ctl.backups.stores import open_store; open_store({url!r})"
    done = python("-c", code)
    assert f"gem_ctl.backups.stores.BackupFailed: {said}" in done.stderr
