"""What deploy/slurm/gem.sbatch decides: which end of a process, and which signal, leads to a requeue, a restart or a cancel.

Stand-ins take the place of Slurm and of the project's commands. Each appends its name and arguments to the file `calls`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.pages import ROOT
from kit.server import wait_until

SCRIPT = ROOT / "deploy/slurm/gem.sbatch"
ARRAY, JOB = "5", "7"
SERVING = "[info     ] serving                        address=0.0.0.0:4242 lane=off"
LOCKED = "gem-server: another server is using checkpoints: stop it first, or name another folder"
TRAINING, IDLE, COMPLETE = (
    f'{{"state": "RUN_STATE_{state}", "workers": [{workers}]}}'
    for state, workers in [("TRAINING", "{}"), ("TRAINING", ""), ("COMPLETE", "")]
)
# `ends` has a line for each start that ends by itself: a status, and what is printed before.
PROCESS = """
if read -r status said <ends; then
  sed -i 1d ends
  echo "$said"
  exit "$status"
fi
trap 'exit 143' TERM
echo "$SERVING"
until [ -e leave ]; do sleep 1; done
"""
STAND_INS = {
    "gem-server": 'echo "$GEM_MEMORY_LIMIT $GEM_LOG_FORMAT" >settings' + PROCESS,
    "gem-worker": PROCESS,
    "gem-evaluator": "",
    "gem-ctl": 'case $1 in status) cat status ;; health) [ -e healthy ] ;; pull) [ ! -e unreachable ] ;; esac',
    "scontrol": "",
    "scancel": "",
    "sleep": "exec /bin/sleep 0.02",
}  # fmt: skip


class Task:
    """One task of a job array, in a folder of its own; the run's folder is `run` in it.

    Attributes:
        folder: Where the script runs, and where its stand-ins look.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script: subprocess.Popen[str] | None = None
        tools = folder / "bin"
        tools.mkdir()
        (folder / "run").mkdir()
        for name in ("ends", "calls"):
            (folder / name).touch()
        (folder / "status").write_text(IDLE)
        for name, body in STAND_INS.items():
            noted = "" if name == "sleep" else f'echo "{name} $*" >>calls\n'
            (tools / name).write_text(f"#!/bin/bash\n{noted}{body}\n")
            (tools / name).chmod(0o755)

    def start(self, number: int, *options: str, **variables: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("GEM_", "SLURM_"))}
        path = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "SERVING": SERVING}
        task = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": ARRAY, "SLURM_JOB_ID": JOB}
        self._script = subprocess.Popen(
            ["bash", SCRIPT, "run", *options],
            cwd=self.folder,
            env=clean | path | task | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def calls(self, *names: str) -> list[str]:
        """The calls of these commands, in order."""
        lines = (self.folder / "calls").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.split()[0] in names]

    def wait_for(self, call: str, times: int = 1) -> None:
        def seen() -> bool:
            return sum(line.startswith(call) for line in self.calls(call.split()[0])) >= times

        wait_until(seen, f"{times} calls of {call}")

    def set_status(self, status: str) -> None:
        """Changes what `gem-ctl status` prints, and waits until the script has read it."""
        (self.folder / "new").write_text(status)
        (self.folder / "new").rename(self.folder / "status")
        self.wait_for("gem-ctl status", len(self.calls("gem-ctl")) + 3)

    def send(self, number: signal.Signals) -> None:
        assert self._script is not None
        self._script.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Waits for the script; returns its status and what it printed."""
        assert self._script is not None
        printed, _ = self._script.communicate(timeout=30)
        return self._script.returncode, printed

    def stop(self) -> None:
        """Ends whatever still runs after a test that failed."""
        (self.folder / "leave").touch()
        if self._script is not None:
            self._script.kill()
            self._script.communicate(timeout=30)


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    started = Task(tmp_path)
    yield started
    started.stop()


class TestServer:
    def test_it_comes_back_after_its_time_also_if_its_workers_left_before(self, task: Task) -> None:
        task.start(0)
        task.set_status(TRAINING)
        task.set_status(IDLE)
        task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
        assert task.calls("scontrol", "scancel") == [f"scontrol requeue {JOB}"]

    def test_without_any_worker_it_cancels_the_array_instead(self, task: Task) -> None:
        task.start(0)
        task.set_status(IDLE)
        task.send(signal.SIGUSR1)
        status, printed = task.end()
        assert status == 143
        assert "no worker joined in all of the time" in printed
        assert task.calls("scontrol", "scancel") == [f"scancel {ARRAY}"]

    def test_a_cancelled_one_stays_away(self, task: Task) -> None:
        task.start(0)
        task.set_status(TRAINING)
        task.send(signal.SIGTERM)
        assert task.end()[0] == 143
        assert task.calls("scontrol", "scancel") == []

    @pytest.mark.parametrize("status", [1, 137])
    def test_a_killed_one_starts_again_and_publishes_its_new_address(self, task: Task, status: int) -> None:
        (task.folder / "ends").write_text(f"{status} {SERVING.replace('4242', '3131')}\n")
        task.start(0)
        task.wait_for("gem-server", 2)
        task.set_status(TRAINING)
        assert (task.folder / "run/address").read_text().endswith(":4242\n")
        task.send(signal.SIGUSR1)
        _, printed = task.end()
        assert f"the server ended with status {status}" in printed
        assert task.calls("scontrol", "scancel") == [f"scontrol requeue {JOB}"]

    @pytest.mark.parametrize(("status", "starts"), [(1, 4), (137, 4), (2, 1), (0, 1)])
    def test_one_that_always_ends_cancels_the_array(self, task: Task, status: int, starts: int) -> None:
        (task.folder / "ends").write_text(f"{status} gem-server: no such thing\n" * 10)
        task.start(0)
        ended, printed = task.end()
        assert ended == status
        assert f"the server ended by itself, status {status}: see run/server-{JOB}-0.log" in printed
        assert task.calls("scontrol", "scancel") == [f"scancel {ARRAY}"]
        assert len(task.calls("gem-server")) == starts

    def test_it_waits_while_its_former_self_still_runs(self, task: Task) -> None:
        (task.folder / "ends").write_text(f"2 {LOCKED}\n" * 5)
        task.start(0, SLURM_RESTART_COUNT="1")
        task.wait_for("gem-server", 6)
        task.set_status(TRAINING)
        task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
        assert task.calls("scontrol", "scancel") == [f"scontrol requeue {JOB}"]

    def test_it_does_not_wait_for_ever_for_another_server(self, task: Task) -> None:
        (task.folder / "ends").write_text(f"2 {LOCKED}\n" * 99)
        task.start(0)
        assert task.end()[0] == 2
        assert task.calls("scancel") == [f"scancel {ARRAY}"]

    def test_it_leaves_when_slurm_has_started_its_task_elsewhere(self, task: Task) -> None:
        task.start(0, SLURM_RESTART_COUNT="2")
        task.set_status(TRAINING)
        (task.folder / f"run/server-{JOB}-3.log").touch()
        assert task.end()[0] == 143
        assert task.calls("scontrol", "scancel") == []

    def test_a_run_that_is_done_is_not_begun_again_unasked(self, task: Task) -> None:
        (task.folder / "run/address").write_text("done\n")
        task.start(0)
        status, printed = task.end()
        assert (status, task.calls("gem-server")) == (2, [])
        assert "to extend it, delete run/address" in printed

    def test_a_complete_run_is_saved_and_ends(self, task: Task) -> None:
        task.start(0)
        task.set_status(TRAINING)
        (task.folder / "status").write_text(COMPLETE)
        assert task.end()[0] == 0
        assert (task.folder / "run/address").read_text() == "done\n"
        assert task.calls("gem-ctl")[-2:] == [
            "gem-ctl pull run/model.safetensors",
            "gem-ctl report run/history.csv run/report.html",
        ]

    @pytest.mark.parametrize(
        ("variables", "limit"),
        [
            ({"SLURM_MEM_PER_NODE": "2048"}, "1638M"),
            ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_PER_TASK": "4"}, "3200M"),
            ({"SLURM_MEM_PER_NODE": "0"}, ""),
            ({}, ""),
        ],
    )
    def test_memory_and_log_format(self, task: Task, variables: dict[str, str], limit: str) -> None:
        task.start(0, "--log-level", "warning", GEM_LOG_FORMAT="json", **variables)
        task.wait_for("gem-server")
        task.send(signal.SIGTERM)
        task.end()
        (call,) = task.calls("gem-server")
        assert call.endswith("--history run/history.csv --log-level warning")
        assert (task.folder / "settings").read_text() == f"{limit} text\n"


class TestWorker:
    def test_one_that_waits_comes_back_after_its_time(self, task: Task) -> None:
        (task.folder / "run/address").write_text("somewhere:1\n")
        task.start(3)
        task.wait_for("gem-ctl health")
        task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
        assert task.calls("scontrol", "gem-worker") == [f"scontrol requeue {JOB}"]

    @pytest.mark.parametrize(("number", "calls"), [(signal.SIGUSR1, [f"scontrol requeue {JOB}"]), (signal.SIGTERM, [])])
    def test_one_that_trains_comes_back_unless_it_is_cancelled(
        self, task: Task, number: signal.Signals, calls: list[str]
    ) -> None:
        (task.folder / "run/address").write_text("somewhere:1\n")
        (task.folder / "healthy").touch()
        task.start(3)
        task.wait_for("gem-worker --name worker-3")
        task.send(number)
        assert task.end()[0] == 143
        assert task.calls("scontrol", "scancel") == calls

    @pytest.mark.parametrize(("status", "starts"), [(0, 1), (1, 10), (2, 1), (3, 1), (4, 1), (137, 10)])
    def test_how_often_one_that_ends_is_started(self, task: Task, status: int, starts: int) -> None:
        (task.folder / "run/address").write_text("somewhere:1\n")
        (task.folder / "healthy").touch()
        (task.folder / "ends").write_text(f"{status}\n" * 20)
        task.start(3)
        assert task.end()[0] == (1 if starts == 10 else status)
        assert len(task.calls("gem-worker")) == starts
        assert task.calls("scontrol", "scancel") == []


@pytest.mark.parametrize("number", [0, 3])
def test_without_the_commands_a_task_ends_at_once(task: Task, number: int) -> None:
    (task.folder / "bin/gem-ctl").unlink()
    task.start(number)
    status, printed = task.end()
    assert status == 2
    assert "activate the virtual environment" in printed


def test_a_job_that_is_no_array_is_told_so(task: Task) -> None:
    task.start(0, SLURM_ARRAY_TASK_ID="")
    status, printed = task.end()
    assert status != 0
    assert "submit a job array: sbatch --array=" in printed
