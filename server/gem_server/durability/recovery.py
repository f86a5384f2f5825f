"""Recovers a run after a crash from the newest complete checkpoint and the log since; writes checkpoints that a log follows."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gem_api.checkpoint import STATE
from gem_api.formats import CHECKPOINT, MAX_STATE_BYTES, checkpoint_number
from gem_api.hyperparameters import Hyperparameters
from gem_api.process.logs import Logger
from gem_api.process.regular_file import read_regular
from gem_api.schema import COUNT, Maybe, require

from gem_server.core.records import Kind, Record
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint
from gem_server.durability.capture import Capture
from gem_server.durability.journal import Journal, LogPosition
from gem_server.durability.replay import Log, apply
from gem_server.durability.scratch import Scratch
from gem_server.durability.segment import put_aside, serials
from gem_server.durability.state import State
from gem_server.durability.storage import DISK, FULL, Storage

UNREADABLE = LogPosition(0, 0)  # of a checkpoint that can't be read now: it may need any segment


def log_directory(checkpoints: Path) -> Path:
    """The folder of the log, beside a run's checkpoints."""
    return checkpoints / "log"


class Recovered(NamedTuple):
    """A recovered run.

    Attributes:
        core: The run's state when the server died.
        checkpoint: The checkpoint that it was restored from.
        saved: That checkpoint's version.
        number: Number of the log's last record.
        torn: The segment that ends in a partial record, if any; that record was never acknowledged.
        missing: The segment that the checkpoint names, if no log follows it although the run was not stopped with it.
        unlogged: Whether the run went on after that checkpoint, or may have, without a log.
    """

    core: Core
    checkpoint: Path
    saved: int
    number: int
    torn: Path | None
    missing: Path | None
    unlogged: bool


def recover(
    directory: Path,
    new_core: Callable[[str, Hyperparameters], Core],
    now: float,
    refuse: Callable[[Path, str], None],
    *,
    logged: bool,
    random: Callable[[], int] = lambda: 1 + secrets.randbits(30),
) -> Recovered | None:
    """Recovers the run in a folder from its checkpoints and log; None if there is no checkpoint.

    Args:
        directory: The folder.
        new_core: Makes an empty core, given the run's id and its hyperparameters.
        now: The time at which leases are restored. They run from when the server serves (`LeaseTable.begin`).
        refuse: Called for each damaged checkpoint; an older one and the log since then replace it.
        logged: Whether this start keeps a log.
        random: Returns a number below 2³¹ for new shard ids, unless the log records every shard. A start without a log
            leaves no trace of the shards that it dealt, and their ids must not be used again.

    Raises:
        BadCheckpoint: There are checkpoints, but none is complete, or `new_core` rejects the newest one's hyperparameters.
        DamagedLog: An acknowledged record is missing from the log.
        OSError: They can't be read.
    """
    newest = checkpoint.newest(directory, refuse)
    if newest is None:
        return None
    path, state = newest
    core = _restored(path, state, new_core, now)
    saved = core.central.version
    number, torn, missing = replay(directory, state, core, now)
    core.mark_restarted(None if logged and state.log else random())
    return Recovered(core, path, saved, number, torn, None if state.last else missing, not (state.last or state.log))


def rebuild(directory: Path, new_core: Callable[..., Core], version: int | None) -> Core:
    """Rebuilds a run as it was at a version, by default the newest. Changes nothing in the folder.

    `new_core` makes an empty core, given the run's id, its hyperparameters and, as `part`, the part of the model that the
    checkpoint holds.

    Raises:
        ValueError: The checkpoints and the log do not reach that version.
        BadCheckpoint, DamagedLog, OSError: As for `recover`.
    """
    for path in checkpoint.list_checkpoints(directory):
        state = checkpoint.read_state(path)
        if version is None or state.version <= version:
            core = _restored(path, state, partial(new_core, part=state.part), 0.0)
            replay(directory, state, core, 0.0, version)
            if version not in (None, core.central.version):
                raise ValueError(
                    f"the log ends at version {core.central.version}: version {version} was not reached, or was not logged"
                )
            return core
    raise ValueError(f"every checkpoint in {directory} is newer than version {version}; checkpoint_keep sets how many are kept")


