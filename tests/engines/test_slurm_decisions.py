"""What deploy/slurm/gem.sbatch decides: which end of a process, and which signal, leads to a requeue, a restart or a cancel.

Stand-ins take the place of Slurm and of the project's commands. Each appends its name and arguments to the file `calls`.
"""

from __future__ import annotations

import os
import signal
import socket
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
JOINED, COMPLETE = (
    f"[info     ] {event}" for event in ("worker registered     worker=worker-1", "run complete: save the model")
)
# `ends` has a line for each start that ends by itself: a status, and what is printed before.
PROCESS = """
if read -r status said <ends; then
  sed -i 1d ends
  echo "$said"
  exit "$status"
fi
trap 'exit 143' TERM
echo $$ >pid
echo "$SERVING"
for name in "${!GEM_@}"; do echo "$name=${!name}"; done >settings
until [ -e leave ]; do sleep 1 || exit; done  # it ends with its folder
"""
STAND_INS = {
    "gem-server": PROCESS,
    "gem-worker": PROCESS,
    "gem-evaluator": "",
    "gem-ctl": "",
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "scontrol": "[ ! -e no-requeue ]",
    "scancel": '[[ $* != "--quiet --signal=TERM 5_$SLURM_ARRAY_TASK_ID" ]] || kill "$(cat pid)"',
    "sleep": '[ "$1" != 5 ] || echo >>sleeps; exec /bin/sleep 0.02',  # the script waits for 5 seconds
}  # fmt: skip


class Task:
    """One task of a job array, in a folder of its own; the run's folder is `run` in it.

    Attributes:
        folder: Where the script runs, and where its stand-ins look.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script: subprocess.Popen[str] | None = None
        (folder / "bin").mkdir()
        (folder / "run").mkdir()
        for name in ("ends", "calls", "sleeps"):
            (folder / name).touch()
        for name, body in STAND_INS.items():
            self.stands_in(name, body if name == "sleep" else f'echo "{name} $*" >>calls\n{body}')

    def stands_in(self, name: str, body: str) -> None:
        """Puts a script in the place of a command."""
        (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def start(self, number: int, *options: str, run: str = "run", **variables: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("GEM_", "SLURM_"))}
        path = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "SERVING": SERVING}
        task = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": ARRAY, "SLURM_JOB_ID": JOB}
        self._script = subprocess.Popen(
            ["bash", SCRIPT, *run.split(), *options],
            cwd=self.folder,
            env=clean | path | task | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def calls(self, *names: str) -> list[str]:
        """The calls of these commands, in order; of all commands if none is named."""
        lines = (self.folder / "calls").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if not names or line.split()[0] in names]

    def decisions(self) -> list[str]:
        """What it has asked Slurm to do with the task or the array, in order; but for a signal to the step."""
        return [call for call in self.calls("scontrol", "scancel") if "--signal" not in call]

    def wait_for(self, call: str, times: int = 1) -> None:
        def seen() -> bool:
            return sum(line.startswith(call) for line in self.calls(call.split()[0])) >= times

        wait_until(seen, f"{times} calls of {call}")

    @property
    def address(self) -> str:
        """What the script has published; empty before."""
        path = self.folder / "run/address"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def serve(self, *events: str) -> None:
        """Waits until the server's address is published; then it logs these events, and the script reads them."""
        wait_until(lambda: self.address, "an address")
        (log,) = (self.folder / "run").glob("server-*.log")
        with log.open("a", encoding="utf-8") as file:
            for event in events:
                file.write(f"{event}\n")
        self.look_twice()

    def look_twice(self) -> None:
        """Waits until the script has looked again at what it waits for, or has ended."""
        sleeps, script = self.folder / "sleeps", self._script
        before = sleeps.stat().st_size
        assert script is not None
        wait_until(lambda: sleeps.stat().st_size >= before + 3 or script.poll() is not None, "the script to look again")

    def send(self, number: signal.Signals) -> None:
        assert self._script is not None
        self._script.send_signal(number)

    def cancel(self) -> None:
        """SIGTERM for the step and for the script, as of Slurm."""
        pid = self.folder / "pid"
        os.kill(int(wait_until(lambda: pid.exists() and pid.read_text(), "a step")), signal.SIGTERM)
        self.send(signal.SIGTERM)

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


