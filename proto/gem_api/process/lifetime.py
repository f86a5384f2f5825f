"""A process's answers to signals: it ends on Ctrl-C and when its launcher dies, and prints its stacks on SIGUSR1."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gem_api.process.bytecode import start_without_damaged

LAUNCHER = "GEM_LAUNCHER_PID"  # set by gem-train for the processes that it starts
EXIT_INTERRUPTED = 130  # as in shells: 128 plus the number of SIGINT
_PR_SET_PDEATHSIG = 1
_INNERMOST = 8  # calls of a thread that are named
_STANDARD_ERROR = 2  # not sys.stderr, which a test or Ray may have replaced by something without a file


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a command in order: Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes. Not SIGHUP if it is
    ignored, as under nohup."""
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    heard = () if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN else (hangup,)
    return (signal.SIGINT, signal.SIGTERM, *heard)


def end_with_launcher() -> None:
    """Makes the kernel send this process SIGTERM when its launcher dies. Does nothing without a launcher, or outside Linux."""
    launcher = os.environ.get(LAUNCHER, "")
    if not launcher.isdigit():
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (AttributeError, OSError, TypeError):
        return
    if os.getppid() != int(launcher):  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def print_stacks_on_signal() -> None:
    """Makes `kill -USR1` print the stacks of all threads to standard error; the process goes on. Without this call, the signal
    ends it. Does nothing on systems without the signal."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=_STANDARD_ERROR, all_threads=True)


def where_threads_stand(but: str) -> dict[str, str]:
    """The innermost calls of each thread whose name does not begin with `but`, by its name, the innermost first."""
    frames = sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread.ident in frames and not thread.name.startswith(but)]
    return {thread.name: _calls(frames[thread.ident]) for thread in others if thread.ident is not None}


def _calls(frame: FrameType) -> str:
    calls = [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in traceback.extract_stack(frame)[-_INNERMOST:]]
    return " < ".join(reversed(calls))


@contextmanager
def long_imports() -> Iterator[None]:
    """Around imports that take seconds: Ctrl-C ends the process at once with 130, and `kill -USR1` prints its stacks.

    Not by an exception, which an import may catch or turn into another one; nothing has begun that needs an end. A signal that
    is ignored, as Ctrl-C is in a script's background, stays so. If a .pyc file is damaged, the process starts anew without it.
    """
    print_stacks_on_signal()
    raising = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.default_int_handler]
    for number in raising:
        signal.signal(number, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    except Exception as error:
        start_without_damaged(error)
        raise
    finally:
        for number in raising:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """As `signals_interrupt`, for a command, which may be decorated with it: uncaught, the process exits with 130."""
    try:
        with signals_interrupt():
            yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Makes Ctrl-C, SIGTERM and a terminal that closes raise KeyboardInterrupt in a block.

    Python handles Ctrl-C by default, but not in a process that was started with SIGINT ignored, such as `command &` in a
    script. Does nothing outside the main thread: only that one can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