def _restored(path: Path, state: State, new_core: Callable[[str, Hyperparameters], Core], now: float) -> Core:
    """Restores a checkpoint into a new core. Raises BadCheckpoint; the checkpoint stays in place, as only this start may be at
    fault."""
    try:
        core = new_core(state.run_id, state.hyperparameters)
    except ValueError as error:
        raise checkpoint.BadCheckpoint(f"can't resume with the hyperparameters of {path}: {error}") from error
    checkpoint.restore(path, state, core, now)
    return core


def capture(core: Core, journal: Journal | None, scratch: Scratch | None = None) -> Capture:
    """Captures the current state; call it between two commits. The log follows this checkpoint from now on."""
    if journal is None:
        return checkpoint.capture(core, scratch=scratch)
    position = journal.cut()
    journal.run_id = core.run_id  # which a server that does not lead gets from the leader
    core.record_to(journal.append)
    return checkpoint.capture(core, position, scratch)


def save(
    directory: Path,
    captured: Capture,
    keep: int,
    storage: Storage = DISK,
    logger: Logger | None = None,
    make_room: bool = False,
) -> Path:
    """Writes a checkpoint, then removes older ones and the part of the log that no checkpoint needs. With `make_room`, on a
    full disk, those that are too many even now go before a second try. Raises OSError if the checkpoint can't be written;
    `logger` reports older ones that can't be removed."""
    try:
        path = checkpoint.write(directory, captured, keep, storage, logger)
    except OSError as error:
        if not (make_room and error.errno in FULL and checkpoint.make_room(directory, keep, storage)):
            raise
        forget_segments(directory, storage, reuse=False)
        path = checkpoint.write(directory, captured, keep, storage, logger)
    forget_segments(directory, storage)
    return path


def begin_life(core: Core) -> None:
    """Records the hyperparameters of a start, after its checkpoint, for a replay from an older checkpoint."""
    core.record(Record(Kind.BEGAN, asdict(core.settings)))


def replay(
    checkpoints: Path, state: State, core: Core, now: float, until: int | None = None
) -> tuple[int, Path | None, Path | None]:
    """Replays the log onto a core restored from a checkpoint.

    Args:
        checkpoints: The run's folder.
        state: The checkpoint's.
        core: The core that it was restored to.
        now: The time at which leases are restored.
        until: The version to stop at; the newest, by default.

    Returns:
        The number of the last record; the segment that ends in a partial one, if any; and the segment that the checkpoint
        names, if no log follows it.

    Raises:
        DamagedLog: An acknowledged record is missing, or does not fit the run.
        OSError: The log can't be read.
    """
    if state.log is None:
        return 0, None, None
    number, log = state.log.number, Log(log_directory(checkpoints), state.log, core.run_id)
    for entry in log.entries():
        if until is not None and core.central.version >= until:
            break
        apply(core, entry.record, now)
        number = entry.number
    return number, log.torn, log.missing


def next_serial(checkpoints: Path) -> int:
    """The first segment that a new start writes: after all existing ones, and after those that a checkpoint names as its next.
    A named segment may not exist yet, and a replay from an older checkpoint still expects it."""
    named = [position.serial for position in map(log_position_of, checkpoint.list_checkpoints(checkpoints)) if position]
    return max([*serials(log_directory(checkpoints)), *named], default=0) + 1


def forget_segments(checkpoints: Path, storage: Storage = DISK, reuse: bool = True) -> None:
    """Retires the segments that no checkpoint in the folder needs any more. With `reuse`, keeps files to be written over."""
    directory = log_directory(checkpoints)
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
            put_aside(storage, directory, serial, reuse)


def log_position_of(path: Path) -> LogPosition | None:
    """The log position that follows a checkpoint; None if it has no log; UNREADABLE if that can't be read."""
    try:
        state = json.loads(read_regular(path / STATE, MAX_STATE_BYTES))
        if checkpoint_number(state) > CHECKPOINT:
            return UNREADABLE
        require(state["log"], Maybe((COUNT, COUNT)), "state.log")
        return LogPosition(*state["log"]) if state["log"] else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return UNREADABLE
