"""A worker's process that begins as a copy of the launcher's: as a new process in all that a user sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, because pytest's has threads. A stand-in for PyTorch, which takes seconds to import.
SCRIPT = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
from gem_worker.launcher.cluster import python
from gem_worker.launcher.copies import Copy, Worker, can_copy

def worker(name, *arguments, **settings):
    return Worker(name, Path(name), python("gem_worker", *arguments), settings, 3)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are for Linux")


def run(folder: Path, body: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + body], cwd=folder, capture_output=True, text=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_copy_has_its_own_arguments_settings_log_and_exit_status(tmp_path: Path) -> None:
    """It reads no setting that is the launcher's own: with that server, it would wait instead."""
    lines = run(
        tmp_path,
        """
told, refused = worker("told", "--version"), worker("refused", "--task=nothing", log_level="debug", server="")
for each in (told, refused):
    each.start()
    assert isinstance(each.process, Copy)
    assert os.getpgid(each.process.pid) == each.process.pid
    assert os.getpriority(os.PRIO_PROCESS, each.process.pid) - os.getpriority(os.PRIO_PROCESS, 0) == 3
    each.wait(30)
    print(each.status)
""",
        GEM_LOG_LEVEL="no such level",
    )
    assert lines == ["0", "2"]
    assert "version" in (tmp_path / "told").read_text()
    assert "nothing" in (tmp_path / "refused").read_text()


def test_a_copy_that_is_killed_says_so_and_does_not_outlast_its_deadline(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
from gem_worker.launcher import copies
copies._run = lambda *_: signal.pause()
killed, slow = worker("killed"), worker("slow")
for each in (killed, slow):
    each.start()
assert killed.running and slow.status is None
killed.signal(signal.SIGTERM)
killed.wait(30)
slow.wait(0.0)
print(killed.status, slow.status)
""",
    )
    assert lines == [f"{-signal.SIGTERM} {-signal.SIGKILL}"]


def test_a_process_with_another_thread_or_a_gpu_is_not_copied(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
print(can_copy())
sys.modules["torch"].cuda.is_initialized = lambda: True
print(can_copy())
sys.modules["torch"].cuda.is_initialized = lambda: False
end = threading.Event()
threading.Thread(target=end.wait).start()
print(can_copy())
other = worker("other", "--version")
other.start()
print(isinstance(other.process, subprocess.Popen))
other.wait(60)
end.set()
""",
    )
    assert lines == ["True", "False", "False", "True"]
    assert "version" in (tmp_path / "other").read_text()
