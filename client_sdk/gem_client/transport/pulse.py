"""Tells a lane on which a peer waits from a lane that is dead."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable

from gem_api.process.files import OWN_LIMITS

LOOK_SECONDS = 0.25  # a call that moves no byte for so long looks for a pulse
SILENT_SECONDS = 2.0  # without a packet: then the port is tried. Keep-alive asks for one every second
TRY_SECONDS = 1.5  # that connecting may take: the system repeats its first packet after one second
_AGES = struct.Struct("=52xII")  # of Linux's tcp_info: tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds


class Pulse:
    """Watches one TCP connection while an exchange waits on it.

    A gradient may wait for its turn, and a result for a slow rule: the server's system answers packets all the same. If none
    comes, the pulse connects to the same port, because a firewall that drops the lane's packets drops these too. It also does
    so in a long wait for a turn, in which the client's system asks for packets less and less often, and if the system doesn't
    say when packets came.

    Args:
        sock: The connection.
        patience: Seconds for which no byte may move, whatever else comes.
        clock: Returns monotonic seconds.
    """

    def __init__(self, sock: socket.socket, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sock = sock
        self._peer = sock.getpeername()
        self._patience = patience
        self._clock = clock
        self._moved_at = self._alive_at = clock()

    def look(self, again: bool) -> None:
        """Call this whenever no byte has moved for LOOK_SECONDS; `again`: nor has one since the last call.

        Raises:
            TimeoutError: No byte has moved for too long.
            OSError: The lane is dead: no packet comes, and the port can't be reached.
        """
        now = self._clock()
        if not again:
            self._moved_at = self._alive_at = now - LOOK_SECONDS
        if now - self._moved_at >= self._patience:
            raise TimeoutError
        if not self._silent():
            return
        if not _connects(self._sock.family, self._peer) and self._silent():
            raise OSError("the server's port for it does not answer any more")
        self._alive_at = self._clock()

    def _silent(self) -> bool:
        silent, known = self._clock() - self._alive_at, silent_for(self._sock)
        return (silent if known is None else min(silent, known)) >= SILENT_SECONDS


def silent_for(sock: socket.socket) -> float | None:
    """Seconds since a TCP connection received a packet that was of use; None if the system doesn't say."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AGES.size)
    except OSError:
        return None
    return min(_AGES.unpack(info)) / 1000 if len(info) == _AGES.size else None


def _connects(family: int, address: tuple[object, ...]) -> bool:
    """Whether a port lets connections be made. Also true if this process can't try, as it has no descriptor left."""
    try:
        with socket.socket(family) as tried:
            tried.settimeout(TRY_SECONDS)
            tried.connect(address)
    except OSError as error:
        return error.errno in OWN_LIMITS
    return True
