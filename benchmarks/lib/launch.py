"""Runs a command that leaves a folder of gem-train's, and watches it to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gem_worker.launcher.run_folder import RunFolder

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.5
_STOP_SECONDS = 60.0
_COMPLETE, _DIVERGED = 0, 3  # gem-train's exit statuses after which there is a result


class RunFailed(Exception):
    """A run left no result; the message says why."""


def launch(
    command: Sequence[str], output: Path, watch: Callable[[], None] = lambda: None, variables: Mapping[str, str] | None = None
) -> RunFolder:
    """Runs gem-train, or a command that prints and leaves the same. Returns the run's folder.

    Args:
        command: The command line; it runs in the repository.
        output: Receives what the command prints.
        watch: Called twice a second until the command ends.
        variables: Added to the environment, without the `GEM_…` of the caller's.

    Raises:
        RunFailed: The command ended with another status than "complete" or "diverged", or named no folder.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEM_")} | dict(variables or {})
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        while not _ended(process, _POLL_SECONDS):
            watch()
    finally:
        _stop(process)
    said = output.read_text(errors="replace")
    found = re.search(r"^run (.+?): \d+ workers", said, re.MULTILINE)
    if process.returncode not in (_COMPLETE, _DIVERGED) or found is None:
        raise RunFailed(f"exit status {process.returncode}: {_last_line(said)}")
    return RunFolder(Path(found[1]))


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Makes a run in progress end itself and its processes. It sends SIGTERM, as background jobs of a shell ignore SIGINT."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        if not _ended(process, _STOP_SECONDS):
            process.kill()
            process.wait()


def _last_line(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
