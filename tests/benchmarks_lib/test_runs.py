"""What is missing is made: whatever becomes of one run, the others are made and what there is is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.lib.launch import RunFailed, launch
from benchmarks.lib.results import Store
from benchmarks.lib.runs import make_missing


@dataclass(frozen=True)
class Settings:
    number: int


Runs = Store[Settings, int]


@pytest.fixture
def store(tmp_path: Path) -> Runs:
    return Store(tmp_path / "runs.json", "run", Settings, lambda found: {"found": found}, lambda key, row: int(row["found"]))


def drawn() -> Path:
    return Path("page.md")


def failing() -> int:
    raise RunFailed("no luck")


def interrupted() -> int:
    raise KeyboardInterrupt


def test_one_failure_does_not_keep_the_others_from_being_made(store: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        make_missing([(store, Settings(1), failing), (store, Settings(2), lambda: 22)], drawn)
    said = capsys.readouterr()
    assert "22, 0 s" in said.out
    assert said.out.endswith("results: page.md\n")
    assert said.err.splitlines()[1:] == ["  Settings(number=1): no luck"]


def test_an_interruption_draws_what_there_is(store: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="130"):
        make_missing([(store, Settings(1), interrupted), (store, Settings(2), failing)], drawn)
    said = capsys.readouterr()
    assert said.out == "Settings(number=1)\nresults: page.md\n"
    assert "the same command continues" in said.err


def test_what_has_a_result_is_not_made_and_what_is_made_is_kept(store: Runs) -> None:
    """A run may be wanted because of the results before it."""
    store.add(Settings(1), 1)

    def wanted() -> Iterator[tuple[Runs, Settings, Callable[[], int]]]:
        yield store, Settings(1), lambda: pytest.fail("it has a result")
        yield store, Settings(2), lambda: 3
        yield store, Settings(store[Settings(2)]), lambda: 4

    make_missing(wanted(), drawn)
    assert store == {Settings(1): 1, Settings(2): 3, Settings(3): 4}


def test_a_command_that_is_interrupted_is_ended(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"

    def watch() -> None:
        if output.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch([sys.executable, "-uc", "import os, signal; print(os.getpid()); signal.pause()"], output, watch)
    assert not Path(f"/proc/{int(output.read_text())}").exists()
