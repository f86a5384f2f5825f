"""Lines of progress: nothing depends on them, so that no program ends because one can't be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

import pytest
from gem_api.process.progress import end_output, say


@contextmanager
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Has standard output be a pipe: its reading end, and the stream. Not a fixture: pytest captures the output anew later."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(writing, "w", encoding="ascii") as stream, redirect_stdout(stream):
        yield reading, stream


def test_a_line_is_there_at_once_also_if_the_encoding_lacks_its_letters() -> None:
    with pipe() as (reading, _):
        say("median π")
        assert os.read(reading, 100) == b"median \\u03c0\n"
        os.close(reading)


def test_a_reader_that_goes_ends_nothing() -> None:
    with pipe() as (reading, _):
        say("one")
        os.close(reading)
        say("two")
        say("three")
        print("a task's own line" * 10_000)  # more than the buffer holds
        end_output()
    # and the stream was closed, as the interpreter does at the exit


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_ends_nothing() -> None:
    with open("/dev/full", "w") as stream, redirect_stdout(stream):
        say("one")
        print("a task's own line")
        end_output()


def test_without_standard_output_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    say("one")
    end_output()
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    say("one")
    end_output()
