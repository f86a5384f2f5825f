"""The processes of a race. They are forked from one that has all modules and data in memory, so that starting costs nobody
anything, at the start or when a killed worker comes back."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.launch import last_line

DIVERGED = 3  # the exit status of a worker whose gradient was not finite
_PR_SET_PDEATHSIG = 1


class Family:
    """Child processes that end with their parent. The parent must not start threads, as it forks.

    Args:
        folder: Receives what each child prints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._children = folder, dict[str, BaseProcess]()

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Runs a function in a process of its own. A name may be used again when its process has ended."""
        child = mp.get_context("fork").Process(
            target=_run, args=(self._folder / f"{name}.txt", function, *arguments), name=name
        )
        child.start()
        self._children[name] = child

    def kill(self, name: str) -> None:
        """Kills a process and all that it has started, as the loss of a machine does."""
        child = self._children.pop(name)
        machine.kill(machine.tree([child.pid or 0]))
        child.join()

    def failed(self) -> tuple[str, int] | None:
        """A process that has ended by itself, with its exit status."""
        return next(((name, child.exitcode) for name, child in self._children.items() if child.exitcode is not None), None)

    def said(self, name: str) -> str:
        """The last line that a process has printed."""
        return last_line(self._folder / f"{name}.txt")

    def end(self) -> None:
        """Kills all of them, and what they have started."""
        machine.kill(machine.tree([child.pid or 0 for child in self._children.values()]))
        for child in self._children.values():
            child.join()
        self._children.clear()


def _end_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(output: Path, function: Callable[..., None], *arguments: Any) -> None:
    _end_with_parent()
    gc.freeze()  # or the first collection, in the midst of the race, would copy all memory that is shared with the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        function(*arguments)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
