"""A command works the same whatever its parent has left to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gem_api.process.lifetime import ending_signals, signals_interrupt
from kit.process import python

SETTLED = """
import json, os, signal, subprocess, sys
from gem_api.process.surroundings import settle
settle()
child = subprocess.run(["false"]).returncode
opened = os.open("/dev/null", os.O_RDONLY)
print("\\u03c0", file=sys.stderr)
told = [opened, child, len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), os.path.expanduser("~")]
json.dump(told, open(sys.argv[1], "w"))
"""


def _left_behind() -> None:
    """What a parent may do before it starts a command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    for descriptor in range(3):
        os.close(descriptor)


@pytest.mark.long
def test_closed_streams_blocked_signals_a_poor_encoding_and_no_home_change_nothing(tmp_path: Path) -> None:
    told = tmp_path / "told"
    homeless = {"PYTHONIOENCODING": "ascii", "HOME": "~"}  # as expanduser answers for a user without an entry
    subprocess.run(
        [sys.executable, "-c", SETTLED, str(told)], preexec_fn=_left_behind, check=True, cwd=tmp_path, env=os.environ | homeless
    )
    opened, child, blocked, home = json.loads(told.read_text())
    assert opened > 2, "a file got the number of a standard stream"
    assert (child, blocked) == (1, 0)
    assert os.path.isabs(home)
    assert not os.path.exists(home), "the home of one command outlives it"


@pytest.mark.long
def test_a_working_directory_that_was_removed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); from gem_api.process.command import gem_ctl; gem_ctl()"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "gone", capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "the working directory does not exist any more" in done.stderr


@pytest.mark.long
def test_text_that_a_streams_encoding_lacks_is_escaped() -> None:
    program = "from gem_api.process.surroundings import settle; settle(); print('\\u03c0')"
    assert python("-c", program, PYTHONIOENCODING="ascii").stdout == "\\u03c0\n"


@pytest.fixture
def hangup() -> Iterator[Callable[[signal.Handlers], object]]:
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_ends_a_command_as_ctrl_c_does(hangup: Callable[[signal.Handlers], object]) -> None:
    hangup(signal.SIG_DFL)
    assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    with pytest.raises(KeyboardInterrupt), signals_interrupt():
        signal.raise_signal(signal.SIGHUP)


def test_under_nohup_a_terminal_that_closes_ends_nothing(hangup: Callable[[signal.Handlers], object]) -> None:
    hangup(signal.SIG_IGN)
    assert signal.SIGHUP not in ending_signals()
    with signals_interrupt():
        signal.raise_signal(signal.SIGHUP)
