"""gem-ctl status --watch: it follows a run to its end, with and without a terminal, while its server stops and restarts."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ctl.test_ctl import NOBODY, ctl, on
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, GemError, Session, connect
from gem_ctl import text, watch
from gem_ctl.local_runs import Announcement
from gem_ctl.watch import Interrupts, Watch
from kit.model import GRADIENT, Wire, model
from kit.server import DEADLINE, Live, config, serving, wait_until
from kit.settings import configured

NAN = float("nan")
ONE_EPOCH = Hyperparameters(epochs=1, shard_size=8, batch_size=4)


class Shown:
    """A running gem-ctl status --watch on a terminal, and what it has written."""

    def __init__(self, server: str) -> None:
        self._terminal, its = pty.openpty()
        command = [sys.executable, "-m", "gem_ctl", "--server", server, configured(timeout=3600), "status", "--watch"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=environment)
        os.close(its)
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def written(self) -> str:
        return bytes(self._written).decode(errors="replace")

    def until(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.written, re.DOTALL), f"the terminal to show {pattern!r}")

    def end(self) -> int:
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        os.close(self._terminal)
        return status

    def _read(self) -> None:
        with suppress(OSError):  # a terminal's way to say that nobody has it open any more
            while data := os.read(self._terminal, 1 << 16):
                self._written += data


def finish(live: Live) -> None:
    with connect(live.address, name="alice") as session:
        session.join(model())
        for _ in session.shards(8):
            session.commit(GRADIENT, loss=1.25)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_EVERY", 0.01)


def test_it_shows_the_status_and_ends_with_the_run() -> None:
    with serving(config(ONE_EPOCH)) as live:
        finish(live)
        result = on(live, "status", "--watch")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"run         {live.core.run_id}, complete, up ")
    assert result.stdout.endswith("\n\nthe run is over: complete\n")
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["top", "--sort", "loss"], "there is no command top: use gem-ctl status --watch"),
        (["status", "--watch", "--json"], "omit one of them"),
    ],
    ids=" ".join,
)
def test_what_there_is_not_is_said_with_what_to_use(arguments: list[str], words: str) -> None:
    result = ctl("--server", NOBODY, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.usefixtures("quick")
def test_a_server_that_goes_and_comes_back_is_waited_for_above_its_last_status(tmp_path: Path) -> None:
    settings = config(ONE_EPOCH, checkpoint_dir=tmp_path / "checkpoints")
    with serving(settings) as live, connect(live.address, name="alice") as session:
        session.join(model())
        session.commit(GRADIENT)
        with Admin(live.address, 2.0) as admin:
            seen = Watch(admin, None)
            assert seen.look(Interrupts()) is None
            session.close()
            live.stop()
            assert seen.look(Interrupts()) is None
            assert seen.trouble.startswith("the server has gone; waiting for it to come back (no server at ")
            assert f"\n\nrun         {live.core.run_id}, training" in watch._picture(seen, [], live.address)
            with serving(replace(settings, listen=live.address, resume=True)):
                wait_until(lambda: seen.look(Interrupts()) or not seen.trouble, "the server to be reached again")


def looks(*answers: pb.GetStatusResponse | GemError, folder: Path | None = None) -> tuple[Watch, Callable[[], str | None]]:
    """A watch of a server that gives these answers."""
    left = list(answers)

    class Server:
        def status(self, *, curves: bool) -> pb.GetStatusResponse:
            answer = left.pop(0)
            if isinstance(answer, GemError):
                raise answer
            return answer

    server: Any = Server()
    seen = Watch(server, folder)
    return seen, lambda: seen.look(Interrupts())


def status(state: pb.RunState = pb.RUN_STATE_TRAINING, run_id: str = "r", **fields: Any) -> pb.GetStatusResponse:
    return pb.GetStatusResponse(run_id=run_id, state=state, parameter_count=9, **fields)


GONE = GemError("no server")


def test_how_a_run_ends_by_what_its_server_said_last(tmp_path: Path) -> None:
    _, look = looks(status(pb.RUN_STATE_COMPLETE), GONE)
    assert [look(), look()] == [None, "complete"]
    _, look = looks(status(), status(run_id="another"))
    assert [look(), look()] == [None, "replaced by another run"]
    seen, look = looks(status(pb.RUN_STATE_DRAINING), GONE)
    assert [look(), look()] == [None, None]
    assert seen.trouble.startswith("the server has shut down; waiting for it to come back")


def test_a_run_of_gem_train_ends_as_its_folder_says(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    announcement = Announcement(folder, "127.0.0.1:1")
    _, look = looks(status(), GONE, GONE, folder=folder)
    assert [look(), look()] == [None, None], "gem-train may restart its server"
    (folder / "summary.json").write_text('{"outcome": "stopped"}')
    announcement.close()
    assert look() == "stopped"


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, look = looks(status(), GONE)
    look()
    monkeypatch.setattr(watch, "_GIVE_UP", -1.0)
    with pytest.raises(watch.LostRun, match="has not responded"):
        look()


# -- on a terminal


@pytest.mark.long
def test_on_a_terminal_the_status_is_redrawn_in_place_and_a_signal_ends_it(live: Live, session: Session) -> None:
    with Wire(live.address) as wire:
        shown = Shown(wire.address)
        shown.until("training.*alice.*training.*alice")
        wire.stall()
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 0
    assert re.search(r"\x1b\[\d*A", shown.written), "the cursor goes back up"
    assert "\x1b[?1049h" not in shown.written, "the terminal's other lines stay"
    assert shown.written.rstrip().endswith("the run goes on")
    assert shown.written.rindex("\x1b[?25h") > shown.written.rindex("\x1b[?25l"), "the cursor is shown again"


# -- curves


def test_the_status_shows_how_the_figures_came_to_be() -> None:
    run = status(training_loss=0.5, curves=pb.RunCurves(loss=[NAN, 3.0, 2.0, 1.0], staleness=[1.0] * 401))
    lines = text.status(run).splitlines()
    assert "loss        0.5000     ▇▄▁" in lines
    (staleness,) = (line for line in lines if line.startswith("staleness"))
    assert 50 <= staleness.count("▄") <= 60


def test_a_sparkline_spans_its_values_and_a_steady_value_looks_steady() -> None:
    assert text.sparkline([0, 5, 10]) == "▁▄▇"
    assert text.sparkline([100, 101, 99]) == "▄▄▄"
    assert text.sparkline([0, 0]) == "▄▄"
    assert text.sparkline([]) == ""


def test_a_sparkline_marks_what_is_not_finite_and_leaves_out_what_is_unknown() -> None:
    assert text.sparkline([None, 1, NAN, 2, float("inf"), 3]) == " ▁×▄×▇"


@pytest.mark.parametrize("values", [[1.7e308, -1.7e308], [5e-324, 0], [-1e-300, 1e300]], ids=str)
def test_a_sparkline_takes_numbers_of_any_size(values: list[float]) -> None:
    assert len(text.sparkline(values)) == 2
