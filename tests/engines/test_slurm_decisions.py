"""What deploy/slurm/gem.sbatch decides: which end of a process, and which signal, leads to a requeue, a restart or a cancel.

Stand-ins take the place of Slurm and of the project's commands. Each appends its name and arguments to the file `calls`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def listening(task: Task, family: socket.AddressFamily = socket.AF_INET) -> Iterator[None]:
    """Something listens at the address that is published. Skips the test without IPv6 if it needs it."""
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    host, shown = ("::1", "[::1]") if family == socket.AF_INET6 else ("127.0.0.1", "127.0.0.1")
    with socket.create_server((host, 0), family=family) as server:
        (task.folder / "run/address").write_text(f"{shown}:{server.getsockname()[1]}\n")
        yield


# What the script asks Slurm to do with task 0.
REQUEUE, CANCEL = [f"scontrol requeue {ARRAY}_0"], [f"scancel {ARRAY}"]
CRASH, REFUSAL = "gem-server: no such thing", f"2 {LOCKED}"


@pytest.mark.parametrize(
    ("ends", "events", "ending", "status", "decisions", "says"),
    [
        pytest.param([], [JOINED], "USR1", 143, REQUEUE, "", id="its time is up"),
        pytest.param([], [], "USR1", 143, CANCEL, "no worker joined in all of the time", id="no worker came"),
        pytest.param([], [JOINED], "cancel", 143, [], "", id="it is cancelled"),
        pytest.param([], [JOINED], "moved", 143, [], "", id="Slurm has started it elsewhere"),
        pytest.param([], [JOINED], "no requeue", 143, REQUEUE, "submit the array again, and the run goes on", id="no requeue"),
        pytest.param([f"1 {CRASH}"], [JOINED], "USR1", 143, REQUEUE, "ended with status 1: see", id="it crashed once"),
        pytest.param([f"137 {CRASH}"], [JOINED], "USR1", 143, REQUEUE, "ended with status 137: see", id="it was killed once"),
        pytest.param([REFUSAL] * 5, [JOINED], "USR1", 143, REQUEUE, "former server still runs", id="its former self still ran"),
        pytest.param([], [JOINED, COMPLETE], "", 0, [], "", id="the run is complete"),
    ],
)
def test_what_a_server_that_ends_asks_slurm_for(
    task: Task, ends: Sequence[str], events: Sequence[str], ending: str, status: int, decisions: list[str], says: str
) -> None:
    (task.folder / "ends").write_text("".join(f"{end}\n" for end in ends))
    if ending == "no requeue":
        (task.folder / "no-requeue").touch()
    task.start(0, SLURM_RESTART_COUNT="2")
    task.wait_for("gem-server", len(ends) + 1)
    task.serve(*events)
    if ending == "moved":
        (task.folder / f"run/server-{JOB}-3.log").touch()
    elif ending == "cancel":
        task.cancel()
    elif ending:
        task.send(signal.SIGUSR1)
    ended, printed = task.end()
    assert (ended, task.decisions()) == (status, decisions)
    assert says in printed
    saved = ["gem-ctl pull run/model.safetensors", "gem-ctl report run/history.csv run/report.html"]
    assert (task.address == "done", task.calls("gem-ctl")) == ((True, saved) if status == 0 else (False, []))


@pytest.mark.parametrize(
    ("end", "starts"), [(f"1 {CRASH}", 4), (f"137 {CRASH}", 4), (f"2 {CRASH}", 1), (f"0 {CRASH}", 1), (REFUSAL, 61)]
)
def test_a_server_that_always_ends_cancels_the_array(task: Task, end: str, starts: int) -> None:
    (task.folder / "ends").write_text(f"{end}\n" * 99)
    task.start(0)
    status, printed = task.end()
    assert (status, len(task.calls("gem-server")), task.decisions()) == (int(end.split()[0]), starts, CANCEL)
    assert f"the server ended by itself, status {status}: see run/server-{JOB}-0.log" in printed


def test_a_new_start_has_a_new_address_and_a_worker_that_comes_back_after_the_end_is_waited_for(task: Task) -> None:
    (task.folder / "ends").write_text(f"1 {SERVING.replace('4242', '3131')}\n")
    task.start(0)
    task.wait_for("gem-server", 2)
    task.serve(COMPLETE + "\n" + JOINED)
    assert task.address == f"{socket.gethostname()}:4242"
    task.serve(COMPLETE)
    assert task.end()[0] == 0


@pytest.mark.parametrize(
    ("run", "serving", "published"),
    [
        ("run", "[::]:4242", f"{socket.gethostname()}:4242"),
        ("run", "10.0.0.7:4242", "10.0.0.7:4242"),
        ("--interface ib0 run", "0.0.0.0:4242", "10.9.0.3:4242"),
        ("--interface ib1 run", "[::]:4242", "[fd00::3]:4242"),
    ],
)
def test_the_address_that_workers_are_given(task: Task, run: str, serving: str, published: str) -> None:
    shown = {"ib0": "inet 10.9.0.3/24 brd 10.9.0.255", "ib1": "inet6 fd00::3/64"}
    cases = " ".join(f"{name}) echo '7: {name}    {address} scope global {name}' ;;" for name, address in shown.items())
    task.stands_in("ip", f'[ "$*" = "-oneline address show dev $5 scope global" ] && case $5 in {cases} esac')
    task.start(0, run=run, SERVING=SERVING.replace("0.0.0.0:4242", serving))
    task.serve()
    assert task.address == published


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, "1638M"),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_PER_TASK": "4"}, "3200M"),
        ({}, ""),
    ],
)
def test_memory_and_log_format(task: Task, variables: dict[str, str], limit: str) -> None:
    task.start(0, "--log-level", "warning", GEM_LOG_FORMAT="json", **variables)
    task.serve()
    task.cancel()
    task.end()
    (call,) = task.calls("gem-server")
    assert call.endswith("--history run/history.csv --log-level warning --log-level info"), "the last one holds"
    settings = (task.folder / "settings").read_text().splitlines()
    assert {f"GEM_MEMORY_LIMIT={limit}", "GEM_LOG_FORMAT=text"} <= set(settings)


# -- a worker


def test_one_that_waits_comes_back_after_its_time(task: Task) -> None:
    (task.folder / "run/address").write_text("127.0.0.1:1\n")
    task.start(3)
    task.look_twice()
    task.send(signal.SIGUSR1)
    status, printed = task.end()
    assert (status, printed.count("no server at 127.0.0.1:1 yet")) == (143, 1)
    assert task.calls() == [f"scontrol requeue {ARRAY}_3"], "it starts no process of Python while it waits"


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_one_that_trains_comes_back_unless_it_is_cancelled(task: Task, family: socket.AddressFamily, cancelled: bool) -> None:
    with listening(task, family):
        task.start(3)
        task.wait_for("gem-worker --name worker-3")
        task.cancel() if cancelled else task.send(signal.SIGUSR1)
        assert task.end()[0] == 143
    assert task.decisions() == ([] if cancelled else [f"scontrol requeue {ARRAY}_3"])


@pytest.mark.parametrize(("status", "starts"), [(0, 1), (1, 10), (2, 1), (3, 1), (4, 1), (137, 10)])
def test_how_often_one_that_ends_is_started(task: Task, status: int, starts: int) -> None:
    (task.folder / "ends").write_text(f"{status}\n" * 20)
    with listening(task):
        task.start(3)
        assert task.end()[0] == (1 if starts == 10 else status)
    assert (len(task.calls("gem-worker")), task.decisions()) == (starts, [])


# -- what can't begin


@pytest.mark.parametrize(
    ("number", "arguments", "wrong", "says"),
    [
        (0, "run", "done", "to extend it, delete run/address"),
        (0, "--interface ib9 run", "no interface", "no address on --interface ib9"),
        (0, "--interface ib9 run", "no address", "no address on --interface ib9"),
        (0, "run", "no gem-ctl", "activate the virtual environment"),
        (3, "run", "no gem-ctl", "activate the virtual environment"),
    ],
)
def test_what_can_not_begin_ends_at_once_and_says_why(task: Task, number: int, arguments: str, wrong: str, says: str) -> None:
    if wrong == "done":
        (task.folder / "run/address").write_text("done\n")
    elif wrong == "no gem-ctl":
        (task.folder / "bin/gem-ctl").unlink()
    task.stands_in("ip", 'echo "Device $5 does not exist." >&2; exit 1' if wrong == "no interface" else "")
    task.start(number, run=arguments)
    status, printed = task.end()
    assert (status, task.calls("gem-server", "gem-worker")) == (2, [])
    assert says in printed
    assert task.calls("scancel") == (CANCEL if "--interface" in arguments else [])


def test_a_job_that_is_no_array_is_told_so(task: Task) -> None:
    task.start(0, SLURM_ARRAY_TASK_ID="")
    status, printed = task.end()
    assert status != 0
    assert "submit a job array: sbatch --array=" in printed
