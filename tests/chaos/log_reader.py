"""A second, independent reader of the log's files, written from the description of the format. It shares no code with the
server."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

_HEADER = struct.Struct("<8sQQI8s20sI")  # magic, serial, first record, seed, run, release, CRC
_RECORD = struct.Struct("<4sIQQIQI")  # mark, CRC, number, durable, bytes of text, bytes of payload, CRC of both


class BrokenLog(Exception):
    """The log has a hole, or is not a log."""


class Entry(NamedTuple):
    """One record of the run."""

    number: int
    kind: str
    fields: dict[str, Any]
    payload: memoryview


def entries(folder: Path, run_id: str, first: int) -> Iterator[Entry]:
    """All records of the segments in a folder, from number `first` on. Raises BrokenLog if one is missing."""
    due = first
    for path in sorted(folder.glob("segment-*"), key=lambda path: int(path.name.removeprefix("segment-"))):
        data, begin, seed = _open(path, run_id)
        if begin != due:
            raise BrokenLog(f"{path.name} begins with record {begin}; expected was {due}")
        for entry in _whole(data, begin, seed):
            yield entry
            due = entry.number + 1


def _open(path: Path, run_id: str) -> tuple[memoryview, int, int]:
    """A segment's bytes, the number of its first record, its seed."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b"")
    header = bytes(data[: _HEADER.size])
    if len(header) < _HEADER.size:
        raise BrokenLog(f"{path.name} has no header")
    magic, serial, begin, seed, run, _, check = _HEADER.unpack(header)
    if magic != b"GEMLOG2\n" or check != crc32c(header[:-4]) or run.decode() != run_id or path.name != f"segment-{serial:08d}":
        raise BrokenLog(f"{path.name} has a damaged header, or another run's")
    return data, begin, seed


def _whole(data: memoryview, number: int, seed: int) -> Iterator[Entry]:
    """The records up to the first incomplete one."""
    at = -(-_HEADER.size // 8) * 8
    while at + _RECORD.size <= len(data):
        mark, check, found, _, text_bytes, payload_bytes, content_check = _RECORD.unpack_from(data, at)
        begin = at + _RECORD.size
        middle, end = begin + text_bytes, begin + text_bytes + payload_bytes
        if mark != b"GEMr" or found != number or check != crc32c(data[at + 8 : begin], seed) or end > len(data):
            return
        if content_check != crc32c(data[begin:end], seed):
            return
        kind, fields = json.loads(bytes(data[begin:middle]))
        yield Entry(number, kind, fields, data[middle:end])
        at, number = at + -(-(end - at) // 8) * 8, number + 1
