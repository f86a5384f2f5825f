"""gem-train --processes: many workers in few processes, with simulated step time."""

from __future__ import annotations

import signal

import pytest
from kit.settings import configured
from launcher.train_helpers import Launch, commits, read_json


@pytest.mark.slow
def test_five_workers_in_two_processes_survive_a_death_and_a_resume(launch: Launch) -> None:
    settings = configured(evaluate_every=0.5, step_seconds=0.01)
    launcher = launch(
        "--workers", "5", "--processes", "2", "--steps", "80", "--shards", "replicate", "--batch-size", "8", settings
    )
    launcher.until_it_says("5 workers in 2 processes, rule gem")
    launcher.until_version(60)
    launcher.kill_member("workers-2-4")
    launcher.until_it_says("workers-2-4 was killed by SIGKILL; restarting it")
    launcher.until_version(100)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, launcher.output
    assert launcher.members() == {}
    run = launcher.folder

    resumed = launch("--resume", str(run), "--processes", "3")
    assert resumed.wait() == 0, resumed.output
    assert resumed.members() == {}
    summary = read_json(run / "summary.json")
    assert (summary["workers"], summary["processes"], summary["step_seconds"]) == (5, 3, "0.01")
    assert "(simulated step time 0.01 s)" in resumed.output
    by_worker: dict[str, int] = {}
    for row in commits(run):
        by_worker[row["worker"]] = by_worker.get(row["worker"], 0) + 1
    assert by_worker == {f"worker-{number}": 80 for number in range(5)}
    assert {log.name for log in (run / "logs").iterdir()} >= {
        "workers-0-1.log",
        "workers-2-4.log",
        "worker-0.log",
        "workers-1-2.log",
    }
