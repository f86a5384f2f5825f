"""A log line that can't be written is counted, and never ends what is logged about."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from gem_api.process import logs
from gem_api.process.settings import LOG_FORMATS

FULL = Path("/dev/full")  # every write to it fails: no space is left
needs_full = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    before, last_resort = structlog.get_config(), logging.lastResort
    yield
    structlog.configure(**before)
    logging.lastResort = last_resort


@pytest.fixture
def on_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], io.TextIOWrapper]]:
    """Makes a descriptor the process's standard error, as far as Python code knows."""
    opened: list[io.TextIOWrapper] = []

    def use(descriptor: int) -> io.TextIOWrapper:
        opened.append(os.fdopen(descriptor, "w", encoding="utf-8"))
        monkeypatch.setattr(sys, "stderr", opened[-1])
        return opened[-1]

    yield use
    for stream in opened:
        stream.close()


@needs_full
@pytest.mark.parametrize("form", LOG_FORMATS)
def test_lines_that_a_full_disk_refuses_are_counted_once_there_is_room(
    form: str, on_stderr: Callable[[int], io.TextIOWrapper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's, so that nobody has set up the standard module
    stderr = on_stderr(os.open(FULL, os.O_WRONLY))
    logger = logs.configure(form)
    for number in range(3):
        logger.info("lost", number=number)
    logging.getLogger("asyncio").error("lost too")
    with (tmp_path / "log").open("w") as room:
        os.dup2(room.fileno(), stderr.fileno())
    logger.error("written \udcff", number=3)
    logging.getLogger("asyncio").error("written too")
    note, *lines = (tmp_path / "log").read_text().splitlines()
    said = "4 log lines before this one could not be written"
    if form == "json":
        assert json.loads(note)["event"] == said
        assert [json.loads(line)["event"] for line in lines] == ["written \udcff", "written too"]
    else:
        assert said in note
        assert [part in line for part, line in zip(["written \\udcff", "written too"], lines, strict=True)] == [True, True]


def test_a_closed_pipe_ends_nobody(on_stderr: Callable[[int], io.TextIOWrapper]) -> None:
    reading, writing = os.pipe()
    on_stderr(writing)
    logger = logs.configure("text")
    logger.info("read")
    assert b"read" in os.read(reading, 1000)
    os.close(reading)
    for _ in range(2):
        logger.info("lost")
    try:
        raise ValueError("an error")
    except ValueError:
        logger.exception("lost with its traceback")


def test_a_closed_stream_ends_nobody(on_stderr: Callable[[int], io.TextIOWrapper]) -> None:
    stderr = on_stderr(os.open(os.devnull, os.O_WRONLY))
    logger = logs.configure("json")
    stderr.close()
    logger.warning("lost")


def test_a_stand_in_for_standard_error_gets_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Ray actor, which copies what is written there."""
    stand_in = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stand_in)
    logs.configure("json").info("told", who="the launcher")
    assert json.loads(stand_in.getvalue())["who"] == "the launcher"


def test_a_line_cut_short_ends_before_the_next(
    on_stderr: Callable[[int], io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    on_stderr(writing)
    logger = logs.configure("json")
    room = [9, 0]  # bytes that the disk takes, then none
    write = os.write

    def grudging(descriptor: int, data: bytes) -> int:
        taken = room.pop(0) if room else len(data)
        if not taken:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", grudging)
    logger.info("cut short")
    logger.info("whole")
    cut, note, line = os.read(reading, 10_000).decode().splitlines()
    os.close(reading)
    assert len(cut) == 9
    assert json.loads(note)["event"].startswith("1 log line before this one")
    assert json.loads(line)["event"] == "whole"
