"""Commands that a test starts, and scripts that it runs to their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.server import wait_until

Start = Callable[..., Any]  # of a kind of process, and its arguments
PATIENCE = 400.0  # seconds that a process may take to get anywhere on a busy machine


def python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **environment})


class Process:
    """Python with some arguments, started without settings from the environment; its output goes to a file."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self._output = output
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=environment | {"GEM_LOG_FORMAT": "json"},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def address(self) -> str:
        """A server's, once it serves."""

        def said() -> str | None:
            assert self.alive, self.output
            lines = [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]
            return next((line["address"] for line in lines if line.get("event") == "serving"), None)

        return str(wait_until(said, "the server to serve", PATIENCE))

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.wait()

    def end(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()


@contextmanager
def processes(folder: Path) -> Iterator[Start]:
    """Starts processes during a `with` block, with their outputs in this folder; leaves none behind."""
    started: list[Process] = []

    def start(kind: Callable[..., Process], *arguments: str) -> Process:
        started.append(kind(folder / f"output-{len(started)}.txt", *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
