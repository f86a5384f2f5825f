"""Watches a run to its end: what `gem-ctl status --watch` and `gem-ctl track` have in common, and the former itself."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import click
from gem_api.errors import GemError
from gem_api.process.lifetime import ending_signals
from gem_api.process.printable import printable
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin

from gem_ctl import ranges, text
from gem_ctl.columns import terminal_width
from gem_ctl.local_runs import find_runs, outcome

T = TypeVar("T")
_EVERY = 1.0  # seconds between two statuses
_PATIENCE = 0.5  # seconds to wait for the other ranges; their last known state is shown after that
_GIVE_UP = 600.0  # seconds without a response after which a server on another machine counts as gone


class LostRun(GemError):
    """The server has not come back."""


class Watch:
    """Asks a server for its status, until its run is over.

    Args:
        admin: The server.
        folder: The run's folder, if gem-train on this machine leads the run: then it tells how the run ended.

    Attributes:
        status: The last status received; None before the first.
        trouble: Why there was no response to the last request; empty if there was.
    """

    def __init__(self, admin: Admin, folder: Path | None) -> None:
        self._admin, self._folder = admin, folder
        self._answered = time.monotonic()
        self.status: pb.GetStatusResponse | None = None
        self.trouble = ""

    def look(self, interrupts: Interrupts, *, curves: bool = False) -> str | None:
        """Asks for the status, with the run's curves if wanted. Returns the run's outcome if the server has gone for good.

        Raises:
            GemError: The server does not respond at first, or not for 10 minutes.
        """
        try:
            status = interrupts.wait(partial(self._admin.status, curves=curves))
        except GemError as error:
            return self._missed(error)
        before = self.status
        if before is not None and before.parameter_count and status.run_id != before.run_id:
            return "replaced by another run"
        self.status, self.trouble, self._answered = status, "", time.monotonic()
        return None

    def _missed(self, error: GemError) -> str | None:
        if self.status is None and self._folder is None:
            raise error
        if self._folder is not None and self._folder not in find_runs(self._folder.parent):
            return outcome(self._folder)
        if self._folder is None and self.status is not None and self.status.state == pb.RUN_STATE_COMPLETE:
            return "complete"
        silent = time.monotonic() - self._answered
        if silent > _GIVE_UP:
            raise LostRun(f"the server has not responded for {_GIVE_UP:.0f} s: {text.error(error)}")
        left = self.status is not None and self.status.state == pb.RUN_STATE_DRAINING
        gone = f"the server has {'shut down' if left else 'gone'}"
        self.trouble = f"{gone}; waiting for it to come back ({' '.join(text.error(error).split())})"
        return None


def show(watch: Watch, peers: ranges.Peers, server: str) -> None:
    """Shows the status every second until the run is over, or SIGINT or SIGTERM: in place on a terminal, else one after the
    other. Raises GemError as `Watch.look`."""
    over: str | None = None
    with Interrupts() as interrupts, suppress(KeyboardInterrupt), ExitStack() as stack:
        draw = _canvas(stack)
        while over is None:
            over = watch.look(interrupts, curves=True)
            if watch.status is not None:
                draw(_picture(watch, interrupts.wait(partial(peers.look, watch.status, _PATIENCE)), server))
                over = over or ("complete" if watch.status.state == pb.RUN_STATE_COMPLETE else None)
            if over is None:
                interrupts.wait(lambda: time.sleep(_EVERY))
    click.echo("the run goes on" if over is None else f"the run is over: {over}")


def _picture(watch: Watch, others: list[ranges.RangeState], server: str) -> str:
    assert watch.status is not None
    shown = text.status(watch.status, ranges.lines(server, watch.status, others), terminal_width())
    return f"! {printable(watch.trouble)}\n\n{shown}" if watch.trouble else shown


def _canvas(stack: ExitStack) -> Callable[[str], None]:
    """Returns a function that shows a text: in place until the stack ends, or after the last one if this is no terminal."""
    from rich.console import Console  # here, as no other command needs it
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty() or (console := Console(force_terminal=True)).is_dumb_terminal:
        return lambda shown: click.echo(shown + "\n")
    live = stack.enter_context(Live(console=console, auto_refresh=False))
    return lambda shown: live.update(Text(shown, no_wrap=True, overflow="ellipsis"), refresh=True)


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP within a `with` block: they interrupt `wait` at once, and nothing else.

    An exception while drawing would leave the terminal in a broken state.
    """

    def __init__(self) -> None:
        self._signalled = self._waiting = False

    def wait(self, call: Callable[[], T]) -> T:
        """Calls `call`. Raises KeyboardInterrupt as soon as a signal arrives, or if one has arrived before."""
        self._waiting = True
        try:
            if self._signalled:
                raise KeyboardInterrupt
            return call()
        finally:
            self._waiting = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._on_signal) for number in ending_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True
        if self._waiting:
            raise KeyboardInterrupt
