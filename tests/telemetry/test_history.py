"""The history file: a line of CSV for each applied commit, in order, without commits that a restart has undone."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from gem_api.history import COLUMNS, evaluations_beside, read_history
from gem_api.hyperparameters import Hyperparameters
from gem_api.ranges import Range
from gem_ctl.recorded_run import COMMITS
from gem_server.commit_times import CommitTimes
from gem_server.config import ServerConfig
from gem_server.core.state_machine import Core
from gem_server.telemetry.history import History, open_history
from gem_server.telemetry.progress import Evaluation
from kit.core import commit, make_core, start
from kit.logs import Lines, captured
from kit.raw_client import wired
from kit.server import config, serving

NO_TIME = CommitTimes()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def evaluations(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(evaluations_beside(path).read_text())
    return found


def versions(path: Path) -> list[int]:
    return [int(row["version"]) for row in rows(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.csv"


@pytest.fixture
def log() -> Iterator[Lines]:
    """What the history logs."""
    with captured(logging.INFO) as lines:
        yield lines


def reasons(log: Lines, level: str) -> list[str]:
    return [line["why"] for line in log if line["log_level"] == level]


def begun(path: Path, next_ticket: int) -> History:
    return History(path, next_ticket, lambda: 1700000000.25, structlog.get_logger(), resumed=next_ticket > 1)


def taken_over(path: Path, next_ticket: int) -> History:
    """The history of a server that starts with it."""
    history = open_history(path, next_ticket, lambda: 0.0, structlog.get_logger(), resumed=True)
    assert history is not None
    return history


def write_commits(core: Core, path: Path, count: int) -> History:
    """A history with `count` more commits of the first worker."""
    history = begun(path, core.next_ticket)
    (lease_id, lease), *_ = core.leases.live.items()
    for _ in range(count):
        history.applied(commit(core, lease_id, lease.sequence + 1, 1.0, loss=0.5, samples=8), NO_TIME)
    return history


def training(rule: str = "gem", worker: str = "ann") -> Core:
    core = make_core(Hyperparameters(rule=rule))
    start(core, [worker])
    return core


def test_a_commit_is_one_line_with_all_of_its_facts(path: Path) -> None:
    write_commits(training(), path, 1).close()
    (row,) = rows(path)
    assert tuple(row) == COLUMNS
    stated = {name: row[name] for name in COLUMNS[:9]}
    assert stated == {
        "version": "1", "ticket": "1", "unix_seconds": "1700000000.250000", "worker": "ann",
        "sequence": "1", "discarded": "0", "staleness": "0", "loss": "0.5", "samples": "8",
    }  # fmt: skip
    assert float(row["pi_median"]) == pytest.approx(1, rel=1 / 16)
    assert (row["pi_zero_ratio"], row["pi_max_ratio"]) == ("0.0", "0.0")
    assert float(row["proxy_energy"]) == pytest.approx(9 * 0.5 * 0.05**2)
    assert float(row["central_energy"]) == pytest.approx(9 * 0.5 * 0.05**2)


def test_what_a_rule_or_a_worker_does_not_say_is_left_empty(path: Path) -> None:
    core = training("downpour")
    history = begun(path, 1)
    history.applied(commit(core, "lease-1", 1, 1.0), NO_TIME)
    history.close()
    (row,) = rows(path)
    assert [row[name] for name in ("loss", *COLUMNS[9:])] == [""] * 6


@pytest.mark.parametrize("truncates", [True, False])
def test_a_disk_that_fills_loses_no_line(truncates: bool, path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is an aid, not a promise; what could not be written is tried again."""
    core = training()
    history = begun(path, 1)
    history.applied(commit(core, "lease-1", 1, 1.0), NO_TIME)
    history.flush()
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        fill_up(patch, 30, truncates)
        for sequence in (2, 3):
            history.applied(commit(core, "lease-1", sequence, 1.0), NO_TIME)
            history.flush()
    assert (path.read_bytes() == before) is truncates
    assert reasons(log, "error") == ["No space left on device"]
    history.applied(commit(core, "lease-1", 4, 1.0), NO_TIME)
    history.close()
    assert versions(path) == [1, 2, 3, 4]
    assert [line["event"] for line in log if line["log_level"] == "info"] == ["the history file can be written again"]


