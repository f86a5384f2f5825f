"""Ties a process's life to that of the launcher that started it."""

from __future__ import annotations

import ctypes
import os
import signal

LAUNCHER = "GEM_LAUNCHER_PID"  # set by gem-train for the processes that it starts
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
