"""Backups of a run in a folder or an object store, each complete or not one.

backup-<UTC time>-<run id>/backup-format.json                     its format's number, and the release that wrote it
backup-<UTC time>-<run id>/checkpoint-<version>-<serial>/{state.json, model.safetensors, workers.safetensors}    of one server
backup-<UTC time>-<run id>/range-<index>/checkpoint-…/…                                           of several, one for each range

A backup counts once state.json of its first checkpoint is there. That file comes last: after all others were read back, and had
the SHA-256 that the server had written into state.json. A backup without backup-format.json is of format 1.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

import click
from gem_api import __version__
from gem_api.checkpoint import NAME, STATE, SUMS, TENSORS, HigherFormat, intact_state, require_range, version_and_serial
from gem_api.formats import BACKUP, MAX_STATE_BYTES, of_another_release
from gem_api.schema import COUNT, require

from gem_ctl.backups.stores import BackupFailed, Store

FORMAT = "backup-format.json"
_MAX_FORMAT_BYTES = 1000
_READ = {"run_id": str, "version": COUNT, "range": (COUNT, COUNT), "files": SUMS}  # of a state.json
_BACKUP = r"backup-\d{8}T\d{6}Z-(?P<run>\w+)"
_STATE = re.compile(rf"(?:(?P<backup>{_BACKUP})/)?(?P<folder>(?:range-(?P<index>\d+)/)?{NAME})/state\.json")


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one range.

    Attributes:
        folder: Its folder in the backup.
        content: The content of its state.json.
        state: The same, parsed.
    """

    folder: str
    content: bytes
    state: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the other files."""
        return sum(self.state["files"][name]["bytes"] for name in TENSORS)

    def checked(self, name: str, pieces: Iterable[bytes], what: str) -> Iterator[bytes]:
        """The pieces of one of the other files. Raises BackupFailed, with `what` they are, if they are not what the server has
        written."""
        return checked(pieces, self.state["files"][name], what)


@dataclass(frozen=True)
class Arriving(Checkpoint):
    """A checkpoint as it arrives from its server. `files` are the other files: a file's name, and pairs of that and its next
    bytes."""

    files: Iterator[tuple[str, Iterator[tuple[str, bytes]]]]


def received(path: str, sha256: bytes, index: int | None, pieces: Iterator[tuple[str, bytes]]) -> Arriving:
    """Begins to receive a checkpoint: returns once its state.json is here, and so the server has all its files open.

    Args:
        path: Its folder on the server's machine.
        sha256: SHA-256 of its state.json, as the server says.
        index: The range that it holds; None if one server holds everything.
        pieces: Its files from `Admin.read_checkpoint`.

    Raises:
        BackupFailed: It is not what the server has written.
    """
    files = groupby(pieces, itemgetter(0))
    _, first = next(files, ("", iter(())))
    content = small(map(itemgetter(1), first), MAX_STATE_BYTES, f"{path}/{STATE}")
    folder = path.rpartition("/")[2]
    if hashlib.sha256(content).digest() != sha256 or version_and_serial(folder) is None:
        raise BackupFailed(f"{path} was changed after it was written: check the server's disk")
    return Arriving(folder if index is None else f"range-{index}/{folder}", content, parsed(content, path), files)


def read(store: Store, folder: str) -> Checkpoint:
    """A checkpoint in a store. Raises BackupFailed."""
    path = f"{folder}/{STATE}"
    content = small(store.read(path), MAX_STATE_BYTES, f"{store}/{path}")
    return Checkpoint(folder, content, parsed(content, f"{store}/{path}"))


def parsed(content: bytes, path: str) -> dict[str, Any]:
    """The content of a state.json. Raises BackupFailed if it is not one, was changed, or is of a higher format."""
    try:
        state = intact_state(content, path)
        require({name: state[name] for name in _READ if name in state}, _READ, "state")
        require_range(*state["range"])
    except HigherFormat as error:
        raise BackupFailed(str(error)) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BackupFailed(f"{path}: state.json is damaged, or of another version of this program ({error})") from None
    return state


# -- making


def name_of(run_id: str, seconds: float) -> str:
    """The name of a run's backup, given Unix seconds. Names sort by time: a run that went back to an older checkpoint has
    smaller versions than before."""
    return f"backup-{datetime.fromtimestamp(seconds, UTC):%Y%m%dT%H%M%SZ}-{run_id}"


def next_name(store: Store, run_id: str, seconds: float) -> str:
    """The name of the backup to make at a time: after the newest of the run that is there, even if a clock was ahead when that
    was made. Else the older one would pass for the newest. Raises BackupFailed."""
    newest = max((name for name, found in find(store).items() if name and found.run_id == run_id), default="")
    name = name_of(run_id, seconds)
    if name > newest:
        return name
    made = datetime.strptime(newest.split("-")[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return name_of(run_id, made.timestamp() + 1)


def write(store: Store, name: str, checkpoints: Sequence[Arriving]) -> None:
    """Writes a backup of the checkpoints of all ranges, in order, and compares what is written with what the servers wrote.

    Raises:
        BackupFailed: A file can't be written, or differs. Nothing of the backup is left, unless that can't be removed either;
            it does not count then.
    """
    if any(path.startswith(f"{name}/") for path in store.files()):
        raise BackupFailed(f"{store}/{name} exists already: try again in a second")
    nbytes = sum(each.nbytes for each in checkpoints)
    try:
        with progress(f"copying {nbytes / 1e6:,.1f} MB to {store}", nbytes) as counted:
            store.write(f"{name}/{FORMAT}", [json.dumps({"format": BACKUP, "release": __version__}).encode()])
            for each in checkpoints:
                _copy(store, f"{name}/{each.folder}", each, counted)
        with progress("reading it back", nbytes) as counted:
            for each in checkpoints:
                for file in TENSORS:
                    path = f"{name}/{each.folder}/{file}"
                    _exhaust(each.checked(file, counted(store.read(path)), f"{store}/{path}"))
        for each in reversed(checkpoints):
            _write_state(store, f"{name}/{each.folder}/{STATE}", each.content)
    except BaseException:
        with suppress(BackupFailed):
            store.remove(name)
        raise


def _copy(store: Store, folder: str, each: Arriving, counted: Callable[[Iterable[bytes]], Iterator[bytes]]) -> None:
    """Copies a checkpoint's files but its state.json. Raises BackupFailed if one is missing or was changed on the server."""
    missing = list(TENSORS)
    for name, pieces in each.files:
        if name not in missing:
            raise BackupFailed(f"the server sent a file {name!r} that is not of a checkpoint: is it of another version?")
        missing.remove(name)
        data = counted(map(itemgetter(1), pieces))
        store.write(f"{folder}/{name}", each.checked(name, data, f"{name} on the server's disk"))
    if missing:
        raise BackupFailed(f"the server did not send {missing[0]}: is it of another version?")


