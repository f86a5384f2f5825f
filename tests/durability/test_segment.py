"""A segment as it is read back: a record that was acknowledged is never lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from gem_server.core.records import Kind, Record
from gem_server.durability.segment import _MARK, _PREFIX, _RECORD, DamagedLog, Segment, SegmentWriter, name
from gem_server.durability.storage import Storage

RECORDS = 4


def written(folder: Path, behind: int) -> Path:
    """A segment in which each record was written when all before it were on the disk, but for the last `behind`."""
    writer = SegmentWriter(Storage(), folder, serial=1, first=1, seed=7, run_id="run-0001")
    for number in range(1, RECORDS + 1):
        record = Record(Kind.ENDED, {"lease": f"lease-{number}", "reason": "left"})
        writer.write([(number, record)], durable=max(0, number - 1 - behind))
    writer.sync()
    writer.close()
    return folder / name(1)


@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("damaged", range(1, RECORDS + 1))
def test_a_damaged_record_is_refused_if_a_later_one_was_written_when_it_was_on_the_disk(
    damaged: int, behind: int, tmp_path: Path
) -> None:
    path = written(tmp_path, behind)
    data = bytearray(path.read_bytes())
    data[data.index(f"lease-{damaged}".encode())] ^= 1
    path.write_bytes(data)
    segment = Segment(path)
    if RECORDS - 1 - behind >= damaged:
        with pytest.raises(DamagedLog, match=f"record {damaged}, at byte"):
            list(segment.entries())
    else:
        assert [entry.number for entry in segment.entries()] == list(range(1, damaged))
        assert segment.torn


def test_a_last_record_with_a_damaged_head_proves_nothing(tmp_path: Path) -> None:
    """What it says of the records before it may be damaged too."""
    path = written(tmp_path, 0)
    data = bytearray(path.read_bytes())
    body = data.rindex(_MARK) + _PREFIX
    number, _, *rest = _RECORD.unpack_from(data, body)
    _RECORD.pack_into(data, body, number, RECORDS + 5, *rest)
    path.write_bytes(data)
    assert [entry.number for entry in Segment(path).entries()] == list(range(1, RECORDS))
