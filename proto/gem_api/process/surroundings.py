"""Makes a command independent of what its parent left to it: closed descriptors, ignored or blocked signals, no home."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # descriptors 0 to 2


def settle() -> None:
    """Call this before a command imports or opens anything."""
    _open_standard_streams()
    _require_a_working_directory()
    _reset_signals()
    _have_a_home()


def _open_standard_streams() -> None:
    """Opens /dev/null in the place of standard streams that are closed. A file or a socket would otherwise get such a number,
    and receive what a library prints. Characters that a stream's encoding lacks are escaped rather than an error."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, (name, mode) in enumerate(_STANDARD):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _require_a_working_directory() -> None:
    """Libraries that are loaded later ask for it, and say nothing that a user would understand."""
    try:
        os.getcwd()
    except OSError:
        sys.exit("the working directory does not exist any more: change to another one")


def _reset_signals() -> None:
    """Blocks no signal, and lets the system keep the exit status of children, which it drops if SIGCHLD is ignored. What else
    is ignored stays so, such as SIGHUP under nohup."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _have_a_home() -> None:
    """If the user has no home folder, as a container's user without a name, makes one for the time of the command: libraries
    would make a folder named ~ in the working directory. Not a shared one, because they run code that they find in it."""
    if os.path.expanduser("~") == "~":
        home = os.environ["HOME"] = tempfile.mkdtemp(prefix="gem-home-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
