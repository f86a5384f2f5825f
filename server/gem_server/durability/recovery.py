"""A run as it was when the server died: the newest whole checkpoint and the log since; and checkpoints that a log follows."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.logs import Logger

from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint
from gem_server.durability.capture import Capture
from gem_server.durability.journal import Journal, LogPosition
from gem_server.durability.records import Kind, Record
from gem_server.durability.replay import Log, apply
from gem_server.durability.scratch import Scratch
from gem_server.durability.segment import put_aside, serials
from gem_server.durability.storage import Storage


def log_directory(checkpoints: Path) -> Path:
    """Where the log of the run lies whose checkpoints are there."""
    return checkpoints / "log"


class Recovered(NamedTuple):
    """A run that goes on.

    Attributes:
        core: As it was when the server died.
        checkpoint: What it was built on.
        saved: That checkpoint's version.
        number: The log's last record.
        torn: The segment that ends within a record, if any: one that nobody was promised.
    """

    core: Core
    checkpoint: Path
    saved: int
    number: int
    torn: Path | None


def recover(
    directory: Path,
    new_core: Callable[[str, Hyperparameters], Core],
    now: float,
    refuse: Callable[[Path, str], None],
    *,
    logged: bool,
    random: Callable[[], int] = lambda: 1 + secrets.randbits(30),
) -> Recovered | None:
    """The run whose checkpoints and log lie in a folder; None where there is no checkpoint.

    Args:
        directory: The folder.
        new_core: Makes an empty core, given the run's id and its settings.
        now: When the leases begin to run again.
        refuse: Told of damaged checkpoints, for which an older one and the log since then stand in.
        logged: Whether this start keeps a log.
        random: A number below 2³¹. Shards get ids from it unless the log tells of every shard that was and will be dealt: what
            a start without a log dealt must not come again, and when it is killed nothing of it may be left to count on from.

    Raises:
        BadCheckpoint: There are checkpoints, but none is whole, or `new_core` does not take the newest one's settings.
        DamagedLog: The log lacks something that was acknowledged.
        OSError: They can't be read.
    """
    newest = checkpoint.newest(directory, refuse)
    if newest is None:
        return None
    path, state = newest
    core = _restored(path, state, new_core, now)
    saved = core.central.version
    number, torn = replay(directory, state, core, now)
    core.came_back(None if logged and "log" in state else random())
    return Recovered(core, path, saved, number, torn)


def rebuild(directory: Path, new_core: Callable[[str, Hyperparameters], Core], version: int | None) -> Core:
    """A run as it was at a version, the newest by default. Changes nothing in the folder.

    Raises:
        ValueError: The checkpoints that are kept, and the log, do not reach back or on to that version.
        BadCheckpoint, DamagedLog, OSError: As for `recover`.
    """
    for path in checkpoint.list_checkpoints(directory):
        state = checkpoint.read_state(path)
        if version is None or state["version"] <= version:
            core = _restored(path, state, new_core, 0.0)
            replay(directory, state, core, 0.0, version)
            if version not in (None, core.central.version):
                raise ValueError(
                    f"the log ends at version {core.central.version}; version {version} was not reached, or not logged"
                )
            return core
    raise ValueError(f"no checkpoint in {directory} is as old as version {version}: more are kept with --checkpoint-keep")


def _restored(path: Path, state: dict[str, Any], new_core: Callable[[str, Hyperparameters], Core], now: float) -> Core:
    """A checkpoint as a core. Raises BadCheckpoint; it stays where it is then, for the fault may be this start's alone."""
    try:
        core = new_core(state["run_id"], Hyperparameters(**state["hyperparameters"]))
    except ValueError as error:
        raise checkpoint.BadCheckpoint(f"can't go on with the settings of {path}: {error}") from error
    checkpoint.restore(path, state, core, now)
    return core


def capture(core: Core, journal: Journal | None, scratch: Scratch | None = None) -> Capture:
    """Between two commits: what a checkpoint of the present state is to hold, which the log follows from now on."""
    if journal is None:
        return checkpoint.capture(core, scratch=scratch)
    position = journal.cut()
    core.record = journal.append
    return checkpoint.capture(core, position, scratch)


def save(directory: Path, captured: Capture, keep: int, storage: Storage | None = None, logger: Logger | None = None) -> Path:
    """Writes a checkpoint, then removes older ones and the part of the log that no checkpoint needs. Raises OSError if the
    checkpoint can't be written; `log` is told if older ones can't be removed."""
    path = checkpoint.write(directory, captured, keep, storage, logger)
    forget_segments(directory, storage)
    return path


def begin_life(core: Core) -> None:
    """Once a start has saved what it recovered: notes its settings, for who must replay from an older checkpoint."""
    core.record(Record(Kind.BEGAN, asdict(core.settings)))


def replay(
    checkpoints: Path, state: dict[str, Any], core: Core, now: float, until: int | None = None
) -> tuple[int, Path | None]:
    """Has everything happen in a core, which holds a checkpoint, that the log tells of since.

    Args:
        checkpoints: The run's folder.
        state: The checkpoint's.
        core: What it was restored to.
        now: When the leases begin to run.
        until: The version to stop at; the newest, by default.

    Returns:
        The number of the last record, and the segment that ends within one, if any.

    Raises:
        DamagedLog: Something that was acknowledged is missing, or does not fit.
        OSError: The log can't be read.
    """
    if "log" not in state:
        return 0, None
    position = LogPosition(*state["log"])
    number, log = position.number, Log(log_directory(checkpoints), position, core.run_id)
    for entry in log.entries():
        if until is not None and core.central.version >= until:
            break
        apply(core, entry.record, now)
        number = entry.number
    return number, log.torn


def next_serial(checkpoints: Path) -> int:
    """The segment that a new start writes first: after those that there are, and after those that a checkpoint names as the
    next. Of these none may have been written yet, and an older checkpoint that had to stand in would not look before it."""
    named = [position.serial for position in map(log_position_of, checkpoint.list_checkpoints(checkpoints)) if position]
    return max([*serials(log_directory(checkpoints)), *named], default=0) + 1


def forget_segments(checkpoints: Path, storage: Storage | None = None) -> None:
    """Puts aside the segments that no checkpoint in the folder needs any more."""
    storage, directory = storage or Storage(), log_directory(checkpoints)
    with suppress(OSError):  # it is tried again with the next checkpoint
        needed = min(
            (
                position.serial
                for position in map(log_position_of, checkpoint.list_checkpoints(checkpoints, storage))
                if position
            ),
            default=None,
        )
        forgotten = [serial for serial in serials(directory) if needed is None or serial < needed]
        if forgotten:
            storage.sync_directory(checkpoints)  # a checkpoint that was removed must not come back and miss them
        for serial in forgotten:
            put_aside(storage, directory, serial)


def log_position_of(path: Path) -> LogPosition | None:
    """Where the log goes on after a checkpoint; None where it kept none."""
    try:
        log = json.loads((path / "state.json").read_text(encoding="utf-8")).get("log")
        return LogPosition(*log) if log else None
    except (OSError, ValueError, TypeError):
        return LogPosition(0, 0)  # it can't be read now: whatever it needs stays
