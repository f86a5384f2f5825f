"""A segment: one file of the log, a sequence of records with checksums. It distinguishes a torn tail from damage.

segment-<serial>   little-endian
    header   "GEMLOG2\\n", u64 serial, u64 number of the first record, u32 seed, 8 characters of run id, 20 of the release that
             writes it, u32 CRC-32C of these. In format 1 ("GEMLOG1\\n") the release is missing; in higher formats it stays here
    record   "GEMr", u32 CRC-32C of the following 32 bytes, u64 number, u64 durable, u32 bytes of text, u64 bytes of payload,
             u32 CRC-32C of both; the text (JSON), the payload, zeros up to a multiple of 8 bytes
    zeros    allocated ahead; or the remains of an older segment whose file is reused

A file gets its name when its header is on the disk. Files of obsolete segments are renamed to spare-<serial> and reused: a disk
overwrites a file much faster than it allocates a new one. Each checksum starts from the segment's random seed, so that the
remains of an older segment are never taken for records of this one. `durable` is the number of the last record that was on the
disk when this one was written. It tells a torn tail, which was never acknowledged, from a hole among acknowledged records.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c
from gem_api import __version__
from gem_api.formats import LOG, not_understood, of_another_release
from gem_api.framing import Bytes
from gem_api.process.regular_file import open_regular
from gem_api.schema import BIG, COUNT, REAL, Maybe, Schema, require

from gem_server.core.records import Kind, Record
from gem_server.durability.state import require_hyperparameters
from gem_server.durability.storage import FULL, NewFile, NoRoom, Storage

_HEADER = struct.Struct("<8sQQI8s20s")
_HEADER_1 = struct.Struct("<8sQQI8s")
_RECORD = struct.Struct("<QQIQI")
_CRC = struct.Struct("<I")
_MAGIC, _MARK = b"GEMLOG%d\n" % LOG, b"GEMr"
_ANY_MAGIC = re.compile(rb"GEMLOG([1-9])\n")
_HEADER_BYTES = _HEADER.size + _CRC.size
_PREFIX = len(_MARK) + _CRC.size
_RECORD_BYTES = _PREFIX + _RECORD.size
_ALIGNMENT = 8
_ALLOCATION = 64 << 20
_NAME = re.compile(r"segment-(\d{8,})")
MAX_SPARES = 2
_SCHEMAS: dict[Kind, Schema] = {
    Kind.OPENED: {"lease": str, "worker": str, "overlap": bool, "owner": str},
    Kind.ENDED: {"lease": str, "reason": str},
    Kind.PULLED: {"lease": str, "version": COUNT},
    Kind.COMMITTED: {
        "ticket": COUNT, "lease": str, "sequence": COUNT, "base_version": COUNT, "version": COUNT, "dtype": COUNT,
        "loss": Maybe(REAL), "samples": COUNT, "norm": Maybe(REAL), "weight": REAL,
    },
    Kind.RELEASED: {"leases": [(str, REAL)], "source": str, "version": COUNT},
    Kind.DEALT: {"lease": str, "samples": BIG, "holding": [BIG]},
    Kind.COMPLETED: {"lease": str, "shard": BIG},
}  # fmt: skip
_COMMITTED_1 = {name: each for name, each in _SCHEMAS[Kind.COMMITTED].items() if name != "weight"}  # of format 1


class DamagedLog(Exception):
    """An acknowledged record is damaged or missing; the message names the file and the byte."""


class ForeignLog(DamagedLog):
    """Another release wrote a segment that this one does not understand. It is not damaged."""


class Entry(NamedTuple):
    """A record in a segment: its number (the run's first is 1), and the byte at which it ends."""

    number: int
    record: Record
    end: int


def name(serial: int) -> str:
    """The file name of a segment."""
    return f"segment-{serial:08d}"


def spares(directory: Path) -> list[Path]:
    """Files to be reused."""
    return sorted(directory.glob("spare-*"))


def put_aside(storage: Storage, directory: Path, serial: int, reuse: bool) -> None:
    """Retires a segment: with `reuse`, keeps its file as a spare if there are fewer than MAX_SPARES, else removes it. Raises
    OSError."""
    path = directory / name(serial)
    if reuse and len(spares(directory)) < MAX_SPARES:
        storage.rename(path, directory / path.name.replace("segment", "spare"))
    else:
        storage.remove(path)


def serials(directory: Path) -> list[int]:
    """The segments in a folder, in order."""
    matches = (_NAME.fullmatch(entry.name) for entry in directory.glob("segment-*"))
    return sorted(int(match[1]) for match in matches if match)


def _take_spare(storage: Storage, directory: Path) -> tuple[Path, NewFile, int]:
    """A file for a segment, with its path and size: a spare one to be written over, or a new one."""
    path = next(iter(spares(directory)), None)
    if path is None:
        path = directory / "spare-new"
        return path, storage.create(path), 0
    storage.sync_directory(directory)  # after a crash it must not reappear under its old name with new content
    return path, storage.reopen(path), path.stat().st_size


class SegmentWriter:
    """A new segment, from record number `first` on; `seed` is 32 random bits. All methods raise OSError, and NoRoom if the disk
    can't hold it; a batch that failed can be written again."""

    def __init__(self, storage: Storage, directory: Path, serial: int, first: int, seed: int, run_id: str) -> None:
        self.serial = serial
        self._seed = seed
        path, self._file, self._allocated = _take_spare(storage, directory)
        try:
            header = _HEADER.pack(_MAGIC, serial, first, seed, run_id.encode(), __version__.encode())
            self._end = _aligned(_HEADER_BYTES)
            self._allocate(self._end)
            self._file.write(0, [header + _CRC.pack(crc32c(header))])
            self._file.sync()
            storage.rename(path, directory / name(serial))
            storage.sync_directory(directory)
        except BaseException:
            self._file.close()
            raise

    def write(self, batch: Iterable[tuple[int, Record]], durable: int) -> None:
        """Writes records with their numbers. They are on the disk when a `sync` that begins later has returned."""
        pieces: list[Bytes] = []
        end = self._end
        for number, record in batch:
            encoded = encode(number, to_text(record), record.payload, durable, self._seed)
            pieces += encoded
            end += sum(map(len, encoded))
        self._allocate(end)
        self._file.write(self._end, pieces)
        self._end = end

    def sync(self) -> None:
        """Returns once everything written is on the disk; from any thread, while more is written."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _allocate(self, end: int) -> None:
        if end > self._allocated:
            size = -(-end // _ALLOCATION) * _ALLOCATION
            try:
                self._file.allocate(size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise NoRoom(error, size - self._allocated) from None
            self._allocated = size


def encode(number: int, text: bytes, payload: Sequence[Bytes], durable: int, seed: int) -> list[Bytes]:
    """A record's bytes in the file, in pieces; those of the payload are not copied."""
    size, check = 0, crc32c(text, seed)
    for piece in payload:
        size, check = size + len(piece), crc32c(piece, check)
    fields = _RECORD.pack(number, durable, len(text), size, check)
    padding = bytes(-(_RECORD_BYTES + len(text) + size) % _ALIGNMENT)
    return [_MARK + _CRC.pack(crc32c(fields, seed)) + fields + text, *payload, padding]


class Segment:
    """A segment to be read.

    Args:
        path: Its file.

    Attributes:
        number: Its format.
        serial: The segment's serial number.
        first: Number of its first record.
        run_id: The run's id.
        release: The release that wrote it; empty in format 1.
        torn: Whether part of a further record was found; known once `entries` is exhausted.

    Raises:
        ForeignLog: It is of a higher format.
        DamagedLog: It is not a segment, or its header is damaged.
        OSError: It can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn, self.number = False, LOG
        try:
            with open_regular(path) as file:
                size = path.stat().st_size
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
        except ValueError as error:
            raise DamagedLog(f"{error}: it is not a log segment") from None
        layout = self._layout()
        header, self._begin = self._data[: layout.size], _aligned(layout.size + _CRC.size)
        if len(self._data) < layout.size + _CRC.size or _CRC.unpack_from(self._data, layout.size)[0] != crc32c(header):
            raise DamagedLog(f"{path}: its header is damaged, or it is not a log segment")
        magic, self.serial, self.first, self._seed, run_id, *release = layout.unpack(header)
        self.run_id = run_id.decode(errors="replace")
        self.release = _text(release[0]) if release else ""
        if not _ANY_MAGIC.fullmatch(magic) or path.name != name(self.serial):
            raise DamagedLog(f"{path}: its header belongs to segment {self.serial}, or it is not a log segment")

    def _layout(self) -> struct.Struct:
        """The header's layout by the segment's format. Raises ForeignLog if that is a higher one."""
        match = _ANY_MAGIC.fullmatch(bytes(self._data[: len(_MAGIC)]))
        if match is None:
            return _HEADER
        if (number := int(match[1])) > LOG:
            release = _text(bytes(self._data[_HEADER_1.size : _HEADER.size]))
            raise ForeignLog(of_another_release(self.path, number, LOG, release))
        self.number = number
        return _HEADER_1 if number == 1 else _HEADER

    def entries(self) -> Iterator[Entry]:
        """The complete records in order, up to a torn tail. A record's payload is a view of the file.

        Raises:
            DamagedLog: A damaged record had reached the disk, according to a later one.
        """
        at, number = self._begin, self.first
        while (entry := self._entry(at)) is not None and entry.number == number:
            yield entry
            at, number = entry.end, number + 1
        self._require_torn(at, number)

    def _entry(self, at: int) -> Entry | None:
        """The record that begins at a byte; None if there is no complete one."""
        fields = self._fields(at)
        if fields is None:
            return None
        number, _, text_size, payload_size, check = fields
        begin = at + _RECORD_BYTES
        middle, end = begin + text_size, begin + text_size + payload_size
        if end > len(self._data) or crc32c(self._data[begin:end], self._seed) != check:
            return None
        try:
            record = from_text(self._data[begin:middle], self._data[middle:end], self.number)
        except (ValueError, TypeError) as error:
            what = f"{self.path}: record {number} at byte {at}"
            raise ForeignLog(not_understood(what, error, self.release)) from None
        return Entry(number, record, at + _aligned(end - at))

    def _fields(self, at: int) -> tuple[int, int, int, int, int] | None:
        """The fields before a record at a byte; None if they are damaged."""
        body = self._data[at + _PREFIX : at + _RECORD_BYTES]
        if len(body) < _RECORD.size or self._data[at : at + len(_MARK)] != _MARK:
            return None
        if _CRC.unpack_from(self._data, at + len(_MARK))[0] != crc32c(body, self._seed):
            return None
        number, durable, text_size, payload_size, check = _RECORD.unpack(body)
        return number, durable, text_size, payload_size, check

    def _require_torn(self, at: int, number: int) -> None:
        """Raises DamagedLog if the record `number`, missing at a byte, had been acknowledged."""
        # Not by the map's `find`, which crashes the interpreter in Python 3.11.2.
        for found in (match.start() for match in re.compile(re.escape(_MARK)).finditer(self._data, at)):
            fields = self._fields(found)
            if fields is not None:
                self.torn = True
            if fields is not None and fields[1] >= number:
                raise DamagedLog(
                    f"{self.path} has a hole: record {number}, at byte {at}, is damaged or missing. It had reached the disk, "
                    f"according to record {fields[0]} at byte {found}"
                )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# -- a record's text


def to_text(record: Record) -> bytes:
    """A record's kind and fields as JSON."""
    return json.dumps([record.kind, record.fields], separators=(",", ":")).encode()


def from_text(text: bytes | memoryview, payload: memoryview, number: int = LOG) -> Record:
    """The inverse of `to_text`, of a format. Raises ValueError if the text is not a record's."""
    try:
        kind, fields = json.loads(bytes(text))
    except RecursionError:
        raise ValueError("its text is nested too deeply") from None
    if kind == Kind.BEGAN:
        require_hyperparameters(fields, kind, number)
    else:
        require(fields, _COMMITTED_1 if number == 1 and kind == Kind.COMMITTED else _SCHEMAS[Kind(kind)], kind)
    return Record(Kind(kind), fields, (payload,))
