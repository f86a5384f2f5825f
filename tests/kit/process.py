"""A command of this project as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.server import wait_until

TESTS = Path(__file__).parents[1]
PATIENCE = 120.0  # seconds that a process may take on a busy machine


def environment(*paths: Path) -> dict[str, str]:
    """This process's variables but for our settings. Modules are found in these folders, and in tests/."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")}
    found = filter(None, [*map(str, paths), str(TESTS), clean.get("PYTHONPATH", "")])
    return clean | {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"}


class Process:
    """A running `python -m MODULE` in a folder; its log is JSON, one object a line."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._output = folder / "log", folder / "output"
        with self._log.open("wb") as log, self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stderr=log, stdout=output, cwd=folder, env=environment() | {"GEM_LOG_FORMAT": "json"},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What it has logged."""
        whole = self.log.rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def events(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["event"] == event]

    def until_it_says(self, event: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None or self.events(event), self.log
            return bool(self.events(event))

        wait_until(said, f"an entry {event!r} in the log", PATIENCE)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE)


@contextmanager
def running(folder: Path, module: str, *arguments: str) -> Iterator[Process]:
    """A process that does not outlive a `with` block."""
    started = Process(folder, module, *arguments)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
