"""What is missing is made: whatever becomes of one run, the others are made and what there is is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.launch import RunFailed
from benchmarks.lib.runs import make_missing


def drawn() -> Path:
    return Path("page.md")


def test_one_failure_does_not_keep_the_others_from_being_made(capsys: pytest.CaptureFixture[str]) -> None:
    def make(run: int) -> str:
        if run == 1:
            raise RunFailed("no luck")
        return f"made {run}"

    with pytest.raises(SystemExit, match="1"):
        make_missing([("one", 1), ("two", 2)], make, drawn)
    said = capsys.readouterr()
    assert "made 2, 0 s" in said.out
    assert said.out.endswith("results: page.md\n")
    assert said.err.splitlines()[1:] == ["  one: no luck"]


def test_an_interruption_draws_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    def make(run: int) -> str:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        make_missing([("one", 1), ("two", 2)], make, drawn)
    said = capsys.readouterr()
    assert (said.out, "the same command continues" in said.err) == ("one\nresults: page.md\n", True)
