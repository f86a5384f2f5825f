"""Prints what each thread of a process does, for an operator who wonders why it stands still."""

from __future__ import annotations

import faulthandler
import signal

_STANDARD_ERROR = 2  # not sys.stderr, which a test or Ray may have replaced by something without a file


def print_stacks_on_signal() -> None:
    """Makes `kill -USR1` print the stacks of all threads to standard error; the process goes on. Without this call, the signal
    ends it. Does nothing on systems without the signal."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=_STANDARD_ERROR, all_threads=True)
