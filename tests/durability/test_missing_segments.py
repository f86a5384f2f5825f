"""A log that is removed gets no more acknowledged commits; if a segment is missing, the next start says so."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from durability.checkpoint_helpers import crashed
from gem_client import Admin, GemError, connect
from gem_server.config import ServerConfig, StartError
from gem_server.durability import recovery
from gem_server.durability.journal import Journal
from kit.core import make_core, start
from kit.logs import Lines
from kit.model import GRADIENT, Patience, model, version
from kit.server import Live, serving
from simulation.truth import fingerprint


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_log_that_is_removed_acknowledges_nothing_more(how: str, logged: ServerConfig) -> None:
    assert logged.checkpoint_dir is not None
    live, patience = Live(logged), Patience()
    with connect(live.address, name="ann", retry=patience.retry()) as session:
        session.join(model())
        session.commit(GRADIENT)
        acknowledged = live.on_loop(lambda: fingerprint(live.core))
        (path,) = (logged.checkpoint_dir / "log").iterdir()
        if how == "removed":
            shutil.rmtree(path.parent)
        else:
            copy = path.with_name("copy")
            shutil.copy(path, copy)
            copy.replace(path)
        patience.run_out()
        with pytest.raises(GemError):
            session.commit(GRADIENT)
    with pytest.raises(StartError, match="was removed or replaced while the server wrote to it"):
        live._thread.join(30), live.stop()
    with serving(replace(logged, resume=True)) as back:
        assert version(back) == 2
        assert back.on_loop(lambda: fingerprint(back.core)) != acknowledged


def killed_after_a_checkpoint(logged: ServerConfig, folder: Path) -> ServerConfig:
    """A server whose newest checkpoint has version 1, and whose log goes on to version 2."""
    with serving(logged) as live, connect(live.address, name="ann") as session, Admin(live.address) as admin:
        session.join(model())
        session.commit(GRADIENT)
        admin.checkpoint()
        session.commit(GRADIENT)
        return crashed(live, folder)


def test_a_segment_that_is_missing_before_others_is_refused_with_advice(logged: ServerConfig, tmp_path: Path) -> None:
    config = killed_after_a_checkpoint(logged, tmp_path / "crashed")
    assert config.checkpoint_dir is not None
    newest = sorted(config.checkpoint_dir.glob("checkpoint-*"))[-1]
    shutil.rmtree(newest)
    first, _ = sorted((config.checkpoint_dir / "log").glob("segment-*"))
    first.unlink()
    with pytest.raises(StartError, match=r"record 1 is due.*put the missing segments back into .*log from a backup"):
        Live(config)


@pytest.mark.parametrize("what", ["segment", "folder"])
def test_a_log_missing_after_the_newest_checkpoint_is_said(
    what: str, logged: ServerConfig, tmp_path: Path, warned: Lines
) -> None:
    config = killed_after_a_checkpoint(logged, tmp_path / "crashed")
    assert config.checkpoint_dir is not None
    log = config.checkpoint_dir / "log"
    if what == "folder":
        shutil.rmtree(log)
    else:
        max(log.glob("segment-*")).unlink()
    with serving(config) as live:
        assert version(live) == 1
    (line,) = warned
    assert "no log follows the newest checkpoint" in line["event"]
    assert line["missing"] == str(log / "segment-00000002")


def test_a_run_that_was_stopped_needs_no_log_after_its_last_checkpoint(logged: ServerConfig, warned: Lines) -> None:
    with serving(logged) as live, connect(live.address, name="ann") as session:
        session.join(model())
    with serving(replace(logged, resume=True)):
        pass
    assert warned == []


def test_a_start_writes_no_segment_before_those_of_a_kept_checkpoint(tmp_path: Path) -> None:
    """A checkpoint names segment 7 as the next, and the server dies before that is written."""
    log = recovery.log_directory(tmp_path)
    log.mkdir()
    assert recovery.next_serial(tmp_path) == 1
    core = make_core()
    start(core)
    captured = recovery.capture(core, Journal("run", serial=7))
    captured.copy_theta()
    recovery.save(tmp_path, captured, keep=2)
    assert list(log.iterdir()) == []
    assert recovery.next_serial(tmp_path) == 8
