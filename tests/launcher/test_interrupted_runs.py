"""gem-train whose processes are killed or interrupted: the run goes on, or is resumed, and loses no sample."""

from __future__ import annotations

import json
import signal
import urllib.request
from contextlib import suppress
from typing import Any

import pytest
from gem_client import Admin
from gem_ctl.local_runs import find_runs
from kit.server import wait_until
from kit.settings import configured
from launcher.train_helpers import PATIENCE, Launch, assert_every_sample_accounted_for, last_state, read_json, settled_accuracy

pytestmark = pytest.mark.timeout(900)


def read(address: str) -> str:
    """What an address serves; empty while nothing does."""
    with suppress(OSError), urllib.request.urlopen(address, timeout=30) as response:
        return str(response.read().decode())
    return ""


def shows_progress_since_the_restart(page: str) -> dict[str, Any] | None:
    """The page's data once the server has resumed the run and applied another commit."""
    shown: dict[str, Any] = json.loads(read(f"{page}status.json") or "{}")
    return shown if 0 < shown.get("start_version", 0) < shown["version"] else None


def test_a_worker_and_the_server_are_killed_and_the_run_ends_complete(launch: Launch) -> None:
    task = ("--task", "kit.task:LinearDigits", configured(step_seconds=0.02))  # it takes no processor from the restarts
    launcher = launch("--workers", "2", "--epochs", "30", *task)
    launcher.until_version(30)
    launcher.kill_member("worker-0")
    launcher.until_it_says("worker-0 was killed by SIGKILL; restarting it")
    with Admin(launcher.address) as admin:
        kept = admin.checkpoint().version
    launcher.until_version(kept + 10)
    page = launcher.until_it_says(r"live page (http://127\.0\.0\.1:\d+/)\n")
    assert "<title>GEM</title>" in read(page)
    launcher.kill_member("gem_server")
    launcher.until_it_says("server was killed by SIGKILL; restarting it")
    launcher.until_version(kept + 1)
    shown = wait_until(lambda: shows_progress_since_the_restart(page), "new commits on the page at the same address", PATIENCE)
    assert shown["start_version"] >= kept
    assert (shown["begin_version"], shown["curves"]["version"][0] < kept) == (0, True), "the curve's start"
    assert launcher.wait() == 0, launcher.output
    assert_every_sample_accounted_for(launcher.folder, epochs=30)
    assert settled_accuracy(launcher.folder) >= 0.9
    assert launcher.members() == {}


@pytest.mark.long
def test_ctrl_c_ends_a_run_without_limit_and_it_can_be_resumed_with_other_settings(launch: Launch) -> None:
    """It leaves a checkpoint, a report and no process. What the resumed run was given holds from then on, also in run.json."""
    launcher = launch("--workers", "2", "--until-stopped", background=True)  # which hears Ctrl-C all the same
    launcher.until_version(20)
    members = launcher.members()
    assert len(members) == 3
    assert find_runs(launcher.folder.parent) == {launcher.folder: launcher.address}  # as gem-ctl finds it
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, launcher.output
    assert launcher.members() == {}
    assert "Traceback" not in launcher.output
    run = launcher.folder
    assert find_runs(run.parent) == {}
    assert f"gem-train --resume {run}" in launcher.output
    before = last_state(run)
    assert before["version"] >= 20
    assert before["ledger"]["held"] == []
    summary = read_json(run / "summary.json")
    assert (summary["outcome"], summary["commits"]) == ("stopped", before["version"])
    assert '"outcome":"stopped: gem-train --resume continues it ' in (run / "report.html").read_text(encoding="utf-8")

    resumed = launch("--resume", str(run), "--epochs", "25", "--learning-rate", "0.04")
    assert resumed.wait() == 0, resumed.output
    state = last_state(run)
    assert state["run_id"] == before["run_id"]
    assert state["hyperparameters"]["learning_rate"] == read_json(run / "run.json")["learning_rate"] == 0.04
    assert "learning_rate='0.05 -> 0.04'" in (run / "logs/server.log").read_text()
    assert_every_sample_accounted_for(run, epochs=25)
    assert settled_accuracy(run) >= 0.9
