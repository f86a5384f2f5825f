"""Restores a run's backup into empty folders, from which servers resume."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_api.checkpoint import STATE, TENSORS
from gem_api.process.files import lock, sync_directory

from gem_ctl.backups.backup import Backup, Checkpoint, find, progress, read, require_known_format
from gem_ctl.backups.stores import BackupFailed, Folder, Store

_SCRATCH = ".restoring"
_START_FILES = {".lock", "commits.csv"}  # a server without a run makes them; one that resumes puts another run's history aside


@dataclass
class Restored:
    """A backup that was restored.

    Attributes:
        backup: The backup's name.
        state: The content of the state.json that has the run's counts: that of range 0, or of the only range asked for.
        folders: The folders of checkpoints, each with the number of its range.
    """

    backup: str
    state: dict[str, Any]
    folders: dict[int, Path]


def restore(store: Store, to: Path, only: int | None = None) -> Restored:
    """Copies a backup's checkpoints to a folder: to `to` itself if one server holds everything, or if a range is asked for;
    else to range-0, range-1, ... in it. Every byte is compared with what the servers wrote before any checkpoint appears.

    Args:
        store: Holds backups, of which the newest complete one is taken; or it is one backup.
        to: The folder. It must be empty, or not exist.
        only: The range to restore; None for all.

    Raises:
        BackupFailed: There is no complete backup, it is damaged, or the folder is not empty or can't be written.
    """
    backup = _newest(store)
    chosen = _chosen(store, backup, only)
    folders = {index: to if only is not None or len(chosen) == 1 else to / f"range-{index}" for index in chosen}
    try:
        _require_empty(to)
        with ExitStack() as opened:
            for folder in folders.values():
                _take(folder, opened)
            _download(store, [(checkpoint, folders[index]) for index, checkpoint in chosen.items()])
            for index, checkpoint in sorted(chosen.items(), reverse=True):  # a run without range 0 is not resumed
                folder = folders[index]
                (folder / _SCRATCH).rename(folder / Path(checkpoint.folder).name)
                sync_directory(folder)
    except OSError as error:
        raise BackupFailed(f"can't write to {to}: {error.strerror}") from error
    return Restored(backup.name or str(store).rpartition("/")[2], chosen[min(chosen)].state, folders)


def _newest(store: Store) -> Backup:
    """The newest complete backup. Raises BackupFailed if that, or a newer one, is of a format that this release does not know:
    it can't tell whether such a one is complete."""
    found = find(store)
    whole = [name for name, backup in found.items() if backup.complete]
    for name in sorted(found, reverse=True):
        if not whole or name >= max(whole):
            require_known_format(store, found[name])
    if not whole:
        rest = f", but {len(found)} that were not completed" if found else ""
        raise BackupFailed(f"{store} holds no backup{rest}: name the folder that gem-ctl checkpoint --to was given")
    return found[max(whole)]


def _chosen(store: Store, backup: Backup, only: int | None) -> dict[int, Checkpoint]:
    """The checkpoints to restore, by range."""
    leader = read(store, backup.states[0].rpartition("/")[0])
    index, count = leader.state["range"]
    folders = {of or 0: folder for of, folder in backup.folders.items()}
    if index:
        raise BackupFailed(f"{store} is range {index} of a backup: name the backup itself, and {index} after the folder")
    missing = next(each for each in range(len(folders) + 1) if each not in folders)
    if missing < count:
        raise BackupFailed(f"{store}/{backup.name} lacks range {missing}: it was changed after it was written")
    if only is not None and only not in folders:
        raise BackupFailed(f"there is no range {only}: this run has {count}, counted from 0")
    return {of: read(store, folder) for of, folder in folders.items() if only in (None, of)}


def _require_empty(folder: Path) -> None:
    """Raises BackupFailed if a folder has a file that neither a server without a run nor an attempt to restore left there."""
    for path in folder.rglob("*"):
        below = path.relative_to(folder)
        if path.is_file() and path.name not in _START_FILES and _SCRATCH not in below.parts:
            raise BackupFailed(f"{folder} is not empty, it has {below}: name another folder, or move it away")


def _take(folder: Path, opened: ExitStack) -> None:
    """Makes a folder, and keeps servers from it until `opened` is closed. Raises BackupFailed or OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = opened.enter_context((folder / ".lock").open("ab"))
    try:
        taken = lock(file)
    except OSError as error:
        raise BackupFailed(f"can't lock {folder}: {error.strerror}; name a folder on a file system with locks") from error
    if not taken:
        raise BackupFailed(f"a server is using {folder}: stop it first, or name another folder")
    shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
    opened.callback(shutil.rmtree, folder / _SCRATCH, ignore_errors=True)


def _download(store: Store, targets: list[tuple[Checkpoint, Path]]) -> None:
    nbytes = sum(checkpoint.nbytes for checkpoint, _ in targets)
    with progress(f"copying {nbytes / 1e6:,.1f} MB from {store}", nbytes) as counted:
        for checkpoint, folder in targets:
            target = Folder(folder / _SCRATCH)
            for name in TENSORS:
                path = f"{checkpoint.folder}/{name}"
                target.write(name, checkpoint.checked(name, counted(store.read(path)), f"{store}/{path}"))
            target.write(STATE, [checkpoint.content])
