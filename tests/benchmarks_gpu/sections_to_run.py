"""Sections for the tests of what runs them. Each has a child, as a section has servers; it waits until it is killed."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.checks import Checks

_WAIT = "import signal; signal.pause()"


def start(checks: Checks) -> subprocess.Popen[bytes]:
    """Starts the child, and prints its process id."""
    child = subprocess.Popen([sys.executable, "-c", _WAIT])
    checks.check("child", lambda: {"pid": child.pid})
    return child
