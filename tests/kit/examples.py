"""Runs an example as its README says: the same script several times, as workers of one server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 280.0  # seconds that a script may take on a busy machine


def workers_of(script: str, address: str, count: int = 2) -> list[str]:
    """What each worker prints. Fails if one does not end with status 0."""
    command = [sys.executable, script, address]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(count)
    ]
    try:
        output = [worker.communicate(timeout=PATIENCE)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    assert [worker.returncode for worker in started] == [0] * count, "\n".join(output)
    return output