def test_lines_that_the_memory_does_not_hold_are_counted(path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_server.telemetry.history.MAX_WAITING", 2)
    core = training()
    history = begun(path, 1)
    with monkeypatch.context() as patch:
        fill_up(patch, 0, True)
        for sequence in range(1, 6):
            history.applied(commit(core, "lease-1", sequence, 1.0), NO_TIME)
    history.flush()
    assert versions(path) == [4, 5]
    assert reasons(log, "warning") == ["3 lines"]
    with monkeypatch.context() as patch:
        fill_up(patch, 0, True)
        history.applied(commit(core, "lease-1", 6, 1.0), NO_TIME)
        history.close()
    assert reasons(log, "error") == ["No space left on device", "1 lines"]


def fill_up(patch: pytest.MonkeyPatch, room: int, truncates: bool) -> None:
    """Lets the disk take `room` bytes more. A disk that fails may not even truncate a file."""
    write = os.pwrite
    left = [room]

    def grudging(descriptor: int, data: bytes, offset: int) -> int:
        taken, left[0] = left[0], 0
        if not taken:
            raise OSError("No space left on device")
        return write(descriptor, data[:taken], offset)

    def refused(descriptor: int, size: int) -> None:
        raise OSError("Input/output error")

    patch.setattr(os, "pwrite", grudging)
    if not truncates:
        patch.setattr(os, "ftruncate", refused)


def test_a_new_file_has_its_header_at_once_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "history.csv"
    history = begun(path, 1)
    assert path.read_text().strip() == ",".join(COLUMNS)
    history.close()


def test_a_resumed_run_goes_on_after_the_lines_that_still_hold(path: Path, log: Lines) -> None:
    """The checkpoint had version 3; lines of later commits, which the crash undid, and a half-written one go. So do their
    evaluations; the log names what is gone."""
    core = training()
    history = write_commits(core, path, 5)
    for version in (3, 4):
        history.evaluations.add(Evaluation(version, 0.5, None))
    history.evaluations.add(Evaluation(5, math.nan, None))
    history.close()
    with path.open("a") as file:
        file.write("3,7,170000")
    kept = rows(path)[:3]
    core.central.version, core.next_ticket = 3, 4
    core.pull(core.leases.get("lease-1"))
    history = write_commits(core, path, 2)
    history.evaluations.add(Evaluation(5, 0.25, 0.75))
    history.close()
    assert [(line["commits"], line["versions"]) for line in log if "the crash has taken" in line["event"]] == [(2, "4 to 5")]
    assert [(row["version"], row["accuracy"]) for row in evaluations(path)] == [(3, None), (5, 0.75)]
    assert rows(path)[:3] == kept
    assert versions(path) == [1, 2, 3, 4, 5]
    assert path.read_text().count("version,ticket") == 1


def test_a_crash_that_takes_everything_is_told_and_the_file_is_that_of_the_same_run(path: Path, log: Lines) -> None:
    history = write_commits(training(), path, 3)
    history.evaluations.add(Evaluation(3, 0.5, None))
    history.close()
    again = taken_over(path, 1)
    assert (versions(path), again.evaluations.last) == ([], None)
    assert [(line["commits"], line["versions"]) for line in log if "the crash has taken" in line["event"]] == [(3, "1 to 3")]
    assert not path.with_name("history.csv.old").exists()
    again.close()


@pytest.mark.parametrize("content", ["[", "7", '[{"version": 1}]', '[{"version": 1, "loss": "x", "accuracy": null}]', "[null]"])
def test_a_damaged_file_of_evaluations_begins_anew(content: str, path: Path) -> None:
    write_commits(training(), path, 3).close()
    evaluations_beside(path).write_text(content)
    history = taken_over(path, 4)
    assert history.evaluations.known == []
    history.evaluations.add(Evaluation(3, 0.5, None))
    history.close()
    assert len(evaluations(path)) == 1


def test_a_resumed_run_gives_the_tickets_of_discarded_commits_only_once(path: Path) -> None:
    """Their lines have the version of the checkpoint, and a crash undid them all the same."""
    core = make_core(Hyperparameters(rule="ringmaster", rule_options="threshold=1"))
    start(core, ["ann", "bob"])
    write_commits(core, path, 1).close()
    for _ in range(2):
        history = History(path, 2, lambda: 0.0, structlog.get_logger(), resumed=True)
        core.next_ticket = 2
        lease = core.leases.get("lease-2")
        lease.base_version, lease.sequence = 0, 0
        history.applied(commit(core, "lease-2", 1, 1.0), NO_TIME)
        history.close()
    assert [(row["ticket"], row["discarded"]) for row in rows(path)] == [("1", "0"), ("2", "1")]


def test_a_new_run_begins_a_new_file(path: Path) -> None:
    history = write_commits(training(), path, 3)
    history.evaluations.add(Evaluation(3, 0.5, None))
    history.close()
    write_commits(training(), path, 1).close()
    assert versions(path) == [1]
    assert not evaluations_beside(path).exists()
    assert versions(path.with_name("history.csv.old")) == [1, 2, 3]
    assert path.with_name("history.evaluations.json.old").exists()


@pytest.mark.parametrize("worker", ['a,"b"', "worker 1", "Ännchen", "=cmd()"])
def test_any_worker_name_is_read_back_and_no_spreadsheet_runs_it(worker: str, path: Path) -> None:
    core = training(worker=worker)
    write_commits(core, path, 2).close()
    write_commits(core, path, 1).close()
    assert [name for piece in read_history(path) for name in piece.workers] == [worker] * 3
    assert not rows(path)[0]["worker"].startswith("=")


def test_a_history_that_has_vanished_is_begun_anew_at_the_resumed_version(path: Path) -> None:
    core = training()
    core.central.version, core.next_ticket = 3, 4
    core.pull(core.leases.get("lease-1"))
    write_commits(core, path, 1).close()
    assert versions(path) == [4]


HEADER = ",".join(COLUMNS).encode() + b"\n"
DAMAGED = {
    "binary": bytes(range(256)) * 8,
    "NUL bytes": HEADER + b"1,1" + bytes(100) + b"\n",
    "a ticket that is no number": HEADER + "1,²,0,ann,1,0,0,,1,,,,,\n".encode(),
    "a ticket of 5,000 digits": HEADER + b"1," + b"9" * 5000 + b",0,ann,1,0,0,,1,,,,,\n",
    "other columns": b"ticket,version,worker\n1,1,ann\n",
    "a line without an end": HEADER + b"1" * (1 << 20) + b"\n",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_history_is_set_aside_and_a_new_one_begun(content: bytes, path: Path, log: Lines) -> None:
    core = training()
    path.write_bytes(content)
    core.next_ticket = 4
    history = taken_over(path, core.next_ticket)
    history.applied(commit(core, "lease-1", 1, 1.0), NO_TIME)
    history.close()
    assert [row["ticket"] for row in rows(path)] == ["4"]
    assert path.with_suffix(".csv.old").read_bytes() == content
    assert len(reasons(log, "warning")) == 1


def test_a_damaged_line_costs_that_line_alone_and_the_file_is_kept_as_it_was(path: Path, log: Lines) -> None:
    core = training()
    write_commits(core, path, 3).close()
    lines = path.read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:2], b"3,7,\0\0\0\r\n", b"no line\r\n", *lines[2:]])
    path.write_bytes(content)
    history = taken_over(path, core.next_ticket)
    history.close()
    assert path.read_bytes() == b"".join(lines)
    assert path.with_suffix(".csv.old").read_bytes() == content
    assert reasons(log, "warning") == ["2 of its lines can't be read"]
    assert history.earlier.columns()["version"][-1] == 3


