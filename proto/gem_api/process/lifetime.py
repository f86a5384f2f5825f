"""How a process ends: with the launcher that started it, and on Ctrl-C."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHER = "GEM_LAUNCHER_PID"  # set by gem-train for the processes that it starts
EXIT_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Has this process get SIGTERM when its launcher dies, however that dies. Does nothing without one, or off Linux."""
    launcher = os.environ.get(LAUNCHER, "")
    if not launcher.isdigit():
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (AttributeError, OSError, TypeError):
        return
    if os.getppid() != int(launcher):  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Has Ctrl-C and SIGTERM raise KeyboardInterrupt in the block or the decorated command; uncaught, it exits with status 130.

    Python hears Ctrl-C by itself, but not in a process that was started with SIGINT ignored, as a script's `command &` is. Does
    nothing outside the main thread, which alone may say what signals do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
