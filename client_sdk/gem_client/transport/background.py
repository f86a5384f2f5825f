"""A session's background thread: it renews the lease and cancels calls that make no progress."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gem_api.errors import GemError


class Background:
    """Calls `renew` every `interval` seconds, and cancels a watched call that makes no progress.

    Args:
        renew: Renews the lease. A GemError counts as a temporary failure. The reference is weak: a session that nobody
            closed is deleted with its last reference, and then its lease expires.
        timeout: Seconds without progress after which a watched call is cancelled.
    """

    def __init__(self, renew: weakref.WeakMethod[Callable[[], None]], timeout: float) -> None:
        self._renew = renew
        self._timeout = timeout
        self._interval = 5.0
        self._wake = threading.Event()
        self._closed = False
        self._renew_at = float("inf")  # nothing to renew before the first lease
        self._watched: tuple[Callable[[], object], float] | None = None
        self._thread = threading.Thread(target=self._run, name="gem-session", daemon=True)

    def start(self, interval: float) -> None:
        """Renews now, because the registration may have taken long, and then every `interval` seconds."""
        self._interval = interval
        self._renew_at = time.monotonic()
        self._run_thread()
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run_thread(self) -> None:
        if not self._thread.is_alive() and not self._closed:
            self._thread.start()

    @contextmanager
    def watching(self, cancel: Callable[[], object]) -> Iterator[Callable[[], None]]:
        """Yields a function that reports progress; calls `cancel` if it is not called for `timeout` seconds."""

        def progress() -> None:
            self._watched = cancel, time.monotonic()

        progress()
        self._run_thread()
        try:
            yield progress
        finally:
            self._watched = None

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(max(0.0, min(self._renew_at - time.monotonic(), self._timeout / 4)))
            self._wake.clear()
            now = time.monotonic()
            watched = self._watched
            if watched and now - watched[1] > self._timeout:
                watched[0]()
            if now >= self._renew_at and not self._closed:
                renew = self._renew()
                if renew is None:
                    return  # the session is gone
                self._renew_at = now + self._interval
                try:
                    renew()
                except GemError:  # the session's next call gets the same error, and handles it
                    self._renew_at = time.monotonic() + self._interval / 4
                del renew  # so that the thread holds no reference while it waits