@pytest.mark.long
def test_a_long_history_is_taken_over_in_little_memory(path: Path) -> None:
    count = 100_000
    with path.open("w", newline="") as file:
        file.write(",".join(COLUMNS) + "\r\n")
        file.writelines(f"{n},{n},{1.7e9 + n},ann,{n},0,3,0.5,8,0.5,0,0,1,1\r\n" for n in range(1, count + 1))
    size = path.stat().st_size
    tracemalloc.start()
    try:
        history = History(path, count + 1, lambda: 0.0, structlog.get_logger(), resumed=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    history.close()
    assert (path.stat().st_size, history.earlier.columns()["version"][-1]) == (size, count)
    assert peak < 20e6, f"{peak / 1e6:.1f} MB for a file of {size / 1e6:.1f} MB"


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


@pytest.mark.parametrize("occupy", [a_folder, a_pipe, below_a_file])
def test_a_server_starts_without_a_history_it_cannot_write(occupy: Callable[[Path], None], tmp_path: Path, log: Lines) -> None:
    path = tmp_path / "folder" / "history.csv"
    path.parent.mkdir()
    occupy(path)
    assert open_history(path, 4, lambda: 0.0, structlog.get_logger(), resumed=True) is None
    assert len(reasons(log, "warning")) == 1
    assert not (tmp_path / "folder" / "history.csv.old").exists()
    with serving(config(history=path)) as live, wired(live) as wire:
        wire.started("ann").commit()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_history_that_a_full_disk_takes_no_line_of_leaves_no_file_open(path: Path) -> None:
    path.with_suffix(".csv.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        begun(path, 1)
    assert "/dev/full" not in [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        ({}, None),
        ({"checkpoint_dir": Path("c")}, Path("c") / COMMITS),
        ({"checkpoint_dir": Path("c"), "history": Path("h.csv")}, Path("h.csv")),
        ({"checkpoint_dir": Path("c"), "history": Path("/dev/null")}, None),
        ({"checkpoint_dir": Path("c"), "range": Range(1, 2)}, None),
    ],
)
def test_a_run_with_checkpoints_has_a_history_that_a_report_finds(settings: dict[str, Any], file: Path | None) -> None:
    assert ServerConfig(**settings).history_file == file
