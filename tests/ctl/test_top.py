"""gem-ctl top as users run it: a separate process, with and without a terminal, while its server stops and restarts."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from gem_client import Session, connect
from kit.model import Wire, model
from kit.server import DEADLINE, Live, serving, wait_until
from kit.settings import configured

NOBODY = "127.0.0.1:1"
MEANT_FOR_IT = ("GEM_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_")  # environment variables
ENTERED, LEFT, CURSOR_BACK = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"  # the alternate screen, the cursor


class Top:
    """A running gem-ctl top, and what it has written; `output` is the file descriptor to read that from."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self.process = process
        self._output, self._written, self._seen = output, bytearray(), 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def written(self) -> str:
        return bytes(self._written).decode(errors="replace")

    def until_it_shows(self, pattern: str) -> None:
        """Waits until that comes after what it was last waited for."""
        found = wait_until(lambda: re.compile(pattern).search(self.written, self._seen), f"top to show {pattern!r}")
        self._seen = found.end()

    def end(self, number: signal.Signals) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit status, once it has ended."""
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return status

    def _read(self) -> None:
        with suppress(OSError):  # a terminal's way to say that nobody has it open any more
            while data := os.read(self._output, 1 << 16):
                self._written += data


@contextmanager
def running(reading: int, writing: int, server: str, *arguments: str, **environment: str) -> Iterator[Top]:
    """gem-ctl top with its output to `writing`, which is read from `reading`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(MEANT_FOR_IT)}
    command = [sys.executable, "-m", "gem_ctl", "--server", server, *arguments]
    environment = {**clean, "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, env=environment)
    os.close(writing)
    top = Top(process, reading)
    try:
        yield top
    finally:
        process.kill()
        top.wait()
        os.close(reading)


@contextmanager
def piped(server: str, *arguments: str, **environment: str) -> Iterator[Top]:
    reading, writing = os.pipe()
    with running(reading, writing, server, *arguments, **environment) as top:
        yield top


def resize(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextmanager
def on_terminal(server: str, *arguments: str, **environment: str) -> Iterator[tuple[Top, int]]:
    """gem-ctl top on a terminal of 80 columns and 24 lines, and that terminal; whose settings it must leave as they were."""
    terminal, its = pty.openpty()
    resize(terminal, 80, 24)
    before = termios.tcgetattr(its)
    with running(terminal, its, server, *arguments, **environment) as top:
        yield top, terminal
        assert termios.tcgetattr(terminal) == before


# -- without a terminal


def test_without_a_terminal_pictures_come_as_plain_text_and_end_after_their_count(live: Live, session: Session) -> None:
    with piped(live.address, "top", "--count", "2", "--every", "0.05") as top:
        assert top.wait() == 0
    first, second = top.written.strip().split("\n\n")
    for picture in (first, second):
        assert picture.startswith(f"run {live.core.run_id}  TRAINING")
        assert "loss        1.2500" in picture
        assert re.search(r"^alice +1 +\S+ +0 ", picture, re.MULTILINE)
    assert "commits/s   –" in first
    assert "commits/s   0.00" in second
    assert "\x1b" not in top.written


def test_colours_are_for_terminals_only_even_where_they_are_forced(live: Live) -> None:
    with piped(live.address, "top", "--count", "1", FORCE_COLOR="1") as top:
        assert top.wait() == 0
    assert "no live workers" in top.written
    assert "\x1b" not in top.written


def test_settings_may_come_from_the_environment(live: Live) -> None:
    with piped(live.address, "top", GEM_TOP_COUNT="2", GEM_TOP_EVERY="0.01", GEM_TOP_SORT="loss") as top:
        assert top.wait() == 0
    assert top.written.count(live.core.run_id) == 2


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--sort", "luck"], ["--every", "0"], ["--count", "-1"]], ids=" ".join)
def test_a_wrong_command_line_is_exit_status_2(arguments: list[str]) -> None:
    with piped(NOBODY, "top", *arguments) as top:
        assert top.wait() == 2


def test_a_reader_that_goes_away_ends_it_quietly(live: Live) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    quiet, errors = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "gem_ctl", "--server", live.address, "top", "--every", "0.01"], stdout=writing, stderr=errors
    )
    os.close(writing)
    os.close(errors)
    assert process.wait(DEADLINE) == 1
    assert os.read(quiet, 1 << 16) == b""
    os.close(quiet)