def _write_state(store: Store, path: str, content: bytes) -> None:
    store.write(path, [content])
    expected = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _exhaust(checked(store.read(path), expected, f"{store}/{path}"))


def prune(store: Store, run_id: str, keep: int) -> list[str]:
    """Removes a run's backups that are older than its `keep` newest, and what is left of attempts before those. Returns their
    names. Raises BackupFailed."""
    found = find(store)
    whole = sorted(name for name, backup in found.items() if backup.complete and backup.run_id == run_id)
    old = [name for name in sorted(found) if found[name].run_id == run_id and name < whole[-keep]] if len(whole) >= keep else []
    for name in old:
        for path in found[name].states[:1]:
            store.remove(path)  # first: then what is left does not count
        store.remove(name)
    return old


# -- finding


@dataclass
class Backup:
    """The content of a backup in a store.

    Attributes:
        name: Its name; "" if the store's root is the backup itself.
        run_id: The run's id, as its name says.
        folders: The folders of the checkpoints whose state.json is there, by range; None for that of a single server.
        numbered: Whether it says its format's number.
    """

    name: str
    run_id: str
    folders: dict[int | None, str]
    numbered: bool = False

    @property
    def complete(self) -> bool:
        return None in self.folders or 0 in self.folders

    @property
    def states(self) -> list[str]:
        """The paths of its state.json, that which makes it complete first."""
        return [f"{folder}/{STATE}" for _, folder in sorted(self.folders.items(), key=lambda each: each[0] or 0)]


def find(store: Store) -> dict[str, Backup]:
    """Everything in a store that is a backup, complete or not, by name. Raises BackupFailed."""
    found: dict[str, Backup] = {}
    for path in store.files():
        name, match = path.partition("/")[0], _STATE.fullmatch(path)
        named = re.fullmatch(_BACKUP, name)
        if match is None and named is None and path != FORMAT:
            continue
        backup = found.setdefault(name if named else "", Backup(name if named else "", named["run"] if named else "", {}))
        backup.numbered = backup.numbered or path.endswith(f"/{FORMAT}") or path == FORMAT
        if match is not None:
            prefix = f"{name}/" if named else ""
            backup.folders[int(match["index"]) if match["index"] else None] = prefix + match["folder"]
    return found


def require_known_format(store: Store, backup: Backup) -> None:
    """Raises BackupFailed if a backup is of a higher format, or says none that can be read."""
    if not backup.numbered:
        return
    path = f"{backup.name}/{FORMAT}".lstrip("/")
    try:
        content = json.loads(small(store.read(path), _MAX_FORMAT_BYTES, f"{store}/{path}"))
        number, release = content["format"], content["release"]
        require([number, release], (COUNT, str), "format and release")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BackupFailed(f"{store}/{path} is damaged ({error}): name another backup, or remove this file") from None
    if number > BACKUP:
        raise BackupFailed(of_another_release(f"{store}/{backup.name}", number, BACKUP, release))


# -- bytes


def small(pieces: Iterable[bytes], limit: int, what: str) -> bytes:
    """The pieces of a file of at most this many bytes, joined. Raises BackupFailed."""
    content = b""
    for piece in pieces:
        content += piece
        if len(content) > limit:
            raise BackupFailed(f"{what} has more than the {limit} bytes that such a file may have")
    return content


def checked(pieces: Iterable[bytes], expected: dict[str, Any], what: str) -> Iterator[bytes]:
    """The pieces. Raises BackupFailed as soon as there are more bytes than state.json says, or at their end if they have
    another SHA-256."""
    digest, left = hashlib.sha256(), expected["bytes"]
    for piece in pieces:
        digest.update(piece)
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left or digest.hexdigest() != expected["sha256"]:
        raise BackupFailed(f"{what} was changed after it was written (its size or SHA-256 differs): check that disk or store")


def _exhaust(pieces: Iterable[bytes]) -> None:
    for _ in pieces:
        pass


@contextmanager
def progress(label: str, nbytes: int) -> Iterator[Callable[[Iterable[bytes]], Iterator[bytes]]]:
    """Shows on standard error how far a transfer of this size is: of the pieces that pass through what this yields."""
    with click.progressbar(length=nbytes, label=label, file=sys.stderr) as bar:

        def counted(pieces: Iterable[bytes]) -> Iterator[bytes]:
            for piece in pieces:
                bar.update(len(piece))
                yield piece

        yield counted
