"""Python as a process of its own: a command of this project, or a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from kit.server import wait_until

TESTS = Path(__file__).parents[1]
PATIENCE = 400.0  # seconds that a process may take to get anywhere on a busy machine
Start = Callable[..., Any]  # of a kind of process, and its arguments


def environment(*paths: Path) -> dict[str, str]:
    """This process's variables but for our settings. Modules are found in these folders, and in tests/."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
    found = filter(None, [*map(str, paths), str(TESTS), clean.get("PYTHONPATH", "")])
    return clean | {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"}


def python(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **variables})


class Process:
    """Python with some arguments, which has a folder for its output and for its log of JSON, one object a line.

    Args:
        folder: The folder; made if it is missing.
        arguments: Python's arguments, such as `-m gem_server`.
        stderr: Where the log goes instead, as `subprocess.Popen` takes it.
        variables: Of its environment, in addition to this process's.
    """

    def __init__(self, folder: Path, *arguments: str, stderr: int | IO[str] | None = None, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._output = folder / "log", folder / "output"
        with self._log.open("wb") as log, self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=log if stderr is None else stderr, cwd=folder,
                env=environment() | {"GEM_LOG_FORMAT": "json"} | variables,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8")

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What it has logged."""
        whole = self.log.rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def events(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["event"] == event]

    def until_it_says(self, event: str) -> dict[str, Any]:
        """Waits for an event in its log, and returns the first."""

        def said() -> list[dict[str, Any]]:
            alive = self.alive  # before the log is read: it may end between the two
            found = self.events(event)
            assert alive or found, self.log
            return found

        return dict(wait_until(said, f"an entry {event!r} in the log", PATIENCE)[0])

    @property
    def address(self) -> str:
        """A server's, once it serves."""
        return str(self.until_it_says("serving")["address"])

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends it a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.wait()


@contextmanager
def processes(folder: Path) -> Iterator[Start]:
    """Starts processes during a `with` block, each with a folder of its own in this one; leaves none behind."""
    started: list[Process] = []

    def start(kind: Callable[..., Process], *arguments: Any, **more: Any) -> Process:
        started.append(kind(folder / f"process-{len(started)}", *arguments, **more))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()


@contextmanager
def running(folder: Path, *arguments: str, **more: Any) -> Iterator[Process]:
    """A process that does not outlive a `with` block."""
    process = Process(folder, *arguments, **more)
    try:
        yield process
    finally:
        process.kill()


def server_process(folder: Path, *flags: str, **more: Any) -> AbstractContextManager[Process]:
    """A gem-server that does not outlive a `with` block. Without a live page, unless the flags give it one."""
    return running(folder, "-m", "gem_server", "--metrics-listen", "", *flags, **more)