# -- a server that comes and goes


def test_a_server_that_goes_and_comes_back_is_waited_for_under_its_last_picture() -> None:
    with serving() as live, connect(live.address, name="alice") as session:
        session.join(model())
        with piped(live.address, configured(timeout=0.5), "top", "--every", "0.05") as top:
            top.until_it_shows(f"run {live.core.run_id}  TRAINING")
            session.close()
            live.stop()
            top.until_it_shows(rf"! no response for \d+ s: .*\nrun {live.core.run_id}")
            top.until_it_shows("no response")  # and goes on
            with serving(replace(live.config, listen=live.address)) as back:
                top.until_it_shows(rf"(?s)\n\nrun {back.core.run_id}  WAITING.*commits/s   –")
                assert top.end(signal.SIGTERM) == 0
    assert "Traceback" not in top.written


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with serving() as live:
        pass
    with piped(live.address, configured(timeout=0.5), "top", "--every", "0.05") as top:
        top.until_it_shows("no response for")
        with serving(replace(live.config, listen=live.address)) as back:
            top.until_it_shows(f"run {back.core.run_id}  WAITING")


def test_the_exit_status_says_that_the_last_picture_had_no_answer() -> None:
    with piped(NOBODY, "top", "--count", "2", "--every", "0.01") as top:
        assert top.wait() == 1
    assert top.written.count("no response for") == 2
    assert "Traceback" not in top.written
    assert top.written.splitlines()[-1].startswith("gem-ctl: no server at ")


def test_waiting_for_an_answer_that_does_not_come_can_be_interrupted(live: Live, session: Session) -> None:
    with Wire(live.address) as wire, piped(wire.address, configured(timeout=3600), "top", "--every", "0.01") as top:
        top.until_it_shows("TRAINING")
        wire.stall()
        assert top.end(signal.SIGINT) == 0


# -- on a terminal


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(live: Live, session: Session, number: signal.Signals) -> None:
    with on_terminal(live.address, "top", "--every", "0.01") as (top, _):
        top.until_it_shows("(?s)alice.*alice")
        assert top.end(number) == 0
    before, _, picture = top.written.partition(ENTERED)
    shown, _, after = picture.partition(LEFT)
    assert before == ""
    assert live.core.run_id in shown
    assert CURSOR_BACK in shown + after
    assert not re.sub(r"\x1b\[\?25h", "", after).strip()


def test_the_last_of_a_count_of_pictures_leaves_the_terminal_as_it_was(live: Live) -> None:
    with on_terminal(live.address, "top", "--count", "2", "--every", "0.01") as (top, _):
        assert top.wait() == 0
    assert top.written.count(ENTERED) == top.written.count(LEFT) == 1


def test_a_terminal_that_is_made_wider_gets_a_wider_picture(live: Live) -> None:
    with on_terminal(live.address, "top", "--every", "0.01") as (top, terminal):
        top.until_it_shows(f"{live.address}, version")
        assert not re.search(r"─{60}", top.written)
        resize(terminal, 120, 40)
        top.until_it_shows("─{60}")
        assert top.end(signal.SIGINT) == 0


@pytest.mark.long
def test_no_color_means_no_colour(live: Live) -> None:
    coloured = r"\x1b\[(\d+;)*[34][0-7][;m]"
    for environment, colours in (({}, True), ({"NO_COLOR": "1"}, False)):
        with on_terminal(live.address, "top", "--count", "1", **environment) as (top, _):
            assert top.wait() == 0
        assert bool(re.search(coloured, top.written)) is colours, top.written


def test_a_dumb_terminal_gets_plain_text(live: Live) -> None:
    with on_terminal(live.address, "top", "--count", "2", "--every", "0.01", TERM="dumb") as (top, _):
        assert top.wait() == 0
    assert "\x1b" not in top.written
    assert top.written.count("no live workers") == 2
