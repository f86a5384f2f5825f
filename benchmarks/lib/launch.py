"""Runs a command that leaves a folder of gem-train's, and watches it to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.options import as_environment, flags, settings_without_flags
from gem_worker.launcher.run_folder import RunFolder

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.5
_STOP_SECONDS = 60.0
_COMPLETE, _DIVERGED = 0, 3  # gem-train's exit statuses after which there is a result


class RunFailed(Exception):
    """A run left no result; the message says why."""


def gem_train(
    settings: Hyperparameters, task: str, data: Path | None, workers: int, folder: Path,
    watch: Callable[[], None] = lambda: None, processes: int = 2, variables: Mapping[str, str] | None = None, **more: Any,
) -> RunFolder:  # fmt: skip
    """Runs gem-train to its end. Returns the run's folder, which is in `folder`.

    Args:
        settings: The run's hyper-parameters.
        processes: Worker processes that the workers share.
        watch: Called twice a second until it ends.
        variables: More of the environment.
        more: Settings without an option, by their keys.

    Raises:
        RunFailed: It left no result.
    """
    command = [
        sys.executable, "-m", "gem_worker.launcher.cli", f"--task={task}", f"--workers={workers}", *flags(settings),
        f"--runs={folder / 'runs'}", "--durability=memory",
    ]  # fmt: skip
    command += [f"--data={data.resolve()}"] if data else []
    command += [f"--processes={processes}"] if processes < workers else []
    return launch(
        command, folder / "output.txt", watch, {**as_environment(settings_without_flags(settings) | more), **(variables or {})}
    )


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
            command, cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
    try:
        while not _ended(process, _POLL_SECONDS):
            watch()
    finally:
        _stop(process)
    found = re.search(r"^run (.+?): \d+ workers", output.read_text(errors="replace"), re.MULTILINE)
    if process.returncode not in (_COMPLETE, _DIVERGED) or found is None:
        raise RunFailed(f"exit status {process.returncode}: {last_line(output)}")
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


def last_line(output: Path) -> str:
    """The last line that a process has printed."""
    lines = output.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
