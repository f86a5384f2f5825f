"""Python's cache of compiled modules: the .pyc files in `__pycache__`. If one was cut, the import of its module fails.

Imports the standard library alone: what it mends may be any other module."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_ELSEWHERE = "PYTHONPYCACHEPREFIX"


def start_without_damaged(error: BaseException) -> None:
    """Starts this process anew without the .pyc file that made an import fail, and says so. Returns if none did."""
    path = _damaged(error)
    if path is None or sys.platform == "win32" or os.environ.get(_ELSEWHERE) == os.devnull:
        return
    environment = dict(os.environ)
    try:
        path.unlink()
        done = "deleted it"
    except OSError:
        environment[_ELSEWHERE] = os.devnull  # no file is read there, or written
        done = "going on without compiled modules, which takes some seconds"
    with suppress(OSError, ValueError):  # standard error may be closed
        print(f"{Path(sys.argv[0]).name}: the compiled module {path} is damaged: {done}", file=sys.stderr, flush=True)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _damaged(error: BaseException | None) -> Path | None:
    """The file that the import system could not read, if that is the error or its cause."""
    while error is not None:
        if isinstance(error, ImportError) and str(error.path).endswith(".pyc"):  # it holds something else than code
            return Path(str(error.path))
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_next is None and trace.tb_frame.f_code.co_name == "_compile_bytecode":
                return Path(trace.tb_frame.f_locals["bytecode_path"])
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return None
