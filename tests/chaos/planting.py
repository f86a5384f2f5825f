"""Changes what a run left, to plant what a checker must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gem_server.core.records import Kind, Record
from gem_server.durability.segment import Segment, SegmentWriter, name, serials
from gem_server.durability.storage import Storage


def records_of(log: Path) -> list[Record]:
    """The records of a log."""
    segments = [Segment(log / name(serial)) for serial in serials(log)]
    return [entry.record for segment in segments for entry in segment.entries()]


def rewrite(log: Path, records: list[Record]) -> None:
    """Puts these in the place of a log: whole, as if they were what happened."""
    run_id = Segment(log / name(1)).run_id
    for serial in serials(log):
        (log / name(serial)).unlink()
    writer = SegmentWriter(Storage(), log, 1, 1, 7, run_id)
    writer.write(list(enumerate(records, 1)), 0)
    writer.close()


def is_commit(record: Record) -> bool:
    return record.kind is Kind.COMMITTED


def last_commit(records: list[Record]) -> int:
    return max(at for at, record in enumerate(records) if is_commit(record))


def lines_in(diary: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in diary.read_text().splitlines()]


def tell(diary: Path, line: dict[str, Any]) -> None:
    """Has a worker say something more."""
    with diary.open("a") as file:
        file.write(json.dumps(line) + "\n")
