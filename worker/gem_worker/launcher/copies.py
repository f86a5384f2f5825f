"""Worker processes that begin as copies of this one, which has imported PyTorch: they import nothing, and share its memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from gem_worker.launcher.cluster import Child, Process

_PR_SET_NAME = 15
_NAME_LENGTH = 15  # of what the kernel keeps


class Worker(Process):
    """A worker's process: on the CPU a copy of this one if that works, else a new one."""

    def _spawn(self, command: list[str], output: IO[bytes], environment: Mapping[str, str]) -> Child:
        if not (self.on_cpu and can_copy()):  # a copy could not use a GPU that this process has asked for, nor more threads
            return super()._spawn(command, output, environment)
        return Copy(self.name, command[command.index("gem_worker") + 1 :], output, environment)


def can_copy() -> bool:
    """Whether a copy of this process works: on Linux, while it has one thread and has not used a GPU."""
    torch = sys.modules.get("torch")
    return (
        sys.platform == "linux"
        and torch is not None
        and not torch.cuda.is_initialized()
        and len(os.listdir("/proc/self/task")) == 1
    )


class Copy:
    """A copy of this process that runs gem-worker, with what members need of `subprocess.Popen`.

    Args:
        name: The worker's name.
        arguments: The arguments of gem-worker.
        output: The file for its output.
        environment: All of its environment variables.
    """

    def __init__(self, name: str, arguments: list[str], output: IO[bytes], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(name, arguments, output.fileno(), environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with suppress(OSError):  # it has ended
            os.setpgid(self.pid, self.pid)  # here too, before a Ctrl-C that comes before the copy runs

    def poll(self) -> int | None:
        """The exit status, negative if a signal ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(name: str, arguments: list[str], output: int, environment: Mapping[str, Any]) -> None:
    """The body of a copy: what `subprocess.Popen` does for a new process, and gem-worker."""
    os.setpgid(0, 0)
    with open(os.devnull, "rb") as nothing:
        for source, standard in ((nothing.fileno(), 0), (output, 1), (output, 2)):
            os.dup2(source, standard)
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_NAME_LENGTH], 0, 0, 0)  # as `top` and `ps -o comm` show it
    sys.argv = ["gem-worker", *arguments]
    from gem_api.process.command import gem_worker

    gem_worker()
