"""gem-ctl top: polls a server's status and shows the run in the terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count as naturals
from typing import TypeVar

import click
from gem_client import Admin, GemError
from rich.console import Console
from rich.live import Live

from gem_ctl.picture import Picture, plain
from gem_ctl.ranges import Peers
from gem_ctl.watch import Watch

T = TypeVar("T")
_PATIENCE = 0.5  # seconds to wait for the other ranges; their last known state is shown after that


def show(admin: Admin, peers: Peers, server: str, every: float, count: int, sort: str) -> None:
    """Shows the run of the server behind `admin`, and its peers, until SIGINT or SIGTERM.

    It also ends after `count` updates (0: no limit).

    Raises:
        GemError: The server did not respond for the last of `count` updates.
    """
    watch, interrupts = Watch(time.monotonic()), Interrupts()
    picture = Picture(watch, server, sort)
    with ExitStack() as stack:
        stack.enter_context(interrupts)
        stack.enter_context(admin)
        stack.enter_context(peers)
        draw = _canvas(stack)
        stack.enter_context(suppress(KeyboardInterrupt))
        for shown in naturals(1):
            try:
                status = interrupts.wait(admin.status)
                watch.saw(status, time.monotonic(), interrupts.wait(partial(peers.look, status, _PATIENCE)))
            except GemError as error:
                watch.missed(error)
            draw(picture)
            if shown == count:
                break
            interrupts.wait(lambda: time.sleep(every))
        if watch.error is not None:
            raise watch.error


def _canvas(stack: ExitStack) -> Callable[[Picture], None]:
    """Returns a function that shows a picture: on the alternate screen until the stack ends, or as plain text."""
    console = Console(force_terminal=sys.stdout.isatty())
    if not console.is_terminal or console.is_dumb_terminal:
        return lambda picture: click.echo(plain(picture.draw(console.width, None, time.monotonic()), console.width) + "\n")
    screen = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
    return lambda picture: screen.update(picture.draw(*console.size, time.monotonic()), refresh=True)


class Interrupts:
    """Handles SIGINT and SIGTERM within a `with` block: they interrupt `wait` at once, and nothing else.

    An exception while drawing, or while leaving the alternate screen, would leave the terminal in a broken state.
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
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True
        if self._waiting:
            raise KeyboardInterrupt
