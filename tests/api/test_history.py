"""The reader of histories: piece by piece in little memory, and what it makes of damaged files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from gem_api.history import COLUMNS, HistoryError, read_history, written_name

HEADER = ",".join(COLUMNS) + "\r\n"


def line(version: int, worker: str = "ann", loss: str = "0.5") -> str:
    return f"{version},{version},{1.7e9 + version},{worker},1,0,3,{loss},8,0.5,0,0,1,1\r\n"


def read(path: Path) -> tuple[list[str], int]:
    """The undamaged lines, and the number of the others."""
    pieces = list(read_history(path))
    return [one for piece in pieces for one in piece.lines], sum(piece.damaged for piece in pieces)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.long
@pytest.mark.parametrize("longest", ["lines", "one line"])
def test_a_long_history_is_read_in_little_memory(longest: str, tmp_path: Path) -> None:
    path = tmp_path / "h.csv"
    with path.open("w", newline="") as file:
        file.write(HEADER)
        if longest == "lines":
            file.writelines(line(version) for version in range(1, 300_001))
        else:
            file.writelines("1," * 10_000 for _ in range(1000))
    size = path.stat().st_size
    tracemalloc.start()
    try:
        count = sum(len(piece.workers) + piece.damaged for piece in read_history(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == (300_000 if longest == "lines" else 1)
    assert peak < 12e6 < size, f"{peak / 1e6:.1f} MB for a file of {size / 1e6:.1f} MB"


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "h.csv", HEADER + "".join(map(line, range(1, 50_001))))
    pieces = read_history(path, ["loss"])
    assert next(pieces).columns.keys() == {"version", "loss"}
    path.write_bytes(b"")  # the rest
    assert sum(len(piece.workers) for piece in pieces) < 10_000


BAD = {
    "text": "garbage\r\n",
    "text in place of a number": line(2, loss="x"),
    "a field too many": line(2).replace("\r", ",1\r"),
    "NUL bytes in a name": line(2, worker="a\0b"),
    "NUL bytes in a number": line(2, loss="0\0"),
    "not UTF-8": line(2, worker="a\udcff"),
    "too long": line(2, worker="a" * 200_000),
    "no version": line(2).replace("2,", ",", 1),
    "a second header": HEADER,
    "an empty line": "\r\n",
    "a quote without an end": '"' + line(2),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD.keys())
def test_a_damaged_line_is_left_out_and_counted_and_the_others_stay_as_they_are(damage: str, tmp_path: Path) -> None:
    text = HEADER + line(1) + damage + line(3) + line(4, worker='"a,b"')
    path = written(tmp_path / "h.csv", text.encode(errors="surrogateescape"))
    assert read(path) == ([line(1), line(3), line(4, worker='"a,b"')], 1)


@pytest.mark.parametrize("end", ["3", "3,3,17", line(3).rstrip()])
def test_a_last_line_without_an_end_is_still_being_written(end: str, tmp_path: Path) -> None:
    assert read(written(tmp_path / "h.csv", HEADER + line(1) + line(2) + end)) == ([line(1), line(2)], 0)


@pytest.mark.parametrize("content", ["", "\n", "a,b\n1,2\n", "\0" * 1000, "version,ticket\n1,1\n"])
def test_another_file_is_an_error_that_names_it(content: str, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"h\.csv is not a history of gem-server: its first line names no column"):
        read(written(tmp_path / "h.csv", content))


@pytest.mark.parametrize(
    "name",
    ["=cmd|' /C calc'!A0", "+1+1", "-1", "@SUM(A1)", " =1", "＝1", "a;=cmd", "''=1", "a;'=1;b", ';"=1+1&""', "a=b", "it's"],
)
def test_no_spreadsheet_runs_a_workers_name_and_the_reader_gets_it_back(name: str, tmp_path: Path) -> None:
    field = written_name(name)
    for cell in field.split(";"):
        assert not cell.strip(' "').startswith(tuple("=+-@＝＋－＠"))
    quoted = '"' + field.replace('"', '""') + '"'
    (piece,) = read_history(written(tmp_path / "h.csv", HEADER + line(1, worker=quoted)))
    assert piece.workers == [name]
