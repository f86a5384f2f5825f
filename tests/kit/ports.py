"""Free ports of this machine.

They lie below those that the system gives to outgoing connections and to listeners on port 0. Nobody else takes such a port
while a test restarts the server that listens on it.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 20_000, 12_000  # Linux gives out 32,768 and above
_offsets = itertools.count(os.getpid() * 101)  # test processes that run side by side begin apart


def free_port() -> int:
    """A port that nobody listens on, and that this function returns once."""
    for offset in itertools.islice(_offsets, _COUNT):
        port = _FIRST + offset % _COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_FIRST} to {_FIRST + _COUNT} is free")


def free_address() -> str:
    """A free port of the loopback interface, as HOST:PORT."""
    return f"127.0.0.1:{free_port()}"
