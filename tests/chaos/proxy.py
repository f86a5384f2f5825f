"""A TCP proxy between workers and server that acts like a bad network: it cuts, half-closes and delays connections.

Faults come after so many bytes, wherever in a chunk that may be.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress

HOST = "127.0.0.2"  # another address of this machine: the lane's proxy can so have the number of the lane's port
_BLOCK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER that makes `close` send a reset


class Proxy:
    """Listens on HOST from its creation until `close`.

    Args:
        target: The port on this machine that connections go on to.
        seed: What the faults are drawn from.
        mean_bytes: How many bytes pass in one direction, on average, from one fault to the next.
        listen: The port to listen on; 0 for a free one.

    Attributes:
        port: Where it listens.
        faults: How many there were, by kind: cut, half-close, delay.
    """

    def __init__(self, target: int, seed: int, mean_bytes: int, listen: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._mean = mean_bytes
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.faults: Counter[str] = Counter()
        self._listener = socket.create_server((HOST, listen))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._open)
        for end in left:
            self._drop(end)

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                worker, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(worker,), name="proxy", daemon=True).start()

    def _connect(self, worker: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            self._drop(worker)
            return
        server.settimeout(None)
        with self._lock:
            self._open |= {worker, server}
        for source, sink in ((worker, server), (server, worker)):
            threading.Thread(target=self._pump, args=(source, sink), name="proxy", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Forwards the bytes of one direction, up to the fault that ends the connection."""
        try:
            while not self._closed.is_set():
                kind, left = self._next_fault()
                while left:
                    block = source.recv(min(left, _BLOCK))
                    if not block:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(block)
                    left -= len(block)
                self.faults[kind] += 1
                if kind == "cut":
                    break
                if kind == "half-close":
                    sink.shutdown(socket.SHUT_WR)
                    return
                self._closed.wait(0.3)
        except OSError:
            pass  # an end of it is gone, or this proxy is
        self._drop(source)
        self._drop(sink)

    def _next_fault(self) -> tuple[str, int]:
        with self._lock:
            kind = self._random.choice(("cut", "cut", "half-close", "delay"))
            return kind, 1 + int(self._random.expovariate(1 / self._mean))

    def _drop(self, end: socket.socket) -> None:
        with self._lock:
            self._open.discard(end)
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        end.close()