@pytest.fixture
def listening() -> Iterator[str]:
    """An address at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


class TestServer:
    def test_it_comes_back_after_its_time_also_if_its_workers_left_before(self, task: Task) -> None:
        task.start(0)
        task.serve(JOINED)
        task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
        assert task.decisions() == [f"scontrol requeue {ARRAY}_0"]

    def test_where_slurm_does_not_requeue_it_says_what_to_do(self, task: Task) -> None:
        (task.folder / "no-requeue").touch()
        task.start(0)
        task.serve(JOINED)
        task.send(signal.SIGUSR1)
        status, printed = task.end()
        assert status == 143
        assert "submit the array again, and the run goes on" in printed

    def test_without_any_worker_it_cancels_the_array_instead(self, task: Task) -> None:
        task.start(0)
        task.serve()
        task.send(signal.SIGUSR1)
        status, printed = task.end()
        assert status == 143
        assert "no worker joined in all of the time" in printed
        assert task.decisions() == [f"scancel {ARRAY}"]

    def test_a_cancelled_one_stays_away(self, task: Task) -> None:
        task.start(0)
        task.serve(JOINED)
        task.cancel()
        assert task.end()[0] == 143
        assert task.decisions() == []

    @pytest.mark.parametrize("status", [1, 137])
    def test_a_killed_one_starts_again_and_publishes_its_new_address(self, task: Task, status: int) -> None:
        (task.folder / "ends").write_text(f"{status} {SERVING.replace('4242', '3131')}\n")
        task.start(0)
        task.wait_for("gem-server", 2)
        task.serve(JOINED)
        assert task.address.endswith(":4242")
        task.send(signal.SIGUSR1)
        _, printed = task.end()
        assert f"the server ended with status {status}" in printed
        assert task.decisions() == [f"scontrol requeue {ARRAY}_0"]

    @pytest.mark.parametrize(("status", "starts"), [(1, 4), (137, 4), (2, 1), (0, 1)])
    def test_one_that_always_ends_cancels_the_array(self, task: Task, status: int, starts: int) -> None:
        (task.folder / "ends").write_text(f"{status} gem-server: no such thing\n" * 10)
        task.start(0)
        ended, printed = task.end()
        assert ended == status
        assert f"the server ended by itself, status {status}: see run/server-{JOB}-0.log" in printed
        assert task.decisions() == [f"scancel {ARRAY}"]
        assert len(task.calls("gem-server")) == starts

    def test_it_waits_while_its_former_self_still_runs(self, task: Task) -> None:
        (task.folder / "ends").write_text(f"2 {LOCKED}\n" * 5)
        task.start(0, SLURM_RESTART_COUNT="1")
        task.wait_for("gem-server", 6)
        task.serve(JOINED)
        task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
        assert task.decisions() == [f"scontrol requeue {ARRAY}_0"]

    def test_it_does_not_wait_for_ever_for_another_server(self, task: Task) -> None:
        (task.folder / "ends").write_text(f"2 {LOCKED}\n" * 99)
        task.start(0)
        assert task.end()[0] == 2
        assert task.calls("scancel") == [f"scancel {ARRAY}"]

    def test_it_leaves_when_slurm_has_started_its_task_elsewhere(self, task: Task) -> None:
        task.start(0, SLURM_RESTART_COUNT="2")
        task.serve(JOINED)
        (task.folder / f"run/server-{JOB}-3.log").touch()
        assert task.end()[0] == 143
        assert task.decisions() == []

    def test_a_run_that_is_done_is_not_begun_again_unasked(self, task: Task) -> None:
        (task.folder / "run/address").write_text("done\n")
        task.start(0)
        status, printed = task.end()
        assert (status, task.calls("gem-server")) == (2, [])
        assert "to extend it, delete run/address" in printed

    def test_a_complete_run_is_saved_and_ends(self, task: Task) -> None:
        task.start(0)
        task.serve(JOINED, COMPLETE)
        assert task.end()[0] == 0
        assert task.address == "done"
        assert task.calls("gem-ctl") == ["gem-ctl pull run/model.safetensors", "gem-ctl report run/history.csv run/report.html"]

    def test_a_worker_that_comes_back_after_the_end_is_waited_for(self, task: Task) -> None:
        task.start(0)
        task.serve(COMPLETE + "\n" + JOINED)
        assert task.address != "done"
        task.serve(COMPLETE)
        assert task.end()[0] == 0

    @pytest.mark.parametrize(
        ("run", "serving", "published"),
        [
            ("run", "0.0.0.0:4242", f"{socket.gethostname()}:4242"),
            ("run", "[::]:4242", f"{socket.gethostname()}:4242"),
            ("run", "10.0.0.7:4242", "10.0.0.7:4242"),
            ("--interface ib0 run", "0.0.0.0:4242", "10.9.0.3:4242"),
            ("--interface ib1 run", "[::]:4242", "[fd00::3]:4242"),
        ],
    )
    def test_the_address_that_workers_are_given(self, task: Task, run: str, serving: str, published: str) -> None:
        shown = {"ib0": "inet 10.9.0.3/24 brd 10.9.0.255", "ib1": "inet6 fd00::3/64"}
        cases = " ".join(f"{name}) echo '7: {name}    {address} scope global {name}' ;;" for name, address in shown.items())
        task.stands_in("ip", f'[ "$*" = "-oneline address show dev $5 scope global" ] && case $5 in {cases} esac')
        task.start(0, run=run, SERVING=SERVING.replace("0.0.0.0:4242", serving))
        task.serve()
        assert task.address == published

    @pytest.mark.parametrize("ip", ['echo "Device $5 does not exist." >&2; exit 1', "# it has no address"])
    def test_an_interface_without_an_address_cancels_the_array(self, task: Task, ip: str) -> None:
        task.stands_in("ip", ip)
        task.start(0, run="--interface ib9 run")
        status, printed = task.end()
        assert (status, task.calls("gem-server")) == (2, [])
        assert "no address on --interface ib9" in printed
        assert task.calls("scancel") == [f"scancel {ARRAY}"]

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
        task.serve()
        task.cancel()
        task.end()
        (call,) = task.calls("gem-server")
        assert call.endswith("--history run/history.csv --log-level warning --log-level info"), "the last one holds"
        settings = (task.folder / "settings").read_text().splitlines()
        assert {f"GEM_MEMORY_LIMIT={limit}", "GEM_LOG_FORMAT=text"} <= set(settings)


class TestWorker:
    def test_one_that_waits_comes_back_after_its_time(self, task: Task) -> None:
        (task.folder / "run/address").write_text("127.0.0.1:1\n")
        task.start(3)
        task.look_twice()
        task.send(signal.SIGUSR1)
        status, printed = task.end()
        assert (status, printed.count("no server at 127.0.0.1:1 yet")) == (143, 1)
        assert task.calls() == [f"scontrol requeue {ARRAY}_3"], "it starts no process of Python while it waits"

    @pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
    def test_one_finds_a_server_at_an_address_of_ipv6(self, task: Task) -> None:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            (task.folder / "run/address").write_text(f"[::1]:{server.getsockname()[1]}\n")
            task.start(3)
            task.wait_for("gem-worker --name worker-3")

    @pytest.mark.parametrize("cancelled", [False, True])
    def test_one_that_trains_comes_back_unless_it_is_cancelled(self, task: Task, listening: str, cancelled: bool) -> None:
        (task.folder / "run/address").write_text(f"{listening}\n")
        task.start(3)
        task.wait_for("gem-worker --name worker-3")
        task.cancel() if cancelled else task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
        assert task.decisions() == ([] if cancelled else [f"scontrol requeue {ARRAY}_3"])

    @pytest.mark.parametrize(("status", "starts"), [(0, 1), (1, 10), (2, 1), (3, 1), (4, 1), (137, 10)])
    def test_how_often_one_that_ends_is_started(self, task: Task, listening: str, status: int, starts: int) -> None:
        (task.folder / "run/address").write_text(f"{listening}\n")
        (task.folder / "ends").write_text(f"{status}\n" * 20)
        task.start(3)
        assert task.end()[0] == (1 if starts == 10 else status)
        assert len(task.calls("gem-worker")) == starts
        assert task.decisions() == []


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
