"""Something that listens in the place of a server, and says what a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def answering(listener: socket.socket, serve: Callable[[socket.socket], object]) -> Iterator[None]:
    """Calls `serve` with each connection, in a thread of its own, until the block ends; closes both afterwards."""

    def answer(visitor: socket.socket) -> None:
        with visitor, suppress(OSError):
            serve(visitor)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
