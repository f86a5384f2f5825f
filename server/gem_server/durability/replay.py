"""Rebuilds a run from its log: applies every record to the core, in the same order and with the same rule as in the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gem_api.errors import GemError, RuleFailed
from gem_api.framing import empty
from gem_api.hyperparameters import Hyperparameters
from gem_api.wire import wire_format

from gem_server.core.records import Kind, Record
from gem_server.core.releases import release
from gem_server.core.state_machine import Core
from gem_server.core.uploads import Upload
from gem_server.core.values import EndReason, Header
from gem_server.durability.journal import LogPosition
from gem_server.durability.segment import DamagedLog, Entry, Segment, name, serials


class Log:
    """The log's segments from a position on, as one sequence of records.

    Args:
        directory: The log's folder.
        since: The checkpoint's log position: the first segment to read, and the number of the last record before it.
        run_id: The run that they must belong to.

    Attributes:
        torn: The segment that ends in a partial record, if any: the one being written when the server died.
        missing: The first segment, if no segment is there; known once `entries` has begun. Nothing is wrong if nothing happened
            after the checkpoint.
    """

    def __init__(self, directory: Path, since: LogPosition, run_id: str) -> None:
        self._directory = directory
        self._since = since
        self._run_id = run_id
        self.torn: Path | None = None
        self.missing: Path | None = None

    def entries(self) -> Iterator[Entry]:
        """The records in order. Raises DamagedLog if one that had reached the disk is missing."""
        due = self._since.number + 1
        there = [serial for serial in serials(self._directory) if serial >= self._since.serial]
        self.missing = None if there else self._directory / name(self._since.serial)
        for serial in there:
            segment = self._segment(serial)
            if segment.first != due:
                raise DamagedLog(
                    f"{segment.path} begins with record {segment.first}, but record {due} is due: the log lacks what comes "
                    f"before it; put the missing segments back into {self._directory} from a backup. If you move that folder "
                    "away, the run continues from the checkpoint alone, and what was acknowledged since is lost"
                )
            for entry in segment.entries():
                yield entry
                due = entry.number + 1
            self.torn = segment.path if segment.torn else self.torn

    def _segment(self, serial: int) -> Segment:
        segment = Segment(self._directory / name(serial))
        if segment.run_id != self._run_id:
            raise DamagedLog(f"{segment.path} belongs to run {segment.run_id}, not to {self._run_id}")
        return segment


def apply(core: Core, record: Record, now: float) -> None:
    """Applies a record to the core. Raises DamagedLog if it does not fit the core's state."""
    try:
        _apply(core, record, now)
    except (GemError, KeyError, ValueError, TypeError) as error:
        raise DamagedLog(f"a record does not fit the run so far ({record.kind} {record.fields}): {error}") from error


def _apply(core: Core, record: Record, now: float) -> None:
    fields = record.fields
    match record.kind:
        case Kind.BEGAN:
            core.change(Hyperparameters(**fields))
        case Kind.OPENED:
            core.reopen(fields["lease"], fields["worker"], fields["overlap"], fields["owner"], now)
        case Kind.ENDED:
            core.leave(fields["lease"], EndReason(fields["reason"]))
        case Kind.PULLED:
            _pulled(core, fields)
        case Kind.COMMITTED:
            _committed(core, record, now)
        case Kind.RELEASED:
            _released(core, fields)
        case Kind.DEALT:
            core.deal(core.leases.get(fields["lease"]), fields["samples"], fields["holding"])
        case Kind.COMPLETED:
            core.complete_shard(fields["lease"], fields["shard"], now)


def _pulled(core: Core, fields: dict[str, Any]) -> None:
    lease = core.leases.get(fields["lease"])
    _require_version(core.central.version, fields["version"])
    with suppress(RuleFailed):  # the rule raised in the run too
        core.pull(lease)


def _committed(core: Core, record: Record, now: float) -> None:
    fields = record.fields
    lease = core.leases.get(fields["lease"])
    (payload,) = record.payload
    header = _header(core, fields)
    gradient = empty(core.central.size)
    wire_format(fields["dtype"]).assembly(gradient).add_all(memoryview(payload))
    core.next_ticket = fields["ticket"]
    commit = core.ticket(lease, header, now, Upload(gradient))._replace(norm=fields["norm"])  # which was judged in the run
    step = core.begin(commit)
    _require_version(core.central.version + step.accepted, fields["version"])
    try:
        core.finish(step, step.run(), now)
    except RuleFailed:  # the rule raised in the run too, and the commit was rejected; if not, the next version does not match
        core.failed(commit)


def _header(core: Core, fields: dict[str, Any]) -> Header:
    """The header of a recorded commit. Raises ValueError if its base version does not exist yet."""
    if fields["base_version"] > core.central.version:
        raise ValueError(f"base version {fields['base_version']} does not exist there")
    layout = core.central.layout
    assert layout is not None
    return Header(
        fields["lease"], fields["sequence"], fields["base_version"], layout.fingerprint, fields["loss"], fields["samples"],
        core.rule.kind, fields.get("weight", 1.0),
    )  # fmt: skip


def _released(core: Core, fields: dict[str, Any]) -> None:
    _require_version(core.central.version, fields["version"])
    source = core.leases.get(fields["source"]) if fields["source"] else None
    release(core, [(core.leases.get(lease_id), ratio) for lease_id, ratio in fields["leases"]], source)


def _require_version(found: int, recorded: int) -> None:
    if found != recorded:
        raise ValueError(f"the run is at version {found} there")
