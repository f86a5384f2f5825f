"""The serial number of the first log segment that a start writes."""

from __future__ import annotations

from pathlib import Path

from gem_server.durability import recovery
from gem_server.durability.journal import Journal
from gem_server.durability.storage import Storage
from kit.core import make_core, start


def test_a_start_writes_no_segment_before_those_of_a_kept_checkpoint(tmp_path: Path) -> None:
    """A checkpoint names segment 7 as the next, and the server dies before that is written."""
    log = recovery.log_directory(tmp_path)
    log.mkdir()
    assert recovery.next_serial(tmp_path) == 1
    core = make_core()
    start(core)
    captured = recovery.capture(core, Journal(Storage(), log, "run", serial=7))
    captured.copy_theta()
    recovery.save(tmp_path, captured, keep=2)
    assert list(log.iterdir()) == []
    assert recovery.next_serial(tmp_path) == 8
