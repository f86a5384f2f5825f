"""A server as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from kit.server import DEADLINE


class Process:
    """`python -m gem_server` with its log in JSON lines, which goes to a pipe, or to the file `log`."""

    def __init__(self, flags: Sequence[str], environment: dict[str, str], log: IO[str] | None = None) -> None:
        command = [sys.executable, "-m", "gem_server", "--metrics-listen", "", *flags]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "GEM_LOG_FORMAT": "json", **environment},
            stderr=subprocess.PIPE if log is None else log,
            text=True,
            encoding="utf-8",
        )
        self.lines: list[str] = []

    def serving(self) -> str:
        """Waits until it serves; returns its address."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if '"event": "serving"' in line:
                return str(json.loads(line)["address"])
        raise AssertionError(f"the server ended before it served: {self.lines}")

    def close_log(self) -> None:
        """Nobody reads its log from now on."""
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.stderr = None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end and reads the rest of its log; returns the exit status."""
        rest = self._process.communicate(timeout=2 * DEADLINE)[1]
        self.lines += (rest or "").splitlines(keepends=True)
        return self._process.returncode

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.running:
            self._process.kill()
            self._process.communicate()


@contextmanager
def process(*flags: str, **environment: str) -> Iterator[Process]:
    """A server process that is gone after the `with` block."""
    with gone_at_the_end(Process(list(flags), environment)) as server:
        yield server


@contextmanager
def gone_at_the_end(server: Process) -> Iterator[Process]:
    try:
        yield server
    finally:
        server.kill()
