"""Two workers that go on committing in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gem_client import Admin, GemError, Session, connect

from kit.model import Array
from kit.server import DEADLINE

Parameters = dict[str, Array]


def beginning(address: str, parameters: Parameters, gradient: Array, refused: Array) -> None:
    """What a run has seen before the crew comes: a commit, one that is refused, an evaluation and a checkpoint."""
    with connect(address, name="bad") as session, Admin(address) as admin:
        session.join(parameters)
        session.commit(gradient, loss=1.0, samples=8)
        try:
            session.commit(refused)
        except GemError:
            pass
        else:
            raise AssertionError("the commit was not refused")
        admin.report_evaluation(1, 0.5, 0.75)
        admin.checkpoint()


@contextmanager
def crew(address: str, parameters: Parameters, work: Callable[[Session, threading.Event], None]) -> Iterator[None]:
    """Two threads, the workers ann and bob, call `work` with their session and an event that ends it."""
    enough = threading.Event()

    def run(name: str) -> None:
        with connect(address, name=name) as session:
            session.join(parameters)
            work(session, enough)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in ("ann", "bob")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join(DEADLINE)
