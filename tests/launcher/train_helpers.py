"""gem-train as a process of its own, and what a run leaves in its folder."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from gem_client import Admin, GemError
from kit.process import environment
from kit.server import wait_until

PATIENCE = 600.0  # seconds that a whole cluster may take to get anywhere on a busy machine
TRAINING_SAMPLES = 1438  # of the digits
SHARDS = 6  # of 256 samples, per epoch
# As a script starts a command that ends in "&": with SIGINT ignored.
IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]


class Launcher:
    """A running gem-train, its output in a file."""

    def __init__(
        self, folder: Path, *arguments: str, runs: Path | None = None, path: Path | None = None, background: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        self._runs = runs or folder / "runs"
        command = [*(IN_BACKGROUND if background else []), sys.executable, "-m", "gem_worker.launcher.cli", *arguments]
        if "--resume" not in arguments:
            command += ["--runs", str(self._runs)]
        self._command = command[command.index(sys.executable) :]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment(*([path] if path else []))
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE)

    def until_it_says(self, pattern: str) -> str:
        """Waits for a line that holds the pattern; returns its first group, or all of it."""

        def said() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.output), self.output
            return re.search(pattern, self.output)

        found: re.Match[str] = wait_until(said, f"gem-train to say {pattern!r}", PATIENCE)
        return found.group(found.lastindex or 0)

    @property
    def address(self) -> str:
        return self.until_it_says(r"server (127\.0\.0\.1:\d+),")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.until_it_says(r"run (\S+):"))

    def admin(self) -> Admin:
        """A connection to the run's server."""
        return Admin(self.address, timeout=5.0)

    def until_version(self, version: int) -> int:
        """Waits for so many commits; returns how many there are."""
        with self.admin() as admin:

            def reached() -> int:
                assert self.process.poll() is None, self.output
                with suppress(GemError):
                    present = admin.status().version
                    return present if present >= version else 0
                return 0

            return int(wait_until(reached, f"version {version}", PATIENCE))

    @property
    def addresses(self) -> list[str]:
        """The addresses of the run's servers, the leader's first."""
        return re.findall(r"server (127\.0\.0\.1:\d+),", self.output)

    def members(self) -> dict[int, str]:
        """The cluster's processes: process id to what the system says of each."""
        return self._processes() if self.address else {}

    def _processes(self) -> dict[int, str]:
        """Servers and workers have the address in their command lines. A worker that is a copy of the launcher has the
        launcher's, and its own name."""
        marks = [*self.addresses, " ".join(self._command)]
        return {
            pid: f"{_name(pid)} {command}"
            for pid, command in command_lines()
            if pid != self.process.pid and any(mark in command for mark in marks)
        }

    def kill_member(self, text: str) -> None:
        """Kills -9 the one process of the cluster whose name or command line holds the text."""
        (pid,) = [pid for pid, command in self.members().items() if text in command]
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Leaves nothing running, even after a failed test."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            for pid in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _name(pid: int) -> str:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    return ""


def command_lines() -> Iterator[tuple[int, str]]:
    """All processes of this machine."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(entry.name), command


Launch = Callable[..., Launcher]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, by the letter of the standard."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{path.name} holds {constant}, which is no JSON")

    parsed: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return parsed


def last_state(run: Path, servers_folder: str = "") -> dict[str, Any]:
    """state.json of the run's newest checkpoint; of one of several servers, in its folder `range-I`."""
    newest = max((run / "checkpoints" / servers_folder).glob("checkpoint-*"))
    return read_json(newest / "state.json")


def settled_accuracy(run: Path) -> float:
    """The median accuracy in the second half of a run. At a constant rate, the steps of Adam and its kin leap now and then, in
    plain PyTorch too: the last evaluation may fall on such a leap (0.89 among values of 0.97)."""
    scores = {score["version"]: score["accuracy"] for score in json.loads((run / "evaluations.json").read_text())}
    return float(median(accuracy for version, accuracy in scores.items() if 2 * version >= max(scores)))


def commits(run: Path) -> list[dict[str, str]]:
    """The rows of commits.csv."""
    with (run / "commits.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_every_sample_accounted_for(run: Path, epochs: int, servers_folder: str = "") -> None:
    """The ledger says that every sample of every epoch is done, and history and checkpoint tell the same story."""
    state, rows = last_state(run, servers_folder), commits(run)
    assert_ledger_complete(state, epochs)
    assert [int(row["version"]) for row in rows] == list(range(1, state["version"] + 1))
    assert sum(int(row["samples"]) for row in rows) == state["samples_committed"]


def assert_ledger_complete(state: dict[str, Any], epochs: int) -> None:
    """The ledger of a checkpoint says that every sample of every epoch is done."""
    ledger = state["ledger"]
    assert ledger["samples"] == TRAINING_SAMPLES
    assert ledger["samples_completed"] == epochs * TRAINING_SAMPLES
    assert ledger["completed"] == epochs * SHARDS
    assert ledger["held"] == []
    assert ledger["decks"] == [["", epochs - 1, TRAINING_SAMPLES, []]]
    assert state["samples_committed"] >= ledger["samples_completed"]
